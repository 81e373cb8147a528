"""A command cannot tell the Python whose libraries are imported already (`warm`) from a new one."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from conftest import wait

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no forks are waited for here: the tests take a new Python each time")

SAYS = "import json, os, sys; print(json.dumps([sys.argv, sys.path, os.getcwd(), dict(os.environ), sys.stdin.read(), __name__]))"


def run(python: str, *args: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([python, *args], capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize("kind", ["-c", "-m", "file"])
def test_a_command_finds_the_arguments_folder_environment_and_input_that_it_was_given(interpreter, tmp_path, kind):
    (tmp_path / "says.py").write_text(SAYS)
    command = {"-c": ["-c", SAYS], "-m": ["-m", "says"], "file": [str(tmp_path / "says.py")]}[kind]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": "one:two", "MINE": "x y"}
    found = [run(python, *command, "a", "b c", cwd=tmp_path, env=environment, input="words") for python in (sys.executable, interpreter)]
    assert [done.returncode for done in found] == [0, 0], found
    new, warm = (json.loads(done.stdout) for done in found)
    assert warm[0] == new[0] and warm[2:3] + warm[4:] == new[2:3] + new[4:]
    assert warm[1][0] == new[1][0] and {path.rpartition("/")[2] for path in warm[1]} >= {"one", "two"}
    assert {name: warm[3].get(name) for name in environment} == environment and warm[3].keys() - new[3].keys() <= {"PWD", "SHLVL", "_", "OLDPWD"}


def test_a_command_ends_as_it_ends(interpreter):
    assert run(interpreter, "-c", "raise SystemExit(3)").returncode == 3
    failed = run(interpreter, "-c", "import atexit; atexit.register(print, 'goodbye'); 1 / 0")
    assert failed.returncode == 1 and failed.stdout == "goodbye\n" and failed.stderr.endswith("ZeroDivisionError: division by zero\n")
    for number in (signal.SIGKILL, signal.SIGTERM):
        assert run(interpreter, "-c", f"import os; os.kill(os.getpid(), {number})").returncode == -number


WAITS = "import os, signal, time; signal.signal(signal.SIGTERM, lambda *_: exit(7)); print(os.getpid(), flush=True); time.sleep(60)"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 7), (signal.SIGKILL, -9)], ids=["told", "killed"])
def test_a_signal_to_the_command_is_one_to_its_process(interpreter, number, status):
    with subprocess.Popen([interpreter, "-c", WAITS], stdout=subprocess.PIPE, text=True) as command:
        pid = int(command.stdout.readline())
        command.send_signal(number)
        assert command.wait(60) == status
        assert command.stdout.read() == "", "its output is closed when it has ended"
    wait(lambda: not psutil.pid_exists(pid), "the process to end", 60)


def test_its_code_is_that_of_the_clone(interpreter, tmp_path):
    (tmp_path / "relinear").mkdir()
    (tmp_path / "relinear/__init__.py").write_text("print('the clone')")
    command = "import sys; assert 'torch' in sys.modules and 'relinear' not in sys.modules; import relinear"
    assert run(interpreter, "-c", command, env={**os.environ, "PYTHONPATH": str(tmp_path)}).stdout == "the clone\n"
