"""The plane of Lizard's Figure 4: pass keys found, by the length of the text and the distance of the key, in
models trained on such texts.

Prompts are those of `relinear.get.passkeys`, with keys that no training has, and answers are scored as
`relinear.measure.needle` has it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from transformers import PreTrainedModel

from relinear.errors import UserError
from relinear.folders import tokenizer_of
from relinear.get import needles
from relinear.get.needles import Cutter, Needle
from relinear.get.passkeys import Keys
from relinear.linearize.model import Linearized
from relinear.measure._limit import limit_of
from relinear.measure.needle import OF, SCORES, answers, readings
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import Positive, Strict

NEEDS = ("next_token",)
YIELDS = (
    "exact_match",
    "choice",
    "token_accuracy",
    "nats",
    "chance",
    "error",
    "not_informative",
    "window",
    "trained_length",
)
AXES = {"length": 2048, "depth": 0.5, "distance": 1024, "beyond": 256}

# tokens of an answer besides the key's own: a full stop, and a space where the tokenizer cuts it off
AROUND = 2


class Options(Strict):
    """Ask `prompts` times in each cell: of each of `lengths`, every `distance_bin` tokens of distance. A
    forward pass reads so many prompts as have `batch_tokens`, at least one.

    `filler`: sentences of the held-out text of the measure's data, or five that repeat. `beyond`: what `at:
    {length, beyond}` is the mean over, the keys more than so many tokens before the question. `keys`,
    `key_tokens` and `mention` as in training.
    """

    lengths: tuple[Positive, ...] = Field(min_length=1)
    prompts: Annotated[int, Field(ge=2)]
    batch_tokens: Positive
    distance_bin: Positive = 512
    filler: Literal["text", "noise"] = "text"
    keys: Annotated[int, Field(ge=2, le=len(needles.NAMES))] = 5
    key_tokens: tuple[Positive, Positive] = (5, 8)
    mention: Literal[1, 2] = 1
    beyond: Annotated[int, Field(ge=0)] = 256

    @model_validator(mode="after")
    def _from_few_to_many(self) -> Self:
        if self.key_tokens[0] > self.key_tokens[1]:
            raise ValueError(f"key_tokens are the fewest and the most; got {self.key_tokens}")
        return self


def measure(model: PreTrainedModel, data: Path | None, options: Options, job: Job) -> Iterator[Reading]:
    """The readings of `relinear.measure.needle`, of which {length, distance} is the plane: a distance is
    counted to the end of its bin. Further

    `trained_length`, the tokens of the sequences of the run's last training step, and `window`, the positions
    that its layers see by softmax attention: what the figure draws lines at. A run that was not trained, and
    one without a window, lacks them.

    A length is that of the prompt and its answer together, as in training. Beyond what the model can read
    nothing is defined, and its readings say why. Writes `items.jsonl`. Raises UserError before any work for a
    length without room for the keys, and for a tokenizer that cannot write them.
    """
    tokenizer = tokenizer_of(job.parents["model"])
    prompts = drawn(Keys(tokenizer, "test"), data, options, job)
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
    lines = {"trained_length": trained_length(job), "window": window_of(model)}
    yield from (Reading(name, OF, {}, tokens, None, 1) for name, tokens in lines.items() if tokens)


def drawn(
    cutter: Cutter, data: Path | None, options: Options, job: Job
) -> dict[int, list[tuple[float, Needle]]]:
    """The prompts of each length with the depth of their cell, distances evenly spread; the same for all
    models with one tokenizer."""
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
        cells = -(-length // options.distance_bin)
        n = cells * options.prompts
        found[length] = [
            (
                (i // options.prompts + 0.5) / cells,
                needles.example(
                    cutter,
                    length - options.key_tokens[1] - AROUND,
                    f"plane {job.settings['seed']} {length} {i}",
                    filler=filler,
                    keys=options.keys,
                    key_tokens=options.key_tokens,
                    mention=options.mention,
                    depth=(i + 0.5) / n,
                ),
            )
            for i in range(n)
        ]
    return found


def trained_length(job: Job) -> int | None:
    """Tokens of a sequence of the last step that trained the run."""
    steps = [step for link in job.links for step in link.steps]
    return json.loads((steps[-1] / "run.json").read_text())["config"]["budget"]["seq_len"] if steps else None


def window_of(model: PreTrainedModel) -> int | None:
    """Positions of the softmax window of a model's layers, the largest where they differ; None where no layer
    has one."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(model, Linearized):
        return None
    methods = [layer.method for layer in model.attention_layers()]
    return (
        max(
            (getattr(m, "window", None) or getattr(m.options, "window", None) or 0 for m in methods),
            default=0,
        )
        or None
    )
