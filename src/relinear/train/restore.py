"""Hidden states: an encoder that lost a part when it was opened learns to give what the whole model gives.

The loss of a layer is the mean square of the difference between its hidden states and the whole model's, over
the variance of the latter; a step's loss is the mean over the layers, as in TinyBERT's (arXiv 1909.10351,
equation 8) with equal layers, and 0 where nothing is lost. Weights are float32, products are computed in the
scale's dtype by autocast.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from relinear import families
from relinear.errors import UserError
from relinear.families import _family
from relinear.get.packed import Packed, micro_batches
from relinear.linearize.assemble import to_train
from relinear.machine.hardware import moved, place
from relinear.plan.job import Job
from relinear.train.loop import of_job, train
from relinear.train.pretrain import WEIGHTS

JUDGED = 128  # sequences at most of the held-out part that a model is judged by


def work(job: Job) -> dict[str, Any]:
    """Write `model.safetensors`, all weights of the encoder.

    Raises UserError where the text has tokens that the model has not.
    """
    device, dtype = place(job)
    torch.manual_seed(job.seed)
    model = to_train(job.parents["model"], job.links, torch.float32).to(device)
    whole = opened_whole(job.settings["family"], [*job.assets.values()]).to(device)
    metrics = fit(job, model, whole, device, dtype)
    save_file({n: p.detach().cpu().contiguous() for n, p in model.named_parameters()}, job.out / WEIGHTS)
    return metrics


def opened_whole(family: str, folders: Sequence[Path]) -> PreTrainedModel:
    """The model of a family with all its parts: opened as any family's, without what its own `open` does."""
    return _family.Family.open(families.load(family), folders, torch.float32)[0]


def losses(
    model: PreTrainedModel, whole: PreTrainedModel, tokens: Int64[Tensor, "B T"], dtype: torch.dtype
) -> Float[Tensor, " L"]:
    """The loss of each layer, without unit."""
    with torch.autocast(tokens.device.type, dtype, enabled=dtype != torch.float32):
        with torch.no_grad():
            wanted = whole(tokens, output_hidden_states=True).hidden_states[1:]
        given = model(tokens, output_hidden_states=True).hidden_states[1:]
    of_layer = [
        F.mse_loss(x.float(), y.float()) / y.float().var() for x, y in zip(given, wanted, strict=True)
    ]
    return torch.stack(of_layer)


def fit(
    job: Job, model: PreTrainedModel, whole: PreTrainedModel, device: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Train a model in place, in `dtype` by autocast. Returns the stage's metrics: beside those of every
    training the loss on held-out text before and after it, the mean over the layers and the last layer's."""
    recipe, budget = job.settings["recipe"], job.settings["budget"]
    vocabulary = model.config.vocab_size
    text, held = (Packed(job.parents["text"], split, budget["seq_len"]) for split in ("train", "heldout"))
    if (largest := max(int(split.tokens.max()) for split in (text, held))) >= vocabulary:
        raise UserError(
            f"{job.name}: the text has the token {largest}; the model knows 0 to {vocabulary - 1}"
        )
    n, batch, accumulate = len(text), budget["batch_size"], budget["accumulate"]
    steps = max(budget["epochs"] * n // (batch * accumulate), 1)
    tokens_per_step = batch * accumulate * budget["seq_len"]
    parameters = [p for p in model.parameters() if p.requires_grad]
    model.eval()  # without dropout, which the whole model has not either

    def shown(split: Packed, chosen: list[int]) -> Int64[Tensor, "B T"]:
        return moved(torch.stack([split.sequence(i)[0] for i in chosen]), device)

    @torch.no_grad()
    def judged(when: str) -> dict[str, float]:
        chosen = list(range(min(len(held), JUDGED)))
        parts = [chosen[first : first + batch] for first in range(0, len(chosen), batch)]
        of_layer = sum(losses(model, whole, shown(held, part), dtype) * len(part) for part in parts)
        of_layer = of_layer / len(chosen)
        return {f"heldout_loss_{when}": of_layer.mean().item(), f"heldout_last_{when}": of_layer[-1].item()}

    def batches(step: int) -> Iterator[tuple[Tensor, ...]]:
        for chosen, _ in micro_batches(step, n=n, batch_size=batch, accumulate=accumulate, seed=job.seed):
            yield (shown(text, chosen),)

    def loss(tokens: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield "hidden", losses(model, whole, tokens, dtype).mean() / accumulate

    before = judged("before")
    train(
        loss,
        [(parameters, recipe["lr"])],
        batches=batches,
        steps=steps,
        tokens_per_step=tokens_per_step,
        **of_job(job, device),
    )
    job.tokens = steps * tokens_per_step
    return {
        **job.losses(),
        **before,
        **judged("after"),
        "steps": steps,
        "tokens": job.tokens,
        "trainable_params": sum(p.numel() for p in parameters),
    }
