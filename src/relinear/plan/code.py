"""Which code made a result: a hash over the sources a stage can reach, so that editing one method reruns that method and nothing else.

Comments and docstrings do not count; whatever changes the syntax tree does. Sources are read, never imported.
"""

import ast
import functools
import hashlib
from pathlib import Path

PACKAGES = {"relinear": Path(__file__).parents[1]}
# kernels/ lies beside src/ in the repository, and beside relinear/ where both are installed as wheels.
PACKAGES["relinear_kernels"] = next(
    p for p in (Path(__file__).parents[3] / "kernels" / "relinear_kernels", Path(__file__).parents[2] / "relinear_kernels") if p.is_dir()
)
METHODS = "relinear.attention."


def find(module: str) -> Path | None:
    """The source file of one of our modules; None for anything else."""
    package, *rest = module.split(".")
    if package not in PACKAGES:
        return None
    path = PACKAGES[package].joinpath(*rest)
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


def _without_docstrings(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                node.body[0] = ast.Pass()
    return tree


def _written(node: object) -> str:
    """A syntax tree as text, the same in every Python: later ones have more fields, which are empty in code that an earlier one reads."""
    if isinstance(node, ast.AST):
        fields = (f"{name}={_written(value)}" for name, value in ast.iter_fields(node) if value is not None and value != [])
        return f"{type(node).__name__}({', '.join(fields)})"
    return f"[{', '.join(map(_written, node))}]" if isinstance(node, list) else repr(node)


@functools.cache
def _read(path: Path) -> tuple[str, frozenset[str]]:
    """Hash of a file's syntax tree, and the modules of ours it imports."""
    tree = ast.parse(path.read_text(), str(path))
    tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")]  # annotations need no code
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
    digest = hashlib.sha256(_written(_without_docstrings(tree)).encode()).hexdigest()
    return digest, frozenset(n for n in names if find(n))


def closure(modules: list[str]) -> dict[str, Path]:
    """The modules and everything of ours they import, however far. Methods are reached only by being named: stages load them by name."""
    found: dict[str, Path] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        path = find(module)
        if path is None:
            raise ValueError(f"no module {module!r} in {', '.join(PACKAGES)}")
        if module in found:
            continue
        found[module] = path
        parents = [".".join(module.split(".")[:i]) for i in range(1, module.count(".") + 1)]
        waiting += [n for n in {*_read(path)[1], *parents} if n not in found]
    return found


def code_hash(modules: list[str]) -> str:
    """One hash over `closure(modules)`."""
    lines = sorted(f"{name} {_read(path)[0]}" for name, path in closure(modules).items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
