"""The inputs of a linearized model's attention layers as it reads."""

from collections.abc import Iterator

import torch
from torch import Tensor

from relinear.attention._base import Inputs
from relinear.linearize.model import Linearized
from relinear.linearize.transfer import layer_inputs


def own_inputs(model: Linearized, tokens: Tensor) -> Iterator[tuple[torch.nn.Module, Inputs]]:
    """Each layer's method with its inputs, as the linearized model itself computes them from tokens ``[B,
    T]``."""
    given: list[Tensor] = []

    def keep(_, args, kwargs) -> None:
        given.append(args[0] if args else kwargs["hidden_states"])

    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in model.attention_layers()]
    try:
        model(tokens, use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    yield from layer_inputs(model, given)
