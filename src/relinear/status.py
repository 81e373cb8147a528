"""The finished results that this clone would make otherwise now: a comparison of their records with the
plan."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from relinear import records
from relinear.core import store
from relinear.errors import UserError
from relinear.plan.code import kernel_hashes
from relinear.plan.plan import Plan
from relinear.stage import lock_hash
from relinear.stages._stage import Node


def lines(plan: Plan) -> list[str]:
    """A line for each finished result of the scale that has changed since, with the reasons, and one with
    counts.

    Reasons: the plan would make it anew, or knows no such result; another code computes its operations on a
    GPU; requirements.lock has changed; an asset that it read is another. The last three rerun nothing by
    themselves. Raises UserError where nothing is finished.
    """
    # the teacher only chooses the rows of tables; folders name their model
    plan = replace(plan, teacher=None)
    folders = store.nodes(plan.root)
    if not folders:
        raise UserError(
            f"no finished result in {plan.root}; `snakemake` makes them, or choose another --scale, --budget,"
            " --seed or --results"
        )
    found = {folder: list(_reasons(plan, folder)) for folder in folders}
    changed = {folder: reasons for folder, reasons in found.items() if reasons}
    said = [f"{folder.relative_to(plan.root)}: {'; '.join(reasons)}" for folder, reasons in changed.items()]
    total = f"{len(found)} finished results in {plan.root}"
    return [
        *said,
        f"{total}: {len(changed)} changed since" if changed else f"{total}: nothing has changed since",
    ]


def _reasons(plan: Plan, folder: Path) -> Iterator[str]:
    try:
        record = records.whole(folder)
    except records.BrokenError as error:
        yield str(error)
        return
    node = _node(plan, folder, record)
    if node is None:
        yield "the plan knows no such result"
    else:
        if record.get("key") != plan.key(node):
            yield f"would be made anew (key {str(record.get('key'))[:12]}, now {plan.key(node)[:12]})"
        yield from _differences("kernel", record.get("kernels", {}), kernel_hashes(plan.work(node).modules))
        yield from _differences(
            "asset", record.get("config", {}).get("assets", {}), plan.settings(node)["assets"]
        )
    lock = lock_hash()
    if lock is not None and record.get("lock") != lock:
        yield "requirements.lock has changed"


def _differences(kind: str, then: dict[str, str], now: dict[str, str]) -> Iterator[str]:
    names = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    if names:
        yield f"{kind}{'s' if len(names) > 1 else ''} {', '.join(names)} changed"


def _node(plan: Plan, folder: Path, record: dict) -> Node | None:
    """The node of a finished folder; None where the plan has none there."""
    measure = record.get("measure", "")
    try:
        node = plan.node("measure" if measure else record["stage"], record["run"], measure)
        return node if plan.folder(node) == folder else None
    except (UserError, KeyError):
        return None
