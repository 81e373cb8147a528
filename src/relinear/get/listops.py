"""ListOps (Nangia and Bowman 2018), drawn as Long Range Arena draws it (Tay et al. 2021):

    [MAX 2 9 [MIN 4 7 ] 0 ] -> 9

An expression is a digit, with probability 3/4 and always at depth 10, or else one of four operators over 2 to
10 expressions: their least or greatest, the whole part of their median (MED), their sum modulo 10 (SM). The
class is its value. Kept are those whose tokens, operators and closing brackets among them, are more than
`shortest` and fewer than `longest`: Long Range Arena has 500 and 2000, 96,000 to train on and 2,000 to test.
"""

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from relinear.get.arena import Example

DIGITS = 10  # tokens 1 to 10 are the digits 0 to 9; then the operators, then the bracket that closes each
OPERATORS = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(median(values)),
    "[SM": lambda values: sum(values) % DIGITS,
}
END = "]"
WORDS = (*map(str, range(DIGITS)), *OPERATORS, END)  # the word of each token, from token 1 on
TOKEN = {word: token for token, word in enumerate(WORDS, 1)}
VOCABULARY = len(WORDS)
DEPTH, ARGUMENTS, BRANCHES = 10, 10, 0.25


class TooLongError(Exception):
    """An expression has as many tokens as are too many, whatever follows."""


def expression(rng: random.Random, room: int, depth: int = 1) -> tuple[list[int], int]:
    """Tokens and value of a random expression of at most `room` tokens. Raises TooLongError for one that has
    more."""
    if depth == DEPTH or rng.random() > BRANCHES:
        value = rng.randrange(DIGITS)
        return [1 + value], value
    operands, tokens, values = rng.randint(2, ARGUMENTS), [], []
    operator = rng.choice(tuple(OPERATORS))
    for left in reversed(range(operands)):
        inner, value = expression(rng, room - 2 - len(tokens) - left, depth + 1)
        tokens += inner
        values.append(value)
        if len(tokens) + left + 2 > room:
            raise TooLongError
    return [TOKEN[operator], *tokens, TOKEN[END]], OPERATORS[operator](values)


def examples(
    settings: Mapping[str, Any], folder: Path | None, split: str, rng: random.Random
) -> Iterator[Example]:
    """Random expressions of a length, without end."""
    while True:
        try:
            tokens, value = expression(rng, settings["longest"] - 1)
        except TooLongError:
            continue
        if len(tokens) > settings["shortest"]:
            yield Example(np.array(tokens, np.int32), value)
