"""Training from scratch: every weight of a model, what its method added included, on the loss of the next
token.

With `patience` the loss on sequences kept aside is taken after each epoch; the weights of its lowest value
are the result, and so many epochs without a lower one end the training. Everything is computed in float32,
unless the recipe says `autocast`, which rounds what feature maps and their sums need to tell many keys apart,
as in associative recall.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from relinear.errors import UserError
from relinear.folders import config_of
from relinear.get.packed import IGNORED, Packed, chance_loss
from relinear.linearize.assemble import assemble
from relinear.linearize.faster import fuse_norms, maskless
from relinear.linearize.loading import auto_class
from relinear.machine.distributed import agreed, share, spread, summed
from relinear.machine.hardware import place
from relinear.plan.job import Job
from relinear.train.compiled import compile_blocks, recompute, wanted
from relinear.train.loop import of_job, train
from relinear.train.next_token import batches_of, collected, summed_loss
from relinear.train.room import Fits

BEST = "best.safetensors"  # in the job's work folder: the weights of the lowest validation loss so far
WEIGHTS = "model.safetensors"
# added to the seed of new weights: a model from scratch was drawn by the seed itself, and the same weights
# would come again
APART = 1_000_003


class Converged(Exception):  # noqa: N818, an end and no error
    """The validation loss has not fallen for as long as the recipe waits."""


def work(job: Job) -> dict[str, Any]:
    """Write `model.safetensors`: all weights.

    Raises UserError where the text has tokens that the model has not, or no more sequences than are kept
    aside.
    """
    device, dtype = place(job)
    if not job.settings["recipe"]["autocast"]:
        job.hardware["dtype"], dtype = "float32", torch.float32
    torch.manual_seed(job.seed)
    model = assemble(job.parents["model"], job.links, dtype=torch.float32)
    if job.settings["recipe"]["init"] == "random":
        redraw(model, job.parents["model"], job.seed)
    metrics = fit(job, model, device, dtype)
    weights = collected(model, job.leads)
    if job.leads and (job.work / BEST).is_file():
        (job.work / BEST).replace(job.out / WEIGHTS)
    elif job.leads:
        save_file(weights, job.out / WEIGHTS)
    return metrics


def redraw(model: PreTrainedModel, folder: Path, seed: int) -> None:
    """Draw every weight anew, in place, as a model of this `folder`'s config begins; what a method added
    keeps its own beginning."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + APART)
        begun = auto_class(folder).from_config(config_of(folder), dtype=model.dtype).state_dict()
    missing, unexpected = model.load_state_dict(begun, strict=False)
    if unexpected or any(".method." not in name for name in missing):
        raise RuntimeError(
            f"a model of {folder} begins with other weights than this one has: {[*missing, *unexpected][:3]}"
        )


def last_alone(labels: np.ndarray, length: int) -> np.ndarray:
    """Labels ``[n * length]`` of sequences of `length` tokens, of which the last of each is learned and no
    other."""
    alone = np.full_like(labels, IGNORED)
    alone[length - 1 :: length] = labels[length - 1 :: length]
    return alone


def fit(job: Job, model: PreTrainedModel, device: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Train a model in place, on the device that it is moved to, in `dtype` by autocast. Returns the stage's
    metrics."""
    recipe, budget = job.settings["recipe"], job.settings["budget"]
    text = Packed(job.parents["text"], "train", budget["seq_len"])
    if recipe["learn"] == "last":
        text.labels = last_alone(text.labels, text.seq_len)
    sequences = len(text) - budget["validation"]
    if sequences < 1:
        raise UserError(
            f"{job.name}: {budget['validation']} sequences are to be kept aside for validation; the text"
            f" holds {len(text)}"
        )
    if sequences < len(text) and not text.labelled[sequences:].any():
        raise UserError(
            f"{job.name}: the {budget['validation']} sequences of {text.folder} that are kept aside for"
            " validation have no label; possible: more of them (the scale's `validation`), or data with"
            " shorter prompts"
        )
    if (largest := int(text.tokens.max())) >= model.config.vocab_size:
        raise UserError(
            f"{job.name}: the text has the token {largest}; the model knows 0 to"
            f" {model.config.vocab_size - 1}"
        )
    if device == "cuda":
        fuse_norms(model)
    fits = Fits(job, model, list(model.parameters()), device, beside=False, dtype=dtype)
    job.hardware["engine"] = spread(model, None, device, job.engine)
    recorded = device == "cuda" and job.hardware["engine"] == "ddp" and maskless(model)
    if job.recompute:
        recompute(model)
        recorded = False
    parameters = [p for p in model.parameters() if p.requires_grad]
    model.train()
    batch, accumulate = budget["batch_size"], budget["accumulate"]
    steps = max(budget["epochs"] * sequences // (batch * accumulate), 1)
    eager = compile_blocks(model) if wanted(job, device, steps) else None
    validation = Validation(job, model, text, sequences, dtype)

    def loss(tokens, labels, labelled):
        yield "lm", summed_loss(model, tokens, labels, dtype) / labelled

    tokens_per_step = batch * accumulate * text.seq_len
    batches = batches_of(
        text,
        sequences,
        device,
        steps=steps,
        batch_size=batch,
        accumulate=accumulate,
        seed=job.seed,
        name=job.name,
    )
    try:
        with fits:
            train(
                loss,
                [(parameters, recipe["lr"])],
                batches=batches,
                steps=steps,
                tokens_per_step=tokens_per_step,
                chance=chance_loss(job.parents["text"], model.config.vocab_size),
                recorded=recorded,
                eager=eager,
                **of_job(job, device)
                | {
                    "beside": (job.history, job.work / BEST),
                    "log": validation.log,
                    "resumed": validation.resume,
                },
            )
    except Converged:
        if device == "cuda":
            torch.cuda.synchronize()  # the loop's own stream, which it left without waiting
    job.tokens = validation.steps * tokens_per_step
    return {
        **job.losses(),
        **validation.metrics(),
        "steps": validation.steps,
        "tokens": job.tokens,
        "trainable_params": sum(p.numel() for p in parameters),
    }


class Validation:
    """The log of a training, with the loss on the sequences kept aside (from `first` on) at the end of each
    epoch over the others."""

    def __init__(self, job: Job, model: nn.Module, text: Packed, first: int, dtype: torch.dtype):
        budget = job.settings["budget"]
        self.job, self.model, self.text, self.first, self.dtype = job, model, text, first, dtype
        self.patience, self.batch = job.settings["recipe"]["patience"], budget["batch_size"]
        self.per_step = budget["batch_size"] * budget["accumulate"]
        self.losses: list[float] = []
        self.steps = 0

    def resume(self, step: int) -> None:
        """Take over the validation losses before this step, at which a checkpoint goes on."""
        self.job.resume(step)
        lines = (
            self.job.history.read_text().splitlines() if self.job.leads and self.job.history.is_file() else []
        )
        self.losses = agreed(
            [line["validation_loss"] for line in map(json.loads, lines) if "validation_loss" in line]
        )
        self.steps = step

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Raises Converged where there is nothing left to wait for."""
        self.steps = step + 1
        ended = self.steps * self.per_step // self.first > step * self.per_step // self.first
        if not ended or self.first == len(self.text):
            self.job.log(dict(metrics), step)
            return
        self.losses.append(self.loss())
        if self.patience and self.losses[-1] == min(self.losses):
            weights = collected(self.model, self.job.leads)
            if self.job.leads:
                save_file(weights, self.job.work / BEST)
        self.job.log({**metrics, "validation_loss": self.losses[-1]}, step)
        if self.patience and len(self.losses) - 1 - self.losses.index(min(self.losses)) >= self.patience:
            raise Converged

    @torch.no_grad()
    def loss(self) -> float:
        """The mean loss of a labelled token of the sequences kept aside; each process takes its share of
        them."""
        device = next(self.model.parameters()).device
        self.model.eval()
        total, labelled = 0.0, 0.0
        own = list(share(range(self.first, len(self.text))))
        for at in range(0, len(own), self.batch):
            tokens, labels = (
                torch.stack(x).to(device)
                for x in zip(*(self.text.sequence(i) for i in own[at : at + self.batch]), strict=True)
            )
            total += summed_loss(self.model, tokens, labels, self.dtype).item()
            labelled += float((labels[:, 1:] != IGNORED).sum())
        self.model.train()
        both = summed({"total": total, "labelled": labelled})
        return both["total"] / both["labelled"]

    def metrics(self) -> dict[str, float]:
        """The lowest validation loss and the epoch that had it, from 1; nothing where none was taken."""
        return (
            {"validation_loss": min(self.losses), "epoch": self.losses.index(min(self.losses)) + 1}
            if self.losses
            else {}
        )
