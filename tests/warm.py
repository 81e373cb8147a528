"""A Python whose libraries are imported already, for the tests that start `python` many times.

Importing torch, transformers, peft and mlflow takes a new process seven seconds of a core. One process imports them once and forks for each
command (`serve`). A command is started as ever, with a small script in the place of `python` (`interpreter`). Snakemake's jobs get it too, as
`sys.executable`. The script hands its arguments, folder, environment, input and output to the fork (`ask`). It forwards signals, and ends as the
fork ends. A fork imports relinear itself, so it runs the code that its clone has at that moment.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

LIBRARIES = (
    "torch", "transformers", "transformers.models.llama.modeling_llama", "peft", "mlflow", "mlflow.store.tracking.sqlalchemy_store", "datasets",
    "lm_eval.evaluator", "lm_eval.models.huggingface", "scipy.stats", "matplotlib.pyplot", "matplotlib.backends.backend_pdf", "pydantic", "typer",
    "filelock", "jaxtyping", "safetensors.torch", "gguf", "tqdm", "tabulate", "snakemake.cli", "snakemake_executor_plugin_slurm",
)  # fmt: skip


def interpreter(folder: Path, owner: int, environment: dict[str, str]) -> None:
    """Make `folder` with a script `python`, and the process behind it, which ends with the process `owner`."""
    folder.mkdir()
    name = f"relinear-tests-{os.getpid()}-{time.monotonic_ns()}"
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {__file__} ask {name} {script} "$@"\n')
    script.chmod(0o755)
    # mlflow reads its setting when it is imported. With one thread no pool of threads is lost in a fork.
    env = {**environment, "MLFLOW_DISABLE_TELEMETRY": "true", "OMP_NUM_THREADS": "1"}
    ready, writes = os.pipe()
    command = [sys.executable, __file__, "serve", name, str(owner), str(writes)]
    subprocess.Popen(command, cwd=folder, env=env, pass_fds=[writes], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    os.close(writes)
    with os.fdopen(ready) as said:
        assert said.read() == "ready", "the process that imports the libraries has ended"


def ask(name: str, executable: str, *argv: str) -> int:
    """Run `python *argv` in a fork; its exit status, or its signal."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(f"\0{name}")
        request = {"executable": executable, "argv": argv, "cwd": os.getcwd(), "environment": dict(os.environ)}
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
        pid = int(connection.recv(64))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: os.kill(pid, number))
        code = os.waitstatus_to_exitcode(int(connection.recv(64)))
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def serve(name: str, owner: int, ready: int) -> dict | None:
    """Fork for each that asks, until the process `owner` has ended: None. In a fork: what it was asked for."""
    import gc
    import importlib

    for library in LIBRARIES:
        importlib.import_module(library)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # forks hear what `nohup` and a shell's background jobs leave ignored
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    gc.collect()
    gc.freeze()  # otherwise the collector writes into the memory that forks share
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{name}")
    listener.listen(64)
    os.write(ready, b"ready")
    os.close(ready)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    ends = os.pidfd_open(owner)
    while ends not in select.select([listener, ends], [], [])[0]:
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            os.close(ends)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return attend(connection)
        connection.close()
    return None


def attend(connection: socket.socket) -> dict:
    """Fork for a request. The other process waits for the fork's end and reports it, or kills the fork if nobody waits for it any more."""
    request, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    if not request:  # whoever asked was killed before
        os._exit(0)
    pid = os.fork()
    if not pid:
        connection.close()
        os.setsid()
        for place, file in enumerate(files):
            os.dup2(file, place)
        for file in files:
            os.close(file)
        return json.loads(request)
    for file in files:
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)
    connection.send(str(pid).encode())
    if connection in select.select([connection, os.pidfd_open(pid)], [], [])[0]:
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with suppress(OSError):
        connection.send(str(status).encode())
    os._exit(0)


def become(executable: str, argv: list[str], cwd: str, environment: dict[str, str]) -> None:
    """Do what a new `python *argv` does: `-m module`, `-c code`, or a file."""
    import random
    import runpy

    random.seed()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = executable
    kind, *rest = argv
    first = {"-m": cwd, "-c": ""}.get(kind, str(Path(kind).parent))
    sys.path[:] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[1:]]  # the first is this file's folder
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
    verb, *given = sys.argv[1:]
    if verb == "ask":
        sys.exit(ask(*given))
    asked = serve(given[0], int(given[1]), int(given[2]))
    if asked:
        become(**asked)
