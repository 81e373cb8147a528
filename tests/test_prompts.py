"""Prompts and their answers: streams to train on, what is held out to answer, and ROUGE of what a model
writes."""

import json

import numpy as np
import pytest
import torch
from test_in_context import teacher

from relinear.errors import UserError
from relinear.families.tiny import byte_tokenizer
from relinear.get import asked as heldout
from relinear.get import text
from relinear.get.model import save_model
from relinear.get.packed import IGNORED
from relinear.get.prompts import READERS, build
from relinear.linearize.model import linearize
from relinear.measure import rouge
from relinear.measure._answering import Written
from relinear.plan.job import Job
from relinear.plan.strict import ConfigError, parse
from relinear.stages.prompts import Options

TOKENIZER = byte_tokenizer()
SEPARATOR = text.document_separator(TOKENIZER)
TEMPLATE = "Summarize this {aspect}:\n{input}\n---\nSummary:\n{output}"
END = TOKENIZER.eos_token_id


def built(out, **changes) -> dict:
    return build(
        out, TOKENIZER, "smoke", None, **({"template": TEMPLATE, "train_tokens": 10**6, "seed": 0} | changes)
    )


def test_samples_are_whole_and_all_of_them_is_learned_but_the_separator(tmp_path):
    facts = built(tmp_path)
    stories = {split: list(READERS["smoke"](None, split)) for split in ("train", "heldout")}
    for split, own in stories.items():
        tokens, labels = (np.load(tmp_path / f"{split}_{kind}.npy") for kind in ("tokens", "labels"))
        samples = [f"Summarize this story:\n{s['input']}\n---\nSummary:\n{s['output']}" for s in own]
        ends = np.flatnonzero(tokens == END)
        assert len(ends) == len(samples) == facts[split]["samples"] > 1
        said = [TOKENIZER.decode(x[len(SEPARATOR) : -1].tolist()) for x in np.split(tokens, ends[:-1] + 1)]
        assert said == samples if split == "heldout" else sorted(said) == sorted(samples) != said
        assert ((labels == IGNORED) == (tokens == SEPARATOR[0])).all() and (
            labels[labels != IGNORED] == tokens[labels != IGNORED]
        ).all()
    held = heldout.read(tmp_path)
    assert [one.output for one in held] == [s["output"] for s in stories["heldout"]]
    assert TOKENIZER.decode(held[0].prompt[len(SEPARATOR) :]).endswith("\n---\nSummary:\n")


def test_a_dose_ends_what_is_trained_on_and_a_seed_orders_it(tmp_path):
    built(tmp_path / "a"), built(tmp_path / "b", seed=1), built(tmp_path / "c", train_tokens=500)
    a, b, c = (np.load(tmp_path / name / "train_tokens.npy") for name in "abc")
    assert (a != b).any() and (a[:500] == c).all() and len(c) == 500
    assert len({(tmp_path / name / heldout.HELDOUT).read_text() for name in "abc"}) == 1


def test_published_sets_are_read_as_they_lie(tmp_path):
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.csv").write_text(
            f'id,dialogue,summary\n1,"A: hi\nB: {split}",They greet.\n2,,None said.\n', encoding="utf-8"
        )
        paper = {
            "sentences": {"abstract": ["One .", f"{split} ."]},
            "summary": {"challenge": "Hard.", "outcome": "Easy."},
        }
        # whose last line has no end
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(paper), encoding="utf-8")
    assert list(READERS["samsum"](tmp_path, "heldout")) == [
        {"input": "A: hi\nB: test", "output": "They greet."}
    ]
    entry = (
        "Package: {0}\nDescription-md5: 0\nDescription-en: {0} (tool)\n {1} begins.\n And\n .\n ends{2}.\n\n"
    )
    (tmp_path / "Translation-en").write_text(
        "".join(
            entry.format(*x)
            for x in (("a", "One", " w" * 40), ("a-data", "One", " w" * 50), ("b", "Two", ""))
        )
    )
    assert list(READERS["synopses"](tmp_path, "heldout")) == [
        {"input": "One begins. And\nends" + " w" * 40 + ".", "output": "a (tool)"}
    ]
    assert not list(READERS["synopses"](tmp_path, "train"))
    assert [(s["aspect"], s["input"], s["output"]) for s in READERS["aclsum"](tmp_path, "train")] == [
        ("challenge", "One . train .", "Hard."),
        ("outcome", "One . train .", "Easy."),
    ]


def test_mistakes_are_told_before_any_work(tmp_path):
    with pytest.raises(
        UserError, match="the template asks for 'speaker'; samples of 'smoke' have input, aspect, output"
    ):
        built(tmp_path, template="{speaker}: {output}")
    with pytest.raises(UserError, match="no prompts of 'brown'; have samsum, synopses, aclsum, smoke"):
        build(tmp_path, TOKENIZER, "brown", None, template=TEMPLATE, train_tokens=1, seed=0)
    with pytest.raises(UserError, match="no samples of 'samsum', train, in"):
        build(tmp_path, TOKENIZER, "samsum", tmp_path, template=TEMPLATE, train_tokens=1, seed=0)
    for template in ("{input}", "{output}", "{output}: {input}", "{input} {output}."):
        with pytest.raises(ConfigError, match="ends with {output}"):
            parse(Options, {"source": "smoke", "template": template}, "data.yaml: toy")


# --- what a model writes ---


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A job of the metric, whose data have prompts of the byte tokenizer."""
    folder = tmp_path_factory.mktemp("asked")
    built(folder / "data")
    save_model("random", folder / "model", "float32")
    (folder / "out").mkdir()
    return Job(
        name="toy",
        settings={"seed": 0, "data": "stories"},
        parents={"model": folder / "model", "data": folder / "data"},
        out=folder / "out",
        work=folder,
    )


def options(**given):
    return rouge.Options(**({"items": {"prompts": 3}, "batch_size": 2, "new_tokens": 5} | given))


@pytest.mark.parametrize("method", [None, "hedgehog"])
def test_prompts_of_several_lengths_are_answered_together_as_alone(asked, method):
    model = teacher() if method is None else linearize(teacher(), method)
    prompts = [list(range(10, 10 + n)) for n in (5, 9, 9, 3)]
    settings = {"padding": END, "eos_token_id": END, "max_new_tokens": 5}
    together = [written.tokens for written in rouge.write(model, prompts, "toy", batch_size=4, **settings)]
    assert together == [
        written.tokens for written in rouge.write(model, prompts, "toy", batch_size=1, **settings)
    ]
    greedy = model(torch.tensor([prompts[0]])).logits[0, -1].argmax().item()
    assert together[0][0] == greedy and all(len(tokens) == 5 or END in tokens for tokens in together)


def test_the_scores_are_those_of_what_was_written_up_to_its_end(asked, monkeypatch):
    said = ["{0}", "{0} And more words.", ""]
    right = [one.output for one in heldout.read(asked.parents["data"])]
    answers = [
        [*TOKENIZER(x.format(y))["input_ids"], *([END, 65] if i != 1 else [])]
        for i, (x, y) in enumerate(zip(said, right, strict=False))
    ]
    monkeypatch.setattr(
        rouge, "write", lambda *_, **__: [Written(tokens, i == 1) for i, tokens in enumerate(answers)]
    )
    readings = {r.metric: r for r in rouge.measure(teacher(), asked.parents["data"], options(), asked)}
    n = len(right[1].split())
    expected = [1.0, 2 * n / (2 * n + 3), 0.0]
    rows = [json.loads(line) for line in (asked.out / "items.jsonl").read_text().splitlines()]
    assert [row["rouge1"] for row in rows] == pytest.approx(expected) and [row["ended"] for row in rows] == [
        True,
        False,
        True,
    ]
    assert (
        readings["rouge1"].value == pytest.approx(sum(expected) / 3)
        and readings["rouge1"].n == 3
        and readings["rouge1"].of == "stories"
    )
    assert (
        readings["ended"].value == pytest.approx(2 / 3)
        and readings["tied"].value == pytest.approx(1 / 3)
        and readings["rougeL"].stderr > 0
    )


def test_more_prompts_than_there_are_and_one_beyond_the_positions_are_refused(asked):
    data = asked.parents["data"]
    for given, model, said in ((options(items={"prompts": 10**4}), teacher(), "10000 prompts asked for"),
                               (options(), teacher(64), "the model reads 64")):  # fmt: skip
        with pytest.raises(UserError, match=said):
            list(rouge.measure(model, data, given, asked))
    with pytest.raises(UserError, match="make: prompts"):
        list(rouge.measure(teacher(), asked.parents["model"], options(), asked))
