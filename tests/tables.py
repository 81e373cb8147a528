"""MLflow's tables in a new SQLite store. Its 68 migrations, which take a second of a core, make them once for
all tests."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path


def once(kept: Path) -> None:
    """Let MLflow make the tables of the first store, here or in another process; keep them as `kept`, from
    which later stores are copied."""
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
