"""RULER's tasks: the question of a prompt and the score of an answer; the plan's nodes at smoke."""

import json
import random
import re
from collections import Counter

import pytest
from conftest import made

from relinear.draw.paired import pulls_of
from relinear.errors import UserError
from relinear.measure import ruler
from relinear.plan.measured import load
from relinear.plan.plan import Plan

WORDS = [f"{a}{b}{c}d" for a in "bcdf" for b in "aeiou" for c in "lmnr"]


def test_a_needle_is_the_only_number_and_its_key_is_asked_for():
    found = ruler.niah(random.Random(0), 30, WORDS)
    [value] = found.right
    assert (
        re.findall(r"\d+", found.text) == [value]
        and 10**6 <= int(value) < 10**7
        and found.text.count(ruler.NOISE) == 30
    )
    [key] = re.findall(rf"One of the special magic numbers for (\S+) is: {value}\.", found.text)
    assert found.text.endswith(f"The special magic number for {key} mentioned in the provided text is")


def test_a_chain_leads_every_variable_to_the_value_and_stands_in_its_order():
    found = ruler.variables(random.Random(1), 40)
    own = found.text.split("\n\nMemorize")[1]
    [(first, value)] = re.findall(r"VAR (\w+) = (\d+)", own)
    links = re.findall(r"VAR (\w+) = VAR (\w+)", own)
    assert [first, *(b for b, _ in links)] == found.right and [a for _, a in links] == found.right[:-1], (
        "five, one behind the other"
    )
    assert len(set(found.right)) == 5 and f"5 variables are assgined the value {value}, they are:" in own
    assert not any(name in found.text.split("\n\nMemorize")[0] for name in found.right), (
        "the example has others"
    )


@pytest.mark.parametrize(("length", "often", "seldom"), [(2048, 6, 1), (4096, 30, 3)])
def test_common_words_stand_there_as_often_as_the_authors_have_them(length, often, seldom):
    found = ruler.common(random.Random(2), 60, WORDS, length)
    own = Counter(re.findall(r"\d+\. (\w+)", found.text.split("\nBelow")[-1]))
    assert {own[word] for word in found.right} == {often} and {
        n for word, n in own.items() if word not in found.right
    } == {seldom}
    assert len(found.right) == 10 and found.words == len(own) == 60
    assert ruler.common(random.Random(2), len(WORDS) + 1, WORDS, length) is None


def test_frequent_words_are_the_next_three_after_the_dots():
    found = ruler.frequent(random.Random(3), 400, 80)
    context = found.text.partition("coded words. ")[2].partition("\nQuestion")[0]
    ranks = Counter(context.split()).most_common()
    assert (
        ranks[0][0] == "..." and [word for word, _ in ranks[1:4]] == found.right and ranks[3][1] > ranks[4][1]
    )
    assert ranks[1][1] == int(400 / 4 / 1.6449341) and found.words == len(ranks) - 1


def test_the_score_is_the_share_of_right_words_that_stand_in_the_answer():
    assert (
        ruler.contains(" ABC, def and more", ["abc", "DEF", "ghi", "jkl"]) == 0.5
        and ruler.contains("1234567", ["234"]) == 1
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    plan = Plan(scale="smoke", results=tmp_path_factory.mktemp("results"))
    return {run: load(made(plan, f"measure {run} ruler")) for run in ("teacher", "window_128")}


def test_every_task_is_asked_at_the_lengths_that_a_model_reads(measured):
    for found in measured.values():
        rows = [json.loads(line) for line in (found.folder / "items.jsonl").read_text().splitlines()]
        assert Counter(row["set"] for row in rows if row["length"] == 2048) == dict.fromkeys(
            ruler.NEW_TOKENS, 2
        )
        for task in ruler.NEW_TOKENS:
            own = found.find("contains", task, {"length": 2048})
            assert 0 <= own.value <= 1 and own.n == 2 and pulls_of(found, own) is not None, (
                "runs can be paired"
            )
            chance = found.find("chance", task, {"length": 2048})
            assert (
                (0 < chance.value < 0.5)
                if task in ("cwe", "fwe")
                else chance.value is None and "right" in chance.why
            )
    teacher, window = (found.find("contains", "vt", {"length": 8192}) for found in measured.values())
    assert teacher.value is None and "made for 2048 positions" in teacher.why and window.value is not None, (
        "a window reads on"
    )
    asked = [
        [row["right"] for row in map(json.loads, (m.folder / "items.jsonl").open()) if row["length"] == 2048]
        for m in measured.values()
    ]
    assert asked[0] == asked[1], "the same questions for both"


def test_prompts_fill_their_length_and_none_is_beyond_it():
    class Letters:
        def __call__(self, text, **_):
            return {"input_ids": list(text)}

    class Told:
        name, settings = "measure teacher ruler", {"seed": 0}

    options = ruler.Options(lengths=(3000,), prompts=5, batch_tokens=1, new_tokens=10)
    for task, draw in ruler.tasks(WORDS).items():
        asked = ruler.questions(
            Letters(), task, lambda rng, many, draw=draw: draw(3000, rng, many), 3000, options, Told
        )
        sizes = [len(question.text) for question in asked]
        # a list ends with the words that there are
        assert max(sizes) <= 2990 and (min(sizes) > 2700 or task == "cwe"), (task, sizes)
        assert len({question.text for question in asked}) == 5
    with pytest.raises(UserError, match="1024 tokens have no room for the smallest prompt of cwe"):
        ruler.questions(
            Letters(), "cwe", lambda rng, many: ruler.common(rng, many, WORDS, 1024), 1024, options, Told
        )
