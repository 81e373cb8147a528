"""What an encoder lost when it was opened is made good: all weights learn to give the hidden states that the
whole model gives."""

from dataclasses import replace

from relinear.stages import _training

# kinds of data that are sequences of equal length, without padding and labels of their own
PACKED = ("text", "stream", "splits", "pieces")


class Options(_training.Recipe):
    """The options of a `restore` step in runs.yaml."""

    # left out where the model is opened with all its parts (`altered` in models.yaml)
    if_altered: bool = False


class Stage(_training.Step):
    """The stage `restore`, which teaches an altered encoder what the whole one computes."""

    help = "Train an encoder that lost a part on the hidden states of the whole one."
    work = "relinear.train.restore"
    spread = False
    Options, Budget = Options, _training.Budget

    def resolve(self, entry, scale):
        """The training, which reads the whole model from the model's assets."""
        model = scale.models[entry.model]
        work = super().resolve(entry, scale)
        return replace(work, settings=work.settings | {"family": model.family}, assets=model.assets)

    def reasons(self, entry, scale, recipe, budget):
        """Why the training cannot be done."""
        node, model = entry.node, entry.model
        altered = [name for name, found in scale.models.items() if found.altered and found.assets]
        if model not in altered:
            yield (
                f"{node}: restore trains models that lose a part when they are opened (`altered` in"
                f" models.yaml), and {model!r} loses none; possible: runs of {', '.join(altered)}"
            )
        if scale.data[data := scale.data_for(recipe.data, model)].make not in PACKED:
            able = ", ".join(name for name, found in scale.data.items() if found.make in PACKED)
            yield (
                f"{node}: restore reads sequences of equal length without padding, and data {data!r} are"
                f" none; possible: {able}"
            )
        yield from super().reasons(entry, scale, recipe, budget)
