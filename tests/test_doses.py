"""Runs on other doses than a scale's, and what is drawn of them; at smoke."""

import csv
import gzip
import json
import re

import pytest
from conftest import made
from transformers import AutoTokenizer

from relinear.draw.planned import draw_planned
from relinear.draw.render import count
from relinear.get import assets, pieces, text
from relinear.plan.plan import Plan
from relinear.plan.strict import ConfigError
from relinear.stages._stage import Node

EPOCHS = 4  # more train on text that is known by heart
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
    cells = json.loads(next(path for path in written if path.name == "dose.provenance.json").read_text())[
        "cells"
    ]
    assert (
        cells["T2R"]["perplexity"].endswith("t2r_dose0.25/perplexity/run.json")
        and cells["SUPRA"]["perplexity"] is None
    )


def test_the_arms_without_transfer_say_their_unique_tokens_and_epochs(plan):
    [file] = [
        path
        for path in draw_planned(plan, plan.artefacts["comparison_notransfer"])
        if path.name == "notransfer.csv"
    ]
    rows = {row["run"]: row for row in csv.DictReader(file.read_text().splitlines())}
    found = rows["lolcats_relu_notransfer_lr0.01"]
    assert (
        found["doses"] == "1024 x 4" and float(found["ppl"]) > 1 and rows["lolcats_relu"]["ppl"] == "not run"
    )


@pytest.mark.parametrize("scale", ["smoke", "mini", "smollm2"])
def test_arms_with_and_without_transfer_see_as_many_tokens(scale):
    plan = Plan(scale=scale)

    def tokens(run):
        steps = [plan.node(step, run) for step in plan.run(run).run.recipes]
        return sum(
            plan.settings(s)["budget"]["epochs"] * plan.settings(plan.parents(s)["text"])["train_tokens"]
            for s in steps
        )

    for feature in ("elu", "relu", "exp"):
        for rate in (0.001, 0.01):
            assert (
                tokens(f"lolcats_{feature}_notransfer_lr{rate}")
                == tokens(f"lolcats_{feature}")
                == 2 * tokens(f"lolcats_{feature}_notransfer")
            )
    for series in plan.artefacts["comparison_dose"].spec.series[1:]:
        quarter, own, twice = map(tokens, series.runs)
        # whole sequences
        assert 8 * quarter == pytest.approx(twice, rel=0.01) and 2 * own == twice, series.title


def corpora(plan):
    """The names of the corpora, which are packages and no sources of a text."""
    return {name for name, data in plan.scaled.data.items() if data.make == "corpus"}


def test_the_largest_dose_is_what_the_sources_hold_four_times_and_the_spec_says_so():
    plan = Plan(scale="smollm2")
    unique, spec = plan.models["smollm2-135m-instruct"].unique, plan.artefacts["comparison_dose"].spec
    for run in {run for series in spec.series for run in series.runs}:
        assert all(
            plan.settings(plan.node(step, run))["budget"]["epochs"] <= EPOCHS
            for step in plan.run(run).run.recipes
        ), run
    unique = {source: tokens for source, tokens in unique.items() if source not in corpora(plan)}
    most = sum(unique.values())
    assert EPOCHS * most < 80e6, "a dose of 80M tokens can be had: add its runs"
    said = {
        count(most),
        *map(count, unique.values()),
        "80M",
        f"{80 // EPOCHS}M",
        f"{plan.config.text.train_tokens // 10**6}M",
    }
    assert set(re.findall(r"[\d.]+[kM]\b", spec.not_run)) == said


@pytest.mark.parametrize(
    ("stage", "name", "wanted", "held"),
    [
        (
            "text",
            "mix@smollm2-135m-instruct-x2",
            "20,000,768",
            "wikipedia-intros 952,628, brown 1,253,284, linux-doc 5,487,467, written 6,000,000",
        ),
        ("text", "mix-qwen@qwen2.5-coder-1.5b-instruct-x4", "40,001,536", "written 16,000,000"),
        (
            "pieces",
            "long-2048@smollm2-135m-instruct",
            "10,000,384",
            "linux-doc 5,487,467, anarchism 2,704,440, brown 1,253,284",
        ),
    ],
)
def test_more_unique_tokens_than_the_sources_hold_are_refused_before_any_work(stage, name, wanted, held):
    with pytest.raises(
        ConfigError, match=f"{stage} {name}: {wanted} unique tokens.*{held}.*Possible: a smaller dose"
    ):
        Plan(scale="smollm2").check_processes(Node(stage, name), 1)


def test_what_the_sources_hold_and_what_was_not_counted_is_not_refused():
    plan = Plan(scale="smollm2")
    for stage, name in (
        ("text", "mix@smollm2-135m-instruct"),
        ("pieces", "long-2048@smollm2-135m-instruct-x0.5"),
        ("text", "mix@tiny-x2"),
    ):
        plan.check_processes(Node(stage, name), 1)


@pytest.mark.slow
def test_sources_hold_as_many_tokens_as_models_yaml_says(smollm2):
    """Passages: each once, as the measures that ask about them read them."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)

    def documents(source, folder):
        if source != "passages":
            yield from pieces.documents(source, folder)
            return
        for path in folder.rglob("requests.jsonl.gz"):
            with gzip.open(path, "rt", encoding="utf-8") as lines:
                for doc in (json.loads(line)["doc"] for line in lines):
                    yield text.Document(
                        doc.get("passage")
                        or doc.get("story")
                        or re.split("Background: |\nQuestion: ", doc["query"])[1]
                    )

    plan = Plan(scale="smollm2")
    for source, said in plan.models["smollm2-135m-instruct"].unique.items():
        if source in corpora(plan):  # workflow/corpora.csv, which test_corpora.py compares
            continue
        unique = {
            text._digest(document): document.text for document in documents(source, assets.obtain(source))
        }
        train = [words for digest, words in unique.items() if not text._is_heldout(digest)]
        # 1: the separator
        found = sum(
            1 + len(tokens)
            for tokens in tokenizer(train, add_special_tokens=False, verbose=False)["input_ids"]
        )
        assert found == said, source
