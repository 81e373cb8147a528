"""The base of all models of what people write by hand, and their errors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from relinear.errors import UserError

WORKFLOW = Path(__file__).resolve().parents[3] / "workflow"

Positive = Annotated[int, Field(gt=0)]


def _kinds(annotation: Any) -> Iterator[Any]:
    """The types that an annotation is made of."""
    yield annotation
    for part in get_args(annotation):
        yield from _kinds(part)


def _truths(name: str, value: Any) -> Iterator[str]:
    """The truth values in a value or in its lists at any depth, as `name.index is true`."""
    if isinstance(value, bool):
        yield f"{name} is {str(value).lower()}"
    for index, part in enumerate(value) if isinstance(value, list | tuple) else ():
        yield from _truths(f"{name}.{index}", part)


class Strict(BaseModel):
    """Settings that people write by hand. Frozen; an unknown key is an error, and so is `true` where a number
    belongs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, given: Any) -> Any:
        for name, value in given.items() if isinstance(given, dict) else ():
            parts = value.items() if isinstance(value, dict) else [("", value)]
            truth = next(
                (said for key, part in parts for said in _truths(f"{name}.{key}".rstrip("."), part)), None
            )
            if truth is not None and (field := cls.model_fields.get(name)):
                kinds = set(map(str, _kinds(field.annotation)))
                if kinds & {str(int), str(float)} and not kinds & {str(bool), str(Any)}:
                    raise ValueError(f"{truth}; it must be a number")
        return given


SHOWN = 200  # characters of a wrong value in its error: it may be a whole file
Schema = TypeVar("Schema", bound=BaseModel)


class ConfigError(UserError):
    """A setting, run, scale, task or asset that does not exist or does not fit."""


def parse(model: type[Schema], data: Any, where: str, partial: bool = False) -> Schema:
    """`model` from plain data. Raises ConfigError naming each wrong key, its value, and the keys that are
    possible there.

    `partial`: another place may give what is not given here.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        wrong = [
            _explain(model, e, where) for e in error.errors() if not (partial and e["type"] == "missing")
        ]
        if not wrong:
            return model.model_construct(**data)
        raise ConfigError("\n".join(wrong)) from None


def _explain(model: type[BaseModel], error: dict, where: str) -> str:
    *path, key = error["loc"] or ("",)
    at = ".".join(map(str, (where, *error["loc"])))
    for part in path:  # down to the model that has the key
        model = _within(model, part)
    possible = f"possible: {', '.join(model.model_fields) or 'none'}"
    if error["type"] == "extra_forbidden":
        inside = f" in {at.rsplit('.', 1)[0]}" if path else ""
        return f"{where}: unknown key {key!r}{inside}; {possible}"
    got = repr(error["input"])
    said = f"{at}: {error['msg']}; got {got if len(got) <= SHOWN else f'{got[:SHOWN]} ...'}"
    return f"{said}; {possible}" if error["type"] == "missing" else said


def _within(model: type[BaseModel], part: str | int) -> type[BaseModel]:
    """The model that a field holds, alone or in a collection; the model itself for a place in a
    collection."""
    if part not in model.model_fields:
        return model
    waiting = [model.model_fields[str(part)].annotation]
    while waiting:
        annotation = waiting.pop(0)
        if hasattr(annotation, "model_fields"):
            return annotation
        waiting += getattr(annotation, "__args__", ())
    return model
