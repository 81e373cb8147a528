"""The parts that training steps of a run share: recipe, budget, and the model they begin with."""

from typing import Annotated, Any

from pydantic import Field

from relinear import stages
from relinear.plan.strict import ConfigError, Positive, Strict, parse
from relinear.stages import _stage


class Budget(Strict):
    """A scale's budget of a step: `epochs` over the training tokens in sequences of `seq_len`, batch x accumulate of them a step."""

    epochs: Positive
    seq_len: Positive
    longest: Positive | None = None  # the most tokens that a run's own `seq_len` gets; None: all that it asks for
    batch_size: Positive
    accumulate: Positive
    lr_floor: Annotated[float, Field(ge=0)] = 0.0  # least learning rate: the papers' rates are for thousands of steps


Beta = Annotated[float, Field(ge=0, lt=1)]


class Recipe(Strict):
    """The optimisation of a run in one step, AdamW with linear warm-up and cosine, and the text and amounts that differ from the scale's."""

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
ELSEWHERE = {"data", "dose", "if_random", *OF_BUDGET}  # fields of a recipe that its text, its budget and the plan say


def effective(recipe: dict[str, Any], budget: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A recipe with the learning rates that it is trained at, and its budget.

    The scale's `lr_floor` is the least rate. Where no rate is at the floor, the floor changes nothing, and the
    returned budget has `lr_floor` 0.
    """
    floor = budget["lr_floor"]
    rates = {name: max(recipe[name], floor) for name in RATES if recipe.get(name) is not None}
    return recipe | rates, budget | {"lr_floor": floor if floor in rates.values() else 0.0}


def of_scale(plan, stage: str) -> dict[str, Any]:
    """A scale's budget of a training stage. Raises ConfigError where it has none."""
    if stage not in plan.config.train:
        raise ConfigError(f"scale {plan.scale!r} has no budget for {stage}; it has {', '.join(plan.config.train) or 'none'}")
    return plan.config.train[stage]


class Step(_stage.Stage):
    """A stage that trains a run."""

    device = spread = trains = True
    Options: type[Recipe]
    Budget: type[Budget]

    def folder(self, node):
        return f"runs/{node.name}/{node.stage}"

    def recipe(self, plan, node) -> Recipe:
        """The step's own settings in runs.yaml."""
        return parse(self.Options, plan.run(node.name).run.recipes[node.stage], f"runs.yaml: {node.name}: {node.stage}")

    def budget(self, plan, node) -> dict[str, Any]:
        """The scale's budget with whatever the run gives instead; of data made of sequences, their own length.

        Raises ConfigError where the run asks for another length than these have.
        """
        budget = parse(self.Budget, of_scale(plan, node.stage), f"scales/{plan.scale}.yaml: train: {node.stage}").model_dump(mode="json")
        recipe = self.recipe(plan, node)
        data = plan.data_for(recipe.data, plan.run(node.name).model)
        length = plan.sequence(data)
        if length and recipe.seq_len not in (None, length):
            raise ConfigError(
                f"run {node.name!r}: {node.stage}.seq_len {recipe.seq_len}, and data {data!r} are sequences of {length} tokens; leave it out"
            )
        given = {name: value for name in OF_BUDGET if (value := getattr(recipe, name)) is not None}
        if (longest := budget.pop("longest")) and "seq_len" in given:
            given["seq_len"] = min(given["seq_len"], longest)
        return budget | given | ({"seq_len": length} if length else {})

    def settings(self, plan, node):
        """The settings of the training, part of the key: its learning rates are those that it is trained at."""
        asked = self.recipe(plan, node).model_dump(mode="json", exclude=ELSEWHERE)
        recipe, budget = effective(asked, self.budget(plan, node))
        run = plan.run(node.name)
        return {
            "method": run.run.method, "options": run.run.options, "links": plan.links_of(node), "recipe": recipe,
            "budget": budget, "seed": self.seed(plan, node),
        }  # fmt: skip

    def raised(self, plan, node) -> float | None:
        """The scale's least learning rate where it is above a rate of the run's recipe; None where it changes none."""
        floor, recipe = self.budget(plan, node)["lr_floor"], self.recipe(plan, node)
        given = [rate for name in RATES if (rate := getattr(recipe, name, None)) is not None]
        return floor if min(given) < floor else None

    def text(self, plan, node):
        """The text that it trains on."""
        recipe = self.recipe(plan, node)
        return plan.text(recipe.data, plan.run(node.name).model, recipe.dose)

    def parents(self, plan, node):
        return {"model": plan.model_of(node.name), "text": self.text(plan, node), **plan.trained_before(node)}

    def modules(self, plan, node):
        return [self.work_of(plan, node), *plan.method_modules(node.name)]

    def seed(self, plan, node):
        return plan.seed + plan.run(node.name).seed

    def check(self, plan, node, processes):
        _stage.require_order(plan, node)
        _stage.require_room(plan, node)
        budget, model = self.budget(plan, node), plan.run(node.name).model
        data = plan.data_for(self.recipe(plan, node).data, model)
        if stages.makes(plan.data[data].make, "pictures"):
            _stage.require_pictures(plan, node, f"data {data!r} are pictures", "other data, or ")
        positions = plan.models[model].positions
        if budget["seq_len"] > positions:
            raise ConfigError(f"run {node.name!r}: {node.stage}.seq_len {budget['seq_len']} is beyond the model's {positions} positions")
        step = budget["batch_size"] * budget["accumulate"]
        if step % processes:
            possible = ", ".join(str(n) for n in range(1, step + 1) if step % n == 0)
            raise ConfigError(
                f"scale {plan.scale!r}: a step of {node.stage} has batch_size x accumulate = {step} sequences, which {processes} processes "
                f"cannot share evenly; possible: {possible}"
            )
