"""A measuring campaign: its rows, each on the disk before the next is measured, and the provenance that says
how they were measured."""

import csv
import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from relinear.draw.render import write_csv, write_text
from relinear.errors import UserError
from relinear.stage import git_state, versions

METHODS: dict[str, tuple[str, dict[str, Any]]] = {  # row: method, options
    "T2R": ("t2r", {}),
    "Hedgehog": ("hedgehog", {}),
    "SUPRA": ("supra", {}),
    "LoLCATs, linear": ("lolcats", {}),
    "LoLCATs, window": ("lolcats", {"window": 64}),
    "Lizard": ("lizard", {}),
}


def session(command: str) -> dict[str, Any]:
    """The provenance of one call: its command, the commit, whether the tree differs from it, the start, the
    versions of the libraries."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"command": command, **git_state(), "started": now, "versions": versions()}


class Campaign:
    """The rows at `path` and their provenance. A later call finds the rows of earlier ones in `rows`, and
    measures those that are missing.

    A .csv has the given columns, and its provenance in `<stem>.provenance.json`. A .json has no columns: it
    is the provenance, the rows inside, so that a row may hold lists. `anew` begins without what earlier calls
    left. Raises UserError where the file is not the campaign's.
    """

    def __init__(self, path: Path, columns: Sequence[str] = (), *, anew: bool = False):
        self.path, self.columns = path, tuple(columns)
        self.beside = path.with_suffix(".provenance.json") if self.columns else path
        self.about: dict[str, Any] = {} if anew else _record(self.beside)
        self.rows: list[dict[str, Any]] = (
            self._whole() if self.columns and not anew else self.about.pop("rows", [])
        )

    def describe(self, **about: Any) -> None:
        """Add to the provenance, and write it."""
        self.about |= about
        self._save()

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row, and write it."""
        self.rows.append(dict(row))
        self._save() if not self.columns else self.replace(self.rows)

    def replace(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write these rows instead of all rows so far."""
        self.rows = [dict.fromkeys(self.columns) | row for row in rows]
        write_csv(self.path, self.columns, self.rows)

    def _save(self) -> None:
        """Write the provenance. A .json has the rows too, one on a line."""
        if self.columns:
            write_text(self.beside, json.dumps(self.about, indent=1) + "\n")
        else:
            record = {**self.about, "rows": self.rows}
            write_text(
                self.path,
                "{\n" + ",\n".join(f" {json.dumps(k)}: {_text(v)}" for k, v in record.items()) + "\n}\n",
            )

    def _whole(self) -> list[dict[str, str]]:
        """The complete rows of the .csv. A last line that was cut short is left out."""
        lines = self.path.read_text().splitlines(keepends=True) if self.path.is_file() else []
        reader = csv.DictReader(line for line in lines if line.endswith("\n"))
        rows = list(reader)
        if tuple(reader.fieldnames or self.columns) != self.columns:
            raise UserError(
                f"{self.path} has other columns: got {reader.fieldnames}, expected {list(self.columns)};"
                " possible: another --out"
            )
        return rows


def _record(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none. Raises UserError where it is no object."""
    try:
        record = json.loads(path.read_text()) if path.is_file() else {}
        return record | {}
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is no JSON object: {error}; possible: another --out") from None


def _text(value: Any) -> str:
    """JSON text on one line. A list of rows has a line for each row."""
    if isinstance(value, list) and all(isinstance(row, dict) for row in value):
        return "[" + ",".join(f"\n  {json.dumps(row)}" for row in value) + "]"
    return json.dumps(value)
