"""Time the fused ops beside their peers: `python -m relinear_kernels.bench --out results/reference/kernels`.

One run, medians of CUDA-graph replays, bfloat16, features fused on our side and given ready-made to the peers (fla), which favours
them. Every row's output is also held against the chunked torch form in float32 on a slice of the same inputs: a wrong row is
marked invalid. Writes bench.csv (row by row: --missing resumes a run cut short, --only measures a part again),
bench.provenance.json, and from them ratios.md: each op over its floor and beside its fastest peer.
"""

import argparse
import csv
import datetime
import importlib.metadata
import json
import platform
import re
import sys
import time
from functools import partial
from pathlib import Path

import torch

from relinear_kernels import (
    attention_cross_entropy_reference,
    gated_linear_attention_reference,
    hybrid_attention_reference,
    linear_attention_reference,
    rotary_reference,
    sliding_window_attention_reference,
    token_cross_entropy_reference,
)
from relinear_kernels.attention_cross_entropy import attention_cross_entropy
from relinear_kernels.decode_step import decode_step
from relinear_kernels.features import ACTIVATIONS
from relinear_kernels.gated_linear_attention import gated_linear_attention
from relinear_kernels.hybrid_attention import hybrid_attention
from relinear_kernels.hybrid_attention_reference import hybrid_state
from relinear_kernels.linear_attention import linear_attention
from relinear_kernels.linear_attention_reference import linear_state
from relinear_kernels.rotary import rotary
from relinear_kernels.scaled_sum import scaled_sum
from relinear_kernels.sliding_window_attention import sliding_window_attention
from relinear_kernels.sliding_window_attention_reference import window_state
from relinear_kernels.token_cross_entropy import token_cross_entropy

BANDWIDTH = 4.27e12  # bytes/s, device-to-device copy measured on an H200 (read plus written)
COLUMNS = ("op", "provider", "shape", "B", "T", "H", "Hkv", "D", "F", "mode", "ms", "floor_ms", "gib", "first_call_s", "error", "valid", "note")
TOLERANCE = 2e-2


def inputs(b, t, h, n, d, f, gate=False):
    """Random q, k, v, matrices and, if asked, gates on the GPU."""
    g = torch.Generator("cuda").manual_seed(b * t + h)
    r = lambda *s: torch.randn(*s, device="cuda", generator=g, dtype=torch.bfloat16)  # noqa: E731
    args = {"q": r(b, t, h, d), "k": r(b, t, n, d), "v": r(b, t, n, d), "w_q": r(h, d, f) / d**0.5, "w_k": r(h, d, f) / d**0.5}
    if gate:
        args["log_decay"] = torch.nn.functional.logsigmoid(torch.randn(b, t, h, device="cuda", generator=g) + 3)
    return args


def phi(x, w):
    """Hedgehog features of `[B, T, H, D]`, as a peer would be given them."""
    return ACTIVATIONS["softmax_pm"](torch.einsum("bthd,hdf->bthf", x.float(), w.float())).to(x.dtype)


def fewest_bytes(b, t, h, n, d, mode):
    """Of an attention: inputs once, outputs once."""
    q, k = b * t * h * d * 2, b * t * n * d * 2
    forward = 2 * q + 2 * k
    return forward if mode == "forward" else forward + 3 * q + 2 * k + q + 2 * k


def measure(run, arguments, mode, milliseconds=60):
    """Median ms, whether of a CUDA graph, GiB at the peak above what was held, and seconds of the first call. `arguments` get gradients."""
    from triton.testing import do_bench

    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    backward = mode != "forward"
    for x in arguments if backward else []:
        x.requires_grad_()
    try:
        began = time.perf_counter()
        with torch.set_grad_enabled(backward):
            probes = [torch.randn_like(x) for x in several(run())] if backward else []

        def step():
            with torch.set_grad_enabled(backward):
                outputs = several(run())
            return torch.autograd.grad(outputs, arguments, probes) if backward else outputs

        step()
        torch.cuda.synchronize()
        first = time.perf_counter() - began
        peak = torch.cuda.max_memory_allocated() - held
        replay = replayed(step)
        return do_bench(replay or step, warmup=15, rep=milliseconds, return_mode="median"), replay is not None, peak / 2**30, first
    finally:
        for x in arguments if backward else []:
            x.requires_grad_(False)


def replayed(step):
    """`step` as a CUDA graph, which no launch holds up, as training and decoding have it; None where it cannot be recorded."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError:
        return None
    return graph.replay


def several(outputs):
    """The outputs of an op that may have one."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


def first_output(op, **arguments):
    """The first output of an op that has several."""
    return op(**arguments)[0]


def relative(got, want):
    """Relative RMS error."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


class Bench:
    """The rows of bench.csv, written as each is measured, and the time left for them.

    `only` selects the rows whose op, provider, shape and mode, joined by spaces, have this pattern; `missing` those the file does not have
    yet. The file's other rows stay.
    """

    def __init__(self, path: Path, seconds: float, only: str = "", missing: bool = False):
        self.path, self.until, self.only, self.missing, self.rows = path, time.monotonic() + seconds, only, missing, {}
        if path.exists() and (only or missing):
            with open(path) as file:
                self.rows = {_key(row): row for row in csv.DictReader(file)}

    def row(self, op, provider, shape, mode, run, arguments, error=None, note="", moved=None):
        """Time `run` (with the gradients of `arguments`, unless forward only), then its `error(run)`; `moved`: its bytes, if no attention's."""

        launched = "; ".join(filter(None, (note, "launched, not replayed")))

        def measured():
            ms, graph, gib, first = measure(run, arguments, mode)  # the first call of all, so that it compiles
            err = error(run) if error is not None else None
            row = {"ms": f"{ms:.4f}", "gib": f"{gib:.3f}", "first_call_s": f"{first:.1f}"} | ({} if graph else {"note": launched})
            return row | ({} if err is None else {"error": f"{err:.1e}", "valid": str(err < TOLERANCE)})

        self._add(op, provider, shape, mode, fewest_bytes(*shape[:5], mode) if moved is None else moved, note, measured)

    def decode(self, op, provider, shape, moved, run):
        """Time one token; `moved` are the bytes of state it must read and write."""
        from triton.testing import do_bench_cudagraph

        def measured():
            with torch.no_grad():
                return {"ms": f"{do_bench_cudagraph(run, rep=30, return_mode='median'):.4f}"}

        self._add(op, provider, shape, "decode", moved, "CUDA graph", measured)

    def _add(self, op, provider, shape, mode, moved, note, measured):
        """Measure, if selected, and write; a failure is a row that says why. The floor is `moved` bytes over the measured bandwidth."""
        b, t, h, n, d, f = shape
        row = dict.fromkeys(COLUMNS, "") | {"op": op, "provider": provider, "B": b, "T": t, "H": h, "Hkv": n, "D": d, "F": f, "mode": mode}
        row |= {"shape": f"B{b} T{t} H{h}/{n} D{d} F{f}", "note": note, "floor_ms": f"{moved / BANDWIDTH * 1e3:.4f}"}
        old = self.rows.get(_key(row))
        if not re.search(self.only, _key(row)) or (self.missing and old and old["valid"] != "not run"):
            return
        if time.monotonic() > self.until:
            row |= {"valid": "not run", "note": "time limit"}
        else:
            try:
                row |= measured()
            except (RuntimeError, ValueError, TypeError, NotImplementedError, ImportError) as problem:
                row |= {"valid": "failed", "note": f"{type(problem).__name__}: {str(problem).splitlines()[0][:120]}"}
                torch.cuda.empty_cache()
        self.rows[_key(row)] = row
        with open(self.path, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows.values())
        print("  ".join(str(row[c]) for c in ("op", "provider", "shape", "mode", "ms", "floor_ms", "error", "valid", "note")), flush=True)


def _key(row):
    return " ".join(str(row[c]) for c in ("op", "provider", "shape", "mode"))


def piece(args):
    """The first sequence, the first key head and its query heads, up to 2048 positions: what errors are measured on."""
    group = args["q"].shape[2] // args["k"].shape[2]
    cut = {n: args[n][:1, :2048, : group if n == "q" else 1] for n in "qkv"}
    cut |= {n: args[n][:group] for n in ("w_q", "w_k") if n in args}
    return cut | {n: args[n][:1, :2048, :group] for n in ("log_decay", "log_gate") if n in args}


def slice_error(run, args, definition):
    """Error of a full-size output on its first sequence and head group."""
    cut = piece(args)
    with torch.no_grad():
        got = run()[:1, :2048, : cut["q"].shape[2]]
        return relative(got, definition({n: x.float() for n, x in cut.items()}))


def linear(bench, shape, modes, gate=False, peers=True, chunked=True):
    """Time linear attention, with a decay a head if `gate`, beside its chunked torch form and fla's ops."""
    b, t, h, n, d, f = shape
    args = inputs(*shape, gate)
    name = "linear_attention gate" if gate else "linear_attention"
    ours = lambda: linear_attention(**args)  # noqa: E731
    definition = lambda a: linear_attention_reference.linear_attention(**a)  # noqa: E731
    for mode in modes:
        wanted = [args["w_q"], args["w_k"]] if mode == "stage 1" else list(args.values())
        bench.row(name, "relinear", shape, mode, ours, wanted, lambda run: slice_error(run, args, definition))
    if chunked and t <= 2048:
        for mode in modes:
            wanted = [args["w_q"], args["w_k"]] if mode == "stage 1" else list(args.values())
            bench.row(name, "torch chunked", shape, mode, lambda: linear_attention_reference.linear_attention(**args), wanted)
    if not peers:
        return
    try:
        from fla.ops.linear_attn import chunk_linear_attn
        from fla.ops.simple_gla import chunk_simple_gla, fused_chunk_simple_gla
    except ImportError as problem:
        bench.row(name, "fla", shape, "forward", None, [], note=str(problem))
        return
    grown = lambda x: x.repeat_interleave(h // n, 2)  # noqa: E731
    given = {"q": phi(args["q"], args["w_q"]), "k": phi(grown(args["k"]), args["w_k"]), "v": grown(args["v"]).contiguous()}
    if gate:  # the backward of chunk_simple_gla refuses Triton 3.4 to 3.7.0 on Hopper
        given |= {"g": args["log_decay"]}
        peers = {"chunk_simple_gla (unnormalised)": chunk_simple_gla, "fused_chunk_simple_gla (unnormalised)": fused_chunk_simple_gla}
    else:
        peers = {"chunk_linear_attn": partial(chunk_linear_attn, normalize=True)}
    peer_of = lambda a: linear_attention_reference.linear_attention(**a, normalize=not gate)  # noqa: E731
    error = lambda run: slice_error(run, args, peer_of)  # noqa: E731
    for provider, op in peers.items():
        for mode in modes:
            if mode != "stage 1":
                bench.row(
                    name, f"fla {provider}", shape, mode, partial(first_output, op, **given, scale=1.0), list(given.values()), error, "features given"
                )


def window(bench, shape, w, meta, modes):
    """Time attention to `w` positions and `meta` first ones beside FlexAttention and, without these, FlashAttention."""
    b, t, h, n, d, f = shape
    args = {x: y for x, y in inputs(*shape).items() if x in "qkv"}
    name = f"sliding_window_attention w={w}" + (f" meta={meta}" if meta else "")
    ours = lambda: sliding_window_attention(**args, window=w, meta=meta)  # noqa: E731
    definition = lambda a: sliding_window_attention_reference.sliding_window_attention(**a, window=w, meta=meta)  # noqa: E731
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    seen = lambda b, h, q, k: (q >= k) & ((q - k < w) | (k < meta))  # noqa: E731
    mask = create_block_mask(seen, None, None, t, t, device="cuda")
    peer = lambda: compiled(*(x.transpose(1, 2) for x in args.values()), block_mask=mask, enable_gqa=h != n).transpose(1, 2)  # noqa: E731
    ends = torch.arange(b + 1, device="cuda", dtype=torch.int32) * t

    def flash():
        from torch.nn.attention.varlen import varlen_attn

        packed = (x.flatten(0, 1) for x in args.values())
        return varlen_attn(*packed, ends, ends, t, t, window_size=(w - 1, 0)).unflatten(0, (b, t))

    providers = {"relinear": ours, "FlexAttention": peer} | ({} if meta else {"FlashAttention (varlen_attn)": flash})
    error = lambda run: slice_error(run, args, definition)  # noqa: E731
    for mode in modes:
        for provider, run in providers.items():
            bench.row(name, provider, shape, mode, run, list(args.values()), error)


def composed_hybrid(args, gamma, w):
    """The hybrid from parts a user has: FlexAttention's window, fla's linear attention over keys `w` late, and their combination.

    Features given, the window weighed against its logsumexp instead of its maximum (FlexAttention returns no other): a time, not the op.
    """
    from fla.ops.linear_attn import chunk_linear_attn
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    h, n, t = args["q"].shape[2], args["k"].shape[2], args["q"].shape[1]
    grown = lambda x: x.repeat_interleave(h // n, 2)  # noqa: E731
    late = lambda x: torch.nn.functional.pad(x[:, :-w], (0, 0, 0, 0, w, 0))  # noqa: E731
    given = {n: args[n] for n in "qkv"} | {"phi_q": phi(args["q"], args["w_q"]), "phi_k": phi(grown(args["k"]), args["w_k"])}
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < w), None, None, t, t, device="cuda")
    g = gamma[:, None].bfloat16()

    def run():
        q, k, v = (given[n].transpose(1, 2) for n in "qkv")
        near = compiled(q, k, v, block_mask=mask, enable_gqa=h != n).transpose(1, 2)
        keys = late(given["phi_k"])
        far = chunk_linear_attn(given["phi_q"], keys, late(grown(given["v"])), scale=1.0, normalize=False)[0]
        den = (given["phi_q"] * keys.float().cumsum(1)).sum(-1, keepdim=True)
        return ((g * near + far) / (g + den)).to(near.dtype)

    return run, list(given.values())


def hybrid(bench, shape, modes, parts=True):
    """Time the hybrid with a window of 64 beside its chunked torch form and, if `parts`, the same composed of FlexAttention and fla."""
    args = inputs(*shape)
    gamma = torch.full((shape[2],), 0.1, device="cuda")
    ours = lambda: hybrid_attention(**args, window=64, window_factor=gamma)  # noqa: E731
    cut_gamma = gamma[: shape[2] // shape[3]]
    definition = lambda a: hybrid_attention_reference.hybrid_attention(**a, window=64, window_factor=cut_gamma)  # noqa: E731
    chunked = lambda: hybrid_attention_reference.hybrid_attention(**args, window=64, window_factor=gamma)  # noqa: E731
    wanted = lambda mode: [args["w_q"], args["w_k"], gamma] if mode == "stage 1" else [*args.values(), gamma]  # noqa: E731
    for mode in modes:
        bench.row("hybrid_attention w=64", "relinear", shape, mode, ours, wanted(mode), lambda run: slice_error(run, args, definition))
    for mode in modes:
        bench.row("hybrid_attention w=64", "torch chunked", shape, mode, chunked, wanted(mode))
    if not parts:
        return
    try:
        peer, leaves = composed_hybrid(args, gamma, 64)
    except ImportError as problem:
        print(problem)
        return
    for mode in modes:
        if mode != "stage 1":
            bench.row("hybrid_attention w=64", "FlexAttention + fla chunk_linear_attn", shape, mode, peer, leaves, note="features given")


def lizard(bench, shape):
    """The paper's layer: gated branch plus alpha times the window branch (w 128, 4 meta tokens), two groups of launches and a sum."""
    args = inputs(*shape, gate=True)
    alpha = torch.ones(shape[2], device="cuda")

    def run():
        near = sliding_window_attention(**{n: args[n] for n in "qkv"}, window=128, meta=4)
        return scaled_sum(linear_attention(**args), near, alpha)

    bench.row("lizard hybrid", "relinear", shape, "forward", run, [])


def softmax(bench, shape, modes):
    """Time torch's causal softmax attention, to hold the linear ops of the same shape against."""
    args = {n: x for n, x in inputs(*shape).items() if n in "qkv"}
    attend = torch.nn.functional.scaled_dot_product_attention
    run = lambda: attend(*(x.transpose(1, 2) for x in args.values()), is_causal=True, enable_gqa=shape[2] != shape[3]).transpose(1, 2)  # noqa: E731
    for mode in modes:
        bench.row("softmax attention", "SDPA causal", shape, mode, run, list(args.values()))


def cross_entropy(bench, shape, modes):
    """Hedgehog's transfer: what linear attention's weights lack of softmax's, of features of both signs, `2 f` of them. Its peer is quadratic."""
    args = inputs(*shape)
    grown = args["k"].repeat_interleave(shape[2] // shape[3], 2)
    given = {"phi_q": phi(args["q"].float(), args["w_q"]), "phi_k": phi(grown.float(), args["w_k"])}
    teacher = {"q": args["q"], "k": args["k"], "scale": shape[4] ** -0.5}
    ours = lambda: attention_cross_entropy(**teacher, **given)  # noqa: E731
    definition = lambda: attention_cross_entropy_reference.attention_cross_entropy(**teacher, **given)  # noqa: E731
    leaves = list(given.values())
    read, written = sum(x.nbytes for x in (args["q"], args["k"], *leaves)), sum(x.nbytes for x in leaves)
    loss = 4 * args["q"].shape[:3].numel()  # float32; quadratic arithmetic comes on top of all these bytes
    for mode in modes:
        moved = {"moved": read + loss + (0 if mode == "forward" else read + loss + written)}
        bench.row("attention_cross_entropy", "relinear", shape, mode, ours, leaves, lambda run: relative(run(), definition()), **moved)
        bench.row("attention_cross_entropy", "torch quadratic", shape, mode, definition, leaves, note="the definition", **moved)


def rotated(bench, shape, modes):
    """The rotary embedding of q and k, read once and written once; the same backwards. torch's form is that of transformers."""
    args = {n: x for n, x in inputs(*shape).items() if n in "qk"}
    angles = torch.rand(1, shape[1], shape[4], device="cuda")
    given = {"cos": angles.cos().bfloat16(), "sin": angles.sin().bfloat16()}
    moved = 2 * sum(x.nbytes for x in args.values()) + 2 * given["cos"].nbytes
    together = lambda pair: torch.cat(pair, 2)  # noqa: E731
    definition = lambda: together(rotary_reference.rotary(**{n: x.float() for n, x in (args | given).items()}))  # noqa: E731
    error = lambda run: relative(together(run()), definition())  # noqa: E731
    for mode in modes:
        for provider, form in {"relinear": rotary, "torch": rotary_reference.rotary}.items():
            run = partial(form, **args, **given)
            bench.row("rotary", provider, shape, mode, run, list(args.values()), error, moved=moved * (1 if mode == "forward" else 2))


def tokens(bench, shape, vocabulary, modes):
    """The loss of each token of a step, whose model the heads name: its logits read once; backwards read once and their gradient written."""
    count, g = shape[0] * shape[1], torch.Generator("cuda").manual_seed(1)
    logits = torch.randn(count, vocabulary, device="cuda", generator=g, dtype=torch.bfloat16)
    labels = torch.randint(vocabulary, (count,), device="cuda", generator=g)
    error = lambda run: relative(run(), token_cross_entropy_reference.token_cross_entropy(logits.float(), labels))  # noqa: E731
    for mode in modes:
        for provider, form in {"relinear": token_cross_entropy, "torch": token_cross_entropy_reference.token_cross_entropy}.items():
            run, moved = partial(form, logits, labels), logits.nbytes * (1 if mode == "forward" else 3)
            bench.row(f"token_cross_entropy V={vocabulary}", provider, shape, mode, run, [logits], error, moved=moved)


def taylor(bench, shape):
    """Hedgehog's Taylor map (1, x, x x^T / sqrt 2), d^2 + d + 1 features, as ready-made features in the chunked torch form."""
    args = inputs(*shape)

    def features(x):
        x = x.float() / shape[4] ** 0.25
        outer = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2) / 2**0.5
        return torch.cat([torch.ones_like(x[..., :1]), x, outer], -1).bfloat16()

    def run():
        return linear_attention_reference.linear_attention(features(args["q"]), features(args["k"]), args["v"], feature="none")

    bench.row("taylor map", "torch chunked", shape, "forward", run, [])


def gated(bench, shape, modes, peers=True):
    """A gate per channel, shared by both signs. fla's peer is given features and gates in full; its backward tunes for minutes."""
    b, t, h, n, d, f = shape
    args = inputs(*shape)
    g = torch.Generator("cuda").manual_seed(1)
    args["log_gate"] = torch.nn.functional.logsigmoid(torch.randn(b, t, h, f, device="cuda", generator=g) + 3).bfloat16()
    ours = lambda: gated_linear_attention(**args)  # noqa: E731
    definition = lambda a: gated_linear_attention_reference.gated_linear_attention(**a)  # noqa: E731
    for mode in modes:
        wanted = [args["w_q"], args["w_k"]] if mode == "stage 1" else list(args.values())
        bench.row("gated_linear_attention", "relinear", shape, mode, ours, wanted, lambda run: slice_error(run, args, definition))
    if not peers:
        return
    try:
        from fla.ops.gla import chunk_gla
    except ImportError as problem:
        bench.row("gated_linear_attention", "fla", shape, "forward", None, [], note=str(problem))
        return
    grown = lambda x: x.repeat_interleave(h // n, 2)  # noqa: E731
    given = {"q": phi(args["q"], args["w_q"]), "k": phi(grown(args["k"]), args["w_k"]), "v": grown(args["v"]).contiguous()}
    given["g"] = torch.cat([args["log_gate"]] * 2, -1)
    peer_of = lambda a: gated_linear_attention_reference.gated_linear_attention(**a, normalize=False)  # noqa: E731
    error, peer = lambda run: slice_error(run, args, peer_of), partial(first_output, chunk_gla, **given, scale=1.0)  # noqa: E731
    for mode in modes:
        if mode != "stage 1":
            bench.row("gated_linear_attention", "fla chunk_gla (unnormalised)", shape, mode, peer, list(given.values()), error, "features given")


def decode(bench, batch, h, n, d=128, f=64):
    """One token of every op; the floor is its state read once and written once, that of key heads too. fla's is given features."""
    shape, args = (batch, 1, h, n, d, f), inputs(batch, 1, h, n, d, f)
    token, maps = {x: args[x] for x in "qkv"}, {x: args[x] for x in ("w_q", "w_k")}
    linear, hybrid = linear_state(batch, h, 2 * f, d, "cuda"), hybrid_state(batch, h, n, d, 2 * f, window=64, device="cuda")
    window = window_state(batch, 127, n, d, meta=4, device="cuda")
    gate = torch.nn.functional.logsigmoid(torch.randn(batch, 1, h, f, device="cuda") + 3)
    factor = torch.full((h,), 0.1, device="cuda")
    for mask in (window.mask, hybrid.ring.mask):
        mask.fill_(True)
    sums, key = batch * h * 2 * f * (d + 1) * 8, batch * n * d * 8  # bytes of a linear state read and written, of a key and value read
    step = partial(decode_step, **token)
    for op, moved, run in (
        ("linear_attention", sums, partial(step, **maps, state=linear)),
        ("gated_linear_attention", sums, partial(step, **maps, log_gate=gate, state=linear)),
        ("sliding_window_attention w=128 meta=4", 127 * key, partial(step, state=window, window=128, meta=4)),
        ("hybrid_attention w=64", sums + 64 * key, partial(step, **maps, window=64, window_factor=factor, state=hybrid)),
    ):
        bench.decode(f"decode_step {op}", "relinear", shape, moved, run)
    if h != n:
        shared, own = maps | {"w_k": maps["w_k"][:n]}, linear_state(batch, n, 2 * f, d, "cuda")
        near = hybrid._replace(linear=linear_state(batch, n, 2 * f, d, "cuda"))
        for op, moved, run in (
            ("linear_attention", sums * n // h, partial(step, **shared, state=own)),
            ("hybrid_attention w=64", sums * n // h + 64 * key, partial(step, **shared, window=64, window_factor=factor, state=near)),
        ):
            bench.decode(f"decode_step {op}, states of key heads", "relinear", shape, moved, run)
        return
    q, k = phi(args["q"], args["w_q"]), phi(args["k"], args["w_k"])
    old = (torch.zeros(batch, h, 2 * f, d, device="cuda"), torch.ones(batch, 1, h, 2 * f, device="cuda"))

    def peer():
        from fla.ops.linear_attn import fused_recurrent_linear_attn

        return fused_recurrent_linear_attn(q, k, args["v"], scale=1.0, initial_state=old, output_final_state=True, normalize=True)

    bench.decode("decode_step linear_attention", "fla fused_recurrent_linear_attn", shape, sums, peer)


def _earlier(row):
    """A mark for a row that is not of the last run."""
    return "*" if "measured at " in row["note"] else ""


def measured_rows(folder: Path) -> list[dict[str, str]]:
    """The rows of bench.csv with a time, less those whose output was wrong."""
    with open(folder / "bench.csv") as file:
        return [r for r in csv.DictReader(file) if r["ms"] and r["valid"] in ("", "True")]


def ratios(rows) -> str:
    """Markdown: each row of ours over its floor and beside its fastest peer, the torch forms aside."""
    lines = ["| op | shape | mode | ms | over its floor | fastest peer | its ms | ours is faster |", "|---|---|---|---:|---:|---|---:|---:|"]
    for ours in (r for r in rows if r["provider"] == "relinear"):
        same = (r for r in rows if all(r[c] == ours[c] for c in ("op", "shape", "mode")))
        peers = [r for r in same if r["provider"] not in ("relinear", "torch chunked")]
        ms, cells = float(ours["ms"]), ["", "", ""]
        once = "\u2020" if "launched" in ours["note"] else ""
        if peers:
            best = min(peers, key=lambda r: float(r["ms"]))
            cells = [best["provider"] + _earlier(best), f"{float(best['ms']):.4g}", f"{float(best['ms']) / ms:.2f}x"]
        over = f"{ms / float(ours['floor_ms']):.2f}x"
        lines.append(f"| {' | '.join([ours['op'], ours['shape'], ours['mode'], f'{ms:.4g}{once}', over, *cells])} |")
    marks = {"\\*": ("measured at", "measured at an earlier commit"), "\u2020": ("launched", "kernel by kernel: launches cost what they cost there")}
    notes = [f"\n{mark} {meaning}  " for mark, (word, meaning) in marks.items() if any(word in r["note"] for r in rows)]
    return "\n".join([*lines, *notes]) + "\n"


def provenance(path: Path, options: argparse.Namespace) -> None:
    """Add this run to those whose rows the file holds."""
    versions = {}
    for package in ("torch", "triton", "fla-core"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    run = {
        "commit": options.commit, "only": options.only, "missing": options.missing, "seconds": options.seconds,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(), "versions": versions, "note": options.note,
    }  # fmt: skip
    earlier = json.loads(path.read_text())["runs"] if path.exists() and (options.only or options.missing) else []
    record = {
        "command": "python -m relinear_kernels.bench", "runs": [*earlier, run], "dtype": "bfloat16",
        "timing": "median of a CUDA graph's replays, L2 cache cleared between them (triton.testing.do_bench)", "bandwidth_bytes_per_s": BANDWIDTH,
        "tolerance": TOLERANCE,
    }  # fmt: skip
    path.write_text(json.dumps(record, indent=2) + "\n")


def pattern(text: str) -> str:
    """`text`, if it is a regular expression."""
    try:
        re.compile(text)
    except re.error as problem:
        raise argparse.ArgumentTypeError(f"must be a regular expression; got {text!r}: {problem}") from problem
    return text


def main() -> None:
    """Measure and write. `snakemake lizard_figure6 hedgehog_figure6` draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/reference/kernels"))
    parser.add_argument("--seconds", type=float, default=330, help="rows that would start later are marked not run")
    parser.add_argument("--only", type=pattern, default="", help="measure rows whose op, provider, shape and mode have this pattern")
    parser.add_argument("--missing", action="store_true", help="measure the rows that bench.csv does not have yet")
    parser.add_argument("--commit", default="", help="commit of the code measured, for the provenance")
    parser.add_argument("--note", default="", help="what a reader of the provenance should know of this run")
    parser.add_argument("--ratios-only", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.ratios_only:
        (options.out / "ratios.md").write_text(ratios(measured_rows(options.out)))
        return
    if not torch.cuda.is_available():
        sys.exit("the bench needs a CUDA GPU; have none")
    provenance(options.out / "bench.provenance.json", options)
    bench = Bench(options.out / "bench.csv", options.seconds, options.only, options.missing)
    every = ("forward", "forward+backward", "stage 1")
    record = (16, 2048, 32, 32, 128, 64)
    linear(bench, record, every)
    linear(bench, record, every, gate=True)
    for w, meta in ((64, 0), (128, 0), (128, 4)):
        window(bench, record, w, meta, every[:2])
    softmax(bench, record, every[:2])
    hybrid(bench, record, every)
    lizard(bench, record)
    for batch in (1, 16, 256):
        for groups in (32, 8):
            decode(bench, batch, 32, groups)
    gated(bench, (8, 2048, 9, 3, 64, 64), every, peers=False)
    for shape in ((8, 1024, 9, 3, 64, 64), (4, 1024, 32, 8, 128, 128)):  # a transfer step of SmolLM2-135M, of Llama-3-8B
        cross_entropy(bench, shape, ("forward", "stage 1"))
        rotated(bench, shape, every[:2])
    tokens(bench, (8, 1024, 9, 3, 64, 64), 49152, every[:2])  # a finetuning step of SmolLM2-135M
    for shape in ((8, 2048, 9, 3, 64, 64), (8, 2048, 32, 8, 128, 64)):  # SmolLM2-135M, Llama-3-8B
        linear(bench, shape, every, peers=shape[4] == 128, chunked=False)  # a peer's tuning takes a minute a shape
        hybrid(bench, shape, every[:2], parts=False)
        softmax(bench, shape, every[:2])
    for t in (512, 2048, 8192, 32768):
        linear(bench, (1, t, 12, 12, 64, 64), every[:1], peers=False, chunked=False)
        softmax(bench, (1, t, 12, 12, 64, 64), every[:1])
        taylor(bench, (1, t, 12, 12, 64, 64))
    for t in (4096, 8192, 16384, 32768):
        shape = (16, t, 32, 32, 128, 64)
        linear(bench, shape, every[:2] if t <= 16384 else every[:1], peers=t <= 8192, chunked=False)
        softmax(bench, shape, every[:1])
        torch.cuda.empty_cache()
    gated(bench, record, every)  # last: its peer's backward tunes for minutes
    (options.out / "ratios.md").write_text(ratios(measured_rows(options.out)))


if __name__ == "__main__":
    main()
