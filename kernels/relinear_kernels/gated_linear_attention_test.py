"""The fused gated linear attention against its definition in float64: on a GPU where there is one, else in
Triton's interpreter."""

import pytest
import torch

from relinear_kernels.dispatch import per_sequence
from relinear_kernels.gated_linear_attention import gated_linear_attention
from relinear_kernels.gated_linear_attention_reference import gated_linear_attention as chunked
from relinear_kernels.linear_attention import linear_attention
from relinear_kernels.linear_attention_test import call
from relinear_kernels.linear_attention_test import inputs as ungated
from relinear_kernels.testing import DEVICE, DTYPES, check, of_key_heads, relative

pytest.importorskip("triton")
from relinear_kernels import gated_linear_attention_triton, linear_attention_triton  # noqa: E402
from relinear_kernels.linear_attention_triton import Config  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("triton_path"),
    # pairs nobody sees, and blocks that the other form writes again
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]
B = 2
# length, D, F', H, Hkv, feature, normalize, initial state, left padding
SMALL = [
    (1, 16, 16, 1, 1, "softmax_pm", True, False, False),
    (15, 16, 32, 3, 1, "softmax_pm", True, True, True),
    (40, 16, 16, 2, 2, "softmax_pm", True, True, False),
    (33, 32, 16, 1, 1, "softmax_pm", False, False, True),
    (31, 16, 32, 2, 1, "relu", False, True, False),
    (17, 32, 16, 1, 1, "elu", True, False, False),
    (16, 16, 16, 2, 1, "none", True, False, False),
]
LARGE = [
    (length, dim, width, heads, groups, feature, normalize, state, masked)
    for i, (dim, width) in enumerate((d, f) for d in (64, 128) for f in (32, 64, 128))
    for heads, groups, feature, normalize, state, masked in [
        (4, 1, "softmax_pm", True, bool(i % 2), i % 3 == 0),
        (3, 3, ("relu", "elu", "none")[(i + i // 3) % 3], bool(i % 2), bool(i % 3), False),
    ]
    for length in (1, 15, 63, 64, 65, 128, 300)
] + [(2048, 128, 64, 4, 1, "softmax_pm", n, True, False) for n in (True, False)]
CASES = LARGE if DEVICE == "cuda" else SMALL
GATES = [(0.0, 1.0), (0.0, 3.0), (-2.0, 3.0)]  # log sigmoid of normal numbers with this mean and spread


def inputs(length, dim, width, heads, groups, feature, state=False, gate=(1.0, 2.0), batch=B, scale=1.0):
    args = ungated(length, dim, width, heads, groups, feature, None, state, scale, batch=batch)
    width = args["w_q"].shape[-1] if "w_q" in args else dim
    return args | {
        "log_gate": torch.nn.functional.logsigmoid(
            gate[0] + gate[1] * torch.randn(batch, length, heads, width)
        )
    }


def fused(x, o):
    return call(gated_linear_attention, x, **o)


def definition(x, o):
    return call(chunked, x, **o)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fused_equals_definition(case, dtype):
    length, dim, width, heads, groups, feature, normalize, state, masked = case
    if dtype == torch.float32 and DEVICE == "cuda" and (dim > 64 or width > 64 or length > 128):
        pytest.skip("float32 products are slow: the small cases suffice")
    mask = torch.arange(length).expand(B, -1) >= torch.tensor([[0], [length // 3]]) if masked else None
    options = {"feature": feature, "normalize": normalize, "key_mask": mask}
    # the gates' gradient sums terms that cancel (see CANCELLING)
    check(
        fused,
        definition,
        inputs(length, dim, width, heads, groups, feature, state),
        options,
        dtype,
        ("log_gate",),
        1.0,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_maps_of_key_heads_equal_definition(dtype):
    length, dim = (300, 64) if DEVICE == "cuda" else (40, 16)
    check(
        fused,
        definition,
        of_key_heads(inputs(length, dim, 32, 6, 2, "softmax_pm", True), 2),
        {},
        dtype,
        ("log_gate",),
    )


def blocks(monkeypatch, block, limit=None):
    """Steps of so many rows, as bfloat16 has them, and where they stop being mild."""
    small = Config(block, 16, 1, 16, 2)
    monkeypatch.setattr(linear_attention_triton, "config", lambda *args: small)
    if limit is not None:
        monkeypatch.setattr(gated_linear_attention_triton, "MILD", limit)


def gates(kind, *shape):
    """Gates that all steps of 64 rows can take, that none can, or either by turns of 48 rows."""
    g = torch.randn(*shape)
    mild, hard = torch.nn.functional.logsigmoid(g + 3), torch.nn.functional.logsigmoid(3 * g - 4)
    if kind == "mixed":
        return torch.where((torch.arange(shape[1]) // 48 % 2 == 0)[:, None, None], mild, hard)
    return mild if kind == "mild" else hard


@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize("kind", ["mild", "hard", "mixed"])
def test_blocks_of_bfloat16_equal_the_definition_in_float32(kind, block, monkeypatch):
    blocks(monkeypatch, block)
    length = 150 if kind == "mixed" else 100
    args = inputs(length, 16, 16, 2, 1, "softmax_pm", True) | {"log_gate": gates(kind, B, length, 2, 16)}
    mask = torch.arange(length).expand(B, -1) >= torch.tensor([[0], [70]])
    # as padding has it: else the given state fades beyond float32 there, with nothing beside it
    args["log_gate"] *= mask[..., None, None]
    check(fused, definition, args, {"key_mask": mask}, torch.float32, ("log_gate",))


@pytest.mark.parametrize("feature, normalize", [("none", True), ("relu", False)])
def test_blocks_of_one_sided_features_equal_the_definition(feature, normalize, monkeypatch):
    blocks(monkeypatch, 64)
    args = inputs(100, 16, 16, 2, 1, feature, False) | {"log_gate": gates("mixed", B, 100, 2, 16)}
    args |= {n: args[n].abs() for n in "qk"}  # so that denominators do not cancel
    check(fused, definition, args, {"feature": feature, "normalize": normalize}, torch.float32, ("log_gate",))


def test_gates_choose_the_steps_of_a_segment(monkeypatch):
    args = {
        n: x.to(DEVICE).requires_grad_() for n, x in inputs(70, 16, 16, 1, 1, "softmax_pm", batch=3).items()
    }
    log_gate = torch.cat([gates(kind, 1, 70, 1, 16) for kind in ("mild", "hard", "mixed")]).to(DEVICE)
    found = {}
    for name, limit in {"chosen": None, "coarse": -torch.inf, "fine": 1.0}.items():
        with monkeypatch.context() as patch:
            blocks(patch, 64, limit)
            out = call(gated_linear_attention, args | {"log_gate": log_gate})["out"]
            found[name] = [out, *torch.autograd.grad(out.square().sum(), [args[n] for n in "qkv"])]
    for chosen, coarse, fine in zip(*found.values(), strict=True):  # a sequence is a segment
        assert torch.equal(chosen[0], coarse[0]) and torch.equal(chosen[1:], fine[1:])
        assert not torch.equal(chosen[0], fine[0]) and not torch.equal(chosen[1], coarse[1])


@pytest.mark.parametrize("kind", ["mild", "mixed"])
def test_a_sequence_cut_into_segments_equals_definition(kind, monkeypatch):
    blocks(monkeypatch, 64)
    monkeypatch.setattr(linear_attention_triton, "segment_length", lambda *args: 64)
    args = inputs(150, 16, 16, 2, 1, "softmax_pm", True) | {"log_gate": gates(kind, B, 150, 2, 16)}
    mask = torch.arange(150).expand(B, -1) >= torch.tensor([[0], [70]])
    args["log_gate"] *= mask[..., None, None]
    check(fused, definition, args, {"key_mask": mask}, torch.float32, ("log_gate",))


@pytest.mark.parametrize("only", ["w_k", "v", "log_gate"])
def test_a_gradient_asked_for_alone_is_the_same(only):
    args = {n: x.to(DEVICE) for n, x in inputs(20, 16, 16, 2, 1, "softmax_pm", True).items()}
    every = {n: x.clone().requires_grad_() for n, x in args.items()}
    want = torch.autograd.grad(call(gated_linear_attention, every)["out"].square().sum(), every[only])[0]
    args[only].requires_grad_()
    assert torch.equal(
        torch.autograd.grad(call(gated_linear_attention, args)["out"].square().sum(), args[only])[0], want
    )


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_adversarial_gates_equal_the_definition(gate):
    length, dim = (300, 64) if DEVICE == "cuda" else (33, 16)
    for dtype in DTYPES:
        check(
            fused,
            definition,
            inputs(length, dim, 32, 2, 1, "softmax_pm", gate=gate),
            {},
            dtype,
            ("log_gate",),
        )


@pytest.mark.parametrize("block", [None, 64])
@pytest.mark.parametrize("hard", [-1e4, -torch.inf])
def test_a_closed_gate_and_large_features_stay_finite(hard, block, monkeypatch):
    if block is not None:
        blocks(monkeypatch, block)
    args = inputs(70, 16, 16, 1, 1, "softmax_pm", scale=12.0)
    args["log_gate"][:, 20:60:3] = hard
    for dtype in DTYPES:
        x = {n: y.to(DEVICE, y.dtype if n == "log_gate" else dtype).requires_grad_() for n, y in args.items()}
        out = call(gated_linear_attention, x)["out"]
        grads = torch.autograd.grad(out.float().square().sum(), x.values())
        assert out.isfinite().all() and all(g.isfinite().all() for g in grads)


def test_equal_gates_of_all_channels_are_a_scalar_gate():
    args = {n: x.to(DEVICE) for n, x in ungated(40, 16, 16, 2, 1, "softmax_pm", "token", False).items()}
    gate = args.pop("log_decay").clamp(min=-8)
    got = gated_linear_attention(**args, log_gate=gate[..., None].expand(-1, -1, -1, 16))
    assert relative(got, linear_attention(**args, log_decay=gate)) < 1e-5


@pytest.mark.parametrize("block", [None, 64])
def test_packed_sequences_equal_each_alone(block, monkeypatch):
    lengths = [3, 20, 1, 17] if DEVICE == "cpu" else [3, 640, 1, 333, 64]
    args = {}
    if block is not None:
        blocks(monkeypatch, block)
        lengths = [3, 100, 1, 64, 49]
        args["log_gate"] = gates("mixed", 1, sum(lengths), 2, 16)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device=DEVICE)
    args = inputs(sum(lengths), 16, 16, 2, 1, "softmax_pm", batch=1) | args
    kv = torch.randn(len(lengths), 2, 32, 16)

    def packed(return_state, initial_state, **x):
        tokens = {n: x[n] for n in ("q", "k", "v", "log_gate")}
        return per_sequence(
            chunked,
            cu,
            tokens,
            {"w_q": x["w_q"], "w_k": x["w_k"], "return_state": return_state},
            initial_state,
        )

    args |= {"kv": kv, "z": kv.abs().sum(-1)}
    check(
        lambda x, o: call(gated_linear_attention, x, cu_seqlens=cu),
        lambda x, o: call(packed, x),
        args,
        {},
        torch.float32,
        ("log_gate",),
    )


@pytest.mark.parametrize("cuts", [(20, 1, 19), (3, 34, 3)])
def test_pieces_equal_the_whole(cuts):
    args = {n: x.to(DEVICE) for n, x in inputs(40, 16, 16, 2, 1, "softmax_pm").items()}
    rest, state, out, at = {n: args[n] for n in ("w_q", "w_k")}, None, [], 0
    for c in cuts:
        piece = {n: args[n][:, at : at + c] for n in ("q", "k", "v", "log_gate")}
        y, state = gated_linear_attention(**piece, **rest, initial_state=state, return_state=True)
        out.append(y)
        at += c
    assert relative(torch.cat(out, 1), gated_linear_attention(**args)) < 1e-5


def test_what_is_not_supported_is_named():
    args = {n: x.to(DEVICE) for n, x in inputs(4, 16, 16, 1, 1, "softmax_pm").items()}
    with pytest.raises(ValueError, match="takes the features softmax_pm, relu, elu, none; got 'exp_pm'"):
        gated_linear_attention(**args, feature="exp_pm")
    with pytest.raises(ValueError, match=r"log_gate must be \[B=2, T=4, H=1, F=16\]; got \[2, 4, 1, 32\]"):
        gated_linear_attention(**args | {"log_gate": args["log_gate"].repeat(1, 1, 1, 2)})
    with pytest.raises(ValueError, match="the dtypes torch.bfloat16, torch.float32; got .*torch.float16"):
        gated_linear_attention(**{n: x.half() for n, x in args.items()})
