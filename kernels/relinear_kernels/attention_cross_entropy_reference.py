"""Cross-entropy of linear-attention weights against softmax ones: its definition (quadratic), which is also
its torch form.

    loss_i = - sum_{j<=i} p_ij log max(w_ij, 1e-12),   p = softmax(scale q k^T),   w_ij = phi_q_i . phi_k_j /
    sum_j phi_q_i . phi_k_j

Hedgehog Eq. 4; LoLCATs Eq. 7. The teacher p is a target: it has no gradient.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from relinear_kernels.linear_attention_reference import _accumulate, linear_attention_weights
from relinear_kernels.sliding_window_attention_reference import sliding_window_weights

# the least weight, of weights that sum to 1: with ReLU features a weight can be zero where the teacher's is
# not
FLOOR = 1e-12


def softmax_weights(
    q: Float[Tensor, "B T H D"],
    k: Float[Tensor, "B T Hkv D"],
    *,
    scale: float,
    window: int | None = None,
    key_mask=None,
    causal: bool = True,
) -> Float[Tensor, "B H T T"]:
    """The weights of softmax attention, row = query; `window` is of causal ones. A row that sees nothing is
    zero."""
    if causal:
        return sliding_window_weights(
            q, k, window=q.shape[1] if window is None else window, scale=scale, key_mask=key_mask
        )
    scores = (
        torch.einsum(
            "bthd,bihd->bhti", _accumulate(q), _accumulate(k).repeat_interleave(q.shape[2] // k.shape[2], 2)
        )
        * scale
    )
    return (
        (scores if key_mask is None else scores.masked_fill(~key_mask[:, None, None], -torch.inf))
        .softmax(-1)
        .nan_to_num(0.0)
    )


def cross_entropy(
    target: Float[Tensor, "B H T T"], weights: Float[Tensor, "B H T T"]
) -> Float[Tensor, "B T H"]:
    """The cross-entropy of a method's explicit weights, row = query."""
    return -(target * weights.clamp(min=FLOOR).log()).sum(-1).transpose(1, 2)


def attention_cross_entropy(
    q: Float[Tensor, "B T H D"],
    k: Float[Tensor, "B T Hkv D"],
    phi_q: Float[Tensor, "B T H F"],
    phi_k: Float[Tensor, "B T H F"],
    log: bool = False,
    *,
    scale: float,
    window: int | None = None,
    key_mask: Bool[Tensor, "B T"] | None = None,
    causal: bool = True,
) -> Float[Tensor, "B T H"]:
    """One value per query and head, float32 (float64 of float64): `relinear_kernels.attention_cross_entropy`
    by its definition."""
    target = softmax_weights(
        q.detach(), k.detach(), scale=scale, window=window, key_mask=key_mask, causal=causal
    )
    weights = linear_attention_weights(
        phi_q, phi_k, feature="exp" if log else "none", key_mask=key_mask, causal=causal
    )
    return cross_entropy(target, weights)
