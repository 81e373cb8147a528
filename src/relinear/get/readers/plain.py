"""Plain text: a file, or a folder of `*.txt` and `*.md`, cut at blank lines into documents of some length."""

import re
from collections.abc import Iterator
from pathlib import Path

from relinear.errors import UserError
from relinear.get.readers._document import Document, files

# characters that a document has at least, but for a file's last: one file is not one document, so that some
# of it is held out
LENGTH = 2000


def read(path: Path) -> Iterator[Document]:
    """The paragraphs of a file, joined until a document is long enough."""
    for file in files(path, ".txt", ".md"):
        try:
            content = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is no UTF-8 text: {error.reason} at byte {error.start}") from None
        document = ""
        for paragraph in re.split(r"\n\s*\n", content):
            document = f"{document}\n\n{paragraph}" if document else paragraph
            if len(document) >= LENGTH:
                yield Document(document)
                document = ""
        if document.strip():
            yield Document(document)
