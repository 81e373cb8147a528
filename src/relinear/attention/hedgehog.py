"""Hedgehog: phi(x) = [act(x W), act(-x W)], trained so that its attention weights mimic softmax (Zhang et al.
2024).

Defaults settled by the paper's own count (0.495 % of Llama-2-7B): per head, q and k untied, no bias, W starts
as the identity. feature `softmax_pm` is Appendix A.1, `exp_pm` the main text; `tied` is Section 4.2's
reading, `bias` the text's W x + b.
"""

from typing import Literal

import torch
from torch import nn

from relinear.attention import _base
from relinear.attention._base import Attention, Inputs, identity
from relinear_kernels.linear_attention import linear_attention
from relinear_kernels.linear_attention_reference import (
    linear_attention_weights,
    linear_features,
    linear_state,
)


class Options(_base.Options):
    """The options of a run with Hedgehog's attention."""

    feature: Literal["softmax_pm", "exp_pm"] = "softmax_pm"
    tied: bool = False
    bias: bool = False


class Method(Attention):
    """Hedgehog's attention: a trained feature map for each head."""

    Options = Options
    causal_only = False

    def __init__(self, heads, options):
        super().__init__(heads, options)
        h, d = heads.heads, heads.dim
        self.w_q = nn.Parameter(identity(h, d, d))
        self.w_k = None if options.tied else nn.Parameter(identity(h, d, d))
        self.b_q = nn.Parameter(torch.zeros(h, d)) if options.bias else None
        self.b_k = nn.Parameter(torch.zeros(h, d)) if options.bias and not options.tied else None

    def _maps(self) -> dict:
        w_k, b_k = (self.w_q, self.b_q) if self.options.tied else (self.w_k, self.b_k)
        return {"w_q": self.w_q, "b_q": self.b_q, "w_k": w_k, "b_k": b_k, "feature": self.options.feature}

    def forward(self, inputs: Inputs, state=None):
        """Head outputs of a piece, and the linear state after it."""
        q, k = inputs.rotated()
        return linear_attention(
            q,
            k,
            inputs.v,
            **self._maps(),
            key_mask=inputs.key_mask,
            causal=self.heads.causal,
            initial_state=state,
            return_state=True,
        )

    def init_state(self, batch, device=None, dtype=torch.float32):
        """The linear state before the first token."""
        return linear_state(batch, self.heads.heads, 2 * self.heads.dim, self.heads.dim, device, dtype)

    def phi(self, inputs: Inputs):
        """Features of q and k, and whether they are logarithms: `attention_weights` is their product, each
        row divided by its sum."""
        return linear_features(*inputs.rotated(), **self._maps())

    def attention_weights(self, inputs: Inputs):
        """The T x T weights of the method, row = query."""
        return linear_attention_weights(
            *inputs.rotated(), **self._maps(), key_mask=inputs.key_mask, causal=self.heads.causal
        )
