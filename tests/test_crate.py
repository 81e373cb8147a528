"""A run's records as an RO-Crate, read back by the library that others read it with."""

import json
from pathlib import Path
from urllib.parse import unquote

import pytest
from conftest import ROOT
from rocrate.rocrate import ROCrate
from synthetic import unpack
from test_errors import relinear

from relinear.core import store
from relinear.errors import UserError
from relinear.share.crate import write

REFERENCE = ROOT / "results/reference"
FIRST = [scale / "runs" / store.runs(scale)[0] for scale in store.campaigns(REFERENCE)]
LIZARD = REFERENCE / "smollm2/runs/lizard"
MODEL, TEXT = "models/smollm2-135m-instruct", "text/mix@smollm2-135m-instruct"


def actions(crate: ROCrate) -> dict:
    """The crate's actions by the names of their steps."""
    return {entity["name"]: entity for entity in crate.contextual_entities if entity.type == "CreateAction"}


@pytest.mark.parametrize("run", [*FIRST, LIZARD], ids=lambda run: f"{run.parents[1].name}/{run.name}")
def test_each_record_is_an_action_with_what_it_read_and_made(run, tmp_path):
    out, scale = write(run, tmp_path / "crate"), run.parents[1]
    crate = ROCrate(out)
    found = actions(crate)
    own = {f"runs/{run.name}/{folder.name}" for folder in store.parts(run)}
    assert own and own <= set(found)
    assert {path.relative_to(out).parent.as_posix() for path in out.rglob("run.json")} == set(found)
    for name, action in found.items():
        record = json.loads(store.read(scale / name / "run.json"))
        assert action["startTime"] == record["started"] <= action["endTime"]
        assert action["instrument"]["softwareVersion"] == record["git"]["commit"]
        result = action["result"]
        assert unquote(result.id) == f"{name}/"
        for file in ("run.json", "metrics.json"):
            assert (out / name / file).read_bytes() == store.read(scale / name / file)
        named = {entity["name"]: entity["sha256"] for entity in result.get("mentions", [])}
        wanted = {
            file: entry["sha256"] for file, entry in record["artefacts"].items() if file != "metrics.json"
        }
        assert named == wanted, "weights and other large files, by their hashes"
        read = action.get("object", [])
        read = read if isinstance(read, list) else [read]
        hashes = {entity.get("sha256") for entity in read}
        assert {data["sha256"] for data in record["datasets"]} <= hashes
        assert len(read) == len(record["parents"]) + len(
            {(d["name"], d["sha256"]) for d in record["datasets"]}
        )


def test_a_step_leads_to_those_before_it(tmp_path):
    found = actions(ROCrate(write(LIZARD, tmp_path / "crate")))
    before = {entity.id for entity in found["runs/lizard/finetune"]["object"]}
    assert {f"{MODEL}/", f"{TEXT}/", "runs/lizard/distill/"} <= {unquote(name) for name in before}
    [intros] = [entity for entity in found[TEXT]["object"] if entity.get("name") == "wikipedia-intros"]
    assert intros["license"] == "CC-BY-SA-4.0" and "Wikipedia" in intros["creditText"]


def copied(tmp_path: Path) -> Path:
    """The committed Lizard with its scale's records, to damage."""
    for node in store.opened(REFERENCE / "smollm2").rows:
        if node in (MODEL, TEXT) or node.startswith("runs/lizard/"):
            unpack(REFERENCE / "smollm2" / node, tmp_path / "smollm2" / node)
    return tmp_path / "smollm2/runs/lizard"


def test_a_parent_that_was_made_anew_since_is_named_by_its_key_alone(tmp_path):
    run = copied(tmp_path)
    path = run.parents[1] / TEXT / "run.json"
    key = json.loads(path.read_text())["key"]
    path.write_text(path.read_text().replace(key, key[::-1]))
    crate = ROCrate(write(run, tmp_path / "crate"))
    assert TEXT not in actions(crate)
    [named] = [
        entity for entity in actions(crate)["runs/lizard/finetune"]["object"] if entity.get("identifier")
    ]
    assert named["identifier"] == key and named["name"] == "text"


def test_what_is_no_run_or_no_record_or_would_be_overwritten_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="is no run: it has no finished step or measurement"):
        write(tmp_path / "runs/none", tmp_path / "crate")
    run = copied(tmp_path)
    code, said = relinear(monkeypatch, "crate", str(run), str(run))
    assert code == 1 and said == f"error: {run} is not empty; give another folder\n"
    (run / "finetune/metrics.json").write_text("{}")
    with pytest.raises(UserError, match="finetune/metrics.json is not what its run.json says"):
        write(run, tmp_path / "crate")
    assert not (tmp_path / "crate").exists()
    assert relinear(monkeypatch, "crate", str(LIZARD), str(tmp_path / "crate")) == (0, "")
    assert (tmp_path / "crate/ro-crate-metadata.json").is_file()
