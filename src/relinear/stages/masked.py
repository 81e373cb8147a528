"""Masked tokens: all weights of an encoder learn to tell which tokens of a text were hidden (BERT, section 3.1)."""

from typing import Annotated

from pydantic import Field

from relinear.stages import _training


class Options(_training.Recipe):
    """The options of a `masked` step in runs.yaml."""

    # the share of a sequence's tokens that the model has to tell; BERT's
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
        if scale.models[model].causal or scale.sees(model):
            able = ", ".join(
                name for name, found in scale.models.items() if not found.causal and not scale.sees(name)
            )
            yield f"{node}: masked trains encoders of text, and {model!r} is none; possible: runs of {able}"
        if round(recipe.share * budget["seq_len"]) < 1:
            yield (
                f"{node}: a share of {recipe.share} masks no token of sequences of {budget['seq_len']};"
                f" possible: share from {1 / budget['seq_len']:.3g} on"
            )
        yield from super().reasons(entry, scale, recipe, budget)
