"""The positions that the state of a run holds, counted from its options before anything imports torch.

`relinear.measure.state_bytes` counts the tensors themselves; tests/test_beyond.py holds one to the other.
"""

from relinear.plan.entries import Run
from relinear.plan.options import KEEP, definitions, method_file, schema
from relinear.plan.strict import ConfigError, Positive, Strict

CACHED = 2  # bytes of a number of keys and values
NUMBERS = {"float32": 4, "bfloat16": 2}  # of a state
COUNTED = ("window", "delta", "kept")  # methods whose options say what they hold


class Holds(Strict):
    """The most that the state of a row may hold: bytes of so many `positions` of keys and values in a layer,
    on average over layers, at a model of so many query `heads` and key heads (`groups`) of width `dim`."""

    positions: Positive
    heads: Positive
    groups: Positive
    dim: Positive


def positions(run: Run, at: Holds) -> float | None:
    """The positions that a layer of a run holds on average; None for softmax attention, which keeps all.

    Raises ConfigError for a run whose state is not counted here: of another method, in the bytes of another,
    or with softmax layers that it keeps.
    """
    if run.method == "softmax":
        return None
    if run.method not in COUNTED or run.options.get(KEEP) or run.own.get("bytes_of"):
        raise ConfigError(
            f"method {run.method!r} with {run.options or 'its defaults'} does not say what it holds;"
            f" possible: {', '.join(COUNTED)}, without bytes_of and {KEEP}"
        )
    file = method_file(run.method)
    given = schema(file).model_validate(run.own)
    windows = (given.window,) if isinstance(given.window, int) else given.window
    held = sum(windows) / len(windows) + given.sinks
    if run.method == "kept":  # a token's own place is that of the window; each other one has a score
        held = (held + given.kept - 1) * (1 + NUMBERS["float32"] / (2 * CACHED * at.dim))
    if run.method == "delta":
        states = at.heads if given.state_per == "query_head" else at.groups
        position = 2 * CACHED * at.groups * at.dim
        held += NUMBERS[given.state_dtype] * states * at.dim**2 / position
        held += (definitions(file).TAPS - 1) * given.conv  # the convolution's last keys and values
    return held
