"""The record of a finished node in words: where it lies, when, where and at which commit it was made, of
what, and what it measured."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relinear import records
from relinear.core import store
from relinear.errors import UserError
from relinear.plan.measured import load
from relinear.plan.names import split
from relinear.plan.near import possible

REFERENCE = "reference"  # the folder of committed results in one's results


def node_of(name: str, results: Path) -> Path:
    """The folder of a node by its name: `<folder>/<run>/<measure>`, such as smollm2/lizard/mmlu,
    `<folder>/models/<model>`, a path, or as provenance names it. One's own results come before committed
    ones. Raises UserError for a name that nothing has."""
    if Path(name.partition("#")[0]).name == store.NODES:
        name = store.folder_of(name).as_posix()
    name = name.removesuffix(f"/{store.RECORD}")
    if store.has(Path(name)):
        return Path(name)
    first, _, rest = name.partition("/")
    for place in (results / first, results / REFERENCE / first):
        for node in (place / rest, place / "runs" / rest):
            if rest and store.has(node):
                return node
    places = {
        place.name: place for parent in (results, results / REFERENCE) for place in store.campaigns(parent)
    }
    if first not in places:
        raise UserError(
            f"no results {first!r} in {results} or {results / REFERENCE}; {possible(first, places)}"
        )
    have = [_short(node, places[first]) for node in store.nodes(places[first])]
    raise UserError(f"{places[first]} has no finished {rest!r}; {possible(rest, have)}")


def _short(node: Path, place: Path) -> str:
    return node.relative_to(place).as_posix().removeprefix("runs/")


def lines(name: str, results: Path) -> Iterator[str]:
    """What the record of a node says, a line each. Raises UserError for a name that nothing has, and for a
    record that cannot be believed."""
    folder = node_of(name, results)
    record = records.believed(folder) or {}
    place = folder.parents[2] if folder.parents[1].name == "runs" else folder.parents[1]
    git, hardware = record.get("git") or {}, record.get("hardware") or {}
    yield f"record    {store.named(folder)}"
    yield f"key       {record['key']}"
    device = (
        hardware.get("gpu")
        or hardware.get("cpu")
        or hardware.get("device")
        or "a machine that the record does not name"
    )
    if not hardware.get("gpu") and hardware.get("instructions"):
        device += f" ({hardware['instructions']})"
    yield (
        f"made      {record.get('started')}, in {record.get('wall_seconds', 0):.0f} s, on {device},"
        f" {hardware.get('dtype', '')}".rstrip(", ")
    )
    yield f"commit    {git.get('commit')}{' and changes that were not committed' if git.get('dirty') else ''}"
    yield (
        "versions "
        f" {', '.join(f'{library} {version}' for library, version in record.get('versions', {}).items())}"
    )
    yield f"seed      {record.get('seed', 0)}{_other_seeds(folder, place)}"
    for role, parent in record["parents"].items():
        made = place / records.place(parent["path"])
        found = records.read(made)
        state = "not here" if found is None else "" if found["key"] == parent["key"] else "made anew since"
        yield f"parent    {role}: {_short(made, place)}, key {parent['key'][:12]}{state and f' ({state})'}"
    for data in record.get("datasets", ()):
        yield f"data      {data['role']}: {data['name']}, sha256 {data['sha256'][:12]}"
    if record.get("measure"):
        yield from (_reading(reading) for reading in load(folder).readings)


def _other_seeds(folder: Path, place: Path) -> str:
    """The same node of the run's further trainings."""
    if folder.parents[1].name != "runs":
        return ""
    base, _ = split(folder.parent.name)
    others = [run for run in store.runs(place) if split(run)[0] == base and run != folder.parent.name]
    found = [f"{run}/{folder.name}" for run in others if store.has(place / "runs" / run / folder.name)]
    return f"; other seeds: {', '.join(found)}" if found else ""


def _reading(reading: Any) -> str:
    at = f" at {json.dumps(dict(reading.at))}" if reading.at else ""
    error = f" ± {reading.stderr:.4g}" if reading.stderr is not None else ""
    value = (
        f"{reading.value:.6g}{error}, n = {reading.n:,}"
        if reading.value is not None
        else f"not defined: {reading.why}"
    )
    return f"reading   {reading.metric} of {reading.of}{at}: {value}"
