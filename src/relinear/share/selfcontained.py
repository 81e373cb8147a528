"""The code of a linearized model as a few flat files, generated from our own sources, for
`trust_remote_code=True` without relinear.

transformers copies the files that a modeling file imports relatively, from one folder. So each of our modules
that the model reaches becomes one file: only the top-level statements it reaches, with imports made relative,
the kernels' torch form for the dispatched one, and a stand-in for pydantic and jaxtyping. Needs torch,
transformers and safetensors.
"""

import ast
import functools
from collections import defaultdict
from pathlib import Path

from transformers import PreTrainedModel

from relinear.plan.code import definition, home
from relinear.plan.sources import find

MAIN = "modeling_relinear"
STAND_INS = "stand_ins"
METHODS = '''"""The attention methods of this model."""

{imports}

METHODS = {{{table}}}


def load(name: str) -> type:
    """The method's class."""
    if name not in METHODS:
        raise ValueError(f"no attention method {{name!r}} in this folder; have {{', '.join(METHODS)}}")
    return METHODS[name]


def options(name: str, given: dict | None = None):
    """The method's options."""
    return load(name).Options.parse(name, given or {{}})
'''


def write_code(model: PreTrainedModel, folder: Path) -> None:
    """Write the files into `folder`, and name them in the `auto_map` of the model's config."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = model.config.relinear
    config = type(model.config).__name__
    teacher_class = type(model).__bases__[1]
    teacher, place = teacher_class.__name__, "transformers"
    methods = sorted({recipe["method"], *(["softmax"] if recipe.get("keep_softmax_layers") else [])})
    swapped = model.layout.swapped
    wanted = {
        "relinear.linearize.model": {"_classes"},
        "relinear.families._layer": {"Layout"},
        **{f"relinear.attention.{m}": {"Method"} for m in methods},
    }
    wanted[swapped.__module__] = wanted.get(swapped.__module__, set()) | {swapped.__name__}
    if find(teacher_class.__module__):  # a class of ours, which transformers has not
        wanted[teacher_class.__module__] = wanted.get(teacher_class.__module__, set()) | {teacher}
        place = f".{teacher_class.__module__.rpartition('.')[2]}"
    for name, text in generate(wanted).items():
        (folder / f"{name}.py").write_text(text)
    imports = "\n".join(f"from .{m} import Method as {m}" for m in methods)
    table = ", ".join(f'"{m}": {m}' for m in methods)
    (folder / "attention.py").write_text(METHODS.format(imports=imports, table=table))
    layout = ", ".join(
        f"{name}={value.__name__ if value is swapped else repr(value)}"
        for name, value in model.layout._asdict().items()
    )
    (folder / f"{STAND_INS}.py").write_text(find("relinear.share._stand_ins").read_text())
    (folder / f"{MAIN}.py").write_text(
        f'"""A linearized {teacher}: this folder\'s model without relinear, made by `relinear export`."""\n\n'
        f"from {place} import {teacher}\n\nfrom .{swapped.__module__.rpartition('.')[2]} import"
        f" {swapped.__name__}\n"
        f"from ._layer import Layout\nfrom .model import _classes\n\n"
        f"layout = Layout({layout})\n{config}, {type(model).__name__} = _classes({teacher}, layout)\n"
        f"{config}.__module__ = {type(model).__name__}.__module__ = __name__\n"
    )
    auto = "AutoModelForCausalLM" if model.causal else "AutoModel"
    model.config.auto_map = {"AutoConfig": f"{MAIN}.{config}", auto: f"{MAIN}.{type(model).__name__}"}


def generate(wanted: dict[str, set[str]]) -> dict[str, str]:
    """File name -> text, of every module that the wanted names (module -> top-level names) reach. ValueError
    where two have one name."""
    wanted = defaultdict(set, {module: set(names) for module, names in wanted.items()})
    files: dict[str, str] = {}
    waiting = list(wanted)
    while waiting:
        module = waiting.pop()
        text, needs = _reduced(module, wanted[module])  # reduced again if more of it is wanted later
        files[module] = text
        for other, names in needs:
            if not names <= wanted[other]:
                wanted[other] |= names
                waiting.append(other)
    flat = {module.rpartition(".")[2]: text for module, text in files.items()}
    if len(flat) < len(files):
        raise ValueError(f"two modules of one name cannot lie in one folder; got {', '.join(sorted(files))}")
    return flat


def _reduced(module: str, wanted: set[str]) -> tuple[str, list[tuple[str, set[str]]]]:
    """A module's text, reduced to what `wanted` reaches ("*": all), and the names it needs of other modules
    of ours."""
    source = find(module).read_text()
    (tree, defined), lines = _parsed(source), source.splitlines()
    waiting, kept = list(defined if "*" in wanted else wanted), set()
    while waiting:
        name = waiting.pop()
        if name in defined and name not in kept:
            kept.add(name)
            if not isinstance(defined[name], ast.Import | ast.ImportFrom):
                waiting += [n.id for n in ast.walk(defined[name]) if isinstance(n, ast.Name)]
    parts, needs = [f'"""{ast.get_docstring(tree, clean=False)}"""'], []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) in kept:
                    text, need = _import(node, alias)
                    parts.append(text)
                    needs += need
        elif kept & _defined(node):
            parts.append(
                "\n\n" + _text(node, lines)
                if isinstance(node, ast.ClassDef | ast.FunctionDef)
                else _text(node, lines)
            )
    return "\n".join(parts) + "\n", needs


@functools.cache
def _parsed(source: str) -> tuple[ast.Module, dict[str, ast.stmt]]:
    """A module's tree, and its top-level names -> the statement that binds each. Nobody changes them."""
    tree = ast.parse(source)
    return tree, {name: node for node in tree.body for name in _defined(node)}


def _defined(node: ast.stmt) -> set[str]:
    """The names that a top-level statement binds."""
    match node:
        case ast.Import() | ast.ImportFrom():
            return {a.asname or a.name for a in node.names}
        case ast.FunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.Assign():
            return {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        case ast.AnnAssign():
            return {node.target.id}
    return set()


def _text(node: ast.stmt, lines: list[str]) -> str:
    """The lines of a statement, with its decorators and the comment above it."""
    start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]) - 1
    while lines[start - 1].startswith("#"):
        start -= 1
    return "\n".join(lines[start : node.end_lineno])


def _import(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> tuple[str, list[tuple[str, set[str]]]]:
    """The import of one name as the folder has it, and what it needs of which module of ours."""
    module = getattr(node, "module", "")
    if module in ("pydantic", "jaxtyping"):
        return ast.unparse(ast.ImportFrom(STAND_INS, [alias], 1)), []
    if not module or find(module) is None:
        return ast.unparse(type(node)(**{**node.__dict__, "names": [alias]})), []
    module = home(module, alias.name)
    # a module of a package
    if alias.name not in _parsed(find(module).read_text())[1]:
        return ast.unparse(ast.ImportFrom(None, [alias], 1)), [(f"{module}.{alias.name}", {"*"})]
    module = definition(module)  # the torch form of a kernel
    needs = [] if module == "relinear.attention" else [(module, {alias.name})]  # whose functions METHODS has
    return ast.unparse(ast.ImportFrom(module.rpartition(".")[2], [alias], 1)), needs
