"""Laws of encoders: attention in both directions, padding, the order of tokens, refusals; and the distance of
a map from softmax attention."""

import csv
import functools
import importlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_laws import CASES, LEARNED, close, name
from test_stage import Mirror
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    MPNetConfig,
    MPNetModel,
    RobertaPreLayerNormConfig,
    RobertaPreLayerNormModel,
)

from relinear import families, linearize, stages
from relinear.attention import load, options
from relinear.attention._base import Attention, Heads, Inputs, softmax_output, softmax_weights
from relinear.draw.planned import draw_planned
from relinear.errors import UserError
from relinear.families.bert import byte_tokenizer
from relinear.get.model import save_model
from relinear.get.padded import Padded
from relinear.linearize.loading import load_teacher
from relinear.linearize.transfer import layer_inputs, record
from relinear.measure import head_maps
from relinear.measure.fidelity import Compared, Options, measure
from relinear.measure.gate import GateError, encoder_gate
from relinear.plan.job import Job
from relinear.plan.plan import Plan
from relinear.plan.strict import ConfigError
from relinear.stage import run_stage
from relinear.stages._stage import Node
from relinear.tracking import live as tracking

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "initializer_range": 0.3,
}
TEACHERS = {
    "bert": (BertModel, BertConfig, {**SIZES, "max_position_embeddings": 64, "pad_token_id": 0}),
    "mpnet": (MPNetModel, MPNetConfig, {**SIZES, "max_position_embeddings": 66, "pad_token_id": 1}),
    "prenorm": (
        RobertaPreLayerNormModel,
        RobertaPreLayerNormConfig,
        {**SIZES, "max_position_embeddings": 65, "pad_token_id": 0},
    ),
}


def without_order(case) -> bool:
    """Whether a method can be of an encoder with these options."""
    try:
        load(case[0])(Heads(48, 6, 6, 8, 0.35, causal=False), options(*case))
    except UserError:
        return False
    return True


ABLE = [case for case in CASES if without_order(case)]
UNABLE = [case for case in CASES if case not in ABLE]
MAPS = [case for case in ABLE if case in LEARNED]
PLACED = [case for case in ABLE if case[1].get("map") == "cosformer"]  # they read where a token stands
over_families = pytest.mark.parametrize("family", TEACHERS)
over_cases = pytest.mark.parametrize("case", ABLE, ids=name)


def teacher(family, dtype=torch.float64, **sizes):
    """A tiny encoder from scratch. MPNet has no relative bias, as its family leaves it."""
    torch.manual_seed(0)
    model_class, config, own = TEACHERS[family]
    model = model_class(config(**{**own, **sizes})).to(dtype).eval()
    if family == "mpnet":
        model.config.relative_bias = False
        torch.nn.init.zeros_(model.encoder.relative_attention_bias.weight)
    return model.requires_grad_(False)


@functools.cache
def linearized(method, given, family, dtype):
    """The linearized encoder, its method's parameters moved away from their start."""
    model = linearize(teacher(family, dtype), method, **dict(given))
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.method_parameters().values():
            p.add_(0.3 * torch.randn(p.shape, dtype=torch.float64).to(p.dtype))
    return model


def of(case, family="bert", dtype=torch.float64):
    return linearized(case[0], tuple(case[1].items()), family, dtype)


def tokens(length, batch=2, seed=0):
    return torch.randint(
        5, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed)
    )


def hidden(model, ids, **more):
    with torch.no_grad():
        return model(ids, **more).last_hidden_state


def padded_pair(family):
    """Two texts of 20 and 31 tokens side by side, and their mask."""
    ids, mask = tokens(31), torch.ones(2, 31, dtype=torch.long)
    ids[0, 20:], mask[0, 20:] = TEACHERS[family][2]["pad_token_id"], 0
    return ids, mask


# --- the model ---


def test_the_methods_that_can_are_those_that_say_so():
    assert {case[0] for case in ABLE} == {"feature_map", "hedgehog", "lolcats", "softmax", "t2r"}
    assert all(case[0] in ("lizard", "supra", "window") or case[1].get("window") for case in UNABLE)


@over_families
def test_softmax_as_a_method_is_the_teacher_with_padding_and_pairs(family):
    ids, mask = padded_pair(family)
    more = {"token_type_ids": (torch.arange(31) > 9).long().expand(2, -1)} if family == "bert" else {}
    before, model = teacher(family), of(("softmax", {}), family=family)
    for given in ({}, {"attention_mask": mask}, {"attention_mask": mask, **more}):
        real = given.get("attention_mask", torch.ones_like(mask)).bool()
        close(hidden(model, ids, **given)[real], hidden(before, ids, **given)[real])
    recorded = record(model, ids, attention_mask=mask, **more)
    for method, inputs in layer_inputs(model, recorded, mask.bool()):  # every transfer mimics this, too
        assert method.distill_loss(inputs, "mse") < 1e-12
        weights = softmax_weights(inputs, method.heads)
        close(
            torch.einsum("bhti,bihd->bthd", weights, inputs.v)[mask.bool()],
            softmax_output(inputs, method.heads)[mask.bool()],
        )


@over_families
@over_cases
def test_untouched_weights_stay_bit_identical_and_a_saved_folder_loads_to_the_same_model(
    case, family, tmp_path
):
    before, model = teacher(family, torch.float32).state_dict(), of(case, family=family, dtype=torch.float32)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    model.save_pretrained(tmp_path)
    for again in (AutoModel.from_pretrained(tmp_path), load_teacher(tmp_path, torch.float32)):
        assert torch.equal(hidden(again, tokens(20)), hidden(model, tokens(20)))


@over_families
@pytest.mark.parametrize("case", [case for case in ABLE if case not in PLACED], ids=name)
def test_the_order_of_tokens_does_not_matter_beside_their_positions(case, family):
    model, ids = of(case, family=family), tokens(29)
    order = torch.randperm(29, generator=torch.Generator().manual_seed(3))
    whole = hidden(model, ids, position_ids=model.restarted_positions(29))
    close(whole, hidden(model, ids))
    close(hidden(model, ids[:, order], position_ids=model.restarted_positions(29)[:, order]), whole[:, order])


@over_families
@over_cases
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_leaves_no_trace(case, family, side):
    model, (ids, mask) = of(case, family=family), padded_pair(family)
    positions = model.restarted_positions(31).expand(2, -1)
    alone = hidden(model, ids[:1, :20]), hidden(model, ids[1:])
    if side == "left":
        ids, mask = (torch.stack([x[0].roll(11), x[1]]) for x in (ids, mask))
        positions = torch.stack([positions[0].roll(11), positions[1]])
    found = hidden(model, ids, attention_mask=mask, position_ids=positions)
    close(found[0][mask[0].bool()], alone[0][0])
    close(found[1], alone[1][0])


@over_families
@pytest.mark.parametrize("case", UNABLE, ids=name)
def test_a_method_that_reads_keys_in_order_is_refused(case, family):
    with pytest.raises(
        UserError,
        match=f"{case[0]}.*reads keys in order.*possible are methods whose files say causal_only = False",
    ):
        linearize(teacher(family), case[0], **case[1])


def test_a_method_is_of_causal_models_only_unless_it_says_otherwise():
    assert Attention.causal_only


@over_families
def test_an_encoder_is_not_asked_to_decode(family):
    model, ids = of(("hedgehog", {}), family=family), tokens(9)
    layer = model.attention_layers()[0]
    inputs = layer.inputs(torch.randn(1, 1, 48, dtype=torch.float64), None, None)
    for wrong in (
        lambda: model.generate(ids),
        model.make_cache,
        lambda: model(ids, use_cache=True),
        lambda: model(ids, past_key_values=()),
    ):
        with pytest.raises(UserError, match="is an encoder.*does not decode; possible: a causal model"):
            wrong()
    with pytest.raises(UserError, match="no step: an encoder reads a whole text at once"):
        layer.method.step(inputs, None)
    with pytest.raises(ValueError, match="takes no initial_state"):
        layer.method(inputs, layer.method.init_state(1))


@over_families
def test_texts_longer_than_the_positions_need_some(family):
    model = of(("hedgehog", {}), family=family)
    assert model.position_table[1] == 64 == families.of(TEACHERS[family][0]).positions(teacher(family))
    with pytest.raises(
        ValueError, match="has 64 positions; got 65 tokens and no position_ids.*restarted_positions"
    ):
        model(tokens(65))
    with pytest.raises(ValueError, match=r"attention_mask must be .* = \[2, 9\]; got \[2, 8\]"):
        model(tokens(9), attention_mask=torch.ones(2, 8))
    positions = model.restarted_positions(150)
    assert torch.equal(positions[0, :64], positions[0, 64:128]) and len(set(positions[0].tolist())) == 64
    assert hidden(model, tokens(150), position_ids=positions).isfinite().all()


# --- one layer, grouped heads ---


def one_layer(case, heads=6, groups=2, length=33):
    torch.manual_seed(2)
    method = load(case[0])(Heads(48, heads, groups, 8, 8**-0.5, causal=False), options(*case)).double()
    with torch.no_grad():
        for p in method.parameters():
            p.add_(0.3 * torch.randn_like(p))
    r = lambda *s: torch.randn(*s, dtype=torch.float64)  # noqa: E731
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, 21:] = False
    return method, Inputs(
        r(2, length, 48),
        r(2, length, heads, 8),
        r(2, length, groups, 8),
        r(2, length, groups, 8),
        key_mask=mask,
    )


@over_cases
@pytest.mark.parametrize(("heads", "groups"), [(6, 6), (6, 2), (8, 2), (6, 1)])
def test_explicit_weights_times_values_are_the_output_for_any_grouping_of_heads(case, heads, groups):
    method, inputs = one_layer(case, heads, groups)
    expected = torch.einsum(
        "bhti,bihd->bthd",
        method.attention_weights(inputs).double(),
        inputs.v.repeat_interleave(heads // groups, 2),
    )
    close(method(inputs)[0][inputs.key_mask], expected[inputs.key_mask])


@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
@pytest.mark.parametrize("case", MAPS, ids=name)
def test_a_transfer_sees_real_tokens_alone_and_brings_a_method_closer(case, loss):
    method, inputs = one_layer(case)
    parts = [
        Inputs(*(None if x is None else x[i : i + 1, :n] for x in inputs[:6]), key_mask=None)
        for i, n in ((0, 21), (1, 33))
    ]
    apart = sum(method.distill_loss(part, loss) * n for part, n in zip(parts, (21, 33), strict=True)) / 54
    start = method.distill_loss(inputs, loss)
    assert start.item() == pytest.approx(apart.item(), rel=1e-6)
    optimiser = torch.optim.Adam(method.parameters(), lr=0.02)
    for _ in range(30):
        optimiser.zero_grad()
        method.distill_loss(inputs, loss).backward()
        optimiser.step()
    assert method.distill_loss(inputs, loss) < start


# --- the gate and the distance from softmax attention ---


@over_families
@over_cases
def test_every_method_passes_the_gate(case, family):
    assert encoder_gate(of(case, family=family), tokens(40))["passed"]


@over_families
def test_a_method_that_sees_only_what_comes_before_does_not_pass(family):
    model = linearize(teacher(family), "hedgehog")
    for layer in model.attention_layers():
        layer.method.heads = layer.method.heads._replace(causal=True)
    with pytest.raises(GateError, match="order_consistency"):
        encoder_gate(model, tokens(40))


def compared(model, ids, mask, texts):
    """The readings of texts in one batch, and of the same texts one by one without padding."""
    together = Compared(model, [(ids, mask.bool(), {"attention_mask": mask})], ((0, 1),), "kl")
    apart = Compared(model, [(ids[i : i + 1, :n], None, {}) for i, n in enumerate(texts)], (), "kl")
    return together, apart


@over_families
@over_cases
def test_the_distance_is_that_of_real_tokens(case, family):
    ids, mask = padded_pair(family)
    together, apart = compared(of(case, family=family), ids, mask, (20, 31))
    found, expected = ({r.metric: r for r in x.means({})} for x in (together, apart))
    assert found["kl"].n == expected["kl"].n == 51
    for metric, reading in found.items():
        assert reading.value == pytest.approx(expected[metric].value, rel=1e-5, abs=1e-9)
    assert together.kept["softmax.0.1"].shape == (31, 31)
    heads = [r.value for r in together.of_heads() if r.metric == "kl"]
    assert len(heads) == 12 and sum(heads) / 12 == pytest.approx(found["kl"].value, rel=1e-6)
    if case[0] == "softmax":
        assert found["kl"].value == pytest.approx(0, abs=1e-9)
    else:
        assert 0 < found["kl"].value and found["kl"].stderr > 0 and found["uniform_kl"].value > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_distance_of_a_head_is_that_of_the_weights_kept_for_figures(dtype):
    found = Compared(
        of(("hedgehog", {}), family="bert", dtype=dtype), [(tokens(20, batch=1), None, {})], ((0, 1),), "kl"
    )
    soft, own = (found.kept[f"{kind}.0.1"].double() for kind in ("softmax", "method"))
    assert (own.sum(-1) - 1).abs().max() < 1e-5
    head = next(r for r in found.of_heads() if r.metric == "kl" and r.at == {"layer": 0, "head": 1})
    assert head.value > 1e-4 and (soft * (soft / own).log()).sum(-1).mean().item() == pytest.approx(
        head.value, rel=1e-3
    )


def test_a_map_of_equal_features_is_as_far_as_equal_weights():
    model = linearize(teacher("bert"), "lolcats", variant="paper", feature="elu")
    with torch.no_grad():
        for p in model.method_parameters().values():
            p.copy_(-torch.eye(8))  # f(xW + x) with W = -1: 1 + ELU of zero
    found = {r.metric: r.value for r in compared(model, *padded_pair("bert"), (20, 31))[0].means({})}
    assert found["kl"] == pytest.approx(found["uniform_kl"], rel=1e-6)


# --- what heads attend to ---


@pytest.fixture
def short_texts(tmp_path) -> Path:
    """Data of three texts, of 4, 12 and 9 tokens."""
    ends = np.cumsum([4, 12, 9])
    kinds = (
        ("tokens", np.random.default_rng(0).integers(5, 90, 25)),
        ("types", np.zeros(25, int)),
        ("ends", ends),
    )
    for kind, values in kinds:
        np.save(tmp_path / f"heldout_{kind}.npy", values)
    return tmp_path


def looked(model, data, **given):
    options = head_maps.Options(**{"texts": 5, "seq_len": 64, "shortest": 8, "longest": 12, **given})
    job = Job("heads", {}, {}, data, data)
    found = list(head_maps.measure(model, data, options, job))
    return {r.metric: r for r in found if r.of == "attention"}, [r for r in found if r.of == "text"]


@over_families
@over_cases
def test_what_heads_attend_to_is_what_fidelity_compares(case, family, short_texts):
    means, of_text = looked(of(case, family=family, dtype=torch.float32), short_texts)
    text = Padded(short_texts, "heldout", 64)
    batches = [(*text.batch([i])[:2], {"attention_mask": text.batch([i])[1]}) for i in (1, 2)]
    apart = [
        next(
            r
            for r in Compared(of(case, family=family, dtype=torch.float32), [b], (), "kl").means({})
            if r.metric == "kl"
        )
        for b in batches
    ]
    assert means["kl"].n == 2 and means["kl"].value == pytest.approx(
        np.mean([r.value for r in apart]), rel=1e-3, abs=1e-6
    )
    assert len(of_text) == 12 and all(r.n == 12 for r in of_text)
    kept = load_file(short_texts / "weights.safetensors")
    assert set(kept) == {
        f"{kind}.{layer}.{head}"
        for kind in ("softmax", "method")
        for layer in (1, 6, 12)
        for head in (1, 3, 6, 12)
    }
    sums = torch.stack([w.sum(-1) for w in kept.values()])
    assert ((sums - 1).abs() < 1e-5).logical_or(sums == 0).all(), (
        "a query whose features are all zero has no weights"
    )
    assert (
        (sums > 0).all()
        or case == ("lolcats", {"variant": "paper", "feature": "relu"})
        or case[1].get("map") in ("relu", "cosformer")
    )
    if case[0] == "softmax":
        assert means["monotonicity"].value == pytest.approx(1) and means["kl"].value == pytest.approx(
            0, abs=1e-6
        )
    else:
        assert means["monotonicity"].value < 0.999
    at = {(r.at["layer"], r.at["head"]): (r.at["own_layer"], r.at["own_head"]) for r in of_text}
    assert (at[1, 1], at[6, 3], at[12, 6], at[12, 12]) == ((1, 1), (1, 2), (2, 3), (2, 6)), (
        "two layers of six heads"
    )


def test_heads_are_looked_at_on_short_texts_of_encoders(short_texts):
    model = of(("hedgehog", {}), dtype=torch.float32)
    with pytest.raises(UserError, match="no text of 13 to 14 tokens in .*, whose have 4 to 12"):
        looked(model, short_texts, shortest=13, longest=14)
    for split_off in ("ends", "types"):
        (short_texts / f"heldout_{split_off}.npy").unlink()
    np.save(short_texts / "heldout_labels.npy", np.zeros(25, int))
    with pytest.raises(
        UserError, match="head_maps looks at encoders on short texts, .*make: sentences; got "
    ):
        looked(model, short_texts, seq_len=8)


# --- opening ---


@pytest.fixture
def saved(tmp_path) -> Path:
    """A package's folder that holds an encoder somewhere below."""
    folder = tmp_path / "package/model"
    model, tokenizer = families.load("bert").random({"max_position_embeddings": 64}, 0, torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text("{}")
    return tmp_path / "package"


def parts(folder: Path, out: Path, n: int = 3) -> list[Path]:
    """The folder as a zip in n parts, each in a folder of its own."""
    data = Path(shutil.make_archive(str(out / "whole"), "zip", folder)).read_bytes()
    size = -(-len(data) // n)
    folders = [out / f"part{i}" for i in range(n)]
    for i, sub in enumerate(folders):
        sub.mkdir()
        (sub / f"model.zip.{i + 1:03}").write_bytes(data[i * size : (i + 1) * size])
    return folders


def test_an_encoder_is_found_in_its_package_and_in_the_parts_of_a_zip(saved, tmp_path):
    expected, _ = families.load("bert").random({"max_position_embeddings": 64}, 0, torch.float32)
    for i, folders in enumerate(([saved], parts(saved, tmp_path))):
        shape = save_model(folders, tmp_path / f"out{i}", "float32", family="bert")
        assert (shape["max_positions"], shape["causal"], shape["heads"]) == (64, False, 6)
        again = load_teacher(tmp_path / f"out{i}", torch.float32)
        assert torch.equal(hidden(again, tokens(20)), hidden(expected, tokens(20)))


def test_what_is_no_whole_encoder_is_refused(saved, tmp_path):
    bert = families.load("bert")
    folders = parts(saved, tmp_path)
    with pytest.raises(UserError, match="no whole zip.*missing, damaged or out of order"):
        bert.open(folders[:2], torch.float32)
    with pytest.raises(UserError, match="hold 0 models: got nothing"):
        bert.open([tmp_path / "nowhere"], torch.float32)
    with pytest.raises(UserError, match="holds a BertModel; family 'mpnet' covers MPNetModel"):
        families.load("mpnet").open([saved], torch.float32)
    weights = load_file(saved / "model/model.safetensors")
    weights.pop("encoder.layer.1.attention.self.key.weight")
    save_file(weights, saved / "model/model.safetensors", {"format": "pt"})
    with pytest.raises(
        UserError,
        match="is not what its model needs: missing tensors: encoder.layer.1.attention.self.key.weight",
    ):
        bert.open([saved], torch.float32)


def test_mpnet_is_opened_without_its_relative_bias(tmp_path):
    model = teacher("mpnet", torch.float32, vocab_size=300)
    torch.nn.init.ones_(model.encoder.relative_attention_bias.weight)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    opened, _ = families.load("mpnet").open([tmp_path], torch.float32)
    assert not opened.encoder.relative_attention_bias.weight.any()
    others = [n for n, p in model.named_parameters() if "relative" not in n]
    assert all(torch.equal(opened.get_parameter(n), model.get_parameter(n)) for n in others)


def test_an_mpnet_that_was_linearized_before_its_configuration_told_of_the_bias_is_loaded(tmp_path):
    saved = linearize(teacher("mpnet", torch.float32), "hedgehog")
    expected = hidden(saved, tokens(20))
    del saved.config.relative_bias
    saved.save_pretrained(tmp_path)
    loaded = load_teacher(tmp_path, torch.float32)
    assert not hasattr(loaded.config, "relative_bias") and torch.equal(hidden(loaded, tokens(20)), expected)
    torch.nn.init.ones_(loaded.encoder.relative_attention_bias.weight)
    with pytest.raises(UserError, match="adds a bias of relative positions"):
        loaded(tokens(20))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"num_attention_heads": 5}, "multiple of num_attention_heads, 5"),
        ({"layers": 1}, "unknown key 'layers'; possible: "),
    ],
)
def test_sizes_that_make_no_encoder_are_refused(given, says):
    with pytest.raises(ValueError, match=says):
        families.load("bert").random(given, 0, torch.float32)


# --- the plan ---


@pytest.fixture
def workflow(tmp_path) -> Path:
    return Path(shutil.copytree(Path(__file__).parents[1] / "workflow", tmp_path / "workflow"))


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (
            "{model: bert-base, steps: [{finetune: {data: alpaca, kind: lora, lr: 1.0e-4}}]}",
            "finetune trains a model to predict the next token",
        ),
        ("{model: bert-base, shown: [comparison/table2]}", "scores how a model predicts the next token"),
    ],
)
def test_what_needs_a_next_token_is_refused_before_any_work(workflow, run, says):
    with (workflow / "papers/comparison/runs.yaml").open("a") as file:
        file.write(f"\nwrong: {run}\n")
    with pytest.raises(
        ConfigError, match=f"{says}, and 'tiny-bert' is an encoder; possible: runs of llama-3-8b"
    ):
        Plan(scale="smoke", workflow=workflow).check()


def test_an_encoder_s_gate_reads_no_text_and_another_teacher_is_none_for_it():
    plan = Plan(scale="smoke", teacher="mistral-7b")
    assert set(plan.parents(Node("measure", "hedgehog_cola", "gate"))) == {"model", "distill"}
    assert "data" in plan.parents(Node("measure", "hedgehog", "gate"))
    other = Plan(scale="paper", teacher="mistral-7b")
    assert (other.name("hedgehog_cola"), other.name("hedgehog")) == ("hedgehog_cola", "hedgehog@mistral-7b")


# --- from sentences to a table ---

FIGURES = ("hedgehog_figure3", "hedgehog_figure12")


@pytest.fixture(scope="module")
def table4(tmp_path_factory) -> tuple[Plan, Path]:
    """Hedgehog Table 4 at smoke scale, of the runs on one data set, and the text that they were measured
    on."""
    plan = Plan(scale="smoke", results=tmp_path_factory.mktemp("results"))
    artefact = plan.artefacts["hedgehog_table4"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracking, "Tracker", Mirror)
        wanted = [
            node
            for (run, measure), node in plan.reads(artefact).items()
            if run != "hedgehog_wt103" and measure in ("gate", "kl_cola")
        ]
        wanted += [
            node
            for name in FIGURES
            for node in plan.reads(plan.artefacts[name]).values()
            if node.name != "hedgehog_wt103"
        ]
        for node in plan.behind(wanted):
            run_stage(plan, node, importlib.import_module(stages.stage(node.stage).work).work)
    return plan, draw_planned(plan, artefact)[0]


def test_a_map_that_was_distilled_is_nearer_than_one_that_was_not(table4):
    plan, path = table4
    rows = {row["row"]: row for row in csv.DictReader(path.read_text().splitlines())}
    kl = {name: float(row["cola"]) for name, row in rows.items() if row["cola"] != "not run"}
    assert kl["hedgehog_cola"] + 0.05 < kl["hedgehog_untrained"] < kl["elu_untrained"] < kl["equal_weights"]
    assert {name for name, row in rows.items() if row["cola"] == "not run"} == {"hedgehog_wt103"}
    assert (
        rows["hedgehog_cola"]["cola_data"] == "story-sentences" and rows["hedgehog_cola"]["gate"] == "passed"
    )
    record = json.loads((plan.root / "runs/hedgehog_cola/distill/run.json").read_text())
    text = Padded(plan.folder(plan.scaled.text("cola", "tiny-bert")), "train", 64)
    assert record["tokens"] == text.tokens_of(5 * len(text) // 8 * 8), "padding is no token"


def test_maps_of_heads_are_drawn_and_those_that_were_not_run_say_so(table4):
    plan, _ = table4
    for figure in FIGURES:
        drawn = {path.name.partition(".")[2]: path for path in draw_planned(plan, plan.artefacts[figure])}
        assert drawn["png"].read_bytes().startswith(b"\x89PNG")
        cells = json.loads(drawn["provenance.json"].read_text())["cells"]
        assert {run for run, of_run in cells.items() if None in of_run.values()} == {"hedgehog_wt103"} & set(
            cells
        )


def test_every_figure_of_a_family_is_of_the_same_measurements():
    plan = Plan(scale="paper")
    reads = {n: set(plan.reads(plan.artefacts[f"hedgehog_figure{n}"])) for n in range(7, 21)}
    assert reads[12] == reads[13] == reads[14] and reads[9] <= reads[10]
    # of the encoder that has learned CoLA; the others' is the pretrained one
    finetuned = {(run, measure) for run, measure in reads[7] | reads[8] if run.startswith("finetuned_")}
    assert finetuned == reads[7] | reads[8] and {measure for _, measure in finetuned} == {"heads_cola"}
    assert reads[15] == reads[16] == reads[17] and reads[18] == reads[19] == reads[20]
    assert plan.artefacts["hedgehog_figure14"].spec.places == ((1, 12), (6, 12), (12, 12))


def test_longer_texts_are_joined_and_those_beyond_the_scale_left_out(table4, tmp_path):
    plan, _ = table4
    model, data = (
        linearize(load_teacher(plan.root / "models/tiny-bert", torch.float32), "hedgehog"),
        plan.folder(plan.scaled.text("cola", "tiny-bert")),
    )
    job = Job("kl", {}, {}, tmp_path, tmp_path)
    found = list(measure(model, data, Options(tokens=600, seq_len=512, lengths=(64, 300, 600, 700)), job))
    assert {r.at["length"]: r.n for r in found if r.metric == "kl"} == {64: 576, 300: 600, 600: 600}
    assert all(
        r.value > 0 and (r.stderr is None) == (r.at["length"] == 600) for r in found if r.metric == "kl"
    )
    np.save(tmp_path / "heldout_tokens.npy", np.arange(1000))
    np.save(tmp_path / "heldout_labels.npy", np.arange(1000))
    with pytest.raises(UserError, match="fidelity.lengths joins short texts.*make: sentences"):
        list(measure(model, tmp_path, Options(tokens=600, seq_len=512, lengths=(64,)), job))


def test_mpnets_bias_is_that_of_relative_positions_and_is_made_where_the_model_is():
    """A pass that makes a tensor elsewhere cannot be recorded as a CUDA graph."""
    encoder = MPNetModel(MPNetConfig(**SIZES)).encoder
    torch.nn.init.normal_(encoder.relative_attention_bias.weight)
    bias = encoder.compute_position_bias(torch.zeros(2, 40, 1))
    for i, j in ((0, 0), (3, 7), (39, 1)):
        bucket = encoder.relative_position_bucket(torch.tensor([j - i]))
        assert torch.equal(bias[:, :, i, j], encoder.relative_attention_bias(bucket).expand(2, -1))

    class Here(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            assert not isinstance(made, torch.Tensor) or made.device.type == "meta", function
            return made

    with Here():
        encoder.to("meta").compute_position_bias(torch.zeros(2, 40, 1, device="meta"))
