"""The one reader of every YAML below `workflow/`. It refuses a name given twice and what no setting can be:
NaN, numbers beyond a float's exact integers, control characters."""

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from relinear.plan.strict import ConfigError

LARGEST = 2**53  # whole numbers up to it are exact as floats too
MOST = 10**6  # names and values of a file, each as often as aliases name it
LONGEST = 4096  # characters of a text or a name


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
        names = [
            key.value
            for key, _ in node.value
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge"
        ]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise yaml.YAMLError(
                f"{', '.join(map(repr, twice))} stands there twice, line {node.start_mark.line + 1} on"
            )


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds.

    Raises ConfigError for a file that is missing, empty, no UTF-8, no YAML or no mapping, for a name given
    twice, and naming each value that no setting has.
    """
    where = f"{path.parent.name}/{path.name}"
    if not path.is_file():
        have = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml"))) or "none"
        raise ConfigError(f"no {where}; {path.parent.name} has {have}")
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)  # noqa: S506, a SafeLoader
        values = list(islice(_values(data, ""), MOST + 1))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise ConfigError(
            f"{where} is nested too deep, or holds itself; settings have a dozen levels at most"
        ) from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date
        raise ConfigError(f"{where} is not YAML: {' '.join(str(error).split())}") from None
    if len(values) > MOST:
        raise ConfigError(f"{where}: its aliases stand for more than {MOST} values")
    if wrong := [f"{where}: {at} {said}" for at, value in values if (said := _refused(value))]:
        raise ConfigError("\n".join(wrong))
    if data is None:
        raise ConfigError(f"{where} is empty; it must hold names with their settings")
    if not isinstance(data, dict):
        raise ConfigError(f"{where} must hold names with their settings; got a {type(data).__name__}")
    return data


def _values(value: Any, at: str) -> Iterator[tuple[str, Any]]:
    """Every name and every value that is no collection, with where each stands."""
    if not isinstance(value, dict | list):
        yield at, value
        return
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(key, str):
            yield f"the name {key[:40]!r}", key
        yield from _values(part, f"{at}.{key}" if at else str(key))


def _refused(value: Any) -> str:
    """Why no setting has a value; empty where one may."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"must be a finite number; got {value}"
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"must be at most {LARGEST}; got {str(value)[:40]}"
    if isinstance(value, str) and len(value) > LONGEST:
        return f"must have at most {LONGEST} characters; got {len(value)}"
    strange = (
        next((c for c in value if not c.isprintable() and c not in "\n\t"), None)
        if isinstance(value, str)
        else None
    )
    return (
        f"has the character {strange!r}, which is not printed; possible: letters, digits, signs and line"
        " breaks"
        if strange
        else ""
    )
