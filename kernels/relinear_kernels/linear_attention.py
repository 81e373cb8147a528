"""The public `linear_attention`: the Triton kernels for CUDA tensors, the chunked torch form elsewhere."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from relinear_kernels import linear_attention_reference as reference
from relinear_kernels.decode_step_reference import linear_step
from relinear_kernels.dispatch import (
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
from relinear_kernels.features import EXPONENTIAL, check_feature
from relinear_kernels.linear_attention_reference import CHUNK, LinearState


def linear_attention(
    q: Float[Tensor, "B T H D"],
    k: Float[Tensor, "B T Hkv D"],
    v: Float[Tensor, "B T Hkv Dv"],
    w_q: Float[Tensor, "H D F"] | None = None,
    w_k: Float[Tensor, "M D F"] | None = None,
    *,
    feature: str = "softmax_pm",
    b_q: Float[Tensor, "H F"] | None = None,
    b_k: Float[Tensor, "M F"] | None = None,
    log_decay: Tensor | None = None,
    normalize: bool = True,
    key_mask: Bool[Tensor, "B T"] | None = None,
    causal: bool = True,
    initial_state: LinearState | None = None,
    return_state: bool = False,
    cu_seqlens: Int[Tensor, " S"] | None = None,
    chunk: int = CHUNK,
):
    """Linear attention over a piece of a sequence, in time and memory linear in its length.

        out_t = sum_{i<=t} exp(G_t - G_i) (phi(q_t) . phi(k_i)) v_i   / the same sum without v_i
        (normalize=True; 1 where that is zero)

    The keys' matrices are one a query head (M = H) or one a key head (M = Hkv); there is a state for each.
    `log_decay` is None, one value per state ``[M]`` (SUPRA) or one per token and state ``[B, T, M]``
    (Lizard's gate); G its running sum. Keys where `key_mask` is False (padding) leave no trace; give them
    log_decay 0. `cu_seqlens` marks the sequences of a packed row (B = 1); the state then has one row per
    sequence. Not `causal`, every query sees all keys of its sequence: no decay, no state (None in its place),
    no packed rows, and torch's products on any device. Returns ``[B, T, H, Dv]`` in v's dtype, and the
    `LinearState` after the piece if `return_state`; a single token without gradients overwrites
    `initial_state` on a CPU and where the kernels run (there not with exponential features, whose reference
    moves with it).
    `chunk` is the torch form's. Where the kernels do not take the arguments, the torch form runs and a
    warning says why; with RELINEAR_KERNELS=triton that is a ValueError.
    """
    options = {"feature": feature, "b_q": b_q, "b_k": b_k, "normalize": normalize}
    if not causal:
        reference.check_causal(
            causal, log_decay=log_decay, initial_state=initial_state, cu_seqlens=cu_seqlens
        )
        if path() == "reference":
            stateless("linear_attention", return_state=return_state)
            return reference.linear_attention_quadratic(
                q, k, v, w_q, w_k, causal=False, key_mask=key_mask, **options
            )
        return reference.linear_attention(
            q, k, v, w_q, w_k, causal=False, key_mask=key_mask, return_state=return_state, **options
        )
    step = one_token(initial_state, return_state, cu_seqlens, q, k, v, w_q, w_k, b_q, b_k, log_decay)
    if use_triton(q) and takes(
        "linear_attention",
        wrong_features(q, k, v, w_q, w_k, check_feature(feature), (*FEATURES, *EXPONENTIAL)),
        wrong_state(initial_state),
        wrong_packing(cu_seqlens, key_mask=key_mask),
    ):
        if k.shape[2] != v.shape[2]:  # a map made keys of every query head, and they share values
            v = v.repeat_interleave(k.shape[2] // v.shape[2], 2)
        if step and feature not in EXPONENTIAL:
            from relinear_kernels.decode_step_triton import linear_step as fused_step

            return fused_step(
                q, k, v, w_q, w_k, log_decay=log_decay, key_mask=key_mask, state=initial_state, **options
            )
        from relinear_kernels.linear_attention_triton import linear_attention as fused

        return fused(
            q,
            k,
            v,
            w_q,
            w_k,
            log_decay=log_decay,
            key_mask=key_mask,
            initial_state=initial_state,
            return_state=return_state,
            cu_seqlens=cu_seqlens,
            **options,
        )
    if steps_on_cpu(q, step):
        return linear_step(
            q, k, v, w_q, w_k, log_decay=log_decay, key_mask=key_mask, state=initial_state, **options
        )
    if path() == "reference":
        stateless(
            "linear_attention", initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens
        )
        return reference.linear_attention_quadratic(
            q, k, v, w_q, w_k, log_decay=log_decay, key_mask=key_mask, **options
        )
    options |= {"return_state": return_state, "chunk": chunk}
    if cu_seqlens is None:
        return reference.linear_attention(
            q, k, v, w_q, w_k, log_decay=log_decay, key_mask=key_mask, initial_state=initial_state, **options
        )  # fmt: skip
    gates = log_decay if log_decay is not None and log_decay.ndim == 3 else None
    fixed = {} if gates is not None else {"log_decay": log_decay}
    tokens = {"q": q, "k": k, "v": v, "key_mask": key_mask} | ({} if gates is None else {"log_decay": gates})
    return per_sequence(
        reference.linear_attention,
        cu_seqlens,
        tokens,
        {"w_q": w_q, "w_k": w_k, **options, **fixed},
        initial_state,
    )
