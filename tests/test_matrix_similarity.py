"""Attention matrices beside the teacher's: the numbers of known matrices, and of a model that is its own
teacher."""

import math

import pytest
import torch
from conftest import made

from relinear.linearize.model import linearize
from relinear.measure.matrix_similarity import METRICS, READ_OTHERWISE, compare, cosine, spectra
from relinear.plan.measured import load
from relinear.plan.plan import Plan


def test_of_known_matrices():
    eye, ones = torch.eye(4, dtype=torch.float64)[None], torch.ones(1, 4, 4, dtype=torch.float64)
    assert cosine(eye, ones).item() == pytest.approx(4 / (2 * 4))
    apart = math.sqrt((4 - 1) ** 2 + 3)  # singular values 1, 1, 1, 1 and 4, 0, 0, 0
    assert spectra(eye, ones).flatten().tolist() == pytest.approx(
        [apart / 2, apart / 2, (3 + 3) / 4, (3 + 3) / 4]
    )
    assert spectra(ones, eye).flatten().tolist() == pytest.approx(
        [apart / 2, apart / 4, (3 + 3) / 4, (3 + 3) / 4]
    )
    assert spectra(eye, 3 * eye).flatten().tolist() == pytest.approx([2.0] * 4) and cosine(
        eye, 3 * eye
    ).item() == pytest.approx(1.0)
    assert spectra(2 * eye, 3 * eye).flatten().tolist() == pytest.approx([1.0, 0.5, 0.5, 1.0])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    plan = Plan(scale="smoke", results=tmp_path_factory.mktemp("similarity"))
    made(plan, "finetune supra")
    return {
        run: load(made(plan, f"measure {run} gate", f"measure {run} matrix_similarity"))
        for run in ("teacher", "supra")
    }


def test_a_teacher_is_like_itself_and_supra_is_not(found):
    same = {name: found["teacher"].find(name, "attention").value for name in (*METRICS, *READ_OTHERWISE)}
    assert all(value == pytest.approx(1.0) for name, value in same.items() if name.startswith("cosine"))
    assert all(
        value == pytest.approx(0.0, abs=1e-5) for name, value in same.items() if name.startswith("singular")
    )
    assert found["supra"].find("cosine", "attention").value < 0.999
    assert found["supra"].find("singular_values", "attention").value > 100 * same["singular_values"]


def test_every_layer_and_head_is_read_with_its_error(found):
    heads = found["supra"].all("cosine_normalised")
    assert {(r.at["layer"], r.at["head"]) for r in heads if r.at} == {
        (layer, head) for layer in range(2) for head in range(6)
    }
    assert all(r.n == 2 and r.stderr is not None for r in heads)


def test_the_other_readings_are_means_over_all_heads_that_say_what_they_are(found):
    for name in READ_OTHERWISE:
        [of_all] = found["supra"].all(name)
        assert of_all.at == {} and of_all.n == 2 and of_all.stderr is not None
    mean = {name: found["supra"].find(name, "attention").value for name in (*METRICS, *READ_OTHERWISE)}
    # a mean is no more than the root of the mean of squares, over the same number
    for rows in ("", "_normalised"):
        assert 0 < mean[f"singular_values{rows}_mean"] <= mean[f"singular_values{rows}"]
    assert mean["cosine_absolute"] != pytest.approx(mean["cosine_normalised"], rel=1e-3), (
        "parts of a row's sum cancel: keys are turned after the map"
    )


def test_rows_are_divided_by_the_absolute_value_of_their_sums():
    """SUPRA's rows do not sum to 1: normalised numbers differ from the others, and do not depend on a row's
    scale."""
    from test_laws import teacher

    softmax, supra = linearize(teacher(), "softmax"), linearize(teacher(), "supra")
    tokens = torch.arange(1, 25)[None]
    plain = dict(zip((*METRICS, *READ_OTHERWISE), compare(softmax, supra, tokens).unbind(-1), strict=True))
    with torch.no_grad():
        for layer in supra.attention_layers():
            of = layer.method.attention_weights
            layer.method.attention_weights = lambda inputs, of=of: 7 * of(inputs)
    scaled = dict(zip((*METRICS, *READ_OTHERWISE), compare(softmax, supra, tokens).unbind(-1), strict=True))
    for name in (
        "singular_values_normalised",
        "singular_values_normalised_l1",
        "singular_values_absolute",
        "cosine_absolute",
        "cosine_of_rows",
    ):
        assert torch.allclose(plain[name], scaled[name]), name
    assert not torch.allclose(plain["singular_values"], scaled["singular_values"], rtol=0.1)
