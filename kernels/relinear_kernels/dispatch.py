"""The choice of an implementation: Triton for CUDA tensors, the chunked torch form elsewhere; `RELINEAR_KERNELS` forces one."""

import os

import torch
from torch import Tensor

PATHS = ("auto", "torch", "triton", "reference")


def path() -> str:
    """The value of RELINEAR_KERNELS. Raises ValueError naming the possible ones."""
    got = os.environ.get("RELINEAR_KERNELS") or "auto"
    if got not in PATHS:
        raise ValueError(f"RELINEAR_KERNELS must be one of {', '.join(PATHS)}; got {got!r}")
    return got


def use_triton(x: Tensor) -> bool:
    """Whether an op on `x` runs its Triton kernels. Raises RuntimeError where they are forced and cannot run."""
    choice = path()
    if choice == "auto":
        return x.is_cuda
    if choice == "triton" and not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(f"RELINEAR_KERNELS=triton needs CUDA tensors, or TRITON_INTERPRET=1; got a tensor on {x.device}")
    return choice == "triton"


def one_token(state, return_state: bool, cu_seqlens: Tensor | None, *tensors: Tensor | None) -> bool:
    """Whether a piece (its queries first) is one token after others without gradients, so that a decode step can serve it."""
    if state is None or not return_state or cu_seqlens is not None or tensors[0].shape[1] != 1:
        return False
    return not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*tensors, *_leaves(state))))


def stateless(op: str, **given) -> None:
    """Raises ValueError where the quadratic definition is given arguments that only the other forms take."""
    if wrong := [n for n, x in given.items() if x is not None and x is not False]:
        raise ValueError(f"RELINEAR_KERNELS=reference: the definition of {op} takes no {', '.join(wrong)}; have auto, torch and triton")


def per_sequence(op, cu_seqlens: Tensor, tokens: dict, fixed: dict, initial_state):
    """`op` on each sequence of a packed row in turn; per-token arguments are cut, states are gathered along the batch."""
    bounds = cu_seqlens.tolist()
    outputs = []
    for n, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False)):
        state = None if initial_state is None else _map(lambda x, n=n: x[n : n + 1], initial_state)
        outputs.append(op(**{name: x if x is None else x[:, a:b] for name, x in tokens.items()}, initial_state=state, **fixed))
    if not fixed.get("return_state"):
        return torch.cat(outputs, 1)
    return torch.cat([y for y, _ in outputs], 1), _join([s for _, s in outputs])


def _leaves(state):
    return [state] if isinstance(state, Tensor) else [x for part in state for x in _leaves(part)]


def _map(f, state):
    return f(state) if isinstance(state, Tensor) else type(state)(*(_map(f, x) for x in state))


def _join(states):
    if isinstance(states[0], Tensor):
        return torch.cat(states)
    return type(states[0])(*(_join(parts) for parts in zip(*states, strict=True)))
