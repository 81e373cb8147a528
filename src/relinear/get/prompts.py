"""Prompts and their answers -> token streams, to train on and held out, and the held-out prompts themselves,
to answer.

A sample is the template with its fields filled in, after the tokenizer's document separator and before its
end of text; samples follow each other without padding, and all but the separators is learned, the prompt
included (Hedgehog, Appendix B.5). Sources have splits of their own; what is trained on is shuffled by the
seed, and held-out prompts come in their order.
"""

import csv
import hashlib
import json
import re
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from relinear.errors import UserError
from relinear.files import sha256
from relinear.folders import tokenizer_of
from relinear.get import asked, text
from relinear.get.packed import IGNORED, order
from relinear.plan.job import Job

Sample = Mapping[str, str]  # field of the template -> text; `output` is the answer


def build(
    out: Path,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    folder: Path | None,
    *,
    template: str,
    train_tokens: int,
    seed: int,
) -> dict[str, Any]:
    """Write `{train,heldout}_{tokens,labels}.npy`, flat int32, and `heldout.jsonl` into `out`; return counts
    and sha256s.

    Raises UserError for an unknown source, for one without samples of a split, and for a field that its
    samples do not have.
    """
    if source not in READERS:
        raise UserError(f"no prompts of {source!r}; have {', '.join(READERS)}")
    separator, before = text.document_separator(tokenizer), template.removesuffix("{output}")
    facts: dict[str, Any] = {"files": {}}
    out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "heldout"):
        samples = list(READERS[source](folder, split))
        if not samples:
            raise UserError(f"no samples of {source!r}, {split}, in {folder}")
        if split == "train":
            samples = [samples[i] for i in order(len(samples), seed, epoch=0)]
        tokens, labels, prompts = array("i"), array("i"), []
        for sample in tqdm(samples, desc=f"{split} of {source}", unit="sample"):
            if split == "train" and len(tokens) >= train_tokens:
                break
            try:
                prompt = before.format_map(sample)
            except KeyError as missing:
                raise UserError(
                    f"the template asks for {missing}; samples of {source!r} have {', '.join(sample)}"
                ) from None
            before_answer, whole = (
                tokenizer(said, add_special_tokens=False, verbose=False)["input_ids"]
                for said in (prompt, prompt + sample["output"])
            )
            whole = [*whole, tokenizer.eos_token_id]
            tokens.extend(separator + whole)
            labels.extend([IGNORED] * len(separator) + whole)
            prompts.append(asked.Asked(separator + before_answer, sample["output"]))
        end = train_tokens if split == "train" else len(tokens)
        for kind, values in (("tokens", tokens), ("labels", labels)):
            path = out / f"{split}_{kind}.npy"
            np.save(path, np.frombuffer(values, np.int32)[:end])
            facts["files"][path.name] = sha256(path)
        facts[split] = {"tokens": min(len(tokens), end), "samples": len(prompts)}
    facts["files"][asked.HELDOUT] = sha256(asked.write(out, prompts))
    return facts


def work(job: Job) -> dict[str, Any]:
    """The prompts of a data set for a model's vocabulary."""
    settings = job.settings
    facts = build(
        job.out, tokenizer_of(job.parents["model"]), settings["source"], job.assets.get(settings["source"]),
        template=settings["template"], train_tokens=settings["train_tokens"], seed=job.seed,
    )  # fmt: skip
    job.tokens = facts["train"]["tokens"] + facts["heldout"]["tokens"]
    return facts


# --- how sources are read ---


def _samsum(folder: Path, split: str) -> Iterator[Sample]:
    """Dialogues and their summaries; the test split is held out."""
    for path in sorted(folder.rglob("train.csv" if split == "train" else "test.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            yield from (
                {"input": row["dialogue"], "output": row["summary"]}
                for row in csv.DictReader(file)
                if row["dialogue"] and row["summary"]
            )


def _aclsum(folder: Path, split: str) -> Iterator[Sample]:
    """The abstracts of papers, each with three summaries: of the challenge, the approach and the outcome; the
    test split is held out."""
    for path in sorted(folder.rglob("train.jsonl" if split == "train" else "test.jsonl")):
        for paper in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            abstract = " ".join(paper["sentences"]["abstract"])
            yield from (
                {"input": abstract, "aspect": aspect, "output": summary}
                for aspect, summary in paper["summary"].items()
            )


# as many samples as SAMSum has, whose validation split is not read
SPLITS = {"heldout": slice(819), "train": slice(819 + 818, 819 + 818 + 14732)}
WORDS = range(40, 301)  # of a package's description: neither a line that is its own synopsis, nor a manual


def _synopses(folder: Path, split: str) -> Iterator[Sample]:
    """Descriptions of packages and their one-line synopses, of `WORDS` words: a split of them, in the order
    of their digests.

    Packages of one source begin with the same sentence. Only the first of them is a sample, so that none lies
    in two splits.
    """
    firsts: dict[str, Sample] = {}
    for path in sorted(folder.rglob("Translation-en")):
        for entry in path.read_text(encoding="utf-8").split("\n\n"):
            if found := re.search(r"^Description-en: (.+)\n((?: .*(?:\n|$))+)", entry, re.MULTILINE):
                paragraphs = [
                    " ".join(paragraph.split())
                    for paragraph in re.split(r"^ \.$", found[2], flags=re.MULTILINE)
                ]
                sample = {"input": "\n".join(paragraphs), "output": found[1].strip()}
                if len(sample["input"].split()) in WORDS:
                    firsts.setdefault(re.split(r"(?<=\.) ", paragraphs[0])[0], sample)
    ordered = sorted(firsts, key=lambda sentence: hashlib.sha256(sentence.encode()).digest())
    yield from (firsts[sentence] for sentence in ordered[SPLITS[split]])


def _smoke(_folder: None, split: str) -> Iterator[Sample]:
    """Stories, and their first sentences as summaries."""
    for document in text.documents("smoke"):
        if text._is_heldout(text._digest(document)) == (split == "heldout"):
            yield {
                "input": document.text,
                "aspect": "story",
                "output": document.text.partition(". ")[0] + ".",
            }


READERS = {"samsum": _samsum, "synopses": _synopses, "aclsum": _aclsum, "smoke": _smoke}
