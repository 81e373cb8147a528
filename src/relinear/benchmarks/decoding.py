"""Long generation and long prompts on one CPU core: `python -m relinear.benchmarks.decoding --out
results/reference/decoding`.

A small model with random weights (they do not matter for speed) generates with each method, and with the
softmax attention it had, through `generate()`; each run is a process of its own, so that its memory is its
own. Writes decoding.csv and decoding.provenance.json, and prints what each run reached. Meant for a machine
that does nothing else: another process on the core is in the times. Called again, it measures what is
missing.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import typer
from tqdm import tqdm
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from relinear.benchmarks import command
from relinear.benchmarks.campaign import METHODS, Campaign, session
from relinear.draw.render import markdown
from relinear.errors import UserError
from relinear.linearize.model import linearize
from relinear.linearize.state import RecurrentCache, nbytes
from relinear.machine import cpu

MODEL = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 65536,
}
RUNS: dict[str, tuple[str, dict] | None] = {"softmax teacher": None, **METHODS}
COLUMNS = (
    "phase",
    "run",
    "tokens",
    "ms_per_token",
    "cpu_ms_per_token",
    "seconds",
    "process_mib",
    "state_bytes",
)
PROMPT, WARM_UP, PARTS, REPEATS, TURN = 16, 256, 10, 5, 16
PHASES = {"decode": PARTS + 1, "prefill": 2, "turns": 2}  # and the number of rows of each
TARGETS = {"last tenth / second tenth": 1.10, "process growth": 0.01, "prefill: long / half": 2.3}
MIB = 2**20


def build(run: str) -> tuple[LlamaForCausalLM, RecurrentCache | DynamicCache]:
    """The small model of a run, and an empty cache for it."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MODEL)).eval()
    if RUNS[run] is None:
        return model, DynamicCache(config=model.config)
    method, options = RUNS[run]
    model = linearize(model, method, **options)
    return model, model.make_cache()


def state_bytes(cache: RecurrentCache | DynamicCache) -> int:
    """The bytes of the cache now."""
    return (
        cache.state_bytes()
        if isinstance(cache, RecurrentCache)
        else sum(nbytes((x.keys, x.values)) for x in cache.layers)
    )


def resident_mib() -> float:
    """Memory of this process now (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


class Meter(BaseStreamer):
    """Notes the time of every token that `generate()` hands over, and prints a row after each tenth of them.

    The memory for the times is allocated before the first token, so that it is not in the measured growth.
    """

    def __init__(self, run: str, tokens: int, cache):
        self.run, self.tokens, self.cache = run, tokens, cache
        # when the prompt and each token came, by the clock and by this thread's own time
        self.came = np.ones((2, tokens + 1))
        self.seen = -1

    def put(self, value) -> None:
        """Note the time of a token. At the end of a tenth print its row."""
        self.seen += 1
        self.came[:, self.seen] = time.perf_counter(), time.thread_time()
        done = self.seen * PARTS // self.tokens
        if self.seen == 1:
            self.row(None, None)
        elif self.seen and done > (self.seen - 1) * PARTS // self.tokens:
            first = max(1, (done - 1) * self.tokens // PARTS)
            self.row(*(1e3 * np.median(np.diff(self.came[:, first : self.seen + 1]), axis=1)))

    def row(self, ms: float | None, cpu_ms: float | None) -> None:
        """Print a row with the process's memory and the cache's bytes."""
        report(
            phase="decode",
            run=self.run,
            tokens=self.seen,
            ms_per_token=ms,
            cpu_ms_per_token=cpu_ms,
            process_mib=resident_mib(),
            state_bytes=state_bytes(self.cache),
        )

    def end(self) -> None:
        """Do nothing. `generate` calls it after the last token."""
        ...


def report(**row) -> None:
    """Print a row as a line of JSON, which the process that started this one reads."""
    print(json.dumps(dict.fromkeys(COLUMNS) | row), flush=True)


def decode(run: str, tokens: int) -> None:
    """Generate `tokens` tokens and print a row for each tenth: the median ms per token, and the memory and
    state at the end of the tenth."""
    model, cache = build(run)
    prompt = torch.arange(PROMPT)[None]
    settings = {
        "attention_mask": torch.ones_like(prompt),
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    model.generate(prompt, max_new_tokens=WARM_UP, **settings)
    model.generate(
        prompt, max_new_tokens=tokens, past_key_values=cache, streamer=Meter(run, tokens, cache), **settings
    )


@torch.inference_mode()
def prefill(run: str, tokens: int) -> None:
    """Read a prompt of half of `tokens` and one of `tokens`, and print a row for each. Memory is the peak
    above what the process had before."""
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # noqa: E731
    model, _ = build(run)
    model(torch.zeros(1, WARM_UP, dtype=torch.long), logits_to_keep=1)
    before = peak()
    for length in (tokens // 2, tokens):
        ids = torch.randint(0, MODEL["vocab_size"], (1, length))
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
            times.append(time.perf_counter() - began)
        report(
            phase="prefill",
            run=run,
            tokens=length,
            seconds=statistics.median(times),
            process_mib=peak() - before,
            state_bytes=state_bytes(cache),
        )


@torch.inference_mode()
def turns(run: str, tokens: int) -> None:
    """Time tokens of the second tenth and of the last tenth in turns, `TURN` at a time, so that a drift of
    the processor's speed is in both alike."""
    model, _ = build(run)
    tenth = tokens // PARTS
    caches = {start: build(run)[1] for start in (tenth, tokens - tenth)}
    for start, cache in caches.items():
        model(torch.randint(0, MODEL["vocab_size"], (1, start)), past_key_values=cache, logits_to_keep=1)
    times: dict[int, list] = {start: [] for start in caches}
    for _ in range(tenth // TURN):
        for start, cache in caches.items():
            for _ in range(TURN):
                began = time.perf_counter(), time.thread_time()
                model(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache)
                times[start].append((time.perf_counter() - began[0], time.thread_time() - began[1]))
    for start, seen in times.items():
        ms, cpu_ms = 1e3 * np.median(np.array(seen), axis=0)
        report(
            phase="turns",
            run=run,
            tokens=start + len(seen),
            ms_per_token=ms,
            cpu_ms_per_token=cpu_ms,
            state_bytes=state_bytes(caches[start]),
        )


def run_phase(phase: str, run: str, tokens: int) -> Iterator[dict]:
    """The rows of one run, as its process prints them."""
    words = [
        sys.executable,
        "-m",
        "relinear.benchmarks.decoding",
        "--phase",
        phase,
        "--run",
        run,
        "--tokens",
        str(tokens),
    ]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        yield from map(json.loads, process.stdout)
    if process.returncode:
        raise RuntimeError(f"{phase} of {run} ended with {process.returncode}")


def figures_of(rows: list[dict]) -> dict[str, dict[str, float]]:
    """Run -> its figures, those that TARGETS sets bounds for."""
    found = {}
    for run in dict.fromkeys(row["run"] for row in rows):
        first, *tenths = (r for r in rows if r["run"] == run and r["phase"] == "decode")
        half, whole = (r for r in rows if r["run"] == run and r["phase"] == "prefill")
        early, late = (r for r in rows if r["run"] == run and r["phase"] == "turns")
        growth = max(r["process_mib"] for r in tenths) / first["process_mib"] - 1
        times = late["ms_per_token"] / early["ms_per_token"], whole["seconds"] / half["seconds"]
        found[run] = dict(zip(TARGETS, (times[0], growth, times[1]), strict=True))
    return found


def earlier(campaign: Campaign) -> list[dict]:
    """The rows that earlier calls wrote, with their texts turned into numbers."""
    number = lambda text: int(text) if text.isdecimal() else float(text)  # noqa: E731
    return [
        {k: v if k in ("phase", "run") else number(v) if v else None for k, v in row.items()}
        for row in campaign.rows
    ]


def measure_all(campaign: Campaign, kept: list[dict], tokens: int, jobs: int) -> list[dict]:
    """The rows of all runs, `jobs` of them side by side. A run of `kept`, the rows of earlier calls, at as
    many tokens is not measured again."""
    rows = []
    with tqdm(total=len(RUNS) * sum(PHASES.values()), unit="part") as bar, ThreadPoolExecutor(jobs) as pool:

        def every(run: str) -> list[dict]:
            own = []
            for phase, parts in PHASES.items():
                length = tokens // 2 if phase == "prefill" else tokens
                have = [row for row in kept if (row["run"], row["phase"]) == (run, phase)]
                for row in (
                    have
                    if len(have) == parts and abs(have[-1]["tokens"] - length) < PARTS + TURN
                    else run_phase(phase, run, length)
                ):
                    own.append(row)
                    bar.update()
            return own

        for own in pool.map(every, RUNS):
            rows += own
            done = {row["run"] for row in rows}
            later = [row for row in kept if row["run"] not in done]
            # after each run, since the next one takes long and may be interrupted
            campaign.replace(rows + later)
    return rows


def main(
    out: Annotated[
        Path, typer.Option(help="folder of decoding.csv; what it has is not measured again")
    ] = Path("results/reference/decoding"),
    tokens: Annotated[
        int, typer.Option(help="tokens to decode; prompts have a half and a quarter of it")
    ] = 32768,
    jobs: Annotated[
        int, typer.Option(help="runs side by side, each on a core of its own; fewer than there are cores")
    ] = 1,
    # with --run: the part of the work of one run's process
    phase: Annotated[Literal[tuple(PHASES)] | None, typer.Option(hidden=True)] = None,
    run: Annotated[Literal[tuple(RUNS)] | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure every run; write the rows and their provenance; print what each run reached. `snakemake
    comparison_decoding` draws them."""
    if phase and run:
        torch.set_num_threads(1)
        return {"decode": decode, "prefill": prefill, "turns": turns}[phase](run, tokens)
    if tokens < 1024:
        raise UserError(f"--tokens must be at least 1024, for tenths to mean something; got {tokens}")
    campaign = Campaign(out / "decoding.csv", COLUMNS)
    kept = earlier(campaign)
    about = session(f"python -m relinear.benchmarks.decoding --tokens {tokens} --jobs {jobs}")
    began = time.monotonic()
    rows = measure_all(campaign, kept, tokens, jobs)
    figures = figures_of(rows)
    if rows != kept:  # else the provenance stays that of the call that measured
        campaign.describe(
            **about,
            seconds=round(time.monotonic() - began),
            cpu=cpu.model(),
            cores=os.cpu_count(),
            threads=1,
            memory_gib=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
            dtype="float32",
            model=MODEL,
            runs=RUNS,
            targets=TARGETS,
            reached=figures,
            rows_of_earlier_calls=len(kept),
            timing=(
                f"decode: median of each tenth, through generate(); prefill: median of {REPEATS} passes;"
                f" turns: medians, {TURN} tokens a turn"
            ),
        )
    cells = lambda values: [f"{v:.3f}{'' if v <= TARGETS[k] else ' (missed)'}" for k, v in values.items()]  # noqa: E731
    print(
        markdown(
            ["run", *(f"{k} (at most {v:g})" for k, v in TARGETS.items())],
            [[run, *cells(v)] for run, v in figures.items()],
        )
    )


if __name__ == "__main__":
    command.run(main)
