"""From a teacher to a linearized model, and from stage folders back to one. The package is the function, too:
`relinear.linearize(model, ...)`."""

import importlib
import sys
from types import ModuleType


class _Package(ModuleType):
    """This package as a function: once one of its modules is imported, `relinear.linearize` is the package,
    and users call that name."""

    def __call__(self, model, method: str, **given):
        """`relinear.linearize.model.linearize`."""
        return importlib.import_module(f"{__name__}.model").linearize(model, method, **given)


sys.modules[__name__].__class__ = _Package
