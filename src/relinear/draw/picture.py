"""Tables that a file beside their spec draws as a picture.

The file has `figure(spec, rows, about)`, which returns a matplotlib figure of the table's rows (`relinear.draw.cells.Row`).
"""

from pathlib import Path

from relinear.draw import About, Measurements
from relinear.draw.cells import look_in, rows_of, tokens_of
from relinear.draw.own import load
from relinear.draw.pictures import judge_claims, save
from relinear.draw.table import write_provenance_of
from relinear.plan.specs import Artefact


def draw(artefact: Artefact, measured: Measurements, about: About, out: Path) -> list[Path]:
    """Write <stem>.png, .pdf, .provenance.json and, of a picture with claims, .claims.csv into `out`; return their paths."""
    rows = rows_of(artefact.spec, measured, about)
    pictures = save(artefact, load(artefact.file.with_suffix(".py"), "figure(spec, rows, about)").figure(artefact.spec, rows, about), out)
    written = write_provenance_of(artefact, artefact.spec, rows, about, out)
    return [*pictures, written, *judge_claims(artefact, look_in(rows), about, out, tokens_of(rows))]
