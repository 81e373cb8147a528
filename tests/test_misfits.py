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
from test_additions import examples

from relinear.core import store
from relinear.draw.planned import draw_planned
from relinear.plan.options import SourceError, check_values, metric_needs, metric_yields, reads_data
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


@functools.cache
def committed() -> list[tuple[set[str], str]]:
    """Of each committed measurement the names of its readings, and its metric."""
    nodes = [folder for place in store.campaigns(REFERENCE) for folder in store.nodes(place)]
    records = {folder: json.loads(store.read(folder / "run.json")) for folder in nodes}
    return [
        (
            {reading["metric"] for reading in json.loads(store.read(folder / "metrics.json"))["readings"]},
            record["config"].get("metric"),
        )
        for folder, record in records.items()
        if record["measure"]
    ]


@pytest.mark.parametrize("metric", metrics())
def test_a_metric_yields_what_it_says(metric):
    """Its committed readings have these names alone."""
    found = set()
    for readings, of in committed():
        found |= readings if of == metric else set()
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
