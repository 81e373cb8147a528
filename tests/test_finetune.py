"""Stage 2: the weights that it trains and saves, alone and after another training, and the dtype in which its
adapters compute."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import test_laws
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from relinear import linearize
from relinear.errors import UserError
from relinear.get.packed import Packed, batch_indices
from relinear.linearize.assemble import assemble
from relinear.linearize.faster import fuse_norms
from relinear.plan.job import Job, Link
from relinear.share.tensors import require_loadable
from relinear.stages import _training
from relinear.stages.finetune import Options
from relinear.train import finetune
from relinear.train.finetune import compute_in_input_dtype

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}
LENGTH = 48


@pytest.fixture(scope="module")
def base():
    torch.manual_seed(0)
    return linearize(LlamaForCausalLM(LlamaConfig(**SHAPE)).eval(), "hedgehog")


def adapted(base, dtype, as_peft=False):
    """The model with adapters that change it: peft's begin at zero."""
    torch.manual_seed(1)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        bias="none",
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    )
    model = get_peft_model(copy.deepcopy(base).to(dtype), config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    return (model if as_peft else compute_in_input_dtype(model)).train()


def gradients(model):
    """The loss and its gradients, in the order of the adapters' parameters."""
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % SHAPE["vocab_size"]
    loss = model(ids, labels=ids, use_cache=False).loss
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 16 and {p.dtype for p in trained} == {torch.float32}
    return loss.item(), torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)])


def test_in_float32_adapters_are_peft_s_to_the_bit(base):
    (loss, ours), (same, peft_s) = (
        gradients(adapted(base, torch.float32, as_peft)) for as_peft in (False, True)
    )
    assert loss == same and torch.equal(ours, peft_s)


def test_in_bfloat16_they_are_as_near_to_float32_as_peft_s(base):
    exact = gradients(adapted(base, torch.float32))[1]
    ours, peft_s = (
        ((gradients(adapted(base, torch.bfloat16, x))[1] - exact).norm() / exact.norm()).item()
        for x in (False, True)
    )
    assert 0 < ours < 1.3 * peft_s and ours < 5e-2


def test_a_copy_computes_with_its_own_weights(base):
    model = adapted(base, torch.float32)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.zero_()
    assert gradients(copied)[0] == gradients(adapted(base, torch.float32))[0] != gradients(model)[0]


class Casts(TorchDispatchMode):
    """Counts the casts to float32 of tensors as large as an adapted layer's input."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += (
            func is torch.ops.aten._to_copy.default
            and out.dtype == torch.float32
            and out.shape[-1] == SHAPE["hidden_size"]
            and out.numel() == 2 * LENGTH * SHAPE["hidden_size"]
        )
        return out


def test_no_layer_s_input_is_cast_for_its_adapter(base):
    """The largest tensors of an adapter are its inputs: peft casts that of each projection."""
    counts = []
    for as_peft in (False, True):
        model, counting = adapted(base, torch.bfloat16, as_peft), Casts()
        with counting, torch.no_grad():
            model(torch.zeros(2, LENGTH, dtype=torch.long), use_cache=False)
        counts.append(counting.count)
    assert counts[1] - counts[0] == 4 * SHAPE["num_hidden_layers"]


@pytest.mark.parametrize("family", test_laws.TEACHERS)
def test_fused_norms_compute_what_transformers_does(family):
    model = test_laws.teacher(family, torch.float32)
    found, ids = [], test_laws.tokens(20)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "norm" in n:
                p.normal_(1.0, 0.3)
    for fused in (False, True):
        if fused:
            fuse_norms(model)
        loss = model(ids, labels=ids, use_cache=False).loss
        found.append((loss, *torch.autograd.grad(loss, model.parameters())))
    norms = [layer for layer in model.modules() if "RMSNorm" in type(layer).__name__]
    assert sum("forward" in vars(layer) for layer in norms) == (0 if family == "gemma3" else len(norms))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(*found, strict=True))


# --- what it trains and saves ---

BATCH = 2
SAVED = {"lora": {"adapter"}, "full": {"model.safetensors"}, "method": {"method.safetensors"}}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A model's folder, and a text of 16 sequences."""
    root = tmp_path_factory.mktemp("inputs")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(root / "model")
    tokens = (SHAPE["vocab_size"] * np.random.default_rng(0).random(16 * LENGTH) ** 4).astype(np.int32)
    (root / "text").mkdir()
    for name in ("train_tokens", "train_labels", "heldout_tokens", "heldout_labels"):
        np.save(root / "text" / f"{name}.npy", tokens)
    return root


def job(inputs: Path, folder: Path, kind: str, *links: Link, **recipe) -> Job:
    """Eight steps on top of a chain."""
    settings = {
        "method": links[-1].method,
        "recipe": (
            Options(data="text", kind=kind, lr=1e-2, warmup_ratio=0.0, **recipe).model_dump(
                exclude=_training.ELSEWHERE
            )
        ),
        "budget": _training.Budget(epochs=1, seq_len=LENGTH, batch_size=BATCH, accumulate=1).model_dump(),
    }
    (folder / "out").mkdir(parents=True)
    parents = {name: inputs / name for name in ("model", "text")}
    return Job(f"finetune {kind}", settings, parents, folder / "out", folder, links=links, dtype="float32")


def test_kind_method_trains_and_saves_what_the_method_added_and_nothing_else(inputs, tmp_path):
    link = Link("hedgehog")
    before, trained = (assemble(inputs / "model", [link]) for _ in range(2))
    finetune.fit(job(inputs, tmp_path / "fit", "method", link), trained, "cpu", torch.float32)
    changed = {
        name for name, p in before.named_parameters() if not torch.equal(p, trained.get_parameter(name))
    }
    assert changed == set(before.method_parameters())
    asked = job(inputs, tmp_path / "work", "method", link)
    metrics = finetune.work(asked)
    saved = load_file(asked.out / "method.safetensors")
    assert {path.name for path in asked.out.iterdir()} == SAVED["method"] and set(saved) == changed
    assert (
        metrics["trainable_params"] == sum(p.numel() for p in saved.values())
        and metrics["last_loss"] < metrics["first_loss"]
    )
    assert all(torch.equal(value, trained.get_parameter(name)) for name, value in saved.items())


@pytest.mark.parametrize("method_lr", [None, 1e-3, 1e-1])
def test_each_group_of_parameters_learns_at_the_rate_of_its_recipe(inputs, tmp_path, method_lr):
    asked = job(inputs, tmp_path, "lora", Link("hedgehog"), train_method=True, method_lr=method_lr)
    _, groups = finetune.trained_groups(asked, assemble(inputs / "model", [Link("hedgehog")]))
    assert [rate for _, rate in groups] == [1e-2, method_lr or 1e-2]


@pytest.mark.parametrize("tied", [True, False])
def test_without_embeddings_kind_full_trains_and_saves_all_else(inputs, tmp_path, tied):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied)).save_pretrained(tmp_path / "model")
    asked, table = (
        job(inputs, tmp_path / "work", "full", Link("hedgehog"), train_embeddings=False),
        "model.embed_tokens.weight",
    )
    asked.parents["model"] = tmp_path / "model"
    metrics = finetune.work(asked)
    before, after = (
        assemble(tmp_path / "model", [Link("hedgehog", {}, steps)]) for steps in ((), (asked.out,))
    )
    changed = {name for name, p in before.named_parameters() if not torch.equal(p, after.get_parameter(name))}
    saved = load_file(asked.out / "model.safetensors")
    require_loadable(tmp_path / "model", [Link("hedgehog", {}, (asked.out,))])
    assert (
        changed == set(saved) == {name for name, _ in before.named_parameters()} - {table}
        and ("lm_head.weight" in saved) != tied
    )
    assert (
        metrics["trainable_params"] == sum(p.numel() for p in saved.values())
        and metrics["last_loss"] < metrics["first_loss"]
    )


@pytest.mark.parametrize(
    "link",
    [Link("softmax"), Link("hedgehog", {"keep_softmax_layers": [0, 1]})],
    ids=["no method", "no layer with it"],
)
def test_kind_method_is_refused_where_the_method_added_nothing(inputs, tmp_path, link):
    asked = job(inputs, tmp_path, "method", link)
    with pytest.raises(
        UserError,
        match=(
            f"kind: method trains what the method added, and {link.method} added no parameters; use lora or"
            " full"
        ),
    ):
        finetune.work(asked)
    assert not list(asked.out.iterdir())


def test_an_adapter_for_what_the_model_does_not_have_is_refused_before_it_trains(inputs, tmp_path):
    asked = job(inputs, tmp_path, "lora", Link("hedgehog"), lora_targets=("q_proj", "zzz"))
    with pytest.raises(
        UserError, match=r"lora_targets: the model has no projection 'zzz'; possible: .*k_proj.*q_proj"
    ):
        finetune.work(asked)
    assert not list(asked.out.iterdir()) and not asked.history.exists()


def test_the_files_of_an_adapter_are_the_same_bytes_in_each_process(inputs, tmp_path):
    """peft keeps its targets in a set, whose order differs from process to process."""
    targets = ("v_proj", "q_proj", "o_proj", "k_proj")
    asked = job(inputs, tmp_path, "lora", Link("hedgehog"), lora_targets=targets)
    finetune.work(asked)
    assert json.loads((asked.out / "adapter/adapter_config.json").read_text())["target_modules"] == sorted(
        targets
    )


@pytest.mark.parametrize("kind", SAVED)
@pytest.mark.parametrize("first", ["lora", "full"])
def test_a_finetuning_goes_on_where_another_run_s_ended(inputs, tmp_path, monkeypatch, first, kind):
    """It begins with the loss that the other ended with, and the two folders together give the model that it
    ended with."""
    finetune.work(job(inputs, tmp_path / "first", first, Link("hedgehog")))
    chain = Link("hedgehog", {}, (tmp_path / "first/out",))
    fit, ended = finetune.fit, []
    monkeypatch.setattr(finetune, "fit", lambda *given: ended.append(fit(*given)) or ended[-1])
    asked = job(inputs, tmp_path / "then", kind, chain)
    finetune.work(asked)
    assert {path.name for path in asked.out.iterdir()} == SAVED[kind]

    text = Packed(inputs / "text", "train", LENGTH)
    ids = torch.stack(
        [text.sequence(i)[0] for i in batch_indices(0, n=len(text), batch_size=BATCH, seed=asked.seed)]
    )
    with torch.no_grad():
        began = assemble(inputs / "model", [chain])(ids, labels=ids, use_cache=False).loss.item()
        alone = assemble(inputs / "model", [Link("hedgehog")])(ids, labels=ids, use_cache=False).loss.item()
        together = assemble(inputs / "model", [chain._replace(steps=(*chain.steps, asked.out))])(
            ids, use_cache=False
        ).logits
        [(model, _)] = ended
        torch.testing.assert_close(together, model.eval()(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)
    losses = [json.loads(line)["loss"] for line in asked.history.read_text().splitlines()]
    assert losses[0] == pytest.approx(began, rel=1e-4) and losses[0] < 0.99 * alone, (
        "the other training left a mark"
    )
