"""The options of methods and metrics, the parts of methods and what metrics need, read from their source: a
wrong one is an error before torch loads."""

import ast
import functools
import importlib
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from relinear.plan.finite import parse
from relinear.plan.sources import PACKAGES, find
from relinear.plan.strict import ConfigError, Strict

KEEP = "keep_softmax_layers"  # an option of `relinear.linearize`, for every method
MAKES_PARAMETERS = re.compile(r"\bnn\.[A-Z]|\bParameter\b|\btorch\.nn import")  # in a method's file


@functools.cache
def method_file(method: str) -> Path:
    """The file of a method: what it offers is read from it before anything imports torch."""
    return PACKAGES["relinear"] / "attention" / f"{method}.py"


@functools.cache
def metric_file(metric: str) -> Path:
    """The file of a metric."""
    return PACKAGES["relinear"] / "measure" / f"{metric}.py"


def check_names(file: Path, given: Iterable[str], where: str, also: tuple[str, ...] = ()) -> None:
    """Raise ConfigError for options that class `Options` of a method's or a metric's file does not have."""
    have = [*option_names(file), *also]
    if unknown := [name for name in given if name not in have]:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; possible: {', '.join(have) or 'none'}")


class SourceError(ConfigError):
    """A file of a method or a metric that cannot be read as it stands: it is no Python, has no class
    `Method`, or its class `Options` needs a library."""


def _tree(file: Path) -> ast.Module:
    """The syntax tree of a method's or a metric's file. Raises SourceError for one that is no Python."""
    try:
        return ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:  # the second where there are null bytes
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        said = error.msg if isinstance(error, SyntaxError) else error
        raise SourceError(f"{file.parent.name}/{file.name}{line} is no Python: {said}") from None


def check_values(file: Path, given: Mapping[str, Any], where: str, partial: bool = False) -> None:
    """Raise ConfigError for options that class `Options` of a method's or a metric's file refuses: names,
    kinds, bounds, and what does not fit.

    `partial`: another place may give what is not given here.
    """
    try:
        parse(schema(file), dict(given), where, partial)
    except NameError as error:  # in a validator
        raise _unreadable(file, error) from None


def _unreadable(file: Path, error: NameError) -> SourceError:
    """The error for a name that class `Options` uses and that is not there when the class is read."""
    return SourceError(
        f"{file.parent.name}/{file.name}: class Options, or what it is made of, uses {error.name!r}, which is"
        " not there when options are read: that is before any library is imported. Possible there: names"
        f" that the file defines, Python's own modules, pydantic and relinear.plan. Use {error.name!r} within"
        " the functions that compute"
    )


def option_names(file: Path) -> tuple[str, ...]:
    """The fields of class `Options` in a file."""
    return tuple(schema(file).model_fields)


@functools.cache
def option_defaults(file: Path) -> dict[str, Any]:
    """The fields of class `Options` in a file that have a default other than None: field -> value."""
    fields = schema(file).model_fields.items()
    return {
        name: field.default for name, field in fields if not field.is_required() and field.default is not None
    }


@functools.cache
def schema(file: Path) -> type[Strict]:
    """The class `Options` of a method's or a metric's file, as Python has it. Of the file, and of those of
    ours that it imports, only the definitions that the class needs are carried out, so that nothing imports
    torch."""
    try:
        return getattr(definitions(file), "Options", Strict)  # a method that has none takes none
    except NameError as error:
        raise _unreadable(file, error) from None


class Definitions:
    """The names that a source file defines, each carried out when it is asked for. A library other than
    pydantic and Python's own is never imported: names of one are missing, and with them whatever is computed
    from them."""

    def __init__(self, file: Path):
        self._nodes: dict[str, ast.stmt] = {}
        self._made: dict[str, Any] = {"__name__": f"{__name__}.{file.stem}"}
        for node in _tree(file).body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names = [node.name]
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
            self._nodes |= dict.fromkeys(names, node)

    def __getattr__(self, name: str) -> Any:
        self._carry_out(name)
        if name not in self._made:
            raise AttributeError(name)
        return self._made[name]

    def _carry_out(self, name: str) -> None:
        node = self._nodes.pop(name, None)  # removed first, since a definition may need itself
        if node is None or name in self._made:
            return
        if isinstance(node, ast.Import | ast.ImportFrom):
            self._made |= _imported(node, name)
            return
        for part in ast.walk(node):
            if isinstance(part, ast.FunctionDef):  # the annotations of a validator are not needed
                part.returns = None
                for argument in (*part.args.args, *part.args.kwonlyargs):
                    argument.annotation = None
        for part in list(ast.walk(node)):
            if isinstance(part, ast.Name) and part.id in self._nodes:
                self._carry_out(part.id)
        try:
            # our own source
            exec(compile(ast.Module([node], []), f"<{self._made['__name__']}>", "exec"), self._made)
        except NameError:
            self._nodes[name] = node  # who asks again is told again
            raise


@functools.cache
def definitions(file: Path) -> Definitions:
    """The names that the file of a method or a metric defines."""
    return Definitions(file)


def _imported(node: ast.Import | ast.ImportFrom, name: str) -> dict[str, Any]:
    """The value that an import statement gives a name; none where it is another library's."""
    [alias] = [alias for alias in node.names if name == (alias.asname or alias.name.partition(".")[0])]
    if isinstance(node, ast.Import):
        return {name: importlib.import_module(alias.name)} if _light(alias.name) else {}
    for module in (f"{node.module}.{alias.name}", node.module):
        if not _light(module) and (path := find(module)):
            found = Definitions(path)
            return {name: found if module != node.module else getattr(found, alias.name)}
    return {name: getattr(importlib.import_module(node.module), alias.name)} if _light(node.module) else {}


def _light(module: str) -> bool:
    """Whether a module is Python's own, pydantic or the plan's, none of which imports torch."""
    return module.partition(".")[0] in {*sys.stdlib_module_names, "pydantic"} or module.startswith(
        "relinear.plan."
    )


@functools.cache
def _method(file: Path) -> tuple[dict[str, Any], bool]:
    """The constants and functions of class `Method` of a method's file, by name, and whether it builds on
    nothing but what all methods share."""
    classes = {node.name: node for node in _tree(file).body if isinstance(node, ast.ClassDef)}
    if (kind := classes.get("Method")) is None:
        raise SourceError(
            f"attention/{file.name} defines no class Method, and each file there is a method; possible: class"
            f" Method(Attention) in it, or the name _{file.name} for a file that is none"
        )
    constants = {
        ast.unparse(node.targets[0]): node.value for node in kind.body if isinstance(node, ast.Assign)
    }
    functions = {node.name: node for node in kind.body if isinstance(node, ast.FunctionDef)}
    return constants | functions, {ast.unparse(base).rpartition(".")[2] for base in kind.bases} <= {
        "Attention",
        "Parts",
    }


@functools.cache
def part_names(file: Path) -> tuple[str, ...]:
    """The `PARTS` of class `Method` in a method's file, which can be switched off; empty where it lists
    none."""
    named, _ = _method(file)
    return ast.literal_eval(named["PARTS"]) if "PARTS" in named else ()


@functools.cache
def transfers(file: Path) -> tuple[str, ...]:
    """The losses by which a method can imitate softmax attention: `TRANSFERS` of class `Method` in its file;
    all where it lists none."""
    named, _ = _method(file)
    return ast.literal_eval(named["TRANSFERS"]) if "TRANSFERS" in named else ("cross_entropy", "mse")


@functools.cache
def calibrates(file: Path) -> bool:
    """Whether a method can be set by the teacher's attention before it is trained: `calibrate` of class
    `Method` in its file."""
    return "calibrate" in _method(file)[0]


@functools.cache
def adds_parameters(file: Path) -> bool:
    """Whether a method has parameters of its own: its file names a parameter or a layer of torch's, or builds
    on another class, which may."""
    _, alone = _method(file)
    return not alone or bool(MAKES_PARAMETERS.search(file.read_text(encoding="utf-8")))


def causal_only(file: Path, given: Mapping[str, Any]) -> bool:
    """Whether a method with these options is for causal attention alone: what its function `_causal_only`
    says, or its constant `causal_only`. False for one that builds on another class, which decides when the
    model is made."""
    named, alone = _method(file)
    always = ast.literal_eval(named["causal_only"]) if "causal_only" in named else alone
    if "_causal_only" not in named:
        return always
    made: dict[str, Any] = {}
    exec(compile(ast.Module([named["_causal_only"]], []), f"<{file.stem}>", "exec"), made)  # our own source
    return made["_causal_only"](
        SimpleNamespace(options=schema(file).model_validate(dict(given)), causal_only=always)
    )


# What `NEEDS` of a metric's file may list: `next_token`, models that predict it; `documents`, data that are
# whole documents; `tasks`, the files of workflow/tasks that its options name; `labels`, data with labels, and
# runs that learned them; `pictures`, models that read them; `shape`, nothing but a model's shape, so that all
# trainings of a run have the same; `state`, models that keep one from token to token; `recall`, models whose
# tokens are those of associative recall; `linearized`, models whose attention a method has replaced.
POSSIBLE_NEEDS = (
    "next_token",
    "documents",
    "tasks",
    "labels",
    "pictures",
    "shape",
    "state",
    "recall",
    "linearized",
)
# attributes that a model of softmax attention does not have
OF_LINEARIZED = ("attention_layers", "method_parameters")


@functools.cache
def metric_needs(file: Path) -> tuple[str, ...]:
    """What a metric's file lists as `NEEDS`; nothing where it lists none. Raises ConfigError for an unknown
    need. A need says which runs and data the metric can be asked of, and not what it measures, so no key
    counts it (`relinear.plan.code`)."""
    needs = getattr(definitions(file), "NEEDS", ())
    if unknown := [need for need in needs if need not in POSSIBLE_NEEDS]:
        raise ConfigError(
            f"measure/{file.name}: NEEDS has {unknown[0]!r}; possible: {', '.join(POSSIBLE_NEEDS)}"
        )
    nodes = list(ast.walk(_tree(file)))
    used = {node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in nodes}
    if (
        (asked := [name for name in OF_LINEARIZED if name in used])
        and "linearized" not in needs
        and "Linearized" not in used
    ):
        raise ConfigError(
            f"measure/{file.name} asks a model for `{asked[0]}`, which a model of softmax attention does not"
            ' have; possible: NEEDS = ("linearized",), or a look at isinstance(model, Linearized)'
        )
    return needs


@functools.cache
def reads_data(file: Path) -> bool:
    """Whether a metric cannot do without data: its function `measure` uses its second parameter, whose
    annotation has no None."""
    for node in _tree(file).body:
        if isinstance(node, ast.FunctionDef) and node.name == "measure" and len(node.args.args) > 1:
            data = node.args.args[1]
            used = any(isinstance(part, ast.Name) and part.id == data.arg for part in ast.walk(node))
            return used and not (data.annotation and "None" in ast.unparse(data.annotation))
    return False


@functools.cache
def metric_yields(file: Path) -> tuple[str, ...]:
    """The names of a metric's readings: its constant `YIELDS`, or what each `Reading("name", ...)` of its
    file says.

    Raises ConfigError where a name is computed and there is no `YIELDS`.
    """
    if (said := getattr(definitions(file), "YIELDS", None)) is not None:
        return said
    calls = [
        node
        for node in ast.walk(_tree(file))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Reading"
    ]
    names = [
        call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None for call in calls
    ]
    if None in names or not names:
        raise ConfigError(
            f'measure/{file.name}: the names of its readings are not written in it; say YIELDS = ("...",),'
            " the names of all its readings"
        )
    return tuple(dict.fromkeys(names))
