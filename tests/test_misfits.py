"""A mistake stops what it stands in and nothing else: a new method at every scale, a row that misfits a
column, a wrong spec, a wrong metric.

Everything here is planned and nothing is run, in a copy of the repository without its results.
"""

import functools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from faults import linked
from test_additions import examples

from relinear.core import store
from relinear.draw.planned import draw_planned
from relinear.plan.options import SourceError, check_values, metric_needs, metric_yields, reads_data
from relinear.plan.places import check_axes, metric_axes
from relinear.plan.plan import Plan, metric_file, metrics
from relinear.plan.strict import ConfigError

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "results/reference"
UNFINISHED = shutil.ignore_patterns("*.pyc.*", ".*.json.*")  # another process may be compiling


@pytest.fixture
def copy(tmp_path, interpreter) -> Path:
    """A copy of the repository's code and settings, to edit, and the Python of the commands in it."""
    for name in ("src", "kernels", "workflow", "profiles", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=UNFINISHED)
    for name in ("Snakefile", "LICENSE", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".python").symlink_to(interpreter)
    return tmp_path


def add(copy: Path, files: dict[str, str]) -> None:
    """Write files; the text of one that is there is appended to it."""
    for path, text in files.items():
        before = (copy / path).read_text() + "\n\n" if (copy / path).exists() else ""
        (copy / path).write_text(before + text)


def edit(copy: Path, path: str, old: str, new: str) -> None:
    text = (copy / path).read_text()
    assert text.count(old) == 1
    (copy / path).write_text(text.replace(old, new))


def called(copy: Path, *command: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": f"{copy / 'src'}:{copy / 'kernels'}"}
    return subprocess.run(
        [copy / ".python", "-m", *command], cwd=copy, capture_output=True, text=True, env=env
    )


def checked(copy: Path, scale: str = "mini") -> str:
    """What `relinear check` says."""
    done = called(copy, "relinear.cli", "check", "--scale", scale, "--device", "cpu")
    assert "Traceback" not in done.stderr and (done.returncode == 0) == (not done.stderr), done.stderr
    return done.stdout + done.stderr


# --- a method of the README ---


@pytest.mark.parametrize("scale", ["mini", "smollm2", "qwen", "paper"])
def test_the_readmes_method_is_planned_at_every_scale(copy, scale):
    add(copy, examples("README.md", "Add a method"))
    done = called(
        copy, "snakemake", "--dry-run", "results/table2.csv", "lolcats_table1", "--config", f"scale={scale}"
    )
    assert done.returncode == 0, done.stdout[-2000:]
    jobs = set(re.findall(r"wildcards: name=elu(?:, measure=(\w+))?$", done.stdout, re.MULTILINE))
    assert {"", "perplexity", "commonsense"} <= jobs and "perplexity_no_linear" not in jobs
    assert f"scale {scale}: " in checked(copy, scale)


@pytest.mark.slow
def test_the_readmes_method_keeps_the_laws(copy):
    add(copy, examples("README.md", "Add a method"))
    done = called(
        copy, "pytest", "-q", "-p", "no:cacheprovider", "tests/test_laws.py", "-k", "[elu- or [elu]"
    )
    assert done.returncode == 0 and int(re.search(r"(\d+) passed", done.stdout)[1]) > 50, done.stdout[-2000:]


# --- a row that misfits a column ---

PARTS = """label: Parts
says: perplexity with and without parts
columns:
  - {name: ppl, measure: perplexity, metric: perplexity}
  - {name: ppl_no_linear, measure: perplexity_no_linear, metric: perplexity}
  - {name: kl, measure: fidelity, metric: kl, of: attention}
"""


def test_a_cell_that_a_rows_method_cannot_have_is_not_defined_and_says_why(copy):
    add(
        copy,
        {
            "workflow/papers/comparison/parts.yaml": (
                PARTS + "rows: [{run: teacher}, {run: t2r}, {run: lizard}]\n"
            )
        },
    )
    p = Plan(workflow=copy / "workflow", results=copy / "results")
    artefact = p.artefacts["comparison_parts"]
    p.check_artefact(artefact)
    softmax = "softmax attention, which no method has replaced"
    expected = {
        ("teacher", "perplexity_no_linear"): "no linear part",
        ("t2r", "perplexity_no_linear"): "no linear part",
        ("teacher", "fidelity"): softmax,
    }
    assert p.undefined(artefact) == expected and not expected.keys() & p.reads(artefact).keys()
    files = {path.suffix: path for path in draw_planned(p, artefact)}
    shown = (copy / "results/mini/comparison/parts.md").read_text()
    assert shown.count("not defined: no linear part") == 2 and shown.count(f"not defined: {softmax}") == 1
    cells = json.loads(files[".json"].read_text())["cells"]
    assert cells["t2r"]["ppl_no_linear"] == "workflow/papers/comparison/parts.yaml#/rows/1"


def test_a_column_that_no_row_can_have_is_an_error_of_its_table(copy):
    add(copy, {"workflow/papers/comparison/parts.yaml": PARTS + "rows: [{run: teacher}, {run: t2r}]\n"})
    said = checked(copy)
    assert (
        "workflow/papers/comparison/parts.yaml: column 'ppl_no_linear' is defined in no row: teacher has no"
        " linear part; t2r has no linear part" in said
    )
    assert called(copy, "snakemake", "lolcats_table1", "--dry-run", "--quiet").returncode == 0


def test_a_cell_of_a_figure_that_there_cannot_be_is_an_error_of_the_figure(copy):
    edit(copy, "workflow/papers/lolcats/figure3.yaml", "run: lolcats_exp", "run: teacher")
    assert (
        "workflow/papers/lolcats/figure3.yaml: measure teacher fidelity: fidelity is of a model whose"
        " attention a method has replaced" in checked(copy)
    )


# --- a wrong spec ---


def test_a_wrong_run_in_one_figure_stops_that_figure_alone(copy):
    edit(copy, "workflow/papers/lolcats/figure3.yaml", "run: lolcats_exp", "run: lolcats_xep")
    error = "workflow/papers/lolcats/figure3.yaml: no run 'lolcats_xep'; near it: lolcats_exp"
    for target, fails in (
        ("lolcats_table1", False),
        ("results/table2.csv", False),
        ("lolcats_figure3", True),
        ("lolcats", True),
        ("plot", True),
    ):
        done = called(copy, "snakemake", target, "--dry-run", "--quiet")
        assert (done.returncode == 1 and error in done.stderr + done.stdout) == fails, (
            f"{target}: {done.stderr}"
        )
    assert "near it: lolcats_exp" in checked(copy)
    assert called(copy, "relinear.cli", "draw", "lolcats", "table1").returncode == 0
    assert error in called(copy, "relinear.cli", "draw", "lolcats", "figure3").stderr


def test_all_faults_are_told_at_once_each_once(copy):
    edit(copy, "workflow/papers/lolcats/figure3.yaml", "run: lolcats_exp", "run: lolcats_xep")
    add(
        copy,
        {
            "workflow/papers/comparison/parts.yaml": (
                PARTS.replace("metric: kl", "metric: lk") + "rows: [{run: t2r}, {run: lizard}]\n"
            )
        },
    )
    lines = checked(copy).splitlines()
    said = "no reading of measure 'fidelity' in workflow/papers/comparison/parts.yaml, 'lk'; have mse, kl"
    assert len(lines) == 2 and said in lines[0] and "uniform_kl" in lines[0]


# --- a metric ---

METRIC = '''"""The rank of attention."""

import numpy as np

from relinear.plan.readings import Reading
from relinear.plan.strict import Strict


class Options(Strict):
    cut: float = 0.1


def measure(model, data, options, job):
    """`rank`."""
    yield Reading("rank", "attention", {}, float(np.mean(0)), None, 1)
'''
RANKS = (
    "label: Ranks\nsays: ranks\ncolumns: [{name: rank, measure: rank, metric: rank}]\nrows: [{run: teacher},"
    " {run: lizard}]\n"
)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("np.mean(0)", "0", None),
        (
            "= 0.1",
            "= float(np.pi)",
            (
                "measure/rank.py: class Options, or what it is made of, uses 'np', which is not there when"
                " options are read"
            ),
        ),
        (
            "float(np.mean(0))",
            "len(data.name)",
            (
                "measure teacher rank: rank reads data, and the measure 'rank' names none; possible: `rank:"
                " {metric: rank"
            ),
        ),
        (
            "np.mean(0)",
            "len(model.attention_layers())",
            (
                "measure/rank.py asks a model for `attention_layers`, which a model of softmax attention"
                " does not"
            ),
        ),
        (
            'Reading("rank"',
            'Reading("rnk"',
            "no reading of measure 'rank' in workflow/papers/comparison/ranks.yaml, 'rank'; have rnk",
        ),
        (
            'Reading("rank"',
            "Reading(str(0)",
            "measure/rank.py: the names of its readings are not written in it; say YIELDS = ",
        ),
    ],
)
def test_a_mistake_in_a_metric_is_told_before_the_first_job_and_stops_that_metric_alone(copy, old, new, said):
    assert METRIC.count(old) == 1
    add(
        copy,
        {
            "src/relinear/measure/rank.py": METRIC.replace(old, new),
            "workflow/papers/comparison/ranks.yaml": RANKS,
        },
    )
    assert (said or "fit") in checked(copy)
    assert called(copy, "snakemake", "lolcats_table1", "--dry-run", "--quiet").returncode == 0
    done = called(copy, "snakemake", "comparison_ranks", "--dry-run", "--quiet")
    assert (done.returncode == 0) == (said is None) and (said is None or said in done.stdout + done.stderr), (
        done.stderr
    )


def test_a_name_that_a_validator_lacks_is_told_too(tmp_path):
    (tmp_path / "measure").mkdir()
    file = tmp_path / "measure/toy.py"
    file.write_text(
        "import numpy as np\nfrom pydantic import field_validator\nfrom relinear.plan.strict import"
        ' Strict\n\n\nclass Options(Strict):\n    cut: float\n\n    @field_validator("cut")\n   '
        " @classmethod\n    def _real(cls, cut):\n        return float(np.float64(cut))\n"
    )
    with pytest.raises(SourceError, match=r"measure/toy.py: class Options, or what it is made of, uses 'np'"):
        check_values(file, {"cut": 0.5}, "here")


AT = {"row": "lizard", "at": {"gpus": 1}}


@pytest.mark.parametrize(
    "spec, place, value, said",
    [
        # drawn by a file beside the spec
        ("comparison/scaling", "claims.0.left.at.gpus", "x", "no gpus 'x'; have 1, 2, 3"),
        ("comparison/scaling", "claims.0.left.at", {"gpu": 2}, "no axis 'gpu'; have gpus"),
        ("comparison/scaling", "claims.0.right.at", {}, "lolcats_window needs `at` with gpus; got none"),
        (
            "comparison/scaling",
            "claims.1.left.row",
            "lizzard",
            "no row 'lizzard'; have lolcats_window, lizard",
        ),
        (
            "comparison/scaling",
            "claims.1.column",
            "finetune, llama",
            "no column 'finetune, llama'; have distill,",
        ),
        ("comparison/scaling", "claims.1.also", ["lizzard"], "no row 'lizzard'"),
        ("comparison/scaling", "claims.1.requires", [AT | {"row": "zzz", "least": 1}], "no row 'zzz'"),
        (
            "comparison/decoding",
            "claims.0.left.at.position",
            "latest",
            "no position 'latest'; have early, late",
        ),
        ("comparison/decoding", "claims.3.column", "state_byte", "no column 'state_byte'; have cpu_ms"),
        ("hedgehog/figure6", "claims.0.left.at.T", "32k", "T is a whole number such as 32768; got '32k'"),
        ("hedgehog/figure6", "claims.0.right.row", "hedgehogs", "no row 'hedgehogs'; have hedgehog, softmax"),
        ("lizard/figure6", "claims.1.left.at.mode", "backward", "no mode 'backward'; have forward, forward+"),
        ("hedgehog/parameters", "claims.0.column", "last_digit", "no column 'last_digit'; have last_digits"),
        # a file that draws measurements
        ("lizard/figure2", "claims.0.column", "meta_wight", "no reading of measure 'gate_stats' or 'gate'"),
        (
            "lizard/figure2",
            "claims.0.left",
            {"row": "lizard", "at": {"layr": 1}},
            "no axis 'layr'; have layer,",
        ),
        # readings along axes
        (
            "comparison/distance",
            "claims.0.left.at.position",
            512,
            "position is a band such as '64-128'; got 512",
        ),
        (
            "comparison/distance",
            "claims.0.left.at",
            {"positions": "0-64"},
            "no sweep 'positions'; have position",
        ),
        (
            "lolcats/figure2",
            "claims.0.left.at",
            {"batch": "x"},
            "batch is a whole number such as 512, or largest",
        ),
        (
            "lizard/figure4",
            "claims.0.left.at",
            {"length": 2048, "beyont": 1},
            "no axis 'beyont'; have length,",
        ),
        (
            "lizard/figure4",
            "claims.0.left.at.length",
            "2k",
            "length is a whole number such as 2048; got '2k'",
        ),
        ("lizard/figure4", "cell.y", "dept", "no axis 'dept'; have length, depth,"),
        ("comparison/second", "columns.+", {"of": "haystack"}, "no object of measure 'mmlu'"),
        ("comparison/second", "columns.+", {"at": {"lenth": 5}}, "no axis 'lenth'; have none"),
        ("comparison/second", "columns.+", {"metric": "f1"}, "no reading of measure 'mmlu'"),
    ],
)
def test_a_place_that_no_number_has_is_told_before_work(tmp_path, spec, place, value, said):
    """What a spec or a claim names and is only looked up when its numbers are there."""
    path = linked(tmp_path / "workflow") / f"papers/{spec}.yaml"
    tree = yaml.safe_load(path.read_text())
    *parents, last = (int(key) if key.isdigit() else key for key in place.split("."))
    parent = functools.reduce(lambda found, key: found[key], parents, tree)
    if last == "+":
        parent.append({"name": "zzz", "measure": "mmlu", "metric": "acc"} | value)
    else:
        parent[last] = value
    path.unlink()
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    with pytest.raises(ConfigError) as error:
        plan = Plan(scale="smoke", workflow=tmp_path / "workflow")
        plan.check_artefact(plan.artefacts[spec.replace("/", "_")])
    assert said in str(error.value) and f"{spec}.yaml" in str(error.value)


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("PLACES = {", "PLACES_OF = {", "give it a constant PLACES, a dict of rows, columns, axes"),
        (
            '"axes": {"T": 32768}',
            '"axis": {}',
            "hedgehog/figure6.py: PLACES is a dict of rows, columns, axes",
        ),
        (
            '"rows": NAMES',
            '"rows": "hedgehog"',
            "hedgehog/figure6.py: PLACES is a dict of rows, columns, axes",
        ),
        ('{"T": 32768}', '{"T": None}', "axes, each with its values or an example of them; got"),
        ('{"T": 32768}', '"T"', "axes, each with its values or an example of them; got"),
        (
            '{"T": 32768}',
            '{"T": 1 + "2"}',
            "PLACES cannot be read before any library is imported: unsupported",
        ),
        ("PLACES = {", "PLACES = look_off() or {", "PLACES cannot be read before any library is imported"),
        ("PLACES = {", "PLACES = = {", "hedgehog/figure6.py, line"),
    ],
)
def test_a_file_beside_a_spec_says_where_claims_find_their_numbers(tmp_path, old, new, said):
    workflow = linked(tmp_path / "workflow")
    script = workflow / "papers/hedgehog/figure6.py"
    text = script.read_text()
    assert text.count(old) == 1
    script.unlink()
    script.write_text(text.replace(old, new))
    plan = Plan(scale="smoke", workflow=workflow)
    with pytest.raises(ConfigError, match=re.escape(said)):
        plan.check_artefact(plan.artefacts["hedgehog_figure6"])
    plan.check_artefact(plan.artefacts["lizard_figure6"])


@pytest.mark.parametrize(
    "said, told",
    [
        (
            "('length',)",
            "AXES is a dict of axes, each with its values or an example of them; got ('length',)",
        ),
        ("{'length': None}", "AXES is a dict of axes"),
        ("{'length': numpy.int64(3)}", "AXES cannot be read before any library is imported: name 'numpy'"),
    ],
)
def test_axes_that_cannot_be_read_are_told(tmp_path, said, told):
    (tmp_path / "own.py").write_text(f"import numpy\nAXES = {said}\n")
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path.name}/own.py: {told}")):
        metric_axes(tmp_path / "own.py")


@functools.cache
def committed() -> dict[str, list[dict]]:
    """The committed readings of each metric."""
    found: dict[str, list[dict]] = {}
    for folder in [folder for place in store.campaigns(REFERENCE) for folder in store.nodes(place)]:
        record = json.loads(store.read(folder / "run.json"))
        if record["measure"]:
            metrics = json.loads(store.read(folder / "metrics.json"))
            found.setdefault(record["config"].get("metric"), []).extend(metrics["readings"])
    return found


@pytest.mark.parametrize("metric", metrics())
def test_a_metric_s_readings_lie_on_the_axes_that_it_says(metric):
    for at in {json.dumps(reading["at"]) for reading in committed().get(metric, ())}:
        check_axes(json.loads(at), metric_axes(metric_file(metric)))


@pytest.mark.parametrize("metric", metrics())
def test_a_metric_yields_what_it_says(metric):
    """Its committed readings have these names alone."""
    found = {reading["metric"] for reading in committed().get(metric, ())}
    assert found <= set(metric_yields(metric_file(metric)))


@pytest.mark.parametrize("metric", metrics())
def test_a_metric_says_each_reading_that_its_file_writes(metric):
    """A name that is missing in YIELDS would refuse a column that the metric has."""
    written = set(re.findall(r'Reading\(\s*"(\w+)"', metric_file(metric).read_text()))
    assert written <= set(metric_yields(metric_file(metric)))


def test_what_a_metric_needs_is_read_from_its_file():
    assert reads_data(metric_file("perplexity")) and reads_data(metric_file("lm_eval"))
    assert not reads_data(metric_file("needle")) and not reads_data(metric_file("state_bytes"))
    assert "linearized" in metric_needs(metric_file("fidelity"))
    with pytest.raises(ConfigError, match="names none; possible: `perplexity: {metric: perplexity"):
        p = Plan(scale="smoke")
        p.__dict__["measures"] = {
            **p.measures,
            "perplexity": p.measures["perplexity"].model_copy(update={"data": None}),
        }
        p.check_node(p.measured("teacher", "perplexity"))
