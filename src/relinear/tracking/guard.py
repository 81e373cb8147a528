"""The walls of the mirror: a store that fails is told without its password and stops nothing; folders of others reach nothing but the store."""

import re
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from relinear.errors import UserError
from relinear.records import BrokenError

NAME = re.compile(r"[A-Za-z0-9][\w.@+-]*")  # of a scale, a run, a stage: no path, and no quote of a query
NAMES = ("scale", "run", "stage", "key", "attempt")


def masked(text: str) -> str:
    """A text without the passwords of addresses in it."""
    return re.sub(r"//[^/@\s]*@", "//***@", text)


@contextmanager
def warned(uri: str) -> Iterator[None]:
    """What a failing store raises in the block is a warning on stderr: tables do not need the store."""
    try:
        yield
    except Exception as error:
        print(
            f"WARNING: MLflow's store {masked(uri)} failed: {_reason(error)}\n"
            "WARNING: Work goes on without it; `relinear track rebuild` mirrors the results later.",
            file=sys.stderr, flush=True,
        )  # fmt: skip


@contextmanager
def told(uri: str) -> Iterator[None]:
    """What a failing store raises in the block is a UserError, for verbs that are of the store alone."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except UserError:
        raise
    except (MlflowException, SQLAlchemyError, sqlite3.Error, OSError, ValueError) as error:
        raise UserError(f"MLflow's store {masked(uri)} failed: {_reason(error)}") from None


def require_own(folder: Path, record: dict[str, Any]) -> None:
    """Raise BrokenError for a stage folder that leads out of itself: names that are paths, and links in the place of files."""
    for field in NAMES:
        if not NAME.fullmatch(str(record[field])):
            raise BrokenError(f"{folder / 'run.json'}: {field} must be of letters, digits and . _ @ + -; got {str(record[field])[:60]!r}")
    if links := sorted(path.name for path in folder.iterdir() if path.is_symlink()):
        raise BrokenError(f"{folder / links[0]} is a link, and a stage leaves files")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {masked(next(iter(str(error).splitlines()), ''))[:300]}"
