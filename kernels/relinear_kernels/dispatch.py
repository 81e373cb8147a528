"""The choice of an implementation: Triton for CUDA tensors that its kernels take, the torch form elsewhere;
`RELINEAR_KERNELS` forces one.

What the kernels take is said here, so that it is known without Triton. Each function `wrong_..` returns None,
or what the kernels take and what was given; `takes` goes by that.
"""

import functools
import importlib.util
import os
import warnings

import torch
from torch import Tensor

PATHS = ("auto", "torch", "triton", "reference")
FEATURES = ("softmax_pm", "relu", "elu", "none")  # maps that every kernel of features makes
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS = (16, 32, 64, 128)  # of heads, and counts of features
LARGEST = 2**31 - 1  # kernels count the numbers of one sequence, and of its features, in 32 bits


def path() -> str:
    """The value of RELINEAR_KERNELS. Raises ValueError naming the possible ones."""
    got = os.environ.get("RELINEAR_KERNELS") or "auto"
    if got not in PATHS:
        raise ValueError(f"RELINEAR_KERNELS must be one of {', '.join(PATHS)}; got {got!r}")
    return got


def use_triton(x: Tensor) -> bool:
    """Whether an op on `x` runs its Triton kernels. Raises RuntimeError where they are forced and cannot
    run."""
    choice = path()
    if choice == "auto":
        return on_gpu(x)
    if choice == "triton" and not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            f"RELINEAR_KERNELS=triton needs CUDA tensors, or TRITON_INTERPRET=1; got a tensor on {x.device}"
        )
    return choice == "triton"


def on_gpu(x: Tensor) -> bool:
    """Whether a tensor lies where compiled kernels can read it."""
    return x.is_cuda


def takes(op: str, *wrong: str | None) -> bool:
    """Whether the kernels of `op` take its arguments: nothing is `wrong` with them.

    Where they do not, the torch form runs: a warning says so, once for the same arguments. Raises ValueError
    where the kernels are forced.
    """
    lacks = next((x for x in (WITHOUT_TRITON, *wrong) if x is not None), None)
    if lacks is None:
        return True
    if path() == "triton":
        raise ValueError(f"{op} on the Triton path takes {lacks} (RELINEAR_KERNELS=torch runs it)")
    _warn_once(f"{op} runs its torch form here, which is slower: its Triton kernels take {lacks}")
    return False


WITHOUT_TRITON = (
    None if importlib.util.find_spec("triton") else "the package triton; got an environment without it"
)


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=4)  # at the call of the op


def wrong_dtypes(taken: tuple[torch.dtype, ...] = DTYPES, **tensors: Tensor) -> str | None:
    """What is wrong with the tensors' dtypes. One that is `taken` must hold all of them exactly."""
    found = {n: x.dtype for n, x in tensors.items()}
    if (
        all(x in DTYPES for x in found.values())
        and functools.reduce(torch.promote_types, found.values()) in taken
    ):
        return None
    return f"the dtypes {', '.join(map(str, taken))}; got {', '.join(f'{n} {x}' for n, x in found.items())}"


def wrong_widths(features: int | None = None, **tensors: Tensor) -> str | None:
    """What is wrong with the last dimension of tensors `[B, T, H, D]`, with a count of features, or with the
    size of a sequence."""
    found = {f"width of {n}": x.shape[-1] for n, x in tensors.items()} | (
        {} if features is None else {"features": features}
    )
    if any(x not in WIDTHS for x in found.values()):
        return (
            f"head widths and feature counts of {WIDTHS}; got"
            f" {', '.join(f'{n} {x}' for n, x in found.items())}"
        )
    return wrong_sizes(features, **tensors)


def wrong_sizes(features: int | None = None, **tensors: Tensor) -> str | None:
    """What is wrong with the size of a sequence: beyond `LARGEST`, offsets in 32 bits would name other
    numbers.

    Both halves of features, phi(y) and phi(-y), lie in one row. Batches, and programs of a launch, are
    bounded by the memory long before.
    """
    longest, heads = (max(x.shape[i] for x in tensors.values()) for i in (1, 2))
    widest = max(*(x.shape[-1] for x in tensors.values()), 2 * (features or 0))
    if longest * heads * widest <= LARGEST:
        return None
    given = ", ".join(f"{n} {list(x.shape)}" for n, x in tensors.items())
    counted = "" if features is None else f" and {features} features"
    return f"sequences of at most {LARGEST // (heads * widest)} tokens at this size; got {given}{counted}"


def wrong_state(state) -> str | None:
    """What is wrong with a linear state (None: there is none)."""
    if state is None or state.kv.dtype == state.z.dtype == torch.float32:
        return None
    return f"a float32 state; got {state.kv.dtype}, {state.z.dtype}"


def wrong_features(q, k, v, w_q, w_k, feature: str, fused=FEATURES, taken=DTYPES) -> str | None:
    """What is wrong with the arguments of an op with feature maps: the map, its matrices, dtypes, widths."""
    if feature not in fused:
        return f"the features {', '.join(fused)}; got {feature!r}"
    if (w_q is None) != (w_k is None):
        return f"both feature matrices or neither; got {'w_k' if w_q is None else 'w_q'} alone"
    width = q.shape[-1] if w_q is None else w_q.shape[-1]
    return wrong_dtypes(taken, q=q, k=k, v=v) or wrong_widths(width, q=q, k=k, v=v)


def wrong_packing(cu_seqlens: Tensor | None, **given) -> str | None:
    """What is wrong with a packed row: arguments that the kernels take of other batches only."""
    with_it = [] if cu_seqlens is None else [n for n, x in given.items() if x is not None and x is not False]
    return f"cu_seqlens without {', '.join(given)}; got {', '.join(with_it)}" if with_it else None


def one_token(state, return_state: bool, cu_seqlens: Tensor | None, *tensors: Tensor | None) -> bool:
    """Whether a piece (its queries first) is one token after others without gradients, so that a decode step
    can serve it."""
    if state is None or not return_state or cu_seqlens is not None or tensors[0].shape[1] != 1:
        return False
    return not (
        torch.is_grad_enabled()
        and any(x is not None and x.requires_grad for x in (*tensors, *_leaves(state)))
    )


def steps_on_cpu(x: Tensor, step: bool) -> bool:
    """Whether a token takes torch's decode step, which reads numbers of the state: on a CPU, but not while a
    compiler traces."""
    return step and x.device.type == "cpu" and path() != "reference" and not torch.compiler.is_compiling()


def stateless(op: str, **given) -> None:
    """Raises ValueError where the quadratic definition is given arguments that only the other forms take."""
    if wrong := [n for n, x in given.items() if x is not None and x is not False]:
        raise ValueError(
            f"RELINEAR_KERNELS=reference: the definition of {op} takes no {', '.join(wrong)}; have auto,"
            " torch and triton"
        )


def check_packed(cu_seqlens: Tensor, batch: int, length: int) -> None:
    """Raises ValueError unless `cu_seqlens` cuts one packed row of `length` positions into sequences."""
    if batch != 1:
        raise ValueError(f"cu_seqlens packs the sequences into one row; got a batch of {batch}")
    if (
        cu_seqlens.ndim != 1
        or cu_seqlens[0] != 0
        or cu_seqlens[-1] != length
        or (cu_seqlens.diff() < 0).any()
    ):
        raise ValueError(f"cu_seqlens must rise from 0 to {length}; got {cu_seqlens.tolist()}")


def per_sequence(op, cu_seqlens: Tensor, tokens: dict, fixed: dict, initial_state):
    """`op` on each sequence of a packed row in turn; per-token arguments are cut, states are gathered along
    the batch."""
    check_packed(cu_seqlens, *tokens["q"].shape[:2])
    bounds = cu_seqlens.tolist()
    outputs = []
    for n, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False)):
        state = None if initial_state is None else _map(lambda x, n=n: x[n : n + 1], initial_state)
        outputs.append(
            op(
                **{name: x if x is None else x[:, a:b] for name, x in tokens.items()},
                initial_state=state,
                **fixed,
            )
        )
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
