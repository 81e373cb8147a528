"""Laws of running a stage: verified parents in, one folder out, whole or not at all."""

import json
import shutil
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import ROOT, wait
from filelock import FileLock
from safetensors.torch import save_file

from relinear import records, stage
from relinear.errors import UserError
from relinear.files import sha256
from relinear.plan.forms import contents
from relinear.plan.plan import Plan
from relinear.plan.strict import WORKFLOW
from relinear.records import set_aside
from relinear.stage import StageError, changes_code, run_stage, stands
from relinear.tracking import live as tracking

RECORD = {
    "schema",
    "scale",
    "root",
    "run",
    "stage",
    "measure",
    "key",
    "config",
    "config_hash",
    "code_hash",
    "kernels",
    "parents",
    "artefacts",
    "datasets",
    "git",
    "versions",
    "lock",
    "hardware",
    "seed",
    "tokens",
    "started",
    "wall_seconds",
    "peak_rss_bytes",
    "attempt",
    "mlflow_run_id",
    "tags",
}


class Stop(BaseException):
    """The process dies here."""


class Mirror:
    """Stands in for MLflow. Tests of the mirror itself are test_tracking.py and test_dag.py."""

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
    """A results folder at smoke scale, with stages whose work is to write one file. Nodes are given in words:
    "distill lizard"."""

    plan: Plan

    def node(self, words: str, plan=None):
        return (plan or self.plan).node(*words.split())

    def run(self, words, text=b"weights", plan=None):
        """Run a node; returns the jobs that were worked on, one or none."""
        plan = plan or self.plan
        done = []

        def work(job):
            done.append(job)
            (job.out / "made.bin").write_bytes(text)
            return {"loss": 1.0}

        run_stage(plan, self.node(words, plan), work)
        return done

    def folder(self, words) -> Path:
        return self.plan.folder(self.node(words))

    def record(self, words) -> dict:
        return json.loads((self.folder(words) / "run.json").read_text())

    def work(self, words) -> Path:
        stage, *name = words.split()
        return self.plan.root / ".work" / ".".join(name if stage == "measure" else [*name, stage])


MODEL, WRITTEN, TEXT = INPUTS = ("model tiny", "written stories@tiny", "text stories@tiny")
ACTIVATIONS = "activations stories@tiny"


@pytest.fixture
def results(tmp_path) -> Results:
    made = Results(Plan(scale="smoke", results=tmp_path / "results"))
    for words in INPUTS:
        made.run(words)
    return made


@pytest.fixture
def other(results) -> Plan:
    """The plan of an edited workflow, whose texts are others and lie where those of the first plan do."""
    workflow = Path(shutil.copytree(WORKFLOW, results.plan.results.parent / "workflow"))
    (workflow / "data.yaml").write_text(
        (workflow / "data.yaml").read_text().replace("{tokens: 256,", "{tokens: 300,")
    )
    return Plan(scale="smoke", results=results.plan.results, workflow=workflow)


def test_a_record_says_all_that_the_contract_names(results):
    record = results.record(TEXT)
    assert record.keys() == RECORD
    assert record["key"] == results.plan.key(results.node(TEXT))
    assert record["parents"] == {
        role: {
            "path": str(results.folder(words)),
            "key": results.record(words)["key"],
            "contents": contents(results.record(words)),
        }
        for role, words in (("model", MODEL), ("written", WRITTEN))
    }
    wrote = results.folder(TEXT) / "made.bin"
    assert record["artefacts"]["made.bin"] == {"sha256": sha256(wrote), "bytes": len(b"weights")}
    assert record["artefacts"].keys() == {"made.bin", "metrics.json"}
    assert {"python", "torch", "transformers"} <= record["versions"].keys()
    assert record["mlflow_run_id"] == Mirror.run_id
    assert record["lock"] == sha256(ROOT / "requirements.lock") and record["kernels"] == {}, (
        "a text calls no operation"
    )
    for field in RECORD:
        json.dumps(record[field])


def test_a_finished_stage_is_not_run_again(results):
    assert results.run(TEXT) == []
    assert results.record(TEXT)["attempt"] == 1


@pytest.mark.parametrize(
    "damage", [lambda f: f.unlink(), lambda f: f.write_bytes(b"weigh")], ids=["missing", "cut short"]
)
def test_a_damaged_result_is_made_again(results, damage):
    damage(results.folder(TEXT) / "made.bin")
    assert len(results.run(TEXT)) == 1
    assert (results.folder(TEXT) / "made.bin").read_bytes() == b"weights"


def test_a_missing_parent_names_the_command_to_run(results):
    with pytest.raises(
        StageError,
        match=(
            r"distill lizard: its parent `activations stories@tiny` is not there .*; run `relinear"
            r" activations stories@tiny .*` first"
        ),
    ):
        results.run("distill lizard")
    assert not results.folder("distill lizard").exists()


def test_the_command_that_an_error_names_makes_the_very_parent_that_is_missing(tmp_path):
    plan = Plan(scale="smoke", budget=2.0, seed=3, results=tmp_path / "elsewhere")
    with pytest.raises(StageError) as error:
        Results(plan).run(TEXT)
    assert plan.as_options() in str(error.value) and "`relinear model tiny --scale smoke" in str(error.value)


def test_a_parent_of_another_key_is_refused(results, other):
    results.run(WRITTEN, plan=other)
    with pytest.raises(StageError) as error:
        results.run(ACTIVATIONS, plan=other)
    got, expected = results.record(TEXT)["key"][:12], other.key(results.node(TEXT, other))[:12]
    assert f"key {got} got, {expected} expected" in str(error.value) and "`relinear text stories@tiny" in str(
        error.value
    )


def test_a_parent_of_one_altered_byte_is_refused_naming_both_hashes(results):
    results.run(ACTIVATIONS)
    results.run("distill lizard")
    path = results.folder("distill lizard") / "made.bin"
    expected = sha256(path)
    path.write_bytes(b"weightt")
    with pytest.raises(StageError) as error:
        results.run("finetune lizard")
    message = str(error.value)
    assert str(path) in message and f"{sha256(path)} got" in message and f"{expected} expected" in message
    assert "`relinear distill lizard" in message and "\n" not in message
    path.unlink()
    with pytest.raises(StageError, match="no file got"):
        results.run("finetune lizard")
    assert not results.folder("finetune lizard").exists()


def test_the_command_that_an_error_names_mends_an_altered_parent(results):
    results.run(ACTIVATIONS)
    results.run("distill lizard")
    path = results.folder("distill lizard") / "made.bin"
    path.write_bytes(b"weightt")  # of the same size
    with pytest.raises(StageError, match="run `relinear distill lizard .*` again"):
        results.run("finetune lizard")
    results.run("distill lizard")  # what it says
    results.run("finetune lizard")


def test_what_follows_a_parent_that_is_made_again_runs_again_only_if_its_contents_are_others(results, capsys):
    results.run(ACTIVATIONS)
    results.run("distill lizard")
    before = (results.folder("distill lizard") / "run.json").read_bytes()
    (results.folder(ACTIVATIONS) / "run.json").write_text("")
    assert len(results.run(ACTIVATIONS)) == 1 and results.run("distill lizard") == [], "equal contents"
    assert stands(results.plan, results.node("distill lizard"))
    assert (results.folder("distill lizard") / "run.json").read_bytes() == before
    (results.folder(ACTIVATIONS) / "run.json").write_text("")
    assert len(results.run(ACTIVATIONS, text=b"others")) == 1
    capsys.readouterr()
    assert not stands(results.plan, results.node("distill lizard")) and capsys.readouterr().err == ""
    assert len(results.run("distill lizard")) == 1
    why = "its parent `activations stories@tiny` was made again, with other contents; it is made again"
    assert capsys.readouterr().err.count(why) == 1
    assert results.run("distill lizard") == []


def test_a_result_that_another_process_is_at_is_not_said_to_stand(results):
    node = results.node(TEXT)
    assert stands(results.plan, node)
    with FileLock(results.work(TEXT) / "lock"):
        assert not stands(results.plan, node)
    assert not stands(results.plan, results.node(ACTIVATIONS)) and not results.work(ACTIVATIONS).exists()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, OSError])
def test_work_that_fails_half_way_leaves_nothing_that_looks_finished(results, error):
    def work(job):
        (job.out / "made.bin").write_bytes(b"half")
        raise error

    step = results.node(ACTIVATIONS)
    with pytest.raises(error):
        run_stage(results.plan, step, work)
    assert not results.plan.folder(step).exists()
    with pytest.raises(StageError, match="`activations stories@tiny` is not there"):
        results.run("distill lizard")
    [job] = results.run(ACTIVATIONS)
    assert results.record(ACTIVATIONS)["attempt"] == 2
    assert (results.folder(ACTIVATIONS) / "made.bin").read_bytes() == b"weights"


def test_a_result_that_was_written_but_not_moved_is_not_finished(results, monkeypatch):
    """Killed between the last write and the rename."""
    replace = stage.os.replace

    def dies(source, target):
        if Path(source).name == "out":
            raise Stop
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(stage.os, "replace", dies)
        results.run(ACTIVATIONS)
    assert (results.work(ACTIVATIONS) / "out/run.json").is_file()
    with pytest.raises(StageError, match="`activations stories@tiny` is not there"):
        results.run("distill lizard")
    assert len(results.run(ACTIVATIONS)) == 1
    assert not (results.work(ACTIVATIONS) / "out").exists()


def test_a_death_while_the_old_result_is_removed_leaves_nothing_finished(results, other, monkeypatch):
    results.run(WRITTEN, plan=other)
    rmtree = shutil.rmtree

    def dies(path, **more):
        if Path(path) == results.folder(TEXT):
            raise Stop
        rmtree(path, **more)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(stage.shutil, "rmtree", dies)
        results.run(TEXT, plan=other)
    for plan in (results.plan, other):
        with pytest.raises(StageError, match="`text stories@tiny` is not there"):
            results.run(ACTIVATIONS, plan=plan)


def test_an_old_result_stays_until_the_new_one_is_whole(results, other):
    results.run(WRITTEN, plan=other)

    def work(job):
        assert results.record(TEXT)["key"] == results.plan.key(results.node(TEXT))
        raise RuntimeError

    with pytest.raises(RuntimeError):
        run_stage(other, results.node(TEXT, other), work)
    assert results.run(TEXT) == [], "the old one is still that of the old plan"


def test_a_checkpoint_outlives_an_interruption_but_not_a_change_of_settings(results, other):
    def dies(job):
        (job.work / "checkpoints/00000005").mkdir(parents=True)
        raise Stop

    seen = []

    def goes_on(job):
        seen.append((job.work / "checkpoints/00000005").exists())
        return {}

    step = results.node(ACTIVATIONS)
    with pytest.raises(Stop):
        run_stage(results.plan, step, dies)
    run_stage(results.plan, step, goes_on)
    assert sorted(p.name for p in results.work(ACTIVATIONS).iterdir()) == [
        "attempt.json",
        "lock",
    ], "no leftovers"
    shutil.rmtree(results.plan.folder(step))
    with pytest.raises(Stop):
        run_stage(results.plan, step, dies)
    results.run(WRITTEN, plan=other)
    results.run(TEXT, plan=other)
    run_stage(other, step, goes_on)
    assert seen == [True, False]
    assert results.record(ACTIVATIONS)["attempt"] == 4


def begun(results) -> None:
    """An attempt at the activations that died."""

    def dies(job):
        raise Stop

    with pytest.raises(Stop):
        run_stage(results.plan, results.node(ACTIVATIONS), dies)


def test_history_goes_on_after_an_interruption_without_gap_or_double(results):
    def work(job, last=None):
        job.resume(3)
        for i in range(3, last or 5):
            job.log({"loss": float(10 - i)}, i)
        if last:
            raise Stop
        return job.losses()

    step = results.node(ACTIVATIONS)
    begun(results)
    (results.work(ACTIVATIONS) / "history.jsonl").write_text(
        "".join(f'{{"step": {i}, "time": 1.0, "loss": {10 - i}}}\n' for i in range(3))
    )
    with pytest.raises(Stop):
        run_stage(results.plan, step, lambda job: work(job, last=8))  # three steps beyond the last checkpoint
    run_stage(results.plan, step, work)
    lines = [
        json.loads(line) for line in (results.folder(ACTIVATIONS) / "history.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert json.loads((results.folder(ACTIVATIONS) / "metrics.json").read_text()) == {
        "first_loss": 10.0,
        "last_loss": 6.0,
    }


def test_a_training_whose_history_was_deleted_midway_leaves_no_result_and_begins_anew(results):
    """The fault campaign's `work folders deleted`: a checkpoint made the folder again, and the first and last
    loss were those of its second part."""

    def work(job, lost=()):
        job.resume(0)
        for i in range(5):
            if i in lost:
                job.history.unlink()
            job.log({"loss": float(10 - i)}, i)
        return job.losses()

    results.run(ACTIVATIONS)
    words = "distill lizard"
    step = results.node(words)
    with pytest.raises(StageError, match="has not every step once, 2 lines.*give the same command again"):
        run_stage(results.plan, step, lambda job: work(job, lost={3}))
    assert not results.folder(words).exists() and {path.name for path in results.work(words).iterdir()} <= {
        "lock",
        "attempt.json",
    }
    run_stage(results.plan, step, work)
    assert json.loads((results.folder(words) / "metrics.json").read_text()) == {
        "first_loss": 10.0,
        "last_loss": 6.0,
    }


def test_a_line_of_history_cut_short_does_not_stop_the_next_attempt(results):
    """The machine went down, or the disk was full, in the middle of a line."""
    begun(results)
    (results.work(ACTIVATIONS) / "history.jsonl").write_text(
        '{"step": 0, "time": 1.0, "loss": 2.0}\n{"step": 1, "ti'
    )

    def work(job):
        job.resume(1)
        job.log({"loss": 1.0}, 1)
        return job.losses()

    run_stage(results.plan, results.node(ACTIVATIONS), work)
    assert json.loads((results.folder(ACTIVATIONS) / "metrics.json").read_text()) == {
        "first_loss": 2.0,
        "last_loss": 1.0,
    }


def test_a_death_while_history_is_trimmed_loses_none_of_it(results, monkeypatch):
    begun(results)
    history = results.work(ACTIVATIONS) / "history.jsonl"
    history.write_text('{"step": 0, "time": 1.0, "loss": 2.0}\n{"step": 1, "time": 1.0, "loss": 1.0}\n')
    write = Path.write_text

    def dies(path, text, *args, **more):
        write(path, "", *args, **more)  # opened, and so emptied, when the process dies
        if "history" in path.name:
            raise Stop
        return write(path, text, *args, **more)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Path, "write_text", dies)
        run_stage(results.plan, results.node(ACTIVATIONS), lambda job: job.resume(2))
    assert len(history.read_text().splitlines()) == 2


def test_a_second_process_waits_for_the_first_and_takes_its_result(results, capsys):
    step, began, go_on, calls = results.node(ACTIVATIONS), threading.Event(), threading.Event(), []

    def work(job):
        calls.append(job)
        began.set()
        assert go_on.wait(600)
        return {}

    threads = [threading.Thread(target=run_stage, args=(results.plan, step, work)) for _ in range(2)]
    threads[0].start()
    assert began.wait(600)
    threads[1].start()
    wait(lambda: "another process is at it" in capsys.readouterr().err, "the second to find the first at it")
    threads[1].join(0.5)
    assert threads[1].is_alive(), "two at the same stage"
    go_on.set()
    for thread in threads:
        thread.join(600)
    assert len(calls) == 1 and "up to date" in capsys.readouterr().err


def test_a_full_disk_is_refused_before_work_starts(results, monkeypatch):
    free = shutil.disk_usage(results.plan.results)._replace(free=300 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(
        StageError,
        match="activations stories@tiny: 300 MiB free on the disk of .*; at least 1024 MiB are needed",
    ):
        results.run(ACTIVATIONS)
    assert not results.folder(ACTIVATIONS).exists()


def test_a_job_is_given_values_and_no_plan(results):
    """A job has the folders that the work reads, the settings of the work, and the folders that it writes."""
    results.run(ACTIVATIONS)
    [distill] = results.run("distill lizard")
    assert distill.parents == {
        "model": results.folder(MODEL),
        "text": results.folder(TEXT),
        "activations": results.folder(ACTIVATIONS),
    }
    assert [(link.method, link.steps) for link in distill.links] == [("lizard", ())], "it begins untrained"
    [finetune] = results.run("finetune lizard")
    assert [(link.method, link.steps) for link in finetune.links] == [
        ("lizard", (results.folder("distill lizard"),))
    ]
    [gate] = results.run("measure lizard gate")
    assert [link.steps for link in gate.links] == [
        (results.folder("distill lizard"), results.folder("finetune lizard"))
    ]
    [before] = results.run("measure lizard fidelity")
    assert [link.steps for link in before.links] == [(results.folder("distill lizard"),)]
    for job in (distill, finetune, gate, before):
        assert not any(isinstance(value, Plan) for value in vars(job).values())
        assert (job.device, job.dtype, job.seed, job.leads, job.assets) == ("cpu", "float32", 0, True, {})


def test_a_record_names_the_kernels_that_could_compute_it(results):
    results.run(ACTIVATIONS)
    results.run("distill lizard")
    kernels = results.record("distill lizard")["kernels"]
    assert "gated_linear_attention" in kernels and all(len(key) == 64 for key in kernels.values())


def test_two_nodes_at_work_have_folders_of_their_own(results):
    """A scratch folder is named by a node's name and its stage or measure, which no other node's are."""
    results.run(ACTIVATIONS)
    for words in ("distill lizard", "finetune lizard", "measure lizard gate", "measure lizard perplexity"):
        results.run(words)
        assert results.work(words).is_dir()
    assert len(list((results.plan.root / ".work").iterdir())) == len(INPUTS) + 5


def test_assets_are_obtained_for_the_work_and_checked(results, monkeypatch, tmp_path):
    mini, asked = Plan(scale="mini", results=tmp_path / "results"), []

    def obtain(name, assets, verify):
        asked.append((name, assets is mini.catalogue, verify))
        return tmp_path / name

    monkeypatch.setattr(stage.assets, "obtain", obtain)
    [job] = results.run("model smollm2-135m-instruct", plan=mini)
    assert job.assets == {"smollm2-135m-instruct": tmp_path / "smollm2-135m-instruct"} and asked == [
        ("smollm2-135m-instruct", True, True)
    ]
    [job] = results.run("asset brown", plan=mini)
    assert job.assets == {} and len(asked) == 1, "whose work it is to obtain it"


def test_an_asset_whose_files_are_gone_is_obtained_again(results, monkeypatch, tmp_path):
    """Its record came with results of another machine, or the cache was deleted since."""
    monkeypatch.setenv("RELINEAR_CACHE", str(tmp_path / "cache"))
    mini = Plan(scale="mini", results=tmp_path / "results")
    assert [len(results.run("asset brown", plan=mini)) for _ in range(2)] == [1, 1]
    (tmp_path / "cache" / mini.catalogue["brown"].folder).mkdir(parents=True)
    assert results.run("asset brown", plan=mini) == []


def test_a_stage_error_is_one_a_user_can_mend():
    assert issubclass(StageError, UserError)


# --- what is cut short, empty or another's counts as not there ---

BROKEN = ["", '{"schema": 2', "[]", "{}", "\x00" * 40, '{"schema": 9}']


@pytest.mark.parametrize("text", BROKEN)
def test_a_record_that_cannot_be_believed_is_made_again_and_one_line_says_so(results, capsys, text):
    (results.folder(TEXT) / "run.json").write_text(text)
    with pytest.raises(
        StageError,
        match=(
            r"`text stories@tiny` is not finished: .*run.json .*; run `relinear text stories@tiny .*` again"
        ),
    ):
        results.run(ACTIVATIONS)
    assert len(results.run(TEXT)) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "text/stories@tiny/run.json" in said[0] and "counts as not finished" in said[0]
    assert (
        results.record(TEXT)["key"] == results.plan.key(results.node(TEXT))
        and results.record(TEXT)["attempt"] == 2
    )
    results.run(ACTIVATIONS)


@pytest.mark.parametrize("text", ["", '{"loss": 2.0}', "{"])
def test_metrics_that_are_not_the_record_s_are_made_again(results, capsys, text):
    (results.folder(TEXT) / "metrics.json").write_text(text)
    assert len(results.run(TEXT)) == 1 and json.loads(
        (results.folder(TEXT) / "metrics.json").read_text()
    ) == {"loss": 1.0}
    [said] = capsys.readouterr().err.splitlines()
    assert "metrics.json is not what its run.json says" in said


def interrupted(results, damage) -> list[str]:
    """The content of the work folder that the attempt after an interruption finds, its files having been
    damaged."""

    def dies(job):
        job.log({"loss": 1.0}, 0)
        job.log({"loss": 1.0}, 1)
        (job.work / "00000.json").write_text("[1]")
        raise Stop

    seen = []
    with pytest.raises(Stop):
        run_stage(results.plan, results.node(ACTIVATIONS), dies)
    damage(results.work(ACTIVATIONS))

    def goes_on(job):
        seen.extend(sorted(path.name for path in job.work.iterdir() if path.is_file()))
        return {}

    run_stage(results.plan, results.node(ACTIVATIONS), goes_on)
    return seen


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


def test_what_an_interrupted_attempt_left_whole_is_gone_on_with(results, capsys):
    assert interrupted(results, lambda work: None) == ["00000.json", "attempt.json", "history.jsonl", "lock"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((name, damage) for name in ("attempt.json", "00000.json") for damage in (cut, flip)),
        *((name, lambda path: path.write_bytes(b"")) for name in ("attempt.json", "00000.json")),
    ],
)  # fmt: skip
def test_what_an_interrupted_attempt_left_broken_is_named_and_the_next_begins_anew(
    results, capsys, name, damage
):
    assert interrupted(results, lambda work: damage(work / name)) == ["attempt.json", "lock"]
    [said] = capsys.readouterr().err.splitlines()
    assert f"{name} cannot be read" in said or f"{name}: " in said
    assert said.startswith(
        "activations stories@tiny: what an earlier attempt left cannot be read"
    ) and said.endswith("it begins anew")


def test_a_result_is_on_the_disk_before_it_is_in_its_place(results, monkeypatch):
    """If the machine goes down right after the rename, no file in the folder has length 0."""
    synced, place = [], results.folder(ACTIVATIONS)
    monkeypatch.setattr(
        stage.os,
        "fsync",
        lambda handle: synced.append((Path(f"/proc/self/fd/{handle}").resolve().name, place.exists())),
    )
    results.run(ACTIVATIONS)
    wanted = {
        ("run.json", False),
        ("metrics.json", False),
        ("made.bin", False),
        ("out", False),
        (place.parent.name, True),
    }
    # others are written aside
    assert {(name, there) for name, there in synced if not name.startswith(".")} == wanted


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_training_that_ends_in_weights_that_are_none_is_not_finished(results, value):
    def work(job):
        save_file({"w_q": torch.tensor([1.0, value])}, job.out / "method.safetensors")
        return {}

    results.run(ACTIVATIONS)
    with pytest.raises(UserError, match="method.safetensors: w_q holds 1 numbers that are infinite or none"):
        run_stage(results.plan, results.node("distill lizard"), work)
    assert not results.folder("distill lizard").exists()


READING = {"metric": "acc", "of": "piqa", "at": {"length": 64}, "value": 0.5, "stderr": 0.1, "n": 4}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"value": float("nan")}, "has value nan (float); possible: a finite number"),
        ({"value": float("inf")}, "has value inf"),
        ({"value": np.float32(0.5)}, "(float32); possible: a finite number of Python's own"),
        ({"value": torch.tensor(0.5)}, "has value tensor(0.5000) (Tensor)"),
        ({"value": True}, "has value True (bool)"),
        ({"value": "high"}, "has value 'high' (str)"),
        (
            {"stderr": -0.1},
            "has stderr -0.1 (float); possible: a finite number of Python's own, 0 or more, or",
        ),
        ({"stderr": float("nan")}, "has stderr nan"),
        ({"n": 0}, "has n 0 (int); possible: how many items, 1 or more"),
        ({"n": np.int64(3)}, "(int64)"),
        ({"n": True}, "has n True (bool)"),
        ({"at": {"layer": None}}, "possible: numbers and words"),
        ({}, "'acc' of 'piqa' at {'length': 64} is there twice"),
    ],
    ids=str,
)
def test_readings_that_a_table_would_show_wrong_are_refused(change, said):
    """A NaN was a cell `nan`, and of two readings of one place a table showed one."""
    first = READING if not change else {**READING, "of": "arc"}
    with pytest.raises(UserError) as error:
        records.require_readings([first, {**READING, **change}], "measure lizard piqa")
    assert str(error.value).startswith("measure lizard piqa: the reading 'acc' of 'piqa'"), error.value
    assert said in str(error.value), error.value


def test_a_measurement_with_such_a_reading_is_not_finished(results):
    words = "measure teacher gate"
    with pytest.raises(UserError, match="measure teacher gate: .* has value nan"):
        run_stage(
            results.plan, results.node(words), lambda job: {"readings": [{**READING, "value": float("nan")}]}
        )
    assert not results.folder(words).exists()


def test_a_number_that_is_not_defined_and_one_of_numpy_s_that_is_python_s_are_readings():
    undefined = {**READING, "value": None, "stderr": None, "n": 0, "why": "no position is so far"}
    other = {**READING, "value": np.float64(0.5), "of": "arc"}
    records.require_readings([READING, {**undefined, "at": {"length": 128}}, other], "measure lizard piqa")


def test_a_parent_made_again_with_the_same_contents_is_no_newer_for_what_was_made_from_it(results):
    record = results.folder(TEXT) / "run.json"
    before = record.stat().st_mtime_ns
    (record.parent / "made.bin").unlink()
    results.run(TEXT)
    assert record.stat().st_mtime_ns == before
    (record.parent / "made.bin").unlink()
    results.run(TEXT, text=b"other")
    assert record.stat().st_mtime_ns > before


def test_what_a_stage_reads_of_the_cache_is_compared_by_hash(tmp_path, monkeypatch):
    """A flipped bit does not change a file's size."""
    asked = []
    monkeypatch.setattr(
        stage.assets, "obtain", lambda name, **how: asked.append((name, how["verify"])) or tmp_path
    )
    plan = Plan(scale="mini", results=tmp_path)
    stage.job_of(plan, plan.node("model", "smollm2-135m-instruct"), out=tmp_path, work=tmp_path)
    assert asked == [("smollm2-135m-instruct", True)]


def test_rules_are_told_of_broken_records_alone(results):
    results.run(ACTIVATIONS)
    assert list(set_aside(results.plan.root)) == []
    (results.folder(TEXT) / "run.json").write_text("")
    (results.folder(ACTIVATIONS) / "metrics.json").write_text("{}")
    said = list(set_aside(results.plan.root))
    assert len(said) == 2 and all(line.endswith("its step runs again") for line in said)
    assert (
        not (results.folder(TEXT) / "run.json").exists()
        and not (results.folder(ACTIVATIONS) / "run.json").exists()
    )
    assert (results.folder(MODEL) / "run.json").is_file()
    assert len(results.run(TEXT)) == len(results.run(ACTIVATIONS)) == 1
    assert list(set_aside(results.plan.root)) == []


def test_a_folder_that_a_step_takes_away_while_rules_look_at_it_is_not_broken(results, monkeypatch):
    results.run(TEXT)
    gone = results.folder(TEXT)

    def late(path):
        if path.is_relative_to(gone):
            shutil.rmtree(gone)
        return sha256(path)

    monkeypatch.setattr(records, "sha256", late)
    assert list(set_aside(results.plan.root)) == [] and not gone.exists()


def test_files_of_ones_own_in_a_clone_are_no_change_of_the_code():
    assert not changes_code("") and not changes_code("?? my-model/\n?? my-text.jsonl")
    assert (
        changes_code("?? my-model/\n?? src/relinear/attention/elu.py")
        and changes_code(" M README.md")
        and changes_code("?? a\nM  Snakefile")
    )
