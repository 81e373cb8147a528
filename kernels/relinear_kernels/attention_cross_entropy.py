"""The public `attention_cross_entropy`: Triton kernels on CUDA, the quadratic definition elsewhere."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from relinear_kernels import attention_cross_entropy_reference as reference
from relinear_kernels.dispatch import takes, use_triton, wrong_dtypes, wrong_sizes, wrong_widths

COUNTS = (16, 32, 64, 128, 256)  # features that the kernels take


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
    """The cross-entropy of linear attention's weights to the softmax weights of q and k, in nats, of each
    query and head.

        - sum_{j<=i} p_ij log max(w_ij, 1e-12),   p = softmax(scale q k^T),   w_ij = phi_q_i . phi_k_j / sum_j
          phi_q_i . phi_k_j

    `window` bounds what the teacher's p sees (its own position included; None: all before), not w. Keys where
    `key_mask` is False (padding) are seen by neither; a row that sees nothing is zero. Gradients go to phi_q
    and phi_k (`linear_features`) alone; with `log` they are the features' logarithms, of any size. The
    kernels take memory linear in T, and no state on the host: they can be recorded in a CUDA graph. Their
    products of float32 numbers are tf32's, up to 1e-3 off each factor; with bfloat16 q and k (exact) that
    leaves some 1e-5 of the loss and 4e-4 of the gradients, with float32 ones 1e-4 and 2e-3 (tf32's truncation
    emulated, scores of order 1), and more the larger their scores. Not `causal`, the sums are over all j, by
    the quadratic definition on any device. Where the kernels do not take the arguments, the quadratic
    definition runs and a warning says why; with RELINEAR_KERNELS=triton that is a ValueError. Returns
    float32.
    """
    options = {"scale": scale, "window": window, "key_mask": key_mask}
    if (
        causal
        and use_triton(q)
        and takes(
            "attention_cross_entropy",
            wrong_dtypes(q=q, k=k),
            wrong_widths(q=q, k=k),
            _wrong_features(phi_q, phi_k),
            wrong_sizes(phi_q=phi_q, phi_k=phi_k),
        )
    ):
        from relinear_kernels.attention_cross_entropy_triton import attention_cross_entropy as fused

        return fused(q, k, phi_q, phi_k, log, **options)
    return reference.attention_cross_entropy(q, k, phi_q, phi_k, log, causal=causal, **options)


def _wrong_features(phi_q: Tensor, phi_k: Tensor) -> str | None:
    """What the kernels do not take of the features."""
    if phi_q.shape[-1] in COUNTS and phi_q.dtype == phi_k.dtype == torch.float32:
        return None
    return f"float32 features, {COUNTS} of them; got {phi_q.shape[-1]} of {phi_q.dtype}, {phi_k.dtype}"
