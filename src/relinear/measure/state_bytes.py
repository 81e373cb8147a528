"""The bytes of a model's state as deployed, at its own shape and at Llama-3-8B's."""

from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from relinear.attention import load
from relinear.attention._base import Attention
from relinear.errors import UserError
from relinear.linearize.model import LAYOUTS, Linearized, linearize
from relinear.plan.job import Job
from relinear.plan.readings import Reading
from relinear.plan.strict import Positive, Strict
from relinear_kernels.gated_delta_reference import DeltaState
from relinear_kernels.linear_attention_reference import LinearState

NEEDS = ("shape", "state")
YIELDS = ("bytes", "mebibytes", "positions")
CACHED = 2  # bytes of a number of keys and values; one of a linear state has those of its dtype
MIB = 2**20
LLAMA_3_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
)


class Options(Strict):
    """Where softmax attention keeps every key, count those of `length` tokens."""

    length: Positive = 2048


def measure(model: PreTrainedModel, data: Path | None, options: Options, job: Job) -> Iterator[Reading]:
    """`bytes`, the same as `mebibytes`, and `positions`, the keys that a layer holds on average, of "model"
    and of "llama-3-8b": the state of one sequence in all layers.

    Counted as deployed, 2 bytes a number of keys and values and 4 a number of a linear state (2 where a
    method holds it in bfloat16), whatever they are computed in; masks and counters are left out. A state has
    its size from the first token on, but where layers are softmax, which is of `length` tokens. "llama-3-8b"
    is the same method with the same options at that model's shape; a method with a window for each layer of
    its own model has none there. Raises UserError for an encoder, which keeps nothing.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not (base.layout if isinstance(base, Linearized) else LAYOUTS[type(base)]).swapped.causal:
        raise UserError(
            f"{job.name}: an encoder keeps no state from one token to the next; possible: runs of causal"
            " models"
        )
    method, given = job.settings["method"], job.settings["options"]
    with torch.device("meta"):
        shapes = {
            "model": (
                base if isinstance(base, Linearized) else linearize(type(base)(base.config), method, **given)
            ),
        }
        if not isinstance(given.get("window"), list):
            shapes["llama-3-8b"] = linearize(LlamaForCausalLM(LLAMA_3_8B), method, **given)
    for of, shape in shapes.items():
        layers = [layer.method for layer in shape.attention_layers()]
        size = sum(state_bytes(layer, options.length) for layer in layers)
        held = sum(
            cached_numbers(layer, options.length) / (2 * layer.heads.groups * layer.heads.dim)
            for layer in layers
        )
        for name, value in (("bytes", size), ("mebibytes", size / MIB), ("positions", held / len(layers))):
            yield Reading(name, of, {}, value, None, 1)


def state_bytes(method: Attention, length: int) -> int:
    """Bytes of one sequence's state in one layer, as deployed, after `length` tokens."""
    return CACHED * cached_numbers(method, length) + sum(
        x.nbytes for x, linear in _numbers(_state(method)) if linear
    )


def cached_numbers(method: Attention, length: int) -> int:
    """The numbers of keys and values that one layer holds for one sequence after `length` tokens."""
    if isinstance(method, load("softmax")) and method.heads.window is None:
        return 2 * length * method.heads.groups * method.heads.dim
    return sum(x.numel() for x, linear in _numbers(_state(method)) if not linear)


def _state(method: Attention):
    return method.init_state(1, device="meta")


def _numbers(state, linear: bool = False) -> Iterator[tuple[torch.Tensor, bool]]:
    """The floating-point tensors of a state, and whether each is a linear one's."""
    if isinstance(state, torch.Tensor):
        if state.is_floating_point():
            yield state, linear
        return
    for part in state:
        yield from _numbers(part, linear or isinstance(state, LinearState | DeltaState))
