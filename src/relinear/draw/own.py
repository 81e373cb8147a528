"""Tables and figures that a file beside their spec draws.

The file has `draw(spec, measured, about, out)`, which returns the paths that it wrote. If its claims are about a benchmark,
it also has `look(spec, about)`, which returns the function that finds a number at a point.
"""

import importlib.util
from pathlib import Path
from typing import Any

from relinear.draw import About, Measurements
from relinear.draw.cells import FAILED, gate_of
from relinear.draw.claims import Value, trained, value_of
from relinear.draw.pictures import judge_claims, styled, write_verdicts
from relinear.draw.provenance import Origin, write_provenance
from relinear.plan.claims import Point
from relinear.plan.figures import Own
from relinear.plan.specs import Artefact


@styled
def draw(artefact: Artefact, measured: Measurements, about: About, out: Path) -> list[Path]:
    """Have `<stem>.py` write <stem>.<suffix> for each suffix in the spec's `makes`; add provenance and verdicts. Returns all paths.

    Raises ValueError where the file has no `draw`, or drew other files than the spec says.
    """
    spec: Own | Any = artefact.spec
    made = [out / f"{artefact.stem}.{suffix}" for suffix in spec.makes]
    script = load(artefact.file.with_suffix(".py"), "draw(spec, measured, about, out)")
    drawn = script.draw(spec, measured, about, out)
    if sorted(drawn) != sorted(made) or not all(path.is_file() for path in made):
        raise ValueError(f"{artefact.stem}.py drew {', '.join(sorted(p.name for p in drawn)) or 'nothing'}; {artefact.path} makes {spec.makes}")
    cells: dict[str, dict[str, Origin]] = {}
    for run, measure in spec.reads():
        found = measured.get((run, measure))
        cells.setdefault(run, {})[measure] = found and found.source.file
    files = {about.files.get(name, Path(name)): None for name in spec.files()}
    sources = [found.source for read in spec.reads() if (found := measured.get(read))]
    written = [write_provenance(out / f"{artefact.stem}.provenance.json", artefact, about.scale, cells, sources, files)]
    return [*made, *written, *judged(artefact, measured, about, out)]


def judged(artefact: Artefact, measured: Measurements, about: About, out: Path) -> list[Path]:
    """Write the verdicts on a figure's claims; returns the file, or nothing where there are no claims."""
    spec: Own | Any = artefact.spec
    script = load(artefact.file.with_suffix(".py"), "draw(spec, measured, about, out)")

    def look(point: Point) -> Value | str:
        if gate_of(measured, point.row) == FAILED:
            return f"{point.row} failed its gate: its parallel and recurrent forms disagree"
        own = [m for run, measure in spec.reads() if run == point.row and (m := measured.get((run, measure)))]
        readings = ((m, reading) for m in own if (reading := m.find(point.column or "", at=point.at or None)))
        name = " at ".join(filter(None, (point.row, point.place)))
        return value_of(*next(readings, (None, None)), name, point.column or "")

    if hasattr(script, "look"):  # benchmarks are of no scale
        return write_verdicts(artefact, judge_claims(artefact, script.look(spec, about), about, {}, of_scale=False), out)
    tokens = trained({run: found.facts for run, measure in spec.reads() if (found := measured.get((run, measure)))})
    return write_verdicts(artefact, judge_claims(artefact, look, about, tokens), out)


def load(file: Path, has: str) -> Any:
    """The module that a file is. Raises ValueError if it does not have the function `has`, such as `draw(spec, measured, about, out)`."""
    described = importlib.util.spec_from_file_location(f"{file.parent.name}_{file.stem}", file)
    if described is None or described.loader is None:
        raise ValueError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    if not hasattr(module, has.partition("(")[0]):
        raise ValueError(f"{file} has no `{has}`")
    return module
