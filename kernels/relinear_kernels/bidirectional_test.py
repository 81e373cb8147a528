"""Linear attention that is not causal: the form that is linear in length against the quadratic definition;
order of keys, padding, grouped heads."""

import pytest
import torch

from relinear_kernels.attention_cross_entropy import attention_cross_entropy
from relinear_kernels.attention_cross_entropy_reference import cross_entropy, softmax_weights
from relinear_kernels.features import ACTIVATIONS, EXPONENTIAL
from relinear_kernels.linear_attention import linear_attention
from relinear_kernels.linear_attention_reference import (
    linear_attention_quadratic,
    linear_attention_weights,
    linear_features,
    linear_state,
)
from relinear_kernels.testing import relative

D, F = 8, 6
FEATURES = [f for f in (*ACTIVATIONS, *EXPONENTIAL) if f != "none"]
over_features = pytest.mark.parametrize("feature", FEATURES)


def inputs(length=37, heads=6, groups=2, states=None, batch=2):
    g = torch.Generator().manual_seed(0)
    r = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)  # noqa: E731
    return {
        "q": r(batch, length, heads, D),
        "k": r(batch, length, groups, D),
        "v": r(batch, length, groups, D),
        "w_q": r(heads, D, F),
        "w_k": r(states or heads, D, F),
    }


def padded(length=37, batch=2):
    mask = torch.ones(batch, length, dtype=torch.bool)
    mask[0, 5:12] = mask[-1, :3] = False
    return mask


@over_features
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(("heads", "groups", "states"), [(6, 6, 6), (6, 2, 6), (6, 2, 2), (6, 1, 6)], ids=str)
def test_values_and_gradients_are_those_of_the_definition(feature, masked, heads, groups, states):
    found = []
    for op in (linear_attention, linear_attention_quadratic):
        given = {
            name: x.requires_grad_() for name, x in inputs(heads=heads, groups=groups, states=states).items()
        }
        out = op(**given, feature=feature, causal=False, key_mask=padded() if masked else None)
        found.append(
            [
                out,
                *torch.autograd.grad(
                    (out * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)).sum(),
                    given.values(),
                ),
            ]
        )
    for ours, definition in zip(*found, strict=True):
        assert relative(ours, definition) < 1e-10


@over_features
def test_the_order_of_keys_does_not_matter(feature):
    given, order = inputs(), torch.randperm(37, generator=torch.Generator().manual_seed(1))
    moved = {name: x[:, order] if name in ("k", "v") else x for name, x in given.items()}
    out = linear_attention(**given, feature=feature, causal=False, key_mask=padded())
    assert (
        relative(linear_attention(**moved, feature=feature, causal=False, key_mask=padded()[:, order]), out)
        < 1e-12
    )
    assert (
        relative(linear_attention(**given, feature=feature), linear_attention(**moved, feature=feature))
        > 1e-3
    ), "a causal one it would move"


@over_features
def test_padding_leaves_no_trace(feature):
    given, mask = inputs(batch=1), padded(batch=1)
    alone = {name: x[:, mask[0]] if name in ("q", "k", "v") else x for name, x in given.items()}
    wild = {
        name: torch.where(mask[..., None, None], x, 30 * x) if name in ("k", "v") else x
        for name, x in given.items()
    }
    expected = linear_attention(**alone, feature=feature, causal=False)
    for tokens in (given, wild):
        assert (
            relative(
                linear_attention(**tokens, feature=feature, causal=False, key_mask=mask)[:, mask[0]], expected
            )
            < 1e-12
        )


@over_features
def test_every_query_sees_every_real_key_and_no_other(feature):
    given, mask = inputs(), padded()
    weights = linear_attention_weights(
        given["q"], given["k"], given["w_q"], given["w_k"], feature=feature, causal=False, key_mask=mask
    )
    assert not weights[(~mask)[:, None, None].expand_as(weights)].any()
    seen = weights[mask[:, None, None].expand_as(weights)]
    assert (seen >= 0).all() and ((seen > 0).all() or feature == "relu")
    rows = weights.sum(-1)
    assert (
        torch.allclose(rows[rows > 0.5], torch.ones((), dtype=torch.float64))
        and (rows > 0.5).double().mean() > 0.9
    )


@pytest.mark.parametrize("feature", ["softmax_pm", "exp_pm"])
def test_cross_entropy_is_that_of_explicit_weights(feature):
    given, mask = inputs(), padded()
    maps = given["q"], given["k"], given["w_q"], given["w_k"]
    features = linear_features(*maps, feature=feature)
    found = attention_cross_entropy(given["q"], given["k"], *features, scale=0.3, causal=False, key_mask=mask)
    target = softmax_weights(given["q"], given["k"], scale=0.3, key_mask=mask, causal=False)
    expected = cross_entropy(
        target, linear_attention_weights(*maps, feature=feature, causal=False, key_mask=mask)
    )
    assert relative(found, expected) < 1e-10
    assert torch.allclose(target.sum(-1), torch.ones((), dtype=torch.float64))


def test_what_needs_an_order_is_refused():
    given = inputs()
    for wrong in (
        {"log_decay": -torch.ones(6, dtype=torch.float64)},
        {"initial_state": linear_state(2, 6, 2 * F, D)},
        {"cu_seqlens": torch.tensor([0, 37])},
    ):
        with pytest.raises(
            ValueError, match=f"not causal reads a whole sequence at once and takes no {next(iter(wrong))}"
        ):
            linear_attention(**given, **wrong, causal=False)
    assert linear_attention(**given, causal=False, return_state=True)[1] is None


def test_the_definition_can_be_forced(monkeypatch):
    given = inputs()
    expected = linear_attention_quadratic(**given, feature="elu", causal=False)
    monkeypatch.setenv("RELINEAR_KERNELS", "reference")
    assert torch.equal(linear_attention(**given, feature="elu", causal=False), expected)
    with pytest.raises(ValueError, match="takes no return_state"):
        linear_attention(**given, feature="elu", causal=False, return_state=True)
