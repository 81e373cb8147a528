"""Measurements in a model's own context: needles, pairs of words, and answers that it writes."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import made
from synthetic import measurement, paper, reading

from relinear.draw import About
from relinear.draw.cells import rows_of
from relinear.draw.claims import UNTESTED, judge
from relinear.draw.drawing import make
from relinear.draw.drawing import make as draw
from relinear.draw.planned import draw_planned
from relinear.errors import UserError
from relinear.families.tiny import byte_tokenizer, number_tokenizer
from relinear.get import needles
from relinear.get.needles import HEADER, NAMES, Cutter, example, noise, sentences
from relinear.linearize.model import linearize
from relinear.measure import answers, kv_recall, needle, passkey_example, samples
from relinear.measure._answering import Answered, ask, share_of
from relinear.measure._limit import limit_of
from relinear.plan.claims import Claim
from relinear.plan.items import read_items
from relinear.plan.job import Job
from relinear.plan.plan import Plan
from relinear.plan.specs import read
from relinear.plan.strict import ConfigError
from relinear.stages._stage import Node

ROOT = Path(__file__).parents[1]
CUTTER = Cutter(byte_tokenizer())


def teacher(positions=2048):
    """A random model that knows bytes, in float64: argmax has no ties."""
    from relinear.families import load

    return load("tiny").random({"max_position_embeddings": positions}, 0, torch.float64)[0].double()


def prompt(length=900, seed="a", **more):
    return example(CUTTER, length, seed, **{"filler": noise(CUTTER)} | more)


# --- the needle's prompts ---


@pytest.mark.parametrize("length", [700, 701, 1234])
@pytest.mark.parametrize("mention", [1, 2])
def test_a_prompt_has_exactly_its_tokens_its_keys_and_its_question(length, mention):
    found = prompt(length, mention=mention, depth=0.3)
    text = CUTTER.tokenizer.decode(found.prompt)
    assert len(found.prompt) == length and text.startswith(HEADER)
    said = re.findall(r"The (\w+) pass key is (\d+)\. Remember it\.", text)
    assert said == list(zip(found.names, found.keys, strict=True)), "once each, in the order of the text"
    assert len(set(found.names)) == len(set(found.keys)) == 5 and set(found.names) <= set(NAMES)
    assert all(text.count(key) == mention for key in found.keys)
    asked = found.names[found.asked]
    assert text.endswith(f"\n\nWhat is the {asked} pass key? The {asked} pass key is")
    assert [CUTTER.tokenizer.decode(answer) for answer in found.answers] == [f" {key}." for key in found.keys]
    assert all(5 <= len(key) <= 8 for key in found.keys), "one digit a token"


def test_no_needle_stands_beside_another_and_each_behind_a_whole_sentence():
    for seed in map(str, range(30)):
        body = CUTTER.tokenizer.decode(prompt(640, seed).prompt)[len(HEADER) :]
        assert not re.search(r"Remember it\. The \w+ pass key", body)
        assert all(
            body[: match.start()][-1:] in ("", ".") for match in re.finditer(r" The \w+ pass key is \d", body)
        )


@pytest.mark.parametrize("mention", [1, 2])
def test_the_distance_is_counted_and_the_depth_is_as_near_as_sentences_allow(mention):
    for depth in (0.05, 0.35, 0.5, 0.95):
        found = prompt(1600, f"{depth}", mention=mention, depth=depth)
        text = CUTTER.tokenizer.decode(found.prompt)
        key = found.keys[found.asked]
        question = text.index("\n\nWhat is")
        assert found.distance == question - (text.rindex(key) + len(key)), "one byte a token"
        assert found.depth == pytest.approx((text.rindex(key) + len(key)) / 1600)
        longest = max(map(len, noise(CUTTER))) + 60 * mention
        assert abs(found.distance - (1 - depth) * (1600 - len(HEADER) - (len(text) - question))) <= longest


def test_prompts_are_their_seeds_and_their_depths_and_of_nothing_else():
    assert prompt(seed="a") == prompt(seed="a") != prompt(seed="b")
    near, far = (prompt(1600, depth=depth).distance for depth in (0.9, 0.1))
    assert near < 400 < 1000 < far


def test_the_asked_key_is_any_of_the_five_as_often():
    asked = [prompt(700, str(i)).asked for i in range(200)]
    assert set(asked) == set(range(5)) and max(asked.count(i) for i in range(5)) < 80


def test_a_tokenizer_that_joins_digits_gets_keys_with_as_many_tokens():
    joined = SimpleNamespace(ids=lambda text: (0,), size=lambda digits: -(-len(digits) // 3))
    import random

    for tokens in (5, 8):
        key = Cutter.key(joined, random.Random(0), tokens)
        assert -(-len(key) // 3) == tokens
    never = SimpleNamespace(ids=lambda text: (0,), size=lambda digits: 1)
    with pytest.raises(UserError, match="no key of 5 tokens found.*possible: other key_tokens"):
        Cutter.key(never, random.Random(0), 5)


def test_what_cannot_be_written_is_refused_with_what_is_possible():
    with pytest.raises(UserError, match="400 tokens have no room for 5 keys.*possible: .* tokens or more"):
        prompt(400)
    with pytest.raises(UserError, match="possible: a tokenizer of texts"):
        Cutter(number_tokenizer(20))


def test_a_text_s_sentences_are_those_of_its_whole_documents(tmp_path):
    import numpy as np

    tokenizer = CUTTER.tokenizer
    stream = tokenizer(
        "<|endoftext|>One came. Two left! Who?<|endoftext|>It was 3.5 metres.<|endoftext|>Cut off he"
    )["input_ids"]
    np.save(tmp_path / "heldout_tokens.npy", np.array(stream, np.int32))
    assert [tokenizer.decode(s) for s in sentences(CUTTER, tmp_path)] == [
        " One came.",
        " Two left!",
        " Who?",
        " It was 3.5 metres.",
    ]
    np.save(tmp_path / "heldout_tokens.npy", np.array(stream[:5], np.int32))
    with pytest.raises(UserError, match="no whole document.*possible: filler: noise"):
        sentences(CUTTER, tmp_path)


# --- asking ---


MODELS = {"softmax": None, "lizard": {"window": 16}, "lolcats": {"window": 16}, "supra": {}}


@pytest.mark.parametrize("method", MODELS)
def test_greedy_answers_are_those_of_generate_and_scores_those_of_one_pass(method):
    model = teacher() if method == "softmax" else linearize(teacher(), method, **MODELS[method])
    prompts = [prompt(640, str(i)) for i in range(6)]
    tokens = torch.tensor([p.prompt for p in prompts])
    found = ask(model, tokens, [p.answers for p in prompts], 8)
    written = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    assert [a.greedy for a in found] == written[:, 640:].tolist()
    for p, a in zip(prompts, found, strict=True):
        for i in (0, 4):
            whole = torch.tensor([p.prompt + p.answers[i]])
            rows = model(whole, use_cache=False).logits[0, 639:-1].float().log_softmax(-1)
            wanted = rows.gather(1, torch.tensor(p.answers[i])[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(a.scores[i]), wanted, rtol=1e-3, atol=1e-3)
            assert a.likeliest[i] == (rows.argmax(-1) == torch.tensor(p.answers[i])).tolist()
    exact = [a.greedy[: len(p.answers[0])] == p.answers[0] for p, a in zip(prompts, found, strict=True)]
    assert exact == [all(a.likeliest[0]) for a in found], (
        "greedy decoding is right where every token of the answer is the likeliest"
    )


def test_a_long_prompt_read_in_pieces_is_answered_as_at_once(monkeypatch):
    model = linearize(teacher(), "lizard", window=16)
    p = prompt(700)
    whole = ask(model, torch.tensor([p.prompt]), [p.answers], 6)
    monkeypatch.setattr("relinear.measure._answering.PIECE", 128)
    [cut] = ask(model, torch.tensor([p.prompt]), [p.answers], 6)
    assert cut.greedy == whole[0].greedy and cut.scores[2] == pytest.approx(whole[0].scores[2], abs=1e-4)


def test_softmax_ends_at_its_positions_and_a_constant_memory_reads_on():
    assert limit_of(teacher(512)).tokens == 512 == limit_of(linearize(teacher(512), "softmax")).tokens
    assert limit_of(linearize(teacher(512), "lizard", keep_softmax_layers=0.5)).tokens == 512, (
        "a layer that is kept grows"
    )
    assert all(
        limit_of(linearize(teacher(512), method)).tokens is None
        for method in ("lizard", "lolcats", "supra", "hedgehog", "t2r")
    )


def test_the_choice_is_by_token_and_wilson_s_error_is_not_zero():
    answered = Answered([], [[-1.0], [-0.4, -0.8], [-5.0, -0.1]], [[], [], []])
    assert answered.choice == 1 and answered.mean(1) == pytest.approx(-0.6)
    value, error, n = share_of([True] * 20)
    assert value == 1 and 0.02 < error < 0.05 and n == 20
    value, error, n = share_of([True] * 500 + [False] * 500)
    assert error == pytest.approx((0.25 / 1000) ** 0.5, rel=0.01)


# --- what is said about the answers ---

KEYS = ["11111", "234567", "89012", "3456789", "90909"]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (" 89012 and", "unended"),
        (" 11111.", "first key"),
        (" 90909.", "last key"),
        (" 234567.", "other key"),
        (" 890123.", "mixture"),
        (" 1167.", "none"),
        (" 67.", "none"),
        (" not known", "none"),
        ("\n345", "mixture"),
    ],
)
def test_wrong_answers_are_of_these_kinds(text, kind):
    assert needle.kind_of(text, needles.Needle([], ["x"] * 5, KEYS, [], 2, 0, 0.5)) == kind


def asked(right, chosen, distance=100, depth=0.5, text=" 234567."):
    found = needles.Needle([], ["x"] * 5, KEYS, [[1, 2]] * 5, 2, distance, depth)
    scores = [[-1.0] if (i == 2) == chosen else [-2.0] for i in range(5)]
    return needle.Asked(
        1000, depth, found, Answered([1, 2] if right else [3, 3], scores, [[right, right]] * 5), text
    )


def options(**more):
    return needle.Options(**{"lengths": [1000], "depths": 2, "prompts": 2, "batch_tokens": 1000} | more)


def flags(items):
    return {r.of: r.value for r in needle.readings(1000, items, options()) if r.metric == "not_informative"}


def test_what_says_nothing_is_flagged_with_the_reason():
    assert flags([asked(False, False, text="?")] * 40) == {"floor": 1, "ceiling": 0, "copying": 0}
    assert flags([asked(True, True)] * 40) == {"floor": 0, "ceiling": 1, "copying": 0}
    assert flags([asked(False, False)] * 40) == {"floor": 1, "ceiling": 0, "copying": 1}
    assert flags([asked(True, True)] * 20 + [asked(False, False, text="?")] * 20) == {
        "floor": 0,
        "ceiling": 0,
        "copying": 0,
    }


def test_readings_are_by_length_depth_and_distance_and_the_far_ones_apart():
    items = [
        asked(True, True, 40, 0.75),
        asked(True, True, 250, 0.75),
        asked(False, True, 600, 0.25),
        asked(False, False, 900, 0.25),
    ]
    found = {
        (r.metric, *r.at.items()): r
        for r in needle.readings(1000, items, options(distance_bin=250, beyond=256))
        if r.of == "needle"
    }
    at = ("length", 1000)
    assert (
        found["exact_match", at].value == 0.5
        and found["exact_match", at].n == 4
        and found["chance", at].value == 0.2
    )
    assert (
        found["exact_match", at, ("depth", 0.75)].value == 1
        and found["choice", at, ("depth", 0.25)].value == 0.5
    )
    assert {key[2][1] for key in found if len(key) == 3 and key[2][0] == "distance"} == {250, 750, 1000}
    assert (
        found["exact_match", at, ("distance", 250)].n == 2
        and found["exact_match", at, ("beyond", 256)].value == 0
    )
    assert found["choice", at, ("beyond", 256)].value == 0.5


# --- key-value recall ---


@pytest.mark.parametrize("pairs", [4, 64])
@pytest.mark.parametrize("gap", [0, 300])
def test_a_list_has_its_pairs_and_asks_for_one_of_them(pairs, gap):
    found = kv_recall.drawn(CUTTER, pairs, gap, "seed")
    text = CUTTER.tokenizer.decode(found.prompt)
    assert re.findall(r"\n- (\w+): (\w+)", text) == found.pairs and len(dict(found.pairs)) == pairs == len(
        {v for _, v in found.pairs}
    )
    key, value = found.pairs[found.asked]
    assert text.endswith(f"\n- {key}:") and [CUTTER.tokenizer.decode(a) for a in found.answers] == [
        f" {v}\n" for _, v in found.pairs
    ]
    assert (
        found.distance == len(text) - (text.index(f"\n- {key}: {value}") + len(f"\n- {key}: {value}")) >= gap
    )
    assert (
        kv_recall.drawn(CUTTER, pairs, gap, "seed") == found != kv_recall.drawn(CUTTER, pairs, gap, "other")
    )
    plain = kv_recall.drawn(CUTTER, pairs, 0, "seed")
    assert len(found.prompt) == len(plain.prompt) + gap and found.pairs == plain.pairs, (
        "a gap changes no pair"
    )


def test_a_list_is_read_once_for_all_of_its_values():
    model = linearize(teacher(), "lizard", window=16)
    lists = [kv_recall.drawn(CUTTER, 16, 0, str(i)) for i in range(5)]
    fed = []
    hook = model.register_forward_pre_hook(
        lambda _, args, given: fed.append((args[0] if args else given["input_ids"]).numel()), with_kwargs=True
    )
    kv_recall.answers(
        model, lists, kv_recall.Options(prompts=5, batch_tokens=4096), SimpleNamespace(name="lists")
    )
    hook.remove()
    longest = {
        len(x.prompt): max(
            len(answer) for y in lists if len(y.prompt) == len(x.prompt) for answer in y.answers
        )
        for x in lists
    }
    # tokens of a greedy answer that are read again, as are all of a value but the last
    written = max(longest.values()) - 1
    assert sum(fed) == sum(
        len(x.prompt) + written + len(x.answers) * (longest[len(x.prompt)] - 1) for x in lists
    )
    assert (
        sum(fed)
        < sum(len(x.prompt) for x in lists) * 2
        < sum(len(x.prompt) * len(x.answers) for x in lists) / 7
    )


def test_no_word_is_both_key_and_value():
    assert len(set(kv_recall.KEYS)) == len(kv_recall.KEYS) == 64 == len(set(kv_recall.VALUES)) and not set(
        kv_recall.KEYS
    ) & set(kv_recall.VALUES)


# --- answers ---


def test_where_an_answer_stands_is_counted_from_its_last_token_in_its_last_place():
    passage = "Ann met Bo. " + "x" * 100 + " Bo ran."
    question = answers.Question(passage, "Who ran?", ("Bo", "bo"))
    [item] = answers.placed("squad", [question], CUTTER.tokenizer, 200)
    text = CUTTER.tokenizer.decode(item.prompt)
    shown = (
        "\n\nQuestion: What is the capital of France?\nAnswer: Paris\nQuestion: Who wrote Hamlet?\nAnswer:"
        " William Shakespeare"
    )
    assert text == f"{passage}{shown}\nQuestion: Who ran?\nAnswer:"
    assert item.distance == len(text) - passage.rindex("o ran") and item.side == "inside", "one byte a token"
    [item] = answers.placed("squad", [question._replace(answers=("Ann",))], CUTTER.tokenizer, 200)
    assert item.distance == len(text) - 2 and item.side == "beyond"
    left_out = [("Cy",), ("ran",), ("B",)]  # nowhere; in the question; no whole word
    assert not answers.placed(
        "squad", [question._replace(answers=right) for right in left_out], CUTTER.tokenizer, 8
    )


def test_numbers_turns_and_yes_or_no_are_no_places_in_a_passage():
    drop = {"passage": "p", "question": "q"}
    assert answers.READ["drop"](drop | {"answers": [["2"], ["two", "three"]]}) is None
    assert answers.READ["drop"](drop | {"answers": [["2"], ["two men"], ["two men"]]}).answers == ("two men",)
    coqa = {"story": "s", "question": "q", "answers": ["Bo"]}
    assert answers.READ["coqa"](coqa | {"id": "a_turn0"}).answers == ("Bo",)
    assert (
        answers.READ["coqa"](coqa | {"id": "a_turn1"})
        is answers.READ["coqa"](coqa | {"id": "a_turn0", "answers": ["Yes."]})
        is None
    )


def test_a_sample_has_half_of_each_side_as_far_as_there_are():
    items = [answers.Item("squad", i, [], (), 0, answers.SIDES[i % 4 == 0]) for i in range(40)]
    for wanted, beyond in ((10, 5), (36, 10), (2, 1)):
        found = answers.sample(items, wanted, "seed")
        assert (
            len(found) == wanted == len({item.number for item in found})
            and sum(item.side == "beyond" for item in found) == beyond
        )
        assert found == answers.sample(items, wanted, "seed") == sorted(found, key=lambda item: item.number)
    assert answers.sample(items, None, "seed") == items == answers.sample(items, 99, "seed")


# --- in the plan, at smoke ---

RUNS = ("teacher", "lizard")
MEASURES = ("needle", "needle_1024", "kv_recall", "kv_recall_far", "answers")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    plan = Plan(scale="smoke", results=tmp_path_factory.mktemp("results"))
    for run in RUNS:
        made(plan, *(f"measure {run} {measure}" for measure in ("gate", *MEASURES)))
    return plan


def found_of(plan, run, measure):
    folder = plan.folder(Node("measure", run, measure))
    readings = json.loads((folder / "metrics.json").read_text())["readings"]
    return readings, [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]


def test_every_measure_has_its_readings_with_errors_and_its_items(measured):
    for run in RUNS:
        readings, items = found_of(measured, run, "needle")
        cells = [r for r in readings if r["metric"] == "exact_match" and set(r["at"]) == {"length", "depth"}]
        assert {(r["at"]["length"], r["at"]["depth"]) for r in cells} == {
            (length, depth) for length in (768, 1024) for depth in (0.25, 0.75)
        }
        assert all(r["n"] == 2 and r["stderr"] > 0 for r in cells) and len(items) == 8
        readings, items = found_of(measured, run, "kv_recall")
        assert {r["at"]["pairs"]: r["value"] for r in readings if r["metric"] == "chance"} == {
            4: 0.25,
            16: 1 / 16,
            64: 1 / 64,
        } and len(items) == 6
        readings, items = found_of(measured, run, "answers")
        sides = {(r["metric"], r["of"], r["at"].get("answer")) for r in readings}
        assert {(m, "answers", side) for m in ("f1", "contains") for side in answers.SIDES} <= sides
        assert {item["set"] for item in items} == {"squad", "drop", "coqa"} and all(
            0 <= item["f1"] <= 1 for item in items
        )


def test_items_are_the_same_for_all_models_and_the_shorter_measure_s_are_the_plane_s(measured):
    for measure, own in (
        ("needle", ("keys", "distance", "asked")),
        ("kv_recall", ("key", "value", "distance")),
        ("answers", ("set", "item", "right")),
    ):
        theirs = [
            [{name: item[name] for name in own} for item in found_of(measured, run, measure)[1]]
            for run in RUNS
        ]
        assert theirs[0] == theirs[1]
    plane, alone = (found_of(measured, "lizard", measure)[0] for measure in ("needle", "needle_1024"))
    assert [r for r in plane if r["at"]["length"] == 1024] == alone


def test_the_table_and_the_plane_are_drawn_and_what_was_not_run_says_so(measured):
    for name in ("comparison_recall", "comparison_needle"):
        for path in draw_planned(measured, measured.artefacts[name]):
            assert path.stat().st_size > 0
    page = (measured.root / "comparison/recall.md").read_text()
    assert "Answers, F1 beyond" in page and "not run" in page


def job(plan, tmp_path, **settings):
    (tmp_path / "out").mkdir(exist_ok=True)
    parents = {"model": plan.folder(Node("model", plan.run("teacher").model))}
    return Job(
        name="toy",
        settings={"seed": 0, "files": {}} | settings,
        parents=parents,
        out=tmp_path / "out",
        work=tmp_path,
    )


def test_an_example_is_one_prompt_in_full_and_undefined_beyond_what_a_model_reads(measured, tmp_path):
    given = passkey_example.Options(length=900, filler="noise")
    [right] = passkey_example.measure(teacher(2048), None, given, job(measured, tmp_path))
    [item] = read_items(tmp_path / "out")
    assert (right.metric, right.value, right.n) == ("exact_match", 0.0, 1), "a random model finds nothing"
    assert len(CUTTER.ids(item["prompt"])) == 900 and item["prompt"].endswith(
        f"The {item['names'][item['asked']]} pass key is"
    )
    assert all(item["prompt"].count(key) == 1 for key in item["keys"]) and item["answer"]
    [right] = passkey_example.measure(teacher(800), None, given, job(measured, tmp_path))
    assert (right.value, right.why) == (None, "softmax attention, made for 800 positions")
    [unread] = read_items(tmp_path / "out")
    assert unread == {field: value for field, value in item.items() if field != "answer"}


def test_samples_are_what_a_model_writes_greedily_and_how_it_writes_is_counted(measured, tmp_path):
    model, given = teacher(), samples.Options(questions=["Why?", "Who is it?"], new_tokens=9)
    readings = {r.metric: r for r in samples.measure(model, None, given, job(measured, tmp_path))}
    items = read_items(tmp_path / "out")
    assert set(readings) == {"ended", "repeated", "declined"} and all(r.n == 2 for r in readings.values())
    tokenizer = byte_tokenizer()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Why?"}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    written = model.generate(**ids, max_new_tokens=9, do_sample=False, pad_token_id=0)[
        0, ids["input_ids"].shape[1] :
    ]
    assert items[0]["written"] == tokenizer.decode(written, skip_special_tokens=True).strip()
    tokenizer.chat_template = None
    assert tokenizer.decode(samples.worded(tokenizer, "Why?")).endswith(
        "### Instruction:\nWhy?\n\n### Response:\n"
    )
    assert samples.until([5, 7, 5], 7) == ([5], True) and samples.until([5], 7) == ([5], False)
    assert samples.repeated([1, 2, 3]) == 0 and samples.repeated([1, 2, 3, 4] * 2) == pytest.approx(1 - 4 / 5)
    said = {
        "I’m sorry, but no.": True,
        "I don't have it.": True,
        "I cannot say.": True,
        "The sky is blue.": False,
        "It can be done.": False,
    }
    assert {text: samples.DECLINES.search(text) is not None for text in said} == said


def test_samples_are_drawn_as_a_page_with_the_paper_s_own(tmp_path):
    artefact = read(ROOT / "workflow/papers/lizard/appendixf.yaml")
    item = {
        "question": "Why?",
        "written": "Since it is so. | Or not.",
        "tokens": 9,
        "ended": True,
        "repeated": 0.0,
        "declined": False,
    }
    (tmp_path / "lizard").mkdir()
    (tmp_path / "lizard/items.jsonl").write_text(json.dumps(item))
    found = [reading(name, 0.5, 0.1, 1, "answers") for name in ("ended", "repeated", "declined")]
    measured = {("lizard", "samples"): measurement("lizard", "samples", *found, folder=tmp_path / "lizard")}
    make(artefact, dict.fromkeys(artefact.reads()) | measured, About("mini"), tmp_path / "out")
    page = (tmp_path / "out/appendixf.md").read_text()
    assert (
        ">     Since it is so. | Or not." in page
        and "the paper's lizard:" in page
        and "| `lizard` | 50.00 ± 10.00 |" in " ".join(page.split())
    )
    assert (
        "`teacher`:\n\n>     not run" in page
        and (tmp_path / "out/appendixf.csv").read_text().count("\n") == 2
    )


def test_beyond_the_teacher_s_positions_a_needle_is_not_defined_and_a_linear_one_is_asked(measured, tmp_path):
    given = options(lengths=[640, 2100], filler="noise")
    readings = list(needle.measure(teacher(2048), None, given, job(measured, tmp_path)))
    assert {(r.metric, r.value, r.why) for r in readings if r.at == {"length": 2100}} == {
        (score, None, "softmax attention, made for 2048 positions") for score in needle.SCORES
    }
    (tmp_path / "again").mkdir()
    readings = list(
        needle.measure(linearize(teacher(2048), "supra"), None, given, job(measured, tmp_path / "again"))
    )
    assert {r.metric for r in readings if r.at == {"length": 2100}} >= {"exact_match", "choice", "nats"}


def test_what_cannot_be_measured_is_refused(measured, tmp_path):
    own = job(measured, tmp_path)
    with pytest.raises(UserError, match="filler `text` is of the measure's data.*possible: filler: noise"):
        list(needle.measure(teacher(), None, options(), own))
    with pytest.raises(UserError, match="no questions of squad in .*expected"):
        list(answers.measure(teacher(), tmp_path, answers.Options(items={"squad": 2}, batch_size=1), own))
    for metric, wrong, named in (
        (needle, {"key_tokens": (8, 5)}, "fewest and the most"),
        (kv_recall, {"pairs": (65,)}, "less than or equal to 64"),
    ):
        given = {"lengths": [512], "depths": 1} if metric is needle else {}
        with pytest.raises(ValueError, match=named):
            metric.Options(**given | {"prompts": 2, "batch_tokens": 1} | wrong)
    for measure in ("needle_1024", "kv_recall", "answers"):
        with pytest.raises(ConfigError, match="predicts the next token"):
            measured.check_processes(Node("measure", "hedgehog_cola", measure), 1)


@pytest.mark.parametrize(("budget", "prompts"), [(1.0, 16), (4.0, 64), (0.01, 2)])
def test_a_budget_multiplies_prompts(budget, prompts):
    settings = Plan(scale="mini", budget=budget).settings(Node("measure", "teacher", "kv_recall"))
    assert settings["metric_options"]["prompts"] == prompts


def test_a_cell_that_is_not_defined_says_why_in_the_table_and_to_a_claim(tmp_path):
    columns = [
        {
            "name": "em",
            "measure": "needle",
            "metric": "exact_match",
            "at": {"length": 4096},
            "unit": "percent",
        }
    ]
    artefact = read(
        paper(tmp_path, columns=columns, rows=[{"run": "teacher"}, {"run": "lizard"}, {"run": "t2r"}])
    )
    beyond = reading("exact_match", None, None, 0, length=4096)._replace(
        why="softmax attention, made for 2048 positions"
    )
    gone = [beyond, reading("exact_match", 0.5, length=2048)]
    found = {("teacher", "needle"): measurement("teacher", "needle", *gone)}
    found["lizard", "needle"] = measurement("lizard", "needle", reading("exact_match", 0.5, length=4096))
    files = draw(artefact, found, About("mini", "SmolLM2"), tmp_path)
    page = next(path for path in files if path.suffix == ".md").read_text()
    assert (
        "not defined: softmax attention, made for 2048 positions" in page
        and "50.0 ± 1.0" in page
        and "not run" in page
    )
    claim = Claim(claim="c", source="s", left="lizard", right="teacher", column="em", op=">")
    from relinear.draw.cells import look_in

    found_out = judge(claim, look_in(rows_of(artefact.spec, found, About("mini", "SmolLM2"))), None)
    assert (
        found_out.verdict == UNTESTED
        and "teacher: em is not defined: softmax attention, made for 2048 positions" in str(found_out)
    )
