"""The report: a page a paper, with each table, figure and claim that is committed and links to the records behind them.

`make docs` builds the pages (docs/repository.py); no copy of them is committed. Links are relative to `papers/` of the site, where the files of the
repository lie in `../repository/`.
"""

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from relinear.draw.index import _committed
from relinear.draw.pages import drawn
from relinear.draw.render import markdown
from relinear.plan.specs import Artefact, Paper, available, papers

SITE = "../repository"
VERDICTS = ("claim", "source", "verdict", "figures", "reason")
SHOWN = ("png", "md")  # what stands on the page; of both the picture
LINKED = ("csv", "pdf", "provenance.json", "claims.csv")


def report(root: Path) -> dict[str, tuple[str, set[str]]]:
    """Paper -> its page as Markdown, and the files of the repository at `root` that it links to, as paths in it."""
    folder = root / "workflow/papers"
    if not folder.is_dir():
        return {}
    artefacts = available(folder)
    found = {}
    for name, paper in papers(folder).items():
        own = [artefact for artefact in artefacts.values() if artefact.paper == name]
        if own:
            found[name] = _page(paper, own, root)
    return found


def _page(paper: Paper, artefacts: list[Artefact], root: Path) -> tuple[str, set[str]]:
    links: set[str] = set()

    def link(words: str, path: Path) -> str:
        links.add(place := path.relative_to(root).as_posix())
        return f"[{words}]({SITE}/{place})"

    order = {label: i for i, label in enumerate(paper.labels)}
    parts = [f"# {paper.title}", f"[arXiv {paper.arxiv}](https://arxiv.org/abs/{paper.arxiv})" if paper.arxiv else ""]
    for artefact in sorted(artefacts, key=lambda artefact: order.get(artefact.label, len(order))):
        parts += [f"## {artefact.label}", f"{artefact.says}. `snakemake {artefact.name}` makes it from {link('its spec', artefact.file)}."]
        places = list(places_of(artefact, root / "results/reference"))
        parts += [part for place, stem in places for part in _place(place, stem, root, link)] or ["Not made yet."]
    if missing := [label for label in paper.labels if label not in {artefact.label for artefact in artefacts}]:
        parts += ["## Not in the suite", f"{', '.join(missing)}."]
    return "\n\n".join(filter(None, parts)) + "\n", links


def places_of(artefact: Artefact, reference: Path) -> Iterator[tuple[Path, str]]:
    """Where an artefact is committed, without suffix, and what its claims file is called before `claims.csv`."""
    benchmarks = [(path.with_suffix(""), f"{artefact.name}.") for path in sorted(reference.glob(f"*/{artefact.name}.png"))]
    for place, stem in dict.fromkeys([*_committed(artefact, reference), *benchmarks]):
        if any(place.with_name(f"{place.name}.{suffix}").is_file() for suffix in SHOWN):
            yield place, stem


def _place(place: Path, stem: str, root: Path, link: Any) -> Iterator[str]:
    """What is committed in one folder: the picture or the table, the claims, the files."""
    folder = place.relative_to(root / "results/reference").parts[0]
    yield f"### In `{folder}`"
    files = {suffix: place.with_name(f"{place.name}.{suffix}") for suffix in (*SHOWN, *LINKED)} | {"claims.csv": place.parent / f"{stem}claims.csv"}
    told = json.loads(files["provenance.json"].read_text(encoding="utf-8")) if files["provenance.json"].is_file() else {}
    records = {row: _records(cells, root / "results/reference" / folder) for row, cells in told.get("cells", {}).items()}
    linked = {row: " ".join(link(f"{path.parent.parent.name}/{path.parent.name}", path) for path in paths) for row, paths in records.items()}
    if files["png"].is_file():
        yield "!" + link(f"{place.name}, {folder}", files["png"])
        if any(linked.values()):
            yield "Records: " + "; ".join(f"{row}: {words}" for row, words in linked.items() if words) + "."
    else:
        yield from _tables(files["md"], linked)
    if files["claims.csv"].is_file():
        claims = csv.DictReader(files["claims.csv"].read_text(encoding="utf-8").splitlines())
        yield markdown(VERDICTS, [[row[column].replace("|", "\\|") for column in VERDICTS] for row in claims], align="left")
    yield "Files: " + ", ".join(link(suffix, path) for suffix, path in files.items() if path.is_file() and suffix != "md") + "."


def _tables(path: Path, linked: Mapping[str, str]) -> Iterator[str]:
    """The tables of a drawn Markdown file after its words. The first, of a row a line of the spec, links each row to its records."""
    text = path.read_text(encoding="utf-8")
    yield "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    for i, table in enumerate(drawn(path)):
        rows = [list(row.values()) for row in table]
        head = list(table[0]) if table else []
        if not i and len(rows) == len(linked):
            head, rows = [*head, "Records"], [[*row, words] for row, words in zip(rows, linked.values(), strict=True)]
        yield markdown(head, rows, align="left")


def _records(cells: Mapping[str, Any], scale: Path) -> list[Path]:
    """The committed run.json files that a row's cells come from. Their paths name the results that the folder was taken from."""
    found: dict[Path, None] = {}
    for origin in cells.values():
        for name in [origin] if isinstance(origin, str) else origin or []:
            path = scale.joinpath(*Path(name.partition("#")[0]).parts[2:])
            if path.name == "run.json" and path.is_file():
                found[path] = None
    return list(found)
