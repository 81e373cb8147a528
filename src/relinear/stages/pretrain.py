"""Training from scratch: all weights of a model that begins with random ones, by the loss of the next token."""

from typing import Annotated

from pydantic import Field

from relinear.plan.strict import ConfigError, Positive
from relinear.stages import _training


class Options(_training.Recipe):
    patience: Positive | None = None  # end after so many epochs without a lower validation loss; the weights of the lowest are kept


class Budget(_training.Budget):
    validation: Annotated[int, Field(ge=0)] = 0  # sequences at the end of the training tokens that are not trained on


class Stage(_training.Step):
    help = "Train all weights of a model from scratch."
    work = "relinear.train.pretrain"
    Options, Budget = Options, Budget

    def check(self, plan, node, processes):
        super().check(plan, node, processes)
        if self.recipe(plan, node).patience and not self.budget(plan, node)["validation"]:
            raise ConfigError(f"run {node.name!r}: patience needs `validation` sequences in scale {plan.scale!r}'s budget of pretrain; got 0")
