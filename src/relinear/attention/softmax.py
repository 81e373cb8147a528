"""Softmax attention as a method: the teacher's own layer, for layers that a hybrid keeps. Its state is the only one that grows."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from relinear.attention._base import Attention, Inputs, softmax_weights


class SoftmaxState(NamedTuple):
    """All keys and values so far, ``[B, T, Hkv, D]``, and which of them are real ``[B, T]``."""

    k: Tensor
    v: Tensor
    mask: Tensor


class Method(Attention):
    def forward(self, inputs: Inputs, state: SoftmaxState | None = None):
        batch, length = inputs.q.shape[:2]
        q, k = inputs.rotated()
        v, mask = inputs.v, inputs.key_mask
        if mask is None:
            mask = torch.ones(batch, length, dtype=torch.bool, device=q.device)
        if state is not None:
            k, v, mask = torch.cat([state.k.to(k.dtype), k], 1), torch.cat([state.v.to(v.dtype), v], 1), torch.cat([state.mask, mask], 1)
        state = SoftmaxState(k, v, mask)
        before = k.shape[1] - length
        seen = torch.ones(length, k.shape[1], dtype=torch.bool, device=q.device).tril(before)[None, None] & mask[:, None, None]
        seen = seen | torch.eye(length, dtype=torch.bool, device=q.device).new_zeros(length, k.shape[1]).diagonal_scatter(
            torch.ones(length, dtype=torch.bool, device=q.device), before
        )  # a padding row sees itself: no NaN, and nobody reads it
        q, k, v = (x.transpose(1, 2).to(inputs.v.dtype) for x in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.heads.scale, enable_gqa=True)
        return y.transpose(1, 2), state

    def init_state(self, batch: int, device=None) -> SoftmaxState:
        empty = torch.zeros(batch, 0, self.heads.groups, self.heads.dim, device=device)
        return SoftmaxState(empty, empty, torch.zeros(batch, 0, dtype=torch.bool, device=device))

    def attention_weights(self, inputs: Inputs):
        return softmax_weights(inputs, self.heads.scale)
