"""A command cannot tell the Python whose libraries are imported already (`warm`) from a new one."""

import json
import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest
import warm
import yaml
from conftest import wait

from relinear import cli
from relinear.plan.plan import Plan
from relinear.stages._stage import Node
from relinear.tracking.rows import tags_of

pytestmark = pytest.mark.skipif(
    not hasattr(os, "pidfd_open"),
    reason="no forks are waited for here: the tests take a new Python each time",
)

ENOUGH = 300  # seconds, for what takes one on an idle machine
SAYS = (
    "import json, os, sys; print(json.dumps([sys.argv, sys.path, os.getcwd(), dict(os.environ),"
    " sys.stdin.read(), __name__]))"
)


def run(python: str, *args: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([python, *args], capture_output=True, text=True, timeout=ENOUGH, **options)


@pytest.mark.parametrize("kind", ["-c", "-m", "file"])
def test_a_command_finds_the_arguments_folder_environment_and_input_that_it_was_given(
    interpreter, tmp_path, kind
):
    (tmp_path / "says.py").write_text(SAYS)
    command = {"-c": ["-c", SAYS], "-m": ["-m", "says"], "file": [str(tmp_path / "says.py")]}[kind]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": "one:two", "MINE": "x y"}
    found = [
        run(python, *command, "a", "b c", cwd=tmp_path, env=environment, input="words")
        for python in (sys.executable, interpreter)
    ]
    assert [done.returncode for done in found] == [0, 0], found
    new, warm = (json.loads(done.stdout) for done in found)
    assert warm[0] == new[0] and warm[2:3] + warm[4:] == new[2:3] + new[4:]
    assert warm[1][0] == new[1][0] and {path.rpartition("/")[2] for path in warm[1]} >= {"one", "two"}
    assert {name: warm[3].get(name) for name in environment} == environment and warm[3].keys() - new[
        3
    ].keys() <= {"PWD", "SHLVL", "_", "OLDPWD"}


def test_a_command_ends_as_it_ends(interpreter):
    assert run(interpreter, "-c", "raise SystemExit(3)").returncode == 3
    failed = run(interpreter, "-c", "import atexit; atexit.register(print, 'goodbye'); 1 / 0")
    assert (
        failed.returncode == 1
        and failed.stdout == "goodbye\n"
        and failed.stderr.endswith("ZeroDivisionError: division by zero\n")
    )
    for number in (signal.SIGKILL, signal.SIGTERM):
        assert run(interpreter, "-c", f"import os; os.kill(os.getpid(), {number})").returncode == -number


WAITS = (
    "import os, signal, time; signal.signal(signal.SIGTERM, lambda *_: exit(7)); print(os.getpid(),"
    " flush=True); time.sleep(600)"
)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 7), (signal.SIGKILL, -9)], ids=["told", "killed"]
)
def test_a_signal_to_the_command_is_one_to_its_process(interpreter, number, status):
    with subprocess.Popen([interpreter, "-c", WAITS], stdout=subprocess.PIPE, text=True) as command:
        pid = int(command.stdout.readline())
        command.send_signal(number)
        assert command.wait(ENOUGH) == status
        assert command.stdout.read() == "", "its output is closed when it has ended"
    wait(lambda: not psutil.pid_exists(pid), "the process to end")


def test_its_code_is_that_of_the_clone(interpreter, tmp_path):
    (tmp_path / "relinear").mkdir()
    (tmp_path / "relinear/__init__.py").write_text("print('the clone')")
    command = "import sys; assert 'torch' in sys.modules and 'relinear' not in sys.modules; import relinear"
    assert (
        run(interpreter, "-c", command, env={**os.environ, "PYTHONPATH": str(tmp_path)}).stdout
        == "the clone\n"
    )


SCRIPT = warm.SOURCE
FOUND = "import sys; print(sys.flags.optimize, 'torch' in sys.modules, sys.path[0])"


def test_a_job_of_a_pipeline_without_such_a_process_is_a_fork(interpreter, tmp_path):
    """As the rules start it (`RELINEAR` of common.smk); not where assertions are to be left out."""
    safe = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(tmp_path)}
    job = ("-I", "-S", str(SCRIPT), "-c", FOUND)
    assert run(interpreter, *job, env=safe).stdout == f"0 True {tmp_path}\n"
    for command in (job, job[3:]):
        assert (
            run(interpreter, *command, env=safe | {"PYTHONOPTIMIZE": "1"}).stdout == f"1 False {tmp_path}\n"
        )


# --- the process that forks, without the libraries ---

# `python -c SERVES MODULES ADDRESS OWNER`: a process whose forks do `-c CODE`, while there is no file
# `edited`.
SERVES = """
import os, sys
sys.path.insert(0, sys.argv[1])
import warm
given = lambda request: exec(request["argv"][1])
listener = warm.listen(sys.argv[2])
print("listens", flush=True)
warm.serve(listener, int(sys.argv[3]), given, lambda: "edited" if os.path.exists("edited") else "")
"""


@pytest.fixture
def served(tmp_path):
    """A folder, an owner, the process that forks, and a function that begins a script with code."""
    owner = subprocess.Popen(["sleep", "600"])
    command = [sys.executable, "-c", SERVES, str(SCRIPT.parent), str(tmp_path / "jobs"), str(owner.pid)]
    server = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert server.stdout.readline() == "listens\n"

    def begin(code: str) -> subprocess.Popen:
        environment = {**os.environ, "RELINEAR_WARM": str(tmp_path / "jobs"), "CODE": "of the job"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(SCRIPT), "-c", code], cwd=tmp_path, env=environment, **pipes
        )

    yield tmp_path, owner, server, begin
    for process in (owner, server):
        process.kill()
        process.wait()


SLEEPS = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
FORKED = "import os; print(os.getppid(), os.environ['CODE'], os.getcwd())"


def test_a_job_is_a_fork_in_the_jobs_folder_and_environment(served):
    folder, _, server, begin = served
    assert begin(FORKED).communicate(timeout=ENOUGH) == (f"{server.pid} of the job {folder}\n", "")


def test_a_job_that_crashes_harms_no_other(served):
    begin = served[3]
    other = begin("import time; time.sleep(1); print('whole')")
    crashed = begin("import os; os.abort()")
    assert crashed.wait(ENOUGH) == -signal.SIGABRT
    failed = begin("1 / 0")
    assert "ZeroDivisionError" in failed.communicate(timeout=ENOUGH)[1] and failed.returncode == 1
    assert other.communicate(timeout=ENOUGH) == ("whole\n", "") and other.returncode == 0


INTERRUPTED = "error: interrupted; give the same command again\n"


def test_ctrl_c_before_a_jobs_own_code_answers_it_is_one_line(served):
    """As while it imports its modules: nothing of the job has set a handler yet."""
    job = served[3](SLEEPS)
    job.stdout.readline()
    job.send_signal(signal.SIGINT)
    assert job.communicate(timeout=ENOUGH) == ("", INTERRUPTED) and job.returncode == 130


def test_ctrl_c_before_a_job_is_taken_is_one_line(served):
    _, _, server, begin = served
    server.send_signal(signal.SIGSTOP)
    job = begin(SLEEPS)
    script = psutil.Process(job.pid)
    wait(
        lambda: any(c.type == socket.SOCK_SEQPACKET for c in script.net_connections("unix")),
        "the script to ask",
    )
    job.send_signal(signal.SIGINT)
    try:
        assert job.stderr.readline() == INTERRUPTED and job.wait(ENOUGH) == 130
    finally:
        server.send_signal(signal.SIGCONT)


def test_a_fork_that_cannot_begin_is_no_process_to_signal(served):
    """Its status is no number of a process: process group 1 is every process that one may kill."""
    folder, _, _, _ = served
    request = {"argv": ["-c", "pass"], "cwd": str(folder / "gone"), "environment": {}}
    with (
        open(os.devnull, "r+") as silent,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection,
    ):
        connection.connect(str(folder / "jobs"))
        socket.send_fds(connection, [json.dumps(request).encode()], [silent.fileno()] * 3)
        with pytest.raises(warm.warm.Unanswered, match="its fork ended at once, with status 1"):
            warm.warm._taken(connection)


def test_a_hangup_that_is_ignored_does_not_reach_the_fork(served):
    """As below nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        job = served[3](WAITS)
    finally:
        signal.signal(signal.SIGHUP, before)
    job.stdout.readline()
    job.send_signal(signal.SIGHUP)
    job.send_signal(signal.SIGTERM)
    assert job.wait(ENOUGH) == 7


def test_what_a_job_started_ends_with_its_script(served):
    job = served[3](
        "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    )
    started = int(job.stdout.readline())
    job.kill()
    wait(
        lambda: not psutil.pid_exists(started) or psutil.Process(started).status() == psutil.STATUS_ZOMBIE,
        "what the job started to end",
    )


def test_the_process_ends_with_its_owner_and_tells_jobs_to_end(served):
    folder, owner, server, begin = served
    job = begin("import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(9)); " + SLEEPS)
    pid = int(job.stdout.readline())
    owner.kill()
    owner.wait()
    assert server.wait(ENOUGH) == 0 and not psutil.pid_exists(pid)
    assert not (folder / "jobs").exists()


def test_a_process_whose_owner_has_ended_leaves_nothing(tmp_path):
    owner = subprocess.Popen(["true"])
    owner.wait()
    with warm.warm.listen(str(tmp_path / "jobs")) as listener:
        warm.warm.serve(listener, owner.pid, print)
    assert not (tmp_path / "jobs").exists()


def test_a_job_whose_process_is_killed_is_told_so_and_ends(served):
    _, _, server, begin = served
    job = begin(SLEEPS)
    pid = int(job.stdout.readline())
    server.kill()
    assert (
        "error: the process that this job was a fork of was killed" in job.communicate(timeout=ENOUGH)[1]
        and job.returncode == 1
    )
    wait(lambda: not psutil.pid_exists(pid), "the fork to end")


@pytest.mark.parametrize("reason", ["edited", "No such file or directory"])
def test_a_job_that_is_not_taken_is_a_python_of_its_own(served, reason):
    folder, _, _, begin = served
    if reason == "edited":
        (folder / reason).touch()
    else:
        (folder / "jobs").unlink()
    said, errors = begin(FORKED).communicate(timeout=ENOUGH)
    assert said == f"{os.getpid()} of the job {folder}\n", "a child of this process, as the script was"
    assert f"({reason})" in errors and len(errors.splitlines()) == 1


def test_what_a_record_says_of_its_run_is_read_before_the_fork(monkeypatch):
    plan, node = Plan(scale="smoke"), Node("measure", "lizard", "mmlu")
    plan.check_choices()
    monkeypatch.setattr(cli, "prepared", None)
    cli.prepare(plan, ["relinear.measure.run"])
    read = []
    monkeypatch.setattr(yaml, "load", lambda *given: read.append(given))
    tags = tags_of(cli.prepared, node)
    assert "comparison/table2" in str(tags) and plan.key(node) and not read


def test_an_edited_an_added_and_a_removed_file_are_seen(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/one.py").write_text("1")
    process = warm.warm
    stamps = [process.stamps([tmp_path])]
    (tmp_path / "folder/.one.py.swp").touch()
    (tmp_path / "folder/__pycache__").mkdir()
    for kept in ("one.pyc", "one.json"):
        (tmp_path / "folder/__pycache__" / kept).touch()
    assert process.stamps([tmp_path]) == stamps[0]
    for edit in (
        lambda: (tmp_path / "folder/one.py").write_text("12"),
        (tmp_path / "two.yaml").touch,
        (tmp_path / "two.yaml").unlink,
    ):
        edit()
        stamps.append(process.stamps([tmp_path]))
    assert stamps[0] != stamps[1] == stamps[3] != stamps[2]
