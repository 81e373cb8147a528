"""Questions about a passage that is hidden among others until a context is full; the model writes the answer.

`squad`: passages of SQuAD among passages of other articles. `books`: stories of CoQA from Project Gutenberg
among other such stories, in the place of NarrativeQA in SUPRA's Table 2, which no package has. A context is
exactly full, at any length, and the longer one begins as the shorter does.
"""

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from relinear.errors import UserError
from relinear.folders import tokenizer_of
from relinear.get.beginning import begun
from relinear.measure import _contexts
from relinear.measure._answering import Answered, mean_of, share_of
from relinear.measure._contexts import ALONE, Prompt
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import Positive

NEEDS = ("next_token",)
YIELDS = ("f1", "contains", "gain", "tied")
AXES = {"context": 4096, "depth": 0.5}

SCORES = ("f1", "contains", "gain")
# Without a passage, and behind all passages, so that a window sees them: they show how short an answer is.
EXAMPLES = (("What is the capital of France?", "Paris"), ("Who wrote Hamlet?", "William Shakespeare"))


class Options(_contexts.Options):
    """Hide the passage of `prompts` questions at each of `depths`, drawn by the plan's seed; fewer where a
    set has no more.

    An answer has `new_tokens`, and ends with its line.
    """

    set: Literal["squad", "books"] = "squad"
    depths: Positive = 5
    prompts: Annotated[int, Field(ge=2)]
    new_tokens: Positive = 20


class Question(NamedTuple):
    """A passage, what it is of (an article, a story), a question about it, and the answers that count as
    right."""

    number: int  # in its set
    title: str
    passage: str
    question: str
    answers: tuple[str, ...]


class Hidden(NamedTuple):
    """A prompt of exactly as many tokens as its context leaves to it. `behind`: tokens after the right
    passage, those of the question included."""

    prompt: Prompt
    behind: int


def measure(model: PreTrainedModel, data: Path, options: Options, job: Job) -> Iterator[Reading]:
    """Of the set's name, at {context} and {context, depth}: `f1`, the largest token F1 with a right answer
    after SQuAD's normalisation; `contains`, whether what was written contains one; and `gain`, nats by which
    the context makes the first right answer likelier than the question does without it. At {context} also
    `tied`, how often a token of the answer was drawn among equals.

    At {context: 0} the first two of the question alone: what a model knows or guesses. Contexts that the
    model cannot read are not defined, and say why. Writes `items.jsonl`. Raises UserError before any work for
    a context that is too short for a passage, or too long for all of them.
    """
    # SQuAD's; lm-eval takes seconds to import
    from lm_eval.tasks.qasper.metrics import f1_abstractive, normalize_answer

    _contexts.check(model, options, job.name)
    tokenizer = tokenizer_of(job.parents["model"])
    every = READ[options.set](data, job)
    asked = drawn(every, options, job.settings["seed"])
    hidden = {
        context: [hide(tokenizer, q, depth, context, every, options, job) for q, depth in asked]
        for context in (ALONE, *options.contexts)
    }
    prompts = {context: [one.prompt for one in own] for context, own in hidden.items()}
    found = _contexts.answers(model, prompts, options.new_tokens, options, job.name)
    rows: list[dict[str, Any]] = []
    for context, own in found.items():
        for i, (answered, (question, depth)) in enumerate(zip(own, asked, strict=True)):
            text = tokenizer.decode(answered.greedy, skip_special_tokens=True).strip().partition("\n")[0]
            said = f" {normalize_answer(text)} "
            f1 = max(float(f1_abstractive([text], [answer])) for answer in question.answers)
            contains = any(f" {normalize_answer(answer)} " in said for answer in question.answers)
            row = {
                "set": options.set,
                "item": question.number,
                "context": context,
                "written": text,
                "right": list(question.answers),
                "f1": f1,
                "contains": contains,
                "drawn": answered.drawn,
            }
            gain = _nats(found[ALONE][i]) - _nats(answered)
            rows.append(
                row
                if context == ALONE
                else row | {"depth": depth, "behind": hidden[context][i].behind, "gain": gain}
            )
    job.items(rows)
    for context in found:
        own = [row for row in rows if row["context"] == context]
        yield from _readings(options.set, {"context": context}, own)
        yield Reading("tied", options.set, {"context": context}, *share_of(row["drawn"] for row in own))
        for depth in sorted({row["depth"] for row in own}) if context != ALONE else ():
            yield from _readings(
                options.set,
                {"context": context, "depth": depth},
                [row for row in own if row["depth"] == depth],
            )
    yield from _contexts.unread(
        model, SCORES, options.set, [context for context in options.contexts if context not in found]
    )


def _readings(of: str, at: dict[str, int | float], rows: Sequence[Mapping[str, Any]]) -> Iterator[Reading]:
    yield Reading("f1", of, at, *mean_of(row["f1"] for row in rows))
    yield Reading("contains", of, at, *share_of(row["contains"] for row in rows))
    if "gain" in rows[0]:
        yield Reading("gain", of, at, *mean_of(row["gain"] for row in rows))


def _nats(answered: Answered) -> float:
    """The nats of the whole first right answer."""
    return -sum(answered.scores[0])


def drawn(every: Sequence[Question], options: Options, seed: int) -> list[tuple[Question, float]]:
    """Questions, each once, with the depth at which each one's passage is hidden: the middle of one of so
    many equal parts."""
    rng = random.Random(f"{seed} {options.set}")
    chosen = rng.sample(list(every), min(options.depths * options.prompts, len(every)))
    return [(question, (i % options.depths + 0.5) / options.depths) for i, question in enumerate(chosen)]


def hide(
    tokenizer: PreTrainedTokenizerBase,
    question: Question,
    depth: float,
    context: int,
    every: Sequence[Question],
    options: Options,
    job: Job,
) -> Hidden:
    """The prompt that asks a question within a context, or alone: passages of other titles in an order drawn
    by the seed, the last one cut, and the right one between two of them, where its middle is as near to
    `depth` as can be.

    It is built of token ids, and it and its answer have exactly `context` tokens.
    """

    ids = functools.partial(_ids, tokenizer)
    shown = "\n" + "".join(f"Question: {example}\nAnswer: {answer}\n" for example, answer in EXAMPLES)
    tail, candidates = ids(f"{shown}Question: {question.question}\nAnswer:"), [ids(f" {question.answers[0]}")]
    if context == ALONE:
        return Hidden(Prompt(begun(tokenizer, tail), candidates), len(tail))
    gold = ids(f"{question.passage}\n\n")
    total = context - len(begun(tokenizer, tail)) - options.new_tokens  # of all passages
    room = total - len(gold)
    if room < 0:
        needs = context - room
        raise UserError(
            f"{job.name}: a context of {context} tokens is too short for a passage and its question, which"
            f" have {needs} with the answer"
        )
    others = list(dict.fromkeys(q.passage for q in every if q.title != question.title))
    random.Random(f"{job.settings['seed']} {options.set} {question.number}").shuffle(others)
    pieces: list[list[int]] = []
    for passage in others:
        if room == 0:
            break
        pieces.append(ids(f"{passage}\n\n")[:room])
        room -= len(pieces[-1])
    if room:
        raise UserError(
            f"{job.name}: all passages of other titles are {room} tokens too few for a context of {context};"
            " possible: shorter contexts"
        )
    before = [0, *accumulate(map(len, pieces))]
    at = min(range(len(before)), key=lambda i: abs(before[i] + len(gold) / 2 - depth * total))
    body = [token for piece in (*pieces[:at], gold, *pieces[at:]) for token in piece]
    return Hidden(
        Prompt(begun(tokenizer, [*body, *tail]), candidates), total - before[at] - len(gold) + len(tail)
    )


@functools.cache
def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _squad(data: Path, job: Job) -> list[Question]:
    found = []
    for doc in _contexts.requests("squad", data, job):
        before, _, question = doc["query"].removesuffix("\nAnswer:").rpartition("\nQuestion: ")
        title, _, passage = before.partition("\nBackground: ")
        found.append(
            Question(
                len(found),
                title.removeprefix("Title: "),
                passage,
                question,
                tuple(dict.fromkeys(doc["answers_text"])),
            )
        )
    return found


def _books(data: Path, job: Job) -> list[Question]:
    """The first question of each story, which needs no other to be understood, unless it is answered by yes
    or no."""
    found = []
    for doc in _contexts.requests("coqa", data, job):
        right = tuple(dict.fromkeys(answer for answer in doc["answers"] if answer.strip()))
        short = {answer.lower().strip(". ") for answer in right}
        if (
            doc["source"] == "gutenberg"
            and doc["id"].endswith("_turn0")
            and right
            and not short & {"yes", "no", "unknown"}
        ):
            found.append(Question(len(found), doc["id"], doc["story"], doc["question"], right))
    if not found:
        raise UserError(f"{job.name}: no first question about a story from Project Gutenberg in {data}")
    return found


READ: Mapping[str, Callable[[Path, Job], list[Question]]] = {"squad": _squad, "books": _books}
