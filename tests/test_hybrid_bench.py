"""The benchmark of the hybrid's launches: every group leaves its rows, and what fails is a row that says
why."""

import json
import math
from functools import partial

import pytest
import torch

from relinear.benchmarks import hybrid
from relinear.benchmarks import kernel_forms as forms
from relinear_kernels.testing import DEVICE  # turns the interpreter on, before triton is imported

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="rehearses on a CPU what a GPU measures")


@pytest.fixture
def on_cpu(monkeypatch):
    """Small float32 inputs, Triton's interpreter, and a clock that runs an op once."""
    from relinear_kernels import hybrid_attention_triton, hybrid_layer_triton

    monkeypatch.setenv("RELINEAR_KERNELS", "triton")
    monkeypatch.setattr(forms, "DEVICE", "cpu")
    inputs = forms.inputs
    monkeypatch.setattr(forms, "inputs", lambda shape: {n: x.float() for n, x in inputs(shape).items()})
    # a window of one step, as one of 64 is in bfloat16
    monkeypatch.setattr(forms, "hybrid", partial(forms.hybrid, size=16))
    for module, name in ((hybrid_attention_triton, "ONE_LAUNCH"), (hybrid_layer_triton, "tiling")):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(hybrid, "RECORD", (1, 40, 2, 2, 16, 16))
    monkeypatch.setattr(hybrid, "SINGLE", ())
    monkeypatch.setattr(hybrid, "CHECK", (1, 90, 2, 1, 16, 16))

    def once(run, leaves, milliseconds):
        for x in leaves:
            x.requires_grad_()
        out = run()
        if leaves:
            torch.autograd.grad(out.square().sum(), leaves)
        for x in leaves:
            x.requires_grad_(False)
        return {"ms": "1.0"}

    monkeypatch.setattr(hybrid, "time_run", once)


def rows_of(folder):
    return json.loads((folder / "hybrid.json").read_text())


@pytest.mark.parametrize("group", [hybrid.SOFTMAX, hybrid.THREE, *list(hybrid.TILINGS)[:1]])
def test_a_group_leaves_its_rows(on_cpu, tmp_path, group):
    hybrid.measure(group, tmp_path, math.inf)
    rows = rows_of(tmp_path)
    assert [row["mode"] for row in rows][-2:] == ["forward", "forward+backward"]
    assert all(row["ms"] for row in rows if row["mode"] != "gradients")
    if group != hybrid.SOFTMAX:
        assert not any(row["note"] for row in rows)
    if group in hybrid.TILINGS:
        assert float(rows[0]["error"]) > 0, "both paths are one"
        assert float(rows[0]["error"]) < 1e-4
    assert group in hybrid.table(rows)


def test_a_failure_is_a_row(on_cpu, tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("out of resource: shared memory\nmore")

    monkeypatch.setattr(hybrid, "time_run", fails)
    hybrid.measure(hybrid.SOFTMAX, tmp_path, math.inf)
    assert {row["note"] for row in rows_of(tmp_path)} == {"RuntimeError: out of resource: shared memory"}


def test_delta_rule_beside_fla_where_it_imports(on_cpu, tmp_path):
    hybrid.measure(hybrid.DELTA, tmp_path, math.inf)
    ours = [row for row in rows_of(tmp_path) if row["provider"] == forms.OURS]
    assert len(ours) == 2
    assert all(row["ms"] for row in ours), ours


def test_no_row_starts_after_the_limit(on_cpu, tmp_path):
    hybrid.measure(hybrid.SOFTMAX, tmp_path, 0)
    assert {row["note"] for row in rows_of(tmp_path)} == {"not run: time limit"}
