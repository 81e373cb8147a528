"""A task learned: all weights of an encoder and a head on it are trained on texts with labels."""

from typing import Annotated, Literal

from pydantic import Field

from relinear.plan.strict import ConfigError, Positive, Strict
from relinear.stages import _training


class Options(_training.Recipe):
    """The options of a `classify` step in runs.yaml."""

    pool: Literal["first", "mean", "pair"] = "first"  # what the head reads of a text: its first token, the mean of all, or two texts apart
    if_random: bool = False  # a step that a pretrained model has behind it: left out where the model's weights are not random
    patience: Positive | None = None  # end after so many epochs without a lower validation loss; the weights of the lowest are kept


class OfArena(Strict):
    """The amounts in which a scale's budget differs for long sequences of one class each, which a small model learns from scratch."""

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

    def work_of(self, plan, node):
        """The module that trains: a model of pictures has its head itself."""
        return "relinear.train.recognise" if plan.sees(plan.run(node.name).model) else self.work

    def budget(self, plan, node):
        """The amounts of the training; a task of long sequences has amounts of its own where the run gives none."""
        budget, recipe = super().budget(plan, node), self.recipe(plan, node)
        arena, data = budget.pop("arena"), plan.data[plan.data_for(recipe.data, plan.run(node.name).model)]
        if data.make == "arena":
            task = data.options["task"]
            own = {"epochs": arena["epochs"].get(task), "lr_floor": arena["lr_floor"].get(task)}
            budget |= {name: value for name, value in own.items() if value is not None and getattr(recipe, name, None) is None}
        return budget

    def check(self, plan, node, processes):
        """Raise ConfigError for a model that is no encoder, for data without labels, and for settings that cannot work."""
        run, recipe = plan.run(node.name), self.recipe(plan, node)
        if plan.models[run.model].causal:
            able = ", ".join(name for name, m in plan.models.items() if not m.causal)
            raise ConfigError(f"{node}: classify trains encoders, and {run.model!r} is none; possible: runs of {able}")
        if (data := plan.data_for(recipe.data, run.model)) not in (able := plan.labelled()):
            raise ConfigError(f"{node} needs texts with labels, and the data {data!r} have none; possible: {', '.join(able)}")
        if plan.sees(run.model) and recipe.pool != "first":
            raise ConfigError(f"{node}: the classes of {run.model!r} are read from its first token; got pool: {recipe.pool}, possible: first")
        super().check(plan, node, processes)
        before = [step for step in plan.trained_before(node).values() if step.stage == node.stage]
        if before and not plan.sees(run.model) and (ours := self._head(plan, node)) != (theirs := self._head(plan, before[-1])):
            raise ConfigError(
                f"{node} has a head of {ours}, but comes after {before[-1]}, which leaves one of {theirs}, and a chain has one head; possible: "
                "the same number of classes and the same pool, or a chain without the other task"
            )

    def _head(self, plan, node) -> str:
        """The shape of a step's head in words: its outputs, and what it reads."""
        recipe, model = self.recipe(plan, node), plan.run(node.name).model
        classes = plan.data[plan.data_for(recipe.data, model)].options["classes"]
        return f"{max(classes, 1)} output{'s' * (classes > 1)} and pool: {recipe.pool}"
