"""The gate: a model proves itself before it is scored. Decoding must equal the parallel form, and a prefix
must not depend on what follows.

An encoder decodes nothing: padding must leave no trace, and the order in which tokens are given, with their
positions, must not matter.
"""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from relinear.get.packed import Packed
from relinear.linearize.model import Linearized
from relinear.machine.hardware import products
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import Positive, Strict

YIELDS = (
    "passed",
    "finite",
    "tolerance",
    "rounding",
    "parallel_vs_recurrent",
    "prefix_consistency",
    "padding_consistency",
    "order_consistency",
    "parallel_vs_recurrent_float32",
    "prefix_consistency_float32",
    "padding_consistency_float32",
    "order_consistency_float32",
)

# Relative RMS of logits. Float32 leaves rounding only; bfloat16 rounds every layer's output differently in
# the two orders.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float64: 1e-6}
MOST = 0.5  # the most that two orders of a bfloat16 model may be apart, however much it magnifies rounding
STEPS = 8  # tokens decoded one by one after a prefill of the rest


class Options(Strict):
    """Check the first `tokens` of the held-out text as one sequence."""

    tokens: Positive
    seq_len: Positive  # the longest sequence; fewer tokens are one sequence


def measure(model: PreTrainedModel, data: Path | None, options: Options, job: Job) -> Iterator[Reading]:
    """Readings `passed` and the two distances. Raises GateError where the gate is not passed: then nothing
    else is measured.

    Without `data` the model is an encoder, and its tokens are drawn.
    """
    length = min(options.tokens, options.seq_len)
    if data is None:
        drawn = torch.Generator().manual_seed(job.settings["seed"])
        found = encoder_gate(
            model,
            torch.randint(
                model.config.vocab_size // 2, model.config.vocab_size, (2, length), generator=drawn
            ),
        )
    else:
        found = gate(model, Packed(data, "heldout", length).sequence(0)[0])
    for name, value in found.items():
        yield Reading(name, "model", {}, float(value), None, length)


class GateError(RuntimeError):
    """The model failed the gate; the message has the figures."""


def distance(a: Tensor, b: Tensor) -> float:
    """RMS of a - b relative to that of b."""
    a, b = a.double(), b.double()
    return ((a - b).square().mean().sqrt() / b.square().mean().sqrt()).item()


@torch.inference_mode()
def gate(model: PreTrainedModel, tokens: Tensor) -> dict[str, float | bool]:
    """Check the model on a real text ``[T]``; returns the figures for its metrics. Raises GateError if they
    are beyond tolerance.

    parallel_vs_recurrent: the last logits of one parallel pass against a prefill and single steps with the
    cache. prefix_consistency: logits of the first half, with the second half as it is and replaced by its
    reverse.
    """
    return _judged(model, tokens[None], _two_forms)


def _two_forms(model: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Logits of one parallel pass over ``[1, T]``, and the distances of `gate`."""
    half = tokens.shape[1] // 2
    whole = model(tokens, use_cache=False).logits
    other = torch.cat([tokens[:, :half], tokens[:, half:].flip(1)], 1)
    prefix = distance(model(other, use_cache=False).logits[:, :half], whole[:, :half])
    start = tokens.shape[1] - STEPS
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    cache = base.make_cache() if isinstance(base, Linearized) else None
    out = model(tokens[:, :start], past_key_values=cache, use_cache=True)
    decoded = [out.logits[:, -1]]
    for i in range(start, tokens.shape[1] - 1):
        out = model(tokens[:, i : i + 1], past_key_values=out.past_key_values, use_cache=True)
        decoded.append(out.logits[:, -1])
    recurrent = distance(torch.stack(decoded, 1), whole[:, start - 1 : -1])
    return whole, {"parallel_vs_recurrent": recurrent, "prefix_consistency": prefix}


@torch.inference_mode()
def encoder_gate(model: PreTrainedModel, tokens: Tensor) -> dict[str, float | bool]:
    """Check an encoder on tokens ``[2, T]``; returns the figures for its metrics. Raises GateError if they
    are beyond tolerance.

    padding_consistency: half of the first row alone, and padded beside the second. order_consistency: the
    tokens as they stand, and shuffled together with their positions; of a method that reads where tokens
    stand (cosFormer) only the first is checked.
    """
    return _judged(model, tokens, _two_orders)


def _two_orders(model: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Last hidden states of ``[2, T]``, and the distances of `encoder_gate`."""
    half = tokens.shape[1] // 2
    whole, alone = (model(x).last_hidden_state for x in (tokens, tokens[:1, :half]))
    padded, mask = tokens.clone(), torch.ones_like(tokens)
    padded[0, half:], mask[0, half:] = model.config.pad_token_id, 0
    distances = {
        "padding_consistency": distance(
            model(padded, attention_mask=mask).last_hidden_state[:1, :half], alone
        )
    }
    if not (
        isinstance(model, Linearized) and any(layer.method.reads_order for layer in model.attention_layers())
    ):
        first = 0 if (padding := model.embeddings.position_embeddings.padding_idx) is None else padding + 1
        order = torch.randperm(tokens.shape[1], generator=torch.Generator().manual_seed(0)).to(model.device)
        shuffled = model(
            tokens[:, order], position_ids=first + order[None].expand_as(tokens)
        ).last_hidden_state
        distances["order_consistency"] = distance(shuffled, whole[:, order])
    return whole, distances


def _judged(
    model: PreTrainedModel,
    tokens: Tensor,
    compare: Callable[[PreTrainedModel, Tensor], tuple[Tensor, dict[str, float]]],
) -> dict:
    """The figures of a model by outputs and distances that `compare` finds. Raises GateError where they are
    beyond the tolerance of its dtype.

    A model in bfloat16 may magnify rounding beyond that. Then the same weights in float32 must be within
    float32's tolerance, and in bfloat16 no distance may be more than twice what bfloat16 moves the outputs
    from float32's (`rounding`), or more than MOST.
    """
    model.eval()
    tokens = tokens.to(model.device)
    outputs, distances = compare(model, tokens)
    figures = {**distances, "finite": bool(outputs.isfinite().all()), "tolerance": TOLERANCE[model.dtype]}
    passed = figures["finite"] and all(d <= figures["tolerance"] for d in distances.values())
    if figures["finite"] and not passed and model.dtype == torch.bfloat16:
        with products("highest"):  # in TF32, which goes with bfloat16, products have three digits
            exact, precise = compare(copy.deepcopy(model).float(), tokens)
        rounding = distance(outputs, exact)
        figures |= {"tolerance": min(2 * rounding, MOST), "rounding": rounding} | {
            f"{name}_float32": d for name, d in precise.items()
        }
        passed = all(d <= TOLERANCE[torch.float32] for d in precise.values()) and all(
            d <= figures["tolerance"] for d in distances.values()
        )
    figures = {"passed": passed, **figures}
    if not passed:
        raise GateError(f"the model is not fit to be scored: {figures}")
    return figures
