"""Causal softmax attention over the last `window` positions and the first `meta` positions: definition,
blocked form, state.

Lizard Section 3.1 (sliding window attention with meta memory); Beltagy et al. 2020 without meta tokens.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from relinear_kernels.linear_attention_reference import _accumulate, blocks


class WindowState(NamedTuple):
    """The last R keys and values of a prefix, and its first M (`meta`) ones. Sizes never change; masks say
    what is filled.

    The first M places of `k` and `v` are those of meta keys. Behind them is a ring of R + 1 places: the
    oldest key at the ring's place `first`, newer ones behind it, and the place before it is free, so that a
    token can put its key there while the heads that share the ring still read all others. Nothing moves.
    Keys and values have the dtype in which they were given.
    """

    k: Float[Tensor, "B M+R+1 Hkv D"]
    v: Float[Tensor, "B M+R+1 Hkv D"]
    mask: Bool[Tensor, "B R+1"]  # of the ring
    first: Int[Tensor, " B"]
    meta_age: Tensor  # [B, M] int64: positions since the meta key was seen; -1 while it is not there yet


def window_state(batch, keys, groups, dim, *, meta=0, device=None, dtype=torch.float32) -> WindowState:
    """The state before the first token, remembering `keys` keys."""
    k, v = (torch.zeros(batch, meta + keys + 1, groups, dim, device=device, dtype=dtype) for _ in range(2))
    mask = torch.zeros(batch, keys + 1, device=device, dtype=torch.bool)
    first = torch.zeros(batch, device=device, dtype=torch.int32)
    return WindowState(k, v, mask, first, torch.full((batch, meta), -1, device=device))


def check_ring(state: WindowState, batch: int, keys: int, groups: int, dim: int, meta: int) -> None:
    """Raises ValueError unless the state holds so many keys and meta keys of these sizes."""
    shape, got, slots = [batch, keys, groups, dim], list(state.k.shape), state.meta_age.shape[1]
    got[1] -= slots + 1  # a place is free
    if got != shape or slots != meta:
        raise ValueError(f"the state must hold keys {shape} and {meta} meta keys; got {got}, {slots}")


def in_order(state: WindowState) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and mask ``[B, R, ...]`` of a window, oldest first."""
    places, meta = state.mask.shape[1], state.meta_age.shape[1]
    order = (state.first[:, None] + torch.arange(places - 1, device=state.k.device)) % places
    sequence = torch.arange(len(order), device=order.device)[:, None]
    return state.k[sequence, meta + order], state.v[sequence, meta + order], state.mask[sequence, order]


def extend(
    state: WindowState, k: Tensor, v: Tensor, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, WindowState]:
    """Keys, values and mask ``[B, R + T, ...]`` as a piece sees them, and the state after the piece, in the
    dtypes of k and v."""
    batch, length = k.shape[:2]
    new = key_mask if key_mask is not None else torch.ones(batch, length, dtype=torch.bool, device=k.device)
    old_k, old_v, old_mask = in_order(state)
    keys, values, mask = (
        torch.cat([old_k.to(k.dtype), k], 1),
        torch.cat([old_v.to(v.dtype), v], 1),
        torch.cat([old_mask, new], 1),
    )
    meta = state.meta_age.shape[1]
    meta_k, meta_v, age = state.k[:, :meta].to(k.dtype), state.v[:, :meta].to(v.dtype), state.meta_age
    if meta:
        # The first real tokens of each sequence, wherever padding put them: token number r of this piece
        # fills slot seen + r.
        seen = (age >= 0).sum(1)
        age = torch.where(age >= 0, age + length, age)
        slot = torch.where(
            new, seen[:, None] + new.cumsum(1) - 1, torch.full_like(new, meta, dtype=torch.long)
        ).clamp(max=meta)
        onto = torch.nn.functional.one_hot(slot, meta + 1)[..., :meta]  # [B, T, M]
        filled = onto.any(1)
        put = lambda old, x: torch.where(  # noqa: E731
            filled[..., None, None], torch.einsum("btm,bthd->bmhd", onto.to(x.dtype), x), old
        )
        meta_k, meta_v = put(meta_k, k), put(meta_v, v)
        since = torch.arange(length - 1, -1, -1, device=k.device)
        age = torch.where(filled, (onto * since[None, :, None]).sum(1), age)
    held = lambda first, x: torch.cat([first, x[:, length:], torch.zeros_like(x[:, :1])], 1)  # noqa: E731
    seen = nn.functional.pad(mask[:, length:], (0, 1))
    after = WindowState(held(meta_k, keys), held(meta_v, values), seen, torch.zeros_like(state.first), age)
    return keys, values, mask, after


def left(
    state: WindowState, k: Tensor, v: Tensor, key_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, WindowState]:
    """The keys and values ``[B, T, Hkv, D]`` that leave a ring without meta keys as those of a piece enter,
    which of them are real ``[B, T]``, and the ring after the piece."""
    length = k.shape[1]
    keys, values, mask, after = extend(state, k, v, key_mask)
    return keys[:, :length], values[:, :length], mask[:, :length], after


def begin(state: WindowState, k: Tensor, v: Tensor) -> WindowState:
    """The state after an unpadded piece that nothing precedes: `extend`'s, from the empty `state`, without a
    copy of all keys."""
    length, held, slots = k.shape[1], state.mask.shape[1] - 1, state.meta_age.shape[1]
    tail, meta = slice(max(length - held, 0), length), min(slots, length)
    alone = state._replace(k=state.k[:, slots:], v=state.v[:, slots:], meta_age=state.meta_age[:, :0])
    *_, after = extend(alone, k[:, tail], v[:, tail], None)
    put = lambda x, old, *ring: torch.cat([x[:, :meta], old[:, meta:slots].to(x.dtype), *ring], 1)  # noqa: E731
    age = torch.arange(length - 1, length - 1 - meta, -1, device=k.device).expand(k.shape[0], -1)
    return after._replace(
        k=put(k, state.k, after.k), v=put(v, state.v, after.v), meta_age=put(age, state.meta_age)
    )


def _blocks(length: int, window: int) -> tuple[int, int, int]:
    """Queries in a block, blocks, and the padding that fills the last one."""
    return blocks(length, max(window, 16))


def _near(mask: Tensor, c: int, window: int, pad: int) -> Tensor:
    """Which keys of its block's reach each query sees ``[B, N, C, C + w - 1]``: its own window, where it is
    real."""
    offset = (
        torch.arange(c + window - 1, device=mask.device)[None] - torch.arange(c, device=mask.device)[:, None]
    )
    near = (offset >= 0) & (offset < window)
    return near & nn.functional.pad(mask, (0, pad)).unfold(1, c + window - 1, c)[:, :, None]


def window_scores(q, keys, mask, window: int, scale: float) -> tuple[Tensor, int, int]:
    """Scores of each query against its own window, blocked: ``[B, Hkv, G, N, C, C + w - 1]``, -inf where not
    seen; (.., N, C).

    `keys` ends with the queries' own positions and starts window - 1 positions before the first query.
    """
    batch, length, heads, dim = q.shape
    groups = keys.shape[2]
    c, n, pad = _blocks(length, window)
    q = (
        nn.functional.pad(q * scale, (0, 0, 0, 0, 0, pad))
        .view(batch, n, c, groups, heads // groups, dim)
        .permute(0, 3, 4, 1, 2, 5)
    )
    k = window_blocks(nn.functional.pad(keys, (0, 0, 0, 0, 0, pad)), c, window)  # [B, N, Hkv, D, C + w - 1]
    scores = q @ k.permute(0, 2, 1, 3, 4).unsqueeze(2)
    # Added as a mask of -inf; filling in takes ten times as long on a CPU.
    unseen = torch.zeros((), device=q.device, dtype=q.dtype).masked_fill(
        ~_near(mask, c, window, pad), -torch.inf
    )
    return scores + unseen[:, None, None], n, c


def window_blocks(x: Tensor, c: int, window: int) -> Tensor:
    """Overlapping blocks of positions: ``[B, w - 1 + N C, Hkv, D] -> [B, N, Hkv, D, C + w - 1]`` (a view)."""
    return x.unfold(1, c + window - 1, c)


def window_values(p, values, n: int, c: int, window: int, length: int) -> Float[Tensor, "B T H D"]:
    """Blocked weights times the values of their window."""
    batch, groups, group = p.shape[:3]
    v = window_blocks(nn.functional.pad(values, (0, 0, 0, 0, 0, n * c - length)), c, window)
    out = p @ v.permute(0, 2, 1, 4, 3).unsqueeze(2)  # [B, Hkv, G, N, C, D]
    return out.permute(0, 3, 4, 1, 2, 5).reshape(batch, n * c, groups * group, -1)[:, :length]


def rows(x, n: int, c: int, length: int) -> Tensor:
    """Blocked per-query scalars ``[B, Hkv, G, N, C] -> [B, T, H]``."""
    return x.permute(0, 3, 4, 1, 2).reshape(x.shape[0], n * c, -1)[:, :length]


def _visible(length: int, window: int, meta: int, key_mask, device) -> Tensor:
    """Which key each query sees, ``[B or 1, T, T]``."""
    i = torch.arange(length, device=device)
    distance = i[:, None] - i[None]
    seen = ((distance >= 0) & (distance < window))[None]
    real = torch.ones(1, length, dtype=torch.bool, device=device) if key_mask is None else key_mask
    first = (real.cumsum(1) <= meta) & real  # the first `meta` real positions
    return (seen | (first[:, None] & (distance >= 0)[None])) & real[:, None]


def sliding_window_weights(
    q, k, *, window: int, meta: int = 0, scale: float | None = None, key_mask=None
) -> Float[Tensor, "B H T T"]:
    """The T x T matrix of window attention, row = query. The definition; quadratic in T. A row that sees
    nothing is zero."""
    q, k = _accumulate(q), _accumulate(k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bthd,bihd->bhti", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)) * scale
    seen = _visible(q.shape[1], window, meta, key_mask, q.device)[:, None]
    return scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)


def sliding_window_quadratic(q, k, v, **kwargs) -> Float[Tensor, "B T H D"]:
    """`sliding_window_weights` times v."""
    a = sliding_window_weights(q, k, **kwargs)
    return torch.einsum(
        "bhti,bihd->bthd", a, _accumulate(v).repeat_interleave(q.shape[2] // v.shape[2], 2)
    ).to(v.dtype)


def sliding_window_attention(
    q: Float[Tensor, "B T H D"],
    k: Float[Tensor, "B T Hkv D"],
    v: Float[Tensor, "B T Hkv D"],
    *,
    window: int,
    meta: int = 0,
    scale: float | None = None,
    key_mask: Bool[Tensor, "B T"] | None = None,
    initial_state: WindowState | None = None,
    return_state: bool = False,
):
    """Softmax over the union of the last `window` positions (the query's own included) and the first `meta`
    real positions.

    Linear in T: blocks of at least `window` queries against their own window. Padding (`key_mask` False) is
    never seen. Returns ``[B, T, H, D]`` in v's dtype, and the `WindowState` (window - 1 keys) after the piece
    if `return_state`.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1; got {window}")
    batch, length, heads, dim = q.shape
    groups, dtype = k.shape[2], v.dtype
    q, k = q.to(dtype), k.to(dtype)
    state = initial_state or window_state(
        batch, window - 1, groups, dim, meta=meta, device=q.device, dtype=dtype
    )
    keys, values, mask, after = extend(state, k, v, key_mask)
    c, n, pad = _blocks(length, window)
    seen = _near(mask, c, window, pad)  # [B, N, C, C + w - 1]
    q = nn.functional.pad(q, (0, 0, 0, 0, 0, pad)).view(batch, n, c, heads, dim)
    keys, values = (
        window_blocks(nn.functional.pad(x, (0, 0, 0, 0, 0, pad)), c, window).permute(0, 1, 2, 4, 3)
        for x in (keys, values)
    )
    if meta:
        # The meta keys stand in front of every block's own; those still inside the window are seen there,
        # once.
        age = after.meta_age - (length - 1)  # position of the first query minus that of the meta key
        distance = age[:, None] + torch.arange(n * c, device=q.device)[None, :, None]
        beyond = (after.meta_age[:, None] >= 0) & (distance >= window)
        seen = torch.cat([beyond.view(batch, n, c, meta), seen], -1)

        def front(m: Tensor, x: Tensor) -> Tensor:
            m = m[:, :meta].transpose(1, 2).unsqueeze(1)
            return torch.cat([m.expand(batch, n, groups, meta, dim), x], 3)

        keys, values = front(after.k, keys), front(after.v, values)
    # a row at padding sees nothing: it is given keys, against a division by zero, and zeroed later
    nothing = ~seen.any(-1, keepdim=True)
    out = nn.functional.scaled_dot_product_attention(
        q.transpose(2, 3).flatten(0, 1),
        keys.flatten(0, 1),
        values.flatten(0, 1),
        attn_mask=(seen | nothing).flatten(0, 1)[:, None],
        scale=dim**-0.5 if scale is None else scale,
        enable_gqa=True,
    )
    out = out.view(batch, n, heads, c, dim).transpose(2, 3).masked_fill(nothing[..., None], 0.0)
    out = out.reshape(batch, n * c, heads, dim)[:, :length]
    return (out, after) if return_state else out
