"""The fused rotary embedding against its definition in float64: on a GPU where there is one, else in Triton's
interpreter."""

import pytest
import torch

from relinear_kernels.rotary import rotary
from relinear_kernels.rotary_reference import rotary as definition
from relinear_kernels.testing import DEVICE, DTYPES, check, fill_empty_with_nan, relative

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_path")


def angles(batch, length, dim):
    """Cosines and sines of arbitrary angles, whose two halves need not be equal."""
    x = torch.randn(batch, length, dim)
    return {"cos": x.cos(), "sin": x.sin()}


def pair(f):
    return lambda x, options: dict(zip("qk", f(**x, **options), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "length", "heads", "groups", "dim"),
    [
        (2, 1, 1, 1, 16),
        (3, 33, 3, 1, 32),
        (2, 70, 4, 4, 64),
        (1, 40, 6, 2, 128),
        (2, 5, 2, 1, 96),
        (1, 5, 2, 1, 256),
    ],
)
@pytest.mark.parametrize("shared", [True, False])
def test_fused_equals_definition(batch, length, heads, groups, dim, shared, dtype, monkeypatch):
    fill_empty_with_nan(monkeypatch)
    args = {"q": torch.randn(batch, length, heads, dim), "k": torch.randn(batch, length, groups, dim)}
    check(pair(rotary), pair(definition), args, angles(1 if shared else batch, length, dim), dtype)


def test_it_is_llama_s():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = torch.randn(2, 9, 4, 32), torch.randn(2, 9, 2, 32)
    angle = (torch.arange(9)[:, None] * torch.rand(16)).repeat(1, 2)[None]
    want = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), angle.cos(), angle.sin())
    got = rotary(*(x.to(DEVICE) for x in (q, k, angle.cos(), angle.sin())))
    assert all(relative(a, b.transpose(1, 2)) < 1e-6 for a, b in zip(got, want, strict=True))


def test_inputs_of_any_strides_and_one_side_s_gradient():
    args = {
        "q": torch.randn(2, 4, 9, 32).transpose(1, 2),
        "k": torch.randn(2, 9, 32, 2).transpose(2, 3),
    } | angles(1, 9, 32)
    args = {n: x.to(DEVICE) for n, x in args.items()}
    assert relative(rotary(**args)[1], definition(**args)[1]) < 1e-6
    args["q"].requires_grad_()
    weigh = torch.randn_like(args["q"])
    got, want = (
        torch.autograd.grad((f(**args)[0] * weigh).sum(), args["q"])[0] for f in (rotary, definition)
    )
    assert relative(got, want) < 1e-6


def test_what_the_kernel_does_not_support_is_named():
    args = {"q": torch.randn(2, 4, 3, 16), "k": torch.randn(2, 4, 1, 16)} | angles(1, 4, 16)
    args = {n: x.to(DEVICE) for n, x in args.items()}
    with pytest.raises(ValueError, match="even head width, q's that of k; got 16 and 8"):
        rotary(**args | {"k": args["k"][..., :8]})
    with pytest.raises(
        ValueError, match=r"cos and sin must be \[B=2 or 1, T=4, D=16\]; got \[1, 3, 16\] and \[1, 4, 16\]"
    ):
        rotary(**args | {"cos": args["cos"][:, :3]})
    with pytest.raises(ValueError, match="takes the dtypes .*torch.float64"):
        rotary(**args | {"q": args["q"].double()})
