"""Sentences: every source in its own schema, splits that no training text crosses, texts padded and joined,
and the errors for bad input."""

import gzip
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from relinear.errors import UserError
from relinear.families.bert import byte_tokenizer
from relinear.get.packed import Packed, micro_batches
from relinear.get.padded import Padded, opened
from relinear.get.sentences import GLUE, Text, build, texts
from relinear.plan.strict import ConfigError
from relinear.stages.sentences import Options

TOKENIZER = byte_tokenizer()
TOKENIZER.model_max_length = 256


def settings(form="sentences", source="smoke", **given):
    return Options(form=form, source=source, **given).model_dump(mode="json") | {
        "train_tokens": 3000,
        "seed": 0,
    }


def made(out, given=None, **more):
    chosen = {**settings(), **more}
    return build(out, TOKENIZER, texts(chosen, None) if given is None else given, chosen)


# --- sources ---


def table(path, columns, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = pyarrow.table(
        {c: [f"{c} {i} of {path.stem}." for i in range(rows)] for c in columns} | {"label": [0] * rows}
    )
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(data, path)
    else:
        with pyarrow.ipc.new_stream(path, data.schema) as stream:
            stream.write_table(data)


@pytest.mark.parametrize("task", GLUE)
def test_glue_as_the_hub_has_it(tmp_path, task):
    for name, rows in (
        ("train-00000-of-00001", 5),
        ("validation_matched-00000-of-00001" if task == "mnli" else "validation-00000-of-00001", 3),
        ("test-00000-of-00001", 2),
        ("validation_mismatched-00000-of-00001", 2),
    ):
        table(tmp_path / "glue" / task / f"{name}.parquet", GLUE[task], rows)
    table(tmp_path / "glue/other/train-0.parquet", ("x",), 1)
    found = list(texts(settings("glue", "hub-glue", task=task), tmp_path))
    assert [t.split for t in found] == ["train"] * 5 + ["heldout"] * 3
    assert all(
        (t.second is not None) == (len(GLUE[task]) == 2) and t.first.startswith(GLUE[task][0]) for t in found
    )


def test_glue_as_a_package_has_its_validation(tmp_path):
    table(tmp_path / "hf_datasets/glue/mrpc/validation/data-00000-of-00001.arrow", GLUE["mrpc"], 4)
    found = list(texts(settings("glue", "glue-validation", task="mrpc"), tmp_path))
    assert [t.split for t in found] == ["heldout"] * 4
    assert found[0] == ("heldout", *(f"{column} 0 of data-00000-of-00001." for column in GLUE["mrpc"]))


def requests(tmp_path, task, *docs):
    path = tmp_path / "oe_eval_tasks" / task / "bpb_5shot/requests.jsonl.gz"
    path.parent.mkdir(parents=True)
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps({"doc": doc, "idx": i}) + "\n" for i, doc in enumerate(docs))


def test_boolq_is_a_passage_and_a_question_once_for_all_answers(tmp_path):
    doc = {
        "query": "Ethanol -- It burns. It is distilled.\nQuestion: does it burn?\nAnswer:",
        "choices": ["yes", "no"],
    }
    requests(tmp_path, "boolq", doc, doc)
    assert list(texts(settings("requests", "x", task="boolq"), tmp_path)) == [
        ("heldout", "Ethanol -- It burns. It is distilled.", "does it burn?")
    ]


def test_squad_is_a_question_with_the_sentence_that_answers_it_and_with_another(tmp_path):
    query = (
        "Title: Harvard\nBackground: It is old. The regatta began in 1852. It has 2.5 crews.\nQuestion: When"
        " did it begin?\nAnswer:"
    )
    requests(tmp_path, "squad", {"query": query, "answers_text": ["1852", "in 1852"]})
    found = list(texts(settings("requests", "x", task="squad"), tmp_path))
    assert found == [
        ("heldout", "When did it begin?", "The regatta began in 1852."),
        ("heldout", "When did it begin?", "It is old."),
    ]


def test_drop_is_the_first_two_questions_about_each_passage(tmp_path):
    asked = [("A", "Who won?"), ("B", "How long?"), ("A", "Who lost?"), ("A", "Where?")]
    requests(tmp_path, "drop", *({"query": f"Passage: {p}.\nQuestion: {q}\nAnswer:"} for p, q in asked))
    assert list(texts(settings("requests", "x", task="drop"), tmp_path)) == [
        ("heldout", "Who won?", "Who lost?")
    ]


def test_neighbours_are_the_two_sentences_that_a_document_begins_with(tmp_path):
    articles = (
        "A fox is an animal. It is often red. It eats mice.",
        "An owl is a bird.",
        "An elk is big. It weighs far more than a man.",
    )
    (tmp_path / "summaries_en-us.json").write_text(
        json.dumps({str(i): {"extract": text} for i, text in enumerate(articles)})
    )
    found = {t[1:] for t in texts(settings("neighbours", "wikipedia-intros", words=(3, 6)), tmp_path)}
    assert found == {("A fox is an animal.", "It is often red.")}


def test_brown_s_sentences_of_a_length_and_the_files_that_they_are_of(tmp_path):
    for i in range(40):
        lines = [
            f"The/at jury/nn of/in file/nn {i}/cd said/vbd so/rb ./.",
            "No/at ./.",
            " ".join(["word/nn"] * 30),
        ]
        (tmp_path / f"ca{i + 10}").write_text("\n\n".join(f"\t{line}" for line in lines))
    found = list(texts(settings(source="brown", words=(5, 20)), tmp_path))
    assert {t.first for t in found} == {f"The jury of file {i} said so." for i in range(40)}
    assert {t.split for t in found} == {"train", "heldout"}


def test_wikitext_is_its_articles_and_its_own_splits(tmp_path):
    lines = [
        " \n",
        " = Fox = \n",
        " It is red . \n",
        " = = Young = = \n",
        " Cubs . \n",
        " = Owl = \n",
        " It flies . \n",
    ]
    for split in ("train", "validation", "test"):
        pyarrow.parquet.write_table(
            pyarrow.table({"text": lines}), tmp_path / f"{split}-00000-of-00001.parquet"
        )
    found = list(texts(settings("documents", "wikitext-103", chunk=16), tmp_path))
    assert [t.split for t in found] == ["train", "train", "heldout", "heldout"]
    assert (
        found[0].first.startswith("= Fox = ")
        and "Cubs" in found[0].first
        and found[1].first.startswith("= Owl = ")
    )


@pytest.mark.parametrize(
    ("form", "task", "says"),
    [
        ("glue", "wnli", "no task 'wnli' of GLUE; have cola, "),
        ("glue", "cola", "no tables of cola in .*expected"),
        ("glue", "qqp", "got the columns sentence, label; qqp needs question1, question2"),
        ("requests", "coqa", "no task 'coqa' of requests; have boolq, squad, drop"),
        ("requests", "squad", "no requests of squad in .*expected"),
    ],
)
def test_a_source_that_is_not_there_or_of_another_schema_is_refused(tmp_path, form, task, says):
    table(tmp_path / "glue/qqp/train-0.parquet", ("sentence",), 2)
    with pytest.raises(UserError, match=says):
        list(texts(settings(form, "x", task=task), tmp_path))


@pytest.mark.parametrize("given", [{"form": "glue"}, {"form": "sentences", "task": "cola"}], ids=str)
def test_a_task_goes_with_its_forms(given):
    with pytest.raises(ValueError, match="give a `task` with the forms glue and requests, and with no other"):
        Options(source="x", **given)


# --- what is made of them ---


def strings(folder, split):
    text = Padded(folder, split, 256)
    return [TOKENIZER.decode(text.batch([i])[0][0], skip_special_tokens=True) for i in range(len(text))]


def test_no_held_out_text_is_trained_on_and_seeds_are_scored_on_the_same(tmp_path):
    for seed in (0, 1):
        made(tmp_path / str(seed), train_tokens=10**6, seed=seed)
    train, again, heldout = (
        strings(tmp_path / "0", "train"),
        strings(tmp_path / "1", "train"),
        strings(tmp_path / "0", "heldout"),
    )
    assert (
        train != again
        and sorted(train) == sorted(again)
        and len(train) > 300
        and not set(train) & set(heldout)
    )
    assert strings(tmp_path / "1", "heldout") == heldout


def test_a_smaller_budget_gives_the_first_texts(tmp_path):
    small, large = made(tmp_path / "small", train_tokens=500), made(tmp_path / "large")
    assert strings(tmp_path / "large", "train")[: small["train"]["texts"]] == strings(
        tmp_path / "small", "train"
    )
    assert 500 <= small["train"]["tokens"] < 500 + 256 and small["heldout"] == large["heldout"]


def test_pairs_have_types_special_tokens_and_the_model_s_length(tmp_path):
    pair = [Text("heldout", "ab", "cde"), Text("heldout", "x" * 200, "y" * 200), Text("train", "z")]
    made(tmp_path, pair)
    tokens, mask, types = Padded(tmp_path, "heldout", 1000).batch([0, 1])
    short = int(mask.sum(1).argmin())
    assert sorted(mask.sum(1).tolist()) == [8, 256] and not tokens[~mask].any()
    assert TOKENIZER.convert_ids_to_tokens(tokens[short, :8]) == [
        "[CLS]",
        "a",
        "b",
        "[SEP]",
        "c",
        "d",
        "e",
        "[SEP]",
    ]
    assert types[short].tolist() == [0] * 4 + [1] * 4 + [0] * 248


def test_chunks_are_the_documents_one_after_the_other(tmp_path):
    made(tmp_path / "whole", train_tokens=1000)
    made(tmp_path / "chunks", train_tokens=1000, chunk=128)
    whole, chunks = (Padded(tmp_path / name, "train", 10**6) for name in ("whole", "chunks"))
    assert len(chunks) == 1000 // 128 and (chunks.lengths == 128).all()
    assert np.array_equal(chunks.tokens, whole.tokens[: len(chunks.tokens)])
    assert torch.equal(
        Padded(tmp_path / "whole", "train", 64).joined(128)[0].flatten()[:896],
        torch.from_numpy(chunks.tokens[:896].astype(np.int64)),
    )


def test_padding_depends_on_nothing_but_the_width(tmp_path):
    made(tmp_path)
    text = Padded(tmp_path, "train", 40)
    narrow, wide = text.batch([0, 3, 5]), text.batch([0, 3, 5], width=40)
    assert wide[0].shape == (3, 40) and narrow[0].shape[1] == max(text.lengths[[0, 3, 5]]) <= 40
    for a, b in zip(narrow, wide, strict=True):
        assert torch.equal(a, b[:, : a.shape[1]]) and not b[:, a.shape[1] :].any()
    assert text.tokens_of(len(text)) == text.lengths.sum()
    assert text.lengths[: text.until(500)].sum() >= 500 > text.lengths[: text.until(500) - 1].sum()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shares_of_a_step_add_up_over_its_processes(tmp_path, size):
    made(tmp_path)
    text = Padded(tmp_path, "train", 64)
    step = {"n": len(text), "batch_size": 4, "accumulate": 2, "seed": 0, "size": size}
    parts = [
        (text.real(own), text.real(whole))
        for rank in range(size)
        for own, whole in micro_batches(3, rank=rank, **step)
    ]
    assert {sum(own for own, _ in parts)} == {whole for _, whole in parts}


def test_too_few_texts_and_sequences_that_are_too_long_are_refused(tmp_path):
    with pytest.raises(UserError, match="train: 9999 texts of smoke asked for, .* got; lower `train`"):
        made(tmp_path, train=9999)
    with pytest.raises(UserError, match="heldout: 500 texts of smoke asked for"):
        made(tmp_path, heldout=500)
    with pytest.raises(UserError, match="no texts of smoke are held out: 1 in all"):
        made(tmp_path, [Text("train", "a")])
    made(tmp_path, [Text("heldout", "abc")])
    text = Padded(tmp_path, "heldout", 64)
    with pytest.raises(
        UserError, match="sequences of 256 tokens asked for; all texts of heldout together have 5"
    ):
        text.joined(256)
    with pytest.raises(UserError, match="train of .* holds 0 texts"):
        Padded(tmp_path, "train", 64)
    with pytest.raises(UserError, match="no split 'test'; have train, heldout"):
        Padded(tmp_path, "test", 64)


def test_either_kind_of_text_is_opened_as_what_it_is(tmp_path):
    made(tmp_path / "a")
    (tmp_path / "b").mkdir()
    for kind in ("tokens", "labels"):
        np.save(tmp_path / f"b/train_{kind}.npy", np.arange(100, dtype=np.int32))
    assert isinstance(opened(tmp_path / "a", "train", 64), Padded)
    stream = opened(tmp_path / "b", "train", 10)
    assert isinstance(stream, Packed) and stream.real([1, 2]) == 20 and stream.tokens_of(3) == 30
    assert torch.equal(stream.batch([2, 0])[0], torch.stack([torch.arange(20, 30), torch.arange(10)]))


def test_a_task_of_another_kind_of_data_is_refused(tmp_path):
    from relinear.plan.plan import Plan

    plan = Plan(scale="smoke")
    with pytest.raises(ConfigError, match="data 'story-sentences' is no text; have alpaca"):
        plan.node("text", "story-sentences@tiny-bert")
    with pytest.raises(ConfigError, match="data 'stories' is no sentences; have cola"):
        plan.node("sentences", "stories@tiny-bert")
    assert plan.node("sentences", "story-sentences@tiny-bert") == plan.scaled.text("cola", "tiny-bert"), (
        "what the verb and the rule of that name ask for"
    )
    assert (
        plan.scaled.text("cola", "tiny-bert").stage == "sentences"
        and plan.scaled.text("alpaca", "tiny").stage == "text"
    )
