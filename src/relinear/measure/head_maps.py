"""The attention of an encoder's heads on short texts: a method's weights beside softmax attention's, and
whether they rise with q.k (Hedgehog, Figures 3 and 7 to 20)."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import PreTrainedModel

from relinear.attention._base import softmax_weights
from relinear.errors import UserError
from relinear.get.padded import Padded, opened
from relinear.linearize.transfer import layer_inputs, record
from relinear.measure.entropy import POINTS, TINY, WEIGHTS, entropy, scores_of, spearman
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import Positive, Strict
from relinear_kernels.linear_attention_reference import normaliser

YIELDS = ("entropy", "kl", "monotonicity")
AXES = {"layer": 1, "head": 1, "own_layer": 1, "own_head": 1}


class Options(Strict):
    """Look at the first `texts` held-out texts of `shortest` to `longest` tokens; keep the first one's
    weights in some heads, and `points` pairs of a score and a weight.

    `layers` and `heads` number from 1 those of a model that has `of` of each. Another model shows the heads
    at the same part of its own.
    """

    texts: Positive
    seq_len: Positive
    shortest: Positive = 16
    longest: Positive = 48
    layers: tuple[Positive, ...] = (1, 6, 12)
    heads: tuple[Positive, ...] = (1, 3, 6, 12)
    of: Positive = 12
    points: Positive = 4000


@torch.no_grad()
def measure(model: PreTrainedModel, data: Path, options: Options, job: Job) -> Iterator[Reading]:
    """Of "attention", the mean over all heads, queries and texts, with the error over texts: `kl` of softmax
    attention's weights to the method's; `entropy` of the method's; `monotonicity`, the rank correlation
    (Spearman) of a query's weights with its scores q.k.

    Of "text", the one that is kept, at {"layer", "head", "own_layer", "own_head"}: `kl`, the mean over its
    queries. The first two are numbers of `options`, the others the model's, from 1.

    Both attentions are given what the model with softmax attention computes. Writes `weights.safetensors`,
    `softmax.<layer>.<head>` and `method.<layer>.<head>` ``[T, T]`` by the numbers of `options`; and
    `points.safetensors`, `scores` and `weights` ``[P]`` of that text in all heads. Raises UserError for a
    model that is no encoder, for data that are no short texts, and where none is so long.
    """
    text = opened(data, "heldout", options.seq_len)
    if model.causal or not isinstance(text, Padded):
        raise UserError(
            f"{job.name}: head_maps looks at encoders on short texts, runs of bert-base and data with make:"
            f" sentences; got {data.name}"
        )
    if not (
        chosen := [i for i, n in enumerate(text.lengths) if options.shortest <= n <= options.longest][
            : options.texts
        ]
    ):
        got = f"{min(text.lengths)} to {max(text.lengths)}"
        raise UserError(
            f"{job.name}: no text of {options.shortest} to {options.longest} tokens in {data.name}, whose"
            f" have {got}"
        )
    found: dict[str, list[float]] = {name: [] for name in ("kl", "entropy", "monotonicity")}
    for i in tqdm(chosen, desc=job.name, unit="text"):
        scores, soft, weights = _attention(model, text, i)
        kl = (torch.xlogy(soft, soft) - torch.xlogy(soft, weights.clamp(min=TINY))).sum(-1)
        found["kl"].append(kl.mean().item())
        found["entropy"].append(entropy(weights).mean().item())
        found["monotonicity"].append(
            float(spearman(scores.double().cpu().numpy(), weights.double().cpu().numpy()).mean())
        )
        if i == chosen[0]:
            places = {
                (layer, head): tuple(map(_nearest, (layer, head), [options.of] * 2, kl.shape))
                for layer in options.layers
                for head in options.heads
            }
            of_text, queries = {place: kl[own].mean().item() for place, own in places.items()}, kl.shape[-1]
            if job.leads:
                _keep(places, scores, soft, weights, options.points, job.out)
    for name, values in found.items():
        error = float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else None
        yield Reading(name, "attention", {}, float(np.mean(values)), error, len(values))
    for (layer, head), value in of_text.items():
        own = places[layer, head]
        yield Reading(
            "kl",
            "text",
            {"layer": layer, "head": head, "own_layer": own[0] + 1, "own_head": own[1] + 1},
            value,
            None,
            queries,
        )


def _attention(
    model: PreTrainedModel, text: Padded, i: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores q.k / sqrt(d), softmax attention's weights and the method's ``[L, H, T, T]``, of one text."""
    tokens, mask, types = (x.to(model.device) for x in text.batch([i]))
    layers = []
    for method, inputs in layer_inputs(
        model, record(model, tokens, attention_mask=mask, token_type_ids=types)
    ):
        weights = method.attention_weights(inputs)[0].float().clamp(min=0)
        weights /= normaliser(weights.sum(-1, keepdim=True))
        layers.append(
            (scores_of(inputs, method.heads)[0], softmax_weights(inputs, method.heads)[0].float(), weights)
        )
    scores, soft, weights = map(torch.stack, zip(*layers, strict=True))
    return scores, soft, weights


def _nearest(number: int, of: int, have: int) -> int:
    """The index, among as many as there are here, of what is the `number`-th, from 1, `of` others."""
    return round((number - 1) / max(of - 1, 1) * (have - 1))


def _keep(
    places: dict, scores: torch.Tensor, soft: torch.Tensor, weights: torch.Tensor, points: int, out: Path
) -> None:
    """Write the weights and the points for figures."""
    kept = {}
    for (layer, head), own in places.items():
        kept |= {
            f"{kind}.{layer}.{head}": x[own].cpu().clone()
            for kind, x in (("softmax", soft), ("method", weights))
        }
    save_file(kept, out / WEIGHTS)
    every = max(scores.numel() // points, 1)
    save_file(
        {
            name: x.flatten()[::every].cpu().contiguous()
            for name, x in (("scores", scores), ("weights", weights))
        },
        out / POINTS,
    )
