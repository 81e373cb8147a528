"""Logits in float32: what a head in bfloat16 ties is told apart, and what is equal in float32 too is counted
and shared."""

import copy
import json
import random
import re

import pytest
import torch
from conftest import ROOT
from scipy.stats import binomtest
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

from relinear.families import load
from relinear.families.tiny import byte_tokenizer
from relinear.linearize.loading import load_teacher
from relinear.linearize.model import linearize
from relinear.linearize.writing import own_settings
from relinear.measure import _documents, _harness, agreement, kv_recall
from relinear.measure._answering import Answered, ask, share_of, write
from relinear.measure._logits import credit, firsts, float32_head, likeliest, peak, shared
from relinear.plan.job import Job

SMALL = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA = {**SMALL, "head_dim": 16, "final_logit_softcapping": 3.0}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "gemma 2, capped": lambda: Gemma2ForCausalLM(Gemma2Config(**GEMMA)),
    "gemma 3, capped": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA)),
    "granite, scaled": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=0.3)),
    "cohere, scaled": lambda: CohereForCausalLM(CohereConfig(**SMALL)),
    "phi, with a bias": lambda: PhiForCausalLM(PhiConfig(**SMALL)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=300, n_embd=48, n_layer=2, n_head=3, n_positions=256)
    ),
}


def random_model(name, dtype=torch.bfloat16, sharper=4.0):
    """A random model whose logits are as large as a trained one's, so that bfloat16 rounds them coarsely."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for weight in model.get_output_embeddings().parameters():
            weight.normal_(0, 0.3 * sharper / 4)
    return model.to(dtype)


def tokens(rows=6, length=40, seed=0):
    return torch.randint(3, 300, (rows, length), generator=torch.Generator().manual_seed(seed))


def in_float64(model, ids, **more):
    """The logits that the model in float64 makes of the last hidden states that the model itself computes."""
    head, given = model.get_output_embeddings(), []
    hook = head.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    with torch.no_grad():
        model(ids, **more)
        hook.remove()
        wide = copy.deepcopy(model).double()
        wide.get_output_embeddings().register_forward_pre_hook(lambda *_: (given[0].double(),))
        return wide(ids, **more).logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_float64_from_the_same_hidden_states(name, dtype):
    model = random_model(name, dtype)
    expected = in_float64(model, tokens(), use_cache=False)
    before = model(tokens(), use_cache=False).logits
    with torch.inference_mode(), float32_head(model):
        found = model(tokens(), use_cache=False).logits
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    after = model(tokens(), use_cache=False).logits
    assert before.dtype == after.dtype == dtype and torch.equal(before, after), "the model is as it was"
    if dtype == torch.bfloat16:
        assert (before.double() - expected).abs().max() > 1e-3, "which its own logits are not"


def test_a_linearized_model_an_adapter_and_the_last_position_alone():
    from peft import LoraConfig, get_peft_model

    model = linearize(random_model("llama"), "lolcats", window=8)
    expected = in_float64(model, tokens())
    with torch.inference_mode(), float32_head(model, last=True), float32_head(model):
        torch.testing.assert_close(model(tokens()).logits.double(), expected[:, -1:], rtol=1e-5, atol=1e-5)
    for modules in (["q_proj"], ["q_proj", "lm_head"]):
        adapted = get_peft_model(
            random_model("llama"), LoraConfig(target_modules=modules, init_lora_weights=False)
        )
        adapted = adapted.bfloat16().eval()
        expected = in_float64(adapted.get_base_model(), tokens())
        with torch.inference_mode(), float32_head(adapted):
            torch.testing.assert_close(adapted(tokens()).logits.double(), expected, rtol=1e-5, atol=1e-5)


def test_contexts_within_each_other_copy_the_head_once_and_an_error_leaves_the_model_as_it_was(monkeypatch):
    model, copies = random_model("llama"), []
    monkeypatch.setattr("relinear.measure._logits.copy.deepcopy", lambda x: copies.append(x) or copy.copy(x))
    with pytest.raises(KeyError), float32_head(model), float32_head(model), float32_head(model):
        raise KeyError
    assert len(copies) == 1 and "forward" not in vars(model.lm_head)
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_classes_of_pictures_are_told_apart_in_float32_too():
    sizes = {
        "classes": 10,
        "image_size": 8,
        "patch_size": 4,
        "num_channels": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
    }
    model = load("vit").random(
        {**sizes, "num_hidden_layers": 1, "num_attention_heads": 2}, 0, torch.bfloat16
    )[0]
    pixels, given = (
        torch.randint(0, 256, (3, model.config.pixels), generator=torch.Generator().manual_seed(0)),
        [],
    )
    hook = model.classifier.register_forward_pre_hook(lambda _, args: given.append(args[0].double()))
    with torch.no_grad(), float32_head(model):
        found = model(pixels).logits
    hook.remove()
    torch.testing.assert_close(
        found.double(), copy.deepcopy(model.classifier).double()(given[0]), rtol=1e-5, atol=1e-5
    )
    assert (
        len(given) == 1
        and torch.stack(likeliest(found, pixels)).shape == (2, 3)
        and model(pixels).logits.dtype == torch.bfloat16
    )


# --- what bfloat16 ties ---


def tying(sharper=1.0, rows=300):
    """A model in bfloat16, prompts behind which its own largest logit is a tie, and the token that float64
    finds the likeliest."""
    model, ids = random_model("llama", sharper=4 * sharper), tokens(rows, 24)
    with torch.no_grad():
        own, wide = model(ids).logits[:, -1], in_float64(model, ids)[:, -1]
    tied = (own == own.amax(-1, keepdim=True)).sum(-1) > 1
    moved = own.argmax(-1) != wide.argmax(-1)
    return model, ids[tied & moved], wide.argmax(-1)[tied & moved]


def test_where_bfloat16_ties_the_answer_is_that_of_the_float32_product():
    model, ids, right = tying()
    assert len(ids) >= 3, "argmax takes another token for these"
    answered = ask(model, ids, [[[int(token)]] for token in right], 1)
    assert [a.greedy for a in answered] == right[:, None].tolist()
    assert all(a.likeliest == [[1.0]] and not a.drawn for a in answered)
    written = write(model, ids.tolist(), "toy", batch_size=2, padding=0, max_new_tokens=1)
    assert [w.tokens for w in written] == right[:, None].tolist() and not any(w.drawn for w in written)
    lm = _harness.LocalLM(
        model, tokenizer=byte_tokenizer(), batch_size=4, max_length=64, softmax_dtype=torch.float32
    )
    found = lm._loglikelihood_tokens(
        [(("", ""), row.tolist(), [int(token)]) for row, token in zip(ids, right, strict=True)]
    )
    assert [greedy for _, greedy in found] == [1.0] * len(ids)
    logs = in_float64(model, ids)[:, -1].log_softmax(-1).gather(1, right[:, None])[:, 0]
    assert [score for score, _ in found] == pytest.approx(logs.tolist(), abs=1e-5)


def test_letters_that_bfloat16_scores_alike_are_told_apart():
    model, ids, _ = tying()
    wide = in_float64(model, ids)[:, -1]
    with torch.no_grad():
        own = model(ids).logits[:, -1]
    lm = _harness.LocalLM(
        model, tokenizer=byte_tokenizer(), batch_size=4, max_length=64, softmax_dtype=torch.float32
    )
    for row, a, b in zip(ids, own, wide, strict=True):
        equals = (a == a.max()).nonzero().flatten().tolist()
        found = [
            score
            for score, _ in lm._loglikelihood_tokens(
                [(("", ""), row.tolist(), [letter]) for letter in equals]
            )
        ]
        assert firsts(found) == [max(range(len(equals)), key=lambda i: b[equals[i]])]


def test_a_model_agrees_with_itself_everywhere_and_ties_count_how_often_both_would_take_the_same():
    model, ids = random_model("llama"), tokens(4, 60)
    with torch.no_grad(), float32_head(model):
        logits = model(ids).logits
    piece = _documents.Piece(0, logits, ids)
    same = agreement.compare(piece, piece)
    assert same["top1"].all() and not same["tied"].any() and same["kl"].abs().max() == 0
    equal = torch.zeros(1, 3, 4)  # one of four, and the other of two
    equal[0, 1] = torch.tensor([5.0, 5.0, 0, 0])
    other = torch.tensor([[[1.0, 0, 0, 0], [0, 3.0, 3.0, 0], [0, 0, 2.0, 0]]])
    found = agreement.compare(
        _documents.Piece(0, equal, torch.zeros(1, 3).long()),
        _documents.Piece(0, other, torch.zeros(1, 3).long()),
    )
    assert found["top1"].tolist() == [[0.25, 0.25, 0.25]] and found["tied"].tolist() == [[1, 1, 1]]


# --- what float32 ties ---


def test_of_equals_one_is_drawn_by_the_text_and_no_token_is_favoured():
    logits = torch.zeros(400, 5)
    logits[:, 1] = logits[:, 3] = 2.0
    read = torch.arange(800).view(400, 2)
    (drawn, tied), again = likeliest(logits, read), likeliest(logits[:7], read[:7])[0]
    assert (
        tied.all()
        and set(drawn.tolist()) == {1, 3}
        and 150 < (drawn == 1).sum() < 250
        and drawn[:7].tolist() == again.tolist()
    )
    assert logits.max() == 2 and (logits == 2).sum() == 800, "nothing is written over"
    largest, counts = shared(logits)
    assert [credit(logits[:, i], largest, counts)[0].item() for i in range(5)] == [0, 0.5, 0, 0.5, 0]
    logits[:, 2] = 3.0
    best, tied = likeliest(logits, read)
    assert set(best.tolist()) == {2} and not tied.any() and peak(logits)[0].tolist() == [3.0] * 400
    assert firsts([0.5, 2.0, 2.0]) == [1, 2] and firsts([1.0]) == [0]


def untied():
    """A random model whose head is not its embeddings."""
    model = load("tiny").random({}, 0, torch.float32)[0]
    model.lm_head.weight = nn.Parameter(
        torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(0))
    )
    return model.eval()


def test_a_tie_is_told_and_a_tied_token_and_a_tied_choice_count_their_share():
    model, ids = untied(), torch.randint(3, 200, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.lm_head.weight[[40, 90]] = 9 * model.model(ids).last_hidden_state[0, -1]
    [answered] = ask(model, ids, [[[40], [90], [50]]], 1)
    assert (
        answered.greedy in ([40], [90])
        and answered.drawn
        and answered.tied
        and answered.firsts == [0, 1]
        and answered.choice in (0, 1)
    )
    assert answered.likeliest == [[0.5], [0.5], [0.0]] and [answered.chosen(i) for i in range(3)] == [
        0.5,
        0.5,
        0,
    ]
    [written] = write(
        model, ids.tolist(), "toy", batch_size=1, padding=0, max_new_tokens=1, eos_token_id=None
    )
    assert written.drawn and written.tokens == answered.greedy, "the same draw, from a cache and by generate"


def test_letters_that_are_equal_get_chance_whatever_the_right_one_is():
    """Every letter's row of the head is the same: HFLM and argmax would answer A every time."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=1024,
    )
    model = LlamaForCausalLM(config).eval()
    letters = [tokenizer(letter)["input_ids"][0] for letter in "ABCD"]
    with torch.no_grad():
        model.lm_head.weight[letters] = model.lm_head.weight[letters[0]].clone()
    metrics, items = _harness.score(
        model,
        tokenizer,
        {"mmlu": None, "piqa": None},
        None,
        batch_size=4,
        max_length=1024,
        seed=0,
        smoke=True,
    )
    own = [item for item in items if item["task"] == "mmlu"]
    assert (
        {item["acc"] for item in own} == {0.25}
        and {item["tied"] for item in own} == {4}
        and len({item["target"] for item in own}) > 1
    )
    assert metrics["mmlu"]["acc"] == 0.25 and metrics["mmlu"]["tied"] == 1 and metrics["piqa"]["tied"] == 0
    assert {item["tied"] for item in items if item["task"] == "piqa"} == {1}


def test_a_share_of_whole_hits_has_wilson_s_error_and_a_shared_hit_counts_its_part():
    one_sigma = 0.6826894921370859  # the share of a normal distribution within one standard deviation
    rng = random.Random(0)
    for n in (1, 2, 7, 100, 2400):
        hits = [rng.random() < 0.3 for _ in range(n)]
        for own in (hits, [True] * n, [False] * n):
            interval = binomtest(sum(own), n).proportion_ci(one_sigma, method="wilson")
            assert share_of(own) == (
                sum(own) / n,
                pytest.approx((interval.high - interval.low) / 2, rel=1e-12),
                n,
            )
    assert share_of([1, 0.5, 0, 0.5])[0] == 0.5
    assert Answered([], [[-1.0], [-1.0], [-2.0]], [[]] * 3).chosen(1) == 0.5


# --- settings ---


HUB = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
MORE = {
    "num_beams": 3,
    "no_repeat_ngram_size": 2,
    "suppress_tokens": list(range(60, 200)),
    "min_length": 70,
    "forced_eos_token_id": 5,
}


@pytest.mark.parametrize("given", [HUB, HUB | MORE], ids=["the audit's", "and more"])
@pytest.mark.parametrize("method", [None, "hedgehog"])
def test_what_is_written_follows_no_generation_config_of_the_model_s_folder(tmp_path, method, given):
    model, tokenizer = load("tiny").random({}, 0, torch.float32)
    model.generation_config = GenerationConfig(
        **given, eos_token_id=[tokenizer.eos_token_id, 7], pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["repetition_penalty"] == 1.1
    model = load_teacher(tmp_path, torch.float32)
    assert model.generation_config.do_sample, "the folder's"
    model = model if method is None else linearize(model, method)
    prompts = torch.randint(3, 258, (20, 60), generator=torch.Generator().manual_seed(0))
    greedy = [a.greedy for a in ask(model, prompts, [[[5]]] * 20, 8)]
    written = write(
        model, prompts.tolist(), "toy", batch_size=7, padding=tokenizer.pad_token_id, max_new_tokens=8
    )
    ends = {tokenizer.eos_token_id, 7}
    for own, whole in zip(written, greedy, strict=True):
        # the tokens that end a text are the folder's
        end = next((i + 1 for i, token in enumerate(whole) if token in ends), 8)
        assert own.tokens[:end] == whole[:end] and set(own.tokens[end:]) <= {tokenizer.pad_token_id}
    assert model.generation_config.do_sample and model.generation_config.top_k == 20, (
        "and afterwards they are the model's again"
    )


def test_settings_given_are_the_only_ones_and_an_error_gives_the_model_its_own_back():
    model = load("tiny").random({}, 0, torch.float32)[0]
    model.generation_config = own = GenerationConfig(**HUB, eos_token_id=9)
    with pytest.raises(KeyError), own_settings(model, do_sample=False, max_new_tokens=3, pad_token_id=1):
        assert (
            model.generation_config.repetition_penalty in (None, 1.0)
            and model.generation_config.eos_token_id == 9
        )
        raise KeyError
    assert model.generation_config is own


# --- the readings ---


def test_pairs_report_their_ties_and_keep_them_with_each_item(tmp_path):
    tokenizer, rows = byte_tokenizer(), []
    tokenizer.save_pretrained(tmp_path)
    job = Job("toy", {"seed": 0}, {"model": tmp_path}, out=tmp_path, work=tmp_path)
    given = kv_recall.Options(pairs=(4,), prompts=6, batch_tokens=4096)
    found, flat = {}, untied()
    nn.init.zeros_(flat.lm_head.weight)
    for name, model in (("random", load("tiny").random({}, 0, torch.bfloat16)[0]), ("flat", flat)):
        readings = {r.metric: r for r in kv_recall.measure(model, None, given, job)}
        rows = [json.loads(line) for line in (tmp_path / "items.jsonl").read_text().splitlines()]
        found[name] = readings["tied"].value
        assert readings["choice"].value == pytest.approx(sum(row["chosen"] for row in rows) / 6)
        assert found[name] == pytest.approx(sum(row["tied"] > 1 or row["drawn"] for row in rows) / 6)
    assert found == {"random": 0.0, "flat": 1.0}
    assert readings["choice"].value == 0.25 and {row["tied"] for row in rows} == {4}, (
        "a flat model is at chance, whatever stands first"
    )


def test_no_measure_takes_the_largest_logit_or_generates_but_by_the_one_helper():
    for path in sorted((ROOT / "src/relinear/measure").glob("*.py")):
        text = path.read_text()
        if path.name != "task_score.py":  # its head is float32
            assert not re.search(r"logits\b[^\n]*\.argmax\(", text) or path.name == "_logits.py", path
        assert ".generate(" not in text or path.name == "_answering.py", path
