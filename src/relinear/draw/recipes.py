"""The best of the recipes that a paper tried: which of them a run's numbers are of."""

import math

from relinear.draw import About, Measurements
from relinear.plan.claims import Spec
from relinear.plan.names import split
from relinear.plan.readings import Reading


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

    def score(run: str) -> Reading | None:
        found = measured.get((run, of.measure))
        reading = found and found.find(of.metric)
        return reading if reading and reading.value is not None else None

    best: dict[str, str] = {}
    alone = set()
    for run, others in of.runs.items():
        scores = {name: reading for name in (run, *others) if (reading := score(name))}
        if len(scores) <= len(others):
            continue
        first = max(scores, key=lambda name: scores[name].value or 0.0)
        drawn = [measure for name, measure in spec.draws() if name == run]
        if drawn and all(measured.get((first, measure)) for measure in drawn):
            best[run] = first
            if not any(_within_error(scores[first], scores[name]) for name in scores if name != first):
                alone.add(run)
    moved = {run: first for run, first in best.items() if first != run}
    found = {(run, measure): own for (run, measure), own in measured.items() if split(run)[0] not in moved}
    for run, first in moved.items():
        for (name, measure), own in measured.items():
            if own and name == first:
                found[run, measure] = own._replace(run=run)
    return found, about._replace(best=best, alone=alone)


def _within_error(best: Reading, other: Reading) -> bool:
    """Whether two scores of one test are within two standard errors, as far as errors are known."""
    error = math.hypot(best.stderr or 0.0, other.stderr or 0.0)
    return (best.value or 0.0) - (other.value or 0.0) <= 2 * error
