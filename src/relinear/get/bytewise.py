"""Texts as bytes, each text of one of two classes (Long Range Arena's Text), cut to `longest`.

`imdb`, the paper's: reviews, for or against a film. `spam-assassin`: mails, wanted or not, without their
headers, which name whom they went through. The mails have no splits: a tenth, by the hash of its text alone,
is held out.
"""

import hashlib
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet

from relinear.errors import UserError
from relinear.get.arena import Example

VOCABULARY = 256
HELDOUT_OF_256 = 26  # a tenth


def tokens_of(text: bytes) -> np.ndarray:
    """Token 1 + byte for each byte."""
    return 1 + np.frombuffer(text, np.uint8).astype(np.int32)


def is_heldout(text: bytes) -> bool:
    """Whether a text of a source without splits is held out."""
    return hashlib.sha256(text).digest()[0] < HELDOUT_OF_256


def spam_assassin(folder: Path, split: str) -> Iterator[tuple[bytes, int]]:
    """The bodies of mails, and whether each is spam. Raises UserError for a folder without mails."""
    paths = sorted(
        path for kind in ("easy-ham", "hard-ham", "spam") for path in folder.rglob(f"{kind}-*/*.txt")
    )
    if not paths:
        raise UserError(f"{folder} must hold mails in folders easy-ham-*, hard-ham-* and spam-*; got none")
    for path in paths:
        body = path.read_bytes().replace(b"\r\n", b"\n").partition(b"\n\n")[2].strip()
        if body and is_heldout(body) == (split == "heldout"):
            yield body, int(path.parent.name.startswith("spam"))


def imdb(folder: Path, split: str) -> Iterator[tuple[bytes, int]]:
    """Reviews of a split, and whether each is positive. Raises UserError for a folder without them."""
    name = {"train": "train", "heldout": "test"}[split]
    paths = sorted(folder.rglob(f"{name}-*.parquet"))
    if not paths:
        raise UserError(
            f"{folder} must hold {name}-*.parquet; got"
            f" {', '.join(sorted(p.name for p in folder.rglob('*.parquet'))) or 'none'}"
        )
    for path in paths:
        table = pyarrow.parquet.read_table(path)
        yield from zip(
            (text.encode() for text in table["text"].to_pylist()), table["label"].to_pylist(), strict=True
        )


SOURCES = {"spam-assassin": spam_assassin, "imdb": imdb}


def examples(
    settings: Mapping[str, Any], folder: Path | None, split: str, rng: random.Random
) -> Iterator[Example]:
    """The texts of a split in a random order."""
    texts = list(SOURCES[settings["source"]](folder, split))
    rng.shuffle(texts)
    for text, label in texts:
        yield Example(tokens_of(text[: settings["longest"]]), label)
