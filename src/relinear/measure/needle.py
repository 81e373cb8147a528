"""Needles in a haystack: five pass keys in a long text, one asked for; in context, without any training on it
(`relinear.get.needles`)."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from tqdm import tqdm
from transformers import PreTrainedModel

from relinear.errors import UserError
from relinear.folders import tokenizer_of
from relinear.get import needles
from relinear.get.needles import Cutter, Needle
from relinear.machine.distributed import gathered, rank, share
from relinear.measure._answering import Answered, ask, mean_of, share_of
from relinear.measure._limit import limit_of
from relinear.measure._logits import float32_head
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import Positive, Strict

NEEDS = ("next_token",)
YIELDS = ("exact_match", "choice", "token_accuracy", "nats", "chance", "error", "not_informative", "tied")
AXES = {"length": 2048, "depth": 0.5, "distance": 1024, "beyond": 256}

OF = "needle"
SCORES = ("exact_match", "choice", "token_accuracy", "nats")
KINDS = ("right", "unended", "first key", "last key", "other key", "mixture", "none")
IN_COMMON = 3  # digits in a row that make a wrong number a mixture of the prompt's keys
ERRORS_ABOVE_CHANCE, TOO_EASY, COPYING = 3.0, 0.98, 0.5


class Options(Strict):
    """Ask `prompts` times in each cell of `lengths` x `depths`; a forward pass reads so many prompts as have
    `batch_tokens`, at least one.

    `filler`: sentences of the held-out text of the measure's data, or five that repeat. `beyond`: what `at:
    {length, beyond}` is the mean over, the keys more than so many tokens before the question, which no window
    of that size holds.
    """

    lengths: tuple[Positive, ...] = Field(min_length=1)
    depths: Positive
    prompts: Annotated[int, Field(ge=2)]
    batch_tokens: Positive
    filler: Literal["text", "noise"] = "text"
    keys: Annotated[int, Field(ge=2, le=len(needles.NAMES))] = 5
    key_tokens: tuple[Positive, Positive] = (5, 8)
    mention: Literal[1, 2] = 1
    distance_bin: Positive = 512
    beyond: Annotated[int, Field(ge=0)] = 256

    @model_validator(mode="after")
    def _from_few_to_many(self) -> Self:
        if self.key_tokens[0] > self.key_tokens[1]:
            raise ValueError(f"key_tokens are the fewest and the most; got {self.key_tokens}")
        return self


class Asked(NamedTuple):
    """One prompt with where it belongs and what was answered."""

    length: int
    depth: float  # the depth of its cell
    needle: Needle
    answered: Answered
    text: str  # the greedy answer

    @property
    def exact(self) -> bool:
        """Whether the greedy tokens begin with the asked answer."""
        answer = self.needle.answers[self.needle.asked]
        return self.answered.greedy[: len(answer)] == answer

    @property
    def chosen(self) -> float:
        """Whether the asked answer is the likeliest of the choices: 1, or 1/k where k are, else 0."""
        return self.answered.chosen(self.needle.asked)

    @property
    def kind(self) -> str:
        """The kind of the answer: "right", or the kind of the wrong answer."""
        return "right" if self.exact else kind_of(self.text, self.needle)

    def row(self, item: int) -> dict[str, Any]:
        """The prompt's line of `items.jsonl`."""
        needle, asked = self.needle, self.needle.asked
        return {
            "item": item,
            "length": self.length,
            "depth": self.depth,
            "distance": needle.distance,
            "names": needle.names,
            "keys": needle.keys,
            "asked": asked,
            "answer": self.text,
            "kind": self.kind,
            "exact": self.exact,
            "choice": self.answered.choice,
            "chosen": self.chosen,
            "tied": len(self.answered.firsts),
            "drawn": self.answered.drawn,
            "tokens_right": self.answered.likeliest[asked],
            "scores": [self.answered.mean(i) for i in range(len(needle.keys))],
        }


def measure(model: PreTrainedModel, data: Path | None, options: Options, job: Job) -> Iterator[Reading]:
    """Of "needle", at {length}, {length, depth}, {length, distance} (of the bin that ends there) and {length,
    beyond}:

    `exact_match`, the greedy answer is the key with its full stop; `token_accuracy`, of the answer's tokens,
    each behind the right ones; `choice`, the asked key has the largest log-probability a token of the
    prompt's, 1/k where k keys have; `nats`, of the right answer, a token.

    At {length} also `chance` of `choice`; `tied`, how often several keys had the largest or a greedy token
    was drawn among equals; `error`, the share of each of `KINDS`; and `not_informative` of "floor" (the
    choice is less than three standard errors above chance), "ceiling" (every cell is right) and "copying"
    (more than half are keys that were not asked for): 1 or 0. A length beyond what the model can read is not
    defined, and its readings say why. Writes `items.jsonl`.

    Raises UserError before any work for a length without room for the keys, and for a tokenizer that cannot
    write them.
    """
    tokenizer = tokenizer_of(job.parents["model"])
    prompts = drawn(Cutter(tokenizer), data, options, job)
    limit, asked = limit_of(model), []
    for length in options.lengths:
        if limit.tokens is None or length <= limit.tokens:
            asked += answers(model, tokenizer, length, prompts[length], options, job)
        else:
            yield from (Reading(score, OF, {"length": length}, None, None, 0, limit.why) for score in SCORES)
    job.items(a.row(item) for item, a in enumerate(asked))
    for length in options.lengths:
        if own := [a for a in asked if a.length == length]:
            yield from readings(length, own, options)


def drawn(
    cutter: Cutter, data: Path | None, options: Options, job: Job
) -> dict[int, list[tuple[float, Needle]]]:
    """The prompts of each length with the depth of their cell; the same for all models with one tokenizer."""
    if options.filler == "text" and data is None:
        raise UserError(
            f"{job.name}: the filler `text` is of the measure's data, which it names none of; possible:"
            " filler: noise"
        )
    filler = (
        needles.noise(cutter)
        if options.filler == "noise" or data is None
        else needles.sentences(cutter, data)
    )
    found: dict[int, list[tuple[float, Needle]]] = {}
    for length in options.lengths:
        found[length] = []
        for cell in range(options.depths):
            depth = (cell + 0.5) / options.depths
            for i in range(options.prompts):
                needle = needles.example(
                    cutter,
                    length,
                    f"test {job.settings['seed']} {length} {cell} {i}",
                    filler=filler,
                    keys=options.keys,
                    key_tokens=options.key_tokens,
                    mention=options.mention,
                    depth=depth,
                )
                found[length].append((depth, needle))
    return found


def answers(
    model: PreTrainedModel,
    tokenizer,
    length: int,
    prompts: list[tuple[float, Needle]],
    options: Options,
    job: Job,
) -> list[Asked]:
    """The answers to the prompts of one length, in their order. Each of several processes asks a share."""
    steps = max(len(answer) for _, needle in prompts for answer in needle.answers)
    size = max(options.batch_tokens // length, 1)
    found: list[tuple[int, Answered]] = []
    with float32_head(model):  # once, not for each batch
        for at in tqdm(
            share(range(0, len(prompts), size)), desc=f"{job.name} {length}", unit="batch", disable=rank() > 0
        ):
            batch = [needle for _, needle in prompts[at : at + size]]
            found += enumerate(
                ask(model, torch.tensor([n.prompt for n in batch]), [n.answers for n in batch], steps), at
            )
    by_prompt = dict(gathered(found))
    return [
        Asked(length, depth, needle, by_prompt[i], tokenizer.decode(by_prompt[i].greedy))
        for i, (depth, needle) in enumerate(prompts)
    ]


def kind_of(text: str, needle: Needle) -> str:
    """The kind of a wrong answer, by the digits that it begins with.

    `unended` the right key without its full stop; `first key`, `last key`, `other key` of the prompt's wrong
    ones (the first and the last stand at its ends); `mixture` no key, but `IN_COMMON` digits in a row are of
    one; `none` anything else.
    """
    said = re.match(r"\s*(\d+)", text)
    digits = said[1] if said else ""
    if digits in needle.keys:
        index = needle.keys.index(digits)
        if index == needle.asked:
            return "unended"
        return {0: "first key", len(needle.keys) - 1: "last key"}.get(index, "other key")
    parts = {digits[i : i + IN_COMMON] for i in range(len(digits) - IN_COMMON + 1)}
    return "mixture" if any(part in key for part in parts for key in needle.keys) else "none"


def readings(length: int, asked: Sequence[Asked], options: Options) -> Iterator[Reading]:
    """The readings of one length."""
    places: dict[tuple[str, float], list[Asked]] = {}
    for a in asked:
        places.setdefault(("depth", a.depth), []).append(a)
    for a in sorted(asked, key=lambda a: a.needle.distance):
        width = options.distance_bin
        places.setdefault(("distance", -(-a.needle.distance // width) * width), []).append(a)
    far = [a for a in asked if a.needle.distance > options.beyond]
    yield from _scores({"length": length}, asked)
    for (axis, value), own in places.items():
        yield from _scores({"length": length, axis: value}, own)
    if far:
        yield from _scores({"length": length, "beyond": options.beyond}, far)
    at, chance = {"length": length}, 1 / options.keys
    yield Reading("chance", OF, at, chance, None, len(asked))
    yield Reading("tied", OF, at, *share_of(a.answered.tied or a.answered.drawn for a in asked))
    kinds = Counter(a.kind for a in asked)
    for kind in KINDS:
        yield Reading("error", kind, at, *share_of(a.kind == kind for a in asked))
    choice, error, n = share_of(a.chosen for a in asked)
    cells = [own for (axis, _), own in places.items() if axis == "depth"]
    flags = {
        "floor": choice - chance < ERRORS_ABOVE_CHANCE * error,
        "ceiling": all(sum(a.exact for a in own) >= TOO_EASY * len(own) for own in cells),
        "copying": sum(kinds[kind] for kind in ("first key", "last key", "other key")) > COPYING * n,
    }
    for reason, holds in flags.items():
        yield Reading("not_informative", reason, at, float(holds), None, n)


def _scores(at: dict[str, int | float], asked: Sequence[Asked]) -> Iterator[Reading]:
    """The four scores of some prompts."""
    right = [a.answered.likeliest[a.needle.asked] for a in asked]
    yield Reading("exact_match", OF, at, *share_of(a.exact for a in asked))
    yield Reading("choice", OF, at, *share_of(a.chosen for a in asked))
    yield Reading("token_accuracy", OF, at, *mean_of(sum(hits) / len(hits) for hits in right))
    yield Reading("nats", OF, at, *mean_of(-a.answered.mean(a.needle.asked) for a in asked))
