"""Masked tokens: an encoder learns to tell the tokens of a text that were hidden from it (BERT, section 3.1).

Of each sequence the same number of tokens is chosen anew at each visit: of ten chosen, eight are replaced by
the tokenizer's mask, one by any token, and one stays. What tells a token is a layer of the model's width with
GELU and LayerNorm, then the product with the table of embeddings; the layer begins at random and is not kept.
Weights are float32, products are computed in the scale's dtype by autocast.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from relinear.errors import UserError
from relinear.folders import tokenizer_of
from relinear.get.packed import Packed, micro_batches
from relinear.linearize.assemble import to_train
from relinear.machine.hardware import memory_bytes, moved, place
from relinear.plan.job import Job
from relinear.train.loop import train
from relinear.train.pretrain import WEIGHTS

JUDGED = 64  # sequences at most of the held-out part that the trained model is judged by


class Teller(nn.Module):
    """An encoder with the layer that tells tokens."""

    def __init__(self, encoder: PreTrainedModel):
        super().__init__()
        width = encoder.config.hidden_size
        self.encoder = encoder
        self.dense, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(encoder.config.vocab_size))
        nn.init.normal_(self.dense.weight, std=0.02)
        nn.init.zeros_(self.dense.bias)

    def forward(self, tokens: Int64[Tensor, "B T"], at: Int64[Tensor, "B M"]) -> Float[Tensor, "B M V"]:
        """Logits of the tokens at the places `at` of each sequence."""
        hidden = self.encoder(tokens).last_hidden_state
        chosen = hidden.gather(1, at[..., None].expand(-1, -1, hidden.shape[-1]))
        told = self.norm(F.gelu(self.dense(chosen)))
        return F.linear(told, self.encoder.get_input_embeddings().weight, self.bias)


def masked(
    tokens: Int64[Tensor, " T"], share: float, mask: int, vocabulary: int, seed: list[int]
) -> tuple[Int64[Tensor, " T"], Int64[Tensor, " M"]]:
    """A sequence with tokens hidden, and the places of those that are to be told, `round(share * T)` in rising
    order. The same `seed` hides the same."""
    rng = np.random.default_rng(seed)
    at = np.sort(rng.permutation(len(tokens))[: round(share * len(tokens))])
    fate, other = rng.random(len(at)), rng.integers(vocabulary, size=len(at))
    told = tokens.numpy()[at]
    shown = tokens.clone()
    shown[torch.from_numpy(at)] = torch.from_numpy(np.where(fate < 0.8, mask, np.where(fate < 0.9, other, told)))
    return shown, torch.from_numpy(at)


def work(job: Job) -> dict[str, Any]:
    """Write `model.safetensors`, all weights of the encoder.

    Raises UserError where the tokenizer has no mask, and where the text has tokens that the model has not.
    """
    device, dtype = place(job)
    torch.manual_seed(job.seed)
    model = Teller(to_train(job.parents["model"], job.links, torch.float32)).to(device)
    recipe, budget = job.settings["recipe"], job.settings["budget"]
    tokenizer = tokenizer_of(job.parents["model"])
    if tokenizer.mask_token_id is None:
        raise UserError(
            f"{job.name}: the tokenizer of {job.parents['model']} has no mask; possible: an encoder that was"
            " trained on masked tokens"
        )
    text = Packed(job.parents["text"], "train", budget["seq_len"])
    vocabulary = model.encoder.config.vocab_size
    if (largest := int(text.tokens.max())) >= vocabulary:
        raise UserError(
            f"{job.name}: the text has the token {largest}; the model knows 0 to {vocabulary - 1}"
        )
    batch, accumulate = budget["batch_size"], budget["accumulate"]
    steps = max(budget["epochs"] * len(text) // (batch * accumulate), 1)
    every_step = batch * accumulate * round(recipe["share"] * text.seq_len)  # tokens to tell
    parameters = [p for p in model.parameters() if p.requires_grad]

    def hidden(split: Packed, chosen, *seed: int) -> tuple[Tensor, Tensor, Tensor]:
        whole = split.batch(chosen)[0]
        pairs = [
            masked(tokens, recipe["share"], tokenizer.mask_token_id, vocabulary, [job.seed, *seed, i])
            for i, tokens in zip(chosen, whole, strict=True)
        ]
        shown, at = (torch.stack(x) for x in zip(*pairs, strict=True))
        return tuple(moved(x, device) for x in (shown, at, whole.gather(1, at)))

    def batches(step: int) -> Iterator[tuple[Tensor, ...]]:
        for chosen, _ in micro_batches(
            step, n=len(text), batch_size=batch, accumulate=accumulate, seed=job.seed
        ):
            yield hidden(text, chosen, step)

    def logits(shown: Tensor, at: Tensor) -> Tensor:
        with torch.autocast(shown.device.type, dtype, enabled=dtype != torch.float32):
            return model(shown, at)

    def loss(shown: Tensor, at: Tensor, told: Tensor) -> Iterator[tuple[str, Tensor]]:
        found = logits(shown, at).float().flatten(0, 1)
        yield "masked", F.cross_entropy(found, told.flatten(), reduction="sum") / every_step

    model.train()
    train(
        loss,
        [(parameters, recipe["lr"])],
        batches=batches,
        steps=steps,
        tokens_per_step=batch * accumulate * text.seq_len,
        recipe=recipe,
        checkpoint=job.work / "checkpoints",
        beside=(job.history,),
        checkpoint_seconds=job.checkpoint_seconds,
        log=job.log,
        resumed=job.resume,
        memory=lambda: memory_bytes(device),
        name=job.name,
    )
    job.tokens = steps * batch * accumulate * text.seq_len
    model.eval()
    held = Packed(job.parents["text"], "heldout", text.seq_len)
    right = total = 0
    with torch.no_grad():
        for i in range(min(len(held), JUDGED)):
            shown, at, told = hidden(held, [i])
            right += int((logits(shown, at).argmax(-1) == told).sum())
            total += told.numel()
    save_file(
        {n: p.detach().cpu().contiguous() for n, p in model.encoder.named_parameters()}, job.out / WEIGHTS
    )
    return {
        **job.losses(),
        "heldout_accuracy": right / max(total, 1),
        "steps": steps,
        "tokens": job.tokens,
        "trainable_params": sum(p.numel() for p in model.encoder.parameters() if p.requires_grad),
    }
