"""Images as sequences of gray values, row by row (Long Range Arena's Image): the class of an image is to be
told from its pixels in a line.

`cifar10`, the paper's, is turned gray (32 x 32); `fashion-mnist` is gray (28 x 28). With `side` squares of
pixels are averaged to so many a row.
"""

import gzip
import io
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet

from relinear.errors import UserError
from relinear.get.arena import Example

VOCABULARY = 256


def fashion_mnist(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images ``[n, 28, 28]`` (uint8) and classes of a split, out of its IDX files (LeCun)."""
    name = {"train": "train", "heldout": "t10k"}[split]
    images, labels = (
        _idx(folder, f"{name}-{kind}-ubyte.gz", header)
        for kind, header in (("images-idx3", 16), ("labels-idx1", 8))
    )
    return images.reshape(len(labels), 28, 28), labels


def _idx(folder: Path, name: str, header: int) -> np.ndarray:
    """The bytes of an IDX file after its header."""
    paths = sorted(folder.rglob(name))
    if len(paths) != 1:
        raise UserError(f"{folder} must hold one {name}; got {len(paths)}")
    return np.frombuffer(gzip.decompress(paths[0].read_bytes()), np.uint8, offset=header)


def cifar10(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Gray images ``[n, 32, 32]`` (uint8) and classes of a split, out of the hub's tables of PNG files."""
    from PIL import Image  # only here, and no dependency of what reads Fashion-MNIST

    name = {"train": "train", "heldout": "test"}[split]
    paths = sorted(folder.rglob(f"{name}-*.parquet"))
    if not paths:
        raise UserError(
            f"{folder} must hold {name}-*.parquet; got"
            f" {', '.join(sorted(p.name for p in folder.rglob('*.parquet'))) or 'none'}"
        )
    tables = [pyarrow.parquet.read_table(path).to_pydict() for path in paths]
    images = [
        np.asarray(Image.open(io.BytesIO(image["bytes"])).convert("L"))
        for table in tables
        for image in table["img"]
    ]
    return np.stack(images), np.array([label for table in tables for label in table["label"]])


SOURCES = {"fashion-mnist": fashion_mnist, "cifar10": cifar10}


def examples(
    settings: Mapping[str, Any], folder: Path | None, split: str, rng: random.Random
) -> Iterator[Example]:
    """The images of a split in a random order. Raises UserError where `side` does not divide theirs."""
    images, labels = SOURCES[settings["source"]](folder, split)
    side = settings["side"] or images.shape[1]
    if images.shape[1] % side:
        possible = ", ".join(str(n) for n in range(1, images.shape[1] + 1) if images.shape[1] % n == 0)
        raise UserError(
            f"images of {settings['source']} have {images.shape[1]} pixels a row: side {side} does not divide"
            f" them; possible: {possible}"
        )
    for i in rng.sample(range(len(labels)), len(labels)):
        squares = images[i].reshape(side, images.shape[1] // side, side, -1).mean((1, 3))
        yield Example(1 + np.rint(squares).astype(np.int32).ravel(), int(labels[i]))
