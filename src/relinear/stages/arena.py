"""Tasks in the form of Long Range Arena's: long sequences, each of one class."""

from typing import Literal, Self

from pydantic import computed_field, model_validator

from relinear.plan.strict import Positive
from relinear.stages import _stage
from relinear.stages._work import Work

# Task -> the sources that it reads; one that is drawn has none. get/<task>.py says what they are.
SOURCES: dict[str, tuple[str, ...]] = {
    "listops": (),
    "pathfinder": (),
    "pixels": ("fashion-mnist", "cifar10"),
    "bytewise": ("spam-assassin", "imdb"),
    "matching": ("linux-doc", "aan"),
}
CLASSES = {"listops": 10, "pathfinder": 2, "pixels": 10, "bytewise": 2, "matching": 2}
ENDLESS = (None, "linux-doc")  # sources from which any number of sequences is drawn
PIXELS = 32 * 32  # of Pathfinder's images


class Options(_stage.Classes):
    """An entry of data.yaml with `make: arena`: the task, the tokens of its longest sequence, and numbers of
    sequences."""

    task: Literal["listops", "pathfinder", "pixels", "bytewise", "matching"]
    source: str | None = None  # an asset, for a task that is not drawn
    longest: Positive  # tokens of a sequence; of a pair, both together; ListOps has fewer
    shortest: Positive | None = None  # ListOps has more
    side: Positive | None = None  # average the pixels of images to so many a row

    @computed_field
    @property
    def classes(self) -> int:
        """The classes of its task."""
        return CLASSES[self.task]

    @model_validator(mode="after")
    def _of_its_task(self) -> Self:
        possible = SOURCES[self.task]
        if self.source not in (possible or (None,)):
            raise ValueError(
                f"task {self.task!r} takes the source {' or '.join(possible) or 'none: it is drawn'}; got"
                f" {self.source!r}"
            )
        if (self.train is None or self.test is None) and self.source in ENDLESS:
            raise ValueError(
                f"`train` and `test` say how many sequences of {self.source or self.task} are drawn; got"
                f" {self.train} and {self.test}"
            )
        if (self.shortest is None) == (self.task == "listops"):
            raise ValueError(
                f"`shortest` goes with task listops, and with no other; got task {self.task!r}, shortest"
                f" {self.shortest}"
            )
        if self.shortest is not None and self.longest - self.shortest < 2:
            raise ValueError(
                f"expressions have more than `shortest` and fewer than `longest` tokens; got {self.shortest}"
                f" and {self.longest}"
            )
        if self.side is not None and self.task != "pixels":
            raise ValueError(f"`side` goes with task pixels; got task {self.task!r}")
        fixed = {"pathfinder": PIXELS, "pixels": self.side and self.side**2}.get(self.task)
        if fixed and self.longest != fixed:
            raise ValueError(
                f"these images of task {self.task!r} have {fixed} pixels; got `longest` {self.longest}"
            )
        if self.task == "matching" and self.longest % 2:
            raise ValueError(
                f"a pair has two texts of half of `longest`, which must be even; got {self.longest}"
            )
        return self


class Stage(_stage.Stage):
    """The stage `arena`, which makes sequences and their classes."""

    help = "Make long sequences and their classes."
    work = "relinear.get.arena"
    labelled = True

    def resolve(self, entry, scale):
        """Options of the data, with the number of training sequences that the budget makes; the task's file
        is reached."""
        options = scale.data[entry.node.name].options
        return Work(
            settings={**options, "train": scale.times_budget(options["train"]), "seed": scale.seed},
            module=self.work,
            reaches=(f"relinear.get.{options['task']}",),
            assets=() if options["source"] is None else (options["source"],),
        )

    def sequence(self, options):
        """Tokens of the longest sequence of this kind of data."""
        return options["longest"]
