"""Tables that a file beside their spec draws as a picture.

The file has `figure(spec, rows, about)`, which returns a matplotlib figure of the table's rows (`relinear.draw.cells.Row`).
"""

from pathlib import Path

from relinear.draw import About, Measurements
from relinear.draw.cells import look_in, rows_of, tokens_of
from relinear.draw.own import load
from relinear.draw.pictures import judge_claims, save, styled, write_verdicts
from relinear.draw.table import write_provenance_of
from relinear.plan.specs import Artefact


@styled
def draw(artefact: Artefact, measured: Measurements, about: About, out: Path) -> list[Path]:
    """Write <stem>.png, .pdf, .provenance.json and, of a picture with claims, .claims.csv into `out`; return their paths."""
    rows = rows_of(artefact.spec, measured, about)
    figure = load(artefact.file.with_suffix(".py"), "figure(spec, rows, about)").figure(artefact.spec, rows, about)
    written = write_provenance_of(artefact, artefact.spec, rows, about, out)
    verdicts = judge_claims(artefact, look_in(rows), about, tokens_of(rows))
    return [*save(artefact, figure, out), written, *write_verdicts(artefact, verdicts, out)]
