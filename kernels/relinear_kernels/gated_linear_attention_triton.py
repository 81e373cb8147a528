"""Gated linear attention in Triton: a state scan and an output kernel, and their mirror images for the gradients.

One block of rows per chunk, and a stored state at the start of each. The features come as what phi is applied to (`projection_triton`). A
pair (t, i) fades by exp(G_t - G_i) in every channel, which the products absorb as exp(G_t - c) and exp(c - G_i) with c the running gate in
the middle of the block: bfloat16 has float32's exponents, so neither leaves its range while no channel loses more than e^60 over half a
block. That is the fast form of a kernel, for all blocks. A second launch of it, SUB = 16, writes the blocks again whose gates are harder: its c
is the middle of each 16 rows, which gates of at least e^-8 keep within e^64, and for pairs of different 16 rows the running gate at the
start of t's, which keeps both factors below 1.

Pairs that no query sees may be infinite: every product keeps its full size for the tensor cores, and `where` drops what is not wanted.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from relinear_kernels.gated_linear_attention_reference import CHUNK, FLOOR, check_gate, check_gated
from relinear_kernels.linear_attention_reference import EPS, LinearState, per_query_head, per_state_head, state_heads
from relinear_kernels.linear_attention_triton import PROGRAMS, both
from relinear_kernels.projection_triton import Side, gradients, group_sum, project
from relinear_kernels.triton_common import block_of, cdiv, first_chunk, kept, matrix, phi, phi_backward, pieces, prepared, put, sequence, tile

MILD = -60.0  # the log of what half a block may fade by in the fast form


class Config(NamedTuple):
    """Tile sizes of one shape class. Fixed, so that the first call compiles each kernel once and tunes nothing."""

    block: int  # rows of one program, and positions between stored states
    split: int  # columns of v one state program holds
    warps: tuple[int, int, int, int, int, int]  # states, outputs, queries, reverse states, values, keys
    stages: int
    registers: tuple[int | None, ...] = (None,) * 6  # of a thread, at most; as `warps`

    def options(self, kernel: int) -> dict:
        """How the kernel of this place in `warps` is compiled."""
        most = {} if self.registers[kernel] is None else {"maxnreg": self.registers[kernel]}
        return {"num_warps": self.warps[kernel], "num_stages": self.stages, **most}


def config(dim: int, value_dim: int, features: int, dtype: torch.dtype) -> Config:
    """The configuration shipped for this shape class."""
    if dtype == torch.float32:  # products by fused multiply-add: small tiles
        return Config(16, min(value_dim, 64), (4, 4, 4, 4, 4, 4), 1)
    if features > 64:
        return Config(64, min(value_dim, 64), (8, 8, 8, 4, 8, 8), 2)
    rows = 64 if features == 64 else 32  # 64 rows of fewer features are miscompiled by Triton 3.6: wrong gradients, illegal reads
    most = 168 if value_dim > 64 else None  # three programs a multiprocessor gain 6 % (forward) and lose less by the bytes then spilled
    return Config(rows, value_dim, (4, 4, 4, 4, 4, 4), 2, (None, most, most, None, most, most))


@triton.jit
def _gate(g, rows, T, H, F: tl.constexpr, LOWEST: tl.constexpr):
    """A block's log gates in float32, 0 beyond the sequence."""
    return tl.maximum(tile(g, rows, T, H, F).to(tl.float32), LOWEST)


@triton.jit(do_not_specialize=["T"])
def _totals(
    g, totals, hardest, cu, blocks, T, H, F: tl.constexpr, LOWEST: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr
):  # fmt: skip
    """The log of what each half of a block fades by, `[chunks, 2, H F]`, and the least of a head's, `[chunks, H]`. A program: BH heads."""
    parts = tl.cdiv(H, BH)
    i = (tl.program_id(0) // parts).to(tl.int64)
    h = tl.program_id(0) % parts * BH
    n, block = block_of(i.to(tl.int32), T, blocks, BT)
    start, T = sequence(n, T, cu)
    cols = h * F + tl.arange(0, BH * F)
    least = tl.zeros([BH * F], tl.float32)
    for half in tl.static_range(2):
        rows = block * BT + half * (BT // 2) + tl.arange(0, BT // 2)
        inside = (rows < T)[:, None] & (cols < H * F)[None, :]
        gate = tl.load(g + (start + rows)[:, None] * (H * F) + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        total = tl.sum(tl.maximum(gate, LOWEST), 0)
        tl.store(totals + (i * 2 + half) * (H * F) + cols, total, mask=cols < H * F)
        least = tl.minimum(least, total)
    heads = h + tl.arange(0, BH)
    tl.store(hardest + i * H + heads, tl.min(tl.reshape(least, [BH, F]), 1), mask=heads < H)


@triton.jit
def _weighted(x, p, DT: tl.constexpr):
    """sum_t x_t p_t: a small product with 16 rows, x rounded, what the rounding left and zeros. Cheaper than a sum over threads."""
    row = tl.arange(0, 16)[:, None]
    high = x.to(DT).to(tl.float32)
    x = tl.where(row == 0, high[None, :], tl.where(row == 1, (x - high)[None, :], 0.0)).to(DT)
    return tl.sum(tl.dot(x, p, input_precision="ieee"), 0)


@triton.jit
def _added(take, gate, DT: tl.constexpr, GT: tl.constexpr):
    """`take` (1, 0 or -1, [BT, BT]) times the gates. A product, not a scan: its sums lie in the registers as the features do."""
    take = take.to(tl.float32).to(DT)
    high = gate.to(DT)
    x = tl.dot(take, high, input_precision="ieee")
    if GT != DT:  # gates finer than the products' numbers, as two of these
        x = tl.dot(take, (gate - high.to(tl.float32)).to(DT), x, input_precision="ieee")
    return x


@triton.jit
def _fades(
    gate, totals, DT: tl.constexpr, GT: tl.constexpr, H: tl.constexpr, F: tl.constexpr, BT: tl.constexpr, SUB: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """Of queries: the running gate from the middle of each SUB rows, and the state's fade until there.

    REVERSE: of keys, the negative of the former, and the fade from there to the end of the block.
    """
    i = tl.arange(0, BT)[:, None]
    j = tl.arange(0, BT)[None, :]
    middle = i // SUB * SUB + SUB // 2
    run = _added((j <= i).to(tl.float32) - (j < middle).to(tl.float32), gate, DT, GT)
    if SUB == BT:
        far = tl.load(totals + REVERSE * H * F + tl.arange(0, F))[None, :]
    elif REVERSE:
        far = _added(j >= middle, gate, DT, GT)
    else:
        far = _added(j < middle, gate, DT, GT)
    if REVERSE:
        run = -run
    return run, tl.exp(far)


@triton.jit
def _beside(y, run, rows, T):
    """Preactivations laid out in the registers as run is: all that is made of them then needs no exchange between threads.

    Both conditions always hold where it matters, which the compiler cannot know: it moves y, of 16 bits, to where run is, and not
    before the first: what was loaded meanwhile need not wait for y.
    """
    y = tl.where((rows < T)[:, None], y, 0.0)
    return tl.where(run < float("inf"), y, 0.0).to(tl.float32)


@triton.jit
def _apart(gate, r, DT: tl.constexpr, GT: tl.constexpr, BT: tl.constexpr, SUB: tl.constexpr, REVERSE: tl.constexpr):
    """Of rows and of columns: how a query fades from the start of its SUB rows, and a key until that of the r-th SUB rows (1 from there on)."""
    i = tl.arange(0, BT)[:, None]
    j = tl.arange(0, BT)[None, :]
    begun = tl.exp(_added((j <= i) & (j >= i // SUB * SUB), gate, DT, GT))
    until = tl.exp(_added((j > i) & (j < r * SUB), gate, DT, GT))
    if REVERSE:
        return until, begun
    else:
        return begun, until


@triton.jit
def _theirs(x, r, BT: tl.constexpr, SUB: tl.constexpr, REVERSE: tl.constexpr):
    """Pairs of a query of the r-th SUB rows and an earlier key."""
    i = tl.arange(0, BT) // SUB
    if REVERSE:
        return tl.where((i[:, None] < r) & (i[None, :] == r), x, 0.0)
    else:
        return tl.where((i[:, None] == r) & (i[None, :] < r), x, 0.0)


@triton.jit
def _same(x, BT: tl.constexpr, SUB: tl.constexpr):
    """Pairs of the same SUB rows; all of them where the block is one."""
    if SUB < BT:
        i = tl.arange(0, BT) // SUB
        x = tl.where(i[:, None] == i[None, :], x, 0.0)
    return x


@triton.jit
def _far_pairs(
    a, x, y, sign, gate, DT: tl.constexpr, GT: tl.constexpr, FEATURE: tl.constexpr, BT: tl.constexpr, SUB: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """a plus the scores of rows x and columns y of different SUB rows. REVERSE: the rows are keys."""
    p = phi(x, sign, None, FEATURE)
    c = phi(y, sign, None, FEATURE)
    for r in range(1, BT // SUB):
        row, column = _apart(gate, r, DT, GT, BT, SUB, REVERSE)
        pairs = tl.dot((p * row).to(DT), tl.trans((c * column).to(DT)), input_precision="ieee")
        a += _theirs(pairs, r, BT, SUB, REVERSE)
    return a


@triton.jit
def _far_gradient(
    dp, da, y, sign, gate, DT: tl.constexpr, GT: tl.constexpr, FEATURE: tl.constexpr, BT: tl.constexpr, SUB: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """dp plus what the features of the rows owe to the columns y of different SUB rows."""
    c = phi(y, sign, None, FEATURE)
    for r in range(1, BT // SUB):
        row, column = _apart(gate, r, DT, GT, BT, SUB, REVERSE)
        dp += row * tl.dot(_theirs(da, r, BT, SUB, REVERSE).to(DT), (c * column).to(DT), input_precision="ieee")
    return dp


@triton.jit
def _row_features(x, sign, fade, far_fade, z, DT: tl.constexpr, F: tl.constexpr, FEATURE: tl.constexpr):
    """Of one sign: the faded features for the block's own columns and for the state, and the latter times z."""
    p = phi(x, sign, None, FEATURE) * fade
    far = p * far_fade
    return p.to(DT), far.to(DT), tl.sum(far * tl.load(z + tl.arange(0, F))[None, :], 1)


@triton.jit
def _gradient(x, s, z, e, r, da, c, fade, far_fade, V: tl.constexpr, F: tl.constexpr, BT: tl.constexpr, SUB: tl.constexpr):
    """The gradient of one sign of the rows' features: fade (far_fade r (x S + e z) + da c)."""
    dp = tl.dot(x, matrix(s, V, F), input_precision="ieee")
    dp = (dp + e * tl.load(z + tl.arange(0, F))[None, :]) * r * far_fade
    return fade * tl.dot(_same(da, BT, SUB), c, dp, input_precision="ieee")


@triton.jit
def _last(totals, chunk, h, H: tl.constexpr, F: tl.constexpr):
    """By what a chunk fades."""
    totals += (chunk.to(tl.int64) * 2 * H + h) * F + tl.arange(0, F)
    return tl.exp(tl.load(totals) + tl.load(totals + H * F))


@triton.jit
def _begin(s, z, at, c, f, V: tl.constexpr, BV: tl.constexpr, F: tl.constexpr):
    """BV columns of one sign of the state `[N, H, P F, V]` that a sequence begins with, transposed, and of z; zeros without one."""
    if s is not None:
        state = tl.load(s + (at + f[None, :]) * V + c[:, None])
        total = tl.load(z + at + f)
    else:
        state = tl.zeros([BV, F], tl.float32)
        total = tl.zeros([F], tl.float32)
    return state, total


@triton.jit
def _keep(s, z, to, state, total, c, f, V: tl.constexpr, F: tl.constexpr):
    """Store one sign of a chunk's state."""
    tl.store(s + to * V + c[:, None] * F + f[None, :], state.to(s.dtype.element_ty))
    tl.store(z + to + f, total)


@triton.jit
def _finish(s, z, at, state, total, c, f, V: tl.constexpr):
    """Store one sign of the state that `_begin` reads."""
    tl.store(s + (at + f[None, :]) * V + c[:, None], state)
    tl.store(z + at + f, total)


@triton.jit(do_not_specialize=["T"])
def _states(
    y, v, mask, g, s0, z0, s, z, totals, s_end, z_end, cu, chunk_start, T,
    H: tl.constexpr, C: tl.constexpr, N: tl.constexpr, V: tl.constexpr, F: tl.constexpr, P: tl.constexpr,
    FEATURE: tl.constexpr, LOWEST: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The state at every chunk's start, `[chunks, H, P, V, F]`, and at the end, `[N, H, P F, V]`. A program: BV columns of both signs."""
    pid = tl.program_id(0)
    part = pid % (V // BV)
    h = (pid // (V // BV)) % H
    n = pid // (V // BV * H)
    start, T = sequence(n, T, cu)
    chunk = first_chunk(n, T, chunk_start, BT)
    DT = v.dtype.element_ty
    f = tl.arange(0, F)
    c = part * BV + tl.arange(0, BV)
    j = tl.arange(0, BT)
    y += (start * C + h // (H // C)) * F
    v += (start * N + h // (H // N)) * V + part * BV
    g += (start * H + h) * F
    at = (n * H + h).to(tl.int64) * (P * F)
    state, total = _begin(s0, z0, at, c, f, V, BV, F)
    minus, below = state, total
    if P == 2:
        minus, below = _begin(s0, z0, at + F, c, f, V, BV, F)
    for i in range(0, tl.cdiv(T, BT)):
        to = ((chunk + i) * H + h) * (P * F)
        _keep(s, z, to, state, total, c, f, V, F)
        if P == 2:
            _keep(s, z, to + F, minus, below, c, f, V, F)
        rows = i * BT + j
        gate = _gate(g, rows, T, H, F, LOWEST)
        last = _last(totals, chunk + i, h, H, F)
        keep = kept(mask, start, rows, T)
        run = _added(j[None, :] > j[:, None], gate, DT, g.dtype.element_ty)
        features = _beside(tile(y, rows, T, C, F), run, rows, T)
        fade = tl.where(keep[:, None], tl.exp(run), 0.0)
        x = tl.trans(tl.load(v + rows[:, None] * (N * V) + tl.arange(0, BV)[None, :], mask=keep[:, None], other=0.0))
        ones = keep.to(tl.float32)
        p = (phi(features, 1.0, None, FEATURE) * fade).to(DT)
        state = tl.dot(x, p, state * last[None, :], input_precision="ieee")
        total = total * last + _weighted(ones, p, DT)
        if P == 2:
            p = (phi(features, -1.0, None, FEATURE) * fade).to(DT)
            minus = tl.dot(x, p, minus * last[None, :], input_precision="ieee")
            below = below * last + _weighted(ones, p, DT)
    if s_end is not None:
        _finish(s_end, z_end, at, state, total, c, f, V)
        if P == 2:
            _finish(s_end, z_end, at + F, minus, below, c, f, V)


@triton.jit
def _output(
    i, yr, yc, v, mask, g, totals, s, z, o, den, cu, blocks, T, eps,
    H: tl.constexpr, R: tl.constexpr, C: tl.constexpr, N: tl.constexpr, V: tl.constexpr, F: tl.constexpr, P: tl.constexpr,
    FEATURE: tl.constexpr, LOWEST: tl.constexpr, NORMALIZE: tl.constexpr, REVERSE: tl.constexpr, BT: tl.constexpr,
    SUB: tl.constexpr,
):  # fmt: skip
    """A block of o and its (unclamped) denominators `[B, T, H]`, or REVERSE: of dv, where rows are keys, columns queries and v is do."""
    h = i % H
    n, block = block_of(i // H, T, blocks, BT)
    totals += (i // H).to(tl.int64) * (2 * H * F) + h * F
    start, T = sequence(n, T, cu)
    DT = v.dtype.element_ty
    GT = g.dtype.element_ty
    rows = block * BT + tl.arange(0, BT)
    keep = kept(mask, start, rows, T)
    gate = _gate(g + (start * H + h) * F, rows, T, H, F, LOWEST)
    y = tile(yc + (start * C + h // (H // C)) * F, rows, T, C, F)
    x = tile(yr + (start * R + h // (H // R)) * F, rows, T, R, F)
    run, far_fade = _fades(gate, totals, DT, GT, H, F, BT, SUB, REVERSE)
    at = i.to(tl.int64) * (P * F)
    # The columns first, and both signs at once: what a product reads lies in shared memory or takes half the registers.
    y = _beside(y, run, rows, T)
    col_fade = tl.exp(-run)
    cp = (phi(y, 1.0, None, FEATURE) * col_fade).to(DT)
    if P == 2:
        cm = (phi(y, -1.0, None, FEATURE) * col_fade).to(DT)
    x = _beside(x, run, rows, T)
    fade = tl.exp(run)
    p, fp, d = _row_features(x, 1.0, fade, far_fade, z + at, DT, F, FEATURE)
    a = tl.dot(p, tl.trans(cp), input_precision="ieee")
    if P == 2:
        m, fm, dm = _row_features(x, -1.0, fade, far_fade, z + at + F, DT, F, FEATURE)
        a = tl.dot(m, tl.trans(cm), a, input_precision="ieee")
        d += dm
    a = _same(a, BT, SUB)
    if SUB < BT:
        for half in tl.static_range(P):
            a = _far_pairs(a, x, y, 1.0 - 2.0 * half, gate, DT, GT, FEATURE, BT, SUB, REVERSE)
    if REVERSE:
        a = tl.where(rows[:, None] <= rows[None, :], a, 0.0)
        if NORMALIZE:
            scale = tl.load(den + (start + rows) * H + h, mask=rows < T, other=1.0)
            a *= (1 / tl.maximum(scale, eps))[None, :]
    else:
        a = tl.where((rows[:, None] >= rows[None, :]) & keep[None, :], a, 0.0)
        d += tl.sum(a, 1)
    acc = tl.dot(fp, tl.trans(matrix(s + at * V, V, F)), input_precision="ieee")
    if P == 2:
        acc = tl.dot(fm, tl.trans(matrix(s + (at + F) * V, V, F)), acc, input_precision="ieee")
    acc = tl.dot(a.to(DT), tile(v + (start * N + h // (H // N)) * V, rows, T, N, V), acc, input_precision="ieee")
    if REVERSE:
        acc = tl.where(keep[:, None], acc, 0.0)
    else:
        if NORMALIZE:
            acc *= (1 / tl.maximum(d, eps))[:, None]
        if den is not None:
            tl.store(den + (start + rows) * H + h, d, mask=rows < T)
    put(o + (start * H + h) * V, acc, rows, T, H, V)


@triton.jit(do_not_specialize=["T", "count"])
def _outputs(
    hardest, count, yr, yc, v, mask, g, totals, s, z, o, den, cu, blocks, T, eps,
    H: tl.constexpr, R: tl.constexpr, C: tl.constexpr, N: tl.constexpr, V: tl.constexpr, F: tl.constexpr, P: tl.constexpr,
    FEATURE: tl.constexpr, LOWEST: tl.constexpr, LIMIT: tl.constexpr, NORMALIZE: tl.constexpr, REVERSE: tl.constexpr, BT: tl.constexpr,
    SUB: tl.constexpr,
):  # fmt: skip
    """`_output` of every block, or if SUB < BT of those whose gates are too hard for the fast form: few programs share the search for them."""
    if SUB == BT:
        _output(
            tl.program_id(0), yr, yc, v, mask, g, totals, s, z, o, den, cu, blocks, T, eps, H, R, C, N, V, F, P, FEATURE, LOWEST, NORMALIZE, REVERSE,
            BT, SUB,
        )  # fmt: skip
    else:
        per = tl.cdiv(count, tl.num_programs(0))
        first = tl.program_id(0) * per
        for j in range(0, tl.minimum(per, count - first)):
            if tl.load(hardest + first + j) < LIMIT:
                _output(
                    first + j, yr, yc, v, mask, g, totals, s, z, o, den, cu, blocks, T, eps, H, R, C, N, V, F, P, FEATURE, LOWEST,
                    NORMALIZE, REVERSE, BT, SUB,
                )  # fmt: skip


@triton.jit
def _map(
    i, yr, yc, x, v, mask, g, totals, s, z, o, den, delta, dy, dg, term, owed, cu, blocks, T, eps,
    H: tl.constexpr, R: tl.constexpr, C: tl.constexpr, X: tl.constexpr, N: tl.constexpr, V: tl.constexpr, F: tl.constexpr,
    P: tl.constexpr, FEATURE: tl.constexpr, LOWEST: tl.constexpr, NORMALIZE: tl.constexpr, REVERSE: tl.constexpr,
    BT: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """The gradient of what phi takes, of a block of queries, where x is do, or REVERSE: of keys, where x is v and v is do.

    Of queries also delta and the gates' row term, of keys the gates' gradient. All but delta only if wanted.
    """
    h = i % H
    n, block = block_of(i // H, T, blocks, BT)
    totals += (i // H).to(tl.int64) * (2 * H * F) + h * F
    start, T = sequence(n, T, cu)
    DT = v.dtype.element_ty
    GT = g.dtype.element_ty
    rows = block * BT + tl.arange(0, BT)
    keep = kept(mask, start, rows, T)
    x = tile(x + (start * X + h // (H // X)) * V, rows, T, X, V)
    da = tl.dot(x, tl.trans(tile(v + (start * N + h // (H // N)) * V, rows, T, N, V)), input_precision="ieee")
    e = 1.0 if REVERSE else 0.0
    r = 1.0
    if NORMALIZE:
        scalar = (start + rows) * H + h
        d = tl.load(den + scalar, mask=rows < T, other=1.0)
        over = 1 / tl.maximum(d, eps)
        if REVERSE:
            da = (da - tl.load(delta + scalar, mask=rows < T, other=0.0)[None, :]) * over[None, :]
        else:
            e = tl.sum(x.to(tl.float32) * tile(o + (start * H + h) * V, rows, T, H, V).to(tl.float32), 1)
            e = tl.where(d >= eps, e, 0.0)
            tl.store(delta + scalar, e, mask=rows < T)
            e = -e[:, None]
            r = over[:, None]
            da = (da + e) * r
    if REVERSE:
        da = tl.where(rows[:, None] <= rows[None, :], da, 0.0).to(DT)
    else:
        da = tl.where((rows[:, None] >= rows[None, :]) & keep[None, :], da, 0.0).to(DT)
    gate = _gate(g + (start * H + h) * F, rows, T, H, F, LOWEST)
    y = tile(yc + (start * C + h // (H // C)) * F, rows, T, C, F)
    run, far_fade = _fades(gate, totals, DT, GT, H, F, BT, SUB, REVERSE)
    at = i.to(tl.int64) * (P * F)
    y = _beside(y, run, rows, T)
    c = tl.exp(-run)
    cp = (phi(y, 1.0, None, FEATURE) * c).to(DT)
    if P == 2:
        cm = (phi(y, -1.0, None, FEATURE) * c).to(DT)
    fade = tl.exp(run)
    dp = _gradient(x, s + at * V, z + at, e, r, da, cp, fade, far_fade, V, F, BT, SUB)
    if SUB < BT:
        dp = _far_gradient(dp, da, y, 1.0, gate, DT, GT, FEATURE, BT, SUB, REVERSE)
    if REVERSE:
        dp = tl.where(keep[:, None], dp, 0.0)
    if P == 2:
        at += F
        dm = _gradient(x, s + at * V, z + at, e, r, da, cm, fade, far_fade, V, F, BT, SUB)
        if SUB < BT:
            dm = _far_gradient(dm, da, y, -1.0, gate, DT, GT, FEATURE, BT, SUB, REVERSE)
        if REVERSE:
            dm = tl.where(keep[:, None], dm, 0.0)
    y = _beside(tile(yr + (start * R + h // (H // R)) * F, rows, T, R, F), dp, rows, T)
    p = phi(y, 1.0, None, FEATURE)
    own = p.to(DT).to(tl.float32) * dp  # rounded on both sides: what is behind a gate then cancels to the last bit
    dp = phi_backward(p, dp, 1.0, FEATURE)
    if P == 2:
        p = phi(y, -1.0, None, FEATURE)
        own += p.to(DT).to(tl.float32) * dm
        dp += phi_backward(p, dm, -1.0, FEATURE)
    if dy is not None:
        put(dy + (start * H + h) * F, dp, rows, T, H, F)
    if dg is not None:
        if REVERSE:
            own = tile(term + (start * H + h) * F, rows, T, H, F) - own
            later = tl.load(owed + i.to(tl.int64) * F + tl.arange(0, F))
            own = _added(rows[None, :] >= rows[:, None], own, DT, tl.float32) + later[None, :]
            own = tl.where(tile(g + (start * H + h) * F, rows, T, H, F).to(tl.float32) > LOWEST, own, 0.0)
        put(dg + (start * H + h) * F, own, rows, T, H, F)


@triton.jit(do_not_specialize=["T", "count"])
def _maps(
    hardest, count, yr, yc, x, v, mask, g, totals, s, z, o, den, delta, dy, dg, term, owed, cu, blocks, T, eps,
    H: tl.constexpr, R: tl.constexpr, C: tl.constexpr, X: tl.constexpr, N: tl.constexpr, V: tl.constexpr, F: tl.constexpr,
    P: tl.constexpr, FEATURE: tl.constexpr, LOWEST: tl.constexpr, LIMIT: tl.constexpr, NORMALIZE: tl.constexpr, REVERSE: tl.constexpr,
    BT: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """`_map` of every block, or if SUB < BT of those whose gates are too hard for the fast form: few programs share the search for them."""
    if SUB == BT:
        _map(
            tl.program_id(0), yr, yc, x, v, mask, g, totals, s, z, o, den, delta, dy, dg, term, owed, cu, blocks, T, eps, H, R, C, X, N, V, F, P,
            FEATURE, LOWEST, NORMALIZE, REVERSE, BT, SUB,
        )  # fmt: skip
    else:
        per = tl.cdiv(count, tl.num_programs(0))
        first = tl.program_id(0) * per
        for j in range(0, tl.minimum(per, count - first)):
            if tl.load(hardest + first + j) < LIMIT:
                _map(
                    first + j, yr, yc, x, v, mask, g, totals, s, z, o, den, delta, dy, dg, term, owed, cu, blocks, T, eps, H, R, C, X,
                    N, V, F, P, FEATURE, LOWEST, NORMALIZE, REVERSE, BT, SUB,
                )  # fmt: skip


@triton.jit(do_not_specialize=["T", "chunks"])
def _reverse_states(
    y, g, totals, s, z, s_end, z_end, den, delta, do, ds_end, dz_end, rs, rz, ds0, dz0, dg, cu, chunk_start, T, chunks, eps,
    H: tl.constexpr, V: tl.constexpr, F: tl.constexpr, P: tl.constexpr,
    FEATURE: tl.constexpr, LOWEST: tl.constexpr, NORMALIZE: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The gradient of the state after every chunk, `[chunks, H, P, V, F]`, and of the initial state. A program: one sign, BV columns
    (both signs, as in `_states`, take too many registers: 1.28 ms for 0.86).

    And what the gates of a chunk owe to everything after it: that state times its gradient, summed over v, `[V / BV, chunks, H, P, F]`.
    """
    pid = tl.program_id(0)
    part = pid % (V // BV)
    half = (pid // (V // BV)) % P
    h = (pid // (V // BV * P)) % H
    n = pid // (V // BV * P * H)
    start, T = sequence(n, T, cu)
    chunk = first_chunk(n, T, chunk_start, BT)
    DT = do.dtype.element_ty
    f = tl.arange(0, F)
    c = part * BV + tl.arange(0, BV)
    j = tl.arange(0, BT)
    y += (start * H + h) * F
    do += (start * H + h) * V + part * BV
    g += (start * H + h) * F
    at = ((n * H + h).to(tl.int64) * P + half) * F
    state, total = _begin(ds_end, dz_end, at, c, f, V, BV, F)
    count = tl.cdiv(T, BT)
    for back in range(0, count):
        i = count - 1 - back
        to = (((chunk + i) * H + h) * P + half) * F
        _keep(rs, rz, to, state, total, c, f, V, F)
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
        rows = i * BT + j
        live = rows < T
        gate = _gate(g, rows, T, H, F, LOWEST)
        last = _last(totals, chunk + i, h, H, F)
        run = _added(j[None, :] <= j[:, None], gate, DT, g.dtype.element_ty)
        p = phi(_beside(tile(y, rows, T, H, F), run, rows, T), 1.0 - 2.0 * half, None, FEATURE) * tl.exp(run)
        scale = live.to(tl.float32)
        if NORMALIZE:
            scalar = (start + rows) * H + h
            scale *= 1 / tl.maximum(tl.load(den + scalar, mask=live, other=1.0), eps)
        p = (p * scale[:, None]).to(DT)
        x = tl.trans(tl.load(do + rows[:, None] * (H * V) + tl.arange(0, BV)[None, :], mask=live[:, None], other=0.0))
        state = tl.dot(x, p, state * last[None, :], input_precision="ieee")
        total *= last
        if NORMALIZE:
            total -= _weighted(tl.load(delta + scalar, mask=live, other=0.0), p, DT)
    if ds0 is not None:
        _finish(ds0, dz0, at, state, total, c, f, V)


def _launch(kernel, cfg: Config, which: int, hardest: Tensor, *args, **flags) -> None:
    """The fast form for all blocks, then the other for those whose gates are too hard for it."""
    count = hardest.numel()
    kernel[(count,)](hardest, count, *args, **flags, LIMIT=MILD, SUB=cfg.block, **cfg.options(which))
    if cfg.block > CHUNK:
        kernel[(min(count, PROGRAMS),)](hardest, count, *args, **flags, LIMIT=MILD, SUB=CHUNK, num_warps=8, num_stages=cfg.stages)


class _GatedLinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, w_q, w_k, b_q, b_k, log_gate, mask, s0, z0, feature, normalize, cu_seqlens, keep_state, eps):
        batch, length, heads, dim = q.shape
        groups, value_dim = v.shape[2:]
        width = log_gate.shape[-1]
        halves = 2 if feature == "softmax_pm" else 1
        cfg = config(dim, value_dim, width, q.dtype)
        cut = pieces(batch, length, cu_seqlens, cfg.block)
        y_q, y_k = (q, k) if w_q is None else project(q, k, w_q, w_k, b_q, b_k)
        new = lambda *n: torch.empty(*n, device=q.device, dtype=torch.float32)  # noqa: E731
        s = torch.empty(cut.programs, heads, halves, value_dim, width, device=q.device, dtype=q.dtype)
        z, totals = new(cut.programs, heads, halves, width), new(cut.programs, 2, heads, width)
        s_end = z_end = None
        if keep_state:
            s_end, z_end = new(cut.sequences, heads, halves * width, value_dim), new(cut.sequences, heads, halves * width)
        shape = {"H": heads, "V": value_dim, "F": width, "P": halves, "FEATURE": feature, "LOWEST": FLOOR,
                 "BT": cfg.block}  # fmt: skip
        heads_k = y_k.shape[2]
        hardest, per = new(cut.programs, heads), 256 // width
        _totals[(cut.programs * cdiv(heads, per),)](
            log_gate, totals, hardest, cut.cu, cut.blocks, length, heads, F=width, LOWEST=FLOOR, BT=cfg.block, BH=per, num_warps=2
        )
        _states[(cut.sequences * heads * (value_dim // cfg.split),)](
            y_k, v, mask, log_gate, s0, z0, s, z, totals, s_end, z_end, cut.cu, cut.chunk_start, length,
            **shape, C=heads_k, N=groups, BV=cfg.split, **cfg.options(0),
        )  # fmt: skip
        o = torch.empty(batch, length, heads, value_dim, device=q.device, dtype=v.dtype)
        training = any(ctx.needs_input_grad)
        den = new(batch, length, heads) if training and normalize else None
        shape |= {"NORMALIZE": normalize}
        _launch(_outputs, cfg, 1, hardest, y_q, y_k, v, mask, log_gate, totals, s, z, o, den, cut.cu, cut.blocks,
                length, eps, **shape, R=heads, C=heads_k, N=groups, REVERSE=False)  # fmt: skip
        ctx.save_for_backward(q, k, v, w_q, w_k, b_q, b_k, y_q, y_k, log_gate, mask, totals, hardest, s, z, o, den, s_end, z_end, s0,
                              cut.cu, cut.blocks, cut.chunk_start)  # fmt: skip
        ctx.shape, ctx.normalize, ctx.eps, ctx.cfg, ctx.cut = shape, normalize, eps, cfg, (cut.sequences, cut.programs)
        ctx.set_materialize_grads(False)
        return o, s_end, z_end

    @staticmethod
    def backward(ctx, do, ds_end, dz_end):
        (q, k, v, w_q, w_k, b_q, b_k, y_q, y_k, log_gate, mask, totals, hardest, s, z, o, den, s_end, z_end, s0,
         cu, blocks, chunk_start) = ctx.saved_tensors  # fmt: skip
        cfg, (sequences, chunks), flags = ctx.cfg, ctx.cut, ctx.shape
        need_q, need_k, need_v, need_wq, need_wk, need_bq, need_bk, need_g, _, need_s0, need_z0 = ctx.needs_input_grad[:11]
        batch, length, heads, dim = q.shape
        value_dim, width = v.shape[3], log_gate.shape[3]
        do = torch.zeros_like(o) if do is None else do.contiguous()
        like = lambda n, want, dtype=q.dtype: torch.empty(batch, length, heads, n, device=q.device, dtype=dtype) if want else None  # noqa: E731
        delta = None if den is None else torch.empty_like(den)
        row = like(width, need_g, torch.float32)
        dy, side_q, side_k = like(width, need_q or need_wq or need_bq), None, None
        heads_k, groups = y_k.shape[2], v.shape[2]
        queries, keys = {**flags, "R": heads, "C": heads_k, "REVERSE": False}, {**flags, "R": heads_k, "C": heads, "REVERSE": True}
        _launch(_maps, cfg, 2, hardest, y_q, y_k, do, v, mask, log_gate, totals, s, z, o, den, delta, dy, row, None, None,
                cu, blocks, length, ctx.eps, **queries, X=heads, N=groups)  # fmt: skip
        if dy is not None:
            side_q = Side(dy[None], q, w_q, b_q, (need_q, need_wq, need_bq))
        dv = ds0 = dz0 = dg = owed = None
        if need_k or need_v or need_wk or need_bk or need_g or need_s0 or need_z0:
            ds_end, dz_end = both(ds_end, dz_end, s_end, z_end) or (None, None)
            rs, rz = torch.empty_like(s), torch.empty_like(z)
            if need_g:
                owed = torch.empty(value_dim // cfg.split, *z.shape, device=q.device, dtype=torch.float32)
            if s0 is not None and (need_s0 or need_z0):
                ds0 = torch.empty_like(s0)
                dz0 = ds0.new_empty(ds0.shape[:-1])
            _reverse_states[(sequences * heads * flags["P"] * (value_dim // cfg.split),)](
                y_q, log_gate, totals, s, z, s_end, z_end, den, delta, do, ds_end, dz_end, rs, rz, ds0, dz0, owed,
                cu, chunk_start, length, chunks, ctx.eps, **flags,
                BV=cfg.split, **cfg.options(3),
            )  # fmt: skip
            dv, dy, dg = like(value_dim, need_v), like(width, need_k or need_wk or need_bk), like(width, need_g, log_gate.dtype)
            if need_v:
                _launch(_outputs, cfg, 4, hardest, y_k, y_q, do, mask, log_gate, totals, rs, rz, dv, den,
                        cu, blocks, length, ctx.eps, **keys, N=heads)  # fmt: skip
            if not (dy is dg is None):
                owed = owed.sum((0, 3)) if need_g else None  # [chunks, H, F]
                _launch(_maps, cfg, 5, hardest, y_k, y_q, v, do, mask, log_gate, totals, rs, rz, None, den, delta, dy, dg,
                        row, owed, cu, blocks, length, ctx.eps, **keys, X=groups, N=heads)  # fmt: skip
            if dy is not None:
                side_k = Side(dy[None], k, w_k, b_k, (need_k, need_wk, need_bk))
        (dq, dw_q, db_q), (dk, dw_k, db_k) = gradients(side_q, side_k)
        return (dq, dk, None if dv is None else group_sum(dv, v), dw_q, dw_k, db_q, db_k, dg, None, ds0, dz0, *(None,) * 5)


def gated_linear_attention(
    q, k, v, w_q=None, w_k=None, *, log_gate: Tensor, feature="softmax_pm", b_q=None, b_k=None, normalize=True, key_mask=None,
    initial_state=None, return_state=False, cu_seqlens=None, eps=EPS,
):  # fmt: skip
    """`relinear_kernels.gated_linear_attention` by the kernels of this module. Raises ValueError naming what they support."""
    check_gated(feature)
    dtype, heads, states = v.dtype, q.shape[2], state_heads(w_k, q.shape[2])
    check_gate(log_gate, *q.shape[:3], w_k, q.shape[-1] if w_q is None else w_q.shape[-1])
    q, k, v, w_q, w_k, b_q, b_k, key_mask = prepared("gated_linear_attention", feature, q, k, v, w_q, w_k, b_q, b_k, key_mask, cu_seqlens)
    log_gate, initial_state = per_query_head(log_gate, heads, 2), per_query_head(initial_state, heads)
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
    return o, per_state_head(LinearState(s, z, torch.full_like(z, -torch.inf)), states)
