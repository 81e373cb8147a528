"""Logits in float32 whatever a model's dtype is, and which of them is the largest where some are equal.

A model in bfloat16 rounds its logits to 8 bits: between 16 and 32 they lie 0.125 apart, so that several are
the largest, and `argmax` takes the first of these. Of SmolLM2's next tokens 8 % were such a tie, and of
MMLU's letters 22 %. Whatever compares logits does so inside `float32_head`.
"""

import copy
import functools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from relinear.machine.hardware import products

HALF = (torch.bfloat16, torch.float16)


@contextmanager
def float32_head(model: PreTrainedModel, *, last: bool = False) -> Iterator[None]:
    """A context in which a model's logits are the product, in float32, of its last hidden states and a
    float32 copy of its head.

    What the model does to logits after the head (Gemma's soft cap, the scalings of Granite and Cohere) it
    does to these, in float32. A head of float32 or float64 computes as it is. The head is the output
    embeddings', a bias or an adapter included; of a model of pictures its classifier.

    Args:
        last: compute the last position alone, which is all that `generate` reads: a linearized model would
        make logits of the whole prompt.

    Afterwards the model is as it was. Contexts of one model can stand within each other: the copy is made
    once.
    """
    head = _head(model)
    before = vars(head).get("forward")
    compute, dtype = head.forward, None
    if not hasattr(before, "float32") and any(weight.dtype in HALF for weight in head.parameters()):
        wide = copy.deepcopy(head).float()
        # a call of the module would call its hooks twice
        compute, dtype = functools.partial(type(wide).forward, wide), torch.float32

    exact = dtype is not None and type(head) is nn.Linear and head.weight.dtype == torch.bfloat16

    def forward(hidden: Tensor) -> Tensor:
        kept = hidden[:, -1:] if last else hidden
        if exact and kept.dtype == torch.bfloat16:
            with products("medium"):
                return compute(kept.to(dtype))
        return compute(kept if dtype is None else kept.to(dtype))

    forward.float32 = True  # so that a context within this one copies nothing
    head.forward = forward
    try:
        yield
    finally:
        del head.forward
        if before is not None:
            head.forward = before


def _head(model: PreTrainedModel) -> nn.Module:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base.classifier if base.get_output_embeddings() is None else base.get_output_embeddings()


def peak(logits: Float[Tensor, "*B V"]) -> tuple[Float[Tensor, "*B"], Int[Tensor, "*B"], Bool[Tensor, "*B"]]:
    """The largest logit, a token that has it, and whether several have it. The logits are written to, and are
    afterwards as they were: a mask over a whole vocabulary would take several times as long."""
    largest, best = logits.max(-1)
    logits.scatter_(-1, best[..., None], -torch.inf)
    tied = logits.amax(-1) == largest
    logits.scatter_(-1, best[..., None], largest[..., None])
    return largest, best, tied


def likeliest(
    logits: Float[Tensor, "B V"], read: Int[Tensor, "B T"]
) -> tuple[Int[Tensor, " B"], Bool[Tensor, " B"]]:
    """The token with the largest logit of each row, and whether several have it. One of several is drawn; the
    tokens that the row has `read` seed the draw, so the same text gets the same token, and over texts no
    token is favoured."""
    largest, best, tied = peak(logits)
    for row in tied.nonzero().flatten().tolist():
        equals = (logits[row] == largest[row]).nonzero().flatten().tolist()
        best[row] = random.Random(repr(read[row].tolist())).choice(equals)
    return best, tied


def shared(logits: Float[Tensor, "*B V"]) -> tuple[Float[Tensor, "*B"], Float[Tensor, "*B"]]:
    """The largest logit, and what a token that has it counts: 1, or 1/k where k have it."""
    largest, _, tied = peak(logits)
    counts = torch.ones_like(largest)
    if tied.any():
        counts[tied] /= (logits[tied] == largest[tied][:, None]).sum(-1)
    return largest, counts


def credit(
    own: Float[Tensor, "*B"], largest: Float[Tensor, "*B"], counts: Float[Tensor, "*B"]
) -> Float[Tensor, "*B"]:
    """How likely it is that a token is taken, by its `own` logit and what is `shared`: 1, or 1/k where k
    tokens have the largest logit, else 0."""
    return torch.where(own == largest, counts, 0.0)


def firsts(scores: Sequence[float]) -> list[int]:
    """The places of the largest score: several where there is a tie. A choice that is among k of them counts
    1/k, as if one were drawn."""
    largest = max(scores)
    return [i for i, score in enumerate(scores) if score == largest]
