"""Tokens that are kept behind a window: the method's choice, and the rules of the measure `kept`."""

import torch
from test_laws import HEADS, close, one_layer, repeated

from relinear.attention import load, options
from relinear.attention._base import Heads, Inputs, softmax_output, softmax_weights
from relinear.attention.kept import drawn
from relinear.measure import kept
from relinear_kernels.gated_delta_reference import delta_state

LENGTH = 90
SMOLLM2 = Heads(576, 9, 3, 64, 0.125)


def inputs():
    return one_layer(("window", {"window": 9}), LENGTH)[1]


def test_the_tokens_that_received_most_stay_and_none_comes_back():
    """The definition, a token at a time and without ranks: at each query one token leaves the window, and the
    least of the kept ones goes."""
    window, places, sinks = 16, 12, 2
    method, x = one_layer(("kept", {"window": window, "kept": places - sinks, "sinks": sinks}), LENGTH)
    near = load("window")(HEADS, options("window", {"window": window, "sinks": sinks})).attention_weights(x)
    seen = method.attention_weights(x) > 0
    for b in range(2):
        for group in range(HEADS.groups):
            received = [
                near[b, 3 * group : 3 * group + 3, j : j + window, j].sum() * x.v[b, j, group].norm()
                for j in range(LENGTH)
            ]
            held: list[int] = []
            for t in range(LENGTH):
                if t >= window:
                    held.append(t - window)
                if len(held) > places:
                    held.remove(min((j for j in held if j >= sinks), key=lambda j: received[j].item()))
                wanted = {*held, *range(max(t - window + 1, 0), t + 1)}
                assert {*seen[b, 3 * group, t].nonzero().flatten().tolist()} == wanted
            assert sorted(held) != list(range(LENGTH - window - places, LENGTH - window))


def test_drawn_tokens_are_as_if_by_chance_from_all_that_left_and_others_for_each_head():
    draws = drawn(torch.arange(2000)[None], 3)[0]
    for text in (500, 1000, 2000):
        chosen = draws[:text].topk(100, dim=0).indices
        for group in range(3):  # each fifth of the text has its share, and no step leads from token to token
            shares = torch.histc(chosen[:, group].float(), 5, 0, text)
            assert shares.min() >= 8 and shares.max() <= 32  # 3 deviations of 20
            assert len(chosen[:, group].sort().values.diff().unique()) >= 12
        for one, other in ((0, 1), (0, 2), (1, 2)):
            both = {*chosen[:, one].tolist()} & {*chosen[:, other].tolist()}
            assert len(both) < 10_000 / text + 3 * (10_000 / text) ** 0.5


def test_a_piece_of_a_text_keeps_what_the_whole_keeps():
    method, x = one_layer(("kept", {"window": 16, "kept": 12}), LENGTH)
    piece = lambda a, b: Inputs(*(y[:, a:b] for y in x[:6]))  # noqa: E731
    _, whole = method(x)
    _, state = method(piece(0, 50))
    for i in range(50, LENGTH):
        _, state = method(piece(i, i + 1), state)
    assert torch.equal(state.k, whole.k) and torch.equal(state.real, whole.real)
    close(state.received.s[..., 4:, :], whole.received.s[..., 4:, :])


def test_both_choices_of_the_measure_agree_where_a_worth_does_not_change():
    score = torch.rand(2, 2, LENGTH)
    holds = kept.Budget(10, 4, 12)
    seen = kept.kept_by_score(score, holds)
    assert torch.equal(
        seen, kept.kept_by_worth(score[:, :, None].expand(2, 2, LENGTH, LENGTH).contiguous(), holds)
    )
    assert seen.sum(-1).max() == 10 + 4 + 12


def test_rules_that_hold_a_whole_text_are_softmax_attention():
    x = Inputs(*(y.float() for y in inputs()[:6]))
    holds = kept.Budget(10, 4, LENGTH)
    wanted = softmax_output(x, HEADS)
    close(kept.merge(x, HEADS, holds), wanted)
    for rule in ("random", "small_keys", "surprise", "received", "attention", "oracle"):
        close(kept.attend(x, HEADS, kept.seen_by(rule, x, HEADS, holds)), wanted)


def test_a_slot_of_several_tokens_has_their_means_and_the_logarithm_of_their_number():
    x = Inputs(*(y.float() for y in inputs()[:6]))
    (q, k), v, holds, last = x.rotated(), x.v, kept.Budget(10, 4, 1), LENGTH - 1
    far = slice(4, LENGTH - 10)
    keys = torch.cat([k[:, :4], k[:, far].mean(1, keepdim=True), k[:, -10:]], 1)
    values = torch.cat([v[:, :4], v[:, far].mean(1, keepdim=True), v[:, -10:]], 1)
    scores = torch.einsum("bhd,bihd->bhi", q[:, last], repeated(keys, HEADS)) * HEADS.scale
    scores[..., 4] += torch.tensor(LENGTH - 14.0).log()
    wanted = torch.einsum("bhi,bihd->bhd", scores.softmax(-1), repeated(values, HEADS))
    close(kept.merge(x, HEADS, holds)[:, last], wanted)


def test_surprise_is_the_residual_of_the_delta_rule_at_its_start():
    x = Inputs(*(y.float() for y in inputs()[:6]))
    method = load("delta")(HEADS, options("delta", {"window": 9}))
    given, _ = method._recurrent(x)
    s = delta_state(2, HEADS.groups, 8, 8).s
    norms = []
    for t in range(LENGTH):
        s = s * given["log_decay"][:, t, :, None, None].exp()
        k, beta = given["k"][:, t], given["erase"][:, t, :, None]
        u = beta * (given["v"][:, t] - torch.einsum("bgkv,bgk->bgv", s, k))
        s = s + k[..., None] * u[..., None, :]
        norms.append(u.norm(dim=-1))
    close(kept.residual(x.k, x.v), torch.stack(norms, -1))


def test_the_oracle_catches_more_attention_than_any_other_rule():
    x = Inputs(*(y.float() for y in inputs()[:6]))
    holds, weights = kept.Budget(10, 4, 12), softmax_weights(x, HEADS).unflatten(1, (2, 3)).sum(2)
    caught = {
        rule: (weights * kept.seen_by(rule, x, HEADS, holds)).sum().item()
        for rule in ("random", "small_keys", "surprise", "received", "attention", "oracle")
    }
    assert max(caught, key=caught.get) == "oracle"


def test_no_rule_holds_more_than_its_bytes():
    position = 4 * SMOLLM2.groups * SMOLLM2.dim
    for rule in kept.RULES[1:]:
        holds = kept.budget(rule, 256, SMOLLM2)
        size = (holds.window + holds.sinks + holds.kept) * position
        scored = dict.fromkeys(("surprise", "received", "attention"), holds.window + holds.kept)
        size += 4 * SMOLLM2.groups * scored.get(rule, holds.kept * (rule == "merged"))
        size += 2 * SMOLLM2.groups * SMOLLM2.dim**2 * (rule == "surprise")
        assert 256 * position - 2 * position < size <= 256 * position, rule
