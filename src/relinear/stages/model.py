"""A model that runs begin with, saved once as a plain transformers folder."""

from relinear.stages import _stage


class Stage(_stage.Stage):
    """The stage `model`, which saves a model once as a transformers folder."""

    help = "Save a model once as a plain transformers folder."
    work = "relinear.get.model"

    def folder(self, node):
        """The folder of its results, below the scale's."""
        return f"models/{node.name}"

    def settings(self, plan, node):
        """The settings of the work as plain data; part of the key."""
        entry = plan.models[node.name]
        usual = {"dtype"} if entry.dtype == type(entry).model_fields["dtype"].default else set()  # keys are of before there were others
        return {"model": entry.model_dump(mode="json", exclude={"unique", *usual}), "seed": plan.seed}

    def assets(self, plan, node):
        """The assets that the work reads."""
        return list(plan.models[node.name].assets)

    def work_of(self, plan, node):
        """The module that saves it: a model of pictures is tried out on one."""
        return "relinear.get.picture_model" if plan.sees(node.name) else self.work

    def modules(self, plan, node):
        """Entry points of the code that makes the result."""
        return [self.work_of(plan, node), f"relinear.families.{plan.models[node.name].family}"]
