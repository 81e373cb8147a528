"""Stage 1 of most methods: the method's own parameters learn to imitate the model's softmax attention."""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from relinear import attention
from relinear.plan.names import Node
from relinear.plan.options import calibrates, method_file
from relinear.plan.strict import Positive
from relinear.stages import _training


class Options(_training.Recipe):
    """The options of a `distill` step in runs.yaml."""

    loss: Literal["cross_entropy", "mse"]
    loss_scale: Annotated[float, Field(gt=0)] = 1.0
    # set decays and writes by softmax attention beyond the window, read on so many tokens, before training
    calibrate: Positive | None = None


class Budget(_training.Budget):
    """The amounts that a scale gives to `distill`."""

    activations: bool = True  # share the model's pass between all runs through the disk


class Stage(_training.Step):
    """The stage `distill`, which trains a method's own parameters to mimic softmax attention."""

    help = "Stage 1, attention transfer: train a method's own parameters to mimic softmax attention."
    work = "relinear.train.distill"
    Options, Budget = Options, Budget

    def budget(self, entry, scale, recipe):
        """Amounts of the training, without what chooses kept activations."""
        return {
            name: value
            for name, value in super().budget(entry, scale, recipe).items()
            if name != "activations"
        }

    def reasons(self, entry, scale, recipe, budget):
        """Why the training cannot be done."""
        method = entry.run.run.method
        if recipe.calibrate and not calibrates(method_file(method)):
            able = [name for name in attention.available() if calibrates(method_file(name))]
            yield (
                f"{entry.node}: calibrate sets decays and writes by attention beyond a window, which method"
                f" {method!r} has not; possible: {', '.join(able)}, or without calibrate"
            )
        yield from super().reasons(entry, scale, recipe, budget)

    def resolve(self, entry, scale):
        """The training, with the kept activations among its parents where the lengths agree."""
        work, usual = super().resolve(entry, scale), Budget(**_training.of_scale(scale, "distill"))
        text = work.parents["text"]
        # Recorded inputs are those of the model itself, in sequences of the scale's length.
        alike = work.settings["budget"]["seq_len"] == usual.seq_len
        if usual.activations and alike and text.stage == "text" and not entry.trained:
            return replace(work, parents={**work.parents, "activations": Node("activations", text.name)})
        return work
