"""Tasks in the form of Long Range Arena's (Tay et al. 2021): long sequences of few kinds of tokens, each of one class.

A task is a file here: `CLASSES` and `VOCABULARY`, the numbers of classes and tokens, and `examples`. Token 0 is padding.
"""

import hashlib
import importlib
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from relinear.errors import UserError
from relinear.files import sha256
from relinear.plan.job import Job

HELD_OUT = 20201108  # seed of the test sequences, which are the same for all seeds of a training


class Example(NamedTuple):
    """The tokens of a sequence, those of a second one where the task is about two, and the class."""

    tokens: Sequence[int]
    label: int
    second: Sequence[int] = ()

    @property
    def digest(self) -> bytes:
        """The SHA-256 of its tokens."""
        parts = (np.asarray(part, np.int32).tobytes() for part in (self.tokens, self.second))
        return hashlib.sha256(b"|".join(parts)).digest()


def distinct(given: Iterable[Example], known: set[bytes]) -> Iterator[Example]:
    """The examples whose tokens are not in `known`, to which each is added."""
    for example in given:
        if (digest := example.digest) not in known:
            known.add(digest)
            yield example


def work(job: Job) -> dict:
    """Write `{train,heldout}_{tokens,types,ends,labels}.npy`: flat tokens (int32), whether of a second sequence (uint8), where each example ends
    (int64), and its class (int64). No sequence is in both splits, or twice in one. The last
    `validation` examples to train on are kept aside. Raises UserError for fewer than asked for.
    """
    settings = job.settings
    task = importlib.import_module(f"relinear.get.{settings['task']}")
    folder: Path | None = job.assets.get(settings["source"])
    facts: dict = {"files": {}, "classes": task.CLASSES, "scores": ["accuracy"], "validation": settings["validation"], "vocabulary": task.VOCABULARY}
    known: set[bytes] = set()
    trained = settings["train"] and settings["train"] + settings["validation"]
    for split, wanted, seed in (("heldout", settings["test"], f"{HELD_OUT}"), ("train", trained, f"{HELD_OUT} {job.seed}")):
        found = list(islice(distinct(task.examples(settings, folder, split, random.Random(seed)), known), wanted))
        if len(found) < (wanted or (settings["validation"] + 1 if split == "train" else 1)):
            raise UserError(f"{job.name}: {wanted or 'all'} sequences of {split} asked for, {len(found)} got; lower their number in data.yaml")
        facts[split] = write(job.out, split, found, facts["files"])
    content = hashlib.sha256(b"".join(sorted(known)))
    facts["sources"] = {settings["source"] or settings["task"]: {"documents": len(known), "sha256": content.hexdigest()}}
    job.tokens = facts["train"]["tokens"] + facts["heldout"]["tokens"]
    return facts


def write(out: Path, split: str, found: Sequence[Example], files: dict[str, str]) -> dict:
    """The files of a split, with their SHA-256 in `files`; returns its numbers of sequences, tokens, and examples of each class."""
    tokens = [np.concatenate([np.asarray(part, np.int32) for part in (example.tokens, example.second)]) for example in found]
    types = [np.repeat(np.array([0, 1], np.uint8), [len(example.tokens), len(example.second)]) for example in found]
    labels = np.array([example.label for example in found], np.int64)
    flat = {
        "tokens": np.concatenate(tokens), "types": np.concatenate(types), "ends": np.cumsum([len(row) for row in tokens]).astype(np.int64),
        "labels": labels,
    }  # fmt: skip
    for kind, values in flat.items():
        path = out / f"{split}_{kind}.npy"
        np.save(path, values)
        files[path.name] = sha256(path)
    return {"sequences": len(found), "tokens": len(flat["tokens"]), "of_each_class": np.bincount(labels).tolist()}
