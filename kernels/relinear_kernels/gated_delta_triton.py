"""The gated delta rule in Triton: all chunks at once, but for the state that goes from one to the next.

    forward   _pairs     per chunk: (1 + P)^-1 and the products of queries with keys, with their decays
              _walk      per state, chunk after chunk: U, and the state that each chunk starts from
              _outputs   per chunk and query head: O
    backward  _walk_back per state, from the last chunk: dR, and the gradient of the state after each chunk
              _gradients per chunk and state: all others

In a chunk, as in the reference, with S the state that it starts from and gamma the running log decay:
    R = w V - (e K exp gamma) S,   U = (1 + P)^-1 R,   O = (Q exp gamma) S + A U
    S' = exp(gamma_C) S + (K exp(gamma_C - gamma))^T U
    dU = A^T dO + (K exp(gamma_C - gamma)) dS',   dR = (1 + P)^-T dU
    dP = -tril(dR U^T, -1),   dA = tril(dO U^T)
A decay acts between a row and a column of products, so the gradient of gamma is that of the row times the
row, less that of the column times the column.

Decays of pairs are exp of differences, of a state for a whole chunk at once, of channels for a column of the
chunk at a time, so none exceeds 1. A log decay below `LEAST` counts as that: exp of it is nothing beside 1 in
float32, and running sums stay exact enough.
"""

import torch
import triton
import triton.language as tl

from relinear_kernels.dispatch import check_packed
from relinear_kernels.gated_delta_reference import DeltaState, check_shapes
from relinear_kernels.traced import apply, traceable
from relinear_kernels.triton_common import block_of, pieces, put, sequence, tile, widest

LEAST = -30.0
CHUNK, CHANNEL_CHUNK = 32, 16  # rows of a chunk: with a decay a state, with one a channel
COLUMNS = 32  # columns of a state in a program that walks
NONE, STATE, CHANNEL = 0, 1, 2  # kinds of decay
DTYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _dot(a, b, DT: tl.constexpr):
    """The product of two tiles, in the dtype of queries, added in float32."""
    return tl.dot(a.to(DT), b.to(DT), input_precision="ieee")


@triton.jit
def _run(g, start, rows, T, M, K: tl.constexpr, KIND: tl.constexpr, BT: tl.constexpr):
    """Running log decays from the start of a chunk, `[BT, K]`, or `[BT, 1]` of a state. Rows behind the last
    have the last one's."""
    if KIND == 2:
        run = tl.cumsum(tile(g + start * K, rows, T, M, K), 0)
    elif KIND == 1:
        run = tl.cumsum(tl.load(g + start + rows * M, mask=rows < T, other=0.0), 0)[:, None]
    else:
        run = tl.zeros([BT, 1], tl.float32)
    return run


@triton.jit
def _last(run, BT: tl.constexpr):
    """The last row of `_run`, `[1, ..]`."""
    return tl.sum(tl.where(tl.arange(0, BT)[:, None] == BT - 1, run, 0.0), 0)[None, :]


@triton.jit
def _scalars(x, start, rows, T, M):
    """One number a row, float32; zero behind the last."""
    return tl.load(x + start + rows * M, mask=rows < T, other=0.0).to(tl.float32)


@triton.jit
def _pair_decays(run, KIND: tl.constexpr, BT: tl.constexpr):
    """exp(gamma_i - gamma_j) of a state, zero above the diagonal, `[BT, BT]`."""
    i = tl.arange(0, BT)
    if KIND == 1:
        gamma = tl.sum(run, 1)
        return tl.exp(tl.where(i[:, None] >= i[None, :], gamma[:, None] - gamma[None, :], float("-inf")))
    else:
        return (i[:, None] >= i[None, :]).to(tl.float32)


@triton.jit
def _column(run, j, BT: tl.constexpr):
    """exp(gamma_i - gamma_j) of every channel, zero where i is before j, `[BT, K]`."""
    i = tl.arange(0, BT)[:, None]
    own = tl.sum(tl.where(i == j, run, 0.0), 0)[None, :]
    return tl.exp(tl.where(i >= j, run - own, float("-inf")))


@triton.jit
def _row(k, rows_from, j, T, M, K: tl.constexpr):
    """Key j of a chunk, `[1, K]` float32; zero behind the last."""
    at = rows_from + j
    return tl.load(k + at * M * K + tl.arange(0, K), mask=at < T, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _products(
    x, kk, k, run, first, T, M, K: tl.constexpr, KIND: tl.constexpr, BT: tl.constexpr, DT: tl.constexpr
):
    """<x_i exp(gamma_i - gamma_j), k_j>, zero above the diagonal, `[BT, BT]` float32."""
    if KIND == 2:
        out = tl.zeros([BT, BT], tl.float32)
        x = x.to(tl.float32)
        for j in range(0, BT):
            column = tl.sum(x * _column(run, j, BT) * _row(k, first, j, T, M, K), 1)
            out = tl.where(tl.arange(0, BT)[None, :] == j, column[:, None], out)
    else:
        out = _dot(x, tl.trans(kk), DT) * _pair_decays(run, KIND, BT)
    return out


@triton.jit(do_not_specialize=["T"])
def _pairs(
    q, k, g, e, a, inverse, cu, blocks, T,
    H: tl.constexpr, M: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, BT: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Write A of each query head `[chunks, H, BT, BT]`, and (1 + P)^-1 `[chunks, M, BT, BT]` where there is
    an erase. A program has one chunk of one state."""
    m = tl.program_id(0) % M
    i = tl.program_id(0) // M
    n, b = block_of(i, T, blocks, BT)
    start, T = sequence(n, T, cu)
    first = b * BT
    rows = first + tl.arange(0, BT)
    r = tl.arange(0, BT)
    k += (start * M + m) * K
    kk = tile(k, rows, T, M, K)
    run = _run(g, start * M + m, rows, T, M, K, KIND, BT)
    square = r[:, None] * BT + r[None, :]
    i = i.to(tl.int64)
    if e is not None:
        x = kk.to(tl.float32) * _scalars(e, start * M + m, rows, T, M)[:, None]
        p = _products(x, kk, k, run, first, T, M, K, KIND, BT, DT)
        inv = (r[:, None] == r[None, :]).to(tl.float32)
        for row in range(1, BT):  # row by row: no power of P is formed
            own = tl.sum(tl.where((r[:, None] == row) & (r[None, :] < row), p, 0.0), 0)
            less = tl.sum(own[:, None] * inv, 0)
            inv = tl.where(r[:, None] == row, inv - less[None, :], inv)
        tl.store(inverse + (i * M + m) * (BT * BT) + square, inv)
    for s in range(0, H // M):
        h = m * (H // M) + s
        qq = tile(q + (start * H + h) * K, rows, T, H, K)
        tl.store(
            a + (i * H + h) * (BT * BT) + square, _products(qq, kk, k, run, first, T, M, K, KIND, BT, DT)
        )


@triton.jit
def _chunks(n, T, starts, BT: tl.constexpr):
    """The number of a sequence's first chunk among all."""
    if starts is not None:
        return tl.load(starts + n).to(tl.int64)
    else:
        return n.to(tl.int64) * tl.cdiv(T, BT)


@triton.jit
def _part(x, rows, T, STRIDE: tl.constexpr, W: tl.constexpr):
    """W columns of rows that lie STRIDE apart; zero behind the last."""
    at = x + rows[:, None] * STRIDE + tl.arange(0, W)[None, :]
    return tl.load(at, mask=(rows < T)[:, None], other=0.0)


@triton.jit
def _put_part(x, value, rows, T, STRIDE: tl.constexpr, W: tl.constexpr):
    """Store where `_part` would read."""
    at = x + rows[:, None] * STRIDE + tl.arange(0, W)[None, :]
    tl.store(at, value.to(x.dtype.element_ty), mask=(rows < T)[:, None])


@triton.jit
def _tall(x, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr):
    """Where W columns of a state `[K, V]` lie."""
    return x + tl.arange(0, K)[:, None] * V + tl.arange(0, W)[None, :]


@triton.jit(do_not_specialize=["T"])
def _walk(
    k, v, g, e, w, inverse, s0, u, states, end, cu, starts, T,
    M: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KIND: tl.constexpr, BT: tl.constexpr,
    W: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Write U `[B, T, M, V]`, the state before each chunk `[chunks, M, K, V]`, and the last one `end`. A
    program has W columns of one state of one sequence."""
    c = tl.program_id(0) % (V // W) * W
    m = tl.program_id(0) // (V // W) % M
    n = tl.program_id(0) // (V // W * M)
    chunk = _chunks(n, T, starts, BT)
    start, length = sequence(n, T, cu)
    place = (n.to(tl.int64) * M + m) * (K * V) + c
    if s0 is not None:
        s = tl.load(_tall(s0 + place, K, V, W)).to(tl.float32)
    else:
        s = tl.zeros([K, W], tl.float32)
    k += (start * M + m) * K
    v += (start * G + m // (M // G)) * V + c
    u += (start * M + m) * V + c
    r = tl.arange(0, BT)
    square = r[:, None] * BT + r[None, :]
    for b in range(0, tl.cdiv(length, BT)):
        rows = b * BT + r
        at = (chunk + b) * M + m
        tl.store(_tall(states + at * (K * V) + c, K, V, W), s.to(states.dtype.element_ty))
        kk = tile(k, rows, length, M, K).to(tl.float32)
        run = _run(g, start * M + m, rows, length, M, K, KIND, BT)
        value = _part(v, rows, length, G * V, W).to(tl.float32)
        if w is not None:
            value *= _scalars(w, start * M + m, rows, length, M)[:, None]
        if e is not None:
            x = kk * _scalars(e, start * M + m, rows, length, M)[:, None] * tl.exp(run)
            value = _dot(tl.load(inverse + at * (BT * BT) + square), value - _dot(x, s, DT), DT)
        _put_part(u, value, rows, length, M * V, W)
        last = _last(run, BT)
        s = s * tl.trans(tl.exp(last)) + _dot(tl.trans(kk * tl.exp(last - run)), value, DT)
    if end is not None:
        tl.store(_tall(end + place, K, V, W), s)


@triton.jit(do_not_specialize=["T"])
def _outputs(
    q, g, a, u, states, o, cu, blocks, T,
    H: tl.constexpr, M: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KIND: tl.constexpr, BT: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """Write O `[B, T, H, V]`. A program has one chunk of one query head."""
    h = tl.program_id(0) % H
    i = tl.program_id(0) // H
    n, b = block_of(i, T, blocks, BT)
    start, T = sequence(n, T, cu)
    m = h // (H // M)
    r = tl.arange(0, BT)
    rows = b * BT + r
    i = i.to(tl.int64)
    run = _run(g, start * M + m, rows, T, M, K, KIND, BT)
    qq = tile(q + (start * H + h) * K, rows, T, H, K).to(tl.float32) * tl.exp(run)
    out = _dot(qq, tl.load(_tall(states + (i * M + m) * (K * V), K, V, V)), DT)
    weights = tl.load(a + (i * H + h) * (BT * BT) + r[:, None] * BT + r[None, :])
    out += _dot(weights, tile(u + (start * M + m) * V, rows, T, M, V), DT)
    put(o + (start * H + h) * V, out, rows, T, H, V)


@triton.jit(do_not_specialize=["T"])
def _walk_back(
    q, k, g, e, a, inverse, do, end, dr, states, ds0, cu, starts, T,
    H: tl.constexpr, M: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KIND: tl.constexpr, BT: tl.constexpr,
    W: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Write dR `[B, T, M, V]`, the gradient of the state after each chunk `[chunks, M, K, V]`, and that of
    the first state `ds0`. A program has W columns of one state of one sequence."""
    c = tl.program_id(0) % (V // W) * W
    m = tl.program_id(0) // (V // W) % M
    n = tl.program_id(0) // (V // W * M)
    chunk = _chunks(n, T, starts, BT)
    start, length = sequence(n, T, cu)
    place = (n.to(tl.int64) * M + m) * (K * V) + c
    if end is not None:
        ds = tl.load(_tall(end + place, K, V, W)).to(tl.float32)
    else:
        ds = tl.zeros([K, W], tl.float32)
    R: tl.constexpr = H // M
    q += (start * H + m * R) * K
    k += (start * M + m) * K
    do += (start * H + m * R) * V + c
    dr += (start * M + m) * V + c
    r = tl.arange(0, BT)
    square = r[:, None] * BT + r[None, :]
    count = tl.cdiv(length, BT)
    for back in range(0, count):
        b = count - 1 - back
        rows = b * BT + r
        at = (chunk + b) * M + m
        tl.store(_tall(states + at * (K * V) + c, K, V, W), ds.to(states.dtype.element_ty))
        kk = tile(k, rows, length, M, K).to(tl.float32)
        run = _run(g, start * M + m, rows, length, M, K, KIND, BT)
        last = _last(run, BT)
        du = _dot(kk * tl.exp(last - run), ds, DT)
        ds = ds * tl.trans(tl.exp(last))
        for s in range(0, R):
            grad = _part(do + s * V, rows, length, H * V, W)
            weights = tl.load(a + ((chunk + b) * H + m * R + s) * (BT * BT) + square)
            du += _dot(tl.trans(weights), grad, DT)
            qq = tile(q + s * K, rows, length, H, K).to(tl.float32) * tl.exp(run)
            ds += _dot(tl.trans(qq), grad, DT)
        if e is not None:
            du = _dot(tl.trans(tl.load(inverse + at * (BT * BT) + square)), du, DT)
            x = kk * _scalars(e, start * M + m, rows, length, M)[:, None] * tl.exp(run)
            ds -= _dot(tl.trans(x), du, DT)
        _put_part(dr, du, rows, length, M * V, W)
    if ds0 is not None:
        tl.store(_tall(ds0 + place, K, V, W), ds)


@triton.jit
def _of_products(
    d, x, kk, k, run, first, T, M, dx, dk,
    K: tl.constexpr, KIND: tl.constexpr, BT: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """The gradients of rows x and keys from d, that of `_products`, added to dx and dk."""
    if KIND == 2:
        x = x.to(tl.float32)
        i = tl.arange(0, BT)
        for j in range(0, BT):
            column = tl.sum(tl.where(i[None, :] == j, d, 0.0), 1)[:, None] * _column(run, j, BT)
            dx += column * _row(k, first, j, T, M, K)
            dk += tl.where(i[:, None] == j, tl.sum(column * x, 0)[None, :], 0.0)
    else:
        d *= _pair_decays(run, KIND, BT)
        dx += _dot(d, kk, DT)
        dk += _dot(tl.trans(d), x, DT)
    return dx, dk


@triton.jit(do_not_specialize=["T"])
def _gradients(
    q, k, v, g, e, w, do, u, dr, states, after, dq, dk, dv, dg, de, dw, cu, blocks, T,
    H: tl.constexpr, M: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KIND: tl.constexpr,
    BT: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Write the gradients of all arguments of the tokens; that of values `[B, T, M, V]`. A program has one
    chunk of one state."""
    m = tl.program_id(0) % M
    i = tl.program_id(0) // M
    n, b = block_of(i, T, blocks, BT)
    start, T = sequence(n, T, cu)
    R: tl.constexpr = H // M
    r = tl.arange(0, BT)
    first = b * BT
    rows = first + r
    own = start * M + m
    place = (i.to(tl.int64) * M + m) * (K * V)
    k += own * K
    kk = tile(k, rows, T, M, K)
    wide = kk.to(tl.float32)
    run = _run(g, own, rows, T, M, K, KIND, BT)
    last = _last(run, BT)
    s = tl.load(_tall(states + place, K, V, V))
    ds = tl.load(_tall(after + place, K, V, V))
    uu = tile(u + own * V, rows, T, M, V)
    grad_r = tile(dr + own * V, rows, T, M, V)
    late = _dot(uu, tl.trans(ds), DT) * tl.exp(last - run)  # of keys, by what they leave in the state
    dcol = late
    total = tl.sum(late * wide, 0) + tl.sum(s.to(tl.float32) * ds.to(tl.float32), 1) * tl.sum(tl.exp(last), 0)
    gamma = tl.zeros([BT, K], tl.float32)
    for a in range(0, R):
        h = m * R + a
        qq = tile(q + (start * H + h) * K, rows, T, H, K)
        grad = tile(do + (start * H + h) * V, rows, T, H, V)
        d = tl.where(r[:, None] >= r[None, :], _dot(grad, tl.trans(uu), DT), 0.0)
        dx = _dot(grad, tl.trans(s), DT) * tl.exp(run)
        dx, dcol = _of_products(d, qq, kk, k, run, first, T, M, dx, dcol, K, KIND, BT, DT)
        put(dq + (start * H + h) * K, dx, rows, T, H, K)
        gamma += dx * qq.to(tl.float32)
    if e is not None:
        erase = _scalars(e, own, rows, T, M)[:, None]
        x = wide * erase
        d = -tl.where(r[:, None] > r[None, :], _dot(grad_r, tl.trans(uu), DT), 0.0)
        dx = -_dot(grad_r, tl.trans(s), DT) * tl.exp(run)
        dx, dcol = _of_products(d, x, kk, k, run, first, T, M, dx, dcol, K, KIND, BT, DT)
        gamma += dx * x
        tl.store(de + own + rows * M, tl.sum(dx * wide, 1), mask=rows < T)
        put(dk + own * K, dx * erase + dcol, rows, T, M, K)
    else:
        put(dk + own * K, dcol, rows, T, M, K)
    gamma -= dcol * wide
    if KIND == 2:
        put(dg + own * K, tl.cumsum(gamma, 0, reverse=True) + total[None, :], rows, T, M, K)
    elif KIND == 1:
        of_state = tl.cumsum(tl.sum(gamma, 1), 0, reverse=True) + tl.sum(total, 0)
        tl.store(dg + own + rows * M, of_state, mask=rows < T)
    value = grad_r.to(tl.float32)
    if w is not None:
        vv = tile(v + (start * G + m // (M // G)) * V, rows, T, G, V).to(tl.float32)
        tl.store(dw + own + rows * M, tl.sum(value * vv, 1), mask=rows < T)
        value *= _scalars(w, own, rows, T, M)[:, None]
    put(dv + own * V, value, rows, T, M, V)


@traceable
class _GatedDelta(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, e, w, s0, cu_seqlens, keep_state):
        (batch, length, heads, width), states, (groups, columns) = q.shape, k.shape[2], v.shape[2:]
        kind = NONE if g is None else STATE if g.dim() == 3 else CHANNEL
        rows = CHANNEL_CHUNK if kind == CHANNEL else CHUNK
        cut = pieces(batch, length, cu_seqlens, rows)
        shape = {"M": states, "K": width, "KIND": kind, "BT": rows, "DT": DTYPE[q.dtype]}
        warps = 8 if max(width, columns) > 64 else 4
        new = lambda *n, dtype=torch.float32: torch.empty(*n, device=q.device, dtype=dtype)  # noqa: E731
        a = new(cut.programs, heads, rows, rows)
        inverse = None if e is None else new(cut.programs, states, rows, rows)
        _pairs[(cut.programs * states,)](
            q, k, g, e, a, inverse, cut.cu, cut.blocks, length, H=heads, **shape, num_warps=4
        )
        u = new(batch, length, states, columns, dtype=q.dtype)
        before = new(cut.programs, states, width, columns, dtype=q.dtype)
        end = new(cut.sequences, states, width, columns) if keep_state else None
        some = min(columns, COLUMNS)
        _walk[(cut.sequences * states * (columns // some),)](
            k, v, g, e, w, inverse, s0, u, before, end, cut.cu, cut.chunk_start, length,
            G=groups, V=columns, W=some, **shape, num_warps=4,
        )  # fmt: skip
        o = new(batch, length, heads, columns, dtype=q.dtype)
        _outputs[(cut.programs * heads,)](
            q, g, a, u, before, o, cut.cu, cut.blocks, length, H=heads, V=columns, **shape, num_warps=warps
        )
        ctx.save_for_backward(q, k, v, g, e, w, a, inverse, u, before, *cut[1:3], cut.chunk_start)
        ctx.shape, ctx.sequences, ctx.programs, ctx.warps = shape, cut.sequences, cut.programs, warps
        ctx.begins = s0 is not None
        ctx.set_materialize_grads(False)
        return o, end

    @staticmethod
    def backward(ctx, do, dend):
        q, k, v, g, e, w, a, inverse, u, before, cu, blocks, starts = ctx.saved_tensors
        (batch, length, heads, width), states, (groups, columns) = q.shape, k.shape[2], v.shape[2:]
        new = lambda *n, dtype=torch.float32: torch.empty(*n, device=q.device, dtype=dtype)  # noqa: E731
        do = torch.zeros(batch, length, heads, columns, device=q.device, dtype=q.dtype) if do is None else do
        do, dend = do.contiguous(), None if dend is None else dend.contiguous()
        dr = new(batch, length, states, columns, dtype=q.dtype)
        after = torch.empty_like(before)
        ds0 = new(ctx.sequences, states, width, columns) if ctx.begins else None
        some = min(columns, COLUMNS)
        _walk_back[(ctx.sequences * states * (columns // some),)](
            q, k, g, e, a, inverse, do, dend, dr, after, ds0, cu, starts, length,
            H=heads, V=columns, W=some, **ctx.shape, num_warps=4,
        )  # fmt: skip
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(dr)
        dg, de, dw = (None if x is None else torch.empty_like(x) for x in (g, e, w))
        _gradients[(ctx.programs * states,)](
            q, k, v, g, e, w, do, u, dr, before, after, dq, dk, dv, dg, de, dw, cu, blocks, length,
            H=heads, G=groups, V=columns, **ctx.shape, num_warps=ctx.warps,
        )  # fmt: skip
        dv = dv if states == groups else dv.unflatten(2, (groups, -1)).sum(3)
        return dq, dk, dv, dg, de, dw, ds0, None, None


def gated_delta(
    q, k, v, *, log_decay=None, erase=None, write=None, scale=None, key_mask=None, initial_state=None,
    return_state=False, cu_seqlens=None,
):  # fmt: skip
    """`relinear_kernels.gated_delta` by the kernels of this module. Raises ValueError for shapes that do not
    fit together."""
    check_shapes(q, k, v, log_decay, erase, write)
    if cu_seqlens is not None:
        check_packed(cu_seqlens, *q.shape[:2])
    dtype, each = v.dtype, k.shape[:3]
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    if log_decay is not None:
        log_decay = log_decay.float().clamp(min=LEAST)
        log_decay = log_decay.expand(each) if log_decay.dim() == 1 else log_decay
    if key_mask is not None:
        k = k * key_mask[..., None, None]
        if log_decay is not None:
            real = key_mask.view(*key_mask.shape, *(1,) * (log_decay.dim() - 2))
            log_decay = log_decay * real
    q, k, v = (x.to(widest(q, k, v)).contiguous() for x in (q, k, v))
    log_decay, erase, write = (
        None if x is None else x.float().contiguous() for x in (log_decay, erase, write)
    )
    s0 = None if initial_state is None else initial_state.s.float().contiguous()
    o, s = apply(
        "_GatedDelta", q, k, v, log_decay, erase, write, s0, cu_seqlens, return_state,
        keep=8, outputs=(True, return_state),
    )  # fmt: skip
    return (o.to(dtype), DeltaState(s)) if return_state else o.to(dtype)
