"""ROUGE of what a model writes behind held-out prompts, beside the right answers: as rouge-score computes it,
with its stemmer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from transformers import PreTrainedModel

from relinear.errors import UserError
from relinear.folders import tokenizer_of
from relinear.get.asked import read
from relinear.measure._answering import mean_of, share_of, write
from relinear.measure._limit import limit_of
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import Positive, Strict

NEEDS = ("next_token",)
YIELDS = ("rouge1", "rouge2", "rougeL", "ended", "tied")
ROUGE = ("rouge1", "rouge2", "rougeL")


class Options(Strict):
    """Answer the first `items` of the held-out prompts, null: all; greedily, with at most `new_tokens`, up to
    the tokenizer's end of text."""

    items: dict[Literal["prompts"], Annotated[int, Field(ge=2)] | None]
    batch_size: Positive
    new_tokens: Positive = 100


def measure(model: PreTrainedModel, data: Path, options: Options, job: Job) -> Iterator[Reading]:
    """`rouge1`, `rouge2` and `rougeL`, the mean F1 of unigrams, bigrams and of the longest common
    subsequence, and `ended`, the share of answers that come to an end by themselves; and `tied`, the share in
    which a token was drawn among equals: of the data's name.

    Writes `items.jsonl`, a line a prompt. Raises UserError before any work for data without prompts, for more
    prompts than there are, and for one beyond the model's positions.
    """
    from rouge_score.rouge_scorer import RougeScorer  # with nltk, which takes seconds to import

    asked, wanted = read(data), options.items["prompts"]
    if wanted is not None and wanted > len(asked):
        raise UserError(f"{job.name}: {wanted} prompts asked for; {len(asked)} are held out")
    asked = asked[:wanted]
    limit, most = limit_of(model), max(len(one.prompt) for one in asked) + options.new_tokens
    if limit.tokens is not None and most > limit.tokens:
        raise UserError(
            f"{job.name}: a prompt and its answer have {most} tokens; the model reads {limit.tokens}:"
            f" {limit.why}. A prompt is never cut"
        )
    tokenizer = tokenizer_of(job.parents["model"])
    scorer, of, found = RougeScorer(list(ROUGE), use_stemmer=True), job.settings["data"], []
    settings = {
        "batch_size": options.batch_size,
        "padding": tokenizer.eos_token_id,
        "max_new_tokens": options.new_tokens,
    }
    answers = write(
        model, [one.prompt for one in asked], job.name, **settings, eos_token_id=tokenizer.eos_token_id
    )
    for number, (one, (tokens, drawn)) in enumerate(zip(asked, answers, strict=True)):
        ended = tokenizer.eos_token_id in tokens
        text = tokenizer.decode(
            tokens[: tokens.index(tokenizer.eos_token_id)] if ended else tokens, skip_special_tokens=True
        ).strip()
        scores = scorer.score(one.output, text)
        found.append(
            {
                "set": of,
                "item": number,
                "written": text,
                "right": one.output,
                "ended": ended,
                "drawn": drawn,
                **{name: scores[name].fmeasure for name in ROUGE},
            }
        )
    job.items(found)
    for name in ROUGE:
        yield Reading(name, of, {}, *mean_of(row[name] for row in found))
    yield Reading("ended", of, {}, *share_of(row["ended"] for row in found))
    yield Reading("tied", of, {}, *share_of(row["drawn"] for row in found))
