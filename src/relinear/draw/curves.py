"""Curves: costs of generating along a sweep, or readings of runs along one of their axes."""

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

from relinear.draw import About, Measurements, costs
from relinear.draw.cells import disagree
from relinear.draw.claims import Judgement, Look, Value, judge_claim, value_of
from relinear.draw.costs import Paid
from relinear.draw.doses import doses, trained_on
from relinear.draw.drawing import Drawn
from relinear.draw.frame import COLUMNS, along, error, frame_of, place_of, readings_in
from relinear.draw.pictures import LINE, WIDTH, page, saving
from relinear.draw.provenance import Origin
from relinear.draw.render import NOT_DEFINED, NOT_RUN, count
from relinear.draw.style import lines
from relinear.plan.claims import Claim, Point, Scalar
from relinear.plan.figures import TRAINED, Curves, Panel, Series
from relinear.plan.measured import Source
from relinear.plan.specs import Artefact

BAND = re.compile(r"(\d+)-(\d+)")
HEIGHT = 2.5  # inches, of a row of panels
FEW = 6  # places on a logarithmic axis that each have a tick
Points = Mapping[tuple[str, str], pd.DataFrame]  # (series, panel) -> its points, as `points_of` gives them


def drawn(artefact: Artefact, measured: Measurements, about: About) -> Drawn:
    """Lines along sweeps and axes. Raises FileNotFoundError and ValueError for costs that are missing or
    malformed."""
    spec: Any = artefact.spec
    paid = costs.paid(spec, Path(about.files.get(spec.file, spec.file))) if spec.file else None
    frame = frame_of(measured)
    points: dict[tuple[str, str], pd.DataFrame] = {}
    for key in dict.fromkeys(panel.key for panel in spec.panels):
        shown = [
            (s, panel)
            for s in spec.series
            for panel in spec.panels
            if panel.key == key and s in spec.shown(panel)
        ]
        for s, panel in shown:
            points[s.name, key] = (
                costs.points(paid.rows, s.name, panel)
                if spec.of_costs(panel)
                else points_of(frame, s, panel, measured)
            )
    titles = {
        s.name: _with_legend(spec, s, frame) + "*" * bool(paid and s.name in paid.other) for s in spec.series
    }
    undefined = [
        line
        for p in spec.of_readings
        for s in spec.shown(p)
        for line in _undefined(frame, titles[s.name], s, p)
    ]
    caption = [
        *_dotted(spec),
        " ".join(spec.caption),
        *dict.fromkeys(undefined),
        *_not_run(spec, points),
        *_doses(spec, measured),
    ]
    sources = {found.source.file: found.source for found in measured.values() if found}
    read = [sources[node] for own in points.values() for node in own["node"] if node in sources]
    files = {paid.source: paid.how} if paid else {}
    write = saving(artefact, lambda: _figure(spec, points, titles, paid, about, caption))
    return Drawn(
        write,
        partial(_judge, artefact, measured, about, points, paid),
        _cells(spec, points, sources, paid),
        read,
        files,
    )


def _with_legend(spec: Curves, series: Series, frame: pd.DataFrame) -> str:
    """A series' title and, behind it, the readings of its run that the legend asks for and that are
    measured."""
    said = [series.title]
    for beside in spec.legend:
        rows = along(frame, series.run or "", beside.measure, beside.metric, beside.of)
        rows = rows[(rows["at"] == "{}") & (rows["why"] == "")]
        said += [f"{rows['value'].iloc[0]:.4g} {beside.unit}"] if len(rows) else []
    return ", ".join(said)


def _dotted(spec: Curves) -> list[str]:
    """A line for the caption: what the dotted lines of all panels are."""
    drawn = dict.fromkeys(
        f"{title} ({x:g})"
        for panel in spec.panels
        for title, x in (*panel.marks.items(), *panel.levels.items())
    )
    return [f"Dotted: {', '.join(drawn)}."] * bool(drawn)


def _not_run(spec: Curves, points: Points) -> list[str]:
    """Lines for the caption: the series that were not run, or some of whose runs were not, and for which
    panels."""
    lacking: dict[str, list[str]] = {}
    for panel in spec.panels:
        # costs are run together
        alike = (
            [other.key for other in spec.panels if spec.of_costs(other)]
            if spec.of_costs(panel)
            else [panel.key]
        )
        named = []
        for s in spec.shown(panel):
            own = [points[s.name, key].query("why == ''")["node"] for key in alike if (s.name, key) in points]
            named.append((s, len(set(s.all_runs)) - len(set().union(*own))))
        titles = [
            s.title + (f" ({n} of {len(s.all_runs)} runs)" if n < len(s.all_runs) else "")
            for s, n in named
            if n
        ]
        if titles:
            lacking.setdefault("; ".join(titles), []).append(panel.title or panel.name)
    every = len(spec.panels)
    return [
        f"{NOT_RUN}{'' if len(of) == every else ' for ' + ', '.join(of)}: {titles}."
        for titles, of in lacking.items()
    ]


def _doses(spec: Curves, measured: Measurements) -> list[str]:
    """Lines for the caption of a figure along training tokens: unique tokens x epochs of the steps of each
    point, and the series that have these."""
    panel = next((panel for panel in spec.of_readings if panel.x == TRAINED), None)
    titles: dict[str, list[str]] = {}
    for series in spec.shown(panel) if panel else ():
        found = [measured.get((run, panel.measure or "")) for run in series.runs]
        if points := [" + ".join(map(str, own)) for m in found if m is not None and (own := doses(m))]:
            titles.setdefault("; ".join(points), []).append(series.title)
    return [f"{'; '.join(of)}: {points} tokens." for points, of in titles.items()]


def _cells(
    spec: Curves, points: Points, sources: Mapping[str, Source], paid: Paid | None
) -> dict[str, dict[str, Origin]]:
    """Which file each line of each panel comes from."""
    cells: dict[str, dict[str, Origin]] = {s.name: {} for s in spec.series}
    of_costs = {panel.key for panel in spec.panels if spec.of_costs(panel)}
    for (series, column), own in points.items():
        files = [paid.source.as_posix()] if paid and column in of_costs else list(dict.fromkeys(own["node"]))
        cells[series][column] = files[0] if len(files) == 1 else files or None
    return cells


def _judge(
    artefact: Artefact, measured: Measurements, about: About, points: Points, paid: Paid | None, claim: Claim
) -> Judgement:
    """The verdict on a claim. Claims on costs are judged at any scale, since costs belong to none."""
    spec: Any = artefact.spec
    if paid and not {point.column for point in claim.points} & {panel.name for panel in spec.of_readings}:
        remark = costs.remark(claim, paid.rows, spec.series[0].name)
        return judge_claim(artefact, about, paid.look(claim), {}, claim, remark, of_scale=False)
    return judge_claim(artefact, about, _look_along(spec, measured, points), {}, claim)


# --- readings ---


def points_of(frame: pd.DataFrame, series: Series, panel: Panel, measured: Measurements) -> pd.DataFrame:
    """The points of a series in a panel: rows of the frame, with their place `x` on the panel's axis, in its
    order.

    The readings lie along an axis of one run, or each run's reading lies at the tokens that the run was
    trained on.
    """
    found = []
    for run in series.all_runs:
        rows = along(frame, run, panel.measure or "", panel.metric or "", panel.of)
        for row in rows[rows["why"] == ""].itertuples(index=False):
            x = _place_on(row.at, panel)
            if panel.x == TRAINED and row.at == place_of(panel.at):
                x = trained_on(measured[run, panel.measure])
            found += [(*row, x)] * (x is not None)
    if all(isinstance(place(x), int | float) for *_, x in found):
        found.sort(key=lambda point: place(point[-1]))
    return pd.DataFrame(found, columns=[*COLUMNS, "x"]).astype({"x": object})


def _place_on(at: str, panel: Panel) -> Scalar | None:
    """Where a reading lies on a panel's axis; None for a reading that is not at the panel's place on its
    other axes."""
    axes = json.loads(at)
    x = axes.pop(panel.x, None)
    return x if place_of(axes) == place_of(panel.at) else None


def place(x: Scalar) -> Scalar:
    """The position of a value on its axis; that of a band, such as "64-128", is its middle."""
    band = BAND.fullmatch(x) if isinstance(x, str) else None
    return (int(band[1]) + int(band[2])) / 2 if band else x


def _look_along(spec: Curves, measured: Measurements, points: Points) -> Look:
    """The function by which claims read the panels of readings."""

    def look(point: Point) -> Value | str:
        series = next(series for series in spec.series if series.name == point.row)
        panel = next(panel for panel in spec.of_readings if panel.name == point.column)
        [at], run = point.at.values(), series.run or ""
        if why := disagree(measured, run):
            return why
        own = points[series.name, panel.key]
        reading = next((reading for _, _, reading in readings_in(own[own["x"] == at])), None)
        return value_of(
            measured.get((run, panel.measure or "")),
            reading,
            f"{point.row} at {at}",
            point.column or "",
            panel.factor,
        )

    return look


def _undefined(frame: pd.DataFrame, title: str, series: Series, panel: Panel) -> list[str]:
    """Lines for the caption, one a reason: where along the axis a run's metric is not defined, and why."""
    places: dict[str, list[str]] = {}
    rows = along(frame, series.run or "", panel.measure or "", panel.metric or "", panel.of)
    for row in rows[rows["why"] != ""].itertuples():
        if (x := _place_on(row.at, panel)) is not None:
            places.setdefault(row.why, []).append(str(x))
    return [f"{title}: {NOT_DEFINED} at {', '.join(dict.fromkeys(at))}: {why}." for why, at in places.items()]


# --- drawing ---


def _figure(
    spec: Curves,
    points: Points,
    titles: Mapping[str, str],
    paid: Paid | None,
    about: About,
    caption: list[str],
) -> Figure:
    """The figure: neighbouring panels that show the same series stand together, with one legend below."""
    title = [f"{spec.label}: {spec.says}"]
    title.append(
        ", ".join([about.where(), *dict.fromkeys(about.data.values())])
        if spec.of_readings
        else f"shape of {spec.model}, {paid.where}"
    )
    if paid:
        caption += [f"Costs: at the shape of {spec.model}, {paid.where}."] * bool(
            spec.of_readings
        ) + paid.caption(spec)
    if about.demonstration and spec.of_readings:
        caption.append(about.demonstration)
    groups = [list(panels) for _, panels in itertools.groupby(spec.panels, spec.shown)]
    heights = []
    for panels in groups:
        labels = [*(titles[s.name] for s in spec.shown(panels[0])), *panels[0].published]
        heights.append(
            HEIGHT * -(-len(panels) // _beside(panels)) + 1.2 * LINE * -(-len(labels) // _columns(labels))
        )
    figure = page(sum(heights), title, caption)
    areas = figure.subfigures(len(groups), 1, squeeze=False, height_ratios=heights).flat
    looks = dict(zip((s.name for s in spec.series), lines([s.all_runs[0] for s in spec.series]), strict=True))
    for area, panels in zip(areas, groups, strict=True):
        beside = _beside(panels)
        axes = list(area.subplots(-(-len(panels) // beside), beside, squeeze=False).flat)
        for axis in axes[len(panels) :]:
            axis.set_axis_off()
        for axis, panel in zip(axes, panels, strict=False):
            shown = [
                (points[s.name, panel.key], looks[s.name] | {"label": titles[s.name]})
                for s in spec.shown(panel)
            ]
            _draw_panel(axis, panel, shown)
        _legend(area)
    return figure


def _beside(panels: Sequence[Panel]) -> int:
    """How many panels stand in a row: two, or three where that leaves no gap."""
    return len(panels) if len(panels) in (1, 3) else 2


def _draw_panel(axis: Axes, panel: Panel, shown: Sequence[tuple[pd.DataFrame, dict[str, Any]]]) -> None:
    """Draw a panel: the points of each series, with its label and the options of its line; a large cross
    where memory ended after the last point."""
    unit, bands = panel.factor, False
    for points, look in shown:
        own = points[points["why"] == ""]
        if panel.x == TRAINED and len(own) and not own["x"].iloc[-1]:  # 0 is no point on a logarithmic axis
            label, color = f"{look['label']}, not trained here", look["color"]
            axis.axhline(
                unit * own["value"].iloc[-1],
                label=label,
                color=color,
                linestyle="--",
                linewidth=1.2,
                zorder=0,
            )
            continue
        errors = [None if (e := error(stderr)) is None else unit * e for stderr in own["stderr"]]
        bands = bands or any(place(x) != x for x in own["x"])
        x, y = [place(x) for x in own["x"]], [unit * y for y in own["value"]]
        if x:
            axis.errorbar(
                x, y, None if None in errors else errors, markersize=4.5, capsize=2, elinewidth=0.8, **look
            )
        if x and len(own) < len(points):
            axis.plot(x[-1], y[-1], marker="x", markersize=10, markeredgewidth=2, color=look["color"])
    for k, (title, drawn) in enumerate(panel.published.items()):
        pairs = [(x, y) for x, ys in drawn.items() for y in (ys if isinstance(ys, tuple) else (ys,))]
        how = {"linestyle": ":" if 1 < len(pairs) == len(drawn) else "none", "marker": "d8+1"[k % 4]}
        axis.plot(*zip(*pairs, strict=True), label=f"{title}, published", color="0.6", markersize=5, **how)
    _finish(axis, panel, base=2 if bands or panel.y else _base(axis))
    _mark(axis, panel)


def _positive(axis: Axes, ruler: str) -> list[float]:
    """All positive numbers along the axis "x" or "y"; none if the axis has words."""
    found = [value for line in axis.get_lines() for value in getattr(line, f"get_{ruler}data")(orig=True)]
    return (
        [float(value) for value in found if value > 0]
        if all(isinstance(value, Real) for value in found)
        else []
    )


def _base(axis: Axes) -> int | None:
    """The base of a logarithmic x axis: 2 if the large numbers are powers of 2, else 10. None if the numbers
    span too little."""
    xs = _positive(axis, "x")
    if not xs or max(xs) < 8 * min(xs):
        return None
    return 2 if all(math.log2(x).is_integer() for x in xs if x >= 1024) else 10


def _finish(axis: Axes, panel: Panel, base: int | None) -> None:
    """Scales, titles and ticks; on a base of 2, k is 1024."""
    if base and _positive(axis, "x"):
        axis.set_xscale("log", base=base)
    if panel.log and _positive(axis, "y"):  # an axis without positive numbers has no logarithm
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_minor_formatter(NullFormatter())
    elif panel.y:
        axis.set_ylim(0, None)
    if panel.limits:
        axis.set_ylim(*panel.limits)
    axis.set_title(panel.title)
    ylabel = f"{panel.name}, %" if panel.unit == "percent" else panel.name
    axis.set(
        xlabel=panel.xlabel or (costs.SWEPT[panel.x] if panel.y else panel.x), ylabel=panel.ylabel or ylabel
    )
    if base == 2:
        axis.xaxis.set_major_formatter(
            FuncFormatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}")
        )
    elif base:
        places = sorted({float(f"{x:.1g}") for x in _positive(axis, "x")})
        if len(places) <= FEW:
            axis.xaxis.set_major_locator(FixedLocator(places))
            axis.minorticks_off()
        elif places[-1] < 100 * places[0]:
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: count(round(x)) if x >= 1000 else f"{x:g}"))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: count(round(y)) if y >= 1000 else f"{y:g}"))
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)


def _mark(axis: Axes, panel: Panel) -> None:
    """A grey vertical line for each mark and a horizontal one for each level, which the caption names."""
    for draw_line, places in ((axis.axvline, panel.marks), (axis.axhline, panel.levels)):
        for place_of_line in places.values():
            draw_line(place_of_line, color="0.5", linestyle=":", linewidth=1, zorder=0)


def _legend(area: SubFigure) -> None:
    """Every label of the panels once, below them, in as many columns as there is room for."""
    handles = {
        label: handle
        for axis in area.axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    if handles:
        area.legend(
            list(handles.values()),
            list(handles),
            loc="outside lower center",
            ncols=_columns(handles),
            frameon=False,
        )


def _columns(labels: Iterable[str]) -> int:
    """How many columns of a legend fit beside each other."""
    return min(max(int(WIDTH / (0.6 + 0.062 * max(map(len, labels)))), 1), 4)
