"""A Llama from scratch. Its default sizes are the smoke scale's, awkward on purpose: grouped KV heads, a head
count that is no power of two."""

from typing import Self

import torch
from pydantic import PositiveFloat, PositiveInt, model_validator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from relinear.attention import _base
from relinear.families import _family


class Options(_base.Options):
    """The model's sizes, as LlamaConfig names them; `vocabulary`: so many tokens that are numbers, for data
    that are no text, instead of bytes."""

    vocabulary: PositiveInt | None = None
    hidden_size: PositiveInt = 96
    intermediate_size: PositiveInt = 256
    num_hidden_layers: PositiveInt = 2
    num_attention_heads: PositiveInt = 6
    num_key_value_heads: PositiveInt = 2
    head_dim: PositiveInt = 16
    max_position_embeddings: PositiveInt = 2048
    # Five times the usual: attention that is not uniform, so that methods differ from one another on it.
    initializer_range: PositiveFloat = 0.1

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError("head_dim must be even: rotary embeddings turn pairs")
        return self


class Family(_family.Family):
    """A Llama from scratch, with random weights."""

    Options = Options

    def random(self, options, seed, dtype):
        """A small Llama of random weights with the byte tokenizer, or with one token for each number."""
        given = Options.parse(self.name, dict(options))
        tokenizer = byte_tokenizer() if given.vocabulary is None else number_tokenizer(given.vocabulary)
        config = LlamaConfig(
            **given.model_dump(exclude={"vocabulary"}),
            vocab_size=len(tokenizer),
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            weights = LlamaForCausalLM(config).state_dict()
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.load_state_dict(weights)
        return model.eval(), tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, 256 of them, after `<|endoftext|>` (bos) and `<|im_end|>` (eos, padding).

    Like SmolLM2's it adds no special token by itself and separates documents with `<|endoftext|>`.
    """
    special = ["<|endoftext|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(special + alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=special[0], eos_token=special[1], pad_token=special[1]
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}assistant: "
    )
    return tokenizer


def number_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """The tokens "0" to "size - 1", each its own id, apart by spaces; none of them is special."""
    backend = Tokenizer(models.WordLevel({str(i): i for i in range(size)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend)
