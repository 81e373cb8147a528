"""Texts that ask for what stood far before: what they ask for stood there, no farther back than their rung,
and no word of it is a measure's; trainings climb rung after rung."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from test_finetune import LENGTH, inputs, job  # noqa: F401
from test_passkeys import model  # noqa: F401

from relinear.errors import UserError
from relinear.families.tiny import byte_tokenizer
from relinear.get import lookups, needles
from relinear.get.needles import Cutter
from relinear.get.packed import IGNORED, Packed, batch_indices, micro_batches
from relinear.measure import kv_recall, ruler
from relinear.plan.job import Job, Link
from relinear.plan.plan import Plan
from relinear.stages._stage import Node
from relinear.stages.lookups import Options
from relinear.train import finetune

TOKENIZER = byte_tokenizer()
CUTTER = Cutter(TOKENIZER)
SIZE, MANY = 1200, (2, 12)
WORDS = ["amber" + a + b for a in "abcdefgh" for b in "xyzuvw"]
TEXT = " ".join(f"{w} {n} {w[::-1]}," for n in range(40) for w in ("owls", "cats", "dogs", "newts", "toads"))
PIECE = TOKENIZER(TEXT, add_special_tokens=False)["input_ids"][:SIZE]


def drawn(i=0, most=512, many=MANY):
    return lookups.example(CUTTER, (PIECE, PIECE), WORDS, f"seed {i}", many=many, most=most)


@pytest.mark.parametrize("most", [96, 300, 900])
def test_what_is_asked_for_stood_there_and_no_farther_back(most):
    found = [drawn(i, most) for i in range(30)]
    kinds = {one.kind for example in found for one in example.asked}
    assert kinds == {"pair", "copy"}
    for example in found:
        assert len(example.tokens) == len(example.labels) == SIZE
        for one in example.asked:
            assert lookups.NEAREST <= one.distance <= most
            since = one.begin - one.distance
            answer = example.tokens[one.begin : one.end]
            assert example.labels[one.begin : one.end] == answer
            if one.kind == "copy":
                assert example.tokens[since - len(answer) : since] == answer
                known = example.tokens[one.begin - lookups.KNOWN : one.begin]
                assert example.tokens[since - len(answer) - lookups.KNOWN : since - len(answer)] == known
            else:  # the value stood behind the key that is asked for
                value = TOKENIZER.decode(answer).strip(" .|\n")
                before = TOKENIZER.decode(example.tokens[:since])
                assert before.endswith(f" {value}")
                asked = TOKENIZER.decode(example.tokens[one.begin - 60 : one.begin])
                line = before[before[: -len(value)].rstrip().rfind("\n") :]
                keys = [w for w in WORDS if w in asked and w != value]
                assert any(key in line for key in keys)
    longest = max(one.distance for example in found for one in example.asked)
    assert longest > 0.8 * most


def test_the_rest_is_the_text_with_its_labels_and_what_nobody_can_know_is_not_learned():
    example = drawn()
    answers = np.zeros(SIZE, bool)
    for one in example.asked:
        answers[one.begin : one.end] = True
    learned = np.array(example.labels) != IGNORED
    own = [
        t
        for t, kept, is_answer in zip(example.tokens, learned, answers, strict=True)
        if kept and not is_answer
    ]
    assert own == PIECE[: len(own)] and (~learned).any()


def test_a_sequence_is_its_seed():
    assert drawn(1) == drawn(1) and drawn(1).tokens != drawn(2).tokens


def test_no_word_and_no_form_is_a_measure_s():
    assert {*needles.NAMES, *kv_recall.KEYS, *kv_recall.VALUES} <= lookups.AVOIDED
    text = np.array(TOKENIZER(" ".join((*lookups.AVOIDED, *WORDS)), add_special_tokens=False)["input_ids"])
    train, test = lookups.words_of(CUTTER, text).values()
    assert not {*train, *test} & lookups.AVOIDED and not {*train} & {*test} and train and test
    asked = {form.ask.format(key="k") for form in lookups.FORMS} | {lookups.AGAIN}
    lines = {form.line.format(key="k") for form in lookups.FORMS}
    measures = (
        kv_recall.HEADER + kv_recall.AGAIN + "\n- k:" + needles.HEADER + ruler.NIAH + ruler.VT
    ).lower()
    measures += " the red pass key is 12. remember it. what is the red pass key? the red pass key is"
    assert not [x for x in asked | lines if x.strip().lower() in measures]


# --- the data of a job ---


@pytest.fixture
def text(tmp_path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    many = np.array([np.roll(PIECE, i * 7) for i in range(9)], np.int32)
    spoken = TOKENIZER(" ".join(WORDS), add_special_tokens=False)["input_ids"]
    many[-1, : len(spoken)] = spoken
    for name in ("train_tokens", "train_labels", "heldout_tokens", "heldout_labels"):
        np.save(folder / f"{name}.npy", many.ravel())
    return folder


def made(model, text, out, **changes) -> dict:  # noqa: F811
    settings = Options(text="t", length=SIZE, pairs=(2, 4), distances=(96, 300, 900), share=1.0).model_dump()
    out.mkdir()
    job = Job(  # noqa: F811
        name="toy",
        settings=settings | {"seed": 0} | changes,
        parents={"model": model, "text": text},
        out=out,
        work=out,
    )
    facts = lookups.work(job)
    (out / "metrics.json").write_text(json.dumps(facts))
    return facts


def test_rungs_are_read_one_after_the_other_each_in_an_order_of_its_seed(model, text, tmp_path):  # noqa: F811
    facts = made(model, text, tmp_path / "a")
    packed = Packed(tmp_path / "a", "train", SIZE)
    assert packed.rungs == tuple(facts["rungs"]) == (3, 6) and len(packed) == 9
    read = {
        seed: [
            i for s in range(3) for i in batch_indices(s, n=9, batch_size=3, seed=seed, rungs=packed.rungs)
        ]
        for seed in range(4)
    }
    for order in read.values():
        assert [sorted(order[i : i + 3]) for i in (0, 3, 6)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert len({*map(tuple, read.values())}) > 1
    shares = [
        [
            chosen
            for chosen, _ in micro_batches(
                0, n=9, batch_size=2, accumulate=1, seed=0, rank=r, size=2, rungs=packed.rungs
            )
        ]
        for r in (0, 1)
    ]
    assert {*shares[0][0], *shares[1][0]} <= {0, 1, 2}, "every process is on the same rung"
    assert Packed(text, "train", SIZE).rungs == ()


def test_a_share_of_sequences_is_the_text_as_it_is(model, text, tmp_path):  # noqa: F811
    made(model, text, tmp_path / "a", share=0.5)
    plain = np.load(text / "train_tokens.npy").reshape(-1, SIZE)
    got = np.load(tmp_path / "a/train_tokens.npy").reshape(-1, SIZE)
    same = (plain == got).all(1)
    assert same.any() and not same.all()


def test_a_text_with_too_few_words_is_refused(model, text, tmp_path):  # noqa: F811
    with pytest.raises(
        UserError, match=r"200 pairs of different words asked for, 400 words; the text has \d+"
    ):
        made(model, text, tmp_path / "a", pairs=(2, 200))


def test_a_training_begins_with_the_shortest_distances(inputs, tmp_path, monkeypatch):  # noqa: F811
    folder = tmp_path / "text"
    folder.mkdir()
    for path in (inputs / "text").iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "metrics.json").write_text(json.dumps({"rungs": [4, 8, 12]}))
    asked = job(inputs, tmp_path / "run", "lora", Link("window", {"window": 4}))
    asked.parents = asked.parents | {"text": folder}
    seen, real = [], Packed.sequence
    monkeypatch.setattr(Packed, "sequence", lambda self, i: (seen.append(i), real(self, i))[1])
    finetune.work(asked)
    assert [sorted(seen[i : i + 4]) for i in range(0, 16, 4)] == [
        list(range(i, i + 4)) for i in range(0, 16, 4)
    ]
    assert math.isfinite(json.loads(asked.history.read_text().splitlines()[-1])["loss"])


# --- in the plan ---


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"distances": (64, 32)}, "distances grow"),
        ({"distances": (64, 128)}, "within a sequence of 128 tokens"),
        ({"distances": (64,), "pairs": (8, 4)}, r"the fewest and the most; got \(8, 4\)"),
        ({"distances": (16,)}, "greater than or equal to 32"),
    ],
)
def test_options_that_do_not_fit_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Options(text="t", length=128, **given)


def test_a_text_of_another_length_and_a_second_reading_are_refused(monkeypatch):
    node = Node("finetune", "frontier_state_57_recall")
    assert Plan(scale="smoke").work(node).refused is None
    plan = Plan(scale="smoke")
    monkeypatch.setitem(plan.run("frontier_state_57_recall").run.recipes["finetune"], "epochs", 2)
    assert "which reads it once; got 2 epochs, possible: epochs: 1" in plan.work(node).refused
    text = plan.parents(node)["text"]
    plan = Plan(scale="smoke")
    monkeypatch.setitem(plan.data["story-lookups"].options, "length", 90)
    assert (
        "sequences of 90 tokens" in plan.work(text).refused and "story-pieces (96)" in plan.work(text).refused
    )


def test_arms_that_train_recall_read_the_same_sequences():
    plan = Plan(scale="smollm2")
    arms = ("frontier_teacher_lora", "frontier_window_252", "frontier_state_185")
    texts = {plan.parents(plan.node("finetune", f"{arm}_recall"))["text"] for arm in arms}
    [node] = texts
    assert node.stage == "lookups" and plan.parents(node)["text"].stage == "pieces"
    for arm in arms:
        work = plan.work(plan.node("finetune", f"{arm}_recall"))
        assert work.settings["budget"]["seq_len"] == 2048 and work.settings["budget"]["epochs"] == 1
        assert f"{arm}/finetune" in work.parents
