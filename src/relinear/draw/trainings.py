"""Writes results/reference/spreads.csv: how far trainings of a run with several seeds are apart, from the committed records.

`python -m relinear.draw.trainings`; `relinear.draw.spreads` says what the file is for.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import variance
from typing import NamedTuple

from relinear import records
from relinear.core import store
from relinear.draw.render import write_csv
from relinear.draw.spreads import ABSOLUTE_KIND, ANY, COLUMNS, RELATIVE, RELATIVE_KIND, SHARES, SPREADS, Of, of_training
from relinear.plan.measured import load
from relinear.plan.names import split


def spreads_of(reference: Path) -> list[dict[str, str | float]]:
    """The rows of the file, from all committed runs that have further seeds."""
    pooled: dict[tuple[str, str, str], list[Part]] = defaultdict(list)
    whole: set[str] = set()  # measures of whole models: with a part switched off, a model breaks, and two break differently
    for run, values in _repeated(reference):
        for (of, part_off, _), own in values.items():
            scale = math.fsum(own) / len(own) if of.metric in RELATIVE else 1.0
            if len(own) > 1 and scale:
                pooled[of.method, of.measure, of.metric].append(Part(variance(own) / scale**2, len(own) - 1, run))
                whole |= set() if part_off else {of.measure}
    rows = {of: _pool(parts) for of, parts in pooled.items()}
    for method, measure, metric in pooled:
        if own := [rows[of] for of in pooled if (of[0], of[2]) == (method, metric) and of[1] in whole]:
            rows[method, ANY, metric] = _largest(own)
        rows[ANY, measure, metric] = _largest(rows[of] for of in pooled if of[1:] == (measure, metric))
        if of_whole := [rows[of] for of in pooled if of[2] == metric and of[1] in whole]:
            rows[ANY, ANY, metric] = _largest(of_whole)
    for kind, metrics in {RELATIVE_KIND: ("perplexity",), ABSOLUTE_KIND: SHARES}.items():
        if of_kind := [rows[of] for of in rows if of[:2] == (ANY, ANY) and of[2] in metrics]:
            rows[ANY, ANY, kind] = _largest(of_kind)
    kinds = {of: RELATIVE_KIND if of[2] in (*RELATIVE, RELATIVE_KIND) else ABSOLUTE_KIND for of in rows}
    return [
        dict(zip(COLUMNS, (*of, kinds[of], pool.sd, pool.freedom, " ".join(pool.runs)), strict=True)) for of, pool in sorted(rows.items())
    ]  # fmt: skip


class Part(NamedTuple):
    """The variance of one number of one run over its trainings, in its degrees of freedom."""

    variance: float
    freedom: int
    run: str


class Pool(NamedTuple):
    """A standard deviation over trainings, its degrees of freedom and the runs that it is of."""

    sd: float
    freedom: int
    runs: list[str]


def _largest(pools: Iterable[Pool]) -> Pool:
    return max(pools, key=lambda pool: pool.sd)


def _pool(parts: list[Part]) -> Pool:
    """Numbers of one run are of the same trainings: they make its variance surer, and give no degrees of freedom more."""
    freedom = sum(part.freedom for part in parts)
    pooled = math.fsum(part.freedom * part.variance for part in parts) / freedom
    runs: dict[str, int] = {}
    for part in parts:
        runs[part.run] = max(runs.get(part.run, 0), part.freedom)
    return Pool(float(f"{math.sqrt(pooled):.4g}"), sum(runs.values()), sorted(runs))


def _repeated(reference: Path) -> Iterator[tuple[str, dict[tuple[Of, bool, str], list[float]]]]:
    """Each committed run that was trained again, and the values of each of its readings over these trainings, by what they are of, whether a part was
    switched off, and where. A measurement of which several folders hold copies counts once."""
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
                    if record is None or not record.get("measure") or (record["key"], record["started"]) in seen:
                        continue
                    seen.add((record["key"], record["started"]))
                    found = load(measure)
                    for reading in found.readings:
                        of = of_training(found, reading)
                        if of is not None and reading.value is not None and reading.stderr is not None:
                            values[of, bool(record["config"].get("without")), f"{reading.of} {sorted(reading.at.items())}"].append(reading.value)
            yield f"{place.name}/{run}", values


def main() -> None:
    """Write the file."""
    write_csv(SPREADS, COLUMNS, spreads_of(SPREADS.parent))


if __name__ == "__main__":
    main()
