"""The parts that training steps of a run share: recipe, budget, and the model they begin with."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from relinear import stages
from relinear.plan.names import Node
from relinear.plan.strict import ConfigError, Positive, Strict, parse
from relinear.stages import _stage
from relinear.stages._work import Entry, Scaled, Work


class Budget(Strict):
    """A scale's budget of a step: `epochs` over the training tokens in sequences of `seq_len`, batch x
    accumulate of them a step."""

    epochs: Positive
    seq_len: Positive
    # the most tokens that a run's own `seq_len` gets; None: all that it asks for
    longest: Positive | None = None
    batch_size: Positive
    accumulate: Positive
    # least learning rate: the papers' rates are for thousands of steps
    lr_floor: Annotated[float, Field(ge=0)] = 0.0


Beta = Annotated[float, Field(ge=0, lt=1)]


class Recipe(Strict):
    """The optimisation of a run in one step, AdamW with linear warm-up and cosine, and the text and amounts
    that differ from the scale's."""

    data: str  # a name in data.yaml
    lr: Annotated[float, Field(gt=0)]
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.1
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    clip: Annotated[float, Field(gt=0)] = 1.0
    dose: Annotated[float, Field(gt=0)] = 1.0  # unique training tokens, as a multiple of the scale's
    epochs: Positive | None = None  # the scale's where not given, as are the next three
    seq_len: Positive | None = None
    batch_size: Positive | None = None
    accumulate: Positive | None = None


OF_BUDGET = ("epochs", "seq_len", "batch_size", "accumulate")
RATES = ("lr", "method_lr")  # fields of a recipe that are learning rates
# fields of a recipe that its text, its budget and the plan say
ELSEWHERE = {"data", "dose", "if_random", "if_altered", *OF_BUDGET}


def effective(recipe: dict[str, Any], budget: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A recipe with the learning rates that it is trained at, and its budget.

    The scale's `lr_floor` is the least rate. Where no rate is at the floor, the floor changes nothing, and
    the returned budget has `lr_floor` 0.
    """
    floor = budget["lr_floor"]
    rates = {name: max(recipe[name], floor) for name in RATES if recipe.get(name) is not None}
    return recipe | rates, budget | {"lr_floor": floor if floor in rates.values() else 0.0}


def unless_given(recipe: Recipe, amounts: dict[str, Any]) -> dict[str, Any]:
    """Those amounts of a kind of data that the recipe does not give itself."""
    return {
        name: value
        for name, value in amounts.items()
        if value is not None and getattr(recipe, name, None) is None
    }


def of_scale(scale: Scaled, stage: str) -> dict[str, Any]:
    """A scale's budget of a training stage. Raises ConfigError where it has none."""
    if stage not in scale.config.train:
        raise ConfigError(
            f"scale {scale.name!r} has no budget for {stage}; it has"
            f" {', '.join(scale.config.train) or 'none'}"
        )
    return scale.config.train[stage]


class Step(_stage.Stage):
    """A stage that trains a run."""

    device = spread = trains = True
    Options: type[Recipe]
    Budget: type[Budget]

    def folder(self, node):
        return f"runs/{node.name}/{node.stage}"

    def recipe(self, entry: Entry) -> Recipe:
        """The step's own settings in runs.yaml."""
        stage, run = entry.node.stage, entry.run
        return parse(self.Options, run.run.recipes[stage], f"runs.yaml: {run.name}: {stage}")

    def budget(self, entry: Entry, scale: Scaled, recipe: Recipe) -> dict[str, Any]:
        """The scale's budget with whatever the run gives instead; of data made of sequences, their own
        length.

        Raises ConfigError where the run asks for another length than these have.
        """
        stage = entry.node.stage
        given = parse(self.Budget, of_scale(scale, stage), f"scales/{scale.name}.yaml: train: {stage}")
        length = scale.sequence(data := scale.data_for(recipe.data, entry.model))
        if (
            length
            and recipe.seq_len not in (None, length)
            and not stages.makes(scale.data[data].make, "pictures")
        ):
            raise ConfigError(
                f"run {entry.node.name!r}: {stage}.seq_len {recipe.seq_len}, and data {data!r} are sequences"
                f" of {length} tokens; leave it out"
            )
        own = {name: value for name in OF_BUDGET if (value := getattr(recipe, name)) is not None}
        amounts = given.model_dump(mode="json")
        if (longest := amounts.pop("longest")) and "seq_len" in own:
            own["seq_len"] = min(own["seq_len"], longest)
        return amounts | own | ({"seq_len": length} if length else {})

    def resolve(self, entry, scale):
        """The training: its learning rates are those that it is trained at."""
        recipe = self.recipe(entry)
        budget = self.budget(entry, scale, recipe)
        run, asked = entry.run.run, recipe.model_dump(mode="json", exclude=ELSEWHERE)
        trained_at, amounts = effective(asked, budget)
        floor, lowest = budget["lr_floor"], min(asked[name] for name in RATES if asked.get(name) is not None)
        text = scale.text(recipe.data, entry.model, recipe.dose)
        return Work(
            settings={
                "method": run.method, "options": run.options, "links": entry.links, "recipe": trained_at,
                "budget": amounts, "seed": scale.seed + entry.run.seed,
            },
            module=self.work,
            reaches=_stage.built_of(entry, scale),
            parents={"model": Node("model", entry.model), "text": text, **entry.trained},
            refused=_stage.first(self.reasons(entry, scale, recipe, budget)),
            raised=floor if lowest < floor else None,
            shortened=recipe.seq_len if recipe.seq_len and budget["seq_len"] < recipe.seq_len else None,
            sequences=budget["batch_size"] * budget["accumulate"],
        )  # fmt: skip

    def reasons(self, entry: Entry, scale: Scaled, recipe: Recipe, budget: dict[str, Any]) -> Iterator[str]:
        """Why the training cannot be done."""
        yield from _stage.unless_fitting(entry, scale)
        data = scale.data_for(recipe.data, entry.model)
        yield from _stage.unless_apart(entry, scale, data)
        if stages.makes(scale.data[data].make, "pictures"):
            yield from _stage.unless_pictures(entry, scale, f"data {data!r} are pictures", "other data, or ")
        if scale.data[data].make == "lookups" and budget["epochs"] > 1:
            yield (
                f"{entry.node}: the distances of {data!r} grow with the training, which reads it once; got"
                f" {budget['epochs']} epochs, possible: epochs: 1, and a larger dose"
            )
        length, positions = budget["seq_len"], scale.models[entry.model].positions
        if length > positions:
            step = f"run {entry.node.name!r}: {entry.node.stage}"
            yield f"{step}.seq_len {length} is beyond the model's {positions} positions"
        if scale.data[data].make == "stream":
            tokens = scale.train_tokens(recipe.dose, scale.data[data].options["train_tokens"])
            yield from _stage.unless_repeated(entry, scale, data, tokens * budget["epochs"])
