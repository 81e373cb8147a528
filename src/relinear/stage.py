"""Running one stage: verified parents in, one folder out, whole or not at all; a lock, a record, a mirror in MLflow.

A stage writes into a scratch folder beside its place and is moved there by one rename when its run.json is complete. What survives an
interruption (checkpoints, answers, the attempt count) lies in `<results>/<scale>/.work/<run>.<stage>/`.

Where torchrun started several processes, the first does all of this; the others join its work and write nothing.
"""

import datetime
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from relinear.errors import UserError
from relinear.files import aside, sha256
from relinear.plan.plan import SHARED, Plan, Step, digest
from relinear.tracking import live as tracking

PACKAGES = ("relinear", "torch", "transformers", "peft", "lm_eval", "datasets", "triton", "mlflow", "snakemake", "numpy")
FREE_BYTES = 1 << 30  # a stage refuses to start with less than this on the disk beside what it says it needs


class StageError(UserError):
    """A stage cannot run: a parent is missing or does not match, the disk is full. The message says what to do."""


def write_json(path: Path, value: Any) -> None:
    """The value as a file, whole or not at all."""
    with aside(path) as unfinished:
        unfinished.write_text(json.dumps(value, indent=1))


def read_record(folder: Path) -> dict | None:
    """run.json of a finished stage; None if it is not finished."""
    path = folder / "run.json"
    return json.loads(path.read_text()) if path.is_file() else None


class Context:
    """What a stage's work is given: its settings, its parents' folders, a place to write, a way to log."""

    leads = True  # the process that writes

    def __init__(self, plan: Plan, step: Step, out: Path, work: Path):
        self.plan, self.step, self.out, self.work = plan, step, out, work
        self.settings = plan.settings(step)
        self.parents = {role: plan.folder(parent) for role, parent in plan.parents(step).items()}
        self.verified: dict[str, str] = {}  # role -> key of each parent, checked against the plan and its files' sha256
        self.seed = plan.seed_of(step)
        self.tokens = 0  # training tokens seen; set by stages that train
        self.datasets: list[dict] = []
        self.hardware: dict[str, Any] = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        self.tracker: tracking.Tracker | None = None

    @property
    def history(self) -> Path:
        """Kept in the work folder while the stage runs, so that an interrupted one goes on with it."""
        return self.work / "history.jsonl"

    def chain(self) -> dict[str, Path]:
        """The folders of the run's training stages that this one builds on, in order."""
        return {role: self.parents[role] for role in ("distill", "finetune") if role in self.parents}

    def tokens_of(self, role: str) -> int:
        """Tokens that a training stage of this run saw; 0 if the run has no such stage."""
        return read_record(self.parents[role])["tokens"] if role in self.parents else 0

    def losses(self) -> dict[str, float]:
        """Mean loss over the first and the last tenth of the steps."""
        losses = [json.loads(x)["loss"] for x in self.history.read_text().splitlines()]
        tenth = max(len(losses) // 10, 1)
        return {"first_loss": sum(losses[:tenth]) / tenth, "last_loss": sum(losses[-tenth:]) / tenth}

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """One line of history, mirrored to MLflow."""
        now = time.time()
        with self.history.open("a") as f:
            f.write(json.dumps({"step": step, "time": now, **metrics}) + "\n")
        self.tracker.log(metrics, step, now)

    def resume_history(self, step: int) -> None:
        """Drop what was logged from `step` on (it will be logged again), and give the mirror the rest."""
        text = self.history.read_text() if self.history.is_file() else ""
        # Only whole lines: the last one may have been cut short.
        lines = [json.loads(x) for x in text.splitlines(keepends=True) if x.endswith("\n")]
        kept = [x for x in lines if x["step"] < step]
        with aside(self.history) as unfinished:
            unfinished.write_text("".join(json.dumps(x) + "\n" for x in kept))
        for line in kept:
            self.tracker.log({k: v for k, v in line.items() if k not in ("step", "time")}, line["step"], line["time"])


class Follower(Context):
    """What the other processes' work is given: the same, but nothing that it logs is kept."""

    leads = False

    def losses(self) -> dict[str, float]:
        return {}

    def log(self, metrics: dict[str, Any], step: int) -> None:
        pass

    def resume_history(self, step: int) -> None:
        pass


def run_stage(plan: Plan, step: Step, work: Callable[[Context], dict[str, Any]]) -> Path:
    """Run `work` as this step unless its result is there already. Returns the step's folder.

    `work` writes artefacts into `context.out` and returns the metrics. Raises StageError for parents that are missing or do not match.
    """
    from relinear.machine import distributed  # torch; not needed to print a help text

    folder, key = plan.folder(step), plan.key(step)
    scratch_root = plan.root / ".work" / (step.stage if step.stage in SHARED else f"{step.run}.{step.stage}")
    out = scratch_root / "out"
    if distributed.rank() > 0:
        if distributed.started():
            work(Follower(plan, step, out, scratch_root))
        return folder
    scratch_root.mkdir(parents=True, exist_ok=True)
    with _locked(scratch_root / "lock", step):
        record = read_record(folder)
        if record is not None and record["key"] == key and _whole(folder, record):
            # Nothing to do but to say that the result is of now: rules compare times.
            os.utime(folder / "run.json")
            print(f"{step}: up to date", file=sys.stderr)
            distributed.started(False)
            return folder
        parents = {role: _verified(plan, parent, step) for role, parent in plan.parents(step).items()}
        _require_disk(plan, step)
        progress = _progress(scratch_root, key)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        context = Context(plan, step, out, scratch_root)
        context.verified = {role: parent["key"] for role, parent in parents.items()}
        context.hardware["processes"] = distributed.size()
        distributed.started(True)
        _run(context, key, parents, work, progress)
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            # A folder cannot be renamed onto a full one; without its run.json the old one is not finished any more.
            (folder / "run.json").unlink(missing_ok=True)
            shutil.rmtree(folder)
        os.replace(out, folder)
        for leftover in scratch_root.iterdir():
            if leftover.name not in ("lock", "attempt.json"):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    return folder


def _run(context: Context, key: str, parents: dict, work, progress: dict) -> None:
    plan, step = context.plan, context.step
    started = datetime.datetime.now(datetime.UTC)
    record = {
        "schema": 1, "scale": plan.scale, "run": step.run, "stage": step.stage, "key": key,
        "config": context.settings, "config_hash": digest(context.settings), "code_hash": plan.code(step),
        "parents": parents, "artefacts": {}, "datasets": _datasets(plan, context),
        "git": git_state(), "versions": versions(), "hardware": context.hardware, "seed": context.seed, "tokens": 0,
        "started": started.isoformat(timespec="seconds"), "wall_seconds": 0.0, "peak_rss_bytes": 0,
        "attempt": progress["attempt"], "tags": _tags(plan, step),
    }  # fmt: skip
    with tracking.Tracker(plan.store, **tracking.describe(record)) as tracker:
        context.tracker = tracker
        begin = time.monotonic()
        metrics = work(context)
        record |= {"tokens": context.tokens, "wall_seconds": round(time.monotonic() - begin, 2),
                   "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                   "mlflow_run_id": tracker.run_id}  # fmt: skip
        if context.history.is_file():
            shutil.copy(context.history, context.out / "history.jsonl")
        write_json(context.out / "metrics.json", metrics)
        record["artefacts"] = {
            str(p.relative_to(context.out)): {"sha256": sha256(p), "bytes": p.stat().st_size}
            for p in sorted(context.out.rglob("*")) if p.is_file()
        }  # fmt: skip
        write_json(context.out / "run.json", record)
        tracker.finish(context.out)


def _locked(path: Path, step: Step):
    """The step's lock. A job that finds it held waits: failing would make Snakemake delete the other's output."""
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        print(f"{step}: another process is at it; waiting for it to end", file=sys.stderr)
        return lock.acquire()


def _progress(work: Path, key: str) -> dict:
    """Count this attempt. What an earlier attempt with another key left behind is of no use and goes."""
    path = work / "attempt.json"
    last = json.loads(path.read_text()) if path.is_file() else {"attempt": 0, "key": key}
    if last["key"] != key:
        for leftover in work.iterdir():
            if leftover.name not in ("lock", "attempt.json"):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    now = {"attempt": last["attempt"] + 1, "key": key}
    write_json(path, now)
    return now


def _whole(folder: Path, record: dict) -> bool:
    """Whether every artefact is there as it was written."""
    return all((folder / n).is_file() and sha256(folder / n) == a["sha256"] for n, a in record["artefacts"].items())


def _verified(plan: Plan, parent: Step, child: Step) -> dict[str, str]:
    """A parent's path and key, once it is finished, is the one this plan would make, and its files are what it wrote."""
    folder = plan.folder(parent)
    command = f"relinear {parent} {plan.as_options()}"
    record = read_record(folder)
    if record is None:
        raise StageError(f"{child}: its parent `{parent}` is not there ({folder}); run `{command}` first")
    if record["key"] != plan.key(parent):
        raise StageError(
            f"{child}: its parent `{parent}` was made with other settings, code or parents: "
            f"key {record['key'][:12]} got, {plan.key(parent)[:12]} expected; run `{command}` again"
        )
    for name, artefact in record["artefacts"].items():
        path = folder / name
        got = sha256(path) if path.is_file() else "no file"
        if got != artefact["sha256"]:
            raise StageError(f"{child}: {path} is not what `{parent}` wrote: sha256 {got} got, {artefact['sha256']} expected; run `{command}` again")
    return {"path": str(folder), "key": record["key"]}


def _require_disk(plan: Plan, step: Step) -> None:
    free = shutil.disk_usage(plan.root).free
    if free < FREE_BYTES:
        raise StageError(f"{step}: {free >> 20} MiB free on the disk of {plan.root}; at least {FREE_BYTES >> 20} MiB are needed")


def _datasets(plan: Plan, context: Context) -> list[dict]:
    """What the stage reads: assets by the hash of their archive, and the corpus's texts by the hash of their documents."""
    names = context.settings.get("assets", {})
    found = [{"name": n, "sha256": plan.catalogue[n].sha256 or names[n], "role": "input"} for n in names]
    if "corpus" in context.parents:
        role = "train" if context.step.stage in ("activations", "distill", "finetune") else "heldout"
        texts = json.loads((context.parents["corpus"] / "metrics.json").read_text()).get("sources", {})
        found += [{"name": n, "sha256": text["sha256"], "role": role} for n, text in texts.items()]
    return found


def _tags(plan: Plan, step: Step) -> dict[str, str]:
    if step.stage in SHARED:
        return {"row": step.run, "scale": plan.scale}
    run = plan.runs[step.run]
    tables = plan.tables_of(step.run)
    return {
        "row": step.run, "method": run.method, "variant": run.variant, "scale": plan.scale,
        "paper": ",".join(dict.fromkeys(t.split("/")[0] for t in tables)), "table": ",".join(tables),
    }  # fmt: skip


def git_state() -> dict[str, Any]:
    """The commit the code came from; nulls outside a repository."""
    here = Path(__file__).parent

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    status = git("status", "--porcelain")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
