"""Figures as specs: curves along a sweep, attention maps, grids of two axes, and those that a file beside
their spec draws."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from relinear.plan.claims import Address, Asked, InUnit, Point, Scalar, Spec, known, require_unique
from relinear.plan.places import check_value
from relinear.plan.strict import Strict

Sweep = Literal["batch", "length", "input"]
Cost = Literal[
    "decode_tokens_per_second", "prefill_tokens_per_second", "ms_per_token", "peak_gib", "cache_gib", "batch"
]
LARGEST = "largest"
TRAINED = "training_tokens"  # an axis: all tokens that a run was trained on, as its measurement says


# --- curves ---


class Series(Strict):
    """A line: a `run` along an axis of its readings, or `runs`, each at the tokens that it was trained on.

    It looks as the method of its first run does in every figure (`relinear.draw.style`).
    """

    title: str
    run: str | None = None
    runs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The run, or the title where it has several."""
        return self.run or self.title

    @property
    def all_runs(self) -> tuple[str, ...]:
        """The runs whose values it draws."""
        return (self.run,) if self.run else self.runs


class Panel(InUnit):
    """One pair of axes: a cost `y` along a sweep `x`, or a metric along the axis `x` of its readings.

    `at`: the place of the readings on their other axes. `series`: the series that are shown; all if none are
    named. Neighbours that show the same series share a legend. `column`: the panel's name, if two panels
    share a metric; panels of one name show the same readings, of other series. `published`: title -> x -> y
    as a paper prints them, or several y for as many models. `marks`: title -> x of a vertical line; `levels`:
    title -> y of a horizontal line. A band on the x axis, such as "64-128", is drawn in its middle, on a
    logarithmic axis. `limits`: the ends of the y axis.
    """

    x: str
    y: Cost | None = None
    measure: str | None = None
    metric: str | None = None
    of: str | None = None
    at: dict[str, Scalar] = {}
    column: str = ""
    title: str = ""
    xlabel: str = ""
    ylabel: str = ""
    log: bool = False
    limits: tuple[float, float] | None = None
    series: tuple[str, ...] = ()
    published: dict[str, dict[int | float, float | tuple[float, ...]]] = {}
    marks: dict[str, int | float] = {}
    levels: dict[str, float] = {}

    @property
    def name(self) -> str:
        """The name by which claims call it: its `column`, else the cost or metric on its y axis."""
        return self.column or self.y or self.metric or ""

    @property
    def key(self) -> str:
        """The name by which provenance calls it: several panels may show a cost along several sweeps."""
        return f"{self.x}.{self.name}" if self.y else self.name


class Beside(Strict):
    """A reading without axes of each series' run, which stands behind the series' title in the legend; `unit`
    for reading."""

    measure: str
    metric: str
    of: str | None = None
    unit: str


class Curves(Spec):
    """Lines along a sweep. A panel that names a cost shows rows of the `file` for one `model`; other panels
    show readings.

    The first series is the baseline of costs. `legend`: readings that stand behind each series' title.
    `caption`: lines below. `hardware`: what the paper measured costs on; `published`: what its text says
    about them.
    """

    gated = True
    called = "series"

    series: tuple[Series, ...]
    panels: Annotated[tuple[Panel, ...], Field(min_length=1)]
    legend: tuple[Beside, ...] = ()
    caption: tuple[str, ...] = ()
    file: str | None = None
    model: str | None = None
    hardware: str = ""
    published: str = ""

    def of_costs(self, panel: Panel) -> bool:
        """Whether a panel draws rows of the file of costs."""
        return self.file is not None and panel.measure is None

    def shown(self, panel: Panel) -> tuple[Series, ...]:
        """The series that a panel draws."""
        return tuple(s for s in self.series if not panel.series or s.name in panel.series)

    @property
    def of_readings(self) -> tuple[Panel, ...]:
        """The panels that draw measurements."""
        return tuple(panel for panel in self.panels if not self.of_costs(panel))

    def addresses(self, scale: str | None = None) -> Iterator[Address]:
        """The readings of each panel's series, and those that the legend shows."""
        for panel in self.of_readings:
            for series in self.shown(panel):
                yield from (
                    Address(run, panel.measure or "", panel.metric or "", panel.of, panel.at)
                    for run in series.all_runs
                )
        yield from (
            Address(s.run, place.measure, place.metric, place.of)
            for s in self.series
            if s.run
            for place in self.legend
        )

    def asked(self) -> list[Asked]:
        """The readings along each panel's axis, and those that claims name on it. Tokens of training are an
        axis of runs, and of no reading."""
        panels = {panel.name: panel for panel in self.of_readings}
        named = [(panel, {panel.x: None}, "") for panel in self.of_readings]
        named += [
            (panels[point.column], point.at, where)
            for where, point in self.claimed()
            if point.column in panels
        ]
        return super().asked() + [
            Asked((panel.measure or "",), panel.metric or "", panel.of, {**panel.at, **at}, where)
            for panel, at, where in named
            if panel.x != TRAINED
        ]

    def names(self) -> list[str]:
        """What a claim may name as `row`: the series."""
        return [series.name for series in self.series]

    def dosed(self) -> None:
        """No claim on curves states a dose."""

    def files(self) -> list[str]:
        """Files it draws beside the measurements."""
        return [self.file] if self.file else []

    def publishes(self) -> bool:
        """Whether it shows published values."""
        return bool(self.published) or any(panel.published for panel in self.panels)

    def check(self) -> None:
        """Raise ValueError for parts that do not fit each other."""
        require_unique("series", self.names())
        for series in self.series:
            if bool(series.run) == bool(series.runs):
                raise ValueError(f"series {series.title!r} needs either a run or runs")
        if self.file and not self.model:
            raise ValueError("costs need the `model` at whose shape they were measured")
        # panels may share readings
        read = {(p.name, p.measure, p.metric, p.of, p.unit, p.x, str(p.at)) for p in self.of_readings}
        require_unique("panel (named by `column`, else by its metric)", sorted(name for name, *_ in read))
        for panel in self.panels:
            self._check_panel(panel)
        if self.file and len(self.of_readings) == len(self.panels):
            raise ValueError(f"no panel shows a cost of {self.file}; give one its `y`, or leave out the file")
        super().check()

    def _check_panel(self, panel: Panel) -> None:
        """Raises ValueError for a panel that names no numbers, or series whose numbers are not along its
        axis."""
        for name in panel.series:
            known("series", name, self.names(), f"the panel over {panel.x!r}")
        needed = ("y",) if self.of_costs(panel) else ("measure", "metric")
        if missing := [key for key in needed if not getattr(panel, key)]:
            raise ValueError(f"the panel over {panel.x!r} needs {' and '.join(missing)}")
        if panel.y and panel.measure:
            raise ValueError(
                f"the panel over {panel.x!r} shows the cost {panel.y!r} or the measure {panel.measure!r};"
                " give one of both"
            )
        if self.of_costs(panel):
            known("sweep", panel.x, get_args(Sweep), "panels")
        for series in self.shown(panel):
            if self.of_costs(panel) and not series.run:
                raise ValueError(f"series {series.title!r}: costs are of a run")
            if series.runs and panel.x != TRAINED:
                raise ValueError(
                    f"series {series.title!r}: `runs` lie along {TRAINED!r}; the panel is over {panel.x!r},"
                    " so give a run"
                )

    def run_of(self, point: Point) -> str | None:
        """The run whose number a point is; None on a series of several runs."""
        return next(series.run for series in self.series if series.name == point.row)

    def check_place(self, point: Point, where: str) -> None:
        """Raise ValueError where a claim names a column or place that is not there."""
        of_costs = self.file is not None and point.column not in {panel.name for panel in self.of_readings}
        known(
            "column",
            point.column,
            get_args(Cost) if of_costs else {panel.name for panel in self.panels},
            where,
        )
        if len(point.at) != 1:
            raise ValueError(
                f"{where}: {point.row} needs one place on a sweep, `at: {{{self.panels[0].x}: ...}}`; got"
                f" {point.at}"
            )
        [(axis, value)] = point.at.items()
        along = [panel.x for panel in self.of_readings if panel.name == point.column]
        known("sweep", axis, get_args(Sweep) if of_costs else along, where)
        if value != LARGEST and (of_costs or axis == TRAINED):
            check_value(axis, value, 512, f"{where}: ", f", or {LARGEST}" * of_costs)


# --- attention maps ---


class RunShown(Strict):
    """A run whose weights are shown, and the measure that kept them, if not the figure's."""

    run: str
    measure: str | None = None


class AttentionMaps(Spec):
    """Attention weights, in one of three forms.

    With a `run`: softmax and linear weights side by side, and their distances by layer and head. With `runs`
    (title -> run) and `places` ((layer, head), as the measurement numbers them): a column a run, a row a
    place. With `runs` alone: a column a run, in the head that the measurement kept, and `rows`. `softmax`:
    the title of a first column, softmax attention's weights. `seeds`: claims are judged by the means over the
    trainings of each run, of which the first is drawn.

    Rows: `map`, all weights; `query`, the weights of the last query; `points`, weights against scores q.k;
    `scores`, the histogram of scores; `relative`, weights over their query's largest against scores less the
    largest, in all kept heads.
    """

    run: str | None = None
    runs: dict[
        str,
        Annotated[
            RunShown, BeforeValidator(lambda given: {"run": given} if isinstance(given, str) else given)
        ],
    ] = {}
    rows: tuple[Literal["map", "query", "points", "scores", "relative"], ...] = ("map", "query")
    places: tuple[tuple[int, int], ...] = ()
    softmax: str | None = None
    measure: str = "fidelity"
    seeds: bool = False
    caption: tuple[str, ...] = ()

    @property
    def shown(self) -> tuple[RunShown, ...]:
        """All runs that are shown."""
        return (RunShown(run=self.run),) if self.run else tuple(self.runs.values())

    def addresses(self, scale: str | None = None) -> Iterator[Address]:
        """The measurements that left weights."""
        return (Address(shown.run, shown.measure or self.measure) for shown in self.shown)

    def asked(self) -> list[Asked]:
        """The readings that claims name."""
        measures = {shown.run: (shown.measure or self.measure,) for shown in self.shown}
        return [
            Asked(measures[point.row], point.column or "", at=point.at, where=where)
            for where, point in self.claimed()
        ]

    def names(self) -> list[str]:
        """What a claim may name as `row`: the runs."""
        return [shown.run for shown in self.shown]

    def measure_of(self, point: Point) -> str:
        """The measure that a run's weights are of, unless a metric of it is called as it is."""
        shown = next(shown for shown in self.shown if shown.run == point.row)
        measure = shown.measure or self.measure
        return measure if measure != point.column else ""

    def check(self) -> None:
        """Raise ValueError for parts that do not fit each other."""
        if (self.run is None) == (not self.runs):
            raise ValueError("attention maps need either a `run` or `runs: {<title>: <run>}`")
        require_unique("run", self.names())
        if self.run and (self.places or self.softmax):
            raise ValueError("places and softmax are of several `runs`; got a `run`")
        super().check()

    def check_place(self, point: Point, where: str) -> None:
        """Raise ValueError where a claim names a metric that such figures do not have."""
        known(
            "column",
            point.column,
            ("kl", "mse") if self.run else ("entropy", "entropy_share", "monotonicity", "kl"),
            where,
        )


# --- grids ---


class GridPanel(InUnit):
    """One heatmap: a metric of a run along the figure's two axes. What a panel leaves out, the figure's
    `cell` says for all panels.

    `log`: a logarithmic colour scale. `optional`: left out if it is not measured.
    """

    run: str
    measure: str
    metric: str
    of: str | None = None
    log: bool = False
    title: str = ""
    optional: bool = False

    @property
    def name(self) -> str:
        """The title, or the run if there is no title."""
        return self.title or self.run


class GridCell(Strict):
    """The axes of all panels, `x` to the right and `y` downwards, and what all panels show alike."""

    x: str
    y: str
    measure: str | None = None
    metric: str | None = None
    of: str | None = None
    unit: Literal["percent", "raw"] | None = None


class Grid(Spec):
    """Heatmaps of readings along two axes, a panel a run or a metric of a run.

    `limits`: the ends of the colours; without them each metric has its own. `lines`: metrics without axes; a
    metric's value in a panel's measurement has a mark at the edge, above for x and at the right for y; a cell
    is then all up to its value, from the cell before. If a measurement has a reading `not_informative` at x,
    a mark stands there, which the caption explains. `middles`: a panel's title has the metric's mean, which
    is its reading without axes, or on a logarithmic scale the median. `caption`: lines below.
    """

    gated = True
    called = "panel"

    cell: GridCell
    panels: Annotated[tuple[GridPanel, ...], Field(min_length=1)]
    limits: tuple[float, float] | None = None
    lines: dict[Literal["x", "y"], str] = {}
    middles: bool = False
    caption: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _with_cell(cls, given: Any) -> Any:
        """The spec with what `cell` says put into each panel that does not say it."""
        match given:
            case {"cell": {**cell}, "panels": list(panels)}:
                shared = {
                    key: value for key, value in cell.items() if key in ("measure", "metric", "of", "unit")
                }
                return {
                    **given,
                    "panels": [shared | panel if isinstance(panel, dict) else panel for panel in panels],
                }
        return given

    def panel(self, name: str) -> GridPanel:
        """The panel of that name."""
        return next(panel for panel in self.panels if panel.name == name)

    def addresses(self, scale: str | None = None) -> Iterator[Address]:
        """The readings of each panel, and those of its lines."""
        for panel in self.panels:
            yield Address(panel.run, panel.measure, panel.metric, panel.of)
            yield from (Address(panel.run, panel.measure, line) for line in self.lines.values())

    def asked(self) -> list[Asked]:
        """The readings along both axes of each panel, those of its lines, and those that claims name."""
        axes = {self.cell.x: None, self.cell.y: None}
        shown = [Asked((panel.measure,), panel.metric, panel.of, axes) for panel in self.panels]
        named = [
            Asked((panel.measure,), panel.metric, panel.of, point.at, where)
            for where, point in self.claimed()
            for panel in [self.panel(point.row)]
        ]
        return super().asked() + shown + named

    def names(self) -> list[str]:
        """What a claim may name as `row`: the panels."""
        return [panel.name for panel in self.panels]

    def check(self) -> None:
        """Raise ValueError for parts that do not fit each other."""
        require_unique("panel", self.names())
        super().check()

    def run_of(self, point: Point) -> str | None:
        """The run whose number a panel shows."""
        return self.panel(point.row).run

    def check_place(self, point: Point, where: str) -> None:
        """Raise ValueError where a claim names a column or place that is not there."""
        if point.column is not None:
            known("column", point.column, [self.panel(point.row).metric], where)
        if point.at and (self.cell.x not in point.at or len(point.at) > 2):
            needs = (
                f"{point.row} needs `at` with {self.cell.x} and at most one more, such as {self.cell.y}, or"
                " none, which is the metric without axes"
            )
            raise ValueError(f"{where}: {needs}; got {point.at}")


# --- drawn by a file beside the spec ---


class Needed(Strict):
    """A measurement that a figure reads: the run and the measure."""

    run: str
    measure: str


class Own(Spec):
    """A figure that `<stem>.py` beside the spec draws: `def draw(spec, measured, about, out) -> list[Path]`,
    which writes <stem>.<suffix> of `makes`.

    Claims name a run, a metric as column and a place on its axes; those on `inputs`, what the file's `look`
    finds, which its constant `PLACES` lists (`relinear.plan.places`).
    """

    called = "run"

    needs: tuple[Needed, ...]
    inputs: tuple[str, ...] = ()
    makes: tuple[str, ...] = ("png", "pdf")
    options: dict[str, Scalar | bool | None | tuple[Scalar, ...] | dict[str, Scalar]] = {}

    def addresses(self, scale: str | None = None) -> Iterator[Address]:
        """The measurements that the file reads."""
        return (Address(need.run, need.measure) for need in self.needs)

    def asked(self) -> list[Asked]:
        """The readings that claims name; none where the file finds them."""
        measures = {
            need.run: tuple(n.measure for n in self.needs if n.run == need.run) for need in self.needs
        }
        return [
            Asked(measures[point.row], point.column or "", at=point.at, where=where)
            for where, point in self.claimed()
            if self.needs
        ]

    def names(self) -> list[str]:
        """What a claim may name as `row`: the runs; without `needs`, what the claims name is for the file's
        `look` to find."""
        said = (point.row for claim in self.claims for point in (*claim.all_points, *claim.requires))
        return list(dict.fromkeys((need.run for need in self.needs) if self.needs else said))

    @property
    def made(self) -> tuple[str, ...]:
        """The suffixes of the files that its file writes."""
        return self.makes

    def files(self) -> list[str]:
        """Files it draws beside the measurements."""
        return list(self.inputs)

    def dosed(self) -> list[str] | None:
        """Its runs; None where it has `inputs` alone."""
        return self.names() if self.needs else None

    def check_place(self, point: Point, where: str) -> None:
        """Raise ValueError where a claim names no metric."""
        if point.column is None:
            raise ValueError(f"{where} names no metric as `column`")
