"""The fused ops inside torch.compile: an op that Dynamo does not look into takes the place of each autograd
function, forward and backward.

    eager        q, k, v -> Function.forward -> o                  ctx keeps what backward reads
    compiled     q, k, v -> relinear::forward -> o, kept ...       relinear::backward takes kept as tensors,
                                                                   and finds the launches by their sizes

What an op keeps is known to the compiler, which may then order, reuse and free memory around it. The sizes of
what is kept are those of one run of the function on zeros, at the time of compilation.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

FUNCTIONS: dict[str, type[torch.autograd.Function]] = {}


class _Context:
    """What a function's forward and backward ask of autograd's own context."""

    def __init__(self, needs: Sequence[bool]):
        self.needs_input_grad, self.saved_tensors = needs, ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Nothing: gradients that are not there are None."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Nothing: gradients of these are not read."""


class _Known(NamedTuple):
    """What a forward pass tells the backward pass beside tensors: the same for the same call on tensors of
    the same sizes."""

    places: list[tuple[str, int] | None]  # of each saved tensor: an input, a result, or none
    attributes: dict[str, Any]  # of the context


_known: dict[tuple, _Known] = {}
_sizes: dict[tuple, list[tuple]] = {}


def traceable(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Make an autograd function known to `apply`. What its forward sets on the context may depend on sizes
    only, saved tensors apart."""
    FUNCTIONS[function.__name__] = function
    return function


def apply(function: str, *args, keep: int | None = None, outputs: Sequence[bool] = (True,)):
    """`apply` of the `traceable` function of this name; while torch.compile traces, the op that computes the
    same.

    `args` are tensors, numbers, strings and None. `outputs` says which of the function's outputs are there.
    `keep` is the place of the argument that asks for all but the first: the compiler then computes these
    apart, and only where they are used.
    """
    if not torch.compiler.is_compiling():
        return FUNCTIONS[function].apply(*args)
    if len(outputs) == 1:
        return _call(function, args)[0]
    first = _call(function, (*args[:keep], False, *args[keep + 1 :]))[0]
    if not any(outputs[1:]):
        return first, *(None for _ in outputs[1:])
    rest = iter(_call(function, args)[1:])
    return first, *(next(rest) if there else None for there in outputs[1:])


def _call(function: str, args: Sequence) -> list[Tensor]:
    words, tensors = function, []
    for x in args:
        if isinstance(x, Tensor):
            words = words + ("|grad" if torch.is_grad_enabled() and x.requires_grad else "|fixed")
            tensors.append(x)
        elif x is None:
            words = words + "|none"
        elif isinstance(x, bool):
            words = words + ("|true" if x else "|false")
        elif isinstance(x, int):
            words = words + ("|int " + str(x))
        elif isinstance(x, float):
            words = words + ("|float " + str(x))
        else:
            words = words + ("|str " + x)
    return torch.ops.relinear.forward(tensors, words)


def _arguments(
    tensors: Sequence[Tensor], words: str
) -> tuple[type[torch.autograd.Function], list, list[bool]]:
    """The function, its arguments, and which of them need a gradient."""
    name, *words = words.split("|")
    given = iter(tensors)
    args = []
    for word in words:
        kind, _, value = word.partition(" ")
        args.append(next(given) if kind in TENSORS else READ[kind](value))
    return FUNCTIONS[name], args, [word == "grad" for word in words]


# Words of tensors, and of what else an argument is -> how its value is read.
TENSORS = ("grad", "fixed")
READ = {
    "none": lambda _: None,
    "true": lambda _: True,
    "false": lambda _: False,
    "int": int,
    "float": float,
    "str": str,
}


def _key(tensors: Sequence[Tensor], words: str) -> tuple:
    return words, *((tuple(x.shape), x.dtype, x.device) for x in tensors)


def _run(tensors: Sequence[Tensor], words: str) -> list[Tensor]:
    function, args, needs = _arguments(tensors, words)
    ctx = _Context(needs)
    with torch.no_grad():
        outputs = function.forward(ctx, *args)
    results = [x for x in (outputs if isinstance(outputs, tuple) else (outputs,)) if x is not None]
    places: list[tuple[str, int] | None] = []
    for x in ctx.saved_tensors if any(needs) else ():
        if x is None:
            places.append(None)
            continue
        at = next((("input", i) for i, y in enumerate(tensors) if y is x), None)
        if at is None and not any(y is x for y in results):
            results.append(x)
        places.append(at or ("result", next(i for i, y in enumerate(results) if y is x)))
    results = _apart(results, tensors)
    attributes = {
        name: value for name, value in vars(ctx).items() if name not in ("needs_input_grad", "saved_tensors")
    }
    _known[_key(tensors, words)] = _Known(places, attributes)
    return results


def _apart(results: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """The results, those copied that share memory with one before them or with what was given, which an op's
    must not."""
    seen = {x.untyped_storage().data_ptr() for x in given}
    out = []
    for x in results:
        out.append(x.clone() if x.untyped_storage().data_ptr() in seen else x)
        seen.add(out[-1].untyped_storage().data_ptr())
    return out


@torch.library.custom_op("relinear::forward", mutates_args=())
def forward(tensors: Sequence[Tensor], words: str) -> list[Tensor]:
    """The outputs of a function, and after them what its backward pass needs beside the inputs."""
    return _run(tensors, words)


@forward.register_fake
def _(tensors: Sequence[Tensor], words: str) -> list[Tensor]:
    key = _key(tensors, words)
    if key not in _sizes:
        with _disable_current_modes():
            zeros = [torch.zeros(*x.shape, dtype=x.dtype, device=x.device) for x in tensors]
            _sizes[key] = [(tuple(x.shape), x.stride(), x.dtype, x.device) for x in _run(zeros, words)]
    return [
        torch.empty_strided(shape, stride, dtype=dtype, device=device)
        for shape, stride, dtype, device in _sizes[key]
    ]


@torch.library.custom_op("relinear::backward", mutates_args=())
def backward(
    gradients: Sequence[Tensor], given: str, tensors: Sequence[Tensor], results: Sequence[Tensor], words: str
) -> list[Tensor]:
    """The gradients of the inputs that need one. `given` has a 1 for each output whose gradient is among
    `gradients`, 0 for the others."""
    function, args, needs = _arguments(tensors, words)
    known = _known[_key(tensors, words)]
    ctx = _Context(needs)
    vars(ctx).update(known.attributes)
    ctx.saved_tensors = tuple(
        place and (tensors if place[0] == "input" else results)[place[1]] for place in known.places
    )
    found = iter(gradients)
    with torch.no_grad():
        back = function.backward(ctx, *(next(found) if there == "1" else None for there in given))
    wanted = [x for x, needed in zip(back, needs, strict=True) if needed]
    wanted = [x.to(like.dtype).contiguous() for x, like in zip(wanted, _trained(tensors, words), strict=True)]
    return _apart(wanted, (*gradients, *tensors, *results))


@backward.register_fake
def _(
    gradients: Sequence[Tensor], given: str, tensors: Sequence[Tensor], results: Sequence[Tensor], words: str
) -> list[Tensor]:
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in _trained(tensors, words)]


def _trained(tensors: Sequence[Tensor], words: str) -> list[Tensor]:
    """The tensors that need a gradient."""
    return [x for x, needed in zip(tensors, _needs(words), strict=True) if needed]


def _needs(words: str) -> list[bool]:
    """Whether each tensor needs a gradient."""
    return [word == "grad" for word in words.split("|")[1:] if word in TENSORS]


def _save(ctx, inputs, output) -> None:
    tensors, ctx.words = inputs
    ctx.count = len(tensors)
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _gradients(ctx, grads):
    tensors, results = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
    outputs = FUNCTIONS[ctx.words.partition("|")[0]].backward.__code__.co_argcount - 1
    own = list(grads[:outputs]) + [None] * (outputs - len(grads))
    given = "".join("0" if x is None else "1" for x in own)
    wanted = iter(
        torch.ops.relinear.backward(
            [x for x in own if x is not None], given, list(tensors), list(results), ctx.words
        )
    )
    return [next(wanted) if needed else None for needed in _needs(ctx.words)], None


forward.register_autograd(_gradients, setup_context=_save)
