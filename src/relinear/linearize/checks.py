"""Inputs that a linearized model refuses before it computes: prompts, masks and positions that would give
wrong answers silently.

Looking at a mask's values waits for the device, so it is done once a call, and only where a mask is given.
"""

import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, PreTrainedModel

from relinear.linearize.releases import CACHE_NAMES
from relinear.linearize.state import RecurrentCache

BEYOND = (
    "{n} positions are more than the {limit} the teacher was made for: beyond them {method}'s queries meet"
    " keys at rotary angles that nothing trained. What the papers saw there: LoLCATs fails at passkey"
    " retrieval beyond its training length (Lizard, Section 4.2); SUPRA stays at its level, its decay"
    " forgetting the rest, where its softmax teacher breaks down (SUPRA, Table 2: Qasper at 8k and 16k 17.1"
    " and 17.2, Mistral 33.6 and 6.9)."
)


def check_padding(mask: Tensor) -> None:
    """Raise ValueError where a row of a prompt's mask ``[B, T]`` has no token, or ends with padding."""
    real = mask.bool()
    empty, right = ~real.any(1), ~real[:, -1]
    if not bool((empty | right).any()):
        return
    if rows := empty.nonzero().flatten().tolist():
        raise ValueError(
            f"every row of a prompt needs at least one token; got only padding in rows {rows} of {len(real)}"
        )
    raise ValueError(
        "the next token follows a prompt's last column, so prompts are padded on the left"
        " (tokenizer.padding_side = 'left'); got padding at the end of rows"
        f" {right.nonzero().flatten().tolist()} of {len(real)}"
    )


def check_prompt(prompt: Tensor, mask: Tensor | None, cache: RecurrentCache | None) -> None:
    """Raise ValueError for a prompt that `generate` cannot continue. prompt ``[B, T]`` ids or ``[B, T,
    hidden]`` embeddings."""
    batch, length = prompt.shape[:2]
    if length == 0:
        raise ValueError(
            f"the prompt is empty: got {list(prompt.shape)}; possible: at least one token, such as the"
            " tokenizer's bos_token"
        )
    seen = 0 if cache is None else cache.get_seq_length()
    if mask is not None:
        possible = sorted({length, seen + length})
        if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] not in possible:
            raise ValueError(
                f"attention_mask must be {' or '.join(str([batch, n]) for n in possible)}; got"
                f" {list(mask.shape)}"
            )
        if cache is not None and mask.shape[1] >= seen:
            check_read(mask, cache)
        check_padding(mask)
    # transformers' rule: the prompt is the whole sequence, or what its mask ends with
    whole = mask is None or mask.shape[1] == length
    if whole and seen >= length:
        raise ValueError(
            f"the cache holds {seen} tokens already; got a prompt of {length}, the whole sequence, which"
            " leaves nothing to run. Possible: a longer sequence, the new tokens alone with a mask over all"
            " of it, or a new cache"
        )


def take_cache(kwargs: dict[str, Any]) -> RecurrentCache | None:
    """Move the cache out of a call's arguments, by the name of any release. Raises TypeError for another
    kind, and for another name."""
    found = {
        name: value
        for name, value in kwargs.items()
        if value is not None and (name in CACHE_NAMES or isinstance(value, Cache))
    }
    for name in {*CACHE_NAMES, *found}:
        kwargs.pop(name, None)
    if not found:
        return None
    (name, cache), *more = found.items()
    if more or name not in CACHE_NAMES:  # a release that renames the argument must not leave its cache behind
        raise TypeError(
            f"a cache is given once, as {' or '.join(CACHE_NAMES)}; got one as {' and as '.join(found)}"
        )
    if not isinstance(cache, RecurrentCache):
        raise TypeError(f"a linearized model's {name} is a RecurrentCache; got {type(cache).__name__}")
    return cache


def check_outputs(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Raise ValueError where attention weights are asked for: no layer makes them."""
    asked = kwargs.get("output_attentions")
    if asked or (asked is None and model.config.output_attentions):
        raise ValueError(
            "got output_attentions=True: linearized layers make no T x T weights; possible: leave it out, or"
            " ask a layer's method for them, attention_layers()[i].method.attention_weights(inputs)"
        )


def check_generation(
    model: PreTrainedModel, settings: GenerationConfig | None, kwargs: dict[str, Any]
) -> None:
    """Raise ValueError for settings that `generate` would ignore: another implementation of the cache, and
    attention weights."""
    asked = kwargs.get("cache_implementation") or getattr(settings, "cache_implementation", None)
    # a hub folder names its teacher's
    if asked not in (None, "dynamic", model.generation_config.cache_implementation):
        raise ValueError(
            f"got cache_implementation={asked!r}: a linearized model has one kind of cache, its recurrent"
            " states, of fixed size; possible: leave cache_implementation out, or"
            " past_key_values=model.make_cache()"
        )
    check_outputs(
        model,
        {
            "output_attentions": (
                kwargs.get("output_attentions") or getattr(settings, "output_attentions", None)
            )
        },
    )


def _misread(real: Tensor, cache: RecurrentCache | None) -> Tensor:
    """In which rows a mask ``[B, past + T]`` shows another number of past tokens than the cache has read."""
    # another batch size has its own message
    if cache is None or cache.lengths is None or len(cache.lengths) != len(real):
        return torch.zeros(len(real), dtype=torch.bool, device=real.device)
    return real[:, : cache.get_seq_length()].sum(1) != cache.lengths


def check_read(mask: Tensor, cache: RecurrentCache | None) -> None:
    """Raise ValueError for a mask ``[B, past + T]`` that shows another number of past tokens than the cache
    has read."""
    if rows := _misread(mask.bool(), cache).nonzero().flatten().tolist():
        row = rows[0]
        raise ValueError(
            f"the cache has read {int(cache.lengths[row])} tokens of row {row}, but attention_mask shows"
            f" {int(mask[row, : cache.get_seq_length()].sum())}. A recurrent state cannot take a token back,"
            " such as the padding that is fed to a row which ends before others. Possible: a mask that hides"
            " padding when it is fed, or the whole texts with a new cache"
        )


def check_mask(
    mask: Tensor, batch: int, length: int, cache: RecurrentCache | None, told: bool
) -> tuple[bool, bool]:
    """Whether a row of a mask ``[B, past + T]`` has padding after its last token, and whether one has padding
    after a token in this piece.

    Raises ValueError for a mask of another shape, one that shows another number of past tokens than the cache
    has read, and, where no state is kept (`told`), for padding between tokens.
    """
    seen = 0 if cache is None else cache.get_seq_length()
    if mask.shape != (batch, seen + length):
        hint = (
            ""
            if cache is not None or mask.dim() != 2 or mask.shape[1] <= length
            else "; the columns before are of a past, but no cache came"
        )
        raise ValueError(
            f"attention_mask must be [batch, past + new tokens] = {[batch, seen + length]}; got"
            f" {list(mask.shape)}{hint}"
        )
    if _unreadable(mask):
        return False, False
    real = mask.bool()
    blocks = real[:, 0] + (~real[:, :-1] & real[:, 1:]).sum(1)  # of tokens without padding between them
    gap, right = blocks > 1, (blocks > 0) & ~real[:, -1]
    after = ((real.cumsum(1) > 0) & ~real)[:, seen:]
    # waits for the device
    wrong, gaps, ends, pauses = torch.stack(
        [_misread(real, cache).any(), gap.any(), right.any(), after.any()]
    ).tolist()
    if wrong:
        check_read(mask, cache)
    if gaps and not told:
        rows = gap.nonzero().flatten().tolist()
        raise ValueError(
            f"got padding between tokens in rows {rows} of {batch}; possible: padding on one side of a text,"
            " or a state (use_cache=True)"
        )
    return ends, pauses


def _unreadable(x: Tensor) -> bool:
    """Whether values cannot be looked at: nothing may wait for the device while a graph of its kernels is
    recorded or compiled."""
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def check_start(positions: Tensor, mask: Tensor | None) -> None:
    """Raise ValueError where a state is to be kept, none is given, and the first token is not the first of
    its sequence."""
    if _unreadable(positions):
        return
    first = (
        positions[:, 0] if mask is None else positions.where(mask[:, -positions.shape[1] :].bool(), 0)[:, 0]
    )
    if bool((first > 0).any()):
        raise ValueError(
            f"a state is to be kept and no cache came, but position_ids begin at {int(first.max())}: the"
            " tokens before are missing. Possible: the cache that has read them, as past_key_values; or the"
            " whole sequence"
        )


def check_positions(model: PreTrainedModel, columns: int, positions: Tensor) -> None:
    """Refuse tokens beyond the teacher's positions: ValueError where positions are a table, one warning for
    each model where they are rotary."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is None or columns <= limit:
        return
    if hasattr(model.base_model, "wpe"):
        last = int(positions.max()) + 1
        if last > limit:
            raise ValueError(
                f"the teacher learned {limit} positions, one by one, and has no more; got a sequence of"
                f" {last} tokens"
            )
    elif not getattr(model, "_warned_of_positions", False) and any(
        layer.method.unbounded_rotary for layer in model.attention_layers()
    ):
        model._warned_of_positions = True
        warnings.warn(
            BEYOND.format(n=columns, limit=limit, method=model.config.relinear["method"]), stacklevel=2
        )
