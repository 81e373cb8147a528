"""The families of models, one file each: how they are opened or made, and where their attention lies. The
file's name is the family's.

Imports neither torch nor transformers; a family does.
"""

import functools
import importlib
from pathlib import Path

from relinear.errors import UserError

__all__ = ["available", "load", "of"]


def available() -> list[str]:
    """Names of all families, without importing them."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("_"))


def load(name: str):
    """The `_family.Family` of a name. Raises UserError for an unknown one; a broken import inside the
    family's file surfaces as itself."""
    if name not in available():
        raise UserError(f"no family {name!r}; have {', '.join(available())}")
    return importlib.import_module(f"{__name__}.{name}").Family()


@functools.cache
def of(model_class: type):
    """The `_family.Family` that covers a transformers class. Imports families one by one until it is found.
    Raises UserError where none does."""
    for family in map(load, available()):
        if model_class in family.classes:
            return family
    covered = "; ".join(
        f"{f.name}: {', '.join(c.__name__ for c in f.classes)}" for f in map(load, available()) if f.classes
    )
    raise UserError(f"no family covers {model_class.__name__}; covered are {covered}")
