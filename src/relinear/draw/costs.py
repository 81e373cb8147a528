"""The costs of generating: rows of `efficiency.csv` of `relinear.benchmarks.generation`, whose docstring says
what is measured and how."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd
from pydantic import BaseModel

from relinear.draw.beside import lines_of
from relinear.draw.claims import Look, Value
from relinear.draw.frame import COLUMNS
from relinear.plan.claims import Claim, Point
from relinear.plan.figures import LARGEST, Cost, Curves, Panel, Sweep
from relinear.plan.strict import parse
from relinear.records import read_committed

GIB = 2**30
HOW = (
    "Ours: medians of decode steps recorded as CUDA graphs, at the marked points, with states and caches as"
    " large as there; the mean over a generation is the integral between them."
)
SWEPT = {"batch": "batch", "length": "generated tokens", "input": "input tokens"}
FIRST_LENGTH = 512  # shorter generations are measured for the integral and not shown
MEASURES_IT = "`snakemake benchmark`, on a machine with a GPU, measures"


class Row(BaseModel):
    """One row of efficiency.csv; what was not measured is None."""

    model: str
    sweep: Sweep
    run: str
    batch: int
    prompt: int
    generated: int
    status: Literal["ok", "out of memory", "wrong"]
    ms_per_token: float | None
    prefill_tokens_per_second: float | None
    decode_tokens_per_second: float | None
    peak_bytes: int | None
    cache_bytes: int | None
    commit: str | None

    @property
    def at(self) -> int:
        """The value of what its sweep goes over."""
        return {"batch": self.batch, "length": self.generated, "input": self.prompt}[self.sweep]

    @property
    def ok(self) -> bool:
        """Whether the generation ran to its end."""
        return self.status == "ok"

    def cost(self, column: Cost | str | None) -> float | None:
        """A cost, memory in GiB."""
        size = {"peak_gib": self.peak_bytes, "cache_gib": self.cache_bytes}
        if column in size:
            return None if size[column] is None else size[column] / GIB
        return getattr(self, str(column))


def read_costs(path: Path) -> list[Row]:
    """The rows, by what they sweep over. Raises FileNotFoundError, and ConfigError naming the file, the line,
    the column and its value."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {MEASURES_IT} it")
    rows = []
    for line, row in enumerate(lines_of(path), start=2):
        rows.append(parse(Row, {k: v or None for k, v in row.items()}, f"{path}, line {line}"))
    return sorted(rows, key=lambda row: row.at)


def how_measured(path: Path) -> dict[str, Any]:
    """The provenance beside the rows: GPU, dtype, sessions. Raises FileNotFoundError."""
    file = path.with_suffix(".provenance.json")
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: {MEASURES_IT} it with the rows")
    return json.loads(read_committed(file))


def elsewhere(rows: Sequence[Row], baseline: str) -> dict[str, list[str]]:
    """Run -> commits of its rows that are not among the baseline's; a ratio then includes the change of
    code."""
    commits: dict[str, set[str | None]] = {}
    for row in rows:
        if row.ok:
            commits.setdefault(row.run, set()).add(row.commit)
    ours = commits.get(baseline, set())
    return {run: sorted(map(str, own - ours)) for run, own in commits.items() if ours and own - ours}


def remark(claim: Claim, rows: Sequence[Row], baseline: str) -> str:
    """A note on a comparison of rows that were measured at different commits."""
    other = sorted({point.row for point in claim.all_points} & elsewhere(rows, baseline).keys())
    return f"measured at another commit than the {baseline}: {', '.join(other)}" if other else ""


def look_in(claim: Claim, rows: Sequence[Row]) -> Look:
    """The function by which a claim reads costs. They have no errors: medians of many steps vary far less
    than the bounds."""

    def look(point: Point) -> Value | str:
        [(sweep, at)] = point.at.items()
        swept = [row for row in rows if row.sweep == sweep and row.ok]
        if at == LARGEST:
            at = max((row.at for row in swept if row.run == (claim.right or claim.left).row), default=LARGEST)
        value = next((row.cost(point.column) for row in swept if (row.run, row.at) == (point.row, at)), None)
        return (
            f"{point.row} at {at}: not measured"
            if value is None
            else Value(value, 0.0, f"{point.row} at {at}")
        )

    return look


# --- as points of curves ---


class Paid(NamedTuple):
    """The costs of a figure's runs: the file, its rows, how they were measured, and runs of other commits
    than the first series'."""

    source: Path
    rows: list[Row]
    how: dict[str, Any]
    other: dict[str, list[str]]

    @property
    def where(self) -> str:
        """The type of the weights and the GPU."""
        return f"random weights, {self.how['dtype']}, one {self.how['gpu']}"

    def look(self, claim: Claim) -> Look:
        """The function by which a claim reads the rows."""
        return look_in(claim, self.rows)

    def caption(self, spec: Curves) -> list[str]:
        """Lines for a figure's caption: how the rows were measured, what the paper says, and which are of
        another commit."""
        lines = [HOW, f"The paper ({spec.hardware}): {spec.published}"]
        if commits := sorted({commit for own in self.other.values() for commit in own}):
            own = ", ".join(
                sorted({str(row.commit) for row in self.rows if row.run == spec.series[0].name and row.ok})
            )
            lines.append(
                f"*: at another commit ({', '.join(commits)}) than softmax attention ({own}), by the code of"
                " then."
            )
        return lines


def paid(spec: Curves, source: Path) -> Paid:
    """The costs of a figure's runs. Raises ValueError where the file has none that ran, and as `read_costs`
    does."""
    rows = [
        row
        for row in read_costs(source)
        if row.model == spec.model and row.run in {s.run for s in spec.series}
    ]
    if not any(row.ok for row in rows):
        raise ValueError(f"{source}: no row of {spec.model} for {spec.label}; {MEASURES_IT} them")
    return Paid(source, rows, how_measured(source), elsewhere(rows, spec.series[0].name))


def points(rows: Sequence[Row], run: str, panel: Panel) -> pd.DataFrame:
    """A cost of a run along a sweep, as rows of the frame of readings with their place `x`. Where memory
    ended, `why` says so in place of a value."""
    own = [
        row
        for row in rows
        if (row.run, row.sweep) == (run, panel.x) and not (panel.x == "length" and row.at < FIRST_LENGTH)
    ]
    told = [
        (row, row.cost(panel.y) if row.ok else None, "" if row.ok else row.status)
        for row in own
        if row.status != "wrong"
    ]
    found = [
        (run, run, 0, "costs", panel.y, row.model, "{}", value, math.nan, 1, why, row.at)
        for row, value, why in told
        if why or value is not None
    ]
    return pd.DataFrame(found, columns=[*COLUMNS, "x"])
