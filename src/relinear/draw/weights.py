"""Attention weights that measurements left beside their readings, and distances of heads."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load

from relinear.core import store
from relinear.plan.measured import Measured

# (layer, head) -> softmax [T, T], method [T, T]
Pairs = Mapping[tuple[int, int], tuple[np.ndarray, np.ndarray]]


def per_head(found: Measured, metric: str) -> np.ndarray:
    """The readings of a metric of attention at every layer and head, [layers, heads]. Raises ValueError where
    one is missing."""
    values = {
        (r.at["layer"], r.at["head"]): r.value
        for r in found.all(metric, "attention")
        if set(r.at) == {"layer", "head"}
    }
    shape = [1 + int(max((at[axis] for at in values), default=-1)) for axis in (0, 1)]
    if not values or len(values) != shape[0] * shape[1]:
        raise ValueError(
            f"{found.source.file}: {metric} of attention is read at {len(values)} heads of {shape[0]} layers"
            f" x {shape[1]} heads"
        )
    return np.array([[values[layer, head] for head in range(shape[1])] for layer in range(shape[0])])


def tensors_in(path: Path) -> dict[str, np.ndarray]:
    """What a measurement left beside its readings, in its folder or in a store. Raises FileNotFoundError
    where neither has it."""
    if not store.exists(path):
        raise FileNotFoundError(
            f"{path} is missing: it lies neither in its measurement's folder nor in a {store.TENSORS}"
        )
    return load(store.read(path))


def read_weights(path: Path) -> Pairs:
    """The pairs of weights in a file, by layer and head."""
    tensors = tensors_in(path)
    places = {
        (int(m[1]), int(m[2]))
        for key in tensors
        if (m := re.fullmatch(r"(?:softmax|method)\.(\d+)\.(\d+)", key))
    }
    if not places:
        raise ValueError(f"{path}: no weights 'softmax.<layer>.<head>'; have {sorted(tensors)}")
    pairs = {}
    for layer, head in sorted(places):
        names = [f"{kind}.{layer}.{head}" for kind in ("softmax", "method")]
        for key in names:
            if key not in tensors:
                raise ValueError(f"{path}: no weights {key!r}; have {sorted(tensors)}")
            if not np.isfinite(tensors[key]).all():
                raise ValueError(f"{path}: {key!r} is not finite")
        pairs[layer, head] = (tensors[names[0]], tensors[names[1]])
    return pairs


def read_points(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The scores and the weights in a file, pair by pair. Raises ValueError where one is missing or not
    finite."""
    tensors = tensors_in(path)
    for key in ("scores", "weights"):
        if key not in tensors or not np.isfinite(tensors[key]).all():
            raise ValueError(f"{path}: {key!r} is missing or not finite; have {sorted(tensors)}")
    return tensors["scores"], tensors["weights"]
