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
    token = q.shape[1] == 1 and q.dtype == k.dtype  # whose time is the number of operators
    if not token or cos.shape[0] > 1:
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    if token:
        both = _turned(torch.cat([q, k], 2), cos, sin)
        return tuple(both.split([q.shape[2], k.shape[2]], 2))
    return _turned(q, cos, sin), _turned(k, cos, sin)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin
