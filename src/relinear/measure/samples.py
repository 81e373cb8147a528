"""A model's answers to a few questions, each a turn of a chat: texts to read, such as the one in Lizard's
Appendix F."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from relinear.folders import chat_of, tokenizer_of
from relinear.get.beginning import begun
from relinear.get.readers.instructions import PROMPT
from relinear.measure._answering import ask, mean_of, share_of
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import Positive, Strict

NEEDS = ("next_token",)
OF = "answers"
GRAM = 4  # tokens whose second coming counts as a repetition
DECLINES = re.compile(
    r"\b(sorry|apologi[sz]e|cannot|can[’']t|(do|does) not have|(don|doesn)[’']t have|unable to|not"
    r" (sure|able|familiar)|as an AI)\b",
    re.IGNORECASE,
)


class Options(Strict):
    """Ask each of `questions`; an answer is the likeliest text of at most `new_tokens`."""

    questions: Annotated[tuple[str, ...], Field(min_length=1)]
    new_tokens: Positive = 128


def measure(model: PreTrainedModel, data: Path | None, options: Options, job: Job) -> Iterator[Reading]:
    """Of "answers": `ended`, the share that come to an end by themselves; `repeated`, the mean share of an
    answer's runs of `GRAM` tokens that it had before; `declined`, the share that say in words that they do
    not know or cannot, which is a word list's guess.

    A question stands in the tokenizer's chat template, where it has none in the wording of Alpaca. Writes
    `items.jsonl`, a line a question.
    """
    tokenizer = tokenizer_of(job.parents["model"])
    rows = []
    for question in tqdm(options.questions, desc=job.name, unit="question"):
        prompt = worded(tokenizer, question)
        [answered] = ask(model, torch.tensor([prompt]), [[[tokenizer.eos_token_id]]], options.new_tokens)
        tokens, ended = until(answered.greedy, tokenizer.eos_token_id)
        text = tokenizer.decode(tokens, skip_special_tokens=True).strip()
        rows.append(
            {
                "question": question,
                "written": text,
                "tokens": len(tokens),
                "ended": ended,
                "repeated": repeated(tokens),
                "declined": DECLINES.search(text) is not None,
            }
        )
    job.items(rows)
    yield Reading("ended", OF, {}, *share_of(row["ended"] for row in rows))
    yield Reading("repeated", OF, {}, *mean_of(row["repeated"] for row in rows))
    yield Reading("declined", OF, {}, *share_of(row["declined"] for row in rows))


def worded(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """The prompt's tokens, up to where the answer begins."""
    if tokenizer.chat_template is None:
        return begun(
            tokenizer, tokenizer(PROMPT.format(instruction=question), add_special_tokens=False)["input_ids"]
        )
    text = chat_of(tokenizer, question)
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has what a text begins with


def until(tokens: Sequence[int], end: int) -> tuple[list[int], bool]:
    """The tokens before the first end, and whether there is one."""
    tokens = list(tokens)
    return (tokens[: tokens.index(end)], True) if end in tokens else (tokens, False)


def repeated(tokens: Sequence[int]) -> float:
    """The share of runs of `GRAM` tokens that stood before; 0 of fewer tokens."""
    grams = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
