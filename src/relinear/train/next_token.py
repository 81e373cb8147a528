"""The loss of the next token, as every training of a language model has it."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relinear.get.packed import IGNORED, Packed, micro_batches
from relinear.machine.distributed import rank, size, whole
from relinear_kernels.token_cross_entropy import token_cross_entropy


def batches_of(
    text: Packed, sequences: int, device: str, *, batch_size: int, accumulate: int, seed: int
) -> Callable[[int], Iterator[tuple[Tensor, Tensor, Tensor]]]:
    """A step's micro-batches of the first `sequences` of a text: tokens and labels ``[B, T]``, and how many labels count."""

    def batches(step: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for chosen, micro in micro_batches(step, n=sequences, batch_size=batch_size, accumulate=accumulate, seed=seed, rank=rank(), size=size()):
            read = {i: text.sequence(i) for i in micro}
            tokens, labels = (torch.stack(x).to(device) for x in zip(*(read[i] for i in chosen), strict=True))
            # The mean over the micro-batch, of which other processes may have a part: labels are not spread evenly over sequences.
            labelled = sum(int((read[i][1][1:] != IGNORED).sum()) for i in micro)
            yield tokens, labels, torch.tensor(float(labelled), device=device)

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
