"""Pathfinder (Linsley et al. 2018) with the settings of Long Range Arena's easiest images, 32 x 32 (Tay et
al. 2021).

Two dashed contours of 14 dashes begin 7 pixels apart and grow side by side. One end of a contour has a disc,
and the other disc is on the other end of the same contour (class 1) or of the other one (class 0). Up to five
shorter contours are there to distract. No dash comes nearer to a dash of another contour than the gap in its
own.

A dash is 2 long and 0.5 wide; gaps are 2, from the end of a margin of 1 to the next. A dash turns from the
one before by an angle with probability proportional to the square of its cosine. Discs have radius 1.5.
Distractors have a third of the dashes. The paper's code draws at twice the size and shrinks; here a pixel has
the part that a dash covers, by its distance. Contrast 2 x 0.75 is cut at white.
"""

import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from relinear.get.arena import Example

VOCABULARY = 256
SIDE = 32  # pixels, as are the next ones
DASH, THICKNESS, MARGIN, PADDING, APART, RADIUS = 2.0, 0.5, 1.0, 1, 7.0, 1.5
DASHES, DISTRACTOR_DASHES, DISTRACTORS = 14, 14 // 3, 20 // (14 // 3)
CONTRAST = 2 * 0.75
RETRIES = 4  # of a distractor that finds no way
ANGLES = np.arange(48) * (2 * math.pi / 48)
HEADINGS = np.stack([np.sin(ANGLES), np.cos(ANGLES)], 1)  # [48, 2], rows and columns
# relative probability of a dash's angle to the one before
TURNS = np.maximum(np.cos(ANGLES).round(12), 0) ** 2
ALONG = np.linspace(0.0, DASH, 5)  # where a dash is looked at
ROWS, COLUMNS = np.divmod(np.arange(SIDE * SIDE), SIDE)  # of each pixel


class Picture(NamedTuple):
    """An image ``[32, 32]`` (uint8) and its class; the dashes of each contour ``[n, 2, 2]``, start and end,
    its two discs ``[2, 2]``."""

    image: np.ndarray
    connected: int
    contours: list[np.ndarray]
    discs: np.ndarray


class Contour:
    """A contour that grows dash by dash, away from those that are there."""

    def __init__(self, tail: np.ndarray, angle: int):
        self.angle = angle
        self.pivot = tail - MARGIN * HEADINGS[angle]  # where the gap before a dash begins to be its own
        self.dashes = [np.stack([tail, tail + DASH * HEADINGS[angle]])]

    def extend(self, rng: np.random.Generator, taken: np.ndarray) -> bool:
        """Add a dash on pixels that are not in `taken` ``[32, 32]``. False: there is no way."""
        pivot = self.pivot + (DASH + 2 * MARGIN) * HEADINGS[self.angle]
        chance = np.cumsum(np.roll(TURNS, self.angle) * free(pivot + MARGIN * HEADINGS, HEADINGS, taken))
        if not chance[-1]:
            return False
        self.pivot, self.angle = pivot, int(np.searchsorted(chance, rng.random() * chance[-1], side="right"))
        tail = pivot + MARGIN * HEADINGS[self.angle]
        self.dashes.append(np.stack([tail, tail + DASH * HEADINGS[self.angle]]))
        return True


def free(tails: np.ndarray, headings: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """Which of the dashes from `tails` ``[n, 2]`` along `headings` lie on no taken pixel, and within the
    image."""
    points = np.rint(tails[:, None] + ALONG[:, None] * headings[:, None]).astype(int)
    inside = ((points >= 0) & (points < SIDE)).all((1, 2))
    row, column = np.clip(points, 0, SIDE - 1).transpose(2, 0, 1)
    return inside & ~taken[row, column].any(1)


def distances(dashes: np.ndarray) -> np.ndarray:
    """The distance of each pixel from each dash ``[n, 1024]``."""
    (row, column), (down, right) = dashes[:, 0].T[..., None], (dashes[:, 1] - dashes[:, 0]).T[..., None]
    row, column = ROWS - row, COLUMNS - column
    at = np.minimum(np.maximum((row * down + column * right) / DASH**2, 0), 1)
    return np.hypot(row - at * down, column - at * right)


def taken_by(*dashes: np.ndarray) -> np.ndarray:
    """The pixels of dashes and of the margin around them ``[32, 32]``."""
    return (distances(np.stack(dashes)).min(0) <= MARGIN + THICKNESS).reshape(SIDE, SIDE)


def draw(rng: np.random.Generator, connected: int) -> Picture:
    """A random image of a class."""
    while (contours := _two_contours(rng)) is None:
        pass
    drawn, taken = contours
    for _ in range(DISTRACTORS):
        for _ in range(RETRIES):
            if (distractor := _distractor(rng, taken)) is not None:
                drawn.append(distractor)
                taken |= taken_by(*distractor)
                break
    origin = rng.integers(2)
    end = origin if connected else 1 - origin
    discs = np.stack([drawn[origin][0, 0], drawn[end][-1, 1]])
    return Picture(rendered(drawn, discs), connected, drawn, discs)


def _two_contours(rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray] | None:
    """The dashes of two contours that have all of them, and the pixels taken; None where they found no
    way."""
    taken = np.ones((SIDE, SIDE), bool)
    taken[PADDING:-PADDING, PADDING:-PADDING] = False
    first = rng.integers(2 * APART, SIDE - 2 * APART, size=2) * 1.0
    second = np.rint(first + APART * HEADINGS[rng.integers(len(ANGLES))])
    contours = [Contour(tail, int(rng.integers(len(ANGLES)))) for tail in (first, second)]
    lasts = [taken_by(contour.dashes[-1]) for contour in contours]
    for one, other in ((0, 1), (1, 0)):
        if not free(contours[one].dashes[0][:1], HEADINGS[[contours[one].angle]], taken | lasts[other])[0]:
            return None
    for _ in range(DASHES - 1):
        for one, other in ((0, 1), (1, 0)):
            if not contours[one].extend(rng, taken | lasts[other]):
                return None
            taken |= lasts[one]
            lasts[one] = taken_by(contours[one].dashes[-1])
    return [np.stack(contour.dashes) for contour in contours], taken | lasts[0] | lasts[1]


def _distractor(rng: np.random.Generator, taken: np.ndarray) -> np.ndarray | None:
    """The dashes of a short contour beside what is taken; None where it found no way."""
    angle = int(rng.integers(len(ANGLES)))
    tail = rng.integers(PADDING, SIDE - PADDING, size=2) * 1.0
    if not free(tail[None], HEADINGS[[angle]], taken)[0]:
        return None
    contour, around = Contour(tail, angle), taken
    for _ in range(DISTRACTOR_DASHES - 1):
        last = contour.dashes[-1]
        if not contour.extend(rng, around):
            return None
        around = around | taken_by(last)
    return np.stack(contour.dashes)


def rendered(contours: list[np.ndarray], discs: np.ndarray) -> np.ndarray:
    """The image of dashes and discs ``[32, 32]``, uint8."""
    dashes = np.clip(THICKNESS / 2 + 0.5 - distances(np.concatenate(contours)).min(0), 0, 1) * CONTRAST
    from_disc = np.hypot(*(at - discs[:, [axis]] for axis, at in enumerate((ROWS, COLUMNS)))).min(0)
    image = np.clip(np.maximum(dashes, RADIUS + 0.5 - from_disc), 0, 1)
    return np.rint(255 * image).astype(np.uint8).reshape(SIDE, SIDE)


def examples(
    settings: Mapping[str, Any], folder: Path | None, split: str, rng: random.Random
) -> Iterator[Example]:
    """Random images, row by row, without end; each class with the same probability."""
    drawing = np.random.default_rng(rng.getrandbits(64))
    while True:
        picture = draw(drawing, int(drawing.integers(2)))
        yield Example(1 + picture.image.ravel().astype(np.int32), picture.connected)
