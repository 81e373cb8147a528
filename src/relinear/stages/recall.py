"""Associative recall: lists of key-value pairs that end in a key, whose value was among them."""

from typing import Annotated

from pydantic import Field

from relinear.plan.strict import Positive, Strict
from relinear.stages import _stage
from relinear.stages._work import Work

Several = Annotated[int, Field(ge=2)]


class Options(Strict):
    """An entry of data.yaml with `make: recall`: so many key and value tokens, pairs in a sequence, and
    sequences of each split."""

    keys: Several
    values: Several
    pairs: Positive
    train: Positive
    test: Several

    @property
    def length(self) -> int:
        """Tokens of a sequence: the pairs, the key that is asked for, and its value."""
        return 2 * self.pairs + 2


class Stage(_stage.Stage):
    """The stage `recall`, which draws sequences of associative recall."""

    help = "Draw sequences of associative recall."
    work = "relinear.get.recall"

    def resolve(self, entry, scale):
        """Options of the data, with the number of training sequences that the budget makes."""
        options = scale.data[entry.node.name].options
        return Work({**options, "train": scale.times_budget(options["train"]), "seed": scale.seed}, self.work)

    def sequence(self, options):
        """Tokens of each sequence of this kind of data."""
        return Options(**options).length
