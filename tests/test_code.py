"""Laws of the code hash: it covers the code that a stage's result depends on, and no other."""

import ast
from pathlib import Path

import pytest

from relinear import attention
from relinear.plan import code
from relinear.plan.code import closure, code_hash, find
from relinear.plan.plan import SHARED, Plan

SOURCES = sorted({p for folder in code.PACKAGES.values() for p in folder.rglob("*.py")})
PLAN = Plan(scale="smoke")
STAGES = [PLAN.step(stage) for stage in SHARED]
STAGES += [PLAN.step(stage, "lizard") for stage in ("distill", "finetune", "fidelity", "evaluate")]
# What schedules, records, mirrors and renders does not make results.
AROUND = (
    "relinear.stage",
    "relinear.plan.plan",
    "relinear.plan.config",
    "relinear.cli",
    "relinear.tracking.live",
    "relinear.plan.code",
    "relinear.draw",
)


@pytest.mark.parametrize("step", STAGES, ids=str)
def test_what_schedules_and_renders_belongs_to_no_result(step):
    reached = closure(PLAN.modules(step))
    assert not [m for m in reached if m.startswith(AROUND)]


@pytest.mark.parametrize(
    ("stage", "needs"),
    [
        ("distill", {"distill", "train", "model", "transfer", "corpus", "hardware", "attention._base", "attention.lizard"}),
        ("finetune", {"finetune", "train", "model", "corpus", "hardware", "attention._base", "attention.lizard"}),
        ("fidelity", {"fidelity", "evaluate.perplexity", "model", "transfer", "attention.lizard"}),
        ("evaluate", {"evaluate.run", "evaluate.gate", "evaluate.harness", "evaluate.perplexity", "model", "state", "attention.lizard"}),
    ],
)
def test_a_stage_reaches_what_makes_its_result(stage, needs):
    reached = closure(PLAN.modules(PLAN.step(stage, "lizard")))
    assert {f"relinear.{m}" for m in needs} <= reached.keys()
    assert "relinear_kernels.linear_attention_reference" in reached


def test_evaluating_does_not_depend_on_how_models_are_trained():
    reached = closure(PLAN.modules(PLAN.step("evaluate", "lizard")))
    assert not reached.keys() & {"relinear.train.loop", "relinear.train.distill", "relinear.train.finetune", "relinear.linearize.transfer"}


@pytest.mark.parametrize("method", attention.available())
def test_a_method_is_reached_by_its_own_runs_alone(method):
    others = {f"relinear.attention.{m}" for m in attention.available()} - {f"relinear.attention.{method}"}
    reached = closure(["relinear.train.finetune", f"relinear.attention.{method}"])
    assert f"relinear.attention.{method}" in reached and not others & reached.keys()


def imports(path: Path):
    return [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Import | ast.ImportFrom)]


def test_no_module_hides_an_import_from_the_hash():
    """Relative imports are not followed, and `import *` says nothing; both would let an edit go unnoticed."""
    for path in SOURCES:
        for node in imports(path):
            if isinstance(node, ast.ImportFrom):
                assert not node.level and node.names[0].name != "*", f"{path}:{node.lineno}"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of three modules: a imports b, b and c import each other only where types are checked."""
    monkeypatch.setitem(code.PACKAGES, "toy", tmp_path)
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "a.py").write_text('"""A."""\nfrom toy.b import f\n\n\ndef g(x):\n    """Doc."""\n    return f(x)  # remark\n')
    (tmp_path / "b.py").write_text(
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from toy.c import C\n\n\ndef f(x):\n    return x + 1\n"
    )
    (tmp_path / "c.py").write_text("class C:\n    pass\n")

    def rewrite(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        code._read.cache_clear()
        return code_hash(["toy.a"])

    yield rewrite
    code._read.cache_clear()


def test_closure_follows_imports_but_not_annotations(package):
    assert set(closure(["toy.a"])) == {"toy", "toy.a", "toy.b"}


def test_what_does_not_change_the_syntax_tree_does_not_change_the_hash(package):
    before = code_hash(["toy.a"])
    assert package("a", '"""Another."""\n\nfrom toy.b import f\n\n\n# More.\ndef g(x):\n    """Other."""\n    return (f(x))\n') == before
    assert package("c", "class C:\n    x = 1\n") == before


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("a", "from toy.b import f\n\n\ndef g(x):\n    return f(x) * 2\n"),
        ("b", "def f(x):\n    return x + 2\n"),
        ("b", "def f(x, y=1):\n    return x + 1\n"),
    ],
)
def test_a_change_of_the_syntax_tree_here_or_in_an_import_changes_the_hash(package, module, text):
    before = code_hash(["toy.a"])
    assert package(module, text) != before


def test_a_function_keeps_its_hash_wherever_the_clone_lies(package, tmp_path, monkeypatch):
    before = code_hash(["toy.a"])
    tmp_path.rename(tmp_path.with_name("moved"))
    monkeypatch.setitem(code.PACKAGES, "toy", tmp_path.with_name("moved"))
    assert code_hash(["toy.a"]) == before


def test_find_knows_our_modules_only():
    assert find("relinear.train.loop").name == "train.py" and find("relinear.attention").name == "__init__.py"
    assert find("torch") is None and find("relinear.nothing") is None
    with pytest.raises(ValueError, match="no module 'relinear.nothing'"):
        closure(["relinear.nothing"])


def test_fields_that_other_pythons_have_and_leave_empty_do_not_count():
    """Python 3.12 gave functions `type_params`: results of one Python are those of another."""
    here, later = (ast.parse("def f(x):\n    return None").body[0] for _ in range(2))
    later._fields = (*later._fields, "more", "none")
    later.more, later.none = [], None
    assert code._written(here) == code._written(later)
    later.more = [ast.Name("T")]
    assert code._written(here) != code._written(later)
