"""A text with splits of its own: its articles whole, in their order, the test split held out, and nothing of
the validation split anywhere."""

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from relinear.errors import UserError
from relinear.families.tiny import byte_tokenizer
from relinear.get import text
from relinear.get.packed import IGNORED
from relinear.get.splits import build
from relinear.plan.plan import Plan
from relinear.plan.strict import ConfigError
from relinear.stages._stage import Node

TOKENIZER = byte_tokenizer()
LINES = {
    "train-00000-of-00002": ["", " = Owl = \n", "", " An owl . \n", " = = Food = = \n", " Mice . \n"],
    "train-00001-of-00002": [" = Fox = \n", " A fox . \n"],
    "validation-00000-of-00001": [" = Hare = \n", " A hare . \n"],
    "test-00000-of-00001": [" = Wolf = \n", " A wolf . \n"],
}
ARTICLES = {
    "train": ["= Owl = \n An owl . \n = = Food = = \n Mice .", "= Fox = \n A fox ."],
    "heldout": ["= Wolf = \n A wolf ."],
}


def wikitext(folder, files):
    for name in files:
        path = folder / f"wikitext-103-raw-v1/{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table({"text": LINES[name]}), path)
    return folder


def test_articles_are_whole_and_in_order_and_separators_are_not_learned(tmp_path):
    facts = build(tmp_path / "out", TOKENIZER, "wikitext-103", wikitext(tmp_path, LINES))
    separator = text.document_separator(TOKENIZER)
    for split, articles in ARTICLES.items():
        tokens, labels = (np.load(tmp_path / f"out/{split}_{kind}.npy") for kind in ("tokens", "labels"))
        assert tokens.tolist() == [
            token for article in articles for token in separator + TOKENIZER(article)["input_ids"]
        ]
        assert TOKENIZER.decode(labels[labels != IGNORED]) == "".join(articles) and (
            labels == IGNORED
        ).sum() == len(articles) * len(separator)
        assert facts[split] == {"tokens": len(tokens), "documents": len(articles)}


def test_a_split_that_is_not_there_and_an_unknown_text_are_told(tmp_path):
    folder = wikitext(tmp_path, [name for name in LINES if not name.startswith("test")])
    with pytest.raises(UserError, match=r"no articles of 'wikitext-103' .*: expected files test-\*.parquet"):
        build(tmp_path / "out", TOKENIZER, "wikitext-103", folder)
    with pytest.raises(UserError, match="no text 'brown' with splits of its own; have wikitext-103"):
        build(tmp_path / "out", TOKENIZER, "brown", folder)


def test_such_a_text_is_read_whole_and_has_no_dose():
    plan = Plan(scale="paper", budget=0.25)
    node = plan.scaled.text("wikitext-103-stream", "gpt2")
    assert plan.settings(node).keys() == {"source", "assets"} and plan.key(node) == Plan(scale="paper").key(
        node
    )
    with pytest.raises(
        ConfigError, match=r"'wikitext-103-stream' have a size of their own, and a dose is of texts; got 0.5"
    ):
        plan.settings(Node("splits", "wikitext-103-stream@gpt2-x0.5"))


def test_a_text_has_the_scale_s_number_of_tokens_or_one_of_its_own_and_a_budget_multiplies_both():
    tokens = {
        budget: [
            Plan(scale="smollm2", budget=budget).settings(Node("text", f"{name}@smollm2-135m-instruct"))[
                "train_tokens"
            ]
            for name in ("mix", "wikipedia-domain")
        ]
        for budget in (1, 0.25)
    }
    assert tokens == {1: [10000384, 819200], 0.25: [2499584, 204800]}
