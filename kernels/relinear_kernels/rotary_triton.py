"""Rotary position embedding of q and k in one launch; backwards the same by the opposite angle.

    y_a = x_a cos_a - x_b sin_a        dx_a = dy_a cos_a + dy_b sin_b
    y_b = x_b cos_b + x_a sin_b        dx_b = dy_b cos_b - dy_a sin_a

with a and b the two halves of a head.

    one head     | a: D/2 columns | b: D/2 columns |   a program: ROWS tokens of one head of q or k;
    ROWS tokens  |     a_0 ..     |     b_0 ..     |   columns j, j + D/2 turn as a pair by the token's angle
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from relinear_kernels.triton_common import cdiv

ROWS = 32  # tokens of a program, which has one head of them


@triton.jit(do_not_specialize=["T", "N"])
def _turn(
    q,
    k,
    cos,
    sin,
    out_q,
    out_k,
    T,
    N,
    step,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BACK: tl.constexpr,
    BT: tl.constexpr,
):
    """Turn the heads of q and k. A program has head `program_id(1)`, q's first and then k's, of one block of
    the N tokens.

    `step` is the distance from one sequence's angles to the next one's, 0 where all share them.
    """
    rows = tl.program_id(0) * BT + tl.arange(0, BT)
    head = tl.program_id(1)
    cols = tl.arange(0, HALF)
    inside = (rows < N)[:, None] & (cols < D // 2)[None, :]
    angles = (rows // T * step + rows % T).to(tl.int64)[:, None] * D + cols[None, :]
    cos_a = tl.load(cos + angles, mask=inside, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + angles + D // 2, mask=inside, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + angles, mask=inside, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + angles + D // 2, mask=inside, other=0.0).to(tl.float32)
    if BACK:
        sin_a, sin_b = -sin_b, -sin_a
    if head < H:
        _head(q, out_q, rows, head, cols, inside, cos_a, cos_b, sin_a, sin_b, H, D)
    else:
        _head(k, out_k, rows, head - H, cols, inside, cos_a, cos_b, sin_a, sin_b, G, D)


@triton.jit
def _head(x, out, rows, head, cols, inside, cos_a, cos_b, sin_a, sin_b, H: tl.constexpr, D: tl.constexpr):
    at = (rows.to(tl.int64) * H + head)[:, None] * D + cols[None, :]
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + at + D // 2, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, a * cos_a - b * sin_a, mask=inside)
    tl.store(out + at + D // 2, b * cos_b + a * sin_b, mask=inside)


def _launch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    q, k = q.contiguous(), k.contiguous()
    out_q, out_k = torch.empty_like(q), torch.empty_like(k)
    batch, length, heads, dim = q.shape
    tokens, groups = batch * length, k.shape[2]
    shape = {
        "H": heads,
        "G": groups,
        "D": dim,
        "HALF": triton.next_power_of_2(dim // 2),
        "BACK": back,
        "BT": ROWS,
    }
    _turn[cdiv(tokens, ROWS), heads + groups](
        q, k, cos, sin, out_q, out_k, length, tokens, length if cos.shape[0] > 1 else 0, **shape
    )
    return out_q, out_k


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _launch(q, k, cos, sin, back=False)

    @staticmethod
    def backward(ctx, dq, dk):
        return *_launch(dq, dk, *ctx.saved_tensors, back=True), None, None


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`relinear_kernels.rotary` by the kernel of this module. Raises ValueError for shapes that do not fit
    together."""
    batch, length, _, dim = q.shape
    if dim % 2 or k.shape[-1] != dim:
        raise ValueError(
            f"rotary turns pairs: it takes an even head width, q's that of k; got {dim} and {k.shape[-1]}"
        )
    if (
        any(x.shape not in ((batch, length, dim), (1, length, dim)) for x in (cos, sin))
        or cos.shape != sin.shape
    ):
        raise ValueError(
            f"cos and sin must be [B={batch} or 1, T={length}, D={dim}]; got {list(cos.shape)} and"
            f" {list(sin.shape)}"
        )
    return _Rotary.apply(q, k, cos.contiguous(), sin.contiguous())
