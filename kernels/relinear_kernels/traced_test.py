"""Each fused op as torch.compile sees it: one graph without a break, and the numbers and gradients of the op
called as it is."""

import pytest
import torch

from relinear_kernels import testing
from relinear_kernels.attention_cross_entropy import attention_cross_entropy
from relinear_kernels.gated_delta import gated_delta
from relinear_kernels.gated_linear_attention import gated_linear_attention
from relinear_kernels.hybrid_attention import hybrid_attention
from relinear_kernels.linear_attention import linear_attention
from relinear_kernels.rotary import rotary
from relinear_kernels.scaled_sum import scaled_sum
from relinear_kernels.sliding_window_attention import sliding_window_attention

pytest.importorskip("triton")
B, T, H, G, D = 1, 70, 2, 1, 16


def given(seed=0, **shapes):
    torch.manual_seed(seed)
    return {
        name: torch.randn(*shape, device=testing.DEVICE).mul_(0.5).requires_grad_()
        for name, shape in shapes.items()
    }


QKV = {"q": (B, T, H, D), "k": (B, T, G, D), "v": (B, T, G, D)}
MAPS = {"w_q": (H, D, D), "w_k": (H, D, D)}
CASES = {
    "linear": (lambda x: linear_attention(**x), QKV | MAPS),
    "linear, plain features, decays": (
        lambda x: linear_attention(
            x["q"], x["k"], x["v"], feature="none", normalize=False, log_decay=-x["gate"].exp()
        ),
        {"q": (B, T, H, D), "k": (B, T, H, D), "v": (B, T, H, D), "gate": (B, T, H)},
    ),
    "linear, exponential": (lambda x: linear_attention(**x, feature="exp_pm"), QKV | MAPS),
    "gate a channel": (
        lambda x: gated_linear_attention(
            x["q"], x["k"], x["v"], x["w_q"], x["w_k"], log_gate=-x["gate"].exp()
        ),
        QKV | MAPS | {"gate": (B, T, H, D)},
    ),
    "delta rule": (
        lambda x: gated_delta(
            x["q"], x["k"], x["v"], log_decay=-x["gate"].exp(), erase=x["beta"].sigmoid(), scale=0.1
        ),
        QKV | {"gate": (B, T, G), "beta": (B, T, G)},
    ),
    "window": (lambda x: sliding_window_attention(**x, window=8, meta=2), QKV),
    "hybrid": (
        lambda x: hybrid_attention(
            x["q"], x["k"], x["v"], x["w_q"], x["w_k"], window=8, window_factor=x["g"].sigmoid()
        ),
        QKV | MAPS | {"g": (H,)},
    ),
    "cross-entropy": (
        lambda x: attention_cross_entropy(x["q"].detach(), x["k"].detach(), x["a"], x["b"], True, scale=0.25),
        {"q": (B, T, H, D), "k": (B, T, G, D), "a": (B, T, H, D), "b": (B, T, H, D)},
    ),
    "rotary and sum": (
        lambda x: scaled_sum(*rotary(x["q"], x["k"], x["cos"].detach(), x["sin"].detach()), x["g"]),
        {"q": (B, T, H, D), "k": (B, T, H, D), "cos": (1, T, D), "sin": (1, T, D), "g": (H,)},
    ),
}


def run(function, tensors):
    out = function(tensors)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    return out, torch.autograd.grad((out * weights).sum(), list(tensors.values()), allow_unused=True)


@pytest.mark.parametrize("case", CASES)
def test_a_compiled_op_equals_the_op_in_one_graph(case, monkeypatch):
    monkeypatch.setenv("RELINEAR_KERNELS", "triton")
    function, shapes = CASES[case]
    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager", dynamic=False, fullgraph=True)
    out, gradients = run(compiled, given(**shapes))
    want, wanted = run(function, given(**shapes))
    assert testing.relative(out, want) < 1e-6
    for got, expected in zip(gradients, wanted, strict=True):
        assert (got is None) == (expected is None)
        assert got is None or testing.relative(got, expected) < 2e-6


@pytest.mark.parametrize("trained", [("w_q", "w_k"), ("v",), ("q", "k", "g")])
def test_only_the_gradients_that_are_asked_for_are_made(trained, monkeypatch):
    monkeypatch.setenv("RELINEAR_KERNELS", "triton")
    function, shapes = CASES["hybrid"]
    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager", dynamic=False, fullgraph=True)
    gradients = []
    for f in (compiled, function):
        tensors = given(**shapes)
        for name, x in tensors.items():
            x.requires_grad_(name in trained)
        f(tensors).sum().backward()
        gradients.append({name: x.grad for name, x in tensors.items()})
    assert {name for name, x in gradients[0].items() if x is not None} == set(trained)
    for name in trained:
        assert testing.relative(gradients[0][name], gradients[1][name]) < 2e-6


def test_a_state_that_is_asked_for_has_its_gradient(monkeypatch):
    """The state comes from an op of its own, which the compiler drops where nothing reads it."""
    monkeypatch.setenv("RELINEAR_KERNELS", "triton")

    def function(x):
        out, state = linear_attention(**x, return_state=True)
        return torch.cat([out.flatten(), state.kv.flatten(), state.z.flatten()])

    torch.compiler.reset()
    got, want = (
        run(f, given(**QKV, **MAPS))
        for f in (torch.compile(function, backend="aot_eager", dynamic=False, fullgraph=True), function)
    )
    assert testing.relative(got[0], want[0]) < 1e-6
    for a, b in zip(got[1], want[1], strict=True):
        assert testing.relative(a, b) < 5e-6
