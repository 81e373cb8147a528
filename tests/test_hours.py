"""GPU hours come from measured rows, and the page that prints them has no other numbers."""

import json
import re
import shutil
from pathlib import Path

import pytest

from relinear.benchmarks import hours
from relinear.draw.drawn import drawn
from relinear.errors import UserError
from relinear.plan.plan import Plan
from relinear.stages._stage import Node

ROOT = Path(__file__).parents[1]


def row(run: str, stage: str, gpus: int, speed: int) -> dict:
    return {"shape": "llama-3-8b", "run": run, "stage": stage, "scaling": "weak", "gpus": gpus, "tokens_per_second_per_gpu": speed}


def table(plan: Plan, rows: list[dict]) -> dict[str, str]:
    """The printed lines by their first cell."""
    return {line.split("|")[1].strip(): line for line in hours.hours(plan, "llama-3-8b", rows).splitlines() if line.startswith("|")}


def test_hours_are_tokens_over_speed_on_the_fewest_gpus_and_what_lacks_says_so():
    plan = Plan(scale="paper")
    tokens = plan.config.train["distill"]["epochs"] * plan.config.text.train_tokens
    rows = [row("lolcats_exp", "distill", 4, 9000), row("lolcats_exp", "distill", 1, 10000), row("lizard", "distill", 1, 5000) | {"error": "x"}]
    found = hours.costs(plan, "llama-3-8b", rows)
    assert found[Node("distill", "lolcats_exp")] == (10000, 1, tokens / 10000 / 3600)
    assert found[Node("distill", "lizard")] is None and Node("distill", "t2r") not in found
    assert f"{tokens / 10000 / 3600:.2f}" in table(plan, rows)["lolcats/figure3"]
    assert "not measured: 3 of 4 stages" in hours.hours(plan, "llama-3-8b", [row("lizard", "distill", 1, 5000)])


@pytest.fixture
def workflow(tmp_path) -> Path:
    return Path(shutil.copytree(ROOT / "workflow", tmp_path / "workflow"))


@pytest.mark.parametrize(
    ("measure", "steps"), [("fidelity", ["distill"]), ("perplexity_before", ["distill"]), ("perplexity", ["distill", "finetune"])]
)
@pytest.mark.parametrize("stem", ["figure2", "table2"])
def test_what_is_behind_a_table_or_figure_is_what_its_measurements_are_made_from(workflow, measure, steps, stem):
    """The trainings do not depend on the artefact's name."""
    (workflow / f"papers/lolcats/{stem}.yaml").write_text(
        f"{{label: LoLCATs {stem[:-1].capitalize()} {stem[-1]}, says: of one run, draw: attention_maps, run: lolcats_exp, measure: {measure}}}"
    )
    plan = Plan(scale="paper", workflow=workflow)
    assert hours.trainings_behind(plan, "llama-3-8b")[f"lolcats/{stem}"] == [Node(step, "lolcats_exp") for step in steps]
    rows = [row("lolcats_exp", stage, 1, 10000) for stage in ("distill", "finetune")]
    trainings = {node.stage for node in hours.costs(plan, "llama-3-8b", rows)}  # a column each
    assert table(plan, rows)[f"lolcats/{stem}"].count("none") == len(trainings) - len(steps)


def test_a_step_that_a_run_begins_with_counts_in_the_table_of_the_run(workflow):
    with (workflow / "papers/lolcats/runs.yaml").open("a") as file:
        file.write(
            "\nmore: {model: llama-3-8b, after: lolcats_exp/distill, method: lolcats, options: {variant: paper, feature: exp},\n"
            "       steps: [{finetune: {data: alpaca, kind: method, lr: 1.0e-4, dose: 2}}]}\n"
        )
    plan = Plan(scale="paper", workflow=workflow)
    spec = workflow / "papers/lolcats/figure3.yaml"
    spec.write_text(spec.read_text().replace("run: lolcats_exp", "run: more"))
    # fidelity: as the run is before it is finetuned
    assert hours.trainings_behind(plan, "llama-3-8b")["lolcats/figure3"] == [Node("distill", "lolcats_exp")]
    rows = [row("more", "finetune", 1, 10000), row("lolcats_exp", "finetune", 1, 10000)]
    more, exp = (hours.costs(plan, "llama-3-8b", rows)[Node("finetune", name)] for name in ("more", "lolcats_exp"))
    assert more.hours == 2 * exp.hours, "a dose of 2 is twice the tokens"


def test_runs_of_other_models_are_not_costed_at_the_shape():
    plan = Plan(scale="paper")
    models = {plan.run(node.name).model for node in hours.costs(plan, "llama-3-8b", [])}
    assert models == {"llama-3-8b"} < {run.model for run in plan.runs.values()}


def test_the_page_is_what_the_measurements_say():
    page = (ROOT / "docs/plan.md").read_text()
    assert hours.replace_block(page, hours.NAME, hours.text(ROOT / hours.MEASURED)) == page, (
        "run `python -m relinear.benchmarks.hours --into docs/plan.md`"
    )


def test_a_page_without_its_marks_and_a_file_of_something_else_are_refused(tmp_path):
    with pytest.raises(UserError, match="needs the lines <!-- relinear.benchmarks.hours -->"):
        hours.replace_block("a page", hours.NAME, "a table")
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(UserError, match="a.json is no file of relinear.benchmarks.training"):
        hours.read(tmp_path)


STAGES = ("distill", "finetune")


def sentences() -> list[str]:
    """What the sentences of the page say, from its tables and the measurements."""
    _, _, speeds, curves, memory = drawn(ROOT / "docs/plan.md")
    measured = {(row["shape"], row["run"], row["stage"], row["scaling"], row["engine"], row["GPUs"]): row for row in speeds}
    small, large = ("smollm2-135m", "lolcats_window"), ("llama-3-8b", "lolcats_window")

    def gain(model, stage, scaling, engine="ddp"):
        return measured[*model, stage, scaling, engine, "2"]["against 1 GPU"].rstrip("x")

    def gib(stage, engine, gpus, run=large):
        return f"{float(measured[*run, stage, 'weak, 4 a GPU', engine, gpus]['peak GiB/GPU']):.0f}"

    def step(row):
        sequences = int(re.search(r"(\d+) a GPU", row["scaling"])[1])
        return 1000 * sequences * 1024 / int(row["tokens/s/GPU"].replace(",", ""))

    weak = [row for row in speeds if row["scaling"].startswith("weak") and row["engine"] == "ddp" and row["GPUs"] == "2"]
    alone = [measured[row["shape"], row["run"], row["stage"], row["scaling"], "ddp", "1"] for row in weak]
    longer = [step(two) - step(one) for two, one in zip(weak, alone, strict=True)]
    gains = sorted(row["against 1 GPU"].rstrip("x") for row in weak)
    scaling = json.loads((ROOT / "results/reference" / "scaling/scaling.json").read_text())["rows"]
    trained = [row["trainable_params"] / 1e6 for row in scaling if row.get("scaling") == "weak" and row["run"] != "supra"]
    apart = {(row["run"], row["GPUs"], row["piece"]): [float(row[f"{of} apart"]) for of in ("loss", "gradient norm")] for row in curves[::-1]}
    sharded = [float(row["gradient norm apart"]) for row in curves if row["run"] == "supra" and row["GPUs"] == "2"]
    assert max(sharded) < 0.05
    size = {row[""]: row["llama-3-70b"] for row in memory}
    shard, whole = (f"{float(size[name]):.0f}" for name in ("weights, bfloat16", "full finetuning (SUPRA): weights, gradients, moments"))
    assert max(float(value) for name, value in size.items() if "with gradient and AdamW" in name) < 4
    eight, sixty_four = ([gain(small, stage, f"strong, {n} a step") for stage in STAGES] for n in (8, 64))
    eight_large = [gain(large, stage, "strong, 8 a step") for stage in STAGES]
    shards = [gain(large, stage, "weak, 4 a GPU", "fsdp") for stage in STAGES]
    room = [gib(stage, engine, gpus) for stage in STAGES for engine, gpus in (("fsdp", "2"), ("ddp", "1"))]
    pieces = apart["supra", "1", "2"]
    return [
        f"replicas on two GPUs run {gains[0]} to {gains[-1]} times as fast.",
        f"A step takes {min(longer):.0f} to {max(longer):.0f} ms longer than one GPU's {min(map(step, alone)):.0f} to {max(map(step, alone)):.0f}.",
        f"{min(trained):.1f}M parameters at SmolLM2's shape, {max(trained):.0f}M at the 8B shape",
        f"It gives {eight[0]} and {eight[1]} on two GPUs",
        f"64 sequences a step give {sixty_four[0]} and {sixty_four[1]}.",
        f"8 are enough: {eight_large[0]} and {eight_large[1]}.",
        f"they run {shards[0]} (transfer) and {shards[1]} times (finetuning)",
        f"A GPU needs {room[0]} instead of {room[1]} GiB, and {room[2]} instead of {room[3]}.",
        f"SUPRA runs at all: {gib('finetune', 'fsdp', '2', ('llama-3-8b', 'supra'))} GiB",
        f"SUPRA's loss is within {apart['supra', '2', '16'][0]:.0e} and its gradient norm within 5 %;".replace("e-0", "e-"),
        f"in smaller pieces {pieces[0]:.0e}, and {100 * pieces[1]:.0f} % at its worst step.".replace("e-0", "e-"),
        f"{shard} GiB each, {8 * float(size['weights, bfloat16']):.0f} GiB for eight on a machine",
        f"Of an H200's {hours.GPU_GIB} GiB {shard} are weights",
        f"AdamW's moments are {whole} GiB, {float(whole) / 8:.0f} a GPU on eight",
        "less than 4 GiB on each GPU",
    ]


def test_the_sentences_of_the_page_have_the_numbers_of_its_tables():
    text = " ".join((ROOT / "docs/plan.md").read_text().split())
    assert not [words for words in sentences() if words not in text]
