"""What papers say in their text alone: recomputed from their own tables, beside ours."""

import csv
import json
from pathlib import Path

import pytest

from relinear.draw.own import load
from relinear.plan.specs import read

ROOT = Path(__file__).parents[1]


def script(paper):
    return load(
        read(ROOT / f"workflow/papers/{paper}/intext.yaml").script, "draw(spec, measured, about, out)"
    )


def rows(folder, paper):
    with (ROOT / f"results/reference/{folder}/{paper}/intext.csv").open() as file:
        return {row["paper"]: row for row in csv.DictReader(file)}


def test_hedgehogs_shares_are_those_of_its_tables_but_for_one():
    found = rows("wt103_smollm2", "hedgehog")
    assert {paper: row["holds"] for paper, row in found.items()} == {
        "up to 6": "yes", "68.6 %": "yes", "up to 8.7": "", "> 99 %": "no", "99 %": "yes", "28.1": "yes",
        "16.5": "yes",
    }  # fmt: skip
    assert found["> 99 %"]["recomputed"] == "99.3 % and 94.6 %, 97.0 % on average"
    assert found["68.6 %"]["ours"] == "no gap to close" and found["28.1"]["ours"] == "not run"
    assert script("hedgehog").gap(10.0, 20.0, 15.0) == 50.0


def test_lizards_points_are_those_of_its_table_and_its_reduction_of_time_is_none():
    found = rows("qwen", "lizard")
    assert [row["holds"] for row in found.values()] == ["yes", "yes", "yes", "", "no", "yes"]
    assert found["132"]["ours"] == "132 positions"


def test_supras_shares_are_of_the_tokens_that_its_table_1_names():
    supra = script("supra")
    tokens = supra.tokens_of()
    assert sorted(tokens["supra", "Mistral-7B"]) == [2e10, 1e11] and tokens["teacher", "Llama-2-7B"] == [2e12]
    found = rows("smollm2", "supra")
    assert [row["holds"] for row in found.values()] == ["yes", "yes", "", ""]
    record = json.loads((ROOT / "results/reference/scaling/scaling.json").read_text())
    assert supra.speed(record).startswith("2466 at the shape of llama-3-8b")
    assert supra.speed(record | {"rows": []}) == "not run"


@pytest.mark.parametrize("paper", ["hedgehog", "lizard", "supra"])
def test_a_number_that_no_measurement_has_is_not_run(paper, tmp_path):
    from relinear.draw import About

    spec = read(ROOT / f"workflow/papers/{paper}/intext.yaml").spec
    files = {name: ROOT / name.replace("results/", "results/reference/") for name in spec.inputs}
    measured = dict.fromkeys(spec.reads())
    table, page = script(paper).draw(spec, measured, About("smoke", files=files), tmp_path)
    ours = [row["ours"] for row in csv.DictReader(table.open())]
    assert "not run" in ours and not {text for text in ours if "nan" in text}
    assert page.read_text().startswith(f"**{spec.label}.**")
