"""Decoding token by token, after a prefill, against the parallel form."""

import pytest
import torch

from relinear_kernels import LinearState, decode_step, linear_attention
from relinear_kernels.linear_attention_reference import linear_attention as chunked
from relinear_kernels.linear_attention_test import inputs
from relinear_kernels.testing import DEVICE, relative

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_path")
STEPS = 8192 if DEVICE == "cuda" else 12


@pytest.mark.parametrize("feature, gate", [("softmax_pm", None), ("softmax_pm", "token"), ("relu", "head"), ("none", None)])
def test_decoding_after_a_prefill_equals_the_parallel_form(feature, gate):
    prefill, dim = 20, 64 if DEVICE == "cuda" else 16
    args = {n: x.to(DEVICE) for n, x in inputs(prefill + STEPS, dim, dim, 2, 1, feature, gate, False).items()}
    tokens = {n: x for n, x in args.items() if n in ("q", "k", "v") or (n == "log_decay" and gate == "token")}
    rest = {n: x for n, x in args.items() if n not in tokens} | {"feature": feature}
    want, end = chunked(**{n: x.double() for n, x in tokens.items()}, **{n: x.double() if isinstance(x, torch.Tensor) else x
                        for n, x in rest.items()}, return_state=True)  # fmt: skip
    _, state = linear_attention(**{n: x[:, :prefill] for n, x in tokens.items()}, **rest, return_state=True)
    out = [decode_step(**{n: x[:, t : t + 1] for n, x in tokens.items()}, **rest, state=state) for t in range(prefill, prefill + STEPS)]
    assert relative(torch.cat(out, 1), want[:, prefill:]) < 2e-5
    assert relative(state.kv, end.kv) < 2e-5 and relative(state.z, end.z) < 2e-5


def test_a_state_that_cannot_be_updated_in_place_is_named():
    args = {n: x.to(DEVICE) for n, x in inputs(1, 16, 16, 2, 1, "softmax_pm", None, True).items()}
    kv, z = args.pop("kv"), args.pop("z")
    with pytest.raises(ValueError, match="contiguous float32 state in place; got torch.bfloat16"):
        decode_step(**args, state=LinearState(kv.bfloat16(), z, z))
    with pytest.raises(ValueError, match=r"the state must be \[2, 2, 32, 16\]; got \[2, 2, 16, 16\]"):
        decode_step(**args, state=LinearState(kv[:, :, :16].contiguous(), z, z))
    with pytest.raises(ValueError, match="takes one token; got 3"):
        decode_step(**args | {"q": args["q"].expand(-1, 3, -1, -1)}, state=LinearState(kv, z, z))
