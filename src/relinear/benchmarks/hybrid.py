"""A hybrid layer in one launch and in three, by tilings, beside softmax attention: `python -m
relinear.benchmarks.hybrid --out results/hybrid`, on one GPU.

Every line of `GROUPS` is a process of its own, so that a tiling that does not compile, or ends the GPU's
context, costs its own rows only. Rows are in hybrid.json after each measurement. Times are those of
`relinear.benchmarks.kernels`: medians of replays of a CUDA graph, in bfloat16.
"""

import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from relinear.benchmarks import command
from relinear.benchmarks import kernel_forms as forms
from relinear.benchmarks.kernel_forms import Form, Forms, Shape
from relinear.benchmarks.kernels import BOTH, FAILURES, FORWARD, RECORD, TOLERANCE, time_run
from relinear.errors import UserError
from relinear.files import write_json
from relinear_kernels.gated_delta import gated_delta

COLUMNS = ("group", "op", "provider", "shape", "mode", "ms", "gib", "first_call_s", "error", "note")
SINGLE = tuple((1, length, 32, 32, 128, 64) for length in (2048, 4096, 8192))
CHECK = (2, 300, 4, 2, 128, 64)  # where gradients of both paths are held against each other
# Each: warps, stages, columns of v in a tile of the state, registers of a thread (0: as many as it takes).
TILINGS = {
    "4 warps, columns of 64": (4, 1, 64, 0),
    "4 warps, columns of 128": (4, 1, 128, 0),
    "4 warps, columns of 64, 168 registers": (4, 1, 64, 168),
    "8 warps, columns of 128": (8, 1, 128, 0),
    "8 warps, columns of 64, 128 registers": (8, 1, 64, 128),
}
SOFTMAX, THREE, DELTA = "softmax attention", "three launches", "gated delta rule"
GROUPS = (*list(TILINGS)[:1], SOFTMAX, THREE, *list(TILINGS)[1:2], DELTA, *list(TILINGS)[2:])


def use(group: str) -> None:
    """Make the hybrid of this process by the tiling of a group, or by three launches."""
    from relinear_kernels import hybrid_attention_triton, hybrid_layer_triton

    hybrid_attention_triton.ONE_LAUNCH = group != THREE
    if group in TILINGS:
        warps, stages, columns, registers = TILINGS[group]
        shipped = hybrid_layer_triton.tiling
        hybrid_layer_triton.tiling = lambda dim, dtype: (
            shipped(dim, dtype)
            if dtype == torch.float32
            else hybrid_layer_triton.Tiling(warps, stages, min(columns, dim), registers or None)
        )


def delta(shape: Shape) -> Forms:
    """The gated delta rule with a decay a state, ours and fla's."""
    ours = {"g": "log_decay", "beta": "erase"}
    theirs = forms.delta_rule(shape)
    given = next(iter(theirs.values())).run.keywords
    args = {ours.get(name, name): x for name, x in given.items()}
    leaves = list(args.values())
    args["write"] = args["erase"]
    return {forms.OURS: Form(partial(gated_delta, **args), leaves)} | theirs


def gradient_difference() -> str:
    """The largest relative difference of any gradient of the layer in one launch to that in three."""
    from relinear_kernels import hybrid_attention_triton

    form, found = forms.hybrid(CHECK, peers=False, chunked=False)[forms.OURS], []
    for x in form.leaves:
        x.requires_grad_()
    for way in (False, True):
        hybrid_attention_triton.ONE_LAUNCH = way
        out = form.run()
        found.append(torch.autograd.grad(out, form.leaves, torch.ones_like(out) + out.detach()))
    pairs = [forms.relative(new, old) for old, new in zip(*found, strict=True)]
    return f"{max(pairs):.1e}"


def measure(group: str, out: Path, until: float) -> None:
    """Measure the rows of a group and append each to hybrid.json."""
    path = out / "hybrid.json"

    def add(op: str, provider: str, shape: Shape, mode: str, values: dict[str, Any]) -> None:
        rows = json.loads(path.read_text()) if path.exists() else []
        text = "B{} T{} H{}/{} D{} F{}".format(*shape)
        row = dict.fromkeys(COLUMNS, "") | {
            "group": group,
            "op": op,
            "provider": provider,
            "shape": text,
            "mode": mode,
            **values,
        }
        write_json(path, [*rows, row])
        print("  ".join(str(x) for x in row.values()), flush=True)

    op, make = "hybrid_attention w=64", partial(forms.hybrid, peers=False, chunked=False)
    shapes: tuple[Shape, ...] = (RECORD, *SINGLE)
    if group == DELTA:
        op, make, shapes = DELTA, delta, (RECORD,)
    elif group == SOFTMAX:
        op, make = SOFTMAX, forms.softmax
    else:
        use(group)
        if group in TILINGS:
            try:
                add(op, forms.OURS, CHECK, "gradients", {"error": gradient_difference()})
            except FAILURES as problem:
                add(op, forms.OURS, CHECK, "gradients", {"note": reason(problem)})
            use(group)
    for shape in shapes:
        for provider, form in make(shape).items():
            for mode, leaves in ((FORWARD, ()), (BOTH, form.leaves)):
                if time.time() > until:
                    add(op, provider, shape, mode, {"note": "not run: time limit"})
                    continue
                try:
                    values = time_run(form.run, leaves, 25)
                    if form.error is not None and not leaves:
                        with torch.no_grad():
                            error = form.error(form.run())
                        values |= {"error": f"{error:.1e}"} | ({} if error < TOLERANCE else {"note": "WRONG"})
                except FAILURES as problem:
                    values = {"note": reason(problem)}
                add(op, provider, shape, mode, values)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def reason(problem: BaseException) -> str:
    """What a failed row says."""
    return f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0][:160]}"


def table(rows: list[dict[str, Any]]) -> str:
    """The rows, one a line, with the time of softmax attention over theirs."""
    timed = [row for row in rows if row["op"] == SOFTMAX and row["ms"]]
    softmax = {(row["shape"], row["mode"]): float(row["ms"]) for row in timed}
    lines = [f"{'group':40}{'provider':28}{'shape':28}{'mode':18}{'ms':>9}{'of softmax':>11}  error  note"]
    for row in rows:
        full = softmax.get((row["shape"], row["mode"]))
        ratio = f"{float(row['ms']) / full:.2f}" if full and row["ms"] else ""
        lines.append(
            f"{row['group']:40}{row['provider']:28}{row['shape']:28}{row['mode']:18}{row['ms']:>9}{ratio:>11}"
            f"  {row['error']}  {row['note']}"
        )
    return "\n".join(lines)


def main(
    out: Annotated[Path, typer.Option(help="folder of hybrid.json")] = Path("results/hybrid"),
    seconds: Annotated[float, typer.Option(help="no row starts later")] = 140,
    group: Annotated[str, typer.Option(help="measure this group alone, in this process")] = "",
    until: Annotated[float, typer.Option(help="with --group: the time of day at which no row starts")] = 0,
) -> None:
    """Measure every group in a process of its own, and print a table."""
    if group:
        if group not in GROUPS:
            raise UserError(f"no group {group!r}; possible: {', '.join(GROUPS)}")
        measure(group, out, until or time.time() + seconds)
        return
    if not torch.cuda.is_available():
        raise UserError("the benchmark of the hybrid needs a CUDA GPU; have none")
    path, until = out / "hybrid.json", time.time() + seconds
    path.unlink(missing_ok=True)
    for each in GROUPS:
        left = until - time.time()
        if left <= 0:
            print(f"{each}: not run: time limit", flush=True)
            continue
        words = ["--out", str(out), "--group", each, "--until", str(until)]
        try:
            run = subprocess.run(
                [sys.executable, "-m", "relinear.benchmarks.hybrid", *words], check=False, timeout=left + 10
            )
            if run.returncode:
                print(f"{each}: ended with {run.returncode}", flush=True)
        except subprocess.TimeoutExpired:
            print(f"{each}: ended by the time limit", flush=True)
    print(table(json.loads(path.read_text()) if path.exists() else []))


if __name__ == "__main__":
    command.run(main)
