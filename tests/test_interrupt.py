"""A signal in the middle of an import is heard when the import is over, whatever the module does with
exceptions."""

import signal
import subprocess
import sys

import pytest
from conftest import ROOT

from relinear.machine.warm import INTERRUPTED

# A module that goes without what it cannot import, as many do, and an outer one that needs all of it.
CARELESS = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.{name})
    time.sleep(0.1)
except BaseException:
    print("lost")
print("whole")
"""
WAITS = "import outer; print(outer.careless.os.name); import time; time.sleep(600)"
SETS = {
    "SIGINT": "from relinear.machine.interrupt import patient; patient()",
    "SIGTERM": "from relinear.tracking.live import install_signal_handlers as install; install()",
}


@pytest.mark.parametrize(
    ("name", "status", "said"), [("SIGINT", -2, f"{INTERRUPTED}\n"), ("SIGTERM", 143, "")]
)
def test_a_signal_in_the_middle_of_an_import_waits_until_all_of_it_is_there(tmp_path, name, status, said):
    (tmp_path / "careless.py").write_text(CARELESS.format(name=name))
    (tmp_path / "outer.py").write_text("import careless, time\ntime.sleep(0.1)\nprint('outer')\n")
    done = subprocess.run(
        [sys.executable, "-c", f"{SETS[name]}; {WAITS}"],
        env={"PYTHONPATH": f"{ROOT / 'src'}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert done.stdout.splitlines()[:2] == ["whole", "outer"] and done.stderr == said
    assert done.returncode == status


def test_ctrl_c_that_a_shell_ignores_stays_ignored():
    code = (
        "import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        f" {SETS['SIGINT']}; os.kill(os.getpid(), signal.SIGINT); print('on')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "on\n", "")
