"""Where the source files of our modules lie. Sources are read, never imported."""

import functools
from pathlib import Path

PACKAGES = {"relinear": Path(__file__).parents[1]}
# kernels/ lies beside src/ in the repository, and beside relinear/ where both are installed as wheels.
PACKAGES["relinear_kernels"] = next(
    p
    for p in (
        Path(__file__).parents[3] / "kernels" / "relinear_kernels",
        Path(__file__).parents[2] / "relinear_kernels",
    )
    if p.is_dir()
)


def find(module: str) -> Path | None:
    """The source file of one of our modules; None for anything else."""
    root = PACKAGES.get(module.partition(".")[0])
    return root and _source(root, module)


@functools.cache  # each key asks for all modules that it reaches, 15,000 times in a plan of one table
def _source(root: Path, module: str) -> Path | None:
    path = root.joinpath(*module.split(".")[1:])
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)
