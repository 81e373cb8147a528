"""Texts -> token streams: one to train on and one held out for perplexity, cut into sequences when read.

Documents are tokenised, each preceded by the tokenizer's document separator, concatenated and cut into
sequences of equal length without padding; a sequence may span documents (LoLCATs packs Alpaca so, 1024 tokens
a sequence).

Whether a document is held out depends on a hash of its text and on nothing else: neither budget, seed, order
nor the other sources can move it, and two copies of a document are always on the same side.
"""

import hashlib
import inspect
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from relinear.errors import UserError
from relinear.files import sha256
from relinear.folders import tokenizer_of
from relinear.get import readers
from relinear.get.packed import IGNORED, order
from relinear.get.readers._document import Document
from relinear.plan.job import Job

HELDOUT_SHARE = 0.1  # the share of every source's documents
CHUNK = 256  # documents tokenised at once


def documents(
    name: str, folder: Path | None = None, *, reader: str | None = None, column: str | None = None
) -> Iterator[Document]:
    """The documents of a source, read from its asset's folder or file (`smoke` needs none), in a fixed order.

    Args:
        reader: a file of get/readers; None: the one of the source's name, else by the endings of its files.
        column: of rows, the one that holds the text.

    Raises `UserError` for a source that nothing reads, and for one whose folder holds no documents.
    """
    files = (
        []
        if folder is None
        else [folder]
        if folder.is_file()
        else [path for path in folder.rglob("*") if path.is_file()]
    )
    read = readers.load(chosen := readers.chosen(name, files, reader)).read
    if column is not None and "column" not in inspect.signature(read).parameters:
        raise UserError(f"{name!r} is read by {chosen!r}, which has no columns; leave `column` out")
    count = 0
    for document in read(folder) if column is None else read(folder, column=column):
        count += 1
        yield document
    if count == 0:
        raise UserError(f"no documents of {name!r} in {folder}")


def document_separator(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token ids put before every document.

    What the tokenizer itself begins a text with (Llama 3, Mistral: their BOS); else `<|endoftext|>`, which
    separated documents in SmolLM2's pretraining, although its Instruct tokenizer names `<|im_start|>` as BOS;
    else EOS. Measured for SmolLM2-135M-Instruct on 16 x 512 tokens of the Wikipedia intros: perplexity 17.9
    with `<|endoftext|>`, 18.8 with `<|im_start|>`, 19.0 with `<|im_end|>`, 19.1 with none.
    """
    if begin := tokenizer("")["input_ids"]:
        return list(begin)
    if "<|endoftext|>" in tokenizer.get_vocab():
        return [tokenizer.convert_tokens_to_ids("<|endoftext|>")]
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no BOS, no <|endoftext|> and no EOS to separate documents with")
    return [tokenizer.eos_token_id]


def build_text(
    out: Path,
    tokenizer: PreTrainedTokenizerBase,
    sources: Mapping[str, Path | None],
    *,
    train_tokens: int,
    heldout_tokens: int,
    heldout_source: str,
    seed: int,
    train_sources: Sequence[str] | None = None,
    reader: str | None = None,
    column: str | None = None,
) -> dict:
    """Write `{train,heldout}_{tokens,labels}.npy` (flat int32) into `out`; return counts and sha256s.

    `sources` maps each source's name to its folder; all are trained on, or only `train_sources`. `reader` and
    `column` are those of `documents`. Documents to train on are shuffled by `seed`; held-out ones, all of
    `heldout_source`, come in the order of their hash, so every seed is scored on the same text. A stream is a
    prefix of the one that a larger budget gives. Labels equal tokens, except `IGNORED` on separators and on
    prompts; an instruction's response ends in EOS.

    Raises `UserError` for an unknown source, and for fewer tokens than asked for.
    """
    train_sources = tuple(sources) if train_sources is None else tuple(train_sources)
    if unknown := {heldout_source, *train_sources} - set(sources):
        raise UserError(f"no folder was given for {sorted(unknown)}; have {', '.join(sources)}")
    train: dict[bytes, Document] = {}
    heldout: dict[bytes, Document] = {}
    facts: dict = {"sources": {}}
    for name, folder in sources.items():
        content, count = hashlib.sha256(), 0
        for document in documents(name, folder, reader=reader, column=column):
            digest = _digest(document)
            content.update(digest)
            count += 1
            if _is_heldout(digest):
                if name == heldout_source:
                    heldout[digest] = document
            elif name in train_sources:
                train[digest] = document
        facts["sources"][name] = {"documents": count, "sha256": content.hexdigest()}

    in_reading_order = list(train.values())
    shuffled = [in_reading_order[i] for i in order(len(in_reading_order), seed, epoch=0)]
    by_hash = [heldout[digest] for digest in sorted(heldout)]
    facts["separator"] = tokenizer.convert_ids_to_tokens(document_separator(tokenizer))
    facts["files"] = {}
    out.mkdir(parents=True, exist_ok=True)
    for split, chosen, budget in (("train", shuffled, train_tokens), ("heldout", by_hash, heldout_tokens)):
        tokens, labels, used = _stream(split, chosen, tokenizer, budget)
        facts[split] = {"tokens": budget, "labelled": int((labels != IGNORED).sum()), "documents": used}
        for kind, values in (("tokens", tokens), ("labels", labels)):
            path = out / f"{split}_{kind}.npy"
            np.save(path, values)
            facts["files"][path.name] = sha256(path)
    return facts


def work(job: Job) -> dict:
    """The texts of a data set as token streams for a model's vocabulary."""
    settings = job.settings
    names = dict.fromkeys((*settings["sources"], settings["heldout_source"]))
    made = {"smoke": None}
    if "written" in job.parents:
        made["written"] = job.parents["written"] / "written.jsonl"
    folders = {n: made[n] if n in made else job.assets[n] for n in names}
    return build_text(
        job.out,
        tokenizer_of(job.parents["model"]),
        folders,
        train_sources=settings["sources"],
        train_tokens=settings["train_tokens"],
        heldout_tokens=settings["heldout_tokens"],
        heldout_source=settings["heldout_source"],
        seed=job.seed,
        reader=settings.get("reader"),
        column=settings.get("column"),
    )


def _digest(document: Document) -> bytes:
    """The document's identity: a hash of its words, whatever the white space."""
    prompt, text = (" ".join(part.split()) for part in (document.prompt, document.text))
    return hashlib.sha256(f"{prompt}\0{text}".encode()).digest()


def _is_heldout(digest: bytes) -> bool:
    return int.from_bytes(digest[:8], "big") < HELDOUT_SHARE * 2**64


def _stream(
    split: str, chosen: Sequence[Document], tokenizer: PreTrainedTokenizerBase, budget: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """The first `budget` tokens of the documents, their labels, and how many documents that took."""
    if budget < 1:
        raise UserError(f"{split}: {budget} tokens asked for; at least 1 is needed")
    separator = document_separator(tokenizer)
    # 4 bytes a number; a list takes 8, and its numbers 28 each
    tokens, labels, used = array("i"), array("i"), 0
    with tqdm(total=budget, desc=f"{split} tokens", unit="tok", unit_scale=True) as bar:
        for start in range(0, len(chosen), CHUNK):
            chunk = chosen[start : start + CHUNK]
            prompts, texts = (
                tokenizer(list(column), add_special_tokens=False, verbose=False)["input_ids"]
                for column in ([d.prompt for d in chunk], [d.text for d in chunk])
            )
            for document, prompt, text in zip(chunk, prompts, texts, strict=True):
                end = [tokenizer.eos_token_id] if document.prompt else []
                tokens.extend(separator + prompt + text + end)
                labels.extend([IGNORED] * (len(separator) + len(prompt)) + text + end)
                used += 1
                if len(tokens) >= budget:
                    bar.update(budget - bar.n)
                    return (
                        np.frombuffer(tokens, np.int32, budget),
                        np.frombuffer(labels, np.int32, budget),
                        used,
                    )
            bar.update(len(tokens) - bar.n)
    raise UserError(
        f"{split}: {budget} tokens asked for, {len(tokens)} got from all {len(chosen)} documents "
        f"(held out: {HELDOUT_SHARE:.0%} of every source's); lower the budget or add a source"
    )
