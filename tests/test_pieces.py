"""Long documents in pieces: none spans two documents, none that is held out is trained on, and halves are the
same tokens as wholes."""

import gzip

import numpy as np
import pytest

from relinear.errors import UserError
from relinear.families.tiny import byte_tokenizer
from relinear.get import text
from relinear.get.packed import IGNORED, Packed
from relinear.get.pieces import build, documents
from relinear.plan.plan import Plan
from relinear.plan.strict import ConfigError
from relinear.stages.pieces import Options

TOKENIZER = byte_tokenizer()
PIECE = 48
SEPARATOR = text.document_separator(TOKENIZER)


def built(out, **changes) -> dict:
    return build(
        out,
        TOKENIZER,
        {"smoke": None},
        **({"piece": PIECE, "train_tokens": 20 * PIECE, "heldout_tokens": 10**6, "seed": 0} | changes),
    )


def test_every_piece_is_of_one_document_and_of_its_own_split(tmp_path):
    facts = built(tmp_path)
    whole = {
        split: "".join(
            f"\n{d.text}"
            for d in text.documents("smoke")
            if text._is_heldout(text._digest(d)) == (split == "heldout")
        )
        for split in ("train", "heldout")
    }
    for split, count in (("train", 20), ("heldout", facts["heldout"]["pieces"])):
        pieces, labels = (
            np.load(tmp_path / f"{split}_{kind}.npy").reshape(-1, PIECE) for kind in ("tokens", "labels")
        )
        assert len(pieces) == count > 1
        for tokens, learned in zip(pieces, labels, strict=True):
            begins = list(tokens[: len(SEPARATOR)]) == SEPARATOR
            assert (learned[: len(SEPARATOR)] == IGNORED).all() == begins
            own = tokens[len(SEPARATOR) * begins :]
            assert (learned[len(learned) - len(own) :] == own).all()
            assert TOKENIZER.decode(own.tolist()) in whole[split]


def test_another_seed_trains_in_another_order_and_holds_out_the_same(tmp_path):
    (a, b), everything = (tmp_path / "a", tmp_path / "b"), 400 * PIECE
    for out, seed in ((a, 0), (b, 1)):
        built(out, seed=seed, train_tokens=everything)
    assert (np.load(a / "heldout_tokens.npy") == np.load(b / "heldout_tokens.npy")).all()
    first, second = (np.load(out / "train_tokens.npy").reshape(-1, PIECE).tolist() for out in (a, b))
    assert first != second


def test_sequences_of_half_a_piece_are_the_same_tokens(tmp_path):
    built(tmp_path)
    wholes, halves = Packed(tmp_path, "train", PIECE), Packed(tmp_path, "train", PIECE // 2)
    assert [*halves.sequence(6)[0], *halves.sequence(7)[0]] == list(wholes.sequence(3)[0])


def test_too_few_pieces_and_documents_too_short_are_told(tmp_path):
    with pytest.raises(UserError, match=r"1000 pieces of 48 tokens .* smaller budget or `piece`"):
        built(tmp_path, train_tokens=1000 * PIECE)
    with pytest.raises(UserError, match="got 0 and 0 from the documents of smoke"):
        built(tmp_path, piece=4096)


def test_the_sections_of_the_faq_are_read_packed_or_not_and_none_is_an_error(tmp_path):
    (tmp_path / "b.md").write_text("short")
    (tmp_path / "a.md.gz").write_bytes(gzip.compress(b"long"))
    assert [d.text for d in documents("anarchism", tmp_path)] == ["long", "short"]
    with pytest.raises(UserError, match="no documents of 'anarchism'"):
        list(documents("anarchism", tmp_path / "nothing"))


def test_a_sequence_divides_a_piece():
    with pytest.raises(ValueError, match="piece 2048, length 1000"):
        Options(sources=("smoke",), piece=2048, length=1000)


def test_a_step_takes_its_sequence_from_the_data():
    plan = Plan(scale="smollm2")
    lengths = {
        name: plan.settings(plan.node("finetune", name))["budget"]
        for name in ("lizard_long2048", "lizard_long1024")
    }
    assert [(b["seq_len"], b["batch_size"] * b["accumulate"]) for b in lengths.values()] == [
        (2048, 4),
        (1024, 8),
    ]
    with pytest.raises(ConfigError, match="no text"):
        plan.node("pieces", "mix@smollm2-135m-instruct")
