"""The influence of each item on a number, by which two numbers that were measured on the same items are
compared as a paired difference.

A pull is an item's influence: how far it moves the number. The squares of all pulls sum to the square of the
standard error, for a mean over items and for a perplexity over documents. The error of a paired difference is
the root of the sum of squares of the differences of pulls.
"""

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

from relinear.plan.items import columns_of, read_items
from relinear.plan.measured import Measured
from relinear.plan.readings import Reading

SAME = 1e-6  # relative difference of a reading from the number that its items give

# Fields that identify the needle, pair or question of a row; a row has some of them.
WHICH = ("set", "length", "pairs", "distance", "key", "value", "keys", "asked")
# Metrics that are the mean of the rows' field of that name.
PLAIN = ("nats", "f1", "contains", "acc", "balanced_acc", "gain", "rouge1", "rouge2", "rougeL")
ALL_SETS = "answers"  # the object of a reading over all sets of questions

# Metric of documents -> the sums whose signed total, divided by the tokens, is the metric or (True) its
# logarithm.
TERMS: Mapping[str, tuple[Mapping[str, int], bool]] = {
    "perplexity": ({"loss": 1}, True),
    "perplexity_ratio": ({"loss": 1, "teacher_loss": -1}, True),
    "kl": ({"kl": 1}, False),
    "top1": ({"top1": 1}, False),
}


class Pulls(NamedTuple):
    """The pull of each item on a number, in the number's unit, and the item's outcome: a score, or nats a
    token of a document."""

    items: tuple[Hashable, ...]
    pulls: tuple[float, ...]
    outcomes: tuple[float, ...]

    @property
    def stderr(self) -> float:
        """The standard error of the sum."""
        return math.sqrt(math.fsum(pull * pull for pull in self.pulls))

    def times(self, factor: float) -> "Pulls":
        """The same pulls, each multiplied by a factor."""
        return self._replace(pulls=tuple(factor * pull for pull in self.pulls))


def minus(left: Pulls | None, right: Pulls | None) -> Pulls | None:
    """The pulls on a difference, and the differences of outcomes.

    Returns None if the items differ, or if both sides score every item alike: the sample then gives no
    estimate of the variance.
    """
    if left is None or right is None or left.items != right.items:
        return None
    pulls, outcomes = (
        tuple(a - b for a, b in zip(*both, strict=True))
        for both in ((left.pulls, right.pulls), (left.outcomes, right.outcomes))
    )
    return Pulls(left.items, pulls, outcomes) if any(pulls) else None


def mean(parts: Sequence[Pulls | None]) -> Pulls | None:
    """The pulls on a mean of numbers: of several trainings on the same items, or of columns without a common
    item; else None."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or not known:
        return None
    if all(part.items == known[0].items for part in known):
        pulls, outcomes = (
            tuple(math.fsum(values) / len(known) for values in zip(*parts, strict=True))
            for parts in ([part.pulls for part in known], [part.outcomes for part in known])
        )
        return Pulls(known[0].items, pulls, outcomes)
    items = _shared(tuple(item for part in known for item in part.items))
    pulls = tuple(pull / len(known) for part in known for pull in part.pulls)
    outcomes = tuple(x for part in known for x in part.outcomes)
    return Pulls(items, pulls, outcomes) if len(set(items)) == len(items) else None


def pulls_of(found: Measured, reading: Reading) -> Pulls | None:
    """The pulls on a reading, in its own unit; None if its measurement kept no items, or not the items of the
    reading."""
    if reading.value is None or (kept := _kept(found.folder, found.source.metrics_sha256)) is None:
        return None
    outcomes = (
        _of_documents(kept.rows, reading)
        if kept.documents
        else _of_windows(kept.rows, reading)
        if kept.windows
        else _of_items(kept, reading)
    )
    return outcomes and outcomes._replace(items=_shared(outcomes.items))


def scale_pulls(found: Measured, reading: Reading, unit: float) -> Callable[[], Pulls | None]:
    """A function that gives the pulls on a reading in another unit, such as percent. It reads the items once,
    when it is called."""
    return functools.cache(lambda: (pulls := pulls_of(found, reading)) and pulls.times(unit))


@functools.cache
def _shared(items: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
    """One tuple for all runs that were measured on the same items, so that two of them are compared by
    identity."""
    return items


class Kept(NamedTuple):
    """The items of a measurement: the scores of tasks by task and metric, or rows as they are."""

    tasks: Mapping[tuple[str, str], Mapping[Hashable, float]]
    rows: list[dict[str, Any]]

    @property
    def documents(self) -> bool:
        """Whether a row is a whole document, with losses by position."""
        return bool(self.rows) and "positions" in self.rows[0]

    @property
    def windows(self) -> bool:
        """Whether a row is a window of a stream."""
        return bool(self.rows) and "window" in self.rows[0]


@functools.cache
def _kept(folder: Path, _: str) -> Kept | None:
    """The items of a folder, read once for each content of its metrics; None without items."""
    if (columns := columns_of(folder)) is None:
        return None
    if "task" not in columns:
        return Kept({}, read_items(folder))
    tasks: dict[tuple[str, str], dict[Hashable, float]] = defaultdict(dict)
    which = list(zip(columns["task"], columns.get("subject", repeat(None)), columns["doc_id"], strict=False))
    for metric in ("acc", "acc_norm"):
        for item, value in zip(which, columns.get(metric, ()), strict=False):
            if value is not None:
                tasks[item[0], metric][item] = float(value)
    return Kept(tasks, [])


def _which(row: Mapping[str, Any]) -> Hashable:
    # other rows are numbered in the order in which the model was asked
    names = (*WHICH, "item") if "set" in row else WHICH
    return tuple(
        tuple(value) if isinstance(value, list) else value
        for name in names
        if (value := row.get(name)) is not None
    )


def _of_items(kept: Kept, reading: Reading) -> Pulls | None:
    """The pulls on a reading over items: those that the items themselves give, or those on a mean, where the
    reading is the mean of these items."""
    if kept.rows and reading.metric in kept.rows[0].get("pulls", {}):
        return Pulls(
            *zip(
                *(
                    ((reading.of, row["item"]), row["pulls"][reading.metric], row["outcome"])
                    for row in kept.rows
                ),
                strict=True,
            )
        )
    values, alike = dict(kept.tasks.get((reading.of, reading.metric), {})), Counter[Hashable]()
    for row in kept.rows:
        own = row.get("set") in (None, reading.of) or reading.of == ALL_SETS
        if (
            own
            and all(_at(row, axis, place) for axis, place in reading.at.items())
            and (value := _outcome(row, reading.metric)) is not None
        ):
            which = _which(row)
            alike[which] += 1  # a drawn item can come twice
            values[which, alike[which]] = value
    n = len(values)
    if n < 2 or n != reading.n or not _same(centre := math.fsum(values.values()) / n, reading.value):
        return None
    spread = math.sqrt(1 / (n * (n - 1)))
    return Pulls(
        tuple(values), tuple(spread * (value - centre) for value in values.values()), tuple(values.values())
    )


def _at(row: Mapping[str, Any], axis: str, place: int | float | str) -> bool:
    """Whether an item belongs to the place of a reading."""
    return row["distance"] > place if axis == "beyond" else row.get(axis) == place


def _outcome(row: Mapping[str, Any], metric: str) -> float | None:
    """An item's value of a metric that is the mean over needles, pairs or answers. None for any other metric,
    and for a row without a value."""
    if metric == "exact_match" and "exact" in row:
        return float(row["exact"])
    if metric == "choice" and "chosen" in row:
        return float(row["chosen"])
    if metric == "choice" and "choice" in row:  # of an earlier version
        return float(row["choice"] == row["value"] if "value" in row else row["choice"] == row["asked"])
    if metric == "token_accuracy" and "tokens_right" in row:
        return sum(row["tokens_right"]) / len(row["tokens_right"])
    if metric == "nats" and "scores" in row:
        return -row["scores"][row["asked"]]
    return float(row[metric]) if metric in PLAIN and metric in row else None


def _of_documents(rows: Sequence[Mapping[str, Any]], reading: Reading) -> Pulls | None:
    """The pulls on a mean per token over documents, or on its exponential. None where the reading is not the
    mean of these documents."""
    if reading.metric not in TERMS:
        return None
    terms, exponential = TERMS[reading.metric]
    own = [row for row in rows if row["source"] == reading.of] or rows
    sums: dict[Hashable, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in own:
        for band in [reading.at["position"]] if reading.at else row["positions"]:
            found = row["positions"].get(band, {})
            if not terms.keys() <= found.keys():
                return None
            sums[row["sha256"]][0] += sum(sign * found[name] for name, sign in terms.items())
            sums[row["sha256"]][1] += found["tokens"]
    return _of_sums(sums, reading, exponential) if len(sums) == reading.n else None


def _of_windows(rows: Sequence[Mapping[str, Any]], reading: Reading) -> Pulls | None:
    """The pulls of windows on the perplexity of a stream. None where the reading is of other windows. A
    window without tokens has no pull."""
    if reading.metric != "perplexity" or sum(row["tokens"] for row in rows) != reading.n:
        return None
    return _of_sums(
        {(row["window"], row["sha256"]): (row["loss"], row["tokens"]) for row in rows if row["tokens"]},
        reading,
        True,
        len(rows),
    )


def _of_sums(
    sums: Mapping[Hashable, Sequence[float]], reading: Reading, exponential: bool, blocks: int | None = None
) -> Pulls | None:
    """The pulls on a mean per token, or on its exponential. None where that is not the reading.

    `sums`: document or window -> the sum over its tokens, and how many they are. `blocks`: how many were
    drawn, where some have no token.
    """
    n, tokens = blocks or len(sums), math.fsum(count for _, count in sums.values())
    if n < 2:
        return None
    centre = math.fsum(total for total, _ in sums.values()) / tokens
    value = math.exp(centre) if exponential else centre
    if not _same(value, reading.value):
        return None
    spread = math.sqrt(n / (n - 1)) / tokens * (value if exponential else 1.0)
    items = tuple((block, count) for block, (_, count) in sums.items())
    return Pulls(
        items,
        tuple(spread * (total - count * centre) for total, count in sums.values()),
        tuple(s / c for s, c in sums.values()),
    )


def _same(ours: float, read: float | None) -> bool:
    return read is not None and math.isclose(ours, read, rel_tol=SAME, abs_tol=1e-12)
