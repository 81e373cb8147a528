"""Stage 1, attention transfer: the methods' own parameters learn to do what the teacher's softmax attention does on the teacher's inputs.

All layers in one teacher-forced pass, no back-propagation through the model (LoLCATs Section 3; Hedgehog Section 4.3; Lizard Section 3.1).
"""

from collections.abc import Iterator

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from relinear.get.packed import Packed, micro_batches
from relinear.linearize.assemble import save_method, to_train
from relinear.linearize.faster import fuse_norms
from relinear.linearize.transfer import layer_inputs, record
from relinear.machine.distributed import rank, size, spread
from relinear.machine.hardware import memory_bytes, place
from relinear.plan.job import Job
from relinear.train.loop import train


def work(job: Job) -> dict:
    """Write `method.safetensors`: the trained parameters that the method added to the model."""
    device, dtype = place(job)
    torch.manual_seed(job.seed)
    model = to_train(job.parents["model"], job.links, dtype)
    metrics = fit(job, model, device)
    if job.leads:
        save_method(model, job.out / "method.safetensors")
    return metrics


def fit(job: Job, model: PreTrainedModel, device: str) -> dict:
    """Train the method's parameters of a linearized model, in place, on the device that it is moved to. Returns the stage's metrics."""
    recipe, budget = job.settings["recipe"], job.settings["budget"]
    text = Packed(job.parents["text"], "train", budget["seq_len"])
    parameters = list(model.method_parameters().values())
    model.requires_grad_(False)
    for p in parameters:
        p.requires_grad_(True)
    if device == "cuda":
        fuse_norms(model)
    job.hardware["engine"] = spread(model, parameters, device, job.engine)
    batch, accumulate = budget["batch_size"], budget["accumulate"]
    steps = max(budget["epochs"] * len(text) // (batch * accumulate), 1)
    trained = [bool(list(layer.method.parameters())) for layer in model.attention_layers()]  # kept softmax layers have nothing to train
    stored = _Stored(job.parents["activations"], device) if "activations" in job.parents else None

    def batches(step: int) -> Iterator[tuple[Tensor, ...]]:
        for chosen, _ in micro_batches(step, n=len(text), batch_size=batch, accumulate=accumulate, seed=job.seed, rank=rank(), size=size()):
            yield tuple(stored(chosen)) if stored else (torch.stack([text.sequence(i)[0] for i in chosen]).to(device),)

    def loss(*given: Tensor) -> Iterator[tuple[str, Tensor]]:
        inputs_of_all = list(given) if stored else record(model, given[0])
        parts = sum(trained) * (batch * accumulate // len(given[0]))
        for i, (method, inputs) in enumerate(layer_inputs(model, inputs_of_all)):
            if trained[i]:
                yield f"layer_{i:02}", method.distill_loss(inputs, recipe["loss"]) / parts

    tokens_per_step = batch * accumulate * text.seq_len
    train(
        loss, [(parameters, max(recipe["lr"], budget["lr_floor"]))], batches=batches, steps=steps, tokens_per_step=tokens_per_step,
        recipe=recipe, loss_scale=recipe["loss_scale"], checkpoint=job.work / "checkpoint.pt", checkpoint_seconds=job.checkpoint_seconds,
        log=job.log, resumed=job.resume, memory=lambda: memory_bytes(device), name=job.name,
        recorded=device == "cuda" and job.hardware["engine"] == "ddp",
    )  # fmt: skip
    job.tokens = steps * tokens_per_step
    return {**job.losses(), "steps": steps, "tokens": job.tokens, "trainable_params": sum(p.numel() for p in parameters)}


class _Stored:
    """Recorded inputs read back from an `activations` folder."""

    def __init__(self, folder, device: str):
        self.x, self.device = safe_open(folder / "x.safetensors", "pt").get_slice("x"), device

    def __call__(self, chosen: list[int]) -> list[Tensor]:
        rows = torch.stack([self.x[i : i + 1][0] for i in chosen], 1)  # [L, B, T, hidden]
        return list(rows.to(self.device))
