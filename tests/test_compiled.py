"""Trainings with compiled blocks: one graph for all, the losses of plain ones, resumed to the bit; and what
follows where none can be made."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from relinear import linearize
from relinear.linearize.assemble import assemble
from relinear.plan.job import Job, Link
from relinear.stages import _training
from relinear.stages.distill import Options as DistillOptions
from relinear.stages.finetune import Options
from relinear.train import distill, finetune
from relinear.train.compiled import PAYS, OrEager, wanted, windowed

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}
LENGTH, BATCH, SEQUENCES = 24, 2, 12
LINKS = {
    "supra": Link("supra"),
    "lizard": Link("lizard", {"window": 8, "meta": 2}),
    "lolcats": Link("lolcats", {"window": 8}),
    "softmax": Link("softmax"),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A model's folder, and a text of 12 sequences."""
    root = tmp_path_factory.mktemp("inputs")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(root / "model")
    tokens = (SHAPE["vocab_size"] * np.random.default_rng(0).random(SEQUENCES * LENGTH) ** 4).astype(np.int32)
    (root / "text").mkdir()
    for name in ("train_tokens", "train_labels", "heldout_tokens", "heldout_labels"):
        np.save(root / "text" / f"{name}.npy", tokens)
    return root


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Graphs of Dynamo and autograd as inductor would get them, run as they are."""
    torch.compiler.reset()
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **more: compile(f, backend="aot_eager", **more))
    yield
    torch.compiler.reset()


def job(inputs, folder, kind, link, compile):
    if kind == "transfer":
        recipe = DistillOptions(data="text", lr=1e-2, loss="mse").model_dump(exclude=_training.ELSEWHERE)
    else:
        recipe = Options(data="text", kind=kind, lr=1e-2, warmup_ratio=0.0).model_dump(
            exclude=_training.ELSEWHERE
        )
    budget = _training.Budget(epochs=1, seq_len=LENGTH, batch_size=BATCH, accumulate=1).model_dump()
    folder.mkdir(parents=True, exist_ok=True)
    parents = {name: inputs / name for name in ("model", "text")}
    settings = {"method": link.method, "recipe": recipe, "budget": budget}
    return Job(
        f"{kind} {link.method}",
        settings,
        parents,
        folder,
        folder,
        links=(link,),
        dtype="float32",
        compile=compile,
    )


def train(asked):
    """The steps' losses, and the trained weights."""
    torch.manual_seed(0)
    model = assemble(asked.parents["model"], asked.links)
    if asked.name.startswith("transfer"):
        distill.fit(asked, model, "cpu")
    else:
        finetune.fit(asked, model, "cpu", torch.float32)
    losses = [json.loads(line)["loss"] for line in asked.history.read_text().splitlines()]
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def graphs():
    counters = torch._dynamo.utils.counters
    return counters["stats"].get("unique_graphs", 0), dict(counters["graph_break"])


@pytest.mark.parametrize(
    ("kind", "method", "most"),
    [
        ("full", "supra", 1),
        ("full", "softmax", 1),
        ("lora", "lolcats", 2),
        ("full", "lizard", 1),
        ("transfer", "lizard", 2),
    ],
)
def test_compiled_blocks_train_as_plain_ones_do_by_few_graphs(inputs, tmp_path, kind, method, most, capsys):
    """One graph for all blocks; another for the first where its input needs no gradient (LoRA), and one for a
    layer's loss (transfer)."""
    torch._dynamo.utils.counters.clear()
    (plain, before), (compiled, after) = (
        train(job(inputs, tmp_path / way, kind, LINKS[method], way)) for way in ("off", "on")
    )
    made, breaks = graphs()
    assert 1 <= made <= most and not breaks and "torch.compile failed" not in capsys.readouterr().err
    assert len(plain) == SEQUENCES // BATCH and compiled == pytest.approx(plain, rel=2e-5)
    assert all(torch.allclose(after[name], before[name], rtol=1e-2, atol=1e-3) for name in before)


class Stop(Exception):
    """The process dies here."""


@pytest.mark.parametrize(("kind", "method"), [("full", "supra"), ("transfer", "lizard")])
def test_a_compiled_training_resumes_to_the_bit(inputs, tmp_path, kind, method, monkeypatch):
    whole = train(job(inputs, tmp_path / "whole", kind, LINKS[method], "on"))
    cut, log = job(inputs, tmp_path / "cut", kind, LINKS[method], "on"), Job.log

    def dying(self, metrics, step):
        if step == 3:
            raise Stop
        log(self, metrics, step)

    monkeypatch.setattr(Job, "log", dying)
    with pytest.raises(Stop):
        train(cut)
    monkeypatch.setattr(Job, "log", log)
    losses, weights = train(job(inputs, tmp_path / "cut", kind, LINKS[method], "on"))
    assert losses == whole[0] and all(torch.equal(weights[name], value) for name, value in whole[1].items())


def test_what_cannot_be_compiled_is_trained_without_and_one_line_says_so(
    inputs, tmp_path, capsys, monkeypatch
):
    plain = train(job(inputs, tmp_path / "off", "full", LINKS["supra"], "off"))

    def broken(*given, **more):
        raise ValueError("no compiler here\nand a long trace")

    monkeypatch.setattr(torch, "compile", lambda f, **more: broken)
    capsys.readouterr()
    assert train(job(inputs, tmp_path / "on", "full", LINKS["supra"], "on"))[0] == plain[0]
    said = [
        line for line in capsys.readouterr().err.replace("\r", "\n").splitlines() if "torch.compile" in line
    ]
    assert len(said) == 1 and said[0].endswith(
        "full supra: torch.compile failed (ValueError: no compiler here); training goes on without it"
    )


def test_gradients_of_the_failed_attempt_are_dropped_and_later_failures_are_raised():
    p, undone = nn.Parameter(torch.ones(2)), []

    def gradients(x):
        (p * x).sum().backward()
        if not undone or x < 0:
            raise RuntimeError("half of it is done")
        return x

    function = OrEager(gradients, lambda: undone.append(True), [p], "toy")
    function(torch.tensor(3.0))
    assert undone == [True] and p.grad.tolist() == [3.0, 3.0]
    with pytest.raises(RuntimeError, match="half of it"):
        function(torch.tensor(-1.0))


def test_a_gpu_compiles_where_the_steps_pay_for_it(inputs, tmp_path):
    asked = job(inputs, tmp_path, "full", LINKS["supra"], "auto")
    asked.hardware["engine"] = "ddp"
    assert (
        wanted(asked, "cuda", PAYS) and not wanted(asked, "cuda", PAYS - 1) and not wanted(asked, "cpu", PAYS)
    )
    assert not wanted(asked, "cuda", PAYS, slower=True)
    asked.hardware["engine"] = "fsdp"
    assert not wanted(asked, "cuda", PAYS)


@pytest.mark.parametrize(
    ("method", "given", "has"),
    [("lizard", {}, True), ("lolcats", {"window": 0}, False), ("supra", {}, False)],
)
def test_a_window_is_seen_in_a_linearized_model(method, given, has):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    assert windowed(linearize(LlamaForCausalLM(config), method, **given)) is has
    assert not windowed(LlamaForCausalLM(config))
