"""Long sequences: the size and the accuracy of a state stay the same over tens of thousands of steps, and
prompts need no T x T matrix."""

import copy
import json
import math

import pytest
import torch
from test_laws import CASES, WINDOW, close, name, of, one_layer, tokens
from torch.utils._python_dispatch import TorchDispatchMode

from relinear.benchmarks import decoding
from relinear.benchmarks.campaign import Campaign
from relinear.errors import UserError
from relinear.linearize.state import nbytes
from relinear_kernels.testing import laid_out

STEPS = 20_000
LONG = [  # every method, and every kind of state and of sum
    ("t2r", {}),
    ("hedgehog", {}),
    ("hedgehog", {"feature": "exp_pm"}),
    ("supra", {}),
    ("supra", {"decay": "none"}),
    ("lolcats", {"window": WINDOW}),
    ("lolcats", {"variant": "paper", "feature": "elu", "window": WINDOW}),
    ("lizard", {"window": WINDOW}),
]


def leaves(state):
    return [state] if isinstance(state, torch.Tensor) else [x for part in state for x in leaves(part)]


def piece(inputs, cut=slice(None), dtype=torch.float32):
    return inputs._replace(
        **{f: None if (x := getattr(inputs, f)) is None else x[:, cut].to(dtype) for f in inputs._fields}
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG, ids=name)
def test_state_and_normaliser_do_not_drift_over_20_000_steps(case):
    """Float32, one token at a time, against the parallel form in float64 of the same weights and inputs.
    Measured: below 3e-6."""
    method, inputs = one_layer(case, STEPS)
    method, rounded = method.float().requires_grad_(False), piece(inputs)
    state, sizes = None, set()
    with torch.inference_mode():
        for t in range(STEPS):
            y, state = method.step(piece(rounded, slice(t, t + 1)), state)
            sizes.add(nbytes(state))
    assert len(sizes) == 1 and sizes == {nbytes(method.init_state(2))}
    exact, exact_state = copy.deepcopy(method).double()(piece(rounded, dtype=torch.float64))
    close(y, exact[:, -1:])
    for got, expected in zip(leaves(laid_out(state)), leaves(laid_out(exact_state)), strict=True):
        if not expected.is_floating_point():
            assert torch.equal(got, expected)
        elif expected.isfinite().all():  # a running maximum that no feature needs stays at -inf
            assert got.isfinite().all()
            if expected.any():
                close(got, expected)


class Largest(TorchDispatchMode):
    """The largest number of elements of any tensor that is made in this context."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            # an expanded view holds less
            if isinstance(x, torch.Tensor) and x.untyped_storage().nbytes() >= x.numel() * x.element_size():
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("case", [c for c in CASES if c[0] != "softmax"], ids=name)
def test_a_prompt_twice_as_long_makes_tensors_at_most_twice_as_large(case):
    model, largest = of(case, dtype=torch.float32), {}
    # A multiple of the window, for the first blocks of a window hold less than the others.
    short = max(512, 64 * max(getattr(layer.method, "window", 0) for layer in model.attention_layers()))
    for length in (short, 2 * short):
        with torch.inference_mode(), Largest() as seen:
            model(tokens(length, batch=1), use_cache=True, logits_to_keep=1)
        largest[length] = seen.elements
    assert largest[2 * short] <= 2.01 * largest[short]


@pytest.mark.parametrize("run", ["softmax teacher", "Lizard"])
def test_the_measurement_of_long_decoding_sees_what_grows(run, capsys):
    decoding.decode(run, 1024)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["tokens"] for r in rows] == [1] + [math.ceil(1024 * i / 10) for i in range(1, 11)]
    model, _ = decoding.build(run)
    per_token = 2 * 2 * 2 * 32 * 4  # layers, k and v, key heads, head dimension, bytes
    expected = (
        [model.state_bytes()] * 11
        if run == "Lizard"
        else [per_token * (decoding.PROMPT + r["tokens"] - 1) for r in rows]
    )
    assert [r["state_bytes"] for r in rows] == expected
    assert all(r["ms_per_token"] > 0 for r in rows[1:])


@pytest.mark.parametrize("run", ["softmax teacher", "Hedgehog"])
def test_early_and_late_tokens_are_timed_in_turns(run, capsys):
    decoding.turns(run, 1024)
    early, late = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (early["tokens"], late["tokens"]) == (102 + 96, 922 + 96)
    assert early["ms_per_token"] > 0 and late["ms_per_token"] > 0
    assert (early["state_bytes"] == late["state_bytes"]) == (run == "Hedgehog")


def test_what_a_measurement_reached_is_held_against_its_targets(tmp_path):
    decode = [
        {"phase": "decode", "run": "T2R", "tokens": 1 + 100 * i, "process_mib": 100.0 + i} for i in range(11)
    ]
    prefill = [{"phase": "prefill", "run": "T2R", "tokens": 50, "seconds": s} for s in (1.0, 2.2)]
    turns = [{"phase": "turns", "run": "T2R", "tokens": 50, "ms_per_token": ms} for ms in (2.0, 2.1)]
    rows = [dict.fromkeys(decoding.COLUMNS) | row for row in decode + prefill + turns]
    assert decoding.figures_of(rows) == {
        "T2R": dict(zip(decoding.TARGETS, (2.1 / 2.0, pytest.approx(0.10), 2.2), strict=True))
    }
    Campaign(tmp_path / "decoding.csv", decoding.COLUMNS).replace(rows)
    earlier = {
        name: decoding.earlier(Campaign(tmp_path / f"{name}.csv", decoding.COLUMNS))
        for name in ("decoding", "none")
    }
    assert earlier == {"decoding": rows, "none": []}


def test_a_call_that_measures_nothing_leaves_rows_and_provenance_as_they_are(tmp_path, monkeypatch):
    measured = []

    def phase(name, run, length):
        measured.append((name, run))
        tenths = [{"tokens": length * i // 10, "process_mib": 100.0} for i in range(11)]
        parts = {
            "decode": tenths,
            "prefill": [{"tokens": length // 2, "seconds": 1.0}, {"tokens": length, "seconds": 2.0}],
            "turns": [{"tokens": length // 5, "ms_per_token": 2.0}, {"tokens": length, "ms_per_token": 2.0}],
        }
        return [
            dict.fromkeys(decoding.COLUMNS) | row | {"phase": name, "run": run, "state_bytes": 6696960}
            for row in parts[name]
        ]

    monkeypatch.setattr(decoding, "run_phase", phase)
    decoding.main(tmp_path, 1024, 1)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    count = len(measured)
    decoding.main(tmp_path, 1024, 1)
    assert (
        len(measured) == count == 3 * len(decoding.RUNS)
        and {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
    )
    rows = [
        row
        for row in decoding.earlier(Campaign(tmp_path / "decoding.csv", decoding.COLUMNS))
        if row["run"] != "T2R"
    ]
    Campaign(tmp_path / "decoding.csv", decoding.COLUMNS).replace(rows)
    monkeypatch.setattr(decoding, "run_phase", lambda *_: (_ for _ in ()).throw(UserError("killed")))
    with pytest.raises(UserError, match="killed"):
        decoding.main(tmp_path, 1024, 1)
    assert decoding.earlier(Campaign(tmp_path / "decoding.csv", decoding.COLUMNS)) == rows, (
        "runs that were measured before are kept"
    )
