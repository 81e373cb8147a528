"""Attention operations of relinear. One op, one stem: `<op>_reference.py` is its definition (quadratic) and
its chunked torch form.

`linear_attention`, `gated_linear_attention` (a gate per channel), `gated_delta` (the delta rule, and what it
is without an erase), `sliding_window_attention`, `hybrid_attention`; `decode_step` is one token of any of
them; `attention_cross_entropy` is how far linear attention's weights are from softmax's, `rotary` the
position embedding, `token_cross_entropy` a language model's loss of each token, `linear_cross_entropy` its
sum from the inputs of the last layer, `scaled_sum` how two attentions' outputs are added.
RELINEAR_KERNELS=auto|torch|triton|reference forces a path; auto is Triton for CUDA tensors, torch elsewhere.

Importing the package imports none of its modules: a public name is fetched from its module when it is first
asked for.
"""

import importlib
import sys
from types import ModuleType

# Public name -> its module. relinear.plan.code reads this table from the source: keep it a literal.
MODULES = {
    "DeltaState": "gated_delta_reference",
    "FEATURES": "features",
    "HybridState": "hybrid_attention_reference",
    "LinearState": "linear_attention_reference",
    "WindowState": "sliding_window_attention_reference",
    "attention_cross_entropy": "attention_cross_entropy",
    "check_feature": "features",
    "cross_entropy": "attention_cross_entropy_reference",
    "decode_step": "decode_step",
    "delta_state": "gated_delta_reference",
    "gated_delta": "gated_delta",
    "gated_delta_weights": "gated_delta_reference",
    "gated_linear_attention": "gated_linear_attention",
    "gated_linear_attention_weights": "gated_linear_attention_reference",
    "hybrid_attention": "hybrid_attention",
    "hybrid_attention_weights": "hybrid_attention_reference",
    "hybrid_state": "hybrid_attention_reference",
    "linear_attention": "linear_attention",
    "linear_attention_weights": "linear_attention_reference",
    "linear_features": "linear_attention_reference",
    "linear_state": "linear_attention_reference",
    "rotary": "rotary",
    "scaled_sum": "scaled_sum",
    "sliding_window_attention": "sliding_window_attention",
    "sliding_window_weights": "sliding_window_attention_reference",
    "token_cross_entropy": "token_cross_entropy",
    "linear_cross_entropy": "linear_cross_entropy",
    "window_state": "sliding_window_attention_reference",
}
__all__ = list(MODULES)


def __getattr__(name: str):
    """The public name, from its module. Raises AttributeError where there is none."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; have {', '.join(MODULES)}")
    value = getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULES})


class _Package(ModuleType):
    """This package. Its attribute `linear_attention` is the op; Python would otherwise bind the module of
    that name on importing it."""

    def __setattr__(self, name: str, value) -> None:
        if isinstance(value, ModuleType) and MODULES.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
