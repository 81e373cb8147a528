"""The Brown corpus without its tags."""

import re
from collections.abc import Iterator
from pathlib import Path

from relinear.get.readers._document import Document


def read(path: Path) -> Iterator[Document]:
    """`The/at jury/nn said/vbd ./.` -> `The jury said.`"""
    for file in sorted(path.rglob("c[a-r][0-9][0-9]")):
        words = re.sub(r"(\S+)/\S+", r"\1", file.read_text(encoding="utf-8"))
        quoted = words.replace("`` ", '"').replace(" ''", '"')
        spaced = re.sub(r" ([.,;:?!])", r"\1", re.sub(r" +", " ", quoted))
        yield Document(re.sub(r"\s*\n\s*", "\n\n", spaced).strip())
