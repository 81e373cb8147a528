"""The profile `kubernetes`, as far as no cluster is needed: its plan, the manifests it writes, the states of jobs that it reads.

A kubectl of our own records a manifest and runs its command here; no test of this file says that a real cluster takes it.
"""

import os
import signal
import subprocess
import sys
import time

import pytest
import yaml
from conftest import ROOT, wait

KUBECTL = f"""#!{sys.executable}
import os, pathlib, subprocess, sys
here = pathlib.Path(__file__).parent
verb, *rest = sys.argv[1:]
(here / "calls").open("a").write(" ".join(sys.argv[1:]) + "\\n")
if verb == "create":
    import yaml
    name = f"relinear-{{len(list(here.glob('*.yaml')))}}"
    (here / f"{{name}}.yaml").write_text(sys.stdin.read())
    container = yaml.safe_load((here / f"{{name}}.yaml").read_text())["spec"]["template"]["spec"]["containers"][0]
    command = [*container["command"]] if "KUBECTL_RUNS" in os.environ else ["true"]
    done = subprocess.run(command, cwd=container["workingDir"], stdout=(here / "log").open("a"), stderr=subprocess.STDOUT)
    ended = f"s={{'' if done.returncode else 1}} f={{1 if done.returncode else ''}}"
    (here / name).write_text(f"{{name}} {{os.environ.get('KUBECTL_STATE', ended)}}")
    print(f"job.batch/{{name}}")
elif verb == "get":
    print((here / rest[1]).read_text(), end="")
"""
SETTINGS = {"RELINEAR_CLAIM": "work", "RELINEAR_VOLUME": "/work", "RELINEAR_IMAGE": "registry/python:3.11"}


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    """The folder of our kubectl, which has the manifests that it was given."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "kubectl").write_text(KUBECTL)
    (folder / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    return folder


def profile(script: str, *args: str) -> subprocess.CompletedProcess:
    return subprocess.run([ROOT / "profiles/kubernetes" / script, *args], capture_output=True, text=True)


def pod(folder) -> dict:
    [manifest] = [yaml.safe_load(p.read_text()) for p in folder.glob("*.yaml")]
    assert manifest["kind"] == "Job" and manifest["spec"]["backoffLimit"] == 0
    return manifest["spec"]["template"]["spec"]


def test_a_stage_runs_as_a_job_with_what_its_scale_reserves(kubectl, fresh, monkeypatch):
    monkeypatch.setenv("KUBECTL_RUNS", "yes")
    fresh.snakemake("results/smoke/models/tiny/run.json", options=("--workflow-profile", "kubernetes"))
    assert (fresh / "results/smoke/models/tiny/run.json").is_file(), (kubectl / "log").read_text()
    spec = pod(kubectl)
    [container] = spec["containers"]
    assert container["resources"] == {"requests": {"cpu": "1", "memory": "3000M"}, "limits": {"memory": "3000M"}}
    assert spec["activeDeadlineSeconds"] == 600 and container["workingDir"] == str(fresh.root)


def test_a_stage_on_gpus_asks_for_them_in_its_limits(kubectl, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    assert profile("submit", "8", "32000", "240", "2", "job.sh").stdout == "relinear-0\n"
    [container] = pod(kubectl)["containers"]
    assert container["resources"] == {"requests": {"cpu": "8", "memory": "32000M"}, "limits": {"memory": "32000M", "nvidia.com/gpu": "2"}}
    assert {"name": "MLFLOW_TRACKING_URI", "value": "http://mlflow:5000"} in container["env"]
    assert container["volumeMounts"][0] == {"name": "work", "mountPath": "/work"}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_lacks_is_named(kubectl, monkeypatch, name):
    monkeypatch.delenv(name)
    done = profile("submit", "1", "2000", "30", "0", "job.sh")
    assert done.returncode and f"{name}: is not set" in done.stderr
    assert not list(kubectl.glob("*.yaml"))


@pytest.mark.parametrize(
    ("state", "said"),
    [("relinear-0 s= f=", "running"), ("relinear-0 s=1 f=", "success"), ("relinear-0 s= f=1", "failed"), ("", "failed"), (None, "running")],
    ids=["active", "succeeded", "failed", "deleted", "no answer"],
)
def test_a_jobs_state_is_read(kubectl, state, said):
    if state is not None:
        (kubectl / "relinear-0").write_text(state)
    assert profile("status", "relinear-0").stdout == f"{said}\n"


def failing(kubectl, code: str = "exit 1") -> None:
    (kubectl / "kubectl").write_text(f"#!/bin/sh\necho 'The connection to the server was refused' >&2\n{code}\n")


def test_submit_fails_where_kubectl_does(kubectl):
    failing(kubectl)
    done = profile("submit", "1", "2000", "30", "0", "job.sh")
    assert done.returncode != 0 and done.stdout == "" and "refused" in done.stderr


def test_a_job_that_cannot_be_submitted_ends_the_command(kubectl, fresh):
    failing(kubectl)
    output = fresh.snakemake("results/smoke/models/tiny/run.json", options=("--workflow-profile", "kubernetes"), fails=True)
    assert "refused" in output and "Traceback" not in output


def test_a_server_that_stays_silent_is_an_error_after_a_bounded_wait(kubectl, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (kubectl / "relinear-0").write_text("relinear-0 s= f=")
    whole = (kubectl / "kubectl").read_text()
    failing(kubectl)
    assert profile("status", "relinear-0").stdout == "running\n"
    silent = tmp_path / ".snakemake/kubernetes.silent"
    os.utime(silent, (0, 0))
    done = profile("status", "relinear-0")
    assert done.stdout == "failed\n" and "has not answered for 10 minutes; job relinear-0 counts as failed" in done.stderr
    (kubectl / "kubectl").write_text(whole)
    assert profile("status", "relinear-0").stdout == "running\n" and not silent.exists(), "an answer ends the count"


@pytest.mark.parametrize("name", [*SETTINGS, "MLFLOW_TRACKING_URI"])
def test_a_setting_is_one_value_of_the_manifest_whatever_stands_in_it(kubectl, monkeypatch, name):
    text = 'x", privileged: true, y: "\\ $(touch PWNED)'
    monkeypatch.setenv(name, text)
    assert profile("submit", "1", "2000", "30", "0", "job.sh").returncode == 0
    spec = pod(kubectl)
    found = [spec["containers"][0]["image"], spec["volumes"][0]["persistentVolumeClaim"]["claimName"], spec["containers"][0]["env"][0]["value"]]
    assert text in [*found, spec["containers"][0]["volumeMounts"][0]["mountPath"]] and "privileged" not in spec["containers"][0]
    monkeypatch.setenv(name, "x\nhostNetwork: true")
    assert profile("submit", "1", "2000", "30", "0", "job.sh").returncode != 0


def test_cancelling_deletes_the_jobs(kubectl):
    assert profile("cancel", "relinear-0", "relinear-1").returncode == 0
    assert (kubectl / "calls").read_text().startswith("delete job ") and "relinear-0 relinear-1" in (kubectl / "calls").read_text()


@pytest.mark.parametrize("name", ["kubernetes", "slurm"])
def test_a_dry_run_of_a_cluster_plans_what_one_machine_does(fresh, name):
    """Every stage of the headline, no GPU needed here; and no setting of the default profile lost but its cap on GPUs."""
    options = ("--dry-run", "--quiet", "host", "--workflow-profile", name)
    counted = fresh.snakemake("results/table2.csv", scale="smollm2", options=options).split("Job stats:")[1]
    assert all(
        f"{stage} {n}" in " ".join(counted.split()) for stage, n in {"distill": 4, "finetune": 7, "written": 1, "measure": 92, "total": 116}.items()
    )
    ours, default = (yaml.safe_load((ROOT / f"profiles/{p}/config.yaml").read_text()) for p in (name, "default"))
    assert default.pop("resources") == ["gpu=1"] and default.pop("cores") == "all"  # caps of one machine
    assert default.items() <= ours.items()


@pytest.mark.parametrize("server", ["answers", "is gone"])
def test_ctrl_c_is_clean(kubectl, fresh, server, monkeypatch):
    """The jobs are deleted, where the server can be reached; no traceback, and no wait for it, where it cannot."""
    monkeypatch.setenv("KUBECTL_STATE", "s= f=")  # the job goes on and on
    process = fresh.popen("results/smoke/models/tiny/run.json", options=("--workflow-profile", "kubernetes"))
    job = "relinear-0"
    wait(lambda: (kubectl / job).is_file() or process.poll() is not None, "a job", 120)
    if server == "is gone":
        failing(kubectl, 'echo "$@" >> "$(dirname "$0")/calls"; exit 1')
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0 and "Traceback" not in output and "TypeError" not in output, output
    assert f"--wait=false {job}" in (kubectl / "calls").read_text()
