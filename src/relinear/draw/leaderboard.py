"""The leaderboard: the rows of every committed `comparison/leaderboard.csv`, those with fewer bytes first.

docs/leaderboard.md shows `page` (relinear.draw.quote writes it), and says what a row is and how another lab
enters one.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from relinear.core import store
from relinear.draw import quote
from relinear.draw.beside import PROVENANCE
from relinear.draw.render import titled
from relinear.draw.report import records_of
from relinear.errors import UserError

PLACE = "comparison/leaderboard"


class Measure(NamedTuple):
    """A column that rows are compared by: its name in the table, its format, and which end is better."""

    column: str
    format: str
    less: bool = False


MEASURES = {
    "Novels over teacher's": Measure("ratio_beyond", "±.3f", less=True),
    "16 pairs": Measure("pairs_256", "±.1f"),
    "Answers, F1": Measure("f1_beyond", "±.1f"),
    "Average of five": Measure("avg_no_mmlu", "±.1f"),
}

Row = Mapping[str, quote.Number | str]


def page(scale: str) -> str:
    """The rows of a scale as a Markdown table. A number in bold is better than that of every other row
    with no more bytes. A run that several folders have, as all have the teacher, is shown of the first.

    Raises UserError for a row without a number in a column that rows are compared by.
    """
    found: dict[str, tuple[str, Row]] = {}
    for file in sorted(quote.REFERENCE.glob(f"*/{PLACE}.csv")):
        folder = file.parents[1].name
        for row in quote.listed(f"{folder}/{PLACE}"):
            if row["scale"] == scale:
                _require_numbers(row, f"{folder}/{PLACE}.csv")
                found.setdefault(row["run"], (folder, row))
    entries = sorted(found.values(), key=lambda entry: entry[1]["state_mib"])
    lines = []
    for folder, row in entries:
        rivals = [other for _, other in entries if other["state_mib"] <= row["state_mib"]]
        tokens = (row["distill_tokens"] + row["finetune_tokens"]) / 1e6
        lines.append(
            {
                "Run": quote.SHOWN_AS.get(row["run"], row["run"]),
                "State, MiB": f"{row['state_mib']:.2f}",
                "Keys": f"{row['positions']:.0f}",
                "Tokens": f"{tokens:.0f}M",
                "Trainings": f"{row['seeds']:.0f}",
                **{title: _shown(row, measure, rivals) for title, measure in MEASURES.items()},
                "In": f"`{folder}`",
                "Commits": ", ".join(_commits(folder, row["run"])),
            }
        )
    return titled(lines)


def _require_numbers(row: Row, where: str) -> None:
    for column in ("state_mib", "positions", *(measure.column for measure in MEASURES.values())):
        if not isinstance(row[column], quote.Number):
            raise UserError(
                f"{where}: {column} of {row['run']} is {row[column]!r}; a row of the leaderboard has a number"
            )


def _shown(row: Row, measure: Measure, rivals: list[Row]) -> str:
    """A number with its error, in bold where no rival but the row itself is as good, and it is not zero."""
    value, others = row[measure.column], [rival[measure.column] for rival in rivals if rival is not row]
    best = all(value < other if measure.less else value > other for other in others)
    text = format(value, measure.format)
    return f"**{text}**" if best and value else text


def _commits(folder: str, run: str) -> list[str]:
    """The commits that a row's measurements were made at, in the order of its columns. A plus follows one
    whose tree had uncommitted changes."""
    scale = quote.REFERENCE / folder
    cells = PROVENANCE.of(scale / PLACE)["cells"][run].values()
    paths = dict.fromkeys(path for origin in cells for path in records_of(origin, scale))
    made: list[dict[str, Any]] = [json.loads(store.read(path))["git"] for path in paths]
    return list(dict.fromkeys(f"`{git['commit'][:7]}`" + "+" * git["dirty"] for git in made))
