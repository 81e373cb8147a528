"""The public `hybrid_attention`: the Triton kernels for CUDA tensors, the chunked torch form elsewhere."""

from functools import partial

from jaxtyping import Bool, Float, Int
from torch import Tensor

from relinear_kernels import hybrid_attention_reference as reference
from relinear_kernels.decode_step_reference import hybrid_step
from relinear_kernels.dispatch import (
    one_token,
    path,
    per_sequence,
    stateless,
    steps_on_cpu,
    takes,
    use_triton,
    wrong_features,
    wrong_packing,
    wrong_state,
)  # fmt: skip
from relinear_kernels.hybrid_attention_reference import HybridState
from relinear_kernels.sliding_window_attention_reference import window_state


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
    cu_seqlens: Int[Tensor, " S"] | None = None,
):
    """LoLCATs' hybrid over a piece of a sequence, linear in its length: softmax within `window`, linear
    attention beyond it.

    A plain sliding window: no tiles, so a prefix never changes. The keys' matrices are one a query head (M =
    H) or one a key head (M = Hkv); there is a linear state for each. `cu_seqlens` marks the sequences of a
    packed row (B = 1). Returns ``[B, T, H, D]`` in v's dtype, and the `HybridState` after the piece if
    `return_state`; a single token without gradients overwrites `initial_state` on a CPU and where the kernels
    run. Where the kernels do not take the arguments, the torch form runs and a warning says why; with
    RELINEAR_KERNELS=triton that is a ValueError.
    """
    options = {"feature": feature, "window": window, "window_factor": window_factor, "scale": scale}
    reference.check_hybrid(feature, window)
    step = one_token(initial_state, return_state, cu_seqlens, q, k, v, w_q, w_k, window_factor)
    if use_triton(q) and takes(
        "hybrid_attention",
        wrong_features(q, k, v, w_q, w_k, feature),
        wrong_state(initial_state and initial_state.linear),
        wrong_packing(cu_seqlens, key_mask=key_mask, initial_state=initial_state, return_state=return_state),
    ):
        if step:
            from relinear_kernels.decode_step_triton import hybrid_step as fused_step

            return fused_step(q, k, v, w_q, w_k, key_mask=key_mask, state=initial_state, **options)
        from relinear_kernels.hybrid_attention_triton import hybrid_attention as fused

        ring = partial(window_state, q.shape[0], window, k.shape[2], k.shape[3], device=q.device)
        return fused(
            q,
            k,
            v,
            w_q,
            w_k,
            key_mask=key_mask,
            initial_state=initial_state,
            return_state=return_state,
            cu_seqlens=cu_seqlens,
            empty_ring=ring,
            **options,
        )
    if steps_on_cpu(q, step):
        return hybrid_step(q, k, v, w_q, w_k, key_mask=key_mask, state=initial_state, **options)
    if path() == "reference":
        stateless(
            "hybrid_attention", initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens
        )
        return reference.hybrid_attention_quadratic(q, k, v, w_q, w_k, key_mask=key_mask, **options)
    options["return_state"] = return_state
    if cu_seqlens is None:
        return reference.hybrid_attention(
            q, k, v, w_q, w_k, key_mask=key_mask, initial_state=initial_state, **options
        )
    tokens = {"q": q, "k": k, "v": v, "key_mask": key_mask}
    return per_sequence(
        reference.hybrid_attention, cu_seqlens, tokens, {"w_q": w_q, "w_k": w_k, **options}, initial_state
    )
