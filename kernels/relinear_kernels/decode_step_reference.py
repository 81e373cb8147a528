"""One decode step by its definition: a piece of length 1 of an op's torch form, the state after it written
over the one before."""

from torch import Tensor

from relinear_kernels.gated_linear_attention_reference import gated_linear_attention
from relinear_kernels.hybrid_attention_reference import HybridState, hybrid_attention
from relinear_kernels.linear_attention_reference import LinearState, linear_attention
from relinear_kernels.sliding_window_attention_reference import WindowState, sliding_window_attention

OPS = {LinearState: linear_attention, WindowState: sliding_window_attention, HybridState: hybrid_attention}


def decode_step(q, k, v, *, state, **options):
    """The output ``[B, 1, H, Dv]`` of one token and `state`, updated in place."""
    op = gated_linear_attention if options.get("log_gate") is not None else OPS[type(state)]
    out, after = op(q, k, v, **options, initial_state=state, return_state=True)
    _overwrite(state, after)
    return out, state


def _overwrite(old, new) -> None:
    if isinstance(old, Tensor):
        old.copy_(new)
    else:
        for a, b in zip(old, new, strict=True):
            _overwrite(a, b)
