"""The gate of a model of pictures: with the patches in another order, each with its position, the logits are
the same.

A method that reads where tokens stand (cosFormer) is asked for finite logits alone.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from relinear.linearize.model import Linearized
from relinear.measure.gate import TOLERANCE, GateError, distance
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import Strict

NEEDS = ("pictures",)
YIELDS = ("passed", "finite", "tolerance", "order_consistency")
PICTURES = 2  # of noise


class Options(Strict):
    """None."""


@torch.inference_mode()
def order_consistency(model: PreTrainedModel, pixels: Tensor) -> float:
    """How far the logits of pictures ``[B, pixels]`` move, relative to their size, where the patches come in
    another order."""
    drawn = torch.Generator().manual_seed(0)

    def shuffled(module, inputs, rows: Tensor) -> Tensor:
        return torch.cat(
            [rows[:, :1], rows[:, 1:][:, torch.randperm(rows.shape[1] - 1, generator=drawn).to(rows.device)]],
            1,
        )

    whole = model(pixels).logits
    hook = model.base_model.embeddings.register_forward_hook(shuffled)
    try:
        return distance(model(pixels).logits, whole)
    finally:
        hook.remove()


@torch.inference_mode()
def measure(model: PreTrainedModel, data: Path | None, options: Options, job: Job) -> Iterator[Reading]:
    """Readings `passed`, and the distance. Raises GateError where the gate is not passed: then nothing else
    is measured."""
    drawn = torch.Generator().manual_seed(job.settings["seed"])
    pixels = torch.randint(model.config.vocab_size, (PICTURES, model.config.pixels), generator=drawn).to(
        model.device
    )
    finite, tolerance, distances = bool(model(pixels).logits.isfinite().all()), TOLERANCE[model.dtype], {}
    if not (
        isinstance(model, Linearized) and any(layer.method.reads_order for layer in model.attention_layers())
    ):
        distances["order_consistency"] = order_consistency(model, pixels)
    found = {
        "passed": finite and all(d <= tolerance for d in distances.values()),
        **distances,
        "finite": finite,
        "tolerance": tolerance,
    }
    if not found["passed"]:
        raise GateError(f"the model is not fit to be scored: {found}")
    for name, value in found.items():
        yield Reading(name, "model", {}, float(value), None, PICTURES)
