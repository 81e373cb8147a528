"""Unique training tokens x epochs of every step behind a measurement, from the steps' own records."""

import json
from pathlib import Path
from typing import NamedTuple

from relinear.draw.render import count
from relinear.plan.readings import Measured


class Dose(NamedTuple):
    """The text of one training step: its unique tokens, and how many times each was read."""

    unique: int
    epochs: int

    def __str__(self) -> str:
        return f"{count(self.unique)} x {self.epochs}"


def trained_on(found: Measured) -> int:
    """The training tokens of a run as it was measured, unique ones x epochs of all its steps."""
    return sum(found.facts.get("tokens", {}).values())


def doses(found: Measured) -> tuple[Dose, ...] | None:
    """The doses of the steps behind a measured run, in order. None where a step's record is missing or has no dose: an older record, or one of
    a training that ended when it was good enough."""
    record = json.loads(Path(found.source.file).read_text(encoding="utf-8"))
    # The steps lie beside the measurement, wherever the results lie now: <results>/runs/<run>/<step>.
    paths = [Path(parent["path"]).parts[-3:] for parent in record["parents"].values()]
    measures = {found.folder.name, "gate"}
    steps = [found.folder.parents[2].joinpath(*parts) for parts in paths if parts[0] == "runs" and parts[2] not in measures]
    return _of(steps)


def _of(steps: list[Path]) -> tuple[Dose, ...] | None:
    read = [json.loads(file.read_text(encoding="utf-8")) for step in steps if (file := step / "run.json").is_file()]
    known = [r for r in read if "budget" in r["config"] and not r["config"].get("recipe", {}).get("patience")]
    if len(known) < len(steps):
        return None
    return tuple(Dose(round(r["tokens"] / r["config"]["budget"]["epochs"]), r["config"]["budget"]["epochs"]) for r in known)
