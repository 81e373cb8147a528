"""A task learned: all weights of an encoder and a head on it are trained on texts with labels."""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from relinear.plan.strict import Positive, Strict
from relinear.stages import _training
from relinear.stages._work import Entry, Scaled


class Options(_training.Recipe):
    """The options of a `classify` step in runs.yaml."""

    # what the head reads of a text: its first token, the mean of all, or two texts apart
    pool: Literal["first", "mean", "pair"] = "first"
    # a step that a pretrained model has behind it: left out where the model's weights are not random
    if_random: bool = False
    # end after so many epochs without a lower validation loss; the weights of the lowest are kept
    patience: Positive | None = None


class OfArena(Strict):
    """The amounts in which a scale's budget differs for long sequences of one class each, which a small model
    learns from scratch."""

    epochs: dict[str, Positive] = {}  # of each task
    lr_floor: dict[str, Annotated[float, Field(ge=0)]] = {}  # of each task


class Budget(_training.Budget):
    """The amounts that a scale gives to `classify`."""

    arena: OfArena = OfArena()


class Stage(_training.Step):
    """The stage `classify`, which trains an encoder and a head on a task."""

    help = "Train an encoder and a head on texts with labels."
    work = "relinear.train.classify"
    spread = False
    Options, Budget = Options, Budget

    def budget(self, entry, scale, recipe):
        """The amounts of the training; a task of long sequences has amounts of its own where the run gives
        none."""
        budget = super().budget(entry, scale, recipe)
        data = scale.data[scale.data_for(recipe.data, entry.model)]
        arena = budget.pop("arena")
        if data.make == "arena":
            task = data.options["task"]
            own = {"epochs": arena["epochs"].get(task), "lr_floor": arena["lr_floor"].get(task)}
            budget |= _training.unless_given(recipe, own)
        return budget

    def resolve(self, entry, scale):
        """The training; a model of pictures has its head itself."""
        work = super().resolve(entry, scale)
        return replace(work, module="relinear.train.recognise") if scale.sees(entry.model) else work

    def reasons(self, entry, scale, recipe, budget):
        """Why the training cannot be done."""
        node, model, sees = entry.node, entry.model, scale.sees(entry.model)
        if scale.models[model].causal:
            able = ", ".join(name for name, found in scale.models.items() if not found.causal)
            yield f"{node}: classify trains encoders, and {model!r} is none; possible: runs of {able}"
        if (data := scale.data_for(recipe.data, model)) not in (able := scale.labelled()):
            yield (
                f"{node} needs texts with labels, and the data {data!r} have none; possible:"
                f" {', '.join(able)}"
            )
        if sees and recipe.pool != "first":
            yield (
                f"{node}: the classes of {model!r} are read from its first token; got pool: {recipe.pool},"
                " possible: first"
            )
        yield from super().reasons(entry, scale, recipe, budget)
        before = [step for step in entry.trained.values() if step.stage == node.stage]
        if not before or sees or scale.data_for(Options(**entry.recipes[before[-1]]).data, model) not in able:
            return  # data without labels are told of the step that reads them
        ours, theirs = _head(recipe, entry, scale), _head(Options(**entry.recipes[before[-1]]), entry, scale)
        if ours != theirs:
            yield (
                f"{node} has a head of {ours}, but comes after {before[-1]}, which leaves one of {theirs},"
                " and a chain has one head; possible: the same number of classes and the same pool, or a"
                " chain without the other task"
            )


def _head(recipe: Options, entry: Entry, scale: Scaled) -> str:
    """The shape of a step's head in words: its outputs, and what it reads."""
    classes = scale.data[scale.data_for(recipe.data, entry.model)].options["classes"]
    return f"{max(classes, 1)} output{'s' * (classes > 1)} and pool: {recipe.pool}"
