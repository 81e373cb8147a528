"""T2R: phi(x) = ReLU(W x + b), normalised linear attention, no attention transfer (Kasai et al. 2021, as its
successors state it).

variant `paper` (SUPRA Section 2.2): per head, shared by q and k, as many features as head dimensions, a bias
per feature. variant `code` (LoLCATs' released T2R baseline): untied, 128 features, one scalar bias per head.
"""

from typing import Literal

import torch
from torch import nn

from relinear.attention import _base
from relinear.attention._base import Attention, Inputs, linear_init
from relinear_kernels.linear_attention import linear_attention
from relinear_kernels.linear_attention_reference import linear_attention_weights, linear_state

CODE_FEATURES = 128


class Options(_base.Options):
    """The options of a run with T2R's attention."""

    variant: Literal["paper", "code"] = "paper"


class Method(Attention):
    """T2R's attention: a trained ReLU feature map for each head."""

    Options = Options
    causal_only = False

    def __init__(self, heads, options):
        super().__init__(heads, options)
        h, d = heads.heads, heads.dim
        self.features = d if options.variant == "paper" else CODE_FEATURES
        self.w_q = nn.Parameter(linear_init(h, d, self.features))
        self.b_q = nn.Parameter(torch.zeros(h, d if options.variant == "paper" else 1))
        if options.variant == "code":
            self.w_k = nn.Parameter(linear_init(h, d, self.features))
            self.b_k = nn.Parameter(torch.zeros(h, 1))

    def _maps(self) -> dict:
        tied = self.options.variant == "paper"
        b_q = self.b_q.expand(-1, self.features)
        w_k, b_k = (self.w_q, b_q) if tied else (self.w_k, self.b_k.expand(-1, self.features))
        return {"w_q": self.w_q, "b_q": b_q, "w_k": w_k, "b_k": b_k, "feature": "relu"}

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
        return linear_state(batch, self.heads.heads, self.features, self.heads.dim, device, dtype)

    def attention_weights(self, inputs: Inputs):
        """The T x T weights of the method, row = query."""
        return linear_attention_weights(
            *inputs.rotated(), **self._maps(), key_mask=inputs.key_mask, causal=self.heads.causal
        )
