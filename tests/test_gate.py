"""The gate lets every method through. It stops a model whose two forms differ, that looks ahead, or whose numbers are not finite."""

import pytest
import torch
from test_laws import CASES, name, of, tokens

from relinear.attention.softmax import Method as Softmax
from relinear.linearize.state import RecurrentLayer
from relinear.measure.gate import GateError, gate


@pytest.mark.parametrize("case", CASES, ids=name)
def test_every_method_passes_and_its_figures_are_rounding(case):
    figures = gate(of(case, dtype=torch.float32), tokens(90)[0])
    assert figures["passed"] and figures["finite"]
    assert max(figures["parallel_vs_recurrent"], figures["prefix_consistency"]) < 1e-4


def test_a_decode_path_that_forgets_is_refused(monkeypatch):
    advance = RecurrentLayer.advance
    monkeypatch.setattr(RecurrentLayer, "advance", lambda self, state, n: advance(self, state if n > 1 else self.state, n))
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
