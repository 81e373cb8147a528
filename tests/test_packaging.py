"""The pins, the Makefile's targets and the linters: one clone, one environment, two commands."""

import ast
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires, version
from pathlib import Path

import pytest
import releases
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import relinear
from relinear import stages
from relinear.cli import SUITE
from relinear.core import store
from relinear.files import sha256
from relinear.get.assets import CLIENTS
from relinear.plan.plan import Plan
from relinear.plan.scale import scales
from relinear.plan.specs import available
from relinear.plan.targets import explain_target

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
CORE = PYPROJECT["project"]["dependencies"]
DIRECT = [*CORE, *EXTRAS["suite"], *EXTRAS["cluster"], *EXTRAS["corpus"], *EXTRAS["dev"]]
# snakemake is called; of the others pyproject.toml says why they are there
UNIMPORTED = {"accelerate", "snakemake"}
# the kernels' benchmark measures itself against the one where it is installed, and the other calls us
OPTIONAL = {"fla", "vllm"}

# Complaints of `snakemake --lint` that are accepted, with the reasons:
LINT_EXCEPTIONS = {
    # The whole DAG runs in the one environment that requirements.lock pins; one per rule would be sixteen
    # copies of torch.
    "Specify a conda environment or container for each rule.",
    # The command's beginning holds the paths of this clone and of its Python, which must not be `params`: a
    # clone that is moved would retrain everything. The settings that a step depends on are in its `key`.
    "Shell command directly uses variable PYTHON from outside of the rule",
    "Shell command directly uses variable RELINEAR from outside of the rule",
    "Shell command directly uses variable OPTIONS from outside of the rule",
    "Shell command directly uses variable TEE from outside of the rule",
    # The name of the rule, which Snakemake gives to each shell command; its lint does not know that.
    "Shell command directly uses variable rule from outside of the rule",
}


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def python(*arguments: str) -> subprocess.CompletedProcess:
    return run(sys.executable, "-m", *arguments)


@pytest.fixture(scope="module")
def snakemake(interpreter):
    """What `snakemake ARGUMENTS` says here, by a Python whose libraries are imported already. What it says
    twice is asked for once."""
    return functools.cache(lambda *arguments: run(interpreter, "-m", "snakemake", *arguments))


def parsed(lines) -> dict[str, Requirement]:
    """Requirements by canonical name."""
    requirements = map(Requirement, lines)
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


def locked() -> dict[str, Requirement]:
    return parsed(
        line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")
    )


def environment() -> tuple[list[str], list[str]]:
    """environment.yml's conda packages, and the lines it gives pip."""
    *conda, last = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    return conda, last["pip"]


@pytest.mark.parametrize("line", DIRECT + PYPROJECT["build-system"]["requires"])
def test_the_lock_has_the_one_pin_of_each_range(line):
    want = Requirement(line)
    assert ">=" in {bound.operator for bound in want.specifier} <= {">=", "<"}, (
        "pins stand in requirements.lock alone"
    )
    got = locked()[canonicalize_name(want.name)]
    [pin] = got.specifier
    assert pin.operator == "==" and want.specifier.contains(pin.version), (
        f"`make lock`: {got} is locked, {want} is wanted"
    )
    for platform in (
        {"sys_platform": "linux", "platform_machine": "x86_64"},
        {"sys_platform": "darwin", "platform_machine": "arm64"},
    ):
        assert (
            got.marker is None
            or want.marker is None
            or got.marker.evaluate(platform) == want.marker.evaluate(platform)
        )


@pytest.mark.parametrize("minor", ["3.11", "3.12", "3.13"])
def test_the_lock_pins_what_is_installed_with_it(minor):
    """Each requirement of each locked package is itself locked, to a version that satisfies it; torch's CUDA
    build excepted."""
    lock, platform = locked(), {"python_version": minor, "python_full_version": f"{minor}.0", "extra": ""}
    unmet = []
    for name in lock:
        try:
            needs = requires(name) or []
        except PackageNotFoundError:  # another platform's
            continue
        for need in map(Requirement, needs):
            if need.name.startswith(("cuda", "nvidia")) or (
                need.marker and not need.marker.evaluate(platform)
            ):
                continue
            pin = lock.get(canonicalize_name(need.name))
            if pin is None or not need.specifier.contains(
                next(iter(pin.specifier)).version, prereleases=True
            ):
                unmet.append(f"{name} needs {need}; locked: {pin}")
    assert not unmet


def test_the_lock_brings_no_cuda_and_names_no_host():
    text = (ROOT / "requirements.lock").read_text()
    assert not [name for name in locked() if name.startswith(("cuda", "nvidia"))], (
        "torch's CUDA build pins these; its CPU build needs none"
    )
    assert "://" not in text and "--" not in text.replace("# ", "")


def committed() -> list[dict]:
    """The records of all committed results."""
    nodes = [folder for place in store.campaigns(ROOT / "results/reference") for folder in store.nodes(place)]
    return [json.loads(store.read(folder / "run.json")) for folder in nodes]


def test_what_made_the_committed_results_is_in_the_ranges():
    made = [record["versions"] for record in committed()]
    ranges = {**parsed(DIRECT)}
    for versions in {tuple(sorted(versions.items())) for versions in made}:
        outside = [
            (name, v)
            for name, v in versions
            if (r := ranges.get(canonicalize_name(name))) and not r.specifier.contains(v)
        ]
        assert not outside


def test_the_lock_of_every_committed_campaign_is_committed():
    named = {record["lock"]: record["git"]["commit"] for record in committed() if "lock" in record}
    assert len(named) >= 2
    for lock, commit in named.items():
        path = ROOT / f"results/reference/locks/{lock[:12]}.lock"
        assert path.is_file() and sha256(path) == lock, (
            f"git show {commit}:requirements.lock > {path.relative_to(ROOT)}"
        )


def test_conda_installs_the_lock():
    conda, pip = environment()
    assert f"python {PYPROJECT['project']['requires-python']}" in conda
    assert pip == ["--requirement requirements.lock", "--editable ."]


def test_what_is_imported_is_named_and_what_is_named_is_imported():
    modules = set()
    for path in [*ROOT.glob("src/**/*.py"), *ROOT.glob("kernels/**/*.py"), *ROOT.glob("tests/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules.add(node.module.partition(".")[0])
    own = {"relinear", "relinear_kernels"} | {path.stem for path in ROOT.glob("tests/*.py")}
    distributions = packages_distributions()
    named = set(parsed(DIRECT))
    foreign = modules - own - OPTIONAL - sys.stdlib_module_names
    imported = {
        module: {canonicalize_name(name) for name in distributions.get(module, ())} for module in foreign
    }
    assert [module for module, names in imported.items() if not names & named] == [], "imported, not named"
    assert set(parsed([*CORE, *EXTRAS["suite"]])) - set().union(*imported.values()) == UNIMPORTED, (
        "named, not imported"
    )
    suite = set(parsed(EXTRAS["suite"]))
    # mlflow is of two more
    owners = [{canonicalize_name(name) for name in distributions[module]} for module in SUITE]
    assert len(SUITE) == len(suite) and all(names & suite for names in owners), (
        "what the command line says of modules"
    )


def test_this_environment_is_the_locked_one():
    """The tests' verdict holds for this environment alone."""
    lock = locked()
    for name, requirement in parsed(DIRECT).items():
        if requirement.marker is None or requirement.marker.evaluate():
            assert version(name) in lock[name].specifier, (
                f"{lock[name]} is locked, {version(name)} is installed: `make setup`"
            )


@pytest.mark.parametrize("target", ["table2", "test", "lint", "docs", "ui", "setup", "lock", "clean"])
def test_make_knows(target):
    done = run("make", "--dry-run", target)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^make {target}\b", run("make", "help").stdout, re.MULTILINE)


def test_make_passes_on_its_variables():
    done = run("make", "--dry-run", "table2", "CONFIG=scale=smoke budget=0.5", "CORES=3")
    assert "relinear.cli table2 --cores 3 scale=smoke budget=0.5" in done.stdout


def make_setup(folder: Path, python: str) -> subprocess.CompletedProcess:
    """Run `make setup` by a given Python in a folder that requires no package."""
    for name in ("Makefile", "pyproject.toml", "setup.py"):
        (folder / name).write_text((ROOT / name).read_text())
    (folder / "requirements.lock").write_text("")
    return subprocess.run(["make", "setup", f"PYTHON={python}"], cwd=folder, capture_output=True, text=True)


def test_setup_leaves_out_what_only_a_gpu_needs_and_the_tests_bring_it():
    """torch's CUDA build brings its own triton."""
    dry = {target: run("make", "--dry-run", "--always-make", target).stdout for target in ("setup", "test")}
    [filtered] = [line for line in dry["setup"].splitlines() if "> .venv/requirements" in line]
    left = subprocess.run(
        f"{filtered.partition('>')[0]}", shell=True, cwd=ROOT, capture_output=True, text=True
    ).stdout
    lock = (ROOT / "requirements.lock").read_text()
    assert (
        set(lock.splitlines()) - set(left.splitlines())
        == {line for line in lock.splitlines() if line.startswith("triton")}
        != set()
    )
    assert "--requirement .venv/requirements" in dry["setup"] and "import triton" not in dry["setup"]
    assert "-c 'import triton' 2> /dev/null ||" in dry["test"]
    assert "triton" not in parsed(CORE) and "triton" in parsed(EXTRAS["dev"])


def test_without_a_suitable_python_make_says_what_it_needs(tmp_path):
    done = make_setup(tmp_path, "no-such-python")
    assert (
        done.returncode
        and "found no Python 3.11, 3.12 or 3.13" in done.stderr
        and "no-such-python" in done.stderr
    )
    assert not (tmp_path / ".venv").exists()


def test_where_python_is_too_new_make_says_why_and_how_to_get_another(tmp_path):
    new = tmp_path / "python3.14"
    new.write_text(
        f"""#!/bin/sh
test "$1" = --version && exec echo Python 3.14.0
exec {sys.executable} -c "import sys; sys.version_info = (3, 14, 0, 'final', 0); $2"
"""
    )
    new.chmod(0o755)
    done = make_setup(tmp_path, str(new))
    assert done.returncode and "Python 3.14.0 is too new: immutables" in done.stderr
    assert "uv python install 3.12" in done.stderr and not (tmp_path / ".venv").exists()


def test_an_installation_that_fails_does_not_count(tmp_path):
    """There is no package here to install: the last step fails, and is tried again."""
    for _ in range(2):
        done = make_setup(tmp_path, sys.executable)
        assert done.returncode and "[3/3]" in done.stdout
        assert not (tmp_path / ".venv/installed").exists()


def test_ruff_is_content():
    for command in (("check",), ("format", "--check")):
        done = python("ruff", *command, "--no-cache", ".")
        assert done.returncode == 0, done.stdout + done.stderr


def test_snakefmt_is_content():
    done = run(str(Path(sys.executable).parent / "snakefmt"), "--check", "--diff", "Snakefile", "workflow")
    assert done.returncode == 0, done.stdout + done.stderr


def test_snakemake_lint_finds_nothing_but_the_argued_exceptions(snakemake):
    done = snakemake("--lint", "--nolock")
    heading, found = "", {}
    for line in (done.stdout + done.stderr).splitlines():
        if line.startswith("Lints for"):
            heading = line
        elif match := re.fullmatch(r" {4}\* (.*?):", line):
            found.setdefault(match[1], []).append(heading)
    assert found, done.stdout + done.stderr
    assert {title: where for title, where in found.items() if title not in LINT_EXCEPTIONS} == {}
    assert LINT_EXCEPTIONS - set(found) == set(), "exceptions that are no longer needed"


def test_snakemakes_report_has_what_a_run_drew_with_captions(fresh):
    """A figure of a benchmark's rows, which no training stands before."""
    (fresh / "results/reference/kernels").mkdir(parents=True, exist_ok=True)
    (fresh / "results/reference/kernels/bench.csv").write_bytes(
        (ROOT / "results/reference/kernels/bench.csv").read_bytes()
    )
    fresh.snakemake("lizard_figure6")
    fresh.snakemake("lizard_figure6", options=("--report", "report.zip"))
    with zipfile.ZipFile(fresh / "report.zip") as report:
        assert {"report.html", "figure6.png", "figure6.claims.csv"} == {
            Path(name).name for name in report.namelist()
        }
        page = report.read("report/report.html").decode()
    assert all(
        words in page for words in ("Lizard Figure 6", "relinear draw lizard figure6", "The provenance file")
    )


def test_snakemake_lists_every_rule_with_what_it_makes(snakemake):
    done = snakemake("--list", "--nolock")
    assert done.returncode == 0, done.stderr
    listed = dict(re.findall(r"^(\w+)(?: \((.+)\))?$", done.stdout, re.MULTILINE))
    written = {
        name
        for path in ROOT.glob("workflow/rules/*.smk")
        for name in re.findall(r"^rule (\w+):", path.read_text(), re.MULTILINE)
    }
    assert written | set(stages.available()) <= set(listed)
    assert [name for name in written if not listed[name]] == [], "rules without a docstring"
    assert all(listed[name] == stages.stage(name).help for name in stages.available() if name != "measure")
    artefacts = available(ROOT / "workflow" / "papers").values()
    for artefact in artefacts:
        assert listed[artefact.name].startswith(f"{artefact.spec.label}: "), (
            "the paper's own label leads to its rule"
        )
    assert {artefact.paper for artefact in artefacts} <= set(listed), "a paper is a target, too"
    for label in (
        "LoLCATs Table 1",
        *(f"LoLCATs Figure {number}" for number in range(2, 7)),
        "Lizard Figure 5",
        "SUPRA Figure 1",
    ):
        assert [name for name, said in listed.items() if said.startswith(f"{label}:")], f"no rule for {label}"


README = (ROOT / "README.md").read_text()
INDEX = (ROOT / "workflow/papers/README.md").read_text()
TEMPLATE = "snakemake <paper>_<stem>"
TEXTS = "\n".join(
    [
        README,
        *((ROOT / f"docs/{page}.md").read_text() for page in ("running", "models", "efficiency", "results")),
    ]
)


def test_the_readme_and_the_page_on_running_show_the_commands():
    assert "make table2" in README and all(
        f"make {target}" in TEXTS for target in ("test", "setup", "docs", "ui", "help")
    )


def test_the_quickstart_is_five_lines_at_most_and_its_script_times_each(tmp_path):
    """The script reads them from the README: here from one whose commands are quick, or fail."""
    block = re.search(r"## Quickstart\n\n```\n(.*?)```\n\n## Get", README, re.DOTALL)[1].splitlines()
    assert (
        len(block) <= 5
        and "make setup" in block[0]
        and block[-1].startswith("relinear generate results/reference/")
    )
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/quickstart").symlink_to(ROOT / ".ci/quickstart")
    for last, code in (("true # the end", 0), ("false", 1)):
        (tmp_path / "README.md").write_text(
            f"```\nexit 3\n```\n\n## Quickstart\n\n```\nanswer=42\necho $answer\n{last}\n```\n\n## Get\n"
        )
        done = subprocess.run(["bash", tmp_path / ".ci/quickstart"], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (code, "42\n")
        assert re.findall(r"quickstart: \d+\.\d+ s: (.*)", done.stderr) == ["answer=42", "echo $answer", last]


UNREACHED = "The network or the package index of pip could not be reached"


@pytest.mark.parametrize(
    ("says", "code", "told"),
    [
        ("true", 0, ""),
        ("echo 'error: no such verb' >&2; false", 1, "ci: the Quickstart failed"),
        (f"echo 'error: {UNREACHED}' >&2; false", 0, "NOT TESTED to its end"),
        (f"echo 'error: {UNREACHED}' >&2", 0, ""),
    ],
    ids=["works", "fails", "no index", "warned"],
)
def test_ci_fails_where_the_quickstart_does_unless_its_model_cannot_be_downloaded(tmp_path, says, code, told):
    assert (
        UNREACHED.removesuffix("pip could not be reached")
        in (ROOT / "src/relinear/get/assets.py").read_text()
    )
    done = ci(tmp_path, {".ci/quickstart": says})
    assert done.returncode == code and told in done.stderr and bool(told) == ("ci: " in done.stderr), (
        done.stderr
    )
    assert done.stdout.splitlines()[-1] == "test", "pytest's closing line stands last"


ADVICE = "case $1 in */advisories.py | tests/advisories.py) {};; esac"


@pytest.mark.parametrize(
    ("changed", "code", "told"),
    [
        ({}, 0, ["advisories: 2 of them", "test"]),
        ({"bin/make": "echo $1; [ $1 = setup ]"}, 1, ["advisories: 2 of them", "test"]),
        (
            {"bin/make": "echo $1; false"},
            1,
            ["advisories: NOT CHECKED: this run ended before there was an answer"],
        ),
        ({".ci/quickstart": "false"}, 1, ["advisories: 2 of them", "test"]),
    ],
    ids=["passes", "tests fail", "setup fails", "quickstart fails"],
)
def test_ci_tells_advisories_whatever_fails_and_ends_as_the_tests_do(tmp_path, changed, code, told):
    advised = {".venv/bin/python": ADVICE.format("echo advisories: 2 of them; exit 1")}
    done = ci(tmp_path, advised | changed)
    assert (done.returncode, done.stdout.splitlines()[-len(told) :]) == (code, told), done
    assert ("pinned packages have advisories" in done.stderr) == (told[0] == "advisories: 2 of them")


def ci(tmp_path: Path, changed: dict[str, str]) -> subprocess.CompletedProcess:
    """.ci/run with quick commands in the places of those that it calls."""
    scripts = {
        ".ci/quickstart": "true",
        ".venv/bin/python": "true",
        "bin/apt-get": "true",
        "bin/make": "echo $1",
    } | changed
    for name, line in scripts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    return subprocess.run([tmp_path / ".ci/run"], capture_output=True, text=True, env=env)


# Those for clusters are tested with the profiles.
LOCAL = [
    c
    for c in re.findall(r"^(?:.*`)?snakemake ([^#`\n]*results/[^#`\n]*)", TEXTS, re.MULTILINE)
    if "--workflow-profile" not in c
]


@pytest.mark.parametrize("command", LOCAL)
def test_snakemake_understands_what_the_texts_say(snakemake, command):
    done = snakemake(*command.replace("=...", "=smollm2").split(), "--dry-run", "--quiet")
    assert done.returncode == 0, done.stdout + done.stderr


# One command of each kind that the index and the pages print, as printed: no `--cores`, which
# profiles/default has.
PRINTED = [
    "snakemake lolcats_table1",
    "snakemake lolcats_figure3",
    "snakemake t2r",
    "snakemake comparison_controls comparison_recall",
    "snakemake parity",
    "snakemake evaluate --config scale=smoke",
    "snakemake plot --config scale=smoke",
]


@pytest.mark.parametrize("command", PRINTED)
def test_a_printed_command_is_whole(snakemake, command):
    assert command in TEXTS + INDEX
    done = snakemake(*command.split()[1:], "--dry-run", "--quiet")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_command_of_the_index_names_a_rule():
    commands = re.findall(r"`(snakemake [^`]+)`", INDEX)
    known = {artefact.name for artefact in available(ROOT / "workflow/papers").values()}
    assert {"snakemake " + name for name in known} <= set(commands) and not set(commands) - {
        "snakemake " + name for name in known
    } - {TEMPLATE}


def test_a_dry_run_of_a_cluster_plans_what_one_machine_does(fresh):
    """Every stage of the headline, no GPU needed here; and no setting of the default profile lost but its
    caps."""
    options = ("--dry-run", "--quiet", "host", "--workflow-profile", "slurm")
    counted = fresh.snakemake("results/table2.csv", scale="smollm2", options=options).split("Job stats:")[1]
    jobs = {"distill": 4, "finetune": 7, "written": 1, "measure": 92, "total": 116}
    assert all(f"{stage} {n}" in " ".join(counted.split()) for stage, n in jobs.items())
    ours, default = (
        yaml.safe_load((ROOT / f"profiles/{p}/config.yaml").read_text()) for p in ("slurm", "default")
    )
    assert default.pop("resources") == ["gpu=1"] and default.pop("cores") == "all"  # caps of one machine
    assert default.items() <= ours.items()


def test_the_rules_behind_a_target_are_a_graph(snakemake):
    assert "snakemake lolcats_table1 --rulegraph" in TEXTS
    done = snakemake("lolcats_table1", "--rulegraph")
    assert (
        done.returncode == 0
        and done.stdout.lstrip().startswith("digraph")
        and "attention transfer" not in done.stderr
    ), done.stderr
    assert all(
        f'label = "{rule}' in done.stdout for rule in ("distill", "finetune", "measure", "lolcats_table1")
    )


def test_the_list_has_each_step_of_the_work_under_its_name(snakemake):
    done = snakemake("--list", "--nolock")
    steps = {
        "distill": "attention transfer",
        "finetune": "on text",
        "evaluate": "All evaluations",
        "plot": "All plots",
    }
    for rule, words in steps.items():
        assert re.search(rf"^{rule} \(.*{words}", done.stdout, re.MULTILINE), rule


@pytest.mark.parametrize("rule", ["distill", "finetune", "classify", "pretrain", "restore", "measure"])
def test_a_rule_for_one_run_says_how_one_asks_for_it_and_what_it_says_works(rule):
    plan = Plan(scale="smollm2" if rule == "restore" else "smoke")  # no encoder of smoke was altered
    said = explain_target(rule, [rule], plan)
    file = re.search(r"`snakemake (\S+)`", said)[1]
    verb, run, *part = re.search(r"`relinear (.+) --scale \w+`", said)[1].split()
    assert plan.folder(plan.node(verb, run, *part)) / "run.json" == Path(file)


# Targets by their rule; `results/table2.csv` and the like stand above.
NAMED = {
    name for words in re.findall(r"snakemake ([a-z0-9_ \n]+)", TEXTS) for name in words.split() if "_" in name
}


def test_every_target_that_the_texts_name_is_a_rule():
    assert len(NAMED) > 5
    assert set(available(ROOT / "workflow" / "papers")) >= NAMED


def test_the_citation_is_of_this_version_and_of_the_papers_that_are_here():
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    papers = [yaml.safe_load(path.read_text()) for path in (ROOT / "workflow/papers").glob("*/paper.yaml")]
    assert found["version"] == relinear.__version__ and found["license"] == PYPROJECT["project"]["license"]
    assert sorted(x["url"].rpartition("/")[2] for x in found["references"]) == sorted(
        paper["arxiv"] for paper in papers if "arxiv" in paper
    )


def test_the_command_says_its_version():
    done = subprocess.run(
        [sys.executable, "-m", "relinear.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"relinear {relinear.__version__}\n"


@pytest.mark.parametrize(
    ("given", "kept"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_a_command_s_threads_sleep_while_they_wait_unless_one_says_otherwise(given, kept):
    """It is said before torch, whose OpenMP reads it, is imported."""
    own = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
    environment = {k: v for k, v in os.environ.items() if k not in own} | given
    asked = "import relinear.cli, os, sys; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == [kept, "False"], done.stderr


# --- what the page says that each scale needs, and the version ---

TABLE = re.search(
    r"<!-- requirements -->\n(.*?)<!-- end -->", (ROOT / "docs/running.md").read_text(), re.DOTALL
)[1]
ROWS = {
    cells[0].strip("`"): cells[1:]
    for line in TABLE.splitlines()[2:]
    for cells in [[c.strip() for c in line.strip("| ").split("|")]]
}
SAID = {"huggingface_hub": "the hub"}


@pytest.mark.parametrize("scale", scales())
def test_clients_and_downloads_of_a_scale_are_those_of_its_assets(scale):
    plan = Plan(scale=scale)

    def needs(artefacts) -> tuple[set[str], str]:
        nodes = plan.behind([node for artefact in artefacts for node in plan.reads(artefact).values()])
        assets = [
            plan.catalogue[name]
            for name in {name for node in nodes for name in plan.settings(node)["assets"]}
        ]
        clients = {SAID.get(CLIENTS[asset.source], CLIENTS[asset.source]) for asset in assets}
        return clients, f"{sum(asset.download_bytes for asset in assets) / 1e9:.1f} GB".replace(
            "0.0 GB", "0 GB"
        )

    (few, download), (all_of_them, whole) = (
        needs([plan.artefacts["comparison_table2"]]),
        needs(plan.artefacts.values()),
    )
    _, through, *sizes = ROWS[scale]
    first, _, more = through.partition("; for all also ")
    assert (
        set(first.split(", ")) == (few or {"nothing"})
        and (set(more.split(", ")) if more else set()) == all_of_them - few
    )
    assert sizes == [download, whole]


def test_the_version_is_the_one_that_the_changelog_begins_with():
    version, state = re.search(
        r"^## (\S+?)(, not released)?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    ).groups()
    assert relinear.__version__ == version + (".dev0" if state else "")


def test_no_message_advises_a_package_that_no_index_has():
    texts = [
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "README.md",
        ROOT / "pyproject.toml",
    ]
    assert not [path for path in texts if re.search(r"pip install ['\"]?relinear", path.read_text())]


# --- the container, and the entry of the catalogue ---

RECIPE = (ROOT / "Dockerfile").read_text()
STEPS = re.findall(r"^([A-Z]+) (.*)$", RECIPE, re.MULTILINE)


def test_the_recipe_is_the_locked_installation_on_a_python_that_it_is_for():
    [base] = [rest for step, rest in STEPS if step == "FROM"]
    python = re.fullmatch(r"python:(3\.\d+)-slim", base)[1]
    assert python in SpecifierSet(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    )
    assert ("RUN", "make setup") in STEPS and ("CMD", '["make", "table2"]') in STEPS
    before = STEPS[: STEPS.index(("RUN", "make setup"))]
    copied = {name for step, rest in before if step == "COPY" for name in rest.split()[:-1]}
    assert all((ROOT / name).exists() for name in copied)
    needed = re.search(r"^\$\(INSTALLED\): (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert copied >= {"Makefile", "src", "kernels", *needed}, (
        "what `make setup` reads, which would run again if it were newer"
    )


def test_what_a_clone_has_made_stays_out_of_the_image_and_committed_results_do_not():
    left = (ROOT / ".dockerignore").read_text().split()
    assert {".venv", "results/*"} <= set(left) and left.index("!results/reference") > left.index("results/*")


@pytest.mark.skipif(
    shutil.which("hadolint") is None, reason="hadolint is not on the PATH: the Dockerfile was NOT linted"
)
def test_hadolint_is_content():
    done = subprocess.run(["hadolint", ROOT / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def builder() -> str | None:
    """The program that builds images on this machine; None where there is none."""
    for name in ("docker", "podman"):
        if (
            shutil.which(name)
            and subprocess.run([name, "info"], capture_output=True, timeout=30).returncode == 0
        ):
            return name
    return None


@pytest.mark.slow
def test_the_image_is_built_and_answers():
    if (program := builder()) is None:
        pytest.skip("neither docker nor podman builds here: the image was NOT built")
    built = subprocess.run(
        [program, "build", "--quiet", "--tag", "relinear-test", ROOT], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr[-2000:]
    said = subprocess.run(
        [program, "run", "--rm", "relinear-test", "relinear", "--version"], capture_output=True, text=True
    )
    assert said.returncode == 0 and said.stdout.startswith("relinear "), said.stderr


def test_the_catalogues_entry_names_what_is_here():
    entry = yaml.safe_load((ROOT / ".snakemake-workflow-catalog.yml").read_text())["usage"]
    assert set(entry) == {"mandatory-flags", "software-stack-deployment", "report"}
    for path in re.findall(r"[\w./-]+\.(?:md|yml)", entry["mandatory-flags"]["desc"]):
        assert (ROOT / path).is_file()
    assert not any(entry["software-stack-deployment"].values()), "no rule has a `conda:` or a `container:`"
    rules = "".join(
        path.read_text() for path in [ROOT / "Snakefile", *(ROOT / "workflow/rules").glob("*.smk")]
    )
    assert not re.search(r"^\s*(conda|container):", rules, re.MULTILINE)
    assert entry["report"] == ("report(" in rules)


# --- a dry run of publishing ---

TWINE = ("twine==6.2.0",)
PARTS = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE", "src", "kernels")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(kind: str, sources: Path, out: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(out)], cwd=sources, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The folder with a source distribution, and with the wheel that is built from it and not from the
    clone."""
    sources, out, unpacked = (tmp_path_factory.mktemp(name) for name in ("sources", "dist", "unpacked"))
    for part in PARTS:
        (sources / part).symlink_to(ROOT / part)
    source = build("build_sdist", sources, out)
    with tarfile.open(source) as archive:
        archive.extractall(unpacked, **releases.SAFELY)
    build("build_wheel", unpacked / source.name.removesuffix(".tar.gz"), out)
    return out


def test_names_have_the_version_and_the_wheel_of_the_source_has_the_code_and_the_licences(built):
    version = relinear.__version__
    assert {path.name for path in built.iterdir()} == {
        f"relinear-{version}.tar.gz",
        f"relinear-{version}-py3-none-any.whl",
    }
    with zipfile.ZipFile(built / f"relinear-{version}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
    ours = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/relinear").rglob("*.py")}
    assert ours <= names, "a module is in the clone and not in the wheel"
    assert {f"relinear-{version}.dist-info/licenses/{name}" for name in ("LICENSE", "NOTICE")} <= names


def test_what_is_built_passes_an_index_s_checks(built):
    folder = releases.or_skip(releases.installed, TWINE, True)
    done = releases.python(folder, "-m", "twine", "check", "--strict", *map(str, built.iterdir()))
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout + done.stderr


def test_it_is_installed_by_name(built, tmp_path):
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--find-links",
        str(built),
        "--pre",
    ]
    plain = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")} | {
        "PIP_CONFIG_FILE": os.devnull
    }
    done = subprocess.run(
        [*command, "--target", str(tmp_path / "there"), "relinear"],
        cwd=tmp_path,
        env=plain,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = releases.python(tmp_path / "there", "-m", "relinear.cli", "--version", PYTHONSAFEPATH="1")
    assert said.stdout == f"relinear {relinear.__version__}\n", said.stderr
    assert (tmp_path / "there/bin/relinear").is_file()
    said = releases.python(tmp_path / "there", "-m", "relinear.cli", "check", PYTHONSAFEPATH="1")
    assert said.returncode == 1 and re.search(
        r"error: this verb reads workflow/.*Possible, in a clone: `make setup`", said.stderr
    ), said.stderr


@pytest.mark.parametrize("ended", [None, signal.SIGTERM, signal.SIGKILL])
def test_what_tells_that_a_command_goes_on_ends_with_its_shell(ended):
    tell = re.search(r"^TELL = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].replace("$$", "$")
    work = "echo at work; sleep 600 > /dev/null" if ended else "echo at work"
    shell = subprocess.Popen(
        ["sh", "-c", f"{tell.replace('sleep 15', 'sleep 0.2')} {work}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert shell.stdout.readline() == "at work\n"
        if ended:
            assert shell.stdout.readline() == "relinear: still at it\n"
            shell.send_signal(ended)
            shell.wait(60)
        shell.communicate(timeout=60)  # its output ends when nothing writes to it any more
    finally:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
