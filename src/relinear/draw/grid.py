"""Grids: heatmaps of readings along two axes, a panel a run, such as needle accuracy by length and depth."""

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator
from pandas import DataFrame

from relinear.draw import About, Measurements
from relinear.draw.cells import FAILED, gate_of
from relinear.draw.claims import Value, trained, value_of
from relinear.draw.frame import along, frame_of, readings_in, select, split
from relinear.draw.pictures import judge_claims, save, wrap
from relinear.draw.provenance import Origin, write_provenance
from relinear.draw.render import NOT_DEFINED, NOT_RUN, count
from relinear.plan.claims import Point, Scalar
from relinear.plan.figures import Grid, GridPanel
from relinear.plan.specs import Artefact

MOST_BESIDE = 4  # panels in a row
WIDE = 100  # from this ratio of a logarithmic scale's ends on, powers of ten are ticks enough
# Reasons why a measure calls an x `not_informative` (relinear.measure.needle): each one's mark, and its words for the title.
NOT_INFORMATIVE = {
    "floor": ("*", "the choice of five is within three errors of chance"),
    "ceiling": ("†", "every key is found"),
    "copying": ("‡", "most answers are keys that were not asked for"),
}
STYLES = {"x": "dashed", "y": "dotted"}
WRITTEN = 110  # the most cells of a panel whose numbers are written into them
ROOM = 32  # the digits side by side that a panel is wide


class Heat(NamedTuple):
    """A panel's values [y, x], NaN where there is no reading; where lines are drawn, by axis; and the marks of each x that is not informative."""

    xs: list[Scalar]
    ys: list[Scalar]
    values: np.ndarray
    lines: Mapping[str, float] = {}
    marks: Mapping[Scalar, str] = {}


def draw(artefact: Artefact, measured: Measurements, about: About, out: Path) -> list[Path]:
    """Write <stem>.png, .pdf, .provenance.json and, of a figure with claims, .claims.csv into `out`; return their paths.

    Raises ValueError for a metric that a finished measurement does not have along both axes.
    """
    spec: Grid | Any = artefact.spec
    frame = frame_of(measured)
    found = {panel.name: measured.get((panel.run, panel.measure)) for panel in spec.panels}
    undefined = {panel.name: why for panel in spec.panels if (why := why_not(panel, frame))}
    heats = {panel.name: heat_of(spec, panel, frame) for panel in spec.panels if found[panel.name] and panel.name not in undefined}
    shown = spec.model_copy(update={"panels": tuple(panel for panel in spec.panels if found[panel.name] or not panel.optional)})
    pictures = save(artefact, _figure(shown, heats, undefined, about), out)

    def look(point: Point) -> Value | str:
        panel = spec.panel(point.row)
        if gate_of(measured, panel.run) == FAILED:
            return f"{panel.run} failed its gate: its parallel and recurrent forms disagree"
        if panel.name in undefined:
            return f"{point.row}: {panel.metric} is {NOT_DEFINED}: {undefined[panel.name]}"
        rows = select(frame, panel.run, panel.measure, panel.metric, panel.of, point.at)
        reading = next((reading for _, _, reading in readings_in(rows)), None)
        axes = (spec.cell.x, spec.cell.y)
        place = ", ".join(str(value) if axis in axes else f"{axis} {value}" for axis, value in point.at.items())
        name = f"{point.row} at {place}" if place else point.row
        return value_of(found[panel.name], reading, name, point.column or panel.metric, panel.factor)

    cells: dict[str, dict[str, Origin]] = {}
    for panel in shown.panels:
        cells[panel.name] = {panel.metric: (m := found[panel.name]) and m.source.file}
    sources = [m.source for m in found.values() if m]
    written = [write_provenance(out / f"{artefact.stem}.provenance.json", artefact, about.scale, cells, sources)]
    return [*pictures, *written, *judge_claims(artefact, look, about, out, trained({name: m.facts for name, m in found.items() if m}))]


def why_not(panel: GridPanel, frame: DataFrame) -> str:
    """Why a panel's metric is not defined anywhere in its measurement; empty if it has a value, or is not measured."""
    why = along(frame, panel.run, panel.measure, panel.metric, panel.of)["why"]
    return why.iloc[0] if len(why) and all(why != "") else ""


def heat_of(spec: Grid, panel: GridPanel, frame: DataFrame) -> Heat:
    """A panel's readings; an x at which the metric is not defined is a column without any.

    Raises ValueError if there are no readings along both axes.
    """
    x, y = spec.cell.x, spec.cell.y
    rows = along(frame, panel.run, panel.measure, panel.metric, panel.of)
    at = [json.loads(place) for place in rows["at"]]
    values = {(a[x], a[y]): v for a, v, why in zip(at, rows["value"], rows["why"], strict=True) if set(a) == {x, y} and not why}
    if not values:
        other = frame[(frame["run"] == split(panel.run)[0]) & (frame["measure"] == panel.measure)]
        have = sorted({f"{metric} by {' and '.join(json.loads(at)) or 'nothing'}" for metric, at in zip(other["metric"], other["at"], strict=True)})
        where = next(iter(other["node"]), f"{panel.run} {panel.measure}")
        raise ValueError(f"{where}: no {panel.metric} by {x} and {y}; have {', '.join(have)}")
    undefined = {a[x] for a, why in zip(at, rows["why"], strict=True) if why and x in a}
    xs, ys = _ordered({x for x, _ in values} | undefined), _ordered({y for _, y in values})
    lines = {axis: float(found["value"].iloc[0]) for axis, line in spec.lines.items() if len(found := select(frame, panel.run, panel.measure, line))}
    heat = np.array([[panel.factor * values.get((x, y), np.nan) for x in xs] for y in ys])
    return Heat(xs, ys, heat, {axis: value for axis, value in lines.items() if value}, {x: _marks(panel, frame, {spec.cell.x: x}) for x in xs})


def _marks(panel: GridPanel, frame: DataFrame, at: Mapping[str, Scalar]) -> str:
    """The marks of the reasons why a place is not informative."""
    told = [(mark, select(frame, panel.run, panel.measure, "not_informative", name, at)) for name, (mark, _) in NOT_INFORMATIVE.items()]
    return "".join(mark for mark, rows in told if any(rows["value"] > 0))


def _ordered(values: set[Scalar]) -> list[Scalar]:
    return sorted(values, key=lambda value: (isinstance(value, str), value))


def _figure(spec: Grid, heats: Mapping[str, Heat], undefined: Mapping[str, str], about: About) -> Figure:
    rows = -(-len(spec.panels) // MOST_BESIDE)
    columns = -(-len(spec.panels) // rows)
    figure = Figure(figsize=(0.8 + 2.4 * columns, 0.9 + 3.1 * rows), layout="constrained")
    lines = ", ".join(f"{STYLES[axis]}: {line.replace('_', ' ')}" for axis, line in spec.lines.items())
    seen = {mark for heat in heats.values() for marks in heat.marks.values() for mark in marks}
    poor = ", ".join(f"{mark} {words}" for mark, words in NOT_INFORMATIVE.values() if mark in seen)
    told = (f"{spec.label}: {spec.says}", about.where(), lines, poor and f"not informative: {poor}", about.demonstration)
    figure.suptitle(wrap(figure, filter(None, told)), fontsize=10)
    grid = figure.subplots(rows, columns, squeeze=False)
    norms = _norms(spec, heats)
    drawn: dict[tuple[int, str], list[tuple[Axes, AxesImage]]] = {}  # those of a row that have a metric, and so a colour bar
    for i, (axis, panel) in enumerate(zip(grid.flat, spec.panels, strict=False)):
        axis.set_title(textwrap.fill(panel.name, 34), fontsize=9)
        axis.set(xlabel=spec.cell.x, ylabel="" if i % columns else spec.cell.y)
        axis.tick_params(labelsize=8)
        if panel.name in heats:
            image = _heatmap(axis, panel, heats[panel.name], norms[panel.metric])
            drawn.setdefault((i // columns, panel.metric), []).append((axis, image))
        else:
            axis.set(xticks=[], yticks=[])
            words = textwrap.fill(f"{NOT_DEFINED}: {undefined[panel.name]}", 28) if panel.name in undefined else NOT_RUN
            axis.text(0.5, 0.5, words, ha="center", va="center", transform=axis.transAxes, color="0.4")
    for axis in list(grid.flat)[len(spec.panels) :]:
        axis.set_axis_off()
    for (_, metric), shown in drawn.items():
        panel = next(panel for panel in spec.panels if panel.metric == metric)
        _bar(figure, [axis for axis, _ in shown], shown[0][1], panel)
    return figure


def _norms(spec: Grid, heats: Mapping[str, Heat]) -> dict[str, Normalize]:
    """One colour scale a metric, over all its panels."""
    norms: dict[str, Normalize] = {}
    for metric in {panel.metric for panel in spec.panels}:
        own = [panel for panel in spec.panels if panel.metric == metric]
        log = any(panel.log for panel in own)
        finite = np.concatenate([np.zeros(0), *(heats[panel.name].values.ravel() for panel in own if panel.name in heats)])
        finite = finite[np.isfinite(finite) & ((finite > 0) | (not log))]
        low, high = spec.limits or ((finite.min(), finite.max()) if finite.size else (0.0, 1.0))
        norms[metric] = LogNorm(low, high, clip=True) if log and 0 < low < high else Normalize(low, high)
    return norms


def _heatmap(axis: Axes, panel: GridPanel, heat: Heat, norm: Normalize) -> AxesImage:
    """The values as colours, and as numbers where there is room for them; hatched where there is no reading."""
    axis.set_facecolor("0.9")
    axis.patch.set(hatch="///", edgecolor="0.7", linewidth=0)
    image = axis.imshow(np.ma.masked_invalid(heat.values), norm=norm, cmap="viridis", aspect="auto", interpolation="nearest")
    for ruler, values, marks in ((axis.xaxis, heat.xs, heat.marks), (axis.yaxis, heat.ys, {})):
        step = -(-len(values) // 10)
        ruler.set_ticks(range(0, len(values), step), labels=[f"{_tick(value)}{marks.get(value, '')}" for value in values[::step]])
    _mark(axis, heat)
    if np.isfinite(heat.values).sum() <= WRITTEN:
        for (y, x), value in np.ndenumerate(heat.values):
            if np.isfinite(value):
                dark = float(norm(value)) < 0.55
                written = f"{value:.0f}" if panel.unit == "percent" else _digits(value, ROOM // len(heat.xs))
                axis.text(x, y, written, ha="center", va="center", fontsize=7, color="white" if dark else "black")
    return image


def _digits(value: float, room: int) -> str:
    """A number with three significant digits, or with as many as there is room for; none where there is no room."""
    return next((text for digits in (3, 2, 1) if len(text := f"{value:.{digits}g}") <= room), "")


def _bar(figure: Figure, axes: list[Axes], image: AxesImage, panel: GridPanel) -> None:
    """One colour bar for neighbours in a row that share a metric."""
    label, norm = f"{panel.metric.replace('_', ' ')}{', %' if panel.unit == 'percent' else ''}", image.norm
    bar = figure.colorbar(image, ax=axes, label=label, aspect=25, pad=0.04 / len(axes))
    bar.ax.tick_params(labelsize=8)
    if isinstance(norm, LogNorm):
        few = (norm.vmax or 1.0) < WIDE * (norm.vmin or 1.0)  # there would be one power of ten, or none
        bar.set_ticks(LogLocator(subs=(1, 2, 3, 5, 7) if few else (1,)), minor=False)
        bar.minorticks_off()
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda x, _: count(round(x)) if x >= 1000 else f"{x:g}"))


def _mark(axis: Axes, heat: Heat) -> None:
    """Draw the lines across columns and rows, at the ends of the cells of these values."""
    for axis_name, values, drawn, style in (("x", heat.xs, axis.axvline, "--"), ("y", heat.ys, axis.axhline, ":")):
        if axis_name in heat.lines:
            place = np.interp(heat.lines[axis_name], [0.0, *values], np.arange(len(values) + 1) - 0.5)
            drawn(place, color="white", linestyle=style, linewidth=1.6, path_effects=[withStroke(linewidth=3.2, foreground="black")])


def _tick(value: Scalar) -> str:
    if isinstance(value, int) and value >= 1024 and value % 1024 == 0:
        return f"{value // 1024}k"
    return f"{value:g}" if isinstance(value, float) else str(value)
