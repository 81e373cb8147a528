"""The index of all tables and figures, from specs and committed results; test_quote.py holds the committed
page to it."""

import json
from pathlib import Path

import pytest
from synthetic import paper

from relinear.draw.index import page
from relinear.draw.report import places_of
from relinear.files import sha256
from relinear.plan.specs import available, papers

ROOT = Path(__file__).parents[1]


def test_every_label_of_every_paper_stands_on_the_page_once():
    found = page(ROOT / "workflow", ROOT / "results/reference")
    for listed in papers(ROOT / "workflow/papers").values():
        for label in listed.labels:
            assert sum(found.count(f"{label}{end}") for end in (" ", ",", ".\n")) == 1, label


def test_what_is_not_committed_is_not_measured_and_not_drawn(tmp_path):
    path = paper(
        tmp_path, columns=[{"name": "acc", "measure": "mmlu", "metric": "acc"}], rows=[{"run": "lizard"}]
    )
    (path.parent / "paper.yaml").write_text("{title: A paper, labels: [Table 1, Table 2]}")
    found = page(tmp_path, tmp_path / "reference")
    [row] = [line for line in found.splitlines() if line.startswith("| Table 1")]
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [
        "Table 1",
        "a table",
        "`snakemake lizard_table1`",
        "`results/<scale>/lizard/table1.csv`",
        "`lizard`",
        "not measured",
        "not drawn yet",
        "",
        "no",
    ]
    assert "Missing, 1 of 2: Table 2." in found


@pytest.mark.parametrize("results", ["results/mini", "/tmp/res/mini"])
def test_minutes_are_those_of_the_stages_behind_and_verdicts_those_of_the_claims_file(tmp_path, results):
    """Wherever the results were when the stages were made."""
    claims = [{"claim": "c", "source": "s", "left": "lizard", "right": "t2r", "column": "acc", "op": ">"}]
    paper(
        tmp_path,
        columns=[{"name": "acc", "measure": "mmlu", "metric": "acc"}],
        rows=[{"run": "lizard"}, {"run": "t2r"}],
        claims=claims,
    )
    reference = tmp_path / "reference"
    for folder, minutes, parents in (
        ("models/teacher", 1, []),
        ("runs/lizard/distill", 10, ["models/teacher"]),
        ("runs/lizard/finetune", 100, ["runs/lizard/distill", "models/teacher"]),
        ("runs/lizard/mmlu", 1000, ["runs/lizard/finetune"]),
        ("runs/t2r/mmlu", 2000, ["models/teacher"]),
        ("runs/lizard/gate", 0, []),
        ("runs/t2r/gate", 0, []),
        ("runs/t2r/needle", 50000, ["models/teacher"]),
    ):
        path = reference / "mini" / folder
        path.mkdir(parents=True)
        found = ", ".join(f'"p{i}": {{"path": "{results}/{parent}"}}' for i, parent in enumerate(parents))
        (path / "run.json").write_text(
            f'{{"wall_seconds": {60 * minutes}, "parents": {{{found}}}, "hardware": {{"device": "cuda"}}}}'
        )
    (reference / "mini/lizard").mkdir()
    (reference / "mini/claims.csv").write_text(
        "drawing,claim,verdict\nlizard/table1,a,reproduced\nlizard/table1,b,not tested\n"
        "lizard/table1,c,reproduced\nlizard/table2,a,contradicted\n"
    )
    [row] = [line for line in page(tmp_path, reference).splitlines() if line.startswith("| Table 1")]
    assert (
        "3111 (mini)" in row
        and "`lizard`, `t2r`; a GPU" in row
        and "2 reproduced, 1 not tested (mini)" in row
    )


def test_papers_claims_are_counted_apart_and_by_the_folder_that_judges_them():
    """As on the page of claims: Lizard's paper makes no claim on perplexity, and its MMLU is judged on the
    larger teacher alone."""
    found = page(ROOT / "workflow", ROOT / "results/reference")
    [first] = [line for line in found.splitlines() if line.startswith("| Lizard Table 1 ")]
    [third] = [line for line in found.splitlines() if line.startswith("| Lizard Table 3 ")]
    assert "| 1 reproduced, 6 not tested (smollm2, qwen" in first, first[-300:]
    assert "| 5 not tested; ours: 1 contradicted, 3 not tested (smollm2)" in third, third[-300:]


def test_verdicts_are_those_of_the_tables_own_claims_file():
    rows = [
        line
        for line in page(ROOT / "workflow", ROOT / "results/reference").splitlines()
        if line.startswith("| ")
    ]
    [recall] = [row for row in rows if "`snakemake comparison_recall`" in row]
    [headline] = [row for row in rows if "`snakemake comparison_table2`" in row]
    assert "(smollm2)" in recall and "(smollm2)" in headline


def test_the_verdicts_of_the_whole_dose_come_before_those_of_a_part_and_of_a_smaller_scale(tmp_path):
    claims = [{"claim": "c", "source": "s", "left": "lizard", "right": "t2r", "column": "acc", "op": ">"}]
    paper(
        tmp_path,
        columns=[{"name": "acc", "measure": "mmlu", "metric": "acc"}],
        rows=[{"run": "lizard"}, {"run": "t2r"}],
        claims=claims,
    )
    found = []
    for folder, scale in (("vit_mini", "mini"), ("smollm2_quarter", "smollm2-x0.25"), ("smollm2", "smollm2")):
        (tmp_path / "reference" / folder / "runs").mkdir(parents=True)
        (tmp_path / "reference" / folder / "lizard").mkdir()
        (file := tmp_path / "reference" / folder / "claims.csv").write_text(
            "drawing,claim,verdict\nlizard/table1,a,reproduced\n"
        )
        manifest = {"scale": scale, "files": {"claims.csv": sha256(file)}}
        (tmp_path / "reference" / folder / "reference.json").write_text(json.dumps(manifest))
        found += [
            line
            for line in page(tmp_path, tmp_path / "reference").splitlines()
            if line.startswith("| Table 1")
        ]
    assert [row.split("1 reproduced (")[1].split(")")[0] for row in found] == [
        "vit_mini",
        "smollm2_quarter",
        "smollm2",
    ]


def cells_not_run(path: Path) -> bool:
    """Whether a committed table of ours has a cell that was not run."""
    ours = path.read_text().partition("**Published**")[0]
    return any(
        cell.strip() == "not run"
        for line in ours.splitlines()
        if line.startswith("|")
        for cell in line.split("|")
    )


def test_what_was_not_run_or_not_drawn_has_its_reason_on_the_page():
    reference, missing, stale = ROOT / "results/reference", [], []
    for name, artefact in available(ROOT / "workflow/papers").items():
        places = list(places_of(artefact, reference))
        tables = [table for where in places if (table := where.with_name(f"{where.name}.md")).is_file()]
        wanted = not places or any(map(cells_not_run, tables))
        missing += [name] * (wanted and not artefact.spec.not_run)
        stale += [name] * (bool(tables) and not wanted and bool(artefact.spec.not_run))
    assert not missing, "give these specs `not_run`: what is not there, and why"
    assert not stale, "nothing of these is `not run`"
