"""A run's model as an architecture that transformers has itself, for servers that run no code of ours.

Softmax attention to a window of positions, without sinks, is that of Mistral, and of Qwen2 and Qwen3 with
`use_sliding_window`: the last `sliding_window` positions, the query's own included, at the teacher's rotary
angles. A run that keeps softmax attention is plain already.
"""

import torch
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from relinear.errors import UserError
from relinear.linearize.model import Linearized

QWEN = {"use_sliding_window": True, "max_window_layers": 0}
# The teacher's class -> the class with a window that has its weights by the same names, and the settings that
# turn its window on.
WINDOWED = {
    LlamaForCausalLM: (MistralForCausalLM, {}),
    MistralForCausalLM: (MistralForCausalLM, {}),
    Qwen2ForCausalLM: (Qwen2ForCausalLM, QWEN),
    Qwen3ForCausalLM: (Qwen3ForCausalLM, QWEN),
}
# the settings that say which class has them, or which of its layers have a window
OWN = {"model_type", "architectures", "layer_types", "transformers_version"}
POSSIBLE = (
    "possible: a run with softmax attention, or the method window with sinks=0 and one window for all layers;"
    " without --plain, any causal model, which vLLM serves where relinear is installed"
)


def plain_form(model: PreTrainedModel) -> PreTrainedModel:
    """The model as a class of transformers, to be saved: it shares the weights of `model`, and what is no
    weight stays on the device `meta`. A model that is not linearized is returned.

    Raises UserError where no such class computes the same.
    """
    if not isinstance(model, Linearized):
        return model
    if wrong := _wrong(model):
        raise UserError(f"no architecture of transformers computes this model: {wrong}; {POSSIBLE}")
    [window] = {layer.method.window for layer in model.attention_layers()}
    cls, on = WINDOWED[type(model).__bases__[1]]
    known = {*cls.config_class().to_dict(), "head_dim"} - OWN
    given = {name: value for name, value in model.config.to_dict().items() if name in known}
    config = cls.config_class(**{**given, **on, "sliding_window": window})
    with torch.device("meta"):
        built = cls(config)
    built.load_state_dict(model.state_dict(), assign=True)
    built.tie_weights()
    built.generation_config = model.generation_config
    return built.eval()


def _wrong(model: Linearized) -> str | None:
    """Why a linearized model has no plain form; None where it has one."""
    recipe, teacher = model.config.relinear, type(model).__bases__[1]
    if recipe["method"] == "softmax":
        return f"it is {teacher.__name__} in a class of ours, for linearize(model, 'softmax')"
    if recipe["method"] != "window":
        return f"{recipe['method']} keeps a state that no layer there has"
    if sinks := recipe["options"]["sinks"]:
        return f"its window has sinks={sinks}, first positions that are seen from any distance"
    if kept := recipe["keep_softmax_layers"]:
        return f"layers {', '.join(map(str, kept))} stay softmax, and the others have a window"
    if len(windows := {layer.method.window for layer in model.attention_layers()}) > 1:
        return f"its layers have unequal windows, {', '.join(map(str, sorted(windows)))}"
    if teacher not in WINDOWED:
        return f"no class with a window has the weights of {teacher.__name__}"
    biases = [name for name in ("attention_bias", "mlp_bias") if getattr(model.config, name, False)]
    if biases and WINDOWED[teacher][0] is MistralForCausalLM:
        return f"it has {' and '.join(biases)}, and Mistral has no biases"
    return None
