"""Corpora -> token streams for one model's vocabulary, as those of `text`: one to train on and one held out,
cut into sequences when read.

All documents are tokenised, so that the tokens of every source are counted; a dose takes some of them.
Whether a document is held out depends on its own words, as for every text. Documents to train on are shuffled
by the seed; held-out ones come in the order of their hash. A stream is a prefix of the one that a larger dose
gives. Tokens lie on the disk, so the memory does not grow with a corpus but by some bytes a document.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from relinear.errors import UserError
from relinear.files import sha256
from relinear.folders import tokenizer_of
from relinear.get import text
from relinear.get.packed import IGNORED, order
from relinear.get.plain_documents import Plain, read
from relinear.plan.job import Job

LONG = 4096  # tokens of a document that counts as long
BATCH = 1 << 22  # characters tokenised at once


class Place(NamedTuple):
    """Where a document's tokens lie, the separator before them included."""

    source: str
    digest: bytes
    begin: int
    end: int


def build(
    out: Path,
    work: Path,
    tokenizer: PreTrainedTokenizerBase,
    corpora: Mapping[str, Path],
    *,
    train_tokens: int,
    heldout_tokens: int,
    heldout_source: str | None,
    seed: int,
) -> dict[str, Any]:
    """Write `{train,heldout}_{tokens,labels}.npy` (flat int32) into `out`; return counts and sha256s.

    `work` is a folder for the tokens of all documents. `heldout_source`: the package whose held-out documents
    are the held-out text; None: of all. Labels equal tokens, but are `IGNORED` on the separator before each
    document. Raises UserError for fewer tokens than asked for.
    """
    places = list(_tokenised(work / "tokens.bin", tokenizer, corpora))
    tokens = np.memmap(work / "tokens.bin", np.int32, "r")
    held = [place for place in places if text._is_heldout(place.digest)]
    train = [place for place in places if not text._is_heldout(place.digest)]
    sources = {name: _facts(name, places) for name in dict.fromkeys(place.source for place in places)}
    if heldout_source is not None and heldout_source not in sources:
        raise UserError(f"no source {heldout_source!r} to hold out; have {', '.join(sources)}")
    chosen = {
        "train": ([train[i] for i in order(len(train), seed, epoch=0)], train_tokens),
        "heldout": (
            sorted((p for p in held if heldout_source in (None, p.source)), key=lambda place: place.digest),
            heldout_tokens,
        ),
    }
    facts: dict[str, Any] = {"sources": sources, "files": {}}
    separator = text.document_separator(tokenizer)
    out.mkdir(parents=True, exist_ok=True)
    for split, (documents, budget) in chosen.items():
        if (has := sum(place.end - place.begin for place in documents)) < budget:
            raise UserError(
                f"{split}: {budget:,} tokens asked for, {has:,} got from all {len(documents)} documents;"
                " lower the dose or add a source"
            )
        used = _write(out, split, documents, budget, tokens, len(separator))
        facts[split] = {"tokens": budget, "documents": used, "unique": has}
        facts["files"] |= {
            f"{split}_{kind}.npy": sha256(out / f"{split}_{kind}.npy") for kind in ("tokens", "labels")
        }
    (work / "tokens.bin").unlink()
    return facts


def _tokenised(to: Path, tokenizer: PreTrainedTokenizerBase, corpora: Mapping[str, Path]) -> Iterator[Place]:
    """Write the tokens of all documents, each behind the separator."""
    separator, at = text.document_separator(tokenizer), 0
    with to.open("wb") as file:
        for batch in _batches(
            tqdm(
                (d for folder in corpora.values() for d in read(folder)),
                desc="documents to tokens",
                unit="doc",
            )
        ):
            found = tokenizer(
                [d.text for d in batch], add_special_tokens=False, return_attention_mask=False, verbose=False
            )["input_ids"]
            for document, ids in zip(batch, found, strict=True):
                np.array([*separator, *ids], np.int32).tofile(file)
                yield Place(document.source, document.digest, at, at := at + len(separator) + len(ids))


def _batches(documents: Iterator[Plain]) -> Iterator[list[Plain]]:
    batch: list[Plain] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _facts(source: str, places: list[Place]) -> dict[str, Any]:
    """The tokens of a source: all, those of long documents, and those that are held out."""
    own = [place for place in places if place.source == source]

    def tokens(some: list[Place]) -> int:
        return sum(place.end - place.begin for place in some)

    # the separator is no token of the document
    long = [place for place in own if place.end - place.begin > LONG]
    held = [place for place in own if text._is_heldout(place.digest)]
    content = hashlib.sha256(b"".join(place.digest for place in own)).hexdigest()
    return {
        "documents": len(own),
        "tokens": tokens(own),
        "long": tokens(long),
        "heldout": tokens(held),
        "sha256": content,
    }


def _write(
    out: Path, split: str, documents: list[Place], budget: int, tokens: np.ndarray, separator: int
) -> int:
    """Write a split's first `budget` tokens and their labels; returns the number of documents that these are
    of."""
    paths = [out / f"{split}_{kind}.npy" for kind in ("tokens", "labels")]
    files = [np.lib.format.open_memmap(path, "w+", np.int32, (budget,)) for path in paths]
    at = used = 0
    for place in documents:
        if at == budget:
            break
        own = tokens[place.begin : min(place.end, place.begin + budget - at)]
        for file in files:
            file[at : at + len(own)] = own
        files[1][at : at + separator] = IGNORED
        at, used = at + len(own), used + 1
    for file in files:
        file.flush()
    return used


def work(job: Job) -> dict[str, Any]:
    """The corpora of a data set as token streams for a model's vocabulary."""
    settings = job.settings
    return build(
        job.out,
        job.work,
        tokenizer_of(job.parents["model"]),
        {name: job.parents[name] for name in settings["sources"]},
        train_tokens=settings["train_tokens"],
        heldout_tokens=settings["heldout_tokens"],
        heldout_source=settings["heldout_source"],
        seed=job.seed,
    )
