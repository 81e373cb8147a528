"""The best of the recipes that a paper tried: which of them a run's numbers are of."""

from relinear.draw import About, Measurements
from relinear.plan.claims import Spec
from relinear.plan.names import split


def by_best_recipe(spec: Spec, measured: Measurements, about: About) -> tuple[Measurements, About]:
    """The measurements with the best recipe's in the place of each run whose recipes are all measured, and
    which these are.

    A run keeps its own numbers while one of its recipes is not measured, or the best of them lacks a number
    that the spec draws of the run. Of equal recipes the run's own is taken, else the first. Further trainings
    are those of the best recipe.
    """
    of = spec.best_of
    if of is None:
        return measured, about

    def score(run: str) -> float | None:
        found = measured.get((run, of.measure))
        reading = found and found.find(of.metric)
        return reading.value if reading else None

    best: dict[str, str] = {}
    for run, others in of.runs.items():
        scores = {name: value for name in (run, *others) if (value := score(name)) is not None}
        if len(scores) <= len(others):
            continue
        first = max(scores, key=scores.__getitem__)
        drawn = [measure for name, measure in spec.draws() if name == run]
        if drawn and all(measured.get((first, measure)) for measure in drawn):
            best[run] = first
    moved = {run: first for run, first in best.items() if first != run}
    found = {(run, measure): own for (run, measure), own in measured.items() if split(run)[0] not in moved}
    for run, first in moved.items():
        for (name, measure), own in measured.items():
            if own and split(name)[0] == first:
                place = run + name.removeprefix(first)
                found[place, measure] = own._replace(run=place)
    trainings: dict[str, list[float | None]] = {}
    for run, measure in measured:
        if measure == of.measure and measured[run, measure]:
            trainings.setdefault(split(run)[0], []).append(score(run))
    solved = {
        run for run, scores in trainings.items() if all(s is not None and s >= of.solved for s in scores)
    }
    return found, about._replace(best=best, solved=solved)
