"""Records of finished stages, which are whole or as if they were not there: run.json, and metrics.json as run.json names it."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from relinear.errors import UserError
from relinear.files import sha256

SCHEMA = 2  # the schema of run.json that this version writes, and the only one that it reads
FIELDS = {"scale": str, "run": str, "stage": str, "key": str, "config": dict, "parents": dict, "artefacts": dict}  # the fields of every record
ASIDE = "run.json.broken"


class BrokenError(UserError):
    """A record that exists and cannot be believed. The message names the file and the fault."""


def read(folder: Path) -> dict[str, Any] | None:
    """run.json of a finished stage; None where there is none. Raises BrokenError for one that cannot be read or lacks what all have."""
    path = folder / "run.json"
    if not path.is_file():
        return None
    record = read_json(path)
    if record.get("schema") != SCHEMA:
        raise BrokenError(f"{path} has schema {record.get('schema')!r}; this version reads {SCHEMA}")
    if lacking := [name for name, kind in FIELDS.items() if not isinstance(record.get(name), kind)]:
        raise BrokenError(f"{path} lacks {', '.join(lacking)}")
    for kind, part in (("artefacts", "sha256"), ("parents", "path"), ("parents", "key")):
        for name, entry in record[kind].items():
            if not (isinstance(entry, dict) and isinstance(entry.get(part), str)):
                raise BrokenError(f"{path} lacks {kind}.{name}.{part}")
    return record


def read_json(path: Path) -> dict[str, Any]:
    """The mapping that a JSON file holds. Raises BrokenError for a file that holds none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BrokenError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise BrokenError(f"{path} must hold a JSON object; got a {type(found).__name__}")
    return found


def place(folder: Path | str) -> Path:
    """The place of a stage's folder within its results: `runs/<run>/<stage>`, or `models/<name>`, `text/<name>` and so on.

    A record's `parents` have paths on the machine that made it. Below the results as they lie now, a parent is at this place.
    """
    parts = Path(folder).parts
    return Path(*parts[-3:]) if parts[-3:-2] == ("runs",) else Path(*parts[-2:])


def trained_at(config: Mapping[str, Any]) -> dict[str, float]:
    """The peak learning rates of a training step, `lr` and where it has one `method_lr`, from the `config` of its record.

    Older records have the rates of runs.yaml beside the scale's `lr_floor`, which their training applied.
    """
    recipe, floor = config["recipe"], config.get("budget", {}).get("lr_floor", 0.0)
    return {name: max(recipe[name], floor) for name in ("lr", "method_lr") if recipe.get(name) is not None}


def difference(folder: Path, record: dict[str, Any], name: str) -> str | None:
    """The way in which a file of a stage's folder differs from its record; None where it does not."""
    path, expected = folder / name, record["artefacts"].get(name, {}).get("sha256", "no such file")
    got = sha256(path) if path.is_file() else "no file"
    return None if got == expected else f"{path} is not what its run.json says: sha256 {got} got, {expected} expected"


def believed(folder: Path) -> dict[str, Any] | None:
    """The record of a stage whose metrics.json is the one that it names, if it names one; None where there is no record.

    Raises BrokenError for any other folder.
    """
    record = read(folder)
    if record is not None and "metrics.json" in record["artefacts"] and (wrong := difference(folder, record, "metrics.json")):
        raise BrokenError(wrong)
    return record


def finished(folder: Path) -> dict[str, Any] | None:
    """The record as of `believed`. A broken record is None too, and one line on stderr says why."""
    try:
        return believed(folder)
    except BrokenError as error:
        print(f"{error}; it counts as not finished", file=sys.stderr)
        return None


def set_aside(root: Path) -> Iterator[str]:
    """Rename each record of a scale's results that cannot be believed, so that rules see that its stage is not finished; a line for each."""
    for path in sorted({*root.glob("*/*/run.json"), *root.glob("runs/*/*/run.json")}):
        try:
            believed(path.parent)
        except BrokenError:
            try:
                believed(path.parent)  # read again: a step may just have moved its folder in
            except BrokenError as error:
                with suppress(FileNotFoundError):
                    path.replace(path.with_name(ASIDE))
                yield f"{error}; its step runs again"
