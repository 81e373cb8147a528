"""Lizard Figure 3: one prompt with its pass keys, the text between them left out, and the models' answers."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from relinear.draw.render import NOT_DEFINED, NOT_RUN, write_figure
from relinear.plan.items import read_items

WIDTH = 100  # characters of a line
SIZE, LEADING, MARGIN = 9, 13, 14  # points
CHARACTER = 0.602 * SIZE  # DejaVu Sans Mono, which matplotlib brings
STYLES = {
    "plain": {},
    "left out": {"color": "0.45"},
    "heading": {"weight": "bold"},
    "key": {"bbox": {"facecolor": "0.85", "pad": 0.6, "linewidth": 0}},
    "asked": {"weight": "bold", "bbox": {"facecolor": "#ffd27f", "pad": 0.6, "linewidth": 0}},
}

Piece = tuple[str, str]  # text and the name of its style


def draw(spec, measured, about, out: Path) -> list[Path]:
    """Write figure3.png and figure3.pdf."""
    found = {run: measured[run, measure] for run, measure in spec.reads()}
    examples = {run: read_items(m.folder)[0] for run, m in found.items() if m}
    title = f"{spec.label}: {spec.says}; {about.where()}"
    pieces = [(line, "heading") for line in (title, *([about.demonstration] if about.demonstration else []))]
    pieces = [piece for line in pieces for piece in (line, ("\n", "plain"))] + [("\n", "plain")]
    if examples:
        example = next(iter(examples.values()))
        if any(other["prompt"] != example["prompt"] for other in examples.values()):
            raise ValueError(
                f"{spec.label}: the prompts of {' and '.join(examples)} are not the same; measure them with"
                " one tokenizer and seed"
            )
        right = f"{example['keys'][example['asked']]}."
        pieces += [
            *prompt(example, spec.options["context"]),
            ("\n\n", "plain"),
            ("right: ", "heading"),
            (right, "asked"),
        ]
    for run, m in found.items():
        pieces += [("\n", "plain"), (f"{run}: ", "heading"), (said(examples.get(run), m), "plain")]
    figure = page(pieces)
    made = [out / f"figure3.{suffix}" for suffix in spec.makes]
    # otherwise characters are whole pixels wide, and pieces drift apart
    with matplotlib.rc_context({"text.hinting": "none"}):
        for path in made:
            write_figure(path, figure)
    return made


def said(example: dict | None, found) -> str:
    """A model's answer and whether it is right, or the reason why there is none."""
    if example is None:
        return NOT_RUN
    score = found.find("exact_match")
    return (
        f"{NOT_DEFINED}: {score.why}"
        if score.value is None
        else f"{example['answer'].strip()!r}, {'right' if score.value else 'wrong'}"
    )


def prompt(example: dict, context: int) -> Iterator[Piece]:
    """The prompt with its keys marked; of what is further than `context` characters from a key, the beginning
    or the end, how much there is."""
    text, keys = example["prompt"], example["keys"]
    places = [next(re.finditer(rf"(?<!\d){key}(?!\d)", text)).span() for key in keys]
    bounds = [(0, 0), *places, (len(text), len(text))]
    styles = ["plain", *("asked" if i == example["asked"] else "key" for i in range(len(keys))), "plain"]
    for ((_, end), _), ((begin, stop), style) in itertools.pairwise(zip(bounds, styles, strict=True)):
        between = text[end:begin]
        if len(between) > 2 * context + 40:
            first, last = between[:context].rpartition(" ")[0], between[-context:].partition(" ")[2]
            yield from (
                (first, "plain"),
                (f" [... {len(between) - len(first) - len(last):,} characters ...] ", "left out"),
                (last, "plain"),
            )
        else:
            yield between, "plain"
        yield text[begin:stop], style


def page(pieces: list[Piece]) -> Figure:
    """Text of a fixed width as a picture, each piece in its style."""
    text, styles = "".join(piece for piece, _ in pieces), [style for piece, style in pieces for _ in piece]
    lines = list(wrapped(text))
    width, height = WIDTH * CHARACTER + 2 * MARGIN, len(lines) * LEADING + 2 * MARGIN
    figure = Figure(figsize=(width / 72, height / 72))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, width), ylim=(height, 0))
    axis.set_axis_off()
    for row, (begin, end) in enumerate(lines):
        for style, run in itertools.groupby(range(begin, end), styles.__getitem__):
            places = list(run)
            x, y = MARGIN + (places[0] - begin) * CHARACTER, MARGIN + (row + 0.8) * LEADING
            piece = text[places[0] : places[-1] + 1]
            axis.text(
                x,
                y,
                piece,
                family="DejaVu Sans Mono",
                fontsize=SIZE,
                va="baseline",
                parse_math=False,
                **STYLES[style],
            )
    return figure


def wrapped(text: str) -> Iterator[tuple[int, int]]:
    """Where each line begins and ends: at line breaks, and at the last space that fits."""
    at = 0
    for paragraph in text.split("\n"):
        end = at + len(paragraph)
        while end - at > WIDTH:
            space = text.rfind(" ", at, at + WIDTH + 1)
            stop = space if space > at else at + WIDTH
            yield at, stop
            at = stop + (space > at)
        yield at, end
        at = end + 1
