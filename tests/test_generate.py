"""generate() in all its modes over every method, and the errors for prompts, masks and caches that cannot
work."""

import io
import json
import re
import shutil
import sys
import warnings

import pytest
import torch
from test_laws import CASES, close, name, of, over_pairs, teacher, tokens
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig

from relinear import cli, linearize
from relinear.files import sha256
from relinear.get.model import save_model
from relinear.linearize.assemble import save_method
from relinear.linearize.loading import load_teacher
from relinear.linearize.state import RecurrentCache

SETTINGS = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
# one variant of each method
FIRST = [next(c for c in CASES if c[0] == m) for m in dict.fromkeys(c[0] for c in CASES)]
GREEDY = ("lolcats", {})


def generate(model, prompt, mask=None, **more):
    mask = torch.ones(prompt.shape[:2], dtype=torch.long) if mask is None else mask
    return model.generate(prompt, attention_mask=mask, **{**SETTINGS, **more})


def padded(prompt, pad):
    """The prompt behind `pad` columns of padding, and its mask."""
    mask = torch.cat([torch.zeros(len(prompt), pad, dtype=torch.long), torch.ones_like(prompt)], 1)
    return torch.cat([torch.full((len(prompt), pad), 3), prompt], 1), mask


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=name)
def test_sampling_draws_the_same_with_and_without_a_cache(case, sequences):
    model, settings = (
        of(case),
        {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 0, "num_return_sequences": sequences},
    )

    def sample(use_cache):
        torch.manual_seed(4)
        return generate(model, tokens(9), use_cache=use_cache, **settings)

    drawn = sample(True)
    assert drawn.shape == (2 * sequences, 21)
    assert torch.equal(drawn, sample(False))
    assert len(drawn[:, 9:].unique(dim=0)) == 2 * sequences, "the draws are all alike: nothing was sampled"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_batch_of_unequal_prompts_generates_what_each_does_alone(case):
    model, long, short = of(case), tokens(40, batch=1), tokens(23, batch=1, seed=7)
    row, mask = padded(short, 17)
    batch = generate(model, torch.cat([long, row]), torch.cat([torch.ones_like(long), mask]))
    assert torch.equal(batch[0], generate(model, long)[0])
    assert torch.equal(batch[1, 17:], generate(model, short)[0])


@pytest.mark.parametrize("case", CASES, ids=name)
def test_beams_of_padded_prompts_with_and_without_a_cache(case):
    model, (prompt, mask) = of(case), padded(tokens(9), 5)
    mask[1] = 1
    both = [
        generate(model, prompt, mask, num_beams=3, num_return_sequences=2, use_cache=u) for u in (True, False)
    ]
    assert torch.equal(*both)


class Pieces:
    """Counts the tokens that the model runs."""

    def __init__(self, model):
        self.lengths = []
        self.hook = model.get_input_embeddings().register_forward_pre_hook(
            lambda _, args: self.lengths.append(args[0].shape[1])
        )

    def __enter__(self):
        return self.lengths

    def __exit__(self, *_):
        self.hook.remove()


@pytest.mark.parametrize("pad", [0, 6])
@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_conversation_goes_on_from_its_cache_and_runs_only_what_is_new(case, pad):
    model = of(case)
    prompt, mask = padded(tokens(20), pad)
    mask[1] = 1
    cache = model.make_cache()
    for turn in range(3):
        with Pieces(model) as lengths:
            answer = generate(model, prompt, mask, past_key_values=cache, max_new_tokens=7)
        assert torch.equal(answer, generate(model, prompt, mask, max_new_tokens=7))
        # the last token of the last answer has not been run yet
        assert lengths == [prompt.shape[1] if turn == 0 else 18 + 1] + [1] * 6
        prompt = torch.cat([answer, tokens(18, seed=turn)], 1)
        mask = torch.cat([mask, torch.ones(2, 7 + 18, dtype=torch.long)], 1)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_prompt_prefilled_in_pieces_generates_the_same(case):
    model, (prompt, mask) = of(case), padded(tokens(30), 9)
    mask[1] = 1
    whole = generate(model, prompt, mask)
    for chunk in (1, 7, 64):  # with 7 the first piece is padding alone
        assert torch.equal(generate(model, prompt, mask, prefill_chunk_size=chunk), whole), chunk


@pytest.mark.parametrize("case", FIRST, ids=name)
def test_a_shared_prefix_is_run_once_and_repeated_for_each_continuation(case):
    model, prefix, ends = of(case), tokens(33, batch=1), tokens(4, batch=3, seed=8)
    cache = model.make_cache()
    model(prefix, past_key_values=cache)
    cache.batch_repeat_interleave(3)
    prompts = torch.cat([prefix.expand(3, -1), ends], 1)
    assert torch.equal(generate(model, prompts, past_key_values=cache), generate(model, prompts))
    cache.batch_select_indices(torch.tensor([2]))
    whole = generate(model, prompts)[2:]
    step = model(whole[:, -1:], past_key_values=cache).logits
    close(step, model(whole, use_cache=False).logits[:, -1:])
    cache.reset()
    assert torch.equal(generate(model, prompts, past_key_values=cache), generate(model, prompts))


@pytest.mark.parametrize("case", FIRST, ids=name)
def test_embeddings_can_be_the_prompt(case):
    model, prompt = of(case), tokens(11)
    answer = generate(model, prompt)
    mask = torch.ones_like(prompt)
    from_embeddings = model.generate(
        inputs_embeds=model.get_input_embeddings()(prompt), attention_mask=mask, **SETTINGS
    )
    assert torch.equal(from_embeddings, answer[:, 11:])


@pytest.mark.parametrize("case", FIRST, ids=name)
def test_what_generate_returns_beside_the_tokens(case):
    model, prompt = of(case), tokens(11)
    out = generate(model, prompt, return_dict_in_generate=True, output_logits=True)
    close(torch.stack(out.logits, 1), model(out.sequences, use_cache=False).logits[:, 10:-1])
    assert isinstance(out.past_key_values, RecurrentCache)
    assert out.past_key_values.get_seq_length() == 11 + 12 - 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if c[0] != "softmax"], ids=name)
def test_the_model_knows_its_state_s_bytes(case, dtype):
    model = of(case, dtype=dtype)
    for batch in (1, 3):
        cache = model.make_cache()
        model(tokens(5, batch=batch), past_key_values=cache)
        assert cache.state_bytes() == model.state_bytes(batch) > 0
    # keys and values of windows have the model's dtype, all else is at least float32
    for x in (x for layer in cache.layers for x in leaves(layer.state) if x.is_floating_point()):
        keys = x.ndim == 4 and x.shape[2:] == (2, 8)
        assert x.dtype == (dtype if keys else torch.promote_types(dtype, torch.float32))


def leaves(state):
    return [state] if isinstance(state, torch.Tensor) else [x for part in state for x in leaves(part)]


# --- what is refused ---


def mask_of(*rows):
    return torch.tensor(rows)


def cache_of(model, length=5, batch=2):
    cache = model.make_cache()
    model(tokens(length, batch=batch), past_key_values=cache)
    return cache


def other(method="hedgehog", given=(), **sizes):
    return linearize(teacher(**sizes), method, **dict(given))


REFUSED_PROMPTS = {
    "no tokens": (lambda m: {"inputs": tokens(0)}, r"prompt is empty: got \[2, 0\]"),
    "no embeddings": (
        lambda m: {"inputs_embeds": torch.zeros(1, 0, 48).double()},
        r"prompt is empty: got \[1, 0, 48\]",
    ),
    "a row of padding": (
        lambda m: {"attention_mask": mask_of([1, 1, 1], [0, 0, 0])},
        r"only padding in rows \[1\] of 2",
    ),
    "a row of padding tokens": (
        lambda m: {"inputs": mask_of([0, 0, 0], [1, 1, 1]), "attention_mask": None, "pad_token_id": 0},
        r"only padding in rows \[0\] of 2",
    ),
    "right padding": (
        lambda m: {"attention_mask": mask_of([1, 1, 0], [1, 1, 1])},
        r"padded on the left.*padding at the end of rows \[0\] of 2",
    ),
    "padding between without a state": (
        lambda m: {"attention_mask": mask_of([1, 1, 1], [1, 0, 1]), "use_cache": False},
        r"padding between tokens in rows \[1\] of 2",
    ),
    "right padding by tokens": (
        lambda m: {"inputs": mask_of([1, 2, 0], [1, 2, 3]), "attention_mask": None, "pad_token_id": 0},
        r"padded on the left.*at the end of rows \[0\] of 2",
    ),
    "a longer mask": (
        lambda m: {"attention_mask": torch.ones(2, 4)},
        r"attention_mask must be \[2, 3\]; got \[2, 4\]",
    ),
    "a mask of another batch": (
        lambda m: {"attention_mask": torch.ones(1, 3)},
        r"attention_mask must be \[2, 3\]; got \[1, 3\]",
    ),
    "a mask in 4-D": (
        lambda m: {"attention_mask": torch.ones(2, 1, 3, 3)},
        r"attention_mask must be \[2, 3\]; got \[2, 1, 3, 3\]",
    ),
    "a cache that has it all": (
        lambda m: {"past_key_values": cache_of(m, 3)},
        "holds 3 tokens already; got a prompt of 3",
    ),
    "a cache that has more": (
        lambda m: {"past_key_values": cache_of(m, 5)},
        "holds 5 tokens already; got a prompt of 3",
    ),
    "a cache of another batch": (
        lambda m: {"past_key_values": cache_of(m, 2, batch=3)},
        "batch of 3; got inputs of batch 2",
    ),
    "a cache for one beam": (
        lambda m: {"past_key_values": cache_of(m, 2), "num_beams": 2},
        "batch of 2; got inputs of batch 4",
    ),
    "an assistant": (
        lambda m: {"inputs": tokens(3, batch=1), "attention_mask": None, "assistant_model": teacher()},
        "not supported with stateful",
    ),
    "prompt lookup": (
        lambda m: {"inputs": tokens(3, batch=1), "attention_mask": None, "prompt_lookup_num_tokens": 2},
        "not supported with stateful",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED_PROMPTS)
def test_generate_refuses(wrong):
    make, message = REFUSED_PROMPTS[wrong]
    model, given = of(GREEDY), {"inputs": tokens(3), "attention_mask": torch.ones(2, 3), **SETTINGS}
    given |= make(model)
    if "inputs_embeds" in given:
        del given["inputs"], given["attention_mask"]
    with pytest.raises(ValueError, match=message):
        model.generate(**given)


OTHER_MODELS = {
    "method": (lambda: other("supra"), "'method': 'supra'.*'method': 'lolcats'"),
    "options": (lambda: other("lolcats", {"window": 16}), "'window': 16.*'window': 0"),
    "softmax layers": (
        lambda: linearize(teacher(), "lolcats", keep_softmax_layers=[0]),
        r"softmax_layers': \[0\].*softmax_layers': \[\]",
    ),
    "heads": (
        lambda: other("lolcats", num_attention_heads=4, num_key_value_heads=2),
        "'heads': 4.*'heads': 6",
    ),
    "key heads": (lambda: other("lolcats", num_key_value_heads=3), "'key heads': 3.*'key heads': 2"),
    "head dimension": (lambda: other("lolcats", head_dim=16), "'head dimension': 16.*'head dimension': 8"),
    "layers": (lambda: other("lolcats", num_hidden_layers=3), "'layers': 3.*'layers': 2"),
}


@pytest.mark.parametrize("differs", OTHER_MODELS)
def test_a_cache_of_another_model_is_refused_and_says_what_differs(differs):
    make, message = OTHER_MODELS[differs]
    with pytest.raises(ValueError, match=f"filled by a model with.*{message}"):
        of(GREEDY)(tokens(1), past_key_values=cache_of(make()))


def test_a_new_cache_of_other_depth_is_refused():
    with pytest.raises(ValueError, match="this cache has 5 layers; the model has 2"):
        of(GREEDY)(tokens(1), past_key_values=RecurrentCache(5))


def test_a_model_loaded_again_goes_on_with_the_cache(tmp_path):
    model = of(("lolcats", {"window": 16}), dtype=torch.float32)
    cache = cache_of(model)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    close(
        again(tokens(1), past_key_values=cache).logits,
        model(torch.cat([tokens(5), tokens(1)], 1), use_cache=False).logits[:, -1:],
    )


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 4), r"= \[2, 9\]; got \[2, 4\]"),
        (torch.ones(1, 9), r"= \[2, 9\]; got \[1, 9\]"),
        (torch.ones(9), r"= \[2, 9\]; got \[9\]"),
        (
            mask_of([1] * 3 + [0, 0] + [1] * 4, [1] * 9),
            "has read 5 tokens of row 0, but attention_mask shows 3.*Possible: a mask that hides",
        ),
        (
            mask_of([1] * 9, [0] + [1] * 8),
            "has read 5 tokens of row 1, but attention_mask shows 4.*Possible: a mask that hides",
        ),
    ],
)
def test_a_piece_with_a_wrong_mask_is_refused_and_leaves_the_cache_as_it_was(mask, message):
    model = of(GREEDY)
    cache = cache_of(model)
    with pytest.raises(ValueError, match=message):
        model(tokens(4, seed=3), attention_mask=mask, past_key_values=cache)
    close(
        model(tokens(4, seed=3), past_key_values=cache).logits,
        model(torch.cat([tokens(5), tokens(4, seed=3)], 1), use_cache=False).logits[:, 5:],
    )


def test_an_empty_piece_is_refused():
    with pytest.raises(ValueError, match=r"0 tokens, of shape \[2, 0\]"):
        of(GREEDY)(tokens(0))


@pytest.mark.parametrize("case", CASES, ids=name)
def test_right_padding_is_harmless_where_no_state_is_kept(case):
    model, ids = of(case), tokens(30)
    mask = torch.ones_like(ids)
    mask[0, 21:] = 0
    close(
        model(ids, attention_mask=mask, use_cache=False).logits[0, :21],
        model(ids[:1, :21], use_cache=False).logits[0],
    )
    scored = model(ids, attention_mask=mask)  # nothing asks for a state, and none can be made
    assert scored.past_key_values is None
    close(scored.logits[0, :21], model(ids[:1, :21], use_cache=False).logits[0])


def test_a_conversation_whose_mask_hides_what_the_cache_has_read_is_refused_and_the_advice_can_be_followed():
    model, first, new = of(GREEDY), tokens(6), tokens(5, seed=2)
    cache = model.make_cache()
    model(first, past_key_values=cache)  # row 1 had ended after 4 tokens
    whole, mask = torch.cat([first, new], 1), mask_of([1] * 11, [1] * 4 + [0, 0] + [1] * 5)
    with pytest.raises(
        ValueError,
        match="has read 6 tokens of row 1, but attention_mask shows 4.*or the whole texts with a new cache",
    ):
        generate(model, whole, mask, past_key_values=cache)
    again = generate(model, whole, mask, past_key_values=model.make_cache())
    assert torch.equal(again[1, 11:], generate(model, torch.cat([first[1:, :4], new[1:]], 1))[0, 9:])


@over_pairs
def test_rows_of_a_batch_pause_and_go_on_each_as_it_would_alone(case, family):
    """Padding after tokens and between them, in pieces and single steps: row 1 pauses in the middle of the
    first piece and of the steps."""
    model, real = of(case, family=family), torch.ones(3, 60, dtype=torch.long)
    real[0, :4] = real[1, 13:20] = real[1, 24:27] = real[2, 25] = real[1, 40:50] = real[2, :23] = 0
    ids, cache, out, at = tokens(60, batch=3), model.make_cache(), [], 0
    for length in (20, 2, *[1] * 8, 18, 12):
        out.append(
            model(
                ids[:, at : at + length], attention_mask=real[:, : at + length], past_key_values=cache
            ).logits
        )
        at += length
    out = torch.cat(out, 1)
    for row in range(3):
        seen = real[row].bool()
        close(out[row, seen], model(ids[row, seen][None], use_cache=False).logits[0])


@pytest.mark.parametrize("case", CASES, ids=name)
def test_chats_of_a_batch_that_end_at_different_steps_go_on_from_their_cache(case):
    model, prompt, mask = of(case), *padded(tokens(20), 3)
    mask[1] = 1
    free = [row.tolist() for row in generate(model, prompt, mask)[:, 23:]]
    # the step at which a token ends each row
    first = {t: [[*row, t].index(t) for row in free] for t in free[0] + free[1]}
    end = max(first, key=lambda t: abs(first[t][0] - first[t][1]))
    assert abs(first[end][0] - first[end][1]) > 1
    ending = {"eos_token_id": end, "pad_token_id": end, "max_new_tokens": 12}
    cache = model.make_cache()
    answer = generate(model, prompt, mask, past_key_values=cache, **ending)
    told = answer[:, 23:] == end
    seen = told.cumsum(1) - told.long() == 0
    assert not seen.all()
    whole = torch.cat([answer, tokens(18, seed=5)], 1)
    shown = torch.cat([mask, seen.long(), torch.ones(2, 18, dtype=torch.long)], 1)
    after = generate(model, whole, shown, past_key_values=cache)
    for row in range(2):
        alone = generate(model, whole[row, shown[row].bool()][None])
        assert torch.equal(after[row, whole.shape[1] :], alone[0, int(shown[row].sum()) :])


@pytest.mark.parametrize("use_cache", [None, False])
def test_padding_between_tokens_is_refused_with_and_without_a_cache(use_cache):
    with pytest.raises(
        ValueError, match=r"padding between tokens in rows \[1\] of 2; possible: padding on one side"
    ):
        of(GREEDY)(tokens(5), attention_mask=mask_of([1] * 5, [1, 0, 1, 1, 1]), use_cache=use_cache)


def test_a_state_that_was_not_handed_on_is_refused():
    """What a release that renames the cache's argument once did: each step read one token without history."""
    model = of(GREEDY)
    for given, message in (
        (
            {"attention_mask": torch.ones(2, 6)},
            r"= \[2, 1\]; got \[2, 6\]; the columns before are of a past, but no cache came",
        ),
        (
            {"position_ids": torch.full((2, 1), 5)},
            "no cache came, but position_ids begin at 5.*Possible: the cache that has read them",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            model(tokens(1), use_cache=True, **given)
    with pytest.raises(
        TypeError, match="a cache is given once, as cache or past_key_values; got one as memory"
    ):
        model(tokens(1), use_cache=True, memory=cache_of(model))
    with pytest.raises(TypeError, match="got one as past_key_values and as cache"):
        model(tokens(1), past_key_values=cache_of(model), cache=cache_of(model))
    close(
        model(tokens(1), cache=cache_of(model)).logits,
        model(tokens(1), past_key_values=cache_of(model)).logits,
    )


def test_another_kind_of_cache_is_refused_and_not_ignored():
    model = of(GREEDY)
    with pytest.raises(
        ValueError, match="cache_implementation='static'.*possible: leave cache_implementation out"
    ):
        generate(model, tokens(3), cache_implementation="static")
    with pytest.raises(ValueError, match="cache_implementation='quantized'"):
        model.generate(tokens(3), generation_config=GenerationConfig(cache_implementation="quantized"))
    assert torch.equal(generate(model, tokens(3), cache_implementation="dynamic"), generate(model, tokens(3)))
    with pytest.raises(
        TypeError,
        match=(
            "past_key_values is a RecurrentCache; got DynamicCache|cache is a RecurrentCache; got"
            " DynamicCache"
        ),
    ):
        model(tokens(3), past_key_values=DynamicCache())


def test_attention_weights_are_refused_and_not_left_empty():
    model = of(GREEDY)
    for call in (
        lambda: model(tokens(3), output_attentions=True),
        lambda: generate(model, tokens(3), output_attentions=True),
    ):
        with pytest.raises(ValueError, match="output_attentions=True: .*no T x T weights.*attention_weights"):
            call()


@pytest.mark.parametrize("case", FIRST, ids=name)
def test_generate_computes_the_logits_of_the_last_position_alone(case):
    model, shapes = of(case), []
    hook = model.lm_head.register_forward_hook(
        lambda module, given, logits: shapes.append(tuple(logits.shape))
    )
    generate(model, tokens(300, batch=1), max_new_tokens=3)
    hook.remove()
    assert shapes == [(1, 1, model.config.vocab_size)] * 3


def test_a_linearized_model_cannot_assist_another():
    with pytest.raises(ValueError, match="cannot take tokens back"):
        generate(teacher(), tokens(6, batch=1), assistant_model=of(GREEDY), max_new_tokens=40)


# --- beyond the teacher's positions ---


@pytest.mark.parametrize("case", FIRST, ids=name)
def test_beyond_the_teacher_s_positions_one_warning_says_what_the_papers_saw(case):
    model = linearize(teacher(max_position_embeddings=16), case[0], **case[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, tokens(9), max_new_tokens=8)  # the last token is returned, not run
    with pytest.warns(
        UserWarning, match=f"17 positions are more than the 16 .* {case[0]}'s queries .*LoLCATs fails.*SUPRA"
    ):
        generate(model, tokens(9), max_new_tokens=9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, tokens(30))


def test_packed_rows_are_as_long_as_their_longest_document():
    model = linearize(teacher(max_position_embeddings=16), "lolcats")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(tokens(30), position_ids=torch.arange(15).repeat(2)[None])
    with pytest.warns(UserWarning, match="17 positions are more than the 16"):
        model(tokens(30), position_ids=torch.cat([torch.arange(17), torch.arange(13)])[None])


@pytest.mark.parametrize("given", [{"meta": 0}, {"window_rope": False}], ids=str)
def test_where_no_rotary_angle_grows_nothing_is_warned_of(given):
    model = linearize(teacher(max_position_embeddings=16), "lizard", window=8, **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, tokens(30))


# --- the command ---


def record(folder, config, parents):
    """The record of a finished stage."""
    artefacts = {path.name: {"sha256": sha256(path)} for path in folder.iterdir()}
    names = {"scale": "tiny", "run": folder.parent.name, "stage": folder.name, "measure": "", "key": "k"}
    (folder / "run.json").write_text(
        json.dumps({"schema": 2, **names, "config": config, "parents": parents, "artefacts": artefacts})
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of stages, a model's folder and a run's, and the linearized model in a folder of its
    own."""
    root = tmp_path_factory.mktemp("results")
    save_model("random", root / "models/tiny", "float32")
    record(root / "models/tiny", {}, {})
    model = linearize(load_teacher(root / "models/tiny", torch.float32), "lolcats", window=8)
    stage = root / "runs/lolcats/distill"
    stage.mkdir(parents=True)
    save_method(model, stage / "method.safetensors")
    links = [{"method": "lolcats", "options": {"window": 8}, "steps": []}]
    record(stage, {"links": links}, {"model": {"path": "elsewhere/models/tiny", "key": "k"}})
    model.save_pretrained(root / "saved")
    tokenizer = AutoTokenizer.from_pretrained(root / "models/tiny")
    for copy in ("bare", "chat"):
        shutil.copytree(root / "saved", root / copy)
    for folder, template in (("saved", None), ("chat", "Q: {{ messages[0].content }} A:")):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(root / folder)
    return root


def command(monkeypatch, capsys, *args, stdin=""):
    """Exit code, stdout and stderr of `relinear generate`, in this process."""
    monkeypatch.setattr(
        sys, "argv", ["relinear", "generate", *map(str, args), "--dtype", "float32", "--threads", "1"]
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    monkeypatch.setattr(cli.tracking, "install_signal_handlers", lambda: None)
    code = 0
    try:
        cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    return code, *capsys.readouterr()


def test_what_peft_asks_of_transformers_is_no_warning_of_ours(monkeypatch):
    monkeypatch.setattr(cli.tracking, "install_signal_handlers", lambda: None)
    monkeypatch.setattr(cli, "app", lambda: teacher().is_gradient_checkpointing)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        cli.main()
        assert not shown
        warnings.resetwarnings()
        cli.app()
    assert [warning.category for warning in shown] == [FutureWarning], (
        "transformers warns no more: nor need the filter be there"
    )


@pytest.mark.parametrize(
    ("folder", "state"),
    [("models/tiny", "key-value cache"), ("runs/lolcats", "recurrent"), ("saved", "recurrent")],
)
def test_the_command_prints_the_continuation_and_then_speed_and_state(
    results, monkeypatch, capsys, folder, state
):
    code, text, figures = command(
        monkeypatch, capsys, results / folder, "--prompt", "Once upon", "--max-new-tokens", 20
    )
    assert code == 0
    model = AutoModelForCausalLM.from_pretrained(results / (folder if folder == "models/tiny" else "saved"))
    tokenizer = AutoTokenizer.from_pretrained(results / "models/tiny")
    ids = model.generate(
        **tokenizer("Once upon", return_tensors="pt"), max_new_tokens=20, do_sample=False, pad_token_id=1
    )[0, 9:]
    assert text == tokenizer.decode(ids, skip_special_tokens=True) + "\n"
    lines = figures.strip().splitlines()
    assert re.fullmatch(r"prefill: 9 tokens, \d+\.\d tokens/s", lines[-3])
    assert re.fullmatch(rf"decode: {len(ids)} tokens, \d+\.\d tokens/s", lines[-2])
    # layers, k and v, groups, dim, float32
    size = model.state_bytes() if state == "recurrent" else 2 * 2 * 2 * 16 * 4 * (9 + len(ids) - 1)
    assert re.fullmatch(rf"{state}.*: {size:,} bytes", lines[-1])


def test_a_seed_gives_one_sample_and_stdin_is_a_prompt(results, monkeypatch, capsys):
    def sample(*args, stdin=""):
        settings = ("--max-new-tokens", 12, "--temperature", 1.5, "--top-p", 0.95)
        return command(monkeypatch, capsys, results / "saved", *settings, *args, stdin=stdin)[1]

    first = sample("--prompt", "ab", "--seed", 1)
    assert first == sample("--prompt", "ab", "--seed", 1) == sample("--prompt", "-", "--seed", 1, stdin="ab")
    assert first != sample("--prompt", "ab", "--seed", 2)


def test_a_seed_that_chooses_nothing_is_said_and_one_token_has_no_rate(results, monkeypatch, capsys):
    code, text, figures = command(
        monkeypatch, capsys, results / "saved", "--prompt", "ab", "--seed", 7, "--max-new-tokens", 1
    )
    assert (
        code == 0
        and "--seed chooses among texts that are sampled" in figures
        and "without --temperature or --top-p" in figures
    )
    assert "decode: 1 tokens, too few to time" in figures and "nan" not in figures
    assert (
        "--seed"
        not in command(monkeypatch, capsys, results / "saved", "--prompt", "ab", "--max-new-tokens", 1)[2]
    )


def test_a_chat_puts_the_prompt_into_the_tokenizer_s_template(results, monkeypatch, capsys):
    chat = command(
        monkeypatch, capsys, results / "chat", "--prompt", "why?", "--chat", "--max-new-tokens", 12
    )
    assert chat[0] == 0
    assert (
        chat[1]
        == command(monkeypatch, capsys, results / "saved", "--prompt", "Q: why? A:", "--max-new-tokens", 12)[
            1
        ]
    )


@pytest.mark.parametrize(
    ("folder", "args", "message"),
    [
        ("none", ["--prompt", "x"], "no folder .*none; possible: a run"),
        ("runs", ["--prompt", "x"], "runs is no run: .*possible: a folder with config.json"),
        (
            "bare",
            ["--prompt", "x"],
            r"no tokenizer in .*bare: .*; save one beside the model: tokenizer.save_pretrained\(",
        ),
        ("saved", ["--prompt", ""], "the prompt must be at least one character; got ''"),
        ("saved", ["--prompt", "-"], "the prompt must be at least one character; got ''"),
        ("saved", ["--prompt", "x", "--chat"], "no chat template; possible: .* without --chat"),
        ("saved", ["--prompt", "x", "--max-new-tokens", 0], "--max-new-tokens must be 1 or more; got 0"),
        ("saved", ["--prompt", "x", "--temperature", 0], "--temperature must be above 0.*got 0.0"),
        ("saved", ["--prompt", "x", "--top-p", 1.5], "--top-p must be above 0, at most 1; got 1.5"),
        ("saved", ["--prompt", "x", "--device", "tpu"], "no device 'tpu'; have cpu, cuda"),
    ],
    ids=str,
)
def test_the_command_refuses_in_one_line(results, monkeypatch, capsys, folder, args, message):
    code, text, error = command(monkeypatch, capsys, results / folder, *args)
    assert code != 0 and text == ""
    assert re.fullmatch(f"error: .*{message}.*", error.strip().splitlines()[-1])
    assert "Traceback" not in error
