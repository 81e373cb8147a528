"""Rows with a column of text, or with an instruction and its output: JSON lines, a JSON list, parquet. Of a
folder, its files of these kinds."""

import json
from collections.abc import Iterable, Iterator
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from relinear.errors import UserError
from relinear.get.readers import instructions
from relinear.get.readers._document import Document, files

TEXT = "text"  # the column that is read where none is named
UTF8 = "utf-8-sig"  # with or without the mark that some programs begin a file with


def read(path: Path, column: str | None = None) -> Iterator[Document]:
    """One document a row; a row whose text is empty is left out.

    Raises UserError, naming file and row, for a row without the column, and for one whose text is no string.
    """
    for file in files(path, ".jsonl", ".json", ".parquet"):
        for number, row in enumerate(_rows(file)):
            if not isinstance(row, dict):
                raise UserError(
                    f"{file}, row {number}: got a {type(row).__name__}; expected names with values, such as"
                    f' {{"{TEXT}": ...}}'
                )
            document = _document(row, column, f"{file}, row {number}")
            if document.text:
                yield document


def _document(row: dict[str, Any], column: str | None, where: str) -> Document:
    wanted = column or TEXT
    if wanted not in row and not (column is None and {"instruction", "output"} <= row.keys()):
        possible = (
            f"a column {wanted!r}"
            if column
            else f"a column {TEXT!r}, or `instruction` and `output`, perhaps with `input`"
        )
        raise UserError(
            f"{where}: got the columns {', '.join(map(str, row)) or 'none'}; expected {possible}. Another one"
            " is named by `column` (--column of `relinear linearize`)"
        )
    used = (
        {wanted: row[wanted]}
        if wanted in row
        else {name: row.get(name) for name in ("instruction", "input", "output")}
    )
    for name, value in used.items():
        if not isinstance(value, str | None):
            raise UserError(f"{where}: the column {name!r} must hold text; got a {type(value).__name__}")
    told = {name: value or "" for name, value in used.items()}
    return Document(told[wanted]) if wanted in row else instructions.of(told)


def _rows(file: Path) -> Iterator[Any]:
    try:
        if file.suffix == ".parquet":
            from pyarrow.parquet import ParquetFile  # other sources need no pyarrow

            for batch in ParquetFile(file).iter_batches():
                yield from batch.to_pylist()
        elif file.suffix == ".json":
            found = json.loads(file.read_text(encoding=UTF8))
            if not isinstance(found, list):
                raise UserError(
                    f"{file} must hold a list of rows; got a {type(found).__name__}. Possible: one row a"
                    " line, in a file that ends in .jsonl"
                )
            yield from found
        else:
            with file.open(encoding=UTF8) as lines:
                yield from _parsed(file, lines)
    except (ValueError, OSError, RecursionError) as error:  # pyarrow's errors are of the first two kinds
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file} cannot be read: {error}") from None


def _parsed(file: Path, lines: Iterable[str]) -> Iterator[Any]:
    """The rows of JSON lines. Raises UserError, which names the line, counted from 1 as editors do."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except JSONDecodeError as error:
            raise UserError(
                f"{file} cannot be read: line {number}, column {error.colno}: {error.msg}"
            ) from None
        except RecursionError as error:
            raise UserError(f"{file} cannot be read: line {number}: {error}") from None
