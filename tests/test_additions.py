"""The additions of docs/adding.md, as they stand there: each test adds one to a finished clone, counts the
files, runs it, and sees that nothing else reruns."""

import csv
import json
import re
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, append, run_nodes

pytestmark = pytest.mark.dag


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def examples(page: str, heading: str) -> dict[str, str]:
    """The code blocks below a heading of a page that are files of the repository, by the path that their
    first line names."""
    section = (ROOT / page).read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^```\w+\n# (\S+)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE))


class Changes:
    """Files added to or edited in a clone."""

    def __init__(self, clone):
        self.clone, self.files = clone, set()

    def example(self, heading: str) -> None:
        """Apply a section of docs/adding.md to a clone. A block for a file that exists is appended to it."""
        for path, text in examples("docs/adding.md", heading).items():
            self.files.add(path)
            if (self.clone / path).exists():
                append(self.clone, path, f"\n\n{text}")
            else:
                (self.clone / path).parent.mkdir(parents=True, exist_ok=True)
                (self.clone / path).write_text(text)


@pytest.fixture
def add(clone) -> Changes:
    return Changes(clone)


def test_a_method_is_one_file_and_its_run(add, clone, finished):
    assert examples("README.md", "Add a method") == examples("docs/adding.md", "A method")
    add.example("A method")
    assert len(add.files) == 2
    measured = [f"measure elu {measure}" for measure in ("gate", "perplexity", "commonsense", "mmlu")]
    assert clone.planned() == sorted(["finetune elu", *measured, "comparison_table2", "table2"]), (
        "only its own jobs"
    )
    run_nodes(clone, ["comparison_table2"])
    assert clone.planned() == ["comparison_table2", "table2"]
    clone.snakemake("results/table2.csv")
    table, before = rows(clone / "results/table2.csv"), rows(finished / "results/table2.csv")
    assert table[:-1] == before, "the other rows are as they were"
    assert (
        table[-1]["run"] == table[-1]["method"] == "elu"
        and float(table[-1]["ppl"]) > 1
        and table[-1]["finetune_tokens"] == "2048"
    )
    assert "`elu`" in (clone / "results/table2.md").read_text()


def test_a_table_of_existing_runs_is_one_file(add, clone, finished):
    add.example("A table of existing runs")
    assert len(add.files) == 1
    assert clone.planned("comparison_toy") == ["comparison_toy"]
    clone.snakemake("comparison_toy")
    found = {row["run"]: row["ppl"] for row in rows(clone / "results/smoke/comparison/toy.csv")}
    assert found == {
        row["run"]: row["ppl"]
        for row in rows(finished / "results/table2.csv")
        if row["run"] in ("teacher", "lizard")
    }
    assert clone.planned() == []


def test_a_sweep_table_is_two_files(add, clone):
    add.example("A sweep")
    assert len(add.files) == 2
    runs = [f"swept_w{window}_m{meta}" for window in (8, 16) for meta in (0, 2)]
    jobs = [
        job for run in runs for job in (f"distill {run}", f"measure {run} gate", f"measure {run} perplexity")
    ]
    assert clone.planned("comparison_matrix") == sorted([*jobs, "comparison_matrix"])
    run_nodes(clone, ["comparison_matrix"])
    assert clone.planned("comparison_matrix") == ["comparison_matrix"]
    clone.snakemake("comparison_matrix")
    table = rows(clone / "results/smoke/comparison/matrix.csv")
    values = {float(row[column]) for row in table for column in row if column in ("window_8", "window_16")}
    assert len(table) == 2 and len(values) == 4, "four runs of their own"
    options = json.loads((clone.stage("swept_w16_m2", "distill") / "run.json").read_text())["config"][
        "options"
    ]
    assert options == {"window": 16, "meta": 2}


def test_a_metric_is_one_file_and_the_spec_that_shows_it(add, clone):
    add.example("A metric")
    assert len(add.files) == 2
    assert clone.planned() == [], "a new metric reruns nothing"
    assert clone.planned("comparison_sizes") == [
        "comparison_sizes",
        "measure lizard size",
        "measure teacher size",
    ]
    clone.snakemake("comparison_sizes")
    sizes = {
        row["run"]: float(row["parameters"]) for row in rows(clone / "results/smoke/comparison/sizes.csv")
    }
    assert sizes["lizard"] > sizes["teacher"] > 0


GUESSES = '''
"""How often a model's first guess at the next token is right, at the start of whole documents."""

from relinear.measure import _documents
from relinear.measure._limit import limit_of
from relinear.plan.readings import Reading

NEEDS = ("next_token", "documents")


class Options(_documents.Options):
    """Which documents are read."""


def measure(model, data, options, job):
    """`right`, a share."""
    def score(separator, tokens):
        for position, logits, targets in _documents.pieces(model, tokens, separator, options.piece):
            yield position, {"right": (logits.argmax(-1) == targets).float()}

    _, rows = _documents.read(data, options, limit_of(model), score, job.name)
    tokens, right = (sum(sums[name] for row in rows for sums in row.sums.values()) for name in ("tokens", "right"))
    yield Reading("right", "documents", {}, right / tokens, None, int(tokens))
'''  # noqa: E501


def test_a_metric_of_whole_documents_says_so_itself_and_is_one_file_and_its_line(clone):
    """Such a metric is refused, before torch loads, where it can measure nothing. No other file names it."""
    (clone / "src/relinear/measure/guesses.py").write_text(GUESSES)
    lines = {
        "guesses_novels": ("novels", 128),
        "guesses_alpaca": ("alpaca", 128),
        "guesses_far": ("novels", 10**6),
    }
    for name, (data, last) in lines.items():
        options = f"{{positions: [0, 64, {last}], documents: 2}}"
        append(
            clone,
            "workflow/measures.yaml",
            f"{name}: {{metric: guesses, data: {data}, options: {options}}}\n",
        )
    assert clone.planned() == [], "a new metric reruns nothing"
    for run, measure, said in (
        ("teacher", "guesses_alpaca", "reads whole documents, and its data, 'stories', are none; possible: "),
        ("hedgehog", "guesses_far", "positions up to 1000000 asked for"),
        ("hedgehog_untrained", "guesses_novels", "guesses scores how a model predicts the next token"),
    ):
        done = clone.relinear("measure", run, measure, "--scale", "smoke")
        assert done.returncode == 1 and done.stderr.startswith("error: ") and said in done.stderr, done.stderr
    clone.python(
        "tests/verbs.py",
        "cpu",
        *(
            f"{node} --scale smoke"
            for node in ("documents story-documents@tiny", "measure teacher guesses_novels")
        ),
    )
    [reading] = json.loads((clone.stage("teacher", "guesses_novels") / "metrics.json").read_text())[
        "readings"
    ]
    assert reading["metric"] == "right" and reading["n"] == 256 and 0 <= reading["value"] <= 1


def test_a_stage_is_two_files_and_its_run(add, clone):
    add.example("A stage")
    assert len(add.files) == 3, "with the run that has it among its steps"
    assert clone.planned() == [], "a new stage reruns nothing"
    target = "results/smoke/runs/shrunk/perplexity/run.json"
    assert clone.planned(target) == ["measure shrunk gate", "measure shrunk perplexity", "shrink shrunk"]
    clone.snakemake(target)
    readings = json.loads((clone.stage("shrunk", "perplexity") / "metrics.json").read_text())["readings"]
    before = json.loads((clone.stage("teacher", "perplexity") / "metrics.json").read_text())["readings"]
    assert (
        readings[0]["metric"] == before[0]["metric"] == "perplexity"
        and readings[0]["value"] != before[0]["value"]
    )


def test_a_family_is_two_files(add, clone):
    add.example("A family of models")
    assert len(add.files) == 2
    assert clone.planned() == [], "a new family reruns nothing"
    target = "results/smoke/runs/teacher@small/gate/run.json"
    texts = [f"{stage} stories@small" for stage in ("text", "written")]
    assert clone.planned(target) == sorted(["measure teacher@small gate", "model small", *texts])
    clone.snakemake(target)
    assert (
        json.loads((clone.stage("teacher@small", "gate") / "run.json").read_text())["config"]["variant"]
        == "default"
    )
    found = subprocess.run(
        ["ls", clone.root / "results/smoke/runs"], capture_output=True, text=True, check=True
    ).stdout
    assert "teacher\n" in found and "teacher@small\n" in found, "two teachers stand side by side"


def test_a_paper_is_one_folder(add, clone, finished):
    add.example("A paper")
    assert {Path(path).parent.as_posix() for path in add.files} == {"workflow/papers/rnns"}
    assert clone.planned() == [], "a new paper reruns nothing"
    jobs = ["finetune rnns", "measure rnns gate", "measure rnns perplexity", "rnns_pretrained"]
    assert clone.planned("rnns") == sorted([*jobs, "rnns"])
    run_nodes(clone, ["rnns_pretrained"])
    clone.snakemake("rnns")
    found = {row["run"]: row["ppl"] for row in rows(clone / "results/smoke/rnns/pretrained.csv")}
    before = {row["run"]: row["ppl"] for row in rows(finished / "results/table2.csv")}
    assert found["teacher"] == before["teacher"] and float(found["rnns"]) > 1
