"""Tables as specs: rows x columns, each a list or axes, and where every cell is read. A scatter plot is a table drawn otherwise."""

import itertools
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, model_validator

from relinear import stages
from relinear.plan.chance import chance_of
from relinear.plan.claims import FIGURE, GATE, Claim, InUnit, Origin, Point, Read, Scalar, Spec, known, once
from relinear.plan.strict import Strict


class Place(Strict):
    """Where a number is read: a reading of a run's measurement, or a `value` given by definition. What is left out is the column's or row's.

    Where rows or columns are axes, `{axis}` stands for the axis' value.
    """

    run: str | None = None
    measure: str | None = None
    metric: str | None = None
    of: str | None = None
    at: dict[str, Scalar] = {}
    value: float | None = None


class RowPlace(Place):
    """A cell that is read elsewhere than its column says. `undefined`, alone, is the reason why the row has no such number."""

    undefined: str | None = None

    @model_validator(mode="after")
    def _alone(self) -> Self:
        if self.undefined is not None and self.model_fields_set != {"undefined"}:
            raise ValueError("a cell that is `undefined` is read nowhere; give one or the other")
        return self


class Cell(Place, InUnit):
    """The place of every cell of a table whose rows or columns are axes, and the unit of its numbers."""

    digits: Annotated[int, Field(gt=0)] | None = None  # significant digits in the Markdown


DATA = "{data}"  # in a column's title: the name of the data that its measure reads at a scale


class Recovery(Strict):
    """The share of one row's score above `chance` that each row has: `chance` is in the column's unit, or a row; None: what guessing scores in the
    column. `lower`: lower scores are better."""

    column: str
    row: str
    chance: float | str | None = None
    lower: bool = False


class Ties(Strict):
    """The share of `columns` in which a row has at least 1 - `tolerance` of the score of one row, such as the teacher. Higher scores are better.

    It is the win-and-tie rate of Hauzenberger et al. (2026, arXiv 2603.15590), whose alpha is the tolerance.
    """

    columns: Annotated[tuple[str, ...], Field(min_length=2)]
    row: str
    tolerance: Annotated[float, Field(ge=0, lt=1)]


class Column(Cell):
    """A column: a place in each row's run, the unweighted mean of other columns, how much of another row's score each row has, or in how many
    columns it ties with that row.

    A title such as "CoLA ({data})" names the data that stood in for the paper's; the CSV then has them in `<column>_data`.
    Not `shown`: in the CSV alone. `optional`: in the Markdown where a row has it, and in the CSV, which then may leave its name out of `csv`.
    `planned`: published numbers that no measure of ours has yet; ours are `not run`. `not_at`: scales that do not measure it for this table.
    `note`: a line of the caption where the Markdown has the column.
    """

    name: str
    title: str = ""
    mean: tuple[str, ...] = ()
    recovery: Recovery | None = None
    ties: Ties | None = None
    shown: bool = True
    optional: bool = False
    planned: bool = False
    not_at: tuple[str, ...] = ()
    note: str = ""

    @property
    def heading(self) -> str:
        """The title, or the name where there is none."""
        return self.title or self.name

    @property
    def derived(self) -> bool:
        """Whether it is computed from other columns and read nowhere."""
        return bool(self.mean or self.recovery or self.ties)

    @property
    def names_data(self) -> bool:
        """Whether the title has a place for the name of the data."""
        return DATA in self.title


class Published(Strict):
    """One row of one paper's table for one model; `derived` columns are computed from its cells and not printed there."""

    model: str
    source: str = ""  # the label of the table that prints it, where that is not the spec's own
    origin: Origin
    values: dict[str, float]
    derived: tuple[str, ...] = ()


class PublishedFor(Strict):
    """Which model the published numbers of the table are of, where they are all of one."""

    model: str
    origin: Origin


def _sort_published(given: Any) -> Any:
    if isinstance(given, dict):
        return {"values": given}
    if isinstance(given, list | tuple):
        return {"entries" if all(isinstance(item, dict) for item in given) else "cells": given}
    return given


class RowPublished(Strict):
    """Entries of several models (the first is shown; the Markdown of a paper's own table has all of that table), values by column, or one value a
    column; the last two are of `published_for`."""

    entries: tuple[Published, ...] = ()
    values: dict[str, float] = {}
    cells: tuple[float | None, ...] = ()


class Row(Strict):
    """A row: a run, its words, and the cells that are not read where the column says. Without a run it has published numbers alone.

    `optional`: left out where nothing of it is measured. `not_at`: scales that do not measure it for this table. `measures`: a measure that columns
    name -> the one that this row reads in its place.
    """

    run: str | None = None
    name: str = ""
    optional: bool = False
    not_at: tuple[str, ...] = ()
    text: dict[str, Scalar | bool | None] = {}
    measures: dict[str, str] = {}
    cells: dict[str, Annotated[RowPlace, BeforeValidator(lambda v: {"value": v} if isinstance(v, int | float) else v)]] = {}
    published: Annotated[RowPublished, BeforeValidator(_sort_published)] = RowPublished()


Axes = dict[str, tuple[Scalar, ...]]


def _list_or_axes(given: Any) -> Any:
    return {"axes": given} if isinstance(given, dict) else {"list": given}


class Rows(Strict):
    """The rows of a table: a list, or all combinations along axes."""

    list: tuple[Row, ...] = ()
    axes: Axes = {}


class Columns(Strict):
    """The columns of a table: a list, or all combinations along axes."""

    list: tuple[Column, ...] = ()
    axes: Axes = {}


class Address(NamedTuple):
    """One reading."""

    run: str
    measure: str
    metric: str
    of: str | None
    at: Mapping[str, Scalar]


class Undefined(NamedTuple):
    """The reason why a number cannot exist."""

    reason: str


class Shown(NamedTuple):
    """Published numbers of a row, and where in the spec they stand: a pointer a column, and one for model and source."""

    model: str
    source: str
    values: dict[str, float]
    pointers: dict[str, str]
    entry: str


class Line(NamedTuple):
    """A row as it is drawn: each cell an address, a number by definition, undefined, or nothing (a row without a run). `entry` points into the
    spec. `published_too`: what the paper's own table prints in it for further models. `given`: the columns whose cells the
    row itself says."""

    name: str
    run: str | None
    text: dict[str, Scalar | bool | None]
    cells: dict[str, Address | Undefined | float | None]
    published: Shown | None
    entry: str
    optional: bool = False
    not_at: tuple[str, ...] = ()
    published_too: tuple[Shown, ...] = ()
    given: tuple[str, ...] = ()


class Table(Spec):
    """Rows x columns, each a list or axes whose every combination is one; with axes, `cell` says where their numbers are read.

    `texts` are titles of the rows' words, which stand in the Markdown in place of the run; `trained` adds trained parameters and tokens of
    each of `steps`, or (`epochs`) the unique tokens x epochs of every step that the run was trained in. `caption` lines stand under the
    first one; `{<column>_n}` in them is that column's n, `{<column>_chance}` what guessing scores in it. `not_at`: scales that do not measure the
    rows with these values of the rows' axes, scale -> axis -> values. `seeds`: a cell is the mean over its run's repeated trainings. `csv` gives
    the CSV's columns and their order; behind them stand the optional columns that it does not name, where a row has them.
    """

    suffixes = ("csv", "md", "claims.csv", "provenance.json")
    facts: ClassVar[tuple[str, ...]] = ("method", "variant", "scale", "trainable_params")

    rows: Annotated[Rows, BeforeValidator(_list_or_axes)]
    not_at: dict[str, Axes] = {}
    columns: Annotated[Columns, BeforeValidator(_list_or_axes)]
    cell: Cell | None = None
    published: tuple[tuple[float | None, ...], ...] = ()
    published_for: PublishedFor | None = None
    texts: dict[str, str] = {}
    trained: bool | Literal["epochs"] = False
    steps: tuple[str, ...] = ("distill", "finetune")
    seeds: bool = False
    caption: tuple[str, ...] = ()
    csv: tuple[str, ...] = ()

    @cached_property
    def all_columns(self) -> tuple[Column, ...]:
        """The columns as listed, or one for each point of the axes."""
        if not self.columns.axes:
            return self.columns.list
        cell, each = (self.cell or Cell()).model_dump(), _combinations(self.columns.axes)
        return tuple(Column(name=_named(own), title=", ".join(f"{axis} {value}" for axis, value in own.items()), **cell) for own in each)

    @cached_property
    def titles(self) -> dict[str, str]:
        """The titles of a row's words."""
        return {axis: axis for axis in self.rows.axes} | self.texts

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """The rows. Raises ValueError for a cell that has no place, and for published numbers that fit no cell."""
        if self.rows.axes:
            given = [
                (fields, Row(name=_named(fields), text=fields, not_at=self._without(fields)), "rows") for fields in _combinations(self.rows.axes)
            ]
        else:
            given = [({}, row, f"rows/{i}") for i, row in enumerate(self.rows.list)]
        if self.published and len(self.published) != len(given):
            raise ValueError(f"published has {len(self.published)} rows, the table {len(given)}")
        return tuple(self._line(i, fields, row, entry) for i, (fields, row, entry) in enumerate(given))

    def _without(self, fields: dict[str, Scalar]) -> tuple[str, ...]:
        """The scales that do not measure the row with these values of the axes."""
        return tuple(scale for scale, axes in self.not_at.items() if any(fields.get(axis) in values for axis, values in axes.items()))

    def _line(self, i: int, fields: dict[str, Scalar], row: Row, entry: str) -> Line:
        name = row.name or row.run
        if not name:
            raise ValueError(f"rows.{i} has neither a run nor a name")
        for column in row.cells:
            known("column", column, (c.name for c in self.all_columns), f"row {name!r}, cells")
        for measure in row.measures:
            known("measure", measure, dict.fromkeys(c.measure for c in self.all_columns if c.measure), f"row {name!r}, measures")
        run = row.run
        if fields and self.cell and self.cell.run and fields.keys() >= set(_fields(self.cell.run)):
            run = _filled(self.cell.run, fields)
        combinations = _combinations(self.columns.axes) if self.columns.axes else [{}] * len(self.all_columns)
        cells = {c.name: self._place(name, run, row, c, fields | own) for c, own in zip(self.all_columns, combinations, strict=True) if not c.derived}
        first, *more = self._published(i, row, entry) or (None,)
        return Line(name, run, row.text, cells, first, entry, row.optional, row.not_at, tuple(more), tuple(row.cells))

    def _place(self, name: str, run: str | None, row: Row, column: Column, fields: dict[str, Scalar]) -> Address | Undefined | float | None:
        places = [own := row.cells.get(column.name, RowPlace()), column, self.cell or Place()]
        if own.undefined is not None:
            return Undefined(own.undefined)
        if places[0].value is not None or column.planned:
            return places[0].value
        found = {key: next((v for place in places if (v := getattr(place, key))), None) for key in ("run", "measure", "metric", "of", "at")}
        found["run"] = places[0].run or run or found["run"]
        found["measure"] = own.measure or row.measures.get(found["measure"], found["measure"])
        if found["run"] is None and not fields:
            return None
        for key in ("run", "measure", "metric"):
            if not found[key]:
                raise ValueError(f"the cell of row {name!r} in column {column.name!r} names no {key}")
        filled = {key: _filled(value, fields) if value else value for key, value in found.items() if key != "at"}
        return Address(**filled, at={axis: _filled(value, fields) for axis, value in (found["at"] or {}).items()})

    def _published(self, i: int, row: Row, entry: str) -> tuple[Shown, ...]:
        columns = [column.name for column in self.all_columns]
        for shown in row.published.entries:
            for column in (*shown.values, *shown.derived):
                known("column", column, columns, f"published of {row.name or row.run!r}")
        if row.published.entries:
            own = [k for k, shown in enumerate(row.published.entries) if k == 0 or shown.source in ("", self.label)]
            return tuple(_entry(columns, row.published.entries[k], self.label, f"{entry}/published/{k}") for k in own)
        cells, at = (self.published[i], f"published/{i}") if self.published else (row.published.cells, f"{entry}/published")
        values, pointers = row.published.values, dict.fromkeys(columns, at)
        if cells:
            if len(cells) != len(columns):
                raise ValueError(f"published of row {row.name or row.run!r} has {len(cells)} values, the table {len(columns)} columns")
            values = {column: value for column, value in zip(columns, cells, strict=True) if value is not None}
            pointers = {column: f"{at}/{k}" for k, column in enumerate(columns)}
        for column in values:
            known("column", column, columns, f"published of {row.name or row.run!r}")
        if not values:
            return ()
        if self.published_for is None:
            raise ValueError("published numbers need `published_for: {model: ..., origin: ...}`")
        return (Shown(self.published_for.model, f"{self.label} ({self.published_for.origin})", values, pointers, at),)

    @cached_property
    def published_columns(self) -> tuple[str, ...]:
        """The columns for which any entry of any row publishes a number."""
        shown = {c for row in self.rows.list for entry in row.published.entries for c in entry.values}
        shown |= {c for line in self.lines if line.published for c in line.published.values}
        return tuple(column.name for column in self.all_columns if column.name in shown)

    def reads(self, scale: str | None = None) -> list[Read]:
        """The measurements that it draws: pairs of a run and a measure."""
        found: dict[Read, None] = {}
        left_out = {column.name for column in self.all_columns if scale in column.not_at}
        for line in self.lines:
            if scale in line.not_at:
                continue
            addresses = [cell for name, cell in line.cells.items() if isinstance(cell, Address) and name not in left_out]
            found |= dict.fromkeys((a.run, a.measure) for a in addresses)
            found |= dict.fromkeys((a.run, GATE) for a in addresses)
        return list(found)

    def publishes(self) -> bool:
        """Whether it shows published values."""
        return bool(self.published_columns)

    def named(self) -> list[tuple[str, str]]:
        """The readings that it names: pairs of a measure and the name that its metric gives a reading."""
        addresses = [cell for line in self.lines for cell in line.cells.values() if isinstance(cell, Address)]
        return list(dict.fromkeys((address.measure, address.metric) for address in addresses))

    def sources(self) -> list[str]:
        """Where its published values come from."""
        return [entry.source for row in self.rows.list for entry in row.published.entries if entry.source]

    def check(self) -> None:
        """Raise ValueError for parts that do not fit each other."""
        columns = {column.name: column for column in self.all_columns}
        once("column", (column.name for column in self.all_columns))
        if self.cell is None and self.columns.axes:
            raise ValueError("columns that are axes need a `cell`")
        for scale, axes in self.not_at.items():
            for axis, values in axes.items():
                known("axis of the rows", axis, self.rows.axes, f"not_at, {scale}")
                for value in values:
                    known(f"value of {axis}", value, self.rows.axes[axis], f"not_at, {scale}")
        if not self.all_columns or not self.lines:
            raise ValueError("a table needs rows and columns")
        once("row", (line.name for line in self.lines))
        for step in self.steps:
            known("training stage", step, stages.training(), "steps")
        for column in self.all_columns:
            for part in column.mean:
                known("column", part, (c for c in columns if not columns[c].derived), f"the mean {column.name!r}")
            if len({columns[part].unit for part in column.mean}) > 1:
                raise ValueError(f"the mean {column.name!r} is of percent and raw columns")
            other = [line.name for line in self.lines for part in column.mean if _of_other_run(line, part)]
            if self.seeds and other:
                raise ValueError(f"the mean {column.name!r} over seeds is of several runs in row {other[0]!r}")
            if of := column.recovery:
                known("column", of.column, (c for c in columns if not (columns[c].recovery or columns[c].ties)), f"the recovery {column.name!r}")
                for row in (of.row, *([of.chance] if isinstance(of.chance, str) else [])):
                    known("row", row, (line.name for line in self.lines), f"the recovery {column.name!r}")
                if of.chance is None and self.chance(of.column) is None:
                    raise ValueError(f"the recovery {column.name!r} needs `chance`: what guessing scores in {of.column!r} is not known")
            if of := column.ties:
                for part in of.columns:
                    known("column", part, (c for c in columns if not columns[c].derived), f"the ties {column.name!r}")
                known("row", of.row, (line.name for line in self.lines), f"the ties {column.name!r}")
        for row in self.rows.list:
            for text in row.text:
                known("text", text, self.titles, f"row {row.name or row.run!r}")
        for line in self.caption:
            for field in _fields(line):
                known("field", field, (f"{column}_{of}" for of in ("n", "chance") for column in columns), f"caption {line!r}")
        once("csv", self.csv)
        for name in self.csv:
            if not re.fullmatch(r"[a-z]+_tokens", name):
                known("column", name, self.csv_names, "csv")
        super().check()

    def floored(self, claim: Claim) -> Claim:
        """The claim with the chance of its left side's column as `floor`, where it says that a score is larger and states none."""
        if claim.op == "<" or claim.ratio is not None or claim.floor is not None:
            return claim
        return claim.model_copy(update={"floor": self.chance(claim.full(claim.left).column)})

    def chance(self, column: str) -> float | None:
        """What guessing scores in a column, in its unit; None where that is unknown."""
        return chance_of({c.name: c for c in self.all_columns}, column)

    def dosed(self) -> list[str]:
        """The names that a claim may state a dose for: the rows."""
        return [line.name for line in self.lines]

    def run_of(self, point: Point) -> str | None:
        """The run whose number a cell is: that of the row, or the one that its cell names."""
        line = next(line for line in self.lines if line.name == point.row)
        place = line.cells.get(point.column or "")
        return place.run if isinstance(place, Address) else line.run

    def check_point(self, claim: Claim, point: Point) -> None:
        """Raise ValueError where a claim names a row, column or place that is not there."""
        known("row", point.row, self.dosed(), f"claim {claim.claim!r}")
        known("column", point.column, (column.name for column in self.all_columns), f"claim {claim.claim!r}")
        if point.at:
            raise ValueError(f"claim {claim.claim!r}: a cell of a table has no `at`; got {point.at}")

    @cached_property
    def csv_names(self) -> tuple[str, ...]:
        """The CSV's columns where the spec gives none: run, words, facts, value with error and n a column, then what is published."""
        runs = [line.run for line in self.lines]
        names = ["row"] * any(line.name != line.run for line in self.lines) + ["run"] * any(runs) + list(self.titles)
        names += [*self.facts, *(f"{step}_tokens" for step in self.steps)] if any(runs) else []
        names += ["doses"] * (self.trained == "epochs")
        names += [name for column in self.all_columns for name in self.csv_names_of(column)]
        names += ["gate", "collapsed", *(["seeds"] if self.seeds else [])]
        shown = [f"published_{column}" for column in self.published_columns]
        return (*names, *shown, *(("published_model", "published_source") if shown else ()))

    def csv_names_of(self, column: Column) -> list[str]:
        """A column's number, its error, n, spread over seeds and data in the CSV."""
        names = [column.name, f"{column.name}_stderr", f"{column.name}_n", *([f"{column.name}_seed_sd"] if self.seeds else [])]
        return names + [f"{column.name}_data"] * column.names_data


def _of_other_run(line: Line, column: str) -> bool:
    return isinstance(place := line.cells[column], Address) and place.run != line.run


def _entry(columns: list[str], published: Published, label: str, at: str) -> Shown:
    """An entry of a row's published numbers, of the table `label` where it names no other; it stands in the spec at `at`."""
    derived = f"; {' and '.join(published.derived)} computed from its cells" if published.derived else ""
    return Shown(published.model, f"{published.source or label} ({published.origin}{derived})", published.values, dict.fromkeys(columns, at), at)


def _combinations(axes: Axes) -> list[dict[str, Scalar]]:
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _named(fields: Mapping[str, Scalar]) -> str:
    return "_".join(f"{axis}_{value}" for axis, value in fields.items())


def _fields(template: str) -> list[str]:
    return re.findall(r"\{(\w*)\}", template)


def _filled(template: Scalar, fields: Mapping[str, Scalar]) -> Scalar:
    """The template with each `{field}` replaced; one that is a field alone keeps the field's type."""
    if not isinstance(template, str):
        return template
    for field in _fields(template):
        known("field", field, fields, repr(template))
    if len(names := _fields(template)) == 1 and template == f"{{{names[0]}}}":
        return fields[names[0]]
    return re.sub(r"\{(\w+)\}", lambda match: str(fields[match[1]]), template)


class Scatter(Table):
    """A table drawn as points: a row is a point at its columns `x` and `y`."""

    suffixes = FIGURE
    x: str
    y: str
    log: tuple[Literal["x", "y"], ...] = ()

    def check(self) -> None:
        """Raise ValueError for parts that do not fit each other."""
        for axis in (self.x, self.y):
            known("column", axis, (column.name for column in self.all_columns))
        super().check()
