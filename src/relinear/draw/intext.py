"""What a paper says in its text alone, recomputed from the numbers that it prints, and beside ours."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from relinear.draw import About, Measurements
from relinear.draw.render import NOT_RUN, markdown, write_csv, write_text
from relinear.plan.figures import Own
from relinear.plan.published import published

COLUMNS = ("says", "paper", "recomputed", "holds", "ours")
HEADS = ("The paper says", "Its number", "From its own tables", "Holds", "Ours")


class Said(NamedTuple):
    """A sentence, the number in it, the same from the paper's tables, whether they agree, and ours."""

    says: str
    paper: str
    recomputed: str
    holds: bool | None = None
    ours: str = ""


def write(spec: Own, about: About, out: Path, rows: Sequence[Said], legend: str = "") -> list[Path]:
    """Write intext.csv and intext.md; returns them."""
    lines = [
        (row.says, row.paper, row.recomputed, {True: "yes", False: "no", None: ""}[row.holds], row.ours)
        for row in rows
    ]
    files = [out / f"intext.{suffix}" for suffix in spec.makes]
    write_csv(files[0], COLUMNS, [dict(zip(COLUMNS, line, strict=True)) for line in lines])
    parts = [
        f"**{spec.label}.** {about.where('`')}.",
        about.demonstration or "",
        markdown(HEADS, lines, align="left"),
        legend,
        "\n".join(f"- {note.where}: {note.text}." for note in spec.misprints),
    ]
    write_text(files[1], "\n\n".join(filter(None, parts)) + "\n")
    return files


def printed(script: str, table: str, column: str, model: str = "") -> dict[str, float]:
    """Row -> what the paper of a script's folder prints in a column of a table, for the first model, or for
    the first whose name begins so."""
    found = {
        row: next((each.values[column] for each in entries if each.model.startswith(model)), None)
        for row, entries in published(Path(script).parent, table).items()
        if any(column in each.values for each in entries)
    }
    return {row: value for row, value in found.items() if value is not None}


def values(
    measured: Measurements, runs: Mapping[str, str], metric: str, of: str | None = None
) -> list[float]:
    """A metric of each run's measure, in their order; none at all where one was not run."""
    found = [measured[run, measure] for run, measure in runs.items()]
    readings = [m.find(metric, of) for m in found if m is not None]
    got = [reading.value for reading in readings if reading is not None and reading.value is not None]
    return got if len(got) == len(runs) else []


def ours(got: Sequence[float], text) -> str:
    """What a function says of ours; `not run` without numbers."""
    return text(*got) if got else NOT_RUN
