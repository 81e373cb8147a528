"""The public `scaled_sum`: a Triton kernel on CUDA, the definition elsewhere."""

import torch
from jaxtyping import Float
from torch import Tensor

from relinear_kernels import scaled_sum_reference as reference
from relinear_kernels.dispatch import takes, use_triton, wrong_dtypes


def scaled_sum(
    x: Float[Tensor, "B T H D"], y: Float[Tensor, "B T H D"], scale: Float[Tensor, " H"]
) -> Float[Tensor, "B T H D"]:
    """x + scale y with a scale of each head (Lizard's y_gate + alpha y_swa, its Section 3.1), in y's dtype.

    Added in float32. One launch forward and one backward, which read each tensor once; torch's take float32
    copies on the way. Where the kernel does not take a dtype, the definition runs and a warning says why;
    with RELINEAR_KERNELS=triton that is a ValueError.
    """
    # torch.compile makes the definition a part of the kernel before or after it.
    if (
        not torch.compiler.is_compiling()
        and use_triton(x)
        and takes("scaled_sum", wrong_dtypes(x=x, y=y, scale=scale))
    ):
        from relinear_kernels.scaled_sum_triton import scaled_sum as fused

        return fused(x, y, scale)
    return reference.scaled_sum(x, y, scale)
