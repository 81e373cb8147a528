"""The component switch: a trained model with a part of its method's attention off, nothing trained again."""

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedModel

from relinear.attention import load, options
from relinear.attention._parts import Parts
from relinear.errors import UserError


def check_parts(method: str, given: dict[str, Any], names: Iterable[str]) -> None:
    """Raises UserError where a method with these options does not have a part, or nothing that attends would
    be left. Needs no model."""
    kind, names = load(method), tuple(names)
    if names and not issubclass(kind, Parts):
        raise UserError(f"{method} has no part {names[0]!r} to switch off: it is one whole")
    if names:
        kind.check_parts(options(method, given), names)


def switch_off(model: PreTrainedModel, *names: str) -> PreTrainedModel:
    """Have every layer of a linearized model compute without these parts of its method, in place; without
    none of them: whole again.

    The method's file says what is left. Layers that are kept as softmax stay as they are. A cache that was
    filled before is of no use after. Raises UserError for a part that the method does not have, and where
    none that attends would be left.
    """
    layers = (
        [layer.method for layer in model.attention_layers() if isinstance(layer.method, Parts)]
        if hasattr(model, "attention_layers")
        else []
    )
    if names and not layers:
        raise UserError(
            f"{type(model).__name__} has no part {names[0]!r} to switch off: its attention is one whole"
        )
    for method in layers:
        method.switch_off(names)
    return model
