"""Attention matrices beside the teacher's: the numbers of known matrices, and of a model that is its own teacher."""

import math

import pytest
import torch
from conftest import made

from relinear.linearize.model import linearize
from relinear.measure.matrix_similarity import METRICS, compare, cosine, spectra
from relinear.plan.plan import Plan
from relinear.plan.readings import load


def test_of_known_matrices():
    eye, ones = torch.eye(4, dtype=torch.float64)[None], torch.ones(1, 4, 4, dtype=torch.float64)
    assert cosine(eye, ones).item() == pytest.approx(4 / (2 * 4))
    assert spectra(eye, ones).item() == pytest.approx(math.sqrt((4 - 1) ** 2 + 3) / 2)  # singular values 1, 1, 1, 1 and 4, 0, 0, 0
    assert spectra(eye, 3 * eye).item() == pytest.approx(2.0) and cosine(eye, 3 * eye).item() == pytest.approx(1.0)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    plan = Plan(scale="smoke", results=tmp_path_factory.mktemp("similarity"))
    made(plan, "finetune supra")
    return {run: load(made(plan, f"measure {run} gate", f"measure {run} matrix_similarity")) for run in ("teacher", "supra")}


def test_a_teacher_is_like_itself_and_supra_is_not(found):
    same = {name: found["teacher"].find(name, "attention").value for name in METRICS}
    assert all(same[name] == pytest.approx(1.0) for name in METRICS if name.startswith("cosine"))
    assert all(same[name] == pytest.approx(0.0, abs=1e-6) for name in METRICS if name.startswith("singular"))
    assert found["supra"].find("cosine", "attention").value < 0.999
    assert found["supra"].find("singular_values", "attention").value > 100 * same["singular_values"]


def test_every_layer_and_head_is_read_with_its_error(found):
    heads = found["supra"].all("cosine_normalised")
    assert {(r.at["layer"], r.at["head"]) for r in heads if r.at} == {(layer, head) for layer in range(2) for head in range(6)}
    assert all(r.n == 2 and r.stderr is not None for r in heads)


def test_rows_are_divided_by_the_absolute_value_of_their_sums():
    """SUPRA's rows do not sum to 1: normalised numbers differ from the others, and do not depend on a row's scale."""
    from test_laws import teacher

    softmax, supra = linearize(teacher(), "softmax"), linearize(teacher(), "supra")
    tokens = torch.arange(1, 25)[None]
    plain = dict(zip(METRICS, compare(softmax, supra, tokens).unbind(-1), strict=True))
    with torch.no_grad():
        for layer in supra.attention_layers():
            of = layer.method.attention_weights
            layer.method.attention_weights = lambda inputs, of=of: 7 * of(inputs)
    scaled = dict(zip(METRICS, compare(softmax, supra, tokens).unbind(-1), strict=True))
    assert torch.allclose(plain["singular_values_normalised"], scaled["singular_values_normalised"])
    assert not torch.allclose(plain["singular_values"], scaled["singular_values"], rtol=0.1)
