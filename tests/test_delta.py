"""The method `delta`: what its options start as, its bytes, and what is refused."""

import math

import pytest
import torch
from test_laws import VARIANTS, one_layer, teacher, tokens
from test_state_bytes import LLAMA, QWEN, SMOLLM2, layer

from relinear import linearize
from relinear.attention import load, options
from relinear.attention._base import Inputs
from relinear.attention.delta import TAPS
from relinear.errors import UserError
from relinear.linearize.parts import switch_off
from relinear.measure.state_bytes import cached_numbers, state_bytes

GIVEN = {"window": 16, "sinks": 4}


def fresh(heads, **given):
    return load("delta")(heads, options("delta", given)).double()


@pytest.mark.parametrize("heads", [SMOLLM2, QWEN, LLAMA], ids=["smollm2", "qwen", "llama"])
def test_a_state_of_each_key_head_has_the_bytes_of_as_many_positions_as_a_head_is_wide(heads):
    position = 2 * 2 * heads.groups * heads.dim
    near = (16 + 4 + TAPS - 1) * position  # the convolution's last keys and values, too
    made = lambda **given: layer("delta", GIVEN | given, heads)  # noqa: E731
    assert state_bytes(made(), 7) == near + heads.dim * position
    assert state_bytes(made(state_dtype="bfloat16"), 7) == near + heads.dim * position // 2
    assert state_bytes(made(state_per="query_head"), 7) == near + heads.group * heads.dim * position
    assert state_bytes(made(conv=False), 7) == near + (heads.dim - TAPS + 1) * position
    assert cached_numbers(made(), 7) * 2 == near


@pytest.mark.parametrize("decay", ["head", "channel", "step"])
def test_every_decay_starts_at_its_half_life(decay):
    method, inputs = one_layer(("delta", {}))
    erase = "none" if decay == "step" else "tied"
    start = fresh(method.heads, decay=decay, half_life=200, erase=erase)._paced(inputs, inputs.x)
    wanted = torch.full_like(start["log_decay"], -math.log(2) / 200)
    torch.testing.assert_close(start["log_decay"], wanted, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        start["write"], torch.full_like(start["write"], 1.0 if decay == "step" else 0.5), rtol=1e-6, atol=0
    )


def test_slopes_are_alibi_s_and_liger_s_gate_is_of_the_key():
    method, inputs = one_layer(("delta", {}))
    fixed = fresh(method.heads, decay="fixed", erase="none")._paced(inputs, inputs.x)["log_decay"]
    assert fixed.tolist() == [-(2.0**-4), -(2.0**-8)]
    key = fresh(method.heads, decay="key", erase="none")._paced(inputs, inputs.x)["log_decay"]
    torch.testing.assert_close((16 * key).exp(), inputs.k.sigmoid())


def test_the_convolution_starts_as_nothing_and_never_sums_over_padding():
    method, inputs = one_layer(("delta", {}))
    k, v, after = fresh(method.heads)._convolved(inputs, None)
    assert torch.equal(k, inputs.k) and torch.equal(v, inputs.v)
    assert torch.equal(after.k, inputs.k[:, 1 - TAPS :])
    mask = torch.arange(70).expand(2, -1) >= 30
    padded = method._convolved(inputs._replace(key_mask=mask), None)
    alone = method._convolved(Inputs(*(x[:, 30:] for x in inputs[:6])), None)
    for a, b in zip(padded[:2], alone[:2], strict=True):
        torch.testing.assert_close(a[:, 30:], b)


@pytest.mark.parametrize("case", VARIANTS["delta"][:3], ids=["head", "none", "channel"])
def test_a_state_in_bfloat16_costs_outputs_less_than_a_hundredth(case):
    """One token at a time for as long as a window of 512: the error of rounding each state."""
    length, found = 512, []
    for dtype in ("float32", "bfloat16"):
        method, inputs = one_layer(("delta", case | {"state_dtype": dtype}), length)
        state, out = None, []
        for i in range(length):
            y, state = method.float()._far(Inputs(*(x[:, i : i + 1].float() for x in inputs[:6])), state)
            out.append(y)
        assert state.sums.s.dtype == getattr(torch, dtype)
        found.append(torch.cat(out, 1))
    error = ((found[1] - found[0]).norm() / found[0].norm()).item()
    assert 1e-5 < error < 1e-2


def test_a_cache_holds_states_in_the_bytes_that_are_counted():
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        model = linearize(teacher(dtype=torch.float32), "delta", state_dtype=dtype, **GIVEN)
        cache = model.make_cache()
        for piece in tokens(12).split(4, 1):
            model(piece, past_key_values=cache)
        sizes[dtype] = cache.state_bytes()
        assert sizes[dtype] == model.state_bytes(2)
    assert sizes["float32"] - sizes["bfloat16"] == 2 * 2 * 2 * 8 * 8 * 2  # layers, rows, key heads


def test_each_part_can_be_switched_off():
    model = linearize(teacher(dtype=torch.float32), "delta", **GIVEN)
    window = linearize(teacher(dtype=torch.float32), "window", **GIVEN)
    with torch.no_grad():
        for method in (one.method for one in model.attention_layers()):
            method.alpha.fill_(0.5)
    ids = tokens(40)
    both, alone = model(ids, use_cache=False).logits, window(ids, use_cache=False).logits
    switch_off(model, "linear")
    assert torch.equal(model(ids, use_cache=False).logits, alone) and not torch.equal(both, alone)
    switch_off(model, "window")
    far = model(ids, use_cache=False).logits
    cache = model.make_cache()
    parts = [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 20), (20, 40))]
    torch.testing.assert_close(torch.cat(parts, 1), far, rtol=1e-3, atol=1e-4)
    with pytest.raises(UserError, match="attends to nothing"):
        switch_off(model, "window", "linear")


# --- what is refused ---


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"decay": "none", "half_life": 16.0}, "half_life is of the decays head, step, channel; got half_l"),
        ({"decay": "step"}, "decay 'step' writes by its step, .* possible: erase none, or decay head"),
        ({"feature": "softmax"}, "got feature 'softmax' with erase 'tied', possible: l2, or erase none"),
        ({"state_dtype": "float8"}, "state_dtype: Input should be 'float32' or 'bfloat16'; got 'float8'"),
        ({"window": [8, 0]}, "greater than or equal to 1"),
        ({"window": [8, 8, 8]}, "a number for each layer; got 3 for 2 layers, possible: a list of 2, or one"),
    ],
)
def test_options_that_do_not_fit_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        linearize(teacher(), "delta", **given)


def test_signed_weights_have_no_cross_entropy():
    method, inputs = one_layer(("delta", GIVEN))
    with pytest.raises(UserError, match="weights of either sign, .* possible: loss: mse"):
        method.distill_loss(inputs, "cross_entropy")
