"""lm-eval's own tasks over local data: prompts are unchanged, samples fair, and scores those of plain
lm-eval."""

import copy
import json
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks._yaml_loader import load_yaml
from transformers import LlamaConfig, LlamaForCausalLM

from relinear import linearize
from relinear.families.tiny import byte_tokenizer
from relinear.measure import _harness as harness
from relinear.measure._harness import LocalLM, available, check_tasks, draw, load, score
from relinear.plan.plan import Plan

SIX = ["piqa", "arc_easy", "arc_challenge", "hellaswag", "winogrande", "mmlu"]
TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER), hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=3, num_key_value_heads=1, max_position_embeddings=1024,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def smoke(
    model,
    tasks: dict[str, int | None],
    *,
    data: Path | None = None,
    batch_size=4,
    max_length=1024,
    seed=0,
    work: Path | None = None,
):
    return score(
        model,
        TOKENIZER,
        tasks,
        data,
        batch_size=batch_size,
        max_length=max_length,
        seed=seed,
        smoke=data is None,
        work=work,
    )


def test_continuations_are_scored_by_their_text_normalised_by_its_length(model):
    metrics, items = smoke(model, {"mmlu_continuation": None, "mmlu": None})
    tasks = {task.config.dataset_name: task for task in load("mmlu_continuation", None, None, 0)}
    own = [item for item in items if item["task"] == "mmlu_continuation"]
    for item in own:
        task = tasks[item["subject"]]
        [doc] = [doc for doc in task.eval_docs if doc["doc_id"] == item["doc_id"]]
        lengths = [len(choice) for choice in doc["choices"]]
        each = [score / length for score, length in zip(item["scores"], lengths, strict=True)]
        assert item["acc_norm"] == (each.index(max(each)) == doc["answer"]) and item["acc"] == (
            item["scores"].index(max(item["scores"])) == doc["answer"]
        )
        assert "A." not in task.doc_to_text(doc) and task.doc_to_choice(doc) == doc["choices"]
    letters = {(item["subject"], item["doc_id"]) for item in items if item["task"] == "mmlu"}
    assert letters == {(item["subject"], item["doc_id"]) for item in own} and metrics["mmlu_continuation"][
        "n"
    ] == len(own), "the same items"


def test_an_unknown_task_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'piqua'.*have arc_challenge.*piqa"):
        check_tasks(["piqa", "piqua"])


@pytest.mark.parametrize("name", available())
def test_a_task_is_the_harness_task_but_for_its_data(name):
    ours = {"training_split", "validation_split", "num_fewshot"}
    include = yaml.safe_load((harness.TASKS / f"{name}.yaml").read_text())["include"]
    for task in load(name, None, None, 0):
        bundled = load_yaml(harness.BUNDLED / include.format(subject=task.config.dataset_name))
        bundled = {
            key: value for key, value in bundled.items() if key not in ours | {"tag", "fewshot_config"}
        }
        assert {key: getattr(task.config, key) for key in bundled} == bundled
        assert task.config.num_fewshot == (5 if name.startswith("mmlu") else 0)


@pytest.mark.parametrize("name", available())
def test_the_asset_holds_the_files_that_a_task_names(name):
    plan = Plan()
    members = plan.catalogue[plan.data["tasks"].options["asset"]].members
    for path in yaml.safe_load((harness.TASKS / f"{name}.yaml").read_text())["data"].values():
        assert any(fnmatch(path.format(subject="virology"), member) for member in members), path


@pytest.mark.parametrize("name", ["arc_easy", "arc_challenge", "boolq", "lambada_openai"])
def test_a_converted_document_gives_back_its_prompt(name):
    raw = [json.loads(line)["doc"] for line in (harness.SMOKE / f"{name}.jsonl").read_text().splitlines()]
    [task] = load(name, None, None, 0)
    for doc, was in zip(task.eval_docs, raw, strict=True):
        assert task.doc_to_text(doc) == was["query"]
        if name == "lambada_openai":
            assert task.doc_to_target(doc) == " " + was["choices"][0]
        else:
            assert task.doc_to_choice(doc)[task.doc_to_target(doc)] == was["choices"][was["gold"]]


def test_olmes_requests_become_documents_once(tmp_path):
    doc = {"id": "a", "query": "Question: Why?\nAnswer:", "choices": ["so", "not so"], "gold": 1}
    lines = [{"doc_id": number, "doc": doc} for number in (0, 0, 1_000_000, 1_000_000)]
    (tmp_path / "requests.jsonl").write_text("\n".join(map(json.dumps, lines)))
    [row] = harness.read(tmp_path / "requests.jsonl", "arc")
    assert row["question"] == "Why?" and row["answerKey"] == "B"


def test_every_task_reports_what_the_tables_read(model):
    metrics, items = smoke(model, dict.fromkeys(available()))
    for name, task in metrics.items():
        both = name in {"piqa", "hellaswag", "arc_easy", "arc_challenge", "mmlu_continuation"}
        keys = {"acc", "acc_stderr", "tied", "tied_stderr", "n", "num_fewshot"} | (
            {"acc_norm", "acc_norm_stderr"} if both else set()
        )
        assert set(task) == keys
        assert task["num_fewshot"] == (5 if name.startswith("mmlu") else 0)
        rows = [item for item in items if item["task"] == name]
        assert task["n"] == len(rows) >= 4
        assert task["acc"] == pytest.approx(sum(row["acc"] for row in rows) / len(rows))
        for row in rows:
            # its answer is right where the greedy continuation is; it has no other choice
            if name != "lambada_openai":
                assert row["acc"] == (
                    max(range(len(row["scores"])), key=row["scores"].__getitem__) == int(row["target"])
                )
    json.dumps([metrics, items])


def test_mean_and_error_are_the_ones_that_lm_eval_reports(model):
    metrics, _ = smoke(model, {"piqa": None, "winogrande": None})
    tasks = {name: load(name, None, None, 0)[0] for name in metrics}
    lm = LocalLM(model, tokenizer=TOKENIZER, batch_size=4, max_length=1024, softmax_dtype="float32")
    theirs = evaluate(lm, {"tasks": tasks}, bootstrap_iters=10)["results"]
    for name, task in metrics.items():
        for metric in harness.METRICS[: 2 if "acc_norm" in task else 1]:
            assert task[metric] == theirs[name][f"{metric},none"]
            assert task[f"{metric}_stderr"] == theirs[name][f"{metric}_stderr,none"]


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_scores_are_those_of_plain_hflm(model, batch_size):
    pairs = [
        ("one", " a"),
        ("one", " b"),
        ("a much longer context than that,", " b"),
        ("one two", " three four"),
    ]
    pairs += [("Q: x\nA:", letter) for letter in "ABCD"] + [("", "from nothing")]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    options = {"tokenizer": TOKENIZER, "batch_size": batch_size, "max_length": 64, "softmax_dtype": "float32"}
    ours, theirs = (kind(model, **options).loglikelihood(requests) for kind in (LocalLM, HFLM))
    torch.testing.assert_close([o[0] for o in ours], [t[0] for t in theirs], rtol=1e-5, atol=1e-5)
    assert [o[1] for o in ours] == [t[1] for t in theirs]


def test_the_output_head_is_applied_where_a_choice_is_read(model):
    pairs = [("Q: " + "more and " * n + "x\nA:", letter) for n in (5, 9, 30) for letter in "AB"] + [
        ("short", " of three words")
    ]
    fed = []
    hook = model.lm_head.register_forward_pre_hook(lambda _, args: fed.append(args[0].shape[:2].numel()))
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    LocalLM(model, tokenizer=TOKENIZER, batch_size=4, max_length=300, softmax_dtype="float32").loglikelihood(
        requests
    )
    hook.remove()
    several = len(TOKENIZER(" of three words")["input_ids"])
    # four inputs in one batch: three places that one reads, and those of the last
    assert fed == [4 * (3 + several)]


# 200 characters, which are this tokenizer's tokens
SHOTS = "".join(f"Q: {n} and {n}\nA: {2 * n}\n\n" for n in range(12))


def alike(count: int) -> list[Instance]:
    """Questions that begin alike and differ in length, with choices of one token and of several, among
    unrelated questions."""
    pairs = [
        (SHOTS + "Q: " + "more and " * (n % 4) + f"{n}\nA:", choice)
        for n in range(count)
        for choice in (" a", " b", " some words")
    ]
    pairs[5:5] = [
        ("one", " a"),
        ("a much longer context than that,", " b"),
        (SHOTS[: harness.SHOTS - 8], " a"),
    ]
    return [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]


@pytest.mark.parametrize("method", [None, "hedgehog", "lolcats", "lizard", "supra"])
def test_a_beginning_of_many_inputs_is_read_once_and_scores_are_those_of_plain_hflm(model, method):
    given = {"window": 16} if method == "lolcats" else {}
    scored = model if method is None else linearize(copy.deepcopy(model), method, **given).eval()
    options = {"tokenizer": TOKENIZER, "batch_size": 4, "max_length": 300, "softmax_dtype": "float32"}
    found, read = [], []
    for kind in (LocalLM, HFLM):
        fed = []
        hook = scored.register_forward_pre_hook(lambda _, args, fed=fed: fed.append(args[0].numel()))
        found.append(kind(scored, **options).loglikelihood(alike(9)))
        hook.remove()
        read.append(sum(fed))
    torch.testing.assert_close(*([score for score, _ in answers] for answers in found), rtol=1e-4, atol=1e-4)
    assert [greedy for _, greedy in found[0]] == [greedy for _, greedy in found[1]]
    assert read[0] < read[1] / 3


def test_four_letters_are_scored_by_one_reading_of_their_question_and_one_of_its_shots(model):
    pairs = [(SHOTS + f"Q: {n}\nA:", letter) for n in range(10, 30) for letter in "ABCD"]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    fed = []
    hook = model.register_forward_pre_hook(lambda _, args: fed.append(args[0].numel()))
    LocalLM(model, tokenizer=TOKENIZER, batch_size=4, max_length=300, softmax_dtype="float32").loglikelihood(
        requests
    )
    hook.remove()
    # characters, which are this tokenizer's tokens: of 80 letters, no token twice
    assert fed == [len(SHOTS + "Q: "), *[4 * len("10\nA:")] * 5]


def test_few_inputs_of_one_beginning_are_read_whole(model):
    fed = []
    hook = model.register_forward_pre_hook(lambda _, args: fed.append(args[0].shape[1]))
    LocalLM(model, tokenizer=TOKENIZER, batch_size=4, max_length=300, softmax_dtype="float32").loglikelihood(
        alike(2)
    )
    hook.remove()
    assert max(fed) > len(SHOTS)


def test_a_batch_shares_no_token_that_a_choice_is_read_from():
    beginning = tuple(range(200))
    inputs = {beginning + (n,) * (n % 3): 190 + n % 2 for n in range(20)} | {(7, n): 1 for n in range(20)}
    batches = harness.batched(inputs, 4)
    assert sorted(tokens for _, batch in batches for tokens in batch) == sorted(inputs)
    for shared, batch in batches:
        assert len(batch) <= 4 and all(
            tokens[:shared] == batch[0][:shared] and shared <= inputs[tokens] for tokens in batch
        )
        assert shared == (190 if len(batch[0]) > 2 else 0)


def test_scoring_that_was_killed_within_a_beginning_goes_on_to_the_bit(model, tmp_path):
    def answers(work, dies=None):
        passes = iter(range(1000))

        def count(*_):
            if next(passes) == dies:
                raise Killed

        hook = model.register_forward_pre_hook(count)
        options = {
            "tokenizer": TOKENIZER,
            "batch_size": 4,
            "max_length": 300,
            "softmax_dtype": "float32",
            "work": work,
        }
        try:
            return LocalLM(model, **options).loglikelihood(alike(9)), next(passes)
        finally:
            hook.remove()

    want, passes = answers(None)
    with pytest.raises(Killed):
        answers(tmp_path, dies=passes - 2)
    assert answers(tmp_path) == (want, 1 + 2)  # the beginning is read again


def test_a_score_is_the_sum_of_the_choice_tokens_log_probabilities(model):
    # one string cut in two places: one input, two choices (plain HFLM misaligns the shorter one)
    pairs = [("one two", " three four"), ("one tw", "o three four")]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    lm = LocalLM(model, tokenizer=TOKENIZER, batch_size=2, max_length=64, softmax_dtype="float32")
    tokens = torch.tensor(TOKENIZER.encode("one two three four"))
    logp = model(tokens[None, :-1]).logits[0].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    for (got, _), (_, choice) in zip(lm.loglikelihood(requests), pairs, strict=True):
        assert got == pytest.approx(logp[-len(choice) :].sum().item(), rel=1e-5)


def test_a_drawn_item_scores_as_it_does_among_all(model):
    _, everything = smoke(model, dict.fromkeys(SIX))
    scores = {(row["task"], row.get("subject"), row["doc_id"]): row for row in everything}
    _, some = smoke(model, dict.fromkeys(SIX, 3), seed=1)
    assert len(some) == 3 * len(SIX)
    for row in some:
        whole = scores[row["task"], row.get("subject"), row["doc_id"]]
        assert row["scores"] == pytest.approx(whole["scores"], abs=1e-4) and row["target"] == whole["target"]


def test_draw_takes_evenly_from_every_part():
    sizes = {"a": 100, "b": 3, "c": 100}
    for limit in (1, 2, 3, 7, 9, 50):
        drawn = draw(sizes, limit, 0)
        counts = [len(drawn.get(part, [])) for part in sizes]
        assert sum(counts) == limit
        assert all(
            size == count or count >= max(counts) - 1
            for size, count in zip(sizes.values(), counts, strict=True)
        )
    assert (
        draw(sizes, None, 0)
        == {part: list(range(size)) for part, size in sizes.items()}
        == draw(sizes, 999, 0)
    )


def test_a_larger_draw_holds_the_smaller_one():
    few, more = draw({"a": 1000}, 32, 5)["a"], draw({"a": 1000}, 64, 5)["a"]
    assert set(few) < set(more) and few == sorted(few)
    assert few != draw({"a": 1000}, 32, 6)["a"]


def test_draw_is_the_same_on_every_machine():
    assert (
        draw({"a": 10, "b": 10}, 4, "0 mmlu")
        == draw({"b": 10, "a": 10}, 4, "0 mmlu")
        == {"a": [0, 2], "b": [2, 7]}
    )


def test_arrow_files_are_read_as_the_smoke_items_are_and_left_alone(model, tmp_path):
    [path] = yaml.safe_load((harness.TASKS / "hellaswag.yaml").read_text())["data"].values()
    docs = [json.loads(line) for line in (harness.SMOKE / "hellaswag.jsonl").read_text().splitlines()]
    Dataset.from_list(docs).save_to_disk(tmp_path / Path(path).parent)
    (tmp_path / Path(path).parent / "data-00000-of-00001.arrow").rename(tmp_path / path)
    before = sorted(tmp_path.rglob("*"))
    assert smoke(model, {"hellaswag": None}, data=tmp_path) == smoke(model, {"hellaswag": None})
    assert sorted(tmp_path.rglob("*")) == before


def test_a_missing_shot_is_an_error(model):
    task = load("mmlu", 2, None, 0)[0]
    doc = task.eval_docs[0]
    with pytest.raises(RuntimeError, match="got 0 examples in the prompt, not 5"):
        harness._row("mmlu", task, {"doc": doc, "arguments": [(task.doc_to_text(doc), " A")]})


def test_a_prompt_that_does_not_fit_is_an_error_not_cut(model):
    with pytest.raises(ValueError, match=r"got a prompt of \d{3} tokens.*max_length=200"):
        smoke(model, {"mmlu": 2}, max_length=200)


def test_one_item_has_no_standard_error(model):
    with pytest.raises(ValueError, match="piqa: got a limit of 1"):
        smoke(model, {"piqa": 1})


def test_a_folder_is_needed_for_the_real_items(model):
    with pytest.raises(ValueError, match="no folder of evaluation items"):
        score(model, TOKENIZER, {"piqa": 2}, None, batch_size=1, max_length=64, seed=0)


def test_progress_is_one_bar(model, capsys):
    smoke(model, {"hellaswag": None, "mmlu": None})
    bars = {
        line.split(":")[0]
        for line in capsys.readouterr().err.replace("\r", "\n").splitlines()
        if "%|" in line
    }
    assert bars == {"lm-eval"}


# --- interruptions ---


class Killed(Exception):
    """The process dies here."""


def attempt(model, work: Path | None, *, dies: int | None = None, **options) -> tuple[tuple | None, int]:
    """The scores and the number of forward passes. The scores are None where the process died before pass
    `dies`."""
    passes = 0

    def count(*_):
        nonlocal passes
        if passes == dies:
            raise Killed
        passes += 1

    hook = model.register_forward_pre_hook(count)
    try:
        return smoke(
            model, {"piqa": None, "lambada_openai": None, "mmlu": 4}, work=work, **{"batch_size": 2} | options
        ), passes
    except Killed:
        return None, passes
    finally:
        hook.remove()


@pytest.fixture(scope="module")
def undisturbed(model) -> tuple[tuple, int]:
    result, passes = attempt(model, None)
    assert passes > 7
    return result, passes


@pytest.mark.parametrize("deaths", [[0], [1], [3, 0, 2]])
def test_a_killed_scoring_goes_on_and_ends_as_if_never_disturbed(model, undisturbed, tmp_path, deaths):
    result, passes = undisturbed
    for dies in deaths:
        assert attempt(model, tmp_path, dies=dies) == (None, dies)
    assert attempt(model, tmp_path) == (result, passes - sum(deaths)), "to the bit, and no batch twice"
    assert attempt(model, tmp_path) == (result, 0)


def test_what_is_kept_of_an_answer_is_all_of_it(model, tmp_path):
    lm = LocalLM(
        model, tokenizer=TOKENIZER, batch_size=2, max_length=64, softmax_dtype="float32", work=tmp_path
    )
    context = TOKENIZER.encode("one two")
    best = model(torch.tensor([context])).logits[0, -1].argmax().item()
    requests = [(("", ""), context, [choice]) for choice in (best, best - 1)]
    first, again = (lm._loglikelihood_tokens(requests) for _ in range(2))
    assert again == first and [greedy for _, greedy in again] == [True, False]


def test_a_line_cut_short_costs_its_batch_alone(model, undisturbed, tmp_path):
    result, passes = undisturbed
    attempt(model, tmp_path, dies=3)
    [path] = tmp_path.iterdir()
    for cut in (1, 20):  # the last bracket, and more
        path.write_bytes(path.read_bytes()[:-cut])
        attempt(model, tmp_path, dies=2)
    assert attempt(model, tmp_path) == (result, passes - (2 + 1 + 2))


def test_one_process_goes_on_where_two_were_killed(model, undisturbed, tmp_path, monkeypatch):
    result, passes = undisturbed
    for rank, dies in enumerate((1, 3)):
        with monkeypatch.context() as second:  # one after the other; both began when there was no answer yet
            second.setattr(harness, "rank", lambda rank=rank: rank)
            second.setattr(harness, "share", lambda batches, rank=rank: batches[rank::2])
            second.setattr(harness, "agreed", lambda answers: [])
            assert attempt(model, tmp_path, dies=dies) == (None, dies)
    assert len(list(tmp_path.iterdir())) == 2
    assert attempt(model, tmp_path, dies=1) == (None, 1)
    assert attempt(model, tmp_path) == (result, passes - (1 + 3 + 1))


@pytest.mark.parametrize("other", [{"batch_size": 3}, {"seed": 1}])
def test_answers_are_of_their_own_call(model, undisturbed, tmp_path, other):
    attempt(model, tmp_path)
    assert attempt(model, tmp_path, **other) == attempt(model, None, **other)
    assert attempt(model, tmp_path) == (undisturbed[0], 0)


def test_the_bar_starts_at_what_was_answered(model, tmp_path, capsys):
    attempt(model, tmp_path, dies=2)
    [path] = tmp_path.iterdir()
    answered = sum(len(json.loads(line)) for line in path.read_text().splitlines() if line)
    capsys.readouterr()
    result, _ = attempt(model, tmp_path)
    shown = re.findall(r"(\d+)/(\d+) \[", capsys.readouterr().err)
    choices = sum(len(item["scores"]) for item in result[1])
    assert shown[0] == (str(answered), str(choices)) and shown[-1] == (str(choices), str(choices))
