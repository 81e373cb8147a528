"""The fused window attention against its blocked torch form in float64: on a GPU where there is one, else in
Triton's interpreter."""

import pytest
import torch

from relinear_kernels.sliding_window_attention import sliding_window_attention
from relinear_kernels.sliding_window_attention_reference import begin, extend, window_state
from relinear_kernels.sliding_window_attention_reference import sliding_window_attention as blocked
from relinear_kernels.testing import DEVICE, DTYPES, check, relative

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_path")
B = 2
# length, D, H, Hkv, window, meta, left padding
SMALL = [
    (1, 16, 1, 1, 16, 0, False),
    (15, 16, 3, 1, 16, 4, True),
    (33, 16, 3, 3, 5, 0, True),
    (65, 32, 2, 1, 16, 4, False),
    (70, 16, 2, 1, 64, 0, False),
]
LARGE = [
    (length, dim, heads, groups, window, meta, (length + window) % 2 == 0)
    for dim in (64, 128)
    for heads, groups, window, meta in [(4, 1, 64, 4), (3, 3, 16, 0), (4, 2, 128, 4), (3, 1, 64, 0)]
    for length in (1, 15, 63, 64, 65, 128, 300)
]
CASES = LARGE if DEVICE == "cuda" else SMALL


def inputs(length, dim, heads, groups, batch=B):
    r = lambda n: torch.randn(batch, length, n, dim)  # noqa: E731
    return {"q": 3 * r(heads), "k": r(groups), "v": r(groups)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fused_equals_definition(case, dtype):
    length, dim, heads, groups, window, meta, masked = case
    mask = torch.arange(length).expand(B, -1) >= torch.tensor([[0], [length // 3]]) if masked else None
    options = {"window": window, "meta": meta, "key_mask": mask}
    args = inputs(length, dim, heads, groups)
    check(
        lambda x, o: {"out": sliding_window_attention(**x, **o)},
        lambda x, o: {"out": blocked(**x, **o)},
        args,
        options,
        dtype,
    )


@pytest.mark.parametrize("cuts", [(40, 1, 29), (3, 64, 3)])
def test_pieces_equal_the_whole(cuts):
    args = {n: x.to(DEVICE) for n, x in inputs(70, 16, 2, 1).items()}
    mask = torch.arange(70, device=DEVICE).expand(B, -1) >= torch.tensor([[0], [20]], device=DEVICE)
    options, state, out, at = {"window": 16, "meta": 4}, None, [], 0
    for c in cuts:
        piece = {n: x[:, at : at + c] for n, x in args.items()}
        y, state = sliding_window_attention(
            **piece, key_mask=mask[:, at : at + c], initial_state=state, return_state=True, **options
        )
        out.append(y)
        at += c
    whole = sliding_window_attention(**args, key_mask=mask, **options)
    assert relative(torch.cat(out, 1), whole) < 1e-5


@pytest.mark.parametrize("meta", [0, 4])
def test_packed_sequences_equal_each_alone(meta):
    lengths = [3, 40, 1, 17] if DEVICE == "cpu" else [3, 640, 1, 333, 64]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device=DEVICE)
    args = inputs(sum(lengths), 16, 2, 1, batch=1)

    def each(x, options):
        pieces = zip(*(t.split(lengths, 1) for t in x.values()), strict=True)
        return {"out": torch.cat([blocked(*p, **options) for p in pieces], 1)}

    fused = lambda x, o: {"out": sliding_window_attention(**x, cu_seqlens=cu, **o)}  # noqa: E731
    check(fused, each, args, {"window": 16, "meta": meta}, torch.float32)


def test_what_the_kernels_do_not_support_is_named():
    args = {n: x.to(DEVICE) for n, x in inputs(4, 24, 1, 1).items()}
    with pytest.raises(ValueError, match=r"head widths and feature counts of \(16, 32, 64, 128\); got .*24"):
        sliding_window_attention(**args, window=4)
    with pytest.raises(ValueError, match="at most 16 meta tokens; got 17"):
        sliding_window_attention(**args, window=4, meta=17)


@pytest.mark.parametrize("length", [1, 3, 9, 40])
@pytest.mark.parametrize("meta", [0, 4])
def test_the_state_after_a_first_piece_is_that_of_a_prefix(length, meta):
    k, v = torch.randn(2, 2, length, 3, 8).unbind()
    empty = window_state(2, 7, 3, 8, meta=meta)
    torch.testing.assert_close(begin(empty, k, v), extend(empty, k, v, None)[3])
