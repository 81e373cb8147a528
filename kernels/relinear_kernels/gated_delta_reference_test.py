"""The gated delta rule: chunked form, single step and weights against the definition, token by token, in
float64."""

import pytest
import torch

from relinear_kernels import gated_delta_reference
from relinear_kernels.gated_delta import gated_delta
from relinear_kernels.gated_delta_reference import (
    DeltaState,
    delta_state,
    gated_delta_recurrent,
    gated_delta_weights,
)
from relinear_kernels.gated_delta_reference import gated_delta as chunked
from relinear_kernels.testing import relative

B, H, M, G, DK, DV = 2, 6, 2, 2, 8, 6
DECAYS, ERASES = (None, "fixed", "head", "channel"), (None, "tied", "channel")
FORMS = [(decay, erase) for decay in DECAYS for erase in ERASES]
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 131)


def inputs(length, decay="head", erase="tied", batch=B, states=M, dtype=torch.float64, seed=0):
    """Arguments of the recurrence and an initial state; keys of length 1, as the methods have them."""
    g = torch.Generator().manual_seed(seed)
    r = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)  # noqa: E731
    args = {
        "q": r(batch, length, H, DK),
        "k": torch.nn.functional.normalize(r(batch, length, states, DK), dim=-1),
        "v": r(batch, length, G, DV),
        "write": r(batch, length, states).sigmoid(),
    }
    shapes = {
        "fixed": (states,),
        "head": (batch, length, states),
        "tied": (batch, length, states),
        "channel": (batch, length, states, DK),
    }
    if decay is not None:
        args["log_decay"] = -0.5 * r(*shapes[decay]).square()
    if erase is not None:
        args["erase"] = args["write"] if erase == "tied" else r(*shapes[erase]).sigmoid()
    args["s"] = r(batch, states, DK, DV)
    return {n: x.to(dtype) for n, x in args.items()}


def left_padding(length, pad):
    return torch.arange(length).expand(B, -1) >= torch.tensor([[0], [pad]])


def run(form, args, **options):
    """Outputs and the state after them."""
    args = dict(args)
    state = DeltaState(args.pop("s")) if "s" in args else None
    out, after = form(**args, initial_state=state, return_state=True, **options)
    return {"out": out, "s": after.s}


def gradients(form, args, **options):
    args = {n: x.clone().requires_grad_() for n, x in args.items()}
    g = torch.Generator().manual_seed(1)
    out = run(form, args, **options)
    loss = sum((y * torch.randn(y.shape, generator=g, dtype=torch.float64)).sum() for y in out.values())
    return dict(zip(args, torch.autograd.grad(loss, list(args.values())), strict=True))


def same(got, want, tolerance=1e-11):
    assert got.keys() == want.keys()
    for n, x in want.items():
        assert relative(got[n], x) < tolerance, n


@pytest.mark.parametrize("chunk", [None, 1, 7, 64])
@pytest.mark.parametrize(("decay", "erase"), FORMS)
def test_chunks_of_any_size_equal_the_definition(decay, erase, chunk, monkeypatch):
    args = inputs(67, decay, erase)
    options = {"key_mask": left_padding(67, 20), "scale": 0.7}
    if chunk is not None:
        monkeypatch.setattr(gated_delta_reference, "CHUNK", chunk)
    same(run(chunked, args, **options), run(gated_delta_recurrent, args, **options))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("decay", "erase"), [("fixed", None), ("head", "tied"), ("channel", "tied")])
def test_any_length_and_its_gradients_equal_the_definition(decay, erase, length):
    args = inputs(length, decay, erase)
    same(run(chunked, args), run(gated_delta_recurrent, args))
    same(gradients(chunked, args), gradients(gated_delta_recurrent, args), 1e-10)


@pytest.mark.parametrize(("decay", "erase"), FORMS)
def test_gradients_with_padding_equal_the_definition_s(decay, erase):
    args, mask = inputs(37, decay, erase), {"key_mask": left_padding(37, 20)}
    same(gradients(chunked, args, **mask), gradients(gated_delta_recurrent, args, **mask), 1e-10)


@pytest.mark.parametrize(("decay", "erase"), FORMS)
@pytest.mark.parametrize("cuts", [(1,) * 40, (20, 1, 19), (3, 34, 3)], ids=["ones", "20-1-19", "3-34-3"])
def test_pieces_and_single_steps_equal_the_whole(decay, erase, cuts):
    args = inputs(40, decay, erase)
    whole, state, out, at = run(gated_delta, args), DeltaState(args.pop("s")), [], 0
    for c in cuts:
        piece = {n: x if n == "log_decay" and x.dim() == 1 else x[:, at : at + c] for n, x in args.items()}
        y, state = gated_delta(**piece, initial_state=state, return_state=True)
        out.append(y)
        at += c
    same({"out": torch.cat(out, 1), "s": state.s}, whole)


@pytest.mark.parametrize(("decay", "erase"), FORMS)
def test_weights_times_values_are_the_output(decay, erase):
    args, mask = inputs(33, decay, erase), left_padding(33, 9)
    del args["s"]
    v = args["v"].repeat_interleave(H // G, 2)
    weights = gated_delta_weights(**{n: x for n, x in args.items() if n != "v"}, key_mask=mask)
    assert torch.equal(weights, weights.tril()) and not weights[1, :, :, :9].any()
    out = gated_delta_recurrent(**args, key_mask=mask)
    assert relative(torch.einsum("bhti,bihd->bthd", weights, v), out) < 1e-12


def test_states_of_query_heads_share_values_of_key_heads():
    args = inputs(19, states=H)
    shared = args | {"v": args["v"].repeat_interleave(H // G, 2)}
    same(run(gated_delta, args), run(gated_delta, shared))


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("hard", [-1e4, -torch.inf])
def test_extreme_decays_neither_overflow_nor_leave_the_definition(decay, hard):
    """Closed gates beside open ones in float32, whose difference of running sums would be lost."""
    args = inputs(70, decay, dtype=torch.float32)
    args["log_decay"][:, 20:60:3] = hard
    args["log_decay"][:, 50:] *= 1e-3
    want = gradients(gated_delta_recurrent, {n: x.double() for n, x in args.items()})
    got = gradients(chunked, args)
    assert all(x.isfinite().all() for x in got.values())
    exact = run(gated_delta_recurrent, {n: x.double() for n, x in args.items()})
    same(run(chunked, args), exact, 1e-5)
    same(got, want, 1e-4)


@pytest.mark.parametrize("decay", ["fixed", "channel"])
def test_a_document_does_not_depend_on_the_one_before_it(decay):
    lengths = [3, 40, 1, 17]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    args = inputs(sum(lengths), decay, batch=1)
    args["s"] = torch.zeros(len(lengths), M, DK, DV, dtype=torch.float64)
    packed, bounds = run(gated_delta, args, cu_seqlens=cu), cu.tolist()
    for n, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False)):
        one = {m: x if x.dim() == 1 else x[:, a:b] for m, x in args.items()}
        one["s"] = args["s"][n : n + 1].clone()  # which a token overwrites
        same({"out": packed["out"][:, a:b], "s": packed["s"][n : n + 1]}, run(gated_delta, one))
    other = run(gated_delta, args | {"v": args["v"] + (torch.arange(61) < 3)[:, None, None]}, cu_seqlens=cu)
    assert torch.equal(other["out"][:, 3:], packed["out"][:, 3:])
    assert not torch.equal(other["out"][:, :3], packed["out"][:, :3])


def test_padding_leaves_the_state_as_it_is():
    args, nothing = inputs(9), torch.zeros(B, 9, dtype=torch.bool)
    for form in (chunked, gated_delta_recurrent):
        assert torch.equal(run(form, args, key_mask=nothing)["s"], args["s"])


@pytest.mark.parametrize(("decay", "erase"), FORMS)
def test_a_token_overwrites_the_state_and_padding_leaves_it(decay, erase):
    args, mask = inputs(1, decay, erase), torch.tensor([[True], [False]])
    want = run(gated_delta_recurrent, args, key_mask=mask)
    s = args["s"].clone()
    got = run(gated_delta, args | {"s": s}, key_mask=mask)
    same(got, want)
    assert got["s"].data_ptr() == s.data_ptr() and torch.equal(got["s"][1], args["s"][1])


def test_a_token_with_gradients_leaves_the_state_as_it_is():
    args = inputs(1)
    same(gradients(gated_delta, args), gradients(gated_delta_recurrent, args))


def test_a_delta_rule_with_orthogonal_keys_returns_what_was_written():
    """What an erase is for: a key written twice has its last value, where a sum has both."""
    k = torch.eye(4, dtype=torch.float64)[[0, 1, 2, 3, 0]][None, :, None]
    v = torch.randn(1, 5, 1, 3, dtype=torch.float64)
    one = torch.ones(1, 5, 1, dtype=torch.float64)
    out = gated_delta(k, k, v, erase=one, write=one, scale=1.0)
    torch.testing.assert_close(out, v)
    torch.testing.assert_close(gated_delta(k, k, v, scale=1.0)[:, 4], v[:, 4] + v[:, 0])


def test_what_does_not_fit_is_named():
    args = inputs(4)
    del args["s"]
    with pytest.raises(ValueError, match="query heads must be a multiple of key heads"):
        gated_delta(**args | {"q": args["q"][:, :, :5]})
    with pytest.raises(ValueError, match=r"log_decay must be \[2\] or \[2, 4, 2\] or \[2, 4, 2, 8\]; got"):
        gated_delta(**args | {"log_decay": args["log_decay"][:, :3]})
    with pytest.raises(ValueError, match=r"write must be \[2, 4, 2\]; got \[2, 4, 2, 1\]"):
        gated_delta(**args | {"write": args["write"][..., None]})
    assert delta_state(3, M, DK, DV).s.shape == (3, M, DK, DV)
