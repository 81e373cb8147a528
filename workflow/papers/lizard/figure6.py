"""Lizard Figure 6: milliseconds of every measured kernel at B16 T2048 H32 D128, forward, ours in green."""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from relinear.draw.kernels import earlier, look_at, read
from relinear.draw.pictures import page
from relinear.draw.style import look_of

NAMES = {
    "gate a channel": ("gated_linear_attention", "relinear"),
    "GLA": ("gated_linear_attention", "fla chunk_gla (unnormalised)"),
}
PLACES = {"rows": NAMES, "columns": ("ms", "gib"), "axes": {"mode": ("forward", "forward+backward")}}
SHAPE = {"B": "16", "T": "2048", "H": "32", "D": "128"}
TITLE = "Lizard Figure 6: time of the attention kernels, B=16 T=2048 H=32 D=128, bfloat16, one H200"
PAPER = (
    "The paper, on an A100: GLA 4.30 ms, Lizard 3.25 ms. Green: ours. Peers of linear attention are given"
    " their features."
)


def figure(spec, measured, about) -> Figure:
    """A point a kernel. Rows measured at another commit than the last are starred."""
    path = about.files.get(spec.inputs[0], Path(spec.inputs[0]))
    rows = [row for row in read(path) if all(row[k] == v for k, v in {**SHAPE, "mode": "forward"}.items())]
    groups: dict[str, list[dict[str, str]]] = {}  # op -> its rows, ours first
    for row in sorted(rows, key=lambda row: (row["provider"] != "relinear", float(row["ms"]))):
        groups.setdefault(row["op"], []).append(row)
    lines = [line for op, own in groups.items() for line in (op, *own)]
    shown = page(
        0.2 * len(lines) + 0.5,
        [TITLE],
        [PAPER, "* measured at another commit" * any(earlier(row, rows) for row in rows)],
    )
    axis = shown.subplots()
    for y, line in enumerate(lines):  # points: a bar would need a zero, which a logarithmic axis lacks
        if isinstance(line, str):
            axis.axhspan(y - 0.5, y + 0.5, color="0.93", zorder=0)
            continue
        ours, ms = line["provider"] == "relinear", float(line["ms"])
        axis.plot(
            ms, y, look_of("lizard").marker if ours else "o", color=look_of("lizard").color if ours else "0.6"
        )
        axis.annotate(f"{ms:.2f}", (ms, y), (7, 0), textcoords="offset points", va="center")
    names = [
        line if isinstance(line, str) else f"{line['provider']}{'*' * earlier(line, rows)}" for line in lines
    ]
    axis.set_yticks(range(len(lines)), labels=names)
    for name, line in zip(axis.get_yticklabels(), lines, strict=True):
        name.set_weight("bold" if isinstance(line, str) else "normal")
    times = [float(row["ms"]) for row in rows]
    axis.set(
        xscale="log",
        xlim=(0.9 * min(times), 1.4 * max(times)),
        ylim=(len(lines) - 0.5, -0.5),
        xlabel="forward, ms (log scale)",
    )
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.grid(alpha=0.25, axis="x")
    axis.spines[["top", "right"]].set_visible(False)
    return shown


def look(spec, about):
    """Times of this shape in a mode, by NAMES."""
    return look_at(about.files.get(spec.inputs[0], Path(spec.inputs[0])), SHAPE, NAMES)
