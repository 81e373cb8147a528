"""The teacher's own instructions: the same from the same seed, whatever interrupted them, and a clear error where it cannot write any."""

import json
from pathlib import Path

import pytest
import torch

from relinear import instructions
from relinear.corpus import documents
from relinear.errors import UserError
from relinear.plan import Plan
from relinear.stage import run_stage
from relinear.teacher import _random, byte_tokenizer

SETTINGS = {"instruction_tokens": 48, "response_tokens": 8, "temperature": 1.0, "response_temperature": 0.7, "top_p": 0.95}


@pytest.fixture(scope="module")
def teacher():
    return _random(torch.float32, 0)


def test_a_batch_is_its_seed_s(teacher):
    batches = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        batches.append(instructions.write(*teacher, 64, SETTINGS))
    assert batches[0] == batches[1] != batches[2]
    assert all(set(r) == {"instruction", "input", "output"} and r["instruction"] and r["output"] for r in batches[0])


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
        for stage in ("assets", "teacher"):
            module = __import__(f"relinear.{stage}", fromlist=["run"])
            run_stage(plan, plan.step(stage), module.run)
        if name == "cut":
            write, calls = instructions.write, []

            def dies(*args, write=write, calls=calls):
                if calls:
                    raise KeyboardInterrupt
                calls.append(1)
                return write(*args)

            monkeypatch.setattr(instructions, "write", dies)
            with pytest.raises(KeyboardInterrupt):
                run_stage(plan, plan.step("instructions"), instructions.run)
            monkeypatch.setattr(instructions, "write", lambda *args, calls=calls, write=write: calls.append(1) or write(*args))
        folder = run_stage(plan, plan.step("instructions"), instructions.run)
        texts.append((folder / "written.jsonl").read_text())
    metrics = json.loads((folder / "metrics.json").read_text())
    assert texts[0] == texts[1]
    assert len(calls) == metrics["batches"] > 1, "a finished batch was written again"
    assert metrics["tokens"] >= 4 * 256 and metrics["records"] == len(list(documents("written", Path(folder) / "written.jsonl")))
