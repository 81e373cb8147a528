"""RULER's tasks that need no download, in context and untrained (Hsieh et al., 2024,
https://arxiv.org/abs/2404.06654).

The prompts have the wording and the counts of the authors' released code; what is random in them is drawn by
our seeds:

- `niah_single_1`: a number in sentences that repeat. All of the paper's needles ask so; this one needs no
  essays.
- `vt`: a chain of five variables in the same sentences, behind an example; all that have the value are asked
  for.
- `cwe`: a numbered list, behind an example; its ten common words are asked for. Below 4096 tokens they stand
  there 6 times each and the others once, from there on 30 and 3 times.
- `fwe`: coded words whose counts fall by Zipf's law with exponent 2; the three most frequent ones are asked
  for.

Two things are ours. Words are those of the measure's text and of `kv_recall`, where the authors have the
package wonderwords. The example of `vt` has six lines of sentences, where theirs has as many as 500 tokens
hold.
"""

import functools
import random
import re
import string
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field
from scipy.special import zeta
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from relinear.errors import UserError
from relinear.folders import tokenizer_of
from relinear.get.beginning import begun
from relinear.get.words import KEYS, VALUES
from relinear.measure._answering import mean_of, share_of, write
from relinear.measure._limit import limit_of
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import Positive, Strict

NEEDS = ("next_token",)
AXES = {"length": 1024}

# the most tokens that the authors have a model write
NEW_TOKENS = {"niah_single_1": 128, "vt": 30, "cwe": 120, "fwe": 50}
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
HOPS, EXAMPLE_LINES = 4, 6
COMMON, EXAMPLE_WORDS, LONG = 10, 40, 4096
EXPONENT, CODED = 2.0, 6

NIAH = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you"
    " about the number afterwards.\n{context}\nWhat is the special magic number for {query} mentioned in the"
    " provided text? The special magic number for {query} mentioned in the provided text is"
)
VT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {query} in the text above. Answer: According to"
    " the chain(s) of variable assignment "
    # spelt as the authors have it
    "in the text above, {many} variables are assgined the value {query}, they are:"
)
CWE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones"
    " that appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
    " Answer: The top 10 words that appear most often in the list are:"
)
FWE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently"
    " appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots"
    " '....'. What are the three most frequently appeared words in the above coded text? Answer: According to"
    " the coded text above, the three most frequently appeared words are:"
)


class Options(Strict):
    """Ask `prompts` times at each of `lengths`, in tokens of prompt and answer together; a forward pass reads
    so many prompts as have `batch_tokens`, at least one. `new_tokens`: that are written; None: as many as the
    authors have, for each task."""

    lengths: tuple[Annotated[int, Field(ge=1024)], ...] = Field(min_length=1)
    prompts: Annotated[int, Field(ge=2)]
    batch_tokens: Positive
    tasks: tuple[Literal["niah_single_1", "vt", "cwe", "fwe"], ...] = Field(
        default=tuple(NEW_TOKENS), min_length=1
    )
    new_tokens: Positive | None = None


class Question(NamedTuple):
    """A prompt as text, the words that are right, and of how many words of the text an answer could name
    each; 0 where every one is right."""

    text: str
    right: list[str]
    words: int


# by a seed, and how much stands in it; None where there is not so much
Draw = Callable[[random.Random, int], Question | None]


def measure(model: PreTrainedModel, data: Path, options: Options, job: Job) -> Iterator[Reading]:
    """Of each task, at {length}: `contains`, the mean share of the right words that the answer contains in
    any case, RULER's score; `chance`, that of naming as many words of the text at random; and `tied`, the
    share of answers in which a token was drawn among equals.

    A length beyond what the model can read is not defined, and its readings say why. Writes `items.jsonl`.
    Raises UserError before any work for a length without room.
    """
    tokenizer = tokenizer_of(job.parents["model"])
    limit, draws = limit_of(model), tasks(words_of(tokenizer, data))
    asked = {
        (task, length): questions(
            tokenizer, task, functools.partial(draws[task], length), length, options, job
        )
        for task in options.tasks
        for length in options.lengths
    }
    rows: list[dict[str, Any]] = []
    for (task, length), own in asked.items():
        at = {"length": length}
        if limit.tokens is not None and length > limit.tokens:
            yield Reading("contains", task, at, None, None, 0, limit.why)
            continue
        padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        prompts, steps = (
            [_ids(tokenizer, question.text) for question in own],
            options.new_tokens or NEW_TOKENS[task],
        )
        answers = write(
            model,
            prompts,
            f"{job.name} {task} {length}",
            batch_size=max(options.batch_tokens // length, 1),
            padding=padding,
            max_new_tokens=steps,
            min_new_tokens=1,
        )
        written = tokenizer.batch_decode([answer.tokens for answer in answers], skip_special_tokens=True)
        scores = [contains(text, question.right) for text, question in zip(written, own, strict=True)]
        rows += [
            {
                "set": task,
                "length": length,
                "item": i,
                "written": text,
                "right": question.right,
                "contains": score,
                "drawn": answer.drawn,
            }
            for i, (text, question, score, answer) in enumerate(
                zip(written, own, scores, answers, strict=True)
            )
        ]
        one = all(len(question.right) == 1 for question in own)
        yield Reading(
            "contains", task, at, *(share_of(score == 1 for score in scores) if one else mean_of(scores))
        )
        yield Reading("tied", task, at, *share_of(answer.drawn for answer in answers))
        if own[0].words:
            yield Reading(
                "chance",
                task,
                at,
                float(np.mean([len(question.right) / question.words for question in own])),
                None,
                len(own),
            )
        else:
            yield Reading("chance", task, at, None, None, 0, "all that could be named is right")
    job.items(rows)


def contains(written: str, right: Sequence[str]) -> float:
    """The share of the right words that stand somewhere in what was written, in any case: RULER's
    `string_match_all`."""
    return sum(word.lower() in written.lower() for word in right) / len(right)


def words_of(tokenizer: PreTrainedTokenizerBase, data: Path) -> list[str]:
    """The words of four to ten small letters in a text's held-out tokens, and those of `kv_recall`, each
    once, in alphabetical order."""
    text = tokenizer.decode(np.load(data / "heldout_tokens.npy").tolist(), skip_special_tokens=True)
    return sorted({*KEYS, *VALUES, *re.findall(r"\b[a-z]{4,10}\b", text)})


def questions(
    tokenizer: PreTrainedTokenizerBase, task: str, draw: Draw, length: int, options: Options, job: Job
) -> list[Question]:
    """The questions of a task, as long as the first one can be with its answer, and shorter where another
    draw would be too long.

    They are the same for all models with one tokenizer. Raises UserError for a length without room.
    """
    room = length - (options.new_tokens or NEW_TOKENS[task])

    def drawn(item: int, amount: int) -> Question | None:
        """The question of this size; None where it is too long or there are too few words."""
        question = draw(random.Random(f"{job.settings['seed']} {task} {length} {item}"), amount)
        return question if question is not None and len(_ids(tokenizer, question.text)) <= room else None

    least, most = SMALLEST[task], SMALLEST[task]
    if drawn(0, least) is None:
        raise UserError(
            f"{job.name}: {length} tokens have no room for the smallest prompt of {task} and its answer;"
            " possible: a larger length"
        )
    while drawn(0, 2 * most) is not None:
        most *= 2
    low, high = most, 2 * most  # fits, does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if drawn(0, middle) is not None else (low, middle)
    found = []
    for item in range(options.prompts):
        amount = low
        while (question := drawn(item, amount)) is None and amount > least:
            amount = max(amount - max(amount // 50, 1), least)
        if question is None:
            raise UserError(
                f"{job.name}: {length} tokens have no room for a prompt of {task} and its answer; possible: a"
                " larger length"
            )
        found.append(question)
    return found


SMALLEST = {"niah_single_1": 2, "vt": HOPS + 2, "cwe": COMMON + 1, "fwe": 40}  # lines, lines, words, words


def tasks(words: Sequence[str]) -> dict[str, Callable[[int, random.Random, int], Question | None]]:
    """Task -> what draws a question of it: for a length, by a seed, with so many lines of sentences or so
    many words."""
    return {
        "niah_single_1": lambda length, rng, lines: niah(rng, lines, words),
        "vt": lambda length, rng, lines: variables(rng, lines),
        "cwe": lambda length, rng, many: common(rng, many, words, length),
        "fwe": lambda length, rng, many: frequent(rng, many, length // 50),
    }


def niah(rng: random.Random, lines: int, words: Sequence[str]) -> Question:
    """A number of seven digits between so many lines of sentences; its key is two words."""
    key, value = "-".join(rng.sample(words, 2)), str(rng.randint(10**6, 10**7 - 1))
    context = [NOISE] * lines
    context.insert(rng.randrange(lines), f"One of the special magic numbers for {key} is: {value}.")
    return Question(NIAH.format(context="\n".join(context), query=key), [value], 0)


def variables(rng: random.Random, lines: int) -> Question:
    """A chain of five variables between so many lines of sentences, behind an example with names of three
    letters."""
    example, right = _chain(rng, EXAMPLE_LINES, 3)
    text, names = _chain(rng, lines, 5)
    return Question(f"{example} {' '.join(right)}\n\n{text}", names, 0)


def _chain(rng: random.Random, lines: int, letters: int) -> tuple[str, list[str]]:
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        names += [name] * (name not in names)
    value = rng.randint(10000, 99998)
    context = [f"{NOISE}\n"] * lines
    said = [
        f"VAR {names[0]} = {value}",
        *(f"VAR {b} = VAR {a} " for a, b in zip(names, names[1:], strict=False)),
    ]
    for j, (place, sentence) in enumerate(zip(sorted(rng.sample(range(lines), HOPS + 1)), said, strict=True)):
        context.insert(place + j, sentence)
    return VT.format(context=" ".join(context).replace(". \n", ".\n"), query=value, many=HOPS + 1), names


def common(rng: random.Random, many: int, words: Sequence[str], length: int) -> Question | None:
    """A list of so many words of which ten are common, behind an example that is drawn likewise; None where
    there are not so many words."""
    if many > len(words):
        return None
    short = length < LONG
    example, right = _list(
        rng.sample(words, EXAMPLE_WORDS // 2 if short else EXAMPLE_WORDS),
        *((3, 1) if short else (10, 3)),
        rng,
    )
    text, names = _list(rng.sample(words, many), *((6, 1) if short else (30, 3)), rng)
    return Question(f"{example} {_numbered(right)}\n{text}", names, many)


def _list(words: Sequence[str], often: int, seldom: int, rng: random.Random) -> tuple[str, list[str]]:
    """The prompt of a list whose first ten words stand there often and the others seldom, and those ten."""
    names = list(words[:COMMON])
    every = names * often + list(words[COMMON:]) * seldom
    rng.shuffle(every)
    return CWE.format(context=_numbered(every)), names


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def frequent(rng: random.Random, many: int, vocabulary: int) -> Question:
    """About so many coded words of a vocabulary: of the k-th, many / (k^2 zeta(2)) rounded down; the first is
    dots, and the next three are right."""
    names: list[str] = ["..."]
    while len(names) < vocabulary:
        name = "".join(rng.choices(string.ascii_lowercase, k=CODED))
        names += [name] * (name not in names)
    counts = (many * np.arange(1, vocabulary + 1) ** -EXPONENT / zeta(EXPONENT)).astype(int).tolist()
    text = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
    rng.shuffle(text)
    return Question(FWE.format(context=" ".join(text)), names[1:4], sum(count > 0 for count in counts[1:]))


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return begun(tokenizer, tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
