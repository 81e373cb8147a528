"""Decoding token by token, after a prefill, against the parallel form: every op, its state updated in place."""

import pytest
import torch

from relinear_kernels import (
    HybridState,
    LinearState,
    decode_step,
    gated_linear_attention,
    hybrid_attention,
    hybrid_state,
    linear_attention,
    linear_state,
    sliding_window_attention,
    window_state,
)
from relinear_kernels.dispatch import _map
from relinear_kernels.linear_attention_reference import folded
from relinear_kernels.sliding_window_attention_reference import WindowState, in_order
from relinear_kernels.testing import DEVICE, relative

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_path")
PREFILL, STEPS, DIM = 20, 300 if DEVICE == "cuda" else 5, 64 if DEVICE == "cuda" else 16
LINEAR = [("softmax_pm", None, True), ("softmax_pm", "token", False), ("relu", "head", True), ("none", None, True), ("softmax_pm", "channel", True),
          ("elu", "channel", False)]  # fmt: skip
WINDOWS = [(1, 0), (5, 4), (16, 4), (40, 0)]
HYBRIDS = [(1, "softmax_pm"), (16, "softmax_pm"), (30, "relu")]
CASES = [("linear", x) for x in LINEAR] + [("window", x) for x in WINDOWS] + [("hybrid", x) for x in HYBRIDS]
HOLDING = CASES[:3] + [("hybrid", HYBRIDS[0]), ("hybrid", HYBRIDS[2])]  # few: in the interpreter a step takes a third of a second


def arguments(kind, how, length, batch, heads, groups):
    """(op, per-token arguments, the rest) on the device."""
    r = lambda *s: torch.randn(*s, device=DEVICE)  # noqa: E731
    tokens = {"q": r(batch, length, heads, DIM), "k": r(batch, length, groups, DIM), "v": r(batch, length, groups, DIM)}
    maps = {n: r(heads, DIM, DIM) / DIM**0.5 for n in ("w_q", "w_k")}
    if kind == "window":
        window, meta = how
        return sliding_window_attention, tokens, {"window": window, "meta": meta}
    if kind == "hybrid":
        window, feature = how
        return hybrid_attention, tokens, {**maps, "window": window, "feature": feature, "window_factor": torch.rand(heads, device=DEVICE)}
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


def fresh(kind, how, batch, heads, groups, held=0):
    """The state before the first token, which holds tokens back where the op can."""
    if kind == "window":
        return window_state(batch, how[0] - 1, groups, DIM, meta=how[1], device=DEVICE)
    features = DIM * (2 if "softmax_pm" in how else 1)
    if kind == "hybrid":
        return hybrid_state(batch, heads, groups, DIM, features, window=how[0], device=DEVICE, held=held)
    return linear_state(batch, heads, features, DIM, DEVICE, held=held if how[1] != "channel" else 0)


def leaves(state):
    return [state] if isinstance(state, torch.Tensor) else [x for part in state for x in leaves(part)]


def laid_out(state):
    """A state with its ring in order, as the torch form leaves it, and no token held back: where it begins is nobody's business."""
    if isinstance(state, WindowState):
        k, v, mask = in_order(state)
        return state._replace(k=k, v=v, mask=mask, first=torch.zeros_like(state.first))
    if isinstance(state, LinearState):
        return folded(state)._replace(held=())
    return state if isinstance(state, torch.Tensor) else type(state)(*map(laid_out, state))


def piece(tokens, a, b):
    return {n: x[:, a:b] for n, x in tokens.items()}


def close(a, b, tolerance=2e-5):
    for x, y in zip(leaves(a), leaves(b), strict=True):
        if x.is_floating_point() and x.isfinite().all():
            assert relative(x, y) < tolerance
        elif not x.is_floating_point():
            assert torch.equal(x, y)


def run(kind, how, steps, batch, heads, groups, padded, more=(), held=0):
    """Decode `steps` tokens after a prefill, then `more`: pieces of so many tokens (one: decoded). Outputs, the last state and its shapes are
    held against the whole sequence in one piece of the torch form, float64."""
    cuts = [1] * steps + list(more)
    length = PREFILL + sum(cuts)
    op, tokens, rest = arguments(kind, how, length, batch, heads, groups)
    if padded:  # the second sequence begins within the prefill, the third within the decoding
        first = torch.tensor([0, PREFILL // 2, PREFILL + 3], device=DEVICE)[:batch, None]
        tokens["key_mask"] = torch.arange(length, device=DEVICE).expand(batch, -1) >= first
    double = lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELINEAR_KERNELS", "torch")
        want, end = op(**{n: double(x) for n, x in (tokens | rest).items()}, return_state=True)
        if DEVICE == "cuda":  # in the interpreter a prefill takes seconds
            patch.setenv("RELINEAR_KERNELS", "triton")
        begin = fresh(kind, how, batch, heads, groups, held)
        _, state = op(**piece(tokens, 0, PREFILL), **rest, initial_state=begin, return_state=True)
    with torch.no_grad():
        out, at = [], PREFILL
        for cut in cuts:
            x = piece(tokens, at, at + cut) | rest
            y, state = decode_step(**x, state=state) if cut == 1 else op(**x, initial_state=state, return_state=True)
            out.append(y)
            at += cut
    assert relative(torch.cat(out, 1), want[:, PREFILL:]) < 2e-5
    assert [x.shape for x in leaves(state)] == [x.shape for x in leaves(begin)]
    close(laid_out(state), laid_out(end))


@pytest.mark.parametrize("batch, heads, groups, padded", [(3, 3, 1, True), (1, 8, 2, False)])
@pytest.mark.parametrize("kind, how", CASES, ids=str)
def test_decoding_after_a_prefill_equals_the_parallel_form(kind, how, batch, heads, groups, padded):
    run(kind, how, STEPS, batch, heads, groups, padded)


@pytest.mark.parametrize("held", [1, 2, 4, 8])
@pytest.mark.parametrize("kind, how", HOLDING, ids=str)
def test_tokens_are_held_back_and_added_together(kind, how, held):
    run(kind, how, 2 * held + 3 + held // 2, 3, 2, 1, True, held=held)


@pytest.mark.parametrize("kind, how", HOLDING, ids=str)
def test_a_piece_goes_on_from_tokens_held_back(kind, how):
    run(kind, how, 11, 1, 2, 1, False, more=(5, 1, 1, 3, 1), held=8)


def test_what_is_held_back_fades_and_is_reordered_with_its_sequence():
    op, tokens, rest = arguments("linear", ("relu", "token", False), 12, 3, 2, 1)
    order = torch.tensor([2, 0, 0], device=DEVICE)
    swapped = {n: x[order] for n, x in tokens.items()}
    with torch.no_grad():
        state, other = (linear_state(3, 2, DIM, DIM, DEVICE, held=8) for _ in range(2))
        for t in range(5):
            _, state = decode_step(**piece(tokens, t, t + 1), **rest, state=state)
            _, other = decode_step(**piece(swapped, t, t + 1), **rest, state=other)
        assert state.held.count.eq(5).all() and not state.kv.any()
        state = _map(lambda x: x[order], state)
        for t in range(5, 12):
            y, state = decode_step(**piece(swapped, t, t + 1), **rest, state=state)
            want, other = decode_step(**piece(swapped, t, t + 1), **rest, state=other)
            torch.testing.assert_close(y, want)
        assert state.held.count.eq(4).all() and state.kv.any()


def test_a_gate_a_channel_holds_nothing_back():
    """Whatever the state has room for: what others held is added first."""
    op, tokens, rest = arguments("linear", LINEAR[4], 3, 2, 2, 1)
    plain = {n: x for n, x in tokens.items() if n != "log_gate"}
    with torch.no_grad():
        first = lambda held: decode_step(**piece(plain, 0, 1), **rest, state=linear_state(2, 2, 2 * DIM, DIM, DEVICE, held=held))[1]  # noqa: E731
        holding, at_once = first(8), first(0)
        assert holding.held.count.eq(1).all() and at_once.held == ()
        for go in (lambda x, s: decode_step(**x, **rest, state=s), lambda x, s: op(**x, **rest, initial_state=s, return_state=True)):
            y, after = go(piece(tokens, 1, 2), holding)
            want, expected = go(piece(tokens, 1, 2), at_once._replace(kv=at_once.kv.clone(), z=at_once.z.clone()))
            torch.testing.assert_close(y, want)
            assert after.held.count.eq(0).all()
            close(laid_out(after), laid_out(expected))


@pytest.mark.parametrize("kind, how", [("linear", LINEAR[0]), ("linear", LINEAR[4]), ("window", (16, 4)), ("hybrid", (16, "softmax_pm"))], ids=str)
def test_long_decoding_does_not_drift(kind, how):
    for held in (0, 8) if DEVICE == "cuda" else (0,):
        run(kind, how, 8192 if DEVICE == "cuda" else 40, 1, 1, 1, False, held=held)


@pytest.mark.parametrize("kind, how", CASES, ids=str)
def test_the_op_itself_decodes_a_token_in_place(kind, how):
    op, tokens, rest = arguments(kind, how, 4, 2, 2, 1)
    with torch.no_grad():
        _, state = op(**piece(tokens, 0, 2), **rest, initial_state=fresh(kind, how, 2, 2, 1), return_state=True)
        _, state = op(**piece(tokens, 2, 3), **rest, initial_state=state, return_state=True)
        _, after = op(**piece(tokens, 3, 4), **rest, initial_state=state, return_state=True)
    for a, b in zip(leaves(state), leaves(after), strict=True):
        assert a.data_ptr() == b.data_ptr() or not a.is_floating_point()


@pytest.mark.parametrize("kind, how", CASES, ids=str)
def test_a_token_with_gradients_leaves_its_state_alone(kind, how):
    op, tokens, rest = arguments(kind, how, 1, 2, 2, 1)
    state = fresh(kind, how, 2, 2, 1)
    before = [x.clone() for x in leaves(state)]
    op(**tokens | {"q": tokens["q"].requires_grad_()}, **rest, initial_state=state, return_state=True)[0].sum().backward()
    for a, b in zip(leaves(state), before, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind, how", CASES, ids=str)
def test_the_torch_form_decodes_the_same(kind, how, monkeypatch):
    monkeypatch.setenv("RELINEAR_KERNELS", "torch")
    run(kind, how, 12, 3, 3, 1, True)


def test_what_cannot_be_decoded_is_named():
    op, tokens, rest = arguments("linear", LINEAR[0], 1, 2, 2, 1)
    state = linear_state(2, 2, 2 * DIM, DIM, DEVICE)
    with pytest.raises(ValueError, match="float32 state in place; got torch.bfloat16"):
        decode_step(**tokens, **rest, state=state._replace(kv=state.kv.bfloat16()))
    with pytest.raises(ValueError, match="held must be 0 or a power of two; got 6"):
        linear_state(2, 2, 2 * DIM, DIM, held=6)
    with pytest.raises(ValueError, match=rf"must hold tokens of {2 * DIM} features and {DIM} values for \[2, 2\] heads"):
        decode_step(**tokens, **rest, state=state._replace(held=linear_state(2, 2, DIM, DIM, DEVICE, held=8).held))
    with pytest.raises(ValueError, match=rf"the state must be \[2, 2, {2 * DIM}, {DIM}\]; got \[2, 2, {DIM}, {DIM}\]"):
        decode_step(**tokens, **rest, state=LinearState(state.kv[:, :, :DIM].contiguous(), state.z, state.shift))
    with pytest.raises(ValueError, match="takes one token; got 3"):
        decode_step(**tokens | {"q": tokens["q"].expand(-1, 3, -1, -1)}, **rest, state=state)
    with pytest.raises(ValueError, match="takes a LinearState, WindowState, HybridState; got tuple"):
        decode_step(**tokens, **rest, state=tuple(state))
    window = window_state(2, 15, 1, DIM, device=DEVICE)
    with pytest.raises(ValueError, match=r"must hold keys \[2, 3, 1, .*\] and 4 meta keys; got \[2, 15, 1, .*\], 0"):
        decode_step(**tokens, state=window, window=4, meta=4)
    rest.pop("normalize")
    with pytest.raises(ValueError, match="must hold keys"):
        decode_step(**tokens, **rest, state=HybridState(window, state), window=16, window_factor=torch.ones(2, device=DEVICE))
