"""Softmax attention as a method: the teacher's own layer, for layers that a hybrid keeps.

Where the teacher limits the layer to a sliding window, so does this, with a state of that size; otherwise its
state is the only one that grows.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from relinear.attention._base import Attention, Inputs, softmax_output, softmax_weights
from relinear_kernels.sliding_window_attention import sliding_window_attention
from relinear_kernels.sliding_window_attention_reference import WindowState, window_state


class SoftmaxState(NamedTuple):
    """All keys and values so far, ``[B, T, Hkv, D]``, and which of them are real ``[B, T]``."""

    k: Tensor
    v: Tensor
    mask: Tensor


class Method(Attention):
    """Softmax attention as the teacher has it."""

    causal_only = False

    @property
    def grows(self) -> bool:
        """Whether all keys and values are kept."""
        return self.heads.window is None

    def forward(self, inputs: Inputs, state: SoftmaxState | WindowState | None = None):
        """Head outputs of a piece, and the keys and values after it; an encoder's layer has no state."""
        if not self.heads.causal:
            return softmax_output(inputs, self.heads), None
        batch, length = inputs.q.shape[:2]
        q, k = inputs.rotated()
        if self.heads.window is not None:
            return sliding_window_attention(
                q, k, inputs.v, window=self.heads.window, scale=self.heads.scale, key_mask=inputs.key_mask,
                initial_state=state, return_state=True,
            )  # fmt: skip
        v, mask = inputs.v, inputs.key_mask
        if mask is None:
            mask = torch.ones(batch, length, dtype=torch.bool, device=q.device)
            if state is None:  # needs no T x T mask
                return softmax_output(inputs, self.heads), SoftmaxState(k, v, mask)
        if state is not None:
            k, v, mask = (
                torch.cat([state.k.to(k.dtype), k], 1),
                torch.cat([state.v.to(v.dtype), v], 1),
                torch.cat([state.mask, mask], 1),
            )
        state = SoftmaxState(k, v, mask)
        before = k.shape[1] - length
        own = torch.arange(length, device=q.device)[:, None] + before
        places = torch.arange(k.shape[1], device=q.device)
        # a padding row sees itself, so that it has no NaN; nobody reads it
        seen = (mask[:, None, None] & (places <= own)) | (places == own)
        q, k, v = (x.transpose(1, 2).to(inputs.v.dtype) for x in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=self.heads.scale, enable_gqa=True
        )
        return y.transpose(1, 2), state

    def init_state(self, batch: int, device=None, dtype=torch.float32) -> SoftmaxState | WindowState:
        """No keys and values yet; those of a window have their full size from the beginning."""
        if self.heads.window is not None:
            return window_state(
                batch, self.heads.window - 1, self.heads.groups, self.heads.dim, device=device, dtype=dtype
            )
        empty = torch.zeros(batch, 0, self.heads.groups, self.heads.dim, device=device, dtype=dtype)
        return SoftmaxState(empty, empty, torch.zeros(batch, 0, dtype=torch.bool, device=device))

    def attention_weights(self, inputs: Inputs):
        """The teacher's own weights, row = query."""
        return softmax_weights(inputs, self.heads)
