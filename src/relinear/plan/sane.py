"""YAML below `workflow/`, checked for values that no setting can have: NaN, numbers beyond a float's exact integers, control characters."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relinear.plan.strict import ConfigError, read_yaml

LARGEST = 2**53  # whole numbers up to it are exact as floats too
MOST = 10**6  # values of a file, aliases included
LONGEST = 4096  # characters of a text or a name


def read_settings(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds. Raises ConfigError as `read_yaml` does, and naming each value that no setting has."""
    where = f"{path.parent.name}/{path.name}"
    try:
        data = read_yaml(path)
        if (count := _expanded(data, {})) > MOST:
            raise ConfigError(f"{where}: its aliases stand for {count} values; possible: {MOST} at most")
    except RecursionError:
        raise ConfigError(f"{where} is nested too deep; settings have a dozen levels at most") from None
    if wrong := list(_wrong(data, "", set())):
        raise ConfigError("\n".join(f"{where}: {said}" for said in wrong))
    return data


def _expanded(value: Any, known: dict[int, int]) -> int:
    """The values in a value, each as often as aliases name it. One that holds itself counts once."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        known[id(value)] = 1
        known[id(value)] += sum(_expanded(part, known) for part in (value.values() if isinstance(value, dict) else value))
    return known[id(value)]


def _wrong(value: Any, at: str, inside: set[int]) -> Iterator[str]:
    if isinstance(value, dict | list):
        if id(value) in inside:
            yield f"{at} holds itself; possible: a value of its own"
            return
        inside.add(id(value))
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(key, str):
                yield from _wrong(key, f"the name {key[:40]!r}", inside)
            yield from _wrong(part, f"{at}.{key}" if at else str(key), inside)
        inside.discard(id(value))
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{at} must be a finite number; got {value}"
    elif isinstance(value, int) and abs(value) > LARGEST:
        yield f"{at} must be at most {LARGEST}; got {str(value)[:40]}"
    elif isinstance(value, str) and len(value) > LONGEST:
        yield f"{at} must have at most {LONGEST} characters; got {len(value)}"
    elif isinstance(value, str) and (strange := next((c for c in value if not c.isprintable() and c not in "\n\t"), None)):
        yield f"{at} has the character {strange!r}, which is not printed; possible: letters, digits, signs and line breaks"
