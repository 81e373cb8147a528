"""Files and folders that are there whole or not at all, and the hash of a file."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# in a folder of committed results (`relinear.tracking.committed`), which are another clone's
MANIFEST = "reference.json"


def sha256(path: Path) -> str:
    """The file's sha256, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def aside(path: Path) -> Iterator[Path]:
    """A path to write to. The file takes the path's place when the block ends, so that a reader sees the old
    file or the new one, never half of it."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    yield unfinished
    with unfinished.open("rb") as file:
        # otherwise a machine that goes down after the rename leaves a file of length 0
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def write_json(path: Path, value: Any) -> None:
    """The value as a file, whole or not at all."""
    with aside(path) as unfinished:
        unfinished.write_text(json.dumps(value, indent=1))


@contextmanager
def folder_aside(path: Path) -> Iterator[Path]:
    """As `aside`, for a folder that the block makes and fills. If the block fails, its files are removed and
    the old folder stays."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield scratch
        if path.exists():
            shutil.rmtree(path)
        os.replace(scratch, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
