"""The public `gated_linear_attention`: the Triton kernels for CUDA tensors, the chunked torch form
elsewhere."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from relinear_kernels import gated_linear_attention_reference as reference
from relinear_kernels.decode_step_reference import linear_step
from relinear_kernels.dispatch import (
    DTYPES,
    FEATURES,
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
from relinear_kernels.linear_attention_reference import LinearState


def gated_linear_attention(
    q: Float[Tensor, "B T H D"],
    k: Float[Tensor, "B T Hkv D"],
    v: Float[Tensor, "B T Hkv Dv"],
    w_q: Float[Tensor, "H D F"] | None = None,
    w_k: Float[Tensor, "M D F"] | None = None,
    *,
    log_gate: Float[Tensor, "B T M F"],
    feature: str = "softmax_pm",
    b_q: Float[Tensor, "H F"] | None = None,
    b_k: Float[Tensor, "M F"] | None = None,
    normalize: bool = True,
    key_mask: Bool[Tensor, "B T"] | None = None,
    initial_state: LinearState | None = None,
    return_state: bool = False,
    cu_seqlens: Int[Tensor, " S"] | None = None,
):
    """Linear attention whose every feature channel fades by a gate of its own, linear in the length of the
    piece.

        out_t = sum_{i<=t} sum_f phi_f(q_t) exp(G_tf - G_if) phi_f(k_i) v_i   / the same sum without v_i
        (normalize=True)

    The keys' matrices are one a query head (M = H) or one a key head (M = Hkv); there is a state for each.
    `log_gate` is one value <= 0 per token, state and column of the feature matrices (F = D without them),
    shared by both signs of a two-sided map; G is its running sum; a value below -8 counts as -8. Features are
    bounded ones: softmax_pm, relu, elu, none. Keys where `key_mask` is False (padding) leave no trace; give
    them log_gate 0. `cu_seqlens` marks the sequences of a packed row (B = 1). Returns ``[B, T, H, Dv]`` in
    v's dtype, and the `LinearState` after the piece if `return_state`; a single token without gradients
    overwrites `initial_state` on a CPU and where the kernels run. Where they do not take the arguments, the
    torch form runs and a warning says why; with RELINEAR_KERNELS=triton that is a ValueError.
    """
    options = {"feature": feature, "b_q": b_q, "b_k": b_k, "normalize": normalize}
    reference.check_gated(feature)
    step = one_token(initial_state, return_state, cu_seqlens, q, k, v, w_q, w_k, b_q, b_k, log_gate)
    taken = DTYPES if step else (torch.bfloat16, torch.float32)  # faded keys leave the range of float16
    if use_triton(q) and takes(
        "gated_linear_attention",
        wrong_features(q, k, v, w_q, w_k, feature, FEATURES, taken),
        wrong_state(initial_state),
        wrong_packing(cu_seqlens, key_mask=key_mask),
    ):
        if step:
            from relinear_kernels.decode_step_triton import linear_step as fused_step

            return fused_step(
                q, k, v, w_q, w_k, log_gate=log_gate, key_mask=key_mask, state=initial_state, **options
            )
        from relinear_kernels.gated_linear_attention_triton import gated_linear_attention as fused

        return fused(
            q,
            k,
            v,
            w_q,
            w_k,
            log_gate=log_gate,
            key_mask=key_mask,
            initial_state=initial_state,
            return_state=return_state,
            cu_seqlens=cu_seqlens,
            **options,
        )
    if steps_on_cpu(q, step):
        return linear_step(
            q, k, v, w_q, w_k, log_gate=log_gate, key_mask=key_mask, state=initial_state, **options
        )
    if path() == "reference":
        stateless(
            "gated_linear_attention",
            initial_state=initial_state,
            return_state=return_state,
            cu_seqlens=cu_seqlens,
        )
        return reference.gated_linear_attention_quadratic(
            q, k, v, w_q, w_k, log_gate=log_gate, key_mask=key_mask, **options
        )
    options["return_state"] = return_state
    if cu_seqlens is None:
        return reference.gated_linear_attention(
            q, k, v, w_q, w_k, log_gate=log_gate, key_mask=key_mask, initial_state=initial_state, **options
        )  # fmt: skip
    tokens = {"q": q, "k": k, "v": v, "log_gate": log_gate, "key_mask": key_mask}
    return per_sequence(
        reference.gated_linear_attention,
        cu_seqlens,
        tokens,
        {"w_q": w_q, "w_k": w_k, **options},
        initial_state,
    )
