"""Laws of the DAG, on real runs at smoke scale: the files that it makes, the nodes that it reruns. No
interruption shows in its result."""

import csv
import hashlib
import json
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
from conftest import FIGURES, HOLD, TARGETS, append, children, curve_of, wait

from relinear.plan.forms import contents
from relinear.records import drawn_early, entries

ROWS = ["teacher", "teacher_lora", "t2r", "hedgehog", "supra", "lolcats_linear", "lolcats_window", "lizard"]
ACCURACIES = [
    "piqa_acc",
    "piqa_acc_norm",
    "arc_easy_acc",
    "arc_challenge_acc_norm",
    "hellaswag_acc_norm",
    "winogrande_acc",
    "mmlu_acc",
]
AVERAGES = ["avg", "avg_no_mmlu"]
BESIDE = ("lambada_openai_acc", "boolq_acc")  # tasks that other scales score
DESCRIBED = ["run", "method", "variant", "scale", "trainable_params", "distill_tokens", "finetune_tokens"]
TABLES = ["comparison_table2", "table2"]
MEASURES = ("gate", "perplexity", "commonsense", "mmlu")  # the measures of a row of the headline table
RENDERED = [
    *TABLES,
    "lolcats_figure3",
    "lolcats_figure4",
    "lolcats_figure5",
    "lolcats_figure6",
    "lolcats_table1",
]

pytestmark = pytest.mark.dag


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def of(run: str, *stages: str) -> list[str]:
    """Jobs of a run: its steps and measures, and `all` for every measure of a headline row."""
    names = [name for stage in stages for name in (MEASURES if stage == "all" else [stage])]
    return [f"{name} {run}" if name in ("distill", "finetune") else f"measure {run} {name}" for name in names]


def stage_folders(clone) -> list[Path]:
    return sorted(p.parent for p in (clone / "results/smoke").rglob("run.json") if ".work" not in p.parts)


# --- what it makes ---


def test_every_target_is_there(finished):
    for target in TARGETS:
        assert (finished / target).stat().st_size > 0, target
    for figure in FIGURES:
        assert (finished / figure).read_bytes().startswith(b"\x89PNG")
        assert (finished / figure).with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    assert drawn_early(finished / "results/smoke/comparison/.table2.json") is None
    for name in ("table2.md", "table2.provenance.json", "table2.claims.csv", "mlflow.db"):
        assert (finished / "results" / name).stat().st_size > 0, name
    assert len(rows(finished / "results/smoke/lolcats/table1.csv")) == 7


def test_headline_table_has_the_rows_and_columns_of_the_issue(finished):
    table = rows(finished / "results/table2.csv")
    assert [row["run"] for row in table] == ROWS
    columns = list(table[0])
    assert columns[: len(DESCRIBED) + 1 + len(ACCURACIES) + 2] == [*DESCRIBED, "ppl", *ACCURACIES, *AVERAGES]
    assert {f"{c}_{x}" for c in ACCURACIES for x in ("stderr", "n")} < set(columns)
    assert {f"published_{c}" for c in (*ACCURACIES, *AVERAGES, "model", "source")} < set(columns)
    for row in table:
        assert all(0 <= float(row[c]) <= 100 for c in (*ACCURACIES, *AVERAGES)), row
        assert float(row["ppl"]) > 1 and row["scale"] == "smoke"
        assert {row[f"{c}_n"] for c in ACCURACIES} == {"4"}


def test_rows_say_what_was_trained_and_on_how_much(finished):
    table = {row["run"]: row for row in rows(finished / "results/table2.csv")}
    tokens = {run: (int(row["distill_tokens"]), int(row["finetune_tokens"])) for run, row in table.items()}
    whole = 2 * 1024  # two epochs of the scale's tokens
    transferred = {"hedgehog", "lolcats_linear", "lolcats_window", "lizard"}
    assert tokens == {run: (whole * (run in transferred), whole * (run != "teacher")) for run in ROWS}
    parameters = {run: int(row["trainable_params"]) for run, row in table.items()}
    assert parameters["teacher"] == 0
    assert parameters["supra"] == max(parameters.values()), "full finetuning trains the most"
    assert all(parameters[run] > parameters["teacher_lora"] for run in ROWS[2:]), (
        "a method adds to the adapter"
    )


def test_every_cell_leads_to_what_it_was_read_from(finished):
    provenance = json.loads((finished / "results/table2.provenance.json").read_text())
    for file, source in provenance["sources"].items():
        run = finished / file
        assert json.loads(run.read_text())["key"] == source["key"]
        assert hashlib.sha256(run.read_bytes()).hexdigest() == source["sha256"]
        assert (
            hashlib.sha256(run.with_name("metrics.json").read_bytes()).hexdigest() == source["metrics_sha256"]
        )
    for row in rows(finished / "results/table2.csv"):
        cells = provenance["cells"][row["run"]]
        for column, value in row.items():
            if column.startswith("published_") and value:
                file, pointer = cells[column].split("#/")
                table, name, *of = pointer.split("/")
                printed = [
                    line for line in rows(finished / file) if (line["table"], line["row"]) == (table, name)
                ]
                found = [line for line in printed if of in ([], [line["column"]])]
                assert found, f"{row['run']}, {column}: nothing at {cells[column]}"
                assert not of or float(found[0]["value"]) == float(value)
            elif value == "not run":
                assert cells[column] is None and column.startswith(BESIDE), (
                    f"{row['run']}: {column}, which smoke scores"
                )
            elif column == "run":
                assert cells[column].startswith("workflow/papers/comparison/table2.yaml#/rows/")
            elif value:
                # an average's are those of its tasks
                found = cells[column] if isinstance(cells[column], list) else [cells[column]]
                assert found and all(
                    file in provenance["sources"] and f"/{row['run']}/" in file for file in found
                ), column


def test_a_run_starts_from_its_own_first_stage(finished):
    for run in ("hedgehog", "lolcats_linear", "lolcats_window", "lizard"):
        first, second, last = (finished.record(run, stage) for stage in ("distill", "finetune", "perplexity"))
        assert second["parents"]["distill"] == {
            "path": f"results/smoke/runs/{run}/distill",
            "key": first["key"],
            "contents": contents(first),
        }
        assert (
            last["parents"]["distill"]["key"] == first["key"]
            and last["parents"]["finetune"]["key"] == second["key"]
        )
        assert last["parents"]["gate"]["key"] == finished.record(run, "gate")["key"], (
            "nothing is measured before the gate"
        )


def test_records_describe_files_that_are_there(finished):
    folders = stage_folders(finished)
    rows, table1 = 8 * len(MEASURES), 6 * 4  # gate, perplexity, perplexity_before and fidelity of each map
    assert len(folders) == 4 + 7 + 13 + rows + table1  # model, written, text, activations; distill; finetune
    for folder in folders:
        record = json.loads((folder / "run.json").read_text())
        for name, artefact in record["artefacts"].items():
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == artefact["sha256"], (
                folder / name
            )
        assert set(record["artefacts"]) == {
            str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()
        } - {"run.json"}
        assert record["attempt"] == 1 and record["peak_rss_bytes"] > 0
        assert record["versions"]["torch"] and record["started"]


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "history.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("stage", ["distill", "finetune"])
def test_every_row_is_really_trained(finished, stage):
    """The second epoch, on the same texts as the first, has a lower loss."""
    trained = sorted((finished / "results/smoke/runs").glob(f"*/{stage}"))
    assert len(trained) == {"distill": 7, "finetune": 13}[stage]
    for folder in trained:
        curve = losses(folder)
        half = len(curve) // 2
        assert sum(curve[half:]) < sum(curve[:half]), f"{folder}: {curve}"
        assert any(p.stat().st_size > 0 for p in folder.rglob("*.safetensors"))


def test_progress_and_log_files(finished):
    """Each job that Snakemake started has a file as its log; that of a training has a bar that tells rate and
    time left."""
    for stage in ("distill", "finetune", "gate", "perplexity", "mmlu"):
        log = (finished / f"results/smoke/logs/lizard.{stage}.log").read_text()
        assert log.endswith(f"results/smoke/runs/lizard/{stage}\n"), "it ends with the folder that was made"
        assert "tok/s" in log or stage not in ("distill", "finetune"), stage


# --- the mirror in MLflow ---


def test_mlflow_has_one_parent_a_row_and_one_current_child_a_stage(finished):
    store = finished.mlflow()
    consistent(finished)
    parents = {run["tags"]["relinear.row"]: run["id"] for run in store if "relinear.row" in run["tags"]}
    for row in ROWS:
        stages = {r["tags"]["stage"] for r in store if r["tags"].get("mlflow.parentRunId") == parents[row]}
        assert {p.name for p in (finished / f"results/smoke/runs/{row}").iterdir()} <= stages


def consistent(clone) -> None:
    """Assert that each row has one parent run, each stage one current child (that of the folder on disk), and
    that nothing is left RUNNING."""
    store = clone.mlflow()
    assert {run["status"] for run in store} <= {"FINISHED", "KILLED", "FAILED"}, "a run was left RUNNING"
    parents = [run["tags"]["relinear.row"] for run in store if "relinear.row" in run["tags"]]
    assert len(parents) == len(set(parents)) >= len(ROWS)
    current = [run for run in store if run["tags"].get("current") == "true"]
    assert {run["status"] for run in current} == {"FINISHED"}
    found = sorted(
        (run["tags"]["run"], run["tags"]["stage"], run["tags"]["key"], run["tags"]["attempt"])
        for run in current
    )
    records = [json.loads((folder / "run.json").read_text()) for folder in stage_folders(clone)]
    assert found == sorted((r["run"], r["stage"], r["key"], str(r["attempt"])) for r in records)


def curves(clone) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """The loss by step of each (run, stage) in the store."""
    with closing(sqlite3.connect(clone / "results/mlflow.db")) as store:
        points = store.execute(
            "select run_uuid, step, value from metrics where key = 'loss' order by run_uuid, step, timestamp"
        ).fetchall()
    names = {
        run["id"]: (run["tags"]["run"], run["tags"]["stage"])
        for run in clone.mlflow()
        if run["tags"].get("current") == "true"
    }
    found: dict[tuple[str, str], list[tuple[int, float]]] = {
        name: [] for name in names.values() if name[1] in ("distill", "finetune")
    }
    for run, step, value in points:
        if run in names:
            found[names[run]].append((step, value))
    return found


def test_mlflow_has_the_loss_curves(finished):
    found = curves(finished)
    assert len(found) == 7 + 13
    for (run, stage), curve in found.items():
        assert curve == [
            (i, pytest.approx(loss)) for i, loss in enumerate(losses(finished.stage(run, stage)))
        ]


def test_a_lost_store_is_rebuilt_from_the_files(clone, finished):
    for path in (clone / "results").glob("mlflow.db*"):
        path.unlink()
    done = clone.relinear("track", "rebuild")
    assert done.returncode == 0, done.stderr
    assert f"{len(stage_folders(clone))} runs restored" in done.stdout
    consistent(clone)
    assert curves(clone) == curves(finished)
    assert "0 runs restored" in clone.relinear("track", "rebuild").stdout
    assert clone.planned() == []


# --- what it reruns ---

SCORED = sorted([*(f"measure {run} commonsense" for run in ROWS), *TABLES])


def processor_seconds() -> float:
    """Of the processes that this one has started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_second_call_runs_nothing_and_returns_at_once(finished):
    begin = processor_seconds()
    output = finished._replace(interpreter=sys.executable).snakemake(*TARGETS)
    assert "Nothing to be done" in output
    assert "profile profiles/default" in output, "the repository's own settings were not read"
    assert processor_seconds() - begin < 5


def test_further_seeds_run_beside_the_first(finished):
    again = [job for run in ROWS[1:] for job in of(f"{run}-seed1", "finetune", "all")]
    again += [f"distill {run}-seed1" for run in ("hedgehog", "lolcats_linear", "lolcats_window", "lizard")]
    assert finished.planned("results/table2.csv", seeds=2) == sorted([*again, *TABLES])


def test_editing_a_method_reruns_that_method(clone):
    append(clone, "src/relinear/attention/lizard.py", "\nUNUSED = 1\n")
    assert clone.planned() == sorted([*of("lizard", "distill", "finetune", "all"), *TABLES])


def test_editing_what_lolcats_is_reruns_its_table_and_figures(clone):
    append(clone, "src/relinear/attention/lolcats.py", "\nUNUSED = 1\n")
    planned = clone.planned()
    assert {
        *RENDERED,
        *of("lolcats_window", "distill", "finetune", "all"),
        *of("lolcats_exp", "fidelity"),
    } < set(planned)
    assert all(p in RENDERED or p.split()[1].startswith("lolcats_") for p in planned)


def test_comments_docstrings_and_layout_rerun_nothing(clone):
    for path in (
        "attention/lizard.py",
        "attention/_base.py",
        "train/loop.py",
        "draw/table.py",
        "plan/plan.py",
        "measure/perplexity.py",
    ):
        text = (clone / "src/relinear" / path).read_text()
        assert text.startswith('"""')
        text = '"""Other words. ' + text[3:] + "\n\n# a remark\n"
        (clone / "src/relinear" / path).write_text(text)
    assert clone.planned() == []


def test_editing_what_runs_stages_or_a_kernel_reruns_nothing(clone):
    """Code that schedules, records, mirrors and obtains makes no result; kernels are held to their
    definitions."""
    for module in (
        "cli",
        "plan/plan",
        "stage",
        "tracking/live",
        "plan/scale",
        "plan/code",
        "get/assets",
        "machine/gpus",
        "share/export",
    ):
        append(clone, f"src/relinear/{module}.py", "\nUNUSED = 1\n")
    for module in ("linear_attention_triton", "decode_step_triton", "decode_step", "dispatch"):
        append(clone, f"kernels/relinear_kernels/{module}.py", "\nUNUSED = 1\n")
    assert clone.planned() == []


def test_editing_a_metric_reruns_its_measurements_alone(clone):
    append(clone, "src/relinear/measure/lm_eval.py", "\nUNUSED = 1\n")
    assert clone.planned() == sorted(
        [*(f"measure {run} {measure}" for run in ROWS for measure in ("commonsense", "mmlu")), *TABLES]
    )


def test_editing_a_shape_redraws_and_trains_nothing(clone):
    append(clone, "src/relinear/draw/table.py", "\nUNUSED = 1\n")
    assert clone.planned() == sorted([*TABLES, "lolcats_table1"])
    append(clone, "src/relinear/draw/attention_maps.py", "\nUNUSED = 1\n")
    assert clone.planned() == sorted(RENDERED)


def test_editing_a_spec_redraws_that_artefact_alone(clone):
    clone.edit(
        "workflow/papers/comparison/table2.yaml",
        "label: Five LLM-linearization methods",
        "label: 5 LLM-linearization methods",
    )
    assert clone.planned() == TABLES
    clone.edit("workflow/papers/lolcats/figure3.yaml", "says: ", "says: the ")
    assert clone.planned() == sorted([*TABLES, "lolcats_figure3"])


def test_editing_how_many_items_are_scored_reruns_what_scores_them(clone):
    clone.edit("workflow/scales/smoke.yaml", "piqa: 4", "piqa: 3")
    assert clone.planned() == SCORED


def test_editing_a_tasks_definition_reruns_what_scores_it(clone):
    clone.edit_yaml("workflow/tasks/piqa.yaml", lambda task: task.update(num_fewshot=1))
    assert clone.planned() == SCORED


def test_editing_a_runs_learning_rate_reruns_that_stage_and_what_follows(clone):
    clone.edit_yaml(
        "workflow/papers/lizard/runs.yaml",
        lambda runs: runs["lizard"]["steps"][1]["finetune"].update(lr=7e-4),
    )
    assert clone.planned() == [], "smoke's least rate is 1e-3, so this one trains as before"
    clone.edit_yaml(
        "workflow/papers/lizard/runs.yaml",
        lambda runs: runs["lizard"]["steps"][1]["finetune"].update(lr=2e-3),
    )
    assert clone.planned() == sorted([*of("lizard", "finetune", "all"), *TABLES])
    clone.edit_yaml(
        "workflow/papers/hedgehog/runs.yaml",
        lambda runs: runs["hedgehog"]["steps"][0]["distill"].update(lr=2e-2),
    )
    both = [*of("lizard", "finetune", "all"), *of("hedgehog", "distill", "finetune", "all")]
    assert clone.planned() == sorted([*both, *TABLES])


def test_another_machine_setting_reruns_nothing(clone):
    clone.edit("workflow/scales/smoke.yaml", "checkpoint_seconds: 0", "checkpoint_seconds: 60")
    assert clone.planned() == []


def test_an_interruption_before_the_table_leaves_no_stale_table(clone):
    """A call made a measurement or a table anew and ended there: everything that follows is out of date."""
    record = clone.record("lizard", "mmlu") | {"started": "2030-01-01T00:00:00+00:00"}
    (clone.stage("lizard", "mmlu") / "run.json").write_text(json.dumps(record))
    assert clone.planned() == TABLES
    clone.snakemake("results/smoke/comparison/table2.csv")
    (clone / "results/table2.csv").write_text("stale")
    assert clone.planned() == ["table2"]
    clone.snakemake(*TARGETS)
    assert (clone / "results/table2.csv").read_bytes() == (
        clone / "results/smoke/comparison/table2.csv"
    ).read_bytes()


# --- what was drawn is guarded ---

DRAWN_FILES = (
    "results/table2.csv",
    "results/table2.md",
    "results/smoke/comparison/table2.csv",
    "results/smoke/comparison/table2.claims.csv",
    "results/smoke/lolcats/table1.csv",
    "results/smoke/lolcats/table1.provenance.json",
    "results/smoke/lolcats/figure3.png",
    "results/smoke/lolcats/figure3.pdf",
)


def digit(path: Path) -> None:
    """Change one digit of a file."""
    data = path.read_bytes()
    at = next(i for i in range(len(data) // 2, len(data)) if data[i : i + 1] in b"123456789")
    path.write_bytes(data[:at] + bytes([data[at] - 1]) + data[at + 1 :])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    "upset",
    [
        {"results/table2.csv": emptied, "results/smoke/lolcats/table1.csv": digit},
        {"results/table2.csv": digit, "results/smoke/lolcats/figure3.png": cut},
        {
            "results/table2.csv": cut,
            "results/smoke/lolcats/figure3.pdf": Path.unlink,
            "results/smoke/lolcats/table1.provenance.json": digit,
        },
        {
            "results/smoke/comparison/table2.csv": digit,
            "results/smoke/comparison/table2.claims.csv": Path.unlink,
        },
        {"results/table2.md": emptied, ".snakemake": shutil.rmtree},
    ],
    ids=lambda upset: " ".join(f"{Path(name).name} {how.__name__}" for name, how in upset.items()),
)
def test_what_was_drawn_is_told_and_drawn_again_where_it_differs_from_its_record(clone, finished, upset):
    for name, how in upset.items():
        how(clone / name)
    said = clone.snakemake(*TARGETS)
    drawings = {Path(name).with_suffix("").with_suffix("") for name in upset if name != ".snakemake"}
    assert said.count("it is drawn again") == len(drawings), said
    for name in DRAWN_FILES:
        assert (clone / name).read_bytes() == (finished / name).read_bytes(), name
    assert clone.planned() == []


@pytest.mark.parametrize(("how", "forgotten"), [(Path.unlink, True), (digit, False)])
def test_items_that_are_gone_or_others_are_measured_again_behind_a_table_that_is_there(
    clone, finished, how, forgotten
):
    items = clone.stage("teacher", "commonsense") / "items.jsonl"
    how(items)
    if forgotten:
        shutil.rmtree(clone / ".snakemake")
    told = clone.snakemake("results/table2.csv")
    assert "items.jsonl is not what its run.json says" in told and "its step runs again" in told
    assert items.read_bytes() == (finished.stage("teacher", "commonsense") / "items.jsonl").read_bytes()
    for name in ("results/table2.csv", "results/table2.claims.csv"):
        assert (clone / name).read_bytes() == (finished / name).read_bytes()


def test_a_table_of_another_scale_is_no_table_of_this_one(clone):
    """Also where Snakemake has forgotten of what it is the copy."""
    shutil.rmtree(clone / ".snakemake")
    for path in [*(clone / "results").glob("table2.*"), clone / "results/.table2.json"]:
        path.write_bytes(path.read_bytes().replace(b"0", b"1"))
    record = json.loads((clone / "results/.table2.json").read_text())
    record["artefacts"] = entries(
        clone / "results", [clone / "results" / name for name in record["artefacts"]]
    )
    (clone / "results/.table2.json").write_text(json.dumps(record, indent=1))
    assert clone.planned("results/table2.csv") == ["table2"]


def test_a_step_that_failed_after_a_change_is_made_by_the_next_call(clone):
    """Snakemake puts the older record of a failed step back. It is out of date all the same, however often
    the step fails."""
    fault, target = clone / "fault", "results/smoke/runs/teacher/perplexity/run.json"
    append(
        clone,
        "src/relinear/measure/perplexity.py",
        f"\nimport os\n\nif os.path.exists({str(fault)!r}):\n    raise RuntimeError('a fault')\n",
    )
    changed, before = clone.planned(), clone.record("teacher", "perplexity")
    assert "measure teacher perplexity" in changed
    fault.touch()
    for _ in range(2):
        assert "a fault" in clone.snakemake(target, fails=True)
        assert clone.record("teacher", "perplexity") == before
        assert clone.planned() == changed
    fault.unlink()
    clone.snakemake(target)
    assert clone.record("teacher", "perplexity")["key"] != before["key"]
    assert clone.planned(target) == []


# --- interruptions ---


# the target of the calls that are interrupted
LAST = "results/smoke/runs/lolcats_window/commonsense/run.json"


def hold(clone, moment: str) -> tuple[subprocess.Popen, psutil.Process]:
    """Start the command. Returns it and the process of the stage, which waits at `moment`."""
    (clone / "held").unlink(missing_ok=True)
    (clone / "hold").write_text(moment)
    process = clone.popen(LAST)
    wait(lambda: (clone / "held").is_file() or process.poll() is not None, f"the stage to come to {moment!r}")
    assert process.poll() is None, process.communicate()[0]
    return process, psutil.Process(int((clone / "held").read_text()))


def text(path: Path) -> str:
    """The text of a log; empty while Snakemake replaces the file."""
    with suppress(FileNotFoundError):
        return path.read_text()
    return ""


def test_killed_again_and_again_it_ends_as_if_never_disturbed(clone, finished, monkeypatch):
    """The command is a Python of its own, and its jobs are forks, as those of a command of six or more."""
    run, stages = "lolcats_window", ("distill", "finetune", *MEASURES)
    if clone.interpreter != sys.executable:
        monkeypatch.setenv("RELINEAR_WARM", str(Path(clone.interpreter).with_name("jobs")))
    append(clone, "src/relinear/tracking/live.py", HOLD)
    shutil.rmtree(clone / f"results/smoke/runs/{run}")
    for table in ("results/table2.csv", "results/smoke/comparison/table2.csv"):
        (clone / table).unlink()
    assert clone.planned() == sorted([*of(run, *stages), *TABLES])

    # SIGTERM to all of it (a batch system, a container's end) in the middle of stage 1
    process, stage = hold(clone, f"{run} distill step 5")
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate()
    assert process.returncode != 0
    assert not (clone.stage(run, "distill") / "run.json").exists()
    assert list((clone / f"results/smoke/.work/{run}.distill/checkpoints").glob("0*"))
    assert children(clone, run, "distill") == ["FINISHED", "KILLED"], (
        "an undisturbed one, and one that said goodbye"
    )

    # SIGKILL to the stage (out of memory) in the middle of stage 2
    process, stage = hold(clone, f"{run} finetune step 5")
    assert children(clone, run, "distill") == ["FINISHED", "KILLED", "FINISHED"]
    stage.kill()
    output, _ = process.communicate()
    assert process.returncode != 0
    assert f"results/smoke/logs/{run}.finetune.log" in output, "a failing rule names its log"
    assert not (clone.stage(run, "finetune") / "run.json").exists()
    assert children(clone, run, "finetune") == ["FINISHED", "RUNNING"], "it could not say goodbye"

    # SIGKILL to Snakemake; its job lives on, and the next command finds it at work
    process, orphan = hold(clone, f"{run} finetune step 9")
    process.kill()
    process.wait()
    second = clone.popen(LAST)
    waits = "another process is at it"
    wait(
        lambda: waits in text(clone / f"results/smoke/logs/{run}.finetune.log") or second.poll() is not None,
        "the second job to wait for the first",
    )
    assert second.poll() is None and orphan.is_running()

    # Ctrl-C when a measurement is written but not yet in its place
    (clone / "hold").write_text(f"{run} commonsense finish")
    (clone / "held").unlink()
    wait(lambda: (clone / "held").is_file() or second.poll() is not None, "the measurement")
    assert second.poll() is None, second.communicate()[0]
    assert (clone / f"results/smoke/.work/{run}.commonsense/out/run.json").is_file()
    assert list((clone / f"results/smoke/.work/{run}.commonsense").glob("answers.*")), (
        "the next attempt goes on with these"
    )
    os.killpg(second.pid, signal.SIGINT)
    second.communicate()
    assert second.returncode != 0
    assert not (clone.stage(run, "commonsense") / "run.json").exists(), (
        "what is not in its place is not finished"
    )

    (clone / "hold").unlink()
    clone.snakemake(*TARGETS)
    for stage in stages:
        ours, theirs = clone.stage(run, stage), finished.stage(run, stage)
        assert (ours / "metrics.json").read_bytes() == (theirs / "metrics.json").read_bytes()
        for path in theirs.rglob("*.safetensors"):
            assert (ours / path.relative_to(theirs)).read_bytes() == path.read_bytes(), path
        if stage in ("distill", "finetune"):
            assert curve_of(ours) == curve_of(theirs)
    for table in ("results/table2.csv", "results/table2.claims.csv"):
        assert (clone / table).read_bytes() == (finished / table).read_bytes()
    consistent(clone)
    assert children(clone, run, "distill") == ["FINISHED", "KILLED", "FINISHED"]
    assert children(clone, run, "finetune") == ["FINISHED", "KILLED", "FINISHED"]
    assert children(clone, run, "commonsense") == ["FINISHED", "KILLED", "FINISHED"]
    assert [clone.record(run, stage)["attempt"] for stage in ("distill", "finetune", "commonsense")] == [
        3,
        3,
        3,
    ]
    assert sorted(p.name for p in (clone / f"results/smoke/.work/{run}.finetune").iterdir()) == [
        "attempt.json",
        "lock",
    ]
    assert clone.planned() == []
