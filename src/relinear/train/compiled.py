"""torch.compile of what a training repeats: a model's block, one graph for all blocks, with the attention
kernels as ops inside it.

Only blocks are compiled, since all of one model share their code: a graph of the whole model takes as many
times longer to make as it has blocks. What lies outside (embedding, last norm, head, loss) is a few kernels.
inductor keeps what it made on disk, for the next process.
"""

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from relinear.linearize.model import LAYOUTS, Linearized
from relinear.plan.job import Job

# steps: on one H200 graphs took 3 to 5 s to make and saved 7 ms (transfer) to 49 ms (all weights) of each
# step of 16 x 1024 tokens
PAYS = 400


def wanted(job: Job, device: str, steps: int, slower: bool = False) -> bool:
    """Whether a training of so many steps compiles: as the scale says; "auto" on a GPU alone, where it pays.
    Shards of a model never do.

    `slower`: compiled forms of this training were measured and are slow, so that "auto" leaves it.
    """
    auto = device == "cuda" and steps >= PAYS and not slower
    return job.hardware["engine"] == "ddp" and (job.compile == "on" or (job.compile == "auto" and auto))


def compile_blocks(model: PreTrainedModel) -> Callable[[], None]:
    """Compile the call of each block of a model, in place: at its first use, for the sizes that it has then.
    Returns what undoes it."""
    layout = model.layout if isinstance(model, Linearized) else LAYOUTS.get(type(model))
    blocks = [] if layout is None else list(layout.blocks(model))
    for block in blocks:
        block.compile(dynamic=False)

    def undo() -> None:
        for block in blocks:
            block._compiled_call_impl = None

    return undo


def recompute(model: PreTrainedModel) -> None:
    """Have each block compute its activations again in the backward pass, in place, so that only its input is
    kept: about a third more arithmetic, and the same numbers."""
    # transformers' later name of the same
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def windowed(model: PreTrainedModel) -> bool:
    """Whether a layer of a model has a window. All weights of such a model went at 25k (LoLCATs) and 82k
    (Lizard) tokens/s when compiled."""
    layers = model.attention_layers() if isinstance(model, Linearized) else []
    return any(getattr(layer.method.options, "window", 0) for layer in layers)


class OrEager:
    """A function that adds gradients, with compiled parts in it; without them, from its first call on, where
    they cannot be made.

    `undo` takes the compiled parts out. A failure costs one line on stderr and the speed.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        undo: Callable[[], None],
        parameters: Sequence[nn.Parameter],
        name: str,
    ):
        self.function, self.undo, self.parameters, self.name, self.tried = (
            function,
            undo,
            parameters,
            name,
            False,
        )

    def __call__(self, *batch: Tensor) -> Tensor:
        """The function's result."""
        if self.tried:
            return self.function(*batch)
        self.tried = True
        try:
            return self.function(*batch)
        except torch.OutOfMemoryError:
            raise
        # of Dynamo, inductor, Triton or a compiler that is not installed: many kinds, and eager is right in
        # all of them
        except Exception as error:
            said = next(iter(str(error).strip().splitlines()), "")[:200]
            print(
                f"{self.name}: torch.compile failed ({type(error).__name__}: {said}); training goes on"
                " without it",
                file=sys.stderr,
                flush=True,
            )
        self.undo()
        for p in self.parameters:  # what the call had added by then
            p.grad = None
        return self.function(*batch)
