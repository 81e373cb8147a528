"""The folder that something for others is written into."""

from pathlib import Path

from relinear.errors import UserError


def require_free(out: Path) -> None:
    """Raises UserError unless `out` is an empty folder or not there at all."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty; give another folder")
