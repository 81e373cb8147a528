"""Faster forms of what transformers computes, put in place: attention without a mask, and norms by torch's
kernel."""

from types import MethodType

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from relinear.linearize.model import LAYOUTS, Linearized


def _unmasked(module, query, key, value, attention_mask, scaling=None, **kwargs) -> tuple[Tensor, None]:
    """torch's fused attention without a mask. One query reads its group's keys once: the heads of a group
    stand in as rows."""
    batch, heads, length, dim = query.shape
    if length == 1:
        out = F.scaled_dot_product_attention(
            query.view(batch, key.shape[1], -1, dim), key, value, scale=scaling
        ).view(batch, heads, 1, dim)
    else:
        out = F.scaled_dot_product_attention(
            query, key, value, scale=scaling, is_causal=True, enable_gqa=True
        )
    return out.transpose(1, 2), None


UNMASKED = "unmasked"
# transformers makes no mask for an implementation without a mask function
AttentionInterface.register(UNMASKED, _unmasked)


def maskless(model: PreTrainedModel) -> bool:
    """Have a model attend without a mask, in place, for inputs without padding. Returns whether it can.

    Linearized models do so without being told. A teacher cannot where it limits its layers to sliding
    windows.
    """
    if isinstance(model, Linearized):
        return True
    if type(model) not in LAYOUTS or any(LAYOUTS[type(model)].windows(model)):
        return False
    model.set_attn_implementation(UNMASKED)
    return True


NORMS = (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)  # Gemma's adds 1 to its weight


def fuse_norms(model: nn.Module) -> None:
    """Compute each RMSNorm with torch's kernel for it, in place: for training on a GPU, where transformers'
    seven take a sixth of a step of SmolLM2. It rounds to bfloat16 once where those do twice."""
    for layer in model.modules():
        if isinstance(layer, NORMS):
            # a bound method, so that a copy of the model has its own
            layer.forward = MethodType(_norm, layer)


def _norm(layer: nn.Module, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], layer.weight, layer.variance_epsilon)
