"""Scales and runs, typed: what `workflow/scales/<scale>.yaml` and `workflow/runs.yaml` may say. An unknown key is an error.

Imports neither torch nor transformers: the Snakefile reads the catalogue on every call.
"""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from relinear import attention
from relinear.errors import UserError

WORKFLOW = Path(__file__).resolve().parents[3] / "workflow"

Positive = Annotated[int, Field(gt=0)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ConfigError(UserError):
    """A setting, run, scale, task or asset that does not exist or does not fit."""


# --- scales ---


class Teacher(Strict):
    kind: Literal["gguf", "random", "hub"]
    asset: str | None = None  # a name of workflow/assets.yaml
    alternatives: tuple[str, ...] = ()  # other assets that `--config teacher=` may choose
    max_positions: Positive  # its longest sequence; the teacher stage holds it against the model


class Written(Strict):
    """How many tokens of instructions and answers the teacher writes, and how it is sampled."""

    tokens: Positive
    batch_size: Positive
    instruction_tokens: Positive  # the longest; one that does not end is left out
    response_tokens: Positive
    temperature: Annotated[float, Field(gt=0)] = 1.0
    response_temperature: Annotated[float, Field(gt=0)] = 0.7  # answers ramble at 1, questions repeat themselves below
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95


class Corpus(Strict):
    sources: tuple[str, ...]  # assets, and `written`
    written: Written | None = None
    heldout_source: str
    train_tokens: Positive
    heldout_tokens: Positive


class Budget(Strict):
    """How a stage walks over the training tokens: `epochs` times, in sequences of `seq_len`, batch x accumulate of them a step."""

    epochs: Positive
    seq_len: Positive
    batch_size: Positive
    accumulate: Positive
    lr_floor: Annotated[float, Field(ge=0)] = 0.0  # no run learns slower: the papers' rates are for thousands of steps, not for tens
    activations: bool = True  # distill: share the teacher's pass between all runs through the disk


class Evaluation(Strict):
    tasks: dict[str, Annotated[int, Field(ge=2)] | None]  # items per task, two for a standard error; null: all
    perplexity_tokens: Positive
    seq_len: Positive
    batch_size: Positive
    max_length: Positive = 4096  # MMLU's longest 5-shot prompt has 3147 tokens of SmolLM2; a prompt is never cut
    smoke: bool = False  # items of our own instead of the benchmarks'

    @property
    def perplexity_batch(self) -> int:
        """Windows in one pass: as many as the token budget of one batch of items, at least one."""
        return max(1, self.batch_size * 512 // self.seq_len)


class FidelitySample(Strict):
    tokens: Positive
    seq_len: Positive
    shown: tuple[tuple[int, int], ...]  # (layer, head) whose attention weights are kept for the figures


class Hardware(Strict):
    device: Literal["cpu", "cuda"]
    dtype: Literal["auto", "float32", "bfloat16"]
    checkpoint_seconds: Annotated[float, Field(ge=0)]
    gpus: Positive = 1  # that distill, finetune and evaluate each spread over
    engine: Literal["auto", "ddp", "fsdp"] = "auto"  # with several: a replica of the model on each, or its shards; auto: shards if it must


class Minutes(Strict):
    """The longest that a stage may take at budget 1."""

    teacher: Positive
    instructions: Positive
    corpus: Positive
    activations: Positive
    distill: Positive
    finetune: Positive
    fidelity: Positive
    evaluate: Positive


class Jobs(Strict):
    """What a cluster reserves for a stage, and ends it for exceeding; one machine enforces nothing."""

    memory_mb: Positive  # of the host
    minutes: Minutes


class Scale(Strict):
    teacher: Teacher
    corpus: Corpus
    distill: Budget
    finetune: Budget
    evaluate: Evaluation
    fidelity: FidelitySample
    hardware: Hardware
    jobs: Jobs


# --- runs ---


class Recipe(Strict):
    """How one stage of one run is optimised: AdamW, linear warm-up, cosine."""

    lr: Annotated[float, Field(gt=0)]
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.1
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    clip: Annotated[float, Field(gt=0)] = 1.0


class Distill(Recipe):
    loss: Literal["cross_entropy", "mse"]
    loss_scale: Annotated[float, Field(gt=0)] = 1.0


class Finetune(Recipe):
    kind: Literal["lora", "full"]
    train_method: bool = False  # lora: train the method's own parameters too (methods without a transfer stage need it)
    method_lr: Annotated[float, Field(gt=0)] | None = None  # their learning rate; the adapter's if not given
    lora_rank: Positive = 8
    lora_alpha: Positive = 16
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")


class RunEvaluation(Strict):
    tasks: bool = True  # false: perplexity only


class Run(Strict):
    method: str
    options: dict[str, Any] = {}  # of `relinear.linearize`: the method's own, and keep_softmax_layers
    distill: Distill | None = None
    finetune: Finetune | None = None
    evaluate: RunEvaluation = RunEvaluation()
    headline: bool = False
    seed: int = 0  # added to the plan's where it trains

    @property
    def trained(self) -> bool:
        return bool(self.distill or self.finetune)

    @property
    def variant(self) -> str:
        """The options in words, for the tables: `code, window=64`."""
        rest = [f"{k}={v}" for k, v in self.options.items() if k != "variant"]
        return ", ".join([*([str(self.options["variant"])] if "variant" in self.options else []), *rest]) or "default"


# --- reading ---


class _UniqueKeys(yaml.SafeLoader):
    """YAML whose second entry of a name is an error, not a silent replacement."""

    def construct_mapping(self, node, deep=False):
        names = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise yaml.YAMLError(f"{', '.join(map(repr, twice))} stands there twice, line {node.start_mark.line + 1} on")
        return super().construct_mapping(node, deep)


def _read(path: Path, what: str) -> dict:
    if not path.is_file():
        raise ConfigError(f"no {what} {path.stem!r}; have {', '.join(sorted(p.stem for p in path.parent.glob('*.yaml')))}")
    try:
        return yaml.load(path.read_text(), _UniqueKeys)  # noqa: S506, a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{path.name} is not YAML: {' '.join(str(error).split())}") from None


def parse(model: type[BaseModel], data: Any, where: str):
    """`model` from plain data. Raises ConfigError naming each wrong key, what it was, and what is possible there."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(model, e, where) for e in error.errors())) from None


def _explain(model: type[BaseModel], error: dict, where: str) -> str:
    *path, key = error["loc"] or ("",)
    at = ".".join(map(str, (where, *error["loc"])))
    if error["type"] == "extra_forbidden":
        for part in path:  # the model in which the unknown key stands
            annotation = model.model_fields[str(part)].annotation
            model = next(a for a in (annotation, *getattr(annotation, "__args__", ())) if hasattr(a, "model_fields"))
        return f"{where}: unknown key {key!r} in {at.rsplit('.', 1)[0]}; possible: {', '.join(model.model_fields)}"
    return f"{at}: {error['msg']}; got {error['input']!r}"


def scales(workflow: Path = WORKFLOW) -> list[str]:
    return sorted(p.stem for p in (workflow / "scales").glob("*.yaml"))


def read_scale(name: str, *, budget: float = 1.0, teacher: str | None = None, workflow: Path = WORKFLOW) -> Scale:
    """A scale with every budget (training tokens, items, held-out tokens) multiplied by `budget`. Raises ConfigError."""
    if not 0 < budget < math.inf:
        raise ConfigError(f"budget must be a positive number; got {budget!r}")
    data = _read(workflow / "scales" / f"{name}.yaml", "scale")
    scale = parse(Scale, data, f"scales/{name}.yaml")
    if teacher is not None:
        have = (scale.teacher.asset, *scale.teacher.alternatives)
        if teacher not in have:
            raise ConfigError(f"scale {name!r} has no teacher {teacher!r}; have {', '.join(map(str, have))}")
        data["teacher"]["asset"] = teacher
    corpus, evaluation = data["corpus"], data["evaluate"]
    # Whole sequences, so that every budget trains on exactly what it says.
    whole = max(scale.distill.seq_len, scale.finetune.seq_len)
    corpus["train_tokens"] = max(round(corpus["train_tokens"] * budget / whole), 1) * whole
    evaluation["perplexity_tokens"] = max(round(evaluation["perplexity_tokens"] * budget / scale.evaluate.seq_len), 1) * scale.evaluate.seq_len
    if scale.corpus.written:
        corpus["written"]["tokens"] = max(round(corpus["written"]["tokens"] * budget), 1)
    corpus["heldout_tokens"] = max(corpus["heldout_tokens"], evaluation["perplexity_tokens"], scale.fidelity.tokens)
    evaluation["tasks"] = {t: n if n is None else max(round(n * budget), 2) for t, n in evaluation["tasks"].items()}
    return parse(Scale, data, f"scales/{name}.yaml")


def read_runs(workflow: Path = WORKFLOW) -> dict[str, Run]:
    """All runs, with their methods known and their options left to the method to check. Raises ConfigError."""
    runs = {}
    for name, data in _read(workflow / "runs.yaml", "catalogue").items():
        run = runs[name] = parse(Run, data, f"runs.yaml: {name}")
        try:
            attention.check(run.method)
        except ValueError as error:
            raise ConfigError(f"runs.yaml: {name}: {error}") from None
        if run.distill and run.method == "softmax":
            raise ConfigError(f"runs.yaml: {name}: softmax attention has nothing to distill")
    return runs


def check_run(name: str, runs: dict[str, Run]) -> Run:
    if name not in runs:
        raise ConfigError(f"no run {name!r} in runs.yaml; have {', '.join(runs)}")
    return runs[name]
