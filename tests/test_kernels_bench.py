"""The kernels' benchmark: every form computes its operation, the table is resumed and measured again in
parts, and ratios follow from the rows."""

import csv
from functools import partial

import pytest
import torch
from conftest import ROOT

from relinear.benchmarks import kernel_forms as forms
from relinear.benchmarks import kernels
from relinear.benchmarks.campaign import Campaign
from relinear.benchmarks.kernels import Bench, suite
from relinear.draw.beside import VERDICTS
from relinear.draw.kernels import COLUMNS, newest, ratios, read
from relinear.draw.planned import draw_committed
from relinear.errors import UserError
from relinear.plan.specs import read as spec_of
from relinear_kernels import gated_linear_attention_reference, linear_attention_reference

SHAPE = (1, 2, 3, 3, 4, 5)
SMALL = (2, 40, 4, 2, 16, 8)


def fla(module, op, q, k, v, scale=1.0, g=None, **more):
    """fla's ops by their definition."""
    if module == "gla":
        return gated_linear_attention_reference.gated_linear_attention(
            q, k, v, log_gate=g, feature="none", normalize=False
        )
    if module != "simple_gla":
        raise ImportError(f"No module named 'fla.ops.{module}'")
    gates = {} if g is None else {"log_decay": g}
    return linear_attention_reference.linear_attention(q, k, v, feature="none", normalize=False, **gates)


@pytest.fixture
def on_cpu(monkeypatch):
    """The forms without a GPU, a compiler and fla."""
    monkeypatch.setattr(forms, "DEVICE", "cpu")
    monkeypatch.setattr(forms, "_fla", fla)
    attend = lambda args, window, meta=0: partial(  # noqa: E731
        forms.sliding_window_attention, *(args[n] for n in "qkv"), window=window, meta=meta
    )
    monkeypatch.setattr(forms, "flex_window", attend)
    monkeypatch.setattr(forms, "flash_window", attend)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


MAKERS = {
    "linear": forms.linear,
    "a decay a head": partial(forms.linear, gate=True),
    "a gate a channel": forms.gated,
    "window": partial(forms.window, size=8, meta=0),
    "window with first positions": partial(forms.window, size=8, meta=2),
    "hybrid": partial(forms.hybrid, size=8),
    "lizard": forms.lizard,
    "softmax": forms.softmax,
    "taylor": forms.taylor,
    "cross-entropy": forms.cross_entropy,
    "rotary": forms.rotated,
    "tokens": partial(forms.tokens, vocabulary=11),
}


@pytest.mark.parametrize("name", MAKERS)
def test_every_form_computes_its_operation_and_the_gradients_that_it_is_timed_with(on_cpu, name):
    made = MAKERS[name](SMALL)
    assert made
    for provider, form in made.items():
        output = form.run()
        assert form.error is None or form.error(output) < kernels.TOLERANCE, provider
        for leaves in filter(None, (form.leaves, form.maps)):
            for x in leaves:
                x.requires_grad_()
            outputs = kernels.outputs_of(form.run())
            gradients = torch.autograd.grad(outputs, list(leaves), [torch.ones_like(x) for x in outputs])
            assert all(g.isfinite().all() for g in gradients), provider
            for x in leaves:
                x.requires_grad_(False)


@pytest.mark.parametrize("groups", [4, 2])
def test_every_operation_decodes_a_token(on_cpu, groups):
    shape = (2, 1, 4, groups, 16, 8)
    for op in forms.decoded(shape):
        form = next(iter(forms.decoding(op, shape).values()))
        output = kernels.outputs_of(form.run())[0]
        assert output.isfinite().all() and output.numel() == 2 * 4 * 16 and form.moved["decode"] > 0, op


def test_the_suite_names_each_row_once(monkeypatch):
    rows = []
    monkeypatch.setattr(
        Bench,
        "time",
        lambda self, op, shape, make, modes=("forward",): rows.extend((op, shape, mode) for mode in modes),
    )
    suite(object.__new__(Bench))
    assert len(rows) == len(set(rows)) > 100


def run(path, seconds=60.0, anew=False, **how):
    """One call over two providers, then the milliseconds that the file has of each."""
    bench = Bench(Campaign(path, COLUMNS, anew=anew), seconds, **how)
    bench.time(
        "op", SHAPE, lambda shape: {"ours": forms.Form(lambda: None), "peer": forms.Form(lambda: None)}
    )
    with path.open() as file:
        return {row["provider"]: row["ms"] or row["valid"] for row in csv.DictReader(file)}


def test_a_campaign_is_resumed_and_measured_again_in_parts(tmp_path, monkeypatch):
    path, now = tmp_path / "bench.csv", iter("12345678")
    monkeypatch.setattr(kernels, "time_run", lambda *args: {"ms": f"{float(next(now)):.4f}"})
    assert run(path) == {"ours": "1.0000", "peer": "2.0000"}
    assert run(path, only="^op B1") == {"ours": "3.0000", "peer": "4.0000"}
    assert run(path, missing=True) == run(path, only="another") == {"ours": "3.0000", "peer": "4.0000"}
    assert run(path, seconds=-1.0, anew=True) == {"ours": "not run", "peer": "not run"}
    assert run(path, missing=True) == {"ours": "5.0000", "peer": "6.0000"}


def test_what_fails_is_a_row_that_says_why(tmp_path, monkeypatch):
    def fail(*args):
        raise RuntimeError("no room\nat all")

    monkeypatch.setattr(kernels, "time_run", fail)
    assert run(tmp_path / "bench.csv") == {"ours": "failed", "peer": "failed"}
    assert "RuntimeError: no room" in (tmp_path / "bench.csv").read_text()
    assert read(tmp_path / "bench.csv") == []


def test_ratios_are_against_the_floor_the_fastest_peer_and_softmax_attention():
    row = {"op": "op", "shape": "B1", "mode": "forward", "floor_ms": "0.5", "note": "", "commit": "1234567"}
    peers = {"slow": ("9.0", "1234567"), "torch chunked": ("1.0", "1234567"), "fast": ("3.0", "7654321")}
    rows = [row | {"provider": "relinear", "ms": "1.5", "note": "launched, not replayed"}]
    rows += [row | {"provider": name, "ms": ms, "commit": commit} for name, (ms, commit) in peers.items()]
    rows.append(row | {"provider": "SDPA", "op": "softmax attention", "ms": "6.0", "commit": "1234567+"})
    rows.append(row | {"provider": "relinear", "ms": "1.0", "mode": "decode"})
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in ratios(rows).splitlines()
        if line.startswith("|")
    ]
    assert ["op", "B1", "forward", "1.5\u2020", "3.00x", "fast*", "3", "2.00x", "6*+", "4.00x"] in cells
    assert ["op", "B1", "decode", "1", "2.00x", "", "", "", "", ""] in cells
    assert ["softmax attention: SDPA*+", "B1", "forward", "6", "12.00x"] in cells
    text = ratios(rows)
    assert (
        "\\* measured at another commit" in text
        and "+ measured in a tree" in text
        and "\u2020 kernel by kernel" in text
    )
    assert "commit" not in ratios(rows[-1:]) and "kernel by kernel" not in ratios(rows[-1:])


def test_of_an_op_that_two_sessions_measured_the_later_one_counts():
    later, earlier = (
        [{"op": op, "shape": "B1", "mode": "forward", "provider": by, "ms": ms}]
        for op, by, ms in (("a", "relinear", "1"), ("a", "peer", "9"))
    )
    assert newest(later, [*earlier, earlier[0] | {"op": "b"}]) == [*later, earlier[0] | {"op": "b"}]


@pytest.mark.parametrize("paper", ["lizard", "hedgehog"])
def test_a_figure_of_the_rows_and_its_verdicts_are_as_committed(tmp_path, monkeypatch, paper):
    committed, artefact = (
        ROOT / "results/reference/kernels",
        spec_of(ROOT / f"workflow/papers/{paper}/figure6.yaml"),
    )
    tmp_path = tmp_path / "reference/kernels"  # folders beside it are other committed ones
    tmp_path.mkdir(parents=True)
    with pytest.raises(UserError, match="bench.csv is missing"):
        draw_committed(tmp_path, artefact)
    (tmp_path / "bench.csv").write_bytes((committed / "bench.csv").read_bytes())
    made = {path.name: path for path in draw_committed(tmp_path, artefact)}
    assert {"figure6.png", "provenance.json", "claims.csv"} == made.keys()
    place = f"{paper}/figure6"
    assert VERDICTS.committed(tmp_path) == {place: VERDICTS.of(committed / place)}
