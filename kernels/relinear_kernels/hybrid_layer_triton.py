"""LoLCATs' hybrid forward in one launch: features, window, linear part and their quotient.

    keys:      | edge tile, BT keys  | (middle)  | own tile, BT keys |
    query i:   | far: c <= i         |           | near: c <= i      |
    of its BT  | near: c > i         |  near     | not seen: c > i   |

A program walks a segment of a head's sequence in steps of BT queries, with the linear state of all keys
before the edge tile in registers, transposed. The window is one or two tiles long, so that the query i of a
step sees by softmax what is behind the diagonal of the edge tile, and by its features what is before it: one
matrix has the weights of both, and one product takes their values. Features are made of q, k and their maps
where they are used. q, k and v are read (keys and values twice or thrice, from the cache), o is written, and
no part of it lies in memory in between.

Where gradients will be asked for, what the backward pass reads is written beside o: the features, the
window's own mean and its maximum.

With few heads a sequence has several segments: `_absorb` adds up what each leaves to the state.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from relinear_kernels.linear_attention_triton import (
    Walk,
    _first_row,
    _load_rows,
    _locate_segment,
    _scan,
    _split_in_two,
    _state,
)
from relinear_kernels.sliding_window_attention_triton import Near
from relinear_kernels.triton_common import matrix, phi, reciprocal


class Tiling(NamedTuple):
    """How the kernel is laid on a multiprocessor."""

    warps: int
    stages: int  # steps whose tiles are in flight
    columns: int  # columns of v in one tile of the state
    registers: int | None = None  # registers of a thread; None: as many as it takes


def tiling(dim: int, dtype: torch.dtype) -> Tiling:
    """The tiling shipped for heads of this width."""
    if dtype == torch.float32:  # products by fused multiply-add: small tiles
        return Tiling(4, 1, min(dim, 64))
    return Tiling(4, 1, 64)


def takes(walk: Walk, q: Tensor, k: Tensor, v: Tensor, w_q: Tensor | None, window: int, plain: bool) -> bool:
    """Whether the launch of this module makes the layer. `plain`: no padding, no packed sequences, no state
    before.

    It takes windows of one or two steps, and states that registers hold.
    """
    shape, step = walk.shape, walk.cfg.block
    small = q.dtype == torch.float32 or q.shape[3] >= 64 and shape["F"] == 64
    return (
        plain
        and w_q is not None
        and shape["P"] * shape["F"] <= 128
        and v.shape[3] == q.shape[3]
        and window in (step, 2 * step)
        and small
        and k.shape[1] == q.shape[1]
    )


@triton.jit
def _features(x, w, use, FEATURE: tl.constexpr, P: tl.constexpr, DT: tl.constexpr):
    """Both halves of phi(x W), each row times its `use` (None: 1), as products take them."""
    y = tl.dot(x, w, input_precision="ieee")
    plus = phi(y, 1.0, use, FEATURE).to(DT)
    minus = plus
    if P == 2:
        minus = phi(y, -1.0, use, FEATURE).to(DT)
    return plus, minus


@triton.jit
def _inside(keys, end):
    """1 where a key is one that the linear part takes, else 0."""
    return ((keys >= 0) & (keys < end)).to(tl.float32)


@triton.jit(do_not_specialize=["T", "L"])
def _absorb(
    k,
    v,
    wk,
    s,
    z,
    T,
    L,
    W: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    P: tl.constexpr,
    FEATURE: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
):
    """Write what each segment adds to the state: S `[segments, H, P, F, D]` and z `[segments, H, P, F]`. A
    program has BV columns of it."""
    part = tl.program_id(0) % (D // BV)
    h = tl.program_id(0) // (D // BV) % H
    i = tl.program_id(0) // (D // BV * H)
    n, base, start, keys, first, last = _locate_segment(i, T, L, None, None, None)
    DT = v.dtype
    g = h // (H // N)
    at = (i.to(tl.int64) * H + h) * (P * F)
    w = matrix(wk + h * (D * F), D, F).to(DT)
    sp = tl.zeros([BV, F], tl.float32)
    sm = sp
    zp = tl.zeros([16, F], tl.float32)
    zm = zp
    ones = tl.full([16, BT], 1.0, DT)
    for step in range(0, tl.cdiv(last - first, BT)):
        j = _first_row(step, first, last, False, BT) - W
        kp, km = _features(
            _load_rows(k, n, j, g, BT, D), w, _inside(j + tl.arange(0, BT), T - W), FEATURE, P, DT
        )
        x = tl.trans(_load_rows(v, n, j, g * (D // BV) + part, BT, BV))
        sp = tl.dot(x, kp, sp, input_precision="ieee")
        zp = tl.dot(ones, kp, zp, input_precision="ieee")
        if P == 2:
            sm = tl.dot(x, km, sm, input_precision="ieee")
            zm = tl.dot(ones, km, zm, input_precision="ieee")
    _store_state(s, z, at, part * BV, sp, zp, part == 0, D, F, BV)
    if P == 2:
        _store_state(s, z, at + F, part * BV, sm, zm, part == 0, D, F, BV)


@triton.jit
def _first_equal(scores, top, at, BT: tl.constexpr):
    """The first key of a tile, whose first is `at`, with the score `top` of a row."""
    return tl.min(tl.where(scores == top[:, None], (at + tl.arange(0, BT))[None, :], 2147483647), 1)


@triton.jit
def _store_state(s, z, at, c, state, sums, first, V: tl.constexpr, F: tl.constexpr, BV: tl.constexpr):
    """Store a tile of the state of one sign and, with the `first`, its sums (16 equal rows)."""
    f = tl.arange(0, F)
    tl.store(s + (at + f)[None, :] * V + c + tl.arange(0, BV)[:, None], state)
    one = tl.sum(tl.where(tl.arange(0, 16)[:, None] == 0, sums, 0.0), 0)
    tl.store(z + at + f, one, mask=(f >= 0) & first)


@triton.jit
def _take(
    qp, qm, p0, p1, p2, far, kp, km, sp, sm, v, out, near, n, j, g, h, part, over, mean,
    W: tl.constexpr, V: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Write the columns `part` of o, and with `near` of the window's mean. Return their states after the edge
    tile."""
    edge = _load_rows(v, n, j - W, g * (V // BV) + part, BT, BV)
    acc = tl.dot(p0, edge, input_precision="ieee")
    if W > BT:
        middle = _load_rows(v, n, j - W + BT, g * (V // BV) + part, BT, BV)
        acc = tl.dot(p1, middle, acc, input_precision="ieee")
    acc = tl.dot(p2, _load_rows(v, n, j, g * (V // BV) + part, BT, BV), acc, input_precision="ieee")
    if near is not None:
        to = (acc * mean[:, None]).to(near.dtype)
        near.store([n, j, (h * (V // BV) + part) * BV], to.reshape(1, BT, BV))
        acc = tl.dot(far, edge, acc, input_precision="ieee")
    acc = tl.dot(qp, tl.trans(sp.to(v.dtype)), acc, input_precision="ieee")
    if P == 2:
        acc = tl.dot(qm, tl.trans(sm.to(v.dtype)), acc, input_precision="ieee")
    out.store([n, j, (h * (V // BV) + part) * BV], (acc * over[:, None]).to(out.dtype).reshape(1, BT, BV))
    sp = tl.dot(tl.trans(edge), kp, sp, input_precision="ieee")
    if P == 2:
        sm = tl.dot(tl.trans(edge), km, sm, input_precision="ieee")
    return sp, sm


@triton.jit(do_not_specialize=["T", "L", "total"])
def _layer(
    q,
    k,
    v,
    wq,
    wk,
    o,
    gamma,
    s,
    z,
    s_end,
    z_end,
    near,
    yq,
    yk,
    den,
    top_at,
    arg_at,
    weight_at,
    T,
    L,
    total,
    scale,
    W: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    P: tl.constexpr,
    FEATURE: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
):
    """Write o of a segment and, at the end of its sequence, the state. With `near` write what a backward pass
    reads: the window's mean, the features, and `[H, rows]` each the denominator, the maximum (to base two),
    the key that attains it, and gamma times the window's sum."""
    turn = scale * 1.4426950408889634
    h = tl.program_id(0) % H
    i = tl.program_id(0) // H
    n, base, start, keys, first, last = _locate_segment(i, T, L, None, None, None)
    DT = v.dtype
    g = h // (H // N)
    r = tl.load(gamma + h)
    at = (i.to(tl.int64) * H + h) * (P * F)
    mq = matrix(wq + h * (D * F), D, F).to(DT)
    mk = matrix(wk + h * (D * F), D, F).to(DT)
    sp = _state(s, at, 0, D, F, BV)
    sm = _state(s, at + (P - 1) * F, 0, D, F, BV)
    if D > BV:
        tp = _state(s, at, BV, D, F, BV)
        tm = _state(s, at + (P - 1) * F, BV, D, F, BV)
    # z as 16 equal rows, so that a small product adds to it and another, of its two halves, takes q . z
    zp = tl.zeros([16, F], tl.float32)
    zm = zp
    if s is not None:
        zp += tl.load(z + at + tl.arange(0, F))[None, :]
        zm += tl.load(z + at + (P - 1) * F + tl.arange(0, F))[None, :]
    ones = tl.full([16, BT], 1.0, DT)
    c = tl.arange(0, BT)
    behind = c[:, None] < c[None, :]  # of the edge tile what the window has, of the own tile what is not seen
    for step in range(0, tl.cdiv(last - first, BT)):
        j = _first_row(step, first, last, False, BT)
        rows = j + c
        qt = _load_rows(q, n, j, h, BT, D)
        k0 = _load_rows(k, n, j - W, g, BT, D)
        high_p = _split_in_two(zp, 1, DT)
        high_m = _split_in_two(zm, 1, DT)
        kp, km = _features(k0, mk, _inside(c + (j - W), T - W), FEATURE, P, DT)
        zp = tl.dot(ones, kp, zp, input_precision="ieee")
        if P == 2:
            zm = tl.dot(ones, km, zm, input_precision="ieee")
        qp, qm = _features(qt, mq, None, FEATURE, P, DT)
        a = tl.dot(qp, tl.trans(kp), input_precision="ieee")
        d = tl.dot(qp, tl.trans(high_p), input_precision="ieee")
        if P == 2:
            a = tl.dot(qm, tl.trans(km), a, input_precision="ieee")
            d = tl.dot(qm, tl.trans(high_m), d, input_precision="ieee")
        a = tl.where(behind, 0.0, a)
        far = a.to(DT)
        d = tl.sum(d, 1) + tl.sum(a, 1)
        s0 = tl.dot(qt, tl.trans(k0), input_precision="ieee") * turn
        s0 = tl.where(behind & (c + (j - W) >= 0)[None, :], s0, float("-inf"))
        s2 = tl.dot(qt, tl.trans(_load_rows(k, n, j, g, BT, D)), input_precision="ieee") * turn
        s2 = tl.where(behind, float("-inf"), s2)
        top = tl.maximum(tl.max(s0, 1), tl.max(s2, 1))
        if W > BT:
            k1 = _load_rows(k, n, j - W + BT, g, BT, D)
            s1 = tl.dot(qt, tl.trans(k1), input_precision="ieee") * turn
            s1 = tl.where((c + (j - W + BT) >= 0)[None, :], s1, float("-inf"))
            top = tl.maximum(top, tl.max(s1, 1))
        if near is not None:
            arg = _first_equal(s2, top, j, BT)
            if W > BT:
                arg = tl.minimum(arg, _first_equal(s1, top, j - W + BT, BT))
            arg = tl.minimum(arg, _first_equal(s0, top, j - W, BT))
        s0 = tl.exp2(s0 - top[:, None]) * r
        s2 = tl.exp2(s2 - top[:, None]) * r
        weight = tl.sum(s0, 1) + tl.sum(s2, 1)
        p0 = s0.to(DT)
        p2 = s2.to(DT)
        p1 = p2
        if W > BT:
            s1 = tl.exp2(s1 - top[:, None]) * r
            weight += tl.sum(s1, 1)
            p1 = s1.to(DT)
        d += weight
        over = reciprocal(d)
        mean = over
        if near is None:  # both at once: what one has is zero in the other
            p0 = tl.where(behind, p0, far)
        else:
            mean = reciprocal(weight)
        sp, sm = _take(
            qp, qm, p0, p1, p2, far, kp, km, sp, sm, v, o, near, n, j, g, h, 0, over, mean, W, D, P, BT, BV
        )
        if D > BV:
            tp, tm = _take(
                qp,
                qm,
                p0,
                p1,
                p2,
                far,
                kp,
                km,
                tp,
                tm,
                v,
                o,
                near,
                n,
                j,
                g,
                h,
                1,
                over,
                mean,
                W,
                D,
                P,
                BT,
                BV,
            )
        if near is not None:
            yq.store([n, j, h * P * F], qp.reshape(1, BT, F))
            yk.store([n, j - W, h * P * F], kp.reshape(1, BT, F))  # rows before the first are dropped
            if P == 2:
                yq.store([n, j, (h * P + 1) * F], qm.reshape(1, BT, F))
                yk.store([n, j - W, (h * P + 1) * F], km.reshape(1, BT, F))
            lane = h * total + start + rows
            tl.store(den + lane, d, mask=rows < T)
            tl.store(top_at + lane, top, mask=rows < T)
            tl.store(arg_at + lane, arg, mask=rows < T)
            tl.store(weight_at + lane, weight, mask=rows < T)
    if s_end is not None:
        if last == T:
            to = (n.to(tl.int64) * H + h) * (P * F)
            _store_state(s_end, z_end, to, 0, sp, zp, True, D, F, BV)
            if P == 2:
                _store_state(s_end, z_end, to + F, 0, sm, zm, True, D, F, BV)
            if D > BV:
                _store_state(s_end, z_end, to, BV, tp, zp, False, D, F, BV)
                if P == 2:
                    _store_state(s_end, z_end, to + F, BV, tm, zm, False, D, F, BV)


class Kept(NamedTuple):
    """What a backward pass needs of the launch: the features `[B, T, H, P F]`, the window's mean, and `[H, B
    T]` each the denominator, the window's maximum, its key and its weight."""

    y_q: Tensor
    y_k: Tensor
    near: Tensor
    den: Tensor
    top: Tensor
    arg: Tensor
    weight: Tensor


def layer(
    walk: Walk, near: Near, q, k, v, w_q, w_k, *, end=None, training: bool
) -> tuple[Tensor, tuple[Tensor, Tensor] | tuple[None, None], Kept | None]:
    """Return o `[B, T, H, D]`, the states that segments start from, and what a backward pass needs if
    `training`. The final state is written to `end`."""
    (batch, length, heads, dim), shape, how = q.shape, walk.shape, tiling(q.shape[3], q.dtype)
    flags = {n: shape[n] for n in ("H", "F", "P", "FEATURE", "BT")}
    flags |= {"N": k.shape[2], "D": dim, "W": near.window, "BV": how.columns}
    step, many = walk.cfg.block, shape["P"] * shape["F"]
    tiles = lambda x, width: walk._tile(x, width, step)  # noqa: E731
    values = tiles(v, how.columns)
    states = None, None
    if walk.cut.programs > walk.cut.sequences:
        new = lambda *n: torch.empty(walk.cut.programs, heads, *n, device=q.device, dtype=torch.float32)  # noqa: E731
        states = s, z = new(many, dim), new(many)
        _absorb[(walk.cut.programs * heads * (dim // how.columns),)](
            tiles(k, dim), values, w_k, s, z, length, walk.segment, **flags, num_warps=4, num_stages=2
        )
        _scan[(batch * heads * (dim + 1),)](
            s,
            z,
            None,
            None,
            None,
            None,
            None,
            None,
            walk.cut.programs // batch,
            H=heads,
            V=dim,
            SIZE=many,
            F=shape["F"],
            CHANNEL=0,
            REVERSE=False,
            num_warps=1,
        )
    o, kept, for_backward = torch.empty_like(q), None, (None,) * 7
    if training:
        scalar = lambda: walk.scalars(batch, q.device)  # noqa: E731
        made = lambda: q.new_empty(batch, length, heads, many)  # noqa: E731
        arg = torch.empty(heads, batch * length, device=q.device, dtype=torch.int32)
        kept = Kept(made(), made(), torch.empty_like(q), scalar(), scalar(), arg, scalar())
        features = (tiles(x, shape["F"]) for x in kept[:2])
        for_backward = tiles(kept.near, how.columns), *features, *kept[3:]
    _layer[(walk.cut.programs * heads,)](
        tiles(q, dim),
        tiles(k, dim),
        values,
        w_q,
        w_k,
        tiles(o, how.columns),
        near.gamma,
        *states,
        *(end or (None, None)),
        *for_backward,
        length,
        walk.segment,
        batch * length,
        near.scale,
        **flags,
        num_warps=how.warps,
        num_stages=how.stages,
        maxnreg=how.registers,
    )
    return o, states, kept
