"""Converters of a package's files to plain text, one file each: `convert(data) -> (text, bytes of text that
it has)`. The folder is the registry.

An entry of data.yaml with `make: corpus` names the converter of each source.
"""

import importlib
import re
from pathlib import Path
from types import ModuleType

# names of files that say a licence and are no documents
LICENCE = re.compile(r"copyright|licen[cs]e|copying", re.IGNORECASE)


def available() -> list[str]:
    """Names of all converters."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("_"))


def load(name: str) -> ModuleType:
    """The module of a converter."""
    return importlib.import_module(f"{__name__}.{name}")
