"""What all shapes of figures share: the size of a picture and of its letters, its title and caption, and its
files."""

import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from relinear.draw.render import write_figure
from relinear.plan.specs import Artefact

WIDTH = 8.0  # inches, the width of a page's column: letters have the size there that they have here
LINE = 0.17  # inches, the height of a line of text
LETTERS = 15  # letters of the smallest size an inch
SIZE = 9  # points, of the smallest letters
# For functions that draw a figure: `@styled`.
styled = matplotlib.rc_context(
    {
        "font.size": SIZE,
        "pdf.fonttype": 42,
        "figure.constrained_layout.w_pad": 0.08,
        "figure.constrained_layout.h_pad": 0.06,
    }
    | dict.fromkeys(
        ("axes.titlesize", "axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize"), SIZE
    )
    | dict.fromkeys(("figure.titlesize", "figure.labelsize"), SIZE + 1)
)


def page(height: float, title: Iterable[str | None], caption: Iterable[str] = ()) -> Figure:
    """An empty figure of a page's width, with a title above and a caption below, wrapped; `height` in inches
    is that of what lies between."""
    above, below = wrap(filter(None, title), LETTERS - 2), wrap(filter(None, caption))
    lines = len(above.splitlines()) + len(below.splitlines())
    figure = Figure(figsize=(WIDTH, height + LINE * (lines + 1)), layout="constrained")
    figure.suptitle(above)
    if below:
        figure.supxlabel(below, x=0.01, ha="left", fontsize=SIZE, color="0.3")
    return figure


def wrap(lines: Iterable[str], per_inch: int = LETTERS) -> str:
    """The lines as one text, each wrapped to a page's width, at so many letters an inch."""
    return "\n".join(textwrap.fill(line, width=int(per_inch * WIDTH)) for line in lines)


def saving(artefact: Artefact, figure: Callable[[], Figure]) -> Callable[[Path, Any], None]:
    """A function that draws a figure and writes <stem>.png and .pdf into a folder, as `relinear.draw.drawing`
    asks it."""

    @styled
    def write(out: Path, _: Any) -> None:
        made = figure()
        for suffix in ("png", "pdf"):
            write_figure(out / f"{artefact.stem}.{suffix}", made)

    return write
