"""The sum of two attentions' outputs, one of them scaled: its definition, which is also its torch form."""

import torch
from jaxtyping import Float
from torch import Tensor


def scaled_sum(
    x: Float[Tensor, "B T H D"], y: Float[Tensor, "B T H D"], scale: Float[Tensor, " H"]
) -> Float[Tensor, "B T H D"]:
    """x + scale y, added in at least float32, in y's dtype."""
    wide = scale if scale.dtype == torch.float64 else scale.float()
    return (x + wide[:, None] * y).to(y.dtype)
