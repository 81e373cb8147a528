"""Rotary position embedding: its definition, which is also its torch form."""

import torch
from jaxtyping import Float
from torch import Tensor


def rotary(
    q: Float[Tensor, "B T H D"],
    k: Float[Tensor, "B T Hkv D"],
    cos: Float[Tensor, "B T D"],
    sin: Float[Tensor, "B T D"],
) -> tuple[Float[Tensor, "B T H D"], Float[Tensor, "B T Hkv D"]]:
    """q and k turned by the angles of their positions, in the half-split layout of Llama (Su et al. 2021)."""
    return _turned(q, cos, sin), _turned(k, cos, sin)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin
