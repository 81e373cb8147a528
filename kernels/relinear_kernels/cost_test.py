"""The cost of every torch form is linear in the length, forward and backward. It is counted in numbers
written, so that no clock is needed."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from relinear_kernels.gated_delta import gated_delta
from relinear_kernels.gated_linear_attention import gated_linear_attention
from relinear_kernels.hybrid_attention import hybrid_attention
from relinear_kernels.linear_attention import linear_attention
from relinear_kernels.rotary import rotary
from relinear_kernels.scaled_sum import scaled_sum
from relinear_kernels.sliding_window_attention import sliding_window_attention
from relinear_kernels.testing import Written
from relinear_kernels.token_cross_entropy import token_cross_entropy

B, H, G, D = 1, 2, 1, 8
MOST = 2.1  # times the numbers for twice the length


def given(length: int, gate: str | None = None) -> dict:
    """q, k, v and a gate."""
    args = {
        "q": torch.randn(B, length, H, D),
        "k": torch.randn(B, length, G, D),
        "v": torch.randn(B, length, G, D),
    }
    if gate is not None:
        args[gate] = -torch.rand(B, length, H, *((D,) if gate == "log_gate" else ()))
    return args


maps = {n: torch.randn(H, D, D) for n in ("w_q", "w_k")}


def delta(length: int, channel: bool = False) -> dict:
    """Arguments of the delta rule, with a decay and an erase."""
    args = given(length)
    args["k"] = torch.nn.functional.normalize(args["k"], dim=-1)
    args["write"] = torch.rand(B, length, G)
    args["erase"] = torch.rand(B, length, G)
    return args | {"log_decay": -torch.rand(B, length, G, *((D,) if channel else ()))}


angles = lambda length: {n: torch.randn(1, length, D) for n in ("cos", "sin")}  # noqa: E731
hybrid = {"window": 16, "window_factor": torch.ones(H)}
FORMS = {
    "linear": lambda n: (linear_attention, given(n), maps),
    "linear, decay": lambda n: (linear_attention, given(n, "log_decay"), maps),
    "linear, exponential": lambda n: (linear_attention, given(n), {**maps, "feature": "exp_pm"}),
    "linear, not causal": lambda n: (linear_attention, given(n), {**maps, "causal": False}),
    "linear, with a state": lambda n: (linear_attention, given(n), {**maps, "return_state": True}),
    "gated": lambda n: (gated_linear_attention, given(n, "log_gate"), maps),
    "delta, a decay a state": lambda n: (gated_delta, delta(n), {"return_state": True}),
    "delta, a decay a channel": lambda n: (gated_delta, delta(n, True), {}),
    "window": lambda n: (sliding_window_attention, given(n), {"window": 16}),
    "window, meta": lambda n: (sliding_window_attention, given(n), {"window": 16, "meta": 4}),
    "hybrid": lambda n: (hybrid_attention, given(n), maps | hybrid),
    "rotary": lambda n: (rotary, {x: given(n)[x] for x in "qk"}, angles(n)),
    "scaled sum": lambda n: (
        scaled_sum,
        {"x": torch.randn(B, n, H, D), "y": torch.randn(B, n, H, D)},
        {"scale": torch.ones(H)},
    ),
    "token cross-entropy": lambda n: (
        token_cross_entropy,
        {"logits": torch.randn(n, 32)},
        {"labels": torch.zeros(n, dtype=torch.long)},
    ),
}


def written(form: str, length: int) -> tuple[int, int]:
    """The numbers that a form writes forward and backward."""
    op, args, rest = FORMS[form](length)
    args = {n: x.requires_grad_() for n, x in args.items()}
    with Written() as forward:
        out = [x for x in tree_leaves(op(**args, **rest)) if isinstance(x, torch.Tensor) and x.requires_grad]
    with Written() as backward:
        torch.autograd.grad(sum(x.sum() for x in out), list(args.values()))
    return forward.numbers, backward.numbers


@pytest.mark.parametrize("form", FORMS)
def test_twice_the_length_is_twice_the_work(form, monkeypatch):
    monkeypatch.setenv("RELINEAR_KERNELS", "torch")
    for once, twice in zip(written(form, 4096), written(form, 8192), strict=True):
        assert 1.8 < twice / once < MOST


def test_a_loop_that_indexes_a_stacked_tensor_is_seen():
    """The form that this law was made for: the backward of each index writes zeros of the whole."""

    def numbers(count):
        x = torch.randn(count, 64, requires_grad=True)
        total = sum(x[i] * i for i in range(count))
        with Written() as backward:
            total.sum().backward()
        return backward.numbers

    assert numbers(128) / numbers(64) > 3
