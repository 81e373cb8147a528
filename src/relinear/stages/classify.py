"""A task learned: all weights of an encoder and a head on it are trained on texts with labels."""

from typing import Literal

from relinear.plan.strict import ConfigError, Positive
from relinear.stages import _training


class Options(_training.Recipe):
    """The options of a `classify` step in runs.yaml."""

    pool: Literal["first", "mean", "pair"] = "first"  # what the head reads of a text: its first token, the mean of all, or two texts apart
    patience: Positive | None = None  # end after so many epochs without a lower validation loss; the weights of the lowest are kept


class Stage(_training.Step):
    """The stage `classify`, which trains an encoder and a head on a task."""

    help = "Train an encoder and a head on texts with labels."
    work = "relinear.train.classify"
    spread = False
    Options, Budget = Options, _training.Budget

    def check(self, plan, node, processes):
        """Raise ConfigError for a model that is no encoder, for data without labels, and for settings that cannot work."""
        run, recipe = plan.run(node.name), self.recipe(plan, node)
        if plan.models[run.model].causal:
            able = ", ".join(name for name, m in plan.models.items() if not m.causal)
            raise ConfigError(f"{node}: classify trains encoders, and {run.model!r} is none; possible: runs of {able}")
        if (data := plan.data_for(recipe.data, run.model)) not in (able := plan.labelled()):
            raise ConfigError(f"{node} needs texts with labels, and the data {data!r} have none; possible: {', '.join(able)}")
        super().check(plan, node, processes)
