"""A decode step, or a training step's gradients, as one CUDA graph: recorded once, then launched whole, with
no Python between its kernels."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from relinear.linearize.state import RecurrentCache, tree_map

# steps run as they are before one is recorded: they compile the kernels and allocate the libraries'
# workspaces
WARM_UP = 2


def capture(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """A function that launches all kernels of `step` again, on the same memory. Recording runs none of them.
    On a CPU it is `step` itself."""
    if device.type != "cuda":
        return step
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    # On the stream that the plain steps ran on, if it can be recorded: gradients are added up where their
    # parameters were first used.
    with torch.cuda.graph(graph, stream=None if current == torch.cuda.default_stream() else current):
        step()
    return graph.replay


def overwrite(old, new) -> None:
    """Copy a state into the memory of the one before it, unless it lies there already. Raises ValueError for
    a state that grew."""
    if not isinstance(old, Tensor):
        for a, b in zip(old, new, strict=True):
            overwrite(a, b)
    elif old.shape != new.shape:
        raise ValueError(
            f"a recorded step needs a state of fixed size; got {list(new.shape)} after {list(old.shape)}: a"
            " layer kept as softmax"
        )
    elif old.data_ptr() != new.data_ptr():
        old.copy_(new)


class Recorded:
    """A function of tensors that only launches kernels. On a GPU the calls after the first `WARM_UP` replay
    one graph of it.

    Side effects such as gradients must keep their addresses: allocate them before the last plain call and
    never replace them. The next call overwrites the result. Tensors of another shape than the recorded ones
    are given to the function itself.
    """

    def __init__(self, function: Callable[..., Tensor]):
        self.function, self.calls, self.replay = function, 0, None
        self.inputs: list[Tensor] = []
        self.result: Tensor | None = None

    def __call__(self, *tensors: Tensor) -> Tensor:
        """The function's result: from plain calls at first, then from the captured graph. The same memory
        holds each replayed result."""
        self.calls += 1
        if self.calls <= WARM_UP or not tensors[0].is_cuda:
            return self.function(*tensors)
        if self.replay is None:
            self.inputs = [x.clone() for x in tensors]
            self.replay = capture(self._run, tensors[0].device)
        if [x.shape for x in tensors] != [x.shape for x in self.inputs]:
            return self.function(*tensors)
        for mine, given in zip(self.inputs, tensors, strict=True):
            mine.copy_(given)
        self.replay()
        return self.result

    def _run(self) -> None:
        self.result = self.function(*self.inputs)


class Decoder:
    """Greedy decoding of a linearized model. Call it once a token; on a GPU all calls but the first `WARM_UP`
    replay one graph.

    `cache` holds the prompt and `ids` ``[B, 1]`` the token that follows it. Both live in fixed memory from
    here on, and the cache stays valid: positions and states are as after the same number of calls of the
    model.
    """

    def __init__(self, model: PreTrainedModel, cache: RecurrentCache, ids: Tensor):
        self.model, self.cache, self.ids = model, cache, ids.clone()
        cache.lengths = cache.lengths.clone()
        for layer in cache.layers:
            layer.state = tree_map(Tensor.contiguous, layer.state)
        self.calls, self.replay = 0, None

    @torch.inference_mode()
    def __call__(self) -> Tensor:
        """The next token ``[B, 1]``, in memory that the next call writes over."""
        self.calls += 1
        if self.ids.device.type != "cuda" or self.calls <= WARM_UP:
            self._step()
        elif self.replay is None:
            self.replay = capture(self._step, self.ids.device)  # counts the step in `seen`
            self.replay()
        else:
            for layer in self.cache.layers:
                layer.seen += 1
            self.replay()
        return self.ids

    def _step(self) -> None:
        held, lengths = [layer.state for layer in self.cache.layers], self.cache.lengths
        logits = self.model(input_ids=self.ids, past_key_values=self.cache, use_cache=True).logits
        for layer, state in zip(self.cache.layers, held, strict=True):
            overwrite(state, layer.state)
            layer.state = state
        self.cache.lengths = lengths.copy_(self.cache.lengths)
        self.ids.copy_(logits[:, -1].argmax(-1, keepdim=True))
