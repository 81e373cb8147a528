"""Pass keys to train on: the prompts of `relinear.get.needles` with their answers, every sequence exactly as
long as is asked for.

Lizard, section 4.2: 10,000 examples of 2048 tokens. By `learn` only the answer is learned, and every other
token has the label that the loss skips; or all tokens are.

Which key is for training and which is for tests is told by its hash (`for_tests`), so no test key of any
length or seed occurs in training.
"""

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from relinear.errors import UserError
from relinear.files import sha256
from relinear.folders import tokenizer_of
from relinear.get import needles
from relinear.get.needles import SENTENCE_ENDS, Cutter, Needle
from relinear.get.packed import IGNORED
from relinear.get.text import document_separator
from relinear.plan.job import Job

TESTED = 10  # one key in about so many is for tests
# the most tokens of a sentence; a longer one is a table or code without full stops, and would leave no place
# for keys
LONGEST = 128


def for_tests(key: str) -> bool:
    """Whether a key is for tests, by its hash."""
    return hashlib.sha256(key.encode()).digest()[0] % TESTED == 0


class Keys(Cutter):
    """A cutter whose keys are all for training, or all for tests."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, use: Literal["train", "test"]):
        super().__init__(tokenizer)
        self.use = use

    def key(self, rng: random.Random, tokens: int) -> str:
        """A key as of `Cutter.key`, drawn until it is for this use."""
        while for_tests(key := super().key(rng, tokens)) != (self.use == "test"):
            pass
        return key


def answer_of(needle: Needle) -> list[int]:
    """The tokens of the right answer: a space, the key, a full stop."""
    return needle.answers[needle.asked]


def example(cutter: Cutter, length: int, seed: str, **more: Any) -> Needle:
    """A prompt that is `length` tokens long together with its answer; `more`: as `needles.example`, whose
    errors are raised.

    It is drawn twice: a seed draws the keys before it fills the text, so the first prompt tells how long the
    answer of the second is.
    """
    answer = answer_of(needles.example(cutter, length, seed, **more))
    found = needles.example(cutter, length - len(answer), seed, **more)
    if answer_of(found) != answer:
        raise AssertionError(f"seed {seed!r} draws other keys at another length")
    return found


def sentences(cutter: Cutter, folder: Path) -> list[tuple[int, ...]]:
    """The sentences of a finished text's training documents, in their order, each behind a space and without
    special tokens.

    Left out are sentences of more than `LONGEST` tokens and, unless it is the only one, the last document,
    which may be cut. Raises UserError where nothing is left.
    """
    tokens = np.load(folder / "train_tokens.npy")
    begins = np.flatnonzero(tokens == document_separator(cutter.tokenizer)[-1])
    documents = np.split(tokens, begins)[1:-1] or [tokens]
    texts = cutter.tokenizer.batch_decode(
        [document.tolist() for document in documents], skip_special_tokens=True
    )
    said = [
        f" {sentence.strip()}"
        for text in texts
        for sentence in SENTENCE_ENDS.split(text.strip())
        if sentence.strip()
    ]
    # All at once, and not by the cutter, which keeps every sentence in memory: a training text has several
    # hundred thousand.
    cut = cutter.tokenizer(said, add_special_tokens=False, verbose=False)["input_ids"] if said else []
    if not (found := [tuple(ids) for ids in cut if len(ids) <= LONGEST]):
        raise UserError(
            f"no sentence of {LONGEST} tokens or fewer is in the training text of {folder}; possible: filler:"
            " noise"
        )
    return found


def examples(
    cutter: Cutter, split: str, n: int, filler: Sequence[tuple[int, ...]], settings: Any
) -> list[Needle]:
    """The examples of a split."""
    shape = {name: settings[name] for name in ("keys", "key_tokens", "mention")}
    return [
        example(cutter, settings["length"], f"{split} {settings['seed']} {i}", filler=filler, **shape)
        for i in tqdm(range(n), desc=f"{split} examples", mininterval=5)
    ]


def work(job: Job) -> dict:
    """Write `{train,heldout}_{tokens,labels}.npy`, flat int32, a sequence of `length` tokens after the other.

    The held-out sequences have keys for tests and, as filler, the held-out text. Raises UserError for a
    length without room for the keys, and for a tokenizer that cannot write them.
    """
    settings, noise = job.settings, job.settings["filler"] == "noise"
    tokenizer = tokenizer_of(job.parents["model"])
    files, keys, content, labelled = {}, {}, hashlib.sha256(), 0
    for split, use, n in (("train", "train", settings["examples"]), ("heldout", "test", settings["heldout"])):
        cutter = Keys(tokenizer, use)
        read = needles.sentences if split == "heldout" else sentences
        drawn = examples(
            cutter, split, n, needles.noise(cutter) if noise else read(cutter, job.parents["text"]), settings
        )
        keys[split] = {key for needle in drawn for key in needle.keys}
        tokens = np.array([[*needle.prompt, *answer_of(needle)] for needle in drawn], np.int32)
        first = [0 if settings["learn"] == "all" else len(needle.prompt) for needle in drawn]
        learned = np.arange(settings["length"]) >= np.array(first)[:, None]
        for kind, values in (("tokens", tokens), ("labels", np.where(learned, tokens, np.int32(IGNORED)))):
            path = job.out / f"{split}_{kind}.npy"
            np.save(path, values.ravel())
            files[path.name] = sha256(path)
        content.update(tokens.tobytes())
        labelled += int(learned.sum()) if split == "train" else 0
    if both := keys["train"] & keys["heldout"]:
        raise AssertionError(f"{len(both)} keys are in training and in tests, such as {min(both)}")
    return {
        "sources": {
            "passkeys": {
                "documents": settings["examples"] + settings["heldout"],
                "sha256": content.hexdigest(),
            }
        },
        "files": files,
        "length": settings["length"],
        "examples": settings["examples"],
        "labelled": labelled,
        "keys": len(keys["train"]),
    }
