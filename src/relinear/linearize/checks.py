"""Inputs that a linearized model refuses before it computes: prompts, masks and positions that would give wrong answers silently.

Looking at a mask's values waits for the device, so it is done once a prompt; a decode step only compares shapes and counts.
"""

import warnings

from torch import Tensor
from transformers import PreTrainedModel

from relinear.linearize.state import RecurrentCache

BEYOND = (
    "{n} positions are more than the {limit} the teacher was made for: beyond them {method}'s queries meet keys at rotary angles that nothing "
    "trained. What the papers saw there: LoLCATs fails at passkey retrieval beyond its training length (Lizard, Section 4.2); SUPRA stays at "
    "its level, its decay forgetting the rest, where its softmax teacher breaks down (SUPRA, Table 2: Qasper at 8k and 16k 17.1 and 17.2, "
    "Mistral 33.6 and 6.9)."
)


def check_padding(mask: Tensor) -> None:
    """Raise ValueError where a row of a prompt's mask ``[B, T]`` has no token, or padding after one."""
    real = mask.bool()
    empty, right = ~real.any(1), (real[:, :-1] & ~real[:, 1:]).any(1)
    if not bool((empty | right).any()):
        return
    if rows := empty.nonzero().flatten().tolist():
        raise ValueError(f"every row of a prompt needs at least one token; got only padding in rows {rows} of {len(real)}")
    raise ValueError(
        f"a recurrent state reads tokens in order, so prompts are padded on the left (tokenizer.padding_side = 'left'); "
        f"got padding after a token in rows {right.nonzero().flatten().tolist()} of {len(real)}"
    )


def check_prompt(prompt: Tensor, mask: Tensor | None, cache: RecurrentCache | None) -> None:
    """Raise ValueError for a prompt that `generate` cannot continue. prompt ``[B, T]`` ids or ``[B, T, hidden]`` embeddings."""
    batch, length = prompt.shape[:2]
    if length == 0:
        raise ValueError(f"the prompt is empty: got {list(prompt.shape)}; possible: at least one token, such as the tokenizer's bos_token")
    seen = 0 if cache is None else cache.get_seq_length()
    if mask is not None:
        possible = sorted({length, seen + length})
        if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] not in possible:
            raise ValueError(f"attention_mask must be {' or '.join(str([batch, n]) for n in possible)}; got {list(mask.shape)}")
        check_padding(mask)
    whole = mask is None or mask.shape[1] == length  # transformers' rule: the prompt is the whole sequence, or what its mask ends with
    if whole and seen >= length:
        raise ValueError(
            f"the cache holds {seen} tokens already; got a prompt of {length}, the whole sequence, which leaves nothing to run. "
            "Possible: a longer sequence, the new tokens alone with a mask over all of it, or a new cache"
        )


def check_piece(mask: Tensor, batch: int, length: int, cache: RecurrentCache | None) -> None:
    """Raise ValueError for a mask of another shape than ``[B, past + T]``, or with padding that a kept state would count as the past."""
    seen = 0 if cache is None else cache.get_seq_length()
    if mask.shape != (batch, seen + length):
        raise ValueError(f"attention_mask must be [batch, past + new tokens] = {[batch, seen + length]}; got {list(mask.shape)}")
    if cache is None or length == 1:
        return
    real = mask[:, max(seen - 1, 0) :].bool()
    if bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise ValueError(
            "got padding after a token where a state is kept; possible: left padding (tokenizer.padding_side = 'left'), or use_cache=False, "
            "since padding on the right changes no token before it"
        )


def check_positions(model: PreTrainedModel, columns: int, positions: Tensor) -> None:
    """Refuse tokens beyond the teacher's positions: ValueError where positions are a table, one warning for each model where they are rotary."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is None or columns <= limit:
        return
    if hasattr(model.base_model, "wpe"):
        last = int(positions.max()) + 1
        if last > limit:
            raise ValueError(f"the teacher learned {limit} positions, one by one, and has no more; got a sequence of {last} tokens")
    elif not getattr(model, "_warned_of_positions", False) and any(layer.method.unbounded_rotary for layer in model.attention_layers()):
        model._warned_of_positions = True
        warnings.warn(BEYOND.format(n=columns, limit=limit, method=model.config.relinear["method"]), stacklevel=2)
