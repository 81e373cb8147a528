"""The component switch: the function that is left of a trained hybrid when a part is off, and the laws, which
still hold."""

import sys
from types import ModuleType

import pytest
import torch
from test_laws import HEADS, WINDOW, close, name, of, one_layer, repeated, teacher, tokens

from relinear import linearize
from relinear.attention import load, options
from relinear.errors import UserError
from relinear.linearize.parts import check_parts, switch_off
from relinear.measure.run import work
from relinear.plan.catalogue import Measure
from relinear.plan.job import Job, Link
from relinear.plan.plan import Plan
from relinear.plan.readings import Reading
from relinear.plan.strict import ConfigError, Strict
from relinear.stages._stage import Node

LOLCATS = ("lolcats", {"window": WINDOW})
EQUATION_8 = ("lolcats", {"variant": "paper", "feature": "exp", "window": WINDOW})
LIZARD = ("lizard", {"window": WINDOW})
CHANNELS = ("lizard", {"window": WINDOW, "gates": "channel", "normalize": True})
HYBRIDS = [LOLCATS, EQUATION_8, LIZARD, CHANNELS]
SWITCHED = [(case, off) for case in HYBRIDS for off in load(case[0]).PARTS] + [
    (LIZARD, "window gate"),
    (LIZARD, "linear meta"),
]
over_switched = pytest.mark.parametrize(
    ("case", "off"), SWITCHED, ids=[f"{name(c)}-{off}" for c, off in SWITCHED]
)


@pytest.fixture
def switched(case, off):
    """The hybrid without a part; whole again after the test, since others share the model."""
    model = of(case)
    yield switch_off(model, *off.split())
    switch_off(model)


@over_switched
def test_parallel_equals_pieces_equals_one_token_at_a_time(switched):
    ids, cache, out, at = tokens(67), switched.make_cache(), [], 0
    for c in (1, 1, 40, *(1,) * (WINDOW + 2), 7):
        out.append(switched(ids[:, at : at + c], past_key_values=cache).logits)
        at += c
    close(torch.cat(out, 1), switched(ids, use_cache=False).logits)


@over_switched
def test_a_prefix_does_not_depend_on_what_follows_and_padding_leaves_no_trace(switched):
    ids = tokens(80)
    whole = switched(ids, use_cache=False).logits
    for length in (1, WINDOW, WINDOW + 1, 51):
        close(switched(ids[:, :length], use_cache=False).logits, whole[:, :length])
    padded = torch.cat([torch.full((2, 20), 3), ids], 1)
    mask = torch.ones_like(padded)
    mask[:, :20] = 0
    close(switched(padded, attention_mask=mask, use_cache=False).logits[:, 20:], whole)


@over_switched
def test_the_state_has_a_fixed_size_which_is_what_the_model_says(switched):
    cache, sizes = switched.make_cache(), set()
    for length in (1, 1, WINDOW - 1, 1, 2 * WINDOW, 1):
        switched(tokens(length), past_key_values=cache)
        sizes.add(cache.state_bytes())
    assert sizes == {switched.state_bytes(2)}


@over_switched
def test_explicit_weights_times_values_are_the_output(case, off):
    method, inputs = one_layer(case)
    whole = method(inputs)[0]
    method.switch_off(off.split())
    left = method(inputs)[0]
    close(
        torch.einsum("bhti,bihd->bthd", method.attention_weights(inputs).double(), repeated(inputs.v, HEADS)),
        left,
    )
    assert not torch.allclose(left, whole)
    method.switch_off(())
    assert torch.equal(method(inputs)[0], whole), "to the bit, with all parts on again"


@pytest.mark.parametrize("case", [LOLCATS, EQUATION_8], ids=name)
def test_lolcats_without_its_linear_part_is_a_window(case):
    window, (method, inputs) = (
        load("window")(HEADS, options("window", {"window": WINDOW, "sinks": 0})),
        one_layer(case),
    )
    method.switch_off(["linear"])
    assert torch.equal(method(inputs)[0], window(inputs)[0])
    try:
        found = switch_off(of(case), "linear")(tokens(67), use_cache=False).logits
    finally:
        switch_off(of(case))
    close(found, of(("window", {"window": WINDOW, "sinks": 0}))(tokens(67), use_cache=False).logits, 1e-12)


@pytest.mark.parametrize("case", [LOLCATS, EQUATION_8], ids=name)
def test_lolcats_without_its_window_sees_only_what_is_older(case):
    method, inputs = one_layer(case)
    method.switch_off(["window"])
    weights, y = method.attention_weights(inputs), method(inputs)[0]
    assert torch.equal(weights, weights.tril(-WINDOW)) and not y[:, :WINDOW].any()
    torch.testing.assert_close(weights[:, :, WINDOW:].sum(-1), torch.ones_like(weights[:, :, WINDOW:, 0]))


@pytest.mark.parametrize("case", [LIZARD, CHANNELS], ids=name)
def test_lizards_parts_add_up_and_each_is_left_as_it_is_in_the_sum(case):
    method, inputs = one_layer(case)
    whole, left = method(inputs)[0], {}
    for off in ("linear", "window"):
        method.switch_off([off])
        left[off] = method(inputs)[0]
    close(left["linear"] + left["window"], whole)


def test_lizards_gate_open_forgets_nothing_and_without_meta_tokens_its_window_is_plain():
    method, inputs = one_layer(LIZARD)
    plain = load("lizard")(HEADS, options("lizard", {"window": WINDOW, "meta": 0})).double()
    plain.load_state_dict(method.state_dict())
    method.switch_off(["meta"])
    assert torch.equal(method(inputs)[0], plain(inputs)[0])
    method.switch_off(["gate", "window"])
    with torch.no_grad():
        method.gate.weight.zero_()
        method.gate.bias.fill_(50.0)  # a gate of 1 to the last bit of float64
    shut = method(inputs)[0]
    method.switch_off(["window"])
    close(method(inputs)[0], shut, 1e-12)


@pytest.mark.parametrize(
    ("method", "given", "off", "says"),
    [
        ("lolcats", {"window": 8}, ["gate"], "no part 'gate' to switch off; possible: linear, window"),
        ("lolcats", {}, ["window"], "no part 'window' to switch off; possible: linear"),
        ("lolcats", {}, ["linear"], "without linear attends to nothing"),
        ("lolcats", {"window": 8}, ["linear", "window"], "without linear and window attends to nothing"),
        ("lizard", {"meta": 0}, ["meta"], "no part 'meta' to switch off; possible: linear, window, gate"),
        ("hedgehog", {}, ["linear"], "hedgehog has no part 'linear' to switch off: it is one whole"),
        ("window", {}, ["window"], "window has no part 'window'"),
        ("softmax", {}, ["linear"], "softmax has no part 'linear'"),
    ],
)
def test_a_part_that_is_not_there_or_leaves_nothing_is_refused(method, given, off, says):
    with pytest.raises(UserError, match=says):
        check_parts(method, given, off)
    check_parts(method, given, ())


def test_a_model_that_was_never_linearized_has_no_parts():
    with pytest.raises(
        UserError, match="LlamaForCausalLM has no part 'linear' to switch off: its attention is one whole"
    ):
        switch_off(teacher(), "linear")


def test_layers_that_are_kept_as_softmax_stay_as_they_are():
    model = switch_off(
        linearize(teacher(num_hidden_layers=4), "lolcats", window=8, keep_softmax_layers=0.5), "linear"
    )
    assert [getattr(layer.method, "switched_off", None) for layer in model.attention_layers()] == [
        {"linear"},
        None,
    ] * 2


# --- as a measurement's option ---


def test_a_part_or_a_list_of_them():
    assert Measure(metric="perplexity", without="linear").without == ("linear",)
    assert Measure(metric="perplexity", without=["gate", "meta"]).without == ("gate", "meta")


def test_only_a_measure_without_a_part_says_so_and_it_is_a_measurement_of_its_own():
    plan = Plan(scale="smoke")
    whole, less = (Node("measure", "lizard", measure) for measure in ("perplexity", "perplexity_no_linear"))
    assert plan.settings(less) == plan.settings(whole) | {"without": ("linear",)}
    assert plan.key(less) != plan.key(whole) and plan.folder(less) != plan.folder(whole)


@pytest.mark.parametrize(
    ("run", "measure", "says"),
    [
        (
            "lolcats_window",
            "perplexity_no_gate",
            "switches off the part 'gate'; the method 'lolcats' of run 'lolcats_window' has linear, window",
        ),
        (
            "teacher",
            "perplexity_no_linear",
            "the method 'softmax' of run 'teacher' has none, it is one whole",
        ),
    ],
)
def test_a_measure_of_a_run_without_that_part_is_refused_by_the_plan(run, measure, says):
    with pytest.raises(ConfigError, match=says):
        Plan(scale="smoke").check_processes(Node("measure", run, measure), 1)


def test_a_measurement_without_a_part_is_of_that_model(tmp_path, monkeypatch):
    """The runner is given a metric that looks at its model."""
    teacher(dtype=torch.float32).save_pretrained(tmp_path / "model")
    metric, options = ModuleType("relinear.measure.looking"), {"window": 8}
    metric.Options = type("Options", (Strict,), {})
    ids = tokens(40)

    def look(model, data, options, job):
        yield Reading(
            "mean", "logits", {}, model(ids, use_cache=False).logits[:, -1].square().mean().item(), None, 1
        )
        yield Reading("chance_perplexity", "text", {}, 1.0, None, 1)
        yield Reading("perplexity", "text", {}, 2.0, None, 1)

    metric.measure = look
    monkeypatch.setitem(sys.modules, metric.__name__, metric)

    def measured(method, given, **more):
        settings = {
            "method": method,
            "options": given,
            "variant": "",
            "metric": "looking",
            "metric_options": {},
            "data": None,
            "init_seed": 0,
        }
        job = Job(
            "looking",
            settings | more,
            {"model": tmp_path / "model"},
            tmp_path,
            tmp_path,
            links=(Link(method, given),),
        )
        return work(job)

    whole, less = measured("lolcats", options), measured("lolcats", options, without=("linear",))
    window = measured("window", options | {"sinks": 0})
    assert less["readings"][0]["value"] == window["readings"][0]["value"] != whole["readings"][0]["value"]
    assert whole["facts"]["collapsed"] is True and "collapsed" not in less["facts"], (
        "said of the model as it was trained alone"
    )
    with pytest.raises(UserError, match="possible: linear, window"):
        measured("lolcats", options, without=("gate",))
