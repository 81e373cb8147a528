"""Tables of deviations as specs: the recipe that a paper prints beside that of our runs' records."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, model_validator

from relinear.plan.claims import Address, Spec, known, require_unique
from relinear.plan.forms import possible
from relinear.plan.strict import Strict

ATTENTION, EVERY = "attention", "every"
# Settings of a step, in the order of the table's lines.
OF_STEP = (
    "teacher",
    "data",
    "loss",
    "trained",
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "lora_targets",
    "optimizer",
    "lr",
    "method_lr",
    "schedule",
    "warmup_ratio",
    "min_lr_ratio",
    "weight_decay",
    "betas",
    "clip",
    "batch",
    "batch_tokens",
    "seq_len",
    "tokens",
    "epochs",
    "patience",
    "precision",
    "gpu",
)
Printed = float | int | str | bool | tuple[float | int | str, ...]


class OneOf(Strict):
    """Values over which the paper sweeps."""

    one_of: Annotated[tuple[float | int | str, ...], Field(min_length=2)]


class Recipe(Strict):
    """One training of a paper beside one of our runs.

    `title`: what the paper trains. `measure`: a measurement of the run, whose record names the steps behind
    it. `paper`: what the paper prints, by section: `attention` has options of the method, a step's name has
    settings of that step, and `every` those of all steps. What a paper does not print is left out.
    """

    run: str
    measure: str
    title: str
    paper: dict[str, dict[str, OneOf | Printed]]

    @model_validator(mode="after")
    def _known_settings(self):
        for section, settings in self.paper.items():
            have = possible() if section == ATTENTION else OF_STEP
            for name in settings:
                known("setting", name, have, f"{self.run}: {section}")
        return self


class Deviations(Spec):
    """A line a setting: what the paper prints, what our records have, and whether they are the same.

    The settings of ours are those that the training ran with; none is typed. A run whose records are not
    there is left out, and a line below the table names it.
    """

    runs: Annotated[tuple[Recipe, ...], Field(min_length=1)]

    @property
    def made(self) -> tuple[str, ...]:
        """A table, as csv and Markdown."""
        return ("csv", "md")

    def addresses(self, scale: str | None = None) -> Iterator[Address]:
        """The measurements behind which the trainings lie."""
        return (Address(recipe.run, recipe.measure) for recipe in self.runs)

    def names(self) -> list[str]:
        """The runs."""
        return [recipe.run for recipe in self.runs]

    def publishes(self) -> bool:
        """What the paper prints always stands beside ours."""
        return True

    def check(self) -> None:
        """Raise ValueError for a run that stands there twice, and for claims, of which it has none."""
        require_unique("run", self.names())
        if self.claims:
            raise ValueError(
                f"a table of deviations compares settings and has no claims; got {self.claims[0].claim!r}"
            )

    def check_place(self, point: Any, where: str) -> None:
        """There are no claims to check."""
