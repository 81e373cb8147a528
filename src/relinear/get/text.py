"""Texts -> token streams: one to train on and one held out for perplexity, cut into sequences when read.

Documents are tokenised, each preceded by the tokenizer's document separator, concatenated and cut into
sequences of equal length without padding; a sequence may span documents (LoLCATs packs Alpaca so, 1024 tokens
a sequence).

Whether a document is held out depends on a hash of its text and on nothing else: neither budget, seed, order
nor the other sources can move it, and two copies of a document are always on the same side.
"""

import gzip
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from relinear.errors import UserError
from relinear.files import sha256
from relinear.folders import tokenizer_of
from relinear.get.packed import IGNORED, order
from relinear.plan.job import Job

HELDOUT_SHARE = 0.1  # the share of every source's documents
CHUNK = 256  # documents tokenised at once

# The wording of Stanford Alpaca, which LoLCATs finetunes with.
PROMPT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


class Document(NamedTuple):
    """A text to learn, after a prompt that is read but not learned (empty for plain text)."""

    text: str
    prompt: str = ""


def documents(name: str, folder: Path | None = None) -> Iterator[Document]:
    """The documents of a source, read from its asset's folder (`smoke` needs none), in a fixed order.

    Raises `UserError` for an unknown source or one whose folder holds no documents.
    """
    if name not in READERS:
        raise UserError(f"no text source {name!r}; have {', '.join(READERS)}")
    count = 0
    for document in READERS[name](folder):
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
) -> dict:
    """Write `{train,heldout}_{tokens,labels}.npy` (flat int32) into `out`; return counts and sha256s.

    `sources` maps each source's name to its folder; all are trained on, or only `train_sources`. Documents to
    train on are shuffled by `seed`; held-out ones, all of `heldout_source`, come in the order of their hash,
    so every seed is scored on the same text. A stream is a prefix of the one that a larger budget gives.
    Labels equal tokens, except `IGNORED` on separators and on prompts; an instruction's response ends in EOS.

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
        for document in documents(name, folder):
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
        job.out, tokenizer_of(job.parents["model"]), folders, train_sources=settings["sources"],
        train_tokens=settings["train_tokens"], heldout_tokens=settings["heldout_tokens"], heldout_source=settings["heldout_source"],
        seed=job.seed,
    )  # fmt: skip


def _digest(document: Document) -> bytes:
    """The document's identity: a hash of its words, whatever the white space."""
    prompt, text = (" ".join(part.split()) for part in (document.prompt, document.text))
    return hashlib.sha256(f"{prompt}\0{text}".encode()).digest()


def _is_heldout(digest: bytes) -> bool:
    return int.from_bytes(digest[:8], "big") < HELDOUT_SHARE * 2**64


def _stream(split: str, chosen: Sequence[Document], tokenizer: PreTrainedTokenizerBase, budget: int) -> tuple[np.ndarray, np.ndarray, int]:
    """The first `budget` tokens of the documents, their labels, and how many documents that took."""
    if budget < 1:
        raise UserError(f"{split}: {budget} tokens asked for; at least 1 is needed")
    separator = document_separator(tokenizer)
    tokens: list[int] = []
    labels: list[int] = []
    used = 0
    with tqdm(total=budget, desc=f"{split} tokens", unit="tok", unit_scale=True) as bar:
        for start in range(0, len(chosen), CHUNK):
            chunk = chosen[start : start + CHUNK]
            prompts, texts = (
                tokenizer(list(column), add_special_tokens=False, verbose=False)["input_ids"]
                for column in ([d.prompt for d in chunk], [d.text for d in chunk])
            )
            for document, prompt, text in zip(chunk, prompts, texts, strict=True):
                end = [tokenizer.eos_token_id] if document.prompt else []
                tokens += separator + prompt + text + end
                labels += [IGNORED] * (len(separator) + len(prompt)) + text + end
                used += 1
                if len(tokens) >= budget:
                    bar.update(budget - bar.n)
                    return np.array(tokens[:budget], np.int32), np.array(labels[:budget], np.int32), used
            bar.update(len(tokens) - bar.n)
    raise UserError(
        f"{split}: {budget} tokens asked for, {len(tokens)} got from all {len(chosen)} documents "
        f"(held out: {HELDOUT_SHARE:.0%} of every source's); lower the budget or add a source"
    )


def _wikipedia(folder: Path) -> Iterator[Document]:
    for path in sorted(folder.rglob("summaries_en-us.json")):
        for article in json.loads(path.read_text(encoding="utf-8")).values():
            yield Document(article["extract"])


def _brown(folder: Path) -> Iterator[Document]:
    """`The/at jury/nn said/vbd ./.` -> `The jury said.`"""
    for path in sorted(folder.rglob("c[a-r][0-9][0-9]")):
        words = re.sub(r"(\S+)/\S+", r"\1", path.read_text(encoding="utf-8"))
        quoted = words.replace("`` ", '"').replace(" ''", '"')
        spaced = re.sub(r" ([.,;:?!])", r"\1", re.sub(r" +", " ", quoted))
        yield Document(re.sub(r"\s*\n\s*", "\n\n", spaced).strip())


def _linux_doc(folder: Path) -> Iterator[Document]:
    for path in sorted(folder.rglob("*.rst.gz")):
        if "translations" not in path.parts:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                yield Document(file.read())


def _instructions(folder: Path) -> Iterator[Document]:
    """Records of Alpaca's schema from `*.json` (a list) or `*.jsonl` (one a line), or from one such file."""
    paths = [folder] if folder.is_file() else sorted([*folder.glob("*.json"), *folder.glob("*.jsonl")])
    for path in paths:
        content = path.read_text(encoding="utf-8")
        records = map(json.loads, content.splitlines()) if path.suffix == ".jsonl" else json.loads(content)
        for number, record in enumerate(records):
            if not {"instruction", "input", "output"} <= record.keys():
                keys = ", ".join(record)
                raise UserError(f"{path}, record {number}: got {keys}; expected instruction, input, output")
            template = PROMPT_WITH_INPUT if record["input"] else PROMPT
            yield Document(record["output"], template.format_map(record))


def _smoke(_folder: None) -> Iterator[Document]:
    """512 stories of a name, an animal and a place: a text whose regularities a tiny model can learn."""
    names = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana")
    animals = ("fox", "owl", "cat", "hare", "wolf", "toad", "crow", "deer")
    places = ("mill", "lake", "barn", "hill", "road", "well", "gate", "farm")
    for name, animal, place in product(names, animals, places):
        yield Document(
            f"{name} saw the {animal} by the {place}. The {animal} looked at {name} and left the {place}. {name} told a friend about the {animal}."
        )


READERS = {
    "wikipedia-intros": _wikipedia,
    "brown": _brown,
    "linux-doc": _linux_doc,
    "alpaca-cleaned": _instructions,
    "written": _instructions,
    "smoke": _smoke,
}
