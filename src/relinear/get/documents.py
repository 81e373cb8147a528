"""Whole documents -> tokens, each document apart, for measurements that look far back.

A document is one work from its first word to its last: a novel, a paper, a page of a manual. Sources that
texts are made of are read as texts have them; of novels the lines that were broken for print are joined.
Documents come in the order of their hash, as held-out texts do, so that every seed is measured on the same.
"""

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from relinear.errors import UserError
from relinear.files import sha256, write_json
from relinear.folders import tokenizer_of
from relinear.get import text
from relinear.get.qasper import paper
from relinear.get.whole import ABOUT, ENDS, TOKENS
from relinear.plan.job import Job


def documents(source: str, folder: Path | None) -> Iterator[str]:
    """The documents of a source, read from its asset's folder (`smoke` needs none). Raises UserError for an
    unknown source or an empty one."""
    if source not in READERS:
        yield from (document.text for document in text.documents(source, folder))
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
    shortest: int,
    part: str,
) -> dict[str, Any]:
    """Write `tokens.npy` (flat int32), `ends.npy` (int64, where each document ends) and `documents.json` (its
    source and sha256).

    The tokens are the document's own; `documents.json` also has the separator that a model reads before it.
    Returns counts. Raises UserError where a source has no document of `shortest` tokens, saying how long its
    longest is.
    """
    chosen: list[tuple[bytes, str, np.ndarray]] = []
    facts: dict[str, Any] = {"sources": {}}
    for source, folder in folders.items():
        by_digest = {
            text._digest(text.Document(document)): document for document in documents(source, folder)
        }
        if part == "heldout":
            by_digest = {
                digest: document for digest, document in by_digest.items() if text._is_heldout(digest)
            }
        lengths = dict(_tokenised(source, by_digest, tokenizer))
        long = [(digest, source, ids) for digest, ids in lengths.items() if len(ids) >= shortest]
        if not long:
            longest = max(map(len, lengths.values()), default=0)
            raise UserError(
                f"{source}: documents of {shortest} tokens asked for; of {len(lengths)} documents ({part})"
                f" the longest has {longest}. Possible: a smaller `shortest` in data.yaml, or another source"
            )
        chosen += long
        facts["sources"][source] = {
            "documents": len(long),
            "of": len(lengths),
            "sha256": hashlib.sha256(b"".join(sorted(by_digest))).hexdigest(),
        }
    chosen.sort(key=lambda document: document[0])
    out.mkdir(parents=True, exist_ok=True)
    np.save(out / TOKENS, np.concatenate([ids for *_, ids in chosen]))
    np.save(out / ENDS, np.cumsum([len(ids) for *_, ids in chosen], dtype=np.int64))
    about = [{"source": source, "sha256": digest.hex()} for digest, source, _ in chosen]
    write_json(out / ABOUT, {"separator": text.document_separator(tokenizer), "documents": about})
    facts |= {"documents": len(chosen), "tokens": sum(len(ids) for *_, ids in chosen)}
    return facts | {"files": {name: sha256(out / name) for name in (TOKENS, ENDS, ABOUT)}}


def _tokenised(source: str, by_digest: Mapping[bytes, str], tokenizer) -> Iterable[tuple[bytes, np.ndarray]]:
    for digest, document in tqdm(by_digest.items(), desc=f"documents of {source}", unit="doc"):
        yield (
            digest,
            np.array(tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"], np.int32),
        )


def work(job: Job) -> dict:
    """The documents of a data set for a model's vocabulary."""
    folders = {source: job.assets.get(source) for source in job.settings["sources"]}
    tokenizer = tokenizer_of(job.parents["model"])
    facts = build(job.out, tokenizer, folders, shortest=job.settings["shortest"], part=job.settings["part"])
    job.tokens = facts["tokens"]
    return facts


# --- how sources are read ---


def joined(lines: Iterable[str]) -> str:
    """Lines as paragraphs, which are apart by a blank line."""
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines))
    return "\n\n".join(filter(None, (" ".join(paragraph.split()) for paragraph in paragraphs)))


def _austen(folder: Path) -> Iterator[str]:
    """R's database of lazily loaded data: each entry its length and a zlib stream, which holds one vector of
    lines."""
    for path in sorted(folder.rglob("Rdata.rdb")):
        rest = path.read_bytes()
        while rest:
            entry = zlib.decompressobj()
            content = entry.decompress(rest[4:])
            if not entry.eof or len(content) != int.from_bytes(rest[:4]):
                raise UserError(
                    f"{path}: an entry of {len(content)} bytes, where {int.from_bytes(rest[:4])} were"
                    " announced"
                )
            yield joined(character_vector(content))
            rest = entry.unused_data


def character_vector(content: bytes) -> list[str]:
    """The strings of a character vector that R serialised (XDR, version 2 or 3, no attributes). Raises
    UserError for anything else.

    Source: R Internals, 1.8 "Serialization Formats".
    """
    if content[:2] != b"X\n" or int.from_bytes(content[2:6]) not in (2, 3):
        raise UserError(f"no serialisation of R in XDR, version 2 or 3: it begins with {content[:6]!r}")
    at = 14
    if int.from_bytes(content[2:6]) == 3:  # the encoding's name
        at += 4 + int.from_bytes(content[at : at + 4])
    kind, count = int.from_bytes(content[at : at + 4]), int.from_bytes(content[at + 4 : at + 8])
    if kind != 16:
        raise UserError(f"no plain character vector of R: type and flags are {kind}, expected 16")
    at, found = at + 8, []
    for _ in range(count):
        size = int.from_bytes(content[at + 4 : at + 8])
        found.append(content[at + 8 : at + 8 + size].decode())
        at += 8 + size
    return found


def _qasper(folder: Path) -> Iterator[str]:
    """Title, abstract and sections of each paper, once. Text that LaTeX left without a heading (authors,
    dates) stays where it stands."""
    papers: dict[str, str] = {}
    for path in sorted(folder.rglob("qasper_yesno/*/requests.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for doc in (json.loads(line)["doc"] for line in file):
                if doc["title"] not in papers:
                    papers[doc["title"]] = paper(doc)
    yield from papers.values()


def _smoke(_folder: None) -> Iterator[str]:
    """Eight documents: for each name all its stories from `text`."""
    stories: dict[str, list[str]] = {}
    for story in text.documents("smoke"):
        stories.setdefault(story.text.split()[0], []).append(story.text)
    yield from ("\n\n".join(own) for own in stories.values())


READERS = {"austen": _austen, "qasper": _qasper, "smoke": _smoke}
