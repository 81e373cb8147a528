"""Lizard in text: points of MMLU, the kernel's speed and the window's cache, from the paper's tables."""

from pathlib import Path

from relinear.draw.intext import Said, ours, printed, values, write

GLA, LIZARD = 4.30, 3.25  # ms, section 4.3 and Figure 6
WINDOW, META = 128, 4
EXTRAPOLATES = "Mamba2-LLaMA-3-8B"  # the linearized teacher whose context is not bounded


def draw(spec, measured, about, out: Path) -> list[Path]:
    """Write intext.csv and intext.md."""
    theirs = printed(__file__, "table1", "mmlu_acc", "Llama-3-8B")
    teacher, lolcats, lizard, mamba = (
        theirs[row] for row in ("teacher", "lolcats_window", "lizard", EXTRAPOLATES)
    )
    got = values(measured, dict.fromkeys(("teacher", "lolcats_window", "lizard"), "mmlu"), "acc", "mmlu")
    held = values(measured, {"lizard": "state_bytes"}, "positions", "model")
    rows = [
        Said(
            "Lizard has 18 points of MMLU more than earlier methods that extrapolate",
            "18",
            f"{lizard - mamba:.1f} more than {EXTRAPOLATES}",
            round(lizard - mamba) == 18,
        ),
        Said(
            "It has 8 points more than LoLCATs",
            "8",
            f"{lizard - lolcats:.1f}",
            round(lizard - lolcats) == 8,
            ours(got, lambda t, lo, li: f"{100 * (li - lo):.1f}"),
        ),
        Said(
            "LoLCATs is 13.8 points behind its teacher",
            "13.8",
            f"{teacher - lolcats:.1f}",
            round(teacher - lolcats, 1) == 13.8,
            ours(got, lambda t, lo, li: f"{100 * (t - lo):.1f}"),
        ),
        Said(
            "It recovers its teacher nearly without loss",
            "near-lossless",
            f"{teacher - lizard:.1f} points of MMLU behind",
            None,
            ours(got, lambda t, lo, li: f"{100 * (t - li):.1f} points behind"),
        ),
        Said(
            "The kernel takes 32 % less time",
            "32 %",
            f"{100 * (1 - LIZARD / GLA):.0f} % less time, {100 * (GLA / LIZARD - 1):.0f} % more speed",
            round(100 * (1 - LIZARD / GLA)) == 32,
        ),
        Said(
            "Inference keeps w + m keys and values",
            f"{WINDOW + META}",
            f"{WINDOW} + {META}",
            True,
            ours(held, lambda positions: f"{positions:.0f} positions"),
        ),
    ]
    return write(spec, about, out, rows)
