"""A store gives back what was packed, byte for byte, and one that is cut, mixed, edited or of a newer format
is refused with its file and node."""

import csv
import hashlib
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT
from safetensors.numpy import load as tensors_of
from safetensors.numpy import save
from safetensors.torch import save as save_of_torch
from synthetic import measurement, reading, unpack
from test_errors import relinear

from relinear import cli
from relinear.core import store
from relinear.draw.frame import COLUMNS, frame, frame_of, score, select
from relinear.draw.planned import measured_in
from relinear.draw.weights import tensors_in
from relinear.errors import UserError
from relinear.plan.items import read_columns, read_items
from relinear.plan.measured import load
from relinear.records import difference, read
from relinear.schemas import BrokenError

REFERENCE = ROOT / "results/reference"
READINGS = [
    {"metric": "acc", "of": "mmlu", "at": {}, "value": 0.25, "stderr": 0.003, "n": 14042},
    {
        "metric": "kl",
        "of": "attention",
        "at": {"layer": 3, "head": 1},
        "value": 1e-17,
        "stderr": None,
        "n": 8,
    },
    {
        "metric": "perplexity",
        "of": "text",
        "at": {"length": 4096, "depth": 0.5},
        "value": None,
        "stderr": None,
        "n": 0,
        "why": "beyond it",
    },
]
ITEMS = {
    "task": ["piqa", "mmlu", "mmlu"],
    "doc_id": [0, 1, 2],
    "acc": [1.0, None, 0.0],
    "exact": [True, False, True],
    "answer": ["a", 5, 0.5],
    "scores": [[-1.0, -2.5], None, [3.0]],
    "unset": [None, None, None],
}
CURVE = [
    {"step": 0, "time": 1.7e9, "loss": 2.5, "lr": 1e-3, "terms": {"layer_00": 0.1}},
    {"step": 5, "time": 1.7e9 + 1, "loss": 2.0, "lr": 1e-3},
]
SQUARE = np.tril(np.random.default_rng(0).random((5, 5), dtype=np.float32))
TENSORS = {
    "weights.safetensors": save_of_torch(
        {f"{kind}.0.{head}": torch.tensor(SQUARE * head) for kind in ("softmax", "method") for head in (1, 2)}
    ),
    # bits of numbers that compare otherwise: no number, minus zero
    "points.safetensors": save({"scores": np.array([np.nan, -0.0, np.inf, 1e-42], np.float32)}),
}


def packed(
    run="lizard", measure="mmlu", readings=READINGS, items=None, curve=None, tensors=None, indent=1, **changes
) -> store.Packed:
    record = {
        "schema": 2,
        "scale": "tiny",
        "run": run,
        "stage": measure,
        "measure": measure,
        "key": "k" * 64,
        "config": {"recipe": {"lr": 1e-3}},
        "parents": {},
        "artefacts": {
            name: {"sha256": hashlib.sha256(text).hexdigest()} for name, text in (tensors or {}).items()
        },
        "lock": None,
        "seed": 0,
        "wall_seconds": 1.5,
    } | changes
    metrics = {"facts": {"method": run}, "readings": readings}
    return store.Packed(
        *(json.dumps(each, indent=indent).encode() for each in (record, metrics)), items, curve, tensors
    )


NODES = {
    "runs/a/mmlu": packed("a"),
    "runs/lizard/mmlu": packed(items=ITEMS, tensors=TENSORS),
    # an integer where floats are
    "runs/lizard-seed2/mmlu": packed("lizard-seed2", readings=[{**READINGS[0], "value": 1}], tags={"a": "b"}),
    "runs/supra/finetune": packed("supra", "", curve=CURVE, wall_seconds=2),
    "runs/supra/gate": packed("supra", "gate", indent=None, items={}, curve=[]),  # not written as we write
    "models/toy": store.Packed(b'{"scale": "tiny", "key": "x"}', None),
    "text/toy": store.Packed(b'{\n "scale": "tiny"\n}', b'{\n "tokens": 5\n}'),
}


@pytest.fixture
def place(tmp_path) -> Path:
    store.write(tmp_path, NODES)
    return tmp_path


def test_every_node_comes_back_as_it_was(place):
    found = store.opened(place)
    found.verify()
    assert list(found.rows) == sorted(NODES) and found.all() == NODES
    kinds = {
        field: type(values[0])
        for field, values in found.items("runs/lizard/mmlu").items()
        if field not in ("answer", "unset")
    }
    assert kinds == {"task": str, "doc_id": int, "acc": float, "exact": bool, "scores": list}
    assert [type(value) for value in found.items("runs/lizard/mmlu")["answer"]] == [str, int, float]
    assert {field.name: str(field.type) for field in pq.read_schema(place / store.ITEMS)} == {
        "node": "string",
        "task": "string",
        "doc_id": "int64",
        "acc": "double",
        "exact": "bool",
        "answer": "string",
        "scores": "string",
        "unset": "string",
    }


def test_the_same_nodes_give_the_same_bytes_in_any_order(place, tmp_path):
    (tmp_path / "again").mkdir()
    store.write(tmp_path / "again", dict(reversed(NODES.items())))
    for name in (*store.FILES, store.TENSORS):
        assert (tmp_path / "again" / name).read_bytes() == (place / name).read_bytes()


def test_files_of_tensors_are_read_as_if_they_lay_in_the_folder(place, tmp_path):
    """Byte for byte, so with the sha256 that the record names; a node that left none has none."""
    node = place / "runs/lizard/mmlu"
    for name, text in TENSORS.items():
        assert store.exists(node / name) and store.read(node / name) == text
        assert difference(node, read(node), name) is None
        assert tensors_in(node / name).keys() == tensors_of(text).keys()
    assert not store.exists(node / "parts.safetensors") and not store.exists(
        node / "adapter/points.safetensors"
    )
    with pytest.raises(FileNotFoundError, match="mmlu/parts.safetensors is missing: it lies neither"):
        tensors_in(node / "parts.safetensors")
    store.write(place, {"runs/lizard/mmlu": packed(items=ITEMS)})
    assert not (place / store.TENSORS).exists() and not store.exists(node / "weights.safetensors")
    store.opened(place).verify()


@pytest.mark.parametrize(
    "text",
    [
        save({"scores": np.zeros(3, np.float64)}),
        save({"scores": np.zeros(3, np.float32)}, {"format": "pt"}),
        save({"scores": np.zeros(3, np.float32), "n": np.zeros(1, np.int32)}),
    ],
    ids=["of another dtype", "with metadata", "of two dtypes"],
)
def test_tensors_that_would_not_come_back_are_refused(tmp_path, text):
    with pytest.raises(UserError, match="runs/a/mmlu/points.safetensors: a store has safetensors .* float32"):
        store.write(tmp_path, {"runs/a/mmlu": packed("a", tensors={"points.safetensors": text})})


def test_a_node_of_the_same_name_replaces_the_older_one_and_the_others_stay(place):
    store.write(
        place, store.joined(place, {"runs/lizard/mmlu": packed(key="new"), "runs/t2r/mmlu": packed("t2r")})
    )
    found = store.opened(place).all()
    assert found == {**NODES, "runs/lizard/mmlu": packed(key="new"), "runs/t2r/mmlu": packed("t2r")}


def test_readers_see_a_packed_node_as_one_in_its_folder(place, tmp_path):
    node, loose = place / "runs/lizard/mmlu", tmp_path / "loose/runs/lizard/mmlu"
    unpack(node, loose)
    (loose / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in read_items(node)))
    assert read(node) == read(loose) == json.loads(NODES["runs/lizard/mmlu"].record)
    packed_one, loose_one = load(node), load(loose)
    assert packed_one.readings == loose_one.readings and len(packed_one.readings) == 3
    assert packed_one.source._replace(file="") == loose_one.source._replace(file="")
    assert (
        packed_one.source.file == f"{place.as_posix()}/nodes.parquet#runs/lizard/mmlu"
        and loose_one.source.file.endswith("mmlu/run.json")
    )
    assert store.folder_of(packed_one.source.file) == node and store.folder_of(loose_one.source.file) == loose
    assert read_columns(loose).keys() | {"unset"} == read_columns(node).keys() and read_items(
        loose
    ) == read_items(node)
    assert store.curve(place / "runs/supra/finetune") == CURVE and store.curve(node) is None
    assert [folder.name for folder in store.parts(place / "runs/supra")] == ["finetune", "gate"]
    assert store.runs(place) == ["a", "lizard", "lizard-seed2", "supra"]


def test_what_lies_in_a_nodes_own_folder_comes_before_the_store(place):
    (place / "runs/lizard/mmlu").mkdir(parents=True)
    (place / "runs/lizard/mmlu/run.json").write_bytes(packed(key="mine").record)
    assert read(place / "runs/lizard/mmlu")["key"] == "mine" and place / "runs/lizard/mmlu" in store.nodes(
        place
    )
    assert len(store.nodes(place)) == len(NODES)


def test_what_no_store_has_is_not_there(place, tmp_path):
    assert (
        read(place / "runs/none/mmlu") is None
        and not store.has(place / "runs/none")
        and store.parts(place / "runs/none") == []
    )
    assert not store.exists(place / "models/toy/metrics.json") and store.exists(place / "models/toy/run.json")
    with pytest.raises(FileNotFoundError):
        store.read(place / "models/toy/metrics.json")
    with pytest.raises(FileNotFoundError, match="metrics.json is missing: the measurement did not finish"):
        load(place / "runs/none/mmlu")


def test_all_readings_are_one_frame(place, tmp_path):
    (place / "runs/t2r/mmlu").mkdir(parents=True)
    for name, text in zip(("run.json", "metrics.json"), packed("t2r"), strict=False):
        (place / "runs/t2r/mmlu" / name).write_bytes(text)
    found = frame(place)
    assert tuple(found.columns) == COLUMNS and len(found) == 3 + 3 + 1 + 3 + 3, "of measurements alone"
    lizard = found[(found.run == "lizard") & (found.metric == "acc")]
    assert sorted(zip(lizard.seed, lizard.value, lizard.n, strict=True)) == [
        (0, 0.25, 14042),
        (2, 1.0, 14042),
    ]
    [row] = found[
        (found.node == store.named(place / "runs/lizard/mmlu")) & (found.metric == "perplexity")
    ].to_dict("records")
    assert (
        row["at"] == '{"depth": 0.5, "length": 4096}' and row["why"] == "beyond it" and pd.isna(row["value"])
    )
    assert set(found[found.run == "t2r"].measure) == {"mmlu"}


def table_of(path: Path) -> pa.Table:
    return pq.read_table(path)


def rewritten(path: Path, change) -> None:
    """The file with a changed table, and the same metadata."""
    pq.write_table(change(table_of(path)), path)


def edited(column: str, value):
    def change(table: pa.Table) -> pa.Table:
        values = table[column].to_pylist()
        field = table.schema.field(column)
        return table.set_column(
            table.column_names.index(column), field, pa.array([value, *values[1:]], field.type)
        )

    return change


EDITS = {
    "a value": ("readings.parquet", edited("value", 0.75), "readings.parquet, node runs/a/mmlu: sha256"),
    "an item": (
        "items.parquet",
        edited("doc_id", 7),
        "items.parquet, node runs/lizard/mmlu: sha256 .* got, .* expected",
    ),
    "a loss": ("curves.parquet", edited("loss", 0.1), "curves.parquet, node runs/supra/finetune: sha256"),
    "a record": (
        "nodes.parquet",
        lambda table: edited("run.key", "another")(table.slice(1)),
        "nodes.parquet, node runs/a/mmlu: sha256",
    ),
    "a record that was written otherwise": (
        "nodes.parquet",
        edited("run.key", "another"),
        "nodes.parquet, node models/toy: the columns say someth",
    ),
    "an item of another node": (
        "items.parquet",
        edited("node", "runs/x/y"),
        "items.parquet: rows 0 to 3 are not those of node runs/lizard/mmlu",
    ),
    "a row too few": (
        "items.parquet",
        lambda table: table.slice(0, 2),
        "items.parquet has 2 rows, and nodes.parquet counts 3",
    ),
    "a row too many": (
        "curves.parquet",
        lambda t: pa.concat_tables([t, t.slice(0, 1)]),
        "curves.parquet has 3 rows, and nodes.parquet counts 2",
    ),
    "a node twice": (
        "nodes.parquet",
        lambda table: pa.concat_tables([table, table.slice(0, 1)]),
        "nodes.parquet has a node twice",
    ),
    "a newer format": (
        "readings.parquet",
        lambda t: t.replace_schema_metadata({store.MARK: b"2"}),
        "readings.parquet is of format 2",
    ),
    "no store": (
        "nodes.parquet",
        lambda table: table.replace_schema_metadata({}),
        "nodes.parquet is no file of a store",
    ),
    "a tensor's number": (
        "tensors.parquet",
        edited("values", [0.5, 0.0, 1.0, 2.0]),
        "tensors.parquet, node runs/lizard/mmlu: sha256",
    ),
    "a tensor's shape": (
        "tensors.parquet",
        edited("shape", "[2, 3]"),
        "tensors.parquet, node runs/lizard/mmlu: points.safetensors cannot be put together: ValueError",
    ),
    "a tensor of a file that no record names": (
        "tensors.parquet",
        edited("file", "other.safetensors"),
        "tensors.parquet, node runs/lizard/mmlu: sha256 .* got, no such file expected",
    ),
    "a tensor too few": (
        "tensors.parquet",
        lambda table: table.slice(2),
        "tensors.parquet, node runs/lizard/mmlu: sha256",
    ),
    "tensors of another node": (
        "tensors.parquet",
        edited("node", "runs/x/y"),
        "tensors.parquet has tensors of runs/x/y, and nodes.parquet no such node",
    ),
    "tensors without their values": (
        "tensors.parquet",
        lambda table: table.drop(["values"]),
        "tensors.parquet, node runs/lizard/mmlu: .* cannot be put together: KeyError",
    ),
    "a column too few": (
        "items.parquet",
        lambda table: table.drop(["acc"]),
        "items.parquet has no column acc, which nodes.parquet names",
    ),
}


@pytest.mark.parametrize("case", EDITS)
def test_an_edited_store_is_refused_with_its_file_and_node(place, case):
    name, change, said = EDITS[case]
    store.opened(place).verify()  # what a process has read before does not hide it
    rewritten(place / name, change)
    with pytest.raises(BrokenError, match=said):
        store.opened(place).verify()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (name, damage)
        for name in (*store.FILES, store.TENSORS)
        for damage in ("cut", "gone", "empty", "text")
        if (name, damage) != (store.TENSORS, "gone")  # which the manifest of a committed folder tells
    ],
)
def test_a_store_with_a_damaged_file_is_refused_with_that_file(place, name, damage):
    path = place / name
    store.opened(place).verify()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"cut": path.read_bytes()[:-10], "empty": b"", "text": b"no parquet"}[damage])
    with pytest.raises(
        (BrokenError, FileNotFoundError), match=f"{name}.* (cannot be read|No such file)|No such file.*{name}"
    ):
        store.opened(place).verify()


def test_files_of_two_stores_are_refused(place, tmp_path):
    other = {
        **NODES,
        "runs/lizard/mmlu": packed(
            readings=[{**each, "n": 1} for each in READINGS], items={**ITEMS, "doc_id": [3, 4, 5]}
        ),
    }
    (tmp_path / "other").mkdir()
    store.write(tmp_path / "other", other)
    for name in ("readings.parquet", "items.parquet"):
        before = (place / name).read_bytes()
        shutil.copy(tmp_path / "other" / name, place / name)
        with pytest.raises(BrokenError, match=f"{name}, node runs/lizard/mmlu: sha256"):
            store.opened(place).verify()
        (place / name).write_bytes(before)
    store.opened(place).verify()


# --- committed stores ---


@pytest.mark.parametrize("place", store.campaigns(REFERENCE), ids=lambda place: place.name)
def test_readings_of_a_committed_store_are_those_of_its_metrics(place):
    found, table = store.opened(place), frame(place)
    assert len(table) == sum(
        len(load(place / node).readings) for node in found.rows if json.loads(found.record(node))["measure"]
    )
    assert len(table) == pq.read_metadata(place / store.READINGS).num_rows and {*table.node} <= {
        store.named(place / node) for node in found.rows
    }


def test_show_prints_the_record_behind_a_cell(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    name = "results/reference/smollm2/nodes.parquet#runs/lizard/lambada"
    for said in (
        "smollm2/lizard/lambada",
        "smollm2/runs/lizard/lambada",
        "results/reference/smollm2/runs/lizard/lambada",
        name,
    ):
        cli.app(["show", said], standalone_mode=False)
        out = capsys.readouterr().out
        assert f"record    {name}\n" in out and "commit    " in out and "NVIDIA H100" in out
        assert (
            "other seeds: lizard-seed1/lambada, lizard-seed2/lambada" in out
            and "parent    finetune: lizard/finetune, key" in out
        )
        assert "reading   acc of lambada_openai: 0.3" in out
    cli.app(["show", "smollm2/lizard/lambada", "--json"], standalone_mode=False)
    assert (
        json.loads(capsys.readouterr().out)["key"] == read(REFERENCE / "smollm2/runs/lizard/lambada")["key"]
    )
    cli.app(["show", "smollm2/models/smollm2-135m-instruct"], standalone_mode=False)
    for wrong, near in (
        ("smollm2/lizrd/lambada", "near it: lizard/lambada"),
        ("smolm2/lizard/lambada", "near it: smollm2"),
    ):
        code, stderr = relinear(monkeypatch, "show", wrong)
        assert code == 1 and near in stderr and stderr.count("\n") == 1


# --- the frame of readings, and the one function by which a cell is read from it ---

CELLS = {
    "mmlu": ("mmlu", "acc", "mmlu", 100.0),
    "ppl": ("perplexity", "perplexity", None, 1.0),
    "lambada": ("lambada", "acc", "lambada_openai", 100.0),
    "state_mib": ("state_bytes", "mebibytes", "model", 1.0),
}


def of_trainings(*values, stderr=0.1):
    names = ["lizard", *(f"lizard-seed{n}" for n in range(1, len(values)))]
    return {
        (name, "mmlu"): measurement(name, "mmlu", reading("acc", v, stderr, 50, "mmlu"))
        for name, v in zip(names, values, strict=True)
    }


def test_a_frame_has_a_row_a_reading_and_the_columns_of_the_contract():
    frame = frame_of(of_trainings(1.0, 2.0) | {("t2r", "mmlu"): None})
    assert (
        tuple(frame.columns)
        == COLUMNS
        == ("node", "run", "seed", "measure", "metric", "of", "at", "value", "stderr", "n", "why")
    )
    assert list(zip(frame["node"], frame["run"], frame["seed"], frame["at"], strict=True)) == [
        ("results/lizard/mmlu/run.json", "lizard", 0, "{}"),
        ("results/lizard-seed1/mmlu/run.json", "lizard", 1, "{}"),
    ]
    assert tuple(frame_of({}).columns) == COLUMNS and score(frame_of({}), "lizard", "mmlu", "acc") is None


def test_a_score_is_the_mean_over_trainings_and_its_error_that_of_items_and_of_trainings():
    found = score(frame_of(of_trainings(1.0, 2.0, 3.0)), "lizard", "mmlu", "acc", unit=10.0)
    assert (found.value, found.n, found.sd) == (20.0, 50, 10.0) and found.stderr == pytest.approx(
        math.hypot(1.0, 10 / math.sqrt(3))
    )
    one = score(frame_of(of_trainings(1.0, 2.0)), "lizard-seed1", "mmlu", "acc")
    assert (one.value, one.stderr, one.sd) == (2.0, 0.1, None), (
        "a further training by its own name is that one"
    )
    assert score(frame_of(of_trainings(1.0, 2.0, stderr=None)), "lizard", "mmlu", "acc").stderr is None


def test_a_place_is_found_by_its_value_and_two_objects_are_not_mixed():
    two = measurement(
        "t2r",
        "m",
        reading("acc", 0.5, of="a", length=2048),
        reading("acc", 0.6, of="b", length=2048),
        reading("acc", 0.7, of="a"),
    )
    frame = frame_of({("t2r", "m"): two})
    assert (
        score(frame, "t2r", "m", "acc", "b", {"length": 2048.0}).value == 0.6
        and score(frame, "t2r", "m", "acc", at={"length": 1}) is None
    )
    with pytest.raises(ValueError, match="acc is read 2 times: of a, b; say of which"):
        select(frame, "t2r", "m", "acc", at={"length": 2048})


def test_what_is_not_defined_is_no_score():
    undefined = reading("acc", None, None, 0)._replace(why="no window")
    frame = frame_of({("t2r", "m"): measurement("t2r", "m", undefined)})
    assert score(frame, "t2r", "m", "acc") is None and list(select(frame, "t2r", "m", "acc")["why"]) == [
        "no window"
    ]


def test_the_committed_cells_of_lizard_s_table_4_are_scores_of_the_committed_readings():
    folder, checked = REFERENCE / "lizard_smollm2", 0
    for row in csv.DictReader((folder / "lizard/table4.csv").read_text().splitlines()):
        for window in (32, 64, 128, 256):
            run = f"lizard_w{window}_m{row['meta']}"
            for name, (measure, metric, of, unit) in CELLS.items():
                found = {
                    (run + seed, measure): measured_in(folder / "runs" / (run + seed), measure)
                    for seed in ("", "-seed1", "-seed2")
                }
                ours, cell = score(frame_of(found), run, measure, metric, of, unit=unit), f"{name}_w{window}"
                assert f"{ours.value:.6g}" == row[cell], (run, name)
                assert row[f"{cell}_stderr"] == ("" if ours.stderr is None else f"{ours.stderr:.6g}")
                checked += 1
    assert checked == 64
