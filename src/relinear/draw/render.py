"""Writing tables and figures: numbers, CSV, Markdown, pictures; whole files or none."""

import csv
import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from relinear.files import aside

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUOTED = 100  # characters of a line of a quotation
NOT_RUN = "not run"
NOT_DEFINED = "not defined"  # for a number that a metric cannot have for a model; the reason follows


def number(value: float) -> str:
    """A number for reading: 2 decimals below 100, 1 below 10^4, and as papers print them above (6.58e4)."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1e4:
        return _scientific(value, 2)
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def _scientific(value: float, decimals: int) -> str:
    mantissa, exponent = f"{value:.{decimals}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def plus_minus(value: float, stderr: float | None) -> str:
    """`value ± standard error`; the value alone where no error is known."""
    if stderr is None:
        return number(value)
    as_value = abs(value) >= 1e4 and math.isfinite(stderr)
    return f"{number(value)} ± {_scientific(stderr, 1) if as_value else number(stderr)}"


def percent(value: float, stderr: float | None) -> str:
    """`value ± standard error` with one decimal, as papers print accuracies."""
    return f"{value:.1f}" if stderr is None else f"{value:.1f} ± {stderr:.1f}"


def count(value: int) -> str:
    """A count for reading: 16.4k, 1.2M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return str(value)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], align: str = "right") -> str:
    """A GitHub Markdown table of ready strings, its columns but the first aligned as said; empty cells stay
    empty."""
    columns = ["left"] + [align] * (len(header) - 1)
    return tabulate(list(rows), header, tablefmt="github", disable_numparse=True, colalign=columns)


def titled(rows: Iterable[Mapping[str, str]], align: str = "right") -> str:
    """As `markdown`, of rows that have each cell under its column's title, as the first row has these in
    order; empty without rows."""
    rows = list(rows)
    titles = list(rows[0]) if rows else []
    return markdown(titles, [[row[title] for title in titles] for row in rows], align) if rows else ""


def quoted(who: str, text: str) -> str:
    """An answer under its author's name, as a Markdown quotation whose lines are shown without any markup."""
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, QUOTED) or [""]]
    return "\n".join([f"{who}:", "", *(f">     {line}" for line in lines)])


def write_text(path: Path, text: str) -> None:
    """Write the text as the file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with aside(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows with exactly these columns; None is an empty cell, floats have six significant digits."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {key: f"{cell:.6g}" if isinstance(cell, float) else cell for key, cell in row.items()} for row in rows
    )
    write_text(path, text.getvalue())


def write_figure(path: Path, figure: "Figure") -> None:
    """Write a figure in the format of the path's suffix, aside and then into place, without a date in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    suffix = path.suffix.removeprefix(".")
    metadata = {"CreationDate": None} if suffix == "pdf" else None
    with aside(path) as unfinished:
        figure.savefig(unfinished, format=suffix, dpi=150, metadata=metadata)


def paint(source: Path, to: Path) -> None:
    """Copy a figure, an opaque PNG, with the 256 colours nearest to its own and without dithering."""
    from PIL import Image

    with Image.open(source) as picture:
        few = picture.convert("RGB").quantize(
            256, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE
        )
    few.save(to, "PNG", optimize=True)
