"""Hedgehog Figure 6: one layer of 12 heads of 64, forward: milliseconds and peak memory up to 32k tokens."""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from relinear.draw.kernels import earlier, look_at, read
from relinear.draw.pictures import page
from relinear.draw.style import look_of

SHAPE = {"mode": "forward", "B": "1", "H": "12", "D": "64"}
TITLE = "Hedgehog Figure 6: one layer, 12 heads of 64, forward, batch 1, bfloat16, one H200"
LINES = {  # op, provider (None: any but the torch form) -> its name and its look
    ("linear_attention", "relinear"): ("Hedgehog (fused)", look_of("hedgehog")),
    ("softmax attention", None): ("softmax, FlashAttention", look_of("softmax")),
    ("taylor map", None): ("Taylor map (torch)", look_of("taylor")),
}
NAMES = {
    "hedgehog": ("linear_attention", "relinear"),
    "softmax": ("softmax attention", "SDPA causal"),
    "taylor": ("taylor map", "torch chunked"),
}
PLACES = {"rows": NAMES, "columns": ("ms", "gib"), "axes": {"T": 32768}}


def figure(spec, measured, about) -> Figure:
    """Time and memory against the length. Lines with rows of another commit than the last are starred."""
    path = about.files.get(spec.inputs[0], Path(spec.inputs[0]))
    rows = [row for row in read(path) if all(row[k] == v for k, v in SHAPE.items())]
    shown = page(3.0, [TITLE], ["* measured at another commit" * any(earlier(row, rows) for row in rows)])
    axes = shown.subplots(1, 2)
    for (op, provider), (label, look) in LINES.items():
        own = sorted(
            (r for r in rows if r["op"] == op and provider in (None, r["provider"])),
            key=lambda r: int(r["T"]),
        )
        label += "*" * any(earlier(r, rows) for r in own)
        for axis, column in zip(axes, ("ms", "gib"), strict=True):
            axis.plot(
                [int(r["T"]) for r in own],
                [float(r[column]) for r in own],
                marker=look.marker,
                markersize=4,
                label=label,
                color=look.color,
            )
    for axis, ylabel in zip(axes, ("time, ms", "peak memory above the inputs, GiB"), strict=True):
        axis.set(yscale="log", xlabel="sequence length, tokens", ylabel=ylabel)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(
            FuncFormatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}")
        )
        axis.yaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    shown.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return shown


def look(spec, about):
    """Times and memory of these lines, by NAMES."""
    return look_at(about.files.get(spec.inputs[0], Path(spec.inputs[0])), SHAPE, NAMES)
