"""Packages of documentation and code -> plain documents, each once, none of which an evaluation asks about.

Each file of a source is a document. A document is left out, and counted, where it is
    short      fewer characters than `SHORTEST`;
    language   in another language than asked for, by its beginning (resiliparse, of the languages that
               manuals are translated to);
    twice      the same words as an earlier document;
    near       nearly so: MinHash over `NEAR` words in a row (rensa, 16 bands of 8), which finds 95 % of the
               pairs that share four fifths of these, and 6 % of those that share half;
    items      it shares `SHARED` words in a row with an evaluation item.

The conversion of each source is kept until all is done, so an interrupted one goes on with the next source.
Memory: one document, the hashes of the items, and a few hundred bytes a document.
"""

import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import UInt64
from rensa import RMinHash, RMinHashLSH
from resiliparse.parse.lang import detect_fast
from tqdm import tqdm

from relinear.errors import UserError
from relinear.files import aside, sha256
from relinear.get import converters, documents, text
from relinear.get.plain_documents import ABOUT, TEXT
from relinear.plan.job import Job

SHORTEST = 400  # characters
BEGINNING = 5000  # characters by which a language is told
LANGUAGES = "en de fr es it pt ru ja zh ko pl nl cs sv da fi hu tr el ca uk ro ar fa he id vi nb".split()
NEAR, SHARED = 5, 13  # words in a row
PERMUTATIONS, BANDS = 128, 16
# of a word, else a space
WORD = bytes(c if c >= 128 or chr(c).isalnum() else 32 for c in bytes(range(256)).lower())
SPREAD = np.uint64(0x9E3779B97F4A7C15)  # odd: golden ratio of 2^64
REPEATED = 200  # characters of a paragraph of an item that is looked at once
SIEVE = 26  # bits of a hash by which most that are no item's are told


# --- a source's files as text ---


def convert(source: str, folder: Path, converter: str, language: str | None, to: Path) -> None:
    """Write the files of a source as JSON lines: the path of each, and its text or `why` it is left out.

    Raises UserError where the folder holds no files beside licences, and where the converter keeps less than
    half of their text.
    """
    found = folder.rglob("*") if folder.is_dir() else [folder]
    files = sorted(
        path
        for path in found
        if path.is_file() and not path.name.startswith(".") and not converters.LICENCE.search(path.name)
    )
    to_text = converters.load(converter).convert
    kept = whole = 0
    with aside(to) as unfinished, unfinished.open("w", encoding="utf-8") as lines:
        for path in tqdm(files, desc=f"{source} to text", unit="file"):
            data = path.read_bytes()
            plain, has = to_text(gzip.decompress(data) if path.suffix == ".gz" else data)
            kept, whole = kept + sum(map(len, plain.encode().split())), whole + has
            why = _unfit(plain, language)
            about = {"path": str(path.relative_to(folder)), **({"why": why} if why else {"text": plain})}
            lines.write(json.dumps(about) + "\n")
        if not files or 2 * kept < whole:
            raise UserError(
                f"source {source!r}: the converter {converter!r} keeps {kept:,} bytes of text of {whole:,} in"
                f" {len(files)} files; at least half is needed. Possible: another converter"
                f" ({', '.join(converters.available())}), or other `members` of the asset"
            )


def _unfit(plain: str, language: str | None) -> str | None:
    """Why a text alone is left out; None where it may stay."""
    if len(plain) < SHORTEST:
        return "short"
    told = language and detect_fast(plain[:BEGINNING], langs=LANGUAGES)[0]
    return None if told == language else "language"


# --- words in a row ---


def rows(plain: str, *lengths: int) -> list[UInt64[np.ndarray, " N"]]:
    """For each length a hash of every so many words in a row. A word is of letters and digits, in lower case;
    all else parts words."""
    words = np.fromiter(map(zlib.crc32, plain.encode().translate(WORD).split()), np.uint64)
    found = []
    for length in lengths:
        many = max(len(words) - length + 1, 0)
        hashes = np.zeros(many, np.uint64)
        for i in range(length):
            hashes = (hashes + words[i : i + many]) * SPREAD
        found.append(hashes ^ (hashes >> np.uint64(32)))
    return found


class Items:
    """The hashes of every `SHARED` words in a row of evaluation items."""

    def __init__(self, texts: Iterator[str]):
        some: list[np.ndarray] = [np.zeros(0, np.uint64)]
        for plain in texts:
            some.append(rows(plain, SHARED)[0])
            if len(some) > 50_000:
                some = [np.unique(np.concatenate(some))]
        self.hashes = np.unique(np.concatenate(some))
        self.sieve = np.zeros(1 << SIEVE, bool)
        self.sieve[self.hashes >> np.uint64(64 - SIEVE)] = True

    def shared(self, hashes: UInt64[np.ndarray, " N"]) -> int:
        """How many of a document's hashes are an item's."""
        likely = hashes[self.sieve[hashes >> np.uint64(64 - SIEVE)]]
        places = np.minimum(np.searchsorted(self.hashes, likely), len(self.hashes) - 1)
        return int((self.hashes[places] == likely).sum()) if len(self.hashes) else 0


def items(asset: str, folder: Path) -> Iterator[str]:
    """The texts of an asset of evaluation items: of each row of its tables and JSON lines all strings, or its
    whole documents.

    A paragraph that many rows repeat, such as a passage or an example in a prompt, is given once.
    """
    if asset in documents.READERS and asset not in ("qasper", "smoke"):
        yield from documents.documents(asset, folder)
        return
    seen: set[int] = set()
    for row in tqdm(_table_rows(folder), desc=f"items of {asset}", unit="row"):
        words = [part for whole in _strings(row) for part in whole.split("\n\n")]
        yield " ".join(part for part in words if len(part) < REPEATED or hash(part) not in seen)
        seen.update(hash(part) for part in words if len(part) >= REPEATED)


def _table_rows(folder: Path) -> Iterator[Any]:
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".arrow":
            with pa.memory_map(str(path)) as file:
                for batch in pa.ipc.open_stream(file):
                    yield from batch.to_pylist()
        elif ".jsonl" in path.suffixes:
            with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
                yield from map(json.loads, lines)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _strings(part)


# --- all sources ---


def build(out: Path, parts: Mapping[str, Path], known: Items) -> dict[str, Any]:
    """Write the documents of converted sources (`convert`) that are kept: `text.bin`, UTF-8, one after the
    other, and `documents.jsonl`, a line each with its source, path, sha256 and end in bytes. Returns counts.

    Raises UserError for a document of which half or more is of evaluation items.
    """
    digests: set[bytes] = set()  # of earlier documents, as `near`
    near = RMinHashLSH(0.8, PERMUTATIONS, BANDS)
    facts: dict[str, Any] = {"sources": {}}
    out.mkdir(parents=True, exist_ok=True)
    end = 0
    with (out / TEXT).open("wb") as texts, (out / ABOUT).open("w", encoding="utf-8") as about:
        for source, part in parts.items():
            counts, begin, content = Counter(), end, hashlib.sha256()
            with part.open(encoding="utf-8") as lines:
                for document in map(json.loads, tqdm(lines, desc=f"{source} once", unit="doc")):
                    digest = text._digest(text.Document(document.get("text", "")))
                    why = document.get("why") or _why(
                        f"{source}: {document['path']}", document["text"], digest, digests, near, known
                    )
                    counts[why or "documents"] += 1
                    if why is None:
                        end += texts.write(document["text"].encode())
                        content.update(digest)
                        about.write(
                            json.dumps(
                                {
                                    "source": source,
                                    "path": document["path"],
                                    "sha256": digest.hex(),
                                    "end": end,
                                }
                            )
                            + "\n"
                        )
            if not counts["documents"]:
                raise UserError(
                    f"source {source!r}: no document is left; left out are {dict(counts) or 'none'}"
                )
            left = {why: counts[why] for why in ("short", "language", "twice", "near", "items")}
            facts["sources"][source] = {
                "documents": counts["documents"],
                "bytes": end - begin,
                "left_out": left,
                "sha256": content.hexdigest(),
            }
    return facts | {"files": {name: sha256(out / name) for name in (TEXT, ABOUT)}}


def _why(
    name: str, plain: str, digest: bytes, digests: set[bytes], near: RMinHashLSH, known: Items
) -> str | None:
    """Why a document is left out; None where it is kept."""
    if digest in digests:
        return "twice"
    digests.add(digest)
    few, shared = rows(plain, NEAR, SHARED)
    if len(few):
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(few, [0, len(few)], PERMUTATIONS, 0)
        if near.insert_matrix_and_query_duplicate_flags(matrix, len(digests))[0]:
            return "near"
    if not (many := known.shared(shared)):
        return None
    if 2 * many >= len(shared):
        raise UserError(
            f"{name} is an evaluation item: {many} of its {len(shared)} runs of {SHARED} words are in those"
            " of `items`, and nothing that is trained on may be. Possible: `members` of the asset without it"
        )
    return "items"


def work(job: Job) -> dict[str, Any]:
    """The documents of a data set's packages."""
    settings, parts = job.settings, {}
    for source, converter in settings["sources"].items():
        parts[source] = job.work / f"{source}.texts"
        if not parts[source].is_file():
            convert(source, job.assets[source], converter, settings["language"], parts[source])
    known = Items(plain for asset in settings["items"] for plain in items(asset, job.assets[asset]))
    return build(job.out, parts, known) | {"items": len(known.hashes)}
