"""The cross-entropy of a vocabulary in Triton: the logits are read once forward, once backward, and no
softmax lies in memory.

    loss_n = logsumexp_v x_nv - x_n,label        dx_nv = (exp(x_nv - logsumexp_n) - [v = label_n]) dloss_n

    logits [N, V]    | BLOCK columns | BLOCK | BLOCK | ..
    row n            |-------------->|------>|------>|   forward: a program walks one row, and keeps running
                                                         maxima and sums
                     |       #       |   #   |   #   |   backward: a program is one block of one row

All in float32, and each gradient rounded once. A label that is no class makes its row's loss, logsumexp and
so gradient NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from relinear_kernels.token_cross_entropy_reference import IGNORED
from relinear_kernels.triton_common import cdiv

BLOCK = 4096  # logits of a step: 16 a thread, two loads of 16 bytes where they are bfloat16
WARPS = 8


# V is a constant and the step between rows is specialised: only where 16 divides both are the loads of 16
# bytes.
@triton.jit
def _token_loss(
    logits, labels, loss, lse_at, step, V: tl.constexpr, IGNORED: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the loss and the log-sum-exp of one row. Each lane keeps a running maximum and sum, so that warps
    synchronise once, after the loop."""
    row = tl.program_id(0)
    label = tl.load(labels + row)
    x_at = logits + row.to(tl.int64) * step
    lanes = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -3.4e38, tl.float32)  # finite, so that a logit of -inf is infinitely far from it
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, V, BLOCK, num_stages=3):  # the next blocks are on their way
        x = tl.load(x_at + start + lanes, mask=start + lanes < V, other=float("-inf")).to(tl.float32)
        less = tl.exp(-tl.abs(x - top))  # the one exponential besides exp(0) that either case needs
        total = tl.where(x > top, total * less + 1.0, total + less)
        top = tl.maximum(top, x)
    highest = tl.max(top, 0)
    rest = tl.log(tl.sum(total * tl.exp(top - highest), 0))
    known = (label >= 0) & (label < V)
    own = tl.load(x_at + label, mask=known, other=float("nan")).to(tl.float32)
    # in this order large logits cancel exactly
    tl.store(loss + row, tl.where(label == IGNORED, 0.0, highest - own + rest))
    tl.store(lse_at + row, tl.where(known, highest + rest, float("nan")))


@triton.jit
def _token_gradient(
    logits, labels, lse_at, g_at, dx, step, V: tl.constexpr, IGNORED: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the gradient of one block of one row of logits."""
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * step + cols, mask=cols < V, other=0.0).to(tl.float32)
    label = tl.load(labels + row)
    p = tl.exp(x - tl.load(lse_at + row))
    gradient = tl.where(cols == label, p - 1.0, p) * tl.load(g_at + row)
    gradient = tl.where(label == IGNORED, 0.0, gradient).to(dx.dtype.element_ty)
    tl.store(dx + row.to(tl.int64) * V + cols, gradient, mask=cols < V)


class _TokenCrossEntropy(torch.autograd.Function):
    """The loss of each row of logits `[N, V]` whose rows are contiguous."""

    @staticmethod
    def forward(ctx, logits, labels):
        rows, ctx.shape = (
            logits.shape[0],
            {"V": logits.shape[1], "IGNORED": IGNORED, "BLOCK": BLOCK, "num_warps": WARPS},
        )
        loss, lse = (torch.empty(rows, device=logits.device, dtype=torch.float32) for _ in range(2))
        _token_loss[rows,](logits, labels, loss, lse, logits.stride(0), **ctx.shape)
        ctx.save_for_backward(logits, labels, lse)
        return loss

    @staticmethod
    def backward(ctx, g):
        logits, labels, lse = ctx.saved_tensors
        dx = torch.empty_like(logits, memory_format=torch.contiguous_format)
        grid = logits.shape[0], cdiv(logits.shape[1], ctx.shape["BLOCK"])
        _token_gradient[grid](logits, labels, lse, g.contiguous(), dx, logits.stride(0), **ctx.shape)
        return dx, None


def token_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """`relinear_kernels.token_cross_entropy` by the kernels of this module. Raises ValueError for shapes that
    do not fit together."""
    if logits.ndim != 2:
        raise ValueError(f"token_cross_entropy takes logits [N, V]; got {list(logits.shape)}")
    if labels.shape != logits.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(
            f"token_cross_entropy takes labels [N={logits.shape[0]}] of torch.int64; got {list(labels.shape)}"
            f" of {labels.dtype}"
        )
    return _TokenCrossEntropy.apply(
        logits if logits.stride(1) == 1 else logits.contiguous(), labels.contiguous()
    )
