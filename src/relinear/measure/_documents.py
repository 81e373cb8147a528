"""Whole documents read by a model in pieces, its state carried, and sums by position with errors over
documents."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from jaxtyping import Float, Int64
from pydantic import model_validator
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from relinear.errors import UserError
from relinear.get.whole import Excerpt, Whole
from relinear.machine.distributed import gathered, rank, share
from relinear.measure._limit import Limit
from relinear.measure._logits import float32_head
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import Positive, Strict

EDGES = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Options(Strict):
    """Read the first `documents` documents of each source (None: all), up to `excerpts` stretches of each
    that do not overlap, as far as the last of `positions`; the numbers of `positions` are the bands' edges,
    band "64-128" being positions 64 to 127.

    A token's position is the number of the stretch's tokens before it. `batch_size` stretches are read at a
    time, in pieces of `piece` tokens.
    """

    positions: tuple[int, ...] = EDGES
    documents: Positive | None = None
    excerpts: Positive = 1
    piece: Positive = 1024
    batch_size: Positive = 1

    @model_validator(mode="after")
    def _bands(self) -> Self:
        if (
            len(self.positions) < 2
            or self.positions[0] != 0
            or sorted(set(self.positions)) != list(self.positions)
        ):
            raise ValueError(
                "positions are the edges of bands, from 0 on, each above the one before it; got"
                f" {list(self.positions)}"
            )
        if self.documents == 1:
            raise ValueError("a standard error over documents needs at least 2 of them")
        return self

    @property
    def bands(self) -> list[tuple[int, int]]:
        return list(itertools.pairwise(self.positions))


def named(band: tuple[int, int]) -> str:
    return f"{band[0]}-{band[1]}"


class Piece(NamedTuple):
    """The model's output for a piece: logits ``[B, T, V]`` and the tokens ``[B, T]`` that follow each, the
    first of them at `position`."""

    position: int
    logits: Float[Tensor, "B T V"]
    targets: Int64[Tensor, "B T"]


def pieces(
    model: PreTrainedModel, tokens: Int64[Tensor, "B S+T"], separator: int, piece: int
) -> Iterator[Piece]:
    """Read rows that begin with `separator` tokens piece by piece, the cache or state carried on. The last
    token is read by none."""
    cache, at, position = None, 0, 0
    end = tokens.shape[1] - 1
    while at < end:
        stop = min(at + piece + (separator - 1 if at == 0 else 0), end)  # each piece predicts as many tokens
        out = model(input_ids=tokens[:, at:stop].to(model.device), past_key_values=cache, use_cache=True)
        first = separator - 1 if at == 0 else 0
        logits, targets = out.logits[:, first:], tokens[:, at + first + 1 : stop + 1].to(out.logits.device)
        yield Piece(position, logits, targets)
        cache, at, position = out.past_key_values, stop, position + targets.shape[1]


class Read(NamedTuple):
    """The sums over one stretch: band -> name -> sum; `tokens` of each band are among the names."""

    excerpt: tuple[int, str, int]  # document, source, start
    sums: dict[str, dict[str, float]]


Score = Callable[[int, Int64[Tensor, "B S+T"]], Iterable[tuple[int, Mapping[str, Float[Tensor, "B T"]]]]]


@torch.inference_mode()
def read(
    data: Path, options: Options, limit: Limit, score: Score, name: str, *models: PreTrainedModel
) -> tuple[Whole, list[Read]]:
    """Sums of the values of `score` over the stretches that `options` choose, as far as the `limit` allows.

    `score(separator, tokens)` gives for each piece its first position and named values ``[B, T]`` of its
    tokens, by the `models`, whose logits are float32. Of several processes each takes its share. Raises
    UserError before any work where a document is shorter than the positions, FloatingPointError for a value
    that is not finite.
    """
    documents, last = Whole(data), options.positions[-1]
    chosen = [
        e for i in documents.first(options.documents) for e in documents.excerpts(i, last, options.excerpts)
    ]
    if len({e.document for e in chosen}) < 2:
        raise UserError(
            f"{name}: a standard error over documents needs at least 2 of them; {data.name} has"
            f" {len(documents)}"
        )
    separator = len(documents.separator)
    bands = [band for band in options.bands if band[1] <= limit.positions(separator)]
    length = bands[-1][1] if bands else 0
    batches = (
        [chosen[i : i + options.batch_size] for i in range(0, len(chosen), options.batch_size)]
        if bands
        else []
    )
    rows: list[Read] = []
    mine = share(batches)
    with (
        ExitStack() as heads,
        tqdm(
            total=length * sum(map(len, mine)), desc=name, unit="tok", unit_scale=True, disable=rank() > 0
        ) as bar,
    ):
        for model in models:
            heads.enter_context(float32_head(model))
        for batch in mine:
            tokens = torch.stack([excerpt.tokens[: separator + length] for excerpt in batch])
            rows += _summed(batch, score(separator, tokens), bands, bar)
    return documents, sorted(gathered(rows), key=lambda row: row.excerpt)


def _summed(batch: Sequence[Excerpt], scored, bands: Sequence[tuple[int, int]], bar: tqdm) -> list[Read]:
    found: list[dict[str, dict[str, float]]] = [
        {named(band): defaultdict(float) for band in bands} for _ in batch
    ]
    for position, values in scored:
        length = next(iter(values.values())).shape[1]
        for first, last in bands:
            cut = slice(max(first - position, 0), max(min(last - position, length), 0))
            if cut.start >= cut.stop:
                continue
            for what, value in values.items():
                for excerpt, sums, total in zip(
                    batch, found, value[:, cut].double().sum(1).tolist(), strict=True
                ):
                    if not math.isfinite(total):
                        where = (
                            f"document {excerpt.document} ({excerpt.source}), from its token"
                            f" {excerpt.start} on"
                        )
                        raise FloatingPointError(
                            f"got {what} {total} at positions {first} to {last - 1} of {where}"
                        )
                    sums[named((first, last))][what] += total
            for sums in found:
                sums[named((first, last))]["tokens"] += cut.stop - cut.start
        bar.update(length * len(batch))
    return [
        Read((e.document, e.source, e.start), {band: dict(own) for band, own in sums.items()})
        for e, sums in zip(batch, found, strict=True)
    ]


class Mean(NamedTuple):
    """A mean per token with its standard error over documents."""

    value: float
    stderr: float
    documents: int


def mean(rows: Iterable[Read], bands: Iterable[str], term: Callable[[Mapping[str, float]], float]) -> Mean:
    """The mean per token of a term of the sums, over some bands.

    With sums s_d over c_d tokens of document d it is the ratio L = sum s_d / sum c_d, and se(L)^2 = D/(D-1)
    sum (s_d - c_d L)^2 / (sum c_d)^2: documents, not tokens and not stretches, are taken as independent.
    """
    sums, counts = defaultdict(float), defaultdict(float)
    for row, band in itertools.product(rows, bands):
        sums[row.excerpt[0]] += term(row.sums[band])
        counts[row.excerpt[0]] += row.sums[band]["tokens"]
    total, n = sum(counts.values()), len(counts)
    value = sum(sums.values()) / total
    squares = sum((sums[d] - counts[d] * value) ** 2 for d in sums)
    return Mean(value, math.sqrt(n / (n - 1) * squares) / total if n > 1 else math.nan, n)


def over_bands(
    job: Job,
    documents: Whole,
    rows: list[Read],
    options: Options,
    limit: Limit,
    metrics: Mapping[str, Callable],
) -> Iterator[Reading]:
    """A reading of each metric over all positions ({}) and of each band, of all documents and, where there
    are several sources, of each.

    `metrics`: name -> function of some rows and bands that gives a `Mean`. Beyond the `limit` readings are
    not defined, and say why.
    """
    within = [named(band) for band in options.bands if band[1] <= limit.positions(len(documents.separator))]
    everything = [named(band) for band in options.bands]
    places: list[tuple[dict[str, Any], list[str]]] = [
        ({}, everything),
        *(({"position": band}, [band]) for band in everything),
    ]
    several = list(dict.fromkeys(documents.sources))
    groups = {job.settings["data"]: rows} | {
        s: [row for row in rows if row.excerpt[1] == s] for s in several if len(several) > 1
    }
    for (of, own), (at, bands), (metric, function) in itertools.product(
        groups.items(), places, metrics.items()
    ):
        if set(bands) <= set(within):
            found: Mean = function(own, bands)
            yield Reading(
                metric,
                of,
                at,
                found.value,
                None if math.isnan(found.stderr) else found.stderr,
                found.documents,
            )
        else:
            yield Reading(metric, of, at, None, None, 0, limit.why)


def items(documents: Whole, rows: Iterable[Read]) -> Iterator[dict[str, Any]]:
    """A row for each stretch, so that runs can be compared document by document."""
    for row in rows:
        document, source, start = row.excerpt
        yield {
            "document": document,
            "source": source,
            "sha256": documents.digests[document],
            "start": start,
            "positions": row.sums,
        }


def losses(
    logits: Float[Tensor, "*B T V"], targets: Int64[Tensor, "*B T"]
) -> tuple[Float[Tensor, "*B T"], Float[Tensor, "*B T V"]]:
    """The loss of each token in nats, and the log-probabilities of all tokens, in float32."""
    logs = logits.float().log_softmax(-1)
    return -logs.gather(-1, targets[..., None]).squeeze(-1), logs
