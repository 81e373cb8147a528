"""The best of the recipes that a paper tried: which of them a run's numbers are of."""

import math
from typing import NamedTuple

from relinear.draw import About, Measurements
from relinear.draw.spreads import Of, Spreads, of_training
from relinear.plan.claims import Spec
from relinear.plan.names import split


class Score(NamedTuple):
    """A run's score in the metric that recipes are chosen by: its value, the error of its items, and the key
    of its spread over trainings."""

    value: float
    stderr: float
    of: Of | None


def by_best_recipe(spec: Spec, measured: Measurements, about: About) -> tuple[Measurements, About]:
    """The measurements with the best recipe's in the place of each run whose recipes are all measured, and
    which these are.

    A run keeps its own numbers while one of its recipes is not measured, or the best of them lacks a number
    that the spec draws of the run, and at a part of the scale's budget, which ends a good recipe early. Of
    equal recipes the run's own is taken, else the first. Of another recipe one training is read.
    """
    of = spec.best_of
    if of is None or about.budget < 1:
        return measured, about

    def score(run: str) -> Score | None:
        found = measured.get((run, of.measure))
        reading = found and found.find(of.metric)
        if not found or not reading or reading.value is None:
            return None
        return Score(reading.value, reading.stderr or 0.0, of_training(found, reading))

    best: dict[str, str] = {}
    alone = set()
    for run, others in of.runs.items():
        scores = {name: reading for name in (run, *others) if (reading := score(name))}
        if len(scores) <= len(others):
            continue
        first = max(scores, key=lambda name: scores[name].value)
        drawn = [measure for name, measure in spec.draws() if name == run]
        if drawn and all(measured.get((first, measure)) for measure in drawn):
            best[run] = first
            worse = [scores[name] for name in scores if name != first]
            if not any(_within_error(scores[first], other, about.spreads) for other in worse):
                alone.add(run)
    moved = {run: first for run, first in best.items() if first != run}
    found = {(run, measure): own for (run, measure), own in measured.items() if split(run)[0] not in moved}
    for run, first in moved.items():
        for (name, measure), own in measured.items():
            if own and name == first:
                found[run, measure] = own._replace(run=run)
    return found, about._replace(best=best, alone=alone)


def _within_error(best: Score, other: Score, spreads: Spreads) -> bool:
    """Whether two scores are within two standard errors: of the items and of one training on either side."""
    errors = [best.stderr, other.stderr]
    for score in (best, other):
        if score.of is not None and (spread := spreads.of((score.of,), score.value)):
            errors.append(spread.sd)
    return best.value - other.value <= 2 * math.hypot(*errors)
