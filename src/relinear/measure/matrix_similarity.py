"""The similarity of a run's attention matrices to its teacher's, head by head (SUPRA, Appendix A)."""

from collections.abc import Iterator
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from relinear.get.packed import Packed
from relinear.linearize.loading import load_teacher
from relinear.linearize.model import Linearized, linearize
from relinear.measure._attention import own_inputs
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import Positive, Strict
from relinear_kernels.linear_attention_reference import normaliser

YIELDS = (
    "cosine",
    "singular_values",
    "cosine_normalised",
    "singular_values_normalised",
    "cosine_below_diagonal",
    "cosine_absolute",
    "cosine_of_rows",
    "singular_values_absolute",
    "singular_values_l1",
    "singular_values_l2",
    "singular_values_mean",
    "singular_values_normalised_l1",
    "singular_values_normalised_l2",
    "singular_values_normalised_mean",
)
AXES = {"layer": 0, "head": 0}

TINY = torch.finfo(torch.float64).tiny  # the least norm; weights of some methods have no scale
METRICS = (
    "cosine",
    "singular_values",
    "cosine_normalised",
    "singular_values_normalised",
    "cosine_below_diagonal",
)
DISTANCES = ("l2", "l1", "mean")
READ_OTHERWISE = (
    "cosine_of_rows",
    "cosine_absolute",
    "singular_values_absolute",
    *(f"singular_values_{name}" for name in DISTANCES),
    *(f"singular_values_normalised_{name}" for name in DISTANCES),
)


class Options(Strict):
    """Compare on the first `tokens` of the held-out text, in sequences of `seq_len`; the paper names
    neither."""

    tokens: Positive
    seq_len: Positive


@torch.no_grad()
def measure(model: PreTrainedModel, data: Path, options: Options, job: Job) -> Iterator[Reading]:
    """Of "attention", the mean over all heads and that of each layer and head, over sequences:

    `cosine` of the two matrices as vectors, and `singular_values`, the distance of their sorted singular
    values, |s(A) - s(B)| / T^(1/2). `..._normalised`: the same where each row is divided by the absolute
    value of its sum, which leaves softmax as it is (Figure 4; Figure 3 does not divide).
    `cosine_below_diagonal` is normalised and leaves the diagonal out: decay makes each query look at itself,
    and so all methods alike.

    What the paper may mean instead, as means over all heads alone: `cosine_of_rows`, the mean of the cosines
    of rows, whatever they are divided by; `..._absolute`, where each row is divided by the sum of its
    absolute values; `..._l2`, |s(A) - s(B)| / |s(A)|; `..._l1`, the sum of
    |s(A) - s(B)| over that of s(A); `..._mean`, the mean of |s(A) - s(B)|.

    A is the softmax attention of the pretrained model that the run began with, reading the text on its own; B
    that of the run. Errors are over sequences.
    """
    teacher = linearize(load_teacher(job.parents["model"], model.dtype, str(model.device)), "softmax")
    # adapters stay in its layers
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    model = model if isinstance(model, Linearized) else linearize(model, "softmax")
    for either in (model, teacher):
        either.eval()
    text = Packed(data, "heldout", options.seq_len)
    n = max(options.tokens // options.seq_len, 1)
    sequences = (
        text.sequence(i)[0][None].to(model.device) for i in tqdm(range(n), desc=job.name, unit="seq")
    )
    values = torch.stack([compare(teacher, model, tokens) for tokens in sequences])  # [N, L, H, metrics]
    for name, value in zip((*METRICS, *READ_OTHERWISE), values.unbind(-1), strict=True):
        yield Reading(name, "attention", {}, *_mean(value.mean((1, 2))), n)
        if name in READ_OTHERWISE:
            continue
        for layer in range(value.shape[1]):
            for head in range(value.shape[2]):
                yield Reading(
                    name, "attention", {"layer": layer, "head": head}, *_mean(value[:, layer, head]), n
                )


def compare(teacher: Linearized, model: Linearized, tokens: Tensor) -> Float[Tensor, "L H metrics"]:
    """All METRICS, and all READ_OTHERWISE, of each layer and head on one sequence ``[1, T]``."""
    found = []
    for theirs, ours in zip(own_inputs(teacher, tokens), own_inputs(model, tokens), strict=True):
        # [H, T, T]
        a, b = (method.attention_weights(inputs)[0].double().cpu() for method, inputs in (theirs, ours))
        (a_rows, b_rows), (a_absolute, b_absolute) = (
            [x / normaliser(total(x)) for x in (a, b)]
            for total in (lambda x: x.sum(-1, keepdim=True).abs(), lambda x: x.abs().sum(-1, keepdim=True))
        )
        plain, *otherwise = spectra(a, b)
        divided, *otherwise_divided = spectra(a_rows, b_rows)
        metrics = [
            cosine(a, b),
            plain,
            cosine(a_rows, b_rows),
            divided,
            cosine(a_rows.tril(-1), b_rows.tril(-1)),
        ]
        rows = torch.cosine_similarity(a, b, dim=-1, eps=TINY).mean(-1)
        metrics += [
            rows,
            cosine(a_absolute, b_absolute),
            spectra(a_absolute, b_absolute)[0],
            *otherwise,
            *otherwise_divided,
        ]
        found.append(torch.stack(metrics, -1))
    return torch.stack(found)


def cosine(a: Float[Tensor, "H T T"], b: Float[Tensor, "H T T"]) -> Float[Tensor, " H"]:
    """The cosine of the angle between two matrices as vectors; what is above the diagonal is zero in both."""
    return torch.cosine_similarity(a.flatten(1), b.flatten(1), dim=1, eps=TINY)


def spectra(a: Float[Tensor, "H T T"], b: Float[Tensor, "H T T"]) -> Float[Tensor, "distances H"]:
    """The distance of the sorted singular values over the root of their number, and the three of
    DISTANCES."""
    s = torch.linalg.svdvals(a)
    apart = s - torch.linalg.svdvals(b)
    far, along = apart.norm(dim=-1), apart.abs().sum(-1)
    return torch.stack(
        [far / a.shape[-1] ** 0.5, far / s.norm(dim=-1), along / s.sum(-1), along / a.shape[-1]]
    )


def _mean(values: Float[Tensor, " N"]) -> tuple[float, float | None]:
    """A mean over sequences with its standard error; one sequence has none."""
    n = len(values)
    return values.mean().item(), (values.std() / n**0.5).item() if n > 1 else None
