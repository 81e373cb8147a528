"""The report: a page a paper, with its claims and what became of them, each table and figure that is
committed, and links to the records behind them.

`make docs` builds the pages (docs/repository.py); no copy of them is committed. Links are relative to
`papers/` of the site, where the files of the repository lie in `../repository/`.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from relinear.core import store
from relinear.draw.beside import PROVENANCE, VERDICTS, lines_of
from relinear.draw.claims import COLUMNS, tally
from relinear.draw.deviations import objected
from relinear.draw.index import _committed, records_behind
from relinear.draw.provenance import Origin
from relinear.draw.render import NOT_RUN, markdown, titled
from relinear.errors import UserError
from relinear.plan.specs import Artefact, Finding, Paper, available, papers
from relinear.records import read_committed

Told = Mapping[Path, list[dict[str, str]]]  # the place of a drawing -> the verdicts on its claims
Link = Callable[[str, Path], str]  # words, a file -> the words as a link to it
SITE = "../repository"
SHOWN = ("png", "md")  # the file that stands on the page; where there are both, the picture
COUNTED = "- Counted: no measurement is behind it."
LINKED = ("csv", "pdf")


def report(root: Path) -> dict[str, tuple[str, set[str]]]:
    """Paper -> its page as Markdown, and the files of the repository at `root` that it links to, as paths in
    it."""
    folder = root / "workflow/papers"
    if not folder.is_dir():
        return {}
    artefacts = available(folder)
    found = {}
    for name, paper in papers(folder).items():
        own = [artefact for artefact in artefacts.values() if artefact.paper == name]
        if own:
            found[name] = _page(name, paper, own, list(artefacts.values()), root)
    return found


def _page(
    name: str, paper: Paper, artefacts: list[Artefact], every: list[Artefact], root: Path
) -> tuple[str, set[str]]:
    links: set[str] = set()

    def link(words: str, path: Path) -> str:
        links.add(place := path.relative_to(root).as_posix())
        return f"[{words}]({SITE}/{place})"

    order = {label: i for i, label in enumerate(paper.labels)}
    artefacts = sorted(artefacts, key=lambda artefact: order.get(artefact.spec.label, len(order)))
    parts = [
        f"# {paper.title}",
        f"[arXiv {paper.arxiv}](https://arxiv.org/abs/{paper.arxiv})" if paper.arxiv else "",
    ]
    if paper.findings:
        parts += [
            "## To take home",
            "\n".join(f"- {said(finding, root, link)}" for finding in paper.findings),
        ]
    parts += _claims(
        name, [*artefacts, *(artefact for artefact in every if artefact.paper != name)], root, link
    )
    for artefact in artefacts:
        parts += [
            f"## {artefact.spec.label}",
            (
                f"{artefact.spec.says[:1].upper()}{artefact.spec.says[1:]}. `snakemake {artefact.name}` makes"
                f" it from {link('its spec', artefact.file)}."
            ),
        ]
        if "md" not in artefact.spec.suffixes:  # a table has them itself
            parts.append("\n".join(f"- {note.where}: {note.text}." for note in artefact.spec.misprints))
        parts.append(f"Not run: {artefact.spec.not_run}." if artefact.spec.not_run else "")
        if artefact.spec.draw != "deviations":  # which says it itself
            parts.append(objected(artefact.spec))
        places = places_of(artefact, root / "results/reference")
        parts += [part for place in places for part in _place(artefact, place, root, link)] or [
            "Not run yet."
        ]
    if missing := [
        label for label in paper.labels if label not in {artefact.spec.label for artefact in artefacts}
    ]:
        parts += ["## Not in the suite", f"{', '.join(missing)}."]
    return "\n\n".join(filter(None, parts)) + "\n", links


def said(finding: Finding, root: Path, link: Link) -> str:
    """A finding as a sentence with its numbers, and a link to its table. Raises UserError for a cell that is
    not there and for values in another order."""
    path = root / "results/reference" / finding.of
    try:
        rows = {
            row.get("row") or row["run"]: {name: _number(cell) for name, cell in row.items()}
            for row in lines_of(path)
        }
        text = finding.says.format(rows=rows)
        values = [[(*cell, float(rows[cell[0]][cell[1]])) for cell in cells] for cells in finding.ascending]
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"a finding reads {finding.of}: {error!r}") from error
    for found in values:
        if any(low[2] >= high[2] for low, high in zip(found, found[1:], strict=False)):
            rising = ", ".join(f"{run} {column} {value:g}" for run, column, value in found)
            raise UserError(f"a finding is not what {finding.of} says: {rising} do not rise: {finding.says}")
    return f"{text} ({link(Path(finding.of).stem, path)}, `{Path(finding.of).parts[0]}`)"


def _number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell


def _claims(name: str, artefacts: list[Artefact], root: Path, link: Link) -> list[str]:
    """The claims of a paper that tables and figures test, in whatever folder, and all that those in its own
    folder test.

    A claim stands there once for each result, with all that tested it and all committed places that have it,
    or once as not run.
    """
    reference, rows = root / "results/reference", []
    told = VERDICTS.of_all(reference)
    of: dict[Path, Artefact] = {}  # a drawing with verdicts -> what they judge
    # a claim with its verdict, figures and reason -> the drawings that have it
    found: dict[tuple[str, ...], list[Path]] = {}
    for artefact in artefacts:
        for place, lines in judged(artefact, reference, told).items():
            of[place] = artefact
            for row in lines:
                found.setdefault(tuple(row[column] for column in COLUMNS), []).append(place)
    for result, places in found.items():
        row = dict(zip(COLUMNS, result, strict=True))
        if name in (row["paper"], *(of[place].paper for place in places)):
            folders = dict.fromkeys(place.parents[1] for place in places)
            where = [link(f"`{folder.name}`", folder / VERDICTS.file) for folder in folders]
            tested = ", ".join(dict.fromkeys(of[place].spec.label for place in places))
            about = {"tested by": tested, "at": ", ".join(where), "evidence": row["figures"]}
            rows.append(_claim(row | about))
    tested = {artefact.name for artefact in of.values()}
    for artefact in (artefact for artefact in artefacts if artefact.name not in tested):
        for claim in artefact.spec.claims:
            if name in (claim.paper, artefact.paper):
                published = f"published {claim.published}" if claim.published else ""
                about = {"tested by": artefact.spec.label, "at": link("its spec", artefact.file)}
                about |= {"verdict": NOT_RUN, "evidence": published, "reason": artefact.spec.not_run}
                rows.append(_claim(claim.model_dump() | {"whose": claim.whose} | about))
    if not rows:
        return []
    verdicts = [row["verdict"] for row in rows]
    said = (
        f"{tally(verdicts)}, {verdicts.count(NOT_RUN)} {NOT_RUN}. A claim that was tested several times"
        " stands there for each result."
    )
    return ["## Claims", said, titled(rows, align="left")]


def _claim(told: Mapping[str, Any]) -> dict[str, str]:
    """A row of a page's claims."""
    titles = ("claim", "source", "tested by", "at", "whose", "verdict", "evidence", "reason")
    return {title: told[title].replace("|", "\\|") for title in titles}


def places_of(artefact: Artefact, reference: Path) -> Iterator[Path]:
    """The places where an artefact is committed, without suffix."""
    for place in dict.fromkeys(_committed(artefact, reference)):
        if any(place.with_name(f"{place.name}.{suffix}").is_file() for suffix in SHOWN):
            yield place


def judged(artefact: Artefact, reference: Path, told: Told) -> Told:
    """The committed verdicts on an artefact's claims, of all in `told` (`VERDICTS.of_all`), those of drawings
    that are committed first. Of a figure whose weights are not committed there may be the verdicts alone."""
    every = dict.fromkeys(place.parents[1] for place in told)
    places = [*places_of(artefact, reference), *(of / artefact.paper / artefact.stem for of in every)]
    return {place: lines for place in dict.fromkeys(places) if (lines := told.get(place))}


def _place(artefact: Artefact, place: Path, root: Path, link: Link) -> Iterator[str]:
    """The committed results of one folder: the picture or the table, and the files."""
    folder = place.relative_to(root / "results/reference").parts[0]
    yield f"### In `{folder}`"
    scale = root / "results/reference" / folder
    files = {suffix: place.with_name(f"{place.name}.{suffix}") for suffix in (*SHOWN, *LINKED)}
    files |= {PROVENANCE.file: scale / PROVENANCE.file}
    files |= {VERDICTS.file: scale / VERDICTS.file} if VERDICTS.of(place) else {}
    told = PROVENANCE.of(place) or {}
    records = {
        row: {column: records_of(origin, scale) for column, origin in cells.items()}
        for row, cells in told.get("cells", {}).items()
    }
    if files["png"].is_file():
        yield "!" + link(f"{place.name}, {folder}", files["png"])
        behind = {
            row: dict.fromkeys(path for paths in cells.values() for path in paths)
            for row, cells in records.items()
        }
        said = [
            f"{row}: " + ", ".join(link(path.parent.name, path) for path in paths)
            for row, paths in behind.items()
            if paths
        ]
        yield f"Records: {'; '.join(said)}." if said else ""
    else:
        yield from _tables(files["md"], artefact, list(records.values()), link)
    yield (
        "Files: "
        + ", ".join(link(suffix, path) for suffix, path in files.items() if path.is_file() and suffix != "md")
        + "."
    )
    folders = [path.parent for cells in records.values() for paths in cells.values() for path in paths]
    beside = [
        (root / name).with_suffix(".provenance.json")
        for name in told.get("sources", {})
        if name.endswith(".csv")
    ]
    benchmarks = [json.loads(read_committed(file)) for file in beside if file.is_file()]
    counted = not (artefact.reads() or artefact.files())
    if counted:
        yield COUNTED
        return
    rows = [root / name for name in told.get("sources", {}) if name.endswith(".json")]
    for record in (json.loads(read_committed(file)) for file in rows):
        benchmarks.append(record | {"gpu": record["device"]})
    yield made_with([*records_behind(folders, scale), *benchmarks])


def made_with(records: Iterable[Mapping[str, Any]]) -> str:
    """The cards, versions, commits and days of records of stages and of benchmarks, an item for each
    environment.

    A plus follows a commit whose tree had uncommitted changes. Empty where no record names versions.
    """
    found: dict[str, tuple[set[str], set[str]]] = {}
    for record in records:
        for entry in [record, *_sessions(record)]:
            if "versions" in entry:
                git, versions = entry.get("git", entry), entry["versions"]
                card = (
                    (entry.get("hardware") or {}).get("gpu") or entry.get("gpu") or record.get("gpu") or "CPU"
                )
                libraries = [
                    f"{name} {versions[name]}"
                    for name in ("torch", "transformers", "triton")
                    if name in versions
                ]
                commits, days = found.setdefault(", ".join([card, *libraries]), (set(), set()))
                commits.add(f"`{git['commit'][:7]}`" + "+" * bool(git.get("dirty")))
                days.add(entry["started"][:10])
    lines = []
    for environment, (commits, days) in sorted(found.items()):
        span = " to ".join(dict.fromkeys((min(days), max(days))))
        lines.append(f"- Made with {environment}; commits {', '.join(sorted(commits))}; {span}.")
    return "\n".join(lines)


def _sessions(record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The sessions that a benchmark's record lists."""
    for name in ("sessions", "runs"):
        if isinstance(record.get(name), list):
            yield from record[name]


def _tables(
    path: Path, artefact: Artefact, records: list[Mapping[str, list[Path]]], link: Link
) -> Iterator[str]:
    """A drawn Markdown file, of a table the words first. Each cell of the first table leads to its record; of
    a mean over seeds, to each."""
    text, columns = read_committed(path), getattr(artefact.spec, "columns", ())
    if not columns:  # words and tables belong together there
        yield text
        return
    yield "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    for i, table in enumerate(re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)):
        head, _, *rows = (
            [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
        )
        names = [
            next((c.name for c in columns if title == c.heading or title.startswith(f"{c.heading} (n=")), "")
            for title in head
        ]
        if not i and len(rows) == len(records):
            for row, of in zip(rows, records, strict=True):
                row[:] = [
                    _linked(cell, of.get(name, []), link) for cell, name in zip(row, names, strict=True)
                ]
        yield markdown(head, rows, align="left")


def _linked(text: str, records: list[Path], link: Link) -> str:
    """A cell that leads to its record; to further ones by their number."""
    if not (text and records):
        return text
    return " ".join(
        [link(text, records[0]), *(link(str(i), path) for i, path in enumerate(records[1:], start=2))]
    )


def records_of(origin: Origin, scale: Path) -> list[Path]:
    """The committed records that a cell comes from, at the paths that they have in the site
    (docs/repository.py)."""
    names = [name.partition("#") for name in ([origin] if isinstance(origin, str) else origin or [])]
    paths = [scale / node / store.RECORD for place, _, node in names if Path(place).name == store.NODES]
    return [path for path in dict.fromkeys(paths) if store.exists(path)]
