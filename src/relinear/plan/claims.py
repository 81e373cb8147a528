"""The parts that every spec of a table or figure has: its label, its claims, the sources of published numbers
and their misprints."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from relinear.plan.bounds import BEST
from relinear.plan.strict import Strict

Scalar = int | float | str
Read = tuple[str, str]  # a run and a measure
FEWEST, MOST = 1e6, 1e13  # parameters of a paper's model
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?!\.?\d|[A-Za-wyz])")
OURS = "our question"  # the `source` of a claim that no paper makes
# the measure that says whether a run's parallel and recurrent forms agree; claims on one that fails are not
# judged
GATE = "gate"


class BestOf(Strict):
    """The recipes of which a paper takes the best, for runs that have one of them.

    `runs`: run -> the runs of its other recipes. The best has the largest reading of `metric` in `measure`.
    Where all of a run's recipes are measured, the run's numbers are those of the best. `not_at`: scales that
    train the one recipe alone.
    """

    measure: str
    metric: str
    runs: dict[str, Annotated[tuple[str, ...], Field(min_length=1)]]
    not_at: tuple[str, ...] = ()


class Misprint(Strict):
    """A known error or ambiguity of a published number, which is printed below the numbers."""

    where: str
    text: str


class InUnit(Strict):
    """What shows readings in a unit: `percent` reads fractions."""

    unit: Literal["percent", "raw"] = "raw"

    @property
    def factor(self) -> float:
        """What a reading is multiplied by to be in the unit."""
        return 100.0 if self.unit == "percent" else 1.0


class Point(Strict):
    """The place of a number in a table or figure: a row (in a figure a run, series or panel), a column, and
    the metric's own axes.

    `at` {"batch": "largest"} is the largest batch at which the claim's right side was measured.
    """

    row: str
    column: str | None = None
    at: dict[str, Scalar] = {}

    @property
    def place(self) -> str:
        """The values of `at`, for reading."""
        return ", ".join(map(str, self.at.values()))


class Required(Point):
    """A precondition: the claim is judged only if this number is within its bounds, in the column's unit.

    Example: if the teacher itself is at chance, its students cannot be compared. Give `least`, `most` or
    both, or `above`, a floor that the number must exceed by three standard errors.
    """

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf

    @model_validator(mode="after")
    def _some_number_keeps_them(self) -> Self:
        if (
            not self.model_fields_set & {"least", "most", "above"}
            or self.least > self.most
            or self.above >= self.most
        ):
            got = ", ".join(f"{name} {getattr(self, name):g}" for name in ("least", "most", "above"))
            raise ValueError(
                f"give `least`, `most`, `above`, or some of them that a number can keep together; got {got}"
            )
        return self


RowOrPoint = Annotated[
    Point, BeforeValidator(lambda given: {"row": given} if isinstance(given, str) else given)
]


# Columns of time and of memory beside the states. A program's growth can be measured on any card. A
# comparison with another program, or with the memory of a card, depends on kernels and card; it is judged
# only if both are the paper's.
COSTS = (
    "ms",
    "ms_per_token",
    "decode_tokens_per_second",
    "prefill_tokens_per_second",
    "tokens_per_second",
    "peak_gib",
    "gib",
)


class Claim(Strict):
    """A claim that a paper makes, or a question of ours, as a comparison of two numbers or of a number with a
    bound.

    It reads `left op right + margin` (a negative margin: "no more than that much worse"), `left / right op
    ratio`, or, without `right`, `left op ratio`. `column` is the column of every side that names none.

    The claim is not tested if even `ceiling` is less than `margin` better than `right`, or if no side is
    better than `floor` (chance: in the column's unit, or a point that measures it; a table knows the chance
    of tasks with choices). `dose`: row -> training tokens of all steps in the paper; if ours had fewer, there
    is no verdict. `parameters`: those of the paper's model, if the claim is about uptraining a model by its
    size; doses are then compared in tokens a parameter. `recipe`: what else in our training differs from the
    paper's; then there is no verdict either. `one_of`: of which recipes the paper takes the best, if ours is
    one of them; a verdict then stands only if it also holds with either side, and with both, at the best
    value that the metric has (`relinear.plan.bounds`). A side whose recipes are all measured (`BestOf`) has
    the best's numbers and is held to nothing more. If no best of the metric is known, there is a verdict only
    if of each side's recipes one is the best by more than the error. `either`: rows by another form of the
    method that the paper states, too ({hedgehog: hedgehog_exp}); the claim is contradicted only if both forms
    contradict it, and reproduced if one of them does. `also`: further rows that the left side is compared
    with as with `right`, such as all prior maps; the claim is reproduced only if each comparison is, and
    contradicted if one of them is. `requires`: preconditions. `untrained`: a row on which nothing was
    trained; if the claim holds for that row in place of `left`, too, it is not reproduced. `proxy`: the
    number that the paper prints, if ours is another number; the claim is then a question of ours.
    `margin_by`: `ours` for a margin, or a `ratio` other than 1, that `published` does not have. `published`:
    the paper's numbers, in its words.
    """

    claim: str
    source: str  # where the paper says it
    paper: str | None = None  # by default the paper whose folder the spec is in
    left: RowOrPoint
    right: RowOrPoint | None = None
    column: str | None = None
    op: Literal[">", "<"]
    margin: float | None = None
    ratio: float | None = None
    floor: float | Point | None = None
    ceiling: RowOrPoint | None = None
    dose: dict[str, Annotated[float, Field(gt=0)]] = {}
    parameters: float | None = None
    recipe: str | None = None
    one_of: str | None = None
    either: dict[str, str] = {}
    also: tuple[str, ...] = ()
    requires: tuple[Required, ...] = ()
    untrained: str | None = None
    proxy: str | None = None
    margin_by: Literal["ours"] | None = None
    published: str | None = None  # the paper's own figures, in its words

    @model_validator(mode="after")
    def _difference_or_ratio(self) -> Self:
        if self.ratio is not None and (self.margin, self.floor, self.ceiling) != (None, None, None):
            raise ValueError("a claim with a ratio has no margin, floor or ceiling")
        if self.ratio is None and self.right is None:
            raise ValueError("a claim without a right side needs the bound as `ratio`")
        if self.parameters is not None and not self.dose:
            raise ValueError(
                f"claim {self.claim!r}: `parameters` says that a dose is compared in tokens a parameter, and"
                " the claim has no `dose`; give both, or neither"
            )
        if self.parameters is not None and not FEWEST <= self.parameters <= MOST:
            raise ValueError(
                f"claim {self.claim!r}: `parameters` are those of the paper's model, {FEWEST:g} to {MOST:g},"
                f" such as 7.0e+9; got {self.parameters:g}; without them a dose is compared in tokens"
            )
        if others := sorted(set(self.either) - {point.row for point in self.points}):
            raise ValueError(
                f"claim {self.claim!r}: `either` names {', '.join(others)}, which the claim does not compare"
            )
        if self.proxy and self.source == OURS:
            raise ValueError(
                f"claim {self.claim!r}: a proxy stands for a number that a paper prints, so its source is in"
                f" the paper; got {OURS!r}"
            )
        if self.also and (self.right is None or self.either):
            raise ValueError(
                f"claim {self.claim!r}: `also` names further rows in the place of `right`, and goes with no"
                f" `either`; got right: {self.right and self.right.row}, either: {self.either}"
            )
        bound = abs(self.margin or 0.0) if self.ratio is None else self.ratio
        order = 0.0 if self.ratio is None else 1.0  # says which side is larger, and nothing more
        if not (self.ours or self.margin_by or bound == order or bound in self._printed):
            raise ValueError(
                f"claim {self.claim!r}: the {'margin' if self.ratio is None else 'ratio'} {bound:g} does not"
                f" stand in what is published, {self.published!r}; give there what the paper prints, or say"
                " `margin_by: ours`"
            )
        return self

    @property
    def _printed(self) -> list[float]:
        """The numbers in what is published. `6x` is 6; `1B`, a size, is none."""
        return [float(number) for number in NUMBER.findall(self.published or "")]

    @property
    def ours(self) -> bool:
        """Whether no paper makes the claim with this number."""
        return self.source == OURS or self.proxy is not None

    @property
    def whose(self) -> str:
        """For reading: `paper`, `ours` or `ours, proxy for ...`."""
        return f"ours, proxy for {self.proxy}" if self.proxy else "ours" if self.ours else "paper"

    def full(self, point: Point | None) -> Point | None:
        """A side of the claim, or what it requires, with the claim's column where it names none."""
        return point and point.model_copy(update={"column": point.column or self.column})

    @property
    def by_other_form(self) -> "Claim | None":
        """The claim on the rows of the other form that the paper states, too; None if it states one form."""
        if not self.either:
            return None

        def other(point: Point | None) -> Point | None:
            return point and point.model_copy(update={"row": self.either.get(point.row, point.row)})

        sides = {
            name: other(side)
            for name in ("left", "right", "ceiling", "floor")
            if isinstance(side := getattr(self, name), Point)
        }
        dose = {self.either.get(row, row): tokens for row, tokens in self.dose.items()}
        return self.model_copy(update={**sides, "dose": dose, "either": {}})

    @property
    def by_each(self) -> "list[Claim]":
        """The claim as it stands, and beside each of the further rows."""
        assert self.right is not None or not self.also
        rights = [self.right, *(self.right.model_copy(update={"row": row}) for row in self.also)]
        return [self.model_copy(update={"right": right, "also": ()}) for right in rights]

    @property
    def recipes(self) -> list[Point]:
        """The sides whose number is of one of several recipes. A right side of the left's row is of the same
        training, and what its column counts, such as the right answers without any recall, depends on no
        recipe."""
        if not self.one_of:
            return []
        rights = [each.right for each in self.by_each if each.right and each.right.row != self.left.row]
        return [self.full(point) for point in (self.left, *rights)]

    @property
    def points(self) -> list[Point]:
        """The cells that the claim compares, with its defaults filled in."""
        sides = (self.left, self.right, self.ceiling, self.floor if isinstance(self.floor, Point) else None)
        return [self.full(point) for point in sides if point is not None]

    @property
    def all_points(self) -> list[Point]:
        """The cells that the claim compares, also by the other form and beside the further rows."""
        other = self.by_other_form
        return [point for claim in (*self.by_each, *([other] if other else [])) for point in claim.points]


class Address(NamedTuple):
    """The place of one reading. A figure that draws what lies beside the readings names no metric."""

    run: str
    measure: str
    metric: str = ""
    of: str | None = None
    at: Mapping[str, Scalar] = {}


class Asked(NamedTuple):
    """A reading that a spec names: of one of the measures, at these values of its axes; None is all of an
    axis. `where`: the claim that names it, else empty."""

    measures: tuple[str, ...]
    metric: str
    of: str | None = None
    at: Mapping[str, Scalar | None] = {}
    where: str = ""


class Spec(Strict):
    """The fields of every spec.

    `label` is the paper's own label; `says` is one line. `not_run`: what the committed results lack, and why,
    for the index and the report. `forms`: row -> settings in which its form differs from its paper's (`forms`
    in paper.yaml); null asks for no value. `objection`: what an author of the paper might object to our
    numbers, and what was done about it, in a sentence, for the label's page.
    """

    gated: ClassVar[bool] = False  # whether it reads the gate of each run
    called: ClassVar[str] = "row"  # what a claim's `row` is there

    label: str
    says: str
    draw: str = "table"
    claims: tuple[Claim, ...] = ()
    forms: dict[str, dict[str, Any]] = {}
    misprints: tuple[Misprint, ...] = ()
    not_run: str = ""
    objection: str = ""
    _best_of: BestOf | None = PrivateAttr(default=None)

    @property
    def best_of(self) -> BestOf | None:
        """The recipes of which its paper takes the best; None if no claim here is of one of them."""
        return self._best_of if any(claim.one_of for claim in self.claims) else None

    def take_best(self, of: BestOf | None) -> None:
        """Set the recipes of which its paper takes the best (`best_of` in paper.yaml)."""
        self._best_of = of

    @property
    def made(self) -> tuple[str, ...]:
        """The suffixes of the files that its shape writes."""
        return ("png", "pdf")

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The suffixes of all files of it."""
        return (*self.made, "provenance.json", *["claims.csv"] * bool(self.claims))

    def addresses(self, scale: str | None = None) -> Iterable[Address]:
        """The place of every reading; at a scale, without those that are left out there."""
        raise NotImplementedError

    def names(self) -> list[str]:
        """What a claim may name as `row`."""
        raise NotImplementedError

    def reads(self, scale: str | None = None) -> list[Read]:
        """The measurements that it needs: those that it draws, and those of other recipes of these runs."""
        drawn, of = self.draws(scale), self.best_of
        if of is None:
            return drawn
        judged = {self.run_of(point) for claim in self.claims for point in claim.recipes}
        scores = [(run, of.measure) for run, _ in drawn if run in judged]
        others = [
            (other, measure)
            for run, measure in (*drawn, *scores)
            if scale not in of.not_at
            for other in of.runs.get(run, ())
        ]
        return list(dict.fromkeys([*drawn, *scores, *others]))

    def draws(self, scale: str | None = None) -> list[Read]:
        """The measurements that it draws: pairs of a run and a measure."""
        measures = lambda place: (place.measure, *[GATE] * self.gated)  # noqa: E731
        return list(
            dict.fromkeys(
                (place.run, measure) for place in self.addresses(scale) for measure in measures(place)
            )
        )

    def asked(self) -> list[Asked]:
        """The readings that it names, and those that its claims name."""
        return [
            Asked((place.measure,), place.metric, place.of, place.at)
            for place in self.addresses()
            if place.metric
        ]

    def claimed(self) -> Iterator[tuple[str, Point]]:
        """Every point of every claim, and the words by which an error names the claim."""
        for claim in self.claims:
            untrained = [claim.left.model_copy(update={"row": claim.untrained})] if claim.untrained else []
            for point in (*claim.all_points, *map(claim.full, (*claim.requires, *untrained))):
                yield f"claim {claim.claim!r}", point

    def files(self) -> list[str]:
        """Files it draws beside the measurements."""
        return []

    def sources(self) -> list[str]:
        """The labels of the tables that published numbers were taken from."""
        return []

    def publishes(self) -> bool:
        """Whether what the paper prints stands beside ours."""
        return False

    def dosed(self) -> list[str] | None:
        """The names that a claim may state a dose for, since their training tokens are known. None: no claim
        may state a dose."""
        return self.names()

    def run_of(self, point: Point) -> str | None:
        """The run whose number a point is; None where it is of none."""
        return point.row

    def measure_of(self, point: Point) -> str:
        """The measure that a point is read of, where its column does not tell; else empty."""
        return ""

    def floored(self, claim: Claim) -> Claim:
        """The claim as it is judged: with the floor of its column, if it states none."""
        return claim

    def best(self, point: Point) -> float | None:
        """The best value that the metric of a point has, in its unit; None if that is unknown."""
        return None

    def check(self) -> None:
        """Raises ValueError for names that do not exist or exist twice, for a dose that nothing is compared
        with, and for one of several recipes in a metric without a known best."""
        dosed = self.dosed()
        for claim in self.claims:
            if claim.dose and dosed is None:
                raise ValueError(
                    f"claim {claim.claim!r}: draw: {self.draw} compares no training tokens, so a claim has no"
                    f" `dose`; got {claim.dose}"
                )
            for name in (*claim.dose, *(other.dose if (other := claim.by_other_form) else ())):
                known("row", name, dosed or (), f"claim {claim.claim!r}, dose")
        for where, point in self.claimed():
            known(self.called, point.row, self.names(), where)
            self.check_place(point, where)
        for claim in self.claims:
            unbound = [point.column for point in claim.recipes if self.best(point) is None]
            if unbound and self.best_of is None:
                raise ValueError(
                    f"claim {claim.claim!r}: `one_of` asks how good a better recipe could be, and the best of"
                    f" {unbound[0]!r} is not known; possible: `recipe`, `best_of` in paper.yaml, or a metric"
                    f" of {', '.join(sorted(BEST))}"
                )
            grows = claim.right is not None and claim.right.row == claim.left.row
            if claim.full(claim.left).column in COSTS and not (grows or claim.ours or claim.recipe):
                raise ValueError(
                    f"claim {claim.claim!r} compares what a program took with another program or with a card,"
                    " which is of its kernels and its card; say in `recipe` what ours were"
                )
        named = {point.row for claim in self.claims for point in claim.all_points}
        for name in self.forms:
            known("row of a claim", name, sorted(named), "forms")

    def check_place(self, point: Point, where: str) -> None:
        """Raise ValueError where a claim names a column or place that is not there."""
        raise NotImplementedError


def known(kind: str, name: Any, names: Iterable[Any], where: str = "") -> None:
    """Raises ValueError, naming the possible ones, for a name that is none of them."""
    if name not in (names := list(names)):
        raise ValueError(
            f"{where and where + ': '}no {kind} {name!r}; have {', '.join(map(str, names)) or 'none'}"
        )


def require_unique(kind: str, names: Iterable[str]) -> None:
    """Raises ValueError for a name that stands there twice."""
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise ValueError(
            f"{kind} {', '.join(map(repr, twice))} stands there twice; each needs a name of its own"
        )
