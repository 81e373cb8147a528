"""A folder of committed results has all that a reader needs, is small, is whole or not there, and goes into
MLflow beside one's own runs."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from conftest import copy_sources
from peft import LoraConfig, get_peft_model
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import save
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from relinear import linearize, load_run
from relinear.core import store
from relinear.draw import planned
from relinear.draw.beside import PROVENANCE, VERDICTS
from relinear.draw.beside import lines_of as rows_of
from relinear.draw.planned import draw_committed
from relinear.draw.render import paint
from relinear.errors import UserError
from relinear.families.bert import byte_tokenizer
from relinear.files import sha256
from relinear.linearize.assemble import save_method
from relinear.plan.specs import available, read
from relinear.plan.strict import WORKFLOW
from relinear.share.export import export as export_run
from relinear.tracking import committed as reference

# measures whose readings are means over items
SCORED = ("commonsense", "mmlu", "mmlu_continuation", "lambada", "boolq")
VERBS = ("tests/verbs.py", "cpu")  # in one process: each would take seconds to import torch and mlflow
COMMITTED = Path(__file__).resolve().parent.parent / "results" / "reference"
CURVE = [
    {"step": i, "time": 1.7e9 + i, "loss": 1 / (i + 1), "lr": 3e-4, "terms": {"layer_00": 2 / (i + 3)}}
    for i in range(997)
]
ITEMS = [
    {
        "task": "piqa",
        "doc_id": i,
        "target": i % 2,
        "scores": [-i / 7, -3.25],
        "acc": float(i % 3 == 0),
        "acc_norm": 1.0,
    }
    for i in range(20)
]
ITEMS += [
    {"task": "mmlu", "subject": "law", "doc_id": 3, "target": 1, "scores": [-1.0], "acc": 0.0},
    {"task": "lambada", "doc_id": 3, "acc": 1},
]


def lines(values: list[dict]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


FILES = {
    "metrics.json": "{}",
    "history.jsonl": lines(CURVE),
    "items.jsonl": lines(ITEMS),
    "method.safetensors": "m",
    "model.safetensors": "whole",
    "adapter/adapter_model.safetensors": "a",
    "adapter/adapter_config.json": "{}",
    "adapter/README.md": "peft's",
    "weights.safetensors": "w",
}
RECORD = {
    "schema": 2,
    "scale": "tiny",
    "run": "",
    "stage": "",
    "key": "k",
    "config": {},
    "parents": {},
    "artefacts": {},
    "hardware": {"dtype": "float32"},
    "git": {"commit": "0" * 40, "dirty": False},
    "datasets": [],
    "tokens": 0,
}


@pytest.fixture
def results(tmp_path):
    """Results of a scale: a stage with every kind of file, a text, tables, work in progress and logs."""
    root = tmp_path / "results/tiny"
    for stage, names in {"runs/lizard/finetune": [*FILES], "text/toy": ["metrics.json"]}.items():
        for name in names:
            (root / stage / name).parent.mkdir(parents=True, exist_ok=True)
            (root / stage / name).write_text(FILES[name])
        artefacts = {name: {"sha256": sha256(root / stage / name)} for name in names}
        (root / stage / "run.json").write_text(json.dumps({**RECORD, "artefacts": artefacts}))
    for name in (
        "comparison/table2.csv",
        "lolcats/figure3.pdf",
        "lolcats/figure9.pdf",
        "logs/table2.csv",
        ".work/lizard/run.json",
        "text/toy/train_tokens.npy",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("run\nlizard\n")
    picture(np.linspace(0, 255, 64)).save(root / "lolcats/figure3.png")
    for name, told in TOLD.items():
        (root / f"{name}.provenance.json").write_text(json.dumps(told))
    for name, [row] in JUDGED.items():
        (root / f"{name}.claims.csv").write_text(f"claim,verdict\n{row['claim']},{row['verdict']}\n")
    return root


# of drawings of the fixture
TOLD = {
    name: {"artefact": name, "sources": {f"results/tiny/{node}/run.json": {}}, "cells": {}}
    for name, node in {"comparison/table2": "runs/lizard/finetune", "lolcats/figure3": "text/toy"}.items()
}


JUDGED = {
    "comparison/table2": [{"claim": "one", "verdict": "reproduced"}],
    "lolcats/figure3": [{"claim": "two", "verdict": "not tested"}],
}


def measurement(root: Path, node: str, parent: str | None = None) -> dict[str, bytes]:
    """Add a finished measurement of attention to results; returns its files of tensors."""
    (root / node).mkdir(parents=True)
    square = np.tril(np.random.default_rng(len(node)).random((8, 8), dtype=np.float32))
    files = {
        "weights.safetensors": save({"softmax.0.1": square, "method.0.1": square.T.copy()}),
        "points.safetensors": save({}),  # none where a model has no such layer
        "parts.safetensors": save({"window.0.0": np.zeros((800, 800), np.float32)}),
    }
    for name, text in files.items():
        (root / node / name).write_bytes(text)
    record = {
        "measure": node.rpartition("/")[2],
        "artefacts": {name: {"sha256": sha256(root / node / name)} for name in files},
        "parents": {} if parent is None else {"run": {"path": f"results/tiny/{parent}", "key": "k"}},
    }
    (root / node / "run.json").write_text(json.dumps(RECORD | record))
    return files


def picture(shades) -> Image.Image:
    """Shades of grey beside pure red, with an alpha channel, as matplotlib writes it."""
    grey = np.repeat(np.asarray(shades, dtype=np.uint8)[None, :, None], 3, axis=2)
    red = np.broadcast_to(np.array([255, 0, 0], dtype=np.uint8), grey.shape)
    return Image.fromarray(np.concatenate([grey, red])).convert("RGBA")


def test_what_is_small_and_cannot_be_made_again_is_kept(results, tmp_path):
    sizes = reference.export(results, tmp_path / "out")
    kept = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    of_stage = {"method.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"}
    shared = {
        "comparison/table2.csv",
        "lolcats/figure3.png",
        "lolcats/figure9.pdf",
        "claims.csv",
        "provenance.json",
        "reference.json",
        *store.FILES,
    }
    assert kept == shared | {f"runs/lizard/finetune/{name}" for name in of_stage}
    assert sum(sizes.values()) == sum(
        (tmp_path / "out" / name).stat().st_size for name in kept - {"reference.json"}
    )
    beside = {"claims.csv", "provenance.json"}
    assert sizes.keys() == {"runs/lizard", "comparison", "lolcats", *beside, *store.FILES}
    assert json.loads((tmp_path / "out/provenance.json").read_text()) == TOLD
    assert VERDICTS.committed(tmp_path / "out") == JUDGED
    packed = store.opened(tmp_path / "out").all()
    assert packed.keys() == {"runs/lizard/finetune", "text/toy"}
    for node, found in packed.items():
        assert (
            found.record == (results / node / "run.json").read_bytes()
            and found.metrics == (results / node / "metrics.json").read_bytes()
        )
    assert (
        len(packed["runs/lizard/finetune"].curve) == 250
        and packed["text/toy"].curve is packed["text/toy"].items is None
    )
    reference.export(results, tmp_path / "out", weights=False)
    light = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert light == {name for name in kept if not name.startswith("runs/")}
    sizes = reference.export(results, tmp_path / "out")  # its own work is replaced
    # the weights of an ablation's runs are not what the table shows
    (results / "comparison/table2.csv").write_text("run\nsupra\n")
    reference.export(results, tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    (results / "comparison/table2.csv").unlink()
    assert sizes["runs/lizard"] == reference.export(results, tmp_path / "out")["runs/lizard"]
    (results / "comparison/table2.csv").write_text("run\nlizard\n")
    reference.export(results, tmp_path / "out")
    reference.verify(tmp_path / "out")
    (tmp_path / "out/comparison/table2.csv").write_text("y")
    with pytest.raises(UserError, match="table2.csv is not what `relinear track export` wrote"):
        reference.verify(tmp_path / "out")


def test_a_later_slice_of_results_is_added_to_what_is_committed(results, tmp_path):
    """What the slice lacks stays as it was, the weights of the committed table's rows among it; of a stage in
    both, the slice's alone is kept."""
    out, part = tmp_path / "out", tmp_path / "part/tiny"
    reference.export(results, out)
    before = {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()}
    nodes_before = store.opened(out).all()
    for stage, text in {"runs/supra/finetune": '{"loss": 1}', "text/toy": '{"anew": 1}'}.items():
        (part / stage).mkdir(parents=True)
        (part / stage / "metrics.json").write_text(text)
        (part / stage / "method.safetensors").write_text("m")
        artefacts = {
            name: {"sha256": sha256(part / stage / name)} for name in ("metrics.json", "method.safetensors")
        }
        (part / stage / "run.json").write_text(json.dumps({**RECORD, "artefacts": artefacts}))
    sizes = reference.export(part, out, add=True)
    after = {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()}
    reference.verify(out)
    assert after.keys() == before.keys()  # supra is no row of the table
    assert {name for name in before if after[name] != before[name]} == {
        "nodes.parquet",
        "reference.json",
    }, "none has readings, items or a curve"
    nodes = store.opened(out).all()
    assert nodes.keys() == nodes_before.keys() | {"runs/supra/finetune"}
    assert (
        nodes["runs/lizard/finetune"] == nodes_before["runs/lizard/finetune"]
        and nodes["text/toy"].metrics == b'{"anew": 1}'
    )
    was, now = (json.loads(files["reference.json"]) for files in (before, after))
    assert now["changed"] == was["changed"]
    assert sizes["runs/lizard"] == sum(
        len(text) for name, text in before.items() if name.startswith("runs/lizard/")
    )
    with pytest.raises(UserError, match="has no reference.json of an earlier export to add to"):
        reference.export(part, tmp_path / "none", add=True)
    with pytest.raises(UserError, match="is an export of scale 'tiny', and .*other is of 'other'"):
        reference.export(part.rename(tmp_path / "other"), out, add=True)
    (out / "nodes.parquet").write_bytes((out / "nodes.parquet").read_bytes()[:-1])
    with pytest.raises(UserError, match="nodes.parquet is not what `relinear track export` wrote"):
        reference.export(results, out, add=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_attention_that_a_figure_shows_lies_in_the_store_if_there_is_some_and_it_is_small(results, tmp_path):
    (files, out), node = (
        (measurement(results, "runs/lizard/entropy"), tmp_path / "out"),
        "runs/lizard/entropy",
    )
    reference.export(results, out)
    assert store.opened(out).tensors(node) == {"weights.safetensors": files["weights.safetensors"]}
    assert not list(out.glob("runs/*/entropy")) and store.TENSORS in contents(out)
    (results / node / "weights.safetensors").write_bytes(files["parts.safetensors"])
    with pytest.raises(UserError, match="entropy/weights.safetensors is not what its run.json says"):
        reference.export(results, out)


def test_repacking_changes_nothing_and_refuses_a_folder_that_was_changed(results, tmp_path):
    out = tmp_path / "out"
    measurement(results, "runs/lizard/entropy")
    reference.export(results, out)
    before = contents(out)
    reference.repack(out)
    assert contents(out) == before
    (out / "lolcats/figure3.png").write_bytes(b"")
    with pytest.raises(UserError, match="figure3.png is not what `relinear track export` wrote"):
        reference.repack(out)


def test_nodes_runs_and_drawings_are_left_out_by_name(results, tmp_path):
    out, node = tmp_path / "out", "runs/supra/entropy"
    measurement(results, node)
    measurement(results, "runs/supra/fidelity")
    reference.export(results, out)
    before, nodes, written = contents(out), store.opened(out).all(), changed(out)
    reference.repack(out, [node])
    assert store.opened(out).all() == {name: each for name, each in nodes.items() if name != node}
    reference.repack(out, ["runs/supra"])
    assert store.opened(out).rows.keys() == {"runs/lizard/finetune", "text/toy"}
    assert contents(out).keys() == before.keys() - {store.TENSORS} and changed(out) == written
    reference.repack(out, ["lolcats/figure3", "text/toy"])
    assert store.opened(out).rows.keys() == {"runs/lizard/finetune"} and changed(out) == {}
    assert contents(out).keys() == before.keys() - {store.TENSORS, "lolcats/figure3.png"}
    for kind in (PROVENANCE, VERDICTS):
        assert kind.committed(out).keys() == {"comparison/table2"}
    reference.repack(out, ["runs/lizard", "comparison"])  # with weights and provenance
    assert contents(out).keys() == {"lolcats/figure9.pdf", "reference.json", *store.FILES}
    reference.verify(out)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "runs/lizard/entropie",
            r"neither node nor drawing 'runs/lizard/entropie'; have .*runs/lizard/entropy",
        ),
        ("runs/liz", "neither node nor drawing 'runs/liz'"),
        ("text/toy", "lolcats/figure3 of .* was made from text/toy; leave out both or none"),
        ("runs/lizard/finetune", "comparison/table2 of .* was made from runs/lizard/finetune; leave out"),
        ("runs/lizard/entropy", "runs/supra/entropy of .* was made from runs/lizard/entropy; leave out both"),
    ],
)
def test_what_another_was_made_from_is_not_left_out(results, tmp_path, name, said):
    measurement(results, "runs/lizard/entropy")
    measurement(results, "runs/supra/entropy", parent="runs/lizard/entropy")
    reference.export(results, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(UserError, match=said):
        reference.repack(tmp_path / "out", [name])
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("results/reference/out/comparison/table2.csv", "comparison/table2"),
        ("results/reference/out/nodes.parquet#runs/supra/entropy", "runs/supra"),
    ],
)
def test_what_a_drawing_of_another_folder_was_made_from_is_not_left_out(results, tmp_path, source, name):
    measurement(results, "runs/supra/entropy")
    out, other = (tmp_path / "reference" / folder for folder in ("out", "scaling"))
    reference.export(results, out)
    other.mkdir()
    told = {"artefact": "comparison_scaling", "sources": {source: {}}, "cells": {}}
    (other / "provenance.json").write_text(json.dumps({"comparison/scaling": told}))
    before = contents(out)
    with pytest.raises(UserError, match=f"comparison/scaling of scaling was made from {name}.*; leave out"):
        reference.repack(out, [name])
    assert contents(out) == before
    told["sources"] = {source.replace("/out/", "/about/"): {}}
    (other / "provenance.json").write_text(json.dumps({"comparison/scaling": told}))
    reference.repack(out, [name])
    assert contents(out) != before


@pytest.mark.parametrize("how", ["committed", "claims", "drawn"])
def test_what_a_verdict_stands_on_is_not_left_out(tmp_path, how):
    """Claims on maps of recall ask whether the run solves the task, which the maps do not show; the best
    recipe is chosen by all scores, of which those that lost are shown nowhere."""
    paper, node = "hedgehog", "runs/recall_elu/recall_accuracy"
    name, stem = ("recall_smollm2", "figure2") if how == "drawn" else ("maps_smollm2", "figure5")
    folder = Path(shutil.copytree(COMMITTED / name, tmp_path / name))
    if how != "committed":
        told = json.loads((folder / "provenance.json").read_text())
        if how == "claims":
            told[f"{paper}/{stem}"]["sources"] = {f"nodes.parquet#{node}0": {"key": "of the picture"}}
        else:
            del told[f"{paper}/{stem}"]
        (folder / "provenance.json").write_text(json.dumps(told))
        reference.write_manifest(folder, "smollm2", changed(folder))
        artefact = read(COMMITTED.parents[1] / f"workflow/papers/{paper}/{stem}.yaml")
        draw_committed(folder, artefact, claims=how == "claims")
    told = json.loads((folder / "provenance.json").read_text())[f"{paper}/{stem}"]
    assert told["cells"] and any(source.endswith(f"#{node}") for source in told["sources"])
    assert (f"nodes.parquet#{node}0" in told["sources"]) == (how == "claims"), "the picture stays"
    assert how != "drawn" or any("#runs/sweep_recall_softmax" in source for source in told["sources"])
    with pytest.raises(UserError, match=f"{paper}/{stem} of .* was made from {node}; leave out both"):
        reference.repack(folder, [node])


def changed(out: Path) -> dict[str, dict]:
    return json.loads((out / "reference.json").read_text())["changed"]


def test_a_file_that_is_not_the_original_says_so_and_what_the_original_was(results, tmp_path):
    out = tmp_path / "out"
    reference.export(results, out)
    beside = {"reference.json", *reference.STORED}
    for path in (p for p in out.rglob("*") if p.is_file() and p.name not in beside):
        name = path.relative_to(out).as_posix()
        original = results / changed(out).get(name, {"from": name})["from"]
        assert (path.read_bytes() != original.read_bytes()) == (name in changed(out)), name
        if name in changed(out):
            assert changed(out)[name]["sha256"] == sha256(original) and changed(out)[name]["how"]
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    reference.export(results, out)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("length", [0, 1, 2, 249, 250, 251, 997, 2441])
def test_a_thinned_curve_is_some_of_the_lines_evenly_with_the_first_and_the_last(length, tmp_path):
    curve = [
        {
            "step": i,
            "time": 1.7e9 + i / 3,
            "loss": 1 / (i + 1),
            "lr": 1e-4 / 3,
            "terms": {"layer_00": 2 / (i + 3)},
        }
        for i in range(length)
    ]
    (tmp_path / "history.jsonl").write_text(lines(curve))
    thin = reference._thin(tmp_path / "history.jsonl")
    steps = [line["step"] for line in thin]
    assert len(steps) <= reference.LINES + 1 and (length > reference.LINES or len(steps) == length)
    assert not length or (steps[0] == 0 and steps[-1] == length - 1 and len(set(np.diff(steps[:-1]))) <= 1)
    for line in thin:
        original = curve[line["step"]]
        assert line.keys() | {"terms"} == original.keys()
        for name in ("loss", "lr"):
            assert line[name] == pytest.approx(original[name], rel=1e-5)
        assert line["time"] == pytest.approx(original["time"], abs=0.01, rel=0)
    parted = [line for line in thin if "terms" in line]
    assert len(parted) <= len(thin) / reference.PARTS_EVERY + 2 and (
        not length or (parted[0], parted[-1]) == (thin[0], thin[-1])
    )


def test_items_come_back_as_the_measurement_wrote_them(results, tmp_path):
    place = "runs/lizard/finetune"  # a stage of any name
    assert reference.read_items(results / place) == ITEMS
    reference.export(results, tmp_path / "out")
    got = reference.read_items(tmp_path / "out" / place)
    for item, original in zip(got, ITEMS, strict=True):
        assert (
            item == original | {"scores": pytest.approx(original["scores"], abs=0.005, rel=0)}
            if "scores" in original
            else item == original
        )
    table = pd.read_parquet(tmp_path / "out/items.parquet")
    assert set(table["node"]) == {place}
    assert table["acc"].tolist() == [item["acc"] for item in ITEMS] and table["task"].tolist() == [
        item["task"] for item in ITEMS
    ]

    # of another run than the table's: outcomes, for differences to be paired
    (results / "comparison/table2.csv").write_text("run\nsupra\n")
    reference.export(results, tmp_path / "out")
    outcomes = [
        {name: value for name, value in item.items() if name not in ("scores", "target")} for item in ITEMS
    ]
    assert reference.read_items(tmp_path / "out" / place) == outcomes
    with pytest.raises(UserError, match="toy has no items: neither items.jsonl nor items in a store"):
        reference.read_items(tmp_path / "out/text/toy")


def test_a_stage_without_items_has_none_when_committed(results, tmp_path):
    folder = results / "runs/lizard/finetune"
    (folder / "items.jsonl").write_text("")
    record = json.loads((folder / "run.json").read_text())
    record["artefacts"]["items.jsonl"]["sha256"] = sha256(folder / "items.jsonl")
    (folder / "run.json").write_text(json.dumps(record))
    reference.export(results, tmp_path / "out")
    assert reference.read_items(tmp_path / "out/runs/lizard/finetune") == []


@pytest.mark.parametrize("colours", [64, 1000])
def test_a_figure_keeps_its_size_and_looks(tmp_path, colours):
    original = picture(np.linspace(0, 255, colours))
    original.save(tmp_path / "a.png")
    paint(tmp_path / "a.png", tmp_path / "b.png")
    with Image.open(tmp_path / "b.png") as painted:
        got = np.asarray(painted.convert("RGB")).astype(int)
    apart = np.abs(got - np.asarray(original.convert("RGB")))
    assert apart.shape == (2, colours, 3) and apart.max() <= 2


def test_what_is_committed_is_small():
    sizes = {
        path.relative_to(COMMITTED).as_posix(): path.stat().st_size
        for path in COMMITTED.rglob("*")
        if path.is_file()
    }
    largest = "\n".join(
        f"{size:>12,} {name}" for name, size in sorted(sizes.items(), key=lambda item: -item[1])[:20]
    )
    assert sum(sizes.values()) <= reference.LARGEST, (
        f"results/reference has {sum(sizes.values()):,} bytes; the largest:\n{largest}"
    )


@pytest.mark.parametrize(
    "folder",
    sorted(path.parent for path in COMMITTED.glob("*/reference.json")),
    ids=lambda folder: folder.name,
)
def test_what_is_committed_is_what_was_exported_of_what_its_records_name(folder):
    reference.verify(folder)
    differs = changed(folder)
    nodes = store.opened(folder)
    for node in nodes.rows:
        for name, artefact in json.loads(nodes.record(node))["artefacts"].items():
            original = f"{node}/{name}"
            kept = [written for written, change in differs.items() if change["from"] == original]
            if kept:
                assert [differs[written]["sha256"] for written in kept] == [artefact["sha256"]], original
            elif (folder / original).is_file():
                assert sha256(folder / original) == artefact["sha256"], original
        assert (
            hashlib.sha256(nodes.metrics(node)).hexdigest()
            == json.loads(nodes.record(node))["artefacts"]["metrics.json"]["sha256"]
        )
    for scored in (
        folder / node for node in nodes.rows if Path(node).name in SCORED and nodes.items(node) is not None
    ):
        items = pd.DataFrame(reference.read_items(scored), columns=["task", "acc", "acc_norm"])
        readings = json.loads(store.read(scored / "metrics.json"))["readings"]
        assert readings and {reading["of"] for reading in readings} == set(items["task"]), scored
        for reading in readings:
            mine = items[items["task"] == reading["of"]]
            assert len(mine) == reading["n"], (scored, reading)
            # the share of items whose largest scores are equal, which items do not keep
            if reading["metric"] != "tied":
                assert mine[reading["metric"]].mean() == pytest.approx(reading["value"]), (scored, reading)


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(results, tmp_path, monkeypatch):
    def refused(why: str, source=results, out=tmp_path / "out") -> None:
        with pytest.raises(UserError, match=why):
            reference.export(source, out)
        assert not out.exists() and not list(tmp_path.glob(".*"))

    refused("has no finished stage of a run", source=tmp_path)
    with monkeypatch.context() as small:
        small.setattr(reference, "LARGEST", 1000)
        refused("more than 1,000; the largest: (nodes|items|curves).parquet")
    (results / "runs/lizard/finetune/method.safetensors").write_text("other")
    refused("method.safetensors is not what its run.json says")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/paper.tex").write_text("")
    with pytest.raises(UserError, match="holds what `relinear track export` did not write"):
        reference.export(results, tmp_path / "mine")


ADAPTER = "runs/lizard/finetune/adapter/adapter_model.safetensors"
METHOD = "runs/lizard/distill/method.safetensors"


@pytest.fixture
def trained(tmp_path):
    """Makes results of a run, float32 as training leaves them, with a LoRA on the teacher's projections and
    on a method's gate."""

    def make(**dtypes: str):
        torch.manual_seed(0)
        root = tmp_path / "results/tiny"
        run = root / "runs/lizard"
        shape = {
            "vocab_size": 64,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        teacher = LlamaForCausalLM(LlamaConfig(**shape))
        teacher.save_pretrained(root / "models/toy")
        model = linearize(teacher, "lizard")
        lora = get_peft_model(
            model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj", "gate"])
        )
        for name, p in lora.named_parameters():
            if "lora_" in name or ".method." in name:
                torch.nn.init.normal_(p)
        lora.save_pretrained(run / "finetune/adapter")
        (run / "distill").mkdir()
        save_method(lora.unload(), run / "distill/method.safetensors")
        ahead: list[str] = []  # steps before a stage
        for stage, dtype in {"../../models/toy": "float32", **dtypes}.items():
            folder = run / stage
            folder.mkdir(exist_ok=True)
            artefacts = {
                p.relative_to(folder).as_posix(): {"sha256": sha256(p)}
                for p in folder.rglob("*")
                if p.is_file()
            }
            parents = {
                name: {"path": f"results/tiny/{path}", "key": "k"}
                for name, path in {"model": "models/toy", **{s: f"runs/lizard/{s}" for s in ahead}}.items()
            }
            config = {
                "method": "lizard",
                "options": {},
                "links": [{"method": "lizard", "options": {}, "steps": list(ahead)}],
            }
            record = {
                **RECORD,
                "run": folder.name,
                "measure": stage if stage == "perplexity" else "",
                "artefacts": artefacts,
                "config": config,
                "parents": parents,
                "hardware": {"dtype": dtype},
                "stage": folder.name,
            }
            (folder / "run.json").write_text(json.dumps(record))
            ahead += [stage] if stage in ("distill", "finetune") else []
        return root

    return make


def test_an_adapter_is_rounded_as_a_bfloat16_run_loads_it(trained, tmp_path):
    results, out = (
        trained(distill="bfloat16", finetune="bfloat16", perplexity="bfloat16"),
        tmp_path / "results/reference/tiny",
    )
    reference.export(results, out)
    loaded, original = (
        load_run(root / "runs/lizard", torch.bfloat16).state_dict() for root in (out, results)
    )
    assert loaded.keys() == original.keys()
    for name, tensor in original.items():
        assert tensor.dtype == (torch.float32 if ".method." in name else torch.bfloat16), name
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name

    stored, before = load_file(out / ADAPTER), load_file(results / ADAPTER)
    assert {x.dtype for x in before.values()} == {torch.float32} and stored.keys() == before.keys()
    assert {".method." in name: x.dtype for name, x in stored.items()} == {
        True: torch.float32,
        False: torch.bfloat16,
    }
    with safe_open(out / ADAPTER, "pt") as exported, safe_open(results / ADAPTER, "pt") as own:
        assert exported.metadata() == own.metadata()
    assert (out / METHOD).read_bytes() == (results / METHOD).read_bytes()

    reference.verify(out)
    run = json.loads(store.read(out / "runs/lizard/finetune/run.json"))
    assert changed(out).keys() == {ADAPTER} and changed(out)[ADAPTER]["how"].startswith("bfloat16")
    assert (
        changed(out)[ADAPTER]["sha256"]
        == sha256(results / ADAPTER)
        == run["artefacts"]["adapter/adapter_model.safetensors"]["sha256"]
    )
    (out / ADAPTER).write_bytes((results / ADAPTER).read_bytes())
    with pytest.raises(
        UserError, match="adapter_model.safetensors is not what `relinear track export` wrote"
    ):
        reference.verify(out)


def test_a_committed_run_has_the_teacher_of_its_scale_and_no_other(trained, tmp_path):
    results, out = trained(distill="float32"), tmp_path / "results/reference/tiny"
    reference.export(results, out)
    assert not (out / "models/toy/config.json").exists() and load_run(out / "runs/lizard").method_parameters()
    byte_tokenizer().save_pretrained(results / "models/toy")
    folder = export_run(out / "runs/lizard", tmp_path / "folder")
    assert list(json.loads((folder / "relinear.json").read_text())["stages"])[:2] == [
        "models/toy",
        "runs/lizard/distill",
    ]
    assert "# lizard, linearized from toy" in (folder / "README.md").read_text() and list(folder.glob("*.py"))
    record = results / "models/toy/run.json"
    record.write_text(record.read_text().replace(sha256(results / "models/toy/model.safetensors"), "0"))
    with pytest.raises(UserError, match="another model than that of .*tiny"):
        load_run(out / "runs/lizard")
    record.unlink()
    with pytest.raises(UserError, match="`relinear model toy --scale tiny` makes it"):
        load_run(out / "runs/lizard")


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32")])
def test_an_adapter_that_float32_read_keeps_its_digits(trained, tmp_path, dtypes):
    results, out = trained(distill="bfloat16", finetune=dtypes[0], perplexity=dtypes[1]), tmp_path / "out"
    reference.export(results, out)
    assert (out / ADAPTER).read_bytes() == (results / ADAPTER).read_bytes()
    assert changed(out) == {}


def test_the_limit_is_of_what_is_written(trained, tmp_path, monkeypatch):
    results = trained(distill="bfloat16", finetune="bfloat16", perplexity="bfloat16")
    size = sum(reference.export(results, tmp_path / "out").values())
    monkeypatch.setattr(reference, "LARGEST", size)  # which the float32 files exceed
    assert sum(reference.export(results, tmp_path / "out").values()) == size
    (results / "runs/lizard/perplexity/run.json").write_text(json.dumps(RECORD))
    with pytest.raises(UserError, match="more than"):
        reference.export(results, tmp_path / "out")
    reference.verify(tmp_path / "out")


def test_committed_runs_of_another_clone_stand_beside_ones_own(tmp_path, interpreter):
    """Real stages, at the scale of tests, by verbs of the command line."""
    clone = copy_sources(tmp_path / "clone", interpreter)
    smoke = yaml.safe_load((clone / "workflow/scales/smoke.yaml").read_text())
    (clone / "workflow/scales/tiny.yaml").write_text(yaml.safe_dump(smoke))
    nodes = ("model tiny", "written stories@tiny", "text stories@tiny", "finetune teacher_lora")
    done = clone.python(
        *VERBS,
        *(f"{node} --scale tiny --threads 1" for node in nodes),
        "track export results/tiny results/reference/tiny",
    )
    assert "bytes  runs/teacher_lora" in done
    before = {run["id"] for run in clone.mlflow()}
    first, second = clone.python(*VERBS, *["track import results/reference/tiny"] * 2).splitlines()
    assert first.endswith("runs imported") and not first.startswith("0 ") and second == "0 runs imported"
    added = [run for run in clone.mlflow() if run["id"] not in before]
    assert sorted(run["tags"]["stage"] for run in added if "stage" in run["tags"]) == [
        "finetune",
        "model",
        "text",
        "written",
    ]
    done = clone.relinear("track", "rebuild")
    assert "0 runs restored" in done.stdout and {run["id"] for run in clone.mlflow()} == before | {
        run["id"] for run in added
    }
    with (clone / "results/reference/tiny/readings.parquet").open("ab") as file:
        file.write(b" ")
    done = clone.relinear("track", "import", "results/reference/tiny")
    assert done.returncode == 1 and done.stderr.startswith(
        "error: results/reference/tiny/readings.parquet is not what"
    )


def test_results_of_another_budget_are_drawn_again_as_they_were(tmp_path):
    folder = Path(shutil.copytree(COMMITTED / "smollm2_quarter", tmp_path / "quarter"))
    table = available(COMMITTED.parents[1] / "workflow/papers")["comparison_details"]
    files = [folder / "comparison" / f"details.{suffix}" for suffix in ("csv", "md")]
    before = [path.read_bytes() for path in files]
    files[0].unlink()
    draw_committed(folder, table)
    assert [path.read_bytes() for path in files] == before
    manifest = folder / "reference.json"
    manifest.write_text(manifest.read_text().replace('"smollm2-x0.25"', '"smollm2 x0.25"'))
    with pytest.raises(UserError, match="'smollm2 x0.25'; possible: <scale>, with -x<budget>"):
        draw_committed(folder, table)


@pytest.mark.parametrize("name", store.FILES[:3])
@pytest.mark.parametrize("damage", ["deleted", "changed", "cut"])
def test_committed_results_are_drawn_only_as_their_manifest_names_them(tmp_path, name, damage):
    folder = Path(shutil.copytree(COMMITTED / "smollm2_quarter", tmp_path / "quarter"))
    table = available(COMMITTED.parents[1] / "workflow/papers")["comparison_details"]
    file = folder / name
    if damage == "deleted":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes() + b" " if damage == "changed" else file.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"{name}.* (is not what|cannot be read)|has none of the runs"):
        draw_committed(folder, table)


def test_a_file_of_a_node_beside_a_store_that_no_manifest_names_is_refused(tmp_path):
    folder = Path(shutil.copytree(COMMITTED / "smollm2_quarter", tmp_path / "quarter"))
    table = available(COMMITTED.parents[1] / "workflow/papers")["comparison_details"]
    run, measure = next(
        (run, measure) for run, measure in table.reads() if store.has(folder / "runs" / run / measure)
    )
    (folder / "runs" / run / measure).mkdir(parents=True)
    (folder / "runs" / run / measure / "items.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="items.jsonl is not what .*reference.json says"):
        draw_committed(folder, table)


def test_a_verdict_s_words_come_back_as_they_were_written(tmp_path):
    told = {"lizard/table1": [{"claim": 'a, "b"\nc', "verdict": "reproduced", "reason": "d\u2028e\x0cf"}]}
    VERDICTS.write(tmp_path, told)
    assert VERDICTS.committed(tmp_path) == told


def test_what_is_drawn_by_an_absolute_path_names_no_folder_of_the_machine(tmp_path, monkeypatch):
    shutil.copytree(COMMITTED / "vit_mini", tmp_path / "results/reference/vit_mini")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "results/reference/vit_mini"
    drawing = next(iter(PROVENANCE.committed(folder)))
    artefact = available(WORKFLOW / "papers")[drawing.replace("/", "_")]
    draw_committed(folder, artefact)
    assert str(tmp_path) not in (folder / PROVENANCE.file).read_text()


def test_no_committed_provenance_names_a_folder_of_a_machine():
    files = sorted(COMMITTED.glob("*/provenance.json"))
    assert files and [file for file in files if '"/' in file.read_text()] == []


def test_pages_read_committed_files_only_as_their_manifest_names_them(tmp_path):
    folder = Path(shutil.copytree(COMMITTED / "vit_mini", tmp_path / "vit_mini"))
    file = folder / "claims.csv"
    assert rows_of(file)
    file.write_text(file.read_text().replace("1", "2"))
    with pytest.raises(
        UserError,
        match=(
            f"{file.name} is not what .*reference.json says: sha256 .* got, .* expected; `git checkout .*`"
            " restores"
        ),
    ):
        rows_of(file)
    loose = tmp_path / "bench.csv"
    loose.write_text("a,b\n1,2\n")
    assert rows_of(loose) == [{"a": "1", "b": "2"}], "a benchmark's folder has no manifest"


def test_a_table_drawn_while_another_is_drawn_stays_in_the_manifest(tmp_path, monkeypatch):
    folder = Path(shutil.copytree(COMMITTED / "lizard_smollm2", tmp_path / "lizard_smollm2"))
    tables = available(COMMITTED.parents[1] / "workflow/papers")
    other, made = tables["lizard_table4"], planned.make

    def meanwhile(artefact, *of):
        if artefact.name == "lizard_table6":
            draw_committed(folder, other)
        return made(artefact, *of)

    monkeypatch.setattr(planned, "make", meanwhile)
    manifest = folder / "reference.json"
    facts = json.loads(manifest.read_text())
    for name in ("table4.md", "table6.md"):
        del facts["files"][f"lizard/{name}"]
    manifest.write_text(json.dumps(facts))
    draw_committed(folder, tables["lizard_table6"])
    reference.verify(folder)


@pytest.mark.parametrize(
    ("folder", "paper", "figure"),
    [("smollm2", "lolcats", "figure3"), ("maps_smollm2", "hedgehog", "figure5")],
)
def test_a_figure_of_attention_weights_that_were_not_committed_says_where_they_are(
    folder, paper, figure, tmp_path
):
    copy = Path(shutil.copytree(COMMITTED / folder, tmp_path / folder))
    with pytest.raises(
        UserError,
        match=(
            f"{paper}_{figure}: .*safetensors is missing: .* nor in a tensors.parquet; where they were"
            f" measured: relinear draw {paper} {figure}"
        ),
    ):
        draw_committed(copy, read(COMMITTED.parents[1] / f"workflow/papers/{paper}/{figure}.yaml"))
