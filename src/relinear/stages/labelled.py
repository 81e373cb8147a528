"""Short texts and pairs of them with a label each, to train a classifier or a regression on and to score
it."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from relinear.plan.strict import Positive, Strict
from relinear.stages import _stage
from relinear.stages.sentences import Texts

Score = Literal["accuracy", "f1", "matthews", "correlation"]
OF_TWO = ("f1", "matthews")  # scores of two classes


class Labels(Strict):
    """The part that every kind of labelled data has in data.yaml: the classes, and the scores that are
    taken."""

    # labels are 0 to classes - 1; 0: they are numbers, and the task is a regression
    classes: Annotated[int, Field(ge=0)]
    scores: Annotated[tuple[Score, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _scores_of_these_labels(self) -> Self:
        if self.classes == 1:
            raise ValueError("give two classes or more, or 0 for a regression; got 1")
        possible = (
            ("correlation",) if self.classes == 0 else ("accuracy", *(OF_TWO if self.classes == 2 else ()))
        )
        if unfit := [score for score in self.scores if score not in possible]:
            raise ValueError(
                f"no score {unfit[0]!r} of labels of {self.classes or 'no'} classes; possible:"
                f" {', '.join(possible)}"
            )
        return self


class Options(Texts, Labels):
    """An entry of data.yaml with `make: labelled`. A source's own training split is trained on, and its
    validation split is the test; of a source with a validation split alone, `test` texts are the test, by
    their hash."""

    # get/labelled.py has the reader of each
    form: Literal["glue", "requests", "acceptability", "neighbours", "smoke"]
    validation: Positive  # texts of the training split kept aside, to stop by
    train: Positive | None = None  # so many of the others, an error where there are fewer; None: all
    test: Positive | None = None


class Stage(_stage.Sourced):
    """The stage `labelled`, which tokenises labelled texts for a model."""

    help = "Tokenise the labelled texts of a task for a model."
    work = "relinear.get.labelled"
    labelled = True

    def resolve(self, entry, scale):
        """Options of the data; the budget multiplies the texts to train on. No seed: the splits are fixed."""
        options = scale.data[entry.text.data].options
        return self.of_sources(entry, scale, {**options, "train": scale.times_budget(options["train"])})
