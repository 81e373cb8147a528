"""The run of a stage in MLflow while the stage goes on: its numbers are sent as they come, and its end is
told, however it ends.

If a store fails, the training goes on after one warning, and `relinear track rebuild` fills the store later.
"""

import importlib.util
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from time import time as seconds
from typing import Any, Self

from relinear.machine.warm import after_imports, signalled
from relinear.tracking import mirror, rows, store
from relinear.tracking.store import Entry

FLUSH_ENTRIES = store.BATCH
FLUSH_SECONDS = 5.0


class Tracker:
    """The run of one attempt at one stage: RUNNING while open, then FINISHED, FAILED or KILLED.

    Opening it kills what an earlier process left running at this (root, run, stage) and takes the tag
    ``current`` from earlier attempts, so the caller must hold that stage's lock. `params` and `tags` may be
    nested (names are joined with dots); `datasets` are ``{"name", "sha256", "role"}``. A stage whose tags
    name no method is shared by rows, and stands below the run `inputs`.

    mlflow tries a failing store once more by itself. Then the store is given up, with one warning on stderr
    that names it; without mlflow it is given up at once. The context goes on without it; `run_id` is empty if
    the run was never created. Mistakes of the caller are raised.
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
        measure: str = "",
        root: str = "",
    ):
        self.run_id = ""
        self._uri, self._run, self._stage = uri, run, stage
        self._about = {
            "scale": scale,
            "run": run,
            "stage": stage,
            "measure": measure,
            "key": key,
            "attempt": attempt,
            "config": params,
            "params": params,
            "tags": tags,
            "datasets": datasets,
        }
        self._root = root or scale
        self._about["seed"] = tags.get("seed", 0)
        self._label = rows.label(rows.name_of(self._about), run, stage)
        self._buffer: list[Entry] = []
        self._last_step = 0
        self._last_flush = monotonic()
        self._complete: dict[str, mirror.Stage] = {}  # the stage by its label, once it is complete
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
                with suppress(*store.store_errors()):
                    self._client.set_tag(self.run_id, "relinear.mirror", "incomplete")
                    self._end(status, {})
        finally:
            Tracker.failing = False

    def log(self, metrics: dict[str, Any], step: int, time: float | None = None) -> None:
        """Buffer the numbers of one step; sent every `FLUSH_SECONDS` or `FLUSH_ENTRIES`, and on exit.

        Nested dicts and lists of numbers are flattened as in `store.flatten_metrics` and, in long runs, kept
        of every tenth step (`store.PARTS_EVERY`); NaN and infinities are kept. `time` is in seconds since the
        epoch, now if not given. On resume, replay the kept lines of history.jsonl with their own times.
        """
        self._last_step = max(self._last_step, step)
        self._buffer += store.step_entries(metrics, step, time)
        if len(self._buffer) >= FLUSH_ENTRIES or monotonic() - self._last_flush >= FLUSH_SECONDS:
            self._store(self._flush)

    def finish(self, folder: Path | str) -> None:
        """Mirror a complete stage folder: final metrics, artefact hashes, run.json, metrics.json, figures.

        Call it last. What the stage adds to its row is written there once the context is left without an
        error. Raises ValueError if run.json is that of another key.
        """
        folder = Path(folder)
        record = mirror.read_record(folder)
        if record["key"] != self._about["key"]:
            raise ValueError(
                f"{folder / 'run.json'} has key {record['key']!r}, this run has {self._about['key']!r}"
            )
        stage = mirror.read_stage(folder, record)
        self._buffer += store.entries(stage.numbers, self._last_step)
        self._complete = {self._label: stage}
        self._store(self._finish, stage)

    def _open(self) -> None:
        client = self._client = store.connect(self._uri)
        experiment = self._experiment = store.experiment_of(client, self._uri, self._root)
        self._row = rows.join(client, self._uri, experiment, self._about)
        client.update_run(self._row, status="RUNNING")
        for earlier in store.search(
            client, experiment, f"tags.run = '{self._run}' and tags.stage = '{self._stage}'"
        ):
            if earlier.info.status == "RUNNING":
                client.set_terminated(earlier.info.run_id, "KILLED")
            if earlier.data.tags.get("current") == "true":
                client.set_tag(earlier.info.run_id, "current", "false")
        self._begin = round(1000 * seconds())
        self.run_id = mirror.create(
            client, experiment, self._row, self._about, self._about["tags"], self._begin
        )
        mirror.fill(client, self.run_id, self._about)

    def _finish(self, stage: mirror.Stage) -> None:
        store.log(
            self._client,
            self.run_id,
            tags=mirror.describe(stage.record)["tags"] | mirror.folder_tags(stage.record),
        )
        store.log_files(self._client, self.run_id, stage.files)

    def _close(self, status: str, error: BaseException | None) -> None:
        self._flush()
        if error is not None:
            store.log(self._client, self.run_id, tags={"error": f"{type(error).__name__}: {error}"})
        self._end(status, self._complete if error is None else {})

    def _end(self, status: str, complete: dict[str, mirror.Stage]) -> None:
        above, row = (
            self._client.get_run(self._row),
            rows.row_of([stage.record for stage in complete.values()] or [self._about]),
        )
        now = round(1000 * seconds())
        current = rows.current(self._client, self._experiment, row.name, self._row) | {
            self._label: (self.run_id, now - self._begin)
        }
        mirror.finish(self._client, self._experiment, above, row, complete, current, status)
        self._client.set_terminated(self.run_id, status, now)

    def _flush(self) -> None:
        # A batch sent twice, after a failure, is stored once: mlflow drops equal (name, time, step, value).
        store.log(self._client, self.run_id, metrics=self._buffer)
        self._buffer = []
        self._last_flush = monotonic()

    def _store(self, operation: Callable[..., object], *arguments: object) -> None:
        """Run an operation on the store; do without the store from here on if it fails."""
        if not self._given_up:
            errors = store.store_errors()  # imports mlflow: not while an interrupt of that import is handled
            try:
                return operation(*arguments)
            except errors as error:
                self._give_up(error)
        self._buffer = []

    def _give_up(self, error: Exception) -> None:
        self._given_up = True
        warning = (
            f"\nWARNING: no more MLflow tracking of {self._run}/{self._stage}:\n"
            f"WARNING:   {store.failure(self._uri, error)}\n"
            "WARNING: The run goes on and its files will be complete.\n"
            "WARNING: `relinear track rebuild` restores what is missing in MLflow.\n"
        )
        print(warning, file=sys.stderr, flush=True)


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

    signal.signal(signal.SIGTERM, after_imports(terminate))


def _status(error: BaseException | None) -> str:
    if error is None:
        return "FINISHED"
    return "KILLED" if signalled(error) else "FAILED"
