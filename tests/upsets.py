"""A command that is upset while it runs, by signals, kills, disks, stores or another command: a part of the
fault campaign (`faults.py`).

Each round starts from a copy of a prepared, partly finished results folder and gives one command that has a
training and two measurements to do. It is upset at a random moment; then the same command is given again.
Whatever happened, it must end with the very files of an undisturbed run, once in MLflow, with nothing left
over, without a traceback, and a table that is drawn from it has the same bytes.

A round of another kind (`BEGUN`) has something wrong when the command begins: a file in a folder's place, a
file system without locks, a module of the clone's folder in a library's place. The command then says so in
one line, or works all the same; and when it is mended, the same command works.

All of this is in a clone whose path has signs that formats and addresses use. Snakemake is a process of its
own. Its jobs are forks of one that has imported all libraries (`warm`), so that a round takes half a minute;
each is started, heard and killed as ever.
"""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import warm
from conftest import Clone, append, copy_sources, environment
from servers import Between, mlflow_server, silent_server, slow_server, standing_before

RUN, SHARED, LAST = "hedgehog", "distill hedgehog", ("finetune", "gate", "perplexity")
TARGET = f"results/smoke/runs/{RUN}/{LAST[-1]}/run.json"
TABLE = ("comparison", "table2", ("csv", "md", "claims.csv"))
GIB = 1 << 30
BEGUN = 0.5  # seconds that a Python takes to come to the first line of what it runs
PASSWORD = "hunter2"  # of a store that refuses: no output may have it
LONGEST = 420  # seconds that a command may take on a busy machine


class Ended(NamedTuple):
    """The exit status of a command, and its output."""

    code: int
    said: str


# Snakemake, whose jobs take another Python than its own.
SNAKEMAKE = (
    "import runpy, sys; sys.executable = sys.argv.pop(1); runpy.run_module('snakemake', run_name='__main__',"
    " alter_sys=True)"
)


class Round(NamedTuple):
    """An upset of the command, which returns False where the command had ended before; and the store and the
    disk of the round."""

    name: str
    upset: Callable[["Results", subprocess.Popen, random.Random], bool | None]
    store: str | None = None
    on_tmpfs: bool = False
    read_only: bool = False  # from the start


class Begun(NamedTuple):
    """What is wrong when the command begins, as a context; and what the command says of that, or None where
    it works all the same."""

    name: str
    wrong: Callable[["Results"], AbstractContextManager]
    says: str | None = None
    store: str | None = None


# Put into the mirror, on which no result depends: a call of the operating system fails while the file
# `failing` says so.
FAILING = """

import errno
import fcntl
import os
from pathlib import Path


def _fails(number):
    def fails(*_):
        raise OSError(number, os.strerror(number))

    return fails


if Path("failing").is_file():
    _call, _number = Path("failing").read_text().split()
    setattr({"flock": fcntl, "fsync": os}[_call], _call, _fails(getattr(errno, _number)))
"""


class Results:
    """The prepared clone, and the copy of it that a round works in, always at the same path: an adapter names
    the folder of its model."""

    def __init__(self, folder: Path):
        warm.interpreter(folder / "warm", os.getpid(), environment())
        self.base, self.clone = (
            folder / "base",
            Clone(folder / "100%s {clone}", [], str(folder / "warm/python")),
        )
        self.seconds, self.usual = 0.0, {}
        self.server: type[Between] = Between

    def prepare(self) -> "Results":
        """Make everything up to the distilled run in the base, and in a copy the files of an undisturbed
        command."""
        copy_sources(self.clone.root)
        append(self.clone, "src/relinear/tracking/live.py", FAILING)
        lines = self.clone.python("-c", BEHIND, *SHARED.split()).splitlines()
        nodes, records = zip(*(line.split("\t") for line in lines), strict=True)
        self.clone.python("tests/verbs.py", "cpu", *(f"{node} --scale smoke --threads 1" for node in nodes))
        self.clone.snakemake(*records, options=("--touch",))
        self.clone.root.rename(self.base)
        self.fresh()
        began = time.monotonic()
        ended = self.command(forked=False)
        assert ended.code == 0, ended.said[-4000:]
        self.seconds, self.usual = time.monotonic() - began, self.contents()
        return self

    def fresh(self) -> None:
        shutil.rmtree(self.clone.root, ignore_errors=True)
        subprocess.run(["cp", "-a", self.base, self.clone.root], check=True)

    def start(self, store: str | None = None, forked: bool = False) -> subprocess.Popen:
        """The running command; a Snakemake that is not upset, and does not have to work with something wrong,
        can be a fork, too."""
        env = {**environment(), **({"MLFLOW_TRACKING_URI": store} if store else {}), "PYTHONSAFEPATH": "1"}
        python = ["-c", SNAKEMAKE, self.clone.interpreter]
        command = [
            *([self.clone.interpreter, "-m", "snakemake"] if forked else [sys.executable, *python]),
            "--cores",
            "2",
            "--config",
            "scale=smoke",
            "--",
            TARGET,
        ]
        return subprocess.Popen(
            command,
            cwd=self.clone.root,
            env=env,
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=attentive,
        )

    def command(self, store: str | None = None, forked: bool = True) -> Ended:
        return ended(self.start(store, forked))

    def contents(self) -> dict[str, str]:
        """The sha256 of each file that the command made, without the history, which has times; and of the
        table that is drawn from them."""
        found, (paper, stem, ends) = {}, TABLE
        drawn = self.clone.relinear("draw", paper, stem, "--scale", "smoke")
        assert drawn.returncode == 0, drawn.stderr[-3000:]
        for end in ends:
            found[f"{stem}.{end}"] = hashlib.sha256(
                (self.clone / f"results/smoke/{paper}/{stem}.{end}").read_bytes()
            ).hexdigest()
        for stage in LAST:
            record = self.clone.record(RUN, stage)
            found |= {
                f"{stage}/{name}": entry["sha256"]
                for name, entry in record["artefacts"].items()
                if name != "history.jsonl"
            }
        return found

    def problems(self) -> list[str]:
        """The differences from what an undisturbed command leaves."""
        found = self.contents()
        wrong = [f"{name} is another file" for name, sha in found.items() if self.usual.get(name) != sha]
        wrong += [f"{name} is not there" for name in self.usual.keys() - found.keys()]
        history = [
            json.loads(line)["step"]
            for line in (self.clone.stage(RUN, "finetune") / "history.jsonl").read_text().splitlines()
        ]
        wrong += ["history has a gap or a double"] if history != list(range(len(history))) else []
        root = self.clone / "results/smoke"
        left = [
            p
            for stage in LAST
            for p in (root / ".work" / f"{RUN}.{stage}").glob("*")
            if p.name not in ("lock", "attempt.json")
        ]
        left += [
            p
            for p in root.rglob("*")
            if p.suffix in (".new", ".broken") or p.name.startswith(".metrics.json.")
        ]
        return wrong + [f"{p.relative_to(root)} is left over" for p in left]

    def mirrored(self) -> list[str]:
        """The runs that MLflow's store lacks, or has twice."""
        wrong, runs = [], [run for run in self.clone.mlflow() if run["tags"].get("run") == RUN]
        for stage in LAST:
            current = [
                r for r in runs if r["tags"].get("stage") == stage and r["tags"].get("current") == "true"
            ]
            key = self.clone.record(RUN, stage)["key"]
            if [(r["status"], r["tags"]["key"]) for r in current] != [("FINISHED", key)]:
                wrong.append(f"MLflow has {[r['status'] for r in current]} of {stage}")
        return wrong + [
            f"{r['tags'].get('stage')} is RUNNING in MLflow"
            for r in runs
            if r["status"] == "RUNNING" and "stage" in r["tags"]
        ]


BEHIND = """
import sys
from relinear.plan.plan import Plan
plan = Plan(scale="smoke")
for node in plan.behind([plan.node(*sys.argv[1:])]):
    print(node, (plan.folder(node) / "run.json").as_posix(), sep="\\t")
"""


def attentive() -> None:
    """Handle the signals again that `nohup` and a shell's background jobs leave ignored, as in a terminal."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def ended(process: subprocess.Popen) -> Ended:
    try:
        said, _ = process.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        everyone(process, signal.SIGKILL)
        return Ended(124, process.communicate()[0] + "\nit did not end")
    return Ended(process.returncode, said)


def family(process: subprocess.Popen) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        own = psutil.Process(process.pid)
        return [own, *own.children(recursive=True)]
    return []


def everyone(process: subprocess.Popen, number: int) -> None:
    for one in family(process):
        with suppress(psutil.NoSuchProcess):
            one.send_signal(number)


def stages_of(process: subprocess.Popen) -> list[psutil.Process]:
    """The processes that work on a stage, once there are some, and each has begun: what Python itself says
    before is not ours."""
    found: list[psutil.Process] = []
    while not found and process.poll() is None:
        for one in family(process):
            with suppress(psutil.Error):
                if {"finetune", "measure"} & set(one.cmdline()) and time.time() - one.create_time() > BEGUN:
                    found.append(one)
        time.sleep(0.02)
    return found


# --- what can happen ---


def sent(number: signal.Signals, whom: str) -> Callable:
    def upset(results: Results, process: subprocess.Popen, draw: random.Random) -> bool:
        whose = {
            "all": family,
            "snakemake": lambda process: [psutil.Process(process.pid)],
            "stage": stages_of,
        }[whom](process)
        for one in whose:
            with suppress(psutil.NoSuchProcess):
                one.send_signal(number)
        return bool(whose)

    return upset


def stopped(results: Results, process: subprocess.Popen, draw: random.Random) -> None:
    of_it = at_work(results)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for one in of_it:
            with suppress(psutil.NoSuchProcess):
                one.send_signal(number)
        time.sleep(3)


def removed(*names: str) -> Callable:
    def upset(results: Results, process: subprocess.Popen, draw: random.Random) -> None:
        for name in names:
            for path in (results.clone / "results").glob(name):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    return upset


def second(results: Results, process: subprocess.Popen, draw: random.Random) -> None:
    """Give the same command in another shell, and at times kill the first."""
    other = results.start()
    if draw.random() < 0.5:
        time.sleep(draw.uniform(0, results.seconds / 2))
        everyone(process, signal.SIGKILL)
    found = ended(other)
    assert found.code in (0, 1) and "Traceback" not in found.said, found.said[-3000:]


def full(results: Results, process: subprocess.Popen, draw: random.Random) -> None:
    """Fill the disk until the command has ended; then make room again."""
    filler = results.clone / "results/filler"
    with filler.open("wb") as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 20))
    _wait(process)
    filler.unlink()


def writable_again(results: Results, process: subprocess.Popen, draw: random.Random) -> None:
    """The results were read-only from the start, since no disk becomes so while a file on it is open for
    writing."""
    _wait(process)
    remount(results, "rw")


def remount(results: Results, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", results.clone / "results"], check=True)


def _wait(process: subprocess.Popen) -> None:
    """Wait until a command has ended. Nobody reads its output meanwhile, which fits into the pipe."""
    end = time.monotonic() + LONGEST
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.1)


def fails_midway(how: str) -> Callable:
    """The server took what came so far, and answers with errors, or no more, until the command has ended."""

    def upset(results: Results, process: subprocess.Popen, draw: random.Random) -> None:
        results.server.failures, results.server.silent = (10**9 if how == "fails" else 0), how == "silent"
        _wait(process)
        results.server.failures, results.server.silent = 0, False

    return upset


def nothing(results: Results, process: subprocess.Popen, draw: random.Random) -> None:
    """The store is upset from the start."""


# --- what can be wrong from the start ---


def a_file_at(name: str) -> Callable[[Results], AbstractContextManager]:
    @contextmanager
    def wrong(results: Results) -> Iterator[None]:
        place = results.clone / name
        aside = place.rename(place.with_name(f"{place.name}-aside")) if place.exists() else None
        place.write_text("")
        yield
        place.unlink()
        if aside:
            aside.rename(place)

    return wrong


def failing(call: str, number: str) -> Callable[[Results], AbstractContextManager]:
    @contextmanager
    def wrong(results: Results) -> Iterator[None]:
        (results.clone / "failing").write_text(f"{call} {number}")
        yield
        (results.clone / "failing").unlink()

    return wrong


@contextmanager
def shadowed(results: Results) -> Iterator[None]:
    """Modules of the clone's folder with the names of libraries, one of them Python's own."""
    files = [results.clone / f"{name}.py" for name in ("yaml", "numpy", "tqdm", "random")]
    for file in files:
        file.write_text("raise RuntimeError('a module of the clone')\n")
    yield
    for file in files:
        file.unlink()


@contextmanager
def of_the_future(results: Results) -> Iterator[None]:
    for path in (results.clone / "results").rglob("*"):
        os.utime(path, (4e9, 4e9))
    yield


@contextmanager
def optimised(results: Results) -> Iterator[None]:
    """`python -O`, which leaves assertions out."""
    os.environ["PYTHONOPTIMIZE"] = "1"
    yield
    del os.environ["PYTHONOPTIMIZE"]


def together(*wrongs: Callable[[Results], AbstractContextManager]) -> Callable:
    @contextmanager
    def wrong(results: Results) -> Iterator[None]:
        with ExitStack() as stack:
            for one in wrongs:
                stack.enter_context(one(results))
            yield

    return wrong


IN_THE_WAY = "is a file, and a folder is needed there; move it away"
BEGUN_KINDS = [
    Begun("a file for .snakemake", a_file_at(".snakemake"), IN_THE_WAY),
    Begun("a file for the logs", a_file_at("results/smoke/logs"), IN_THE_WAY),
    Begun("a file for a work folder", a_file_at(f"results/smoke/.work/{RUN}.{LAST[0]}"), IN_THE_WAY),
    Begun("a file for a step's folder", a_file_at(f"results/smoke/runs/{RUN}/{LAST[0]}"), IN_THE_WAY),
    Begun("no locks", failing("flock", "ENOLCK"), "No locks available"),
    Begun("a failing disk", failing("fsync", "EIO"), "Input/output error"),
    Begun(
        "modules in libraries' places, times of the future, python -O",
        together(shadowed, of_the_future, optimised),
    ),
    Begun("store slow", lambda results: nullcontext(), store="slow"),
]


def begun(results: Results, *kinds: Begun) -> tuple[str, str]:
    """`held` or the faults of commands that begin with something wrong each, one after the other in one
    folder, and of the same command afterwards; and how all ended."""
    results.fresh()
    wrong, ends = [], []
    for kind in kinds:
        with store_of(results, kind) as store, kind.wrong(results):
            first = results.command(store, forked=kind.says is not None)
        wrong += faults_of(kind, first)
        ends.append(first.code)
    again = results.command()
    wrong += (
        [f"the command again ended with {again.code}: {again.said[-1500:]}"]
        if again.code
        else results.problems()
    )
    wrong += [] if again.code else rebuild(results) or results.mirrored()
    return ("; ".join(wrong) or "held"), f"ended with {', '.join(map(str, ends))}, then with {again.code}"


def faults_of(kind: Begun, first: Ended) -> list[str]:
    """What is wrong with the end of a command that begins so."""
    if kind.says is None:
        wrong = [f"{kind.name}: it ended with {first.code}: {first.said[-1500:]}"] if first.code else []
    elif not first.code or kind.says not in first.said:
        wrong = [f"{kind.name}: it ended with {first.code}, and did not say {kind.says!r}"]
    else:
        wrong = []
    if "Traceback" in first.said:
        wrong.append("a traceback: " + first.said[first.said.index("Traceback") :][:4000])
    return wrong + (["a password in what was said"] if PASSWORD in first.said else [])


SIGNALS = [
    (s, w)
    for s in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for w in ("all", "snakemake", "stage")
]
KINDS = [
    *(Round(f"{s.name} to {w}", sent(s, w)) for s, w in SIGNALS if (s, w) != (signal.SIGHUP, "stage")),
    Round("SIGKILL to all", sent(signal.SIGKILL, "all")),  # at another moment: kills are what machines do
    Round("SIGKILL to stage", sent(signal.SIGKILL, "stage")),
    Round("SIGSTOP, SIGCONT", stopped),
    Round("two commands", second),
    Round("disk full", full, on_tmpfs=True),
    Round("read-only", writable_again, on_tmpfs=True, read_only=True),
    Round("store deleted", removed("mlflow.db*")),
    Round("store refuses", nothing, store=f"http://user:{PASSWORD}@127.0.0.1:1"),
    Round("store silent", nothing, store="silent"),
    Round("work folders deleted", removed("smoke/.work")),
    Round("run's folder deleted", removed(f"smoke/runs/{RUN}")),
    Round("model's folder deleted", removed("smoke/models/tiny")),
    Round("server fails midway", fails_midway("fails"), store="server"),
    Round("server silent midway", fails_midway("silent"), store="server"),
]


def names(count: int) -> list[tuple[str, Round]]:
    """The rounds, each with its number: kinds take turns."""
    return [
        (f"upset {number} {KINDS[number % len(KINDS)].name}", KINDS[number % len(KINDS)])
        for number in range(count)
    ]


@contextmanager
def store_of(results: Results, kind: Round | Begun) -> Iterator[str | None]:
    """The address of the round's store; None for the default one. A server is a real one, and one before it
    that can fail."""
    with ExitStack() as stack:
        if kind.store in ("silent", "slow"):
            yield stack.enter_context({"silent": silent_server, "slow": slow_server}[kind.store]())
        elif kind.store == "server":
            folder = results.clone / "server"
            folder.mkdir()
            results.server = stack.enter_context(
                standing_before(stack.enter_context(mlflow_server(folder, results.clone.interpreter)))
            )
            yield results.server.url
        else:
            yield kind.store


@contextmanager
def disk(results: Results, wanted: bool) -> Iterator[bool]:
    """Results on a small disk of their own; False where this user cannot have one."""
    if not wanted:
        yield True
        return
    place = results.clone / "results"
    aside = place.rename(place.with_name("aside"))
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={GIB + (64 << 20)}", "none", place], capture_output=True
    ).returncode:
        place.rmdir()
        aside.rename(place)
        yield False
        return
    try:
        subprocess.run(["cp", "-a", f"{aside}/.", place], check=True)
        shutil.rmtree(aside)
        yield True
    finally:
        subprocess.run(["umount", "-l", place], check=False)


def judged(results: Results, name: str, kind: Round) -> tuple[str, str]:
    """`held` or the faults, and the end of the upset command. `not run` where this machine does not allow the
    round."""
    draw = random.Random(name)
    moment = draw.uniform(0.1, 0.95) * results.seconds
    for _ in range(4):
        what, said = _judged(results, draw, kind, moment)
        if what != "ended":
            break
        moment /= 2  # the machine is quicker now
    return ("not run" if what == "ended" else what), said


def _judged(results: Results, draw: random.Random, kind: Round, moment: float) -> tuple[str, str]:
    """The same, for one moment; `ended` where the command had ended by then."""
    results.fresh()
    with disk(results, kind.on_tmpfs) as there, store_of(results, kind) as store:
        if not there:
            return "not run", "mounting needs root"
        if kind.read_only:
            remount(results, "ro")
        process = results.start(store)
        with suppress(subprocess.TimeoutExpired):
            process.wait(moment)
        if process.poll() is not None and kind.upset is not nothing and not kind.read_only:
            return "ended", f"the command had ended before {moment:.0f} s: {ended(process).code}"
        if kind.upset(results, process, draw) is False:
            return (
                "ended",
                f"no stage was at work after {moment:.0f} s; the command ended with {ended(process).code}",
            )
        first = ended(process)
        again = results.command(store)
        wrong = ["it ended well on a disk that refuses"] if kind.read_only and first.code == 0 else []
        wrong += (
            [f"the command again ended with {again.code}: {again.said[-1500:]}"]
            if again.code
            else results.problems()
        )
        if not again.code:
            rebuilt = rebuild(results)
            wrong += rebuilt or results.mirrored()
        for ends in (first, again):
            wrong += (
                ["a traceback: " + ends.said[ends.said.index("Traceback") :][:4000]]
                if _traceback(ends.said)
                else []
            )
            wrong += ["a password in what was said"] if PASSWORD in ends.said else []
        wrong += ["a process is left"] if _left(results) else []
    return (
        "; ".join(wrong) or "held"
    ), f"at {moment:.0f} s of {results.seconds:.0f} s; ended with {first.code}, then with {again.code}"


def _traceback(said: str) -> bool:
    """Whether one was printed, other than that of a Python that was interrupted before it read our first
    line, or while it imported."""
    lines = said[said.index("Traceback") :] if "Traceback" in said else ""
    early = "KeyboardInterrupt" in lines and (
        "importlib._bootstrap" in lines or not re.search(r'File "[^"]*(relinear/\w|common\.smk)', lines)
    )
    return bool(lines) and not early


def rebuild(results: Results) -> list[str]:
    """Rebuild the store from the files, and once more, which must add nothing."""
    ends = [results.clone.relinear("track", "rebuild") for _ in range(2)]
    if any(e.returncode for e in ends) or not ends[1].stdout.startswith("0 runs"):
        return [f"track rebuild: {ends[0].stderr[-500:]} {ends[1].stdout}"]
    return []


def at_work(results: Results) -> list[psutil.Process]:
    """The processes in the clone's folder: Snakemake, shells, jobs."""
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            if one.pid != os.getpid() and Path(one.cwd()) == results.clone.root:
                found.append(one)
    return found


def _left(results: Results) -> list[psutil.Process]:
    """Processes that have not ended half a minute after the command; they are killed."""
    end = time.monotonic() + 30
    while (left := at_work(results)) and time.monotonic() < end:
        time.sleep(0.1)
    for one in left:
        one.kill()
    return left
