"""The cross-entropy of a vocabulary from the inputs of its layer: a piece of the logits at a time, gradients
in their place.

    for each piece of PIECE rows:   logits = x W^T  ->  loss  ->  logits := softmax - one-hot  ->  dx = logits
    W,  dW += logits^T x

Gradients are those of the summed loss. A backward pass scales them, and nothing is computed twice.
"""

import torch
from torch import Tensor

from relinear_kernels.token_cross_entropy_reference import IGNORED
from relinear_kernels.token_cross_entropy_triton import BLOCK, WARPS, _token_gradient, _token_loss
from relinear_kernels.triton_common import cdiv

PIECE = 4096  # rows of logits at a time: enough that a product fills a GPU


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, labels):
        rows, vocabulary = len(x), len(weight)
        w, shape = (
            weight.to(x.dtype),
            {"V": vocabulary, "IGNORED": IGNORED, "BLOCK": BLOCK, "num_warps": WARPS},
        )
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dw = (
            torch.zeros(weight.shape, device=x.device, dtype=torch.float32)
            if ctx.needs_input_grad[1]
            else None
        )
        loss, lse = (torch.empty(rows, device=x.device, dtype=torch.float32) for _ in range(2))
        one = torch.ones(min(PIECE, rows), device=x.device, dtype=torch.float32)
        for at in range(0, rows, PIECE):
            piece = slice(at, at + PIECE)
            logits = x[piece] @ w.t()
            given = logits, labels[piece]
            _token_loss[len(logits),](*given, loss[piece], lse[piece], logits.stride(0), **shape)
            if dx is None and dw is None:
                continue
            _token_gradient[len(logits), cdiv(vocabulary, BLOCK)](
                *given, lse[piece], one, logits, logits.stride(0), **shape
            )
            if dx is not None:
                torch.mm(logits, w, out=dx[piece])
            if dw is not None:
                dw += logits.t() @ x[piece]
        ctx.save_for_backward(dx, dw)
        ctx.dtype = weight.dtype
        return loss.sum()

    @staticmethod
    def backward(ctx, g):
        dx, dw = ctx.saved_tensors
        return (
            None if dx is None else dx * g.to(dx.dtype),
            None if dw is None else (dw * g).to(ctx.dtype),
            None,
        )


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """`relinear_kernels.linear_cross_entropy` by the kernels of this package. Raises ValueError for shapes
    that do not fit together."""
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"linear_cross_entropy takes x [N, D] and a weight [V, D]; got {list(x.shape)} and"
            f" {list(weight.shape)}"
        )
    if labels.shape != x.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(
            f"linear_cross_entropy takes labels [N={len(x)}] of torch.int64; got {list(labels.shape)} of"
            f" {labels.dtype}"
        )
    return _LinearCrossEntropy.apply(x.contiguous(), weight, labels.contiguous())
