"""Tables, claims and figures from synthetic stage folders."""

import csv
import hashlib
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from relinear import draw as papers
from relinear.draw import headline, lolcats
from relinear.draw._render import number
from relinear.draw.claims import UNTESTED, Claim, judge

ROOT = Path(__file__).parents[1]
RUNS = ["teacher", "teacher_lora", "t2r", "hedgehog", "supra", "lolcats_linear", "lolcats_window", "lizard"]
ACCURACY = dict(zip(RUNS, [0.60, 0.61, 0.26, 0.40, 0.35, 0.45, 0.58, 0.57], strict=True))
CLAIM = {"claim": "c", "paper": "lolcats", "source": "s", "op": ">"}
CLAIM |= {"left": "t2r", "right": "t2r", "column": "avg"}
TASKS = ("piqa", "arc_easy", "arc_challenge", "hellaswag", "winogrande", "mmlu")


@pytest.fixture
def paper():
    return headline.read(ROOT / "workflow/papers/headline.yaml")


@pytest.fixture
def lolcats_paper():
    return lolcats.read(ROOT / "workflow/papers/lolcats.yaml")


def perplexity(value):
    return {"value": value, "stderr": value / 50, "tokens": 8192, "chunk_mean_exp": 1.1 * value}


def evaluation(run, acc, ppl=20.0, stderr=0.01, n=100):
    scores = {"acc": acc, "acc_stderr": stderr, "acc_norm": acc + 0.01, "acc_norm_stderr": stderr, "n": n}
    without_norm = {key: score for key, score in scores.items() if "norm" not in key}
    tasks = {task: without_norm if task in ("winogrande", "mmlu") else scores for task in TASKS}
    return {
        "run": run,
        "method": run.split("_")[0],
        "variant": "code",
        "scale": "mini",
        "trainable_params": 1_234_567,
        "distill_tokens": 16384,
        "finetune_tokens": 16384,
        "perplexity": perplexity(ppl),
        "tasks": tasks,
        "gate": {"passed": True, "parallel_vs_recurrent": 1e-6},
        "collapsed": False,
    }


def stage(folder, run, name, metrics, scale="mini"):
    path = folder / run / name
    path.mkdir(parents=True)
    record = {"schema": 1, "run": run, "stage": name, "scale": scale, "key": f"key-of-{run}-{name}"}
    (path / "run.json").write_text(json.dumps(record))
    (path / "metrics.json").write_text(json.dumps(metrics))
    return path / "metrics.json"


@pytest.fixture
def metrics(tmp_path):
    return {run: stage(tmp_path, run, "evaluate", evaluation(run, ACCURACY[run])) for run in RUNS}


def read_csv(path):
    return {row["run"]: row for row in csv.DictReader(path.read_text().splitlines())}


def claim(**options):
    between_two = {"paper": "p", "source": "s", "left": "a", "right": "b", "column": "x", "op": ">"}
    return Claim(claim="a claim", **between_two | options)


def two(a, b, stderr=1.0, **more):
    return {"a": {"x": a, "x_stderr": stderr}, "b": {"x": b, "x_stderr": stderr}, **more}


# --- the papers' data ---


def test_the_folder_is_the_registry():
    assert {"headline", "lolcats"} <= set(papers.available())
    assert papers.load("lolcats") is lolcats
    with pytest.raises(ValueError, match="no paper 'lolcat'.*headline"):
        papers.load("lolcat")


def test_published_averages_are_the_means_of_their_cells(paper):
    for row in paper.table2.rows:
        for entry in row.published:
            cells = dict(entry.values)
            cells.setdefault("piqa_acc", cells.get("piqa_acc_norm"))
            for average, columns in headline.AVERAGED.items():
                if average in cells:
                    assert sum(cells[c] for c in columns) / len(columns) == pytest.approx(cells[average], abs=0.08), entry


def test_supra_never_publishes_piqa_acc(paper):
    own = [entry for row in paper.table2.rows for entry in row.published if entry.source == "supra"]
    assert len(own) == 5
    assert all("piqa_acc" not in entry.values and "piqa_acc_norm" in entry.values for entry in own)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"titel": "x"}, "titel"),
        ({"claims": [CLAIM | {"column": "aavg"}]}, "no column 'aavg'"),
        ({"claims": [CLAIM | {"left": "t3r"}]}, "no run 't3r'"),
        ({"claims": [CLAIM | {"paper": "lolcat"}]}, "no paper 'lolcat'"),
        ({"claims": [CLAIM | {"op": "~"}]}, "claims.0.op"),
        ({"sources": {}}, "no source 'lizard'"),
    ],
)
def test_a_wrong_name_in_the_yaml_is_refused_with_the_file_and_the_name(tmp_path, change, message):
    data = yaml.safe_load((ROOT / "workflow/papers/headline.yaml").read_text()) | change
    (tmp_path / "headline.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(ValueError, match=f"(?s)headline.yaml.*{message}"):
        headline.read(tmp_path / "headline.yaml")


def test_published_numbers_name_measured_or_copied(tmp_path):
    text = (ROOT / "workflow/papers/headline.yaml").read_text().replace("{measured: true}", "{}", 1)
    (tmp_path / "headline.yaml").write_text(text)
    with pytest.raises(ValueError, match="measured: true"):
        headline.read(tmp_path / "headline.yaml")


def test_each_label_of_lolcats_stands_once_in_its_yaml_and_once_in_its_function(lolcats_paper):
    spec = {"table1": lolcats_paper.table1.label} | {name: figure.label for name, figure in lolcats_paper.figures.items()}
    for name, label in spec.items():
        assert (ROOT / "workflow/papers/lolcats.yaml").read_text().count(label) == 1
        assert label in getattr(lolcats, name).__doc__
        assert sum(path.read_text().count(label) for path in (ROOT / "src/relinear/papers").glob("*.py")) == 1


def test_each_label_of_the_headline_stands_once_in_its_yaml(paper):
    text = (ROOT / "workflow/papers/headline.yaml").read_text()
    assert {text.count(source.label) for source in paper.sources.values()} == {1}


# --- the headline table ---


def test_columns_are_the_contract(metrics, paper, tmp_path):
    headline.table2(metrics, paper, tmp_path, "mini")
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


def test_cells_are_percent_and_averages_propagate_errors(metrics, paper, tmp_path):
    headline.table2(metrics, paper, tmp_path, "mini")
    row = read_csv(tmp_path / "table2.csv")["supra"]
    assert float(row["piqa_acc"]) == 35 and float(row["piqa_acc_norm"]) == 36
    assert float(row["piqa_acc_stderr"]) == 1 and row["piqa_acc_n"] == "100"
    # PIQA acc, ARC-e acc, ARC-c and HellaSwag acc_norm, WinoGrande acc, MMLU acc
    assert float(row["avg"]) == pytest.approx((35 + 35 + 36 + 36 + 35 + 35) / 6, rel=1e-5)
    assert float(row["avg_no_mmlu"]) == pytest.approx((35 + 35 + 36 + 36 + 35) / 5)
    assert float(row["avg_stderr"]) == pytest.approx(math.sqrt(6) / 6, rel=1e-5)
    assert float(row["ppl"]) == 20 and float(row["ppl_stderr"]) == 0.4


def test_published_cells_are_the_papers_and_empty_where_there_are_none(metrics, paper, tmp_path):
    headline.table2(metrics, paper, tmp_path, "mini")
    rows = read_csv(tmp_path / "table2.csv")
    assert rows["lizard"]["published_mmlu_acc"] == "61.2" and "measured" in rows["lizard"]["published_source"]
    assert rows["lolcats_window"]["published_model"] == "Llama-3-8B"
    assert "copied from LoLCATs" in rows["lolcats_window"]["published_source"]
    assert rows["supra"]["published_piqa_acc"] == "" and rows["supra"]["published_piqa_acc_norm"] == "80.4"
    for run in ("hedgehog", "teacher_lora"):
        assert {value for column, value in rows[run].items() if column.startswith("published_")} == {""}


def test_rows_keep_the_given_order_and_new_runs_join(metrics, paper, tmp_path):
    mine = stage(tmp_path, "mine", "evaluate", evaluation("mine", 0.5))
    headline.table2({"mine": mine, **metrics}, paper, tmp_path, "mini")
    rows = read_csv(tmp_path / "table2.csv")
    assert list(rows) == ["mine", *RUNS]
    assert rows["mine"]["avg"] and rows["mine"]["published_avg"] == "" and rows["mine"]["published_source"] == ""
    assert "`mine`" in (tmp_path / "table2.md").read_text()


def test_an_unrun_row_says_so_in_every_measured_cell_and_claims_on_it_are_untested(metrics, paper, tmp_path):
    headline.table2(metrics | {"t2r": None}, paper, tmp_path, "mini")
    row = read_csv(tmp_path / "table2.csv")["t2r"]
    ours = {row[c] for c in headline.MEASURED if c != "run"}
    assert ours == {"not run"} and row["published_arc_easy_acc"] == "27.4"
    verdicts = list(csv.DictReader((tmp_path / "claims.csv").read_text().splitlines()))
    on_t2r = [v for v, c in zip(verdicts, paper.claims, strict=True) if "t2r" in c.runs]
    assert len(on_t2r) >= 4 and {v["verdict"] for v in on_t2r} == {UNTESTED}
    assert all("t2r" in v["reason"] and "not run" in v["reason"] for v in on_t2r)


def test_a_missing_task_leaves_its_average_unrun_and_the_other_standing(paper, tmp_path):
    metrics = evaluation("teacher", 0.6)
    del metrics["tasks"]["mmlu"]
    path = stage(tmp_path, "teacher", "evaluate", metrics)
    headline.table2({"teacher": path}, paper, tmp_path, "mini")
    row = read_csv(tmp_path / "table2.csv")["teacher"]
    assert row["mmlu_acc"] == row["avg"] == row["avg_stderr"] == "not run"
    assert float(row["avg_no_mmlu"]) == pytest.approx(60.4)


def test_tasks_that_no_paper_has_stand_beside_its_averages_where_they_were_scored(metrics, paper, tmp_path):
    headline.table2(metrics, paper, tmp_path, "mini")
    assert "LAMBADA" not in (tmp_path / "table2.md").read_text() and read_csv(tmp_path / "table2.csv")["teacher"]["boolq_acc"] == "not run"
    more = evaluation("teacher", 0.6)
    more["tasks"]["lambada_openai"] = {"acc": 0.28, "acc_stderr": 0.006, "n": 5153}
    path = stage(tmp_path / "more", "teacher", "evaluate", more)
    headline.table2({"teacher": path}, paper, tmp_path, "mini")
    row, text = read_csv(tmp_path / "table2.csv")["teacher"], (tmp_path / "table2.md").read_text()
    assert float(row["lambada_openai_acc"]) == pytest.approx(28.0) and row["boolq_acc"] == "not run"
    assert "LAMBADA (n=5153)" in text and "28.0 ± 0.6" in text and "BoolQ" not in text


def test_a_row_of_several_seeds_is_their_mean_and_its_error_has_both_parts(metrics, paper, tmp_path):
    again = {f"lizard-seed{n}": stage(tmp_path, f"lizard-seed{n}", "evaluate", evaluation(f"lizard-seed{n}", 0.57 + n / 100)) for n in (1, 2)}
    for path in headline.table2(metrics, paper, tmp_path, "mini", repeats={"lizard": again}):
        assert path.is_file()
    rows, text = read_csv(tmp_path / "table2.csv"), (tmp_path / "table2.md").read_text()
    assert list(rows) == RUNS, "seeds are no rows"
    row = rows["lizard"]
    assert row["seeds"] == "3" and rows["supra"]["seeds"] == "1" and rows["supra"]["avg_seed_sd"] == ""
    assert float(row["piqa_acc"]) == pytest.approx(58) and float(row["piqa_acc_seed_sd"]) == pytest.approx(1)
    assert float(row["piqa_acc_stderr"]) == pytest.approx(math.hypot(1, 1 / math.sqrt(3)), rel=1e-5)  # 1: of the items, the same for all
    assert float(row["avg"]) == pytest.approx((58 * 4 + 59 * 2) / 6, rel=1e-5) and float(row["avg_seed_sd"]) == pytest.approx(1)
    assert row["boolq_acc"] == row["boolq_acc_seed_sd"] == "not run" and row["piqa_acc_n"] == "100"
    assert "`lizard`, 3 seeds" in text and "`supra`," not in text and "is their mean" in text
    cells = json.loads((tmp_path / "table2.provenance.json").read_text())
    files = [path.with_name("run.json").as_posix() for path in (metrics["lizard"], *again.values())]
    assert cells["cells"]["lizard"]["avg"] == files and set(files) < set(cells["sources"])
    headline.table2(metrics, paper, tmp_path, "mini")
    assert "seeds" not in (tmp_path / "table2.md").read_text()


def test_one_seed_that_failed_the_gate_or_collapsed_marks_the_row(metrics, paper, tmp_path):
    bad = evaluation("lizard-seed1", 0.57) | {"gate": {"passed": False}, "collapsed": True}
    again = {"lizard-seed1": stage(tmp_path, "lizard-seed1", "evaluate", bad)}
    headline.table2(metrics, paper, tmp_path, "mini", repeats={"lizard": again})
    row = read_csv(tmp_path / "table2.csv")["lizard"]
    assert row["gate"] == "failed" and row["collapsed"] == "True"


def test_every_filled_cell_leads_to_the_run_json_or_the_yaml_entry_that_holds_it(metrics, paper, tmp_path):
    headline.table2(metrics | {"t2r": None}, paper, tmp_path, "mini")
    record = json.loads((tmp_path / "table2.provenance.json").read_text())
    data = yaml.safe_load((ROOT / "workflow/papers/headline.yaml").read_text())
    for run, row in read_csv(tmp_path / "table2.csv").items():
        for column, cell in row.items():
            origin = record["cells"][run][column]
            if column == "run" and cell == "t2r":
                continue
            assert (origin is None) == (cell in ("", "not run")), (run, column)
            if origin is None:
                continue
            if column.startswith("published_"):
                entry = data
                for part in origin.split("#/")[1].split("/"):
                    entry = entry[int(part) if part.isdigit() else part]
                if (name := column.removeprefix("published_")) in entry["values"]:
                    assert entry["values"][name] == float(cell)
            else:
                source = record["sources"][origin]
                assert source["key"] == f"key-of-{run}-evaluate"
                assert source["sha256"] == hashlib.sha256(Path(origin).read_bytes()).hexdigest()
                assert json.loads(Path(origin).read_text())["run"] == run


@pytest.mark.parametrize("swap", ["run", "scale", "stage"])
def test_metrics_of_another_run_scale_or_stage_are_refused(metrics, paper, tmp_path, swap):
    record = metrics["lizard"].with_name("run.json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {swap: "other"}))
    with pytest.raises(ValueError, match=f"{swap} is 'other', expected"):
        headline.table2(metrics, paper, tmp_path, "mini")


def test_a_path_that_is_not_there_is_an_error_not_an_unrun_row(metrics, paper, tmp_path):
    with pytest.raises(FileNotFoundError, match="lizard"):
        headline.table2(metrics | {"lizard": tmp_path / "nowhere/metrics.json"}, paper, tmp_path, "mini")


def test_a_metrics_file_without_a_field_names_file_and_field(paper, tmp_path):
    metrics = evaluation("teacher", 0.6)
    del metrics["gate"]
    path = stage(tmp_path, "teacher", "evaluate", metrics)
    with pytest.raises(ValueError, match="(?s)metrics.json.*gate"):
        headline.table2({"teacher": path}, paper, tmp_path, "mini")


def test_the_same_inputs_give_the_same_bytes(metrics, paper, tmp_path):
    first = [path.read_bytes() for path in headline.table2(metrics, paper, tmp_path / "a", "mini", "SmolLM2")]
    assert first == [path.read_bytes() for path in headline.table2(metrics, paper, tmp_path / "b", "mini", "SmolLM2")]


def test_markdown_names_scale_teacher_n_errors_and_warns_of_the_demonstration(metrics, paper, tmp_path):
    headline.table2(metrics, paper, tmp_path, "mini", "SmolLM2-135M-Instruct")
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
    ):
        assert part in text, part
    metrics["mine"] = stage(tmp_path, "mine", "evaluate", evaluation("mine", 0.5, n=7))
    headline.table2(metrics, paper, tmp_path, "mini")
    text = (tmp_path / "table2.md").read_text()
    assert "(n=100)" not in text and "35.0 ± 1.0 (100)" in text and "50.0 ± 1.0 (7)" in text


# --- claims ---


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
    ],
)
def test_a_verdict_needs_two_standard_errors_beyond_the_margin(a, b, options, verdict):
    assert judge(claim(**options), two(a, b), "mini").verdict == verdict


def test_a_claim_beyond_the_ceiling_cannot_be_tested():
    rows = two(40, 30, c={"x": 45, "x_stderr": 1.0})
    judgement = judge(claim(margin=20, ceiling="c"), rows, "mini")
    assert judgement.verdict == UNTESTED and "even c is only 15.00 better than b" in judgement.reason
    assert judge(claim(margin=5, ceiling="c"), two(45, 30, c={"x": 45, "x_stderr": 1.0}), "mini").verdict == "reproduced"


def test_nothing_is_judged_on_a_random_teacher_a_failed_gate_or_without_errors():
    assert judge(claim(), two(50, 10), "smoke").verdict == UNTESTED
    failed = two(50, 10)
    failed["a"]["gate"] = "failed"
    assert "gate" in judge(claim(), failed, "mini").reason
    assert judge(claim(), two(50, 10, stderr=None), "mini").verdict == UNTESTED
    assert judge(claim(), two(math.inf, 10), "mini").verdict == UNTESTED


def test_figures_and_reason_carry_the_numbers():
    judgement = judge(claim(published="70 and 60"), two(50, 48), "mini")
    assert "a 50.00 ± 1.00, b 48.00 ± 1.00; difference 2.00 ± 1.41; published 70 and 60" in judgement.figures
    assert judgement.reason == "difference 2.00 ± 1.41 is within error of 0.00"


# --- LoLCATs ---


def fidelity(run, layers=2, heads=6, shown=((0, 0), (1, 3)), ppl=50.0):
    rng = np.random.default_rng(0)
    kl, mse = rng.lognormal(-1, 1, (layers, heads)), rng.lognormal(-3, 1, (layers, heads))
    return {
        "run": run,
        "method": "lolcats",
        "options": {"feature": "exp"},
        "perplexity": perplexity(ppl),
        "mse": float(mse.mean()),
        "kl": float(kl.mean()),
        "mse_per_head": mse.tolist(),
        "kl_per_head": kl.tolist(),
        "shown": [list(pair) for pair in shown],
    }


def weights(shown, length=64, sharp=2.0):
    rng = np.random.default_rng(1)
    tensors = {}
    for layer, head in shown:
        for kind, power in (("softmax", sharp), ("method", 0.7 * sharp)):
            scores = power * rng.normal(size=(length, length)) + np.eye(length) * 4
            scores[:, 0] += 3  # the attention sink
            causal = np.where(np.tri(length, dtype=bool), np.exp(scores), 0)
            tensors[f"{kind}.{layer}.{head}"] = (causal / causal.sum(1, keepdims=True)).astype(np.float32)
    return tensors


def fidelity_folder(tmp_path, run, **shape):
    metrics = fidelity(run, **shape)
    folder = stage(tmp_path, run, "fidelity", metrics).parent
    save_file(weights(metrics["shown"]), folder / "weights.safetensors")
    return folder


@pytest.fixture
def lolcats_metrics(tmp_path, lolcats_paper):
    runs = [row.run for row in lolcats_paper.table1.rows if row.run != "teacher"]
    before = {run: stage(tmp_path, run, "fidelity", fidelity(run, ppl=65800.0 if "not" in run else 50)) for run in runs}
    after = {run: stage(tmp_path, run, "evaluate", evaluation(run, 0.4, ppl=30)) for run in [*runs, "teacher", "teacher_lora"]}
    return before, after


def test_table1_takes_ppl_at_0_from_fidelity_and_ppl_at_2_from_evaluation(lolcats_metrics, lolcats_paper, tmp_path):
    lolcats.table1(*lolcats_metrics, lolcats_paper, tmp_path, "mini", "SmolLM2")
    rows = read_csv(tmp_path / "table1.csv")
    assert list(next(iter(rows.values()))) == list(lolcats.COLUMNS) and len(rows) == 7
    row = rows["lolcats_exp_notransfer"]
    assert float(row["ppl_at_0"]) == 65800 and float(row["ppl_at_2"]) == 30 and row["transfer"] == "False"
    assert float(row["ppl_at_0_chunk_mean_exp"]) == pytest.approx(72380) and float(row["published_ppl_at_2"]) == 6.78
    assert float(rows["teacher"]["kl"]) == 0 and rows["teacher"]["transfer"] == ""
    text = (tmp_path / "table1.md").read_text()
    assert "6.58e4 ± 1.3e3" in text and "1.02e4" in text and "demonstration" in text
    verdicts = [v["verdict"] for v in csv.DictReader((tmp_path / "table1.claims.csv").read_text().splitlines())]
    assert verdicts[:3] == ["reproduced"] * 3 and set(verdicts[3:]) == {UNTESTED}


def test_the_softmax_row_is_the_teacher_before_and_after_lora(lolcats_metrics, lolcats_paper, tmp_path):
    before, after = lolcats_metrics
    after["teacher_lora"] = None
    lolcats.table1(before, after, lolcats_paper, tmp_path, "mini")
    row = read_csv(tmp_path / "table1.csv")["teacher"]
    assert float(row["ppl_at_0"]) == 30 and row["ppl_at_2"] == "not run"
    sources = json.loads((tmp_path / "table1.provenance.json").read_text())
    assert sources["cells"]["teacher"]["ppl_at_0"].endswith("teacher/evaluate/run.json")
    assert sources["cells"]["lolcats_exp"]["kl"].endswith("lolcats_exp/fidelity/run.json")
    assert sources["cells"]["lolcats_exp"]["ppl_at_2_stderr"].endswith("lolcats_exp/evaluate/run.json")
    assert sources["cells"]["lolcats_exp"]["published_kl"].endswith("lolcats.yaml#/table1/rows/5/published")


def test_table1_refuses_a_run_it_has_no_row_for(lolcats_paper, tmp_path):
    with pytest.raises(ValueError, match=r"got runs \['lizard'\].*lolcats_exp"):
        lolcats.table1({"lizard": None}, {}, lolcats_paper, tmp_path, "mini")


@pytest.mark.parametrize("name", ["figure3", "figure4", "figure5", "figure6"])
def test_each_figure_is_drawn_from_its_own_run(lolcats_paper, tmp_path, name):
    run = lolcats_paper.figures[name].run
    folder = fidelity_folder(tmp_path, run)
    pdf, png, record = getattr(lolcats, name)(folder, lolcats_paper, tmp_path / "out", "mini")
    assert pdf.read_bytes().startswith(b"%PDF") and png.read_bytes().startswith(b"\x89PNG")
    assert run in json.loads(record.read_text())["cells"]
    other = "figure4" if name == "figure3" else "figure3"
    with pytest.raises(ValueError, match=f"run is '{run}', expected"):
        getattr(lolcats, other)(folder, lolcats_paper, tmp_path / "out", "mini")


def test_a_figure_of_missing_or_broken_weights_is_refused(lolcats_paper, tmp_path):
    folder = fidelity_folder(tmp_path, "lolcats_exp")
    tensors = weights([(0, 0)])
    save_file(tensors, folder / "weights.safetensors")
    with pytest.raises(ValueError, match=r"no weights 'softmax.1.3'; have \['method.0.0'"):
        lolcats.figure3(folder, lolcats_paper, tmp_path, "mini")
    tensors["method.0.0"][3, 1] = np.nan
    save_file(tensors, folder / "weights.safetensors")
    with pytest.raises(ValueError, match="'method.0.0' is not finite"):
        lolcats.figure3(folder, lolcats_paper, tmp_path, "mini")
    (folder / "weights.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="weights.safetensors"):
        lolcats.figure3(folder, lolcats_paper, tmp_path, "mini")


@pytest.mark.parametrize(("value", "text"), [(12.345, "12.35"), (1420.72, "1420.7"), (65800.0, "6.58e4"), (math.inf, "inf")])
def test_numbers_read_as_papers_print_them(value, text):
    assert number(value) == text


def test_nothing_is_left_beside_what_was_written(metrics, paper, tmp_path):
    written = headline.table2(metrics, paper, tmp_path / "out", "mini")
    assert sorted((tmp_path / "out").iterdir()) == sorted(written)
    assert not [path for path in written if re.match(r"\.", path.name)]


def test_a_figure_of_a_perfect_method_is_drawn_with_zeros(lolcats_paper, tmp_path):
    metrics = fidelity("lolcats_exp") | {"kl_per_head": [[0.0] * 6] * 2, "mse_per_head": [[0.0] * 6] * 2}
    folder = stage(tmp_path, "lolcats_exp", "fidelity", metrics).parent
    save_file(weights(metrics["shown"]), folder / "weights.safetensors")
    assert all(path.is_file() for path in lolcats.figure3(folder, lolcats_paper, tmp_path, "mini"))


def test_provenance_names_no_path_of_one_machine(paper):
    assert paper.file.is_absolute()
    assert paper.at("table2/rows/0") == "workflow/papers/headline.yaml#/table2/rows/0"
