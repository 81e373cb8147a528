"""The last steps of all shapes of figures: writing the pictures, and the verdicts on their claims."""

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from matplotlib.figure import Figure

from relinear.draw import About
from relinear.draw.claims import Look, judge_claim, write_claims
from relinear.draw.render import write_figure
from relinear.plan.specs import Artefact


def save(artefact: Artefact, figure: Figure, out: Path) -> list[Path]:
    """The pictures."""
    files = [out / f"{artefact.stem}.{suffix}" for suffix in ("png", "pdf")]
    for path in files:
        write_figure(path, figure)
    return files


def wrap(figure: Figure, lines: Iterable[str], per_inch: int = 11) -> str:
    """The lines as one text, each wrapped to the figure's width, at so many letters an inch."""
    return "\n".join(textwrap.fill(line, width=int(per_inch * figure.get_size_inches()[0])) for line in lines)


def judge_claims(artefact: Artefact, look: Look, about: About, out: Path, tokens: Mapping[str, int]) -> list[Path]:
    """The claims file of a figure that has claims. `tokens`: training tokens of what they name, which a claim's dose is compared with."""
    verdicts = [judge_claim(artefact, claim, look, about, tokens) for claim in artefact.spec.claims]
    return [write_claims(out / f"{artefact.stem}.claims.csv", artefact, verdicts)] if verdicts else []
