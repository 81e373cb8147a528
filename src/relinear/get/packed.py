"""A text of the `text` stage as sequences of equal length, which trainings and measurements read."""

import functools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from relinear.errors import UserError

IGNORED = -100  # the label that torch's cross-entropy skips
SPLITS = ("train", "heldout")
BLOCK = 1 << 20  # tokens of a stream that are in memory at a time


class Packed:
    """A split of a corpus as sequences of `seq_len` tokens; a remainder shorter than that is left out.

    Raises `UserError` for an unknown split and for a `seq_len` below 1 or beyond the stream.
    """

    def __init__(self, folder: Path, split: str, seq_len: int):
        if split not in SPLITS:
            raise UserError(f"no split {split!r}; have {', '.join(SPLITS)}")
        self.folder = Path(folder)
        self.tokens = np.load(self.folder / f"{split}_tokens.npy", mmap_mode="r")
        self.labels = np.load(self.folder / f"{split}_labels.npy", mmap_mode="r")
        if not 1 <= seq_len <= len(self.tokens):
            raise UserError(f"sequences of {seq_len} tokens asked for; {split} holds 1 to {len(self.tokens)}")
        self.seq_len = seq_len

    @functools.cached_property
    def rungs(self) -> tuple[int, ...]:
        """Where each part after the first begins, of data whose parts a training reads one after the other;
        empty where the sequences have no order."""
        about = self.folder / "metrics.json"
        return tuple(json.loads(about.read_text()).get("rungs", ())) if about.is_file() else ()

    @functools.cached_property
    def labelled(self) -> Int64[np.ndarray, " N"]:
        """How many labels of each sequence count: those that are not IGNORED, except the first token's, which
        nothing predicts."""
        rows = self.labels[: len(self) * self.seq_len].reshape(len(self), self.seq_len)
        return np.array([np.count_nonzero(row[1:] != IGNORED) for row in rows])

    def __len__(self) -> int:
        return len(self.tokens) // self.seq_len

    def sequence(self, i: int) -> tuple[Int64[Tensor, " T"], Int64[Tensor, " T"]]:
        """Tokens and labels of sequence `i`, aligned (the model's loss shifts them)."""
        if not 0 <= i < len(self):
            raise IndexError(f"no sequence {i}; have 0 to {len(self) - 1}")
        cut = slice(i * self.seq_len, (i + 1) * self.seq_len)
        tokens, labels = (stream[cut].astype(np.int64) for stream in (self.tokens, self.labels))
        return torch.from_numpy(tokens), torch.from_numpy(labels)

    def batch(self, chosen: Sequence[int], *, width: int | None = None) -> tuple[Int64[Tensor, "B T"]]:
        """Tokens of sequences, all of one width."""
        return (torch.stack([self.sequence(i)[0] for i in chosen]),)

    def real(self, chosen: Sequence[int]) -> int:
        """How many tokens sequences have: all are real."""
        return len(chosen) * self.seq_len

    def tokens_of(self, sequences: int) -> int:
        """The tokens of so many sequences."""
        return sequences * self.seq_len


@functools.lru_cache(maxsize=2)  # this epoch's and the next one's: a step asks once for each of its sequences
def order(n: int, seed: int, epoch: int, rungs: tuple[int, ...] = ()) -> np.ndarray:
    """The permutation of `range(n)` in which `epoch` visits `n` sequences; not to be written to. `rungs`:
    where parts begin whose sequences are all visited before those of the next."""
    found = np.random.default_rng([seed, epoch]).permutation(n)
    if rungs:
        found = found[np.argsort(np.searchsorted(rungs, found, side="right"), kind="stable")]
    found.flags.writeable = False
    return found


def batch_indices(step: int, *, n: int, batch_size: int, seed: int, rungs: tuple[int, ...] = ()) -> list[int]:
    """The sequences of batch `step` (from 0), out of `n`, without a state: any step can be the first.

    Batches run on from one epoch's permutation (`order`) into the next, so each epoch visits each sequence
    once.
    """
    epochs = [divmod(step * batch_size + j, n) for j in range(batch_size)]
    orders = {epoch: order(n, seed, epoch, rungs) for epoch, _ in epochs}
    return [int(orders[epoch][position]) for epoch, position in epochs]


def micro_batches(
    step: int,
    *,
    n: int,
    batch_size: int,
    accumulate: int,
    seed: int,
    rank: int = 0,
    size: int = 1,
    rungs: tuple[int, ...] = (),
) -> Iterator[tuple[list[int], list[int]]]:
    """The share of process `rank` of `size` in the `accumulate` batches of a step: pieces, each with all
    sequences of the step.

    Together the shares are the step, whatever the number of processes, which must divide batch_size *
    accumulate. A piece is as large as fits: one process has the batches themselves. A loss divides its sum
    over a piece by the labels, or the tokens, of the step: then the pieces' losses add up to the step's mean,
    however the step is split.
    """
    whole = batch_indices(step, n=n, batch_size=batch_size * accumulate, seed=seed, rungs=rungs)
    share = batch_size * accumulate // size
    piece = math.gcd(batch_size, share)
    for at in range(rank * share, (rank + 1) * share, piece):
        yield whole[at : at + piece], whole


def chance_loss(folder: Path, vocabulary: int) -> float:
    """Mean loss on the held-out text of a model that knows how often each token occurs in the training text
    (add-one) and no more."""
    train = np.load(Path(folder) / "train_tokens.npy", mmap_mode="r")
    counts = np.ones(vocabulary)
    for at in range(0, len(train), BLOCK):
        counts += np.bincount(train[at : at + BLOCK], minlength=vocabulary)
    heldout = np.load(Path(folder) / "heldout_tokens.npy")
    return float(-np.log(counts[heldout] / counts.sum()).mean())
