"""Attention maps: softmax (TRUE) and linear (PRED) attention weights of some heads, beside layer x head maps of their distances.

Or the weights of several runs side by side, each in the head that its measurement kept, or in several heads of one text.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator
from safetensors.numpy import load_file

from relinear.draw import About, Measurements
from relinear.draw.claims import Value, trained, value_of
from relinear.draw.pictures import judge_claims, save, wrap
from relinear.draw.provenance import Origin, write_provenance
from relinear.draw.render import NOT_RUN
from relinear.plan.claims import Point
from relinear.plan.figures import AttentionMaps
from relinear.plan.measured import Measured
from relinear.plan.specs import Artefact

# (layer, head) -> softmax [T, T], method [T, T]
Pairs = Mapping[tuple[int, int], tuple[np.ndarray, np.ndarray]]
TINY = float(np.finfo(np.float32).tiny)
DISTANCES = {"kl": "KL of weights", "mse": "MSE of outputs"}


def draw(artefact: Artefact, measured: Measurements, about: About, out: Path) -> list[Path]:
    """Write <stem>.png, .pdf, .provenance.json and, of a figure with claims, .claims.csv into `out`; returns their paths.

    Weights are `softmax.<layer>.<head>` and `method.<layer>.<head>` of the measurement's weights.safetensors. Raises FileNotFoundError where
    it is missing, ValueError for weights that are unpaired or not finite, and for heads without distances.
    """
    spec: AttentionMaps | Any = artefact.spec
    runs = {run: measured.get((run, measure)) for run, measure in spec.reads()}
    with matplotlib.rc_context({"font.size": 9, "axes.titlesize": 9, "pdf.fonttype": 42}):
        figure = _figure(spec, runs[spec.run], about) if spec.run else (_figure_of_places if spec.places else _figure_of_runs)(spec, runs, about)
        pictures = save(artefact, figure, out)
    shown = ("weights", *DISTANCES) if spec.run else ("map",) if spec.places else spec.rows
    cells: dict[str, dict[str, Origin]] = {run: dict.fromkeys(shown, found and found.source.file) for run, found in runs.items()}
    sources = [found.source for found in runs.values() if found]
    written = [write_provenance(out / f"{artefact.stem}.provenance.json", artefact, about.scale, cells, sources)]
    return [*pictures, *written, *judged(artefact, measured, about, out)]


def judged(artefact: Artefact, measured: Measurements, about: About, out: Path) -> list[Path]:
    """Write the verdicts on a figure's claims, which are on readings and need no weights; returns the file, or nothing where there are no claims."""
    runs = {run: measured.get((run, measure)) for run, measure in artefact.spec.reads()}

    def look(point: Point) -> Value | str:
        found = runs[point.row]
        reading = found and found.find(point.column or "", "attention", point.at or None)
        return value_of(found, reading, " at ".join(filter(None, (point.row, point.place))), point.column or "")

    return judge_claims(artefact, look, about, out, trained({run: m.facts for run, m in runs.items() if m}))


def _figure(spec: AttentionMaps, found: Measured | None, about: About) -> Figure:
    title, where = f"{spec.label}: {spec.says}", f"run {spec.run}, {about.where()}"
    if found is None:
        figure = Figure(figsize=(11.0, 2.0), layout="constrained")
        figure.suptitle(f"{title}\n{where}: {NOT_RUN}")
        return figure
    pairs, distances = read_weights(found.folder / "weights.safetensors"), {metric: per_head(found, metric) for metric in DISTANCES}
    figure = Figure(figsize=(11.0, 0.9 + 2.5 * max(2, len(pairs))), layout="constrained")
    figure.suptitle(wrap(figure, filter(None, (title, where, about.demonstration))))
    left, right = figure.subfigures(1, 2, width_ratios=[6, 4])
    _draw_pairs(left, pairs, distances)
    _draw_heads(right, distances, spec.limits)
    return figure


def per_head(found: Measured, metric: str) -> np.ndarray:
    """The readings of a metric of attention at every layer and head, [layers, heads]. Raises ValueError where one is missing."""
    values = {(r.at["layer"], r.at["head"]): r.value for r in found.all(metric, "attention") if set(r.at) == {"layer", "head"}}
    shape = [1 + int(max((at[axis] for at in values), default=-1)) for axis in (0, 1)]
    if not values or len(values) != shape[0] * shape[1]:
        raise ValueError(f"{found.source.file}: {metric} of attention is read at {len(values)} heads of {shape[0]} layers x {shape[1]} heads")
    return np.array([[values[layer, head] for head in range(shape[1])] for layer in range(shape[0])])


def tensors_in(path: Path) -> dict[str, np.ndarray]:
    """What a measurement left beside its readings. Raises FileNotFoundError for a folder that was copied without it, as committed ones are."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; attention weights lie where they were measured, and these are not committed")
    return load_file(path)


def read_weights(path: Path) -> Pairs:
    """The pairs of weights in a file, by layer and head."""
    tensors = tensors_in(path)
    places = {(int(m[1]), int(m[2])) for key in tensors if (m := re.fullmatch(r"(?:softmax|method)\.(\d+)\.(\d+)", key))}
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


def _draw_pairs(area: SubFigure, pairs: Pairs, distances: Mapping[str, np.ndarray]) -> None:
    """TRUE and PRED side by side, one row per (layer, head), all with one logarithmic colour scale."""
    axes = area.subplots(len(pairs), 2, squeeze=False, sharex=True, sharey=True)
    for row, ((layer, head), (true, pred)) in zip(axes, pairs.items(), strict=True):
        norm = _of_weights(len(true))
        future = np.triu(np.ones_like(true, dtype=bool), k=1)
        for axis, weights in zip(row, (true, pred), strict=True):
            image = axis.imshow(np.ma.array(weights, mask=future), norm=norm, cmap="magma", interpolation="nearest")
            axis.spines[["top", "right"]].set_visible(False)
        kl, mse = (distances[metric][layer, head] for metric in ("kl", "mse"))
        row[0].set_title(f"TRUE: softmax, layer {layer}, head {head}")
        row[1].set_title(f"PRED: linear, KL {kl:.2g}, MSE {mse:.2g}")
        row[0].set_ylabel("query position")
    area.colorbar(image, ax=list(axes.flat), label="weight, log scale", extend="min", shrink=0.5, aspect=40)
    for axis in axes[-1]:
        axis.set_xlabel("key position")


def _of_weights(length: int) -> LogNorm:
    """The colours of weights over a text of `length` tokens, the same in every figure. Uniform attention is 1 / length; a hundredth of that, and
    all below, is one colour."""
    return LogNorm(vmin=0.01 / length, vmax=1.0, clip=True)


def _draw_heads(area: SubFigure, distances: Mapping[str, np.ndarray], limits: Mapping[str, tuple[float, float]]) -> None:
    """KL and MSE of every head, layers downwards, each with a logarithmic colour scale: from `limits`, or its own."""
    axes = area.subplots(1, 2)
    for axis, (metric, title) in zip(axes, DISTANCES.items(), strict=True):
        values = distances[metric]
        low, high = limits.get(metric) or (values[values > 0].min(initial=np.inf), values.max())
        norm = LogNorm(low, high, clip=True) if low < high else None  # all equal, or all zero: nothing to scale
        image = axis.imshow(values, norm=norm, cmap="viridis", interpolation="nearest")
        axis.set(xlabel="head", ylabel="layer")
        for ruler in (axis.xaxis, axis.yaxis):
            ruler.set_major_locator(MaxNLocator(nbins=8, integer=True))
        bar = area.colorbar(image, ax=axis, location="top", extend="both" if metric in limits else "neither")
        bar.set_label(f"{title}{', log scale' if norm else ''}\nmean {values.mean():.2g}")
        if norm:
            ticks = np.geomspace(low, high, 3)  # more ticks run into each other
            bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
            bar.minorticks_off()


# --- several runs ---


def _figure_of_runs(spec: AttentionMaps, runs: Mapping[str, Measured | None], about: About) -> Figure:
    figure, grid = _columns(spec, about, len(spec.rows), 1.9, 1.8, sharey="row")
    for axes, (title, found, kind) in zip(grid.T, _sides(spec, runs), strict=True):
        if found is None:
            axes[0].set_title(f"{title}:\n{NOT_RUN}")
            for axis in axes:
                axis.set_axis_off()
            continue
        pairs = read_weights(found.folder / "weights.safetensors")
        ((layer, head), own), *_ = pairs.items()
        points = _read_points(found.folder / "points.safetensors") if {"points", "scores"} & set(spec.rows) else None
        axes[0].set_title(title if spec.rows == ("relative",) else f"{title}\nlayer {layer}, head {head}")
        for axis, row in zip(axes, spec.rows, strict=True):
            if row == "relative":
                _draw_relative(axis, [(true, (true, pred)[kind]) for true, pred in pairs.values()])
            else:
                ROWS[row](axis, own[kind], points)
            axis.spines[["top", "right"]].set_visible(False)
            if axis not in grid[:, 0]:
                axis.set_ylabel("")
    return figure


def _figure_of_places(spec: AttentionMaps, runs: Mapping[str, Measured | None], about: About) -> Figure:
    """A figure with a row for each place. All maps of a row have the colour scale of softmax attention's weights there.

    The title of a method's map has the KL divergence from softmax attention's weights to the method's.
    """
    spec = spec.model_copy(update={"caption": (*OF_PLACES, *spec.caption)})
    figure, grid = _columns(spec, about, len(spec.places), 1.35, 1.4, sharex=True, sharey=True)
    images: dict[int, Any] = {}  # row -> one of its maps, all of which have the same colours
    for column, (title, found, kind) in zip(grid.T, _sides(spec, runs), strict=True):
        pairs = read_weights(found.folder / "weights.safetensors") if found else {}
        for row, (axis, place) in enumerate(zip(column, spec.places, strict=True)):
            axis.set(xticks=[], yticks=[])
            if found is None:
                axis.text(0.5, 0.5, NOT_RUN, ha="center", va="center", transform=axis.transAxes)
                continue
            at = next((r for r in found.all("kl", "text") if (r.at["layer"], r.at["head"]) == place), None)
            if place not in pairs or at is None:
                raise ValueError(f"{found.source.file}: nothing of layer {place[0]}, head {place[1]}; have {sorted(pairs)}")
            images[row] = axis.imshow(pairs[place][kind], vmin=0, vmax=pairs[place][0].max(), cmap="magma", interpolation="nearest")
            axis.set_title("" if kind == 0 else f"KL {at.value:.2f}", fontsize=8)
            if axis in grid[:, 0]:
                axis.set_ylabel(f"layer {at.at['own_layer']}, head {at.at['own_head']}\nquery", fontsize=8)
        column[0].set_title(f"{title}\n{column[0].get_title()}", fontsize=8)
        column[-1].set_xlabel("key", fontsize=8)
    for row, image in images.items():
        bar = figure.colorbar(image, ax=list(grid[row]), extend="max", aspect=12, pad=0.01)
        bar.ax.tick_params(labelsize=7)
        bar.set_label("weight", fontsize=8)
    return figure


def _columns(spec: AttentionMaps, about: About, rows: int, width: float, height: float, **shared: Any) -> tuple[Figure, np.ndarray]:
    """A figure with its title and caption, and its axes [rows, columns]."""
    columns = len(spec.runs) + bool(spec.softmax)
    figure = Figure(figsize=(0.6 + width * columns, 0.9 + height * rows + 0.2 * len(spec.caption)), layout="constrained")
    data = ", ".join(dict.fromkeys(about.data[measure] for _, measure in spec.reads() if measure in about.data))
    lines = (f"{spec.label}: {spec.says}", " on ".join(filter(None, (about.where(), data))), about.demonstration)
    figure.suptitle(wrap(figure, filter(None, lines)))
    figure.supxlabel(wrap(figure, spec.caption, per_inch=17), fontsize=8)
    return figure, figure.subplots(rows, columns, squeeze=False, **shared)


def _sides(spec: AttentionMaps, runs: Mapping[str, Measured | None]) -> list[tuple[str, Measured | None, int]]:
    """The title and the measurement of each column, and which weights of a pair it shows: 0 softmax attention's, which every run has, or 1 the
    method's."""
    first = [(spec.softmax, next(filter(None, runs.values()), None), 0)] if spec.softmax else []
    return [*first, *((title, runs[run], 1) for title, run in spec.runs.items())]


def _read_points(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Scores and weights, pair by pair."""
    tensors = tensors_in(path)
    for key in ("scores", "weights"):
        if key not in tensors or not np.isfinite(tensors[key]).all():
            raise ValueError(f"{path}: {key!r} is missing or not finite; have {sorted(tensors)}")
    return tensors["scores"], tensors["weights"]


def _draw_map(axis: Axes, weights: np.ndarray, _: Any) -> None:
    future = np.triu(np.ones_like(weights, dtype=bool), k=1)
    axis.imshow(np.ma.array(weights, mask=future), norm=_of_weights(len(weights)), cmap="magma", interpolation="nearest")
    axis.set(xlabel="key position", ylabel="query position")


def _draw_query(axis: Axes, weights: np.ndarray, _: Any) -> None:
    axis.bar(np.arange(len(weights)), weights[-1], width=1.0, color="C0")
    axis.axhline(1 / len(weights), color="0.6", linewidth=0.8, linestyle=":")  # uniform
    axis.set(xlabel="key position", ylabel="weight of the last query")


def _draw_points(axis: Axes, weights: np.ndarray, points: tuple[np.ndarray, np.ndarray]) -> None:
    axis.scatter(*points, s=2, color="C0", alpha=0.3, linewidths=0)
    axis.set(xlabel="q.k / sqrt(d)", ylabel="weight")


def _draw_scores(axis: Axes, weights: np.ndarray, points: tuple[np.ndarray, np.ndarray]) -> None:
    axis.hist(points[0], bins=60, color="0.6", density=True)
    axis.axvline(-1, color="C3", linewidth=0.8, linestyle=":")  # where 1 + s + s^2 / 2 turns
    axis.set(xlabel="q.k / sqrt(d)", ylabel="density")


def _draw_relative(axis: Axes, pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
    """Draw each weight relative to its query's largest one, against its score less the largest score.

    For softmax attention the first is the exponential of the second.
    """
    over = [[w / np.maximum(w.max(1, keepdims=True), TINY) for w in pair] for pair in pairs]
    x, y = (np.concatenate([w.ravel() for w in part]) for part in zip(*over, strict=True))
    x = np.log(np.maximum(x, TINY))
    axis.scatter(x, y, s=2, color="C0", alpha=0.15, linewidths=0)
    axis.set(xlabel="q.k / sqrt(d),\nless the largest", ylabel="weight / the largest")


OF_PLACES = (
    "Weights of one text: a row for each query, a column for each key. The colours of a row of panels are those of its softmax panel.",
    "KL: of the map's weights from softmax attention's, in this head. In an encoder of other depth, a layer is the one at the same part of it.",
)

ROWS = {"map": _draw_map, "query": _draw_query, "points": _draw_points, "scores": _draw_scores}
