"""Associative recall (Ba et al. 2016), as Hedgehog's Table 12 has it:

    c 9 k 8 j 3 ... f 1 c -> 9

A sequence is a list of key-value pairs that ends in a key which was in the list; the next token is that key's
value. Each sequence draws a map of its own, in which every key has one value and several keys may share one;
each pair's key is drawn anew, so keys come back. Tokens 0 to keys - 1 are the keys, the next are the values.
With 20 keys, 20 values and 63 pairs there are 40 tokens and 128 positions, and a key comes three times on
average: the paper's numbers. It does not say how it draws; with values drawn with replacement and accuracy on
the last token alone, the accuracy without any recall (`floor`) is the 17 % that its Table 2 has for the maps
that fail.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from relinear.errors import UserError
from relinear.files import sha256
from relinear.plan.job import Job

HELD_OUT = 20240206  # seed of the test sequences, which are the same for all seeds of a training
ATTEMPTS = 100  # times as many sequences as wanted are drawn at most to find new ones


def draw(rng: np.random.Generator, n: int, keys: int, values: int, pairs: int) -> np.ndarray:
    """Random sequences ``[n, 2 pairs + 2]``, int32: the pairs, one of their keys, each equally likely, and
    its value."""
    value_of = keys + rng.integers(values, size=(n, keys))
    drawn = rng.integers(keys, size=(n, pairs))
    present = np.zeros((n, keys), bool)
    np.put_along_axis(present, drawn, True, 1)
    asked = np.where(present, rng.random((n, keys)), -1.0).argmax(1)[:, None]
    shown = np.concatenate([drawn, asked], 1)
    return np.stack([shown, np.take_along_axis(value_of, shown, 1)], 2).reshape(n, -1).astype(np.int32)


def draw_others(rng: np.random.Generator, n: int, known: set[bytes], sizes: Mapping[str, int]) -> np.ndarray:
    """Random sequences that are not among `known`. Raises UserError where there are not enough others."""
    found: list[np.ndarray] = []
    for _ in range(ATTEMPTS):
        rows = draw(rng, n - len(found), **sizes)
        found += [row for row in rows if row.tobytes() not in known]
        if len(found) == n:
            return np.stack(found)
    possible = "more keys, values or pairs, or fewer sequences"
    raise UserError(
        f"{n} training sequences asked for, {len(found)} got that are no test sequences, with {dict(sizes)};"
        f" possible: {possible}"
    )


def pairs_of(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Keys and values of the pairs ``[n, pairs]``, the key asked for and its value ``[n]``."""
    return rows[:, :-2:2], rows[:, 1:-2:2], rows[:, -2], rows[:, -1]


def occurrences(rows: np.ndarray) -> np.ndarray:
    """The number of times that the asked key stands in each sequence's pairs."""
    keys, _, asked, _ = pairs_of(rows)
    return (keys == asked[:, None]).sum(1)


def floor(rows: np.ndarray) -> np.ndarray:
    """The score of the best guess without recall on each sequence: the value that most of its keys have; a
    part of 1 where several are best."""
    keys, values, _, answer = pairs_of(rows)
    scores = []
    for k, v, right in zip(keys, values, answer, strict=True):
        first = np.unique(k, return_index=True)[1]
        held, times = np.unique(v[first], return_counts=True)
        best = held[times == times.max()]
        scores.append((right in best) / len(best))
    return np.array(scores)


def rows_of(folder: Path, split: str) -> np.ndarray:
    """The sequences of a split of finished data ``[n, length]``."""
    return np.load(folder / f"{split}_tokens.npy").reshape(-1, _facts(folder)["length"])


def vocabulary(folder: Path) -> int:
    """The number of distinct tokens of finished data."""
    return _facts(folder)["vocabulary"]


def _facts(folder: Path) -> dict:
    return json.loads((folder / "metrics.json").read_text())


def work(job: Job) -> dict:
    """Write `{train,heldout}_{tokens,labels}.npy`, flat int32: every token but a sequence's first is learned,
    as in a text."""
    settings = job.settings
    sizes = {name: settings[name] for name in ("keys", "values", "pairs")}
    test = draw(np.random.default_rng(HELD_OUT), settings["test"], **sizes)
    train = draw_others(
        np.random.default_rng([HELD_OUT, job.seed]), settings["train"], {row.tobytes() for row in test}, sizes
    )
    files = {}
    for split, rows in (("train", train), ("heldout", test)):
        for kind in ("tokens", "labels"):
            path = job.out / f"{split}_{kind}.npy"
            np.save(path, rows.ravel())
            files[path.name] = sha256(path)
    content = hashlib.sha256(train.tobytes() + test.tobytes()).hexdigest()
    return {
        "sources": {"recall": {"documents": len(train) + len(test), "sha256": content}},
        "files": files,
        "length": train.shape[1],
        "vocabulary": sizes["keys"] + sizes["values"],
    }
