"""The cells of a table from its measurements: numbers with errors, means over seeds and over columns, and the
records behind them."""

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from pandas import DataFrame

from relinear.draw import About, Measurements
from relinear.draw.claims import OFF_THE_FLOOR, Look, Value, check_number, error_of, freedom_of
from relinear.draw.doses import doses, trained_on
from relinear.draw.frame import along, apart, frame_of, over_trainings, readings_in, score, select
from relinear.draw.paired import Pulls, mean, minus, scale_pulls
from relinear.draw.render import NOT_DEFINED, NOT_RUN, number
from relinear.draw.spreads import Of, of_training
from relinear.plan.claims import GATE, Point
from relinear.plan.measured import Measured, Source
from relinear.plan.names import split
from relinear.plan.readings import Reading
from relinear.plan.tables import Address, Column, Line, Recovery, Table, Ties, Undefined

PASSED, FAILED = "passed", "failed"
DISAGREE = "failed its gate: its parallel and recurrent forms disagree"


class Part(NamedTuple):
    """The number of one training, in its column's unit; percent is 100 times the reading.

    `pulls` gives the pulls of the items behind the number (`relinear.draw.paired`), or None. `training`: the
    seed of the training (0, 1, ...); None if the number does not depend on training (a constant, a state
    size) or is derived from other rows. `of`: the key of its spread over trainings; empty if nothing was
    trained.
    """

    value: float
    stderr: float | None
    n: int | None
    pulls: Callable[[], Pulls | None] = lambda: None
    training: int | None = None
    of: tuple[Of, ...] = ()


class Cell(NamedTuple):
    """A cell as it is shown: the score over its trainings (`relinear.draw.frame.Score`), NOT_RUN, alone or
    with what was measured instead, or NOT_DEFINED with a reason.

    `seeds`: the number of each training. `files`: the run.json of each. `seed_sd` is None for one training.
    """

    value: float | str
    stderr: float | str | None
    n: int | str | None
    seed_sd: float | str | None
    seeds: tuple[Part, ...]  # one score for each training that has the number
    files: tuple[str, ...]  # run.json of each
    # of a cell that is computed from others: by how much it changes with each, and that cell
    behind: tuple[tuple[float, Value], ...] = ()

    @property
    def trainings(self) -> int | None:
        """The number of trainings that the cell is the mean over; None if it depends on none."""
        return sum(score.training is not None for score in self.seeds) or None

    @property
    def was_run(self) -> bool:
        """Whether the value was measured. If not, a text in its place gives the reason."""
        return not isinstance(self.value, str)


MISSING = Cell(NOT_RUN, NOT_RUN, NOT_RUN, NOT_RUN, (), ())


class Row(NamedTuple):
    """A row with its numbers.

    `facts` of its run are empty if nothing but a state size was measured. `gate` is PASSED, FAILED or
    NOT_RUN, the worst of its trainings. `was_run`: whether any cell that depends on training was measured.
    `tokens`: the training tokens of all steps, of the run that had fewest; None if no measurement has them.
    """

    line: Line
    cells: dict[str, Cell]
    facts: dict[str, Any]
    gate: str
    seeds: int
    sources: tuple[Source, ...]
    facts_file: str | None
    gate_files: tuple[str, ...]
    was_run: bool
    tokens: int | None


def rows_of(spec: Table, measured: Measurements, about: About) -> list[Row]:
    """The rows of a table."""
    frame = frame_of(measured)
    rows = [_row(spec, line, measured, frame, about) for line in spec.lines]
    for column in spec.columns:
        if column.recovery:
            for row in rows:
                row.cells[column.name] = _recovered(
                    column.recovery, spec.chance(column.recovery.column), row, rows, column.factor
                )
        if column.ties:
            for row in rows:
                row.cells[column.name] = _tied(column.ties, row, rows, column.factor)
    return rows


def disagree(measured: Measurements, run: str) -> str:
    """Why no number of a run can judge: it failed its gate. Empty where it did not."""
    return f"{run} {DISAGREE}" if gate_of(measured, run) == FAILED else ""


def gate_of(measured: Measurements, run: str) -> str:
    """Whether the run's parallel and recurrent forms agreed: PASSED, FAILED or NOT_RUN."""
    found = measured.get((run, GATE))
    passed = found and found.find("passed")
    return NOT_RUN if not passed else PASSED if passed.value else FAILED


def _row(spec: Table, line: Line, measured: Measurements, frame: DataFrame, about: About) -> Row:
    places = [place for place in line.cells.values() if isinstance(place, Address)]
    trained = [place for place in places if place.measure not in about.of_shape]
    trainings = {place.run: [place.run] for place in places}
    if spec.seeds:
        trainings = {
            run: _trainings(run, {place.measure for place in trained if place.run == run}, measured)
            for run in trainings
        }
    read = {
        c.name: _cell(c, line.cells[c.name], measured, frame, trainings, about)
        for c in spec.columns
        if not c.derived
    }
    cells = {
        c.name: _mean([read[part] for part in c.mean]) if c.mean else read.get(c.name, MISSING)
        for c in spec.columns
    }
    of_run = [
        m
        for place in trained
        if place.run == line.run
        for run in trainings[place.run]
        if (m := measured.get((run, place.measure)))
    ]
    gates = {run: gate_of(measured, run) for runs in trainings.values() for run in runs}
    verdict = next((v for v in (FAILED, NOT_RUN) if v in gates.values()), PASSED) if gates else NOT_RUN
    read = [
        m
        for place in places
        for run in _own(place, trainings, about.of_shape)
        if (m := measured.get((run, place.measure)))
    ]
    read += [m for run in gates if (m := measured.get((run, GATE)))]
    of_shape = {
        name
        for name, place in line.cells.items()
        if isinstance(place, Address) and place.measure in about.of_shape
    }
    most = max(map(trained_on, of_run), default=0)
    # not those that were measured before a step of the run
    ended = [m for m in of_run if trained_on(m) == most]
    collapsed = [m.facts["collapsed"] for m in ended if m.facts.get("collapsed") is not None]
    facts = (
        ended[0].facts | {"scale": ended[0].scale, "collapsed": any(collapsed) if collapsed else None}
        if ended
        else {}
    )
    if of_run and spec.trained == "epochs":
        facts["doses"] = doses(ended[0])
    return Row(
        line=line,
        cells=cells,
        facts=facts,
        gate=verdict,
        seeds=len(trainings.get(line.run or "", ())) or 1,
        sources=tuple({m.source.file: m.source for m in read}.values()),
        facts_file=ended[0].source.file if ended else None,
        gate_files=tuple(m.source.file for run in gates if (m := measured.get((run, GATE)))),
        was_run=any(cell.files for name, cell in cells.items() if name not in of_shape),
        tokens=_tokens(
            [
                m
                for m in read
                if m.measure not in about.of_shape
                and (line.run is None or m.run in trainings.get(line.run, ()))
            ]
        ),
    )


def _tokens(found: list[Measured]) -> int | None:
    """The fewest training tokens of any run. A run counts with its most, since some are measured before their
    last step."""
    runs: dict[str, int] = {}
    for m in found:
        if "tokens" in m.facts:
            runs[m.run] = max(runs.get(m.run, 0), trained_on(m))
    return min(runs.values(), default=None)


def _trainings(run: str, measures: Collection[str], measured: Measurements) -> list[str]:
    """The run and those of its trainings with further seeds of which any of these measures is finished."""
    further = {
        name
        for name, measure in measured
        if split(name)[0] == run != name and measure in measures and measured[name, measure]
    }
    return [run, *sorted(further, key=split)]


def _own(place: Address, trainings: Mapping[str, list[str]], of_shape: Collection[str]) -> list[str]:
    """The trainings that have a number of their own there: the first alone, if all have the same."""
    return trainings[place.run][: 1 if place.measure in of_shape else None]


def _cell(
    column: Column,
    place: Address | Undefined | float | None,
    measured: Measurements,
    frame: DataFrame,
    trainings: Mapping[str, list[str]],
    about: About,
) -> Cell:
    """The cell of a place: a number by definition, the reason why there is none, or the score of its run's
    trainings."""
    if place is None:
        return MISSING
    if isinstance(place, int | float):
        return Cell(float(place), None, None, None, (Part(float(place), None, None),), ())
    why = place.reason if isinstance(place, Undefined) else about.undefined.get((place.run, place.measure))
    if why or isinstance(place, Undefined):
        return Cell(f"{NOT_DEFINED}: {why}", NOT_DEFINED, NOT_DEFINED, NOT_DEFINED, (), ())
    alike, runs = place.measure in about.of_shape, _own(place, trainings, about.of_shape)
    nodes = {found.source.file: found for run in runs if (found := measured.get((run, place.measure)))}
    own = along(frame, place.run, place.measure, place.metric, place.of, seeds=True)
    own = own[own["node"].isin(nodes.keys())]
    rows = select(own, *place, seeds=True)
    if not all(rows["why"] == ""):
        return MISSING._replace(value=f"{NOT_DEFINED}: {next(filter(None, rows['why']))}", files=tuple(nodes))
    parts = {
        node: _part(column.factor, nodes[node], reading, None if alike else seed)
        for node, seed, reading in readings_in(rows)
    }
    for found in (nodes[node] for node in nodes if node not in parts):
        if not found.all(place.metric):
            have = ", ".join(sorted({reading.metric for reading in found.readings})) or "nothing"
            why = f"{NOT_RUN}: {found.run} {found.measure} has {have}, and no {place.metric}"
            return MISSING._replace(value=why, files=tuple(nodes))
    number = score(own, *place, unit=column.factor)
    return MISSING if number is None else Cell(*number, tuple(parts.values()), tuple(parts))


def _part(unit: float, found: Measured, reading: Reading, training: int | None) -> Part:
    stderr = None if reading.stderr is None else unit * reading.stderr
    of = of_training(found, reading, unit) if training is not None else None
    return Part(
        unit * reading.value,
        stderr,
        reading.n,
        scale_pulls(found, reading, unit),
        training,
        (of,) if of else (),
    )


def _mean(columns: list[Cell]) -> Cell:
    """The unweighted mean of columns, over the trainings that have all of them.

    Its item error is propagated from theirs as if they were independent; it is unknown if one of theirs is.
    """
    if not all(column.was_run for column in columns):
        return MISSING
    by_training = [{part.training: part for part in column.seeds} for column in columns]
    # a number without a training is of every one
    trained = [own.keys() for own in by_training if None not in own]
    shared = sorted(set.intersection(*map(set, trained))) if trained else [None]
    if not shared:
        return MISSING
    means = []
    for training in shared:
        own = [parts.get(training) or parts[None] for parts in by_training]
        errors = [part.stderr for part in own]
        stderr = None if None in errors else math.hypot(*(e for e in errors if e is not None)) / len(own)
        of = tuple(key for part in own for key in part.of)
        means.append(
            Part(
                math.fsum(part.value for part in own) / len(own), stderr, None, _mean_pulls(own), training, of
            )
        )
    read = [
        (part, file) for column in columns for part, file in zip(column.seeds, column.files, strict=False)
    ]
    files = dict.fromkeys(file for part, file in read if part.training in shared)
    return Cell(
        *over_trainings([part.value for part in means], [part.stderr for part in means], None),
        tuple(means),
        tuple(files),
    )


def _recovered(of: Recovery, guessed: float | None, row: Row, rows: list[Row], unit: float) -> Cell:
    """(score - chance) / (reference - chance), with the paired error if all were measured on the same items.

    `guessed`: the chance, if the spec has no other. Not defined if the reference is within OFF_THE_FLOOR
    errors of chance.
    """
    names = [row.line.name, of.row, *([of.chance] if isinstance(of.chance, str) else [])]
    cells = [other.cells[of.column] for name in names for other in rows if other.line.name == name]
    if not all(isinstance(cell.value, float) for cell in cells):
        return MISSING
    look, files = look_in(rows), tuple(dict.fromkeys(file for cell in cells for file in cell.files))
    values = [look(Point(row=name, column=of.column)) for name in names]
    ours, theirs, *base = values
    if isinstance(of.chance, str):
        above, level = of.chance, cells[2].value
        ours, theirs = (_beyond(value, base[0]) for value in (ours, theirs))
    else:
        level = guessed if of.chance is None else of.chance
        above = f"chance, {number(level)}"
    room = cells[1].value - level
    if isinstance(theirs, str) or (-room if of.lower else room) <= OFF_THE_FLOOR * theirs.stderr:
        near = f"{of.row} is not {OFF_THE_FLOOR:g} standard errors {'below' if of.lower else 'above'} {above}"
        why = theirs if isinstance(theirs, str) else near
        return MISSING._replace(value=f"{NOT_DEFINED}: {why}", files=files)
    share, error = (cells[0].value - level) / room + 0.0, None  # + 0.0 turns -0.0 into 0.0
    if not isinstance(ours, str) and row.line.name not in names[1:]:
        error = unit * error_of(ours, theirs, by=share).total / abs(room)
    # how the share changes with each of the numbers behind
    by = [1 / room, -share / room, (share - 1) / room]
    behind = tuple(
        (unit * weight, value)
        for weight, value in zip(by, values, strict=False)
        if not isinstance(value, str)
    )
    return Cell(unit * share, error, None, None, (Part(unit * share, error, None),), files, behind)


def _tied(of: Ties, row: Row, rows: list[Row], unit: float) -> Cell:
    """The share of columns in which the row scores at least (1 - tolerance) of the row `of.row`. `n` is the
    number of columns."""
    theirs = next(other for other in rows if other.line.name == of.row)
    pairs = [(row.cells[name], theirs.cells[name]) for name in of.columns]
    if not all(isinstance(cell.value, float) for pair in pairs for cell in pair):
        return MISSING
    share = unit * fmean(ours.value >= (1 - of.tolerance) * other.value for ours, other in pairs)
    files = tuple(dict.fromkeys(file for pair in pairs for cell in pair for file in cell.files))
    return Cell(share, None, len(pairs), None, (Part(share, None, len(pairs)),), files)


def _beyond(value: Value | str, base: Value | str) -> Value | str:
    """The difference of two measured numbers, or the reason why there is none."""
    if isinstance(value, str) or isinstance(base, str):
        return base if isinstance(base, str) else value
    pulls = functools.cache(lambda: minus(value.pulls(), base.pulls()))
    return Value(
        value.value - base.value,
        error_of(value, base).total,
        value.name,
        pulls,
        math.hypot(value.apart, base.apart),
    )


def _mean_pulls(scores: Sequence[Part]) -> Callable[[], Pulls | None]:
    """A function that gives the pulls on a mean of scores and computes them once."""
    return functools.cache(lambda: mean([score.pulls() for score in scores]))


def tokens_of(rows: list[Row]) -> dict[str, int]:
    """The training tokens of all steps of each row, by its name; without rows of which nothing was run."""
    return {row.line.name: row.tokens for row in rows if row.tokens is not None}


def look_in(rows: list[Row]) -> Look:
    """The function by which claims read cells of these rows, by name and column."""
    by_name = {row.line.name: row for row in rows}

    def look(point: Point) -> Value | str:
        row, column = by_name[point.row], point.column or ""
        cell = row.cells[column]
        if not cell.was_run:
            is_or_was = "was" if str(cell.value).startswith(NOT_RUN) else "is"
            return f"{point.row}: {column} {is_or_was} {cell.value}"
        if row.gate == FAILED:
            return f"{point.row} {DISAGREE}"
        if row.facts.get("collapsed"):
            return f"{point.row} collapsed in training: it predicts no better than chance"
        value = check_number(cell.value, cell.stderr, point.row, column)
        if isinstance(value, str):
            return value
        sd = cell.seed_sd if isinstance(cell.seed_sd, float) else None
        distance, freedom = apart(sd, len(cell.seeds))
        trainings = sum(bool(score.of) for score in cell.seeds)
        if cell.behind:
            parts = [(abs(weight) * part.apart, part.freedom) for weight, part in cell.behind]
            distance, freedom = math.hypot(*(sd for sd, _ in parts)), freedom_of(parts)
            trainings = min((part.trainings for _, part in cell.behind if part.trainings), default=0)
        n = cell.n if isinstance(cell.n, int) else None
        return value._replace(
            pulls=_mean_pulls(cell.seeds),
            apart=distance,
            freedom=freedom,
            n=n,
            trainings=trainings,
            of=cell.seeds[0].of if cell.seeds else (),
            behind=cell.behind,
        )

    return look
