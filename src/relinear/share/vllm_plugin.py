"""What vLLM calls as it starts: names the linearized classes, and where the model for them is, which is
imported when one is served."""

import importlib

from vllm import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig


class WithStates(VerifyAndUpdateConfig):
    """Keeps vLLM from taking a model whose config names only full attention for one without states."""

    @staticmethod
    def verify_and_update_model_config(model_config) -> None:
        """Remove such a list of kinds of layers; `relinear.share.served` puts it back for the model."""
        config = model_config.hf_config
        if set(getattr(config, "layer_types", None) or ()) == {"full_attention"}:
            config.layer_types = None


def register() -> None:
    """Tell vLLM's registry about linearized causal models, in any process and any number of times."""
    for _, linearized in importlib.import_module("relinear.linearize.model").CLASSES.values():
        if linearized.causal:
            ModelRegistry.register_model(linearized.__name__, "relinear.share.served:ServedForCausalLM")
            MODELS_CONFIG_MAP[linearized.__name__] = WithStates
