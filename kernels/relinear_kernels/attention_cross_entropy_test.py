"""The fused cross-entropy against its definition in float64: on a GPU where there is one, else in Triton's
interpreter."""

import pytest
import torch

from relinear_kernels.attention_cross_entropy import attention_cross_entropy
from relinear_kernels.attention_cross_entropy_reference import attention_cross_entropy as quadratic
from relinear_kernels.testing import DEVICE, DTYPES, check, relative

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_path")
B = 2
# products of float32 numbers are tf32's there: 2e-3 of the loss, 1e-2 of a gradient
TF32 = 200 if DEVICE == "cuda" else 1
# length, D, F, H, Hkv, window, left padding
SMALL = [
    (1, 16, 16, 1, 1, None, False),
    (15, 16, 32, 3, 1, None, True),
    (64, 32, 16, 2, 2, None, False),
    (70, 16, 32, 6, 2, 16, True),
    (130, 16, 64, 2, 1, None, False),
    (131, 16, 16, 1, 1, 40, True),
]
LARGE = [
    (length, dim, features, heads, groups, window, (length + features) % 2 == 0)
    for dim, features in ((64, 64), (64, 128), (128, 128), (128, 256))
    for heads, groups, window in ((4, 1, None), (3, 3, 64))
    for length in (1, 15, 63, 64, 65, 128, 300)
]
CASES = LARGE if DEVICE == "cuda" else SMALL


def inputs(length, dim, features, heads, groups, spread=1.0):
    """Queries and keys whose scores spread far, and features of any scale above zero."""
    args = {"q": spread * torch.randn(B, length, heads, dim), "k": torch.randn(B, length, groups, dim)}
    return args | {n: torch.randn(B, length, heads, features).exp() for n in ("phi_q", "phi_k")}


def agree(args, dtype=torch.float32, **options):
    """Loss and gradients of the features against the definition; q and k have none in either."""
    teacher = {n: args.pop(n).to(DEVICE, dtype) for n in ("q", "k")}
    fused = lambda x, o: {"loss": attention_cross_entropy(**teacher, **x, **o)}  # noqa: E731
    definition = lambda x, o: {"loss": quadratic(*(t.double() for t in teacher.values()), **x, **o)}  # noqa: E731
    check(fused, definition, args, options, torch.float32, times=TF32)


def padding(length):
    return torch.arange(length).expand(B, -1) >= torch.tensor([[0], [length // 3]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fused_equals_definition(case, dtype):
    length, dim, features, heads, groups, window, masked = case
    agree(
        inputs(length, dim, features, heads, groups),
        dtype,
        scale=dim**-0.5,
        window=window,
        key_mask=padding(length) if masked else None,
    )


def logarithms(args, spread=1.0):
    """The logarithms of the features, `spread` times as far apart."""
    return args | {n: spread * args[n].log() for n in ("phi_q", "phi_k")}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_logarithms_of_features(case, dtype):
    length, dim, features, heads, groups, window, masked = case
    mask = padding(length) if masked else None
    agree(
        logarithms(inputs(length, dim, features, heads, groups)),
        dtype,
        log=True,
        scale=dim**-0.5,
        window=window,
        key_mask=mask,
    )


@pytest.mark.parametrize("order", [1, -1])
def test_features_whose_size_no_float_holds(order):
    """Logarithms that rise or fall by 600 over a sequence, and spread by 20 within a token: more than
    float32's range either way."""
    args = logarithms(inputs(100, 16, 16, 2, 1), spread=5.0)
    rise = order * torch.linspace(-300, 300, 100)[None, :, None, None]
    agree({n: x + rise if n.startswith("phi") else x for n, x in args.items()}, log=True, scale=0.25)


def test_the_scale_of_logarithms_cancels():
    args = {n: x.to(DEVICE) for n, x in logarithms(inputs(70, 16, 32, 2, 2)).items()}
    same = args | {"phi_q": args["phi_q"] + 128.0, "phi_k": args["phi_k"] - 64.0}
    assert relative(*(attention_cross_entropy(**x, log=True, scale=0.25) for x in (same, args))) < 1e-5


@pytest.mark.parametrize("log", [False, True])
def test_a_row_that_sees_nothing_is_zero(log):
    mask = padding(70)
    args = {n: x.to(DEVICE) for n, x in inputs(70, 16, 16, 1, 1).items()}
    got = attention_cross_entropy(**args, log=log, scale=1.0, key_mask=mask.to(DEVICE))
    assert not got[1, : 70 // 3].any() and got[0, 1:].all()  # a first query sees itself alone


def test_scores_that_spread_far():
    # bfloat16 on a GPU: tf32 would be 0.1 off such scores
    agree(inputs(100, 16, 16, 2, 1, spread=30.0), DTYPES[0], scale=1.0)


def test_weights_below_the_floor_and_denominators_below_eps_are_clamped():
    """Keys of no features, keys of tiny ones, queries of none; a clamped weight or denominator has no
    gradient."""
    args = inputs(100, 16, 16, 2, 1)
    args["phi_k"][:, ::3] = 0.0
    args["phi_k"][:, 1::9] *= 1e-16
    args["phi_q"][:, 5::7] = 0.0
    agree(args, scale=0.25)


def test_the_gradient_of_one_side_alone_is_the_same():
    args = {n: x.to(DEVICE) for n, x in inputs(40, 16, 16, 2, 1).items()}
    every = {n: x.clone().requires_grad_(n.startswith("phi")) for n, x in args.items()}
    want = torch.autograd.grad(attention_cross_entropy(**every, scale=0.25).mean(), every["phi_k"])[0]
    args["phi_k"].requires_grad_()
    assert torch.equal(
        torch.autograd.grad(attention_cross_entropy(**args, scale=0.25).mean(), args["phi_k"])[0], want
    )


@pytest.mark.parametrize("log", [False, True])
def test_the_same_input_twice_gives_the_same_bits(log):
    args = {
        n: x.to(DEVICE).requires_grad_(n.startswith("phi"))
        for n, x in inputs(512 if DEVICE == "cuda" else 70, 16, 16, 4, 2).items()
    }
    run = lambda: torch.autograd.grad(  # noqa: E731
        attention_cross_entropy(**args, log=log, scale=0.25).mean(), (args["phi_q"], args["phi_k"])
    )
    for a, b in zip(run(), run(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("length", [256, 250])
def test_a_recorded_graph_replays_on_new_numbers(length, log):
    """Run from warm kernels of another length: nothing is compiled, tuned or read on the host while
    recording."""
    fresh = lambda t: {n: x.to(DEVICE) for n, x in inputs(t, 64, 128, 3, 1).items()}  # noqa: E731

    def run(args):
        phi = [args[n].requires_grad_() for n in ("phi_q", "phi_k")]
        loss = attention_cross_entropy(**args, log=log, scale=0.125)
        return loss, *torch.autograd.grad(loss.mean(), phi)

    run(fresh(100))
    args, new = fresh(length), fresh(length)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(args)
    for n, x in new.items():
        args[n].data.copy_(x)
    graph.replay()
    want = run(new)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_what_the_kernels_do_not_support_is_named():
    args = {n: x.to(DEVICE) for n, x in inputs(4, 24, 16, 3, 1).items()}
    with pytest.raises(ValueError, match=r"head widths and feature counts of \(16, 32, 64, 128\); got .*24"):
        attention_cross_entropy(**args, scale=1.0)
    args = {n: x.to(DEVICE) for n, x in inputs(4, 16, 24, 3, 1).items()}
    with pytest.raises(
        ValueError, match=r"float32 features, \(16, 32, 64, 128, 256\) of them; got 24 of torch.float32"
    ):
        attention_cross_entropy(**args, scale=1.0)
    args = {n: x.to(DEVICE) for n, x in inputs(4, 16, 16, 3, 1).items()}
    with pytest.raises(ValueError, match="float32 features.*torch.float64"):
        attention_cross_entropy(**args | {"phi_q": args["phi_q"].double()}, scale=1.0)
    with pytest.raises(
        ValueError, match=r"phi_q and phi_k of \[B=2, T=4, H=3, F\]; got \[2, 4, 1, 16\] and \[2, 4, 3, 16\]"
    ):
        attention_cross_entropy(**args | {"phi_q": args["phi_q"][:, :, :1]}, scale=1.0)
    with pytest.raises(ValueError, match="multiple of key heads; got 3 query heads and 2 key heads"):
        attention_cross_entropy(**args | {"k": args["q"][:, :, :2]}, scale=1.0)


@pytest.mark.parametrize("path", ["torch", "reference"])
def test_the_other_paths_are_the_definition_in_any_dtype(path, monkeypatch):
    monkeypatch.setenv("RELINEAR_KERNELS", path)
    args = {n: x.double().to(DEVICE) for n, x in inputs(5, 24, 6, 2, 1).items()}
    got = attention_cross_entropy(**args, scale=1.0)
    assert got.dtype == torch.float64 and relative(got, quadratic(**args, scale=1.0)) == 0
