"""`relinear status`: the reasons why finished results would be made anew."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import made
from test_errors import relinear
from test_stage import Mirror

from relinear import stage, status
from relinear.errors import UserError
from relinear.plan.plan import Plan
from relinear.tracking import live as tracking

# a measurement behind its gate, and a training, with their model and text
NODES = ("measure teacher perplexity", "finetune teacher_lora")
FOLDERS = [
    "models/tiny",
    "runs/teacher/gate",
    "runs/teacher/perplexity",
    "runs/teacher_lora/finetune",
    "text/stories@tiny",
    "written/stories@tiny",
]


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Plan:
    plan = Plan(scale="smoke", results=tmp_path_factory.mktemp("results"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracking, "Tracker", Mirror)
        made(plan, *NODES)
    return plan


@pytest.fixture
def edited(plan):
    """A function that changes fields of a folder's record until the test ends."""
    texts: dict[Path, str] = {}

    def edit(folder: str, change) -> None:
        path = plan.root / folder / "run.json"
        texts.setdefault(path, path.read_text())
        record = json.loads(path.read_text())
        change(record)
        path.write_text(json.dumps(record))

    yield edit
    for path, text in texts.items():
        path.write_text(text)


def said(plan: Plan) -> dict[str, str]:
    """Folder -> reasons, for each folder that would be made anew."""
    *changed, _ = status.lines(plan)
    return dict(line.split(": ", 1) for line in changed)


def test_what_was_just_made_has_not_changed(plan):
    assert status.lines(plan) == [
        f"{len(FOLDERS)} finished results in {plan.root}: nothing has changed since"
    ]
    assert said(replace(plan, teacher="mistral-7b", seeds=3)) == {}, "which only choose what tables show"


def test_another_kernel_lock_or_asset_is_named_and_reruns_nothing(plan, edited):
    def older(record):
        record["kernels"]["token_cross_entropy"] = "0" * 64
        record["kernels"].pop("rotary")

    edited("runs/teacher_lora/finetune", older)
    edited("text/stories@tiny", lambda record: record.update(lock="0" * 64))
    edited("models/tiny", lambda record: record["config"]["assets"].update(brown="0" * 64))
    assert said(plan) == {
        "runs/teacher_lora/finetune": "kernels rotary, token_cross_entropy changed",
        "text/stories@tiny": "requirements.lock has changed",
        "models/tiny": "asset brown changed",
    }
    assert status.lines(plan)[-1] == f"{len(FOLDERS)} finished results in {plan.root}: 3 changed since"
    assert all(plan.finished(node) for node in plan.behind([plan.node(*words.split()) for words in NODES])), (
        "none would be made anew"
    )


def test_a_record_from_before_there_was_a_lock_in_it_says_so(plan, edited):
    edited("models/tiny", lambda record: record.pop("lock"))
    assert said(plan) == {"models/tiny": "requirements.lock has changed"}


def test_outside_a_clone_there_is_no_lock_to_compare(plan, edited, monkeypatch):
    edited("models/tiny", lambda record: record.update(lock="0" * 64))
    monkeypatch.setattr(status, "lock_hash", lambda: None)
    assert said(plan) == {}


def test_what_the_plan_would_make_anew_is_what_is_not_finished(plan, monkeypatch):
    other = replace(plan)
    monkeypatch.setattr(
        "relinear.plan.plan.code_hash",
        lambda modules: "other" if "relinear.train.finetune" in modules else stage_code(modules),
    )
    assert said(other).keys() == {"runs/teacher_lora/finetune"}
    assert "would be made anew" in said(other)["runs/teacher_lora/finetune"]
    assert other.finished(other.node("finetune", "teacher_lora")) is None


def stage_code(modules: list[str]) -> str:
    from relinear.plan.code import code_hash

    return code_hash(modules)


@pytest.mark.parametrize(
    "change", [{"run": "lizzard"}, {"run": "lizard"}, {"stage": "transfer"}, {"measure": "gate"}], ids=str
)
def test_a_result_that_the_plan_does_not_know_is_named(plan, edited, change):
    edited("runs/teacher_lora/finetune", lambda record: record.update(change))
    assert said(plan) == {"runs/teacher_lora/finetune": "the plan knows no such result"}


def test_where_nothing_is_finished_it_says_so(tmp_path):
    with pytest.raises(UserError, match="no finished result in .*choose another --scale"):
        status.lines(Plan(scale="smoke", results=tmp_path))


def test_the_command_prints_it(plan, monkeypatch, capsys):
    monkeypatch.setattr(stage, "run_stage", None)  # and runs nothing
    code, stderr = relinear(monkeypatch, "status", "--scale", "smoke", "--results", str(plan.results))
    assert (code, stderr) == (0, "")
