"""The laws of every attention method, over every method, its variants and every teacher family, in float64
where exactness is claimed."""

import functools
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from relinear import available_methods, linearize
from relinear.attention import load, options
from relinear.attention._base import Heads, Inputs, softmax_output, softmax_weights
from relinear.linearize.transfer import layer_inputs, record
from relinear.plan.options import adds_parameters, transfers
from relinear.stages._stage import method_file
from relinear_kernels.gated_delta_reference import gated_delta_recurrent
from relinear_kernels.sliding_window_attention_reference import sliding_window_weights
from relinear_kernels.testing import Written

WINDOW = 16
VARIANTS = {
    "delta": [
        {"window": WINDOW},  # Gated DeltaNet
        {"window": WINDOW, "decay": "none", "gate": "none"},  # DeltaNet
        {"window": WINDOW, "decay": "channel", "gate": "low_rank"},  # KDA
        {"window": WINDOW, "decay": "step", "erase": "none", "feature": "none"},  # Mamba-2
        {
            "window": WINDOW,
            "decay": "channel",
            "half_life": 16.0,
            "erase": "none",
            "feature": "none",
            "conv": False,
        },  # GLA
        {
            "window": WINDOW,
            "decay": "fixed",
            "erase": "none",
            "feature": "rms",
            "conv": False,
            "rotary": True,
            "gate": "sigmoid",
        },  # Lightning
        {
            "window": WINDOW,
            "sinks": 0,
            "decay": "key",
            "erase": "none",
            "feature": "softmax",
            "conv": False,
            "norm": False,
            "gate": "none",
        },  # Liger
        {"window": (WINDOW, 5), "state_per": "query_head", "decay": "channel"},
    ],
    "feature_map": [
        {"map": "elu"},
        {"map": "relu"},
        {"map": "exp", "temperature": 2.0},
        {"map": "performer", "features": 20},
        {"map": "performer", "features": 20, "variant": "code"},
        {"map": "cosformer", "length": 1024},
        {"map": "taylor"},
    ],
    "hedgehog": [
        {},
        {"feature": "exp_pm"},
        {"tied": True, "bias": True},
        {"feature": "exp", "tied": True, "bias": True},
        {"feature": "max_pm"},
    ],
    "kept": [
        {"window": WINDOW, "kept": 12},
        {"window": (WINDOW, 5), "kept": 12, "sinks": 0},
        {"window": 1, "kept": 5, "sinks": 2},
        {"window": WINDOW, "kept": 12, "choose": "random"},
    ],
    "lizard": [
        {"window": WINDOW},
        {"window": WINDOW, "meta": 0, "gates": "shared", "gate_bias": None, "window_rope": False},
        {"window": WINDOW, "normalize": True},
        {"window": WINDOW, "gates": "channel"},
        {"window": WINDOW, "state_per": "key_head"},
        {"window": WINDOW, "gates": "channel", "state_per": "key_head"},
        {"window": WINDOW, "gate": "mamba2"},
        {"window": WINDOW, "gate": "low_rank", "gates": "channel", "gate_rank": 3},
        {"window": WINDOW, "gate": "pool"},
        {"window": WINDOW, "gate": "pool", "gates": "channel", "pool": "max", "pool_bias": 4.0},
        {"window": WINDOW, "gate": "pool", "pool": "time"},
        {
            "window": WINDOW,
            "gate": "low_rank",
            "gates": "channel",
            "gate_bias": 0.0,
            "gate_temperature": 16.0,
        },
        {"window": WINDOW, "linear_rope": True},
        {"window": WINDOW, "learned_meta": True},
        {"window": WINDOW, "gate": "none", "state_per": "key_head"},
        {"window": 0, "meta": 0},
        {
            "window": 0,
            "meta": 0,
            "gate": "pool",
            "pool": "time",
            "state_per": "key_head",
            "linear_rope": True,
        },
    ],
    "lolcats": [
        {},
        {"window": WINDOW},
        {"variant": "paper"},
        {"variant": "paper", "feature": "relu"},
        {"variant": "paper", "feature": "elu", "window": WINDOW},
        {"state_per": "key_head"},
        {"window": WINDOW, "state_per": "key_head"},
        {"variant": "paper", "feature": "exp", "window": WINDOW, "state_per": "key_head"},
    ],
    "softmax": [{}],
    "supra": [
        {},
        {"variant": "code"},
        {"decay": "retnet", "init": "random"},
        {"normalizer": "denominator", "rope": "before", "decay": "none"},
        {"normalizer": "denominator", "decay": "none", "variant": "code"},
        {"rope": "before"},
    ],
    "t2r": [{}, {"variant": "code"}],
    "window": [
        {"window": WINDOW},
        {"window": WINDOW, "sinks": 0},
        {"window": 1},
        {"window": 1, "sinks": 0},
        {"bytes_of": "lolcats"},
    ],
}
CASES = [(m, o) for m in available_methods() for o in VARIANTS.get(m, [{}])]
LEARNED = [c for c in CASES if adds_parameters(method_file(c[0]))]  # methods with parameters of their own
TRANSFERS = [(c, loss) for c in LEARNED for loss in transfers(method_file(c[0]))]
FIRST = [(m, VARIANTS.get(m, [{}])[0]) for m in available_methods()]
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
}
# Windows of the teachers themselves are shorter than most lengths below; Gemma's layers are one local and one
# global.
TEACHERS = {
    "llama": (LlamaForCausalLM, LlamaConfig, SIZES),
    "mistral": (MistralForCausalLM, MistralConfig, {**SIZES, "sliding_window": 12}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, SIZES),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, SIZES),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            **SIZES,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 11,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
    ),
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config,
        {
            "vocab_size": 97,
            "n_embd": 48,
            "n_layer": 2,
            "n_head": 6,
            "n_positions": 1024,
            "initializer_range": 0.3,
            "scale_attn_by_inverse_layer_idx": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
}


# Every variant under a Llama teacher, and every method's first under each other family.
PAIRS = [(c, "llama") for c in CASES] + [(c, f) for f in TEACHERS if f != "llama" for c in FIRST]


def name(case) -> str:
    if isinstance(case[0], tuple):
        return f"{name(case[0])}-{case[1]}"
    return case[0] + "".join(f"-{k}={v}" for k, v in case[1].items())


over_pairs = pytest.mark.parametrize(("case", "family"), PAIRS, ids=[name(p) for p in PAIRS])


def teacher(family="llama", dtype=torch.float64, **sizes):
    torch.manual_seed(0)
    model, config, own = TEACHERS[family]
    return model(config(**{**own, **sizes})).to(dtype).eval()


@functools.cache
def linearized(method, given, family="llama", dtype=torch.float64, **sizes):
    """A linearized tiny teacher whose method parameters are away from their symmetric start."""
    model = linearize(teacher(family, dtype, **sizes), method, **dict(given))
    torch.manual_seed(1)
    with torch.no_grad():
        for p in getattr(model, "method_parameters", dict)().values():
            p.add_(0.3 * torch.randn(p.shape, dtype=torch.float64).to(p.dtype))
    return model.requires_grad_(False)


def of(case, **kwargs):
    return linearized(case[0], tuple(case[1].items()), **kwargs)


def tokens(length, batch=2, seed=0):
    return torch.randint(
        0, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed)
    )


def repeated(v, heads):
    return v.repeat_interleave(heads.group, 2)


def close(a, b, tolerance=1e-5):
    """Whether two tensors agree to a relative RMS. SDPA and method parameters are float32 or better, whatever
    the teacher's dtype."""
    distance = ((a - b).double().square().mean().sqrt() / b.double().square().mean().sqrt()).item()
    assert distance < tolerance, f"relative RMS {distance:.2e}, allowed {tolerance:.0e}"


@pytest.mark.parametrize("case", [c for c in CASES if c[0] != "softmax"], ids=name)
def test_twice_the_length_is_at_most_twice_the_work_of_training(case, monkeypatch):
    """Numbers written, forward and backward, by a layer's attention; softmax itself is quadratic."""
    monkeypatch.setenv("RELINEAR_KERNELS", "torch")
    given = case[1] | ({"length": 8192} if "length" in case[1] else {})
    method = of((case[0], given), dtype=torch.float32).attention_layers()[0].method.train().requires_grad_()

    def written(length):
        r = lambda *n: torch.randn(1, length, *n)  # noqa: E731
        heads = method.heads
        qkv = [r(n, heads.dim).requires_grad_() for n in (heads.heads, heads.groups, heads.groups)]
        inputs = Inputs(r(heads.hidden), *qkv, r(heads.dim), r(heads.dim))
        with Written() as forward:
            loss = method(inputs)[0].square().sum()
        with Written() as backward:
            loss.backward()
        return forward.numbers, backward.numbers

    shorter = written(1024)
    for length in (2048, 4096, 8192):
        longer = written(length)
        for once, twice in zip(shorter, longer, strict=True):
            assert twice / once < 2.1
        shorter = longer


@pytest.mark.parametrize(
    "cuts", [(1,) * 67, (40, 27), (16, 1, 50), (66, 1)], ids=["ones", "40-27", "16-1-50", "66-1"]
)
@over_pairs
def test_parallel_equals_pieces_equals_one_token_at_a_time(case, family, cuts):
    model, ids = of(case, family=family), tokens(67)
    cache, out, at = model.make_cache(), [], 0
    for c in cuts:
        out.append(model(ids[:, at : at + c], past_key_values=cache).logits)
        at += c
    close(torch.cat(out, 1), model(ids, use_cache=False).logits)


@over_pairs
def test_a_long_prompt_is_read_in_pieces_with_the_same_outcome(case, family, monkeypatch):
    model, ids = of(case, family=family), tokens(67)
    whole, rest = model.make_cache(), model.make_cache()
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    expected = (
        model(ids, attention_mask=mask, past_key_values=whole).logits,
        model(ids[:, :1], past_key_values=whole).logits,
    )
    monkeypatch.setattr("relinear.families._layer.PIECE", 20)  # the first holds nothing but padding
    with torch.inference_mode():
        got = (
            model(ids, attention_mask=mask, past_key_values=rest).logits,
            model(ids[:, :1], past_key_values=rest).logits,
        )
    close(got[0][mask.bool()], expected[0][mask.bool()])
    close(got[1], expected[1])


@over_pairs
def test_a_prefix_does_not_depend_on_what_follows(case, family):
    """Lengths around the window and the chunk (64), odd primes, and four times a length of 64."""
    model = of(case, family=family)
    for length in (1, WINDOW - 1, WINDOW, WINDOW + 1, 63, 64, 65, 131, 256):
        ids = tokens(length + 29)
        other = torch.cat([ids[:, :length], tokens(29, seed=9)], 1)
        whole = model(ids, use_cache=False).logits[:, :length]
        close(model(other, use_cache=False).logits[:, :length], whole)
        close(model(ids[:, :length], use_cache=False).logits, whole)


@pytest.mark.parametrize("pad", [1, WINDOW, 40])
@over_pairs
def test_left_padding_and_batching_change_nothing(case, family, pad):
    model, ids = of(case, family=family), tokens(50)
    alone = model(ids[:1], use_cache=False).logits
    padded = torch.cat([torch.full((1, pad), 3), ids[:1]], 1)
    batch = torch.cat([padded, tokens(pad + 50, batch=1, seed=5)])
    mask = torch.ones_like(batch)
    mask[0, :pad] = 0
    close(model(batch, attention_mask=mask, use_cache=False).logits[:1, pad:], alone)
    cache = model.make_cache()  # and the same with a cache, the padded prompt in two pieces
    first = model(batch[:, : pad + 10], attention_mask=mask[:, : pad + 10], past_key_values=cache).logits
    rest = model(batch[:, pad + 10 :], attention_mask=mask, past_key_values=cache).logits
    close(torch.cat([first, rest], 1)[:1, pad:], alone)


@pytest.mark.parametrize(("heads", "groups"), [(6, 6), (6, 2), (8, 2), (6, 1)])
@pytest.mark.parametrize("case", CASES, ids=name)
def test_any_grouping_of_heads(case, heads, groups):
    model, ids = of(case, num_attention_heads=heads, num_key_value_heads=groups), tokens(37)
    cache = model.make_cache()
    out = [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 20), (20, 37))]
    close(torch.cat(out, 1), model(ids, use_cache=False).logits)


@pytest.mark.parametrize("family", TEACHERS)
@pytest.mark.parametrize("case", FIRST, ids=name)
def test_every_teacher_family_generates_what_full_passes_generate(case, family):
    model, prompt = of(case, family=family, dtype=torch.float32), tokens(11)
    settings = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    cached = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    ids = prompt
    for _ in range(30):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(cached, ids)


@pytest.mark.parametrize("family", TEACHERS)
def test_softmax_as_a_method_is_the_teacher(family):
    ids, model = tokens(37), linearized("softmax", (), family=family)
    close(model(ids, use_cache=False).logits, teacher(family)(ids).logits)
    for method, inputs in layer_inputs(model, record(model, ids)):  # every transfer mimics this, too
        assert method.distill_loss(inputs, "mse").item() < 1e-12
        close(
            torch.einsum(
                "bhti,bihd->bthd", softmax_weights(inputs, method.heads), repeated(inputs.v, method.heads)
            ),
            method(inputs)[0],
        )


@over_pairs
def test_untouched_weights_stay_bit_identical_and_a_saved_folder_loads_to_the_same_model(
    case, family, tmp_path
):
    before, model = (
        teacher(family, dtype=torch.float32).state_dict(),
        of(case, family=family, dtype=torch.float32),
    )
    for key, value in before.items():
        assert torch.equal(model.state_dict()[key], value), key
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.bin"))
    ids = tokens(40)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


@pytest.mark.parametrize(
    ("case", "family"),
    [p for p in PAIRS if p[0][0] != "softmax"],
    ids=[name(p) for p in PAIRS if p[0][0] != "softmax"],
)
def test_state_size_is_fixed_from_the_first_token_on(case, family):
    model, sizes = of(case, family=family), set()
    cache = model.make_cache()
    for i in range(3 * WINDOW):
        model(tokens(1, seed=i), past_key_values=cache)
        sizes.add(cache.state_bytes())
    assert len(sizes) == 1 and sizes.pop() > 0


@pytest.mark.parametrize("case", [c for c in CASES if c[0] != "softmax"], ids=name)
def test_a_state_has_the_bytes_that_are_counted(case):
    model = of(case, dtype=torch.float32)
    cache = model.make_cache()
    model(tokens(3), past_key_values=cache)
    assert cache.state_bytes() == model.state_bytes(2)


@pytest.mark.parametrize("case", [c for c in CASES if c[0] == "delta"], ids=name)
def test_a_layer_that_adds_a_state_to_a_window_starts_as_that_window(case):
    """To the bit: whole, in pieces, and in both windows of a list."""
    ids, given = tokens(67), options(*case)
    model = linearize(teacher(dtype=torch.float32), "delta", **case[1])
    windows = given.window if isinstance(given.window, tuple) else (given.window,) * 2
    alone = linearize(teacher(dtype=torch.float32), "window", window=windows[0], sinks=given.sinks)
    if windows[0] != windows[1]:
        heads = alone.attention_layers()[1].method.heads
        alone.attention_layers()[1].method = load("window")(
            heads, options("window", {"window": windows[1], "sinks": given.sinks})
        )
    assert torch.equal(model(ids, use_cache=False).logits, alone(ids, use_cache=False).logits)
    caches = model.make_cache(), alone.make_cache()
    for a, b in ((0, 40), (40, 41), (41, 67)):
        got, want = (
            m(ids[:, a:b], past_key_values=c).logits for m, c in zip((model, alone), caches, strict=True)
        )
        assert torch.equal(got, want)


def test_states_of_key_heads_are_as_many_as_those():
    shared, (heads, groups) = (
        {"state_per": "key_head"},
        (SIZES[f"num_{kind}_heads"] for kind in ("attention", "key_value")),
    )
    whole, part = (of(("lolcats", given)).state_bytes(2) for given in ({}, shared))
    assert whole * groups == part * heads
    for case in (("lolcats", shared), ("lizard", {"window": WINDOW, **shared})):
        own = [
            p.shape[0] for n, p in of(case).method_parameters().items() if n.endswith(("w_k", "gate.weight"))
        ]
        assert set(own) == {groups}


@pytest.mark.parametrize("case", CASES, ids=name)
def test_beam_search_reorders_the_state(case):
    model, prompt = of(case, dtype=torch.float32), tokens(9)
    settings = {
        "max_new_tokens": 12,
        "num_beams": 3,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    mask = torch.ones_like(prompt)
    with_cache = model.generate(prompt, attention_mask=mask, use_cache=True, **settings)
    assert torch.equal(with_cache, model.generate(prompt, attention_mask=mask, use_cache=False, **settings))


# --- one layer ---

HEADS = Heads(hidden=48, heads=6, groups=2, dim=8, scale=8**-0.5)


def one_layer(case, length=70):
    torch.manual_seed(2)
    given = options(case[0], case[1])
    given = given.of_layer(0, SIZES["num_hidden_layers"]) if hasattr(given, "of_layer") else given
    method = load(case[0])(HEADS, given).double()
    with torch.no_grad():
        for p in method.parameters():
            p.add_(0.3 * torch.randn_like(p))
    r = lambda *s: torch.randn(*s, dtype=torch.float64)  # noqa: E731
    angle = torch.arange(length)[:, None] * 10 ** -torch.arange(4.0) / 3
    cos, sin = (torch.cat([f(angle)] * 2, -1)[None].double() for f in (torch.cos, torch.sin))
    return method, Inputs(
        r(2, length, 48), r(2, length, 6, 8), r(2, length, 2, 8), r(2, length, 2, 8), cos, sin
    )


def whole(case) -> bool:
    """Whether T x T weights of a head say all: SUPRA norms what they give; a gate or taps of delta's are one
    a channel."""
    if case[0] != "delta":
        return case[0] != "supra"
    given = options(*case)
    return given.gate == "none" and not given.conv


@pytest.mark.parametrize("case", [c for c in CASES if whole(c)], ids=name)
def test_explicit_weights_times_values_are_the_output(case):
    method, inputs = one_layer(case)
    weights = method.attention_weights(inputs)
    assert torch.equal(weights, weights.tril())
    close(
        torch.einsum("bhti,bihd->bthd", weights.double(), repeated(inputs.v, HEADS))
        + learned(method, inputs),
        method(inputs)[0],
    )


def learned(method, inputs):
    """What learned meta tokens add to the output of the text's own keys, from the definition of the window;
    0 of any other method."""
    if not getattr(method.options, "learned_meta", False):
        return 0.0
    q, k, _, given = method._behind_meta(inputs)
    m = method.options.meta
    weights = method.alpha.double()[:, None, None] * sliding_window_weights(q, k, **given)[..., m:, :m]
    values = method.meta_v.double().expand(len(q), *method.meta_v.shape)
    return torch.einsum("bhti,bihd->bthd", weights.double(), repeated(values, HEADS))


def condition(method, inputs) -> float:
    """How many times a method magnifies rounding. A division by a sum of signed weights: by the sum of their
    sizes over the size of their sum. A choice of kept tokens: twice, where rounding cannot tell two scores
    apart. Else 1."""
    if isinstance(method, load("kept")):
        return 2.0
    if getattr(method.options, "normalizer", None) != "denominator":
        return 1.0
    return method.attention_weights(inputs).abs().sum(-1).max().clamp(min=1).item()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=name)
def test_lower_precision_stays_near_float64(case, dtype, tolerance):
    """The same numbers, rounded to `dtype`, in both; whole, in pieces, and one token at a time."""
    method, inputs = one_layer(case)
    inputs = Inputs(*(x.to(dtype) for x in inputs[:6]))
    exact = method(Inputs(*(x.double() for x in inputs[:6])))[0]
    tolerance *= condition(method, Inputs(*(x.double() for x in inputs[:6])))
    low = method.float()  # parameters stay float32 in a bfloat16 model
    close(low(inputs)[0], exact, tolerance)
    state, pieces = None, []
    for a, b in ((0, 40), *((i, i + 1) for i in range(40, 70))):
        y, state = low(Inputs(*(x[:, a:b] for x in inputs[:6])), state)
        pieces.append(y)
    close(torch.cat(pieces, 1), exact, tolerance)


def by_definition(method, inputs):
    """The method's output, computed from its explicit T x T weights; or from those of its window and, token
    by token, its state."""
    if isinstance(method, load("delta")):
        near = torch.einsum(
            "bhti,bihd->bthd",
            sliding_window_weights(*inputs.rotated(), **method._window(inputs)),
            repeated(inputs.v, HEADS),
        )
        return near + method.alpha[:, None] * method._far(inputs, attend=gated_delta_recurrent)[0]
    y = torch.einsum(
        "bhti,bihd->bthd", method.attention_weights(inputs), repeated(inputs.v, HEADS).to(torch.float64)
    ) + learned(method, inputs)
    return method.norm(y.flatten(0, 1).flatten(1)).view_as(y) if hasattr(method, "norm") else y


@pytest.mark.parametrize("case", CASES, ids=name)
def test_gradients_are_finite_and_those_of_the_quadratic_definition(case):
    method, inputs = one_layer(case)
    weight = torch.randn(inputs.q.shape, dtype=torch.float64)
    found = []
    for run in (lambda x: method(x)[0], lambda x: by_definition(method, x)):
        given = Inputs(*(x.clone().requires_grad_(i < 4) for i, x in enumerate(inputs[:6])))
        wanted = [*given[:4], *method.parameters()]
        found.append(torch.autograd.grad((run(given).double() * weight).sum(), wanted, allow_unused=True))
    for ours, definition in zip(*found, strict=True):
        assert (ours is None) == (definition is None)
        if ours is not None:
            assert ours.isfinite().all()
            if definition.abs().max() > 1e-12:
                close(ours, definition, 5e-5)
            else:  # a token that sees itself alone has this output for any query
                assert ours.abs().max() < 1e-12


@pytest.mark.parametrize("case", [c for c in CASES if c[0] not in ("supra", "lizard", "delta")], ids=name)
def test_rows_of_weights_are_distributions(case):
    method, inputs = one_layer(case)
    weights = method.attention_weights(inputs)
    assert weights.min() >= 0
    sums = weights.sum(-1)
    alive = sums > 0.5  # a row of ReLU features can be zero altogether
    torch.testing.assert_close(sums[alive], torch.ones_like(sums[alive]), rtol=1e-5, atol=1e-5)
    assert alive.double().mean() > 0.9


def test_supra_normalises_each_head_and_not_each_row():
    method, inputs = one_layer(("supra", {}))
    y = method(inputs)[0].double()
    torch.testing.assert_close(y.mean(-1), torch.zeros_like(y[..., 0]), rtol=0, atol=1e-5)
    assert (y.var(-1, unbiased=False) - 1).abs().median() < 1e-2


@pytest.mark.parametrize(
    ("case", "loss"),
    [t for t in TRANSFERS if t[0][0] != "supra"],
    ids=[name(t) for t in TRANSFERS if t[0][0] != "supra"],
)
def test_transfer_brings_a_method_closer_to_softmax(case, loss):
    method, inputs = one_layer(case, length=33)
    optimiser = torch.optim.Adam(method.parameters(), lr=1e-2)
    values = []
    for _ in range(30):
        optimiser.zero_grad()
        value = method.distill_loss(inputs, loss)
        value.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in method.parameters())
        optimiser.step()
        values.append(value.item())
    assert values[-1] < values[0]


@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_softmax_is_the_transfer_loss_s_minimum(loss):
    method, inputs = one_layer(("softmax", {}))
    weights = softmax_weights(inputs, HEADS)
    entropy = -(weights.clamp(min=1e-12).log() * weights).sum(-1).mean()
    expected = 0.0 if loss == "mse" else entropy.item()
    assert abs(method.distill_loss(inputs, loss).item() - expected) < 1e-6


@pytest.mark.parametrize(("case", "loss"), TRANSFERS, ids=map(name, TRANSFERS))
def test_padding_takes_no_part_in_the_transfer_loss(case, loss):
    method, inputs = one_layer(case, length=30)
    mask = torch.ones(2, 30, dtype=torch.bool)
    padded = Inputs(
        *(torch.cat([torch.randn(x.shape[0], 5, *x.shape[2:], dtype=x.dtype), x], 1) for x in inputs[:6]),
        torch.cat([torch.zeros(2, 5, dtype=torch.bool), mask], 1),
    )
    found = []
    for given in (padded, inputs):
        value = method.distill_loss(given, loss)
        found.append((value, *torch.autograd.grad(value, list(method.parameters()), allow_unused=True)))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-8)


def test_softmax_output_is_softmax_weights_times_values():
    _, inputs = one_layer(("softmax", {}))
    weights = softmax_weights(inputs, HEADS).double()
    close(softmax_output(inputs, HEADS), torch.einsum("bhti,bihd->bthd", weights, repeated(inputs.v, HEADS)))


# --- parameter counts that the papers state ---


@pytest.mark.parametrize(
    ("method", "given", "percent"),
    [("hedgehog", {}, 0.495), ("hedgehog", {"bias": True}, 0.499), ("hedgehog", {"tied": True}, 0.248)],
)
def test_hedgehog_adds_what_its_paper_says_to_llama_2_7b(method, given, percent):
    """0.495 % of Llama-2-7B: only per-head, untied, bias-free maps come to that."""
    with torch.device("meta"):
        layer = load(method)(Heads(4096, 32, 32, 128, 128**-0.5), options(method, given))
    added = 32 * sum(p.numel() for p in layer.parameters())
    assert abs(100 * added / (6_738_415_616 + added) - percent) < 0.003


# --- what is refused ---


def test_unknown_method_option_and_architecture_name_the_possible_ones():
    with pytest.raises(
        ValueError, match="no attention method 'cosformer'; have delta, feature_map, hedgehog"
    ):
        linearize(teacher(), "cosformer")
    with pytest.raises(ValueError, match="options of 'lizard': unknown key 'widow'; possible: .*window"):
        linearize(teacher(), "lizard", widow=3)
    with pytest.raises(ValueError, match="gates 'channel' take bounded features: softmax_pm; got exp_pm"):
        linearize(teacher(), "lizard", gates="channel", feature="exp_pm")
    with pytest.raises(ValueError, match="gate 'low_rank' is one per channel; got gates 'head'"):
        linearize(teacher(), "lizard", gate="low_rank")
    with pytest.raises(
        ValueError, match="are of the gate 'pool'; got pool 'max' and pool_bias 0 with gate 'sigmoid'"
    ):
        linearize(teacher(), "lizard", pool="max")
    with pytest.raises(
        ValueError,
        match="pool 'time' goes over the means of keys, one a head; got gates 'channel', possible: head",
    ):
        linearize(teacher(), "lizard", gate="pool", gates="channel", pool="time")
    for gate in ("mamba2", "pool", "none"):
        with pytest.raises(
            ValueError, match=f"sigmoid and low_rank; got gate_temperature 16 with gate '{gate}', possible: 1"
        ):
            linearize(teacher(), "lizard", gate=gate, gate_temperature=16.0)
    with pytest.raises(ValueError, match="a window of 0 is none; got meta 4, possible: 0"):
        linearize(teacher(), "lizard", window=0)
    with pytest.raises(ValueError, match="variant 'code' has features softmax_pm, exp_pm; got 'relu'"):
        linearize(teacher(), "lolcats", feature="relu")
    with pytest.raises(ValueError, match="cannot linearize Linear; can: .*LlamaForCausalLM"):
        linearize(torch.nn.Linear(2, 2), "lizard")
    with pytest.raises(ValueError, match="linearize RelinearLlamaForCausalLM, which is linearized already; "):
        linearize(of(("hedgehog", {})), "lizard")
    adapted = get_peft_model(teacher(), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="linearize PeftModel: merge its adapters, merge_and_unload"):
        linearize(adapted, "lizard")


def test_a_cache_of_another_batch_or_kind_is_refused():
    model = of(("hedgehog", {}))
    cache = model.make_cache()
    model(tokens(5), past_key_values=cache)
    with pytest.raises(ValueError, match="batch of 2; got inputs of batch 3"):
        model(tokens(1, batch=3), past_key_values=cache)
    from transformers import DynamicCache

    with pytest.raises(TypeError, match="RecurrentCache; got DynamicCache"):
        model(tokens(5), past_key_values=DynamicCache())


@pytest.mark.parametrize(
    ("keep", "layers"),
    [
        ([1], [1]),
        ([2, 0], [0, 2]),
        (0.5, [1, 3]),
        (0.25, [3]),
        (0, []),
        (0.75, [1, 2, 3]),
        (None, []),
        ({"first": 0.5}, [0, 1]),
        ({"last": 0.5}, [2, 3]),
        ({"last": 0.25}, [3]),
        ({"last": 0}, []),
    ],
    ids=str,
)
def test_softmax_layers_can_be_kept(keep, layers, tmp_path):
    model = linearize(teacher(dtype=torch.float32, num_hidden_layers=4), "hedgehog", keep_softmax_layers=keep)
    model.save_pretrained(tmp_path)
    for folder in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
        kinds = [type(layer.method).__module__.rsplit(".", 1)[1] for layer in folder.attention_layers()]
        assert kinds == ["softmax" if i in layers else "hedgehog" for i in range(4)]


@pytest.mark.parametrize(
    ("keep", "got"),
    [
        (1.5, "1.5"),
        ({"first": 1}, "{'first': 1}"),
        ({"middle": 0.5}, "{'middle': 0.5}"),
        ({"first": 0.5, "last": 0.4}, "{'first': 0.5, 'last': 0.4}"),
    ],
)
def test_shares_of_softmax_layers_that_cannot_be_kept(keep, got):
    with pytest.raises(
        ValueError,
        match=rf"a ratio in .0, 1., {{'first': ratio}}, {{'last': ratio}} or a list of layers; got {got}",
    ):
        linearize(teacher(), "hedgehog", keep_softmax_layers=keep)


def test_softmax_layers_that_are_not_there_cannot_be_kept():
    with pytest.raises(ValueError, match=r"must be in 0..1; got \[7\]"):
        linearize(teacher(), "hedgehog", keep_softmax_layers=[7])


def test_the_transfer_trains_a_hybrid_s_other_layers_and_leaves_the_kept_ones():
    model = linearize(teacher(dtype=torch.float32, num_hidden_layers=4), "hedgehog", keep_softmax_layers=0.5)
    for method, inputs in layer_inputs(model, record(model, tokens(20))):
        loss = method.distill_loss(inputs, "mse")
        assert loss.requires_grad == (loss.item() > 1e-12) == bool(list(method.parameters()))


def test_a_teacher_s_local_layers_stay_and_can_be_swapped_on_request():
    kinds = lambda model: [  # noqa: E731
        type(layer.method).__module__.rsplit(".", 1)[1] for layer in model.attention_layers()
    ]
    assert kinds(linearize(teacher("gemma3"), "hedgehog")) == ["softmax", "hedgehog"]
    assert kinds(linearize(teacher("gemma3"), "hedgehog", keep_softmax_layers=[])) == ["hedgehog", "hedgehog"]
    # all local: nothing else would be left to swap
    assert kinds(linearize(teacher("mistral"), "hedgehog")) == ["hedgehog", "hedgehog"]


def test_gemma_3_runs_at_its_own_head_width_which_no_kernel_takes(monkeypatch):
    """Where tensors lie on a GPU, or are said to: attention of heads of 256 runs by the torch form, and what
    the kernels take by them."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    monkeypatch.setattr("relinear_kernels.dispatch.on_gpu", lambda x: True)
    # the kernels are functions of a CPU's tensors then
    monkeypatch.setenv("TRITON_INTERPRET", "0" if device == "cuda" else "1")
    for method in available_methods():
        given = (
            {"window": WINDOW} if method == "window" else {"keep_softmax_layers": 0.0, **dict(FIRST)[method]}
        )
        sizes = {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
        model = of((method, given), family="gemma3", dtype=torch.float32, **sizes).to(device)
        ids = tokens(20).to(device)
        monkeypatch.setenv("RELINEAR_KERNELS", "auto")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the torch form runs
            got = model.generate(ids, max_new_tokens=3, do_sample=False), model(ids, use_cache=False).logits
        monkeypatch.setenv("RELINEAR_KERNELS", "torch")
        assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), got[0]), method
        close(got[1], model(ids, use_cache=False).logits)


def test_what_transformers_does_not_compute_is_said_and_bidirectional_teachers_are_refused():
    with pytest.warns(UserWarning, match="attn_logit_softcapping is set, but transformers does not apply it"):
        linearize(teacher("gemma3", attn_logit_softcapping=20.0), "hedgehog")
    with pytest.raises(ValueError, match="use_bidirectional_attention=True"):
        linearize(teacher("gemma3", use_bidirectional_attention=True), "hedgehog")


def test_lizards_gates_begin_as_the_sigmoid_does_and_forget_what_they_say():
    """At the start Mamba-2's gate and the one of every channel are sigmoid(4); the pooling's follows the key,
    and none keeps everything."""
    x, k = (
        torch.randn(2, 5, SIZES["hidden_size"], dtype=torch.float64),
        torch.randn(2, 5, 2, 8, dtype=torch.float64),
    )
    inputs = Inputs(x, torch.randn(2, 5, 6, 8, dtype=torch.float64), k, k)
    heads = Heads(SIZES["hidden_size"], 6, 2, 8, 8**-0.5)
    found = {}
    for gate, gates in (
        ("sigmoid", "head"),
        ("mamba2", "head"),
        ("low_rank", "channel"),
        ("pool", "head"),
        ("none", "head"),
    ):
        found[gate] = load("lizard")(heads, options("lizard", {"gate": gate, "gates": gates}))._log_gate(
            inputs
        )
    start = torch.nn.functional.logsigmoid(torch.tensor(4.0, dtype=torch.float64))
    for gate in ("sigmoid", "mamba2", "low_rank"):
        torch.testing.assert_close(found[gate], start.expand_as(found[gate]))
    assert found["low_rank"].shape == (2, 5, 6, 8) and not found["none"].any()
    torch.testing.assert_close(found["pool"].exp(), k.mean(-1).sigmoid().repeat_interleave(3, -1))


def test_each_reading_of_the_pooling_pools_what_it_says():
    k = torch.randn(2, 5, 2, 8, dtype=torch.float64)
    inputs, heads = Inputs(k.new_zeros(2, 5, 1), k.new_zeros(2, 5, 6, 8), k, k), Heads(1, 6, 2, 8, 1.0)
    near = torch.stack([k[..., max(i - 1, 0) : i + 2].mean(-1) for i in range(8)], -1)
    most = torch.stack([k[..., max(i - 1, 0) : i + 2].amax(-1) for i in range(8)], -1)
    for given, pooled in (
        ({"pool": "max"}, k.amax(-1)),
        ({"gates": "channel"}, near),
        ({"gates": "channel", "pool": "max"}, most),
    ):
        gate = load("lizard")(heads, options("lizard", {"gate": "pool", "pool_bias": 4.0} | given))._log_gate(
            inputs
        )
        torch.testing.assert_close(gate.exp(), (pooled + 4).sigmoid().repeat_interleave(3, 2))


def test_the_pooling_over_time_goes_over_the_last_four_keys_that_are_real():
    k, heads = torch.randn(2, 9, 2, 8, dtype=torch.float64), Heads(1, 6, 2, 8, 1.0)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :3] = False
    inputs = Inputs(k.new_zeros(2, 9, 1), k.new_zeros(2, 9, 6, 8), k, k, key_mask=mask)
    gate = load("lizard")(
        heads, options("lizard", {"gate": "pool", "pool": "time", "pool_bias": 4.0})
    )._log_gate(inputs)
    assert not gate[0, :3].any()
    for row, first in ((0, 3), (1, 0)):
        for i in range(first, 9):
            pooled = k[row, max(first, i - 3) : i + 1].mean((0, 2))
            torch.testing.assert_close(gate[row, i].exp(), (pooled + 4).sigmoid().repeat_interleave(3))


def test_a_tempered_gate_is_a_root_of_the_plain_one():
    """GLA's: a temperature of 16 and no bias at the start remember the 16th root of one half of each
    token."""
    heads, x = Heads(8, 6, 2, 8, 1.0), torch.randn(2, 5, 8, dtype=torch.float64)
    inputs = Inputs(x, x.new_zeros(2, 5, 6, 8), x.new_zeros(2, 5, 2, 8), x.new_zeros(2, 5, 2, 8))
    for form in ({"gate": "sigmoid"}, {"gate": "low_rank", "gates": "channel"}):
        found = []
        for temperature in (1.0, 16.0):
            torch.manual_seed(0)
            layer = load("lizard")(
                heads, options("lizard", {"gate_bias": 0.0, "gate_temperature": temperature} | form)
            ).double()
            assert (layer._log_gate(inputs).exp() == 0.5 ** (1 / temperature)).all()
            torch.nn.init.normal_(layer.gate.weight)
            found.append(layer._log_gate(inputs))
        torch.testing.assert_close(found[1] * 16, found[0])


def test_a_linear_part_with_rope_is_the_plain_one_of_turned_keys_and_queries():
    (method, inputs), given = (
        one_layer(("lizard", {"window": 0, "meta": 0, "linear_rope": True})),
        {"window": 0, "meta": 0},
    )
    plain, turned = load("lizard")(HEADS, options("lizard", given)).double(), inputs.rotated()
    plain.load_state_dict(method.state_dict())
    close(method(inputs)[0], plain(inputs._replace(q=turned[0], k=turned[1]))[0])
    assert method.unbounded_rotary and not plain.unbounded_rotary


@pytest.mark.parametrize("case", CASES, ids=name)
def test_an_adapter_on_any_linear_layer_trains_and_merges_into_the_same_model(case):
    model, ids = linearize(teacher(dtype=torch.float64), case[0], **case[1]), tokens(37)
    linear = {
        n for n, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and n != "lm_head"
    }
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=sorted(linear), init_lora_weights=False))
    torch.manual_seed(2)
    with torch.no_grad():
        for n, p in adapted.named_parameters():
            if "lora_" in n:
                p.normal_(std=0.2)
            # W_2 is 0 at the start, which stops the gradient of W_1, and alpha that of a whole state
            elif "narrow" in n or "method.gate" in n or n.endswith(("method.alpha", "wide.weight")):
                p.add_(0.3 * torch.randn_like(p))
    out = adapted(ids, labels=ids, use_cache=False)
    out.loss.backward()
    dead = [n for n, p in adapted.named_parameters() if "lora_" in n and (p.grad is None or not p.grad.any())]
    assert not dead
    close(adapted.merge_and_unload()(ids, use_cache=False).logits, out.logits, 1e-4)
