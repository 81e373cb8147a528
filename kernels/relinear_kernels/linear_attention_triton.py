"""Linear attention in Triton: one kernel for o and dv, one for the gradients of the features, both with the
state in registers.

A program walks a segment of a head's sequence in blocks of BT tokens and keeps the state S (float32,
transposed) in registers:

                   a head's sequence of T tokens
    |<---- segment 0 ---->|<---- segment 1 ---->|<-- segment 2 ..   a program: one segment of one head, some
    columns of v
    | BT | BT | BT | BT   | BT | BT | BT | BT   |
    S=0 -> ...            S_1 -> ...            S_2 -> ...          S_n: what the segments before leave

                      columns (what the block has seen)
              before the block     | the block itself
    rows      o += phi(q) S        | o += A v, A_ti = phi(q_t) . phi(k_i) where i <= t
    (BT of    one product for      | #
    the       all older tokens     | # #
    block)                         | # # #      then S += phi(k)^T v and on to the next block

No state of a block is ever in memory. With enough heads a sequence is one segment. With few heads it has
several: `_sums` adds up each segment alone, `_scan` turns the sums into the states S_n from which segments
start. "Rows" are the tokens that a block computes, "columns" those that it has seen:

    o    rows q, columns k: o_t  = sum_{i<=t} A_ti v_i / den_t        dphi_q  rows q, columns k: sum_{i<=t}
    (g_t . v_i + e_t) phi(k_i) dv   rows k, columns q: dv_i = sum_{t>=i} A_ti g_t                dphi_k  rows
    k, columns q: sum_{t>=i} (g_t . v_i + e_t) phi(q_t)

with g = dO / den and e = -(g . O) (zero where there is no denominator); the right-hand ones run from the end.
The features are made once, with their projection (`projection_triton`), g once for all three gradients, and
products read both as they lie. No accumulator is ever the transposed left operand of a product (miscompiled
on Hopper by Triton 3.4 to 3.7.0).

Exponential features come as what phi is applied to, and are made wherever they are needed. They are held
relative to a maximum: a query's to its own, which cancels on normalisation, a key's to the largest so far,
one number a head (`ranges`). A key's features come relative to its own maximum; what that lies below the
largest so far is the key's weight, and by what the largest grows the state decays.

A gate's decay of a pair, exp2(G_t - G_i) with G running over a step, is absorbed: the columns' features take
exp2(-G_i) and the row's sums exp2(G_t), so that a pair costs nothing. bfloat16 has float32's exponents, and
both stay in range while no step fades by more than 2^LEAST. A segment with a harder gate is left to a second
launch, which takes the decays of all pairs; one with none left to it ends at once. Features that are made
with their projection are kept FADED, with what their gates make of them where they are mild.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from relinear_kernels.features import EXPONENTIAL
from relinear_kernels.gated_linear_attention_reference import CHUNK
from relinear_kernels.linear_attention_reference import (
    LinearState,
    every_decay,
    per_query_head,
    per_state_head,
    state_heads,
)
from relinear_kernels.projection_triton import Side, gradients, group_sum, project
from relinear_kernels.traced import apply, traceable
from relinear_kernels.triton_common import (
    Pieces,
    block_of,
    cdiv,
    kept,
    nothing,
    phi,
    phi_backward,
    pieces,
    prepared,
    put,
    reciprocal,
    sequence,
    tile,
)

# gates: none, absorbed by the columns, of every pair, of every pair in all
NONE, MILD, HARD, ANY = (tl.constexpr(i) for i in range(4))
# MILD gates a channel: in segments that are not `hard`, in those that are
COARSE, FINE = (tl.constexpr(i) for i in (1, 2))
LEAST = tl.constexpr(-96.0)  # the least power of two by which a step may fade where columns absorb its gates
FINE_STEP = CHUNK  # rows of a step in which no channel's gate can overflow
PROGRAMS = 264  # two for each multiprocessor of an H200
# a log decay below which float32 has nothing left; larger ones would take the digits of what comes after them
# in a step
LOWEST = -104.0
SEGMENT = 512  # the shortest segment that is worth its state and two more launches


class Config(NamedTuple):
    """Tile sizes of one shape class. Fixed, so that the first call compiles each kernel once and tunes
    nothing."""

    block: int  # rows of a step
    part: int  # columns of v in one tile of the state
    parts: int  # tiles of the state along v that `_outputs` holds
    # columns of v in one tile of `_maps`, which holds all tiles: few wide products wait less for each other
    # than many
    wide: int
    stages: int


def config(value_dim: int, features: int, halves: int, dtype: torch.dtype) -> Config:
    """The configuration shipped for this shape class."""
    part = min(value_dim, 64)
    if dtype == torch.float32:  # products by fused multiply-add: small tiles
        return Config(16, part, 1, part, 1)
    parts = value_dim // part if features * halves <= 128 else 1
    # with more features two programs would not fit a multiprocessor
    wide = value_dim if features <= 64 else part
    # two stages: one leaves the loads' latency bare (and below 64 features is miscompiled by Triton 3.6),
    # three do not fit twice
    return Config(64, part, parts, wide, 2)


@triton.jit
def _load_rows(x, n, row, i, BT: tl.constexpr, W: tl.constexpr):
    """BT rows of head i, read through a descriptor of `[B, T, heads W]`.

    Rows beyond the tensor are zero. Beyond the end of a packed sequence come rows of the next one.
    """
    return x.load([n, row, i * W]).reshape(BT, W)


@triton.jit
def _phi(
    x,
    n,
    row,
    i,
    half,
    use,
    P: tl.constexpr,
    FEATURE: tl.constexpr,
    GIVEN: tl.constexpr,
    BT: tl.constexpr,
    F: tl.constexpr,
):
    """One half of phi of head i's rows, each row times its `use` (None: 1).

    GIVEN features are read from memory, in their own dtype where `use` is None. Others are made here from
    what phi is applied to.
    """
    if GIVEN:
        p = _load_rows(x, n, row, i * P + half, BT, F)
        if use is not None:
            p = p.to(tl.float32) * use[:, None]
    else:
        p = phi(_load_rows(x, n, row, i, BT, F).to(tl.float32), 1.0 - 2.0 * half, use, FEATURE)
    return p


@triton.jit
def _store_rows(
    x, value, CLIPS: tl.constexpr, n, start, j, rows, T, i, N: tl.constexpr, BT: tl.constexpr, W: tl.constexpr
):
    """Store rows of head i. CLIPS: through a descriptor, which drops rows beyond the tensor.

    Packed sequences end inside the tensor and keys may lie apart from their queries: both are stored with a
    mask.
    """
    if CLIPS:
        x.store([n, j, i * W], value.to(x.dtype).reshape(1, BT, W))
    else:
        put(x + (start * N + i) * W, value, rows, T, N, W)


@triton.jit
def _load_part(x, rows, T, stride, W: tl.constexpr):
    """Some columns of a head's rows, in float32; zero where a row lies outside 0 <= row < T."""
    at = x + rows[:, None] * stride + tl.arange(0, W)[None, :]
    return tl.load(at, mask=((rows >= 0) & (rows < T))[:, None], other=0.0).to(tl.float32)


@triton.jit
def _locate_segment(i, T, L, cu, blocks, offset):
    """Return where program i works: its batch row, the tensor row that its sequence starts at, the number of
    that sequence's first query and of its first key among all of the batch, and the first row of its segment
    and the row behind the last."""
    n, segment = block_of(i, T, blocks, L)
    start, T = sequence(n, T, cu)
    keys = start
    if offset is not None:
        keys += n * offset
    if cu is not None:
        row = start.to(tl.int32)
        n = 0
    else:
        row = 0
    return n, row, start, keys, segment * L, tl.minimum(segment * L + L, T)


@triton.jit
def _state(s, at, c, V: tl.constexpr, F: tl.constexpr, BV: tl.constexpr):
    """A tile of the state a segment starts from, transposed: zero without states."""
    if s is not None:
        state = tl.load(s + (at + tl.arange(0, F))[None, :] * V + c + tl.arange(0, BV)[:, None])
    else:
        state = tl.zeros([BV, F], tl.float32)
    return state


@triton.jit
def _first_row(step, first, last, REVERSE: tl.constexpr, BT: tl.constexpr):
    """The first row of a step."""
    if REVERSE:
        return first + (tl.cdiv(last - first, BT) - 1 - step) * BT
    else:
        return first + step * BT


@triton.jit
def _locate_rows(start, keys, j, rows, last, shift, REVERSE: tl.constexpr):
    """Return where the rows of step j lie: the row they are counted from, their numbers, the end of these,
    and the first one for a descriptor."""
    if REVERSE and shift is not None:  # the rows are keys
        return keys, rows + shift, last + shift, j + shift
    else:
        return start, rows, last, j


@triton.jit
def _locate_columns(mask, start, keys, j, rows, last, shift, REVERSE: tl.constexpr):
    """Return which columns of step j count (1 or 0), and the first of them. A key lies `shift` rows from the
    first query that it serves."""
    if REVERSE or shift is None:
        use = kept(mask, start, rows, last)
    else:
        use = kept(mask, keys, rows + shift, last + shift)
        j += shift
    return use.to(tl.float32), j


@triton.jit
def _own_end(g, first, last, GATES: tl.constexpr, BT: tl.constexpr):
    """Return where this launch stops in a segment: at its end if the segment is this launch's, else at its
    first row, so that nothing is done.

    A segment is the MILD launch's if no step of it fades by more than LEAST, else the HARD launch's.
    """
    if GATES == MILD or GATES == HARD:
        least = 0.0
        for i in range(0, tl.cdiv(last - first, 128 * BT)):
            ends = first + (i * 128 + 1 + tl.arange(0, 128)) * BT
            least = tl.minimum(least, tl.min(tl.load(g + tl.minimum(ends, last) - 1)))
        if (least >= LEAST) != (GATES == MILD):
            last = first
    return last


@triton.jit
def _fades(g, rows, j, last, GATES: tl.constexpr, REVERSE: tl.constexpr, BT: tl.constexpr):
    """Return g of the rows and three decays: from the state to each row, from each column into the state, and
    over the whole block.

    g is the running sum of the log decay over the block, in powers of two. MILD: the first is from where g
    begins to the row, the second from the column to there, and REVERSE exchanges them. Their product is the
    decay of a pair.
    """
    end = tl.load(g + tl.minimum(j + BT, last) - 1)
    # rows beyond the end have the last row's value, so that no difference of two rows is positive
    gr = tl.load(g + tl.minimum(rows, last - 1))
    if GATES == MILD:
        if REVERSE:
            return gr, tl.exp2(-gr), tl.exp2(gr), tl.exp2(end)
        else:
            return gr, tl.exp2(gr), tl.exp2(-gr), tl.exp2(end)
    else:
        to_end = tl.exp2(end - gr)
        if REVERSE:
            return gr, to_end, tl.exp2(gr), tl.exp2(end)
        else:
            return gr, tl.exp2(gr), to_end, tl.exp2(end)


@triton.jit
def _own_end_of_channels(hard, i, h, first, last, H: tl.constexpr, CHANNEL: tl.constexpr):
    """As `_own_end`, for a gate a channel: `hard` says of each segment and head whether it is the FINE
    launch's."""
    if hard is not None:
        if (tl.load(hard + i * H + h) != 0) != (CHANNEL == FINE):
            last = first
    return last


@triton.jit
def _half_step(
    totals, i, h, step, L, second: tl.constexpr, H: tl.constexpr, F: tl.constexpr, BT: tl.constexpr
):
    """Pointers to the logs of the decays of all channels over the first or the `second` half of a step."""
    return totals + (((i.to(tl.int64) * tl.cdiv(L, BT) + step) * 2 + second) * H + h) * F + tl.arange(0, F)


@triton.jit
def _fade_to_middle(
    totals, i, h, j, first, last, L, H: tl.constexpr, F: tl.constexpr, REVERSE: tl.constexpr, BT: tl.constexpr
):
    """The decay of each channel of a state `[1, F]`, from the middle of the step before to the middle of the
    step of row j.

    In the first step it is counted from where the segment begins. REVERSE: from the middle of the step after,
    or from where the segment ends.
    """
    step = (j - first) // BT
    there = tl.arange(0, F) >= 0
    if REVERSE:
        x = tl.load(_half_step(totals, i, h, step, L, 1, H, F, BT))
        x += tl.load(
            _half_step(totals, i, h, step + 1, L, 0, H, F, BT), mask=there & (j + BT < last), other=0.0
        )
    else:
        x = tl.load(_half_step(totals, i, h, step, L, 0, H, F, BT))
        x += tl.load(_half_step(totals, i, h, step - 1, L, 1, H, F, BT), mask=there & (j > first), other=0.0)
    return tl.exp(x)[None, :]


@triton.jit
def added(take, x, DT: tl.constexpr):
    """Sums and differences of rows of x, chosen by the matrix `take` of -1, 0 and 1.

    It is a product and not a scan, so that the sums lie in the registers as features do. If x has more digits
    than DT, it is split into a rounded part and the rest.
    """
    take = take.to(tl.float32).to(DT)
    high = x.to(DT)
    out = tl.dot(take, high, input_precision="ieee")
    if x.dtype != DT:
        out = tl.dot(take, (x - high.to(tl.float32)).to(DT), out, input_precision="ieee")
    return out


@triton.jit
def run_from_middle(gate, sub, DT: tl.constexpr, BT: tl.constexpr):
    """The sum of log gates `[BT, F]` from the middle of each group of `sub` rows to each row of it, the row's
    own gate included."""
    i = tl.arange(0, BT)[:, None]
    j = tl.arange(0, BT)[None, :]
    return added((j <= i).to(tl.float32) - (j < i // sub * sub + sub // 2).to(tl.float32), gate, DT)


@triton.jit(do_not_specialize=["T", "L", "total"])
def _scales(g, out, cu, blocks, T, L, total, H: tl.constexpr, BT: tl.constexpr, ROWS: tl.constexpr):
    """Write exponents of two `[H, rows]`: FADED features of keys are multiplied by 2 to them, those of
    queries are divided.

    They are -g in a segment of MILD gates, else 0.
    """
    h = tl.program_id(0) % H
    n, row, start, keys, first, last = _locate_segment(tl.program_id(0) // H, T, L, cu, blocks, None)
    at = h * total + start
    mild = _own_end(g + at, first, last, MILD, BT) > first
    for i in range(first, last, ROWS):
        rows = i + tl.arange(0, ROWS)
        fade = tl.load(g + at + rows, mask=rows < last, other=0.0)
        tl.store(out + at + rows, tl.where(mild, -fade, 0.0), mask=rows < last)


@triton.jit
def _seen(a, gr, REVERSE: tl.constexpr, BT: tl.constexpr):
    """The scores within a block, times the decay of each pair (`gr` None: 1), and zero where the row does not
    see the column."""
    i = tl.arange(0, BT)
    lag = i[:, None] - i[None, :]
    if REVERSE:
        lag = -lag
    if gr is not None:
        fade = gr[:, None] - gr[None, :]
        if REVERSE:
            fade = -fade
        a *= tl.exp2(tl.where(lag >= 0, fade, 0.0))
    return tl.where(lag >= 0, a, 0.0)


@triton.jit(do_not_specialize=["T", "L", "total", "offset", "shift"])
def _sums(
    y,
    v,
    mask,
    g,
    hard,
    weight,
    scalar,
    s,
    z,
    decay,
    cu,
    blocks,
    T,
    L,
    total,
    offset,
    shift,
    H: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    V: tl.constexpr,
    F: tl.constexpr,
    P: tl.constexpr,
    FEATURE: tl.constexpr,
    GIVEN: tl.constexpr,
    FADED: tl.constexpr,
    CHANNEL: tl.constexpr,
    REVERSE: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
):
    """Write what each segment adds to the state: S `[segments, H, P, F, V]` and z `[segments, H, P, F]`.
    Write its decay too, `[segments, H]`, or `[segments, H, F]` with a gate a channel."""
    part = tl.program_id(0) % (V // BV)
    half = tl.program_id(0) // (V // BV) % P
    h = tl.program_id(0) // (V // BV * P) % H
    i = tl.program_id(0) // (V // BV * P * H)
    n, base, start, keys, first, last = _locate_segment(i, T, L, cu, blocks, offset)
    if CHANNEL:
        last = _own_end_of_channels(hard, i, h, first, last, H, CHANNEL)
    elif FADED:
        mild = _own_end(g + h * total + start, first, last, MILD, BT) > first
    DT = v.dtype
    at = ((i.to(tl.int64) * H + h) * P + half) * F
    state = tl.zeros([BV, F], tl.float32)
    sums = tl.zeros([F], tl.float32)
    whole = 1.0
    if CHANNEL:
        whole = tl.zeros([1, F], tl.float32) + 1.0
    for step in range(0, tl.cdiv(last - first, BT)):
        j = _first_row(step, first, last, REVERSE, BT)
        rows = j + tl.arange(0, BT)
        use, jc = _locate_columns(mask, start, keys, j, rows, last, shift, REVERSE)
        if weight is not None:
            use *= tl.load(weight + h * total + start + rows, mask=rows < last, other=0.0)
        if CHANNEL:
            fade = _fade_to_middle(g, i, h, j, first, last, L, H, F, REVERSE, BT)
            state *= fade
            sums *= tl.reshape(fade, [F])
            whole *= fade
        elif g is not None:
            _, _, into, fade = _fades(g + h * total + start, rows, j, last, ANY, REVERSE, BT)
            if FADED:
                into = tl.where(mild, 1.0 if REVERSE else fade, into)
            use *= into
            state *= fade
            sums *= fade
            whole *= fade
        p = _phi(y, n, base + jc, h // (H // C), half, use, P, FEATURE, GIVEN, BT, F)
        x = _load_rows(v, n, base + jc, h // (H // N) * (V // BV) + part, BT, BV)
        state = tl.dot(tl.trans(x), p.to(DT), state, input_precision="ieee")
        if scalar is not None:
            p *= tl.load(scalar + h * total + start + rows, mask=rows < last, other=0.0)[:, None]
        sums += tl.sum(p, 0)
    if CHANNEL:  # from the middle of the last step to where the segment ends, or REVERSE: begins
        if last > first:
            end = tl.exp(
                tl.load(
                    _half_step(
                        g, i, h, 0 if REVERSE else (last - first - 1) // BT, L, 0 if REVERSE else 1, H, F, BT
                    )
                )
            )
            state *= end[None, :]
            sums *= end
            whole *= end[None, :]
            tl.store(s + (at + tl.arange(0, F))[None, :] * V + part * BV + tl.arange(0, BV)[:, None], state)
            if part == 0:
                tl.store(z + at + tl.arange(0, F), sums)
                if half == 0:
                    tl.store(decay + (i * H + h) * F + tl.arange(0, F)[None, :], whole)
    else:
        tl.store(s + (at + tl.arange(0, F))[None, :] * V + part * BV + tl.arange(0, BV)[:, None], state)
        if part == 0:
            tl.store(z + at + tl.arange(0, F), sums)
            if decay is not None:
                if half == 0:
                    tl.store(decay + i * H + h, whole)


@triton.jit(do_not_specialize=["count"])
def _scan(
    s,
    z,
    decay,
    s_begin,
    z_begin,
    s_end,
    z_end,
    starts,
    count,
    H: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    F: tl.constexpr,
    CHANNEL: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Turn what each segment adds to the state into the state that it starts from, in place. Write the state
    after the last segment to the ends.

    A program owns SIZE numbers of S, or all of z, of one head of one sequence.
    """
    part = tl.program_id(0) % (V + 1)
    h = tl.program_id(0) // (V + 1) % H
    n = tl.program_id(0) // ((V + 1) * H)
    if starts is not None:
        first = tl.load(starts + n)
        count = tl.load(starts + n + 1) - first
    else:
        first = n * count
    own = (n * H + h).to(tl.int64)
    if part < V:
        at = own * (V * SIZE) + part * SIZE
        channel = (part * SIZE + tl.arange(0, SIZE)) // V % F
        _carry(
            s + h * (V * SIZE) + part * SIZE,
            decay,
            channel,
            s_begin,
            s_end,
            at,
            first,
            count,
            h,
            H,
            V * SIZE,
            SIZE,
            F,
            CHANNEL,
            REVERSE,
        )
    else:
        channel = tl.arange(0, SIZE) % F
        _carry(
            z + h * SIZE,
            decay,
            channel,
            z_begin,
            z_end,
            own * SIZE,
            first,
            count,
            h,
            H,
            SIZE,
            SIZE,
            F,
            CHANNEL,
            REVERSE,
        )


@triton.jit
def _carry(
    x,
    decay,
    channel,
    begin,
    end,
    at,
    first,
    count,
    h,
    H: tl.constexpr,
    STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    F: tl.constexpr,
    CHANNEL: tl.constexpr,
    REVERSE: tl.constexpr,
):
    if begin is not None:
        state = tl.load(begin + at + tl.arange(0, SIZE))
    else:
        state = tl.zeros([SIZE], tl.float32)
    for step in range(0, count):
        if REVERSE:
            i = first + count - 1 - step
        else:
            i = first + step
        to = x + i.to(tl.int64) * (H * STRIDE) + tl.arange(0, SIZE)
        added = tl.load(to)
        tl.store(to, state)
        if CHANNEL:
            state *= tl.load(decay + (i * H + h) * F + channel)
        elif decay is not None:
            state *= tl.load(decay + i * H + h)
        state += added
    if end is not None:
        tl.store(end + at + tl.arange(0, SIZE), state)


@triton.jit
def _split_in_two(z, ROWS: tl.constexpr, DT: tl.constexpr):
    """16 rows of DT from 16 rows of float32: the first ROWS of them rounded, but in row 1 what the rounding
    left over, and zeros in the others."""
    row = tl.arange(0, 16)[:, None]
    return tl.where(row == 1, z - z.to(DT).to(tl.float32), tl.where(row < ROWS, z, 0.0)).to(DT)


@triton.jit
def _split_in_three(e, AXIS: tl.constexpr, DT: tl.constexpr):
    """The numbers e of float32 as 16 equal rows or columns (AXIS 0 or 1), rounded to DT; the third has what
    the rounding left over."""
    i = tl.expand_dims(tl.arange(0, 16), 1 - AXIS)
    high = e.to(DT).to(tl.float32)
    return tl.where(i == 2, tl.expand_dims(e - high, AXIS), tl.expand_dims(high, AXIS)).to(DT)


@triton.jit
def _take_values(
    qp, qm, a, kp, km, sp, sm, x, row_fade, fade, P: tl.constexpr, GATES: tl.constexpr, FADED: tl.constexpr
):
    """Return a block's sums of values in the columns x, and both halves of the state after the block.

    With MILD gates the state fades before the block reads it, else after.
    """
    if GATES == MILD:
        sp *= fade
        sm *= fade
    acc = tl.dot(qp, tl.trans(sp.to(x.dtype)), input_precision="ieee")
    if P == 2:
        acc = tl.dot(qm, tl.trans(sm.to(x.dtype)), acc, input_precision="ieee")
    if GATES >= HARD:
        acc *= row_fade[:, None]
        sp *= fade
        sm *= fade
    acc = tl.dot(a, x, acc, input_precision="ieee")
    sp = tl.dot(tl.trans(x), kp, sp, input_precision="ieee")
    if P == 2:
        sm = tl.dot(tl.trans(x), km, sm, input_precision="ieee")
    if GATES == MILD and not FADED:
        acc *= row_fade[:, None]
    return acc, sp, sm


@triton.jit(do_not_specialize=["T", "L", "total", "offset", "shift"])
def _outputs(
    yr,
    yc,
    v,
    o,
    row_mask,
    mask,
    g,
    hard,
    weight,
    s,
    z,
    den,
    near,
    near_den,
    cu,
    blocks,
    T,
    L,
    total,
    offset,
    shift,
    H: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    V: tl.constexpr,
    F: tl.constexpr,
    P: tl.constexpr,
    FEATURE: tl.constexpr,
    GIVEN: tl.constexpr,
    FADED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    GATES: tl.constexpr,
    CHANNEL: tl.constexpr,
    REVERSE: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Write o of a segment and its unclamped denominators `[H, rows]`; with REVERSE write dv. A program holds
    PARTS tiles of BV columns of v."""
    part = tl.program_id(0) % (V // (BV * PARTS)) * PARTS
    h = tl.program_id(0) // (V // (BV * PARTS)) % H
    i = tl.program_id(0) // (V // (BV * PARTS) * H)
    n, base, start, keys, first, last = _locate_segment(i, T, L, cu, blocks, offset)
    if CHANNEL:
        last = _own_end_of_channels(hard, i, h, first, last, H, CHANNEL)
    elif g is not None:
        last = _own_end(g + h * total + start, first, last, GATES, BT)
    DT = v.dtype
    CLIPS: tl.constexpr = cu is None and not (REVERSE and shift is not None)
    at = (i.to(tl.int64) * H + h) * (P * F)
    sp = _state(s, at, part * BV, V, F, BV)
    sm = sp
    if P == 2:
        sm = _state(s, at + F, part * BV, V, F, BV)
    if PARTS == 2:
        tp = _state(s, at, part * BV + BV, V, F, BV)
        tm = tp
        if P == 2:
            tm = _state(s, at + F, part * BV + BV, V, F, BV)
    # z as 16 equal rows, so that a small product adds to it and another, of its two halves, takes q . z
    if NORMALIZE:
        zp = tl.zeros([16, F], tl.float32)
        zm = zp
        if s is not None:
            zp += tl.load(z + at + tl.arange(0, F))[None, :]
            if P == 2:
                zm += tl.load(z + at + F + tl.arange(0, F))[None, :]
        ones = tl.full([16, BT], 1.0, DT)
        unit = tl.where(tl.arange(0, 16)[None, :] + tl.zeros([BT, 16], tl.int32) < 1, 1.0, 0.0).to(DT)
    since = 1.0
    for step in range(0, tl.cdiv(last - first, BT)):
        j = _first_row(step, first, last, REVERSE, BT)
        rows = j + tl.arange(0, BT)
        use, jc = _locate_columns(mask, start, keys, j, rows, last, shift, REVERSE)
        lead, place, end, jr = _locate_rows(start, keys, j, rows, last, shift, REVERSE)
        if weight is not None:
            use *= tl.load(weight + h * total + start + rows, mask=rows < last, other=0.0)
        if CHANNEL:
            gr, row_fade, col_fade, fade = (
                None,
                None,
                None,
                _fade_to_middle(g, i, h, j, first, last, L, H, F, REVERSE, BT),
            )
        elif GATES != NONE:
            gr, row_fade, col_fade, fade = _fades(g + h * total + start, rows, j, last, GATES, REVERSE, BT)
            if GATES == MILD:  # in the fades
                gr = None
        else:
            gr, row_fade, col_fade, fade = None, None, None, None
        ABSORBS: tl.constexpr = GATES == MILD and not FADED
        if ABSORBS:
            use *= col_fade
        # the last block's: a state takes its fade where it is next read
        if GATES == MILD and not REVERSE and not CHANNEL:
            fade, since = since, fade
        if NORMALIZE:
            if GATES == MILD:
                zp *= fade
                zm *= fade
            high_p = _split_in_two(zp, 1, DT)
            high_m = high_p
            if P == 2:
                high_m = _split_in_two(zm, 1, DT)
            if GATES >= HARD:
                zp *= fade
                zm *= fade
        # beyond the ends a descriptor reads zeros
        if GIVEN and mask is None and weight is None and cu is None and not ABSORBS:
            use = None
        k = _phi(yc, n, base + jc, h // (H // C), 0, use, P, FEATURE, GIVEN, BT, F)
        kp = k.to(DT)
        cp = kp
        if GATES >= HARD:
            cp = (k * col_fade[:, None]).to(DT)
        if NORMALIZE:  # this early so that phi(k) leaves the registers
            zp = tl.dot(ones, cp, zp, input_precision="ieee")
        km = kp
        cm = cp
        if P == 2:
            k = _phi(yc, n, base + jc, h // (H // C), 1, use, P, FEATURE, GIVEN, BT, F)
            km = k.to(DT)
            cm = km
            if GATES >= HARD:
                cm = (k * col_fade[:, None]).to(DT)
            if NORMALIZE:
                zm = tl.dot(ones, cm, zm, input_precision="ieee")
        qp = _phi(yr, n, base + jr, h // (H // R), 0, None, P, FEATURE, GIVEN, BT, F).to(DT)
        qm = qp
        if P == 2:
            qm = _phi(yr, n, base + jr, h // (H // R), 1, None, P, FEATURE, GIVEN, BT, F).to(DT)
        a = tl.dot(qp, tl.trans(kp), input_precision="ieee")
        if P == 2:
            a = tl.dot(qm, tl.trans(km), a, input_precision="ieee")
        a = _seen(a, gr, REVERSE, BT).to(DT)
        if NORMALIZE:
            d = tl.dot(qp, tl.trans(high_p), input_precision="ieee")
            if P == 2:
                d = tl.dot(qm, tl.trans(high_m), d, input_precision="ieee")
            if GATES >= HARD:
                d *= row_fade[:, None]
            d = tl.sum(tl.dot(a, unit, d, input_precision="ieee"), 1)
            if ABSORBS:
                d *= row_fade
            if near_den is not None:
                near_d = tl.load(near_den + h * total + start + rows, mask=rows < last, other=0.0)
                d += near_d
            over = reciprocal(d)
        elif row_mask is not None or shift is not None:
            over = kept(row_mask, lead, place, end).to(tl.float32)
        at_v = h // (H // N) * (V // BV) + part
        acc, sp, sm = _take_values(
            qp,
            qm,
            a,
            cp,
            cm,
            sp,
            sm,
            _load_rows(v, n, base + jc, at_v, BT, BV),
            row_fade,
            fade,
            P,
            GATES,
            FADED,
        )
        if near_den is not None:
            acc += near_d[:, None] * _load_part(near + (lead * H + h) * V + part * BV, place, end, H * V, BV)
        if NORMALIZE or row_mask is not None or shift is not None:
            acc *= over[:, None]
        if near is not None and near_den is None:
            acc += _load_part(near + (lead * H + h) * V + part * BV, place, end, H * V, BV)
        _store_rows(o, acc, CLIPS, n, lead, jr, place, end, h * (V // BV) + part, H * (V // BV), BT, BV)
        if PARTS == 2:
            acc, tp, tm = _take_values(
                qp,
                qm,
                a,
                cp,
                cm,
                tp,
                tm,
                _load_rows(v, n, base + jc, at_v + 1, BT, BV),
                row_fade,
                fade,
                P,
                GATES,
                FADED,
            )
            if near_den is not None:
                acc += near_d[:, None] * _load_part(
                    near + (lead * H + h) * V + part * BV + BV, place, end, H * V, BV
                )
            if NORMALIZE or row_mask is not None or shift is not None:
                acc *= over[:, None]
            if near is not None and near_den is None:
                acc += _load_part(near + (lead * H + h) * V + part * BV + BV, place, end, H * V, BV)
            _store_rows(
                o, acc, CLIPS, n, lead, jr, place, end, h * (V // BV) + part + 1, H * (V // BV), BT, BV
            )
        if den is not None:  # last, for to store it is to wait for the product that makes it
            if part == 0:
                tl.store(den + h * total + start + rows, d, mask=rows < last)


@triton.jit(do_not_specialize=["T", "L", "total", "offset", "shift", "size"])
def _maps(
    yr,
    yc,
    x,
    v,
    dy,
    row_mask,
    mask,
    g,
    hard,
    row_weight,
    weight,
    row_scalar,
    scalar,
    dg,
    s,
    z,
    cu,
    blocks,
    T,
    L,
    total,
    offset,
    shift,
    size,
    H: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    X: tl.constexpr,
    N: tl.constexpr,
    V: tl.constexpr,
    F: tl.constexpr,
    P: tl.constexpr,
    FEATURE: tl.constexpr,
    GIVEN: tl.constexpr,
    FADED: tl.constexpr,
    GATES: tl.constexpr,
    CHANNEL: tl.constexpr,
    REVERSE: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
):
    """Write dy `[P, B, T, H, F]`, the gradient of what one half of phi is applied to, and the gate's term
    `[P, H, rows]`.

    With a gate a channel dy is the gradient of the FADED features themselves.

    dphi_row = row_weight sum over columns of weight (x_row . v_column + scalar) phi_column; the scalar is the
    row's, the column's or none.
    """
    half = tl.program_id(0) % P
    h = tl.program_id(0) // P % H
    i = tl.program_id(0) // (P * H)
    n, base, start, keys, first, last = _locate_segment(i, T, L, cu, blocks, offset)
    if CHANNEL:
        last = _own_end_of_channels(hard, i, h, first, last, H, CHANNEL)
    elif g is not None:
        last = _own_end(g + h * total + start, first, last, GATES, BT)
    DT = v.dtype
    sign = 1.0 - 2.0 * half
    TILES: tl.constexpr = V // BV
    CLIPS: tl.constexpr = cu is None and not (REVERSE and shift is not None)
    ABSORBS: tl.constexpr = GATES == MILD and not FADED
    written = total
    if REVERSE and offset is not None:
        written += size * offset
    at = ((i.to(tl.int64) * H + h) * P + half) * F
    s0 = _state(s, at, 0, V, F, BV)
    if TILES == 2:
        s1 = _state(s, at, BV, V, F, BV)
    # as 16 rows, so that small products add to them and read them, as in `_outputs`
    if row_scalar is not None or scalar is not None:
        sums = tl.zeros([16, F], tl.float32)
        if s is not None:
            sums += tl.load(z + at + tl.arange(0, F))[None, :]
            if scalar is not None:  # the third row is of what rounding left of the scalars
                sums = tl.where(tl.arange(0, 16)[:, None] == 2, 0.0, sums)
    since = 1.0
    for step in range(0, tl.cdiv(last - first, BT)):
        j = _first_row(step, first, last, REVERSE, BT)
        rows = j + tl.arange(0, BT)
        lane = h * total + start + rows
        inside = rows < last
        use, jc = _locate_columns(mask, start, keys, j, rows, last, shift, REVERSE)
        lead, place, end, jr = _locate_rows(start, keys, j, rows, last, shift, REVERSE)
        # numbers that no product reads are not pipelined: they are loaded here and used at the end
        if CHANNEL:
            y = None
        elif GIVEN:
            y = tile(yr + ((lead * R + h // (H // R)) * P + half) * F, place, end, R * P, F)
        else:
            y = tile(yr + (lead * R + h // (H // R)) * F, place, end, R, F)
        if row_scalar is not None:
            e = tl.load(row_scalar + lane, mask=inside, other=0.0)
        if scalar is not None:
            e = tl.load(scalar + lane, mask=inside, other=0.0)
        if weight is not None:
            w = tl.load(weight + lane, mask=inside, other=0.0)
        if row_weight is not None:
            r = tl.load(row_weight + lane, mask=inside, other=0.0)
        if CHANNEL:
            gr, row_fade, col_fade, fade = (
                None,
                None,
                None,
                _fade_to_middle(g, i, h, j, first, last, L, H, F, REVERSE, BT),
            )
        elif GATES != NONE:
            gr, row_fade, col_fade, fade = _fades(g + h * total + start, rows, j, last, GATES, REVERSE, BT)
            if GATES == MILD:  # in the fades
                gr = None
        else:
            gr, row_fade, col_fade, fade = None, None, None, None
        # MILD: features have their fades (FADED), or the keys' have and scores take the queries', whichever
        # side is the rows. What is rounded is then the same there and here, and what is behind a gate cancels
        # to the last bit (dg).
        if ABSORBS and not REVERSE:
            use *= col_fade
        # the last block's: a state takes its fade where it is next read
        if GATES == MILD and not REVERSE and not CHANNEL:
            fade, since = since, fade
        x0 = _load_rows(x, n, base + jr, h // (H // X) * TILES, BT, BV)
        v0 = _load_rows(v, n, base + jc, h // (H // N) * TILES, BT, BV)
        a = tl.dot(x0, tl.trans(v0), input_precision="ieee")
        if GATES == MILD:  # not before a product that does not wait for the gate
            s0 *= fade
            if row_scalar is not None or scalar is not None:
                sums *= fade
            if TILES == 2:
                s1 *= fade
        d = tl.dot(x0, s0.to(DT), input_precision="ieee")
        if TILES == 2:
            x1 = _load_rows(x, n, base + jr, h // (H // X) * TILES + 1, BT, BV)
            v1 = _load_rows(v, n, base + jc, h // (H // N) * TILES + 1, BT, BV)
            a = tl.dot(x1, tl.trans(v1), a, input_precision="ieee")
            d = tl.dot(x1, s1.to(DT), d, input_precision="ieee")
        if row_scalar is not None:
            a += e[:, None]
            d = tl.dot(_split_in_three(e, 1, DT), _split_in_two(sums, 3, DT), d, input_precision="ieee")
        if scalar is not None:
            a += e[None, :]
            d = tl.dot(tl.full([BT, 16], 1.0, DT), _split_in_two(sums, 3, DT), d, input_precision="ieee")
        if weight is not None:
            a *= w[None, :]
        if row_weight is not None:
            a *= r[:, None]
            d *= r[:, None]
        if ABSORBS:
            a *= col_fade[None, :] if REVERSE else row_fade[:, None]
        a = _seen(a, gr, REVERSE, BT).to(DT)
        if GATES >= HARD or (ABSORBS and not REVERSE):
            d *= row_fade[:, None]
        if GIVEN and mask is None and cu is None and (REVERSE or not ABSORBS):  # zeros beyond the ends
            use = None
        c = _phi(yc, n, base + jc, h // (H // C), half, use, P, FEATURE, GIVEN, BT, F)
        b = c.to(DT)
        d = tl.dot(a, b, d, input_precision="ieee")
        if row_mask is not None or shift is not None:
            d *= kept(row_mask, lead, place, end).to(tl.float32)[:, None]
        # the state takes other numbers than the scores took
        if weight is not None or GATES >= HARD or (ABSORBS and REVERSE):
            c = c.to(tl.float32)
            if weight is not None:
                c *= w[:, None]
            if GATES >= HARD or (ABSORBS and REVERSE):
                c *= col_fade[:, None]
            b = c.to(DT)
        if GATES >= HARD:
            s0 *= fade
            if row_scalar is not None or scalar is not None:
                sums *= fade
            if TILES == 2:
                s1 *= fade
        s0 = tl.dot(tl.trans(v0), b, s0, input_precision="ieee")
        if TILES == 2:
            s1 = tl.dot(tl.trans(v1), b, s1, input_precision="ieee")
        if row_scalar is not None:
            sums = tl.dot(tl.full([16, BT], 1.0, DT), b, sums, input_precision="ieee")
        if scalar is not None:
            sums = tl.dot(_split_in_three(e, 0, DT), b, sums, input_precision="ieee")
        if not CHANNEL:
            p = y.to(tl.float32)
            if not GIVEN:
                p = phi(p, sign, None, FEATURE)
            if dg is not None:  # computed from the rounded features, as on the other side
                b = p * row_fade[:, None] if ABSORBS and REVERSE else p
                tl.store(dg + half * (H * total) + lane, tl.sum(b.to(DT).to(tl.float32) * d, 1), mask=inside)
            if ABSORBS and REVERSE:
                d *= row_fade[:, None]
            if GATES == MILD and FADED:
                d = phi_backward(p, d, sign, FEATURE, row_fade[:, None])
            else:
                d = phi_backward(p, d, sign, FEATURE)
        if CLIPS:
            _store_rows(dy, d, CLIPS, half * size + n, lead, jr, place, end, h, H, BT, F)
        else:
            _store_rows(dy, d, CLIPS, n, half * written + lead, jr, place, end, h, H, BT, F)


@triton.jit(do_not_specialize=["total"])
def _numerators(
    do, o, den, near, near_den, g, delta, share, total, H: tl.constexpr, V: tl.constexpr, BT: tl.constexpr
):  # fmt: skip
    """Write g = dO / den and `delta` = -(g . O) `[H, rows]`, which is zero where there is no denominator.
    Beside a near part write `share`, its weight times the gradient of that weight."""
    h = tl.program_id(0) % H
    rows = tl.program_id(0) // H * BT + tl.arange(0, BT)
    inside = rows < total
    at = (rows.to(tl.int64)[:, None] * H + h) * V + tl.arange(0, V)[None, :]
    lane = h * total + rows
    d = tl.load(den + lane, mask=inside, other=1.0)
    x = tl.load(do + at, mask=inside[:, None], other=0.0).to(tl.float32) * reciprocal(d)[:, None]
    if g.dtype.element_ty == tl.float16:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    x = x.to(g.dtype.element_ty)
    tl.store(g + at, x, mask=inside[:, None])
    x = x.to(tl.float32)  # rounded as products read it, so that terms that cancel there cancel here
    e = tl.sum(x * tl.load(o + at, mask=inside[:, None], other=0.0).to(tl.float32), 1)
    e = tl.where(nothing(d), 0.0, e)
    tl.store(delta + lane, -e, mask=inside)
    if near is not None:
        c = tl.sum(x * tl.load(near + at, mask=inside[:, None], other=0.0).to(tl.float32), 1) - e
        tl.store(share + lane, c * tl.load(near_den + lane, mask=inside, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["T", "total"])
def _gate_gradients(row, column, ends, dg, cu, T, total, H: tl.constexpr, P: tl.constexpr, BT: tl.constexpr):
    """Write the gradient of the log decay, `[B, T, H]` float32, from its terms `[P, H, rows]` and the final
    state's `[sequences, H]`.

    A program sums one head of one sequence, from its end.
    """
    h = tl.program_id(0) % H
    n = tl.program_id(0) // H
    start, T = sequence(n, T, cu)
    after = 0.0
    if ends is not None:  # the whole sequence decays into the final state: every gate scales it
        after += tl.load(ends + n * H + h)
    for step in range(0, tl.cdiv(T, BT)):
        rows = (tl.cdiv(T, BT) - 1 - step) * BT + tl.arange(0, BT)
        term = tl.zeros([BT], tl.float32)
        for half in tl.static_range(P):
            at = (half * H + h) * total + start + rows
            term += tl.load(row + at, mask=rows < T, other=0.0) - tl.load(
                column + at, mask=rows < T, other=0.0
            )
        tl.store(dg + (start + rows) * H + h, tl.cumsum(term, 0, reverse=True) + after, mask=rows < T)
        after += tl.sum(term, 0)


@triton.jit(do_not_specialize=["T", "total"])
def _running_sums(x, out, cu, blocks, T, total, H, CS: tl.constexpr, BH: tl.constexpr):
    """Write the running sum of x `[B, T, H]` over the rows of each chunk, as exponents of two `[H, rows]`. A
    program owns a chunk."""
    n, chunk = block_of(tl.program_id(0), T, blocks, CS)
    start, T = sequence(n, T, cu)
    rows = chunk * CS + tl.arange(0, CS)
    cols = tl.arange(0, BH)
    inside = (rows < T)[:, None] & (cols < H)[None, :]
    value = tl.load(x + (start + rows)[:, None] * H + cols[None, :], mask=inside, other=0.0)
    tl.store(
        out + cols[None, :] * total + (start + rows)[:, None],
        tl.cumsum(value, 0) * 1.4426950408889634,
        mask=inside,
    )


def chunk_decay(
    log_decay: Tensor, batch: int, length: int, heads: int, chunk: int, cu_seqlens: Tensor | None
) -> Tensor:
    """The running sum of the log decay within each chunk, to base two: `[H, B T]` float32."""
    g = every_decay(log_decay, batch, length, heads, heads).float().clamp(min=LOWEST).contiguous()
    out = torch.empty(heads, batch * length, device=g.device, dtype=torch.float32)
    cut = pieces(batch, length, cu_seqlens, chunk)
    _running_sums[(cut.programs,)](
        g, out, cut.cu, cut.blocks, length, batch * length, heads, CS=chunk, BH=triton.next_power_of_2(heads)
    )
    return out


def ranges(
    y: Tensor, heads: int, feature: str, mask: Tensor | None, shift: Tensor | None, cu_seqlens: Tensor | None
):
    """Running maxima of exponential keys, which keep their features finite.

    Returns each key's weight `exp(y - running max)` `[B, T, H]`, the log decay where the maximum grows `[B,
    T, H]` and the last maximum `[N, H]`. `shift` is the maximum carried in.
    """
    top = (y.abs() if feature == "exp_pm" else y).amax(3).float().repeat_interleave(heads // y.shape[2], 2)
    if mask is not None:
        top = top.masked_fill(~mask[:, :, None], -torch.inf)
    if cu_seqlens is None:
        sequences, shifts = [top], [shift]
    else:
        sequences = top.split(cu_seqlens.diff().tolist(), 1)
        shifts = [None] * len(sequences) if shift is None else shift.split(1)
    largest, before, last = zip(
        *(_largest(x, first) for x, first in zip(sequences, shifts, strict=True)), strict=True
    )
    largest, before = torch.cat(largest, 1), torch.cat(before, 1)
    decay = torch.where(before.isinf(), 0.0, before - largest)
    return torch.where(top.isinf(), 0.0, (top - largest).exp()), decay, torch.cat(last)


def _largest(top: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the running maximum `[B, T, H]`, the running maximum before each position, and the last one."""
    shift = torch.full_like(top[:, 0] if top.shape[1] else top.sum(1), -torch.inf) if shift is None else shift
    all_ = torch.cat([shift[:, None], top], 1).cummax(1).values
    return all_[:, 1:], all_[:, :-1], all_[:, -1]


def segment_length(batch: int, length: int, heads: int, block: int, packed: bool) -> int:
    """The number of rows of a segment: as many as still leave enough programs. With enough heads it is the
    whole sequence, and no state costs a launch."""
    if packed:
        return max(SEGMENT, cdiv(length * heads, PROGRAMS * block) * block)
    segments = max(1, min(length // SEGMENT, PROGRAMS // (batch * heads)))
    return cdiv(cdiv(length, segments), block) * block


class Channels(NamedTuple):
    """A gate for each channel, as the kernels take it: the logs of the gates, and their sums over half steps
    `[segments, steps, 2, H, F]`."""

    gate: Tensor  # [B, T, H, F]
    coarse: Tensor  # for steps of a block
    fine: Tensor | None = None  # for steps of FINE_STEP rows; None: all steps are as fine
    hard: Tensor | None = None  # [segments, H] int32: the segments that take the fine steps


class Walk(NamedTuple):
    """The kernels' walk over a batch, and the arguments that every launch shares. `y` are the preactivations,
    `[B, T, heads, F]`."""

    cut: Pieces
    cfg: Config
    length: int  # queries of a sequence (all of a packed batch)
    segment: int
    offset: int | None  # keys before the first query
    shift: int | None  # from a query to the newest key it sees; None where that is itself
    shape: dict

    @classmethod
    def over(
        cls,
        q: Tensor,
        v: Tensor,
        w_q: Tensor | None,
        feature: str,
        cu_seqlens: Tensor | None,
        offset=None,
        shift=None,
        gated=False,
        channel=False,
    ) -> "Walk":
        """The walk over these tensors: sizes, blocks, and what each program reads."""
        (batch, length, heads, dim), value_dim = q.shape, v.shape[3]
        width = dim if w_q is None else w_q.shape[-1]
        given = channel or feature == "none" or w_q is not None and feature not in EXPONENTIAL
        halves = 2 if feature.endswith("_pm") else 1
        cfg = config(value_dim, width, halves, q.dtype)
        segment = segment_length(batch, length, heads, cfg.block, cu_seqlens is not None)
        faded = channel or gated and given and w_q is not None and MILD.value in cls.gates(gated, q.dtype)
        shape = {
            "H": heads,
            "V": value_dim,
            "F": width,
            "P": halves,
            "FEATURE": feature,
            "GIVEN": given,
            "FADED": faded,
        }
        shape |= {"BT": cfg.block, "num_warps": 4}
        return cls(pieces(batch, length, cu_seqlens, segment), cfg, length, segment, offset, shift, shape)

    def scales(self, g: Tensor | None) -> Tensor | None:
        """Exponents of two `[H, B T]` float32: kept features of keys are multiplied by 2 to them, those of
        queries divided. None: all are 0."""
        if not self.shape["FADED"]:
            return None
        out = torch.empty_like(g)
        cut, (heads, total) = self.cut, g.shape
        _scales[(cut.programs * heads,)](
            g, out, cut.cu, cut.blocks, self.length, self.segment, total, H=heads, BT=self.cfg.block, ROWS=512
        )
        return out

    def scalars(self, batch: int, device, *parts: int) -> Tensor:
        """An empty number per query and head, `[..., H, B T]` float32."""
        return torch.empty(*parts, self.shape["H"], batch * self.length, device=device, dtype=torch.float32)

    def final(self, device) -> tuple[Tensor, Tensor]:
        """An empty state of every sequence."""
        size = (self.cut.sequences, self.shape["H"], self.shape["P"] * self.shape["F"])
        new = lambda *n: torch.empty(*n, device=device, dtype=torch.float32)  # noqa: E731
        return new(*size, self.shape["V"]), new(*size)

    def _tile(self, x: Tensor, width: int, rows: int) -> TensorDescriptor:
        batch, length, heads, size = x.shape
        return TensorDescriptor(
            x, [batch, length, heads * size], [length * heads * size, heads * size, 1], [1, rows, width]
        )

    def _written(self, x: Tensor, width: int, rows: int, reverse: bool) -> Tensor | TensorDescriptor:
        return (
            x if self.cut.cu is not None or reverse and self.shift is not None else self._tile(x, width, rows)
        )

    def _where(self, batch: int) -> tuple:
        return (
            self.cut.cu,
            self.cut.blocks,
            self.length,
            self.segment,
            batch * self.length,
            self.offset,
            self.shift,
        )

    def states(
        self, y, v, *, begin=None, end=None, reverse=False, mask=None, g=None, weight=None, scalar=None
    ):
        """The state (S, z) that each segment starts from; (None, None) where all start from an empty one.

        `begin` and `end` are the states before and, to be written, after the whole walk.
        """
        cut, shape, part = self.cut, self.shape, self.cfg.part
        if end is None and cut.cu is None and cut.programs == cut.sequences:  # a sequence is one segment
            return begin or (None, None)
        heads, size = shape["H"], shape["P"] * shape["F"]
        new = lambda *n: torch.empty(cut.programs, heads, *n, device=v.device, dtype=torch.float32)  # noqa: E731
        channel = isinstance(g, Channels)
        s, z, decay = (
            new(size, shape["V"]),
            new(size),
            None if g is None else new(shape["F"]) if channel else new(),
        )
        for table, hard, flags in self.launches(g, v.dtype) if channel else [(g, None, {"CHANNEL": 0})]:
            flags, rows = shape | flags, flags.get("BT", self.cfg.block)
            flags.pop("GATES", None)
            _sums[(cut.programs * heads * shape["P"] * (shape["V"] // part),)](
                self._tile(y, shape["F"], rows),
                self._tile(v, part, rows),
                mask,
                table,
                hard,
                weight,
                scalar,
                s,
                z,
                decay,
                *self._where(v.shape[0]),
                **flags,
                BV=part,
                C=y.shape[2],
                N=v.shape[2],
                REVERSE=reverse,
                num_stages=max(2, self.cfg.stages),
            )
        _scan[(cut.sequences * heads * (shape["V"] + 1),)](
            s,
            z,
            decay,
            *(begin or (None, None)),
            *(end or (None, None)),
            cut.chunk_start,
            cut.programs // max(1, cut.sequences),
            H=heads,
            V=shape["V"],
            SIZE=size,
            F=shape["F"],
            CHANNEL=int(channel),
            REVERSE=reverse,
            num_warps=1,
        )
        return s, z

    @staticmethod
    def gates(gated: bool, dtype: torch.dtype) -> tuple[int, ...]:
        """The kinds of gates that need a launch of their own. Each segment is written by exactly one
        launch."""
        if not gated:
            return (NONE.value,)
        # float16 has too small a range to absorb mild gates
        return (ANY.value,) if dtype == torch.float16 else (MILD.value, HARD.value)

    def launches(
        self, g: Tensor | Channels | None, dtype: torch.dtype
    ) -> list[tuple[Tensor | None, Tensor | None, dict]]:
        """For each launch that the gates need: the table of decays, which segments are hard, and the flags of
        the kernels."""
        if not isinstance(g, Channels):
            return [(g, None, {"GATES": gates, "CHANNEL": 0}) for gates in self.gates(g is not None, dtype)]
        found = [(g.coarse, g.hard, {"GATES": MILD.value, "CHANNEL": COARSE.value})]
        if g.fine is not None:
            found.append((g.fine, g.hard, {"GATES": MILD.value, "CHANNEL": FINE.value, "BT": FINE_STEP}))
        return found

    def outputs(
        self,
        rows,
        columns,
        v,
        out,
        states,
        *,
        reverse=False,
        normalize=False,
        row_mask=None,
        mask=None,
        g=None,
        weight=None,
        den=None,
        near=None,
        near_den=None,
    ):
        """Writes o, or dv if `reverse`."""
        width, part = self.shape["F"], self.cfg.part
        # two are an illegal instruction there with Triton 3.6
        parts = self.cfg.parts if self.shift is None or not reverse else 1
        for table, hard, flags in self.launches(g, v.dtype):
            flags, step = self.shape | flags, flags.get("BT", self.cfg.block)
            _outputs[(self.cut.programs * self.shape["H"] * (self.shape["V"] // (part * parts)),)](
                self._tile(rows, width, step),
                self._tile(columns, width, step),
                self._tile(v, part, step),
                self._written(out, part, step, reverse),
                row_mask,
                mask,
                table,
                hard,
                weight,
                *states,
                den,
                near,
                near_den,
                *self._where(v.shape[0]),
                **flags,
                R=rows.shape[2],
                C=columns.shape[2],
                N=v.shape[2],
                NORMALIZE=normalize,
                REVERSE=reverse,
                BV=part,
                PARTS=parts,
                num_stages=self.cfg.stages,
            )
        return out

    def maps(
        self,
        rows,
        columns,
        x,
        v,
        states,
        *,
        reverse=False,
        row_mask=None,
        mask=None,
        g=None,
        row_weight=None,
        weight=None,
        row_scalar=None,
        scalar=None,
        term=None,
    ):
        """The gradient of the rows' preactivations, per query head and half of phi: `[P, B, T, H, F]`. With
        `Channels` that of the features as they are kept, in float32."""
        (batch, length, *_), heads, width, halves = rows.shape, *(self.shape[n] for n in ("H", "F", "P"))
        dtype = torch.float32 if isinstance(g, Channels) else v.dtype
        dy = torch.empty(halves, batch, length, heads, width, device=v.device, dtype=dtype)
        if reverse and self.shift is not None:  # some keys are no query's: nothing is written there
            if self.cut.cu is not None:
                dy.zero_()
            else:
                dy[:, :, : max(0, self.shift)].zero_()
                dy[:, :, max(0, self.length + self.shift) :].zero_()
        wide = self.cfg.wide
        for table, hard, flags in self.launches(g, v.dtype):
            flags, step = self.shape | flags, flags.get("BT", self.cfg.block)
            _maps[(self.cut.programs * heads * halves,)](
                rows,
                self._tile(columns, width, step),
                self._tile(x, wide, step),
                self._tile(v, wide, step),
                self._written(dy.flatten(0, 1), width, step, reverse),
                row_mask,
                mask,
                table,
                hard,
                row_weight,
                weight,
                row_scalar,
                scalar,
                term,
                *states,
                *self._where(batch),
                batch,
                **flags,
                R=rows.shape[2],
                C=columns.shape[2],
                X=x.shape[2],
                N=v.shape[2],
                REVERSE=reverse,
                BV=wide,
                num_stages=self.cfg.stages,
            )
        return dy

    def numerators(self, do, o, den, near=None, near_den=None):
        """g = dO / den, the gradient of what is over the denominator, -(g . O) and, beside a near part, the
        share its maximum takes away: `[B, T, H, V]` and `[H, B T]` each."""
        g, delta, share = (
            torch.empty_like(do),
            torch.empty_like(den),
            None if near is None else torch.empty_like(den),
        )
        heads, total = den.shape
        _numerators[(cdiv(total, 16) * heads,)](
            do, o, den, near, near_den, g, delta, share, total, H=heads, V=self.shape["V"], BT=16, num_warps=4
        )
        return g, delta, share

    def decay_gradient(self, rows: Tensor, columns: Tensor, ends: Tensor | None, log_decay: Tensor) -> Tensor:
        """The gradient of the log decay from the terms `[P, H, B T]` of rows and of columns, and the final
        state's `[sequences, H]`."""
        (halves, heads, total), cut, length = rows.shape, self.cut, self.length
        dg = torch.empty(total // max(1, length), length, heads, device=rows.device, dtype=torch.float32)
        _gate_gradients[(cut.sequences * heads,)](
            rows, columns, ends, dg, cut.cu, length, total, H=heads, P=halves, BT=1024
        )
        return (dg.sum((0, 1)) if log_decay.ndim == 1 else dg).to(log_decay.dtype)


def both(ds: Tensor | None, dz: Tensor | None, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor] | None:
    """The gradients of both parts of a state, S and z, of which one or both may have been unused."""
    if ds is None and dz is None:
        return None
    return tuple(torch.zeros_like(x) if d is None else d.contiguous() for d, x in ((ds, s), (dz, z)))


@traceable
class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q,
        k,
        v,
        w_q,
        w_k,
        b_q,
        b_k,
        log_decay,
        mask,
        s0,
        z0,
        shift,
        feature,
        normalize,
        cu_seqlens,
        keep_state,
    ):
        batch, length, heads, _ = q.shape
        walk = Walk.over(q, v, w_q, feature, cu_seqlens, gated=log_decay is not None)
        running = lambda decay: chunk_decay(decay, batch, length, heads, walk.cfg.block, cu_seqlens)  # noqa: E731
        g = None if log_decay is None or feature in EXPONENTIAL else running(log_decay)
        y_q, y_k, weight, last = q, k, None, None
        if w_q is not None:
            y_q, y_k = project(
                q,
                k,
                w_q,
                w_k,
                b_q,
                b_k,
                feature=feature if walk.shape["GIVEN"] else None,
                scale=walk.scales(g),
            )
        if feature in EXPONENTIAL:
            weight, decay, last = ranges(y_k, heads, feature, mask, shift, cu_seqlens)
            weight = weight.permute(2, 0, 1).reshape(heads, -1).contiguous()
            g = running(decay if log_decay is None else decay + log_decay)
        end = walk.final(q.device) if keep_state else None
        states = walk.states(
            y_k, v, begin=None if s0 is None else (s0, z0), end=end, mask=mask, g=g, weight=weight
        )
        o = torch.empty(batch, length, heads, v.shape[3], device=q.device, dtype=v.dtype)
        den = walk.scalars(batch, q.device) if any(ctx.needs_input_grad) and normalize else None
        walk.outputs(y_q, y_k, v, o, states, normalize=normalize, mask=mask, g=g, weight=weight, den=den)
        s_end, z_end = end or (None, None)
        ctx.save_for_backward(
            q,
            k,
            v,
            w_q,
            w_k,
            b_q,
            b_k,
            y_q,
            y_k,
            log_decay,
            mask,
            g,
            weight,
            *states,
            o,
            den,
            s_end,
            z_end,
            s0,
            cu_seqlens,
        )
        ctx.walk, ctx.normalize = walk, normalize
        ctx.set_materialize_grads(False)
        if last is not None:
            ctx.mark_non_differentiable(last)
        return o, s_end, z_end, last

    @staticmethod
    def backward(ctx, do, ds_end, dz_end, _):
        (q, k, v, w_q, w_k, b_q, b_k, y_q, y_k, log_decay, mask, g, weight, s, z, o, den, s_end, z_end,
         s0, cu_seqlens) = ctx.saved_tensors  # fmt: skip
        walk, normalize = ctx.walk, ctx.normalize
        need_q, need_k, need_v, need_wq, need_wk, need_bq, need_bk, need_g, _, need_s0, need_z0 = (
            ctx.needs_input_grad[:11]
        )
        (batch, length, heads, _), halves = q.shape, walk.shape["P"]
        do = torch.zeros_like(o) if do is None else do.contiguous()
        delta = None
        if normalize:
            do, delta, _ = walk.numerators(do, o, den)
        row, col = (walk.scalars(batch, q.device, halves) if need_g else None for _ in range(2))
        side_q = side_k = dv = ds0 = dz0 = d_decay = None
        if need_q or need_wq or need_bq or need_g:
            dy = walk.maps(y_q, y_k, do, v, (s, z), mask=mask, g=g, weight=weight, row_scalar=delta, term=row)
            side_q = Side(dy, q, w_q, b_q, (need_q, need_wq, need_bq))
        if need_k or need_v or need_wk or need_bk or need_g or need_s0 or need_z0:
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
                walk.outputs(y_k, y_q, do, dv, states, row_mask=mask, **columns)
                if weight is not None:
                    dv *= weight.view(heads, batch, length).permute(1, 2, 0)[..., None]
                dv = group_sum(dv, v)
            if need_k or need_wk or need_bk or need_g:
                dy = walk.maps(
                    y_k,
                    y_q,
                    v,
                    do,
                    states,
                    row_mask=mask,
                    row_weight=weight,
                    scalar=delta,
                    term=col,
                    **columns,
                )
                side_k = Side(dy, k, w_k, b_k, (need_k, need_wk, need_bk))
        if need_g:
            # [sequences, H]
            ends = None if begin is None else (begin[0] * s_end).sum((2, 3)) + (begin[1] * z_end).sum(2)
            d_decay = walk.decay_gradient(row, col, ends, log_decay)
        (dq, dw_q, db_q), (dk, dw_k, db_k) = gradients(side_q, side_k)
        return (dq, dk, dv, dw_q, dw_k, db_q, db_k, d_decay, None, ds0, dz0, *(None,) * 5)


def linear_attention(
    q,
    k,
    v,
    w_q=None,
    w_k=None,
    *,
    feature="softmax_pm",
    b_q=None,
    b_k=None,
    log_decay=None,
    normalize=True,
    key_mask=None,
    initial_state=None,
    return_state=False,
    cu_seqlens=None,
):
    """`relinear_kernels.linear_attention` by the kernels of this module. Raises ValueError for shapes that do
    not fit together."""
    dtype, exponential = v.dtype, feature in EXPONENTIAL
    heads, states = q.shape[2], state_heads(w_k, q.shape[2])
    if exponential and not normalize:
        raise ValueError(f"feature {feature!r} needs normalize=True: its sums have no common scale otherwise")
    q, k, v, w_q, w_k, b_q, b_k, key_mask = prepared(q, k, v, w_q, w_k, b_q, b_k, key_mask, cu_seqlens)
    s0 = z0 = shift = None
    if states < heads:
        log_decay = per_query_head(every_decay(log_decay, *q.shape[:3], states), heads, 2)
    if initial_state is not None:
        initial_state = per_query_head(initial_state, heads)
        s0, z0 = initial_state.kv, initial_state.z
        if exponential:  # from a reference per feature to one a head
            shift = initial_state.shift.float().amax(2)
            scale = torch.where(
                initial_state.shift.isinf(), 0.0, (initial_state.shift - shift[:, :, None]).exp()
            )
            s0, z0 = s0 * scale[..., None], z0 * scale
        s0, z0 = s0.contiguous(), z0.contiguous()
    o, s, z, last = apply(
        "_LinearAttention",
        q,
        k,
        v,
        w_q,
        w_k,
        b_q,
        b_k,
        log_decay,
        key_mask,
        s0,
        z0,
        shift,
        feature,
        normalize,
        cu_seqlens,
        return_state,
        keep=15,
        outputs=(True, return_state, return_state, exponential and return_state),
    )
    o = o.to(dtype)
    if not return_state:
        return o
    shift = torch.full_like(z, -torch.inf) if last is None else last[:, :, None].expand_as(z).contiguous()
    return o, per_state_head(LinearState(s, z, shift), states)
