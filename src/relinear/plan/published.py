"""Published numbers: `workflow/papers/<paper>/published.csv`, one number a line.

A line says which cell of ours the number stands beside (`table`, a spec's file name without its ending, `row`
and `column`), the number, the `model` that it was measured on, the `label` of the table that prints it, and
its `origin`: `measured` by the authors of that table, `copied from ...`, or `computed` by us from other cells
of that table's row.
"""

import csv
import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from relinear.plan.strict import ConfigError

FILE = "published.csv"
COLUMNS = ("table", "row", "column", "value", "model", "label", "origin", "note")
MEASURED, COMPUTED = "measured", "computed"
ORIGIN = re.compile(rf"{MEASURED}|{COMPUTED}|copied from \S.*")


class Entry(NamedTuple):
    """What one table of a paper prints in one row for one model: column -> number. `computed`: the columns
    that it does not print."""

    model: str
    label: str
    origin: str
    values: dict[str, float]
    computed: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """The table and the origin, for reading: `Lizard Table 1 (measured)`."""
        computed = f"; {' and '.join(self.computed)} computed from its cells" if self.computed else ""
        return f"{self.label} ({self.origin}{computed})"


def published(folder: Path, table: str) -> dict[str, tuple[Entry, ...]]:
    """Row of a table -> its entries, in the order of the paper's file; empty without a file.

    Raises ConfigError, with file and line, for a file with other columns, a value that is no number, an
    unknown origin, and a number that stands there twice.
    """
    path = folder / FILE
    return _read(path, path.stat().st_mtime_ns).get(table, {}) if path.is_file() else {}


def relabelled(found: Mapping[str, tuple[Entry, ...]], old: str, new: str) -> dict[str, tuple[Entry, ...]]:
    """The entries of a table that a paper prints again under another label."""
    again = lambda entry: entry._replace(label=new) if entry.label == old else entry  # noqa: E731
    return {row: tuple(map(again, entries)) for row, entries in found.items()}


def tables(folder: Path) -> list[str]:
    """The tables that a paper's file has numbers for."""
    path = folder / FILE
    return list(_read(path, path.stat().st_mtime_ns)) if path.is_file() else []


@functools.lru_cache(maxsize=64)
def _read(path: Path, _: int) -> dict[str, dict[str, tuple[Entry, ...]]]:
    """Table -> row -> entries. `_`: the time of the file's last change, so that an edited file is read
    again."""
    where = f"{path.parent.name}/{path.name}"
    reader = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise ConfigError(
            f"{where} must have the columns {', '.join(COLUMNS)}; got {', '.join(reader.fieldnames or ())}"
        )
    found: dict[str, dict[str, dict[tuple[str, str], Entry]]] = {}
    for number, line in enumerate(reader, start=2):
        _check(line, f"{where}, line {number}")
        entries = found.setdefault(line["table"], {}).setdefault(line["row"], {})
        place = (line["model"], line["label"])
        entry = entries.get(place, Entry(*place, COMPUTED, {}))
        column = line["column"]
        origin = line["origin"]
        if column in entry.values:
            raise ConfigError(
                f"{where}, line {number}: column {column!r} of row {line['row']!r} stands there twice"
            )
        entries[place] = entry._replace(
            origin=origin if entry.origin == COMPUTED else entry.origin,
            values=entry.values | {column: float(line["value"])},
            computed=(*entry.computed, *[column] * (origin == COMPUTED)),
        )
    return {
        table: {row: tuple(entries.values()) for row, entries in rows.items()}
        for table, rows in found.items()
    }


def _check(line: dict[str, str], where: str) -> None:
    """Raise ConfigError for a line that is no number of a table."""
    if None in line.values() or None in line:
        raise ConfigError(f"{where} must have {len(COLUMNS)} cells")
    try:
        value = float(line["value"])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{where}: value must be a number; got {line['value']!r}")
    if not ORIGIN.fullmatch(line["origin"]):
        raise ConfigError(
            f"{where}: origin must be measured, computed or copied from ...; got {line['origin']!r}"
        )
    if empty := [name for name in COLUMNS[:-1] if not line[name]]:
        raise ConfigError(f"{where}: {', '.join(empty)} must not be empty")
