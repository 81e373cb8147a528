"""Texts of different lengths of a `sentences` stage, padded side by side, or joined to long ones; and either
kind of text under one roof."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from relinear.errors import UserError
from relinear.get.packed import SPLITS, Packed


class Padded:
    """A split as texts of at most `seq_len` tokens; longer ones are cut. Raises UserError for an unknown
    split, and one without texts."""

    rungs = ()  # texts are read in any order (`relinear.get.packed.Packed.rungs`)

    def __init__(self, folder: Path, split: str, seq_len: int):
        if split not in SPLITS:
            raise UserError(f"no split {split!r}; have {', '.join(SPLITS)}")
        self.tokens, self.types, self.ends = (
            np.load(Path(folder) / f"{split}_{kind}.npy", mmap_mode="r")
            for kind in ("tokens", "types", "ends")
        )
        if len(self.ends) == 0 or seq_len < 1:
            raise UserError(
                f"texts of at most {seq_len} tokens asked for; {split} of {Path(folder).name} holds"
                f" {len(self.ends)} texts"
            )
        self.starts, self.seq_len, self.split = np.concatenate([[0], self.ends[:-1]]), seq_len, split
        self.lengths = np.minimum(self.ends - self.starts, seq_len)
        if self.lengths.min() < 1:
            raise UserError(
                f"text {self.lengths.argmin()} of {split} of {Path(folder).name} has no token; possible:"
                " texts of 1 token or more"
            )

    def __len__(self) -> int:
        return len(self.ends)

    def batch(self, chosen: Sequence[int], *, width: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, mask (False at padding) and types ``[B, T]``, padded on the right to `width`, or to the
        longest of them."""
        width = max(self.lengths[list(chosen)]) if width is None else width
        tokens, types = (torch.zeros(len(chosen), width, dtype=torch.long) for _ in range(2))
        mask = torch.zeros(len(chosen), width, dtype=torch.bool)
        for row, i in enumerate(chosen):
            cut, length = slice(self.starts[i], self.starts[i] + self.lengths[i]), self.lengths[i]
            tokens[row, :length] = torch.from_numpy(self.tokens[cut].astype(np.int64))
            types[row, :length] = torch.from_numpy(self.types[cut].astype(np.int64))
            mask[row, :length] = True
        return tokens, mask, types

    def real(self, chosen: Sequence[int]) -> int:
        """How many real tokens texts have, padding left out."""
        return int(self.lengths[list(chosen)].sum())

    def tokens_of(self, sequences: int) -> int:
        """The real tokens of so many sequences, by the average of all sequences."""
        return round(sequences * float(self.lengths.mean()))

    def until(self, tokens: int) -> int:
        """The number of first texts that together have so many real tokens; all texts where they have
        fewer."""
        return min(int(np.searchsorted(np.cumsum(self.lengths), tokens)) + 1, len(self))

    def joined(self, length: int) -> tuple[Tensor, Tensor]:
        """Tokens and types ``[N, T]`` of all texts, one after the other, cut into sequences of one length.
        Raises UserError for too few."""
        if (n := len(self.tokens) // length) == 0:
            raise UserError(
                f"sequences of {length} tokens asked for; all texts of {self.split} together have"
                f" {len(self.tokens)}"
            )
        cut = n * length
        return tuple(
            torch.from_numpy(flat[:cut].astype(np.int64)).view(n, length)
            for flat in (self.tokens, self.types)
        )


def opened(folder: Path, split: str, seq_len: int) -> Packed | Padded:
    """A split of the text in a folder, packed or padded as its stage made it. Raises UserError as those
    classes do."""
    kind = Padded if (Path(folder) / f"{split}_ends.npy").is_file() else Packed
    return kind(folder, split, seq_len)
