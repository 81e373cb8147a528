"""The leaderboard: rows of all committed folders of a scale, by bytes, each with its commit."""

import csv
import re
import shutil

import pytest
from conftest import ROOT

from relinear.draw import beside, leaderboard, quote
from relinear.errors import UserError

FOLDER = "float32_smollm2"
OURS = ROOT / "results/reference" / FOLDER
PLACE = f"{leaderboard.PLACE}.csv"


def lines(page: str) -> dict[str, list[str]]:
    """The cells of each row below the head, by its run."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()[2:]]
    return {first: rest for first, *rest in cells}


@pytest.fixture
def another(tmp_path, monkeypatch):
    """Enters the row of another lab, with cells in place of Lizard's, beside ours; returns nothing."""
    monkeypatch.setattr(quote, "REFERENCE", tmp_path)
    monkeypatch.setattr(beside, "read_committed", lambda path: path.read_text())
    shutil.copytree(OURS, tmp_path / FOLDER)

    def enter(**cells: str) -> None:
        shutil.copytree(OURS, tmp_path / "lab")
        with (OURS / PLACE).open(newline="") as file:
            rows = [row | cells for row in csv.DictReader(file) if row["run"] == "lizard"]
        with (tmp_path / "lab" / PLACE).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)

    return enter


def test_rows_stand_by_their_bytes_and_the_best_so_far_is_bold():
    page = lines(leaderboard.page("smollm2"))
    assert [float(row[0]) for row in page.values()] == sorted(float(row[0]) for row in page.values())
    least = float("inf")
    for row in page.values():
        value = float(re.search(r"[\d.]+", row[4])[0])
        assert row[4].startswith("**") == (value < least), row
        least = min(least, value)
    assert not any("**0.0" in cell for row in page.values() for cell in row), "nothing recalled is no record"


def test_each_row_leads_to_the_commit_that_its_measurements_name():
    assert {row[-1] for row in lines(leaderboard.page("smollm2")).values()} == {"`8bf4183`"}
    assert lines(leaderboard.page("qwen")) == {}


def test_a_run_of_two_folders_is_the_first_folders(another):
    before = leaderboard.page("smollm2")
    another(run="lizard", state_mib="3")
    assert leaderboard.page("smollm2") == before
    shutil.rmtree(quote.REFERENCE / FOLDER)
    assert lines(leaderboard.page("smollm2"))["Lizard"][0] == "3.00"


@pytest.mark.parametrize("column", ["positions", "f1_beyond"])
def test_a_row_without_a_number_is_refused(another, column):
    another(run="lizard", **{column: "not run"})
    shutil.rmtree(quote.REFERENCE / FOLDER)
    with pytest.raises(UserError, match=f"{column} of lizard is 'not run'"):
        leaderboard.page("smollm2")
