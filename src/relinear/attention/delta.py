"""A recurrent state beside a window: one recurrence, of which DeltaNet, Gated DeltaNet, KDA, Mamba-2, GLA,
Lightning and Liger are options.

    S <- diag(exp g_t) S,   u_t = w_t v_t - S^T (e_t k_t),   S <- S + k_t u_t^T,   o_t = d^-1/2 S^T q_t
    y = y_window + alpha * gate_t * norm(o_t)

y_window is softmax over the last `window` positions and the first `sinks` ones, as of method `window`; alpha,
one a head, is 0 at the start, so the layer starts as that window exactly (AHN, 2510.07318). A list of windows
has one for each layer. The state sees every token, those of the window included. There is one state for each
key head, with the map of its key, its decay and its write, or (`state_per`) for each query head.

`decay`; the first three start at g = -ln 2 / `half_life` (in tokens) for every token, with W = 0:
    head     g = -exp(a) softplus(W x + b), a state (Gated DeltaNet, 2412.06464)
    step     the same; dt = softplus(W x + b), 1 at the start, is also w, and D v_t is added to o_t (Mamba-2)
    channel  g = -exp(a) softplus(W W_1 x + b), a channel of the key, through d numbers (KDA, 2510.26692; GLA,
             whose log sigmoid(.) / 16 is -softplus(-.) / 16)
    key      g = log sigmoid(k_t) / 16, a channel, nothing to learn (Liger: its pooling of k is the identity)
    fixed    g = -2^(-8 i / n) of state i of n, the slopes of ALiBi (Lightning, as HALO has it)
    none     0 (DeltaNet, 2406.06484)
`erase`: `tied`, e = w = sigmoid(W x + b), 1/2 at the start; `none`, a sum without e, and w = 1.
`feature`, of q and k: `l2` SiLU of a map of each head, the identity at the start, of length 1; `rms` a norm
with a weight a channel; `softmax` over the head's channels; `none` as they are.
`conv`: k and v are first summed over their last four positions, a tap a channel, at the start the token's own
alone. `rotary`: the state's q and k have the teacher's angles, which grow with the distance; without it a
match by content does not fade with it. `norm`: o_t over its root mean square. `gate`, one a channel:
    silu       SiLU(W x + b), 1 at the start (Gated DeltaNet, GLA, Mamba-2)
    sigmoid    sigmoid(W x + b), 1/2 at the start (HALO)
    low_rank   the same through d numbers (KDA)
    none       1
`state_dtype`: what a state is held in from one piece, or token, to the next. Sums are taken in float32.

What differs from the named ones: alpha starts at 0, where Liger weighs state and window by a half each; there
is one alpha a head where their norms have a weight a channel; values have no SiLU, so that they start as the
teacher's; GLA's 16 is learned (a). Decays drawn as if from scratch have a median half-life of some 11
tokens, by which nothing that left the window is remembered.

Switched off in a trained model (`_parts`): without `linear` the window alone, without `window` the rest.
"""

import math
from typing import Annotated, Literal, NamedTuple

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from relinear.attention import _base
from relinear.attention._base import Attention, Inputs, identity, project, softmax_weights, wide
from relinear.attention._parts import Parts
from relinear.errors import UserError
from relinear_kernels.gated_delta import gated_delta
from relinear_kernels.gated_delta_reference import DeltaState, delta_state, gated_delta_weights
from relinear_kernels.scaled_sum import scaled_sum
from relinear_kernels.sliding_window_attention import sliding_window_attention
from relinear_kernels.sliding_window_attention_reference import (
    WindowState,
    sliding_window_weights,
    window_state,
)

TAPS = 4  # positions that a convolution sums, the token's own included
SMOOTH = 16  # what Liger divides its log gate by
HALF_LIFE = 1024.0
HALF_LIVES = (16.0, 16384.0)  # the shortest and the longest that a calibration gives
WRITES = (0.3, 0.7)  # that it gives to the least and the most certain state
PACED = ("head", "step", "channel")  # decays that start at a half-life
EPSILON = 1e-6  # of norms
ONE = 1.2784645427610738  # SiLU of it is 1
Window = Annotated[int, Field(ge=1)]


class Options(_base.WindowsOptions, _base.StateOptions):
    """The options of a run with a recurrent state beside a window."""

    window: Window | tuple[Window, ...] = 128
    sinks: int = Field(default=4, ge=0)
    state_per: Literal["query_head", "key_head"] = "key_head"
    decay: Literal["head", "step", "channel", "key", "fixed", "none"] = "head"
    half_life: float = Field(default=HALF_LIFE, gt=0)
    erase: Literal["tied", "none"] = "tied"
    feature: Literal["l2", "rms", "softmax", "none"] = "l2"
    conv: bool = True
    rotary: bool = False
    norm: bool = True
    gate: Literal["silu", "sigmoid", "low_rank", "none"] = "silu"
    state_dtype: Literal["float32", "bfloat16"] = "float32"

    @model_validator(mode="after")
    def _consistent(self):
        if self.decay not in PACED and self.half_life != HALF_LIFE:
            raise ValueError(
                f"half_life is of the decays {', '.join(PACED)}; got half_life {self.half_life:g} with decay"
                f" {self.decay!r}"
            )
        if self.decay == "step" and self.erase == "tied":
            raise ValueError(
                "decay 'step' writes by its step, and erase 'tied' by a number of its own; possible: erase"
                " none, or decay head"
            )
        if self.erase == "tied" and self.feature != "l2":
            raise ValueError(
                f"an erase keeps a state bounded where keys have length 1; got feature {self.feature!r} with"
                " erase 'tied', possible: l2, or erase none"
            )
        return self


class Convolved(NamedTuple):
    """The last keys and values before a piece, as they were before the convolution; zero where there is no
    token."""

    k: Float[Tensor, "B 3 Hkv D"]
    v: Float[Tensor, "B 3 Hkv D"]


class FarState(NamedTuple):
    """The state of the recurrent part."""

    sums: DeltaState
    before: Convolved  # of no positions without a convolution


class State(NamedTuple):
    """The state of a layer: that of its recurrent part, and the keys and values of its window."""

    far: FarState
    near: WindowState


def unsoftplus(y: float) -> float:
    """The number whose softplus is y."""
    return y + math.log(-math.expm1(-y))


def linear(hidden: int, out: int, start: float) -> nn.Linear:
    """A linear layer that is `start` for every input at first."""
    layer = nn.Linear(hidden, out)
    nn.init.zeros_(layer.weight)
    nn.init.constant_(layer.bias, start)
    return layer


class Narrow(nn.Module):
    """A linear layer through `rank` numbers, `start` for every input at first."""

    def __init__(self, hidden: int, rank: int, out: int, start: float):
        super().__init__()
        self.narrow, self.wide = nn.Linear(hidden, rank, bias=False), linear(rank, out, start)


def through(layer: nn.Module, x: Tensor) -> Tensor:
    """The output of `linear` or `Narrow`, in the precision of x."""
    return project(layer.wide, project(layer.narrow, x)) if isinstance(layer, Narrow) else project(layer, x)


def of_each_head(x: Tensor, w: Tensor) -> Tensor:
    """x W ``[B, T, H, F]`` of each head of x ``[B, T, H, D]``, with W ``[H, D, F]``."""
    y = torch.bmm(x.flatten(0, 1).transpose(0, 1), w.to(x.dtype))
    return y.transpose(0, 1).unflatten(0, x.shape[:2])


def root_mean_square(x: Tensor) -> Tensor:
    """That of each row ``[.., D]``, as ``[.., 1]``."""
    return (x.square().mean(-1, keepdim=True) + EPSILON).sqrt()


class Method(Parts, Attention):
    """A recurrent state, added to softmax attention within a window."""

    Options = Options
    PARTS = ("linear", "window")
    TRANSFERS = ("mse",)  # weights have either sign, so there is no cross-entropy with softmax's

    @classmethod
    def parts(cls, options):
        """Both parts, which every layer has."""
        return cls.PARTS

    def __init__(self, heads, options):
        super().__init__(heads, options)
        h, d, n = heads.heads, heads.dim, options.states(heads)
        self.states, pace = n, math.log(2) / options.half_life
        if options.feature == "l2":
            self.w_q, self.w_k = nn.Parameter(identity(h, d, d)), nn.Parameter(identity(n, d, d))
        elif options.feature == "rms":
            self.w_q, self.w_k = nn.Parameter(torch.ones(h, d)), nn.Parameter(torch.ones(n, d))
        if options.conv:
            taps = torch.zeros(2, TAPS, heads.groups, d)
            taps[:, -1] = 1.0
            self.taps = nn.Parameter(taps)  # of keys and of values, the oldest position first
        if options.decay in PACED:
            first = unsoftplus(1.0 if options.decay == "step" else pace)
            self.decay = (
                Narrow(heads.hidden, d, n * d, first)
                if options.decay == "channel"
                else linear(heads.hidden, n, first)
            )
            self.rate = nn.Parameter(torch.full((n,), math.log(pace) if options.decay == "step" else 0.0))
        if options.decay == "step":
            self.skip = nn.Parameter(torch.ones(n))
        if options.erase == "tied":
            self.beta = linear(heads.hidden, n, 0.0)
        if options.gate == "low_rank":
            self.gate = Narrow(heads.hidden, d, h * d, 0.0)
        elif options.gate != "none":
            self.gate = linear(heads.hidden, h * d, ONE if options.gate == "silu" else 0.0)
        self.alpha = nn.Parameter(torch.zeros(h))

    @property
    def unbounded_rotary(self) -> bool:
        """Sinks are seen from any distance, and so is what the state turns, if it does."""
        return self.options.rotary or self.options.sinks > 0

    @property
    def held(self) -> torch.dtype | None:
        """What a state is held in where that is less than its sums have."""
        return torch.bfloat16 if self.options.state_dtype == "bfloat16" else None

    def _convolved(self, inputs: Inputs, before: Convolved | None) -> tuple[Tensor, Tensor, Convolved]:
        """Keys and values ``[B, T, G, D]`` after the convolution, and what the next piece needs of these."""
        k, v = wide(inputs.k), wide(inputs.v)
        if not self.options.conv:
            return k, v, Convolved(*(x.new_zeros(k[:, :0].shape) for x in (inputs.k, inputs.v)))
        if inputs.key_mask is not None:
            k, v = (x * inputs.key_mask[..., None, None] for x in (k, v))
        length, found, kept = k.shape[1], [], []
        for i, x in enumerate((k, v)):
            x = (
                nn.functional.pad(x, (0, 0, 0, 0, TAPS - 1, 0))
                if before is None
                else torch.cat([before[i].to(x.dtype), x], 1)
            )
            taps = self.taps[i].to(x.dtype)
            found.append(
                (taps * x).sum(1, keepdim=True)  # of a token, whose time is the number of its operators
                if length == 1
                else sum(taps[j] * x[:, j : j + length] for j in range(TAPS))
            )
            kept.append(x[:, length:].to(inputs.k.dtype, copy=True))  # a view would keep the whole piece
        return *found, Convolved(*kept)

    def _features(self, inputs: Inputs, k: Tensor) -> tuple[Tensor, Tensor]:
        """q ``[B, T, H, D]`` and k ``[B, T, M, D]`` as the state reads and writes them."""
        q = wide(inputs.q)
        if self.states != self.heads.groups:
            k = k.repeat_interleave(self.states // self.heads.groups, 2)
        if self.options.feature == "l2":
            q, k = (
                nn.functional.normalize(nn.functional.silu(of_each_head(x, w)), dim=-1, eps=EPSILON)
                for x, w in ((q, self.w_q), (k, self.w_k))
            )
        elif self.options.feature == "rms":
            q, k = (x / root_mean_square(x) * w.to(x.dtype) for x, w in ((q, self.w_q), (k, self.w_k)))
        elif self.options.feature == "softmax":
            q, k = q.softmax(-1), k.softmax(-1)
        return inputs.turned(q, k) if self.options.rotary else (q, k)

    def _paced(self, inputs: Inputs, x: Tensor) -> dict:
        """`log_decay`, `erase` and `write` of the recurrence."""
        form, found, n = self.options.decay, {}, self.states
        if form in PACED:
            step = nn.functional.softplus(through(self.decay, x))
            rate = self.rate.to(x.dtype).exp()
            if form == "channel":
                step, rate = step.unflatten(-1, (n, self.heads.dim)), rate[:, None]
            found["log_decay"] = -rate * step
            if form == "step":
                found["write"] = step
        elif form == "key":
            gate = nn.functional.logsigmoid(wide(inputs.k)) / SMOOTH
            found["log_decay"] = gate.repeat_interleave(n // self.heads.groups, 2)
        elif form == "fixed":
            found["log_decay"] = -torch.exp2(-8 * torch.arange(1, n + 1, device=x.device) / n).to(x.dtype)
        if self.options.erase == "tied":
            found["erase"] = found["write"] = through(self.beta, x).sigmoid()
        return found

    def _recurrent(self, inputs: Inputs, before: Convolved | None = None) -> tuple[dict, Convolved]:
        """The arguments of the recurrence, and what the convolution needs after the piece."""
        k, v, after = self._convolved(inputs, before)
        q, k = self._features(inputs, k)
        paced = self._paced(inputs, wide(inputs.x))
        return {"q": q, "k": k, "v": v, **paced, "key_mask": inputs.key_mask}, after

    def _out(self, o: Tensor, inputs: Inputs, v: Tensor) -> Tensor:
        """What is added to the window: head outputs ``[B, T, H, D]`` of the state, normed and gated."""
        if self.options.decay == "step":
            skip = self.skip.to(o.dtype).repeat_interleave(self.heads.heads // self.states)
            o = o + skip[:, None] * v.repeat_interleave(self.heads.group, 2)
        if self.options.norm:
            o = o / root_mean_square(o)
        return o if self.options.gate == "none" else o * self._gate(inputs)

    def _gate(self, inputs: Inputs) -> Float[Tensor, "B T H D"]:
        z = through(self.gate, wide(inputs.x))
        z = nn.functional.silu(z) if self.options.gate == "silu" else z.sigmoid()
        return z.unflatten(-1, (self.heads.heads, self.heads.dim))

    def _far(self, inputs: Inputs, state: FarState | None = None, attend=gated_delta):
        sums, before = state or (None, None)
        given, before = self._recurrent(inputs, before)
        dtype = inputs.v.dtype  # products have the model's; sums, decays and norms float32 or better
        rounded = {name: given[name].to(dtype) for name in "qkv"}
        o, sums = attend(**given | rounded, initial_state=sums, return_state=True)
        if self.held is not None:
            sums = DeltaState(sums.s.to(self.held))
        return self._out(wide(o), inputs, given["v"]).to(dtype), FarState(sums, before)

    def _window(self, inputs: Inputs) -> dict:
        return {
            "window": self.options.window,
            "meta": self.options.sinks,
            "scale": self.heads.scale,
            "key_mask": inputs.key_mask,
        }

    def _near(self, inputs: Inputs, state: WindowState | None):
        return sliding_window_attention(
            *inputs.rotated(), inputs.v, **self._window(inputs), initial_state=state, return_state=True
        )

    def forward(self, inputs: Inputs, state: State | FarState | WindowState | None = None):
        """Head outputs of a piece, and the states of the parts after it."""
        if "linear" in self.switched_off:
            return self._near(inputs, state)
        if "window" in self.switched_off:
            far, state = self._far(inputs, state)
            return scaled_sum(torch.zeros_like(far), far, self.alpha), state
        far_state, near_state = state or (None, None)
        near, near_state = self._near(inputs, near_state)
        far, far_state = self._far(inputs, far_state)
        return scaled_sum(near, far, self.alpha), State(far_state, near_state)

    def init_state(self, batch, device=None, dtype=torch.float32):
        """The states of both parts before the first token; with one part off, the other's alone."""
        h = self.heads
        near = window_state(
            batch,
            self.options.window - 1,
            h.groups,
            h.dim,
            meta=self.options.sinks,
            device=device,
            dtype=dtype,
        )
        if "linear" in self.switched_off:
            return near
        places = TAPS - 1 if self.options.conv else 0
        zeros = lambda: torch.zeros(batch, places, h.groups, h.dim, device=device, dtype=dtype)  # noqa: E731
        held = self.held or torch.promote_types(dtype, torch.float32)
        before = Convolved(zeros(), zeros())
        sums = delta_state(batch, self.states, h.dim, h.dim, device, held)
        far = FarState(sums, before)
        return far if "window" in self.switched_off else State(far, near)

    def attention_weights(self, inputs: Inputs):
        """Both parts as one matrix; entries have either sign, and rows sum to no fixed number.

        The norm of an output is taken as it is. Where channels of a head differ, which a gate and the taps of
        values make them do, an entry is the mean over channels.
        """
        if "linear" in self.switched_off:
            return sliding_window_weights(*inputs.rotated(), **self._window(inputs))
        given, _ = self._recurrent(inputs)
        v = given.pop("v")
        far = gated_delta_weights(**given)
        if self.options.decay == "step":
            skip = self.skip.to(far.dtype).repeat_interleave(self.heads.heads // self.states)
            far = far + torch.diag_embed(skip[:, None].expand(-1, far.shape[-1]))
        factor = self.alpha.to(far.dtype).expand(*v.shape[:2], -1)  # [B, T, H]
        if self.options.norm:
            values = v.repeat_interleave(self.heads.group, 2)
            factor = factor / root_mean_square(torch.einsum("bhti,bihd->bthd", far, values))[..., 0]
        if self.options.gate != "none":
            factor = factor * self._gate(inputs).mean(-1)
        if self.options.conv:  # onto values before the convolution
            taps = self.taps[1].to(far.dtype).mean(-1).repeat_interleave(self.heads.group, -1)  # [4, H]
            far = sum(
                tap[:, None, None] * nn.functional.pad(far, (0, back))[..., back:]
                for tap, back in zip(taps, reversed(range(TAPS)), strict=True)
            )
            if inputs.key_mask is not None:
                far = far * inputs.key_mask[:, None, None]
        far = far * factor.transpose(1, 2)[..., None]
        if "window" in self.switched_off:
            return far
        return far + sliding_window_weights(*inputs.rotated(), **self._window(inputs))

    @torch.no_grad()
    def calibrate(self, inputs: Inputs) -> dict[str, list[float]]:
        """Set the biases of decay and write by softmax attention beyond the window, before anything is
        trained; the weights in front of them stay 0.

        A state's half-life becomes the mean distance, in tokens, that its query heads look at there, within
        `HALF_LIVES`. Its write, of `WRITES`, falls with the entropy of their weights there, scaled from the
        least to the largest of the layer's states. Both are means over queries by their weight beyond the
        window. Returns `half_lives` and `writes`, where these are learned, and `far`, the share of weight
        beyond the window of queries with a key there, a number for each state. Raises UserError where no key
        lies beyond.

        After Taylor-Calibrate (2606.16429), which has the whole attention in place of what the window drops.
        """
        window, sinks, sums = self.options.window, self.options.sinks, 0.0
        for i in range(len(inputs.x)):  # a row at a time: T x T weights of all heads
            row = Inputs(*(None if x is None else x[min(i, len(x) - 1)][None] for x in inputs))
            weights = softmax_weights(row, self.heads)[0]
            place = torch.arange(weights.shape[-1], device=weights.device)
            back = place[:, None] - place
            first = 0 if row.key_mask is None else row.key_mask[0].int().argmax()
            seen = (back >= window) & (place >= first + sinks)
            far = weights * seen
            mass = far.sum(-1)
            spread = torch.special.entr(far).sum(-1) + torch.special.xlogy(mass, mass)  # mass x entropy
            able = (seen.any(-1) & (mass > 0)).sum(-1)
            found = torch.stack([(far * back).sum((-1, -2)), mass.sum(-1), spread.sum(-1), able.to(mass)])
            sums = sums + found.unflatten(1, (self.states, -1)).sum(-1).double()
        distance, mass, spread, queries = sums
        if not bool((mass > 0).all()):
            raise UserError(
                f"calibrate reads the attention beyond a window of {window} and {sinks} sinks; got sequences"
                f" of {inputs.x.shape[1]} tokens, possible: longer sequences, or a smaller window"
            )
        half_lives = (distance / mass).clamp(*HALF_LIVES)
        entropy = spread / mass
        certain = (entropy.max() - entropy) / (entropy.max() - entropy.min()).clamp(min=EPSILON)
        writes = WRITES[0] + (WRITES[1] - WRITES[0]) * certain
        facts = {"far": (mass / queries).tolist()}
        if self.options.decay in PACED:
            pace = math.log(2) / half_lives
            if self.options.decay == "step":
                self.rate.copy_(pace.log())
            else:
                bias = pace + torch.log(-torch.expm1(-pace))
                layer = self.decay.wide if isinstance(self.decay, Narrow) else self.decay
                layer.bias.copy_(bias.repeat_interleave(len(layer.bias) // self.states))
            facts["half_lives"] = half_lives.tolist()
        if self.options.erase == "tied":
            self.beta.bias.copy_(writes.logit())
            facts["writes"] = writes.tolist()
        return facts

    def distill_loss(self, inputs: Inputs, loss):
        """The distance of outputs, `mse`. Raises UserError for the cross-entropy of weights."""
        if loss == "cross_entropy":
            raise UserError(
                "delta has weights of either sign, which have no cross-entropy with softmax's; possible:"
                " loss: mse"
            )
        return super().distill_loss(inputs, loss)
