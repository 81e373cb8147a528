"""Asking a model in its own context, of prompts that are read once into its cache or whose answers it writes
in batches.

From the cache it answers greedily, and possible answers are scored.
"""

import copy
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm
from transformers import Cache, LogitsProcessor, PreTrainedModel

from relinear.linearize.writing import own_settings
from relinear.machine.distributed import gathered, rank, share
from relinear.measure._logits import credit, firsts, float32_head, likeliest, shared

# tokens of a prompt that are read in one forward pass; the cache is the same to rounding for any number
PIECE = 8192
# the most candidates of a pass, in all and for each prompt; the candidates of one prompt are never split
TOGETHER, TIMES = 256, 4


class Answered(NamedTuple):
    """A model's answer to one prompt: its greedy tokens; of each candidate the log-probability of each token,
    and 1 where the token is the likeliest behind the candidate's tokens before it, 1/k where k tokens are,
    else 0; and whether a greedy token was drawn among equals."""

    greedy: list[int]
    scores: list[list[float]]
    likeliest: list[list[float]]
    drawn: bool = False

    @property
    def firsts(self) -> list[int]:
        """The indices of the candidates with the largest mean log-probability: one, unless there is a tie."""
        return firsts([self.mean(i) for i in range(len(self.scores))])

    @property
    def choice(self) -> int:
        """The index of the candidate with the largest mean log-probability; of equals one that the answer's
        own numbers draw."""
        return random.Random(repr(self)).choice(self.firsts) if self.tied else self.firsts[0]

    @property
    def tied(self) -> bool:
        """Whether several candidates come first."""
        return len(self.firsts) > 1

    def chosen(self, candidate: int) -> float:
        """How likely it is that a candidate is chosen: 1, or 1/k where it is among k that come first, else
        0."""
        return (candidate in self.firsts) / len(self.firsts)

    def mean(self, candidate: int) -> float:
        """The mean log-probability of a candidate's tokens."""
        return sum(self.scores[candidate]) / len(self.scores[candidate])


class Written(NamedTuple):
    """The tokens that a model wrote, padded where others of its batch are longer, and whether one of them was
    drawn among equals."""

    tokens: list[int]
    drawn: bool


class _Likeliest(LogitsProcessor):
    """Leaves to `generate` the one token that `likeliest` takes where several are; remembers of each step
    which rows had several."""

    def __init__(self):
        self.tied: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        best, tied = likeliest(scores, input_ids)
        self.tied.append(tied)
        return scores.scatter(1, best[:, None], torch.inf) if tied.any() else scores


def write(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    name: str,
    *,
    batch_size: int,
    padding: int,
    **settings: int,
) -> list[Written]:
    """What a model writes greedily behind each prompt, by logits in float32; `settings` are those of
    `generate`, and there are no others.

    Long prompts come first, and of several processes each asks a share.
    """
    order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
    batches = [order[at : at + batch_size] for at in range(0, len(order), batch_size)]
    found: list[tuple[int, Written]] = []
    model.eval()
    with (
        torch.inference_mode(),
        float32_head(model, last=True),
        own_settings(model, do_sample=False, pad_token_id=padding, **settings),
    ):
        for batch in tqdm(share(batches), desc=name, unit="batch", disable=rank() > 0):
            found += zip(batch, _written(model, [prompts[i] for i in batch], padding), strict=True)
    by_prompt = dict(gathered(found))
    return [by_prompt[i] for i in range(len(prompts))]


def _written(model: PreTrainedModel, prompts: Sequence[Sequence[int]], padding: int) -> Iterator[Written]:
    """What a model writes behind prompts that are read together, padded on the left."""
    length, watch = max(map(len, prompts)), _Likeliest()
    short = [length - len(prompt) for prompt in prompts]
    tokens = torch.tensor(
        [[*[padding] * missing, *prompt] for prompt, missing in zip(prompts, short, strict=True)],
        device=model.device,
    )
    mask = torch.tensor(
        [[*[0] * missing, *[1] * (length - missing)] for missing in short], device=model.device
    )
    out = model.generate(input_ids=tokens, attention_mask=mask, logits_processor=[watch])[:, length:].tolist()
    ties = torch.stack(watch.tied, 1).tolist()
    for own, tied in zip(out, ties, strict=True):
        # what follows the end of a text is padding
        end = next((i + 1 for i, token in enumerate(own) if token == padding), len(own))
        yield Written(own, any(tied[:end]))


@torch.inference_mode()
def ask(
    model: PreTrainedModel,
    prompts: Int[Tensor, "B T"],
    candidates: Sequence[Sequence[Sequence[int]]],
    steps: int,
) -> list[Answered]:
    """Answers to prompts of one length, `steps` greedy tokens each; `candidates` of each prompt, of a token
    or more, are scored behind it.

    All is by logits in float32. Raises FloatingPointError where logits are NaN.
    """
    model.eval()
    read, cache, logits = prompts.to(model.device), None, torch.empty(0)
    with float32_head(model):
        for piece in read.split(PIECE, 1):
            out = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, logits = out.past_key_values, out.logits[:, -1]
        if logits.isnan().any():
            raise FloatingPointError(f"got logits that are NaN behind a prompt of {prompts.shape[1]} tokens")
        scored = list(_scored(model, cache, logits, candidates))
        drawn = torch.zeros(len(read), dtype=torch.bool, device=read.device)
        for step in range(steps):
            if step:
                out = model(read[:, -1:], past_key_values=cache, use_cache=True)
                cache, logits = out.past_key_values, out.logits[:, -1]
            token, tied = likeliest(logits, read)
            read, drawn = torch.cat([read, token[:, None]], 1), drawn | tied
    greedy = read[:, prompts.shape[1] :].tolist()
    return [
        Answered(own, *parts, tied) for own, parts, tied in zip(greedy, scored, drawn.tolist(), strict=True)
    ]


def _scored(
    model, cache: Cache, first: Tensor, candidates: Sequence[Sequence[Sequence[int]]]
) -> Iterator[tuple[list, list]]:
    """The log-probabilities of the candidates' tokens of each row of a cache, and each token's `credit`; the
    cache is not changed.

    Rows are scored together as far as `TOGETHER` and `TIMES` go. `first` are the logits of the first token
    ``[B, V]``.
    """
    longest = max(len(own) for row in candidates for own in row)
    most = max(map(len, candidates))
    size = max(min(TOGETHER, TIMES * len(candidates)) // most, 1)
    first_logp, largest, counts = first.log_softmax(-1), *shared(first)
    for begin in range(0, len(candidates), size):
        rows = range(begin, min(begin + size, len(candidates)))
        owners = torch.tensor([row for row in rows for _ in candidates[row]], device=first.device)
        flat = [own for row in rows for own in candidates[row]]
        at_first = owners, torch.tensor([own[0] for own in flat], device=first.device)
        logp = [first_logp[at_first][:, None]]
        credits = [credit(first[at_first], largest[owners], counts[owners])[:, None]]
        if longest > 1:
            past = copy.deepcopy(cache)
            past.batch_select_indices(owners)
            # Padded on the right: tokens behind a candidate change nothing before it, and the cache is thrown
            # away.
            fed = torch.tensor([[*own, *[0] * (longest - len(own))] for own in flat], device=first.device)
            found = model(fed[:, :-1], past_key_values=past, use_cache=True).logits
            credits.append(credit(found.gather(-1, fed[:, 1:, None])[..., 0], *shared(found)))
            logp.append(found.log_softmax(-1).gather(-1, fed[:, 1:, None])[..., 0])
        scores, credited = torch.cat(logp, 1).tolist(), torch.cat(credits, 1).tolist()
        at = 0
        for row in rows:
            own = range(at, at + len(candidates[row]))
            at = own.stop
            yield [scores[i][: len(flat[i])] for i in own], [credited[i][: len(flat[i])] for i in own]


def share_of(hits: Iterable[float]) -> tuple[float, float, int]:
    """A share, its standard error and n. The error is half of Wilson's interval at one standard deviation:
    not zero where all items agree.

    A hit is 1, a miss 0; what was drawn among k equals counts 1/k, which no library's interval takes.
    """
    hits = list(hits)
    n, share = len(hits), sum(hits) / len(hits)
    return share, (share * (1 - share) / n + 1 / (4 * n * n)) ** 0.5 / (1 + 1 / n), n


def mean_of(values: Iterable[float]) -> tuple[float, float | None, int]:
    """A mean over items, its standard error (None for one item) and n."""
    values = np.array(list(values), dtype=np.float64)
    return (
        float(values.mean()),
        float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else None,
        len(values),
    )
