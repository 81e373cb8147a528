"""The memory of Lizard's gates and the shares of its parts, against their definition and against gates whose
memory is known."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import made
from safetensors.torch import load_file

from relinear.attention import load as method
from relinear.attention import options
from relinear.attention._base import Heads, Inputs
from relinear.draw import About
from relinear.draw.drawing import make
from relinear.measure.gate_stats import METRICS, WEIGHTS, gates, parts_of, seen
from relinear.plan.measured import load
from relinear.plan.plan import Plan
from relinear.plan.specs import read

FIGURE2 = Path(__file__).parents[1] / "workflow/papers/lizard/figure2.yaml"

HEADS, LENGTH = Heads(hidden=24, heads=6, groups=3, dim=8, scale=8**-0.5), 11
FORMS = {
    "one a head": {},
    "shared": {"gates": "shared"},
    "one a channel": {"gates": "channel"},
    "mamba2": {"gate": "mamba2"},
    "low rank": {"gate": "low_rank", "gates": "channel"},
    "pool, one a key head": {"gate": "pool", "state_per": "key_head"},
    "pool over time": {"gate": "pool", "pool": "time"},
    "low rank, tempered": {"gate": "low_rank", "gates": "channel", "gate_temperature": 16.0},
    "linear part with RoPE": {"linear_rope": True},
    "normalised": {"feature": "exp_pm", "normalize": True},
    "no gate": {"gate": "none"},
    "no meta": {"meta": 0},
    "no window": {"window": 0, "meta": 0},
}


def layer(**given):
    torch.manual_seed(0)
    made = method("lizard")(HEADS, options("lizard", {"window": 4, "meta": 2} | given))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return made


def inputs():
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, LENGTH, heads, 8) for heads in (6, 3, 3))
    return Inputs(torch.randn(1, LENGTH, 24), q, k, v, *torch.randn(2, 1, LENGTH, 8))


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_the_parts_sum_to_the_output_and_the_layer_is_left_as_it_was(form):
    lizard, given = layer(**FORMS[form]), inputs()
    parts, v = parts_of(lizard, given), given.v[0].repeat_interleave(2, 1)
    assert set(parts) == {"linear", *(name for name in ("window", "meta") if getattr(lizard.options, name))}
    torch.testing.assert_close(
        sum(torch.einsum("hti,ihd->thd", part, v) for part in parts.values()),
        lizard(given)[0][0],
        rtol=1e-4,
        atol=1e-5,
    )
    shares = [value for (metric, _), value in seen(lizard, given).values.items() if metric == "share"]
    assert sum(shares) == pytest.approx(1) and not lizard.switched_off


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("no gate", "pool over time")])
@torch.no_grad()
def test_gates_are_those_by_which_the_layer_forgets(form):
    lizard, given = layer(**FORMS[form]), inputs()
    true = lizard._log_gate(given)[0].exp()  # [T, M], or [T, M, D] which both signs of the features share
    true = torch.cat([true, true], -1) if true.ndim == 3 else true[..., None].expand(-1, -1, 16)
    torch.testing.assert_close(
        gates(lizard, given), true.transpose(0, 1).repeat_interleave(6 // true.shape[1], 0), rtol=0, atol=1e-6
    )


@torch.no_grad()
def test_meta_tokens_count_beyond_the_window_and_equal_weights_are_one():
    lizard, given = layer(), inputs()
    parts = parts_of(lizard, given)
    beyond = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH) >= 4
    assert (
        not parts["window"][:, beyond].any()
        and not parts["meta"][:, ~beyond].any()
        and not parts["meta"][:, :, 2:].any()
    )
    equal = given._replace(q=torch.zeros_like(given.q))
    assert seen(lizard, equal).values["meta_weight", "meta"] == pytest.approx(1)


@torch.no_grad()
def test_what_is_switched_off_has_no_part_and_an_open_gate_no_memory():
    lizard, given = layer(), inputs()
    lizard.switch_off(["window", "gate"])
    assert set(parts_of(lizard, given)) == {"linear"} and seen(lizard, given).memory is None
    lizard.switch_off(["linear"])
    found = parts_of(lizard, given)
    v = given.v[0].repeat_interleave(2, 1)
    torch.testing.assert_close(
        torch.einsum("hti,ihd->thd", found["window"] + found["meta"], v),
        lizard(given)[0][0],
        rtol=1e-4,
        atol=1e-5,
    )


@torch.no_grad()
def test_a_gate_that_depends_on_earlier_tokens_has_no_memory_of_one():
    assert seen(layer(**FORMS["pool over time"]), inputs()).memory is None


@torch.no_grad()
def test_the_memory_of_an_untrained_gate_is_that_of_its_bias():
    fresh = method("lizard")(HEADS, options("lizard", {"gate_bias": 4.0}))
    assert seen(fresh, inputs()).memory == pytest.approx(1 + math.exp(4), rel=1e-4)  # 1 / (1 - sigmoid(b))


# --- as a measurement ---


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    plan = Plan(scale="smoke", results=tmp_path_factory.mktemp("gates"))
    made(plan, "distill lizard_w3_m2")
    return {
        run: load(made(plan, f"measure {run} gate", f"measure {run} gate_stats"))
        for run in ("teacher", "lizard_w3_m2")
    }


def test_every_layer_and_head_is_read_with_its_error(found):
    for metric, of in METRICS:
        places = {tuple(r.at.items()): r for r in found["lizard_w3_m2"].all(metric, of)}
        assert set(places) == {
            (),
            *((("layer", n),) for n in range(2)),
            *((("layer", n), ("head", h)) for n in range(2) for h in range(6)),
        }
        assert all(r.n == 2 and r.stderr is not None for r in places.values())
    of_heads = [r.value for r in found["lizard_w3_m2"].all("share", "linear") if "head" in r.at]
    assert found["lizard_w3_m2"].find("share", "linear").value == pytest.approx(sum(of_heads) / 12)
    low, median, high = (found["lizard_w3_m2"].find("memory", q).value for q in ("p10", "p50", "p90"))
    assert 1 <= low < median < high


def test_the_weights_of_one_head_are_kept(found):
    tensors = load_file(found["lizard_w3_m2"].folder / WEIGHTS)
    assert {name.partition(".")[0] for name in tensors} == {"linear", "window", "meta"}
    assert len({name.partition(".")[2] for name in tensors}) == 1 and all(
        x.shape == (10, 10) for x in tensors.values()
    )


def test_a_run_without_a_gate_says_so(found):
    assert {(r.metric, r.of): (r.value, r.why) for r in found["teacher"].readings} == dict.fromkeys(
        METRICS, (None, "softmax has no gate")
    )


# --- Lizard's Figure 2 ---


def test_figure_2_is_drawn_of_what_was_kept_and_judges_the_paper_s_window(found, tmp_path):
    ours = found["lizard_w3_m2"]
    measured = {("lizard_w3_m2", "gate_stats"): ours, ("lizard", "gate_stats"): ours._replace(run="lizard")}
    for number, given in enumerate((measured, {("lizard_w3_m2", "gate_stats"): None})):
        picture, _, _, claims = make(read(FIGURE2), given, About("smoke"), tmp_path / str(number))
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert ("meta_weight was not run" in claims.read_text()) == (number == 1)


def test_figure_2_s_equal_scores_are_those_of_the_kernels():
    spec = read(FIGURE2).spec.options
    loaded = importlib.util.spec_from_file_location("figure2", FIGURE2.with_suffix(".py"))
    figure2 = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(figure2)
    lizard, given = layer(window=spec["window"], meta=spec["meta"], gate="pool"), inputs()
    parts = parts_of(lizard, given._replace(q=torch.zeros_like(given.q)))
    drawn = figure2.drawn(**{**spec, "positions": LENGTH})
    for part in ("window", "meta"):  # of equal scores, alpha times as much
        np.testing.assert_allclose(parts[part][0].detach() / lizard.alpha[0].item(), drawn[part], atol=1e-6)
    # Features of q = 0 are all alike, so the products are; a gate of logit log(9) is 0.9.
    lizard, given = layer(window=spec["window"], meta=spec["meta"], gate="pool"), inputs()
    with torch.no_grad():
        lizard.w_k.zero_()
    alike = given._replace(q=torch.zeros_like(given.q), k=torch.full_like(given.k, math.log(9)))
    gated = parts_of(lizard, alike)["linear"][0].detach()
    np.testing.assert_allclose(gated / gated[0, 0], drawn["linear"], atol=1e-5)
