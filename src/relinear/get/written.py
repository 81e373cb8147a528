"""The teacher writes instructions and answers them: training text in its own distribution, where no
instruction data set can be had.

Magpie (Xu et al. 2024, arXiv:2406.08464): given its chat template up to where a user's words would begin, a
chat model writes a user's words; given those, its answer. Sampled in batches of equal size, each from a seed
of its own, so that an interrupted stage goes on where it was. Batches that are kept in workflow/instructions
are taken from there.
"""

import functools
import json
import lzma
from itertools import count

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from relinear.errors import UserError
from relinear.files import aside
from relinear.folders import chat_of, tokenizer_of
from relinear.linearize.loading import load_teacher
from relinear.linearize.writing import own_settings
from relinear.machine.hardware import place
from relinear.plan.job import Job

MARK = "\N{OBJECT REPLACEMENT CHARACTER}"  # stands for a user's words while the template is taken apart
FEWEST = 0.02  # share of a batch that must come to an end, or the teacher is no chat model


def template(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The chat template's text before a user's words, and its text between them and the answer. Raises
    UserError where there is none."""
    if not tokenizer.chat_template:
        raise UserError(
            "the teacher's tokenizer has no chat template, so it cannot write instructions; leave 'written'"
            " out of the data set's sources"
        )
    text = chat_of(tokenizer, MARK)
    if text.count(MARK) != 1:
        raise UserError(
            f"the chat template of {tokenizer.name_or_path} writes a user's words {text.count(MARK)} times;"
            " possible: one that does so once"
        )
    before, between = text.split(MARK)
    return before, between


@torch.inference_mode()
def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    new_tokens: int,
    *,
    temperature: float,
    top_p: float,
) -> list[tuple[str, bool]]:
    """A sampled continuation of each prompt, and whether it came to an end by itself."""
    batch = tokenizer(
        prompts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
    ).to(model.device)
    sampled = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    with own_settings(model, max_new_tokens=new_tokens, **sampled, **ends):
        out = model.generate(**batch)[:, batch["input_ids"].shape[1] :]
    ended = (out == tokenizer.eos_token_id).any(1).tolist()
    return list(zip(tokenizer.batch_decode(out, skip_special_tokens=True), ended, strict=True))


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, size: int, settings: dict
) -> list[dict]:
    """One batch of records in Alpaca's schema. An instruction that did not end or says nothing is left out,
    an answer cut short is kept."""
    top_p = settings["top_p"]
    before, between = template(tokenizer)
    asked = complete(
        model,
        tokenizer,
        [before] * size,
        settings["instruction_tokens"],
        temperature=settings["temperature"],
        top_p=top_p,
    )
    asked = [text.strip() for text, ended in asked if ended and text.strip()]
    if len(asked) < max(FEWEST * size, 1):
        raise UserError(
            f"{len(asked)} of {size} instructions came to an end within {settings['instruction_tokens']}"
            " tokens; is the teacher a chat model?"
        )
    prompts = [before + text + between for text in asked]
    answers = complete(
        model,
        tokenizer,
        prompts,
        settings["response_tokens"],
        temperature=settings["response_temperature"],
        top_p=top_p,
    )
    return [
        {"instruction": a, "input": "", "output": b.strip()}
        for a, (b, _) in zip(asked, answers, strict=True)
        if b.strip()
    ]


def work(job: Job) -> dict:
    """Write `written.jsonl`, at least the wanted number of tokens."""
    settings = job.settings["written"]
    tokenizer = tokenizer_of(job.parents["model"])
    # a tokenizer out of a GGUF file has none
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    kept = [job.workflow / name for name in job.settings["kept"]]

    @functools.cache  # not loaded where enough batches are kept
    def writer() -> PreTrainedModel:
        device, dtype = place(job)
        return load_teacher(job.parents["model"], dtype, device)

    def sampled(number: int) -> list[dict]:
        path = job.work / f"{number:05}.json"
        if not path.is_file():
            torch.manual_seed(job.seed * 1_000_003 + number)
            with aside(path) as unfinished:
                unfinished.write_text(
                    json.dumps(write(writer(), tokenizer, settings["batch_size"], settings))
                )
        return json.loads(path.read_text())

    records, tokens = [], 0
    with tqdm(total=settings["tokens"], desc=job.name, unit="tok", unit_scale=True, mininterval=5) as bar:
        for number in count():
            batch = (
                json.loads(lzma.decompress(kept[number].read_bytes()))
                if number < len(kept)
                else sampled(number)
            )
            records += batch
            new = sum(map(len, tokenizer([r["instruction"] + r["output"] for r in batch])["input_ids"]))
            tokens += new
            bar.update(new)
            if tokens >= settings["tokens"]:
                break
    (job.out / "written.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    job.tokens = tokens
    return {
        "records": len(records),
        "tokens": tokens,
        "batches": number + 1,
        "kept": min(number + 1, len(kept)),
        "batch_size": settings["batch_size"],
        "seed": job.seed,
    }
