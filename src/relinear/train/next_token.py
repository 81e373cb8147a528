"""The loss of the next token, as every training of a language model has it."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relinear.errors import UserError
from relinear.get.packed import IGNORED, Packed, batch_indices, micro_batches
from relinear.machine.distributed import rank, size, whole
from relinear_kernels.token_cross_entropy import token_cross_entropy


def batches_of(
    text: Packed, sequences: int, device: str, *, steps: int, batch_size: int, accumulate: int, seed: int, name: str
) -> Callable[[int], Iterator[tuple[Tensor, Tensor, Tensor]]]:
    """A step's micro-batches of the first `sequences` of a text: tokens and labels ``[B, T]``, and how many labels the whole step has.

    Those of all processes count. Raises UserError where one of the `steps` has no label; `name` is the training's.
    """
    if not text.labelled[:sequences].all():
        for step in range(steps):
            whole = batch_indices(step, n=sequences, batch_size=batch_size * accumulate, seed=seed)
            if not text.labelled[whole].any():
                raise UserError(
                    f"{name}: step {step} of {steps} would have no label to learn: its sequences (the first is number {whole[0]} of "
                    f"{text.folder}) are prompts and separators alone; {np.count_nonzero(text.labelled == 0)} of {len(text)} sequences are. "
                    f"Possible: more sequences a step (batch_size x accumulate is {batch_size * accumulate}), a longer seq_len "
                    f"(it is {text.seq_len}), or data with shorter prompts"
                )

    def batches(step: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for chosen, whole in micro_batches(step, n=sequences, batch_size=batch_size, accumulate=accumulate, seed=seed, rank=rank(), size=size()):
            tokens, labels = (torch.stack(x).to(device) for x in zip(*(text.sequence(i) for i in chosen), strict=True))
            # The step's labels, not the micro-batch's: a token weighs the same in whichever micro-batch and process it is.
            yield tokens, labels, torch.tensor(float(text.labelled[whole].sum()), device=device)

    return batches


def summed_loss(model: nn.Module, tokens: Tensor, labels: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The summed loss of all labelled tokens but each sequence's first, computed in `dtype` by autocast where one is given."""
    with torch.autocast(tokens.device.type, dtype, enabled=dtype not in (None, torch.float32)):
        logits = model(tokens, use_cache=False).logits
    # Labels are shifted instead of logits, whose copy would be the largest tensor of the step.
    following = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return token_cross_entropy(logits.flatten(0, 1), following.flatten()).sum()


def collected(model: nn.Module, leads: bool) -> dict[str, Tensor]:
    """All parameters in main memory, for the process that writes them. Only one at a time is whole on a GPU."""
    weights = {}
    for name, p in model.named_parameters():
        value = whole(p.detach())  # a call of all processes
        if leads:
            weights[name] = value.cpu().contiguous()
    return weights
