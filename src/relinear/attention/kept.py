"""Softmax attention to a window, to the first positions, and to those tokens behind the window that received
most while they were in it: a cache of constant size that chooses what it keeps, with nothing to train.

Each key head of a layer holds the last `window` positions, the first `sinks` real ones, and `kept` more. The
score of a token that leaves the window is the attention that it received there, times the size of its value,

    s_j = ||v_j|| sum over t = j .. j + window - 1, and over the queries of the key head, of
          softmax(scale q_t k_i, i in the last `window` positions and the sinks)_j

and of all that have left, those with the `kept` largest scores stay, of equals the earlier. A query sees the
window, sinks and kept tokens in one softmax, each key at its own position's angles.

A score does not depend on what is kept, so the scores of a prefix say who stays, and who has gone never comes
back. Whole texts are therefore read in parallel: the choice is made chunk by chunk and without a gradient, in
time linear in the text, and what is kept has gradients as any key and value.

`choose: random`, the control: a score is a hash of the position and the key head, so that the kept tokens are
as if drawn by chance from all that have left, for each key head others.

H2O (Zhang et al., 2306.14048) sums attention for as long as a token is held, over what is held, which can
only be done a token at a time. Scores are held in float32 and counted with 4 bytes.
"""

from typing import Annotated, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor, nn

from relinear.attention import _base
from relinear.attention._base import Attention, Inputs, wide
from relinear_kernels.gated_delta_reference import DeltaState
from relinear_kernels.sliding_window_attention_reference import (
    sliding_window_weights,
    window_blocks,
    window_scores,
)

CHUNK = 128  # queries that read one choice of kept tokens, and what leaves meanwhile
Window = Annotated[int, Field(ge=1)]


class Options(_base.WindowsOptions):
    """The options of a run with a window and kept tokens."""

    window: Window | tuple[Window, ...] = 128
    kept: int = Field(default=128, ge=1)
    sinks: int = Field(default=4, ge=0)
    choose: Literal["received", "random"] = "received"


class State(NamedTuple):
    """What a layer holds after a prefix: the kept tokens, sinks among them, in the order of their positions,
    and behind them the window's, oldest first. Its size never changes; `real` says what is filled."""

    k: Float[Tensor, "B P Hkv D"]
    v: Float[Tensor, "B P Hkv D"]
    # [B, P, Hkv]: attention received so far, or the hash, inf of sinks; of 4 bytes, as in a recurrent state
    received: DeltaState
    real: Bool[Tensor, "B P Hkv"]
    count: Tensor  # [B] int64: real tokens so far


def drawn(at: Int[Tensor, "B T"], groups: int) -> Float[Tensor, "B T G"]:
    """A hash in [0, 1) of each place and key head: its 24 highest bits of 32, exact in float32."""
    x = at[..., None] * groups + torch.arange(groups, device=at.device)
    for shift in (16, 15, 16):  # what neighbours share goes into all bits; products are below 2^63
        x = ((x ^ (x >> shift)) * 0x7FEB352D) % 2**32
    return (x >> 8) / 2.0**24


def alive(held: Float[Tensor, "B G P"], leaving: Float[Tensor, "B G C"]) -> Bool[Tensor, "B G C+1 P+C"]:
    """Who of the held tokens and of those that leave the window, one after another, is kept once 0, 1 .. C of
    these have left. A score of -inf is of no token."""
    places, steps = held.shape[-1], leaving.shape[-1]
    scores = torch.cat([held, leaving], -1)
    own, other, at = (
        scores[..., None, :],
        scores[..., :, None],
        torch.arange(places + steps, device=held.device),
    )
    above = (other > own) | ((other == own) & (at[:, None] < at))  # [.., other, own]
    since = nn.functional.pad(above[..., places:, :].cumsum(-2), (0, 0, 1, 0))
    rank = above[..., :places, :].sum(-2)[..., None, :] + since
    left = at - places < torch.arange(steps + 1, device=held.device)[:, None]
    return (rank < places) & left & (scores > -torch.inf)[..., None, :]


class Method(Attention):
    """Softmax attention to the window, the sinks and the kept tokens."""

    Options = Options

    @property
    def unbounded_rotary(self) -> bool:
        """Kept tokens are seen from any distance."""
        return True

    @property
    def places(self) -> int:
        """Of kept tokens and sinks."""
        return self.options.kept + self.options.sinks

    def init_state(self, batch, device=None, dtype=torch.float32) -> State:
        """The state before the first token: nothing is held."""
        shape = (batch, self.places + self.options.window - 1, self.heads.groups)
        k, v = (torch.zeros(*shape, self.heads.dim, device=device, dtype=dtype) for _ in range(2))
        received = torch.zeros(shape, device=device, dtype=torch.promote_types(dtype, torch.float32))
        real = torch.zeros(shape, device=device, dtype=torch.bool)
        return State(k, v, DeltaState(received), real, torch.zeros(batch, device=device, dtype=torch.long))

    def forward(self, inputs: Inputs, state: State | None = None):
        """Head outputs of a piece, and what is held after it."""
        (batch, length), dtype, places = inputs.q.shape[:2], inputs.v.dtype, self.places
        q, k = (x.to(dtype) for x in inputs.rotated())
        if state is None:
            state = self.init_state(batch, q.device, dtype)
        k, v = torch.cat([state.k.to(dtype), k], 1), torch.cat([state.v.to(dtype), inputs.v], 1)
        new = inputs.key_mask
        if new is None:
            new = torch.ones(batch, length, dtype=torch.bool, device=q.device)
        real = torch.cat([state.real, new[..., None].expand(-1, -1, k.shape[2])], 1)
        with torch.no_grad():
            place = state.count[:, None] + new.cumsum(1) - 1
            received = nn.functional.pad(state.received.s, (0, 0, 0, length))
            own = received[:, -length:]
            if self.options.choose == "random":
                own += drawn(place, k.shape[2])
            own.masked_fill_((new & (place < self.options.sinks))[..., None], torch.inf)
            scores = received
            if self.options.choose == "received":
                received[:, places:] += self._given(q, k, real, new, received)
                scores = torch.where(received == torch.inf, received, received * wide(v).norm(dim=-1))
            chosen, seen, held = self._choose(scores.masked_fill(~real, -torch.inf), length)
        y = self._attend(q, k, v, real[:, places:, 0], chosen, seen)
        window = torch.arange(places + length, k.shape[1], device=q.device)[:, None]
        after = torch.cat([held, window.expand(batch, -1, k.shape[2])], 1)
        take = lambda x: x.take_along_dim(after if x.dim() == 3 else after[..., None], 1)  # noqa: E731
        return y, State(take(k), take(v), DeltaState(take(received)), take(real), state.count + new.sum(1))

    def _given(self, q, k, real, new, received) -> Float[Tensor, "B W-1+T Hkv"]:
        """The attention that a piece's T queries give to its window's keys, those of the piece the last; the
        sinks, of which `received` is inf, have their share."""
        (batch, length), window, places = q.shape[:2], self.options.window, self.places
        scores, n, c = window_scores(
            wide(q), wide(k[:, places:]), real[:, places:, 0], window, self.heads.scale
        )
        pad = n * c - length
        if sinks := self.options.sinks:
            ours = received == torch.inf
            place = (~ours).to(torch.uint8).argsort(dim=1, stable=True)[:, :sinks]  # [B, S, Hkv]
            beyond = place - places < torch.arange(length, device=q.device)[:, None, None, None]
            beyond = (beyond & ours.take_along_dim(place, 1)).permute(1, 3, 0, 2)  # [B, Hkv, T, S]
            own = wide(q).unflatten(2, (k.shape[2], -1)) * self.heads.scale
            first = torch.einsum("btgrd,bsgd->bgrts", own, wide(k).take_along_dim(place[..., None], 1))
            first = first.masked_fill(~beyond[:, :, None], -torch.inf)
            first = nn.functional.pad(first, (0, 0, 0, pad)).unflatten(3, (n, c))
            scores = torch.cat([scores, first], -1)
        asks = nn.functional.pad(new, (0, pad)).view(batch, 1, 1, n, c, 1)
        given = (scores.softmax(-1) * asks)[..., : c + window - 1]
        blocks = given.nan_to_num(0.0).sum((2, 4))  # [B, Hkv, N, C + W - 1]
        block, place = (torch.arange(size, device=q.device) for size in blocks.shape[2:])
        sums = blocks.new_zeros(*blocks.shape[:2], n * c + window - 1)
        sums.index_add_(2, (block[:, None] * c + place).flatten(), blocks.flatten(2))
        return sums[..., : length + window - 1].transpose(1, 2)

    def _choose(self, scores: Float[Tensor, "B P+T Hkv"], length: int):
        """Of each chunk of queries: which tokens are kept before it ``[B, N places, Hkv]``, and who of these
        and of those that leave meanwhile each query sees, ``[B, N, Hkv, C, places + C]``; and which tokens
        are kept at the end ``[B, places, Hkv]``."""
        places, size = self.places, min(CHUNK, length)
        scores = scores.transpose(1, 2)
        held = torch.arange(places, device=scores.device).expand(*scores.shape[:2], places)
        chosen, seen = [], []
        for at in range(0, length, size):
            steps = min(size, length - at)
            # the last tokens of a piece that fills no chunk are still in the window
            leaving = torch.arange(places + at, places + at + size, device=scores.device)
            own = scores.gather(2, leaving.clamp(max=scores.shape[2] - 1).expand(*scores.shape[:2], size))
            kept = alive(scores.gather(2, held), own)
            chosen.append(held)
            seen.append(kept[:, :, :-1])
            stay = (~kept[:, :, steps]).to(torch.uint8).argsort(dim=-1, stable=True)[..., :places]
            held = torch.cat([held, leaving.expand(*held.shape[:2], size)], -1).gather(2, stay)
        return torch.cat(chosen, 2).transpose(1, 2), torch.stack(seen, 1), held.transpose(1, 2)

    def _attend(self, q, k, v, real, chosen, seen) -> Float[Tensor, "B T H D"]:
        """Softmax attention of each chunk of queries to its kept tokens, and to its reach of the window."""
        (batch, length, heads, dim), window, places = q.shape, self.options.window, self.places
        n, c = seen.shape[1], seen.shape[3]
        pad = n * c - length
        reach = c + window - 1
        fill = lambda x: nn.functional.pad(x, (0, 0, 0, 0, 0, pad))  # noqa: E731

        def both(x: Tensor) -> Tensor:
            kept = x.take_along_dim(chosen[..., None], 1).unflatten(1, (n, places)).transpose(2, 3)
            near = window_blocks(fill(x[:, places:]), c, window).transpose(-1, -2)
            return torch.cat([kept, near], 3).flatten(0, 1)  # [B N, Hkv, places + reach, D]

        back = torch.arange(reach, device=q.device) - torch.arange(c, device=q.device)[:, None]
        near = (
            (back >= 0) & (back < window) & nn.functional.pad(real, (0, pad)).unfold(1, reach, c)[:, :, None]
        )
        near = near[:, :, None].expand(-1, -1, k.shape[2], -1, -1)
        left = nn.functional.pad(seen[..., places:], (0, reach - c))
        sees = torch.cat([seen[..., :places], near | left], -1)
        sees = sees.repeat_interleave(self.heads.group, 2).flatten(0, 1)
        # a row at padding sees nothing: it is given keys, against a division by zero, and zeroed later
        nothing = ~sees.any(-1, keepdim=True)
        y = nn.functional.scaled_dot_product_attention(
            fill(q).view(batch * n, c, heads, dim).transpose(1, 2),
            both(k),
            both(v),
            attn_mask=sees | nothing,
            scale=self.heads.scale,
            enable_gqa=True,
        )
        y = y.masked_fill(nothing, 0.0).transpose(1, 2).reshape(batch, n * c, heads, dim)
        return y[:, :length]

    def attention_weights(self, inputs: Inputs) -> Float[Tensor, "B H T T"]:
        """The T x T weights, row = query, from the definition: all scores at once, and each token's rank
        among those that have left before each query."""
        q, k = inputs.rotated()
        (batch, length), window, groups = q.shape[:2], self.options.window, self.heads.groups
        given = {"scale": self.heads.scale, "key_mask": inputs.key_mask}
        at = torch.arange(length, device=q.device)
        if self.options.choose == "random":
            place = at[None] if inputs.key_mask is None else inputs.key_mask.cumsum(1) - 1
            score = drawn(place, groups).transpose(1, 2).expand(batch, -1, -1)
        else:
            inside = at[:, None] - at < window
            score = sliding_window_weights(q, k, window=window, meta=self.options.sinks, **given) * inside
            score = score.unflatten(1, (groups, -1)).sum((2, 3)) * wide(inputs.v).norm(dim=-1).transpose(1, 2)
        real = torch.ones(batch, length, dtype=torch.bool, device=q.device)
        real = (real if inputs.key_mask is None else inputs.key_mask)[:, None]
        score = score.masked_fill(real & (real.cumsum(-1) <= self.options.sinks), torch.inf)
        score = score.masked_fill(~real, -torch.inf)
        own, other = score[..., None, :], score[..., :, None]
        above = (other > own) | ((other == own) & (at[:, None] < at))
        left = at[:, None] - at >= window  # [query, token]
        rank = torch.einsum("qo,bgoj->bgqj", left.double(), above.double())
        back = at[:, None] - at
        seen = (((back >= 0) & (back < window)) | (left & (rank < self.places))) & real[:, :, None]
        scores = torch.einsum("bthd,bihd->bhti", wide(q), wide(k).repeat_interleave(self.heads.group, 2))
        seen = seen.repeat_interleave(self.heads.group, 1)
        return (scores * self.heads.scale).masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
