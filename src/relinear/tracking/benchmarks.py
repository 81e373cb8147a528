"""What `relinear benchmark` and its sisters measure, as MLflow runs: one for each line of a campaign's file,
below one for the file.

A campaign (`relinear.benchmarks.campaign`) is a CSV with a `<stem>.provenance.json` beside it, or a JSON file
that has both. The texts of a line are its parameters, the numbers its metrics. The runs are written by what
writes those of stages, into experiment relinear-benchmarks.
"""

import csv
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from relinear import records
from relinear.plan.names import digest
from relinear.tracking import mirror, rows, store

ROOT = "benchmarks"  # ends the experiment's name, relinear-benchmarks
BESIDE = ".provenance.json"
# fields of a provenance that name the hardware
MACHINE = ("gpu", "cpu", "machine", "cores", "cores_of_machine", "threads", "memory_gib")


class Campaign(NamedTuple):
    """A file of measurements: the names of its folder and its own, its path, its provenance, its lines."""

    name: str
    path: Path
    about: dict[str, Any]
    lines: list[dict[str, Any]]


def campaigns(results: Path, but: Path | None = None) -> Iterator[Campaign]:
    """The campaigns below a folder, but not below the folder `but`. A file that cannot be read is left out,
    which stderr says."""
    left_out = but and but.resolve()
    for path in mirror.files_below(results, "*.json"):
        if path.name in (mirror.MANIFEST, "run.json", "metrics.json") or left_out in path.parents:
            continue
        table = path.with_name(path.name.removesuffix(BESIDE) + ".csv")
        if path.name.endswith(BESIDE) != table.is_file():
            continue
        try:
            about = records.read_json(path)
            # a drawn table's, or something else
            if "artefact" in about or "timing" not in about and "command" not in about:
                continue
            lines = list(csv.DictReader(table.open(newline=""))) if table.is_file() else about.pop("rows", [])
        except (records.BrokenError, ValueError) as error:
            print(f"{error}; what it measured is left out", file=sys.stderr)
            continue
        of = table if table.is_file() else path
        yield Campaign(f"{of.resolve().parent.name}/{of.stem}", of, about, lines)


def write(uri: str, results: Path, suffix: str = "", but: Path | None = None) -> int:
    """Write the lines of all campaigns below `results` that the store lacks; returns how many were added.
    Raises StoreError."""
    found = [campaign for campaign in campaigns(results, but) if campaign.lines]
    if not found:
        return 0
    with store.access(uri), store.without_sync():
        client = store.connect(uri)
        experiment = store.experiment_of(client, uri, f"{ROOT}{suffix}")
        there = {run.data.tags.get("key"): run for run in store.search(client, experiment)}
        return sum(_campaign(client, experiment, campaign, there) for campaign in found)


def _campaign(client: Any, experiment: str, campaign: Campaign, there: dict[str | None, Any]) -> int:
    lines = {digest([campaign.name, campaign.about.get("command"), line]): line for line in campaign.lines}
    missing = {
        key: line for key, line in lines.items() if key not in there or there[key].info.status != "FINISHED"
    }
    above = next(
        (
            run.info.run_id
            for run in there.values()
            if run.data.tags.get(rows.KIND) == ROOT and run.info.run_name == campaign.name
        ),
        "",
    )
    if not missing:
        return 0
    tags = {rows.KIND: ROOT, "key": f"file {campaign.name}"}
    above = above or client.create_run(experiment, tags=tags, run_name=campaign.name).info.run_id
    beside = (campaign.path, campaign.path.with_name(campaign.path.stem + BESIDE))
    store.log_files(client, above, {path.name: path for path in beside if path.is_file()})
    for key, line in missing.items():
        if key in there:  # an earlier call was cut short
            client.delete_run(there[key].info.run_id)
        _line(client, experiment, above, campaign, key, line)
    client.set_terminated(above)
    return len(missing)


def _line(
    client: Any, experiment: str, above: str, campaign: Campaign, key: str, line: dict[str, Any]
) -> None:
    numbers = {name: number for name, value in line.items() if (number := _number(value)) is not None}
    settings = {
        name: value for name, value in line.items() if name not in numbers and value not in ("", None)
    }
    session = _session(campaign.about, line)
    commit = session.get("commit", "")
    tags = {
        rows.KIND: "benchmark",
        "command": session.get("command", ""),
        "git": {"commit": commit},
        "versions": session.get("versions", {}),
    }
    tags |= {"hardware": {name: campaign.about[name] for name in MACHINE if name in campaign.about}}
    about = {
        "scale": ROOT,
        "run": campaign.name,
        "stage": "/".join(str(value) for value in settings.values() if isinstance(value, str))[:200],
        "key": key,
        "attempt": 1,
        "params": settings,
        "datasets": [],
    }
    begin = (
        round(1000 * datetime.fromisoformat(session["started"]).timestamp()) if "started" in session else None
    )
    run_id = mirror.create(client, experiment, above, about, tags, begin, kind="benchmark")
    mirror.fill(client, run_id, about, store.entries(numbers, 0, begin / 1000 if begin else None))
    client.set_terminated(run_id, "FINISHED", begin)


def _session(about: dict[str, Any], line: dict[str, Any]) -> dict[str, Any]:
    """The provenance of a line: of the file, and what the calls that may have measured the line agree on. A
    line's commit tells which may."""
    calls = about.get("sessions") or [run for run in about.get("runs", []) if isinstance(run, dict)]
    commit = str(line.get("commit") or "")
    may = [call for call in calls if str(call.get("commit", "")).startswith(commit)]
    agreed = (
        {name: value for name, value in may[0].items() if all(call.get(name) == value for call in may)}
        if may
        else {}
    )
    return about | ({"commit": commit} if commit else {}) | agreed


def _number(value: Any) -> float | None:
    """The value as a number; None where it is a text, a list or nothing."""
    try:
        return float(value) if isinstance(value, str | int | float) and value != "" else None
    except ValueError:
        return None
