"""The public `decode_step`: one token of linear attention, its state updated in place; one launch on CUDA."""

from jaxtyping import Float
from torch import Tensor

from relinear_kernels import decode_step_reference as reference
from relinear_kernels.dispatch import use_triton
from relinear_kernels.linear_attention_reference import EPS, LinearState


def decode_step(
    q: Float[Tensor, "B 1 H D"],
    k: Float[Tensor, "B 1 Hkv D"],
    v: Float[Tensor, "B 1 Hkv Dv"],
    w_q: Float[Tensor, "H D F"] | None = None,
    w_k: Float[Tensor, "H D F"] | None = None,
    *,
    state: LinearState,
    feature: str = "softmax_pm",
    b_q: Float[Tensor, "H F"] | None = None,
    b_k: Float[Tensor, "H F"] | None = None,
    log_decay: Tensor | None = None,
    normalize: bool = True,
    eps: float = EPS,
) -> Float[Tensor, "B 1 H Dv"]:
    """The output of one token of `linear_attention`; `state` is overwritten with the state after it. Inference only: no gradient.

    Raises ValueError naming what is possible where the kernel does not support the arguments.
    """
    run = reference.decode_step
    if use_triton(q):
        from relinear_kernels.decode_step_triton import decode_step as run
    options = {"feature": feature, "b_q": b_q, "b_k": b_k, "log_decay": log_decay, "normalize": normalize, "eps": eps}
    return run(q, k, v, w_q, w_k, state=state, **options)
