"""transformers' own tests of a model, of its source distribution, on linearized Llamas. Run by
tests/test_mixins.py in a process of its own.

The methods are in METHODS, each as "name" or "name:option=value,..."; a class of tests each: `TestLolcats`.
"""

import importlib
import os
import sys
import unittest
from types import ModuleType

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from relinear.linearize.model import CLASSES, recipe_of

# The distribution leaves out these two modules, whose tests are of exporters and of decoding.
for module, mixin in (("exporters", "ExportTesterMixin"), ("generation", "GenerationTesterMixin")):
    inner = "test_export" if module == "exporters" else "test_utils"
    sys.modules[f"tests.{module}"] = ModuleType(f"tests.{module}")
    sys.modules[f"tests.{module}.{inner}"] = ModuleType(f"tests.{module}.{inner}")
    setattr(sys.modules[f"tests.{module}.{inner}"], mixin, type(mixin, (), {}))

theirs = importlib.import_module("tests.test_modeling_common")
CONFIG, MODEL = CLASSES[LlamaForCausalLM]
SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Tester:
    """What the mixin asks of a model's tester."""

    batch_size, seq_length, is_training, num_hidden_layers, hidden_size = 3, 7, True, 2, 32

    def __init__(self, method, options):
        self.method, self.options = method, options

    def get_config(self):
        with torch.device("meta"):
            recipe = recipe_of(LlamaForCausalLM(LlamaConfig(**SIZES)), self.method, **self.options)
        return CONFIG(**SIZES, relinear=recipe)

    def prepare_config_and_inputs_for_common(self):
        ids = theirs.ids_tensor([self.batch_size, self.seq_length], SIZES["vocab_size"] - 3) + 3
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Linearized(theirs.ModelTesterMixin):
    all_model_classes = (MODEL,)
    has_attentions = False  # output_attentions is refused: no layer makes T x T weights

    def setUp(self):
        self.model_tester = Tester(*self.linearized)

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        return {**inputs_dict, **({"labels": inputs_dict["input_ids"]} if return_labels else {})}


for method in os.environ["METHODS"].split():
    name, _, given = method.partition(":")
    options = {k: int(v) for k, v in (item.split("=") for item in given.split(",") if item)}
    test = f"Test{name.title()}"
    globals()[test] = type(test, (Linearized, unittest.TestCase), {"linearized": (name, options)})
