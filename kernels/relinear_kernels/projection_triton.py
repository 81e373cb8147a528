"""A head's matrix in Triton: y = x W + b for every head, and its gradients.

Kept apart from the attention kernels: y is as small as its features are few, and without W and x in their shared memory those keep
two programs a multiprocessor with their loads in flight. y of bfloat16 inputs is kept as float16, four times as fine.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from relinear_kernels.triton_common import cdiv, put, tile


@triton.jit
def _project(
    xq, xk, wq, wk, bq, bk, yq, yk, rows_q, rows_k, splits, per, NQ, NK,
    H: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """y of one head for `per` rows of `[rows, N, D]`: the first `splits` H programs those of q, the others those of k."""
    h = tl.program_id(0) % H
    part = tl.program_id(0) // H
    if part < splits:
        _rows_of(xq, wq, bq, yq, rows_q, part, per, h, H, NQ, D, F, BT)
    else:
        _rows_of(xk, wk, bk, yk, rows_k, part - splits, per, h, H, NK, D, F, BT)


@triton.jit
def _rows_of(
    x, w, b, y, total, part, per, h, H: tl.constexpr, N, D: tl.constexpr, F: tl.constexpr, BT: tl.constexpr
):  # fmt: skip
    begin = part.to(tl.int64) * per
    end = tl.minimum(begin + per, total)
    f = tl.arange(0, F)
    w = tl.load(w + h * (D * F) + tl.arange(0, D)[:, None] * F + f[None, :])
    x += begin * (N * D) + h // (H // N) * D
    y += begin * (H * F) + h * F
    for i in range(0, (end - begin).to(tl.int32), BT):
        rows = i + tl.arange(0, BT)
        value = tl.dot(tile(x, rows, end - begin, N, D), w, input_precision="ieee")
        if b is not None:
            value += tl.load(b + h * F + f).to(tl.float32)[None, :]
        if y.dtype.element_ty == tl.float16:
            value = tl.minimum(tl.maximum(value, -65504.0), 65504.0)
        put(y, value, rows, end - begin, H, F)


@triton.jit
def _inputs(
    dy, w, dx, total, H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, F: tl.constexpr, P: tl.constexpr, BT: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """dx = (ADD: itself plus) the sum over the query heads that share a head of x, and over the P parts of dy, of dy W^T."""
    n = tl.program_id(0) % N
    begin = (tl.program_id(0) // N).to(tl.int64) * BT
    rows = tl.arange(0, BT)
    dx += begin * (N * D) + n * D
    acc = tl.zeros([BT, D], tl.float32)
    if ADD:
        acc += tile(dx, rows, total - begin, N, D).to(tl.float32)
    for h in range(n * (H // N), (n + 1) * (H // N)):
        m = tl.load(w + h * (D * F) + tl.arange(0, D)[:, None] * F + tl.arange(0, F)[None, :])
        for part in tl.static_range(P):
            at = dy + (part * total + begin) * (H * F) + h * F
            acc = tl.dot(tile(at, rows, total - begin, H, F), tl.trans(m), acc, input_precision="ieee")
    put(dx, acc, rows, total - begin, N, D)


@triton.jit
def _matrices(
    x, dy, dw, total, per, H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, F: tl.constexpr, P: tl.constexpr, BT: tl.constexpr
):  # fmt: skip
    """One program's share of dW = sum over rows of x^T dy: `[splits, H, D, F]` in float32."""
    h = tl.program_id(0) % H
    part = tl.program_id(0) // H
    begin = part.to(tl.int64) * per
    end = tl.minimum(begin + per, total)
    x += begin * (N * D) + h // (H // N) * D
    dy += begin * (H * F) + h * F
    acc = tl.zeros([D, F], tl.float32)
    for i in range(0, (end - begin).to(tl.int32), BT):
        rows = i + tl.arange(0, BT)
        a = tl.trans(tile(x, rows, end - begin, N, D))
        for p in tl.static_range(P):
            acc = tl.dot(a, tile(dy + total.to(tl.int64) * (p * H * F), rows, end - begin, H, F), acc, input_precision="ieee")
    to = (part * H + h).to(tl.int64) * (D * F)
    tl.store(dw + to + tl.arange(0, D)[:, None] * F + tl.arange(0, F)[None, :], acc)


def _block(dtype: torch.dtype, rows: int) -> int:
    return 16 if dtype == torch.float32 else rows


def project(q: Tensor, k: Tensor, w_q: Tensor, w_k: Tensor, b_q: Tensor | None = None, b_k: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """q W_q + b_q and k W_k + b_k: `[B, T, N, D]`, `[H, D, F]`, `[H, F]` -> `[B, T, H, F]`, float16 where the inputs are bfloat16."""
    (heads, dim, width), dtype = w_q.shape, torch.float16 if q.dtype == torch.bfloat16 else q.dtype
    y_q, y_k = (torch.empty(*x.shape[:2], heads, width, device=q.device, dtype=dtype) for x in (q, k))
    rows_q, rows_k = (x.shape[0] * x.shape[1] for x in (q, k))
    per = max(256, cdiv(rows_q * heads, 1056 * 64) * 64)
    splits = cdiv(rows_q, per)
    _project[((splits + cdiv(rows_k, per)) * heads,)](
        q, k, w_q, w_k, b_q, b_k, y_q, y_k, rows_q, rows_k, splits, per, q.shape[2], k.shape[2], H=heads, D=dim, F=width,
        BT=_block(q.dtype, 64), num_warps=4, num_stages=1 if q.dtype == torch.float32 else 3,
    )  # fmt: skip
    return y_q, y_k


def input_gradient(dy: Tensor, w: Tensor, x: Tensor, onto: Tensor | None = None) -> Tensor:
    """The gradient of x, from that of x W in parts to be summed `[P, B, T, H, F]`; added in place to `onto` where given."""
    parts, batch, length, heads, width = dy.shape
    groups, dim = x.shape[2:]
    dx, rows = torch.empty_like(x) if onto is None else onto, _block(x.dtype, 128)
    _inputs[(cdiv(batch * length, rows) * groups,)](
        dy, w, dx, batch * length, H=heads, N=groups, D=dim, F=width, P=parts, BT=rows, ADD=onto is not None, num_warps=4 if dim < 128 else 8,
        num_stages=1 if x.dtype == torch.float32 or heads == groups else 2,
    )  # fmt: skip
    return dx


def matrix_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """The gradient of W: `[B, T, N, D]`, `[B, T, H, F]` or parts to be summed `[P, B, T, H, F]` -> `[H, D, F]` float32, in one fixed order."""
    batch, length, groups, dim = x.shape
    count, heads, width = dy.shape[:-4].numel(), *dy.shape[-2:]
    total = batch * length
    per = cdiv(total, max(1, min(cdiv(528, heads), total // 256)))
    parts = torch.empty(cdiv(total, per), heads, dim, width, device=x.device, dtype=torch.float32)
    _matrices[(len(parts) * heads,)](
        x, dy, parts, total, per, H=heads, N=groups, D=dim, F=width, P=count, BT=_block(x.dtype, 64), num_warps=4,
        num_stages=1 if x.dtype == torch.float32 else 3,
    )  # fmt: skip
    return parts.sum(0)
