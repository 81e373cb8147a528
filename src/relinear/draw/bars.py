"""Bar charts of a table: a group of bars for each column, in it a bar with its error for each row. Published values are diamonds."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from relinear.draw import About, Measurements
from relinear.draw.cells import Row, look_in, rows_of, tokens_of
from relinear.draw.pictures import judge_claims, save, wrap
from relinear.draw.style import look_of
from relinear.draw.table import write_provenance_of
from relinear.plan.specs import Artefact
from relinear.plan.tables import Bars, Column

PUBLISHED = "published"


def draw(artefact: Artefact, measured: Measurements, about: About, out: Path) -> list[Path]:
    """Write <stem>.png, .pdf, .provenance.json and, of a figure with claims, .claims.csv into `out`; returns their paths."""
    spec: Bars | Any = artefact.spec
    rows, columns = rows_of(spec, measured, about), [c for c in spec.all_columns if c.shown]
    pictures = save(artefact, _figure(spec, rows, columns, about), out)
    written = write_provenance_of(artefact, spec, rows, about, out)
    return [*pictures, written, *judge_claims(artefact, look_in(rows), about, out, tokens_of(rows))]


def _figure(spec: Bars, rows: list[Row], columns: list[Column], about: About) -> Figure:
    figure = Figure(figsize=(max(6.5, 1.2 + 0.9 * len(columns), 1.2 + 0.22 * len(columns) * (len(rows) + 1)), 4.6), layout="constrained")
    lines = [f"{spec.label}: {spec.says}", about.where(), about.demonstration]
    figure.suptitle(wrap(figure, filter(None, lines)), fontsize=10)
    axis = figure.subplots()
    width, at = 0.8 / len(rows), np.arange(len(columns))
    for i, row in enumerate(rows):
        cells = [row.cells[c.name] for c in columns]
        values = [cell.value if isinstance(cell.value, float) else np.nan for cell in cells]
        errors = [cell.stderr if isinstance(cell.stderr, float) else 0.0 for cell in cells]
        places = at - 0.4 + width * (i + 0.5)
        text = next((str(t) for t in row.line.text.values() if t is not None), row.line.name)
        look = look_of(row.line.run or row.line.name, i)
        style = {"color": look.color, "hatch": look.hatch, "edgecolor": "white", "error_kw": {"elinewidth": 0.8}}
        axis.bar(places, values, width, yerr=errors, label=text, capsize=2, **style)
        for place, cell in zip(places, cells, strict=True):
            if not cell.was_run:
                axis.text(
                    place, 0.01, cell.value, rotation=90, ha="center", va="bottom", fontsize=7, color="0.4", transform=axis.get_xaxis_transform()
                )
        printed = [row.line.published.values.get(c.name, np.nan) if row.line.published else np.nan for c in columns]
        if np.isfinite(printed).any():
            axis.plot(places, printed, "D", color="black", markerfacecolor="white", markersize=4, zorder=3)
    if any(row.line.published for row in rows):
        axis.plot([], [], "D", color="black", markerfacecolor="white", markersize=4, label=PUBLISHED)
    if spec.log and any(isinstance(cell.value, float) and cell.value > 0 for row in rows for cell in row.cells.values()):
        axis.set_yscale("log")
    axis.set_xticks(at, [c.heading for c in columns], rotation=0 if len(columns) <= 8 else 30, ha="center" if len(columns) <= 8 else "right")
    axis.set_ylabel(spec.ylabel or ("%" if columns[0].unit == "percent" else ""))
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", alpha=0.25)
    axis.set_axisbelow(True)
    handles, labels = axis.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: labels[i] == PUBLISHED)  # published last
    figure.legend([handles[i] for i in order], [labels[i] for i in order], loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure
