"""Attention operations of relinear. One op, one stem: `<op>_reference.py` is its definition (quadratic) and its chunked torch form.

`linear_attention`, `gated_linear_attention` (a gate per channel), `sliding_window_attention`, `hybrid_attention`; `decode_step` is one
token of any of them; `attention_cross_entropy` is how far linear attention's weights are from softmax's, `rotary` the position embedding,
`token_cross_entropy` a language model's loss of each token, `scaled_sum` how two attentions' outputs are added.
RELINEAR_KERNELS=auto|torch|triton|reference forces a path; auto is Triton for CUDA tensors, torch elsewhere.
"""

from relinear_kernels.attention_cross_entropy import attention_cross_entropy
from relinear_kernels.attention_cross_entropy_reference import cross_entropy
from relinear_kernels.decode_step import decode_step
from relinear_kernels.features import FEATURES, check_feature
from relinear_kernels.gated_linear_attention import gated_linear_attention
from relinear_kernels.gated_linear_attention_reference import gated_linear_attention_weights
from relinear_kernels.hybrid_attention import hybrid_attention
from relinear_kernels.hybrid_attention_reference import HybridState, hybrid_attention_weights, hybrid_state
from relinear_kernels.linear_attention import linear_attention
from relinear_kernels.linear_attention_reference import LinearState, linear_attention_weights, linear_features, linear_state
from relinear_kernels.rotary import rotary
from relinear_kernels.scaled_sum import scaled_sum
from relinear_kernels.sliding_window_attention import sliding_window_attention
from relinear_kernels.sliding_window_attention_reference import (
    WindowState,
    sliding_window_weights,
    window_state,
)
from relinear_kernels.token_cross_entropy import token_cross_entropy

__all__ = [
    "FEATURES",
    "HybridState",
    "LinearState",
    "WindowState",
    "attention_cross_entropy",
    "check_feature",
    "cross_entropy",
    "decode_step",
    "gated_linear_attention",
    "gated_linear_attention_weights",
    "hybrid_attention",
    "hybrid_attention_weights",
    "hybrid_state",
    "linear_attention",
    "linear_attention_weights",
    "linear_features",
    "linear_state",
    "rotary",
    "scaled_sum",
    "sliding_window_attention",
    "sliding_window_weights",
    "token_cross_entropy",
    "window_state",
]
