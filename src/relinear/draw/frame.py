"""Readings as one pandas frame, those behind a table or figure or all of a campaign, and the one function by
which a cell is read from it."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np
import pandas as pd

from relinear.core import store
from relinear.draw import Measurements
from relinear.plan.measured import load
from relinear.plan.names import split
from relinear.plan.readings import At, Reading

COLUMNS = ("node", "run", "seed", "measure", "metric", "of", "at", "value", "stderr", "n", "why")


class Score(NamedTuple):
    """A number over trainings: the mean, its standard error, the number of items, and the standard deviation
    over trainings.

    `stderr` combines the error of the items, which all trainings share, so that it does not average out, with
    the error of the mean over trainings: hypot(mean item error, sd / sqrt(trainings)). It is None if an item
    error is not known. `sd` is None for one training.
    """

    value: float
    stderr: float | None
    n: int | None
    sd: float | None


def frame(place: Path | str) -> pd.DataFrame:
    """All readings of a campaign's results, such as `results/mini` or `results/reference/smollm2`, as of
    `frame_of`."""
    folders = [
        folder
        for folder in store.nodes(Path(place))
        if json.loads(store.read(folder / store.RECORD)).get("measure")
    ]
    return frame_of({(folder.parent.name, folder.name): load(folder) for folder in folders})


def frame_of(measured: Measurements) -> pd.DataFrame:
    """All readings of some measurements, a row a reading, with `COLUMNS`.

    `node` is the measurement's record as provenance and `relinear show` name it. `run` is the run's name
    without `-seed<n>`; `seed` is that n, or 0. `at` is JSON with sorted keys, such as `{"depth": 0.5,
    "length": 4096}`, and `{}` for a reading of the whole. A metric that is not defined has `why` and no
    `value`.
    """
    rows = []
    for (name, measure), found in measured.items():
        run, seed = split(name)
        for reading in found.readings if found else ():
            own = (
                reading.metric,
                reading.of,
                place_of(reading.at),
                reading.value,
                reading.stderr,
                reading.n,
                reading.why,
            )
            rows.append((found.source.file, run, seed, measure, *own))
    return pd.DataFrame(rows, columns=list(COLUMNS), dtype=object).astype(
        {"seed": int, "value": float, "stderr": float, "n": int}
    )


def place_of(at: At) -> str:
    """A place on a metric's axes as the frame has it; 2048.0 and 2048 are one place."""
    whole = {axis: int(v) if isinstance(v, float) and v.is_integer() else v for axis, v in at.items()}
    return json.dumps(whole, sort_keys=True)


def along(
    frame: pd.DataFrame, run: str, measure: str, metric: str, of: str | None = None, seeds: bool = False
) -> pd.DataFrame:
    """The readings of a run's metric at all its places; with `seeds` of all trainings of the run."""
    return frame[_fits(frame, run, measure, metric, of, seeds)]


def _fits(
    frame: pd.DataFrame, run: str, measure: str, metric: str, of: str | None, seeds: bool
) -> np.ndarray:
    name, seed = split(run)
    wanted = {"measure": measure, "run": name, "metric": metric}
    wanted |= ({} if of is None else {"of": of}) | ({} if seeds and not seed else {"seed": seed})
    fits = np.ones(len(frame), dtype=bool)
    for column, value in wanted.items():
        fits &= frame[column].to_numpy() == value
    return fits


def select(
    frame: pd.DataFrame,
    run: str,
    measure: str,
    metric: str,
    of: str | None = None,
    at: At | None = None,
    seeds: bool = False,
) -> pd.DataFrame:
    """The reading of a metric at a place, a row a training in the order of seeds; with `seeds` all trainings
    of the run.

    `of` may be left out if the metric has one object. Raises ValueError if several readings of a training
    fit.
    """
    fits = _fits(frame, run, measure, metric, of, seeds) & (frame["at"].to_numpy() == place_of(at or {}))
    rows = frame[fits]
    if len(rows) < 2:
        return rows
    if rows["node"].duplicated().any():
        raise ValueError(
            f"{rows['node'].iloc[0]}: {metric} is read {len(rows)} times: of {', '.join(rows['of'])}; say of"
            " which"
        )
    return rows.sort_values("seed", kind="stable")


def score(
    frame: pd.DataFrame,
    run: str,
    measure: str,
    metric: str,
    of: str | None = None,
    at: At | None = None,
    unit: float = 1.0,
) -> Score | None:
    """A cell: the number of a run over its trainings, `unit` times as large as the readings; None if it was
    not measured."""
    rows = select(frame, run, measure, metric, of, at, seeds=True)
    rows = rows[rows["why"] == ""]
    if rows.empty:
        return None
    errors = [None if (stderr := error(e)) is None else unit * stderr for e in rows["stderr"]]
    return over_trainings([unit * value for value in rows["value"]], errors, int(rows["n"].iloc[0]))


def over_trainings(values: Sequence[float], errors: Sequence[float | None], n: int | None) -> Score:
    """The number over trainings, from the value and the item error of each."""
    if len(values) == 1:
        return Score(values[0], errors[0], n, None)
    known, spread = [e for e in errors if e is not None], stdev(values)
    total = math.hypot(fmean(known), spread / math.sqrt(len(values))) if len(known) == len(errors) else None
    return Score(fmean(values), total, n, spread)


def apart(sd: float | None, trainings: int) -> tuple[float, float]:
    """The standard error of a mean over trainings that are `sd` apart, and its degrees of freedom; 0 and
    infinity where they are not apart, or one alone."""
    found = sd / math.sqrt(trainings) if sd else 0.0
    return found, trainings - 1.0 if found else math.inf


def error(stderr: float) -> float | None:
    """A standard error of the frame; None if it is not known."""
    return None if math.isnan(stderr) else stderr


def readings_in(rows: pd.DataFrame) -> Iterable[tuple[str, int, Reading]]:
    """Rows of the frame as node, seed and reading."""
    for row in rows.itertuples():
        value = None if row.why else row.value
        yield (
            row.node,
            row.seed,
            Reading(row.metric, row.of, json.loads(row.at), value, error(row.stderr), row.n, row.why),
        )
