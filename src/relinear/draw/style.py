"""The look of a method in every figure: one colour, one marker, one hatch. The colours stay apart under
deuteranopia; in grey the markers do.

A run takes the look of the method in its name: `lizard_shared` and `lizard-seed1` look like `lizard`. Runs of
one method in one figure differ by the style of their lines.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple


class Look(NamedTuple):
    """Colour, marker and hatch, as matplotlib names them."""

    color: str
    marker: str
    hatch: str


LOOKS = {
    "teacher": Look("#000000", "o", ""),
    "teacher_lora": Look("#8c8c8c", "s", "//"),
    "t2r": Look("#a6761d", "v", "\\\\"),
    "hedgehog": Look("#ddcc77", "P", "++"),
    "supra": Look("#332288", "X", "xx"),
    "lolcats_linear": Look("#88ccee", "<", ".."),
    "lolcats_window": Look("#2c7fb8", "D", "oo"),
    "lizard": Look("#117733", "^", "--"),
    "window": Look("#e69f00", "h", "||"),  # a window and no linear part: the control
}
ALSO = {"softmax": "teacher", "lolcats": "lolcats_linear"}  # other words for these methods in names
# in turn
OTHERS = tuple(
    Look(grey, marker, hatch)
    for grey, marker, hatch in (("0.35", "*", "///"), ("0.55", "p", "ooo"), ("0.7", ">", "..."))
)
LINES = ("-", "--", ":", "-.")
FILLS = ("full", "none", "left", "bottom")


def method_of(run: str) -> str | None:
    """The entry of `LOOKS` for a run: the first of these names in its own, and of two that begin there the
    longer; None where there is none."""
    words = f"_{re.sub(r'[-@. ]', '_', run.lower())}_"
    found = [(words.index(f"_{name}_"), -len(name), name) for name in (*LOOKS, *ALSO) if f"_{name}_" in words]
    name = min(found)[-1] if found else None
    return ALSO.get(name, name) if name else None


def look_of(run: str, i: int = 0) -> Look:
    """The look of a run. `i`, its number in the figure, chooses the look where the run is of no method in
    `LOOKS`."""
    return LOOKS[method] if (method := method_of(run)) else OTHERS[i % len(OTHERS)]


def lines(runs: Sequence[str]) -> list[dict[str, Any]]:
    """The options by which matplotlib draws the lines of these runs. A run that comes twice has one line; the
    second, third ... of a method are dashed, dotted ...

    Their markers are hollow, or half so.
    """
    kinds: dict[Look, list[str]] = {}
    styles = []
    for i, run in enumerate(runs):
        look = look_of(run, i)
        own = kinds.setdefault(look, [])
        if run not in own:
            own.append(run)
        k = own.index(run)
        width = 2.2 if look == LOOKS["teacher"] and not k else 1.6
        face = (
            {"markerfacecolor": look.color if not k else "none"}
            if k < 2
            else {"fillstyle": FILLS[k % len(FILLS)], "markerfacecoloralt": "white"}
        )
        styles.append(
            {
                "color": look.color,
                "marker": look.marker,
                "linestyle": LINES[k % len(LINES)],
                "linewidth": width,
            }
            | face
        )
    return styles
