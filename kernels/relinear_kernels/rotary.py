"""The public `rotary`: a Triton kernel on CUDA, the definition elsewhere."""

import torch
from jaxtyping import Float
from torch import Tensor

from relinear_kernels import rotary_reference as reference
from relinear_kernels.dispatch import takes, use_triton, wrong_dtypes


def rotary(
    q: Float[Tensor, "B T H D"],
    k: Float[Tensor, "B T Hkv D"],
    cos: Float[Tensor, "B T D"],
    sin: Float[Tensor, "B T D"],
) -> tuple[Float[Tensor, "B T H D"], Float[Tensor, "B T Hkv D"]]:
    """q and k turned by the angles of their positions, in the half-split layout of Llama (Su et al. 2021).

    `cos` and `sin` may have a batch of 1 (positions that all sequences share); they get no gradient. One
    launch forward and one backward, where torch needs ten and fourteen; in bfloat16 the result is rounded
    once and not three times. Returns the dtypes of q and k. Where the kernel does not take a dtype, the
    definition runs and a warning says why; with RELINEAR_KERNELS=triton that is a ValueError.
    """
    # torch.compile makes the definition a part of the kernel before or after it.
    if (
        not torch.compiler.is_compiling()
        and use_triton(q)
        and takes("rotary", wrong_dtypes(q=q, k=k, cos=cos, sin=sin))
    ):
        from relinear_kernels.rotary_triton import rotary as fused

        return fused(q, k, cos, sin)
    turned = reference.rotary(q, k, cos, sin)
    return turned[0].to(q.dtype), turned[1].to(k.dtype)
