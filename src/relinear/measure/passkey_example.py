"""One prompt with five pass keys in full, and a model's answer, as Lizard's Figure 3 shows it
(`relinear.get.needles`)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from transformers import PreTrainedModel

from relinear.folders import tokenizer_of
from relinear.get import needles
from relinear.measure._answering import ask
from relinear.measure._limit import limit_of
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import Positive, Strict

NEEDS = ("next_token",)
OF = "needle"


class Options(Strict):
    """A prompt of `length` tokens; `filler`: sentences of the held-out text of the measure's data, or five
    that repeat."""

    length: Positive
    filler: Literal["text", "noise"] = "text"
    keys: Annotated[int, Field(ge=2, le=len(needles.NAMES))] = 5
    key_tokens: tuple[Positive, Positive] = (5, 8)


def measure(model: PreTrainedModel, data: Path, options: Options, job: Job) -> Iterator[Reading]:
    """`exact_match` of "needle", whether the greedy answer is the key with its full stop: of one prompt, an
    example and no measure of a model.

    The prompt is the same for all models with one tokenizer. Writes `items.jsonl`, a line: the prompt as
    text, names and keys in their order, which is asked for, and the answer. Beyond what the model can read
    nothing is defined. Raises UserError for a length without room for the keys.
    """
    tokenizer = tokenizer_of(job.parents["model"])
    cutter = needles.Cutter(tokenizer)
    needle = needles.example(
        cutter,
        options.length,
        f"example {job.settings['seed']}",
        keys=options.keys,
        key_tokens=options.key_tokens,
        filler=needles.noise(cutter) if options.filler == "noise" else needles.sentences(cutter, data),
    )
    limit = limit_of(model)
    answer, text = needle.answers[needle.asked], None
    if limit.tokens is None or options.length + len(answer) <= limit.tokens:
        [answered] = ask(model, torch.tensor([needle.prompt]), [[answer]], max(map(len, needle.answers)))
        text = tokenizer.decode(answered.greedy)
        yield Reading("exact_match", OF, {}, float(answered.greedy[: len(answer)] == answer), None, 1)
    else:
        yield Reading("exact_match", OF, {}, None, None, 0, limit.why)
    job.items(
        [
            {
                "prompt": tokenizer.decode(needle.prompt),
                "names": needle.names,
                "keys": needle.keys,
                "asked": needle.asked,
                "distance": needle.distance,
                "answer": text,
            }
        ]
    )
