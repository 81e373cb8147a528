"""Files that are on the disk, and not in memory alone."""

import os
from pathlib import Path


def sync(folder: Path, deep: bool = True) -> None:
    """Write a folder, and with `deep` all files in it, from memory to the disk, so that a machine that goes down leaves them whole."""
    for path in [*(p for p in folder.rglob("*") if deep), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
