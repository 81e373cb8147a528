"""Tables that a file beside their spec draws as a picture.

The file has `figure(spec, rows, about)`, which returns a matplotlib figure of the table's rows
(`relinear.draw.cells.Row`).
"""

from relinear.draw import About, Measurements, table
from relinear.draw.cells import rows_of
from relinear.draw.drawing import Drawn
from relinear.draw.own import load
from relinear.draw.pictures import saving
from relinear.plan.specs import Artefact


def drawn(artefact: Artefact, measured: Measurements, about: About) -> Drawn:
    """A picture of a table's rows. Raises ValueError where the file has no `figure`."""
    figure = load(artefact.file.with_suffix(".py"), "figure(spec, rows, about)").figure
    write = saving(artefact, lambda: figure(artefact.spec, rows_of(artefact.spec, measured, about), about))
    return table.drawn(artefact, measured, about)._replace(write=write)
