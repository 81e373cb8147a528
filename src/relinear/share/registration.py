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
# model_type of every class that a family covers (relinear.families); tests/test_export.py compares the two.
TEACHERS = ("bert", "gemma3_text", "gpt2", "llama", "mistral", "mpnet", "qwen2", "qwen3")


class Unloaded:
    """Stands in transformers' table of config classes for those of relinear.linearize.model, until a folder that needs one is loaded."""

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        """What the real class makes of it."""
        importlib.import_module("relinear.linearize.model")  # puts the real classes into the table
        return sys.modules[AUTO].CONFIG_MAPPING[config_dict["model_type"]].from_dict(config_dict, **kwargs)


class _Watch(importlib.abc.MetaPathFinder):
    """Registers as soon as the module of transformers' table was executed."""

    def find_spec(self, name, path=None, target=None):
        if name != AUTO:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = execute_and_register
        return spec


class _Half(ModuleType):
    """That module where it imports torch, which comes here, before it has its table: registers at the first look at it afterwards."""

    def __getattribute__(self, name):
        value = super().__getattribute__(name)  # AttributeError as long as there is none
        if name == "AutoConfig":
            self.__class__ = ModuleType
            _register(self)
        return value


def _register(auto: ModuleType) -> None:
    for teacher in TEACHERS:
        if f"relinear_{teacher}" not in auto.CONFIG_MAPPING:
            auto.AutoConfig.register(f"relinear_{teacher}", Unloaded)


def install() -> None:
    """Register now where transformers' table is loaded, else once it is; any number of calls, in any order with transformers.

    Never raises: an error would make `import torch` fail, so it is a warning.
    """
    try:
        auto = sys.modules.get(AUTO)
        if auto is None:
            if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
                sys.meta_path.insert(0, _Watch())
        elif hasattr(auto, "AutoConfig"):  # defined last
            _register(auto)
        else:
            auto.__class__ = _Half
    except Exception as error:
        warnings.warn(f"relinear could not register with transformers: {error}", stacklevel=2)
