"""Stage 1, attention transfer: the methods' own parameters learn to do what the teacher's softmax attention does on the teacher's inputs.

All layers in one teacher-forced pass, no back-propagation through the model (LoLCATs Section 3; Hedgehog Section 4.3; Lizard Section 3.1).
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from relinear.get.text import Packed, micro_batches
from relinear.linearize.assemble import Link, assemble, save_method
from relinear.linearize.faster import fuse_norms
from relinear.linearize.transfer import layer_inputs, record
from relinear.machine.distributed import rank, size, spread
from relinear.machine.hardware import memory_bytes, place
from relinear.train.loop import train

if TYPE_CHECKING:
    from relinear.stage import Context


def run(context: "Context") -> dict:
    """Write `method.safetensors`: the trained parameters that the method added to the teacher."""
    device, dtype = place(context)
    torch.manual_seed(context.seed)
    model = assemble(context.parents["teacher"], [Link(context.settings["method"], context.settings["options"])], dtype)
    metrics = fit(context, model, device)
    if context.leads:
        save_method(model, context.out / "method.safetensors")
    return metrics


def fit(context: "Context", model: PreTrainedModel, device: str) -> dict:
    """Train the method's parameters of a linearized model, in place, on the device that it is moved to. Returns the stage's metrics."""
    recipe, budget = context.settings["distill"], context.settings["budget"]
    corpus = Packed(context.parents["corpus"], "train", budget["seq_len"])
    parameters = list(model.method_parameters().values())
    model.requires_grad_(False)
    for p in parameters:
        p.requires_grad_(True)
    if device == "cuda":
        fuse_norms(model)
    context.hardware["engine"] = spread(model, parameters, device, context.plan.config.hardware.engine)
    batch, accumulate = budget["batch_size"], budget["accumulate"]
    steps = max(budget["epochs"] * len(corpus) // (batch * accumulate), 1)
    trained = [bool(list(layer.method.parameters())) for layer in model.attention_layers()]  # kept softmax layers have nothing to train
    stored = _Stored(context.parents["activations"], device) if "activations" in context.parents else None

    def batches(step: int) -> Iterator[tuple[Tensor, ...]]:
        for chosen, _ in micro_batches(
            step, n=len(corpus), batch_size=batch, accumulate=accumulate, seed=context.seed, rank=rank(), size=size()
        ):  # fmt: skip
            yield tuple(stored(chosen)) if stored else (torch.stack([corpus.sequence(i)[0] for i in chosen]).to(device),)

    def loss(*given: Tensor) -> Iterator[tuple[str, Tensor]]:
        inputs_of_all = list(given) if stored else record(model, given[0])
        parts = sum(trained) * (batch * accumulate // len(given[0]))
        for i, (method, inputs) in enumerate(layer_inputs(model, inputs_of_all)):
            if trained[i]:
                yield f"layer_{i:02}", method.distill_loss(inputs, recipe["loss"]) / parts

    tokens_per_step = batch * accumulate * corpus.seq_len
    train(
        loss, [(parameters, max(recipe["lr"], budget["lr_floor"]))], batches=batches, steps=steps, tokens_per_step=tokens_per_step,
        recipe=recipe, loss_scale=recipe["loss_scale"],
        checkpoint=context.work / "checkpoint.pt", checkpoint_seconds=context.plan.config.hardware.checkpoint_seconds,
        log=context.log, resumed=context.resume_history, memory=lambda: memory_bytes(device), name=str(context.step),
        recorded=device == "cuda" and context.hardware["engine"] == "ddp",
    )  # fmt: skip
    context.tokens = steps * tokens_per_step
    return {**context.losses(), "steps": steps, "tokens": context.tokens, "trainable_params": sum(p.numel() for p in parameters)}


class _Stored:
    """Recorded inputs read back from an `activations` folder."""

    def __init__(self, folder, device: str):
        self.x, self.device = safe_open(folder / "x.safetensors", "pt").get_slice("x"), device

    def __call__(self, chosen: list[int]) -> list[Tensor]:
        rows = torch.stack([self.x[i : i + 1][0] for i in chosen], 1)  # [L, B, T, hidden]
        return list(rows.to(self.device))
