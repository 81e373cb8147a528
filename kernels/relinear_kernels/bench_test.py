"""The bench's table: written row by row, resumed and measured again in parts."""

import csv

from relinear_kernels.bench import Bench, ratios

SHAPE = (1, 2, 3, 3, 4, 5)


def run(path, seconds=60.0, **how):
    """One run over two providers, then the milliseconds the file has of each."""
    bench = Bench(path, seconds, **how)
    for provider in ("ours", "peer"):
        bench.row("op", provider, SHAPE, "forward", lambda: None, [])
    with open(path) as file:
        return {row["provider"]: row["ms"] or row["valid"] for row in csv.DictReader(file)}


def test_a_run_is_resumed_and_measured_again_in_parts(tmp_path, monkeypatch):
    path, now = tmp_path / "bench.csv", iter("12345678")
    monkeypatch.setattr("relinear_kernels.bench.measure", lambda *args: (float(next(now)), True, 0.0, 0.0))
    assert run(path) == {"ours": "1.0000", "peer": "2.0000"}
    assert run(path, only="^op peer|none of them") == {"ours": "1.0000", "peer": "3.0000"}
    assert run(path, missing=True) == {"ours": "1.0000", "peer": "3.0000"}
    assert run(path, seconds=-1.0) == {"ours": "not run", "peer": "not run"}
    assert run(path, missing=True) == {"ours": "4.0000", "peer": "5.0000"}


def test_what_fails_is_a_row_that_says_why(tmp_path, monkeypatch):
    def fail(*args):
        raise RuntimeError("no room\nat all")

    monkeypatch.setattr("relinear_kernels.bench.measure", fail)
    assert run(tmp_path / "bench.csv") == {"ours": "failed", "peer": "failed"}
    assert "RuntimeError: no room" in (tmp_path / "bench.csv").read_text()


def test_ratios_are_against_the_floor_and_the_fastest_peer():
    row = {"op": "op", "shape": "B1", "mode": "forward", "floor_ms": "0.5", "note": ""}
    peers = {"slow": ("9.0", ""), "torch chunked": ("1.0", ""), "fast": ("3.0", "features given; measured at 1234567")}
    rows = [row | {"provider": "relinear", "ms": "1.5", "note": "launched, not replayed"}]
    rows += [row | {"provider": name, "ms": ms, "note": note} for name, (ms, note) in peers.items()]
    rows.append(row | {"provider": "relinear", "ms": "1.0", "mode": "decode"})
    text = ratios(rows)
    assert "| op | B1 | forward | 1.5\u2020 | 3.00x | fast* | 3 | 2.00x |" in text and "| op | B1 | decode | 1 | 2.00x |  |  |  |" in text
    assert "\\* measured at an earlier commit" in text and "\u2020 kernel by kernel" in text
    assert "earlier" not in ratios(rows[-1:]) and "kernel by kernel" not in ratios(rows[-1:])
