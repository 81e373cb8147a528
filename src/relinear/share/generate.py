"""Text from a model in a folder: streamed as it comes, then how fast it was and how much memory the past
takes."""

import math
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer
from transformers.utils import logging

from relinear.core import store
from relinear.errors import UserError
from relinear.folders import chat_of, tokenizer_of
from relinear.linearize.assemble import assemble
from relinear.linearize.releases import cache_name
from relinear.linearize.state import RecurrentCache, nbytes
from relinear.machine.hardware import device_of, dtype_of
from relinear.machine.memory import uncollected
from relinear.share.runs import chain_of
from relinear.share.tensors import load_folder

COLDEST = 1e-3  # the least temperature: by less, logits overflow


class Speed(NamedTuple):
    """The costs of a generation. Rates are nan where nothing was timed: a decode rate needs two tokens."""

    prompt_tokens: int
    new_tokens: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    state_bytes: int
    recurrent: bool  # False: the state is a key-value cache, which grows with each token

    def __str__(self) -> str:
        kind = "recurrent state" if self.recurrent else "key-value cache after the last token"
        timed = f"{self.decode_tokens_per_second:.1f} tokens/s" if self.new_tokens > 1 else "too few to time"
        return (
            f"prefill: {self.prompt_tokens} tokens, {self.prefill_tokens_per_second:.1f} tokens/s\n"
            f"decode: {self.new_tokens} tokens, {timed}\n"
            f"{kind}: {self.state_bytes:,} bytes"
        )


class _Stopwatch(TextStreamer):
    """Prints the new tokens, and notes when each came."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times: list[float] = []

    def put(self, value) -> None:
        self.times.append(time.perf_counter())
        super().put(value)


def load(folder: Path, dtype: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a run's folder, a saved linearized folder or any transformers folder. Raises
    UserError where one is not whole."""
    if not folder.is_dir() and not store.parts(folder):
        raise UserError(
            f"no folder {folder}; possible: a run (results/<scale>/runs/<run>), or a folder with config.json"
            " and safetensors"
        )
    precision, tokens = dtype_of(dtype, device), folder
    if (folder / "config.json").is_file():
        model = load_folder(folder, precision).to(device)
    elif not store.parts(folder):
        raise UserError(
            f"{folder} is no run: it has no finished step or measurement; possible: a folder with config.json"
            " and safetensors, or a run"
        )
    else:
        tokens, links = chain_of(folder)
        model = assemble(tokens, links, precision, device)
    return model.eval(), tokenizer_of(tokens)


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool) -> dict[str, Tensor]:
    """The prompt's tokens ``[1, T]`` and their mask. Raises UserError where there are none, and for a chat
    that the tokenizer has no form of."""
    if chat:
        prompt = chat_of(tokenizer, prompt)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not chat, return_token_type_ids=False)
    if inputs["input_ids"].shape[1] == 0:
        raise UserError(f"the prompt {prompt!r} has no tokens; possible: at least one")
    return dict(inputs)


def is_text(prompt: str) -> bool:
    """Whether a string can be written as UTF-8, which a lone surrogate cannot."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        return False
    return True


def generate(
    folder: Path,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    chat: bool = False,
    dtype: str = "auto",
    device: str = "cpu",
) -> Speed:
    """Print a continuation as it comes: the likeliest, or one sampled where a temperature or a top_p is
    given. Raises UserError."""
    for what, value, fits, possible in (
        ("the prompt", repr(prompt), prompt != "", "at least one character"),
        ("--max-new-tokens", max_new_tokens, max_new_tokens >= 1, "1 or more"),
        ("the prompt", ascii(prompt)[:80], is_text(prompt), "Unicode text, without half of a surrogate pair"),
        ("--temperature", temperature, temperature is None or COLDEST <= temperature < math.inf,
         f"above 0, at least {COLDEST}; leave it out for the likeliest text"),
        ("--seed", seed, seed is None or 0 <= seed < 2**63, "0 or more, below 2**63"),
        ("--top-p", top_p, top_p is None or 0 < top_p <= 1, "above 0, at most 1"),
    ):  # fmt: skip
        if not fits:
            raise UserError(f"{what} must be {possible}; got {value}")
    logging.disable_progress_bar()  # its progress bars would stand in front of the text
    with uncollected():  # a model's classes, and peft, are imported when it is loaded
        model, tokenizer = load(folder, dtype, device_of(device))
    inputs = {name: x.to(device) for name, x in encode(tokenizer, prompt, chat).items()}
    length = inputs["input_ids"].shape[1]
    sample, watch = temperature is not None or top_p is not None, _Stopwatch(tokenizer)
    if seed is not None and not sample:
        print(
            "--seed chooses among texts that are sampled: without --temperature or --top-p the likeliest one"
            " is written",
            file=sys.stderr,
        )
    torch.manual_seed(seed or 0)
    how = (
        {"temperature": temperature or 1.0, "top_p": top_p or 1.0, "top_k": 0}
        if sample
        else dict.fromkeys(("temperature", "top_p", "top_k"))
    )
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    out = model.generate(
        **inputs,
        streamer=watch,
        max_new_tokens=max_new_tokens,
        do_sample=sample,
        pad_token_id=pad,
        return_dict_in_generate=True,
        **how,
    )
    began, first, *rest = watch.times  # the prompt, then each token
    cache = out[cache_name()]
    recurrent = isinstance(cache, RecurrentCache)
    return Speed(
        prompt_tokens=length,
        prefill_tokens_per_second=length / (first - began),
        new_tokens=1 + len(rest),
        decode_tokens_per_second=len(rest) / (rest[-1] - first) if rest else float("nan"),
        state_bytes=(
            cache.state_bytes()
            if recurrent
            else sum(nbytes((layer.keys, layer.values)) for layer in cache.layers)
        ),
        recurrent=recurrent,
    )
