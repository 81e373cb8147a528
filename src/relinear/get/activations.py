"""One pass of the model over the transfer data, kept on disk: every run that distills on a small machine
shares it."""

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from relinear.get.packed import Packed
from relinear.linearize.loading import load_teacher
from relinear.linearize.model import linearize
from relinear.linearize.transfer import record
from relinear.machine.hardware import place
from relinear.plan.job import Job


def work(job: Job) -> dict:
    """Write `x.safetensors`: ``x`` [sequences, layers, tokens, hidden], the attention inputs of the training
    sequences in order."""
    device, dtype = place(job)
    text = Packed(job.parents["text"], "train", job.settings["seq_len"])
    model = linearize(load_teacher(job.parents["model"], dtype, device), "softmax")
    rows = []
    for i in tqdm(range(len(text)), desc=job.name, unit="seq", mininterval=5):
        tokens, _ = text.sequence(i)
        rows.append(torch.stack([x[0].cpu() for x in record(model, tokens[None].to(device))]))
    x = torch.stack(rows)
    if not x.isfinite().all():
        raise FloatingPointError("the model's activations are not finite")
    job.tokens = len(text) * text.seq_len
    save_file({"x": x}, job.out / "x.safetensors")
    return {
        "sequences": len(text),
        "tokens": job.tokens,
        "layers": x.shape[1],
        "bytes": x.numel() * x.element_size(),
    }
