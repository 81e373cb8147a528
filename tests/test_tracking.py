"""Laws of the MLflow mirror: the store's content after runs that end well, badly, twice or not at all."""

import json
import math
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from conftest import ROOT, free_port, wait_for_server
from servers import Between, mlflow_server, standing_before

from relinear import cli
from relinear.core import store as nodes
from relinear.errors import UserError
from relinear.files import sha256
from relinear.plan.plan import Plan
from relinear.plan.readings import Reading
from relinear.tracking import benchmarks, committed, live, mirror, rows, store, ui
from relinear.tracking.ui import links

SOURCE = str(Path(live.__file__).parents[2])
HISTORY = [
    {"step": step, "time": 1.7e9 + step, "loss": 2.0 / step, "layer_loss": [0.5, 0.25 / step]}
    for step in (1, 2, 3)
]
HISTORY_END = 1.7e12 + 4000
READINGS = {  # measure -> what it reads
    "perplexity": [Reading("perplexity", "heldout", {}, 15.2, 0.4, 8192)],
    "commonsense": [
        Reading("acc", "piqa", {}, 0.6, None, 32),
        Reading("acc_norm", "piqa", {}, 0.61, None, 32),
    ],
    "mmlu": [Reading("acc", "mmlu", {}, 0.25, None, 57)],
    "gate": [
        Reading("passed", "gate", {}, 1.0, None, 1),
        Reading("parallel_vs_recurrent", "model", {}, 1e-6, None, 384),
    ],
}


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    mirror.init(f"sqlite:///{path}")
    return path


@pytest.fixture
def uri(tmp_path, empty_store) -> str:
    # Inside the results tree, so that `rebuild` meets the copies of run.json among mlflow's artifacts.
    path = tmp_path / "results" / "mlflow.db"
    path.parent.mkdir()
    shutil.copy(empty_store, path)
    return f"sqlite:///{path}"


def client(uri):
    from mlflow import MlflowClient

    return MlflowClient(uri)


def runs(uri, where="", scale="mini"):
    store = client(uri)
    return store.search_runs([store.get_experiment_by_name(f"relinear-{scale}").experiment_id], where)


def child(uri, stage="distill", attempt=1):
    [run] = runs(uri, f"tags.stage = '{stage}' and tags.attempt = '{attempt}'")
    return run


def parent(uri, run="lizard"):
    [found] = runs(uri, f"tags.`relinear.row` = '{run}'")
    return found


def record(stage="distill", run="lizard", attempt=1, key="k1", **more) -> dict:
    return {
        "schema": 2,
        **{
            "scale": "mini",
            "run": run,
            "stage": stage,
            "measure": "",
            "key": key,
            "attempt": attempt,
            "seed": 0,
        },
        "config": {"lr": 0.01, "options": {"feature": "exp", "window": None}, "layers": (0, 1), "on": True},
        **{"config_hash": "c0", "code_hash": "d0", "git": {"commit": "abc", "dirty": False}},
        "parents": {"model": {"path": "results/mini/models/tiny", "key": "t1"}},
        "artefacts": {"method.safetensors": {"sha256": "ff" * 32, "bytes": 1}},
        "datasets": [{"name": "wiki", "sha256": "ab" * 32, "role": role} for role in ("train", "heldout")],
        **{"versions": {"torch": "2.13.0"}, "hardware": {"cpu": "x", "threads": 2}},
        **{"started": "2026-11-21T04:00:00+00:00", "wall_seconds": 12.5, "tokens": 16384},
        "tags": {"paper": "lolcats", "method": "lizard", "row": run, "scale": "mini"},
        **more,
    }


def opened(uri, **changes):
    return live.Tracker(uri, **mirror.describe(record(**changes)))


def write_folder(root: Path, record: dict, metrics: dict) -> Path:
    folder = root / store.root_of(record) / "runs" / record["run"] / record["stage"]
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "metrics.json").write_text(json.dumps(metrics))
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in HISTORY))
    return folder


def run_stage(uri, root: Path, metrics: dict, **changes) -> None:
    started = datetime.now(UTC).isoformat()
    with opened(uri, **changes) as tracker:
        for line in HISTORY:
            tracker.log(
                {k: v for k, v in line.items() if k not in ("step", "time")}, line["step"], line["time"]
            )
        known = {"mlflow_run_id": tracker.run_id, "started": started, "wall_seconds": 0.1}
        tracker.finish(write_folder(root, record(**changes, **known), metrics))


def run_measure(uri, root: Path, measure: str, **changes) -> None:
    run_stage(
        uri,
        root,
        {"readings": [reading._asdict() for reading in READINGS[measure]]},
        stage=measure,
        measure=measure,
        **changes,
    )


def start(code: str, *arguments: str, python: str = sys.executable) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    command = [python, "-c", code, *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


# Structure


def test_another_budget_has_an_experiment_of_its_own_live_and_rebuilt(uri, tmp_path):
    """`--config budget=4` leaves the runs of mini alone: none is killed, none loses the tag `current`."""
    with opened(uri) as running, opened(uri, root="mini-x4", key="k4"):
        assert child(uri).info.status == "RUNNING" and child(uri).info.run_id == running.run_id
    assert child(uri).data.tags["current"] == "true"
    assert [r.info.run_name for r in runs(uri, "tags.stage = 'distill'", "mini-x4")] == ["lizard/distill"]
    roots = {"mini": "k1", "mini-x4": "k4"}
    for root, key in roots.items():
        write_folder(tmp_path / "results", record(root=root, key=key), {})
        drawn = tmp_path / "results" / root / "comparison"
        drawn.mkdir(parents=True)
        (drawn / "table2.csv").write_text(root)
        (drawn / "table2.provenance.json").write_text(json.dumps({"scale": "mini"}))
    again = f"sqlite:///{tmp_path / 'again.db'}"
    assert (
        mirror.rebuild(again, tmp_path / "results") == 2 and mirror.rebuild(again, tmp_path / "results") == 0
    )
    for root, key in roots.items():
        [found] = runs(again, "tags.stage = 'distill'", root)
        assert (found.data.tags["key"], found.data.tags["current"]) == (key, "true")
        [drawn] = runs(again, "tags.`relinear.kind` = 'tables'", root)
        assert [f.path for f in client(again).list_artifacts(drawn.info.run_id)] == [root]


def test_the_command_names_the_experiment_after_the_folder(uri, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    cli.app(
        [
            "track",
            "init",
            "--scale",
            "smoke",
            "--budget",
            "4",
            "--rows",
            "lizard",
            "--results",
            str(tmp_path),
        ],
        standalone_mode=False,
    )
    assert sorted(r.info.run_name for r in runs(uri, scale="smoke-x4")) == ["inputs", "lizard"]
    assert client(uri).get_experiment_by_name("relinear-smoke") is None


def test_stages_are_nested_under_one_run_per_row(uri):
    for stage in ("distill", "finetune"):
        with opened(uri, stage=stage):
            pass
    with opened(uri, stage="recall", run="recall"):
        pass
    assert sorted(r.info.run_name for r in runs(uri)) == [
        "lizard",
        "lizard/distill",
        "lizard/finetune",
        "recall",
        "recall",
    ]
    for stage in ("distill", "finetune"):
        assert child(uri, stage).data.tags["mlflow.parentRunId"] == parent(uri).info.run_id
    assert child(uri, "recall").data.tags["mlflow.parentRunId"] == parent(uri, "recall").info.run_id
    assert {r.info.status for r in runs(uri)} == {"FINISHED"}


def test_run_shows_its_settings_data_and_origin(uri):
    with opened(uri):
        pass
    run = child(uri)
    assert run.data.params == {
        **{"lr": "0.01", "options.feature": "exp", "options.window": "null", "layers": "[0, 1]", "on": "true"}
    }
    wanted = {
        **{"paper": "lolcats", "method": "lizard", "row": "lizard", "scale": "mini", "stage": "distill"},
        **{"key": "k1", "attempt": "1", "current": "true", "config_hash": "c0", "code_hash": "d0"},
        **{"git.commit": "abc", "git.dirty": "false", "versions.torch": "2.13.0", "hardware.threads": "2"},
        **{"parent.model": "t1", "seed": "0"},
    }
    assert wanted.items() <= run.data.tags.items()
    assert {"paper": "lolcats", "method": "lizard", "scale": "mini"}.items() <= parent(uri).data.tags.items()
    [data] = run.inputs.dataset_inputs
    assert json.loads(data.dataset.source) == {"sha256": "ab" * 32}
    assert ("ab" * 32).startswith(data.dataset.digest)
    assert [(tag.key, tag.value) for tag in data.tags] == [("mlflow.data.context", "train, heldout")]


def test_latest_attempt_is_the_current_one(uri):
    for attempt in (1, 2, 3):
        with opened(uri, attempt=attempt), opened(uri, stage="fidelity", attempt=attempt):
            pass
    assert [child(uri, attempt=n).data.tags["current"] for n in (1, 2, 3)] == ["false", "false", "true"]
    assert len(runs(uri, "tags.current = 'true'")) == 2


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("loss is NaN"), "FAILED"),
        (SystemExit(1), "FAILED"),
        (SystemExit(143), "KILLED"),
        (KeyboardInterrupt(), "KILLED"),
    ],
)
def test_a_run_that_ends_badly_says_so_with_its_parent(uri, error, status):
    with pytest.raises(type(error)), opened(uri) as tracker:
        tracker.log({"loss": 1.0}, 1)
        raise error
    assert (child(uri).info.status, parent(uri).info.status) == (status, status)
    assert child(uri).data.metrics == {"loss": 1.0}
    assert child(uri).data.tags["error"].startswith(type(error).__name__)
    with opened(uri, attempt=2):
        pass
    assert parent(uri).info.status == "FINISHED"


def test_measurements_put_their_headlines_on_the_row(uri, tmp_path):
    for measure in READINGS:
        run_measure(uri, tmp_path / "results", measure)
    shown = {
        "ppl": 15.2,
        "ppl_stderr": 0.4,
        "ppl_n": 8192,
        "piqa_acc": 60,
        "piqa_acc_n": 32,
        "piqa_acc_norm": 61,
        "piqa_acc_norm_n": 32,
        "mmlu_acc": 25,
        "mmlu_acc_n": 57,
    }
    assert parent(uri).data.metrics == shown
    metrics = {measure: child(uri, measure).data.metrics for measure in READINGS}
    assert (
        shown.items() <= {name: value for own in metrics.values() for name, value in own.items()}.items()
    ), "one set of names"
    assert metrics["gate"]["gate/passed/gate"] == 1 and metrics["gate"]["cost/tokens"] == 16384


# Metrics, parameters and files


def test_more_than_a_batch_of_metrics_and_parameters_arrives_whole(uri):
    config = {"long": "x" * 9000, **{f"p{i}": i for i in range(250)}}
    with opened(uri, config=config) as tracker:
        tracker.log({f"layer/{i}": float(i) for i in range(2500)}, 1)
        for step in range(1500):
            tracker.log({"loss": step}, step)
    data = child(uri).data
    assert len(data.params) == 251 and data.params["p249"] == "249"
    assert data.params["long"].endswith("x... (9000 characters; whole in run.json)")
    assert len(data.metrics) == 2501 and data.metrics["layer/2499"] == 2499
    assert len(client(uri).get_metric_history(child(uri).info.run_id, "loss")) == 1500


def test_a_long_run_mirrors_the_losses_of_layers_at_every_tenth_step(uri, second, tmp_path, monkeypatch):
    steps = [
        {"step": step, "time": 1.7e9 + step, "loss": 1.0, "terms": {"layer_00": 0.5, "layer_01": 0.5}}
        for step in range(131)
    ]
    monkeypatch.setitem(globals(), "HISTORY", steps)
    run_stage(uri, tmp_path, {})
    mirror.rebuild(second, tmp_path)
    for place in (uri, second):
        points = {
            n: client(place).get_metric_history(child(place).info.run_id, n)
            for n in ("loss", "terms/layer_01")
        }
        assert [p.step for p in points["loss"]] == list(range(131))
        assert [p.step for p in points["terms/layer_01"]] == [*range(100), 100, 110, 120, 130]


def test_metrics_appear_while_the_run_goes_on(uri, monkeypatch):
    monkeypatch.setattr(live, "FLUSH_SECONDS", 0.0)
    with opened(uri) as tracker:
        tracker.log({"loss": 1.0}, 1)
        assert child(uri).data.metrics == {"loss": 1.0} and child(uri).info.status == "RUNNING"


def test_numbers_that_are_not_finite_are_kept(uri):
    with opened(uri) as tracker:
        tracker.log({"nan": math.nan, "inf": math.inf}, 1)
    metrics = child(uri).data.metrics
    assert math.isnan(metrics["nan"]) and metrics["inf"] > 1e308


def test_names_and_trees_become_what_mlflow_takes():
    assert store.metric_name("acc,none") == "acc_none"
    assert store.metric_name("/a//../b") == "a/b"
    assert store.flatten_metrics({"a": {"b,c": 1}, "l": [1, 2.5], "n": None, "s": "N/A", "m": [[1]]}) == {
        **{"a/b_c": 1.0, "l/00": 1.0, "l/01": 2.5}
    }
    with pytest.raises(ValueError, match="got '//'"):
        store.metric_name("//")


# What a row carries

RECIPE = {"lr": 0.001, "weight_decay": 0.0}
LORA = {"lr": 0.0005, "kind": "lora", "lora_rank": 8}


def trained(stage, recipe, **more) -> dict:
    config = {"method": "lizard", "options": {"gate": "pool"}, "recipe": recipe, "budget": {"epochs": 2}}
    return record(stage=stage, config=config, key=stage, **more)


def measured(measure, readings, **more) -> tuple[dict, dict]:
    config = {"method": "lizard", "options": {"gate": "pool"}, "metric": measure, "before": None}
    facts = {"method": "lizard", "trainable_params": 7, "tokens": {"distill": 16384, "finetune": 16384}}
    made = record(
        stage=measure,
        measure=measure,
        config=config,
        key=measure,
        parents={"finetune": {"path": "x", "key": "f"}},
        **more,
    )
    return made, {"facts": facts, "readings": [reading._asdict() for reading in readings]}


def write_row(root: Path, run="lizard", seed=0) -> None:
    tags = {
        "paper": "comparison,lizard",
        "table": "comparison/table2,lizard/table1",
        "method": "lizard",
        "row": run,
        "model": "tiny",
        "scale": "mini",
    }
    tags["variant"] = "default"
    tasks = [
        ("piqa", "acc"),
        ("piqa", "acc_norm"),
        ("arc_easy", "acc"),
        ("arc_challenge", "acc_norm"),
        ("hellaswag", "acc_norm"),
        ("winogrande", "acc"),
    ]
    scores = [Reading(metric, task, {}, 0.5, 0.03, 100) for task, metric in tasks]
    long = [Reading("perplexity", "novels", {"position": at}, 30.0, 2.0, 6) for at in ("64-128", "1024-2048")]
    for made, metrics in (
        (
            trained("distill", RECIPE, run=run, seed=seed, tags=tags),
            {"trainable_params": 3, "last_loss": 0.1},
        ),
        (trained("finetune", LORA, run=run, seed=seed, tags=tags), {"trainable_params": 4, "last_loss": 0.2}),
        measured("commonsense", scores, run=run, seed=seed, tags=tags),
        measured("ppl_novels", long, run=run, seed=seed, tags=tags),
        measured(
            "state_bytes", [Reading("mebibytes", "model", {}, 11.6, None, 1)], run=run, seed=seed, tags=tags
        ),
    ):
        write_folder(root, made, metrics)


def test_a_row_carries_its_settings_the_tables_columns_and_where_its_records_are(uri, tmp_path):
    write_row(tmp_path / "results")
    mirror.rebuild(uri, tmp_path / "results")
    row = parent(uri).data
    wanted = {
        **{
            "method": "lizard",
            "variant": "default",
            "teacher": "tiny",
            "seed": "0",
            "window": "128",
            "gate": "pool",
            "rank": "8",
        },
        # those that are not set have their defaults
        **{"options.gate": "pool", "options.window": "128", "options.meta": "4"},
        **{
            "distill.lr": "0.001",
            "finetune.lr": "0.0005",
            "distill.epochs": "2",
            "distill.tokens": "16384",
            "finetune.tokens": "16384",
        },
    }
    assert wanted.items() <= row.params.items()
    tags = {
        "paper": "comparison,lizard",
        "table": "comparison/table2,lizard/table1",
        "row": "lizard",
        "base_run": "lizard",
        "seed": "0",
    }
    assert tags.items() <= row.tags.items()
    numbers = {
        "piqa_acc": 50,
        "piqa_acc_stderr": 3,
        "piqa_acc_n": 100,
        "ppl_long": 30,
        "ppl_long_stderr": 2,
        "state_mib": 11.6,
    }
    numbers |= {
        "avg_no_mmlu": 50,
        "avg_no_mmlu_stderr": pytest.approx(3 / 5**0.5),
        "trainable_params": 7,
        "distill_tokens": 16384,
    }
    assert {name: row.metrics.get(name) for name in numbers} == numbers and "avg" not in row.metrics, (
        "MMLU was not measured"
    )
    stages = {**child(uri, "commonsense").data.metrics, **child(uri, "ppl_novels").data.metrics}
    assert {
        "piqa_acc": 50,
        "piqa_acc_stderr": 3,
        "ppl_long": 30,
    }.items() <= stages.items(), "one set of names"
    assert stages["ppl_novels/perplexity/novels/position_64-128"] == 30, "which no column is of"
    note = row.tags["mlflow.note.content"]
    assert note.startswith(
        "`lizard`: tiny with lizard attention, seed 0: distill on 16,384 tokens at a rate of 0.001; finetune"
        " on 16,384 tokens"
    )
    assert "Shown in comparison/table2, lizard/table1." in note
    [data] = [r for r in runs(uri) if r.info.run_name == "lizard/distill"]
    assert (
        f"[distill](#/experiments/{data.info.experiment_id}/runs/{data.info.run_id}/artifacts/run.json?workflowType=machine_learning)"
        in note
    )


def test_a_row_carries_the_curves_data_and_files_of_its_stages_and_the_duration_of_their_work(
    uri, second, tmp_path
):
    results, losses = tmp_path / "results", [line["loss"] for line in HISTORY]
    run_stage(uri, results, {"loss": 0.5})
    time.sleep(2)  # the row waits for its next stage
    run_measure(uri, results, "perplexity")
    mirror.rebuild(second, results)
    for place in (uri, second):
        row, there = parent(place), client(place)
        assert [p.value for p in there.get_metric_history(row.info.run_id, "distill/loss")] == losses
        assert "perplexity/loss" not in row.data.metrics, "no training"
        assert [data.dataset.name for data in row.inputs.dataset_inputs] == ["wiki"]
        for stage in ("distill", "perplexity"):
            assert {f"{stage}/run.json", f"{stage}/metrics.json"} <= {
                f.path for f in there.list_artifacts(row.info.run_id, stage)
            }
        work = sum(
            child(place, stage).info.end_time - child(place, stage).info.start_time
            for stage in ("distill", "perplexity")
        )
        assert row.info.end_time - row.info.start_time == work


def test_a_training_made_again_adds_a_curve_of_its_own_and_a_resumed_one_none(uri, tmp_path):
    for attempt, key in ((1, "k1"), (2, "k1"), (3, "another-key")):
        run_stage(uri, tmp_path / str(attempt), {}, attempt=attempt, key=key)
    row = parent(uri).info.run_id
    points = {
        name: len(client(uri).get_metric_history(row, name))
        for name in parent(uri).data.metrics
        if name.endswith("loss")
    }
    assert points == {"distill/loss": 3, "distill/another-/loss": 3}


def test_no_chart_of_the_comparison_is_empty(uri, tmp_path):
    run_stage(uri, tmp_path / "results", {})
    run_measure(uri, tmp_path / "results", "perplexity")
    [address] = ui.comparisons(uri, "http://127.0.0.1:1").values()
    shown = json.loads(client(uri).get_experiment_by_name("relinear-mini").tags[ui.TAG])
    assert [c.get("metricKey", c["type"]) for c in shown["compareRunCharts"]] == [
        "distill/loss",
        "ppl",
        "PARALLEL",
        "DIFFERENCE",
    ]
    assert f"viewStateShareKey={ui.VIEW}" in address


def test_losses_and_the_tables_columns_are_the_first_four_charts():
    shown = ui.view({*ui.METRICS, "distill/loss", "finetune/loss"})
    charts = shown["compareRunCharts"]
    assert shown["isAccordionReordered"], "MLflow's own sections, such as distill, are not sorted among ours"
    assert [c.get("metricKey", c["type"]) for c in charts] == [
        "distill/loss",
        "finetune/loss",
        "ppl",
        "avg_no_mmlu",
        "SCATTER",
        "PARALLEL",
        "DIFFERENCE",
    ]


def test_the_lines_of_a_benchmark_are_runs_once_each(uri, tmp_path):
    folder = tmp_path / "results/efficiency"
    folder.mkdir(parents=True)
    (folder / "efficiency.csv").write_text(
        "model,run,batch,ms_per_token,commit\n8b,teacher,1,6.5,abc\n8b,lizard,2,,0ther\n"
    )
    calls = [
        {
            "command": "bench",
            "started": "2026-11-21T04:00:00+00:00",
            "commit": "abcdef",
            "versions": {"torch": "2.11"},
        }
    ]
    (folder / "efficiency.provenance.json").write_text(
        json.dumps({"gpu": "H200", "timing": "median", "sessions": calls})
    )
    (folder / "figure5.provenance.json").write_text(
        json.dumps({"artefact": "lizard_figure5", "scale": "", "cells": {}})
    )
    (folder / "whole.json").write_text(
        json.dumps({"command": "whole", "rows": [{"scale": "smoke", "seconds": 3}]})
    )
    assert [benchmarks.write(uri, tmp_path / "results") for _ in range(2)] == [3, 0]
    found = {
        run.data.params["run"]: run
        for run in runs(uri, "tags.`relinear.kind` = 'benchmark'", "benchmarks")
        if "run" in run.data.params
    }
    first = found["teacher"]
    assert first.data.metrics == {"batch": 1, "ms_per_token": 6.5} and found["lizard"].data.metrics == {
        "batch": 2
    }
    wanted = {"command": "bench", "git.commit": "abcdef", "hardware.gpu": "H200", "versions.torch": "2.11"}
    assert wanted.items() <= first.data.tags.items() and first.info.start_time == 1795233600000
    other = found["lizard"].data.tags
    assert other["git.commit"] == "0ther" and "versions.torch" not in other, "no call of that commit is known"
    above = client(uri).get_run(first.data.tags["mlflow.parentRunId"])
    files = [file.path for file in client(uri).list_artifacts(above.info.run_id)]
    assert (
        files == ["efficiency.csv", "efficiency.provenance.json"]
        and above.info.run_name == "efficiency/efficiency"
    )
    assert benchmarks.write(uri, tmp_path / "results", but=folder) == 0
    assert benchmarks.write(uri, folder) == 0, "the same lines, from another folder up"
    assert ui.comparisons(uri, "http://127.0.0.1:1") == {}, "benchmarks are no rows"


def test_seeds_stand_below_their_row_and_shared_stages_below_one_run(uri, tmp_path):
    write_row(tmp_path / "results")
    write_row(tmp_path / "results", "lizard-seed1", seed=1)
    write_folder(
        tmp_path / "results",
        record(stage="model", run="tiny", tags={"row": "tiny", "scale": "mini"}),
        {"parameters": 7},
    )
    mirror.rebuild(uri, tmp_path / "results")
    top = [r for r in runs(uri) if "mlflow.parentRunId" not in r.data.tags]
    assert sorted(r.info.run_name for r in top) == ["inputs", "lizard"]
    assert [r.info.run_name for r in runs(uri, "tags.`relinear.kind` = 'row'")] == ["lizard"]
    seed = parent(uri, "lizard-seed1").data
    assert seed.tags["mlflow.parentRunId"] == parent(uri).info.run_id
    assert (seed.tags["base_run"], seed.tags["seed"], seed.params["seed"]) == ("lizard", "1", "1")
    assert child(uri, "model").data.tags["mlflow.parentRunId"] == parent(uri, "inputs").info.run_id


def test_rows_that_are_planned_are_those_that_come_and_wait_for_their_first_stage(uri, tmp_path):
    plan = Plan(scale="smoke", results=tmp_path / "results")
    wanted = rows.plan_rows(plan, ["lizard-seed1", "hedgehog"])
    for _ in range(2):
        mirror.init(uri, "smoke", wanted)
    made = {r.data.tags["relinear.row"]: r for r in runs(uri, scale="smoke")}
    assert set(made) == {"inputs", "lizard", "lizard-seed1", "hedgehog"} and {
        r.info.status for r in made.values()
    } == {"SCHEDULED"}
    lizard = made["lizard-seed1"]
    assert {
        "window": "128",
        "gate": "sigmoid",
        "rank": "8",
        "seed": "1",
        "teacher": "tiny",
    }.items() <= lizard.data.params.items()
    assert lizard.data.tags["mlflow.parentRunId"] == made["lizard"].info.run_id
    node = plan.node("distill", "lizard-seed1")
    config, tags = plan.settings(node), rows.tags_of(plan, node)
    with live.Tracker(
        uri, **mirror.describe(record(scale="smoke", run="lizard-seed1", config=config, tags=tags, seed=1))
    ):
        assert parent_of(uri, "lizard-seed1").info.status == "RUNNING"
    assert parent_of(uri, "lizard-seed1").info.run_id == lizard.info.run_id
    assert parent_of(uri, "lizard-seed1").data.params == lizard.data.params


def parent_of(uri, run):
    [found] = runs(uri, f"tags.`relinear.row` = '{run}'", scale="smoke")
    return found


@pytest.mark.parametrize(
    ("scale", "name", "rates"),
    [
        ("mini", "lizard", {"distill.lr": "0.01", "finetune.lr": "0.001"}),
        ("mini", "t2r", {"finetune.lr": "0.001", "finetune.method_lr": "0.001"}),
        ("smollm2", "lizard", {"distill.lr": "0.001", "finetune.lr": "0.0005"}),
    ],
)
def test_a_row_shows_the_learning_rates_that_it_is_trained_at(scale, name, rates):
    [row] = [row for row in rows.plan_rows(Plan(scale=scale), [name]) if row.name == name]
    assert {param: row.params[param] for param in rates} == rates
    assert f"at a rate of {rates['finetune.lr']}" in row.sentence


@pytest.mark.parametrize("step", ["distill", "finetune"])
def test_an_older_record_shows_the_rate_that_its_history_has(step):
    """Records of before have the rates of runs.yaml, and beside them the floor that the training applied."""
    folder = ROOT / "results/reference/table2_mini/runs/lizard" / step
    record = mirror.read_record(folder)
    highest = max(line["lr"] for line in nodes.curve(folder) if "lr" in line)
    assert record["config"]["recipe"]["lr"] < highest == float(rows.row_of([record]).params[f"{step}.lr"])


def test_a_row_that_is_set_otherwise_is_another_row_and_the_earlier_one_stays(uri):
    for rate in (0.001, 0.002):
        mirror.init(uri, "mini", [rows.row_of([trained("distill", {"lr": rate})])])
    assert parent(uri).data.params["distill.lr"] == "0.002"
    [earlier] = runs(uri, "tags.`relinear.earlier_row` = 'lizard'")
    assert (earlier.data.params["distill.lr"], earlier.data.tags["relinear.kind"]) == (
        "0.001",
        "earlier",
    ), "not among the rows"


def test_tables_figures_and_claims_are_artifacts_of_a_run_of_their_own(uri, tmp_path):
    write_folder(tmp_path / "results", record(), {})
    drawn, other = tmp_path / "results/mini/comparison", tmp_path / "results/reference/mini/comparison"
    for folder in (drawn, other):
        folder.mkdir(parents=True)
        (folder / "table2.provenance.json").write_text('{"scale": "mini"}')
        for name in ("table2.md", "table2.csv", "table2.claims.csv"):
            (folder / name).write_text(folder.as_posix())
    (other.parent / mirror.MANIFEST).write_text("{}")  # committed, and so not one's own
    for _ in range(2):
        mirror.rebuild(uri, tmp_path / "results")
    mirror.tables(uri, tmp_path / "results")
    [run] = runs(uri, "tags.`relinear.kind` = 'tables'")
    assert (run.info.run_name, run.info.status) == ("tables and figures", "FINISHED")
    assert [f.path for f in client(uri).list_artifacts(run.info.run_id)] == ["mini"], "no copy of a copy"
    files = client(uri).list_artifacts(run.info.run_id, "mini/comparison")
    assert [f.path.rpartition("/")[2] for f in files] == [
        "table2.claims.csv",
        "table2.csv",
        "table2.md",
        "table2.provenance.json",
    ]
    assert (
        Path(client(uri).download_artifacts(run.info.run_id, "mini/comparison/table2.md")).read_text()
        == drawn.as_posix()
    )


def test_drawings_of_committed_results_are_imported_with_them(uri, tmp_path, capsys):
    """Also of results of another budget, whose drawings name the scale alone."""
    about, out = record(root="mini-x4"), tmp_path / "committed/mini_four"
    folder = write_folder(tmp_path / "results", about, {})
    about["artefacts"] = {
        name: {"sha256": sha256(folder / name), "bytes": 1} for name in ("metrics.json", "history.jsonl")
    }
    (folder / "run.json").write_text(json.dumps(about))
    names = {name: f"comparison/table2.{name}" for name in ("csv", "md", "claims.csv", "provenance.json")}
    told = {"artefact": "comparison/table2", "scale": "mini", "sources": {}, "cells": {}}
    for ending, name in names.items():
        (tmp_path / "results/mini-x4" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "results/mini-x4" / name).write_text(
            {"provenance.json": json.dumps(told), "claims.csv": "claim\none\n"}.get(ending, ending)
        )
    committed.export(tmp_path / "results/mini-x4", out)
    for file in ("provenance.json", "claims.csv"):
        assert (out / file).is_file() and not list(out.glob(f"*/*.{file}"))
    assert [mirror.import_folder(uri, out) for _ in range(2)] == [1, 0]
    [run] = runs(uri, "tags.`relinear.kind` = 'tables'", "mini-x4-reference")
    copied = [f.path for of in (None, "comparison") for f in client(uri).list_artifacts(run.info.run_id, of)]
    assert copied == [
        "claims.csv",
        "comparison",
        "provenance.json",
        "comparison/table2.csv",
        "comparison/table2.md",
    ]
    assert "provenance.json tells of all" in run.data.tags["mlflow.note.content"]
    assert capsys.readouterr().err == ""
    (out / "provenance.json").write_text(json.dumps({"../../elsewhere": told}))
    assert mirror.import_folder(uri, out) == 0
    assert "a drawing is <paper>/<stem>; got '../../elsewhere'; what it tells" in capsys.readouterr().err


# Processes

STAGE = """
import sys, time
from relinear.tracking import live as tracking
from relinear.errors import UserError
tracking.install_signal_handlers()
uri, stage = sys.argv[1:]
about = dict(scale="mini", run="lizard", stage=stage, key="k1", params={}, tags={"method": "lizard"}, datasets=[], attempt=1)
"""  # noqa: E501
ENDLESS = (
    STAGE
    + """
with tracking.Tracker(uri, **about) as tracker:
    tracker.log({"loss": 1.0}, 1)
    print("open", flush=True)
    time.sleep(60)
"""
)
WRITER = (
    STAGE
    + """
tracking.FLUSH_SECONDS = 0.05
with tracking.Tracker(uri, **about) as tracker:
    for step in range(300):
        tracker.log({"loss": step, "lr": 1.0}, step)
        time.sleep(0.002)
"""
)


def test_a_sigkilled_run_is_swept_by_the_next_attempt(uri):
    process = start(ENDLESS, uri, "distill")
    assert process.stdout.readline() == "open\n"
    process.kill()
    process.communicate()
    assert (child(uri).info.status, parent(uri).info.status) == ("RUNNING", "RUNNING")
    with opened(uri, stage="finetune"):
        pass
    assert child(uri).info.status == "RUNNING"  # another stage must not sweep what may be alive
    with opened(uri, attempt=2):
        assert child(uri).info.status == "KILLED"
    assert [child(uri, attempt=n).data.tags["current"] for n in (1, 2)] == ["false", "true"]
    assert "RUNNING" not in {r.info.status for r in runs(uri)}


def test_sigterm_closes_the_run(uri):
    process = start(ENDLESS, uri, "distill")
    assert process.stdout.readline() == "open\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 143
    assert (child(uri).info.status, parent(uri).info.status) == ("KILLED", "KILLED")
    assert child(uri).data.metrics == {"loss": 1.0}


PRESSED = (
    STAGE
    + """
import os, signal

class Pressed:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[2]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Pressed())
with tracking.Tracker(uri, **about | {"stage": "distill"}) as tracker:
    print("open", flush=True)
"""
)


@pytest.mark.parametrize("module", ["mlflow", "mlflow.artifacts", "mlflow.genai", "mlflow.exceptions"])
def test_a_signal_while_mlflow_is_imported_ends_the_run_and_nothing_else_is_told(uri, module):
    process = start(PRESSED, uri, module)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 143


FAILING = (
    STAGE
    + """
import os, signal
close = tracking.Tracker._close

def interrupted(self, *args):
    os.kill(os.getpid(), signal.SIGTERM)
    close(self, *args)

tracking.Tracker._close = interrupted
with tracking.Tracker(uri, **about) as tracker:
    raise RuntimeError("the other process is gone")
"""
)


def test_sigterm_while_a_failure_is_recorded_does_not_lose_it(uri):
    process = start(FAILING, uri, "distill")
    assert "the other process is gone" in process.communicate(timeout=300)[1]
    assert process.returncode == 1
    assert (child(uri).info.status, parent(uri).info.status) == ("FAILED", "FAILED")


def test_stages_in_parallel_share_a_new_store_and_one_parent(tmp_path, interpreter):
    uri = f"sqlite:///{tmp_path / 'new' / 'mlflow.db'}"
    stages = ("distill", "finetune", "perplexity", "fidelity")
    processes = [start(WRITER, uri, stage, python=interpreter) for stage in stages]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, errors
    assert "WARNING" not in "".join(errors)
    for stage in stages:
        run = child(uri, stage)
        assert run.data.tags["mlflow.parentRunId"] == parent(uri).info.run_id
        assert run.info.status == "FINISHED" and run.data.metrics == {"loss": 299, "lr": 1}
        assert len(client(uri).get_metric_history(run.info.run_id, "loss")) == 300


def test_what_a_killed_init_left_does_not_matter(tmp_path):
    (tmp_path / "mlflow.db.new").write_bytes(b"half a database")
    for _ in range(2):
        mirror.init(f"sqlite:///{tmp_path / 'mlflow.db'}", "smoke")
    assert runs(f"sqlite:///{tmp_path / 'mlflow.db'}", scale="smoke") == []


def test_importing_the_module_imports_no_mlflow():
    process = start("import sys, relinear.tracking.live; print('mlflow' in sys.modules)")
    assert process.communicate()[0] == "False\n"


# A server


@pytest.fixture(scope="module")
def server(tmp_path_factory, interpreter) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("server"), interpreter) as address:
        yield address


def test_nodes_in_parallel_share_a_server_and_one_parent(server, interpreter):
    """A server has no lock as a file has, so the rows are made before the first job."""
    mirror.init(server, "mini", [rows.row_of([record()])])
    assert parent(server).info.status == "SCHEDULED"
    stages = ("distill", "finetune", "perplexity", "fidelity")
    processes = [start(WRITER, server, stage, python=interpreter) for stage in stages]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, errors
    assert "WARNING" not in "".join(errors)
    for stage in stages:
        run = child(server, stage)
        assert run.info.status == "FINISHED" and run.data.metrics == {"loss": 299, "lr": 1}
        assert run.data.tags["mlflow.parentRunId"] == parent(server).info.run_id


def test_the_commands_use_the_server_that_the_environment_names(server, tmp_path, interpreter):
    run_measure(server, tmp_path / "first", "perplexity", scale="smoke")
    write_folder(tmp_path / "results", record(stage="distill", scale="smoke"), {})

    def relinear(*args: str) -> str:
        environment = {**os.environ, "PYTHONPATH": SOURCE, "MLFLOW_TRACKING_URI": server}
        command = [interpreter, "-m", "relinear.cli", "track", *args]
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    relinear("init", "--scale", "smoke")
    assert relinear("rebuild") == "1 runs restored\n"
    assert sorted(r.info.run_name for r in runs(server, scale="smoke")) == [
        "lizard",
        "lizard/distill",
        "lizard/perplexity",
    ]
    assert {"run.json", "metrics.json"} <= {
        f.path for f in client(server).list_artifacts(child_of(server, "distill").info.run_id)
    }
    assert server in relinear("ui")
    assert not list(tmp_path.rglob("mlflow.db*")), "a store beside the server's"


def child_of(uri, stage):
    [run] = runs(uri, f"tags.stage = '{stage}'", scale="smoke")
    return run


@pytest.mark.parametrize(("kind", "warns"), [("nfs4", True), ("lustre", True), ("ext4", False)])
def test_sqlite_on_a_network_file_system_is_warned_of(
    tmp_path, monkeypatch, capsys, empty_store, kind, warns
):
    monkeypatch.setattr(store, "MOUNTS", tmp_path / "mounts")
    (tmp_path / "mounts").write_text(
        f"/dev/vda / ext4 rw 0 0\nfiler:/home {tmp_path / 'home'} {kind} rw 0 0\n"
    )
    (tmp_path / "home").mkdir()
    shutil.copy(empty_store, tmp_path / "home/mlflow.db")
    mirror.init(f"sqlite:///{tmp_path / 'home/mlflow.db'}")
    error = capsys.readouterr().err
    assert (f"({kind})" in error and "MLFLOW_TRACKING_URI" in error) if warns else not error


# A store that fails


def test_an_unreachable_store_costs_one_warning_and_no_run(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    with opened(f"sqlite:///{tmp_path / 'file' / 'mlflow.db'}") as tracker:
        for step in range(2000):
            tracker.log({"loss": 1.0}, step)
        tracker.finish(write_folder(tmp_path, record(), {}))
    assert tracker.run_id == ""
    assert capsys.readouterr().err.count("no more MLflow tracking of lizard/distill") == 1


@pytest.mark.parametrize(
    "uri", ["sqlite:///", "sqlite:////proc/nope/m.db", "nonsense://x", "not a uri", "sqlite:///broken.db"]
)
def test_a_store_that_there_cannot_be_is_one_line_before_the_first_job(uri, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("broken.db").write_text("no database at all\n" * 99)
    write_folder(tmp_path / "results", record(), {})
    for verb in (
        lambda: mirror.init(uri, "mini"),
        lambda: mirror.rebuild(uri, "results"),
        lambda: mirror.import_folder(uri, "results"),
    ):
        with pytest.raises(store.StoreError, match=r"^MLflow's store .* failed: \w+: .*$"):
            verb()
    assert {path.name for path in tmp_path.iterdir()} <= {"broken.db", "broken.db.lock", "results"}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    cli.track_init(
        scale="smoke",
        rows="lizard",
        **{name: default for name, (_, default) in cli.PLAN.items() if name != "scale"},
    )
    said = capsys.readouterr().err
    assert said.startswith("WARNING: MLflow's store") and len(said.splitlines()) == 2, "it is no error"


def test_without_mlflow_a_run_costs_one_warning(uri, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)  # an import of it fails
    with opened(uri) as tracker:
        tracker.log({"loss": 1.0}, 1)
        tracker.finish(write_folder(tmp_path, record(), {}))
    assert tracker.run_id == ""
    assert capsys.readouterr().err.count("no more MLflow tracking of lizard/distill") == 1


def test_the_warning_hides_a_password(capsys):
    opened("postgresql://user:secret@host/db")._give_up(OSError("no postgresql://user:secret@host/db"))
    assert "secret" not in capsys.readouterr().err


def test_a_store_that_breaks_midway_costs_one_warning_and_no_run(uri, capsys, monkeypatch):
    monkeypatch.setattr(live, "FLUSH_SECONDS", 0.0)
    with opened(uri) as tracker:
        Path(uri.removeprefix("sqlite:///")).write_bytes(b"no database at all" * 4096)
        for step in range(20):
            tracker.log({"loss": 1.0}, step)
    assert capsys.readouterr().err.count("no more MLflow tracking of lizard/distill") == 1


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def foreign(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE recipes (name TEXT)")
        database.commit()


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "mine").write_text("kept")


def garbled(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096 * 20 : 4096 * 60] = b"x" * 4096 * 40
    path.write_bytes(data)


BROKEN = {
    "cut": (cut, "malformed"),
    "foreign": (foreign, "it lacks the tables experiments, latest_metrics"),
    "a folder": (folder, "it is a folder"),
    "a text": (lambda path: path.write_text("no database at all\n" * 999), "file is not a database"),
    "garbled": (garbled, "malformed"),
    "empty": (lambda path: path.write_bytes(b""), "it lacks the tables"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_rebuild_sets_a_broken_store_aside_and_says_so(uri, tmp_path, capsys, interpreter, case):
    """The remedy that the warning names: once, twice, and after another accident."""
    damage, why = BROKEN[case]
    path = Path(uri.removeprefix("sqlite:///"))
    write_folder(tmp_path / "results", record(), {"loss": 1.5})
    for number in ("", "-2"):
        damage(path)
        with opened(uri) as tracker:
            tracker.log({"loss": 1.0}, 1)
        assert tracker.run_id == "" and "`relinear track rebuild` restores" in capsys.readouterr().err
        content = path.read_bytes() if path.is_file() else None
        done = subprocess.run(
            [interpreter, "-m", "relinear.cli", "track", "rebuild"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            env=quiet(uri),
        )
        aside = tmp_path / f"results/mlflow.db.broken{number}"
        assert done.returncode == 0 and done.stdout == "1 runs restored\n", done.stderr
        assert f"{why}" in done.stderr and f"it is set aside as {aside}, and a new one is made" in done.stderr
        assert (aside / "mine").read_text() == "kept" if content is None else aside.read_bytes() == content
        with closing(sqlite3.connect(path)) as database:
            assert database.execute("SELECT count(*) FROM runs").fetchone() == (2,), (
                "the row's and the stage's"
            )


def quiet(uri: str) -> dict[str, str]:
    return {
        **os.environ,
        "MLFLOW_TRACKING_URI": uri,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'kernels'}",
    }


def test_a_store_that_may_be_anybody_s_or_is_busy_or_whole_is_left_alone(uri, tmp_path):
    path = Path(uri.removeprefix("sqlite:///"))
    assert store.set_aside_broken(uri, tmp_path / "results") is None
    elsewhere = tmp_path / "elsewhere/mine.db"
    elsewhere.parent.mkdir()
    elsewhere.write_text("no database at all\n" * 999)
    for at in (
        f"sqlite:///{elsewhere}",
        f"sqlite:///{elsewhere.parent}",
        "sqlite:///",
        "http://localhost:1",
        "sqlite:////proc/nope/m.db",
    ):
        assert store.set_aside_broken(at, tmp_path / "results") is None
    with closing(sqlite3.connect(path)) as database:
        database.execute("BEGIN EXCLUSIVE")
        with pytest.MonkeyPatch.context() as patch:
            connect = sqlite3.connect
            patch.setattr(
                store.sqlite3, "connect", lambda *args, **more: connect(*args, **more | {"timeout": 0.1})
            )
            assert store.set_aside_broken(uri, tmp_path / "results") is None
    assert (
        sorted(p.name for p in path.parent.iterdir()) == ["mlflow.db", "mlflow.db.lock"]
        and elsewhere.is_file()
    )


def test_a_write_that_a_limit_stops_ends_the_mirror_of_that_stage_alone(uri, tmp_path, capsys, monkeypatch):
    import resource

    monkeypatch.setattr(live, "FLUSH_SECONDS", 0.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(uri) as tracker:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
        try:
            for step in range(20):
                tracker.log({"loss": 1.0}, step)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert capsys.readouterr().err.count("no more MLflow tracking of lizard/distill") == 1
    with opened(uri, stage="finetune") as tracker:
        tracker.log({"loss": 1.0}, 1)
    assert not capsys.readouterr().err
    assert (
        child(uri, "finetune").info.status == "FINISHED"
        and child(uri, "finetune").data.metrics["loss"] == 1.0
    )


def test_what_a_limit_leaves_of_a_store_that_is_made_hinders_no_later_one(tmp_path):
    import resource

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    done = subprocess.run(
        [sys.executable, "-c", f"from relinear.tracking import mirror; mirror.init({uri!r}, 'mini')"],
        capture_output=True,
        text=True,
        check=False,
        env=quiet(uri),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)),
    )
    assert done.returncode == 1 and "disk I/O error" in done.stderr
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["mlflow.db.lock", "mlflow.db.new"]
    (tmp_path / "mlflow.db.new-journal").write_bytes(b"of another file")
    mirror.init(uri, "mini")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mlflow.db", "mlflow.db.lock"]


def test_a_lock_is_waited_for_longer_than_a_slow_disk_takes():
    assert store.lock("sqlite:///x.db").timeout >= 600


@pytest.fixture
def between(server, monkeypatch) -> Iterator[type[Between]]:
    """It is given two seconds to answer, lest a busy machine's own seconds are taken for those of waiting."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    with standing_before(server) as handler:
        yield handler


def test_a_server_that_fails_once_is_tried_again(between, capsys):
    with opened(between.url, run="once") as tracker:
        between.failures = 1
        tracker.log({"loss": 1.0}, 1)
    assert between.failures == 0
    [run] = runs(between.server_address, "tags.run = 'once'")
    assert run.data.metrics == {"loss": 1.0} and capsys.readouterr().err == ""


@pytest.mark.parametrize("how", ["fails", "is silent", "is not there"])
def test_a_server_that_cannot_be_used_costs_one_warning_and_seconds_and_is_filled_later(
    between, tmp_path, capsys, how
):
    """Before the first job (`relinear track init`), in a stage and after it."""
    run, address = f"while_it_{how.replace(' ', '_')}", between.url
    between.failures, between.silent = (10**6 if how == "fails" else 0), how == "is silent"
    if how == "is not there":
        address = f"http://name:secret@127.0.0.1:{free_port()}"
    begun = time.monotonic()
    with opened(address, run=run) as tracker:
        for step in range(2000):
            tracker.log({"loss": 1.0}, step)
        tracker.finish(write_folder(tmp_path / "results", record(run=run), {}))
    error = capsys.readouterr().err
    assert tracker.run_id == "" and time.monotonic() - begun < 20
    assert error.count(f"no more MLflow tracking of {run}/distill") == 1
    assert address.replace("name:secret", "***") in error and "secret" not in error
    with pytest.raises(UserError, match=r"store http://\*\*\*@127.0.0.1:\d+ failed"):
        mirror.init(address, "mini")
    between.failures, between.silent = 0, False
    assert mirror.rebuild(between.url, tmp_path / "results") == 1
    assert [r.info.status for r in runs(between.server_address, f"tags.run = '{run}'")] == ["FINISHED"]


@pytest.mark.parametrize("how", ["fails", "is silent"])
def test_a_server_that_fails_in_the_middle_of_a_stage_costs_one_warning_and_seconds_and_is_filled_later(
    between, tmp_path, capsys, how
):
    """The store has everything from before the failure. When it answers again it gets the rest, once."""
    run = f"until_it_{how.replace(' ', '_')}"
    with opened(between.url, run=run) as tracker:
        tracker.log({"loss": 2.0}, 1)
        tracker._flush()
        begun = time.monotonic()
        between.failures, between.silent = (10**6 if how == "fails" else 0), how == "is silent"
        for step in range(2, 3000):
            tracker.log({"loss": 1.0}, step)
        tracker.finish(write_folder(tmp_path / "results", record(run=run, mlflow_run_id=tracker.run_id), {}))
    error = capsys.readouterr().err
    assert time.monotonic() - begun < 30
    assert (
        error.count(f"no more MLflow tracking of {run}/distill") == 1
        and "***@" in error
        and "secret" not in error
    )
    [left] = runs(between.server_address, f"tags.run = '{run}'")
    assert left.info.status == "RUNNING" and left.data.metrics == {"loss": 2.0}
    between.failures, between.silent = 0, False
    assert [mirror.rebuild(between.url, tmp_path / "results") for _ in range(2)] == [1, 0]
    current = runs(between.server_address, f"tags.run = '{run}' and tags.current = 'true'")
    assert [
        (r.info.status, len(client(between.server_address).get_metric_history(r.info.run_id, "loss")))
        for r in current
    ] == [("FINISHED", 3)]


def test_a_server_that_answers_a_byte_at_a_time_costs_one_warning_and_no_run(tmp_path, capsys, monkeypatch):
    """A timeout of requests' is one of silence, and each byte ends a silence."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setattr(store, "SECONDS", 5)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            with suppress(OSError):
                taken, _ = listening.accept()
                taken.recv(65536)
                taken.sendall(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n"
                )
                while True:
                    taken.sendall(b" ")
                    time.sleep(0.2)

        threading.Thread(target=drip, daemon=True).start()
        begun = time.monotonic()
        with opened(f"http://127.0.0.1:{listening.getsockname()[1]}") as tracker:
            tracker.log({"loss": 1.0}, 1)
            tracker.finish(write_folder(tmp_path, record(), {}))
        assert time.monotonic() - begun < 20 and tracker.run_id == ""
    error = capsys.readouterr().err
    assert (
        error.count("no more MLflow tracking of lizard/distill") == 1
        and "no whole answer within 5 s" in error
    )


def test_a_mistake_of_the_caller_is_raised(uri, tmp_path):
    with pytest.raises(TypeError), opened(uri) as tracker:
        tracker.log({"loss": object()}, 1)
    with pytest.raises(TypeError), opened(uri) as tracker:
        tracker._store(lambda: 1 + "a")
    folder = write_folder(tmp_path, record(key="k2"), {})
    with pytest.raises(ValueError, match="has key 'k2', this run has 'k1'"), opened(uri) as tracker:
        tracker.finish(folder)


# Rebuild


def content(uri, run) -> dict:
    """Everything of a run but ids and times of its own."""
    store = client(uri)
    history = {}
    for name in run.data.metrics:
        points = store.get_metric_history(run.info.run_id, name)
        # The times of history.jsonl are kept; final metrics bear the time at which they were written.
        history[name] = [
            (p.step, p.value, p.timestamp if p.timestamp < HISTORY_END else "end") for p in points
        ]
    tags = {
        name: re.sub("runs/[0-9a-f]{32}", "runs/...", text)
        for name, text in run.data.tags.items()
        if name != "mlflow.parentRunId"
    }
    files = [file.path for file in store.list_artifacts(run.info.run_id)]
    data = [(d.dataset.name, d.dataset.digest, d.tags[0].value) for d in run.inputs.dataset_inputs]
    status = (run.info.run_name, run.info.status)
    return {
        "status": status,
        "params": run.data.params,
        "tags": tags,
        "history": history,
        "in": data,
        "out": files,
    }


def contents(uri, scale="mini") -> list[dict]:
    return sorted(
        (content(uri, run) for run in runs(uri, scale=scale)),
        key=lambda c: (c["status"], c["tags"].get("key", "")),
    )


@pytest.fixture
def second(tmp_path, empty_store) -> str:
    shutil.copy(empty_store, tmp_path / "second.db")
    return f"sqlite:///{tmp_path / 'second.db'}"


def test_a_rebuilt_store_equals_the_first(uri, second, tmp_path):
    results = tmp_path / "results"
    run_stage(uri, results, {"loss": 0.5, "mse_per_head": [[0.1]]})
    run_measure(uri, results, "perplexity")
    run_stage(uri, results, {"parameters": 7}, stage="model", run="tiny")
    assert mirror.rebuild(second, results) == 3
    assert contents(second) == contents(uri)
    for stage in ("distill", "perplexity"):
        again, first = child(second, stage), child(uri, stage)
        assert abs(again.info.start_time - first.info.start_time) < 5000
        assert again.info.end_time - again.info.start_time == 100
        assert again.data.tags["mlflow.parentRunId"] == parent(second).info.run_id
        assert again.data.tags["mlflow_run_id"] == first.info.run_id
    assert [p.value for p in client(second).get_metric_history(child(second).info.run_id, "loss")][:3] == [
        line["loss"] for line in HISTORY
    ]


def test_the_ui_is_opened_at_the_runs_of_each_experiment(uri, tmp_path):
    assert links(uri, "http://127.0.0.1:1") == {}
    run_stage(uri, tmp_path / "results", {"loss": 0.5})
    number = client(uri).get_experiment_by_name("relinear-mini").experiment_id
    assert links(uri, "http://127.0.0.1:1") == {
        "relinear-mini": f"http://127.0.0.1:1/#/experiments/{number}/runs?workflowType=machine_learning"
    }  # fmt: skip


def test_a_browser_is_opened_where_there_is_a_display_once_the_ui_answers(between, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert not ui.open_later("http://127.0.0.1:1", "link")
    opened_links, started = [], []
    monkeypatch.setattr(ui.webbrowser, "open", lambda link: opened_links.append(link) or True)
    monkeypatch.setattr(ui.subprocess, "Popen", lambda command, **_: started.append(command))
    monkeypatch.setenv("DISPLAY", ":0")
    assert ui.open_later("http://127.0.0.1:1", "link") and started[0][-2:] == ["http://127.0.0.1:1", "link"]
    assert not ui.open_once_up("http://127.0.0.1:1", "link", seconds=0.1) and opened_links == []
    assert ui.open_once_up(between.server_address, "link") and opened_links == ["link"]


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [(signal.SIGINT, 0, "relinear: MLflow has ended\n"), (signal.SIGTERM, 143, "")],
)
def test_the_ui_that_is_interrupted_or_ended_ends_its_server_in_a_line(
    tmp_path, interpreter, number, status, said
):
    port = free_port()
    elsewhere = ("MLFLOW_TRACKING_URI", "DISPLAY", "WAYLAND_DISPLAY")
    environment = {name: value for name, value in os.environ.items() if name not in elsewhere}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [interpreter, "-m", "relinear.cli", "track", "ui", "--port", str(port)],
            cwd=tmp_path,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            wait_for_server(process, port, tmp_path / "log")
            before = (tmp_path / "log").stat().st_size
        finally:
            os.killpg(process.pid, number)
            process.wait(300)
        assert process.returncode == status, (tmp_path / "log").read_text()
        assert (tmp_path / "log").read_text()[before:] == said
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_an_import_shows_how_far_it_is(uri, tmp_path, monkeypatch, capsys):
    write_row(tmp_path / "theirs")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    mirror.import_folder(uri, tmp_path / "theirs")
    assert "5/5" in capsys.readouterr().err


def test_rebuilding_twice_adds_nothing(uri, second, tmp_path):
    run_stage(uri, tmp_path / "results", {"loss": 0.5})
    assert mirror.rebuild(uri, tmp_path / "results") == 0  # the first store lacks nothing
    assert mirror.rebuild(second, tmp_path / "results") == 1
    ids = {run.info.run_id for run in runs(second)}
    assert mirror.rebuild(second, tmp_path / "results") == 0
    assert {run.info.run_id for run in runs(second)} == ids


def test_what_is_imported_stays_apart_from_ones_own(uri, tmp_path):
    """This also holds for a copy of one's own runs that lies among them."""
    own = tmp_path / "results"
    run_stage(uri, own, {"loss": 0.5})
    run_measure(uri, own, "perplexity")
    before = contents(uri)
    theirs = shutil.copytree(own / "mini", own / "a" / "mini")
    (theirs / mirror.MANIFEST).write_text("{}")
    into_a_store(theirs)
    assert mirror.rebuild(uri, own) == 0
    assert [mirror.import_folder(uri, own / "a") for _ in range(2)] == [2, 0]
    assert contents(uri) == before
    copies = contents(uri, "mini-reference")
    for field in ("status", "params", "history", "in", "out"):
        assert [c[field] for c in copies] == [c[field] for c in before], field
    (tmp_path / "empty").mkdir()
    for folder, label, why in (
        (own, "a/b", "a label is of"),
        (own / "b", "x", "no folder"),
        (tmp_path / "empty", "x", "holds no finished stages"),
    ):
        with pytest.raises(UserError, match=why):
            mirror.import_folder(uri, folder, label)


def into_a_store(results: Path) -> None:
    """Pack the nodes of a scale's results into a store, and remove their own records, metrics and curves."""
    files = ("run.json", "metrics.json", "history.jsonl")
    texts = {
        folder: [path.read_bytes() if (path := folder / name).exists() else None for name in files]
        for folder in nodes.nodes(results)
    }
    lines = {
        folder: curve and [json.loads(line) for line in curve.splitlines()]
        for folder, (*_, curve) in texts.items()
    }
    packed = {
        folder: nodes.Packed(run, metrics, curve=lines[folder]) for folder, (run, metrics, _) in texts.items()
    }
    nodes.write(results, {folder.relative_to(results).as_posix(): node for folder, node in packed.items()})
    for folder in packed:
        for name in files:
            (folder / name).unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("lines", "kept"), [(0, []), (1, [1]), (50, [*range(1, 51)]), (251, [*range(1, 251, 6), 251])]
)
def test_of_a_committed_curve_some_points_evenly_and_the_last_are_imported(uri, tmp_path, lines, kept):
    folder = write_folder(tmp_path / "theirs", record(), {})
    curve = [
        json.dumps({"step": n, "time": 1.7e9 + n, "loss": 1 / n, "lr": 0.1}) for n in range(1, lines + 1)
    ]
    (folder / "history.jsonl").write_text("\n".join(curve))
    into_a_store(tmp_path / "theirs/mini")
    mirror.import_folder(uri, tmp_path / "theirs", "long")
    [run] = runs(uri, "tags.stage = 'distill'", scale="mini-long")
    points = {
        name: [p.step for p in client(uri).get_metric_history(run.info.run_id, name)]
        for name in ("loss", "lr")
    }
    assert points == {"loss": kept, "lr": kept} and len(kept) <= mirror.SHOWN + 1
    assert run.data.metrics.get("loss") == (1 / lines if lines else None)


def test_all_that_is_committed_is_imported_at_once_each_folder_apart(uri, tmp_path, monkeypatch, capsys):
    for name, lr in (("first", 0.1), ("second", 0.2)):
        write_folder(tmp_path / "all" / name, record(config={"lr": lr}), {})
        written = {
            path.relative_to(tmp_path / "all" / name).as_posix(): sha256(path)
            for path in (tmp_path / "all" / name).rglob("*.json*")
        }
        (tmp_path / "all" / name / mirror.MANIFEST).write_text(
            json.dumps({"scale": "smoke", "files": written})
        )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    command = [
        "track",
        "import",
        str(tmp_path / "all"),
        "--results",
        str(tmp_path / "results"),
        "--label",
        "theirs",
    ]
    for count in (2, 0):
        cli.app(command, standalone_mode=False)
        assert capsys.readouterr().out == f"{count} runs imported\n"
    for name, lr in (("first", "0.1"), ("second", "0.2")):
        [run] = runs(uri, "tags.stage = 'distill'", scale=f"mini-theirs-{name}")
        assert run.data.params["lr"] == lr
    (tmp_path / "all" / "second" / "mini/runs/lizard/distill/metrics.json").write_text("{ }")
    with pytest.raises(UserError, match="second/mini/runs/lizard/distill/metrics.json is not what"):
        cli.app(command, standalone_mode=False)


def test_only_the_folders_of_stages_are_rebuilt(uri, second, tmp_path):
    run_stage(uri, tmp_path / "results", {"loss": 0.5})
    shutil.rmtree(tmp_path / "results" / "mini")  # mlflow still has a copy of this run.json
    run_stage(uri, tmp_path / "results", {"loss": 0.4}, attempt=2)
    assert mirror.rebuild(second, tmp_path / "results") == 1
    assert child(second, attempt=2).data.metrics["loss"] == 0.4


def test_rebuild_adds_the_missing_attempt_and_makes_the_latest_current(uri, tmp_path):
    with pytest.raises(RuntimeError), opened(uri):
        raise RuntimeError("first attempt")
    later = datetime.fromtimestamp(time.time() + 60, UTC).isoformat()
    write_folder(tmp_path / "results", record(attempt=2, started=later), {})
    assert mirror.rebuild(uri, tmp_path / "results") == 1
    assert [child(uri, attempt=n).data.tags["current"] for n in (1, 2)] == ["false", "true"]
    assert [child(uri, attempt=n).info.status for n in (1, 2)] == ["FAILED", "FINISHED"]
    assert parent(uri).info.status == "FINISHED"


def test_rebuild_replaces_a_run_that_lost_its_store_midway(uri, tmp_path, capsys, monkeypatch):
    with opened(uri) as tracker:
        with monkeypatch.context() as broken:
            broken.setattr(
                tracker._client, "log_batch", lambda *a, **k: (_ for _ in ()).throw(OSError("gone"))
            )
            known = {"mlflow_run_id": tracker.run_id}
            tracker.finish(write_folder(tmp_path / "results", record(**known), {"loss": 0.5}))
    assert "gone" in capsys.readouterr().err
    assert child(uri).data.tags["relinear.mirror"] == "incomplete" and child(uri).data.metrics == {}
    assert mirror.rebuild(uri, tmp_path / "results") == 1
    assert child(uri).data.metrics["loss"] == 0.5 and "relinear.mirror" not in child(uri).data.tags


@pytest.mark.parametrize(
    ("module", "name"), [(rows, "means"), (rows, "note"), (mirror, "_show"), (mirror, "finish")]
)
def test_a_rebuild_that_dies_before_a_row_is_written_is_made_whole_by_the_next(
    uri, second, tmp_path, monkeypatch, module, name
):
    run_stage(uri, tmp_path / "results", {"loss": 0.5})
    run_measure(uri, tmp_path / "results", "perplexity")
    with monkeypatch.context() as dying, pytest.raises(KeyboardInterrupt):
        dying.setattr(module, name, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        mirror.rebuild(second, tmp_path / "results")
    assert [mirror.rebuild(second, tmp_path / "results") for _ in range(2)] == [2, 0]
    assert contents(second) == contents(uri)


def test_rebuild_refuses_what_it_does_not_own(second, tmp_path):
    write_folder(tmp_path / "results", record(), {})
    store = client(second)
    store.create_run(store.create_experiment("relinear-mini"))
    with pytest.raises(ValueError, match="holds 1 runs that relinear did not write"):
        mirror.rebuild(second, tmp_path / "results")
    with pytest.raises(ValueError, match="no folder"):
        mirror.rebuild(second, tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("file", "text"),
    [("run.json", ""), ("run.json", '{"schema": 3}'), ("run.json", "{"), ("metrics.json", '{"loss": 9}')],
)
def test_a_record_that_cannot_be_believed_is_left_out_of_a_rebuild_and_refused_in_an_import(
    uri, tmp_path, capsys, file, text
):
    for run in ("lizard", "supra"):
        folder = tmp_path / "results/mini/runs" / run / "distill"
        write_folder(tmp_path / "results", record(run=run), {})
        known = {"metrics.json": {"sha256": sha256(folder / "metrics.json")}}
        (folder / "run.json").write_text(json.dumps(record(run=run, artefacts=known)))
    (folder / file).write_text(text)
    assert mirror.rebuild(uri, tmp_path / "results") == 1
    [said] = capsys.readouterr().err.splitlines()
    assert f"supra/distill/{file}" in said and said.endswith("it counts as not finished, and is left out")
    with pytest.raises(UserError, match=f"supra/distill/{file}"):
        mirror.import_folder(uri, tmp_path / "results")
