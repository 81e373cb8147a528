"""Pictures with a class each -> pixels of one size, a byte each, in the form of labelled texts.

A source is read one picture at a time, and written to where it belongs in a file that is as long as it will
be, so that pictures may be more than memory holds. ImageNet-1k at 224 x 224 x 3 takes 193 GB.
"""

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet
from numpy.lib.format import open_memmap
from PIL import Image

from relinear.errors import UserError
from relinear.files import sha256
from relinear.get.pixels import fashion_mnist
from relinear.plan.job import Job

ORDER = 20240206  # seed of the order of a split's pictures, the same for all seeds of a training
Pictures = tuple[int, Iterator[tuple[Image.Image, int]]]  # how many, and each with its class


def digits(folder: None, split: str) -> Pictures:
    """Scikit-learn's gray digits of 8 x 8 pixels, whose 17 values are spread over a byte's; each fifth is
    held out."""
    from sklearn.datasets import load_digits  # only here: it takes a second to import

    found = load_digits()
    held_out = np.arange(len(found.target)) % 5 == 0
    chosen = held_out if split == "heldout" else ~held_out
    return _of_arrays(np.rint(found.images[chosen] * (255 / 16)).astype(np.uint8), found.target[chosen])


def _of_arrays(images: np.ndarray, labels: np.ndarray) -> Pictures:
    return len(labels), (
        (Image.fromarray(image), int(label)) for image, label in zip(images, labels, strict=True)
    )


def imagenet(folder: Path, split: str) -> Pictures:
    """The pictures of the hub's tables of ImageNet-1k; its validation split is held out. Raises UserError
    where there are none."""
    name = {"train": "train", "heldout": "validation"}[split]
    paths = sorted(folder.rglob(f"{name}-*.parquet"))
    if not paths:
        raise UserError(
            f"{folder} must hold {name}-*.parquet; got"
            f" {', '.join(sorted(p.name for p in folder.rglob('*.parquet'))) or 'none'}"
        )

    def each() -> Iterator[tuple[Image.Image, int]]:
        for path in paths:
            for batch in pyarrow.parquet.ParquetFile(path).iter_batches(64, columns=["image", "label"]):
                for row in batch.to_pylist():
                    yield Image.open(io.BytesIO(row["image"]["bytes"])), row["label"]

    return sum(pyarrow.parquet.ParquetFile(path).metadata.num_rows for path in paths), each()


SOURCES = {
    "digits": digits,
    "fashion-mnist": lambda folder, split: _of_arrays(*fashion_mnist(folder, split)),
    "imagenet-1k": imagenet,
}


def pixels(picture: Image.Image, side: int, channels: int) -> np.ndarray:
    """The bytes ``[side, side, channels]`` of a picture brought to a square: stretched by linear
    interpolation, as the hub's ViT reads it."""
    converted = picture.convert({1: "L", 3: "RGB"}[channels])
    return np.asarray(converted.resize((side, side), Image.Resampling.BILINEAR)).reshape(side, side, channels)


def work(job: Job) -> dict:
    """Write `{train,heldout}_{tokens,types,ends,labels}.npy`: pixels, zeros, where each picture ends, and its
    class.

    The pictures of a split are drawn in one order that is the same for every seed; the last `validation` ones
    to train on are kept aside. Raises UserError for fewer pictures than asked for, and for a label that is no
    class.
    """
    settings = job.settings
    folder, size = job.assets.get(settings["source"]), settings["side"] ** 2 * settings["channels"]
    facts: dict = {"files": {}, **{name: settings[name] for name in ("classes", "scores", "validation")}}
    content, seen = hashlib.sha256(), 0
    for split in ("heldout", "train"):
        there, found = SOURCES[settings["source"]](folder, split)
        kept = settings["validation"] if split == "train" else 0
        asked = settings["train" if split == "train" else "test"]
        wanted = max(there, kept + 1) if asked is None else asked + kept
        if there < wanted:
            raise UserError(
                f"{job.name}: {wanted} pictures of {split} asked for, {there} got; lower their number in"
                " data.yaml"
            )
        tokens, _ = (
            open_memmap(job.out / f"{split}_{kind}.npy", "w+", np.uint8, (wanted * size,))
            for kind in ("tokens", "types")
        )
        labels, places = np.zeros(wanted, np.int64), np.random.default_rng(ORDER).permutation(there)
        for place, (picture, label) in zip(places, found, strict=True):
            if place >= wanted:
                continue
            if not 0 <= label < settings["classes"]:
                raise UserError(
                    f"{settings['source']}, {split}: a picture of class {label}; possible: 0 to"
                    f" {settings['classes'] - 1}"
                )
            flat = pixels(picture, settings["side"], settings["channels"]).ravel()
            tokens[place * size : (place + 1) * size], labels[place] = flat, label
            content.update(flat.tobytes() + bytes(str(label), "ascii"))
        tokens.flush()
        np.save(job.out / f"{split}_ends.npy", size * np.arange(1, wanted + 1, dtype=np.int64))
        np.save(job.out / f"{split}_labels.npy", labels)
        facts["files"] |= {path.name: sha256(path) for path in sorted(job.out.glob(f"{split}_*.npy"))}
        facts[split], seen = {"texts": wanted, "tokens": wanted * size}, seen + wanted
    facts["sources"] = {settings["source"]: {"documents": seen, "sha256": content.hexdigest()}}
    job.tokens = facts["train"]["tokens"] + facts["heldout"]["tokens"]
    return facts
