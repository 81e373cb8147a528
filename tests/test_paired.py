"""Paired errors: the difference of two numbers that were measured on the same items has the error of the
items' differences."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
from conftest import made
from synthetic import measurement, paper, reading

from relinear.draw import About
from relinear.draw.claims import UNTESTED, value_of
from relinear.draw.claims import judge as judged
from relinear.draw.drawing import make as draw
from relinear.draw.paired import Pulls, mean, minus, pulls_of
from relinear.draw.render import number
from relinear.measure.perplexity import Window, over_windows
from relinear.plan.claims import Claim
from relinear.plan.measured import load
from relinear.plan.plan import Plan
from relinear.plan.specs import read
from relinear.plan.strict import ConfigError

REFERENCE = Path(__file__).parents[1] / "results/reference"
CONTROLS = REFERENCE / "smollm2/runs"
N = 400


def outcomes(seed, share=0.6, like=None, changed=0.0):
    """Right or wrong for each item, equal to another run's but for a share of the items."""
    rng = np.random.default_rng(seed)
    own = (rng.random(N) < share).astype(float)
    return own if like is None else np.where(rng.random(N) < changed, own, like)


def scored(folder, run, **tasks):
    """A measurement of tasks that kept its items."""
    (folder / run).mkdir(parents=True)
    rows = [
        {"task": task, "doc_id": i, "acc": x} for task, values in tasks.items() for i, x in enumerate(values)
    ]
    (folder / run / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    readings = [
        reading("acc", x.mean(), x.std(ddof=1) / math.sqrt(len(x)), len(x), task) for task, x in tasks.items()
    ]
    return measurement(run, "commonsense", *readings, folder=folder / run)


COLUMNS = [
    {"name": f"{task}_acc", "measure": "commonsense", "metric": "acc", "of": task, "unit": "percent"}
    for task in ("piqa", "winogrande")
]
CLAIM = {"claim": "better", "source": "s", "left": "lizard", "right": "t2r", "op": ">"}
SPEC = {
    "columns": [*COLUMNS, {"name": "avg", "mean": ["piqa_acc", "winogrande_acc"]}],
    "rows": [{"run": "lizard"}, {"run": "t2r"}],
}


def verdicts(folder, measured, claims, **about):
    artefact = read(paper(folder, **SPEC, claims=claims))
    draw(artefact, measured, About("mini", **about), folder / "out")
    return list(csv.DictReader((folder / "out/table1.claims.csv").read_text().splitlines()))


def test_the_difference_of_two_rows_on_the_same_items_is_paired_and_decides_what_two_errors_apart_cannot(
    tmp_path,
):
    worse = {task: outcomes(i) for i, task in enumerate(("piqa", "winogrande"))}
    better = {task: np.maximum(x, outcomes(7 + i, 0.05)) for i, (task, x) in enumerate(worse.items())}
    measured = {
        (run, "commonsense"): scored(tmp_path, run, **own)
        for run, own in (("lizard", better), ("t2r", worse))
    }
    found = verdicts(tmp_path, measured, [CLAIM | {"column": column} for column in ("piqa_acc", "avg")])
    [one, both] = [
        [100 * (better[task] - worse[task]) for task in tasks] for tasks in (("piqa",), tuple(worse))
    ]
    for row, differences in zip(found, (one, both), strict=True):
        error = math.hypot(*(x.std(ddof=1) / math.sqrt(N) for x in differences)) / len(differences)
        difference = np.mean([x.mean() for x in differences])
        assert (
            f"difference {difference:.2f} ± {error:.2f} (paired)" in row["figures"]
            and row["verdict"] == "reproduced"
        )
        share = 100 * np.concatenate(differences).astype(bool).mean()
        assert (
            f"of {N * len(differences)} items {share:.1f} % better, {100 - share:.1f} % tied"
            in row["figures"]
        )
        assert difference < 2 * math.sqrt(2) * 100 * np.std(worse["piqa"]) / math.sqrt(
            N * len(differences)
        ), "apart they could not tell"
    for run in ("lizard", "t2r"):
        (tmp_path / run / "items.jsonl").unlink()
        again = {key: m._replace(source=m.source._replace(metrics_sha256=run)) for key, m in measured.items()}
        [row] = verdicts(tmp_path, again, [CLAIM | {"column": "avg"}])
        assert "paired" not in row["figures"] and "items" not in row["figures"] and row["verdict"] == UNTESTED


KEPT = {"name": "kept", "unit": "percent", "recovery": {"column": "piqa_acc", "row": "t2r", "chance": 50}}


def kept(tmp_path, ours, theirs, **more):
    """The CSV's cells of the rows lizard and t2r, one as a recovery of the other."""
    measured = {
        (run, "commonsense"): scored(tmp_path, run, piqa=x) for run, x in (("lizard", ours), ("t2r", theirs))
    }
    artefact = read(paper(tmp_path, columns=[COLUMNS[0], KEPT | more], rows=SPEC["rows"]))
    draw(artefact, measured, About("mini"), tmp_path / "out")
    return {row["run"]: row for row in csv.DictReader((tmp_path / "out/table1.csv").read_text().splitlines())}


def test_a_recovery_is_of_what_is_above_chance_and_its_error_is_that_of_the_same_items(tmp_path):
    theirs = outcomes(0, 0.8)
    ours = outcomes(1, 0.5, like=theirs, changed=0.1)
    found = kept(tmp_path, ours, theirs)
    share = (ours.mean() - 0.5) / (theirs.mean() - 0.5)
    assert (
        float(found["lizard"]["kept"]) == pytest.approx(100 * share, rel=1e-4)
        and found["t2r"]["kept"] == "100"
    )
    paired = (ours - share * theirs).std(ddof=1) / math.sqrt(N) / (theirs.mean() - 0.5)
    assert float(found["lizard"]["kept_stderr"]) == pytest.approx(100 * paired, rel=1e-3)
    assert found["t2r"]["kept_stderr"] == "", "of itself it has all, without an error"


def test_of_a_row_at_chance_there_is_nothing_to_recover(tmp_path):
    assert (
        "t2r is not 3 standard errors above chance, 50.00"
        in kept(tmp_path, outcomes(0, 0.7), outcomes(1, 0.5))["lizard"]["kept"]
    )


def test_a_recovery_beyond_a_row_is_of_the_gain_of_another_row_where_lower_is_better(tmp_path):
    base, best = outcomes(0, 0.8), outcomes(1, 0.4)
    between = outcomes(2, 0.5, like=best, changed=0.2)
    recovery = {"column": "piqa_acc", "row": "t2r", "chance": "lizard", "lower": True}
    measured = {
        (run, "commonsense"): scored(tmp_path, run, piqa=x)
        for run, x in (("lizard", base), ("t2r", best), ("supra", between))
    }

    def drawn(**changes):
        rows = [{"run": run} for run in ("lizard", "t2r", "supra")]
        artefact = read(
            paper(tmp_path, columns=[COLUMNS[0], KEPT | {"recovery": recovery | changes}], rows=rows)
        )
        draw(artefact, measured, About("mini"), tmp_path / "out")
        return {
            row["run"]: row for row in csv.DictReader((tmp_path / "out/table1.csv").read_text().splitlines())
        }

    found, gain = drawn(), base.mean() - best.mean()
    share = (base.mean() - between.mean()) / gain
    assert [float(found[run]["kept"]) for run in ("lizard", "t2r", "supra")] == pytest.approx(
        [0, 100, 100 * share], rel=1e-4
    )
    error = (base - between - share * (base - best)).std(ddof=1) / math.sqrt(N) / gain
    assert float(found["supra"]["kept_stderr"]) == pytest.approx(100 * error, rel=1e-3)
    assert found["lizard"]["kept_stderr"] == found["t2r"]["kept_stderr"] == ""
    assert "t2r is not 3 standard errors above lizard" in drawn(lower=False)["supra"]["kept"], "it lost"


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"row": "nobody"}, "no row 'nobody'"),
        ({"column": "kept"}, "no column 'kept'"),
        ({"chance": "nobody"}, "no row 'nobody'"),
    ],
)
def test_a_recovery_of_nothing_is_refused(tmp_path, changes, missing):
    with pytest.raises(ConfigError, match=missing):
        kept(tmp_path, outcomes(0), outcomes(1), recovery=KEPT["recovery"] | changes)


def test_ties_are_the_share_of_columns_with_nearly_the_score_of_another_row(tmp_path):
    # 96 and 80 % of t2r's
    scores = {"t2r": {"piqa": 0.8, "winogrande": 0.5}, "lizard": {"piqa": 0.77, "winogrande": 0.4}}
    measured = {
        (run, "commonsense"): scored(
            tmp_path, run, **{task: (np.arange(N) < share * N).astype(float) for task, share in own.items()}
        )
        for run, own in scores.items()
    }

    def drawn(**changes):
        ties = {"columns": ["piqa_acc", "winogrande_acc"], "row": "t2r", "tolerance": 0.05} | changes
        columns = [*COLUMNS, {"name": "ties", "unit": "percent", "ties": ties}]
        artefact = read(paper(tmp_path, columns=columns, rows=[{"run": "lizard"}, {"run": "t2r"}]))
        draw(artefact, measured, About("mini"), tmp_path / "out")
        return [row["ties"] for row in csv.DictReader((tmp_path / "out/table1.csv").read_text().splitlines())]

    assert [drawn(tolerance=tolerance) for tolerance in (0, 0.05, 0.25)] == [
        ["0", "100"],
        ["50", "100"],
        ["100", "100"],
    ]
    del measured["t2r", "commonsense"]
    assert drawn() == ["not run", "not run"]
    for changes, missing in (
        ({"row": "nobody"}, "no row 'nobody'"),
        ({"columns": ["piqa_acc", "ties"]}, "no column 'ties'"),
    ):
        with pytest.raises(ConfigError, match=missing):
            drawn(**changes)


def test_items_that_are_others_or_not_those_of_the_reading_are_not_paired(tmp_path):
    same = outcomes(0)
    measured = {("lizard", "commonsense"): scored(tmp_path, "lizard", piqa=same, winogrande=same)}
    for name, theirs in (("fewer", same[:-1]), ("equal", same)):
        found = scored(tmp_path / name, "t2r", piqa=theirs, winogrande=theirs)
        [row] = verdicts(
            tmp_path / name, measured | {("t2r", "commonsense"): found}, [CLAIM | {"column": "piqa_acc"}]
        )
        assert "paired" not in row["figures"] and row["verdict"] == UNTESTED, name
    own = measured["lizard", "commonsense"]
    assert pulls_of(own, own.readings[0]) is not None
    for foreign in ({"value": 0.123}, {"n": N + 1}, {"of": "boolq"}, {"metric": "acc_norm"}):
        assert pulls_of(own, own.readings[0]._replace(**foreign)) is None, foreign


def test_of_several_seeds_items_are_paired_and_the_seeds_are_not(tmp_path):
    base = outcomes(0)
    runs = {"lizard": 1, "lizard-seed1": 2, "lizard-seed2": 3, "t2r": 4}
    own = {run: outcomes(seed, like=base, changed=0.1) for run, seed in runs.items()}
    measured = {(run, "commonsense"): scored(tmp_path, run, piqa=x, winogrande=x) for run, x in own.items()}
    claim = CLAIM | {"column": "piqa_acc"}
    artefact = read(paper(tmp_path, **SPEC, claims=[claim], seeds=True))
    draw(artefact, measured, About("mini"), tmp_path / "out")
    [row] = csv.DictReader((tmp_path / "out/table1.claims.csv").read_text().splitlines())
    seeds = 100 * np.stack([own[run] for run in runs if run != "t2r"])
    items = (seeds.mean(0) - 100 * own["t2r"]).std(ddof=1) / math.sqrt(N)
    error = math.hypot(items, seeds.mean(1).std(ddof=1) / math.sqrt(3))
    assert f"± {error:.2f} (paired)" in row["figures"]


# --- on what is committed ---


@pytest.mark.parametrize("measure", ["commonsense", "ppl_novels", "agreement_novels", "lambada"])
def test_the_pulls_on_committed_readings_come_to_their_errors(measure):
    found = load(CONTROLS / "lizard" / measure)
    for own in found.readings:
        assert pulls_of(found, own).stderr == pytest.approx(own.stderr, rel=1e-6), own


@pytest.mark.parametrize("measure", ["answers", "kv_recall", "needle_1024"])
def test_answers_in_context_are_paired_as_far_as_their_items_say(measure):
    found = load(CONTROLS / "lizard" / measure)
    for metric in {"answers": ("f1", "contains"), "kv_recall": ("exact_match", "choice", "nats")}.get(
        measure, ("exact_match", "choice")
    ):
        for own in (own for own in found.all(metric) if "distance" not in own.at):
            pulls = pulls_of(found, own)
            spread = np.std(pulls.outcomes, ddof=1) / math.sqrt(own.n)
            assert (
                len(pulls.items) == own.n
                and np.mean(pulls.outcomes) == pytest.approx(own.value)
                and pulls.stderr == pytest.approx(spread)
            )


def test_a_ratio_of_perplexities_of_the_same_novels_has_the_error_that_agreement_measures():
    """`agreement` reads model and teacher side by side and gives the paired error; two perplexities of the
    same documents come to the same."""
    lizard, teacher = (load(CONTROLS / run / "ppl_novels") for run in ("lizard", "teacher"))
    agreement = load(CONTROLS / "lizard/agreement_novels")
    claim = Claim(claim="c", source="s", left="lizard", right="teacher", column="perplexity", op=">", ratio=1)
    for own in agreement.all("perplexity_ratio"):
        values = [
            value_of(m, m.find("perplexity", at=own.at or None), m.run, "perplexity")
            for m in (lizard, teacher)
        ]
        figures = judged(claim, lambda point, values=values: values[point.row == "teacher"]).figures
        assert f"ratio {own.value:.2f} ± {own.stderr:.2f} (paired)" in figures


@pytest.fixture(scope="module")
def streams(tmp_path_factory):
    """Perplexity of the held-out text of the smoke scale, of the teacher and of T2R before it is trained:
    (run, "perplexity") -> measurement."""
    plan = Plan(scale="smoke", results=tmp_path_factory.mktemp("results"))
    measures = {"teacher": "perplexity", "t2r": "perplexity_before"}
    found = {
        (run, "perplexity"): load(made(plan, f"measure {run} {measure}")) for run, measure in measures.items()
    }
    assert all(each.facts["collapsed"] for each in found.values()), (
        "random models predict no better than chance, and nothing is judged by such"
    )
    return {
        place: each._replace(measure="perplexity", facts=each.facts | {"collapsed": False})
        for place, each in found.items()
    }


def test_perplexity_is_paired_window_by_window(streams, tmp_path):
    both = [(found, found.find("perplexity")) for found in streams.values()]
    for found, own in both:
        pulls = pulls_of(found, own)
        assert pulls.stderr == pytest.approx(own.stderr, rel=1e-6) and len(pulls.items) == 512 // 128
        assert pulls_of(found, found.find("chance_perplexity")) is None, "it is of no window"
    columns = [{"name": "ppl", "measure": "perplexity", "metric": "perplexity"}]
    claim = CLAIM | {"left": "teacher", "right": "t2r", "column": "ppl"}
    artefact = read(
        paper(tmp_path, columns=columns, rows=[{"run": run} for run, _ in streams], claims=[claim])
    )
    draw(artefact, streams, About(next(iter(streams.values())).scale), tmp_path / "out")
    [row] = csv.DictReader((tmp_path / "out/table1.claims.csv").read_text().splitlines())
    difference = minus(*(pulls_of(*each) for each in both))
    assert f"{number(difference.stderr)} (paired)" in row["figures"] and "of 4 items" in row["figures"], row[
        "figures"
    ]
    assert difference.stderr != pytest.approx(math.hypot(*(own.stderr for _, own in both))), (
        "the windows are the same"
    )


def test_a_window_without_a_token_to_predict_pulls_at_nothing(tmp_path):
    rows = [Window(0, 30.0, 10), Window(1, 0.0, 0), Window(2, 22.0, 10), Window(3, 12.0, 5)]
    (tmp_path / "items.jsonl").write_text(
        "".join(json.dumps(row._asdict() | {"sha256": str(row.window)}) + "\n" for row in rows)
    )
    whole = over_windows(rows)
    own = reading("perplexity", whole["value"], whole["stderr"], whole["tokens"])
    pulls = pulls_of(measurement("lizard", "perplexity", own, folder=tmp_path), own)
    assert [item[0][0] for item in pulls.items] == [0, 2, 3] and pulls.stderr == pytest.approx(
        whole["stderr"]
    )


# --- pulls ---


def test_what_is_always_equal_is_not_paired():
    pulls = Pulls(("a", "b"), (0.1, -0.1), (1.0, 0.0))
    assert (
        minus(pulls, pulls) is None
        and minus(pulls, None) is None
        and minus(pulls._replace(items=("a", "c")), pulls) is None
    )
    assert minus(pulls.times(3), pulls).pulls == pytest.approx((0.2, -0.2))


def test_a_mean_is_over_columns_without_a_common_item_or_over_the_same_items():
    one, other = Pulls(("a", "b"), (0.1, -0.1), (1.0, 0.0)), Pulls(("c", "d"), (0.3, -0.3), (1.0, 0.0))
    assert mean([one, other]).pulls == pytest.approx((0.05, -0.05, 0.15, -0.15))
    assert mean([one, one.times(3)]).pulls == pytest.approx((0.2, -0.2))
    assert mean([one, other._replace(items=("b", "c"))]) is None and mean([one, None]) is None
