"""Tables of deviations: a paper's recipe beside the settings that our records have."""

import csv
import json
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from relinear.draw import About
from relinear.draw.deviations import EPSILON, LORA_DROPOUT, OPTIMIZER, same
from relinear.draw.drawing import make
from relinear.plan.deviations import OneOf
from relinear.plan.measured import load
from relinear.plan.specs import available, read
from relinear.plan.strict import ConfigError
from relinear.train import finetune
from relinear.train.loop import _optimiser

ROOT = Path(__file__).parents[1]
PAPERS = ROOT / "workflow/papers"
DISTILL = {
    "lr": 0.01,
    "weight_decay": 0.0,
    "betas": [0.9, 0.999],
    "warmup_ratio": 0.1,
    "min_lr_ratio": 0.0,
    "clip": 1.0,
    "loss": "cross_entropy",
}
FINETUNE = DISTILL | {
    "lr": 1e-4,
    "kind": "lora",
    "train_method": False,
    "lora_rank": 8,
    "lora_alpha": 16,
    "lora_targets": ["q_proj", "k_proj", "v_proj", "o_proj"],
}
FINETUNE.pop("loss")
BUDGET = {"epochs": 2, "seq_len": 1024, "batch_size": 4, "accumulate": 2, "lr_floor": 0.0}


def trained(root: Path, run: str, stage: str, recipe: dict, budget: dict, began: str) -> dict:
    """A finished step's record, written below `root`."""
    record = {
        "schema": 2, "scale": "smoke", "root": "smoke", "run": run, "stage": stage, "measure": "", "key": "k",
        "config": {"method": "lolcats", "options": {}, "recipe": recipe, "budget": budget},
        "parents": {
            "model": {"path": "x/models/small", "key": "k", "contents": "c"},
            "text": {"path": "x/text/mix@small", "key": "k", "contents": "c"},
        },
        "datasets": [{"name": "brown", "role": "train", "sha256": "0"}],
        "hardware": {"dtype": "float32", "processes": 1},
        "tokens": 19_996_672, "started": began, "artefacts": {}, "seed": 0, "wall_seconds": 1.0,
    }  # fmt: skip
    folder = root / "runs" / run / stage
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(record))
    return record


@pytest.fixture
def drawn(tmp_path):
    """LoLCATs' table, drawn from records whose recipes and budgets are given; by (step, setting)."""

    def draw(distill=DISTILL, finetune=FINETUNE, budget=BUDGET):
        root = tmp_path / "results"
        run = "lolcats_exp"
        record = trained(root, run, "distill", distill, budget, "2026-01-01T00:00:00+00:00")
        trained(root, run, "finetune", finetune, budget, "2026-01-02T00:00:00+00:00")
        parents = {
            step: {"path": f"elsewhere/runs/{run}/{step}", "key": "k", "contents": "c"}
            for step in ("finetune", "distill")
        }
        options = {"variant": "paper", "feature": "exp"}
        own = record | {
            "stage": "measure", "measure": "perplexity", "parents": parents,
            "config": {"method": "lolcats", "options": options},
        }  # fmt: skip
        folder = root / "runs" / run / "perplexity"
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps(own))
        (folder / "metrics.json").write_text('{"readings": [], "facts": {}}')
        artefact = read(PAPERS / "lolcats/deviations.yaml")
        measured = {address: None for address in artefact.reads()} | {(run, "perplexity"): load(folder)}
        make(artefact, measured, About("smoke"), tmp_path / "out")
        with (tmp_path / "out/deviations.csv").open() as file:
            rows = {(row["step"], row["setting"]): row for row in csv.DictReader(file)}
        return rows, (tmp_path / "out/deviations.md").read_text()

    return draw


def test_each_setting_is_that_of_the_records_and_steps_that_are_alike_share_a_line(drawn):
    rows, page = drawn()
    found = {place: (row["paper"], row["ours"], row["same"]) for place, row in rows.items()}
    assert found["distill", "lr"] == ("0.01", "0.01", "yes") and found["finetune", "lr"][2] == "yes"
    assert found["every", "batch"] == ("8", "8", "yes"), "accumulated sequences count"
    assert found["every", "batch_tokens"] == ("not said", "8192", "")
    assert found["every", "tokens"] == ("20M", "20M", "yes"), "within a twentieth"
    assert found["every", "data"] == ("alpaca", "mix (brown)", "no")
    assert found["every", "teacher"] == ("llama-3-8b", "small", "no")
    assert found["distill", "trained"] == ("maps", "maps", "yes")
    assert found["attention", "feature"] == ("exp", "exp", "yes")
    assert [step for step, setting in rows if setting == "lr"] == ["distill", "finetune"], "as they were made"
    assert "Not in these results: `lolcats_exp_window`." in page
    assert "An author of the paper might object: " in page


def test_a_recipe_that_drifts_from_the_papers_is_another(drawn):
    rows, _ = drawn(
        finetune=FINETUNE
        | {"lr": 1e-3, "lora_targets": ["q_proj"], "train_method": True, "min_lr_ratio": 1.0},
        budget=BUDGET | {"lr_floor": 5e-3, "accumulate": 1},
    )
    assert rows["finetune", "lr"]["ours"] == "0.005", "the scale's least rate is what it was trained at"
    others = {place for place, row in rows.items() if row["same"] == "no"}
    assert others == {
        ("every", "teacher"), ("every", "data"), ("every", "batch"), ("finetune", "trained"),
        ("finetune", "lr"), ("finetune", "lora_targets"),
    }  # fmt: skip
    assert rows["finetune", "schedule"]["ours"] == "constant"


def test_settings_are_the_same_within_what_a_paper_prints():
    assert same(None, 3) == "" and same(8, 8) == "yes" and same(8, 9) == "no"
    assert same(20_000_000, 19_996_672) == "yes" and same(20_000_000, 10_000_000) == "no"
    assert same(OneOf(one_of=(1e-2, 1e-4)), 1e-4) == "yes" and same(OneOf(one_of=(8, 32)), 16) == "no"
    assert same((0.9, 0.95), [0.9, 0.95]) == "yes" and same((0.9, 0.95), None) == "no"


def test_what_no_record_says_is_what_the_training_does():
    optimiser = _optimiser(
        [([nn.Parameter(torch.zeros(1))], 0.1)], {"betas": (0.9, 0.999), "weight_decay": 0.0}
    )
    assert type(optimiser).__name__ == OPTIMIZER and optimiser.defaults["eps"] == EPSILON
    assert f"lora_dropout={LORA_DROPOUT}" in Path(finetune.__file__).read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"distill": {"rate": 0.1}}, "no setting 'rate'; have teacher, data, loss"),
        ({"attention": {"lr": 0.1}}, "no setting 'lr'; have"),
        ({"every": {"lr": {"one_of": [0.1]}}}, "one_of"),
    ],
)
def test_a_setting_that_there_is_not_is_refused(tmp_path, change, message):
    folder = tmp_path / "papers/lolcats"
    folder.mkdir(parents=True)
    (folder / "paper.yaml").write_text("title: A paper")
    run = {"run": "lolcats_exp", "measure": "perplexity", "title": "Table 1", "paper": change}
    spec = {"label": "Deviations", "says": "recipes", "draw": "deviations", "runs": [run]}
    (folder / "deviations.yaml").write_text(yaml.safe_dump(spec))
    with pytest.raises(ConfigError, match=message):
        read(folder / "deviations.yaml")


def test_every_label_of_a_paper_says_what_an_author_might_object():
    """A sentence without its full stop, which the page sets."""
    artefacts = available(PAPERS).values()
    papers = {"lolcats", "supra", "hedgehog", "lizard"}
    lacking = [a.name for a in artefacts if a.paper in papers and len(a.spec.objection.split()) < 8]
    assert not lacking
    assert not [a.name for a in artefacts if a.spec.objection.endswith(".")]
