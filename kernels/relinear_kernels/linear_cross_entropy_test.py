"""The loss from the inputs of a vocabulary's layer, in pieces, against whole logits in float64."""

import pytest
import torch

from relinear_kernels import testing
from relinear_kernels.linear_cross_entropy import linear_cross_entropy

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_path")


@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("rows", [5, 12])
def test_pieces_have_the_loss_and_gradients_of_whole_logits(rows, trained, monkeypatch):
    from relinear_kernels import linear_cross_entropy_triton

    monkeypatch.setattr(linear_cross_entropy_triton, "PIECE", 5)
    x, weight = (
        torch.randn(n, 16, device=testing.DEVICE).requires_grad_(need)
        for n, need in zip((rows, 40), trained, strict=True)
    )
    labels = torch.randint(40, (rows,), device=testing.DEVICE)
    labels[3] = -100
    loss = linear_cross_entropy(x, weight, labels)
    (loss / 7).backward()
    exact, exact_weight = (y.detach().double().requires_grad_() for y in (x, weight))
    want = torch.nn.functional.cross_entropy(exact @ exact_weight.T, labels, reduction="sum")
    (want / 7).backward()
    assert testing.relative(loss, want) < 1e-5
    for got, expected in ((x, exact), (weight, exact_weight)):
        assert (got.grad is not None) == got.requires_grad
        assert got.grad is None or testing.relative(got.grad, expected.grad) < 5e-5


def test_shapes_that_do_not_fit_are_refused():
    x, weight = torch.zeros(4, 16, device=testing.DEVICE), torch.zeros(40, 8, device=testing.DEVICE)
    with pytest.raises(ValueError, match=r"x \[N, D\] and a weight \[V, D\]"):
        linear_cross_entropy(x, weight, torch.zeros(4, dtype=torch.long, device=testing.DEVICE))
