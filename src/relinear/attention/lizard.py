"""Lizard: gated linear attention without RoPE, plus alpha times sliding-window attention with meta memory
(Van Nguyen et al. 2025).

    y = y_gate + alpha y_swa,   gamma_t = sigmoid(W_g x_t + b_g)   (its Section 3.1; the sum is not convex)

What the paper leaves open, with our default first: `gates` one per head, one shared by all heads, or one per
channel of every head, which both signs of the feature map share (its Section 3.1 has W_g in R^{d x d}, its
experiments the scalar of Table 3); `gate_bias` the initial b_g (0 makes a memory of two tokens; None: no
bias, as the formula is written); `alpha` its initial value, one per head; `window_rope` whether the window
keeps the teacher's RoPE (the window is bounded, so it extrapolates either way); `linear_rope` whether y_gate
has it too, at angles that then grow with the sequence; `normalize` y_gate, as its definition does and its
matrix and recurrent forms do not: beside an alpha of 1 the unnormalised one can learn what the window lacks,
and transfers far better; feature `softmax_pm` (its Table 7) or `exp_pm` (its text); `state_per` whether maps
of keys, gates and states are one of each query head or, ours, of each key head. Meta tokens are the first
`meta` real positions, k_0 to k_{m-1} in its text. `learned_meta` reads "prepended special tokens" instead:
before the text stand `meta` keys and values of each key head that are learned, at the rotary angle of
position 0; `attention_weights` has the text's keys alone, and the learned ones take the rest of the window's
weight. A `window` of 0 is y_gate alone (Table 5).

`gate` is the form of gamma (Table 3), with b_g the same at the start for all that have one:
`sigmoid` sigmoid(W_g x + b_g); `mamba2` exp(-softplus(W_g x - b_g) exp(a)), a one per gate and 0 at the
start; `low_rank` sigmoid(W_2 W_1 x + b_g) of every channel, through `gate_rank` numbers, W_2 0 at the start;
`pool` sigmoid(pooled k_t + pool_bias), with nothing to learn and so, without the bias, with a memory of some
two tokens; `none` 1, nothing is forgotten (Table 5's row without the gated module, read as without the gate).
What "1D pooling over key vectors" goes over is not said: `pool` is the `mean` or the `max` over all channels
of a key, or, where `gates` are one per channel, over each channel and its two neighbours; or, over `time`,
the mean of the last four keys' means. A sigmoid is raised to the power 1 / `gate_temperature`: that of GLA
(Yang et al. 2023, Section 4.4) is low_rank with a temperature of 16.

Switched off in a trained model (`_parts`): the sum has no common normaliser, so without `linear` alpha y_swa
is left as it is, and without `window` y_gate. Without `gate` nothing is forgotten, gamma = 1, and unless
`normalize` y_gate then grows with the sequence. Without `meta` the window is softmax over its own positions
alone.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from relinear.attention import _base
from relinear.attention._base import Attention, Inputs, identity, project, wide
from relinear.attention._parts import Parts
from relinear_kernels.gated_linear_attention import gated_linear_attention
from relinear_kernels.gated_linear_attention_reference import gated_linear_attention_weights
from relinear_kernels.linear_attention import linear_attention
from relinear_kernels.linear_attention_reference import LinearState, linear_attention_weights, linear_state
from relinear_kernels.scaled_sum import scaled_sum
from relinear_kernels.sliding_window_attention import sliding_window_attention
from relinear_kernels.sliding_window_attention_reference import (
    WindowState,
    sliding_window_weights,
    window_state,
)

# The granularities that each form of the gate can have.
GATES = {
    "sigmoid": ("head", "shared", "channel"),
    "mamba2": ("head", "shared"),
    "low_rank": ("channel",),
    "pool": ("head", "channel"),
    "none": ("head",),
}
TEMPERED = ("sigmoid", "low_rank")
POOLED = 4  # keys that the pooling over time goes over, a token's own included


class Options(_base.StateOptions):
    """The options of a run with Lizard's attention."""

    window: int = Field(default=128, ge=0)
    meta: int = Field(default=4, ge=0)
    learned_meta: bool = False
    feature: Literal["softmax_pm", "exp_pm"] = "softmax_pm"
    gate: Literal["sigmoid", "mamba2", "low_rank", "pool", "none"] = "sigmoid"
    gates: Literal["head", "shared", "channel"] = "head"
    gate_rank: int = Field(default=16, ge=1)
    gate_bias: float | None = 4.0
    gate_temperature: float = Field(default=1.0, gt=0)
    pool: Literal["mean", "max", "time"] = "mean"
    pool_bias: float = 0.0
    alpha: float = 1.0
    window_rope: bool = True
    linear_rope: bool = False
    normalize: bool = False

    @model_validator(mode="after")
    def _consistent(self):
        if self.gates == "channel" and self.feature == "exp_pm":
            raise ValueError("gates 'channel' take bounded features: softmax_pm; got exp_pm")
        if self.feature == "exp_pm" and not self.normalize:
            raise ValueError(
                "feature 'exp_pm' has no bound, its sums are normalised; got normalize false, possible:"
                " normalize true, or softmax_pm"
            )
        if self.gates not in GATES[self.gate]:
            raise ValueError(
                f"gate {self.gate!r} is one per {' or '.join(GATES[self.gate])}; got gates {self.gates!r}"
            )
        if self.gate != "pool" and (self.pool, self.pool_bias) != ("mean", 0.0):
            got = f"pool {self.pool!r} and pool_bias {self.pool_bias:g} with gate {self.gate!r}"
            raise ValueError(f"pool and pool_bias are of the gate 'pool'; got {got}")
        if self.pool == "time" and self.gates != "head":
            raise ValueError(
                f"pool 'time' goes over the means of keys, one a head; got gates {self.gates!r}, possible:"
                " head"
            )
        if self.gate_temperature != 1.0 and self.gate not in TEMPERED:
            got = f"gate_temperature {self.gate_temperature:g} with gate {self.gate!r}"
            raise ValueError(
                f"gate_temperature is of the gates {' and '.join(TEMPERED)}; got {got}, possible: 1"
            )
        if self.window == 0 and self.meta:
            raise ValueError(
                f"meta tokens are seen beside a window, and a window of 0 is none; got meta {self.meta},"
                " possible: 0"
            )
        if self.learned_meta and not self.meta:
            raise ValueError("learned_meta is of meta tokens; got meta 0, possible: learned_meta false")
        return self


class PooledState(NamedTuple):
    """The state of a gated part whose gate pools over time: its sums, and the mean of each of its last three
    keys, with which of them are real."""

    sums: LinearState
    means: Float[Tensor, "B 3 Hkv"]
    real: Bool[Tensor, "B 3"]


class LizardState(NamedTuple):
    """The state of a Lizard layer: that of its gated part, and the keys and values of its window."""

    gate: LinearState | PooledState
    window: WindowState


class Method(Parts, Attention):
    """Lizard's attention: gated linear attention and a window with meta tokens."""

    Options = Options
    PARTS = ("linear", "window", "gate", "meta")

    @classmethod
    def parts(cls, options):
        """The parts that these options leave a layer, in the order of `PARTS`."""
        has = {"linear": True, "window": options.window, "gate": options.gate != "none", "meta": options.meta}
        return tuple(part for part in cls.PARTS if has[part])

    def __init__(self, heads, options):
        super().__init__(heads, options)
        h, d, self.states = heads.heads, heads.dim, options.states(heads)
        self.w_q, self.w_k = nn.Parameter(identity(h, d, d)), nn.Parameter(identity(self.states, d, d))
        gates, bias = (
            {"head": self.states, "shared": 1, "channel": self.states * d}[options.gates],
            options.gate_bias,
        )
        if options.gate in ("sigmoid", "mamba2", "low_rank"):
            self.narrow = (
                nn.Linear(heads.hidden, options.gate_rank, bias=False) if options.gate == "low_rank" else None
            )
            self.gate = nn.Linear(
                options.gate_rank if self.narrow else heads.hidden, gates, bias=bias is not None
            )
            nn.init.zeros_(self.gate.weight)
            if bias is not None:
                nn.init.constant_(self.gate.bias, -bias if options.gate == "mamba2" else bias)
        if options.gate == "mamba2":
            self.rate = nn.Parameter(torch.zeros(gates))
        if options.window:
            self.alpha = nn.Parameter(torch.full((h,), options.alpha))
        if options.learned_meta:  # keys that differ, so that each learns for itself; and no values
            tokens = (options.meta, heads.groups, d)
            self.meta_k = nn.Parameter(torch.eye(options.meta, d)[:, None].expand(tokens).clone())
            self.meta_v = nn.Parameter(torch.zeros(tokens))

    @property
    def unbounded_rotary(self) -> bool:
        """The window bounds its rotary embedding; meta tokens are seen from any distance, and so is what the
        gated part turns, if it does."""
        return self.options.linear_rope or (self.options.window_rope and self.options.meta > 0)

    def _log_gate(self, inputs: Inputs, means: tuple[Tensor, Tensor] | None = None):
        """log gamma of every state ``[B, T, M]``, or ``[B, T, M, D]`` of every channel; 0 at padding, which
        neither writes nor forgets. `means` are those of keys before and in the piece."""
        gate = self._forms(inputs, means)
        if inputs.key_mask is not None:
            gate = gate * inputs.key_mask[..., None]
        if "gate" in self.switched_off:
            gate = torch.zeros_like(gate)
        if self.options.gates == "channel":
            return gate.unflatten(-1, (self.states, self.heads.dim))
        return gate if gate.shape[2] == self.states else gate.expand(-1, -1, self.states)

    def _forms(self, inputs: Inputs, means: tuple[Tensor, Tensor] | None):
        """log gamma of every gate ``[B, T, gates]``, as `gate` says."""
        form = self.options.gate
        if form == "none":
            return inputs.x.new_zeros(*inputs.x.shape[:2], 1, dtype=wide(inputs.x).dtype)
        if form == "pool":
            pooled = (
                self._pooled_in_time(*(means or self._means(inputs, None)))
                if self.options.pool == "time"
                else self._pooled(wide(inputs.k))
            )
            pooled = pooled + self.options.pool_bias
            return (
                nn.functional.logsigmoid(pooled)
                .repeat_interleave(self.states // self.heads.groups, 2)
                .flatten(2)
            )
        x = wide(inputs.x)
        if self.narrow is not None:
            x = project(self.narrow, x)
        z = project(self.gate, x)
        if form == "mamba2":
            return -nn.functional.softplus(z) * wide(self.rate).to(z.dtype).exp()
        gate = nn.functional.logsigmoid(z)
        return gate if self.options.gate_temperature == 1 else gate / self.options.gate_temperature

    def _pooled(self, k):
        """Keys ``[B, T, G, D]``, pooled over all channels ``[B, T, G, 1]``, or ``[B, T, G, D]`` over
        three."""
        mean = self.options.pool == "mean"
        if self.options.gates == "head":
            return k.mean(-1, keepdim=True) if mean else k.amax(-1, keepdim=True)
        flat = k.flatten(0, 2)[:, None]
        near = (
            nn.functional.avg_pool1d(flat, 3, 1, 1, count_include_pad=False)
            if mean
            else nn.functional.max_pool1d(flat, 3, 1, 1)
        )
        return near.view_as(k)

    def _means(self, inputs: Inputs, state: PooledState | None) -> tuple[Tensor, Tensor]:
        """The mean of each key before and in a piece ``[B, 3 + T, G]``, 0 where it is not real, and which are
        ``[B, 3 + T]``."""
        means = wide(inputs.k).mean(-1)
        real = (
            torch.ones(means.shape[:2], dtype=torch.bool, device=means.device)
            if inputs.key_mask is None
            else inputs.key_mask
        )
        means = means.masked_fill(~real[..., None], 0.0)
        if state is None:
            return nn.functional.pad(means, (0, 0, POOLED - 1, 0)), nn.functional.pad(real, (POOLED - 1, 0))
        return torch.cat([state.means.to(means.dtype), means], 1), torch.cat([state.real, real], 1)

    def _pooled_in_time(self, means: Tensor, real: Tensor):
        """The mean over the last four keys of their means ``[B, T, G, 1]``; of those that there are, at the
        start."""
        count = real.unfold(1, POOLED, 1).sum(-1).clamp(min=1)
        return (means.unfold(1, POOLED, 1).sum(-1) / count[..., None])[..., None]

    def _gated(self, inputs: Inputs, means: tuple[Tensor, Tensor] | None = None) -> dict:
        gate = "log_gate" if self.options.gates == "channel" else "log_decay"
        return {
            "w_q": self.w_q,
            "w_k": self.w_k,
            "feature": self.options.feature,
            gate: self._log_gate(inputs, means),
            "normalize": self.options.normalize,
            "key_mask": inputs.key_mask,
        }

    def _window(self, inputs: Inputs) -> dict:
        return {
            "window": self.options.window,
            "meta": self._meta,
            "scale": self.heads.scale,
            "key_mask": inputs.key_mask,
        }

    @property
    def _far_only(self) -> bool:
        return "window" in self.switched_off or self.options.window == 0

    @property
    def _meta(self) -> int:
        return 0 if "meta" in self.switched_off else self.options.meta

    def _window_qk(self, inputs: Inputs):
        return inputs.rotated() if self.options.window_rope else (inputs.q, inputs.k)

    def _linear_qk(self, inputs: Inputs):
        return inputs.rotated() if self.options.linear_rope else (inputs.q, inputs.k)

    def forward(
        self, inputs: Inputs, state: LizardState | LinearState | PooledState | WindowState | None = None
    ):
        """Head outputs of a piece, and the states of the parts after it."""
        if "linear" in self.switched_off:
            near, state = self._near(inputs, state)
            return scaled_sum(torch.zeros_like(near), near, self.alpha), state
        if self._far_only:
            return self._far(inputs, state)
        gate_state, near_state = state or (None, None)
        gated, gate_state = self._far(inputs, gate_state)
        near, near_state = self._near(inputs, near_state)
        return scaled_sum(gated, near, self.alpha), LizardState(gate_state, near_state)

    def _far(self, inputs: Inputs, state: LinearState | PooledState | None):
        attend = gated_linear_attention if self.options.gates == "channel" else linear_attention
        before, means = state, None
        if self.options.pool == "time":
            before, means = state and state.sums, self._means(inputs, state)
        y, after = attend(
            *self._linear_qk(inputs),
            inputs.v,
            **self._gated(inputs, means),
            initial_state=before,
            return_state=True,
        )
        if means is None:
            return y, after
        means, real = means
        return y, PooledState(after, means[:, 1 - POOLED :], real[:, 1 - POOLED :])

    def _near(self, inputs: Inputs, state: WindowState | None):
        if self._learned and state is None:
            q, k, v, given = self._behind_meta(inputs)
            y, state = sliding_window_attention(q, k, v, **given, return_state=True)
            return y[:, self.options.meta :], state
        return sliding_window_attention(
            *self._window_qk(inputs), inputs.v, **self._window(inputs), initial_state=state, return_state=True
        )  # fmt: skip

    @property
    def _learned(self) -> bool:
        return self.options.learned_meta and "meta" not in self.switched_off

    def _behind_meta(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, dict]:
        """q, k and v of the window with the learned tokens before them, whose queries are zero, and the
        window's further arguments: the first real positions are the learned ones then."""
        q, k = self._window_qk(inputs)
        batch, meta = q.shape[0], self.options.meta
        before = lambda p, x: torch.cat([p.to(x.dtype).expand(batch, *p.shape), x], 1)  # noqa: E731
        given, mask = self._window(inputs), inputs.key_mask
        if mask is not None:
            given["key_mask"] = nn.functional.pad(mask, (meta, 0), value=True)
        return (
            nn.functional.pad(q, (0, 0, 0, 0, meta, 0)),
            before(self.meta_k, k),
            before(self.meta_v, inputs.v),
            given,
        )

    def init_state(self, batch, device=None, dtype=torch.float32):
        """The state of both parts before the first token; with one part off, the other's alone."""
        h, o = self.heads, self.options
        gate = linear_state(batch, self.states, 2 * h.dim, h.dim, device, dtype)
        if o.pool == "time":
            means = torch.zeros(batch, POOLED - 1, h.groups, device=device, dtype=gate.z.dtype)
            gate = PooledState(gate, means, torch.zeros(batch, POOLED - 1, dtype=torch.bool, device=device))
        if self._far_only:
            return gate
        window = window_state(
            batch, o.window - 1, h.groups, h.dim, meta=self._meta, device=device, dtype=dtype
        )
        if self._learned:  # seen from any distance, from the first token on, and in no window
            put = lambda p, old: torch.cat([p.to(old).expand(batch, *p.shape), old[:, o.meta :]], 1)  # noqa: E731
            window = window._replace(
                k=put(self.meta_k, window.k),
                v=put(self.meta_v, window.v),
                meta_age=torch.full_like(window.meta_age, o.window),
            )
        return window if "linear" in self.switched_off else LizardState(gate, window)

    def attention_weights(self, inputs: Inputs):
        """Both parts as one matrix; its rows sum to 1 + alpha, as the paper's sum does, or to less where meta
        tokens are learned."""
        weights = (
            gated_linear_attention_weights if self.options.gates == "channel" else linear_attention_weights
        )
        gated = weights(*self._linear_qk(inputs), **self._gated(inputs))
        if self._far_only:
            return gated
        near = wide(self.alpha)[:, None, None] * self._near_weights(inputs)
        return near if "linear" in self.switched_off else gated + near

    def _near_weights(self, inputs: Inputs) -> Float[Tensor, "B H T T"]:
        if not self._learned:
            return sliding_window_weights(*self._window_qk(inputs), **self._window(inputs))
        q, k, _, given = self._behind_meta(inputs)
        return sliding_window_weights(q, k, **given)[..., self.options.meta :, self.options.meta :]
