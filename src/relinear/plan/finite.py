"""Settings that people write by hand, whose numbers are finite.

YAML reads `.inf` as a number and `inf`, `nan` or `1e999` as text, of which a model then makes such a number.
A claim with an infinite bound would always hold.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from relinear.plan.strict import ConfigError, Schema
from relinear.plan.strict import parse as parse_strict


def parse(model: type[Schema], data: Any, where: str, partial: bool = False) -> Schema:
    """As `relinear.plan.strict.parse`. Raises ConfigError, too, for a given number that is not finite."""
    made = parse_strict(model, data, where, partial)
    if wrong := [f"{where}{at} must be a finite number; got {value}" for at, value in _infinite(made)]:
        raise ConfigError("\n".join(wrong))
    return made


def _infinite(value: Any, at: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in a value that are not finite, with where each stands. Defaults are not looked at."""
    if isinstance(value, float):
        if not math.isfinite(value):
            yield at, value
        return
    if isinstance(value, BaseModel):
        parts = ((name, getattr(value, name)) for name in value.model_fields_set)
    elif isinstance(value, Mapping):
        parts = value.items()
    else:
        parts = enumerate(value) if isinstance(value, list | tuple) else ()
    for name, part in parts:
        yield from _infinite(part, f"{at}.{name}")
