"""The teacher's own instructions: one seed gives the same ones, interrupted or not; a teacher that can write
none is a clear error."""

import importlib
import json
import lzma
import shutil
from pathlib import Path

import pytest
import torch
from conftest import made

from relinear import families
from relinear.errors import UserError
from relinear.families.tiny import byte_tokenizer
from relinear.get import written as instructions
from relinear.get.text import documents
from relinear.plan.names import digest
from relinear.plan.plan import Plan
from relinear.plan.sane import read_yaml
from relinear.plan.strict import WORKFLOW
from relinear.stage import run_stage

SETTINGS = {
    "instruction_tokens": 48,
    "response_tokens": 8,
    "temperature": 1.0,
    "response_temperature": 0.7,
    "top_p": 0.95,
}


@pytest.fixture(scope="module")
def teacher():
    return families.load("tiny").random({}, 0, torch.float32)


def test_a_batch_is_its_seed_s(teacher):
    batches = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        batches.append(instructions.write(*teacher, 64, SETTINGS))
    assert batches[0] == batches[1] != batches[2]
    assert all(
        set(r) == {"instruction", "input", "output"} and r["instruction"] and r["output"] for r in batches[0]
    )


def test_the_template_is_taken_apart_around_a_user_s_words():
    tokenizer = byte_tokenizer()
    assert instructions.template(tokenizer) == ("user: ", "<|im_end|>\nassistant: ")
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="has no chat template"):
        instructions.template(tokenizer)


def test_a_teacher_that_ends_no_turn_is_refused(teacher):
    torch.manual_seed(0)
    with pytest.raises(UserError, match="0 of 4 instructions came to an end within 1 tokens"):
        instructions.write(*teacher, 4, SETTINGS | {"instruction_tokens": 1})


def test_an_interrupted_stage_goes_on_and_writes_what_an_undisturbed_one_does(tmp_path, monkeypatch):
    texts = []
    for name in ("whole", "cut"):
        plan = Plan(scale="smoke", budget=4.0, results=tmp_path / name)
        node = plan.node("written", "stories@tiny")
        made(plan, "model tiny")
        if name == "cut":
            write, calls = instructions.write, []

            def dies(*args, write=write, calls=calls):
                if calls:
                    raise KeyboardInterrupt
                calls.append(1)
                return write(*args)

            monkeypatch.setattr(instructions, "write", dies)
            with pytest.raises(KeyboardInterrupt):
                run_stage(plan, node, instructions.work)
            monkeypatch.setattr(
                instructions, "write", lambda *args, calls=calls, write=write: calls.append(1) or write(*args)
            )
        folder = run_stage(plan, node, instructions.work)
        texts.append((folder / "written.jsonl").read_text())
    metrics = json.loads((folder / "metrics.json").read_text())
    assert texts[0] == texts[1]
    assert len(calls) == metrics["batches"] > 1, "a finished batch was written again"
    assert metrics["tokens"] >= 4 * 256 and metrics["records"] == len(
        list(documents("written", Path(folder) / "written.jsonl"))
    )


def test_batches_that_are_kept_are_taken_and_only_the_rest_is_written(tmp_path, monkeypatch):
    plan = Plan(
        scale="smoke",
        budget=4.0,
        results=tmp_path / "results",
        workflow=shutil.copytree(WORKFLOW, tmp_path / "workflow"),
    )
    records = [{"instruction": f"{n}?", "input": "", "output": "so " * 20} for n in range(5)]
    name = "instructions/mine/00000.json.xz"
    (plan.workflow / name).parent.mkdir()
    (plan.workflow / name).write_bytes(lzma.compress(json.dumps(records).encode()))
    kept, written_stage = plan.workflow / name, importlib.import_module("relinear.stages.written")
    monkeypatch.setattr(
        written_stage, "_kept", lambda model, sampling, scale: {name: digest(kept.read_bytes().hex())}
    )
    node = plan.node("written", "stories@tiny")
    before = plan.key(node)
    folder = made(plan, "written stories@tiny")
    written = [json.loads(line) for line in (folder / "written.jsonl").read_text().splitlines()]
    metrics = json.loads((folder / "metrics.json").read_text())
    assert written[:5] == records and len(written) > 5 and metrics["kept"] == 1 < metrics["batches"]
    (plan.workflow / name).write_bytes(lzma.compress(json.dumps(records * 99).encode()))
    enough = Plan(scale="smoke", budget=4.0, results=plan.results, workflow=plan.workflow)
    assert enough.key(node) != before
    monkeypatch.setattr(instructions, "load_teacher", None)
    metrics = json.loads((made(enough, "written stories@tiny") / "metrics.json").read_text())
    assert metrics["kept"] == metrics["batches"] == 1 and metrics["records"] == 5 * 99


def test_what_is_kept_is_that_of_this_teacher_sampling_and_seed(tmp_path):
    def kept(**choices) -> dict:
        plan = Plan(scale="smollm2", **choices)
        return plan.settings(plan.node("written", "mix@smollm2-135m-instruct"))["kept"]

    assert len(kept()) == len(kept(budget=2.0)) == 3 and all((WORKFLOW / name).is_file() for name in kept())
    assert kept(seed=1) == {}
    workflow = shutil.copytree(WORKFLOW, tmp_path / "workflow")
    for path, old, new in (
        ("data.yaml", "3000000, batch_size: 4096", "3000000, batch_size: 2048"),
        ("assets.yaml", "sha256: bcc8", "sha256: acc8"),
    ):
        text = (workflow / path).read_text()
        (workflow / path).write_text(text.replace(old, new))
        assert kept(workflow=workflow) == {} and text.count(old) == 1
        (workflow / path).write_text(text)
    assert kept(workflow=workflow) == kept()


def test_the_kept_batches_are_records_of_whole_instructions():
    for path in sorted((WORKFLOW / "instructions").rglob("*.json.xz")):
        records, sampling = (
            json.loads(lzma.decompress(path.read_bytes())),
            read_yaml(path.with_name("about.yaml"))["sampling"],
        )
        assert len(records) > sampling["batch_size"] / 2
        assert all(
            set(r) == {"instruction", "input", "output"} and r["instruction"] and r["output"] for r in records
        )
