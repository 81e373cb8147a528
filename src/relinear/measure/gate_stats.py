"""The memory of a gated method, and the share of its output that each part brings (Lizard), layer by layer
and head by head."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from relinear.attention._base import Inputs
from relinear.attention._parts import Parts
from relinear.get.packed import Packed
from relinear.linearize.model import Linearized
from relinear.measure._answering import mean_of
from relinear.measure._attention import own_inputs
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import Positive, Strict
from relinear_kernels.linear_attention_reference import LinearState

YIELDS = ("memory", "alpha", "share", "meta_weight")
AXES = {"layer": 0, "head": 0}

QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
LARGEST = 1e4  # the logarithm of a feature that no key reaches
AT_ONCE = 64  # tokens whose gates are read in one pass, each token with a state of its own
FINEST = 2.0**-24  # the least 1 - gamma in float32: a longer memory than 16.8 million tokens cannot be seen
TINY = 1e-12
WEIGHTS = "parts.safetensors"  # in the measurement's folder


class Options(Strict):
    """Look at the first `tokens` of the held-out text, in sequences of `seq_len`; keep the weights of the
    first `shown` positions of one head."""

    tokens: Positive
    seq_len: Positive
    shown: Positive = 10  # Lizard's Figure 2 draws as many


class Seen(NamedTuple):
    """The gates and parts of a layer on one sequence, one row for each query head; missing parts are left
    out."""

    # 1 / (1 - gamma) of each token, and of each channel where each has a gate
    memory: Float[np.ndarray, "H N"] | None
    values: dict[tuple[str, str], Float[np.ndarray, " H"]]  # by metric and what it is of
    weights: dict[str, Float[Tensor, "H T T"]]  # of each part


@torch.no_grad()
def measure(model: PreTrainedModel, data: Path, options: Options, job: Job) -> Iterator[Reading]:
    """As the model itself reads the text, of all heads at {}, of each layer's, and of each head:

    `memory` of "p10", "p50" and "p90": these quantiles, over tokens, of 1 / (1 - gamma), about how many
    tokens a gate remembers. `alpha` of "window": its weight in the sum. `share` of "linear", "window" and
    "meta": the norm of what a part adds to a head's output over the sum of the norms of all parts, mean over
    tokens; meta tokens count as such where they are beyond the window. `meta_weight` of "meta": what these
    get there of the softmax, over what they would get if all that the query sees weighed the same.

    Errors are over sequences. What a run does not have is not defined, and its one reading says why. Writes
    `parts.safetensors`, `<part>.<layer>.<head>` ``[shown, shown]`` of the first sequence, of the head whose
    least part has the largest share.
    """
    # adapters stay in its layers
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    methods = [layer.method for layer in model.attention_layers()] if isinstance(model, Linearized) else []
    layers = [i for i, method in enumerate(methods) if isinstance(method, Parts) and "gate" in method.PARTS]
    missing = dict.fromkeys(METRICS, f"{job.settings['method']} has no gate")
    if layers:
        missing = _missing(methods[layers[0]], options.seq_len)
        model.eval()
        text = Packed(data, "heldout", options.seq_len)
        found: dict[tuple[str, str, tuple[tuple[str, int], ...]], list[float]] = defaultdict(list)
        for i in tqdm(range(max(options.tokens // options.seq_len, 1)), desc=job.name, unit="seq"):
            given = own_inputs(model, text.sequence(i)[0][None].to(model.device))
            read = {layer: seen(*both) for layer, both in enumerate(given) if layer in layers}
            if i == 0 and job.leads:
                save_file(kept(read, options.shown), job.out / WEIGHTS)
            for metric, of, at, value in _of_sequence(read):
                found[metric, of, tuple(at.items())].append(value)
        for (metric, of, place), values in found.items():
            yield Reading(metric, of, dict(place), *mean_of(values))
    yield from (Reading(metric, of, {}, None, None, 0, why) for (metric, of), why in missing.items())


METRICS = (
    *(("memory", q) for q in QUANTILES),
    ("alpha", "window"),
    *(("share", p) for p in ("linear", "window", "meta")),
    ("meta_weight", "meta"),
)


def _missing(method: Parts, length: int) -> dict[tuple[str, str], str]:
    """The metrics that a layer does not have, each with the reason."""
    there, window = _there(method), method.options.window
    why = {
        part: f"the {part} is switched off" if part in method.switched_off else f"there is no {part}"
        for part in method.PARTS
        if part not in there
    }
    if _looks_back(method):
        why["gate"] = "the gate of a token depends on those before it"
    if "meta" in there and "window" in there and length <= window:
        why["meta"] = (
            f"{length} tokens end within a window of {window}, and meta tokens count where they are beyond it"
        )
    elif "window" in why:
        why["meta"] = why["window"]
    parts = {metric: {"memory": "gate", "alpha": "window"}.get(metric[0], metric[1]) for metric in METRICS}
    return {metric: why[part] for metric, part in parts.items() if part in why}


def _there(method: Parts) -> set[str]:
    return set(method.parts(method.options)) - method.switched_off


def _looks_back(method: Parts) -> bool:
    return getattr(method.options, "pool", None) == "time"


@contextmanager
def alone(method: Parts, part: str) -> Iterator[None]:
    """A context in which `part`, "linear" or "window", attends without the other."""
    before = method.switched_off
    other = {"linear": "window", "window": "linear"}[part]
    try:
        method.switch_off(before | ({other} & _there(method)))
        yield
    finally:
        method.switch_off(before)


def seen(method: Parts, inputs: Inputs) -> Seen:
    """The gates and parts of a gated layer on the inputs of one sequence."""
    weights = parts_of(method, inputs)
    v = inputs.v[0].transpose(0, 1).float().repeat_interleave(method.heads.group, 0)  # [H, T, D]
    norms = {part: (own @ v).norm(dim=-1) for part, own in weights.items()}  # [H, T]
    total = torch.stack(list(norms.values())).sum(0).clamp(min=TINY)
    values = {("share", part): (own / total).mean(-1) for part, own in norms.items()}
    if "meta" in weights:
        values["meta_weight", "meta"] = _meta_weight(weights["window"], weights["meta"], method.options)
    if "window" in weights:
        values["alpha", "window"] = method.alpha.detach()
    memory = None
    if "gate" in _there(method) and not _looks_back(method):
        memory = (1 / (1 - gates(method, inputs)).clamp(min=FINEST)).flatten(1).cpu().numpy()
    return Seen(memory, {key: value.float().cpu().numpy() for key, value in values.items()}, weights)


def parts_of(method: Parts, inputs: Inputs) -> dict[str, Float[Tensor, "H T T"]]:
    """The weights that each part adds to a layer's, of one sequence: "linear", "window" and, where they are
    beyond it, "meta" tokens."""
    there, found = _there(method), {}
    for part in ("linear", "window"):
        if part in there:
            with alone(method, part):
                found[part] = method.attention_weights(inputs)[0].float()
    if "window" in found and "meta" in there and inputs.q.shape[1] > method.options.window:
        beyond = found["window"].tril(-method.options.window)
        found |= {"window": found["window"] - beyond, "meta": beyond}
    return found


def _meta_weight(
    window: Float[Tensor, "H T T"], meta: Float[Tensor, "H T T"], options
) -> Float[Tensor, " H"]:
    """The share of the softmax that meta tokens get, over their share under equal weights. Alpha is in both
    and cancels."""
    queries = torch.arange(options.window, meta.shape[-1], device=meta.device)
    beyond = (queries - options.window + 1).clamp(max=options.meta)
    own, near = meta[:, options.window :].sum(-1), window[:, options.window :].sum(-1)
    return (own / (own + near) * (options.window + beyond) / beyond).mean(-1)


def gates(method: Parts, inputs: Inputs) -> Float[Tensor, "H T F"]:
    """gamma of every token and query head, and of every feature, of one sequence: what a token that brings no
    value leaves of a state of ones."""
    found = []
    for begin in range(0, inputs.q.shape[1], AT_ONCE):
        # A token's gate does not depend on the tokens before it, so each token is a sequence of its own.
        x, q, k, v, cos, sin, mask = (
            None if part is None else part[0, begin : begin + AT_ONCE][:, None] for part in inputs
        )
        with alone(method, "linear"):
            state = method.init_state(len(x), x.device)
            # ones relative to a key that is larger than any other: a normalised map rescales them by nothing
            shift = None if state.shift is None else torch.full_like(state.shift, LARGEST)
            _, left = method(
                Inputs(x, q, k, torch.zeros_like(v), cos, sin, mask),
                LinearState(torch.ones_like(state.kv), state.z, shift),
            )
        found.append(left.kv[..., 0])  # [N, M, F]; every channel of the values alike
    gamma = torch.cat(found).transpose(0, 1)
    return gamma.repeat_interleave(method.heads.heads // gamma.shape[0], 0)


def _of_sequence(read: Mapping[int, Seen]) -> Iterator[tuple[str, str, dict[str, int], float]]:
    """Metric, what it is of, place and value of everything that one sequence shows."""
    memories = {layer: one.memory for layer, one in read.items() if one.memory is not None}
    places = [({}, list(memories.values()))] if memories else []
    places += [({"layer": layer}, [own]) for layer, own in memories.items()]
    places += [
        ({"layer": layer, "head": head}, [row])
        for layer, own in memories.items()
        for head, row in enumerate(own)
    ]
    for at, own in places:
        for name, value in zip(
            QUANTILES, np.quantile(np.concatenate(own, None), list(QUANTILES.values())), strict=True
        ):
            yield "memory", name, at, float(value)
    for metric, of in next(iter(read.values())).values:
        heads = {layer: one.values[metric, of] for layer, one in read.items()}
        yield metric, of, {}, float(np.mean([own.mean() for own in heads.values()]))
        for layer, own in heads.items():
            yield metric, of, {"layer": layer}, float(own.mean())
            yield from (
                (metric, of, {"layer": layer, "head": head}, float(value)) for head, value in enumerate(own)
            )


def kept(read: Mapping[int, Seen], shown: int) -> dict[str, Float[Tensor, "shown shown"]]:
    """The weights of each part, `<part>.<layer>.<head>`, of the head whose least part has the largest
    share."""
    least = {
        layer: np.min([value for (metric, _), value in one.values.items() if metric == "share"], 0)
        for layer, one in read.items()
    }
    layer = max(least, key=lambda at: least[at].max())
    head = int(least[layer].argmax())
    return {
        f"{part}.{layer}.{head}": own[head, :shown, :shown].cpu().contiguous()
        for part, own in read[layer].weights.items()
    }
