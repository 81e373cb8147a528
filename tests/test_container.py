"""The container's recipe and the catalogue's entry name files that exist. The container is built where there
is a builder, linted where there is hadolint."""

import re
import shutil
import subprocess
import tomllib

import pytest
import yaml
from conftest import ROOT
from packaging.specifiers import SpecifierSet

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
