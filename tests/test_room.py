"""What a training takes on a GPU is counted before its first step: held to what autograd keeps, and to the
peaks of committed trainings on H200s; and what is said of one that is too large."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_compiled import LINKS, SHAPE, inputs, job, train  # noqa: F401, a fixture
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from relinear.benchmarks.training import SHAPES
from relinear.linearize.assemble import assemble
from relinear.linearize.faster import fuse_norms, maskless
from relinear.linearize.model import LAYOUTS
from relinear.machine import distributed
from relinear.train import distill, finetune, pretrain, room
from relinear.train.compiled import recompute
from relinear.train.next_token import mixed_loss, summed_loss

REFERENCE = Path(__file__).parents[1] / "results/reference/scaling"
GIB = 2**30


def kept(model: nn.Module, tokens: torch.Tensor) -> int:
    """Bytes that autograd keeps of a forward pass, beside the parameters; memory that tensors share counts
    once."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in own:
            found[x.untyped_storage().data_ptr()] = (x.untyped_storage().nbytes(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = summed_loss(model, tokens, tokens)
    loss.backward()
    return sum(size for size, _ in found.values())


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_divergence_keeps_what_is_counted_of_each_logit(share):
    tokens, counts = torch.randint(32, (3, 40)), {}
    for vocabulary in (64, 576):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
        model, teacher = (LlamaForCausalLM(config).to(torch.bfloat16) for _ in range(2))
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        found = {}

        def keep(x, own=own, found=found):
            if x.untyped_storage().data_ptr() not in own:
                found[x.untyped_storage().data_ptr()] = (x.untyped_storage().nbytes(), x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = mixed_loss(
                model, teacher, tokens, tokens, torch.tensor(117.0), weights=torch.ones(40), share=share
            )
        loss.backward()
        counts[vocabulary] = sum(size for size, _ in found.values())
    assert counts[576] - counts[64] == 512 * tokens.numel() * room.KEPT


def test_a_teacher_beside_is_counted_with_the_logits_of_both(inputs, tmp_path):  # noqa: F811
    needs, numbers = [], None
    for i, kl in enumerate((0.0, 1.0)):
        asked = job(inputs, tmp_path / str(i), "lora", LINKS["lolcats"], "off")
        asked.settings["recipe"] |= {"kl": kl, "kl_beyond": 0, "kl_within": 0.1}
        model = assemble(asked.parents["model"], asked.links)
        numbers = sum(p.numel() for p in model.parameters())
        needs.append(room.of_job(asked, model, [], beside=True).need())
    plain, taught = needs
    budget = asked.settings["budget"]
    logits = budget["batch_size"] * budget["seq_len"] * SHAPE["vocab_size"]
    assert taught.pop("teacher") == 4 * numbers
    of_one = room.PASSING * budget["seq_len"] * SHAPE["vocab_size"]
    assert taught.pop("logits") == (room.KEPT + 2 * 4) * logits + of_one
    assert taught == plain


def of_layers(make, config, tokens: torch.Tensor, monkeypatch, *, recomputed=False) -> float:
    """Bytes that autograd keeps of one layer: of three against one, without embeddings, head and loss."""
    config.use_cache = False
    # As on a GPU: torch's RMSNorm is one op there, which keeps its input. On a CPU that is torch's LayerNorm.
    monkeypatch.setattr(F, "rms_norm", lambda x, shape, weight, eps: F.layer_norm(x, shape, weight))
    counts = []
    for layers in (1, 3):
        config.num_hidden_layers = layers
        torch.manual_seed(0)
        model = make(config).to(torch.bfloat16).train()
        maskless(model)
        fuse_norms(model)
        if recomputed:
            recompute(model)
        counts.append(kept(model, tokens))
    return (counts[1] - counts[0]) / 2


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(
            vocab_size=64, hidden_size=192, intermediate_size=512, num_attention_heads=3, head_dim=64
        ),
        LlamaConfig(
            vocab_size=64,
            hidden_size=128,
            intermediate_size=512,
            num_attention_heads=8,
            num_key_value_heads=2,
        ),
        LlamaConfig(
            vocab_size=64, hidden_size=256, intermediate_size=256, num_attention_heads=2, head_dim=64
        ),
        GPT2Config(vocab_size=64, n_embd=128, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
    ],
    ids=["wide", "grouped", "narrow", "gpt2"],
)
def test_activations_are_those_that_autograd_keeps(config, monkeypatch):
    tokens = torch.randint(64, (2, 96))
    shape = room.Shape.of(config)
    make = GPT2LMHeadModel if isinstance(config, GPT2Config) else LlamaForCausalLM
    training = room.Training(shape, 0, 0, 0, False, 2, 2, 1, 96, linearized=False)
    got = of_layers(make, config, tokens, monkeypatch)
    assert got == pytest.approx(training.kept * tokens.numel() * 2, rel=0.12)
    alone = of_layers(make, config, tokens, monkeypatch, recomputed=True)
    assert alone == pytest.approx(shape.hidden * tokens.numel() * 2, rel=0.05), "a block's input, and no more"


def measured(file: str, runs=None) -> list[dict]:
    rows = json.loads((REFERENCE / f"{file}.json").read_text())["rows"]
    return [r for r in rows if r["scaling"] == "weak" and r["gpus"] == 1 and r.get("peak_gib")]


def counted(row: dict, *, weights: int, whole_logits: bool) -> float:
    """GiB by our count of a committed training of one GPU: LoRA or a transfer, in bfloat16."""
    training = room.Training(
        room.Shape.of(SHAPES[row["shape"]]),
        2 * weights + 4 * row["trainable_params"],
        4 * row["trainable_params"],
        0,
        True,
        2,
        row["piece"],
        1,
        row["length"],
        transfer=row["stage"] == "distill",
        linearized=row["run"] != "teacher_lora",
    )
    logits = row["piece"] * row["length"] * training.shape.vocabulary * room.LOGIT if whole_logits else 0
    return (training.total + (0 if training.transfer else logits)) / GIB


WEIGHTS = {"smollm2-135m": 134_515_008, "llama-3-8b": 8_030_261_248}


@pytest.mark.parametrize(
    ("row", "whole_logits"),
    [
        *((row, False) for file in ("smollm2", "smollm2_2048") for row in measured(file)),
        # from before logits were made a piece at a time
        *((row, True) for row in measured("scaling") if row["shape"] == "llama-3-8b"),
    ],
    ids=lambda x: f"{x['shape']}-{x['run']}-{x['stage']}-{x['length']}" if isinstance(x, dict) else "",
)
def test_the_count_is_near_the_peaks_of_committed_trainings(row, whole_logits):
    got = counted(row, weights=WEIGHTS[row["shape"]], whole_logits=whole_logits)
    assert got == pytest.approx(row["peak_gib"], rel=0.12, abs=0.35)


# GiB of compiled trainings, docs/log/kernels.md, 16 sequences of 1024: run -> (all weights, peak)
COMPILED = {
    "teacher_lora": (False, 7.1),
    "lolcats_window": (False, 9.8),
    "lizard": (False, 10.5),
    "supra": (True, 14.7),
}


@pytest.mark.parametrize("run", COMPILED)
def test_what_is_refused_is_more_than_compiled_trainings_took(run):
    full, peak = COMPILED[run]
    log = (Path(__file__).parents[1] / "docs/log/kernels.md").read_text()
    assert f"| {peak} |" in log
    weights = WEIGHTS["smollm2-135m"]
    training = room.Training(
        room.Shape.of(SHAPES["smollm2-135m"]),
        4 * weights if full else 2 * weights + 4 * 900_000,
        4 * weights if full else 4 * 900_000,
        0,
        not full,
        3 if full else 2,
        16,
        1,
        1024,
        linearized=run != "teacher_lora",
    )
    assert training.least / GIB <= 1.05 * peak < 1.05 * training.total / GIB


def test_recomputed_blocks_are_refused_by_what_compiled_ones_keep_too():
    again = replace(LLAMA, recompute=True)
    of_one = again.sequences * again.length * again.kept * again.width
    assert again.total - again.least == pytest.approx((1 - room.LEAST) * of_one, abs=1)


LLAMA = room.Training(
    room.Shape.of(SHAPES["llama-3-8b"]),
    16_060_522_496 + 27_262_976,
    27_262_976,
    2 * 1_050_673_152,
    True,
    2,
    8,
    1,
    1024,
)


@pytest.mark.parametrize("free", [24, 40, 60])
def test_a_switch_that_is_called_enough_is_and_frees_what_it_says(free):
    said = room.account(LLAMA, free * GIB)
    assert f"{free}.0 GiB are free" in said and "are missing" in said
    for words, some in LLAMA.switches().items():
        other = next((t for t in some if t.total <= free * GIB), some[-1])
        sentence = f"{words.format(other)} frees {room.gib(LLAMA.total - other.total)}"
        assert sentence in said
        assert (f"{sentence}, which is enough" in said) == (other.total <= free * GIB)
    total = sum(float(x) for x in re.findall(r"([\d.]+) GiB", said.partition("(")[2].partition(")")[0]))
    assert total == pytest.approx(LLAMA.total / GIB, abs=0.3)


def test_shards_of_all_weights_take_a_part_each_and_replicas_all():
    full = replace(LLAMA, weights=4 * 8_030_261_248, trained=4 * 8_030_261_248, beside=False, width=4)
    assert sum(list(full.need().values())[:3]) == 16 * 8_030_261_248
    eight = replace(full, gpus=8, sharded=True)
    assert sum(list(eight.need().values())[1:3]) == 12 * 8_030_261_248 // 8
    assert eight.sequences == 1 and replace(full, gpus=8).need()["weights"] == full.weights
    beside = replace(LLAMA, gpus=2, sharded=True)
    assert beside.need()["AdamW"] == LLAMA.need()["AdamW"], "what is trained beside frozen weights is whole"


@pytest.mark.parametrize(("kind", "work"), [("lora", finetune), ("full", finetune), ("transfer", distill)])
def test_a_training_that_is_too_large_is_refused_before_its_model_is_moved(
    inputs,  # noqa: F811
    tmp_path,
    kind,
    work,
    monkeypatch,
):
    asked = job(inputs, tmp_path, kind, LINKS["lolcats"], "off")
    model = assemble(asked.parents["model"], asked.links)
    monkeypatch.setattr(room, "free", lambda model: 100_000)
    monkeypatch.setattr(distributed, "spread", lambda *given: pytest.fail("moved"))
    with pytest.raises(room.TooLargeError, match="does not fit: it takes about .* are missing. Possible: "):
        work.fit(asked, model, "cuda", *([torch.float32] if work is finetune else []))
    assert not asked.history.exists()


def test_between_the_two_counts_one_line_says_so_and_running_out_is_explained(
    inputs,  # noqa: F811
    tmp_path,
    monkeypatch,
    capsys,
):
    asked = job(inputs, tmp_path, "full", LINKS["supra"], "off")
    model = assemble(asked.parents["model"], asked.links)
    training = room.of_job(asked, model, list(model.parameters()), beside=False)
    assert training.least < training.total
    monkeypatch.setattr(room, "free", lambda model: (training.least + training.total) // 2)
    fits = room.Fits(asked, model, list(model.parameters()), "cuda", beside=False)
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("full supra may not fit: it takes about") and "recompute: true" in line
    with (
        pytest.raises(room.TooLargeError, match="full supra: the GPU is out of memory: it takes about"),
        fits,
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(room, "free", lambda model: training.total)
    room.Fits(asked, model, list(model.parameters()), "cuda", beside=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("compile", ["off", "on"])
@pytest.mark.parametrize(("kind", "method"), [("full", "supra"), ("lora", "lizard"), ("full", "softmax")])
def test_recomputing_trains_the_same_to_the_bit(inputs, tmp_path, kind, method, compile, monkeypatch):  # noqa: F811
    torch.compiler.reset()
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **more: plain(f, backend="aot_eager", **more))
    usual = train(job(inputs, tmp_path / "usual", kind, LINKS[method], compile))
    asked = job(inputs, tmp_path / "again", kind, LINKS[method], compile)
    asked.recompute = True
    asked_for = []
    monkeypatch.setattr(finetune, "recompute", lambda model: (asked_for.append(model), recompute(model)))
    losses, weights = train(asked)
    assert len(asked_for) == 1 and losses == usual[0]
    assert all(torch.equal(weights[name], value) for name, value in usual[1].items())
    torch.compiler.reset()


def test_training_from_scratch_is_counted_too(inputs, tmp_path, monkeypatch):  # noqa: F811
    asked = job(inputs, tmp_path, "full", LINKS["supra"], "off")
    asked.settings["recipe"] |= {"learn": "all", "patience": None}
    asked.settings["budget"] |= {"validation": 0}
    monkeypatch.setattr(room, "free", lambda model: 1000)
    with pytest.raises(room.TooLargeError, match="AdamW"):
        pretrain.fit(asked, LlamaForCausalLM(LlamaConfig(**SHAPE)), "cuda")


@pytest.mark.parametrize("kind", sorted({c.config_class for c in LAYOUTS}, key=lambda c: c.__name__))
def test_the_sizes_of_every_family_are_found(kind):
    *sizes, vocabulary = vars(room.Shape.of(kind())).values()
    assert min(sizes) > 0 and vocabulary >= 0, "pictures have no vocabulary"
