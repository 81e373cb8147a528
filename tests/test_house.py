"""Laws of the house: rooms stand on floors, no imports form a circle, no command loads a library that it does
not need."""

import ast
import gc
import itertools
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image

from relinear import cli, stages
from relinear.draw.pictures import WIDTH
from relinear.draw.style import ALSO, LINES, LOOKS, OTHERS, lines, look_of, method_of
from relinear.errors import UserError
from relinear.machine import memory
from relinear.plan import code
from relinear.plan.figures import Curves
from relinear.plan.plan import metrics
from relinear.plan.specs import available
from relinear.stages._stage import Node

PACKAGE = ROOT / "src" / "relinear"
APART = ("benchmarks",)  # rooms that are moved as they are, and not yet cut into pieces
OF_A_FUNCTION = 75

# From the ground up: a module imports from floors below its own, and from its own room. The longest name that
# fits is a module's room.
FLOORS = [
    {"errors", "files", "plan.near"},
    {"schemas"},
    {"core"},
    {"records", "weights"},
    {"folders"},
    {"plan.sources", "plan.near"},
    {"plan.strict", "plan.job", "plan.readings", "plan.code"},  # the values that rooms hand to each other
    {"plan.sane", "plan.measured", "plan.finite"},
    {"plan.assets", "plan.options"},
    {"plan.entries"},
    {"plan.names"},
    {"attention"},
    {"families"},
    {"machine"},
    {"opening"},
    {"linearize"},
    {"get"},
    {"train", "measure"},
    {"stages"},
    {"plan"},  # the plan, which names all of these
    {"draw"},
    {"tracking"},
    {"stage"},
    {"retime", "status", "show", "share", "benchmarks", "campaign"},
    {"own", "watched"},
    {"cli"},
]


def module(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {module(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(path: Path) -> set[str]:
    """The modules of ours that a file imports, at its top and within functions. Not those that it fetches by
    name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {alias: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in whole.values()}
    return {name for name in found if name in MODULES}


GRAPH = {name: imports(path) - {name} for name, path in MODULES.items()}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """One circle of a graph, its beginning again at its end; empty if there is none."""
    done: set[str] = set()

    def walk(path: list[str]) -> list[str]:
        for following in sorted(graph[path[-1]] - done):
            if following in path:
                return [*path[path.index(following) :], following]
            if found := walk([*path, following]):
                return found
        done.add(path[-1])
        return []

    return next((found for name in sorted(graph) if (found := walk([name]))), [])


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_no_modules_import_each_other_in_a_circle():
    assert not circle(GRAPH)


def room(name: str) -> str:
    """The room of a module, as `FLOORS` names it."""
    rooms = [r for floor in FLOORS for r in floor if f"{name}.".startswith(f"relinear.{r}.")]
    assert rooms, f"{name} is on no floor"
    return max(rooms, key=len)


def test_every_room_stands_on_those_below_it():
    floor_of = {r: i for i, floor in enumerate(FLOORS) for r in floor}
    wrong = []
    for name, imported in GRAPH.items():
        if name == "relinear":  # which offers what users call
            continue
        for other in imported - {"relinear"}:
            own, theirs = room(name), room(other)
            if own != theirs and floor_of[theirs] >= floor_of[own]:
                wrong.append(f"{name} (floor {floor_of[own]}) imports {other} (floor {floor_of[theirs]})")
    assert not wrong, "\n".join(sorted(wrong))


def test_no_room_is_listed_that_there_is_not():
    assert {room(name) for name in MODULES if name != "relinear"} == {r for floor in FLOORS for r in floor}


def test_only_metrics_say_what_they_need_and_no_code_computes_with_it():
    """Keys do not count the constants `NEEDS`, `YIELDS` and `AXES` (`relinear.plan.code`), so only refusals
    of the plan may depend on them."""
    uses = [
        (name, node)
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name)
    ]
    said = [(name, node.id) for name, node in uses if node.id in code.UNCOUNTED]
    assert all(type(node.ctx) is ast.Store for _, node in uses if node.id in code.UNCOUNTED)
    assert {"relinear"} == {name for name, constant in said if constant == "__version__"}
    assert (
        all(
            name.startswith("relinear.measure.") == (constant in ("NEEDS", "YIELDS", "AXES"))
            for name, constant in said
        )
        and len(said) > 1
    ), said


# --- libraries ---


def loads(*modules: str) -> set[str]:
    """Top-level packages that importing the modules brings into a new process."""
    command = (
        f"import sys, importlib\nfor m in {modules!r}:"
        " importlib.import_module(m)\nprint(*{m.partition('.')[0] for m in sys.modules})"
    )
    env = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'kernels'}"}
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return set(done.stdout.split())


HEAVY = {
    "torch",
    "transformers",
    "peft",
    "lm_eval",
    "datasets",
    "mlflow",
    "numpy",
    "pandas",
    "matplotlib",
    "scipy",
    "sklearn",
    "gguf",
    "triton",
}


def test_planning_loads_no_library_that_computes_or_draws():
    """Every `snakemake` call and every verb begins by planning."""
    planning = [name for name in MODULES if name.startswith(("relinear.plan", "relinear.stages"))]
    assert not HEAVY & loads(*planning)


IMPORTING = (
    "import importlib, sys, time\nbegin = time.process_time()\nfor m in sys.argv[1:]:"
    " importlib.import_module(m)\nprint(time.process_time() - begin)"
)


def test_planning_is_imported_in_under_a_second():
    """The best of three of the processor's time, so that other processes do not count."""
    planning = [name for name in MODULES if name.startswith(("relinear.plan", "relinear.stages"))]
    command = [sys.executable, "-c", IMPORTING, *planning]
    env = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'kernels'}"}
    assert (
        min(
            float(subprocess.run(command, capture_output=True, text=True, env=env, check=True).stdout)
            for _ in range(3)
        )
        < 1
    )


def test_the_garbage_collector_is_on_while_a_stage_works_and_off_before(monkeypatch):
    """Imports leave hardly any garbage, and repeated collections during them take seconds."""
    seen = []
    monkeypatch.setattr(
        "relinear.stage.run_stage", lambda plan, node, work: (seen.append(gc.isenabled()), work(None))
    )
    monkeypatch.setattr("relinear.get.asset.work", lambda job: seen.append(gc.isenabled()))
    verb = cli.planned(lambda plan: cli.run(plan, Node("asset", "brown"), threads=None, gpus=None))
    verb(**{name: default for name, (_, default) in cli.PLAN.items()})
    assert seen == [False, True] and gc.isenabled()


@pytest.mark.parametrize(
    ("environment", "asked", "threads"),
    [
        ({"OMP_NUM_THREADS": "3"}, None, 3),
        ({"OMP_NUM_THREADS": "3"}, 1, 1),
        ({"OMP_NUM_THREADS": "3", "LOCAL_WORLD_SIZE": "1"}, None, 0),
    ],
    ids=["the variable", "the option before it", "torchrun's own"],
)
def test_a_verb_by_itself_computes_with_the_cores_that_it_was_granted(
    monkeypatch, environment, asked, threads
):
    """Verbs side by side on one machine, each with all cores, slow each other down several times over. 0: all
    cores."""
    seen = []
    monkeypatch.setattr(
        "relinear.stage.run_stage", lambda plan, node, work: seen.append(torch.get_num_threads())
    )
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    verb = cli.planned(lambda plan: cli.run(plan, Node("model", "tiny"), threads=asked, gpus=None))
    verb(**{name: default for name, (_, default) in cli.PLAN.items()} | {"scale": "smoke"})
    assert seen == [threads or len(os.sched_getaffinity(0))]


FAULTS = """
import resource, sys
from relinear.machine import memory
if sys.argv[1] == "kept":
    assert memory.keep_freed()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(2):
    before = faults()
    b"x" * (64 << 20)
print(faults() - before)
"""


@pytest.mark.parametrize("on", [True, False])
def test_nothing_is_collected_while_libraries_are_imported_and_the_collector_is_then_as_it_was(on):
    before = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        with pytest.raises(UserError), memory.uncollected():
            assert not gc.isenabled()
            raise UserError("no model")
        assert gc.isenabled() == on
    finally:
        gc.unfreeze()
        (gc.enable if before else gc.disable)()


def test_memory_that_a_stage_frees_is_not_asked_for_again():
    """Pages that the kernel fills for a block as large as the one freed before it: all of its 16,384 by
    default, hardly any for a stage."""
    env = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'kernels'}"}
    runs = [
        subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, env=env, check=True)
        for how in ("back", "kept")
    ]
    given_back, kept = (int(run.stdout) for run in runs)
    assert kept < 100 < given_back


def test_the_command_line_loads_none_before_a_verb_does():
    assert not HEAVY & loads("relinear.cli")


def test_drawing_loads_no_torch():
    drawing = [name for name in MODULES if name.startswith("relinear.draw")]
    assert not {"torch", "transformers", "peft", "lm_eval", "datasets", "mlflow"} & loads(*drawing)


# Of the libraries that take seconds to import, the ones that a stage needs beside torch and transformers.
NEEDS = {"relinear.train.finetune": {"peft"}, "relinear.measure.task_score": {"sklearn", "pandas"}}
SELDOM = {"lm_eval", "datasets", "peft", "mlflow", "matplotlib", "pandas", "sklearn"}
WORK = {stages.stage(name).work for name in stages.available()} | {
    f"relinear.measure.{metric}" for metric in metrics()
}


def test_no_stage_loads_a_library_that_only_another_needs():
    """One process imports all stages: a library that it has not loaded is loaded by none of them. lm-eval and
    MLflow are loaded when they are used."""
    assert not SELDOM & loads("relinear.stage", *sorted(WORK - NEEDS.keys()))


@pytest.mark.parametrize("work", NEEDS)
def test_a_stage_loads_what_it_needs_and_no_more(work):
    assert SELDOM & loads("relinear.stage", work) == NEEDS[work]


def test_work_without_torch_loads_none():
    without = [stages.stage(name).work for name in stages.available() if not stages.stage(name).torch]
    assert without and not {"torch", "transformers"} & loads("relinear.stage", *without)


# The command line, and the names of the modules that it has loaded at its end; an import of the same modules,
# as a job imports them.
JOB = """
import json, sys
names = sys.argv.pop(1)
try:
    from relinear.cli import main
    main()
finally:
    json.dump([n for n in sys.modules if n.partition(".")[0] not in ("__main__", "relinear", "relinear_kernels")], open(names, "w"))
"""  # noqa: E501
IMPORTS = """
import contextlib, gc, importlib, json, sys
gc.disable()
for name in json.load(open(sys.argv[1])):
    with contextlib.suppress(Exception):  # modules that a library makes while it runs
        importlib.import_module(name)
"""


def processor_seconds(script: str, *args: str) -> float:
    """Of a new process and its children."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", script, *args], env=env, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_drawing_costs_at_most_two_seconds_over_importing_its_libraries(tmp_path):
    names = str(tmp_path / "modules.json")
    job = processor_seconds(
        JOB, names, "draw", "comparison", "table2", "--scale", "smoke", "--results", str(tmp_path)
    )
    libraries = processor_seconds(IMPORTS, names)
    assert 0 < libraries < job < libraries + 2
    assert (tmp_path / "smoke/comparison/table2.csv").is_file()


# --- sizes ---


def functions(tree: ast.AST):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@pytest.mark.parametrize(
    "name", [name for name, path in MODULES.items() if path.relative_to(PACKAGE).parts[0] not in APART]
)
def test_the_functions_of_a_module_are_of_a_size_to_read_at_once(name):
    """A statement counts as one line, however long it is: the formatter wraps it."""
    lines = {
        f.name: len(ast.unparse(f).splitlines()) for f in functions(ast.parse(MODULES[name].read_text()))
    }
    assert not {function: count for function, count in lines.items() if count >= OF_A_FUNCTION}


PICKLES = {
    "pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "shelve",
    "marshal",
    "torch.distributed.checkpoint",
}


def test_nothing_reads_or_writes_a_pickle():
    """Reading somebody else's pickle runs their code. Checkpoints are safetensors and JSON."""
    for path in [*MODULES.values(), *(ROOT / "kernels").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("torch.load", "torch.save"), f"{path} calls {called}"
                assert not any(
                    k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in node.keywords
                ), f"{path} reads pickles"
            assert not any(f"{name}.".startswith(f"{pickle}.") for name in names for pickle in PICKLES), (
                f"{path} imports {names}"
            )


# --- the look of methods ---

# Machado, Oliveira and Fernandes (2009), "A Physiologically-based Model for Simulation of Color Vision
# Deficiency", severity 1.0, on linear RGB.
DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
)
# sRGB, D65
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)


def lab(color: str, seen_by: np.ndarray) -> np.ndarray:
    """CIELAB of a colour #rrggbb as an eye sees it."""
    encoded = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    ratios = TO_XYZ @ np.clip(seen_by @ linear, 0, 1) / TO_XYZ.sum(axis=1)
    x, y, z = np.where(ratios > (6 / 29) ** 3, np.cbrt(ratios), ratios / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eye", [np.eye(3), DEUTERANOPIA], ids=["normal", "deuteranopia"])
def test_colours_are_apart(eye):
    """Colours differ by more than 25 in CIELAB; a difference of 2.3 is just noticeable."""
    apart = {
        (a, b): float(np.linalg.norm(lab(LOOKS[a].color, eye) - lab(LOOKS[b].color, eye)))
        for a, b in itertools.combinations(LOOKS, 2)
    }
    assert min(apart.values()) > 25, min(apart, key=apart.get)


def test_in_grey_markers_and_hatches_tell_methods_apart():
    looks = [*LOOKS.values(), *OTHERS]
    assert len({look.marker for look in looks}) == len({look.hatch for look in looks}) == len(looks)


@pytest.mark.parametrize(
    ("run", "method"),
    [
        ("lizard-seed1", "lizard"),
        ("lizard_shared@mistral-7b", "lizard"),
        ("window_bytes_of_lizard", "window"),
        ("lolcats_window_shared", "lolcats_window"),
        ("lolcats_exp_notransfer", "lolcats_linear"),
        ("teacher_lora_5e-4", "teacher_lora"),
        ("scratch_softmax", "teacher"),
        ("recall_elu", None),
        ("windowless", None),
    ],
)
def test_a_run_looks_as_its_method(run, method):
    assert method_of(run) == method
    assert method is None or look_of(run) == LOOKS[method]


def test_runs_of_one_method_differ_by_their_lines():
    first, other, again, second = lines(["lizard", "supra", "lizard", "lizard_shared"])
    assert first == again and first["color"] == second["color"] != other["color"]
    assert (first["linestyle"], second["linestyle"]) == LINES[:2] and second["markerfacecolor"] == "none"


def test_every_line_of_every_figure_of_curves_looks_its_own_way():
    specs = [
        artefact.spec
        for artefact in available(ROOT / "workflow/papers").values()
        if isinstance(artefact.spec, Curves)
    ]
    assert len(specs) > 3
    for spec in specs:
        for panel in spec.panels:
            runs = [series.all_runs[0] for series in spec.shown(panel)]
            drawn = [
                style
                for series, style in zip(
                    spec.series, lines([s.all_runs[0] for s in spec.series]), strict=True
                )
                if series in spec.shown(panel)
            ]
            assert len({tuple(style.items()) for style in drawn}) == len(set(runs)), spec.label


def test_no_figure_has_colours_of_its_own_for_methods():
    places = [*ROOT.glob("src/relinear/**/*.py"), *ROOT.glob("workflow/papers/*/*.py")]
    found = [path.name for path in places if re.search(r"""f?["']C(\{|[0-9]["'])""", path.read_text())]
    assert found == ["attention_maps.py"], "which shows one head, of no method's colour"
    assert set(ALSO.values()) <= set(LOOKS)


def test_pictures_are_as_wide_as_a_page_and_their_letters_can_be_read_there():
    """Those whose weights are not committed cannot be drawn again (`tests/test_frozen.py`)."""
    from test_frozen import WITHOUT_WEIGHTS

    drawn = [path for path in (ROOT / "results/reference").glob("*/*/*.png")]
    wide = [
        path
        for path in drawn
        if (path.parents[1].name, f"{path.parent.name}_{path.stem}") not in WITHOUT_WEIGHTS
    ]
    for path in wide:
        with Image.open(path) as picture:
            assert picture.width <= 150 * WIDTH, path
    code = [*ROOT.glob("src/relinear/draw/*.py"), *ROOT.glob("workflow/papers/*/*.py")]
    assert (
        wide
        and [path.name for path in code if re.search(r"(font|label)size=[0-8]\b", path.read_text())] == []
    )
    for artefact in available(ROOT / "workflow/papers").values():
        if isinstance(artefact.spec, Curves):
            entries = [
                len(artefact.spec.shown(panel)) + len(panel.published) for panel in artefact.spec.panels
            ]
            assert max(entries) <= 8 + (artefact.name == "lolcats_figure2"), (
                "of whose nine series one was not run"
            )
