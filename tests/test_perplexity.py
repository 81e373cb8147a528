"""Perplexity over windows: its value, its error and its refusals."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from relinear.measure.perplexity import perplexity

VOCAB, SEQ = 50, 16


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, initializer_range=0.4,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (5 * SEQ + 7,), generator=torch.Generator().manual_seed(1))


def window_losses(model, tokens) -> torch.Tensor:
    rows = tokens[: len(tokens) // SEQ * SEQ].view(-1, 1, SEQ)
    return torch.stack([model(row, labels=row).loss for row in rows]).double().detach()


def test_a_model_that_knows_nothing_scores_the_vocabulary(model, tokens):
    model.lm_head.weight.data.zero_()
    result = perplexity(model, tokens, tokens, seq_len=SEQ, batch_size=2)
    assert result["value"] == pytest.approx(VOCAB) and result["chunk_mean_exp"] == pytest.approx(VOCAB)
    assert result["stderr"] == pytest.approx(0, abs=1e-4)


def test_windows_of_equal_length_have_the_textbook_mean_and_error(model, tokens):
    losses = window_losses(model, tokens)
    result = perplexity(model, tokens, tokens, seq_len=SEQ, batch_size=2)
    assert result["tokens"] == 5 * (SEQ - 1)
    assert result["value"] == pytest.approx(losses.mean().exp().item(), rel=1e-5)
    assert result["stderr"] == pytest.approx(
        (losses.mean().exp() * losses.std() / math.sqrt(5)).item(), rel=1e-4
    )
    assert result["chunk_mean_exp"] == pytest.approx(losses.exp().mean().item(), rel=1e-5)
    assert result["chunk_mean_exp"] > result["value"]


def test_every_token_counts_the_same_when_windows_differ(model, tokens):
    labels = tokens.clone()
    labels[: SEQ - 2] = labels[2 * SEQ : 3 * SEQ] = -100  # window 0 keeps two labels, window 2 none
    result = perplexity(model, tokens, labels, seq_len=SEQ, batch_size=3)
    rows, targets = tokens[: 5 * SEQ].view(5, SEQ), labels[: 5 * SEQ].view(5, SEQ)
    loss = torch.nn.functional.cross_entropy(
        model(rows).logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten()
    )
    assert result["tokens"] == 2 + 3 * (SEQ - 1)
    assert result["value"] == pytest.approx(loss.exp().item(), rel=1e-5)


def test_the_error_covers_the_spread_of_repeated_texts(model):
    draws = torch.randint(VOCAB, (150, 12 * SEQ), generator=torch.Generator().manual_seed(2))
    results = [perplexity(model, draw, draw, seq_len=SEQ, batch_size=12) for draw in draws]
    spread = torch.tensor([result["value"] for result in results]).std().item()
    assert torch.tensor([result["stderr"] for result in results]).mean().item() == pytest.approx(
        spread, rel=0.25
    )


def test_the_batch_size_changes_nothing(model, tokens):
    one, many = (perplexity(model, tokens, tokens, seq_len=SEQ, batch_size=size) for size in (1, 4))
    assert one == pytest.approx(many, rel=1e-6)


def test_a_nan_is_located(model, tokens):
    model.model.embed_tokens.weight.data[7] = float("nan")
    tokens[tokens == 7] = 8
    tokens[3 * SEQ + 2] = 7
    with pytest.raises(FloatingPointError, match=r"window 3 of 5 \(tokens 48 to 63\)"):
        perplexity(model, tokens, tokens, seq_len=SEQ, batch_size=2)


@pytest.mark.parametrize("length, seq_len", [(2 * SEQ - 1, SEQ), (SEQ, 1)])
def test_too_little_text_is_refused(model, length, seq_len):
    tokens = torch.zeros(length, dtype=torch.long)
    with pytest.raises(ValueError, match=f"got {length} tokens for windows of seq_len={seq_len}"):
        perplexity(model, tokens, tokens, seq_len=seq_len, batch_size=1)


def test_text_without_labels_is_refused(model, tokens):
    with pytest.raises(ValueError, match="all 80 labels are -100"):
        perplexity(model, tokens, torch.full_like(tokens, -100), seq_len=SEQ, batch_size=1)
