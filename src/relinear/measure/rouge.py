"""ROUGE of what a model writes behind held-out prompts, beside the right answers: as rouge-score computes it, with its stemmer."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedModel

from relinear.errors import UserError
from relinear.get.asked import read
from relinear.machine.distributed import gathered, rank, share
from relinear.measure._answering import mean_of, share_of
from relinear.measure._limit import limit_of
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import Positive, Strict

NEEDS = ("next_token",)
ROUGE = ("rouge1", "rouge2", "rougeL")


class Options(Strict):
    """Answer the first `items` of the held-out prompts, null: all; greedily, with at most `new_tokens`, up to the tokenizer's end of text."""

    items: dict[Literal["prompts"], Annotated[int, Field(ge=2)] | None]
    batch_size: Positive
    new_tokens: Positive = 100


def measure(model: PreTrainedModel, data: Path, options: Options, job: Job) -> Iterator[Reading]:
    """`rouge1`, `rouge2` and `rougeL`, the mean F1 of unigrams, bigrams and of the longest common subsequence, and `ended`, the share of answers that
    come to an end by themselves: of the data's name.

    Writes `items.jsonl`, a line a prompt. Raises UserError before any work for data without prompts, for more prompts than there are, and for one
    beyond the model's positions.
    """
    from rouge_score.rouge_scorer import RougeScorer  # with nltk, which takes seconds to import

    asked, wanted = read(data), options.items["prompts"]
    if wanted is not None and wanted > len(asked):
        raise UserError(f"{job.name}: {wanted} prompts asked for; {len(asked)} are held out")
    asked = asked[:wanted]
    limit, most = limit_of(model), max(len(one.prompt) for one in asked) + options.new_tokens
    if limit.tokens is not None and most > limit.tokens:
        raise UserError(f"{job.name}: a prompt and its answer have {most} tokens; the model reads {limit.tokens}: {limit.why}. A prompt is never cut")
    tokenizer = AutoTokenizer.from_pretrained(job.parents["model"])
    scorer, of, found = RougeScorer(list(ROUGE), use_stemmer=True), job.settings["data"], []
    answers = written(model, [one.prompt for one in asked], tokenizer.eos_token_id, options, job)
    for number, (one, tokens) in enumerate(zip(asked, answers, strict=True)):
        ended = tokenizer.eos_token_id in tokens
        text = tokenizer.decode(tokens[: tokens.index(tokenizer.eos_token_id)] if ended else tokens, skip_special_tokens=True).strip()
        scores = scorer.score(one.output, text)
        found.append({"set": of, "item": number, "written": text, "right": one.output, "ended": ended,
                      **{name: scores[name].fmeasure for name in ROUGE}})  # fmt: skip
    job.items(found)
    for name in ROUGE:
        yield Reading(name, of, {}, *mean_of(row[name] for row in found))
    yield Reading("ended", of, {}, *share_of(row["ended"] for row in found))


def written(model: PreTrainedModel, prompts: Sequence[list[int]], end: int, options: Options, job: Job) -> list[list[int]]:
    """The tokens that a model writes greedily behind each prompt; long prompts come first, and of several processes each asks a share."""
    order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
    batches = [order[at : at + options.batch_size] for at in range(0, len(order), options.batch_size)]
    found: list[tuple[int, list[int]]] = []
    model.eval()
    for batch in tqdm(share(batches), desc=job.name, unit="batch", disable=rank() > 0):
        length = max(len(prompts[i]) for i in batch)
        short = [length - len(prompts[i]) for i in batch]
        tokens = torch.tensor([[*[end] * missing, *prompts[i]] for i, missing in zip(batch, short, strict=True)], device=model.device)
        mask = torch.tensor([[*[0] * missing, *[1] * (length - missing)] for missing in short], device=model.device)
        with torch.inference_mode():
            out = model.generate(
                input_ids=tokens, attention_mask=mask, do_sample=False, temperature=None, top_p=None, top_k=None,
                max_new_tokens=options.new_tokens, eos_token_id=end, pad_token_id=end,
            )  # fmt: skip
        found += zip(batch, out[:, length:].tolist(), strict=True)
    by_prompt = dict(gathered(found))
    return [by_prompt[i] for i in range(len(prompts))]
