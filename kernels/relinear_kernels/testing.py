"""The parts that kernel tests share: the device, the comparison of a fused op with its float64 definition,
and tolerances."""

import dataclasses
import functools
import os
import sys

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from relinear_kernels.sliding_window_attention_reference import WindowState, in_order

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # before triton is imported: kernels are then functions of CPU tensors
    os.environ["TRITON_INTERPRET"] = "1"
# bfloat16 is broken in the interpreter
DTYPES = (torch.bfloat16, torch.float32) if DEVICE == "cuda" else (torch.float32,)


# Gradients that are sums of cancelling terms (exactly zero for one visible key): in bfloat16 the rounding of
# O in dO . O, which FlashAttention shares, is a few per cent of what is left. float32 holds them to the same
# 5e-5 as the rest.
CANCELLING = {"log_decay": 0.15, "log_gate": 0.05, "gamma": 0.6, "b_q": 0.012, "b_k": 0.012}
# One decay a head sums the gradients of all its positions, which cancel once more. Its error is held relative
# to the sum of their sizes, where one left out is off by 0.06 to 0.7: 0.01 to 0.12 was seen over 300
# positions with bfloat16's rounding emulated on a CPU. It is also held to be the sum of the op's own
# gradients of one decay a position.
SUMMED = 0.2


def tolerance(dtype: torch.dtype, gradient: str = "") -> float:
    """Relative RMS error against float64 of an output or of the gradient named."""
    if dtype == torch.float32:
        return 5e-5 if gradient else 1e-5
    return CANCELLING.get(gradient, 1e-2) if gradient else 4e-3


def relative(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want|, in float64; NaN and infinity make it NaN or infinite."""
    got, want = got.double().cpu(), want.double().cpu()
    return ((got - want).norm() / want.norm().clamp(min=1e-12)).item()


class Written(TorchDispatchMode):
    """Counts operators, and the numbers of all tensors that they return, views apart: these write
    nothing."""

    def __init__(self):
        super().__init__()
        self.numbers = self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        self.operators += 1
        if not func.is_view:
            self.numbers += sum(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))
        return out


def laid_out(state):
    """A state with its rings in order and without their free places: where a ring begins does not matter."""
    if isinstance(state, WindowState):
        meta, (k, v, mask) = state.meta_age.shape[1], in_order(state)
        k, v = (torch.cat([x[:, :meta], ring], 1) for x, ring in ((state.k, k), (state.v, v)))
        return state._replace(k=k, v=v, mask=mask, first=torch.zeros_like(state.first))
    if isinstance(state, Tensor):
        return state
    parts = map(laid_out, state)
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


def fill_empty_with_nan(monkeypatch) -> None:
    """Make torch.empty return NaN, so that memory that a kernel fails to write is seen."""
    for name in ("empty", "empty_like"):
        real = getattr(torch, name)
        poison = lambda *a, _real=real, **k: (  # noqa: E731
            x.fill_(torch.nan) if (x := _real(*a, **k)).is_floating_point() else x
        )
        monkeypatch.setattr(torch, name, poison)


def spare_the_interpreter(monkeypatch) -> None:
    """Leave out what Triton's interpreter does again and again to no effect, three fifths of a test's time.

    It replaces the functions of triton.language at each call of a device function, here at each launch alone.
    It adds, subtracts and multiplies integers once more, in 64 bits, and compares the outcome with the range
    of 32, for an assertion that it then makes in its debug mode alone. It makes its table of dtypes anew
    whenever it looks one up.
    """
    from triton import language
    from triton.runtime import interpreter

    real, languages, replaced = interpreter._patch_lang, (language, language.core), set()

    @functools.cache
    def named(module: str) -> set[int]:
        values = vars(sys.modules[module]).values()
        return {id(value) for value in values if any(value is one for one in languages)}

    def patch(fn):
        mine = named(fn.__module__)
        if mine <= replaced:
            return interpreter._LangPatchScope()  # nothing to restore
        scope = real(fn)
        replaced.update(mine)
        restore = scope.restore
        scope.restore = lambda: (restore(), replaced.clear())
        return scope

    monkeypatch.setattr(interpreter, "_patch_lang", patch)

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))

    look_up, known = interpreter._get_np_dtype, {}

    def dtype(of):
        if of.scalar.name not in known:
            known[of.scalar.name] = look_up(of)
        return known[of.scalar.name]

    monkeypatch.setattr(interpreter, "_get_np_dtype", dtype)


def of_key_heads(args: dict[str, Tensor], groups: int) -> dict[str, Tensor]:
    """Arguments of every query head, with those that a state owns cut to one of each key head."""
    heads = {"w_k": 0, "b_k": 0, "log_decay": -1, "log_gate": 2, "kv": 1, "z": 1}
    return {n: x.narrow(heads[n], 0, groups).contiguous() if n in heads else x for n, x in args.items()}


def check(
    op,
    definition,
    args: dict[str, Tensor],
    options: dict,
    dtype: torch.dtype,
    keep: tuple[str, ...] = (),
    loose=1.0,
    times=1.0,
) -> dict[str, tuple[float, float]]:
    """Outputs and every gradient of `op` in `dtype` against `definition` in float64 on the same (rounded)
    numbers.

    Both take (tensors, options) and return a dict of outputs; arguments named in `keep`, gates and states
    stay float32. `loose` multiplies the tolerance of bfloat16 gradients, `times` every one. In bfloat16 an
    error beyond it may be 1.5 times that of `definition` in bfloat16, and one log_decay a head is held to
    SUMMED. Returns the error and the tolerance of each output and gradient.
    """
    wide = {"log_decay", "kv", "z", *keep}
    args = {n: x.to(DEVICE) if n in wide else x.to(DEVICE, dtype) for n, x in args.items()}
    options = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in options.items()}

    def run(f, cast, args=args):
        x = {n: t.detach().to(cast) if cast else t.detach().clone() for n, t in args.items()}
        x = {n: t.requires_grad_() for n, t in x.items()}
        out = f(x, options)
        g = torch.Generator().manual_seed(1)
        loss = sum(
            (y.double() * torch.randn(y.shape, generator=g).double().to(DEVICE)).sum() for y in out.values()
        )
        return out, dict(zip(x, torch.autograd.grad(loss, x.values(), allow_unused=True), strict=True))

    want, want_grad = run(definition, torch.float64)
    sizes = None
    if dtype != torch.float32 and "log_decay" in args and args["log_decay"].dim() == 1:
        each = args["log_decay"].expand(*args["q"].shape[:2], -1)
        sizes = run(definition, torch.float64, args | {"log_decay": each})[1]["log_decay"].abs().sum((0, 1))

    def errors(got, got_grad) -> dict[str, tuple[float, float]]:
        """Error and tolerance of each output and gradient."""
        found = {}
        for n, w in want.items():
            if w.norm() < 1e-9:  # zero by definition: there is no relative error, only float32's rounding
                assert got[n].abs().max() < 1e-6, f"{n} should vanish"
            else:
                found[n] = relative(got[n], w), times * tolerance(dtype)
        for n, w in want_grad.items():
            g = got_grad[n]
            # a gradient that is zero by symmetry (one visible key) has rounding alone
            if w is None or w.norm() < 1e-9:
                small = 1e-3 if dtype == torch.float32 else 5.0
                assert g is None or g.abs().max() < small, f"gradient of {n} should vanish"
                continue
            if n == "log_decay" and sizes is not None:
                found[f"gradient of {n}"] = (((g - w).norm() / sizes.norm()).item(), SUMMED)
                continue
            found[f"gradient of {n}"] = (
                relative(g, w),
                times * tolerance(dtype, n) * (1.0 if dtype == torch.float32 else loose),
            )
        return found

    got = run(op, None)
    if sizes is not None:
        summed = run(op, None, args | {"log_decay": each})[1]["log_decay"].sum((0, 1))
        assert (got[1]["log_decay"] - summed).norm() <= 1e-4 * sizes.norm(), (
            "one decay a head is not the sum of its positions"
        )
    found = errors(*got)
    bad = {n: (e, t) for n, (e, t) in found.items() if not e <= t}
    # numbers that cancel to less than their rounding: the definition in bfloat16 is as far off
    if bad and dtype != torch.float32:
        rounded = errors(*run(definition, None))
        bad = {n: (e, t) for n, (e, t) in bad.items() if not e <= 1.5 * rounded[n][0]}
    assert not bad, {n: f"{e:.1e} > {t:.0e}" for n, (e, t) in bad.items()}
    return found
