"""SUPRA: linear attention with RoPE after the feature map, a fixed decay per head and GroupNorm instead of
the denominator (Mercat et al. 2024, Section 2.3). No transfer stage: everything is trained on the
language-modelling loss.

variant `paper`: phi = ReLU(W x + b) per head, shared by q and k. variant `code`: one linear layer over all
heads jointly (k has its own when it has fewer heads).
Decay `released` is the released code's slopes s_i = 2^(-8 (i+1) / H) with gamma = exp(-s), which is its
2^(-0.25 (i+1)) at 32 heads and goes on to any head count, where that code raises; `retnet` is gamma = 1 -
2^(-5 - i), spread over at most 8 octaves. init: W starts random as a linear layer does, or as the identity.
normalizer and rope lead back to T2R, which divides by the sum of similarities and turns queries and keys
before the map: with both, random W and no decay, it is T2R. The printed code leaves the decay out of that
sum, so decay and denominator do not go together here.
"""

from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import nn

from relinear.attention import _base
from relinear.attention._base import Attention, Inputs, identity, linear_init, wide
from relinear_kernels.linear_attention import linear_attention
from relinear_kernels.linear_attention_reference import linear_attention_weights, linear_state


class Options(_base.Options):
    """The options of a run with SUPRA's attention."""

    variant: Literal["paper", "code"] = "paper"
    decay: Literal["released", "retnet", "none"] = "released"
    init: Literal["identity", "random"] = "identity"
    normalizer: Literal["groupnorm", "denominator"] = "groupnorm"
    rope: Literal["after", "before"] = "after"  # the map

    @model_validator(mode="after")
    def _sum_without_decay(self) -> Self:
        if self.normalizer == "denominator" and self.decay != "none":
            raise ValueError(
                f"normalizer 'denominator' is a sum without decay; got decay {self.decay!r}, possible: decay"
                " 'none', or groupnorm"
            )
        return self


def log_decay(kind: str, heads: int, device=None) -> torch.Tensor | None:
    """log gamma per head ``[H]``, the same in every layer, for any head count."""
    i = torch.arange(heads, dtype=torch.float32, device=device)
    if kind == "released":
        return -(2.0 ** (-8 * (i + 1) / heads))
    if kind == "retnet":
        return torch.log1p(-(2.0 ** (-5 - 8 * i / max(heads, 8))))
    return None


class Method(Attention):
    """SUPRA's attention: a trained feature map, with fixed decays and GroupNorm unless its options say
    otherwise."""

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
        if not self._divides:
            self.norm = nn.GroupNorm(h, h * d, affine=False)

    def _maps(self, q, k):
        """phi of q ``[B, T, H, D]`` and k ``[B, T, H or Hkv, D]``, float32."""
        q, k = wide(q), wide(k)
        if self.options.variant == "paper":
            b, t, g, d = k.shape
            k = k.unsqueeze(3).expand(b, t, g, self.heads.group, d).reshape(b, t, -1, d)
            return self._mapped(q), self._mapped(k)
        own = self.heads.groups != self.heads.heads
        phi = lambda x, w, b: torch.relu(x.flatten(2) @ w.to(x.dtype) + b).view_as(x)  # noqa: E731
        return phi(q, self.w, self.b), phi(k, self.w_k if own else self.w, self.b_k if own else self.b)

    def _mapped(self, x):
        """phi of ``[B, T, H, D]`` by the map of each head."""
        y = torch.bmm(x.flatten(0, 1).transpose(0, 1), self.w.to(x.dtype)).transpose(0, 1)
        return torch.relu(y.unflatten(0, x.shape[:2]) + self.b)

    def _qk(self, inputs: Inputs):
        if self.options.rope == "before":
            q, k = self._maps(*inputs.rotated())
        else:
            q, k = inputs.turned(*self._maps(inputs.q, inputs.k))
        return q, k * self.heads.scale

    @property
    def _divides(self) -> bool:
        return self.options.normalizer == "denominator"

    def _decay(self, like: torch.Tensor):
        return log_decay(self.options.decay, self.heads.heads, like.device)

    def forward(self, inputs: Inputs, state=None):
        """Head outputs of a piece, and the linear state after it."""
        q, k = self._qk(inputs)
        v = inputs.v
        y, state = linear_attention(
            q.to(v.dtype),
            k.to(v.dtype),
            v,
            feature="none",
            log_decay=self._decay(q),
            normalize=self._divides,
            key_mask=inputs.key_mask,
            initial_state=state,
            return_state=True,
        )
        if self._divides:
            return y, state
        b, t, h, d = y.shape
        return self.norm(wide(y).reshape(b * t, h * d)).view(b, t, h, d).to(v.dtype), state

    def init_state(self, batch, device=None, dtype=torch.float32):
        """The linear state before the first token."""
        return linear_state(batch, self.heads.heads, self.heads.dim, self.heads.dim, device, dtype)

    def attention_weights(self, inputs: Inputs):
        """The similarities q_t . k_i gamma^(t-i), over their row's sum where that is the normalizer:
        GroupNorm acts on the output instead."""
        fades = {"log_decay": self._decay(inputs.q), "normalize": self._divides}
        return linear_attention_weights(*self._qk(inputs), feature="none", key_mask=inputs.key_mask, **fades)
