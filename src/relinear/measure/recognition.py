"""The share of pictures that a model of pictures gives their class."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from relinear.errors import UserError
from relinear.get.labels import Labelled
from relinear.measure._logits import float32_head, likeliest
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import Positive, Strict

NEEDS = ("pictures",)


class Options(Strict):
    """Read `batch_size` pictures at a time."""

    batch_size: Positive = 64


@torch.inference_mode()
def measure(model: PreTrainedModel, data: Path, options: Options, job: Job) -> Iterator[Reading]:
    """`accuracy`; `floor`, that of the most frequent class; and `tied`, how often the answer was drawn among
    several likeliest classes; as shares.

    Writes `items.jsonl`, the label and the answer of each picture. Raises UserError for a model of other
    classes.
    """
    pictures = Labelled(data, "heldout", model.config.pixels)
    if model.config.num_labels != pictures.classes:
        raise UserError(
            f"{job.name}: the model tells {model.config.num_labels} classes apart; the pictures have"
            f" {pictures.classes}"
        )
    of, n = job.settings["data"], len(pictures)
    batches = [range(at, min(at + options.batch_size, n)) for at in range(0, n, options.batch_size)]
    found = []
    with float32_head(model):
        for chosen in batches:
            pixels = pictures.batch(chosen)[0].to(model.device)
            found.append(torch.stack(likeliest(model(pixels).logits, pixels)).cpu())
    answers, tied = torch.cat(found, 1).numpy()
    right = answers == pictures.labels
    job.items(
        {
            "item": i,
            "label": int(pictures.labels[i]),
            "answer": int(answers[i]),
            "outcome": float(right[i]),
            "tied": bool(tied[i]),
        }
        for i in range(n)
    )
    yield Reading("accuracy", of, {}, float(right.mean()), float(right.std() / n**0.5), n)
    yield Reading("tied", of, {}, float(tied.mean()), float(tied.std() / n**0.5), n)
    yield Reading("floor", of, {}, float(np.bincount(pictures.labels).max() / n), 0.0, n)
