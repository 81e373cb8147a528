"""Texts to train on that ask for pairs and passages far before, farther and farther as the training goes
on."""

from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import Field, model_validator

from relinear.plan.names import Node
from relinear.plan.strict import Positive, Strict
from relinear.stages import _stage
from relinear.stages._work import Entry, Scaled, Work

Two = Annotated[int, Field(ge=2)]


class Options(Strict):
    """An entry of data.yaml with `make: lookups`: the sequences of another data set, `text`, of `length`
    tokens each, a `share` of them with lists of pairs and copied passages, and questions about these.

    `pairs`: the fewest and the most of a list. `distances`: the longest of each rung, in tokens; the first
    sequences of a training have the first, the last ones the last.
    """

    text: str
    length: Positive
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    pairs: tuple[Two, Two] = (4, 32)
    distances: Annotated[tuple[Annotated[int, Field(ge=32)], ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.pairs[0] > self.pairs[1]:
            raise ValueError(f"pairs are the fewest and the most; got {self.pairs}")
        if list(self.distances) != sorted(set(self.distances)) or self.distances[-1] >= self.length:
            raise ValueError(
                f"distances grow, and the last is within a sequence of {self.length} tokens; got"
                f" {self.distances}"
            )
        return self


class Stage(_stage.Tokens):
    """The stage `lookups`, which puts lists of pairs and copies into long texts."""

    help = "Put lists of pairs, copies and questions about them into long texts to train on."
    work = "relinear.get.lookups"

    def resolve(self, entry, scale):
        """Options of the data; the sequences are those of a text of the same dose."""
        text = entry.text
        options = Options(**scale.data[text.data].options).model_dump(mode="json")
        hay = scale.text(options.pop("text"), text.model, text.dose)
        refused = _stage.first(_reasons(entry, scale, hay, options["length"]))
        return Work(
            {**options, "seed": scale.seed},
            self.work,
            parents=self.parents(entry) | {"text": hay},
            refused=refused,
        )

    def sequence(self, options):
        """Tokens of each sequence of this kind of data."""
        return Options(**options).length


def _reasons(entry: Entry, scale: Scaled, hay: Node, length: int) -> Iterator[str]:
    """A reason where the text's sequences are not of that length."""
    data = hay.name.partition("@")[0]
    if hay.stage != "pieces" or scale.sequence(data) != length:
        able = [name for name, found in scale.data.items() if found.make == "pieces"]
        yield (
            f"data {entry.text.data!r}: its sequences of {length} tokens are those of a text in pieces of"
            f" that length; got {hay}, possible: {', '.join(f'{n} ({scale.sequence(n)})' for n in able)}"
        )
