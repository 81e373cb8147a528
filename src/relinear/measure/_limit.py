"""How many tokens a model can read."""

import math
from typing import NamedTuple

from transformers import PreTrainedModel

from relinear.linearize.model import Linearized
from relinear.linearize.state import nbytes


class Limit(NamedTuple):
    """How many tokens a model can read, and why no more; `tokens` None: any number."""

    tokens: int | None
    why: str = ""

    def positions(self, separator: int) -> float:
        """How many tokens can be predicted after a separator of so many."""
        return math.inf if self.tokens is None else self.tokens - separator + 1


def limit_of(model: PreTrainedModel) -> Limit:
    """Softmax attention ends with the positions that the model was made for, and so do learnt positions. Where every layer's state has a fixed
    size and positions are rotary, a model reads on."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and hasattr(model.base_model, "wpe"):
        return Limit(most, f"the model learned {most} positions")
    if not isinstance(model, Linearized):
        return Limit(most, f"softmax attention, made for {most} positions")
    states = [layer.method.init_state(1, device="meta") for layer in model.attention_layers()]
    if most is not None and any(nbytes(state) == 0 for state in states):  # a state that begins with nothing in it grows
        return Limit(most, f"layers of softmax attention, made for {most} positions")
    return Limit(None)
