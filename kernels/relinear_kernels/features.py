"""Feature maps phi of linear attention, by the name every op takes as ``feature=``.

A map sends a head vector x in R^D through a learned matrix W (``[H, D, F]``, one per query head) and an activation. The ``_pm`` maps
concatenate the activation of +xW and -xW and therefore have 2F features (Hedgehog Eq. 6 and Appendix A.1).
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

LOG2E = math.log2(math.e)
FLOOR = 1e-12  # the smallest feature of softmax_pm: a key can never be dropped from the normaliser altogether


def project(x: Float[Tensor, "B T N D"], w: Float[Tensor, "H D F"] | None, b: Float[Tensor, "H F"] | None, heads: int) -> Float[Tensor, "B H T F"]:
    """x W + b for every query head, head-major. The keys of a group (N < H) meet each of the group's matrices."""
    batch, length, groups, dim = x.shape
    if heads % groups:
        raise ValueError(f"query heads must be a multiple of key heads; got {heads} query heads and {groups} key heads")
    x = x.transpose(1, 2).unsqueeze(2)  # [B, N, 1, T, D]
    if w is None:
        out = x.expand(batch, groups, heads // groups, length, dim)
    else:
        if w.shape[0] != heads or w.shape[1] != dim:
            raise ValueError(f"feature matrix must be [H={heads}, D={dim}, F]; got {list(w.shape)}")
        out = x @ w.view(groups, heads // groups, dim, -1).to(x.dtype)
    out = out.reshape(batch, heads, length, -1)
    return out if b is None else out + b[:, None].to(out.dtype)


def exp(x: Tensor) -> Tensor:
    """e^x, as a power of two: of what is masked or faded, whose exponential is nothing or next to it, torch's own on a CPU takes 20 to 100
    times as long as of other numbers."""
    return (x * LOG2E).exp2()


def _softmax_pm(x: Tensor) -> Tensor:
    return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1).clamp(min=FLOOR)


# Activations whose values cannot overflow. The exponential ones are of logits whose maximum is taken off first, each op in its own way.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax_pm": _softmax_pm,
    "relu": torch.relu,
    "elu": lambda x: 1 + torch.nn.functional.elu(x),
    "none": lambda x: x,
}
EXPONENTIAL: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda x: x,
    "exp_pm": lambda x: torch.cat([x, -x], -1),
}
FEATURES = (*ACTIVATIONS, *EXPONENTIAL)


def check_feature(feature: str) -> str:
    """The name itself. Raises ValueError naming the possible ones."""
    if feature not in FEATURES:
        raise ValueError(f"no feature map {feature!r}; have {', '.join(FEATURES)}")
    return feature
