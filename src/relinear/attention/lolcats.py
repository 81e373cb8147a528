"""LoLCATs: learned feature maps transferred from softmax attention, alone or beside a short sliding window of
softmax (Zhang et al. 2024).

variant `code` (the released code, and the later paper's numbers): phi(x) = [softmax(x W), softmax(-x W)],
untied per head, no skip, W with
  64 columns even where heads have 128 dimensions, which makes the state half of Hedgehog's there; the window
  and everything older share one denominator, the window weighted by g = sigmoid(factor), g = 0.1 at the
  start; w = 64.
variant `paper` (the workshop paper): phi(x) = f(x W + x) with f in {1 + ELU, ReLU, exp} (its Eq. 6); the
window mixes two separately
  normalised parts, y = sigma window + (1 - sigma) rest (its Eq. 8); w = 16.
`window: 0` is linear attention alone. The window is a plain sliding one: the released "terraced" tiles change
earlier outputs with the total length and differ from decoding. `state_per: key_head` is ours: the released
code repeats the keys of a group before it maps them.

Switched off in a trained model (`_parts`): without `linear` the window has all the weight, which is method
`window` without sinks, since the shared denominator is then the window's own (and in Eq. 8 sigma is 1);
without `window` a query sees what is older than the window alone, normalised over itself, and nothing where
nothing is.
"""

from typing import Literal, NamedTuple

import torch
from pydantic import model_validator
from torch import Tensor, nn

from relinear.attention import _base
from relinear.attention._base import Attention, Inputs, identity, wide
from relinear.attention._parts import Parts
from relinear_kernels.hybrid_attention import hybrid_attention
from relinear_kernels.hybrid_attention_reference import hybrid_attention_weights, hybrid_state
from relinear_kernels.linear_attention import linear_attention
from relinear_kernels.linear_attention_reference import (
    LinearState,
    linear_attention_weights,
    linear_features,
    linear_state,
)
from relinear_kernels.sliding_window_attention import left, sliding_window_attention
from relinear_kernels.sliding_window_attention_reference import (
    WindowState,
    sliding_window_weights,
    window_state,
)

FEATURES = {"code": ("softmax_pm", "exp_pm"), "paper": ("exp", "relu", "elu")}
CODE_WINDOW_FACTOR = 0.1
CODE_COLUMNS = 64


class Options(_base.StateOptions):
    """The options of a run with LoLCATs' attention."""

    variant: Literal["code", "paper"] = "code"
    feature: Literal["softmax_pm", "exp_pm", "exp", "relu", "elu"] | None = None  # None: the variant's first
    window: int = 0

    @model_validator(mode="after")
    def _consistent(self):
        have = FEATURES[self.variant]
        if self.feature is not None and self.feature not in have:
            raise ValueError(f"variant {self.variant!r} has features {', '.join(have)}; got {self.feature!r}")
        if self.window < 0:
            raise ValueError(f"window must be 0 (none) or more; got {self.window}")
        if self.variant == "code" and self.window and self.map == "exp_pm":
            raise ValueError("a window shares its denominator with bounded features: softmax_pm; got exp_pm")
        return self

    @property
    def map(self) -> str:
        """The feature map by its name: the option's, or that of the variant."""
        return self.feature or FEATURES[self.variant][0]


class Delayed(NamedTuple):
    """A ring of the last w keys, which wait to leave the window, the linear state of those that left it, and
    whether any has ``[B]``."""

    ring: WindowState
    linear: LinearState
    left: Tensor


class Method(Parts, Attention):
    """LoLCATs' attention: linear, or linear beyond a window of softmax attention."""

    Options = Options
    causal_only = False
    PARTS = ("linear", "window")

    @classmethod
    def parts(cls, options):
        """The parts of a layer: both with a window, the linear one without."""
        return cls.PARTS if options.window else ("linear",)

    def _causal_only(self):
        return bool(self.options.window)

    def __init__(self, heads, options):
        super().__init__(heads, options)
        h, d, self.states = heads.heads, heads.dim, options.states(heads)
        # With the skip connection of the paper's map, W = 0 is the map that W = identity is without it.
        columns = min(CODE_COLUMNS, d) if options.variant == "code" else d
        start = identity(h, d, columns) if options.variant == "code" else torch.zeros(h, d, d)
        self.w_q, self.w_k = nn.Parameter(start.clone()), nn.Parameter(start[: self.states].clone())
        self.features = columns * (2 if options.map.endswith("_pm") else 1)
        if options.window:
            factor = CODE_WINDOW_FACTOR if options.variant == "code" else 0.5
            self.window_factor = nn.Parameter(torch.full((h,), factor).logit())

    def _maps(self) -> dict:
        w_q, w_k = self.w_q, self.w_k
        if self.options.variant == "paper":
            skip = torch.eye(self.heads.dim, device=w_q.device, dtype=w_q.dtype)
            w_q, w_k = w_q + skip, w_k + skip
        return {"w_q": w_q, "w_k": w_k, "feature": self.options.map}

    def _hybrid(self) -> dict:
        return {
            "window": self.options.window,
            "window_factor": wide(self.window_factor).sigmoid(),
            "scale": self.heads.scale,
        }

    def forward(self, inputs: Inputs, state=None):
        """Head outputs of a piece, and the state after it: linear, or of the hybrid."""
        q, k = inputs.rotated()
        common = {"key_mask": inputs.key_mask, "return_state": True}
        if not self.options.window:
            return linear_attention(
                q, k, inputs.v, **self._maps(), **common, causal=self.heads.causal, initial_state=state
            )
        if "linear" in self.switched_off:
            return self._near(q, k, inputs, state)
        if "window" in self.switched_off:
            state = state or self._delayed_state(q.shape[0], q.device, k.dtype)
            far, _, state = self._far(q, k, inputs, state)
            return far, state
        if self.options.variant == "code":
            return hybrid_attention(
                q, k, inputs.v, **self._maps(), **self._hybrid(), **common, initial_state=state
            )
        return self._mixture(q, k, inputs, state)

    def _mixture(self, q, k, inputs: Inputs, state):
        """The workshop paper's Eq. 8. Where nothing is older than the window, the window has all the
        weight."""
        near_state, delayed = state or (None, self._delayed_state(q.shape[0], q.device, k.dtype))
        near, near_state = self._near(q, k, inputs, near_state)
        far, older, delayed = self._far(q, k, inputs, delayed)
        sigma = torch.where((older > 0)[..., None, None], wide(self.window_factor).sigmoid()[:, None], 1.0)
        return (sigma * near + (1 - sigma) * far).to(inputs.v.dtype), (near_state, delayed)

    def _near(self, q, k, inputs: Inputs, state):
        """Softmax within the window alone, and the state after it."""
        return sliding_window_attention(
            q, k, inputs.v, window=self.options.window, scale=self.heads.scale, key_mask=inputs.key_mask,
            initial_state=state, return_state=True,
        )  # fmt: skip

    def _far(self, q, k, inputs: Inputs, delayed):
        """Linear attention on what is older than the window, how many keys have left it by each step ``[B,
        T]``, and the state after them."""
        ring, linear, before = delayed
        keys, values, mask, ring = left(ring, k, inputs.v, inputs.key_mask)
        far, linear = linear_attention(
            q, keys, values, **self._maps(), key_mask=mask, initial_state=linear, return_state=True
        )
        older = mask.cumsum(1) + before[:, None]
        return far, older, Delayed(ring, linear, older[:, -1].clamp(max=1))

    def _delayed_state(self, batch: int, device, dtype):
        h = self.heads
        return Delayed(
            window_state(batch, self.options.window, h.groups, h.dim, device=device, dtype=dtype),
            linear_state(batch, self.states, self.features, h.dim, device, dtype),
            torch.zeros(batch, dtype=torch.long, device=device),
        )

    def init_state(self, batch, device=None, dtype=torch.float32):
        """The state before the first token: linear, or of the hybrid."""
        h, o = self.heads, self.options
        if not o.window:
            return linear_state(batch, self.states, self.features, h.dim, device, dtype)
        if "linear" in self.switched_off:
            return window_state(batch, o.window - 1, h.groups, h.dim, device=device, dtype=dtype)
        if "window" in self.switched_off:
            return self._delayed_state(batch, device, dtype)
        if o.variant == "code":
            return hybrid_state(
                batch,
                self.states,
                h.groups,
                h.dim,
                self.features,
                window=o.window,
                device=device,
                dtype=dtype,
            )
        near = window_state(batch, o.window - 1, h.groups, h.dim, device=device, dtype=dtype)
        return near, self._delayed_state(batch, device, dtype)

    def phi(self, inputs: Inputs):
        """None with a window, else features of q and k: `attention_weights` is their product, each row
        divided by its sum."""
        return None if self.options.window else linear_features(*inputs.rotated(), **self._maps())

    def attention_weights(self, inputs: Inputs):
        """The T x T weights of the method, row = query."""
        q, k = inputs.rotated()
        if not self.options.window:
            return linear_attention_weights(
                q, k, **self._maps(), key_mask=inputs.key_mask, causal=self.heads.causal
            )
        if self.options.variant == "code" and not self.switched_off:
            return hybrid_attention_weights(q, k, **self._maps(), **self._hybrid(), key_mask=inputs.key_mask)
        near = sliding_window_weights(
            q, k, window=self.options.window, scale=self.heads.scale, key_mask=inputs.key_mask
        )
        if "linear" in self.switched_off:
            return near
        length = q.shape[1]
        far = linear_attention_weights(q, k, **self._maps(), key_mask=inputs.key_mask)
        # The part beyond the window is normalised over itself: divide full rows by their sum there.
        far = far * torch.ones(length, length, dtype=torch.bool, device=q.device).tril(-self.options.window)
        total = far.sum(-1, keepdim=True)
        # a row without older keys; a clamp to the tiniest number has no finite gradient
        total = torch.where(total > 0, total, 1.0)
        if "window" in self.switched_off:
            return far / total
        real = (
            torch.ones(q.shape[:2], dtype=torch.bool, device=q.device)
            if inputs.key_mask is None
            else inputs.key_mask
        )
        older = nn.functional.pad(real.cumsum(1), (self.options.window, 0))[:, None, :length, None]
        sigma = torch.where(older > 0, wide(self.window_factor).sigmoid()[:, None, None], 1.0)
        return sigma * near + (1 - sigma) * far / total
