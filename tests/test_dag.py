"""Laws of the DAG, on real runs at smoke scale: what it makes, what it reruns, and that no interruption shows in its result."""

import csv
import hashlib
import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from conftest import FIGURES, TARGETS

ROWS = ["teacher", "teacher_lora", "t2r", "hedgehog", "supra", "lolcats_linear", "lolcats_window", "lizard"]
ACCURACIES = ["piqa_acc", "piqa_acc_norm", "arc_easy_acc", "arc_challenge_acc_norm", "hellaswag_acc_norm", "winogrande_acc", "mmlu_acc"]
AVERAGES = ["avg", "avg_no_mmlu"]
DESCRIBED = ["run", "method", "variant", "scale", "trainable_params", "distill_tokens", "finetune_tokens"]
TABLES = ["table2", "headline"]
RENDERED = ["lolcats_figure3", "lolcats_figure4", "lolcats_figure5", "lolcats_figure6", "lolcats_table1", *TABLES]

pytestmark = pytest.mark.dag


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def of(run: str, *stages: str) -> list[str]:
    return [f"{stage} {run}" for stage in stages]


def stage_folders(clone) -> list[Path]:
    return sorted(p.parent for p in (clone / "results/smoke").rglob("run.json") if ".work" not in p.parts)


# --- what it makes ---


def test_every_target_is_there(finished):
    for target in TARGETS:
        assert (finished / target).stat().st_size > 0, target
    for figure in FIGURES:
        assert (finished / figure).read_bytes().startswith(b"\x89PNG")
        assert (finished / figure).with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    for name in ("table2.md", "table2.provenance.json", "claims.csv", "mlflow.db"):
        assert (finished / "results" / name).stat().st_size > 0, name
    assert len(rows(finished / "results/smoke/lolcats/table1.csv")) == 7


def test_headline_table_has_the_rows_and_columns_of_the_issue(finished):
    table = rows(finished / "results/table2.csv")
    assert [row["run"] for row in table] == ROWS
    columns = list(table[0])
    assert columns[: len(DESCRIBED) + 1 + len(ACCURACIES) + 2] == [*DESCRIBED, "ppl", *ACCURACIES, *AVERAGES]
    assert {f"{c}_{x}" for c in ACCURACIES for x in ("stderr", "n")} < set(columns)
    assert {f"published_{c}" for c in (*ACCURACIES, *AVERAGES, "model", "source")} < set(columns)
    for row in table:
        assert all(0 <= float(row[c]) <= 1 for c in (*ACCURACIES, *AVERAGES)), row
        assert float(row["ppl"]) > 1 and row["scale"] == "smoke"
        assert {row[f"{c}_n"] for c in ACCURACIES} == {"4"}


def test_rows_say_what_was_trained_and_on_how_much(finished):
    table = {row["run"]: row for row in rows(finished / "results/table2.csv")}
    tokens = {run: (int(row["distill_tokens"]), int(row["finetune_tokens"])) for run, row in table.items()}
    whole = 2 * 1024  # two epochs of the scale's tokens
    transferred = {"hedgehog", "lolcats_linear", "lolcats_window", "lizard"}
    assert tokens == {run: (whole * (run in transferred), whole * (run != "teacher")) for run in ROWS}
    parameters = {run: int(row["trainable_params"]) for run, row in table.items()}
    assert parameters["teacher"] == 0
    assert parameters["supra"] == max(parameters.values()), "full finetuning trains the most"
    assert all(parameters[run] > parameters["teacher_lora"] for run in ROWS[2:]), "a method adds to the adapter"


def test_every_cell_leads_to_the_run_that_made_it(finished):
    provenance = json.loads((finished / "results/table2.provenance.json").read_text())
    table = rows(finished / "results/table2.csv")
    seen = 0
    for i, row in enumerate(table):
        for column, value in row.items():
            source = _source(provenance, i, row["run"], column)
            if value == "":
                continue
            assert source, f"{row['run']}/{column} = {value} has no provenance"
            seen += 1
            if "key" not in source:
                continue
            path = finished / source["file"]
            assert json.loads(path.read_text())["key"] == source["key"]
            assert hashlib.sha256(path.read_bytes()).hexdigest() == source["sha256"]
            assert hashlib.sha256(path.with_name("metrics.json").read_bytes()).hexdigest() == source["metrics_sha256"]
    assert seen > 8 * 30
