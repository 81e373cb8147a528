"""The gated delta rule: its definition, token by token, its chunked form (the CPU path), and its weights.

    S <- diag(exp g_t) S                     decay: none, fixed, one a state, or one a channel
    u_t = w_t v_t - S^T (e_t * k_t)          write w, erase e: none, one a state, or one a channel
    S <- S + k_t u_t^T
    o_t = scale S^T q_t

with S ``[dk, dv]`` of each state. e = w: the delta rule (DeltaNet, Yang et al. 2024), with a decay of each
state Gated DeltaNet (2412.06464), of each channel Kimi Delta Attention (2510.26692). Without e: linear
attention with a decay (GLA, Mamba-2, Lightning). The queries of a group read the same state.

Decays are taken as exp of sums of log decays, never of differences of these, so that none exceeds 1, whatever
the decays are, -inf included.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from relinear_kernels.linear_attention_reference import _accumulate, blocks, pair_decay

CHUNK = 64  # a power of two


class DeltaState(NamedTuple):
    """The state after a prefix: its size is fixed from the first token on."""

    s: Float[Tensor, "B M Dk Dv"]  # in float32, or as it was given


def delta_state(
    batch: int, states: int, key_dim: int, value_dim: int, device=None, dtype=torch.float32
) -> DeltaState:
    """The state before the first token."""
    return DeltaState(torch.zeros(batch, states, key_dim, value_dim, device=device, dtype=dtype))


class Tokens(NamedTuple):
    """The arguments of the recurrence, a state and its group of queries apart, in the dtype of the sums."""

    q: Float[Tensor, "B M R T Dk"]  # times the scale
    k: Float[Tensor, "B M T Dk"]
    v: Float[Tensor, "B M T Dv"]
    decay: Float[Tensor, "B M T C"] | None  # C is 1 or Dk
    erase: Float[Tensor, "B M T C"] | None
    write: Float[Tensor, "B M T 1"] | None


def check_shapes(q, k, v, log_decay, erase, write) -> None:
    """Raises ValueError for heads that do not share evenly, or for a decay, an erase or a write of another
    shape than is possible."""
    batch, length, heads, dim = q.shape
    states, groups = k.shape[2], v.shape[2]
    if heads % states or states % groups or k.shape[-1] != dim:
        raise ValueError(
            "query heads must be a multiple of key heads, these of value heads, and queries as wide as keys;"
            f" got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )
    each, channel = (batch, length, states), (batch, length, states, dim)
    for name, x, possible in (
        ("log_decay", log_decay, ((states,), each, channel)),
        ("erase", erase, (each, channel)),
        ("write", write, (each,)),
    ):
        if x is not None and tuple(x.shape) not in possible:
            raise ValueError(
                f"{name} must be {' or '.join(str(list(shape)) for shape in possible)}; got {list(x.shape)}"
            )


def _tokens(q, k, v, log_decay, erase, write, scale, key_mask) -> Tokens:
    check_shapes(q, k, v, log_decay, erase, write)
    q, k, v = _accumulate(q), _accumulate(k), _accumulate(v)
    batch, length, heads, dim = q.shape
    states = k.shape[2]
    q = (q * (dim**-0.5 if scale is None else scale)).transpose(1, 2).unflatten(1, (states, heads // states))
    if log_decay is not None and log_decay.dim() == 1:
        log_decay = log_decay.expand(batch, length, states)

    def each(x: Tensor | None) -> Tensor | None:
        """``[B, T, M]`` or ``[B, T, M, C]`` as ``[B, M, T, C]``."""
        if x is None:
            return None
        x = x.to(q.dtype)
        return (x[..., None] if x.dim() == 3 else x).transpose(1, 2)

    decay = each(log_decay)
    if key_mask is not None:  # padding neither writes nor forgets
        k = k * key_mask[..., None, None]
        decay = None if decay is None else decay.masked_fill(~key_mask[:, None, :, None], 0.0)
    if v.shape[2] != states:
        v = v.repeat_interleave(states // v.shape[2], 2)
    return Tokens(q, k.transpose(1, 2), v.transpose(1, 2), decay, each(erase), each(write))


def _behind(g: Tensor) -> Tensor:
    """The sum of the log decays behind each row of a chunk ``[.., C, D]``, up to its end."""
    return nn.functional.pad(g[..., 1:, :].flip(-2).cumsum(-2).flip(-2), (0, 0, 0, 1))


def _faded_products(x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    """<x_i exp(g_j+1 + .. + g_i), y_j> for j <= i, else 0: ``[.., C, R, C]`` of R rows x ``[.., C, R, D]`` of
    each position, y and g ``[.., C, D]``, of C a power of two.

    All pairs of a row in a chunk's second half and a key in its first fade by way of the place between, so
    that one product takes them: the row has what follows that place, the key what precedes it. So do the
    halves of each half, and so on.
    """
    found, size = (x * y[..., None, :]).sum(-1)[..., None, :, None], 1  # [.., C, 1, R, 1]
    while size < x.shape[-3]:
        halves = lambda z, dim: z.unflatten(dim, (-1, 2, size)).unbind(dim - 1)  # noqa: E731, B023
        (_, rows), (keys, _), (before, after) = halves(x, -3), halves(y, -2), halves(g, -2)
        rows = rows * after.cumsum(-2).exp()[..., None, :]
        keys = keys * _behind(before).exp()
        cross = (rows.flatten(-3, -2) @ keys.transpose(-1, -2)).unflatten(-2, rows.shape[-3:-1])
        first, second = found.unflatten(-4, (-1, 2)).unbind(-4)
        found = torch.cat([nn.functional.pad(first, (0, size)), torch.cat([cross, second], -1)], -3)
        size *= 2
    return found.squeeze(-4)


def _start(t: Tokens, state: DeltaState | None) -> Tensor:
    if state is not None:
        return state.s.to(t.q.dtype)
    return t.q.new_zeros(*t.k.shape[:2], t.k.shape[-1], t.v.shape[-1])


def gated_delta_recurrent(
    q, k, v, *, log_decay=None, erase=None, write=None, scale=None, key_mask=None, initial_state=None,
    return_state=False,
):  # fmt: skip
    """The definition, token by token; arguments and results as `gated_delta` has them. Also the step of one
    token."""
    dtype = v.dtype
    t = _tokens(q, k, v, log_decay, erase, write, scale, key_mask)
    s, outputs = _start(t, initial_state), []
    rest = zip(*(x if x is None else x.unbind(-2) for x in t if x is not None), strict=True)
    there = [name for name, x in zip(Tokens._fields, t, strict=True) if x is not None]
    for parts in rest:
        now = dict(zip(there, parts, strict=True))  # [B, M, ..]
        if "decay" in now:
            s = s * now["decay"].exp()[..., None]
        u = now["v"] * now["write"] if "write" in now else now["v"]
        if "erase" in now:
            u = u - ((now["erase"] * now["k"])[..., None, :] @ s)[..., 0, :]
        s = s + now["k"][..., None] * u[..., None, :]
        outputs.append(now["q"] @ s)  # [B, M, R, Dv]
    out = torch.stack(outputs, 1).flatten(2, 3).to(dtype)
    return (out, DeltaState(s)) if return_state else out


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
):
    """The recurrence over a piece of a sequence, `CHUNK` tokens at a time, in time and memory linear in its
    length.

    Within a chunk, with gamma the decays summed up from its start:
        P_ij = <e_i k_i exp(gamma_i - gamma_j), k_j>, j < i
        U = (1 + P)^-1 (w V - (e K exp gamma) S_0)        rows of U are the u_t
        O = (Q exp gamma) S_0 + tril(<q_i exp(gamma_i - gamma_j), k_j>) U
        S_1 = exp(gamma_C) S_0 + (K exp(gamma_C - gamma))^T U
    Returns ``[B, T, H, Dv]`` in v's dtype, and the `DeltaState` after the piece if `return_state`.
    """
    dtype, length = v.dtype, q.shape[1]
    t = _tokens(q, k, v, log_decay, erase, write, scale, key_mask)
    by_channel = t.decay is not None and t.decay.shape[-1] > 1
    size, n, pad = blocks(length, CHUNK)
    if by_channel:  # which takes halves of halves
        size = 1 << (size - 1).bit_length()
        pad = n * size - length
    # positions behind the last have keys of zero and log decays of zero: they leave the state as it is
    q, k, v, g, e, w = (
        None if x is None else nn.functional.pad(x, (0, 0, 0, pad)).unflatten(-2, (n, size)) for x in t
    )
    if w is not None:
        v = v * w
    ek = None if e is None else k * e
    begun, kept, carry = q, k, None  # without a decay
    if by_channel:
        rows = q if ek is None else torch.cat([q, ek[:, :, None]], 2)
        found = _faded_products(rows.movedim(2, -2).contiguous(), k, g).movedim(-2, 2)
        reading, own = found[:, :, : q.shape[2]], found[:, :, -1]
        last = _behind(g).exp()
    elif g is not None:
        pairs = pair_decay(g[..., 0]).exp()  # [B, M, N, C, C]
        own = None if ek is None else (ek @ k.transpose(-1, -2)) * pairs
        reading = (q @ k[:, :, None].transpose(-1, -2)) * pairs[:, :, None]
        last = pairs[..., -1, :, None]
    else:
        own = None if ek is None else ek @ k.transpose(-1, -2)
        reading = q @ k[:, :, None].transpose(-1, -2)
    if g is not None:
        since = g.cumsum(-2).exp()  # [B, M, N, C, 1 or Dk]
        begun, kept = q * since[:, :, None], k * last
        ek = None if ek is None else ek * since
        carry = since[..., -1, :, None].unbind(2)
    if e is not None:
        u, ek = torch.linalg.solve_triangular(
            own.tril(-1) + torch.eye(size, dtype=own.dtype, device=own.device),
            torch.cat([v, ek], -1),
            upper=False,
            unitriangular=True,
        ).split([v.shape[-1], k.shape[-1]], -1)
        erasing = ek.unbind(2)
    else:
        u, erasing = v, None
    # one tensor a chunk: the backward of an index would write zeros of the whole
    kept, written = kept.transpose(-1, -2).unbind(2), u.unbind(2)
    s, entering, changes = _start(t, initial_state), [], []
    for i in range(n):
        entering.append(s)
        change = written[i] if erasing is None else written[i] - erasing[i] @ s
        changes.append(change)
        s = (s if carry is None else s * carry[i]) + kept[i] @ change
    out = reading.tril() @ torch.stack(changes, 2)[:, :, None] + begun @ torch.stack(entering, 2)[:, :, None]
    out = out.flatten(1, 2).flatten(2, 3).transpose(1, 2)[:, :length].to(dtype)
    return (out, DeltaState(s)) if return_state else out


def gated_delta_weights(
    q, k, *, log_decay=None, erase=None, write=None, scale=None, key_mask=None
) -> Float[Tensor, "B H T T"]:
    """The T x T matrix that the recurrence implies, row = query; its entries have either sign. Quadratic in
    T, and with an erase cubic.

    tril(<q_i exp(gamma_i - gamma_j), k_j>) (1 + P)^-1 diag(w), as in `gated_delta`, over the whole length.
    """
    batch, length, states, dim = k.shape
    t = _tokens(q, k, k, log_decay, erase, write, scale, key_mask)

    def rows(x: Tensor) -> Tensor:
        """<x_i exp(gamma_i - gamma_j), k_j> for j <= i, a row at a time: ``[.., T, T]``."""
        found, decays, keys = [], None, t.k if x.dim() == 4 else t.k[:, :, None]
        for i, one in enumerate(x.unbind(-2)):
            if t.decay is not None:  # those of the row before, and this token's
                g = t.decay[:, :, i : i + 1] if x.dim() == 4 else t.decay[:, :, None, i : i + 1]
                fresh = torch.zeros_like(g)
                decays = fresh if decays is None else torch.cat([decays + g, fresh], -2)
            seen = keys[..., : i + 1, :]
            seen = seen if decays is None else seen * decays.exp()
            found.append(nn.functional.pad((seen @ one[..., None])[..., 0], (0, length - 1 - i)))
        return torch.stack(found, -2)

    weights = rows(t.q)
    if t.erase is not None:
        own = rows(t.k * t.erase).tril(-1) + torch.eye(length, dtype=t.k.dtype, device=k.device)
        weights = torch.linalg.solve_triangular(
            own[:, :, None], weights, upper=False, left=False, unitriangular=True
        )
    if t.write is not None:
        weights = weights * t.write[:, :, None].transpose(-1, -2)
    return weights.flatten(1, 2).masked_fill(
        torch.zeros(batch, 1, 1, length, dtype=torch.bool, device=k.device)
        if key_mask is None
        else ~key_mask[:, None, None],
        0.0,
    )
