"""Every attention operation in the forms that `relinear.benchmarks.kernels` times: ours, the chunked torch
form and the fastest of others.

A function returns the forms of one operation on random inputs of a shape, by the name of who provides them. A
shape is (B, T, H, Hkv, D, F): sequences, positions, query heads, key heads, dimension of a head, features of
a sign. All inputs are bfloat16 on the GPU.

Peers of linear attention come twice. "+ ones, compiled maps" computes the whole operation with parts that a
user has: torch.compile makes the features, and a column of ones beside the values gives the normaliser.
"(unnormalised)" is given its features ready-made and does not divide: no complete operation, but the least
that fla's kernels take.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

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

Shape = tuple[int, int, int, int, int, int]
DEVICE = "cuda"
OURS, CHUNKED = "relinear", "torch chunked"
GIVEN = "features given"
# the two operations with a window that decoding measures
WINDOW, HYBRID = "sliding_window_attention w=128 meta=4", "hybrid_attention w=64"
CACHED = 2048  # positions whose keys and values softmax attention decodes with
CHECKED = 2048  # positions on which errors are measured


class Form(NamedTuple):
    """One implementation of an operation, on its inputs.

    `run` returns the output, or several. `leaves` are the tensors whose gradients the backward computes,
    `maps` those of attention transfer (none: not timed there). `error` returns the relative error of what
    `run` returned. `moved`: the bytes that must be read and written forward and with the backward, where they
    are not those of an attention.
    """

    run: Callable[[], Any]
    leaves: Sequence[Tensor] = ()
    maps: Sequence[Tensor] = ()
    error: Callable[[Tensor], float] | None = None
    note: str = ""
    moved: Mapping[str, float] | None = None


Forms = dict[str, Form]


def inputs(shape: Shape, gate: bool = False) -> dict[str, Tensor]:
    """Random q, k, v and feature matrices; with `gate` also a log decay a head and position."""
    b, t, h, n, d, f = shape
    generator = torch.Generator(DEVICE).manual_seed(b * t + h)
    normal = partial(torch.randn, device=DEVICE, generator=generator, dtype=torch.bfloat16)
    args = {"q": normal(b, t, h, d), "k": normal(b, t, n, d), "v": normal(b, t, n, d)}
    args |= {"w_q": normal(h, d, f) / d**0.5, "w_k": normal(h, d, f) / d**0.5}
    if gate:
        args["log_decay"] = logsigmoid(torch.randn(b, t, h, device=DEVICE, generator=generator) + 3)
    return args


def features(x: Tensor, w: Tensor) -> Tensor:
    """Hedgehog's features of `[B, T, H, D]`: `[B, T, H, 2F]`. The keys of a group are repeated for its query
    heads."""
    x = x.repeat_interleave(w.shape[0] // x.shape[2], 2)
    return ACTIVATIONS["softmax_pm"](torch.einsum("bthd,hdf->bthf", x, w).float()).to(x.dtype)


def relative(got: Tensor, want: Tensor) -> float:
    """The RMS of `got - want`, relative to the RMS of `want`."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def error_on_piece(definition: Callable[..., Tensor], args: dict[str, Tensor]) -> Callable[[Tensor], float]:
    """The error of a full-size output against the definition in float32, on the first sequence, its first key
    head and that head's queries."""
    group = args["q"].shape[2] // args["k"].shape[2]
    cut = {name: args[name][:1, :CHECKED, : group if name == "q" else 1] for name in "qkv"}
    cut |= {name: args[name][:group] for name in ("w_q", "w_k", "window_factor") if name in args}
    cut |= {name: args[name][:1, :CHECKED, :group] for name in ("log_decay", "log_gate") if name in args}

    @torch.no_grad()
    def error(output: Tensor) -> float:
        want = definition(**{name: x.float() for name, x in cut.items()})
        return relative(output[:1, :CHECKED, :group], want)

    return error


# --- what a user composes of fla and torch ---


def _fla(module: str, op: str, **arguments: Any) -> Tensor:
    """The first output of an op of fla, which is imported when it runs: where it is missing, the row says
    so."""
    return getattr(importlib.import_module(f"fla.ops.{module}"), op)(**arguments)[0]


def with_ones(v: Tensor) -> Tensor:
    """Values and 16 more channels: the first is one, whose sum is the normaliser; rows stay aligned to 16
    bytes."""
    return torch.cat([v, torch.ones_like(v[..., :1]), torch.zeros_like(v[..., :15])], -1)


def make_inputs(
    q: Tensor, k: Tensor, v: Tensor, w_q: Tensor, w_k: Tensor, late: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Features of queries and keys, and values with a column of ones. Keys and values are delayed by `late`
    positions."""
    shift = lambda x: torch.nn.functional.pad(x[:, : x.shape[1] - late], (0, 0, 0, 0, late, 0))  # noqa: E731
    phi_k, values = features(k, w_k), with_ones(v.repeat_interleave(q.shape[2] // v.shape[2], 2))
    return features(q, w_q), shift(phi_k) if late else phi_k, shift(values) if late else values


def divide_sums(sums: Tensor) -> Tensor:
    """The sums of values, each divided by the sum of the column of ones."""
    return sums[..., :-16] / sums[..., -16:-15]


def compose(op: str, args: dict[str, Tensor], gate: str = "") -> Callable[[], Tensor]:
    """Normalised linear attention as an op of fla, its features made and its sums divided by
    torch.compile."""
    prepare, divide = torch.compile(make_inputs, dynamic=False), torch.compile(divide_sums, dynamic=False)

    def run() -> Tensor:
        q, k, v = prepare(*(args[name] for name in ("q", "k", "v", "w_q", "w_k")))
        gates = {"g": args[gate]} if gate else {}
        return divide(_fla("simple_gla", op, q=q, k=k, v=v, **gates, scale=1.0))

    return run


def ready(args: dict[str, Tensor]) -> dict[str, Tensor]:
    """Features of queries and keys, and values, repeated for every query head, as fla's ops take them."""
    values = args["v"].repeat_interleave(args["q"].shape[2] // args["v"].shape[2], 2)
    return {
        "q": features(args["q"], args["w_q"]),
        "k": features(args["k"], args["w_k"]),
        "v": values.contiguous(),
    }


def flash_window(args: dict[str, Tensor], window: int) -> Callable[[], Tensor]:
    """FlashAttention over the last `window` positions."""
    b, t = args["q"].shape[:2]
    ends = torch.arange(b + 1, device=DEVICE, dtype=torch.int32) * t
    shared = {} if args["q"].shape[2] == args["k"].shape[2] else {"enable_gqa": True}

    def run() -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        packed = (args[name].flatten(0, 1) for name in "qkv")
        return varlen_attn(*packed, ends, ends, t, t, window_size=(window - 1, 0), **shared).unflatten(
            0, (b, t)
        )

    return run


def flex_window(args: dict[str, Tensor], window: int, meta: int) -> Callable[[], Tensor]:
    """FlexAttention over the last `window` positions and the first `meta`."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    t, grouped = args["q"].shape[1], args["q"].shape[2] != args["k"].shape[2]
    seen = lambda b, h, q, k: (q >= k) & ((q - k < window) | (k < meta))  # noqa: E731
    mask = create_block_mask(seen, None, None, t, t, device=DEVICE)
    attend = torch.compile(flex_attention, dynamic=False)
    return lambda: attend(
        *(args[name].transpose(1, 2) for name in "qkv"), block_mask=mask, enable_gqa=grouped
    ).transpose(1, 2)


# --- the operations ---


def linear(shape: Shape, gate: bool = False, peers: bool = True, chunked: bool = True) -> Forms:
    """Linear attention with Hedgehog's features; with `gate` a decay a head and position."""
    args = inputs(shape, gate)
    leaves, maps = list(args.values()), [args["w_q"], args["w_k"]]
    definition = linear_attention_reference.linear_attention
    error = error_on_piece(definition, args)
    forms = {OURS: Form(partial(linear_attention, **args), leaves, maps, error)}
    if chunked:
        forms[CHUNKED] = Form(partial(definition, **args), leaves, maps)
    if peers:
        given = ready(args) | ({"g": args["log_decay"]} if gate else {})
        bare = error_on_piece(partial(definition, normalize=False), args)
        for op in ("chunk_simple_gla", *(["fused_chunk_simple_gla"] if gate else [])):
            form = partial(_fla, "simple_gla", op, **given, scale=1.0)
            forms[f"fla {op} (unnormalised)"] = Form(form, list(given.values()), error=bare, note=GIVEN)
            forms[f"fla {op} + ones, compiled maps"] = Form(
                compose(op, args, "log_decay" if gate else ""), leaves, maps, error
            )
    return forms


def gated(shape: Shape, peers: bool = True) -> Forms:
    """Linear attention with a gate for each channel, shared by both signs. Its peer is given gates of both in
    full."""
    args = inputs(shape)
    b, t, h, _, _, f = shape
    generator = torch.Generator(DEVICE).manual_seed(1)
    args["log_gate"] = logsigmoid(torch.randn(b, t, h, f, device=DEVICE, generator=generator) + 3).bfloat16()
    definition = gated_linear_attention_reference.gated_linear_attention
    forms = {
        OURS: Form(
            partial(gated_linear_attention, **args),
            list(args.values()),
            [args["w_q"], args["w_k"]],
            error_on_piece(definition, args),
        )
    }
    if peers:
        given = ready(args) | {"g": torch.cat([args["log_gate"]] * 2, -1)}
        error = error_on_piece(partial(definition, normalize=False), args)
        peer = partial(_fla, "gla", "chunk_gla", **given, scale=1.0)
        forms["fla chunk_gla (unnormalised)"] = Form(peer, list(given.values()), error=error, note=GIVEN)
    return forms


def window(shape: Shape, size: int, meta: int) -> Forms:
    """Softmax attention to the last `size` positions and the first `meta`."""
    args = {name: x for name, x in inputs(shape).items() if name in "qkv"}
    leaves, about = list(args.values()), {"window": size, "meta": meta}
    error = error_on_piece(
        partial(sliding_window_attention_reference.sliding_window_attention, **about), args
    )
    forms = {
        OURS: partial(sliding_window_attention, **args, **about),
        "FlexAttention": flex_window(args, size, meta),
    }
    if not meta:
        forms["FlashAttention (varlen_attn)"] = flash_window(args, size)
    return {provider: Form(run, leaves, error=error) for provider, run in forms.items()}


def hybrid(shape: Shape, size: int = 64, peers: bool = True, chunked: bool = True) -> Forms:
    """LoLCATs' hybrid: softmax attention over the last `size` positions, linear attention before, one
    normaliser.

    The peer computes both parts and sums them: FlashAttention's window, linear attention over keys that come
    `size` late, and a sum that torch.compile fuses. FlashAttention keeps the window's maximum to itself, so
    that sum weighs its mean: the time of the parts, not the op.
    """
    args = inputs(shape) | {"window_factor": torch.full((shape[2],), 0.1, device=DEVICE)}
    leaves, maps = list(args.values()), [args["w_q"], args["w_k"], args["window_factor"]]
    definition = partial(hybrid_attention_reference.hybrid_attention, window=size)
    forms = {
        OURS: Form(
            partial(hybrid_attention, **args, window=size), leaves, maps, error_on_piece(definition, args)
        )
    }
    if chunked:
        forms[CHUNKED] = Form(partial(definition, **args), leaves, maps)
    if peers:
        prepare = torch.compile(partial(make_inputs, late=size), dynamic=False)
        near = flash_window(args, size)

        @partial(torch.compile, dynamic=False)
        def combined(near: Tensor, far: Tensor, factor: Tensor) -> Tensor:
            g = factor[:, None]
            return ((g * near + far[..., :-16]) / (g + far[..., -16:-15])).to(near.dtype)

        def parts() -> Tensor:
            q, k, v = prepare(*(args[name] for name in ("q", "k", "v", "w_q", "w_k")))
            return combined(
                near(),
                _fla("simple_gla", "chunk_simple_gla", q=q, k=k, v=v, scale=1.0),
                args["window_factor"],
            )

        forms["FlashAttention + fla chunk_simple_gla, compiled maps"] = Form(
            parts, leaves, maps, note="time of the parts and their sum"
        )
    return forms


def lizard(shape: Shape, peers: bool = True) -> Forms:
    """Lizard's layer: linear attention with a decay a head, plus alpha times a window of 128 with 4 first
    positions."""
    args = inputs(shape, gate=True) | {"alpha": torch.ones(shape[2], device=DEVICE)}
    plain, alpha = {name: args[name] for name in "qkv"}, args["alpha"]
    linear_args = {name: x for name, x in args.items() if name != "alpha"}

    def ours() -> Tensor:
        return scaled_sum(
            linear_attention(**linear_args), sliding_window_attention(**plain, window=128, meta=4), alpha
        )

    leaves, maps = list(args.values()), [args["w_q"], args["w_k"], args["log_decay"], alpha]
    forms = {OURS: Form(ours, leaves, maps)}
    if peers:
        far, near = compose("chunk_simple_gla", args, "log_decay"), flex_window(plain, 128, 4)
        add = torch.compile(lambda x, y, a: (x + a[:, None] * y).to(x.dtype), dynamic=False)
        run = lambda: add(far(), near(), alpha)  # noqa: E731
        forms["FlexAttention + fla chunk_simple_gla, compiled maps"] = Form(
            run, leaves, maps, note="time of the parts and their sum"
        )
    return forms


def softmax(shape: Shape) -> Forms:
    """Full causal softmax attention, which every linear operation of the same shape is held against."""
    args = {name: x for name, x in inputs(shape).items() if name in "qkv"}
    attend = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=shape[2] != shape[3])
    return {
        "SDPA causal": Form(
            lambda: attend(*(x.transpose(1, 2) for x in args.values())).transpose(1, 2), list(args.values())
        )
    }


def delta_rule(shape: Shape) -> Forms:
    """The forms of the gated delta rule (GDN): other arithmetic on a state of D x D a head, for scale."""
    given, gates = _normed(shape), _gates(shape)
    given |= {"g": gates[..., 0].contiguous(), "beta": _strength(shape)}
    return {
        "fla chunk_gated_delta_rule": Form(
            partial(_fla, "gated_delta_rule", "chunk_gated_delta_rule", **given), list(given.values())
        )
    }


def kimi_delta(shape: Shape) -> Forms:
    """Kimi delta attention (KDA): the delta rule with a gate a channel, for scale."""
    given = _normed(shape) | {"g": _gates(shape), "beta": _strength(shape)}
    return {"fla chunk_kda": Form(partial(_fla, "kda", "chunk_kda", **given), list(given.values()))}


def _normed(shape: Shape) -> dict[str, Tensor]:
    """q, k, v of all query heads, q and k of length one."""
    b, t, h, _, d, f = shape
    args = inputs((b, t, h, h, d, f))
    return {name: torch.nn.functional.normalize(args[name].float(), dim=-1).bfloat16() for name in "qk"} | {
        "v": args["v"]
    }


def _gates(shape: Shape) -> Tensor:
    """Log gates `[B, T, H, D]` in float32."""
    b, t, h, _, d, _ = shape
    return logsigmoid(
        torch.randn(b, t, h, d, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)) + 3
    )


def _strength(shape: Shape) -> Tensor:
    """The strength of each write of the delta rule, `[B, T, H]`, between 0 and 1."""
    return (
        torch.randn(shape[:3], device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(2))
        .sigmoid()
        .bfloat16()
    )


def taylor(shape: Shape) -> Forms:
    """Linear attention with Hedgehog's Taylor map (1, x, x x^T / sqrt 2): D^2 + D + 1 features in the chunked
    torch form."""
    args = inputs(shape)

    def expand(x: Tensor) -> Tensor:
        x = x.float() / shape[4] ** 0.25
        outer = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2) / 2**0.5
        return torch.cat([torch.ones_like(x[..., :1]), x, outer], -1).bfloat16()

    run = lambda: linear_attention_reference.linear_attention(  # noqa: E731
        expand(args["q"]), expand(args["k"]), args["v"], feature="none"
    )
    return {CHUNKED: Form(run)}


def cross_entropy(shape: Shape) -> Forms:
    """Hedgehog's transfer loss: the cross-entropy of linear attention's weights to softmax attention's. Its
    peer is quadratic in memory."""
    args = inputs(shape)
    given = {
        "phi_q": features(args["q"], args["w_q"]).float(),
        "phi_k": features(args["k"], args["w_k"]).float(),
    }
    teacher = {"q": args["q"], "k": args["k"], "scale": shape[4] ** -0.5}
    definition = partial(attention_cross_entropy_reference.attention_cross_entropy, **teacher, **given)
    leaves = list(given.values())
    read, gradients = sum(x.nbytes for x in (args["q"], args["k"], *leaves)), sum(x.nbytes for x in leaves)
    loss = 4 * args["q"].shape[:3].numel()  # float32
    moved = {"forward": read + loss, "stage 1": 2 * (read + loss) + gradients}
    error = lambda got: relative(got, definition())  # noqa: E731
    ours = partial(attention_cross_entropy, **teacher, **given)
    peer = Form(definition, maps=leaves, note="the definition", moved=moved)
    return {OURS: Form(ours, maps=leaves, error=error, moved=moved), "torch quadratic": peer}


def rotated(shape: Shape) -> Forms:
    """The rotary embedding of q and k. torch's form is that of transformers."""
    args = {name: x for name, x in inputs(shape).items() if name in "qk"}
    angles = torch.rand(1, shape[1], shape[4], device=DEVICE)
    given = {"cos": angles.cos().bfloat16(), "sin": angles.sin().bfloat16()}
    once = 2 * sum(x.nbytes for x in args.values()) + 2 * given["cos"].nbytes
    moved = {"forward": once, "forward+backward": 2 * once}

    def error(got: tuple[Tensor, Tensor]) -> float:
        want = rotary_reference.rotary(**{name: x.float() for name, x in (args | given).items()})
        return relative(torch.cat(got, 2), torch.cat(want, 2))

    forms = {OURS: rotary, "torch": rotary_reference.rotary}
    return {
        provider: Form(partial(form, **args, **given), list(args.values()), error=error, moved=moved)
        for provider, form in forms.items()
    }


def tokens(shape: Shape, vocabulary: int) -> Forms:
    """The loss of each token of a training step: logits are read forward; backward they are read and their
    gradient is written."""
    count, generator = shape[0] * shape[1], torch.Generator(DEVICE).manual_seed(1)
    logits = torch.randn(count, vocabulary, device=DEVICE, generator=generator, dtype=torch.bfloat16)
    labels = torch.randint(vocabulary, (count,), device=DEVICE, generator=generator)
    moved = {"forward": logits.nbytes, "forward+backward": 3 * logits.nbytes}
    error = lambda got: relative(  # noqa: E731
        got, token_cross_entropy_reference.token_cross_entropy(logits.float(), labels)
    )
    forms = {OURS: token_cross_entropy, "torch": token_cross_entropy_reference.token_cross_entropy}
    return {
        provider: Form(partial(form, logits, labels), [logits], error=error, moved=moved)
        for provider, form in forms.items()
    }


def decoded(shape: Shape) -> tuple[str, ...]:
    """The operations that `decoding` has at a shape. Where query heads share key heads, so may states."""
    names = (
        "linear_attention",
        "gated_linear_attention",
        WINDOW,
        HYBRID,
        f"softmax attention, {CACHED} positions",
    )
    return (
        names
        if shape[2] == shape[3]
        else (*names, *(f"{name}, states of key heads" for name in ("linear_attention", HYBRID)))
    )


def decoding(op: str, shape: Shape) -> Forms:
    """One token of an operation. What must move is its state, read once and written once; softmax attention
    reads a cache of 2048 positions."""
    batch, _, h, n, d, f = shape
    args = inputs(shape)
    if op.startswith("softmax"):
        cache = {
            name: torch.randn(batch, n, CACHED, d, device=DEVICE, dtype=torch.bfloat16)
            for name in ("key", "value")
        }
        attend = partial(scaled_dot_product_attention, args["q"].transpose(1, 2), **cache, enable_gqa=h != n)
        return {"SDPA": Form(attend, moved={"decode": sum(x.nbytes for x in cache.values())})}
    states = n if op.endswith("states of key heads") else h
    # bytes of a linear state, of a key and a value, both ways
    state, pair = batch * states * 2 * f * (d + 1) * 8, batch * n * d * 4
    step = partial(decode_step, **{name: args[name] for name in "qkv"})
    if op == WINDOW:
        ring = window_state(batch, 127, n, d, meta=4, device=DEVICE, dtype=torch.bfloat16)
        ring.mask.fill_(True)
        return {OURS: Form(partial(step, state=ring, window=128, meta=4), moved={"decode": 127 * pair})}
    step = partial(step, w_q=args["w_q"], w_k=args["w_k"][:states])
    linear = linear_state(batch, states, 2 * f, d, DEVICE)
    if op.startswith(HYBRID):
        near = hybrid_state(batch, h, n, d, 2 * f, window=64, device=DEVICE, dtype=torch.bfloat16)._replace(
            linear=linear
        )
        near.ring.mask.fill_(True)
        step = partial(step, window=64, window_factor=torch.full((h,), 0.1, device=DEVICE), state=near)
        return {OURS: Form(step, moved={"decode": state + 64 * pair})}
    if op.startswith("gated"):
        gate = logsigmoid(torch.randn(batch, 1, h, f, device=DEVICE) + 3)
        return {OURS: Form(partial(step, log_gate=gate, state=linear), moved={"decode": state})}
    forms = {OURS: Form(partial(step, state=linear), moved={"decode": state})}
    if h == n:
        old = (torch.zeros(batch, h, 2 * f, d, device=DEVICE), torch.ones(batch, 1, h, 2 * f, device=DEVICE))
        given = ready(args) | {
            "scale": 1.0,
            "initial_state": old,
            "output_final_state": True,
            "normalize": True,
        }
        peer = partial(_fla, "linear_attn", "fused_recurrent_linear_attn", **given)
        forms["fla fused_recurrent_linear_attn"] = Form(peer, note=GIVEN, moved={"decode": state})
    return forms
