"""A scale: the models and texts that stand in for the papers', the amounts of training and measuring, and the
hardware."""

import math
import re
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from relinear import stages
from relinear.plan.entries import Scale, multiple, whole_tokens
from relinear.plan.finite import parse
from relinear.plan.sane import read_yaml
from relinear.plan.strict import WORKFLOW, ConfigError, Positive


class Amounts(BaseModel):
    """The options of a metric that a budget multiplies; those beside them are the metric's own matter."""

    tokens: Positive | None = None
    seq_len: Positive = 1
    # items of each task, two at least for a standard error; null: all
    items: dict[str, Annotated[int, Field(ge=2)] | None] = {}
    prompts: Annotated[int, Field(ge=2)] | None = None  # prompts of each place that readings are of


def scales(workflow: Path = WORKFLOW) -> list[str]:
    """Names of all scales."""
    return sorted(p.stem for p in (workflow / "scales").glob("*.yaml"))


def read_scale(name: str, *, budget: float = 1.0, workflow: Path = WORKFLOW) -> Scale:
    """A scale with every amount (training tokens, measured tokens, items) multiplied by `budget`. Raises
    ConfigError.

    Amounts in a metric's options are `tokens`, kept a whole number of its `seq_len`, `items` of each task and
    `prompts`, at least 2.
    """
    if not 0 < budget < math.inf:
        raise ConfigError(f"budget must be a positive number; got {budget!r}")
    if name not in scales(workflow):
        raise ConfigError(f"no scale {name!r}; have {', '.join(scales(workflow))}")
    data = read_yaml(workflow / "scales" / f"{name}.yaml")
    where = f"scales/{name}.yaml"
    if not re.fullmatch(r"[A-Za-z]\w*", name):
        raise ConfigError(
            f"{where}: a scale's name is of letters, digits and _, since a budget and a seed end its folder;"
            f" got {name!r}"
        )
    scale = parse(Scale, data, where)
    for stage, budget_of_stage in scale.train.items():
        if stage not in stages.training():
            raise ConfigError(
                f"{where}: train: no training stage {stage!r}; have {', '.join(stages.training())}"
            )
        parse(stages.load(stage).Stage.Budget, budget_of_stage, f"{where}: train: {stage}")
    stages_of_jobs = (*stages.available(), "default")
    if "default" not in (minutes := scale.jobs.minutes) or any(
        name not in stages_of_jobs for name in minutes
    ):
        possible = ", ".join(stages.available())
        raise ConfigError(
            f"{where}: jobs.minutes: give `default`, and any of {possible}; got {', '.join(minutes)}"
        )
    for metric, options in scale.measures.items():
        parse(Amounts, options, f"{where}: measures: {metric}")
    whole = whole_tokens(scale)
    data["text"]["train_tokens"] = multiple(scale.text.train_tokens * budget, whole)
    for options in data["measures"].values():
        if "tokens" in options:
            options["tokens"] = multiple(options["tokens"] * budget, options.get("seq_len", 1))
        if "items" in options:
            options["items"] = {
                task: n if n is None else max(round(n * budget), 2) for task, n in options["items"].items()
            }
        if "prompts" in options:
            options["prompts"] = max(round(options["prompts"] * budget), 2)
    read = [options["tokens"] for options in data["measures"].values() if "tokens" in options]
    if scale.text.heldout_tokens < max(read, default=0) and budget <= 1:
        raise ConfigError(
            f"scale {name!r}: heldout_tokens must be at least {max(read)}; got {scale.text.heldout_tokens}"
        )
    data["text"]["heldout_tokens"] = max([scale.text.heldout_tokens, *read])
    return parse(Scale, data, where)
