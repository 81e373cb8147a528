"""Corpora: held-out text is never trained on, prompts are never learned, any step can be the first."""

import gzip
import json

import numpy as np
import pytest
import torch

from relinear.families.tiny import byte_tokenizer
from relinear.get import packed as sequences
from relinear.get.packed import IGNORED, Packed, batch_indices
from relinear.get.text import Document, build_text, document_separator, documents

TOKENIZER = byte_tokenizer()


def build(out, *, train=4000, heldout=1000, seed=0, sources=None, **options):
    sources = {"smoke": None} if sources is None else sources
    budgets = {"train_tokens": train, "heldout_tokens": heldout}
    return build_text(out, TOKENIZER, sources, heldout_source="smoke", seed=seed, **budgets, **options)


def stream(folder, split, kind="tokens") -> np.ndarray:
    return np.load(folder / f"{split}_{kind}.npy")


def texts(folder, split) -> set[str]:
    """The whole documents of a stream (its last may be cut)."""
    return set(TOKENIZER.decode(stream(folder, split)).split("<|endoftext|>")[1:-1])


def test_no_held_out_document_is_trained_on_whatever_the_budget(tmp_path):
    build(tmp_path / "small", train=500, heldout=500)
    build(tmp_path / "large", train=40_000, heldout=5_000)
    assert texts(tmp_path / "large", "heldout") and len(texts(tmp_path / "large", "train")) > 300
    for trained in ("small", "large"):
        for scored in ("small", "large"):
            assert not texts(tmp_path / trained, "train") & texts(tmp_path / scored, "heldout")


@pytest.mark.parametrize("split", sequences.SPLITS)
def test_a_smaller_budget_gives_a_prefix(tmp_path, split):
    build(tmp_path / "small", train=500, heldout=500)
    build(tmp_path / "large")
    assert np.array_equal(stream(tmp_path / "small", split), stream(tmp_path / "large", split)[:500])


def test_the_seed_shuffles_what_is_trained_on_and_not_what_is_scored(tmp_path):
    build(tmp_path / "zero", seed=0)
    build(tmp_path / "one", seed=1)
    assert not np.array_equal(stream(tmp_path / "zero", "train"), stream(tmp_path / "one", "train"))
    assert np.array_equal(stream(tmp_path / "zero", "heldout"), stream(tmp_path / "one", "heldout"))


def test_the_same_call_gives_the_same_files(tmp_path):
    assert build(tmp_path / "a") == build(tmp_path / "b")
    assert (tmp_path / "a/train_tokens.npy").read_bytes() == (tmp_path / "b/train_tokens.npy").read_bytes()


def test_copies_of_a_document_fall_on_one_side_in_any_source(tmp_path):
    smoke = list(documents("smoke"))
    folder = tmp_path / "articles"
    folder.mkdir()
    copies = {str(i): {"extract": "  " + d.text.replace(" ", "\n")} for i, d in enumerate(smoke)}
    (folder / "summaries_en-us.json").write_text(json.dumps(copies))
    facts = build(tmp_path / "out", train=30_000, sources={"smoke": None, "wikipedia-intros": folder})
    assert facts["sources"]["wikipedia-intros"]["documents"] == len(smoke)
    trained = {" ".join(text.split()) for text in texts(tmp_path / "out", "train")}
    assert not trained & texts(tmp_path / "out", "heldout")


def test_what_a_mix_holds_out_of_written_text_is_a_data_set_of_its_own(tmp_path):
    """`mix-written` of data.yaml: the same source held out, of which the mix scores nothing and trains on
    nothing."""
    records = [
        {"instruction": f"Add {i} and 1.", "input": "", "output": f"It is {i + 1}."} for i in range(200)
    ]
    (written := tmp_path / "written.jsonl").write_text("\n".join(map(json.dumps, records)))
    sources = {"smoke": None, "written": written}
    build(tmp_path / "mix", train=78_000, sources=sources)
    build_text(
        tmp_path / "own",
        TOKENIZER,
        {"written": written},
        heldout_source="written",
        seed=0,
        train_tokens=2000,
        heldout_tokens=2000,
    )
    held, trained = texts(tmp_path / "own", "heldout"), texts(tmp_path / "mix", "train")
    assert len(held) >= 5 and not held & trained and not held & texts(tmp_path / "own", "train")
    assert sum("Add" in text for text in trained) > 150, "what is not held out is trained on"


def test_every_document_follows_a_separator_that_is_not_learned(tmp_path):
    build(tmp_path)
    tokens, labels = stream(tmp_path, "train"), stream(tmp_path, "train", "labels")
    assert tokens.dtype == labels.dtype == np.int32
    separators = tokens == document_separator(TOKENIZER)[0]
    assert separators[0]
    assert np.array_equal(labels == IGNORED, separators)
    assert np.array_equal(tokens[~separators], labels[~separators])


def test_of_an_instruction_only_response_and_end_are_learned(tmp_path):
    records = [
        {
            "instruction": f"Add {i} and 1.",
            "input": "As a word." if i % 2 else "",
            "output": f"It is {i + 1}.",
        }
        for i in range(40)
    ]
    (tmp_path / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "list").mkdir()
    (tmp_path / "list/records.json").write_text(json.dumps(records))
    assert list(documents("alpaca-cleaned", tmp_path / "records.jsonl")) == list(
        documents("alpaca-cleaned", tmp_path / "list")
    )
    sources = {"smoke": None, "alpaca-cleaned": tmp_path / "records.jsonl"}
    build(tmp_path / "out", train=3000, sources=sources, train_sources=["alpaca-cleaned"])
    tokens, labels = stream(tmp_path / "out", "train"), stream(tmp_path / "out", "train", "labels")
    read = TOKENIZER.decode(tokens)
    learned = TOKENIZER.decode(labels[labels != IGNORED])
    assert "### Instruction:" in read and "### Input:\nAs a word." in read
    assert set(learned.split("<|im_end|>")[:-1]) <= {record["output"] for record in records}


def test_a_record_of_another_schema_is_named(tmp_path):
    (tmp_path / "records.jsonl").write_text('{"question": "?", "answer": "!"}')
    with pytest.raises(
        ValueError, match="record 0: got question, answer; expected instruction, input, output"
    ):
        list(documents("alpaca-cleaned", tmp_path))


def test_brown_loses_its_tags_and_kernel_documents_their_translations(tmp_path):
    (tmp_path / "ca01").write_text(
        "\n\n\tThe/at jury/nn said/vbd 1/2/cd ``/`` no/at ''/'' ,/, Atlanta/np$ ./.\n"
    )
    assert list(documents("brown", tmp_path)) == [Document('The jury said 1/2 "no", Atlanta.')]
    (tmp_path / "translations").mkdir()
    for name in ("a.rst.gz", "translations/b.rst.gz"):
        (tmp_path / name).write_bytes(gzip.compress(name.encode()))
    assert list(documents("linux-doc", tmp_path)) == [Document("a.rst.gz")]


def test_too_small_a_source_says_asked_and_got(tmp_path):
    with pytest.raises(ValueError, match=r"heldout: 900000 tokens asked for, \d+ got from all \d+ documents"):
        build(tmp_path, heldout=900_000)


def test_unknown_sources_are_answered_with_the_known_ones(tmp_path):
    with pytest.raises(
        ValueError,
        match="no text source 'pile': .* end in nothing; .* one of brown, instructions, .* wikipedia_intros",
    ):
        list(documents("pile", tmp_path))
    with pytest.raises(ValueError, match="no reader 'pile' of texts; have brown, "):
        list(documents("brown", tmp_path, reader="pile"))
    with pytest.raises(ValueError, match="'brown' is read by 'brown', which has no columns"):
        list(documents("brown", tmp_path, column="text"))
    with pytest.raises(ValueError, match="no documents of 'brown'"):
        list(documents("brown", tmp_path))
    with pytest.raises(ValueError, match=r"no folder was given for \['brown'\]; have smoke"):
        build(tmp_path, train_sources=["brown"])


def test_packed_sequences_tile_the_stream(tmp_path):
    build(tmp_path, heldout=1000)
    packed = Packed(tmp_path, "heldout", 64)
    assert len(packed) == 1000 // 64
    tokens = torch.cat([packed.sequence(i)[0] for i in range(len(packed))])
    assert tokens.dtype == torch.int64
    assert np.array_equal(tokens.numpy(), stream(tmp_path, "heldout")[: 64 * len(packed)])
    with pytest.raises(IndexError, match="no sequence 15; have 0 to 14"):
        packed.sequence(15)


@pytest.mark.parametrize("seq_len", [0, 1001])
def test_a_sequence_beyond_the_stream_is_an_error(tmp_path, seq_len):
    build(tmp_path, heldout=1000)
    with pytest.raises(ValueError, match=f"sequences of {seq_len} tokens asked for; heldout holds 1 to 1000"):
        Packed(tmp_path, "heldout", seq_len)


def test_each_epoch_visits_each_sequence_once_in_an_order_of_its_own():
    n, batch_size = 7, 3
    visits = [i for step in range(14) for i in batch_indices(step, n=n, batch_size=batch_size, seed=5)]
    epochs = [visits[start : start + n] for start in range(0, len(visits), n)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_a_tokenizer_that_begins_texts_itself_separates_documents_so():
    from tokenizers.processors import TemplateProcessing

    with_bos = byte_tokenizer()
    with_bos.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_end|> $A", special_tokens=[("<|im_end|>", with_bos.eos_token_id)]
    )
    assert document_separator(with_bos) == [with_bos.eos_token_id]
    assert document_separator(TOKENIZER) == [TOKENIZER.bos_token_id]
