"""The hash of the code that made a result: it covers the sources that a stage can reach, so that editing one
method reruns that method and nothing else.

Comments, docstrings, the words of errors that are raised, a metric's `NEEDS`, `YIELDS` and `AXES`, and
`__version__` do not count; whatever else changes the syntax tree does. Sources are read, never imported.

An operation of relinear_kernels counts by its definition and its chunked torch form, `<op>_reference`: tests
hold every other form to them. Which code computes it on a GPU is another hash (`kernel_hashes`), which is
recorded and reruns nothing.
"""

import ast
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from relinear.plan.sources import PACKAGES as PACKAGES
from relinear.plan.sources import find

METHODS = "relinear.attention."
# constants of a metric that only the plan reads, to refuse what there cannot be; the package's
UNCOUNTED = ("NEEDS", "YIELDS", "AXES", "__version__")
KERNELS = "relinear_kernels"
# of this module as it was imported: a process that goes on beside an edit of it keeps facts under the old one
RULES = hashlib.sha256(Path(__file__).read_bytes()).digest()


def _without_words(tree: ast.AST) -> ast.AST:
    """The tree without docstrings, without the text of each error that is raised, and without the `UNCOUNTED`
    constants: no result depends on these."""
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in UNCOUNTED)
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            node.exc.args = [argument for argument in node.exc.args if not _is_text(argument)]
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                node.body = node.body[1:] or [ast.Pass()]  # as if it had never had a docstring
    return tree


def _is_text(node: ast.expr) -> bool:
    """Whether an expression is a string as it stands there: quoted, with {fields}, or several of these added
    up."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Add) and (_is_text(node.left) or _is_text(node.right))
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _written(node: object) -> str:
    """A syntax tree as text, the same in every Python: later ones have more fields, which are empty in code
    that an earlier one reads."""
    if isinstance(node, ast.AST):
        fields = (
            f"{name}={_written(value)}"
            for name, value in ast.iter_fields(node)
            if value is not None and value != []
        )
        return f"{type(node).__name__}({', '.join(fields)})"
    return f"[{', '.join(map(_written, node))}]" if isinstance(node, list) else repr(node)


@functools.cache
def _public(path: Path) -> dict[str, str]:
    """Public name of relinear_kernels -> its module there, from the table in the package's source."""
    [table] = [
        n.value
        for n in ast.parse(path.read_text()).body
        if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "MODULES"
    ]
    return ast.literal_eval(table)


def home(module: str, name: str) -> str:
    """The module that defines the name of `from module import name`. Names of relinear_kernels are fetched
    from its modules."""
    place = _public(find(KERNELS)).get(name) if module == KERNELS else None
    return f"{KERNELS}.{place}" if place else module


def definition(module: str) -> str:
    """`<op>_reference` where the module is an operation of relinear_kernels, else the module itself."""
    reference = f"{module}_reference"
    return reference if module.startswith(f"{KERNELS}.") and find(reference) else module


class Facts(NamedTuple):
    """Of a source file: the `digest` of its syntax tree, its `imports` as pairs of a module and a name of
    it (None for `import module`), and whether it may call any operation of relinear_kernels."""

    digest: str
    imports: list[tuple[str, str | None]]
    any_kernel: bool


def _facts(path: Path) -> Facts:
    """The facts of a file, as they were kept beside its compiled form where neither the file nor this module
    has changed since: a command asks for those of 140 files, whose trees take most of a second of a core."""
    source = path.read_bytes()
    of = hashlib.sha256(RULES + source).hexdigest()
    kept = Path(importlib.util.cache_from_source(str(path))).with_suffix(".json")
    with suppress(OSError, ValueError, TypeError, KeyError):  # there is none, or it is damaged
        found = json.loads(kept.read_text())
        if found["of"] == of:
            return Facts(*(found[field] for field in Facts._fields))
    facts = _facts_of(ast.parse(source, str(path)))
    if not sys.dont_write_bytecode:
        unfinished = kept.with_name(f".{kept.name}.{os.getpid()}")
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps({"of": of, **facts._asdict()}))
            os.replace(unfinished, kept)
        except OSError:  # a folder that is not ours to write to, or a full disk
            with suppress(OSError):
                unfinished.unlink()
    return facts


def _facts_of(tree: ast.Module) -> Facts:
    imports: set[tuple[str, str | None]] = set()
    any_kernel = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports |= {(a.name, None) for a in node.names}
            any_kernel |= any(
                f"{a.name}.".startswith(f"{KERNELS}.") and not (a.asname and "." in a.name)
                for a in node.names
            )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imports |= {(node.module, a.name) for a in node.names}
    digest = hashlib.sha256(_written(_without_words(tree)).encode()).hexdigest()
    return Facts(digest, sorted(imports, key=str), any_kernel)


@functools.cache
def _read(path: Path) -> tuple[str, frozenset[str]]:
    """Hash of a file's syntax tree, and the modules of ours it imports: for annotations and within functions
    too."""
    facts, names = _facts(path), set[str]()
    for module, name in facts.imports:
        names |= {module} if name is None else {home(module, name), f"{module}.{name}"}
    if facts.any_kernel:  # the package itself is imported
        names |= {home(KERNELS, name) for name in _public(find(KERNELS))}
    return facts.digest, frozenset(n for n in names if find(n))


def _reached(modules: Iterable[str], meet: Callable[[str], str]) -> dict[str, Path]:
    """The modules and everything of ours they import, however far, with `meet(module)` in the place of
    each."""
    found: dict[str, Path] = {}
    waiting = list(modules)
    while waiting:
        module = meet(waiting.pop())
        if module in found or module == KERNELS:  # the package does nothing but fetch names from its modules
            continue
        path = find(module)
        if path is None:
            raise ValueError(f"no module {module!r} in {', '.join(PACKAGES)}")
        found[module] = path
        parents = [".".join(module.split(".")[:i]) for i in range(1, module.count(".") + 1)]
        waiting += {*_read(path)[1], *parents}
    return found


def _hash(found: dict[str, Path]) -> str:
    lines = sorted(f"{name} {_read(path)[0]}" for name, path in found.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def closure(modules: list[str]) -> dict[str, Path]:
    """The modules and everything of ours they import, however far, operations by their definitions.
    ValueError where one does not exist.

    Methods are reached only by being named: stages load them by name.
    """
    return _reached(modules, definition)


def code_hash(modules: list[str]) -> str:
    """One hash over `closure(modules)`."""
    return _hash(closure(modules))


def kernel_hashes(modules: list[str]) -> dict[str, str]:
    """Operation -> one hash over the module that dispatches it and all it imports, of every operation that
    `closure(modules)` calls.

    This is the code that computes it on a GPU: its Triton kernels and all they share, beside its definition.
    """
    imported = {
        *modules,
        *itertools.chain.from_iterable(_read(path)[1] for path in closure(modules).values()),
    }
    ops = sorted(m for m in imported if definition(m) != m)
    return {op.rpartition(".")[2]: _hash(_reached([op], str)) for op in ops}
