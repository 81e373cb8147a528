"""Perplexity by position on long whole documents: how much a model gains from tokens far behind it."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import PreTrainedModel

from relinear.measure import _documents
from relinear.measure._limit import limit_of
from relinear.plan.job import Job
from relinear.plan.readings import Reading

NEEDS = ("next_token", "documents")
YIELDS = ("perplexity",)
AXES = {"position": "64-128"}


class Options(_documents.Options):
    """Which documents are read, and the bands of positions."""


def measure(model: PreTrainedModel, data: Path, options: Options, job: Job) -> Iterator[Reading]:
    """`perplexity` at {"position": "64-128"} and so on, and over all positions; of the data set and, where it
    has several sources, of each.

    A token's position is the number of tokens of its document (or of the stretch of it) that the model has
    read before it; what the model reads before the first is the tokenizer's document separator. One pass a
    stretch, in pieces, its state carried. `n` counts documents, and errors are over documents. A model of
    constant memory goes on beyond its teacher's positions; softmax attention ends there, and the bands beyond
    are not defined. Writes `items.jsonl`: of each stretch the summed loss in nats and the number of tokens of
    each band.

    Raises UserError, before it reads anything, for a document shorter than the positions that are asked for.
    """
    model.eval()
    limit = limit_of(model)

    def score(separator, tokens):
        for position, logits, targets in _documents.pieces(model, tokens, separator, options.piece):
            yield position, {"loss": _documents.losses(logits, targets)[0]}

    documents, rows = _documents.read(data, options, limit, score, job.name, model)
    job.items(_documents.items(documents, rows))
    yield from _documents.over_bands(job, documents, rows, options, limit, {"perplexity": perplexity})


def perplexity(rows: Sequence[_documents.Read], bands: Sequence[str]) -> _documents.Mean:
    """exp of the mean loss; its error by the delta method, perplexity * se(mean loss)."""
    loss = _documents.mean(rows, bands, lambda sums: sums["loss"])
    value = math.exp(loss.value)
    return loss._replace(value=value, stderr=value * loss.stderr)
