"""GPU hours come from measured rows, and the page that prints them holds nothing else."""

from pathlib import Path

import pytest

from relinear.benchmarks import hours
from relinear.errors import UserError
from relinear.plan.plan import Plan

ROOT = Path(__file__).parents[1]


def row(run: str, stage: str, gpus: int, speed: int) -> dict:
    return {"shape": "llama-3-8b", "run": run, "stage": stage, "scaling": "weak", "gpus": gpus, "tokens_per_second_per_gpu": speed}


def test_hours_are_tokens_over_speed_on_the_fewest_gpus_and_what_lacks_says_so():
    plan = Plan(scale="paper")
    tokens = plan.config.distill.epochs * plan.config.corpus.train_tokens
    rows = [row("lolcats_exp", "distill", 4, 9000), row("lolcats_exp", "distill", 1, 10000), row("lizard", "distill", 1, 5000) | {"error": "x"}]
    found = hours.costs(plan, "llama-3-8b", rows)
    assert found["lolcats_exp", "distill"] == (10000, 1, tokens / 10000 / 3600)
    assert found["lizard", "distill"] is None and ("t2r", "distill") not in found
    tables = {line.split("|")[1].strip(): line for line in hours.hours(plan, "llama-3-8b", rows).splitlines() if line.startswith("|")}
    assert f"{tokens / 10000 / 3600:.2f}" in tables["lolcats/figure3"], "a figure shows the run before finetuning"
    assert "not measured: 3 of 4 stages" in hours.hours(plan, "llama-3-8b", [row("lizard", "distill", 1, 5000)])


def test_the_page_is_what_the_measurements_say():
    page = (ROOT / "docs/plan.md").read_text()
    assert hours.replaced(page, hours.text(ROOT / hours.MEASURED)) == page, "run `python -m relinear.benchmarks.hours --into docs/plan.md`"


def test_a_page_without_its_marks_and_a_file_of_something_else_are_refused(tmp_path):
    with pytest.raises(UserError, match="needs the lines <!-- relinear.benchmarks.hours -->"):
        hours.replaced("a page", "a table")
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(UserError, match="a.json is no file of relinear.benchmarks.training"):
        hours.read(tmp_path)
