"""Denominators: outputs do not depend on the scale of the features, and every row's weights sum to 1 where
there is anything to divide by."""

import pytest
import torch

from relinear_kernels.attention_cross_entropy import attention_cross_entropy
from relinear_kernels.gated_linear_attention import gated_linear_attention
from relinear_kernels.hybrid_attention import hybrid_attention
from relinear_kernels.linear_attention import linear_attention
from relinear_kernels.linear_attention_reference import linear_attention_weights, normaliser
from relinear_kernels.testing import DEVICE, relative

B, T, H, G, D = 2, 20, 2, 1, 16
PATHS = ("reference", "torch", "triton")
SCALES = (1e-6, 1e-3, 1e6)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """Every form of an op, in the dtype that holds it most exactly."""
    if request.param == "triton":
        pytest.importorskip("triton")
    monkeypatch.setenv("RELINEAR_KERNELS", request.param)
    return request.param


def dtype_of(path: str) -> torch.dtype:
    return torch.float32 if path == "triton" else torch.float64


def numbers(dtype: torch.dtype, gated: str | None = None) -> dict:
    """Positive queries and keys, so that they are features, and values and gates, all with gradients."""
    g = torch.Generator().manual_seed(0)
    r = lambda *n: torch.randn(*n, generator=g, dtype=torch.float64).to(DEVICE, dtype)  # noqa: E731
    args = {"q": r(B, T, H, D).abs(), "k": r(B, T, G, D).abs(), "v": r(B, T, G, D)}
    if gated is not None:
        args[gated] = torch.nn.functional.logsigmoid(r(B, T, H, D) if gated == "log_gate" else r(B, T, H))
    return {n: x.requires_grad_() for n, x in args.items()}


CASES = [(linear_attention, None), (linear_attention, "log_decay"), (gated_linear_attention, "log_gate")]


@pytest.mark.parametrize("feature", ["relu", "none"])
@pytest.mark.parametrize("op, gated", CASES)
@pytest.mark.parametrize("scale", SCALES)
def test_outputs_and_gradients_do_not_depend_on_the_scale_of_the_features(path, scale, op, gated, feature):
    def run(scale):
        args = numbers(dtype_of(path), gated)
        given = args | {n: scale * args[n] for n in "qk"}
        out = op(**given, feature=feature)
        return out, *torch.autograd.grad(out.square().sum(), list(args.values()))

    for got, want in zip(run(scale), run(1.0), strict=True):
        assert relative(got, want) < TOLERANCE[got.dtype]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("form", ["torch", "triton"])
@pytest.mark.parametrize("op, gated", CASES)
def test_nor_do_they_one_token_at_a_time(monkeypatch, form, scale, op, gated):
    if form == "triton":
        pytest.importorskip("triton")
    monkeypatch.setenv("RELINEAR_KERNELS", form)
    args = {n: x.detach() for n, x in numbers(dtype_of(form), gated).items()}
    whole, state, out = op(**args, feature="none"), None, []
    for t in range(T):
        given = {n: x[:, t : t + 1] for n, x in args.items()}
        y, state = op(
            **given | {n: scale * given[n] for n in "qk"},
            feature="none",
            initial_state=state,
            return_state=True,
        )
        out.append(y)
    assert relative(torch.cat(out, 1), whole) < TOLERANCE[whole.dtype]


@pytest.mark.parametrize("scale", SCALES)
def test_the_loss_does_not_depend_on_the_scale_of_the_features(path, scale):
    def run(scale):
        q, k, _ = numbers(dtype_of(path)).values()
        features = [x.detach().repeat_interleave(H // x.shape[2], 2).requires_grad_() for x in (q, k)]
        loss = attention_cross_entropy(q, k, *(scale * x for x in features), scale=0.25)
        return loss, *torch.autograd.grad(loss.sum(), features)

    for got, want in zip(run(scale), run(1.0), strict=True):
        assert relative(got, want) < TOLERANCE[got.dtype]


def test_all_forms_that_are_not_causal_keep_the_scale_out_too():
    q, k, v = (x.detach() for x in numbers(torch.float64).values())
    got, want = (linear_attention(s * q, s * k, v, feature="none", causal=False) for s in (1e-6, 1.0))
    assert relative(got, want) < 1e-12


@pytest.mark.parametrize("op", [linear_attention, gated_linear_attention, hybrid_attention])
def test_the_first_token_is_its_own_value_however_sharp_its_features_are(path, op):
    """A trained map's query and key may have their large features apart: their product is then near the floor
    of softmax_pm, 1e-12."""
    dtype = dtype_of(path)
    q, k = torch.zeros(2, 1, 1, 1, D, device=DEVICE, dtype=dtype).unbind()
    q[..., 0], k[..., 1] = 40.0, 40.0
    v = torch.randn(1, 1, 1, D, device=DEVICE, dtype=dtype)
    options = {}
    if op is gated_linear_attention:
        options = {"log_gate": torch.zeros(1, 1, 1, D, device=DEVICE, dtype=dtype)}
    if op is hybrid_attention:
        options = {"window": 1, "window_factor": torch.full((1,), 1e-12, device=DEVICE, dtype=dtype)}
    assert relative(op(q, k, v, **options), v) < TOLERANCE[dtype]


def test_a_signed_sum_of_weights_divides_as_it_is(path):
    """SUPRA's ablation: turned features have products of both signs, and so have their sums. Weights still
    sum to 1, and no two forms differ."""
    args = {n: x.detach() for n, x in numbers(torch.float64).items()}
    args["q"] = args["q"] * torch.where(torch.arange(D, device=DEVICE) < 6, 1.0, -1.0)
    weights = linear_attention_weights(args["q"], args["k"], feature="none")
    sums = linear_attention_weights(args["q"], args["k"], feature="none", normalize=False).sum(-1)
    assert (sums < 0).any()
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(sums))
    given = {n: x.to(dtype_of(path)).requires_grad_() for n, x in args.items()}
    out = linear_attention(**given, feature="none")
    exact = {n: x.requires_grad_() for n, x in args.items()}
    want = (weights @ exact["v"].repeat_interleave(H // G, 2).transpose(1, 2)).transpose(1, 2)
    assert relative(out, want) < 20 * TOLERANCE[out.dtype]  # small sums cancel
    gradients = torch.autograd.grad(out.sum(), list(given.values()))
    assert all(g.isfinite().all() for g in gradients)


def test_a_row_that_has_nothing_to_divide_by_is_zero_and_so_is_its_gradient(path):
    args = numbers(dtype_of(path))
    out = linear_attention(**args | {"q": -args["q"]}, feature="relu")
    assert not out.any()
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), list(args.values())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_only_what_the_dtype_cannot_tell_from_zero_becomes_one(dtype):
    least = torch.finfo(dtype).tiny / torch.finfo(dtype).eps
    sums = torch.tensor([0.0, least / 2, -least / 2, 2 * least, -2 * least, 1e-12, -1e-12, 5.0], dtype=dtype)
    assert normaliser(sums).tolist() == [1.0, 1.0, 1.0, *sums[3:].tolist()]
