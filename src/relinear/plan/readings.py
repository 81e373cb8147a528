"""The result of a measurement: a list of readings."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

At = Mapping[str, int | float | str]


class Reading(NamedTuple):
    """One measured number, or why there is none.

    `metric` "acc" of "mmlu"; "kl" of "attention"; "perplexity" of "wikipedia-intros". `at` says where on a
    metric's own axes: {}, {"length": 4096, "depth": 0.5}, {"layer": 3, "head": 1}. `stderr` is the standard
    error of `value` over `n` items; None where no error is known. `value` is None where the metric is not
    defined (a position beyond what a model reads), and `why` says why.
    """

    metric: str
    of: str
    at: At
    value: float | None
    stderr: float | None
    n: int
    why: str = ""


def plain(readings: Iterable[Reading]) -> list[dict[str, Any]]:
    """Readings as JSON has them; `why` only where it says something."""
    return [
        {name: value for name, value in reading._asdict().items() if name != "why" or value}
        for reading in readings
    ]
