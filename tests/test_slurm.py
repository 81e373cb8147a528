"""The profile `slurm` on a real Slurm: controller, node and authentication on loopback, as the user who
tests, until the test ends.

Needs Debian's slurmctld, slurmd, slurm-client and munge; neither root nor systemd.
"""

import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import HOLD, append, children, curve_of, free_port, wait

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
MISSING = [p for p in PROGRAMS if not shutil.which(p, path=PATH)]

pytestmark = pytest.mark.skipif(
    bool(MISSING),
    reason=(
        f"NOT TESTED ON SLURM: no {', '.join(MISSING)}; apt-get install slurmctld slurmd slurm-client munge"
    ),
)

# For a container without systemd: no accounting database, no cgroups, and the node has the resources that
# stand here.
CONF = """
ClusterName=relinear
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge/socket
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory={memory} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def ask(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Iterator[Path]:
    """A cluster of one node, which the commands of this process and its children speak to; its folder, with
    the daemons' logs."""
    folder = tmp_path / "slurm"
    for name in ("munge", "state", "spool", "bin"):
        (folder / name).mkdir(parents=True)
    key = folder / "munge/key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    host, memory = socket.gethostname().split(".")[0], psutil.virtual_memory().total >> 20
    ports = [free_port(), free_port()]
    text = CONF.format(
        host=host, user=getpass.getuser(), folder=folder, ports=ports, cores=os.cpu_count(), memory=memory
    )
    (folder / "slurm.conf").write_text(text)
    # Inside a job the plugin drops SLURM_CONF: on a real cluster srun finds its configuration in /etc/slurm.
    srun = folder / "bin/srun"
    srun.write_text(
        f'#!/bin/sh\nSLURM_CONF={folder}/slurm.conf exec {shutil.which("srun", path=PATH)} "$@"\n'
    )
    srun.chmod(0o755)
    monkeypatch.setenv("SLURM_CONF", f"{folder}/slurm.conf")
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{PATH}")
    files = [f"--{what}-file={folder}/munge/{what}" for what in ("key", "pid", "log", "seed")]
    daemons = []
    try:
        # --force: pytest's folders are closed to other users, none of whom takes part.
        for command in (
            ["munged", "--foreground", "--force", f"--socket={folder}/munge/socket", *files],
            ["slurmctld", "-D"],
            ["slurmd", "-D"],
        ):
            with (folder / f"{command[0]}.out").open("w") as out:
                daemons.append(subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL))
            if command[0] == "munged":
                wait((folder / "munge/socket").exists, "munged")
        wait(
            lambda: (
                "idle"
                in subprocess.run(["sinfo", "--noheader", "-o", "%T"], capture_output=True, text=True).stdout
            ),
            logs(folder),
        )
        yield folder
        subprocess.run(["scancel", f"--user={getpass.getuser()}"], check=False, timeout=60)
        wait(lambda: not ask("squeue", "--noheader"), "the jobs to end")
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def logs(folder: Path):
    """The daemons' logs, shown when a wait fails."""

    class Text:
        def __str__(self) -> str:
            return "the node to be idle: " + "\n".join(
                f"{p.name}: {p.read_text()[-1500:]}" for p in folder.glob("*.out")
            )

    return Text()


def test_a_cancelled_job_is_resumed_by_the_same_command(slurm, fresh, tmp_path):
    run, target = "t2r", "results/smoke/runs/t2r/gate/run.json"
    fresh.snakemake("results/smoke/text/stories@tiny/run.json")  # here, to save the test a minute
    append(fresh, "src/relinear/tracking/live.py", HOLD)
    (fresh / "hold").write_text(f"{run} finetune step 5")
    command = {"options": ("--workflow-profile", "slurm", "--slurm-init-seconds-before-status-checks", "5")}

    process = fresh.popen(target, **command)  # a Python of its own: Slurm ends its own processes, no forks
    wait(lambda: (fresh / "held").is_file() or process.poll() is not None, "the job to come to step 5")
    assert process.poll() is None, process.communicate()[0]
    job, asked = ask("squeue", "--noheader", "-o", "%i %C %m %l").split(maxsplit=1)
    assert asked == "1 3000M 10:00", "what workflow/scales/smoke.yaml says of cores, memory and minutes"
    ask("scancel", job)
    output, _ = process.communicate()
    assert process.returncode != 0 and f"SLURM-job '{job}' failed, SLURM status is: 'CANCELLED'" in output
    # Slurm calls a job cancelled as soon as it has told it to end.
    wait(lambda: not ask("squeue", "--noheader"), "the job to end")
    assert list((fresh / f"results/smoke/.work/{run}.finetune/checkpoints").glob("0*"))
    assert children(fresh, run, "finetune") == ["KILLED"], (
        "Slurm's SIGTERM came to the stage, which said goodbye"
    )

    (fresh / "hold").unlink()
    (fresh / "held").unlink()
    fresh.snakemake(target, **command)
    assert children(fresh, run, "finetune") == ["KILLED", "FINISHED"]
    assert children(fresh, run, "gate") == ["FINISHED"]
    assert "goes on at step 5 of" in (fresh / f"results/smoke/logs/{run}.finetune.log").read_text()

    theirs, ours = tmp_path / "undisturbed", fresh.stage(run, "finetune")
    shutil.copytree(fresh / "results/smoke", theirs / "smoke", ignore=shutil.ignore_patterns("runs", ".work"))
    done = fresh.relinear("finetune", run, "--scale", "smoke", "--threads", "1", "--results", str(theirs))
    assert done.returncode == 0, done.stderr
    theirs /= f"smoke/runs/{run}/finetune"
    assert curve_of(ours) == curve_of(theirs)
    weights = sorted(p.relative_to(theirs) for p in theirs.rglob("*.safetensors"))
    assert weights and all((ours / p).read_bytes() == (theirs / p).read_bytes() for p in weights)
