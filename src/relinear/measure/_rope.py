"""Rotary embeddings that are scaled for one measurement, so that a softmax teacher reads beyond the positions
that it was made for.

Nothing is trained, and after the measurement the model is as it was before. The scaled embedding is
transformers' own, of a configuration that names it.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from relinear.errors import UserError
from relinear.linearize.model import Linearized
from relinear.measure._limit import Limit, limit_of

AS_IT_IS = "default"  # transformers' name of an embedding without a scaling: the angles go on as they are
NAMES = rf"^({AS_IT_IS}|(linear|yarn):[1-9]\d*(\.\d+)?)$"
POSSIBLE = f"{AS_IT_IS}, linear:<factor>, yarn:<factor>"


def reach(model: PreTrainedModel, scaling: str | None) -> Limit:
    """The number of tokens that a model reads with a scaling. None: as many as without.

    Raises UserError for a scaling of a model that needs none, and of one whose positions are no rotary
    embedding.
    """
    limit = limit_of(model)
    if scaling is None:
        return limit
    if not scalable(model):
        got = f"got {type(_base(model)).__name__}"
        raise UserError(
            f"rope_scaling {scaling} is for softmax teachers with one rotary embedding for all layers; {got}."
            " Possible: no rope_scaling"
        )
    if scaling == AS_IT_IS:
        return Limit(None)
    most = int(limit.tokens * float(scaling.partition(":")[2]))
    return Limit(most, f"{limit.why}, and {most} with {scaling}")


def scalable(model: PreTrainedModel) -> bool:
    """Whether a model is a softmax teacher whose positions are one rotary embedding for all layers."""
    base = _base(model)
    return not isinstance(base, Linearized) and limit_of(base).tokens is not None and bool(_rotary(base))


@contextmanager
def scaled(model: PreTrainedModel, scaling: str) -> Iterator[None]:
    """A context in which a model computes with a scaled rotary embedding. Afterwards it is as it was."""
    base = _base(model)
    before = _rotary(base)
    try:
        if scaling != AS_IT_IS:
            config = scaled_config(base.config, scaling)
            for name, module in before.items():
                base.set_submodule(name, type(module)(config).to(module.inv_freq.device))
        yield
    finally:
        for name, module in before.items():
            base.set_submodule(name, module)


def scaled_config(config, scaling: str):
    """A model's configuration with `rope_parameters` of transformers' `linear` or `yarn` (Peng et al., 2023),
    and as many positions more."""
    kind, _, factor = scaling.partition(":")
    found, positions = copy.deepcopy(config), config.max_position_embeddings
    found.rope_parameters = {**config.rope_parameters, "rope_type": kind, "factor": float(factor)}
    if kind == "yarn":
        found.rope_parameters["original_max_position_embeddings"] = positions
    found.max_position_embeddings = int(positions * float(factor))
    found.validate_rope()
    return found


def _base(model: PreTrainedModel) -> PreTrainedModel:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _rotary(model: PreTrainedModel) -> dict[str, object]:
    """The rotary embeddings of a model that has one kind for all layers, by name; nothing for others."""
    if "rope_theta" not in (getattr(model.config, "rope_parameters", None) or {}):
        return {}
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "rope_type") and hasattr(module, "inv_freq")
    }
