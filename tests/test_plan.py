"""Laws of the plan: a key changes exactly when the result could, and what cannot work is refused before any work starts."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from relinear.plan import config, plan
from relinear.plan.plan import PER_RUN, SHARED, Plan, Step, from_cli

ROOT = Path(__file__).parents[1]
SCALES = config.scales()


@pytest.fixture
def workflow(tmp_path) -> Path:
    """A copy of the configuration, to edit."""
    return Path(shutil.copytree(ROOT / "workflow", tmp_path / "workflow"))


def edit(workflow: Path, name: str, change) -> None:
    data = yaml.safe_load((workflow / name).read_text())
    change(data)
    (workflow / name).write_text(yaml.safe_dump(data, sort_keys=False))


def steps(p: Plan) -> list[Step]:
    own = [(s, r) for r, run in p.runs.items() for s in PER_RUN if s in ("fidelity", "evaluate") or getattr(run, s)]
    return [*(p.step(s) for s in SHARED), *(p.step(s, r) for s, r in own)]


def keys(workflow: Path, scale: str = "smoke", **choices) -> dict[str, str]:
    p = Plan(scale=scale, workflow=workflow, **choices)
    return {str(step): p.key(step) for step in steps(p)}


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


EVERYTHING = {str(step) for step in steps(Plan(scale="smoke"))}
RUN_STAGES = EVERYTHING - set(SHARED)


@pytest.mark.parametrize("scale", SCALES)
def test_every_scale_passes_its_own_check(scale):
    p = Plan(scale=scale)
    p.check()
    assert len({p.key(step) for step in steps(p)}) == len(steps(p))


@pytest.mark.parametrize("scale", SCALES)
def test_a_key_is_the_same_in_every_process(scale):
    command = f"from relinear.plan.plan import *; p = Plan(scale={scale!r}); print(p.key(p.step('evaluate', 'lizard')))"
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True, cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'kernels'}", "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    p = Plan(scale=scale)
    assert done.stdout.strip() == p.key(p.step("evaluate", "lizard"))


def test_the_plan_needs_neither_torch_nor_transformers():
    """Every Snakemake call reads it: it must be there at once."""
    command = "import sys, relinear.plan.plan; print({'torch', 'transformers', 'mlflow', 'datasets'} & sys.modules.keys())"
    env = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'kernels'}"}
    assert subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True, env=env).stdout == "set()\n"


@pytest.mark.parametrize(
    ("file", "change", "reruns"),
    [
        ("runs.yaml", lambda r: r["lizard"]["distill"].update(lr=0.5), {f"{s} lizard" for s in PER_RUN}),
        ("runs.yaml", lambda r: r["lizard"]["finetune"].update(lr=0.5), {"finetune lizard", "evaluate lizard"}),
        ("runs.yaml", lambda r: r["lolcats_window"]["options"].update(window=32), {f"{s} lolcats_window" for s in PER_RUN}),
        ("runs.yaml", lambda r: r["lizard"].update(evaluate={"tasks": False}), {"evaluate lizard"}),
        ("runs.yaml", lambda r: r["lizard"].update(headline=True), set()),
        ("scales/smoke.yaml", lambda s: s["fidelity"].update(tokens=128), {x for x in RUN_STAGES if x.startswith("fidelity")}),
        ("scales/smoke.yaml", lambda s: s["finetune"].update(epochs=3), {
            x for x in RUN_STAGES for s, r in [x.split()] if s in ("finetune", "evaluate") and Plan(scale="smoke").runs[r].finetune
        }),
        ("scales/smoke.yaml", lambda s: s["distill"].update(batch_size=2), {
            x for x in RUN_STAGES for r in [x.split()[1]] if Plan(scale="smoke").runs[r].distill
        }),
        ("scales/smoke.yaml", lambda s: s["evaluate"]["tasks"].update(mmlu=2), {
            x for x in RUN_STAGES if x.startswith("evaluate") and Plan(scale="smoke").runs[x.split()[1]].evaluate.tasks
        }),
        ("scales/smoke.yaml", lambda s: s["corpus"].update(heldout_tokens=640), EVERYTHING - {"assets", "teacher", "instructions"}),
        ("scales/smoke.yaml", lambda s: s["corpus"]["written"].update(tokens=300), EVERYTHING - {"assets", "teacher"}),
        ("scales/smoke.yaml", lambda s: s["hardware"].update(device="cuda", checkpoint_seconds=9), set()),
        ("papers/headline.yaml", lambda p: p.update(title="x"), set()),
    ],
)  # fmt: skip
def test_a_setting_changes_the_keys_of_what_reads_it_and_of_what_follows(workflow, file, change, reruns):
    before = keys(workflow)
    edit(workflow, file, change)
    assert changed(before, keys(workflow)) == reruns


def test_seed_and_budget_change_what_they_touch(workflow):
    before = keys(workflow)
    assert changed(before, keys(workflow, seed=1)) == EVERYTHING - {"assets", "teacher"}
    assert changed(before, keys(workflow, budget=2)) == EVERYTHING - {"assets", "teacher"}
    assert changed(before, keys(workflow, results=Path("elsewhere"), device="cuda")) == set()


def test_further_seeds_add_trainings_and_leave_the_first_alone(workflow):
    one, three = Plan(scale="smoke", workflow=workflow), Plan(scale="smoke", seeds=3, workflow=workflow)
    three.check()
    assert three.repeats("lizard") == ["lizard-seed1", "lizard-seed2"] and one.repeats("lizard") == []
    assert three.repeats("teacher") == [], "there is nothing to train"
    before, after = ({str(step): p.key(step) for step in steps(p)} for p in (one, three))
    assert before.items() <= after.items()
    trained = {r for r, run in one.runs.items() if run.trained}
    assert set(after) - set(before) == {f"{x}-seed{n}" for x in RUN_STAGES if x.split()[1] in trained for n in (1, 2)}
    for stage, seeds in (("distill", (0, 1, 2)), ("finetune", (0, 1, 2)), ("fidelity", (0, 0, 0)), ("evaluate", (0, 0, 0))):
        trainings = [three.step(stage, run) for run in ("lizard", *three.repeats("lizard"))]
        assert tuple(three.settings(step)["seed"] for step in trainings) == seeds, stage
        assert len({three.key(step) for step in trainings}) == len({three.folder(step) for step in trainings}) == 3
    assert three.parents(three.step("evaluate", "lizard-seed2"))["finetune"] == Step("finetune", "lizard-seed2")
    assert three.tables_of("lizard-seed1") == ["headline/table2"]
    assert three.tables_of("lolcats_exp-seed1") == [], "its table shows one training"


def test_wrong_seeds_are_refused(workflow):
    with pytest.raises(config.ConfigError, match="seeds.*at least 1; got 0"):
        Plan(scale="smoke", seeds=0).check()
    edit(workflow, "runs.yaml", lambda runs: runs.update({"lizard-seed1": {"method": "t2r"}}))
    Plan(scale="smoke", workflow=workflow).check()
    with pytest.raises(config.ConfigError, match="'lizard-seed1'.*seeds=2.*rename"):
        Plan(scale="smoke", seeds=2, workflow=workflow).check()


def test_a_tasks_definition_is_part_of_the_evaluations_that_read_it(workflow):
    before = keys(workflow)
    edit(workflow, "tasks/piqa.yaml", lambda task: task.update(num_fewshot=1))
    after = changed(before, keys(workflow))
    assert {"evaluate teacher", "evaluate lizard"} <= after and all(x.startswith("evaluate") for x in after)


def test_another_teacher_changes_everything():
    before, after = Plan(scale="paper"), Plan(scale="paper", teacher="mistral-7b")
    assert all(before.key(step) != after.key(step) for step in steps(before))
    assert after.config.teacher.asset == "mistral-7b" and "mistral-7b" in after.asset_names()


def test_parents_come_before_their_children_and_are_stages_of_the_same_run():
    p = Plan(scale="smoke")
    order = (*SHARED, *PER_RUN)
    for step in steps(p):
        for parent in p.parents(step).values():
            assert order.index(parent.stage) < order.index(step.stage)
            assert parent.run in (step.run, parent.stage)


def test_folders_are_apart():
    p = Plan(scale="smoke")
    folders = [p.folder(step) for step in steps(p)]
    assert len(set(folders)) == len(folders) and all(f.is_relative_to("results/smoke") for f in folders)


@pytest.mark.parametrize("budget", [0.1, 0.5, 1, 3])
def test_a_budget_multiplies_tokens_and_items_in_whole_sequences(budget):
    one, some = config.read_scale("mini"), config.read_scale("mini", budget=budget)
    assert some.corpus.train_tokens == pytest.approx(budget * one.corpus.train_tokens, abs=one.distill.seq_len)
    assert some.corpus.train_tokens % one.distill.seq_len == 0
    assert some.evaluate.perplexity_tokens % some.evaluate.seq_len == 0
    assert some.evaluate.tasks == {t: max(round(n * budget), 2) for t, n in one.evaluate.tasks.items()}  # two: a standard error
    assert some.corpus.heldout_tokens >= some.evaluate.perplexity_tokens
    assert some.hardware == one.hardware and some.distill == one.distill


def test_command_line_and_plan_agree():
    """The options that rules pass on to a stage make the plan that the rules were made from."""
    import typer.testing

    from relinear import cli

    given = Plan(scale="smoke", budget=0.5, seed=3, seeds=2, device="cpu", results=Path("some where"))
    seen = []
    app = typer.Typer()

    @app.command()
    def verb(scale: cli.Scale = "", budget: cli.Budget = 0, seed: cli.Seed = 0, seeds: cli.Seeds = 1,
             results: cli.Results = Path(), teacher: cli.Teacher = None, device: cli.Device = None):  # fmt: skip
        seen.append(Plan(scale=scale, budget=budget, seed=seed, seeds=seeds, results=results, teacher=teacher, device=device))

    done = typer.testing.CliRunner().invoke(app, given.as_options())
    assert seen == [given], done.output


def test_values_of_config_are_typed():
    p = from_cli({"scale": "smoke", "budget": "0.5", "seed": "3"})
    assert (p.budget, p.seed) == (0.5, 3)


def test_rows_of_the_headline_table_are_the_papers_then_those_that_ask_for_it(workflow):
    edit(workflow, "runs.yaml", lambda runs: runs.update(mine={"method": "t2r", "headline": True}, other={"method": "t2r"}))
    p = Plan(scale="smoke", workflow=workflow)
    assert p.rows("headline", "table2")[-2:] == ["lizard", "mine"]
    assert "mine" not in p.rows("lolcats", "table1")
    assert p.tables_of("mine") == ["headline/table2"]
    assert p.tables_of("lolcats_exp") == ["lolcats/table1", "lolcats/figure3"]


def test_a_finished_stage_counts_only_under_its_own_key(tmp_path):
    p = Plan(scale="smoke", results=tmp_path)
    folder = p.folder(p.step("evaluate", "lizard"))
    folder.mkdir(parents=True)
    assert p.finished("evaluate", ["lizard"]) == {"lizard": None}
    for key, expected in (("0" * 64, None), (p.key(p.step("evaluate", "lizard")), folder / "metrics.json")):
        (folder / "run.json").write_text(f'{{"key": "{key}"}}')
        assert p.finished("evaluate", ["lizard"]) == {"lizard": expected}


def test_every_stage_is_a_module_and_a_verb():
    from relinear import cli

    names = {command.name for command in cli.app.registered_commands}
    assert {*plan.SHARED, *plan.PER_RUN} <= names


def test_a_run_that_stands_twice_is_refused(workflow):
    with (workflow / "runs.yaml").open("a") as runs:
        runs.write("lizard: {method: lizard}\n")
    with pytest.raises(config.ConfigError, match="runs.yaml is not YAML: 'lizard' stands there twice"):
        config.read_runs(workflow)
