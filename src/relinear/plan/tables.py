"""Tables as specs: rows x columns, and where the number of every cell is read."""

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from relinear import stages
from relinear.plan.bounds import BEST
from relinear.plan.chance import chance_of
from relinear.plan.claims import OURS, Address, Claim, InUnit, Point, Scalar, Spec, known, require_unique
from relinear.plan.held import Holds
from relinear.plan.published import Entry
from relinear.plan.strict import Strict

DATA = "{data}"  # in a column's title: the name of the data that its measure reads at a scale


class Place(Strict):
    """The reading of a cell. `{word}` stands for the row's word of that name, as in `run:
    "lizard_w64_m{meta}"`."""

    run: str | None = None
    measure: str | None = None
    metric: str | None = None


class RowPlace(Place):
    """A cell whose row says where the number is read, as far as that differs from the column's place.

    `value`: a number by definition, which no run is read for. `undefined`: the reason why there cannot be a
    number.
    """

    value: float | None = None
    undefined: str | None = None

    @model_validator(mode="after")
    def _alone(self) -> Self:
        if self.undefined is not None and self.model_fields_set != {"undefined"}:
            raise ValueError("a cell that is `undefined` is read nowhere; give one or the other")
        return self


class Recovery(Strict):
    """(score - chance) / (reference - chance), where `row` is the reference and `column` has the scores.

    `chance` is a number in the column's unit, the name of a row, or None for the column's guessing rate.
    `lower`: lower scores are better.
    """

    column: str
    row: str
    chance: float | str | None = None
    lower: bool = False


class Ties(Strict):
    """The win-and-tie rate: the share of `columns` in which a row scores at least (1 - `tolerance`) of the
    row `row`.

    Higher scores are better. Source: Hauzenberger et al. 2026 (arXiv 2603.15590), whose alpha is the
    tolerance.
    """

    columns: Annotated[tuple[str, ...], Field(min_length=2)]
    row: str
    tolerance: Annotated[float, Field(ge=0, lt=1)]


class Column(Place, InUnit):
    """A column: a reading of each row's run, the unweighted mean of other columns, a recovery or a
    win-and-tie rate.

    A title such as "CoLA ({data})" names the data that the scale has in place of the paper's; the CSV then
    has a column `<column>_data`. `digits`: significant digits in the Markdown. Not `shown`: in the CSV alone.
    `optional`: in the Markdown only if a row has a number there; in the CSV, too, if `csv` does not name the
    column. `not_at`: scales that do not measure the column. `note`: a line of the caption, if the Markdown
    has the column.
    """

    name: str
    title: str = ""
    of: str | None = None
    at: dict[str, Scalar] = {}
    digits: Annotated[int, Field(gt=0)] | None = None
    mean: tuple[str, ...] = ()
    recovery: Recovery | None = None
    ties: Ties | None = None
    shown: bool = True
    optional: bool = False
    not_at: tuple[str, ...] = ()
    note: str = ""

    @property
    def heading(self) -> str:
        """The title, or the name if there is no title."""
        return self.title or self.name

    @property
    def derived(self) -> bool:
        """Whether the column is computed from other columns."""
        return bool(self.mean or self.recovery or self.ties)

    @property
    def names_data(self) -> bool:
        """Whether the title has a place for the name of the data."""
        return DATA in self.title

    @property
    def csv_parts(self) -> tuple[str, ...]:
        """The column's number, standard error and number of items in the CSV."""
        return self.name, f"{self.name}_stderr", f"{self.name}_n"


class Row(Strict):
    """A row: a run, its words, and the cells that are read elsewhere than the column says.

    A row without a run has published numbers alone. `optional`: left out if nothing of it is measured.
    `not_at`: scales that do not measure the row. `measures`: measure that columns name -> measure that this
    row reads instead.
    """

    run: str | None = None
    name: str = ""
    optional: bool = False
    not_at: tuple[str, ...] = ()
    text: dict[str, Scalar | bool | None] = {}
    measures: dict[str, str] = {}
    cells: dict[
        str, Annotated[RowPlace, BeforeValidator(lambda v: {"value": v} if isinstance(v, int | float) else v)]
    ] = {}


class Undefined(NamedTuple):
    """The reason why a number cannot exist."""

    reason: str


class Line(NamedTuple):
    """A row with the place of each cell: an address, a number by definition, undefined, or None in a row
    without a run.

    `entry`: a JSON pointer to the row in its spec. `given`: the columns whose cells the row itself says.
    """

    name: str
    run: str | None
    text: dict[str, Scalar | bool | None]
    cells: dict[str, Address | Undefined | float | None]
    entry: str
    optional: bool = False
    not_at: tuple[str, ...] = ()
    given: tuple[str, ...] = ()


class Table(Spec):
    """Rows x columns.

    `texts`: word of a row -> its title; these columns stand in the Markdown in place of the run. `trained`
    adds trained parameters and tokens of each of `steps`; `trained: epochs` adds unique tokens x epochs of
    every step. `caption`: the lines below the first; `{<column>_n}` in them is the column's number of items,
    `{<column>_chance}` its guessing rate. `seeds`: a cell is the mean over the trainings of its run. `csv`:
    the CSV's columns in their order; optional columns follow. `holds`: the most bytes of a row's state; a
    row that holds more is refused before anything is trained.
    """

    gated = True
    facts: ClassVar[tuple[str, ...]] = ("method", "variant", "scale", "trainable_params")

    rows: Annotated[tuple[Row, ...], Field(min_length=1)]
    columns: Annotated[tuple[Column, ...], Field(min_length=1)]
    texts: dict[str, str] = {}
    trained: bool | Literal["epochs"] = False
    steps: tuple[str, ...] = ("distill", "finetune")
    seeds: bool = False
    caption: tuple[str, ...] = ()
    csv: tuple[str, ...] = ()
    holds: Holds | None = None
    _published: dict[str, tuple[Entry, ...]] = PrivateAttr(default_factory=dict)

    @property
    def made(self) -> tuple[str, ...]:
        """The suffixes of the files that its shape writes."""
        return ("csv", "md")

    def put_beside(self, published: Mapping[str, tuple[Entry, ...]]) -> None:
        """Set the published numbers: row -> what papers print there."""
        self._published = dict(published)

    def published(self, row: str) -> Entry | None:
        """The published numbers that stand beside a row; None if there are none."""
        return next(iter(self._published.get(row, ())), None)

    def printed(self, row: str) -> tuple[Entry, ...]:
        """The published numbers of a row, and those that the paper's own table prints there for further
        models."""
        first, *more = self._published.get(row, ()) or (None,)
        return (
            tuple(entry for entry in (first, *more) if entry is first or entry.label == self.label)
            if first
            else ()
        )

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """The rows. Raises ValueError for a row without a name and a cell without a place."""
        for i, row in enumerate(self.rows):
            if not (row.name or row.run):
                raise ValueError(f"rows.{i} has neither a run nor a name")
        return tuple(self._line(row, f"rows/{i}") for i, row in enumerate(self.rows))

    def _line(self, row: Row, entry: str) -> Line:
        name = row.name or row.run or ""
        for column in row.cells:
            known("column", column, (c.name for c in self.columns), f"row {name!r}, cells")
        for measure in row.measures:
            known(
                "measure",
                measure,
                dict.fromkeys(c.measure for c in self.columns if c.measure),
                f"row {name!r}, measures",
            )
        cells = {column.name: self._place(name, row, column) for column in self.columns if not column.derived}
        return Line(name, row.run, row.text, cells, entry, row.optional, row.not_at, tuple(row.cells))

    def _place(self, name: str, row: Row, column: Column) -> Address | Undefined | float | None:
        """Where the number of a row in a column is read: as the row's own cell says, then as the column
        says."""
        own = row.cells.get(column.name, RowPlace())
        if own.undefined is not None:
            return Undefined(own.undefined)
        if own.value is not None:
            return own.value
        run = own.run or row.run or column.run
        if run is None:
            return None
        measure = own.measure or row.measures.get(column.measure or "", column.measure)
        found = {"run": run, "measure": measure, "metric": own.metric or column.metric}
        for key, value in found.items():
            if not value:
                raise ValueError(f"the cell of row {name!r} in column {column.name!r} names no {key}")
        at = {axis: _filled(value, row.text) for axis, value in column.at.items()}
        run, measure, metric, of = (_filled(value, row.text) for value in (*found.values(), column.of))
        return Address(run, measure, metric, of, at)

    @cached_property
    def published_columns(self) -> tuple[str, ...]:
        """The columns in which something is published."""
        shown = {
            column for entries in self._published.values() for entry in entries for column in entry.values
        }
        return tuple(column.name for column in self.columns if column.name in shown)

    def addresses(self, scale: str | None = None) -> Iterator[Address]:
        """The place of every reading; at a scale, without the rows and columns that are left out there."""
        left_out = {column.name for column in self.columns if scale in column.not_at}
        cells = (cell for line in self.lines if scale not in line.not_at for cell in line.cells.items())
        return (cell for name, cell in cells if isinstance(cell, Address) and name not in left_out)

    def names(self) -> list[str]:
        """What a claim may name as `row`: the rows."""
        return [line.name for line in self.lines]

    def publishes(self) -> bool:
        """Whether published numbers stand beside ours."""
        return bool(self.published_columns)

    def sources(self) -> list[str]:
        """The labels of the tables that print the published numbers."""
        return list(dict.fromkeys(entry.label for entries in self._published.values() for entry in entries))

    def check(self) -> None:
        """Raise ValueError for parts that do not fit each other."""
        require_unique("column", (column.name for column in self.columns))
        require_unique("row", self.names())
        for line in self.lines:
            if all(cell is None for cell in line.cells.values()) and not self.published(line.name):
                raise ValueError(f"row {line.name!r} has no run, and nothing is published in it")
        for step in self.steps:
            known("training stage", step, stages.training(), "steps")
        self._check_derived()
        self._check_published()
        self._check_claims()
        for line in self.lines:
            for text in line.text:
                known("text", text, self.texts, f"row {line.name!r}")
        fields = [f"{c.name}_n" for c in self.columns]
        fields += [f"{c.name}_chance" for c in self.columns if self.chance(c.name) is not None]
        for line in self.caption:
            for field in _fields(line):
                known("field", field, fields, f"caption {line!r}")
        require_unique("csv", self.csv)
        for name in self.csv:
            if not re.fullmatch(r"[a-z]+_tokens", name):
                known("column", name, self.csv_names, "csv")
        super().check()

    def _check_derived(self) -> None:
        """Raise ValueError for a column that is computed from what is not there, or from what does not
        fit."""
        columns, rows = {column.name: column for column in self.columns}, self.names()
        read = [name for name, column in columns.items() if not column.derived]
        for column in self.columns:
            for part in column.mean:
                known("column", part, read, f"the mean {column.name!r}")
            if len({columns[part].unit for part in column.mean}) > 1:
                raise ValueError(f"the mean {column.name!r} is of percent and raw columns")
            other = [line.name for line in self.lines for part in column.mean if _of_other_run(line, part)]
            if self.seeds and other:
                raise ValueError(
                    f"the mean {column.name!r} over seeds is of several runs in row {other[0]!r}"
                )
            if of := column.recovery:
                scores = (name for name, c in columns.items() if not (c.recovery or c.ties))
                known("column", of.column, scores, f"the recovery {column.name!r}")
                for row in (of.row, *([of.chance] if isinstance(of.chance, str) else [])):
                    known("row", row, rows, f"the recovery {column.name!r}")
                if of.chance is None and self.chance(of.column) is None:
                    raise ValueError(
                        f"the recovery {column.name!r} needs `chance`: what guessing scores in {of.column!r}"
                        " is not known"
                    )
            if of := column.ties:
                for part in of.columns:
                    known("column", part, read, f"the ties {column.name!r}")
                known("row", of.row, rows, f"the ties {column.name!r}")

    def _check_published(self) -> None:
        """Raise ValueError for a published number beside no cell."""
        for row, entries in self._published.items():
            known("row", row, self.names(), "published.csv")
            for column in (column for entry in entries for column in entry.values):
                known("column", column, (c.name for c in self.columns), f"published.csv, row {row!r}")

    def _check_claims(self) -> None:
        """Raise ValueError for a paper's claim on a number that its table does not print, without a
        `proxy`."""
        columns, printed = {column.name: column for column in self.columns}, self.published_columns
        for claim in self.claims if printed else ():
            name = claim.full(claim.left).column
            of_the_task = name == "floor"  # what guessing scores in the paper's task
            if claim.ours or claim.paper or of_the_task or name not in columns or columns[name].derived:
                continue
            if name not in printed:
                raise ValueError(
                    f"claim {claim.claim!r}: nothing is published in {name!r}; possible: a column of"
                    f" {', '.join(printed)}, `proxy` with what the paper prints, or source: {OURS}"
                )

    def floored(self, claim: Claim) -> Claim:
        """The claim with the guessing rate of its left side's column as `floor`, if it says "larger" and has
        no floor."""
        if claim.op == "<" or claim.ratio is not None or claim.floor is not None:
            return claim
        return claim.model_copy(update={"floor": self.chance(claim.full(claim.left).column)})

    def chance(self, column: str) -> float | None:
        """What guessing scores in a column, in its unit; None if that is unknown."""
        return chance_of({c.name: c for c in self.columns}, column)

    def best(self, point: Point) -> float | None:
        """The best value of a cell's metric, in its column's unit; None if that is unknown."""
        line = next((line for line in self.lines if line.name == point.row), None)
        place = line.cells.get(point.column or "") if line else None
        if not isinstance(place, Address) or place.metric not in BEST:
            return None
        return BEST[place.metric] * next(c.factor for c in self.columns if c.name == point.column)

    def run_of(self, point: Point) -> str | None:
        """The run whose number a cell is: the run that its cell names, else the row's."""
        line = next(line for line in self.lines if line.name == point.row)
        place = line.cells.get(point.column or "")
        return place.run if isinstance(place, Address) else line.run

    def check_place(self, point: Point, where: str) -> None:
        """Raise ValueError if a claim names a column that is not there, or a place within a cell."""
        known("column", point.column, (column.name for column in self.columns), where)
        if point.at:
            raise ValueError(f"{where}: a cell of a table has no `at`; got {point.at}")

    @cached_property
    def csv_names(self) -> tuple[str, ...]:
        """The CSV's columns if `csv` names none: run, words, facts, the parts of each column, then what is
        published."""
        runs = [line.run for line in self.lines]
        names = (
            ["row"] * any(line.name != line.run for line in self.lines)
            + ["run"] * any(runs)
            + list(self.texts)
        )
        names += [*self.facts, *(f"{step}_tokens" for step in self.steps)] if any(runs) else []
        names += ["doses"] * (self.trained == "epochs")
        names += [name for column in self.columns for name in self.csv_names_of(column)]
        names += ["gate", "collapsed", *(["seeds"] if self.seeds else [])]
        shown = [f"published_{column}" for column in self.published_columns]
        return (*names, *shown, *(("published_model", "published_source") if shown else ()))

    def csv_names_of(self, column: Column) -> list[str]:
        """The parts of a column in the CSV, with the spread over seeds and the name of the data if it has
        them."""
        seeds = [f"{column.name}_seed_sd"] if self.seeds else []
        return [*column.csv_parts, *seeds, *([f"{column.name}_data"] if column.names_data else [])]


def _of_other_run(line: Line, column: str) -> bool:
    return isinstance(place := line.cells[column], Address) and place.run != line.run


def _fields(template: str) -> list[str]:
    return re.findall(r"\{(\w*)\}", template)


def _filled(template: Any, fields: Mapping[str, Scalar]) -> Any:
    """The template with each `{field}` replaced. A template that is one field alone keeps the field's
    type."""
    if not isinstance(template, str):
        return template
    for field in _fields(template):
        known("field", field, fields, repr(template))
    if len(names := _fields(template)) == 1 and template == f"{{{names[0]}}}":
        return fields[names[0]]
    return re.sub(r"\{(\w+)\}", lambda match: str(fields[match[1]]), template)


class Picture(Table):
    """A table whose rows `<stem>.py` beside the spec draws: `def figure(spec, rows, about)`, which returns a
    matplotlib figure."""

    made = Spec.made
