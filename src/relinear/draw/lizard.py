"""Lizard (arXiv 2507.09025): generation throughput and memory."""

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from relinear.draw._efficiency import Cost, CostFigure, curves, measured, render
from relinear.draw._inputs import PaperFile, read_yaml

if TYPE_CHECKING:
    from relinear.plan.plan import Plan


class Lizard(PaperFile):
    """workflow/papers/lizard.yaml."""

    title: str
    arxiv: str
    figure5: CostFigure


def read(path: str | Path) -> Lizard:
    """Read and validate workflow/papers/lizard.yaml. Raises ValueError naming every offending key."""
    return read_yaml(path, Lizard)


def figure5(costs: Path, paper: Lizard, out: Path) -> list[Path]:
    """Lizard Figure 5: throughput and memory at batch 16 against the length of the input.

    costs: efficiency.csv. Writes figure5.pdf, .png, .claims.csv and .provenance.json into the folder `out`. Raises FileNotFoundError and
    ValueError for rows that are missing or malformed.
    """

    def draw(figure: Figure, rows: list[Cost]) -> None:
        axes = figure.subplots(1, 3)
        curves(axes[0], rows, "input", "decode_tokens_per_second", "128 tokens after the input: decoding", "tokens / s")
        curves(axes[1], rows, "input", "prefill_tokens_per_second", "the input itself", "tokens / s")
        curves(axes[2], rows, "input", "peak_gib", "memory", "peak, GiB")

    return render("figure5", "lizard", paper.figure5, Path(costs), Path(out), draw, (13, 4.4))


def _figure5(plan: "Plan") -> list[Path]:
    return figure5(measured(plan), read(plan.workflow / "papers" / "lizard.yaml"), plan.results / "lizard")


ARTEFACTS = {"figure5": _figure5}
