"""SUPRA (arXiv 2405.06640): what inference costs."""

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from relinear.draw._efficiency import Cost, CostFigure, curves, measured, render
from relinear.draw._inputs import PaperFile, read_yaml

if TYPE_CHECKING:
    from relinear.plan.plan import Plan


class Supra(PaperFile):
    """workflow/papers/supra.yaml."""

    title: str
    arxiv: str
    figure1: CostFigure


def read(path: str | Path) -> Supra:
    """Read and validate workflow/papers/supra.yaml. Raises ValueError naming every offending key."""
    return read_yaml(path, Supra)


def figure1(costs: Path, paper: Supra, out: Path) -> list[Path]:
    """SUPRA Figure 1, its middle panel: memory of the past and time of a token against the number of generated tokens.

    costs: efficiency.csv. Writes figure1.pdf, .png, .claims.csv and .provenance.json into the folder `out`. Raises FileNotFoundError and
    ValueError for rows that are missing or malformed.
    """

    def draw(figure: Figure, rows: list[Cost]) -> None:
        axes = figure.subplots(1, 2)
        curves(axes[0], rows, "length", "cache_gib", "state or key-value cache", "GiB", log=True)
        curves(axes[1], rows, "length", "ms_per_token", "time of the last token, batch 1", "ms")

    return render("figure1", "supra", paper.figure1, Path(costs), Path(out), draw, (10, 4.4))


def _figure1(plan: "Plan") -> list[Path]:
    return figure1(measured(plan), read(plan.workflow / "papers" / "supra.yaml"), plan.results / "supra")


ARTEFACTS = {"figure1": _figure1}
