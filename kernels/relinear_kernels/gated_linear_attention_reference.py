"""Linear attention with a gate for every feature channel: its definition (quadratic) and its chunked form
(the CPU path).

    out_t = sum_{i<=t} sum_f phi_f(q_t) exp(G_tf - G_if) phi_f(k_i) v_i   / the same sum without v_i
    (normalize=True)

with G the running sum of ``log_gate``. Lizard Section 3.1; GLA (Yang et al. 2023). Lizard absorbs exp(G) into
q and exp(-G) into k, which overflows; relative to the middle of a block of `CHUNK` rows neither factor can,
if no gate falls below e^`FLOOR`. Gates that do count as e^`FLOOR`: older tokens then fade by 3e-4 instead.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from relinear_kernels.features import ACTIVATIONS, EXPONENTIAL, check_feature, exp
from relinear_kernels.linear_attention_reference import (
    LinearState,
    _accumulate,
    _features,
    blocks,
    check_sums,
    linear_state,
    normaliser,
    per_query_head,
    per_state_head,
    state_heads,
)

CHUNK = 16
FLOOR = -8.0  # CHUNK / 2 of them are e^64, within the range of float32 and bfloat16


def check_gated(feature: str) -> None:
    """Raises ValueError unless `feature` is a map the gated op takes."""
    if check_feature(feature) in EXPONENTIAL:
        raise ValueError(
            f"gated_linear_attention takes the features {', '.join(ACTIVATIONS)}; got {feature!r}"
        )


def check_gate(log_gate: Tensor, batch: int, length: int, heads: int, w_k: Tensor | None, width: int) -> None:
    """Raises ValueError unless there is one gate per token, state and channel."""
    states = state_heads(w_k, heads)
    if log_gate.shape != (batch, length, states, width):
        name = "H" if states == heads else "Hkv"
        raise ValueError(
            f"log_gate must be [B={batch}, T={length}, {name}={states}, F={width}]; got"
            f" {list(log_gate.shape)}"
        )


def _gates(log_gate: Tensor, heads: int, feature: str, dtype) -> Float[Tensor, "B H T F"]:
    """The gate of every feature: both signs of a channel share theirs."""
    g = per_query_head(log_gate.to(dtype).clamp(min=FLOOR).transpose(1, 2), heads)
    return torch.cat([g, g], -1) if feature.endswith("_pm") else g


def gated_linear_attention_weights(
    q,
    k,
    w_q=None,
    w_k=None,
    *,
    log_gate,
    feature="softmax_pm",
    b_q=None,
    b_k=None,
    normalize=True,
    key_mask=None,
) -> Float[Tensor, "B H T T"]:
    """The T x T matrix gated linear attention implies, row = query. The definition; quadratic in T."""
    check_gated(feature)
    q, k = _accumulate(q), _accumulate(k)
    batch, length, heads, dim = q.shape
    check_gate(log_gate, batch, length, heads, w_k, dim if w_q is None else w_q.shape[-1])
    phi_q, phi_k, _ = _features(q, k, w_q, w_k, b_q, b_k, feature, key_mask, length, None)
    g = _gates(log_gate, heads, feature, q.dtype).cumsum(2)
    rows = []
    for t in range(length):  # exp(G_t - G_i) for i <= t: nothing above 1 is ever formed
        seen = phi_k[:, :, : t + 1] * (g[:, :, t : t + 1] - g[:, :, : t + 1]).exp()
        rows.append(nn.functional.pad((phi_q[:, :, t, None] * seen).sum(-1), (0, length - 1 - t)))
    a = torch.stack(rows, 2)
    return a / normaliser(a.sum(-1, keepdim=True)) if normalize else a


def gated_linear_attention_quadratic(q, k, v, *args, **kwargs) -> Float[Tensor, "B T H D"]:
    """`gated_linear_attention_weights` times v."""
    a = gated_linear_attention_weights(q, k, *args, **kwargs)
    return torch.einsum(
        "bhti,bihd->bthd", a, _accumulate(v).repeat_interleave(q.shape[2] // v.shape[2], 2)
    ).to(v.dtype)


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
):
    """Gated linear attention over a piece of a sequence, in time and memory linear in its length.

    Returns ``[B, T, H, Dv]`` in v's dtype, and the `LinearState` after the piece if `return_state`.
    """
    check_gated(feature)
    check_sums(initial_state)
    dtype, (batch, length, heads, dim) = v.dtype, q.shape
    check_gate(log_gate, batch, length, heads, w_k, dim if w_q is None else w_q.shape[-1])
    groups, value_dim = v.shape[2:]
    q, k, v = _accumulate(q), _accumulate(k), _accumulate(v)
    chunk, n, pad = blocks(length, CHUNK)
    real = torch.ones(batch, length, dtype=torch.bool, device=q.device) if key_mask is None else key_mask
    q, k, v, log_gate = (nn.functional.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q, k, v, log_gate))
    phi_q, phi_k, _ = _features(
        q, k, w_q, w_k, b_q, b_k, feature, nn.functional.pad(real, (0, pad)), chunk, None
    )
    g = _gates(log_gate, heads, feature, q.dtype)
    phi_q, phi_k, g = (x.unflatten(2, (n, chunk)) for x in (phi_q, phi_k, g))  # [B, H, N, C, F]
    v = v.transpose(1, 2).repeat_interleave(heads // groups, 1).unflatten(2, (n, chunk))
    g = g.cumsum(3)
    middle, last = g[:, :, :, (chunk - 1) // 2, None], g[:, :, :, -1:]
    # Pairs above the diagonal can overflow: they are dropped, never multiplied by zero.
    inside = ((phi_q * exp(g - middle)) @ (phi_k * exp(middle - g)).transpose(-1, -2)).tril()
    phi_q, phi_k, carry = phi_q * exp(g), phi_k * exp(last - g), exp(last[:, :, :, 0]).unbind(2)
    # one tensor a chunk, as in `linear_sums`
    added, added_z = (phi_k.transpose(-1, -2) @ v).unbind(2), phi_k.sum(-2).unbind(2)
    state = per_query_head(initial_state, heads) or linear_state(
        batch, heads, phi_q.shape[-1], value_dim, q.device, q.dtype
    )
    kv, z, entering, entering_z = state.kv.to(q.dtype), state.z.to(q.dtype), [], []
    for i in range(n):
        entering.append(kv)
        entering_z.append(z)
        kv, z = kv * carry[i][..., None] + added[i], z * carry[i] + added_z[i]
    out = inside @ v + phi_q @ torch.stack(entering, 2)
    if normalize:
        den = inside.sum(-1) + (phi_q @ torch.stack(entering_z, 2)[..., None])[..., 0]
        out = out / normaliser(den)[..., None]
    out = out.flatten(2, 3).transpose(1, 2)[:, :length].to(dtype)
    return (
        (out, per_state_head(LinearState(kv, z, state.shift), state_heads(w_k, heads)))
        if return_state
        else out
    )
