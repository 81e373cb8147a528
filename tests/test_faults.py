"""A part of the fault campaign (`make faults`): malformed settings are refused with a message; damaged
results are named, made again, and end the same."""

import errno
import importlib
import json
import os
import re
import shutil
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import upsets
import yaml
from faults import (
    CLEAR,
    CRASH,
    DAMAGES,
    GOOD,
    HARMLESS,
    LAST,
    NONSENSE,
    Outcome,
    again,
    contents,
    files_of,
    inputs,
    judge,
    linked,
    meaning,
    prepared,
    rounds,
    settings,
)
from malformed import OF_ENTRIES, drawn, kind
from test_stage import Mirror

from relinear.draw.planned import draw_planned
from relinear.errors import UserError
from relinear.machine.disk import require_possible
from relinear.plan.plan import Plan, from_cli
from relinear.plan.strict import WORKFLOW, ConfigError
from relinear.plan.targets import places
from relinear.records import drawn_otherwise, set_aside
from relinear.retime import retime
from relinear.tracking.committed import export

EACH_KIND = (
    "scales/smoke.yaml",
    "models.yaml",
    "measures.yaml",
    "assets.yaml",
    "papers/lizard/runs.yaml",
    "papers/lizard/paper.yaml",
    "papers/lolcats/table1.yaml",
    "tasks/piqa.yaml",
)
ROOT = Path(__file__).resolve().parent.parent
INPUTS, EVERY = 100, 9  # of the settings, and of the rounds one in so many


def test_malformed_settings_are_refused_in_words_before_any_work():
    bad = [outcome for outcome in inputs(INPUTS) if outcome.what not in GOOD]
    assert not bad, "\n".join(map(str, bad))


def test_settings_are_drawn_from_every_schema_and_most_are_malformed():
    found = drawn(sorted(settings()), INPUTS)
    assert {kind(setting.name) for setting in found} == {
        *OF_ENTRIES,
        "columns.yaml",
        "paper",
        "scales",
        "spec",
        "tasks",
    }
    assert sum(setting.refused for setting in found) > INPUTS / 2 and {setting.at for setting in found} == {
        setting.at for setting in drawn(sorted(settings()), INPUTS)
    }


def test_a_scale_may_say_nothing_of_measures(tmp_path):
    """Hypothesis found that it ended in a traceback."""
    workflow = linked(tmp_path / "workflow")
    scale = yaml.safe_load((WORKFLOW / "scales/smoke.yaml").read_text())
    (workflow / "scales/smoke.yaml").unlink()
    (workflow / "scales/smoke.yaml").write_text(yaml.safe_dump(scale | {"measures": {}}))
    assert (
        from_cli({"scale": "smoke"}, workflow=workflow).config.text.heldout_tokens
        == scale["text"]["heldout_tokens"]
    )


def test_the_campaign_sees_a_traceback_and_what_is_taken(tmp_path, monkeypatch):
    """Otherwise the test above could not fail."""
    usual, workflow = meaning(WORKFLOW), linked(tmp_path / "workflow")
    assert judge(workflow, usual, nonsense=True) == (HARMLESS, "")
    scale = workflow / "scales/smoke.yaml"
    text = scale.read_text().replace("seq_len: 128", "seq_len: 64")
    scale.unlink()
    scale.write_text(text)
    assert judge(workflow, usual, nonsense=True)[0] not in GOOD
    monkeypatch.setattr("relinear.plan.scale.parse", lambda *given: [][1])
    assert judge(workflow, usual, nonsense=False)[0] == CRASH


@pytest.mark.parametrize(
    "value", [*NONSENSE[:4], NONSENSE[-1], NONSENSE[-2]], ids=lambda value: str(value)[:8]
)
def test_what_no_setting_means_is_refused_wherever_it_stands(tmp_path, value):
    workflow = linked(tmp_path / "workflow")
    for name in EACH_KIND:
        tree = yaml.safe_load((WORKFLOW / name).read_text())
        (workflow / name).unlink()
        (workflow / name).write_text(yaml.safe_dump(tree | {"extra": value}))
        with pytest.raises(UserError, match=f"{name.rpartition('/')[2]}: extra"):
            from_cli({"scale": "smoke"}, workflow=workflow).check()
        (workflow / name).unlink()
        (workflow / name).symlink_to(WORKFLOW / name)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("relinear.tracking.live"), "Tracker", Mirror)
        yield prepared(tmp_path_factory.mktemp("faults") / "results")


def test_damaged_results_are_told_mended_by_what_is_named_and_end_the_same(plan):
    found = list(rounds(plan, lambda number: number % EVERY == 0))
    assert len(found) >= 12
    bad = [outcome for outcome in found if outcome.what not in GOOD]
    assert not bad, "\n".join(map(str, bad))
    again(plan)


def copied_without_times(plan, to):
    """A copy of a plan's results as `cp -r` leaves one at its worst; the steps behind its last one, and their
    records."""
    copied = replace(plan, results=to)
    shutil.copytree(plan.results, to, ignore=shutil.ignore_patterns(".work"))
    nodes = copied.behind([copied.node(*LAST.split())])
    paths = [copied.folder(node) / "run.json" for node in nodes]
    now = time.time()
    for age, path in enumerate(paths):
        os.utime(path, (now - 1000 - age,) * 2)
    return copied, nodes, paths


def test_results_copied_without_times_stand_in_order(plan, tmp_path):
    """What a parent's change made stale keeps its time, so that rules run it."""
    copied, nodes, paths = copied_without_times(plan, tmp_path / "results")
    now = time.time()
    before = {path: path.stat().st_mtime for path in paths}
    made_of_others = [path for node, path in zip(nodes, paths, strict=True) if copied.parents(node)]
    assert retime(copied) == len(made_of_others) >= 5
    assert not (copied.root / ".work").exists(), "made to find out, in a dry run too"
    for node, path in zip(nodes, paths, strict=True):
        behind = [copied.folder(parent) / "run.json" for parent in copied.parents(node).values()]
        assert all(path.stat().st_mtime >= one.stat().st_mtime for one in behind), node
        assert (path in made_of_others) == (path.stat().st_mtime != before[path]), node
    assert retime(copied) == 0

    tuned = copied.folder(copied.node("finetune", "hedgehog")) / "run.json"
    record = json.loads(tuned.read_text())
    record["parents"]["distill"]["contents"] = "others"
    tuned.write_text(json.dumps(record))
    os.utime(tuned, (now - 2000,) * 2)
    assert retime(copied) == 0 and tuned.stat().st_mtime == now - 2000


def test_times_are_given_beside_a_step_whose_settings_are_wrong(plan, tmp_path):
    """Which is told where the step is asked for: a command for another run does not end."""
    copied, nodes, paths = copied_without_times(plan, tmp_path / "results")
    workflow = linked(tmp_path / "workflow")
    runs = workflow / "papers/hedgehog/runs.yaml"
    right = "- finetune: {data: alpaca, kind: lora, lr: 1.0e-4}"
    text = runs.read_text()
    assert text.index("hedgehog:") == 0 and text.index(right) < 300
    runs.unlink()
    runs.write_text(text.replace(right, right.replace("alpaca", "nosuch"), 1))
    copied = replace(copied, workflow=workflow)
    with pytest.raises(ConfigError, match="nosuch"):
        copied.key(copied.node("finetune", "hedgehog"))
    before = {path: path.stat().st_mtime for path in paths}
    assert retime(copied) >= 3
    kept = {n.stage for n, path in zip(nodes, paths, strict=True) if path.stat().st_mtime == before[path]}
    assert {"finetune", "measure"} < kept and "distill" not in kept


def test_times_are_given_beside_steps_that_end_and_folders_of_others(plan, tmp_path, monkeypatch, capsys):
    """A record that goes while times are read, one that goes while a result is compared, and a folder that
    may not be written to; of large results a line says that they are read."""
    copied, nodes, paths = copied_without_times(plan, tmp_path / "results")
    usual, found = Path.glob, importlib.import_module("relinear.stage").stands
    gone = copied.root / "models/gone/run.json"

    def stands(plan, node):
        if node.stage == "distill":
            raise PermissionError(errno.EACCES, "Permission denied", str(plan.folder(node)))
        stood = found(plan, node)
        if node.stage == "finetune":
            (plan.folder(node) / "run.json").unlink()
        return stood

    monkeypatch.setattr(Path, "glob", lambda folder, pattern: [*usual(folder, pattern), gone])
    monkeypatch.setattr("relinear.stage.stands", stands)
    monkeypatch.setattr("relinear.retime.LONG", 300_000)
    assert retime(copied) == sum(bool(copied.parents(node)) for node in nodes) - 2
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"{copied.root / 'activations/stories@tiny'} is older than what it is made from")


def test_rounds_have_each_damage_of_each_kind_of_step(plan):
    assert {path.parts[0] for path in files_of(plan)} == {"models", "written", "text", "activations", "runs"}
    assert {path.parts[2] for path in files_of(plan) if path.parts[0] == "runs"} == {
        "distill",
        "finetune",
        "gate",
        "perplexity",
    }
    assert len(DAMAGES) == 4 and contents(plan).keys() == {"metrics.json", "items.jsonl"}


def test_upsets_are_many_and_of_each_kind():
    found = [kind.name for _, kind in upsets.names(60)]
    assert len(found) == 60 and min(Counter(found).values()) >= 2
    for part in (
        "SIGKILL",
        "SIGTERM",
        "SIGINT",
        "SIGHUP",
        "SIGSTOP",
        "two commands",
        "disk full",
        "read-only",
        "store deleted",
        "store silent",
    ):
        assert any(part in name for name in found), part


def test_the_log_of_the_campaign_has_what_it_must_reach():
    """`make faults`, as it was run at the one commit that all lines name: nothing lost, silent or told by a
    traceback."""
    log = [Outcome(*json.loads(line)) for line in (ROOT / "docs/log/faults.jsonl").read_text().splitlines()]
    [commit] = {outcome.commit for outcome in log}
    assert len({outcome.case for outcome in log}) == len(log) and re.fullmatch("[0-9a-f]{7,}", commit)
    assert {outcome.what for outcome in log} <= set(GOOD)
    upset = {outcome.case for outcome in log if outcome.case.startswith("upset")}
    damaged = [outcome for outcome in log if ": " not in outcome.case and outcome.case.split()[-1] in DAMAGES]
    refused = [outcome for outcome in log if outcome.what == CLEAR and ": " in outcome.case]
    assert {name for name, _ in upsets.names(60)} <= upset and len(damaged) >= 100 and len(refused) >= 300


@pytest.mark.parametrize(
    "name",
    ["comparison", "models", "models/tiny", "text/stories@tiny", "runs", "runs/lizard", "runs/lizard/gate"],
)
def test_a_file_in_the_place_of_a_folder_of_results_is_named_and_others_may_lie_there(tmp_path, name):
    plan = Plan(scale="smoke", results=tmp_path)
    for other in ("runs/lizard/notes.txt", "runs/notes.txt", "models/.DS_Store"):
        (plan.root / other).parent.mkdir(parents=True, exist_ok=True)
        (plan.root / other).write_text("")
    require_possible(*places(plan))
    shutil.rmtree(plan.root / name, ignore_errors=True)
    (plan.root / name).parent.mkdir(parents=True, exist_ok=True)
    (plan.root / name).write_text("")
    with pytest.raises(UserError, match=f"smoke/{name} is a file, and a folder is needed there"):
        require_possible(*places(plan))


# --- tables read no number that its record does not name ---


def test_a_changed_number_is_not_drawn(plan, tmp_path, capsys):
    artefact, path = (
        plan.artefacts["comparison_table2"],
        plan.folder(plan.node(*LAST.split())) / "metrics.json",
    )
    before, cell = (
        path.read_text(),
        next(r["value"] for r in json.loads(path.read_text())["readings"] if r["metric"] == "perplexity"),
    )
    out = plan.out(artefact) / f"{artefact.stem}.csv"
    draw_planned(plan, artefact)
    assert f"{cell:.6g}" in out.read_text()
    path.write_text(before.replace(str(cell), str(cell + 1000)))
    capsys.readouterr()
    draw_planned(plan, artefact)
    assert f"{cell + 1000:.6g}" not in out.read_text() and f"{cell:.6g}" not in out.read_text()
    assert "metrics.json is not what its run.json says" in capsys.readouterr().err
    path.write_text(before)


def test_rules_draw_no_table_in_which_a_row_is_missing(plan):
    with pytest.raises(
        UserError,
        match=(
            r"comparison_table2: \d+ of \d+ measurements are not finished.*; run `relinear measure teacher .*"
            r" --scale smoke"
        ),
    ):
        draw_planned(plan, plan.artefacts["comparison_table2"], finished=True)


def test_a_setting_that_is_a_list_where_a_name_belongs_is_refused(tmp_path):
    workflow = linked(tmp_path / "workflow")
    figure = workflow / "papers/lolcats/figure5.yaml"
    text = figure.read_text()
    figure.unlink()
    figure.write_text(f"draw: []\n{text}")
    with pytest.raises(ConfigError, match=r"figure5.yaml.*(draw|twice)"):
        from_cli({"scale": "smoke"}, workflow=workflow).check()


# --- what was drawn, and what it was drawn from, is what its record says ---


def test_a_measurement_whose_items_are_gone_or_others_is_not_drawn_and_made_again(plan, capsys):
    artefact, node = plan.artefacts["comparison_table2"], plan.node(*LAST.split())
    items = plan.folder(node) / "items.jsonl"
    before, value = (
        items.read_bytes(),
        str(json.loads((plan.folder(node) / "metrics.json").read_text())["readings"][0]["value"])[:5],
    )
    for damage in (Path.unlink, lambda path: path.write_bytes(before.replace(b"1", b"2", 1))):
        damage(items)
        capsys.readouterr()
        draw_planned(plan, artefact)
        assert value not in (plan.out(artefact) / "table2.csv").read_text()
        assert "items.jsonl is not what its run.json says" in capsys.readouterr().err
        [said] = set_aside(plan.root)
        assert "items.jsonl" in said and said.endswith("its step runs again") and plan.finished(node) is None
        again(plan)
        assert items.read_bytes() == before
    draw_planned(plan, artefact)
    assert value in (plan.out(artefact) / "table2.csv").read_text()


def test_a_large_file_of_a_measurement_is_read_when_it_is_drawn_from_and_its_step_runs_again(
    plan, monkeypatch
):
    """Planning looks at its size alone, since there are gigabytes of weights."""
    monkeypatch.setattr("relinear.records.LIGHT", 10)
    node = plan.node(*LAST.split())
    items = plan.folder(node) / "items.jsonl"
    before = items.read_bytes()
    items.write_bytes(before.replace(b"1", b"2", 1))
    assert list(set_aside(plan.root)) == [] and plan.finished(node)
    with pytest.raises(UserError, match="not finished as this plan would make them"):
        draw_planned(plan, plan.artefacts["comparison_table2"], finished=True)
    assert plan.finished(node) is None, "the next command of Snakemake makes it again"
    again(plan)
    assert items.read_bytes() == before
    items.write_bytes(before[:-1])
    assert "items.jsonl" in "".join(set_aside(plan.root)), "a size is looked at"
    again(plan)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("suffix", ["csv", "md", "claims.csv", "provenance.json"])
def test_what_was_drawn_is_what_its_record_says(plan, suffix, damage):
    artefact = plan.artefacts["comparison_table2"]
    draw_planned(plan, artefact)
    record, file = plan.drawing(artefact), plan.out(artefact) / f"table2.{suffix}"
    before = file.read_bytes()
    assert drawn_otherwise(record) is None and before
    DAMAGES[damage](file)
    assert str(file) in drawn_otherwise(record)
    with pytest.raises(UserError, match=rf"{re.escape(str(file))}.*draw it again"):
        export(plan.root, plan.results / "out")
    draw_planned(plan, artefact)
    assert drawn_otherwise(record) is None and file.read_bytes() == before


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"schema": 2, "artefacts": {}}', '{"schema": 2, "artefacts": {"table2.csv": 5}}'],
)
def test_a_record_of_a_drawing_that_cannot_be_believed_says_so(plan, text):
    draw_planned(plan, artefact := plan.artefacts["comparison_table2"])
    (record := plan.drawing(artefact)).write_text(text)
    assert str(record) in drawn_otherwise(record)
    record.unlink()
    assert drawn_otherwise(record) == f"{record} is not there"
