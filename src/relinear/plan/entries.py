"""The entries of `workflow/` as values: what YAML files say of models, data, measures, runs and scales."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from relinear.plan.job import DTYPES, PRECISIONS
from relinear.plan.near import possible
from relinear.plan.options import KEEP
from relinear.plan.strict import ConfigError, Positive, Strict


class Model(Strict):
    """A pretrained model, or one that begins with random weights."""

    family: str  # families/<family>.py opens or makes it
    # the family whose classes it has, where that is another: tiny makes a Llama, which is decoder's
    layout: str | None = None
    # names in assets.yaml: the asset that holds it, or the parts of its file in order
    assets: tuple[str, ...] = ()
    init: Literal["pretrained", "random"] = "pretrained"
    options: dict[str, Any] = {}  # the sizes of a random model, which its family names
    positions: Positive  # its longest sequence; the model stage compares it, and what follows, with the model
    # the one data set whose vocabulary it has; it reads that data set in the place of every text
    data: str | None = None
    causal: bool = True  # a token sees those before it only; false: an encoder
    altered: bool = False  # its family leaves out a part that it was trained with (families/mpnet.py)
    dtype: Literal[DTYPES] = "bfloat16"  # of its weights as they are saved, and read by everything else
    # source -> the tokens of its vocabulary that the source holds to train on, where they were counted
    unique: dict[str, Positive] = {}


class Data(Strict):
    """Something to train on or to measure with: a stage makes it from `options`; `items` are read where they
    lie."""

    make: str
    options: dict[str, Any] = {}


class Measure(Strict):
    """One measurement that any run can have: a metric on some data."""

    metric: str  # measure/<metric>.py
    data: str | None = None  # a name of data.yaml
    # measure the run as it is before this step; as it ends where it has no such step
    before: str | None = None
    # parts of the method to switch off
    without: Annotated[tuple[str, ...], BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)] = ()
    options: dict[str, Any] = {}


class Run(Strict):
    """A chain of training steps on a named model. An entry with `over` is a sweep: one run for each
    combination of its values."""

    model: str  # a name in models.yaml; the scale names the model that stands in for it
    # "<run>": begin where that run ended; "<run>/<step>": begin with that step's result
    after: str | None = None
    # attention/<method>.py; softmax: the model's attention as it is. Left out after another run: that run's
    method: str = "softmax"
    options: dict[str, Any] = {}  # the method's, and keep_softmax_layers
    # a step once, in order: [{distill: {...}}, {finetune: {...}}]
    steps: tuple[dict[str, dict[str, Any]], ...] = ()
    # field -> values; {field} stands for one of them in the name and in any setting
    over: dict[str, tuple[Any, ...]] = {}
    shown: tuple[str, ...] = ()  # tables, as <paper>/<table>, that show the run after their own rows

    @property
    def recipes(self) -> dict[str, dict[str, Any]]:
        """Step -> its settings, in order."""
        return {stage: settings for step in self.steps for stage, settings in step.items()}

    @property
    def own(self) -> dict[str, Any]:
        """The options of the method itself."""
        return {k: v for k, v in self.options.items() if k != KEEP}

    def of(self, model: Model) -> "Run":
        """The run as it begins with a model: a pretrained one has the steps `if_random` behind it, and one
        with all its parts needs no step `if_altered`."""
        needed = {"if_random": model.init == "random", "if_altered": model.altered}
        left = tuple(
            step
            for step in self.steps
            if all(needed[name] for given in step.values() for name in needed if given.get(name))
        )
        return self.model_copy(update={"steps": left})

    @property
    def variant(self) -> str:
        """The options in words, for tables: `code, window=64`."""
        rest = [f"{k}={v}" for k, v in self.options.items() if k != "variant"]
        return (
            ", ".join([*([str(self.options["variant"])] if "variant" in self.options else []), *rest])
            or "default"
        )


class StandIns(Strict):
    """Models and data that a scale takes for the papers' own: name of models.yaml or data.yaml -> another
    name there."""

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
    # with several GPUs: replicas or shards of the model; auto: shards where no replica fits
    engine: Literal["auto", "ddp", "fsdp"] = "auto"
    # torch.compile of the blocks of a model that is trained; auto: on a GPU
    compile: Literal["auto", "on", "off"] = "auto"
    # a block's activations are computed again in the backward pass: less memory, a third more arithmetic
    recompute: bool = False


class Jobs(Strict):
    """The memory and the minutes that a cluster reserves for a stage, and ends it for exceeding; one machine
    enforces nothing."""

    memory_mb: Positive  # the host's memory
    minutes: dict[str, Positive]  # by stage, at budget 1; `default` is for every stage that is not named

    def longest(self, stage: str) -> int:
        """Minutes that a stage may take."""
        return self.minutes.get(stage, self.minutes["default"])


class Scale(Strict):
    """A file of workflow/scales: budgets, hardware, and which models stand in for the papers'."""

    demonstration: str | None = None  # why its numbers are no reference, printed under every table
    nothing_to_judge: str | None = None  # why no claim of a paper can be judged by it
    stand_ins: StandIns = StandIns()
    text: TextBudget
    train: dict[str, dict[str, Any]]  # a training stage -> its budget, which that stage checks
    # a metric -> options that its measures have here, unless they give others
    measures: dict[str, dict[str, Any]]
    without: tuple[str, ...] = ()  # measures that are left out; tables say `not run`
    hardware: Hardware
    jobs: Jobs


def whole_tokens(scale: Scale) -> int:
    """The longest training sequence: amounts of text are multiples of it, so that a budget trains on exactly
    the tokens it names."""
    return max((budget["seq_len"] for budget in scale.train.values()), default=1)


def multiple(amount: float, of: int) -> int:
    """The multiple of `of` that is nearest to an amount, at least one `of`."""
    return max(round(amount / of), 1) * of


def one_of(what: str, name: str, have) -> str:
    """Return the name. Raises ConfigError, naming those near it and the possible ones, for any other."""
    if not isinstance(name, str) or name not in have:
        raise ConfigError(f"no {what} {str(name)[:80]!r}; {possible(name, have)}")
    return name
