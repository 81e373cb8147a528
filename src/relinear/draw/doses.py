"""Unique training tokens x epochs of every step behind a measurement, from the steps' own records."""

import json
from pathlib import Path
from typing import NamedTuple

from relinear import records
from relinear.core import store
from relinear.draw.render import count
from relinear.plan.measured import Measured


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
    """The doses of the steps behind a measured run, in order.

    None if a step's record is missing, or if a step ended early (patience), since such a step has no dose.
    """
    record = json.loads(store.read(found.folder / store.RECORD))
    places = [records.place(parent["path"]) for parent in record["parents"].values()]
    measures = {found.folder.name, "gate"}
    return _of([found.folder.parents[2] / place for place in places if place.parts[0] == "runs" and place.name not in measures])


def _of(steps: list[Path]) -> tuple[Dose, ...] | None:
    read = [json.loads(records.read_committed(file)) for step in steps if store.exists(file := step / store.RECORD)]
    known = [r for r in read if not r["config"]["recipe"].get("patience")]
    if len(known) < len(steps):
        return None
    return tuple(Dose(round(r["tokens"] / r["config"]["budget"]["epochs"]), r["config"]["budget"]["epochs"]) for r in known)
