"""LoLCATs' hybrid in Triton: softmax inside the window, linear attention on everything older, one shared denominator.

Chunk states as in `linear_attention_triton` (absorbing keys `window` positions late). A block of queries starts from the last state
that lies wholly behind its first row's window, then walks the keys from there: those beyond the window enter linearly, those within
it by softmax relative to the row's exact maximum, found in a first pass because the linear weights beside it are not shifted. The
maximum's gradient goes to the key that attains it (the first, where several do).
"""

import torch
import triton
import triton.language as tl

from relinear_kernels.hybrid_attention_reference import EPS, HybridState, _check
from relinear_kernels.linear_attention_reference import LinearState
from relinear_kernels.linear_attention_triton import _states, group_sum, matrix_gradient
from relinear_kernels.sliding_window_attention_reference import extend
from relinear_kernels.triton_common import (
    block_of,
    cdiv,
    check_packed,
    check_triton,
    features,
    features_backward,
    first_chunk,
    kept,
    matrix,
    one_sided,
    pieces,
    preactivation,
    put,
    sequence,
    tile,
    tile_again,
    widest,
)


def config(dim: int, features: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Rows of a block, positions between stored states, warps, pipeline stages."""
    if dtype == torch.float32:
        return 16, 64, 4, 1
    # below 64 features an unpipelined loop is miscompiled by Triton 3.6 (see linear_attention_triton.config)
    return 64, 64, 8 if features > 64 else 4, 1 if features >= 64 else 2


@triton.jit(do_not_specialize=["T", "offset"])
def _forward(
    q, k, v, wq, wk, gamma, mask, s, z, o, den, top_at, arg_at, cu, blocks, chunk_start, T, offset, W, scale, eps,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, F: tl.constexpr, P: tl.constexpr,
    FEATURE: tl.constexpr, BT: tl.constexpr, CS: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % H
    n, block = block_of(tl.program_id(0) // H, T, blocks, BT)
    chunk = first_chunk(n, T + offset, chunk_start, CS)
    begin, Tk = sequence(n, T + offset, cu)
    start, T = sequence(n, T, cu)
    DT = q.dtype.element_ty
    f = tl.arange(0, F)
    rows = block * BT + tl.arange(0, BT)
    where = rows + offset
    k += (begin * N + h // (H // N)) * D
    v += (begin * N + h // (H // N)) * D
    qt = tile(q + (start * H + h) * D, rows, T, H, D)
    low = tl.maximum(block * BT + offset - W + 1, 0)
    end = (block * BT + offset + BT - 1) // BT + 1
    top = tl.full([BT], float("-inf"), tl.float32)
    arg = tl.full([BT], -1, tl.int32)
    for j in range(low // BT, end):
        cols = j * BT + tl.arange(0, BT)
        x = tl.dot(qt, tl.trans(tile(k, cols, Tk, N, D)), input_precision="ieee") * scale
        far = where[:, None] - cols[None, :]
        x = tl.where((far >= 0) & (far < W) & kept(mask, begin, cols, Tk)[None, :], x, float("-inf"))
        new = tl.max(x, 1)
        if arg_at is not None:
            first = tl.min(tl.where(x == new[:, None], cols[None, :], 2147483647), 1)
            arg = tl.where(new > top, first, arg)
        top = tl.maximum(top, new)
    top = tl.where(top == float("-inf"), 0.0, top)
    g = tl.load(gamma + h)
    if wq is not None:
        wq = matrix(wq + h * (D * F), D, F)
    if wk is not None:
        wk = matrix(wk + h * (D * F), D, F)
    qp, qm = features(preactivation(qt, wq, None, F), FEATURE)
    at = ((chunk + low // CS) * H + h) * (P * F)
    d = tl.sum(qp * tl.load(z + at + f)[None, :], 1)
    qp = qp.to(DT)
    acc = tl.dot(qp, tl.trans(matrix(s + at * D, D, F)), input_precision="ieee")
    if P == 2:
        d += tl.sum(qm * tl.load(z + at + F + f)[None, :], 1)
        qm = qm.to(DT)
        acc = tl.dot(qm, tl.trans(matrix(s + (at + F) * D, D, F)), acc, input_precision="ieee")
    for j in range(low // CS * (CS // BT), end):
        cols = j * BT + tl.arange(0, BT)
        kt = tile(k, cols, Tk, N, D)
        kp, km = features(preactivation(kt, wk, None, F), FEATURE)
        a = tl.dot(qp, tl.trans(kp.to(DT)), input_precision="ieee")
        if P == 2:
            a = tl.dot(qm, tl.trans(km.to(DT)), a, input_precision="ieee")
        far = where[:, None] - cols[None, :]
        x = tl.dot(qt, tl.trans(kt), input_precision="ieee") * scale - top[:, None]
        near = (far >= 0) & (far < W)
        a = tl.where(near, g * tl.exp(tl.where(near, x, 0.0)), a)
        a = tl.where((far >= 0) & kept(mask, begin, cols, Tk)[None, :], a, 0.0)
        d += tl.sum(a, 1)
        acc = tl.dot(a.to(DT), tile(v, cols, Tk, N, D), acc, input_precision="ieee")
    put(o + (start * H + h) * D, acc * (1 / tl.maximum(d, eps))[:, None], rows, T, H, D)
    if den is not None:
        scalar = (start + rows) * H + h
        tl.store(den + scalar, d, mask=rows < T)
        tl.store(top_at + scalar, top, mask=rows < T)
        tl.store(arg_at + scalar, arg, mask=rows < T)


@triton.jit(do_not_specialize=["T", "offset"])
def _queries(
    q, k, v, wq, wk, gamma, mask, s, z, o, den, top_at, arg_at, do, delta, share, dq, dx, cu, blocks, chunk_start,
    T, offset, W, scale, eps,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, F: tl.constexpr, P: tl.constexpr,
    FEATURE: tl.constexpr, BT: tl.constexpr, CS: tl.constexpr,
):  # fmt: skip
    """delta; share = sum over the window of p dA, which the maximum takes away again; dx = the gradient of q W; dq (if wanted)."""
    h = tl.program_id(0) % H
    n, block = block_of(tl.program_id(0) // H, T, blocks, BT)
    chunk = first_chunk(n, T + offset, chunk_start, CS)
    begin, Tk = sequence(n, T + offset, cu)
    start, T = sequence(n, T, cu)
    DT = q.dtype.element_ty
    f = tl.arange(0, F)
    rows = block * BT + tl.arange(0, BT)
    where = rows + offset
    k += (begin * N + h // (H // N)) * D
    v += (begin * N + h // (H // N)) * D
    here = (start * H + h) * D
    qt = tile(q + here, rows, T, H, D)
    t = tile(do + here, rows, T, H, D)
    scalar = (start + rows) * H + h
    d = tl.load(den + scalar, mask=rows < T, other=1.0)
    top = tl.load(top_at + scalar, mask=rows < T, other=0.0)
    e = tl.sum(t.to(tl.float32) * tile(o + here, rows, T, H, D).to(tl.float32), 1)
    e = tl.where(d >= eps, e, 0.0)
    tl.store(delta + scalar, e, mask=rows < T)
    r = 1 / tl.maximum(d, eps)
    g = tl.load(gamma + h)
    low = tl.maximum(block * BT + offset - W + 1, 0)
    end = (block * BT + offset + BT - 1) // BT + 1
    c = tl.zeros([BT], tl.float32)
    for j in range(low // BT, end):
        cols = j * BT + tl.arange(0, BT)
        x = tl.dot(qt, tl.trans(tile(k, cols, Tk, N, D)), input_precision="ieee") * scale - top[:, None]
        far = where[:, None] - cols[None, :]
        near = (far >= 0) & (far < W) & kept(mask, begin, cols, Tk)[None, :]
        da = (tl.dot(t, tl.trans(tile(v, cols, Tk, N, D)), input_precision="ieee") - e[:, None]) * r[:, None]
        c += tl.sum(tl.where(near, g * tl.exp(tl.where(near, x, 0.0)) * da, 0.0), 1)
    tl.store(share + scalar, c, mask=rows < T)
    if wq is not None:
        tile_q = matrix(wq + h * (D * F), D, F)
    else:
        tile_q = None
    if wk is not None:
        wk = matrix(wk + h * (D * F), D, F)
    at = ((chunk + low // CS) * H + h) * (P * F)
    dp = tl.dot(t, matrix(s + at * D, D, F), input_precision="ieee")
    dp = (dp - e[:, None] * tl.load(z + at + f)[None, :]) * r[:, None]
    dm = dp
    if P == 2:
        dm = tl.dot(t, matrix(s + (at + F) * D, D, F), input_precision="ieee")
        dm = (dm - e[:, None] * tl.load(z + at + F + f)[None, :]) * r[:, None]
    if dq is not None:
        arg = tl.load(arg_at + scalar, mask=rows < T, other=-1)
        acc = tl.zeros([BT, D], tl.float32)
    for j in range(low // CS * (CS // BT), end):
        cols = j * BT + tl.arange(0, BT)
        kt = tile(k, cols, Tk, N, D)
        kp, km = features(preactivation(kt, wk, None, F), FEATURE)
        far = where[:, None] - cols[None, :]
        keep = kept(mask, begin, cols, Tk)[None, :]
        da = (tl.dot(t, tl.trans(tile(v, cols, Tk, N, D)), input_precision="ieee") - e[:, None]) * r[:, None]
        a = tl.where((far >= W) & keep, da, 0.0).to(DT)
        dp = tl.dot(a, kp.to(DT), dp, input_precision="ieee")
        if P == 2:
            dm = tl.dot(a, km.to(DT), dm, input_precision="ieee")
        if dq is not None:
            near = (far >= 0) & (far < W) & keep
            x = tl.dot(qt, tl.trans(kt), input_precision="ieee") * scale - top[:, None]
            x = tl.where(near, g * tl.exp(tl.where(near, x, 0.0)) * da, 0.0)
            x -= tl.where(arg[:, None] == cols[None, :], c[:, None], 0.0)
            acc = tl.dot((x * scale).to(DT), kt, acc, input_precision="ieee")
    y = preactivation(tile_again(q + here, rows, T, H, D), tile_q, None, F)
    qp, qm = features(y, FEATURE)
    dy = features_backward(y, qp, qm, dp, dm, FEATURE).to(DT)
    if dx is not None:
        put(dx + (start * H + h) * F, dy, rows, T, H, F)
    if dq is not None:
        if wq is not None:
            acc = tl.dot(dy, tl.trans(tile_q), acc, input_precision="ieee")
        else:
            acc += dy.to(tl.float32)
        put(dq + here, acc, rows, T, H, D)


@triton.jit
def _first_block(c, offset, W, BT: tl.constexpr, CS: tl.constexpr):
    """The first block of queries that starts from chunk c's state; those of chunk c end where chunk c + 1's begin."""
    return tl.where(c > 0, tl.cdiv(tl.maximum(c * CS + W - 1 - offset, 0), BT), 0)


@triton.jit(do_not_specialize=["T", "offset"])
def _reverse_states(
    q, w, den, delta, do, ds_end, dz_end, rs, rz, ds0, dz0, cu, chunk_start, T, offset, W, eps,
    H: tl.constexpr, D: tl.constexpr, F: tl.constexpr, P: tl.constexpr,
    FEATURE: tl.constexpr, BT: tl.constexpr, CS: tl.constexpr,
):  # fmt: skip
    """The gradient of the state after every chunk of keys, `[chunks, H, P, D, F]`, and of the initial state."""
    pid = tl.program_id(0)
    half = pid % P
    h = (pid // P) % H
    n = pid // (P * H)
    chunk = first_chunk(n, T + offset, chunk_start, CS)
    begin, Tk = sequence(n, T + offset, cu)
    start, T = sequence(n, T, cu)
    DT = q.dtype.element_ty
    f = tl.arange(0, F)
    c = tl.arange(0, D)
    q += (start * H + h) * D
    do += (start * H + h) * D
    if w is not None:
        w = matrix(w + h * (D * F), D, F)
    at = ((n * H + h).to(tl.int64) * P + half) * F
    if ds_end is not None:
        state = tl.load(ds_end + (at + f[None, :]) * D + c[:, None])
        total = tl.load(dz_end + at + f)
    else:
        state = tl.zeros([D, F], tl.float32)
        total = tl.zeros([F], tl.float32)
    count = tl.cdiv(Tk, CS)
    for back in range(0, count):
        i = count - 1 - back
        to = (((chunk + i) * H + h) * P + half) * F
        tl.store(rs + to * D + c[:, None] * F + f[None, :], state.to(rs.dtype.element_ty))
        tl.store(rz + to + f, total)
        until = tl.minimum(_first_block(i + 1, offset, W, BT, CS), tl.cdiv(T, BT))
        for j in range(_first_block(i, offset, W, BT, CS), until):
            rows = j * BT + tl.arange(0, BT)
            live = rows < T
            scalar = (start + rows) * H + h
            p = one_sided(preactivation(tile(q, rows, T, H, D), w, None, F), half, FEATURE)
            r = 1 / tl.maximum(tl.load(den + scalar, mask=live, other=1.0), eps)
            p *= tl.where(live, r, 0.0)[:, None]
            state = tl.dot(tl.trans(tile(do, rows, T, H, D)), p.to(DT), state, input_precision="ieee")
            total -= tl.sum(p * tl.load(delta + scalar, mask=live, other=0.0)[:, None], 0)
    if ds0 is not None:
        tl.store(ds0 + (at + f[None, :]) * D + c[:, None], state)
        tl.store(dz0 + at + f, total)


@triton.jit(do_not_specialize=["T", "offset"])
def _keys(
    q, k, v, wq, wk, gamma, mask, rs, rz, den, top_at, arg_at, delta, share, do, dk, dv, dx, cu, blocks, chunk_start,
    T, offset, W, scale, eps,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, F: tl.constexpr, P: tl.constexpr,
    FEATURE: tl.constexpr, BT: tl.constexpr, CS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Of a block of keys, per query head, one part a launch: dv; "softmax" = the window's dk; "maps" = dx and the rest of dk, added."""
    h = tl.program_id(0) % H
    n, block = block_of(tl.program_id(0) // H, T + offset, blocks, BT)
    chunk = first_chunk(n, T + offset, chunk_start, CS)
    begin, Tk = sequence(n, T + offset, cu)
    start, T = sequence(n, T, cu)
    DT = q.dtype.element_ty
    f = tl.arange(0, F)
    rows = block * BT + tl.arange(0, BT)
    keep = kept(mask, begin, rows, Tk)
    older = (keep & (rows < Tk - W))[:, None]  # what the states have taken in
    q += (start * H + h) * D
    do += (start * H + h) * D
    first = start * H + h
    g = tl.load(gamma + h)
    k += (begin * N + h // (H // N)) * D
    kt = tile(k, rows, Tk, N, D)
    vt = tile(v + (begin * N + h // (H // N)) * D, rows, Tk, N, D)
    i = block * BT // CS
    at = ((chunk + i) * H + h) * (P * F)
    if PART != "softmax":
        if wq is not None:
            wq = matrix(wq + h * (D * F), D, F)
        if wk is not None:
            tile_k = matrix(wk + h * (D * F), D, F)
        else:
            tile_k = None
    if PART == "values":
        kp, km = features(preactivation(kt, tile_k, None, F), FEATURE)
        kp = kp.to(DT)
        acc = tl.dot(kp, tl.trans(matrix(rs + at * D, D, F)), input_precision="ieee")
        if P == 2:
            km = km.to(DT)
            acc = tl.dot(km, tl.trans(matrix(rs + (at + F) * D, D, F)), acc, input_precision="ieee")
        acc = tl.where(older, acc, 0.0)
    if PART == "softmax":
        acc = tl.zeros([BT, D], tl.float32)
    if PART == "maps":
        dp = tl.dot(vt, matrix(rs + at * D, D, F), input_precision="ieee") + tl.load(rz + at + f)[None, :]
        dp = tl.where(older, dp, 0.0)
        dm = dp
        if P == 2:
            dm = tl.dot(vt, matrix(rs + (at + F) * D, D, F), input_precision="ieee") + tl.load(rz + at + F + f)[None, :]
            dm = tl.where(older, dm, 0.0)
    until = tl.minimum(_first_block(i + 1, offset, W, BT, CS), tl.cdiv(T, BT))
    for j in range(tl.maximum(block * BT - offset, 0) // BT, until):
        cols = j * BT + tl.arange(0, BT)
        at_cols = first + cols * H
        qt = tile(q, cols, T, H, D)
        t = tile(do, cols, T, H, D)
        r = 1 / tl.maximum(tl.load(den + at_cols, mask=cols < T, other=1.0), eps)
        far = cols[None, :] + offset - rows[:, None]
        seen = keep[:, None] & (cols < T)[None, :] & (far >= 0)
        if PART != "maps":
            near = seen & (far < W)
            top = tl.load(top_at + at_cols, mask=cols < T, other=0.0)
            x = tl.dot(kt, tl.trans(qt), input_precision="ieee") * scale - top[None, :]
            x = tl.where(near, g * tl.exp(tl.where(near, x, 0.0)), 0.0)
        if PART != "softmax":
            qp, qm = features(preactivation(qt, wq, None, F), FEATURE)
            qp = qp.to(DT)
            if P == 2:
                qm = qm.to(DT)
        if PART == "values":
            a = tl.dot(kp, tl.trans(qp), input_precision="ieee")
            if P == 2:
                a = tl.dot(km, tl.trans(qm), a, input_precision="ieee")
            a = tl.where(seen & (far >= W), a, x) * r[None, :]
            acc = tl.dot(a.to(DT), t, acc, input_precision="ieee")
        else:
            e = tl.load(delta + at_cols, mask=cols < T, other=0.0)
            da = (tl.dot(vt, tl.trans(t), input_precision="ieee") - e[None, :]) * r[None, :]
            if PART == "softmax":
                c = tl.load(share + at_cols, mask=cols < T, other=0.0)
                arg = tl.load(arg_at + at_cols, mask=cols < T, other=-1)
                x = x * da - tl.where(rows[:, None] == arg[None, :], c[None, :], 0.0)
                acc = tl.dot((x * scale).to(DT), qt, acc, input_precision="ieee")
            else:
                da = tl.where(seen & (far >= W), da, 0.0).to(DT)
                dp = tl.dot(da, qp, dp, input_precision="ieee")
                if P == 2:
                    dm = tl.dot(da, qm, dm, input_precision="ieee")
    if PART == "values":
        put(dv + (begin * H + h) * D, acc, rows, Tk, H, D)
    if PART == "softmax":
        put(dk + (begin * H + h) * D, acc, rows, Tk, H, D)
    if PART == "maps":
        dp = tl.where(keep[:, None], dp, 0.0)
        if P == 2:
            dm = tl.where(keep[:, None], dm, 0.0)
        else:
            dm = dp
        y = preactivation(tile_again(k, rows, Tk, N, D), tile_k, None, F)
        fp, fm = features(y, FEATURE)
        dy = features_backward(y, fp, fm, dp, dm, FEATURE).to(DT)
        if dx is not None:
            put(dx + (begin * H + h) * F, dy, rows, Tk, H, F)
        if dk is not None:
            dk += (begin * H + h) * D
            near_dk = tile(dk, rows, Tk, H, D).to(tl.float32)
            if wk is not None:
                near_dk = tl.dot(dy, tl.trans(tile_k), near_dk, input_precision="ieee")
            else:
                near_dk += dy.to(tl.float32)
            put(dk, near_dk, rows, Tk, H, D)


class _Hybrid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, w_q, w_k, gamma, mask, s0, z0, feature, window, scale, eps, keep_state, cu_seqlens):
        (batch, length, heads, dim), groups = q.shape, k.shape[2]
        offset = k.shape[1] - length
        width, halves = dim if w_q is None else w_q.shape[-1], 2 if feature == "softmax_pm" else 1
        block, chunk, warps, stages = config(dim, width, q.dtype)
        cut = pieces(batch, length, cu_seqlens, block, chunk)
        chunks = cut.chunks if cu_seqlens is not None else batch * cdiv(k.shape[1], chunk)
        wq, wk = (None if w is None else w.to(q.dtype).contiguous() for w in (w_q, w_k))
        factor = gamma.float().contiguous()
        s = torch.empty(chunks, heads, halves, dim, width, device=q.device, dtype=q.dtype)
        z = torch.empty(chunks, heads, halves, width, device=q.device, dtype=torch.float32)
        s_end = z_end = None
        if keep_state:
            s_end = torch.empty(cut.sequences, heads, halves * width, dim, device=q.device, dtype=torch.float32)
            z_end = torch.empty(cut.sequences, heads, halves * width, device=q.device, dtype=torch.float32)
        shape = {"H": heads, "N": groups, "D": dim, "F": width, "P": halves, "FEATURE": feature, "CS": chunk}
        scan = 16 if q.dtype == torch.float32 else 64
        split = min(dim, 64) if q.dtype == torch.float32 else dim
        _states[(cut.sequences * heads * halves * (dim // split),)](
            k, v, wk, None, mask, None, s0, z0, s, z, s_end, z_end, cut.cu, cut.chunk_start, k.shape[1], window,
            **shape, V=dim, BT=scan, BV=split, num_warps=8 if split > 64 else 4, num_stages=2 if block == 64 else 1,
        )  # fmt: skip
        o = torch.empty_like(q)
        den = top = arg = None
        if any(ctx.needs_input_grad):
            den, top = (torch.empty(batch, length, heads, device=q.device, dtype=torch.float32) for _ in range(2))
            arg = torch.empty(batch, length, heads, device=q.device, dtype=torch.int32)
        shape |= {"BT": block, "num_warps": warps, "num_stages": stages}
        _forward[(cut.programs * heads,)](
            q, k, v, wq, wk, factor, mask, s, z, o, den, top, arg, cut.cu, cut.blocks, cut.chunk_start, length, offset, window,
            scale, eps, **shape,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, w_q, w_k, wq, wk, gamma, factor, mask, s, z, s_end, z_end, s0, o, den, top, arg,
                              cut.cu, cut.blocks, cut.chunk_start)  # fmt: skip
        ctx.shape, ctx.window, ctx.scale, ctx.eps, ctx.cut = shape, window, scale, eps, (cut.sequences, cut.programs)
        ctx.set_materialize_grads(False)
        return o, s_end, z_end

    @staticmethod
    def backward(ctx, do, ds_end, dz_end):
        (q, k, v, w_q, w_k, wq, wk, gamma, factor, mask, s, z, s_end, z_end, s0, o, den, top, arg,
         cu, blocks, chunk_start) = ctx.saved_tensors  # fmt: skip
        shape, (sequences, programs), eps, window, scale = ctx.shape, ctx.cut, ctx.eps, ctx.window, ctx.scale
        need_q, need_k, need_v, need_wq, need_wk, need_g, _, need_s0, need_z0 = ctx.needs_input_grad[:9]
        (batch, length, heads, dim), total = q.shape, k.shape[1]
        offset, width = total - length, shape["F"]
        do = torch.zeros_like(o) if do is None else do.contiguous()
        like = lambda t, n, want: torch.empty(batch, t, heads, n, device=q.device, dtype=q.dtype) if want else None  # noqa: E731
        delta, share = torch.empty_like(den), torch.empty_like(den)
        dq, dx = like(length, dim, need_q), like(length, width, need_wq)
        _queries[(programs * heads,)](
            q, k, v, wq, wk, factor, mask, s, z, o, den, top, arg, do, delta, share, dq, dx, cu, blocks, chunk_start,
            length, offset, window, scale, eps, **shape,
        )  # fmt: skip
        dw_q = matrix_gradient(q, dx).to(w_q.dtype) if need_wq else None
        d_gamma = (share.sum((0, 1)) / factor).to(gamma.dtype) if need_g else None
        dk = dv = dx = ds0 = dz0 = None
        if need_k or need_v or need_wk or need_s0 or need_z0:
            if (ds_end is None) != (dz_end is None):  # one half of the state was used: the other's gradient is zero
                ds_end = torch.zeros_like(s_end) if ds_end is None else ds_end
                dz_end = torch.zeros_like(z_end) if dz_end is None else dz_end
            contiguous = lambda x: None if x is None else x.contiguous()  # noqa: E731
            rs, rz = torch.empty_like(s), torch.empty_like(z)
            if s0 is not None and (need_s0 or need_z0):
                ds0 = torch.empty_like(s0)
                dz0 = ds0.new_empty(ds0.shape[:-1])
            flags = {n: x for n, x in shape.items() if n not in ("N", "num_warps")}
            _reverse_states[(sequences * heads * shape["P"],)](
                q, wq, den, delta, do, contiguous(ds_end), contiguous(dz_end), rs, rz, ds0, dz0, cu, chunk_start,
                length, offset, window, eps, **flags, num_warps=8 if dim > 64 else 4,
            )  # fmt: skip
            dk, dv, dx = like(total, dim, need_k), like(total, dim, need_v), like(total, width, need_wk)
            programs = programs if cu is not None else batch * cdiv(total, shape["BT"])
            wanted = {"values": need_v, "softmax": need_k, "maps": need_k or need_wk}
            for part in (p for p, want in wanted.items() if want):
                _keys[(programs * heads,)](
                    q, k, v, wq, wk, factor, mask, rs, rz, den, top, arg, delta, share, do, dk, dv, dx, cu, blocks, chunk_start,
                    length, offset, window, scale, eps, **shape, PART=part,
                )  # fmt: skip
        dw_k = matrix_gradient(k, dx).to(w_k.dtype) if need_wk else None
        return (dq, group_sum(dk, k), group_sum(dv, v), dw_q, dw_k, d_gamma, None, ds0, dz0, *(None,) * 6)


def hybrid_attention(
    q, k, v, w_q=None, w_k=None, *, feature="softmax_pm", window, window_factor, scale=None, key_mask=None, initial_state=None,
    return_state=False, cu_seqlens=None, eps=EPS, empty_ring,
):  # fmt: skip
    """`relinear_kernels.hybrid_attention` by the kernels of this module. Raises ValueError naming what they support.

    `empty_ring()` is the ring before the first token; only called for where a state is returned without one given.
    """
    _check(feature, window)
    (batch, length, heads, dim), dtype = q.shape, v.dtype
    if heads % k.shape[2]:
        raise ValueError(f"query heads must be a multiple of key heads; got {heads} query heads and {k.shape[2]} key heads")
    if (w_q is None) != (w_k is None):
        raise ValueError("hybrid_attention on the Triton path takes both feature matrices or neither")
    if v.shape[-1] != dim:
        raise ValueError(f"hybrid_attention on the Triton path takes v as wide as q and k; got {v.shape[-1]} and {dim}")
    q, k, v = (x.to(widest(q, k, v)) for x in (q, k, v))  # exact; the output has v's dtype
    check_triton("hybrid_attention", feature, dim if w_q is None else w_q.shape[-1], q=q, k=k, v=v)
    scale = dim**-0.5 if scale is None else scale
    keys, values, mask, ring, s0, z0 = k, v, key_mask, None, None, None
    if cu_seqlens is not None:
        check_packed(cu_seqlens, batch, length)
        if initial_state is not None or return_state or key_mask is not None:
            raise ValueError("hybrid_attention takes cu_seqlens without key_mask, initial_state or return_state")
    elif initial_state is not None or return_state:
        keys, values, mask, ring = extend(empty_ring() if initial_state is None else initial_state.ring, k, v, key_mask)
        if initial_state is not None:
            s0, z0 = initial_state.linear.kv.contiguous(), initial_state.linear.z.contiguous()
    o, s, z = _Hybrid.apply(
        q.contiguous(), keys.contiguous(), values.contiguous(), w_q, w_k, window_factor, None if mask is None else mask.contiguous(),
        s0, z0, feature, window, scale, eps, return_state, cu_seqlens,
    )  # fmt: skip
    o = o.to(dtype)
    return (o, HybridState(ring, LinearState(s, z, torch.full_like(z, -torch.inf)))) if return_state else o
