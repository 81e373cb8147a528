"""Writes results/reference/spreads.csv: how far trainings of a run with several seeds are apart, from the
committed records.

`python -m relinear.draw.trainings`; `relinear.draw.spreads` says what the file is for.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import variance
from typing import NamedTuple

from relinear import records
from relinear.core import store
from relinear.draw.render import write_csv
from relinear.draw.spreads import (
    ABSOLUTE_KIND,
    ANY,
    COLUMNS,
    RELATIVE,
    RELATIVE_KIND,
    SHARES,
    SPREADS,
    Of,
    of_training,
)
from relinear.plan.measured import load
from relinear.plan.names import split

Key = tuple[str, str, str]  # method, measure and metric of a spread


class Pool(NamedTuple):
    """A standard deviation over trainings, its degrees of freedom and the runs that it is of."""

    sd: float
    freedom: int
    runs: list[str]


def spreads_of(reference: Path) -> list[dict[str, str | float]]:
    """The rows of the file, from all committed runs that have further seeds."""
    # the variance of one number of one run, its freedom, and the run
    parts: dict[Key, list[tuple[float, int, str]]] = defaultdict(list)
    # measures of whole models: with a part switched off, a model breaks, and two break differently
    whole: set[str] = set()
    for run, values in _repeated(reference):
        for (of, part_off, _), own in values.items():
            scale = math.fsum(own) / len(own) if of.metric in RELATIVE else 1.0
            if len(own) > 1 and scale:
                parts[of.method, of.measure, of.metric].append((variance(own) / scale**2, len(own) - 1, run))
                whole |= set() if part_off else {of.measure}
    pools = {of: _pool(own) for of, own in parts.items()}
    # the largest of these stands for what has no spread of its own
    wider: dict[Key, list[Pool]] = defaultdict(list)
    for (method, measure, metric), pool in pools.items():
        wider[ANY, measure, metric].append(pool)
        if measure in whole:
            wider[method, ANY, metric].append(pool)
            wider[ANY, ANY, metric].append(pool)
    for kind, metrics in {RELATIVE_KIND: ("perplexity",), ABSOLUTE_KIND: SHARES}.items():
        if of_kind := [pool for metric in metrics for pool in wider.get((ANY, ANY, metric), ())]:
            wider[ANY, ANY, kind] = of_kind
    rows = pools | {of: max(own, key=lambda pool: pool.sd) for of, own in wider.items()}
    kinds = {of: RELATIVE_KIND if of[2] in (*RELATIVE, RELATIVE_KIND) else ABSOLUTE_KIND for of in rows}
    return [
        dict(zip(COLUMNS, (*of, kinds[of], pool.sd, pool.freedom, " ".join(pool.runs)), strict=True))
        for of, pool in sorted(rows.items())
    ]


def _pool(parts: list[tuple[float, int, str]]) -> Pool:
    """Numbers of one run are of the same trainings: they make its variance surer, and give no degrees of
    freedom more."""
    pooled = math.fsum(freedom * variance for variance, freedom, _ in parts) / sum(
        freedom for _, freedom, _ in parts
    )
    runs: dict[str, int] = {}
    for _, freedom, run in parts:
        runs[run] = max(runs.get(run, 0), freedom)
    return Pool(float(f"{math.sqrt(pooled):.4g}"), sum(runs.values()), sorted(runs))


def _repeated(reference: Path) -> Iterator[tuple[str, dict[tuple[Of, bool, str], list[float]]]]:
    """Each committed run that was trained again, and the values of each of its readings over these trainings,
    by what they are of, whether a part was switched off, and where. A measurement of which several folders
    hold copies counts once. Single heads are left out: they vary more than the mean over them, and no claim
    is on one."""
    seen: set[tuple[str, str]] = set()  # key and start
    for place in store.campaigns(reference):
        folder = place / "runs"
        seeds: dict[str, list[Path]] = defaultdict(list)
        for name in store.runs(place):
            base, _ = split(name)
            if base != name:
                seeds[base].append(folder / name)
        for run, repeats in seeds.items():
            values: dict[tuple[Of, bool, str], list[float]] = defaultdict(list)
            for path in (folder / run, *repeats):
                for measure in store.parts(path):
                    record = records.believed(measure)
                    if (
                        record is None
                        or not record.get("measure")
                        or (record["key"], record["started"]) in seen
                    ):
                        continue
                    seen.add((record["key"], record["started"]))
                    found = load(measure)
                    for reading in found.readings:
                        of = of_training(found, reading)
                        known = reading.value is not None and reading.stderr is not None
                        if of is not None and known and "head" not in reading.at:
                            values[
                                of,
                                bool(record["config"].get("without")),
                                f"{reading.of} {sorted(reading.at.items())}",
                            ].append(reading.value)
            yield f"{place.name}/{run}", values


def main() -> None:
    """Write the file."""
    write_csv(SPREADS, COLUMNS, spreads_of(SPREADS.parent))


if __name__ == "__main__":
    main()
