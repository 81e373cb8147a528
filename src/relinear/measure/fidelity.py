"""How faithful a method is to the model's softmax attention on the model's own inputs, head by head."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import PreTrainedModel

from relinear.attention._base import softmax_output, softmax_weights
from relinear.get.packed import Packed
from relinear.linearize.transfer import layer_inputs, record
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import ConfigError, Positive, Strict

TINY = 1e-12


class Options(Strict):
    """Compare over the first `tokens` of the held-out text, in sequences of `seq_len`; keep the weights of some heads of the first sequence."""

    tokens: Positive
    seq_len: Positive
    shown: tuple[tuple[int, int], ...] = ()  # (layer, head) whose attention weights are kept for figures


@torch.no_grad()
def measure(model: PreTrainedModel, data: Path, options: Options, job: Job) -> Iterator[Reading]:
    """`mse` of head outputs and `kl` of attention weights, of "attention": the mean over all heads, and each layer's and head's.

    KL(softmax || method) is averaged over tokens, MSE over tokens and channels; methods whose weights are not distributions (SUPRA) have
    theirs normalised over what they sum to. Writes `weights.safetensors`: softmax.<layer>.<head> and method.<layer>.<head> ``[T, T]``.
    """
    device = model.device
    text = Packed(data, "heldout", options.seq_len)
    layers, heads = len(model.attention_layers()), model.config.num_attention_heads
    for layer, head in options.shown:
        if layer >= layers or head >= heads:
            raise ConfigError(f"fidelity.shown: no head {head} of layer {layer}; the model has {layers} layers of {heads} heads")
    n = options.tokens // options.seq_len
    mse, kl, kept = torch.zeros(layers, heads), torch.zeros(layers, heads), {}
    for i in tqdm(range(n), desc=job.name, unit="seq"):
        recorded = record(model, text.sequence(i)[0][None].to(device))
        for layer, (method, inputs) in enumerate(layer_inputs(model, recorded)):
            soft, weights = softmax_weights(inputs, method.heads), method.attention_weights(inputs)
            own = weights.clamp(min=0)
            own = own / own.sum(-1, keepdim=True).clamp(min=TINY)
            kl[layer] += (soft * (soft.clamp(min=TINY).log() - own.clamp(min=TINY).log())).sum(-1).mean((0, 2)).cpu() / n
            error = method(inputs)[0].float() - softmax_output(inputs, method.heads).float()
            mse[layer] += error.square().mean((0, 1, 3)).cpu() / n
            for head in (h for shown, h in options.shown if shown == layer and i == 0):
                kept[f"softmax.{layer}.{head}"] = soft[0, head].float().cpu().contiguous()
                kept[f"method.{layer}.{head}"] = weights[0, head].float().cpu().contiguous()
    if job.leads:
        save_file(kept, job.out / "weights.safetensors")
    tokens = n * options.seq_len
    for name, values in (("mse", mse), ("kl", kl)):
        yield Reading(name, "attention", {}, values.mean().item(), None, tokens)
        for layer, row in enumerate(values.tolist()):
            for head, value in enumerate(row):
                yield Reading(name, "attention", {"layer": layer, "head": head}, value, None, tokens)
