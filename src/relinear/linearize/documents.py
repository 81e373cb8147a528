"""Several documents in one row (packed rows): where each begins, and how a layer takes each by itself.

A state and a window end with a document, so documents are taken apart before a method sees them: those of
about one length side by side, padded on the right, which leaves no trace. What a document gives does not
depend on what stands beside it.
"""

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

# [documents + 1]: where documents begin in all rows, one after another, and the end
ENDS = ("cu_seq_lens_q", "cu_seq_lens_k")
# what DataCollatorWithFlattening makes beside position_ids
GIVEN = (*ENDS, "seq_idx", "max_length_q", "max_length_k")
POSSIBLE = (
    "possible: documents side by side, padded, with attention_mask; or packed without attention_mask and"
    " without a cache, by position_ids that begin anew, seq_idx or cu_seq_lens_q"
)


class Group(NamedTuple):
    """Documents of about one length. Places count the tokens of all rows, one row after another."""

    places: Tensor  # [N, L] int64: of each document's tokens; at padding the document's first token
    real: Tensor | None  # [N, L] bool: False at padding; None where there is none
    inside: Tensor  # [n] int64: which of the N * L are real


class Documents(NamedTuple):
    """Packed rows taken apart."""

    groups: list[Group]
    order: Tensor  # [B * T] int64: where each token of the rows stands among the groups' real ones
    positions: Tensor  # [B, T] int64: each token's place in its document

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(group.places.shape[1] for group in self.groups)


class Rows(NamedTuple):
    """The rows of a piece that have as many real tokens."""

    rows: Tensor  # [R] int64
    places: Tensor  # [R, n] int64: of their real tokens among the tokens of all rows


def unpadded(real: Tensor) -> list[Rows]:
    """The rows of a piece with mask ``[B, T]``, by how many real tokens they have; those without any are left
    out. Waits for the device."""
    counts = real.sum(1)
    found = []
    for count in sorted({*counts.tolist()} - {0}):
        rows = (counts == count).nonzero().flatten()
        places = real[rows].nonzero()[:, 1].view(len(rows), count) + rows[:, None] * real.shape[1]
        found.append(Rows(rows, places))
    return found


def take(kwargs: dict) -> dict:
    """Move what says where documents begin out of a call's arguments."""
    taken = {}
    for name in GIVEN:  # not a comprehension: torch.compile traces none that changes what is outside of it
        value = kwargs.pop(name, None)
        if value is not None:
            taken[name] = value
    return taken


def documents(
    given: dict, positions: Tensor | None, mask: Tensor | None, rows: tuple[int, int], device
) -> Documents | None:
    """The documents of rows ``[B, T]``; None where each row is one. Reading them waits for the device, but
    only where they are given.

    `given` is what `take` found. Positions ``[B or 1, T]`` that do not go up by one begin a document where
    there is no mask, as in transformers; with a mask they are refused. Raises ValueError for boundaries that
    disagree, or do not fit the rows.
    """
    if mask is not None:
        if given:
            raise ValueError(f"got {', '.join(given)} together with attention_mask; {POSSIBLE}")
        if positions is not None:
            _check_one(positions, mask[:, -rows[1] :].bool())
        return None
    found = {}
    for name in ENDS:
        if name in given:
            found[name] = _by_ends(name, given[name], rows)
    if lengths := [name for name in given if name.startswith("max_length") and not found]:
        raise ValueError(
            f"got {lengths[0]} without cu_seq_lens_q, which says where documents begin; {POSSIBLE}"
        )
    if "seq_idx" in given:
        found["seq_idx"] = _by_change("seq_idx", given["seq_idx"], rows, 0)
    if positions is not None and rows[1] > 1:
        found["position_ids"] = _by_change("position_ids", positions, rows, 1)
    if not found:
        return None
    first, *others = found
    for other in others:
        if found[other] != found[first]:
            said = [f"{name} has documents begin at {_some(found[name])}" for name in (first, other)]
            raise ValueError(f"{' and '.join(said)}: they disagree; {POSSIBLE}")
    return None if len(found[first]) == rows[0] else _apart(found[first], rows, device)


def refuse_state(packed: Documents, batch: int) -> None:
    """Raise ValueError: a state is kept, and there are several documents in a row."""
    count = sum(len(group.places) for group in packed.groups)
    raise ValueError(
        f"got {count} documents in {batch} rows where a state is kept, which would run from one into the"
        f" next; {POSSIBLE}"
    )


def _check_one(positions: Tensor, real: Tensor) -> None:
    """Raise ValueError where positions begin anew although a mask is given, which says that a row is one
    sequence."""
    if real.shape[1] < 2 or positions.shape[1] != real.shape[1]:
        return
    anew = (positions.diff(dim=1) != 1) & real[:, 1:] & real[:, :-1]
    if bool(anew.any()):
        row, column = anew.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids do not go up by one at token {column + 1} of row {row}: another document begins"
            f" there, but attention_mask says that the row is one; {POSSIBLE}"
        )


def _by_ends(name: str, ends: Tensor, rows: tuple[int, int]) -> list[int]:
    tokens, given = rows[0] * rows[1], torch.as_tensor(ends).flatten().tolist()
    rising = all(a < b for a, b in zip(given, given[1:], strict=False))
    if len(given) < 2 or given[0] != 0 or given[-1] != tokens or not rising:
        raise ValueError(f"{name} must rise from 0 to the number of tokens, {tokens}; got {_some(given)}")
    return sorted({*given[:-1], *range(0, tokens, rows[1])})


def _by_change(name: str, values: Tensor, rows: tuple[int, int], step: int) -> list[int]:
    """The places where values ``[B or 1, T]`` do not go up by `step`, and the beginnings of rows."""
    if values.dim() != 2 or values.shape[1] != rows[1] or values.shape[0] not in (1, rows[0]):
        raise ValueError(f"{name} must be [batch, tokens] = {list(rows)}; got {list(values.shape)}")
    begins = torch.ones(rows, dtype=torch.bool, device=values.device)
    begins[:, 1:] = values.diff(dim=1) != step
    return begins.flatten().nonzero().flatten().tolist()


def _apart(starts: list[int], rows: tuple[int, int], device) -> Documents:
    """Documents whose lengths lie between the same powers of two stand side by side: padding is less than
    half of a group."""
    by_size, positions = defaultdict(list), []
    for start, stop in zip(starts, [*starts[1:], rows[0] * rows[1]], strict=True):
        by_size[(stop - start - 1).bit_length()].append((start, stop))
        positions += range(stop - start)
    groups, standing = [], []
    for spans in by_size.values():
        width = max(stop - start for start, stop in spans)
        starting, lengths = torch.tensor([[start, stop - start] for start, stop in spans]).unbind(1)
        column = torch.arange(width)
        real = column < lengths[:, None]
        places = starting[:, None] + column * real
        inside = real.flatten().nonzero().flatten()
        standing.append(places.flatten()[inside])
        groups.append(
            Group(places.to(device), None if bool(real.all()) else real.to(device), inside.to(device))
        )
    return Documents(
        groups, torch.cat(standing).argsort().to(device), torch.tensor(positions, device=device).view(rows)
    )


def _some(values: list[int], shown: int = 8) -> str:
    return f"[{', '.join(map(str, values[:shown]))}{', ...' if len(values) > shown else ''}]"
