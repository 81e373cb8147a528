"""The public `decode_step`: one token of any op, its state updated in place; one to three launches on
CUDA."""

import torch
from jaxtyping import Float
from torch import Tensor

from relinear_kernels import decode_step_reference as reference
from relinear_kernels.dispatch import (
    takes,
    use_triton,
    wrong_dtypes,
    wrong_features,
    wrong_state,
    wrong_widths,
)
from relinear_kernels.features import check_feature
from relinear_kernels.hybrid_attention_reference import HybridState
from relinear_kernels.linear_attention_reference import LinearState
from relinear_kernels.sliding_window_attention_reference import WindowState

State = LinearState | WindowState | HybridState


@torch.no_grad()
def decode_step(
    q: Float[Tensor, "B 1 H D"],
    k: Float[Tensor, "B 1 Hkv D"],
    v: Float[Tensor, "B 1 Hkv Dv"],
    *,
    state: State,
    **options,
) -> tuple[Float[Tensor, "B 1 H Dv"], State]:
    """The output of one token and the state after it, which takes the place of `state`: go on with the one
    returned.

    The state says whose token it is: a `LinearState` is `linear_attention`'s (with `log_gate`,
    `gated_linear_attention`'s), a `WindowState` `sliding_window_attention`'s, a `HybridState`
    `hybrid_attention`'s; `options` are that op's. Keys, values and sums stay where they are in memory.
    Inference only: no gradient. Where the kernels do not take the arguments, the torch form runs and a
    warning says why; with RELINEAR_KERNELS=triton that is a ValueError.
    """
    if type(state) not in reference.STEPS:
        raise ValueError(
            f"decode_step takes a {', '.join(x.__name__ for x in reference.STEPS)}; got"
            f" {type(state).__name__}"
        )
    if q.shape[1] != 1:
        raise ValueError(f"decode_step takes one token; got {q.shape[1]}")
    step = reference.decode_step
    if use_triton(q) and takes("decode_step", *_wrong(q, k, v, state, **options)):
        from relinear_kernels.decode_step_triton import STEPS

        step = STEPS[type(state)]
    return step(q, k, v, state=state, **options)


def _wrong(q, k, v, state: State, *, w_q=None, w_k=None, feature="softmax_pm", **_) -> tuple[str | None, ...]:
    """What the kernels do not take of a step's arguments."""
    if isinstance(state, WindowState):
        return wrong_dtypes(q=q, k=k, v=v), wrong_widths(q=q, k=k, v=v)
    linear = state.linear if isinstance(state, HybridState) else state
    return wrong_features(q, k, v, w_q, w_k, check_feature(feature)), wrong_state(linear)
