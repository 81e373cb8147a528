"""Tells transformers' Auto classes about linearized folders, without importing torch or transformers before somebody else does.

`import relinear` calls `install`. lm-eval and other programs that never import relinear reach it through torch's entry points for
backends (`autoload`, see pyproject.toml): of lm-eval, transformers and torch, only torch calls plugins on its own.
"""

import importlib
import importlib.abc
import importlib.util
import sys
import warnings
from types import ModuleType

AUTO = "transformers.models.auto.configuration_auto"
# model_type of every teacher; relinear.model has their classes, and tests/test_export.py compares the two.
TEACHERS = ("gemma3_text", "gpt2", "llama", "mistral", "qwen2", "qwen3")


class Unloaded:
    """Stands in transformers' table of config classes for those of relinear.model, until a folder that needs one is loaded."""

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        """What the real class makes of it."""
        importlib.import_module("relinear.model")  # puts the real classes into the table
        return sys.modules[AUTO].CONFIG_MAPPING[config_dict["model_type"]].from_dict(config_dict, **kwargs)


class _Watch(importlib.abc.MetaPathFinder):
    """Registers as soon as transformers' table exists."""

    def find_spec(self, name, path=None, target=None):
        if name != AUTO:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = execute_and_register
        return spec


def _register(auto: ModuleType) -> None:
    for teacher in TEACHERS:
        if f"relinear_{teacher}" not in auto.CONFIG_MAPPING:
            auto.AutoConfig.register(f"relinear_{teacher}", Unloaded)


def install() -> None:
    """Register now where transformers is loaded, else once it is. Any number of calls, in any order with transformers."""
    if AUTO in sys.modules:
        _register(sys.modules[AUTO])
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def autoload() -> None:
    """`install` for torch's entry point: an error here would make `import torch` fail, so it is a warning."""
    try:
        install()
    except Exception as error:  # noqa: BLE001
        warnings.warn(f"relinear could not register with transformers: {error}", stacklevel=2)
