"""Questions about a passage, whose answer the model writes: how much of the answer is right, and whether it
stood inside a window or beyond.

Log-likelihood tasks mostly fit into the windows that linearized models keep. Here a passage stands before
each question, and an item counts as `inside` where its answer ends among the last `window` tokens of the
prompt, as `beyond` where it stands before those alone.

Between passage and question stand two others with their answers, which no passage is needed for. They show
how short an answer is; where nothing does, a small chat model writes sentences, and its F1 is near zero
whatever it found. They stand there, and not first, so that a window sees them.
"""

import gzip
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from relinear.errors import UserError
from relinear.folders import tokenizer_of
from relinear.get.beginning import begun
from relinear.measure._answering import mean_of, share_of, write
from relinear.measure._limit import limit_of
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import Positive, Strict

NEEDS = ("next_token",)
AXES = {"answer": ("inside", "beyond")}

OF = "answers"  # the object of readings over all sets; others have the set's name
SIDES = ("inside", "beyond")
EXAMPLES = (("What is the capital of France?", "Paris"), ("Who wrote Hamlet?", "William Shakespeare"))
Set = Literal["squad", "drop", "coqa"]


class Options(Strict):
    """Ask about `items` of each set, drawn by the plan's seed, half of them of each side of `window` where so
    many are there; null: all.

    An answer has at most `new_tokens`, at least one (a chat model may end its turn at once), and ends with
    its line.
    """

    items: dict[Set, Annotated[int, Field(ge=2)] | None] = Field(min_length=1)
    batch_size: Positive
    window: Positive = 128  # Lizard's window; LoLCATs' is 64
    new_tokens: Positive = 16


class Question(NamedTuple):
    """A passage, a question about it, and the answers that count as right."""

    passage: str
    question: str
    answers: tuple[str, ...]


class Item(NamedTuple):
    """A question as it is put to a model. `distance`: tokens of the prompt from the last one of an answer on,
    where it stands last."""

    set: str
    number: int  # in its set
    prompt: list[int]
    answers: tuple[str, ...]
    distance: int
    side: str


def measure(model: PreTrainedModel, data: Path, options: Options, job: Job) -> Iterator[Reading]:
    """`f1`, the largest token F1 with a right answer after SQuAD's normalisation, and `contains`, whether
    what was written contains one: of "answers" and of each set, at {answer: inside} and {answer: beyond};
    `left_out`, the share of a set's questions whose answer does not stand in the passage word for word, or
    stands in the question: of these nobody can say where the answer is; and `tied` of "answers", the share in
    which a token was drawn among equals.

    Writes `items.jsonl`. Raises UserError before any work for items that are not there, and for a prompt
    beyond the model's positions.
    """
    # SQuAD's; lm-eval takes seconds to import
    from lm_eval.tasks.qasper.metrics import f1_abstractive, normalize_answer

    tokenizer = tokenizer_of(job.parents["model"])
    items: list[Item] = []
    for name, wanted in options.items.items():
        whole = questions(name, data, job)
        found = placed(name, whole, tokenizer, options.window)
        items += sample(found, wanted, f"{job.settings['seed']} {name}")
        yield Reading(
            "left_out",
            name,
            {},
            *share_of(i not in {item.number for item in found} for i in range(len(whole))),
        )
    limit, most = limit_of(model), max(len(item.prompt) for item in items) + options.new_tokens
    if limit.tokens is not None and most > limit.tokens:
        reads = f"the model reads {limit.tokens}: {limit.why}"
        raise UserError(
            f"{job.name}: a prompt and its answer have {most} tokens; {reads}. A prompt is never cut"
        )
    written = generated(model, tokenizer, items, options, job)
    rows: list[dict[str, Any]] = []
    for item, (text, drawn) in zip(items, written, strict=True):
        f1 = max(float(f1_abstractive([text], [answer])) for answer in item.answers)
        said = f" {normalize_answer(text)} "
        contains = any(f" {normalize_answer(answer)} " in said for answer in item.answers)
        rows.append(
            {
                "set": item.set,
                "item": item.number,
                "answer": item.side,
                "distance": item.distance,
                "written": text,
                "right": list(item.answers),
                "f1": f1,
                "contains": contains,
                "drawn": drawn,
            }
        )
    job.items(rows)
    for name in (OF, *options.items):
        for side in SIDES:
            if own := [row for row in rows if row["answer"] == side and name in (OF, row["set"])]:
                yield Reading("f1", name, {"answer": side}, *mean_of(row["f1"] for row in own))
                yield Reading("contains", name, {"answer": side}, *share_of(row["contains"] for row in own))
    yield Reading("tied", OF, {}, *share_of(row["drawn"] for row in rows))


def questions(name: str, data: Path, job: Job) -> list[Question]:
    """The questions of a set, in a fixed order, each once: OLMES's requests in an asset, or lines of the
    files that the settings name.

    Raises UserError where there are none.
    """
    if data == job.workflow:
        paths = [job.workflow / file for file in sorted(job.settings["files"]) if Path(file).stem == name]
    else:
        paths = sorted(path for path in data.rglob("requests.jsonl.gz") if name in path.parts)
    found: dict[Question, None] = {}
    for path in paths:
        with (
            gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")
        ) as lines:
            found |= dict.fromkeys(
                question for line in lines if (question := READ[name](json.loads(line)["doc"])) is not None
            )
    if not found:
        raise UserError(
            f"{job.name}: no questions of {name} in {data}; expected */{name}/*/requests.jsonl.gz, or"
            f" {name}.jsonl in a folder of items"
        )
    return list(found)


def _squad(doc: Mapping[str, Any]) -> Question:
    before, _, question = doc["query"].removesuffix("\nAnswer:").rpartition("\nQuestion: ")
    return Question(
        before.partition("\nBackground: ")[2], question, tuple(dict.fromkeys(doc["answers_text"]))
    )


def _drop(doc: Mapping[str, Any]) -> Question | None:
    """The question of a document whose answer is one piece of text, else None; numbers are counted or
    computed, whatever stands in the passage."""
    spans = [answer[0] for answer in doc["answers"] if len(answer) == 1]
    right = tuple(dict.fromkeys(span for span in spans if re.search(r"[^\W\d_]", span)))
    return Question(doc["passage"], doc["question"], right) if right else None


def _coqa(doc: Mapping[str, Any]) -> Question | None:
    """The first question of each conversation, which needs no other to be understood, unless it is answered
    by yes or no."""
    right = tuple(dict.fromkeys(doc["answers"]))
    first = doc["id"].endswith("_turn0") and not {answer.lower().strip(". ") for answer in right} & {
        "yes",
        "no",
        "unknown",
    }
    return Question(doc["story"], doc["question"], right) if first else None


READ: dict[str, Callable[[Mapping[str, Any]], Question | None]] = {
    "squad": _squad,
    "drop": _drop,
    "coqa": _coqa,
}


def placed(
    name: str, whole: Sequence[Question], tokenizer: PreTrainedTokenizerBase, window: int
) -> list[Item]:
    """Prompts of the questions whose answer has a known place in the passage, each with that place."""
    found, shown = [], "".join(f"{_asked(example)} {answer}" for example, answer in EXAMPLES)
    for number, (passage, question, right) in enumerate(whole):
        ends = [match.end() - 1 for answer in right for match in _places(answer, passage)]
        if not ends or any(_places(answer, question) for answer in right):
            continue
        tail = f"\n{shown}{_asked(question)}"
        cut = tokenizer(passage + tail, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        begins = [start for start, _ in cut["offset_mapping"]]
        distance = len(begins) - sum(start <= max(ends) for start in begins) + 1
        found.append(
            Item(name, number, begun(tokenizer, cut["input_ids"]), right, distance, SIDES[distance > window])
        )
    return found


def _asked(question: str) -> str:
    return f"\nQuestion: {question}\nAnswer:"


def _places(answer: str, text: str) -> list[re.Match[str]]:
    """The places where an answer stands in a text as whole words, in any case."""
    return (
        list(re.finditer(rf"(?<!\w){re.escape(answer.strip())}(?!\w)", text, re.IGNORECASE))
        if answer.strip()
        else []
    )


def sample(items: Sequence[Item], wanted: int | None, seed: str) -> list[Item]:
    """So many items, half of each side as far as there are, in their order."""
    if wanted is None or wanted >= len(items):
        return list(items)
    rng = random.Random(seed)
    sides = [
        rng.sample(own, len(own)) for own in ([item for item in items if item.side == side] for side in SIDES)
    ]
    beyond = min(len(sides[1]), max(wanted // 2, wanted - len(sides[0])))
    return sorted([*sides[0][: wanted - beyond], *sides[1][:beyond]], key=lambda item: item.number)


def generated(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[Item],
    options: Options,
    job: Job,
) -> list[tuple[str, bool]]:
    """The first line that a model writes greedily behind each prompt, and whether a token was drawn among
    equals."""
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    prompts = [item.prompt for item in items]
    answers = write(
        model,
        prompts,
        job.name,
        batch_size=options.batch_size,
        padding=padding,
        max_new_tokens=options.new_tokens,
        min_new_tokens=1,
    )
    texts = tokenizer.batch_decode([answer.tokens for answer in answers], skip_special_tokens=True)
    return [
        (text.strip().partition("\n")[0], answer.drawn) for text, answer in zip(texts, answers, strict=True)
    ]
