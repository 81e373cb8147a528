"""Committed results of schema 1, in which one stage `evaluate` held all scores of a run and `fidelity` its distance from softmax attention."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relinear.files import sha256
from relinear.plan.readings import Measured, Reading, Source

HELD_OUT = "heldout"  # the text, whose name schema 1 does not say
TASKS = {
    "commonsense": ("piqa", "arc_easy", "arc_challenge", "hellaswag", "winogrande"),
    "mmlu": ("mmlu",),
    "lambada": ("lambada_openai",),
    "boolq": ("boolq",),
}


def load_schema1(run_folder: Path, measure: str) -> Measured:
    """A measurement of a run from its folder `runs/<run>`.

    Raises FileNotFoundError where it was not measured, ValueError for a measure that schema 1 does not know and for files that are malformed or
    of different runs.
    """
    if measure not in STAGES:
        raise ValueError(f"schema 1 has no measure {measure!r}; have {', '.join(STAGES)}")
    stage, read = STAGES[measure]
    record_file, metrics_file = (run_folder / stage / name for name in ("run.json", "metrics.json"))
    record, metrics = (_json(file) for file in (record_file, metrics_file))
    try:
        if record["run"] != metrics["run"]:
            raise ValueError(f"{metrics_file}: run is {metrics['run']!r}, expected {record['run']!r}")
        if record["stage"] != stage:
            raise ValueError(f"{record_file}: stage is {record['stage']!r}, expected {stage!r}")
        readings = tuple(read(metrics, measure))
        source = Source(record_file.as_posix(), record["key"], sha256(record_file), sha256(metrics_file))
        found = Measured(record["run"], measure, record["scale"], readings, _facts(metrics), source, run_folder / stage)
    except KeyError as error:
        raise ValueError(f"{metrics_file}: no {error}") from None
    if not readings:
        raise FileNotFoundError(f"{metrics_file} has no scores of {', '.join(TASKS[measure])}")
    return found


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _facts(metrics: dict[str, Any]) -> dict[str, Any]:
    """The facts of `evaluate` about the run; `fidelity` has the method alone."""
    if "trainable_params" not in metrics:
        return {"method": metrics["method"]}
    tokens = {step: n for step in ("distill", "finetune") if (n := metrics[f"{step}_tokens"])}
    return {key: metrics[key] for key in ("method", "variant", "trainable_params", "collapsed")} | {"tokens": tokens}


def _perplexity(metrics: dict[str, Any], _: str) -> list[Reading]:
    p = metrics["perplexity"]
    found = [
        Reading("perplexity", HELD_OUT, {}, p["value"], p["stderr"], p["tokens"]),
        Reading("chunk_mean_exp", HELD_OUT, {}, p["chunk_mean_exp"], None, p["tokens"]),
    ]
    chance = metrics.get("chance_perplexity")
    return found if chance is None else [*found, Reading("chance_perplexity", HELD_OUT, {}, chance, None, p["tokens"])]


def _gate(metrics: dict[str, Any], _: str) -> list[Reading]:
    return [Reading("passed", "gate", {}, float(metrics["gate"]["passed"]), None, 1)]


def _scores(metrics: dict[str, Any], measure: str) -> list[Reading]:
    tasks = {task: metrics["tasks"][task] for task in TASKS[measure] if task in metrics["tasks"]}
    return [
        Reading(metric, task, {}, score[metric], score[f"{metric}_stderr"], score["n"])
        for task, score in tasks.items()
        for metric in ("acc", "acc_norm")
        if score.get(metric) is not None
    ]


def _distance(metrics: dict[str, Any], _: str) -> list[Reading]:
    found = [Reading(metric, "attention", {}, metrics[metric], None, metrics["perplexity"]["tokens"]) for metric in ("mse", "kl")]
    for metric in ("mse", "kl"):
        for layer, heads in enumerate(metrics.get(f"{metric}_per_head", ())):
            found += [Reading(metric, "attention", {"layer": layer, "head": head}, value, None, 1) for head, value in enumerate(heads)]
    return found


STAGES: dict[str, tuple[str, Callable[[dict[str, Any], str], list[Reading]]]] = {
    "perplexity": ("evaluate", _perplexity),
    "gate": ("evaluate", _gate),
    **{measure: ("evaluate", _scores) for measure in TASKS},
    "perplexity_before": ("fidelity", _perplexity),
    "fidelity": ("fidelity", _distance),
}
