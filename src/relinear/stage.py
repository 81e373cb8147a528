"""Running one stage: verified parents in, one folder out, whole or not at all; a lock, a record, a mirror in
MLflow.

A stage writes into a scratch folder beside its place and is moved there by one rename when its run.json is
complete. What survives an interruption (checkpoints, answers, the attempt count) lies in
`<results>/<scale>/.work/<name>.<stage>/`.

Where torchrun started several processes, the first does all of this; the others join its work and write
nothing.
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
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from relinear import records, stages, weights
from relinear.errors import UserError
from relinear.files import sha256, write_json
from relinear.get import assets
from relinear.get.cached import cached
from relinear.machine import cpu
from relinear.machine.disk import WORK, in_the_way, sync
from relinear.machine.mode import as_umask
from relinear.plan.assets import Own
from relinear.plan.code import code_hash, kernel_hashes
from relinear.plan.forms import contents
from relinear.plan.job import Job, Link
from relinear.plan.names import digest
from relinear.plan.plan import Plan
from relinear.stages._stage import Node
from relinear.tracking import live as tracking
from relinear.tracking.mirror import describe
from relinear.tracking.rows import tags_of

PACKAGES = (
    "relinear",
    "torch",
    "transformers",
    "peft",
    "lm_eval",
    "datasets",
    "triton",
    "mlflow",
    "snakemake",
    "numpy",
)
FREE_BYTES = 1 << 30  # a stage refuses to start unless this much is free on the disk besides its own needs


class StageError(UserError):
    """A stage cannot run: a parent is missing or does not match, the disk is full. The message says what to
    do."""


def job_of(plan: Plan, node: Node, *, out: Path, work: Path, leads: bool = True) -> Job:
    """The values that a node's work is given."""
    settings = plan.settings(node)
    parents = {role: plan.folder(parent) for role, parent in plan.parents(node).items()}
    links = tuple(
        Link(x["method"], x["options"], tuple(parents[role] for role in x["steps"]))
        for x in settings.get("links", ())
    )
    stage, hardware = stages.stage(node.stage), plan.config.hardware
    obtained = (
        {}
        if stage.obtains
        else {name: assets.obtain(name, verify=True, assets=plan.catalogue) for name in settings["assets"]}
    )
    return Job(
        name=str(node),
        settings=settings,
        parents=parents,
        assets=obtained,
        out=out,
        work=work,
        links=links,
        seed=settings.get("seed", plan.seed),
        device=(plan.device or hardware.device) if stage.device else "cpu",
        dtype=hardware.dtype,
        engine=hardware.engine,
        compile=hardware.compile,
        recompute=hardware.recompute,
        checkpoint_seconds=hardware.checkpoint_seconds,
        leads=leads,
        workflow=plan.workflow,
        hardware={"cpu": cpu.model(), "instructions": cpu.instructions(), "cores": os.cpu_count()},
    )


def run_stage(plan: Plan, node: Node, work: Callable[[Job], dict[str, Any]]) -> Path:
    """Run `work` as this node unless its result is there already. Returns the node's folder.

    `work` writes artefacts into `job.out` and returns the metrics. Raises StageError for parents that are
    missing or do not match.
    """
    folder, key = plan.folder(node), plan.key(node)
    scratch_root = _scratch(plan, node)
    out = scratch_root / "out"
    rank, size = (
        int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))
    )
    if rank > 0:
        if _agree():
            work(job_of(plan, node, out=out, work=scratch_root, leads=False))
        return folder
    try:
        scratch_root.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError:
        raise StageError(
            f"no folder can be made at {plan.results}; possible: a folder on a disk that keeps files"
        ) from None
    except (FileExistsError, NotADirectoryError):
        raise StageError(in_the_way(scratch_root) or f"{scratch_root} is no folder") from None
    if said := in_the_way(folder):
        raise StageError(said)
    with _locked(scratch_root / "lock", node):
        record = records.finished(folder, records.believed)  # its other files are compared by `_stale`
        ours = record is not None and record["key"] == key
        if ours:
            wrong = _stale(plan, node, record)
            if not wrong:
                _keep(folder, node)
                _agree(False)
                return folder
            print(f"{node}: {wrong}; it is made again", file=sys.stderr)
        parents = {role: _verified(plan, parent, node) for role, parent in plan.parents(node).items()}
        _require_disk(plan, node)
        progress = _progress(scratch_root, key, node)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        job = job_of(plan, node, out=out, work=scratch_root)
        job.hardware["processes"] = size
        _agree(True)
        _run(plan, node, job, key, parents, work, progress)
        as_umask(out)
        folder.parent.mkdir(parents=True, exist_ok=True)
        if ours and contents(record) == contents(records.read(out)):
            # Its time stays, so that rules, which compare times, do not make its children anew.
            shutil.copystat(folder / "run.json", out / "run.json")
        sync(out)
        if folder.exists():
            # A folder cannot be renamed onto one with files. Without its run.json the old one does not count
            # as finished.
            (folder / "run.json").unlink(missing_ok=True)
            shutil.rmtree(folder)
        os.replace(out, folder)
        sync(folder.parent, deep=False)
        _clear(scratch_root)
    return folder


def stands(plan: Plan, node: Node) -> bool:
    """Whether a node's result is there as this plan would make it; it then gets the time of now. Finding out
    imports nothing slow, and makes no file.

    False while another process works on the node. `run_stage` says why a result does not stand.
    """
    folder = plan.folder(node)
    if not (folder / "run.json").is_file():
        return False
    lock = _scratch(plan, node) / "lock"
    held = FileLock(lock, timeout=0) if lock.is_file() else nullcontext()  # nobody was ever at it here
    with suppress(Timeout, records.BrokenError), held:
        record = records.believed(folder)
        if record is not None and record["key"] == plan.key(node) and not _stale(plan, node, record):
            _keep(folder, node)
            return True
    return False


def _scratch(plan: Plan, node: Node) -> Path:
    """The folder of what survives an interruption."""
    return plan.root / WORK / ".".join(part for part in (node.name, node.part or node.stage) if part)


def _stale(plan: Plan, node: Node, record: dict) -> str | None:
    """Why a record with this node's key is out of date: a parent has other contents now, a file is another,
    or the asset that was obtained is not on this machine. None where it is not."""
    return _outdated(plan, node, record) or records.differs(plan.folder(node), record) or _gone(plan, node)


def _gone(plan: Plan, node: Node) -> str | None:
    """A sentence about an asset that was obtained elsewhere, or whose cache was deleted."""
    if not stages.stage(node.stage).obtains or cached(plan.catalogue[node.name]):
        return None
    return "its files are not on this machine"


def _keep(folder: Path, node: Node) -> None:
    """Give a result that stands the time of now, since rules compare times."""
    for name in ("metrics.json", "run.json"):
        os.utime(folder / name)
    print(f"{node}: up to date", file=sys.stderr)


def _outdated(plan: Plan, node: Node, record: dict) -> str | None:
    """A sentence about a parent that was made again under the same key, with other contents than the record
    was made from. None without one."""
    for role, parent in plan.parents(node).items():
        with suppress(records.BrokenError):
            told, now = record["parents"].get(role, {}), records.read(plan.folder(parent))
            if now is None or now["key"] != told.get("key"):
                continue
            if told.get("contents") != contents(now):
                return f"its parent `{parent}` was made again, with other contents"
    return None


def _agree(started: bool | None = None) -> bool | None:
    """Whether there is work to do. The first of several processes decides it and the others wait for its
    word; one process decides alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return started
    from relinear.machine import distributed  # torch, which stages of one process may not need

    return distributed.started(started)


def _run(plan: Plan, node: Node, job: Job, key: str, parents: dict, work: Callable, progress: dict) -> None:
    started = datetime.datetime.now(datetime.UTC)
    record = {
        "schema": records.SCHEMA,
        "scale": plan.scale,
        "root": plan.root.name,
        "run": node.name,
        "stage": node.part or node.stage,
        "measure": node.part,
        "key": key,
        "config": job.settings,
        "config_hash": digest(job.settings),
        "code_hash": code_hash(plan.work(node).modules),
        "kernels": kernel_hashes(plan.work(node).modules),
        "parents": parents,
        "artefacts": {},
        "datasets": _datasets(plan, node, job),
        "git": git_state(),
        "versions": versions(),
        "lock": lock_hash(),
        "hardware": job.hardware,
        "seed": job.seed,
        "tokens": 0,
        "started": started.isoformat(timespec="seconds"),
        "wall_seconds": 0.0,
        "peak_rss_bytes": 0,
        "attempt": progress["attempt"],
        "tags": tags_of(plan, node),
    }
    with tracking.Tracker(plan.store, **describe(record)) as tracker:
        job.mirror = tracker.log
        begin = time.monotonic()
        with _on_own_files(plan, node, job):
            metrics = work(job)
        if node.stage == "measure":
            records.require_readings(metrics.get("readings", ()), str(node))
        if node.stage == "model" or stages.stage(node.stage).trains:
            for path in sorted(job.out.rglob("*.safetensors")):
                weights.require_finite(path)
        record |= {"tokens": job.tokens, "wall_seconds": round(time.monotonic() - begin, 2),
                   "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                   "mlflow_run_id": tracker.run_id}  # fmt: skip
        if job.history.is_file():
            told = job.history.read_bytes()
            if stages.stage(node.stage).trains:
                _require_whole(told, job.history, node)
            (job.out / job.history.name).write_bytes(told)
        write_json(job.out / "metrics.json", metrics)
        record["artefacts"] = records.entries(job.out, (p for p in sorted(job.out.rglob("*")) if p.is_file()))
        write_json(job.out / "run.json", record)
        tracker.finish(job.out)


def _on_own_files(plan: Plan, node: Node, job: Job) -> AbstractContextManager:
    """A context for work on files of one's own, whose contents nobody has seen before. A measurement runs a
    model, too: what fails there need not be the file's."""
    own = {name: path for name, path in job.assets.items() if isinstance(plan.catalogue[name], Own)}
    if not own or node.stage == "measure":
        return nullcontext()
    from relinear.opening import working  # transformers, which other steps may not need

    return working(own, opens=node.stage == "model")


def _locked(path: Path, node: Node):
    """The step's lock. A job that finds it held waits: failing would make Snakemake delete the other's
    output."""
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        print(f"{node}: another process is at it; waiting for it to end", file=sys.stderr)
        return lock.acquire()


def _progress(work: Path, key: str, node: Node) -> dict:
    """Count this attempt, and return its number and key as `attempt.json` has them.

    What an earlier attempt left behind is deleted if it is of another key or cannot be read; this attempt
    then begins anew.
    """
    path = work / "attempt.json"
    last = {"attempt": 0, "key": None}  # the owner of the files that are there is unknown
    try:
        if path.is_file():
            told = records.read_json(path)
            last = {"attempt": int(told["attempt"]), "key": str(told["key"])}
        _require_readable(work)
    except (KeyError, TypeError, ValueError) as error:
        print(
            f"{node}: what an earlier attempt left cannot be read ({error}); it begins anew", file=sys.stderr
        )
        last["key"] = None
    if last["key"] != key:
        _clear(work)
    now = {"attempt": last["attempt"] + 1, "key": key}
    write_json(path, now)
    return now


def _clear(work: Path) -> None:
    """Delete what an attempt left in its work folder."""
    for leftover in work.iterdir():
        if leftover.name not in ("lock", "attempt.json"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def _require_whole(told: bytes, history: Path, node: Node) -> None:
    """Raise StageError for a training's history that lacks steps or has one twice, as after its deletion by
    others. The next attempt begins anew."""
    steps = [json.loads(line)["step"] for line in told.splitlines()]
    if steps != list(range(len(steps))):
        _clear(history.parent)
        raise StageError(
            f"{node}: {history} has not every step once, {len(steps)} lines: files of its folder were changed"
            " while it ran; nothing of this attempt is kept, give the same command again"
        )


def _require_readable(work: Path) -> None:
    """Raise ValueError where a batch that an earlier attempt left cannot be read. Answers are whole line by
    line, which measures see to; a history is what its checkpoint says, which trainings see to."""
    for path in sorted(work.glob("*.json")):
        try:
            json.loads(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def _verified(plan: Plan, parent: Node, child: Node) -> dict[str, str]:
    """A parent's path, key and contents, once it is finished, is the one this plan would make, and its files
    are what it wrote."""
    folder = plan.folder(parent)
    command = f"relinear {parent} {plan.node_options()}"
    try:
        record = records.read(folder)
    except records.BrokenError as error:
        raise StageError(
            f"{child}: its parent `{parent}` is not finished: {error}; run `{command}` again"
        ) from None
    if record is None:
        raise StageError(f"{child}: its parent `{parent}` is not there ({folder}); run `{command}` first")
    if record["key"] != plan.key(parent):
        raise StageError(
            f"{child}: its parent `{parent}` was made with other settings, code or parents: "
            f"key {record['key'][:12]} got, {plan.key(parent)[:12]} expected; run `{command}` again"
        )
    if wrong := records.differs(folder, record):
        raise StageError(f"{child}: {wrong}, by its parent `{parent}`; run `{command}` again")
    return {"path": str(folder), "key": record["key"], "contents": contents(record)}


def _require_disk(plan: Plan, node: Node) -> None:
    free = shutil.disk_usage(plan.root).free
    if free < FREE_BYTES:
        raise StageError(
            f"{node}: {free >> 20} MiB free on the disk of {plan.root}; at least {FREE_BYTES >> 20} MiB are"
            " needed"
        )


def _datasets(plan: Plan, node: Node, job: Job) -> list[dict]:
    """The data that the stage reads: assets by the hash of their archive, texts by the hash of their
    documents."""
    names = job.settings["assets"]
    found = [{"name": n, "sha256": plan.catalogue[n].sha256 or names[n], "role": "input"} for n in names]
    role = "heldout" if node.stage == "measure" else "train"
    for text in (job.parents[name] for name in ("text", "data") if name in job.parents):
        sources = json.loads((text / "metrics.json").read_text()).get("sources", {})
        found += [{"name": n, "sha256": source["sha256"], "role": role} for n, source in sources.items()]
    return found


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
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if status is None else changes_code(status)}


def changes_code(status: str) -> bool:
    """Whether `git status --porcelain` names a change of a file of the commit, or a new file among those that
    results are made of.

    A model or a text of one's own that lies in the clone is no change of the code.
    """
    new = [line[3:].strip('"') for line in status.splitlines() if line.startswith("??")]
    return len(new) < len(status.splitlines()) or any(
        path.startswith(("src/", "kernels/", "workflow/")) for path in new
    )


def lock_hash() -> str | None:
    """sha256 of the clone's requirements.lock; None outside a clone."""
    lock = Path(__file__).parents[2] / "requirements.lock"
    return sha256(lock) if lock.is_file() else None


def versions() -> dict[str, str]:
    """The versions of Python and of the libraries that results depend on, by name."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
