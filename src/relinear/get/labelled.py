"""Texts and pairs with a label -> tokens, types and labels, as classifiers are trained and scored on.

How a source is read (`form`): `glue`, its tables; `requests`, OLMo's items; `acceptability`, sentences of the
Brown corpus, some with an error made into them (`relinear.get.acceptability`); `neighbours`, pairs of
sentences, of one document or of two; `smoke`, stories of our own. The splits are by the texts' hashes, the
same for every seed.
"""

import gzip
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
from transformers import PreTrainedTokenizerBase

from relinear.errors import UserError
from relinear.folders import tokenizer_of
from relinear.get import acceptability
from relinear.get.labels import write
from relinear.get.sentences import GLUE, SENTENCE_ENDS
from relinear.get.text import Document, documents
from relinear.plan.job import Job


class Example(NamedTuple):
    """A text, or a pair, of a split (`train` or `heldout`), with its label: a class from 0 on, or a
    number."""

    split: str
    label: float
    first: str
    second: str | None = None

    @property
    def digest(self) -> bytes:
        """The SHA-256 of its texts."""
        return hashlib.sha256("\0".join(filter(None, (self.first, self.second))).encode()).digest()


def examples(settings: Mapping[str, Any], folder: Path | None) -> Iterator[Example]:
    """The labelled texts of a source's folder (`smoke` needs none). Raises UserError for a task, file or
    column that is not there."""
    form, task = settings["form"], settings["task"]
    if form == "acceptability":
        fewest, most = settings["words"] or (1, None)
        yield from (Example(*sentence) for sentence in acceptability.sentences(folder, fewest, most))
    elif form == "glue":
        yield from _glue(folder, task)
    elif form == "requests":
        yield from _requests(folder, task)
    elif form == "neighbours":
        yield from _neighbours(documents(settings["source"], folder), numbers=settings["classes"] == 0)
    else:
        for number, story in enumerate(documents("smoke", None)):
            first, second, _ = SENTENCE_ENDS.split(story.text)
            label = number % 64 // 8  # which animal it is about
            yield Example(
                "heldout" if number % 7 == 0 else "train",
                float(label % 2 if settings["classes"] else label),
                first,
                second,
            )


def _glue(folder: Path, task: str) -> Iterator[Example]:
    """Parquet or Arrow tables below a folder of the task's name, whose own or whose folder's name begins with
    the split's."""
    if task not in GLUE:
        raise UserError(f"no task {task!r} of GLUE; have {', '.join(GLUE)}")
    columns, found = (*GLUE[task], "label"), 0
    for path in sorted(
        p for kind in ("parquet", "arrow") for p in folder.rglob(f"*.{kind}") if task in p.parts
    ):
        said = path.name if path.suffix == ".parquet" else path.parent.name
        split = {"train": "train", "validation": "heldout", "validation_matched": "heldout"}.get(
            said.split("-")[0]
        )
        if split is None:  # GLUE's test sets, whose labels are secret, and MNLI's mismatched ones
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
        for *texts, label in zip(*(table[c].to_pylist() for c in columns), strict=True):
            yield Example(split, label, *texts)
        found += 1
    if not found:
        raise UserError(
            f"no tables of {task} in {folder}: expected */{task}/train-*.parquet, */{task}/validation/*.arrow"
            " or the like"
        )


def _requests(folder: Path, task: str) -> Iterator[Example]:
    """BoolQ: a question and a passage, and whether the answer is yes. SQuAD, as GLUE made QNLI of it: a
    question and a sentence, and whether the sentence lacks the answer."""
    paths, seen = sorted(p for p in folder.rglob("requests.jsonl.gz") if task in p.parts), set()
    if not paths:
        raise UserError(
            f"no requests of {task} in {folder}: expected */{task}/*/requests.jsonl.gz; tasks with labels are"
            " boolq, squad"
        )
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for doc in (json.loads(line)["doc"] for line in file):
                if doc["query"] in seen:  # one request an answer
                    continue
                seen.add(doc["query"])
                passage, _, question = doc["query"].removesuffix("\nAnswer:").rpartition("\nQuestion: ")
                if task == "boolq":  # the question first: a long passage is cut
                    yield Example("heldout", float(doc["choices"][doc["gold"]] == "yes"), question, passage)
                else:
                    sentences = SENTENCE_ENDS.split(passage.partition("\nBackground: ")[2])
                    holds = [
                        any(answer in sentence for answer in doc["answers_text"]) for sentence in sentences
                    ]
                    yield from (
                        Example("heldout", float(not w), question, sentences[holds.index(w)])
                        for w in (True, False)
                        if w in holds
                    )


def _neighbours(given: Iterable[Document], numbers: bool) -> Iterator[Example]:
    """The two sentences that a document begins with, and the first of a document with the second of another;
    no sentence stands there twice. The label says whether they are of one document, or (`numbers`) how much
    of their words they share, from 0 to 5."""
    pairs = [
        pieces[:2] for document in given if len(pieces := SENTENCE_ENDS.split(document.text, maxsplit=2)) > 1
    ]
    for own, here, there in zip(pairs[::3], pairs[1::3], pairs[2::3], strict=False):
        for same, pair in ((1.0, own), (0.0, (here[0], there[1]))):
            first, second = (set(re.findall(r"\w+", text.lower())) for text in pair)
            yield Example(
                "heldout", 5 * len(first & second) / max(len(first | second), 1) if numbers else same, *pair
            )


def build(
    out: Path, tokenizer: PreTrainedTokenizerBase, given: Iterable[Example], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Write `{train,heldout}_{tokens,types,ends,labels}.npy` into `out`. Texts come in the order of their
    hash, cut to what the tokenizer's model can read; the last `validation` ones of the training split are
    kept aside. Returns counts, and classes and scores.

    Raises UserError for a label that is none of the classes', a split with too few texts, and a split all of
    whose labels are alike.
    """
    classes, unlike = settings["classes"], 2
    chosen = sorted(dict.fromkeys(given), key=lambda example: example.digest)
    for example in chosen:
        known = (
            example.label == int(example.label) and 0 <= example.label < classes
            if classes
            else np.isfinite(example.label)
        )
        if not known:
            possible = f"0 to {classes - 1}" if classes else "finite numbers"
            raise UserError(
                f"{settings['source']}, {example.split}: label {example.label} of {example.first[:60]!r};"
                f" possible: {possible}"
            )
    splits = {split: [e for e in chosen if e.split == split] for split in ("train", "heldout")}
    if not splits["train"] and settings["test"]:  # a source that has its validation split alone
        splits = {"train": splits["heldout"][settings["test"] :], "heldout": splits["heldout"]}
    trained = (
        len(splits["train"]) - settings["validation"] if settings["train"] is None else settings["train"]
    )
    wanted = {
        "train": max(trained, 1) + settings["validation"],
        "heldout": settings["test"] or max(len(splits["heldout"]), 1),
    }
    facts: dict[str, Any] = {
        "files": {},
        "validation": settings["validation"],
        "classes": classes,
        "scores": list(settings["scores"]),
    }
    out.mkdir(parents=True, exist_ok=True)
    for split, n in wanted.items():
        if (got := len(splits[split])) < n:
            raise UserError(
                f"{settings['source']}, {split}: {n} labelled texts asked for, {got} got; lower `train`,"
                " `validation` or `test` in data.yaml"
            )
        own = splits[split][:n]
        if len({e.label for e in own}) < unlike:
            raise UserError(
                f"{settings['source']}, {split}: all {n} labels are {own[0].label}; a task has two at least"
            )
        facts[split] = write(
            out,
            split,
            [tokenizer(e.first, e.second, truncation=True, return_token_type_ids=True) for e in own],
            [e.label for e in own],
            classes,
            facts["files"],
        )
    content = hashlib.sha256(b"".join(e.digest + str(e.label).encode() for e in chosen)).hexdigest()
    return {"sources": {settings["source"]: {"documents": len(chosen), "sha256": content}}, **facts}


def work(job: Job) -> dict:
    """The labelled texts of a data set for a model's vocabulary."""
    settings = job.settings
    tokenizer = tokenizer_of(job.parents["model"])
    facts = build(job.out, tokenizer, examples(settings, job.assets.get(settings["source"])), settings)
    job.tokens = facts["train"]["tokens"] + facts["heldout"]["tokens"]
    return facts
