"""How faithful a method is to the teacher's softmax attention after its transfer and before any finetuning, head by head."""

from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from relinear.attention._base import softmax_output, softmax_weights
from relinear.get.text import Packed
from relinear.linearize.assemble import Link, assemble
from relinear.linearize.transfer import layer_inputs, record
from relinear.machine.hardware import place
from relinear.measure.perplexity import perplexity

if TYPE_CHECKING:
    from relinear.stage import Context

TINY = 1e-12


@torch.no_grad()
def run(context: "Context") -> dict:
    """Perplexity before finetuning; MSE of head outputs and KL of attention weights on held-out text; a few heads' weights for figures.

    KL(softmax || method) is averaged over tokens, MSE over tokens and channels; methods whose weights are not distributions (SUPRA) have
    theirs normalised over what they sum to.
    """
    device, dtype = place(context)
    s, sample = context.settings, context.settings["fidelity"]
    torch.manual_seed(context.seed)
    distilled = (context.parents["distill"],) if "distill" in context.parents else ()
    model = assemble(context.parents["teacher"], [Link(s["method"], s["options"], distilled)], dtype, device)
    text = Packed(context.parents["corpus"], "heldout", sample["seq_len"])
    layers, heads = len(model.attention_layers()), model.config.num_attention_heads
    for layer, head in sample["shown"]:
        if layer >= layers or head >= heads:
            raise ValueError(f"fidelity.shown: no head {head} of layer {layer}; the teacher has {layers} layers of {heads} heads")
    n = sample["tokens"] // sample["seq_len"]
    mse, kl, kept = torch.zeros(layers, heads), torch.zeros(layers, heads), {}
    for i in tqdm(range(n), desc=str(context.step), unit="seq"):
        recorded = record(model, text.sequence(i)[0][None].to(device))
        for layer, (method, inputs) in enumerate(layer_inputs(model, recorded)):
            soft, weights = softmax_weights(inputs, method.heads), method.attention_weights(inputs)
            own = weights.clamp(min=0)
            own = own / own.sum(-1, keepdim=True).clamp(min=TINY)
            kl[layer] += (soft * (soft.clamp(min=TINY).log() - own.clamp(min=TINY).log())).sum(-1).mean((0, 2)).cpu() / n
            error = method(inputs)[0].float() - softmax_output(inputs, method.heads).float()
            mse[layer] += error.square().mean((0, 1, 3)).cpu() / n
            for head in (h for shown, h in sample["shown"] if shown == layer and i == 0):
                kept[f"softmax.{layer}.{head}"] = soft[0, head].float().cpu().contiguous()
                kept[f"method.{layer}.{head}"] = weights[0, head].float().cpu().contiguous()
    save_file(kept, context.out / "weights.safetensors")
    windows = s["perplexity"]
    stream = Packed(context.parents["corpus"], "heldout", windows["tokens"])
    before = perplexity(model, *stream.sequence(0), seq_len=windows["seq_len"], batch_size=windows["batch_size"])
    return {
        "run": context.step.run, "method": s["method"], "options": s["options"], "perplexity": before,
        "mse": mse.mean().item(), "kl": kl.mean().item(), "mse_per_head": mse.tolist(), "kl_per_head": kl.tolist(),
        "shown": [list(x) for x in sample["shown"]],
    }  # fmt: skip
