"""Feature maps phi of linear attention, by the name every op takes as ``feature=``.

A map sends a head vector x in R^D through a learned matrix W (``[H, D, F]``, one per query head; for keys
also ``[Hkv, D, F]``, one per key head) and an activation. The ``_pm`` maps concatenate the activation of +xW
and -xW and therefore have 2F features (Hedgehog Eq. 6 and Appendix A.1).
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

LOG2E = math.log2(math.e)
FLOOR = 1e-12  # the smallest feature of softmax_pm, so that no key vanishes from the normaliser


def check_map(w: Tensor | None, b: Tensor | None, heads: int, groups: int, dim: int) -> None:
    """Raises ValueError unless matrix and bias are of every query head (`heads`) or of every head of x
    (`groups`)."""
    if w is not None and (w.shape[0] not in (heads, groups) or w.shape[1] != dim):
        shared = "" if groups == heads else f" or [Hkv={groups}, D={dim}, F]"
        raise ValueError(f"feature matrix must be [H={heads}, D={dim}, F]{shared}; got {list(w.shape)}")
    if b is not None and b.shape[0] != (heads if w is None else w.shape[0]):
        raise ValueError(
            f"a bias has as many heads as its matrix: {heads if w is None else w.shape[0]}; got {b.shape[0]}"
        )


def project(
    x: Float[Tensor, "B T N D"], w: Float[Tensor, "M D F"] | None, b: Float[Tensor, "M F"] | None, heads: int
) -> Float[Tensor, "B H T F"]:
    """x W + b for every query head, head-major. The keys of a group (N < H) meet each of the group's matrices
    (M = H), or its one (M = N)."""
    batch, length, groups, dim = x.shape
    if heads % groups:
        raise ValueError(
            f"query heads must be a multiple of key heads; got {heads} query heads and {groups} key heads"
        )
    x = x.transpose(1, 2).unsqueeze(2)  # [B, N, 1, T, D]
    check_map(w, b, heads, groups, dim)
    if w is not None:
        x = x @ w.view(groups, -1, dim, w.shape[2]).to(x.dtype)
    if b is not None:
        x = x + b.view(groups, -1, 1, b.shape[1]).to(x.dtype)
    return x.expand(batch, groups, heads // groups, length, -1).reshape(batch, heads, length, -1)


def exp(x: Tensor) -> Tensor:
    """e^x, computed by `exp2`.

    On CPUs `torch.exp` is 20 to 100 times slower where the result is zero or denormal, and those of masked
    entries are.
    """
    return (x * LOG2E).exp2()


def _softmax_pm(x: Tensor) -> Tensor:
    return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1).clamp(min=FLOOR)


# Activations whose values cannot overflow. Before an exponential one each op subtracts the maximum of the
# logits in its own way.
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
    """Return the name of a feature map. Raises ValueError, naming the possible ones, for any other."""
    if feature not in FEATURES:
        raise ValueError(f"no feature map {feature!r}; have {', '.join(FEATURES)}")
    return feature
