"""Decoding token by token, after a prefill, against the parallel form: every op, its state updated in
place."""

import pytest
import torch

from relinear_kernels.decode_step import decode_step
from relinear_kernels.gated_linear_attention import gated_linear_attention
from relinear_kernels.hybrid_attention import hybrid_attention
from relinear_kernels.hybrid_attention_reference import HybridState, hybrid_state
from relinear_kernels.linear_attention import linear_attention
from relinear_kernels.linear_attention_reference import LinearState, linear_state
from relinear_kernels.sliding_window_attention import sliding_window_attention
from relinear_kernels.sliding_window_attention_reference import window_state
from relinear_kernels.testing import DEVICE, laid_out, of_key_heads, relative

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("triton_path")
PREFILL, STEPS, DIM = 20, 300 if DEVICE == "cuda" else 5, 64 if DEVICE == "cuda" else 16
LINEAR = [
    ("softmax_pm", None, True),
    ("softmax_pm", "token", False),
    ("relu", "head", True),
    ("none", None, True),
    ("softmax_pm", "channel", True),
    ("elu", "channel", False),
]
WINDOWS = [(1, 0), (5, 4), (16, 4), (40, 0)]
HYBRIDS = [(1, "softmax_pm"), (16, "softmax_pm"), (30, "relu")]
CASES = [("linear", x) for x in LINEAR] + [("window", x) for x in WINDOWS] + [("hybrid", x) for x in HYBRIDS]
# each feature once: 70 sequences are two tiles of a program that makes features
TILED = (LINEAR[0], LINEAR[2], LINEAR[5], HYBRIDS[1])
# maps, gates, states of key heads
KEY_HEADS = [("linear shared", x) for x in LINEAR if x[0] != "none"] + [("hybrid shared", x) for x in HYBRIDS]


def arguments(kind, how, length, batch, heads, groups):
    """(op, per-token arguments, the rest) on the device."""
    if kind.endswith(" shared"):
        op, *given = arguments(kind.removesuffix(" shared"), how, length, batch, heads, groups)
        return op, *(of_key_heads(args, groups) for args in given)
    r = lambda *s: torch.randn(*s, device=DEVICE)  # noqa: E731
    tokens = {
        "q": r(batch, length, heads, DIM),
        "k": r(batch, length, groups, DIM),
        "v": r(batch, length, groups, DIM),
    }
    maps = {n: r(heads, DIM, DIM) / DIM**0.5 for n in ("w_q", "w_k")}
    if kind == "window":
        window, meta = how
        return sliding_window_attention, tokens, {"window": window, "meta": meta}
    if kind == "hybrid":
        window, feature = how
        return (
            hybrid_attention,
            tokens,
            {**maps, "window": window, "feature": feature, "window_factor": torch.rand(heads, device=DEVICE)},
        )
    feature, gate, normalize = how
    rest = {"feature": feature, "normalize": normalize}
    if feature == "none":
        tokens |= {n: tokens[n].abs() for n in "qk"}
    else:
        rest |= maps
    decay = torch.nn.functional.logsigmoid
    if gate == "head":
        rest["log_decay"] = -(2.0 ** -torch.arange(1.0, heads + 1, device=DEVICE))
    if gate == "token":
        tokens["log_decay"] = decay(2 * r(batch, length, heads))
    if gate == "channel":
        return gated_linear_attention, tokens | {"log_gate": decay(2 * r(batch, length, heads, DIM))}, rest
    return linear_attention, tokens, rest


def fresh(kind, how, batch, heads, groups):
    """The state before the first token."""
    if kind == "window":
        return window_state(batch, how[0] - 1, groups, DIM, meta=how[1], device=DEVICE)
    features = DIM * (2 if "softmax_pm" in how else 1)
    states = groups if kind.endswith(" shared") else heads
    if kind.startswith("hybrid"):
        return hybrid_state(batch, states, groups, DIM, features, window=how[0], device=DEVICE)
    return linear_state(batch, states, features, DIM, DEVICE)


def leaves(state):
    return [state] if isinstance(state, torch.Tensor) else [x for part in state for x in leaves(part)]


def piece(tokens, a, b):
    return {n: x[:, a:b] for n, x in tokens.items()}


def close(a, b, tolerance=2e-5):
    for x, y in zip(leaves(a), leaves(b), strict=True):
        if x.is_floating_point() and x.isfinite().all():
            assert relative(x, y) < tolerance
        elif not x.is_floating_point():
            assert torch.equal(x, y)


def run(kind, how, steps, batch, heads, groups, padded, dtype=torch.float32):
    """Decode after a prefill, and hold outputs and the last state against the whole sequence in one piece of
    the torch form, float64. Tokens are of `dtype`; maps are float32, as models keep them."""
    op, tokens, rest = arguments(kind, how, PREFILL + steps, batch, heads, groups)
    tokens = {n: x.to(dtype) if n in "qkv" else x for n, x in tokens.items()}
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    if padded:  # the second sequence begins within the prefill, the third within the decoding
        first = torch.tensor([0, PREFILL // 2, PREFILL + 3], device=DEVICE).repeat(batch)[:batch, None]
        tokens["key_mask"] = torch.arange(PREFILL + steps, device=DEVICE).expand(batch, -1) >= first
    double = lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELINEAR_KERNELS", "torch")
        want, end = op(**{n: double(x) for n, x in (tokens | rest).items()}, return_state=True)
        if DEVICE == "cuda":  # in the interpreter a prefill takes seconds
            patch.setenv("RELINEAR_KERNELS", "triton")
        _, state = op(
            **piece(tokens, 0, PREFILL),
            **rest,
            initial_state=fresh(kind, how, batch, heads, groups),
            return_state=True,
        )
    with torch.no_grad():
        out = []
        for t in range(PREFILL, PREFILL + steps):
            y, state = decode_step(**piece(tokens, t, t + 1), **rest, state=state)
            out.append(y)
    assert out[0].dtype == dtype and relative(torch.cat(out, 1), want[:, PREFILL:]) < tolerance
    close(laid_out(state), laid_out(end), tolerance)


@pytest.mark.parametrize("batch, heads, groups, padded", [(3, 3, 1, True), (1, 8, 2, False)])
@pytest.mark.parametrize("kind, how", CASES + KEY_HEADS, ids=str)
def test_decoding_after_a_prefill_equals_the_parallel_form(kind, how, batch, heads, groups, padded):
    run(kind, how, STEPS, batch, heads, groups, padded)


@pytest.mark.parametrize("kind, how", CASES + KEY_HEADS, ids=str)
def test_more_sequences_than_a_program_makes_features_of(kind, how):
    run(kind, how, 2, 19, 2, 1, True)


@pytest.mark.parametrize(
    "kind, how",
    [("window", (45, 4)), ("hybrid", (40, "softmax_pm")), ("hybrid shared", (70, "relu"))],
    ids=str,
)
def test_a_ring_of_several_tiles(kind, how, monkeypatch):
    monkeypatch.setitem(globals(), "DIM", 128)
    run(kind, how, 40 if DEVICE == "cuda" else 3, 3, 4, 2, True)


@pytest.mark.skipif(DEVICE == "cuda", reason="the kernels of a whole prompt take 16 meta keys at most")
def test_more_meta_keys_than_a_tile_of_16():
    run("window", (5, 20), 8, 3, 2, 1, True)


@pytest.mark.parametrize("kind, how", CASES + KEY_HEADS, ids=str)
def test_half_precision(kind, how):
    if DEVICE == "cuda":
        run(kind, how, 40, 70, 2, 1, True, dtype=torch.bfloat16)
    else:  # in the interpreter a step of 70 sequences takes a second or two
        run(kind, how, 3, 70 if how in TILED else 5, 2, 1, True, dtype=torch.float16)


@pytest.mark.parametrize(
    "kind, how",
    [("linear", LINEAR[0]), ("linear", LINEAR[4]), ("window", (16, 4)), ("hybrid", (16, "softmax_pm"))],
    ids=str,
)
def test_long_decoding_does_not_drift(kind, how):
    run(kind, how, 8192 if DEVICE == "cuda" else 40, 1, 1, 1, False)


@pytest.mark.parametrize("kind, how", CASES + KEY_HEADS, ids=str)
def test_the_op_itself_decodes_a_token_in_place(kind, how):
    op, tokens, rest = arguments(kind, how, 4, 2, 2, 1)
    with torch.no_grad():
        _, state = op(
            **piece(tokens, 0, 2), **rest, initial_state=fresh(kind, how, 2, 2, 1), return_state=True
        )
        _, state = op(**piece(tokens, 2, 3), **rest, initial_state=state, return_state=True)
        _, after = op(**piece(tokens, 3, 4), **rest, initial_state=state, return_state=True)
    for a, b in zip(leaves(state), leaves(after), strict=True):
        assert a.data_ptr() == b.data_ptr() or not a.is_floating_point()


@pytest.mark.parametrize("kind, how", CASES, ids=str)
def test_a_token_with_gradients_leaves_its_state_alone(kind, how):
    op, tokens, rest = arguments(kind, how, 1, 2, 2, 1)
    state = fresh(kind, how, 2, 2, 1)
    before = [x.clone() for x in leaves(state)]
    op(**tokens | {"q": tokens["q"].requires_grad_()}, **rest, initial_state=state, return_state=True)[
        0
    ].sum().backward()
    for a, b in zip(leaves(state), before, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind, how", CASES + KEY_HEADS, ids=str)
def test_the_torch_form_decodes_the_same(kind, how, monkeypatch):
    monkeypatch.setenv("RELINEAR_KERNELS", "torch")
    run(kind, how, 12, 3, 3, 1, True)


def test_what_cannot_be_decoded_is_named():
    op, tokens, rest = arguments("linear", LINEAR[0], 1, 2, 2, 1)
    state = linear_state(2, 2, 2 * DIM, DIM, DEVICE)
    with pytest.raises(ValueError, match="a float32 state; got torch.bfloat16"):
        decode_step(**tokens, **rest, state=state._replace(kv=state.kv.bfloat16()))
    with pytest.raises(
        ValueError, match=rf"the state must be \[2, 2, {2 * DIM}, {DIM}\]; got \[2, 2, {DIM}, {DIM}\]"
    ):
        decode_step(
            **tokens, **rest, state=LinearState(state.kv[:, :, :DIM].contiguous(), state.z, state.shift)
        )
    with pytest.raises(ValueError, match="takes one token; got 3"):
        decode_step(**tokens | {"q": tokens["q"].expand(-1, 3, -1, -1)}, **rest, state=state)
    with pytest.raises(ValueError, match="takes a LinearState, WindowState, HybridState; got tuple"):
        decode_step(**tokens, **rest, state=tuple(state))
    window = window_state(2, 15, 1, DIM, device=DEVICE)
    with pytest.raises(
        ValueError, match=r"must hold keys \[2, 3, 1, .*\] and 4 meta keys; got \[2, 15, 1, .*\], 0"
    ):
        decode_step(**tokens, state=window, window=4, meta=4)
    rest.pop("normalize")
    with pytest.raises(ValueError, match="must hold keys"):
        decode_step(
            **tokens,
            **rest,
            state=HybridState(window, state),
            window=16,
            window_factor=torch.ones(2, device=DEVICE),
        )
