"""The releases of transformers that relinear is tested with; pyproject.toml has the same range, and
tests/test_releases.py runs both ends."""

import functools
import inspect
import warnings

import transformers
from transformers import GenerationMixin

OLDEST, NEWEST = (5, 17), (5, 24)
CACHE_NAMES = ("cache", "past_key_values")  # of the argument that hands a cache on: from 5.24, and before it


@functools.cache
def cache_name() -> str:
    """The installed transformers' name of the argument that hands a cache on. Raises ImportError where that
    is neither of the two."""
    taken = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    if found := [name for name in CACHE_NAMES if name in taken]:
        return found[0]
    raise ImportError(
        f"transformers {transformers.__version__} hands caches on under another name than"
        f" {' or '.join(CACHE_NAMES)}; {_possible()}"
    )


@functools.cache
def warn_untested() -> None:
    """Warn, once, where the installed transformers is older or newer than those that relinear is tested
    with."""
    if not OLDEST <= tuple(int(part) for part in transformers.__version__.split(".")[:2]) <= NEWEST:
        warnings.warn(
            f"linearized models are tested with transformers {'.'.join(map(str, OLDEST))} to"
            f" {'.'.join(map(str, NEWEST))}; got {transformers.__version__}, whose caches and generate() may"
            f" differ. {_possible()}",
            stacklevel=3,
        )


def _possible() -> str:
    return f"Possible: pip install 'transformers>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'"
