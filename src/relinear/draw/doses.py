"""Unique training tokens x epochs of every step behind a measurement, from the steps' own records."""

from typing import NamedTuple

from relinear.draw.render import count
from relinear.plan.forms import steps_behind
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
    steps, lacking = steps_behind(found)
    if lacking or any(step["config"]["recipe"].get("patience") for step in steps):
        return None
    epochs = [step["config"]["budget"]["epochs"] for step in steps]
    return tuple(
        Dose(round(step["tokens"] / times), times) for step, times in zip(steps, epochs, strict=True)
    )
