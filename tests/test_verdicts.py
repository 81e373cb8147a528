"""A verdict is the paper's own: whatever makes a comparison another one than the paper's turns it into `not
tested`, with the reason."""

import csv
import gzip
import itertools
import json
import math
import re
import shutil
from statistics import stdev

import pytest
from conftest import made
from scipy.stats import norm, t
from synthetic import measurement, paper, reading
from transformers import AutoTokenizer

from relinear.core import store
from relinear.draw import About
from relinear.draw.beside import VERDICTS, lines_of
from relinear.draw.claims import BY_CHANCE, UNTESTED, Value, judge, value_of
from relinear.draw.drawing import make
from relinear.draw.drawing import verdicts as judged_alone
from relinear.draw.planned import draw_planned, form_of_plan
from relinear.draw.render import count
from relinear.draw.spreads import COLUMNS, SPREADS, Of, Spreads, committed
from relinear.draw.stated import BY_ITEMS, BY_TRAININGS, NO_NUMBER, Stated, kind_of, stated
from relinear.draw.table import _of_other_trainings
from relinear.draw.trainings import spreads_of
from relinear.get import assets, pieces, text
from relinear.plan.claims import Claim
from relinear.plan.forms import LACKING, PARAMETERS, differences, form_of
from relinear.plan.measured import load
from relinear.plan.plan import Plan
from relinear.plan.specs import available, papers, read
from relinear.plan.strict import WORKFLOW, ConfigError
from relinear.stages._stage import Node

REFERENCE = WORKFLOW.parent / "results/reference"
FORM = {"lizard": {"window": 128, "loss": "mse", "kind": "lora", "seq_len": 2048}}
OWN = {"method": "lizard", "window": 128, "loss": "mse", "kind": "lora", "seq_len": [2048, 2048]}
COLUMN = {"name": "acc", "measure": "mmlu", "metric": "acc", "of": "mmlu", "unit": "percent"}
CLAIM = {
    "claim": "Lizard beats T2R",
    "source": "section 1",
    "left": "lizard",
    "right": "t2r",
    "column": "acc",
    "op": ">",
    "published": "61 and 50",
    "requires": [{"row": "teacher", "above": 25}],
}
SCORES = {"lizard": 0.60, "t2r": 0.52, "teacher": 0.65, "window": 0.40}
LENT = Spreads(
    [
        dict(zip(COLUMNS, (method, "mmlu", "acc", "absolute", "0.05", "2", "r"), strict=True))
        for method in ("lizard", "t2r")
    ]
)


def verdict(
    tmp_path,
    scores=None,
    form=None,
    seeds=3,
    claim=None,
    rows=(),
    spreads=LENT,
    collapsed=(),
    about=None,
    **spec,
):
    """The verdict on a claim of a table of runs with three seeds each, in the paper's form and of its metric,
    but for what is changed."""
    scores, runs = SCORES | (scores or {}), ["lizard", "t2r", "teacher", *rows]
    measured = {}
    for run in (run for run in runs if scores[run] is not None):
        trained = run not in ("teacher", "window")
        for i in range(seeds if trained else 1):
            name = f"{run}-seed{i}" if i else run
            tokens = {"finetune": 4096} if trained else {"finetune": 0}
            got = reading("acc", scores[run] + 0.001 * (i - 1) * trained, 0.01, 1000, "mmlu")
            facts = {"method": run if trained else "softmax", "tokens": tokens, "collapsed": run in collapsed}
            measured[name, "mmlu"] = measurement(name, "mmlu", got, **facts)
            measured[name, "gate"] = measurement(
                name, "gate", reading("passed", 1.0, None, 1, "gate"), **facts
            )
    path = paper(
        tmp_path,
        columns=[COLUMN],
        rows=[{"run": run} for run in runs],
        seeds=True,
        claims=[CLAIM | (claim or {})],
        **spec,
    )
    (path.parent / "paper.yaml").write_text(f"title: A paper\nforms: {json.dumps(FORM)}\n")
    known = About("mini", forms={"lizard": form or OWN}, spreads=spreads)._replace(**about or {})
    make(read(path), measured, known, tmp_path / "out")
    [row] = csv.DictReader((tmp_path / "out/table1.claims.csv").read_text().splitlines())
    return row


# --- the mutations ---


def test_the_paper_s_own_form_with_seeds_and_an_informative_teacher_has_a_verdict(tmp_path):
    found = verdict(tmp_path)
    assert (found["verdict"], found["whose"], found["trainings"]) == ("reproduced", "paper", "3 and 3")
    assert found["compared"] == "lizard acc > t2r acc"
    parts = [float(found[part]) for part in ("error", "error_items", "error_training")]
    assert parts[0] == pytest.approx(math.hypot(*parts[1:]), rel=1e-4) and parts[2] > 0
    assert verdict(tmp_path, scores={"lizard": 0.40, "t2r": 0.52})["verdict"] == "contradicted"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"window": 64}, "lizard: window 64 where the paper has 128"),
        ({"loss": "cross_entropy"}, "lizard: transfer by cross_entropy where the paper has mse"),
        ({"loss": None}, "lizard: transfer by none where the paper has mse"),
        ({"kind": "full"}, "lizard: trained weights full where the paper has lora"),
        ({"seq_len": [1024, 2048]}, "lizard: sequences of 1024 where the paper has 2048"),
    ],
)
def test_another_form_than_the_paper_s_is_not_tested_in_either_direction(tmp_path, changed, said):
    for scores in ({}, {"lizard": 0.40}):
        found = verdict(tmp_path, scores, form=OWN | changed)
        assert found["verdict"] == UNTESTED and found["reason"].startswith(
            f"another form than the paper's ({said}); difference "
        ), found["reason"]


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (
            {"near": OWN | {"window": 64}, "far": OWN | {"window": 64, "loss": "cross_entropy"}},
            "; there is another form than the paper's (near: window 64 where the paper has 128)",
        ),
        ({"same": OWN}, ""),
        ({"unknown": OWN | {"window": 64, LACKING: ["distill"]}}, ""),
        ({"other": {"method": "lolcats", "window": 64}}, ""),
        ({}, ""),
    ],
)
def test_a_form_that_is_not_there_is_not_tested_and_the_nearest_that_is_there_is_named(tmp_path, there, said):
    unmade = {"forms": there, "planned": {"lizard": OWN}}
    found = verdict(tmp_path, scores={"lizard": None}, about=unmade)
    assert (found["verdict"], found["reason"]) == (UNTESTED, f"lizard: acc was not run{said}")
    assert kind_of(found["reason"]) == ("another form" if said else NO_NUMBER)
    ours = verdict(tmp_path, scores={"lizard": None}, about=unmade, claim={"proxy": "MMLU"})
    assert ours["reason"] == "lizard: acc was not run"


@pytest.mark.parametrize("run", ["lolcats_exp_window", "supra", "teacher", "t2r-seed1"])
def test_the_plan_gives_a_run_the_form_that_its_records_have(run):
    measure = "gate" if run == "t2r-seed1" else "commonsense"
    recorded = form_of(load(REFERENCE / f"smollm2/runs/{run}/{measure}"))
    assert form_of_plan(Plan(scale="smollm2"), run) == {
        name: value for name, value in recorded.items() if name not in (LACKING, PARAMETERS)
    }


def test_a_row_may_differ_by_purpose_and_then_in_that_alone(tmp_path):
    without = {"forms": {"lizard": {"window": 0}}}
    assert verdict(tmp_path, form=OWN | {"window": 0}, **without)["verdict"] == "reproduced"
    found = verdict(tmp_path, form=OWN | {"window": 0, "seq_len": [1024]}, **without)
    assert found["reason"].startswith(
        "another form than the paper's (lizard: sequences of 1024 where the paper has 2048)"
    )
    assert "window 128 where the paper has 0" in verdict(tmp_path, **without)["reason"]


def test_another_metric_than_the_paper_s_is_ours_and_contradicts_no_paper(tmp_path):
    found = verdict(tmp_path, scores={"lizard": 0.40}, claim={"proxy": "MMLU"}, form=OWN | {"window": 64})
    assert (found["verdict"], found["whose"]) == ("contradicted", "ours, proxy for MMLU")
    text = (tmp_path / "out/table1.md").read_text()
    assert (
        "Of our own questions: 0 reproduced, 1 contradicted, 0 not tested" in text
        and "paper's claims" not in text
    )


def test_one_training_has_the_spread_of_its_method_in_its_error(tmp_path):
    found = verdict(tmp_path, seeds=1)
    assert (found["verdict"], found["trainings"]) == (UNTESTED, "1 and 1"), (
        "difference of 8 points, of trainings that are 5 apart"
    )
    assert (
        float(found["error_training"]) == pytest.approx(math.hypot(5, 5), rel=1e-3)
        and "within error" in found["reason"]
    )
    assert verdict(tmp_path, seeds=1, scores={"lizard": 0.99})["verdict"] == "reproduced"
    unknown = verdict(tmp_path, seeds=1, scores={"lizard": 0.99}, spreads=Spreads())
    assert (
        unknown["verdict"] == UNTESTED
        and "one training of lizard, and how far two are apart is not known" in unknown["reason"]
    )


def test_a_teacher_at_chance_judges_nothing(tmp_path):
    found = verdict(tmp_path, scores={"teacher": 0.26})
    assert found["verdict"] == UNTESTED
    assert found["reason"].startswith(
        "not informative: teacher 26.00 ± 1.00 is not 3 standard errors above 25.00"
    )


def test_what_an_untrained_window_keeps_too_is_not_reproduced_and_may_be_contradicted(tmp_path):
    near = {"right": "teacher", "margin": -10, "margin_by": "ours", "untrained": "window"}
    found = verdict(tmp_path, claim=near, rows=["window"])
    assert found["verdict"] == "reproduced", "the window is 25 points below"
    found = verdict(tmp_path, claim=near, rows=["window"], scores={"window": 0.64})
    assert found["verdict"] == UNTESTED
    assert found["reason"].startswith(
        "not informative: window, on which nothing was trained, keeps it too: difference -1.00"
    )
    assert (
        verdict(tmp_path, claim=near, rows=["window"], scores={"window": 0.64, "lizard": 0.4})["verdict"]
        == "contradicted"
    )


@pytest.mark.parametrize(
    ("supra", "verdict_of", "says"),
    [
        (
            0.30,
            "reproduced",
            "beside t2r: difference 8.00 ± 1.42 > 0.00 by more than 2 standard errors; beside",
        ),
        (0.59, UNTESTED, "beside supra: difference 1.00 ± 1.42 is within error of 0.00"),
        (
            0.90,
            "contradicted",
            "beside supra: difference -30.00 ± 1.42 < 0.00 by more than 2 standard errors",
        ),
    ],
)
def test_what_is_claimed_beside_several_rows_holds_beside_each(tmp_path, supra, verdict_of, says):
    found = verdict(tmp_path, scores={"supra": supra}, claim={"also": ["supra"]}, rows=["supra"])
    assert (found["verdict"], found["compared"]) == (verdict_of, "lizard acc > t2r acc and supra acc")
    assert found["reason"].startswith(says), found["reason"]
    assert "t2r 52.00" in found["figures"] and f"supra {100 * supra:.2f}" in found["figures"]


@pytest.mark.parametrize("sides", [("t2r", "supra"), ("supra", "t2r")])
def test_a_row_without_a_number_is_why_a_claim_beside_several_rows_is_not_tested(tmp_path, sides):
    """And not that another row is within its error: no training could settle that claim."""
    claim = {"right": sides[0], "also": sides[1:]}
    found = verdict(tmp_path, scores={"t2r": 0.59, "supra": None}, claim=claim, rows=["supra"])
    assert (found["verdict"], found["reason"]) == (UNTESTED, "beside supra: supra: acc was not run")
    told = Stated("p", "c", "s", (), found["compared"], "", (("folder", found),))
    assert told.kind == NO_NUMBER and found["error"] == ""
    found = verdict(tmp_path, scores={"t2r": 0.90, "supra": None}, claim=claim, rows=["supra"])
    assert found["verdict"] == "contradicted"


def test_a_training_that_collapsed_judges_nothing(tmp_path):
    found = verdict(tmp_path, collapsed=("t2r",))
    assert (found["verdict"], found["reason"]) == (
        UNTESTED,
        "t2r collapsed in training: it predicts no better than chance",
    )


def test_another_dose_or_recipe_judges_nothing(tmp_path):
    dose = verdict(tmp_path, claim={"dose": {"lizard": 8192}})
    assert dose["verdict"] == UNTESTED and dose["reason"].startswith(
        "other dose: lizard had 4.1k of 8.19k tokens; difference"
    ), dose
    for scores in ({}, {"lizard": 0.40}):
        found = verdict(tmp_path, scores, claim={"recipe": "one of eight"})
        assert found["verdict"] == UNTESTED and found["reason"].startswith(
            "other recipe: one of eight; difference"
        )


BY_SIZE = {"dose": {"lizard": 2.0e10}, "parameters": 7.0e9}


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (1434, "; dose by parameter: lizard had 4.1k of 20B tokens, 2.86 of 2.86 a parameter"),
        (1508, "; dose by parameter: lizard had 4.1k of 20B tokens, 2.72 of 2.86 a parameter"),
        (1510, "other dose: lizard had 4.1k of 20B tokens, 2.71 of 2.86 a parameter; difference"),
        (None, "other dose: lizard had 4.1k of 20B tokens, a parameter not known; difference"),
    ],
)
def test_a_dose_by_parameter_is_reached_at_95_percent_and_both_figures_are_said(tmp_path, size, said):
    for scores, verdicts in (({}, "reproduced"), ({"lizard": 0.40}, "contradicted")):
        found = verdict(tmp_path, scores, claim=BY_SIZE, form=OWN | {"parameters": size})
        assert found["verdict"] == (UNTESTED if said.startswith("other") else verdicts), found
        reaches = found["reason"].startswith if said.startswith("other") else found["reason"].endswith
        assert reaches(said), found["reason"]


def test_a_dose_without_parameters_is_one_of_tokens_however_small_the_model(tmp_path):
    found = verdict(tmp_path, claim={"dose": BY_SIZE["dose"]}, form=OWN | {"parameters": 1434})
    assert found["verdict"] == UNTESTED
    assert found["reason"].startswith("other dose: lizard had 4.1k of 20B tokens; difference")


# --- errors of few ---


def test_few_seeds_and_few_documents_need_more_errors_than_two():
    claim = Claim(claim="c", source="s", left="a", right="b", column="x", op=">")

    def judged(difference, n, freedom, trainings=3):
        values = {
            "a": Value(difference, 1.0, "a", apart=1.0, freedom=freedom, n=n, trainings=trainings),
            "b": Value(0.0, 0.0, "b"),
        }
        return judge(claim, lambda point: values[point.row]).verdict

    level = 2 * norm.sf(2)
    assert pytest.approx(level) == BY_CHANCE
    for freedom in (1, 2, 5, 30):
        enough = t.isf(level / 2, freedom)
        assert (
            judged(enough * 1.001, None, freedom) == "reproduced"
            and judged(enough * 0.999, None, freedom) == UNTESTED
        )
    assert judged(2.01, None, math.inf) == "reproduced"


def test_six_books_are_six_documents():
    """The pairs are of six novels: five degrees of freedom, so 2.6 errors are as seldom as two of many."""
    found = [load(REFERENCE / f"smollm2/runs/{run}/ppl_novels") for run in ("lizard", "window_128")]
    values = [value_of(each, each.find("perplexity"), each.run, "ppl") for each in found]
    claim = Claim(claim="c", source="s", left="lizard", right="window_128", column="ppl", op="<")
    reason = judge(claim, lambda point: values[point.row != "lizard"]).reason
    assert f"by more than {t.isf(norm.sf(2), 5):.2g} standard errors" in reason, reason


# --- spreads ---


def test_the_committed_spreads_are_those_of_the_committed_records():
    want = [
        {name: value if isinstance(value, str) else f"{value:g}" for name, value in row.items()}
        for row in spreads_of(REFERENCE)
    ]
    assert lines_of(SPREADS) == want


def test_single_heads_do_not_widen_the_spread_of_their_mean():
    runs = ("recall_softmax", "recall_softmax-seed1")
    found = [load(REFERENCE / f"encoders_smollm2/runs/{run}/entropy").find("entropy") for run in runs]
    spread = committed().find(Of("softmax", "entropy", "entropy"))
    assert spread.sd == pytest.approx(stdev(each.value for each in found), rel=1e-3)


def test_a_number_of_another_training_than_the_committed_one_is_named():
    places = [("lizard", "lambada"), ("lizard-seed1", "lambada"), ("lizard-seed1", "state_bytes")]
    measured = {(run, measure): load(REFERENCE / f"smollm2/runs/{run}/{measure}") for run, measure in places}
    about = About("smollm2", of_shape={"state_bytes"})
    assert _of_other_trainings(measured, about) == ["`lizard-seed1` (lambada)"]


def test_a_spread_is_that_of_the_method_else_the_largest_known():
    known = committed()
    own, other = (
        known.find(Of("lizard", "perplexity", "perplexity")),
        known.find(Of("supra", "perplexity", "perplexity")),
    )
    t2r = known.find(Of("t2r", "perplexity", "perplexity"))
    assert own.sd < 0.001 < t2r.sd and other == t2r, (
        "no two trainings of SUPRA have a perplexity here, so that of the widest stands for them"
    )
    assert known.of((Of("lizard", "perplexity", "perplexity"),), 40.0).sd == pytest.approx(40 * own.sd)
    parts = (Of("lizard", "commonsense", "acc", 100.0),) * 4
    assert known.of(parts, 50.0).sd == pytest.approx(100 * known.find(parts[0]).sd / 2), (
        "four tasks vary independently"
    )
    assert known.find(Of("new", "new", "new")).sd > 0.03 and Spreads().find(parts[0]) is None


# --- what the reader of specs refuses ---

COSTS = {
    "columns": [{"name": "ms", "measure": "speed", "metric": "ms"}],
    "rows": [{"run": "lizard"}, {"run": "t2r"}],
}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            {"claims": [CLAIM | {"claim": "Lizard beats T2R by 7 points", "margin": 7}]},
            "claim 'Lizard beats T2R by 7 points': the margin 7 does not stand in what is published, '61 and"
            " 50'; give there what the paper prints, or say `margin_by: ours`",
        ),
        (
            {"claims": [CLAIM | {"published": "61 at 1B", "margin": 1}]},
            "the margin 1 does not stand in what is published, '61 at 1B'",
        ),
        (
            {"claims": [CLAIM | {"right": None, "ratio": 95}]},
            "the ratio 95 does not stand in what is published, '61 and 50'",
        ),
        (
            {"claims": [CLAIM | {"also": ["teacher"], "either": {"lizard": "t2r"}}]},
            "`also` names further rows in the place of `right`, and goes with no `either`; got right: t2r,"
            " either: {'lizard': 't2r'}",
        ),
        ({"claims": [CLAIM | {"also": ["nobody"]}]}, "no row 'nobody'; have lizard, t2r, teacher"),
        (
            {"claims": [CLAIM | {"source": "our question", "proxy": "MMLU"}]},
            "a proxy stands for a number that a paper prints",
        ),
        (
            {"claims": [CLAIM], "forms": {"lizzard": {}}},
            "forms: no row of a claim 'lizzard'; have lizard, t2r",
        ),
        (
            {"claims": [CLAIM], "forms": {"lizard": {"widow": 3}}},
            "forms: lizard: no setting 'widow'; possible: ",
        ),
        (
            {"claims": [CLAIM], "forms": {"lizard": {"gate": "sigmoyd"}}},
            "forms: lizard.gate: Input should be 'sigmoid', ",
        ),
        (
            {"claims": [CLAIM], "forms": {"lizard": {"gate": "sigmoid", "rope": "after"}}},
            "forms: lizard: no method has all of gate, rope",
        ),
        (
            {"claims": [CLAIM | {"parameters": 7.0e9}]},
            "claim 'Lizard beats T2R': `parameters` says that a dose is compared in tokens a parameter, and"
            " the claim has no `dose`; give both, or neither",
        ),
        (
            {"claims": [CLAIM | {"dose": {"lizard": 2.0e10}, "parameters": 7}]},
            "`parameters` are those of the paper's model, 1e+06 to 1e+13, such as 7.0e+9; got 7;",
        ),
        (
            {
                "columns": [COLUMN | {"metric": "perplexity"}],
                "claims": [CLAIM | {"one_of": "one of eight"}],
            },
            "claim 'Lizard beats T2R': `one_of` asks how good a better recipe could be, and the best of 'acc'"
            " is not known; possible: `recipe`, `best_of` in paper.yaml, or a metric of acc, acc_norm, ",
        ),
        ({"claims": [CLAIM | {"untrained": "nobody"}]}, "no row 'nobody'; have lizard, t2r, teacher"),
        (
            COSTS
            | {
                "claims": [
                    {"claim": "c", "source": "s", "left": "lizard", "right": "t2r", "column": "ms", "op": "<"}
                ]
            },
            "claim 'c' compares what a program took with another program or with a card",
        ),
    ],
)
def test_a_claim_that_is_not_the_paper_s_says_so_or_is_refused(tmp_path, spec, said):
    given = {"columns": [COLUMN], "rows": [{"run": run} for run in ("lizard", "t2r", "teacher")]} | spec
    with pytest.raises(ConfigError, match=re.escape(said)):
        read(paper(tmp_path, **given))


def test_a_paper_s_form_is_one_that_a_run_can_have(tmp_path):
    path = paper(tmp_path, columns=[COLUMN], rows=[{"run": "lizard"}])
    for forms, said in (
        ({"lizzard": {}}, "no method 'lizzard'; have "),
        ({"lizard": {"feature_map": "exp"}}, "no setting 'feature_map'; possible: "),
        (
            {"lizard": {"window": "wide"}},
            r"forms: lizard\.window: Input should be a valid integer.*got 'wide'",
        ),
        ({"lizard": {"gate": "sigmoyd"}}, r"forms: lizard\.gate: Input should be .*got 'sigmoyd'"),
        ({"lizard": {"loss": "mae"}}, r"\.loss: Input should be 'cross_entropy' or 'mse'; got 'mae'"),
        ({"lizard": {"kind": "lara"}}, r"\.kind: Input should be 'lora', 'full' or 'method'; got 'lara'"),
        ({"lizard": {"seq_len": 0}}, r"\.seq_len: Input should be greater than 0; got 0"),
        ({"lizard": {"gate_bias": "inf"}}, r"\.gate_bias must be a finite number; got inf"),
    ):
        (path.parent / "paper.yaml").write_text(f"title: A paper\nforms: {json.dumps(forms)}\n")
        with pytest.raises(ConfigError, match=said):
            papers(tmp_path / "papers")


# --- what is committed ---


def test_lolcats_table_2_is_judged_by_the_form_that_its_paper_has():
    artefact = available(WORKFLOW / "papers")["lolcats_table2"]
    asked = artefact.forms["lolcats"]["lolcats"] | {"window": 16}
    own, released = (
        form_of(load(REFERENCE / f"smollm2/runs/{run}/commonsense"))
        for run in ("lolcats_exp_window", "lolcats_window")
    )
    assert differences(own, asked) == []
    assert {
        "window 64 where the paper has 16",
        "variant code where the paper has paper",
        "transfer by mse where the paper has cross_entropy",
    } <= set(differences(released, asked))
    found = {row["claim"]: row for row in VERDICTS.of(REFERENCE / "smollm2/lolcats/table2")}
    near, adds = (
        found[claim]
        for claim in (
            "The window's model stays within 1.6 points of its teacher on average",
            "The window adds to the average",
        )
    )
    assert near["verdict"] == "contradicted" and near["compared"].startswith("lolcats_exp_window ")
    assert adds["verdict"] == UNTESTED and "is within error of 0.00" in adds["reason"]
    assert all(
        row["whose"] == "ours" for claim, row in found.items() if claim.startswith("In the released form")
    )


def test_doses_are_by_parameter_where_a_claim_is_about_a_model_of_supra_alone_and_in_tokens_elsewhere():
    """What sets one method's budget beside another's, and budgets that do not grow with the model, are about
    tokens."""
    by_parameter, in_tokens = set(), set()
    for artefact in available(WORKFLOW / "papers").values():
        for claim in artefact.spec.claims:
            if claim.dose and claim.source != "our question":
                kind = in_tokens if claim.parameters is None else by_parameter
                kind.add((claim.paper or artefact.paper, claim.claim))
    assert {paper for paper, _ in by_parameter} == {"supra"}
    assert {claim for paper, claim in in_tokens if paper == "supra"} == {
        "SUPRA, of 20B tokens, is above RWKV-5, of 1.1T, on HellaSwag",
        "SUPRA, of 20B tokens, is above RetNet, of 200B, on HellaSwag",
    }


def test_figures_of_the_same_runs_on_other_data_are_other_claims():
    labels = {claim.claim: claim.labels for claim in stated() if claim.paper == "hedgehog"}
    for data, label in (("MRPC", "Hedgehog Figure 10"), ("QNLI", "Hedgehog Figure 11")):
        own = [claim for claim in labels if re.search(f"trained on CoLA is nearer.* on {data}$", claim)]
        assert len(own) == 5 and all(labels[claim] == (label,) for claim in own)
    tracks = "Trained Hedgehog tracks softmax attention more closely than 1 + ELU"
    assert labels[tracks] == ("Hedgehog Figure 7",)


def test_the_row_nearest_to_a_verdict_speaks_for_a_claim():
    rows = [
        {
            "verdict": UNTESTED,
            "reason": "another form than the paper's (x); 1 is within error of 0",
        },
        {"verdict": UNTESTED, "reason": "x was not run"},
        {"verdict": UNTESTED, "reason": "the scale mini is a demonstration; 1 is within error of 0"},
        {"verdict": UNTESTED, "reason": "difference 1 is within error of 0"},
        {"verdict": UNTESTED, "reason": "other dose: x; difference 1 is within error of 0"},
        {"verdict": "contradicted", "reason": "1 < 0"},
        {"verdict": "contradicted", "reason": "2 < 0"},
    ]
    for n, speaks in ((3, 0), (5, 3), (7, 5)):
        folders = tuple((str(i), row) for i, row in enumerate(rows[:n]))
        assert Stated("p", "c", "s", (), "a > b", "", folders).told == (str(speaks), rows[speaks])


def test_within_error_says_whether_more_trainings_could_settle_it():
    def kind(reason, items):
        row = {"verdict": UNTESTED, "reason": reason, "error_items": str(items)}
        return Stated("p", "c", "s", (), "a > b", "", (("x", row),)).kind

    within = "difference 5.24 ± 6.92 (paired) is within error of -0.40"
    assert kind(within, 2.8) == BY_TRAININGS and kind(within, 2.9) == BY_ITEMS
    assert kind("1.14 ± 0.07 is within error of 1.05", 0.04) == BY_TRAININGS
    of_forms = f"by a: {within}; by b, a form that the paper states, too: not tested, 1 is within error"
    assert kind(of_forms, 2.9) == BY_ITEMS
    assert (
        kind(f"by a: not run; by b, a form that the paper states, too: not tested, {within}", "") == NO_NUMBER
    )
    for claim in stated():
        assert claim.kind != "within error", claim.claim


@pytest.mark.parametrize("own", [{}, {"proxy": "MMLU"}, {"source": "our question"}])
def test_a_claim_on_a_number_that_its_table_does_not_print_is_refused_without_a_proxy(tmp_path, own):
    path = paper(
        tmp_path,
        columns=[COLUMN, COLUMN | {"name": "f1"}],
        rows=[{"run": run} for run in ("lizard", "t2r", "teacher")],
        claims=[CLAIM | {"column": "f1", "requires": []} | own],
        published=[{"row": "lizard", "column": "acc", "value": 61.2}],
    )
    if own:
        assert read(path).spec.claims[0].ours
        return
    said = (
        "claim 'Lizard beats T2R': nothing is published in 'f1'; possible: a column of acc, `proxy` with what"
        " the paper prints, or source: our question"
    )
    with pytest.raises(ConfigError, match=re.escape(said)):
        read(path)


def test_one_of_eight_recipes_judges_of_recall_what_a_better_one_could_not_turn():
    judged = {}
    for file in REFERENCE.glob("*_smollm2/claims.csv"):
        told = VERDICTS.committed(file.parent).items()
        for row in (row for place, own in told if place.startswith("hedgehog/") for row in own):
            if "sweep_recall_" in row["compared"]:  # all of Hedgehog's eight
                judged[row["claim"]] = row["verdict"]
            elif (
                "recall_" in row["compared"]
                and " ar" in row["compared"]
                and "floor" not in row["compared"].split()[:2]
            ):
                stands = {">": "reproduced", "<": "contradicted"}[">" if " > " in row["compared"] else "<"]
                assert row["verdict"] in (UNTESTED, stands), (file, row["claim"])
                judged[row["compared"]] = row["verdict"]
    assert (
        judged["recall_taylor ar > 99.00"] == "reproduced"
        and judged["recall_taylor ar > recall_softmax ar by -1.00"] == "reproduced"
        and judged["recall_softmax ar > recall_elu ar by 50.00"] == "reproduced"  # by the best of its eight
        and judged["Hedgehog solves associative recall"] == "contradicted"
        and judged["Hedgehog is as good as softmax attention"] == "contradicted"
        and judged["Hedgehog is as good as the Taylor map"] == "contradicted"
    )
    for one in ("recall_elu", "recall_performer_code"):
        assert judged[f"{one} ar < {one} floor by -3.00"] == UNTESTED


def test_a_proxy_and_a_question_of_ours_contradict_no_paper():
    files = sorted(REFERENCE.glob("*/claims.csv"))
    assert files and not [*REFERENCE.rglob("*.claims.csv")]
    for file in files:
        for row in itertools.chain.from_iterable(VERDICTS.committed(file.parent).values()):
            assert row["whose"] == "paper" or row["whose"].startswith("ours"), (file, row["claim"])
            assert (row["source"] == "our question") <= (row["whose"] == "ours")


def test_costs_of_one_program_against_another_are_judged_on_no_other_card():
    for folder in ("efficiency", "kernels"):
        for row in itertools.chain.from_iterable(VERDICTS.committed(REFERENCE / folder).values()):
            left, *right = row["compared"].split(" / ")
            grows = right and left.split()[:2] == right[0].split()[:2]
            assert grows or row["verdict"] == UNTESTED, row["claim"]


def test_a_share_that_is_computed_from_single_trainings_has_their_spread_in_its_error():
    spreads = Spreads(
        [
            {
                "method": "hedgehog",
                "measure": "lra",
                "metric": "accuracy",
                "sd": "0.03",
                "freedom": "2",
                "from": "x",
            }
        ]
    )
    of = (Of("hedgehog", "lra", "accuracy", 100.0),)
    ours, theirs = (
        Value(value, 0.4, name, trainings=1, of=of) for value, name in ((88.0, "ours"), (87.0, "theirs"))
    )
    room = 87.0 - 10.0
    share = Value(
        100 * 78 / room, 0.5, "share", behind=((100 / room, ours), (-100 * 78 / room**2, theirs)), trainings=1
    )
    claim = Claim(
        claim="recovers",
        source="section 1",
        left="share",
        column="recovered",
        op=">",
        ratio=99,
        margin_by="ours",
    )
    assert judge(claim, lambda _: share).verdict == "reproduced", "by its items alone"
    judged = judge(claim, lambda _: share, spreads=spreads)
    assert judged.verdict == "not tested" and "within error" in judged.reason
    assert judged.error_training == pytest.approx(
        math.hypot(3 * 100 / room, 3 * 100 * 78 / room**2), rel=1e-3
    )
    unknown = judge(claim, lambda _: share, spreads=Spreads([]))
    assert unknown.verdict == "not tested" and "one training of share" in unknown.reason


RECIPES = {
    "claim": "solves",
    "source": "section 1",
    "left": "a",
    "column": "ar",
    "one_of": "the best of eight",
    "margin_by": "ours",
}


def test_of_one_recipe_of_several_that_verdict_stands_which_a_better_recipe_could_not_turn():
    say = RECIPES
    solves, fails = Claim(**say, op=">", ratio=99), Claim(**say, op="<", ratio=20)
    for value, of_solves, of_fails in (
        (99.9, "reproduced", "contradicted"),
        (15.0, "not tested", "not tested"),
    ):
        look = lambda _, value=value: Value(value, 0.1, "a")  # noqa: E731
        assert judge(solves, look, best=lambda _: 100.0).verdict == of_solves
        assert (found := judge(fails, look, best=lambda _: 100.0)).verdict == of_fails
    assert "a better one could turn this" in found.reason
    assert judge(fails, look, best=lambda _: 100.0, settled=lambda _: True).verdict == "reproduced"
    unknown = judge(fails, look)
    assert unknown.verdict == UNTESTED and "which is the best for a is not measured" in unknown.reason


ENTROPY = {"name": "nats", "measure": "entropy", "metric": "entropy"}
SPIKIER = {
    "claim": "a is spikier than b",
    "source": "section 1",
    "left": "a",
    "right": "b",
    "column": "nats",
    "op": "<",
    "one_of": "the best of three",
}
OF_THREE = {
    "measure": "recall",
    "metric": "accuracy",
    "not_at": ["mini"],
    "runs": {"a": ["a_2", "a_3"], "b": ["b_2"]},
}
OF_B = {"b": (1.0, 2.0), "b_2": (0.5, 5.0)}  # run -> its accuracy and its entropy
UNKNOWN = "which is the best for a is not measured, or not clear"
SHAPES = {
    "table": {"columns": [ENTROPY], "rows": [{"run": "a"}, {"run": "b"}]},
    "maps": {"draw": "attention_maps", "measure": "entropy", "runs": {"A": "a", "B": "b"}},
}


def of_recipes(tmp_path, shape, numbers, seeds=True, budget=1.0, sd=0.0):
    """The verdict on a claim about the entropy of runs whose paper takes the best of three; `numbers`: run ->
    its accuracy and its entropy, None for what was not measured; `sd`: the accuracy's over trainings."""
    column = {"column": "entropy"} if shape == "maps" else {}
    path = paper(tmp_path, claims=[SPIKIER | column], seeds=seeds, **SHAPES[shape])
    (path.parent / "paper.yaml").write_text(f"title: A paper\nbest_of: {json.dumps(OF_THREE)}\n")
    measured = {}
    for run, (accuracy, entropy) in numbers.items():
        facts = {"method": run[0], "tokens": {"pretrain": 4096}}
        for measure, metric, value, of in (
            ("recall", "accuracy", accuracy, "recall"),
            ("entropy", "entropy", entropy, "attention"),
            ("gate", "passed", 1.0, "gate"),
        ):
            if value is not None:
                measured[run, measure] = measurement(
                    run, measure, reading(metric, value, 0.01, 100, of), **facts
                )
    spread = {("entropy", "entropy"): 0.05, ("recall", "accuracy"): sd}
    rows = [(method, *of, "absolute", str(spread[of]), "9", "r") for method in "ab" for of in spread]
    spreads = Spreads([dict(zip(COLUMNS, row, strict=True)) for row in rows])
    [file, _] = judged_alone(
        read(path), measured, About("mini", spreads=spreads, budget=budget), tmp_path / "out"
    )
    [row] = lines_of(file)
    return row


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("numbers", "verdict", "says"),
    [
        # one recipe of a's three, and two, however good
        ({"a": (0.2, 3.0), **OF_B}, UNTESTED, UNKNOWN),
        ({"a": (1.0, 1.0), **OF_B}, UNTESTED, UNKNOWN),
        ({"a": (0.2, 3.0), "a_2": (0.5, 1.0), **OF_B}, UNTESTED, UNKNOWN),
        # all three: the second is the best, whether it keeps the claim or not
        (
            {"a": (0.2, 3.0), "a_2": (0.5, 1.0), "a_3": (0.3, 3.0), **OF_B},
            "reproduced",
            "a is the best of 3 recipes, a_2",
        ),
        (
            {"a": (0.2, 1.0), "a_2": (0.5, 3.0), "a_3": (0.3, 1.0), **OF_B},
            "contradicted",
            "a is the best of 3 recipes, a_2",
        ),
        # one of b's two
        (
            {"a": (0.2, 3.0), "a_2": (0.5, 1.0), "a_3": (0.3, 3.0), "b": (1.0, 2.0)},
            UNTESTED,
            "the best for b",
        ),
        # two are as good, or within two errors (0.028): which of them the paper would take is not known
        ({"a": (0.5, 1.0), "a_2": (0.5, 3.0), "a_3": (0.3, 3.0), **OF_B}, UNTESTED, UNKNOWN),
        ({"a": (0.48, 1.0), "a_2": (0.5, 3.0), "a_3": (0.3, 3.0), **OF_B}, UNTESTED, UNKNOWN),
        # the entropy of the best is not measured
        ({"a": (0.2, 1.0), "a_2": (0.5, None), "a_3": (0.3, 1.0), **OF_B}, UNTESTED, UNKNOWN),
    ],
)
def test_a_metric_without_a_best_is_judged_of_the_one_recipe_that_is_best(
    tmp_path, shape, numbers, verdict, says
):
    found = of_recipes(tmp_path, shape, numbers)
    assert found["verdict"] == verdict and says in f"{found['reason']};", found["reason"]


@pytest.mark.parametrize(("sd", "verdict"), [(0.05, "reproduced"), (0.1, UNTESTED)])
def test_a_recipe_is_no_better_than_another_within_what_trainings_differ_by(tmp_path, sd, verdict):
    """0.2 apart: 2.6 errors of one training on either side, then 1.4."""
    numbers = {"a": (0.3, 3.0), "a_2": (0.5, 1.0), "a_3": (0.3, 3.0), **OF_B}
    found = of_recipes(tmp_path, "table", numbers, sd=sd)
    assert (found["verdict"], UNKNOWN in f"{found['reason']};") == (verdict, verdict == UNTESTED), found


@pytest.mark.parametrize("shape", SHAPES)
def test_of_another_recipe_one_training_is_read_and_of_the_run_s_own_all(tmp_path, shape):
    numbers = {
        "a": (0.2, 9.0),
        "a-seed1": (0.2, 9.0),
        "a_2": (0.5, 1.0),
        "a_2-seed1": (0.5, 1.2),
        "a_3": (0.3, 9.0),
        "b": (1.0, 3.0),
        "b-seed1": (1.0, 3.2),
        "b_2": (0.5, 9.0),
    }
    found = of_recipes(tmp_path, shape, numbers)
    assert (found["verdict"], found["trainings"]) == ("reproduced", "1 and 2"), found
    assert "difference -2.10" in found["reason"]
    alone = of_recipes(tmp_path, shape, numbers, seeds=False)
    assert alone["trainings"] == "1 and 1" and "difference -2.00" in alone["reason"]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_part_of_the_budget_has_no_best_recipe(tmp_path, shape):
    numbers = {"a": (0.2, 3.0), "a_2": (0.5, 1.0), "a_3": (0.3, 3.0), **OF_B}
    assert of_recipes(tmp_path, shape, numbers, budget=0.1)["verdict"] == UNTESTED


def test_other_recipes_are_needed_where_a_scale_trains_them_and_drawn_nowhere(tmp_path):
    path = paper(tmp_path, claims=[SPIKIER], **SHAPES["table"])
    (path.parent / "paper.yaml").write_text(f"title: A paper\nbest_of: {json.dumps(OF_THREE)}\n")
    spec = read(path).spec
    own = [(run, measure) for run in "ab" for measure in ("entropy", "gate")]
    scores = [("a", "recall"), ("b", "recall")]
    others = {(run, measure) for run in ("a_2", "a_3", "b_2") for measure in ("entropy", "gate", "recall")}
    assert spec.draws("smollm2") == spec.draws("mini") == own
    assert spec.reads("mini") == own + scores
    assert set(spec.reads("smollm2")) == {*own, *scores} | others
    judged_by_none = paper(tmp_path, claims=[], **SHAPES["table"])
    assert read(judged_by_none).spec.reads() == own


@pytest.mark.parametrize(
    ("op", "margin", "left", "right", "best", "verdict"),
    [
        # at least as good, to a point: what is at the top cannot be passed
        (">", -1, 99.9, 100.0, 100.0, "reproduced"),
        (">", -1, 99.9, 98.0, 100.0, "reproduced"),
        (">", -1, 98.0, 90.0, 100.0, UNTESTED),  # a better recipe of the right side passes it
        (">", -1, 36.0, 100.0, 100.0, UNTESTED),  # a better recipe of the left side comes up
        (">", 50, 100.0, 15.0, 100.0, UNTESTED),
        # more than the top cannot be: no recipe of the left side is 50 above 80
        (">", 50, 60.0, 80.0, 100.0, "contradicted"),
        (">", 50, 60.0, 40.0, 100.0, UNTESTED),
        # the same where less is better, and nothing is below 0
        ("<", -1, 0.2, 0.1, 0.0, "reproduced"),
        ("<", -1, 3.0, 20.0, 0.0, UNTESTED),
        ("<", 50, 60.0, 20.0, 0.0, "contradicted"),
        ("<", 50, 60.0, 70.0, 0.0, UNTESTED),
    ],
)
def test_both_sides_of_several_recipes_are_judged_where_no_better_recipe_of_either_turns_it(
    op, margin, left, right, best, verdict
):
    values = {"a": Value(left, 0.05, "a"), "b": Value(right, 0.05, "b")}
    claim = Claim(**RECIPES, op=op, right="b", margin=margin)
    found = judge(claim, lambda point: values[point.row], best=lambda _: best)
    assert found.verdict == verdict, found
    assert (verdict == UNTESTED) == ("a better one could turn this" in found.reason)


def test_a_ratio_of_two_recipes_is_judged_alike_and_what_a_row_counts_itself_has_no_recipe():
    values = {"ar": Value(60.0, 0.5, "a"), "floor": Value(18.0, 0.5, "floor"), "b": Value(90.0, 0.5, "b")}
    look = lambda point: values["b" if point.row == "b" else point.column]  # noqa: E731
    for ratio, verdict in ((2.0, "contradicted"), (1.05, UNTESTED), (0.5, "reproduced")):
        claim = Claim(**RECIPES, op=">", right="b", ratio=ratio)
        assert judge(claim, look, best=lambda _: 100.0).verdict == verdict, ratio
    floor = Claim(**RECIPES, op="<", right={"row": "a", "column": "floor"}, margin=-3)
    assert [point.column for point in floor.recipes] == ["ar"]
    assert judge(floor, look, best=lambda _: 100.0).verdict == "contradicted"


def test_of_two_forms_that_a_paper_states_both_must_fail_for_a_contradiction():
    from relinear.draw.claims import Judgement, _of_forms

    def verdict(first, second):
        found = _of_forms(
            *(Judgement(v, v, v, name) for v, name in ((first, "x > y"), (second, "z > y"))), {"x": "z"}
        )
        assert found.compared == "x > y, or z > y" and first in found.reason and second in found.reason
        return found.verdict

    assert verdict("reproduced", "contradicted") == verdict("contradicted", "reproduced") == "reproduced"
    assert verdict("contradicted", "contradicted") == "contradicted"
    assert verdict("contradicted", "not tested") == verdict("not tested", "contradicted") == "not tested"
    with pytest.raises(ValueError, match="does not compare"):
        Claim(claim="c", source="s", left="a", right="b", column="d", op=">", either={"z": "y"})


def test_the_form_of_a_run_whose_training_s_record_is_missing_is_not_known():
    here = form_of(load(WORKFLOW.parent / "results/reference/lizard2048_smollm2/runs/lizard_r8/commonsense"))
    assert here["lacking"] == [] and here["seq_len"] == [2048, 2048] and here["parameters"] == 134_515_008
    assert (
        differences(here, {"seq_len": 2048}) == []
        and differences(here | {"lacking": ["lizard distill"]}, {}) == []
    )
    assert differences(here | {"lacking": ["lizard distill"]}, {"seq_len": 2048}) == [
        "not known: the record of lizard distill is missing"
    ]


def test_a_step_without_a_record_is_lacking(tmp_path):
    shutil.copytree(WORKFLOW.parent / "results/reference/lizard2048_smollm2", tmp_path / "copy")
    committed = store.opened(tmp_path / "copy")
    gone = ("runs/lizard/distill", "models/smollm2-135m-instruct")
    kept = {node: packed for node, packed in committed.all().items() if node not in gone}
    store.write(tmp_path / "copy", kept)
    found = form_of(load(tmp_path / "copy/runs/lizard_r8/commonsense"))
    assert found["lacking"] == ["lizard distill"] and found["seq_len"] == [2048]
    assert found["parameters"] is None


# --- runs on other doses than a scale's, and what is drawn of them; at smoke ---

EPOCHS = 4  # more train on text that is known by heart
TRAINED = ("t2r_dose0.25", "lolcats_relu_notransfer_lr0.01")


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    plan = Plan(scale="smoke", results=tmp_path_factory.mktemp("results"))
    made(plan, *(f"measure {run} perplexity" for run in TRAINED))
    return plan


def test_a_curve_lies_at_the_tokens_of_its_doses(plan):
    tokens = {run: plan.settings(plan.node("finetune", run))["budget"]["epochs"] for run in TRAINED}
    assert tokens == {"t2r_dose0.25": 2, "lolcats_relu_notransfer_lr0.01": 4}
    written = draw_planned(plan, plan.artefacts["comparison_dose"])
    cells = json.loads(next(path for path in written if path.name == "dose.provenance.json").read_text())[
        "cells"
    ]
    assert (
        cells["T2R"]["perplexity"].endswith("t2r_dose0.25/perplexity/run.json")
        and cells["SUPRA"]["perplexity"] is None
    )


def test_the_arms_without_transfer_say_their_unique_tokens_and_epochs(plan):
    [file] = [
        path
        for path in draw_planned(plan, plan.artefacts["comparison_notransfer"])
        if path.name == "notransfer.csv"
    ]
    rows = {row["run"]: row for row in csv.DictReader(file.read_text().splitlines())}
    found = rows["lolcats_relu_notransfer_lr0.01"]
    assert (
        found["doses"] == "1024 x 4" and float(found["ppl"]) > 1 and rows["lolcats_relu"]["ppl"] == "not run"
    )


@pytest.mark.parametrize("scale", ["smoke", "mini", "smollm2"])
def test_arms_with_and_without_transfer_see_as_many_tokens(scale):
    plan = Plan(scale=scale)

    def tokens(run):
        steps = [plan.node(step, run) for step in plan.run(run).run.recipes]
        return sum(
            plan.settings(s)["budget"]["epochs"] * plan.settings(plan.parents(s)["text"])["train_tokens"]
            for s in steps
        )

    for feature in ("elu", "relu", "exp"):
        for rate in (0.001, 0.01):
            assert (
                tokens(f"lolcats_{feature}_notransfer_lr{rate}")
                == tokens(f"lolcats_{feature}")
                == 2 * tokens(f"lolcats_{feature}_notransfer")
            )
    for series in plan.artefacts["comparison_dose"].spec.series[1:]:
        quarter, own, twice = map(tokens, series.runs)
        # whole sequences
        assert 8 * quarter == pytest.approx(twice, rel=0.01) and 2 * own == twice, series.title


def corpora(plan):
    """The names of the corpora, which are packages and no sources of a text."""
    return {name for name, data in plan.scaled.data.items() if data.make == "corpus"}


def test_the_largest_dose_is_what_the_sources_hold_four_times_and_the_spec_says_so():
    plan = Plan(scale="smollm2")
    unique, spec = plan.models["smollm2-135m-instruct"].unique, plan.artefacts["comparison_dose"].spec
    for run in {run for series in spec.series for run in series.runs}:
        assert all(
            plan.settings(plan.node(step, run))["budget"]["epochs"] <= EPOCHS
            for step in plan.run(run).run.recipes
        ), run
    unique = {source: tokens for source, tokens in unique.items() if source not in corpora(plan)}
    most = sum(unique.values())
    assert EPOCHS * most < 80e6, "a dose of 80M tokens can be had: add its runs"
    said = {
        count(most),
        *map(count, unique.values()),
        "80M",
        f"{80 // EPOCHS}M",
        f"{plan.config.text.train_tokens // 10**6}M",
    }
    assert set(re.findall(r"[\d.]+[kM]\b", spec.not_run)) == said


@pytest.mark.parametrize(
    ("stage", "name", "wanted", "held"),
    [
        (
            "text",
            "mix@smollm2-135m-instruct-x2",
            "20,000,768",
            "wikipedia-intros 952,628, brown 1,253,284, linux-doc 5,487,467, written 6,000,000",
        ),
        ("text", "mix-qwen@qwen2.5-coder-1.5b-instruct-x4", "40,001,536", "written 16,000,000"),
        (
            "pieces",
            "long-2048@smollm2-135m-instruct",
            "10,000,384",
            "linux-doc 5,487,467, anarchism 2,704,440, brown 1,253,284",
        ),
    ],
)
def test_more_unique_tokens_than_the_sources_hold_are_refused_before_any_work(stage, name, wanted, held):
    with pytest.raises(
        ConfigError, match=f"{stage} {name}: {wanted} unique tokens.*{held}.*Possible: a smaller dose"
    ):
        Plan(scale="smollm2").check_processes(Node(stage, name), 1)


def test_what_the_sources_hold_and_what_was_not_counted_is_not_refused():
    plan = Plan(scale="smollm2")
    for stage, name in (
        ("text", "mix@smollm2-135m-instruct"),
        ("pieces", "long-2048@smollm2-135m-instruct-x0.5"),
        ("text", "mix@tiny-x2"),
    ):
        plan.check_processes(Node(stage, name), 1)


@pytest.mark.slow
def test_sources_hold_as_many_tokens_as_models_yaml_says(smollm2):
    """Passages: each once, as the measures that ask about them read them."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)

    def documents(source, folder):
        if source != "passages":
            yield from pieces.documents(source, folder)
            return
        for path in folder.rglob("requests.jsonl.gz"):
            with gzip.open(path, "rt", encoding="utf-8") as lines:
                for doc in (json.loads(line)["doc"] for line in lines):
                    yield text.Document(
                        doc.get("passage")
                        or doc.get("story")
                        or re.split("Background: |\nQuestion: ", doc["query"])[1]
                    )

    plan = Plan(scale="smollm2")
    for source, said in plan.models["smollm2-135m-instruct"].unique.items():
        if source in corpora(plan):  # workflow/corpora.csv, which test_corpora.py compares
            continue
        unique = {
            text._digest(document): document.text for document in documents(source, assets.obtain(source))
        }
        train = [words for digest, words in unique.items() if not text._is_heldout(digest)]
        # 1: the separator
        found = sum(
            1 + len(tokens)
            for tokens in tokenizer(train, add_special_tokens=False, verbose=False)["input_ids"]
        )
        assert found == said, source
