"""Modes of files. A module of its own, since no result depends on a mode: what a result depends on is part of
its key."""

import os
from pathlib import Path


def as_umask(folder: Path) -> None:
    """Give each file of a folder the mode of a new file. safetensors makes files that their owner alone can
    read, whatever the umask."""
    probe = folder / f".mode.{os.getpid()}"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)
