"""Tells transformers' Auto classes about linearized folders, without importing torch or transformers before somebody else does.

`import relinear` calls `install`, and so does torch, for the sake of programs that never import relinear, such as lm-eval: of lm-eval,
transformers and torch only torch calls plugins on its own (its entry points for backends, see pyproject.toml).
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from types import ModuleType

AUTO = "transformers.models.auto.configuration_auto"
# model_type of every teacher; relinear.model has their classes, and tests/test_export.py compares the two.
TEACHERS = ("llama", "mistral", "qwen2", "qwen3")


class Unloaded:
    """Stands in transformers' table of config classes for those of relinear.model, until a folder that needs one is loaded."""

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        """What the real class makes of it."""
        importlib.import_module("relinear.model")  # puts the real classes into the table
        return sys.modules[AUTO].CONFIG_MAPPING[config_dict["model_type"]].from_dict(config_dict, **kwargs)


class _Watch(importlib.abc.MetaPathFinder):
    """Registers as soon as transformers' table exists. Finds nothing by itself."""

    def find_spec(self, name, path=None, target=None):
        if name != AUTO:
            # Torch is imported in the midst of the table's module where that comes first; the next import then finds the table there.
            _register()
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register()

        spec.loader.exec_module = execute_and_register
        return spec


def _register() -> None:
    auto = sys.modules.get(AUTO)
    if hasattr(auto, "AutoConfig"):  # defined last: the module is whole
        for teacher in TEACHERS:
            if f"relinear_{teacher}" not in auto.CONFIG_MAPPING:
                auto.AutoConfig.register(f"relinear_{teacher}", Unloaded)


def install() -> None:
    """Register now where transformers is loaded, else once it is; any number of calls, in any order with transformers.

    Never raises: an error would make `import torch` fail, so it is a warning.
    """
    try:
        _register()
        if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Watch())
    except Exception as error:
        warnings.warn(f"relinear could not register with transformers: {error}", stacklevel=2)
