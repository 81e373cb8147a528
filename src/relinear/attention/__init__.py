"""The attention methods. One method, one file: the folder is the registry, and `load("hedgehog")` is
`attention/hedgehog.py`.

A file `attention/<name>.py` that defines one `Attention` subclass named `Method` is a method; nothing else
registers it.
"""

import importlib
from pathlib import Path

__all__ = ["available", "check", "load", "options"]


def available() -> list[str]:
    """Names of all methods, without importing them."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("_"))


def check(name: str) -> str:
    """Return the name of a method. Raises ValueError, naming the possible ones, for any other."""
    if name not in available():
        raise ValueError(f"no attention method {name!r}; have {', '.join(available())}")
    return name


def load(name: str) -> type:
    """The method's class. A broken import inside the method's file surfaces as itself."""
    return importlib.import_module(f"{__name__}.{check(name)}").Method


def options(name: str, given: dict | None = None):
    """The method's validated options. An unknown key or value is an error that names the possible ones."""
    return load(name).Options.parse(name, given or {})
