"""Training from scratch: all weights of a model that begins with random ones, by the loss of the next
token."""

from typing import Annotated, Literal

from pydantic import Field

from relinear.plan.strict import Positive, Strict
from relinear.stages import _stage, _training


class Options(_training.Recipe):
    """The options of a `pretrain` step in runs.yaml."""

    # random: the model's weights are drawn anew; its shape and its tokenizer stay
    init: Literal["model", "random"] = "model"
    # compute in the scale's dtype, with float32 weights, as full finetuning does; else everything in float32
    autocast: bool = False
    # last: the last token of each sequence alone, such as the answer of associative recall
    learn: Literal["all", "last"] = "all"
    # end after so many epochs without a lower validation loss; the weights of the lowest are kept
    patience: Positive | None = None


class OfRecall(Strict):
    """The amounts in which a scale's budget differs for sequences of associative recall, which are far
    shorter than a text's."""

    epochs: Positive | None = None
    batch_size: Positive | None = None
    accumulate: Positive | None = None
    lr_floor: Annotated[float, Field(ge=0)] | None = None
    validation: Annotated[int, Field(ge=0)] | None = None


class Budget(_training.Budget):
    """The amounts that a scale gives to `pretrain`."""

    # sequences at the end of the training tokens that are not trained on
    validation: Annotated[int, Field(ge=0)] = 0
    recall: OfRecall = OfRecall()


class Stage(_training.Step):
    """The stage `pretrain`, which trains all weights of a model from scratch."""

    help = "Train all weights of a model from scratch."
    work = "relinear.train.pretrain"
    Options, Budget = Options, Budget

    def budget(self, entry, scale, recipe):
        """The amounts of the training; recall has amounts of its own where the run gives none."""
        budget = super().budget(entry, scale, recipe)
        of_recall = budget.pop("recall")
        if scale.data[scale.data_for(recipe.data, entry.model)].make == "recall":
            budget |= _training.unless_given(recipe, of_recall)
        return budget

    def reasons(self, entry, scale, recipe, budget):
        """Why the training cannot be done."""
        run = entry.node.name
        yield from _stage.unless_causal(entry, scale, "pretrain trains a model to predict the next token")
        yield from super().reasons(entry, scale, recipe, budget)
        if recipe.patience and not budget["validation"]:
            yield (
                f"run {run!r}: patience needs `validation` sequences in scale {scale.name!r}'s budget of"
                " pretrain; got 0"
            )
        if recipe.init == "random" and entry.trained:
            steps = ", ".join(f"{step.stage} of {step.name}" for step in entry.trained.values())
            yield (
                f"run {run!r}: pretrain has init: random, which draws all weights anew, but comes after"
                f" {steps}; possible: init: model, or pretrain as the first step of a run without `after`"
            )
