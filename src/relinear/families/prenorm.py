"""An encoder that normalises before attention and MLP, with learned positions: the one of Nystromformer's
code for Long Range Arena (Xiong et al. 2021), which Hedgehog's Tables 6 and 13 are made with. It is from
scratch, and its tokens are numbers.

transformers has it as RobertaPreLayerNorm, which normalises the embeddings, too, and adds types to them.
Token 0 is padding.
"""

from typing import Annotated, Self

import torch
from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from transformers import RobertaPreLayerNormConfig, RobertaPreLayerNormModel

from relinear.attention import _base
from relinear.families import _family
from relinear.families._layer import Layout
from relinear.families.bert import BertAttention
from relinear.families.tiny import number_tokenizer

Share = Annotated[float, Field(ge=0, lt=1)]


class Options(_base.Options):
    """Sizes as RobertaPreLayerNormConfig names them, but for two: `vocabulary`, the number of tokens with
    padding, and `positions`."""

    vocabulary: PositiveInt
    positions: PositiveInt
    hidden_size: PositiveInt = 64
    intermediate_size: PositiveInt = 128
    num_hidden_layers: PositiveInt = 2
    num_attention_heads: PositiveInt = 2
    hidden_dropout_prob: Share = 0.1
    # of softmax attention alone: the code that these sizes come from has none in linear attention
    attention_probs_dropout_prob: Share = 0.1
    initializer_range: PositiveFloat = 0.02

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads, {self.num_attention_heads}"
            )
        return self


class Family(_family.Family):
    """An encoder with pre-normalisation and learned positions, from scratch."""

    Options = Options
    opening = "_encoders"
    layouts = {RobertaPreLayerNormModel: Layout("encoder.layer", "attention.self", BertAttention)}

    def positions(self, model):
        """Its longest sequence: the table of positions less its first rows, which no token has."""
        return model.config.max_position_embeddings - model.config.pad_token_id - 1

    def random(self, options, seed, dtype):
        """An encoder of random weights, and a tokenizer with one token for each number."""
        given = Options.parse(self.name, dict(options))
        config = RobertaPreLayerNormConfig(
            **given.model_dump(exclude={"vocabulary", "positions"}),
            vocab_size=given.vocabulary,
            max_position_embeddings=given.positions + 1,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return RobertaPreLayerNormModel(config).to(dtype).eval(), number_tokenizer(given.vocabulary)
