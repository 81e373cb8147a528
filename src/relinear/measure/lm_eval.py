"""Accuracy on lm-evaluation-harness's tasks: zero-shot and few-shot multiple choice, and LAMBADA's last
word."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field
from transformers import PreTrainedModel

from relinear.folders import tokenizer_of
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import Positive, Strict

NEEDS = ("next_token", "tasks")
YIELDS = ("acc", "acc_norm", "tied")

METRICS = ("acc", "acc_norm", "tied")


class Options(Strict):
    """Score `items` of each task of workflow/tasks, drawn by the plan's seed, in batches of `batch_size`."""

    # task -> how many, at least 2; None: all. Of MMLU a total, spread over its subjects
    items: dict[str, int | None] = Field(min_length=1)
    batch_size: Positive
    # MMLU's longest 5-shot prompt has 3147 tokens of SmolLM2; a prompt is never cut
    max_length: Positive = 4096
    # of the scale's `items` only these are scored; the measure stage has chosen them already
    tasks: tuple[str, ...] = ()


def measure(model: PreTrainedModel, data: Path, options: Options, job: Job) -> Iterator[Reading]:
    """`acc` and, where the task has it, `acc_norm` of each task, and `tied`, the share of items in which
    several choices come first, as fractions.

    Logits are float32, and the right one of k choices that come first counts 1/k. Writes `items.jsonl`, each
    item's scores, and how many come first.

    An interrupted measurement loses the batch of choices that each process was at.
    """
    from relinear.measure import _harness  # lm-eval, which the other metrics do not need

    tokenizer = tokenizer_of(job.parents["model"])
    own = data == job.workflow  # the few hand-written items
    scores, items = _harness.score(
        model,
        tokenizer,
        options.items,
        None if own else data,
        batch_size=options.batch_size,
        max_length=options.max_length,
        seed=job.settings["seed"],
        smoke=own,
        work=job.work,
    )
    job.items(items)
    for task, found in scores.items():
        for metric in (m for m in METRICS if m in found):
            yield Reading(metric, task, {}, found[metric], found[f"{metric}_stderr"], found["n"])
