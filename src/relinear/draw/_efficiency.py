"""What the figures of generation cost share: the measured rows, claims about them, curves.

Rows are `efficiency.csv` of `relinear.benchmarks.generation`, whose docstring says what is measured and how.
"""

import csv
import itertools
import json
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from pydantic import BaseModel, ValidationError

from relinear.draw._inputs import Strict
from relinear.draw._render import count, number, write_csv, write_figure, write_text
from relinear.draw.claims import COLUMNS, UNTESTED, Judgement
from relinear.files import sha256

if TYPE_CHECKING:
    from relinear.plan.plan import Plan

GIB = 2**30
HOW = (
    "Ours: medians of decode steps recorded as CUDA graphs, at the marked points, with states and caches as large as there; "
    "the mean over a generation is the integral between them."
)
LABELS = {
    "teacher": "softmax, FlashAttention",
    "teacher_dynamic": "the same, transformers' growing cache",
    "lolcats_linear": "LoLCATs, linear",
    "lolcats_window": "LoLCATs, window 64",
    "lizard": "Lizard",
    "supra": "SUPRA",
    "hedgehog": "Hedgehog",
    "lolcats_linear_shared": "LoLCATs, linear, states of key heads (ours)",
    "lizard_shared": "Lizard, states of key heads (ours)",
}
STYLES = {
    "teacher": {"color": "black", "linewidth": 2.2},
    "teacher_dynamic": {"color": "0.55", "linewidth": 1.6},
    **{run: {"color": f"C{i}", "linewidth": 1.6} for i, run in enumerate(("lolcats_linear", "lolcats_window", "lizard", "supra", "hedgehog"))},
    **{f"{run}_shared": {"color": f"C{i}", "linewidth": 1.6, "linestyle": "--"} for i, run in ((0, "lolcats_linear"), (2, "lizard"))},
}
Column = Literal["decode_tokens_per_second", "prefill_tokens_per_second", "ms_per_token", "peak_gib", "cache_gib", "batch"]


class Cost(BaseModel):
    """One row of efficiency.csv; what was not measured is None."""

    model: str
    sweep: Literal["batch", "length", "input"]
    run: Literal[tuple(LABELS)]
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
        """What its sweep goes over."""
        return {"batch": self.batch, "length": self.generated, "input": self.prompt}[self.sweep]

    @property
    def peak_gib(self) -> float | None:
        return None if self.peak_bytes is None else self.peak_bytes / GIB

    @property
    def cache_gib(self) -> float | None:
        return None if self.cache_bytes is None else self.cache_bytes / GIB


def read_costs(path: Path) -> list[Cost]:
    """The rows, by what they sweep over. Raises FileNotFoundError, and ValueError naming the file and what is wrong in it."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: `snakemake benchmark`, on a machine with a GPU, measures it")
    costs = []
    for line, row in enumerate(csv.DictReader(path.read_text(encoding="utf-8").splitlines()), start=2):
        try:
            costs.append(Cost.model_validate({k: v or None for k, v in row.items()}))
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}={e['input']!r}: {e['msg']}" for e in error.errors())
            raise ValueError(f"{path}, line {line}: {wrong}") from None
    return sorted(costs, key=lambda cost: cost.at)


def measured(plan: "Plan") -> Path:
    """efficiency.csv of this machine where there is one, else the committed one."""
    own, committed = (plan.results / folder / "efficiency.csv" for folder in ("efficiency", "reference/efficiency"))
    return own if own.is_file() else committed


class Point(Strict):
    """A run at a value of its sweep; `largest` is the largest batch that the teacher can hold."""

    run: str
    at: int | Literal["largest"]


class CostClaim(Strict):
    """`left / right op bound` in a column of a sweep; without `right`, `left op bound`."""

    claim: str
    source: str
    sweep: Literal["batch", "length", "input"]
    column: Column
    left: Point
    right: Point | None = None
    op: Literal[">", "<"]
    bound: float
    published: str


class CostFigure(Strict):
    """A figure of generation cost, as a paper's YAML describes it."""

    label: str
    model: str  # whose rows
    hardware: str  # what the paper measured it on
    runs: tuple[str, ...]
    published: str  # what the paper's text says it shows
    claims: tuple[CostClaim, ...]


def judge(claim: CostClaim, costs: Sequence[Cost]) -> Judgement:
    """A claim against the rows: medians of many steps, whose spread is far below the bounds, so a comparison suffices."""
    values = []
    for point in (claim.left, claim.right):
        if point is None:
            continue
        swept = [c for c in costs if c.sweep == claim.sweep and c.status == "ok"]
        at = max((c.at for c in swept if c.run == "teacher"), default=None) if point.at == "largest" else point.at
        value = next((getattr(c, claim.column) for c in swept if (c.run, c.at) == (point.run, at)), None)
        if value is None:
            return Judgement(UNTESTED, f"published {claim.published}", f"{point.run} at {point.at}: not measured")
        values.append((f"{point.run} at {at}: {number(value)}", value))
    ours = values[0][1] / (values[1][1] if claim.right else 1.0)
    shown = f"{claim.column}: {', '.join(text for text, _ in values)}" + (f"; ratio {number(ours)}" if claim.right else "")
    other = sorted({p.run for p in (claim.left, claim.right) if p} & elsewhere(costs).keys())
    if other:
        shown += f"; measured at another commit than the teacher: {', '.join(other)}"
    holds = ours > claim.bound if claim.op == ">" else ours < claim.bound
    reason = f"{number(ours)} is {'' if holds else 'not '}{claim.op} {number(claim.bound)}"
    return Judgement("reproduced" if holds else "contradicted", f"{shown}; published {claim.published}", reason)


def elsewhere(costs: Sequence[Cost]) -> dict[str, list[str]]:
    """The runs with rows of other commits than the teacher's, and those commits: code that changed between them is in their ratio."""
    commits = {run: {c.commit for c in costs if c.run == run and c.status == "ok"} for run in LABELS}
    ours = commits["teacher"]
    return {run: sorted(map(str, own - ours)) for run, own in commits.items() if ours and own - ours}


def render(name: str, paper: str, spec: CostFigure, source: Path, out: Path, draw: Callable[[Figure, list[Cost]], None], size) -> list[Path]:
    """Draw a figure from the rows of its model and judge its claims: <name>.pdf, .png, .claims.csv and .provenance.json in `out`."""
    costs = [c for c in read_costs(source) if c.model == spec.model and c.run in spec.runs]
    if not [c for c in costs if c.status == "ok"]:
        raise ValueError(f"{source}: no row of {spec.model} for {spec.label}; `snakemake benchmark`, on a machine with a GPU, measures them")
    about = json.loads(source.with_suffix(".provenance.json").read_text())
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(f"{spec.label}, at the shape of {spec.model}: random weights, {about['dtype']}, one {about['gpu']}")
    draw(figure, costs)
    lines = [HOW, f"The paper ({spec.hardware}): {spec.published}"]
    if other := sorted(set(itertools.chain(*elsewhere(costs).values()))):
        own = ", ".join(sorted({str(c.commit) for c in costs if c.run == "teacher" and c.status == "ok"}))
        lines.append(f"*: at another commit ({', '.join(other)}) than softmax attention ({own}), by the code of then.")
    caption = "\n".join(textwrap.fill(line, width=int(13 * size[0])) for line in lines)
    legend = figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9, title=caption)
    legend.get_title().set(fontsize=8, color="0.3", multialignment="left")
    written = [out / f"{name}.{suffix}" for suffix in ("pdf", "png", "claims.csv", "provenance.json")]
    for path in written[:2]:
        write_figure(path, figure)
    judged = [(claim, judge(claim, costs)) for claim in spec.claims]
    write_csv(written[2], COLUMNS, [{"claim": c.claim, "paper": paper, "source": c.source, **j._asdict()} for c, j in judged])
    record = {"artefact": name, "rows": source.as_posix(), "sha256": sha256(source), "measured": about}
    write_text(written[3], json.dumps(record, indent=1) + "\n")
    return written


def curves(axis: Axes, costs: Sequence[Cost], sweep: str, column: Column, title: str, ylabel: str, *, log: bool = False) -> None:
    """A column against what a sweep goes over, a line a run; a cross where memory ended after that."""
    other = elsewhere(costs)
    for run in LABELS:
        own = [c for c in costs if (c.run, c.sweep) == (run, sweep)]
        fits = [c for c in own if c.status == "ok" and getattr(c, column) is not None and not (sweep == "length" and c.at < 512)]
        if not fits:
            continue
        values = [getattr(c, column) for c in fits]
        axis.plot([c.at for c in fits], values, label=LABELS[run] + "*" * (run in other), marker="o", markersize=3, **STYLES[run])
        if any(c.status == "out of memory" for c in own):
            axis.plot(fits[-1].at, values[-1], marker="X", markersize=7, color=STYLES[run]["color"])
    axis.set_xscale("log", base=2)
    if log:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_minor_formatter(NullFormatter())
    else:
        axis.set_ylim(0, None)
    axis.set_title(title, fontsize=10)
    axis.set(xlabel={"batch": "batch", "length": "generated tokens", "input": "input tokens"}[sweep], ylabel=ylabel)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}"))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: count(round(y)) if y >= 1000 else f"{y:g}"))
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
