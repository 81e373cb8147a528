"""Asking a model in its own context, of prompts that are read once into its cache or whose answers it writes in batches.

From the cache it answers greedily, and possible answers are scored.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from scipy.stats import binomtest
from torch import Tensor
from tqdm import tqdm
from transformers import Cache, PreTrainedModel

from relinear.machine.distributed import gathered, rank, share
from relinear.plan.job import Job

PIECE = 8192  # tokens of a prompt that are read in one forward pass; the cache is the same to rounding for any number
TOGETHER, TIMES = 256, 4  # the most candidates of a pass, in all and for each prompt; the candidates of one prompt are never split
ONE_SIGMA = 0.6826894921370859  # the share of a normal distribution within one standard deviation


class Answered(NamedTuple):
    """A model's answer to one prompt: its greedy tokens; of each candidate the log-probability of each token, and whether it is the
    likeliest behind the candidate's tokens before it."""

    greedy: list[int]
    scores: list[list[float]]
    likeliest: list[list[bool]]

    @property
    def choice(self) -> int:
        """The index of the candidate with the largest mean log-probability; the first of equals."""
        return max(range(len(self.scores)), key=lambda i: self.mean(i))

    def mean(self, candidate: int) -> float:
        """The mean log-probability of a candidate's tokens."""
        return sum(self.scores[candidate]) / len(self.scores[candidate])


def write(model: PreTrainedModel, prompts: Sequence[Sequence[int]], job: Job, *, batch_size: int, padding: int, **settings: int) -> list[list[int]]:
    """The tokens that a model writes greedily behind each prompt, padded where others of its batch are longer; `settings` are those of `generate`.

    Long prompts come first, and of several processes each asks a share.
    """
    order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
    batches = [order[at : at + batch_size] for at in range(0, len(order), batch_size)]
    found: list[tuple[int, list[int]]] = []
    model.eval()
    for batch in tqdm(share(batches), desc=job.name, unit="batch", disable=rank() > 0):
        length = max(len(prompts[i]) for i in batch)
        short = [length - len(prompts[i]) for i in batch]
        tokens = torch.tensor([[*[padding] * missing, *prompts[i]] for i, missing in zip(batch, short, strict=True)], device=model.device)
        mask = torch.tensor([[*[0] * missing, *[1] * (length - missing)] for missing in short], device=model.device)
        with torch.inference_mode():
            out = model.generate(
                input_ids=tokens, attention_mask=mask, do_sample=False, temperature=None, top_p=None, top_k=None, pad_token_id=padding, **settings
            )
        found += zip(batch, out[:, length:].tolist(), strict=True)
    by_prompt = dict(gathered(found))
    return [by_prompt[i] for i in range(len(prompts))]


@torch.inference_mode()
def ask(model: PreTrainedModel, prompts: Int[Tensor, "B T"], candidates: Sequence[Sequence[Sequence[int]]], steps: int) -> list[Answered]:
    """Answers to prompts of one length, `steps` greedy tokens each; `candidates` of each prompt, of a token or more, are scored behind it.

    Raises FloatingPointError where logits are NaN.
    """
    model.eval()
    cache, logits = None, torch.empty(0)
    for piece in prompts.to(model.device).split(PIECE, 1):
        out = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = out.past_key_values, out.logits[:, -1].float()
    if logits.isnan().any():
        raise FloatingPointError(f"got logits that are NaN behind a prompt of {prompts.shape[1]} tokens")
    first = logits.log_softmax(-1)
    scored = list(_scored(model, cache, first, candidates))
    tokens = [logits.argmax(-1)]
    for _ in range(steps - 1):
        out = model(tokens[-1][:, None], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        tokens.append(out.logits[:, -1].argmax(-1))
    greedy = torch.stack(tokens, 1).tolist()
    return [Answered(own, *parts) for own, parts in zip(greedy, scored, strict=True)]


def _scored(model, cache: Cache, first: Tensor, candidates: Sequence[Sequence[Sequence[int]]]) -> Iterator[tuple[list, list]]:
    """The log-probabilities of the candidates' tokens of each row of a cache, and whether each token is the likeliest; the cache is not changed.

    Rows are scored together as far as `TOGETHER` and `TIMES` go. `first` are the log-probabilities of the first token ``[B, V]``.
    """
    longest = max(len(own) for row in candidates for own in row)
    most = max(map(len, candidates))
    size, greedy = max(min(TOGETHER, TIMES * len(candidates)) // most, 1), first.argmax(-1)
    for begin in range(0, len(candidates), size):
        rows = range(begin, min(begin + size, len(candidates)))
        owners = torch.tensor([row for row in rows for _ in candidates[row]], device=first.device)
        flat = [own for row in rows for own in candidates[row]]
        logp = [first[owners, torch.tensor([own[0] for own in flat], device=first.device)][:, None]]
        best = [greedy[owners][:, None]]
        if longest > 1:
            past = copy.deepcopy(cache)
            past.batch_select_indices(owners)
            # Padded on the right: tokens behind a candidate change nothing before it, and the cache is thrown away.
            fed = torch.tensor([[*own, *[0] * (longest - len(own))] for own in flat], device=first.device)
            found = model(fed[:, :-1], past_key_values=past, use_cache=True).logits.float().log_softmax(-1)
            logp.append(found.gather(-1, fed[:, 1:, None])[..., 0])
            best.append(found.argmax(-1))
        scores, likeliest = torch.cat(logp, 1).tolist(), torch.cat(best, 1).tolist()
        at = 0
        for row in rows:
            own = range(at, at + len(candidates[row]))
            at = own.stop
            yield (
                [scores[i][: len(flat[i])] for i in own],
                [[a == b for a, b in zip(flat[i], likeliest[i], strict=False)] for i in own],
            )


def share_of(hits: Iterable[bool]) -> tuple[float, float, int]:
    """A share, its standard error and n. The error is half of Wilson's interval at one standard deviation: not zero where all items agree."""
    hits = list(hits)
    interval = binomtest(sum(hits), len(hits)).proportion_ci(ONE_SIGMA, method="wilson")
    return sum(hits) / len(hits), (interval.high - interval.low) / 2, len(hits)


def mean_of(values: Iterable[float]) -> tuple[float, float | None, int]:
    """A mean over items, its standard error (None for one item) and n."""
    values = np.array(list(values), dtype=np.float64)
    return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else None, len(values)
