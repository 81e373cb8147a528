"""Gated linear attention in Triton: `linear_attention_triton`'s kernels with a gate a channel, and features
that are made for them.

    a step of the walk    |---- first half ----|---- second half ----|
                          G_0                  c                  G_BT
    G: the running sum of the log gates of a channel; c: its value in the middle of the step
    features of keys      phi(k_i) exp(c - G_i)
    features of queries   phi(q_t) exp(G_t - c)
    the state             S, faded from the middle of the step before to c

A pair (t, i) fades by exp(G_t - G_i) in every channel, which its features absorb as exp(G_t - c) and exp(c -
G_i), with c the running gate in the middle of a step: both signs of queries' and keys' features are kept with
these fades, and a state fades from one step's middle to the next's. bfloat16 has float32's exponents, so
neither leaves its range while no channel loses more than e^60 over half a step. A segment in which one does
takes steps of 16 rows, which gates of at least e^-8 keep within e^64, by a second launch of every kernel.

Pairs that no query sees may be infinite: every product keeps its full size for the tensor cores, and `where`
drops what is not wanted.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from relinear_kernels.gated_linear_attention_reference import FLOOR, check_gate
from relinear_kernels.linear_attention_reference import (
    LinearState,
    per_query_head,
    per_state_head,
    state_heads,
)
from relinear_kernels.linear_attention_triton import (
    FINE_STEP,
    Channels,
    Walk,
    _locate_segment,
    added,
    both,
    run_from_middle,
)
from relinear_kernels.projection_triton import Side, gradients, group_sum
from relinear_kernels.traced import apply, traceable
from relinear_kernels.triton_common import cdiv, matrix, phi, phi_backward, prepared, put, tile

DTYPE = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
MILD = -60.0  # the log of the most that half a step may fade
ROWS = 256  # rows of a program that makes features


@triton.jit(do_not_specialize=["T", "L"])
def _totals(
    gate,
    coarse,
    fine,
    hard,
    cu,
    blocks,
    T,
    L,
    limit,
    H: tl.constexpr,
    F: tl.constexpr,
    HEADS: tl.constexpr,
    LOWEST: tl.constexpr,
    STEP: tl.constexpr,
    FINE: tl.constexpr,
    DT: tl.constexpr,
):
    """Write the tables of `Channels` for one step of STEP rows and HEADS heads.

    `coarse` has the sums of the log gates over both halves of the step, `fine` those over the halves of each
    FINE rows. `hard` is set where a sum of `coarse` is below `limit`. One product makes all sums: its first
    rows are the fine ones, its last two the coarse ones.
    """
    groups = tl.cdiv(H, HEADS)
    steps = tl.cdiv(L, STEP)
    h = tl.program_id(0) % groups * HEADS
    step = tl.program_id(0) // groups % steps
    i = (tl.program_id(0) // (groups * steps)).to(tl.int64)
    n, base, start, keys, first, last = _locate_segment(i.to(tl.int32), T, L, cu, blocks, None)
    cols = h * F + tl.arange(0, HEADS * F)
    there = (cols < H * F)[None, :] & (first + step * STEP < last)
    k = tl.arange(0, STEP)
    rows = first + step * STEP + k
    inside = (rows < last)[:, None] & there
    logs = tl.maximum(
        tl.load(gate + (start + rows)[:, None] * (H * F) + cols[None, :], mask=inside, other=0.0), LOWEST
    )
    m = tl.arange(0, 16)[:, None]
    PARTS: tl.constexpr = STEP // FINE * 2
    some = added(
        tl.where(m < 14, k[None, :] // (FINE // 2) == m, k[None, :] // (STEP // 2) == m - 14), logs, DT
    )
    if fine is not None:
        to = (i * tl.cdiv(L, FINE) * 2 + step * PARTS + m) * (H * F) + cols[None, :]
        tl.store(fine + to, some, mask=there & (m < PARTS) & (step * STEP + m // 2 * FINE < L))
    tl.store(
        coarse + ((i * steps + step) * 2 + m - 14) * (H * F) + cols[None, :], some, mask=there & (m >= 14)
    )
    if hard is not None:
        heads = h + tl.arange(0, HEADS)
        low = tl.min(tl.reshape(tl.min(tl.where(m >= 14, some, 0.0), 0), [HEADS, F]), 1) < limit
        tl.atomic_max(hard + i * H + heads, low.to(tl.int32), mask=low & (heads < H))


@triton.jit(do_not_specialize=["T", "L", "per"])
def _features(
    xq,
    xk,
    wq,
    wk,
    bq,
    bk,
    gate,
    hard,
    yq,
    yk,
    cu,
    blocks,
    T,
    L,
    per,
    H: tl.constexpr,
    NQ: tl.constexpr,
    NK: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    P: tl.constexpr,
    FEATURE: tl.constexpr,
    LOWEST: tl.constexpr,
    STEP: tl.constexpr,
    FINE: tl.constexpr,
):
    """Write phi of queries and keys times their fades, `[B, T, H, P F]`. A program has one side of one head,
    for `per` rows of a segment.

    Programs next to each other are the two sides of one head, which read the same gates.
    """
    side = tl.program_id(0) % 2
    h = tl.program_id(0) // 2 % H
    parts = tl.cdiv(L, per)
    i = tl.program_id(0) // (2 * H) // parts
    n, base, start, keys, first, last = _locate_segment(i, T, L, cu, blocks, None)
    first += tl.program_id(0) // (2 * H) % parts * per
    last = tl.minimum(first + per, last)
    sub = STEP
    if hard is not None:
        sub = tl.where(tl.load(hard + i * H + h) != 0, FINE, STEP)
    x, w, b, y, heads = xq, wq, bq, yq, NQ + 0 * side
    if side == 1:  # one loop for both: a branch each would take the shared memory of both
        x, w, b, y, heads = xk, wk, bk, yk, NK + 0 * side
    sign = 1.0 - 2.0 * side
    DT = xq.dtype.element_ty
    x += (start * heads + h // (H // heads)) * D
    y += (start * H + h) * (P * F)
    if w is not None:
        m = matrix(w + h * (D * F), D, F).to(DT)
    for j in range(first, last, STEP):
        rows = j + tl.arange(0, STEP)
        logs = tl.maximum(tile(gate + (start * H + h) * F, rows, last, H, F), LOWEST)
        value = tile(x, rows, last, heads, D)
        if w is not None:
            value = tl.dot(value, m, input_precision="ieee")
            if b is not None:
                value += tl.load(b + h * F + tl.arange(0, F)).to(tl.float32)[None, :]
        fade = tl.exp(sign * run_from_middle(logs, sub, DT, STEP))
        for half in tl.static_range(P):
            put(
                y + half * F,
                phi(value.to(tl.float32), 1.0 - 2.0 * half, None, FEATURE) * fade,
                rows,
                last,
                H * P,
                F,
            )


@triton.jit
def _preactivations(
    d,
    y,
    dy,
    fade,
    own,
    rows,
    T,
    total,
    at,
    H: tl.constexpr,
    F: tl.constexpr,
    P: tl.constexpr,
    FEATURE: tl.constexpr,
):
    """Store dy, the gradient of one side's preactivations, from d, that of its features y, which are kept
    times `fade`.

    Returns `own` plus the products of y and d, summed over the halves of phi.
    """
    for half in tl.static_range(P):
        to = half * total * (H * F) + at
        p = tile(y + at * P + half * F, rows, T, H * P, F).to(tl.float32)
        dp = tile(d + to, rows, T, H, F)
        own += p * dp
        if dy is not None:
            put(dy + to, phi_backward(p, dp, 1.0 - 2.0 * half, FEATURE, fade), rows, T, H, F)
    return own


@triton.jit(do_not_specialize=["T", "L", "total"])
def _gradients(
    dq,
    dk,
    yq,
    yk,
    dyq,
    dyk,
    gate,
    hard,
    owed,
    sums,
    cu,
    blocks,
    T,
    L,
    total,
    H: tl.constexpr,
    F: tl.constexpr,
    P: tl.constexpr,
    FEATURE: tl.constexpr,
    LOWEST: tl.constexpr,
    STEP: tl.constexpr,
    FINE: tl.constexpr,
    DT: tl.constexpr,
):
    """Write the gradients of queries' and keys' preactivations, `[P, B, T, H, F]`, from those of their
    features. Either side may be left out.

    Where gates have a gradient, `owed` has each gate's part that comes from the rows of its own step, `[B, T,
    H, F]` float32, and `sums` the sum of all rows of a step, `[segments, steps, H, F]`.
    """
    h = tl.program_id(0) % H
    steps = tl.cdiv(L, STEP)
    step = tl.program_id(0) // H % steps
    i = tl.program_id(0) // (H * steps)
    n, base, start, keys, first, last = _locate_segment(i, T, L, cu, blocks, None)
    rows = first + step * STEP + tl.arange(0, STEP)
    at = (start * H + h) * F
    sub = STEP
    if hard is not None:
        sub = tl.where(tl.load(hard + i * H + h) != 0, FINE, STEP)
    run = run_from_middle(tl.maximum(tile(gate + at, rows, last, H, F), LOWEST), sub, DT, STEP)
    term = tl.zeros([STEP, F], tl.float32)
    if dk is not None:
        term = -_preactivations(dk, yk, dyk, tl.exp(-run), term, rows, last, total, at, H, F, P, FEATURE)
    if dq is not None:
        term = _preactivations(dq, yq, dyq, tl.exp(run), term, rows, last, total, at, H, F, P, FEATURE)
    if owed is not None:
        r = tl.arange(0, STEP)
        put(owed + at, added(r[None, :] >= r[:, None], term, DT), rows, last, H, F)
        tl.store(sums + ((i.to(tl.int64) * steps + step) * H + h) * F + tl.arange(0, F), tl.sum(term, 0))


@triton.jit(do_not_specialize=["T", "L"])
def _later(sums, ends, starts, T, L, H: tl.constexpr, F: tl.constexpr, STEP: tl.constexpr):
    """Replace the sum of each step by the sum of all later steps: the part of a gate's gradient that comes
    from rows after its step.

    A program has one head of one sequence. The whole sequence decays into the final state, so `ends`, the
    final state's term `[sequences, H, F]` (None: none), is in every sum.
    """
    h = tl.program_id(0) % H
    n = tl.program_id(0) // H
    if starts is not None:
        first = tl.load(starts + n)
        count = tl.load(starts + n + 1) - first
    else:
        count = tl.cdiv(T, L)
        first = n * count
    count *= tl.cdiv(L, STEP)
    at = sums + (first.to(tl.int64) * tl.cdiv(L, STEP) * H + h) * F + tl.arange(0, F)
    after = tl.zeros([F], tl.float32)
    if ends is not None:
        after += tl.load(ends + (n * H + h) * F + tl.arange(0, F))
    for step in range(0, count):
        to = at + (count - 1 - step) * (H * F)
        own = tl.load(to)
        tl.store(to, after)
        after += own


@triton.jit(do_not_specialize=["T", "L"])
def _gate_gradients(
    owed,
    later,
    gate,
    dg,
    cu,
    blocks,
    T,
    L,
    H: tl.constexpr,
    F: tl.constexpr,
    LOWEST: tl.constexpr,
    STEP: tl.constexpr,
):
    """Write the gradient of the log gates, `[B, T, H, F]`: the part from rows of the gate's own step plus the
    part from all later ones."""
    h = tl.program_id(0) % H
    steps = tl.cdiv(L, STEP)
    step = tl.program_id(0) // H % steps
    i = tl.program_id(0) // (H * steps)
    n, base, start, keys, first, last = _locate_segment(i, T, L, cu, blocks, None)
    rows = first + step * STEP + tl.arange(0, STEP)
    at = (start * H + h) * F
    after = tl.load(later + ((i.to(tl.int64) * steps + step) * H + h) * F + tl.arange(0, F))
    value = tile(owed + at, rows, last, H, F) + after[None, :]
    put(
        dg + at,
        tl.where(tile(gate + at, rows, last, H, F).to(tl.float32) > LOWEST, value, 0.0),
        rows,
        last,
        H,
        F,
    )


def _channels(walk: Walk, gate: Tensor, dtype: torch.dtype) -> Channels:
    """The tables of sums of log gates `[B, T, H, F]` that the kernels read."""
    cut, step = walk.cut, walk.cfg.block
    batch, length, heads, width = gate.shape
    new = lambda rows: torch.empty(  # noqa: E731
        cut.programs, cdiv(walk.segment, rows), 2, heads, width, device=gate.device, dtype=torch.float32
    )
    coarse, fine, hard = new(step), None, None
    if step > FINE_STEP:
        fine, hard = new(FINE_STEP), torch.zeros(cut.programs, heads, device=gate.device, dtype=torch.int32)
    some = max(1, 256 // width)
    _totals[(cut.programs * cdiv(walk.segment, step) * cdiv(heads, some),)](
        gate, coarse, fine, hard, cut.cu, cut.blocks, length, walk.segment, MILD,
        H=heads, F=width, HEADS=some, LOWEST=FLOOR, STEP=step, FINE=FINE_STEP, DT=DTYPE[dtype], num_warps=4,
    )  # fmt: skip
    return Channels(gate, coarse, fine, hard)


def _faded(walk: Walk, q, k, w_q, w_k, b_q, b_k, feature: str, gates: Channels) -> tuple[Tensor, Tensor]:
    """phi of q and phi of k, each times its fades, `[B, T, H, P F]`."""
    cut, (batch, length, heads, dim), halves, width = walk.cut, q.shape, walk.shape["P"], walk.shape["F"]
    # Four programs a multiprocessor hide the loads of each, where a pipeline leaves room for two. One stage
    # is miscompiled by Triton 3.6 below 64 features: it writes where it must not.
    narrow = width == 64
    y_q, y_k = (
        torch.empty(batch, length, heads, halves * width, device=q.device, dtype=q.dtype) for _ in range(2)
    )
    _features[(cut.programs * cdiv(walk.segment, ROWS) * heads * 2,)](
        q,
        k,
        w_q,
        w_k,
        b_q,
        b_k,
        gates.gate,
        gates.hard,
        y_q,
        y_k,
        cut.cu,
        cut.blocks,
        length,
        walk.segment,
        ROWS,
        H=heads,
        NQ=heads,
        NK=k.shape[2],
        D=dim,
        F=width,
        P=halves,
        FEATURE=feature,
        LOWEST=FLOOR,
        STEP=walk.cfg.block,
        FINE=FINE_STEP,
        num_warps=4,
        num_stages=1 if narrow or q.dtype == torch.float32 else 3,
        maxnreg=128 if narrow else None,
    )
    return y_q, y_k


@traceable
class _GatedLinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q, k, v, w_q, w_k, b_q, b_k, log_gate, mask, s0, z0, feature, normalize, cu_seqlens, keep_state
    ):
        batch, length, heads, _ = q.shape
        walk = Walk.over(q, v, w_q, feature, cu_seqlens, channel=True)
        g = _channels(walk, log_gate, q.dtype)
        y_q, y_k = _faded(walk, q, k, w_q, w_k, b_q, b_k, feature, g)
        end = walk.final(q.device) if keep_state else None
        states = walk.states(y_k, v, begin=None if s0 is None else (s0, z0), end=end, mask=mask, g=g)
        o = torch.empty(batch, length, heads, v.shape[3], device=q.device, dtype=v.dtype)
        den = walk.scalars(batch, q.device) if any(ctx.needs_input_grad) and normalize else None
        walk.outputs(y_q, y_k, v, o, states, normalize=normalize, mask=mask, g=g, den=den)
        s_end, z_end = end or (None, None)
        ctx.save_for_backward(
            q, k, v, w_q, w_k, b_q, b_k, y_q, y_k, mask, *g, *states, o, den, s_end, z_end, s0
        )
        ctx.walk, ctx.normalize = walk, normalize
        ctx.set_materialize_grads(False)
        return o, s_end, z_end

    @staticmethod
    def backward(ctx, do, ds_end, dz_end):
        q, k, v, w_q, w_k, b_q, b_k, y_q, y_k, mask, *rest = ctx.saved_tensors
        g, (s, z, o, den, s_end, z_end, s0) = Channels(*rest[:4]), rest[4:]
        walk, normalize = ctx.walk, ctx.normalize
        need_q, need_k, need_v, need_wq, need_wk, need_bq, need_bk, need_g, _, need_s0, need_z0 = (
            ctx.needs_input_grad[:11]
        )
        (batch, length, heads, _), halves = q.shape, walk.shape["P"]
        do, delta = torch.zeros_like(o) if do is None else do.contiguous(), None
        if normalize:
            do, delta, _ = walk.numerators(do, o, den)
        own_q, own_k = need_q or need_wq or need_bq, need_k or need_wk or need_bk
        d_q = d_k = dv = ds0 = dz0 = dg = begin = None
        if own_q or need_g:
            d_q = walk.maps(y_q, y_k, do, v, (s, z), mask=mask, g=g, row_scalar=delta)
        if own_k or need_v or need_g or need_s0 or need_z0:
            begin = both(ds_end, dz_end, s_end, z_end)
            end = ds0, dz0 = (
                (torch.empty_like(s0), s0.new_empty(s0.shape[:-1])) if need_s0 or need_z0 else (None, None)
            )
            if delta is None:
                delta = walk.scalars(batch, q.device).zero_()
            columns = {"g": g, "reverse": True}
            states = walk.states(
                y_q, do, begin=begin, end=None if ds0 is None else end, scalar=delta, **columns
            )
            if need_v:
                dv = torch.empty(batch, length, heads, v.shape[3], device=q.device, dtype=q.dtype)
                dv = group_sum(walk.outputs(y_k, y_q, do, dv, states, row_mask=mask, **columns), v)
            if own_k or need_g:
                d_k = walk.maps(y_k, y_q, v, do, states, row_mask=mask, scalar=delta, **columns)
        new = lambda: torch.empty(halves, *g.gate.shape, device=q.device, dtype=q.dtype)  # noqa: E731
        dy_q, dy_k, dg = (
            new() if own_q else None,
            new() if own_k else None,
            torch.empty_like(g.gate) if need_g else None,
        )
        if not (d_q is d_k is None):
            cut, steps = walk.cut, cdiv(walk.segment, walk.cfg.block)
            shape, where = (
                {"H": heads, "F": walk.shape["F"], "STEP": walk.cfg.block},
                (cut.cu, cut.blocks, length, walk.segment),
            )
            numbers = lambda *n: torch.empty(*n, heads, shape["F"], device=q.device, dtype=torch.float32)  # noqa: E731
            owed, sums = (numbers(batch, length), numbers(cut.programs, steps)) if need_g else (None, None)
            _gradients[(cut.programs * steps * heads,)](
                d_q,
                d_k,
                y_q,
                y_k,
                dy_q,
                dy_k,
                g.gate,
                g.hard,
                owed,
                sums,
                *where,
                batch * length,
                **shape,
                P=halves,
                FEATURE=walk.shape["FEATURE"],
                LOWEST=FLOOR,
                FINE=FINE_STEP,
                DT=DTYPE[q.dtype],
                num_warps=4,
            )
            if need_g:
                ends = None
                if begin is not None:
                    ends = (
                        ((begin[0] * s_end).sum(3) + begin[1] * z_end)
                        .unflatten(2, (halves, -1))
                        .sum(2)
                        .contiguous()
                    )
                _later[(cut.sequences * heads,)](
                    sums, ends, cut.chunk_start, length, walk.segment, **shape, num_warps=1
                )
                _gate_gradients[(cut.programs * steps * heads,)](
                    owed, sums, g.gate, dg, *where, **shape, LOWEST=FLOOR, num_warps=4
                )
        side_q = Side(dy_q, q, w_q, b_q, (need_q, need_wq, need_bq)) if own_q else None
        side_k = Side(dy_k, k, w_k, b_k, (need_k, need_wk, need_bk)) if own_k else None
        (dq, dw_q, db_q), (dk, dw_k, db_k) = gradients(side_q, side_k)
        return (dq, dk, dv, dw_q, dw_k, db_q, db_k, dg, None, ds0, dz0, *(None,) * 4)


def gated_linear_attention(
    q,
    k,
    v,
    w_q=None,
    w_k=None,
    *,
    log_gate: Tensor,
    feature="softmax_pm",
    b_q=None,
    b_k=None,
    normalize=True,
    key_mask=None,
    initial_state=None,
    return_state=False,
    cu_seqlens=None,
):
    """`relinear_kernels.gated_linear_attention` by the kernels of this module. Raises ValueError for shapes
    that do not fit together."""
    dtype, heads, states = v.dtype, q.shape[2], state_heads(w_k, q.shape[2])
    check_gate(log_gate, *q.shape[:3], w_k, q.shape[-1] if w_q is None else w_q.shape[-1])
    q, k, v, w_q, w_k, b_q, b_k, key_mask = prepared(q, k, v, w_q, w_k, b_q, b_k, key_mask, cu_seqlens)
    log_gate, initial_state = per_query_head(log_gate, heads, 2), per_query_head(initial_state, heads)
    s0, z0 = (
        (None, None)
        if initial_state is None
        else (initial_state.kv.contiguous(), initial_state.z.contiguous())
    )
    o, s, z = apply(
        "_GatedLinearAttention",
        q,
        k,
        v,
        w_q,
        w_k,
        b_q,
        b_k,
        log_gate.contiguous(),
        key_mask,
        s0,
        z0,
        feature,
        normalize,
        cu_seqlens,
        return_state,
        keep=14,
        outputs=(True, return_state, return_state),
    )
    o = o.to(dtype)
    if not return_state:
        return o
    return o, per_state_head(LinearState(s, z, torch.full_like(z, -torch.inf)), states)
