"""A language model's loss of each token: its definition, which is also its torch form."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100  # the label of a token without loss, as transformers marks it


def token_cross_entropy(logits: Float[Tensor, "N V"], labels: Int64[Tensor, " N"]) -> Float[Tensor, " N"]:
    """- log softmax(logits_n)[labels_n] in float32, 0 where the label is -100; float64 stays float64."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), labels, reduction="none", ignore_index=IGNORED)
