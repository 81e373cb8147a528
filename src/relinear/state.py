"""The recurrent cache: what every layer of a linearized model remembers, as transformers' `generate()` passes it around."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


def tree_map(fn, state):
    """Apply `fn` to every tensor of a nested tuple of tensors (methods' states are NamedTuples of tensors)."""
    if isinstance(state, Tensor):
        return fn(state)
    parts = [tree_map(fn, s) for s in state]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


class RecurrentLayer(CacheLayerMixin):
    """One layer's state, opaque to transformers, and how many positions it has seen."""

    def __init__(self):
        super().__init__()
        self.state: Any = None
        self.seen = 0

    def advance(self, state, tokens: int) -> None:
        self.state, self.seen, self.is_initialized = state, self.seen + tokens, True

    def lazy_initialization(self, *args, **kwargs) -> None: ...

    def update(self, *args, **kwargs):
        raise TypeError("a recurrent state is advanced by its own layer, not by keys and values: the model's layers are not linearized")

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # transformers < 5.20

    def get_mask_sizes(self, query_length, *args) -> tuple[int, int]:
        return self.seen + (query_length if isinstance(query_length, int) else query_length.shape[0]), 0

    def reset(self) -> None:
        self.state, self.seen, self.is_initialized = None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.state is not None:
            self.state = tree_map(lambda x: x.index_select(0, beam_idx.to(x.device)), self.state)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = tree_map(lambda x: x.repeat_interleave(repeats, 0), self.state)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)


class RecurrentCache(Cache):
    """One `RecurrentLayer` per layer, and how many real tokens each sequence has had (positions of left-padded batches)."""

    def __init__(self, layers: int):
        super().__init__(layers=[RecurrentLayer() for _ in range(layers)])
        self.lengths: Tensor | None = None  # [B] int64

    def positions(self, mask: Tensor) -> Tensor:
        """Position of each token of the next piece ``[B, T]``, counting real tokens only; advances the counts."""
        before = mask.new_zeros(mask.shape[0], dtype=torch.long) if self.lengths is None else self.lengths
        if before.shape[0] != mask.shape[0]:
            raise ValueError(f"this cache holds a batch of {before.shape[0]}; got inputs of batch {mask.shape[0]}")
        counts = mask.cumsum(1)
        self.lengths = before + counts[:, -1]
        return (before[:, None] + counts - 1).clamp(min=0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.lengths is not None:
            self.lengths = self.lengths.index_select(0, beam_idx.to(self.lengths.device))

    def state_bytes(self) -> int:
        """Bytes of all states: the memory that does not grow with the sequence."""
        total = 0

        def add(x: Tensor) -> Tensor:
            nonlocal total
            total += x.numel() * x.element_size()
            return x

        for layer in self.layers:
            if layer.state is not None:
                tree_map(add, layer.state)
        return total
