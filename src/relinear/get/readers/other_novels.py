"""Novels, a file each, whose lines are broken for print."""

import re
from collections.abc import Iterator
from pathlib import Path

from relinear.get.readers._document import Document, files


def read(path: Path) -> Iterator[Document]:
    """One document a novel: its paragraphs in one line each, apart by a blank line. A file that is no UTF-8
    is in Windows' code page 1252, as one with an apostrophe of it is."""
    for file in files(path, ".txt"):
        content = file.read_bytes()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            text = content.decode("cp1252")
        paragraphs = re.split(r"\n\s*\n", text.replace("\r\n", "\n"))
        yield Document("\n\n".join(filter(None, (" ".join(words.split()) for words in paragraphs))))
