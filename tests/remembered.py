"""What tests make once and need often: MLflow's tables, and what came of the texts of `workflow/`."""

import hashlib
import os
import pickle
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import yaml


def tables(kept: Path) -> None:
    """Let MLflow's 68 migrations, which take a second of a core, make the tables of the first SQLite store,
    here or in another process; keep them as `kept`, from which later stores are copied."""
    from mlflow.store.db import utils

    make = utils._initialize_tables
    if hasattr(make, "kept"):
        return

    def initialize(engine) -> None:
        if engine.dialect.name != "sqlite":
            return make(engine)
        if not kept.is_file():
            make(engine)
            aside = kept.with_name(f"{kept.name}.{os.getpid()}")
            with closing(engine.raw_connection()) as made:
                made.execute("VACUUM INTO ?", [str(aside)])
            aside.replace(kept)
            return None
        with closing(sqlite3.connect(kept)) as empty, closing(engine.raw_connection()) as made:
            empty.backup(made.driver_connection)

    initialize.kept = kept
    utils._initialize_tables = initialize


def texts(known: dict[str, bytes]):
    """`yaml.load`, but a text of `workflow/` is parsed once: `known` has what came of it. A plan reads a
    hundred files, some hundred tests make one, and most of what they read is the repository's. What a test
    does to the values does not stay."""
    load = yaml.load

    def once_each(stream, Loader):  # as yaml names them: lm-eval gives the second by name
        if Loader.__name__ != "_UniqueKeys" or not isinstance(stream, str):  # of relinear.plan.sane
            return load(stream, Loader)
        if stream not in known:
            known[stream] = pickle.dumps(load(stream, Loader))
        return pickle.loads(known[stream])

    return once_each


def specs(read):
    """`specs._read`, but a table or figure is read once, as long as its paper's folder, every paper.yaml and
    the shared columns have the same bytes: a plan reads a hundred."""
    found, seen = {}, {}

    def content(*files: Path) -> str:
        named = ((*file.parts[-2:], file.read_bytes()) for file in sorted(files) if file.is_file())
        return hashlib.sha256(pickle.dumps(list(named))).hexdigest()

    def once_each(path: Path, known: dict, added: Sequence[str] = ()):
        if seen.get("known") is not known:  # of each plan another
            papers = path.parents[1]
            seen.clear()
            seen["known"] = known
            seen["all"] = content(papers.parent / "columns.yaml", *papers.glob("*/paper.yaml"))
        if path.parent not in seen:
            seen[path.parent] = content(*path.parent.iterdir())
        key = (path.parent.name, path.name, seen[path.parent], seen["all"], tuple(added))
        if key not in found:
            found[key] = read(path, known, added)
        return replace(found[key], file=path)

    return once_each


def parsed(workflow: Path) -> dict[str, bytes]:
    """What comes of each text of a `workflow/`."""
    from relinear.plan.sane import _UniqueKeys

    found = {}
    load = texts(found)
    for path in sorted(workflow.rglob("*.yaml")):
        load(path.read_text(), _UniqueKeys)
    return found
