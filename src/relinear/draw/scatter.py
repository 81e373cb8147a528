"""Scatter plots: a table whose rows are points at two of its columns, such as quality against fidelity."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from relinear.draw import About, Measurements
from relinear.draw.cells import Row, look_in, rows_of
from relinear.draw.pictures import judged, save
from relinear.draw.render import NOT_RUN
from relinear.draw.style import look_of
from relinear.draw.table import write_provenance_of
from relinear.plan.specs import Artefact
from relinear.plan.tables import Scatter

BESIDE = ((6, 5), (6, -10), (-6, 5), (-6, -10))  # offsets of labels in points, in turn


def draw(artefact: Artefact, measured: Measurements, about: About, out: Path) -> list[Path]:
    """Write <stem>.png, .pdf, .provenance.json and, of a figure with claims, .claims.csv into `out`; returns their paths."""
    spec: Scatter | Any = artefact.spec
    rows = rows_of(spec, measured, about)
    pictures = save(artefact, _figure(spec, rows, about), out)
    written = write_provenance_of(artefact, spec, rows, about, out)
    return [*pictures, written, *judged(artefact, look_in(rows), about, out)]


def _figure(spec: Scatter, rows: list[Row], about: About) -> Figure:
    figure = Figure(figsize=(7.0, 5.2), layout="constrained")
    lines = [f"{spec.label}: {spec.says}", f"scale {about.scale}" + (f", teacher {about.teacher}" if about.teacher else "")]
    figure.suptitle("\n".join([*lines, *([about.demonstration] if about.demonstration else [])]), fontsize=10)
    axis = figure.subplots()
    missing = []
    for i, row in enumerate(rows):
        text = next((str(t) for t in row.line.text.values() if t is not None), row.line.name)
        x, y = (row.cells[column] for column in (spec.x, spec.y))
        if not isinstance(x.value, float) or not isinstance(y.value, float):
            missing.append(text)
            continue
        errors = [cell.stderr if isinstance(cell.stderr, float) else None for cell in (x, y)]
        look = look_of(row.line.run or row.line.name, i)
        axis.errorbar(x.value, y.value, errors[1], errors[0], fmt=look.marker, markersize=6, capsize=2, elinewidth=0.8, color=look.color)
        dx, dy = BESIDE[i % len(BESIDE)]
        axis.annotate(text, (x.value, y.value), (dx, dy), textcoords="offset points", fontsize=8, ha="left" if dx > 0 else "right")
    for column, ruler, scale in ((spec.x, axis.set_xlabel, axis.set_xscale), (spec.y, axis.set_ylabel, axis.set_yscale)):
        [found] = [c for c in spec.all_columns if c.name == column]
        ruler(found.heading + (", %" if found.unit == "percent" else ""))
        if ("x" if column == spec.x else "y") in spec.log:
            scale("log")
    if missing:
        axis.set_title(f"{NOT_RUN}: {', '.join(missing)}", fontsize=8, color="0.4")
    axis.margins(0.12)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    return figure
