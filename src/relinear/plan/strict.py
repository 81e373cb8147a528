"""The one strict reader of every YAML below `workflow/`, and the base of all models of their content."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
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
    """Settings that people write by hand. Frozen; an unknown key is an error, and so is `true` where a number belongs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, given: Any) -> Any:
        for name, value in given.items() if isinstance(given, dict) else ():
            parts = value.items() if isinstance(value, dict) else [("", value)]
            truth = next((said for key, part in parts for said in _truths(f"{name}.{key}".rstrip("."), part)), None)
            if truth is not None and (field := cls.model_fields.get(name)):
                kinds = set(map(str, _kinds(field.annotation)))
                if kinds & {str(int), str(float)} and not kinds & {str(bool), str(Any)}:
                    raise ValueError(f"{truth}; it must be a number")
        return given


SHOWN = 200  # characters of a wrong value in its error: it may be a whole file
Schema = TypeVar("Schema", bound=BaseModel)


class ConfigError(UserError):
    """A setting, run, scale, task or asset that does not exist or does not fit."""


class _UniqueKeys(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """YAML in which a name given twice is an error and does not silently replace its first entry."""

    def construct_document(self, node):
        waiting, seen = [node], set()
        while waiting:
            node_here = waiting.pop()
            if id(node_here) in seen:  # an alias
                continue
            seen.add(id(node_here))
            if isinstance(node_here, yaml.MappingNode):
                self._once(node_here)
                waiting += [value for _, value in node_here.value]
            elif isinstance(node_here, yaml.SequenceNode):
                waiting += node_here.value
        return super().construct_document(node)

    @staticmethod
    def _once(node: yaml.MappingNode) -> None:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge"]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise yaml.YAMLError(f"{', '.join(map(repr, twice))} stands there twice, line {node.start_mark.line + 1} on")


def read_yaml(path: Path) -> dict:
    """The mapping that a YAML file holds.

    Raises ConfigError for a file that is missing, empty, no UTF-8, no YAML or no mapping, and for a name given twice.
    """
    if not path.is_file():
        have = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml"))) or "none"
        raise ConfigError(f"no {path.parent.name}/{path.name}; {path.parent.name} has {have}")
    where = f"{path.parent.name}/{path.name}"
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)  # noqa: S506, a SafeLoader
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date
        raise ConfigError(f"{where} is not YAML: {' '.join(str(error).split())}") from None
    if data is None:
        raise ConfigError(f"{where} is empty; it must hold names with their settings")
    if not isinstance(data, dict):
        raise ConfigError(f"{where} must hold names with their settings; got a {type(data).__name__}")
    return data


def parse(model: type[Schema], data: Any, where: str, partial: bool = False) -> Schema:
    """`model` from plain data. Raises ConfigError naming each wrong key, its value, and the keys that are possible there.

    `partial`: another place may give what is not given here.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        wrong = [_explain(model, e, where) for e in error.errors() if not (partial and e["type"] == "missing")]
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
    """The model that a field holds, alone or in a collection; the model itself for a place in a collection."""
    if part not in model.model_fields:
        return model
    waiting = [model.model_fields[str(part)].annotation]
    while waiting:
        annotation = waiting.pop(0)
        if hasattr(annotation, "model_fields"):
            return annotation
        waiting += getattr(annotation, "__args__", ())
    return model
