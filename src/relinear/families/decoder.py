"""Decoders with rotary embeddings: Llama, Mistral, Qwen2, Qwen3, Gemma 3."""

from transformers.models.gemma3 import Gemma3ForCausalLM
from transformers.models.llama import LlamaForCausalLM
from transformers.models.mistral import MistralForCausalLM
from transformers.models.qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3 import Qwen3ForCausalLM

from relinear.families import _family
from relinear.families._layer import Layout


class Family(_family.Family):
    """Decoders of the Llama kind: Llama, Mistral, Qwen and Gemma."""

    layouts = {
        LlamaForCausalLM: Layout(),
        MistralForCausalLM: Layout(),
        Qwen2ForCausalLM: Layout(),
        Qwen3ForCausalLM: Layout(),
        Gemma3ForCausalLM: Layout(rotary_by_type=True),
    }
