"""Laws of running a stage: verified parents in, one folder out, whole or not at all."""

import json
import shutil
import threading
from pathlib import Path
from typing import NamedTuple

import pytest

from relinear import stage
from relinear.errors import UserError
from relinear.files import sha256
from relinear.plan.plan import Plan
from relinear.stage import StageError, run_stage
from relinear.tracking import live as tracking

RECORD = {
    "schema", "scale", "run", "stage", "key", "config", "config_hash", "code_hash", "parents", "artefacts", "datasets", "git", "versions",
    "hardware", "seed", "tokens", "started", "wall_seconds", "peak_rss_bytes", "attempt", "mlflow_run_id", "tags",
}  # fmt: skip


class Stop(BaseException):
    """The process dies here."""


class Mirror:
    """MLflow's place; tests of the mirror itself are test_tracking.py and test_dag.py."""

    run_id = "an-id"

    def __init__(self, uri, **about):
        self.about = about

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def log(self, metrics, step, time=None):
        pass

    def finish(self, folder):
        assert (folder / "run.json").is_file()


@pytest.fixture(autouse=True)
def mirror(monkeypatch):
    monkeypatch.setattr(tracking, "Tracker", Mirror)


class Results(NamedTuple):
    """A results folder at smoke scale, with stages whose work is to write one file."""

    plan: Plan

    def run(self, name, run=None, text=b"weights", plan=None):
        plan = plan or self.plan
        done = []

        def work(context):
            done.append(context)
            (context.out / "method.safetensors").write_bytes(text)
            return {"loss": 1.0}

        run_stage(plan, plan.step(name, run), work)
        return done

    def folder(self, name, run=None) -> Path:
        return self.plan.folder(self.plan.step(name, run))

    def record(self, name, run=None) -> dict:
        return json.loads((self.folder(name, run) / "run.json").read_text())

    def work(self, name) -> Path:
        return self.plan.root / ".work" / name


@pytest.fixture
def results(tmp_path) -> Results:
    made = Results(Plan(scale="smoke", results=tmp_path / "results"))
    for name in ("assets", "teacher", "instructions", "corpus"):
        made.run(name)
    return made


def test_a_record_says_all_that_the_contract_names(results):
    record = results.record("corpus")
    assert record.keys() == RECORD
    assert record["key"] == results.plan.key(results.plan.step("corpus"))
    assert record["parents"]["teacher"] == {"path": str(results.folder("teacher")), "key": results.record("teacher")["key"]}
    wrote = results.folder("corpus") / "method.safetensors"
    assert record["artefacts"]["method.safetensors"] == {"sha256": sha256(wrote), "bytes": len(b"weights")}
    assert record["artefacts"].keys() == {"method.safetensors", "metrics.json"}
    assert {"python", "torch", "transformers"} <= record["versions"].keys()
    assert record["mlflow_run_id"] == Mirror.run_id
    for field in RECORD:
        json.dumps(record[field])


def test_a_finished_stage_is_not_run_again(results):
    assert results.run("corpus") == []
    assert results.record("corpus")["attempt"] == 1


@pytest.mark.parametrize("damage", [lambda f: f.unlink(), lambda f: f.write_bytes(b"weigh")], ids=["missing", "cut short"])
def test_a_damaged_result_is_made_again(results, damage):
    damage(results.folder("corpus") / "method.safetensors")
    assert len(results.run("corpus")) == 1
    assert (results.folder("corpus") / "method.safetensors").read_bytes() == b"weights"


def test_a_missing_parent_names_the_command_to_run(results):
    with pytest.raises(StageError, match=r"distill lizard: its parent `activations` is not there .*; run `relinear activations .*` first"):
        results.run("distill", "lizard")
    assert not results.folder("distill", "lizard").exists()


def test_the_command_that_an_error_names_makes_the_very_parent_that_is_missing(tmp_path):
    plan = Plan(scale="smoke", budget=2.0, seed=3, results=tmp_path / "elsewhere")
    with pytest.raises(StageError) as error:
        Results(plan).run("corpus")
    assert plan.as_options() in str(error.value)


def test_a_parent_of_another_key_is_refused(results):
    other = Plan(scale="smoke", seed=1, results=results.plan.results)
    with pytest.raises(StageError) as error:
        results.run("activations", plan=other)
    got, expected = results.record("corpus")["key"][:12], other.key(other.step("corpus"))[:12]
    assert f"key {got} got, {expected} expected" in str(error.value) and "`relinear corpus" in str(error.value)


def test_a_parent_of_one_altered_byte_is_refused_naming_both_hashes(results):
    results.run("activations")
    results.run("distill", "lizard")
    path = results.folder("distill", "lizard") / "method.safetensors"
    expected = sha256(path)
    path.write_bytes(b"weightt")
    with pytest.raises(StageError) as error:
        results.run("finetune", "lizard")
    message = str(error.value)
    assert str(path) in message and f"{sha256(path)} got" in message and f"{expected} expected" in message
    assert "`relinear distill lizard" in message and "\n" not in message
    path.unlink()
    with pytest.raises(StageError, match="no file got"):
        results.run("finetune", "lizard")
    assert not results.folder("finetune", "lizard").exists()


def test_the_command_that_an_error_names_mends_an_altered_parent(results):
    results.run("activations")
    results.run("distill", "lizard")
    path = results.folder("distill", "lizard") / "method.safetensors"
    path.write_bytes(b"weightt")  # of the same size
    with pytest.raises(StageError, match="run `relinear distill lizard .*` again"):
        results.run("finetune", "lizard")
    results.run("distill", "lizard")  # what it says
    results.run("finetune", "lizard")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, OSError])
def test_work_that_fails_half_way_leaves_nothing_that_looks_finished(results, error):
    def work(context):
        (context.out / "method.safetensors").write_bytes(b"half")
        raise error

    step = results.plan.step("activations")
    with pytest.raises(error):
        run_stage(results.plan, step, work)
    assert not results.plan.folder(step).exists()
    with pytest.raises(StageError, match="`activations` is not there"):
        results.run("distill", "lizard")
    [context] = results.run("activations")
    assert results.record("activations")["attempt"] == 2
    assert (results.folder("activations") / "method.safetensors").read_bytes() == b"weights"


def test_a_result_that_was_written_but_not_moved_is_not_finished(results, monkeypatch):
    """Killed between the last write and the rename."""
    replace = stage.os.replace

    def dies(source, target):
        if Path(source).name == "out":
            raise Stop
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(stage.os, "replace", dies)
        results.run("activations")
    assert (results.work("activations") / "out/run.json").is_file()
    with pytest.raises(StageError, match="`activations` is not there"):
        results.run("distill", "lizard")
    assert len(results.run("activations")) == 1
    assert not (results.work("activations") / "out").exists()


def test_a_death_while_the_old_result_is_removed_leaves_nothing_finished(results, monkeypatch):
    other = Plan(scale="smoke", seed=1, results=results.plan.results)
    results.run("instructions", plan=other)
    rmtree = shutil.rmtree

    def dies(path, **more):
        if Path(path) == results.folder("corpus"):
            raise Stop
        rmtree(path, **more)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(stage.shutil, "rmtree", dies)
        results.run("corpus", plan=other)
    for plan in (results.plan, other):
        with pytest.raises(StageError, match="`corpus` is not there"):
            results.run("activations", plan=plan)


def test_an_old_result_stays_until_the_new_one_is_whole(results):
    other = Plan(scale="smoke", seed=1, results=results.plan.results)
    results.run("instructions", plan=other)

    def work(context):
        assert results.record("corpus")["seed"] == 0
        raise RuntimeError

    with pytest.raises(RuntimeError):
        run_stage(other, other.step("corpus"), work)
    assert results.run("corpus") == [], "the old one is still that of the old plan"


def test_a_checkpoint_outlives_an_interruption_but_not_a_change_of_settings(results):
    def dies(context):
        (context.work / "checkpoint.pt").write_text("step 5")
        raise Stop

    seen = []

    def goes_on(context):
        seen.append((context.work / "checkpoint.pt").exists())
        return {}

    step, other = results.plan.step("activations"), Plan(scale="smoke", seed=1, results=results.plan.results)
    with pytest.raises(Stop):
        run_stage(results.plan, step, dies)
    run_stage(results.plan, step, goes_on)
    assert sorted(p.name for p in results.work("activations").iterdir()) == ["attempt.json", "lock"], "no leftovers"
    shutil.rmtree(results.plan.folder(step))
    with pytest.raises(Stop):
        run_stage(results.plan, step, dies)
    results.run("instructions", plan=other)
    results.run("corpus", plan=other)
    run_stage(other, step, goes_on)
    assert seen == [True, False]
    assert results.record("activations")["attempt"] == 4


def test_history_goes_on_after_an_interruption_without_gap_or_double(results):
    def work(context, last=None):
        context.resume_history(3)
        for i in range(3, last or 5):
            context.log({"loss": float(10 - i)}, i)
        if last:
            raise Stop
        return context.losses()

    step = results.plan.step("activations")
    (results.work("activations")).mkdir(parents=True)
    (results.work("activations") / "history.jsonl").write_text("".join(f'{{"step": {i}, "time": 1.0, "loss": {10 - i}}}\n' for i in range(3)))
    with pytest.raises(Stop):
        run_stage(results.plan, step, lambda context: work(context, last=8))  # three steps beyond the last checkpoint
    run_stage(results.plan, step, work)
    lines = [json.loads(line) for line in (results.folder("activations") / "history.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert json.loads((results.folder("activations") / "metrics.json").read_text()) == {"first_loss": 10.0, "last_loss": 6.0}


def test_a_line_of_history_cut_short_does_not_stop_the_next_attempt(results):
    """The machine went down, or the disk was full, in the middle of a line."""
    results.work("activations").mkdir(parents=True)
    (results.work("activations") / "history.jsonl").write_text('{"step": 0, "time": 1.0, "loss": 2.0}\n{"step": 1, "ti')

    def work(context):
        context.resume_history(1)
        context.log({"loss": 1.0}, 1)
        return context.losses()

    run_stage(results.plan, results.plan.step("activations"), work)
    assert json.loads((results.folder("activations") / "metrics.json").read_text()) == {"first_loss": 2.0, "last_loss": 1.0}


def test_a_death_while_history_is_trimmed_loses_none_of_it(results, monkeypatch):
    results.work("activations").mkdir(parents=True)
    history = results.work("activations") / "history.jsonl"
    history.write_text('{"step": 0, "time": 1.0, "loss": 2.0}\n{"step": 1, "time": 1.0, "loss": 1.0}\n')
    write = Path.write_text

    def dies(path, text, *args, **more):
        write(path, "", *args, **more)  # opened, and so emptied, when the process dies
        if "history" in path.name:
            raise Stop
        return write(path, text, *args, **more)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Path, "write_text", dies)
        run_stage(results.plan, results.plan.step("activations"), lambda context: context.resume_history(2))
    assert len(history.read_text().splitlines()) == 2


def test_a_second_process_waits_for_the_first_and_takes_its_result(results, capsys):
    step, began, go_on, calls = results.plan.step("activations"), threading.Event(), threading.Event(), []

    def work(context):
        calls.append(context)
        began.set()
        assert go_on.wait(30)
        return {}

    threads = [threading.Thread(target=run_stage, args=(results.plan, step, work)) for _ in range(2)]
    threads[0].start()
    assert began.wait(30)
    threads[1].start()
    threads[1].join(0.5)
    assert threads[1].is_alive(), "two at the same stage"
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert len(calls) == 1
    said = capsys.readouterr().err
    assert "another process is at it" in said and "up to date" in said


def test_a_full_disk_is_refused_before_work_starts(results, monkeypatch):
    free = shutil.disk_usage(results.plan.results)._replace(free=300 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(StageError, match="activations: 300 MiB free on the disk of .*; at least 1024 MiB are needed"):
        results.run("activations")
    assert not results.folder("activations").exists()


def test_a_stage_error_is_one_a_user_can_mend():
    assert issubclass(StageError, UserError)
