"""Tables and figures that a file beside their spec draws.

The file has `figure(spec, measured, about)`, which returns a matplotlib figure, or `draw(spec, measured,
about, out)`, which returns the paths that it wrote. If its claims are about a benchmark, it also has
`look(spec, about)`, which returns the function that finds a number at a point, and a constant `PLACES`, the
points that it finds (`relinear.plan.places`).
"""

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

from relinear.draw import About, Measurements
from relinear.draw.cells import disagree
from relinear.draw.claims import Value, judge_claim, trained, value_of
from relinear.draw.drawing import Drawn
from relinear.draw.pictures import saving, styled
from relinear.draw.provenance import Origin
from relinear.plan.claims import Point
from relinear.plan.figures import Own
from relinear.plan.specs import Artefact


def drawn(artefact: Artefact, measured: Measurements, about: About) -> Drawn:
    """What `<stem>.py` draws: <stem>.<suffix> for each suffix in the spec's `makes`.

    Raises ValueError where the file has no `draw`, or draws other files than the spec says.
    """
    spec: Own | Any = artefact.spec
    script = load(
        artefact.file.with_suffix(".py"), "draw(spec, measured, about, out)", "figure(spec, measured, about)"
    )

    @styled
    def write(out: Path, _: Any) -> None:
        made = [out / f"{artefact.stem}.{suffix}" for suffix in spec.makes]
        got = script.draw(spec, measured, about, out)
        if sorted(got) != sorted(made) or not all(path.is_file() for path in made):
            raise ValueError(
                f"{artefact.stem}.py drew {', '.join(sorted(p.name for p in got)) or 'nothing'};"
                f" {artefact.path} makes {spec.makes}"
            )

    def look(point: Point) -> Value | str:
        if why := disagree(measured, point.row):
            return why
        own = [m for run, measure in spec.reads() if run == point.row and (m := measured.get((run, measure)))]
        readings = ((m, reading) for m in own if (reading := m.find(point.column or "", at=point.at or None)))
        name = " at ".join(filter(None, (point.row, point.place)))
        return value_of(*next(readings, (None, None)), name, point.column or "")

    found = {read: measured.get(read) for read in spec.reads()}
    cells: dict[str, dict[str, Origin]] = {run: {} for run, _ in found}
    for (run, measure), m in found.items():
        cells[run][measure] = m and m.source.file
    files = {about.files.get(name, Path(name)): None for name in spec.files()}
    if hasattr(script, "look"):  # benchmarks are of no scale
        judge = partial(judge_claim, artefact, about, script.look(spec, about), {}, of_scale=False)
    else:
        judge = partial(
            judge_claim, artefact, about, look, trained({run: m.facts for (run, _), m in found.items() if m})
        )
    if hasattr(script, "figure"):
        write = saving(artefact, lambda: script.figure(spec, measured, about))
    return Drawn(write, judge, cells, [m.source for m in found.values() if m], files)


def load(file: Path, *has: str) -> Any:
    """The module that a file is. Raises ValueError if it has none of the functions `has`, such as `draw(spec,
    measured, about, out)`."""
    described = importlib.util.spec_from_file_location(f"{file.parent.name}_{file.stem}", file)
    if described is None or described.loader is None:
        raise ValueError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    if not any(hasattr(module, function.partition("(")[0]) for function in has):
        raise ValueError(f"{file} has no `{'` and no `'.join(has)}`")
    return module
