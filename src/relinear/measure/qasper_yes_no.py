"""Yes-or-no questions about a research paper of which a model reads as much as a context holds: Qasper
(Dasigi et al., 2021), 2-shot.

It stands in for the Qasper column of SUPRA's Table 2, whose free answers no package has. Two answered
questions of other papers come first, each behind its evidence alone; then the paper, its middle left out
until all fits into the context; then the question.

Two of three answers are Yes, so accuracy is to be read beside `majority`. Balanced accuracy and macro F1 are
50 % and 33 to 40 % for a model that always says the same.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from relinear.errors import UserError
from relinear.folders import tokenizer_of
from relinear.get.beginning import begun
from relinear.get.qasper import paper
from relinear.measure import _contexts
from relinear.measure._answering import mean_of, share_of
from relinear.measure._contexts import ALONE, Prompt
from relinear.plan.job import Job
from relinear.plan.readings import Reading

NEEDS = ("next_token",)
AXES = {"context": 4096}

OF = SET = "qasper"
CHOICES = ("Yes", "No")
EVIDENCE_WORDS = (15, 60)  # the words of a shot's evidence; two shots have some 250 tokens
SCORES = ("acc", "balanced_acc", "macro_f1", "gain")


class Options(_contexts.Options):
    """Ask `items` questions, drawn by the plan's seed; null: all, less those of the shots' papers.

    `cut`: where a paper is shortened. SCROLLS (Shaham et al., 2022) leaves out its end.
    """

    items: dict[Literal["qasper"], Annotated[int, Field(ge=2)] | None]
    cut: Literal["middle", "end"] = "middle"


class Question(NamedTuple):
    """A question, its paper as one text, and the evidence of its answer."""

    number: int  # among all questions
    title: str
    text: str
    evidence: str
    question: str
    answer: str


def measure(model: PreTrainedModel, data: Path, options: Options, job: Job) -> Iterator[Reading]:
    """Of "qasper", at {context}: `acc`, the share of questions whose answer is the likelier of Yes and No;
    `balanced_acc`, the mean of that share over both answers; `macro_f1`, the mean of both answers' F1;
    `gain`, nats by which the context makes the right answer likelier than the question does without it;
    `cut`, the share of papers that did not fit; and `tied`, how often both answers were as likely: there one
    is drawn.

    At {context: 0} the first three of the question alone; at {} `majority`, the share of the commoner answer.
    Contexts that the model cannot read are not defined, and say why. Writes `items.jsonl`. Raises UserError
    before any work for a context without room for any of a paper.
    """
    _contexts.check(model, options, job.name)
    tokenizer = tokenizer_of(job.parents["model"])
    asked, shown = drawn(questions(data, job), options.items[SET], job.settings["seed"])
    prompts, whole = built(tokenizer, asked, shown, options, job.name)
    found = _contexts.answers(model, prompts, 1, options, job.name)
    gold, said = (
        [CHOICES.index(q.answer) for q in asked],
        {context: [a.choice for a in own] for context, own in found.items()},
    )
    nats = {
        context: [a.mean(right) for a, right in zip(own, gold, strict=True)] for context, own in found.items()
    }
    sizes = Counter(gold)
    rows: list[dict[str, Any]] = []
    for context, choices in said.items():
        for i, (question, right, choice) in enumerate(zip(asked, gold, choices, strict=True)):
            hit, weight = choice == right, len(gold) / (len(sizes) * sizes[right])
            row = {
                "set": SET,
                "item": question.number,
                "context": context,
                "gold": question.answer,
                "said": CHOICES[choice],
                "acc": hit,
                "balanced_acc": weight * hit,
                "tied": len(found[context][i].firsts),
                "scores": [found[context][i].mean(k) for k in range(len(CHOICES))],
            }
            rows.append(
                row
                if context == ALONE
                else row | {"gain": nats[context][i] - nats[ALONE][i], "cut": not whole[context][i]}
            )
    job.items(rows)
    yield Reading("majority", OF, {}, *share_of(right == sizes.most_common(1)[0][0] for right in gold))
    for context in said:
        own, at = [row for row in rows if row["context"] == context], {"context": context}
        yield Reading("acc", OF, at, *share_of(row["acc"] for row in own))
        yield Reading("balanced_acc", OF, at, *mean_of(row["balanced_acc"] for row in own))
        yield Reading("macro_f1", OF, at, *macro_f1(gold, said[context]))
        yield Reading("tied", OF, at, *share_of(row["tied"] > 1 for row in own))
        if context != ALONE:
            yield Reading("gain", OF, at, *mean_of(row["gain"] for row in own))
            yield Reading("cut", OF, at, *share_of(row["cut"] for row in own))
    yield from _contexts.unread(
        model, SCORES, OF, [context for context in options.contexts if context not in said]
    )


def questions(data: Path, job: Job) -> list[Question]:
    """All questions that are answered by Yes or No, in a fixed order."""
    docs = [doc for doc in _contexts.requests("qasper_yesno", data, job) if doc["answer"] in CHOICES]
    return [
        Question(i, doc["title"], paper(doc), " ".join(doc["source"].split()), doc["question"], doc["answer"])
        for i, doc in enumerate(docs)
    ]


def drawn(every: Sequence[Question], wanted: int | None, seed: int) -> tuple[list[Question], list[Question]]:
    """The questions to ask, in their order, and two to show: one of each answer, from papers that no other
    question is asked about, their evidence word for word in the paper and of `EVIDENCE_WORDS` words.

    Raises UserError where there are none to show.
    """
    rng, least, most = random.Random(f"{seed} shots"), *EVIDENCE_WORDS
    fit = [q for q in every if q.evidence in q.text and least <= len(q.evidence.split()) <= most]
    shown: list[Question] = []
    for answer in rng.sample(CHOICES, len(CHOICES)):
        able = [q for q in fit if q.answer == answer and q.title not in {s.title for s in shown}]
        if not able:
            raise UserError(
                f"no question whose answer is {answer} has evidence of {least} to {most} words in its paper;"
                " so there is none to show"
            )
        shown.append(rng.choice(able))
    left = [q for q in every if q.title not in {s.title for s in shown}]
    if {q.answer for q in left} != set(CHOICES):
        raise UserError(
            f"{len(left)} questions are left to ask, and not both answers among them; possible: more items"
        )
    if wanted is None or wanted >= len(left):
        return left, shown
    # As many of each answer as all questions have, and one at least, so that balanced accuracy is defined.
    yes, no = ([q for q in left if q.answer == answer] for answer in CHOICES)
    many = min(max(round(wanted * len(yes) / len(left)), 1), wanted - 1)
    rng = random.Random(f"{seed} items")
    return sorted([*rng.sample(yes, many), *rng.sample(no, min(wanted - many, len(no)))]), shown


def built(
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[Question],
    shown: Sequence[Question],
    options: Options,
    name: str,
) -> tuple[dict[int, list[Prompt]], dict[int, list[bool]]]:
    """The prompts of each context, and whether each has its whole paper; at `ALONE` without any paper.

    A prompt is built of token ids, and it and the longest answer have as many tokens as the context where its
    paper is cut.
    """

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    candidates = [ids(f" {choice}") for choice in CHOICES]
    shots = begun(
        tokenizer,
        ids("".join(f"{q.evidence}\nQuestion: {q.question}\nAnswer: {q.answer}\n\n" for q in shown)),
    )
    papers = {title: ids(text) for title, text in {q.title: q.text for q in asked}.items()}
    tails = [ids(f"\nQuestion: {q.question}\nAnswer:") for q in asked]
    longest = len(shots) + max(map(len, tails)) + max(map(len, candidates))
    if options.contexts[0] <= longest:
        raise UserError(
            f"{name}: a context of {options.contexts[0]} tokens has no room for a paper; shots, question and"
            f" answer have {longest}"
        )
    prompts = {ALONE: [Prompt([*shots, *tail], candidates) for tail in tails]}
    whole: dict[int, list[bool]] = {}
    for context in options.contexts:
        rooms = [context - len(shots) - len(tail) - max(map(len, candidates)) for tail in tails]
        parts = [CUT[options.cut](papers[q.title], room) for q, room in zip(asked, rooms, strict=True)]
        prompts[context] = [
            Prompt([*shots, *part, *tail], candidates) for part, tail in zip(parts, tails, strict=True)
        ]
        whole[context] = [len(papers[q.title]) <= room for q, room in zip(asked, rooms, strict=True)]
    return prompts, whole


def cut_middle(tokens: list[int], room: int) -> list[int]:
    """A text's beginning and its end, of `room` tokens together, halves where it is longer."""
    if len(tokens) <= room:
        return tokens
    end = room // 2
    return [*tokens[: room - end], *tokens[len(tokens) - end :]]


def cut_end(tokens: list[int], room: int) -> list[int]:
    """A text's beginning, of `room` tokens where it is longer."""
    return tokens[:room]


CUT: Mapping[str, Callable[[list[int], int], list[int]]] = {"middle": cut_middle, "end": cut_end}


def macro_f1(gold: Sequence[int], said: Sequence[int]) -> tuple[float, float, int]:
    """The unweighted mean of each class's F1, 0 for a class that is never right; its jackknife standard
    error; and n.

    se^2 = (n-1)/n sum_i (f_i - mean f)^2 with f_i the score without item i, which is the same for all items
    of a cell of the confusion matrix.
    """
    n, cells = len(gold), Counter(zip(gold, said, strict=True))
    without = {cell: _macro_f1(cells - Counter([cell])) for cell in cells}
    centre = sum(count * without[cell] for cell, count in cells.items()) / n
    squares = sum(count * (without[cell] - centre) ** 2 for cell, count in cells.items())
    return _macro_f1(cells), ((n - 1) / n * squares) ** 0.5, n


def _macro_f1(cells: Mapping[tuple[int, int], int]) -> float:
    classes = range(len(CHOICES))
    right = [2 * cells.get((c, c), 0) for c in classes]
    claimed = [
        sum(count * ((gold == c) + (said == c)) for (gold, said), count in cells.items()) for c in classes
    ]
    return sum(r / total if total else 0.0 for r, total in zip(right, claimed, strict=True)) / len(classes)
