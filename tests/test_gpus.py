"""Laws of the GPU slots: no two jobs get one device, and no device is lost. An nvidia-smi of our own lists as
many devices as a test wants."""

import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from relinear.machine import cpu

HOLD = (
    "import relinear.machine.gpus, sys; print(*relinear.machine.gpus.claim(int(sys.argv[1])), flush=True);"
    " sys.stdin.read()"
)
TRAIN = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'), flush=True); input()"
EXEC = (
    "import os, relinear.machine.gpus, sys; relinear.machine.gpus.claim(); os.execv(sys.executable,"
    f" [sys.executable, '-c', {TRAIN!r}])"
)


class Machine:
    """A host with `gpus` devices, and the jobs on it."""

    def __init__(self, folder: Path, gpus: int):
        self.folder, self.jobs = folder, []
        (folder / "bin").mkdir()
        smi = folder / "bin/nvidia-smi"
        smi.write_text(
            "#!/bin/sh\n" + "".join(f"echo 'GPU {i}: NVIDIA H200 (UUID: GPU-{i})'\n" for i in range(gpus))
        )
        smi.chmod(0o755)

    def job(self, code: str = HOLD, count: int = 1, **environment: str) -> subprocess.Popen:
        clean = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("SLURM_", "CUDA_", "KUBERNETES_", "RELINEAR_"))
        }
        path = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "TMPDIR": str(self.folder),
            "PYTHONPATH": str(ROOT / "src"),
        }
        command = [sys.executable, "-c", code, str(count)]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.jobs.append(subprocess.Popen(command, env={**clean, **path, **environment}, text=True, **pipes))
        return self.jobs[-1]

    def claimed(self, count: int = 1, **environment: str) -> list[str]:
        """The devices that a job gets where enough are free."""
        return self.job(count=count, **environment).stdout.readline().split()


@pytest.fixture
def machine(tmp_path):
    made = Machine(tmp_path, 4)
    yield made
    for job in made.jobs:
        job.kill()
        job.communicate()


def waits(job: subprocess.Popen) -> bool:
    return "waiting for" in job.stderr.readline()


def test_every_job_gets_devices_of_its_own(machine):
    claims = [machine.claimed(), machine.claimed(2), machine.claimed()]
    assert [len(c) for c in claims] == [1, 2, 1]
    assert sorted(sum(claims, [])) == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_device_is_free_again_however_its_job_ends(machine, end):
    whole = machine.job(count=4)
    assert whole.stdout.readline()
    heir = machine.job(count=3)
    assert waits(heir)
    whole.send_signal(end)
    assert len(heir.stdout.readline().split()) == 3


def test_two_jobs_that_need_all_devices_do_not_hold_half_each(machine):
    first = machine.job()
    assert first.stdout.readline()
    rivals = [machine.job(count=4) for _ in range(2)]
    assert all(waits(job) for job in rivals)
    first.kill()
    ready, _, _ = select.select([job.stdout for job in rivals], [], [])
    [winner] = [job for job in rivals if job.stdout in ready]
    assert len(winner.stdout.readline().split()) == 4
    winner.kill()
    rivals.remove(winner)
    assert len(rivals[0].stdout.readline().split()) == 4


def test_a_process_that_claims_again_keeps_what_it_has(machine):
    """A second stage in one process, as in a notebook, would otherwise wait for its own locks for ever."""
    again = (
        "import relinear.machine.gpus as g, sys; print(*g.claim(2), *g.claim(2), *g.claim(), flush=True);"
        " sys.stdin.read()"
    )
    first, second, *rest = machine.job(again).stdout.readline().split()
    assert first != second and rest == [first, second] * 2


def test_a_job_that_waits_for_its_only_device_keeps_nobody_from_another(machine):
    assert machine.claimed(CUDA_VISIBLE_DEVICES="3") == ["GPU-3"]
    assert waits(machine.job(CUDA_VISIBLE_DEVICES="3"))
    assert machine.claimed() == ["GPU-0"]


def test_devices_are_chosen_among_the_visible_ones(machine):
    assert machine.claimed(CUDA_VISIBLE_DEVICES="2,GPU-3") == ["GPU-2"]
    assert machine.claimed(CUDA_VISIBLE_DEVICES="2,GPU-3") == ["GPU-3"]
    assert waits(machine.job(CUDA_VISIBLE_DEVICES="2,GPU-3"))


def test_jobs_share_a_device_when_told_to(machine):
    two = {"RELINEAR_JOBS_PER_GPU": "2"}
    claims = [machine.claimed(**two)[0] for _ in range(8)]
    assert sorted(claims[:4]) == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"], "an idle device first"
    assert sorted(claims[4:]) == sorted(claims[:4])
    assert waits(machine.job(**two))


@pytest.mark.parametrize(
    ("gave", "count", "claimed"),
    [
        ({"SLURM_JOB_GPUS": "6", "CUDA_VISIBLE_DEVICES": "0"}, 1, []),
        ({"SLURM_JOB_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"}, 1, ["GPU-0"]),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "0,1"}, 1, []),
        ({"CUDA_VISIBLE_DEVICES": ""}, 1, []),
    ],
    ids=["Slurm gave what was asked for", "Slurm gave an allocation of more", "a rank of torchrun", "no GPU"],
)
def test_what_others_gave_is_left_alone(machine, gave, count, claimed):
    assert machine.claimed(count, **gave) == claimed


def test_the_lock_goes_with_the_process_into_the_command_it_becomes(machine):
    became = machine.job(EXEC, CUDA_VISIBLE_DEVICES="0")
    assert became.stdout.readline() == "GPU-0\n"
    heir = machine.job(CUDA_VISIBLE_DEVICES="0")
    assert waits(heir)
    became.kill()
    assert heir.stdout.readline() == "GPU-0\n"


@pytest.mark.parametrize(
    ("count", "environment", "named"),
    [
        (5, {}, ["5 GPUs asked for", "there are 4"]),
        (1, {"RELINEAR_JOBS_PER_GPU": "0"}, ["RELINEAR_JOBS_PER_GPU", "'0'", "1 or more"]),
    ],
)
def test_what_cannot_be_had_is_an_error(machine, count, environment, named):
    job = machine.job(count=count, **environment)
    _, error = job.communicate()
    assert job.returncode != 0 and all(part in error.splitlines()[-1] for part in named), error


@pytest.mark.parametrize(
    ("scale", "options", "threads"),
    [("smollm2", (), {"2"}), ("smollm2", ("--resources", "gpu=2"), set()), ("mini", (), set())],
    ids=["one slot", "two slots", "no GPU"],
)
def test_jobs_side_by_side_share_the_cores(fresh, scale, options, threads):
    """A job that takes all cores would keep the other GPUs idle, and it would wait until every core is free.
    Snakemake prints no number of threads where it is one."""
    plan = fresh.snakemake("results/table2.csv", scale=scale, options=("--dry-run", *options))
    assert plan.count("gpu=1") == (104 if scale == "smollm2" else 0) and plan.count("rule activations:") == (
        scale == "mini"
    )
    assert set(re.findall(r"threads: (\d+)", plan)) == threads


# --- what a record says of the processor ---

AMD = (
    "processor\t: 0\nmodel name\t: AMD EPYC 9B14\nflags\t\t: fpu avx2 avx512f avx512_bf16"
    " sse2\n\nprocessor\t: 1\nflags\t\t: avx2\n"
)
ARM = "processor\t: 0\nFeatures\t: fp asimd sve bf16 i8mm\nCPU part\t: 0xd40\n"


@pytest.mark.parametrize(
    ("told", "model", "instructions"),
    [(AMD, "AMD EPYC 9B14", "avx2 avx512f avx512_bf16"), (ARM, None, "asimd sve bf16")],
)
def test_the_model_and_the_instructions_that_decide_its_precision(
    tmp_path, monkeypatch, told, model, instructions
):
    (tmp_path / "cpuinfo").write_text(told)
    monkeypatch.setattr(cpu, "INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(cpu.platform, "processor", lambda: "")
    monkeypatch.setattr(cpu.platform, "machine", lambda: "aarch64")
    assert cpu.model() == (model or "aarch64")
    assert cpu.instructions() == instructions


def test_a_system_that_says_nothing_has_its_architecture(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "INFO", tmp_path / "absent")
    assert cpu.model()
    assert cpu.instructions() == ""
