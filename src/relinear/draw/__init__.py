"""Tables and figures: metrics files in, artefact out; no training, no network.

The folder is the registry. `papers/<paper>.py` offers `read(path)` for its `workflow/papers/<paper>.yaml`
and one function per table or figure, named as the target is (`table1`, `figure3`). Adding a paper is that
YAML, a rules file and that module.
"""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType


def available() -> list[str]:
    """Names of the papers, one per module of this folder; a leading underscore marks shared code."""
    return sorted(module.name for module in iter_modules(__path__) if not module.name.startswith("_"))


def load(name: str) -> ModuleType:
    """The module of a paper. Raises ValueError, naming the papers there are, if there is no such paper."""
    if name not in available():
        raise ValueError(f"no paper {name!r}; have {available()}")
    return import_module(f"{__name__}.{name}")
