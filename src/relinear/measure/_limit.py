"""The number of tokens that a model can read."""

import math
from typing import NamedTuple

from transformers import PreTrainedModel

from relinear.linearize.model import Linearized
from relinear.linearize.state import nbytes


class Limit(NamedTuple):
    """The number of tokens that a model can read, and why no more. `tokens` None: any number."""

    tokens: int | None
    why: str = ""

    def positions(self, separator: int) -> float:
        """The number of tokens that can be predicted after a separator of so many tokens."""
        return math.inf if self.tokens is None else self.tokens - separator + 1


def limit_of(model: PreTrainedModel) -> Limit:
    """The limit of a model: its positions, where they are learnt or any layer is softmax attention over the
    whole text.

    There is none where every layer's state has a fixed size and positions are rotary.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and hasattr(model.base_model, "wpe"):
        return Limit(most, f"the model learned {most} positions")
    if not isinstance(model, Linearized):
        return Limit(most, f"softmax attention, made for {most} positions")
    states = [layer.method.init_state(1, device="meta") for layer in model.attention_layers()]
    # a state that is empty at the beginning grows
    if most is not None and any(nbytes(state) == 0 for state in states):
        return Limit(most, f"layers of softmax attention, made for {most} positions")
    return Limit(None)
