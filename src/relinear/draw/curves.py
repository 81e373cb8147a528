"""Curves: costs of generating along a sweep, or readings of runs along one of their axes."""

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from relinear.draw import About, Measurements, costs
from relinear.draw.cells import FAILED, gate_of
from relinear.draw.claims import Look, Value, judge_claim, value_of, write_claims
from relinear.draw.doses import doses, trained_on
from relinear.draw.frame import COLUMNS, along, error, frame_of, place_of, readings_in
from relinear.draw.pictures import save, wrap
from relinear.draw.provenance import Origin, write_provenance
from relinear.draw.render import NOT_DEFINED, NOT_RUN, count
from relinear.draw.style import lines
from relinear.plan.claims import Point, Scalar
from relinear.plan.figures import TRAINED, Curves, Panel, Series
from relinear.plan.specs import Artefact

HOW = (
    "Ours: medians of decode steps recorded as CUDA graphs, at the marked points, with states and caches as large as there; "
    "the mean over a generation is the integral between them."
)
SWEPT = {"batch": "batch", "length": "generated tokens", "input": "input tokens"}
BAND = re.compile(r"(\d+)-(\d+)")
FIRST_LENGTH = 512  # shorter generations are measured for the integral and not shown


class Curve(NamedTuple):
    """A line of a panel. `ends`: memory ended after the last point."""

    x: list[Scalar]
    y: list[float]
    error: list[float] | None
    ends: bool = False


class Costs(NamedTuple):
    """The costs of a figure's runs: the file, its rows, how they were measured, and runs of other commits than the first series'."""

    source: Path
    rows: list[costs.Row]
    how: dict[str, Any]
    other: dict[str, list[str]]


def draw(artefact: Artefact, measured: Measurements, about: About, out: Path) -> list[Path]:
    """Write <stem>.png, .pdf, .provenance.json and, of a figure with claims, .claims.csv into `out`; return their paths.

    Raises FileNotFoundError and ValueError for costs that are missing or malformed.
    """
    spec: Any = artefact.spec
    paid = _costs(spec, about) if spec.file else None
    frame = frame_of(measured)
    points = {(s.name, p.name): points_of(frame, s, p, measured) for p in spec.of_readings for s in spec.shown(p)}
    ran = {series for (series, _), own in points.items() if len(own)}
    figure, axes = _figure(len(spec.panels), _title(spec, about, paid))
    titles = {series.name: _with_legend(spec, series, frame) for series in spec.series}
    undefined: list[str] = []
    for axis, panel in zip(axes, spec.panels, strict=True):
        if paid is not None and spec.of_costs(panel):
            _cost_panel(axis, spec, panel, paid)
        else:
            _reading_panel(axis, spec, panel, points, titles, ran)
            undefined += [line for s in spec.shown(panel) for line in _undefined(frame, titles[s.name], s, panel)]
    caption = [*_not_in_all(spec, points, ran), *spec.caption, *_doses(spec, measured), *_caption(spec, about, paid)]
    _legend(figure, [*dict.fromkeys(undefined), *caption])
    written = [*save(artefact, figure, out), _provenance(artefact, spec, about, out, points, measured, paid)]
    return [*written, *_judged(artefact, measured, about, out, points, paid)]


def _title(spec: Curves, about: About, paid: Costs | None) -> str:
    """The caption: the shape and the GPU of costs, the scale of readings."""
    if paid is not None and not spec.of_readings:
        return f"{spec.label}, at the shape of {spec.model}: random weights, {paid.how['dtype']}, one {paid.how['gpu']}"
    return f"{spec.label}: {spec.says}\n{', '.join([about.where(), *dict.fromkeys(about.data.values())])}"


def _caption(spec: Curves, about: About, paid: Costs | None) -> list[str]:
    lines = []
    if paid is not None:
        if spec.of_readings:
            lines.append(f"Costs: at the shape of {spec.model}, random weights, {paid.how['dtype']}, one {paid.how['gpu']}.")
        lines += [HOW, f"The paper ({spec.hardware}): {spec.published}"]
        if commits := sorted(set(itertools.chain(*paid.other.values()))):
            own = ", ".join(sorted({str(row.commit) for row in paid.rows if row.run == spec.series[0].name and row.ok}))
            lines.append(f"*: at another commit ({', '.join(commits)}) than softmax attention ({own}), by the code of then.")
    return [*lines, *([about.demonstration] if about.demonstration and spec.of_readings else [])]


def _with_legend(spec: Curves, series: Series, frame: pd.DataFrame) -> str:
    """A series' title and, behind it, the readings of its run that the legend asks for and that are measured."""
    said = [series.title]
    for beside in spec.legend:
        rows = along(frame, series.run or "", beside.measure, beside.metric, beside.of)
        rows = rows[(rows["at"] == "{}") & (rows["why"] == "")]
        said += [f"{rows['value'].iloc[0]:.4g} {beside.unit}"] if len(rows) else []
    return ", ".join(said)


def _doses(spec: Curves, measured: Measurements) -> list[str]:
    """Lines for the caption of a figure along training tokens: unique tokens x epochs of the steps of each point."""
    panel = next((panel for panel in spec.of_readings if panel.x == TRAINED), None)
    lines = []
    for series in spec.shown(panel) if panel else ():
        found = [measured.get((run, panel.measure or "")) for run in series.runs]
        points = [" + ".join(map(str, own)) for m in found if m is not None and (own := doses(m))]
        lines += [f"{series.title}: {'; '.join(points)} tokens."] * bool(points)
    return lines


Points = Mapping[tuple[str, str], pd.DataFrame]  # (series, panel) -> its points, as `points_of` gives them


def _provenance(artefact: Artefact, spec: Curves, about: About, out: Path, points: Points, measured: Measurements, paid: Costs | None) -> Path:
    """Write which file each line of each panel comes from; returns the path."""
    cells: dict[str, dict[str, Origin]] = {s.name: {} for s in spec.series}
    for panel in spec.panels if paid is not None else ():
        if spec.of_costs(panel):
            for series in spec.shown(panel):
                cells[series.name][f"{panel.x}.{panel.name}"] = paid.source.as_posix()
    for (series, column), own in points.items():
        files = list(dict.fromkeys(own["node"]))
        cells[series][column] = files[0] if len(files) == 1 else files or None
    sources = {found.source.file: found.source for found in measured.values() if found}
    shown = [sources[node] for own in points.values() for node in own["node"]]
    files = {paid.source: paid.how} if paid is not None else None
    return write_provenance(out / f"{artefact.stem}.provenance.json", artefact, about.scale, cells, shown, files)


def _judged(artefact: Artefact, measured: Measurements, about: About, out: Path, points: Points, paid: Costs | None) -> list[Path]:
    """The claims file of a figure that has claims. Claims on costs are judged at any scale, since costs belong to none."""
    spec: Any = artefact.spec
    verdicts = []
    for claim in spec.claims:
        if paid is not None and not {point.column for point in claim.points} & {panel.name for panel in spec.of_readings}:
            remark = costs.remark(claim, paid.rows, spec.series[0].name)
            verdicts.append(judge_claim(artefact, claim, costs.look_in(claim, paid.rows), about, {}, remark, of_scale=False))
        else:
            verdicts.append(judge_claim(artefact, claim, _look_along(spec, measured, points), about, {}))
    return [write_claims(out / f"{artefact.stem}.claims.csv", artefact, verdicts)] if verdicts else []


# --- costs ---


def _costs(spec: Curves, about: About) -> Costs:
    source = Path(about.files.get(spec.file or "", spec.file or ""))
    rows = [row for row in costs.read_costs(source) if row.model == spec.model and row.run in {s.run for s in spec.series}]
    if not [row for row in rows if row.ok]:
        raise ValueError(f"{source}: no row of {spec.model} for {spec.label}; {costs.MEASURES_IT} them")
    return Costs(source, rows, costs.how_measured(source), costs.elsewhere(rows, spec.series[0].name))


def _cost_panel(axis: Axes, spec: Curves, panel: Panel, paid: Costs) -> None:
    for series, style in _styled(spec):
        if series in spec.shown(panel):
            ran = any(row.ok and row.run == series.name for row in paid.rows)
            mark = "*" if series.name in paid.other else "" if ran else f" ({NOT_RUN})"
            _line(axis, series.title + mark, style, curve_of_costs(paid.rows, series.name, panel))
    _finish(axis, panel, SWEPT[panel.x], base=2)


def curve_of_costs(rows: Sequence[costs.Row], run: str, panel: Panel) -> Curve:
    """A cost of a run along a sweep."""
    own = [row for row in rows if (row.run, row.sweep) == (run, panel.x)]
    fits = [row for row in own if row.ok and row.cost(panel.y) is not None and not (panel.x == "length" and row.at < FIRST_LENGTH)]
    values = [value for row in fits if (value := row.cost(panel.y)) is not None]
    return Curve([row.at for row in fits], values, None, any(row.status == "out of memory" for row in own))


# --- readings ---


def points_of(frame: pd.DataFrame, series: Series, panel: Panel, measured: Measurements) -> pd.DataFrame:
    """The points of a series in a panel: rows of the frame, with their place `x` on the panel's axis, in its order.

    The readings lie along an axis of one run, or each run's reading lies at the tokens that the run was trained on.
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
    """Where a reading lies on a panel's axis; None for a reading that is not at the panel's place on its other axes."""
    axes = json.loads(at)
    x = axes.pop(panel.x, None)
    return x if place_of(axes) == place_of(panel.at) else None


def place(x: Scalar) -> Scalar:
    """The position of a value on its axis; that of a band, such as "64-128", is its middle."""
    band = BAND.fullmatch(x) if isinstance(x, str) else None
    return (int(band[1]) + int(band[2])) / 2 if band else x


def _reading_panel(axis: Axes, spec: Curves, panel: Panel, points: Points, titles: Mapping[str, str], ran: Iterable[str]) -> None:
    unit, bands, levels = panel.factor, False, dict[str, tuple[float, str]]()
    for series, style in _styled(spec):
        if series not in spec.shown(panel):
            continue
        own, title = points[series.name, panel.name], titles[series.name]
        if panel.x == TRAINED and len(own) and not own["x"].iloc[-1]:  # 0 is no point on a logarithmic axis
            levels[f"{title}, not trained here"] = unit * own["value"].iloc[-1], style["color"]
            continue
        errors = [None if (e := error(stderr)) is None else unit * e for stderr in own["stderr"]]
        bands = bands or any(place(x) != x for x in own["x"])
        known = None if None in errors else [e or 0.0 for e in errors]
        label = None if series.name in ran and not len(own) else title + _lacking(series, own)
        _line(axis, label, style, Curve([place(x) for x in own["x"]], [unit * y for y in own["value"]], known))
    for k, (title, drawn) in enumerate(panel.published.items()):
        pairs = [(x, y) for x, ys in drawn.items() for y in (ys if isinstance(ys, tuple) else (ys,))]
        how = {"linestyle": ":" if 1 < len(pairs) == len(drawn) else "none", "marker": "d8+1"[k % 4]}
        axis.plot(*zip(*pairs, strict=True), label=f"{title}, published", color="0.6", markersize=5, **how)
    _finish(axis, panel, panel.x, base=2 if bands else _base(axis))
    _mark(axis, panel)
    for title, (y, color) in levels.items():
        axis.axhline(y, label=title, color=color, linestyle="--", linewidth=1.2, zorder=0)


def _lacking(series: Series, points: pd.DataFrame) -> str:
    """For the legend: that a series was not run, or how many of its runs were not."""
    ran, wanted = points["node"].nunique(), len(set(series.all_runs))
    return "" if ran == wanted else f" ({NOT_RUN})" if not ran else f" ({wanted - ran} of {wanted} {NOT_RUN})"


def _not_in_all(spec: Curves, points: Points, ran: Iterable[str]) -> list[str]:
    """Lines for the caption, one a panel: the series that were not run for it, but for another panel."""
    lines = []
    for panel in spec.of_readings:
        titles = [s.title for s in spec.shown(panel) if s.name in ran and not len(points[s.name, panel.name])]
        lines += [f"{NOT_RUN} for {panel.title or panel.name}: {'; '.join(titles)}."] * bool(titles)
    return lines


def _look_along(spec: Curves, measured: Measurements, points: Points) -> Look:
    """The function by which claims read the panels of readings."""

    def look(point: Point) -> Value | str:
        series = next(series for series in spec.series if series.name == point.row)
        panel = next(panel for panel in spec.of_readings if panel.name == point.column)
        [at], run = point.at.values(), series.run or ""
        if gate_of(measured, run) == FAILED:
            return f"{run} failed its gate: its parallel and recurrent forms disagree"
        own = points[series.name, panel.name]
        reading = next((reading for _, _, reading in readings_in(own[own["x"] == at])), None)
        return value_of(measured.get((run, panel.measure or "")), reading, f"{point.row} at {at}", point.column or "", panel.factor)

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


def _figure(panels: int, title: str) -> tuple[Figure, list[Axes]]:
    """A figure with its title, and the axes of so many panels, at most three in a row."""
    rows = (panels + 2) // 3
    columns = -(-panels // rows)
    figure = Figure(figsize=(max(13 / 3 * columns, 6.5), 4 * rows if rows > 1 else 4.4), layout="constrained")
    figure.suptitle(wrap(figure, title.splitlines()))
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in grid[panels:]:
        axis.set_axis_off()
    return figure, grid[:panels]


def _styled(spec: Curves) -> Iterator[tuple[Series, dict[str, Any]]]:
    """The series, and how their lines look: as the method of their first run."""
    return zip(spec.series, lines([series.all_runs[0] for series in spec.series]), strict=True)


def _line(axis: Axes, label: str | None, style: dict[str, Any], curve: Curve) -> None:
    """A line with a marker at each point; a large cross where memory ended after the last.

    A line without points is in the legend alone; without a label it is not in the legend.
    """
    shown = "_nolegend_" if label is None else label
    axis.errorbar(curve.x, curve.y, curve.error, label=shown, markersize=4.5, capsize=2, elinewidth=0.8, **style)
    if curve.ends and curve.x:
        axis.plot(curve.x[-1], curve.y[-1], marker="x", markersize=10, markeredgewidth=2, color=style["color"])


def _positive(axis: Axes, ruler: str) -> list[float]:
    """All positive numbers along the axis "x" or "y"; none if the axis has words."""
    found = [value for line in axis.get_lines() for value in getattr(line, f"get_{ruler}data")(orig=True)]
    return [float(value) for value in found if value > 0] if all(isinstance(value, Real) for value in found) else []


def _base(axis: Axes) -> int | None:
    """The base of a logarithmic x axis: 2 if the large numbers are powers of 2, else 10. None if the numbers span too little."""
    xs = _positive(axis, "x")
    if not xs or max(xs) < 8 * min(xs):
        return None
    return 2 if all(math.log2(x).is_integer() for x in xs if x >= 1024) else 10


def _finish(axis: Axes, panel: Panel, xlabel: str, base: int | None) -> None:
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
    axis.set_title(panel.title, fontsize=10)
    axis.set(xlabel=panel.xlabel or xlabel, ylabel=panel.ylabel or (f"{panel.name}, %" if panel.unit == "percent" else panel.name))
    if base == 2:
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}"))
    elif base:
        if max(xs := _positive(axis, "x")) < 100 * min(xs):
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 4, 5)))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: count(round(x)) if x >= 1000 else f"{x:g}"))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: count(round(y)) if y >= 1000 else f"{y:g}"))
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)


def _mark(axis: Axes, panel: Panel) -> None:
    """A grey vertical line for each mark and a horizontal one for each level, which the legend names."""
    for i, (title, x) in enumerate(panel.marks.items()):
        axis.axvline(x, label=f"{title}, {x:g}", color="0.5", linestyle=(":", "-.", "--", (0, (6, 2, 1, 2, 1, 2)))[i % 4], linewidth=1, zorder=0)
    for title, y in panel.levels.items():
        axis.axhline(y, label=f"{title}, {y:g}", color="0.5", linestyle=":", linewidth=1, zorder=0)


def _legend(figure: Figure, caption: list[str]) -> Legend:
    """Every label once, below, under the caption."""
    handles = {label: handle for axis in figure.axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    text = wrap(figure, caption, per_inch=13)
    legend = figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=3, frameon=False, fontsize=9, title=text or None)
    legend.get_title().set(fontsize=8, color="0.3", multialignment="left")
    return legend
