"""The MLflow store: a SQLite file beside the results, or a server; its experiments, and how runs are found
and written there.

Only `MlflowClient` is used: the fluent API keeps the active run in globals.
mlflow is imported inside functions, because that takes seconds.
"""

import functools
import importlib.util
import itertools
import json
import logging
import os
import re
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from relinear.errors import UserError
from relinear.files import MANIFEST

# mlflow reads these when it is imported, so they are set before anything in this process can import it. A
# server that is gone, fails or does not answer is given up after one more try, within seconds, and not after
# mlflow's default of several minutes.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")

Entry = tuple[str, float, int, int]  # metric name, value, milliseconds since the epoch, step

LONGEST_NAME = 250  # mlflow refuses more
LONGEST_VALUE = 5000  # mlflow cuts parameters at 6000 characters and tags at 8000
BATCH = 1000  # metrics that one call of mlflow's takes
# the parts of a step (a loss by layer): of the first steps all, then of every tenth
PARTS_ALL, PARTS_EVERY = 100, 10
LONGEST_LIST = 256  # a longer list is data, not a set of curves
ARTIFACTS = "mlflow-artifacts"  # the folder of a SQLite store's copies of files, beside it
# to wait for another process that makes the store, an experiment or a row's run: only giving up costs
# something
LOCK_SECONDS = 1800
BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)  # codes of a file that no waiting and no right mends
# of mlflow's that a store has at least
TABLES = {"experiments", "runs", "metrics", "latest_metrics", "params", "tags"}
SIDE_FILES = ("-journal", "-wal", "-shm")  # what SQLite may leave beside a file
# a part of addresses in MLflow 3's UI, which otherwise shows the pages of generative models
PAGES = "workflowType=machine_learning"
MOUNTS = Path("/proc/self/mounts")
# file systems
NETWORK = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "glusterfs",
    "afs",
    "9p",
    "fuse.sshfs",
)


class StoreError(UserError):
    """The store cannot be reached or used; the message names its address, without a password, and the
    reason."""


def connect(uri: str) -> Any:
    """An MlflowClient on a store that is ready for use."""
    from mlflow import MlflowClient

    # mlflow logs a traceback for every failure it raises, and urllib3 a line for every further try; they
    # would bury our one warning.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    logging.getLogger("urllib3.connectionpool").setLevel(logging.CRITICAL)
    if path := sqlite_path(uri):
        if path.name == "":
            raise FileNotFoundError("it names no file")
        _create_sqlite(uri, path)
        # Fails at once for a file that is no database of mlflow's; mlflow itself would retry for minutes.
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True, timeout=20)) as database:
            database.execute("SELECT 1 FROM experiments LIMIT 1")
        return MlflowClient(uri)
    return Bounded(MlflowClient(uri))


def root_of(record: Mapping[str, Any]) -> str:
    """The folder of the results that a stage's are in, such as mini or mini-x4, after which its experiment is
    named. Older records lack it."""
    return record.get("root", record["scale"])


def experiment_of(client: Any, uri: str, root: str) -> str:
    """The id of experiment relinear-<root>, created or restored if need be.

    A SQLite store keeps its artifacts beside the file, by absolute path: once moved, it shows them after a
    rebuild only.
    """
    from mlflow.exceptions import MlflowException

    name, path = f"relinear-{root}", sqlite_path(uri)
    with lock(uri):
        found = client.get_experiment_by_name(name)
        if found is None:
            place = (path.parent / ARTIFACTS / name).resolve().as_uri() if path else None
            try:
                return client.create_experiment(name, artifact_location=place)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = client.get_experiment_by_name(name)  # on a server, another node was first
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return found.experiment_id


def warn_of_network(uri: str) -> None:
    """Say on stderr that a SQLite store is on a network file system, if it is: its locks do not hold
    there."""
    path = sqlite_path(uri)
    if path and (kind := _file_system(path)) in NETWORK:
        warning = f"WARNING: {path} is on a network file system ({kind}), where SQLite's locks may not hold"
        print(
            f"{warning}: set MLFLOW_TRACKING_URI to an MLflow server's address", file=sys.stderr, flush=True
        )


def sqlite_path(uri: str) -> Path | None:
    """The file of a SQLite store; None of a server."""
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def _file_system(path: Path) -> str:
    """The type of the file system that `path` is or would be on, such as ext4; empty where the kernel does
    not tell."""
    mounts = [line.split() for line in MOUNTS.read_text().splitlines()] if MOUNTS.exists() else []
    # the last mount at a place hides the others
    kinds = {Path(place.replace("\\040", " ")): kind for _, place, kind, *_ in mounts}
    return next((kinds[p] for p in path.resolve().parents if p in kinds), "")


def _create_sqlite(uri: str, path: Path) -> None:
    """Create the store at `path` if there is none.

    mlflow runs its migrations without a transaction: two processes at once, or one that is killed, leave a
    file that no later start can repair. So one process at a time, aside, and moved when complete.
    """
    from mlflow import MlflowClient

    path.parent.mkdir(parents=True, exist_ok=True)
    with lock(uri):
        if not path.exists():
            made = (
                record
                for depth in ("*/*/*", "*/runs/*/*")
                for record in path.parent.glob(f"{depth}/run.json")
            )
            # committed results are nobody's own
            if any(not (record.parents[1] / MANIFEST).is_file() for record in made):
                print(
                    f"{path} is gone, and begins anew: `relinear track rebuild` mirrors what was finished"
                    " before",
                    file=sys.stderr,
                    flush=True,
                )
            fresh = path.with_name(f"{path.name}.new")
            for end in ("", *SIDE_FILES):
                Path(f"{fresh}{end}").unlink(missing_ok=True)
            MlflowClient(f"sqlite:///{fresh}")
            os.replace(fresh, path)


def lock(uri: str) -> Any:
    """Held while the schema, an experiment or a row's run is looked up and created. There is none for a
    server."""
    from filelock import FileLock

    path = sqlite_path(uri)
    return FileLock(f"{path}.lock", timeout=LOCK_SECONDS) if path else nullcontext()


def set_aside_broken(uri: str, results: Path) -> Path | None:
    """Rename the SQLite store of a results folder that is damaged, of another program, or a folder, and say
    so on stderr.

    Returns its new path; None where there is none such. Nothing is removed. A store that is locked, that this
    user may not read, or that lies elsewhere, where it may be anybody's, is left alone. Call it while no
    stage is running.
    """
    path = sqlite_path(uri)
    if path is None or not path.name or not path.exists() or path.resolve().parent != results.resolve():
        return None
    with lock(uri):
        if not (why := _broken(path)):
            return None
        aside = next(
            p
            for n in itertools.count(1)
            if not (p := path.with_name(f"{path.name}.broken{f'-{n}' if n > 1 else ''}")).exists()
        )
        path.rename(aside)
        for end in SIDE_FILES:
            if (beside := Path(f"{path}{end}")).exists():
                beside.rename(f"{aside}{end}")
    print(
        f"{path} is no store of MLflow's ({why}): it is set aside as {aside}, and a new one is made",
        file=sys.stderr,
        flush=True,
    )
    return aside


def _broken(path: Path) -> str:
    """The way in which a file is no store of mlflow's; empty where it is one, or where that cannot be
    told."""
    if path.is_dir():
        return "it is a folder"
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True, timeout=20)) as database:
            [first, *_] = database.execute("PRAGMA quick_check(1)").fetchone()
            tables = {
                name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            }
    except sqlite3.Error as error:
        return str(error) if (error.sqlite_errorcode & 0xFF) in BROKEN else ""
    if first != "ok":
        return str(first).splitlines()[0]
    lacking = sorted(TABLES - tables)
    return f"it lacks the table{'s' * (len(lacking) > 1)} {', '.join(lacking)}" if lacking else ""


@contextmanager
def without_sync() -> Iterator[None]:
    """SQLite does not wait for the disk at each of thousands of transactions, and keeps its indices in
    memory. A machine that goes down meanwhile may damage the store, which `relinear track rebuild` then sets
    aside and makes anew."""
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    def switch_off(connection: Any, _: object) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("PRAGMA cache_size = -65536")  # KiB

    event.listen(Engine, "connect", switch_off)
    try:
        yield
    finally:
        event.remove(Engine, "connect", switch_off)


# A server

SECONDS = 15  # for a whole answer; every job of a command waits so long once
SECONDS_OF_FILES = 600  # for calls that send or fetch files


class Bounded:
    """An MlflowClient, of which a method that takes longer than its bound raises TimeoutError.

    A time limit of a socket counts from one byte to the next, so a server that sends a byte a second keeps a
    call for hours.
    """

    def __init__(self, client: Any):
        self._client = client

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if name.startswith("_") or not callable(found):
            return found
        bound = SECONDS_OF_FILES if "artifact" in name else SECONDS
        return lambda *given, **named: _within(bound, lambda: found(*given, **named))


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """What a call returns or raises. A call that is not done in time is left to a thread that ends with this
    process."""
    answer: futures.Future[Any] = futures.Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # raised again below, in the thread that asked
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    futures.wait([answer], seconds)
    if not answer.done():
        raise TimeoutError(f"no whole answer within {seconds:g} s")
    return answer.result()


# Failures


def store_errors() -> tuple[type[Exception], ...]:
    """The errors that a failing store raises: mlflow's and SQLAlchemy's wrappers, SQLite, files, locks,
    sockets."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, SQLAlchemyError, sqlite3.Error, OSError


def failure(uri: str, error: Exception) -> str:
    """One line: the store's address, without a password, and how it failed."""
    reason = next(iter(str(error).splitlines()), "")
    return re.sub(r"//[^/@\s]*@", "//***@", f"MLflow's store {uri} failed: {type(error).__name__}: {reason}")


@contextmanager
def access(uri: str) -> Iterator[None]:
    """A context in which errors of the store become a StoreError of one line; relinear's own mistakes are not
    changed."""
    if importlib.util.find_spec("mlflow") is None:
        raise StoreError(
            "this verb needs mlflow, which is not installed; in a clone, `pip install --editable '.[suite]'`"
            " brings it"
        )
    errors = store_errors()
    try:
        yield
    except UserError:
        raise
    except errors as error:
        raise StoreError(failure(uri, error)) from None


# Runs


def search(client: Any, experiment: str, where: str = "") -> Iterator[Any]:
    """All runs of an experiment that mlflow's filter `where` admits."""
    token = None
    while True:
        page = client.search_runs([experiment], where, max_results=1000, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def log(
    client: Any,
    run_id: str,
    *,
    metrics: list[Entry] = (),
    params: dict[str, str] | None = None,
    tags: dict[str, Any] | None = None,
) -> None:
    """Write metrics, parameters and tags in as few calls as mlflow's limits allow."""
    from mlflow.entities import Metric, Param, RunTag

    metrics = [Metric(*entry) for entry in metrics]
    params = [Param(name, text) for name, text in (params or {}).items()]
    tags = [RunTag(name, text) for name, text in texts(tags or {}).items()]
    while metrics or params or tags:
        now = {"params": params[:100], "tags": tags[:100]}
        now["metrics"] = metrics[: BATCH - sum(map(len, now.values()))]
        client.log_batch(run_id, synchronous=True, **now)
        params, tags, metrics = params[100:], tags[100:], metrics[len(now["metrics"]) :]


def log_files(client: Any, run_id: str, files: Mapping[str, Path | bytes]) -> None:
    """Copy files, or texts as files, into a run, each to the place by which it is named here, in one call of
    mlflow's."""
    if not files:
        return
    with TemporaryDirectory() as scratch:
        for name, source in files.items():
            place = Path(scratch, name)
            place.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(source, bytes):
                place.write_bytes(source)
            else:
                place.symlink_to(source.resolve())
        client.log_artifacts(run_id, scratch)


# Names and numbers as mlflow takes them


@functools.cache
def metric_name(name: str) -> str:
    """A name mlflow takes: all but letters, digits and ``_-./: `` becomes ``_`` ("acc,none": "acc_none").

    Also used for parameters and tags. Raises ValueError if nothing is left.
    """
    parts = re.sub(r"[^\w\-./: ]", "_", name).split("/")
    clean = "/".join(part for part in parts if part not in ("", ".", ".."))
    if not clean:
        raise ValueError(f"a name needs a letter or a digit, got {name!r}")
    return clean[:LONGEST_NAME]


def step_entries(metrics: dict, step: int, seconds: float | None = None) -> list[Entry]:
    """The entries of a step of training. mlflow takes 0.2 ms for each, and thirty layers would make a
    distillation of 50 s a third longer."""
    if step >= PARTS_ALL and step % PARTS_EVERY:
        metrics = {name: value for name, value in metrics.items() if not isinstance(value, dict | list)}
    return entries(metrics, step, seconds)


def entries(metrics: dict, step: int, seconds: float | None = None) -> list[Entry]:
    """An entry for each number in `metrics`, at `seconds` since the epoch (default now)."""
    stamp = round(1000 * (time.time() if seconds is None else seconds))
    return [(name, value, stamp, step) for name, value in flatten_metrics(metrics).items()]


def flatten_metrics(tree: dict[str, Any]) -> dict[str, float]:
    """Every number of a JSON tree by its path: {"tasks": {"piqa": {"acc": 1}}} gives {"tasks/piqa/acc": 1.0}.

    Slashes make mlflow's UI group the charts. A list of numbers gets padded indices ("layer_loss/07").
    Strings, None, nested lists and lists longer than `LONGEST_LIST` are left out. Raises TypeError for
    anything else that has no float value.
    """
    flat: dict[str, float] = {}
    for name, value in tree.items():
        if isinstance(value, list | tuple):
            is_curves = len(value) <= LONGEST_LIST and all(isinstance(item, int | float) for item in value)
            width = max(2, len(str(len(value) - 1)))
            value = {f"{i:0{width}}": item for i, item in enumerate(value)} if is_curves else None
        if isinstance(value, dict):
            for path, number in flatten_metrics(value).items():
                flat[metric_name(f"{name}/{path}")] = number
        elif value is not None and not isinstance(value, str):
            flat[metric_name(str(name))] = float(value)
    return flat


def texts(tree: dict, prefix: str = "") -> dict[str, str]:
    """A nested dict as dotted names and the texts mlflow stores: JSON, which a round trip does not change."""
    flat: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= texts(value, f"{prefix}{name}.")
            continue
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        if len(text) > LONGEST_VALUE:
            text = f"{text[:LONGEST_VALUE]}... ({len(text)} characters; whole in run.json)"
        flat[metric_name(f"{prefix}{name}")] = text
    return flat
