"""Figures of every shape, drawn from invented measurements."""

import csv
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from safetensors.numpy import save_file
from synthetic import measurement, paper, reading

from relinear.draw import About, costs, own, pictures, render
from relinear.draw.attention_maps import _figure as _maps
from relinear.draw.cells import rows_of
from relinear.draw.claims import UNTESTED, judge
from relinear.draw.curves import _finish, points_of
from relinear.draw.drawing import make
from relinear.draw.frame import frame_of
from relinear.draw.grid import _beside, heat_of
from relinear.draw.weights import per_head
from relinear.plan.claims import Claim
from relinear.plan.figures import Own, Panel
from relinear.plan.specs import read
from relinear.plan.strict import ConfigError

ROOT = Path(__file__).parents[1]
LOLCATS = ROOT / "workflow/papers/lolcats"
MINI = About("mini", "SmolLM2")


def draw(artefact, measured, out, about=MINI):
    """The drawn files by suffix. Asserts that they are all that the artefact names, that none is empty, and
    that there are no others."""
    written = make(artefact, measured, about, out)
    assert sorted(written) == sorted(map(Path, artefact.outputs(str(out)))) == sorted(out.iterdir())
    files = {path.name.split(".", 1)[1]: path for path in written}
    assert files["png"].read_bytes().startswith(b"\x89PNG") and files["pdf"].read_bytes().startswith(b"%PDF")
    record = json.loads(files["provenance.json"].read_text())
    assert set(record) == {"artefact", "scale", "sources", "cells"} and record["artefact"] == artefact.name
    for row in record["cells"].values():
        for origin in row.values():
            for file in origin if isinstance(origin, list) else [origin]:
                assert file is None or "#/" in file or file in record["sources"]
    return files


def verdicts(files):
    return list(csv.DictReader(files["claims.csv"].read_text().splitlines()))


# --- attention maps ---


def weights(shown, length=64, sharp=2.0):
    rng = np.random.default_rng(1)
    tensors = {}
    for layer, head in shown:
        for kind, power in (("softmax", sharp), ("method", 0.7 * sharp)):
            scores = power * rng.normal(size=(length, length)) + np.eye(length) * 4
            scores[:, 0] += 3  # the attention sink
            causal = np.where(np.tri(length, dtype=bool), np.exp(scores), 0)
            tensors[f"{kind}.{layer}.{head}"] = (causal / causal.sum(1, keepdims=True)).astype(np.float32)
    return tensors


def fidelity(folder, run, tensors, scale=1.0, layers=2, heads=6):
    rng = np.random.default_rng(0)
    values = [
        reading(metric, scale * float(rng.lognormal(-1, 1)), None, of="attention", layer=layer, head=head)
        for metric in ("kl", "mse")
        for layer in range(layers)
        for head in range(heads)
    ]
    save_file(tensors, folder / "weights.safetensors")
    return {
        (run, "fidelity"): measurement(
            run,
            "fidelity",
            *values,
            *(reading(m, scale, None, of="attention") for m in ("kl", "mse")),
            folder=folder,
        )
    }


@pytest.mark.parametrize("name", ["figure3", "figure4", "figure5", "figure6"])
def test_each_map_is_drawn_from_its_own_run(tmp_path, name):
    artefact = read(LOLCATS / f"{name}.yaml")
    run = artefact.spec.run
    files = draw(artefact, fidelity(tmp_path, run, weights([(0, 0), (1, 3)])), tmp_path / "out")
    assert json.loads(files["provenance.json"].read_text())["cells"] == {
        run: dict.fromkeys(("weights", "kl", "mse"), f"results/{run}/fidelity/run.json")
    }
    [another] = fidelity(tmp_path, "another", weights([(0, 0)])).values()
    with pytest.raises(ValueError, match=f"run is 'another', expected '{run}'"):
        make(artefact, {(run, "fidelity"): another}, MINI, tmp_path / "out")


def test_a_map_of_a_perfect_method_is_drawn_with_zeros_and_one_that_was_not_run_says_so(tmp_path):
    artefact = read(LOLCATS / "figure3.yaml")
    draw(artefact, fidelity(tmp_path, "lolcats_exp", weights([(0, 0)]), scale=0.0), tmp_path / "zeros")
    files = draw(artefact, {("lolcats_exp", "fidelity"): None}, tmp_path / "none")
    assert set(json.loads(files["provenance.json"].read_text())["cells"]["lolcats_exp"].values()) == {None}


def test_maps_say_that_a_scale_is_a_demonstration(tmp_path):
    found = fidelity(tmp_path, "lolcats_exp", weights([(0, 0)]))["lolcats_exp", "fidelity"]
    figure = _maps(
        read(LOLCATS / "figure3.yaml").spec,
        {"lolcats_exp": found},
        MINI._replace(demonstration="It means nothing."),
    )
    assert figure.get_suptitle().splitlines()[1:] == [
        "run lolcats_exp, scale mini, teacher SmolLM2",
        "It means nothing.",
    ]


def test_figures_that_are_compared_share_their_colours(tmp_path):
    """LoLCATs Figures 3 to 6: the colours of weights and of all heads' distances do not depend on a run's own
    range."""
    seen = []
    for scale in (1.0, 0.1):
        found = fidelity(tmp_path, "lolcats_exp", weights([(0, 0), (1, 3)], sharp=2 + scale), scale=scale)[
            "lolcats_exp", "fidelity"
        ]
        images = [
            image
            for axis in _maps(read(LOLCATS / "figure3.yaml").spec, {"lolcats_exp": found}, MINI).axes
            for image in axis.get_images()
        ]
        seen.append([image.get_clim() for image in images])
    assert seen[0] == seen[1] == [(0.01 / 64, 1.0)] * 4 + [(0.005, 10), (1e-6, 2)]


def test_a_map_of_missing_or_broken_weights_is_refused(tmp_path):
    artefact, tensors = read(LOLCATS / "figure3.yaml"), weights([(0, 0)])

    def refused(error, message, tensors=None):
        found = fidelity(tmp_path, "lolcats_exp", tensors or {})
        if tensors is None:
            (tmp_path / "weights.safetensors").unlink()
        with pytest.raises(error, match=message):
            make(artefact, found, MINI, tmp_path)

    refused(
        ValueError,
        r"no weights 'softmax.1.3'; have \['method.0.0'",
        tensors | {"method.1.3": tensors["method.0.0"]},
    )
    refused(ValueError, "no weights 'softmax.<layer>.<head>'; have", {"other": tensors["method.0.0"]})
    tensors["method.0.0"][3, 1] = np.nan
    refused(ValueError, "'method.0.0' is not finite", tensors)
    refused(FileNotFoundError, "weights.safetensors is missing")


def test_a_head_without_a_distance_is_refused(tmp_path):
    m = fidelity(tmp_path, "lolcats_exp", weights([(0, 0)]))["lolcats_exp", "fidelity"]
    assert per_head(m, "kl").shape == (2, 6)
    with pytest.raises(ValueError, match="kl of attention is read at 11 heads of 2 layers x 6 heads"):
        per_head(m._replace(readings=m.readings[1:]), "kl")


# --- grids ---

GRID = {
    "draw": "grid",
    "cell": {
        "measure": "needle",
        "metric": "acc",
        "of": "passkey",
        "unit": "percent",
        "x": "length",
        "y": "depth",
    },
    "panels": [
        {"title": "Teacher", "run": "teacher"},
        {"title": "LoLCATs", "run": "lolcats"},
        {"title": "Lizard", "run": "lizard"},
    ],
    "limits": [0, 100],
    "claims": [
        {
            "claim": "Lizard finds what LoLCATs does not",
            "source": "section 4.2",
            "op": ">",
            "margin": 50,
            "margin_by": "ours",
            "left": {"row": "Lizard", "at": {"length": 8192, "depth": 0.5}},
            "right": {"row": "LoLCATs", "at": {"length": 8192, "depth": 0.5}},
        }
    ],
}
LENGTHS, DEPTHS = (1024, 2048, 8192), (0.0, 0.5, 1.0)


def needles(run, accuracy, **more):
    return {
        (run, "needle"): measurement(
            run,
            "needle",
            *(
                reading("acc", accuracy(n, d), 0.02, 50, "passkey", length=n, depth=d)
                for n in LENGTHS
                for d in DEPTHS
            ),
        )
    }


def test_a_grid_has_a_panel_a_run_and_reads_each_place(tmp_path):
    artefact = read(paper(tmp_path, stem="figure4", **GRID))
    measured = (
        needles("teacher", lambda n, d: 1.0)
        | needles("lolcats", lambda n, d: float(n < 2000))
        | needles("lizard", lambda n, d: 1 - d / 10)
    )
    heat = heat_of(artefact.spec, artefact.spec.panel("Lizard"), frame_of(measured))
    assert heat.xs == list(LENGTHS) and heat.ys == list(DEPTHS) and heat.values.shape == (3, 3)
    for (y, _), value in np.ndenumerate(heat.values):
        assert value == pytest.approx(100 - 10 * DEPTHS[y])
    [verdict] = verdicts(draw(artefact, measured, tmp_path / "out"))
    assert (
        verdict["verdict"] == "reproduced"
        and "Lizard at 8192, 0.5 95.00 ± 2.00, LoLCATs at 8192, 0.5 0.00 ± 2.00" in verdict["figures"]
    )


def test_a_claim_about_a_grid_without_a_place_is_of_the_metric_without_axes(tmp_path):
    claim = GRID["claims"][0] | {"left": "Lizard", "right": "LoLCATs"}
    artefact = read(paper(tmp_path, stem="figure4", **GRID | {"claims": [claim]}))
    measured = needles("lolcats", lambda n, d: 0.0) | needles("lizard", lambda n, d: 1.0)
    measured = {
        key: m._replace(
            readings=(*m.readings, reading("acc", 0.9 * (key[0] == "lizard"), 0.01, 50, "passkey"))
        )
        for key, m in measured.items()
    }
    [verdict] = verdicts(draw(artefact, measured, tmp_path / "out"))
    assert (
        verdict["verdict"] == "reproduced"
        and "Lizard 90.00 ± 1.00, LoLCATs 0.00 ± 1.00" in verdict["figures"]
    )


def test_a_grid_says_which_panel_was_not_run_and_judges_no_failed_gate(tmp_path):
    artefact = read(paper(tmp_path, stem="figure4", **GRID))
    measured = needles("lizard", lambda n, d: 1.0) | {("lolcats", "needle"): None}
    [verdict] = verdicts(draw(artefact, measured, tmp_path / "none"))
    assert verdict["verdict"] == UNTESTED and verdict["reason"] == "LoLCATs at 8192, 0.5: acc was not run"
    measured |= needles("lolcats", lambda n, d: 0.0) | {
        ("lizard", "gate"): measurement("lizard", "gate", reading("passed", 0.0, None, 1, "gate"))
    }
    assert verdicts(draw(artefact, measured, tmp_path / "failed"))[0]["reason"].startswith(
        "lizard failed its gate"
    )


def test_a_place_without_a_reading_stays_empty_and_a_panel_without_the_axes_says_what_there_is(tmp_path):
    artefact = read(paper(tmp_path, stem="figure4", **GRID))
    [m] = needles("lizard", lambda n, d: 1.0).values()
    lizard = artefact.spec.panel("Lizard")
    less = frame_of({("lizard", "needle"): m._replace(readings=m.readings[1:])})
    assert np.isnan(heat_of(artefact.spec, lizard, less).values).sum() == 1
    whole = m._replace(readings=(reading("acc", 1.0, of="passkey"),))
    measured = {("lizard", "needle"): whole} | needles("lolcats", lambda n, d: 0.0)
    assert heat_of(artefact.spec, lizard, frame_of(measured)) is None
    [verdict] = verdicts(draw(artefact, measured, tmp_path / "out"))
    assert (verdict["verdict"], verdict["reason"]) == (
        UNTESTED,
        "Lizard at 8192, 0.5: acc was not run: lizard needle has acc by nothing, and no acc by length and"
        " depth",
    )


def test_a_panel_whose_metric_is_not_defined_says_why_and_judges_nothing(tmp_path):
    artefact = read(paper(tmp_path, stem="figure4", **GRID))
    nowhere = reading("acc", None, None, 0, "passkey")._replace(why="nothing to find")
    measured = needles("lizard", lambda n, d: 1.0) | {
        ("lolcats", "needle"): measurement("lolcats", "needle", nowhere)
    }
    [verdict] = verdicts(draw(artefact, measured, tmp_path / "out"))
    assert (verdict["verdict"], verdict["reason"]) == (
        UNTESTED,
        "LoLCATs: acc is not defined: nothing to find",
    )


def test_panels_of_several_metrics_are_drawn_with_a_scale_each(tmp_path):
    cell = {"measure": "maps", "of": "attention", "x": "head", "y": "layer"}
    panels = [
        {"title": title, "run": "supra", "metric": m, "log": True}
        for title, m in (("cosine", "cosine"), ("singular values", "distance"))
    ]
    artefact = read(paper(tmp_path, stem="figure3", draw="grid", cell=cell, panels=panels))
    values = [
        reading(m, k * (1 + n + h), None, of="attention", layer=n, head=h)
        for m, k in (("cosine", 0.01), ("distance", 3.0))
        for n in range(4)
        for h in range(3)
    ]
    draw(artefact, {("supra", "maps"): measurement("supra", "maps", *values)}, tmp_path / "out")


def test_a_panels_title_has_its_mean_or_on_a_logarithmic_scale_its_median(tmp_path):
    """A mean over a few huge cells says nothing of the rest."""
    cell = {"measure": "maps", "of": "attention", "x": "head", "y": "layer"}
    panels = [
        {"title": m, "run": "supra", "metric": m, "log": m == "distance"} for m in ("cosine", "distance")
    ]
    spec = {"draw": "grid", "middles": True, "cell": cell, "panels": panels}
    artefact = read(paper(tmp_path, stem="figure3", **spec))
    values = [
        reading(m, (0.25, 0.5, 4000.0)[h], None, of="attention", layer=0, head=h)
        for m in ("cosine", "distance")
        for h in range(3)
    ]
    means = [reading(m, 1333.0, 20.0, of="attention") for m in ("cosine", "distance")]
    frame = frame_of({("supra", "maps"): measurement("supra", "maps", *values, *means)})
    titles = [heat_of(artefact.spec, panel, frame).middle for panel in artefact.spec.panels]
    assert titles == ["mean 1.33e+03 ± 2e+01", "median 0.5"]
    plain = artefact.spec.model_copy(update={"middles": False})
    assert heat_of(plain, plain.panels[0], frame).middle == ""


@pytest.mark.parametrize(("panels", "beside"), [(5, 5), (10, 5), (8, 4), (6, 3), (7, 4), (11, 4)])
def test_five_panels_stand_in_a_row_where_that_leaves_no_gap_else_four_at_most(tmp_path, panels, beside):
    shown = [{"title": f"{i}", "run": f"r{i}"} for i in range(panels)]
    spec = read(paper(tmp_path, stem="figure3", **GRID | {"panels": shown, "claims": []})).spec
    assert _beside(spec, {}) == beside


@pytest.mark.parametrize(("heads", "written"), [(2, "0.0621"), (4, "0.06"), (6, ""), (20, "")])
def test_numbers_in_a_panel_do_not_run_into_each_other(tmp_path, monkeypatch, heads, written):
    shown = []
    monkeypatch.setattr(
        pictures,
        "write_figure",
        lambda path, figure: (shown.append(figure), render.write_figure(path, figure)),
    )
    panels = [
        {"title": f"{run}, {metric}", "run": run, "metric": metric}
        for metric in ("cosine", "distance")
        for run in ("a", "b", "c", "d")
    ]
    cell = {"measure": "maps", "of": "attention", "x": "head", "y": "layer"}
    artefact = read(paper(tmp_path, stem="figure3", draw="grid", cell=cell, panels=panels))
    values = [
        reading(m, 0.06214, None, of="attention", layer=n, head=h)
        for m in ("cosine", "distance")
        for n in range(2)
        for h in range(heads)
    ]
    draw(artefact, {(run, "maps"): measurement(run, "maps", *values) for run in "abcd"}, tmp_path / "out")
    texts, renderer = shown[0].axes[0].texts, FigureCanvasAgg(shown[0]).get_renderer()
    assert [text.get_text() for text in texts] == [written] * 2 * heads
    boxes = [Text.get_window_extent(text, renderer) for text in texts[:heads] if text.get_text()]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


@pytest.mark.parametrize("beside", [2, 3, 4, 5])
def test_titles_of_panels_beside_each_other_do_not_meet(tmp_path, monkeypatch, beside):
    shown = []
    monkeypatch.setattr(
        pictures,
        "write_figure",
        lambda path, figure: (shown.append(figure), render.write_figure(path, figure)),
    )
    # one word, so that each of its lines is as long as a line may be
    panels = [{"title": "tokens" * 12 + run, "run": run, "metric": "cosine"} for run in "abcde"[:beside]]
    cell = {"measure": "maps", "of": "attention", "x": "head", "y": "layer"}
    artefact = read(paper(tmp_path, stem="figure3", draw="grid", cell=cell, panels=panels))
    values = [reading("cosine", 0.1, None, of="attention", layer=n, head=n) for n in range(2)]
    draw(
        artefact,
        {(p["run"], "maps"): measurement(p["run"], "maps", *values) for p in panels},
        tmp_path / "out",
    )
    renderer = FigureCanvasAgg(shown[0]).get_renderer()
    boxes = [Text.get_window_extent(axis.title, renderer) for axis in shown[0].axes[:beside]]
    assert all(left.x1 + 4 < right.x0 for left, right in itertools.pairwise(boxes))


# --- attention maps of several runs ---

TWO = {"draw": "attention_maps", "measure": "heads", "softmax": "Softmax", "runs": {"A": "a", "B": "b"}}


def heads(folder, run, places, length=9):
    """The content that head_maps keeps: weights by place, and the KL of each."""
    (folder / run).mkdir(exist_ok=True)
    save_file(weights(places, length), folder / run / "weights.safetensors")
    return measurement(
        run,
        "heads",
        *(
            reading("kl", 0.25, None, length, "text", layer=n, head=h, own_layer=n, own_head=h)
            for n, h in places
        ),
        reading("kl", 0.5, of="attention"),
        folder=folder / run,
    )


def test_maps_of_several_runs_have_a_row_for_each_place_and_softmax_attention_first(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(
        pictures,
        "write_figure",
        lambda path, figure: (shown.append(figure), render.write_figure(path, figure)),
    )
    artefact = read(
        paper(
            tmp_path,
            stem="figure4",
            places=[[1, 6], [12, 6]],
            claims=[
                {
                    "claim": "c",
                    "source": "s",
                    "left": "a",
                    "right": "b",
                    "column": "kl",
                    "op": "<",
                    "margin": 1,
                    "margin_by": "ours",
                }
            ],
            **TWO,
        )
    )
    found = heads(tmp_path, "a", [(1, 6), (12, 6)])
    make(
        artefact,
        {("a", "heads"): found, ("b", "heads"): None},
        MINI._replace(data={"heads": "brown"}),
        tmp_path / "out",
    )
    assert shown[0].get_suptitle().splitlines()[1] == "scale mini, teacher SmolLM2 on brown"
    axes, bars = np.array(shown[0].axes[:6]).reshape(2, 3), shown[0].axes[6:]
    assert [bar.get_ylabel() for bar in bars] == ["weight, log scale"], "one colour bar for all maps"
    assert [axis.get_xlabel() for axis in axes[-1]] == ["key position"] * 2 + [""]
    assert [axis.get_title() for axis in axes[0]] == ["Softmax", "A\nKL 0.25", "B"] and axes[
        1, 1
    ].get_title() == "KL 0.25"
    assert [axis.get_ylabel() for axis in axes[:, 0]] == [
        "layer 1, head 6\nquery position",
        "layer 12, head 6\nquery position",
    ]
    assert [[len(axis.images) for axis in row] for row in axes] == [[1, 1, 0]] * 2 and axes[0, 2].texts[
        0
    ].get_text() == render.NOT_RUN
    own = weights([(1, 6), (12, 6)], 9)
    for axis, name in zip(axes[1], ("softmax.12.6", "method.12.6"), strict=False):
        assert np.array_equal(axis.images[0].get_array().filled(0), own[name])
        assert axis.images[0].get_clim() == (0.01 / 9, 1.0), "the colours of every figure of weights"


def test_a_place_that_a_measurement_did_not_keep_is_refused(tmp_path):
    artefact = read(paper(tmp_path, stem="figure4", places=[[6, 1]], **TWO))
    with pytest.raises(
        ValueError, match=r"results/a/heads/run.json: nothing of layer 6, head 1; have \[\(1, 6\)\]"
    ):
        make(
            artefact, {(run, "heads"): heads(tmp_path, run, [(1, 6)]) for run in "ab"}, MINI, tmp_path / "out"
        )


def test_softmax_weights_over_their_largest_are_one_curve_of_scores_less_the_largest(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(
        pictures,
        "write_figure",
        lambda path, figure: (shown.append(figure), render.write_figure(path, figure)),
    )
    artefact = read(paper(tmp_path, stem="figure4", rows=["relative"], **TWO))
    dense = {f"{kind}.1.{h}": np.random.default_rng(h + i).dirichlet(np.ones(9), 9).astype(np.float32)
             for h in (1, 3) for i, kind in enumerate(("softmax", "method"))}  # fmt: skip
    measured = {(run, "heads"): heads(tmp_path, run, [(1, 1)]) for run in "ab"}
    for run in "ab":
        save_file(dense, tmp_path / run / "weights.safetensors")
    make(artefact, measured, MINI, tmp_path / "out")
    x, y = np.asarray(shown[0].axes[0].collections[0].get_offsets()).T
    assert len(x) == 2 * 81 and y == pytest.approx(np.exp(x), rel=1e-5) and x.max() == 0
    x, y = np.asarray(shown[0].axes[1].collections[0].get_offsets()).T
    assert y.max() == 1 and not np.allclose(y, np.exp(x), atol=0.1)


def test_what_belongs_to_several_runs_names_them(tmp_path):
    with pytest.raises(ConfigError, match="are of several `runs`; got a `run`"):
        read(paper(tmp_path, stem="figure4", **{**TWO, "run": "a", "runs": {}}))


def test_a_run_may_be_shown_by_another_measure(tmp_path):
    runs = {"A": "a", "B": {"run": "b", "measure": "elsewhere"}}
    assert read(paper(tmp_path, stem="figure4", **TWO | {"runs": runs})).reads() == [
        ("a", "heads"),
        ("b", "elsewhere"),
    ]


# --- Lizard's Figure 3 ---


def test_figure_3_shows_the_keys_and_what_was_answered(tmp_path, monkeypatch):
    shown = []
    real = render.write_figure

    def keep(path, figure):
        shown.append([text.get_text() for text in figure.axes[0].texts])
        real(path, figure)

    monkeypatch.setattr(render, "write_figure", keep)
    artefact = read(ROOT / "workflow/papers/lizard/figure3.yaml")
    keys = ["12345", "543210"]
    example = {
        "prompt": "Find it. "
        + " ".join(
            f"{'Grass. ' * 60}The {n} pass key is {k}." for n, k in zip(("red", "tin"), keys, strict=True)
        )
        + "\n\nThe tin pass key is",
        "names": ["red", "tin"],
        "keys": keys,
        "asked": 1,
    }
    measured = {}
    for run, more, readings in (
        ("teacher", {"answer": " 543210."}, [reading("exact_match", 1.0, None, 1, "needle")]),
        (
            "lizard",
            {},
            [reading("exact_match", None, None, 0, "needle")._replace(why="it cannot read so far")],
        ),
    ):
        (tmp_path / run).mkdir()
        (tmp_path / run / "items.jsonl").write_text(json.dumps(example | more))
        measured[run, "passkey_example"] = measurement(
            run, "passkey_example", *readings, folder=tmp_path / run
        )
    draw(artefact, measured, tmp_path / "out")
    words = " ".join(shown[0])
    assert words.count("12345") == 1 and words.count("543210") == 3, (
        "in the prompt, as what is right, and as an answer"
    )
    assert (
        "'543210.', right" in words
        and "not defined: it cannot read so far" in words
        and "characters ...]" in words
    )
    draw(artefact, dict.fromkeys(measured), tmp_path / "none")
    (tmp_path / "lizard/items.jsonl").write_text(json.dumps(example | {"prompt": "another"}))
    with pytest.raises(ValueError, match="prompts of teacher and lizard are not the same"):
        make(artefact, measured, MINI, tmp_path / "other")


# --- scatter plots ---

MAPS = ("elu", "relu", "hedgehog")
TABLE = {
    "texts": {"map": "Map"},
    "columns": [
        {"name": "kl", "title": "KL", "measure": "kl", "metric": "kl"},
        {"name": "cola", "title": "CoLA", "measure": "cola", "metric": "matthews", "unit": "percent"},
    ],
    "rows": [{"run": f"bert_{m}", "text": {"map": m}} for m in MAPS],
    "claims": [
        {
            "claim": "c",
            "source": "s",
            "left": "bert_hedgehog",
            "right": "bert_elu",
            "column": "cola",
            "op": ">",
        }
    ],
}


SCATTER = ROOT / "workflow/papers/hedgehog/figure4.py"


def scattered(folder, **spec):
    """A table that Hedgehog Figure 4's file draws."""
    path = paper(folder, stem="figure5", draw="picture", **spec)
    shutil.copy(SCATTER, path.with_suffix(".py"))
    return read(path)


def test_a_picture_is_a_table_with_its_claims_and_provenance(tmp_path):
    measured = {
        (f"bert_{m}", "cola"): measurement(f"bert_{m}", "cola", reading("matthews", 0.4 + i / 10))
        for i, m in enumerate(MAPS)
    }
    measured |= {
        (f"bert_{m}", "kl"): measurement(f"bert_{m}", "kl", reading("kl", 2.0 - i / 2, 0.1))
        for i, m in enumerate(MAPS)
        if m != "relu"
    }
    artefact = scattered(tmp_path, **TABLE)
    files = draw(artefact, measured, tmp_path / "out")
    [verdict] = verdicts(files)
    assert verdict["verdict"] == "reproduced" and "cola: bert_hedgehog 60.00 ± 1.00" in verdict["figures"]
    draw(artefact, {}, tmp_path / "none")
    cells = json.loads(files["provenance.json"].read_text())["cells"]
    assert cells["bert_elu"]["kl"] == "results/bert_elu/kl/run.json" and cells["bert_relu"]["kl"] is None


def test_a_dose_that_a_point_lacks_gives_its_claim_no_verdict(tmp_path):
    measured = {
        (f"bert_{m}", "cola"): measurement(f"bert_{m}", "cola", reading("matthews", 0.4 + i / 10))
        for i, m in enumerate(MAPS)
    }
    measured = {
        key: m._replace(facts=m.facts | {"tokens": {"finetune": 1000}}) for key, m in measured.items()
    }
    claims = [TABLE["claims"][0] | {"dose": {"bert_hedgehog": dose}} for dose in (1000, 2000)]
    whole, less = verdicts(
        draw(scattered(tmp_path, **TABLE | {"claims": claims}), measured, tmp_path / "out")
    )
    assert whole["verdict"] == "reproduced"
    assert less["verdict"] == "not tested" and "bert_hedgehog had 1k of 2k" in less["reason"]


def test_names_in_a_scatter_plot_lie_over_no_point_and_no_other_name(tmp_path):
    runs = [f"map_{name}" for name in ("exponential", "taylor_of_degree_two", "cosformer", "performer")]
    table = TABLE | {"rows": [{"run": run, "text": {"map": run}} for run in runs], "claims": []}
    spec = scattered(tmp_path, **table).spec
    measured = {(run, "cola"): measurement(run, "cola", reading("matthews", 0.99)) for run in runs}
    measured |= {
        (run, "kl"): measurement(run, "kl", reading("kl", 2.0 + i / 50)) for i, run in enumerate(runs[:3])
    }
    measured[runs[3], "kl"] = measurement(runs[3], "kl", reading("kl", 3.0))
    figure = own.load(SCATTER, "figure(spec, rows, about)").figure(spec, rows_of(spec, measured, MINI), MINI)
    figure.draw_without_rendering()
    [axis], renderer = figure.axes, FigureCanvasAgg(figure).get_renderer()
    boxes = [Text.get_window_extent(name, renderer) for name in axis.texts]
    assert [name.get_text() for name in axis.texts] == runs
    assert not [(a, b) for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)]
    points = axis.transData.transform([(2.0, 99.0), (2.02, 99.0), (2.04, 99.0), (3.0, 99.0)])
    assert not [(box, point) for box in boxes for point in points if box.contains(*point)]


@pytest.mark.parametrize("scale", [1e-4, 1.0, 3e5])
def test_a_logarithmic_axis_begins_where_its_data_do(scale):
    axis = Figure().subplots()
    axis.plot([1024, 4096, 16384], [scale * 3, scale * 40, scale * 900])
    _finish(axis, Panel(x="length", y="cache_gib", log=True), 2)
    (left, _), (low, high) = axis.get_xlim(), axis.get_ylim()
    assert 512 < left < 1024 and 1.5 * scale < low < 3 * scale and 900 * scale < high < 1800 * scale


# --- curves of readings ---


def test_a_curve_follows_an_axis_of_a_run_s_readings(tmp_path):
    panels = [{"measure": "ppl", "metric": "perplexity", "x": "position", "published": {"theirs": {64: 5.0}}}]
    series = [{"title": "teacher", "run": "teacher"}, {"title": "SUPRA", "run": "supra"}]
    claims = [
        {
            "claim": "c",
            "source": "s",
            "column": "perplexity",
            "op": "<",
            "left": {"row": "teacher", "at": {"position": 4096}},
            "right": {"row": "supra", "at": {"position": 4096}},
        }
    ]
    artefact = read(
        paper(tmp_path, stem="figure1", draw="curves", panels=panels, series=series, claims=claims)
    )
    assert artefact.reads()[:2] == [("teacher", "ppl"), ("teacher", "gate")]
    ours = [reading("perplexity", 9.0 - i, 0.1, position=p) for i, p in enumerate((4096, 64, 512))]
    measured = {("teacher", "ppl"): measurement("teacher", "ppl", *ours, reading("perplexity", 1.0))}
    theirs = (reading("perplexity", value, position=p) for p, value in ((64, 8.0), (4096, 9.5)))
    measured[("supra", "ppl")] = measurement("supra", "ppl", *theirs)
    points = [
        points_of(frame_of(measured), s, artefact.spec.panels[0], measured) for s in artefact.spec.series
    ]
    assert [list(zip(p["x"], p["value"], strict=True)) for p in points] == [
        [(64, 8.0), (512, 7.0), (4096, 9.0)],
        [(64, 8.0), (4096, 9.5)],
    ]
    [verdict] = verdicts(draw(artefact, measured, tmp_path / "out"))
    assert verdict["verdict"] == "reproduced" and verdict["figures"].startswith(
        "perplexity: teacher at 4096 9.00 ± 0.10, supra at 4096 9.50 ± 0.01"
    )
    draw(artefact, {}, tmp_path / "nothing")
    [verdict] = verdicts(draw(artefact, measured | {("supra", "ppl"): None}, tmp_path / "none"))
    assert verdict["reason"] == "supra at 4096: perplexity was not run"


def test_a_series_that_one_panel_lacks_is_named_in_the_caption_and_once_in_the_legend(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(
        pictures,
        "write_figure",
        lambda path, figure: (shown.append(figure), render.write_figure(path, figure)),
    )
    panels = [
        {"measure": m, "metric": "perplexity", "column": m, "title": m, "x": "position"}
        for m in ("short", "long")
    ]
    artefact = read(
        paper(
            tmp_path,
            stem="figure1",
            draw="curves",
            panels=panels,
            series=[{"title": run, "run": run} for run in ("a", "b", "c")],
        )
    )
    found = [("a", "short"), ("a", "long"), ("b", "short")]
    draw(
        artefact,
        {r: measurement(*r, reading("perplexity", 9.0, 0.1, position=64)) for r in found},
        tmp_path / "out",
    )
    [legend] = shown[0].subfigs[0].legends
    assert shown[0].get_supxlabel() == "not run for short: c.\nnot run for long: b; c." and [
        t.get_text() for t in legend.get_texts()
    ] == ["a", "b"]


def test_a_panel_reads_at_a_place_on_the_other_axes_and_the_legend_has_a_number_of_each_run(
    tmp_path, monkeypatch
):
    """The caption says which series a panel lacks and another has."""
    panels = [
        {"measure": "ppl", "metric": "perplexity", "x": "position"},
        {
            "measure": "needle",
            "metric": "choice",
            "x": "distance",
            "at": {"length": 2048},
            "title": "needles",
        },
    ]
    series = [{"title": "teacher", "run": "teacher"}, {"title": "Lizard", "run": "lizard"}]
    legend = [{"measure": "size", "metric": "mebibytes", "of": "model", "unit": "MiB"}]
    artefact = read(
        paper(tmp_path, stem="figure1", draw="curves", panels=panels, series=series, legend=legend)
    )
    assert {("teacher", "size"), ("lizard", "size")} < set(artefact.reads())
    places = [
        {"length": 2048},
        {"length": 2048, "distance": 512},
        {"length": 2048, "distance": 256},
        {"length": 1024, "distance": 512},
    ]
    needles = measurement(
        "teacher",
        "needle",
        *(
            reading("choice", value, 0.1, **at)
            for value, at in zip((0.1, 0.2, 0.3, 0.4), places, strict=True)
        ),
    )
    alone = {("teacher", "needle"): needles}
    points = points_of(frame_of(alone), artefact.spec.series[0], artefact.spec.panels[1], alone)
    assert list(zip(points["x"], points["value"], strict=True)) == [(256, 0.3), (512, 0.2)]
    measured = {
        ("teacher", "needle"): needles,
        ("lizard", "size"): measurement("lizard", "size", reading("mebibytes", 11.6, of="model")),
    }
    measured |= {
        (run, "ppl"): measurement(run, "ppl", reading("perplexity", 9.0, 0.1, position=64))
        for run in ("teacher", "lizard")
    }
    shown = []
    monkeypatch.setattr(
        pictures,
        "write_figure",
        lambda path, figure: (shown.append(figure), render.write_figure(path, figure)),
    )
    draw(artefact, measured, tmp_path / "out")
    [legend] = shown[0].subfigs[0].legends
    assert shown[0].get_supxlabel() == "not run for needles: Lizard."
    assert [text.get_text() for text in legend.get_texts()] == ["teacher", "Lizard, 11.6 MiB"]


# --- costs ---


def row(**changes):
    given = {
        "model": "m",
        "sweep": "batch",
        "run": "teacher",
        "batch": 8,
        "prompt": 1,
        "generated": 1,
        "status": "ok",
        "ms_per_token": 1.0,
        "prefill_tokens_per_second": 1.0,
        "decode_tokens_per_second": 100.0,
        "peak_bytes": 2**31,
        "cache_bytes": 1,
        "commit": "a",
    }
    return costs.Row(**given | changes)


CLAIM_OF_COSTS = {
    "left": {"row": "lizard", "at": {"batch": "largest"}},
    "right": {"row": "teacher", "at": {"batch": "largest"}},
    "claim": "c",
    "source": "s",
    "column": "decode_tokens_per_second",
    "op": ">",
    "ratio": 4,
    "margin_by": "ours",
    "published": "p",
}


def verdict(rows, **changes):
    claim = Claim(**CLAIM_OF_COSTS | changes)
    return judge(claim, costs.look_in(claim, rows), remark=costs.remark(claim, rows, "teacher"))


def test_claims_compare_at_the_largest_batch_the_teacher_can_hold():
    rows = [row(), row(batch=16, status="out of memory"), row(run="lizard", decode_tokens_per_second=450.0),
            row(run="lizard", batch=16, decode_tokens_per_second=1.0)]  # fmt: skip
    assert verdict(rows).verdict == "reproduced"
    assert verdict(rows, ratio=5).verdict == "contradicted"
    at_8 = {"left": {"row": "lizard", "at": {"batch": 8}}, "right": None}
    assert verdict(rows, **at_8, ratio=451, op="<").verdict == "reproduced"


def test_rows_that_are_wrong_or_missing_judge_nothing():
    assert verdict([row(), row(run="lizard", status="wrong")]).verdict == UNTESTED
    assert verdict([row(run="lizard")])[:3] == (UNTESTED, "published p", "lizard at largest: not measured")


def test_rows_of_another_commit_than_the_first_series_are_marked():
    rows = [
        row(),
        row(run="lizard"),
        row(run="lizard", batch=4, commit="b"),
        row(run="supra", status="out of memory", commit="c"),
    ]
    assert costs.elsewhere(rows, "teacher") == {"lizard": ["b"]}
    assert costs.elsewhere(rows[:2], "teacher") == costs.elsewhere(rows[2:], "teacher") == {}
    assert "measured at another commit than the teacher: lizard;" in verdict(rows).figures
    rows.append(row(run="hedgehog", batch=4, commit="d"))
    of_each = Claim(**CLAIM_OF_COSTS | {"also": ["hedgehog"]})
    assert costs.remark(of_each, rows, "teacher").endswith("than the teacher: hedgehog, lizard")


def test_a_figure_that_a_file_draws_may_claim_beside_several_rows():
    spec = Own(label="x", says="x", draw="own", needs=(), claims=[CLAIM_OF_COSTS | {"also": ["hedgehog"]}])
    assert spec.names() == ["lizard", "teacher", "hedgehog"]


def test_a_curve_of_costs_is_in_gib_ends_with_memory_and_leaves_out_what_is_measured_to_integrate_over():
    rows = [row(sweep="length", generated=n) for n in (1, 512, 1024)] + [
        row(sweep="length", generated=2048, status="out of memory")
    ]
    curve = costs.points(rows, "teacher", Panel(x="length", y="peak_gib"))
    assert (
        list(curve["x"]) == [512, 1024, 2048]
        and list(curve["value"][:2]) == [2.0, 2.0]
        and list(curve["why"]) == ["", "", "out of memory"]
    )
    assert curve["value"].isna()[2] and not len(costs.points(rows, "lizard", Panel(x="length", y="peak_gib")))


@pytest.mark.parametrize("spec", ["lolcats/figure2", "lizard/figure5", "supra/figure1"])
def test_a_figure_of_costs_names_the_file_that_is_missing_broken_or_empty(tmp_path, spec):
    artefact, path = read(ROOT / f"workflow/papers/{spec}.yaml"), tmp_path / "efficiency.csv"
    about = MINI._replace(files={artefact.files()[0]: path})
    text = (Path(__file__).parent / "frozen/efficiency/efficiency.csv").read_text()
    with pytest.raises(FileNotFoundError, match="efficiency.csv is missing: `snakemake benchmark`"):
        make(artefact, {}, about, tmp_path)
    path.write_text(text.replace(",ok,", ",fine,"))
    with pytest.raises(ValueError, match="efficiency.csv, line 2.status: .*; got 'fine'"):
        make(artefact, {}, about, tmp_path)
    path.write_text(text.splitlines()[0] + "\n")
    with pytest.raises(ValueError, match="no row of"):
        make(artefact, {}, about, tmp_path)
    path.write_text(text)
    with pytest.raises(FileNotFoundError, match="efficiency.provenance.json is missing"):
        make(artefact, {}, about, tmp_path)


# --- drawn by a file beside the spec ---

OWN = """
from relinear.draw.render import write_figure
from matplotlib.figure import Figure

def draw(spec, measured, about, out):
    figure = Figure()
    figure.subplots().plot([r.value for m in measured.values() for r in m.readings])
    paths = [out / f"figure2.{suffix}" for suffix in spec.makes]
    for path in paths:
        write_figure(path, figure)
    return paths
"""


def test_a_file_beside_its_spec_draws_what_no_shape_does(tmp_path):
    claims = [
        {
            "claim": "c",
            "source": "s",
            "left": {"row": "lizard", "column": "gamma", "at": {"head": 1}},
            "op": ">",
            "ratio": 0.5,
            "margin_by": "ours",
        }
    ]
    claims += [claims[0] | {"recipe": "one rate for all"}]
    path = paper(tmp_path, stem="figure2", needs=[{"run": "lizard", "measure": "gates"}], claims=claims)
    path.with_suffix(".py").write_text(OWN)
    artefact = read(path)
    assert (
        artefact.spec.draw == "own"
        and artefact.script == path.with_suffix(".py")
        and artefact.reads() == [("lizard", "gates")]
    )
    measured = {
        ("lizard", "gates"): measurement(
            "lizard", "gates", reading("gamma", 0.9, head=1), reading("gamma", 0.1, head=2)
        )
    }
    verdict, unlike = verdicts(draw(artefact, measured, tmp_path / "out"))
    assert verdict["verdict"] == "reproduced" and "lizard at 1 gamma: 0.90 ± 0.01" in verdict["figures"]
    assert unlike["verdict"] == UNTESTED and "other recipe: one rate for all" in unlike["reason"]
    path.with_suffix(".py").write_text(OWN.replace("return paths", "return paths[1:]"))
    with pytest.raises(
        ValueError, match="figure2.py drew figure2.pdf; workflow/papers/lizard/figure2.yaml makes"
    ):
        make(artefact, measured, MINI, tmp_path / "out")
    path.with_suffix(".py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="has no `draw"):
        make(artefact, measured, MINI, tmp_path / "out")


def test_pictures_have_no_date_in_them(tmp_path):
    from relinear.draw.render import write_figure

    for suffix in ("png", "pdf"):
        for folder in ("a", "b"):
            write_figure(tmp_path / folder / f"x.{suffix}", Figure())
        assert (tmp_path / f"a/x.{suffix}").read_bytes() == (tmp_path / f"b/x.{suffix}").read_bytes()


def test_hedgehogs_figure_4_says_what_its_points_tell_of_the_papers():
    """Accuracy falls with entropy, or rises, or neither; few points say nothing."""
    correlation = own.load(
        ROOT / "workflow/papers/hedgehog/figure4.py", "figure(spec, rows, about)"
    ).correlation
    falls = [(float(i), 100.0 - 9 * i) for i in range(8)]
    assert correlation(falls)[0].endswith("the 8 points is -1.00 (p = 0): as in the paper.")
    assert correlation([(x, -y) for x, y in falls])[0].endswith(": against the paper.")
    assert correlation([(1.0, 2.0), (2.0, 1.0), (3.0, 2.5), (4.0, 1.5)])[0].endswith(": not told from none.")
    assert correlation(falls[:3]) == []
