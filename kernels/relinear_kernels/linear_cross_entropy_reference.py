"""The definition of `linear_cross_entropy`: all logits, and the summed loss of each token."""

import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from relinear_kernels.token_cross_entropy_reference import token_cross_entropy


def linear_cross_entropy(
    x: Float[Tensor, "N D"], weight: Float[Tensor, "V D"], labels: Int64[Tensor, " N"]
) -> Float[Tensor, ""]:
    """The summed loss of all tokens in nats, in float32, of the logits x weight^T, which have the dtype of x;
    a label of -100 is ignored."""
    return token_cross_entropy(F.linear(x, weight.to(x.dtype)), labels).sum()
