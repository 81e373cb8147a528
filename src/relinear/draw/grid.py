"""Grids: heatmaps of readings along two axes, a panel a run, such as needle accuracy by length and depth."""

import json
import textwrap
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter, LogLocator
from pandas import DataFrame

from relinear.draw import About, Measurements
from relinear.draw.cells import disagree
from relinear.draw.claims import Value, judge_claim, trained, value_of
from relinear.draw.drawing import Drawn
from relinear.draw.frame import along, frame_of, readings_in, select
from relinear.draw.pictures import LETTERS, WIDTH, page, saving
from relinear.draw.provenance import Origin
from relinear.draw.render import NOT_DEFINED, NOT_RUN, count
from relinear.plan.claims import Point, Scalar
from relinear.plan.figures import Grid, GridPanel
from relinear.plan.names import split
from relinear.plan.specs import Artefact

MOST_BESIDE = 4  # panels in a row; one more where that leaves no gap
# inches: what stands beside the panels of a row, and the least width of a cell with a number
BESIDE, CELL = 1.6, 0.26
EDGES = {"x": "\u25be", "y": "\u25c2"}  # the marks at the edges of a panel, along each axis
UNITS = {"length": "length, tokens", "distance": "distance, tokens", "depth": "depth, share of the length"}
BARS = {  # what a colour bar calls a metric whose name says less
    "kl": "KL of attention weights, nats",
    "mse": "MSE of head outputs",
    "singular_values": "distance of singular values",
    "singular_values_normalised": "distance of singular values",
    "cosine_normalised": "cosine",
}
WIDE = 100  # from this ratio of a logarithmic scale's ends on, powers of ten are ticks enough
# Reasons why a measure calls an x `not_informative` (relinear.measure.needle): each one's mark, and its words
# for the title.
NOT_INFORMATIVE = {
    "floor": ("*", "the choice of five is within three errors of chance"),
    "ceiling": ("†", "every key is found"),
    "copying": ("‡", "most answers are keys that were not asked for"),
}
WRITTEN = 110  # the most cells of a panel whose numbers are written into them
DIGIT = 0.08  # inches, the width of a digit


class Heat(NamedTuple):
    """A panel's values [y, x], NaN where there is no reading; where lines are drawn, by axis; the marks of
    each x that is not informative; and the mean or median, if that is shown."""

    xs: list[Scalar]
    ys: list[Scalar]
    values: np.ndarray
    lines: Mapping[str, float] = {}
    marks: Mapping[Scalar, str] = {}
    middle: str = ""


def drawn(artefact: Artefact, measured: Measurements, about: About) -> Drawn:
    """Heatmaps. A panel whose metric a measurement does not have along both axes says what there is."""
    spec: Grid | Any = artefact.spec
    frame = frame_of(measured)
    found = {panel.name: measured.get((panel.run, panel.measure)) for panel in spec.panels}
    undefined = {panel.name: why for panel in spec.panels if (why := why_not(panel, frame))}
    heats = {
        panel.name: heat
        for panel in spec.panels
        if found[panel.name] and panel.name not in undefined and (heat := heat_of(spec, panel, frame))
    }
    other = {
        panel.name: f"{NOT_RUN}: {have_not(spec, panel, frame)}"
        for panel in spec.panels
        if found[panel.name] and panel.name not in (*heats, *undefined)
    }
    empty = {name: f"{NOT_DEFINED}: {why}" for name, why in undefined.items()} | other
    shown = spec.model_copy(
        update={"panels": tuple(panel for panel in spec.panels if found[panel.name] or not panel.optional)}
    )

    def look(point: Point) -> Value | str:
        panel = spec.panel(point.row)
        if why := disagree(measured, panel.run):
            return why
        if panel.name in undefined:
            return f"{point.row}: {panel.metric} is {NOT_DEFINED}: {undefined[panel.name]}"
        rows = select(frame, panel.run, panel.measure, panel.metric, panel.of, point.at)
        reading = next((reading for _, _, reading in readings_in(rows)), None)
        axes = (spec.cell.x, spec.cell.y)
        place = ", ".join(
            str(value) if axis in axes else f"{axis} {value}" for axis, value in point.at.items()
        )
        name = f"{point.row} at {place}" if place else point.row
        if reading is None and panel.name in other:
            return f"{name}: {point.column or panel.metric} was {other[panel.name]}"
        return value_of(found[panel.name], reading, name, point.column or panel.metric, panel.factor)

    cells: dict[str, dict[str, Origin]] = {
        p.name: {p.metric: (m := found[p.name]) and m.source.file} for p in shown.panels
    }
    judge = partial(
        judge_claim, artefact, about, look, trained({name: m.facts for name, m in found.items() if m})
    )
    return Drawn(
        saving(artefact, lambda: _figure(shown, heats, empty, about)),
        judge,
        cells,
        [m.source for m in found.values() if m],
    )


def why_not(panel: GridPanel, frame: DataFrame) -> str:
    """Why a panel's metric is not defined anywhere in its measurement; empty if it has a value, or is not
    measured."""
    why = along(frame, panel.run, panel.measure, panel.metric, panel.of)["why"]
    return why.iloc[0] if len(why) and all(why != "") else ""


def have_not(spec: Grid, panel: GridPanel, frame: DataFrame) -> str:
    """What the measurement of a panel has, in place of its metric along both axes."""
    own = frame[(frame["run"] == split(panel.run)[0]) & (frame["measure"] == panel.measure)]
    have = sorted(
        {
            f"{metric} by {' and '.join(json.loads(at)) or 'nothing'}"
            for metric, at in zip(own["metric"], own["at"], strict=True)
        }
    )
    return (
        f"{panel.run} {panel.measure} has {', '.join(have) or 'nothing'}, and no {panel.metric} by"
        f" {spec.cell.x} and {spec.cell.y}"
    )


def heat_of(spec: Grid, panel: GridPanel, frame: DataFrame) -> Heat | None:
    """A panel's readings; an x at which the metric is not defined is a column without any. None if there are
    no readings along both axes."""
    x, y = spec.cell.x, spec.cell.y
    rows = along(frame, panel.run, panel.measure, panel.metric, panel.of)
    at = [json.loads(place) for place in rows["at"]]
    values = {
        (a[x], a[y]): v
        for a, v, why in zip(at, rows["value"], rows["why"], strict=True)
        if set(a) == {x, y} and not why
    }
    if not values:
        return None
    undefined = {a[x] for a, why in zip(at, rows["why"], strict=True) if why and x in a}
    xs, ys = _ordered({x for x, _ in values} | undefined), _ordered({y for _, y in values})
    lines = {
        axis: float(found["value"].iloc[0])
        for axis, line in spec.lines.items()
        if len(found := select(frame, panel.run, panel.measure, line))
    }
    heat = np.array([[panel.factor * values.get((x, y), np.nan) for x in xs] for y in ys])
    return Heat(
        xs,
        ys,
        heat,
        {axis: value for axis, value in lines.items() if value},
        {x: _marks(panel, frame, {spec.cell.x: x}) for x in xs},
        _middle(panel, frame, heat) if spec.middles else "",
    )


def _middle(panel: GridPanel, frame: DataFrame, heat: np.ndarray) -> str:
    """The metric's reading without axes, which is its mean, with its error; on a logarithmic scale, where a
    few cells may make a mean, the median of the cells."""
    if panel.log:
        return f"median {np.nanmedian(heat):.3g}"
    rows = select(frame, panel.run, panel.measure, panel.metric, panel.of)
    found = next((reading for _, _, reading in readings_in(rows)), None)
    if found is None or found.value is None:
        return ""
    error = f" ± {panel.factor * found.stderr:.1g}" if found.stderr is not None else ""
    return f"mean {panel.factor * found.value:.3g}{error}"


def _marks(panel: GridPanel, frame: DataFrame, at: Mapping[str, Scalar]) -> str:
    """The marks of the reasons why a place is not informative."""
    told = [
        (mark, select(frame, panel.run, panel.measure, "not_informative", name, at))
        for name, (mark, _) in NOT_INFORMATIVE.items()
    ]
    return "".join(mark for mark, rows in told if any(rows["value"] > 0))


def _ordered(values: set[Scalar]) -> list[Scalar]:
    return sorted(values, key=lambda value: (isinstance(value, str), value))


def _figure(spec: Grid, heats: Mapping[str, Heat], empty: Mapping[str, str], about: About) -> Figure:
    beside = _beside(spec, heats)
    rows = -(-len(spec.panels) // beside)
    tall = [
        max((len(heats[p.name].ys) for p in spec.panels[i * beside :][:beside] if p.name in heats), default=0)
        for i in range(rows)
    ]
    heights = [1.0 + max(1.5, 0.155 * min(n, 16)) for n in tall]
    figure = page(sum(heights), (f"{spec.label}: {spec.says}", about.where()), _caption(spec, heats, about))
    grid = figure.subplots(rows, beside, squeeze=False, height_ratios=heights)
    # those that share a colour bar
    norms, bars = _norms(spec, heats), dict[tuple[int, str], list[tuple[Axes, AxesImage]]]()
    for i, (axis, panel) in enumerate(zip(grid.flat, spec.panels, strict=False)):
        title = textwrap.fill(panel.name, int(LETTERS * 0.8 * (WIDTH - BESIDE) / beside))
        middle = heats[panel.name].middle if panel.name in heats else ""
        axis.set_title("\n".join(filter(None, (title, middle))), pad=10 if spec.lines else None)
        axis.set(
            xlabel=_named(spec.cell.x) if i + beside >= len(spec.panels) else "",
            ylabel="" if i % beside else _named(spec.cell.y),
        )
        if panel.name in heats:
            first = heats.get(spec.panels[i - i % beside].name)
            axis.tick_params(labelleft=not i % beside or first is None or first.ys != heats[panel.name].ys)
            image = _heatmap(
                axis, panel, heats[panel.name], norms[_scale(spec, panel)], (WIDTH - BESIDE) / beside
            )
            bars.setdefault((0 if spec.limits else i // beside, _scale(spec, panel)), []).append(
                (axis, image)
            )
        else:
            axis.set(xticks=[], yticks=[])
            words = textwrap.fill(empty.get(panel.name, NOT_RUN), 28)
            axis.text(0.5, 0.5, words, ha="center", va="center", transform=axis.transAxes, color="0.4")
    for axis in list(grid.flat)[len(spec.panels) :]:
        axis.set_axis_off()
    for (row, label), shown in bars.items():
        whole = list(grid.flat) if spec.limits else list(grid[row])
        alone = len({key for key in bars if key[0] == row}) == 1
        _bar(figure, whole if alone else [axis for axis, _ in shown], [image for _, image in shown], label)
    return figure


def _beside(spec: Grid, heats: Mapping[str, Heat]) -> int:
    """How many panels stand in a row: as many as there is room for with their numbers, rather so many that no
    row has a gap."""
    widest = max((len(heat.xs) for heat in heats.values() if _is_written(heat)), default=1)
    fit = [n for n in range(MOST_BESIDE + 1, 1, -1) if (WIDTH - BESIDE) / n / widest >= CELL]
    whole = [n for n in fit if len(spec.panels) % n == 0]
    return min([*whole, *(n for n in fit if n <= MOST_BESIDE), 2][0], len(spec.panels))


def _is_written(heat: Heat) -> bool:
    """Whether there is room for the numbers of a panel in its cells."""
    return bool(np.isfinite(heat.values).sum() <= WRITTEN)


def _caption(spec: Grid, heats: Mapping[str, Heat], about: About) -> list[str]:
    """What the marks at the edges and at the columns are."""
    lines = ", ".join(f"{EDGES[axis]} {line.replace('_', ' ')}" for axis, line in spec.lines.items())
    seen = {mark for heat in heats.values() for marks in heat.marks.values() for mark in marks}
    poor = ", ".join(f"{mark} {words}" for mark, words in NOT_INFORMATIVE.values() if mark in seen)
    hatched = "Hatched: no reading." if any(np.isnan(heat.values).any() for heat in heats.values()) else ""
    clipped = (
        ""
        if spec.limits or all(map(_is_written, heats.values()))
        else "Beyond the ends of a colour bar lies a hundredth of the values."
    )
    return [
        *spec.caption,
        " ".join(
            filter(None, (lines and f"{lines}.", poor and f"Not informative: {poor}.", hatched, clipped))
        ),
        about.demonstration or "",
    ]


def _named(axis: str) -> str:
    """An axis with its unit."""
    return UNITS.get(axis, axis)


def _scale(spec: Grid, panel: GridPanel) -> str:
    """What a colour bar is of: the metrics of all panels where the figure gives its ends, else the
    panel's."""
    metrics = [p.metric for p in spec.panels] if spec.limits else [panel.metric]
    return " or ".join(dict.fromkeys(BARS.get(m, m.replace("_", " ")) for m in metrics)) + (
        ", %" if panel.unit == "percent" else ""
    )


def _norms(spec: Grid, heats: Mapping[str, Heat]) -> dict[str, Normalize]:
    """The colours of each scale, over all its panels; without numbers in the cells, a hundredth at either end
    has the colour of the end."""
    norms: dict[str, Normalize] = {}
    for scale in {_scale(spec, panel) for panel in spec.panels}:
        own = [panel for panel in spec.panels if _scale(spec, panel) == scale]
        log = any(panel.log for panel in own)
        shown = [heats[panel.name] for panel in own if panel.name in heats]
        finite = np.concatenate([np.zeros(0), *(heat.values.ravel() for heat in shown)])
        finite = finite[np.isfinite(finite) & ((finite > 0) | (not log))]
        ends = (0, 100) if all(map(_is_written, shown)) else (1, 99)
        low, high = spec.limits or (tuple(np.percentile(finite, ends)) if finite.size else (0.0, 1.0))
        norms[scale] = (
            LogNorm(low, high, clip=True) if log and 0 < low < high else Normalize(low, high, clip=True)
        )
    return norms


def _heatmap(axis: Axes, panel: GridPanel, heat: Heat, norm: Normalize, width: float) -> AxesImage:
    """The values as colours in a panel of some inches, and as numbers where there is room for them; hatched
    where there is no reading."""
    axis.set_facecolor("0.9")
    axis.patch.set(hatch="///", edgecolor="0.7", linewidth=0)
    image = axis.imshow(
        np.ma.masked_invalid(heat.values), norm=norm, cmap="viridis", aspect="auto", interpolation="nearest"
    )
    for ruler, values, marks in ((axis.xaxis, heat.xs, heat.marks), (axis.yaxis, heat.ys, {})):
        step = -(-len(values) // 10)
        labels = [f"{_tick(value)}\n{marks.get(value, '')}".rstrip() for value in values[::step]]
        ruler.set_ticks(range(0, len(values), step), labels=labels)
    _mark(axis, heat)
    if _is_written(heat):
        for (y, x), value in np.ndenumerate(heat.values):
            if np.isfinite(value):
                dark = float(norm(value)) < 0.55
                written = (
                    f"{value:.0f}"
                    if panel.unit == "percent"
                    else _digits(value, int(width / len(heat.xs) / DIGIT - 0.5))
                )
                axis.text(x, y, written, ha="center", va="center", color="white" if dark else "black")
    return image


def _digits(value: float, room: int) -> str:
    """A number with three significant digits, or with as many as there is room for; none where there is no
    room."""
    return next((text for digits in (3, 2, 1) if len(text := f"{value:.{digits}g}") <= room), "")


def _bar(figure: Figure, axes: list[Axes], images: list[AxesImage], label: str) -> None:
    """One colour bar beside the axes, for images that share a scale, with an arrow where a value is beyond
    its end."""
    norm = images[0].norm
    values = np.concatenate([np.ma.compressed(image.get_array()) for image in images])
    below, beyond = values.min() < norm.vmin, values.max() > norm.vmax
    extend = "both" if below and beyond else "min" if below else "max" if beyond else "neither"
    rows = len({axis.get_subplotspec().rowspan.start for axis in axes})
    bar = figure.colorbar(images[0], ax=axes, label=label, aspect=25 * rows, pad=0.02, extend=extend)
    if isinstance(norm, LogNorm):
        few = (norm.vmax or 1.0) < WIDE * (norm.vmin or 1.0)  # there would be one power of ten, or none
        bar.set_ticks(LogLocator(subs=(1, 2, 3, 5, 7) if few else (1,)), minor=False)
        bar.minorticks_off()
        bar.ax.yaxis.set_major_formatter(
            FuncFormatter(lambda x, _: count(round(x)) if x >= 1000 else f"{x:g}")
        )


def _mark(axis: Axes, heat: Heat) -> None:
    """A mark at the upper or right edge, at the end of the cells of each value, beside the numbers and not
    over them."""
    for name, values in (("x", heat.xs), ("y", heat.ys)):
        if name in heat.lines:
            at = np.interp(heat.lines[name], [0.0, *values], np.arange(len(values) + 1) - 0.5)
            place, coordinates = (
                ((at, 1.0), axis.get_xaxis_transform())
                if name == "x"
                else ((1.0, at), axis.get_yaxis_transform())
            )
            shift = {"va": "bottom", "ha": "center"} if name == "x" else {"va": "center", "ha": "left"}
            axis.text(*place, EDGES[name], transform=coordinates, color="crimson", **shift)


def _tick(value: Scalar) -> str:
    if isinstance(value, int) and value >= 1024 and value % 1024 == 0:
        return f"{value // 1024}k"
    return f"{value:g}" if isinstance(value, float) else str(value)
