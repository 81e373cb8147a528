"""A process that has imported the libraries once, and forks for each job: importing them takes a new Python
four to seven seconds of a core.

`listen` opens an address, where the process behind it answers by `serve`. A job is started by a small script
in the place of `python` (this file), which hands its arguments, folder, environment, input and output to a
fork (`ask`), forwards signals, and ends as the fork ends. It needs the standard library alone, and starts in
hundredths of a second. Where nobody answers, it becomes the Python that it stands for (`main`).

A fork ends with the script that asked for it. The process ends with its owner, and what runs then is told to
end, as by SIGTERM.
"""

if __name__ == "__main__":
    import _signal  # built in, and so at once: Ctrl-C during the imports below would be a traceback

    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

import functools
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType

# the environment variable with the address of the process that forks; empty: none is to be started
ADDRESS = "RELINEAR_WARM"
LIBRARIES = (
    "torch",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "peft",
    "mlflow",
    "mlflow.store.tracking.sqlalchemy_store",
    "datasets",
    "lm_eval.evaluator",
    "lm_eval.models.huggingface",
    "scipy.stats",
    "matplotlib.pyplot",
    "matplotlib.backends.backend_pdf",
    "pydantic",
    "typer",
    "filelock",
    "jaxtyping",
    "safetensors.torch",
    "gguf",
    "tqdm",
    "tabulate",
)
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
INTERRUPTED = "error: interrupted; give the same command again"
AGAIN = 0.02  # seconds, after which a signal that came in the middle of an import comes again


Answer = Callable[[int, FrameType | None], object]  # to a signal


class Unanswered(Exception):
    """Nothing was started: nobody is at the address, or the process there will not do it. The message says
    why."""


def possible() -> bool:
    """Whether this system has what is needed, as Linux has."""
    return hasattr(os, "pidfd_open") and hasattr(socket, "SOCK_SEQPACKET")


def listen(address: str) -> socket.socket:
    """A socket at which requests wait until they are served. Only processes that may write to the address's
    folder can ask."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(128)
    return listener


# --- the script ---


def ask(address: str, argv: list[str]) -> int:
    """Have a fork do `argv`; its exit status, or minus its signal. Raises Unanswered where nothing was
    started."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.connect(address)
            request = {"argv": argv, "cwd": os.getcwd(), "environment": dict(os.environ)}
            socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
            pid = _taken(connection)
        except OSError as error:
            raise Unanswered(error.strerror) from None
        status = connection.recv(64)
    if status:
        return int(status)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    print(
        "error: the process that this job was a fork of was killed; give the same command again",
        file=sys.stderr,
    )
    return 1


def _taken(connection: socket.socket) -> int:
    """The fork's process, to which signals are forwarded from its first instant on; before there is one, they
    do what they did. Raises Unanswered where there is none, or where it ended before it could do anything."""
    pid, early, before = 0, [], {number: signal.getsignal(number) for number in FORWARDED}
    if before[signal.SIGHUP] is signal.SIG_IGN:  # as below nohup
        del before[signal.SIGHUP]

    def forward(number: int, frame: object) -> None:
        if pid:
            with suppress(ProcessLookupError):  # it has ended, and its status is on its way
                os.kill(pid, number)
        elif select.select([connection], [], [], 0)[0]:  # there is an answer, which is read below
            early.append(number)
        else:
            signal.signal(number, before[number])
            signal.raise_signal(number)

    for number in before:
        signal.signal(number, forward)
    connection.recv(1, socket.MSG_PEEK)
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    said = connection.recv(4096).decode()
    if said.isdigit():
        pid = int(said)
    else:
        for number, handler in before.items():
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    for number in early:
        os.kill(pid or os.getpid(), number)
    if said.startswith(("+", "-")):  # the status of a fork that had said nothing
        said = f"its fork ended at once, with status {int(said)}"
    if not pid:
        raise Unanswered(said or "it has ended")
    return pid


def end_as(code: int) -> int:
    """End this process by the signal that `code` is minus of; any other code comes back."""
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def main(argv: list[str]) -> int:
    """Do `python ARGV` in a fork, or, where none is to be had, become that Python."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if address := os.environ.get(ADDRESS):
        try:
            return end_as(ask(address, argv))
        except Unanswered as error:
            print(
                "relinear: this job imports its libraries itself, since the process that has them did not"
                f" take it ({error})",
                file=sys.stderr,
            )
    os.execv(sys.executable, [sys.executable, *argv])


# --- the process that forks ---


def start(options: list[str], sources: str) -> None:
    """Start the process whose forks are jobs of a plan (`options`), with this process as its owner, and name
    its address to what this one starts.

    Without it, as where its socket cannot be made, each job is a Python of its own.
    """
    import subprocess
    import tempfile

    address = f"{tempfile.mkdtemp(prefix='relinear-')}/jobs"
    try:
        listener = listen(address)
    except OSError:  # a path that is too long
        return os.rmdir(os.path.dirname(address))
    with listener:
        # With one thread, as jobs on a CPU have, no pool of threads is lost in a fork.
        environment = os.environ | {"PYTHONPATH": sources, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "relinear.cli", "warm", str(os.getpid()), *options]
        silent = subprocess.DEVNULL
        subprocess.Popen(
            command, env=environment, stdin=listener, stdout=silent, stderr=silent, start_new_session=True
        )
    os.environ[ADDRESS] = address


def stamps(folders: Iterable[Path]) -> dict[str, tuple[int, int]]:
    """When each file below the folders was last written, and its bytes; not of caches and of hidden files, as
    editors make them."""
    found = {}
    for path in (
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.parent.name != "__pycache__" and not path.name.startswith(".")
    ):
        with suppress(FileNotFoundError):  # it has gone meanwhile
            if not path.is_dir():
                found[str(path)] = path.stat().st_mtime_ns, path.stat().st_size
    return found


def serve(
    listener: socket.socket, owner: int, work: Callable[[dict], object], refuse: Callable[[], str] = str
) -> None:
    """Fork for each request until the process `owner` has ended. A fork does `work(request)`; `refuse` says
    why none may, or nothing."""
    address = listener.getsockname()
    try:
        _serve(listener, os.pidfd_open(owner), work, refuse)
    except ProcessLookupError:  # the owner has ended already
        pass
    finally:
        with suppress(OSError):
            os.unlink(address)
            os.rmdir(os.path.dirname(address))


def _serve(
    listener: socket.socket, ends: int, work: Callable[[dict], object], refuse: Callable[[], str]
) -> None:
    waiting: dict[int, Callable[[], None]] = {}  # file descriptor -> what its being ready calls
    # of a fork's end -> its process and the script that asked
    running: dict[int, tuple[int, socket.socket]] = {}

    def accept() -> None:
        connection, _ = listener.accept()
        connection.settimeout(10)  # for what stops before it has asked
        try:
            request, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        except OSError:
            return connection.close()
        connection.settimeout(None)
        pid = None
        if request and (reason := refuse()):
            with suppress(OSError):
                connection.send(reason.encode())
        elif request and not (pid := os.fork()):  # without one, whoever asked was killed before
            for open_file in (listener, *(script for _, script in running.values())):
                open_file.close()
            for descriptor in (ends, *running):
                os.close(descriptor)
            end(become, json.loads(request), files, functools.partial(answer, connection, work))
        for file in files:
            os.close(file)
        if pid is None:
            return connection.close()
        over = os.pidfd_open(pid)
        running[over] = pid, connection
        waiting[over] = lambda: report(over)
        waiting[connection.fileno()] = lambda: kill(over)

    def kill(over: int) -> None:  # nobody waits for it any more
        pid, connection = running[over]
        del waiting[connection.fileno()]
        for end_it in (os.killpg, os.kill):  # a fork that has just begun leads no group yet
            with suppress(ProcessLookupError):
                end_it(pid, signal.SIGKILL)

    def report(over: int) -> None:
        pid, connection = running.pop(over)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(OSError):
            connection.send(f"{status:+d}".encode())  # with a sign: digits alone are a process
        del waiting[over]
        waiting.pop(connection.fileno(), None)
        connection.close()
        os.close(over)

    waiting[listener.fileno()] = accept
    while True:
        ready = select.select([ends, *waiting], [], [])[0]
        if ends in ready:
            break
        for descriptor in ready:
            if descriptor in waiting:  # a fork's end may take its script's connection with it
                waiting[descriptor]()
    for pid, _ in running.values():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    for pid, _ in running.values():
        os.waitpid(pid, 0)


def answer(connection: socket.socket, work: Callable[[dict], object], request: dict) -> None:
    """Tell the script of a fork that it can forward signals, and do the request."""
    with connection, suppress(OSError):
        connection.send(str(os.getpid()).encode())
    work(request)


def become(request: dict, files: list[int], work: Callable[[dict], object]) -> None:
    """Do a request in its folder, environment, input and output, as the leader of a session."""
    import random

    os.setsid()
    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)
    random.seed()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # a shell's background jobs ignore Ctrl-C, and all that they start
    signal.signal(signal.SIGINT, after_imports(signal.default_int_handler))
    work(request)


def end(work: Callable, *given: object) -> None:
    """Call `work(*given)` and end this process as Python would, without the third of a second in which it
    deletes every module."""
    import atexit
    import threading

    code = 1
    try:
        work(*given)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        if (status := signalled(error)) is None:  # else of code that had not come to answer it
            sys.excepthook(*sys.exc_info())
        else:
            print(INTERRUPTED, file=sys.stderr)
            code = status
    finally:
        with suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code & 0xFF)


def after_imports(answer: Answer) -> Answer:
    """A handler of signals that calls `answer`, which may raise, once no import is under way.

    What is raised in the middle of an import may be lost in a module that goes without what it cannot import,
    or come out as another error, and leaves modules by halves.
    """

    def handler(number: int, frame: FrameType | None) -> None:
        if _importing(frame):
            signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(number))
            signal.setitimer(signal.ITIMER_REAL, AGAIN)
        else:
            answer(number, frame)

    return handler


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def signalled(error: BaseException | None) -> int | None:
    """The exit status of the Ctrl-C or SIGTERM that ended in this error; None where there was neither.

    A signal may come anywhere, in the middle of an import too. What then handles it meets modules by halves
    and fails in its own way: the error that comes out was raised while the signal's was handled.
    """
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return 128 + signal.SIGINT
        if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128:
            return error.code
        error = error.__context__
    return None


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # before there was a fork to hand it to
        print(INTERRUPTED, file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
