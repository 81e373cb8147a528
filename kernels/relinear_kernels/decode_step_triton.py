"""One token of each op in one launch: a program reads a state, updates it in place and answers. Of a linear state it takes several
sequences of a head, one after the other, so that the head's feature maps are read once for all of them.

A linear state belongs to a query head, or to a key head and then to R query heads, whose answers one program gives. The keys of a window
belong to all query heads of a group. Their ring has a place that nobody reads: the group's first program puts the token's key there, and
nothing moves. What the programs of a sequence share (where its ring begins, how long ago a meta key was seen) is read from the old state
and written to a new one.
"""

import torch
import triton
import triton.language as tl

from relinear_kernels.features import check_map
from relinear_kernels.gated_linear_attention_reference import FLOOR, check_gate
from relinear_kernels.hybrid_attention_reference import EPS as HYBRID_EPS
from relinear_kernels.hybrid_attention_reference import HybridState, _check
from relinear_kernels.linear_attention_reference import EPS, LinearState, every_decay, state_heads
from relinear_kernels.linear_attention_triton import PROGRAMS
from relinear_kernels.sliding_window_attention_reference import WindowState
from relinear_kernels.triton_common import check_triton, phi, widest

ROWS = 16  # sequences whose features are made by one product


@triton.jit
def _logits(x, w, b, D: tl.constexpr, F: tl.constexpr):
    """x W + b of the vectors that x `[G]` points at: `[G, F]`, by tensor cores but for one."""
    f = tl.arange(0, F)
    if w is not None:
        d = tl.arange(0, D)
        m = tl.load(w + d[:, None] * F + f[None, :])
        if x.shape[0] == 1:
            y = tl.sum(tl.load(x[None, :] + d[:, None]).to(tl.float32) * m.to(tl.float32), 0)[None, :]
        else:
            u = tl.load(x[:, None] + d[None, :])
            if u.dtype == m.dtype:
                y = tl.dot(u, m, input_precision="ieee")
            else:
                y = tl.dot(u.to(tl.float32), m.to(tl.float32), input_precision="ieee")
    else:
        y = tl.load(x[:, None] + f[None, :]).to(tl.float32)
    if b is not None:
        y += tl.load(b + f).to(tl.float32)[None, :]
    return y


@triton.jit
def _row(p, i, G: tl.constexpr):
    """Row i of `[G, F]`."""
    return tl.sum(tl.where((tl.arange(0, G) == i)[:, None], p, 0.0), 0)


@triton.jit
def _features(y, P: tl.constexpr, FEATURE: tl.constexpr):
    """phi of +y and, where the map has two sides, of -y."""
    p = phi(y, 1, None, FEATURE)
    if P == 2:
        return p, phi(y, -1, None, FEATURE)
    else:
        return p, p


@triton.jit
def _absorb_half(
    q, k, i, value, real, fade, s, z, half: tl.constexpr, F: tl.constexpr, V: tl.constexpr, G: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """`_absorb` of one sign's part of the state. Its load does not come before the features are made: that was slower."""
    phi_q = ()
    for r in tl.static_range(R):
        phi_q = phi_q + (_row(q[r], i, G),)
    phi_k = _row(k, i, G)
    f = half * F + tl.arange(0, F)
    where = s + f[:, None] * V + tl.arange(0, V)[None, :]
    state = tl.load(where)
    total = tl.load(z + f)
    phi_k = tl.where(real, phi_k, 0.0)
    total = total * fade + phi_k
    tl.debug_barrier()  # several warps load the same of z
    tl.store(z + f, total)
    state = state * fade[:, None] + phi_k[:, None] * value[None, :]
    tl.store(where, state)
    out, den = (), ()
    for r in tl.static_range(R):
        out = out + (tl.sum(phi_q[r][:, None] * state, 0),)
        den = den + (tl.sum(phi_q[r] * total, 0),)
    return out, den


@triton.jit
def _absorb(
    qp, qm, kp, km, i, value, real, fade, s, z, F: tl.constexpr, V: tl.constexpr, P: tl.constexpr, G: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """Fade a state, add row i of phi(k) `[G, F]` times value^T, read it with that of each of R phi(q): numerators `[V]` and denominators."""
    out, den = _absorb_half(qp, kp, i, value, real, fade, s, z, 0, F, V, G, R)
    if P == 2:
        more, more_den = _absorb_half(qm, km, i, value, real, fade, s, z, 1, F, V, G, R)
        both, both_den = (), ()
        for r in tl.static_range(R):
            both = both + (out[r] + more[r],)
            both_den = both_den + (den[r] + more_den[r],)
        out, den = both, both_den
    return out, den


@triton.jit
def _queries(q, w, b, D: tl.constexpr, F: tl.constexpr, R: tl.constexpr):
    """`_logits` of R query heads, of the first of which q `[G]`, w and b point at."""
    x = ()
    for r in tl.static_range(R):
        x = x + (_logits(q + r * D, w, b, D, F),)
        if w is not None:
            w += D * F
        if b is not None:
            b += F
    return x


@triton.jit
def _sides(x, P: tl.constexpr, FEATURE: tl.constexpr, R: tl.constexpr):
    """`_features` of R query heads."""
    p, m = (), ()
    for r in tl.static_range(R):
        one, other = _features(x[r], P, FEATURE)
        p = p + (one,)
        m = m + (other,)
    return p, m


@triton.jit(do_not_specialize=["batch", "each"])
def _linear(
    q, k, v, wq, wk, bq, bk, mask, decay, gate, s, z, o, batch, each, eps,
    H: tl.constexpr, R: tl.constexpr, N: tl.constexpr, D: tl.constexpr, V: tl.constexpr, F: tl.constexpr, P: tl.constexpr,
    FEATURE: tl.constexpr, NORMALIZE: tl.constexpr, LOWEST: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """A program: `each` sequences of one of H states, the features of G of them at a time."""
    h = tl.program_id(0) % H
    begin = tl.program_id(0) // H * each
    end = tl.minimum(begin + each, batch)
    if wq is not None:
        wq += h * (R * D * F)
        wk += h * (D * F)
    if bq is not None:
        bq += h * (R * F)
    if bk is not None:
        bk += h * F
    for lead in range(begin, end, G):
        rows = tl.minimum(lead + tl.arange(0, G), end - 1).to(tl.int64)
        x = _queries(q + (rows * H + h) * (R * D), wq, bq, D, F, R)
        y = _logits(k + (rows * N + h // (H // N)) * D, wk, bk, D, F)
        qp, qm = _sides(x, P, FEATURE, R)
        kp, km = _features(y, P, FEATURE)
        for i in range(0, tl.minimum(end - lead, G)):
            n = tl.full([], lead + i, tl.int64)
            at = n * H + h
            real = n >= 0
            if mask is not None:
                real = tl.load(mask + n) != 0
            fade = tl.zeros([F], tl.float32)
            if decay is not None:
                fade += tl.load(decay + at)
            if gate is not None:
                fade += tl.maximum(tl.load(gate + at * F + tl.arange(0, F)).to(tl.float32), LOWEST)
            fade = tl.exp(fade)
            value = tl.load(v + (n * N + h // (H // N)) * V + tl.arange(0, V)).to(tl.float32)
            here, sums = s + at * (P * F * V), z + at * (P * F)
            out, den = _absorb(qp, qm, kp, km, i, value, real, fade, here, sums, F, V, P, G, R)
            for r in tl.static_range(R):
                answer = out[r]
                if NORMALIZE:
                    answer /= tl.maximum(den[r], eps)
                tl.store(o + (at * R + r) * V + tl.arange(0, V), answer.to(o.dtype.element_ty))


@triton.jit
def _attend(x, kt, vt, seen, top, den, acc):
    """One step of the softmax recurrence over a tile of keys `[K, D]`: FlashAttention's, for one query."""
    s = tl.where(seen, tl.sum(x[None, :] * kt, 1), float("-inf"))
    new = tl.maximum(top, tl.max(s, 0))
    safe = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp(s - safe)
    fade = tl.exp(top - safe)
    return new, den * fade + tl.sum(p, 0), acc * fade + tl.sum(p[:, None] * vt, 0)


@triton.jit
def _window(
    x, rk, rv, mask, first, top, den, acc, OLDEST: tl.constexpr,
    R: tl.constexpr, N: tl.constexpr, D: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """The recurrence over the keys OLDEST, OLDEST + 1, .. of a ring of R and a free place, which begins at `first`."""
    d = tl.arange(0, D)
    for i in range(0, R + 1, BR):
        r = i + tl.arange(0, BR)
        age = (r - first + R + 1) % (R + 1)  # 0: the oldest, R: the free place
        seen = (r <= R) & (age >= OLDEST) & (age < R)
        seen = seen & (tl.load(mask + r, mask=seen, other=0) != 0)
        at = r[:, None] * (N * D) + d[None, :]
        kt = tl.load(rk + at, mask=seen[:, None], other=0.0).to(tl.float32)
        vt = tl.load(rv + at, mask=seen[:, None], other=0.0).to(tl.float32)
        top, den, acc = _attend(x, kt, vt, seen, top, den, acc)
    return top, den, acc


@triton.jit
def _place(
    key, value, real, rk, rv, mask, first, new_first, head, R: tl.constexpr, H: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The token's key in the free place, by the first head of its group; the sequence's first says that it is there."""
    free = (first + R) % (R + 1)
    if head % (H // N) == 0:
        tl.store(rk + free * (N * D) + tl.arange(0, D), key.to(rk.dtype.element_ty))
        tl.store(rv + free * (N * D) + tl.arange(0, D), value.to(rv.dtype.element_ty))
    if head == 0:
        tl.store(mask + free, real)
        tl.store(new_first, (first + 1) % (R + 1))


@triton.jit
def _sliding(
    q, k, v, real_at, rk, rv, mask, first_at, mk, mv, age, o, new_first, new_age, W, scale,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """W is the window, R = W - 1 the keys held, MP the meta keys M rounded up to a power of two."""
    pid = tl.program_id(0).to(tl.int64)
    head = pid % H
    b = pid // H
    n = head // (H // N)
    d = tl.arange(0, D)
    real = b >= 0
    if real_at is not None:
        real = tl.load(real_at + b) != 0
    key = tl.load(k + (b * N + n) * D + d).to(tl.float32)
    value = tl.load(v + (b * N + n) * D + d).to(tl.float32)
    first = tl.load(first_at + b)
    rk += (b * (R + 1) * N + n) * D
    rv += (b * (R + 1) * N + n) * D
    mask += b * (R + 1)
    x = tl.load(q + pid * D + d).to(tl.float32) * scale
    top = tl.where(real, tl.sum(x * key, 0), float("-inf"))
    den = tl.where(real, 1.0, 0.0)
    acc = tl.where(real, value, 0.0)
    if M > 0:
        i = tl.arange(0, MP)
        before = tl.load(age + b * M + i, mask=i < M, other=-1)
        fills = real & (i == tl.sum((before >= 0).to(tl.int32), 0))
        after = tl.where(before >= 0, before + 1, tl.where(fills, 0, -1))
        here = ((b * M + i[:, None]) * N + n) * D + d[None, :]
        mkt = tl.load(mk + here, mask=(after >= W)[:, None], other=0.0).to(tl.float32)
        mvt = tl.load(mv + here, mask=(after >= W)[:, None], other=0.0).to(tl.float32)
        top, den, acc = _attend(x, mkt, mvt, after >= W, top, den, acc)
        if head % (H // N) == 0:
            took = (fills & (i < M))[:, None]
            tl.store(mk + here, tl.broadcast_to(key[None, :], [MP, D]).to(mk.dtype.element_ty), mask=took)
            tl.store(mv + here, tl.broadcast_to(value[None, :], [MP, D]).to(mv.dtype.element_ty), mask=took)
        if head == 0:
            tl.store(new_age + b * M + i, after, mask=i < M)
    top, den, acc = _window(x, rk, rv, mask, first, top, den, acc, 0, R, N, D, BR)
    acc *= tl.where(den > 0, 1 / tl.where(den > 0, den, 1.0), 0.0)
    tl.store(o + pid * D + d, acc.to(o.dtype.element_ty))
    _place(key, value, real, rk, rv, mask, first, new_first + b, head, R, H, N, D)


@triton.jit
def _hybrid(
    q, k, v, wq, wk, gamma, real_at, rk, rv, mask, first_at, s, z, o, new_first, scale, eps,
    H: tl.constexpr, R: tl.constexpr, N: tl.constexpr, D: tl.constexpr, F: tl.constexpr, P: tl.constexpr,
    FEATURE: tl.constexpr, W: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """A program: one of H states, with its R query heads. The ring's oldest key leaves the window with this token and enters the state."""
    pid = tl.program_id(0).to(tl.int64)
    head = pid % H
    b = pid // H
    n = head // (H // N)
    d = tl.arange(0, D)
    s += pid * (P * F * D)
    z += pid * (P * F)
    real = b >= 0
    if real_at is not None:
        real = tl.load(real_at + b) != 0
    key = tl.load(k + (b * N + n) * D + d).to(tl.float32)
    value = tl.load(v + (b * N + n) * D + d).to(tl.float32)
    first = tl.load(first_at + b)
    rk += (b * (W + 1) * N + n) * D
    rv += (b * (W + 1) * N + n) * D
    mask += b * (W + 1)
    oldest = first * (N * D)
    left = tl.load(mask + first) != 0
    left_value = tl.load(rv + oldest + d).to(tl.float32)
    q += pid * (R * D)
    near, near_den = (), ()
    for r in tl.static_range(R):
        x = tl.load(q + r * D + d).to(tl.float32) * scale
        top = tl.where(real, tl.sum(x * key, 0), float("-inf"))
        den = tl.where(real, 1.0, 0.0)
        acc = tl.where(real, value, 0.0)
        top, den, acc = _window(x, rk, rv, mask, first, top, den, acc, 1, W, N, D, BR)
        near = near + (acc,)
        near_den = near_den + (den,)
    if wq is not None:
        wq += head * (R * D * F)
        wk += head * (D * F)
    x = _queries(q + tl.arange(0, 1), wq, None, D, F, R)
    y = _logits(rk + oldest + tl.arange(0, 1), wk, None, D, F)
    qp, qm = _sides(x, P, FEATURE, R)
    kp, km = _features(y, P, FEATURE)
    fade = tl.full([F], 1.0, tl.float32)
    far, far_den = _absorb(qp, qm, kp, km, 0, left_value, left, fade, s, z, F, D, P, 1, R)
    for r in tl.static_range(R):
        factor = tl.load(gamma + head * R + r)
        out = (factor * near[r] + far[r]) / tl.maximum(factor * near_den[r] + far_den[r], eps)
        tl.store(o + (pid * R + r) * D + d, out.to(o.dtype.element_ty))
    _place(key, value, real, rk, rv, mask, first, new_first + b, head, W, H, N, D)


def _contiguous(x):
    return None if x is None else x.contiguous()


def _token(op: str, q, k, v, w_q=None, w_k=None, b_q=None, b_k=None, feature=None, width=None):
    """q, k and v of one token in one dtype, dense, and (B, H, Hkv, states). Raises ValueError naming what is supported."""
    if q.shape[1] != 1:
        raise ValueError(f"{op} takes one token; got {q.shape[1]}")
    batch, _, heads, _ = q.shape
    groups = k.shape[2]
    if heads % groups:
        raise ValueError(f"query heads must be a multiple of key heads; got {heads} query heads and {groups} key heads")
    q, k, v = (x.to(widest(q, k, v)).contiguous() for x in (q, k, v))
    check_triton(op, feature, width, q=q, k=k, v=v)
    check_map(w_q, b_q, heads, heads, q.shape[3])
    check_map(w_k, b_k, heads, groups, k.shape[3])
    return q, k, v, (batch, heads, groups, state_heads(w_k, heads))


def _linear_state(state: LinearState, shape: tuple[int, ...]) -> LinearState:
    """The state, in one stretch of memory. Raises ValueError unless it is float32 and of this shape."""
    if not state.kv.dtype == state.z.dtype == torch.float32:
        raise ValueError(f"decode_step updates a float32 state in place; got {state.kv.dtype}, {state.z.dtype}")
    if state.kv.shape != shape:
        raise ValueError(f"the state must be {list(shape)}; got {list(state.kv.shape)}")
    return state._replace(kv=state.kv.contiguous(), z=state.z.contiguous())


def _ring(state: WindowState, batch: int, keys: int, groups: int, dim: int, meta: int) -> WindowState:
    """The ring, in one stretch of memory. Raises ValueError unless it is of this shape."""
    shape, got = [batch, keys, groups, dim], list(state.k.shape)
    got[1] -= 1  # a place is free
    if got != shape or state.meta_age.shape[1] != meta:
        raise ValueError(f"the state must hold keys {shape} and {meta} meta keys; got {got}, {state.meta_age.shape[1]}")
    return WindowState(*(x.contiguous() for x in state))


def _spread(batch: int, heads: int) -> tuple[int, int]:
    """Programs of each head, and how many sequences each of them takes: its matrices are read once for all of them."""
    each = triton.cdiv(batch, max(1, PROGRAMS // heads))
    return triton.cdiv(batch, each), each


def _options(size: int, each: int, queries: int = 1) -> dict:
    """Warps for a state of `size` numbers a sign; where eight of them take several sequences, registers for two programs a multiprocessor,
    unless the features of several queries would not fit into them."""
    if size <= 4096:
        return {"num_warps": 4}
    return {"num_warps": 8} if each == 1 or queries > 1 else {"num_warps": 8, "maxnreg": 128}


def _rows(places: int, dim: int) -> int:
    """Places of one tile of a ring."""
    return min(triton.next_power_of_2(max(places, 16)), 4096 // dim)


def linear_step(
    q, k, v, w_q=None, w_k=None, *, state: LinearState, feature="softmax_pm", b_q=None, b_k=None, log_decay=None, log_gate=None,
    normalize=True, key_mask=None, eps=EPS,
):  # fmt: skip
    """`decode_step` of linear attention, plain or gated. Raises ValueError naming what it supports."""
    dim, value_dim, width, dtype = q.shape[-1], v.shape[-1], q.shape[-1] if w_q is None else w_q.shape[-1], v.dtype
    q, k, v, (batch, heads, groups, states) = _token("decode_step", q, k, v, w_q, w_k, b_q, b_k, feature, width)
    halves = 2 if feature == "softmax_pm" else 1
    state = _linear_state(state, (batch, states, halves * width, value_dim))
    decay = gate = None
    if log_decay is not None:
        decay = every_decay(log_decay, batch, 1, heads, states).float().contiguous()
    if log_gate is not None:
        check_gate(log_gate, batch, 1, heads, w_k, width)
        gate = log_gate.contiguous()
    o = torch.empty(batch, 1, heads, value_dim, device=q.device, dtype=dtype)
    parts, each = _spread(batch, states)
    _linear[(parts * states,)](
        q, k, v, *map(_contiguous, (w_q, w_k, b_q, b_k, key_mask)), decay, gate, state.kv, state.z, o, batch, each, eps,
        H=states, R=heads // states, N=groups, D=dim, V=value_dim, F=width, P=halves, FEATURE=feature, NORMALIZE=normalize, LOWEST=FLOOR,
        G=1 if each == 1 else ROWS, **_options(width * value_dim, each, heads // states),
    )  # fmt: skip
    return o, state


def window_step(q, k, v, *, state: WindowState, window, meta=0, scale=None, key_mask=None):
    """`decode_step` of sliding-window attention. Raises ValueError naming what it supports."""
    dim, dtype = q.shape[-1], v.dtype
    q, k, v, (batch, heads, groups, _) = _token("decode_step", q, k, v)
    state = _ring(state, batch, window - 1, groups, dim, meta)
    o = torch.empty(batch, 1, heads, dim, device=q.device, dtype=dtype)
    after = state._replace(first=torch.empty_like(state.first), meta_age=torch.empty_like(state.meta_age))
    _sliding[(batch * heads,)](
        q, k, v, _contiguous(key_mask), state.k, state.v, state.mask, state.first, state.meta_k, state.meta_v, state.meta_age, o, after.first,
        after.meta_age, window, dim**-0.5 if scale is None else scale, H=heads, N=groups, D=dim, R=window - 1, M=meta,
        MP=triton.next_power_of_2(max(meta, 1)), BR=_rows(window, dim), num_warps=4,
    )  # fmt: skip
    return o, after


def hybrid_step(
    q, k, v, w_q=None, w_k=None, *, state: HybridState, feature="softmax_pm", window, window_factor, scale=None, key_mask=None,
    eps=HYBRID_EPS,
):  # fmt: skip
    """`decode_step` of LoLCATs' hybrid. Raises ValueError naming what it supports."""
    _check(feature, window)
    dim, width, dtype = q.shape[-1], q.shape[-1] if w_q is None else w_q.shape[-1], v.dtype
    q, k, v, (batch, heads, groups, states) = _token("decode_step", q, k, v, w_q, w_k, feature=feature, width=width)
    halves = 2 if feature == "softmax_pm" else 1
    ring = _ring(state.ring, batch, window, groups, dim, 0)
    linear = _linear_state(state.linear, (batch, states, halves * width, dim))
    o = torch.empty(batch, 1, heads, dim, device=q.device, dtype=dtype)
    after = ring._replace(first=torch.empty_like(ring.first))
    _hybrid[(batch * states,)](
        q, k, v, _contiguous(w_q), _contiguous(w_k), window_factor.float().contiguous(), _contiguous(key_mask), ring.k, ring.v, ring.mask,
        ring.first, linear.kv, linear.z, o, after.first, dim**-0.5 if scale is None else scale, eps,
        H=states, R=heads // states, N=groups, D=dim, F=width, P=halves, FEATURE=feature, W=window, BR=_rows(window + 1, dim),
        **_options(width * dim, 1),
    )  # fmt: skip
    return o, HybridState(after, linear)


STEPS = {LinearState: linear_step, WindowState: window_step, HybridState: hybrid_step}
