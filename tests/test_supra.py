"""SUPRA's ablations: training from scratch on a text, and Table 3, which compares it with uptraining."""

import csv
import itertools
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT, made
from safetensors.torch import load_file
from synthetic import measurement, paper, reading
from torch.testing import assert_close

from relinear.attention import load, options, supra
from relinear.attention._base import Heads, Inputs
from relinear.core import store
from relinear.draw.beside import PROVENANCE, VERDICTS, lines_of
from relinear.draw.curves import points_of
from relinear.draw.doses import Dose, doses
from relinear.draw.frame import frame_of
from relinear.draw.planned import draw_committed, draw_planned
from relinear.linearize.loading import load_teacher
from relinear.linearize.model import linearize
from relinear.measure.matrix_similarity import METRICS, READ_OTHERWISE, compare, cosine, spectra
from relinear.plan.catalogue import Run
from relinear.plan.measured import load as load_measured
from relinear.plan.plan import Plan
from relinear.plan.published import published
from relinear.plan.specs import read
from relinear.plan.strict import ConfigError
from relinear.stages._stage import Node
from relinear.tracking.committed import write_manifest
from relinear.train import pretrain

ABLATIONS = ("supra_table3", "supra_decayfactors")
SCRATCH = ("scratch_softmax", "scratch_supra", "scratch_t2r")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Every run of both tables at smoke scale, trained and measured."""
    plan = Plan(scale="smoke", results=tmp_path_factory.mktemp("results"))
    made(
        plan,
        *map(str, sorted({node for name in ABLATIONS for node in plan.reads(plan.artefacts[name]).values()})),
    )
    return plan


def table(path: Path) -> dict[str, dict[str, str]]:
    with path.open() as file:
        return {row.get("row") or row["run"]: row for row in csv.DictReader(file)}


def test_table_3_prints_unique_tokens_times_epochs_of_every_step_behind_a_row(trained):
    files = {
        path.suffix: path for path in draw_planned(trained, trained.artefacts["supra_table3"], finished=True)
    }
    rows = table(trained.root / "supra/table3.csv")
    assert (
        len(rows) == 10
        and rows["Mamba"]["ppl"] == "not run"
        and rows["Mamba"]["published_hellaswag_acc_norm"] == "58.3"
    )
    assert {name: row["doses"] for name, row in rows.items()} == {
        "Mamba": "not run",
        "teacher": "",
        **dict.fromkeys(SCRATCH, "1024 x 2"),
        "supra_new_weights": "1024 x 1",
        "supra_two_steps": "1024 x 1 + 1024 x 1",
        "t2r_uptrained": "1024 x 1",
        "supra_uptrained": "1024 x 1",
        "supra_of_scratch": "1024 x 2 + 1024 x 1",
    }
    assert (rows["supra_of_scratch"]["pretrain_tokens"], rows["supra_two_steps"]["finetune_tokens"]) == (
        "2048",
        "2048",
    )
    text = files[".md"].read_text()
    assert "1.02k x 2 + 1.02k x 1" in text and "58.3" in next(
        line for line in text.splitlines() if line.startswith("| Mamba")
    )
    claims = list(csv.DictReader((trained.root / "supra/table3.claims.csv").read_text().splitlines()))
    assert {claim["verdict"] for claim in claims} == {"not tested"}


def test_doses_are_unknown_where_a_step_s_record_is_not_there_or_it_ended_early(trained, tmp_path):
    measured = trained.folder(Node("measure", "supra_of_scratch", "perplexity"))
    copy = tmp_path / "runs/supra_of_scratch/perplexity"
    shutil.copytree(measured, copy)
    assert (
        doses(load_measured(measured)) == (Dose(1024, 2), Dose(1024, 1))
        and doses(load_measured(copy)) is None
    )
    for run, step in (("supra_of_scratch", "finetune"), ("scratch_softmax", "pretrain")):
        shutil.copytree(trained.folder(Node(step, run)), tmp_path / "runs" / run / step)
    assert list(map(str, doses(load_measured(copy)))) == ["1.02k x 2", "1.02k x 1"]
    record = json.loads((file := tmp_path / "runs/scratch_softmax/pretrain/run.json").read_text())
    record["config"]["recipe"]["patience"] = 3
    file.write_text(json.dumps(record))
    assert doses(load_measured(copy)) is None


def test_the_table_of_decays_has_a_row_for_each_factor(trained):
    draw_planned(trained, trained.artefacts["supra_decayfactors"], finished=True)
    rows = table(trained.root / "supra/decayfactors.csv")
    assert list(rows)[1:] == [
        "t2r_uptrained",
        "supra_denominator",
        "supra_rope_before",
        "supra_decay_none",
        "supra_uptrained",
        "supra_decay_retnet",
    ]
    assert len({row["ppl"] for row in rows.values()}) == 7 and all(
        float(row["ppl_256"]) > 1 for row in rows.values()
    )
    assert {row["gate"] for row in rows.values()} == {"passed"}


def test_what_trains_from_scratch_has_the_shape_and_the_text_of_the_teacher_and_none_of_its_weights(trained):
    teacher = trained.folder(Node("model", "tiny"))
    theirs = load_file(teacher / "model.safetensors")
    for run in SCRATCH:
        weights = load_file(trained.folder(Node("pretrain", run)) / "model.safetensors")
        shared = {name: w for name, w in weights.items() if name in theirs and w.ndim == 2}
        assert len(shared) >= 2 * 7 + 1 and any(".method." in name for name in weights) == (
            run != "scratch_softmax"
        )
        # Independent draws: as far apart as two such tensors are, where a trained copy of the teacher's would
        # be near it.
        assert all(
            (w - theirs[name].float()).std() > theirs[name].float().std() for name, w in shared.items()
        )
        assert (
            trained.parents(Node("pretrain", run))["text"]
            == trained.parents(Node("finetune", "supra_uptrained"))["text"]
        )


def test_weights_are_drawn_by_the_seed_and_the_method_s_own_are_left(trained):
    from relinear.linearize.model import linearize

    teacher = trained.folder(Node("model", "tiny"))
    models = [linearize(load_teacher(teacher, torch.float32), "supra") for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        pretrain.redraw(model, teacher, seed)
    a, b, c = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert [
        name for name in a if torch.equal(a[name], c[name]) and a[name].ndim == 2 and ".method." not in name
    ] == []
    own = [name for name in a if name.endswith(".method.w")]
    assert len(own) == 2 and all(torch.equal(a[name][0], torch.eye(16)) for name in own)
    assert_close(a["model.layers.0.self_attn.q_proj.weight"].std().item(), 0.1, rtol=0.05, atol=0)


def test_a_text_is_learned_from_scratch_in_the_scale_s_dtype_or_in_float32(trained, tmp_path):
    from relinear.plan.job import Job

    node = Node("pretrain", "scratch_supra")
    parents = {role: trained.folder(parent) for role, parent in trained.parents(node).items()}
    for autocast, dtype in ((True, "bfloat16"), (False, "float32")):
        settings = json.loads(json.dumps(trained.settings(node)))
        settings["budget"] |= {"epochs": 12}
        settings["recipe"] |= {"autocast": autocast}
        (out := tmp_path / dtype).mkdir()
        job = Job(name="toy", settings=settings, parents=parents, out=out, work=out, dtype="bfloat16")
        metrics = pretrain.work(job)
        assert metrics["last_loss"] < metrics["first_loss"] - 0.5 and job.hardware["dtype"] == dtype
        assert load_file(out / "model.safetensors")["model.norm.weight"].dtype == torch.float32


def test_a_text_has_the_scale_s_budget_and_recall_its_own():
    for scale, text, recall in (
        ("smoke", (2, 1, 0), (1, 8, 8)),
        ("smollm2", (3, 16, 0), (100, 32, 1000)),
        ("paper", (10, 8, 0), (100, 32, 1000)),
    ):
        plan = Plan(scale=scale)
        for run, expected in (("scratch_supra", text), ("recall_softmax", recall)):
            budget = plan.settings(Node("pretrain", run))["budget"]
            assert (
                budget["epochs"],
                budget["batch_size"] * budget["accumulate"],
                budget["validation"],
            ) == expected and "recall" not in budget


def test_weights_cannot_be_drawn_anew_after_a_step():
    plan = Plan(scale="smoke")
    recipe = {"data": "alpaca", "lr": 1e-3, "init": "random"}
    plan.runs["again"] = Run(model="llama-3-8b", after="scratch_softmax", steps=({"pretrain": recipe},))
    with pytest.raises(
        ConfigError,
        match="'again'.*init: random.*comes after pretrain of scratch_softmax; possible: init: model, or",
    ):
        plan.check_processes(Node("pretrain", "again"), 1)
    plan.runs["encoder"] = Run(model="bert-base", steps=({"pretrain": {**recipe, "data": "cola"}},))
    with pytest.raises(
        ConfigError, match="pretrain trains a model to predict the next token, and 'tiny-bert' is an encoder"
    ):
        plan.check_processes(Node("pretrain", "encoder"), 1)


# --- Figure 1 ---

FIGURE1 = ROOT / "workflow/papers/supra/figure1.yaml"


def test_figure_1_is_drawn_of_committed_runs_and_costs(tmp_path):
    reference, folder = ROOT / "results/reference/smollm2", tmp_path / "smollm2"
    committed, shown = store.opened(reference), ("runs/teacher/", "runs/supra/")
    nodes = [node for node in committed.rows if node.startswith(shown)]
    folder.mkdir()
    store.write(
        folder,
        {
            node: store.Packed(committed.record(node), committed.metrics(node), committed.items(node))
            for node in nodes
        },
    )
    write_manifest(folder, "smollm2", {})
    written = {path.suffix: path for path in draw_committed(folder, read(FIGURE1))}
    assert written[".png"].read_bytes().startswith(b"\x89PNG") and not list(folder.glob("supra/*.pdf"))
    cells = PROVENANCE.of(folder / "supra/figure1")["cells"]
    assert (
        cells["SUPRA, uptrained"]["acc_norm"].endswith("smollm2/nodes.parquet#runs/supra/commonsense")
        and cells["SUPRA, from scratch"]["acc_norm"] is None
    )
    assert cells["supra"]["length.ms_per_token"] == "results/reference/efficiency/efficiency.csv"
    ours = lines_of(ROOT / "tests/frozen/efficiency/supra_figure1.claims.csv")
    assert VERDICTS.of(folder / "supra/figure1") == ours, (
        "its costs are judged as they were without the other panels"
    )


def test_its_published_points_are_those_of_table_1():
    printed = [
        entry for entries in published(ROOT / "workflow/papers/supra", "table1").values() for entry in entries
    ]
    for panel, column in zip(read(FIGURE1).spec.of_readings, ("hellaswag_acc_norm", "mmlu_acc"), strict=True):
        drawn = [
            y
            for points in panel.published.values()
            for ys in points.values()
            for y in (ys if isinstance(ys, tuple) else (ys,))
        ]
        assert sorted(drawn) == sorted(entry.values[column] for entry in printed if column in entry.values)


def test_a_run_lies_at_the_tokens_that_all_its_steps_trained_on():
    spec = read(FIGURE1).spec
    panel, series = spec.of_readings[0], {s.name: s for s in spec.series}
    scored = reading("acc_norm", 0.3, of="hellaswag")
    measured = {
        (run, "commonsense"): measurement(run, "commonsense", scored, tokens=tokens)
        for run, tokens in (
            ("supra", {"finetune": 20}),
            ("supra_uptrained", {"finetune": 10}),
            ("scratch_supra", {"pretrain": 30, "finetune": 5}),
            ("teacher", {}),
        )
    }
    along = {
        name: list(points_of(frame_of(measured), s, panel, measured)["x"])
        for name, s in series.items()
        if s.runs
    }
    assert along == {
        "SUPRA, uptrained": [10, 20],
        "SUPRA, from scratch": [35],
        "softmax teacher": [0],
        "softmax, from scratch": [],
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"panels": [{"x": "training_tokens", "measure": "mmlu", "metric": "acc", "series": ["Mamba"]}]},
            "no series 'Mamba'; have t2r, SUPRA",
        ),
        (
            {"panels": [{"x": "position", "measure": "ppl_novels", "metric": "perplexity"}]},
            "'SUPRA': `runs` lie along.*over 'position'",
        ),
        (
            {"panels": [{"x": "length", "y": "ms_per_token", "measure": "mmlu", "metric": "acc"}]},
            "'ms_per_token' or the measure 'mmlu'; give one",
        ),
        (
            {"series": [{"title": "SUPRA", "run": "supra", "runs": ["t2r"]}]},
            "'SUPRA' needs either a run or runs",
        ),
        (
            {"series": [{"title": "SUPRA", "points": {1: "supra"}}]},
            "unknown key 'points'.*possible: title, run, runs",
        ),
        (
            {"file": "results/efficiency/efficiency.csv", "model": "mistral-7b"},
            "no panel shows a cost of results/efficiency/efficiency.csv",
        ),
    ],
)
def test_panels_and_series_that_do_not_go_together_are_refused(tmp_path, changes, message):
    panels = [{"x": "training_tokens", "measure": "mmlu", "metric": "acc"}]
    series = [{"title": "T2R", "run": "t2r"}, {"title": "SUPRA", "runs": ["supra"]}]
    with pytest.raises(ConfigError, match=message):
        read(paper(tmp_path, stem="figure1", draw="curves", **{"panels": panels, "series": series} | changes))


# --- from T2R to SUPRA ---


def inputs_of(heads: Heads, length: int) -> Inputs:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, length, n, heads.dim, dtype=torch.float64)
        for n in (heads.heads, heads.groups, heads.groups)
    )
    angles = torch.arange(length, dtype=torch.float64)[:, None] * torch.rand(
        heads.dim // 2, dtype=torch.float64
    ).repeat(2)
    cos, sin = (f(angles).expand(2, length, heads.dim) for f in (torch.cos, torch.sin))
    return Inputs(torch.empty(2, length, heads.hidden), q, k, v, cos, sin)


def test_supra_without_its_changes_is_t2r():
    heads = Heads(24, 6, 2, 8, 8**-0.5)
    given = {"normalizer": "denominator", "rope": "before", "decay": "none", "init": "random"}
    ours, t2r = (
        load(method)(heads, options(method, o)).double() for method, o in (("supra", given), ("t2r", {}))
    )
    with torch.no_grad():
        ours.w.copy_(t2r.w_q), ours.b.copy_(t2r.b_q.add_(1.0))
    inputs = inputs_of(heads, 33)
    assert_close(ours(inputs)[0], t2r(inputs)[0], rtol=1e-10, atol=1e-10)
    assert_close(ours.attention_weights(inputs), t2r.attention_weights(inputs), rtol=1e-10, atol=1e-10)
    for other in ({"rope": "after"}, {"normalizer": "groupnorm"}):
        changed = load("supra")(heads, options("supra", given | other)).double()
        changed.load_state_dict(ours.state_dict())
        assert (changed(inputs)[0] - ours(inputs)[0]).abs().max() > 1e-2


@pytest.mark.parametrize("heads", [1, 9, 32])
def test_the_released_decay_leaves_of_a_token_2048_before_what_the_paper_says(heads):
    slowest = supra.log_decay("released", heads).max().exp().item()
    assert slowest**2048 == pytest.approx(3.35e-4, rel=2e-3)
    assert supra.log_decay("none", heads) is None
    if heads > 1:
        assert supra.log_decay("retnet", heads).max().exp().item() ** 2048 > 0.01, "RetNet's reaches further"


def test_a_denominator_with_a_decay_is_refused():
    with pytest.raises(
        ValueError,
        match=(
            "'denominator' is a sum without decay; got decay 'released', possible: decay 'none', or groupnorm"
        ),
    ):
        options("supra", {"normalizer": "denominator"})


def test_the_steps_from_t2r_to_supra_are_one_factor_each():
    runs = Plan(scale="smollm2").runs
    ladder = ["supra_denominator", "supra_rope_before", "supra_decay_none", "supra_uptrained"]
    full = [options("supra", runs[run].options).model_dump() for run in ladder]
    assert [sorted(name for name in a if a[name] != b[name]) for a, b in itertools.pairwise(full)] == [
        ["normalizer"],
        ["rope"],
        ["decay"],
    ]
    assert {str(runs[run].steps) for run in [*ladder, "t2r_uptrained", "supra_decay_retnet"]} == {
        str(runs["supra_uptrained"].steps)
    }


# --- attention matrices beside the teacher's ---


def test_of_known_matrices():
    eye, ones = torch.eye(4, dtype=torch.float64)[None], torch.ones(1, 4, 4, dtype=torch.float64)
    assert cosine(eye, ones).item() == pytest.approx(4 / (2 * 4))
    apart = math.sqrt((4 - 1) ** 2 + 3)  # singular values 1, 1, 1, 1 and 4, 0, 0, 0
    assert spectra(eye, ones).flatten().tolist() == pytest.approx(
        [apart / 2, apart / 2, (3 + 3) / 4, (3 + 3) / 4]
    )
    assert spectra(ones, eye).flatten().tolist() == pytest.approx(
        [apart / 2, apart / 4, (3 + 3) / 4, (3 + 3) / 4]
    )
    assert spectra(eye, 3 * eye).flatten().tolist() == pytest.approx([2.0] * 4) and cosine(
        eye, 3 * eye
    ).item() == pytest.approx(1.0)
    assert spectra(2 * eye, 3 * eye).flatten().tolist() == pytest.approx([1.0, 0.5, 0.5, 1.0])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    plan = Plan(scale="smoke", results=tmp_path_factory.mktemp("similarity"))
    made(plan, "finetune supra")
    return {
        run: load_measured(made(plan, f"measure {run} gate", f"measure {run} matrix_similarity"))
        for run in ("teacher", "supra")
    }


def test_a_teacher_is_like_itself_and_supra_is_not(found):
    same = {name: found["teacher"].find(name, "attention").value for name in (*METRICS, *READ_OTHERWISE)}
    assert all(value == pytest.approx(1.0) for name, value in same.items() if name.startswith("cosine"))
    assert all(
        value == pytest.approx(0.0, abs=1e-5) for name, value in same.items() if name.startswith("singular")
    )
    assert found["supra"].find("cosine", "attention").value < 0.999
    assert found["supra"].find("singular_values", "attention").value > 100 * same["singular_values"]


def test_every_layer_and_head_is_read_with_its_error(found):
    heads = found["supra"].all("cosine_normalised")
    assert {(r.at["layer"], r.at["head"]) for r in heads if r.at} == {
        (layer, head) for layer in range(2) for head in range(6)
    }
    assert all(r.n == 2 and r.stderr is not None for r in heads)


def test_the_other_readings_are_means_over_all_heads_that_say_what_they_are(found):
    for name in READ_OTHERWISE:
        [of_all] = found["supra"].all(name)
        assert of_all.at == {} and of_all.n == 2 and of_all.stderr is not None
    mean = {name: found["supra"].find(name, "attention").value for name in (*METRICS, *READ_OTHERWISE)}
    # a mean is no more than the root of the mean of squares, over the same number
    for rows in ("", "_normalised"):
        assert 0 < mean[f"singular_values{rows}_mean"] <= mean[f"singular_values{rows}"]
    assert mean["cosine_absolute"] != pytest.approx(mean["cosine_normalised"], rel=1e-3), (
        "parts of a row's sum cancel: keys are turned after the map"
    )


def test_rows_are_divided_by_the_absolute_value_of_their_sums():
    """SUPRA's rows do not sum to 1: normalised numbers differ from the others, and do not depend on a row's
    scale."""
    from test_laws import teacher

    softmax, supra = linearize(teacher(), "softmax"), linearize(teacher(), "supra")
    tokens = torch.arange(1, 25)[None]
    plain = dict(zip((*METRICS, *READ_OTHERWISE), compare(softmax, supra, tokens).unbind(-1), strict=True))
    with torch.no_grad():
        for layer in supra.attention_layers():
            of = layer.method.attention_weights
            layer.method.attention_weights = lambda inputs, of=of: 7 * of(inputs)
    scaled = dict(zip((*METRICS, *READ_OTHERWISE), compare(softmax, supra, tokens).unbind(-1), strict=True))
    for name in (
        "singular_values_normalised",
        "singular_values_normalised_l1",
        "singular_values_absolute",
        "cosine_absolute",
        "cosine_of_rows",
    ):
        assert torch.allclose(plain[name], scaled[name]), name
    assert not torch.allclose(plain["singular_values"], scaled["singular_values"], rtol=0.1)
