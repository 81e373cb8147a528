"""Hedgehog: phi(x) = [act(x W), act(-x W)], trained so that its attention weights mimic softmax (Zhang et al.
2024).

Defaults settled by the paper's own count (0.495 % of Llama-2-7B): per head, q and k untied, no bias, W starts
as the identity. feature `softmax_pm` is Appendix A.1, `exp_pm` its Eq. 6, `exp` the main text's Eq. 3, which
has one sign; `max_pm` divides each sign's exponentials by their largest, which Appendix A.1 found worse than
their sum. `tied` is Section 4.2's reading, `bias` the text's W x + b.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from relinear.attention import _base
from relinear.attention._base import Attention, Inputs, identity, wide
from relinear_kernels.features import exp, project
from relinear_kernels.linear_attention import linear_attention
from relinear_kernels.linear_attention_reference import linear_attention as chunked_linear_attention
from relinear_kernels.linear_attention_reference import (
    linear_attention_weights,
    linear_features,
    linear_state,
)


class Options(_base.Options):
    """The options of a run with Hedgehog's attention."""

    feature: Literal["softmax_pm", "exp_pm", "exp", "max_pm"] = "softmax_pm"
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

    def _mapped(self, inputs: Inputs) -> tuple[Tensor, Tensor, dict]:
        """q, k and the map that relinear_kernels puts on them; of `max_pm`, which they have not, the
        features."""
        q, k = inputs.rotated()
        w_k, b_k = (self.w_q, self.b_q) if self.options.tied else (self.w_k, self.b_k)
        if self.options.feature != "max_pm":
            maps = {"w_q": self.w_q, "b_q": self.b_q, "w_k": w_k, "b_k": b_k}
            return q, k, maps | {"feature": self.options.feature}
        heads = self.heads.heads
        q, k = (
            _over_largest(project(wide(x), w, b, heads)).transpose(1, 2)
            for x, w, b in ((q, self.w_q, self.b_q), (k, w_k, b_k))
        )
        return q, k, {"feature": "none"}

    def forward(self, inputs: Inputs, state=None):
        """Head outputs of a piece, and the linear state after it."""
        q, k, maps = self._mapped(inputs)
        # the kernels take as many features as a head has dimensions
        op = chunked_linear_attention if self.options.feature == "max_pm" else linear_attention
        return op(
            q,
            k,
            inputs.v,
            **maps,
            key_mask=inputs.key_mask,
            causal=self.heads.causal,
            initial_state=state,
            return_state=True,
        )

    def init_state(self, batch, device=None, dtype=torch.float32):
        """The linear state before the first token."""
        signs = 2 if self.options.feature.endswith("_pm") else 1
        return linear_state(batch, self.heads.heads, signs * self.heads.dim, self.heads.dim, device, dtype)

    def phi(self, inputs: Inputs):
        """Features of q and k, and whether they are logarithms: `attention_weights` is their product, each
        row divided by its sum."""
        q, k, maps = self._mapped(inputs)
        return linear_features(q, k, **maps)

    def attention_weights(self, inputs: Inputs):
        """The T x T weights of the method, row = query."""
        q, k, maps = self._mapped(inputs)
        return linear_attention_weights(q, k, **maps, key_mask=inputs.key_mask, causal=self.heads.causal)


def _over_largest(x: Float[Tensor, "B H T F"]) -> Float[Tensor, "B H T 2F"]:
    """The exponentials of x over their largest, and those of -x over theirs."""
    return torch.cat([exp(y - y.amax(-1, keepdim=True)) for y in (x, -x)], -1)
