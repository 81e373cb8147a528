"""x + scale y of every head in one launch; backwards, in one as well, dy = scale dO and dscale = sum over
rows of dO . y. dx is dO.

    x, y [N tokens, D] of one head
    | BT rows | BT rows | BT rows | BT rows | ..     forward: a program is one block of one head
    |<---- per blocks ---->|<---- per blocks ---->|  backward: a program is `per` blocks of one head: their
    dy, and one share of dscale

The shares `[programs, H]` are summed by torch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from relinear_kernels.triton_common import cdiv

ROWS = 32  # tokens of a block
PROGRAMS = 2112  # programs of the backward: sixteen for each multiprocessor of an H200


@triton.jit(do_not_specialize=["N"])
def _scaled_sum(x, y, scale, out, N, H: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BT: tl.constexpr):
    """Write x + scale y. A program has the head `program_id(1)` of one block of the N tokens."""
    head = tl.program_id(1)
    at, inside = _block(tl.program_id(0) * BT, N, head, H, D, WIDTH, BT)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(scale + head).to(tl.float32) * tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N", "per"])
def _scaled_sum_gradients(
    do, y, scale, dy, dscale, N, per, H: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BT: tl.constexpr
):
    """Write dy, and each program's share of dscale `[programs, H]`. A program has one head of `per` blocks of
    tokens."""
    head = tl.program_id(1)
    factor = tl.load(scale + head).to(tl.float32)
    acc = tl.zeros([BT], tl.float32)
    for i in range(0, per):
        at, inside = _block((tl.program_id(0) * per + i) * BT, N, head, H, D, WIDTH, BT)
        g = tl.load(do + at, mask=inside, other=0.0).to(tl.float32)
        acc += tl.sum(g * tl.load(y + at, mask=inside, other=0.0).to(tl.float32), 1)
        tl.store(dy + at, (factor * g).to(dy.dtype.element_ty), mask=inside)
    tl.store(dscale + tl.program_id(0) * H + head, tl.sum(acc, 0))


@triton.jit
def _block(first, N, head, H: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BT: tl.constexpr):
    """Return where BT tokens of a head lie in memory, and which of these places exist."""
    rows = first + tl.arange(0, BT)
    cols = tl.arange(0, WIDTH)
    return (rows.to(tl.int64) * H + head)[:, None] * D + cols[None, :], (rows < N)[:, None] & (cols < D)[
        None, :
    ]


class _ScaledSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, scale):
        ctx.save_for_backward(y, scale)
        out = torch.empty_like(y)
        tokens, heads, dim = y[..., 0, 0].numel(), *y.shape[2:]
        _scaled_sum[cdiv(tokens, ROWS), heads](
            x, y, scale, out, tokens, H=heads, D=dim, WIDTH=triton.next_power_of_2(dim), BT=ROWS
        )
        return out

    @staticmethod
    def backward(ctx, do):
        y, scale = ctx.saved_tensors
        do, dy = do.contiguous(), torch.empty_like(y)
        tokens, heads, dim = y[..., 0, 0].numel(), *y.shape[2:]
        per = max(1, cdiv(tokens * heads, ROWS * PROGRAMS))
        programs = cdiv(tokens, ROWS * per)
        dscale = torch.empty(programs, heads, device=y.device, dtype=torch.float32)
        shape = {"H": heads, "D": dim, "WIDTH": triton.next_power_of_2(dim), "BT": ROWS}
        _scaled_sum_gradients[programs, heads](do, y, scale, dy, dscale, tokens, per, **shape)
        return do, dy, dscale.sum(0).to(scale.dtype)


def scaled_sum(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """`relinear_kernels.scaled_sum` by the kernels of this module. Raises ValueError for shapes that do not
    fit together."""
    if x.shape != y.shape or x.ndim != 4 or scale.shape != x.shape[2:3]:
        raise ValueError(
            f"x and y must be of one shape [B, T, H, D], scale [H]; got {list(x.shape)}, {list(y.shape)},"
            f" {list(scale.shape)}"
        )
    return _ScaledSum.apply(x.to(y.dtype).contiguous(), y.contiguous(), scale.contiguous())
