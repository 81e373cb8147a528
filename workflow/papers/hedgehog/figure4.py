"""Hedgehog Figure 4: accuracy on associative recall against the entropy of attention weights; a row is a
point at its first two columns."""

import itertools

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from scipy.stats import spearmanr

from relinear.draw.pictures import page
from relinear.draw.render import NOT_RUN
from relinear.draw.style import look_of

# distances in points at which a label may stand from its point; the first free place is taken
AWAY = (9, 22, 36)
FEWEST, LEVEL = 4, 0.05  # points that have a correlation, and the p-value below which it is told from none
AROUND = ((1, 0), (0, 1), (0, -1), (-1, 0), (0.7, 0.7), (0.7, -0.7), (-0.7, 0.7), (-0.7, -0.7))


def figure(spec, rows, about) -> Figure:
    """The points, each with its name beside it. `rows`: the rows of the table (`relinear.draw.cells.Row`)."""
    first, second, *_ = spec.columns
    places = [[row.cells[column.name].value for column in (first, second)] for row in rows]
    caption = correlation([tuple(xy) for xy in places if all(isinstance(value, float) for value in xy)])
    shown = page(
        4.6,
        [f"{spec.label}: {spec.says}", about.where(), about.demonstration],
        [" ".join(spec.caption), *caption],
    )
    axis = shown.subplots()
    missing, points = [], list[tuple[str, float, float]]()
    for i, row in enumerate(rows):
        text = next((str(t) for t in row.line.text.values() if t is not None), row.line.name)
        x, y = (row.cells[column.name] for column in (first, second))
        if not isinstance(x.value, float) or not isinstance(y.value, float):
            missing.append(text)
            continue
        errors = [cell.stderr if isinstance(cell.stderr, float) else None for cell in (x, y)]
        look = look_of(row.line.run or row.line.name, i)
        axis.errorbar(
            x.value,
            y.value,
            errors[1],
            errors[0],
            fmt=look.marker,
            markersize=6,
            capsize=2,
            elinewidth=0.8,
            color=look.color,
        )
        points.append((text, x.value, y.value))
    for column, ruler in ((first, axis.set_xlabel), (second, axis.set_ylabel)):
        ruler(column.heading + (", %" if column.unit == "percent" else ""))
    if missing:
        axis.set_title(f"{NOT_RUN}: {', '.join(missing)}", color="0.4")
    axis.margins(0.12)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    _label(shown, axis, points)
    return shown


def correlation(points: list[tuple[float, float]]) -> list[str]:
    """The rank correlation of accuracy with entropy, and what it says of the paper's; not of few points."""
    if len(points) < FEWEST:
        return []
    rho = spearmanr(*zip(*points, strict=True))
    told = (
        "not told from none"
        if not rho.pvalue < LEVEL
        else "as in the paper"
        if rho.statistic < 0
        else "against the paper"
    )
    return [
        "In the paper accuracy falls where entropy rises. Here Spearman's rank correlation of the two over"
        f" the {len(points)} points is {rho.statistic:.2f} (p = {rho.pvalue:.2g}): {told}."
    ]


def _label(figure: Figure, axis: Axes, points: list[tuple[str, float, float]]) -> None:
    """Write each point's name beside it, over no other point and no other name, and a thin line to those that
    stand further away."""
    figure.draw_without_rendering()  # points have no place before this
    renderer, size = FigureCanvasAgg(figure).get_renderer(), figure.dpi / 72
    centres = axis.transData.transform([(x, y) for _, x, y in points]) if points else []
    taken = [Bbox.from_extents(*(centre - 5 * size), *(centre + 5 * size)) for centre in centres]
    for (text, x, y), own in zip(points, list(taken), strict=True):
        others = [box for box in taken if box is not own]
        for away, (dx, dy) in itertools.product(AWAY, AROUND):
            across, up = (("left", "center", "right")[1 - (d > 0) + (d < 0)] for d in (dx, dy))
            place = {"ha": across, "va": {"left": "bottom", "center": "center", "right": "top"}[up]}
            arrow = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.6} if away > AWAY[0] else None
            label = axis.annotate(
                text, (x, y), (away * dx, away * dy), textcoords="offset points", arrowprops=arrow, **place
            )
            label.update_positions(renderer)
            box = Text.get_window_extent(label, renderer)  # an Annotation's own has the line in it
            if (
                not any(box.overlaps(other) for other in others)
                and axis.bbox.padded(4 * size).containsx(box.x1)
                and axis.bbox.containsx(box.x0)
            ):
                break
            if (away, (dx, dy)) != (AWAY[-1], AROUND[-1]):
                label.remove()
        taken.append(box)
