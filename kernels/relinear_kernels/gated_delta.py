"""The public `gated_delta`: the Triton kernels for CUDA tensors, the chunked torch form elsewhere."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from relinear_kernels import gated_delta_reference as reference
from relinear_kernels.decode_step_reference import delta_step
from relinear_kernels.dispatch import (
    one_token,
    path,
    per_sequence,
    steps_on_cpu,
    takes,
    use_triton,
    wrong_dtypes,
    wrong_widths,
)
from relinear_kernels.gated_delta_reference import DeltaState


def gated_delta(
    q: Float[Tensor, "B T H Dk"],
    k: Float[Tensor, "B T M Dk"],
    v: Float[Tensor, "B T G Dv"],
    *,
    log_decay: Float[Tensor, "..."] | None = None,
    erase: Float[Tensor, "..."] | None = None,
    write: Float[Tensor, "B T M"] | None = None,
    scale: float | None = None,
    key_mask: Bool[Tensor, "B T"] | None = None,
    initial_state: DeltaState | None = None,
    return_state: bool = False,
    cu_seqlens: Int[Tensor, " S"] | None = None,
):
    """The gated delta rule, and linear attention with a decay, linear in the length of the piece.

        S <- diag(exp g_t) S,   u_t = w_t v_t - S^T (e_t * k_t),   S <- S + k_t u_t^T,   o_t = scale S^T q_t

    There is a state for each key head: M divides the H query heads, and G value heads divide M. `log_decay` g
    (<= 0; None: 0) is [M], [B, T, M] or, for each channel of the key, [B, T, M, Dk]; `erase` e (None: 0: old
    values stay) is [B, T, M] or [B, T, M, Dk]; `write` w (None: 1) is [B, T, M]. `scale` is Dk^-1/2 unless
    given. Keys where `key_mask` is False (padding) neither write nor let the state fade. `cu_seqlens` marks
    the sequences of a packed row (B = 1), each of which begins with a state of its own. Returns ``[B, T, H,
    Dv]`` in v's dtype, and the `DeltaState` after the piece, in float32, if `return_state`. One token is a
    step, which on a CPU overwrites the state if no gradient is asked for. Where the kernels do not take the
    arguments, the torch form runs and a warning says why; with RELINEAR_KERNELS=triton that is a ValueError.
    """
    options = {"scale": scale, "return_state": return_state}
    tokens = {"q": q, "k": k, "v": v, "log_decay": log_decay, "erase": erase, "write": write}
    reference.check_shapes(**tokens)
    tokens["key_mask"] = key_mask
    one = q.shape[1] == 1
    if (
        not one
        and use_triton(q)
        and takes(
            "gated_delta",
            wrong_dtypes((torch.bfloat16, torch.float32), q=q, k=k, v=v),
            wrong_widths(q=q, k=k, v=v),
            None if erase is None or erase.dim() == 3 else f"an erase of each state; got {list(erase.shape)}",
        )
    ):
        from relinear_kernels.gated_delta_triton import gated_delta as fused

        return fused(**tokens, initial_state=initial_state, cu_seqlens=cu_seqlens, **options)
    if steps_on_cpu(q, one_token(initial_state, return_state, cu_seqlens, *tokens.values())):
        return delta_step(**tokens, state=initial_state, scale=scale)
    form = reference.gated_delta_recurrent if one or path() == "reference" else reference.gated_delta
    if cu_seqlens is None:
        return form(**tokens, initial_state=initial_state, **options)
    if log_decay is not None and log_decay.dim() == 1:
        tokens["log_decay"] = log_decay.expand(*k.shape[:3])
    return per_sequence(form, cu_seqlens, tokens, options, initial_state)
