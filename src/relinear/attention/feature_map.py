"""Linear attention with a feature map that is not learned: those that Hedgehog's paper compares with (Zhang
et al. 2024, Sections 3 and 4.1).

`map`, of the rotated queries and keys x in R^d, s = q.k / sqrt(d) the teacher's score:
`elu` 1 + ELU(x) (Katharopoulos et al. 2020); `relu` max(x, 0); `exp` exp(t x), element by element, t the
`temperature`. `performer` exp(W x' - |x'|^2 / 2), x' = x / d^(1/4), with `features` fixed random rows in W,
orthogonal in blocks of d, drawn once by `seed` and the same in all layers and heads (Choromanski et al. 2021;
the paper states no number: 256). variant `paper`: rows of length d^(1/2), as Gaussian ones have on average;
`code`: of (d / features)^(1/2), as the same authors' later code leaves them, whose weights hardly depend on
s. `cosformer` [ReLU(x) cos, ReLU(x) sin] at the angle pi/2 i/M of position i (Qin et al. 2022); M is
`length`, by default the longest sequence of the teacher: beyond it weights turn negative, so longer pieces
are refused. `taylor` [1, x', x' (x) x' / 2^(1/2)], whose products are 1 + s + s^2 / 2. The paper prints [1,
x, x (x) x], without sqrt(d) and 1/2, whose products fall where those of softmax rise; its authors' later code
has both.
"""

import functools
import math
from itertools import repeat
from typing import Literal, Self

import torch
from jaxtyping import Float, Int
from pydantic import Field, model_validator
from torch import Tensor

from relinear.attention import _base
from relinear.attention._base import Attention, Inputs, causal, wide
from relinear_kernels.linear_attention import linear_attention
from relinear_kernels.linear_attention_reference import (
    LinearState,
    linear_attention_weights,
    linear_features,
    linear_state,
)
from relinear_kernels.linear_attention_reference import linear_attention as chunked_linear_attention

CHUNK = 128  # tokens whose Taylor weights are one matrix; the state has the tokens before them
LARGEST_STATE = 1 << 30  # bytes of one sequence in one layer
# options of one map alone
OWN = {"performer": ("features", "seed", "variant"), "cosformer": ("length",), "exp": ("temperature",)}


class Options(_base.Options):
    """The options of a run with a fixed feature map; `map` names it."""

    map: Literal["elu", "relu", "exp", "performer", "cosformer", "taylor"]
    temperature: float = Field(default=1.0, gt=0)
    variant: Literal["paper", "code"] = "paper"
    features: int = Field(default=256, ge=1)
    seed: int = Field(default=0, ge=0)
    length: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _of_its_map(self) -> Self:
        changed = {
            name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default
        }
        for name, own in OWN.items():
            if name != self.map and (given := [option for option in own if option in changed]):
                raise ValueError(f"{given[0]} is an option of map {name!r}; got map {self.map!r}")
        return self


@functools.cache
@torch.inference_mode(False)  # kept for trainings, too
def orthogonal_rows(
    features: int, dim: int, seed: int, scaled: bool, dtype=torch.float64, device="cpu"
) -> Float[Tensor, "M D"]:
    """Random rows, orthogonal in blocks of `dim`, of length dim^(1/2) where `scaled`, else of (dim /
    features)^(1/2).

    Kept on the device of the computation: a recorded step cannot fetch them from main memory.
    """
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(-(-features // dim), dim, dim, generator=generator, dtype=torch.float64)
    rows = torch.linalg.qr(gaussian).Q.flatten(0, 1)[:features] * (dim if scaled else dim / features) ** 0.5
    return rows.to(device, dtype)


class Method(Attention):
    """Attention with a fixed feature map, for all maps of `Options.map`."""

    Options = Options
    causal_only = False

    def __init__(self, heads, options):
        super().__init__(heads, options)
        d = heads.dim
        self.features = {"performer": options.features, "cosformer": 2 * d, "taylor": 1 + d + d * d}.get(
            options.map, d
        )
        self.length = options.length or heads.positions
        if options.map == "cosformer" and self.length is None:
            raise ValueError(
                "map 'cosformer' needs `length`, the longest sequence: the teacher does not say how long its"
                " own are"
            )
        if (size := 4 * heads.heads * self.features * (d + 1)) > LARGEST_STATE:
            raise ValueError(
                f"map {options.map!r} has {self.features} features of a head of dimension {d}: a state of"
                f" {size / 2**30:.1f} GiB a layer and sequence, where {LARGEST_STATE / 2**30:g} are possible."
                f" Choose a map of fewer features, such as elu with {d}"
            )

    @property
    def reads_order(self):
        """Whether the map is cosFormer's, which weighs keys by their position."""
        return self.options.map == "cosformer"

    def mapped(self, inputs: Inputs, seen: Tensor | None = None) -> tuple[Tensor, Tensor, str]:
        """q and k up to the activation of relinear_kernels that is named beside them, of each map but
        `taylor`.

        `seen` ``[B]``: how many real tokens came before the piece.
        """
        q, k = inputs.rotated()
        kind = self.options.map
        if kind in ("elu", "relu"):
            return q, k, kind
        if kind == "exp":
            return q * self.options.temperature, k * self.options.temperature, kind
        q, k = wide(q), wide(k)
        if kind == "performer":
            given = (
                self.options.features,
                self.heads.dim,
                self.options.seed,
                self.options.variant == "paper",
            )
            rows = orthogonal_rows(*given, q.dtype, q.device)
            q, k = (x * self.heads.scale**0.5 for x in (q, k))
            return *(x @ rows.T - x.square().sum(-1, keepdim=True) / 2 for x in (q, k)), "exp"
        angle = (math.pi / 2 / self.length * self._positions(inputs, seen).to(q.dtype))[..., None, None]
        return *(torch.cat([x.relu() * angle.cos(), x.relu() * angle.sin()], -1) for x in (q, k)), "none"

    def _positions(self, inputs: Inputs, seen: Tensor | None) -> Int[Tensor, "B T"]:
        """Each token's number among its sequence's real tokens, from 0. Raises ValueError for a piece that
        ends beyond `length`."""
        batch, length = inputs.q.shape[:2]
        # not read from a GPU, where each step would wait for it
        before = int(seen.max()) if seen is not None and not seen.is_cuda else 0
        if before + length > self.length:
            raise ValueError(
                f"map 'cosformer' has angles for {self.length} positions; got {before + length} tokens"
            )
        positions = torch.arange(length, device=inputs.q.device).expand(batch, length)
        if inputs.key_mask is not None:
            positions = (inputs.key_mask.cumsum(1) - 1).clamp(min=0)
        return positions if seen is None else positions + seen[:, None]

    def forward(self, inputs: Inputs, state=None):
        """Head outputs of a piece, and the state after it; cosFormer's state counts the tokens, too."""
        if self.options.map == "taylor":
            token = state is not None and inputs.q.shape[1] == 1 and not inputs.v.is_cuda
            return self._taylor_token(inputs, state) if token else self._taylor(inputs, state)
        counts = self.options.map == "cosformer"
        linear, seen = state if counts and state is not None else (state, None)
        q, k, feature = self.mapped(inputs, seen)
        # The kernels take as many features as a head has dimensions, or twice as many.
        op = chunked_linear_attention if q.is_cuda and feature != self.options.map else linear_attention
        y, linear = op(
            q,
            k,
            inputs.v,
            feature=feature,
            key_mask=inputs.key_mask,
            causal=self.heads.causal,
            initial_state=linear,
            return_state=True,
        )
        if not counts or not self.heads.causal:
            return y, linear
        batch, length = inputs.q.shape[:2]
        new = (
            torch.full((batch,), length, device=q.device)
            if inputs.key_mask is None
            else inputs.key_mask.sum(1)
        )
        return y, (linear, new if seen is None else seen + new)

    def init_state(self, batch, device=None, dtype=torch.float32):
        """The state before the first token; cosFormer's has the count of tokens, zero."""
        linear = linear_state(batch, self.heads.heads, self.features, self.heads.dim, device, dtype)
        return (
            (linear, torch.zeros(batch, dtype=torch.long, device=device))
            if self.options.map == "cosformer"
            else linear
        )

    def phi(self, inputs: Inputs):
        """Features of q and k, and whether they are logarithms: `attention_weights` is their product, each
        row divided by its sum."""
        if self.options.map == "taylor":
            return *(x.transpose(1, 2) for x in map(self._expanded, self._scaled(inputs)[:2])), False
        q, k, feature = self.mapped(inputs)
        return linear_features(q, k, feature=feature)

    def attention_weights(self, inputs: Inputs):
        """The T x T weights of the method, row = query."""
        if self.options.map != "taylor":
            q, k, feature = self.mapped(inputs)
            return linear_attention_weights(
                q, k, feature=feature, key_mask=inputs.key_mask, causal=self.heads.causal
            )
        q, k, _ = self._scaled(inputs)
        weights = self._seen(q, k, inputs.key_mask)
        return weights / self._filled(weights.sum(-1, keepdim=True))

    # --- the second-order Taylor series of exp, whose features are too many for the kernels ---

    def _scaled(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """q and k with s = q.k, and v, of every query head, head-major ``[B, H, T, D]``."""
        q, k = (wide(x) * self.heads.scale**0.5 for x in inputs.rotated())
        k, v = (x.repeat_interleave(self.heads.group, 2) for x in (k, wide(inputs.v)))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    @staticmethod
    def _expanded(x: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H T F"]:
        """The features of x: their products are 1 + s + s^2 / 2."""
        return torch.cat(
            [torch.ones_like(x[..., :1]), x, (x[..., :, None] * x[..., None, :]).flatten(-2) * 0.5**0.5], -1
        )

    def _seen(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> Float[Tensor, "B H T T"]:
        """1 + s + s^2 / 2, which is at least 1/2, where a query sees a key, else 0."""
        s = q @ k.transpose(-1, -2)
        seen = causal(q.shape[2], device=q.device)
        seen = seen if self.heads.causal else torch.ones_like(seen)
        seen = seen if key_mask is None else seen & key_mask[:, None, None]
        return torch.where(seen, 1 + s + s.square() / 2, 0.0)

    @staticmethod
    def _filled(total: Tensor) -> Tensor:
        """A row's sum; 1 where a query sees no key at all."""
        return torch.where(total > 0, total, 1.0)

    def _taylor_token(self, inputs: Inputs, state: LinearState):
        q, k = (x * self.heads.scale**0.5 for x in map(wide, inputs.rotated()))
        phi_q, phi_k = self._expanded(torch.cat([q, k], 2)).split([q.shape[2], k.shape[2]], 2)
        return linear_attention(
            phi_q, phi_k, inputs.v, feature="none", key_mask=inputs.key_mask, initial_state=state,
            return_state=True,
        )  # fmt: skip

    def _taylor(self, inputs: Inputs, state: LinearState | None):
        outputs = []
        scaled = self._scaled(inputs)
        if not self.heads.causal:
            q, k, v = scaled
            weights = self._seen(q, k, inputs.key_mask)
            return (weights @ v / self._filled(weights.sum(-1, keepdim=True))).transpose(1, 2).to(
                inputs.v.dtype
            ), None
        masks = repeat(None) if inputs.key_mask is None else inputs.key_mask.split(CHUNK, 1)
        for q, k, v, mask in zip(*(x.split(CHUNK, 2) for x in scaled), masks, strict=False):
            weights = self._seen(q, k, mask)
            top, total = weights @ v, weights.sum(-1)
            if state is not None:
                phi = self._expanded(q)
                top, total = top + phi @ state.kv.to(phi), total + (phi @ state.z.to(phi)[..., None])[..., 0]
            outputs.append(top / self._filled(total)[..., None])
            phi = self._expanded(k) if mask is None else self._expanded(k) * mask[:, None, :, None]
            added, added_z = phi.transpose(-1, -2) @ v, phi.sum(-2)
            kv, z = (
                (added, added_z)
                if state is None
                else (state.kv.to(added) + added, state.z.to(added) + added_z)
            )
            state = LinearState(kv, z, torch.full_like(z, -torch.inf))
        return torch.cat(outputs, 2).transpose(1, 2).to(inputs.v.dtype), state
