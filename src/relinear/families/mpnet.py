"""MPNet: BERT under other names, but for a bias that its relative positions add to the scores of all layers.

A map of q and k cannot express that bias, so a model is opened without it: teacher and student then see q.k
alone, as in BERT. Its configuration says so (`relative_bias: false`), so that no training brings the bias
back. It is another model than the one that was trained: `altered` in models.yaml, and the stage `restore`
teaches it what the whole one gives.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import MPNetModel
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from relinear.errors import UserError
from relinear.families import _family
from relinear.families._layer import EncoderAttention, Layout


def position_bias(
    self: MPNetEncoder,
    x: Float[Tensor, "B T C"],
    position_ids: Int64[Tensor, "B T"] | None = None,
    num_buckets: int = 32,
) -> Float[Tensor, "B H T T"] | None:
    """The bias of relative positions, as transformers computes it, but on the device of `x` throughout; None
    of a model that is opened here, which has none, and of a linearized one whose table is all zero, as
    earlier versions saved it without a word in its configuration.

    transformers 5.17 copies a table from main memory in each pass, which no CUDA graph can record.
    """
    without = not getattr(self.config, "relative_bias", True)
    if without or (hasattr(self.config, "relinear") and not self.relative_attention_bias.weight.any()):
        return None
    at = torch.arange(x.size(1), device=x.device)[None] if position_ids is None else position_ids
    buckets = self.relative_position_bucket(at[:, None, :] - at[:, :, None], num_buckets=num_buckets)
    return (
        self.relative_attention_bias(buckets).permute(0, 3, 1, 2).expand(x.size(0), -1, -1, -1).contiguous()
    )


MPNetEncoder.compute_position_bias = position_bias


class MPNetAttention(EncoderAttention):
    """MPNet's projections around a method."""

    PARTS = ("q", "k", "v", "o")

    def forward(self, hidden_states, attention_mask=None, position_bias=None, **kwargs):
        """As any encoder's. Raises UserError where the model has a bias that the method would leave out."""
        if position_bias is not None:
            raise UserError(
                "this MPNet adds a bias of relative positions to its scores, which a map of q and k cannot"
                " express; possible: a model of the stage `model`, or config.relative_bias = False before it"
                " is linearized, which leaves the bias out of both"
            )
        return super().forward(hidden_states, attention_mask=attention_mask)

    def project(self, x):
        """q, k and v of the layer's input, each `[B, T, H, D]`."""
        return tuple(p(x).unflatten(-1, (-1, self.method.heads.dim)) for p in (self.q, self.k, self.v))

    def output(self, y):
        """The heads' outputs, projected."""
        return self.o(y)


class Family(_family.Family):
    """MPNet: BERT under other names, without its bias of relative positions."""

    opening = "_encoders"
    layouts = {MPNetModel: Layout("encoder.layer", "attention.attn", MPNetAttention)}

    def positions(self, model):
        """Its longest sequence: the table of positions less its first rows, which no token has."""
        # the first rows of the table belong to no token
        return model.config.max_position_embeddings - model.embeddings.padding_idx - 1

    def open(self, folders, dtype):
        """Model and tokenizer, the bias of relative positions left out, and zero where others read the
        weights: linear attention has none."""
        model, tokenizer = super().open(folders, dtype)
        model.config.relative_bias = False
        with torch.no_grad():
            model.encoder.relative_attention_bias.weight.zero_()
        return model, tokenizer
