"""Associative recall: how often the token after a sequence's last key is that key's value."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from relinear.errors import UserError
from relinear.get import recall
from relinear.machine.distributed import gathered, share
from relinear.measure._logits import float32_head, likeliest
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import Positive, Strict

NEEDS = ("recall",)


class Options(Strict):
    """Ask in batches of `batch_size` sequences."""

    batch_size: Positive


@torch.inference_mode()
def measure(model: PreTrainedModel, data: Path, options: Options, job: Job) -> Iterator[Reading]:
    """`accuracy` on the held-out sequences, and what they are: `floor`, what is right without any recall
    (`relinear.get.recall`), how often the key that is asked for came before (`occurrences`), the number of
    tokens that there are (`vocabulary`) and of a sequence's (`length`); and `tied`, how often the answer was
    drawn among several likeliest tokens.

    Writes `items.jsonl`, what was answered to each sequence. Raises UserError where the model knows fewer
    tokens than the data have.
    """
    rows = recall.rows_of(data, "heldout")
    if rows.max() >= model.config.vocab_size:
        raise UserError(
            f"{job.name}: the data have the token {rows.max()}; the model knows 0 to"
            f" {model.config.vocab_size - 1}"
        )
    model.eval()
    answered: list[tuple[int, tuple[int, bool]]] = []
    with float32_head(model):
        for at in share(range(0, len(rows), options.batch_size)):
            tokens = torch.from_numpy(rows[at : at + options.batch_size, :-1].astype(np.int64)).to(
                model.device
            )
            best, tied = likeliest(model(tokens, use_cache=False, logits_to_keep=1).logits[:, -1], tokens)
            answered += enumerate(zip(best.tolist(), tied.tolist(), strict=True), at)
    answers = dict(gathered(answered))
    right = np.array([answers[i][0] == row[-1] for i, row in enumerate(rows)])
    job.items(
        {"item": i, "answer": answers[i][0], "right": bool(hit), "tied": answers[i][1]}
        for i, hit in enumerate(right)
    )
    of, n = job.settings["data"], len(rows)
    yield Reading("accuracy", of, {}, *_mean(right), n)
    yield Reading("floor", of, {}, *_mean(recall.floor(rows)), n)
    yield Reading("occurrences", of, {}, *_mean(recall.occurrences(rows)), n)
    yield Reading("vocabulary", of, {}, float(recall.vocabulary(data)), None, n)
    yield Reading("tied", of, {}, *_mean(np.array([answers[i][1] for i in range(n)])), n)
    yield Reading("length", of, {}, float(rows.shape[1]), None, n)


def _mean(values: np.ndarray) -> tuple[float, float]:
    """A mean over sequences with its standard error."""
    return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5)
