"""Runs on other doses than a scale's, and what is drawn of them; at smoke."""

import csv
import json

import pytest
from conftest import made

from relinear.draw.planned import draw_planned
from relinear.plan.plan import Plan

TRAINED = ("t2r_dose0.25", "lolcats_relu_notransfer_lr0.01")


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    plan = Plan(scale="smoke", results=tmp_path_factory.mktemp("results"))
    made(plan, *(f"measure {run} perplexity" for run in TRAINED))
    return plan


def test_a_curve_lies_at_the_tokens_of_its_doses(plan):
    tokens = {run: plan.settings(plan.node("finetune", run))["budget"]["epochs"] for run in TRAINED}
    assert tokens == {"t2r_dose0.25": 2, "lolcats_relu_notransfer_lr0.01": 4}
    written = draw_planned(plan, plan.artefacts["comparison_dose"])
    cells = json.loads(next(path for path in written if path.name == "dose.provenance.json").read_text())["cells"]
    assert cells["T2R"]["perplexity"].endswith("t2r_dose0.25/perplexity/run.json") and cells["SUPRA"]["perplexity"] is None


def test_the_arms_without_transfer_say_their_unique_tokens_and_epochs(plan):
    [file] = [path for path in draw_planned(plan, plan.artefacts["comparison_notransfer"]) if path.name == "notransfer.csv"]
    rows = {row["run"]: row for row in csv.DictReader(file.read_text().splitlines())}
    found = rows["lolcats_relu_notransfer_lr0.01"]
    assert found["doses"] == "1024 x 4" and float(found["ppl"]) > 1 and rows["lolcats_relu"]["ppl"] == "not run"


@pytest.mark.parametrize("scale", ["smoke", "mini", "smollm2"])
def test_arms_with_and_without_transfer_see_as_many_tokens(scale):
    plan = Plan(scale=scale)

    def tokens(run):
        steps = [plan.node(step, run) for step in plan.run(run).run.recipes]
        return sum(plan.settings(s)["budget"]["epochs"] * plan.settings(plan.parents(s)["text"])["train_tokens"] for s in steps)

    for feature in ("elu", "relu", "exp"):
        for rate in (0.001, 0.01):
            assert tokens(f"lolcats_{feature}_notransfer_lr{rate}") == tokens(f"lolcats_{feature}") == 2 * tokens(f"lolcats_{feature}_notransfer")
    for run in ("t2r", "supra", "hedgehog", "lolcats_linear"):
        assert 8 * tokens(f"{run}_dose0.25") == pytest.approx(tokens(f"{run}_epochs4"), rel=0.01), run  # whole sequences
        assert 2 * tokens(run) == tokens(f"{run}_epochs4"), run
