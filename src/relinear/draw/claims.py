"""The papers' claims, judged by the numbers of a table or figure.

`{left: lolcats_window, right: t2r, column: avg, op: ">", margin: 20}` reads "more than 20 points above", and
a negative margin "no more than that much worse". `{left: {row: lizard, at: {input: 32768}}, column: peak_gib,
op: "<", ratio: 74.5}` compares a number with a bound.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from scipy.special import ndtr, stdtrit

from relinear.draw import About
from relinear.draw.paired import Pulls, minus, scale_pulls
from relinear.draw.render import count, number, plus_minus, write_csv
from relinear.draw.spreads import UNASKED, Of, Spread, Spreads, of_training
from relinear.plan.claims import Claim, Point, Spec
from relinear.plan.forms import LACKING, PARAMETERS, SEQUENCES, Form, differences
from relinear.plan.measured import Measured
from relinear.plan.readings import Reading
from relinear.plan.specs import Artefact

Verdict = Literal["reproduced", "contradicted", "not tested"]
UNTESTED: Verdict = "not tested"
STANDARD_ERRORS = 2.0
# the share of comparisons without any difference that chance alone puts beyond two standard errors
BY_CHANCE = float(2 * ndtr(-STANDARD_ERRORS))
OFF_THE_FLOOR = 3.0  # standard errors
BESIDE = " | "  # between the figures of the comparisons of one claim: beside several rows, by two forms
PAIRED = " (paired)"  # behind an error that is that of differences on the same items

COLUMNS = (
    "claim",
    "paper",
    "source",
    "whose",
    "verdict",
    "compared",
    "figures",
    "error",
    "error_items",
    "error_training",
    "trainings",
    "reason",
)


class Value(NamedTuple):
    """A number to judge by. `stderr` is 0 for a median of many repeats, whose spread is far below any margin.
    `name`: for reading.

    `pulls` gives the pulls of its items, or None if they are not kept. `apart`: the training part of the
    error, with `freedom` degrees of freedom. `n`: the number of items. `trainings`: the number of trainings
    that it is the mean over, 0 if nothing was trained. `of`: the key of its spread over trainings. `behind`:
    of a number that is computed from others, these and by how much the number changes with each.
    """

    value: float
    stderr: float
    name: str
    pulls: Callable[[], Pulls | None] = lambda: None
    apart: float = 0.0
    freedom: float = math.inf
    n: int | None = None
    trainings: int = 0
    of: tuple[Of, ...] = ()
    behind: "tuple[tuple[float, Value], ...]" = ()

    def __str__(self) -> str:
        return plus_minus(self.value, self.stderr or None)

    @property
    def items(self) -> float:
        """The item part of the error."""
        return math.sqrt(max(self.stderr**2 - self.apart**2, 0.0))


Look = Callable[[Point], Value | str]  # the number at a point, or the reason why there is none to judge by


class Error(NamedTuple):
    """The error of a difference: its item part, its training part, and the degrees of freedom of both
    together.

    `paired`: the differences on the same items, if both sides kept them.
    """

    items: float
    training: float
    freedom: float
    paired: Pulls | None

    @property
    def total(self) -> float:
        """Both parts together."""
        return math.hypot(self.items, self.training)

    @property
    def enough(self) -> float:
        """The number of errors that is as rare by chance as two errors of a known size: Student's t, for few
        seeds or items."""
        return (
            STANDARD_ERRORS
            if math.isinf(self.freedom)
            else float(stdtrit(max(self.freedom, 1.0), float(ndtr(STANDARD_ERRORS))))
        )


class Judgement(NamedTuple):
    """A verdict on a claim, the numbers that it was judged by, and the reason.

    `compared`: the two sides by run and column, so that a result counts once. `error`, its parts and the
    `trainings` of each side are there if there are numbers.
    """

    verdict: Verdict
    figures: str
    reason: str
    compared: str = ""
    error: float | None = None
    error_items: float | None = None
    error_training: float | None = None
    trainings: str = ""


def judge(
    claim: Claim,
    look: Look,
    nothing_to_judge: str | None = None,
    remark: str = "",
    unlike: str = "",
    spreads: Spreads = UNASKED,
    best: Callable[[Point], float | None] = lambda _: None,
    settled: Callable[[Point], bool] = lambda _: False,
    stated: str = "",
    instead: Callable[[Point], str] = lambda _: "",
) -> Judgement:
    """Judge a claim by the numbers at its points.

    The verdict is "reproduced" or "contradicted" if the difference clears the margin, or the ratio its bound,
    by more than two standard errors; else "not tested". With few seeds or documents, Student's t says how
    many errors count as two. The error is that of the paired difference if both sides kept the outcomes of
    the same items, and the figures then say `paired`; else the errors are combined as if independent. The
    error of a side of one training includes the `spreads` of its method's trainings; if no spread is known,
    there is no verdict.

    `remark` stands beside the numbers. `unlike` says how our training differs from the paper's; there is then
    no verdict. There is none either if a precondition fails, and no reproduction if an untrained row keeps
    the claim, too. `best`: point -> the best value of its metric, which a better recipe could reach;
    `settled`: whether no recipe is better than the point's. `stated` is said behind the reason. `instead`:
    what there is in the place of a point without a number.
    """
    published = f"; published {claim.published}" if claim.published else ""
    found = [_named(claim, point, look(point)) for point in claim.points]
    for point, value in zip(claim.points, found, strict=True):
        if isinstance(value, str):
            reason = "; ".join(filter(None, (nothing_to_judge, value, instead(point))))
            return Judgement(UNTESTED, published.removeprefix("; "), reason)
    values = [value for value in found if isinstance(value, Value)]
    column = f"{claim.column}: " if claim.column else ""
    alone = [
        f"one training of {value.name}, and how far two are apart is not known"
        for value in values
        if _unknown(value, spreads)
    ]
    compare = _ratio if claim.ratio is not None else _difference
    lent = [_lent(value, spreads) for value in values]
    judged = compare(
        claim,
        lent,
        values,
        column,
        remark and f"; {remark}",
        published,
    )
    reasons = [nothing_to_judge, unlike, *_missed(claim, look), *alone]
    if judged.verdict == "reproduced":
        reasons.append(_kept_untrained(claim, look))
    moving = [i for i, point in enumerate(claim.points[:2]) if point in claim.recipes and not settled(point)]
    bounds = {i: best(claim.points[i]) for i in moving}
    if None in bounds.values():
        others = " and ".join(values[i].name for i in moving if bounds[i] is None)
        reasons.append(
            f"other recipe: {claim.one_of}; which is the best for {others} is not measured, or not clear"
        )
    elif judged.verdict != UNTESTED and any(
        compare(claim, better, better, column, "", "").verdict != judged.verdict
        for better in _by_better_recipes(lent, bounds)
    ):
        reasons.append(f"other recipe: {claim.one_of}, and a better one could turn this")
    if against := "; ".join(filter(None, reasons)):
        judged = judged._replace(verdict=UNTESTED, reason=f"{against}; {judged.reason}")
    return judged._replace(reason="; ".join(filter(None, (judged.reason, stated))))


def _by_better_recipes(values: list[Value], bounds: Mapping[int, float | None]) -> Iterator[list[Value]]:
    """The numbers of a claim with one of the sides in `bounds`, or both, at the best that its metric has.

    Comparisons are monotonic in either side. So a verdict that stands there and at what was measured stands
    for all that better recipes could reach.
    """
    for i in range(1, 2 ** len(bounds)):
        reached = list(values)
        for place in (place for bit, place in enumerate(bounds) if i >> bit & 1):
            reached[place] = Value(bounds[place] or 0.0, 0.0, values[place].name)
        yield reached


def _unknown(value: Value, spreads: Spreads) -> bool:
    """Whether a number comes from one training and its spread over trainings is not known."""
    if value.behind:
        return any(_unknown(part, spreads) for _, part in value.behind)
    return value.trainings == 1 and spreads.asked and spreads.of(value.of, value.value) is None


def _lent(value: Value, spreads: Spreads) -> Value:
    """A number of one training, with the spread of its method's trainings in its error; likewise one that is
    computed from such numbers."""
    if value.behind:
        lent = [
            (abs(weight) * spread.sd, spread.freedom)
            for weight, part in value.behind
            if (spread := _spread(part, spreads))
        ]
        apart = math.hypot(value.apart, *(sd for sd, _ in lent))
        freedom = freedom_of([(value.apart, value.freedom), *lent])
        return value._replace(stderr=math.hypot(value.items, apart), apart=apart, freedom=freedom)
    if not (spread := _spread(value, spreads)):
        return value
    return value._replace(
        stderr=math.hypot(value.stderr, spread.sd),
        apart=math.hypot(value.apart, spread.sd),
        freedom=spread.freedom,
    )


def _spread(value: Value, spreads: Spreads) -> Spread | None:
    """The spread that a number of one training has; None for several trainings, none, and where no spread is
    known."""
    return spreads.of(value.of, value.value) if value.trainings == 1 else None


def _kept_untrained(claim: Claim, look: Look) -> str:
    """Why a claim that holds is no evidence: an untrained row keeps it, too, or is not measured.

    Empty if the claim names no such row, or if that row fails the claim.
    """
    if claim.untrained is None:
        return ""
    left = claim.left.model_copy(update={"row": claim.untrained})
    control = claim.model_copy(update={"left": left, "untrained": None, "requires": (), "one_of": None})
    judged = judge(control, look)
    if judged.verdict == "contradicted":
        return ""
    said = "is not measured" if judged.error is None else "keeps it too"
    return f"not informative: {claim.untrained}, on which nothing was trained, {said}: {judged.reason}"


def judge_claim(
    artefact: Artefact,
    about: About,
    look: Look,
    tokens: Mapping[str, int],
    claim: Claim,
    remark: str = "",
    of_scale: bool = True,
) -> Judgement:
    """Judge a claim of a table or figure.

    `tokens`: name -> training tokens, to compare with the claim's dose. Not `of_scale`: the numbers are
    costs, which do not depend on the scale's budgets.
    """
    spec = artefact.spec
    asked = artefact.forms.get(claim.paper or artefact.paper, {})

    def settled(point: Point) -> bool:
        # a metric by which the best was not chosen is that of the best where one recipe alone is the best
        return spec.run_of(point) in (about.best if spec.best(point) is not None else about.alone)

    def instead(point: Point) -> str:
        # a scale that judges nothing is the reason there
        told = of_scale and about.nothing_to_judge is None and not claim.ours
        return _form_there(point, spec, asked, about) if told else ""

    def judged(claim: Claim) -> Judgement:
        forms = about.forms if of_scale else {}
        stated = [*_recipes_told(claim, spec, about)]
        if not claim.ours:
            stated.append(dose_by_parameter(claim, tokens, spec, forms))
        found = judge(
            spec.floored(claim),
            look,
            about.nothing_to_judge if of_scale else None,
            remark,
            "" if claim.ours else unlike(claim, tokens, spec, asked, forms),
            about.spreads,
            best=spec.best,
            settled=settled,
            stated="; ".join(filter(None, stated)),
            instead=instead,
        )
        return found._replace(compared=compared(claim, spec))

    first, *others = map(judged, claim.by_each)
    if others:
        rows = [each.right.row for each in claim.by_each if each.right]
        return _of_each(rows, [first, *others], compared(claim, spec))
    other = claim.by_other_form
    return first if other is None else _of_forms(first, judged(other), claim.either)


def _recipes_told(claim: Claim, spec: Spec, about: About) -> Iterator[str]:
    """Of each side that has the best of several recipes: of how many, and which."""
    for point in claim.recipes:
        run = spec.run_of(point) or ""
        if run in about.best:
            n = len(spec.best_of.runs[run]) + 1 if spec.best_of else 1
            yield f"{point.row} is the best of {n} recipes, {about.best[run]}"


def _of_forms(first: Judgement, second: Judgement, either: Mapping[str, str]) -> Judgement:
    """One verdict on a claim by two forms of a method that its paper states. The claim's own form speaks if
    its verdict is the common one."""
    named = [(first, " and ".join(either)), (second, " and ".join(either.values()))]
    verdicts = {first.verdict, second.verdict}
    verdict: Verdict = (
        "reproduced"
        if "reproduced" in verdicts
        else "contradicted"
        if verdicts == {"contradicted"}
        else UNTESTED
    )
    if second.verdict == verdict != first.verdict:
        named.reverse()
    (speaks, rows), (silent, others) = named
    reason = (
        f"by {rows}: {speaks.reason}; by {others}, a form that the paper states, too: {silent.verdict},"
        f" {silent.reason}"
    )
    figures = BESIDE.join(judgement.figures for judgement in (speaks, silent) if judgement.figures)
    return speaks._replace(
        verdict=verdict, figures=figures, reason=reason, compared=f"{first.compared}, or {second.compared}"
    )


def _of_each(rows: Sequence[str], found: Sequence[Judgement], compared: str) -> Judgement:
    """One verdict on a claim that compares one side with several rows: that of the first row which decides
    it, with the reasons of all that agree; of rows that leave it untested, those without a number if there
    are any."""
    verdicts = [judgement.verdict for judgement in found]
    verdict: Verdict = next((v for v in ("contradicted", UNTESTED) if v in verdicts), "reproduced")
    agree = [
        (row, judgement) for row, judgement in zip(rows, found, strict=True) if judgement.verdict == verdict
    ]
    speak = [(row, judgement) for row, judgement in agree if judgement.error is None] or agree
    return speak[0][1]._replace(
        figures=BESIDE.join(dict.fromkeys(judgement.figures for judgement in found if judgement.figures)),
        reason="; ".join(f"beside {row}: {judgement.reason}" for row, judgement in speak),
        compared=compared,
    )


def compared(claim: Claim, spec: Spec) -> str:
    """The two sides of a claim by runs, columns and, where a column does not tell, measures: the same text in
    every table that compares them. Two rows of one run that differ in what they measure are told by name."""

    def said(point: Point, name: str) -> str:
        return " ".join(filter(None, (name, spec.measure_of(point), point.column, point.place)))

    sides = [claim.full(claim.left), *(claim.full(each.right) for each in claim.by_each if each.right)]
    by_run = [said(point, spec.run_of(point) or point.row) for point in sides]
    left, *others = by_run if len(set(by_run)) == len(sides) else [said(point, point.row) for point in sides]
    right = " and ".join(others)
    bound = "" if claim.ratio is None else f" {number(claim.ratio)}"
    margin = f" by {number(claim.margin)}" if claim.margin else ""
    return f"{left}{f' / {right}' if right and bound else ''} {claim.op}{bound or f' {right}'}{margin}"


def _missed(claim: Claim, look: Look) -> list[str]:
    """A line for each precondition that fails: its number is not there, or misses a bound."""
    found = []
    for point in map(claim.full, claim.requires):
        value = _named(claim, point, look(point))
        if isinstance(value, str):
            found.append(f"not informative: {value}")
        elif value.value < point.least or value.value > point.most:
            bound = number(point.least) if value.value < point.least else f"at most {number(point.most)}"
            found.append(f"not informative: {value.name} {value}, of {bound} required")
        elif value.value - point.above <= OFF_THE_FLOOR * value.stderr:
            found.append(
                f"not informative: {value.name} {value} is not {OFF_THE_FLOOR:g} standard errors above"
                f" {number(point.above)}"
            )
    return found


WITHIN_ERROR = "within error"
SAME_DOSE = 0.95  # the share of the paper's tokens that counts as the same dose, since papers round


def trained(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Name -> the training tokens of all steps, from name -> the facts of its measurement. Names whose facts
    have no tokens are left out."""
    return {name: sum(own["tokens"].values()) for name, own in facts.items() if "tokens" in own}


def unlike(
    claim: Claim,
    tokens: Mapping[str, int],
    spec: Spec | None = None,
    asked: Mapping[str, Form] | None = None,
    forms: Mapping[str, Form] | None = None,
) -> str:
    """How our training differs from the paper's: another form, fewer tokens (or fewer tokens a parameter),
    another recipe. Empty if it does not differ.

    `tokens`: row -> the training tokens of all its steps. `asked`: method -> the form that the claim's paper
    has; `forms`: run -> ours.
    """
    had = _doses(claim, tokens, spec, forms or {})
    less = [said for said, enough in had if not enough]
    dose = f"other dose: {', '.join(less)}{' tokens' * (claim.parameters is None)}" if less else ""
    form = _other_form(claim, spec, asked or {}, forms or {}) if spec is not None else ""
    return "; ".join(filter(None, (form, dose, claim.recipe and f"other recipe: {claim.recipe}")))


def dose_by_parameter(claim: Claim, tokens: Mapping[str, int], spec: Spec, forms: Mapping[str, Form]) -> str:
    """The doses of a claim that compares them in tokens a parameter, if they suffice; else empty, since
    `unlike` then says them."""
    had = _doses(claim, tokens, spec, forms) if claim.parameters is not None else []
    said = ", ".join(said for said, _ in had)
    return f"dose by parameter: {said}" if said and all(enough for _, enough in had) else ""


def _doses(
    claim: Claim, tokens: Mapping[str, int], spec: Spec | None, forms: Mapping[str, Form]
) -> list[tuple[str, bool]]:
    """The tokens of each row that a claim has a dose for and that was trained, beside the paper's, and
    whether they suffice.

    By parameter, tokens count as a share of the parameters of the model that was trained.
    """
    found = []
    for name, dose in claim.dose.items():
        if (ours := tokens.get(name)) is None:
            continue
        said = f"{name} had {count(ours)} of {count(int(dose))}"
        if claim.parameters is None:
            found.append((said, ours >= SAME_DOSE * dose))
            continue
        form = forms.get(spec.run_of(Point(row=name)) or "") if spec is not None else None
        size, asked = form and form.get(PARAMETERS), dose / claim.parameters
        each = f"{ours / size:.3g} of {asked:.3g} a parameter" if size else "a parameter not known"
        found.append((f"{said} tokens, {each}", bool(size) and ours / size >= SAME_DOSE * asked))
    return found


def _other_form(claim: Claim, spec: Spec, asked: Mapping[str, Form], forms: Mapping[str, Form]) -> str:
    """How the form of the runs that a claim compares differs from the paper's; empty if it does not."""
    said: dict[str, list[str]] = {}  # in what -> the rows
    for point in (claim.full(claim.left), claim.full(claim.right)):
        form = forms.get(spec.run_of(point) or "") if point else None
        if (
            point
            and form
            and (
                other := differences(form, {**asked.get(form["method"], {}), **spec.forms.get(point.row, {})})
            )
        ):
            said.setdefault(", ".join(other), []).append(point.row)
    words = "; ".join(f"{' and '.join(dict.fromkeys(rows))}: {other}" for other, rows in said.items())
    return f"another form than the paper's ({words})" if said else ""


def _form_there(point: Point, spec: Spec, asked: Mapping[str, Form], about: About) -> str:
    """Of a point whose run was not measured: the measured run of its method that is nearest to the form which
    the paper's sentence is about, and how that differs. Empty if there is none whose form is known, or if one
    does not differ."""
    run = spec.run_of(point) or ""
    if (own := about.planned.get(run)) is None:
        return ""
    wanted = {name: value for name, value in own.items() if name not in ("method", SEQUENCES)}
    wanted |= {**asked.get(own["method"], {}), **spec.forms.get(point.row, {})}
    there = {
        other: differences(form, wanted)
        for other, form in about.forms.items()
        if form["method"] == own["method"] and not form.get(LACKING)
    }
    nearest = min(there, key=lambda other: len(there[other]), default="")
    if not there.get(nearest):
        return ""
    return f"there is another form than the paper's ({nearest}: {', '.join(there[nearest])})"


def _named(claim: Claim, point: Point, value: Value | str) -> Value | str:
    """The number. Its name includes the column, if that is not the claim's own."""
    if isinstance(value, str) or point.column in (None, claim.column):
        return value
    return value._replace(name=f"{value.name} {point.column}")


def error_of(left: Value, right: Value, by: float = 1.0) -> Error:
    """The error of `left - by * right`, paired where both were measured on the same items."""
    theirs = right.pulls()
    paired = theirs and minus(left.pulls(), theirs.times(by))
    own = (
        [(left.items, _less_one(left.n)), (by * right.items, _less_one(right.n))]
        if paired is None
        else [(paired.stderr, len(paired.items) - 1.0)]
    )
    trained = [(left.apart, left.freedom), (by * right.apart, right.freedom)]
    items, training = (math.hypot(*(part for part, _ in parts)) for parts in (own, trained))
    return Error(items, training, freedom_of([*own, *trained]), paired)


def _less_one(n: int | None) -> float:
    return math.inf if n is None or n < 2 else n - 1.0


def freedom_of(parts: Sequence[tuple[float, float]]) -> float:
    """The degrees of freedom of independent errors together, after Welch and Satterthwaite."""
    whole = math.fsum(part**2 for part, _ in parts)
    below = math.fsum(part**4 / freedom for part, freedom in parts if part and not math.isinf(freedom))
    return whole**2 / below if below else math.inf


def _item_by_item(claim: Claim, paired: Pulls | None) -> str:
    """On how many items the left side is better, and on how many both are alike; nothing where they are not
    paired."""
    if paired is None:
        return ""
    sign, n = (1.0 if claim.op == ">" else -1.0), len(paired.items)
    better, tied = sum(sign * x > 0 for x in paired.outcomes), sum(x == 0 for x in paired.outcomes)
    return f"; of {n:,} items {100 * better / n:.1f} % better, {100 * tied / n:.1f} % tied"


def _trainings(left: Value, right: Value | None) -> str:
    """How many trainings either side is the mean over."""
    return str(left.trainings) if right is None else f"{left.trainings} and {right.trainings}"


def _errors(error: Error) -> str:
    """So many errors as were asked for, in words."""
    return f"{error.enough:.2g} standard errors"


def _difference(
    claim: Claim, values: list[Value], own: list[Value], column: str, remark: str, published: str
) -> Judgement:
    floor = values[-1].value if isinstance(claim.floor, Point) else claim.floor
    left, right, *ceiling = values[:-1] if isinstance(claim.floor, Point) else values
    difference, error = left.value - right.value, error_of(left, right)
    shown = ", ".join(dict.fromkeys(f"{value.name} {value}" for value in own))
    stated = f"difference {plus_minus(difference, error.total)}{PAIRED * bool(error.paired)}"
    figures = f"{column}{shown}; {stated}{_item_by_item(claim, error.paired)}{remark}{published}"
    untold = Judgement(
        UNTESTED, figures, "", "", error.total, error.items, error.training, _trainings(left, right)
    )

    sign, margin = (1.0 if claim.op == ">" else -1.0), claim.margin or 0.0
    needed = sign * margin + 0.0  # + 0.0 turns -0.0 into 0.0
    if ceiling and (reach := sign * (ceiling[0].value - right.value)) < margin:
        return untold._replace(
            reason=f"even {ceiling[0].name} is only {number(reach)} better than {right.name}: no room"
        )
    if floor is not None and all(sign * (v.value - floor) <= OFF_THE_FLOOR * v.stderr for v in (left, right)):
        return untold._replace(
            reason=(
                f"neither is more than {OFF_THE_FLOOR:g} standard errors better than chance, {number(floor)}"
            )
        )
    excess = sign * difference - margin
    if abs(excess) <= error.enough * error.total or excess == 0:
        return untold._replace(reason=f"{stated} is {WITHIN_ERROR} of {number(needed)}")
    holds = excess > 0
    relation = claim.op if holds else {">": "<", "<": ">"}[claim.op]
    reason = f"{stated} {relation} {number(needed)} by more than {_errors(error)}"
    return untold._replace(verdict="reproduced" if holds else "contradicted", reason=reason)


def _ratio(
    claim: Claim, values: list[Value], own: list[Value], column: str, remark: str, published: str
) -> Judgement:
    """`left / right op ratio`, or `left op ratio`. Values without an error, such as costs, are compared
    plainly."""
    bound, left, right = claim.ratio or 0.0, values[0], values[1] if len(values) > 1 else None
    ours = left.value
    error = Error(
        left.items,
        left.apart,
        freedom_of([(left.items, _less_one(left.n)), (left.apart, left.freedom)]),
        None,
    )
    figures = f"{column}{', '.join(f'{value.name}: {value}' for value in own)}"
    if right is not None:
        if right.value == 0:
            return Judgement(UNTESTED, f"{figures}{remark}{published}", f"{right.name} is zero")
        ours = left.value / right.value
        error = error_of(left, right, by=ours)
        error = error._replace(
            items=error.items / abs(right.value), training=error.training / abs(right.value)
        )
        figures += f"; ratio {plus_minus(ours, error.total or None)}{PAIRED * bool(error.paired)}"
    figures += f"{remark}{published}"
    untold = Judgement(
        UNTESTED, figures, "", "", error.total, error.items, error.training, _trainings(left, right)
    )
    if error.total and abs(ours - bound) <= error.enough * error.total:
        return untold._replace(
            reason=(
                f"{plus_minus(ours, error.total)}{PAIRED * bool(error.paired)} is {WITHIN_ERROR} of"
                f" {number(bound)}"
            )
        )
    holds = ours > bound if claim.op == ">" else ours < bound
    reason = f"{number(ours)} is {'' if holds else 'not '}{claim.op} {number(bound)}"
    return untold._replace(verdict="reproduced" if holds else "contradicted", reason=reason)


def value_of(
    found: Measured | None, reading: Reading | None, name: str, column: str, unit: float = 1.0
) -> Value | str:
    """A reading of a measurement to judge by, `unit` times as large, or why it is none."""
    if reading is None:
        return f"{name}: {column} was not run"
    if reading.value is None:
        return f"{name}: {column} is not defined: {reading.why}"
    value = check_number(
        *(unit * v if v is not None else None for v in reading[3:5]), name=name, column=column
    )
    if isinstance(value, str) or found is None:
        return value
    if found.facts.get("collapsed"):
        return f"{name} collapsed in training: it predicts no better than chance"
    of = of_training(found, reading, unit)
    return value._replace(
        pulls=scale_pulls(found, reading, unit),
        n=reading.n,
        trainings=int(of is not None),
        of=(of,) if of else (),
    )


def check_number(value: float, stderr: float | None, name: str, column: str) -> Value | str:
    """A number with its error, or the reason why they cannot judge."""
    if stderr is None:
        return f"{name}: {column} is {number(value)}, without a standard error"
    if not math.isfinite(value) or not math.isfinite(stderr):
        return f"{name}: {column} is {value} with standard error {stderr}"
    return Value(value, stderr, name)


def tally(verdicts: Sequence[str]) -> str:
    """`5 reproduced, 1 contradicted, 7 not tested`."""
    return ", ".join(f"{sum(v == verdict for v in verdicts)} {verdict}" for verdict in get_args(Verdict))


def write_claims(path: Path, artefact: Artefact, judgements: Sequence[Judgement]) -> Path:
    """Write the verdicts on an artefact's claims as CSV with the columns COLUMNS; returns the path."""
    rows = [
        {
            "claim": claim.claim,
            "paper": claim.paper or artefact.paper,
            "source": claim.source,
            "whose": claim.whose,
            **judgement._asdict(),
        }
        for claim, judgement in zip(artefact.spec.claims, judgements, strict=True)
    ]
    write_csv(path, COLUMNS, rows)
    return path
