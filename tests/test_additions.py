"""The files that an addition takes: each test adds one to a finished clone, counts the files, runs it, and sees that nothing else reruns."""

import csv
import json
import subprocess
from pathlib import Path

import pytest
from conftest import append, run_nodes

pytestmark = pytest.mark.dag


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


class Changes:
    """Files added to or edited in a clone."""

    def __init__(self, clone):
        self.clone, self.files = clone, set()

    def write(self, path: str, text: str) -> None:
        self.files.add(path)
        (self.clone / path).parent.mkdir(parents=True, exist_ok=True)
        (self.clone / path).write_text(text.lstrip())

    def append(self, path: str, text: str) -> None:
        self.files.add(path)
        append(self.clone, path, text)

    def edit(self, path: str, old: str, new: str) -> None:
        self.files.add(path)
        self.clone.edit(path, old, new)


@pytest.fixture
def add(clone) -> Changes:
    return Changes(clone)


METHOD = '''
"""phi(x) = 1 + elu(x), nothing learned (Katharopoulos et al. 2020)."""

from relinear.attention._base import Attention
from relinear_kernels import linear_attention, linear_attention_weights, linear_state


class Method(Attention):
    def forward(self, inputs, state=None):
        q, k = inputs.rotated()
        return linear_attention(q, k, inputs.v, feature="elu", key_mask=inputs.key_mask, initial_state=state, return_state=True)

    def init_state(self, batch, device=None):
        return linear_state(batch, self.heads.heads, self.heads.dim, self.heads.dim, device)

    def attention_weights(self, inputs):
        return linear_attention_weights(*inputs.rotated(), feature="elu", key_mask=inputs.key_mask)
'''


def test_a_method_is_one_file_and_its_run(add, clone, finished):
    add.write("src/relinear/attention/elu.py", METHOD)
    add.append(
        "workflow/papers/comparison/runs.yaml",
        "\nelu: {model: llama-3-8b, method: elu, steps: [{finetune: {data: alpaca, kind: lora, lr: 1.0e-4}}], shown: [comparison/table2]}\n",
    )
    assert len(add.files) == 2
    measured = [f"measure elu {measure}" for measure in ("gate", "perplexity", "commonsense", "mmlu")]
    assert clone.planned() == sorted(["finetune elu", *measured, "comparison_table2", "table2"]), "only its own jobs"
    run_nodes(clone, ["comparison_table2"])
    assert clone.planned() == ["comparison_table2", "table2"]
    clone.snakemake("results/table2.csv")
    table, before = rows(clone / "results/table2.csv"), rows(finished / "results/table2.csv")
    assert table[:-1] == before, "the other rows are as they were"
    assert table[-1]["run"] == table[-1]["method"] == "elu" and float(table[-1]["ppl"]) > 1 and table[-1]["finetune_tokens"] == "2048"
    assert "`elu`" in (clone / "results/table2.md").read_text()


TABLE = """
label: Toy
says: perplexity of two runs that stand in other tables
columns: [{name: ppl, measure: perplexity, metric: perplexity}]
rows: [{run: teacher}, {run: lizard}]
claims: [{claim: Lizard stays near its teacher, paper: lizard, source: Table 2, left: lizard, right: teacher, column: ppl, op: "<", margin: -1}]
"""


def test_a_table_of_existing_runs_is_one_file(add, clone, finished):
    add.write("workflow/papers/comparison/toy.yaml", TABLE)
    assert len(add.files) == 1
    assert clone.planned("comparison_toy") == ["comparison_toy"]
    clone.snakemake("comparison_toy")
    found = {row["run"]: row["ppl"] for row in rows(clone / "results/smoke/comparison/toy.csv")}
    assert found == {row["run"]: row["ppl"] for row in rows(finished / "results/table2.csv") if row["run"] in ("teacher", "lizard")}
    assert clone.planned() == []


SWEEP = """
"swept_w{window}_m{meta}":
  over: {window: [8, 16], meta: [0, 2]}
  model: llama-3-8b
  method: lizard
  options: {window: "{window}", meta: "{meta}"}
  steps: [{distill: {data: alpaca, loss: mse, lr: 1.0e-3, epochs: 1}}]
"""
MATRIX = """
label: Toy matrix
says: perplexity against window and meta tokens
rows: {meta: [0, 2]}
columns: {window: [8, 16]}
cell: {run: "swept_w{window}_m{meta}", measure: perplexity, metric: perplexity}
"""


def test_a_sweep_table_is_two_files(add, clone):
    add.append("workflow/papers/comparison/runs.yaml", SWEEP)
    add.write("workflow/papers/comparison/matrix.yaml", MATRIX)
    assert len(add.files) == 2
    runs = [f"swept_w{window}_m{meta}" for window in (8, 16) for meta in (0, 2)]
    jobs = [job for run in runs for job in (f"distill {run}", f"measure {run} gate", f"measure {run} perplexity")]
    assert clone.planned("comparison_matrix") == sorted([*jobs, "comparison_matrix"])
    run_nodes(clone, ["comparison_matrix"])
    assert clone.planned("comparison_matrix") == ["comparison_matrix"]
    clone.snakemake("comparison_matrix")
    table = rows(clone / "results/smoke/comparison/matrix.csv")
    values = {float(row[column]) for row in table for column in row if column in ("window_8", "window_16")}
    assert len(table) == 2 and len(values) == 4, "four runs of their own"
    options = json.loads((clone.stage("swept_w16_m2", "distill") / "run.json").read_text())["config"]["options"]
    assert options == {"window": 16, "meta": 2}


METRIC = '''
"""How many parameters a model has."""

from relinear.plan.readings import Reading
from relinear.plan.strict import Strict


class Options(Strict):
    unit: int = 1


def measure(model, data, options, job):
    """`parameters` of the "model", in units."""
    yield Reading("parameters", "model", {}, sum(p.numel() for p in model.parameters()) / options.unit, None, 1)
'''
SIZES = """
label: Toy sizes
says: parameters of two models
columns: [{name: parameters, measure: size, metric: parameters}]
rows: [{run: teacher}, {run: lizard}]
"""


def test_a_metric_is_one_file_and_the_spec_that_shows_it(add, clone):
    add.write("src/relinear/measure/size.py", METRIC)
    add.write("workflow/papers/comparison/sizes.yaml", SIZES)
    assert len(add.files) == 2
    assert clone.planned() == [], "a new metric reruns nothing"
    assert clone.planned("comparison_sizes") == ["comparison_sizes", "measure lizard size", "measure teacher size"]
    clone.snakemake("comparison_sizes")
    sizes = {row["run"]: float(row["parameters"]) for row in rows(clone / "results/smoke/comparison/sizes.csv")}
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
'''


def test_a_metric_of_whole_documents_says_so_itself_and_is_one_file_and_its_line(add, clone):
    """It is refused, before torch loads, where it can measure nothing: nowhere else is it named."""
    add.write("src/relinear/measure/guesses.py", GUESSES)
    lines = {"guesses_novels": ("novels", 128), "guesses_alpaca": ("alpaca", 128), "guesses_far": ("novels", 10**6)}
    for name, (data, last) in lines.items():
        options = f"{{positions: [0, {last}], documents: 2}}"
        add.append("workflow/measures.yaml", f"{name}: {{metric: guesses, data: {data}, options: {options}}}\n")
    assert len(add.files) == 2
    assert clone.planned() == [], "a new metric reruns nothing"
    for run, measure, said in (
        ("teacher", "guesses_alpaca", "reads whole documents, and its data, 'stories', are none; possible: "),
        ("teacher", "guesses_far", "positions up to 1000000 asked for"),
        ("hedgehog_untrained", "guesses_novels", "guesses scores how a model predicts the next token"),
    ):
        done = clone.relinear("measure", run, measure, "--scale", "smoke")
        assert done.returncode == 1 and done.stderr.startswith("error: ") and said in done.stderr, done.stderr
    clone.python("tests/verbs.py", "cpu", *(f"{node} --scale smoke" for node in ("documents story-documents@tiny", "measure teacher guesses_novels")))
    [reading] = json.loads((clone.stage("teacher", "guesses_novels") / "metrics.json").read_text())["readings"]
    assert reading["metric"] == "right" and reading["n"] == 256 and 0 <= reading["value"] <= 1


STAGE = '''
"""Weights shrunk by a factor, as a step of a run."""

from relinear.plan.strict import Strict
from relinear.stages import _stage


class Options(Strict):
    factor: float


class Stage(_stage.Stage):
    help = "Shrink the weights."
    work = "relinear.train.shrink"
    trains = True

    def folder(self, node):
        return f"runs/{node.name}/{node.stage}"

    def settings(self, plan, node):
        return {"links": plan.links_of(node), "factor": plan.run(node.name).run.recipes["shrink"]["factor"]}

    def parents(self, plan, node):
        return {"model": plan.model_of(node.name), **plan.trained_before(node)}
'''
WORK = '''
"""Weights shrunk by a factor."""

from safetensors.torch import save_file

from relinear.linearize.assemble import assemble


def work(job):
    """Write `model.safetensors`."""
    model = assemble(job.parents["model"], job.links)
    save_file({name: p.detach() * job.settings["factor"] for name, p in model.named_parameters()}, job.out / "model.safetensors")
    return {"factor": job.settings["factor"]}
'''
RULE = '''

rule shrink:
    """Weights shrunk by a factor."""
    input:
        parents("shrink"),
    output:
        "<results>/runs/{name}/shrink/run.json",
    log:
        "<results>/logs/{name}.shrink.log",
    params:
        key=key("shrink"),
    shell:
        "{RELINEAR} shrink {wildcards.name} {OPTIONS} 2>&1 | ({TEE} {log})"
'''


def test_a_stage_is_at_most_four_files(add, clone):
    add.write("src/relinear/stages/shrink.py", STAGE)
    add.write("src/relinear/train/shrink.py", WORK)
    add.append("workflow/rules/train.smk", RULE)
    assert len(add.files) <= 4
    assert clone.planned() == [], "a new stage reruns nothing"
    append(clone, "workflow/papers/comparison/runs.yaml", "\nshrunk: {model: llama-3-8b, steps: [{shrink: {factor: 0.5}}]}\n")
    target = "results/smoke/runs/shrunk/perplexity/run.json"
    assert clone.planned(target) == ["measure shrunk gate", "measure shrunk perplexity", "shrink shrunk"]
    clone.snakemake(target)
    readings = json.loads((clone.stage("shrunk", "perplexity") / "metrics.json").read_text())["readings"]
    before = json.loads((clone.stage("teacher", "perplexity") / "metrics.json").read_text())["readings"]
    assert readings[0]["metric"] == before[0]["metric"] == "perplexity" and readings[0]["value"] != before[0]["value"]


FAMILY = '''
"""A Qwen2 of two layers, from scratch."""

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from relinear.families import _family, tiny


class Family(_family.Family):
    def random(self, options, seed, dtype):
        tokenizer = tiny.byte_tokenizer()
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = Qwen2Config(vocab_size=len(tokenizer), max_position_embeddings=2048, initializer_range=0.1, **sizes, **options)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(config, dtype=dtype).eval(), tokenizer
'''


def test_a_family_is_at_most_three_files(add, clone):
    add.write("src/relinear/families/small.py", FAMILY)
    add.append("workflow/models.yaml", "\nsmall: {family: small, layout: decoder, init: random, positions: 2048}\n")
    assert len(add.files) <= 3
    assert clone.planned() == [], "a new family reruns nothing"
    target = "results/smoke/runs/teacher@small/gate/run.json"
    texts = [f"{stage} stories@small" for stage in ("text", "written")]
    assert clone.planned(target) == sorted(["measure teacher@small gate", "model small", *texts])
    clone.snakemake(target)
    assert json.loads((clone.stage("teacher@small", "gate") / "run.json").read_text())["config"]["variant"] == "default"
    found = subprocess.run(["ls", clone.root / "results/smoke/runs"], capture_output=True, text=True, check=True).stdout
    assert "teacher\n" in found and "teacher@small\n" in found, "two teachers stand side by side"
