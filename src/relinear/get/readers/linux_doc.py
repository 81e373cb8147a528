"""The kernel's documentation, but for its translations."""

import gzip
from collections.abc import Iterator
from pathlib import Path

from relinear.get.readers._document import Document


def read(path: Path) -> Iterator[Document]:
    """One document a file."""
    for file in sorted(path.rglob("*.rst.gz")):
        if "translations" not in file.parts:
            with gzip.open(file, "rt", encoding="utf-8") as text:
                yield Document(text.read())
