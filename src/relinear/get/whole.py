"""Whole documents of the `documents` stage, as measurements read them."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from relinear.errors import UserError

TOKENS, ENDS, ABOUT = "tokens.npy", "ends.npy", "documents.json"


class Excerpt(NamedTuple):
    """A stretch of a document: `tokens` are the separator, then the stretch's own."""

    document: int
    source: str
    start: int  # the stretch's first token, counted in the document
    tokens: Int64[Tensor, " S+T"]


class Whole:
    """The documents of a folder, in the order of their hash."""

    def __init__(self, folder: Path):
        if not (folder / ABOUT).is_file():
            raise UserError(
                f"{folder} holds no whole documents; possible: data of data.yaml with make: documents"
            )
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        self.separator: list[int] = about["separator"]
        self.sources: list[str] = [document["source"] for document in about["documents"]]
        self.digests: list[str] = [document["sha256"] for document in about["documents"]]
        self.tokens, self.ends = np.load(folder / TOKENS, mmap_mode="r"), np.load(folder / ENDS).tolist()

    def __len__(self) -> int:
        return len(self.ends)

    def length(self, i: int) -> int:
        """Tokens of document `i`."""
        return self.ends[i] - (self.ends[i - 1] if i else 0)

    def first(self, of_each: int | None) -> list[int]:
        """The first `of_each` documents of every source, all if None. Raises UserError where a source has
        fewer."""
        own = {
            source: [i for i, s in enumerate(self.sources) if s == source]
            for source in dict.fromkeys(self.sources)
        }
        if short := {
            source: len(found)
            for source, found in own.items()
            if of_each is not None and len(found) < of_each
        }:
            raise UserError(
                f"{of_each} documents of each source asked for; got"
                f" {', '.join(f'{n} of {source}' for source, n in short.items())}"
            )
        return sorted(i for found in own.values() for i in found[:of_each])

    def excerpts(self, i: int, length: int, most: int) -> list[Excerpt]:
        """Up to `most` stretches of `length` tokens of document `i` that do not overlap: the first from its
        beginning, the others as far apart as they can be. Raises UserError for a document shorter than
        that."""
        if (has := self.length(i)) < length:
            raise UserError(
                f"document {i} ({self.sources[i]}) has {has} tokens; positions up to {length} asked for."
                f" Possible: up to {has}, or data with a larger `shortest`"
            )
        many = min(most, has // length)
        starts = [0] if many == 1 else [j * (has - length) // (many - 1) for j in range(many)]
        begin = self.ends[i] - has
        cut = (self.tokens[begin + start : begin + start + length].tolist() for start in starts)
        return [
            Excerpt(i, self.sources[i], start, torch.tensor(self.separator + own))
            for start, own in zip(starts, cut, strict=True)
        ]
