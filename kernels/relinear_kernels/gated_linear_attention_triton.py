"""Gated linear attention in Triton: a state scan and an output kernel, and their mirror images for the gradients.

The layout of `linear_attention_triton`, with one block per chunk. A pair (t, i) fades by exp(G_t - G_i) in every channel, which the
products absorb as exp(G_t - c) and exp(c - G_i): for pairs of different 16-row blocks c is the running gate at the start of t's block,
and both factors are at most 1; within a block c is the gate at its middle, and with gates of at least e^-8 both stay below e^64. Every
product keeps its full size for the tensor cores, and what is not wanted of it is dropped by `where`: it may be infinite.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from relinear_kernels.gated_linear_attention_reference import FLOOR, check_gate, check_gated
from relinear_kernels.linear_attention_reference import EPS, LinearState
from relinear_kernels.projection_triton import Side, gradients, group_sum
from relinear_kernels.triton_common import (
    block_of,
    features,
    features_backward,
    first_chunk,
    kept,
    matrix,
    one_sided,
    pieces,
    preactivation,
    prepared,
    put,
    sequence,
    tile,
)


class Config(NamedTuple):
    """Tile sizes of one shape class. Fixed, so that the first call compiles each kernel once and tunes nothing."""

    block: int  # rows of one program, and positions between stored states
    split: int  # columns of v one state program holds
    warps: tuple[int, int, int, int, int]  # states, outputs, queries, reverse states, keys
    stages: int


def config(dim: int, value_dim: int, features: int, dtype: torch.dtype) -> Config:
    """The configuration shipped for this shape class."""
    if dtype == torch.float32:  # products by fused multiply-add: small tiles
        return Config(16, min(value_dim, 64), (4, 4, 4, 4, 4), 1)
    if features > 64:
        return Config(64, min(value_dim, 64), (4, 8, 8, 4, 8), 1)
    # Blocks of 64 rows do not fit the registers: measured 1.5 (forward) to 1.9 times (with gradients) slower. Below 64 features an
    # unpipelined loop is miscompiled by Triton 3.6 (see linear_attention_triton.config).
    return Config(32, value_dim, (4, 4, 4, 4, 4), 1 if features == 64 else 2)


@triton.jit
def _gate(g, rows, T, H, F: tl.constexpr, LOWEST: tl.constexpr):
    """A block's log gates in float32, 0 beyond the sequence."""
    return tl.maximum(tile(g, rows, T, H, F).to(tl.float32), LOWEST)


@triton.jit
def _runs(gate, BT: tl.constexpr, F: tl.constexpr):
    """Sums of the gate over each 16-row block `[BT / 16, F]`, and the running gate from the chunk's start, the block's middle, its start."""
    x = tl.reshape(gate, [BT // 16, 16, F])
    sums = tl.sum(x, 1)
    begin = tl.cumsum(x, 1)
    middle = begin - tl.sum(tl.where((tl.arange(0, 16) < 8)[None, :, None], x, 0.0), 1)[:, None, :]
    run = begin + (tl.cumsum(sums, 0) - sums)[:, None, :]
    return sums, tl.reshape(run, [BT, F]), tl.reshape(middle, [BT, F]), tl.reshape(begin, [BT, F])


@triton.jit
def _until(sums, run, r, BT: tl.constexpr):
    """How a key fades until the start of 16-row block r; 1 for the keys of that block and after it, which nobody reads."""
    start = tl.sum(tl.where((tl.arange(0, BT // 16) < r)[:, None], sums, 0.0), 0)
    return tl.exp(tl.minimum(start[None, :] - run, 0.0))


@triton.jit
def _pairs(qp, kp, sums, run, middle, begin, DT: tl.constexpr, BT: tl.constexpr, TRANSPOSED: tl.constexpr):
    """sum_f phi_f(q_t) exp(G_tf - G_if) phi_f(k_i) of a block with itself, row t and column i; TRANSPOSED: row i and column t.

    Above the diagonal it is meaningless, and may be infinite.
    """
    block = tl.arange(0, BT) // 16
    qm = (qp * tl.exp(middle)).to(DT)
    km = (kp * tl.exp(-middle)).to(DT)
    if TRANSPOSED:
        a = tl.dot(km, tl.trans(qm), input_precision="ieee")
    else:
        a = tl.dot(qm, tl.trans(km), input_precision="ieee")
    a = tl.where(block[:, None] == block[None, :], a, 0.0)
    qs = (qp * tl.exp(begin)).to(DT)
    for r in range(1, BT // 16):
        ks = (kp * _until(sums, run, r, BT)).to(DT)
        if TRANSPOSED:
            x = tl.dot(ks, tl.trans(qs), input_precision="ieee")
            a = tl.where((block[:, None] < r) & (block[None, :] == r), x, a)
        else:
            x = tl.dot(qs, tl.trans(ks), input_precision="ieee")
            a = tl.where((block[:, None] == r) & (block[None, :] < r), x, a)
    return a


@triton.jit(do_not_specialize=["T"])
def _states(
    k, v, w, b, mask, g, s0, z0, s, z, s_end, z_end, cu, chunk_start, T,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, V: tl.constexpr, F: tl.constexpr, P: tl.constexpr,
    FEATURE: tl.constexpr, LOWEST: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The state at every chunk's start, `[chunks, H, P, V, F]`, and at the end, `[N, H, P F, V]`. A program: one sign, BV columns."""
    pid = tl.program_id(0)
    part = pid % (V // BV)
    half = (pid // (V // BV)) % P
    h = (pid // (V // BV * P)) % H
    n = pid // (V // BV * P * H)
    start, T = sequence(n, T, cu)
    chunk = first_chunk(n, T, chunk_start, BT)
    DT = k.dtype.element_ty
    f = tl.arange(0, F)
    c = part * BV + tl.arange(0, BV)
    k += (start * N + h // (H // N)) * D
    v += (start * N + h // (H // N)) * V + part * BV
    g += (start * H + h) * F
    if w is not None:
        w = matrix(w + h * (D * F), D, F)
    if b is not None:
        b += h * F
    at = ((n * H + h).to(tl.int64) * P + half) * F
    if s0 is not None:
        state = tl.load(s0 + (at + f[None, :]) * V + c[:, None])
        total = tl.load(z0 + at + f)
    else:
        state = tl.zeros([BV, F], tl.float32)
        total = tl.zeros([F], tl.float32)
    for i in range(0, tl.cdiv(T, BT)):
        to = (((chunk + i) * H + h) * P + half) * F
        tl.store(s + to * V + c[:, None] * F + f[None, :], state.to(s.dtype.element_ty))
        tl.store(z + to + f, total)
        rows = i * BT + tl.arange(0, BT)
        gate = _gate(g, rows, T, H, F, LOWEST)
        last = tl.sum(gate, 0)
        keep = kept(mask, start, rows, T)
        p = one_sided(preactivation(tile(k, rows, T, N, D), w, b, F), half, FEATURE)
        p = tl.where(keep[:, None], p * tl.exp(tl.minimum(last[None, :] - tl.cumsum(gate, 0), 0.0)), 0.0)
        x = tl.trans(tl.load(v + rows[:, None] * (N * V) + tl.arange(0, BV)[None, :], mask=keep[:, None], other=0.0))
        state = tl.dot(x, p.to(DT), state * tl.exp(last)[None, :], input_precision="ieee")
        total = total * tl.exp(last) + tl.sum(p, 0)
    if s_end is not None:
        tl.store(s_end + (at + f[None, :]) * V + c[:, None], state)
        tl.store(z_end + at + f, total)


@triton.jit(do_not_specialize=["T"])
def _outputs(
    q, k, v, wq, wk, bq, bk, mask, g, s, z, o, den, cu, blocks, T, eps,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, V: tl.constexpr, F: tl.constexpr, P: tl.constexpr,
    FEATURE: tl.constexpr, LOWEST: tl.constexpr, NORMALIZE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """A block of outputs and their (unclamped) denominators `[B, T, H]`."""
    h = tl.program_id(0) % H
    n, block = block_of(tl.program_id(0) // H, T, blocks, BT)
    start, T = sequence(n, T, cu)
    DT = q.dtype.element_ty
    f = tl.arange(0, F)
    rows = block * BT + tl.arange(0, BT)
    kv = start * N + h // (H // N)
    if wq is not None:
        wq = matrix(wq + h * (D * F), D, F)
    if wk is not None:
        wk = matrix(wk + h * (D * F), D, F)
    if bq is not None:
        bq += h * F
    if bk is not None:
        bk += h * F
    gate = _gate(g + (start * H + h) * F, rows, T, H, F, LOWEST)
    sums, run, middle, begin = _runs(gate, BT, F)
    x = preactivation(tile(q + (start * H + h) * D, rows, T, H, D), wq, bq, F)
    y = preactivation(tile(k + kv * D, rows, T, N, D), wk, bk, F)
    a = tl.zeros([BT, BT], tl.float32)
    d = tl.zeros([BT], tl.float32)
    acc = tl.zeros([BT, V], tl.float32)
    for half in range(P):
        qp = one_sided(x, half, FEATURE)
        a += _pairs(qp, one_sided(y, half, FEATURE), sums, run, middle, begin, DT, BT, False)
        qp *= tl.exp(run)
        at = (tl.program_id(0).to(tl.int64) * P + half) * F
        d += tl.sum(qp * tl.load(z + at + f)[None, :], 1)
        acc = tl.dot(qp.to(DT), tl.trans(matrix(s + at * V, V, F)), acc, input_precision="ieee")
    a = tl.where((rows[:, None] >= rows[None, :]) & kept(mask, start, rows, T)[None, :], a, 0.0)
    d += tl.sum(a, 1)
    acc = tl.dot(a.to(DT), tile(v + kv * V, rows, T, N, V), acc, input_precision="ieee")
    if NORMALIZE:
        acc *= (1 / tl.maximum(d, eps))[:, None]
    put(o + (start * H + h) * V, acc, rows, T, H, V)
    if den is not None:
        tl.store(den + (start + rows) * H + h, d, mask=rows < T)


@triton.jit
def _queries_half(
    do, da, e, r, kp, sums, run, middle, begin, s, z, DT: tl.constexpr, V: tl.constexpr, F: tl.constexpr,
    NORMALIZE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """The gradient of one sign of phi(q)."""
    block = tl.arange(0, BT) // 16
    dp = tl.dot(do, matrix(s, V, F), input_precision="ieee")
    if NORMALIZE:
        dp = (dp - e[:, None] * tl.load(z + tl.arange(0, F))[None, :]) * r[:, None]
    dp *= tl.exp(run)
    near = tl.where(block[:, None] == block[None, :], da, 0.0).to(DT)
    dp += tl.exp(middle) * tl.dot(near, (kp * tl.exp(-middle)).to(DT), input_precision="ieee")
    if BT > 16:
        far = tl.zeros([BT, F], tl.float32)
        for i in range(1, BT // 16):
            part = tl.where((block[:, None] == i) & (block[None, :] < i), da, 0.0).to(DT)
            far = tl.dot(part, (kp * _until(sums, run, i, BT)).to(DT), far, input_precision="ieee")
        dp += tl.exp(begin) * far
    return dp


@triton.jit(do_not_specialize=["T"])
def _queries(
    q, k, v, wq, wk, bq, bk, mask, g, s, z, o, den, do, dq, dx, dg, delta, cu, blocks, T, eps,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, V: tl.constexpr, F: tl.constexpr, P: tl.constexpr,
    FEATURE: tl.constexpr, LOWEST: tl.constexpr, NORMALIZE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """delta, and of a block of queries dq (if wanted), dx = the gradient of q W + b (if wanted) and the gate's row term."""
    h = tl.program_id(0) % H
    n, block = block_of(tl.program_id(0) // H, T, blocks, BT)
    start, T = sequence(n, T, cu)
    DT = q.dtype.element_ty
    rows = block * BT + tl.arange(0, BT)
    here = start * H + h
    kv = start * N + h // (H // N)
    scalar = (start + rows) * H + h
    do = tile(do + here * V, rows, T, H, V)
    e = tl.zeros([BT], tl.float32)
    r = e
    if NORMALIZE:
        d = tl.load(den + scalar, mask=rows < T, other=1.0)
        e = tl.sum(do.to(tl.float32) * tile(o + here * V, rows, T, H, V).to(tl.float32), 1)
        e = tl.where(d >= eps, e, 0.0)
        tl.store(delta + scalar, e, mask=rows < T)
        r = 1 / tl.maximum(d, eps)
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
    gate = _gate(g + here * F, rows, T, H, F, LOWEST)
    sums, run, middle, begin = _runs(gate, BT, F)
    da = tl.dot(do, tl.trans(tile(v + kv * V, rows, T, N, V)), input_precision="ieee")
    if NORMALIZE:
        da = (da - e[:, None]) * r[:, None]
    da = tl.where((rows[:, None] >= rows[None, :]) & kept(mask, start, rows, T)[None, :], da, 0.0)
    y = preactivation(tile(k + kv * D, rows, T, N, D), wk, bk, F)
    at = tl.program_id(0).to(tl.int64) * (P * F)
    dp = _queries_half(do, da, e, r, one_sided(y, 0, FEATURE), sums, run, middle, begin, s + at * V, z + at, DT, V, F, NORMALIZE, BT)
    dm = dp
    if P == 2:
        at += F
        dm = _queries_half(do, da, e, r, one_sided(y, 1, FEATURE), sums, run, middle, begin, s + at * V, z + at, DT, V, F, NORMALIZE, BT)
    x = preactivation(tile(q + here * D, rows, T, H, D), tile_q, bq, F)
    qp, qm = features(x, FEATURE)
    if dg is not None:  # from the rounded features, as in `_keys`: what is behind a gate then cancels to the last bit
        row = qp.to(DT).to(tl.float32) * dp
        if P == 2:
            row += qm.to(DT).to(tl.float32) * dm
        put(dg + here * F, row, rows, T, H, F)
    dy = features_backward(x, qp, qm, dp, dm, FEATURE).to(DT)
    if dx is not None:
        put(dx + here * F, dy, rows, T, H, F)
    if dq is not None:
        if wq is not None:
            put(dq + here * D, tl.dot(dy, tl.trans(tile_q), input_precision="ieee"), rows, T, H, D)
        else:
            put(dq + here * D, dy, rows, T, H, D)


@triton.jit(do_not_specialize=["T", "chunks"])
def _reverse_states(
    q, w, b, g, s, z, s_end, z_end, den, delta, do, ds_end, dz_end, rs, rz, ds0, dz0, dg, cu, chunk_start, T, chunks, eps,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, F: tl.constexpr, P: tl.constexpr,
    FEATURE: tl.constexpr, LOWEST: tl.constexpr, NORMALIZE: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The gradient of the state after every chunk, `[chunks, H, P, V, F]`, and of the initial state. Programs as in `_states`.

    And what the gates of a chunk owe to everything after it: that state times its gradient, summed over v, `[V / BV, chunks, H, P, F]`.
    """
    pid = tl.program_id(0)
    part = pid % (V // BV)
    half = (pid // (V // BV)) % P
    h = (pid // (V // BV * P)) % H
    n = pid // (V // BV * P * H)
    start, T = sequence(n, T, cu)
    chunk = first_chunk(n, T, chunk_start, BT)
    DT = q.dtype.element_ty
    f = tl.arange(0, F)
    c = part * BV + tl.arange(0, BV)
    q += (start * H + h) * D
    do += (start * H + h) * V + part * BV
    g += (start * H + h) * F
    if w is not None:
        w = matrix(w + h * (D * F), D, F)
    if b is not None:
        b += h * F
    at = ((n * H + h).to(tl.int64) * P + half) * F
    if ds_end is not None:
        state = tl.load(ds_end + (at + f[None, :]) * V + c[:, None])
        total = tl.load(dz_end + at + f)
    else:
        state = tl.zeros([BV, F], tl.float32)
        total = tl.zeros([F], tl.float32)
    count = tl.cdiv(T, BT)
    for back in range(0, count):
        i = count - 1 - back
        to = (((chunk + i) * H + h) * P + half) * F
        tl.store(rs + to * V + c[:, None] * F + f[None, :], state.to(rs.dtype.element_ty))
        tl.store(rz + to + f, total)
        if dg is not None:
            owed = tl.zeros([F], tl.float32)
            if back > 0:
                after = to + H * P * F
                owed = tl.sum(tl.load(s + after * V + c[:, None] * F + f[None, :]).to(tl.float32) * state, 0)
                if part == 0:
                    owed += tl.load(z + after + f) * total
            else:
                if ds_end is not None:
                    owed = tl.sum(tl.load(s_end + (at + f[None, :]) * V + c[:, None]) * state, 0)
                    if part == 0:
                        owed += tl.load(z_end + at + f) * total
            tl.store(dg + part * chunks.to(tl.int64) * (H * P * F) + to + f, owed)
        rows = i * BT + tl.arange(0, BT)
        live = rows < T
        gate = _gate(g, rows, T, H, F, LOWEST)
        last = tl.exp(tl.sum(gate, 0))
        p = one_sided(preactivation(tile(q, rows, T, H, D), w, b, F), half, FEATURE) * tl.exp(tl.cumsum(gate, 0))
        scale = live.to(tl.float32)
        if NORMALIZE:
            scalar = (start + rows) * H + h
            scale *= 1 / tl.maximum(tl.load(den + scalar, mask=live, other=1.0), eps)
        p *= scale[:, None]
        x = tl.trans(tl.load(do + rows[:, None] * (H * V) + tl.arange(0, BV)[None, :], mask=live[:, None], other=0.0))
        state = tl.dot(x, p.to(DT), state * last[None, :], input_precision="ieee")
        total *= last
        if NORMALIZE:
            total -= tl.sum(p * tl.load(delta + scalar, mask=live, other=0.0)[:, None], 0)
    if ds0 is not None:
        tl.store(ds0 + (at + f[None, :]) * V + c[:, None], state)
        tl.store(dz0 + at + f, total)


@triton.jit
def _keys_half(
    x, da, qp, sums, run, middle, begin, last, rs, rz, DT: tl.constexpr, V: tl.constexpr, F: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """The gradient of one sign of phi(k)."""
    block = tl.arange(0, BT) // 16
    dp = (tl.dot(x, matrix(rs, V, F), input_precision="ieee") + tl.load(rz + tl.arange(0, F))[None, :]) * last
    near = tl.where(block[:, None] == block[None, :], da, 0.0).to(DT)
    dp += tl.exp(-middle) * tl.dot(near, (qp * tl.exp(middle)).to(DT), input_precision="ieee")
    qs = (qp * tl.exp(begin)).to(DT)
    for i in range(1, BT // 16):
        part = tl.where((block[:, None] < i) & (block[None, :] == i), da, 0.0).to(DT)
        dp += _until(sums, run, i, BT) * tl.dot(part, qs, input_precision="ieee")
    return dp


@triton.jit(do_not_specialize=["T"])
def _keys(
    q, k, v, wq, wk, bq, bk, mask, g, rs, rz, den, delta, do, dk, dv, dx, row, owed, dg, cu, blocks, T, eps,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, V: tl.constexpr, F: tl.constexpr, P: tl.constexpr,
    FEATURE: tl.constexpr, LOWEST: tl.constexpr, NORMALIZE: tl.constexpr, BT: tl.constexpr, MAPS: tl.constexpr,
):  # fmt: skip
    """Of a block of keys, per query head: dv (if wanted) and, if MAPS, dk, dx = the gradient of k W + b and the gates' gradient."""
    h = tl.program_id(0) % H
    n, block = block_of(tl.program_id(0) // H, T, blocks, BT)
    start, T = sequence(n, T, cu)
    DT = q.dtype.element_ty
    rows = block * BT + tl.arange(0, BT)
    keep = kept(mask, start, rows, T)
    here = start * H + h
    kv = start * N + h // (H // N)
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
    gate = _gate(g + here * F, rows, T, H, F, LOWEST)
    sums, run, middle, begin = _runs(gate, BT, F)
    last = tl.exp(tl.minimum(tl.sum(gate, 0)[None, :] - run, 0.0))
    x = preactivation(tile(q + here * D, rows, T, H, D), wq, bq, F)
    y = preactivation(tile(k + kv * D, rows, T, N, D), tile_k, bk, F)
    t = tile(do + here * V, rows, T, H, V)
    seen = (rows[:, None] <= rows[None, :]) & (rows < T)[None, :] & keep[:, None]
    if NORMALIZE:
        scalar = (start + rows) * H + h
        r = 1 / tl.maximum(tl.load(den + scalar, mask=rows < T, other=1.0), eps)
    at = tl.program_id(0).to(tl.int64) * (P * F)
    if dv is not None:
        a = tl.zeros([BT, BT], tl.float32)
        acc = tl.zeros([BT, V], tl.float32)
        for half in range(P):
            kp = one_sided(y, half, FEATURE)
            a += _pairs(one_sided(x, half, FEATURE), kp, sums, run, middle, begin, DT, BT, True)
            kp = tl.where(keep[:, None], kp * last, 0.0).to(DT)
            acc = tl.dot(kp, tl.trans(matrix(rs + (at + half * F) * V, V, F)), acc, input_precision="ieee")
        a = tl.where(seen, a, 0.0)
        if NORMALIZE:
            a *= r[None, :]
        put(dv + here * V, tl.dot(a.to(DT), t, acc, input_precision="ieee"), rows, T, H, V)
    if MAPS:
        value = tile(v + kv * V, rows, T, N, V)
        da = tl.dot(value, tl.trans(t), input_precision="ieee")
        if NORMALIZE:
            da = (da - tl.load(delta + scalar, mask=rows < T, other=0.0)[None, :]) * r[None, :]
        da = tl.where(seen, da, 0.0)
        dp = _keys_half(value, da, one_sided(x, 0, FEATURE), sums, run, middle, begin, last, rs + at * V, rz + at, DT, V, F, BT)
        dp = tl.where(keep[:, None], dp, 0.0)
        dm = dp
        if P == 2:
            at += F
            dm = _keys_half(value, da, one_sided(x, 1, FEATURE), sums, run, middle, begin, last, rs + at * V, rz + at, DT, V, F, BT)
            dm = tl.where(keep[:, None], dm, 0.0)
        fp, fm = features(y, FEATURE)
        if dg is not None:
            term = tile(row + here * F, rows, T, H, F) - fp.to(DT).to(tl.float32) * dp
            if P == 2:
                term -= fm.to(DT).to(tl.float32) * dm
            later = tl.load(owed + tl.program_id(0).to(tl.int64) * F + tl.arange(0, F))
            term = tl.cumsum(term, 0, reverse=True) + later[None, :]
            above = tile(g + here * F, rows, T, H, F).to(tl.float32) > LOWEST
            put(dg + here * F, tl.where(above, term, 0.0), rows, T, H, F)
        dy = features_backward(y, fp, fm, dp, dm, FEATURE).to(DT)
        if dx is not None:
            put(dx + here * F, dy, rows, T, H, F)
        if dk is not None:
            if wk is not None:
                put(dk + here * D, tl.dot(dy, tl.trans(tile_k), input_precision="ieee"), rows, T, H, D)
            else:
                put(dk + here * D, dy, rows, T, H, D)


class _GatedLinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, w_q, w_k, b_q, b_k, log_gate, mask, s0, z0, feature, normalize, cu_seqlens, keep_state, eps):
        batch, length, heads, dim = q.shape
        groups, value_dim = v.shape[2:]
        width = log_gate.shape[-1]
        halves = 2 if feature == "softmax_pm" else 1
        cfg = config(dim, value_dim, width, q.dtype)
        cut = pieces(batch, length, cu_seqlens, cfg.block)
        wq, wk = (None if w is None else w.to(q.dtype) for w in (w_q, w_k))
        s = torch.empty(cut.chunks, heads, halves, value_dim, width, device=q.device, dtype=q.dtype)
        z = torch.empty(cut.chunks, heads, halves, width, device=q.device, dtype=torch.float32)
        s_end = z_end = None
        if keep_state:
            s_end = torch.empty(cut.sequences, heads, halves * width, value_dim, device=q.device, dtype=torch.float32)
            z_end = torch.empty(cut.sequences, heads, halves * width, device=q.device, dtype=torch.float32)
        shape = {"H": heads, "N": groups, "D": dim, "V": value_dim, "F": width, "P": halves, "FEATURE": feature, "LOWEST": FLOOR,
                 "BT": cfg.block, "num_stages": cfg.stages}  # fmt: skip
        _states[(cut.sequences * heads * halves * (value_dim // cfg.split),)](
            k, v, wk, b_k, mask, log_gate, s0, z0, s, z, s_end, z_end, cut.cu, cut.chunk_start, length,
            **shape, BV=cfg.split, num_warps=cfg.warps[0],
        )  # fmt: skip
        o = torch.empty(batch, length, heads, value_dim, device=q.device, dtype=v.dtype)
        training = any(ctx.needs_input_grad)
        den = torch.empty(batch, length, heads, device=q.device, dtype=torch.float32) if training and normalize else None
        _outputs[(cut.programs * heads,)](
            q, k, v, wq, wk, b_q, b_k, mask, log_gate, s, z, o, den, cut.cu, cut.blocks, length, eps,
            **shape, NORMALIZE=normalize, num_warps=cfg.warps[1],
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, w_q, w_k, wq, wk, b_q, b_k, log_gate, mask, s, z, o, den, s_end, z_end, s0,
                              cut.cu, cut.blocks, cut.chunk_start)  # fmt: skip
        ctx.shape, ctx.normalize, ctx.eps, ctx.cfg, ctx.cut = shape, normalize, eps, cfg, cut[:1] + cut[3:4] + cut[5:]
        ctx.set_materialize_grads(False)
        return o, s_end, z_end

    @staticmethod
    def backward(ctx, do, ds_end, dz_end):
        (q, k, v, w_q, w_k, wq, wk, b_q, b_k, log_gate, mask, s, z, o, den, s_end, z_end, s0,
         cu, blocks, chunk_start) = ctx.saved_tensors  # fmt: skip
        cfg, (sequences, programs, chunks), normalize = ctx.cfg, ctx.cut, ctx.normalize
        need_q, need_k, need_v, need_wq, need_wk, need_bq, need_bk, need_g, _, need_s0, need_z0 = ctx.needs_input_grad[:11]
        batch, length, heads, dim = q.shape
        value_dim, width = v.shape[3], log_gate.shape[3]
        do = torch.zeros_like(o) if do is None else do.contiguous()
        like = lambda n, want, dtype=q.dtype: torch.empty(batch, length, heads, n, device=q.device, dtype=dtype) if want else None  # noqa: E731
        delta = torch.empty_like(den) if normalize else None
        row = like(width, need_g, torch.float32)
        dq, dx = like(dim, need_q), like(width, need_wq or need_bq)
        flags = {**ctx.shape, "NORMALIZE": normalize}
        _queries[(programs * heads,)](
            q, k, v, wq, wk, b_q, b_k, mask, log_gate, s, z, o, den, do, dq, dx, row, delta, cu, blocks, length, ctx.eps,
            **flags, num_warps=cfg.warps[2],
        )  # fmt: skip
        side_q = Side(dx, q, w_q, b_q, (False, need_wq, need_bq))
        dk = dv = dx = ds0 = dz0 = dg = owed = None
        if need_k or need_v or need_wk or need_bk or need_g or need_s0 or need_z0:
            if (ds_end is None) != (dz_end is None):  # one half of the state was used: the other's gradient is zero
                ds_end = torch.zeros_like(s_end) if ds_end is None else ds_end
                dz_end = torch.zeros_like(z_end) if dz_end is None else dz_end
            rs, rz = torch.empty_like(s), torch.empty_like(z)
            if need_g:
                owed = torch.empty(value_dim // cfg.split, *z.shape, device=q.device, dtype=torch.float32)
            if s0 is not None and (need_s0 or need_z0):
                ds0 = torch.empty_like(s0)
                dz0 = ds0.new_empty(ds0.shape[:-1])
            contiguous = lambda x: None if x is None else x.contiguous()  # noqa: E731
            _reverse_states[(sequences * heads * flags["P"] * (value_dim // cfg.split),)](
                q, wq, b_q, log_gate, s, z, s_end, z_end, den, delta, do, contiguous(ds_end), contiguous(dz_end), rs, rz, ds0, dz0, owed,
                cu, chunk_start, length, chunks, ctx.eps, **{n: x for n, x in flags.items() if n != "N"},
                BV=cfg.split, num_warps=cfg.warps[3],
            )  # fmt: skip
            dk, dv, dx, dg = like(dim, need_k), like(value_dim, need_v), like(width, need_wk or need_bk), like(width, need_g, log_gate.dtype)
            maps = not (dk is dx is dg is None)
            if maps or need_v:
                owed = owed.sum((0, 3)) if need_g else None  # [chunks, H, F]
                _keys[(programs * heads,)](
                    q, k, v, wq, wk, b_q, b_k, mask, log_gate, rs, rz, den, delta, do, dk, dv, dx, row, owed, dg, cu, blocks,
                    length, ctx.eps, **flags, MAPS=maps, num_warps=cfg.warps[4],
                )  # fmt: skip
        (_, dw_q, db_q), (_, dw_k, db_k) = gradients(side_q, Side(dx, k, w_k, b_k, (False, need_wk, need_bk)))
        return (dq, group_sum(dk, k), group_sum(dv, v), dw_q, dw_k, db_q, db_k, dg, None, ds0, dz0, *(None,) * 5)


def gated_linear_attention(
    q, k, v, w_q=None, w_k=None, *, log_gate: Tensor, feature="softmax_pm", b_q=None, b_k=None, normalize=True, key_mask=None,
    initial_state=None, return_state=False, cu_seqlens=None, eps=EPS,
):  # fmt: skip
    """`relinear_kernels.gated_linear_attention` by the kernels of this module. Raises ValueError naming what they support."""
    check_gated(feature)
    dtype = v.dtype
    q, k, v, w_q, w_k, b_q, b_k, key_mask = prepared("gated_linear_attention", feature, q, k, v, w_q, w_k, b_q, b_k, key_mask, cu_seqlens)
    check_gate(log_gate, *q.shape[:3], q.shape[-1] if w_q is None else w_q.shape[-1])
    if q.dtype == torch.float16:
        raise ValueError("gated_linear_attention on the Triton path takes the dtypes torch.bfloat16, torch.float32 (faded keys leave the range"
                         " of float16); got torch.float16")  # fmt: skip
    s0, z0 = (None, None) if initial_state is None else (initial_state.kv.contiguous(), initial_state.z.contiguous())
    o, s, z = _GatedLinearAttention.apply(
        q, k, v, w_q, w_k, b_q, b_k, log_gate.contiguous(), key_mask, s0, z0, feature, normalize, cu_seqlens, return_state, eps,
    )  # fmt: skip
    o = o.to(dtype)
    if not return_state:
        return o
    return o, LinearState(s, z, torch.full_like(z, -torch.inf))
