"""Stage 1 of most methods: the method's own parameters learn to imitate the model's softmax attention."""

from typing import Annotated, Literal

from pydantic import Field

from relinear.stages import _training


class Options(_training.Recipe):
    """The options of a `distill` step in runs.yaml."""

    loss: Literal["cross_entropy", "mse"]
    loss_scale: Annotated[float, Field(gt=0)] = 1.0


class Budget(_training.Budget):
    """The amounts that a scale gives to `distill`."""

    activations: bool = True  # share the model's pass between all runs through the disk


class Stage(_training.Step):
    """The stage `distill`, which trains a method's own parameters to mimic softmax attention."""

    help = "Stage 1, attention transfer: train a method's own parameters to mimic softmax attention."
    work = "relinear.train.distill"
    Options, Budget = Options, Budget

    def budget(self, plan, node):
        """Amounts of the training, without what chooses kept activations."""
        return {name: value for name, value in super().budget(plan, node).items() if name != "activations"}

    def parents(self, plan, node):
        """Model, text, earlier steps, and the kept activations where the lengths agree."""
        parents = super().parents(plan, node)
        scale = super().budget(plan, node)
        default = scale["seq_len"] == plan.config.train["distill"]["seq_len"]
        # Recorded inputs are those of the model itself, in sequences of the scale's length.
        if scale["activations"] and default and parents["text"].stage == "text" and not plan.trained_before(node):
            parents["activations"] = plan.activations(parents["text"])
        return parents
