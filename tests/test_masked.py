"""Masked tokens: what is hidden, an encoder that learns to tell it, and the runs that begin with one."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import made
from safetensors.torch import load_file
from test_stage import Mirror
from transformers import MPNetConfig, MPNetModel

from relinear import load_run
from relinear.draw.planned import _later
from relinear.errors import UserError
from relinear.families import bert
from relinear.families.bert import byte_tokenizer
from relinear.get.model import save_model
from relinear.get.packed import IGNORED, Packed
from relinear.linearize.assemble import assemble, to_train
from relinear.linearize.model import linearize
from relinear.plan.job import Job, Link
from relinear.plan.measured import load
from relinear.plan.plan import Plan
from relinear.plan.strict import ConfigError
from relinear.plan.targets import explain_target
from relinear.stages._stage import Node
from relinear.tracking import live as tracking
from relinear.train.masked import Hidden, work

LENGTH, SEQUENCES = 32, 48
REFERENCE = Path(__file__).parents[1] / "results/reference"


def write(folder: Path, separators=(), largest=90) -> Path:
    """A text that counts from 80 to 89 again and again, of which the tokens at `separators` of each sequence
    have no label."""
    folder.mkdir()
    for split, n in (("train", SEQUENCES), ("heldout", 8)):
        tokens = (80 + np.arange(n * LENGTH) % (largest - 80)).astype(np.int32)
        labels = tokens.reshape(n, LENGTH).copy()
        labels[:, list(separators)] = IGNORED
        np.save(folder / f"{split}_tokens.npy", tokens)
        np.save(folder / f"{split}_labels.npy", labels.ravel())
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The folder of a tiny MPNet as the stage `model` leaves it, which had a relative bias before."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tokenizer.model_max_length = 64
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    whole = MPNetModel(MPNetConfig(vocab_size=len(tokenizer), max_position_embeddings=66, **sizes))
    torch.nn.init.normal_(whole.encoder.relative_attention_bias.weight)
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("model")
    whole.save_pretrained(source)
    tokenizer.save_pretrained(source)
    save_model([source], out, "float32", family="mpnet")
    return out


def job(folder: Path, model: Path, text: Path, *, epochs=8, checkpoint_seconds=1e9) -> Job:
    for name in ("out", "work"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    recipe = {"lr": 1e-2, "betas": (0.9, 0.98), "weight_decay": 0.01, "warmup_ratio": 0.1}
    recipe |= {"min_lr_ratio": 0.0, "clip": 1.0, "share": 0.15}
    budget = {"epochs": epochs, "seq_len": LENGTH, "batch_size": 4, "accumulate": 2, "lr_floor": 0.0}
    return Job(
        "masked encoder",
        {"recipe": recipe, "budget": budget},
        {"model": model, "text": text},
        folder / "out",
        folder / "work",
        links=(Link("softmax", {}, ()),),
        checkpoint_seconds=checkpoint_seconds,
    )


# --- what is hidden ---


def test_of_ten_chosen_eight_are_masked_one_is_another_and_one_stays(tmp_path):
    hidden = Hidden(Packed(write(tmp_path / "text"), "train", LENGTH), 0.25, mask=7, vocabulary=6, padding=1)
    fates, drawn = [], set()
    for step in range(20):
        for i in range(SEQUENCES):
            shown, at, told = hidden.sequence(i, [0, step])
            tokens = hidden.text.sequence(i)[0]
            assert len(at) == 8 == len(at.unique()) and torch.equal(told, tokens[at])
            rest = torch.ones(LENGTH, dtype=torch.bool)
            rest[at] = False
            assert torch.equal(shown[rest], tokens[rest])
            fates += [
                "mask" if s == 7 else "same" if s == t else "other"
                for s, t in zip(shown[at], told, strict=True)
            ]
            drawn |= {int(s) for s, t in zip(shown[at], told, strict=True) if s not in (7, t)}
    shares = {fate: fates.count(fate) / len(fates) for fate in ("mask", "other", "same")}
    assert drawn == {0, 2, 3, 4, 5}, "padding would move what follows to other positions"
    assert shares == pytest.approx({"mask": 0.8, "other": 0.1, "same": 0.1}, abs=0.02)


def test_each_visit_hides_other_tokens_and_the_same_visit_the_same(tmp_path):
    hidden = Hidden(Packed(write(tmp_path / "text"), "train", LENGTH), 0.25, mask=7, vocabulary=6, padding=1)
    first, again, later = (hidden.sequence(3, seed)[0] for seed in ([0, 1], [0, 1], [0, 2]))
    assert torch.equal(first, again) and not torch.equal(first, later)


def test_separators_are_hidden_last_and_never_told(tmp_path):
    text = Packed(write(tmp_path / "text", separators=range(26)), "train", LENGTH)
    shown, at, told = Hidden(text, 0.25, mask=7, vocabulary=6, padding=1).sequence(0, [0])
    assert set(range(26, LENGTH)) < set(at.tolist()) and len(at) == 8
    assert (told == IGNORED).tolist() == (at < 26).tolist()
    assert torch.equal(shown[:26], text.sequence(0)[0][:26])


# --- the training ---


def test_an_encoder_learns_to_tell_hidden_tokens(tmp_path, model, monkeypatch):
    given, drawn, usual = job(tmp_path, model, write(tmp_path / "text")), set(), Hidden.batch
    monkeypatch.setattr(
        Hidden, "batch", lambda self, *a: drawn.update(self.others.tolist()) or usual(self, *a)
    )
    metrics = work(given)
    assert drawn == {*range(260)} - {1}, "all but MPNet's padding"
    assert metrics["steps"] == 48 and metrics["tokens"] == given.tokens == 48 * 8 * LENGTH
    assert metrics["heldout_loss_before"] > np.log(200) > 2.5 > metrics["heldout_loss_after"]
    assert metrics["heldout_accuracy_before"] < 0.1 < metrics["heldout_accuracy_after"]
    assert metrics["last_loss"] < 0.6 * metrics["first_loss"]
    weights = load_file(given.out / "model.safetensors")
    assert not weights.pop("encoder.relative_attention_bias.weight").any()
    begun = assemble(model, [Link("softmax", {}, ())]).state_dict()
    left = {n for n, p in weights.items() if torch.equal(p, begun[n])}
    assert left == {"pooler.dense.weight", "pooler.dense.bias"}, "nothing reads what pools"
    built = assemble(model, [Link("softmax", {}, (given.out,)), Link("hedgehog", {}, ())])
    assert all(torch.equal(built.get_parameter(n), p) for n, p in weights.items())


def test_a_training_that_was_stopped_goes_on_to_the_bit(tmp_path, model):
    text = write(tmp_path / "text")
    whole = job(tmp_path / "whole", model, text, epochs=2)
    stopped = job(tmp_path / "stopped", model, text, epochs=2, checkpoint_seconds=0)
    expected = work(whole)
    log = stopped.log

    def dies(metrics, step):
        if step == 7:
            raise KeyboardInterrupt
        log(metrics, step)

    stopped.log = dies
    with pytest.raises(KeyboardInterrupt):
        work(stopped)
    assert any((stopped.work / "checkpoints").iterdir())
    again = job(tmp_path / "stopped", model, text, epochs=2)
    assert work(again) == expected
    theirs = load_file(whole.out / "model.safetensors")
    assert all(torch.equal(p, theirs[n]) for n, p in load_file(again.out / "model.safetensors").items())


def test_a_tokenizer_without_a_mask_and_a_token_beyond_the_vocabulary_are_refused(tmp_path, model):
    text = write(tmp_path / "text")
    bare = Path(shutil.copytree(model, tmp_path / "bare"))
    byte_tokenizer().save_pretrained(bare)
    with pytest.raises(
        UserError, match="masked encoder: the tokenizer of .*bare has no mask; possible: an encoder"
    ):
        work(job(tmp_path / "a", bare, text))
    large = write(tmp_path / "large", largest=400)
    with pytest.raises(UserError, match="the text has the token 399; the model knows 0 to 259"):
        work(job(tmp_path / "b", model, large))


def test_no_training_brings_the_bias_of_an_mpnet_back_and_its_student_has_its_numbers(model):
    taught = to_train(model, [Link("softmax", {}, ())], torch.float64).train()
    bias = taught.encoder.relative_attention_bias.weight
    before = taught.encoder.layer[0].attention.attn.q.weight.detach().clone()
    optimiser = torch.optim.AdamW([p for p in taught.parameters() if p.requires_grad], lr=1e-2)
    tokens = torch.randint(5, 250, (4, 20), generator=torch.Generator().manual_seed(0))
    for _ in range(5):
        optimiser.zero_grad()
        taught(tokens).last_hidden_state[:, 0].square().sum().backward()
        optimiser.step()
    assert not bias.any() and not torch.equal(before, taught.encoder.layer[0].attention.attn.q.weight)
    with torch.no_grad():
        expected = taught.eval()(tokens).last_hidden_state
        found = linearize(taught, "softmax")(tokens).last_hidden_state
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_an_mpnet_with_its_bias_learns_and_is_not_linearized_without_a_word():
    whole = MPNetModel(MPNetConfig(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                                   num_attention_heads=4, max_position_embeddings=66))  # fmt: skip
    tokens = torch.arange(5, 15)[None]
    whole(tokens).last_hidden_state.square().sum().backward()
    assert whole.encoder.relative_attention_bias.weight.grad.any()
    with pytest.raises(
        UserError, match="adds a bias of relative positions.*possible: .*relative_bias = False"
    ):
        linearize(whole, "hedgehog")(tokens)


# --- the plan ---

ENCODER = Node("masked", "encoder")


def behind(plan: Plan, run: str) -> list[Node]:
    return [step for link in plan.chain(run) for step in link.steps]


def test_runs_of_an_altered_encoder_begin_with_one_that_was_trained_on_and_others_do_not():
    runs = ["cola_hedgehog", "hedgehog_untrained", "glue_sst2_t2r", "glue_cola_by_elu_untrained"]
    for scale in ("smollm2", "qwen"):
        plan = Plan(scale=scale)
        assert all(behind(plan, run)[0] == ENCODER for run in runs)
        assert behind(plan, "cola_hedgehog-seed2")[0] == Node("masked", "encoder-seed2")
        given = plan.settings(plan.node(*ENCODER))
        assert given["recipe"].keys().isdisjoint({"if_altered", "data"}) and given["recipe"]["share"] == 0.15
    for scale in ("smoke", "mini", "paper"):
        plan = Plan(scale=scale)
        assert all(step.stage != "masked" for run in runs for step in behind(plan, run))
        assert not behind(plan, "encoder")
        with pytest.raises(ConfigError) as raised:
            plan.node(*ENCODER)
        said = (
            f"run 'encoder' has no step 'masked' at scale {scale!r}, where its model,"
            f" {plan.run('encoder').model!r}, is whole; runs that do: none at this scale"
        )
        assert str(raised.value) == said
        assert explain_target("masked", ["masked"], plan) == f"rule 'masked' is for one run; {said}"


def test_every_run_of_the_papers_encoder_begins_with_it():
    plan = Plan(scale="smollm2")
    own = [name for name, run in plan.runs.items() if run.model == "bert-base"]
    assert len(own) > 80 and all(behind(plan, run)[0] == ENCODER for run in own)


def test_runs_that_were_measured_before_their_encoder_was_trained_on_are_told():
    places = {
        ("hedgehog_cola", "kl_cola"): "hedgehog_smollm2",
        ("hedgehog_cola-seed1", "kl_cola"): "hedgehog_smollm2",
        ("cola_hedgehog", "task_cola"): "encoders_smollm2",
        ("search_hedgehog_t0.001_l0.0001", "perplexity"): "search_smollm2",  # its transfer had another name
    }
    measured = {
        (run, measure): load(REFERENCE / place / "runs" / run / measure)
        for (run, measure), place in places.items()
    }
    plan = Plan(scale="smollm2")
    assert all(behind(plan, run)[0].name != run for run, _ in places)
    assert _later(plan, measured, ()) == {"masked": ["hedgehog_cola"]}
    assert _later(plan, measured, ["kl_cola"]) == {}
    assert _later(Plan(scale="mini"), measured, ()) == {}


def test_the_models_that_lose_a_part_say_so_and_their_nodes_keep_their_settings():
    plan = Plan()
    losing = {name for name, model in plan.models.items() if model.family == "mpnet"}
    assert losing == {name for name, model in plan.models.items() if model.altered}
    assert all("altered" not in plan.settings(plan.node("model", name))["model"] for name in losing)


@pytest.fixture
def planned(tmp_path):
    """A function that plans runs of a test at smoke scale, whose encoder lost a part."""
    workflow = Path(shutil.copytree(Path(__file__).parents[1] / "workflow", tmp_path / "workflow"))
    models = yaml.safe_load((workflow / "models.yaml").read_text())
    models["tiny-bert"]["altered"] = True
    (workflow / "models.yaml").write_text(yaml.safe_dump(models))

    def planned(results=tmp_path / "results", **runs) -> Plan:
        paper = workflow / "papers" / "added"
        paper.mkdir()
        (paper / "paper.yaml").write_text("title: Runs of a test\n")
        (paper / "runs.yaml").write_text(yaml.safe_dump(runs))
        return Plan(scale="smoke", workflow=workflow, results=results)

    return planned


def masked(model="bert-base", **given) -> dict:
    return {"model": model, "steps": [{"masked": {"data": "masked-text", "lr": 1e-3, **given}}]}


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (masked("llama-3-8b"), "trains encoders of text, and 'tiny' is none; possible: runs of bert-base"),
        (masked("lra-listops"), "'lra-listops-tiny' is none; possible: runs of bert-base"),
        (masked("vit-base"), "'vit-digits' is none"),
        (
            masked(data="glue-cola"),
            "of equal length without padding, and data 'story-labels' are none; possible: alpaca",
        ),
        (
            masked(share=0.001),
            "share of 0.001 hides no token of sequences of 256; possible: share above 0.00195",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_before_any_work(planned, run, said):
    plan = planned(wrong=run)
    with pytest.raises(ConfigError, match=said):
        plan.check_processes(plan.node("masked", "wrong"), 1)


def test_no_run_comes_after_a_step_that_others_leave_out(planned):
    with pytest.raises(
        ConfigError, match="after 'a/masked', a step that a whole model leaves out; possible: after 'a'"
    ):
        planned(a=masked(if_altered=True), b={"model": "bert-base", "after": "a/masked"}).runs  # noqa: B018


def test_a_step_for_altered_models_alone_is_there_for_one(planned):
    plan = planned(a=masked(if_altered=True), b={"model": "bert-base", "after": "a", "method": "hedgehog"})
    assert behind(plan, "b") == [Node("masked", "a")]
    assert plan.settings(plan.node("masked", "a"))["budget"]["seq_len"] == 256, "its data's own length"


def test_what_comes_after_it_begins_with_its_weights(planned, monkeypatch):
    def with_mask():
        tokenizer = byte_tokenizer()
        tokenizer.add_special_tokens({"mask_token": "[MASK]"})
        return tokenizer

    monkeypatch.setattr(bert, "byte_tokenizer", with_mask)
    monkeypatch.setattr(tracking, "Tracker", Mirror)
    plan = planned(
        a=masked(data="story-pieces", if_altered=True),
        b={"model": "bert-base", "after": "a", "method": "hedgehog"},
    )
    made(plan, "measure b gate")
    folder = plan.folder(plan.node("masked", "a"))
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["heldout_loss_after"] < metrics["heldout_loss_before"]
    trained, student = load_file(folder / "model.safetensors"), load_run(plan.root / "runs/b")
    begun = load_file(plan.folder(plan.node("model", "tiny-bert")) / "model.safetensors")
    word = "embeddings.word_embeddings.weight"
    assert torch.equal(student.get_parameter(word), trained[word]) and not torch.equal(
        trained[word], begun[word]
    )
    # the encoder is what the run begins with, and none of its training: the run has nothing to repeat
    gate = json.loads((plan.folder(plan.measured("b", "gate")) / "metrics.json").read_text())["facts"]
    assert (gate["tokens"], gate["trainable_params"]) == ({}, 0)
    assert replace(plan, seeds=3).repeats("b") == []
