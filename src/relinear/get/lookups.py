"""Texts that ask for what stood far before, to train on: values of lists of pairs, and passages that come
again, farther and farther back as the training goes on.

Each sequence is a piece of a text, into which lists, questions and copies are put; what has no room any more
is left out at its end. Whatever distance a question has, the text goes on in between, so a window sees the
question and not the list. A list has pairs of two words, in one of four `FORMS`; a question repeats one key,
and its value follows. A passage is a stretch of the piece itself; its copy follows behind `AGAIN`, and what
is to be copied shows in the first `KNOWN` tokens.

The distances are a curriculum of rungs, each with the same number of sequences: none of a rung asks farther
back than the rung's longest distance. Trainings read one rung after the other (`relinear.get.packed`). When
haystack recall is learned from scratch, it stays at chance without such a ramp (2609.16183). Its ramp goes
on when the model answers; ours goes on with the tokens, so that every model gets the same batches.

Words are those of the text; a quarter of them, by their hash, is left to the held-out sequences. No word or
form of a measure of recall is among them: `AVOIDED`, tests/test_lookups.py.
"""

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from relinear.errors import UserError
from relinear.files import sha256
from relinear.folders import tokenizer_of
from relinear.get.needles import NAMES, Cutter
from relinear.get.packed import IGNORED
from relinear.get.words import KEYS, VALUES
from relinear.plan.job import Job

AVOIDED = frozenset((*NAMES, *KEYS, *VALUES))
WORD = re.compile(r"(?<![\w'])[a-z]{3,10}(?![\w'])")
NEAREST = 16  # the shortest distance, in tokens
# the fewest and the most tokens of a passage, which also has no more than half the distance
PASSAGES = (16, 64)
TESTED = 4  # one word in so many is for held-out sequences
KNOWN = 4  # first tokens of a copy, which tell the passage and are not learned
QUESTIONS = 8  # of one list, at most
AGAIN = "\n\nTo quote: "
BLOCK = 1 << 20  # tokens that are decoded at once
DISTINCT = 4096  # the most words that are drawn from, the commonest


class Form(NamedTuple):
    """The words around a list of pairs: what it begins with, a line up to its value, what ends the line, and
    the question up to the value. A value stands behind a space."""

    head: str
    line: str
    end: str
    ask: str


FORMS = (
    Form("\n\nGlossary.\n", "{key} means", ".\n", "\n\nBy the glossary, {key} means"),
    Form("\n\n", "The {key} said", ". ", "\n\nWhat did the {key} say? The {key} said"),
    Form("\n\n", "def {key}(): return", "\n", "\n\nassert {key}() =="),
    Form("\n\n", "| {key} |", " |\n", "\n\nLook it up: | {key} |"),
)


class Asked(NamedTuple):
    """Something that a sequence asks for: where its answer begins and ends, and the tokens between the end of
    what is asked for and that begin."""

    kind: str  # pair or copy
    begin: int
    end: int
    distance: int


class Example(NamedTuple):
    """A sequence with its labels, and what it asks for."""

    tokens: list[int]
    labels: list[int]
    asked: list[Asked]


class Writer:
    """A sequence that is being written: a piece of text, and what is put into it."""

    def __init__(self, tokens: Sequence[int], labels: Sequence[int]):
        self.text = list(zip(tokens, labels, strict=True))
        self.read = 0  # tokens of the text that are written
        self.tokens: list[int] = []
        self.labels: list[int] = []
        self.asked: list[Asked] = []

    @property
    def left(self) -> int:
        """The tokens that the sequence has room for."""
        return len(self.text) - len(self.tokens)

    def go_on(self, count: int) -> None:
        """The text's next tokens."""
        count = max(min(count, self.left), 0)
        for token, label in self.text[self.read : self.read + count]:
            self.tokens.append(token)
            self.labels.append(label)
        self.read += count

    def say(self, ids: Sequence[int], learned: bool = False) -> None:
        """Tokens that are not of the text."""
        self.tokens += ids
        self.labels += ids if learned else [IGNORED] * len(ids)

    def ask(self, kind: str, known: Sequence[int], answer: Sequence[int], since: int) -> None:
        """A question and its answer, which alone is learned. `since`: where what is asked for ended."""
        self.say(known)
        begin = len(self.tokens)
        self.say(answer, learned=True)
        self.asked.append(Asked(kind, begin, len(self.tokens), begin - since))


def for_tests(word: str) -> bool:
    """Whether a word is for held-out sequences, by its hash."""
    return hashlib.sha256(word.encode()).digest()[0] % TESTED == 0


def words_of(cutter: Cutter, tokens: np.ndarray) -> dict[str, list[str]]:
    """By split, the commonest words of a text that are for its sequences, in alphabetical order."""
    counts: Counter[str] = Counter()
    for at in range(0, len(tokens), BLOCK):
        counts.update(
            WORD.findall(cutter.tokenizer.decode(tokens[at : at + BLOCK].tolist(), skip_special_tokens=True))
        )
    found: dict[str, list[str]] = {"train": [], "heldout": []}
    for word in sorted(counts.keys() - AVOIDED):
        found["heldout" if for_tests(word) else "train"].append(word)
    return {
        split: sorted(sorted(own, key=lambda word: -counts[word])[:DISTINCT]) for split, own in found.items()
    }


def pairs(
    writer: Writer, cutter: Cutter, rng: random.Random, words: Sequence[str], many: tuple[int, int], most: int
) -> None:
    """A list of pairs that takes up to half of `most` tokens, and questions about some of them."""
    form, count = rng.choice(FORMS), rng.randint(*many)
    drawn = rng.sample(words, 2 * count)
    begin, ends, asks = list(cutter.ids(form.head)), [], []
    for i, (key, value) in enumerate(zip(drawn[::2], drawn[1::2], strict=True)):
        line = (*cutter.ids(form.line.format(key=key)), *cutter.ids(f" {value}"))
        if i >= many[0] and len(begin) + len(line) > most // 2:
            break
        begin += line
        ends.append(len(begin))
        asks.append((cutter.ids(form.ask.format(key=key)), (*cutter.ids(f" {value}"), *cutter.ids(form.end))))
        begin += cutter.ids(form.end)
    if len(begin) > writer.left:
        return
    start = len(writer.tokens)
    writer.say(begin)
    wanted = []
    for i in rng.sample(range(len(ends)), min(QUESTIONS, len(ends))):
        nearest = len(begin) - ends[i] + len(asks[i][0])
        if nearest <= most:
            wanted.append((start + ends[i] + rng.randint(max(nearest, NEAREST), most), i))
    for place, i in sorted(wanted):
        known, answer = asks[i]
        writer.go_on(place - len(known) - len(writer.tokens))
        late = len(writer.tokens) + len(known) - start - ends[i] > most
        if not late and len(known) + len(answer) <= writer.left:
            writer.ask("pair", known, answer, start + ends[i])


def copy(writer: Writer, cutter: Cutter, rng: random.Random, most: int) -> None:
    """A passage of the text, and its copy."""
    cue, size = cutter.ids(AGAIN), rng.randint(PASSAGES[0], max(min(PASSAGES[1], most // 2), PASSAGES[0]))
    between = rng.randint(NEAREST, most) - len(cue) - KNOWN
    if between < 0 or 2 * size + between + len(cue) > writer.left:
        return
    writer.go_on(size)
    passage, since = writer.tokens[-size:], len(writer.tokens)
    writer.go_on(between)
    writer.ask("copy", (*cue, *passage[:KNOWN]), passage[KNOWN:], since)


def example(
    cutter: Cutter,
    piece: tuple[Sequence[int], Sequence[int]],
    words: Sequence[str],
    seed: str,
    *,
    many: tuple[int, int],
    most: int,
) -> Example:
    """A sequence as long as the `piece` (tokens and labels) that asks for pairs and passages up to `most`
    tokens back. `many`: the fewest and the most pairs of a list, as far as half of `most` has room for
    them."""
    rng, writer = random.Random(hashlib.sha256(seed.encode()).digest()), Writer(*piece)
    writer.go_on(NEAREST)  # what separates documents is never copied
    while writer.left:
        before = len(writer.tokens)
        writer.go_on(rng.randint(0, min(most, writer.left) // 4))
        if rng.random() < 0.5:
            pairs(writer, cutter, rng, words, many, most)
        else:
            copy(writer, cutter, rng, most)
        if writer.left < NEAREST + PASSAGES[0] or len(writer.tokens) == before:
            writer.go_on(max(writer.left // 2, NEAREST))
    return Example(writer.tokens, writer.labels, writer.asked)


def rungs_of(count: int, distances: Sequence[int]) -> list[int]:
    """Where each rung after the first begins, of so many sequences."""
    return [count * i // len(distances) for i in range(1, len(distances))]


def sequences(
    cutter: Cutter, folder: Path, split: str, words: Sequence[str], settings: dict[str, Any]
) -> Iterator[tuple[int, Example]]:
    """The sequences of a split with the longest distance of each: those to train on from the first rung to
    the last, the held-out ones of the last."""
    shape = (-1, settings["length"])
    tokens, labels = (np.load(folder / f"{split}_{kind}.npy").reshape(shape) for kind in ("tokens", "labels"))
    distances, count = settings["distances"], len(tokens)
    starts = rungs_of(count, distances)
    for i in tqdm(range(count), desc=f"{split} sequences", mininterval=5):
        rung = sum(i >= start for start in starts) if split == "train" else len(distances) - 1
        piece, seed = (tokens[i].tolist(), labels[i].tolist()), f"{split} {settings['seed']} {i}"
        plain = random.Random(f"share {seed}").random() >= settings["share"]
        yield (
            distances[rung],
            Example(*piece, [])
            if plain
            else example(cutter, piece, words, seed, many=tuple(settings["pairs"]), most=distances[rung]),
        )


def work(job: Job) -> dict:
    """Write `{train,heldout}_{tokens,labels}.npy`, flat int32. `rungs` of the metrics is where each rung
    after the first begins.

    Raises UserError for a text with too few words, and for a tokenizer that cannot write them.
    """
    settings, cutter = job.settings, Cutter(tokenizer_of(job.parents["model"]))
    folder = job.parents["text"]
    files, content, facts = {}, hashlib.sha256(), {}
    for split, words in words_of(cutter, np.load(folder / "train_tokens.npy")).items():
        if len(words) < (needs := 2 * settings["pairs"][1]):
            raise UserError(
                f"{settings['pairs'][1]} pairs of different words asked for, {needs} words; the text has"
                f" {len(words)} for the {split} sequences; possible: fewer pairs, or a longer text"
            )
        found = list(sequences(cutter, folder, split, words, settings))
        for kind in ("tokens", "labels"):
            values = np.array([getattr(sequence, kind) for _, sequence in found], np.int32)
            np.save(path := job.out / f"{split}_{kind}.npy", values.ravel())
            files[path.name] = sha256(path)
            content.update(values.tobytes())
        asked = [one for _, sequence in found for one in sequence.asked]
        facts[split] = {
            "sequences": len(found),
            "words": len(words),
            **{kind: sum(one.kind == kind for one in asked) for kind in ("pair", "copy")},
        }
        if split == "train":
            facts["rungs"] = rungs_of(len(found), settings["distances"])
            job.tokens = len(found) * settings["length"]
    documents = sum(facts[split]["sequences"] for split in ("train", "heldout"))
    sources = {"lookups": {"documents": documents, "sha256": content.hexdigest()}}
    return {"sources": sources, "files": files, "length": settings["length"], **facts}
