"""The public `linear_cross_entropy`: logits a piece at a time on CUDA, the definition elsewhere."""

from jaxtyping import Float, Int64
from torch import Tensor

from relinear_kernels import linear_cross_entropy_reference as reference
from relinear_kernels.dispatch import takes, use_triton, wrong_dtypes


def linear_cross_entropy(
    x: Float[Tensor, "N D"], weight: Float[Tensor, "V D"], labels: Int64[Tensor, " N"]
) -> Float[Tensor, ""]:
    """The summed loss of all tokens in nats, `token_cross_entropy` of the logits x weight^T, in float32; a
    label of -100 is ignored.

    Products have the dtype of x, to which the weight is cast; gradients have each argument's own. The kernels
    make `PIECE` rows of logits at a time and their gradients at once, in the same memory, so that no more
    logits than that exist (after Liger Kernel, Hsu et al. 2024). Where they do not take the dtype, the
    definition runs and a warning says why; with RELINEAR_KERNELS=triton that is a ValueError.
    """
    if use_triton(x) and takes("linear_cross_entropy", wrong_dtypes(x=x)):
        from relinear_kernels.linear_cross_entropy_triton import linear_cross_entropy as fused

        return fused(x, weight, labels)
    return reference.linear_cross_entropy(x, weight, labels)
