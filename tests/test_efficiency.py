"""The cost of generating, at tiny shapes on the CPU, where a recorded step is the step itself: the rows,
resuming, the figures."""

import csv
import gc
import json
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig

from relinear import linearize
from relinear.benchmarks import generation as efficiency
from relinear.benchmarks.generation import (
    COLUMNS,
    ORDER,
    RUNS,
    Log,
    Sweeps,
    agrees,
    build,
    measure_all,
    next_batch,
    plain,
)
from relinear.draw import About
from relinear.draw.drawing import make
from relinear.errors import UserError
from relinear.linearize.graph import Decoder
from relinear.plan import specs

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
WIDTH = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2**18,
}
SHAPES = {"mistral-7b": MistralConfig(**WIDTH, sliding_window=None), "llama-3-8b": LlamaConfig(**WIDTH)}
SWEEPS = Sweeps(
    prompt=32, answer=4, largest=2, short_prompt=16, generated=(1, 32, 64), input_batch=2, inputs=(16, 32)
)


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch):
    monkeypatch.setattr(efficiency, "STEPS", 3)


def run(folder, seconds=600.0, order=ORDER, gpu="none"):
    log = Log(folder, gpu, "a test")
    return measure_all(log, CPU, torch.float32, time.monotonic() + seconds, order, SHAPES, SWEEPS), log


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("efficiency")
    gc.freeze()  # a measurement collects garbage before each row, and need not look at what others left
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(efficiency, "STEPS", 3)
        assert run(folder)[0]
    return folder


def read(folder):
    return list(csv.DictReader((folder / "efficiency.csv").read_text().splitlines()))


@pytest.mark.parametrize("name", RUNS)
def test_every_run_generates_in_fixed_memory_what_plain_calls_generate(name):
    assert agrees(build(SHAPES["mistral-7b"], name, CPU, torch.float32), CPU)


@pytest.mark.parametrize("method", ["lolcats", "lizard", "supra"])
def test_after_a_decoder_the_cache_goes_on_as_if_the_model_had_been_called(method):
    torch.manual_seed(0)
    model = linearize(LlamaForCausalLM(LlamaConfig(**WIDTH)).eval(), method)
    ids = torch.randint(0, 64, (2, 40))
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :7] = 0  # the first is padded on the left
    with torch.inference_mode():
        caches, tokens = [model.make_cache(), model.make_cache()], []
        for cache in caches:
            tokens.append(
                model(ids, attention_mask=mask, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
            )
        step = Decoder(model, caches[0], tokens[0])
        for _ in range(5):
            tokens[1] = model(tokens[1], past_key_values=caches[1]).logits[:, -1].argmax(-1, keepdim=True)
            assert (step() == tokens[1]).all()
        after = [model(tokens[1], past_key_values=cache).logits for cache in caches]
    assert torch.equal(*after) and torch.equal(caches[0].lengths, caches[1].lengths)
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == 46


def test_a_decoder_refuses_a_state_that_grows():
    model = linearize(LlamaForCausalLM(LlamaConfig(**WIDTH)).eval(), "hedgehog", keep_softmax_layers=[0])
    cache = model.make_cache()
    with torch.no_grad():
        model(torch.zeros(1, 8, dtype=torch.long), past_key_values=cache)
    with pytest.raises(ValueError, match=r"fixed size; got .* kept as softmax"):
        Decoder(model, cache, torch.zeros(1, 1, dtype=torch.long))()


def test_a_part_of_the_batch_stands_for_the_rest(monkeypatch):
    monkeypatch.setattr(efficiency, "PREFILL_TOKENS", 32)
    subject = build(SHAPES["mistral-7b"], "lolcats_window", CPU, torch.float32)
    row = efficiency.measure(
        subject, efficiency.Setting("mistral-7b", "batch", "lolcats_window", 6, 16, 4), CPU, {}
    )
    assert row["prefill_rows"] == 2 and row["cache_bytes"] == subject.model.state_bytes(6)


def test_every_row_says_what_it_is_of_and_what_it_cost(measured):
    rows = read(measured)
    assert tuple(rows[0]) == COLUMNS
    assert {r["status"] for r in rows} == {"ok"}
    assert [
        (r["batch"], r["prompt"], r["generated"])
        for r in rows
        if (r["run"], r["sweep"]) == ("lizard", "batch")
    ] == [
        ("1", "32", "4"),
        ("2", "32", "4"),
    ]
    for row in rows:
        made = int(row["batch"]) * int(row["generated"])
        total = float(row["decode_seconds"]) + float(row["prefill_seconds"])
        assert float(row["tokens_per_second"]) == pytest.approx(made / total, rel=1e-3)
        assert float(row["decode_tokens_per_second"]) == pytest.approx(
            made / float(row["decode_seconds"]), rel=1e-3
        )


def test_a_long_generation_is_the_integral_over_sampled_positions(measured):
    rows = [r for r in read(measured) if (r["run"], r["sweep"]) == ("teacher", "length")]
    assert [int(r["position"]) for r in rows] == [17, 48, 80]
    ms = [float(r["ms_per_token"]) for r in rows]
    expected = ms[0] + 31 * (ms[0] + ms[1]) / 2 + 32 * (ms[1] + ms[2]) / 2
    assert float(rows[2]["decode_seconds"]) == pytest.approx(expected / 1e3, rel=1e-3)


def test_a_state_keeps_its_size_and_a_cache_grows(measured):
    sizes = {
        name: [int(r["cache_bytes"]) for r in read(measured) if (r["run"], r["sweep"]) == (name, "length")]
        for name in RUNS
    }
    assert len(set(sizes["lizard"])) == 1
    per_token = 2 * 2 * 2 * 16 * 4  # keys and values, layers, key heads, dimension, bytes
    assert sizes["teacher"] == [per_token * (16 + n) for n in SWEEPS.generated]


def test_a_second_call_measures_only_what_is_missing(measured, tmp_path, monkeypatch):
    text = (measured / "efficiency.csv").read_text()
    (tmp_path / "efficiency.csv").write_text(text[:-30])  # interrupted while it wrote the last row
    measures = []
    monkeypatch.setattr(
        efficiency,
        "attempt",
        lambda s, setting, *_: measures.append(setting) or {"position": 0, "status": "out of memory"},
    )
    assert run(tmp_path)[0]
    assert [(s.run, s.sweep, s.generated) for s in measures] == [("hedgehog", "length", 64)]
    assert (tmp_path / "efficiency.csv").read_text().startswith(text[: text[:-30].rindex("\n") + 1])


def test_time_that_is_up_ends_the_measuring_between_rows(tmp_path):
    whole, log = run(tmp_path, seconds=0.0)
    assert not whole and not log.rows


def test_rows_of_another_gpu_are_not_mixed_in(tmp_path):
    Log(tmp_path, "one", "a test")
    with pytest.raises(UserError, match="measured on 'one', and this is 'other'.*--out"):
        Log(tmp_path, "other", "a test")


def test_tokens_that_differ_make_a_row_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(efficiency, "plain", lambda *args: plain(*args) + 1)
    _, log = run(tmp_path, order=(("mistral-7b", "supra", ("batch",)),))
    assert {r["status"] for r in log.rows} == {"wrong"}


def test_where_memory_ends_is_a_row_and_anything_else_an_error(monkeypatch):
    setting, raised = (
        efficiency.Setting("mistral-7b", "batch", "teacher", 1, 8, 4),
        RuntimeError("capture failed"),
    )
    raised.__context__ = torch.OutOfMemoryError("CUDA out of memory")

    def fail(*args):
        raise raised

    monkeypatch.setattr(efficiency, "measure", fail)
    assert (
        efficiency.attempt(build(SHAPES["mistral-7b"], "teacher", CPU, torch.float32), setting, CPU, {})[
            "status"
        ]
        == "out of memory"
    )
    raised.__context__ = None
    with pytest.raises(RuntimeError, match="capture failed"):
        efficiency.attempt(build(SHAPES["mistral-7b"], "teacher", CPU, torch.float32), setting, CPU, {})


def test_the_largest_batch_is_found_to_an_eighth():
    def search(limit, wanted=()):
        done = {}
        while (batch := next_batch(done, list(wanted))) is not None:
            done[batch] = batch <= limit
        return done

    for limit in (1, 3, 17, 440, 1000):
        largest = max(b for b, ok in search(limit).items() if ok)
        assert largest <= limit < largest + max(largest // 8, 1) + 1
    assert 384 in search(440) and {96, 112} <= set(search(440, (1, 96, 112)))
    assert search(0) == {1: False}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_needs_and_writes_nothing(tmp_path):
    with pytest.raises(UserError, match="measured on a GPU with 40 GB or more; torch finds none"):
        efficiency.benchmark(tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- the figures ---


@pytest.mark.parametrize("spec", ["lolcats/figure2", "lizard/figure5", "supra/figure1"])
def test_a_figure_is_drawn_from_the_rows_and_its_claims_are_judged_by_them(spec, measured, tmp_path):
    artefact = specs.read(ROOT / f"workflow/papers/{spec}.yaml")
    about = About("mini", files={artefact.files()[0]: measured / "efficiency.csv"})
    written = make(artefact, {}, about, tmp_path)
    assert sorted(written) == sorted(map(Path, artefact.outputs(str(tmp_path)))) and all(
        path.stat().st_size for path in written
    )
    claims = list(csv.DictReader((tmp_path / f"{artefact.stem}.claims.csv").read_text().splitlines()))
    assert len(claims) == len(artefact.spec.claims)
    assert {c["verdict"] for c in claims} <= {"reproduced", "contradicted", "not tested"}
    [source] = json.loads((tmp_path / f"{artefact.stem}.provenance.json").read_text())["sources"].values()
    assert source["measured"]["gpu"] == "none" and source["sha256"]
    assert {
        s.run
        for panel in artefact.spec.panels
        if artefact.spec.of_costs(panel)
        for s in artefact.spec.shown(panel)
    } <= set(RUNS)
