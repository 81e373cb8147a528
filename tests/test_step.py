"""One token on a CPU: how many operators it takes, and where its state lies."""

import pytest
import torch
from test_laws import CASES, FIRST, close, name, of, teacher, tokens
from transformers import DynamicCache

from relinear.linearize.state import tree_map
from relinear_kernels.testing import Written

BF16 = {"dtype": torch.bfloat16}
MOST = 1.5  # times the teacher's operators, of a layer
# What takes more: a hybrid computes both its parts by hand, since they share a denominator; a mixture has a
# softmax of its own beside the linear part and counts what has left its window; a pooling over time keeps the
# means of the last keys; rarer gates of channels have operators of their own, and so has a second rotation;
# the delta rule has three projections beside the teacher's, two convolutions and a norm.
MORE = {
    "lolcats window": 1.6,
    "lolcats paper window": 1.95,
    "lizard time": 1.75,
    "lizard rare": 1.6,
    "delta": 2.35,
}
# The map that divides by its largest feature, which only ablations have, and kept tokens decode by the forms
# of whole pieces: neither has a step of its own yet.
WITHOUT_STEP = [
    case for case in CASES if case[0] in ("softmax", "kept") or case[1].get("feature") == "max_pm"
]
over_methods = pytest.mark.parametrize("case", [c for c in CASES if c not in WITHOUT_STEP], ids=name)


def kind(case) -> str:
    """The name in `MORE` of a case that stands there."""
    method, given = case
    if method == "lolcats" and given.get("window"):
        return "lolcats paper window" if given.get("variant") == "paper" else "lolcats window"
    if method == "lizard" and given.get("pool") == "time":
        return "lizard time"
    channels = given.get("gates") == "channel" and given.get("gate", "sigmoid") != "sigmoid"
    return "lizard rare" if channels or (given.get("linear_rope") and given["window"]) else method


@torch.no_grad()
def operators(make, batch: int = 1, prompt: int = 40) -> int:
    """The operators of a layer, views included, in the decoding of one token: those of two layers less those
    of one."""
    counted = []
    for layers in (1, 2):
        model, ids = make(num_hidden_layers=layers), tokens(prompt, batch)
        cache = model.make_cache() if hasattr(model, "make_cache") else DynamicCache(config=model.config)
        for piece in (ids, ids[:, :1]):
            model(piece, past_key_values=cache, use_cache=True)
        with Written() as written:
            model(ids[:, :1], past_key_values=cache, use_cache=True)
        counted.append(written.operators)
    return counted[1] - counted[0]


def made(case):
    """A function that makes the case's model of so many layers."""
    method, given = case

    def make(num_hidden_layers: int):
        windows = given.get("window")
        cut = {"window": windows[:num_hidden_layers]} if isinstance(windows, tuple) else {}
        return of((method, given | cut), **BF16, num_hidden_layers=num_hidden_layers)

    return make


def floats(cache) -> list[torch.Tensor]:
    """The keys, values and sums of a cache."""
    found = []
    for layer in cache.layers:
        tree_map(lambda x: found.append(x) if x.is_floating_point() else None, layer.state)
    return found


@over_methods
def test_a_token_takes_few_more_operators_than_the_teacher_s(case):
    softmax = operators(lambda **size: teacher(**BF16, **size))
    ours = operators(made(case))
    assert ours <= MORE.get(kind(case), MOST) * softmax, f"{ours} of {softmax}"


@over_methods
def test_a_batch_takes_as_many_operators_as_a_sequence(case):
    """But for views of one sequence, which a batch needs two of."""
    one, many = (operators(made(case), batch) for batch in (1, 3))
    assert many <= one + 10


@over_methods
def test_a_token_leaves_its_state_where_it_lies(case):
    model, ids = of(case, **BF16), tokens(30)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        before = [x.data_ptr() for x in floats(cache)]
        for _ in range(20):
            model(ids[:, :1], past_key_values=cache)
    # of the last three tokens: their means, or the keys and values of a convolution
    anew = {"lizard time": 1, "delta": 2 if case[1].get("conv", True) else 0}.get(kind(case), 0)
    moved = sum(x.data_ptr() != at for x, at in zip(floats(cache), before, strict=True))
    assert moved <= anew * len(cache.layers)


@pytest.mark.parametrize("case", FIRST, ids=name)
def test_a_cache_from_inference_mode_goes_on_outside_it(case):
    model, ids = of(case), tokens(40)
    want = model(ids, use_cache=False).logits
    with torch.inference_mode():
        cache = model(ids[:, :30], use_cache=True).past_key_values
        model(ids[:, 30:31], past_key_values=cache)
    got = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(31, 40)]
    close(torch.cat(got, 1), want[:, 31:])


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 3])
def test_sums_in_half_precision_are_refused(half, length):
    model, ids = of(("hedgehog", {})), tokens(5)
    cache = model(ids, use_cache=True).past_key_values
    for layer in cache.layers:
        layer.state = tree_map(lambda x: x.to(half), layer.state)
    with pytest.raises(ValueError, match=f"float32.*got {half}.*small beside its sum is lost"):
        model(ids[:, :length], past_key_values=cache)
