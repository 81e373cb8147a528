"""Needles: prompts in which several pass keys are hidden in a long text and one is asked for, as Lizard's
Figure 4 has them.

The paper fixes this much: five random pass keys of 5 to 8 tokens at random positions, one of them asked for.
The rest is ours: the wording is that of Mohtashami and Jaggi (2023), whose repeated sentences are the filler
`noise`. A prompt is built of token ids and never cut into tokens again, so it has exactly the tokens that are
asked for, and every key exactly its own. No torch.
"""

import functools
import hashlib
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from relinear.errors import UserError
from relinear.get.beginning import begun
from relinear.get.text import document_separator

HEADER = (
    "There is important information hidden in a long text. Find it and remember it. I will ask you about it."
)
NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
NAMES = (
    "red",
    "green",
    "blue",
    "yellow",
    "orange",
    "purple",
    "pink",
    "brown",
    "black",
    "white",
    "gray",
    "golden",
    "silver",
    "copper",
    "bronze",
    "iron",
    "steel",
    "tin",
    "zinc",
    "nickel",
    "lead",
    "brass",
    "cobalt",
    "chrome",
    "mercury",
    "platinum",
    "titanium",
    "crimson",
    "scarlet",
    "maroon",
    "violet",
    "indigo",
    "navy",
    "teal",
    "olive",
    "beige",
    "ivory",
    "amber",
    "coral",
    "turquoise",
)
SENTENCE_ENDS = re.compile(r'(?<=[.!?])["\']?\s+')
ATTEMPTS = 1000  # the most attempts to draw a key with so many tokens


class Needle(NamedTuple):
    """A prompt and its right answer. Of the keys the first in the text comes first; `asked` is the index of
    the one that is asked for."""

    # exactly `length` tokens, which begin as the tokenizer begins a text, and of which the question is the
    # end
    prompt: list[int]
    names: list[str]
    keys: list[str]
    # the tokens that follow the prompt, were each key the right one: a space, the key, a full stop
    answers: list[list[int]]
    asked: int
    distance: int  # tokens after the last one of the asked key, in its last mention, before the question
    depth: float  # where the asked key ends in the prompt, as a share of `length`


class Cutter:
    """A tokenizer that is asked for the pieces that prompts are built of. Raises UserError for one that
    cannot write them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.ids = functools.cache(self._ids)
        try:
            made = tokenizer.decode(self.ids(HEADER))
        except Exception as error:  # the library raises a plain Exception where it has no token for a word
            made = str(error)
        if made != HEADER:
            raise UserError(f"the tokenizer makes {made!r} of {HEADER!r}; possible: a tokenizer of texts")

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def key(self, rng: random.Random, tokens: int) -> str:
        """Random digits that are so many tokens behind a space: as many digits where the tokenizer cuts
        digits apart, else more.

        Raises UserError where none is found.
        """
        for width in range(tokens, 4 * tokens):
            for _ in range(ATTEMPTS if width > tokens else 1):
                digits = str(rng.randrange(10 ** (width - 1), 10**width))
                if self.size(digits) == tokens:
                    return digits
        raise UserError(
            f"no key of {tokens} tokens found; the tokenizer cuts {digits!r} into {self.size(digits)};"
            " possible: other key_tokens"
        )

    def size(self, digits: str) -> int:
        """Tokens of a key behind a space, less the one that a lone space is where the tokenizer cuts it
        off."""
        cut = self._ids(f" {digits}")
        if self.tokenizer.decode(list(cut)) != f" {digits}":
            raise UserError(
                f"the tokenizer makes {self.tokenizer.decode(list(cut))!r} of ' {digits}'; possible: a"
                " tokenizer that keeps digits"
            )
        return len(cut) - (cut[:1] == self.ids(" ") and len(cut) > 1)


def noise(cutter: Cutter) -> list[tuple[int, ...]]:
    """The sentences of the filler `noise`, each behind a space."""
    return [cutter.ids(f" {sentence}") for sentence in NOISE]


def sentences(cutter: Cutter, folder: Path) -> list[tuple[int, ...]]:
    """The sentences of a finished text's held-out documents in their order, each behind a space; a cut last
    document is left out.

    Raises UserError where there are none.
    """
    separator, tokens = (
        document_separator(cutter.tokenizer)[-1],
        np.load(folder / "heldout_tokens.npy").tolist(),
    )
    ends = [i for i, token in enumerate(tokens) if token == separator]
    texts = [cutter.tokenizer.decode(tokens[a + 1 : b]) for a, b in zip(ends, ends[1:], strict=False)]
    found = [
        cutter.ids(f" {sentence.strip()}")
        for text in texts
        for sentence in SENTENCE_ENDS.split(text.strip())
        if sentence.strip()
    ]
    if not found:
        raise UserError(
            f"no whole document is held out in {folder}, so there are no sentences to hide keys among;"
            " possible: filler: noise"
        )
    return found


def example(
    cutter: Cutter,
    length: int,
    seed: str,
    *,
    filler: Sequence[tuple[int, ...]],
    keys: int = 5,
    key_tokens: tuple[int, int] = (5, 8),
    mention: Literal[1, 2] = 1,
    depth: float | None = None,
) -> Needle:
    """A prompt of exactly `length` tokens: the header, the filler with the needles at ends of its sentences,
    no two side by side, the question.

    Args:
        seed: draws names, keys, places and where the filler begins; the same for all models with one
        tokenizer. filler: sentences, read on in a circle from a drawn one; what is left of `length` after
        whole ones is filled by the beginning of the next. mention: how often each needle says its key.
        depth: where the asked key ends, as near as ends of sentences allow, as a share of what lies between
        header and question; None: drawn.

    Raises UserError for a length that has no room for the needles and a sentence between each two.
    """
    rng = random.Random(hashlib.sha256(seed.encode()).digest())
    names = rng.sample(NAMES, keys)
    numbers: list[str] = []
    while len(numbers) < keys:
        drawn = cutter.key(rng, rng.randint(*key_tokens))
        numbers += [drawn] * (drawn not in numbers)
    needles, tails = zip(
        *(_needle(cutter, name, key, mention) for name, key in zip(names, numbers, strict=True)), strict=True
    )
    asked = rng.randrange(keys)
    header, question = (
        begun(cutter.tokenizer, cutter.ids(HEADER)),
        cutter.ids(f"\n\nWhat is the {names[asked]} pass key? The {names[asked]} pass key is"),
    )
    room = length - len(header) - len(question) - sum(map(len, needles))
    pieces = _pieces(filler, rng.randrange(len(filler)), room)
    if len(pieces) <= keys:
        needs = length - room + (keys + 1) * max(map(len, filler))
        raise UserError(
            f"{length} tokens have no room for {keys} keys and a sentence between each two; possible: {needs}"
            " tokens or more"
        )
    # a needle stands before the piece of that index: the last, cut one is behind all
    places = rng.sample(range(len(pieces)), keys - 1)
    others = [i for i in range(keys) if i != asked]
    free = [at for at in range(len(pieces)) if at not in places]
    share = rng.random() if depth is None else depth

    def distance(at: int) -> int:
        behind = sum(len(needles[i]) for i, place in zip(others, places, strict=True) if place > at)
        return tails[asked] + sum(map(len, pieces[at:])) + behind

    wanted = (1 - share) * (length - len(header) - len(question))
    at = min(free, key=lambda place: (abs(distance(place) - wanted), place))
    order = sorted([*zip(places, others, strict=True), (at, asked)])
    standing = dict(order)
    body = [
        token
        for i, piece in enumerate(pieces)
        for part in (needles[standing[i]] if i in standing else (), piece)
        for token in part
    ]
    prompt = [*header, *body, *question]
    in_order = [i for _, i in order]
    answers = [[*cutter.ids(f" {numbers[i]}"), *cutter.ids(".")] for i in in_order]
    end = length - len(question) - distance(at)
    return Needle(
        prompt,
        [names[i] for i in in_order],
        [numbers[i] for i in in_order],
        answers,
        in_order.index(asked),
        distance(at),
        end / length,
    )


def _needle(cutter: Cutter, name: str, key: str, mention: int) -> tuple[tuple[int, ...], int]:
    """A needle's tokens, and how many of them stand behind the last one of its key's last mention."""
    begin, number = cutter.ids(f" The {name} pass key is"), cutter.ids(f" {key}")
    if mention == 1:
        end = cutter.ids(". Remember it.")
        return (*begin, *number, *end), len(end)
    between, end = cutter.ids(". Remember it."), cutter.ids(f" is the {name} pass key.")
    return (*begin, *number, *between, *number, *end), len(end)


def _pieces(filler: Sequence[tuple[int, ...]], first: int, room: int) -> list[tuple[int, ...]]:
    """Sentences from `first` on, in a circle, that are `room` tokens together; the last is cut to what is
    left."""
    pieces, at = [], first
    while room > 0:
        pieces.append(filler[at % len(filler)][:room])
        room -= len(pieces[-1])
        at += 1
    return pieces
