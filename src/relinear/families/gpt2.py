"""GPT-2: learned positions, and one projection that makes q, k and v."""

from transformers.models.gpt2 import GPT2LMHeadModel

from relinear.families import _family
from relinear.families._layer import Layout, LinearizedAttention


class FusedLinearizedAttention(LinearizedAttention):
    """GPT-2's projections around a method."""

    PARTS = ("c_attn", "c_proj", "resid_dropout")

    def project(self, x):
        """q, k and v of the layer's input, each `[B, T, H, D]`."""
        return tuple(p.unflatten(-1, (-1, self.method.heads.dim)) for p in self.c_attn(x).chunk(3, -1))

    def output(self, y):
        """The heads' outputs, projected, with dropout."""
        return self.resid_dropout(self.c_proj(y.contiguous()))  # a view is taken of it


class Family(_family.Family):
    """GPT-2, whose queries, keys and values are one projection."""

    layouts = {GPT2LMHeadModel: Layout("h", "attn", FusedLinearizedAttention)}
