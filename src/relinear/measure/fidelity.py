"""The fidelity of a method to the model's softmax attention on the model's own inputs, head by head."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from relinear.attention._base import softmax_output, softmax_weights
from relinear.errors import UserError
from relinear.get.padded import Padded, opened
from relinear.linearize.transfer import layer_inputs, record
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import ConfigError, Positive, Strict
from relinear_kernels.linear_attention_reference import normaliser

NEEDS = ("linearized",)
YIELDS = ("mse", "kl", "uniform_kl")
AXES = {"layer": 0, "head": 0, "length": 1024}

TINY = 1e-12
SIDE_BY_SIDE = 8  # texts of different lengths in one pass


class Options(Strict):
    """Compare over the first `tokens` of the held-out text, in sequences of `seq_len`; keep the weights of
    some heads of the first sequence.

    `lengths`: over sequences of each of these lengths instead, the texts joined; positions begin anew where
    the model's end. Lengths beyond `tokens` are left out: weights are quadratic in them.
    """

    tokens: Positive
    seq_len: Positive
    shown: tuple[tuple[int, int], ...] = ()  # (layer, head) whose attention weights are kept for figures
    lengths: tuple[Positive, ...] = ()


def measure(model: PreTrainedModel, data: Path, options: Options, job: Job) -> Iterator[Reading]:
    """`mse` of head outputs and `kl` of attention weights, of "attention": the mean over all heads, and each
    layer's and head's.

    KL(softmax || method) is averaged over real tokens, MSE over them and channels; methods whose weights are
    not distributions (SUPRA) have theirs normalised over what they sum to. `uniform_kl`: the KL of equal
    weights, what a method that learned nothing comes to. With `lengths` the means are at {"length": n}, and
    there are no heads. The standard error takes texts as independent. Writes `weights.safetensors`:
    softmax.<layer>.<head> and method.<layer>.<head> ``[T, T]``.
    """
    layers, heads = len(model.attention_layers()), model.config.num_attention_heads
    for layer, head in options.shown:
        if layer >= layers or head >= heads:
            raise ConfigError(
                f"fidelity.shown: no head {head} of layer {layer}; the model has {layers} layers of {heads}"
                " heads"
            )
    text = opened(data, "heldout", options.seq_len)
    if not options.lengths:
        found = Compared(model, _batches(text, options), options.shown, job.name)
        if job.leads:
            save_file(found.kept, job.out / "weights.safetensors")
        yield from found.means({})
        yield from found.of_heads()
        return
    if not isinstance(text, Padded):
        raise UserError(
            f"fidelity.lengths joins short texts; {data.name} is one stream, which `seq_len` cuts. Possible:"
            " data with make: sentences"
        )
    for length in (n for n in options.lengths if n <= options.tokens):
        tokens, types = text.joined(length)
        n = min(options.tokens // length, len(tokens))
        more = {"position_ids": model.restarted_positions(length)} if not model.causal else {}
        batches = ((tokens[i : i + 1], None, {"token_type_ids": types[i : i + 1], **more}) for i in range(n))
        yield from Compared(model, batches, (), f"{job.name}, {length}").means({"length": length})


def _batches(text, options: Options) -> Iterator[tuple[Tensor, Tensor | None, dict[str, Tensor]]]:
    """Tokens ``[B, T]``, their mask or None, and further inputs of the model. Raises UserError for fewer
    tokens than asked for."""
    if not isinstance(text, Padded):
        for i in range(options.tokens // options.seq_len):
            yield *text.batch([i]), None, {}
        return
    n = text.until(options.tokens)
    for first in range(0, n, SIDE_BY_SIDE):
        tokens, mask, types = text.batch(range(first, min(first + SIDE_BY_SIDE, n)))
        yield tokens, mask, {"attention_mask": mask, "token_type_ids": types}


class Compared:
    """Sums over the real rows of texts: KL and squared error of each head, KL of each text."""

    @torch.no_grad()
    def __init__(
        self, model: PreTrainedModel, batches: Iterable, shown: tuple[tuple[int, int], ...], name: str
    ):
        layers, heads, device = len(model.attention_layers()), model.config.num_attention_heads, model.device
        self.mse, self.kl = torch.zeros(2, layers, heads, dtype=torch.float64).unbind()
        # summed KL (over heads and layers: mean) and KL of equal weights, and rows of each text
        self.texts: list[tuple[float, float, int]] = []
        self.kept: dict[str, Tensor] = {}
        for i, (tokens, mask, more) in enumerate(tqdm(batches, desc=name, unit="batch")):
            mask = None if mask is None else mask.to(device)
            more = {k: v.to(device) for k, v in more.items() if k != "token_type_ids" or not model.causal}
            rows = torch.ones(tokens.shape, dtype=torch.bool, device=device) if mask is None else mask
            of_texts, equal = torch.zeros(2, len(tokens), dtype=torch.float64).unbind()
            for layer, (method, inputs) in enumerate(
                layer_inputs(model, record(model, tokens.to(device), **more), mask)
            ):
                soft, weights = softmax_weights(inputs, method.heads), method.attention_weights(inputs)
                for head in (h for at, h in shown if at == layer and i == 0):
                    for kind, x in (("softmax", soft), ("method", weights)):
                        # `weights` are used up below
                        self.kept[f"{kind}.{layer}.{head}"] = x[0, head].float().cpu().clone()
                kl, uniform = (x * rows[:, None] for x in _divergences(soft, weights))
                del soft, weights
                error = (
                    method(inputs)[0].float() - softmax_output(inputs, method.heads).float()
                ).square().mean(-1) * rows[..., None]
                self.kl[layer] += kl.double().sum((0, 2)).cpu()
                self.mse[layer] += error.double().sum((0, 1)).cpu()
                of_texts += kl.double().mean(1).sum(1).cpu() / layers
                equal += uniform.double().mean(1).sum(1).cpu() / layers
            self.texts += zip(of_texts.tolist(), equal.tolist(), rows.sum(1).tolist(), strict=True)
        self.rows = sum(n for _, _, n in self.texts)

    def means(self, at: dict[str, Any]) -> Iterator[Reading]:
        """The means over all heads, at a place."""
        kl, equal, rows = torch.tensor(self.texts, dtype=torch.float64).unbind(1)
        yield Reading("mse", "attention", at, (self.mse.mean() / self.rows).item(), None, self.rows)
        for name, sums in (("kl", kl), ("uniform_kl", equal)):
            mean, n = sums.sum() / rows.sum(), len(rows)
            error = (n / (n - 1) * (sums - rows * mean).square().sum()).sqrt() / rows.sum() if n > 1 else None
            yield Reading(
                name, "attention", at, mean.item(), None if error is None else error.item(), self.rows
            )

    def of_heads(self) -> Iterator[Reading]:
        """The mean of each head of each layer."""
        for name, values in (("mse", self.mse), ("kl", self.kl)):
            for layer, row in enumerate((values / self.rows).tolist()):
                for head, value in enumerate(row):
                    yield Reading(name, "attention", {"layer": layer, "head": head}, value, None, self.rows)


def _divergences(soft: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """KL(softmax || weights, over their sum) and KL(softmax || equal weights on what it sees) of each row,
    ``[B, H, T]``; `weights` are used up."""
    entropy = -torch.einsum("bhti,bhti->bht", soft, soft.clamp(min=TINY).log_())
    own = weights.clamp_(min=0)
    own /= normaliser(own.sum(-1, keepdim=True))
    cross = -torch.einsum("bhti,bhti->bht", soft, own.clamp_(min=TINY).log_())
    return cross - entropy, (soft > 0).sum(-1).clamp(min=1).log() - entropy
