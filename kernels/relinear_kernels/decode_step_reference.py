"""One token of each op in torch, on a CPU: the state is read where it lies and updated in place.

A step is a handful of products of one row, so its time is the number of its operators. What says where a ring
begins, and whether all of it is filled, is read by Python, which then needs no operators on such numbers.
"""

import functools

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, threshold

from relinear_kernels.features import ACTIVATIONS, EXPONENTIAL, FLOOR, check_feature, check_map
from relinear_kernels.gated_delta_reference import DeltaState
from relinear_kernels.gated_linear_attention_reference import FLOOR as LOWEST
from relinear_kernels.gated_linear_attention_reference import check_gate, check_gated
from relinear_kernels.hybrid_attention_reference import HybridState, check_hybrid
from relinear_kernels.linear_attention_reference import (
    LinearState,
    check_sums,
    every_decay,
    normaliser,
    state_heads,
)
from relinear_kernels.sliding_window_attention_reference import WindowState, check_ring


def decode_step(q, k, v, *, state, **options):
    """The output ``[B, 1, H, Dv]`` of one token and the state after it, in the memory of `state`."""
    return STEPS[type(state)](q, k, v, state=state, **options)


def _own(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of the state in `dtype` that may be written: one made in inference mode may not outside it."""
    if x.dtype != dtype:
        return x.to(dtype)
    return x.clone() if x.is_inference() and not torch.is_inference_mode_enabled() else x


@functools.cache
@torch.inference_mode(False)
def _signs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """1 and -1, by which a row becomes both halves of a map."""
    return torch.tensor([[1.0], [-1.0]], dtype=dtype, device=device)


@functools.cache
@torch.inference_mode(False)
def _shared(heads: int, groups: int, device: torch.device) -> Tensor:
    """The key head of each head."""
    return torch.arange(groups, device=device).repeat_interleave(heads // groups)


def _projected(x: Tensor, w: Tensor | None, b: Tensor | None, heads: int) -> Tensor:
    """x W + b of one token ``[B, 1, N, D]`` for each of W's heads, or of `heads` without W: ``[M, B, F]``."""
    states = heads if w is None else w.shape[0]
    x = x.squeeze(1).transpose(0, 1) if len(x) > 1 else x.reshape(-1, 1, x.shape[3])
    if x.shape[0] != states:
        x = x.index_select(0, _shared(states, x.shape[0], x.device))
    x = x if w is None else torch.bmm(x, w.to(x.dtype))
    return x if b is None else x + b.to(x.dtype)[:, None]


def _bounded(x: Tensor, feature: str) -> Tensor:
    """The activation of a bounded map."""
    if feature == "softmax_pm":
        return (x.unsqueeze(-2) * _signs(x.dtype, x.device)).softmax(-1).clamp_(min=FLOOR).flatten(-2)
    return ACTIVATIONS[feature](x)


def _filled(den: Tensor, feature: str) -> Tensor:
    """The `normaliser` of sums; in one operator where the features cannot be negative."""
    if feature == "none":
        return normaliser(den)
    dtype = torch.finfo(den.dtype)
    return threshold(den, dtype.tiny / dtype.eps, 1.0)


def _exponential(x: Tensor, y: Tensor, state: LinearState, real: Tensor | None, feature: str):
    """phi of queries and keys of an exponential map, held relative to the largest key of each feature so far;
    what the state had is rescaled in place where that is a new one."""
    x, y = (EXPONENTIAL[feature](z.transpose(0, 1)) for z in (x, y))
    if real is not None:
        y = y.masked_fill(~real[..., None], -torch.inf)
    top = torch.maximum(y, state.shift)
    anchor = top.masked_fill(top.isinf(), 0.0)
    # exp(-inf - anchor) = 0, and nothing is in a state that has no reference yet
    rescale = (state.shift - anchor).exp_()
    state.kv.mul_(rescale[..., None])
    state.z.mul_(rescale)
    state.shift.copy_(top)
    x = x.unflatten(1, (y.shape[1], -1)) + anchor[:, :, None]
    return (x - x.amax(-1, keepdim=True)).exp_().flatten(1, 2), (y - anchor).exp_()


def _linear_sums(q, k, v, w_q, w_k, b_q, b_k, state: LinearState, feature: str, real, fade, into=None):
    """Numerators ``[B M, R, Dv]``, those of `into` added, and phi(q) ``[B M, R, F]``. The state becomes that
    after the token.

    q ``[B, 1, H, D]`` and k ``[B, 1, N, D]`` in the state's dtype, v ``[B, 1, N, Dv]``; `fade` ``[B, M, 1 or
    F]``; `real` ``[B, 1]``.
    """
    batch, heads, states, groups = q.shape[0], q.shape[2], state_heads(w_k, q.shape[2]), v.shape[2]
    x, y = _projected(q, w_q, b_q, heads), _projected(k, w_k, b_k, heads)
    if feature in EXPONENTIAL:
        phi_q, phi_k = _exponential(x, y, state, real, feature)
    else:
        both = _bounded(torch.cat([x, y]), feature).transpose(0, 1)
        phi_q, phi_k = both.split([heads, states], 1)
        if real is not None:
            phi_k = phi_k * real[..., None]
    features, dim = state.kv.shape[2:]
    if fade is None:
        state.z.add_(phi_k)
    else:
        state.kv.mul_(fade[..., None])
        torch.addcmul(phi_k, state.z, fade, out=state.z)
    state.kv.view(batch, groups, -1, features, dim).addcmul_(
        phi_k.reshape(batch, groups, -1, features, 1), v.reshape(batch, groups, 1, 1, dim)
    )
    phi_q = phi_q.reshape(batch * states, -1, features)
    kv = state.kv.view(batch * states, features, dim)
    return torch.bmm(phi_q, kv) if into is None else torch.baddbmm(into, phi_q, kv), phi_q


def _token(q, k, v, w_q=None, w_k=None, b_q=None, b_k=None) -> torch.dtype:
    """The dtype in which sums are taken. Raises ValueError for heads that do not fit together."""
    heads, groups = q.shape[2], k.shape[2]
    if heads % groups:
        raise ValueError(
            f"query heads must be a multiple of key heads; got {heads} query heads and {groups} key heads"
        )
    check_map(w_q, b_q, heads, heads, q.shape[3])
    check_map(w_k, b_k, heads, groups, k.shape[3])
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _linear_state(state: LinearState, dtype: torch.dtype, shape: tuple[int, ...]) -> LinearState:
    """The state as it can be written. Raises ValueError unless it is of this shape, and at least float32."""
    check_sums(state)
    if state.kv.shape != shape:
        raise ValueError(f"the state must be {list(shape)}; got {list(state.kv.shape)}")
    return LinearState(*(_own(x, dtype) for x in state))


def _width(x: Tensor, w: Tensor | None, feature: str) -> int:
    """The number of features."""
    return (x.shape[-1] if w is None else w.shape[-1]) * (2 if feature.endswith("_pm") else 1)


def linear_step(
    q,
    k,
    v,
    w_q=None,
    w_k=None,
    *,
    state: LinearState,
    feature="softmax_pm",
    b_q=None,
    b_k=None,
    log_decay=None,
    log_gate=None,
    normalize=True,
    key_mask=None,
):
    """`decode_step` of linear attention, plain or gated. Raises ValueError for shapes that do not fit
    together."""
    check_feature(feature) if log_gate is None else check_gated(feature)
    dtype, (batch, _, heads, _) = _token(q, k, v, w_q, w_k, b_q, b_k), q.shape
    states = state_heads(w_k, heads)
    state = _linear_state(state, dtype, (batch, states, _width(q, w_q, feature), v.shape[-1]))
    fade = None
    if log_decay is not None:
        fade = every_decay(log_decay, batch, 1, heads, states).to(dtype).exp().view(batch, states, 1)
    if log_gate is not None:
        check_gate(log_gate, batch, 1, heads, w_k, q.shape[-1] if w_q is None else w_q.shape[-1])
        fade = log_gate.squeeze(1).to(dtype).clamp(min=LOWEST).exp()
        fade = torch.cat([fade, fade], -1) if feature.endswith("_pm") else fade
    maps = w_q, w_k, b_q, b_k
    num, phi_q = _linear_sums(q.to(dtype), k.to(dtype), v, *maps, state, feature, key_mask, fade)
    if normalize:
        num = num / _filled(torch.bmm(phi_q, state.z.view(*phi_q.shape[::2], 1)), feature)
    return num.view(batch, 1, heads, -1).to(v.dtype), state


def delta_step(
    q, k, v, *, state: DeltaState, log_decay=None, erase=None, write=None, scale=None, key_mask=None
):
    """One token of the gated delta rule: its output ``[B, 1, H, Dv]``, and the state after it, in the memory
    of `state` where that has the precision of the sums. Arguments are those of `gated_delta`, checked
    there."""
    (batch, _, heads, dim), states, out = q.shape, k.shape[2], v.dtype
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    s = _own(state.s, dtype)
    k, v = k.to(dtype), v.to(dtype)
    if v.shape[2] != states:
        v = v.index_select(2, _shared(states, v.shape[2], v.device))
    if key_mask is not None:  # padding neither writes nor forgets
        k = k * key_mask[..., None, None]
    if log_decay is not None:
        fade = log_decay.to(dtype).exp().reshape(-1, states, dim if log_decay.dim() == 4 else 1, 1)
        s.mul_(fade if key_mask is None else fade.masked_fill(~key_mask[..., None, None], 1.0))
    # a state and its token of each row: [B M, ..]
    each = s.view(batch * states, dim, -1)
    k, v = k.reshape(-1, dim, 1), v.reshape(batch * states, 1, -1)
    u = v if write is None else v * write.to(dtype).reshape(-1, 1, 1)
    if erase is not None:
        erased = k.mT * erase.to(dtype).reshape(batch * states, 1, -1)
        u = torch.baddbmm(u, erased, each, alpha=-1)
    each.addcmul_(k, u)
    o = torch.bmm(q.to(dtype).reshape(batch * states, -1, dim), each)
    o = o * (dim**-0.5 if scale is None else scale)
    return o.view(batch, 1, heads, -1).to(out), DeltaState(s)


def _ring(state: WindowState, k: Tensor, v: Tensor, keys: int, meta: int) -> tuple[WindowState, list[int]]:
    """The ring as it can be written, in the dtypes of k and v, and where each sequence's ring begins. Raises
    ValueError unless it holds so many keys and meta keys."""
    check_ring(state, k.shape[0], keys, *k.shape[2:], meta)
    dtypes = k.dtype, v.dtype, *(x.dtype for x in state[2:])
    return WindowState(*map(_own, state, dtypes)), state.first.tolist()


def _read(x: Tensor, places: list[int]) -> Tensor:
    """x ``[B, 1, ...]`` at a place of each sequence: a view where all have the same."""
    if len(set(places)) == 1:
        return x.narrow(1, places[0], 1)
    return x[torch.arange(len(places)), torch.tensor(places)].unsqueeze(1)


def _write(x: Tensor, places: list[int], new: Tensor | int) -> None:
    """Write ``[B, 1, ...]``, or one number, to a place of each sequence."""
    if len(set(places)) == 1:
        at = x.narrow(1, places[0], 1)
        at.copy_(new) if isinstance(new, Tensor) else at.fill_(new)
    else:
        at = torch.arange(len(places)), torch.tensor(places)
        x[at] = new.squeeze(1) if isinstance(new, Tensor) else new


def _put(ring: WindowState, k: Tensor, v: Tensor, key_mask: Tensor | None, firsts: list[int]) -> None:
    """Put a token into the free place; what is the oldest key now has the next free one."""
    size, meta = ring.mask.shape[1], ring.meta_age.shape[1]
    free = [(first - 1) % size for first in firsts]
    for held, new in ((ring.k, k), (ring.v, v)):
        _write(held, [meta + at for at in free], new)
    _write(ring.mask, free, True if key_mask is None else key_mask)
    ring.first.add_(1) if max(firsts) + 1 < size else ring.first.add_(1).remainder_(size)


def _meet(ring: WindowState, k: Tensor, v: Tensor, key_mask: Tensor | None) -> list[int]:
    """Count a token in the ages of meta keys, and keep its own where one is still to come. Returns all
    ages."""
    rows = ring.meta_age.tolist()
    if all(age >= 0 for row in rows for age in row):
        if ring.meta_age.shape[1]:
            ring.meta_age.add_(1)
        return [age + 1 for row in rows for age in row]
    real = [True] * len(rows) if key_mask is None else key_mask[:, 0].tolist()
    for n, row in enumerate(rows):
        slot = row.index(-1) if real[n] and -1 in row else None
        row[:] = [age + 1 if age >= 0 else age for age in row]
        if slot is not None:
            ring.k[n, slot], ring.v[n, slot], row[slot] = k[n, 0], v[n, 0], 0
    ring.meta_age.copy_(torch.tensor(rows))
    return [age for row in rows for age in row]


def leave(ring: WindowState, k: Tensor, v: Tensor, key_mask: Tensor | None):
    """The key and value ``[B, 1, Hkv, D]`` that a ring without meta keys loses when a token's enter, whether
    they are real ``[B, 1]``, and the ring after it."""
    ring, firsts = _ring(ring, k, v, ring.mask.shape[1] - 1, 0)
    lost = [_read(x, firsts) for x in (ring.k, ring.v, ring.mask)]
    _put(ring, k, v, key_mask, firsts)
    return *lost, ring


def window_step(q, k, v, *, state: WindowState, window, meta=0, scale=None, key_mask=None):
    """`decode_step` of sliding-window attention. Raises ValueError for shapes that do not fit together."""
    _token(q, k, v)
    (batch, _, heads, dim), groups, dtype = q.shape, k.shape[2], v.dtype
    q, k = q.to(dtype), k.to(dtype)
    ring, firsts = _ring(state, k, v, window - 1, meta)
    _put(ring, k, v, key_mask, firsts)
    ages = _meet(ring, k, v, key_mask)
    # the window is the whole ring, in any order, and what of the meta keys has left it
    seen = nothing = None
    if min(ages, default=window) < window or not ring.mask.all():
        seen = torch.cat([ring.meta_age >= window, ring.mask], 1)
        if key_mask is not None:  # a row at padding may see nothing; it is given keys, and zeroed later
            nothing = ~seen.any(1, keepdim=True)
            seen = seen | nothing
        seen = seen[:, None, None]
    out = scaled_dot_product_attention(  # the heads of a group stand in as rows
        q.reshape(batch, groups, -1, dim),
        ring.k.transpose(1, 2),
        ring.v.transpose(1, 2),
        attn_mask=seen,
        scale=dim**-0.5 if scale is None else scale,
    ).reshape(batch, 1, heads, -1)
    return out if nothing is None else out.masked_fill(nothing[..., None, None], 0.0), ring


def hybrid_step(
    q,
    k,
    v,
    w_q=None,
    w_k=None,
    *,
    state: HybridState,
    feature="softmax_pm",
    window,
    window_factor,
    scale=None,
    key_mask=None,
):
    """`decode_step` of LoLCATs' hybrid. Raises ValueError for shapes that do not fit together."""
    check_hybrid(feature, window)
    dtype, (batch, _, heads, dim), groups = _token(q, k, v, w_q, w_k), q.shape, k.shape[2]
    ring, firsts = _ring(state.ring, k, v, window, 0)
    states = state_heads(w_k, heads)
    linear = _linear_state(state.linear, dtype, (batch, states, _width(q, w_q, feature), dim))
    q, rows = q.to(dtype), heads // groups
    # the oldest key leaves the window, and its place is the next free one
    left, real = (_read(ring.k, firsts).to(dtype), _read(ring.v, firsts)), _read(ring.mask, firsts)
    real = None if all(x for [x] in real.tolist()) else real.clone()
    _write(ring.mask, firsts, False)
    _put(ring, k, v, key_mask, firsts)
    keys = ring.k.to(dtype).permute(0, 2, 3, 1).reshape(batch * groups, dim, -1)
    values = ring.v.to(dtype).transpose(1, 2).reshape(batch * groups, -1, dim)
    scores = torch.bmm((q * (dim**-0.5 if scale is None else scale)).reshape(-1, rows, dim), keys)
    scores = scores.view(batch, heads, -1).masked_fill_(~ring.mask[:, None], -torch.inf)
    p = scores.softmax(-1)
    if key_mask is not None:
        p = p.nan_to_num(0.0)  # of a row that sees nothing
    # relative to the largest, whose own weight is then 1: the sum of weights is 1 over that one's share
    sums = window_factor.to(dtype) / p.amax(-1)
    if key_mask is not None:
        sums = sums.masked_fill(sums.isinf(), 0.0)
    shape = batch * states, heads // states
    sums, near = sums.view(*shape, 1), torch.bmm(p.view(batch * groups, rows, -1), values).view(*shape, dim)
    num, phi_q = _linear_sums(q, *left, w_q, w_k, None, None, linear, feature, real, None, sums * near)
    den = torch.baddbmm(sums, phi_q, linear.z.view(shape[0], -1, 1))
    out = (num / _filled(den, feature)).view(batch, 1, heads, dim).to(v.dtype)
    return out, HybridState(ring, linear)


STEPS = {LinearState: linear_step, WindowState: window_step, HybridState: hybrid_step}
