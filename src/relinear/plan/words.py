"""The words of a metric's sources. They are apart from `relinear.plan.places`, which specs and so drawings
import: no edit of `relinear.plan.code` draws a table or figure anew."""

import ast
import functools
from pathlib import Path

from relinear.plan.code import closure


@functools.cache
def metric_words(metric: str) -> frozenset[str]:
    """All that a metric's file, and those of `measure/` that it imports, write between quotes: an object of
    its readings is one of these, or is named by the catalogue or by the measure's options."""
    files = closure([f"relinear.measure.{metric}"])
    return frozenset().union(*(_words(file) for module, file in files.items() if ".measure." in module))


@functools.cache
def _words(file: Path) -> frozenset[str]:
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return frozenset(
        node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
