"""A head's matrix in Triton: y = x W + b for every head, and its gradients.

    x [rows, N, D]   one program: ROWS rows of one head     y [rows, H, F]
    head n | D ###| @ W [H, D, F] + b [H, F]             -> head h | F ##|      the H / N query heads of a key
    head read the same x

Kept apart from the attention kernels: y is as small as its features are few, and without W and x in their
shared memory those keep two programs a multiprocessor with their loads in flight. y of bfloat16 inputs is
kept as float16, four times as fine.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from relinear_kernels.triton_common import cdiv, matrix, phi, put, tile

ROWS = 256  # rows that a program projects


@triton.jit(do_not_specialize=["rows_q", "rows_k", "splits", "per"])
def _project(
    xq,
    xk,
    wq,
    wk,
    bq,
    bk,
    yq,
    yk,
    scale,
    rows_q,
    rows_k,
    splits,
    per,
    H: tl.constexpr,
    NQ: tl.constexpr,
    NK: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    P: tl.constexpr,
    FEATURE: tl.constexpr,
    BT: tl.constexpr,
):
    """y, or the P halves of phi(y), of one head for `per` rows of `[rows, N, D]`: the first `splits` H
    programs those of q, the others k's.

    Those of k times, those of q over the powers of two `scale`, `[H, rows]` (None: 0).
    """
    h = tl.program_id(0) % H
    part = tl.program_id(0) // H
    x, w, b, y, total, heads = xq, wq, bq, yq, rows_q, NQ + 0 * part
    sign = 1.0 - 2.0 * (part < splits)
    if part >= splits:  # one loop for both: a branch each would take the shared memory of both
        x, w, b, y, total, heads = xk, wk, bk, yk, rows_k, NK + 0 * part
        part -= splits
    begin = part.to(tl.int64) * per
    end = tl.minimum(begin + per, total)
    f = tl.arange(0, F)
    w = matrix(w + h * (D * F), D, F).to(x.dtype.element_ty)
    x += begin * (heads * D) + h // (H // heads) * D
    y += begin * (H * P * F) + h * (P * F)
    if scale is not None:
        scale += h * rows_k + begin
        coming = tl.load(scale + tl.arange(0, BT), mask=tl.arange(0, BT) < end - begin, other=0.0)
    for i in range(0, (end - begin).to(tl.int32), BT):
        rows = i + tl.arange(0, BT)
        if scale is not None:  # loaded a block ahead
            fade = tl.exp2(sign * coming)
            coming = tl.load(scale + rows + BT, mask=rows + BT < end - begin, other=0.0)
        value = tl.dot(tile(x, rows, end - begin, heads, D), w, input_precision="ieee")
        if b is not None:
            value += tl.load(b + h * F + f).to(tl.float32)[None, :]
        for half in tl.static_range(P):
            out = value
            if FEATURE is not None:
                out = phi(value, 1.0 - 2.0 * half, None, FEATURE)
            if scale is not None:
                out *= fade[:, None]
            if y.dtype.element_ty == tl.float16:
                out = tl.minimum(tl.maximum(out, -65504.0), 65504.0)
            put(y + half * F, out, rows, end - begin, H * P, F)


@triton.jit(do_not_specialize=["rows_q", "rows_k", "programs"])
def _inputs(
    dyq,
    dyk,
    wq,
    wk,
    dxq,
    dxk,
    rows_q,
    rows_k,
    programs,
    H: tl.constexpr,
    NQ: tl.constexpr,
    NK: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    P: tl.constexpr,
    BT: tl.constexpr,
    ADD: tl.constexpr,
):
    """Write dx, the sum of dy W^T over the query heads that share a head of x and over the P parts of dy.
    With ADD it is added to what dx holds.

    The first `programs` programs are those of q, the others those of k.
    """
    i = tl.program_id(0)
    dy, w, dx, total, heads = dyq, wq, dxq, rows_q, NQ + 0 * i
    if i >= programs:
        dy, w, dx, total, heads = dyk, wk, dxk, rows_k, NK + 0 * i
        i -= programs
    n = i % heads
    begin = (i // heads).to(tl.int64) * BT
    rows = tl.arange(0, BT)
    dx += begin * (heads * D) + n * D
    acc = tl.zeros([BT, D], tl.float32)
    if ADD:
        acc += tile(dx, rows, total - begin, heads, D).to(tl.float32)
    for h in range(n * (H // heads), (n + 1) * (H // heads)):
        m = matrix(w + h * (D * F), D, F).to(dy.dtype.element_ty)
        for part in tl.static_range(P):
            at = dy + (part * total + begin) * (H * F) + h * F
            acc = tl.dot(tile(at, rows, total - begin, H, F), tl.trans(m), acc, input_precision="ieee")
    put(dx, acc, rows, total - begin, heads, D)


@triton.jit
def _column_order(D: tl.constexpr, C: tl.constexpr):
    """The column of x that each column of the product stands for.

    Of C columns of a product a thread holds 2t, 2t + 1, 2t + 8, 2t + 9, ... This order makes them neighbours
    in x, so that a thread stores them at once.
    """
    n = tl.arange(0, D)
    return n // C * C + n // 2 % 4 * (C // 4) + n // 8 % (C // 8) * 2 + n % 2


@triton.jit
def _pieces(value, BT: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """A product `[BT, D]` whose columns are in the order of `_column_order`, as pieces of rows `[BT D / C,
    C]`.

    Pieces come in the order in which warps hold them, so that nothing moves between threads.
    """
    value = tl.permute(tl.reshape(value, [BT // 16, 2, 8, D // C, C // 8, 4, 2]), [3, 1, 0, 2, 5, 4, 6])
    return tl.reshape(value, [BT * D // C, C])


@triton.jit
def _piece_positions(BT: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """The row and the first column of each piece that `_pieces` returns."""
    n = tl.arange(0, BT * D // C)
    return n // 8 % (BT // 16) * 16 + n // (BT // 2) % 2 * 8 + n % 8, n // BT * C


@triton.jit(do_not_specialize=["rows_q", "rows_k", "splits"])
def _matrices(
    xq,
    xk,
    dyq,
    dyk,
    wq,
    wk,
    dxq,
    dxk,
    dw,
    rows_q,
    rows_k,
    splits,
    H: tl.constexpr,
    NQ: tl.constexpr,
    NK: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    P: tl.constexpr,
    BT: tl.constexpr,
    ADD: tl.constexpr,
):
    """Write each program's share of dW = sum over rows of x^T dy, `[sides, splits, H, D, F]` in float32, the
    side of q first.

    Given dx, write that too, as `_inputs` does, from the same reading of dy. This needs a head of x for every
    query head. dx is stored in the layout of the accumulators: another one would take the shared memory that
    two programs on a multiprocessor have left beside W and three blocks of x and dy.
    """
    h = tl.program_id(0) % H
    part = tl.program_id(0) // H
    dw += tl.program_id(0).to(tl.int64) * (D * F)
    x, dy, w, dx, total, heads = xq, dyq, wq, dxq, rows_q, NQ + 0 * part
    if part >= splits:
        x, dy, w, dx, total, heads = xk, dyk, wk, dxk, rows_k, NK + 0 * part
        part -= splits
    per = tl.cdiv(total, splits)
    begin = part.to(tl.int64) * per
    end = tl.minimum(begin + per, total)
    first = begin * (heads * D) + h // (H // heads) * D
    x += first
    dy += begin * (H * F) + h * F
    C: tl.constexpr = min(D, 32)
    if dx is not None:
        m = tl.load(w + h * (D * F) + _column_order(D, C)[:, None] * F + tl.arange(0, F)[None, :]).to(
            dy.dtype.element_ty
        )
        row, column = _piece_positions(BT, D, C)
        dx += first + (row * (heads * D) + column)[:, None] + tl.arange(0, C)[None, :]
    acc = tl.zeros([D, F], tl.float32)
    for i in range(0, (end - begin).to(tl.int32), BT):
        rows = i + tl.arange(0, BT)
        a = tl.trans(tile(x, rows, end - begin, heads, D))
        if dx is not None:
            value = tl.zeros([BT, D], tl.float32)
            inside = (i + row < end - begin)[:, None]
            if ADD:
                old = tl.load(dx + i * (heads * D), mask=inside, other=0.0).to(tl.float32)
        for p in tl.static_range(P):
            b = tile(dy + total.to(tl.int64) * (p * H * F), rows, end - begin, H, F)
            if dx is not None:
                value = tl.dot(b, tl.trans(m), value, input_precision="ieee")
            acc = tl.dot(a, b, acc, input_precision="ieee")
        if dx is not None:
            out = _pieces(value, BT, D, C)
            if ADD:
                out += old
            tl.store(dx + i * (heads * D), out.to(dx.dtype.element_ty), mask=inside)
    tl.store(dw + tl.arange(0, D)[:, None] * F + tl.arange(0, F)[None, :], acc)


def _block(dtype: torch.dtype, rows: int) -> int:
    return 16 if dtype == torch.float32 else rows


def project(
    q: Tensor,
    k: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    b_q: Tensor | None = None,
    b_k: Tensor | None = None,
    *,
    feature: str | None = None,
    scale: Tensor | None = None,
):
    """Return q W_q + b_q and k W_k + b_k, both `[B, T, H, F]`, from x `[B, T, N, D]`, W `[H, D, F]` and b
    `[H, F]`.

    Of bfloat16 inputs they are float16. With a `feature` return its values instead, `[B, T, H, P F]` in the
    inputs' dtype, as products take them. `scale`, `[H, B T]` float32, has exponents of two: a key's features
    are multiplied by 2 to them, a query's divided.
    """
    (heads, dim, width), halves = w_q.shape, 2 if feature == "softmax_pm" else 1
    dtype = torch.float16 if feature is None and q.dtype == torch.bfloat16 else q.dtype
    y_q, y_k = (
        torch.empty(*x.shape[:2], heads, halves * width, device=q.device, dtype=dtype) for x in (q, k)
    )
    rows_q, rows_k = (x.shape[0] * x.shape[1] for x in (q, k))
    splits = cdiv(rows_q, ROWS)
    _project[((splits + cdiv(rows_k, ROWS)) * heads,)](
        q,
        k,
        w_q,
        w_k,
        b_q,
        b_k,
        y_q,
        y_k,
        scale,
        rows_q,
        rows_k,
        splits,
        ROWS,
        H=heads,
        NQ=q.shape[2],
        NK=k.shape[2],
        D=dim,
        F=width,
        P=halves,
        FEATURE=feature,
        BT=_block(q.dtype, 64),
        num_warps=4,
        num_stages=1 if q.dtype == torch.float32 else 3,
    )
    return y_q, y_k


class Side(NamedTuple):
    """q or k, and which of its gradients are wanted. `dy` is that of y = x W + b, in parts to be summed:
    `[..., B, T, H, F]`."""

    dy: Tensor
    x: Tensor
    w: Tensor | None
    b: Tensor | None
    wanted: tuple[bool, bool, bool]  # x, W, b
    onto: Tensor | None = None  # the tensor to which the gradient of x is added, in place


def gradients(*sides: Side | None) -> list[tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """The gradients (of x, of W, of b) of every side, None where not wanted.

    One launch serves both sides. It also makes both the gradient of x and that of W, where no query heads
    share a head of x.
    """
    sides = [s or Side(None, None, None, None, (False, False, False)) for s in sides]
    dx = [_input_gradient(s) if s.wanted[0] else None for s in sides]
    together = [s.wanted[0] and s.wanted[1] and s.x.shape[2] == s.w.shape[0] for s in sides]
    if through := [
        (s, x) for s, x, t in zip(sides, dx, together, strict=True) if not (x is None or s.w is None or t)
    ]:
        input_gradients(through)
    dw = [None for _ in sides]
    for way in (True, False):
        if chosen := [i for i, s in enumerate(sides) if s.wanted[1] and together[i] == way]:
            for i, m in zip(
                chosen, matrix_gradients([(sides[i], dx[i] if way else None) for i in chosen]), strict=True
            ):
                dw[i] = m.to(sides[i].w.dtype)
    db = [
        s.dy.flatten(0, -3).sum(0, dtype=torch.float32).to(s.b.dtype) if s.wanted[2] else None for s in sides
    ]
    return list(zip(dx, dw, db, strict=True))


def _input_gradient(side: Side) -> Tensor:
    """The gradient of x where there is no W; with W the tensor that `input_gradients` is to write it into."""
    if side.w is not None:
        return torch.empty_like(side.x) if side.onto is None else side.onto
    dx = group_sum(side.dy.sum(0) if len(side.dy) > 1 else side.dy[0], side.x)
    return dx if side.onto is None else side.onto.add_(dx)


def group_sum(x: Tensor | None, like: Tensor) -> Tensor | None:
    """Sum the query heads that share a key head: `[B, T, H, D] -> [B, T, N, D]`."""
    if x is None or x.shape == like.shape:
        return x
    return x.view(*like.shape[:3], -1, like.shape[3]).sum(3)


def input_gradients(sides: list[tuple[Side, Tensor]]) -> None:
    """Write the gradient of x of each side into the tensor given with it; where the side has `onto`, add it
    there."""
    (q, dx_q), (k, dx_k) = sides[0], sides[-1]
    (parts, *_, heads, width), (*_, dim) = q.dy.shape, dx_q.shape
    block = _block(dx_q.dtype, 128)
    rows = [dx.shape[0] * dx.shape[1] for _, dx in sides]
    programs = [cdiv(n, block) * dx.shape[2] for n, (_, dx) in zip(rows, sides, strict=True)]
    single = dx_q.dtype == torch.float32 or all(dx.shape[2] == heads for _, dx in sides)
    _inputs[(sum(programs),)](
        q.dy,
        k.dy,
        q.w,
        k.w,
        dx_q,
        dx_k,
        rows[0],
        rows[-1],
        programs[0],
        H=heads,
        NQ=dx_q.shape[2],
        NK=dx_k.shape[2],
        D=dim,
        F=width,
        P=parts,
        BT=block,
        ADD=q.onto is not None,
        num_warps=4 if dim < 128 else 8,
        num_stages=1 if single else 2,
    )


def matrix_gradients(sides: list[tuple[Side, Tensor | None]]) -> Tensor:
    """The gradient of W of every side: `[sides, H, D, F]` float32, in one fixed order. Given tensors are
    written to, or added onto, as `input_gradients` does."""
    (q, dx_q), (k, dx_k) = sides[0], sides[-1]
    parts, (*_, heads, width), dim = q.dy.shape[:-4].numel(), q.dy.shape, q.x.shape[-1]
    rows = [s.x.shape[0] * s.x.shape[1] for s, _ in sides]
    # no more programs a side than run at once: two on each of 132 multiprocessors
    splits = max(1, min(264 // heads, max(rows) // 256))
    dw = torch.empty(len(sides), splits, heads, dim, width, device=q.x.device, dtype=torch.float32)
    single = q.x.dtype == torch.float32
    # float32 spills from four warps; wide tiles fit a multiprocessor once
    wide = dx_q is not None and (single or dim * width > 8192)
    _matrices[(len(sides) * splits * heads,)](
        q.x,
        k.x,
        q.dy,
        k.dy,
        q.w,
        k.w,
        dx_q,
        dx_k,
        dw,
        rows[0],
        rows[-1],
        splits,
        H=heads,
        NQ=q.x.shape[2],
        NK=k.x.shape[2],
        D=dim,
        F=width,
        P=parts,
        BT=_block(q.x.dtype, 64),
        ADD=dx_q is not None and q.onto is not None,
        num_warps=8 if wide else 4,
        num_stages=1 if single else 3,
    )
    return dw.sum(1) if splits > 1 else dw[:, 0]
