"""A text with splits of its own -> token streams: all of its training split, in its order, and its test
split, held out.

Articles are tokenised as texts are (`relinear.get.text`): each after the tokenizer's document separator,
which is not learned.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from relinear.errors import UserError
from relinear.files import sha256
from relinear.folders import tokenizer_of
from relinear.get import text
from relinear.get.packed import IGNORED
from relinear.plan.job import Job

SPLITS = {"train": "train", "heldout": "test"}  # ours -> theirs


def build(out: Path, tokenizer: PreTrainedTokenizerBase, source: str, folder: Path) -> dict[str, Any]:
    """Write `{train,heldout}_{tokens,labels}.npy`, flat int32, into `out`; return counts and sha256s. Raises
    UserError for an unknown source and for a split without articles."""
    if source not in READERS:
        raise UserError(f"no text {source!r} with splits of its own; have {', '.join(READERS)}")
    separator, facts = text.document_separator(tokenizer), {"files": {}}
    out.mkdir(parents=True, exist_ok=True)
    for split, theirs in SPLITS.items():
        streams: dict[str, list[np.ndarray]] = {"tokens": [], "labels": []}
        for article in tqdm(READERS[source](folder, theirs), desc=f"{theirs} of {source}", unit="doc"):
            ids = tokenizer(article, add_special_tokens=False, verbose=False)["input_ids"]
            streams["tokens"].append(np.array(separator + ids, np.int32))
            streams["labels"].append(np.array([IGNORED] * len(separator) + ids, np.int32))
        if not streams["tokens"]:
            raise UserError(f"no articles of {source!r} in {folder}: expected files {theirs}-*.parquet")
        for kind, parts in streams.items():
            path = out / f"{split}_{kind}.npy"
            np.save(path, np.concatenate(parts))
            facts["files"][path.name] = sha256(path)
        facts[split] = {"tokens": sum(map(len, streams["tokens"])), "documents": len(streams["tokens"])}
    return facts


def work(job: Job) -> dict[str, Any]:
    """The splits of a text for a model's vocabulary."""
    source = job.settings["source"]
    facts = build(job.out, tokenizer_of(job.parents["model"]), source, job.assets[source])
    job.tokens = facts["train"]["tokens"] + facts["heldout"]["tokens"]
    return facts


def _wikitext(folder: Path, split: str) -> Iterator[str]:
    """Articles, each from its heading ` = Title = ` on; their lines are rows of tables."""
    for path in sorted(folder.rglob(f"{split}-*.parquet")):
        lines = pyarrow.parquet.read_table(path)["text"].to_pylist()
        for article in re.split(r"(?m)^ = (?=[^=])", "".join(lines))[1:]:
            yield f"= {article}".strip()


READERS = {"wikitext-103": _wikitext}
