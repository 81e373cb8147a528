"""Tells transformers' Auto classes about linearized folders, without importing torch or transformers before
somebody else does.

`import relinear` calls `install`. A program that never imports relinear runs none of its code: it loads an
exported folder by that folder's own.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType

AUTO = "transformers.models.auto.configuration_auto"
# model_type of every class that a family covers (relinear.families); tests/test_export.py compares the two.
TEACHERS = (
    "bert",
    "gemma3_text",
    "gpt2",
    "llama",
    "mistral",
    "mpnet",
    "qwen2",
    "qwen3",
    "roberta-prelayernorm",
    "vit_of_pixels",
)


class Unloaded:
    """Stands in transformers' table of config classes for those of relinear.linearize.model, until a folder
    that needs one is loaded."""

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        """The config as the real class makes it."""
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


def _register(auto: ModuleType) -> None:
    for teacher in TEACHERS:
        if f"relinear_{teacher}" not in auto.CONFIG_MAPPING:
            auto.AutoConfig.register(f"relinear_{teacher}", Unloaded)


def install() -> None:
    """Register now where transformers' table is loaded, else once it is; any number of calls, before or after
    transformers is imported."""
    if (auto := sys.modules.get(AUTO)) is not None:
        _register(auto)
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())
