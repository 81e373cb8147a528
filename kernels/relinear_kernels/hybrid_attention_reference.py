"""LoLCATs' hybrid: softmax inside a sliding window, linear attention on everything older, one shared
denominator.

    y_t = (sum_{t-w<i<=t} g e^{s_ti - m_t} v_i + sum_{i<=t-w} (phi(q_t) . phi(k_i)) v_i) / (the same without
    v)

s = q k / sqrt(d), m_t = max of s over the window, g = `window_factor` per head. The maximum is part of the
function, not a numerical aid: the linear weights beside it are not shifted, so it must be exact and carry
gradient.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from relinear_kernels.features import ACTIVATIONS, exp
from relinear_kernels.linear_attention_reference import (
    LinearState,
    _accumulate,
    linear_attention_weights,
    linear_state,
    linear_sums,
    normaliser,
)
from relinear_kernels.sliding_window_attention_reference import (
    WindowState,
    _visible,
    extend,
    rows,
    window_scores,
    window_state,
    window_values,
)


class HybridState(NamedTuple):
    """A ring of the last w keys (those the linear part has not absorbed yet) and the linear state of
    everything older."""

    ring: WindowState
    linear: LinearState


def hybrid_state(
    batch, heads, groups, dim, features, *, window, device=None, dtype=torch.float32
) -> HybridState:
    """The state before the first token. `dtype` is that of keys and values."""
    ring = window_state(batch, window, groups, dim, device=device, dtype=dtype)
    return HybridState(ring, linear_state(batch, heads, features, dim, device, dtype))


def check_hybrid(feature: str, window: int) -> None:
    """Raises ValueError unless the hybrid has this map and a window of at least one position."""
    if feature not in ACTIVATIONS:
        raise ValueError(
            f"hybrid_attention takes bounded features ({', '.join(ACTIVATIONS)}): its sums share one scale;"
            f" got {feature!r}"
        )
    if window < 1:
        raise ValueError(f"window must be at least 1; got {window}")


def hybrid_attention_weights(
    q, k, w_q=None, w_k=None, *, feature="softmax_pm", window, window_factor, scale=None, key_mask=None
) -> Float[Tensor, "B H T T"]:
    """The T x T matrix of the hybrid, row = query. The definition; quadratic in T."""
    check_hybrid(feature, window)
    q, k = _accumulate(q), _accumulate(k)
    batch, length, heads, dim = q.shape
    scale = dim**-0.5 if scale is None else scale
    scores = torch.einsum("bthd,bihd->bhti", q, k.repeat_interleave(heads // k.shape[2], 2)) * scale
    near = _visible(length, window, 0, key_mask, q.device)[:, None]
    top = scores.masked_fill(~near, -torch.inf).amax(-1, keepdim=True)
    top = torch.where(top.isinf(), torch.zeros_like(top), top)
    soft = window_factor.to(q.dtype)[:, None, None] * (scores - top).masked_fill(~near, -torch.inf).exp()
    linear = linear_attention_weights(q, k, w_q, w_k, feature=feature, normalize=False, key_mask=key_mask)
    far = torch.ones(length, length, dtype=torch.bool, device=q.device).tril(-window)
    a = torch.where(far, linear, soft)
    return a / normaliser(a.sum(-1, keepdim=True))


def hybrid_attention_quadratic(q, k, v, *args, **kwargs) -> Float[Tensor, "B T H D"]:
    """`hybrid_attention_weights` times v."""
    a = hybrid_attention_weights(q, k, *args, **kwargs)
    return torch.einsum(
        "bhti,bihd->bthd", a, _accumulate(v).repeat_interleave(q.shape[2] // v.shape[2], 2)
    ).to(v.dtype)


def hybrid_attention(
    q: Float[Tensor, "B T H D"],
    k: Float[Tensor, "B T Hkv D"],
    v: Float[Tensor, "B T Hkv D"],
    w_q: Float[Tensor, "H D F"] | None = None,
    w_k: Float[Tensor, "M D F"] | None = None,
    *,
    feature: str = "softmax_pm",
    window: int,
    window_factor: Float[Tensor, " H"],
    scale: float | None = None,
    key_mask: Bool[Tensor, "B T"] | None = None,
    initial_state: HybridState | None = None,
    return_state: bool = False,
):
    """The hybrid over a piece of a sequence, linear in its length. A plain sliding window: no tiles, so a
    prefix never changes.

    Returns ``[B, T, H, D]`` in v's dtype, and the `HybridState` after the piece if `return_state`.
    """
    check_hybrid(feature, window)
    dtype, (batch, length, _, dim), groups = v.dtype, q.shape, k.shape[2]
    scale = dim**-0.5 if scale is None else scale
    ring = (
        window_state(batch, window, groups, dim, device=q.device, dtype=dtype)
        if initial_state is None
        else initial_state.ring
    )
    keys, values, mask, ring = extend(ring, k, v, key_mask)
    q, keys, values = _accumulate(q), _accumulate(keys), _accumulate(values)
    scores, n, c = window_scores(q, keys[:, 1:], mask[:, 1:], window, scale)
    top = scores.amax(-1, keepdim=True)
    top = torch.where(top.isinf(), torch.zeros_like(top), top)
    p = exp(scores - top) * window_factor.to(q.dtype).view(1, groups, -1, 1, 1, 1)
    near, near_den = window_values(p, values[:, 1:], n, c, window, length), rows(p.sum(-1), n, c, length)
    # The key that leaves the window at step t is the one w positions back: linear attention over the keys
    # delayed by w.
    far, far_den, linear = linear_sums(
        q, keys[:, :length], values[:, :length], w_q, w_k, feature=feature, key_mask=mask[:, :length],
        initial_state=None if initial_state is None else initial_state.linear,
    )  # fmt: skip
    out = ((near + far) / normaliser(near_den + far_den)[..., None]).to(dtype)
    return (out, HybridState(ring, linear)) if return_state else out
