"""Masked tokens: all weights of an encoder learn to tell the tokens of a text that were hidden (BERT, section
3.1)."""

from typing import Annotated

from pydantic import Field

from relinear.stages import _training

# kinds of data that are sequences of equal length, without padding and labels of their own
PACKED = ("text", "stream", "splits", "pieces")


class Options(_training.Recipe):
    """The options of a `masked` step in runs.yaml."""

    # the share of a sequence's tokens that are to be told; BERT's
    share: Annotated[float, Field(gt=0, lt=1)] = 0.15
    # left out where the model is opened with all its parts (`altered` in models.yaml)
    if_altered: bool = False


class Stage(_training.Step):
    """The stage `masked`, which trains an encoder on masked tokens."""

    help = "Train all weights of an encoder on masked tokens."
    work = "relinear.train.masked"
    spread = False
    Options, Budget = Options, _training.Budget

    def reasons(self, entry, scale, recipe, budget):
        """Why the training cannot be done."""
        node, model = entry.node, entry.model
        reads = lambda name: not (scale.models[name].causal or scale.models[name].data)  # noqa: E731
        if not reads(model):
            able = ", ".join(filter(reads, scale.models))
            yield f"{node}: masked trains encoders of text, and {model!r} is none; possible: runs of {able}"
        if scale.data[data := scale.data_for(recipe.data, model)].make not in PACKED:
            able = ", ".join(name for name, found in scale.data.items() if found.make in PACKED)
            yield (
                f"{node}: masked reads sequences of equal length without padding, and data {data!r} are none;"
                f" possible: {able}"
            )
        if round(recipe.share * budget["seq_len"]) < 1:
            yield (
                f"{node}: a share of {recipe.share:g} hides no token of sequences of {budget['seq_len']};"
                f" possible: share above {0.5 / budget['seq_len']:.3g}"
            )
        yield from super().reasons(entry, scale, recipe, budget)
