"""Linear attention in Triton: two forward kernels, three backward kernels and the matrices' gradient.

Forward. `_states` walks a head's chunks and stores the state each chunk starts from (S transposed, in the inputs' dtype; z in float32).
`_outputs` takes a block of queries: the stored state, then the keys between the chunk's start and the block, the last of them causal.
Backward, with g = dO / den and e = -(dO . O) / den (zero where the denominator is clamped), so that dA_ti = g_t . v_i + e_t:
`_queries` mirrors `_outputs` for dq, `_reverse_states` scans R = sum phi_q g^T and r = sum phi_q e from the end, `_keys` mirrors
`_outputs` for dk and dv. phi is recomputed wherever it is needed and never stored; x W is always formed as rows times matrix and no
accumulator is ever the transposed left operand of a product (miscompiled on Hopper by Triton 3.4 to 3.7.0).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from relinear_kernels.features import check_feature
from relinear_kernels.linear_attention_reference import EPS, LinearState
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


class Config(NamedTuple):
    """Tile sizes of one shape class. Fixed, so that the first call compiles each kernel once and tunes nothing."""

    block: int  # queries or keys of one program
    chunk: int  # positions between stored states
    scan: int  # rows one step of a state scan takes
    split: int  # columns of v one state program holds
    warps: tuple[int, int, int, int, int]  # states, outputs, queries, reverse states, keys
    stages: tuple[int, int, int, int, int]


def config(dim: int, value_dim: int, features: int, halves: int, dtype: torch.dtype) -> Config:
    """The configuration shipped for this shape class."""
    if dtype == torch.float32:  # products by fused multiply-add: small tiles
        return Config(16, 64, 16, min(value_dim, 64), (4, 4, 4, 4, 4), (1, 1, 1, 1, 1))
    if features * halves > 128:
        return Config(64, 64, 64, min(value_dim, 64), (8, 8, 8, 8, 8), (1, 1, 1, 1, 1))
    # below 64 features an unpipelined loop over queries is miscompiled by Triton 3.6 (wrong dk, or an illegal address): two stages
    stages = (3, 1, 1, 2, 1) if features >= 64 else (2, 2, 2, 2, 2)
    return Config(64, 64, 64, value_dim, (4, 4, 4, 4, 4), stages)


@triton.jit(do_not_specialize=["T"])
def _states(
    k, v, w, b, mask, g, s0, z0, s, z, s_end, z_end, cu, chunk_start, T, delay,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, V: tl.constexpr, F: tl.constexpr, P: tl.constexpr,
    FEATURE: tl.constexpr, BT: tl.constexpr, CS: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The state at every chunk's start, `[chunks, H, P, V, F]`, and at the end (`delay` keys before it), `[N, H, P F, V]`.

    A program holds one sign of phi and BV columns of v.
    """
    pid = tl.program_id(0)
    part = pid % (V // BV)
    half = (pid // (V // BV)) % P
    h = (pid // (V // BV * P)) % H
    n = pid // (V // BV * P * H)
    start, T = sequence(n, T, cu)
    chunk = first_chunk(n, T, chunk_start, CS)
    DT = k.dtype.element_ty
    f = tl.arange(0, F)
    c = part * BV + tl.arange(0, BV)
    k += (start * N + h // (H // N)) * D
    v += (start * N + h // (H // N)) * V + part * BV
    if w is not None:
        w = matrix(w + h * (D * F), D, F)
    if b is not None:
        b += h * F
    if g is not None:
        g += start * H + h
    at = ((n * H + h).to(tl.int64) * P + half) * F
    if s0 is not None:
        state = tl.load(s0 + (at + f[None, :]) * V + c[:, None])
        total = tl.load(z0 + at + f)
    else:
        state = tl.zeros([BV, F], tl.float32)
        total = tl.zeros([F], tl.float32)
    end = tl.maximum(T - delay, 0)
    for i in range(0, tl.cdiv(T, CS)):
        to = (((chunk + i) * H + h) * P + half) * F
        tl.store(s + to * V + c[:, None] * F + f[None, :], state.to(s.dtype.element_ty))
        tl.store(z + to + f, total)
        if g is not None:
            last = tl.load(g + (tl.minimum(i * CS + CS, T) - 1) * H)
            state *= tl.exp(last)
            total *= tl.exp(last)
        for j in tl.static_range(CS // BT):
            rows = i * CS + j * BT + tl.arange(0, BT)
            keep = kept(mask, start, rows, end)
            p = one_sided(preactivation(tile(k, rows, T, N, D), w, b, F), half, FEATURE)
            scale = keep.to(tl.float32)
            if g is not None:
                scale = tl.where(keep, tl.exp(last - tl.load(g + rows * H, mask=keep, other=0.0)), 0.0)
            p *= scale[:, None]
            x = tl.trans(tl.load(v + rows[:, None] * (N * V) + tl.arange(0, BV)[None, :], mask=keep[:, None], other=0.0))
            state = tl.dot(x, p.to(DT), state, input_precision="ieee")
            total += tl.sum(p, 0)
    if s_end is not None:
        tl.store(s_end + (at + f[None, :]) * V + c[:, None], state)
        tl.store(z_end + at + f, total)


@triton.jit(do_not_specialize=["T"])
def _outputs(
    q, k, v, wq, wk, bq, bk, mask, g, s, z, o, den, cu, blocks, chunk_start, T, eps,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, V: tl.constexpr, F: tl.constexpr, P: tl.constexpr,
    FEATURE: tl.constexpr, NORMALIZE: tl.constexpr, BT: tl.constexpr, CS: tl.constexpr,
):  # fmt: skip
    """A block of outputs and their (unclamped) denominators `[B, T, H]`."""
    h = tl.program_id(0) % H
    n, block = block_of(tl.program_id(0) // H, T, blocks, BT)
    start, T = sequence(n, T, cu)
    DT = q.dtype.element_ty
    f = tl.arange(0, F)
    rows = block * BT + tl.arange(0, BT)
    q += (start * H + h) * D
    o += (start * H + h) * V
    k += (start * N + h // (H // N)) * D
    v += (start * N + h // (H // N)) * V
    if wq is not None:
        wq = matrix(wq + h * (D * F), D, F)
    if wk is not None:
        wk = matrix(wk + h * (D * F), D, F)
    if bq is not None:
        bq += h * F
    if bk is not None:
        bk += h * F
    qp, qm = features(preactivation(tile(q, rows, T, H, D), wq, bq, F), FEATURE)
    chunk = block * BT // CS
    at = ((first_chunk(n, T, chunk_start, CS) + chunk) * H + h) * (P * F)
    d = tl.sum(qp * tl.load(z + at + f)[None, :], 1)
    acc = tl.dot(qp.to(DT), tl.trans(matrix(s + at * V, V, F)), input_precision="ieee")
    qp = qp.to(DT)
    if P == 2:
        d += tl.sum(qm * tl.load(z + at + F + f)[None, :], 1)
        qm = qm.to(DT)
        acc = tl.dot(qm, tl.trans(matrix(s + (at + F) * V, V, F)), acc, input_precision="ieee")
    if g is not None:
        g += start * H + h
        gr = tl.load(g + rows * H, mask=rows < T, other=0.0)
        acc *= tl.exp(gr)[:, None]
        d *= tl.exp(gr)
    for j in range(chunk * (CS // BT), block + 1):
        cols = j * BT + tl.arange(0, BT)
        kp, km = features(preactivation(tile(k, cols, T, N, D), wk, bk, F), FEATURE)
        a = tl.dot(qp, tl.trans(kp.to(DT)), input_precision="ieee")
        if P == 2:
            a = tl.dot(qm, tl.trans(km.to(DT)), a, input_precision="ieee")
        seen = (rows[:, None] >= cols[None, :]) & kept(mask, start, cols, T)[None, :]
        if g is not None:
            gc = tl.load(g + cols * H, mask=cols < T, other=0.0)
            a *= tl.exp(tl.where(seen, gr[:, None] - gc[None, :], 0.0))
        a = tl.where(seen, a, 0.0)
        d += tl.sum(a, 1)
        acc = tl.dot(a.to(DT), tile(v, cols, T, N, V), acc, input_precision="ieee")
    if NORMALIZE:
        acc *= (1 / tl.maximum(d, eps))[:, None]
    put(o, acc, rows, T, H, V)
    if den is not None:
        tl.store(den + (start + rows) * H + h, d, mask=rows < T)


@triton.jit(do_not_specialize=["T"])
def _queries(
    q, k, v, wq, wk, bq, bk, mask, g, s, z, o, den, do, dq, dx, dg, delta, cu, blocks, chunk_start, T, eps,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, V: tl.constexpr, F: tl.constexpr, P: tl.constexpr,
    FEATURE: tl.constexpr, NORMALIZE: tl.constexpr, BT: tl.constexpr, CS: tl.constexpr,
):  # fmt: skip
    """delta, and of a block of queries dq (if wanted), dx = the gradient of q W + b (if wanted) and the gate's row term."""
    h = tl.program_id(0) % H
    n, block = block_of(tl.program_id(0) // H, T, blocks, BT)
    start, T = sequence(n, T, cu)
    DT = q.dtype.element_ty
    f = tl.arange(0, F)
    rows = block * BT + tl.arange(0, BT)
    scalar = (start + rows) * H + h
    do = tile(do + (start * H + h) * V, rows, T, H, V)
    if NORMALIZE:
        d = tl.load(den + scalar, mask=rows < T, other=1.0)
        e = tl.sum(do.to(tl.float32) * tile(o + (start * H + h) * V, rows, T, H, V).to(tl.float32), 1)
        e = tl.where(d >= eps, e, 0.0)
        tl.store(delta + scalar, e, mask=rows < T)
        r = 1 / tl.maximum(d, eps)
    k += (start * N + h // (H // N)) * D
    v += (start * N + h // (H // N)) * V
    if wq is not None:
        tile_q = matrix(wq + h * (D * F), D, F)
    else:
        tile_q = None
    if wk is not None:
        wk = matrix(wk + h * (D * F), D, F)
    if bq is not None:
        bq += h * F
    if bk is not None:
        bk += h * F
    q += (start * H + h) * D
    chunk = block * BT // CS
    at = ((first_chunk(n, T, chunk_start, CS) + chunk) * H + h) * (P * F)
    dp = tl.dot(do, matrix(s + at * V, V, F), input_precision="ieee")
    if NORMALIZE:
        dp = (dp - e[:, None] * tl.load(z + at + f)[None, :]) * r[:, None]
    dm = dp
    if P == 2:
        dm = tl.dot(do, matrix(s + (at + F) * V, V, F), input_precision="ieee")
        if NORMALIZE:
            dm = (dm - e[:, None] * tl.load(z + at + F + f)[None, :]) * r[:, None]
    if g is not None:
        g += start * H + h
        gr = tl.load(g + rows * H, mask=rows < T, other=0.0)
        dp *= tl.exp(gr)[:, None]
        if P == 2:
            dm *= tl.exp(gr)[:, None]
    for j in range(chunk * (CS // BT), block + 1):
        cols = j * BT + tl.arange(0, BT)
        kp, km = features(preactivation(tile(k, cols, T, N, D), wk, bk, F), FEATURE)
        a = tl.dot(do, tl.trans(tile(v, cols, T, N, V)), input_precision="ieee")
        if NORMALIZE:
            a = (a - e[:, None]) * r[:, None]
        seen = (rows[:, None] >= cols[None, :]) & kept(mask, start, cols, T)[None, :]
        if g is not None:
            gc = tl.load(g + cols * H, mask=cols < T, other=0.0)
            a *= tl.exp(tl.where(seen, gr[:, None] - gc[None, :], 0.0))
        a = tl.where(seen, a, 0.0).to(DT)
        dp = tl.dot(a, kp.to(DT), dp, input_precision="ieee")
        if P == 2:
            dm = tl.dot(a, km.to(DT), dm, input_precision="ieee")
    y = preactivation(tile_again(q, rows, T, H, D), tile_q, bq, F)
    qp, qm = features(y, FEATURE)
    if dg is not None:  # from the rounded features, as in `_keys`: what is behind a gate then cancels to the last bit
        row = tl.sum(qp.to(DT).to(tl.float32) * dp, 1)
        if P == 2:
            row += tl.sum(qm.to(DT).to(tl.float32) * dm, 1)
        tl.store(dg + scalar, row, mask=rows < T)
    dy = features_backward(y, qp, qm, dp, dm, FEATURE).to(DT)
    if dx is not None:
        put(dx + (start * H + h) * F, dy, rows, T, H, F)
    if dq is not None:
        if wq is not None:
            put(dq + (start * H + h) * D, tl.dot(dy, tl.trans(tile_q), input_precision="ieee"), rows, T, H, D)
        else:
            put(dq + (start * H + h) * D, dy, rows, T, H, D)


@triton.jit(do_not_specialize=["T"])
def _reverse_states(
    q, w, b, g, den, delta, do, ds_end, dz_end, rs, rz, ds0, dz0, cu, chunk_start, T, eps,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, F: tl.constexpr, P: tl.constexpr,
    FEATURE: tl.constexpr, NORMALIZE: tl.constexpr, BT: tl.constexpr, CS: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The gradient of the state after every chunk, `[chunks, H, P, V, F]`, and of the initial state. Programs as in `_states`."""
    pid = tl.program_id(0)
    part = pid % (V // BV)
    half = (pid // (V // BV)) % P
    h = (pid // (V // BV * P)) % H
    n = pid // (V // BV * P * H)
    start, T = sequence(n, T, cu)
    chunk = first_chunk(n, T, chunk_start, CS)
    DT = q.dtype.element_ty
    f = tl.arange(0, F)
    c = part * BV + tl.arange(0, BV)
    q += (start * H + h) * D
    do += (start * H + h) * V + part * BV
    if w is not None:
        w = matrix(w + h * (D * F), D, F)
    if b is not None:
        b += h * F
    if g is not None:
        g += start * H + h
    at = ((n * H + h).to(tl.int64) * P + half) * F
    if ds_end is not None:
        state = tl.load(ds_end + (at + f[None, :]) * V + c[:, None])
        total = tl.load(dz_end + at + f)
    else:
        state = tl.zeros([BV, F], tl.float32)
        total = tl.zeros([F], tl.float32)
    count = tl.cdiv(T, CS)
    for back in range(0, count):
        i = count - 1 - back
        to = (((chunk + i) * H + h) * P + half) * F
        tl.store(rs + to * V + c[:, None] * F + f[None, :], state.to(rs.dtype.element_ty))
        tl.store(rz + to + f, total)
        if g is not None:
            carry = tl.exp(tl.load(g + (tl.minimum(i * CS + CS, T) - 1) * H))
            state *= carry
            total *= carry
        for j in tl.static_range(CS // BT):
            rows = i * CS + j * BT + tl.arange(0, BT)
            live = rows < T
            p = one_sided(preactivation(tile(q, rows, T, H, D), w, b, F), half, FEATURE)
            scale = live.to(tl.float32)
            if g is not None:
                scale = tl.where(live, tl.exp(tl.load(g + rows * H, mask=live, other=0.0)), 0.0)
            if NORMALIZE:
                scalar = (start + rows) * H + h
                scale *= 1 / tl.maximum(tl.load(den + scalar, mask=live, other=1.0), eps)
            p *= scale[:, None]
            x = tl.trans(tl.load(do + rows[:, None] * (H * V) + tl.arange(0, BV)[None, :], mask=live[:, None], other=0.0))
            state = tl.dot(x, p.to(DT), state, input_precision="ieee")
            if NORMALIZE:
                total -= tl.sum(p * tl.load(delta + scalar, mask=live, other=0.0)[:, None], 0)
    if ds0 is not None:
        tl.store(ds0 + (at + f[None, :]) * V + c[:, None], state)
        tl.store(dz0 + at + f, total)


@triton.jit(do_not_specialize=["T"])
def _keys(
    q, k, v, wq, wk, bq, bk, mask, g, rs, rz, den, delta, do, dk, dv, dx, dg, cu, blocks, chunk_start, T, eps,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, V: tl.constexpr, F: tl.constexpr, P: tl.constexpr,
    FEATURE: tl.constexpr, NORMALIZE: tl.constexpr, BT: tl.constexpr, CS: tl.constexpr, MAPS: tl.constexpr,
):  # fmt: skip
    """Of a block of keys, per query head: dv (if wanted) and, if MAPS, dk, dx = the gradient of k W + b and the gate's column term."""
    h = tl.program_id(0) % H
    n, block = block_of(tl.program_id(0) // H, T, blocks, BT)
    start, T = sequence(n, T, cu)
    DT = q.dtype.element_ty
    f = tl.arange(0, F)
    rows = block * BT + tl.arange(0, BT)
    keep = kept(mask, start, rows, T)
    q += (start * H + h) * D
    do += (start * H + h) * V
    den_h = start * H + h
    if wq is not None:
        wq = matrix(wq + h * (D * F), D, F)
    if wk is not None:
        tile_k = matrix(wk + h * (D * F), D, F)
    else:
        tile_k = None
    if bq is not None:
        bq += h * F
    if bk is not None:
        bk += h * F
    k += (start * N + h // (H // N)) * D
    fp, fm = features(preactivation(tile(k, rows, T, N, D), tile_k, bk, F), FEATURE)
    kp = tl.where(keep[:, None], fp, 0.0).to(DT)
    km = tl.where(keep[:, None], fm, 0.0).to(DT)
    x = tile(v + (start * N + h // (H // N)) * V, rows, T, N, V)
    chunk = block * BT // CS
    at = ((first_chunk(n, T, chunk_start, CS) + chunk) * H + h) * (P * F)
    state = matrix(rs + at * V, V, F)
    dp = tl.dot(x, state, input_precision="ieee") + tl.load(rz + at + f)[None, :]
    if dv is not None:
        acc = tl.dot(kp, tl.trans(state), input_precision="ieee")
    dm = dp
    if P == 2:
        state = matrix(rs + (at + F) * V, V, F)
        dm = tl.dot(x, state, input_precision="ieee") + tl.load(rz + at + F + f)[None, :]
        if dv is not None:
            acc = tl.dot(km, tl.trans(state), acc, input_precision="ieee")
    if g is not None:
        g += start * H + h
        gr = tl.load(g + rows * H, mask=rows < T, other=0.0)
        last = tl.load(g + (tl.minimum(chunk * CS + CS, T) - 1) * H)
        to_end = tl.exp(tl.where(rows < T, last - gr, 0.0))
        dp *= to_end[:, None]
        if dv is not None:
            acc *= to_end[:, None]
        if P == 2:
            dm *= to_end[:, None]
    for j in range(block, tl.minimum((chunk + 1) * (CS // BT), tl.cdiv(T, BT))):
        cols = j * BT + tl.arange(0, BT)
        qp, qm = features(preactivation(tile(q, cols, T, H, D), wq, bq, F), FEATURE)
        qp = qp.to(DT)
        if P == 2:
            qm = qm.to(DT)
        t = tile(do, cols, T, H, V)
        seen = (rows[:, None] <= cols[None, :]) & (cols < T)[None, :] & keep[:, None]
        if NORMALIZE:
            r = 1 / tl.maximum(tl.load(den + den_h + cols * H, mask=cols < T, other=1.0), eps)
        if g is not None:
            gc = tl.load(g + cols * H, mask=cols < T, other=0.0)
            fade = tl.exp(tl.where(seen, gc[None, :] - gr[:, None], 0.0))
        if dv is not None:
            a = tl.dot(kp, tl.trans(qp), input_precision="ieee")
            if P == 2:
                a = tl.dot(km, tl.trans(qm), a, input_precision="ieee")
            if NORMALIZE:
                a *= r[None, :]
            if g is not None:
                a *= fade
            acc = tl.dot(tl.where(seen, a, 0.0).to(DT), t, acc, input_precision="ieee")
        if MAPS:
            da = tl.dot(x, tl.trans(t), input_precision="ieee")
            if NORMALIZE:
                da = (da - tl.load(delta + den_h + cols * H, mask=cols < T, other=0.0)[None, :]) * r[None, :]
            if g is not None:
                da *= fade
            da = tl.where(seen, da, 0.0).to(DT)
            dp = tl.dot(da, qp, dp, input_precision="ieee")
            if P == 2:
                dm = tl.dot(da, qm, dm, input_precision="ieee")
    if dv is not None:
        put(dv + (start * H + h) * V, acc, rows, T, H, V)
    if MAPS:
        dp = tl.where(keep[:, None], dp, 0.0)
        if P == 2:
            dm = tl.where(keep[:, None], dm, 0.0)
        else:
            dm = dp
        y = preactivation(tile_again(k, rows, T, N, D), tile_k, bk, F)
        fp, fm = features(y, FEATURE)
        if dg is not None:
            col = tl.sum(fp.to(DT).to(tl.float32) * dp, 1)
            if P == 2:
                col += tl.sum(fm.to(DT).to(tl.float32) * dm, 1)
            tl.store(dg + den_h + rows * H, col, mask=rows < T)
        dy = features_backward(y, fp, fm, dp, dm, FEATURE).to(DT)
        if dx is not None:
            put(dx + (start * H + h) * F, dy, rows, T, H, F)
        if dk is not None:
            if wk is not None:
                put(dk + (start * H + h) * D, tl.dot(dy, tl.trans(tile_k), input_precision="ieee"), rows, T, H, D)
            else:
                put(dk + (start * H + h) * D, dy, rows, T, H, D)


@triton.jit
def _matrices(
    x, dy, dw, rows_total, per, H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BT: tl.constexpr
):  # fmt: skip
    """One program's share of dW = sum over rows of x^T dy: `[splits, H, D, F]` in float32."""
    h = tl.program_id(0) % H
    part = tl.program_id(0) // H
    begin = part * per
    end = tl.minimum(begin + per, rows_total)
    x += h // (H // N) * D + begin.to(tl.int64) * (N * D)
    dy += h * F + begin.to(tl.int64) * (H * F)
    acc = tl.zeros([D, F], tl.float32)
    for i in range(0, end - begin, BT):
        rows = i + tl.arange(0, BT)
        a = tile(x, rows, end - begin, N, D)
        acc = tl.dot(tl.trans(a), tile(dy, rows, end - begin, H, F), acc, input_precision="ieee")
    to = (part * H + h).to(tl.int64) * (D * F)
    tl.store(dw + to + tl.arange(0, D)[:, None] * F + tl.arange(0, F)[None, :], acc)


def matrix_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """sum_bt x_bt^T dy_bt for every query head: `[B, T, N, D]`, `[B, T, H, F]` -> `[H, D, F]` float32, in one fixed order."""
    batch, length, groups, dim = x.shape
    heads, width = dy.shape[2:]
    total = batch * length
    splits = max(1, min(cdiv(528, heads), total // 256))
    per = cdiv(total, splits)
    parts = torch.empty(cdiv(total, per), heads, dim, width, device=x.device, dtype=torch.float32)
    _matrices[(len(parts) * heads,)](
        x, dy, parts, total, per, H=heads, N=groups, D=dim, F=width, BT=64 if x.dtype != torch.float32 else 16,
        num_warps=4, num_stages=3 if x.dtype != torch.float32 else 1,
    )  # fmt: skip
    return parts.sum(0)


@triton.jit(do_not_specialize=["T"])
def _running_sums(x, out, T, H, CS: tl.constexpr, BH: tl.constexpr):
    """The running sum over each chunk's rows of `[B, T, H]`; a program per chunk."""
    n = tl.program_id(0) // tl.cdiv(T, CS)
    rows = tl.program_id(0) % tl.cdiv(T, CS) * CS + tl.arange(0, CS)
    cols = tl.arange(0, BH)
    at = (n.to(tl.int64) * T + rows[:, None]) * H + cols[None, :]
    inside = (rows < T)[:, None] & (cols < H)[None, :]
    tl.store(out + at, tl.cumsum(tl.load(x + at, mask=inside, other=0.0), 0), mask=inside)


def chunk_decay(log_decay: Tensor, batch: int, length: int, heads: int, chunk: int, cu_seqlens: Tensor | None) -> Tensor:
    """The running sum of the log decay within each chunk, `[B, T, H]` float32."""
    if log_decay.shape not in ((heads,), (batch, length, heads)):
        raise ValueError(f"log_decay must be [H={heads}] or [B={batch}, T={length}, H={heads}]; got {list(log_decay.shape)}")
    g = log_decay.float().expand(batch, length, heads)
    if cu_seqlens is not None:
        rows = [chunk_decay(x[None], 1, len(x), heads, chunk, None) for x in g[0].split(cu_seqlens.diff().tolist())]
        return torch.cat(rows, 1)
    g = g.contiguous()
    out = torch.empty_like(g)
    _running_sums[(batch * cdiv(length, chunk),)](g, out, length, heads, CS=chunk, BH=triton.next_power_of_2(heads))
    return out


def decay_gradient(term: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """From dG `[B, T, H]`, the gradient of the running sum, to the gradient of the log decay."""
    if cu_seqlens is None:
        dg = term.flip(1).cumsum(1).flip(1)
    else:
        dg = torch.cat([x.flip(0).cumsum(0).flip(0) for x in term[0].split(cu_seqlens.diff().tolist())])[None]
    return (dg.sum((0, 1)) if log_decay.ndim == 1 else dg).to(log_decay.dtype)


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, w_q, w_k, b_q, b_k, log_decay, mask, s0, z0, feature, normalize, cu_seqlens, keep_state, eps):
        batch, length, heads, dim = q.shape
        groups, value_dim = v.shape[2:]
        width = dim if w_q is None else w_q.shape[-1]
        halves = 2 if feature == "softmax_pm" else 1
        cfg = config(dim, value_dim, width, halves, q.dtype)
        cut = pieces(batch, length, cu_seqlens, cfg.block, cfg.chunk)
        g = None if log_decay is None else chunk_decay(log_decay, batch, length, heads, cfg.chunk, cu_seqlens)
        wq, wk = (None if w is None else w.to(q.dtype).contiguous() for w in (w_q, w_k))
        b_q, b_k = (None if b is None else b.contiguous() for b in (b_q, b_k))
        s = torch.empty(cut.chunks, heads, halves, value_dim, width, device=q.device, dtype=q.dtype)
        z = torch.empty(cut.chunks, heads, halves, width, device=q.device, dtype=torch.float32)
        s_end = z_end = None
        if keep_state:
            s_end = torch.empty(cut.sequences, heads, halves * width, value_dim, device=q.device, dtype=torch.float32)
            z_end = torch.empty(cut.sequences, heads, halves * width, device=q.device, dtype=torch.float32)
        shape = {"H": heads, "N": groups, "D": dim, "V": value_dim, "F": width, "P": halves, "FEATURE": feature}
        _states[(cut.sequences * heads * halves * (value_dim // cfg.split),)](
            k, v, wk, b_k, mask, g, s0, z0, s, z, s_end, z_end, cut.cu, cut.chunk_start, length, 0,
            **shape, BT=cfg.scan, CS=cfg.chunk, BV=cfg.split, num_warps=cfg.warps[0], num_stages=cfg.stages[0],
        )  # fmt: skip
        o = torch.empty(batch, length, heads, value_dim, device=q.device, dtype=v.dtype)
        training = any(ctx.needs_input_grad)
        den = torch.empty(batch, length, heads, device=q.device, dtype=torch.float32) if training and normalize else None
        _outputs[(cut.programs * heads,)](
            q, k, v, wq, wk, b_q, b_k, mask, g, s, z, o, den, cut.cu, cut.blocks, cut.chunk_start, length, eps,
            **shape, NORMALIZE=normalize, BT=cfg.block, CS=cfg.chunk, num_warps=cfg.warps[1], num_stages=cfg.stages[1],
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, w_q, w_k, wq, wk, b_q, b_k, log_decay, mask, g, s, z, o, den, s_end, z_end,
                              s0, cu_seqlens, cut.cu, cut.blocks, cut.chunk_start)  # fmt: skip
        ctx.shape, ctx.normalize, ctx.eps, ctx.cfg, ctx.cut = shape, normalize, eps, cfg, (cut.sequences, cut.programs)
        ctx.set_materialize_grads(False)
        return o, s_end, z_end

    @staticmethod
    def backward(ctx, do, ds_end, dz_end):
        (q, k, v, w_q, w_k, wq, wk, b_q, b_k, log_decay, mask, g, s, z, o, den, s_end, z_end,
         s0, cu_seqlens, cu, blocks, chunk_start) = ctx.saved_tensors  # fmt: skip
        shape, cfg, (sequences, programs), normalize = ctx.shape, ctx.cfg, ctx.cut, ctx.normalize
        need_q, need_k, need_v, need_wq, need_wk, need_bq, need_bk, need_g, _, need_s0, need_z0 = ctx.needs_input_grad[:11]
        batch, length, heads, dim = q.shape
        value_dim, width = v.shape[3], shape["F"]
        do = torch.zeros_like(o) if do is None else do.contiguous()
        like = lambda n, want: torch.empty(batch, length, heads, n, device=q.device, dtype=q.dtype) if want else None  # noqa: E731
        scalars = lambda want: torch.empty(batch, length, heads, device=q.device, dtype=torch.float32) if want else None  # noqa: E731
        delta, row, col = scalars(normalize), scalars(need_g), scalars(need_g)
        dq, dx = like(dim, need_q), like(width, need_wq or need_bq)
        flags = {**shape, "NORMALIZE": normalize, "CS": cfg.chunk}
        _queries[(programs * heads,)](
            q, k, v, wq, wk, b_q, b_k, mask, g, s, z, o, den, do, dq, dx, row, delta, cu, blocks, chunk_start, length, ctx.eps,
            **flags, BT=cfg.block, num_warps=cfg.warps[2], num_stages=cfg.stages[2],
        )  # fmt: skip
        dw_q = matrix_gradient(q, dx).to(w_q.dtype) if need_wq else None
        db_q = dx.sum((0, 1), dtype=torch.float32).to(b_q.dtype) if need_bq else None
        dk = dv = dx = ds0 = dz0 = None
        if need_k or need_v or need_wk or need_bk or need_g or need_s0 or need_z0:
            if (ds_end is None) != (dz_end is None):  # one half of the state was used: the other's gradient is zero
                ds_end = torch.zeros_like(s_end) if ds_end is None else ds_end
                dz_end = torch.zeros_like(z_end) if dz_end is None else dz_end
            rs, rz = torch.empty_like(s), torch.empty_like(z)
            if s0 is not None and (need_s0 or need_z0):
                ds0 = torch.empty_like(s0)
                dz0 = ds0.new_empty(ds0.shape[:-1])
            contiguous = lambda x: None if x is None else x.contiguous()  # noqa: E731
            forward_only = ("N",)
            _reverse_states[(sequences * heads * shape["P"] * (value_dim // cfg.split),)](
                q, wq, b_q, g, den, delta, do, contiguous(ds_end), contiguous(dz_end), rs, rz, ds0, dz0, cu, chunk_start,
                length, ctx.eps, **{n: x for n, x in flags.items() if n not in forward_only},
                BT=cfg.scan, BV=cfg.split, num_warps=cfg.warps[3], num_stages=cfg.stages[3],
            )  # fmt: skip
            dk, dv, dx = like(dim, need_k), like(value_dim, need_v), like(width, need_wk or need_bk)
            maps = dk is not None or dx is not None or col is not None
            # Two launches, values then maps: together their accumulators do not fit the registers.
            for out, to, with_maps in ([(dv, (None, None, None), False)] if need_v else []) + ([(None, (dk, dx, col), True)] if maps else []):
                _keys[(programs * heads,)](
                    q, k, v, wq, wk, b_q, b_k, mask, g, rs, rz, den, delta, do, to[0], out, *to[1:], cu, blocks, chunk_start,
                    length, ctx.eps, **flags, MAPS=with_maps, BT=cfg.block, num_warps=cfg.warps[4], num_stages=cfg.stages[4],
                )  # fmt: skip
        dw_k = matrix_gradient(k, dx).to(w_k.dtype) if need_wk else None
        db_k = dx.sum((0, 1), dtype=torch.float32).to(b_k.dtype) if need_bk else None
        d_decay = None
        if need_g:
            term = row - col
            if ds_end is not None:  # the whole sequence decays into the final state: every gate scales it
                last = (ds_end * s_end).sum((2, 3)) + (dz_end * z_end).sum(2)  # [sequences, H]
                if cu is None:
                    term[:, -1] += last
                else:
                    full = cu_seqlens.diff() > 0
                    term[0].index_add_(0, cu_seqlens[1:][full].long() - 1, last[full])
            d_decay = decay_gradient(term, log_decay, cu_seqlens)
        return (dq, group_sum(dk, k), group_sum(dv, v), dw_q, dw_k, db_q, db_k, d_decay, None, ds0, dz0, *(None,) * 5)


def group_sum(x: Tensor | None, like: Tensor) -> Tensor | None:
    """Sum the query heads that share a key head: `[B, T, H, D] -> [B, T, N, D]`."""
    if x is None or x.shape == like.shape:
        return x
    return x.view(*like.shape[:3], -1, like.shape[3]).sum(3)


def linear_attention(
    q, k, v, w_q=None, w_k=None, *, feature="softmax_pm", b_q=None, b_k=None, log_decay=None, normalize=True, key_mask=None,
    initial_state=None, return_state=False, cu_seqlens=None, eps=EPS,
):  # fmt: skip
    """`relinear_kernels.linear_attention` by the kernels of this module. Raises ValueError naming what they support."""
    check_feature(feature)
    (batch, length, heads, dim), dtype = q.shape, v.dtype
    if heads % k.shape[2]:
        raise ValueError(f"query heads must be a multiple of key heads; got {heads} query heads and {k.shape[2]} key heads")
    if (w_q is None) != (w_k is None):
        raise ValueError("linear_attention on the Triton path takes both feature matrices or neither")
    q, k, v = (x.to(widest(q, k, v)) for x in (q, k, v))  # exact; the output has v's dtype
    check_triton("linear_attention", feature, dim if w_q is None else w_q.shape[-1], q=q, k=k, v=v)
    if cu_seqlens is not None:
        check_packed(cu_seqlens, batch, length)
        if key_mask is not None:
            raise ValueError("cu_seqlens packs sequences without padding; got a key_mask as well")
    s0, z0 = (None, None) if initial_state is None else (initial_state.kv.contiguous(), initial_state.z.contiguous())
    o, s, z = _LinearAttention.apply(
        q.contiguous(), k.contiguous(), v.contiguous(), w_q, w_k, b_q, b_k, log_decay,
        None if key_mask is None else key_mask.contiguous(), s0, z0, feature, normalize, cu_seqlens, return_state, eps,
    )  # fmt: skip
    o = o.to(dtype)
    if not return_state:
        return o
    return o, LinearState(s, z, torch.full_like(z, -torch.inf))
