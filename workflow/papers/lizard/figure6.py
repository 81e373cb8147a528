"""Lizard Figure 6: milliseconds of every measured kernel at B16 T2048 H32 D128, forward, ours in green."""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from relinear.draw.kernels import earlier, look_at, read
from relinear.draw.render import write_figure
from relinear.draw.style import look_of

NAMES = {"gate a channel": ("gated_linear_attention", "relinear"), "GLA": ("gated_linear_attention", "fla chunk_gla (unnormalised)")}
SHAPE = {"B": "16", "T": "2048", "H": "32", "D": "128"}
TITLE = "Lizard Figure 6: time of the attention kernels, B=16 T=2048 H=32 D=128, bfloat16, one H200\n"
PAPER = "(the paper, on an A100: GLA 4.30 ms, Lizard 3.25 ms; peers of linear attention are given their features)"


def draw(spec, measured, about, out: Path) -> list[Path]:
    """Write figure6.png and figure6.pdf. Rows measured at another commit than the last are starred."""
    path = about.files.get(spec.inputs[0], Path(spec.inputs[0]))
    rows = [row for row in read(path) if all(row[k] == v for k, v in {**SHAPE, "mode": "forward"}.items())]
    rows.sort(key=lambda r: float(r["ms"]))
    names = [f"{r['op']}: {r['provider']}" + "*" * earlier(r, rows) for r in rows]
    figure = Figure(figsize=(10, 0.32 * len(rows) + 1.6), layout="constrained")
    axis = figure.subplots()
    for name, r in zip(names, rows, strict=True):  # points: a bar would need a zero, which a logarithmic axis lacks
        ours = r["provider"] == "relinear"
        axis.plot(float(r["ms"]), name, look_of("lizard").marker if ours else "o", color=look_of("lizard").color if ours else "0.6")
        axis.annotate(f"{float(r['ms']):.2f}", (float(r["ms"]), name), (7, 0), textcoords="offset points", va="center", fontsize=8)
    axis.set(xscale="log", xlim=(0.9 * float(rows[0]["ms"]), 1.3 * float(rows[-1]["ms"])))
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.grid(alpha=0.25)
    axis.set_xlabel("forward, ms (log scale)" + "; * measured at another commit" * any(name.endswith("*") for name in names))
    axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(TITLE + PAPER, fontsize=9)
    made = [out / f"figure6.{suffix}" for suffix in spec.makes]
    for path in made:
        write_figure(path, figure)
    return made


def look(spec, about):
    """Times of this shape in a mode, by NAMES."""
    return look_at(about.files.get(spec.inputs[0], Path(spec.inputs[0])), SHAPE, NAMES)
