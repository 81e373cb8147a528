"""A model's pass over the transfer data, kept on disk for all runs that distill on a small machine."""

from relinear.plan.names import Node
from relinear.stages import _stage, _training
from relinear.stages._work import Work


class Stage(_stage.Tokens):
    """The stage `activations`, which runs a model once over the transfer data."""

    help = "Run a model once over the transfer data."
    work = "relinear.get.activations"
    device = True

    def resolve(self, entry, scale):
        """The pass, in sequences of the scale's distill steps; it reaches the softmax layer and the model's
        family."""
        return Work(
            settings={"seq_len": _training.of_scale(scale, "distill")["seq_len"]},
            module=self.work,
            reaches=("relinear.attention.softmax", _stage.family_of(entry, scale)),
            parents={**self.parents(entry), "text": Node("text", entry.node.name)},
        )
