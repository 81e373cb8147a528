"""A task learned by an encoder and a head: every weight, on the cross-entropy of the classes, or on the
squared error of numbers.

The head of the last step of the chain that left one goes on, where there is one; else it begins anew. With
`patience` the weights of the lowest loss on the texts kept aside are the result. Everything is computed in
float32.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from relinear.errors import UserError
from relinear.get.labels import Labelled
from relinear.get.packed import micro_batches
from relinear.linearize.assemble import to_train
from relinear.linearize.head import Classifier, Head, last_head
from relinear.linearize.model import Linearized
from relinear.machine.hardware import moved, place
from relinear.plan.job import Job
from relinear.train.loop import of_job, train
from relinear.train.pretrain import BEST, WEIGHTS, Converged, Validation


def work(job: Job) -> dict[str, Any]:
    """Write `model.safetensors`, all weights of the encoder, and `head.safetensors`.

    Raises UserError where the chain has a head for other classes, and where every text is kept aside.
    """
    device, _ = place(job)
    job.hardware["dtype"] = "float32"
    torch.manual_seed(job.seed)
    encoder = to_train(job.parents["model"], job.links, torch.float32)
    text = Labelled(job.parents["text"], "train", job.settings["budget"]["seq_len"])
    model = Classifier(encoder, head_of(job, encoder, text)).to(device)
    metrics = fit(job, model, text, device)
    if (job.work / BEST).is_file():
        model.load_state_dict(load_file(job.work / BEST), strict=False)  # buffers are not trained
    save_file(
        {n: p.detach().cpu().contiguous() for n, p in model.encoder.named_parameters()}, job.out / WEIGHTS
    )
    model.head.save(job.out)
    return metrics


def head_of(job: Job, encoder, text: Labelled) -> Head:
    """The head to begin with. Raises UserError for one of another number of outputs."""
    outputs, pool = max(text.classes, 1), job.settings["recipe"]["pool"]
    dropout = getattr(encoder.config, "hidden_dropout_prob", 0.0)
    found = last_head([folder for link in job.links for folder in link.steps])
    if found is None:
        return Head(encoder.config.hidden_size, outputs, pool, dropout)
    if (found.out.out_features, found.pool) != (outputs, pool):
        raise UserError(
            f"{job.name}: the chain's head has {found.out.out_features} outputs and pool: {found.pool}; the"
            f" task has {outputs} and {pool}. Possible: a chain without another task's classify step"
        )
    found.dropout.p = dropout
    return found


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    """The summed loss of outputs ``[B, C]``: cross-entropy of classes, or squared error of numbers."""
    if labels.is_floating_point():
        return F.mse_loss(outputs.squeeze(-1), labels, reduction="sum")
    return F.cross_entropy(outputs, labels, reduction="sum")


def fit(job: Job, model: Classifier, text: Labelled, device: str) -> dict[str, Any]:
    """Train a classifier in place. Returns the stage's metrics."""
    recipe, budget = job.settings["recipe"], job.settings["budget"]
    n = len(text) - text.validation
    if n < 1:
        raise UserError(
            f"{job.name}: {text.validation} texts are kept aside for validation; there are {len(text)}"
        )
    model.train()
    whole = text.seq_len if model.head.pool == "pair" else None  # each text of a pair has half of it
    batch, accumulate = budget["batch_size"], budget["accumulate"]
    steps = max(budget["epochs"] * n // (batch * accumulate), 1)
    parameters = [p for p in model.parameters() if p.requires_grad]
    # transformers looks at a mask in main memory
    recorded = device == "cuda" and isinstance(model.encoder, Linearized)

    def batches(step: int) -> Iterator[tuple[Tensor, ...]]:
        for chosen, _ in micro_batches(step, n=n, batch_size=batch, accumulate=accumulate, seed=job.seed):
            given = (*text.batch(chosen, width=text.seq_len if recorded else whole), text.labels_of(chosen))
            yield tuple(moved(x, device) for x in given)

    def loss(tokens: Tensor, mask: Tensor, types: Tensor, labels: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield "task", loss_of(model(tokens, mask, types), labels) / (batch * accumulate)

    validation = TaskValidation(job, model, text, n, torch.float32)
    tokens_per_step = text.tokens_of(batch * accumulate)
    try:
        train(
            loss,
            [(parameters, recipe["lr"])],
            batches=batches,
            steps=steps,
            tokens_per_step=tokens_per_step,
            recorded=recorded,
            **of_job(job, device)
            | {"beside": (job.history, job.work / BEST), "log": validation.log, "resumed": validation.resume},
        )
    except Converged:
        if device == "cuda":
            torch.cuda.synchronize()  # the loop's own stream, which it left without waiting
    job.tokens = text.tokens_of(validation.steps * batch * accumulate)
    return {
        **job.losses(),
        **validation.metrics(),
        "steps": validation.steps,
        "tokens": job.tokens,
        "trainable_params": sum(p.numel() for p in parameters),
    }


class TaskValidation(Validation):
    """The same on labelled texts."""

    @torch.no_grad()
    def loss(self) -> float:
        """The mean loss of the texts kept aside."""
        device, total = next(self.model.parameters()).device, 0.0
        self.model.eval()
        whole = self.text.seq_len if self.model.head.pool == "pair" else None
        for at in range(self.first, len(self.text), self.batch):
            chosen = range(at, min(at + self.batch, len(self.text)))
            tokens, mask, types, labels = (
                x.to(device) for x in (*self.text.batch(chosen, width=whole), self.text.labels_of(chosen))
            )
            total += loss_of(self.model(tokens, mask, types), labels).item()
        self.model.train()
        return total / (len(self.text) - self.first)
