"""A measurement: a run's model, one metric, its readings."""

import importlib
import json
from pathlib import Path
from typing import Any

import torch

from relinear.linearize.assemble import assemble, trained_parameters
from relinear.linearize.parts import check_parts, switch_off
from relinear.machine.hardware import place
from relinear.plan.job import PREPARES, Job
from relinear.plan.readings import plain
from relinear.plan.strict import parse

KEEP = "keep_softmax_layers"  # an option of the model beside its method's own


def work(job: Job) -> dict[str, Any]:
    """Measure the run's model; return the readings, and the facts about the run that tables print beside
    them.

    Raises ConfigError for options that the metric does not take, UserError for parts to switch off
    (`without`) that the run's method does not have.
    """
    settings = job.settings
    without = settings.get("without", ())
    check_parts(settings["method"], {k: v for k, v in settings["options"].items() if k != KEEP}, without)
    metric = importlib.import_module(f"relinear.measure.{settings['metric']}")
    options = parse(metric.Options, settings["metric_options"], job.name)
    device, dtype = place(job)
    torch.manual_seed(settings["init_seed"])
    model = assemble(job.parents["model"], job.links, dtype=dtype, device=device)
    if without:
        switch_off(model, *without)
    readings = list(metric.measure(model, data_folder(job), options, job))
    found = {reading.metric: reading.value for reading in readings if not reading.at}
    # A trained model that is no better than guessing words by their frequency is measured all the same, and
    # marked as collapsed.
    collapsed = (
        {"collapsed": found["perplexity"] >= found["chance_perplexity"]}
        if "chance_perplexity" in found and not without
        else {}
    )
    return {"facts": facts(job) | collapsed, "readings": plain(readings)}


def data_folder(job: Job) -> Path | None:
    """The folder of the metric's data: a text's, an asset's, or `workflow/` for hand-written items; None for
    a metric without data."""
    if job.settings["data"] is None:
        return None
    if "data" in job.parents:
        return job.parents["data"]
    if job.assets:
        [folder] = job.assets.values()
        return folder
    return job.workflow


def facts(job: Job) -> dict[str, Any]:
    """Method, variant, parameters that were trained, and training tokens of each step; without the steps that
    made the model which the run begins with."""
    tokens: dict[str, int] = {}
    trained = []
    for folder in (folder for link in job.links for folder in link.steps):
        record = json.loads((folder / "run.json").read_text())
        if record["stage"] not in PREPARES:
            trained.append(folder)
            tokens[record["stage"]] = tokens.get(record["stage"], 0) + record["tokens"]
    return {
        "method": job.settings["method"],
        "variant": job.settings["variant"],
        "trainable_params": trained_parameters(trained),
        "tokens": tokens,
    }
