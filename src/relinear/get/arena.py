"""Tasks in the form of Long Range Arena's (Tay et al. 2021): long sequences of few kinds of tokens, each of
one class.

A task is a file here: `VOCABULARY`, the number of its tokens, and `examples`. Token 0 is padding.
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
from relinear.get.labels import write
from relinear.plan.job import Job

HELD_OUT = 20201108  # seed of the test sequences, which are the same for all seeds of a training


class Example(NamedTuple):
    """The tokens of a sequence, those of a second one where the task is about two, and the class."""

    tokens: Sequence[int]
    label: int
    second: Sequence[int] = np.array([], np.int32)

    @property
    def types(self) -> np.ndarray:
        """Whether each token is of the second sequence."""
        return np.repeat(np.array([0, 1], np.uint8), [len(self.tokens), len(self.second)])

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
    """Write `{train,heldout}_{tokens,types,ends,labels}.npy`: flat tokens, whether of a second sequence,
    where each example ends, and its class.

    No sequence is in both splits, or twice in one. The last `validation` examples to train on are kept aside.
    Raises UserError for fewer than asked for.
    """
    settings = job.settings
    task = importlib.import_module(f"relinear.get.{settings['task']}")
    folder: Path | None = job.assets.get(settings["source"])
    facts: dict = {
        "files": {},
        "vocabulary": task.VOCABULARY,
        **{name: settings[name] for name in ("classes", "scores", "validation")},
    }
    known: set[bytes] = set()
    trained = settings["train"] and settings["train"] + settings["validation"]
    for split, wanted, seed in (
        ("heldout", settings["test"], f"{HELD_OUT}"),
        ("train", trained, f"{HELD_OUT} {job.seed}"),
    ):
        found = list(
            islice(distinct(task.examples(settings, folder, split, random.Random(seed)), known), wanted)
        )
        if len(found) < (wanted or (settings["validation"] + 1 if split == "train" else 1)):
            raise UserError(
                f"{job.name}: {wanted or 'all'} sequences of {split} asked for, {len(found)} got; lower their"
                " number in data.yaml"
            )
        rows = [{"input_ids": np.concatenate([e.tokens, e.second]), "token_type_ids": e.types} for e in found]
        facts[split] = write(
            job.out, split, rows, [e.label for e in found], settings["classes"], facts["files"]
        )
    content = hashlib.sha256(b"".join(sorted(known)))
    facts["sources"] = {
        settings["source"] or settings["task"]: {"documents": len(known), "sha256": content.hexdigest()}
    }
    job.tokens = facts["train"]["tokens"] + facts["heldout"]["tokens"]
    return facts
