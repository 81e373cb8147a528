"""The form of every JSON file that stages and exports leave, checked once when one is read: somebody else may
have made it, or handed it over."""

from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from relinear.errors import UserError

# between them every record was started
FIRST, LAST = datetime(2020, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)
SHOWN = 80  # characters of a wrong value in its error

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Time = Annotated[float, Field(ge=FIRST.timestamp(), le=LAST.timestamp())]  # in seconds since the epoch


class Form(BaseModel):
    """A mapping whose fields have these types where they are there; other fields are anybody's."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


class File(Form):
    """A file that a record names."""

    sha256: str
    bytes: Count = 0


class Parent(Form):
    """A stage that a record was made from."""

    path: str
    key: str
    contents: str = ""


class Data(Form):
    """A text or an asset that a stage read."""

    name: str
    sha256: str
    role: str


class Config(Form):
    """The settings of a stage, as far as others read them."""

    assets: dict[str, str] = {}
    links: list[dict[str, Any]] = []
    recipe: dict[str, Any] = {}
    budget: dict[str, Any] = {}


class Record(Form):
    """A run.json. Older ones, and those of other stages, lack some fields."""

    scale: str
    run: str
    stage: str
    key: str
    config: Config
    parents: dict[str, Parent]
    artefacts: dict[str, File]
    root: str = ""
    measure: str = ""
    attempt: Count = 1
    config_hash: str = ""
    code_hash: str = ""
    kernels: dict[str, str] = {}
    datasets: list[Data] = []
    git: dict[str, str | bool | None] = {}
    versions: dict[str, str] = {}
    lock: str | None = None
    hardware: dict[str, str | int | float | bool | None] = {}
    seed: int = 0
    tokens: Count = 0
    started: str = ""
    wall_seconds: Seconds = 0.0
    peak_rss_bytes: Count = 0
    tags: dict[str, str] = {}
    mlflow_run_id: str = ""

    @field_validator("started")
    @classmethod
    def _a_time(cls, text: str) -> str:
        try:
            when = datetime.fromisoformat(text)
        except ValueError:
            raise ValueError("must be a time such as 2026-01-31T12:00:00+00:00") from None
        if not FIRST <= (when if when.tzinfo else when.replace(tzinfo=UTC)) <= LAST:
            raise ValueError(f"must be a time of the years {FIRST.year} to {LAST.year}")
        return text


class Number(Form):
    """One reading of a measurement (`relinear.plan.readings.Reading`)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    metric: str
    of: str
    at: dict[str, int | float | str]
    value: float | None
    stderr: float | None
    n: int
    why: str = ""


class Facts(Form):
    """What a measurement says of its run."""

    method: str = ""
    trainable_params: Count | None = None
    tokens: dict[str, Count] = {}
    collapsed: bool | None = None


class Metrics(Form):
    """The metrics.json of a measurement."""

    readings: list[Number]
    facts: Facts = Facts()


class Line(Form):
    """A line of a history."""

    step: Count
    time: Time


class Change(Form):
    """How a committed file differs from the original, whose name and sha256 these are."""

    how: str = ""
    sha256: str


class Manifest(Form):
    """A reference.json."""

    scale: str
    files: dict[str, str]
    changed: dict[str, Change] = {}


class Provenance(Form):
    """A provenance.json: that of a drawing has cells, that of a benchmark names no scale."""

    scale: str | None = None
    cells: dict[str, dict[str, str | list[str] | None]] = {}


Kind = TypeVar("Kind", bound=Form)


class BrokenError(UserError):
    """A file that exists and cannot be believed. The message names the file and the fault, and the field and
    its value where there is one."""


def require(kind: type[Kind], data: Any, where: object) -> Kind:
    """The data, which `where` holds, in this form. Raises BrokenError for the first field that is missing or
    of another type."""
    if not isinstance(data, dict):
        raise BrokenError(f"{where} must hold a JSON object; got a {type(data).__name__}")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise BrokenError(f"{where} lacks {at}") from None
        said = first["msg"].removeprefix("Value error, ")
        got = repr(first["input"])
        raise BrokenError(
            f"{where}: {at}: {said}; got {got if len(got) <= SHOWN else f'{got[:SHOWN]} ...'}"
        ) from None
