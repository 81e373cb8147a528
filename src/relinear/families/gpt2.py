"""GPT-2: learned positions, and one projection that makes q, k and v."""

from typing import Self

import torch
from pydantic import PositiveFloat, PositiveInt, model_validator
from transformers import GPT2Config
from transformers.models.gpt2 import GPT2LMHeadModel

from relinear.attention import _base
from relinear.families import _family
from relinear.families._layer import Layout, LinearizedAttention
from relinear.families.tiny import byte_tokenizer


class FusedLinearizedAttention(LinearizedAttention):
    """GPT-2's projections around a method."""

    PARTS = ("c_attn", "c_proj", "resid_dropout")

    def project(self, x):
        """q, k and v of the layer's input, each `[B, T, H, D]`."""
        return tuple(p.unflatten(-1, (-1, self.method.heads.dim)) for p in self.c_attn(x).chunk(3, -1))

    def output(self, y):
        """The heads' outputs, projected, with dropout."""
        return self.resid_dropout(self.c_proj(y.contiguous()))  # a view is taken of it


class Options(_base.Options):
    """Sizes of one from scratch, by the names that other families have for them. The MLP is four times as
    wide as the model; nothing is dropped."""

    hidden_size: PositiveInt = 64
    num_hidden_layers: PositiveInt = 2
    num_attention_heads: PositiveInt = 4
    max_position_embeddings: PositiveInt = 512
    initializer_range: PositiveFloat = 0.02

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads, {self.num_attention_heads}"
            )
        return self


class Family(_family.Family):
    """GPT-2, whose queries, keys and values are one projection."""

    Options = Options
    layouts = {GPT2LMHeadModel: Layout("h", "attn", FusedLinearizedAttention)}

    def random(self, options, seed, dtype):
        """A GPT-2 of random weights with the byte tokenizer."""
        given, tokenizer = Options.parse(self.name, dict(options)), byte_tokenizer()
        config = GPT2Config(
            vocab_size=len(tokenizer),
            n_embd=given.hidden_size,
            n_layer=given.num_hidden_layers,
            n_head=given.num_attention_heads,
            n_positions=given.max_position_embeddings,
            initializer_range=given.initializer_range,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return GPT2LMHeadModel(config).to(dtype).eval(), tokenizer
