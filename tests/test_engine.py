"""Several processes compute what one does: the same curves, results and records, also across an interruption
and on another number of them.

Two processes by torchrun: on one CPU through gloo, on two GPUs, where there are as many, through NCCL.
"""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from conftest import Clone, copy_sources, environment, free_port, wait
from safetensors.torch import load_file

from relinear.benchmarks import training as throughput
from relinear.errors import UserError
from relinear.get.packed import batch_indices, micro_batches
from relinear.machine.torchrun import torchrun
from relinear.plan.plan import Plan
from relinear.plan.strict import ConfigError
from relinear.stages._stage import Node

DEVICE = "cuda" if torch.cuda.device_count() >= 2 else "cpu"
VERBS = (str(Path(__file__).with_name("verbs.py")), DEVICE)
# of a curve of eight steps; the kernels sum in another order than torch does
ROUNDING = {"cpu": 1e-5, "cuda": 1e-3}[DEVICE]
# a method's parameters, LoRA beside them, all weights
TRAINED = [
    ("frontier_state_57", "distill"),  # set by the teacher's attention first, of which shards have parts
    ("lizard", "distill"),
    ("lizard", "finetune"),
    ("supra", "finetune"),
]

# Put into the code that runs stages, on which no result depends: the second process dies or hangs at a step
# that a file names.
MISHAPS = """

def _mishap(self, metrics, step, log=Job.log):
    if self.leads:
        return log(self, metrics, step)
    for mishap in ("die", "hang"):
        if Path(mishap).is_file() and Path(mishap).read_text() == str(step):
            Path(mishap).unlink()
            if mishap == "die":
                os.kill(os.getpid(), 9)
            Path("hanging").write_text(str(os.getpid()))
            time.sleep(600)


Job.log = _mishap
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory, interpreter) -> Clone:
    """Three scales of the same numbers: `one` for a single process, `ddp` and `fsdp` for two."""
    clone = copy_sources(tmp_path_factory.mktemp("engine") / "clone", interpreter)
    with (clone / "src/relinear/stage.py").open("a") as file:
        file.write(MISHAPS)
    smoke = yaml.safe_load((clone / "workflow/scales/smoke.yaml").read_text())
    smoke["hardware"]["device"] = DEVICE
    # a batch each; the teacher's own pass, sharded too
    smoke["train"]["distill"] |= {"batch_size": 1, "accumulate": 2, "activations": False}
    smoke["train"]["finetune"] |= {"batch_size": 2, "accumulate": 1}  # a batch between them
    for scale, engine in {"one": "auto", "ddp": "auto", "fsdp": "fsdp"}.items():
        smoke["hardware"]["engine"] = engine
        (clone / f"workflow/scales/{scale}.yaml").write_text(yaml.safe_dump(smoke))
    return clone


def shell(clone: Clone) -> dict[str, str]:
    return {
        **environment(),
        "PYTHONPATH": f"{clone.root / 'src'}:{clone.root / 'kernels'}",
        "OMP_NUM_THREADS": "1",
    }


def python(clone: Clone, *args: str) -> str:
    done = subprocess.run(
        [clone.interpreter, *args],
        cwd=clone.root,
        env=shell(clone),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def verbs(scale: str, *lines: str) -> list[str]:
    return [f"{line} --scale {scale} --threads 1" for line in lines]


WHOLE = [f"{stage} {run}" for run, stage in TRAINED]
MEASURED = [("teacher", "perplexity"), ("teacher", "commonsense"), ("lizard", "fidelity")]
MEASURES = ["measure teacher gate", *(f"measure {run} {measure}" for run, measure in MEASURED)]


@pytest.fixture(scope="module")
def single(clone) -> Clone:
    """The results of one process; and its last training stopped at step 2, with which two processes go on."""
    shared = (
        "model tiny",
        "written stories@tiny",
        "text stories@tiny",
        "pieces story-pieces@tiny-x0.5",
    )
    lines = verbs("one", *shared, *WHOLE, *MEASURES)
    for scale in ("ddp", "fsdp"):
        lines += verbs(scale, *shared, f"until 2 {WHOLE[-1]}")
    python(clone, *VERBS, *lines)
    return clone


@pytest.fixture(scope="module")
def double(single) -> Clone:
    """The results of two processes, with replicas and with shards."""
    output = python(
        single, *torchrun(2, *VERBS, *verbs("ddp", *WHOLE, *MEASURES), *verbs("fsdp", *WHOLE))[1:]
    )
    assert output.count(f"{WHOLE[-1]}: goes on at step 2 of 8") == 2, (
        "one process speaks for both, at both scales"
    )
    return single


def folder(clone: Clone, scale: str, run: str, stage: str) -> Path:
    return clone / f"results/{scale}/runs/{run}/{stage}"


def history(at: Path) -> list[dict]:
    return [json.loads(line) for line in (at / "history.jsonl").read_text().splitlines()]


def assert_same(got: Path, expected: Path) -> None:
    """The same curve and the same weights, to float32 rounding."""
    ours, theirs = history(got), history(expected)
    assert [x["step"] for x in ours] == [x["step"] for x in theirs] == list(range(len(theirs)))
    for field in ("loss", "grad_norm", "lr"):
        assert [x[field] for x in ours] == pytest.approx([x[field] for x in theirs], rel=ROUNDING), field
    files = sorted(p.relative_to(expected) for p in expected.rglob("*.safetensors"))
    assert files and files == sorted(p.relative_to(got) for p in got.rglob("*.safetensors"))
    for file in files:
        a, b = load_file(got / file), load_file(expected / file)
        assert a.keys() == b.keys()
        for name in b:
            assert (a[name] - b[name]).abs().max() <= 100 * ROUNDING * b[name].abs().max(), name


@pytest.mark.parametrize("scale", ["ddp", "fsdp"])
@pytest.mark.parametrize(("run", "stage"), TRAINED)
def test_two_processes_train_what_one_does(double, scale, run, stage):
    got, expected = folder(double, scale, run, stage), folder(double, "one", run, stage)
    assert_same(got, expected)
    record, alone = (json.loads((at / "run.json").read_text()) for at in (got, expected))
    assert (record["hardware"]["processes"], record["hardware"]["engine"]) == (2, scale)
    assert (alone["hardware"]["processes"], alone["hardware"]["engine"]) == (1, "ddp")
    assert (record["key"], record["tokens"]) == (alone["key"], alone["tokens"])
    same = ("steps", "tokens", "trainable_params")
    metrics, theirs = (json.loads((at / "metrics.json").read_text()) for at in (got, expected))
    assert {k: metrics[k] for k in same} == {k: theirs[k] for k in same}


@pytest.mark.parametrize(("run", "measure"), MEASURED)
def test_two_processes_measure_what_one_does(double, run, measure):
    got, expected = (folder(double, scale, run, measure) for scale in ("ddp", "one"))
    found, theirs = (json.loads((at / "metrics.json").read_text()) for at in (got, expected))
    if measure == "fidelity":  # of weights that two processes trained
        assert [r["value"] for r in found.pop("readings")] == pytest.approx(
            [r["value"] for r in theirs.pop("readings")], rel=100 * ROUNDING
        )
    assert found == theirs
    names = {path.name for path in expected.iterdir()}
    assert {path.name for path in got.iterdir()} == names
    if measure == "commonsense":
        assert (got / "items.jsonl").read_bytes() == (expected / "items.jsonl").read_bytes()


def test_one_process_writes_one_mlflow_run_a_stage(double):
    found = [
        run["tags"]
        for run in double.mlflow()
        if run["tags"].get("scale") == "fsdp" and run["tags"].get("stage") in ("distill", "finetune")
    ]
    attempts = [(run, stage, "1") for run, stage in TRAINED] + [(*TRAINED[-1], "2")]
    assert sorted((t["run"], t["stage"], t["attempt"]) for t in found) == sorted(attempts)


def start(clone: Clone, scale: str, run: str, stage: str, mishap: str, step: int) -> subprocess.Popen:
    """The running command that repeats a stage in two processes, of which the second dies or hangs at
    `step`."""
    shutil.rmtree(folder(clone, scale, run, stage))
    (clone / mishap).write_text(str(step))
    command = [
        sys.executable,
        "-m",
        "relinear.cli",
        stage,
        run,
        "--scale",
        scale,
        "--threads",
        "2",
        "--gpus",
        "2",
    ]
    process = subprocess.Popen(
        command, cwd=clone.root, env=shell(clone), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    clone.started.append(process)
    return process


@pytest.fixture(scope="module")
def interrupted(double) -> Clone:
    """Two processes, of which one is killed (with shards), or that are told to end (with replicas); then one
    that goes on to the end."""
    killed = start(double, "fsdp", "supra", "finetune", "die", 5)
    output, _ = killed.communicate()
    assert killed.returncode != 0 and "Signal 9 (SIGKILL) received" in output, output
    assert (
        len(list((double / "results/fsdp/.work/supra.finetune/checkpoints").glob("*/rank-1.safetensors")))
        == 2
    )

    told = start(double, "ddp", "lizard", "distill", "hang", 5)
    hanging = double / "hanging"
    wait(
        lambda: (hanging.is_file() and hanging.read_text()) or told.poll() is not None,
        "the second process to hang",
    )
    assert told.poll() is None, told.communicate()[0]
    told.send_signal(signal.SIGTERM)
    told.communicate()
    assert told.returncode != 0 and not psutil.pid_exists(int(hanging.read_text()))

    for scale, run, stage in INTERRUPTED:
        assert not (folder(double, scale, run, stage) / "run.json").exists()
    assert "RUNNING" not in {run["status"] for run in double.mlflow() if "stage" in run["tags"]}
    lines = [line for scale, run, stage in INTERRUPTED for line in verbs(scale, f"{stage} {run}")]
    (double / "output").write_text(python(double, *VERBS, *lines))
    return double


INTERRUPTED = [("fsdp", "supra", "finetune"), ("ddp", "lizard", "distill")]


@pytest.mark.parametrize(("scale", "run", "stage"), INTERRUPTED)
def test_one_process_goes_on_where_two_were_interrupted(interrupted, scale, run, stage):
    output, place = (interrupted / "output").read_text(), folder(interrupted, scale, run, stage)
    assert any(f"{stage} {run}: goes on at step {at} of 8" in output for at in (5, 6)), (
        "the others may or may not have come further"
    )
    assert_same(place, folder(interrupted, "one", run, stage))
    assert sorted(p.name for p in (interrupted / f"results/{scale}/.work/{run}.{stage}").iterdir()) == [
        "attempt.json",
        "lock",
    ]


def test_two_machines_train_what_one_process_does(interrupted):
    """A torchrun each, which meet at an address, as docs/running.md has it."""
    run, stage = "lizard", "finetune"
    shutil.rmtree(folder(interrupted, "ddp", run, stage))
    meet = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    meet += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "-m", "relinear.cli", stage, run]
    command = ["-m", "torch.distributed.run", *meet, *"--scale ddp --threads 1".split()]
    command = [interrupted.interpreter, *command]
    how = {"cwd": interrupted.root, "env": shell(interrupted), "text": True}
    machines = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **how) for _ in range(2)
    ]
    interrupted.started.extend(machines)
    said = [machine.communicate()[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said[0][-3000:] + said[1][-3000:]
    place = folder(interrupted, "ddp", run, stage)
    assert json.loads((place / "run.json").read_text())["hardware"]["processes"] == 2
    assert_same(place, folder(interrupted, "one", run, stage))


def test_the_dag_gives_each_rule_its_gpus(tmp_path):
    clone = copy_sources(tmp_path / "clone")
    clone.edit_yaml("workflow/scales/smollm2.yaml", lambda scale: scale["hardware"].update(gpus=4))
    for slots, gpus in ((8, 4), (2, 2)):
        options = ("--dry-run", "--printshellcmds", "--resources", f"gpu={slots}")
        output = clone.snakemake(
            "results/smollm2/runs/lizard/commonsense/run.json", options=options, scale="smollm2"
        )
        commands = [line for line in output.splitlines() if "relinear.cli" in line]
        for node in ("distill lizard", "finetune lizard", "measure lizard commonsense"):
            [command] = [c for c in commands if f"relinear.cli {node} " in c]
            assert f" --gpus {gpus} " in command
        [command] = [c for c in commands if "relinear.cli text mix@smollm2-135m-instruct " in c]
        assert " --gpus 0 " in command


# --- what each process takes of a step ---


@pytest.mark.parametrize(
    ("batch_size", "accumulate", "size"),
    [(8, 1, 1), (8, 1, 4), (1, 8, 4), (4, 3, 2), (4, 3, 6), (4, 5, 4), (6, 2, 12)],
)
def test_shares_are_the_step_and_pieces_lie_in_a_batch(batch_size, accumulate, size):
    of = {"n": 21, "seed": 3}
    for step in (0, 1, 5):
        batches = [
            batch_indices(step * accumulate + i, batch_size=batch_size, **of) for i in range(accumulate)
        ]
        shares = [
            list(micro_batches(step, batch_size=batch_size, accumulate=accumulate, rank=r, size=size, **of))
            for r in range(size)
        ]
        assert [i for share in shares for own, _ in share for i in own] == [
            i for batch in batches for i in batch
        ]
        assert len({len(own) for share in shares for own, _ in share}) == 1
        for own, whole in (piece for share in shares for piece in share):
            assert whole == [i for batch in batches for i in batch] and any(
                set(own) <= set(batch) for batch in batches
            )
        if size == 1:
            assert [own for own, _ in shares[0]] == batches


@pytest.mark.parametrize(
    ("node", "processes", "named"),
    [
        (
            Node("distill", "lizard"),
            3,
            ["a step of distill has batch_size x accumulate = 8 sequences", "3 processes", "1, 2, 4, 8"],
        ),
        (Node("text", "mix@smollm2-135m-instruct"), 2, ["text", "got 2", "distill, finetune, measure"]),
    ],
)
def test_a_number_of_processes_that_does_not_fit_is_refused(node, processes, named):
    with pytest.raises(ConfigError) as error:
        Plan(scale="smollm2").check_processes(node, processes)
    assert all(part in str(error.value) for part in named), error.value


def test_a_scale_whose_gpus_cannot_share_a_step_is_refused(tmp_path):
    clone = copy_sources(tmp_path / "clone")
    clone.edit("workflow/scales/smollm2.yaml", "checkpoint_seconds: 120", "checkpoint_seconds: 120, gpus: 3")
    with pytest.raises(ConfigError, match="3 processes cannot share evenly; possible: 1, 2, 4, 8"):
        Plan(scale="smollm2", workflow=clone / "workflow").check()
    Plan(scale="smollm2", device="cpu", workflow=clone / "workflow").check()


# --- how fast several are ---


def test_throughput_of_both_stages_is_measured_on_one_process_and_two(tmp_path, interpreter):
    shape = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    clone, out = Clone(Path(__file__).parents[1], [], interpreter), tmp_path / "scaling.json"
    options = (
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--length",
        "16",
        "--shape",
        str(tmp_path / "config.json"),
        "--runs",
        "lizard",
    )
    output = python(
        clone, "-m", "relinear.benchmarks.training", "--gpus", "1", "2", "--out", str(out), *options
    )
    rows = json.loads(out.read_text())["rows"]
    assert [(r["gpus"], r["stage"]) for r in rows] == [
        (1, "distill"),
        (1, "finetune"),
        (2, "distill"),
        (2, "finetune"),
    ]
    assert [r["global_batch"] for r in rows] == [4, 4, 8, 8], "weak: a fixed number of sequences a GPU"
    assert [r["tokens_per_second"] for r in rows] == pytest.approx(
        [r["gpus"] * r["tokens_per_second_per_gpu"] for r in rows], abs=1
    )
    assert all(r["tokens_per_second"] > 0 and r["peak_gib"] > 0 for r in rows)
    assert "1.00x" in output


def test_measurements_say_what_they_share_and_curves_are_held_to_one_gpus():
    cells = {n: throughput.suite(Plan(scale="paper"), None, None, n) for n in (1, 2, 4)}
    for n, of in cells.items():
        for cell in of:
            batch, accumulate = cell.step(n)
            assert (
                batch * accumulate == (n * cell.sequences if cell.scaling == "weak" else cell.sequences)
                and batch * accumulate % n == 0
            )
    assert {c.engine for c in cells[1]} == {"ddp", "auto"} and "fsdp" in {c.engine for c in cells[4]}
    cell = next(c for c in cells[1] if c.scaling == "curve")
    curve = {**cell._asdict(), "length": 8, "gpus": 1, "loss": [4.0, 2.0], "grad_norm": [1.0, 1.0]}
    rows = [curve, {**curve, "piece": 2, "loss": [4.0, 2.002]}, {**curve, "gpus": 4, "grad_norm": [1.0, 1.5]}]
    assert [apart for _, apart in throughput.distances(rows)] == [(0, 0), (pytest.approx(1e-3), 0), (0, 0.5)]
    with pytest.raises(UserError, match="no shape 'llama-9'; have smollm2-135m"):
        throughput.shape_of("llama-9")
