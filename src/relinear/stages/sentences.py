"""Short texts and pairs of them for a model's vocabulary, each a sequence of its own, as encoders read
them."""

from typing import Literal, Self

from pydantic import model_validator

from relinear.plan.strict import Positive, Strict
from relinear.stages import _stage


class Texts(Strict):
    """The part that every kind of short texts has in data.yaml: where they are read."""

    source: str  # an asset, or `smoke`
    form: str  # of the source
    task: str | None = None  # the task, for the forms glue and requests
    words: tuple[Positive, Positive] | None = None  # sentences of fewest to most words; None: any

    @model_validator(mode="after")
    def _task_of_its_form(self) -> Self:
        if (self.task is None) == (self.form in ("glue", "requests")):
            raise ValueError(
                f"give a `task` with the forms glue and requests, and with no other; got form {self.form!r},"
                f" task {self.task!r}"
            )
        return self


class Options(Texts):
    """An entry of data.yaml with `make: sentences`. A training split is read up to the tokens of its dose."""

    # get/sentences.py has the reader of each
    form: Literal["glue", "requests", "sentences", "neighbours", "documents"]
    chunk: Positive | None = None  # join the texts and cut them into sequences of so many tokens
    train: Positive | None = None  # this many texts, an error where there are fewer; None: all
    heldout: Positive | None = None


class Stage(_stage.Sourced):
    """The stage `sentences`, which tokenises the sentences of a data set for a model."""

    help = "Tokenise the sentences of a data set for a model."
    work = "relinear.get.sentences"

    def resolve(self, entry, scale):
        """Options of the data, with the tokens of the dose."""
        options, tokens = scale.data[entry.text.data].options, scale.train_tokens(entry.text.dose)
        return self.of_sources(entry, scale, {**options, "train_tokens": tokens, "seed": scale.seed})
