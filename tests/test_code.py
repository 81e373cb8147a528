"""Laws of the code hash: it covers the code that a stage's result depends on, and no other."""

import ast
import errno
import functools
import hashlib
import importlib
import inspect
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from test_plan import everything

from relinear import attention
from relinear.plan import code, sources
from relinear.plan.code import closure, code_hash, definition, kernel_hashes
from relinear.plan.plan import Plan, metrics
from relinear.plan.sources import find
from relinear.stages._stage import Node

SOURCES = sorted({p for folder in code.PACKAGES.values() for p in folder.rglob("*.py")})
PLAN = Plan(scale="smoke")
NODES = PLAN.behind(
    [
        *everything(PLAN),
        *(
            PLAN.measured("lizard", name)
            for name, measure in PLAN.measures.items()
            if measure.data or name == "picture_gate"
        ),
    ]
)
ASSET = Node("asset", "brown")
NODES += [ASSET]
KINDS = {
    (node.stage, node.part and PLAN.measures[node.part].metric): node
    for node in NODES
    if node.name in ("lizard", "tiny", "stories@tiny")
}
# Modules that schedule, record, mirror and draw: no result depends on them. Work knows three things of the
# plan: its values, the check of options and the reader of YAML, in which the harness's tasks stand.
GIVEN = {"relinear.plan.job", "relinear.plan.readings", "relinear.plan.sane", "relinear.plan.strict"}
# Shared files -> the metrics that use them. They are no metrics, but for `needle`, by which the plane scores
# its answers.
SHARED = {
    "kv_recall": {"kept"},  # asks the same pairs
    "_harness": {"lm_eval"},
    "_documents": {"agreement", "perplexity_by_position"},
    "_limit": {
        "kept",
        "agreement",
        "perplexity_by_position",
        "needle",
        "needle_plane",
        "passkey_example",
        "kv_recall",
        "answers",
        "qasper_yes_no",
        "haystack",
        "ruler",
        "rouge",
    },
    "_attention": {"entropy", "head_maps", "matrix_similarity", "gate_stats"},
    "_answering": {
        "kept",
        "needle",
        "needle_plane",
        "passkey_example",
        "samples",
        "kv_recall",
        "answers",
        "gate_stats",
        "qasper_yes_no",
        "haystack",
        "ruler",
        "rouge",
    },
    "_logits": {
        "kept",
        "agreement",
        "perplexity_by_position",
        "lm_eval",
        "recall_accuracy",
        "recognition",
        "needle",
        "needle_plane",
        "passkey_example",
        "samples",
        "kv_recall",
        "answers",
        "gate_stats",
        "qasper_yes_no",
        "haystack",
        "ruler",
        "rouge",
    },
    "_contexts": {"qasper_yes_no", "haystack"},
    "_rope": {"qasper_yes_no", "haystack"},
    "entropy": {"head_maps"},
    "needle": {"needle_plane"},
    "gate": {"picture_gate"},
}
AROUND = ("stage", "status", "cli", "plan", "stages", "draw", "tracking", "share", "benchmarks", "get.assets")


@pytest.mark.parametrize("node", KINDS.values(), ids=str)
def test_what_schedules_obtains_and_draws_belongs_to_no_result(node):
    around = tuple(f"relinear.{name}." for name in AROUND)
    assert {m for m in closure(PLAN.work(node).modules) if f"{m}.".startswith(around)} <= {
        *GIVEN,
        "relinear.plan",
    }


@pytest.mark.parametrize(
    ("stage", "metric", "needs"),
    [
        ("model", "", {"get.model", "families.tiny", "families._family"}),
        ("text", "", {"get.text", "get.packed"}),
        ("written", "", {"get.written", "linearize.loading"}),
        ("activations", "", {"get.activations", "linearize.transfer", "attention.softmax"}),
        (
            "distill",
            "",
            {
                "train.distill",
                "train.loop",
                "linearize.transfer",
                "get.packed",
                "attention._base",
                "families._layer",
            },
        ),
        (
            "finetune",
            "",
            {
                "train.finetune",
                "train.loop",
                "linearize.assemble",
                "get.packed",
                "machine.hardware",
                "attention._base",
            },
        ),
        (
            "measure",
            "fidelity",
            {
                "measure.run",
                "measure.fidelity",
                "linearize.assemble",
                "linearize.transfer",
                "attention._base",
            },
        ),
        ("measure", "gate", {"measure.run", "measure.gate", "linearize.state", "attention._base"}),
        (
            "measure",
            "perplexity",
            {"measure.run", "measure.perplexity", "linearize.state", "attention._base"},
        ),
        (
            "measure",
            "lm_eval",
            {"measure.run", "measure.lm_eval", "measure._harness", "linearize.state", "attention._base"},
        ),
    ],
)
def test_a_stage_reaches_what_makes_its_result(stage, metric, needs):
    reached = closure(PLAN.work(KINDS[stage, metric]).modules)
    assert {f"relinear.{m}" for m in needs} <= reached.keys()
    if stage in ("distill", "finetune", "measure"):
        assert "relinear.attention.lizard" in reached
        assert {f"relinear_kernels.{m}" for m in ("linear_attention_reference", "features")} <= reached.keys()


@pytest.mark.parametrize("metric", metrics())
def test_measuring_does_not_depend_on_how_models_are_trained_or_on_other_metrics(metric):
    reached = closure(PLAN.work(KINDS["measure", metric]).modules)
    assert not [m for m in reached if m.startswith("relinear.train")]
    of_others = {
        m.removeprefix("relinear.measure.") for m in reached if m.startswith("relinear.measure.")
    } - {"run", metric}
    assert of_others <= SHARED.keys()
    for module, metrics_of in SHARED.items():
        assert (module in of_others) == (metric in metrics_of), module


@pytest.mark.parametrize("method", attention.available())
def test_a_method_is_reached_by_its_own_runs_alone(method):
    others = {f"relinear.attention.{m}" for m in attention.available()} - {f"relinear.attention.{method}"}
    reached = closure(["relinear.train.finetune", f"relinear.attention.{method}"])
    assert f"relinear.attention.{method}" in reached and not others & reached.keys()


def imports(path: Path):
    return [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Import | ast.ImportFrom)]


def test_no_module_hides_an_import_from_the_hash():
    """The hash does not follow relative imports, and `import *` names nothing. With either, an edit would go
    unnoticed."""
    for path in SOURCES:
        for node in imports(path):
            if isinstance(node, ast.ImportFrom):
                assert not node.level and node.names[0].name != "*", f"{path}:{node.lineno}"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of three modules: a imports b, which imports c where types are checked."""
    monkeypatch.setitem(code.PACKAGES, "toy", tmp_path)
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "a.py").write_text(
        '"""A."""\nfrom toy.b import f\n\n\ndef g(x):\n    """Doc."""\n    return f(x)  # remark\n'
    )
    (tmp_path / "b.py").write_text(
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from toy.c import C\n\n\ndef f(x):\n   "
        " return x + 1\n"
    )
    (tmp_path / "c.py").write_text("class C:\n    pass\n")

    def rewrite(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        code._read.cache_clear()
        return code_hash(["toy.a"])

    yield rewrite
    code._read.cache_clear()


def test_closure_follows_every_import(package):
    assert set(closure(["toy.a"])) == {"toy", "toy.a", "toy.b", "toy.c"}


def test_what_does_not_change_the_syntax_tree_does_not_change_the_hash(package):
    before = code_hash(["toy.a"])
    assert (
        package(
            "a",
            '"""Another."""\n\nfrom toy.b import f\n\n\n# More.\ndef g(x):\n    """Other."""\n    return'
            " (f(x))\n",
        )
        == before
    )
    assert package("c", '"""A module."""\n\n\nclass C:  # remark\n    pass\n') == before
    assert package("c", '"""A module."""\n\n\nclass C:\n    """A class."""\n') == before
    assert package("a", "from toy.b import f\n\n\ndef g(x):\n    return f(x)\n") == before


RAISES = "from toy.b import f\n\n\ndef g(x):\n    if x:\n        raise {}\n    return f(x)\n"


def test_the_words_of_an_error_are_no_code_and_the_error_is(package):
    before = package("a", RAISES.format('ValueError("no x")'))
    for words in ('"got an x"', 'f"got {x}"', 'f"got {x!r}; " "have none"', '"got " + str(x)', ""):
        assert package("a", RAISES.format(f"ValueError({words})")) == before, words
    for other in (
        'KeyError("no x")',
        "ValueError(x)",
        'ValueError("no x", x)',
        'ValueError("no x") from None',
        'ValueError(w="no x")',
        "ValueError",
    ):
        assert package("a", RAISES.format(other)) != before, other


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("a", "from toy.b import f\n\n\ndef g(x):\n    return f(x) * 2\n"),
        ("b", "def f(x):\n    return x + 2\n"),
        ("b", "def f(x, y=1):\n    return x + 1\n"),
        ("c", "class C:\n    x = 1\n"),
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


def test_what_was_read_of_a_file_is_kept_until_the_file_changes_and_a_damaged_one_is_made_anew(
    package, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    before = code_hash(["toy.a"])
    kept = sorted((tmp_path / "__pycache__").glob("*.json"))
    assert [path.name.partition(".")[0] for path in kept] == ["__init__", "a", "b", "c"]
    with monkeypatch.context() as patch:
        patch.setattr(code, "_facts_of", lambda tree: pytest.fail("read again"))
        code._read.cache_clear()
        assert code_hash(["toy.a"]) == before
    whole = kept[1].read_text()
    for damaged in ("", whole[:-9], "[]", "{}", json.dumps({"of": json.loads(whole)["of"]})):
        kept[1].write_text(damaged)
        code._read.cache_clear()
        assert code_hash(["toy.a"]) == before and kept[1].read_text() == whole
    assert package("b", "def f(x):\n    return x + 2\n") != before


def test_facts_are_kept_by_the_rules_that_found_them_also_in_a_process_that_outlives_an_edit(
    package, tmp_path, monkeypatch
):
    """An old process would else keep what its rules found as what the edited module finds."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    edited = tmp_path.with_name("edited.py")
    edited.write_text(Path(code.__file__).read_text() + "\nEDITED = True\n")
    monkeypatch.setattr(code, "__file__", str(edited))
    code_hash(["toy.a"])
    new = hashlib.sha256(edited.read_bytes()).digest()
    for kept in (tmp_path / "__pycache__").glob("*.json"):
        source = (tmp_path / f"{kept.name.partition('.')[0]}.py").read_bytes()
        of = json.loads(kept.read_text())["of"]
        assert of == hashlib.sha256(code.RULES + source).hexdigest()
        assert of != hashlib.sha256(new + source).hexdigest()


def test_facts_lie_where_python_keeps_compiled_files(package, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path.with_name("prefix")))
    code_hash(["toy.a"])
    assert not (tmp_path / "__pycache__").exists()
    assert len(list(tmp_path.with_name("prefix").rglob("*.json"))) == 4


def test_where_facts_cannot_be_kept_they_are_found_and_nothing_is_left(package, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = code_hash(["toy.a"])
    monkeypatch.setattr(sys, "dont_write_bytecode", False)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(code.os, "replace", full)
        code._read.cache_clear()
        assert code_hash(["toy.a"]) == before
    assert list((tmp_path / "__pycache__").iterdir()) == []
    (tmp_path / "__pycache__").rmdir()
    (tmp_path / "__pycache__").write_text("")  # no folder
    code._read.cache_clear()
    assert code_hash(["toy.a"]) == before


def test_find_knows_our_modules_only():
    assert find("relinear.train.loop").name == "loop.py" and find("relinear.attention").name == "__init__.py"
    assert find("torch") is None and find("relinear.nothing") is None
    with pytest.raises(ValueError, match="no module 'relinear.nothing'"):
        closure(["relinear.nothing"])


def test_fields_that_other_pythons_have_and_leave_empty_do_not_count():
    """Python 3.12 gave functions `type_params`. Both Pythons must give one hash."""
    here, later = (ast.parse("def f(x):\n    return None").body[0] for _ in range(2))
    later._fields = (*later._fields, "more", "none")
    later.more, later.none = [], None
    assert code._written(here) == code._written(later)
    later.more = [ast.Name("T")]
    assert code._written(here) != code._written(later)


# --- an edit of any file changes the keys of what it makes ---


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A function that edits files of a copy of the package, and says which nodes' keys change."""
    folder = tmp_path_factory.mktemp("whole")
    clone = {
        "relinear": Path(shutil.copytree(code.PACKAGES["relinear"], folder / "relinear")),
        "relinear_kernels": code.PACKAGES["relinear_kernels"],
    }
    uncached = code._read.__wrapped__
    read = functools.cache(lambda path, text: uncached(path))
    plan = Plan(scale="smoke")

    def keys():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sources, "PACKAGES", clone)
            patch.setattr(code, "_read", lambda path: read(path, path.read_text()))  # which is cached by path
            hashes = functools.cache(lambda modules: code_hash(list(modules)))
            patch.setattr("relinear.plan.plan.code_hash", lambda modules: hashes(tuple(modules)))
            plan._keys.clear()
            return {node: plan.key(node) for node in NODES}

    before = keys()

    def edit(change, *names):
        texts = {clone["relinear"] / name: (clone["relinear"] / name).read_text() for name in names}
        for path, text in texts.items():
            path.write_text(change(text))
        try:
            assert all(path.read_text() != text for path, text in texts.items())
            after = keys()
        finally:
            for path, text in texts.items():
                path.write_text(text)
        return {node for node in NODES if before[node] != after[node]}

    yield edit
    assert keys() == before


def coded(text: str) -> str:
    return text + "\nEDITED = 1\n"


def reworded(text: str) -> str:
    """The source with other words in its docstrings, its comments and the errors that it raises."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            node.exc.args = [
                ast.Constant("Other words.") if isinstance(arg, ast.JoinedStr | ast.Constant) else arg
                for arg in node.exc.args
            ]
    assert ast.get_docstring(tree)
    tree.body[0] = ast.Expr(ast.Constant("Another first line."))
    return "# A remark.\n" + ast.unparse(tree)


PACKAGE = code.PACKAGES["relinear"]
OUTSIDE = {"alone": ["cli.py", "stage.py", "status.py", "get/assets.py"]} | {
    room: [
        f"{room}/{p.name}"
        for p in sorted((PACKAGE / room).glob("*.py"))
        if p.stem != "__init__" and f"relinear.plan.{p.stem}" not in GIVEN
    ]
    for room in ("plan", "stages", "draw", "tracking", "share", "benchmarks")
}


@pytest.mark.parametrize("room", OUTSIDE)
def test_editing_what_schedules_obtains_or_draws_reruns_nothing(whole, room):
    assert whole(coded, *OUTSIDE[room]) <= {ASSET}


SAYING = [
    "get/assets.py",
    "get/text.py",
    "get/model.py",
    "families/_opening.py",
    "measure/_harness.py",
    "plan/job.py",
    "plan/strict.py",
    "errors.py",
]


@pytest.mark.parametrize("name", SAYING)
def test_editing_the_words_of_any_file_reruns_nothing(whole, name):
    assert whole(reworded, name) == set()


def test_what_a_metric_says_it_needs_reruns_nothing(whole):
    assert (
        whole(
            lambda text: text.replace("NEEDS = (", 'NEEDS = ("tasks", '),
            "measure/perplexity.py",
            "measure/agreement.py",
        )
        == set()
    )


def following(made) -> set[Node]:
    """The nodes for which `made` holds, and everything that is made from them."""
    return {node for node in NODES if any(map(made, PLAN.behind([node])))}


@pytest.mark.parametrize("metric", metrics())
def test_editing_a_metric_measures_it_anew_and_nothing_else(whole, metric):
    as_it_has = {metric} | SHARED.get(metric, set())
    own = {node for node in NODES if node.part and PLAN.settings(node)["metric"] in as_it_has}
    assert own and whole(coded, f"measure/{metric}.py") == (
        following(own.__contains__) if metric in ("gate", "picture_gate") else own
    ), "others wait for the gate"


@pytest.mark.parametrize("method", attention.available())
def test_editing_a_method_reruns_its_runs_and_no_others(whole, method):
    own = {
        node
        for node in NODES
        if node.name in PLAN.runs and any(link.method == method for link in PLAN.chain(node.name))
    }
    if method == "softmax":  # recorded inputs are those of the model's own attention
        own |= following(lambda node: node.stage == "activations")
    if method == "kept":  # the measure of that name asks the method which positions it keeps
        own |= {node for node in NODES if node.part and PLAN.settings(node)["metric"] == "kept"}
    assert own and whole(coded, f"attention/{method}.py") == own


def of(*named: str):
    """Whether a node is of one of these stages."""
    return lambda node: node.stage in named


WORK = {
    "get/text.py": of("text", "sentences", "documents", "pieces", "prompts", "labelled"),
    "get/documents.py": of("documents"),
    "get/pieces.py": of("pieces"),
    "get/labelled.py": of("labelled"),
    "get/acceptability.py": of("labelled"),
    "train/classify.py": of("classify"),
    "get/prompts.py": of("prompts"),
    "get/arena.py": of("arena", "images"),
    "get/written.py": of("written"),
    "get/model.py": lambda node: node.stage == "model" and not PLAN.scaled.sees(node.name),
    "get/images.py": of("images"),
    "get/picture_model.py": lambda node: node.stage == "model" and PLAN.scaled.sees(node.name),
    "train/recognise.py": lambda node: (
        node.stage == "classify" and PLAN.scaled.sees(PLAN.run(node.name).model)
    ),
    "get/activations.py": of("activations"),
    "train/distill.py": of("distill"),
    "train/finetune.py": of("finetune"),
    "measure/run.py": of("measure"),
    "families/tiny.py": lambda node: (
        node.stage == "model" and PLAN.models[node.name].family in ("tiny", "prenorm", "vit")
    ),
}


@pytest.mark.parametrize("name", WORK)
def test_editing_how_something_is_made_makes_it_anew_and_what_follows(whole, name):
    assert whole(coded, name) == following(WORK[name])


# --- operations: the definition is the key ---

METHODS = attention.available()
OPS = sorted(
    p.stem.removesuffix("_reference") for p in code.PACKAGES["relinear_kernels"].glob("*_reference.py")
)
TRAININGS = {
    (stage, method): [f"relinear.train.{stage}", f"relinear.attention.{method}"]
    for stage in ("distill", "finetune")
    for method in METHODS
}
FOUR = {"linear_attention", "gated_linear_attention", "sliding_window_attention", "hybrid_attention"}
TRAINED = set(OPS) - {"decode_step"}
# Every file that may compute an operation and is not its definition -> the operations it computes.
IMPLEMENTATIONS = {
    **{op: {op} for op in sorted(TRAINED)},
    **{f"{op}_triton": {op} for op in sorted(TRAINED)},
    "linear_attention_triton": {"linear_attention", "gated_linear_attention", "hybrid_attention"},
    "sliding_window_attention_triton": {"sliding_window_attention", "hybrid_attention"},
    "projection_triton": {"linear_attention", "gated_linear_attention", "hybrid_attention"},
    "decode_step_triton": FOUR,
    "decode_step": set(),  # no training calls it
    "decode_step_reference": {*FOUR, "gated_delta"},
    "dispatch": TRAINED,
    "triton_common": TRAINED,
    "token_cross_entropy_triton": {"token_cross_entropy", "linear_cross_entropy"},
    "traced": {*FOUR, "gated_delta", "attention_cross_entropy"},
    "aot": set(),
    "testing": set(),
    "__init__": set(),
}
# Every definition, what an edit of its arithmetic is, and the trainings that it enters.
DEFINITIONS = {
    "linear_attention": ("EXPONENTIAL_CHUNK = 16", "EXPONENTIAL_CHUNK = 8", set(TRAININGS)),
    "sliding_window_attention": ("q.shape[-1] ** -0.5", "q.shape[-1] ** -0.6", set(TRAININGS)),
    "attention_cross_entropy": (".sum(-1).transpose(1, 2)", ".mean(-1).transpose(1, 2)", set(TRAININGS)),
    "rotary": ("torch.cat([-b, a], -1)", "torch.cat([b, -a], -1)", set(TRAININGS)),
    "gated_linear_attention": ("FLOOR = -8.0", "FLOOR = -7.0", {x for x in TRAININGS if x[1] == "lizard"}),
    "gated_delta": (
        "CHUNK = 64",
        "CHUNK = 32",
        {x for x in TRAININGS if x[1] in ("delta", "kept")},
    ),
    "scaled_sum": (
        "wide[:, None] * y",
        "wide[:, None] * y * 2",
        {x for x in TRAININGS if x[1] in ("delta", "lizard")},
    ),
    "hybrid_attention": (
        "exp(scores - top)",
        "exp(scores - top + 1)",
        {x for x in TRAININGS if x[1] == "lolcats"},
    ),
    "token_cross_entropy": ("IGNORED = -100", "IGNORED = -101", {x for x in TRAININGS if x[0] == "finetune"}),
    "linear_cross_entropy": (
        "weight.to(x.dtype)",
        "2 * weight.to(x.dtype)",
        {x for x in TRAININGS if x[0] == "finetune"},
    ),
    "decode_step": ("sums * near", "2 * sums * near", set()),
}


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    """A function that edits a file in a copy of the kernels, and says whose code hashes and which operations'
    kernel hashes change."""
    folder = tmp_path_factory.mktemp("clone")
    clone = {name: shutil.copytree(path, folder / name) for name, path in code.PACKAGES.items()}
    known, read = {}, code._read.__wrapped__

    def by_text(path):
        text = path.read_text()
        if text not in known:
            known[text] = read(path)
        return known[text]

    def hashes():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sources, "PACKAGES", clone)
            patch.setattr(code, "_read", by_text)  # which is cached by path
            kernels = {
                (x, op): h for x, modules in TRAININGS.items() for op, h in kernel_hashes(modules).items()
            }
            return {x: code_hash(modules) for x, modules in TRAININGS.items()}, kernels

    before = hashes()

    def edit(stem, change):
        path = clone["relinear_kernels"] / f"{stem}.py"
        text = path.read_text()
        path.write_text(change(text))
        try:
            assert path.read_text() != text
            codes, kernels = ({x for x in a if a[x] != b[x]} for a, b in zip(before, hashes(), strict=True))
        finally:
            path.write_text(text)
        ops = {op for _, op in kernels}
        assert kernels == {(x, op) for x, op in before[1] if op in ops}, (
            "an operation has one hash, whoever uses it"
        )
        return codes, ops

    yield edit
    assert hashes() == before


def test_these_are_all_files_of_the_kernels():
    stems = {
        p.stem for p in code.PACKAGES["relinear_kernels"].glob("*.py") if not p.stem.endswith("_test")
    } - {"conftest"}
    assert stems == {*IMPLEMENTATIONS, *(f"{op}_reference" for op in DEFINITIONS), "features"}


@pytest.mark.parametrize("stem", IMPLEMENTATIONS)
def test_editing_an_implementation_retrains_nothing_and_is_recorded(edited, stem):
    assert edited(stem, lambda text: text + "\nEDITED = 1\n") == (set(), IMPLEMENTATIONS[stem])


@pytest.mark.parametrize("op", DEFINITIONS)
def test_editing_a_definition_retrains_the_methods_that_use_it(edited, op):
    old, new, trainings = DEFINITIONS[op]
    codes, ops = edited(f"{op}_reference", lambda text: text.replace(old, new))
    assert codes == trainings
    assert op in ops or op == "decode_step"


def test_feature_maps_are_part_of_every_definition(edited):
    codes, ops = edited("features", lambda text: text.replace("FLOOR = 1e-12", "FLOOR = 1e-11"))
    assert codes == set(TRAININGS) and ops >= FOUR


@pytest.mark.parametrize(
    "stem",
    ["linear_attention_reference", "features", "linear_attention", "linear_attention_triton", "dispatch"],
)
def test_comments_and_docstrings_are_neither_code_nor_kernel(edited, stem):
    def rewritten(text):
        return re.sub(r'^( *""")(?=\w)', r"\1Other words. ", text, flags=re.MULTILINE) + "\n# A remark.\n"

    assert edited(stem, rewritten) == (set(), set())


def test_no_result_is_keyed_by_how_its_operations_are_computed():
    reached = set().union(
        *(closure(list(modules)) for modules in {tuple(PLAN.work(node).modules) for node in NODES})
    )
    kernels = {m for m in reached if m.startswith("relinear_kernels")}
    assert kernels and kernels <= {
        "relinear_kernels.features",
        *(f"relinear_kernels.{op}_reference" for op in OPS),
    }


@pytest.mark.parametrize(
    "line",
    [
        "from relinear_kernels import hybrid_attention",
        "from relinear_kernels.hybrid_attention import hybrid_attention",
        "from relinear_kernels import hybrid_attention_reference",
        "from relinear_kernels import hybrid_state",
        "import relinear_kernels",
        "import relinear_kernels as kernels",
        "import relinear_kernels.rotary",  # which binds the package
    ],
)
def test_an_operation_is_seen_however_it_is_imported(package, line):
    package("c", f"{line}\nimport torch\n")
    reached = closure(["toy.a"])
    assert "relinear_kernels.hybrid_attention_reference" in reached
    assert ("relinear_kernels.scaled_sum_reference" in reached) == line.startswith("import "), (
        "what is not imported is not seen"
    )


@pytest.mark.parametrize("op", OPS)
def test_an_operation_has_its_definitions_defaults(op):
    """The dispatching module enters no key: a default of its own would change results unseen."""
    module = f"relinear_kernels.{op}"
    public, defined = (
        inspect.signature(getattr(importlib.import_module(m), op)).parameters
        for m in (module, definition(module))
    )
    both = public.keys() & defined.keys()
    assert both and {n: public[n].default for n in both} == {n: defined[n].default for n in both}
    assert not defined.keys() - public.keys()
