"""Hedgehog's Listings 5 to 8: what three models write."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from relinear.draw import About
from relinear.draw.own import load
from relinear.plan.specs import read

ROOT = Path(__file__).parents[1]
ARTEFACT = read(ROOT / "workflow/papers/hedgehog/listings5to8.yaml")


@pytest.fixture
def drawn(tmp_path):
    """The page and the rows, of items as a measurement writes them; `without` fields that are not kept."""

    def draw(without=()):
        measured = dict.fromkeys(ARTEFACT.reads())
        folder = tmp_path / "rouge"
        folder.mkdir(exist_ok=True)
        items = [
            {"item": i, "written": f"answer {i}", "right": f"summary {i}", "ended": i != 2, "rouge1": i / 10}
            for i in range(7)
        ]
        kept = [{name: value for name, value in item.items() if name not in without} for item in items]
        (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in kept))
        measured["samsum_hedgehog", "rouge"] = SimpleNamespace(folder=folder)
        script = load(ARTEFACT.script, "draw(spec, measured, about, out)")
        table, page = script.draw(ARTEFACT.spec, measured, About("smoke"), tmp_path)
        return list(csv.DictReader(table.open())), page.read_text()

    return draw


def test_the_papers_items_stand_beside_each_runs_own_answers(drawn):
    rows, page = drawn()
    assert [row["item"] for row in rows] == ["0", "1", "2", "5"]
    assert [row["written"] for row in rows] == ["answer 0", "answer 1", "answer 2", "answer 5"]
    assert ">     answer 5" in page and ">     summary 5" in page and "answer 3" not in page
    assert "| `samsum_hedgehog` |            0.0 |               yes |           10.0 |" in page
    assert page.count(">     not run") == 8, "two runs of four answers"
    assert "Amanda will text her" in page


def test_where_texts_are_not_kept_the_scores_stand_alone(drawn):
    rows, page = drawn(without=("written", "right"))
    assert [row["rouge1"] for row in rows] == ["0", "0.1", "0.2", "0.5"]
    assert page.count("text not kept") == 4 and "answer 1" not in page and "summary 1" not in page


def test_each_listing_has_an_item_and_each_run_an_answer_of_the_papers():
    options = ARTEFACT.spec.options
    assert {len(options[run]) for run, _ in ARTEFACT.reads()} == {len(options["items"])} == {4}
