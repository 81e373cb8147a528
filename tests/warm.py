"""A Python whose libraries are imported already, for the tests that start `python` many times.

A command is started as ever, with a small script in the place of `python` (`interpreter`), and is done by a
fork of one process (`relinear.machine.warm`). Snakemake's jobs get it too, as `sys.executable`, where their
pipeline has no such process of its own. A fork imports relinear itself, so it runs the code that its clone
has at that moment. `PYTHONOPTIMIZE` asks for a Python of its own.
"""

import functools
import gc
import importlib
import importlib.util
import os
import pickle
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import remembered
import yaml

# By its file: relinear itself must not be imported here.
SOURCE = Path(__file__).parents[1] / "src/relinear/machine/warm.py"
WORKFLOW = Path(__file__).parents[1] / "workflow"
spec = importlib.util.spec_from_file_location("warm_process", SOURCE)
warm = importlib.util.module_from_spec(spec)
spec.loader.exec_module(warm)

LIBRARIES = (*warm.LIBRARIES, "snakemake.cli", "snakemake_executor_plugin_slurm")


def interpreter(folder: Path, owner: int, environment: dict[str, str]) -> None:
    """Make `folder` with a script `python`, and the process behind it, which has imported its libraries when
    this returns, and ends with the process `owner`."""
    folder.mkdir()
    (folder / "texts").write_bytes(pickle.dumps(remembered.parsed(WORKFLOW)))
    script, asks, address = folder / "python", folder / "ask.py", str(folder / "jobs")
    asks.write_text(
        f"import sys\nsys.path.insert(0, {str(SOURCE.parent)!r})\nimport warm\ntry:\n"
        f"    sys.exit(warm.end_as(warm.ask({address!r}, sys.argv[1:])))\n"
        "except KeyboardInterrupt:\n    print(warm.INTERRUPTED, file=sys.stderr)\n    sys.exit(130)\n"
    )
    # A job comes as `-I -S warm.py -m relinear.cli ...`. It asks its pipeline's process, where that has one.
    # A process of torchrun comes as `-u ...`.
    script.write_text(
        f"""#!/bin/sh
if [ -z "$PYTHONOPTIMIZE" ]; then
  [ "$1" != -u ] || shift
  [ "$1" != -I ] || [ "$RELINEAR_WARM" ] || shift 3
  [ "$1" = -I ] || set -- -I -S {asks} "$@"
fi
exec {sys.executable} "$@"
"""
    )
    script.chmod(0o755)
    # mlflow reads its setting when it is imported. With one thread no pool of threads is lost in a fork.
    env = {**environment, "MLFLOW_DISABLE_TELEMETRY": "true", "OMP_NUM_THREADS": "1"}
    with warm.listen(address) as listener:
        command = [sys.executable, __file__, str(script), str(owner)]
        subprocess.Popen(
            command, cwd=folder, env=env, stdin=listener, stdout=subprocess.DEVNULL, start_new_session=True
        )
    # Imported here, and not in the time that a test gives its first command.
    subprocess.run([script, "-c", ""], check=True)


def run(executable: str, request: dict) -> None:
    """Do what a new `python *argv` does: `-m module`, `-c code`, or a file."""
    sys.executable, sys.stdin = executable, open(0, closefd=False)
    kind, *rest = argv = request["argv"]
    first = {"-m": request["cwd"], "-c": ""}.get(kind, str(Path(kind).parent))
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    before = [] if os.environ.get("PYTHONSAFEPATH") else [first]
    sys.path[:] = [*before, *paths, *sys.path[1:]]  # the first is this file's folder
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = argv
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    listener = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    for library in LIBRARIES:
        importlib.import_module(library)
    folder = Path(sys.argv[1]).parent
    remembered.tables(folder / "tables.db")
    yaml.load = remembered.texts(pickle.loads((folder / "texts").read_bytes()))
    gc.collect()
    gc.freeze()  # otherwise the collector writes into the memory that forks share
    warm.serve(listener, int(sys.argv[2]), functools.partial(run, sys.argv[1]))
