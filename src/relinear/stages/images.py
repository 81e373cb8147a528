"""Pictures of one size, each with its class, as sequences of pixels."""

from typing import Literal

from pydantic import computed_field

from relinear.plan.strict import Positive
from relinear.stages import _stage
from relinear.stages._work import Work

CLASSES = {"digits": 10, "fashion-mnist": 10, "imagenet-1k": 1000}
MADE_HERE = ("digits",)  # comes with scikit-learn, and is no asset


class Options(_stage.Classes):
    """An entry of data.yaml with `make: images`: the source, the size that its pictures are brought to, and
    how many there are."""

    source: Literal["digits", "fashion-mnist", "imagenet-1k"]
    side: Positive  # pixels of a row, and rows
    channels: Literal[1, 3]  # gray, or red, green and blue

    @computed_field
    @property
    def classes(self) -> int:
        """The classes of its source."""
        return CLASSES[self.source]


class Stage(_stage.Stage):
    """The stage `images`, which brings pictures to one size."""

    help = "Bring pictures with a class each to one size."
    work = "relinear.get.images"
    labelled = True
    pictures = True

    def resolve(self, entry, scale):
        """Options of the data, with the number of training pictures that the budget makes. No seed: the
        splits are fixed."""
        options = scale.data[entry.node.name].options
        source = options["source"]
        settings = {**options, "train": scale.times_budget(options["train"])}
        return Work(settings, self.work, assets=() if source in MADE_HERE else (source,))

    def sequence(self, options):
        """The pixels of a picture, of all channels."""
        return options["side"] ** 2 * options["channels"]
