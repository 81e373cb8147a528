"""The fused gated delta rule against its definition in float64: on a GPU where there is one, else in Triton's
interpreter."""

import pytest
import torch

from relinear_kernels.gated_delta import gated_delta
from relinear_kernels.gated_delta_reference import DeltaState, gated_delta_recurrent
from relinear_kernels.gated_delta_reference import gated_delta as chunked
from relinear_kernels.testing import DEVICE, DTYPES, check, relative

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from relinear_kernels import gated_delta_triton  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("triton_path"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]
B = 2
WIDE = ("log_decay", "erase", "write", "s")  # arguments that stay float32
# length, Dk, Dv, H, M, G, decay, erase, write, initial state, left padding
SMALL = [
    (2, 16, 16, 1, 1, 1, "head", True, True, False, False),
    (33, 16, 32, 4, 2, 1, "head", True, True, True, True),
    (17, 16, 16, 3, 1, 1, "channel", True, True, True, True),
    (40, 32, 16, 2, 2, 1, "channel", True, True, False, False),
    (32, 16, 16, 2, 1, 1, None, True, True, True, False),
    (35, 16, 16, 2, 1, 1, "fixed", False, False, True, False),
    (16, 16, 16, 2, 2, 2, "channel", False, False, False, True),
    (34, 16, 16, 1, 1, 1, "head", False, True, False, False),
]
# The compiler's time bounds the run on a card, in float32 most: 3 to 20 s a case, in bfloat16 2.
LARGE = [
    ((300, 64, 64, 4, 1, 1, "head", True, True, True, True), DTYPES),
    ((300, 64, 64, 4, 1, 1, "channel", True, True, False, False), DTYPES),
    ((300, 64, 64, 4, 1, 1, "fixed", False, False, True, False), DTYPES),
    ((300, 64, 64, 4, 4, 1, "channel", False, True, True, True), DTYPES[:1]),
    ((300, 64, 64, 4, 4, 1, None, True, True, False, False), DTYPES[:1]),
    ((2048, 64, 64, 9, 3, 3, "head", True, True, True, False), DTYPES[:1]),  # SmolLM2-135M's heads
    ((2048, 64, 64, 9, 3, 3, "channel", True, True, False, False), DTYPES[:1]),
    ((2048, 128, 128, 12, 2, 2, "head", True, True, False, False), DTYPES[:1]),  # Qwen2.5-1.5B's
    ((300, 128, 128, 4, 1, 1, "channel", True, True, True, True), DTYPES[:1]),
    ((300, 128, 128, 4, 1, 1, "channel", False, True, False, False), DTYPES[1:]),
    ((300, 128, 128, 4, 4, 1, "fixed", False, False, True, False), DTYPES[:1]),
    ((300, 128, 128, 4, 1, 1, None, True, True, False, True), DTYPES[:1]),
]
CASES = [(case, dtype) for case, dtypes in LARGE for dtype in dtypes]
if DEVICE == "cpu":
    CASES = [(case, torch.float32) for case in SMALL]


def inputs(length, dim, width, heads, states, groups, decay, erase, write, state, batch=B):
    args = {
        "q": torch.randn(batch, length, heads, dim),
        "k": torch.nn.functional.normalize(torch.randn(batch, length, states, dim), dim=-1),
        "v": torch.randn(batch, length, groups, width),
    }
    each = (batch, length, states)
    shapes = {"fixed": (states,), "head": each, "channel": (*each, dim)}
    if decay is not None:
        args["log_decay"] = -0.2 * torch.randn(shapes[decay]).square()
    if erase:
        args["erase"] = torch.randn(each).sigmoid()
    if write:
        args["write"] = torch.randn(each).sigmoid()
    return args | ({"s": torch.randn(batch, states, dim, width)} if state else {})


def run(form, args, **options):
    args = dict(args)
    state = DeltaState(args.pop("s")) if "s" in args else None
    out, after = form(**args, initial_state=state, return_state=True, **options)
    return {"out": out, "s": after.s}


def said(case, dtype: torch.dtype, errors: dict[str, tuple[float, float]]) -> str:
    """A case, and its errors against float64: the largest, and each."""
    each = " ".join(f"{name.replace('gradient of ', 'd')} {error:.1e}" for name, (error, _) in errors.items())
    return f"gated_delta {case} {str(dtype)[6:]}: at most {max(e for e, _ in errors.values()):.1e}; {each}"


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_fused_equals_definition(case, dtype):
    """Prints a line of errors: `pytest -s`, or `-rP` beside `-n 4`."""
    *shape, padded = case
    mask = torch.arange(case[0]).expand(B, -1) >= torch.tensor([[0], [case[0] // 3]]) if padded else None
    found = check(
        lambda x, o: run(gated_delta, x, **o),
        lambda x, o: run(chunked, x, **o),
        inputs(*shape),
        {"key_mask": mask},
        dtype,
        WIDE,
    )
    print(said(case, dtype, found))


@triton.jit
def rounded(a, b, DT: tl.constexpr):
    """`_dot` as it is in bfloat16, of tiles that are float32."""
    a = ((a.to(tl.int32, bitcast=True) + 0x8000) & -65536).to(tl.float32, bitcast=True)
    b = ((b.to(tl.int32, bitcast=True) + 0x8000) & -65536).to(tl.float32, bitcast=True)
    return tl.dot(a, b, input_precision="ieee")


@pytest.mark.skipif(DEVICE == "cuda", reason="runs in bfloat16 itself")
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_products_rounded_to_bfloat16_keep_gradients_within_a_hundredth(decay, monkeypatch):
    args = inputs(65, 32, 32, 2, 1, 1, decay, True, True, True)
    args = {n: x if n in WIDE else x.bfloat16().float() for n, x in args.items()}
    monkeypatch.setattr(gated_delta_triton, "_dot", rounded)
    found = []
    for form, dtype in ((gated_delta, torch.float32), (gated_delta_recurrent, torch.float64)):
        x = {n: t.to(dtype).requires_grad_() for n, t in args.items()}
        out = run(form, x)
        g = torch.Generator().manual_seed(1)
        loss = sum((y * torch.randn(y.shape, generator=g).to(dtype)).sum() for y in out.values())
        found.append(
            out | {f"d{n}": d for n, d in zip(x, torch.autograd.grad(loss, x.values()), strict=True)}
        )
    errors = {n: relative(found[0][n], want) for n, want in found[1].items()}
    assert max(errors.values()) < 1e-2, errors
    assert max(errors.values()) > 1e-4  # it did round


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_packed_sequences_equal_each_alone(decay):
    lengths = [3, 40, 1, 17] if DEVICE == "cpu" else [3, 640, 1, 333, 64]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device=DEVICE)
    args = inputs(sum(lengths), 16, 16, 2, 1, 1, decay, True, True, False, batch=1)
    args["s"] = torch.randn(len(lengths), 1, 16, 16)

    def alone(x, _):
        parts = []
        for n, (a, b) in enumerate(zip(cu.tolist(), cu.tolist()[1:], strict=False)):
            one = {m: y[n : n + 1] if m == "s" else y[:, a:b] for m, y in x.items()}
            parts.append(run(chunked, one))
        return {n: torch.cat([part[n] for part in parts], d) for n, d in (("out", 1), ("s", 0))}

    check(lambda x, o: run(gated_delta, x, cu_seqlens=cu), alone, args, {}, torch.float32, WIDE)


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("hard", [-1e4, -torch.inf])
def test_a_closed_gate_stays_finite_and_forgets(decay, hard):
    args = inputs(70, 16, 16, 1, 1, 1, decay, True, True, True)
    args["log_decay"][:, 20:60:3] = hard
    x = {n: y.to(DEVICE).requires_grad_() for n, y in args.items()}
    out = run(gated_delta, x)
    grads = torch.autograd.grad(sum(y.square().sum() for y in out.values()), list(x.values()))
    assert all(y.isfinite().all() for y in (*out.values(), *grads))
    want = run(gated_delta_recurrent, {n: y.double() for n, y in args.items()})
    assert all(relative(out[n], y) < 1e-4 for n, y in want.items())


@pytest.mark.parametrize("cuts", [(20, 1, 19), (3, 34, 3)])
def test_pieces_equal_the_whole(cuts):
    args = {n: x.to(DEVICE) for n, x in inputs(40, 16, 16, 2, 1, 1, "head", True, True, True).items()}
    whole, state, out, at = run(gated_delta, args), DeltaState(args.pop("s")), [], 0
    for c in cuts:
        piece = {n: x[:, at : at + c] for n, x in args.items()}
        y, state = gated_delta(**piece, initial_state=state, return_state=True)
        out.append(y)
        at += c
    assert relative(torch.cat(out, 1), whole["out"]) < 1e-5 and relative(state.s, whole["s"]) < 1e-5


def test_a_loss_of_the_state_alone_has_its_gradients():
    args = inputs(20, 16, 16, 1, 1, 1, "head", True, True, False)
    found = []
    for form, dtype in ((gated_delta, torch.float32), (chunked, torch.float64)):
        x = {n: y.to(DEVICE, dtype).requires_grad_() for n, y in args.items()}
        grads = torch.autograd.grad(run(form, x)["s"].square().sum(), list(x.values()), allow_unused=True)
        found.append(dict(zip(x, grads, strict=True)))
    for n, want in found[1].items():
        if want is None:  # queries only read
            assert found[0][n] is None or not found[0][n].any()
        else:
            assert relative(found[0][n], want) < 1e-5, n


def test_what_is_not_supported_is_named():
    args = {n: x.to(DEVICE) for n, x in inputs(4, 16, 16, 1, 1, 1, "head", True, True, False).items()}
    with pytest.raises(ValueError, match=r"an erase of each state; got \[2, 4, 1, 16\]"):
        gated_delta(**args | {"erase": args["erase"][..., None].expand(-1, -1, -1, 16)})
    with pytest.raises(ValueError, match="the dtypes torch.bfloat16, torch.float32; got .*torch.float16"):
        gated_delta(**args | {n: args[n].half() for n in "qkv"})
    with pytest.raises(ValueError, match="head widths .* got width of q 24"):
        gated_delta(**args | {n: torch.zeros(B, 4, 1, 24, device=DEVICE) for n in "qkv"})
