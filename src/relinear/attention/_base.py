"""The parts that all attention methods share: inputs, contract, and the softmax attention that it is measured
against."""

from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from relinear.errors import UserError
from relinear.plan.strict import Strict, parse
from relinear_kernels import attention_cross_entropy_reference as reference
from relinear_kernels.attention_cross_entropy import attention_cross_entropy
from relinear_kernels.rotary import rotary

DISTILL_LOSSES = ("cross_entropy", "mse")


class Heads(NamedTuple):
    """The geometry of the teacher's attention layer that a method is built from."""

    hidden: int  # width of the layer's input x
    heads: int  # query heads H
    groups: int  # key/value heads Hkv; H / Hkv queries share one
    dim: int  # head dimension D
    scale: float  # the teacher's score scale, 1 / sqrt(D) in most
    window: int | None = None  # how many positions the teacher's own layer sees, its own included; None: all
    # the longest sequence that the teacher was made for; None where its config names none
    positions: int | None = None
    causal: bool = True  # a query sees the keys up to its own position; False (encoders): all of them

    @property
    def group(self) -> int:
        return self.heads // self.groups


class Inputs(NamedTuple):
    """One layer's attention inputs for a piece of the sequence, as the teacher's own projections give
    them."""

    x: Float[Tensor, "B T hidden"]  # the layer's (normalised) input; gates read it
    q: Float[Tensor, "B T H D"]  # before rotary embedding
    k: Float[Tensor, "B T Hkv D"]
    v: Float[Tensor, "B T Hkv D"]
    cos: Float[Tensor, "B T D"] | None = None  # None: the teacher has no rotary embedding
    sin: Float[Tensor, "B T D"] | None = None
    key_mask: Bool[Tensor, "B T"] | None = None  # False at padding

    def rotated(self) -> tuple[Tensor, Tensor]:
        """q and k with the teacher's rotary embedding."""
        return self.turned(self.q, self.k)

    def turned(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Other queries and keys, such as features, turned by the same embedding; unchanged where the teacher
        has none."""
        return (q, k) if self.cos is None else rotary(q, k, self.cos, self.sin)


def wide(x: Tensor) -> Tensor:
    """x in float32, or unchanged if it is float64. Feature maps, gates and normalisers have this precision in
    every model."""
    return x if x.dtype == torch.float64 else x.float()


def project(layer: nn.Module, x: Tensor) -> Tensor:
    """A linear layer's output in the precision of x. An adapter that was put around the layer (peft's) is
    called, not passed by."""
    if type(layer) is nn.Linear:
        return nn.functional.linear(
            x, layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype)
        )
    return layer(x.to(layer.weight.dtype)).to(x.dtype)


class Options(Strict):
    """A method's options."""

    @classmethod
    def parse(cls, method: str, given: dict[str, Any]) -> Self:
        """The checked options. Raises ConfigError, which is a ValueError, naming each wrong one and what is
        possible."""
        return parse(cls, given, f"options of {method!r}")


class StateOptions(Options):
    """Options of methods that have a map of keys, a gate and a state for each query head, as in the papers,
    or for each key head.

    With a map for each query head, one key has other features for each query of its group, so each query head
    needs a state. With a map for each key head, a group shares one state: a third of the bytes at SmolLM2's
    heads, a quarter at Llama-3-8B's.
    """

    state_per: Literal["query_head", "key_head"] = "query_head"

    def states(self, heads: Heads) -> int:
        """The number of linear states of a layer. It is also the number of its maps of keys."""
        return heads.heads if self.state_per == "query_head" else heads.groups


class WindowsOptions(Options):
    """Options of methods whose `window` is one number of positions for all layers, or a list with one for
    each."""

    def of_layer(self, layer: int, layers: int) -> Self:
        """The options of one layer of so many. Raises ValueError for windows that are not one for each."""
        if isinstance(self.window, int):
            return self
        if len(self.window) != layers:
            raise ValueError(
                f"window has a number for each layer; got {len(self.window)} for {layers} layers, possible: a"
                f" list of {layers}, or one number for all"
            )
        return type(self)(**{**vars(self), "window": self.window[layer]})


class Attention(nn.Module):
    """A replacement for softmax attention between the teacher's projections: q, k, v in, head outputs out.

    Laws (tests/test_laws.py): parallel == pieces == one token at a time; a prefix does not depend on what
    follows; padding leaves no trace; grouped heads, any head count; a state whose size is fixed from the
    first token on. Where `heads.causal` is False (tests/test_encoders.py): the order of keys does not matter;
    padding leaves no trace; no state.
    """

    Options = Options
    causal_only: ClassVar[bool] = True  # False: it looks at `heads.causal`, in its outputs and in its weights
    # whether the state has a place for each token, so that padding may stand between tokens in it
    grows: bool = False

    def __init__(self, heads: Heads, options: Options):
        super().__init__()
        self.heads, self.options = heads, options
        if not heads.causal and self._causal_only():
            raise UserError(
                f"{type(self).__module__.rpartition('.')[2]} ({options}) reads keys in order, which an"
                " encoder's have not; possible are methods whose files say causal_only = False, such as"
                " hedgehog and t2r, without a window"
            )

    @property
    def reads_order(self) -> bool:
        """Whether weights depend on the positions of tokens in a way that is not in the inputs."""
        return self.causal_only

    def _causal_only(self) -> bool:
        """Whether this layer is for causal attention only: `causal_only`, unless the options decide
        otherwise."""
        return self.causal_only

    @property
    def unbounded_rotary(self) -> bool:
        """Whether rotary angles between a query and its keys grow with the sequence: beyond the teacher's
        positions no training has seen them."""
        return True

    def forward(self, inputs: Inputs, state=None) -> tuple[Float[Tensor, "B T H D"], Any]:
        """Head outputs of a piece, and the state after it. `state` is the state after the tokens before the
        piece. A single token without gradients overwrites it: who goes on from it twice gives a copy."""
        raise NotImplementedError

    def step(self, inputs: Inputs, state) -> tuple[Float[Tensor, "B 1 H D"], Any]:
        """One token, recurrently: the same function on a piece of length 1, in constant time and memory. It
        overwrites `state`, as `forward` says."""
        if not self.heads.causal:
            raise UserError(
                "attention that is not causal has no step: an encoder reads a whole text at once; possible:"
                " forward on all of it"
            )
        if inputs.q.shape[1] != 1:
            raise ValueError(f"a step takes one token; got {inputs.q.shape[1]}")
        return self(inputs, state)

    def init_state(self, batch: int, device=None, dtype=torch.float32):
        """The state before the first token; `dtype` is that of keys and values, which windows keep as they
        are."""
        raise NotImplementedError

    def attention_weights(self, inputs: Inputs) -> Float[Tensor, "B H T T"]:
        """The T x T weights that the method implies, row = query, in quadratic memory. Heatmaps, KL and the
        cross-entropy transfer read them."""
        raise NotImplementedError

    def phi(self, inputs: Inputs) -> tuple[Float[Tensor, "B T H F"], Float[Tensor, "B T H F"], bool] | None:
        """Return `(phi_q, phi_k, is_log)` such that `attention_weights` is `phi_q @ phi_k.T`, each row
        divided by its sum.

        With `is_log` they are the logarithms of the features. The cross-entropy loss then needs no T x T
        matrix. Return None where the weights have no such factors.
        """
        return None

    def distill_loss(self, inputs: Inputs, loss: Literal["cross_entropy", "mse"]) -> Float[Tensor, ""]:
        """The method's distance from the teacher's softmax attention on the teacher's own inputs.

        `mse`: on the head outputs before the output projection (LoLCATs' code, Lizard's stage 1), mean over
        all elements of real tokens. `cross_entropy`: softmax weights against the method's weights (Hedgehog
        Eq. 4; LoLCATs Eq. 7), mean over heads and real tokens.
        """
        real = inputs.key_mask
        if loss == "mse":
            target = softmax_output(inputs, self.heads).float()
            error = (self(inputs)[0].float() - target).square().mean((-1, -2))
        elif loss == "cross_entropy":
            if (phi := self.phi(inputs)) is None:
                error = reference.cross_entropy(
                    softmax_weights(inputs, self.heads), self.attention_weights(inputs)
                )
            else:
                teacher = {
                    "scale": self.heads.scale,
                    "window": self.heads.window,
                    "key_mask": real,
                    "causal": self.heads.causal,
                }
                error = attention_cross_entropy(*inputs.rotated(), *phi, **teacher)
            error = error.mean(-1)
        else:
            raise ValueError(f"no transfer loss {loss!r}; have {', '.join(DISTILL_LOSSES)}")
        return error.mean() if real is None else (error * real).sum() / real.sum()


def causal(length: int, window: int | None = None, device=None) -> Bool[Tensor, "T T"]:
    """Which keys (columns) each query (row) may see: the last `window` positions up to its own, all of them
    if None."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return seen if window is None else seen.triu(1 - window)


def softmax_weights(inputs: Inputs, heads: Heads) -> Float[Tensor, "B H T T"]:
    """The teacher's attention weights, float32, row = query. Keys at padding have no weight; a row that sees
    no key is zero."""
    return reference.softmax_weights(
        *inputs.rotated(),
        scale=heads.scale,
        window=heads.window,
        key_mask=inputs.key_mask,
        causal=heads.causal,
    )


def softmax_output(inputs: Inputs, heads: Heads) -> Float[Tensor, "B T H D"]:
    """The teacher's head outputs before the output projection, by torch's fused attention."""
    q, k = inputs.rotated()
    q, k, v = (x.transpose(1, 2).to(inputs.v.dtype) for x in (q, k, inputs.v))
    length = q.shape[2]
    if not heads.causal:
        seen = None if inputs.key_mask is None else inputs.key_mask[:, None, None]
        return nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=heads.scale, enable_gqa=True
        ).transpose(1, 2)
    if inputs.key_mask is None and (heads.window is None or length <= heads.window):
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=heads.scale, enable_gqa=True
        )
        return out.transpose(1, 2)
    seen = causal(length, heads.window, q.device)[None, None]
    if inputs.key_mask is not None:
        seen = seen & inputs.key_mask[:, None, None]
    # a padding row sees itself, so that it has no NaN; nobody reads it
    seen = seen | torch.eye(length, dtype=torch.bool, device=q.device)
    return nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, scale=heads.scale, enable_gqa=True
    ).transpose(1, 2)


def identity(heads: int, dim: int, features: int) -> Float[Tensor, "H D F"]:
    """One identity matrix per head (Hedgehog Section 4.2: a feature map starts as its activation of x
    itself)."""
    return torch.eye(dim, features).expand(heads, dim, features).clone()


def linear_init(heads: int, dim: int, features: int) -> Float[Tensor, "H D F"]:
    """One matrix per head with torch's default initialisation of a linear layer."""
    bound = dim**-0.5
    return torch.empty(heads, dim, features).uniform_(-bound, bound)
