"""Benchmarks share one campaign and one command line."""

import importlib
import json
import sys

import pytest
from conftest import ROOT

from relinear.benchmarks import command
from relinear.benchmarks.campaign import Campaign, session
from relinear.benchmarks.decoding import COLUMNS as DECODING
from relinear.benchmarks.generation import COLUMNS as GENERATION
from relinear.benchmarks.parity import COLUMNS as PARITY
from relinear.errors import UserError

BENCHMARKS = ("generation", "training", "decoding", "parity", "kernels")
REFERENCE = ROOT / "results/reference"


def test_a_row_is_on_the_disk_before_the_next_and_a_later_call_finds_it(tmp_path):
    path = tmp_path / "speed.csv"
    Campaign(path, ("run", "ms")).add({"run": "lizard", "ms": 1 / 3})
    assert path.read_text() == "run,ms\nlizard,0.333333\n"
    later = Campaign(path, ("run", "ms"))
    assert later.rows == [{"run": "lizard", "ms": "0.333333"}]
    later.add({"run": "supra"})
    assert path.read_text() == "run,ms\nlizard,0.333333\nsupra,\n"
    assert Campaign(path, ("run", "ms"), anew=True).rows == []


def test_a_line_that_was_cut_short_is_no_row(tmp_path):
    (tmp_path / "speed.csv").write_text("run,ms\nlizard,1\nsupra,2")
    assert Campaign(tmp_path / "speed.csv", ("run", "ms")).rows == [{"run": "lizard", "ms": "1"}]


def test_a_json_holds_the_rows_in_the_provenance(tmp_path):
    campaign = Campaign(tmp_path / "speed.json")
    campaign.describe(**session("a test"), left_out=[])
    campaign.add({"run": "lizard", "loss": [4.0, 2.0]})
    again = Campaign(tmp_path / "speed.json")
    assert again.rows == [{"run": "lizard", "loss": [4.0, 2.0]}] and "rows" not in again.about
    assert {"command", "commit", "dirty", "started", "versions", "left_out", "rows"} == json.loads(
        campaign.path.read_text()
    ).keys()


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [("a.csv", "run,seconds\n", "has other columns"), ("a.json", "[1]", "is no JSON object")],
)
def test_a_file_of_something_else_is_refused_and_stays(tmp_path, name, text, says):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=f"{says}.*another --out"):
        Campaign(tmp_path / name, ("run", "ms") if name.endswith("csv") else ())
    assert (tmp_path / name).read_text() == text


@pytest.mark.parametrize(
    ("path", "columns"),
    [
        ("efficiency/efficiency.csv", GENERATION),
        ("decoding/decoding.csv", DECODING),
        ("parity/parity.csv", PARITY),
    ],
)
def test_committed_rows_are_read_and_written_again_byte_for_byte(tmp_path, path, columns):
    campaign = Campaign(REFERENCE / path, columns)
    assert campaign.rows and campaign.about["dtype"] in ("float32", "bfloat16")
    Campaign(tmp_path / "rows.csv", columns).replace(campaign.rows)
    assert (tmp_path / "rows.csv").read_text() == (REFERENCE / path).read_text()


SESSIONS = sorted(set((REFERENCE / "scaling").glob("*.json")) - {REFERENCE / "scaling/provenance.json"})


@pytest.mark.parametrize("path", SESSIONS, ids=lambda path: path.stem)
def test_committed_sessions_of_training_are_read(path):
    campaign = Campaign(path)
    assert {"command", "commit", "versions", "device", "started"} <= campaign.about.keys() and campaign.rows


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["--gpus", "1", "2", "--runs", "supra", "lizard"], ([1, 2], ["supra", "lizard"])),
        (["--gpus", "4"], ([4], None)),
        (["--runs", "lizard", "--gpus", "1", "--gpus", "2"], ([1, 2], ["lizard"])),
    ],
)
def test_an_option_of_several_values_takes_all_words_after_it(monkeypatch, words, given):
    seen = []

    def main(gpus: list[int] | None = None, runs: list[str] | None = None) -> None:
        seen.append((gpus, runs))

    monkeypatch.setattr(sys, "argv", ["benchmark", *words])
    with pytest.raises(SystemExit) as end:
        command.run(main)
    assert not end.value.code and seen == [given]


@pytest.mark.parametrize("words", [["--gpus"], ["--gpus", "two"], ["--cores", "1"], ["1"]])
def test_words_that_no_option_takes_are_refused(monkeypatch, words):
    def main(gpus: list[int] | None = None) -> None:
        raise AssertionError("called")

    monkeypatch.setattr(sys, "argv", ["benchmark", *words])
    with pytest.raises(SystemExit) as end:
        command.run(main)
    assert end.value.code == 2


@pytest.mark.parametrize(
    ("name", "words", "says"),
    [
        ("decoding", ["--tokens", "10"], "--tokens must be at least 1024, .*; got 10"),
        ("generation", ["--runs", "supra", "llama"], "no runs llama to generate with; have teacher, "),
    ],
)
def test_a_users_mistake_is_one_line(monkeypatch, tmp_path, name, words, says):
    monkeypatch.setattr(sys, "argv", [name, "--out", str(tmp_path / "out"), *words])
    with pytest.raises(SystemExit, match=f"^error: {says}"):
        command.run(importlib.import_module(f"relinear.benchmarks.{name}").main)
    assert not (tmp_path / "out").exists()


OPTIONS = {
    "generation": "--out --seconds --runs",
    "training": "--out --gpus --shape --runs --length --seconds --dtype --device",
    "decoding": "--out --tokens --jobs",
    "parity": "--text --out --length --new-tokens --threads",
    "kernels": "--out --seconds --only --missing",
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_the_options_that_the_docs_quote(monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit):
        command.run(importlib.import_module(f"relinear.benchmarks.{name}").main)
    said = capsys.readouterr().out
    assert all(option in said for option in OPTIONS[name].split()) and not any(
        hidden in said for hidden in ("--phase", "--until")
    )


def test_every_benchmark_is_a_rule():
    rules = (ROOT / "workflow/rules/benchmarks.smk").read_text()
    missing = [name for name in BENCHMARKS if f"{{PYTHON}} relinear.benchmarks.{name} " not in rules]
    # the verb of the command line is it
    assert missing == ["generation"] and "{PYTHON} relinear.cli benchmark " in rules


def test_there_is_one_parser_and_one_provenance():
    texts = {
        path.relative_to(ROOT / "src/relinear").as_posix(): path.read_text()
        for path in (ROOT / "src").rglob("*.py")
    }
    assert not [path for path, text in texts.items() if "argparse" in text]
    assert sorted(path for path, text in texts.items() if "git_state()" in text) == [
        "benchmarks/campaign.py",
        "stage.py",
    ]
