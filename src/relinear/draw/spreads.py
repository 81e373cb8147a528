"""How much two trainings of one run differ: the training error of a number that comes from a single training.

`results/reference/spreads.csv` has the standard deviation over seeds of each metric of each method that was
trained with several seeds, pooled over the method's runs and over what and where the metric is read. `python
-m relinear.draw.trainings` writes it from the committed records.
"""

import csv
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from relinear.plan.measured import Measured
from relinear.plan.readings import Reading
from relinear.plan.strict import WORKFLOW

SPREADS = WORKFLOW.parent / "results/reference/spreads.csv"
COLUMNS = ("method", "measure", "metric", "kind", "sd", "freedom", "runs")
ANY = "any"  # the largest spread that any method has
# Metrics without an upper bound: their spreads are shares of the number. Those of others are in the metric's
# own unit.
RELATIVE_KIND, ABSOLUTE_KIND = "relative", "absolute"
RELATIVE = ("perplexity", "perplexity_ratio", "chunk_mean_exp", "kl", "mse", "loss")


# what stands for absolute metrics that nothing is known of
SHARES = ("acc", "acc_norm", "accuracy", "exact_match", "f1", "choice", "contains")


class Of(NamedTuple):
    """The key of a spread: method, measure and metric; `factor` is the number's unit over the reading's."""

    method: str
    measure: str
    metric: str
    factor: float = 1.0


class Spread(NamedTuple):
    """The standard deviation of a number over trainings, in the number's unit, and its degrees of freedom."""

    sd: float
    freedom: float


def of_training(found: Measured, reading: Reading, factor: float = 1.0) -> Of | None:
    """The key of a reading's spread; None if nothing was trained."""
    if not sum(found.facts.get("tokens", {}).values()):
        return None
    return Of(str(found.facts.get("method")), found.measure, reading.metric, factor)


class Spreads:
    """The committed spreads. Without rows no spread is known, and a single training judges nothing.

    Not `asked`, as in a test: a single training counts without a spread.
    """

    def __init__(self, rows: Iterable[dict[str, str]] = (), asked: bool = True):
        self.asked = asked
        self._known = {
            tuple(row[name] for name in COLUMNS[:3]): Spread(float(row["sd"]), float(row["freedom"]))
            for row in rows
        }

    def find(self, of: Of) -> Spread | None:
        """The spread of a metric, from the narrowest place that has one.

        The method's in that measure; the method's largest in that metric; the largest of any method in that
        measure and metric, in that metric, or in any metric of its kind.
        """
        kind = RELATIVE_KIND if of.metric in RELATIVE else ABSOLUTE_KIND
        places = [
            (of.method, of.measure, of.metric),
            (of.method, ANY, of.metric),
            (ANY, of.measure, of.metric),
            (ANY, ANY, of.metric),
            (ANY, ANY, kind),
        ]
        return next((self._known[place] for place in places if place in self._known), None)

    def of(self, parts: tuple[Of, ...], value: float) -> Spread | None:
        """The spread of a number, or of the mean of numbers whose trainings vary independently; None if one
        is not known."""
        found = [self.find(part) for part in parts]
        known = [spread for spread in found if spread is not None]
        if not parts or len(known) < len(parts):
            return None
        scales = [value if part.metric in RELATIVE else part.factor for part in parts]
        sd = math.hypot(*(spread.sd * scale for spread, scale in zip(known, scales, strict=True))) / len(
            known
        )
        return Spread(sd, min(spread.freedom for spread in known))


UNASKED = Spreads(asked=False)


def committed(path: Path = SPREADS) -> Spreads:
    """The spreads of a file; none without the file, as in an installed package."""
    return Spreads(csv.DictReader(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else ())
