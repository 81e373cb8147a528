"""In-context key-value recall: a list of pairs of words, one of whose keys comes again; in context, without
any training on it.

The task is associative recall as Zoology (Arora et al., 2024) asks it, put to a pretrained model in words:
pairs that no text has together. `relinear.measure.recall_accuracy` is another one, of small models that are
trained on tokens without meaning.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from tqdm import tqdm
from transformers import PreTrainedModel

from relinear.folders import tokenizer_of
from relinear.get.beginning import begun
from relinear.get.needles import Cutter, noise
from relinear.get.words import KEYS, VALUES
from relinear.machine.distributed import gathered, rank, share
from relinear.measure._answering import Answered, ask, mean_of, share_of
from relinear.measure._limit import limit_of
from relinear.measure._logits import float32_head
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import Positive, Strict

NEEDS = ("next_token",)
YIELDS = ("exact_match", "choice", "nats", "chance", "length", "tied")
AXES = {"pairs": 16}

OF = "pairs"
SCORES = ("exact_match", "choice", "nats")
HEADER = (
    "Each word on the left has one partner on the right. Remember every pair of this list, I will ask you"
    " about one of them."
)
AGAIN = "\n\nOnce more, one pair of the list:"


class Options(Strict):
    """Ask `prompts` times for lists of so many `pairs`; a forward pass reads so many prompts as have
    `batch_tokens`, at least one.

    `gap`: tokens of sentences that repeat between the list and the question, so that no window of that size
    holds a pair.
    """

    pairs: tuple[Annotated[int, Field(ge=2, le=len(KEYS))], ...] = Field(
        default=(4, 8, 16, 32, 64), min_length=1
    )
    prompts: Annotated[int, Field(ge=2)]
    batch_tokens: Positive
    gap: Annotated[int, Field(ge=0)] = 0


class PairList(NamedTuple):
    """A prompt, its pairs, and what follows were each pair's value the right one: a word and the end of its
    line."""

    prompt: list[int]
    pairs: list[tuple[str, str]]
    answers: list[list[int]]
    asked: int  # index of the pair that is asked for
    distance: int  # tokens after its value, before the end of the prompt


def measure(model: PreTrainedModel, data: Path | None, options: Options, job: Job) -> Iterator[Reading]:
    """Of "pairs", at {pairs}: `exact_match`, the greedy answer is the value with the end of its line;
    `choice`, the value has the largest log-probability a token of all pairs' values, 1/k where k values have;
    `nats`, of the right answer, a token; `chance` of `choice`; `tied`, how often several values had the
    largest or a greedy token was drawn among equals; and `length`, the prompts' tokens.

    Pairs whose prompt is longer than the model can read are not defined, and their readings say why. Writes
    `items.jsonl`. Raises UserError before any work for a tokenizer that cannot write the words.
    """
    tokenizer = tokenizer_of(job.parents["model"])
    cutter, limit = Cutter(tokenizer), limit_of(model)
    rows: list[dict[str, Any]] = []
    for pairs in options.pairs:
        lists = [
            drawn(cutter, pairs, options.gap, f"test {job.settings['seed']} {pairs} {i}")
            for i in range(options.prompts)
        ]
        most, at = max(len(x.prompt) for x in lists), {"pairs": pairs}
        if limit.tokens is not None and most > limit.tokens:
            yield from (Reading(score, OF, at, None, None, 0, limit.why) for score in SCORES)
            continue
        answered = answers(model, lists, options, job)
        rows += [
            {
                "item": len(rows) + i,
                "pairs": pairs,
                "distance": x.distance,
                "key": x.pairs[x.asked][0],
                "value": x.pairs[x.asked][1],
                "answer": tokenizer.decode(a.greedy),
                "exact": _exact(x, a),
                "choice": x.pairs[a.choice][1],
                "chosen": a.chosen(x.asked),
                "nats": -a.mean(x.asked),
                "tied": len(a.firsts),
                "drawn": a.drawn,
            }
            for i, (x, a) in enumerate(zip(lists, answered, strict=True))
        ]
        yield Reading(
            "exact_match", OF, at, *share_of(_exact(x, a) for x, a in zip(lists, answered, strict=True))
        )
        yield Reading(
            "choice", OF, at, *share_of(a.chosen(x.asked) for x, a in zip(lists, answered, strict=True))
        )
        yield Reading(
            "nats", OF, at, *mean_of(-a.mean(x.asked) for x, a in zip(lists, answered, strict=True))
        )
        yield Reading("chance", OF, at, 1 / pairs, None, len(lists))
        yield Reading("tied", OF, at, *share_of(a.tied or a.drawn for a in answered))
        yield Reading("length", OF, at, *mean_of(len(x.prompt) for x in lists))
    job.items(rows)


def drawn(cutter: Cutter, pairs: int, gap: int, seed: str) -> PairList:
    """A list of so many pairs, whose words are drawn by the seed, and a question about one of them; the same
    for all models with one tokenizer."""
    rng = random.Random(seed)
    keys, values = rng.sample(KEYS, pairs), rng.sample(VALUES, pairs)
    asked = rng.randrange(pairs)
    lines = [
        (*_begin(cutter, key), *cutter.ids(f" {value}")) for key, value in zip(keys, values, strict=True)
    ]
    filler = [token for sentence in noise(cutter) for token in sentence]
    between = (filler * (gap // len(filler) + 1))[:gap]
    tail = [*between, *cutter.ids(AGAIN), *_begin(cutter, keys[asked])]
    prompt = begun(
        cutter.tokenizer, [*cutter.ids(HEADER), *(token for line in lines for token in line), *tail]
    )
    answers = [[*cutter.ids(f" {value}"), *cutter.ids("\n")] for value in values]
    return PairList(
        prompt,
        list(zip(keys, values, strict=True)),
        answers,
        asked,
        sum(map(len, lines[asked + 1 :])) + len(tail),
    )


def _begin(cutter: Cutter, key: str) -> tuple[int, ...]:
    """The beginning of a line, up to its value."""
    return (*cutter.ids("\n-"), *cutter.ids(f" {key}"), *cutter.ids(":"))


def answers(model: PreTrainedModel, lists: Sequence[PairList], options: Options, job: Job) -> list[Answered]:
    """The answers to prompts, in their order. Prompts of one length are read together; each of several
    processes asks a share."""
    by_length: dict[int, list[int]] = {}
    for i, x in enumerate(lists):
        by_length.setdefault(len(x.prompt), []).append(i)
    batches = []
    for length, own in by_length.items():
        size = max(options.batch_tokens // length, 1)
        batches += [own[at : at + size] for at in range(0, len(own), size)]
    steps = max(len(answer) for x in lists for answer in x.answers)
    found: list[tuple[int, Answered]] = []
    with float32_head(model):  # once, not for each batch
        for batch in tqdm(
            share(batches), desc=f"{job.name} {len(lists[0].pairs)} pairs", unit="batch", disable=rank() > 0
        ):
            prompts = torch.tensor([lists[i].prompt for i in batch])
            found += zip(batch, ask(model, prompts, [lists[i].answers for i in batch], steps), strict=True)
    by_list = dict(gathered(found))
    return [by_list[i] for i in range(len(lists))]


def _exact(x: PairList, answered: Answered) -> bool:
    answer = x.answers[x.asked]
    return answered.greedy[: len(answer)] == answer
