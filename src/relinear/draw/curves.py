"""Curves: costs of generating along a sweep, or readings of runs along one of their axes."""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from relinear.draw import About, Measurements, costs
from relinear.draw.cells import FAILED, gate_of
from relinear.draw.claims import Look, Value, judge_claim, value_of, write_claims
from relinear.draw.doses import doses, trained_on
from relinear.draw.pictures import save, wrap
from relinear.draw.provenance import Origin, write_provenance
from relinear.draw.render import NOT_DEFINED, NOT_RUN, count
from relinear.draw.style import lines
from relinear.plan.claims import Point, Scalar
from relinear.plan.figures import TRAINED, Curves, Panel, Series
from relinear.plan.readings import Reading, Source
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
    """The costs of a figure's runs: the file, its rows, how they were measured, and the runs of other commits than the first series'."""

    source: Path
    rows: list[costs.Row]
    how: dict[str, Any]
    other: dict[str, list[str]]


Along = dict[tuple[str, str], list[tuple[Scalar, Reading, Source]]]  # series and panel -> x, reading and record of each point


def draw(artefact: Artefact, measured: Measurements, about: About, out: Path) -> list[Path]:
    """Write <stem>.png, .pdf, .provenance.json and, of a figure with claims, .claims.csv into `out`; returns their paths.

    Raises FileNotFoundError and ValueError for costs that are missing or malformed.
    """
    spec: Any = artefact.spec
    paid = _costs(spec, about) if spec.file else None
    along: Along = {(s.name, p.name): readings_along(s, p, measured) for p in spec.of_readings for s in spec.shown(p)}
    figure = _figure(spec, _title(spec, about, paid))
    caption = [*_not_in_all(spec, along), *spec.caption, *_doses(spec, measured), *_caption(spec, about, paid)]
    spec = _with_legend(spec, measured)
    undefined: dict[str, None] = {}
    for axis, panel in zip(_axes(figure, spec), spec.panels, strict=True):
        if paid is not None and spec.of_costs(panel):
            _cost_panel(axis, spec, panel, paid)
        else:
            _reading_panel(axis, spec, panel, along)
            undefined |= dict.fromkeys(line for series in spec.shown(panel) for line in _undefined(series, panel, measured))
    _legend(figure, [*undefined, *caption])
    written = [*save(artefact, figure, out), _provenance(artefact, spec, about, out, along, paid)]
    return [*written, *_judged(artefact, measured, about, out, along, paid)]


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


def _with_legend(spec: Curves, measured: Measurements) -> Curves:
    """The spec with what its legend asks for behind each title, as far as it is measured."""
    if (beside := spec.legend) is None:
        return spec

    def titled(series: Series) -> Series:
        found = measured.get((series.run or "", beside.measure))
        said = []
        for metric, unit in beside.units.items():
            value = next((r.value for r in (found.all(metric, beside.of) if found else ()) if not r.at), None)
            if value is not None:
                said.append(f"{value:.4g} {unit}")
        return series.model_copy(update={"title": ", ".join([series.title, *said])})

    return spec.model_copy(update={"series": tuple(map(titled, spec.series))})


def _doses(spec: Curves, measured: Measurements) -> list[str]:
    """Lines for the caption of a figure along training tokens: unique tokens x epochs of the steps of each point."""
    panel = next((panel for panel in spec.of_readings if panel.x == TRAINED), None)
    lines = []
    for series in spec.shown(panel) if panel else ():
        found = [measured.get((run, panel.measure or "")) for run in series.runs]
        points = [" + ".join(map(str, own)) for m in found if m is not None and (own := doses(m))]
        lines += [f"{series.title}: {'; '.join(points)} tokens."] * bool(points)
    return lines


def _provenance(artefact: Artefact, spec: Curves, about: About, out: Path, along: Along, paid: Costs | None) -> Path:
    """Write which file each line of each panel comes from; returns the path."""
    cells: dict[str, dict[str, Origin]] = {s.name: {} for s in spec.series}
    for panel in spec.panels if paid is not None else ():
        if spec.of_costs(panel):
            for series in spec.shown(panel):
                cells[series.name][f"{panel.x}.{panel.name}"] = paid.source.as_posix()
    for (series, column), points in along.items():
        files = list(dict.fromkeys(source.file for *_, source in points))
        cells[series][column] = files[0] if len(files) == 1 else files or None
    sources = [source for points in along.values() for *_, source in points]
    return write_provenance(
        out / f"{artefact.stem}.provenance.json", artefact, about.scale, cells, sources, {paid.source: paid.how} if paid is not None else None
    )


def _judged(artefact: Artefact, measured: Measurements, about: About, out: Path, along: Along, paid: Costs | None) -> list[Path]:
    """The claims file of a figure that has claims. Claims on costs are judged at any scale, since costs belong to none."""
    spec: Any = artefact.spec
    verdicts = []
    for claim in spec.claims:
        if paid is not None and not {point.column for point in claim.points} & {panel.name for panel in spec.of_readings}:
            remark = costs.remark(claim, paid.rows, spec.series[0].name)
            verdicts.append(judge_claim(artefact, claim, costs.look_in(claim, paid.rows), about, {}, remark, of_scale=False))
        else:
            verdicts.append(judge_claim(artefact, claim, _look_along(spec, measured, along), about, {}))
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
            _line(axis, series, style, curve_of_costs(paid.rows, series.name, panel), mark)
    _finish(axis, panel, SWEPT[panel.x], base=2)


def curve_of_costs(rows: Sequence[costs.Row], run: str, panel: Panel) -> Curve:
    """A cost of a run along a sweep."""
    own = [row for row in rows if (row.run, row.sweep) == (run, panel.x)]
    fits = [row for row in own if row.ok and row.cost(panel.y) is not None and not (panel.x == "length" and row.at < FIRST_LENGTH)]
    values = [value for row in fits if (value := row.cost(panel.y)) is not None]
    return Curve([row.at for row in fits], values, None, any(row.status == "out of memory" for row in own))


# --- readings ---


def _reading_panel(axis: Axes, spec: Curves, panel: Panel, along: Along) -> None:
    unit, bands, levels = panel.factor, False, dict[str, tuple[float, str]]()
    for series, style in _styled(spec):
        if series not in spec.shown(panel):
            continue
        found = [(x, reading) for x, reading, _ in along[series.name, panel.name]]
        if panel.x == TRAINED and found and not found[-1][0]:  # 0 is no point on a logarithmic axis
            levels[f"{series.title}, not trained here"] = unit * found[-1][1].value, style["color"]
            continue
        errors = [None if r.stderr is None else unit * r.stderr for _, r in found]
        bands = bands or any(place(x) != x for x, _ in found)
        curve = Curve([place(x) for x, _ in found], [unit * r.value for _, r in found], None if None in errors else [e or 0.0 for e in errors])
        elsewhere = not found and series.name in _ran(along)
        _line(axis, series, style, curve, None if elsewhere else _lacking(series, along[series.name, panel.name]))
    for k, (title, points) in enumerate(panel.published.items()):
        pairs = [(x, y) for x, ys in points.items() for y in (ys if isinstance(ys, tuple) else (ys,))]
        how = {"linestyle": ":" if 1 < len(pairs) == len(points) else "none", "marker": "d8+1"[k % 4]}
        axis.plot(*zip(*pairs, strict=True), label=f"{title}, published", color="0.6", markersize=5, **how)
    _finish(axis, panel, panel.x, base=2 if bands else _base(axis))
    _mark(axis, panel)
    for title, (y, color) in levels.items():
        axis.axhline(y, label=title, color=color, linestyle="--", linewidth=1.2, zorder=0)


def _lacking(series: Series, points: list[tuple[Scalar, Reading, Source]]) -> str:
    """For the legend: that a series was not run, or how many of its runs were not."""
    ran, wanted = len({source.file for *_, source in points}), len(set(series.all_runs))
    return "" if ran == wanted else f" ({NOT_RUN})" if not ran else f" ({wanted - ran} of {wanted} {NOT_RUN})"


def _ran(along: Along) -> set[str]:
    """The names of the series that a panel has points of."""
    return {series for (series, _), points in along.items() if points}


def _not_in_all(spec: Curves, along: Along) -> list[str]:
    """Lines for the caption, one a panel: the series that were not run for it, but for another panel."""
    ran = _ran(along)
    lacks = {p.title or p.name: [s.title for s in spec.shown(p) if s.name in ran and not along[s.name, p.name]] for p in spec.of_readings}
    return [f"{NOT_RUN} for {panel}: {'; '.join(titles)}." for panel, titles in lacks.items() if titles]


def _look_along(spec: Curves, measured: Measurements, along: Along) -> Look:
    """The function by which claims read the panels of readings."""

    def look(point: Point) -> Value | str:
        series, panel = (next(v for v in values if v.name == n) for values, n in ((spec.series, point.row), (spec.of_readings, point.column)))
        [at] = point.at.values()
        run = series.run or series.points.get(at, "")  # type: ignore[call-overload]
        if gate_of(measured, run) == FAILED:
            return f"{run} failed its gate: its parallel and recurrent forms disagree"
        reading = next((reading for x, reading, _ in along[series.name, panel.name] if x == at), None)
        return value_of(measured.get((run, panel.measure or "")), reading, f"{point.row} at {at}", point.column or "", panel.factor)

    return look


def readings_along(series: Series, panel: Panel, measured: Measurements) -> list[tuple[Scalar, Reading, Source]]:
    """The points of a series in a panel, as far as they are measured: along an axis of one run's readings, or one run for each x, or each at the
    tokens that it was trained on."""
    runs: list[tuple[Scalar | None, str]] = list(series.points.items()) or [(None, run) for run in series.all_runs]
    found: list[tuple[Scalar, Reading, Source]] = []
    for x, run in runs:
        if (m := measured.get((run, panel.measure or ""))) is None:
            continue
        at = trained_on(m) if panel.x == TRAINED else x
        for reading in m.all(panel.metric or "", panel.of):
            if at is None and _along(reading, panel):
                found.append((reading.at[panel.x], reading, m.source))
            elif at is not None and reading.at == panel.at:
                found.append((at, reading, m.source))
    return sorted(found, key=lambda point: place(point[0])) if all(isinstance(place(x), int | float) for x, *_ in found) else found


def _along(reading: Reading, panel: Panel) -> bool:
    """Whether a reading lies along the panel's axis, at the panel's place on its other ones."""
    return panel.x in reading.at and {axis: value for axis, value in reading.at.items() if axis != panel.x} == panel.at


def place(x: Scalar) -> Scalar:
    """The position of a value on its axis; that of a band, such as "64-128", is its middle."""
    band = BAND.fullmatch(x) if isinstance(x, str) else None
    return (int(band[1]) + int(band[2])) / 2 if band else x


def _undefined(series: Series, panel: Panel, measured: Measurements) -> list[str]:
    """Lines for the caption, one a reason: where along the axis a run's metric is not defined, and why."""
    places: dict[str, list[str]] = {}
    m = measured.get((series.run or "", panel.measure or ""))
    for r in m.readings if m else ():
        if r.value is None and r.metric == panel.metric and panel.of in (None, r.of) and _along(r, panel):
            places.setdefault(r.why, []).append(str(r.at[panel.x]))
    return [f"{series.title}: {NOT_DEFINED} at {', '.join(dict.fromkeys(at))}: {why}." for why, at in places.items()]


# --- drawing ---


def _shape(spec: Curves) -> tuple[int, int]:
    rows = (len(spec.panels) + 2) // 3
    return rows, -(-len(spec.panels) // rows)


def _figure(spec: Curves, title: str) -> Figure:
    rows, columns = _shape(spec)
    figure = Figure(figsize=(max(13 / 3 * columns, 6.5), 4 * rows if rows > 1 else 4.4), layout="constrained")
    figure.suptitle(wrap(figure, title.splitlines()))
    return figure


def _axes(figure: Figure, spec: Curves) -> list[Axes]:
    grid = list(figure.subplots(*_shape(spec), squeeze=False).flat)
    for axis in grid[len(spec.panels) :]:
        axis.set_axis_off()
    return grid[: len(spec.panels)]


def _styled(spec: Curves) -> Iterator[tuple[Series, dict[str, Any]]]:
    """The series, and how their lines look: that of their first run."""
    return zip(spec.series, lines([series.all_runs[0] for series in spec.series]), strict=True)


def _line(axis: Axes, series: Series, style: dict[str, Any], curve: Curve, mark: str | None) -> None:
    """A line with a marker at each point; a large cross where memory ended after the last. A line without points is in the legend alone, and with
    `mark` None a line is not in the legend."""
    label = "_nolegend_" if mark is None else series.title + mark
    axis.errorbar(curve.x, curve.y, curve.error, label=label, markersize=4.5, capsize=2, elinewidth=0.8, **style)
    if curve.ends and curve.x:
        axis.plot(curve.x[-1], curve.y[-1], marker="x", markersize=10, markeredgewidth=2, color=style["color"])


def _positive(axis: Axes, ruler: str) -> list[float]:
    """All positive numbers along the axis "x" or "y"; none if the axis has words."""
    found = [value for line in axis.get_lines() for value in getattr(line, f"get_{ruler}data")(orig=True)]
    return [float(value) for value in found if value > 0] if all(isinstance(value, Real) for value in found) else []


def _base(axis: Axes) -> int | None:
    """The base of a logarithmic x axis: 2 if the large numbers are powers of 2, else 10. None where the numbers span too little for one."""
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
