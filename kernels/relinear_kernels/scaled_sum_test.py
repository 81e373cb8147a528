"""The fused sum against its definition in float64: on a GPU where there is one, else in Triton's
interpreter."""

import pytest
import torch

from relinear_kernels.scaled_sum import scaled_sum
from relinear_kernels.scaled_sum_reference import scaled_sum as definition
from relinear_kernels.testing import DEVICE, DTYPES, check, fill_empty_with_nan, relative

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_path")


def named(f):
    return lambda x, options: {"sum": f(**x)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "batch, length, heads, dim",
    [(2, 1, 1, 16), (3, 33, 3, 32), (2, 70, 2, 64), (1, 300, 5, 128), (2, 9, 2, 96)],
)
@pytest.mark.parametrize("programs", [1, 2112])
def test_fused_equals_definition(batch, length, heads, dim, programs, dtype, monkeypatch):
    from relinear_kernels import scaled_sum_triton

    fill_empty_with_nan(monkeypatch)
    monkeypatch.setattr(scaled_sum_triton, "PROGRAMS", programs)
    args = {n: torch.randn(batch, length, heads, dim) for n in "xy"} | {"scale": torch.randn(heads)}
    check(named(scaled_sum), named(definition), args, {}, dtype, keep=("scale",))


def test_inputs_of_any_strides():
    args = {
        "x": torch.randn(2, 3, 9, 32).transpose(1, 2),
        "y": torch.randn(2, 9, 32, 3).transpose(2, 3),
        "scale": torch.rand(3),
    }
    args = {n: x.to(DEVICE) for n, x in args.items()}
    assert relative(scaled_sum(**args), definition(**args)) < 1e-6


def test_what_the_kernel_does_not_support_is_named():
    args = {n: torch.randn(2, 4, 3, 16, device=DEVICE) for n in "xy"} | {
        "scale": torch.rand(3, device=DEVICE)
    }
    with pytest.raises(ValueError, match=r"scale \[H\]; got \[2, 4, 3, 16\], \[2, 4, 3, 16\], \[2\]"):
        scaled_sum(**args | {"scale": args["scale"][:2]})
    with pytest.raises(ValueError, match="takes the dtypes .*torch.float64"):
        scaled_sum(**args | {"x": args["x"].double()})
