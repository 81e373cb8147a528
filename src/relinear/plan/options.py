"""Names of the options of methods and metrics, the parts of methods and what metrics need, read from their source: a wrong one is an error before
torch loads."""

import ast
import functools
from collections.abc import Iterable
from pathlib import Path

from relinear.plan.strict import ConfigError


def check_names(file: Path, given: Iterable[str], where: str, also: tuple[str, ...] = ()) -> None:
    """Raise ConfigError for options that class `Options` of a method's or a metric's file does not have. Values are checked when it runs."""
    have = [*option_names(file), *also]
    if unknown := [name for name in given if name not in have]:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; possible: {', '.join(have) or 'none'}")


@functools.cache
def option_names(file: Path) -> tuple[str, ...]:
    """The fields of class `Options` in a file, with those of its base classes there and in the files beside it that begin with `_`."""
    classes: dict[str, ast.ClassDef] = {}
    for path in (*sorted(file.parent.glob("_*.py")), file):
        if path.is_file():
            prefix = "" if path == file else f"{path.stem}."
            classes |= {prefix + node.name: node for node in _classes(path)}
    return tuple(_fields("Options", classes))


@functools.cache  # the files that begin with `_` are read for each of the others
def _classes(path: Path) -> list[ast.ClassDef]:
    return [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]


@functools.cache
def part_names(file: Path) -> tuple[str, ...]:
    """What a method's file lists as the `PARTS` of its class `Method`, which can be switched off; nothing where it lists none."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    [kind] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Method"]
    found = [n.value for n in kind.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "PARTS"]
    return ast.literal_eval(found[0]) if found else ()


# What `NEEDS` of a metric's file may list: `next_token`, models that predict it; `documents`, data that are whole documents; `tasks`, the files of
# workflow/tasks that its options name.
POSSIBLE_NEEDS = ("next_token", "documents", "tasks")


@functools.cache
def metric_needs(file: Path) -> tuple[str, ...]:
    """What a metric's file lists as `NEEDS`; nothing where it lists none. Raises ConfigError for what there is not. It says which runs and data the
    metric can be asked of, and not what it measures, so no key counts it (`relinear.plan.code`)."""
    found = [n.value for n in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "NEEDS"]
    needs = ast.literal_eval(found[0]) if found else ()
    if unknown := [need for need in needs if need not in POSSIBLE_NEEDS]:
        raise ConfigError(f"measure/{file.name}: NEEDS has {unknown[0]!r}; possible: {', '.join(POSSIBLE_NEEDS)}")
    return needs


def _fields(name: str, classes: dict[str, ast.ClassDef]) -> dict[str, None]:
    if name not in classes:
        return {}
    node, found, beside = classes[name], {}, name.rpartition(".")[0]
    for base in node.bases:
        text = ast.unparse(base)  # `_file.Name`; or a name of the same file, or one that is imported from `_base`
        same = f"{beside}.{text}" if beside else text
        found |= _fields(text if "." in text else same if same in classes else f"_base.{text}", classes)
    own = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    return found | dict.fromkeys(own)
