"""The frame of readings, and the one function by which a cell is read from it."""

import csv
import math
from pathlib import Path

import pytest
from synthetic import measurement, reading

from relinear.draw.frame import COLUMNS, frame_of, score, select
from relinear.draw.planned import measured_in

REFERENCE = Path(__file__).parents[1] / "results/reference"
CELLS = {
    "mmlu": ("mmlu", "acc", "mmlu", 100.0),
    "ppl": ("perplexity", "perplexity", None, 1.0),
    "lambada": ("lambada", "acc", "lambada_openai", 100.0),
    "state_mib": ("state_bytes", "mebibytes", "model", 1.0),
}


def of_trainings(*values, stderr=0.1):
    names = ["lizard", *(f"lizard-seed{n}" for n in range(1, len(values)))]
    return {
        (name, "mmlu"): measurement(name, "mmlu", reading("acc", v, stderr, 50, "mmlu"))
        for name, v in zip(names, values, strict=True)
    }


def test_a_frame_has_a_row_a_reading_and_the_columns_of_the_contract():
    frame = frame_of(of_trainings(1.0, 2.0) | {("t2r", "mmlu"): None})
    assert (
        tuple(frame.columns)
        == COLUMNS
        == ("node", "run", "seed", "measure", "metric", "of", "at", "value", "stderr", "n", "why")
    )
    assert list(zip(frame["node"], frame["run"], frame["seed"], frame["at"], strict=True)) == [
        ("results/lizard/mmlu/run.json", "lizard", 0, "{}"),
        ("results/lizard-seed1/mmlu/run.json", "lizard", 1, "{}"),
    ]
    assert tuple(frame_of({}).columns) == COLUMNS and score(frame_of({}), "lizard", "mmlu", "acc") is None


def test_a_score_is_the_mean_over_trainings_and_its_error_that_of_items_and_of_trainings():
    found = score(frame_of(of_trainings(1.0, 2.0, 3.0)), "lizard", "mmlu", "acc", unit=10.0)
    assert (found.value, found.n, found.sd) == (20.0, 50, 10.0) and found.stderr == pytest.approx(
        math.hypot(1.0, 10 / math.sqrt(3))
    )
    one = score(frame_of(of_trainings(1.0, 2.0)), "lizard-seed1", "mmlu", "acc")
    assert (one.value, one.stderr, one.sd) == (2.0, 0.1, None), (
        "a further training by its own name is that one"
    )
    assert score(frame_of(of_trainings(1.0, 2.0, stderr=None)), "lizard", "mmlu", "acc").stderr is None


def test_a_place_is_found_by_its_value_and_two_objects_are_not_mixed():
    two = measurement(
        "t2r",
        "m",
        reading("acc", 0.5, of="a", length=2048),
        reading("acc", 0.6, of="b", length=2048),
        reading("acc", 0.7, of="a"),
    )
    frame = frame_of({("t2r", "m"): two})
    assert (
        score(frame, "t2r", "m", "acc", "b", {"length": 2048.0}).value == 0.6
        and score(frame, "t2r", "m", "acc", at={"length": 1}) is None
    )
    with pytest.raises(ValueError, match="acc is read 2 times: of a, b; say of which"):
        select(frame, "t2r", "m", "acc", at={"length": 2048})


def test_what_is_not_defined_is_no_score():
    undefined = reading("acc", None, None, 0)._replace(why="no window")
    frame = frame_of({("t2r", "m"): measurement("t2r", "m", undefined)})
    assert score(frame, "t2r", "m", "acc") is None and list(select(frame, "t2r", "m", "acc")["why"]) == [
        "no window"
    ]


def test_the_committed_cells_of_lizard_s_table_4_are_scores_of_the_committed_readings():
    folder, checked = REFERENCE / "lizard_smollm2", 0
    for row in csv.DictReader((folder / "lizard/table4.csv").read_text().splitlines()):
        for window in (32, 64, 128, 256):
            run = f"lizard_w{window}_m{row['meta']}"
            for name, (measure, metric, of, unit) in CELLS.items():
                found = {
                    (run + seed, measure): measured_in(folder / "runs" / (run + seed), measure)
                    for seed in ("", "-seed1", "-seed2")
                }
                ours, cell = score(frame_of(found), run, measure, metric, of, unit=unit), f"{name}_w{window}"
                assert f"{ours.value:.6g}" == row[cell], (run, name)
                assert row[f"{cell}_stderr"] == ("" if ours.stderr is None else f"{ours.stderr:.6g}")
                checked += 1
    assert checked == 64
