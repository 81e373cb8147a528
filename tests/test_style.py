"""The look of methods: the same in every figure, and told apart by everybody."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from relinear.draw.pictures import WIDTH
from relinear.draw.style import ALSO, LINES, LOOKS, OTHERS, lines, look_of, method_of
from relinear.plan.figures import Curves
from relinear.plan.specs import available

ROOT = Path(__file__).resolve().parents[1]
# Machado, Oliveira and Fernandes (2009), "A Physiologically-based Model for Simulation of Color Vision
# Deficiency", severity 1.0, on linear RGB.
DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
)
# sRGB, D65
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)


def lab(color: str, seen_by: np.ndarray) -> np.ndarray:
    """CIELAB of a colour #rrggbb as an eye sees it."""
    encoded = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    ratios = TO_XYZ @ np.clip(seen_by @ linear, 0, 1) / TO_XYZ.sum(axis=1)
    x, y, z = np.where(ratios > (6 / 29) ** 3, np.cbrt(ratios), ratios / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eye", [np.eye(3), DEUTERANOPIA], ids=["normal", "deuteranopia"])
def test_colours_are_apart(eye):
    """Colours differ by more than 25 in CIELAB; a difference of 2.3 is just noticeable."""
    apart = {
        (a, b): float(np.linalg.norm(lab(LOOKS[a].color, eye) - lab(LOOKS[b].color, eye)))
        for a, b in itertools.combinations(LOOKS, 2)
    }
    assert min(apart.values()) > 25, min(apart, key=apart.get)


def test_in_grey_markers_and_hatches_tell_methods_apart():
    looks = [*LOOKS.values(), *OTHERS]
    assert len({look.marker for look in looks}) == len({look.hatch for look in looks}) == len(looks)


@pytest.mark.parametrize(
    ("run", "method"),
    [
        ("lizard-seed1", "lizard"),
        ("lizard_shared@mistral-7b", "lizard"),
        ("window_bytes_of_lizard", "window"),
        ("lolcats_window_shared", "lolcats_window"),
        ("lolcats_exp_notransfer", "lolcats_linear"),
        ("teacher_lora_5e-4", "teacher_lora"),
        ("scratch_softmax", "teacher"),
        ("recall_elu", None),
        ("windowless", None),
    ],
)
def test_a_run_looks_as_its_method(run, method):
    assert method_of(run) == method
    assert method is None or look_of(run) == LOOKS[method]


def test_runs_of_one_method_differ_by_their_lines():
    first, other, again, second = lines(["lizard", "supra", "lizard", "lizard_shared"])
    assert first == again and first["color"] == second["color"] != other["color"]
    assert (first["linestyle"], second["linestyle"]) == LINES[:2] and second["markerfacecolor"] == "none"


def test_every_line_of_every_figure_of_curves_looks_its_own_way():
    specs = [
        artefact.spec
        for artefact in available(ROOT / "workflow/papers").values()
        if isinstance(artefact.spec, Curves)
    ]
    assert len(specs) > 3
    for spec in specs:
        for panel in spec.panels:
            runs = [series.all_runs[0] for series in spec.shown(panel)]
            drawn = [
                style
                for series, style in zip(
                    spec.series, lines([s.all_runs[0] for s in spec.series]), strict=True
                )
                if series in spec.shown(panel)
            ]
            assert len({tuple(style.items()) for style in drawn}) == len(set(runs)), spec.label


def test_no_figure_has_colours_of_its_own_for_methods():
    places = [*ROOT.glob("src/relinear/**/*.py"), *ROOT.glob("workflow/papers/*/*.py")]
    found = [path.name for path in places if re.search(r"""f?["']C(\{|[0-9]["'])""", path.read_text())]
    assert found == ["attention_maps.py"], "which shows one head, of no method's colour"
    assert set(ALSO.values()) <= set(LOOKS)


def test_pictures_are_as_wide_as_a_page_and_their_letters_can_be_read_there():
    """Those whose weights are not committed cannot be drawn again (`tests/test_frozen.py`)."""
    from test_frozen import WITHOUT_WEIGHTS

    drawn = [path for path in (ROOT / "results/reference").glob("*/*/*.png")]
    wide = [
        path
        for path in drawn
        if (path.parents[1].name, f"{path.parent.name}_{path.stem}") not in WITHOUT_WEIGHTS
    ]
    for path in wide:
        with Image.open(path) as picture:
            assert picture.width <= 150 * WIDTH, path
    code = [*ROOT.glob("src/relinear/draw/*.py"), *ROOT.glob("workflow/papers/*/*.py")]
    assert (
        wide
        and [path.name for path in code if re.search(r"(font|label)size=[0-8]\b", path.read_text())] == []
    )
    for artefact in available(ROOT / "workflow/papers").values():
        if isinstance(artefact.spec, Curves):
            entries = [
                len(artefact.spec.shown(panel)) + len(panel.published) for panel in artefact.spec.panels
            ]
            assert max(entries) <= 8 + (artefact.name == "lolcats_figure2"), (
                "of whose nine series one was not run"
            )
