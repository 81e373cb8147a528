"""Stage 1, attention transfer: the methods' own parameters learn to imitate the teacher's softmax attention
on the teacher's inputs.

All layers in one teacher-forced pass, no back-propagation through the model (LoLCATs Section 3; Hedgehog
Section 4.3; Lizard Section 3.1).
"""

from collections.abc import Iterator

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from relinear.get.packed import batch_indices, micro_batches
from relinear.get.padded import opened
from relinear.linearize.assemble import save_method, to_train
from relinear.linearize.faster import fuse_norms
from relinear.linearize.transfer import layer_inputs, record
from relinear.machine.distributed import rank, size, spread
from relinear.machine.hardware import moved, place
from relinear.plan.job import Job
from relinear.train.compiled import compile_blocks, wanted
from relinear.train.loop import of_job, train
from relinear.train.room import Fits


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
    """Train the method's parameters of a linearized model, in place, on the device that it is moved to.
    Returns the stage's metrics."""
    recipe, budget = job.settings["recipe"], job.settings["budget"]
    text = opened(job.parents["text"], "train", budget["seq_len"])
    parameters = list(model.method_parameters().values())
    model.requires_grad_(False)
    for p in parameters:
        p.requires_grad_(True)
    if device == "cuda":
        fuse_norms(model)
    fits = Fits(job, model, parameters, device, beside=True, transfer=True)
    job.hardware["engine"] = spread(model, parameters, device, job.engine)
    calibrated = _calibrated(job, model, text, device) if recipe["calibrate"] else {}
    batch, accumulate = budget["batch_size"], budget["accumulate"]
    steps = max(budget["epochs"] * len(text) // (batch * accumulate), 1)
    # softmax layers that are kept have nothing to train
    trained = [bool(list(layer.method.parameters())) for layer in model.attention_layers()]
    replayed = device == "cuda" and job.hardware["engine"] == "ddp"
    stored = _Stored(job.parents["activations"], device) if "activations" in job.parents else None

    distance = lambda method, inputs: method.distill_loss(inputs, recipe["loss"])  # noqa: E731
    forms = [distance]  # the last one is used
    eager = None
    if wanted(job, device, steps):
        blocks = compile_blocks(model)
        forms.append(torch.compile(distance, dynamic=False))

        def eager() -> None:
            blocks()
            del forms[1:]

    def batches(step: int) -> Iterator[tuple[Tensor, ...]]:
        for chosen, whole in micro_batches(
            step,
            n=len(text),
            batch_size=batch,
            accumulate=accumulate,
            seed=job.seed,
            rank=rank(),
            size=size(),
            rungs=text.rungs,
        ):
            # A loss is a mean over the piece's real tokens, and counts by their share of the step's: texts
            # are not equally long.
            parts = moved(torch.tensor(sum(trained) * text.real(whole) / text.real(chosen)), device)
            yield (
                parts,
                *(
                    stored(chosen)
                    if stored
                    else (
                        moved(x, device) for x in text.batch(chosen, width=text.seq_len if replayed else None)
                    )
                ),
            )

    def loss(parts: Tensor, *given: Tensor) -> Iterator[tuple[str, Tensor]]:
        tokens, key_mask, types = (*given, None, None)[:3]
        more = {} if stored or key_mask is None else {"attention_mask": key_mask}
        more |= {} if stored or types is None or model.causal else {"token_type_ids": types}
        inputs_of_all = list(given) if stored else record(model, tokens, **more)
        for i, (method, inputs) in enumerate(
            layer_inputs(model, inputs_of_all, None if stored else key_mask)
        ):
            if trained[i]:
                yield f"layer_{i:02}", forms[-1](method, inputs) / parts

    tokens_per_step = text.tokens_of(batch * accumulate)
    with fits:
        train(
            loss,
            [(parameters, recipe["lr"])],
            batches=batches,
            steps=steps,
            tokens_per_step=tokens_per_step,
            loss_scale=recipe["loss_scale"],
            recorded=replayed,
            eager=eager,
            **of_job(job, device),
        )
    job.tokens = text.tokens_of(steps * batch * accumulate)
    return {
        **job.losses(),
        **calibrated,
        "steps": steps,
        "tokens": job.tokens,
        "trainable_params": sum(p.numel() for p in parameters),
    }


def _calibrated(job: Job, model: PreTrainedModel, text, device: str) -> dict[str, list]:
    """Have each layer's method set itself by the teacher's attention on the training's first sequences.
    Returns what they found, `calibrated`: a list over layers.

    Nothing is drawn, so a training that goes on from a checkpoint finds the same, and then loads its own.
    """
    wanted = max(job.settings["recipe"]["calibrate"] // text.seq_len, 1)
    chosen = batch_indices(0, n=len(text), batch_size=min(wanted, len(text)), seed=job.seed)
    tokens, key_mask = (*(moved(x, device) for x in text.batch(chosen)), None)[:2]
    more = {} if key_mask is None else {"attention_mask": key_mask}
    inputs = layer_inputs(model, record(model, tokens, **more), key_mask)
    return {
        "calibrated": [
            method.calibrate(given) if hasattr(method, "calibrate") else None for method, given in inputs
        ]
    }


class _Stored:
    """Recorded inputs read back from an `activations` folder."""

    def __init__(self, folder, device: str):
        self.x, self.device = safe_open(folder / "x.safetensors", "pt").get_slice("x"), device

    def __call__(self, chosen: list[int]) -> list[Tensor]:
        rows = torch.stack([self.x[i : i + 1][0] for i in chosen], 1)  # [L, B, T, hidden]
        return list(moved(rows, self.device))
