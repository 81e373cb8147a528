"""A decode step as one CUDA graph: recorded once, then launched whole, with no Python between its kernels."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from relinear.state import RecurrentCache, tree_map

WARM_UP = 2  # steps run as they are before one is recorded: they compile the kernels and allocate the libraries' workspaces


def capture(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """What launches again all that `step` launches, on the same memory. Recording runs nothing on the device; the CPU has the step itself."""
    if device.type != "cuda":
        return step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def overwrite(old, new) -> None:
    """Write a state over the one before it, where it is not the same memory already. Raises ValueError for a state that grew."""
    if not isinstance(old, Tensor):
        for a, b in zip(old, new, strict=True):
            overwrite(a, b)
    elif old.shape != new.shape:
        raise ValueError(f"a recorded step needs a state of fixed size; got {list(new.shape)} after {list(old.shape)}: a layer kept as softmax")
    elif old.data_ptr() != new.data_ptr():
        old.copy_(new)


class Decoder:
    """Greedy decoding of a linearized model. Call it once a token; on a GPU all calls but the first `WARM_UP` replay one graph.

    `cache` holds the prompt and `ids` ``[B, 1]`` the token that follows it. Both live in fixed memory from here on, and the cache stays
    valid: positions and states are as after the same number of calls of the model.
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
