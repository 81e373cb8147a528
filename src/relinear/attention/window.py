"""Softmax attention within a sliding window and to the first positions, with nothing trained and no linear
part: the control of every hybrid.

A query sees the last `window` positions, its own included, and the first `sinks` real ones, at the teacher's
rotary angles; a sink inside the window is counted once. A list of windows has one for each layer. Sinks: Xiao
et al. 2024, whose cache numbers its positions anew; here they keep those of the text. LoRA or full finetuning
may train the weights around it.

`bytes_of`, in place of `window`: as many positions, sinks included, as a layer of that method holds bytes at
the teacher's heads, and no more: `lolcats` its released form with a window of 64, `lizard` its defaults (a
window of 128, 4 meta tokens). Keys and values are counted with 2 bytes a number; linear states for each query
head with 4, as deployed, which `measure/state_bytes.py` counts, too. The other three accountings of a
method's linear states: `_bf16` with 2 bytes a number, `_key_heads` one state for each key head,
`_key_heads_bf16` both.
"""

from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator

from relinear.attention import _base
from relinear.attention._base import Attention, Heads, Inputs
from relinear_kernels.sliding_window_attention import sliding_window_attention
from relinear_kernels.sliding_window_attention_reference import sliding_window_weights, window_state

WINDOW = 128
# The sizes of the compared layers: positions of keys and values, and columns of each sign of a linear state's
# features (None: the head's dimension).
HELD = {"lolcats": (64 + 1, 64), "lizard": (128 + 4, None)}
# How a method's linear states are counted: whether there is one for each key head in place of each query
# head, and the bytes of a number.
COUNTED = {"": (False, 4), "_bf16": (False, 2), "_key_heads": (True, 4), "_key_heads_bf16": (True, 2)}
# Every `bytes_of` -> both of these.
BYTES = {f"{method}{how}": (HELD[method], COUNTED[how]) for method in HELD for how in COUNTED}


Window = Annotated[int, Field(ge=1)]


class Options(_base.WindowsOptions):
    """The options of a run with windowed softmax attention."""

    window: Window | tuple[Window, ...] = WINDOW
    sinks: int = Field(default=4, ge=0)
    bytes_of: Literal[tuple(BYTES)] | None = None

    @model_validator(mode="after")
    def _one_size(self):
        if self.bytes_of is not None and self.window != WINDOW:
            raise ValueError(
                f"give a window or whose bytes it has; got window {self.window} and bytes_of"
                f" {self.bytes_of!r}"
            )
        return self


def positions_of(bytes_of: str, heads: Heads) -> int:
    """The most positions whose keys and values, 2 bytes a number, take no more than the state of a layer of a
    method, counted as `bytes_of` says."""
    (near, columns), (by_key_heads, number) = BYTES[bytes_of]
    features = 2 * (heads.dim if columns is None else min(columns, heads.dim))
    states = heads.groups if by_key_heads else heads.heads
    # for each feature a row of values, its sum, and the reference that it is held relative to
    linear = number * states * features * (heads.dim + 2)
    return near + linear // (2 * 2 * heads.groups * heads.dim)


class Method(Attention):
    """Softmax attention to the last positions and to the first ones, the sinks."""

    Options = Options

    def __init__(self, heads, options):
        super().__init__(heads, options)
        self.window = (
            options.window
            if options.bytes_of is None
            else positions_of(options.bytes_of, heads) - options.sinks
        )
        if self.window < 1:
            raise ValueError(
                f"{options.sinks} sinks leave no window in the bytes of {options.bytes_of!r},"
                f" {positions_of(options.bytes_of, heads)} positions; possible: fewer sinks"
            )

    @property
    def unbounded_rotary(self) -> bool:
        """Sinks are seen from any distance."""
        return self.options.sinks > 0

    def _seen(self, inputs: Inputs) -> dict:
        return {
            "window": self.window,
            "meta": self.options.sinks,
            "scale": self.heads.scale,
            "key_mask": inputs.key_mask,
        }

    def forward(self, inputs: Inputs, state=None):
        """Head outputs of a piece, and the last keys and values after it."""
        return sliding_window_attention(
            *inputs.rotated(), inputs.v, **self._seen(inputs), initial_state=state, return_state=True
        )

    def init_state(self, batch, device=None, dtype=torch.float32):
        """The last keys and values before the first token: none of them valid."""
        h, sinks = self.heads, self.options.sinks
        return window_state(batch, self.window - 1, h.groups, h.dim, meta=sinks, device=device, dtype=dtype)

    def attention_weights(self, inputs: Inputs):
        """The T x T weights within the window and over its sinks, row = query."""
        return sliding_window_weights(*inputs.rotated(), **self._seen(inputs))
