"""Questions within contexts of several lengths: prompts, scores, and a teacher beyond its positions."""

import json
import random

import pytest
import torch
from conftest import made
from sklearn.metrics import balanced_accuracy_score, f1_score

from relinear.draw.paired import pulls_of
from relinear.draw.planned import draw_planned
from relinear.errors import UserError
from relinear.families import load
from relinear.families.tiny import byte_tokenizer
from relinear.linearize.model import linearize
from relinear.measure import _contexts, _rope, haystack, qasper_yes_no
from relinear.measure._contexts import ALONE, Prompt
from relinear.measure._limit import limit_of
from relinear.plan import measured as measurements
from relinear.plan.items import read_items
from relinear.plan.job import Job
from relinear.plan.plan import Plan
from relinear.stages._stage import Node

TOKENIZER = byte_tokenizer()
JOB = Job(name="toy", settings={"seed": 0, "files": {}}, parents={}, out=None, work=None)


def teacher(positions=2048):
    return load("tiny").random({"max_position_embeddings": positions}, 0, torch.float64)[0].double()


# --- Qasper's prompts and scores ---


@pytest.mark.parametrize(
    ("room", "middle", "end"),
    [(10, "0123456789", "0123456789"), (7, "0123789", "0123456"), (1, "0", "0"), (0, "", "")],
)
def test_a_cut_keeps_both_ends_or_the_beginning_and_has_its_length(room, middle, end):
    text = list(range(10))
    assert "".join(map(str, qasper_yes_no.cut_middle(text, room))) == middle
    assert "".join(map(str, qasper_yes_no.cut_end(text, room))) == end


def paper(i, answer, words=3000):
    evidence = (
        f"In paper {i} we say with many words that the answer to what you ask about this is {answer}, and"
        " that is all."
    )
    return qasper_yes_no.Question(
        i, f"Title {i}", f"Begin {i}. {evidence} {'x ' * words}End {i}.", evidence, f"Question {i}?", answer
    )


PAPERS = [
    paper(i, answer, 3000 if i else 20)
    for i, answer in enumerate(("Yes", "Yes", "Yes", "Yes", "No", "No", "No"))
]


def test_two_are_shown_of_other_papers_and_every_cut_prompt_fills_its_context():
    asked, shown = qasper_yes_no.drawn(PAPERS, None, 0)
    assert (
        {q.answer for q in shown} == {"Yes", "No"}
        and not {q.title for q in asked} & {q.title for q in shown}
        and len(asked) == 5
    )
    options = qasper_yes_no.Options(items={"qasper": None}, contexts=(700, 2000), batch_tokens=1)
    prompts, whole = qasper_yes_no.built(TOKENIZER, asked, shown, options, "toy")
    for context in options.contexts:
        for question, prompt, uncut in zip(asked, prompts[context], whole[context], strict=True):
            text = TOKENIZER.decode(prompt.tokens)
            assert [TOKENIZER.decode(c) for c in prompt.candidates] == [" Yes", " No"]
            assert text.count("Answer:") == 3 and text.endswith(f"\nQuestion: {question.question}\nAnswer:")
            assert f"Begin {question.number}." in text and f"End {question.number}." in text, "both ends"
            assert uncut == (len(question.text) < 300) and (
                len(prompt.tokens) < context if uncut else len(prompt.tokens) + 4 == context
            )
    assert all("Begin" not in TOKENIZER.decode(prompt.tokens) for prompt in prompts[ALONE])
    with pytest.raises(
        UserError, match="a context of 300 tokens has no room for a paper; shots, question and answer have"
    ):
        qasper_yes_no.built(TOKENIZER, asked, shown, options.model_copy(update={"contexts": (300,)}), "toy")


def test_a_sample_has_both_answers_and_what_cannot_be_drawn_is_refused():
    for wanted in (2, 3, 4):
        asked, _ = qasper_yes_no.drawn(PAPERS, wanted, 0)
        assert len(asked) == wanted and {q.answer for q in asked} == {"Yes", "No"} and asked == sorted(asked)
    with pytest.raises(UserError, match="no question whose answer is No has evidence"):
        qasper_yes_no.drawn(PAPERS[:4], None, 0)
    with pytest.raises(UserError, match="not both answers among them"):
        qasper_yes_no.drawn(PAPERS[:5], None, 0)


def test_macro_f1_and_its_error_are_those_of_all_items_one_by_one():
    rng = random.Random(0)
    gold, said = [[rng.random() < share for _ in range(60)] for share in (0.3, 0.5)]
    value, error, n = qasper_yes_no.macro_f1(list(map(int, gold)), list(map(int, said)))
    assert value == pytest.approx(f1_score(gold, said, average="macro")) and n == 60
    without = [
        f1_score([*gold[:i], *gold[i + 1 :]], [*said[:i], *said[i + 1 :]], average="macro") for i in range(n)
    ]
    mean = sum(without) / n
    assert error == pytest.approx(((n - 1) / n * sum((x - mean) ** 2 for x in without)) ** 0.5)
    assert qasper_yes_no.macro_f1([0, 0, 0, 1], [0, 0, 0, 0])[0] == pytest.approx(3 / 7), (
        "always Yes: (6/7 + 0) / 2"
    )


# --- passages among others ---

EVERY = [
    haystack.Question(
        i, f"Title {i // 2}", f"Passage {i} " + "y" * 90 + f" end {i}.", f"What of {i}?", (f"end {i}",)
    )
    for i in range(40)
]


@pytest.mark.parametrize("context", [600, 601, 3000])
def test_a_hidden_passage_stands_whole_at_its_depth_and_the_context_is_full(context):
    options = haystack.Options(contexts=(context,), batch_tokens=1, prompts=2, new_tokens=7)
    for depth in (0.1, 0.5, 0.9):
        found = haystack.hide(TOKENIZER, EVERY[4], depth, context, EVERY, options, JOB)
        text = TOKENIZER.decode(found.prompt.tokens)
        assert len(found.prompt.tokens) == context - 7 and text.endswith("\nQuestion: What of 4?\nAnswer:")
        assert text.count(EVERY[4].passage) == 1 and "Passage 5 " not in text, "none of the same title"
        end = text.index(EVERY[4].passage) + len(EVERY[4].passage)
        assert found.behind == len(text) - end - 2, "one byte a token, and an empty line"
        assert (
            abs(
                end
                - len(EVERY[4].passage) / 2
                - depth * (context - 7 - len(text) + text.index("\nQuestion: What is"))
            )
            <= 113
        )
    alone = haystack.hide(TOKENIZER, EVERY[4], depth, ALONE, EVERY, options, JOB).prompt
    assert "Passage" not in TOKENIZER.decode(alone.tokens) and text.endswith(TOKENIZER.decode(alone.tokens))


def test_contexts_that_are_too_short_or_too_long_are_refused():
    options = haystack.Options(contexts=(1,), batch_tokens=1, prompts=2)
    with pytest.raises(
        UserError, match="a context of 200 tokens is too short for a passage and its question, which have"
    ):
        haystack.hide(TOKENIZER, EVERY[0], 0.5, 200, EVERY, options, JOB)
    with pytest.raises(
        UserError, match="all passages of other titles are .* tokens too few for a context of 9000"
    ):
        haystack.hide(TOKENIZER, EVERY[0], 0.5, 9000, EVERY, options, JOB)
    for contexts in ((), (2, 1), (1, 1), (0,)):
        with pytest.raises(ValueError, match="contexts"):
            haystack.Options(contexts=contexts, batch_tokens=1, prompts=2)


def test_questions_are_drawn_once_each_in_equal_parts_of_each_depth():
    options = haystack.Options(contexts=(1,), batch_tokens=1, prompts=5, depths=4)
    found = haystack.drawn(EVERY, options, 0)
    assert len({question for question, _ in found}) == 20 and [d for _, d in found].count(0.125) == 5
    assert len(haystack.drawn(EVERY[:10], options, 0)) == 10


# --- beyond a teacher's positions ---


def logits(model, tokens):
    with torch.inference_mode():
        return model(tokens).logits


@pytest.mark.parametrize("scaling", ["yarn:2", "linear:2", "yarn:4"])
def test_a_scaled_teacher_is_what_transformers_makes_of_that_configuration(scaling):
    model, tokens = teacher(128), torch.randint(4, 200, (2, 250), generator=torch.manual_seed(0))
    before = logits(model, tokens)
    with _rope.scaled(model, scaling):
        inside = logits(model, tokens)
    kind, factor = scaling.split(":")
    config = type(model.config)(
        **model.config.to_dict()
        | {
            "rope_parameters": {
                "rope_theta": model.config.rope_parameters["rope_theta"],
                "rope_type": kind,
                "factor": float(factor),
            }
            | ({"original_max_position_embeddings": 128} if kind == "yarn" else {}),
        }
    )
    other = type(model)(config).double().eval()
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(inside, logits(other, tokens))
    assert (inside - before).abs().max() > 1e-3, "it does change what is computed"
    torch.testing.assert_close(logits(model, tokens), before, rtol=0, atol=0)
    assert model.config.rope_parameters["rope_type"] == "default", "and is gone again"


def test_without_a_scaling_the_angles_go_on():
    model, tokens = teacher(128), torch.randint(4, 200, (1, 250), generator=torch.manual_seed(0))
    before = logits(model, tokens)
    with _rope.scaled(model, "default"):
        torch.testing.assert_close(logits(model, tokens), before, rtol=0, atol=0)
    assert _rope.reach(model, "default").tokens is None and _rope.reach(model, "yarn:4").tokens == 512


def test_a_context_that_no_scaling_reaches_and_a_model_that_needs_none_are_refused():
    def options(scaling):
        return _contexts.Options(contexts=(128, 300), batch_tokens=1, rope_scaling=scaling)

    with pytest.raises(
        UserError,
        match=(
            "a context of 300 tokens is beyond .*made for 128 positions, and 256 with yarn:2. Possible:"
            " .*yarn:<factor>"
        ),
    ):
        _contexts.check(teacher(128), options("yarn:2"), "toy")
    (
        _contexts.check(teacher(128), options("yarn:4"), "toy"),
        _contexts.check(teacher(128), options(None), "toy"),
    )
    with pytest.raises(UserError, match="rope_scaling yarn:4 is for softmax teachers .*; got RelinearLlama"):
        _contexts.check(linearize(teacher(128), "supra"), options("yarn:4"), "toy")
    hybrid = linearize(teacher(128), "lizard", keep_softmax_layers=[0])
    whys = [next(_contexts.unread(model, ["f1"], "squad", [300])).why for model in (teacher(128), hybrid)]
    assert whys == [
        "softmax attention, made for 128 positions, and no rope_scaling named",
        "layers of softmax attention, made for 128 positions",
    ]
    for wrong in ("yarn", "ntk:2", "yarn:0"):
        with pytest.raises(ValueError, match="rope_scaling"):
            options(wrong)


def test_each_distinct_prompt_is_read_once_and_contexts_beyond_are_left_out(monkeypatch):
    read = []
    ask = _contexts.ask
    monkeypatch.setattr(
        _contexts,
        "ask",
        lambda model, tokens, *more: read.append(tuple(tokens.shape)) or ask(model, tokens, *more),
    )
    short, long = ([Prompt([10 + i] * n, [[20, 21], [22, 23]]) for i in range(3)] for n in (20, 40))
    options = _contexts.Options(contexts=(20, 30, 40), batch_tokens=60)
    model = teacher(32)
    found = _contexts.answers(model, {ALONE: short, 20: short, 30: short, 40: long}, 2, options, "toy")
    assert set(found) == {ALONE, 20, 30} and read == [(3, 20)] and found[20] == found[30]
    found = _contexts.answers(
        model, {20: short, 40: long}, 2, options.model_copy(update={"rope_scaling": "yarn:2"}), "toy"
    )
    assert set(found) == {20, 40} and read[1:] == [(3, 20), (1, 40), (1, 40), (1, 40)]
    with _rope.scaled(model, "yarn:2"):
        assert found[40] == _contexts._read(model, {40: long}, 2, options, "toy")[40]
    found = _contexts.answers(linearize(model, "supra"), {20: short, 40: long}, 2, options, "toy")
    assert set(found) == {20, 40} and limit_of(model).tokens is None, "a state reads on"


# --- in the plan, at smoke ---

MEASURES = ("qasper_yes_no", "haystack", "books")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    plan = Plan(scale="smoke", results=tmp_path_factory.mktemp("results"))
    made(plan, *(f"measure lizard {measure}" for measure in MEASURES))
    made(
        plan,
        *(f"measure teacher {measure}{more}" for measure in MEASURES for more in ("", "_yarn", "_unscaled")),
    )
    return plan


def readings_of(plan, run, measure):
    folder = plan.folder(Node("measure", run, measure))
    found = json.loads((folder / "metrics.json").read_text())["readings"]
    return {(r["metric"], *r["at"].values()): r for r in found}, read_items(folder)


def test_scores_are_those_of_the_items_and_the_majority_is_the_floor(measured):
    readings, items = readings_of(measured, "lizard", "qasper_yes_no")
    for context in (0, 2048, 4096):
        own = [item for item in items if item["context"] == context]
        gold, said = [item["gold"] for item in own], [item["said"] for item in own]
        assert readings["balanced_acc", context]["value"] == pytest.approx(
            balanced_accuracy_score(gold, said)
        )
        assert readings["acc", context]["value"] == pytest.approx(
            sum(a == b for a, b in zip(gold, said, strict=True)) / len(own)
        )
        assert readings["macro_f1", context]["value"] == pytest.approx(f1_score(gold, said, average="macro"))
        assert all(item["said"] == ("Yes", "No")[item["scores"][1] > item["scores"][0]] for item in own)
        assert readings[("majority",)]["value"] == max(gold.count(answer) for answer in ("Yes", "No")) / len(
            own
        )
    alone = {item["item"]: item["scores"][item["gold"] == "No"] for item in items if item["context"] == 0}
    gains = [
        item["scores"][item["gold"] == "No"] - alone[item["item"]]
        for item in items
        if item["context"] == 2048
    ]
    assert readings["gain", 2048]["value"] == pytest.approx(sum(gains) / len(gains))
    assert readings["cut", 2048]["value"] == 1 > readings["cut", 4096]["value"]


def test_answers_are_scored_as_squad_s_and_known_ones_are(measured, tmp_path, monkeypatch):
    readings, items = readings_of(measured, "lizard", "haystack")
    own = [item for item in items if item["context"] == 4096]
    assert readings["f1", 4096]["value"] == pytest.approx(sum(item["f1"] for item in own) / len(own)) and {
        i["depth"] for i in own
    } == {0.25, 0.75}
    # A model that writes a known text to each: "Ada Berg of Harbeck" has 2 of 4 words of "Ada Berg", which
    # has 2 of 2.
    greedy = TOKENIZER(" Ada Berg of Harbeck.\nQuestion")["input_ids"]
    real = _contexts.answers
    monkeypatch.setattr(
        _contexts,
        "answers",
        lambda *a: {c: [x._replace(greedy=greedy) for x in own] for c, own in real(*a).items()},
    )
    settings = measured.settings(Node("measure", "lizard", "haystack"))
    job = Job(
        name="toy",
        settings=settings,
        parents={"model": measured.folder(Node("model", measured.run("teacher").model))},
        out=tmp_path,
        work=tmp_path,
    )
    options = haystack.Options(contexts=(1600,), batch_tokens=8192, prompts=8, depths=2, new_tokens=2)
    list(haystack.measure(teacher(), job.workflow, options, job))
    [item] = [
        item for item in read_items(tmp_path) if item["context"] == 1600 and item["right"] == ["Ada Berg"]
    ]
    assert (
        item["written"] == "Ada Berg of Harbeck." and item["contains"] and item["f1"] == pytest.approx(2 / 3)
    )
    assert not any(
        item["contains"]
        for item in read_items(tmp_path)
        if "Ada Berg" not in item["right"] and "Harbeck" not in item["right"]
    )


@pytest.mark.parametrize("measure", MEASURES)
def test_beyond_its_positions_a_teacher_is_not_defined_unless_a_scaling_is_named(measured, measure):
    metric = "acc" if measure == "qasper_yes_no" else "f1"
    plain, yarn, unscaled = (
        readings_of(measured, "teacher", measure + more) for more in ("", "_yarn", "_unscaled")
    )
    why = plain[0][metric, 4096]["why"]
    assert (
        plain[0][metric, 4096]["value"] is None
        and "made for 2048 positions, and no rope_scaling named" in why
    )
    assert yarn[0][metric, 4096]["value"] is not None is not unscaled[0][metric, 4096]["value"]
    within = [[item for item in items if item["context"] <= 2048] for _, items in (plain, yarn, unscaled)]
    assert within[0] == within[1] == within[2], "as the teacher is"
    beyond = [[item["gain"] for item in items if item["context"] == 4096] for _, items in (yarn, unscaled)]
    assert beyond[0] != beyond[1]


def test_items_are_the_same_for_all_models_so_that_differences_are_paired(measured):
    for measure, metrics in (
        ("qasper_yes_no", ("acc", "balanced_acc", "gain")),
        ("haystack", ("gain",)),
        ("books", ("gain",)),
    ):
        for metric in metrics:
            pulls = []
            for run, context in (("lizard", 2048), ("lizard", 4096), ("teacher", 2048)):
                found = measurements.load(measured.folder(Node("measure", run, measure)))
                [reading] = [r for r in found.readings if r.metric == metric and r.at == {"context": context}]
                pulls.append(pulls_of(found, reading))
                assert pulls[-1].stderr == pytest.approx(reading.stderr) or metric == "acc", (
                    "Wilson's is not zero at its ends"
                )
            assert pulls[0].items == pulls[1].items == pulls[2].items


def test_the_table_is_drawn_and_what_was_not_run_says_so(measured):
    for path in draw_planned(measured, measured.artefacts["supra_table2"]):
        assert path.stat().st_size > 0
    page = (measured.root / "supra/table2.md").read_text()
    assert (
        "not run" in page
        and "not defined: softmax attention, made for 2048 positions" in page
        and "Mamba 7B" in page
    )
