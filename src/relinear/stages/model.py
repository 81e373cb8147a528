"""A model that runs begin with, saved once as a plain transformers folder."""

from relinear.stages import _stage
from relinear.stages._work import Work


class Stage(_stage.Stage):
    """The stage `model`, which saves a model once as a transformers folder."""

    help = "Save a model once as a plain transformers folder."
    work = "relinear.get.model"

    def folder(self, node):
        """The folder of its results, below the scale's."""
        return f"models/{node.name}"

    def resolve(self, entry, scale):
        """The entry of models.yaml; a model of pictures is tried out on one."""
        model = scale.models[entry.node.name]
        # Keys are of before weights had other dtypes than the usual one.
        usual = {"dtype"} if model.dtype == type(model).model_fields["dtype"].default else set()
        return Work(
            settings={
                "model": model.model_dump(mode="json", exclude={"unique", "altered", *usual}),
                "seed": scale.seed,
            },
            module="relinear.get.picture_model" if scale.sees(entry.node.name) else self.work,
            reaches=(f"relinear.families.{model.family}",),
            assets=model.assets,
        )
