"""Prompts and their answers: token streams to train on, and the prompts that are held out, to answer."""

import string
from typing import Self

from pydantic import model_validator

from relinear.plan.strict import Positive, Strict
from relinear.stages import _stage


class Options(Strict):
    """An entry of data.yaml with `make: prompts`. Of the training split so many tokens are read as the step's
    dose has, or all that there are."""

    source: str  # an asset, or `smoke`; get/prompts.py has the reader of each
    template: str  # {output} is its end, and each other {field} one of the source's
    train_tokens: Positive | None = None  # at dose and budget 1; the scale's where not given

    @model_validator(mode="after")
    def _ends_with_the_answer(self) -> Self:
        fields = [name for _, name, _, _ in string.Formatter().parse(self.template) if name is not None]
        if fields.count("output") != 1 or not self.template.endswith("{output}") or len(fields) < 2:
            raise ValueError(
                f"a template has a field of the prompt and ends with {{output}}; got {self.template!r}"
            )
        return self


class Stage(_stage.Sourced):
    """The stage `prompts`, which tokenises prompts and their answers for a model."""

    help = "Tokenise prompts and their answers for a model."
    work = "relinear.get.prompts"

    def resolve(self, entry, scale):
        """Options of the data, with the tokens of the dose."""
        options = scale.data[entry.text.data].options
        tokens = scale.train_tokens(entry.text.dose, options["train_tokens"])
        return self.of_sources(entry, scale, {**options, "train_tokens": tokens, "seed": scale.seed})
