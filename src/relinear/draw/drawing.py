"""Drawing a table or figure: its shape says what stands where and how claims read it, and this module writes
all files."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from relinear.draw import About, Measurements
from relinear.draw.beside import PROVENANCE, VERDICTS
from relinear.draw.claims import Judgement, write_claims
from relinear.draw.provenance import Origin, write_provenance
from relinear.draw.recipes import by_best_recipe
from relinear.errors import UserError
from relinear.plan.claims import Claim
from relinear.plan.measured import Source
from relinear.plan.specs import Artefact


class Drawn(NamedTuple):
    """What a shape makes of measurements.

    `write(out, judgements)` writes the table or the picture into a folder. `judge` gives the verdict on a
    claim. `cells`, `sources` and `files` are those of `write_provenance`; to the sources come the records
    that claims and the choice of the best recipe read.
    """

    write: Callable[[Path, Sequence[Judgement]], None]
    judge: Callable[[Claim], Judgement]
    cells: Mapping[str, Mapping[str, Origin]]
    sources: Iterable[Source]
    files: Mapping[Path, Any] = {}


def make(artefact: Artefact, measured: Measurements, about: About, out: Path) -> list[Path]:
    """Draw a table or figure into the folder `out`: <stem>.<suffix> for each of the artefact's suffixes;
    returns the files.

    Raises ValueError for a measurement of another run, measure or scale than it is given as (a number never
    lands in a foreign row), and for readings that are malformed; FileNotFoundError for a file of a
    measurement that is missing.
    """
    drawn = _drawn(artefact, measured, about)
    judgements = [drawn.judge(claim) for claim in artefact.spec.claims]
    drawn.write(out, judgements)
    files = {suffix: out / f"{artefact.stem}.{suffix}" for suffix in artefact.spec.suffixes}
    _tell(files[PROVENANCE.file], artefact, measured, about, drawn)
    if VERDICTS.file in files:
        write_claims(files[VERDICTS.file], artefact, judgements)
    return list(files.values())


def _tell(path: Path, artefact: Artefact, measured: Measurements, about: About, drawn: Drawn) -> Path:
    """Write the provenance of a drawing and its verdicts; returns the path.

    Its sources are the records of all measurements that the artefact asks for: those that it shows, gates,
    other recipes, and the scores by which the best of these is chosen.
    """
    sources = [*drawn.sources, *(found.source for read in artefact.reads() if (found := measured.get(read)))]
    return write_provenance(path, artefact, about.scale, drawn.cells, sources, drawn.files)


def verdicts(artefact: Artefact, measured: Measurements, about: About, out: Path) -> list[Path]:
    """Write the verdicts on an artefact's claims into the folder `out`, with their provenance, and nothing
    else of it; returns the files.

    Raises ValueError as `make` does, UserError for an artefact without claims.
    """
    if not artefact.spec.claims:
        raise UserError(f"{artefact.name} has no claims")
    drawn = _drawn(artefact, measured, about)
    judgements = [drawn.judge(claim) for claim in artefact.spec.claims]
    return [
        write_claims(out / f"{artefact.stem}{VERDICTS.ending}", artefact, judgements),
        _tell(out / f"{artefact.stem}{PROVENANCE.ending}", artefact, measured, about, drawn),
    ]


def _drawn(artefact: Artefact, measured: Measurements, about: About) -> Drawn:
    for (run, measure), found in measured.items():
        for what, expected in {"run": run, "measure": measure, "scale": about.scale}.items() if found else ():
            if (got := getattr(found, what)) != expected:
                raise ValueError(f"{found.source.file}: {what} is {got!r}, expected {expected!r}")
    return import_module(artefact.module).drawn(artefact, *by_best_recipe(artefact.spec, measured, about))
