"""Compile the shipped kernels for Hopper without a GPU and report their registers and spills: `python -m
relinear_kernels.aot [--all]`.

The ops run on CPU tensors against a driver that compiles for sm_90 and launches nothing, so what is compiled
is what a GPU would be given: same arguments, same tile sizes. Needs a process of its own (the driver is
replaced) and no TRITON_INTERPRET.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SHARED_LIMIT = 227 * 1024
# kernels without a product
SCALAR = (
    "totals",
    "running_sums",
    "scales",
    "gate_gradients",
    "later",
    "scan",
    "numerators",
    "turn",
    "token_loss",
    "token_gradient",
    "scaled_sum",
    "scaled_sum_gradients",
)
# the form of a gated kernel for segments of hard gates: products of 16 rows, correct, not fast
HARD = " hard"
# products of channels that each have a decay: a column at a time, without a product of tiles
BY_COLUMNS = " by columns"


class _CompileOnly:
    """A stand-in for Triton's driver, with what compiling asks of it."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and bytes spilled to local memory of a compiled kernel, by the cuobjdump that comes with
    triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    stack, registers = (int(re.search(rf"{n}:(\d+)", text).group(1)) for n in ("STACK", "REG"))
    return {"registers": registers, "spilled": stack}


def record(case: str, run) -> list[dict]:
    """Run an op and return one row per kernel it would have launched."""
    from triton.runtime.jit import JITFunction

    rows, launch = [], JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        row = {"case": case, "kernel": self.fn.__name__.lstrip("_"), "warps": kernel.metadata.num_warps}
        row |= {
            "shared": kernel.metadata.shared,
            **resources(kernel.asm["cubin"]),
            "wgmma": kernel.asm["ptx"].count("wgmma.mma_async"),
        }
        row["mma"] = kernel.asm["ptx"].count("mma.sync")
        if kwargs.get("CHANNEL") == 2:  # FINE
            row["kernel"] += HARD
        if kwargs.get("KIND") == 2 and row["kernel"] == "pairs":
            row["kernel"] += BY_COLUMNS
        rows.append(row)
        return kernel

    JITFunction.run = compile_only
    try:
        run()
    finally:
        JITFunction.run = launch
    return rows


def fits(row: dict, spills: int = 0) -> bool:
    """Whether a kernel keeps to the shared memory and the bytes of spills allowed, and forms its products on
    tensor cores."""
    hard = row["kernel"].endswith(HARD)
    scalar = (
        row["kernel"] in SCALAR
        or row["kernel"].endswith(BY_COLUMNS)
        or "decode" in row["case"]
        or "float32" in row["case"]
    )
    small = hard or row["case"].startswith("delta")  # 16 or 32 rows, too few for wgmma
    return (
        row["shared"] <= SHARED_LIMIT
        and (row["spilled"] <= spills or hard)
        and bool(row["wgmma"] or scalar or small and row["mma"])
    )


def _tensors(heads, groups, dim, features, dtype, length=128, batch=1):
    r = lambda *s: torch.zeros(*s, dtype=dtype, requires_grad=True)  # noqa: E731
    args = {
        "q": r(batch, length, heads, dim),
        "k": r(batch, length, groups, dim),
        "v": r(batch, length, groups, dim),
    }
    return args, {"w_q": r(heads, dim, features), "w_k": r(heads, dim, features)}


def _linear(feature, dim, features, gate, dtype=torch.bfloat16, segments=1):
    from relinear_kernels.linear_attention_triton import SEGMENT, linear_attention

    length = 128 if segments == 1 else segments * SEGMENT
    args, matrices = _tensors(2, 1, dim, features, dtype, length)
    if feature != "none":
        args |= matrices
    if gate:
        args["log_decay"] = torch.zeros(1, length, 2, requires_grad=True)
    linear_attention(**args, feature=feature).float().sum().backward()


def _window(dim, window, meta, dtype=torch.bfloat16):
    from relinear_kernels.sliding_window_attention_triton import sliding_window_attention

    args, _ = _tensors(2, 1, dim, 64, dtype)
    sliding_window_attention(**args, window=window, meta=meta, empty_state=None).float().sum().backward()


def _hybrid(dim, features, dtype=torch.bfloat16):
    from relinear_kernels.hybrid_attention_triton import hybrid_attention

    args, matrices = _tensors(2, 1, dim, features, dtype)
    gamma = torch.ones(2, requires_grad=True)
    hybrid_attention(
        **args, **matrices, window=64, window_factor=gamma, empty_ring=None
    ).float().sum().backward()


def _cross_entropy(dim, features, dtype=torch.bfloat16, log=False):
    from relinear_kernels.attention_cross_entropy_triton import attention_cross_entropy

    args, _ = _tensors(2, 1, dim, features, dtype)
    phi = [torch.zeros(1, 128, 2, features, requires_grad=True) for _ in range(2)]
    attention_cross_entropy(
        args["q"], args["k"], *phi, log, scale=1.0, window=None, key_mask=None
    ).sum().backward()


def _rotary(dim):
    from relinear_kernels.rotary_triton import rotary

    args, _ = _tensors(2, 1, dim, 16, torch.bfloat16)
    q, k = rotary(args["q"], args["k"], *(torch.zeros(1, 128, dim, dtype=torch.bfloat16) for _ in range(2)))
    (q.float().sum() + k.float().sum()).backward()


def _scaled_sum(dim):
    from relinear_kernels.scaled_sum_triton import scaled_sum

    x, y = (torch.zeros(1, 128, 2, dim, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    scaled_sum(x, y, torch.ones(2, requires_grad=True)).float().sum().backward()


def _token_cross_entropy(vocabulary):
    from relinear_kernels.token_cross_entropy_triton import token_cross_entropy

    logits = torch.zeros(2, vocabulary, dtype=torch.bfloat16, requires_grad=True)
    token_cross_entropy(logits, torch.zeros(2, dtype=torch.int64)).sum().backward()


def _gated(feature, dim, features, dtype=torch.bfloat16):
    from relinear_kernels.gated_linear_attention_triton import gated_linear_attention

    args, matrices = _tensors(2, 1, dim, features, dtype)
    if feature != "none":
        args |= matrices
    gate = torch.zeros(1, 128, 2, features, dtype=dtype, requires_grad=True)
    gated_linear_attention(**args, log_gate=gate, feature=feature).float().sum().backward()


def _delta(dim, decay, dtype=torch.bfloat16, erase=True):
    from relinear_kernels.gated_delta_triton import gated_delta

    args, _ = _tensors(2, 1, dim, 16, dtype)
    one = lambda *n: torch.zeros(1, 128, 1, *n, requires_grad=True)  # noqa: E731
    args["log_decay"] = one(dim) if decay == "channel" else one()
    args |= {"erase": one(), "write": one()} if erase else {}
    gated_delta(**args).float().sum().backward()


def _decode(op, dim, features, states=4, batch=1, **options):
    from relinear_kernels import decode_step_triton
    from relinear_kernels.hybrid_attention_reference import hybrid_state
    from relinear_kernels.linear_attention_reference import linear_state
    from relinear_kernels.sliding_window_attention_reference import window_state

    args, matrices = _tensors(4, 1, dim, features, torch.bfloat16, 1, batch)
    matrices["w_k"] = matrices["w_k"][:states]
    if op == "linear":
        decode_step_triton.linear_step(
            **args, **matrices, state=linear_state(batch, states, 2 * features, dim), **options
        )
    elif op == "window":
        decode_step_triton.window_step(
            **args, state=window_state(batch, 127, 1, dim, meta=4, dtype=torch.bfloat16), window=128, meta=4
        )
    else:
        state = hybrid_state(batch, states, 1, dim, 2 * features, window=64, dtype=torch.bfloat16)
        decode_step_triton.hybrid_step(
            **args, **matrices, state=state, window=64, window_factor=torch.ones(4)
        )


# The shapes of the papers' teachers: Llama-3-8B and Mistral-7B (D 128), SmolLM2 (D 64); the rest of what is
# shipped with --all.
CASES = {
    "linear softmax_pm D128 F64": lambda: _linear("softmax_pm", 128, 64, False),
    "linear softmax_pm D64 F32": lambda: _linear("softmax_pm", 64, 32, False),
    "gated softmax_pm D64 F64": lambda: _gated("softmax_pm", 64, 64),
    "decode linear D128 F64": lambda: _decode("linear", 128, 64),
    "decode window D128": lambda: _decode("window", 128, 64),
    "decode hybrid D128 F64": lambda: _decode("hybrid", 128, 64),
    "window D128 meta 4": lambda: _window(128, 128, 4),
    "cross_entropy D64 F128": lambda: _cross_entropy(64, 128),
    "delta D64 decay": lambda: _delta(64, "state"),
    "delta D64 channel decay": lambda: _delta(64, "channel"),
    "rotary D64": lambda: _rotary(64),
    "scaled_sum D128": lambda: _scaled_sum(128),
    "token_cross_entropy V49152": lambda: _token_cross_entropy(49152),
}
MORE = {
    "linear softmax_pm D128 F64 gate": lambda: _linear("softmax_pm", 128, 64, True),
    "linear softmax_pm D64 F64 gate": lambda: _linear("softmax_pm", 64, 64, True),
    "linear softmax_pm D128 F64 segments": lambda: _linear("softmax_pm", 128, 64, False, segments=2),
    "linear softmax_pm D64 F64 gate segments": lambda: _linear("softmax_pm", 64, 64, True, segments=2),
    "linear exp_pm D64 F64": lambda: _linear("exp_pm", 64, 64, False),
    "linear softmax_pm D128 F128": lambda: _linear("softmax_pm", 128, 128, False),
    "linear relu D128 F128": lambda: _linear("relu", 128, 128, False),
    "linear none D128 gate": lambda: _linear("none", 128, 128, True),
    "gated softmax_pm D128 F64": lambda: _gated("softmax_pm", 128, 64),
    "gated softmax_pm D128 F128": lambda: _gated("softmax_pm", 128, 128),
    "gated none D128 F128": lambda: _gated("none", 128, 128),
    "gated softmax_pm D128 F64 float32": lambda: _gated("softmax_pm", 128, 64, torch.float32),
    "decode linear D128 F64 channel gate": lambda: _decode(
        "linear", 128, 64, log_gate=torch.zeros(1, 1, 4, 64)
    ),
    "decode linear D128 F64 shared": lambda: _decode("linear", 128, 64, states=1),
    "decode hybrid D128 F64 shared": lambda: _decode("hybrid", 128, 64, states=1),
    "decode linear D128 F64 many": lambda: _decode("linear", 128, 64, batch=128),
    "decode linear D128 F128 many": lambda: _decode("linear", 128, 128, batch=128),
    "decode linear D128 F128 shared many": lambda: _decode("linear", 128, 128, states=1, batch=128),
    "decode hybrid D128 F64 many": lambda: _decode("hybrid", 128, 64, batch=128),
    "decode linear D64 F64": lambda: _decode("linear", 64, 64),
    "decode window D64": lambda: _decode("window", 64, 64),
    "decode hybrid D64 F64": lambda: _decode("hybrid", 64, 64),
    "hybrid D128 F64": lambda: _hybrid(128, 64),
    "hybrid D64 F64": lambda: _hybrid(64, 64),
    "hybrid D128 F128": lambda: _hybrid(128, 128),
    "window D128": lambda: _window(128, 64, 0),
    "window D64": lambda: _window(64, 64, 0),
    "window D64 meta 4": lambda: _window(64, 128, 4),
    "delta D128 decay": lambda: _delta(128, "state"),
    "delta D128 channel decay": lambda: _delta(128, "channel"),
    "delta D64 channel decay, no erase": lambda: _delta(64, "channel", erase=False),
    "delta D64 decay float32": lambda: _delta(64, "state", torch.float32),
    "rotary D128": lambda: _rotary(128),
    "token_cross_entropy V128256": lambda: _token_cross_entropy(128256),
    "cross_entropy D64 F64": lambda: _cross_entropy(64, 64),
    "cross_entropy D64 F64 log": lambda: _cross_entropy(64, 64, log=True),
    "cross_entropy D64 F128 log": lambda: _cross_entropy(64, 128, log=True),
    "cross_entropy D128 F256 log": lambda: _cross_entropy(128, 256, log=True),
    "cross_entropy D128 F128": lambda: _cross_entropy(128, 128),
    "cross_entropy D128 F256": lambda: _cross_entropy(128, 256),
    "cross_entropy D128 F256 float32": lambda: _cross_entropy(128, 256, torch.float32),
    "linear softmax_pm D128 F64 float32": lambda: _linear("softmax_pm", 128, 64, True, torch.float32),
}


def main() -> None:
    """Print the table, or its rows as JSON; exit status 1 if a kernel does not fit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--all", action="store_true", help="every shipped configuration, not only the papers' shapes"
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="cases whose name contains one of these"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    from triton.runtime.driver import driver

    driver.set_active(_CompileOnly())
    cases = CASES | MORE if options.all else CASES
    rows = [
        row
        for name, run in cases.items()
        if any(text in name for text in options.only)
        for row in record(name, run)
    ]
    if options.json:
        print(json.dumps(rows))
    else:
        print("\t".join(rows[0]))
        for row in rows:
            print("\t".join(str(x) for x in row.values()))
    bad = [row for row in rows if not fits(row)]
    for row in bad:
        print(f"does not fit: {row}", file=sys.stderr)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
