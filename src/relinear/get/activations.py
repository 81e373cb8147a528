"""One pass of the teacher over the transfer data, kept on disk: every run that distills on a small machine shares it."""

from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from relinear.get.text import Packed
from relinear.linearize.loading import load_teacher
from relinear.linearize.model import linearize
from relinear.linearize.transfer import record
from relinear.machine.hardware import place

if TYPE_CHECKING:
    from relinear.stage import Context


def run(context: "Context") -> dict:
    """Write `x.safetensors`: ``x`` [sequences, layers, tokens, hidden], the attention inputs of the training sequences in order."""
    device, dtype = place(context)
    corpus = Packed(context.parents["corpus"], "train", context.settings["seq_len"])
    model = linearize(load_teacher(context.parents["teacher"], dtype, device), "softmax")
    rows = []
    for i in tqdm(range(len(corpus)), desc="activations", unit="seq", mininterval=5):
        tokens, _ = corpus.sequence(i)
        rows.append(torch.stack([x[0].cpu() for x in record(model, tokens[None].to(device))]))
    x = torch.stack(rows)
    if not x.isfinite().all():
        raise FloatingPointError("the teacher's activations are not finite")
    context.tokens = len(corpus) * corpus.seq_len
    save_file({"x": x}, context.out / "x.safetensors")
    return {"sequences": len(corpus), "tokens": context.tokens, "layers": x.shape[1], "bytes": x.numel() * x.element_size()}
