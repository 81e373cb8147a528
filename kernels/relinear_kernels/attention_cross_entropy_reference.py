"""Cross-entropy of linear-attention weights against softmax ones: its definition (quadratic), which is also its torch form.

    loss_i = - sum_{j<=i} p_ij log max(w_ij, 1e-12),   p = softmax(scale q k^T),   w_ij = phi_q_i . phi_k_j / max(sum_j phi_q_i . phi_k_j, eps)

Hedgehog Eq. 4; LoLCATs Eq. 7. The teacher p is a target: it has no gradient.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from relinear_kernels.linear_attention_reference import EPS, linear_attention_weights
from relinear_kernels.sliding_window_attention_reference import sliding_window_weights

FLOOR = 1e-12  # a weight is never smaller: with ReLU features it can be zero where the teacher's is not


def cross_entropy(target: Float[Tensor, "B H T T"], weights: Float[Tensor, "B H T T"]) -> Float[Tensor, "B T H"]:
    """That of explicit weights, row = query, of any method."""
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
    eps: float = EPS,
) -> Float[Tensor, "B T H"]:
    """One value per query and head, float32 (float64 of float64): `relinear_kernels.attention_cross_entropy` by its definition."""
    window = q.shape[1] if window is None else window
    target = sliding_window_weights(q.detach(), k.detach(), window=window, scale=scale, key_mask=key_mask)
    return cross_entropy(target, linear_attention_weights(phi_q, phi_k, feature="exp" if log else "none", key_mask=key_mask, eps=eps))
