"""The gate: a model proves itself before it is scored. Decoding must equal the parallel form, and a prefix must not depend on what follows."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from relinear.get.packed import Packed
from relinear.linearize.model import Linearized
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import Positive, Strict

# Relative RMS of logits. Float32 leaves rounding only; bfloat16 rounds every layer's output differently in the two orders.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float64: 1e-6}
STEPS = 8  # tokens decoded one by one after a prefill of the rest


class Options(Strict):
    """Check the first `tokens` of the held-out text as one sequence."""

    tokens: Positive
    seq_len: Positive  # the longest sequence; fewer tokens are one sequence


def measure(model: PreTrainedModel, data: Path, options: Options, job: Job) -> Iterator[Reading]:
    """`passed`, and the two distances, of the model. Raises GateError where it is not passed: nothing else is measured then."""
    length = min(options.tokens, options.seq_len)
    tokens, _ = Packed(data, "heldout", length).sequence(0)
    for name, value in gate(model, tokens).items():
        yield Reading(name, "model", {}, float(value), None, length)


class GateError(RuntimeError):
    """The model failed the gate; the message has the figures."""


def distance(a: Tensor, b: Tensor) -> float:
    """RMS of a - b relative to that of b."""
    a, b = a.double(), b.double()
    return ((a - b).square().mean().sqrt() / b.square().mean().sqrt()).item()


@torch.inference_mode()
def gate(model: PreTrainedModel, tokens: Tensor) -> dict[str, float | bool]:
    """Check the model on a real text ``[T]``; returns the figures for its metrics. Raises GateError if they are beyond tolerance.

    parallel_vs_recurrent: the last logits of one parallel pass against a prefill and single steps with the cache.
    prefix_consistency: logits of the first half, with the second half as it is and replaced by its reverse.
    """
    model.eval()
    tokens = tokens[None].to(model.device)
    half = tokens.shape[1] // 2
    whole = model(tokens, use_cache=False).logits
    finite = bool(whole.isfinite().all())
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
    tolerance = TOLERANCE[base.dtype]
    figures = {
        "passed": finite and prefix <= tolerance and recurrent <= tolerance, "parallel_vs_recurrent": recurrent,
        "prefix_consistency": prefix, "finite": finite, "tolerance": tolerance,
    }  # fmt: skip
    if not figures["passed"]:
        raise GateError(f"the model is not fit to be scored: {figures}")
    return figures
