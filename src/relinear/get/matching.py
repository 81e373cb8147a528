"""Pairs of texts as bytes (Long Range Arena's Retrieval): do the two belong together? Each text is at most
half of `longest` bytes.

`aan`, the paper's: two papers of the ACL Anthology Network, one of which cites the other or does not.
`linux-doc`: two windows of the Linux kernel's documentation, apart in one document, or of two documents of
one directory. A tenth of these documents, by the hash of its text alone, is held out, so that no document is
in both splits.
"""

import gzip
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from relinear.errors import UserError
from relinear.get.arena import Example
from relinear.get.bytewise import is_heldout, tokens_of

VOCABULARY = 256


def linux_doc(folder: Path, split: str, size: int, rng: random.Random) -> Iterator[Example]:
    """Random pairs of windows without end; each class with the same probability. Raises UserError for a
    folder without documents for them."""
    directories = defaultdict(list)
    for path in sorted(folder.rglob("*.rst.gz")):
        document = gzip.decompress(path.read_bytes())
        if len(document) >= 2 * size and is_heldout(document) == (split == "heldout"):
            directories[path.parent].append(document)
    places = [
        (documents, i)
        for documents in directories.values()
        if len(documents) > 1
        for i in range(len(documents))
    ]
    if not places:
        raise UserError(
            f"no directory of {folder} holds two documents of {2 * size} bytes that are {split}; lower"
            " `longest`"
        )
    while True:
        documents, i = rng.choice(places)
        label = rng.randrange(2)
        if label:
            # the one window ends before it, the other begins after
            cut = rng.randint(size, len(documents[i]) - size)
            first, second = _window(documents[i][:cut], size, rng), _window(documents[i][cut:], size, rng)
        else:
            other = rng.choice([j for j in range(len(documents)) if j != i])
            first, second = (_window(documents[j], size, rng) for j in (i, other))
        if rng.randrange(2):
            first, second = second, first
        yield Example(tokens_of(first), label, tokens_of(second))


def _window(document: bytes, size: int, rng: random.Random) -> bytes:
    start = rng.randint(0, len(document) - size)
    return document[start : start + size]


def aan(folder: Path, split: str, size: int, rng: random.Random) -> Iterator[Example]:
    """The pairs of a split in a random order, out of Arrow tables of numbered characters. Raises UserError
    for other tables."""
    name, wanted = {"train": "train", "heldout": "test"}[split], ("label", "input_ids1", "input_ids2")
    paths = sorted(path for path in folder.rglob("*.arrow") if path.parent.name == name)
    if not paths:
        raise UserError(f"{folder} must hold {name}/*.arrow; got none")
    for path in rng.sample(paths, len(paths)):
        table = pyarrow.ipc.open_stream(path).read_all()
        if missing := [column for column in wanted if column not in table.column_names]:
            raise UserError(
                f"{path}: got the columns {', '.join(table.column_names)}; needs {', '.join(missing)}"
            )
        for i in rng.sample(range(len(table)), len(table)):
            label, first, second = (table[column][i].as_py() for column in wanted)
            yield Example(np.array(first[:size], np.int32), int(label), np.array(second[:size], np.int32))


SOURCES = {"linux-doc": linux_doc, "aan": aan}


def examples(
    settings: Mapping[str, Any], folder: Path | None, split: str, rng: random.Random
) -> Iterator[Example]:
    """Pairs of texts of a split."""
    return SOURCES[settings["source"]](folder, split, settings["longest"] // 2, rng)
