"""The public `sliding_window_attention`: the Triton kernels for CUDA tensors, the blocked torch form
elsewhere."""

from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from relinear_kernels import sliding_window_attention_reference as reference
from relinear_kernels.decode_step_reference import leave, window_step
from relinear_kernels.dispatch import (
    one_token,
    path,
    per_sequence,
    stateless,
    steps_on_cpu,
    takes,
    use_triton,
    wrong_dtypes,
    wrong_packing,
    wrong_widths,
)
from relinear_kernels.sliding_window_attention_reference import WindowState, window_state

META = 16  # the most meta tokens that the kernels of a whole piece take


def left(
    state: WindowState,
    k: Float[Tensor, "B T Hkv D"],
    v: Float[Tensor, "B T Hkv D"],
    key_mask: Bool[Tensor, "B T"] | None = None,
) -> tuple[Tensor, Tensor, Tensor, WindowState]:
    """The keys and values that leave a ring as those of a piece enter, as the reference has it. A single
    token without gradients overwrites `state` on a CPU."""
    if not torch.is_grad_enabled() and steps_on_cpu(k, k.shape[1] == 1):
        return leave(state, k, v, key_mask)
    return reference.left(state, k, v, key_mask)


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
    cu_seqlens: Int[Tensor, " S"] | None = None,
):
    """Softmax over the union of the last `window` positions (the query's own included) and the first `meta`
    real positions.

    Time and memory are linear in T. Padding (`key_mask` False) is never seen; a row that sees nothing is
    zero. `cu_seqlens` marks the sequences of a packed row (B = 1). Returns ``[B, T, H, D]`` in v's dtype, and
    the `WindowState` (window - 1 keys) after the piece if `return_state`; a single token without gradients
    overwrites `initial_state` on a CPU and where the kernels run. Where the kernels do not take the
    arguments, the torch form runs and a warning says why; with RELINEAR_KERNELS=triton that is a ValueError.
    """
    options = {"window": window, "meta": meta, "scale": scale}
    step = one_token(initial_state, return_state, cu_seqlens, q, k, v)
    if use_triton(q) and takes(
        "sliding_window_attention",
        None if step or meta <= META else f"at most {META} meta tokens; got {meta}",
        wrong_dtypes(q=q, k=k, v=v),
        wrong_widths(q=q, k=k, v=v),
        wrong_packing(cu_seqlens, key_mask=key_mask, initial_state=initial_state, return_state=return_state),
    ):
        if step:
            from relinear_kernels.decode_step_triton import window_step as fused_step

            return fused_step(q, k, v, key_mask=key_mask, state=initial_state, **options)
        from relinear_kernels.sliding_window_attention_triton import sliding_window_attention as fused

        empty = partial(
            window_state, q.shape[0], window - 1, k.shape[2], k.shape[3], meta=meta, device=q.device
        )
        return fused(
            q,
            k,
            v,
            key_mask=key_mask,
            initial_state=initial_state,
            return_state=return_state,
            cu_seqlens=cu_seqlens,
            empty_state=empty,
            **options,
        )
    if steps_on_cpu(q, step):
        return window_step(q, k, v, key_mask=key_mask, state=initial_state, **options)
    if path() == "reference":
        given = {"initial_state": initial_state, "return_state": return_state, "cu_seqlens": cu_seqlens}
        stateless("sliding_window_attention", **given)
        return reference.sliding_window_quadratic(q, k, v, key_mask=key_mask, **options)
    options["return_state"] = return_state
    if cu_seqlens is None:
        return reference.sliding_window_attention(
            q, k, v, key_mask=key_mask, initial_state=initial_state, **options
        )
    tokens = {"q": q, "k": k, "v": v, "key_mask": key_mask}
    return per_sequence(reference.sliding_window_attention, cu_seqlens, tokens, options, initial_state)
