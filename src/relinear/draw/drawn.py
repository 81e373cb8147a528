"""Tables that were drawn or measured, read again from their Markdown and CSV files."""

import csv
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from relinear.draw.claims import COLUMNS
from relinear.records import read_committed

Table = list[dict[str, str]]


def drawn(path: Path) -> list[Table]:
    """The tables of a Markdown file, each as its rows by column."""
    tables: list[Table] = []
    for lines in re.findall(r"(?:^\|.*\n)+", read_committed(path), re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.strip("|\n").split("|")] for line in lines.splitlines())
        tables.append([dict(zip(head, row, strict=True)) for row in rows])
    return tables


def rows_of(path: Path) -> Table:
    """The rows of a CSV file."""
    return list(csv.DictReader(read_committed(path).splitlines()))


def results_of(paths: Iterable[Path]) -> dict[tuple[str, ...], list[Path]]:
    """Each result that claims files have, once: the claim with its paper, source, verdict, figures and reason -> the files that have it, in order."""
    found: dict[tuple[str, ...], list[Path]] = {}
    for path in paths:
        for row in rows_of(path):
            found.setdefault(tuple(row[column] for column in COLUMNS), []).append(path)
    return found


MEASURED = re.compile(r"(?:difference|ratio) \S+(?: ± \S+)?")


def measured_in(row: Mapping[str, str]) -> str:
    """The difference or ratio that a row of a claims file has, or the number that was held to a bound; empty where it has none."""
    found = MEASURED.search(row["figures"])
    return found[0] if found else row["figures"].partition("; published")[0] if row["error"] else ""
