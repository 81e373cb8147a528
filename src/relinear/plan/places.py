"""Where readings are looked up: the axes of a metric's readings, and the places in which the file beside a
spec finds the numbers that claims compare. They are read from sources, so that a misspelt place is an error
before any work, and no empty cell after it."""

import functools
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from relinear.plan.near import possible
from relinear.plan.options import definitions
from relinear.plan.strict import ConfigError

BAND = re.compile(r"\d+-\d+")
PLACES = "PLACES"
AXES_ARE = "a dict of axes, each with its values or an example of them"
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
    where it has none. Raises ConfigError for a constant of another form."""
    said = _constant(file, "AXES")
    if said is not None and not _are_axes(said):
        raise ConfigError(f"{_name(file)}: AXES is {AXES_ARE}; got {str(said)[:80]}")
    return said or {}


def script_places(file: Path) -> Places | None:
    """What `PLACES` of a file beside a spec says; None where there is no such constant.

    Raises ConfigError for a file that is no Python, and for a constant of another form.
    """
    said = _constant(file, PLACES)
    if said is None:
        return None
    if (
        not isinstance(said, dict)
        or said.keys() != set(PARTS)
        or not all(_are_many(said[part]) for part in PARTS)
        or not _are_axes(said["axes"])
    ):
        raise ConfigError(
            f"{_name(file)}: {PLACES} is a dict of {', '.join(PARTS)}: names, names, and {AXES_ARE}; got"
            f" {str(said)[:80]}"
        )
    return Places(tuple(said["rows"]), tuple(said["columns"]), said["axes"])


def _constant(file: Path, name: str) -> Any:
    """A constant of a file; None where it has none. Raises ConfigError where it cannot be read."""
    try:
        return getattr(definitions(file), name, None)
    except SyntaxError as error:
        raise ConfigError(f"{_name(file)}, line {error.lineno}: {error.msg}") from None
    except (NameError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{_name(file)}: {name} cannot be read before any library is imported: {error}; possible: what"
            " the file itself defines"
        ) from None


def _name(file: Path) -> str:
    return f"{file.parent.name}/{file.name}"


def _are_axes(said: Any) -> bool:
    """Whether each axis has values, or a number or a text as an example of them."""
    return isinstance(said, Mapping) and all(
        _are_many(such) or type(such) in (int, float, str) for such in said.values()
    )


def _are_many(said: Any) -> bool:
    return isinstance(said, Collection) and not isinstance(said, str)


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
