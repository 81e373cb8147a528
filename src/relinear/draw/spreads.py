"""How far two trainings of one run are apart: for numbers of a single training, whose error would else be of its items alone.

`results/reference/spreads.csv` has the standard deviation over seeds of every metric of every method of which anything was trained with several
seeds, pooled over the runs of that method, over what the metric is of and over its places. `python -m relinear.draw.trainings` writes it from the
committed records.
"""

import csv
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from relinear.plan.readings import Measured, Reading
from relinear.plan.strict import WORKFLOW

SPREADS = WORKFLOW.parent / "results/reference/spreads.csv"
COLUMNS = ("method", "measure", "metric", "kind", "sd", "freedom", "runs")
ANY = "any"  # the largest spread that any method has
# Metrics without an upper bound: their spreads are shares of the number. Those of others are in the metric's own unit.
RELATIVE_KIND, ABSOLUTE_KIND = "relative", "absolute"
RELATIVE = ("perplexity", "perplexity_ratio", "chunk_mean_exp", "kl", "mse", "loss")


SHARES = ("acc", "acc_norm", "accuracy", "exact_match", "f1", "choice", "contains")  # what stands for absolute metrics that nothing is known of


class Of(NamedTuple):
    """What a number of one training is: the method, its measure and metric, and its unit as a factor."""

    method: str
    measure: str
    metric: str
    factor: float = 1.0


class Spread(NamedTuple):
    """The standard deviation of a number over trainings, in the number's unit, and its degrees of freedom."""

    sd: float
    freedom: float


def of_training(found: Measured, reading: Reading, factor: float = 1.0) -> Of | None:
    """What the spread of a reading is looked up by; None where nothing was trained."""
    if not sum(found.facts.get("tokens", {}).values()):
        return None
    return Of(str(found.facts.get("method")), found.measure, reading.metric, factor)


class Spreads:
    """The committed spreads. Without rows nothing is known, and a single training judges nothing; not `asked`, as in a test, it has no spread."""

    def __init__(self, rows: Iterable[dict[str, str]] = (), asked: bool = True):
        self.asked = asked
        self._known = {tuple(row[name] for name in COLUMNS[:3]): Spread(float(row["sd"]), float(row["freedom"])) for row in rows}

    def find(self, of: Of) -> Spread | None:
        """The spread of a metric: of the method in that measure, else the largest that it has in that metric anywhere, else the largest that any
        method has in that measure, in that metric, or in any of its kind."""
        kind = RELATIVE_KIND if of.metric in RELATIVE else ABSOLUTE_KIND
        places = [
            (of.method, of.measure, of.metric), (of.method, ANY, of.metric), (ANY, of.measure, of.metric), (ANY, ANY, of.metric), (ANY, ANY, kind),
        ]  # fmt: skip
        return next((self._known[place] for place in places if place in self._known), None)

    def of(self, parts: tuple[Of, ...], value: float) -> Spread | None:
        """The spread of a number, or of the mean of several whose trainings vary independently; None where it is not known."""
        found = [self.find(part) for part in parts]
        known = [spread for spread in found if spread is not None]
        if not parts or len(known) < len(parts):
            return None
        scales = [value if part.metric in RELATIVE else part.factor for part in parts]
        sd = math.hypot(*(spread.sd * scale for spread, scale in zip(known, scales, strict=True))) / len(known)
        return Spread(sd, min(spread.freedom for spread in known))


UNASKED = Spreads(asked=False)


def committed(path: Path = SPREADS) -> Spreads:
    """The spreads of a file; none where it is not there, as in an installed package."""
    return Spreads(csv.DictReader(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else ())
