"""The gradients of a feature map's projection against their definition in float64: on a GPU where there is
one, else in the interpreter."""

import pytest
import torch

from relinear_kernels.testing import DEVICE, DTYPES, relative

pytest.importorskip("triton")
from relinear_kernels import projection_triton  # noqa: E402
from relinear_kernels.projection_triton import Side, gradients  # noqa: E402

pytestmark = pytest.mark.usefixtures("triton_path")
BOTH = (True, True, False)


def side(rows, heads, groups, dim, width, parts, dtype, wanted=BOTH, onto=False):
    r = lambda *s: torch.randn(*s).to(DEVICE, dtype)  # noqa: E731
    x = r(2, rows, groups, dim)
    return Side(
        r(parts, 2, rows, heads, width),
        x,
        r(heads, dim, width),
        None,
        wanted,
        torch.randn_like(x) if onto else None,
    )


def definition(s: Side):
    dy, x, w = s.dy.double().sum(0), s.x.double(), s.w.double()
    each = x.repeat_interleave(w.shape[0] // x.shape[2], 2)
    dx = torch.einsum("bthf,hdf->bthd", dy, w).view(*x.shape[:3], -1, x.shape[3]).sum(3)
    return dx if s.onto is None else dx + s.onto.double(), torch.einsum("bthd,bthf->hdf", each, dy)


def launches(monkeypatch):
    """The launches of `gradients`, filled in as it runs: (input, matrix or both, number of sides)."""
    found = []
    for name in ("input_gradients", "matrix_gradients"):
        run = getattr(projection_triton, name)

        def count(sides, run=run, name=name):
            both = name == "matrix_gradients" and sides[0][1] is not None
            found.append(("both" if both else name.split("_")[0], len(sides)))
            return run(sides)

        monkeypatch.setattr(projection_triton, name, count)
    return found


# 700 rows are cut in two shares, neither a multiple of a block.
@pytest.mark.parametrize("dtype", (torch.float16, *DTYPES), ids=str)
@pytest.mark.parametrize(
    "rows, heads, dim, width, parts, onto",
    [
        (350, 2, 32, 16, 2, False),
        (33, 3, 64, 32, 1, True),
        (65, 1, 128, 64, 2, True),
        (1, 2, 16, 16, 2, False),
        (64, 1, 16, 128, 1, False),
    ],
)
def test_both_gradients_of_one_reading_equal_the_definition(
    rows, heads, dim, width, parts, onto, dtype, monkeypatch
):
    found = launches(monkeypatch)
    sides = [side(n, heads, heads, dim, width, parts, dtype, onto=onto) for n in (rows, rows + 1)]
    want = [definition(s) for s in sides]  # before the tensors that they are added to are written
    for got, w in zip(gradients(*sides), want, strict=True):
        for x, y in zip(got[:2], w, strict=True):
            assert relative(x, y) < (1e-6 if dtype == torch.float32 else 4e-3)
    assert found == [("both", 2)]


def test_sides_that_want_or_share_otherwise_get_their_own_launches(monkeypatch):
    found = launches(monkeypatch)
    args = (40, 4), (16, 32, 2, torch.float32)
    cases = {
        "shared keys": ((4, BOTH), (2, BOTH), [("input", 1), ("both", 1), ("matrix", 1)]),
        "only matrices": ((4, (False, True, False)), (4, (False, True, False)), [("matrix", 2)]),
        "only inputs": ((4, (True, False, False)), (1, (True, False, False)), [("input", 2)]),
        "no k": ((4, BOTH), None, [("both", 1)]),
    }
    for name, (*given, launched) in cases.items():
        found.clear()
        sides = [g and side(*args[0], g[0], *args[1], wanted=g[1]) for g in given]
        for s, got in zip(sides, gradients(*sides), strict=True):
            for wanted, g, w in zip(s.wanted if s else (), got, definition(s) if s else (), strict=False):
                assert relative(g, w) < 1e-6 if wanted else g is None, name
        assert found == launched, name


def test_a_matrix_alone_gets_the_bits_it_gets_with_its_input():
    s = side(300, 2, 2, 32, 16, 2, torch.float16)
    together, alone = gradients(s, None)[0][1], gradients(s._replace(wanted=(False, True, False)), None)[0][1]
    assert torch.equal(together, alone)
