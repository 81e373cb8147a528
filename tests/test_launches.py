"""The launches of docs/running.md on machines that are not here: their files have what those systems read,
and their commands are dry-run. No cluster took them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, Clone, copy_sources, environment

PROFILES = ROOT / "profiles"
JOB = yaml.safe_load((PROFILES / "kubernetes/job.yaml").read_text())
TASK = yaml.safe_load((PROFILES / "skypilot/task.yaml").read_text())
POD = JOB["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]
RUNNING = (ROOT / "docs/running.md").read_text()
WORKDIR = re.search(r"^WORKDIR (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[1]


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Clone:
    """A clone whose `.venv/bin/snakemake` only says what would run."""
    clone = copy_sources(tmp_path_factory.mktemp("launches") / "clone")
    (clone / ".venv/bin").mkdir(parents=True)
    dry = clone / ".venv/bin/snakemake"
    dry.write_text(f'#!/bin/sh\nexec {sys.executable} -m snakemake --dry-run "$@"\n')
    dry.chmod(0o755)
    return clone


def jobs(clone: Clone, *command: str, **more: str) -> list[str]:
    """The rules that a command would run."""
    env = environment() | {"PATH": f"{clone / '.venv/bin'}:{os.environ['PATH']}"} | more
    done = subprocess.run(command, cwd=clone.root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return re.findall(r"^(?:local)?rule (\w+):", done.stdout + done.stderr, re.MULTILINE)


def test_kueue_admits_the_job_and_every_gpu_of_it_is_used(clone):
    assert (JOB["apiVersion"], JOB["kind"]) == ("batch/v1", "Job")
    assert JOB["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] and JOB["spec"]["suspend"] is True
    assert POD["restartPolicy"] == "Never" and JOB["spec"]["backoffLimit"] > 0
    gpus = CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
    assert f"gpu={gpus}" in CONTAINER["args"]
    made = jobs(clone, *CONTAINER["command"], *CONTAINER["args"])
    assert {"distill", "finetune", "measure", "table2"} <= set(made)


def test_a_pod_that_comes_again_has_what_the_one_before_it_made():
    claims = [volume["name"] for volume in POD["volumes"] if "persistentVolumeClaim" in volume]
    [kept] = [mount for mount in CONTAINER["volumeMounts"] if mount["name"] in claims]
    assert kept["mountPath"] == f"{WORKDIR}/results", (
        "where a stage keeps its checkpoints (.work) and results"
    )
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == {v["name"] for v in POD["volumes"]}
    kept_too = {entry["name"]: entry["value"] for entry in CONTAINER["env"]}
    assert kept_too.keys() == {"RELINEAR_CACHE", "HF_HOME"}, "the caches of docs/running.md"
    assert all(path.startswith(f"{kept['mountPath']}/") for path in kept_too.values())


def test_skypilots_task_is_the_same_call(clone):
    """Its fields are those of SkyPilot's own schema that the task has."""
    assert TASK.keys() == {"name", "workdir", "resources", "envs", "setup", "run"}
    for script in (TASK["setup"], TASK["run"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    gpus = TASK["resources"]["accelerators"].partition(":")[2]
    made = jobs(clone, "bash", "-c", TASK["run"], **TASK["envs"], SKYPILOT_NUM_GPUS_PER_NODE=gpus)
    assert {"distill", "finetune", "measure", "table2"} <= set(made)
    assert (
        "uv python install 3.12" in TASK["setup"]
        and 'make setup PYTHON="$(uv python find 3.12)"' in TASK["setup"]
    )


@pytest.mark.parametrize("file", ["kubernetes/job.yaml", "skypilot/task.yaml"])
def test_the_page_gives_the_command_that_the_file_begins_with(file):
    command = (PROFILES / file).read_text().splitlines()[0].removeprefix("# ")
    assert f"profiles/{file}" in command and command in RUNNING and Path(PROFILES / file).is_file()
