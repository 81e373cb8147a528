"""Masked tokens: an encoder learns to tell the tokens of a text that were hidden from it (BERT, section 3.1).

Of each sequence the same number of tokens is chosen anew at each visit, separators of documents last: of ten
chosen, eight are replaced by the tokenizer's mask, one by any token but padding, and one stays. What tells a
token is a layer of the model's width with GELU and LayerNorm, then the product with the table of embeddings;
the layer begins at random and is not kept. Weights are float32, products are computed in the scale's dtype by
autocast.
"""

from collections.abc import Iterator, Sequence
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
from relinear.get.packed import IGNORED, Packed, micro_batches
from relinear.linearize.assemble import to_train
from relinear.machine.hardware import moved, place
from relinear.plan.job import Job
from relinear.train.loop import of_job, train
from relinear.train.pretrain import WEIGHTS

JUDGED = 128  # sequences at most of the held-out part that a model is judged by


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


class Hidden:
    """A split of a text as sequences with tokens hidden.

    `share`: of a sequence's tokens, those to be told. `mask`: the token that stands for a hidden one.
    `vocabulary`: one in ten is replaced by any token below it, but by `padding`: an encoder that counts
    positions by tokens that are no padding, such as MPNet, would read all that follows at other positions.
    """

    def __init__(self, text: Packed, share: float, mask: int, vocabulary: int, padding: int | None):
        self.text, self.mask = text, mask
        self.others = np.setdiff1d(np.arange(vocabulary), [] if padding is None else [padding])
        self.count = round(share * text.seq_len)

    def sequence(
        self, i: int, seed: Sequence[int]
    ) -> tuple[Int64[Tensor, " T"], Int64[Tensor, " M"], Int64[Tensor, " M"]]:
        """What the model is shown of sequence `i`, the places that it has to tell, in rising order, and what
        stands there: IGNORED at a separator. The same `seed` hides the same."""
        tokens, labels = (x.numpy() for x in self.text.sequence(i))
        rng = np.random.default_rng([*seed, i])
        order = rng.permutation(len(tokens))
        at = np.sort(order[np.argsort(labels[order] == IGNORED, kind="stable")][: self.count])
        fate, other = rng.random(len(at)), rng.choice(self.others, size=len(at))
        fate = np.where(labels[at] == IGNORED, 1.0, fate)
        shown = tokens.copy()
        shown[at] = np.where(fate < 0.8, self.mask, np.where(fate < 0.9, other, tokens[at]))
        return torch.from_numpy(shown), torch.from_numpy(at), torch.from_numpy(labels[at])

    def batch(self, chosen: Sequence[int], seed: Sequence[int], device: str) -> tuple[Tensor, ...]:
        """The same of several sequences, on a device: ``[B, T]``, ``[B, M]`` and ``[B, M]``."""
        parts = zip(*(self.sequence(i, seed) for i in chosen), strict=True)
        return tuple(moved(torch.stack(x), device) for x in parts)


def work(job: Job) -> dict[str, Any]:
    """Write `model.safetensors`, all weights of the encoder.

    Raises UserError where the tokenizer has no mask, and where the text has tokens that the model has not.
    """
    device, dtype = place(job)
    torch.manual_seed(job.seed)
    encoder = to_train(job.parents["model"], job.links, torch.float32)
    mask = tokenizer_of(job.parents["model"]).mask_token_id
    if mask is None:
        raise UserError(
            f"{job.name}: the tokenizer of {job.parents['model']} has no mask; possible: an encoder that was"
            " trained on masked tokens"
        )
    model = Teller(encoder).to(device)
    metrics = fit(job, model, mask, device, dtype)
    save_file({n: p.detach().cpu().contiguous() for n, p in encoder.named_parameters()}, job.out / WEIGHTS)
    return metrics


def fit(job: Job, model: Teller, mask: int, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Train a model in place, in `dtype` by autocast. Returns the stage's metrics: beside those of every
    training the loss and the accuracy on tokens of held-out text before it, when the layer that tells them is
    random, and after."""
    recipe, budget = job.settings["recipe"], job.settings["budget"]
    vocabulary = model.encoder.config.vocab_size
    splits = [Packed(job.parents["text"], split, budget["seq_len"]) for split in ("train", "heldout")]
    if (largest := max(int(text.tokens.max()) for text in splits)) >= vocabulary:
        raise UserError(
            f"{job.name}: the text has the token {largest}; the model knows 0 to {vocabulary - 1}"
        )
    padding = model.encoder.get_input_embeddings().padding_idx
    text, held = (Hidden(split, recipe["share"], mask, vocabulary, padding) for split in splits)
    n, batch, accumulate = len(text.text), budget["batch_size"], budget["accumulate"]
    steps = max(budget["epochs"] * n // (batch * accumulate), 1)
    tokens_per_step = batch * accumulate * budget["seq_len"]
    parameters = [p for p in model.parameters() if p.requires_grad]

    def logits(shown: Tensor, at: Tensor) -> Tensor:
        with torch.autocast(shown.device.type, dtype, enabled=dtype != torch.float32):
            return model(shown, at).float().flatten(0, 1)

    @torch.no_grad()
    def judged(when: str) -> dict[str, float]:
        model.eval()
        loss = right = total = 0.0
        chosen = range(min(len(held.text), JUDGED))
        for first in range(0, len(chosen), batch):
            shown, at, told = held.batch(chosen[first : first + batch], [0], device)
            found, told = logits(shown, at), told.flatten()
            loss += F.cross_entropy(found, told, ignore_index=IGNORED, reduction="sum").item()
            right += (found.argmax(-1) == told).sum().item()
            total += (told != IGNORED).sum().item()
        model.train()
        if not total:
            raise UserError(f"{job.name}: the held-out text of {held.text.folder} is separators alone")
        return {f"heldout_loss_{when}": loss / total, f"heldout_accuracy_{when}": right / total}

    def batches(step: int) -> Iterator[tuple[Tensor, ...]]:
        for chosen, _ in micro_batches(step, n=n, batch_size=batch, accumulate=accumulate, seed=job.seed):
            yield text.batch(chosen, [job.seed, step], device)

    def loss(shown: Tensor, at: Tensor, told: Tensor) -> Iterator[tuple[str, Tensor]]:
        found = F.cross_entropy(logits(shown, at), told.flatten(), ignore_index=IGNORED, reduction="sum")
        yield "masked", found / (batch * accumulate * text.count)

    before = judged("before")
    train(
        loss,
        [(parameters, recipe["lr"])],
        batches=batches,
        steps=steps,
        tokens_per_step=tokens_per_step,
        **of_job(job, device),
    )
    job.tokens = steps * tokens_per_step
    return {
        **job.losses(),
        **before,
        **judged("after"),
        "steps": steps,
        "tokens": job.tokens,
        "trainable_params": sum(p.numel() for p in model.encoder.parameters() if p.requires_grad),
    }
