"""The names of derived runs and of texts, and the parts that a plan takes them apart into."""

import hashlib
import json
import re
from typing import Any, NamedTuple

from relinear.plan.entries import Run

DERIVED = re.compile(r"(?P<base>[^@]+?)(@(?P<model>[\w.+-]+?))?(-seed(?P<seed>\d+))?")
SEED = re.compile(r"-seed(\d+)$")
TEXT = re.compile(r"(?P<data>[^@]+)@(?P<model>[\w.+-]+?)(-x(?P<dose>[\d.e+-]+))?")
# a scale's folder, as `Plan.root` names it
ROOT = re.compile(r"(?P<scale>[A-Za-z]\w*?)(?:-x(?P<budget>[\d.e+-]+?))?(?:-seed(?P<seed>\d+))?")


class Node(NamedTuple):
    """One stage of one thing: of an asset, a model, a text, or a run; `part` names the measure of a measured
    run."""

    stage: str
    name: str
    part: str = ""

    def __str__(self) -> str:
        return " ".join(word for word in self if word)


class Resolved(NamedTuple):
    """A run as this plan trains it: its entry, the model that stands in for the entry's, and what is added to
    the plan's seed."""

    name: str
    run: Run
    model: str
    seed: int


class Text(NamedTuple):
    """A data set for a model's vocabulary, with a multiple of the scale's training tokens."""

    data: str
    model: str
    dose: float = 1.0

    def __str__(self) -> str:
        return f"{self.data}@{self.model}" + (f"-x{short(self.dose)}" if self.dose != 1 else "")


class LinkNodes(NamedTuple):
    """A part of a run's chain: a method with its options, and the steps that trained it."""

    method: str
    options: dict[str, Any]
    steps: tuple[Node, ...]


def digest(value: Any) -> str:
    """The sha256 of a value as JSON with sorted keys, in hex."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def short(number: float) -> str:
    """A number as folders are named by it: `2`, `0.5`; different ones never alike."""
    return repr(float(number)).removesuffix(".0")


def split(run: str) -> tuple[str, int]:
    """A run's name without the suffix of a further training, and that training's seed; 0 for the first."""
    further = SEED.search(run)
    return (run[: further.start()], int(further[1])) if further else (run, 0)
