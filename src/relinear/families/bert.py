"""BERT: absolute positions, pairs of texts told apart by their types, every token sees every other."""

from typing import Self

import torch
from pydantic import PositiveFloat, PositiveInt, model_validator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from relinear.attention import _base
from relinear.families import _family
from relinear.families._layer import EncoderAttention, Layout


class BertAttention(EncoderAttention):
    """BERT's projections around a method. The output projection, with the residual, is a layer of its own in
    BERT and stays there."""

    PARTS = ("query", "key", "value")

    def project(self, x):
        """q, k and v of the layer's input, each `[B, T, H, D]`."""
        return tuple(
            p(x).unflatten(-1, (-1, self.method.heads.dim)) for p in (self.query, self.key, self.value)
        )

    def output(self, y):
        """The heads' outputs as they are: the projection is in another module."""
        return y


class Options(_base.Options):
    """Sizes of one from scratch, as BertConfig names them."""

    hidden_size: PositiveInt = 48
    intermediate_size: PositiveInt = 96
    num_hidden_layers: PositiveInt = 2
    num_attention_heads: PositiveInt = 6
    max_position_embeddings: PositiveInt = 512
    # Fifteen times the usual: attention that is not uniform, so that methods differ from one another on it.
    initializer_range: PositiveFloat = 0.3

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads, {self.num_attention_heads}"
            )
        return self


class Family(_family.Family):
    """BERT: an encoder, which reads in both directions."""

    Options = Options
    opening = "_encoders"
    layouts = {BertModel: Layout("encoder.layer", "attention.self", BertAttention)}

    def random(self, options, seed, dtype):
        """A BERT of random weights with the byte tokenizer."""
        tokenizer = byte_tokenizer()
        config = BertConfig(
            **Options.parse(self.name, dict(options)).model_dump(),
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return BertModel(config).to(dtype).eval(), tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, between [CLS] and [SEP]; the texts of a pair have types 0 and 1, as BERT's."""
    special = ["[PAD]", "[CLS]", "[SEP]"]
    vocab = {
        token: index for index, token in enumerate(special + sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(t, vocab[t]) for t in special[1:]],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
