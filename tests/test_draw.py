"""Tables, their claims and their provenance, drawn from invented measurements."""

import csv
import itertools
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from synthetic import everything, measurement, paper, reading

from relinear.draw import About
from relinear.draw.beside import lines_of
from relinear.draw.claims import UNTESTED, Judgement, Value, judge
from relinear.draw.drawing import make, verdicts
from relinear.draw.render import count, number, titled
from relinear.draw.table import _counts
from relinear.errors import UserError
from relinear.plan.chance import chance_of
from relinear.plan.claims import Claim
from relinear.plan.specs import read
from relinear.plan.strict import ConfigError

ROOT = Path(__file__).parents[1]
RUNS = ["teacher", "teacher_lora", "t2r", "hedgehog", "supra", "lolcats_linear", "lolcats_window", "lizard"]
ACCURACY = dict(zip(RUNS, [0.60, 0.61, 0.26, 0.40, 0.35, 0.45, 0.58, 0.57], strict=True))
HEADLINE = {"gate", "perplexity", "commonsense", "mmlu", "lambada", "boolq"}  # measures of a row
MINI = About("mini", demonstration="Scale `mini` is a demonstration.")
TABLE2 = read(ROOT / "workflow/papers/comparison/table2.yaml")
TABLE1 = read(ROOT / "workflow/papers/lolcats/table1.yaml")


@pytest.fixture
def measured():
    return {read: found for run in RUNS for read, found in everything(run, ACCURACY[run]).items()}


def without(measured, run):
    return {read: found for read, found in measured.items() if read[0] != run}


def rows(path, key="run"):
    return {row[key]: row for row in csv.DictReader(path.read_text().splitlines())}


# --- the headline table ---


def test_the_verdicts_of_a_table_are_written_without_it(measured, tmp_path):
    made = {path.name: path.read_bytes() for path in make(TABLE2, measured, MINI, tmp_path / "all")}
    written = verdicts(TABLE2, measured, MINI, tmp_path / "alone")
    assert {path.name for path in written} == {"table2.claims.csv", "table2.provenance.json"}
    assert {*written} == {*(tmp_path / "alone").iterdir()}
    assert all(path.read_bytes() == made[path.name] for path in written)
    with pytest.raises(UserError, match="comparison_table2 has no claims"):
        verdicts(
            replace(TABLE2, spec=TABLE2.spec.model_copy(update={"claims": ()})), measured, MINI, tmp_path
        )


def test_columns_are_the_contract(measured, tmp_path):
    make(TABLE2, measured, MINI, tmp_path)
    header = (tmp_path / "table2.csv").read_text().splitlines()[0].split(",")
    asked = (
        "run method variant scale trainable_params distill_tokens finetune_tokens ppl piqa_acc piqa_acc_norm "
        "arc_easy_acc arc_challenge_acc_norm hellaswag_acc_norm winogrande_acc mmlu_acc avg avg_no_mmlu"
    ).split()
    assert header[: len(asked)] == asked
    assert {f"{c}_{s}" for c in asked[8:15] for s in ("stderr", "n")} | {
        "ppl_stderr",
        "gate",
        "collapsed",
    } <= set(header)
    assert header[-11:] == [*(f"published_{c}" for c in asked[8:]), "published_model", "published_source"]
    assert len(header) == len(set(header))


def test_cells_are_percent_and_averages_propagate_errors(measured, tmp_path):
    make(TABLE2, measured, MINI, tmp_path)
    row = rows(tmp_path / "table2.csv")["supra"]
    assert float(row["piqa_acc"]) == 35 and float(row["piqa_acc_norm"]) == 36
    assert float(row["piqa_acc_stderr"]) == 1 and row["piqa_acc_n"] == "100"
    # PIQA acc, ARC-e acc, ARC-c and HellaSwag acc_norm, WinoGrande acc, MMLU acc
    assert float(row["avg"]) == pytest.approx((35 + 35 + 36 + 36 + 35 + 35) / 6, rel=1e-5)
    assert float(row["avg_no_mmlu"]) == pytest.approx((35 + 35 + 36 + 36 + 35) / 5)
    assert float(row["avg_stderr"]) == pytest.approx(math.sqrt(6) / 6, rel=1e-5)
    assert float(row["ppl"]) == 20 and float(row["ppl_stderr"]) == 0.4


def test_published_cells_are_the_papers_and_empty_where_there_are_none(measured, tmp_path):
    make(TABLE2, measured, MINI, tmp_path)
    found = rows(tmp_path / "table2.csv")
    assert (
        found["lizard"]["published_mmlu_acc"] == "61.2" and "measured" in found["lizard"]["published_source"]
    )
    assert found["lolcats_window"]["published_model"] == "Llama-3-8B"
    assert "copied from LoLCATs" in found["lolcats_window"]["published_source"]
    assert found["supra"]["published_piqa_acc"] == "" and found["supra"]["published_piqa_acc_norm"] == "80.4"
    for run in ("hedgehog", "teacher_lora"):
        assert {value for column, value in found[run].items() if column.startswith("published_")} == {""}


def test_a_papers_own_table_prints_all_that_it_has_for_further_models(measured, tmp_path):
    own = read(Path(__file__).parents[1] / "workflow/papers/lizard/table8.yaml")
    for artefact, entries in (
        (own, 5),
        (TABLE2, sum(bool(TABLE2.spec.published(line.name)) for line in TABLE2.spec.lines)),
    ):
        make(artefact, measured, MINI, tmp_path)
        below = (tmp_path / f"{artefact.stem}.md").read_text().partition("**Published**")[2].splitlines()
        assert sum(line.startswith("| `") for line in below) == entries
    assert any(
        "`teacher`" in line and "Llama-3.2-3B" in line and "76.4" in line
        for line in (tmp_path / "table8.md").read_text().splitlines()
    )


def test_a_row_that_was_not_run_says_so_in_every_measured_cell_and_claims_on_it_are_untested(
    measured, tmp_path
):
    make(TABLE2, without(measured, "t2r") | {("t2r", "perplexity"): None}, MINI, tmp_path)
    row = rows(tmp_path / "table2.csv")["t2r"]
    assert {
        cell for column, cell in row.items() if column != "run" and not column.startswith("published_")
    } == {"not run"}
    assert row["published_arc_easy_acc"] == "27.4"
    verdicts = rows(tmp_path / "table2.claims.csv", "claim").values()
    on_t2r = [
        v
        for v, c in zip(verdicts, TABLE2.spec.claims, strict=True)
        if "t2r" in [point.row for point in c.points]
    ]
    assert len(on_t2r) >= 4 and {v["verdict"] for v in on_t2r} == {UNTESTED}
    assert all("t2r" in v["reason"] and "not run" in v["reason"] for v in on_t2r)


def test_a_missing_task_leaves_its_average_unrun_and_the_other_standing(measured, tmp_path):
    make(TABLE2, measured | {("teacher", "mmlu"): None}, MINI, tmp_path)
    row = rows(tmp_path / "table2.csv")["teacher"]
    assert row["mmlu_acc"] == row["avg"] == row["avg_stderr"] == "not run"
    assert float(row["avg_no_mmlu"]) == pytest.approx(60.4)


def test_each_cell_stands_under_its_own_title_and_a_missing_one_is_an_error():
    assert titled([{"a": "1", "b": "2"}, {"b": "4", "a": "3"}]).splitlines()[2:] == [
        "| 1   |   2 |",
        "| 3   |   4 |",
    ]
    assert titled([]) == ""
    with pytest.raises(KeyError, match="b"):
        titled([{"a": "1", "b": "2"}, {"a": "3"}])


def test_tasks_that_no_paper_has_stand_in_the_markdown_where_they_were_scored(measured, tmp_path):
    make(TABLE2, measured, MINI, tmp_path)
    assert (
        "LAMBADA" not in (tmp_path / "table2.md").read_text()
        and rows(tmp_path / "table2.csv")["teacher"]["boolq_acc"] == "not run"
    )
    more = measurement("teacher", "lambada", reading("acc", 0.28, 0.006, 5153, "lambada_openai"))
    make(TABLE2, measured | {("teacher", "lambada"): more}, MINI, tmp_path)
    row, text = rows(tmp_path / "table2.csv")["teacher"], (tmp_path / "table2.md").read_text()
    assert float(row["lambada_openai_acc"]) == pytest.approx(28.0) and row["boolq_acc"] == "not run"
    assert "LAMBADA (n=5153)" in text and "28.0 ± 0.6" in text and "BoolQ" not in text


def test_controls_and_long_texts_stand_in_the_headline_table_where_they_were_measured(measured, tmp_path):
    make(TABLE2, measured, MINI, tmp_path)
    found, text = rows(tmp_path / "table2.csv"), (tmp_path / "table2.md").read_text()
    assert (
        "window_128" not in found
        and "window_128" not in text
        and "ppl_long" not in found["lizard"]
        and "Long text" not in text
    )
    of = {"window_128": everything("window_128", 0.5), "lizard": {}}
    for run in of:
        novels = reading("perplexity", 30.0, 0.5, 4, "novels", position="1024-2048")
        of[run][run, "ppl_novels"] = measurement(run, "ppl_novels", novels)
    of["lizard"]["lizard", "perplexity_no_linear"] = measurement(
        "lizard", "perplexity_no_linear", reading("perplexity", 44.0, 1.0, 8192)
    )
    make(
        TABLE2,
        measured | of["window_128"] | of["lizard"],
        MINI._replace(data={"ppl_novels": "papers"}),
        tmp_path,
    )
    found, text = rows(tmp_path / "table2.csv"), (tmp_path / "table2.md").read_text()
    assert (
        list(found)[:3] == ["teacher", "teacher_lora", "window_128"]
        and float(found["window_128"]["piqa_acc"]) == 50
    )
    assert (
        float(found["lizard"]["ppl_long"]) == 30
        and found["lizard"]["ppl_long_n"] == "4"
        and found["lizard"]["ppl_long_data"] == "papers"
    )
    assert (
        found["t2r"]["ppl_long"] == found["lolcats_window"]["ppl_no_linear"] == "not run"
        and float(found["lizard"]["ppl_no_linear"]) == 44
    )
    assert (
        found["t2r"]["ppl_no_linear"] == "not defined: nothing is left"
        and "needle_2048" not in found["lizard"]
    )
    assert "Long text (papers)" in text and "at positions 1024 to 2047" in text and "Needle" not in text


def test_a_scale_leaves_out_the_columns_and_rows_that_say_so():
    reads = {scale: set(TABLE2.reads(scale)) for scale in ("smoke", "mini", "smollm2")}
    assert not any(
        run == "window_128" or measure in ("ppl_novels", "perplexity_no_linear")
        for run, measure in reads["smoke"]
    )
    assert {measure for _, measure in reads["mini"] - reads["smoke"]} == HEADLINE | {
        "ppl_novels",
        "perplexity_no_linear",
    }
    assert {measure for _, measure in reads["smollm2"] - reads["mini"]} == {
        "needle_2048",
        "answers",
        "state_bytes",
    }
    assert reads["smollm2"] == set(TABLE2.reads())


def test_a_row_of_several_seeds_is_their_mean_and_its_error_has_both_parts(measured, tmp_path):
    again = {read: m for n in (1, 2) for read, m in everything(f"lizard-seed{n}", 0.57 + n / 100).items()}
    make(TABLE2, measured | again, MINI, tmp_path)
    found, text = rows(tmp_path / "table2.csv"), (tmp_path / "table2.md").read_text()
    assert list(found) == RUNS, "seeds are no rows"
    row = found["lizard"]
    assert row["seeds"] == "3" and found["supra"]["seeds"] == "1" and found["supra"]["avg_seed_sd"] == ""
    assert float(row["piqa_acc"]) == pytest.approx(58) and float(row["piqa_acc_seed_sd"]) == pytest.approx(1)
    # 1: of the items, the same for all
    assert float(row["piqa_acc_stderr"]) == pytest.approx(math.hypot(1, 1 / math.sqrt(3)), rel=1e-5)
    assert float(row["avg"]) == pytest.approx((58 * 4 + 59 * 2) / 6, rel=1e-5) and float(
        row["avg_seed_sd"]
    ) == pytest.approx(1)
    assert row["boolq_acc"] == row["boolq_acc_seed_sd"] == "not run" and row["piqa_acc_n"] == "100"
    assert "`lizard`, 3 seeds" in text and "`supra`," not in text and "is their mean" in text
    record = json.loads((tmp_path / "table2.provenance.json").read_text())
    files = [f"results/{run}/mmlu/run.json" for run in ("lizard", "lizard-seed1", "lizard-seed2")]
    assert record["cells"]["lizard"]["mmlu_acc"] == files and set(files) < set(record["sources"])
    make(TABLE2, measured, MINI, tmp_path)
    assert "seeds" not in (tmp_path / "table2.md").read_text()


def test_a_number_that_a_seed_lacks_is_the_mean_of_the_others_and_says_so(measured, tmp_path):
    again = {read: m for n in (1, 2) for read, m in everything(f"lizard-seed{n}", 0.57 + n / 100).items()} | {
        ("lizard-seed1", "mmlu"): None
    }
    make(TABLE2, measured | again, MINI, tmp_path)
    found, [line] = (
        rows(tmp_path / "table2.csv"),
        [x for x in (tmp_path / "table2.md").read_text().splitlines() if x.startswith("| `lizard`, 3 seeds")],
    )
    row = found["lizard"]
    assert (
        row["seeds"] == "3"
        and (row["mmlu_acc_seeds"], row["avg_seeds"]) == ("2", "2")
        and "piqa_acc_seeds" not in row
    )
    assert found["supra"]["mmlu_acc_seeds"] == "1" and line.count("(2 seeds)") == 2
    assert float(row["piqa_acc"]) == pytest.approx(58) and float(row["avg"]) == pytest.approx(
        (58 * 4 + 59 * 2) / 6, rel=1e-5
    )
    cells = json.loads((tmp_path / "table2.provenance.json").read_text())["cells"]["lizard"]
    assert (
        cells["mmlu_acc"]
        == cells["mmlu_acc_seeds"]
        == [f"results/{run}/mmlu/run.json" for run in ("lizard", "lizard-seed2")]
    )
    assert not any("lizard-seed1/" in file for file in cells["avg"]) and any(
        "lizard-seed1/" in file for file in cells["avg_no_mmlu"]
    )


def test_what_all_trainings_have_the_same_is_of_no_seed(measured, tmp_path):
    state = {
        (run, "state_bytes"): measurement(run, "state_bytes", reading("mebibytes", 11.6, None, 1, "model"))
        for run in ("lizard", "lizard-seed1")
    }
    about = MINI._replace(of_shape=["state_bytes"])
    make(TABLE2, measured | state, about, tmp_path)
    row, text = rows(tmp_path / "table2.csv")["lizard"], (tmp_path / "table2.md").read_text()
    assert row["seeds"] == "1" and "seed" not in text, (
        "the bytes of another training are no number of another seed"
    )
    assert not any(column.endswith("_seeds") for column in row) and float(row["state_mib"]) == pytest.approx(
        11.6
    )
    make(TABLE2, measured | state | everything("lizard-seed2", 0.59), about, tmp_path)
    row, text = rows(tmp_path / "table2.csv")["lizard"], (tmp_path / "table2.md").read_text()
    assert (
        row["seeds"] == "2"
        and "(1 seed)" not in text
        and (row["state_mib_seed_sd"], row["piqa_acc_seed_sd"]) == ("", "1.41421")
    )
    sources = json.loads((tmp_path / "table2.provenance.json").read_text())["sources"]
    assert [file for file in sources if "lizard" in file and "state_bytes" in file] == [
        "results/lizard/state_bytes/run.json"
    ]


def test_of_a_row_whose_shape_alone_is_known_no_training_is_told(measured, tmp_path):
    state = {
        (run, "state_bytes"): measurement(run, "state_bytes", reading("mebibytes", 11.6, None, 1, "model"))
        for run in ("lizard", "window_128")
    }
    make(TABLE2, without(measured, "lizard") | state, MINI._replace(of_shape=["state_bytes"]), tmp_path)
    row = rows(tmp_path / "table2.csv")["lizard"]
    assert float(row["state_mib"]) == pytest.approx(11.6)
    assert {row[name] for name in ("trainable_params", "distill_tokens", "finetune_tokens", "piqa_acc")} == {
        "not run"
    }
    assert "window_128" not in rows(tmp_path / "table2.csv"), "an optional row stands there once it was run"


def test_one_seed_that_failed_the_gate_or_collapsed_marks_the_row(measured, tmp_path):
    again = everything("lizard-seed1", 0.57, passed=False, collapsed=True)
    make(TABLE2, measured | again, MINI, tmp_path)
    row = rows(tmp_path / "table2.csv")["lizard"]
    assert row["gate"] == "failed" and row["collapsed"] == "True"
    assert "`lizard`, 2 seeds (collapsed) (gate failed)" in (tmp_path / "table2.md").read_text()


@pytest.mark.parametrize("artefact", [TABLE2, TABLE1], ids=lambda artefact: artefact.name)
def test_every_filled_cell_leads_to_the_record_or_the_entry_that_holds_it(
    measured, lolcats_measured, artefact, tmp_path
):
    make(artefact, without(measured, "t2r") | lolcats_measured, MINI, tmp_path)
    record = json.loads((tmp_path / f"{artefact.stem}.provenance.json").read_text())
    data = yaml.safe_load(artefact.file.read_text())
    printed = list(csv.DictReader((ROOT / artefact.published_path).read_text().splitlines()))
    assert record["artefact"] == artefact.name and record["scale"] == "mini"
    for run, row in rows(tmp_path / f"{artefact.stem}.csv").items():
        for column, cell in row.items():
            origin = record["cells"][run][column]
            assert (origin is None) == (cell in ("", "not run")), (run, column)
            if origin is None:
                continue
            if isinstance(origin, str) and "published.csv#/" in origin:
                table, name, *of = origin.partition("#/")[2].split("/")
                [first, *_] = [
                    line
                    for line in printed
                    if [line["table"], line["row"], *([line["column"]] if of else [])] == [table, name, *of]
                ]
                assert origin.startswith(artefact.published_path)
                assert (
                    float(first["value"]) == float(cell)
                    if of
                    else cell == first["model"] or cell.startswith(first["label"])
                )
            elif isinstance(origin, str) and "#/" in origin:
                assert origin.startswith(f"{artefact.path}#/")
                entry = data
                for part in origin.split("#/")[1].split("/"):
                    entry = entry[int(part) if part.isdigit() else part]
                if isinstance(entry, int | float):
                    assert entry == float(cell)
            else:
                for file in (*origin,) if isinstance(origin, list) else (origin,):
                    source = file.split("/")[1]
                    assert source in (run, "teacher_lora") and record["sources"][file]["key"].startswith(
                        f"key-of-{source}-"
                    )


@pytest.mark.parametrize("change", [{"run": "other"}, {"measure": "mmlu"}, {"scale": "smollm2"}])
def test_a_measurement_of_another_run_measure_or_scale_is_refused(measured, tmp_path, change):
    wrong = measured["lizard", "perplexity"]._replace(**change)
    [(what, got)] = change.items()
    with pytest.raises(ValueError, match=f"{what} is '{got}', expected"):
        make(TABLE2, measured | {("lizard", "perplexity"): wrong}, MINI, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_metric_that_a_measurement_does_not_have_is_a_cell_that_says_what_it_has(measured, tmp_path):
    other = measurement("lolcats_linear", "perplexity", reading("bits", 1.0))
    make(TABLE2, measured | {("lolcats_linear", "perplexity"): other}, MINI, tmp_path)
    said = "not run: lolcats_linear perplexity has bits, and no perplexity"
    [row] = [row for row in lines_of(tmp_path / "table2.csv") if row["run"] == "lolcats_linear"]
    assert row["ppl"] == said and f"| {said} " in (tmp_path / "table2.md").read_text()
    [told] = [
        row
        for row in lines_of(tmp_path / "table2.claims.csv")
        if row["compared"] == "lolcats_window ppl < lolcats_linear ppl"
    ]
    assert told["verdict"] == UNTESTED and f"lolcats_linear: ppl was {said}" in told["reason"]


def test_the_same_measurements_give_the_same_bytes_and_nothing_lies_beside_them(measured, tmp_path):
    first = make(TABLE2, measured, MINI, tmp_path / "a")
    assert [path.read_bytes() for path in first] == [
        path.read_bytes() for path in make(TABLE2, measured, MINI, tmp_path / "b")
    ]
    assert (
        sorted((tmp_path / "a").iterdir())
        == sorted(first)
        == sorted(map(Path, TABLE2.outputs(str(tmp_path / "a"))))
    )


def test_markdown_names_scale_teacher_n_errors_and_warns_of_the_demonstration(measured, tmp_path):
    make(TABLE2, measured, MINI._replace(teacher="SmolLM2-135M-Instruct"), tmp_path)
    text = (tmp_path / "table2.md").read_text()
    for part in (
        "scale `mini`",
        "SmolLM2-135M-Instruct",
        "demonstration",
        "(n=100)",
        "35.0 ± 1.0",
        "swapped",
        "copied from",
        "1.23M",
        "16.4k + 16.4k",
    ):
        assert part in text, part
    make(TABLE2, measured | everything("lizard", 0.5, n=7), MINI, tmp_path)
    text = (tmp_path / "table2.md").read_text()
    assert "(n=100)" not in text and "35.0 ± 1.0 (100)" in text and "50.0 ± 1.0 (7)" in text


# --- LoLCATs Table 1 ---


@pytest.fixture
def lolcats_measured():
    found = {}
    for run in [line.name for line in TABLE1.spec.lines if line.name != "teacher"]:
        before = 65800.0 if "not" in run else 50.0
        found |= everything(run, 0.4, ppl=30.0)
        found[run, "perplexity_before"] = measurement(
            run,
            "perplexity_before",
            reading("perplexity", before, before / 50, 8192),
            reading("chunk_mean_exp", 1.1 * before, None, 8192),
        )
        found[run, "fidelity"] = measurement(
            run, "fidelity", *(reading(m, 0.5, of="attention") for m in ("mse", "kl"))
        )
    return found | everything("teacher", ppl=30.0) | everything("teacher_lora", ppl=25.0)


def test_each_column_is_read_where_the_spec_says(lolcats_measured, tmp_path):
    make(TABLE1, lolcats_measured, MINI, tmp_path)
    found = rows(tmp_path / "table1.csv")
    assert len(found) == 7
    row = found["lolcats_exp_notransfer"]
    assert float(row["ppl_at_0"]) == 65800 and float(row["ppl_at_2"]) == 30 and row["transfer"] == "False"
    assert (
        float(row["ppl_at_0_chunk_mean_exp"]) == pytest.approx(72380)
        and float(row["published_ppl_at_2"]) == 6.78
    )
    softmax = found["teacher"]
    assert (
        float(softmax["kl"]) == 0
        and softmax["transfer"] == ""
        and float(softmax["ppl_at_0"]) == 30
        and float(softmax["ppl_at_2"]) == 25
    )
    text = (tmp_path / "table1.md").read_text()
    assert (
        "6.58e4 ± 1.3e3" in text
        and "1.02e4" in text
        and "demonstration" in text
        and "8.19k held-out tokens" in text
    )
    claims = list(rows(tmp_path / "table1.claims.csv", "claim").values())
    assert {row["verdict"] for row in claims} == {UNTESTED}
    assert all(row["reason"].startswith("other dose: lolcats_") for row in claims)
    clear = [row["reason"].endswith("by more than 2 standard errors") for row in claims]
    assert all(clear[:3]) and clear[-1] and not any(clear[3:-1])


def test_what_is_at_chance_before_its_training_has_not_collapsed(lolcats_measured, tmp_path):
    before, after = (("lolcats_exp_notransfer", measure) for measure in ("perplexity_before", "perplexity"))
    begun, ended = ({"tokens": {"finetune": n}, "trainable_params": n} for n in (0, 20))
    collapsed = {
        before: (
            lolcats_measured[before]._replace(
                facts=lolcats_measured[before].facts | begun | {"collapsed": True}
            )
        )
    }
    found = {
        key: m._replace(facts=m.facts | ended) if key[0] == after[0] else m
        for key, m in lolcats_measured.items()
    } | collapsed
    make(TABLE1, found, MINI, tmp_path)
    assert "collapsed" not in (tmp_path / "table1.md").read_text()
    found[after] = found[after]._replace(facts=found[after].facts | {"collapsed": True})
    make(TABLE1, found, MINI, tmp_path)
    assert (tmp_path / "table1.md").read_text().count("(collapsed)") == 1


def test_a_cell_of_another_run_is_unrun_with_that_run(lolcats_measured, tmp_path):
    make(TABLE1, without(lolcats_measured, "teacher_lora"), MINI, tmp_path)
    row = rows(tmp_path / "table1.csv")["teacher"]
    assert float(row["ppl_at_0"]) == 30 and row["ppl_at_2"] == "not run"
    cells = json.loads((tmp_path / "table1.provenance.json").read_text())["cells"]
    assert (
        cells["teacher"]["ppl_at_0"] == "results/teacher/perplexity/run.json"
        and cells["teacher"]["ppl_at_2"] is None
    )
    assert cells["lolcats_exp"]["kl"] == "results/lolcats_exp/fidelity/run.json"
    assert cells["lolcats_exp"]["published_kl"].endswith("lolcats/published.csv#/table1/lolcats_exp/kl")
    assert cells["teacher"]["mse"].endswith("lolcats/table1.yaml#/rows/6/cells/mse")


# --- axes, words, defaults ---

MATRIX = {
    "texts": {"meta": "meta"},
    "rows": [{"name": f"meta_{m}", "text": {"meta": m}} for m in (2, 4)],
    "columns": [
        {
            "name": f"window_{w}",
            "title": f"window {w}",
            "run": f"lizard_w{w}_m{{meta}}",
            "measure": "mmlu",
            "metric": "acc",
            "of": "mmlu",
            "unit": "percent",
        }
        for w in (32, 64)
    ],
    "published": [
        {"row": row, "column": column, "value": value, "model": "Llama-3-8B"}
        for row, column, value in (
            ("meta_2", "window_32", 51.3),
            ("meta_2", "window_64", 54.1),
            ("meta_4", "window_32", 52.4),
        )
    ],
    "claims": [
        {
            "claim": "64 beats 32",
            "source": "s",
            "left": {"row": "meta_4", "column": "window_64"},
            "right": {"row": "meta_4", "column": "window_32"},
            "op": ">",
            "floor": 0,
        }
    ],
}


def of_matrix(windows=(32, 64), metas=(2, 4)):
    return {
        (run, "mmlu"): measurement(run, "mmlu", reading("acc", (w + m) / 1000, 0.001, 50, "mmlu"))
        for w, m in itertools.product(windows, metas)
        for run in [f"lizard_w{w}_m{m}"]
    }


def test_a_matrix_shows_each_combination_in_its_cell_beside_what_is_published(tmp_path):
    artefact = read(paper(tmp_path, **MATRIX))
    make(artefact, of_matrix(), MINI, tmp_path)
    found = rows(tmp_path / "table1.csv", "row")
    for m, w in itertools.product((2, 4), (32, 64)):
        row = found[f"meta_{m}"]
        assert (
            float(row[f"window_{w}"]) == pytest.approx((w + m) / 10)
            and row["meta"] == str(m)
            and row[f"window_{w}_n"] == "50"
        )
    assert found["meta_2"]["published_window_64"] == "54.1" and found["meta_4"]["published_window_64"] == ""
    cells = json.loads((tmp_path / "table1.provenance.json").read_text())["cells"]
    assert cells["meta_4"]["window_32"] == "results/lizard_w32_m4/mmlu/run.json"
    assert (
        cells["meta_2"]["published_window_64"]
        == "workflow/papers/lizard/published.csv#/table1/meta_2/window_64"
    )
    [claim] = rows(tmp_path / "table1.claims.csv", "claim").values()
    assert (
        claim["verdict"] == "reproduced"
        and claim["paper"] == "lizard"
        and "meta_4 window_64" in claim["figures"]
    )
    text = (tmp_path / "table1.md").read_text()
    assert "paper's window 64" in text and "the paper's, Llama-3-8B" in text and "6.8 ± 0.1" in text


def test_a_combination_that_was_not_run_is_unrun_alone(tmp_path):
    found = {read: m for read, m in of_matrix().items() if read[0] != "lizard_w64_m4"}
    make(read(paper(tmp_path, **MATRIX)), found, MINI, tmp_path)
    row = rows(tmp_path / "table1.csv", "row")["meta_4"]
    assert row["window_64"] == "not run" and float(row["window_32"]) == pytest.approx(3.6)
    assert rows(tmp_path / "table1.claims.csv", "claim")["64 beats 32"]["verdict"] == UNTESTED


def test_a_sweep_along_a_metric_s_own_axis_is_read_at_its_places(tmp_path):
    columns = [
        {"name": f"length_{n}", "measure": "ppl", "metric": "perplexity", "at": {"length": n}}
        for n in (2048, 4096, 8192)
    ]
    artefact = read(paper(tmp_path, rows=[{"run": "lizard"}], columns=columns))
    ours = measurement(
        "lizard",
        "ppl",
        *(reading("perplexity", n / 1000, length=n) for n in (2048, 4096)),
        reading("perplexity", 9.0),
    )
    make(artefact, {("lizard", "ppl"): ours}, MINI, tmp_path)
    row = rows(tmp_path / "table1.csv")["lizard"]
    assert [row[f"length_{n}"] for n in (2048, 4096, 8192)] == ["2.048", "4.096", "not run"]


def test_without_a_list_of_columns_the_csv_has_run_words_facts_numbers_and_what_is_published(tmp_path):
    columns = [{"name": "acc", "measure": "mmlu", "metric": "acc", "unit": "percent"}]
    given = [{"run": "lizard", "text": {"map": "exp"}}, {"name": "Mamba-7B", "text": {"map": "none"}}]
    printed = [{"value": 60.0}, {"row": "Mamba-7B", "value": 33.3}]
    path = paper(tmp_path, rows=given, columns=columns, texts={"map": "Map"}, published=printed)
    make(read(path), {("lizard", "mmlu"): measurement("lizard", "mmlu", reading("acc", 0.5))}, MINI, tmp_path)
    found = rows(tmp_path / "table1.csv", "row")
    assert (
        list(found["lizard"])
        == (
            "row run map method variant scale trainable_params distill_tokens finetune_tokens acc acc_stderr"
            " acc_n gate collapsed published_acc published_model published_source"
        ).split()
    )
    assert (
        found["lizard"]["gate"] == "not run"
        and found["lizard"]["collapsed"] == ""
        and found["lizard"]["distill_tokens"] == "16384"
    )
    assert (
        found["Mamba-7B"]["acc"] == "not run"
        and found["Mamba-7B"]["published_acc"] == "33.3"
        and found["Mamba-7B"]["run"] == ""
    )


def test_tokens_of_a_step_that_a_run_does_not_have_are_none(measured, tmp_path):
    alone = {read: m._replace(facts=m.facts | {"tokens": {"finetune": 5}}) for read, m in measured.items()}
    make(TABLE2, alone, MINI, tmp_path)
    row = rows(tmp_path / "table2.csv")["t2r"]
    assert (row["distill_tokens"], row["finetune_tokens"]) == ("0", "5")


# --- claims ---

TOY_DOSE = """
label: Toy
says: nothing
columns: [{name: ppl, measure: perplexity, metric: perplexity}]
rows: [{run: teacher}, {run: lizard}]
claims: [{claim: c, source: s, left: lizard, right: teacher, column: ppl, op: "<", dose: {lizzard: 40}}]
"""


def claim(**options):
    given = {"source": "s", "left": "a", "right": "b", "column": "x", "op": ">", "margin_by": "ours"}
    return Claim(claim="a claim", **given | options)


def two(a, b, stderr=1.0, **more):
    values = {"a": (a, stderr), "b": (b, stderr), **more}
    return lambda point: Value(*values[point.row], point.row)


@pytest.mark.parametrize(
    ("a", "b", "options", "verdict"),
    [
        (50, 45, {}, "reproduced"),
        (45, 50, {}, "contradicted"),
        (50, 48, {}, UNTESTED),  # 2 standard errors of the difference are 2.83
        (50, 45, {"margin": 4}, UNTESTED),
        (50, 40, {"margin": 5}, "reproduced"),
        (50, 45, {"margin": 20}, "contradicted"),
        (48, 50, {"margin": -6}, "reproduced"),  # no more than 6 worse
        (40, 50, {"margin": -6}, "contradicted"),
        (10, 20, {"op": "<"}, "reproduced"),
        (20, 10, {"op": "<"}, "contradicted"),
        (10, 20, {"op": "<", "margin": 20}, "contradicted"),
        (12, 10, {"op": "<", "margin": -6}, "reproduced"),
        (40, 10, {"ratio": 3.5}, UNTESTED),  # 4 ± 0.41
        (40, 10, {"ratio": 2}, "reproduced"),
        (40, 10, {"ratio": 6}, "contradicted"),
        (40, 10, {"ratio": 6, "op": "<"}, "reproduced"),
        (40, 0, {"ratio": 6}, UNTESTED),
        (40, 0, {"ratio": 30, "right": None}, "reproduced"),
        (40, 0, {"ratio": 39, "right": None}, UNTESTED),
    ],
)
def test_a_verdict_needs_two_standard_errors_beyond_the_margin(a, b, options, verdict):
    assert judge(claim(**options), two(a, b)).verdict == verdict


def test_costs_are_compared_as_they_are():
    assert judge(claim(ratio=4), two(401, 100, stderr=0.0)).verdict == "reproduced"
    assert judge(claim(ratio=4), two(400, 100, stderr=0.0)).verdict == "contradicted"


def test_a_claim_beyond_the_ceiling_cannot_be_tested():
    judgement = judge(claim(margin=20, ceiling="c"), two(40, 30, c=(45, 1.0)))
    assert judgement.verdict == UNTESTED and "even c is only 15.00 better than b" in judgement.reason
    assert judge(claim(margin=5, ceiling="c"), two(45, 30, c=(45, 1.0))).verdict == "reproduced"


def test_rows_at_chance_tell_nothing():
    judgement = judge(claim(margin=-5, floor=25), two(25, 24))
    assert judgement.verdict == UNTESTED and "better than chance, 25.00" in judgement.reason
    assert judge(claim(floor=25), two(20, 10)).verdict == UNTESTED, "worse than chance is no better"
    assert judge(claim(margin=-5, floor=25), two(40, 24)).verdict == "reproduced"


def test_a_table_knows_the_chance_of_tasks_with_choices_and_of_their_mean():
    spec = TABLE2.spec
    columns = {column.name: column for column in spec.columns}
    assert [
        chance_of(columns, name)
        for name in ("piqa_acc", "mmlu_acc", "avg_no_mmlu", "ppl", "lambada_openai_acc")
    ] == [50, 25, 35, None, None]
    above = Claim(claim="c", source="s", left="lizard", right="t2r", column="avg_no_mmlu", op=">")
    assert (
        spec.floored(above).floor == 35 and spec.floored(above.model_copy(update={"floor": 30.0})).floor == 30
    )
    assert spec.floored(above.model_copy(update={"op": "<"})).floor is None


def test_a_recovery_counts_from_the_chance_of_its_tasks_where_it_says_no_other(tmp_path):
    acc = {"name": "acc", "measure": "mmlu", "metric": "acc", "of": "mmlu", "unit": "percent"}
    rows = [{"run": "teacher"}, {"run": "lizard"}]
    for chance, share in (({}, 50), ({"chance": 0}, 75)):
        columns = [
            acc,
            {"name": "kept", "unit": "percent", "recovery": {"column": "acc", "row": "teacher", **chance}},
        ]
        artefact = read(paper(tmp_path, columns=columns, rows=rows, caption=["Chance is {acc_chance}."]))
        measured = {
            read: found
            for run, acc in (("teacher", 0.5), ("lizard", 0.375))
            for read, found in everything(run, acc).items()
        }
        make(artefact, measured, MINI, tmp_path)
        found = {
            row["run"]: row for row in csv.DictReader((tmp_path / "table1.csv").read_text().splitlines())
        }
        assert (
            float(found["lizard"]["kept"]) == pytest.approx(share)
            and "Chance is 25." in (tmp_path / "table1.md").read_text()
        )
    with pytest.raises(
        ConfigError, match="the recovery 'kept' needs `chance`: what guessing scores in 'acc' is not known"
    ):
        read(
            paper(
                tmp_path,
                columns=[
                    acc | {"of": "lambada_openai"},
                    columns[1] | {"recovery": {"column": "acc", "row": "teacher"}},
                ],
                rows=rows,
            )
        )


def dosed(tokens, measured, tmp_path):
    """The verdict on a claim whose paper gave the left row so many tokens; ours had 40,960."""
    said = next(c for c in TABLE2.spec.claims if c.claim == "LoLCATs beats SUPRA on average")
    spec = TABLE2.spec.model_copy(
        update={"claims": (said.model_copy(update={"dose": {"lolcats_window": tokens}}),)}
    )
    make(replace(TABLE2, spec=spec), measured, MINI, tmp_path)
    [verdict] = rows(tmp_path / "table2.claims.csv", "claim").values()
    return verdict


def test_a_run_of_fewer_tokens_than_the_papers_proves_and_refutes_nothing(measured, tmp_path):
    ours = sum(measured["lolcats_window", "perplexity"].facts["tokens"].values())
    assert (
        dosed(ours, measured, tmp_path)["verdict"]
        == dosed(ours * 1.01, measured, tmp_path)["verdict"]
        == "reproduced"
    )
    verdict = dosed(10 * ours, measured, tmp_path)
    assert verdict["verdict"] == UNTESTED and verdict["reason"].startswith(
        f"other dose: lolcats_window had {count(ours)} of {count(10 * ours)} tokens; "
    )
    assert "lolcats_window 58" in verdict["figures"], "the numbers stand"


def test_a_dose_of_a_row_that_there_is_not_is_refused(tmp_path):
    paper = tmp_path / "papers/toy"
    paper.mkdir(parents=True)
    (paper / "table.yaml").write_text(TOY_DOSE)
    (paper / "paper.yaml").write_text("title: A paper")
    with pytest.raises(ConfigError, match="no row 'lizzard'; have teacher, lizard"):
        read(paper / "table.yaml")


def test_nothing_is_judged_at_a_scale_that_says_nothing_or_without_a_number():
    verdict, figures, reason, *_ = judge(claim(), two(50, 10), "the teacher is random")
    assert (verdict, figures) == (UNTESTED, judge(claim(), two(50, 10)).figures) and reason.startswith(
        "the teacher is random; difference 40.00"
    )
    assert judge(claim(published="p"), lambda point: f"{point.row}: x was not run")[:3] == (
        UNTESTED,
        "published p",
        "a: x was not run",
    )


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (everything("lizard", passed=False), "lizard failed its gate"),
        (everything("lizard", stderr=None), "lizard: avg is 50.33, without a standard error"),
        (everything("lizard", acc=math.inf), "lizard: avg is inf with standard error"),
        (everything("lizard", acc=math.nan), "lizard: avg is nan with standard error"),
    ],
)
def test_a_failed_gate_a_missing_error_and_a_number_that_is_none_judge_nothing(
    measured, tmp_path, found, reason
):
    make(TABLE2, measured | found, MINI, tmp_path)
    verdict = rows(tmp_path / "table2.claims.csv", "claim")["Lizard beats SUPRA on average"]
    assert verdict["verdict"] == UNTESTED and re.match(reason, verdict["reason"]), verdict["reason"]


@pytest.mark.parametrize(
    ("bounds", "missed"),
    [({"most": 40}, "at most 40.00"), ({"least": 60}, "60.00"), ({"least": 40, "most": 60}, None)],
)
def test_a_claim_is_judged_where_a_number_that_it_requires_keeps_its_bounds(bounds, missed):
    judgement = judge(claim(requires=[{"row": "b", **bounds}]), two(60, 50))
    assert judgement.verdict == (UNTESTED if missed else "reproduced")
    assert judgement.reason.startswith(
        "not informative: b 50.00 ± 1.00, of " + missed + " required; " if missed else "difference 10.00"
    )


@pytest.mark.parametrize("floor", [20, 46.9, 47.1, 60])
def test_a_claim_is_not_judged_where_what_it_requires_is_at_its_floor(floor):
    """The ladder of untrained needles: the teacher is looked at first."""
    judgement = judge(claim(requires=[{"row": "b", "above": floor}]), two(60, 50))  # b has an error of 1
    assert judgement.verdict == ("reproduced" if floor < 47 else UNTESTED)
    told = f"not informative: b 50.00 ± 1.00 is not 3 standard errors above {floor:.2f}; "
    assert judgement.reason.startswith("difference 10.00" if floor < 47 else told)


@pytest.mark.parametrize("bounds", [{}, {"least": 2, "most": 1}, {"above": 5, "most": 5}])
def test_a_number_is_required_within_bounds(bounds):
    with pytest.raises(
        ValueError,
        match="give `least`, `most`, `above`, or some of them that a number can keep together; got least",
    ):
        claim(requires=[{"row": "b", **bounds}])


def test_our_own_questions_are_counted_apart_from_the_papers_claims():
    ours, controls = (
        read(ROOT / f"workflow/papers/comparison/{name}.yaml").spec for name in ("second", "controls")
    )
    found = [Judgement("contradicted", "", "")] * len(ours.claims)
    none = "0 not tested"
    assert (
        _counts(ours, found)
        == f"Of the paper's claims: 0 reproduced, 2 contradicted, {none}; of our own questions: 0 reproduced,"
        f" 6 contradicted, {none}"
    )
    assert [claim.whose for claim in controls.claims[:2]] == [
        "ours, proxy for an average",
        "ours",
    ], "a proxy is a question of ours"
    alone = [claim for claim in ours.claims if claim.source == "our question"]
    text = _counts(ours.model_copy(update={"claims": alone}), found[:1] * len(alone))
    assert text == f"Of our own questions: 0 reproduced, {len(alone)} contradicted, {none}"


def test_figures_and_reason_carry_the_numbers():
    judgement = judge(claim(published="70 and 60"), two(50, 48))
    assert "a 50.00 ± 1.00, b 48.00 ± 1.00; difference 2.00 ± 1.41; published 70 and 60" in judgement.figures
    assert judgement.reason == "difference 2.00 ± 1.41 is within error of 0.00"


@pytest.mark.parametrize(
    ("value", "text"), [(12.345, "12.35"), (1420.72, "1420.7"), (65800.0, "6.58e4"), (math.inf, "inf")]
)
def test_numbers_read_as_papers_print_them(value, text):
    assert number(value) == text


# --- what is imported ---


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("table", {"torch", "transformers", "matplotlib"}),
        ("index", {"torch", "transformers", "matplotlib", "pandas"}),
    ],
)
def test_drawing_a_table_imports_neither_torch_nor_matplotlib_and_the_index_not_even_pandas(modules, heavy):
    code = f"import sys, relinear.draw.{modules}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'kernels'}"},
    )
    assert done.returncode == 0, done.stderr
    assert not heavy & set(done.stdout.split())


# --- the data that stood in ---


def test_a_number_that_there_cannot_be_says_why_and_is_no_unrun_cell(tmp_path):
    columns = [
        {"name": n, "measure": m, "metric": "perplexity"}
        for n, m in (("ppl", "perplexity"), ("less", "perplexity_no_linear"))
    ]
    claims = [
        {"claim": "c", "source": "s", "left": "lizard", "right": "teacher", "column": "less", "op": "<"}
    ]
    rows = [{"run": "teacher", "cells": {"less": {"undefined": "no linear part"}}}, {"run": "lizard"}]
    artefact = read(paper(tmp_path, columns=columns, rows=rows, claims=claims))
    assert ("teacher", "perplexity_no_linear") not in artefact.reads() and (
        "lizard",
        "perplexity_no_linear",
    ) in artefact.reads()
    found = {
        (run, "perplexity"): measurement(run, "perplexity", reading("perplexity", 20.0))
        for run in ("teacher", "lizard")
    }
    found["lizard", "perplexity_no_linear"] = measurement(
        "lizard", "perplexity_no_linear", reading("perplexity", 30.0)
    )
    make(artefact, found, About("mini"), tmp_path)
    with (tmp_path / "table1.csv").open() as file:
        table = {row["run"]: row for row in csv.DictReader(file)}
    assert (
        table["teacher"]["less"] == "not defined: no linear part"
        and table["teacher"]["less_n"] == "not defined"
    )
    assert table["lizard"]["less"] == "30" and table["teacher"]["ppl"] == "20"
    assert "not defined: no linear part" in (tmp_path / "table1.md").read_text()
    assert "teacher: less is not defined: no linear part" in (tmp_path / "table1.claims.csv").read_text()


def test_a_cell_that_is_undefined_is_read_nowhere(tmp_path):
    rows = [{"run": "teacher", "cells": {"ppl": {"undefined": "none", "measure": "perplexity"}}}]
    with pytest.raises(ConfigError, match="is read nowhere; give one or the other"):
        read(
            paper(
                tmp_path,
                columns=[{"name": "ppl", "measure": "perplexity", "metric": "perplexity"}],
                rows=rows,
            )
        )


def test_a_column_names_the_data_that_stood_in_for_the_paper_s(tmp_path):
    columns = [
        {"name": "kl", "title": "CoLA ({data})", "measure": "kl_cola", "metric": "kl"},
        {"name": "mse", "measure": "kl_cola", "metric": "mse"},
    ]
    given = {"rows": [{"run": "lizard"}, {"run": "t2r"}], "columns": columns}
    spec = read(paper(tmp_path, **given, published=[{"column": "kl", "value": 0.17}]))
    found = {
        ("lizard", "kl_cola"): measurement("lizard", "kl_cola", reading("kl", 0.4), reading("mse", 0.1)),
        ("t2r", "kl_cola"): None,
    }
    make(spec, found, About("mini", data={"kl_cola": "brown-sentences"}), tmp_path)
    shown, table = (tmp_path / "table1.md").read_text(), rows(tmp_path / "table1.csv")
    assert (
        "CoLA (brown-sentences)" in shown
        and "paper's CoLA |" in re.sub(" +", " ", shown)
        and "{data}" not in shown
    )
    assert (table["lizard"]["kl_data"], table["t2r"]["kl_data"]) == (
        "brown-sentences",
        "not run",
    ) and "mse_data" not in table["lizard"]
    origins = json.loads((tmp_path / "table1.provenance.json").read_text())["cells"]
    assert origins["lizard"]["kl_data"] == origins["lizard"]["kl"]
