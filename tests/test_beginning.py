"""How a prompt begins: with the BOS of a tokenizer that has one, once, wherever a prompt is built; and with
nothing for other tokenizers."""

import functools
from pathlib import Path

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from relinear.families.tiny import byte_tokenizer
from relinear.get import needles, passkeys
from relinear.get.beginning import begun
from relinear.get.needles import Cutter
from relinear.get.text import document_separator
from relinear.measure import answers, haystack, kv_recall, needle, needle_plane, qasper_yes_no, ruler, samples
from relinear.measure._contexts import ALONE
from relinear.plan.job import Job

BOS = "<|begin|>"
JOB = Job("toy", {"seed": 0}, {}, out=Path("out"), work=Path("work"))


def beginning():
    """The byte tokenizer with a BOS that its template puts before every text, as Llama 3's does."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": BOS})
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = None
    return tokenizer


def plane(tokenizer):
    options = needle_plane.Options(
        lengths=(900,), prompts=2, batch_tokens=900, distance_bin=900, filler="noise"
    )
    return [
        n.prompt for _, n in needle_plane.drawn(passkeys.Keys(tokenizer, "test"), None, options, JOB)[900]
    ], 900 - 8 - needle_plane.AROUND


def cells(tokenizer):
    options = needle.Options(lengths=(900,), depths=2, prompts=2, batch_tokens=900, filler="noise")
    return [n.prompt for _, n in needle.drawn(Cutter(tokenizer), None, options, JOB)[900]], 900


def pairs(tokenizer):
    return [kv_recall.drawn(Cutter(tokenizer), 4, gap, "seed").prompt for gap in (0, 50)], None


def trained(tokenizer):
    cutter = passkeys.Keys(tokenizer, "train")
    found = [passkeys.example(cutter, 900, f"{i}", filler=needles.noise(cutter)) for i in range(3)]
    assert all(len(n.prompt) + len(passkeys.answer_of(n)) == 900 for n in found), (
        "with the answer as long as was asked for"
    )
    return [n.prompt for n in found], None


def hidden(context, tokenizer):
    every = [
        haystack.Question(i, f"Title {i}", f"Passage {i} " + "y" * 90, f"What of {i}?", (f"end {i}",))
        for i in range(40)
    ]
    options = haystack.Options(contexts=(1200,), batch_tokens=1, prompts=2, new_tokens=7)
    return [
        haystack.hide(tokenizer, every[i], 0.5, context, every, options, JOB).prompt.tokens for i in range(3)
    ], context and context - 7


def papers(context, tokenizer):
    every = [
        qasper_yes_no.Question(
            i,
            f"Title {i}",
            f"We say of {i} much. " + "x " * 900,
            f"We say of {i} much.",
            f"Is it {i}?",
            "Yes" if i % 2 else "No",
        )
        for i in range(6)
    ]
    options = qasper_yes_no.Options(items={"qasper": None}, contexts=(900,), batch_tokens=1)
    return [
        p.tokens for p in qasper_yes_no.built(tokenizer, every[:4], every[4:], options, "toy")[0][context]
    ], context and context - 4


def passages(tokenizer):
    whole = [
        answers.Question("Here is a story of Ann, who lived in Paris.", "Where did she live?", ("Paris",))
    ]
    [item] = answers.placed("squad", whole, tokenizer, 64)
    text = tokenizer.decode(item.prompt)
    assert item.distance == len(text) - (text.index("Paris.") + len("Paris")) + 1, (
        "counted from the end: one byte a token"
    )
    return [item.prompt], None


def tasks(tokenizer):
    words = sorted({*kv_recall.KEYS, *kv_recall.VALUES})
    options = ruler.Options(lengths=(2048,), prompts=2, batch_tokens=1, new_tokens=10)
    asked = []
    for task in ("niah_single_1", "vt"):
        asked += ruler.questions(
            tokenizer, task, functools.partial(ruler.tasks(words)[task], 2048), 2048, options, JOB
        )
    found = [ruler._ids(tokenizer, question.text) for question in asked]
    assert all(len(prompt) <= 2038 for prompt in found), "the BOS has its place in the length"
    return found, None


def questions(tokenizer):
    tokenizer.chat_template = None
    return [samples.worded(tokenizer, "Why?")], None


BUILT = {
    "needle": cells,
    "needle_plane": plane,
    "kv_recall": pairs,
    "passkeys": trained,
    "ruler": tasks,
    "answers": passages,
    "samples": questions,
    "haystack": functools.partial(hidden, 1200),
    "haystack, alone": functools.partial(hidden, ALONE),
    "qasper": functools.partial(papers, 900),
    "qasper, alone": functools.partial(papers, ALONE),
}


@pytest.mark.parametrize("what", BUILT)
def test_every_prompt_begins_with_the_bos_once_and_is_as_long_as_without(what):
    tokenizer, plain = beginning(), byte_tokenizer()
    prompts, length = BUILT[what](tokenizer)
    without, same_length = BUILT[what](plain)
    for prompt, other in zip(prompts, without, strict=True):
        assert prompt[0] == tokenizer.bos_token_id and prompt.count(tokenizer.bos_token_id) == 1
        assert plain.bos_token_id not in other, "a tokenizer that adds nothing gets nothing"
        if length:
            assert len(prompt) == len(other) == length
    # nothing is cut to a length
    if what in ("kv_recall", "answers", "samples", "haystack, alone", "qasper, alone"):
        assert [prompt[1:] for prompt in prompts] == without


def test_a_prompt_begins_as_lm_eval_s_prompts_and_as_documents_do_where_the_tokenizer_has_a_bos():
    tokenizer = beginning()
    assert begun(tokenizer) == document_separator(tokenizer) == [tokenizer.bos_token_id]
    assert (
        begun(tokenizer, tokenizer("One two", add_special_tokens=False)["input_ids"])
        == tokenizer("One two")["input_ids"]
    )
    plain = byte_tokenizer()
    assert begun(plain, [5, 6]) == [5, 6] and document_separator(plain) == [plain.bos_token_id]
    assert begun(plain, plain("One", add_special_tokens=False)["input_ids"]) == plain("One")["input_ids"], (
        "as lm-eval's"
    )


def test_pass_keys_to_train_on_are_as_long_with_a_bos_and_learn_their_answer(tmp_path):
    tokenizer = beginning()
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "out").mkdir()
    shape = {"length": 800, "keys": 5, "key_tokens": (5, 8), "mention": 1}
    settings = {"filler": "noise", "examples": 3, "heldout": 2, "learn": "answer", "seed": 0, **shape}
    passkeys.work(Job("toy", settings, {"model": tmp_path / "model"}, out=tmp_path / "out", work=tmp_path))
    tokens, labels = (
        np.load(tmp_path / f"out/train_{kind}.npy").reshape(3, 800) for kind in ("tokens", "labels")
    )
    assert (tokens[:, 0] == tokenizer.bos_token_id).all() and (tokens == tokenizer.bos_token_id).sum() == 3
    assert (labels[:, 0] == passkeys.IGNORED).all() and (labels != passkeys.IGNORED).sum() > 3 * 5
