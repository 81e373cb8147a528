"""The headline table: T2R, Hedgehog, SUPRA, LoLCATs and Lizard on one teacher, beside published numbers."""

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from pydantic import model_validator

from relinear.draw._inputs import (
    Evaluation,
    Misprint,
    Origin,
    PaperFile,
    Reference,
    Source,
    Strict,
    Task,
    read_stage,
    read_yaml,
)
from relinear.draw._render import (
    NOT_RUN,
    count,
    demonstration,
    markdown,
    percent,
    plus_minus,
    write_csv,
    write_provenance,
    write_text,
)
from relinear.draw.claims import Claim, Judgement, tally, write_claims

if TYPE_CHECKING:
    from relinear.plan.plan import Plan

TaskColumn = Literal[
    "piqa_acc",
    "piqa_acc_norm",
    "arc_easy_acc",
    "arc_challenge_acc_norm",
    "hellaswag_acc_norm",
    "winogrande_acc",
    "mmlu_acc",
]
Average = Literal["avg", "avg_no_mmlu"]
TASKS: tuple[TaskColumn, ...] = get_args(TaskColumn)
AVERAGES: tuple[Average, ...] = get_args(Average)

BESIDE = ("lambada_openai_acc", "boolq_acc")  # tasks that no paper's table has, where a scale scores them; in no average
SCORED = (*TASKS, *BESIDE)

# What each average is the unweighted mean of, as Lizard and LoLCATs have it: PIQA counts once, by acc.
AVERAGED: dict[Average, tuple[TaskColumn, ...]] = {
    "avg": tuple(task for task in TASKS if task != "piqa_acc_norm"),
    "avg_no_mmlu": tuple(task for task in TASKS if task not in ("piqa_acc_norm", "mmlu_acc")),
}

TITLES = {
    "piqa_acc": "PIQA",
    "piqa_acc_norm": "PIQA norm",
    "arc_easy_acc": "ARC-e",
    "arc_challenge_acc_norm": "ARC-c norm",
    "hellaswag_acc_norm": "HellaSwag norm",
    "winogrande_acc": "WinoGrande",
    "mmlu_acc": "MMLU",
    "avg": "Avg",
    "avg_no_mmlu": "Avg, no MMLU",
    "lambada_openai_acc": "LAMBADA",
    "boolq_acc": "BoolQ",
}

MEANS = ("ppl", *SCORED, *AVERAGES)  # over the seeds of a row
DESCRIBED = ("run", "method", "variant", "scale", "trainable_params", "distill_tokens", "finetune_tokens")
MEASURED = (
    *DESCRIBED,
    "ppl",
    *TASKS,
    *AVERAGES,
    *BESIDE,
    "ppl_stderr",
    *(f"{task}_{suffix}" for task in SCORED for suffix in ("stderr", "n")),
    *(f"{average}_stderr" for average in AVERAGES),
    *("gate", "collapsed", "seeds"),
    *(f"{column}_seed_sd" for column in MEANS),
)
PUBLISHED = (
    *(f"published_{column}" for column in (*TASKS, *AVERAGES)),
    "published_model",
    "published_source",
)
COLUMNS = (*MEASURED, *PUBLISHED)


class PublishedIn(Strict):
    """A place that prints numbers, with the paper's own label of it."""

    paper: str
    label: str


class Published(Strict):
    """One row of one paper's table, in percent, for one model; `derived` averages are not printed there."""

    model: str
    source: str
    origin: Origin
    values: dict[TaskColumn | Average, float]
    derived: tuple[Average, ...] = ()


class Row(Strict):
    run: str
    published: tuple[Published, ...]


class Table(Strict):
    rows: tuple[Row, ...]
    misprints: tuple[Misprint, ...]


class Headline(PaperFile):
    """workflow/papers/headline.yaml."""

    title: str
    papers: dict[str, Reference]
    sources: dict[str, PublishedIn]
    table2: Table
    claims: tuple[Claim, ...]

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        rows = [row.run for row in self.table2.rows]
        for row in self.table2.rows:
            for entry in row.published:
                _known("source", entry.source, self.sources)
        for source in self.sources.values():
            _known("paper", source.paper, self.papers)
        for claim in self.claims:
            _known("paper", claim.paper, self.papers)
            _known("column", claim.column, ("ppl", *TASKS, *AVERAGES))
            for run in claim.runs:
                _known("run", run, rows)
        return self


def _known(what: str, name: str, names: Any) -> None:
    if name not in names:
        raise ValueError(f"no {what} {name!r}; have {sorted(names)}")


def read(path: str | Path) -> Headline:
    """Read and validate workflow/papers/headline.yaml. Raises ValueError naming every offending key."""
    return read_yaml(path, Headline)


def table2(
    metrics: Mapping[str, str | Path | None],
    paper: Headline,
    out: Path,
    scale: str,
    teacher: str | None = None,
    repeats: Mapping[str, Mapping[str, str | Path]] | None = None,
) -> list[Path]:
    """The headline table: every method on the same teacher under one harness, beside the published numbers.

    metrics: run -> its evaluate/metrics.json (run.json beside it), or None for a run that this scale does not
    have. Its order is the order of the rows. Rows of the paper that it does not name follow as `not run`;
    runs that the paper does not name are rows without published cells.
    teacher: name of the pretrained model, for the Markdown's first line.
    repeats: row -> its trainings with further seeds, run -> metrics.json; the row shows the mean over all `seeds` of them.

    Accuracies and averages are percent, perplexity is raw. An average is the unweighted mean of its tasks;
    its standard error is propagated from theirs, taken as independent. Of a mean over seeds the standard error is
    that of the items, which are the same for all and so do not average out, and that of the mean of the seeds,
    combined; `<column>_seed_sd` is the sample standard deviation over seeds.

    Writes table2.csv, table2.md, table2.provenance.json and claims.csv into the folder `out`, returns their
    paths. Raises FileNotFoundError for a path that is not there, ValueError for metrics of another run, stage
    or scale.
    """
    published = {row.run: row.published for row in paper.table2.rows}
    names = [*metrics, *(run for run in published if run not in metrics)]
    evaluations: dict[str, Evaluation] = {}
    sources: dict[str, list[Source]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for run in names:
        if (path := metrics.get(run)) is not None:
            found = [read_stage(p, Evaluation, r, "evaluate", scale) for r, p in {run: path, **(repeats or {}).get(run, {})}.items()]
            evaluations[run], sources[run] = found[0][0], [source for _, source in found]
            measured = _over_seeds([_measured(evaluation) for evaluation, _ in found])
        else:
            measured = dict.fromkeys(MEASURED, NOT_RUN) | {"run": run}
        rows[run] = measured | _published(published.get(run, ()), paper.sources)

    out = Path(out)
    written = [out / name for name in ("table2.csv", "table2.md", "table2.provenance.json", "claims.csv")]
    write_csv(written[0], COLUMNS, rows.values())
    judgements = write_claims(written[3], paper.claims, rows, scale)
    write_text(written[1], _as_markdown(paper, rows, evaluations, judgements, scale, teacher))
    entries = {row.run: paper.at(f"table2/rows/{index}") for index, row in enumerate(paper.table2.rows)}
    cells = {run: _provenance(row, sources.get(run, []), entries.get(run)) for run, row in rows.items()}
    write_provenance(written[2], "table2.csv", scale, cells, [source for of_row in sources.values() for source in of_row])
    return written


def _measured(evaluation: Evaluation) -> dict[str, Any]:
    """The cells of a row that one evaluate/metrics.json gives; a task that it lacks is `not run`."""
    row: dict[str, Any] = {
        **{column: getattr(evaluation, column) for column in DESCRIBED},
        "ppl": evaluation.perplexity.value,
        "ppl_stderr": evaluation.perplexity.stderr,
        "gate": "passed" if evaluation.gate.passed else "failed",
        "collapsed": evaluation.collapsed,
    }
    for column in SCORED:
        name, _, metric = column.partition("_acc")
        row |= _score(column, f"acc{metric}", evaluation.tasks.get(name))
    for average, columns in AVERAGED.items():
        values, errors = [row[c] for c in columns], [row[f"{c}_stderr"] for c in columns]
        complete = NOT_RUN not in values
        row[average] = math.fsum(values) / len(values) if complete else NOT_RUN
        row[f"{average}_stderr"] = NOT_RUN if not complete else _of_mean(errors)
    return row


def _over_seeds(trainings: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of one measured with each seed: what is said of the first holds for all but for what was measured."""
    row: dict[str, Any] = trainings[0] | {"seeds": len(trainings)} | {f"{column}_seed_sd": None for column in MEANS}
    row["gate"] = "failed" if any(t["gate"] == "failed" for t in trainings) else "passed"
    row["collapsed"] = any(t["collapsed"] for t in trainings)
    for column in MEANS:
        values, errors = [t[column] for t in trainings], [t[f"{column}_stderr"] for t in trainings]
        if NOT_RUN in values:
            row |= dict.fromkeys((column, f"{column}_stderr", f"{column}_seed_sd"), NOT_RUN)
        elif len(trainings) > 1:
            spread = stdev(values)
            items = None if None in errors else math.hypot(fmean(errors), spread / math.sqrt(len(values)))
            row |= {column: fmean(values), f"{column}_stderr": items, f"{column}_seed_sd": spread}
    return row


def _score(column: str, metric: str, task: Task | None) -> dict[str, Any]:
    if task is None or (value := getattr(task, metric)) is None:
        return dict.fromkeys((column, f"{column}_stderr", f"{column}_n"), NOT_RUN)
    stderr = getattr(task, f"{metric}_stderr")
    return {
        column: 100 * value,
        f"{column}_stderr": None if stderr is None else 100 * stderr,
        f"{column}_n": task.n,
    }


def _of_mean(errors: list[float | None]) -> float | None:
    """Standard error of a mean of independent values; unknown if one of theirs is."""
    return None if None in errors else math.hypot(*errors) / len(errors)


def _published(entries: tuple[Published, ...], sources: Mapping[str, PublishedIn]) -> dict[str, Any]:
    """The published cells of a row: the first entry's; empty where no paper reports any."""
    if not entries:
        return dict.fromkeys(PUBLISHED)
    shown = entries[0]
    origin = str(shown.origin)
    if shown.derived:
        origin += f"; {' and '.join(shown.derived)} computed from its cells"
    return {
        **{f"published_{column}": shown.values.get(column) for column in (*TASKS, *AVERAGES)},
        "published_model": shown.model,
        "published_source": f"{sources[shown.source].label} ({origin})",
    }


def _provenance(row: Mapping[str, Any], sources: list[Source], entry: str | None) -> dict[str, str | list[str] | None]:
    """Column -> the file that its cell comes from, or the files where it is of several seeds; None where the cell is empty or not run."""
    files = [source.file for source in sources]
    origins: dict[str, str | list[str] | None] = dict.fromkeys(MEASURED, files[0] if len(files) == 1 else files or None)
    origins |= dict.fromkeys(PUBLISHED, f"{entry}/published/0")
    return {column: None if cell in (None, NOT_RUN) else origins[column] for column, cell in row.items()}


def _as_markdown(
    paper: Headline,
    rows: Mapping[str, Mapping[str, Any]],
    evaluations: Mapping[str, Evaluation],
    judgements: list[Judgement],
    scale: str,
    teacher: str | None,
) -> str:
    """Ours, then what the papers print, then what a reader must know about both."""
    papers = (*TASKS, *AVERAGES)
    columns = (*papers, *(c for c in BESIDE if any(row[c] != NOT_RUN for row in rows.values())))
    items = {c: {row[f"{c}_n"] for row in rows.values() if isinstance(row[f"{c}_n"], int)} for c in SCORED}
    same = {c: len(ns) == 1 for c, ns in items.items()}  # then n stands in the header, else in each cell
    header = ["Run", "Trained", "Tokens", "Perplexity"]
    header += [f"{TITLES[c]} (n={next(iter(items[c]))})" if same.get(c) else TITLES[c] for c in columns]
    ours = []
    for run, row in rows.items():
        if run not in evaluations:
            ours.append([f"`{run}`", *[NOT_RUN] * (len(header) - 1)])
            continue
        cells = [_cell(row, c, None if same.get(c) else row.get(f"{c}_n")) for c in columns]
        tokens = f"{count(row['distill_tokens'])} + {count(row['finetune_tokens'])}"
        name = (
            f"`{run}`"
            + f", {row['seeds']} seeds" * (row["seeds"] > 1)
            + " (collapsed)" * row["collapsed"]
            + " (gate failed)" * (row["gate"] == "failed")
        )
        ours.append([name, count(row["trainable_params"]), tokens, _cell(row, "ppl", None), *cells])

    printed = [
        [
            f"`{run}`",
            row["published_model"],
            *(_one_decimal(row[f"published_{c}"]) for c in papers),
            row["published_source"],
        ]
        for run, row in rows.items()
        if row["published_model"]
    ]
    measured = [row for run, row in rows.items() if run in evaluations]
    text_tokens = {evaluation.perplexity.tokens for evaluation in evaluations.values()}
    held_out = f" on {count(max(text_tokens))} held-out tokens" if text_tokens else ""
    lines = [
        f"**{paper.title}. Ours, scale `{scale}`" + (f", teacher {teacher}" if teacher else "") + ".**",
        f"Accuracies in percent, each ± its standard error over n items; perplexity{held_out}.",
        "Trained: parameters. Tokens: transfer + finetuning.",
        *["A row of several seeds is their mean, its error that of the items and of the seeds."] * any(row["seeds"] > 1 for row in measured),
        *demonstration(scale),
        "",
        markdown(header, ours),
        "",
        "**Published**, for other teachers and budgets: compare order and distance to the teacher.",
        "",
        markdown(["Run", "Model", *(TITLES[c] for c in papers), "Source"], printed),
        "",
        *(f"- {note.where}: {note.text}." for note in paper.table2.misprints),
        "- No paper reports these tasks for: " + ", ".join(f"`{row.run}`" for row in paper.table2.rows if not row.published) + ".",
        f"- Of the papers' claims: {tally(judgements)} (`claims.csv`).",
    ]
    return "\n".join(lines) + "\n"


def _cell(row: Mapping[str, Any], column: str, n: int | None) -> str:
    if row[column] == NOT_RUN:
        return NOT_RUN
    show = plus_minus if column == "ppl" else percent
    return show(row[column], row[f"{column}_stderr"]) + (f" ({n})" if n is not None else "")


def _one_decimal(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _table2(plan: "Plan") -> list[Path]:
    paper = read(plan.workflow / "papers" / "headline.yaml")
    rows = plan.rows("headline", "table2")
    again = {row: {run: path for run, path in plan.finished("evaluate", plan.repeats(row)).items() if path} for row in rows}
    return table2(plan.finished("evaluate", rows), paper, plan.root, plan.scale, plan.config.teacher.asset, again)


ARTEFACTS = {"table2": _table2}
