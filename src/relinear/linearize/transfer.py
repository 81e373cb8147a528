"""The teacher's own attention inputs, layer by layer. Every transfer trains on them, and every fidelity is
measured on them."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from relinear.attention._base import Inputs
from relinear.machine.distributed import unsharded


@torch.no_grad()
def record(model: PreTrainedModel, tokens: Tensor, **more) -> list[Tensor]:
    """Inputs ``[B, T, hidden]`` of each attention layer of a linearized model while its layers compute the
    teacher's softmax attention.

    `more` are further inputs of the model: attention_mask, token_type_ids, position_ids.
    """
    layers = model.attention_layers()
    try:
        for layer in layers:
            layer.recording = []
        model(tokens, use_cache=False, logits_to_keep=1, **more)  # called as a whole, as FSDP requires
        return [layer.recording[0] for layer in layers]
    finally:
        for layer in layers:
            layer.recording = None


@torch.no_grad()
def layer_inputs(
    model: PreTrainedModel, recorded: list[Tensor], key_mask: Tensor | None = None
) -> Iterator[tuple[torch.nn.Module, Inputs]]:
    """Each layer's method with its inputs, which the teacher's projections make from the recorded ones.
    `key_mask` is False at padding."""
    for block, layer, x, rotary in zip(
        model.blocks(), model.attention_layers(), recorded, model.rotary(recorded[0]), strict=True
    ):
        with unsharded(block):
            inputs = layer.inputs(x, rotary, key_mask)
        yield layer.method, inputs
