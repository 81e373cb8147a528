"""Questions that are asked within contexts of several lengths: the contexts that a model can read, and its
answers."""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from tqdm import tqdm
from transformers import PreTrainedModel

from relinear.errors import UserError
from relinear.machine.distributed import gathered, rank, share
from relinear.measure._answering import Answered, ask
from relinear.measure._limit import limit_of
from relinear.measure._logits import float32_head
from relinear.measure._rope import NAMES, POSSIBLE, reach, scalable, scaled
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import Positive, Strict

ALONE = 0  # the context of a question that is asked without one


class Options(Strict):
    """Ask within each of `contexts`, in tokens of prompt and answer together; a forward pass reads so many
    prompts as have `batch_tokens`, at least one.

    `rope_scaling`: how the rotary embedding of a softmax teacher is scaled for contexts beyond its positions,
    "yarn:<factor>" or "linear:<factor>"; "default": not at all, its angles go on. Contexts within its
    positions are read as the teacher is, as SUPRA's Table 2 has them. Without a name, contexts beyond are not
    defined.
    """

    contexts: tuple[Positive, ...] = Field(min_length=1)
    batch_tokens: Positive
    rope_scaling: Annotated[str, Field(pattern=NAMES)] | None = None

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if sorted(set(self.contexts)) != list(self.contexts):
            raise ValueError(
                f"contexts come from the shortest to the longest, each once; got {list(self.contexts)}"
            )
        return self


class Prompt(NamedTuple):
    """A prompt, and the answers that are scored behind it."""

    tokens: list[int]
    candidates: list[list[int]]


def requests(name: str, data: Path, job: Job) -> list[dict[str, Any]]:
    """The documents of a set of OLMES's requests in an asset, or of a file `<name>.jsonl` that the settings
    name, in a fixed order, each once.

    Raises UserError where there are none.
    """
    if data == job.workflow:
        paths = [job.workflow / file for file in sorted(job.settings["files"]) if Path(file).stem == name]
    else:
        paths = sorted(path for path in data.rglob("requests.jsonl.gz") if name in path.parts)
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        with (
            gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")
        ) as lines:
            for doc in (json.loads(line)["doc"] for line in lines):
                found.setdefault(
                    json.dumps([doc["id"], doc["question"] if "question" in doc else doc["query"]]), doc
                )
    if not found:
        raise UserError(
            f"{job.name}: no questions of {name} in {data}; expected */{name}/*/requests.jsonl.gz, or"
            f" {name}.jsonl in a folder of items"
        )
    return list(found.values())


def check(model: PreTrainedModel, options: Options, name: str) -> None:
    """Raises UserError, before any work, where a named scaling does not reach the longest context."""
    if options.rope_scaling is None:
        return
    most, longest = reach(model, options.rope_scaling), options.contexts[-1]
    if most.tokens is not None and longest > most.tokens:
        raise UserError(
            f"{name}: a context of {longest} tokens is beyond what the model reads: {most.why}. Possible:"
            f" shorter contexts, or {POSSIBLE}"
        )


def answers(
    model: PreTrainedModel, prompts: Mapping[int, Sequence[Prompt]], steps: int, options: Options, name: str
) -> dict[int, list[Answered]]:
    """The answers to the prompts of each context, in their order. Contexts that the model cannot read are
    left out."""
    most = limit_of(model).tokens
    beyond = {context for context in prompts if most is not None and context > most}
    found = _read(
        model,
        {context: own for context, own in prompts.items() if context not in beyond},
        steps,
        options,
        name,
    )
    if beyond and options.rope_scaling is not None:
        with scaled(model, options.rope_scaling):
            found |= _read(
                model,
                {context: own for context, own in prompts.items() if context in beyond},
                steps,
                options,
                name,
            )
    return found


def unread(
    model: PreTrainedModel, metrics: Sequence[str], of: str, contexts: Sequence[int]
) -> Iterator[Reading]:
    """Readings of contexts that a model cannot read, which say why."""
    why = limit_of(model).why + (", and no rope_scaling named" if scalable(model) else "")
    for context in contexts:
        yield from (Reading(metric, of, {"context": context}, None, None, 0, why) for metric in metrics)


def _read(
    model, prompts: Mapping[int, Sequence[Prompt]], steps: int, options: Options, name: str
) -> dict[int, list[Answered]]:
    """The answers to the prompts of some contexts. A prompt that several contexts share is read once: a short
    text is whole in each of them."""
    each = [prompt for own in prompts.values() for prompt in own]
    distinct = list({_key(prompt): prompt for prompt in each}.values())
    longest_first = sorted(distinct, key=lambda prompt: -len(prompt.tokens))
    batches: list[list[Prompt]] = []
    for length, group in groupby(longest_first, key=lambda prompt: len(prompt.tokens)):
        own, size = list(group), max(options.batch_tokens // length, 1)
        batches += [own[at : at + size] for at in range(0, len(own), size)]
    mine, found = share(batches), []
    total = sum(len(p.tokens) for b in mine for p in b)
    with (
        float32_head(model),
        tqdm(total=total, desc=name, unit="tok", unit_scale=True, disable=rank() > 0) as bar,
    ):
        for batch in mine:
            tokens = torch.tensor([prompt.tokens for prompt in batch])
            found += zip(
                map(_key, batch),
                ask(model, tokens, [prompt.candidates for prompt in batch], steps),
                strict=True,
            )
            bar.update(tokens.numel())
    by_prompt = dict(gathered(found))
    return {context: [by_prompt[_key(prompt)] for prompt in own] for context, own in prompts.items()}


def _key(prompt: Prompt) -> tuple[tuple[int, ...], ...]:
    return (tuple(prompt.tokens), *map(tuple, prompt.candidates))
