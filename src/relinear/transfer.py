"""The teacher's own attention inputs, layer by layer: what every transfer trains on and every fidelity is measured on."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from relinear.attention._base import Inputs


@torch.no_grad()
def record(model: PreTrainedModel, tokens: Tensor) -> list[Tensor]:
    """Inputs ``[B, T, hidden]`` of each attention layer of a linearized model while its layers compute the teacher's softmax attention."""
    layers = model.attention_layers()
    try:
        for layer in layers:
            layer.recording = []
        model.base_model(tokens, attention_mask=torch.ones_like(tokens)[:, None, None].bool(), use_cache=False)
        return [layer.recording[0] for layer in layers]
    finally:
        for layer in layers:
            layer.recording = None


@torch.no_grad()
def layer_inputs(model: PreTrainedModel, recorded: list[Tensor]) -> Iterator[tuple[torch.nn.Module, Inputs]]:
    """Each layer's method with its inputs, as the teacher's projections make them from what was recorded."""
    for layer, x, rotary in zip(model.attention_layers(), recorded, model.rotary(recorded[0]), strict=True):
        yield layer.method, layer.inputs(x, rotary, None)
