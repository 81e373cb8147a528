"""The recurrent cache: the state of every layer of a linearized model, in the form that transformers'
`generate()` passes around."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


def tree_map(fn, state, *others):
    """Apply `fn` to every tensor of a nested tuple of tensors (methods' states are NamedTuples of tensors),
    and to those of others like it."""
    if isinstance(state, Tensor):
        return fn(state, *others)
    parts = [tree_map(fn, *s) for s in zip(state, *others, strict=True)]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


def nbytes(state) -> int:
    """Bytes of a state."""
    return state.nbytes if isinstance(state, Tensor) else sum(map(nbytes, state))


class RecurrentLayer(CacheLayerMixin):
    """One layer's state, opaque to transformers, and how many positions it has seen."""

    def __init__(self):
        super().__init__()
        self.state: Any = None
        self.seen = 0

    def advance(self, state, tokens: int) -> None:
        """Take over the state after `tokens` more tokens."""
        self.state, self.seen, self.is_initialized = state, self.seen + tokens, True

    def rows(self, rows: Tensor):
        """The state of some sequences of the batch."""
        return tree_map(lambda x: x.index_select(0, rows), self.state)

    def put(self, rows: Tensor, after) -> None:
        """Take over the state of some sequences; the others stay where they are."""
        self.state = tree_map(lambda old, new: old.to(new.dtype).index_copy(0, rows, new), self.state, after)

    def lazy_initialization(self, *args, **kwargs) -> None:
        """Do nothing: the layer makes its state itself."""
        ...

    def update(self, *args, **kwargs):
        """Raise TypeError: only a linearized layer can advance a recurrent state."""
        raise TypeError(
            "a recurrent state is advanced by its own layer, not by keys and values: the model's layers are"
            " not linearized"
        )

    def get_seq_length(self) -> int:
        """Tokens seen so far."""
        return self.seen

    def get_max_length(self) -> int:
        """-1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length  # transformers < 5.20

    def get_mask_sizes(self, query_length, *args) -> tuple[int, int]:
        """Positions that a mask covers, from 0."""
        return self.seen + (query_length if isinstance(query_length, int) else query_length.shape[0]), 0

    def reset(self) -> None:
        """Forget every token."""
        self.state, self.seen, self.is_initialized = None, 0, False

    def crop(self, tokens_to_remove: int) -> None:
        """Raise ValueError for any tokens to take back: a recurrent state cannot give them."""
        if tokens_to_remove:
            raise ValueError(
                f"a recurrent state cannot take tokens back; got crop({tokens_to_remove}). Assisted decoding"
                " needs a softmax model on both sides; possible here: greedy, sampling, beams"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the sequences of a batch, as beam search asks for."""
        if self.state is not None:
            self.state = tree_map(lambda x: x.index_select(0, beam_idx.to(x.device)), self.state)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch."""
        if self.state is not None:
            self.state = tree_map(lambda x: x.repeat_interleave(repeats, 0), self.state)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences at these places of the batch."""
        self.reorder_cache(indices)


class RecurrentCache(Cache):
    """One `RecurrentLayer` per layer, and how many real tokens each sequence has had: the positions of
    left-padded batches.

    A token is read in place: what goes on from a prefix twice takes `copy.deepcopy` of its cache.
    """

    def __init__(self, layers: int):
        super().__init__(layers=[RecurrentLayer() for _ in range(layers)])
        self.lengths: Tensor | None = None  # [B] int64
        self.owner: dict[str, Any] | None = None  # method and shape of the model that filled it
        self.ends: Tensor | None = None  # the tokens that end a sequence of the `generate` that goes on
        self.generated = 0  # tokens that it has chosen for each sequence

    def bind(self, owner: dict[str, Any], batch: int) -> None:
        """Raises ValueError where the cache was filled by another kind of model, or for another batch
        size."""
        if self.owner is None:
            if len(self.layers) != owner["layers"]:
                raise ValueError(
                    f"this cache has {len(self.layers)} layers; the model has {owner['layers']}"
                    " (model.make_cache() makes one)"
                )
            self.owner = owner
        if self.owner != owner:
            differ = [k for k in owner if owner[k] != self.owner.get(k)]
            theirs, ours = ({k: o.get(k) for k in differ} for o in (self.owner, owner))
            raise ValueError(f"this cache was filled by a model with {theirs}; this model has {ours}")
        if self.lengths is not None and len(self.lengths) != batch:
            raise ValueError(f"this cache holds a batch of {len(self.lengths)}; got inputs of batch {batch}")

    def reset(self) -> None:
        """Forget every token and which rows of a batch they stood in."""
        super().reset()
        self.lengths = self.owner = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the sequences of a batch, as beam search asks for."""
        super().reorder_cache(beam_idx)
        if self.lengths is not None:
            self.lengths = self.lengths.index_select(0, beam_idx.to(self.lengths.device))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences at these places of the batch."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch."""
        super().batch_repeat_interleave(repeats)
        if self.lengths is not None:
            self.lengths = self.lengths.repeat_interleave(repeats)

    def state_bytes(self) -> int:
        """Bytes of all states: the memory that does not grow with the sequence."""
        return sum(nbytes(layer.state) for layer in self.layers if layer.state is not None)
