"""What all shapes of figures share: the size of a picture and of its letters, its title and caption, and the files that end it."""

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from relinear.draw import About
from relinear.draw.claims import Judgement, Look, judge_claim, write_claims
from relinear.draw.provenance import Origin, write_provenance
from relinear.draw.render import write_figure
from relinear.plan.measured import Source
from relinear.plan.specs import Artefact

WIDTH = 8.0  # inches, the width of a page's column: letters have the size there that they have here
LINE = 0.17  # inches, the height of a line of text
LETTERS = 15  # letters of the smallest size an inch
SIZE = 9  # points, of the smallest letters
# For the functions that draw a figure: `@styled`.
styled = matplotlib.rc_context(
    {"font.size": SIZE, "pdf.fonttype": 42, "figure.constrained_layout.w_pad": 0.08, "figure.constrained_layout.h_pad": 0.06}
    | dict.fromkeys(("axes.titlesize", "axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize"), SIZE)
    | dict.fromkeys(("figure.titlesize", "figure.labelsize"), SIZE + 1)
)


def page(height: float, title: Iterable[str | None], caption: Iterable[str] = ()) -> Figure:
    """An empty figure of a page's width, with a title above and a caption below, wrapped; `height` in inches is that of what lies between."""
    above, below = wrap(filter(None, title), LETTERS - 2), wrap(filter(None, caption))
    lines = len(above.splitlines()) + len(below.splitlines())
    figure = Figure(figsize=(WIDTH, height + LINE * (lines + 1)), layout="constrained")
    figure.suptitle(above)
    if below:
        figure.supxlabel(below, x=0.01, ha="left", fontsize=SIZE, color="0.3")
    return figure


def wrap(lines: Iterable[str], per_inch: int = LETTERS, width: float = WIDTH) -> str:
    """The lines as one text, each wrapped to a width in inches, at so many letters an inch."""
    return "\n".join(textwrap.fill(line, width=int(per_inch * width)) for line in lines)


def finish(
    artefact: Artefact,
    about: About,
    out: Path,
    figure: Figure,
    cells: Mapping[str, Mapping[str, Origin]],
    sources: Iterable[Source],
    verdicts: Iterable[Judgement],
    files: Mapping[Path, Any] | None = None,
) -> list[Path]:
    """Write <stem>.png, .pdf, .provenance.json and, where there are verdicts, .claims.csv into `out`; returns their paths.

    `cells`, `sources` and `files` are those of `write_provenance`.
    """
    written = write_provenance(out / f"{artefact.stem}.provenance.json", artefact, about.scale, cells, sources, files)
    return [*save(artefact, figure, out), written, *write_verdicts(artefact, verdicts, out)]


def save(artefact: Artefact, figure: Figure, out: Path) -> list[Path]:
    """Write the pictures <stem>.png and .pdf into `out`; returns their paths."""
    files = [out / f"{artefact.stem}.{suffix}" for suffix in ("png", "pdf")]
    for path in files:
        write_figure(path, figure)
    return files


def judge_claims(artefact: Artefact, look: Look, about: About, tokens: Mapping[str, int], of_scale: bool = True) -> list[Judgement]:
    """The verdicts on a figure's claims. `tokens`: training tokens of what they name, which a claim's dose is compared with."""
    return [judge_claim(artefact, claim, look, about, tokens, of_scale=of_scale) for claim in artefact.spec.claims]


def write_verdicts(artefact: Artefact, verdicts: Iterable[Judgement], out: Path) -> list[Path]:
    """Write the claims file; returns its path, or nothing where there are no verdicts."""
    found = list(verdicts)
    return [write_claims(out / f"{artefact.stem}.claims.csv", artefact, found)] if found else []
