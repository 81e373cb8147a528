"""Where readings are looked up: the names, objects and axes of a metric's readings, and the places in which
the file beside a spec finds the numbers that claims compare. They are read from sources, so that a misspelt
place is an error before any work, and no empty cell after it."""

import ast
import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from relinear.plan.code import closure
from relinear.plan.near import possible
from relinear.plan.options import definitions
from relinear.plan.strict import ConfigError

BAND = re.compile(r"\d+-\d+")
PLACES = "PLACES"
PARTS = ("rows", "columns", "axes")


class Places(NamedTuple):
    """What the `look` of a file beside a spec finds: the rows and columns that a point may name, and its
    axes, each with its values or an example of them."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    axes: Mapping[str, Any]


@functools.cache
def metric_axes(file: Path) -> Mapping[str, Any]:
    """The axes of a metric's readings: its constant `AXES`, each with its values or an example of them; none
    where it has none."""
    return getattr(definitions(file), "AXES", {})


@functools.cache
def metric_words(metric: str) -> frozenset[str]:
    """All that a metric's file, and those of `measure/` that it imports, write between quotes: an object of
    its readings is one of these, or is named by the catalogue or by the measure's options."""
    files = closure([f"relinear.measure.{metric}"])
    return frozenset().union(*(_words(file) for module, file in files.items() if ".measure." in module))


@functools.cache
def _words(file: Path) -> frozenset[str]:
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return frozenset(
        node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def script_places(file: Path) -> Places | None:
    """What `PLACES` of a file beside a spec says; None where there is no such constant.

    Raises ConfigError for a file that is no Python, and for a constant of another form.
    """
    where = f"{file.parent.name}/{file.name}"
    try:
        said = getattr(definitions(file), PLACES, None)
    except SyntaxError as error:
        raise ConfigError(f"{where}, line {error.lineno}: {error.msg}") from None
    except (NameError, ValueError) as error:
        raise ConfigError(
            f"{where}: {PLACES} cannot be read before any library is imported: {error}; possible: what the"
            " file itself defines"
        ) from None
    if said is None:
        return None
    if not isinstance(said, dict) or sorted(said) != sorted(PARTS):
        raise ConfigError(f"{where}: {PLACES} is a dict of {', '.join(PARTS)}; got {str(said)[:80]}")
    return Places(tuple(said["rows"]), tuple(said["columns"]), said["axes"])


def check_value(axis: str, value: Any, such: Any, where: str = "", other: str = "") -> None:
    """Raise ValueError for a value that an axis cannot have. `such`: the axis' values, or an example: a
    number, or a band such as "64-128". `other`: what the axis can have beside these, for the error."""
    if not isinstance(such, int | float | str):
        if isinstance(value, bool) or value not in such:
            raise ValueError(f"{where}no {axis} {value!r}; {possible(value, such)}")
    elif isinstance(such, str):
        if not isinstance(value, str) or not BAND.fullmatch(value):
            raise ValueError(f"{where}{axis} is a band such as {such!r}{other}; got {value!r}")
    elif type(value) not in (int, type(such)) or not 0 <= value < math.inf:
        whole = "whole " * isinstance(such, int)
        raise ValueError(f"{where}{axis} is a {whole}number such as {such}{other}; got {value!r}")


def check_axes(at: Mapping[str, Any], axes: Mapping[str, Any]) -> None:
    """Raise ValueError for an axis that there is not, and for a value that an axis cannot have. A value of
    None is all of an axis."""
    for axis, value in at.items():
        if axis not in axes:
            raise ValueError(f"no axis {axis!r}; {possible(axis, axes)}")
        if value is not None:
            check_value(axis, value, axes[axis])


def check_point(row: str, column: str | None, at: Mapping[str, Any], places: Places) -> None:
    """Raise ValueError for a point at which the file beside a spec finds nothing: each axis is needed."""
    for kind, name, have in (("row", row, places.rows), ("column", column, places.columns)):
        if name not in have:
            raise ValueError(f"no {kind} {name!r}; {possible(name, have)}")
    check_axes(at, places.axes)
    if places.axes.keys() - at.keys():
        raise ValueError(f"{row} needs `at` with {', '.join(places.axes)}; got {dict(at) or 'none'}")
