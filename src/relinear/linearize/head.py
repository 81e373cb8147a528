"""A task's head on an encoder, and both as one model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

FILE = "head.safetensors"
Pool = Literal["first", "mean", "pair"]


class Head(nn.Module):
    """A layer with tanh on the first token of a text (BERT's [CLS]), or on the mean of its tokens, then one
    output a class, or one number.

    On a `pair` of texts that are read apart it sees both means, their product and their difference (Long
    Range Arena's Retrieval).
    """

    def __init__(self, width: int, outputs: int, pool: Pool = "first", dropout: float = 0.0):
        super().__init__()
        self.pool, self.dropout = pool, nn.Dropout(dropout)
        self.dense, self.out = (
            nn.Linear(4 * width if pool == "pair" else width, width),
            nn.Linear(width, outputs),
        )
        for layer in (self.dense, self.out):  # as BERT's
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Outputs ``[B, outputs]`` for hidden states ``[B, T, width]``; `mask` is False at padding, which
        leaves no trace. Of pairs the first texts' rows come before the second ones'."""
        if self.pool == "first":
            pooled = hidden[:, 0]
        else:
            weight = mask.unsqueeze(-1).to(hidden)
            pooled = (hidden * weight).sum(1) / weight.sum(1)
        if self.pool == "pair":
            first, second = pooled.chunk(2)
            pooled = torch.cat([first, second, first * second, first - second], -1)
        pooled = pooled.to(self.dense.weight.dtype)
        return self.out(self.dropout(torch.tanh(self.dense(self.dropout(pooled)))))

    def save(self, folder: Path) -> None:
        """Write `head.safetensors` into a step's folder."""
        save_file(
            {n: p.detach().cpu().contiguous() for n, p in self.named_parameters()},
            folder / FILE,
            {"pool": json.dumps(self.pool)},
        )


def last_head(steps: Sequence[Path]) -> Head | None:
    """The head that the last of the steps with one left; None without one."""
    path = next((folder / FILE for folder in reversed(steps) if (folder / FILE).is_file()), None)
    if path is None:
        return None
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
        outputs, width = tensors["out.weight"].shape
        head = Head(width, outputs, json.loads(file.metadata()["pool"]))
    head.load_state_dict(tensors)
    return head.eval()


def apart(tokens: Tensor, mask: Tensor, types: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and mask ``[2B, T / 2]`` of the first and then of the second texts of pairs ``[B, T]``, none of
    which has more than half of T."""
    both = torch.cat([mask & (types == 0), mask & (types == 1)])
    # each token's among those of its text; of the other's tokens: beyond the end
    place = torch.where(both, both.cumsum(1) - 1, tokens.shape[1])
    moved = tokens.new_zeros(len(both), tokens.shape[1] + 1).scatter(1, place, tokens.repeat(2, 1))[
        :, : tokens.shape[1] // 2
    ]
    return moved, torch.arange(moved.shape[1], device=tokens.device) < both.sum(1, keepdim=True)


class Classifier(nn.Module):
    """An encoder with a head."""

    def __init__(self, encoder: PreTrainedModel, head: Head):
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, tokens: Tensor, mask: Tensor, types: Tensor) -> Tensor:
        """Outputs ``[B, outputs]`` of texts ``[B, T]``, with the mask and the types that `Padded.batch`
        gives."""
        if self.head.pool == "pair":
            tokens, mask = apart(tokens, mask, types)
            types = torch.zeros_like(tokens)
        return self.head(
            self.encoder(tokens, attention_mask=mask, token_type_ids=types).last_hidden_state, mask
        )
