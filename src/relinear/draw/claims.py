"""The papers' claims, judged by the numbers of a table or figure.

`{left: lolcats_window, right: t2r, column: avg, op: ">", margin: 20}` reads "more than 20 points above", and a negative margin "no more than
that much worse". `{left: {row: lizard, at: {input: 32768}}, column: peak_gib, op: "<", ratio: 74.5}` compares a number with a bound.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from relinear.draw.paired import Pulls, minus, scale_pulls
from relinear.draw.render import count, number, plus_minus, write_csv
from relinear.plan.claims import Claim, Point
from relinear.plan.readings import Measured, Reading
from relinear.plan.specs import Artefact

Verdict = Literal["reproduced", "contradicted", "not tested at this scale"]
UNTESTED: Verdict = "not tested at this scale"
STANDARD_ERRORS = 2.0
OFF_THE_FLOOR = 3.0  # standard errors
PAIRED = " (paired)"  # behind an error that is that of differences on the same items

COLUMNS = ("claim", "paper", "source", "verdict", "figures", "reason")


class Value(NamedTuple):
    """A number to judge by. `stderr` 0: it is the median of so many repeats that their spread is far below any margin. `name`: for reading.

    `pulls`: what gives the pulls of the items that it was measured on, or None where they are not kept. `apart`: the part of its error that is not
    of items, such as that of the seeds.
    """

    value: float
    stderr: float
    name: str
    pulls: Callable[[], Pulls | None] = lambda: None
    apart: float = 0.0

    def __str__(self) -> str:
        return plus_minus(self.value, self.stderr or None)


Look = Callable[[Point], Value | str]  # the number at a point, or the reason why there is none to judge by


class Judgement(NamedTuple):
    """A verdict on a claim, the numbers it was judged by, and why."""

    verdict: Verdict
    figures: str
    reason: str


def judge(claim: Claim, look: Look, nothing_to_judge: str | None = None, remark: str = "", unlike: str = "") -> Judgement:
    """Judge a claim by the numbers at its points.

    Reproduced or contradicted if the difference clears the margin, or the ratio its bound, by more than two standard errors, else not tested. The
    error is that of the paired difference where both sides kept the outcomes of the same items, and the figures then say `paired`; else the errors
    are combined as if independent, and a verdict is given too seldom rather than too often. `remark` stands beside the numbers. `unlike`: in what
    our training differs from the paper's; then no verdict is given, nor where a number that the claim requires is not reached.
    """
    published = f"; published {claim.published}" if claim.published else ""
    found = [_named(claim, point, look(point)) for point in claim.points]
    if reason := next((value for value in found if isinstance(value, str)), None):
        return Judgement(UNTESTED, published.removeprefix("; "), "; ".join(filter(None, (nothing_to_judge, reason))))
    values = [value for value in found if isinstance(value, Value)]
    column = f"{claim.column}: " if claim.column else ""
    judged = (_ratio if claim.ratio is not None else _difference)(claim, values, column, remark and f"; {remark}", published)
    if against := "; ".join(filter(None, (nothing_to_judge, unlike, *_missed(claim, look)))):
        return judged._replace(verdict=UNTESTED, reason=f"{against}; {judged.reason}")
    return judged


def _missed(claim: Claim, look: Look) -> list[str]:
    """The reasons why a claim cannot be judged: a line for each number that it requires and that is not there or misses a bound."""
    found = []
    for point in map(claim.full, claim.requires):
        value = _named(claim, point, look(point))
        if isinstance(value, str):
            found.append(f"not informative: {value}")
        elif value.value < point.least or value.value > point.most:
            bound = number(point.least) if value.value < point.least else f"at most {number(point.most)}"
            found.append(f"not informative: {value.name} {value}, of {bound} required")
        elif value.value - point.above <= OFF_THE_FLOOR * value.stderr:
            found.append(f"not informative: {value.name} {value} is not {OFF_THE_FLOOR:g} standard errors above {number(point.above)}")
    return found


SAME_DOSE = 0.95  # the share of the paper's tokens that counts as the same dose, since papers round


def trained(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Name -> the training tokens of all steps, from name -> the facts of its measurement. Names whose facts have no tokens are left out."""
    return {name: sum(own["tokens"].values()) for name, own in facts.items() if "tokens" in own}


def unlike(claim: Claim, tokens: Mapping[str, int]) -> str:
    """A text that says how our training differs from the claim's: rows of fewer tokens than the paper's, another recipe. Empty if it does not.

    `tokens`: row -> the training tokens of all its steps.
    """
    less = [
        f"{name} had {count(tokens[name])} of {count(int(dose))}" for name, dose in claim.dose.items() if tokens.get(name, dose) < SAME_DOSE * dose
    ]
    dose = f"other dose: {', '.join(less)} tokens" if less else ""
    return "; ".join(filter(None, (dose, claim.recipe and f"other recipe: {claim.recipe}")))


def _named(claim: Claim, point: Point, value: Value | str) -> Value | str:
    """The number. Its name has the column too, where that is not the claim's own."""
    if isinstance(value, str) or point.column in (None, claim.column):
        return value
    return value._replace(name=f"{value.name} {point.column}")


def error_of(left: Value, right: Value, by: float = 1.0) -> tuple[float, Pulls | None]:
    """The error of `left - by * right`, and the paired differences that it comes from where both were measured on the same items."""
    theirs = right.pulls()
    paired = theirs and minus(left.pulls(), theirs.times(by))
    if paired is None:
        return math.hypot(left.stderr, by * right.stderr), None
    return math.hypot(paired.stderr, left.apart, by * right.apart), paired


def _item_by_item(claim: Claim, paired: Pulls | None) -> str:
    """On how many items the left side is better, and on how many both are alike; nothing where they are not paired."""
    if paired is None:
        return ""
    sign, n = (1.0 if claim.op == ">" else -1.0), len(paired.items)
    better, tied = sum(sign * x > claim.tie for x in paired.outcomes), sum(abs(x) <= claim.tie for x in paired.outcomes)
    return f"; of {n:,} items {100 * better / n:.1f} % better, {100 * tied / n:.1f} % tied"


def _difference(claim: Claim, values: list[Value], column: str, remark: str, published: str) -> Judgement:
    floor = values[-1].value if isinstance(claim.floor, Point) else claim.floor
    left, right, *ceiling = values[:-1] if isinstance(claim.floor, Point) else values
    difference, (error, paired) = left.value - right.value, error_of(left, right)
    shown = ", ".join(dict.fromkeys(f"{value.name} {value}" for value in values))
    stated = f"difference {plus_minus(difference, error)}{PAIRED * bool(paired)}"
    figures = f"{column}{shown}; {stated}{_item_by_item(claim, paired)}{remark}{published}"

    sign, margin = (1.0 if claim.op == ">" else -1.0), claim.margin or 0.0
    needed = sign * margin + 0.0  # + 0.0 turns -0.0 into 0.0
    if ceiling and (reach := sign * (ceiling[0].value - right.value)) < margin:
        return Judgement(UNTESTED, figures, f"even {ceiling[0].name} is only {number(reach)} better than {right.name}: no room")
    if floor is not None and all(sign * (v.value - floor) <= OFF_THE_FLOOR * v.stderr for v in (left, right)):
        return Judgement(UNTESTED, figures, f"neither is more than {OFF_THE_FLOOR:g} standard errors better than chance, {number(floor)}")
    excess = sign * difference - margin
    if abs(excess) <= STANDARD_ERRORS * error or excess == 0:
        return Judgement(UNTESTED, figures, f"{stated} is within error of {number(needed)}")
    holds = excess > 0
    relation = claim.op if holds else {">": "<", "<": ">"}[claim.op]
    reason = f"{stated} {relation} {number(needed)} by more than {STANDARD_ERRORS:g} standard errors"
    return Judgement("reproduced" if holds else "contradicted", figures, reason)


def _ratio(claim: Claim, values: list[Value], column: str, remark: str, published: str) -> Judgement:
    """`left / right op ratio`, or `left op ratio`. Values without an error, such as costs, are compared plainly."""
    bound, left = claim.ratio or 0.0, values[0]
    ours, error, paired = left.value, left.stderr, None
    figures = f"{column}{', '.join(f'{value.name}: {value}' for value in values)}"
    if len(values) > 1:
        right = values[1]
        if right.value == 0:
            return Judgement(UNTESTED, f"{figures}{remark}{published}", f"{right.name} is zero")
        ours = left.value / right.value
        error, paired = error_of(left, right, by=ours)
        error /= abs(right.value)
        figures += f"; ratio {plus_minus(ours, error or None)}{PAIRED * bool(paired)}"
    figures += f"{remark}{published}"
    if error and abs(ours - bound) <= STANDARD_ERRORS * error:
        return Judgement(UNTESTED, figures, f"{plus_minus(ours, error)}{PAIRED * bool(paired)} is within error of {number(bound)}")
    holds = ours > bound if claim.op == ">" else ours < bound
    return Judgement("reproduced" if holds else "contradicted", figures, f"{number(ours)} is {'' if holds else 'not '}{claim.op} {number(bound)}")


def value_of(found: Measured | None, reading: Reading | None, name: str, column: str, unit: float = 1.0) -> Value | str:
    """A reading of a measurement to judge by, `unit` times as large, or why it is none."""
    if reading is None:
        return f"{name}: {column} was not run"
    if reading.value is None:
        return f"{name}: {column} is not defined: {reading.why}"
    value = check_number(*(unit * v if v is not None else None for v in reading[3:5]), name=name, column=column)
    return value if isinstance(value, str) or found is None else value._replace(pulls=scale_pulls(found, reading, unit))


def check_number(value: float, stderr: float | None, name: str, column: str) -> Value | str:
    """A number with its error, or the reason why they cannot judge."""
    if stderr is None:
        return f"{name}: {column} is {number(value)}, without a standard error"
    if not math.isfinite(value) or not math.isfinite(stderr):
        return f"{name}: {column} is {value} with standard error {stderr}"
    return Value(value, stderr, name)


def tally(verdicts: Sequence[str]) -> str:
    """`5 reproduced, 1 contradicted, 7 not tested at this scale`."""
    return ", ".join(f"{sum(v == verdict for v in verdicts)} {verdict}" for verdict in get_args(Verdict))


def write_claims(path: Path, artefact: Artefact, judgements: Sequence[Judgement]) -> Path:
    """Write the verdicts on an artefact's claims as CSV with the columns COLUMNS; returns the path."""
    rows = [
        {"claim": claim.claim, "paper": claim.paper or artefact.paper, "source": claim.source, **judgement._asdict()}
        for claim, judgement in zip(artefact.spec.claims, judgements, strict=True)
    ]
    write_csv(path, COLUMNS, rows)
    return path
