"""Lizard Figure 6: milliseconds of every measured kernel at B16 T2048 H32 D128, forward, ours in blue."""

from pathlib import Path

from matplotlib.figure import Figure

from relinear.draw.kernels import earlier, look_at, read
from relinear.draw.render import write_figure
from relinear.draw.style import look_of

NAMES = {"gate a channel": ("gated_linear_attention", "relinear"), "GLA": ("gated_linear_attention", "fla chunk_gla (unnormalised)")}
SHAPE = {"mode": "forward", "B": "16", "T": "2048", "H": "32", "D": "128"}
TITLE = "Lizard Figure 6: time of the attention kernels, B=16 T=2048 H=32 D=128, bfloat16, one H200\n"
PAPER = "(the paper, on an A100: GLA 4.30 ms, Lizard 3.25 ms; peers of linear attention are given their features)"


def draw(spec, measured, about, out: Path) -> list[Path]:
    """Write figure6.png and figure6.pdf. Rows measured at another commit than the last are starred."""
    path = about.files.get(spec.inputs[0], Path(spec.inputs[0]))
    rows = [row for row in read(path) if all(row[k] == v for k, v in SHAPE.items())]
    rows.sort(key=lambda r: float(r["ms"]))
    names = [f"{r['op']}: {r['provider']}" + "*" * earlier(r, rows) for r in rows]
    figure = Figure(figsize=(10, 0.32 * len(rows) + 1.6), layout="constrained")
    axis = figure.subplots()
    bars = axis.barh(names, [float(r["ms"]) for r in rows], color=[look_of("lizard").color if r["provider"] == "relinear" else "0.6" for r in rows])
    axis.bar_label(bars, [f"{float(r['ms']):.2f}" for r in rows], padding=3, fontsize=8)
    axis.set(xscale="log", xlim=(0.5 * float(rows[0]["ms"]), 3 * float(rows[-1]["ms"])))
    axis.set_xlabel("forward, ms (log scale)" + "; * measured at another commit" * any(name.endswith("*") for name in names))
    axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(TITLE + PAPER, fontsize=9)
    made = [out / f"figure6.{suffix}" for suffix in spec.makes]
    for path in made:
        write_figure(path, figure)
    return made


def look(spec, about):
    """Times of this shape, by NAMES."""
    return look_at(about.files.get(spec.inputs[0], Path(spec.inputs[0])), SHAPE, NAMES)
