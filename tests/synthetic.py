"""Measurements made up for tests of tables and figures."""

import csv
import json
from pathlib import Path

import yaml

from relinear.core import store
from relinear.plan.measured import Measured, Source
from relinear.plan.readings import Reading

FACTS = {
    "method": "lizard",
    "variant": "code",
    "trainable_params": 1_234_567,
    "tokens": {"distill": 16384, "finetune": 16384},
}
COMMONSENSE = ("piqa", "arc_easy", "arc_challenge", "hellaswag", "winogrande")


def measurement(run, measure, *readings, scale="mini", folder=None, **facts):
    """A finished measurement whose run.json is at `results/<run>/<measure>`."""
    source = Source(f"results/{run}/{measure}/run.json", f"key-of-{run}-{measure}", "aa", "bb")
    return Measured(run, measure, scale, readings, FACTS | facts, source, folder or Path("nowhere"))


def unpack(node: Path, to: Path) -> None:
    """Write run.json, metrics.json and curve of a committed node into the folder `to`."""
    to.mkdir(parents=True)
    for name in (store.RECORD, store.METRICS):
        if store.exists(node / name):
            (to / name).write_bytes(store.read(node / name))
    if (lines := store.curve(node)) is not None:
        (to / store.CURVE).write_text("".join(json.dumps(line) + "\n" for line in lines))


def reading(metric, value, stderr=0.01, n=100, of="text", **at):
    return Reading(metric, of, at, value, stderr, n)


def everything(run, acc=0.5, ppl=20.0, stderr=0.01, n=100, passed=True, collapsed=False):
    """The measurements that the headline table reads of a run at a scale without LAMBADA and BoolQ: (run,
    measure) -> measurement."""
    scores = {task: [reading("acc", acc, stderr, n, task)] for task in (*COMMONSENSE, "mmlu")}
    for task in ("piqa", "arc_easy", "arc_challenge", "hellaswag"):
        scores[task].append(reading("acc_norm", acc + 0.01, stderr, n, task))
    found = {
        "perplexity": [
            reading("perplexity", ppl, ppl / 50, 8192),
            reading("chunk_mean_exp", 1.1 * ppl, None, 8192),
        ],
        "commonsense": [r for task in COMMONSENSE for r in scores[task]],
        "mmlu": scores["mmlu"],
        "gate": [reading("passed", float(passed), None, 1, "gate")],
    }
    return {
        (run, measure): measurement(run, measure, *readings, collapsed=collapsed)
        for measure, readings in found.items()
    }


PUBLISHED = {
    "table": "table1",
    "row": "lizard",
    "column": "acc",
    "model": "BERT",
    "label": "Table 1",
    "origin": "measured",
    "note": "",
}


def publish(own, lines):
    """Write a paper's published.csv; a line names what differs from `PUBLISHED`, and its value."""
    columns = ("table", "row", "column", "value", "model", "label", "origin", "note")
    with (own / "published.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(PUBLISHED | line for line in lines)


def paper(folder, name="lizard", published=(), **spec):
    """A papers folder with one paper and one spec `table1.yaml`, or as many as are given by stem; returns the
    first's path. `published`: the lines of its published.csv."""
    own = folder / "papers" / name
    own.mkdir(parents=True, exist_ok=True)
    (own / "paper.yaml").write_text("title: A paper\n")
    if published:
        publish(own, published)
    path = own / f"{spec.pop('stem', 'table1')}.yaml"
    path.write_text(yaml.safe_dump({"label": "Table 1", "says": "a table"} | spec, sort_keys=False))
    return path
