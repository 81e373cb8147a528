"""One decode step of linear attention by its definition: what `decode_step` does, as a piece of length 1 of the torch form."""

import torch

from relinear_kernels.linear_attention_reference import EPS, LinearState, linear_attention


def decode_step(
    q, k, v, w_q=None, w_k=None, *, state: LinearState, feature="softmax_pm", b_q=None, b_k=None, log_decay=None, normalize=True, eps=EPS
):  # fmt: skip
    """The output ``[B, 1, H, Dv]`` of one token; `state` is updated in place."""
    with torch.no_grad():
        out, after = linear_attention(
            q, k, v, w_q, w_k, feature=feature, b_q=b_q, b_k=b_k, log_decay=log_decay, normalize=normalize,
            initial_state=state, return_state=True, eps=eps,
        )  # fmt: skip
        for old, new in zip(state, after, strict=True):
            old.copy_(new)
    return out
