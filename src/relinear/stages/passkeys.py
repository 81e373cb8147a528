"""Pass keys to train on: long texts that hide several keys and end in a question for one of them, and its
answer."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from relinear.plan.names import Node
from relinear.plan.strict import Positive, Strict
from relinear.stages import _stage
from relinear.stages._work import Entry, Scaled, Work


class Options(Strict):
    """An entry of data.yaml with `make: passkeys`: so many `examples` of exactly `length` tokens to train on,
    and `heldout` others.

    `filler`: sentences of the training tokens of `text`, another entry with `make: text`, or five that repeat
    (noise). `learn`: the tokens that have labels, those of the answer alone or all of the sequence; the paper
    does not say which.
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
            raise ValueError(
                "`filler: text` and `text: <data>`, whose sentences it is, go together; got filler"
                f" {self.filler!r}, text {self.text!r}"
            )
        if self.key_tokens[0] > self.key_tokens[1]:
            raise ValueError(f"key_tokens are the fewest and the most; got {self.key_tokens}")
        return self


class Stage(_stage.Tokens):
    """The stage `passkeys`, which hides pass keys in long texts to train on."""

    help = "Hide pass keys in long texts to train a model on."
    work = "relinear.get.passkeys"

    def resolve(self, entry, scale):
        """Options of the data, with the number of examples that the budget makes; the hay is pieces of a
        text."""
        text = entry.text
        options = {**scale.data[text.data].options}
        hay = options.pop("text")
        parents = self.parents(entry) | ({"text": scale.text(hay, text.model)} if hay else {})
        examples = max(round(options["examples"] * text.dose * scale.budget), 1)
        settings = {**options, "examples": examples, "seed": scale.seed}
        refused = _stage.first(_reasons(entry, scale, parents.get("text")))
        return Work(settings, self.work, parents=parents, refused=refused)

    def sequence(self, options):
        """Tokens of each sequence of this kind of data."""
        return Options(**options).length


def _reasons(entry: Entry, scale: Scaled, hay: Node | None) -> Iterator[str]:
    """A reason where the hay is no stream of text."""
    if hay and hay.stage != "text":
        able = ", ".join(name for name, found in scale.data.items() if found.make == "text")
        yield (
            f"data {entry.text.data!r}: its filler is sentences of a text, and {hay} is none; possible:"
            f" {able}"
        )
