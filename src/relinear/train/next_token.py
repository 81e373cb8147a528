"""The loss of the next token, as every training of a language model has it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from relinear.errors import UserError
from relinear.get.packed import IGNORED, Packed, batch_indices, micro_batches
from relinear.machine.distributed import rank, size, whole
from relinear.machine.hardware import moved
from relinear_kernels.linear_cross_entropy import linear_cross_entropy
from relinear_kernels.token_cross_entropy import token_cross_entropy

# entries of configurations whose models change their logits
AFTER = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def batches_of(
    text: Packed,
    sequences: int,
    device: str,
    *,
    steps: int,
    batch_size: int,
    accumulate: int,
    seed: int,
    name: str,
) -> Callable[[int], Iterator[tuple[Tensor, Tensor, Tensor]]]:
    """A step's micro-batches of the first `sequences` of a text: tokens and labels ``[B, T]``, and how many
    labels the whole step has.

    Those of all processes count. Raises UserError where one of the `steps` has no label; `name` is the
    training's.
    """
    if not text.labelled[:sequences].all():
        for step in range(steps):
            whole = batch_indices(
                step, n=sequences, batch_size=batch_size * accumulate, seed=seed, rungs=text.rungs
            )
            if not text.labelled[whole].any():
                raise UserError(
                    f"{name}: step {step} of {steps} would have no label to learn: its sequences (the first"
                    f" is number {whole[0]} of {text.folder}) are prompts and separators alone;"
                    f" {np.count_nonzero(text.labelled == 0)} of {len(text)} sequences are. Possible: more"
                    f" sequences a step (batch_size x accumulate is {batch_size * accumulate}), a longer"
                    f" seq_len (it is {text.seq_len}), or data with shorter prompts"
                )

    def batches(step: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for chosen, whole in micro_batches(
            step,
            n=sequences,
            batch_size=batch_size,
            accumulate=accumulate,
            seed=seed,
            rank=rank(),
            size=size(),
            rungs=text.rungs,
        ):
            tokens, labels = (
                moved(torch.stack(x), device) for x in zip(*(text.sequence(i) for i in chosen), strict=True)
            )
            # The step's labels, not the micro-batch's: a token weighs the same in whichever micro-batch and
            # process it is.
            yield tokens, labels, moved(torch.tensor(float(text.labelled[whole].sum())), device)

    return batches


def summed_loss(model: nn.Module, tokens: Tensor, labels: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The summed loss of all labelled tokens but each sequence's first, computed in `dtype` by autocast where
    one is given."""
    # Labels are shifted instead of logits, whose copy would be the largest tensor of the step.
    following = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    mixed = dtype not in (None, torch.float32)
    with torch.autocast(tokens.device.type, dtype, enabled=mixed):
        head = plain_head(model) if tokens.is_cuda else None
        if head is not None:
            with _passed_by(head):
                hidden = model(tokens, use_cache=False).logits
            hidden = hidden.to(dtype if mixed else head.weight.dtype)
        else:
            logits = model(tokens, use_cache=False).logits
    if head is not None:
        return linear_cross_entropy(hidden.flatten(0, 1), head.weight, following.flatten())
    return token_cross_entropy(logits.flatten(0, 1), following.flatten()).sum()


def mixed_loss(
    model: nn.Module,
    teacher: nn.Module,
    tokens: Tensor,
    labels: Tensor,
    labelled: Tensor,
    *,
    weights: Tensor,
    share: float,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`share` of the KL divergence of the model's next tokens from the teacher's, and the rest of the loss of
    the next token: what this micro-batch adds to the step's.

    tokens, labels: ``[B, T]``; labelled: the labels of the whole step. weights: ``[T]``, what a position of a
    sequence adds to the divergence. The sequences' own positions count, wherever a document begins.
    """
    with torch.no_grad():
        wanted = teacher(tokens, use_cache=False).logits
    with torch.autocast(tokens.device.type, dtype, enabled=dtype not in (None, torch.float32)):
        logits = model(tokens, use_cache=False).logits
    following = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    total = 0.0
    for ours, theirs, label in zip(logits, wanted, following, strict=True):  # a sequence's logits at a time
        ours, theirs = ours.float().log_softmax(-1), theirs.float().log_softmax(-1)
        total = total + share * F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1) @ weights
        if share < 1:
            nll = F.nll_loss(ours, label, ignore_index=IGNORED, reduction="sum")
            total = total + (1 - share) * nll / labelled
    return total


def plain_head(model: nn.Module) -> nn.Linear | None:
    """The layer whose outputs are a model's logits; None where an adapter or a shard is put around it, or
    something follows it."""
    head, config = model.get_output_embeddings(), model.config
    if type(head) is not nn.Linear or head.bias is not None or isinstance(head.weight, DTensor):
        return None
    return None if any(getattr(config, name, None) is not None for name in AFTER) else head


@contextmanager
def _passed_by(head: nn.Linear) -> Iterator[None]:
    """A context in which the head returns its input."""
    head.forward = lambda x: x
    try:
        yield
    finally:
        del head.forward


def collected(model: nn.Module, leads: bool) -> dict[str, Tensor]:
    """All parameters in main memory, for the process that writes them. Only one at a time is whole on a
    GPU."""
    weights = {}
    for name, p in model.named_parameters():
        value = whole(p.detach())  # a call of all processes
        if leads:
            weights[name] = value.cpu().contiguous()
    return weights
