"""The items that a scale scores as a folder of lm-eval tasks, so that `lm_eval --include_path` scores the
same ones on any model.

Each task is the one that lm-eval ships (the YAML file includes it) over JSON lines of the drawn documents,
named `relinear_<task>`. The files name each other by absolute paths: make the folder anew rather than move
it.
"""

from pathlib import Path
from typing import NamedTuple

import datasets
import yaml
from lm_eval.api.task import ConfigurableTask

from relinear.errors import UserError
from relinear.get import assets
from relinear.measure import _harness as harness
from relinear.plan.plan import Plan
from relinear.plan.sane import read_yaml
from relinear.share.free import require_free
from relinear.stages.measure import options_of

METRIC = "lm_eval"  # the metric that scores these items
OURS = ("include", "convert", "data", "smoke")  # the keys of workflow/tasks that are not lm-eval's


class Items(NamedTuple):
    """The items of a task that are scored: their number (None: all) and their asset (None: the hand-written
    ones)."""

    limit: int | None
    asset: str | None


def items_scored(plan: Plan) -> dict[str, Items]:
    """The tasks that the measures of the plan score. Raises UserError where two of them score one on
    different items."""
    found: dict[str, Items] = {}
    for name, measure in plan.measures.items():
        if measure.metric != METRIC or measure.data is None or name in plan.config.without:
            continue
        asset = plan.data[plan.scaled.stand_in("data", measure.data)].options["asset"]
        for task, limit in options_of(measure, plan.scaled)["items"].items():
            items = Items(limit, asset)
            if found.setdefault(task, items) != items:
                raise UserError(
                    f"measure {name!r} scores {task} on {items}, another one on {found[task]}; a task has one"
                    " set of items here"
                )
    return found


def write(plan: Plan, out: Path) -> list[str]:
    """Write the tasks that the plan's measures score into `out`; returns the names to give `lm_eval --tasks`.

    Raises UserError where `out` holds anything.
    """
    out, tasks = out.resolve(), items_scored(plan)
    require_free(out)
    datasets.disable_progress_bars()
    folders = {asset: asset and assets.obtain(asset, assets=plan.catalogue) for _, asset in tasks.values()}
    (out / "documents").mkdir(parents=True, exist_ok=True)
    for name, (limit, asset) in tasks.items():
        settings = read_yaml(harness.TASKS / f"{name}.yaml")
        loaded = harness.load(name, limit, folders[asset], plan.seed)
        parts = [_part(settings, task, out) for task in loaded]
        # MMLU's subjects count as one task, as in the tables: each item the same
        if parts != [f"relinear_{name}"]:
            mean = [
                {"metric": metric, "weight_by_size": True}
                for metric in harness.METRICS
                if metric in loaded[0].aggregation()
            ]
            _dump(
                out / f"relinear_{name}.yaml",
                {"group": f"relinear_{name}", "task": parts, "aggregate_metric_list": mean},
            )
    return [f"relinear_{name}" for name in tasks]


def _part(settings: dict, task: ConfigurableTask, out: Path) -> str:
    """Write one task's documents and its YAML file; its name."""
    name = f"relinear_{task.task_name}"
    files = {split: str(out / "documents" / f"{name}.{split}.jsonl") for split in task.dataset}
    for split, path in files.items():
        task.dataset[split].to_json(path)
    bundled = harness.BUNDLED / settings["include"].format(subject=task.config.dataset_name)
    ours = {key: value for key, value in settings.items() if key not in OURS}
    documents = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
    # No tag, so that lm-eval's own groups, such as ai2_arc, do not get these tasks.
    _dump(out / f"{name}.yaml", {"include": str(bundled), "task": name, "tag": [], **ours, **documents})
    return name


def _dump(path: Path, content: dict) -> None:
    path.write_text(yaml.safe_dump(content, sort_keys=False))
