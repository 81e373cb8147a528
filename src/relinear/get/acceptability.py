"""Sentences of the Brown corpus, 70 % as they are and 30 % with one error that its tags tell how to make:
what CoLA asks of sentences.

Each is in lower case and ends as it did, so that neither gives the label away. Some sentences stay
grammatical with their error, such as one whose noun becomes a plural: no classifier gets them all, as in
CoLA.
"""

import hashlib
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

SPOILT = 0.3  # of all sentences, CoLA's share
CASES = {
    "he": "him",
    "she": "her",
    "they": "them",
    "i": "me",
    "we": "us",
    "him": "he",
    "them": "they",
    "me": "i",
    "us": "we",
}
NUMBERS = {
    "is": "are",
    "are": "is",
    "was": "were",
    "were": "was",
    "has": "have",
    "have": "has",
    "does": "do",
    "do": "does",
}
PLURAL = {"these", "those", "many", "few", "several"}
APART = {("jj", "nn"), ("at", "nn"), ("at", "jj"), ("md", "vb"), ("to", "vb"), ("in", "at")}
VERBS = ("vb", "vbd", "vbz", "vbn", "bez", "ber", "bedz", "bed", "md")

Word = tuple[str, str]  # and its tag
Words = list[Word]


def _at(words: Words, place: int, *instead: Word) -> Words:
    return [*words[:place], *instead, *words[place + 1 :]]


def _agreement(words: Words, i: int) -> Words | None:
    word, tag = words[i]
    if word in NUMBERS:
        return _at(words, i, (NUMBERS[word], tag))
    return _at(words, i, (word[:-1], tag)) if tag == "vbz" and re.search("[^s]s$", word) else None


def _case(words: Words, i: int) -> Words | None:
    word, tag = words[i]
    return _at(words, i, (CASES[word], tag)) if tag in ("pps", "ppss", "ppo") and word in CASES else None


def _verb_lost(words: Words, i: int) -> Words | None:
    return _at(words, i) if i and words[i][1] in VERBS else None


def _swapped(words: Words, i: int) -> Words | None:
    here, there = words[i], words[i + 1] if i + 1 < len(words) else ("", "")
    return [*words[:i], there, here, *words[i + 2 :]] if (here[1], there[1]) in APART else None


def _number(words: Words, i: int) -> Words | None:
    word, tag = words[i]
    before = words[i - 1][0] if i else ""
    if tag == "nn" and before in ("a", "an", "this", "that", "each", "every"):
        return _at(words, i, (word + "s", "nns"))
    return (
        _at(words, i, (word[:-1], "nn"))
        if tag == "nns" and before in PLURAL and re.search("[^s]s$", word)
        else None
    )


def _tense(words: Words, i: int) -> Words | None:
    word, tag = words[i]
    if not (i and tag == "vb" and words[i - 1][1] in ("md", "to")):
        return None
    return _at(words, i, (word + ("d" if word.endswith("e") else "ed"), "vbd"))


ERRORS: tuple[Callable[[Words, int], Words | None], ...] = (
    _agreement,
    _case,
    _verb_lost,
    _swapped,
    _number,
    _tense,
)


def spoilt(words: Words, rng: random.Random) -> Words | None:
    """The words with one error of one kind; each kind that the sentence allows is equally likely. None where
    it allows none."""
    for error in rng.sample(ERRORS, len(ERRORS)):
        if found := [changed for i in range(len(words)) if (changed := error(words, i)) is not None]:
            return rng.choice(found)
    return None


def written(words: Words) -> str:
    """The words as a text. Punctuation follows the word before it without a blank."""
    return re.sub(r" ([.,;:?!])", r"\1", " ".join(word for word, _ in words))


def sentences(folder: Path, fewest: int, most: int | None) -> Iterator[tuple[str, int, str]]:
    """Split, label (1: as it stands in the corpus) and text of each sentence of so many words, without
    quotes, brackets and figures. A tenth of the files is held out, by their hash; which sentences are spoilt,
    and how, is by theirs."""
    for path in sorted(folder.rglob("c[a-r][0-9][0-9]")):
        text = path.read_text(encoding="utf-8")
        split = "heldout" if hashlib.sha256(text.encode()).digest()[0] < 26 else "train"
        for line in filter(None, map(str.strip, text.splitlines())):
            pairs = [token.rpartition("/")[::2] for token in line.split()]
            words = [(word.lower(), tag.partition("-")[0]) for word, tag in pairs]
            count = sum(word.isalpha() for word, _ in words)
            if (
                not fewest <= count <= (most or count)
                or any(not re.fullmatch(r"[a-z'-]+|[.,;:?!]", word) for word, _ in words)
                or not count
            ):
                continue
            rng = random.Random(hashlib.sha256(written(words).encode()).digest())
            wrong = spoilt(words, rng) if rng.random() < SPOILT else None
            yield split, int(wrong is None), written(wrong or words)
