"""Times of results, in the order in which these were made.

Rules run what is older than what it is made from. Results that were copied without their times have those of
the copying, in any order, so rules would give every step a job, on a cluster a place in its queue, to find
that it stands.
"""

import contextlib
import functools
import importlib
import io
import os
import sys
from pathlib import Path
from typing import Any

from relinear import records
from relinear.core import store
from relinear.errors import UserError
from relinear.plan.plan import Plan

LONG = 1 << 28  # bytes of a result that take seconds to hash on a slow disk


def retime(plan: Plan) -> int:
    """Give each result of a plan that stands, and is older than a parent, the time of now; returns how many
    there were. Parents come first. What does not stand keeps its time, so that rules run it."""
    found = {}
    for folder in store.nodes(plan.root):
        with contextlib.suppress(OSError):  # as of a step that ends just now
            found[str(folder)] = os.stat(f"{folder}/run.json").st_mtime
    done: dict[str, float] = {}
    return sum(_retimed(plan, folder, found, done) for folder in found)


def _retimed(plan: Plan, folder: str, found: dict[str, float], done: dict[str, float]) -> int:
    """As `retime`, for a folder and what it is made from; `done` has the times of those that were seen."""
    if folder in done:
        return 0
    done[folder] = found[folder]
    root = str(plan.root)
    try:
        named = records.parents(folder)
    except (records.BrokenError, OSError):  # as of a step that begins just now
        return 0
    there = [parent for parent in (_here(root, name) for name in named) if parent in found]
    count = sum(_retimed(plan, parent, found, done) for parent in there)
    if max((done[parent] for parent in there), default=0.0) <= found[folder]:
        return count
    # A mistake in one step's settings, or a folder that may not be written to, ends no command for others: it
    # is told where that step is asked for.
    with contextlib.suppress(UserError, OSError):
        if (record := records.read(Path(folder))) and _stands(plan, Path(folder), record):
            done[folder] = os.stat(f"{folder}/run.json").st_mtime
            count += 1
    return count


@functools.cache
def _here(root: str, parent: str) -> str:
    """A parent's folder as a record names it, below a scale's results. Most records name the same few."""
    return os.path.join(root, records.place(parent))


def _stands(plan: Plan, folder: Path, record: dict[str, Any]) -> bool:
    """Whether the result in a folder stands; it then gets the time of now. A line on stderr where finding out
    takes long.

    Raises UserError where the plan has no such node, or none that can be made, and OSError where the folder
    cannot be read or given a time."""
    stage = "measure" if record["measure"] else record["stage"]
    node = plan.node(stage, record["run"], record["measure"] or "")
    if plan.folder(node) != folder or plan.key(node) != record["key"]:
        return False
    if (size := sum(entry.get("bytes") or 0 for entry in record["artefacts"].values())) >= LONG:
        print(
            f"{folder} is older than what it is made from; its {size >> 20} MiB are compared with its record",
            file=sys.stderr,
        )
    # by name: it brings what runs a stage, which takes long to import and is rarely asked
    stands = importlib.import_module("relinear.stage").stands
    with contextlib.redirect_stderr(io.StringIO()):  # a line for each: "up to date"
        return stands(plan, node)
