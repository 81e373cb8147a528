"""What tables and figures read: a paper's YAML, and the metrics.json and run.json of a stage folder."""

import json
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from relinear.files import sha256


class Strict(BaseModel):
    """Hand-written data: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Schema = TypeVar("Schema", bound=BaseModel)


class Reference(Strict):
    """A paper: what it is called and where it is."""

    title: str
    arxiv: str = Field(pattern=r"^\d{4}\.\d{4,5}$")
    note: str | None = None


class Misprint(Strict):
    """A known error or ambiguity of a published number, printed beside the numbers."""

    where: str
    text: str


class Origin(Strict):
    """Who produced published numbers: the authors who print them, or another paper they took them from."""

    measured: Literal[True] | None = None
    copied: str | None = None
    note: str | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.measured is None) == (self.copied is None):
            raise ValueError(f"give either `measured: true` or `copied: <paper>`, got {self}")
        return self

    def __str__(self) -> str:
        return "measured" if self.measured else f"copied from {self.copied}"


class PaperFile(Strict):
    """What the YAML of every paper has; `file` is where it was read from and is never written in it."""

    file: Path

    def at(self, pointer: str) -> str:
        """Address of an entry of this YAML, for provenance: `workflow/papers/<paper>.yaml#/rows/0/published`, whatever machine it is on."""
        return f"workflow/papers/{self.file.name}#/{pointer}"


def read_yaml(path: str | Path, schema: type[Schema]) -> Schema:
    """Validate a paper's YAML. Raises ValueError with the file's name and each offending key."""
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        return schema.model_validate({**(data or {}), "file": path})
    except (yaml.YAMLError, ValidationError) as error:
        raise ValueError(f"{path}: {error}") from error


class Perplexity(BaseModel):
    """exp(mean loss) over held-out tokens, and the mean of exp(chunk loss) that LoLCATs' code reports."""

    value: float
    stderr: float | None
    tokens: int
    chunk_mean_exp: float


class Task(BaseModel):
    """Fractions of n items; acc_norm only where the harness has it."""

    acc: float
    acc_stderr: float | None
    acc_norm: float | None = None
    acc_norm_stderr: float | None = None
    n: int


class Gate(BaseModel):
    """Whether the method's parallel and recurrent forms agreed before its numbers were taken."""

    passed: bool


class Evaluation(BaseModel):
    """evaluate/metrics.json."""

    run: str
    method: str
    variant: str | None
    scale: str
    trainable_params: int
    distill_tokens: int
    finetune_tokens: int
    perplexity: Perplexity
    tasks: dict[str, Task]
    gate: Gate
    collapsed: bool


class Fidelity(BaseModel):
    """fidelity/metrics.json: a method after transfer against the teacher's softmax attention."""

    run: str
    method: str
    perplexity: Perplexity
    mse: float
    kl: float
    mse_per_head: list[list[float]]  # [layers][heads]
    kl_per_head: list[list[float]]
    shown: list[tuple[int, int]]  # (layer, head) of the matrices in weights.safetensors


class RunRecord(BaseModel):
    """The part of a run.json that says whose numbers lie beside it."""

    run: str
    stage: str
    scale: str
    key: Annotated[str, Field(min_length=1)]


class Source(NamedTuple):
    """The run.json behind a cell."""

    file: str
    key: str
    sha256: str
    metrics_sha256: str


def _parse(path: Path, schema: type[Schema]) -> Schema:
    try:
        return schema.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:  # broken JSON, or a field that is missing or of a wrong type
        raise ValueError(f"{path}: {error}") from error


def read_stage(metrics: str | Path, schema: type[Schema], run: str, stage: str, scale: str) -> tuple[Schema, Source]:
    """Read a stage's metrics.json and the run.json beside it.

    Raises FileNotFoundError if either is missing, and ValueError if they are malformed or belong to another
    run, stage or scale: a number never lands in a foreign row.
    """
    metrics = Path(metrics)
    record_file = metrics.with_name("run.json")
    for file in (metrics, record_file):
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing: stage {stage!r} of run {run!r} at scale {scale!r} did not finish")
    record = _parse(record_file, RunRecord)
    for what, expected in {"run": run, "stage": stage, "scale": scale}.items():
        if (got := getattr(record, what)) != expected:
            raise ValueError(f"{record_file}: {what} is {got!r}, expected {expected!r}")
    parsed = _parse(metrics, schema)
    if parsed.run != run:
        raise ValueError(f"{metrics}: run is {parsed.run!r}, expected {run!r}")
    return parsed, Source(record_file.as_posix(), record.key, sha256(record_file), sha256(metrics))
