"""Bytes of states as deployed, and windows that hold no more than a hybrid's."""

import pytest
import torch
from test_laws import TEACHERS, linearized, teacher

from relinear import linearize
from relinear.attention import load, options
from relinear.attention._base import Heads
from relinear.attention.window import HELD, positions_of
from relinear.errors import UserError
from relinear.measure.state_bytes import Options, cached_numbers, measure, state_bytes
from relinear.plan.job import Job
from relinear.plan.options import KEEP, option_defaults
from relinear.plan.plan import Plan
from relinear.plan.strict import ConfigError
from relinear.plan.tables import Address, Table
from relinear.stages._stage import Node, method_file

SMOLLM2 = Heads(hidden=576, heads=9, groups=3, dim=64, scale=64**-0.5)
LLAMA = Heads(hidden=4096, heads=32, groups=8, dim=128, scale=128**-0.5)
QWEN = Heads(hidden=1536, heads=12, groups=2, dim=128, scale=128**-0.5)
SHAPES = {
    "smollm2-135m": SMOLLM2,
    "llama-3-8b": LLAMA,
    "qwen2.5-1.5b": QWEN,
    "many key heads": Heads(48, 6, 6, 8, 8**-0.5),
}
over_shapes = pytest.mark.parametrize("heads", SHAPES.values(), ids=SHAPES)
HYBRIDS = {"lolcats": {"window": 64}, "lizard": {}}


def layer(method, given, heads):
    with torch.device("meta"):
        return load(method)(heads, options(method, given))


def readings(model, method, given, **more):
    job = Job("job", {"method": method, "options": given}, {}, None, None)
    return {(r.metric, r.of): r.value for r in measure(model, None, Options(**more), job)}


@over_shapes
def test_bytes_are_two_a_number_of_keys_and_values_and_four_of_a_linear_state(heads):
    # of a position, of a feature
    cached, linear = 2 * 2 * heads.groups * heads.dim, 4 * heads.heads * (heads.dim + 2)
    assert state_bytes(layer("window", {"window": 100, "sinks": 4}, heads), 7) == 104 * cached
    assert state_bytes(layer("softmax", {}, heads), 1000) == 1000 * cached
    assert state_bytes(layer("hedgehog", {}, heads), 7) == 2 * heads.dim * linear
    assert (
        state_bytes(layer("lizard", {"window": 32, "meta": 2}, heads), 7)
        == 34 * cached + 2 * heads.dim * linear
    )
    assert (
        state_bytes(layer("lolcats", {"window": 64}, heads), 7)
        == 65 * cached + 2 * min(64, heads.dim) * linear
    )


@over_shapes
@pytest.mark.parametrize("method", HYBRIDS)
def test_a_window_of_a_hybrids_bytes_holds_no_more_and_one_position_more_would(method, heads):
    theirs = state_bytes(layer(method, HYBRIDS[method], heads), 1)
    for sinks in (0, 4):
        window = layer("window", {"bytes_of": method, "sinks": sinks}, heads)
        ours, position = state_bytes(window, 1), 2 * 2 * heads.groups * heads.dim
        assert theirs - position < ours <= theirs
        assert cached_numbers(window, 1) == (window.window + sinks) * position // 2


def test_how_many_positions_the_hybrids_are_worth():
    assert {m: positions_of(m, SMOLLM2) for m in HELD} == {"lolcats": 461, "lizard": 528}
    assert {m: positions_of(m, LLAMA) for m in HELD} == {"lolcats": 585, "lizard": 1172}


@over_shapes
@pytest.mark.parametrize(
    ("counted", "number", "by"),
    [("_bf16", 2, "heads"), ("_key_heads", 4, "groups"), ("_key_heads_bf16", 2, "groups")],
)
@pytest.mark.parametrize("method", HYBRIDS)
def test_a_window_of_bytes_counted_otherwise_holds_no_more_and_one_position_more_would(
    method, counted, number, by, heads
):
    features = 2 * (min(64, heads.dim) if method == "lolcats" else heads.dim)
    near = {"lolcats": 65, "lizard": 132}[method]
    position = 2 * 2 * heads.groups * heads.dim
    theirs = near * position + number * getattr(heads, by) * features * (heads.dim + 2)
    ours = state_bytes(layer("window", {"bytes_of": f"{method}{counted}"}, heads), 1)
    assert theirs - position < ours <= theirs


def test_how_many_positions_the_hybrids_are_worth_by_other_accountings():
    """Those that the audit of the bytes asked for."""
    counted = ("bf16", "key_heads", "key_heads_bf16")
    assert [positions_of(f"lizard_{c}", SMOLLM2) for c in counted] == [330, 264, 198]
    assert [positions_of(f"lolcats_{c}", SMOLLM2) for c in counted] == [263, 197, 131]


def test_lizard_with_a_larger_window_and_states_of_key_heads_has_the_bytes_of_lizard():
    runs = Plan().runs
    wide = layer("lizard", runs["lizard_shared_window_392"].options, SMOLLM2)
    assert state_bytes(wide, 1) == state_bytes(layer("lizard", HYBRIDS["lizard"], SMOLLM2), 1)


def test_the_hybrids_that_windows_are_compared_with_are_those_of_the_table():
    """`bytes_of` names a method; the sizes it uses are those of the papers' runs."""
    runs = Plan().runs
    for method, run in (("lolcats", "lolcats_window"), ("lizard", "lizard")):
        assert runs[run].method == runs[f"window_bytes_of_{method}"].options["bytes_of"] == method
        assert options(method, runs[run].options) == options(method, HYBRIDS[method])


def test_a_window_and_whose_bytes_it_has_are_not_both_given_and_sinks_leave_room():
    with pytest.raises(
        ValueError, match="give a window or whose bytes it has; got window 64 and bytes_of 'lizard'"
    ):
        options("window", {"window": 64, "bytes_of": "lizard"})
    with pytest.raises(
        ValueError, match="461 sinks leave no window in the bytes of 'lolcats', 461 positions"
    ):
        layer("window", {"sinks": 461, "bytes_of": "lolcats"}, SMOLLM2)
    for wrong in ({"window": 0}, {"sinks": -1}, {"bytes_of": "hedgehog"}):
        with pytest.raises(ValueError, match=rf"options of 'window'\.{next(iter(wrong))}\b"):
            options("window", wrong)


@pytest.mark.parametrize("family", TEACHERS)
def test_a_model_is_the_sum_of_its_layers_and_of_the_same_method_at_llama_3_8b(family):
    given = {"window": 16}
    found = readings(linearized("lizard", tuple(given.items()), family=family), "lizard", given)
    own = linearized("lizard", tuple(given.items()), family=family).attention_layers()
    assert (
        found["bytes", "model"]
        == sum(state_bytes(x.method, 1) for x in own)
        == 2**20 * found["mebibytes", "model"]
    )
    assert found["bytes", "llama-3-8b"] == 32 * state_bytes(layer("lizard", given, LLAMA), 1)
    # Gemma's local layers, of 12 positions
    kept = sum(type(x.method).__module__.endswith("softmax") for x in own)
    assert (
        found["positions", "model"] == (20 * (len(own) - kept) + 12 * kept) / len(own)
        and found["positions", "llama-3-8b"] == 20
    )


def test_softmax_attention_grows_with_the_sequence_and_a_teacher_s_own_window_does_not():
    short, long = (readings(teacher(), "softmax", {}, length=n) for n in (100, 200))
    assert {k: 2 * v for k, v in short.items()} == long and long["positions", "model"] == 200
    short, long = (readings(teacher("mistral"), "softmax", {}, length=n) for n in (100, 200))
    assert short["bytes", "model"] == long["bytes", "model"] and short["positions", "model"] == 12
    kept = readings(
        linearize(teacher(), "window", **(given := {"window": 8, KEEP: [0]})), "window", given, length=100
    )
    assert kept["positions", "model"] == (100 + 12) / 2


def test_an_encoder_keeps_nothing():
    from test_encoders import teacher as encoder

    with pytest.raises(UserError, match="an encoder keeps no state.*possible: runs of causal models"):
        readings(encoder("bert"), "softmax", {})


@pytest.mark.parametrize(
    "run", ["lizard", "supra_of_scratch", "hedgehog_domain_full", "lizard_full", "needle_lizard"]
)
def test_bytes_stand_behind_nothing_that_trains_and_are_of_the_run_s_method(run):
    plan = Plan(scale="smoke")
    node = plan.node("measure", run, "state_bytes")
    assert plan.parents(node) == {"model": Node("model", plan.run(run).model)}
    assert plan.settings(node)["links"] == [
        {"method": plan.run(run).run.method, "options": plan.run(run).run.options, "steps": []}
    ]


def test_the_plan_refuses_an_encoder_before_any_work():
    plan = Plan(scale="smoke")
    with pytest.raises(
        ConfigError,
        match=(
            "state_bytes counts what a model keeps from one token to the next, and 'tiny-bert' is an encoder;"
            " possible: runs of"
        ),
    ):
        plan.check_processes(plan.node("measure", "cola_softmax", "state_bytes"), 1)


def test_every_table_that_has_a_window_in_it_has_the_bytes_of_its_states_at_both_shapes():
    plan = Plan(scale="smollm2")

    def windowed(name):
        run = plan.run(name).run
        return run.method == "window" or (option_defaults(method_file(run.method)) | run.options).get(
            "window"
        )

    tables = [artefact for artefact in plan.artefacts.values() if isinstance(artefact.spec, Table)]
    for artefact, line in ((table, line) for table in tables for line in table.spec.lines):
        cells = [cell for cell in line.cells.values() if isinstance(cell, Address)]
        if any(windowed(cell.run) for cell in cells):
            assert {"model", "llama-3-8b"} <= {cell.of for cell in cells if cell.measure == "state_bytes"}, (
                artefact.name,
                line.name,
            )
