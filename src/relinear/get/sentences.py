"""Short texts and pairs -> tokens, each text a sequence with the tokenizer's own special tokens, as encoders
are trained and measured on.

How a source is read (`form`): `glue`, its tables, one row a text or a pair; `requests`, OLMo's items, a
passage and a question; `sentences`, the lines of documents; `neighbours`, pairs of the sentences that a
document begins with; `documents`, whole ones. GLUE's own splits stay; else a tenth of the documents is held
out, by their hash alone.
"""

import gzip
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
from transformers import PreTrainedTokenizerBase

from relinear.errors import UserError
from relinear.files import sha256
from relinear.folders import tokenizer_of
from relinear.get.packed import order
from relinear.get.text import _digest, _is_heldout, documents
from relinear.plan.job import Job

GLUE = {
    "cola": ("sentence",),
    "sst2": ("sentence",),
    "mrpc": ("sentence1", "sentence2"),
    "rte": ("sentence1", "sentence2"),
    "stsb": ("sentence1", "sentence2"),
    "qqp": ("question1", "question2"),
    "mnli": ("premise", "hypothesis"),
    "qnli": ("question", "sentence"),
}
SENTENCE_ENDS = re.compile(r'(?<=[.!?])["\']?\s+(?=["\'A-Z])')


class Text(NamedTuple):
    """A text, or a pair of them, of a split."""

    split: str
    first: str
    second: str | None = None

    @property
    def digest(self) -> bytes:
        """The SHA-256 of its texts."""
        return hashlib.sha256("\0".join(filter(None, self[1:])).encode()).digest()


def texts(settings: Mapping[str, Any], folder: Path | None) -> Iterator[Text]:
    """The texts of a source's folder (`smoke` needs none), in a fixed order. Raises UserError for a task,
    file or column that is not there."""
    form, task = settings["form"], settings["task"]
    if form == "glue":
        yield from _glue(folder, task)
    elif form == "requests":
        yield from _requests(folder, task)
    else:
        fewest, most = settings["words"] or (1, None)
        for split, document in _documents(settings["source"], folder):
            for pieces in _pieces(document, form):
                if all(fewest <= len(piece.split()) <= (most or len(piece)) for piece in pieces):
                    yield Text(split, *pieces)


def _pieces(document: str, form: str) -> Iterator[Sequence[str]]:
    """A document's texts, one or two pieces each."""
    if form == "neighbours":
        first = SENTENCE_ENDS.split(document, maxsplit=2)[:2]
        yield from [first] if len(first) == 2 else []
    else:
        yield from (
            [piece]
            for piece in (
                [document] if form == "documents" else filter(None, map(str.strip, document.splitlines()))
            )
        )


def _glue(folder: Path, task: str) -> Iterator[Text]:
    """Parquet or Arrow tables below a folder of the task's name, whose own or whose folder's name begins with
    the split's."""
    if task not in GLUE:
        raise UserError(f"no task {task!r} of GLUE; have {', '.join(GLUE)}")
    columns, found = GLUE[task], 0
    for path in sorted(
        p for kind in ("parquet", "arrow") for p in folder.rglob(f"*.{kind}") if task in p.parts
    ):
        said = path.name if path.suffix == ".parquet" else path.parent.name
        split = {"train": "train", "validation": "heldout", "validation_matched": "heldout"}.get(
            said.split("-")[0]
        )
        if split is None:  # test sets, and MNLI's mismatched ones
            continue
        table = (
            pyarrow.parquet.read_table(path)
            if path.suffix == ".parquet"
            else pyarrow.ipc.open_stream(path).read_all()
        )
        if missing := [c for c in columns if c not in table.column_names]:
            raise UserError(
                f"{path}: got the columns {', '.join(table.column_names)}; {task} needs {', '.join(missing)}"
            )
        rows = zip(*(table[c].to_pylist() for c in columns), strict=True)
        yield from (Text(split, *row) for row in rows)
        found += 1
    if not found:
        raise UserError(
            f"no tables of {task} in {folder}: expected */{task}/train-*.parquet, */{task}/validation/*.arrow"
            " or the like"
        )


def _requests(folder: Path, task: str) -> Iterator[Text]:
    """BoolQ: passage and question. SQuAD, as GLUE made QNLI of it: the question with the sentence that holds
    the answer, and with another. DROP: the first two questions about a passage."""
    if task not in ("boolq", "squad", "drop"):
        raise UserError(f"no task {task!r} of requests; have boolq, squad, drop")
    paths, seen, asked = sorted(p for p in folder.rglob("requests.jsonl.gz") if task in p.parts), set(), {}
    if not paths:
        raise UserError(f"no requests of {task} in {folder}: expected */{task}/*/requests.jsonl.gz")
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for doc in (json.loads(line)["doc"] for line in file):
                passage, _, question = doc["query"].removesuffix("\nAnswer:").rpartition("\nQuestion: ")
                if doc["query"] in seen:  # one request an answer
                    continue
                seen.add(doc["query"])
                if task == "boolq":
                    yield Text("heldout", passage, question)
                    continue
                if task == "drop":
                    asked.setdefault(passage, []).append(question)
                    if len(asked[passage]) == 2:
                        yield Text("heldout", *asked[passage])
                    continue
                sentences = SENTENCE_ENDS.split(passage.partition("\nBackground: ")[2])
                holds = [any(answer in sentence for answer in doc["answers_text"]) for sentence in sentences]
                for wanted in (True, False):
                    if wanted in holds:
                        yield Text("heldout", question, sentences[holds.index(wanted)])


def _documents(source: str, folder: Path | None) -> Iterator[tuple[str, str]]:
    """Split and text of each document; WikiText's splits are its own."""
    if source != "wikitext-103":
        for document in documents(source, folder):
            yield "heldout" if _is_heldout(_digest(document)) else "train", document.text
        return
    for path in sorted(folder.rglob("*.parquet")):
        split = {"train": "train", "validation": "heldout"}.get(path.name.split("-")[0])
        if split is not None:
            lines = pyarrow.parquet.read_table(path)["text"].to_pylist()
            for article in re.split(r"(?m)^ = (?=[^=])", "".join(lines))[1:]:
                yield split, f"= {article}".strip()


def build(
    out: Path, tokenizer: PreTrainedTokenizerBase, given: Iterable[Text], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Write `{train,heldout}_{tokens,types,ends}.npy` into `out`: flat ids (int32) and types (uint8) of all
    texts, and where each ends (int64).

    Training texts are shuffled by the seed and end with `train_tokens`; held-out ones come in the order of
    their hash, so that every seed is scored on the same. Texts are cut to what the tokenizer's model can
    read. Returns counts. Raises UserError for fewer texts than asked for.
    """
    by_split: dict[str, list[Text]] = {"train": [], "heldout": []}
    for text in dict.fromkeys(given):
        by_split[text.split].append(text)
    content = hashlib.sha256(b"".join(sorted(text.digest for split in by_split.values() for text in split)))
    documents = sum(map(len, by_split.values()))
    facts: dict[str, Any] = {
        "sources": {settings["source"]: {"documents": documents, "sha256": content.hexdigest()}},
        "files": {},
    }
    if not by_split["heldout"]:
        raise UserError(
            f"no texts of {settings['source']} are held out: {documents} in all, and a tenth of them by hash,"
            " or GLUE's validation, is"
        )
    out.mkdir(parents=True, exist_ok=True)
    for split, chosen in by_split.items():
        chosen.sort(key=lambda text: text.digest)
        if split == "train":
            chosen = [chosen[i] for i in order(len(chosen), settings["seed"], epoch=0)]
        if (asked := settings[split]) is not None and len(chosen) < asked:
            raise UserError(
                f"{split}: {asked} texts of {settings['source']} asked for, {len(chosen)} got; lower"
                f" `{split}` in data.yaml"
            )
        tokens, types, ends = _tokenised(
            chosen[:asked],
            tokenizer,
            settings["chunk"],
            settings["train_tokens"] if split == "train" else None,
        )
        facts[split] = {"texts": len(ends), "tokens": len(tokens)}
        for kind, values in (("tokens", tokens), ("types", types), ("ends", ends)):
            path = out / f"{split}_{kind}.npy"
            np.save(path, values)
            facts["files"][path.name] = sha256(path)
    return facts


def _tokenised(
    chosen: list[Text], tokenizer, chunk: int | None, budget: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, types and ends of the texts, until they have `budget` tokens; in chunks, as many whole ones as
    there are."""
    ids: list[int] = []
    types: list[int] = []
    ends: list[int] = []
    for text in chosen:
        if budget is not None and len(ids) >= budget:
            break
        row = tokenizer(
            text.first, text.second, truncation=chunk is None, return_token_type_ids=True, verbose=False
        )
        ids += row["input_ids"]
        types += row["token_type_ids"]
        ends.append(len(ids))
    if chunk is not None:
        whole = min(len(ids), budget or len(ids)) // chunk
        ids, types, ends = (
            ids[: whole * chunk],
            types[: whole * chunk],
            [(i + 1) * chunk for i in range(whole)],
        )
    return np.array(ids, np.int32), np.array(types, np.uint8), np.array(ends, np.int64)


def work(job: Job) -> dict:
    """The sentences of a data set for a model's vocabulary."""
    settings = job.settings
    tokenizer = tokenizer_of(job.parents["model"])
    facts = build(job.out, tokenizer, texts(settings, job.assets.get(settings["source"])), settings)
    job.tokens = facts["train"]["tokens"] + facts["heldout"]["tokens"]
    return facts
