"""The parts that every Triton op of this package shares: feature maps inside a kernel, tiles of `[B, T, H,
D]`, tables of blocks, arguments.

Imported only when a Triton op is called, so the package works where triton is not installed.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from relinear_kernels.dispatch import check_packed
from relinear_kernels.features import check_map
from relinear_kernels.linear_attention_reference import per_query_head


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def widest(*tensors: Tensor) -> torch.dtype:
    """The dtype that holds all of them exactly."""
    dtype = tensors[0].dtype
    for x in tensors[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


class Pieces(NamedTuple):
    """The cut of a batch into sequences and blocks of rows. A program has one block. Where each block has a
    stored state it is called a chunk."""

    sequences: int
    cu: Tensor | None  # [N + 1] where each sequence starts in a packed batch; None where all have one length
    blocks: Tensor | None  # [programs, 2] int32 (sequence, block within it) of a packed batch
    programs: int
    chunk_start: Tensor | None  # [N + 1] int32, the first block of each sequence of a packed batch


def pieces(batch: int, length: int, cu_seqlens: Tensor | None, block: int) -> Pieces:
    """Cut `batch` sequences of `length` rows, or the sequences `cu_seqlens` marks in one packed row, into
    blocks."""
    if cu_seqlens is None:
        return Pieces(batch, None, None, batch * cdiv(length, block), None)
    lengths = cu_seqlens.diff().tolist()
    table = [(n, i) for n, size in enumerate(lengths) for i in range(cdiv(size, block))]
    starts = [0]
    for size in lengths:
        starts.append(starts[-1] + cdiv(size, block))
    at = {"dtype": torch.int32, "device": cu_seqlens.device}
    table = torch.tensor(table, **at).view(-1, 2)
    return Pieces(len(lengths), cu_seqlens.to(torch.int32), table, len(table), torch.tensor(starts, **at))


def prepared(
    q: Tensor, k: Tensor, v: Tensor, w_q: Tensor | None, w_k: Tensor | None, b_q: Tensor | None = None,
    b_k: Tensor | None = None, key_mask: Tensor | None = None, cu_seqlens: Tensor | None = None,
) -> list[Tensor | None]:  # fmt: skip
    """Return q, k, v, w_q, w_k, b_q, b_k and key_mask as kernels take them, contiguous.

    q, k and v have the dtype that holds all three exactly, and there is a matrix of keys for every query
    head. Raises ValueError for heads, matrices or `cu_seqlens` that do not fit together.
    """
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"query heads must be a multiple of key heads; got {q.shape[2]} query heads and {k.shape[2]} key"
            " heads"
        )
    q, k, v = (x.to(widest(q, k, v)) for x in (q, k, v))
    if cu_seqlens is not None:
        check_packed(cu_seqlens, *q.shape[:2])
    heads, groups = q.shape[2], k.shape[2]
    check_map(w_q, b_q, heads, heads, q.shape[3])
    check_map(w_k, b_k, heads, groups, k.shape[3])
    w_k, b_k = (per_query_head(x, heads, 0) for x in (w_k, b_k))
    return [None if x is None else x.contiguous() for x in (q, k, v, w_q, w_k, b_q, b_k, key_mask)]


LEAST = tl.constexpr(1e-31)  # float32's least number over its precision, as in `normaliser`


@triton.jit
def nothing(den):
    """Whether a sum of weights is zero as far as float32 can tell (`normaliser`)."""
    return tl.abs(den) < LEAST


@triton.jit
def reciprocal(den):
    """1 / den, 1 where there is nothing to divide by."""
    return 1 / (den + tl.where(nothing(den), 1.0, 0.0))  # not a choice of either, which spills in `_outputs`


@triton.jit
def sequence(n, T, cu):
    """The first row of sequence n, and its length."""
    if cu is not None:
        start = tl.load(cu + n)
        T = tl.load(cu + n + 1) - start
        start = start.to(tl.int64)
    else:
        start = n.to(tl.int64) * T
    return start, T


@triton.jit
def block_of(i, T, blocks, BT):
    """Return the sequence of program i, and the number of its block within that sequence."""
    if blocks is not None:
        n = tl.load(blocks + 2 * i)
        b = tl.load(blocks + 2 * i + 1)
    else:
        n = i // tl.cdiv(T, BT)
        b = i % tl.cdiv(T, BT)
    return n, b


@triton.jit
def tile(x, rows, T, N, W: tl.constexpr):
    """Load rows of one head of `[T, N, W]`, whose first element `x` points at. Rows outside 0 <= row < T are
    zero."""
    cols = tl.arange(0, W)
    return tl.load(
        x + rows[:, None] * (N * W) + cols[None, :], mask=((rows >= 0) & (rows < T))[:, None], other=0.0
    )


@triton.jit
def put(x, value, rows, T, N, W: tl.constexpr):
    """Store rows where `tile` would read them."""
    cols = tl.arange(0, W)
    at = x + rows[:, None] * (N * W) + cols[None, :]
    tl.store(at, value.to(x.dtype.element_ty), mask=((rows >= 0) & (rows < T))[:, None])


@triton.jit
def matrix(w, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Load a contiguous matrix `[ROWS, COLS]`."""
    return tl.load(w + tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :])


@triton.jit
def kept(mask, start, rows, T):
    """Which rows are real keys: inside the sequence and not padding."""
    inside = (rows >= 0) & (rows < T)
    if mask is not None:
        inside = inside & (tl.load(mask + start + rows, mask=inside, other=0) != 0)
    return inside


@triton.jit
def phi(y, sign, weight, FEATURE: tl.constexpr):
    """phi of the tile sign * y, in float32, each row times its weight (None: 1)."""
    if FEATURE == "softmax_pm":
        y *= sign * 1.4426950408889634
        p = tl.exp2(y - tl.max(y, 1)[:, None])
        over = 1 / tl.sum(p, 1)
        if weight is not None:
            p = tl.maximum(p * (over * weight)[:, None], 1e-12 * weight[:, None])
        else:
            p = tl.maximum(p * over[:, None], 1e-12)
    else:
        if FEATURE == "exp_pm" or FEATURE == "exp":  # relative to the row's own maximum
            y *= 1.4426950408889634
            if FEATURE == "exp_pm":
                top = tl.max(tl.abs(y), 1)
            else:
                top = tl.max(y, 1)
            p = tl.exp2(y * sign - top[:, None])
        elif FEATURE == "relu":
            p = tl.maximum(y, 0.0)
        elif FEATURE == "elu":
            p = tl.where(y > 0, 1 + y, tl.exp(tl.minimum(y, 0.0)))
        else:
            p = y
        if weight is not None:
            p *= weight[:, None]
    return p


@triton.jit
def phi_backward(p, dp, sign, FEATURE: tl.constexpr, fade=None):
    """The gradient of y from p = phi(sign * y) and its gradient dp.

    `fade` (one number a row, or one each): features were kept times it. p then comes with the factor in it,
    and dp is the gradient of the kept ones.
    """
    if fade is not None and FEATURE != "softmax_pm":
        dp *= fade
        p *= 1 / fade
    if FEATURE == "softmax_pm":
        if fade is None:
            dp = tl.where(p > 1e-12, dp, 0.0) * p
        else:  # it cancels in their product
            dp = dp * p
            p *= 1 / fade
        dy = (dp - p * tl.sum(dp, 1)[:, None]) * sign
    # the maximum subtracted from a row cancels on normalisation
    elif FEATURE == "exp_pm" or FEATURE == "exp":
        dy = dp * p * sign
    elif FEATURE == "relu":
        dy = tl.where(p > 0, dp, 0.0)
    elif FEATURE == "elu":
        dy = tl.where(p > 1, dp, dp * p)
    else:
        dy = dp
    return dy
