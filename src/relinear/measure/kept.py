"""Which tokens must be kept to answer? What rules of choice keep of a text, scored by the untrained teacher.

Each rule but `all` holds the bytes of so many keys and values (`holds`) in every layer. Those below `sinks`
hold half of them as a window with its sinks, and choose what they keep of the tokens that have left it, each
key head for itself; a token that was dropped is gone:

    all         softmax attention, the teacher itself: no bound
    window      the last positions
    sinks       the first `SINKS` and the last positions
    random      tokens drawn by a fixed seed
    small_keys  the shortest keys (Devoto et al., 2406.11430)
    surprise    the largest residuals ||u_t|| of a delta rule, as `relinear.attention.delta` starts, every
                half-life 1024 and every write 1/2 (HOLA, 2607.02303); its state, in bfloat16, counts
    received    the most attention within the window, times ||v|| (`relinear.attention.kept`)
    attention   the largest sums of the teacher's attention so far (H2O, 2306.14048)
    merged      means of keys, of values, in slots; a token joins the slot whose mean key is most alike, whose
                score has log n added (after Key-Value Means, 2605.09877, whose keys are not rotated)
    oracle      the largest sums of the teacher's attention from all queries to come: no rule can know these

Kept keys have their own positions' angles: a rule is the teacher's attention over fewer tokens. Nothing is
trained.
"""

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

import torch
from jaxtyping import Bool, Float
from pydantic import Field, model_validator
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from relinear import linearize
from relinear.attention._base import Attention, Heads, Inputs, softmax_weights
from relinear.folders import tokenizer_of
from relinear.get.needles import Cutter
from relinear.get.whole import Whole
from relinear.linearize.model import Linearized
from relinear.linearize.transfer import layer_inputs, record
from relinear.measure import kv_recall
from relinear.measure._answering import mean_of, share_of
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import Positive, Strict
from relinear_kernels.sliding_window_attention_reference import sliding_window_weights

NEEDS = ("next_token", "documents")
YIELDS = ("exact_match", "nats", "perplexity", "far", "error", "tokens")
RULES = (
    "all",
    "window",
    "sinks",
    "random",
    "small_keys",
    "surprise",
    "received",
    "attention",
    "merged",
    "oracle",
)
AXES = {"rule": RULES, "layer": 0}
SINKS = 4
HALF_LIFE, WRITE = 1024.0, 0.5  # of the delta rule that is surprised


class Options(Strict):
    """Hold the bytes of `holds` positions. `read`: `documents`, the first `documents` of them up to the last
    of `positions`, scored from the first of these on; or lists of `pairs` and a question, `prompts` times,
    with `gap` tokens between, of sentences that repeat (`sentences`) or of documents (`between`).
    `batch_size` prompts are read at a time. Where the teacher's own queries look is measured on the first
    `looked` texts."""

    read: Literal["documents", "sentences", "between"]
    holds: Annotated[int, Field(ge=64)] = 256
    prompts: Annotated[int, Field(ge=2)]
    pairs: Annotated[int, Field(ge=2)] = 16
    gap: Positive = 256
    documents: Annotated[int, Field(ge=2)]
    positions: tuple[Positive, Positive]
    batch_size: Positive = 4
    looked: Annotated[int, Field(ge=2)] = 4

    @model_validator(mode="after")
    def _beyond(self) -> Self:
        first, last = self.positions
        if not self.holds <= first < last:
            raise ValueError(
                f"positions begin beyond the {self.holds} that every rule holds, and end later; got"
                f" {first}, {last}"
            )
        return self


class Budget(NamedTuple):
    """What a rule holds: `window` last positions, `sinks` first ones, and `kept` tokens or slots."""

    window: int
    sinks: int
    kept: int


def budget(rule: str, positions: int, heads: Heads) -> Budget:
    """What the bytes of so many positions hold by a rule. A random number or a norm is computed again from
    what is kept; a residual, and a sum of attention, has 4 bytes, and a slot its number of tokens."""
    if rule == "window":
        return Budget(positions, 0, 0)
    if rule == "sinks":
        return Budget(positions - SINKS, SINKS, 0)
    near, state = positions // 2 - SINKS, heads.dim / 2 if rule == "surprise" else 0  # its state, bfloat16
    score = 0 if rule in ("random", "small_keys", "oracle") else 1 / heads.dim
    left = (
        positions
        - SINKS
        - near
        - state
        - (near * score if rule in ("surprise", "received", "attention") else 0)
    )
    return Budget(near, SINKS, int(left / (1 + score)))


def near(length: int, window: int, sinks: int) -> Bool[Tensor, "T T"]:
    """Which keys each query sees without a choice."""
    at = torch.arange(length)
    back = at[:, None] - at
    return (back >= 0) & ((back < window) | (at < sinks))


def kept_by_score(score: Float[Tensor, "B G T"], holds: Budget) -> Bool[Tensor, "B G T T"]:
    """Which keys each query sees, of those that have left the window the ones with the largest scores; of
    equals the earlier one."""
    length, at = score.shape[-1], torch.arange(score.shape[-1])
    score = score.masked_fill(at < holds.sinks, -torch.inf)
    before = at[:, None] < at
    above = (score[..., :, None] > score[..., None, :]) | (
        (score[..., :, None] == score[..., None, :]) & before
    )
    seen = near(length, holds.window, holds.sinks).expand(*score.shape, length).clone()
    if length > holds.window:
        last = length - holds.window  # at query t the tokens up to t - window have left
        rank = above.int().cumsum(-2)[..., :last, :]
        left = (at <= at[:last, None]) & (at >= holds.sinks)
        seen[..., holds.window :, :] |= left & (rank < holds.kept)
    return seen


def kept_by_worth(worth: Float[Tensor, "B G T T"], holds: Budget) -> Bool[Tensor, "B G T T"]:
    """The same, where what a token (column) is worth changes with the query (row): at each query the kept
    token that is worth least gives way to the one that leaves the window, or that one goes."""
    length, flat = worth.shape[-1], worth.flatten(0, 1)
    seen = near(length, holds.window, holds.sinks).expand(len(flat), length, length).clone()
    held = torch.zeros(len(flat), 0, dtype=torch.long)
    for t in range(holds.window + holds.sinks, length):
        held = nn.functional.pad(held, (0, 1), value=t - holds.window)
        if held.shape[1] > holds.kept:
            least = flat[:, t].gather(1, held).argmin(1, keepdim=True)
            stay = torch.ones_like(held, dtype=torch.bool).scatter_(1, least, False)
            held = held[stay].view(len(flat), holds.kept)
        seen[:, t].scatter_(1, held, True)
    return seen.view(worth.shape)


def residual(k: Float[Tensor, "B T G D"], v: Float[Tensor, "B T G D"]) -> Float[Tensor, "B G T"]:
    """||u_t|| of the delta rule of k before rotary embedding, and v."""
    k = nn.functional.normalize(nn.functional.silu(k.transpose(1, 2).float()), dim=-1)
    at = torch.arange(k.shape[2])
    decay = torch.exp2(-(at[:, None] - at).clamp(min=0) / HALF_LIFE)
    erased = (k @ k.transpose(-1, -2) * decay * WRITE).tril(-1) + torch.eye(k.shape[2])
    written = WRITE * v.transpose(1, 2).float()
    return torch.linalg.solve_triangular(erased, written, upper=False, unitriangular=True).norm(dim=-1)


def seen_by(rule: str, inputs: Inputs, heads: Heads, holds: Budget) -> Bool[Tensor, "B G T T"]:
    """Which keys each query sees by a rule that keeps tokens as they are."""
    shape = (len(inputs.x), heads.groups, inputs.x.shape[1])
    if rule in ("window", "sinks"):
        return near(shape[2], holds.window, holds.sinks).expand(*shape, shape[2])
    if rule in ("attention", "oracle"):
        given = softmax_weights(inputs, heads).unflatten(1, (heads.groups, -1)).sum(2)
        worth = given.cumsum(2) if rule == "attention" else given.flip(2).cumsum(2).flip(2)
        return kept_by_worth(worth, holds)
    if rule == "random":
        score = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    elif rule == "received":
        given = {"window": holds.window, "meta": holds.sinks, "scale": heads.scale}
        near_by = sliding_window_weights(*inputs.rotated(), **given) * near(shape[2], holds.window, 0)
        score = near_by.unflatten(1, (heads.groups, -1)).sum((2, 3))
        score = score * inputs.v.float().norm(dim=-1).transpose(1, 2)
    elif rule == "small_keys":
        score = -inputs.k.float().norm(dim=-1).transpose(1, 2)
    else:
        score = residual(inputs.k, inputs.v)
    return kept_by_score(score, holds)


def attend(inputs: Inputs, heads: Heads, seen: Bool[Tensor, "B G T T"]) -> Float[Tensor, "B T H D"]:
    """Softmax attention over the keys that each query sees."""
    q, k, v = (x.transpose(1, 2).float() for x in (*inputs.rotated(), inputs.v))
    y = nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen.repeat_interleave(heads.group, 1), scale=heads.scale, enable_gqa=True
    )
    return y.transpose(1, 2)


def merge(inputs: Inputs, heads: Heads, holds: Budget) -> Float[Tensor, "B T H D"]:
    """Softmax attention over window, sinks and the means of slots."""
    q, k, v = (x.transpose(1, 2).float() for x in (*inputs.rotated(), inputs.v))
    length, shape = q.shape[2], (len(k), heads.groups, holds.kept)
    q = q.unflatten(1, (heads.groups, -1)) * heads.scale
    scores = torch.einsum("bgrtd,bgid->bgrti", q, k).masked_fill(
        ~near(length, holds.window, holds.sinks), -torch.inf
    )
    y, total = torch.einsum("bgrti,bgid->bgrtd", scores.softmax(-1), v), scores.logsumexp(-1)
    keys, values = torch.zeros(2, *shape, heads.dim).unbind()
    count = torch.zeros(*shape, 1)
    for t in range(holds.window + holds.sinks, length):
        own_k, own_v = (x[:, :, t - holds.window, None] for x in (k, v))
        free = t - holds.window - holds.sinks  # the slots are filled one after another first
        to = (nn.functional.normalize(keys, dim=-1) @ own_k.transpose(-1, -2)).argmax(2, keepdim=True)
        if free < holds.kept:
            to.fill_(free)
        keys.scatter_add_(2, to.expand_as(own_k), own_k)
        values.scatter_add_(2, to.expand_as(own_v), own_v)
        count.scatter_add_(2, to, torch.ones_like(to, dtype=count.dtype))
        n = count[:, :, : free + 1]
        mean_k, mean_v = (x[:, :, : free + 1] / n for x in (keys, values))
        far = q[:, :, :, t] @ mean_k.transpose(-1, -2) + n.log().transpose(-1, -2)
        share = (far.logsumexp(-1) - total[..., t]).sigmoid()[..., None]
        y[..., t, :] = (1 - share) * y[..., t, :] + share * (far.softmax(-1) @ mean_v)
    return y.flatten(1, 2).transpose(1, 2)


class Chosen(Attention):
    """A teacher's layer that sees what a rule keeps; of whole texts, without a state."""

    def __init__(self, heads: Heads, rule: str, positions: int):
        super().__init__(heads, None)
        self.rule, self.holds = rule, budget(rule, positions, heads)

    def forward(self, inputs: Inputs, state=None):
        """Head outputs of whole texts."""
        if self.rule == "merged":
            return merge(inputs, self.heads, self.holds), None
        return attend(inputs, self.heads, seen_by(self.rule, inputs, self.heads, self.holds)), None


class Asked(NamedTuple):
    """A prompt with its answer, and how many of its tokens are the answer's."""

    tokens: list[int]
    answer: int


@torch.inference_mode()
def measure(model: PreTrainedModel, data: Path, options: Options, job: Job) -> Iterator[Reading]:
    """At each {rule}, by a teacher whose layers all see what the rule keeps: of "pairs" `exact_match`, each
    likeliest token behind the prompt and the answer's tokens before it is the answer's, and `nats` a token of
    the answer; of "documents" `perplexity`.

    Where the teacher's own queries look: `far`, the share that the rule still sees of the attention to more
    than `holds` back, sinks left out, and `error`, the squared distance of head outputs from the teacher's,
    over their squares; of "pairs", by the query that is to be answered, of "documents", by all that are
    scored; over all layers, and of each {layer}. Merged means are none of the tokens: `far` is not defined.
    `tokens`: what a layer keeps beside window and sinks. Errors are over prompts and over documents.

    Writes `items.jsonl`.
    """
    texts, (first, last) = Whole(data), options.positions
    if options.read == "documents":
        rows = [texts.excerpts(i, last, 1)[0].tokens for i in range(len(texts))[: options.documents]]
        looked = [(row, slice(first, None)) for row in rows]
    else:
        prompts = asked(Cutter(tokenizer_of(job.parents["model"])), texts, options, job)
        looked = [(torch.tensor(x.tokens[: -x.answer]), slice(-1, None)) for x in prompts]
    model = linearize(model.float(), "softmax").eval()
    layers, items = model.attention_layers(), []
    softmax = [layer.method for layer in layers]
    for rule in tqdm(RULES, desc=job.name, unit="rule"):
        at = {"rule": rule}
        if rule != "all":
            for layer, method in zip(layers, softmax, strict=True):
                layer.method = Chosen(method.heads, rule, options.holds)
            yield Reading("tokens", "model", at, float(layers[0].method.holds.kept), None, 1)
        if options.read == "documents":
            found = [{"nats": _loss(model, row[None], first)} for row in rows]
            loss, error, n = mean_of(item["nats"] for item in found)
            yield Reading("perplexity", "documents", at, math.exp(loss), math.exp(loss) * error, n)
        else:
            found = answered(model, prompts, options.batch_size)
            yield Reading("exact_match", "pairs", at, *share_of(item["exact"] for item in found))
            yield Reading("nats", "pairs", at, *mean_of(item["nats"] for item in found))
        items += [{"item": i, **at, **item} for i, item in enumerate(found)]
    job.items(items)
    for layer, method in zip(layers, softmax, strict=True):
        layer.method = method
    of = "documents" if options.read == "documents" else "pairs"
    yield from _caught(model, looked[: options.looked], of, options)


def asked(cutter: Cutter, texts: Whole, options: Options, job: Job) -> list[Asked]:
    """The lists of `relinear.measure.kv_recall` and a question, with tokens between them."""
    prompts = []
    for i in range(options.prompts):
        seed = f"test {job.settings['seed']} {options.pairs} {i}"
        bare, x = (kv_recall.drawn(cutter, options.pairs, gap, seed) for gap in (0, options.gap))
        prompt, answer = x.prompt, x.answers[x.asked]
        if options.read == "between":
            end = next(at for at, (a, b) in enumerate(zip(bare.prompt, x.prompt, strict=False)) if a != b)
            own = i % len(texts)
            first = texts.ends[own] - texts.length(own)
            first += random.Random(i).randrange(texts.length(own) - options.gap)
            between = texts.tokens[first : first + options.gap].tolist()
            prompt = [*bare.prompt[:end], *between, *bare.prompt[end:]]
        prompts.append(Asked([*prompt, *answer], len(answer)))
    return prompts


def answered(model: Linearized, prompts: list[Asked], batch_size: int) -> list[dict]:
    """What a model says of each prompt's answer; those of one length are read together."""
    by_length: dict[tuple[int, int], list[int]] = {}
    for i, x in enumerate(prompts):
        by_length.setdefault((len(x.tokens), x.answer), []).append(i)
    found: dict[int, dict] = {}
    for (_, n), own in by_length.items():
        for batch in (own[at : at + batch_size] for at in range(0, len(own), batch_size)):
            rows = torch.tensor([prompts[i].tokens for i in batch])
            logs = model(rows, use_cache=False, logits_to_keep=n + 1).logits[:, :-1].float().log_softmax(-1)
            right = (logs.argmax(-1) == rows[:, -n:]).all(1).tolist()
            nats = -logs.gather(-1, rows[:, -n:, None]).mean((1, 2))
            found |= {
                i: {"exact": hit, "nats": x} for i, hit, x in zip(batch, right, nats.tolist(), strict=True)
            }
    return [found[i] for i in range(len(prompts))]


def _loss(model: Linearized, row: Tensor, first: int) -> float:
    """The mean loss of a text's tokens ``[1, T]`` from `first` on."""
    logs = model(row[:, :-1], use_cache=False).logits[:, first:].float().log_softmax(-1)
    return -logs.gather(-1, row[:, first + 1 :, None]).mean().item()


def _caught(
    model: Linearized, texts: list[tuple[Tensor, slice]], of: str, options: Options
) -> Iterator[Reading]:
    """`far` and `error` of each rule on the teacher's own inputs, at some queries of each text."""
    rules = RULES[1:]
    far, error = torch.zeros(2, len(rules), len(model.attention_layers()), len(texts), dtype=torch.float64)
    for i, (text, queries) in enumerate(texts):
        for layer, (method, inputs) in enumerate(layer_inputs(model, record(model, text[None]))):
            heads = method.heads
            weights = softmax_weights(inputs, heads)[0]
            values = inputs.v[0].float().repeat_interleave(heads.group, 1)
            teacher = torch.einsum("hti,ihd->thd", weights, values)[queries]
            beyond = ~near(len(text), options.holds, SINKS)
            lost = (weights * beyond).unflatten(0, (heads.groups, -1))[:, :, queries]
            for at, rule in enumerate(rules):
                holds = budget(rule, options.holds, heads)
                if rule == "merged":
                    y = merge(inputs, heads, holds)
                else:
                    seen = seen_by(rule, inputs, heads, holds)
                    y = attend(inputs, heads, seen)
                    far[at, layer, i] = ((lost * seen[0, :, None, queries]).sum() / lost.sum()).item()
                error[at, layer, i] = (
                    (y[0, queries] - teacher).square().sum() / teacher.square().sum()
                ).item()
    for name, values in (("far", far), ("error", error)):
        for rule, own in zip(rules, values, strict=True):
            if name == "far" and rule == "merged":
                yield Reading(name, of, {"rule": rule}, None, None, 0, "a mean is none of the tokens")
                continue
            yield Reading(name, of, {"rule": rule}, *mean_of(own.mean(0).tolist()))
            for layer, numbers in enumerate(own.tolist()):
                yield Reading(name, of, {"rule": rule, "layer": layer}, *mean_of(numbers))
