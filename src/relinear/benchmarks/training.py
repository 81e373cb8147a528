"""Training throughput, memory and scaling: `python -m relinear.benchmarks.training --gpus 1 2 4 --out
results/reference/scaling/scaling.json`.

Each measurement trains a run of the catalogue for a few steps with the stage's own code (its loss, recipe,
optimiser and engine: replicas or FSDP2 shards), at a teacher's shape. Weights do not matter for speed: they
are random, made on the device; so are the tokens.

    weak    a fixed number of sequences a GPU
    strong  a fixed number of sequences a step, shared by the GPUs
    curve   the same steps on N GPUs and on one: losses and gradient norms are compared. The baseline for "the
            same" is one GPU with smaller micro-batches, which differs by rounding only

`--gpus` starts torchrun for one number of GPUs after the other, in one session, so that ratios have their own
base; under torchrun the module measures with the processes that there are. Rows are written as they come, the
most telling first; `--seconds` ends it early and says what is missing. `plain_full` and `plain_lora` are the
loop that a user writes without this package (`plain_loop.py`), which the others stand beside as a ratio: full
training beside the one, LoRA and transfer beside the other. NCCL is used as it is set: NCCL_NVLS_ENABLE=0 and
its like in the environment stay.
"""

import copy
import gc
import json
import math
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
import typer
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from relinear.benchmarks import command, plain_loop
from relinear.benchmarks.campaign import Campaign
from relinear.benchmarks.campaign import session as provenance
from relinear.benchmarks.generation import SHAPES as PAPERS
from relinear.benchmarks.generation import shaped
from relinear.draw.render import titled
from relinear.errors import UserError
from relinear.folders import config_of
from relinear.linearize.graph import WARM_UP
from relinear.linearize.model import linearize
from relinear.machine.distributed import agreed, gathered, joined, rank, size
from relinear.machine.hardware import device_of, dtype_of, memory_bytes, place, set_threads
from relinear.machine.torchrun import torchrun
from relinear.opening import configuring
from relinear.plan.job import PRECISIONS, Job
from relinear.plan.plan import Plan
from relinear.stage import job_of
from relinear.train import distill, finetune
from relinear.train.room import TooLargeError

SHAPES: dict[str, PreTrainedConfig] = {
    "smollm2-135m": shaped(LlamaConfig, 49152, 576, 1536, 30, 9, 3, 64, 8192, tie_word_embeddings=True),
    **PAPERS,
    "llama-3-70b": shaped(LlamaConfig, 128256, 8192, 28672, 80, 64, 8, 128, 8192),
}
PIECE = {"smollm2-135m": 16}  # sequences that a GPU takes at a time, where it may choose
LARGE = 4  # the same, at any other shape
# the last: the teacher itself, with its softmax attention
PEERS = ("lolcats_window", "lizard", "teacher_lora")
# The measurements, the most telling first: scaling, shape, runs, engine, sequences (None: a GPU takes PIECE
# of them).
SUITE = (
    ("weak", "smollm2-135m", ("plain_full", "plain_lora", "supra", *PEERS), "auto", None),
    ("weak", "llama-3-8b", PEERS, "auto", None),
    ("curve", "smollm2-135m", ("lizard", "supra"), "ddp", 8),
    ("weak", "llama-3-8b", ("lolcats_window",), "fsdp", None),
    ("strong", "smollm2-135m", ("lolcats_window",), "auto", 8),  # the scale's own step
    ("strong", "smollm2-135m", ("lolcats_window",), "auto", 64),
    ("strong", "llama-3-8b", ("lolcats_window",), "auto", 8),
    ("curve", "smollm2-135m", ("lizard", "supra"), "fsdp", 8),
    ("weak", "llama-3-8b", ("supra",), "fsdp", None),  # all weights are trained: no replica fits a GPU
)
WARM, TIMED = WARM_UP + 1, 5  # steps; the last one before the clock records the graph
CURVE = 20  # steps
STAGES = ("distill", "finetune")
GRACE = 20  # seconds beyond its time that a measurement may take to end


class Cell(NamedTuple):
    """One measurement. `sequences`: a GPU's (weak) or a step's (strong, curve); `piece`: the most that a GPU
    takes at a time."""

    scaling: str
    shape: str
    run: str
    stage: str
    engine: str
    sequences: int
    piece: int

    def step(self, processes: int) -> tuple[int, int]:
        """`batch_size` and `accumulate` of a step on that many processes."""
        total = self.sequences * processes if self.scaling == "weak" else self.sequences
        batch = min(total, self.piece * processes) if self.scaling == "weak" else min(total, self.piece)
        return batch, total // batch


def suite(plan: Plan, shapes: list[str] | None, runs: list[str] | None, processes: int) -> list[Cell]:
    """The measurements that this number of processes takes; with `runs` those runs, weak. Raises UserError
    for an unknown run."""
    if runs:
        asked = [
            ("weak", shape, tuple(runs), "auto", None) for shape in shapes or ("smollm2-135m", "llama-3-8b")
        ]
    # another model: the measurements of the small one and no more
    elif shapes and not set(shapes) <= {shape for _, shape, *_ in SUITE}:
        asked = [
            (scaling, other, *rest)
            for other in shapes
            for scaling, shape, *rest in SUITE
            if shape == "smollm2-135m"
        ]
    else:
        asked = [row for row in SUITE if not shapes or row[1] in shapes]
    cells = []
    for scaling, shape, names, engine, sequences in asked:
        most = PIECE.get(shape, LARGE)
        for name in names:
            if name in plain_loop.RUNS:
                if processes == 1:
                    cells.append(Cell(scaling, shape, name, "finetune", "ddp", most, most))
                continue
            recipes = plan.run(name).run.recipes
            for stage in STAGES:
                if stage not in recipes or (processes == 1 and engine == "fsdp"):
                    continue
                cells.append(
                    Cell(
                        scaling,
                        shape,
                        name,
                        stage,
                        engine,
                        sequences or most,
                        max(most, sequences or 0) if scaling == "curve" else most,
                    )
                )
                if scaling == "curve" and processes == 1:  # rounding alone
                    cells.append(cells[-1]._replace(piece=sequences // 4))
    return cells


@dataclass
class Timed(Job):
    """A training job that writes nothing and has a clock for a log."""

    logged: list[dict[str, Any]] = field(default_factory=list)
    stamps: list[float] = field(default_factory=list)  # seconds, when each step had ended

    @property
    def global_batch(self) -> int:
        """Sequences of a step, over all processes."""
        return self.settings["budget"]["batch_size"] * self.settings["budget"]["accumulate"]

    def resume(self, step: int) -> None:
        """Forget the peak of memory that making the weights caused."""
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()  # the memory for making the weights does not count

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Take the time of a step, once the device has finished it."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.stamps.append(time.perf_counter())
        self.logged.append(metrics)


def timing_job(
    plan: Plan, cell: Cell, config: PreTrainedConfig, folder: Path, length: int, dtype: str
) -> Timed:
    """The job of a measurement: the run's own recipe, on as many random tokens as its steps take, written
    into `folder`."""
    job = job_of(plan, plan.node(cell.stage, cell.run), out=folder, work=folder, leads=False)
    batch, accumulate = cell.step(size())
    budget = job.settings["budget"] | {
        "epochs": 1,
        "seq_len": length,
        "batch_size": batch,
        "accumulate": accumulate,
    }
    steps = CURVE if cell.scaling == "curve" else WARM + TIMED
    # Some tokens are frequent, so that a model can learn which.
    tokens = (
        config.vocab_size * np.random.default_rng(0).random(steps * batch * accumulate * length) ** 8
    ).astype(np.int32)
    for name in ("train_tokens", "train_labels", "heldout_tokens", "heldout_labels"):
        np.save(folder / f"{name}.npy", tokens)
    own = {
        "settings": {**job.settings, "budget": budget},
        "parents": {"text": folder},
        "engine": cell.engine,
        "dtype": dtype,
    }
    own["compile"] = "on" if job.device == "cuda" else "off"  # as trainings do that are long enough
    return Timed(**vars(job) | own)


def random_model(
    config: PreTrainedConfig, settings: dict[str, Any], device: str, dtype: torch.dtype
) -> PreTrainedModel:
    """A run's model at a shape, with random weights, the same in every process."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        if settings["method"] != "softmax":
            model = linearize(model, settings["method"], **settings["options"])
    return model.eval()


def measure(plan: Plan, cell: Cell, config: PreTrainedConfig, length: int, dtype_name: str) -> dict[str, Any]:
    """The row of one measurement: seconds are medians over `TIMED` steps, memory is the peak of the process
    that needed most."""
    if cell.run in plain_loop.RUNS:
        return measure_plain(cell, config, length, plan.device or "cuda", dtype_name)
    with tempfile.TemporaryDirectory() as folder:
        job = timing_job(plan, cell, config, Path(folder), length, dtype_name)
        device, dtype = place(job)
        kind = "transfer" if cell.stage == "distill" else job.settings["recipe"]["kind"]
        if cell.stage == "distill":
            model = random_model(config, job.settings, device, dtype)
            products = plain_loop.matrices(model)
            metrics = distill.fit(job, model, device)
        else:
            model = random_model(
                config, job.settings, device, finetune.weights_dtype(job.settings["recipe"], dtype)
            )
            products = plain_loop.matrices(model)
            _, metrics = finetune.fit(job, model, device, dtype)
    row = {
        **cell._asdict(),
        "engine": job.hardware["engine"],
        "asked": cell.engine,
        "gpus": size(),
        "global_batch": job.global_batch,
        "length": length,
        "trainable_params": metrics["trainable_params"],
        "peak_gib": round(max(gathered([memory_bytes(device)])) / 2**30, 2),
    }
    if cell.scaling == "curve":
        return row | {name: [m[name] for m in job.logged] for name in ("loss", "grad_norm")}
    seconds = [b - a for a, b in zip(job.stamps, job.stamps[1:], strict=False)][WARM - 1 :]
    return (
        row
        | speed(job.global_batch * length, seconds, plain_loop.flops_a_token(*products, kind))
        | {"kind": kind}
    )


def measure_plain(
    cell: Cell, config: PreTrainedConfig, length: int, device: str, dtype: str
) -> dict[str, Any]:
    """The row of the plain loop, which a user writes without this package."""
    kind = plain_loop.RUNS[cell.run]
    loop = plain_loop.steps(
        config, kind, cell.sequences, length, dtype_of(dtype, device), device, compiled=device == "cuda"
    )
    for _ in range(WARM):
        next(loop)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found = [next(loop) for _ in range(TIMED)]
    last = found[-1]
    flops = plain_loop.flops_a_token(last["products"], last["head"], kind)
    return {
        **cell._asdict(),
        "asked": "ddp",
        "gpus": 1,
        "global_batch": cell.sequences,
        "length": length,
        "kind": kind,
        "trainable_params": last["trainable_params"],
        "peak_gib": round(last["memory"] / 2**30, 2),
    } | speed(cell.sequences * length, [step["seconds"] for step in found], flops)


def speed(tokens: int, seconds: list[float], flops: int) -> dict[str, Any]:
    """Tokens a second of steps of that many `tokens`, and TFLOP/s of the products of the model's weights at
    `flops` a token."""
    rate = tokens / statistics.median(seconds)
    return {
        "tokens_per_second": round(rate),
        "tokens_per_second_per_gpu": round(rate / size()),
        "tflops_per_gpu": round(rate * flops / size() / 1e12, 1),
        "step_seconds": [round(f(seconds), 5) for f in (min, statistics.median, max)],
    }


def shape_of(name: str) -> PreTrainedConfig:
    """The configuration of a named shape, or of a transformers config.json. Raises UserError where it is
    neither."""
    if name in SHAPES:
        return copy.deepcopy(SHAPES[name])  # a model changes its own
    if not Path(name).is_file():
        raise UserError(f"no shape {name!r}; have {', '.join(SHAPES)}, or give a model's config.json")
    with configuring(Path(name)):
        return config_of(name)


class Asked(NamedTuple):
    """The settings that the processes of a session are given."""

    out: Path
    shape: list[str] | None
    runs: list[str] | None
    length: int
    dtype: str
    device: str


def work(given: Asked, until: float) -> None:
    """Measure with the processes that there are, adding rows to the file, until the time is up."""
    plan = Plan(scale="paper", device=given.device)
    left_out = []
    for cell in suite(plan, given.shape, given.runs, size()):
        if agreed(time.time() > until):
            left_out.append({**cell._asdict(), "gpus": size()})
            continue
        try:
            row = measure(plan, cell, shape_of(cell.shape), given.length, given.dtype)
        except (torch.OutOfMemoryError, TooLargeError):
            if size() > 1:  # the others wait for this process
                raise
            row = {
                **cell._asdict(),
                "asked": cell.engine,
                "gpus": 1,
                "length": given.length,
                "error": "out of memory",
            }
        gc.collect()
        if given.device == "cuda":
            torch.cuda.empty_cache()
        if rank() == 0:
            add(given.out, given.device, [row], [])
            print(json.dumps({k: v for k, v in row.items() if k not in ("loss", "grad_norm")}), flush=True)
    if rank() == 0 and left_out:
        add(given.out, given.device, [], left_out)
        print(f"no time for {len(left_out)} measurements on {size()} GPUs", flush=True)


def add(out: Path, device: str, rows: list[dict], left_out: list[dict]) -> None:
    """Add rows to the file, and the names of measurements that there was no time for. Makes the file if it is
    not there."""
    campaign = Campaign(out)
    if not campaign.about:
        gpu = torch.cuda.get_device_name() if device == "cuda" else device
        campaign.about = {**provenance("python -m relinear.benchmarks.training"), "device": gpu}
    campaign.rows += rows
    campaign.describe(left_out=campaign.about.get("left_out", []) + left_out)


# --- several numbers of GPUs, one after the other ---


def session(given: Asked, numbers: list[int], seconds: float) -> None:
    """One torchrun for each number of GPUs, each with its part of the time that is left. A failure costs its
    own rows only."""
    given.out.unlink(missing_ok=True)  # ratios are of one session
    began = time.time()
    own = [
        f"--{name}={value}"
        for name in ("device", "dtype", "length", "out")
        if (value := getattr(given, name)) is not None
    ]
    own += [
        word
        for name in ("shape", "runs")
        if (values := getattr(given, name))
        for word in (f"--{name}", *values)
    ]
    for i, gpus in enumerate(numbers):
        launch = torchrun(gpus, "-m", "relinear.benchmarks.training", *own)
        now = time.time()
        until = now + max(began + seconds - now, 0) / (len(numbers) - i)
        process = subprocess.Popen([*launch, f"--until={until}"])
        try:
            code = process.wait(None if until == math.inf else until - now + GRACE)
        except subprocess.TimeoutExpired:
            code = "no time left"
        finally:
            process.terminate()  # torchrun ends its processes
            process.wait()
        if code:
            print(f"{gpus} GPUs: ended early ({code})", flush=True)
    if not given.out.is_file():
        raise UserError("nothing was measured; what torchrun printed says why")


# --- what came out ---


def report(record: dict) -> str:
    """The rows as Markdown tables: throughput with its ratio to one GPU, and curves with their distance from
    one GPU's."""
    rows = record["rows"]
    speeds = [_speed(row, rows) for row in rows if row["scaling"] != "curve"]
    curves = [
        {
            "run": row["run"],
            "stage": row["stage"],
            "engine": row["engine"],
            "GPUs": str(row["gpus"]),
            "piece": str(row["piece"]),
            "first loss": f"{row['loss'][0]:.4f}",
            "last loss": f"{row['loss'][-1]:.4f}",
            "loss apart": f"{loss:.1e}",
            "gradient norm apart": f"{norm:.1e}",
        }
        for row, (loss, norm) in distances(rows)
    ]
    return "\n\n".join(titled(lines) for lines in (speeds, curves) if lines)


def _speed(row: dict, rows: list[dict]) -> dict[str, str]:
    """A row of throughput by the titles of its table; an error stands in the place of its ratio."""
    broken = "error" in row
    each = "a GPU" if row["scaling"] == "weak" else "a step"
    return {
        "shape": row["shape"],
        "run": row["run"],
        "stage": row["stage"],
        "scaling": f"{row['scaling']}, {row['sequences']} {each}",
        "engine": row["engine"],
        "GPUs": str(row["gpus"]),
        "tokens/s": "" if broken else f"{row['tokens_per_second']:,}",
        "tokens/s/GPU": "" if broken else f"{row['tokens_per_second_per_gpu']:,}",
        "against 1 GPU": row["error"] if broken else _ratio(row, rows),
        "against the plain loop": "" if broken else _against_plain(row, rows),
        "TFLOP/s/GPU": f"{row['tflops_per_gpu']:.0f}" if "tflops_per_gpu" in row and not broken else "",
        "peak GiB/GPU": "" if broken else f"{row['peak_gib']:.1f}",
    }


def _ratio(row: dict, rows: list[dict]) -> str:
    """Tokens/s against those of one GPU on the same work; empty where it was not measured."""
    same = ("scaling", "shape", "run", "stage", "sequences", "length")
    base = [r for r in rows if r["gpus"] == 1 and "error" not in r and all(r[k] == row[k] for k in same)]
    return f"{row['tokens_per_second'] / base[0]['tokens_per_second']:.2f}x" if base else ""


def _against_plain(row: dict, rows: list[dict]) -> str:
    """Tokens/s/GPU against the plain loop's that trains as much: all weights, or LoRA, with which a transfer
    is compared too."""
    peer = "plain_full" if row.get("kind") == "full" else "plain_lora"
    same = ("scaling", "shape", "sequences", "length")
    base = [r for r in rows if r["run"] == peer and "error" not in r and all(r[k] == row[k] for k in same)]
    return (
        f"{row['tokens_per_second_per_gpu'] / base[0]['tokens_per_second']:.2f}x"
        if base and "kind" in row
        else ""
    )


def distances(rows: list[dict]) -> Iterator[tuple[dict, tuple[float, float]]]:
    """Each curve with its largest relative distance from that of one GPU in whole steps, in loss and in
    gradient norm."""
    curves = [row for row in rows if row["scaling"] == "curve" and "error" not in row]
    for row in curves:
        same = ("shape", "run", "stage", "sequences", "length")
        base = [
            r
            for r in curves
            if r["gpus"] == 1
            and r["piece"] == max(c["piece"] for c in curves)
            and all(r[k] == row[k] for k in same)
        ]
        if base:
            pairs = [zip(row[field], base[0][field], strict=True) for field in ("loss", "grad_norm")]
            yield row, tuple(max(abs(a - b) / abs(b) for a, b in pair) for pair in pairs)


def main(
    out: Annotated[Path, typer.Option(help="the JSON file of the rows")],
    gpus: Annotated[
        list[int] | None,
        typer.Option(help="numbers of GPUs, each in its own torchrun; without: the processes that there are"),
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(SHAPES)} or a model's config.json")
    ] = None,
    runs: Annotated[
        list[str] | None,
        typer.Option(
            help="runs of workflow/papers/*/runs.yaml, plain_full, plain_lora: instead of the suite"
        ),
    ] = None,
    length: Annotated[int, typer.Option(help="tokens of a sequence")] = 1024,
    seconds: Annotated[
        float, typer.Option(help="how long it may take, all numbers of GPUs together")
    ] = math.inf,
    until: Annotated[float | None, typer.Option(hidden=True)] = None,
    dtype: Annotated[Literal[PRECISIONS], typer.Option(help="what it computes in")] = "bfloat16",
    device: Annotated[Literal["cuda", "cpu"], typer.Option(help="where it computes")] = "cuda",
) -> None:
    """Measure with each number of GPUs, or with the processes that there are; print the rows as tables."""
    given = Asked(out, shape, runs, length, dtype, device)
    if "LOCAL_RANK" in os.environ or not gpus:
        set_threads(None)
        with joined(device_of(device)):
            work(given, time.time() + seconds if until is None else until)
            reports = rank() == 0 and until is None  # otherwise the session reports
    else:
        session(given, gpus, seconds)
        reports = True
    if reports:
        print(report(json.loads(out.read_text())))


if __name__ == "__main__":
    command.run(main)
