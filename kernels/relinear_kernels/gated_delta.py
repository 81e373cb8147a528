"""The public `gated_delta`: the chunked torch form."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from relinear_kernels import gated_delta_reference as reference
from relinear_kernels.dispatch import path, per_sequence
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
    Dv]`` in v's dtype, and the `DeltaState` after the piece, in float32, if `return_state`.
    """
    options = {"scale": scale, "return_state": return_state}
    # one token has no chunk; the definition is its fastest form
    form = (
        reference.gated_delta_recurrent if path() == "reference" or q.shape[1] == 1 else reference.gated_delta
    )
    tokens = {"q": q, "k": k, "v": v, "log_decay": log_decay, "erase": erase, "write": write}
    if cu_seqlens is None:
        return form(**tokens, key_mask=key_mask, initial_state=initial_state, **options)
    reference.check_shapes(**tokens)
    if log_decay is not None and log_decay.dim() == 1:
        tokens["log_decay"] = log_decay.expand(*k.shape[:3])
    return per_sequence(form, cu_seqlens, tokens | {"key_mask": key_mask}, options, initial_state)
