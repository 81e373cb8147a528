"""Specs of tables and figures: their meaning, and the errors for wrong ones, before any work."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from synthetic import paper

from relinear.plan.published import published
from relinear.plan.specs import available, papers, read
from relinear.plan.strict import ConfigError
from relinear.plan.tables import Address, Table

ROOT = Path(__file__).parents[1]
PAPERS = ROOT / "workflow/papers"

ACC = {"name": "acc", "measure": "mmlu", "metric": "acc", "unit": "percent"}
TABLE = {"columns": [ACC], "rows": [{"run": "lizard"}, {"run": "t2r"}]}
MATRIX = {
    "texts": {"meta": "Meta tokens"},
    "rows": [{"name": f"meta_{m}", "text": {"meta": m}} for m in (2, 4)],
    "columns": [ACC | {"name": f"window_{w}", "run": f"lizard_w{w}_m{{meta}}"} for w in (32, 64, 128)],
}
OTHER = {"run": "lizard", "cells": {"acc": {"run": "t2r"}}}
CLAIM = {"claim": "c", "source": "s", "left": "lizard", "right": "t2r", "column": "acc", "op": ">"}
GRID = {
    "draw": "grid",
    "cell": {"measure": "needle", "metric": "acc", "x": "length", "y": "depth"},
    "panels": [{"run": "lizard"}],
}
COSTS = {
    "draw": "curves",
    "file": "costs.csv",
    "model": "m",
    "series": [{"run": "teacher", "title": "softmax"}],
    "panels": [{"x": "batch", "y": "peak_gib"}],
}
PAIRS = {
    "draw": "curves",
    "series": [{"run": "teacher", "title": "softmax"}],
    "panels": [
        {"x": "pairs", "measure": measure, "metric": "exact_match"}
        for measure in ("kv_recall", "kv_recall_far")
    ],
}
RATIO = {
    "claim": "c",
    "source": "s",
    "left": {"row": "teacher", "at": {"batch": 1}},
    "column": "peak_gib",
    "op": ">",
    "ratio": 2,
    "margin_by": "ours",
}


# --- the papers' specs ---


def test_every_spec_of_the_repository_is_right_and_called_as_its_label_is():
    found = available(PAPERS)
    assert {
        "comparison_table2",
        "lolcats_table1",
        "lizard_figure5",
        "supra_figure1",
        *(f"lolcats_figure{n}" for n in range(2, 7)),
    } <= set(found)
    for name, artefact in found.items():
        assert name == f"{artefact.paper}_{artefact.stem}" and ROOT / artefact.path == artefact.file
        assert artefact.spec.says and "\n" not in artefact.spec.says
        assert artefact.reads() or artefact.files() or name == "hedgehog_parameters", "which counts"
        assert (
            len(artefact.outputs("r")) == len(set(artefact.outputs("r")))
            and "provenance.json" in artefact.spec.suffixes
        )


def test_a_claim_is_written_in_lines_of_110_columns():
    for file in PAPERS.glob("*/*.yaml"):
        _, _, claims = file.read_text().partition("\nclaims:")
        assert [line for line in claims.splitlines() if len(line) > 110] == [], file


def test_a_label_stands_in_one_spec_and_in_its_paper_s_list():
    found, listed = available(PAPERS), papers(PAPERS)
    labels = [artefact.spec.label for artefact in found.values()]
    assert len(labels) == len(set(labels))
    every = [label for paper in listed.values() for label in paper.labels]
    assert len(every) == len(set(every)) == 71
    # ours
    assert set(every) >= {
        artefact.spec.label for artefact in found.values() if artefact.paper not in ("comparison", "t2r")
    }


def test_published_averages_are_the_means_of_their_cells():
    spec = read(PAPERS / "comparison/table2.yaml").spec
    means = {column.name: column.mean for column in spec.columns if column.mean}
    checked = 0
    for row in spec.rows:
        for entry in published(PAPERS / "comparison", "table2").get(row.run, ()):
            cells = dict(entry.values)
            cells.setdefault("piqa_acc", cells.get("piqa_acc_norm"))
            for average in means.keys() & cells.keys():
                parts = [cells[c] for c in means[average]]
                assert sum(parts) / len(parts) == pytest.approx(cells[average], abs=0.08), entry
                checked += 1
    assert checked > 20


def test_supra_never_publishes_piqa_acc():
    found = published(PAPERS / "comparison", "table2")
    own = [entry for entries in found.values() for entry in entries if entry.label == "SUPRA Table 1"]
    assert len(own) == 5
    assert all("piqa_acc" not in entry.values and "piqa_acc_norm" in entry.values for entry in own)


def test_the_softmax_row_is_the_teacher_before_and_after_lora():
    [row] = [line for line in read(PAPERS / "lolcats/table1.yaml").spec.lines if line.name == "teacher"]
    assert row.cells["ppl_at_0"] == Address("teacher", "perplexity", "perplexity", None, {})
    assert row.cells["ppl_at_2"] == Address("teacher_lora", "perplexity", "perplexity", None, {})
    assert row.cells["kl"] == row.cells["mse"] == 0.0


def test_reading_the_specs_imports_nothing_heavy():
    code = (
        "import sys; from relinear.plan.specs import available;"
        " available(__import__('pathlib').Path(sys.argv[1])); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(PAPERS)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'kernels'}"},
    )
    assert done.returncode == 0, done.stderr
    assert not {"torch", "transformers", "matplotlib", "pandas", "numpy", "tabulate"} & set(
        done.stdout.split()
    )


# --- what a spec means ---


def test_a_row_with_measured_columns_reads_its_gate_and_each_measurement_once(tmp_path):
    again = {"name": "stem", "measure": "mmlu", "metric": "acc", "of": "stem"}
    artefact = read(
        paper(
            tmp_path,
            columns=[ACC, again],
            rows=[{"run": "lizard"}, {"run": "t2r", "cells": {"stem": {"run": "teacher"}}}],
        )
    )
    assert artefact.reads() == [
        ("lizard", "mmlu"),
        ("lizard", "gate"),
        ("t2r", "mmlu"),
        ("t2r", "gate"),
        ("teacher", "mmlu"),
        ("teacher", "gate"),
    ]


def test_a_row_s_words_name_the_runs_of_its_cells(tmp_path):
    spec = read(paper(tmp_path, **MATRIX)).spec
    assert isinstance(spec, Table)
    assert [line.name for line in spec.lines] == ["meta_2", "meta_4"] and [c.name for c in spec.columns] == [
        "window_32",
        "window_64",
        "window_128",
    ]
    for line in spec.lines:
        for column, cell in line.cells.items():
            assert cell.run == f"lizard_w{column.removeprefix('window_')}_m{line.name.removeprefix('meta_')}"
    assert len({run for run, _ in spec.reads()}) == 6


def test_a_scale_leaves_out_a_row(tmp_path):
    two, four = MATRIX["rows"]
    artefact = read(paper(tmp_path, **MATRIX | {"rows": [two | {"not_at": ["mini"]}, four]}))
    assert {run for run, _ in artefact.reads("mini")} == {
        f"lizard_w{w}_m4" for w in (32, 64, 128)
    } and artefact.not_at == {"mini"}
    assert len({run for run, _ in artefact.reads("smollm2")}) == 6


def test_a_field_that_is_the_whole_of_a_value_keeps_its_type(tmp_path):
    column = {
        "name": "ppl",
        "run": "lizard",
        "measure": "ppl_{length}",
        "metric": "perplexity",
        "at": {"length": "{length}"},
    }
    line, _ = read(
        paper(
            tmp_path,
            texts={"length": "Length"},
            rows=[{"name": str(n), "text": {"length": n}} for n in (2048, 4096)],
            columns=[column],
        )
    ).spec.lines
    assert line.cells["ppl"] == Address("lizard", "ppl_2048", "perplexity", None, {"length": 2048})


def test_a_row_may_read_another_measure_in_the_place_of_the_columns(tmp_path):
    rows = [
        {"run": "lizard"},
        {"run": "lizard", "name": "by text", "measures": {"mmlu": "mmlu_continuation"}},
    ]
    usual, other = read(paper(tmp_path, columns=[ACC], rows=rows)).spec.lines
    assert (usual.cells["acc"].measure, other.cells["acc"].measure) == ("mmlu", "mmlu_continuation")
    with pytest.raises(ConfigError, match="row 'lizard', measures: no measure 'boolq'; have mmlu"):
        read(paper(tmp_path, columns=[ACC], rows=[{"run": "lizard", "measures": {"boolq": "mmlu"}}]))


def test_derived_names_of_runs_are_names(tmp_path):
    rows = [{"run": "lizard"}, {"run": "lizard@mistral-7b"}, {"run": "lizard-seed1"}]
    assert [
        run for run, measure in read(paper(tmp_path, columns=[ACC], rows=rows)).reads() if measure == "mmlu"
    ] == [row["run"] for row in rows]


@pytest.mark.parametrize(
    ("spec", "suffixes"),
    [
        (TABLE, {"csv", "md", "provenance.json"}),
        (TABLE | {"claims": [CLAIM]}, {"csv", "md", "provenance.json", "claims.csv"}),
        (TABLE | {"draw": "picture"}, {"png", "pdf", "provenance.json"}),
        (TABLE | {"draw": "picture", "claims": [CLAIM]}, {"png", "pdf", "provenance.json", "claims.csv"}),
        (GRID, {"png", "pdf", "provenance.json"}),
        (
            COSTS | {"claims": [RATIO | {"recipe": "another card"}]},
            {"png", "pdf", "provenance.json", "claims.csv"},
        ),
    ],
)
def test_a_table_makes_a_csv_a_figure_pictures_and_either_claims_where_it_has_some(tmp_path, spec, suffixes):
    path = paper(tmp_path, **spec)
    if spec.get("draw") == "picture":
        path.with_suffix(".py").write_text("")
    artefact = read(path)
    assert set(artefact.spec.suffixes) == suffixes
    assert set(artefact.outputs("results/mini/lizard")) == {
        f"results/mini/lizard/table1.{suffix}" for suffix in suffixes
    }
    assert artefact.module == f"relinear.draw.{spec.get('draw', 'table')}"


def test_a_spec_may_be_another_one_under_a_label_of_its_own(tmp_path):
    paper(tmp_path, **TABLE, published=[{"value": 1.0}])
    again = paper(tmp_path, stem="table9", label="Table 9", same_as="table1")
    found = read(again)
    assert (found.spec.label, found.path, found.rows_path) == (
        "Table 9",
        *(f"workflow/papers/lizard/{stem}.yaml" for stem in ("table9", "table1")),
    )
    assert found.reads() == read(again.with_name("table1.yaml")).reads()
    assert found.spec.published("lizard").source == "Table 9 (measured)", (
        "the numbers are those of the label that prints them again"
    )
    for change, message in (
        ({"same_as": "table2"}, "same_as is a table or figure of the same paper; got 'table2'; have table1"),
        (
            {"same_as": "table9", "stem": "table7"},
            "same_as table9, which is itself same_as table1; name that",
        ),
        ({"same_as": "table1", "rows": []}, "is same_as table1 and has rows of its own"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(paper(tmp_path, **{"stem": "table9"} | change))
        paper(tmp_path, stem="table9", same_as="table1")


def test_a_table_names_a_column_that_several_tables_have_and_says_what_differs(tmp_path):
    columns = [
        "ppl",
        {"name": "acc", "title": "MMLU, 5-shot"},
        {"name": "own", "measure": "mmlu", "metric": "acc"},
    ]
    path = paper(tmp_path, columns=columns, rows=[{"run": "lizard"}])
    shared = {
        "ppl": {"measure": "perplexity", "metric": "perplexity"},
        "acc": {"title": "MMLU", "measure": "mmlu", "metric": "acc", "unit": "percent"},
        "own": {"measure": "boolq", "metric": "acc", "digits": 3},
    }
    (tmp_path / "columns.yaml").write_text(yaml.safe_dump(shared))
    ppl, acc, own = read(path).spec.columns
    assert (ppl.name, ppl.metric, acc.measure, acc.title, acc.unit) == (
        "ppl",
        "perplexity",
        "mmlu",
        "MMLU, 5-shot",
        "percent",
    )
    assert (own.measure, own.digits) == (
        "mmlu",
        None,
    ), "a column with a measure of its own has nothing of the shared one"
    with pytest.raises(
        ConfigError, match="lizard/table1.yaml: no column 'pqp' in columns.yaml; have acc, own, ppl"
    ):
        read(paper(tmp_path, columns=["pqp"], rows=[{"run": "lizard"}]))
    (tmp_path / "columns.yaml").write_text("ppl: {mesure: perplexity}")
    with pytest.raises(ConfigError, match="columns.yaml: ppl.*unknown key 'mesure'"):
        read(path)


# --- wrong specs ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"titel": "x"}, r"unknown key 'titel'; possible: label, says"),
        ({"draw": "pie"}, "no shape draw: 'pie'; have table, picture"),
        ({"rows": [{"runn": "lizard"}]}, "unknown key 'runn' .*possible: run, name"),
        ({"rows": [{"text": {}}]}, "rows.0 has neither a run nor a name"),
        ({"rows": []}, "rows.*at least 1 item"),
        ({"rows": [{"run": "lizard"}, {"run": "lizard"}]}, "row 'lizard' stands there twice"),
        ({"columns": [ACC, ACC]}, "column 'acc' stands there twice"),
        ({"columns": [{"name": "acc", "metric": "acc"}]}, "row 'lizard' in column 'acc' names no measure"),
        (
            {"columns": [ACC, {"name": "avg", "mean": ["acc", "aac"]}]},
            "the mean 'avg': no column 'aac'; have acc",
        ),
        (
            {
                "columns": [
                    ACC,
                    {"name": "ppl", "measure": "p", "metric": "p"},
                    {"name": "avg", "mean": ["acc", "ppl"]},
                ]
            },
            "'avg' is of percent and raw",
        ),
        ({"rows": [{"run": "lizard", "text": {"map": "exp"}}]}, "row 'lizard': no text 'map'; have none"),
        ({"rows": [{"run": "lizard", "cells": {"aac": 1}}]}, "no column 'aac'; have acc"),
        (
            {"rows": [{"run": "lizard", "published": {"acc": 1.0}}]},
            "unknown key 'published' .*possible: run, name",
        ),
        (
            {"published": [{"value": 1.0, "column": "aac"}]},
            "published.csv, row 'lizard': no column 'aac'; have acc",
        ),
        ({"published": [{"value": 1.0, "row": "t3r"}]}, "published.csv: no row 't3r'; have lizard, t2r"),
        ({"published": [{"value": 1.0, "label": "Lizard Table 9"}]}, "no table 'Lizard Table 9'"),
        ({"csv": ["run", "aac"]}, "csv: no column 'aac'; have run, method"),
        (
            {"steps": ["pretain"]},
            "steps: no training stage 'pretain'; have classify, distill, finetune, pretrain, restore",
        ),
        ({"csv": ["run", "acc", "acc"]}, "csv 'acc' stands there twice"),
        ({"caption": ["n = {n}"]}, "no field 'n'; have acc_n"),
        ({"caption": ["chance is {acc_chance}"]}, "no field 'acc_chance'; have acc_n"),
        ({"claims": [CLAIM | {"column": "aac"}]}, "claim 'c': no column 'aac'; have acc"),
        ({"claims": [CLAIM | {"left": "t3r"}]}, "claim 'c': no row 't3r'; have lizard, t2r"),
        ({"claims": [CLAIM | {"ceiling": "teacher"}]}, "claim 'c': no row 'teacher'"),
        ({"claims": [CLAIM | {"dose": {"t3r": 1e6}}]}, "claim 'c', dose: no row 't3r'; have lizard, t2r"),
        ({"claims": [CLAIM | {"paper": "lolcat"}]}, "no paper 'lolcat'; have lizard"),
        ({"claims": [CLAIM | {"op": "~"}]}, "claims.0.op.*got '~'"),
        ({"claims": [CLAIM | {"ratio": 2.0, "margin": 1.0}]}, "no margin, floor or ceiling"),
        (
            {"claims": [{k: v for k, v in CLAIM.items() if k != "right"}]},
            "without a right side needs the bound as `ratio`",
        ),
        (
            {"claims": [CLAIM | {"left": {"row": "lizard", "at": {"length": 1}}}]},
            "a cell of a table has no `at`",
        ),
        (MATRIX | {"columns": [ACC | {"run": "m{mata}"}]}, "no field 'mata'; have meta"),
        (MATRIX | {"columns": [ACC]}, "row 'meta_2' has no run, and nothing is published in it"),
        (
            {"seeds": True, "rows": [OTHER], "columns": [ACC, {"name": "avg", "mean": ["acc"]}]},
            "'avg' over seeds is of several runs in row 'lizard'",
        ),
        (
            {"draw": "picture"},
            "table1.py draws it exactly where it says draw: own or picture; got draw: picture, no file",
        ),
        (
            {"draw": "own"},
            "table1.py draws it exactly where it says draw: own or picture; got draw: own, no file",
        ),
    ],
)
def test_a_wrong_table_is_refused_with_its_file_and_what_is_possible(tmp_path, change, message):
    path = paper(tmp_path, **TABLE | change)
    with pytest.raises(ConfigError, match=f"(?s)lizard/table1.yaml.*{message}"):
        read(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"value": "1,0"}, "line 2: value must be a number; got '1,0'"),
        ({"value": "nan"}, "line 2: value must be a number; got 'nan'"),
        (
            {"value": 1, "origin": "somewhere"},
            "line 2: origin must be measured, computed or copied from ...; got 'somewhere'",
        ),
        ({"value": 1, "origin": "copied from "}, "origin must be"),
        ({"value": 1, "model": ""}, "line 2: model must not be empty"),
    ],
)
def test_a_wrong_published_number_is_refused_with_its_line(tmp_path, line, message):
    path = paper(tmp_path, **TABLE, published=[line])
    with pytest.raises(ConfigError, match=f"lizard/published.csv.*{re.escape(message)}"):
        read(path)


def test_published_numbers_of_no_table_twice_or_with_other_columns_are_refused(tmp_path):
    path = paper(tmp_path, **TABLE, published=[{"value": 1.0}, {"value": 2.0}])
    with pytest.raises(
        ConfigError, match="lizard/published.csv, line 3: column 'acc' of row 'lizard' stands there twice"
    ):
        read(path)
    paper(tmp_path, **TABLE, published=[{"value": 1.0, "table": "table2"}])
    with pytest.raises(ConfigError, match="lizard/published.csv: no table table2"):
        available(path.parent.parent)
    (path.parent / "published.csv").write_text("row,column,value\nlizard,acc,1\n")
    with pytest.raises(
        ConfigError,
        match="published.csv must have the columns table, row, column, .*; got row, column, value",
    ):
        read(path)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            GRID | {"cell": {"measure": "needle", "x": "length", "y": "depth"}},
            "panels.0.metric: Field required",
        ),
        (GRID | {"panels": [{"run": "a"}, {"run": "a"}]}, "panel 'a' stands there twice"),
        (
            GRID
            | {
                "claims": [
                    {
                        "claim": "c",
                        "source": "s",
                        "left": {"row": "lizard", "at": {"depth": 1}},
                        "op": ">",
                        "ratio": 1,
                    }
                ]
            },
            "`at` with length and at most one more, such as depth",
        ),
        (COSTS | {"panels": [{"x": "batch", "y": "watts"}]}, "panels.0.y"),
        (
            COSTS | {"panels": [{"x": "tokens", "y": "peak_gib"}]},
            "no sweep 'tokens'; have batch, length, input",
        ),
        (COSTS | {"panels": [{"x": "batch", "metric": "acc"}]}, "needs y"),
        (PAIRS, r"panel \(named by `column`, else by its metric\) 'exact_match' stands there twice"),
        (COSTS | {"model": None}, "costs need the `model`"),
        (COSTS | {"series": [{"title": "softmax"}]}, "needs either a run or runs"),
        (
            COSTS | {"series": [{"run": "a", "title": "A"}, {"run": "a", "title": "B"}]},
            "series 'a' stands there twice",
        ),
        (COSTS | {"series": [{"run": "a", "title": "A", "color": "teal"}]}, "unknown key 'color'"),
        (
            COSTS | {"claims": [RATIO | {"left": {"row": "lizard", "at": {"batch": 1}}}]},
            "no series 'lizard'; have teacher",
        ),
        (COSTS | {"claims": [RATIO | {"column": "watts"}]}, "no column 'watts'"),
        (
            COSTS | {"claims": [RATIO | {"left": "teacher"}]},
            "teacher needs one place on a sweep, `at: {batch: ...}`",
        ),
        (
            COSTS | {"claims": [RATIO | {"dose": {"teacher": 1e6}}]},
            "claim 'c': draw: curves compares no training tokens.*got {'teacher': 1000000.0}",
        ),
        (
            GRID | {"claims": [CLAIM | {"right": None, "ratio": 1, "dose": {"t2r": 1e6}}]},
            "claim 'c', dose: no row 't2r'; have lizard",
        ),
        (
            {"draw": "attention_maps", "claims": [CLAIM | {"dose": {"t2r": 1e6}}], "run": "lizard"},
            "claim 'c', dose: no row 't2r'; have lizard",
        ),
        ({"draw": "attention_maps", "claims": [CLAIM], "run": "lizard"}, "no column 'acc'; have kl, mse"),
    ],
)
def test_a_wrong_figure_is_refused_with_its_file_and_what_is_possible(tmp_path, spec, message):
    with pytest.raises(ConfigError, match=f"(?s)lizard/table1.yaml.*{message}"):
        read(paper(tmp_path, **spec))


def test_a_label_that_its_paper_does_not_have_or_that_belongs_elsewhere_is_refused(tmp_path):
    path = paper(tmp_path, **TABLE | {"label": "Lizard Table 1"})
    (path.parent / "paper.yaml").write_text("{title: A paper, labels: [Lizard Table 1, Lizard Table 2]}")
    assert read(path).spec.label == "Lizard Table 1"
    path.write_text(path.read_text().replace("Lizard Table 1", "Lizard Table 3"))
    with pytest.raises(
        ConfigError, match="lizard has no 'Lizard Table 3'; have Lizard Table 1, Lizard Table 2"
    ):
        read(path)
    path.write_text(path.read_text().replace("Lizard Table 3", "Lizard Table 2"))
    with pytest.raises(ConfigError, match="Lizard Table 2 belongs into table2.yaml"):
        read(path)


def test_a_key_given_twice_is_refused_wherever_it_stands(tmp_path):
    path = paper(tmp_path, **TABLE)
    path.write_text(path.read_text() + "says: another thing\n")
    with pytest.raises(ConfigError, match="table1.yaml is not YAML: 'says' stands there twice"):
        read(path)
    with pytest.raises(ConfigError, match="table1.yaml"):
        available(tmp_path / "papers")


@pytest.mark.parametrize("text", ["1e999", "inf", "nan", "-Infinity"])
@pytest.mark.parametrize("field", ["ratio", "margin", "floor", "least"])
def test_text_that_becomes_a_number_without_end_is_refused(tmp_path, text, field):
    """YAML takes these for texts, and a number made of one bounds nothing: each claim would be reproduced."""
    own = (
        {"requires": [{"row": "lizard", "column": "acc", "least": text}]}
        if field == "least"
        else {field: text}
    )
    at = "requires.0.least" if field == "least" else field
    with pytest.raises(
        ConfigError, match=rf"table1.yaml.claims.0.{at} must be a finite number; got -?(inf|nan)"
    ):
        read(paper(tmp_path, **TABLE | {"claims": [CLAIM | {"source": "our question"} | own]}))


def test_a_wrong_value_is_shown_by_its_first_characters(tmp_path):
    with pytest.raises(ConfigError, match="claims.*got .zzz") as error:
        read(paper(tmp_path, **TABLE | {"claims": "z" * 3000}))
    assert len(str(error.value)) < 600


def test_a_folder_needs_a_paper_and_a_paper_no_specs(tmp_path):
    (tmp_path / "t2r").mkdir()
    with pytest.raises(ConfigError, match="no t2r/paper.yaml"):
        available(tmp_path)
    (tmp_path / "t2r/paper.yaml").write_text('{title: A paper, arxiv: "2103.13076"}')
    assert available(tmp_path) == {}
    (tmp_path / "t2r/paper.yaml").write_text("{title: A paper, arxiv: 2103.1}")
    with pytest.raises(ConfigError, match="t2r/paper.yaml.arxiv"):
        available(tmp_path)


def test_runs_beside_the_specs_are_no_spec(tmp_path):
    path = paper(tmp_path, **TABLE)
    (path.parent / "runs.yaml").write_text(yaml.safe_dump({"lizard": {"method": "lizard"}}))
    assert list(available(tmp_path / "papers")) == ["lizard_table1"]
