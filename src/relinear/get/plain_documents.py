"""The documents of a corpus, as the stages `corpus` and `stream` leave and read them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

TEXT, ABOUT = "text.bin", "documents.jsonl"


class Plain(NamedTuple):
    """A document: the package that it is of, its sha256, and its text."""

    source: str
    digest: bytes
    text: str


def read(folder: Path) -> Iterator[Plain]:
    """The documents of a corpus, in the order of its sources and of their files."""
    whole, begin = np.memmap(folder / TEXT, np.uint8, "r"), 0
    with (folder / ABOUT).open(encoding="utf-8") as lines:
        for about in map(json.loads, lines):
            yield Plain(
                about["source"], bytes.fromhex(about["sha256"]), bytes(whole[begin : about["end"]]).decode()
            )
            begin = about["end"]
