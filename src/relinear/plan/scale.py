"""A scale: the models and texts that stand in for the papers', the amounts of training and measuring, and the hardware."""

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator

from relinear import stages
from relinear.plan.job import PRECISIONS
from relinear.plan.sane import read_settings
from relinear.plan.strict import WORKFLOW, ConfigError, Positive, Strict, parse


class StandIns(Strict):
    """Models and data that a scale takes for the papers' own: name of models.yaml or data.yaml -> another name there."""

    models: dict[str, str] = {}
    data: dict[str, str] = {}


class TextBudget(Strict):
    """The tokens of text that a scale trains on and holds out."""

    train_tokens: Positive  # unique tokens of a step with dose 1
    heldout_tokens: Positive


class Hardware(Strict):
    """The hardware that a scale computes on."""

    device: Literal["cpu", "cuda"]
    dtype: Literal[PRECISIONS]
    checkpoint_seconds: Annotated[float, Field(ge=0)]
    gpus: Positive = 1  # the GPUs of each stage that can be spread over several
    engine: Literal["auto", "ddp", "fsdp"] = "auto"  # with several GPUs: replicas or shards of the model; auto: shards where no replica fits


class Jobs(Strict):
    """The memory and the minutes that a cluster reserves for a stage, and ends it for exceeding; one machine enforces nothing."""

    memory_mb: Positive  # the host's memory
    minutes: dict[str, Positive]  # by stage, at budget 1; `default` is for every stage that is not named

    @field_validator("minutes")
    @classmethod
    def _of_stages(cls, minutes: dict[str, int]) -> dict[str, int]:
        unknown = [name for name in minutes if name not in (*stages.available(), "default")]
        if unknown or "default" not in minutes:
            raise ValueError(f"give `default`, and any of {', '.join(stages.available())}")
        return minutes

    def longest(self, stage: str) -> int:
        """Minutes that a stage may take."""
        return self.minutes.get(stage, self.minutes["default"])


class Amounts(BaseModel):
    """The options of a metric that a budget multiplies; those beside them are the metric's own matter."""

    tokens: Positive | None = None
    seq_len: Positive = 1
    items: dict[str, Annotated[int, Field(ge=2)] | None] = {}  # items of each task, two at least for a standard error; null: all
    prompts: Annotated[int, Field(ge=2)] | None = None  # prompts of each place that readings are of


class Scale(Strict):
    """A file of workflow/scales: budgets, hardware, and which models stand in for the papers'."""

    demonstration: str | None = None  # why its numbers are no reference, printed under every table
    nothing_to_judge: str | None = None  # why no claim of a paper can be judged by it
    stand_ins: StandIns = StandIns()
    text: TextBudget
    train: dict[str, dict[str, Any]]  # a training stage -> its budget, which that stage checks
    measures: dict[str, dict[str, Any]]  # a metric -> options that its measures have here, unless they give others
    without: tuple[str, ...] = ()  # measures that are left out; tables say `not run`
    hardware: Hardware
    jobs: Jobs


def scales(workflow: Path = WORKFLOW) -> list[str]:
    """Names of all scales."""
    return sorted(p.stem for p in (workflow / "scales").glob("*.yaml"))


def read_scale(name: str, *, budget: float = 1.0, workflow: Path = WORKFLOW) -> Scale:
    """A scale with every amount (training tokens, measured tokens, items) multiplied by `budget`. Raises ConfigError.

    Amounts in a metric's options are `tokens`, kept a whole number of its `seq_len`, `items` of each task and `prompts`, at least 2.
    """
    if not 0 < budget < math.inf:
        raise ConfigError(f"budget must be a positive number; got {budget!r}")
    if name not in scales(workflow):
        raise ConfigError(f"no scale {name!r}; have {', '.join(scales(workflow))}")
    data = read_settings(workflow / "scales" / f"{name}.yaml")
    where = f"scales/{name}.yaml"
    if not re.fullmatch(r"[A-Za-z]\w*", name):
        raise ConfigError(f"{where}: a scale's name is of letters, digits and _, since a budget and a seed end its folder; got {name!r}")
    scale = parse(Scale, data, where)
    for stage, budget_of_stage in scale.train.items():
        if stage not in stages.training():
            raise ConfigError(f"{where}: train: no training stage {stage!r}; have {', '.join(stages.training())}")
        parse(stages.load(stage).Stage.Budget, budget_of_stage, f"{where}: train: {stage}")
    for metric, options in scale.measures.items():
        parse(Amounts, options, f"{where}: measures: {metric}")
    whole = whole_tokens(scale)
    data["text"]["train_tokens"] = multiple(scale.text.train_tokens * budget, whole)
    for options in data["measures"].values():
        if "tokens" in options:
            options["tokens"] = multiple(options["tokens"] * budget, options.get("seq_len", 1))
        if "items" in options:
            options["items"] = {task: n if n is None else max(round(n * budget), 2) for task, n in options["items"].items()}
        if "prompts" in options:
            options["prompts"] = max(round(options["prompts"] * budget), 2)
    read = [options["tokens"] for options in data["measures"].values() if "tokens" in options]
    if scale.text.heldout_tokens < max(read, default=0) and budget <= 1:
        raise ConfigError(f"scale {name!r}: heldout_tokens must be at least {max(read)}; got {scale.text.heldout_tokens}")
    data["text"]["heldout_tokens"] = max([scale.text.heldout_tokens, *read])
    return parse(Scale, data, where)


def whole_tokens(scale: Scale) -> int:
    """The longest training sequence: amounts of text are multiples of it, so that a budget trains on exactly the tokens it names."""
    return max((budget["seq_len"] for budget in scale.train.values()), default=1)


def multiple(amount: float, of: int) -> int:
    """The multiple of `of` that is nearest to an amount, at least one `of`."""
    return max(round(amount / of), 1) * of
