"""What is told of a drawing beside its files: where its cells come from, and the verdicts on its claims.

In one's own results each lies beside the drawing, as `<stem>.provenance.json` and `<stem>.claims.csv`. In a
folder of committed results each is one file of all drawings, by `<paper>/<stem>`.
"""

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from relinear.draw.render import write_csv, write_text
from relinear.records import once, read_committed, read_json, require_committed
from relinear.schemas import BrokenError

Line = dict[str, str]
DRAWING = "drawing"  # the first column of the verdicts of all drawings
READ = (DRAWING, "claim", "verdict")  # columns without which nothing can be told of verdicts


class Beside(NamedTuple):
    """A file of all drawings in a folder of committed results.

    `read` and `read_all` give what the file beside one drawing holds, and by drawing what the one file holds.
    `write_all` writes the one file. What is committed is read as it was committed, else BrokenError is
    raised, and once in a process (`records.once`).
    """

    file: str
    read: Callable[[Path], Any]
    read_all: Callable[[Path], dict[str, Any]]
    write_all: Callable[[Path, Mapping[str, Any]], None]

    @property
    def ending(self) -> str:
        """The end of the name of the file beside a drawing, after its stem."""
        return f".{self.file}"

    def committed(self, folder: Path) -> dict[str, Any]:
        """What the one file of a folder holds, by `<paper>/<stem>`; empty without the file."""
        if not (file := folder / self.file).is_file():
            return {}
        require_committed(file)
        return once(self.read_all, file)

    def of(self, place: Path) -> Any:
        """What is told of the committed drawing `<folder>/<paper>/<stem>`; None where nothing is."""
        return self.committed(place.parents[1]).get(f"{place.parent.name}/{place.name}")

    def of_all(self, reference: Path) -> dict[Path, Any]:
        """What is told of every drawing of the folders in `reference`, by its place
        `<folder>/<paper>/<stem>`, as `of` gives it of one."""
        return {
            file.parent / drawing: told
            for file in sorted(reference.glob(f"*/{self.file}"))
            for drawing, told in self.committed(file.parent).items()
        }

    def of_drawings(self, folder: Path, files: Iterable[Path]) -> dict[str, Any]:
        """As `committed`, of those among these files in the folder that lie beside a drawing."""
        return {
            path.relative_to(folder).as_posix().removesuffix(self.ending): self.read(path)
            for path in files
            if path.name.endswith(self.ending)
        }

    def write(self, folder: Path, told: Mapping[str, Any]) -> list[Path]:
        """Write the one file of a folder, or remove it where nothing is told; returns it."""
        if not told:
            (folder / self.file).unlink(missing_ok=True)
            return []
        self.write_all(folder / self.file, dict(sorted(told.items())))
        return [folder / self.file]


def _write_json(path: Path, told: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(told, indent=1) + "\n")


def lines_of(file: Path) -> list[Line]:
    """The rows of a CSV file as texts. Raises BrokenError for a committed file that is not as it was
    committed."""
    return _parsed(read_committed(file))


def _lines(file: Path) -> list[Line]:
    return _parsed(file.read_text(encoding="utf-8"))


def _parsed(text: str) -> list[Line]:
    return list(csv.DictReader(io.StringIO(text, newline=""), restval=""))  # a cell may have line breaks


def _by_drawing(file: Path) -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {}
    lines = _lines(file)
    if lines and (lacking := [column for column in READ if column not in lines[0]]):
        have = ", ".join(map(str, lines[0]))
        raise BrokenError(f"{file} lacks the column {' and '.join(lacking)}; have {have}")
    for line in lines:
        found.setdefault(line.pop(DRAWING), []).append(line)
    return found


def _write_lines(path: Path, told: Mapping[str, list[Line]]) -> None:
    lines = [{DRAWING: drawing} | line for drawing, own in told.items() for line in own]
    write_csv(path, list(dict.fromkeys(column for line in lines for column in line)), lines)


PROVENANCE = Beside("provenance.json", read_json, read_json, _write_json)
VERDICTS = Beside("claims.csv", _lines, _by_drawing, _write_lines)
TOLD = (PROVENANCE, VERDICTS)
