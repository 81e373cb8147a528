"""One token of each op: a launch that reads a state, updates it in place and answers, of a linear state after
one that makes features.

    launch 1   q, k [B, heads, D]  ->  phi(q), phi(k)          a program: one head's map, several sequences
    launch 2   S [B, heads, F, V]  ->  S' = decay S + phi(k) v^T,
                                       o = phi(q) S' / phi(q) z'      a program: one head's tile of V
               ring of a window    ->  its free place takes the token's key,
                                       the oldest key's place is the next free one

Features come first for all sequences at once, so that a head's map is read once for many of them, and a
program of the second launch is small enough for several to a multiprocessor, whose loads hide each other:
both in one launch were slower at every batch.

A linear state belongs to a query head, or to a key head and then to R query heads, whose answers one program
gives. The keys of a window belong to all query heads of a group. Their ring has a place that nobody reads:
the group's first program puts the token's key there, and nothing moves. Numbers that a sequence's programs
share (the ring's beginning, the age of meta keys) are read from the old state and written to a new one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from relinear_kernels.features import check_map
from relinear_kernels.gated_linear_attention_reference import FLOOR, check_gate
from relinear_kernels.hybrid_attention_reference import HybridState
from relinear_kernels.linear_attention_reference import LinearState, every_decay, state_heads
from relinear_kernels.sliding_window_attention_reference import WindowState, check_ring
from relinear_kernels.triton_common import phi, reciprocal, widest

# the programs that a GPU holds at once; with more of them waiting, memory is read in a worse order, and the
# overlap costs time
PROGRAMS = 264


@triton.jit(do_not_specialize=["batch"])
def _phi(
    q,
    k,
    wq,
    wk,
    bq,
    bk,
    first,
    y,
    batch,
    H: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    P: tl.constexpr,
    FEATURE: tl.constexpr,
    PLACES: tl.constexpr,
    G: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write phi of queries and keys, `[B, H + M, P F]`. A program makes those of G sequences: of one of H
    query heads, or of the keys by one of M maps.

    The key is the token's. Where a ring is given by its `first`, it is the ring's oldest key, which leaves
    the window now.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0) % (H + M)
    rows = tl.program_id(0) // (H + M) * G + tl.arange(0, G)
    to = y + (rows.to(tl.int64)[:, None] * (H + M) + head) * (P * F) + tl.arange(0, F)[None, :]
    inside = (rows < batch)[:, None]
    rows = tl.minimum(rows, batch - 1).to(tl.int64)
    if head < H:
        _made(q + (rows * H + head) * D, wq, bq, head, to, inside, D, F, P, FEATURE)
    else:
        head -= H
        if first is not None:
            rows = rows * PLACES + tl.load(first + rows)
        _made(k + (rows * N + head // (M // N)) * D, wk, bk, head, to, inside, D, F, P, FEATURE)


@triton.jit
def _made(
    x, w, b, head, to, inside, D: tl.constexpr, F: tl.constexpr, P: tl.constexpr, FEATURE: tl.constexpr
):
    """Store phi of the vectors that x points at, by one head's map. Map and vectors are rounded to the dtype
    that the parallel form multiplies."""
    f = tl.arange(0, F)
    if w is not None:
        d = tl.arange(0, D)
        m = tl.load(w + head * (D * F) + d[:, None] * F + f[None, :]).to(to.dtype.element_ty)
        y = tl.dot(tl.load(x[:, None] + d[None, :]).to(to.dtype.element_ty), m, input_precision="ieee")
    else:
        y = tl.load(x[:, None] + f[None, :]).to(tl.float32)
    if b is not None:
        y += tl.load(b + head * F + f).to(tl.float32)[None, :]
    for half in tl.static_range(P):
        tl.store(to + half * F, phi(y, 1.0 - 2.0 * half, None, FEATURE).to(to.dtype.element_ty), mask=inside)


@triton.jit
def _far(
    y,
    v,
    mask,
    decay,
    gate,
    first,
    near,
    near_den,
    gamma,
    s,
    z,
    o,
    M: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    N: tl.constexpr,
    V: tl.constexpr,
    F: tl.constexpr,
    P: tl.constexpr,
    NORMALIZE: tl.constexpr,
    LOWEST: tl.constexpr,
    PLACES: tl.constexpr,
    BF: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Update the linear states of one token, and write the answers of the query heads. A program has one of M
    states of one sequence.

    It fades the state, adds phi(k) v^T and answers the state's R query heads, all from one reading of it. The
    state stays in float32; the product on tensor cores, with R padded to RP, takes it rounded to the queries'
    dtype, as every parallel form does. v is the token's value, or that of the ring's oldest key where `first`
    is given. The part within a window comes as numerators `near` and denominators `near_den`. What earlier
    launches write is read after the wait, and all of this launch's results are written after it.
    """
    m = tl.program_id(0) % M
    n = (tl.program_id(0) // M).to(tl.int64)
    at = n * M + m
    place = n
    if first is not None:
        place = n * PLACES + tl.load(first + n)
    real = n >= 0
    if mask is not None:
        real = tl.load(mask + place) != 0
    faded = 0.0
    if decay is not None:
        faded += tl.load(decay + at)
    c = tl.arange(0, V)
    value = tl.load(v + (place * N + m // (M // N)) * V + c).to(tl.float32)
    y += n * ((M * R + M) * (P * F))
    r = tl.arange(0, RP)
    heads = (r < R)[:, None]
    out = tl.zeros([RP, V], tl.float32)
    den = tl.zeros([RP], tl.float32)
    for lead in tl.static_range(0, P * F, BF):
        f = lead + tl.arange(0, BF)
        where = s + (at * (P * F) + f)[:, None] * V + c[None, :]
        state = tl.load(where)
        sums = z + at * (P * F) + f
        total = tl.load(sums)
        if OVERLAP and lead == 0:
            tl.extra.cuda.gdc_wait()
        k = tl.where(real, tl.load(y + (M * R + m) * (P * F) + f).to(tl.float32), 0.0)
        q = tl.load(y + (m * R + r)[:, None] * (P * F) + f[None, :], mask=heads, other=0.0)
        fade = tl.zeros([BF], tl.float32) + faded
        if gate is not None:
            fade += tl.maximum(tl.load(gate + at * F + f % F).to(tl.float32), LOWEST)
        fade = tl.exp(fade)
        total = total * fade + k
        state = state * fade[:, None] + k[:, None] * value[None, :]
        tl.debug_barrier()  # several warps load the same of z
        tl.store(sums, total)
        tl.store(where, state)
        out = tl.dot(q, state.to(q.dtype), out, input_precision="ieee")
        den += tl.sum(q.to(tl.float32) * total[None, :], 1)
    if near is not None:
        factor = tl.load(gamma + m * R + r, mask=r < R, other=0.0)
        out += factor[:, None] * tl.load(near + (at * R + r)[:, None] * V + c[None, :], mask=heads, other=0.0)
        den += factor * tl.load(near_den + at * R + r, mask=r < R, other=0.0)
    if NORMALIZE:
        out *= reciprocal(den)[:, None]
    tl.store(o + (at * R + r)[:, None] * V + c[None, :], out.to(o.dtype.element_ty), mask=heads)


@triton.jit
def _attend(q, kt, vt, seen, top, den, acc, scale):
    """One step of FlashAttention's recurrence: queries `[RP, D]` over a tile of keys `[K, D]`."""
    s = tl.dot(q, tl.trans(kt.to(q.dtype)), input_precision="ieee") * scale
    s = tl.where(seen[None, :], s, float("-inf"))
    new = tl.maximum(top, tl.max(s, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp(s - safe[:, None])
    fade = tl.exp(top - safe)
    acc = tl.dot(p.to(q.dtype), vt.to(q.dtype), acc * fade[:, None], input_precision="ieee")
    return new, den * fade + tl.sum(p, 1), acc


@triton.jit
def _near(
    q,
    k,
    v,
    real_at,
    rk,
    rv,
    mask,
    first_at,
    age,
    o,
    sums,
    new_first,
    new_age,
    W,
    scale,
    R: tl.constexpr,
    RP: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    OLDEST: tl.constexpr,
    BK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write softmax attention of one token over its window of W positions and M meta keys, and put the
    token's key into the ring.

    A program has one of N key heads of one sequence, with its R query heads padded to RP; meta keys are
    padded to MP, and stand before the ring. The ring has K keys and a free place, and its oldest key is at
    `first`; the OLDEST first keys are not seen. Writes the answers. Given `sums`, writes their numerators
    instead, and their denominators into `sums`.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) % N
    b = (tl.program_id(0) // N).to(tl.int64)
    d = tl.arange(0, D)
    r = tl.arange(0, RP)
    heads = (r < R)[:, None]
    mine = (b * N + n) * R + r
    real = b >= 0
    if real_at is not None:
        real = tl.load(real_at + b) != 0
    first = tl.load(first_at + b)
    x = tl.load(q + mine[:, None] * D + d[None, :], mask=heads, other=0.0)
    key = tl.load(k + (b * N + n) * D + d)
    value = tl.load(v + (b * N + n) * D + d)
    top = tl.where(real, tl.sum(x.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale, float("-inf"))
    den = tl.zeros([RP], tl.float32) + tl.where(real, 1.0, 0.0)
    acc = tl.zeros([RP, D], tl.float32) + tl.where(real, value.to(tl.float32), 0.0)[None, :]
    rk += (b * (M + K + 1) * N + n) * D
    rv += (b * (M + K + 1) * N + n) * D
    if M > 0:
        i = tl.arange(0, MP)
        before = tl.load(age + b * M + i, mask=i < M, other=-1)
        fills = real & (i == tl.sum((before >= 0).to(tl.int32), 0))
        after = tl.where(before >= 0, before + 1, tl.where(fills, 0, -1))
        here = i[:, None] * (N * D) + d[None, :]
        mkt = tl.load(rk + here, mask=(after >= W)[:, None], other=0.0)
        mvt = tl.load(rv + here, mask=(after >= W)[:, None], other=0.0)
        top, den, acc = _attend(x, mkt, mvt, after >= W, top, den, acc, scale)
        took = (fills & (i < M))[:, None]
        tl.store(rk + here, tl.broadcast_to(key[None, :], [MP, D]).to(rk.dtype.element_ty), mask=took)
        tl.store(rv + here, tl.broadcast_to(value[None, :], [MP, D]).to(rv.dtype.element_ty), mask=took)
        if n == 0:
            tl.store(new_age + b * M + i, after, mask=i < M)
        rk += M * N * D
        rv += M * N * D
    mask += b * (K + 1)
    for lead in range(0, K + 1, BK):
        places = lead + tl.arange(0, BK)
        old = (places - first + K + 1) % (K + 1)  # 0: the oldest, K: the free place
        seen = (places <= K) & (old >= OLDEST) & (old < K)
        seen = seen & (tl.load(mask + places, mask=seen, other=0) != 0)
        at = places[:, None] * (N * D) + d[None, :]
        kt = tl.load(rk + at, mask=seen[:, None], other=0.0)
        vt = tl.load(rv + at, mask=seen[:, None], other=0.0)
        top, den, acc = _attend(x, kt, vt, seen, top, den, acc, scale)
    if sums is not None:
        tl.store(sums + mine, den, mask=r < R)
    else:
        acc *= tl.where(den > 0, 1 / tl.where(den > 0, den, 1.0), 0.0)[:, None]
    tl.store(o + mine[:, None] * D + d[None, :], acc.to(o.dtype.element_ty), mask=heads)
    free = (first + K) % (K + 1)
    tl.store(rk + free * (N * D) + d, key.to(rk.dtype.element_ty))
    tl.store(rv + free * (N * D) + d, value.to(rv.dtype.element_ty))
    if n == 0:
        tl.store(mask + free, real)
        tl.store(new_first + b, (first + 1) % (K + 1))


def _contiguous(x):
    return None if x is None else x.contiguous()


def _token(q, k, v, w_q=None, w_k=None, b_q=None, b_k=None):
    """q, k and v of one token, contiguous and in one dtype, and the sizes (B, H, Hkv, states). Raises
    ValueError for heads that do not fit."""
    batch, _, heads, _ = q.shape
    groups = k.shape[2]
    if heads % groups:
        raise ValueError(
            f"query heads must be a multiple of key heads; got {heads} query heads and {groups} key heads"
        )
    q, k, v = (x.to(widest(q, k, v)).contiguous() for x in (q, k, v))
    check_map(w_q, b_q, heads, heads, q.shape[3])
    check_map(w_k, b_k, heads, groups, k.shape[3])
    return q, k, v, (batch, heads, groups, state_heads(w_k, heads))


def _linear_state(state: LinearState, shape: tuple[int, ...]) -> LinearState:
    """The state with contiguous tensors. Raises ValueError unless it is of this shape."""
    if state.kv.shape != shape:
        raise ValueError(f"the state must be {list(shape)}; got {list(state.kv.shape)}")
    return state._replace(kv=state.kv.contiguous(), z=state.z.contiguous())


def _ring(state: WindowState, batch: int, keys: int, groups: int, dim: int, meta: int) -> WindowState:
    """The ring with contiguous tensors. Raises ValueError unless it holds so many keys and meta keys of these
    sizes."""
    check_ring(state, batch, keys, groups, dim, meta)
    return WindowState(*(x.contiguous() for x in state))


def _features(
    q,
    k,
    w_q,
    w_k,
    b_q,
    b_k,
    groups: int,
    states: int,
    feature: str,
    halves: int,
    width: int,
    overlap: bool,
    first=None,
    places=1,
) -> Tensor:
    """phi of every query and of every state's key: `[B, H + states, P F]` in the queries' dtype."""
    batch, _, heads, dim = q.shape
    y = torch.empty(batch, heads + states, halves * width, device=q.device, dtype=q.dtype)
    rows = 16 if batch <= 64 or q.dtype == torch.float32 else 64
    _phi[((heads + states) * triton.cdiv(batch, rows),)](
        q,
        k,
        *map(_contiguous, (w_q, w_k, b_q, b_k)),
        first,
        y,
        batch,
        H=heads,
        M=states,
        N=groups,
        D=dim,
        F=width,
        P=halves,
        FEATURE=feature,
        PLACES=places,
        G=rows,
        OVERLAP=overlap,
        num_warps=4,
    )
    return y


def _tiles(
    heads: int, states: int, groups: int, width: int, halves: int, value_dim: int, overlap: bool
) -> dict:
    """The sizes and launch options of `_far`. A state of 128 x 128 numbers is one tile of eight warps."""
    each, rows = heads // states, min(halves * width, 128)
    shape = {
        "M": states,
        "R": each,
        "RP": max(16, triton.next_power_of_2(each)),
        "N": groups,
        "V": value_dim,
        "F": width,
        "P": halves,
    }
    shape |= {"BF": rows, "num_warps": 8 if rows * value_dim > 8192 else 4, "OVERLAP": overlap}
    return shape | ({"launch_pdl": True} if overlap else {})


def _overlap() -> bool:
    """Whether `_far` can start and load its state while the launch before it still runs. Hopper and later
    GPUs can do that."""
    if triton.knobs.runtime.interpret:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and target.arch >= 90


def _window(heads: int, groups: int, keys: int, meta: int, dim: int) -> dict:
    """The sizes and launch options of `_near` for a ring of so many keys and so many meta keys."""
    each = heads // groups
    shape = {"R": each, "RP": max(16, triton.next_power_of_2(each)), "N": groups, "D": dim, "K": keys}
    shape |= {"M": meta, "MP": max(16, triton.next_power_of_2(meta)) if meta else 1}
    return shape | {
        "BK": min(triton.next_power_of_2(max(keys + 1, 16)), 4096 // dim),
        "num_warps": 4,
        "num_stages": 2,
    }


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
    value_dim, width, dtype = v.shape[-1], q.shape[-1] if w_q is None else w_q.shape[-1], v.dtype
    q, k, v, (batch, heads, groups, states) = _token(q, k, v, w_q, w_k, b_q, b_k)
    halves = 2 if feature == "softmax_pm" else 1
    state = _linear_state(state, (batch, states, halves * width, value_dim))
    decay = gate = None
    if log_decay is not None:
        decay = every_decay(log_decay, batch, 1, heads, states).float().contiguous()
    if log_gate is not None:
        check_gate(log_gate, batch, 1, heads, w_k, width)
        gate = log_gate.contiguous()
    o = torch.empty(batch, 1, heads, value_dim, device=q.device, dtype=dtype)
    overlap = batch * states <= PROGRAMS and _overlap()
    y = _features(q, k, w_q, w_k, b_q, b_k, groups, states, feature, halves, width, overlap)
    _far[(batch * states,)](
        y,
        v,
        _contiguous(key_mask),
        decay,
        gate,
        None,
        None,
        None,
        None,
        state.kv,
        state.z,
        o,
        **_tiles(heads, states, groups, width, halves, value_dim, overlap),
        NORMALIZE=normalize,
        LOWEST=FLOOR,
        PLACES=1,
    )
    return o, state


def window_step(q, k, v, *, state: WindowState, window, meta=0, scale=None, key_mask=None):
    """`decode_step` of sliding-window attention. Raises ValueError for shapes that do not fit together."""
    dim, dtype = q.shape[-1], v.dtype
    q, k, v, (batch, heads, groups, _) = _token(q, k, v)
    state = _ring(state, batch, window - 1, groups, dim, meta)
    o = torch.empty(batch, 1, heads, dim, device=q.device, dtype=dtype)
    after = state._replace(first=torch.empty_like(state.first), meta_age=torch.empty_like(state.meta_age))
    _near[(batch * groups,)](
        q,
        k,
        v,
        _contiguous(key_mask),
        state.k,
        state.v,
        state.mask,
        state.first,
        state.meta_age,
        o,
        None,
        after.first,
        after.meta_age,
        window,
        dim**-0.5 if scale is None else scale,
        OLDEST=0,
        OVERLAP=False,
        **_window(heads, groups, window - 1, meta, dim),
    )
    return o, after


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
    dim, width, dtype = q.shape[-1], q.shape[-1] if w_q is None else w_q.shape[-1], v.dtype
    q, k, v, (batch, heads, groups, states) = _token(q, k, v, w_q, w_k)
    halves = 2 if feature == "softmax_pm" else 1
    ring = _ring(state.ring, batch, window, groups, dim, 0)
    linear = _linear_state(state.linear, (batch, states, halves * width, dim))
    o = torch.empty(batch, 1, heads, dim, device=q.device, dtype=dtype)
    near, sums = (torch.empty(batch, heads, *n, device=q.device, dtype=torch.float32) for n in ((dim,), ()))
    after = ring._replace(first=torch.empty_like(ring.first))
    oldest = {"first": ring.first, "places": window + 1}
    overlap = _overlap()
    y = _features(q, ring.k, w_q, w_k, None, None, groups, states, feature, halves, width, False, **oldest)
    _near[(batch * groups,)](
        q,
        k,
        v,
        _contiguous(key_mask),
        ring.k,
        ring.v,
        ring.mask,
        ring.first,
        None,
        near,
        sums,
        after.first,
        None,
        window,
        dim**-0.5 if scale is None else scale,
        OLDEST=1,
        OVERLAP=overlap,
        **_window(heads, groups, window, 0, dim),
    )
    _far[(batch * states,)](
        y,
        ring.v,
        ring.mask,
        None,
        None,
        ring.first,
        near,
        sums,
        window_factor.float().contiguous(),
        linear.kv,
        linear.z,
        o,
        **_tiles(heads, states, groups, width, halves, dim, overlap),
        NORMALIZE=True,
        LOWEST=FLOOR,
        PLACES=window + 1,
    )
    return o, HybridState(after, linear)


STEPS = {LinearState: linear_step, WindowState: window_step, HybridState: hybrid_step}
