"""Lizard Figure 2: the weights of the gated part, the window and the meta tokens, and their sum: as the paper
draws them, and of a trained head."""

import re
from pathlib import Path

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from relinear.draw.pictures import page
from relinear.draw.render import NOT_RUN
from relinear.draw.weights import tensors_in

PARTS = {"linear": "gated linear attention", "window": "sliding window", "meta": "meta tokens"}
DARKEST = 0.01  # the darkest colour is this share of the largest weight, and all below


def figure(spec, measured, about) -> Figure:
    """The parts' weights, as drawn and of a trained head."""
    given, found = spec.options, measured[spec.reads()[0]]
    rows = {f"as drawn: equal scores, gamma {given['gamma']}": drawn(**given)}
    if found:
        name, weights = trained(found.folder / "parts.safetensors")
        rows[f"{spec.reads()[0][0]}, {name}"] = weights
    else:
        rows[f"{spec.reads()[0][0]}: {NOT_RUN}"] = {}
    title = f"{spec.label}: window {given['window']}, {given['meta']} meta tokens"
    shown = page(4.8, [title, about.where(), about.demonstration])
    for area, (title, weights) in zip(shown.subfigures(2, 1), rows.items(), strict=True):
        area.suptitle(title)
        if weights:
            _row(area, weights)
    return shown


def drawn(window: int, meta: int, positions: int, gamma: float) -> dict[str, np.ndarray]:
    """The parts' weights for equal scores: powers of gamma by distance, and equal weights on all keys that
    softmax attention sees."""
    query, key = np.indices((positions, positions))
    near = (key <= query) & (key > query - window)
    beyond = (key <= query - window) & (key < meta)
    seen = (near | beyond).sum(1, keepdims=True)
    return {
        "linear": np.where(key <= query, gamma ** np.abs(query - key), 0.0),
        "window": near / seen,
        "meta": beyond / seen,
    }


def trained(path: Path) -> tuple[str, dict[str, np.ndarray]]:
    """Layer and head, and the weights of each part. Raises ValueError for a file that has not all of them, of
    one head, and finite."""
    tensors = tensors_in(path)
    found = {
        m[1]: (f"layer {m[2]}, head {m[3]}", tensors[key])
        for key in tensors
        if (m := re.fullmatch(r"(\w+)\.(\d+)\.(\d+)", key))
    }
    if (
        set(found) != set(PARTS)
        or len({name for name, _ in found.values()}) != 1
        or not all(np.isfinite(x).all() for _, x in found.values())
    ):
        raise ValueError(f"{path}: expected finite {', '.join(PARTS)} of one head; have {sorted(tensors)}")
    return found["linear"][0], {part: found[part][1] for part in PARTS}


def _row(area, weights: dict[str, np.ndarray]) -> None:
    """Draw the parts and their sum on one logarithmic scale; keys without weight stay white."""
    shown = weights | {"sum": sum(weights.values())}
    most = max(x.max() for x in shown.values())
    axes = area.subplots(1, len(shown))
    for axis, (part, values) in zip(axes, shown.items(), strict=True):
        image = axis.imshow(
            np.ma.masked_equal(values, 0),
            norm=LogNorm(DARKEST * most, most, clip=True),
            cmap="viridis",
            interpolation="nearest",
        )
        axis.set_title(PARTS.get(part, part))
        axis.set(xlabel="key position", xticks=range(0, len(values), 3), yticks=range(0, len(values), 3))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("query position")
    bar = area.colorbar(image, ax=list(axes), label="weight, log scale", extend="min")
    bar.ax.yaxis.set_major_formatter("{x:g}")
