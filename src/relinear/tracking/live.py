"""MLflow mirror of the stage folders: one parent run per table row, one child run per attempt at a stage.

The files under ``results/`` are the truth. A store that fails costs a warning and no training run, and
`rebuild` restores a lost store from run.json, metrics.json and history.jsonl. Only `MlflowClient` is used:
the fluent API keeps the active run in globals. mlflow is imported inside functions, because that takes a
second.

How a run is found again: a parent carries the tag ``relinear.row``, a child the tags ``run``, ``stage``,
``key`` and ``attempt``. ``tags.current = 'true'`` lists the latest attempt at every stage, and
``tags.mlflow_run_id = '<id in run.json>'`` finds a run by its first id also after a rebuild.
"""

import gzip
import importlib.util
import json
import logging
import os
import re
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, nullcontext, suppress
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import Any, Self

from relinear import records
from relinear.errors import UserError
from relinear.files import MANIFEST, sha256
from relinear.tracking.guard import require_own

# mlflow reads these when it is imported, so they are set before anything in this process can import it. A
# dead tracking server must fail within seconds, not within mlflow's default of several minutes.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")

FLUSH_ENTRIES = 1000  # one batch of mlflow's
FLUSH_SECONDS = 5.0
PARTS_ALL, PARTS_EVERY = 100, 10  # the parts of a step (a loss by layer): of the first steps all, then of every tenth
RETRY_PAUSES = (0.5, 2.0)  # seconds between tries; there is no further try after RETRY_BUDGET seconds
RETRY_BUDGET = 10.0
LONGEST_NAME = 250  # mlflow refuses more
LONGEST_VALUE = 5000  # mlflow cuts parameters at 6000 characters and tags at 8000
LONGEST_LIST = 256  # a longer list is data, not a set of curves
LARGEST_ARTIFACT = 5 * 2**20  # bytes
WEIGHTS = {".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".gguf", ".npy", ".npz"}
COPIED = {".png", ".pdf", ".svg", ".csv", ".md"}  # beside run.json and metrics.json
ROW_TAGS = ("paper", "table", "row", "method", "variant", "scale")  # shown on the parent run
IDENTITY = ("scale", "run", "stage", "key", "attempt")
MOUNTS = Path("/proc/self/mounts")
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "9p", "fuse.sshfs")  # file systems
RECORD_FIELDS = (*IDENTITY, "config_hash", "code_hash", "datasets", "git", "versions", "hardware", "started", "wall_seconds", "tags")

Entry = tuple[str, float, int, int]  # metric name, value, milliseconds since the epoch, step


def init(uri: str, scale: str | None = None) -> None:
    """Create the store, its schema and, if `scale` is given, that scale's experiment; harmless when repeated.

    `uri` is ``sqlite:///<path>`` (its folder is created) or whatever else mlflow takes, such as
    ``http://host:port``. SQLite needs a local disk: its locks do not hold on a network file system, of which
    this warns on stderr.
    """
    path = _sqlite_path(uri)
    if path and (kind := _file_system(path)) in NETWORK:
        warning = f"WARNING: {path} is on a network file system ({kind}), where SQLite's locks may not hold"
        print(f"{warning}: set MLFLOW_TRACKING_URI to an MLflow server's address", file=sys.stderr, flush=True)
    client = connect(uri)
    if scale is not None:
        _experiment(client, uri, scale)


def describe(record: dict) -> dict:
    """What `Tracker` takes, from run.json or from as much of it as is known when a stage starts.

    Use it as ``Tracker(uri, **describe(record))``; then a rebuilt store has the parameters and tags of the
    first one.
    """
    tags = dict(record["tags"])
    for field in ("config_hash", "code_hash", "git", "versions", "hardware", "seed"):
        if field in record:
            tags[field] = record[field]
    tags |= {f"parent.{name}": parent["key"] for name, parent in record.get("parents", {}).items()}
    return {
        **{field: record[field] for field in IDENTITY},
        "params": record["config"],
        "tags": tags,
        "datasets": record["datasets"],
    }


class Tracker:
    """The child run of one attempt at one stage: RUNNING while open, then FINISHED, FAILED or KILLED.

    Opening it kills what an earlier process left running at this (scale, run, stage) and takes the tag
    ``current`` from earlier attempts, so the caller must hold that stage's lock. `params` and `tags` may be
    nested (names are joined with dots); `datasets` are ``{"name", "sha256", "role"}``. A shared stage
    (teacher, corpus) passes its own name as `run`.

    A store that cannot be reached or stays locked is retried for some seconds and then given up with one
    warning on stderr; without mlflow it is given up at once. The context goes on without it; `run_id` is empty
    if the run was never created.
    Mistakes of the caller are raised.
    """

    failing = False  # while one is closed after an error

    def __init__(
        self,
        uri: str,
        *,
        scale: str,
        run: str,
        stage: str,
        key: str,
        params: dict,
        tags: dict,
        datasets: list[dict],
        attempt: int,
    ):
        self.run_id = ""
        self._uri, self._scale, self._run, self._stage, self._key = uri, scale, run, stage, key
        self._params, self._tags = _texts(params), _texts(tags)
        self._datasets, self._attempt = datasets, attempt
        self._buffer: list[Entry] = []
        self._last_step = 0
        self._last_flush = monotonic()
        self._headline: dict[str, float] = {}
        self._given_up = False

    def __enter__(self) -> Self:
        if importlib.util.find_spec("mlflow") is None:
            self._give_up(ModuleNotFoundError("mlflow is not installed"))
            return self
        try:
            self._store(self._open)
        except BaseException as error:  # a signal: `with` calls __exit__ only once __enter__ has returned
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not self.run_id:
            return
        status = _status(error)
        Tracker.failing = error is not None
        try:
            self._store(self._close, status, error)
            if self._given_up:
                # The store may be back by now. A run marked incomplete is replaced by the next `rebuild`.
                with suppress(*_store_errors()):
                    self._client.set_tag(self.run_id, "relinear.mirror", "incomplete")
                    self._terminate(status)
        finally:
            Tracker.failing = False

    def log(self, metrics: dict[str, Any], step: int, time: float | None = None) -> None:
        """Buffer the numbers of one step; sent every `FLUSH_SECONDS` or `FLUSH_ENTRIES`, and on exit.

        Nested dicts and lists of numbers are flattened as in `flatten_metrics` and, in long runs, kept of every
        tenth step (`PARTS_EVERY`); NaN and infinities are kept. `time` is in seconds since the epoch, now if not
        given. On resume, replay the kept lines of history.jsonl with their own times.
        """
        self._last_step = max(self._last_step, step)
        self._buffer += _step(metrics, step, time)
        if len(self._buffer) >= FLUSH_ENTRIES or monotonic() - self._last_flush >= FLUSH_SECONDS:
            self._store(self._flush)

    def artifact(self, path: Path | str) -> None:
        """Copy a small file to the store; of weights and files above `LARGEST_ARTIFACT` the sha256 only."""
        path = Path(path)
        if path.suffix in WEIGHTS or path.stat().st_size > LARGEST_ARTIFACT:
            tags = {f"artefact.{path.name}": sha256(path)}
            self._store(lambda: _log_tags(self._client, self.run_id, tags))
        else:
            self._store(lambda: self._client.log_artifact(self.run_id, str(path)))

    def finish(self, folder: Path | str) -> None:
        """Mirror a complete stage folder: final metrics, artefact hashes, run.json, metrics.json, figures.

        Call it last. A measurement's headline metrics are copied to the parent run
        once the context is left without an error. Raises ValueError if run.json is that of another key.
        """
        folder = Path(folder)
        record, metrics = _read_record(folder), _read_metrics(folder)
        if record["key"] != self._key:
            raise ValueError(f"{folder / 'run.json'} has key {record['key']!r}, this run has {self._key!r}")
        self._buffer += _entries(_final(record, metrics), self._last_step)
        self._headline = headline(metrics) if _compares(record) else {}
        self._store(lambda: _log_folder(self._client, self.run_id, folder, record))

    def _open(self) -> None:
        client = self._client = connect(self._uri)
        experiment = self._experiment = _experiment(client, self._uri, self._scale)
        self._parent = _parent(client, self._uri, experiment, self._run, self._tags)
        self._on_row(lambda row: client.update_run(row, status="RUNNING"))
        for child in _children(client, experiment, self._run, self._stage):
            if child.info.status == "RUNNING":
                client.set_terminated(child.info.run_id, "KILLED")
            if child.data.tags.get("current") == "true":
                client.set_tag(child.info.run_id, "current", "false")
        self.run_id = _create(
            client,
            experiment,
            self._parent,
            scale=self._scale,
            run=self._run,
            stage=self._stage,
            key=self._key,
            tags=self._tags,
            attempt=self._attempt,
        )
        _log_inputs(client, self.run_id, self._params, self._datasets)
        self._settle()

    def _settle(self) -> None:
        """Follow the row's run where another node's has taken its place since it was last looked up."""
        parent = _only_parent(self._client, self._experiment, self._run)
        if parent not in ("", self._parent):
            self._client.set_tag(self.run_id, "mlflow.parentRunId", parent)
            self._parent = parent

    def _close(self, status: str, error: BaseException | None) -> None:
        self._flush()
        self._settle()
        if error is not None:
            _log_tags(self._client, self.run_id, {"error": f"{type(error).__name__}: {error}"})
        elif self._headline:
            self._on_row(lambda row: _log_metrics(self._client, row, _entries(self._headline, 0)))
        self._terminate(status)

    def _terminate(self, status: str) -> None:
        self._client.set_terminated(self.run_id, status)
        self._on_row(lambda row: self._client.set_terminated(row, status))

    def _on_row(self, change: Callable[[str], object]) -> None:
        self._parent = _on_row(self._client, self._experiment, self._run, self._parent, change)

    def _flush(self) -> None:
        # A batch sent twice, after a failure, is stored once: mlflow drops equal (name, time, step, value).
        _log_metrics(self._client, self.run_id, self._buffer)
        self._buffer = []
        self._last_flush = monotonic()

    def _store(self, operation: Callable[..., object], *arguments: object) -> None:
        """Run an operation on the store; retry a failing store briefly, then do without it from here on."""
        begun = monotonic()
        for pause in (*RETRY_PAUSES, None):
            if self._given_up:
                break
            try:
                return operation(*arguments)
            except _store_errors() as error:
                # A locked SQLite file has already been waited for, 20 s, when mlflow raises.
                if pause is None or monotonic() - begun > RETRY_BUDGET:
                    self._give_up(error)
                else:
                    time.sleep(pause)
        self._buffer = []

    def _give_up(self, error: Exception) -> None:
        self._given_up = True
        reason = next(iter(str(error).splitlines()), "")
        warning = (
            f"\nWARNING: no more MLflow tracking of {self._run}/{self._stage}: store {self._uri} failed:\n"
            f"WARNING:   {type(error).__name__}: {reason}\n"
            "WARNING: The run goes on and its files will be complete.\n"
            "WARNING: `relinear track rebuild` restores what is missing in MLflow.\n"
        )
        # A store's password has no business in a log.
        print(re.sub(r"//[^/@\s]*@", "//***@", warning), file=sys.stderr, flush=True)


def install_signal_handlers() -> None:
    """Make SIGTERM raise SystemExit(143) in the main thread, so that contexts close; Ctrl-C is Python's own.

    A second SIGTERM is ignored: it must not cut the clean-up short; nor is the first one heard while an
    error is recorded. (Of several processes one may fail because another did, and then be told to end.)
    Raises ValueError outside the main thread.
    """

    def terminate(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        if not Tracker.failing:
            raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, terminate)


def rebuild(uri: str, results: Path | str) -> int:
    """Mirror every finished stage folder below `results` that the store lacks; returns how many were added.

    Committed results (results/reference) are not the user's runs and stay out; `import_folder` takes them.

    A stage folder is one that holds run.json and is named after its stage. A run is known by (scale, run,
    stage, key, attempt), so a second call adds nothing; a run that the store holds only in part is
    replaced. The latest run of a stage, by its start, becomes the current one. Call it while no stage is
    running.

    A stage whose record cannot be believed is left out, which a line on stderr says. Raises ValueError, before any
    run is written, for an experiment ``relinear-<scale>`` that holds runs of something else.
    """
    committed = {path.parent for path in Path(results).resolve().rglob(MANIFEST)}
    return _mirror(uri, _stage_folders(Path(results), committed, strict=False))


def import_folder(uri: str, folder: Path | str, label: str = "reference") -> int:
    """Mirror the stage folders of other results, committed or a colleague's, beside one's own: into experiments relinear-<scale>-<label>.

    Returns and raises as `rebuild`; UserError for a folder without stage folders and a label of other than letters, digits, . _ -
    """
    if not re.fullmatch(r"[\w.-]+", label):
        raise UserError(f"a label is of letters, digits, '.', '_' and '-'; got {label!r}")
    records = _stage_folders(Path(folder))
    if not records:
        raise UserError(f"{str(folder)!r} holds no finished stages (folders named after their stage, with a run.json)")
    return _mirror(uri, records, f"-{label}")


def _mirror(uri: str, records: dict[Path, dict], suffix: str = "") -> int:
    """Write what the store lacks of these stage folders into the experiments of their scales, named with the suffix."""
    client = connect(uri)
    experiments = {scale: _experiment(client, uri, f"{scale}{suffix}") for scale in {r["scale"] for r in records.values()}}
    known: dict[tuple[str, ...], list[Any]] = {}
    for scale, experiment in experiments.items():
        known |= _stage_runs(client, experiment, f"{scale}{suffix}")
    missing: dict[tuple[str, str], list[Path]] = {}  # (scale, run): folders
    for folder, record in records.items():
        same = known.get(_identity(record), [])
        if any(map(_is_whole, same)):
            continue
        missing.setdefault((record["scale"], record["run"]), []).append(folder)
        first_id = record.get("mlflow_run_id", "")
        for part in same:
            if first_id in (part.info.run_id, part.data.tags.get("mlflow_run_id")):
                client.delete_run(part.info.run_id)
    for (scale, run), folders in missing.items():
        spans = [_span(records[folder]) for folder in folders]
        begin, end = min(begin for begin, _ in spans), max(end for _, end in spans)
        experiment, tags = experiments[scale], _texts(records[folders[-1]]["tags"])
        parent = _parent(client, uri, experiment, run, tags, begin)
        for folder in folders:
            _restore(client, experiment, parent, folder, records[folder])
        for stage in {records[folder]["stage"] for folder in folders}:
            children = sorted(_children(client, experiment, run, stage), key=lambda r: r.info.start_time)
            for child in children:
                client.set_tag(child.info.run_id, "current", "true" if child is children[-1] else "false")
        client.set_terminated(parent, "FINISHED", end)
    return sum(map(len, missing.values()))


def metric_name(name: str) -> str:
    """A name mlflow takes: all but letters, digits and ``_-./: `` becomes ``_`` ("acc,none": "acc_none").

    Also used for parameters and tags. Raises ValueError if nothing is left.
    """
    parts = re.sub(r"[^\w\-./: ]", "_", name).split("/")
    clean = "/".join(part for part in parts if part not in ("", ".", ".."))
    if not clean:
        raise ValueError(f"a name needs a letter or a digit, got {name!r}")
    return clean[:LONGEST_NAME]


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


def headline(metrics: dict) -> dict[str, float]:
    """The numbers that rows are compared by: `<of>_<metric>` of a measurement's readings that have no axes, such as piqa_acc.

    Of a metrics.json of schema 1 (evaluate): ppl, <task>_acc[_norm].
    """
    if "readings" in metrics:
        found = {f"{reading['of']}_{reading['metric']}": reading["value"] for reading in metrics["readings"] if not reading["at"]}
        return flatten_metrics(found)
    found = {"ppl": metrics["perplexity"]["value"]} if metrics.get("perplexity") else {}
    for task, scores in metrics.get("tasks", {}).items():
        found |= {f"{task}_{name}": scores[name] for name in ("acc", "acc_norm") if name in scores}
    return flatten_metrics(found)


def _compares(record: dict) -> bool:
    """Whether a stage's numbers belong on the row: measurements of the run as it ends, and schema 1's evaluate."""
    return record["stage"] == "evaluate" or bool(record.get("measure") and not record["config"].get("before"))


def _named(readings: list[dict]) -> dict[str, float]:
    """Readings by name: `acc/piqa`, and along a metric's axes `kl/attention/layer=3/head=1`."""
    return {"/".join([r["metric"], r["of"], *(f"{k}={v}" for k, v in r["at"].items())]): r["value"] for r in readings}


# The store


def connect(uri: str) -> Any:
    """An MlflowClient on a store that is ready for use."""
    from mlflow import MlflowClient

    # mlflow logs a traceback for every failure it raises; it would bury our one warning.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    if path := _sqlite_path(uri):
        _create_sqlite(uri, path)
        # Fails at once for what is no database of mlflow's; mlflow itself would spend minutes on retries.
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True, timeout=20)) as database:
            database.execute("SELECT 1 FROM experiments LIMIT 1")
    return MlflowClient(uri)


def _sqlite_path(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def _file_system(path: Path) -> str:
    """The type of the file system that `path` is or would be on, such as ext4; empty where the kernel does not tell."""
    mounts = [line.split() for line in MOUNTS.read_text().splitlines()] if MOUNTS.exists() else []
    kinds = {Path(place.replace("\\040", " ")): kind for _, place, kind, *_ in mounts}  # the last mount at a place hides the others
    return next((kinds[p] for p in path.resolve().parents if p in kinds), "")


def _create_sqlite(uri: str, path: Path) -> None:
    """Create the store at `path` if there is none.

    mlflow runs its migrations without a transaction: two processes at once, or one that is killed, leave a
    file that no later start can repair. So one process at a time, aside, and moved when complete.
    """
    from mlflow import MlflowClient

    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(uri):
        if not path.exists():
            if any(record for depth in ("*/*/*", "*/runs/*/*") for record in path.parent.glob(f"{depth}/run.json")):
                print(f"{path} is gone, and begins anew: `relinear track rebuild` mirrors what was finished before", file=sys.stderr, flush=True)
            fresh = path.with_name(f"{path.name}.new")
            fresh.unlink(missing_ok=True)
            MlflowClient(f"sqlite:///{fresh}")
            os.replace(fresh, path)


def _lock(uri: str) -> Any:
    """Held while the schema, an experiment or a parent run is looked up and created.

    There is none for a server: who creates there looks again.
    """
    from filelock import FileLock

    path = _sqlite_path(uri)
    return FileLock(f"{path}.lock", timeout=60) if path else nullcontext()


def _store_errors() -> tuple[type[Exception], ...]:
    """What a failing store raises: mlflow's and SQLAlchemy's wrappers, SQLite, files, locks, sockets."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, SQLAlchemyError, sqlite3.Error, OSError


def _experiment(client: Any, uri: str, scale: str) -> str:
    """The id of experiment relinear-<scale>, created or restored if need be.

    A SQLite store keeps its artifacts beside the file, by absolute path: once moved, it shows them after a
    rebuild only.
    """
    from mlflow.exceptions import MlflowException

    name, path = f"relinear-{scale}", _sqlite_path(uri)
    with _lock(uri):
        found = client.get_experiment_by_name(name)
        if found is None:
            place = (path.parent / "mlflow-artifacts" / name).resolve().as_uri() if path else None
            try:
                return client.create_experiment(name, artifact_location=place)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = client.get_experiment_by_name(name)  # on a server, another node was first
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return found.experiment_id


def _search(client: Any, experiment: str, where: str = "") -> Iterator[Any]:
    token = None
    while True:
        page = client.search_runs([experiment], where, max_results=1000, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _children(client: Any, experiment: str, run: str, stage: str) -> list[Any]:
    return list(_search(client, experiment, f"tags.run = '{run}' and tags.stage = '{stage}'"))


def _stage_runs(client: Any, experiment: str, scale: str) -> dict[tuple[str, ...], list[Any]]:
    """All child runs of an experiment by identity. Raises ValueError if some runs are not relinear's."""
    known: dict[tuple[str, ...], list[Any]] = {}
    foreign = []
    for run in _search(client, experiment):
        if set(IDENTITY) <= run.data.tags.keys():
            known.setdefault(_identity(run.data.tags), []).append(run)
        elif "relinear.row" not in run.data.tags:
            foreign.append(run.info.run_id)
    if foreign:
        raise ValueError(
            f"experiment 'relinear-{scale}' holds {len(foreign)} runs that relinear did not write, such as "
            f"{foreign[0]}; use an empty store or one made by relinear"
        )
    return known


def _parent(client: Any, uri: str, experiment: str, run: str, tags: dict[str, str], begin: int | None = None) -> str:
    """The id of a row's run, created if need be at `begin` (milliseconds), with the row's tags on it."""
    with _lock(uri):
        parent = _only_parent(client, experiment, run)
        if not parent:
            client.create_run(experiment, begin, {"relinear.row": run}, run)
            parent = _only_parent(client, experiment, run)
    shown = {name: tags[name] for name in ROW_TAGS if name in tags}
    return _on_row(client, experiment, run, parent, lambda row: _log_tags(client, row, shown))


def _on_row(client: Any, experiment: str, run: str, parent: str, change: Callable[[str], object]) -> str:
    """Change a row's run; returns its id, another one where a node has deleted this for an older since it was looked up."""
    from mlflow.exceptions import MlflowException

    while True:
        try:
            change(parent)
            return parent
        except MlflowException:
            found = _only_parent(client, experiment, run)
            if found in ("", parent):
                raise
            parent = found


def _only_parent(client: Any, experiment: str, run: str) -> str:
    """The id of a row's run, empty if there is none; of several the oldest, which takes what the others hold.

    Without a lock nodes that find none at the same moment create one each. The oldest may be seen last, by when
    another has got children; so whoever sees several leaves one, and each stage looks again once its own run
    exists and when it ends.
    """
    from mlflow.entities import RunTag
    from mlflow.exceptions import MlflowException

    found = sorted(_search(client, experiment, f"tags.`relinear.row` = '{run}'"), key=lambda r: (r.info.start_time, r.info.run_id))
    ids = [r.info.run_id for r in found]
    for other in ids[1:]:
        for child in _search(client, experiment, f"tags.`mlflow.parentRunId` = '{other}'"):
            client.set_tag(child.info.run_id, "mlflow.parentRunId", ids[0])
        try:
            client.delete_run(other)
        except MlflowException:
            if client.get_run(other).info.lifecycle_stage != "deleted":  # by another node, meanwhile
                raise
        left = client.get_run(other).data  # complete: nothing is written to a deleted run
        metrics = [metric for name in left.metrics for metric in client.get_metric_history(other, name)]
        tags = [RunTag(name, left.tags[name]) for name in ROW_TAGS if name in left.tags]
        _on_row(client, experiment, run, ids[0], lambda row, m=metrics, t=tags: client.log_batch(row, m, tags=t, synchronous=True))
    return ids[0] if ids else ""


def _create(
    client: Any,
    experiment: str,
    parent: str,
    *,
    scale: str,
    run: str,
    stage: str,
    key: str,
    tags: dict[str, str],
    attempt: int,
    begin: int | None = None,
) -> str:
    """Create a stage's run below `parent`, at `begin` (milliseconds since the epoch, default now)."""
    shown = {
        "mlflow.parentRunId": parent,
        "mlflow.source.name": f"relinear {stage}",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": tags.get("git.commit", ""),
    }
    own = {"scale": scale, "run": run, "stage": stage, "key": key, "attempt": str(attempt), "current": "true"}
    # All tags in the one call: a process that dies here leaves no run that `_children` cannot find.
    name = stage if run == stage else f"{run}/{stage}"
    return client.create_run(experiment, begin, {**tags, **own, **shown}, name).info.run_id


def _log_inputs(client: Any, run_id: str, params: dict[str, str], datasets: list[dict]) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag, Param

    client.log_batch(run_id, params=[Param(name, text) for name, text in params.items()], synchronous=True)
    roles: dict[tuple[str, str], list[str]] = {}  # mlflow keeps one role for each data set of a run
    for data in datasets:
        roles.setdefault((data["name"], data["sha256"]), []).append(data["role"])
    inputs = []
    for (name, digest), role in roles.items():
        # mlflow's digest holds 36 characters, so the whole one goes into the source.
        dataset = Dataset(name, digest[:36], "local", json.dumps({"sha256": digest}))
        inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", ", ".join(role))]))
    if inputs:
        client.log_inputs(run_id, inputs)


def _log_tags(client: Any, run_id: str, tags: dict[str, Any]) -> None:
    from mlflow.entities import RunTag

    entries = [RunTag(name, text) for name, text in _texts(tags).items()]
    client.log_batch(run_id, tags=entries, synchronous=True)


def _log_metrics(client: Any, run_id: str, entries: list[Entry]) -> None:
    from mlflow.entities import Metric

    # Cut into batches of 1000 by mlflow, as are parameters and tags, by 100.
    client.log_batch(run_id, metrics=[Metric(*entry) for entry in entries], synchronous=True)


def _log_folder(client: Any, run_id: str, folder: Path, record: dict) -> None:
    """The tags that are known at the end of a stage, and its small files."""
    tags = describe(record)["tags"] | {"mlflow_run_id": record.get("mlflow_run_id", "")}
    tags |= {f"artefact.{name}": file["sha256"] for name, file in record.get("artefacts", {}).items()}
    _log_tags(client, run_id, tags)
    for path in sorted(folder.iterdir()):
        wanted = path.name in ("run.json", "metrics.json") or path.suffix in COPIED
        if wanted and path.stat().st_size <= LARGEST_ARTIFACT:
            client.log_artifact(run_id, str(path))


def _restore(client: Any, experiment: str, parent: str, folder: Path, record: dict) -> None:
    """Write a finished stage folder into the store as `Tracker` would have, with the original times."""
    begin, end = _span(record)
    metrics = _read_metrics(folder)
    entries, last_step = [], 0
    for line in _read_history(folder / "history.jsonl"):
        step = line.pop("step")
        entries += _step(line, step, line.pop("time"))
        last_step = max(last_step, step)
    entries += _entries(_final(record, metrics), last_step, end / 1000)
    about = describe(record)
    params, datasets = _texts(about.pop("params")), about.pop("datasets")
    # Known by its first id from the start, so that a rebuild cut short is noticed and redone by the next.
    about["tags"] = _texts(about["tags"] | {"mlflow_run_id": record.get("mlflow_run_id", "")})
    run_id = _create(client, experiment, parent, **about, begin=begin)
    _log_inputs(client, run_id, params, datasets)
    _log_metrics(client, run_id, entries)
    _log_folder(client, run_id, folder, record)
    if _compares(record):
        _log_metrics(client, parent, _entries(headline(metrics), 0, end / 1000))
    client.set_terminated(run_id, "FINISHED", end)


def _is_whole(run: Any) -> bool:
    return run.info.status == "FINISHED" and run.data.tags.get("relinear.mirror") != "incomplete"


# The files


def _stage_folders(results: Path, but: Collection[Path] = (), strict: bool = True) -> dict[Path, dict]:
    """The stage folders below `results`, those below `but` left out, and their records, by start; a copied folder counts once.

    A record that cannot be believed raises BrokenError, or, unless `strict`, is left out, which a line on stderr says.

    Only a folder named after its stage, or after the model, text or asset that the stage made, is one: mlflow's artifact folders and
    unfinished work hold run.json too.
    """
    if not results.is_dir():
        raise UserError(f"no folder {str(results)!r}")
    folders: dict[tuple[str, ...], tuple[Path, dict]] = {}
    for path in sorted(results.resolve().rglob("run.json")):
        if any(parent in but for parent in path.parents):
            continue
        try:
            record = _read_record(path.parent)
            require_own(path.parent, record)
        except records.BrokenError as error:
            if strict:
                raise
            print(f"{error}; it counts as not finished, and is left out", file=sys.stderr)
            continue
        if path.parent.name in (record["stage"], record["run"]):
            folders.setdefault(_identity(record), (path.parent, record))
    return dict(sorted(folders.values(), key=lambda item: _span(item[1])))


def _read_record(folder: Path) -> dict:
    """A stage's record, once it is whole, has what the mirror shows and names the metrics.json beside it. Raises BrokenError."""
    record = records.believed(folder)
    if record is None:
        raise records.BrokenError(f"{folder} has no run.json")
    if lacking := [field for field in RECORD_FIELDS if field not in record]:
        raise records.BrokenError(f"{folder / 'run.json'} lacks {', '.join(lacking)}")
    return record


def _read_metrics(folder: Path) -> dict:
    path = folder / "metrics.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _read_history(path: Path) -> Iterator[dict]:
    packed = path.with_name(f"{path.name}.gz")  # in committed results
    text = gzip.decompress(packed.read_bytes()).decode() if packed.exists() else path.read_text() if path.exists() else ""
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number} is not JSON: {error}") from error
        if not {"step", "time"} <= entry.keys():
            raise ValueError(f"{path}:{number} lacks step or time, got {', '.join(entry)}")
        yield entry


def _identity(record: dict) -> tuple[str, ...]:
    return tuple(str(record[field]) for field in IDENTITY)


def _final(record: dict, metrics: dict) -> dict:
    """The numbers known once a stage is done: metrics.json, and what the run cost."""
    cost = {name: record[name] for name in ("tokens", "wall_seconds", "peak_rss_bytes") if name in record}
    if "readings" in metrics:
        metrics = {**metrics, "readings": _named(metrics["readings"])}
    return {**metrics, "cost": cost}


def _span(record: dict) -> tuple[int, int]:
    """Start and end of a stage in milliseconds since the epoch."""
    begin = datetime.fromisoformat(record["started"]).timestamp()
    return round(1000 * begin), round(1000 * (begin + record["wall_seconds"]))


# Values


def _step(metrics: dict, step: int, seconds: float | None = None) -> list[Entry]:
    """The entries of a step of training. mlflow takes 0.2 ms for each, and thirty layers would make a distillation of 50 s a third longer."""
    if step >= PARTS_ALL and step % PARTS_EVERY:
        metrics = {name: value for name, value in metrics.items() if not isinstance(value, dict | list)}
    return _entries(metrics, step, seconds)


def _entries(metrics: dict, step: int, seconds: float | None = None) -> list[Entry]:
    """An entry for each number in `metrics`, at `seconds` since the epoch (default now)."""
    stamp = round(1000 * (time.time() if seconds is None else seconds))
    return [(name, value, stamp, step) for name, value in flatten_metrics(metrics).items()]


def _texts(tree: dict, prefix: str = "") -> dict[str, str]:
    """A nested dict as dotted names and the texts mlflow stores: JSON, which a round trip does not change."""
    flat: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= _texts(value, f"{prefix}{name}.")
            continue
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        if len(text) > LONGEST_VALUE:
            text = f"{text[:LONGEST_VALUE]}... ({len(text)} characters; whole in run.json)"
        flat[metric_name(f"{prefix}{name}")] = text
    return flat


def _status(error: BaseException | None) -> str:
    if error is None:
        return "FINISHED"
    signalled = isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128
    return "KILLED" if signalled or isinstance(error, KeyboardInterrupt) else "FAILED"
