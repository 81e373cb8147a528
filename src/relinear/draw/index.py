"""The index of all papers' tables and figures, `workflow/papers/README.md`: label, command, needs, minutes
and status of each.

The page shows `page`, which relinear.draw.quote writes from the specs and the committed results.
"""

import json
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

from relinear import records
from relinear.core import store
from relinear.draw.beside import VERDICTS
from relinear.draw.claims import UNTESTED, Verdict
from relinear.draw.render import titled
from relinear.files import MANIFEST
from relinear.plan.names import ROOT
from relinear.plan.specs import Artefact, Paper, available, papers
from relinear.plan.strict import WORKFLOW

NOT_MEASURED = "not measured"


def page(workflow: Path = WORKFLOW, reference: Path = WORKFLOW.parent / "results/reference") -> str:
    """The tables of the index as Markdown. `reference`: the folder of committed results,
    `results/reference`."""
    artefacts = available(workflow / "papers")
    parts = []
    for folder, paper in papers(workflow / "papers").items():
        own = {artefact.spec.label: artefact for artefact in artefacts.values() if artefact.paper == folder}
        labels = paper.labels or tuple(own)
        if not labels:
            continue
        parts.append(f"## {_title(folder, paper)}\n")
        if own:
            rows = [_row(own[label], reference) for label in labels if label in own]
            parts.append(titled(rows, align="left") + "\n")
        if missing := [label for label in labels if label not in own]:
            parts.append(f"Missing, {len(missing)} of {len(labels)}: {', '.join(missing)}.\n")
    return "\n".join(parts)


def _title(folder: str, paper: Paper) -> str:
    return f"`{folder}`: {paper.title}" + (f" (arXiv {paper.arxiv})" if paper.arxiv else "")


def _row(artefact: Artefact, reference: Path) -> dict[str, str]:
    minutes, device = _minutes(artefact, reference)
    return {
        "Label": artefact.spec.label,
        "Shows": artefact.spec.says,
        "Command": f"`snakemake {artefact.name}`",
        "Makes": f"`{artefact.outputs(f'results/<scale>/{artefact.paper}')[0]}`",
        "Needs": _needs(artefact, device, reference),
        "Minutes": minutes,
        "Status": _status(artefact, reference),
        "Not run, and why": artefact.spec.not_run,
        "Published beside it": "yes" if artefact.spec.publishes() else "no",
    }


def _needs(artefact: Artefact, device: str, reference: Path) -> str:
    """What an artefact needs: its runs and the device that they were measured on, and the files of benchmarks
    with their devices."""
    runs = list(dict.fromkeys(run for run, _ in artefact.spec.draws()))
    shown = f"{', '.join(f'`{run}`' for run in runs)}{device and '; ' + device}" if runs else ""
    return "; ".join(
        filter(
            None,
            (shown, *(f"`{file}`, measured on {_device_of(file, reference)}" for file in artefact.files())),
        )
    )


def _device_of(file: str, reference: Path) -> str:
    """The device of a benchmark: a CPU where the provenance of its committed rows names one, else a GPU."""
    provenance = reference / Path(file).relative_to("results").with_suffix(".provenance.json")
    return (
        "a CPU"
        if provenance.is_file() and "cpu" in json.loads(records.read_committed(provenance))
        else "a GPU"
    )


def _minutes(artefact: Artefact, reference: Path) -> tuple[str, str]:
    """The minutes of all stages behind an artefact, and their device, in the first folder in which all its
    measurements are committed."""
    for scale in _folders(reference) if artefact.reads() else ():
        folders = [reference / scale / "runs" / run / measure for run, measure in artefact.spec.draws(scale)]
        if all(map(store.has, folders)):
            behind = records_behind(folders, reference / scale)
            devices = {record.get("hardware", {}).get("device", "cpu") for record in behind}
            return (
                f"{sum(record['wall_seconds'] for record in behind) / 60:.0f} ({scale})",
                "a GPU" if "cuda" in devices else "a CPU",
            )
    return NOT_MEASURED, ""


def _folders(reference: Path) -> list[str]:
    """Committed folders of runs, in the order in which minutes are looked up, which is that of scales, `mini`
    before `smollm2`, and of doses, a part before the whole. Verdicts are looked up in reverse order."""

    def rank(name: str) -> tuple[str, float, str]:
        manifest = reference / name / MANIFEST
        made = ROOT.fullmatch(
            records.once(records.read_manifest, manifest)["scale"] if manifest.is_file() else name
        )
        return (made["scale"], float(made["budget"] or 1), name) if made else ("", 0.0, name)

    return sorted((folder.name for folder in store.campaigns(reference)), key=rank)


@cache
def _record(file: Path) -> dict[str, Any]:
    """A committed record, read once in a process: many tables show the same runs."""
    return json.loads(records.read_committed(file))


def records_behind(folders: list[Path], scale: Path) -> list[dict[str, Any]]:
    """The records in these folders and those of all their parents, each once."""
    found: dict[Path, dict[str, Any]] = {}
    waiting = list(folders)
    while waiting:
        folder = waiting.pop()
        file = folder / "run.json"
        if folder in found or not store.exists(file):
            continue
        found[folder] = _record(file)
        waiting += [scale / records.place(parent["path"]) for parent in found[folder]["parents"].values()]
    return list(found.values())


def _status(artefact: Artefact, reference: Path) -> str:
    """The status of an artefact: the verdicts on the papers' claims and on our own questions, each once, of
    the first folder that has one; or that it is drawn, or that it is not committed."""
    told: dict[str, tuple[str, dict[str, str]]] = {}  # claim -> the folder that speaks for it, and its row
    drawn = ""
    for where in _committed(artefact, reference):
        place = where.relative_to(reference).parts[0]
        for row in VERDICTS.of(where) or () if artefact.spec.claims else ():
            if told.setdefault(row["claim"], (place, row))[1]["verdict"] == UNTESTED != row["verdict"]:
                told[row["claim"]] = (place, row)
        if any(where.with_name(f"{where.name}.{suffix}").is_file() for suffix in ("csv", "png")):
            drawn = drawn or f"drawn ({place})"
    if not told:
        return drawn or "not drawn yet"
    whose = {
        ours: [row for _, row in told.values() if (row.get("whose", "paper") != "paper") == ours]
        for ours in (False, True)
    }
    counts = [f"{'ours: ' * ours}{_counted(rows)}" for ours, rows in whose.items() if rows]
    return f"{'; '.join(counts)} ({', '.join(dict.fromkeys(place for place, _ in told.values()))})"


def _counted(rows: list[dict[str, str]]) -> str:
    found = Counter(row["verdict"] for row in rows)
    return ", ".join(f"{found[verdict]} {verdict}" for verdict in get_args(Verdict) if found[verdict])


def _committed(artefact: Artefact, reference: Path) -> Iterator[Path]:
    """The places where an artefact's files may lie, without suffix."""
    benchmarks = dict.fromkeys(Path(file).parent.name for file in artefact.files())
    for folder in (*benchmarks, *reversed(_folders(reference))):
        yield reference / folder / artefact.paper / artefact.stem
