"""The layer that takes an attention layer's place, with the teacher's projections around a method, and the
places of such layers in a model."""

import functools
from collections.abc import Callable
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from relinear.attention._base import Attention, Inputs, softmax_output

# tokens whose intermediate values fit a core's caches, so that a long prompt takes time linear in its length
PIECE = 2048


class LinearizedAttention(nn.Module):
    """The teacher's projections around a method instead of softmax attention. Same names, same call as the
    layer it replaces."""

    causal = True  # a token sees only the tokens before it
    PARTS: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")

    def __init__(self, teacher: nn.Module, method: Attention):
        super().__init__()
        for name in self.PARTS:
            if hasattr(teacher, name):
                setattr(self, name, getattr(teacher, name))
        # its place in the cache; None where the teacher has none
        self.layer_idx: int | None = getattr(teacher, "layer_idx", None)
        self.method = method
        # while it is a list: each input is kept, and the layer computes the teacher's softmax attention
        self.recording: list[Tensor] | None = None

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q ``[B, T, H, D]``, k and v ``[B, T, Hkv, D]`` before any rotary embedding."""
        shape = (*x.shape[:2], -1, self.method.heads.dim)
        x = x.flatten(0, 1)  # once, where each projection would
        q, k, v = self.q_proj(x).view(shape), self.k_proj(x).view(shape), self.v_proj(x).view(shape)
        return (self.q_norm(q), self.k_norm(k), v) if hasattr(self, "q_norm") else (q, k, v)

    def output(self, y: Tensor) -> Tensor:
        return self.o_proj(y)

    def inputs(
        self, x: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, key_mask: Tensor | None
    ) -> Inputs:
        """The method's inputs, as the teacher projects them. x ``[B, T, hidden]``."""
        return Inputs(x, *self.project(x), *(position_embeddings or (None, None)), key_mask)

    def attend(self, inputs: Inputs, state) -> tuple[Tensor, Any]:
        """The method over a piece of any length: on a CPU, where no gradient is kept, `PIECE` tokens at a
        time."""
        if inputs.x.is_cuda or torch.is_grad_enabled() or inputs.x.shape[1] <= PIECE:
            return self.method(inputs, state)
        outputs = []
        for piece in zip(*(repeat(None) if x is None else x.split(PIECE, 1) for x in inputs), strict=False):
            y, state = self.method(Inputs(*piece), state)
            outputs.append(y)
        return torch.cat(outputs, 1), state

    def apart(self, attend: Callable[[Inputs], Tensor], inputs: Inputs, documents) -> Tensor:
        """Head outputs of packed rows, each document by itself (`relinear.linearize.documents.Documents`)."""
        batch, length = inputs.x.shape[:2]
        tokens = [None if x is None else x.expand(batch, *x.shape[1:]).flatten(0, 1) for x in inputs[:-1]]
        outputs = []
        for places, real, inside in documents.groups:
            y = attend(Inputs(*(None if x is None else x[places] for x in tokens), real))
            outputs.append(y.flatten(0, 1)[inside])
        return torch.cat(outputs)[documents.order].unflatten(0, (batch, length))

    def in_turn(self, inputs: Inputs, layer, unpadded) -> Tensor:
        """Head outputs of a piece with padding between or after its tokens: rows with as many tokens
        together, and without their padding, so that it moves no window (`relinear.linearize.documents.Rows`).
        A row without tokens keeps its state."""
        batch, length = inputs.x.shape[:2]
        if layer.state is None:
            layer.state = self.method.init_state(batch, inputs.x.device)
        tokens = [None if x is None else x.expand(batch, *x.shape[1:]).flatten(0, 1) for x in inputs[:-1]]
        y = inputs.v.new_zeros(batch * length, self.method.heads.heads, self.method.heads.dim)
        for rows, places in unpadded:
            part, after = self.attend(
                Inputs(*(None if x is None else x[places] for x in tokens)), layer.rows(rows)
            )
            y = y.index_copy(0, places.flatten(), part.flatten(0, 1).to(y.dtype))
            layer.put(rows, after)
        layer.advance(layer.state, length)
        return y.unflatten(0, (batch, length))

    def forward(
        self,
        hidden_states,
        position_embeddings=None,
        attention_mask=None,
        past_key_values=None,
        cache=None,
        documents=None,
        unpadded=None,
        **kwargs,
    ):
        # `Linearized.forward` sends the padding mask down as [B, 1, 1, T]; with no column, or None, every
        # token is real.
        key_mask = (
            None if attention_mask is None or attention_mask.shape[-1] == 0 else attention_mask[:, 0, 0]
        )
        inputs = self.inputs(hidden_states, position_embeddings, key_mask)
        if self.recording is not None:
            self.recording.append(hidden_states)
            teacher = functools.partial(softmax_output, heads=self.method.heads)
            y = teacher(inputs) if documents is None else self.apart(teacher, inputs, documents)
            return self.output(y.flatten(2)), None
        if documents is not None:
            y = self.apart(lambda document: self.attend(document, None)[0], inputs, documents)
            return self.output(y.to(hidden_states.dtype).flatten(2)), None
        cache = past_key_values if cache is None else cache  # transformers calls it `cache` from 5.24 on
        layer = None if cache is None else cache.layers[self.layer_idx]
        if unpadded is not None and not self.method.grows:
            return self.output(self.in_turn(inputs, layer, unpadded).to(hidden_states.dtype).flatten(2)), None
        y, state = self.attend(inputs, None if layer is None else layer.state)
        if layer is not None:
            layer.advance(state, hidden_states.shape[1])
        return self.output(y.to(hidden_states.dtype).flatten(2)), None


class EncoderAttention(LinearizedAttention):
    """The projections of an encoder's self-attention around a method: no rotary embedding, no cache."""

    causal = False

    def attend(self, inputs, state):
        return self.method(inputs, state)  # not in pieces, which would not see each other's keys

    def forward(self, hidden_states, attention_mask=None, *args, **kwargs):
        return super().forward(hidden_states, attention_mask=attention_mask)


class Layout(NamedTuple):
    """The place of the attention in a teacher's class, and the layer that replaces it."""

    layers: str = "layers"  # a path below the output head, its parts joined by dots, as in the fields below
    attention: str = "self_attn"  # a path in a layer
    swapped: type[LinearizedAttention] = LinearizedAttention
    rotary_by_type: bool = False  # local and global layers rotate at different frequencies

    def blocks(self, model: PreTrainedModel) -> nn.ModuleList:
        return model.base_model.get_submodule(self.layers)

    def attention_layers(self, model: PreTrainedModel) -> list[nn.Module]:
        return [block.get_submodule(self.attention) for block in self.blocks(model)]

    def windows(self, model: PreTrainedModel) -> list[int | None]:
        """The sliding window that the teacher itself limits each layer to; None where it sees everything."""
        # one for all layers, where a layer does not name its own (Mistral)
        whole = getattr(model.config, "sliding_window", None)
        return [
            layer.method.heads.window
            if isinstance(layer, LinearizedAttention)
            else getattr(layer, "sliding_window", whole)
            for layer in self.attention_layers(model)
        ]

    def rotary(self, model: PreTrainedModel, x: Tensor) -> list[tuple[Tensor, Tensor] | None]:
        """Each layer's rotary cosines and sines for a sequence from its start, in the dtype of x ``[B, T,
        hidden]``."""
        layers, embedding = len(self.blocks(model)), getattr(model.base_model, "rotary_emb", None)
        if embedding is None:
            return [None] * layers
        positions = torch.arange(x.shape[1], device=x.device)[None]
        if self.rotary_by_type:
            return [embedding(x, positions, kind) for kind in model.config.layer_types]
        return [embedding(x, positions)] * layers
