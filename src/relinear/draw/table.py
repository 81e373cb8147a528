"""Tables: one CSV, the same in Markdown beside what is published, verdicts on the claims, provenance of every
cell."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from relinear.core import store
from relinear.draw import About, Measurements
from relinear.draw.cells import FAILED, Cell, Row, look_in, rows_of, tokens_of
from relinear.draw.claims import Judgement, judge_claim, tally
from relinear.draw.drawing import Drawn
from relinear.draw.provenance import Origin
from relinear.draw.render import NOT_RUN, count, markdown, number, percent, plus_minus, write_csv, write_text
from relinear.plan.forms import contents, told_behind
from relinear.plan.specs import Artefact
from relinear.plan.tables import DATA, Column, Table

BELOW = "**Published**, for other teachers and budgets: compare order and distance to the teacher."
OVER_SEEDS = "A {} of several seeds is their mean, its error that of the items and of the seeds."


def drawn(artefact: Artefact, measured: Measurements, about: About) -> Drawn:
    """A table as CSV and Markdown. A number that was not measured at this scale is `not run`.

    Raises ValueError for a metric that a finished measurement does not have.
    """
    spec: Any = artefact.spec
    everything = rows_of(spec, measured, about)
    rows = [row for row in everything if row.was_run or not row.line.optional]
    names = _names(spec, rows)
    shown = [
        {name: own.get(name, (NOT_RUN, None)) for name in names}
        for own in (_csv_row(artefact, spec, row, about) for row in rows)
    ]

    others = _of_other_trainings(measured, about)

    def write(out: Path, judgements: Sequence[Judgement]) -> None:
        write_csv(
            out / f"{artefact.stem}.csv",
            names,
            [{name: value for name, (value, _) in own.items()} for own in shown],
        )
        write_text(out / f"{artefact.stem}.md", _markdown(artefact, spec, rows, judgements, about, others))

    origins = [
        {name: None if value in (None, NOT_RUN) else origin for name, (value, origin) in own.items()}
        for own in shown
    ]
    cells = dict(zip((row.line.name for row in rows), origins, strict=True))
    judge = partial(judge_claim, artefact, about, look_in(everything), tokens_of(rows))
    return Drawn(write, judge, cells, [source for row in rows for source in row.sources])


def _names(spec: Table, rows: list[Row]) -> list[str]:
    """The CSV's columns: those that the spec names, behind them the optional ones that a row has, and the
    trainings of cells that differ in them."""
    names = list(spec.csv or spec.csv_names)
    more = [
        c
        for c in spec.columns
        if c.optional and c.name not in names and any(row.cells[c.name].was_run for row in rows)
    ]
    names += [name for column in more for name in spec.csv_names_of(column)]
    return names + [
        f"{c.name}_seeds" for c in spec.columns if any(_differs(row, row.cells[c.name]) for row in rows)
    ]


def _differs(row: Row, cell: Cell) -> bool:
    """Whether a cell is the mean over another number of trainings than its row's."""
    return cell.trainings not in (None, row.seeds)


def _csv_row(artefact: Artefact, spec: Table, row: Row, about: About) -> dict[str, tuple[Any, Origin]]:
    """All cells of a row that a CSV can have, each with the file or the entry of a spec that it comes from,
    several where it is of several.

    A number that the row's measurements lack is `not run`.
    """
    line, facts, entry = row.line, row.facts, f"{artefact.rows_path}#/{row.line.entry}"
    found: dict[str, tuple[Any, Origin]] = {
        "row": (line.name, entry),
        "run": (line.run, entry),
        "gate": (row.gate, _one(row.gate_files)),
    }
    found |= {text: (line.text.get(text), entry) for text in spec.texts}
    of_run = (
        {fact: facts.get(fact) for fact in (*spec.facts, "collapsed")} | {"seeds": row.seeds} if facts else {}
    )
    if "tokens" in facts:
        steps = [name for name in spec.csv or spec.csv_names if name.endswith("_tokens")]
        of_run |= {name: facts["tokens"].get(name.removesuffix("_tokens"), 0) for name in steps}
    if "doses" in facts:
        of_run["doses"] = (
            None
            if facts["doses"] is None
            else " + ".join(f"{dose.unique} x {dose.epochs}" for dose in facts["doses"])
        )
    found |= {name: (value, row.facts_file) for name, value in of_run.items()}
    columns = {column.name: column for column in spec.columns}
    for name, cell in row.cells.items():
        origin = _one(cell.files) if cell.files else f"{entry}/cells/{name}" if name in line.given else entry
        parts = {
            "": cell.value,
            "_stderr": cell.stderr,
            "_n": cell.n,
            "_seed_sd": cell.seed_sd,
            "_seeds": cell.trainings if cell.was_run else cell.n,
        }
        if columns[name].names_data and cell.was_run:
            parts["_data"] = _data(columns[name], about)
        found |= {f"{name}{part}": (value, origin) for part, value in parts.items()}
    published = spec.published(line.name)
    told = f"{artefact.published_path}#/{artefact.same_as or artefact.stem}/{line.name}"
    found |= {
        f"published_{name}": (published.values.get(name) if published else None, f"{told}/{name}")
        for name in row.cells
    }
    return found | {
        "published_model": (published and published.model, told),
        "published_source": (published and published.source, told),
    }


def _of_several_seeds(rows: list[Row]) -> list[str]:
    """`row` where a row is a mean over trainings, `cell` where cells alone are, nothing where none is."""
    if any(row.seeds > 1 for row in rows):
        return ["row"]
    return ["cell"] if any((cell.trainings or 1) > 1 for row in rows for cell in row.cells.values()) else []


def _one(files: tuple[str, ...]) -> Origin:
    return files[0] if len(files) == 1 else list(files) or None


# --- Markdown ---


def _of_other_trainings(measured: Measurements, about: About) -> list[str]:
    """The runs with measurements of another training than the one whose record lies beside them, each with
    these: its key is another, and it is not known to have left the same files."""
    found: dict[str, list[str]] = {}
    for (run, measure), each in measured.items():
        if each is not None and measure not in about.of_shape and store.has(each.folder):
            for told, now in told_behind(each):
                if now and told["key"] != now["key"] and told.get("contents") != contents(now):
                    found.setdefault(run, []).append(measure)
    return [f"`{run}` ({', '.join(dict.fromkeys(measures))})" for run, measures in sorted(found.items())]


def _markdown(
    artefact: Artefact,
    spec: Table,
    rows: list[Row],
    judgements: Sequence[Judgement],
    about: About,
    others: list[str],
) -> str:
    """The Markdown: our numbers beside or above the papers', then the notes that a reader needs."""
    shown = {(entry.model, entry.source) for line in spec.lines for entry in spec.printed(line.name)}
    below = len(shown) > 1  # in a table of their own, which names the model and the source of each row
    beside = next(iter(shown))[0] if len(shown) == 1 else None
    caption = {f"{column}_n": _most(rows, column) for column in rows[0].cells}
    caption |= {
        f"{column}_chance": f"{chance:g}"
        for column in rows[0].cells
        if (chance := spec.chance(column)) is not None
    }
    lines = [
        (
            f"**{artefact.spec.label}. Ours,"
            f" {about.where('`')}{f'; the paper{chr(39)}s, {beside}' if beside else ''}.**"
        ),
        *(line.format_map(caption) for line in spec.caption),
        *(column.note for column in _shown(spec, rows) if column.note),
        *[OVER_SEEDS.format(what) for what in _of_several_seeds(rows)],
        *([about.demonstration] if about.demonstration else []),
        "",
        _ours(spec, rows, about, beside is not None),
        "",
    ]
    if below:
        lines += [BELOW, "", _published(spec, rows), ""]
    lines += [f"- {note.where}: {note.text}." for note in spec.misprints]
    if below and (without := [f"`{row.line.name}`" for row in rows if spec.published(row.line.name) is None]):
        lines.append(f"- Nothing published stands here beside: {', '.join(without)}.")
    lines += [
        f"- Runs that were measured without the step `{stage}`, which now comes before them:"
        f" {', '.join(f'`{run}`' for run in runs)}."
        for stage, runs in about.later.items()
    ]
    if others:
        lines.append(f"- Measured of another training than the run's committed one: {', '.join(others)}.")
    if judgements:
        lines.append(f"- {_counts(spec, judgements)}.")
    return "\n".join(lines).rstrip("\n") + "\n"


def _counts(spec: Table, judgements: Sequence[Judgement]) -> str:
    """How many of the papers' claims, and how many of our own questions, have each verdict."""
    theirs = [
        (claim.paper, j.verdict) for claim, j in zip(spec.claims, judgements, strict=True) if not claim.ours
    ]
    ours = [j.verdict for claim, j in zip(spec.claims, judgements, strict=True) if claim.ours]
    whose = "papers'" if len({paper for paper, _ in theirs}) > 1 else "paper's"
    counted = {f"of the {whose} claims": [verdict for _, verdict in theirs], "of our own questions": ours}
    return "; ".join(
        f"{what}: {tally(verdicts)}" for what, verdicts in counted.items() if verdicts
    ).capitalize()


def _most(rows: list[Row], column: str) -> str:
    """The n of a column, for the caption."""
    items = [row.cells[column].n for row in rows if isinstance(row.cells[column].n, int)]
    return count(max(items)) if items else "no"


def _data(column: Column, about: About) -> str | None:
    """The name of the data that a column's numbers are of."""
    return about.own_data.get(column.name) or about.data.get(column.measure or "")


def _heading(column: Column, about: About) -> str:
    """A column's title, with the name of the data that its numbers are of."""
    return column.heading.replace(DATA, _data(column, about) or NOT_RUN)


def _shown(spec: Table, rows: list[Row]) -> list[Column]:
    """The columns of the Markdown."""
    return [
        c
        for c in spec.columns
        if c.shown and not (c.optional and not any(row.cells[c.name].was_run for row in rows))
    ]


def _ours(spec: Table, rows: list[Row], about: About, beside: bool) -> str:
    # The other columns have published numbers alone, and are shown where those are.
    rows = [
        row
        for row in rows
        if row.line.run or any(row.line.cells.values()) or (beside and spec.published(row.line.name))
    ]
    columns = _shown(spec, rows)
    header = [*(spec.texts.values() or ["Run"]), *(["Trained", "Tokens"] if spec.trained else [])]
    counted = {c.name for c in columns if c.unit == "percent" and not c.derived}
    items = {
        name: {row.cells[name].n for row in rows if isinstance(row.cells[name].n, int)} for name in counted
    }
    # if one, n stands in the header, else in each cell
    same = {name: len(ns) == 1 for name, ns in items.items()}
    titles = {c.name: _heading(c, about) for c in columns}
    header += [
        f"{titles[c.name]} (n={next(iter(items[c.name]))})" if same.get(c.name) else titles[c.name]
        for c in columns
    ]
    printed_columns = [c for c in columns if c.name in spec.published_columns] if beside else []
    header += [f"paper's {_plain(c)}" for c in printed_columns]
    shown = []
    for row in rows:
        texts = [_word(row.line.text.get(text)) for text in spec.texts] or [f"`{row.line.name}`"]
        cells = [
            _number(c, row.cells[c.name], c.name in counted and not same[c.name])
            + _trainings(row, row.cells[c.name])
            for c in columns
        ]
        published = spec.published(row.line.name)
        printed = published.values if published else {}
        cells += [_printed(c, printed.get(c.name)) for c in printed_columns]
        shown.append(
            [texts[0] + _marks(row), *texts[1:], *(_costs(spec, row) if spec.trained else []), *cells]
        )
    return markdown(header, shown)


def _plain(column: Column) -> str:
    """A column's title in the paper, whose data are its own."""
    return column.heading.replace(f" ({DATA})", "")


def _marks(row: Row) -> str:
    """The warnings that stand before a row's numbers."""
    if not row.was_run:
        return ""
    return (
        f", {row.seeds} seeds" * (row.seeds > 1)
        + " (collapsed)" * bool(row.facts.get("collapsed"))
        + " (gate failed)" * (row.gate == FAILED)
    )


def _costs(spec: Table, row: Row) -> list[str]:
    """Trained parameters, and tokens of each step: unique ones x epochs where the table asks for them and the
    steps' records say them."""
    if "trainable_params" not in row.facts:
        return [NOT_RUN, NOT_RUN]
    if row.facts.get("doses") is not None:
        return [count(row.facts["trainable_params"]), " + ".join(map(str, row.facts["doses"])) or "0"]
    names = [name for name in spec.csv or spec.csv_names if name.endswith("_tokens")]
    tokens = [count(row.facts["tokens"].get(name.removesuffix("_tokens"), 0)) for name in names]
    return [count(row.facts["trainable_params"]), " + ".join(tokens)]


def _published(spec: Table, rows: list[Row]) -> str:
    columns = [c for c in spec.columns if c.name in spec.published_columns]
    shown = [
        [
            f"`{line.name}`",
            published.model,
            *(_printed(c, published.values.get(c.name)) for c in columns),
            published.source,
        ]
        for line in (row.line for row in rows)
        for published in spec.printed(line.name)
    ]
    return markdown(["Run", "Model", *(_plain(c) for c in columns), "Source"], shown)


def _number(column: Column, cell: Cell, with_n: bool) -> str:
    if isinstance(cell.value, str):
        return cell.value
    stderr = cell.stderr if isinstance(cell.stderr, float) else None
    if column.digits:
        return f"{cell.value:.{column.digits}g}" + (f" ± {stderr:.2g}" if stderr is not None else "")
    show = percent if column.unit == "percent" else plus_minus
    return show(cell.value, stderr) + (f" ({cell.n})" if with_n and cell.n is not None else "")


def _trainings(row: Row, cell: Cell) -> str:
    """How many trainings a cell is the mean over, where its row has another number of them."""
    return f" ({cell.trainings} seed{'s' * (cell.trainings != 1)})" if _differs(row, cell) else ""


def _printed(column: Column, value: float | None) -> str:
    if value is None:
        return ""
    if column.digits and 0 < abs(value) < 1:  # as many digits as ours, where two decimals would be fewer
        return f"{value:.{column.digits}g}"
    return f"{value:.1f}" if column.unit == "percent" else number(value)


def _word(text: Any) -> str:
    return {None: "", True: "yes", False: "no"}[text] if text is None or isinstance(text, bool) else str(text)
