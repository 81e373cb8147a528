"""SUPRA: linear attention with RoPE after the feature map, a fixed decay per head and GroupNorm instead of the denominator
(Mercat et al. 2024, Section 2.3). No transfer stage: everything is trained on the language-modelling loss.

variant `paper`: phi = ReLU(W x + b) per head, shared by q and k. variant `code`: one linear layer over all heads jointly (k has its own
when it has fewer heads).
Decay `released` is the released code's slopes s_i = 2^(-8 (i+1) / H) with gamma = exp(-s), which is its 2^(-0.25 (i+1)) at 32 heads and
goes on to any head count, where that code raises; `retnet` is gamma = 1 - 2^(-5 - i), spread over at most 8 octaves.
init: W starts random as a linear layer does, or as the identity.
"""

from typing import Literal

import torch
from torch import nn

from relinear.attention import _base
from relinear.attention._base import Attention, Inputs, identity, linear_init, wide
from relinear_kernels.linear_attention import linear_attention
from relinear_kernels.linear_attention_reference import linear_attention_weights, linear_state


class Options(_base.Options):
    variant: Literal["paper", "code"] = "paper"
    decay: Literal["released", "retnet", "none"] = "released"
    init: Literal["identity", "random"] = "identity"


def log_decay(kind: str, heads: int, device=None) -> torch.Tensor | None:
    """log gamma per head ``[H]``, the same in every layer, for any head count."""
    i = torch.arange(heads, dtype=torch.float32, device=device)
    if kind == "released":
        return -(2.0 ** (-8 * (i + 1) / heads))
    if kind == "retnet":
        return torch.log1p(-(2.0 ** (-5 - 8 * i / max(heads, 8))))
    return None


class Method(Attention):
    Options = Options

    def __init__(self, heads, options):
        super().__init__(heads, options)
        h, g, d = heads.heads, heads.groups, heads.dim
        start = identity if options.init == "identity" else linear_init
        if options.variant == "paper":
            self.w, self.b = nn.Parameter(start(h, d, d)), nn.Parameter(torch.zeros(h, d))
        else:
            self.w, self.b = nn.Parameter(start(1, h * d, h * d)[0]), nn.Parameter(torch.zeros(h * d))
            if g != h:
                self.w_k, self.b_k = nn.Parameter(start(1, g * d, g * d)[0]), nn.Parameter(torch.zeros(g * d))
        self.norm = nn.GroupNorm(h, h * d, affine=False)

    def _maps(self, q, k):
        """phi of q ``[B, T, H, D]`` and k ``[B, T, H or Hkv, D]``, float32."""
        q, k = wide(q), wide(k)
        if self.options.variant == "paper":
            b, t, g, d = k.shape
            k = k.unsqueeze(3).expand(b, t, g, self.heads.group, d).reshape(b, t, -1, d)
            phi = lambda x: torch.relu(torch.einsum("bthd,hdf->bthf", x, self.w.to(x.dtype)) + self.b)  # noqa: E731
            return phi(q), phi(k)
        own = self.heads.groups != self.heads.heads
        phi = lambda x, w, b: torch.relu(x.flatten(2) @ w.to(x.dtype) + b).view_as(x)  # noqa: E731
        return phi(q, self.w, self.b), phi(k, self.w_k if own else self.w, self.b_k if own else self.b)

    def _qk(self, inputs: Inputs):
        q, k = inputs.turned(*self._maps(inputs.q, inputs.k))
        return q, k * self.heads.scale

    def _decay(self, like: torch.Tensor):
        return log_decay(self.options.decay, self.heads.heads, like.device)

    def forward(self, inputs: Inputs, state=None):
        q, k = self._qk(inputs)
        v = inputs.v
        if k.shape[2] != v.shape[2]:  # the shared map gave every query head a key of its own
            v = v.repeat_interleave(self.heads.group, 2)
        y, state = linear_attention(
            q.to(v.dtype), k.to(v.dtype), v, feature="none", log_decay=self._decay(q), normalize=False,
            key_mask=inputs.key_mask, initial_state=state, return_state=True,
        )  # fmt: skip
        b, t, h, d = y.shape
        return self.norm(wide(y).reshape(b * t, h * d)).view(b, t, h, d).to(v.dtype), state

    def init_state(self, batch, device=None):
        return linear_state(batch, self.heads.heads, self.heads.dim, self.heads.dim, device)

    def attention_weights(self, inputs: Inputs):
        """The unnormalised similarities q_t . k_i gamma^(t-i): GroupNorm acts on the output, not on a row of weights."""
        return linear_attention_weights(*self._qk(inputs), feature="none", log_decay=self._decay(inputs.q), normalize=False, key_mask=inputs.key_mask)
