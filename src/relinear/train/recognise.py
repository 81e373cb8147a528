"""Classes learned by a model of pictures, which has the layer that tells them itself: every weight, on the
cross-entropy.

All else is as `relinear.train.classify` trains an encoder and a head. Everything is computed in float32.
"""

from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from relinear.errors import UserError
from relinear.get.labels import Labelled
from relinear.linearize.assemble import to_train
from relinear.machine.hardware import place
from relinear.plan.job import Job
from relinear.train.classify import fit
from relinear.train.pretrain import BEST, WEIGHTS


class Recogniser(nn.Module):
    """A model of pictures, called as `relinear.linearize.head.Classifier` is."""

    def __init__(self, encoder: PreTrainedModel):
        super().__init__()
        # its classes are read from its first token
        self.encoder, self.head = encoder, SimpleNamespace(pool="first")

    def forward(self, pixels: Tensor, mask: Tensor, types: Tensor) -> Tensor:
        """Outputs ``[B, classes]`` of pictures ``[B, pixels]``, whose mask and types say nothing."""
        return self.encoder(pixels).logits


def work(job: Job) -> dict[str, Any]:
    """Write `model.safetensors`, all weights. Raises UserError for a model of other classes, and where every
    picture is kept aside."""
    device, _ = place(job)
    job.hardware["dtype"] = "float32"
    torch.manual_seed(job.seed)
    model = Recogniser(to_train(job.parents["model"], job.links, torch.float32)).to(device)
    pictures = Labelled(job.parents["text"], "train", job.settings["budget"]["seq_len"])
    if model.encoder.config.num_labels != pictures.classes:
        raise UserError(
            f"{job.name}: the model tells {model.encoder.config.num_labels} classes apart; the pictures have"
            f" {pictures.classes}"
        )
    metrics = fit(job, model, pictures, device)
    if (job.work / BEST).is_file():
        model.load_state_dict(load_file(job.work / BEST), strict=False)  # buffers are not trained
    save_file(
        {n: p.detach().cpu().contiguous() for n, p in model.encoder.named_parameters()}, job.out / WEIGHTS
    )
    return metrics
