"""Laws of the catalogue: the runs that sweeps, chains and stand-ins give. Every YAML below workflow/ goes
through the strict reader."""

import importlib
import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from relinear import attention
from relinear.attention._base import Heads
from relinear.errors import UserError
from relinear.plan import catalogue, specs
from relinear.plan.assets import catalogue as read_assets
from relinear.plan.options import (
    adds_parameters,
    causal_only,
    metric_needs,
    metric_yields,
    option_names,
    part_names,
    reads_data,
)
from relinear.plan.plan import Plan, metrics
from relinear.plan.sane import read_yaml
from relinear.plan.scale import read_scale
from relinear.plan.strict import ConfigError
from relinear.stages._stage import Node

LORA = {"finetune": {"data": "alpaca", "kind": "lora", "lr": 1e-4}}
DISTILL = {"distill": {"data": "alpaca", "loss": "mse", "lr": 1e-2}}
CROSSED = {"loss": "cross_entropy"}
BASE = {"model": "llama-3-8b", "method": "t2r", "steps": [DISTILL, LORA]}


def task(data="glue-cola", **settings) -> dict:
    return {"model": "bert-base", "steps": [{"classify": {"data": data, "lr": 1e-4, **settings}}]}


def finetune(**settings) -> dict:
    return {"finetune": LORA["finetune"] | settings}


@pytest.fixture
def workflow(tmp_path) -> Path:
    """A copy of the configuration, to edit."""
    return Path(shutil.copytree(ROOT / "workflow", tmp_path / "workflow"))


@pytest.fixture
def planned(workflow):
    """A function that adds runs, as one more paper's, and plans them at smoke scale."""

    def planned(scale="smoke", choices=None, **runs) -> Plan:
        paper = workflow / "papers" / "added"
        paper.mkdir(exist_ok=True)
        (paper / "paper.yaml").write_text("title: Runs of a test\n")
        (paper / "runs.yaml").write_text(yaml.safe_dump(runs, sort_keys=False))
        return Plan(scale=scale, workflow=workflow, **(choices or {}))

    return planned


def edit(workflow: Path, name: str, change) -> None:
    data = yaml.safe_load((workflow / name).read_text())
    change(data)
    (workflow / name).write_text(yaml.safe_dump(data, sort_keys=False))


def refused(plan: Plan, *named: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan.check()
    assert all(part in str(error.value) for part in named), f"{error.value} does not name all of {named}"


# --- sweeps ---


def test_a_sweep_is_one_run_for_each_combination_with_its_values_as_they_are(planned):
    windows, ranks = [0, 64], [4, 8, 16]
    plan = planned(
        **{
            "swept_{window}_{rank}": BASE
            | {
                "method": "lolcats",
                "options": {"window": "{window}"},
                "over": {"window": windows, "rank": ranks},
                "steps": [
                    DISTILL,
                    {"finetune": {"data": "alpaca", "kind": "lora", "lr": 1e-4, "lora_rank": "{rank}"}},
                ],
            }
        }
    )
    plan.check()
    swept = {name for name in plan.runs if name.startswith("swept_")}
    assert swept == {f"swept_{window}_{rank}" for window, rank in itertools.product(windows, ranks)}
    for window, rank in itertools.product(windows, ranks):
        run = plan.runs[f"swept_{window}_{rank}"]
        assert run.options == {"window": window} and run.recipes["finetune"]["lora_rank"] == rank
        assert not run.over and plan.node("finetune", f"swept_{window}_{rank}")
    assert len({plan.key(Node("finetune", name)) for name in swept}) == len(swept)


def test_a_field_stands_for_its_value_alone_and_for_text_beside_other_text():
    run = catalogue.Run(
        model="m",
        options={"a": "{n}", "b": "n={n}", "c": ["{n}", {"d": "{n}{n}"}], "e": "{s}"},
        over={"n": (1, 2.5), "s": (True,)},
    )
    found = catalogue.expand("r_{n}_{s}", run, "runs.yaml")
    assert found["r_2.5_True"].options == {"a": 2.5, "b": "n=2.5", "c": [2.5, {"d": "2.52.5"}], "e": True}
    assert type(found["r_1_True"].options["a"]) is int


def test_a_sweep_means_what_its_runs_mean_when_they_are_written_out(planned):
    swept = planned(
        **{
            "{rank}_ranks": BASE
            | {"over": {"rank": [2]}, "steps": [{"finetune": LORA["finetune"] | {"lora_rank": "{rank}"}}]}
        }
    )
    written = planned(**{"2_ranks": BASE | {"steps": [{"finetune": LORA["finetune"] | {"lora_rank": 2}}]}})
    assert swept.key(Node("finetune", "2_ranks")) == written.key(Node("finetune", "2_ranks"))


@pytest.mark.parametrize(
    ("runs", "named"),
    [
        ({"swept_{a}": BASE | {"over": {"a": [1], "b": [2]}}}, ["swept_{a}", "['a']", "['a', 'b']"]),
        ({"swept_{b}": BASE | {"over": {"a": [1]}}}, ["swept_{b}", "['b']", "['a']"]),
        ({"swept": BASE | {"over": {"a": [1]}}}, ["swept", "none", "['a']"]),
        ({"swept_{a}": BASE}, ["swept_{a}", "['a']", "none"]),
        (
            {"swept_{a}{b}": BASE | {"over": {"a": [1, 11], "b": [11, 1]}}},
            ["two of its runs are called 'swept_111'"],
        ),
        ({"swept_{a}": BASE | {"over": {"a": [1, 1]}}}, ["two of its runs are called 'swept_1'"]),
        ({"swept_{a}": BASE | {"over": {"a": []}}}, ["swept_{a}", "a has no values"]),
        ({"swept_{a}": BASE | {"over": {"a": [1]}}, "swept_1": BASE}, ["'swept_1'", "already"]),
        ({"lizard": BASE}, ["'lizard'", "already", "shared by all papers"]),
        ({"swept_{a}": BASE | {"over": {"a": ["x y"]}}}, ["'swept_x y'", "letters, digits"]),
        (
            {"swept_{a}": BASE | {"over": {"a": [1]}, "options": {"variant": "{other}"}}},
            ["no field {other}", "have a"],
        ),
        ({"plain": BASE | {"options": {"variant": "{a}"}}}, ["plain", "no field {a}", "have none"]),
        ({7: BASE}, ["got 7", "letters, digits"]),
    ],
)
def test_a_sweep_that_is_not_one_is_refused(planned, workflow, runs, named):
    plan = planned()
    (workflow / "papers/added/runs.yaml").write_text(yaml.safe_dump(runs, sort_keys=False))
    refused(plan, *named)


# --- chains ---


def test_runs_that_come_after_a_step_share_it(planned):
    """One transfer for six ranks."""
    ranks = [1, 2, 4, 8, 16, 32]
    plan = planned(
        shared=BASE,
        **{
            "rank_{rank}": BASE
            | {
                "after": "shared/distill",
                "over": {"rank": ranks},
                "steps": [{"finetune": LORA["finetune"] | {"lora_rank": "{rank}"}}],
            }
        },
    )
    plan.check()
    nodes = plan.behind([plan.measured(f"rank_{rank}", "perplexity") for rank in ranks])
    assert [node for node in nodes if node.stage == "distill"] == [Node("distill", "shared")]
    assert {node for node in nodes if node.stage == "finetune"} == {
        Node("finetune", f"rank_{rank}") for rank in ranks
    }
    for rank in ranks:
        assert plan.parents(Node("finetune", f"rank_{rank}"))["shared/distill"] == Node("distill", "shared")
        assert plan.entry(Node("measure", f"rank_{rank}", "perplexity")).links == [
            {"method": "t2r", "options": {}, "steps": ["shared/distill", "finetune"]}
        ], "measured as it ended"


def test_what_stands_behind_many_tables_is_told_once(workflow):
    edit(workflow, "scales/smoke.yaml", lambda data: data["measures"].update(perplexity={}))
    with pytest.raises(ConfigError) as error:
        Plan(scale="smoke", workflow=workflow).check()
    for option in ("tokens", "seq_len", "batch_size"):
        assert (
            str(error.value).count(f"measure 'perplexity' at scale 'smoke': options of perplexity.{option}:")
            == 1
        )


def test_a_run_after_another_begins_where_that_one_ended(planned):
    plan = planned(
        first=BASE,
        second=BASE | {"after": "first", "steps": [LORA]},
        third=BASE | {"after": "second", "steps": [LORA]},
    )
    plan.check()
    [link] = plan.chain("third")
    assert link.steps == (
        Node("distill", "first"),
        Node("finetune", "first"),
        Node("finetune", "second"),
        Node("finetune", "third"),
    )
    roles = {"first/distill", "first/finetune", "second/finetune"}
    assert plan.parents(Node("finetune", "third")).keys() == {"model", "text"} | roles
    [settings] = plan.settings(Node("finetune", "third"))["links"]
    assert set(settings["steps"]) == roles
    assert plan.measured("third", "perplexity_before") != plan.measured("third", "perplexity")
    assert set(plan.parents(plan.measured("third", "perplexity_before"))) == {"model", "data"} | roles


def test_a_method_on_top_of_a_trained_model_keeps_what_was_trained(planned):
    plan = planned(top=BASE | {"after": "teacher_lora"}, bare=BASE | {"after": "teacher"})
    plan.check()
    assert [(link.method, link.steps) for link in plan.chain("top")] == [
        ("softmax", (Node("finetune", "teacher_lora"),)),
        ("t2r", (Node("distill", "top"), Node("finetune", "top"))),
    ]
    assert [link.method for link in plan.chain("bare")] == ["t2r"], "nothing was trained before"


def test_options_that_say_a_default_are_those_that_leave_it_out(planned):
    plan = planned(
        first=BASE,
        second=BASE
        | {
            "after": "first/distill",
            "options": {"variant": "paper", "keep_softmax_layers": None},
            "steps": [LORA],
        },
    )
    plan.check()
    assert [link.method for link in plan.chain("second")] == ["t2r", "t2r"], (
        "one method, and the model has it already"
    )


def test_a_run_that_names_no_method_goes_on_with_the_one_it_comes_after(planned):
    plan = planned(
        first=BASE | {"method": "lolcats", "options": {"window": 32}},
        more={"model": "llama-3-8b", "after": "first", "steps": [LORA]},
        most={"model": "llama-3-8b", "after": "more", "steps": [LORA]},
    )
    plan.check()
    for name in ("more", "most"):
        assert (plan.runs[name].method, plan.runs[name].options) == ("lolcats", {"window": 32})
        assert [link.method for link in plan.chain(name)] == ["lolcats"]
        assert "relinear.attention.lolcats" in plan.work(Node("finetune", name)).modules


@pytest.mark.parametrize("ending", ["-seed3", "@mistral-7b", "@mistral-7b-seed3"])
def test_a_run_carries_its_model_and_seed_to_the_one_it_comes_after(planned, ending):
    plan = planned("paper", first=BASE, second=BASE | {"after": "first/distill", "steps": [LORA]})
    parents = plan.parents(plan.node("finetune", f"second{ending}"))
    assert parents[f"first{ending}/distill"] == Node("distill", f"first{ending}")
    assert parents["model"] == Node("model", "mistral-7b" if "@" in ending else "llama-3-8b")
    assert plan.settings(Node("distill", f"first{ending}"))["seed"] == (3 if "seed" in ending else 0)


@pytest.mark.parametrize(
    ("runs", "named"),
    [
        (
            {"a": BASE | {"after": "b"}, "b": BASE | {"after": "c"}, "c": BASE | {"after": "a"}},
            ["circle", "a -> b -> c -> a"],
        ),
        ({"a": BASE | {"after": "a"}}, ["circle", "a -> a"]),
        ({"a": BASE | {"after": "a/distill"}}, ["circle", "a -> a"]),
        ({"a": BASE | {"after": "lizzard"}}, ["'a'", "'lizzard'", "near it: lizard"]),
        ({"a": BASE | {"after": "LIZARD"}}, ["'a'", "'LIZARD'", "near it: lizard"]),
        (
            {"a": BASE | {"after": "supra/distill"}},
            ["'supra/distill'", "no step 'distill'", "it has finetune"],
        ),
        ({"a": BASE | {"after": "teacher/finetune"}}, ["no step 'finetune'", "it has none"]),
        (
            {"a": BASE | {"after": "hedgehog", "model": "mistral-7b"}},
            ["'mistral-7b'", "'hedgehog'", "'llama-3-8b'"],
        ),
        ({"a": BASE | {"after": "hedgehog"}}, ["'t2r'", "'hedgehog'", "linearized once"]),
        (
            {"a": BASE | {"after": "hedgehog", "method": "softmax", "steps": [LORA]}},
            ["'softmax'", "'hedgehog'", "linearized once"],
        ),
        (
            {
                "a": BASE
                | {
                    "after": "lizard/distill",
                    "method": "lizard",
                    "options": {"gate": "mamba2"},
                    "steps": [LORA],
                }
            },
            ["'gate': 'mamba2'", "'lizard' with none", "linearized once"],
        ),
        (
            {
                "a": BASE,
                "b": {"model": "llama-3-8b", "after": "a", "steps": [LORA]},
                "c": BASE | {"after": "b", "method": "lolcats"},
            },
            ["'c'", "'lolcats'", "'b' of 't2r'", "linearized once"],
        ),
        (
            {
                "a": BASE,
                "b": {"model": "llama-3-8b", "after": "a", "steps": [LORA]},
                "c": BASE | {"after": "b", "options": {"variant": "code"}},
            },
            ["'c'", "'variant': 'code'", "'b' with none", "linearized once"],
        ),
        (
            {
                "a": BASE,
                "b": {
                    "model": "llama-3-8b",
                    "after": "a",
                    "options": {"keep_softmax_layers": 0.5},
                    "steps": [LORA],
                },
            },
            ["b", "'keep_softmax_layers': 0.5", "softmax attention has none", "name the method"],
        ),
        (
            {"a": task(if_random=True), "b": task() | {"after": "a/classify", "method": "hedgehog"}},
            ["'b'", "'a/classify'", "a pretrained model leaves out", "after 'a'"],
        ),
        (
            {"a": task(), "b": task("glue-stsb") | {"after": "a", "method": "hedgehog"}},
            [
                "classify b",
                "1 output and pool: first",
                "classify a",
                "2 outputs and pool: first",
                "the same number of classes",
            ],
        ),
        (
            {"a": task(), "b": task(pool="mean") | {"after": "a"}},
            ["classify b", "pool: mean", "classify a", "2 outputs and pool: first"],
        ),
        (
            {"a": task() | {"method": "lizard"}},
            ["classify a", "'lizard'", "'tiny-bert' is an encoder", "hedgehog, lolcats", "without a window"],
        ),
        (
            {"a": task() | {"method": "lolcats", "options": {"window": 8}}},
            ["'lolcats' with {'window': 8}", "'tiny-bert' is an encoder"],
        ),
        (
            {"a": BASE | {"method": "window"}},
            ["'a'", "distill", "'window' adds nothing", "hedgehog, lizard, lolcats"],
        ),
        (
            {"a": {"model": "llama-3-8b", "steps": [finetune(kind="method")]}},
            ["kind: method", "'softmax' adds nothing", "or other steps"],
        ),
        (
            {"a": BASE | {"method": "window", "steps": [finetune(train_method=True)]}},
            ["train_method: true", "'window' adds nothing"],
        ),
        (
            {"a": BASE | {"steps": [finetune(kind="full", lora_rank=4)]}},
            ["lora_rank is of kind lora", "got kind full"],
        ),
        (
            {"a": BASE | {"steps": [finetune(method_lr=1e-3)]}},
            ["method_lr", "train_method false", "kind lora with train_method"],
        ),
        (
            {"a": BASE | {"method": "delta", "steps": [{"distill": DISTILL["distill"] | CROSSED}]}},
            ["'a'", "loss 'cross_entropy'", "weights of 'delta' have either sign", "possible: mse"],
        ),
        (
            {"a": BASE | {"method": "delta"}},
            ["convolution of method 'delta'", "'stories' holds several", "conv: false", "long-2048"],
        ),
        (
            {
                "a": BASE
                | {"method": "hedgehog", "steps": [{"distill": DISTILL["distill"] | {"calibrate": 64}}]}
            },
            [
                "distill a: calibrate",
                "which method 'hedgehog' has not",
                "possible: delta, or without calibrate",
            ],
        ),
        (
            {"a": BASE | {"steps": [{"distill": DISTILL["distill"] | {"calibrate": 0}}]}},
            ["distill.calibrate", "greater than 0", "got 0"],
        ),
        (
            {"a": BASE | {"steps": [finetune(kl=1.0, kl_beyond=128, kl_within=0.0)]}},
            ["finetune a: sequences of 128 tokens", "kl_beyond 128", "possible: a smaller kl_beyond"],
        ),
        ({"a": BASE | {"steps": [LORA, LORA]}}, ["a stage once", "['finetune'], ['finetune']"]),
        ({"a": BASE | {"steps": [DISTILL | LORA]}}, ["one stage each", "['distill', 'finetune']"]),
        ({"a": BASE | {"steps": [{"distil": {}}]}}, ["'distil'", "distill, finetune"]),
        ({"a": BASE | {"steps": [{"measure": {}}]}}, ["'measure'", "distill, finetune"]),
        ({"a-seed1": BASE}, ["'a-seed1'", "another seed", "rename"]),
        ({"a": BASE | {"shown": ["comparison/table9"]}}, ["'a'", "'comparison/table9'", "comparison/table2"]),
    ],
)
def test_a_chain_that_cannot_be_trained_is_refused(planned, runs, named):
    refused(planned(**runs), *named)


def test_a_convolution_goes_with_sequences_of_one_document(planned):
    lone = [{"distill": DISTILL["distill"] | {"data": "long-2048"}}]
    planned(
        without=BASE | {"method": "delta", "options": {"conv": False}},
        apart=BASE | {"method": "delta", "steps": lone},
    ).check()


def test_training_only_what_the_method_added_is_a_kind_of_finetuning(planned):
    plan = planned(
        a=BASE | {"steps": [DISTILL, {"finetune": {"data": "alpaca", "kind": "method", "lr": 1e-3}}]}
    )
    plan.check()
    assert plan.settings(Node("finetune", "a"))["recipe"]["kind"] == "method"


# --- what a recipe says instead of the scale ---


def test_a_recipes_own_budget_is_the_steps_and_the_scales_is_every_others(planned):
    own = {"epochs": 5, "seq_len": 64, "batch_size": 2}
    plan = planned(
        own=BASE | {"steps": [{"distill": DISTILL["distill"] | own}, {"finetune": LORA["finetune"] | own}]},
        plain=BASE,
    )
    plan.check()
    for stage in ("distill", "finetune"):
        budget, scales = (plan.settings(Node(stage, name))["budget"] for name in ("own", "plain"))
        assert budget == scales | own
        assert not own.keys() & plan.settings(Node(stage, "own"))["recipe"].keys(), "said once"


def test_a_dose_is_a_text_of_its_own(planned):
    plan = planned(
        own=BASE
        | {
            "steps": [
                {"distill": DISTILL["distill"] | {"dose": 2}},
                {"finetune": LORA["finetune"] | {"dose": 0.5}},
            ]
        }
    )
    plan.check()
    steps = [("distill", "hedgehog"), ("distill", "own"), ("finetune", "own")]
    texts = [plan.parents(plan.node(*step))["text"] for step in steps]
    assert [text.name for text in texts] == ["stories@tiny", "stories@tiny-x2", "stories@tiny-x0.5"]
    assert [plan.settings(text)["train_tokens"] for text in texts] == [1024, 2048, 512]
    assert plan.parents(Node("distill", "own"))["activations"] == Node("activations", "stories@tiny-x2")
    assert plan.parents(plan.measured("own", "perplexity"))["data"] == texts[0], (
        "all are measured on the same"
    )


def test_recorded_inputs_are_shared_where_they_fit_and_only_there(planned):
    plan = planned(
        same=BASE, epochs=BASE | {"steps": [{"distill": DISTILL["distill"] | {"epochs": 7}}]},
        length=BASE | {"steps": [{"distill": DISTILL["distill"] | {"seq_len": 64}}]},
        later=BASE | {"after": "teacher_lora", "steps": [DISTILL]},
    )  # fmt: skip
    plan.check()
    shared = Node("activations", "stories@tiny")
    assert {
        name: plan.parents(Node("distill", name)).get("activations")
        for name in ("same", "epochs", "length", "later")
    } == {
        "same": shared,
        "epochs": shared,
        "length": None,
        "later": None,
    }
    assert "activations" not in planned("paper", same=BASE).parents(Node("distill", "same")), (
        "a scale can do without"
    )


# --- measures, stand-ins, names ---


def test_a_measure_before_a_step_is_of_the_run_without_it(planned):
    plan = planned()
    assert list(plan.entry(plan.measured("lizard", "perplexity_before")).trained) == ["distill"]
    assert list(plan.entry(plan.measured("lizard", "perplexity")).trained) == ["distill", "finetune"]
    assert plan.measured("teacher", "perplexity_before") == plan.measured("teacher", "perplexity"), (
        "without the step it is the same"
    )


def test_a_metric_is_a_measure_of_its_own_name(workflow):
    plain = Plan(scale="smoke", workflow=workflow).measures
    assert set(metrics()) <= plain.keys()
    edit(
        workflow,
        "measures.yaml",
        lambda measures: [measures.pop(name) for name in ("fidelity", "perplexity_before")],
    )
    measures = Plan(scale="smoke", workflow=workflow).measures
    assert (
        measures["fidelity"] == catalogue.Measure(metric="fidelity") and "perplexity_before" not in measures
    )


@pytest.mark.parametrize("kind", ["models", "data"])
def test_what_stands_in_for_a_name_must_exist_and_so_must_the_name(workflow, kind):
    paper, ours = {"models": ("llama-3-8b", "tiny"), "data": ("alpaca", "stories")}[kind]
    scale = workflow / "scales/smoke.yaml"
    text = scale.read_text()
    for old, new in (
        (f"{paper}: {ours}", f"{paper}: nothing"),
        (f"{paper}: {ours}", f"nothing: {ours}, {paper}: {ours}"),
    ):
        scale.write_text(text.replace(old, new))
        refused(Plan(scale="smoke", workflow=workflow), "'nothing'", "have ")


@pytest.mark.parametrize(
    ("file", "change", "named"),
    [
        ("models.yaml", lambda m: m["tiny"].update(family="lama"), ["tiny", "'lama'", "decoder"]),
        (
            "models.yaml",
            lambda m: m["tiny"].update(init="pretrained"),
            ["tiny", "needs assets", "init: random"],
        ),
        ("models.yaml", lambda m: m["tiny"].update(init="zeros"), ["tiny.init", "'zeros'", "'random'"]),
        ("models.yaml", lambda m: m.update({"a-x2": m["tiny"]}), ["'a-x2'", "dose", "rename"]),
        ("models.yaml", lambda m: m.update({"a-seed2": m["tiny"]}), ["'a-seed2'", "seed", "rename"]),
        ("models.yaml", lambda m: m.update({"a@b": m["tiny"]}), ["'a@b'", "letters, digits"]),
        ("data.yaml", lambda d: d["stories"].update(make="txt"), ["'txt'", "items, arena"]),
        (
            "data.yaml",
            lambda d: d["stories"].update(source="x"),
            ["stories", "'source'", "sources, heldout_source"],
        ),
        ("data.yaml", lambda d: d["stories"].pop("make"), ["stories", "make", "items, arena"]),
        ("data.yaml", lambda d: d.update(stories=None), ["stories", "make", "None"]),
        ("data.yaml", lambda d: d["stories"].pop("written"), ["stories", "written", "how much"]),
        (
            "data.yaml",
            lambda d: d["alpaca"].update(written=d["stories"]["written"]),
            ["alpaca", "written", "how much"],
        ),
        ("data.yaml", lambda d: d["tasks"].update(folder="smoke"), ["tasks", "either `asset` or `folder`"]),
        (
            "data.yaml",
            lambda d: d["stories"].update(sources=["wiki", "written"]),
            ["'wiki'", "wikipedia-intros"],
        ),
        (
            "measures.yaml",
            lambda m: m["gate"].update(metric="gte"),
            ["'gate'", "'gte'", "near it: gate", f"({len(metrics())} in all)"],
        ),
        (
            "measures.yaml",
            lambda m: m["gate"].update(data="alpacca"),
            ["'gate'", "'alpacca'", "alpaca, wikipedia-intros"],
        ),
        (
            "measures.yaml",
            lambda m: m["perplexity"].update(options={"windows": 1}),
            ["perplexity", "'windows'", "tokens, seq_len, batch_size"],
        ),
        (
            "measures.yaml",
            lambda m: m["perplexity_no_linear"].update(without="liner"),
            ["perplexity_no_linear", "'liner'", "linear, window, gate"],
        ),
        (
            "measures.yaml",
            lambda m: m["perplexity_before"].update(before="finetun"),
            ["perplexity_before", "'finetun'", "classify, distill, finetune"],
        ),
        ("measures.yaml", lambda m: m.update(distill=m["gate"]), ["'distill'", "name of a stage", "rename"]),
        ("measures.yaml", lambda m: m.update({"a.b": m["gate"]}), ["'a.b'", "letters, digits"]),
        (
            "measures.yaml",
            lambda m: m["mmlu"]["options"].update(tasks=["mmmlu"]),
            ["'mmmlu'", "mmlu, mmlu_continuation, piqa"],
        ),
        (
            "scales/smoke.yaml",
            lambda s: s["measures"]["gate"].update(token=1),
            ["smoke.yaml", "gate", "'token'", "tokens, seq_len"],
        ),
        ("scales/smoke.yaml", lambda s: s["measures"].update(gte={}), ["'smoke'", "'gte'", "fidelity, gate"]),
        (
            "scales/smoke.yaml",
            lambda s: s["measures"]["gate"].update(tokens="many"),
            ["gate.tokens", "'many'"],
        ),
        ("scales/smoke.yaml", lambda s: s["measures"]["gate"].update(seq_len=0), ["gate.seq_len", "0"]),
        ("scales/smoke.yaml", lambda s: s["measures"]["lm_eval"].update(items=4), ["lm_eval.items", "4"]),
        ("scales/smoke.yaml", lambda s: s["measures"].update(gate=3), ["smoke.yaml", "gate", "3"]),
        ("scales/smoke.yaml", lambda s: s.update(without=["boolqq"]), ["'boolqq'", "near it: boolq"]),
        ("scales/smoke.yaml", lambda s: s["train"].update(distil={}), ["'distil'", "distill, finetune"]),
        (
            "scales/smoke.yaml",
            lambda s: s["train"]["distill"].update(seq_len="long"),
            ["train: distill.seq_len", "'long'"],
        ),
        (
            "scales/smoke.yaml",
            lambda s: s["train"].pop("finetune"),
            ["'smoke'", "no budget for finetune", "it has distill"],
        ),
        (
            "scales/smoke.yaml",
            lambda s: s["jobs"]["minutes"].update(finetun=3),
            ["jobs.minutes", "finetun", "finetune"],
        ),
        (
            "scales/smoke.yaml",
            lambda s: s["jobs"].update(minutes={"finetune": 3}),
            ["jobs.minutes", "default"],
        ),
        ("assets.yaml", lambda a: a.update(brown=None), ["assets.yaml", "brown", "None"]),
    ],
)
def test_a_name_or_a_value_that_does_not_exist_is_refused_with_those_that_do(workflow, file, change, named):
    edit(workflow, file, change)
    with pytest.raises(UserError) as error:
        plan = Plan(scale="smoke", workflow=workflow)
        plan.check()
        for name in plan.data:  # all data sets, also those that no run of this scale reads
            if plan.data[name].make == "text":
                plan.settings(Node("text", f"{name}@tiny"))
        assert plan.catalogue
    assert all(part in str(error.value) for part in named), f"{error.value} does not name all of {named}"


def test_a_scale_whose_name_ends_as_another_scales_folder_does_is_refused(workflow):
    shutil.copy(workflow / "scales/smoke.yaml", workflow / "scales/mini-x2.yaml")
    refused(Plan(scale="mini-x2", workflow=workflow), "'mini-x2'", "budget")


# --- options by name, without torch ---


@pytest.mark.parametrize("name", attention.available())
def test_the_options_of_a_method_are_read_from_its_source_as_python_has_them(name):
    method = attention.load(name)
    assert option_names(Path(sys.modules[method.__module__].__file__)) == tuple(method.Options.model_fields)


@pytest.mark.parametrize(
    "file", sorted((ROOT / "workflow/papers").glob("*/runs.yaml")), ids=lambda path: path.parent.name
)
def test_a_recipe_that_two_runs_have_is_written_out_and_one_that_more_share_says_so(file):
    """An edit of one run must not change another unseen."""
    text = file.read_text()
    for name in set(re.findall(r"&(\w+) ", re.sub(r"#.*", "", text))):
        used = len(re.findall(rf"\*{name}\b", re.sub(r"#.*", "", text)))
        assert used > 1, f"*{name} is said once: write its recipe out"
        assert f"shared: an edit here changes every run of this file that says *{name}" in text, name


@pytest.mark.parametrize("name", attention.available())
def test_the_parts_of_a_method_are_read_from_its_source_as_python_has_them(name):
    method = attention.load(name)
    assert part_names(Path(sys.modules[method.__module__].__file__)) == getattr(method, "PARTS", ())


@pytest.mark.parametrize(
    ("name", "given"),
    [(name, {"map": "elu"} if name == "feature_map" else {}) for name in attention.available()]
    + [("lolcats", {"window": 8})],
)
def test_what_a_method_adds_and_where_it_goes_are_read_from_its_source_as_python_has_them(name, given):
    file = ROOT / f"src/relinear/attention/{name}.py"
    made = attention.load(name)(Heads(24, 4, 2, 6, 6**-0.5, positions=64), attention.options(name, given))
    assert adds_parameters(file) == bool(list(made.parameters()))
    assert causal_only(file, given) == made._causal_only()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class Method(Attention)\n    pass\n", "attention/toy.py, line 1 is no Python: "),
        ("x = 1\n\nclass Method:\n  def forward(:\n", "attention/toy.py, line 4 is no Python: "),
        ("x = '\0'\n", "attention/toy.py"),
        ("class Attention:\n    pass\n", "attention/toy.py defines no class Method, and each file there"),
        ("", "or the name _toy.py for a file that is none"),
    ],
)
def test_a_file_that_is_no_method_is_named(tmp_path, text, said):
    """A half-written method stops every command, so it must say which file to mend."""
    (tmp_path / "attention").mkdir()
    file = tmp_path / "attention/toy.py"
    file.write_text(text)
    for asked in (part_names, adds_parameters):
        with pytest.raises(ConfigError) as error:
            asked(file)
        assert said in str(error.value), error.value


def test_a_metric_that_is_no_python_is_named(tmp_path):
    (tmp_path / "measure").mkdir()
    file = tmp_path / "measure/toy.py"
    file.write_text("def measure(model, data, options, job)\n    yield 1\n")
    for asked in (option_names, metric_needs, metric_yields, reads_data):
        with pytest.raises(ConfigError, match="measure/toy.py, line 1 is no Python"):
            asked(file)


def test_a_method_that_builds_on_another_is_not_refused_unread(tmp_path):
    file = tmp_path / "more.py"
    file.write_text("from relinear.attention import hedgehog\n\n\nclass Method(hedgehog.Method):\n    pass\n")
    assert adds_parameters(file) and not causal_only(file, {})


@pytest.mark.parametrize("name", metrics())
def test_the_options_of_a_metric_are_read_from_its_source_as_python_has_them(name):
    metric = importlib.import_module(f"relinear.measure.{name}")
    assert option_names(Path(metric.__file__)) == tuple(metric.Options.model_fields)
    assert metric_needs(Path(metric.__file__)) == getattr(metric, "NEEDS", ())


def test_a_need_that_there_is_not_is_named(tmp_path):
    (tmp_path / "toy.py").write_text('NEEDS = ("next_token", "luck")\n')
    with pytest.raises(
        ConfigError, match=r"measure/toy.py: NEEDS has 'luck'; possible: next_token, documents, tasks"
    ):
        metric_needs(tmp_path / "toy.py")


# file, what stands there, what stands there in its place, what the error names
WRONG_OPTIONS = [
    ("papers/lolcats/runs.yaml", "window: 64", "windw: 64", ["lolcats_window", "'windw'", "window"]),
    ("measures.yaml", "{tasks: [mmlu]}", "{task: [mmlu]}", ["mmlu", "'task'", "tasks"]),
    (
        "papers/lolcats/runs.yaml",
        "window: 64",
        "window: -64",
        ["lolcats_window", "window must be 0 (none) or more", "-64"],
    ),
    ("papers/lolcats/runs.yaml", "window: 64", "window: true", ["lolcats_window", "window is true"]),
    (
        "scales/smoke.yaml",
        "depths: 2,",
        "depths: 0,",
        ["smoke.yaml: measures: needle", "depths", "greater than 0", "got 0"],
    ),
    (
        "scales/smoke.yaml",
        "prompts: 2, batch_tokens: 4096}",
        "prompts: 2}",
        ["batch_tokens", "required", "possible: lengths, "],
    ),
    ("scales/smoke.yaml", "lm_eval: {items: {piqa: 4,", "lm_eval: {items: {piqa: 4.5,", ["piqa", "4.5"]),
    ("measures.yaml", "lengths: [1024]", "lengths: [0]", ["needle_1024", "lengths.0", "greater than 0"]),
    ("measures.yaml", "lengths: [1024]", "lengths: 1024", ["needle_1024", "lengths", "tuple"]),
    (
        "measures.yaml",
        "positions: [0, 64, 128, 256, 512, 1024, 2048]",
        "positions: [0, 64, 32]",
        ["ppl_mix", "edges of bands", "[0, 64, 32]"],
    ),
    (
        "papers/lolcats/figure3.yaml",
        "run: lolcats_exp",
        "run: lolcats_xep",
        ["lolcats/figure3.yaml: no run 'lolcats_xep'; near it: lolcats_exp", "; have "],
    ),
    (
        "papers/lolcats/table1.yaml",
        "perplexity_before",
        "perplexity_befor",
        ["lolcats/table1.yaml: no measure", "; near it: perplexity_before"],
    ),
]


def test_wrong_options_are_refused_before_anything_imports_torch(workflow):
    """Each alone, one after the other in one process."""
    command = f"""
import json, sys
from pathlib import Path
from relinear.errors import UserError
from relinear.plan.plan import Plan

for file, old, new, _ in json.load(sys.stdin):
    path = Path({str(workflow)!r}, file)
    text = path.read_text()
    assert old in text, (file, old)
    path.write_text(text.replace(old, new))
    try:
        Plan(scale="smoke", workflow=Path({str(workflow)!r})).check()
        print(json.dumps("nothing"))
    except UserError as error:
        print(json.dumps(str(error)))
    path.write_text(text)
print(json.dumps("torch" in sys.modules))
"""
    env = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'kernels'}"}
    done = subprocess.run(
        [sys.executable, "-c", command],
        input=json.dumps(WRONG_OPTIONS),
        capture_output=True,
        text=True,
        check=True,
        env=env,
    )
    *said, torch = map(json.loads, done.stdout.splitlines())
    for (*_, named), one in zip(WRONG_OPTIONS, said, strict=True):
        assert all(part in one for part in named), one
    assert torch is False


# --- the strict reader ---


def _instructions(workflow: Path):
    plan = Plan(scale="smollm2", workflow=workflow)
    return plan.settings(Node("written", "mix@smollm2-135m-instruct"))


def _task(workflow: Path):
    from relinear.measure import _harness

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_harness, "TASKS", workflow / "tasks")
        return _harness.load("piqa", 2, None, 0)


# each kind of YAML below workflow/ -> one such file, and its reader
KINDS = {
    "models": ("models.yaml", catalogue.read_models),
    "data": ("data.yaml", catalogue.read_data),
    "measures": (
        "measures.yaml",
        lambda workflow: catalogue.read_measures(metrics(), catalogue.read_data(workflow), workflow),
    ),
    "assets": ("assets.yaml", lambda workflow: read_assets(workflow / "assets.yaml")),
    "scale": ("scales/smoke.yaml", lambda workflow: read_scale("smoke", workflow=workflow)),
    "runs": (
        "papers/lizard/runs.yaml",
        lambda workflow: catalogue.read_runs(catalogue.read_models(workflow), workflow),
    ),
    "paper": ("papers/lizard/paper.yaml", lambda workflow: specs.available(workflow / "papers")),
    "spec": ("papers/lolcats/figure3.yaml", lambda workflow: specs.available(workflow / "papers")),
    "columns": ("columns.yaml", lambda workflow: specs.available(workflow / "papers")),
    "instructions": ("instructions/smollm2-135m-instruct/about.yaml", _instructions),
    "task": ("tasks/piqa.yaml", _task),
}
WRONG = {
    "a name twice": (lambda text: text + b"\ntwice: {a: 1}\ntwice: {a: 2}\n", "'twice' stands there twice"),
    "a name twice below": (
        lambda text: text + b"\nbelow: [{once: {twice: 1, other: 2, twice: 1}}]\n",
        "'twice' stands there twice",
    ),
    "an empty file": (lambda text: b"# nothing\n", "is empty"),
    "no UTF-8": (lambda text: text + b"# caf\xe9\n", "is not UTF-8"),
    "a list": (lambda text: b"- a\n- b\n", "got a list"),
    "a word": (lambda text: b"word\n", "got a str"),
    "no YAML": (lambda text: b"a: [1\n", "is not YAML"),
    "a date that is none": (lambda text: text + b"\nmade: 2026-13-45\n", "is not YAML"),
    "a list for a name": (lambda text: text + b"\n? [a, b]\n: 1\n", "is not YAML"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_is_read_as_it_is(workflow, kind):
    KINDS[kind][1](workflow)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", KINDS)
def test_no_file_is_read_but_strictly(workflow, kind, wrong):
    (name, reader), (change, said) = KINDS[kind], WRONG[wrong]
    path = workflow / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError) as error:
        reader(workflow)
    assert f"{path.parent.name}/{path.name} {said}" in str(error.value) or (
        path.name in str(error.value) and said in str(error.value)
    )


def test_these_are_all_kinds_of_files(workflow):
    kinds = {Path(name).parent if "/" in name else Path(name) for name, _ in KINDS.values()}
    shown = {p.relative_to(workflow) for p in workflow.rglob("*.yaml")}
    for path in shown:
        alike = [path, path.parent, Path("papers/lizard") if path.parts[0] == "papers" else path]
        alike += [Path("instructions/smollm2-135m-instruct")] if path.parts[0] == "instructions" else []
        assert any(place in kinds for place in alike), f"no test damages a file like {path}"


def test_nothing_else_reads_yaml():
    """`yaml.safe_load` silently drops the first of two entries of one name."""
    sources = {
        path.relative_to(ROOT / "src").as_posix(): path.read_text()
        for path in (ROOT / "src/relinear").rglob("*.py")
    }
    assert [name for name, text in sources.items() if "yaml.load(" in text or "safe_load" in text] == [
        "relinear/plan/sane.py"
    ]


def test_merged_and_repeated_entries_are_no_names_given_twice(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(
        "base: &b {x: 1, y: 2}\nown: &o {<<: *b, y: 3}\nlate: {<<: *o, x: 4}\nlist: [*b, *b, {deep: *o}]\n"
    )
    assert read_yaml(path) == {
        "base": {"x": 1, "y": 2},
        "own": {"x": 1, "y": 3},
        "late": {"x": 4, "y": 3},
        "list": [{"x": 1, "y": 2}] * 2 + [{"deep": {"x": 1, "y": 3}}],
    }
