"""Pass keys to train on: long texts that hide several keys and end in a question for one of them, and its answer."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from relinear.plan.strict import ConfigError, Positive, Strict
from relinear.stages import _stage


class Options(Strict):
    """An entry of data.yaml with `make: passkeys`: so many `examples` of exactly `length` tokens to train on, and `heldout` others.

    `filler`: sentences of the training tokens of `text`, another entry with `make: text`, or five that repeat (noise). `learn`: the tokens that
    have labels, those of the answer alone or all of the sequence; the paper does not say which.
    """

    examples: Positive
    length: Positive
    heldout: Positive
    filler: Literal["text", "noise"] = "text"
    text: str | None = None
    keys: Annotated[int, Field(ge=2, le=40)] = 5
    key_tokens: tuple[Positive, Positive] = (5, 8)
    mention: Literal[1, 2] = 1
    learn: Literal["answer", "all"] = "answer"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.filler == "text") != (self.text is not None):
            raise ValueError(f"`filler: text` and `text: <data>`, whose sentences it is, go together; got filler {self.filler!r}, text {self.text!r}")
        if self.key_tokens[0] > self.key_tokens[1]:
            raise ValueError(f"key_tokens are the fewest and the most; got {self.key_tokens}")
        return self


class Stage(_stage.Tokens):
    """The stage `passkeys`, which hides pass keys in long texts to train on."""

    help = "Hide pass keys in long texts to train a model on."
    work = "relinear.get.passkeys"

    def settings(self, plan, node):
        """Options of the data, with the number of examples that the budget makes."""
        text = plan.text_of(node)
        options = plan.data[text.data].options
        examples = max(round(options["examples"] * text.dose * plan.budget), 1)
        return {**{k: v for k, v in options.items() if k != "text"}, "examples": examples, "seed": plan.seed}

    def parents(self, plan, node):
        """The model, and the text whose pieces are the hay."""
        text = plan.text_of(node)
        source = plan.data[text.data].options["text"]
        return super().parents(plan, node) | ({"text": plan.text(source, text.model)} if source else {})

    def sequence(self, options):
        """Tokens of each sequence of this kind of data."""
        return Options(**options).length

    def check(self, plan, node, processes):
        """Raise ConfigError for hay that is no stream of text."""
        source = self.parents(plan, node).get("text")
        if source and source.stage != "text":
            able = ", ".join(name for name, found in plan.data.items() if found.make == "text")
            raise ConfigError(f"data {plan.text_of(node).data!r}: its filler is sentences of a text, and {source} is none; possible: {able}")
