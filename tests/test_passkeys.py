"""Lizard's Figure 4: pass keys to train on, runs on top of finished ones, the plane of the keys that they
find, and the figure."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import made
from safetensors.torch import load_file
from synthetic import measurement, paper, reading

from relinear import stages
from relinear.draw import About
from relinear.draw.claims import UNTESTED
from relinear.draw.drawing import make as draw
from relinear.draw.frame import frame_of
from relinear.draw.grid import heat_of
from relinear.errors import UserError
from relinear.families.tiny import byte_tokenizer
from relinear.get import needles, passkeys
from relinear.get.needles import HEADER
from relinear.get.packed import IGNORED, Packed
from relinear.get.passkeys import Keys, answer_of, for_tests
from relinear.linearize.assemble import assemble
from relinear.linearize.model import linearize
from relinear.measure import needle_plane
from relinear.plan.job import Job, Link
from relinear.plan.plan import Plan
from relinear.plan.strict import ConfigError
from relinear.stages._stage import Node
from relinear.train.next_token import summed_loss

TOKENIZER = byte_tokenizer()
LENGTH = 700
SETTINGS = {
    "examples": 6,
    "heldout": 3,
    "length": LENGTH,
    "filler": "noise",
    "keys": 5,
    "key_tokens": [5, 8],
    "mention": 1,
    "seed": 0,
} | {"learn": "answer"}
RUNS = ("teacher_lora", "lolcats_window", "lizard", "window_bytes_of_lizard")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with the tokenizer that knows bytes."""
    folder = tmp_path_factory.mktemp("model")
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A plan at smoke with Lizard trained on pass keys after its own steps, and the teacher likewise."""
    plan = Plan(scale="smoke", results=tmp_path_factory.mktemp("results"))
    made(plan, "finetune needle_teacher_lora", "finetune needle_lizard")
    return plan


def drawn(model, folder, text=None, **more):
    """Tokens and labels ``[N, T]`` of both splits, and the facts, of data that are made in `folder`."""
    folder.mkdir(exist_ok=True)
    parents = {"model": model} | ({"text": text} if text else {})
    facts = passkeys.work(
        Job(name="passkeys", settings=SETTINGS | more, parents=parents, out=folder, work=folder)
    )
    files = {
        f"{split}_{kind}": np.load(folder / f"{split}_{kind}.npy")
        for split in ("train", "heldout")
        for kind in ("tokens", "labels")
    }
    return {name: values.reshape(-1, facts["length"]) for name, values in files.items()}, facts


def test_every_sequence_is_exactly_as_long_as_asked_and_only_its_answer_has_labels(model, tmp_path):
    for length in (LENGTH, LENGTH + 1):
        found, facts = drawn(model, tmp_path, length=length)
        assert (
            found["train_tokens"].shape == (6, length)
            and found["heldout_tokens"].shape == (3, length)
            and facts["length"] == length
        )
        for tokens, labels in zip(found["train_tokens"], found["train_labels"], strict=True):
            text, learned = TOKENIZER.decode(tokens), labels != IGNORED
            said = dict(re.findall(r"The (\w+) pass key is (\d+)\. Remember it\.", text))
            asked = re.search(r"\n\nWhat is the (\w+) pass key\? The \1 pass key is (\d+)\.$", text)
            assert text.startswith(HEADER) and len(said) == 5 and said[asked[1]] == asked[2], (
                "the answer is what the text says"
            )
            assert (
                TOKENIZER.decode(labels[learned]) == f" {asked[2]}."
                and (labels[learned] == tokens[learned]).all()
            )
            assert not learned[: -learned.sum()].any(), "the answer is the end"
        assert facts["labelled"] == (found["train_labels"] != IGNORED).sum()


def test_the_whole_sequence_is_learned_where_that_is_asked_for_and_its_tokens_are_the_same(model, tmp_path):
    (answers, few), (whole, many) = (
        drawn(model, tmp_path / learn, learn=learn) for learn in ("answer", "all")
    )
    for split in ("train", "heldout"):
        assert (answers[f"{split}_tokens"] == whole[f"{split}_tokens"]).all() and (
            whole[f"{split}_labels"] == whole[f"{split}_tokens"]
        ).all()
    assert (
        few["sources"] == many["sources"] and few["labelled"] < many["labelled"] == whole["train_tokens"].size
    )


def test_data_are_their_seed_and_no_test_key_is_in_training(model, tmp_path):
    first, again, other = (
        drawn(model, tmp_path / str(i), seed=seed)[0]["train_tokens"] for i, seed in enumerate((0, 0, 1))
    )
    assert (first == again).all() and (first != other).any()
    assert len(np.unique(first, axis=0)) == len(first)
    uses = {
        use: {
            key
            for i in range(40)
            for key in needles.example(Keys(TOKENIZER, use), LENGTH, str(i), filler=[(1,)] * 9).keys
        }
        for use in ("train", "test")
    }
    assert (
        not uses["train"] & uses["test"]
        and all(map(for_tests, uses["test"]))
        and not any(map(for_tests, uses["train"]))
    )
    share = sum(for_tests(str(key)) for key in range(10_000, 20_000)) / 10_000
    assert share == pytest.approx(0.1, abs=0.02)


def test_a_text_s_sentences_are_those_of_its_training_documents_without_tables_and_special_tokens(
    model, tmp_path
):
    text = tmp_path / "text"
    text.mkdir()
    separator, end = TOKENIZER.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    # no sentence: as a table or code, which the documentation of a kernel has much of
    table = " 1" * passkeys.LONGEST
    for split, words in (
        ("train", f"Owls sleep. Cats do not!{table}. Owls sleep."),
        ("heldout", "Nobody sleeps. Dogs bark."),
    ):
        ids = TOKENIZER(words, add_special_tokens=False)["input_ids"]
        np.save(
            text / f"{split}_tokens.npy",
            np.array([separator, *ids, end] * 40 + [separator, *ids[:7]], np.int32),
        )
    cutter = Keys(TOKENIZER, "train")
    assert {TOKENIZER.decode(list(s)) for s in passkeys.sentences(cutter, text)} == {
        " Owls sleep.",
        " Cats do not!",
    }
    found, _ = drawn(model, tmp_path / "out", text, filler="text")
    for split, words, others in (("train", "Owls sleep.", "Dogs"), ("heldout", "Dogs bark.", "Owls")):
        assert all(
            words in (said := TOKENIZER.decode(tokens)) and others not in said
            for tokens in found[f"{split}_tokens"]
        )


def test_a_length_without_room_for_its_keys_is_refused_with_what_is_possible(model, tmp_path):
    with pytest.raises(UserError, match="have no room for 5 keys.*possible: .* tokens or more"):
        drawn(model, tmp_path, length=400)


# --- in the plan ---


def test_a_run_on_pass_keys_reads_sequences_of_their_length_once_and_begins_where_its_run_ended():
    plan = Plan(scale="smollm2")
    for run in RUNS:
        node = plan.node("finetune", f"needle_{run}")
        settings = plan.settings(node)
        budget, parents = settings["budget"], plan.parents(node)
        assert (budget["seq_len"], budget["epochs"], budget["batch_size"] * budget["accumulate"]) == (
            2048,
            1,
            8,
        )
        assert settings["links"][-1]["steps"][-1] == f"{run}/finetune" and parents[f"{run}/finetune"] == Node(
            "finetune", run
        )
        own, before = (plan.run(name).run.recipes["finetune"] for name in (f"needle_{run}", run))
        same = ("kind", "lr", "betas", "min_lr_ratio", "lora_targets")
        assert {x: own.get(x) for x in same} == {x: before.get(x) for x in same}, "its own recipe"
        assert own.get("train_method", False) == (run in ("lolcats_window", "lizard"))
        assert plan.settings(parents["text"])["examples"] == 10_000 and plan.parents(parents["text"])[
            "text"
        ].name.startswith("mix@")
    assert (
        plan.settings(replace(plan, budget=0.5).scaled.text("passkeys", "smollm2-135m-instruct", 3))[
            "examples"
        ]
        == 30_000
    )
    assert (
        replace(plan, budget=0.5).settings(plan.scaled.text("passkeys", "smollm2-135m-instruct"))["examples"]
        == 5_000
    )


def test_runs_that_learn_whole_sequences_differ_from_the_others_in_that_alone():
    for scale in ("smoke", "mini", "smollm2", "qwen", "paper"):
        plan = Plan(scale=scale)
        for run in ("needle_teacher_lora", "needle_lizard"):
            one, other = (plan.node("finetune", name) for name in (run, f"{run}_whole"))
            assert plan.settings(one) == plan.settings(other)
            text, whole = (plan.settings(plan.parents(node)["text"]) for node in (one, other))
            assert text == whole | {"learn": "answer"} and whole["learn"] == "all"


@pytest.mark.parametrize(
    ("data", "recipe", "message"),
    [
        (
            "{make: passkeys, examples: 1, heldout: 1, length: 700, filler: noise, learn: keys}",
            {},
            "'answer' or 'all'",
        ),
        ("{make: passkeys, examples: 1, heldout: 1, length: 700, filler: novel}", {}, "'text' or 'noise'"),
        (
            "{make: passkeys, examples: 1, heldout: 1, length: 700, filler: text}",
            {},
            "filler: text.*go together",
        ),
        (
            "{make: passkeys, examples: 1, heldout: 1, length: 700, filler: noise, key_tokens: [8, 5]}",
            {},
            "the fewest and the most",
        ),
        (
            "{make: passkeys, examples: 1, heldout: 1, length: 700, filler: text, text: story-documents}",
            {},
            "documents .* is none; possible: alpaca, ",
        ),
        (
            "{make: passkeys, examples: 1, heldout: 1, length: 4096, filler: noise}",
            {},
            "seq_len 4096 is beyond the model's 2048 positions",
        ),
        (
            "{make: passkeys, examples: 1, heldout: 1, length: 700, filler: noise}",
            {"seq_len": 512},
            "seq_len 512, .*sequences of 700 tokens; leave it out",
        ),
    ],
)
def test_what_cannot_be_trained_on_is_refused_before_any_work(tmp_path, data, recipe, message):
    from conftest import ROOT

    workflow = tmp_path / "workflow"
    (workflow / "papers/toy").mkdir(parents=True)
    for path in ROOT.joinpath("workflow").iterdir():
        if path.name not in ("papers", "data.yaml"):
            (workflow / path.name).symlink_to(path)
    (workflow / "data.yaml").write_text((ROOT / "workflow/data.yaml").read_text() + f"\ntoy: {data}\n")
    (workflow / "papers/toy/paper.yaml").write_text("title: A toy\n")
    (workflow / "papers/toy/runs.yaml").write_text(
        json.dumps(
            {
                "toy": {
                    "model": "tiny",
                    "steps": [{"finetune": {"data": "toy", "lr": 1e-3, "kind": "lora"} | recipe}],
                }
            }
        )
    )
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        Plan(scale="smoke", workflow=workflow).check()


# --- training on them, at smoke ---


def answer_loss(model, text):
    """The mean loss of the answers' tokens of all sequences."""
    tokens, labels = (torch.stack(x) for x in zip(*map(text.sequence, range(len(text))), strict=True))
    with torch.no_grad():
        return float(summed_loss(model, tokens, labels) / (labels[:, 1:] != IGNORED).sum())


def test_training_on_pass_keys_lowers_the_loss_of_their_answers_and_merges_the_adapter_before(trained):
    for run, added in (("teacher_lora", False), ("lizard", True)):
        node = trained.node("finetune", f"needle_{run}")
        parents = {role: trained.folder(parent) for role, parent in trained.parents(node).items()}
        links = [
            Link(x["method"], x["options"], tuple(parents[role] for role in x["steps"]))
            for x in trained.settings(node)["links"]
        ]
        folder, text = trained.folder(node), Packed(parents["text"], "train", 768)
        assert (
            json.loads((folder / "run.json").read_text())["tokens"]
            == 768 * len(text)
            == json.loads((folder / "metrics.json").read_text())["tokens"]
        )
        before = assemble(parents["model"], links)
        after = assemble(
            parents["model"], [*links[:-1], links[-1]._replace(steps=(*links[-1].steps, folder))]
        )
        assert answer_loss(after, text) < answer_loss(before, text) - 0.01
        assert (folder / "method.safetensors").is_file() == added
        if added:
            own, earlier = (
                load_file(step / "method.safetensors")
                for step in (folder, trained.folder(Node("distill", run)))
            )
            assert any((own[name] != earlier[name]).any() for name in own), (
                "the method's parameters are trained too"
            )


# --- the plane ---


def asked_of(model_folder, tmp_path, model, **more):
    """Readings and items of a plane."""
    tmp_path.mkdir(exist_ok=True)
    options = needle_plane.Options(
        **{
            "lengths": [700, 1024],
            "distance_bin": 256,
            "prompts": 2,
            "batch_tokens": 4096,
            "filler": "noise",
            "beyond": 256,
        }
        | more
    )
    job = Job(name="toy", settings={"seed": 0}, parents={"model": model_folder}, out=tmp_path, work=tmp_path)
    readings = list(needle_plane.measure(model, None, options, job))
    return readings, [json.loads(line) for line in (tmp_path / "items.jsonl").read_text().splitlines()]


def teacher(positions):
    from relinear.families import load

    return load("tiny").random({"max_position_embeddings": positions}, 0, torch.float64)[0].double()


def test_a_plane_has_every_distance_of_every_length_and_keys_that_no_training_has(model, tmp_path):
    readings, items = asked_of(model, tmp_path / "a", teacher(1024))
    plane = {
        (r.at["length"], r.at["distance"]): r
        for r in readings
        if r.metric == "exact_match" and set(r.at) == {"length", "distance"}
    }
    assert set(plane) == {(700, d) for d in (256, 512)} | {(1024, d) for d in (256, 512, 768, 1024)}
    assert sum(r.n for r in plane.values()) == len(items) == 2 * (3 + 4) and all(
        r.stderr > 0 for r in plane.values()
    )
    assert all(map(for_tests, (key for item in items for key in item["keys"])))
    assert {r.metric for r in readings if r.at == {"length": 1024, "beyond": 256}} == set(needle_plane.SCORES)
    assert not [r for r in readings if r.metric in ("window", "trained_length")], (
        "a teacher that nothing trained has neither"
    )
    again = [
        (item["keys"], item["distance"])
        for item in asked_of(model, tmp_path / "b", linearize(teacher(1024), "supra"))[1]
    ]
    assert again == [(item["keys"], item["distance"]) for item in items], "the same prompts for all models"


def test_a_prompt_and_its_answer_fit_in_their_length_and_what_is_beyond_a_model_says_so(model, tmp_path):
    options = needle_plane.Options(lengths=[700], prompts=8, batch_tokens=1, filler="noise")
    job = Job(name="toy", settings={"seed": 0}, parents={}, out=tmp_path, work=tmp_path)
    [prompts] = needle_plane.drawn(Keys(TOKENIZER, "test"), None, options, job).values()
    assert 698 <= max(len(needle.prompt) + len(answer_of(needle)) for _, needle in prompts) <= 700
    assert len({len(needle.prompt) for _, needle in prompts}) == 1, "a batch is of one length"
    readings, items = asked_of(model, tmp_path, teacher(1023))
    beyond = [r for r in readings if r.at.get("length") == 1024]
    assert {(r.metric, r.value, r.why) for r in beyond} == {
        (score, None, "softmax attention, made for 1023 positions") for score in needle_plane.SCORES
    }
    assert {item["length"] for item in items} == {700}
    with pytest.raises(UserError, match="have no room for 5 keys"):
        asked_of(model, tmp_path, teacher(1023), lengths=[400])
    with pytest.raises(UserError, match="filler `text` is of the measure's data.*possible: filler: noise"):
        asked_of(model, tmp_path, teacher(1023), filler="text")


def test_a_run_s_window_and_the_length_that_it_was_trained_at_are_read(trained):
    for method, options, window in (
        ("lizard", {}, 128),
        ("lolcats", {"window": 64}, 64),
        ("window", {"window": 9}, 9),
        ("supra", {}, None),
    ):
        assert needle_plane.window_of(linearize(teacher(64), method, **options)) == window
    steps = tuple(
        trained.folder(Node(stage, run))
        for stage, run in (("distill", "lizard"), ("finetune", "needle_lizard"))
    )
    job = Job(
        name="toy", settings={}, parents={}, out=Path(), work=Path(), links=(Link("lizard", {}, steps),)
    )
    assert needle_plane.trained_length(job) == 768
    assert needle_plane.trained_length(replace(job, links=(Link("softmax"),))) is None


# --- the figure ---


def plane(run, found, window=None, tokens=60_500_000):
    """A measurement in which a share of `found(length, distance)` keys is found, none of them at 8192 where
    it is not defined there."""
    readings = []
    for length in (2048, 4096, 8192):
        if found(length, 1) is None:
            readings += [
                reading(m, None, None, 0, "needle", length=length)._replace(why="no positions")
                for m in ("exact_match", "choice")
            ]
            continue
        for m in ("exact_match", "choice"):
            readings += [
                reading(m, found(length, d), 0.02, 16, "needle", length=length, distance=d)
                for d in range(512, length + 1, 512)
            ]
            readings.append(reading(m, found(length, length), 0.01, 60, "needle", length=length, beyond=256))
    readings.append(reading("trained_length", 2048, None, 1, "needle"))
    readings += [reading("window", window, None, 1, "needle")] if window else []
    return {
        (run, "needle_plane"): measurement(
            run, "needle_plane", *readings, tokens={"finetune": tokens}
        )._replace(scale="smollm2")
    }


def figure(tmp_path, able=1.0, tokens=60_500_000):
    artefact = Plan(scale="smollm2").artefacts["lizard_figure4"]
    measured = (
        plane("needle_teacher_lora", lambda length, _: able if length < 8192 else None)
        | plane("needle_lolcats_window", lambda length, _: 0.95 if length == 2048 else 0.1, 64, tokens)
        | plane("needle_lizard", lambda length, _: 0.99, 128, tokens)
        | plane("needle_window_bytes_of_lizard", lambda _, distance: float(distance <= 512), 528, tokens)
    )
    files = draw(artefact, measured, About("smollm2", "SmolLM2"), tmp_path)
    assert {path.suffix for path in files} == {".png", ".pdf", ".json", ".csv"} and all(
        path.stat().st_size for path in files
    )
    return artefact, measured, list(csv.DictReader((tmp_path / "figure4.claims.csv").open()))


def test_the_figure_draws_each_plane_its_lines_and_where_nothing_is_defined(tmp_path):
    artefact, measured, verdicts = figure(tmp_path)
    spec = artefact.spec
    heat = heat_of(spec, spec.panel("Lizard"), frame_of(measured))
    assert (heat.xs, heat.lines) == ([2048, 4096, 8192], {"x": 2048, "y": 128}) and np.isfinite(
        heat.values
    ).sum() == 4 + 8 + 16
    told = [
        reading("not_informative", value, None, 1, name, length=2048)
        for name, value in (("floor", 1.0), ("ceiling", 0.0), ("copying", 1.0))
    ]
    found = measured["needle_lizard", "needle_plane"]
    marked = frame_of({("needle_lizard", "needle_plane"): found._replace(readings=(*found.readings, *told))})
    assert heat_of(spec, spec.panel("Lizard"), marked).marks == {2048: "*‡", 4096: "", 8192: ""}
    heat = heat_of(spec, spec.panel("teacher"), frame_of(measured))
    assert heat.xs[-1] == 8192 and np.isnan(heat.values[:, -1]).all() and heat.lines == {"x": 2048}, (
        "a column that is hatched"
    )
    found = {v["claim"]: v["verdict"] for v in verdicts}
    assert found.pop("Lizard finds more keys than LoLCATs at the training length") == "reproduced" and set(
        found.values()
    ) == {"reproduced"}
    assert len(verdicts) == 7 and all(v["source"] == "section 4.2" for v in verdicts)


def test_a_teacher_that_cannot_do_it_and_a_smaller_dose_judge_nothing_and_say_why(tmp_path):
    for name, more, reason in (
        (
            "able",
            {"able": 0.5},
            "not informative: teacher at 2048, beyond 256 50.00 ± 1.00, of 90.00 required; ",
        ),
        ("dose", {"tokens": 10_000_000}, "other dose: "),
    ):
        verdicts = figure(tmp_path / name, **more)[2]
        assert all(v["verdict"] == UNTESTED and v["reason"].startswith(reason) for v in verdicts)
    wrong = {"claim": "c", "source": "s", "left": {"row": "a", "at": {"length": 1}}, "op": ">", "ratio": 1}
    spec = {
        "draw": "grid",
        "cell": {"measure": "needle_plane", "metric": "choice", "x": "length", "y": "distance"},
        "panels": [{"run": "a"}],
    }
    from relinear.plan.specs import read

    with pytest.raises(ConfigError, match="no panel 'teacher'; have a"):
        read(
            paper(
                tmp_path,
                **spec,
                claims=[wrong | {"requires": [{"row": "teacher", "at": {"length": 1}, "least": 1}]}],
            )
        )


def test_every_scale_plans_the_figure_from_four_runs():
    for scale in ("smoke", "mini", "smollm2", "paper"):
        plan = Plan(scale=scale)
        reads = plan.reads(plan.artefacts["lizard_figure4"])
        assert {run for run, measure in reads if measure == "needle_plane"} == {
            f"needle_{run}" for run in RUNS
        }
        behind = plan.behind(list(reads.values()))
        assert {node.name for node in behind if node.stage == "passkeys"} and set(RUNS) <= {
            node.name for node in behind if stages.stage(node.stage).trains
        }
