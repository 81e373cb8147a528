"""A disk that refuses, a file in a folder's place, a module in a library's place: told in one line before
work, or without effect."""

import errno
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT, environment

from relinear.errors import UserError
from relinear.machine.disk import in_the_way, make_writable, refusal, require_possible
from relinear.records import drawn_early, drawn_otherwise

FIRST = "results/smoke/models/tiny/run.json"
# Run before a verb: the operating system's calls fail as they do on some network file systems and on failing
# disks.
FAILING = """
import errno, os, fcntl, sys
call, number = sys.argv.pop(1), getattr(errno, sys.argv.pop(1))
def fails(*_):
    raise OSError(number, os.strerror(number))
setattr({"flock": fcntl, "fsync": os}[call], call, fails)
from relinear.cli import main
main()
"""


REFUSALS = [
    (
        "flock",
        "ENOLCK",
        ("No locks available: ", "keeps no locks of files (flock)", "local disk", "Lustre with `flock`"),
    ),
    ("flock", "EIO", ("Input/output error: ", "the disk or the network file system failed")),
    ("fsync", "EIO", ("Input/output error: ", "the disk or the network file system failed")),
    ("fsync", "ENOSPC", ("No space left on device: ", "make room")),
]


@pytest.mark.parametrize(("call", "number", "named"), REFUSALS)
def test_a_file_system_that_fails_is_one_line(tmp_path, call, number, named, interpreter, optimised=False):
    env = environment() | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    env |= {"PYTHONOPTIMIZE": "1"} if optimised else {}
    verb = ("model", "tiny", "--scale", "smoke", "--results", str(tmp_path / "results"))
    done = subprocess.run(
        [interpreter, "-c", FAILING, call, number, *verb],
        env=env,
        cwd=ROOT,
        text=True,
        capture_output=True,
    )
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and "Traceback" not in done.stderr and len(told) == 1, done.stderr[-3000:]
    assert told[0].endswith("give the same command again") and all(part in told[0] for part in named), told
    assert not list(tmp_path.rglob("models/tiny/run.json"))


@pytest.mark.parametrize(("call", "number", "named"), [REFUSALS[0], REFUSALS[-1]])
def test_it_is_one_line_without_assertions_too(tmp_path, call, number, named, interpreter):
    """A Python of its own, which imports everything: one refusal of each call."""
    test_a_file_system_that_fails_is_one_line(tmp_path, call, number, named, interpreter, optimised=True)


def test_an_error_that_is_no_refusal_stays_one():
    assert (
        refusal(OSError(errno.ENOENT, "No such file or directory", "x")) is None
        and refusal(ValueError("x")) is None
    )
    assert refusal(OSError(errno.ESTALE, "Stale file handle", "x")).startswith(
        "Stale file handle: x; the disk or the network"
    )


@pytest.mark.parametrize("clone", ["clone", ".work/clone"])
def test_a_work_folder_that_was_deleted_is_named_and_no_other_fault_is_taken_for_that(tmp_path, clone):
    (tmp_path / clone).mkdir(parents=True)
    step = tmp_path / clone / "results/smoke/.work/lizard.distill"
    lock, metrics, adapter = (
        OSError(errno.ENOENT, "No such file or directory", str(step / name))
        for name in ("lock", "out/metrics.json", "out/adapter/adapter_model.safetensors")
    )
    said = "was deleted during the work; give the same command again"
    assert refusal(lock) == f"{step} {said}"
    assert refusal(metrics) == refusal(adapter) == f"{step / 'out'} {said}"
    step.mkdir(parents=True)  # as the next checkpoint makes it
    assert refusal(lock) is None and refusal(adapter) == f"{step / 'out'} {said}"
    (step / "out").mkdir()
    assert refusal(metrics) is refusal(adapter) is None, "a folder that the code did not make"
    assert refusal(OSError(errno.ENOENT, "No such file or directory", str(tmp_path / clone / "x/y"))) is None


def test_what_stands_in_a_folders_place_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert in_the_way(tmp_path) is in_the_way(tmp_path / "new/folder") is None
    assert in_the_way(tmp_path / "file/below").startswith(
        f"{tmp_path / 'file'} is a file, and a folder is needed there"
    )
    with pytest.raises(UserError, match="link is a link that leads nowhere"):
        require_possible(tmp_path, tmp_path / "link/below")
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    make_writable([tmp_path / "results/logs"])
    assert list((tmp_path / "results/logs").iterdir()) == []
    (tmp_path / "results/logs").chmod(0o500)
    if os.geteuid() == 0:  # whom no mode stops: as nobody
        code = (
            "import os, sys, pathlib, relinear.machine.disk as d; os.setuid(65534);"
            " d.make_writable([pathlib.Path(sys.argv[1])])"
        )
        tmp_path.chmod(0o755)
        for parent in tmp_path.parents[:-2]:
            parent.chmod(0o755)
        command = [sys.executable, "-c", code, str(tmp_path / "results/logs")]
        done = subprocess.run(
            command, env=environment() | {"PYTHONPATH": str(ROOT / "src")}, text=True, capture_output=True
        )
        assert (
            done.returncode
            and f"UserError: {tmp_path / 'results/logs'} cannot be written to: Permission denied; make it"
            in done.stderr
        )
    else:
        with pytest.raises(UserError, match="logs cannot be written to: Permission denied; make it writable"):
            make_writable([tmp_path / "results/logs"])
    (tmp_path / "results/logs").chmod(0o700)


@pytest.mark.parametrize("place", [".snakemake", ".snakemake/metadata", "results", "results/smoke/logs"])
def test_snakemake_says_what_stands_in_a_folders_place(fresh, place):
    (fresh / place).parent.mkdir(parents=True, exist_ok=True)
    (fresh / place).write_text("")
    said = fresh.snakemake(FIRST, fails=True)
    assert (
        f"{place} is a file, and a folder is needed there; move it away" in said and "Traceback" not in said
    ), said[-2000:]
    assert (fresh / place).read_text() == "" and not list((fresh.root).glob("results/**/run.json"))


def test_a_module_of_the_folder_that_the_command_is_given_in_is_no_library(fresh):
    """`import yaml` of a rule, of a job and of MLflow's store."""
    for name in ("yaml", "numpy", "tqdm"):
        (fresh / f"{name}.py").write_text("raise RuntimeError('a module of this folder')\n")
    env = environment() | {"OMP_NUM_THREADS": "1"}
    # as the command `snakemake`: not of this folder
    script = "import sys; from snakemake.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-P", "-c", script, "--cores", "1", "--config", "scale=smoke", "--", FIRST]
    done = subprocess.run(command, cwd=fresh.root, env=env, text=True, capture_output=True)
    assert done.returncode == 0 and "a module of this folder" not in done.stderr, done.stderr[-3000:]
    assert json.loads((fresh / FIRST).read_text())["stage"] == "model"


def test_a_drawing_of_what_was_not_run_is_drawn_again_when_its_target_is_asked_for(fresh):
    """`relinear draw` may come before the measurements; `snakemake` then had nothing to do, and the cells
    stayed `not run`."""
    assert fresh.relinear("draw", "lolcats", "table1", "--scale", "smoke").returncode == 0
    record = fresh / "results/smoke/lolcats/.table1.json"
    assert drawn_otherwise(record) is None and "measurements are `not run`" in drawn_early(record)
    said = fresh.snakemake("lolcats_table1", options=("--dry-run",))
    assert "rule lolcats_table1:" in said and "rule measure:" in said and "it is drawn again" in said, said[
        -3000:
    ]
