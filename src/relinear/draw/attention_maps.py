"""Attention maps: softmax (TRUE) and linear (PRED) attention weights of some heads, beside layer x head maps
of their distances.

Or the weights of several runs side by side, each in the head that its measurement kept, or in several heads
of one text.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from relinear.draw import About, Measurements
from relinear.draw.claims import Value, judge_claim, trained, value_of
from relinear.draw.drawing import Drawn
from relinear.draw.frame import apart, over_trainings
from relinear.draw.pictures import page, saving
from relinear.draw.provenance import Origin
from relinear.draw.render import NOT_RUN
from relinear.draw.weights import Pairs, per_head, read_points, read_weights
from relinear.plan.claims import Point
from relinear.plan.figures import AttentionMaps
from relinear.plan.measured import Measured
from relinear.plan.names import split
from relinear.plan.specs import Artefact

TINY = float(np.finfo(np.float32).tiny)
# Distance -> its title, and the ends of its colours, the same in all figures, which are compared.
DISTANCES = {"kl": ("KL of weights", (0.005, 10.0)), "mse": ("MSE of outputs", (1.0e-6, 2.0))}
BESIDE = 5  # columns beside each other
Sides = list[tuple[str, Measured | None, int]]
OF_PLACES = (
    "Weights of one text: a row for each query, a column for each key, in one logarithmic scale of colours.",
    (
        "KL: of the map's weights from softmax attention's, in this head. In an encoder of other depth, a"
        " layer is the one at the same part of it."
    ),
)
OWN_SCALES = "Each panel of bars, points or counts has a scale of its own."


def drawn(artefact: Artefact, measured: Measurements, about: About) -> Drawn:
    """Maps of attention weights. Claims are on readings and need no weights.

    Weights are `softmax.<layer>.<head>` and `method.<layer>.<head>` of the measurement's weights.safetensors.
    Raises FileNotFoundError where it is missing, ValueError for weights that are unpaired or not finite, and
    for heads without distances.
    """
    spec: AttentionMaps | Any = artefact.spec
    runs = {run: measured.get((run, measure)) for run, measure in spec.draws()}
    trainings = {run: [runs[run]] for run in runs}
    for run, measure in spec.draws() if spec.seeds else ():
        further = (m for (name, of), m in measured.items() if of == measure and split(name)[0] == run != name)
        trainings[run] += filter(None, further)
    shown = ("weights", *DISTANCES) if spec.run else ("map",) if spec.places else spec.rows
    cells: dict[str, dict[str, Origin]] = {
        run: dict.fromkeys(shown, found and found.source.file) for run, found in runs.items()
    }

    def look(point: Point) -> Value | str:
        name, column = " at ".join(filter(None, (point.row, point.place))), point.column or ""
        return _over_trainings(
            [
                value_of(found, found and found.find(column, "attention", point.at or None), name, column)
                for found in trainings[point.row]
            ]
        )

    tokens: dict[str, int] = {}  # of the training of each run that had fewest
    for run, found in trainings.items():
        if had := [n for m in found if m for n in trained({run: m.facts}).values()]:
            tokens[run] = min(had)
    judge = partial(judge_claim, artefact, about, look, tokens)
    return Drawn(
        saving(artefact, lambda: _figure(spec, runs, about)),
        judge,
        cells,
        list(dict.fromkeys(m.source for found in trainings.values() for m in found if m)),
    )


def _over_trainings(values: Sequence[Value | str]) -> Value | str:
    """The mean of a number over the trainings of a run, or why one of them has none to judge by."""
    if why := next((value for value in values if isinstance(value, str)), None):
        return why
    first, *more = values
    if not more:
        return first
    value, stderr, n, sd = over_trainings([v.value for v in values], [v.stderr for v in values], first.n)
    distance, freedom = apart(sd, len(values))
    return Value(
        value, stderr, first.name, apart=distance, freedom=freedom, n=n, trainings=len(values), of=first.of
    )


def _figure(spec: AttentionMaps, runs: Mapping[str, Measured | None], about: About) -> Figure:
    title = f"{spec.label}: {spec.says}"
    if spec.run:
        return _figure_of_one(
            runs[spec.run], (title, f"run {spec.run}, {about.where()}", about.demonstration)
        )
    data = ", ".join(
        dict.fromkeys(about.data[measure] for _, measure in spec.draws() if measure in about.data)
    )
    titles = (title, " on ".join(filter(None, (about.where(), data))), about.demonstration)
    first = [(spec.softmax, next(filter(None, runs.values()), None), 0)] if spec.softmax else []
    # The title and the measurement of each column, and which weights of a pair it shows: 0 softmax
    # attention's, which every run has, 1 the method's.
    sides: Sides = [*first, *((title, runs[shown.run], 1) for title, shown in spec.runs.items())]
    if spec.places:
        return _figure_of_places(sides, spec.places, titles, (*OF_PLACES, " ".join(spec.caption)))
    own = OWN_SCALES if set(spec.rows) - {"map", "relative"} else ""
    return _figure_of_runs(sides, spec.rows, titles, (" ".join(spec.caption), own))


# --- one run ---


def _figure_of_one(found: Measured | None, titles: tuple[str | None, ...]) -> Figure:
    """Weights of some heads on the left, the distances of all heads on the right."""
    if found is None:
        return page(0.5, (*titles, NOT_RUN))
    pairs = read_weights(found.folder / "weights.safetensors")
    distances = {metric: per_head(found, metric) for metric in DISTANCES}
    figure = page(0.8 + 2.3 * max(2, len(pairs)), titles)
    left, right = figure.subfigures(1, 2, width_ratios=[5, 3])
    _draw_pairs(left, pairs, distances)
    _draw_heads(right, distances)
    return figure


def _draw_pairs(area: SubFigure, pairs: Pairs, distances: Mapping[str, np.ndarray]) -> None:
    """TRUE and PRED side by side, one row per (layer, head), all with one logarithmic colour scale."""
    axes = area.subplots(len(pairs), 2, squeeze=False, sharex=True, sharey=True)
    for row, ((layer, head), pair) in zip(axes, pairs.items(), strict=True):
        images = [_draw_map(axis, weights) for axis, weights in zip(row, pair, strict=True)]
        kl, mse = (distances[metric][layer, head] for metric in ("kl", "mse"))
        row[0].set_title(f"TRUE: softmax\nlayer {layer}, head {head}")
        row[1].set_title(f"PRED: linear\nKL {kl:.2g}, MSE {mse:.2g}")
    for axis in axes.flat:
        axis.label_outer()
    _bar_of_weights(area, images[0], list(axes.flat), location="bottom")


def _draw_heads(area: SubFigure, distances: Mapping[str, np.ndarray]) -> None:
    """KL and MSE of every head, layers downwards, each with a logarithmic colour scale."""
    axes = area.subplots(1, 2, sharey=True)
    for axis, (metric, (title, ends)) in zip(axes, DISTANCES.items(), strict=True):
        values = distances[metric]
        image = axis.imshow(
            values, norm=LogNorm(*ends, clip=True), cmap="viridis", interpolation="nearest", aspect="auto"
        )
        axis.set_title(f"{title}\nmean {values.mean():.2g}")
        axis.set(xlabel="head", ylabel="layer" if axis is axes[0] else "")
        for ruler in (axis.xaxis, axis.yaxis):
            ruler.set_major_locator(MaxNLocator(nbins=8, integer=True))
        bar = area.colorbar(image, ax=axis, location="bottom", extend="both", aspect=12)
        bar.set_label("log scale")
        bar.set_ticks(ends, labels=[f"{tick:.2g}" for tick in ends])  # more ticks run into each other
        bar.minorticks_off()


def _draw_map(axis: Axes, weights: np.ndarray) -> AxesImage:
    """The weights as colours, blank where a causal map has none; the same colours in every figure.

    Uniform attention over a text of T tokens is 1 / T; a hundredth of that, and all below, is one colour.
    """
    future = np.triu(np.ones_like(weights, dtype=bool), k=1)
    shown = np.ma.array(weights, mask=future) if not weights[future].any() else weights
    image = axis.imshow(
        shown,
        norm=LogNorm(vmin=0.01 / len(weights), vmax=1.0, clip=True),
        cmap="magma",
        interpolation="nearest",
    )
    axis.set(xlabel="key position", ylabel="query position")
    for ruler in (axis.xaxis, axis.yaxis):
        ruler.set_major_locator(MaxNLocator(nbins=4, integer=True))
    axis.spines[["top", "right"]].set_visible(False)
    return image


def _bar_of_weights(
    area: Figure | SubFigure, image: AxesImage, axes: list[Axes], location: str = "right"
) -> None:
    """One colour bar for all weights, as thin in a tall figure as in a low one."""
    thin = 40 if location == "bottom" else 6 * area.figure.get_figheight()
    bar = area.colorbar(
        image,
        ax=axes,
        location=location,
        label="weight, log scale",
        extend="min",
        aspect=thin,
        extendfrac=0.02,
    )
    powers = [10.0**power for power in range(int(np.ceil(np.log10(image.norm.vmin))), 1)]
    bar.set_ticks(powers, labels=[f"{weight:g}" for weight in powers])
    bar.minorticks_off()


# --- several runs ---


def _columns(
    sides: Sides, rows: int, height: float, titles: tuple[str | None, ...], caption: Iterable[str]
) -> tuple[Figure, list[np.ndarray]]:
    """A figure in which at most `BESIDE` columns stand beside each other, and the axes [rows] of each
    column."""
    blocks = -(-len(sides) // BESIDE)
    beside = -(-len(sides) // blocks)
    figure = page(blocks * rows * height, titles, caption)
    grid = figure.subplots(blocks * rows, beside, squeeze=False)
    columns = [grid[block * rows : (block + 1) * rows, i] for block in range(blocks) for i in range(beside)]
    for column in columns[len(sides) :]:
        for axis in column:
            axis.set_axis_off()
    for i, column in enumerate(columns[: len(sides)]):
        if sides[i][1] is None:
            for axis in column:
                axis.set(xticks=[], yticks=[])
                axis.text(0.5, 0.5, NOT_RUN, ha="center", va="center", transform=axis.transAxes)
    return figure, columns[: len(sides)]


def _inner(columns: list[np.ndarray]) -> None:
    """Leave out the names of y axes but in the first column of a row."""
    for column in columns:
        for axis in column:
            if not axis.get_subplotspec().is_first_col():
                axis.set_ylabel("")


def _figure_of_runs(
    sides: Sides, rows: tuple[str, ...], titles: tuple[str | None, ...], caption: Iterable[str]
) -> Figure:
    """A column for each run, of the head that its measurement kept; `rows` as the spec names them."""
    figure, columns = _columns(sides, len(rows), 1.9, titles, caption)
    images: dict[AxesImage, Axes] = {}
    for (title, found, kind), column in zip(sides, columns, strict=True):
        column[0].set_title(title)
        if found is None:
            continue
        pairs = read_weights(found.folder / "weights.safetensors")
        ((layer, head), own), *_ = pairs.items()
        points = (
            read_points(found.folder / "points.safetensors") if {"points", "scores"} & set(rows) else None
        )
        if rows != ("relative",):
            column[0].set_title(f"{title}\nlayer {layer}, head {head}")
        for axis, row in zip(column, rows, strict=True):
            if row == "map":
                images[_draw_map(axis, own[kind])] = axis
            elif row == "relative":
                _draw_relative(axis, [(true, (true, pred)[kind]) for true, pred in pairs.values()])
            else:
                ROWS[row](axis, own[kind], points)
            axis.spines[["top", "right"]].set_visible(False)
    _inner(columns)
    if images:
        _bar_of_weights(figure, next(iter(images)), figure.axes)
    return figure


def _figure_of_places(
    sides: Sides, places: tuple[tuple[int, int], ...], titles: tuple[str | None, ...], caption: Iterable[str]
) -> Figure:
    """A row for each place. The title of a method's map has the KL divergence from softmax attention's
    weights to the method's."""
    figure, columns = _columns(sides, len(places), 1.85, titles, caption)
    images = []
    for (title, found, kind), column in zip(sides, columns, strict=True):
        column[0].set_title(title)
        if found is None:
            continue
        pairs = read_weights(found.folder / "weights.safetensors")
        for axis, place in zip(column, places, strict=True):
            at = next((r for r in found.all("kl", "text") if (r.at["layer"], r.at["head"]) == place), None)
            if place not in pairs or at is None:
                raise ValueError(
                    f"{found.source.file}: nothing of layer {place[0]}, head {place[1]}; have {sorted(pairs)}"
                )
            images.append(_draw_map(axis, pairs[place][kind]))
            above = title if axis is column[0] else ""
            axis.set_title("\n".join(filter(None, (above, "" if kind == 0 else f"KL {at.value:.2f}"))))
            axis.set(
                ylabel=f"layer {at.at['own_layer']}, head {at.at['own_head']}\nquery position",
                xlabel="key position" if axis is column[-1] else "",
            )
    _inner(columns)
    if images:
        _bar_of_weights(figure, images[0], figure.axes)
    return figure


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
    axis.set(xlabel="q.k / sqrt(d), less the largest", ylabel="weight / the largest", ylim=(-0.03, 1.03))


ROWS = {"query": _draw_query, "points": _draw_points, "scores": _draw_scores}
