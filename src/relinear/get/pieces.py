"""Long documents -> whole pieces of so many tokens, to train on and held out. No piece spans two documents,
and what is left of one is left out.

Whether a document is held out depends on its own text, as for texts of the same sources. Pieces to train on
are shuffled by the seed; held-out ones come in the order of their documents' hash.
"""

import gzip
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from relinear.errors import UserError
from relinear.files import sha256
from relinear.folders import tokenizer_of
from relinear.get import text
from relinear.get.packed import IGNORED, order
from relinear.plan.job import Job


def documents(source: str, folder: Path | None) -> Iterator[text.Document]:
    """The documents of a source, read from its asset's folder (`smoke` needs none). Raises UserError for an
    unknown source or an empty one."""
    if source not in READERS:
        yield from text.documents(source, folder)
        return
    found = list(READERS[source](folder))
    if not found:
        raise UserError(f"no documents of {source!r} in {folder}")
    yield from found


def build(
    out: Path,
    tokenizer: PreTrainedTokenizerBase,
    folders: Mapping[str, Path | None],
    *,
    piece: int,
    train_tokens: int,
    heldout_tokens: int,
    seed: int,
) -> dict[str, Any]:
    """Write `{train,heldout}_{tokens,labels}.npy`, flat int32, a piece after the other; return counts and
    sha256s.

    Each document is preceded by the tokenizer's separator, whose label is `IGNORED`. Of held-out pieces there
    are as many as were asked for or all. Raises UserError where there are fewer pieces to train on than were
    asked for, and where none is held out.
    """
    separator = text.document_separator(tokenizer)
    train: list[np.ndarray] = []
    heldout: dict[bytes, list[np.ndarray]] = {}  # by the hash of the document
    facts: dict[str, Any] = {"sources": {}}
    for source, folder in folders.items():
        by_digest = {text._digest(document): document for document in documents(source, folder)}
        long = 0
        for digest in tqdm(sorted(by_digest), desc=f"documents of {source}", unit="doc"):
            ids = tokenizer(by_digest[digest].text, add_special_tokens=False, verbose=False)["input_ids"]
            both = np.array([separator + ids, [IGNORED] * len(separator) + ids], np.int32)
            # [N, tokens and labels, piece]
            whole = both[:, : both.shape[1] // piece * piece].reshape(2, -1, piece).swapaxes(0, 1)
            if text._is_heldout(digest):
                heldout[digest] = list(whole)
            else:
                train += list(whole)
            long += len(whole) > 0
        content = hashlib.sha256(b"".join(sorted(by_digest))).hexdigest()
        facts["sources"][source] = {"documents": long, "of": len(by_digest), "sha256": content}
    shuffled = [train[i] for i in order(len(train), seed, epoch=0)]
    by_hash = [both for digest in sorted(heldout) for both in heldout[digest]]
    wanted = train_tokens // piece
    if len(shuffled) < wanted or not by_hash:
        raise UserError(
            f"{wanted} pieces of {piece} tokens to train on and one held out asked for; got {len(shuffled)}"
            f" and {len(by_hash)} from the documents of {', '.join(folders)}; possible: a smaller budget or"
            " `piece`, or another source"
        )
    facts["files"] = {}
    out.mkdir(parents=True, exist_ok=True)
    for split, chosen in (
        ("train", shuffled[:wanted]),
        ("heldout", by_hash[: max(heldout_tokens // piece, 1)]),
    ):
        tokens, labels = np.concatenate(chosen, axis=1)
        facts[split] = {
            "tokens": len(tokens),
            "labelled": int((labels != IGNORED).sum()),
            "pieces": len(chosen),
        }
        for kind, values in (("tokens", tokens), ("labels", labels)):
            path = out / f"{split}_{kind}.npy"
            np.save(path, values)
            facts["files"][path.name] = sha256(path)
    return facts


def work(job: Job) -> dict:
    """The pieces of a data set for a model's vocabulary."""
    settings = job.settings
    folders = {source: job.assets.get(source) for source in settings["sources"]}
    facts = build(
        job.out,
        tokenizer_of(job.parents["model"]),
        folders,
        piece=settings["piece"],
        train_tokens=settings["train_tokens"],
        heldout_tokens=settings["heldout_tokens"],
        seed=job.seed,
    )
    job.tokens = facts["train"]["tokens"]
    return facts


# --- how sources are read that no text has ---


def _anarchism(folder: Path) -> Iterator[text.Document]:
    """The sections of the FAQ in Markdown; Debian packs all but the short ones."""
    for path in sorted([*folder.rglob("*.md"), *folder.rglob("*.md.gz")]):
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
            yield text.Document(file.read())


READERS: Mapping[str, Any] = {"anarchism": _anarchism}
