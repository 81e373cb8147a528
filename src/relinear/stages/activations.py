"""A model's pass over the transfer data, kept on disk for all runs that distill on a small machine."""

from relinear.stages import _stage, _training
from relinear.stages._stage import Node


class Stage(_stage.Tokens):
    """The stage `activations`, which runs a model once over the transfer data."""

    help = "Run a model once over the transfer data."
    work = "relinear.get.activations"
    device = True

    def settings(self, plan, node):
        """The settings of the work as plain data; part of the key."""
        return {"seq_len": _training.of_scale(plan, "distill")["seq_len"]}

    def parents(self, plan, node):
        """The model and the text that it reads."""
        return super().parents(plan, node) | {"text": Node("text", node.name)}

    def modules(self, plan, node):
        """The work, the softmax layer and the file that says where the model keeps its attention."""
        model = plan.models[plan.text_of(node).model]
        return [self.work, "relinear.attention.softmax", f"relinear.families.{model.layout or model.family}"]
