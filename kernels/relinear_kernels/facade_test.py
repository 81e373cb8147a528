"""The package's public names: fetched when asked for, and the same objects whatever was imported before."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import relinear_kernels

LOADED = (
    "[m for m in sys.modules if m.startswith('relinear_kernels.') or m in ('torch', 'triton', 'jaxtyping')]"
)
CHECK = """
for name, module in relinear_kernels.MODULES.items():
    value = getattr(importlib.import_module(f"relinear_kernels.{module}"), name)
    space = {}
    exec(f"from relinear_kernels import {name}", space)
    assert getattr(relinear_kernels, name) is value and space[name] is value, name
    assert type(sys.modules[f"relinear_kernels.{module}"]).__name__ == "module"
"""


def python(program: str) -> None:
    """Run code in a process that has imported nothing yet."""
    program = f"import importlib, sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n{program}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_nothing():
    python(
        f"import relinear_kernels\ndir(relinear_kernels), relinear_kernels.__all__\nassert not {LOADED},"
        f" {LOADED}"
    )


FIRST = (
    "import relinear_kernels",
    "from relinear_kernels import *",
    # a module of an op's name, before the op is asked for
    "from relinear_kernels.linear_attention import linear_attention",
    "import relinear_kernels.decode_step",
    "import relinear_kernels.hybrid_attention_triton",
    "for module in relinear_kernels.MODULES.values(): importlib.import_module(f'relinear_kernels.{module}')",
)
# Each in a fork of a process that has imported the libraries, which take seconds, and nothing of ours.
FORKS = """
for first in FIRST:
    if not os.fork():
        exec("import relinear_kernels\\n" + first + CHECK)
        os._exit(0)
    assert os.wait()[1] == 0, first
"""


def test_a_public_name_is_one_thing_whatever_was_imported_first():
    triton = importlib.util.find_spec("triton") is not None
    libraries = "jaxtyping, os, torch, triton" if triton else "jaxtyping, os, torch"
    first = [line for line in FIRST if triton or "triton" not in line]
    python(f"import {libraries}\nFIRST, CHECK = {first!r}, {CHECK!r}\n{FORKS}")


def test_a_name_that_is_not_public_is_an_error_that_says_which_are():
    with pytest.raises(AttributeError, match="no attribute 'nothing'; have DeltaState, .*window_state"):
        _ = relinear_kernels.nothing
    with pytest.raises(ImportError, match="nothing"):
        from relinear_kernels import nothing  # noqa: F401
