"""The settings that a model writes with, all of them given by us."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig, PreTrainedModel


@contextmanager
def own_settings(model: PreTrainedModel, **given: Any) -> Iterator[None]:
    """A context in which `generate` follows the `given` settings and transformers' defaults, and none of the
    model's `generation_config.json`.

    A folder of the hub has sampling, penalties, banned and forced tokens there, and `generate` takes from it
    what its caller leaves open, also beside a GenerationConfig that is handed over. Kept are the tokens that
    end a text, and that pad one, unless they are given.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    own = base.generation_config
    ends = {name: getattr(own, name) for name in ("eos_token_id", "pad_token_id")}
    base.generation_config = GenerationConfig(**ends | given)
    try:
        yield
    finally:
        base.generation_config = own
