"""The gate lets every method through. It stops a model whose two forms differ, that looks ahead, or whose
numbers are not finite."""

import pytest
import torch
from test_laws import CASES, name, of, tokens

from relinear.attention.softmax import Method as Softmax
from relinear.linearize.state import RecurrentLayer, tree_map
from relinear.measure.gate import MOST, TOLERANCE, GateError, gate


@pytest.mark.parametrize("case", CASES, ids=name)
def test_every_method_passes_and_its_figures_are_rounding(case):
    figures = gate(of(case, dtype=torch.float32), tokens(90)[0])
    assert figures["passed"] and figures["finite"]
    assert max(figures["parallel_vs_recurrent"], figures["prefix_consistency"]) < 1e-4


def test_a_decode_path_that_forgets_is_refused(monkeypatch):
    advance, kept = RecurrentLayer.advance, {}

    def forget(self, state, n):
        """A single token, which overwrites the state where it lies, leaves the state of the last piece."""
        if n > 1:
            kept[id(self)] = tree_map(torch.clone, state)
        advance(self, tree_map(torch.clone, kept[id(self)]) if n == 1 else state, n)

    monkeypatch.setattr(RecurrentLayer, "advance", forget)
    with pytest.raises(GateError, match="'passed': False"):
        gate(of(("hedgehog", {}), dtype=torch.float32), tokens(90)[0])


def test_a_model_whose_prefix_depends_on_what_follows_is_refused(monkeypatch):
    forward = Softmax.forward

    def peeks(self, inputs, state=None):
        y, state = forward(self, inputs, state)
        return y + 0.1 * y.mean(1, keepdim=True), state

    monkeypatch.setattr(Softmax, "forward", peeks)
    with pytest.raises(GateError, match="prefix_consistency"):
        gate(of(("softmax", {}), dtype=torch.float32), tokens(90)[0])


def test_logits_that_are_not_finite_are_refused(monkeypatch):
    model = of(("hedgehog", {}), dtype=torch.float32)
    weight = model.lm_head.weight
    kept = weight[5, 0].item()
    try:
        weight[5, 0] = torch.inf
        with pytest.raises(GateError, match="'finite': False"):
            gate(model, tokens(90)[0])
    finally:
        weight[5, 0] = kept


# --- bfloat16 ---


@pytest.fixture
def magnified(monkeypatch):
    """A model in bfloat16, and a tolerance that none is within."""
    monkeypatch.setitem(TOLERANCE, torch.bfloat16, -1.0)
    return of(("supra", {}), dtype=torch.bfloat16)


def test_a_model_that_magnifies_rounding_passes_by_its_float32_form_and_says_so(magnified):
    figures = gate(magnified, tokens(90)[0])
    assert figures["passed"] and figures["parallel_vs_recurrent"] <= figures["tolerance"] == min(
        2 * figures["rounding"], MOST
    )
    assert figures["rounding"] > 1e-3 and figures["parallel_vs_recurrent_float32"] < 1e-4
    assert magnified.dtype == torch.bfloat16, "the model itself stays as it is"
    assert "rounding" not in gate(of(("supra", {}), dtype=torch.float32), tokens(90)[0])


@pytest.mark.parametrize("method", ["supra", "lizard", "hedgehog"])
@pytest.mark.parametrize("share", [0.9, 0.99])
def test_a_recurrence_that_loses_a_little_is_refused_however_much_rounding_is_magnified(
    magnified, monkeypatch, method, share
):
    advance = RecurrentLayer.advance

    def loses(self, state, n):
        return advance(
            self, tree_map(lambda part: part * share if part.is_floating_point() else part, state), n
        )

    monkeypatch.setattr(RecurrentLayer, "advance", loses)
    with pytest.raises(GateError, match="'passed': False.*parallel_vs_recurrent_float32"):
        gate(of((method, {}), dtype=torch.bfloat16), tokens(90)[0])


def test_a_recurrence_that_is_wrong_in_bfloat16_alone_is_refused(magnified, monkeypatch):
    forward = type(magnified.attention_layers()[0].method).forward

    def coarse(self, inputs, state=None):
        y, after = forward(self, inputs, state)
        return (y * 1.5 if state is not None and y.dtype == torch.bfloat16 and y.shape[1] == 1 else y), after

    monkeypatch.setattr(type(magnified.attention_layers()[0].method), "forward", coarse)
    with pytest.raises(GateError, match="'passed': False") as refused:
        gate(magnified, tokens(90)[0])
    assert "'parallel_vs_recurrent_float32': " in str(refused.value)
