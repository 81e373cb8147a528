"""A folder of committed results holds what a reader needs, is whole or not there, and goes into MLflow beside one's own runs."""

import gzip
import json

import pytest
import yaml
from conftest import copy_sources

from relinear import reference
from relinear.errors import UserError
from relinear.files import sha256

CURVE = "".join(json.dumps({"step": i, "time": 1.7e9 + i, "loss": 1 / (i + 1)}) + "\n" for i in range(50))
FILES = {
    "metrics.json": "{}", "history.jsonl": CURVE, "items.jsonl": '{"task": "piqa"}\n' * 20, "method.safetensors": "m", "model.safetensors": "whole",
    "adapter/adapter_model.safetensors": "a", "adapter/adapter_config.json": "{}", "adapter/README.md": "peft's", "weights.safetensors": "w",
}  # fmt: skip


@pytest.fixture
def results(tmp_path):
    """Results of a scale: a stage with every kind of file, a corpus, tables, work in progress and logs."""
    root = tmp_path / "results/tiny"
    for stage, names in {"runs/lizard/finetune": [*FILES], "corpus": ["metrics.json"]}.items():
        for name in names:
            (root / stage / name).parent.mkdir(parents=True, exist_ok=True)
            (root / stage / name).write_text(FILES[name])
        artefacts = {name: {"sha256": sha256(root / stage / name)} for name in names}
        (root / stage / "run.json").write_text(json.dumps({"artefacts": artefacts}))
    for name in (
        "table2.csv",
        "table2.provenance.json",
        "lolcats/figure3.png",
        "logs/table2.csv",
        ".work/lizard/run.json",
        "corpus/train_tokens.npy",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    return root


def test_what_is_small_and_cannot_be_made_again_is_kept(results, tmp_path, monkeypatch):
    monkeypatch.setattr(reference, "LONG", 1000)
    sizes = reference.export(results, tmp_path / "out")
    kept = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    of_stage = {"run.json", "metrics.json", "history.jsonl.gz", "items.jsonl", "method.safetensors", "adapter/adapter_model.safetensors",
                "adapter/adapter_config.json"}  # fmt: skip
    shared = {"table2.csv", "table2.provenance.json", "lolcats/figure3.png", "corpus/run.json", "corpus/metrics.json", "reference.json"}
    assert kept == shared | {f"runs/lizard/finetune/{name}" for name in of_stage}
    assert gzip.decompress((tmp_path / "out/runs/lizard/finetune/history.jsonl.gz").read_bytes()).decode() == CURVE
    assert sum(sizes.values()) == sum((tmp_path / "out" / name).stat().st_size for name in kept - {"reference.json"})
    assert sizes.keys() == {"runs/lizard", "table2.csv", "table2.provenance.json", "lolcats", "corpus"}
    left = json.loads((tmp_path / "out/reference.json").read_text())["left_out_bytes"]
    assert {"runs/lizard/finetune/model.safetensors", "corpus/train_tokens.npy"} <= left.keys()
    reference.export(results, tmp_path / "out", weights=False)
    light = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert light == {name for name in kept if not name.endswith(".safetensors")}
    reference.export(results, tmp_path / "out")  # its own work is replaced
    reference.verify(tmp_path / "out")
    (tmp_path / "out/table2.csv").write_text("y")
    with pytest.raises(UserError, match="table2.csv is not what `relinear track export` wrote"):
        reference.verify(tmp_path / "out")


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(results, tmp_path, monkeypatch):
    def refused(why: str, source=results, out=tmp_path / "out") -> None:
        with pytest.raises(UserError, match=why):
            reference.export(source, out)
        assert not out.exists() and not list(tmp_path.glob(".*"))

    refused("has no finished stage of a run", source=tmp_path)
    with monkeypatch.context() as small:
        small.setattr(reference, "LARGEST", 1000)
        refused("more than 1,000; the largest: runs/lizard/finetune/history.jsonl")
    (results / "runs/lizard/finetune/method.safetensors").write_text("other")
    refused("method.safetensors is not what its run.json says")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/paper.tex").write_text("")
    with pytest.raises(UserError, match="holds what `relinear track export` did not write"):
        reference.export(results, tmp_path / "mine")


def test_committed_runs_of_another_clone_stand_beside_ones_own(tmp_path):
    """Real stages, at the scale of tests, by the command line."""
    clone = copy_sources(tmp_path / "clone")
    smoke = yaml.safe_load((clone / "workflow/scales/smoke.yaml").read_text())
    (clone / "workflow/scales/tiny.yaml").write_text(yaml.safe_dump(smoke))
    scale = ("--scale", "tiny", "--threads", "1")
    for words in (("assets",), ("teacher",), ("instructions",), ("corpus",), ("finetune", "teacher_lora")):
        done = clone.relinear(*words, *scale)
        assert done.returncode == 0, done.stderr[-3000:]
    done = clone.relinear("track", "export", "results/tiny", "results/reference/tiny")
    assert done.returncode == 0 and "bytes  runs/teacher_lora" in done.stdout, done.stderr
    before = {run["id"] for run in clone.mlflow()}
    for expected in ("runs imported", "0 runs imported"):
        done = clone.relinear("track", "import", "results/reference/tiny")
        assert done.returncode == 0 and expected in done.stdout, done.stderr
    added = [run for run in clone.mlflow() if run["id"] not in before]
    assert sorted(run["tags"]["stage"] for run in added if "stage" in run["tags"]) == ["assets", "corpus", "finetune", "instructions", "teacher"]
    done = clone.relinear("track", "rebuild")
    assert "0 runs restored" in done.stdout and {run["id"] for run in clone.mlflow()} == before | {run["id"] for run in added}
    (clone / "results/reference/tiny/runs/teacher_lora/finetune/metrics.json").write_text("{}")
    done = clone.relinear("track", "import", "results/reference/tiny")
    assert done.returncode == 1 and done.stderr.startswith("error: results/reference/tiny/runs/teacher_lora/finetune/metrics.json is not what")
