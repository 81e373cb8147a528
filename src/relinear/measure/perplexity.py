"""Perplexity over held-out text."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from relinear.get.packed import Packed, chance_loss
from relinear.machine.distributed import gathered, rank, share
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import Positive, Strict

NEEDS = ("next_token",)


class Window(NamedTuple):
    """One window by its number: its summed loss in nats, and the number of predicted tokens."""

    window: int
    loss: float
    tokens: int


class Options(Strict):
    """Measure the first `tokens` of the held-out text in windows of `seq_len`, `batch_size` of them a forward
    pass."""

    tokens: Positive
    seq_len: Positive
    batch_size: Positive


def measure(model: PreTrainedModel, data: Path, options: Options, job: Job) -> Iterator[Reading]:
    """`perplexity` with its standard error; `chunk_mean_exp`, the number that LoLCATs' released code prints;
    and `chance_perplexity`, that of guessing each word by how often it occurs. All are of the text's name.

    Writes `items.jsonl`, a line a window: its summed loss in nats, how many tokens were predicted, and the
    sha256 of its tokens.
    """
    tokens, labels = Packed(data, "heldout", options.tokens).sequence(0)
    windows = losses(model, tokens, labels, seq_len=options.seq_len, batch_size=options.batch_size)
    cut = tokens[: len(windows) * options.seq_len].view(-1, options.seq_len).numpy()
    job.items(
        row._asdict() | {"sha256": hashlib.sha256(text.tobytes()).hexdigest()}
        for row, text in zip(windows, cut, strict=True)
    )
    found = over_windows(windows)
    of, n = job.settings["data"], found["tokens"]
    yield Reading("perplexity", of, {}, found["value"], found["stderr"], n)
    yield Reading("chunk_mean_exp", of, {}, found["chunk_mean_exp"], None, n)
    yield Reading("chance_perplexity", of, {}, math.exp(chance_loss(data, model.config.vocab_size)), None, n)


def perplexity(
    model: PreTrainedModel,
    tokens: Int[Tensor, " n"],
    labels: Int[Tensor, " n"],
    *,
    seq_len: int,
    batch_size: int,
) -> dict[str, float]:
    """Perplexity of a causal language model on a stream of tokens: `over_windows` of its `losses`."""
    return over_windows(losses(model, tokens, labels, seq_len=seq_len, batch_size=batch_size))


@torch.inference_mode()
def losses(
    model: PreTrainedModel,
    tokens: Int[Tensor, " n"],
    labels: Int[Tensor, " n"],
    *,
    seq_len: int,
    batch_size: int,
) -> list[Window]:
    """The loss of a causal language model in each window of a stream of tokens, windows that do not overlap;
    of several processes with the same model each takes its share of the batches.

    Args:
        tokens: the text. It is cut into windows of seq_len; a shorter rest is left out.
        labels: as in transformers, labels[i] is tokens[i], or -100 where no loss is taken. A window's first
        token has nothing
            before it and is never predicted.
        seq_len: window length, at least 2. Two windows are needed for a standard error.
        batch_size: windows in one forward pass.

    Raises:
        ValueError: too few tokens, or no label among them.
        FloatingPointError: a loss that is NaN or infinite, naming its window.
    """
    windows = len(tokens) // seq_len
    if seq_len < 2 or windows < 2:
        raise ValueError(
            f"got {len(tokens)} tokens for windows of seq_len={seq_len}; need 2 windows of 2 tokens or more"
        )
    tokens, labels = (flat[: windows * seq_len].view(windows, seq_len) for flat in (tokens, labels))

    model.eval()
    rows = []
    mine = share(
        list(
            zip(
                range(0, windows, batch_size), tokens.split(batch_size), labels.split(batch_size), strict=True
            )
        )
    )
    total = sum(inputs.numel() for _, inputs, _ in mine)
    with tqdm(total=total, desc="perplexity", unit="tok", unit_scale=True, disable=rank() > 0) as bar:
        for first, inputs, targets in mine:
            logits = model(inputs.to(model.device), use_cache=False).logits
            # float32 logits of one at a time
            for window, (row, target) in enumerate(
                zip(logits, targets.to(logits.device), strict=True), first
            ):
                loss = F.cross_entropy(row[:-1].float(), target[1:], reduction="sum").item()
                rows.append(Window(window, loss, int((target[1:] != -100).sum())))
            bar.update(inputs.numel())

    rows = sorted(gathered(rows))
    for window, loss, _ in rows:
        if not math.isfinite(loss):
            start = window * seq_len
            raise FloatingPointError(
                f"got a loss of {loss} in window {window} of {windows} (tokens {start} to"
                f" {start + seq_len - 1})"
            )
    if not any(row.tokens for row in rows):
        raise ValueError(f"got no token to predict: all {len(tokens) * seq_len} labels are -100")
    return rows


def over_windows(rows: Sequence[Window]) -> dict[str, float]:
    """Perplexity over windows, two or more.

    Returns:
        value: exp of the mean loss over all predicted tokens.
        stderr: of `value`, by the delta method: value * se(mean loss). With window means m_w over c_w tokens,
        the mean loss
            is the ratio L = sum c_w m_w / sum c_w, and se(L)^2 = W/(W-1) sum (c_w (m_w - L))^2 / (sum c_w)^2;
            for windows of equal length, the standard deviation of the m_w over sqrt(W). Windows, not tokens,
            are taken as independent.
        tokens: how many were predicted.
        chunk_mean_exp: mean over windows of exp(m_w), the number that LoLCATs' released code prints. It is
        never below
            `value` for windows of equal length (Jensen), so the two must not be compared.
    """
    windows = len(rows)
    loss, count = (torch.tensor(column, dtype=torch.float64) for column in list(zip(*rows, strict=True))[1:])
    total = count.sum()
    mean = loss.sum() / total
    error = (windows / (windows - 1) * (loss - count * mean).square().sum()).sqrt() / total
    used = count > 0
    return {
        "value": mean.exp().item(),
        "stderr": (mean.exp() * error).item(),
        "tokens": int(total),
        "chunk_mean_exp": (loss[used] / count[used]).exp().mean().item(),
    }
