"""The bench's table: written row by row, resumed and measured again in parts."""

import csv

from relinear_kernels.bench import Bench

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
    assert run(path, only="peer") == {"ours": "1.0000", "peer": "3.0000"}
    assert run(path, missing=True) == {"ours": "1.0000", "peer": "3.0000"}
    assert run(path, seconds=-1.0) == {"ours": "not run", "peer": "not run"}
    assert run(path, missing=True) == {"ours": "4.0000", "peer": "5.0000"}


def test_what_fails_is_a_row_that_says_why(tmp_path, monkeypatch):
    def fail(*args):
        raise RuntimeError("no room\nat all")

    monkeypatch.setattr("relinear_kernels.bench.measure", fail)
    assert run(tmp_path / "bench.csv") == {"ours": "failed", "peer": "failed"}
    assert "RuntimeError: no room" in (tmp_path / "bench.csv").read_text()
