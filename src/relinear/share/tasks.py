"""The items that a scale scores as a folder of lm-eval tasks, so that `lm_eval --include_path` scores the same ones on any model.

Each task is the one that lm-eval ships (the YAML file includes it) over JSON lines of the drawn documents, named `relinear_<task>`.
The files name each other by absolute paths: make the folder anew rather than move it.
"""

from collections.abc import Iterator
from pathlib import Path

import datasets
import yaml

from relinear import stages
from relinear.errors import UserError
from relinear.get import assets
from relinear.measure import _harness as harness
from relinear.plan.plan import Plan
from relinear.plan.strict import read_yaml

METRIC = "lm_eval"  # whose items they are
OURS = ("include", "convert", "data", "smoke")  # the keys of workflow/tasks that are not lm-eval's


def write(plan: Plan, out: Path) -> list[str]:
    """Write the tasks of all measures of the plan that score any into `out`; returns the names to give `lm_eval --tasks`.

    Raises UserError where `out` holds anything.
    """
    out = out.resolve()
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty; give a folder that is not there")
    datasets.disable_progress_bars()
    (out / "documents").mkdir(parents=True, exist_ok=True)
    scored = {task: (limit, folder) for measure in _measures(plan) for task, limit, folder in _items(plan, measure)}
    for name, (limit, data) in scored.items():
        settings = read_yaml(harness.TASKS / f"{name}.yaml")
        parts = [_part(settings, task, out) for task in harness.load(name, limit, data, plan.seed)]
        if parts != [f"relinear_{name}"]:  # MMLU's subjects count as one task, as in the tables: each item the same
            mean = [{"metric": "acc", "weight_by_size": True}]
            _dump(out / f"relinear_{name}.yaml", {"group": f"relinear_{name}", "task": parts, "aggregate_metric_list": mean})
    return [f"relinear_{name}" for name in scored]


def _measures(plan: Plan) -> list[str]:
    return [name for name, measure in plan.measures.items() if measure.metric == METRIC and measure.data and name not in plan.config.without]


def _items(plan: Plan, measure: str) -> Iterator[tuple[str, int | None, Path | None]]:
    """Each task of a measure, how many of its items are scored (None: all), and the folder where they lie (None: the hand-written ones)."""
    source = plan.data[plan.stand_in("data", plan.measures[measure].data)].options
    folder = assets.obtain(source["asset"], assets=plan.catalogue) if source["asset"] else None
    for task, limit in stages.stage("measure").options(plan, measure)["items"].items():
        yield task, limit, folder


def _part(settings: dict, task: harness.LocalTask, out: Path) -> str:
    """Write one task's documents and its YAML file; its name."""
    name = f"relinear_{task.task_name}"
    files = {split: str(out / "documents" / f"{name}.{split}.jsonl") for split in task.dataset}
    for split, path in files.items():
        task.dataset[split].to_json(path)
    bundled = harness.BUNDLED / settings["include"].format(subject=task.task_name.removeprefix("mmlu_"))
    ours = {key: value for key, value in settings.items() if key not in OURS}
    documents = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
    # No tag: lm-eval's own groups, such as ai2_arc, stay what they are.
    _dump(out / f"{name}.yaml", {"include": str(bundled), "task": name, "tag": [], **ours, **documents})
    return name


def _dump(path: Path, content: dict) -> None:
    path.write_text(yaml.safe_dump(content, sort_keys=False))
