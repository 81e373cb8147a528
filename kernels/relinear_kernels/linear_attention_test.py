"""The fused linear attention against its definition in float64: on a GPU where there is one, else in Triton's
interpreter."""

import pytest
import torch

from relinear_kernels.features import EXPONENTIAL
from relinear_kernels.linear_attention import linear_attention
from relinear_kernels.linear_attention_reference import LinearState, linear_attention_quadratic
from relinear_kernels.linear_attention_reference import linear_attention as chunked
from relinear_kernels.testing import DEVICE, DTYPES, check, of_key_heads, relative

pytest.importorskip("triton")
from relinear_kernels import linear_attention_triton  # noqa: E402

pytestmark = pytest.mark.usefixtures("triton_path")
B = 2
# length, D, F', H, Hkv, feature, gate, normalize, initial state, key mask
SMALL = [
    (1, 16, 16, 1, 1, "softmax_pm", None, True, False, False),
    (15, 16, 32, 3, 1, "softmax_pm", None, True, True, True),
    (65, 16, 16, 3, 3, "softmax_pm", "token", True, False, False),
    (100, 32, 16, 2, 1, "softmax_pm", "token", True, True, True),
    (64, 16, 16, 2, 1, "relu", "head", False, True, False),
    (65, 16, 32, 2, 2, "elu", "token", True, False, False),
    (63, 32, 32, 2, 1, "none", "head", True, False, False),
    (128, 64, 32, 1, 1, "softmax_pm", None, True, False, False),
    (70, 16, 32, 2, 1, "exp_pm", None, True, False, True),
    (40, 16, 16, 2, 2, "exp", "token", True, True, False),
]
# Lengths innermost: workers that share these cases then compile different kernels.
LARGE = [
    (length, dim, width, heads, groups, feature, gate, normalize, state, mask)
    for i, (dim, width) in enumerate((d, f) for d in (64, 128) for f in (32, 64, 128))
    for heads, groups, feature, gate, normalize, state, mask in [
        (4, 1, "softmax_pm", None, True, bool(i % 2), False),
        (3, 3, "softmax_pm", "token", True, not i % 2, i % 3 == 0),
        (4, 2, ("exp_pm", "exp")[i % 2], None, True, bool(i % 2), i % 3 == 0),
        (4, 2, ("relu", "elu", "none")[(i + i // 3) % 3], "head", bool(i % 2), bool(i % 3), False),
    ]
    for length in (1, 15, 63, 64, 65, 128, 300)
] + [(2048, 128, 64, 4, 1, "softmax_pm", g, True, False, False) for g in (None, "head", "token")]
CASES = LARGE if DEVICE == "cuda" else SMALL


def inputs(length, dim, width, heads, groups, feature, gate, state, scale=1.0, spread=3.0, batch=B):
    r = lambda *s: torch.randn(*s)  # noqa: E731
    args = {
        "q": r(batch, length, heads, dim),
        "k": r(batch, length, groups, dim),
        "v": r(batch, length, groups, dim),
    }
    if feature == "none":  # features given: positive ones
        args["q"], args["k"], width = args["q"].abs(), args["k"].abs(), dim
    else:
        args |= {
            "w_q": scale * r(heads, dim, width) / dim**0.5,
            "w_k": scale * r(heads, dim, width) / dim**0.5,
        }
    if feature in ("relu", "elu"):
        args |= {"b_q": r(heads, width), "b_k": r(heads, width)}
    if gate == "head":
        args["log_decay"] = -(2.0 ** -torch.arange(1.0, heads + 1))
    if gate == "token":
        args["log_decay"] = torch.nn.functional.logsigmoid(spread * r(batch, length, heads))
    features = width * (2 if feature.endswith("_pm") else 1)
    if state:
        args |= {"kv": r(batch, heads, features, dim), "z": r(batch, heads, features).abs() + 1}
    return args


def call(op, args, **options):
    args, exponential = dict(args), options.get("feature") in EXPONENTIAL
    if "z" in args:
        kv, z = args.pop("kv"), args.pop("z")
        options["initial_state"] = LinearState(kv, z, torch.full_like(z, 0.0 if exponential else -torch.inf))
    y, s = op(**args, return_state=True, **options)
    if exponential:  # for any reference that the sums are held relative to
        scale = s.shift.exp()
        s = s._replace(kv=s.kv * scale[..., None], z=s.z * scale)
    return {"out": y, "kv": s.kv, "z": s.z}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fused_equals_definition(case, dtype):
    length, dim, width, heads, groups, feature, gate, normalize, state, masked = case
    if dtype == torch.float32 and DEVICE == "cuda" and (dim > 64 or width > 64 or length > 128):
        pytest.skip("float32 products are slow: the small cases suffice")
    args = inputs(length, dim, width, heads, groups, feature, gate, state)
    mask = torch.arange(length).expand(B, -1) >= torch.tensor([[0], [length // 3]]) if masked else None
    options = {"feature": feature, "normalize": normalize, "key_mask": mask}
    check(
        lambda x, o: call(linear_attention, x, **o), lambda x, o: call(chunked, x, **o), args, options, dtype
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "feature, gate, state",
    [
        ("softmax_pm", None, True),
        ("relu", "head", False),
        ("softmax_pm", "token", True),
        ("exp_pm", None, True),
    ],
)
def test_maps_of_key_heads_equal_definition(feature, gate, state, dtype):
    length, dim = (300, 64) if DEVICE == "cuda" else (40, 16)
    args = of_key_heads(inputs(length, dim, 32, 6, 2, feature, gate, state), 2)
    check(
        lambda x, o: call(linear_attention, x, **o),
        lambda x, o: call(chunked, x, **o),
        args,
        {"feature": feature},
        dtype,
    )


@pytest.mark.parametrize("gate", ["head", "token"])
def test_gates_in_float16_which_no_column_can_absorb(gate):
    args = inputs(130, 32, 32, 2, 1, "softmax_pm", gate, True)
    check(
        lambda x, o: call(linear_attention, x, **o),
        lambda x, o: call(chunked, x, **o),
        args,
        {"feature": "softmax_pm"},
        torch.float16,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", [None, "token"])
def test_a_sequence_cut_into_segments_equals_definition(gate, dtype, monkeypatch):
    monkeypatch.setattr(linear_attention_triton, "SEGMENT", 32)
    dim, width = (64, 64) if DEVICE == "cuda" else (32, 16)
    test_fused_equals_definition((100, dim, width, 2, 1, "softmax_pm", gate, True, gate is None, True), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("segment", [32, None])
def test_mild_and_hard_gates_side_by_side_equal_the_definition(segment, dtype, monkeypatch):
    if segment is not None:
        monkeypatch.setattr(linear_attention_triton, "SEGMENT", segment)
    dim, width = (64, 64) if DEVICE == "cuda" else (16, 16)
    length = 200 if DEVICE == "cuda" else 120
    args = inputs(length, dim, width, 3, 1, "softmax_pm", "token", True, spread=1.0)
    args["log_decay"] *= 0.1
    args["log_decay"][:, :, 1] -= 8.0  # a hard head
    args["log_decay"][1, length - 50 : length - 30, 2] = -30.0  # a hard stretch of one sequence
    check(lambda x, o: call(linear_attention, x, **o), lambda x, o: call(chunked, x, **o), args, {}, dtype)


def test_gates_choose_the_launch_that_writes_a_segment(monkeypatch):
    args = {
        n: x.to(DEVICE)
        for n, x in inputs(100, 16, 16, 2, 1, "softmax_pm", "token", False, spread=1.0).items()
    }
    args["log_decay"][:, :, 1] -= 8.0
    found = {}
    for name in ("MILD", "HARD"):
        with monkeypatch.context() as patch:
            only = getattr(linear_attention_triton, name).value
            patch.setattr(linear_attention_triton.Walk, "gates", lambda *_, only=only: (only,))
            # memory that no launch writes stays NaN
            found[name] = call(linear_attention, args)["out"].isnan()
    assert torch.equal(found["MILD"], ~found["HARD"])
    assert found["MILD"][:, :, 1].all()
    assert found["HARD"][:, :, 0].all()


@pytest.mark.parametrize("only", ["w_q", "w_k", "v", "log_decay"])
def test_a_gradient_asked_for_alone_is_the_same(only):
    args = {n: x.to(DEVICE) for n, x in inputs(40, 16, 16, 2, 1, "softmax_pm", "token", True).items()}
    every = {n: x.clone().requires_grad_() for n, x in args.items()}
    want = torch.autograd.grad(call(linear_attention, every)["out"].square().sum(), every[only])[0]
    args[only].requires_grad_()
    assert torch.equal(
        torch.autograd.grad(call(linear_attention, args)["out"].square().sum(), args[only])[0], want
    )


@pytest.mark.parametrize("spread", [1.0, 3.0, -2.0])
@pytest.mark.parametrize("feature, scale", [("softmax_pm", 1.0), ("softmax_pm", 12.0), ("exp_pm", 12.0)])
def test_adversarial_gates_and_features_stay_finite(feature, scale, spread):
    length = 300 if DEVICE == "cuda" else 40
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    args = inputs(length, 64 if DEVICE == "cuda" else 16, 32, 2, 1, feature, "token", False, scale, spread)
    args = {n: (x if n == "log_decay" else x.to(dtype)).to(DEVICE).requires_grad_() for n, x in args.items()}
    args["log_decay"].data[:, length // 2] = -80.0
    y = linear_attention(**args, feature=feature)
    for x in (y, *torch.autograd.grad(y.float().square().sum(), args.values())):
        assert x.isfinite().all()


def test_packed_sequences_equal_each_alone():
    lengths = [3, 64, 1, 33] if DEVICE == "cpu" else [3, 640, 1, 333, 64]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device=DEVICE)
    args = inputs(sum(lengths), 16, 16, 2, 1, "softmax_pm", "token", False, batch=1)
    features = torch.randn(len(lengths), 2, 32, 16)
    args |= {"kv": features, "z": features.abs().sum(-1)}
    check(
        lambda x, o: call(linear_attention, x, cu_seqlens=cu),
        lambda x, o: call(packed, x, cu=cu),
        args,
        {},
        torch.float32,
    )


def packed(cu, return_state, **args):
    from relinear_kernels.dispatch import per_sequence

    tokens = {n: args[n] for n in ("q", "k", "v", "log_decay")}
    rest = {n: args[n] for n in ("w_q", "w_k")}
    return per_sequence(chunked, cu, tokens, {**rest, "return_state": return_state}, args["initial_state"])


@pytest.mark.parametrize("feature", ["softmax_pm", "exp_pm"])
def test_pieces_equal_the_whole(feature):
    args = {n: x.to(DEVICE) for n, x in inputs(70, 16, 16, 2, 1, feature, "token", False).items()}
    rest, state, out = {"w_q": args["w_q"], "w_k": args["w_k"], "feature": feature}, None, []
    for a, b in ((0, 40), (40, 41), (41, 70)):
        piece = {n: args[n][:, a:b] for n in ("q", "k", "v", "log_decay")}
        y, state = linear_attention(**piece, **rest, initial_state=state, return_state=True)
        out.append(y)
    assert relative(torch.cat(out, 1), linear_attention(**args, feature=feature)) < 1e-5


@pytest.mark.parametrize("huge", [-1e4, -1e30, -torch.inf])
def test_what_comes_after_a_huge_decay_is_as_if_nothing_had_come_before(huge):
    args = {n: x.to(DEVICE) for n, x in inputs(40, 16, 16, 2, 1, "softmax_pm", "token", False).items()}
    args["log_decay"] = args["log_decay"] / 100
    args["log_decay"][:, 20] = args["log_decay"][:, 25] = huge
    after = {n: x[:, 25:] if n in ("q", "k", "v", "log_decay") else x for n, x in args.items()}
    given = {n: x.requires_grad_() for n, x in args.items()}
    out = linear_attention(**given)[:, 25:]
    exact = {n: x.detach().double().requires_grad_() for n, x in after.items()}
    exact["log_decay"] = (
        torch.cat([torch.zeros_like(exact["log_decay"][:, :1]), exact["log_decay"][:, 1:]], 1)
        .detach()
        .requires_grad_()
    )
    want = linear_attention_quadratic(**exact)
    assert relative(out, want) < 2e-5
    grads = zip(
        *(torch.autograd.grad(y.square().sum(), x.values()) for y, x in ((out, given), (want, exact))),
        strict=True,
    )
    for n, (g, w) in zip(args, grads, strict=True):
        rows = slice(-14, None) if n in ("q", "k", "v", "log_decay") else slice(None)
        assert relative(*(x[:, rows] if n in ("q", "k", "v", "log_decay") else x for x in (g, w))) < 1e-4, n


def test_the_same_input_twice_gives_the_same_bits():
    args = inputs(512 if DEVICE == "cuda" else 20, 16, 16, 4, 2, "softmax_pm", "token", False)
    args = {n: x.to(DEVICE).requires_grad_() for n, x in args.items()}
    run = lambda: torch.autograd.grad(call(linear_attention, args)["out"].square().sum(), args.values())  # noqa: E731
    for a, b in zip(run(), run(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("cu", [None, [0, 0, 1500, 2600]])
def test_a_gates_gradient_is_summed_from_the_end_of_its_sequence(cu):
    # longer than what a program sums at a time
    batch, length, heads = (2, 1300, 3) if cu is None else (1, 2600, 3)
    cu = None if cu is None else torch.tensor(cu, device=DEVICE)
    q = torch.zeros(batch, length, heads, 16, device=DEVICE)
    walk = linear_attention_triton.Walk.over(q, q, None, "none", cu, gated=True)
    rows, columns = torch.randn(2, 2, heads, batch * length).to(DEVICE)
    ends = torch.randn(walk.cut.sequences, heads).to(DEVICE)
    got = walk.decay_gradient(rows, columns, ends, torch.zeros(batch, length, heads))
    term = (rows - columns).double().sum(0).T.view(batch, length, heads)
    cuts = [*term] if cu is None else term[0].split(cu.diff().tolist())
    want = torch.cat([x.flip(0).cumsum(0).flip(0) + end for x, end in zip(cuts, ends.double(), strict=True)])
    assert relative(got.flatten(0, 1), want) < 1e-6


def test_what_the_kernels_do_not_support_is_named():
    args = {n: x.to(DEVICE) for n, x in inputs(4, 24, 16, 1, 1, "softmax_pm", None, False).items()}
    with pytest.raises(ValueError, match=r"widths and feature counts of \(16, 32, 64, 128\); got .*24"):
        linear_attention(**args)
    args = {n: x.to(DEVICE) for n, x in inputs(4, 16, 16, 1, 1, "softmax_pm", None, False).items()}
    with pytest.raises(ValueError, match="feature 'exp_pm' needs normalize=True"):
        linear_attention(**args, feature="exp_pm", normalize=False)
    with pytest.raises(ValueError, match="takes the dtypes torch.bfloat16.*float64"):
        linear_attention(**args | {"v": args["v"].double()})


def test_float64_is_the_torch_path_only(monkeypatch):
    monkeypatch.setenv("RELINEAR_KERNELS", "torch")
    args = {n: x.double() for n, x in inputs(4, 24, 16, 1, 1, "softmax_pm", None, False).items()}
    assert linear_attention(**args).dtype == torch.float64
    monkeypatch.setenv("RELINEAR_KERNELS", "fast")
    with pytest.raises(ValueError, match="must be one of auto, torch, triton, reference; got 'fast'"):
        linear_attention(**args)
