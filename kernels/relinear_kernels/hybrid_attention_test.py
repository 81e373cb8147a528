"""The fused hybrid against its chunked torch form in float64: on a GPU where there is one, else in Triton's
interpreter."""

import pytest
import torch

from relinear_kernels.hybrid_attention import hybrid_attention
from relinear_kernels.hybrid_attention_reference import HybridState, hybrid_state
from relinear_kernels.hybrid_attention_reference import hybrid_attention as chunked
from relinear_kernels.linear_attention_reference import LinearState
from relinear_kernels.testing import DEVICE, DTYPES, check, of_key_heads, relative

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_path")
B = 2
# length, D, F', H, Hkv, feature, window, left padding, state
SMALL = [
    (1, 16, 16, 1, 1, "softmax_pm", 16, False, False),
    (15, 16, 16, 3, 1, "softmax_pm", 5, True, True),
    (100, 16, 16, 2, 1, "softmax_pm", 16, False, False),
    (70, 16, 16, 2, 2, "relu", 40, True, True),
    (70, 32, 32, 1, 1, "none", 64, False, False),
]
LARGE = [
    (length, dim, width, heads, groups, feature, window, (i + j) % 2 == 0, (i + j // 2) % 2 == 0)
    for i, dim in enumerate((64, 128))
    for j, (heads, groups, feature, width, window) in enumerate(
        [
            (4, 1, "softmax_pm", 64, 64),
            (3, 3, "softmax_pm", 64, 16),
            (4, 2, "softmax_pm", 128, 128),
            (2, 1, "relu", 64, 64),
        ]
    )
    for length in (1, 15, 63, 64, 65, 128, 300)
]
CASES = LARGE if DEVICE == "cuda" else SMALL


def inputs(length, dim, width, heads, groups, feature, state=False, batch=B):
    r = lambda *s: torch.randn(*s)  # noqa: E731
    args = {
        "q": r(batch, length, heads, dim),
        "k": r(batch, length, groups, dim),
        "v": r(batch, length, groups, dim),
    }
    if feature == "none":
        args["q"], args["k"], width = args["q"].abs(), args["k"].abs(), dim
    else:
        args |= {"w_q": r(heads, dim, width) / dim**0.5, "w_k": r(heads, dim, width) / dim**0.5}
    args["gamma"] = torch.rand(heads) + 0.1
    if state:
        features = width * (2 if feature == "softmax_pm" else 1)
        args |= {"kv": r(batch, heads, features, dim), "z": r(batch, heads, features).abs() + 1}
    return args


def call(op, args, options):
    args, options = dict(args), dict(options)
    q, k = args["q"], args["k"]
    if "z" in args:
        kv, z = args.pop("kv"), args.pop("z")
        ring = hybrid_state(
            q.shape[0],
            q.shape[2],
            k.shape[2],
            k.shape[3],
            1,
            window=options["window"],
            device=q.device,
            dtype=z.dtype,
        ).ring
        g = torch.Generator().manual_seed(2)
        old = lambda x: torch.randn(x.shape, generator=g).to(q.dtype).to(x)  # noqa: E731
        ring = ring._replace(k=old(ring.k).abs(), v=old(ring.v), mask=torch.ones_like(ring.mask))
        options["initial_state"] = HybridState(ring, LinearState(kv, z, torch.full_like(z, -torch.inf)))
        y, s = op(
            **{n: x for n, x in args.items() if n != "gamma"},
            window_factor=args["gamma"],
            return_state=True,
            **options,
        )
        return {"out": y, "kv": s.linear.kv, "z": s.linear.z}
    return {
        "out": op(**{n: x for n, x in args.items() if n != "gamma"}, window_factor=args["gamma"], **options)
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fused_equals_definition(case, dtype):
    length, dim, width, heads, groups, feature, window, masked, state = case
    if dtype == torch.float32 and DEVICE == "cuda" and (dim > 64 or length > 128):
        pytest.skip("float32 products are slow: the small cases suffice")
    mask = torch.arange(length).expand(B, -1) >= torch.tensor([[0], [length // 3]]) if masked else None
    options = {"feature": feature, "window": window, "key_mask": mask}
    args = inputs(length, dim, width, heads, groups, feature, state)
    # at these lengths a key or two lie beyond the window, so that what reaches w_k and q through them cancels
    # too (see CANCELLING)
    check(
        lambda x, o: call(hybrid_attention, x, o),
        lambda x, o: call(chunked, x, o),
        args,
        options,
        dtype,
        ("gamma",),
        7.0,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_maps_of_key_heads_equal_definition(dtype):
    length, dim = (300, 64) if DEVICE == "cuda" else (50, 16)
    args = of_key_heads(inputs(length, dim, 32, 6, 2, "softmax_pm", True), 2)
    check(
        lambda x, o: call(hybrid_attention, x, o),
        lambda x, o: call(chunked, x, o),
        args,
        {"window": 16},
        dtype,
        ("gamma",),
        7.0,
    )


@pytest.mark.parametrize("only", ["w_k", "gamma", "v"])
def test_a_gradient_asked_for_alone_is_the_same(only):
    args = {n: x.to(DEVICE) for n, x in inputs(50, 16, 16, 2, 1, "softmax_pm").items()}
    options = {"feature": "softmax_pm", "window": 16}
    every = {n: x.clone().requires_grad_() for n, x in args.items()}
    want = torch.autograd.grad(call(hybrid_attention, every, options)["out"].square().sum(), every[only])[0]
    args[only].requires_grad_()
    assert torch.equal(
        torch.autograd.grad(call(hybrid_attention, args, options)["out"].square().sum(), args[only])[0], want
    )


@pytest.mark.parametrize("cuts", [(40, 1, 29), (3, 64, 3)])
def test_pieces_equal_the_whole(cuts):
    args = {n: x.to(DEVICE) for n, x in inputs(70, 16, 16, 2, 1, "softmax_pm").items()}
    rest = {"w_q": args["w_q"], "w_k": args["w_k"], "window_factor": args["gamma"], "window": 16}
    state, out, at = None, [], 0
    for c in cuts:
        piece = {n: args[n][:, at : at + c] for n in "qkv"}
        y, state = hybrid_attention(**piece, **rest, initial_state=state, return_state=True)
        out.append(y)
        at += c
    assert relative(torch.cat(out, 1), hybrid_attention(**{n: args[n] for n in "qkv"}, **rest)) < 1e-5


def test_packed_sequences_equal_each_alone():
    lengths = [3, 40, 1, 17] if DEVICE == "cpu" else [3, 640, 1, 333, 64]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device=DEVICE)
    args = inputs(sum(lengths), 16, 16, 2, 1, "softmax_pm", batch=1)

    def each(x, options):
        rest = {n: x[n] for n in ("w_q", "w_k", "gamma")}
        pieces = zip(*(x[n].split(lengths, 1) for n in "qkv"), strict=True)
        return {
            "out": torch.cat(
                [call(chunked, {"q": q, "k": k, "v": v, **rest}, options)["out"] for q, k, v in pieces], 1
            )
        }

    fused = lambda x, o: call(hybrid_attention, x, {**o, "cu_seqlens": cu})  # noqa: E731
    check(fused, each, args, {"window": 16}, torch.float32)


def test_what_the_kernels_do_not_support_is_named():
    args = {n: x.to(DEVICE) for n, x in inputs(4, 24, 16, 1, 1, "softmax_pm").items()}
    with pytest.raises(ValueError, match=r"head widths and feature counts of \(16, 32, 64, 128\); got .*24"):
        call(hybrid_attention, args, {"window": 4})
