"""The spikiness and the monotonicity of a model's attention (Hedgehog, Section 3.1), on its own inputs, head
by head."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from safetensors.torch import save_file
from scipy.stats import rankdata
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from relinear.attention._base import Inputs
from relinear.get.packed import Packed
from relinear.linearize.model import Linearized, linearize
from relinear.measure._attention import own_inputs
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import Positive, Strict
from relinear_kernels.linear_attention_reference import normaliser

YIELDS = ("entropy", "entropy_share", "below_minus_one", "monotonicity")
AXES = {"layer": 0, "head": 0}

TINY = 1e-12
WEIGHTS, POINTS = "weights.safetensors", "points.safetensors"  # in the measurement's folder


class Options(Strict):
    """Look at the first `tokens` of the held-out text, in sequences of `seq_len`; keep `points` pairs of a
    score and a weight."""

    tokens: Positive
    seq_len: Positive
    points: Positive = 4000


class Seen(NamedTuple):
    """One layer's attention: scores q.k / sqrt(d) and weights whose rows sum to 1."""

    scores: Float[Tensor, "B H T T"]
    weights: Float[Tensor, "B H T T"]


@torch.no_grad()
def measure(model: PreTrainedModel, data: Path, options: Options, job: Job) -> Iterator[Reading]:
    """Of "attention", the mean over all heads and that of each layer and head:

    `entropy` of a query's weights in nats, the mean over queries that see two keys or more, and
    `entropy_share`, its share of what uniform weights have; `monotonicity`, the rank correlation (Spearman)
    of the last query's weights with its scores; `below_minus_one`, the share of the last query's scores where
    a Taylor series of second order falls.

    Errors are over sequences. Weights that are no distributions (SUPRA) are normalised over what they sum to.
    Writes `weights.safetensors`, `softmax.<layer>.<head>` and `method.<layer>.<head>` ``[T, T]`` of the first
    sequence in the head of the least entropy, where softmax is that of the same scores; and
    `points.safetensors`, `scores` and `weights` ``[P]`` of the last queries of all heads.
    """
    if not isinstance(model, Linearized):
        model = linearize(model, "softmax")
    model.eval()
    text = Packed(data, "heldout", options.seq_len)
    n = max(options.tokens // options.seq_len, 1)
    found: dict[str, list[np.ndarray]] = {
        name: [] for name in ("entropy", "entropy_share", "monotonicity", "below_minus_one")
    }
    first: list[Seen] = []
    last: list[tuple[np.ndarray, np.ndarray]] = []
    for i in tqdm(range(n), desc=job.name, unit="seq"):
        layers = list(attention_of(model, text.sequence(i)[0][None].to(model.device)))
        first = first or layers
        entropies = torch.stack([entropy(layer.weights)[0] for layer in layers])  # [L, H, T]
        uniform = torch.arange(1, entropies.shape[-1] + 1, device=entropies.device).log()
        # [L, H, T]
        scores, weights = (
            torch.stack([x[0, :, -1] for x in part]).double().cpu().numpy()
            for part in zip(*layers, strict=True)
        )
        found["entropy"].append(entropies[..., 1:].mean(-1).cpu().numpy())
        found["entropy_share"].append((entropies[..., 1:] / uniform[1:]).mean(-1).cpu().numpy())
        found["monotonicity"].append(spearman(scores, weights))
        found["below_minus_one"].append((scores < -1).mean(-1))
        last.append((scores, weights))
    values = {name: np.stack(parts) for name, parts in found.items()}  # [N, L, H]
    if job.leads:
        _keep(first, values["entropy"].mean(0), last, options.points, job)
    for name, value in values.items():
        yield Reading(name, "attention", {}, *_mean(value.mean((1, 2))), n)
        for layer, head in np.ndindex(value.shape[1:]):
            yield Reading(name, "attention", {"layer": layer, "head": head}, *_mean(value[:, layer, head]), n)


def attention_of(model: Linearized, tokens: Tensor) -> Iterator[Seen]:
    """The scores and weights of each layer of a linearized model that reads tokens ``[B, T]``."""
    for method, inputs in own_inputs(model, tokens):
        weights = method.attention_weights(inputs).float().clamp(min=0)
        yield Seen(scores_of(inputs, method.heads), weights / normaliser(weights.sum(-1, keepdim=True)))


def scores_of(inputs: Inputs, heads) -> Float[Tensor, "B H T T"]:
    """q.k / sqrt(d) of every query with every key, unseen ones included."""
    q, k = (x.float().transpose(1, 2) for x in inputs.rotated())
    return heads.scale * q @ k.repeat_interleave(heads.group, 1).transpose(-1, -2)


def entropy(weights: Float[Tensor, "... T"]) -> Float[Tensor, "..."]:
    """The entropy - sum a ln a of each row, in nats; a weight of 0 adds nothing."""
    return -torch.xlogy(weights, weights).sum(-1)


def spearman(a: Float[np.ndarray, "... T"], b: Float[np.ndarray, "... T"]) -> Float[np.ndarray, "..."]:
    """The rank correlation of two arrays along their last axis, equal values sharing their mean rank; 0 where
    one is constant."""
    a, b = (rankdata(x, axis=-1) for x in (a, b))
    a, b = (x - x.mean(-1, keepdims=True) for x in (a, b))
    norm = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    return np.divide((a * b).sum(-1), norm, out=np.zeros_like(norm), where=norm > 0)


def _keep(
    first: list[Seen], entropies: np.ndarray, last: list[tuple[np.ndarray, np.ndarray]], points: int, job: Job
) -> None:
    """Write the weights and the points for figures."""
    layer, head = (int(i) for i in np.unravel_index(entropies.argmin(), entropies.shape))
    scores, weights = (x[0, head].float().cpu() for x in first[layer])
    causal = torch.ones_like(scores, dtype=torch.bool).tril()
    soft = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    save_file(
        {f"softmax.{layer}.{head}": soft.contiguous(), f"method.{layer}.{head}": weights.contiguous()},
        job.out / WEIGHTS,
    )
    scores, weights = (
        torch.from_numpy(np.concatenate([x.ravel() for x in part])).float()
        for part in zip(*last, strict=True)
    )
    every = max(len(scores) // points, 1)
    save_file(
        {"scores": scores[::every].contiguous(), "weights": weights[::every].contiguous()}, job.out / POINTS
    )


def _mean(values: np.ndarray) -> tuple[float, float | None]:
    """A mean over sequences with its standard error; one sequence has none."""
    return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else None
