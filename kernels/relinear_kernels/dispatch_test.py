"""The choice of a form: what the kernels do not take runs by the torch form, which is right, and one warning
says so; forced, it is an error.

`on_gpu` says yes here for tensors of a CPU: `auto` then chooses as it does on a GPU, and Triton's interpreter
runs what it chooses.
"""

import importlib
import re
import warnings
from functools import partial

import pytest
import torch

from relinear_kernels import dispatch, testing
from relinear_kernels.attention_cross_entropy import attention_cross_entropy
from relinear_kernels.decode_step import decode_step
from relinear_kernels.gated_linear_attention import gated_linear_attention
from relinear_kernels.hybrid_attention import hybrid_attention
from relinear_kernels.hybrid_attention_reference import hybrid_state
from relinear_kernels.linear_attention import linear_attention
from relinear_kernels.linear_attention_reference import linear_state
from relinear_kernels.rotary import rotary
from relinear_kernels.scaled_sum import scaled_sum
from relinear_kernels.sliding_window_attention import sliding_window_attention
from relinear_kernels.sliding_window_attention_reference import window_state
from relinear_kernels.token_cross_entropy import token_cross_entropy

pytest.importorskip("triton")
B, T, H, G = 2, 5, 2, 1
WIDTHS = "head widths and feature counts of (16, 32, 64, 128)"
DTYPES = "the dtypes torch.bfloat16, torch.float16, torch.float32"


def tokens(dim=16, length=T, batch=B, dtype=torch.float32) -> dict:
    shapes = {"q": H, "k": G, "v": G}
    return {
        n: torch.randn(batch, length, heads, dim, dtype=dtype, device=testing.DEVICE)
        for n, heads in shapes.items()
    }


def gate(dim=16, length=T, dtype=torch.float32):
    return -torch.rand(B, length, H, dim, dtype=dtype, device=testing.DEVICE)


def factor(dtype=torch.float32):
    return {"window": 3, "window_factor": torch.ones(H, dtype=dtype, device=testing.DEVICE)}


def features(count=16, dtype=torch.float32) -> dict:
    phi = {n: torch.rand(B, T, H, count, dtype=dtype, device=testing.DEVICE) for n in ("phi_q", "phi_k")}
    return {n: x for n, x in tokens().items() if n != "v"} | phi | {"scale": 0.25}


def step(state, dim=16, **rest):
    """A decode step from a copy of the state, which it overwrites."""

    def run():
        out, after = decode_step(**{n: x[:, :1] for n, x in tokens(dim).items()}, state=copied(state), **rest)
        return out, *(x for x in after if isinstance(x, torch.Tensor))

    return run


def copied(state):
    return state.clone() if isinstance(state, torch.Tensor) else type(state)(*map(copied, state))


PACKED = {"cu_seqlens": torch.tensor([0, 2, T], device=testing.DEVICE)}
REAL = {"key_mask": torch.ones(1, T, dtype=torch.bool, device=testing.DEVICE)}
at = {"device": testing.DEVICE}

# Calls that the kernels take. A bound of fewer numbers than they have stands for sequences of 2**31, which
# need gigabytes.
LONG = {
    "linear": (lambda: linear_attention(**tokens()), T * H * 2 * 16),
    "gated": (lambda: gated_linear_attention(**tokens(), log_gate=gate()), T * H * 2 * 16),
    "hybrid": (lambda: hybrid_attention(**tokens(), **factor()), T * H * 2 * 16),
    "window": (lambda: sliding_window_attention(**tokens(), window=3), T * H * 16),
    "cross-entropy": (lambda: attention_cross_entropy(**features(32)), T * H * 32),
    "step": (step(linear_state(B, H, 32, 16, **at)), H * 2 * 16),
}
# An op with arguments that its kernels do not take -> what they take, and what was given.
LACKS = {
    "linear, Gemma 3's heads": (
        lambda: linear_attention(**tokens(256)),
        f"{WIDTHS}; got width of q 256, width of k 256, width of v 256",
    ),
    "linear, heads of 80": (lambda: linear_attention(**tokens(80)), f"{WIDTHS}; got width of q 80"),
    "linear, features": (
        lambda: linear_attention(
            **tokens(),
            w_q=torch.eye(16, 24, **at).expand(H, -1, -1),
            w_k=torch.eye(16, 24, **at).expand(H, -1, -1),
        ),
        f"{WIDTHS}; got width of q 16, width of k 16, width of v 16, features 24",
    ),
    "linear, float64": (
        lambda: linear_attention(**tokens(dtype=torch.float64)),
        f"{DTYPES}; got q torch.float64",
    ),
    "linear, one matrix": (
        lambda: linear_attention(**tokens(), w_k=torch.eye(16, **at).expand(H, -1, -1)),
        "both feature matrices or neither; got w_k alone",
    ),
    "linear, packed with padding": (
        lambda: linear_attention(**tokens(batch=1), **PACKED, **REAL),
        "cu_seqlens without key_mask; got key_mask",
    ),
    "gated, heads of 256": (
        lambda: gated_linear_attention(**tokens(256), log_gate=gate(256)),
        f"{WIDTHS}; got width of q 256",
    ),
    "gated, float16": (
        lambda: gated_linear_attention(**tokens(dtype=torch.float16), log_gate=gate()),
        "the dtypes torch.bfloat16, torch.float32; got q torch.float16",
    ),
    "hybrid, heads of 256": (
        lambda: hybrid_attention(**tokens(256), **factor()),
        f"{WIDTHS}; got width of q 256",
    ),
    "hybrid, packed with a state": (
        lambda: hybrid_attention(**tokens(batch=1), **factor(), **PACKED, return_state=True)[0],
        "cu_seqlens without key_mask, initial_state, return_state; got return_state",
    ),
    "window, heads of 256": (
        lambda: sliding_window_attention(**tokens(256), window=3),
        f"{WIDTHS}; got width of q 256",
    ),
    "window, meta": (
        lambda: sliding_window_attention(**tokens(), window=3, meta=17),
        "at most 16 meta tokens; got 17",
    ),
    "step of a linear state, heads of 256": (
        step(linear_state(B, H, 512, 256, **at), 256),
        f"{WIDTHS}; got width of q 256",
    ),
    "step of a linear state, exponential": (
        step(linear_state(B, H, 16, 16, **at), feature="exp"),
        "the features softmax_pm, relu, elu, none; got 'exp'",
    ),
    "step of a linear state, float64": (
        step(linear_state(B, H, 32, 16, dtype=torch.float64, **at)),
        "a float32 state; got torch.float64",
    ),
    "step of a window, heads of 256": (
        step(window_state(B, 2, G, 256, **at), 256, window=3),
        f"{WIDTHS}; got width of q 256",
    ),
    "step of a hybrid, heads of 256": (
        step(hybrid_state(B, H, G, 256, 512, window=3, **at), 256, **factor()),
        f"{WIDTHS}; got width of q 256",
    ),
    "cross-entropy, heads of 256": (
        lambda: attention_cross_entropy(**features() | {n: x for n, x in tokens(256).items() if n != "v"}),
        f"{WIDTHS}; got width of q 256",
    ),
    "cross-entropy, features": (
        lambda: attention_cross_entropy(**features(48)),
        "float32 features, (16, 32, 64, 128, 256) of them; got 48",
    ),
    "rotary, float64": (
        lambda: rotary(tokens()["q"].double(), tokens()["k"], *torch.ones(2, 1, T, 16, **at)),
        f"{DTYPES}; got q torch.float64",
    ),
    "scaled sum, float64": (
        lambda: scaled_sum(tokens()["q"].double(), tokens()["q"], torch.ones(H, **at)),
        f"{DTYPES}; got x torch.float64",
    ),
    "token cross-entropy, float64": (
        lambda: token_cross_entropy(
            torch.randn(3, 7, dtype=torch.float64, **at), torch.zeros(3, dtype=torch.long, **at)
        ),
        f"{DTYPES}; got logits torch.float64",
    ),
}


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch):
    """A machine whose tensors all lie on a GPU, with nothing warned of yet."""
    monkeypatch.setattr(dispatch, "on_gpu", lambda x: True)
    monkeypatch.setenv("RELINEAR_KERNELS", "auto")
    dispatch._warn_once.cache_clear()


def run(case) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    out = case()
    return out if isinstance(out, tuple) else (out,)


@pytest.mark.parametrize("name", LACKS)
def test_what_the_kernels_do_not_take_runs_by_the_torch_form_and_is_said_once(name, monkeypatch):
    case, lacks = LACKS[name]
    with pytest.warns(UserWarning, match=f"runs its torch form here.*{re.escape(lacks)}") as said:
        got = run(case)
    assert len(said) == 1 and "\n" not in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(case)  # the same again says nothing
        monkeypatch.setenv("RELINEAR_KERNELS", "torch")
        want = run(case)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", LACKS)
def test_forced_kernels_refuse_it_and_say_what_runs_it(name, monkeypatch):
    case, lacks = LACKS[name]
    monkeypatch.setenv("RELINEAR_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(
        ValueError, match=rf"on the Triton path takes {re.escape(lacks)}.*\(RELINEAR_KERNELS=torch runs it\)"
    ):
        run(case)


@pytest.mark.parametrize(
    "module, name, case",
    [
        ("linear_attention_triton", "linear_attention", lambda: linear_attention(**tokens())),
        (
            "linear_attention_triton",
            "linear_attention",
            lambda: linear_attention(**tokens(), feature="exp_pm"),
        ),
        (
            "gated_linear_attention_triton",
            "gated_linear_attention",
            lambda: gated_linear_attention(**tokens(), log_gate=gate()),
        ),
        ("hybrid_attention_triton", "hybrid_attention", lambda: hybrid_attention(**tokens(), **factor())),
        (
            "sliding_window_attention_triton",
            "sliding_window_attention",
            lambda: sliding_window_attention(**tokens(), window=3, meta=2),
        ),
        (
            "attention_cross_entropy_triton",
            "attention_cross_entropy",
            lambda: attention_cross_entropy(**features()),
        ),
        (
            "rotary_triton",
            "rotary",
            lambda: rotary(tokens()["q"], tokens()["k"], *torch.ones(2, 1, T, 16, **at)),
        ),
        (
            "scaled_sum_triton",
            "scaled_sum",
            lambda: scaled_sum(tokens()["q"], tokens()["q"], torch.ones(H, **at)),
        ),
        (
            "token_cross_entropy_triton",
            "token_cross_entropy",
            lambda: token_cross_entropy(torch.randn(3, 7, **at), torch.arange(3, **at)),
        ),
    ],
)
def test_what_they_take_runs_by_them_without_a_word(module, name, case, monkeypatch):
    module, calls = importlib.import_module(f"relinear_kernels.{module}"), []
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *a, **k: calls.append(name) or real(*a, **k))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "runs its torch form")
        got = run(case)
    assert calls == [name]
    monkeypatch.setenv("RELINEAR_KERNELS", "torch")
    for a, b in zip(got, run(case), strict=True):
        assert testing.relative(a, b) < 1e-5


@pytest.mark.parametrize("name", LONG)
def test_a_sequence_whose_offsets_do_not_fit_32_bits_runs_by_the_torch_form(name, monkeypatch):
    case, numbers = LONG[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "runs its torch form")
        monkeypatch.setattr(dispatch, "LARGEST", numbers)
        run(case)
    monkeypatch.setattr(dispatch, "LARGEST", numbers - 1)
    tokens_each = 0 if name == "step" else T - 1
    with pytest.warns(
        UserWarning,
        match=(
            rf"sequences of at most {tokens_each} tokens at this size; got .*\[2,"
            rf" {1 if name == 'step' else T}, 2, "
        ),
    ):
        got = run(case)
    monkeypatch.setenv("RELINEAR_KERNELS", "torch")
    for a, b in zip(got, run(case), strict=True):
        assert torch.equal(a, b)
    monkeypatch.setenv("RELINEAR_KERNELS", "triton")
    with pytest.raises(
        ValueError,
        match=rf"takes sequences of at most {tokens_each} tokens.*\(RELINEAR_KERNELS=torch runs it\)",
    ):
        run(case)


def test_the_bound_is_that_of_32_bits():
    # Llama-3-8B's heads, both halves of 128 features
    q = torch.empty(1, device="meta").expand(1, 2**18, 32, 128)
    assert dispatch.wrong_sizes(128, q=q[:, 1:]) is None and "at most 262143 tokens" in dispatch.wrong_sizes(
        128, q=q
    )


def test_each_kind_has_one_warning():
    with pytest.warns(UserWarning) as said:
        for dim in (80, 80, 96, 256, 80):
            linear_attention(**tokens(dim))
    assert [re.search(r"width of q (\d+)", str(x.message))[1] for x in said] == ["80", "96", "256"]


def test_without_triton_a_gpu_runs_the_torch_form(monkeypatch):
    monkeypatch.setattr(dispatch, "WITHOUT_TRITON", "the package triton; got an environment without it")
    with pytest.warns(UserWarning, match="take the package triton; got an environment without it"):
        linear_attention(**tokens())


@pytest.mark.parametrize("form", ["torch", "triton"])
@pytest.mark.parametrize(
    "op",
    [linear_attention, partial(sliding_window_attention, window=3), partial(hybrid_attention, **factor())],
)
def test_packed_sequences_that_do_not_fill_the_row_are_refused_by_every_form(op, form, monkeypatch):
    monkeypatch.setenv("RELINEAR_KERNELS", form)
    with pytest.raises(ValueError, match=r"cu_seqlens must rise from 0 to 5; got \[0, 2, 4\]"):
        op(**tokens(batch=1), cu_seqlens=torch.tensor([0, 2, 4], device=testing.DEVICE))
    with pytest.raises(ValueError, match="into one row; got a batch of 2"):
        op(**tokens(), cu_seqlens=torch.tensor([0, 2, T], device=testing.DEVICE))
