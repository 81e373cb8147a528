"""Agreement with the teacher, by position: how far a model's next-token distributions are from those of the
model it was made of."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from relinear.linearize.loading import load_teacher
from relinear.measure import _documents
from relinear.measure._limit import limit_of
from relinear.measure._logits import peak
from relinear.plan.job import Job
from relinear.plan.readings import Reading

NEEDS = ("next_token", "documents")
YIELDS = ("kl", "top1", "perplexity_ratio", "tied")
AXES = {"position": "64-128"}


class Options(_documents.Options):
    """Which documents are read, and the bands of positions."""


def measure(model: PreTrainedModel, data: Path, options: Options, job: Job) -> Iterator[Reading]:
    """At {"position": "64-128"} and so on, and over all positions, of the same documents as
    `perplexity_by_position`:

    `kl`, KL(teacher || model) of the next-token distributions in nats; `top1`, the share of tokens whose
    likeliest one is the same for both; `perplexity_ratio`, the model's perplexity over the teacher's, whose
    error is that of the paired difference of losses; and `tied`, the share of tokens for which the model or
    the teacher has several likeliest ones. There `top1` counts how often both take the same, were each to
    draw one.

    The teacher is the pretrained model that the run began with, softmax attention and no adapter, in the
    model's dtype; it reads beside the model, piece by piece, and nothing of its logits is kept, which are
    float32 for both. Beyond its positions nothing is defined. `n` counts documents, and errors are over
    documents. Writes `items.jsonl`: of each stretch the sums of each band (`kl`, `top1`, `tied`, `loss`,
    `teacher_loss`, `tokens`).

    Raises UserError, before it reads anything, for a document shorter than the positions that are asked for.
    """
    model.eval()
    teacher = load_teacher(job.parents["model"], model.dtype, str(model.device))
    limit = min(limit_of(teacher), limit_of(model), key=lambda found: found.positions(1))

    def score(separator, tokens):
        both = (_documents.pieces(m, tokens, separator, options.piece) for m in (teacher, model))
        for theirs, ours in zip(*both, strict=True):
            yield ours.position, compare(theirs, ours)

    documents, rows = _documents.read(data, options, limit, score, job.name, teacher, model)
    job.items(_documents.items(documents, rows))
    yield from _documents.over_bands(
        job,
        documents,
        rows,
        options,
        limit,
        {"kl": kl, "top1": top1, "perplexity_ratio": ratio, "tied": tied},
    )


def compare(theirs: _documents.Piece, ours: _documents.Piece):
    """Token by token ``[B, T]``: `kl`, `top1`, `tied`, and both losses. One row at a time, since each has
    several values of every logit."""
    rows = [
        _compared(*row) for row in zip(theirs.logits, theirs.targets, ours.logits, ours.targets, strict=True)
    ]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _compared(
    their_logits: Tensor, their_targets: Tensor, logits: Tensor, targets: Tensor
) -> dict[str, Tensor]:
    (teacher_loss, p), (loss, q) = (
        _documents.losses(their_logits, their_targets),
        _documents.losses(logits, targets),
    )
    (largest, best, several), (their_largest, their_best, theirs_several) = peak(logits), peak(their_logits)
    same, tied = (best == their_best).float(), several | theirs_several
    if tied.any():
        first, their_first = (
            logits[tied] == largest[tied][:, None],
            their_logits[tied] == their_largest[tied][:, None],
        )
        same[tied] = (first & their_first).sum(-1) / (first.sum(-1) * their_first.sum(-1))
    return {
        "kl": (p.exp() * (p - q)).sum(-1),
        "top1": same,
        "tied": tied.float(),
        "loss": loss,
        "teacher_loss": teacher_loss,
    }


def kl(rows: Sequence[_documents.Read], bands: Sequence[str]) -> _documents.Mean:
    """The mean KL divergence from the teacher in the given bands of positions, with its error."""
    return _documents.mean(rows, bands, lambda sums: sums["kl"])


def top1(rows: Sequence[_documents.Read], bands: Sequence[str]) -> _documents.Mean:
    """The share of positions in the given bands whose likeliest token is the teacher's, with its error."""
    return _documents.mean(rows, bands, lambda sums: sums["top1"])


def tied(rows: Sequence[_documents.Read], bands: Sequence[str]) -> _documents.Mean:
    """The share of positions in the given bands where the model or the teacher has several likeliest tokens,
    with its error."""
    return _documents.mean(rows, bands, lambda sums: sums["tied"])


def ratio(rows: Sequence[_documents.Read], bands: Sequence[str]) -> _documents.Mean:
    """exp of the mean difference of losses; its error by the delta method."""
    difference = _documents.mean(rows, bands, lambda sums: sums["loss"] - sums["teacher_loss"])
    value = math.exp(difference.value)
    return difference._replace(value=value, stderr=value * difference.stderr)
