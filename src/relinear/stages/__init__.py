"""The work of each stage, without torch. One stage, one file: the folder is the registry, `load("distill")`
is `stages/distill.py`.

A file defines one subclass of `_stage.Stage` named `Stage` and, where people write settings for it, a
pydantic model named `Options`.
"""

import functools
import importlib
from pathlib import Path
from types import ModuleType
from typing import Literal


@functools.cache
def available() -> tuple[str, ...]:
    """Names of all stages."""
    return tuple(sorted(p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("_")))


def load(name: str) -> ModuleType:
    """The module of a stage. Raises ValueError naming the possible ones."""
    if name not in available():
        raise ValueError(f"no stage {name!r}; have {', '.join(available())}")
    return importlib.import_module(f"{__name__}.{name}")


@functools.cache
def makers() -> dict[str, str]:
    """Kinds of data, as `make` of data.yaml says them -> the file here with their Options.

    Each stage that has Options and trains nothing makes the kind of its name. `items` are read where they
    lie.
    """
    return {"items": "_items"} | {
        name: name for name in available() if not stage(name).trains and hasattr(load(name), "Options")
    }


@functools.cache
def texts() -> tuple[str, ...]:
    """Kinds of data in a model's tokens, which the stage of that name makes for a model's vocabulary."""
    return tuple(name for name in makers() if name in available() and stage(name).tokens)


def data_options(make: str) -> type:
    """The settings of a kind of data."""
    return importlib.import_module(f"{__name__}.{makers()[make]}").Options


@functools.cache
def stage(name: str):
    """The stage itself."""
    return load(name).Stage()


def makes(make: str, kind: Literal["labelled", "pictures"]) -> bool:
    """Whether the data that an entry's `make` names are of a kind, as the stage that makes them says."""
    return make in available() and getattr(stage(make), kind)


@functools.cache
def training() -> tuple[str, ...]:
    """Names of the stages that a run's `steps` may have."""
    return tuple(name for name in available() if stage(name).trains)
