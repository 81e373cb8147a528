"""A text to learn, and the files of a source."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Document(NamedTuple):
    """A text to learn, after a prompt that is read but not learned (empty for plain text)."""

    text: str
    prompt: str = ""


def files(path: Path, *endings: str) -> Iterator[Path]:
    """The file itself, or a folder's files of these endings, in the order of their names; hidden ones are
    left out."""
    if path.is_file():
        yield path
        return
    for file in sorted(path.rglob("*")):
        if file.suffix in endings and not any(part.startswith(".") for part in file.relative_to(path).parts):
            yield file
