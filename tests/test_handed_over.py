"""Records that somebody hands over: whatever is wrong in them is one line with the file and the field, in
`track import`, `status` and `draw`."""

import json
import shutil
from pathlib import Path

import pytest

from relinear.core import store
from relinear.draw.beside import VERDICTS
from relinear.draw.planned import draw_committed
from relinear.errors import UserError
from relinear.files import sha256
from relinear.plan.plan import Plan
from relinear.plan.specs import available
from relinear.plan.strict import WORKFLOW
from relinear.records import read
from relinear.status import lines
from relinear.tracking import mirror
from relinear.tracking.committed import verify

COMMITTED = WORKFLOW.parent / "results/reference"
DEEP = "[" * 3000 + "]" * 3000


def measured(
    results: Path, metrics: dict | str | None = None, history: bytes | None = None, **changes
) -> Path:
    """The folder of a finished measurement, whose record has these fields instead of its own."""
    folder = results / "smoke/runs/teacher/perplexity"
    folder.mkdir(parents=True)
    reading = {"metric": "perplexity", "of": "x", "at": {}, "value": 2.0, "stderr": None, "n": 1}
    metrics = {"readings": [reading], "facts": {}} if metrics is None else metrics
    (folder / "metrics.json").write_text(metrics if isinstance(metrics, str) else json.dumps(metrics))
    if history is not None:
        (folder / "history.jsonl").write_bytes(history)
    record = {
        "schema": 2,
        "scale": "smoke",
        "run": "teacher",
        "stage": "perplexity",
        "measure": "perplexity",
        "key": "0" * 64,
        "attempt": 1,
        "config": {"assets": {}},
        "parents": {},
        "artefacts": {"metrics.json": {"sha256": sha256(folder / "metrics.json")}},
        "config_hash": "",
        "code_hash": "",
        "datasets": [],
        "git": {},
        "versions": {},
        "hardware": {},
        "kernels": {},
        "started": "2026-01-01T00:00:00+00:00",
        "wall_seconds": 1.0,
        "tags": {},
    }
    (folder / "run.json").write_text(json.dumps(record | changes))
    return folder


RECORDS = {
    "started a word": ({"started": "yesterday"}, "started: must be a time such as 2026"),
    "started nothing": ({"started": None}, "started: .*got None"),
    "started far ahead": (
        {"started": "9999-01-01T00:00:00+00:00"},
        "started: must be a time of the years 2020 to 2100",
    ),
    "wall_seconds a word": ({"wall_seconds": "long"}, "wall_seconds: .*got 'long'"),
    "wall_seconds nothing": ({"wall_seconds": None}, "wall_seconds"),
    "wall_seconds without end": ({"wall_seconds": float("inf")}, "wall_seconds"),
    "tags nothing": ({"tags": None}, "tags"),
    "a tag a number": ({"tags": {"table": 5}}, "tags.table: .*got 5"),
    "datasets nothing": ({"datasets": None}, "datasets"),
    "datasets numbers": ({"datasets": [1]}, "datasets.0"),
    "datasets without sha256": ({"datasets": [{"name": "x", "role": "train"}]}, "lacks datasets.0.sha256"),
    "root a number": ({"root": 5}, "root: .*got 5"),
    "measure a number": ({"measure": 5}, "measure: .*got 5"),
    "kernels a list": ({"kernels": []}, "kernels"),
    "assets a list": ({"config": {"assets": []}}, "config.assets"),
    "artefacts a list": ({"artefacts": []}, "artefacts"),
    "tokens negative": ({"tokens": -1}, "tokens: .*got -1"),
}


@pytest.mark.parametrize("case", RECORDS)
def test_a_record_of_another_form_is_named_with_its_field(tmp_path, case):
    changes, said = RECORDS[case]
    folder = measured(tmp_path / "results", **changes)
    with pytest.raises(UserError, match=f"perplexity/run.json:? {said}|perplexity/run.json: {said}"):
        mirror.import_folder(f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path / "results")
    with pytest.raises(UserError, match="run.json"):
        read(folder)
    told = list(lines(Plan(scale="smoke", results=tmp_path / "results")))
    assert len(told) == 2 and "run.json" in told[0] and "\n" not in told[0]
    assert not (tmp_path / "mlflow.db").exists(), "nothing was written"


METRICS = {
    "no JSON": ("{", "metrics.json cannot be read"),
    "nested deep": ('{"x": ' + DEEP + "}", "metrics.json is nested too deep"),
    "readings a number": ({"readings": 5, "facts": {}}, "metrics.json: readings: .*got 5"),
    "a reading without a value": (
        {"readings": [{"metric": "m", "of": "x", "at": {}, "stderr": None, "n": 1}], "facts": {}},
        "metrics.json lacks readings.0.value",
    ),
    "a value that is a word": (
        {
            "readings": [{"metric": "m", "of": "x", "at": {}, "value": "2", "stderr": None, "n": 1}],
            "facts": {},
        },
        "readings.0.value: .*got '2'",
    ),
    "a list": ("[]", "metrics.json must hold a JSON object"),
}


@pytest.mark.parametrize("case", METRICS)
def test_metrics_of_another_form_are_named_with_their_field(tmp_path, case):
    metrics, said = METRICS[case]
    measured(tmp_path / "results", metrics=metrics)
    with pytest.raises(UserError, match=said):
        mirror.import_folder(f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path / "results")


def lines_of(*entries: object) -> bytes:
    return "".join(f"{json.dumps(entry)}\n" for entry in entries).encode()


HISTORIES = {
    "no step": (lines_of({"time": 1.8e9}), "history.jsonl:1 lacks step"),
    "a step that is a word": (
        lines_of({"step": "first", "time": 1.8e9}),
        "history.jsonl:1: step: .*got 'first'",
    ),
    "a time that is a word": (
        lines_of({"step": 0, "time": 1.8e9}, {"step": 1, "time": "now"}),
        "history.jsonl:2: time: .*got 'now'",
    ),
    "a time far ahead": (lines_of({"step": 0, "time": 1e18}), "history.jsonl:1: time"),
    "a number": (lines_of(5), "history.jsonl:1 must hold a JSON object; got a int"),
    "no JSON": (b"{\n", "history.jsonl:1 is not JSON"),
    "nested deep": (DEEP.encode(), "history.jsonl:1 (is not JSON|must hold)"),
    "no text": (b"\xff\xff\xff", "history.jsonl:1 is not JSON"),
}


@pytest.mark.parametrize("case", HISTORIES)
def test_a_history_of_another_form_is_named_with_its_line_before_anything_is_written(tmp_path, case):
    history, said = HISTORIES[case]
    measured(tmp_path / "results", history=history)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    with pytest.raises(UserError, match=said):
        mirror.import_folder(uri, tmp_path / "results")
    shutil.rmtree(tmp_path / "results")
    measured(tmp_path / "results", history=lines_of({"step": 0, "time": 1.8e9, "loss": 1.0}))
    assert mirror.import_folder(uri, tmp_path / "results") == 1, "nothing of it was written"


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"scale": []}', '{"scale": 5}', '{"scale": "smoke", "cells": []}']
)
def test_a_provenance_of_another_form_is_told_and_left_out(tmp_path, capsys, text):
    measured(tmp_path / "results")
    (tmp_path / "results/table2.provenance.json").write_text(text)
    assert mirror.import_folder(f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path / "results") == 1
    [said] = [line for line in capsys.readouterr().err.splitlines() if "provenance" in line]
    assert "table2.provenance.json" in said and said.endswith("what it tells of is left out")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"scale": "smollm2-x0.25"}',
        '{"scale": 5, "files": {}}',
        '{"scale": "mini", "files": []}',
    ],
)
def test_a_manifest_of_another_form_is_named(tmp_path, text):
    folder = Path(shutil.copytree(COMMITTED / "vit_mini", tmp_path / "vit_mini"))
    (folder / "reference.json").write_text(text)
    with pytest.raises(
        UserError, match="reference.json (cannot be read|must hold|lacks)|reference.json: (scale|files)"
    ):
        verify(folder)
    with pytest.raises(
        UserError, match="reference.json (cannot be read|must hold|lacks)|reference.json: (scale|files)"
    ):
        draw_committed(folder, available(WORKFLOW / "papers")["hedgehog_table9"])


@pytest.mark.parametrize(
    "text, said",
    [
        ("claim,verdict\na,reproduced\n", "claims.csv lacks the column drawing; have claim, verdict"),
        ("zzz\n5\n", "claims.csv lacks the column drawing and claim and verdict; have zzz"),
    ],
)
def test_verdicts_without_a_column_are_named(tmp_path, text, said):
    (tmp_path / VERDICTS.file).write_text(text)
    with pytest.raises(UserError, match=said):
        VERDICTS.committed(tmp_path)


def test_a_store_that_unpacks_without_end_is_named(tmp_path, monkeypatch):
    folder = Path(shutil.copytree(COMMITTED / "vit_mini", tmp_path / "vit_mini"))
    monkeypatch.setattr(store, "LARGEST", 1000)
    with pytest.raises(UserError, match="parquet unpacks to .* bytes; a store's files have 1,000 at most"):
        store.opened(folder).verify()
