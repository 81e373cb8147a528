"""An encoder that lost a part when it was opened learns what the whole one gives, and the runs that begin
with one."""

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
from relinear.families.bert import byte_tokenizer
from relinear.get.model import save_model
from relinear.linearize.assemble import assemble, to_train
from relinear.linearize.model import linearize
from relinear.plan.job import Job, Link
from relinear.plan.measured import load
from relinear.plan.plan import Plan
from relinear.plan.strict import ConfigError
from relinear.plan.targets import explain_target
from relinear.stages._stage import Node
from relinear.tracking import live as tracking
from relinear.train.restore import losses, opened_whole, work

LENGTH, SEQUENCES = 32, 48
REFERENCE = Path(__file__).parents[1] / "results/reference"


def write(folder: Path, largest=250) -> Path:
    """A text of tokens drawn from 5 to `largest`."""
    folder.mkdir()
    for split, n in (("train", SEQUENCES), ("heldout", 8)):
        tokens = np.random.default_rng(n).integers(5, largest, n * LENGTH).astype(np.int32)
        tokens[-1] = largest - 1
        for kind in ("tokens", "labels"):
            np.save(folder / f"{split}_{kind}.npy", tokens)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """The folder of a tiny MPNet with its relative bias."""
    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = 128
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"initializer_range": 0.3}  # so that attention matters
    torch.manual_seed(0)
    whole = MPNetModel(MPNetConfig(vocab_size=len(tokenizer), max_position_embeddings=130, **sizes))
    torch.nn.init.normal_(whole.encoder.relative_attention_bias.weight, std=3)
    folder = tmp_path_factory.mktemp("source")
    whole.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(source, tmp_path_factory) -> Path:
    """The folder of the same as the stage `model` leaves it, without the bias."""
    folder = tmp_path_factory.mktemp("model")
    save_model([source], folder, "float32", family="mpnet")
    return folder


def job(folder: Path, source: Path, model: Path, text: Path, *, epochs=8, checkpoint_seconds=1e9) -> Job:
    for name in ("out", "work"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    recipe = {"lr": 3e-3, "betas": (0.9, 0.98), "weight_decay": 0.0, "warmup_ratio": 0.1}
    recipe |= {"min_lr_ratio": 0.0, "clip": 1.0}
    budget = {"epochs": epochs, "seq_len": LENGTH, "batch_size": 4, "accumulate": 2, "lr_floor": 0.0}
    return Job(
        "restore encoder",
        {"recipe": recipe, "budget": budget, "family": "mpnet"},
        {"model": model, "text": text},
        folder / "out",
        folder / "work",
        assets={"whole": source},
        links=(Link("softmax", {}, ()),),
        checkpoint_seconds=checkpoint_seconds,
    )


# --- the training ---


def test_the_loss_is_nothing_of_the_whole_model_and_the_share_of_its_variance_that_another_misses(
    source, model
):
    whole = opened_whole("mpnet", [source]).double()
    bare, tokens = assemble(model, [Link("softmax", {}, ())], torch.float64), torch.randint(5, 250, (3, 20))
    assert whole.encoder.relative_attention_bias.weight.any()
    assert losses(whole, whole, tokens, torch.float32).tolist() == [0, 0]
    found = losses(bare, whole, tokens, torch.float32)
    with torch.no_grad():
        states = [m(tokens, output_hidden_states=True).hidden_states[1:] for m in (bare, whole)]
    shares = [(((x - y) ** 2).mean() / y.var()).item() for x, y in zip(*states, strict=True)]
    assert found.tolist() == pytest.approx(shares, rel=1e-5) and found.min() > 0.01


def test_an_encoder_learns_what_it_gave_with_its_bias(tmp_path, source, model):
    given = job(tmp_path, source, model, write(tmp_path / "text"))
    metrics = work(given)
    assert metrics["steps"] == 48 and metrics["tokens"] == given.tokens == 48 * 8 * LENGTH
    for name in ("heldout_loss", "heldout_last"):
        assert metrics[f"{name}_after"] < 0.85 * metrics[f"{name}_before"]
    assert metrics["last_loss"] < 0.85 * metrics["first_loss"]
    weights = load_file(given.out / "model.safetensors")
    assert not weights.pop("encoder.relative_attention_bias.weight").any()
    begun = assemble(model, [Link("softmax", {}, ())]).state_dict()
    left = {n for n, p in weights.items() if torch.equal(p, begun[n])}
    assert left == {"pooler.dense.weight", "pooler.dense.bias"}, "nothing reads what pools"
    built = assemble(model, [Link("softmax", {}, (given.out,)), Link("hedgehog", {}, ())])
    assert all(torch.equal(built.get_parameter(n), p) for n, p in weights.items())


def test_a_training_that_was_stopped_goes_on_to_the_bit(tmp_path, source, model):
    text = write(tmp_path / "text")
    whole = job(tmp_path / "whole", source, model, text, epochs=2)
    stopped = job(tmp_path / "stopped", source, model, text, epochs=2, checkpoint_seconds=0)
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
    again = job(tmp_path / "stopped", source, model, text, epochs=2)
    assert work(again) == expected
    theirs = load_file(whole.out / "model.safetensors")
    assert all(torch.equal(p, theirs[n]) for n, p in load_file(again.out / "model.safetensors").items())


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path, source, model):
    large = write(tmp_path / "large", largest=400)
    with pytest.raises(UserError, match="the text has the token 399; the model knows 0 to 258"):
        work(job(tmp_path / "b", source, model, large))


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

ENCODER = Node("restore", "encoder")


def behind(plan: Plan, run: str) -> list[Node]:
    return [step for link in plan.chain(run) for step in link.steps]


def test_runs_of_an_altered_encoder_begin_with_one_that_was_trained_on_and_others_do_not():
    runs = ["cola_hedgehog", "hedgehog_untrained", "glue_sst2_t2r", "glue_cola_by_elu_untrained"]
    for scale in ("smollm2", "qwen"):
        plan = Plan(scale=scale)
        assert all(behind(plan, run)[0] == ENCODER for run in runs)
        assert behind(plan, "cola_hedgehog-seed2")[0] == Node("restore", "encoder-seed2")
        given = plan.settings(plan.node(*ENCODER))
        assert given["recipe"].keys().isdisjoint({"if_altered", "data"}) and given["family"] == "mpnet"
        assert [*given["assets"]] == [f"mpnet-base-{part}" for part in range(1, 6)]
    for scale in ("smoke", "mini", "paper"):
        plan = Plan(scale=scale)
        assert all(step.stage != "restore" for run in runs for step in behind(plan, run))
        assert not behind(plan, "encoder")
        with pytest.raises(ConfigError) as raised:
            plan.node(*ENCODER)
        said = (
            f"run 'encoder' has no step 'restore' at scale {scale!r}, where its model,"
            f" {plan.run('encoder').model!r}, is whole; runs that do: none at this scale"
        )
        assert str(raised.value) == said
        assert explain_target("restore", ["restore"], plan) == f"rule 'restore' is for one run; {said}"


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
    assert _later(plan, measured, ()) == {"restore": ["hedgehog_cola"]}
    assert _later(plan, measured, ["kl_cola"]) == {}
    assert _later(Plan(scale="mini"), measured, ()) == {}


def test_the_models_that_lose_a_part_say_so_and_their_nodes_keep_their_settings():
    plan = Plan()
    losing = {name for name, model in plan.models.items() if model.family == "mpnet"}
    assert losing == {name for name, model in plan.models.items() if model.altered}
    assert all("altered" not in plan.settings(plan.node("model", name))["model"] for name in losing)


@pytest.fixture
def planned(tmp_path, source):
    """A function that plans runs of a test at smoke scale, whose encoder is an MPNet."""
    workflow = Path(shutil.copytree(Path(__file__).parents[1] / "workflow", tmp_path / "workflow"))
    with (workflow / "models.yaml").open("a") as models:
        sizes = "positions: 128, causal: false, altered: true"
        models.write(f"tiny-mpnet: {{family: mpnet, assets: [tiny-mpnet], {sizes}}}\n")
    with (workflow / "assets.yaml").open("a") as assets:
        assets.write(f"tiny-mpnet: {{source: path, path: {source}}}\n")
    scale = workflow / "scales/smoke.yaml"
    scale.write_text(scale.read_text().replace("bert-base: tiny-bert", "bert-base: tiny-mpnet"))

    def planned(results=tmp_path / "results", **runs) -> Plan:
        paper = workflow / "papers" / "added"
        paper.mkdir()
        (paper / "paper.yaml").write_text("title: Runs of a test\n")
        (paper / "runs.yaml").write_text(yaml.safe_dump(runs))
        return Plan(scale="smoke", workflow=workflow, results=results)

    return planned


def restore(model="bert-base", **given) -> dict:
    return {"model": model, "steps": [{"restore": {"data": "encoder-text", "lr": 1e-3, **given}}]}


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (restore("llama-3-8b"), "and 'tiny' loses none; possible: runs of mpnet-base, tiny-mpnet"),
        (restore("lra-listops"), "'lra-listops-tiny' loses none"),
        (restore("vit-base"), "'vit-digits' loses none"),
        (
            restore(data="glue-cola"),
            "of equal length without padding, and data 'story-labels' are none; possible: alpaca",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_before_any_work(planned, run, said):
    plan = planned(wrong=run)
    with pytest.raises(ConfigError, match=said):
        plan.check_processes(plan.node("restore", "wrong"), 1)


def test_no_run_comes_after_a_step_that_others_leave_out(planned):
    with pytest.raises(
        ConfigError, match="after 'a/restore', a step that a whole model leaves out; possible: after 'a'"
    ):
        planned(a=restore(if_altered=True), b={"model": "bert-base", "after": "a/restore"}).runs  # noqa: B018


def test_a_step_for_altered_models_alone_is_there_for_one(planned):
    plan = planned(a=restore(if_altered=True), b={"model": "bert-base", "after": "a", "method": "hedgehog"})
    assert behind(plan, "b") == [Node("restore", "a")]
    assert plan.settings(plan.node("restore", "a"))["budget"]["seq_len"] == 256, "its data's own length"


def test_what_comes_after_it_begins_with_its_weights(planned, monkeypatch):
    monkeypatch.setattr(tracking, "Tracker", Mirror)
    plan = planned(
        a=restore(data="story-pieces", if_altered=True),
        b={"model": "bert-base", "after": "a", "method": "hedgehog"},
    )
    made(plan, "measure b gate")
    folder = plan.folder(plan.node("restore", "a"))
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["heldout_loss_after"] < metrics["heldout_loss_before"]
    trained, student = load_file(folder / "model.safetensors"), load_run(plan.root / "runs/b")
    begun = load_file(plan.folder(plan.node("model", "tiny-mpnet")) / "model.safetensors")
    word = "embeddings.word_embeddings.weight"
    assert torch.equal(student.get_parameter(word), trained[word]) and not torch.equal(
        trained[word], begun[word]
    )
    # the encoder is what the run begins with, and none of its training: the run has nothing to repeat
    gate = json.loads((plan.folder(plan.measured("b", "gate")) / "metrics.json").read_text())["facts"]
    assert (gate["tokens"], gate["trainable_params"]) == ({}, 0)
    assert replace(plan, seeds=3).repeats("b") == []
