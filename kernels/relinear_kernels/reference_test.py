"""Each op's chunked form against its quadratic definition, in float64: values, every gradient, pieces,
padding."""

import functools
import math

import pytest
import torch

from relinear_kernels.features import ACTIVATIONS, EXPONENTIAL, exp, project
from relinear_kernels.gated_linear_attention import gated_linear_attention
from relinear_kernels.gated_linear_attention_reference import gated_linear_attention_quadratic
from relinear_kernels.hybrid_attention import hybrid_attention
from relinear_kernels.hybrid_attention_reference import hybrid_attention_quadratic
from relinear_kernels.linear_attention import linear_attention
from relinear_kernels.linear_attention_reference import (
    blocks,
    linear_attention_quadratic,
    linear_attention_weights,
)
from relinear_kernels.sliding_window_attention import sliding_window_attention
from relinear_kernels.sliding_window_attention_reference import sliding_window_quadratic
from relinear_kernels.testing import relative

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 131)
D, F = 8, 6
TOKENS = {"q", "k", "v", "log_decay", "log_gate"}  # arguments with one row per position
OPS = {
    **{
        f"linear-{f}": (
            functools.partial(linear_attention, feature=f),
            functools.partial(linear_attention_quadratic, feature=f),
        )
        for f in (*ACTIVATIONS, *EXPONENTIAL)
        if f != "none"
    },
    **{
        f"gated-{f}": (
            functools.partial(gated_linear_attention, feature=f),
            functools.partial(gated_linear_attention_quadratic, feature=f),
        )
        for f in ("softmax_pm", "elu")
    },
    # maps, gates and states of key heads
    **{
        f"linear-{f}-shared": (
            functools.partial(linear_attention, feature=f),
            functools.partial(linear_attention_quadratic, feature=f),
        )
        for f in ("softmax_pm", "exp_pm")
    },
    "linear-decay-shared": (linear_attention, linear_attention_quadratic),
    "gated-shared": (gated_linear_attention, gated_linear_attention_quadratic),
    "hybrid-16-shared": (
        functools.partial(hybrid_attention, window=16),
        functools.partial(hybrid_attention_quadratic, window=16),
    ),
    "hybrid-1": (
        functools.partial(hybrid_attention, window=1),
        functools.partial(hybrid_attention_quadratic, window=1),
    ),
    "hybrid-16": (
        functools.partial(hybrid_attention, window=16),
        functools.partial(hybrid_attention_quadratic, window=16),
    ),
    "window-1": (
        functools.partial(sliding_window_attention, window=1),
        functools.partial(sliding_window_quadratic, window=1),
    ),
    "window-16": (
        functools.partial(sliding_window_attention, window=16),
        functools.partial(sliding_window_quadratic, window=16),
    ),
    "window-16-meta": (
        functools.partial(sliding_window_attention, window=16, meta=4),
        functools.partial(sliding_window_quadratic, window=16, meta=4),
    ),
}


def inputs(name, length, heads=6, groups=2, batch=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    r = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)  # noqa: E731
    args = {
        "q": r(batch, length, heads, D),
        "k": r(batch, length, groups, D),
        "v": r(batch, length, groups, D),
    }
    states = groups if name.endswith("-shared") else heads
    if not name.startswith("window"):
        args |= {"w_q": r(heads, D, F), "w_k": r(states, D, F)}
    if name.startswith("gated"):
        args["log_gate"] = torch.nn.functional.logsigmoid(2 * r(batch, length, states, F))
    if "-decay" in name:
        args["log_decay"] = torch.nn.functional.logsigmoid(2 * r(batch, length, states))
    if name.startswith("hybrid"):
        args |= {"window_factor": torch.rand(heads, generator=g, dtype=torch.float64)}
    return args


def test_blocks_are_the_fewest_and_hardly_padded():
    for length in range(1, 200):
        for size in (1, 16, 64):
            block, n, pad = blocks(length, size)
            assert block <= size and n == math.ceil(length / size) and 0 <= pad == n * block - length < n


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_exponential_is_that_of_torch_where_it_vanishes_too(dtype):
    x = torch.tensor(
        [-torch.inf, -1e4, -700.0, -100.0, -88.0, -50.0, -1.0, 0.0, 3.0, 80.0, torch.inf],
        dtype=dtype,
        requires_grad=True,
    )
    [slope] = torch.autograd.grad(exp(x)[:-1].sum(), x)
    tiny = torch.finfo(dtype).tiny  # below it, digits go one by one
    for found in (exp(x)[:-1], slope[:-1]):
        torch.testing.assert_close(found, x.exp()[:-1], rtol=100 * torch.finfo(dtype).eps, atol=tiny)
    assert exp(x)[0] == 0 and exp(x)[-1] == torch.inf


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_chunked_equals_definition(name, length, groups):
    op, definition = OPS[name]
    args = inputs(name, length, groups=groups)
    torch.testing.assert_close(op(**args), definition(**args), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", [name for name in OPS if name.endswith("-shared")])
def test_a_map_of_a_key_head_is_that_map_for_each_of_its_query_heads(name):
    op, definition = OPS[name]
    args = inputs(name, 70)
    each = args | {
        n: args[n].repeat_interleave(3, -2 if n == "log_gate" else -1 if n == "log_decay" else 0)
        for n in ("w_k", "log_gate", "log_decay")
        if n in args
    }
    (got, state), (want, states) = op(**args, return_state=True), op(**each, return_state=True)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(definition(**args), want, rtol=1e-9, atol=1e-11)
    for ours, theirs in zip(getattr(state, "linear", state), getattr(states, "linear", states), strict=True):
        assert ours.shape[1] == 2 and theirs.shape[1] == 6
        assert ours.untyped_storage().nbytes() == ours.nbytes
        torch.testing.assert_close(ours.repeat_interleave(3, 1), theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("feature", ["softmax_pm", "exp_pm"])
@pytest.mark.parametrize("huge", [-1e4, -1e30, -math.inf])
def test_what_comes_after_a_huge_decay_is_as_if_nothing_had_come_before(huge, feature):
    """In float32, where a running sum through the decay would leave nothing of the small ones behind it:
    values, gradients, pieces."""
    args = {n: x[:1] if n in TOKENS else x for n, x in inputs("linear-softmax_pm-decay", 40).items()}
    args["log_decay"] = args["log_decay"] / 100
    args["log_decay"][:, 20] = args["log_decay"][:, 25] = huge
    after = {n: x[:, 25:] if n in TOKENS else x for n, x in args.items()}
    # the first token's own decay meets nothing
    after["log_decay"] = after["log_decay"].index_fill(1, torch.tensor(0), 0.0)

    def run(args, dtype, op):
        args = {n: x.to(dtype).requires_grad_() for n, x in args.items()}
        out = op(**args, feature=feature)[:, -15:]
        return out, *(
            g[:, -14:] if n in TOKENS else g
            for n, g in zip(args, torch.autograd.grad(out.square().sum(), args.values()), strict=True)
        )

    exact = run(after, torch.float64, linear_attention_quadratic)
    for got, want in zip(run(args, torch.float64, linear_attention_quadratic), exact, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    for got, want in zip(run(args, torch.float32, linear_attention), exact, strict=True):
        assert relative(got, want) < 2e-6
    state, pieces = None, []
    for a, b in ((0, 10), (10, 23), (23, 40)):
        y, state = linear_attention(
            **{n: x[:, a:b] if n in TOKENS else x for n, x in args.items()},
            feature=feature,
            initial_state=state,
            return_state=True,
        )
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1)[:, -15:], exact[0], rtol=1e-9, atol=1e-11)


def test_maps_and_gates_must_be_of_the_same_heads():
    args = inputs("linear-decay-shared", 5)
    with pytest.raises(
        ValueError, match=r"log_decay must be \[Hkv=2\] or \[B=2, T=5, Hkv=2\]; got \[2, 5, 6\]"
    ):
        linear_attention(**args | {"log_decay": torch.zeros(2, 5, 6)})
    args.pop("log_decay")
    with pytest.raises(
        ValueError, match=r"feature matrix must be \[H=6, D=8, F\] or \[Hkv=2, D=8, F\]; got \[3, 8, 6\]"
    ):
        linear_attention(**args | {"w_k": args["w_q"][:3]})
    with pytest.raises(ValueError, match="a bias has as many heads as its matrix: 2; got 6"):
        linear_attention(**args, b_k=torch.zeros(6, F))
    with pytest.raises(ValueError, match=r"log_gate must be \[B=2, T=5, Hkv=2, F=6\]; got \[2, 5, 6, 6\]"):
        gated_linear_attention(**inputs("gated-shared", 5) | {"log_gate": torch.zeros(2, 5, 6, 6)})


@pytest.mark.parametrize("name", OPS)
def test_gradients_equal_those_of_the_definition(name):
    op, definition = OPS[name]
    args = {n: x.requires_grad_() for n, x in inputs(name, 83).items()}
    probe = torch.randn(2, 83, 6, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    # allow_unused: with a window as long as the sequence nothing is linear, so its matrices have no gradient
    # in either form
    got = torch.autograd.grad((op(**args) * probe).sum(), args.values())
    want = torch.autograd.grad((definition(**args) * probe).sum(), args.values())
    for n, a, b in zip(args, got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9, msg=lambda m, n=n: f"gradient of {n}: {m}")


@pytest.mark.parametrize("cuts", [(1,) * 70, (40, 30), (3, 64, 3), (69, 1)])
@pytest.mark.parametrize("name", OPS)
def test_pieces_equal_the_whole(name, cuts):
    op, _ = OPS[name]
    args = inputs(name, 70)
    rest = {n: x for n, x in args.items() if n not in TOKENS}
    state, out, at = None, [], 0
    for c in cuts:
        piece = {n: args[n][:, at : at + c] for n in TOKENS if n in args}
        y, state = op(**piece, **rest, initial_state=state, return_state=True)
        out.append(y)
        at += c
    torch.testing.assert_close(torch.cat(out, 1), op(**args), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("pad", [1, 16, 40])
@pytest.mark.parametrize("name", OPS)
def test_left_padding_changes_nothing(name, pad):
    op, definition = OPS[name]
    args = inputs(name, 33)
    want = op(**args)
    for n in TOKENS & args.keys():  # a gate is 0 at padding
        filler = torch.full(
            (2, pad, *args[n].shape[2:]), 0.0 if n.startswith("log_") else 7.0, dtype=torch.float64
        )
        args[n] = torch.cat([filler, args[n]], 1)
    mask = torch.arange(pad + 33).expand(2, -1) >= pad
    torch.testing.assert_close(op(**args, key_mask=mask)[:, pad:], want, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(definition(**args, key_mask=mask)[:, pad:], want, rtol=1e-9, atol=1e-11)
    # the same in pieces, the first of them nothing but padding
    rest, state, out = {n: x for n, x in args.items() if n not in TOKENS}, None, []
    for a, b in ((0, pad), (pad, pad + 5), (pad + 5, pad + 33)):
        y, state = op(
            **{n: args[n][:, a:b] for n in TOKENS & args.keys()},
            **rest,
            key_mask=mask[:, a:b],
            initial_state=state,
            return_state=True,
        )
        out.append(y)
    torch.testing.assert_close(torch.cat(out, 1)[:, pad:], want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", OPS)
def test_left_padding_has_and_changes_no_gradient(name):
    op, definition = OPS[name]
    args, pad = inputs(name, 33), 16
    before = lambda n, x, value: (  # noqa: E731
        torch.nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (pad, 0), value=value) if n in TOKENS else x
    )
    padded = {n: before(n, x, 0.0 if n == "log_gate" else 7.0) for n, x in args.items()}
    probe = torch.randn(2, 33, 6, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def gradients(run, args, **options):
        given = {n: x.clone().requires_grad_() for n, x in args.items()}
        return torch.autograd.grad((run(**given, **options)[:, -33:] * probe).sum(), given.values())

    want, mask = gradients(op, args), torch.arange(pad + 33).expand(2, -1) >= pad
    for run in (op, definition):
        for n, a, b in zip(args, gradients(run, padded, key_mask=mask), want, strict=True):
            torch.testing.assert_close(
                a, before(n, b, 0.0), rtol=1e-7, atol=1e-9, msg=lambda m, n=n: f"gradient of {n}: {m}"
            )


@pytest.mark.parametrize("kind", ["head", "token"])
def test_decay_equals_definition_and_survives_hard_gates(kind):
    args = inputs("linear", 131)
    gate = (
        torch.nn.functional.logsigmoid(3 * torch.randn(2, 131, 6, dtype=torch.float64))
        if kind == "token"
        else -(2.0 ** -torch.arange(6.0))
    )
    for normalize in (True, False):
        got, state = linear_attention(**args, log_decay=gate, normalize=normalize, return_state=True)
        want = linear_attention_quadratic(**args, log_decay=gate, normalize=normalize)
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)
        step, s = [], None
        for t in range(131):
            y, s = linear_attention(
                **{n: args[n][:, t : t + 1] for n in "qkv"},
                w_q=args["w_q"],
                w_k=args["w_k"],
                normalize=normalize,
                log_decay=gate[:, t : t + 1] if kind == "token" else gate,
                initial_state=s,
                return_state=True,
            )
            step.append(y)
        torch.testing.assert_close(torch.cat(step, 1), got, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(s.kv, state.kv, rtol=1e-8, atol=1e-10)
    hard = torch.full((2, 131, 6), -60.0, dtype=torch.float64)
    assert linear_attention(**args, log_decay=hard).isfinite().all()


def test_exponential_features_of_large_keys_neither_overflow_nor_vanish():
    args = {n: x.float() for n, x in inputs("linear", 131).items()}
    # the maximum keeps rising
    args |= {"q": 12 * args["q"], "k": 8 * args["k"] * torch.linspace(1, 2, 131)[None, :, None, None]}
    args |= {"w_q": torch.eye(D).expand(6, D, D), "w_k": torch.eye(D).expand(6, D, D)}
    got = linear_attention(**args, feature="exp_pm")
    want = linear_attention_quadratic(**{n: x.double() for n, x in args.items()}, feature="exp_pm")
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)], ids=str)
@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize("feature", EXPONENTIAL)
def test_weights_of_exponential_features_are_a_softmax_in_log_space(feature, pad, dtype, tolerance):
    """Features that spread over hundreds, keys far above all that the rows before them see, and rows that see
    nothing."""
    args = inputs("linear", 23)
    args = {n: 20 * args[n][:1] for n in ("q", "k")} | {n: args[n] for n in ("w_q", "w_k")}
    args["k"] *= torch.linspace(0.1, 1, 23)[:, None, None]
    seen = torch.ones(23, 23, dtype=torch.bool).tril() & (torch.arange(23) >= pad)
    probe = torch.randn(1, 6, 23, 23, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def explicit(q, k, w_q, w_k):
        x, y = (EXPONENTIAL[feature](project(z, w, None, 6)) for z, w in ((q, w_q), (k, w_k)))
        return (x[:, :, :, None] + y[:, :, None]).logsumexp(-1).masked_fill(~seen, -1e9).softmax(-1) * seen

    found = []
    for run, cast in (
        (lambda **x: linear_attention_weights(**x, feature=feature, key_mask=seen[-1:]), dtype),
        (explicit, torch.float64),
    ):
        given = {n: x.to(dtype).to(cast).requires_grad_() for n, x in args.items()}
        weights = run(**given)
        found.append((weights, *torch.autograd.grad((weights * probe).sum(), given.values())))
    for n, a, b in zip(("weights", *args), *found, strict=True):
        assert relative(a, b) < tolerance, n


@pytest.mark.parametrize("name", OPS)
def test_first_token_returns_its_own_value(name):
    op, _ = OPS[name]
    args = inputs(name, 1)
    if name == "linear-relu":
        args = {n: x.abs() for n, x in args.items()}
    torch.testing.assert_close(op(**args), args["v"].repeat_interleave(3, 2))


def test_a_group_of_query_heads_shares_its_key_without_a_copy():
    k = torch.randn(2, 5, 2, D)
    assert project(k, None, None, 6).shape == (2, 6, 5, D)
    with pytest.raises(ValueError, match="multiple of key heads; got 5 query heads and 2 key heads"):
        project(k, None, None, 5)


def test_unknown_feature_is_named_with_the_possible_ones():
    with pytest.raises(ValueError, match="no feature map 'cosine'; have softmax_pm"):
        linear_attention(**inputs("linear", 3), feature="cosine")
