"""A training on paper: its memory and its bound stand beside those that were measured on H200s, and the page
shows what the command prints."""

import json
import re
from dataclasses import replace

import pytest
from conftest import ROOT

from relinear.benchmarks import planned
from relinear.plan.plan import Plan
from relinear.train import room

ROWS = json.loads((ROOT / "results/reference/scaling/scaling.json").read_text())["rows"]
H200 = planned.CARDS["h200"]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan(scale="paper", device="cuda")


def at(training: room.Training, row: dict) -> room.Training:
    """A training with the sequences and the engine of a measured row."""
    total = row["sequences"] * row["gpus"]
    batch = min(total, row["piece"] * row["gpus"])
    return replace(
        training,
        batch=batch,
        accumulate=total // batch,
        length=row["length"],
        gpus=row["gpus"],
        sharded=row["engine"] == "fsdp",
    )


LARGE = [
    r for r in ROWS if r["scaling"] == "weak" and r["shape"] == "llama-3-8b" and r["run"] != "teacher_lora"
]


@pytest.mark.parametrize("row", LARGE, ids=lambda r: f"{r['run']}-{r['stage']}-{r['engine']}-{r['gpus']}")
def test_memory_is_near_and_time_above_the_bound_of_measured_trainings(plan, row):
    """They made all logits at once, which one GPU no longer does."""
    found = planned.planned(plan, row["run"], row["stage"], "llama-3-8b")
    assert found.training.trained in (2 * row["trainable_params"], 4 * row["trainable_params"])
    training = at(found.training, row)
    tokens = training.sequences * training.length
    logits = 0 if training.transfer or training.sharded else tokens * training.shape.vocabulary * room.LOGIT
    assert (training.total + logits) / room.GIB == pytest.approx(row["peak_gib"], rel=0.15)
    least = max(planned.bound(training, found.flops, H200).values())
    took = row["step_seconds"][1] / least
    assert 8.5 < took < 9.5 if row["run"] == "supra" else 2.5 < took < 5


def test_what_breaks_is_named_in_its_order(plan):
    supra = planned.planned(plan, "supra", "finetune", "llama-3-70b").training
    sixteen = replace(supra, accumulate=16)
    of = {n: planned.breaks(planned.chosen(sixteen, n, H200.memory), n, H200.memory) for n in (1, 3, 8, 16)}
    assert of[1].startswith("weights, gradients and optimiser") and of[3].startswith("the step: 16 sequences")
    assert of[16] == "nothing"
    lizard = planned.planned(plan, "lizard", "finetune", "llama-3-70b").training
    assert "recompute: true" in planned.breaks(planned.chosen(lizard, 2, H200.memory), 2, H200.memory)
    assert replace(planned.chosen(lizard, 2, H200.memory), recompute=True).total < H200.memory


def test_the_page_shows_what_the_command_prints():
    page = (ROOT / "docs/plan.md").read_text()
    command, shown = re.search(
        r"```\n(python -m relinear.benchmarks.planned.*?)\n```\n\n(\|.*?\|)\n\n", page, re.DOTALL
    ).groups()
    gpus = [int(n) for n in re.search(r"--gpus ([\d ]+)", command)[1].split()]
    assert "--shape llama-3-70b" in command and "--card h200" in command
    assert shown == planned.table("llama-3-70b", gpus, "h200").strip()
