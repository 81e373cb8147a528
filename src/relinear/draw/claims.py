"""A paper's claims as data, judged by the numbers of a table.

`{left: lolcats_window, right: t2r, column: avg, op: ">", margin: 20}` reads "more than 20 points above",
and a negative margin "no more than that much worse".
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from relinear.draw._inputs import Strict
from relinear.draw._render import NOT_RUN, number, plus_minus, write_text

Verdict = Literal["reproduced", "contradicted", "not tested at this scale"]
UNTESTED: Verdict = "not tested at this scale"
STANDARD_ERRORS = 2.0

COLUMNS = ("claim", "paper", "source", "verdict", "figures", "reason")

# Numbers of a random teacher say that the pipeline runs, and nothing about a method.
NOTHING_TO_JUDGE = {"smoke": "the teacher of the smoke scale is random"}


class Claim(Strict):
    """`left > right + margin`, or `left < right - margin`, in `column` of the table."""

    claim: str
    paper: str
    source: str
    left: str
    right: str
    column: str
    op: Literal[">", "<"]
    margin: float = 0.0
    # The run that bounds `left`: where even it is less than `margin` better, the claim cannot be tested.
    ceiling: str | None = None
    published: str | None = None  # the paper's own figures, in its words

    @property
    def runs(self) -> tuple[str, ...]:
        return tuple(run for run in (self.left, self.right, self.ceiling) if run is not None)


class Judgement(NamedTuple):
    verdict: Verdict
    figures: str
    reason: str


def judge(claim: Claim, rows: Mapping[str, Mapping[str, Any]], scale: str) -> Judgement:
    """Judge a claim by a table's rows, run -> column -> cell, with standard errors under `<column>_stderr`.

    Reproduced or contradicted if the difference clears the margin by more than two combined standard errors,
    else not tested. The two errors are combined as if independent; models scored on the same items differ by
    less, so a verdict is given too seldom rather than too often.
    """
    published = f"; published {claim.published}" if claim.published else ""
    if unmeasured := _why_unmeasured(claim, rows, scale):
        return Judgement(UNTESTED, published.removeprefix("; "), unmeasured)

    cells = {run: (rows[run][claim.column], rows[run][f"{claim.column}_stderr"]) for run in claim.runs}
    (left, left_error), (right, right_error) = cells[claim.left], cells[claim.right]
    difference, error = left - right, math.hypot(left_error, right_error)
    shown = ", ".join(f"{run} {plus_minus(*cells[run])}" for run in dict.fromkeys(claim.runs))
    figures = f"{claim.column}: {shown}; difference {plus_minus(difference, error)}{published}"

    sign = 1.0 if claim.op == ">" else -1.0
    needed = sign * claim.margin + 0.0  # + 0.0: never -0.00
    if claim.ceiling and (reach := sign * (cells[claim.ceiling][0] - right)) < claim.margin:
        reason = f"even {claim.ceiling} is only {number(reach)} better than {claim.right}: no room"
        return Judgement(UNTESTED, figures, reason)
    excess = sign * difference - claim.margin
    stated = f"difference {plus_minus(difference, error)}"
    if abs(excess) <= STANDARD_ERRORS * error or excess == 0:
        return Judgement(UNTESTED, figures, f"{stated} is within error of {number(needed)}")
    holds = excess > 0
    relation = claim.op if holds else {">": "<", "<": ">"}[claim.op]
    return Judgement(
        "reproduced" if holds else "contradicted",
        figures,
        f"{stated} {relation} {number(needed)} by more than {STANDARD_ERRORS:g} standard errors",
    )


def _why_unmeasured(claim: Claim, rows: Mapping[str, Mapping[str, Any]], scale: str) -> str | None:
    """The reason why the cells that a claim needs cannot judge it, or None if they can."""
    if scale in NOTHING_TO_JUDGE:
        return NOTHING_TO_JUDGE[scale]
    for run in claim.runs:
        row = rows.get(run, {})
        value, error = row.get(claim.column, NOT_RUN), row.get(f"{claim.column}_stderr")
        if value == NOT_RUN:
            return f"{run}: {claim.column} was not run"
        if row.get("gate") == "failed":
            return f"{run} failed its gate: its parallel and recurrent forms disagree"
        if error is None or not math.isfinite(value) or not math.isfinite(error):
            return f"{run}: {claim.column} is {value} with standard error {error}"
    return None


def tally(judgements: Sequence[Judgement]) -> str:
    """`5 reproduced, 1 contradicted, 7 not tested at this scale`."""
    return ", ".join(f"{sum(j.verdict == verdict for j in judgements)} {verdict}" for verdict in get_args(Verdict))


def write_claims(path: Path, claims: Sequence[Claim], rows: Mapping[str, Mapping[str, Any]], scale: str) -> list[Judgement]:
    """Judge every claim and write them as CSV with the columns COLUMNS."""
    judgements = [judge(claim, rows, scale) for claim in claims]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([c.claim, c.paper, c.source, *j] for c, j in zip(claims, judgements, strict=True))
    write_text(path, text.getvalue())
    return judgements
