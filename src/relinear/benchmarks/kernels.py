"""The fused operations beside their peers: `python -m relinear.benchmarks.kernels --out results/kernels`, on
one GPU.

Times are medians of replays of a CUDA graph, in bfloat16, with the L2 cache cleared between them. The output
of every form that has a definition is held against it in float32, and a wrong one is marked so. Writes
bench.csv row by row, bench.provenance.json with a record of each call, and from the rows ratios.md.
"""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from relinear.benchmarks import command
from relinear.benchmarks import kernel_forms as forms
from relinear.benchmarks.campaign import Campaign, session
from relinear.benchmarks.kernel_forms import Form, Forms, Shape
from relinear.draw.kernels import COLUMNS, ratios, read
from relinear.draw.render import write_text
from relinear.errors import UserError

TOLERANCE = 2e-2  # relative error from which on an output is wrong
FORWARD, BOTH, TRANSFER = "forward", "forward+backward", "stage 1"
EVERY = (FORWARD, BOTH, TRANSFER)
FAILURES = (RuntimeError, ValueError, TypeError, NotImplementedError, ImportError, AttributeError)


def copied_per_second() -> float:
    """Bytes that a copy on this GPU reads and writes in a second: what the floors are computed with."""
    from triton.testing import do_bench

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (do_bench(lambda: target.copy_(source), return_mode="median") / 1e3)


def fewest_bytes(shape: Shape, mode: str) -> int:
    """The least bytes that an attention moves. Forward it reads q, k and v and writes the output, each once.

    The backward reads these four and the output's gradient, and writes the gradients of q, k and v.
    """
    b, t, h, n, d, _ = shape
    q, k = b * t * h * d * 2, b * t * n * d * 2
    forward = 2 * q + 2 * k
    return forward if mode == FORWARD else forward + 3 * q + 2 * k + q + 2 * k


def time_run(run: Callable[[], Any], leaves: Sequence[Tensor]) -> dict[str, Any]:
    """Columns of a row: milliseconds, peak memory above what was held before in GiB, seconds of the first
    call, a note if no CUDA graph was recorded.

    With `leaves`, the gradients of these are computed too.
    """
    from triton.testing import do_bench

    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for x in leaves:
        x.requires_grad_()
    try:
        began = time.perf_counter()
        with torch.set_grad_enabled(bool(leaves)):
            probes = [torch.randn_like(x) for x in outputs_of(run())] if leaves else []

        def step() -> Any:
            with torch.set_grad_enabled(bool(leaves)):
                outputs = outputs_of(run())
            return torch.autograd.grad(outputs, list(leaves), probes) if leaves else outputs

        step()
        torch.cuda.synchronize()
        first = time.perf_counter() - began
        peak = torch.cuda.max_memory_allocated() - held
        replay = record_graph(step)
        ms = do_bench(replay or step, warmup=15, rep=60, return_mode="median")
    finally:
        for x in leaves:
            x.requires_grad_(False)
    return {"ms": f"{ms:.4f}", "gib": f"{peak / 2**30:.3f}", "first_call_s": f"{first:.1f}"} | (
        {} if replay else {"note": "launched, not replayed"}
    )


def record_graph(step: Callable[[], Any]) -> Callable[[], None] | None:
    """A function that replays `step` as a CUDA graph, so that launches cost next to nothing. None where it
    cannot be recorded."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError:
        return None
    return graph.replay


def outputs_of(returned: Any) -> tuple[Tensor, ...]:
    """The outputs of an op, which may have one."""
    return returned if isinstance(returned, tuple) else (returned,)


class Bench:
    """The rows of a campaign, written as each is measured, and the time that is left for them.

    `only` selects operations and shapes, `missing` the rows that no earlier call has measured. The file's
    other rows stay. `speed`: bytes that a copy moves in a second; `commit`: what new rows name.
    """

    def __init__(
        self,
        campaign: Campaign,
        seconds: float,
        *,
        only: str = "",
        missing: bool = False,
        speed: float = 1.0,
        commit: str = "",
    ):
        self.campaign, self.until = campaign, time.monotonic() + seconds
        self.only, self.missing = only, missing
        self.speed, self.commit = speed, commit
        self.rows = {_key(row): row for row in campaign.rows}

    def wants(self, op: str, shape: Shape) -> bool:
        """Whether an operation at a shape is selected."""
        return bool(re.search(self.only, f"{op} {_text(shape)}"))

    def time(
        self, op: str, shape: Shape, make: Callable[[Shape], Forms], modes: Iterable[str] = (FORWARD,)
    ) -> None:
        """Time the selected forms of an operation in these modes. A form without the gradients that a mode
        asks for is not timed in it."""
        if not self.wants(op, shape):
            return
        torch.compiler.reset()  # torch.compile gives up on a function that it has compiled for eight shapes
        for provider, form in make(shape).items():
            for mode in modes:
                leaves = {BOTH: form.leaves, TRANSFER: form.maps}.get(mode, ())
                if leaves or mode not in (BOTH, TRANSFER):
                    self._measure(op, provider, shape, mode, form, leaves)
        torch.cuda.empty_cache()

    def _measure(
        self, op: str, provider: str, shape: Shape, mode: str, form: Form, leaves: Sequence[Tensor]
    ) -> None:
        """Measure a row, unless an earlier call has, and write it. A failure is a row that says why."""
        b, t, h, n, d, f = shape
        moved = form.moved[mode] if form.moved else fewest_bytes(shape, mode)
        row = dict.fromkeys(COLUMNS, "") | {
            "op": op,
            "provider": provider,
            "B": b,
            "T": t,
            "H": h,
            "Hkv": n,
            "D": d,
            "F": f,
            "mode": mode,
        }
        row |= {
            "shape": _text(shape),
            "note": form.note,
            "floor_ms": f"{moved / self.speed * 1e3:.4f}",
            "commit": self.commit,
        }
        old = self.rows.get(_key(row))
        if self.missing and old and old["valid"] != "not run":
            return
        if time.monotonic() > self.until:
            row |= {"valid": "not run", "note": "time limit"}
        else:
            try:
                row |= self._values(form, mode, leaves)
            except FAILURES as problem:
                row |= {
                    "valid": "failed",
                    "note": (
                        f"{type(problem).__name__}:"
                        f" {str(problem).splitlines()[0][:120] if str(problem) else ''}"
                    ),
                }
                torch.cuda.empty_cache()
        self.rows[_key(row)] = row
        self.campaign.replace(self.rows.values())
        print(
            "  ".join(
                str(row[c])
                for c in ("op", "provider", "shape", "mode", "ms", "floor_ms", "error", "valid", "note")
            ),
            flush=True,
        )

    def _values(self, form: Form, mode: str, leaves: Sequence[Tensor]) -> dict[str, Any]:
        """The measured values of a form: time and memory, and the error of its output."""
        if mode == "decode":
            from triton.testing import do_bench_cudagraph

            with torch.no_grad():
                return {"ms": f"{do_bench_cudagraph(form.run, rep=30, return_mode='median'):.4f}"}
        values = time_run(form.run, leaves)  # before the error: the first call of all compiles
        if "note" in values:
            values["note"] = "; ".join(filter(None, (form.note, values["note"])))
        if form.error is not None:
            with torch.no_grad():
                error = form.error(form.run())
            values |= {"error": f"{error:.1e}", "valid": str(error < TOLERANCE)}
        return values


def _text(shape: Shape) -> str:
    """The text of a shape, as rows have it."""
    b, t, h, n, d, f = shape
    return f"B{b} T{t} H{h}/{n} D{d} F{f}"


def _key(row: dict[str, Any]) -> str:
    return " ".join(str(row[c]) for c in ("op", "provider", "shape", "mode"))


RECORD = (16, 2048, 32, 32, 128, 64)  # Lizard Figure 6
SMALL, LARGE = (8, 2048, 9, 3, 64, 64), (8, 2048, 32, 8, 128, 64)  # SmolLM2-135M, Llama-3-8B
STEPS = ((8, 1024, 9, 3, 64, 64), (4, 1024, 32, 8, 128, 128))  # a transfer step of each


def suite(bench: Bench) -> None:
    """Every operation and shape: the shape of record with its peers, hybrids against the length, decoding,
    and what is left."""
    bare = partial(forms.linear, peers=False, chunked=False)
    bench.time("softmax attention", RECORD, forms.softmax, (FORWARD, BOTH))
    bench.time("linear_attention", RECORD, forms.linear, EVERY)
    bench.time("linear_attention gate", RECORD, partial(forms.linear, gate=True), EVERY)
    for size, meta in ((64, 0), (128, 0), (128, 4)):
        name = f"sliding_window_attention w={size}" + (f" meta={meta}" if meta else "")
        bench.time(name, RECORD, partial(forms.window, size=size, meta=meta), (FORWARD, BOTH))
    bench.time("hybrid_attention w=64", RECORD, forms.hybrid, EVERY)
    bench.time("lizard hybrid", RECORD, forms.lizard, (FORWARD, BOTH))
    # Lizard Figure 6 at other lengths; Hedgehog Figure 6
    for batch, heads, d in ((16, 32, 128), (1, 12, 64)):
        for t in (512, 1024, 2048, 4096, 8192, 16384, 32768):
            shape = (batch, t, heads, heads, d, 64)
            modes = (FORWARD, BOTH) if batch * t <= 16 * 16384 else (FORWARD,)
            if shape != RECORD:
                bench.time("softmax attention", shape, forms.softmax, modes)
                bench.time("linear_attention", shape, bare, modes)
                bench.time(
                    "hybrid_attention w=64", shape, partial(forms.hybrid, peers=False, chunked=False), modes
                )
                bench.time("lizard hybrid", shape, partial(forms.lizard, peers=False), modes)
            if batch == 1:
                bench.time("taylor map", shape, forms.taylor)
    for batch in (1, 16, 256):
        for groups in (32, 8):
            shape = (batch, 1, 32, groups, 128, 64)
            for op in forms.decoded(shape):
                bench.time(f"decode_step {op}", shape, partial(forms.decoding, op), ("decode",))
    bench.time("gated_linear_attention", SMALL, partial(forms.gated, peers=False), EVERY)
    for shape in STEPS:
        bench.time("attention_cross_entropy", shape, forms.cross_entropy, (FORWARD, TRANSFER))
        bench.time("rotary", shape, forms.rotated, (FORWARD, BOTH))
    bench.time(
        "token_cross_entropy V=49152", STEPS[0], partial(forms.tokens, vocabulary=49152), (FORWARD, BOTH)
    )
    for shape in (SMALL, LARGE):
        bench.time("softmax attention", shape, forms.softmax, (FORWARD, BOTH))
        bench.time("linear_attention", shape, bare, EVERY)
        bench.time(
            "hybrid_attention w=64", shape, partial(forms.hybrid, peers=False, chunked=False), (FORWARD, BOTH)
        )
    bench.time("gated delta rule (GDN)", RECORD, forms.delta_rule, (FORWARD, BOTH))
    bench.time("Kimi delta attention (KDA)", RECORD, forms.kimi_delta, (FORWARD, BOTH))
    # last: its peer's backward is tuned for minutes
    bench.time("gated_linear_attention", RECORD, forms.gated, EVERY)


def main(
    out: Annotated[Path, typer.Option(help="folder of bench.csv")] = Path("results/kernels"),
    seconds: Annotated[float, typer.Option(help="rows that would start later are marked not run")] = 3000,
    only: Annotated[
        str, typer.Option(help="measure the operations and shapes that match this regular expression")
    ] = "",
    missing: Annotated[
        bool, typer.Option("--missing", help="measure the rows that bench.csv lacks or marks not run")
    ] = False,
) -> None:
    """Measure, and write rows and ratios. `snakemake lizard_figure6 hedgehog_figure6` draws them."""
    try:
        re.compile(only)
    except re.error as problem:
        raise UserError(f"--only must be a regular expression; got {only!r}: {problem}") from None
    if not torch.cuda.is_available():
        raise UserError("the benchmark of the kernels needs a CUDA GPU; have none")
    campaign, speed = Campaign(out / "bench.csv", COLUMNS, anew=not (only or missing)), copied_per_second()
    about = session("python -m relinear.benchmarks.kernels") | {
        "gpu": torch.cuda.get_device_name(),
        "bandwidth_bytes_per_s": speed,
        "only": only,
        "missing": missing,
        "seconds": seconds,
    }
    with suppress(metadata.PackageNotFoundError):
        about["versions"]["fla-core"] = metadata.version("fla-core")
    earlier = campaign.about.get("runs", [])
    if others := {run["gpu"] for run in earlier} - {about["gpu"]}:
        raise UserError(
            f"{campaign.path} has rows of another GPU: got {about['gpu']}, expected {', '.join(others)};"
            " possible: another --out"
        )
    campaign.describe(
        command=about["command"],
        dtype="bfloat16",
        tolerance=TOLERANCE,
        bandwidth_bytes_per_s=speed,
        runs=[*earlier, about],
        timing="median of a CUDA graph's replays, L2 cache cleared between them (triton.testing.do_bench)",
    )
    mark = (about["commit"] or "")[:7] + "+" * bool(about["dirty"])
    suite(Bench(campaign, seconds, only=only, missing=missing, speed=speed, commit=mark))
    write_text(out / "ratios.md", ratios(read(out / "bench.csv")))


if __name__ == "__main__":
    command.run(main)
