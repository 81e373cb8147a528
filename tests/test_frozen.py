"""The safety net: the specs give the tables and claims that are committed, and verdicts on costs from before there were specs, byte for byte."""

import csv
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from relinear.draw import About, make, own
from relinear.draw.planned import draw_committed
from relinear.errors import UserError
from relinear.files import sha256
from relinear.plan.plan import Plan
from relinear.plan.specs import read
from relinear.stages._stage import Node

ROOT = Path(__file__).parents[1]
FROZEN = Path(__file__).parent / "frozen"
DRAWN = {  # folder of committed records -> what is drawn from them
    "smollm2": (
        *("comparison/table2", "supra/table1", "lizard/table1", "lizard/table7", "lizard/table8"),
        *("lolcats/table1", "lolcats/table2", "lolcats/intext"),
    ),
    "table2_mini": ("comparison/table2",),  # a demonstration, of which nothing is judged
}


@pytest.mark.parametrize("spec", ["lolcats/figure2", "lizard/figure5", "supra/figure1"])
def test_verdicts_on_costs_come_out_byte_for_byte(tmp_path, spec):
    artefact = read(ROOT / f"workflow/papers/{spec}.yaml")
    [name] = artefact.files()
    files = {name: FROZEN / "efficiency/efficiency.csv"}
    written = make(artefact, {}, About("mini", files=files), tmp_path)
    assert sorted(written) == sorted(Path(path) for path in artefact.outputs(str(tmp_path))) and all(path.stat().st_size for path in written)
    assert (tmp_path / f"{artefact.stem}.claims.csv").read_text() == (FROZEN / f"efficiency/{artefact.name}.claims.csv").read_text()


@pytest.mark.parametrize("name", DRAWN)
def test_tables_of_committed_runs_are_drawn_from_their_records_and_named_in_the_manifest(name, tmp_path):
    reference = ROOT / "results/reference" / name
    folder = tmp_path / "reference" / name
    names = ("run.json", "metrics.json", "items.json.xz")  # the items, since differences are paired
    for file in [reference / "reference.json", *(path for name in names for path in reference.glob(f"runs/*/*/{name}"))]:
        (folder / file.relative_to(reference)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, folder / file.relative_to(reference))
    for spec in DRAWN[name]:
        paper, stem = spec.split("/")
        written = draw_committed(folder, read(ROOT / f"workflow/papers/{spec}.yaml"))
        for path in (path for path in written if path.suffix != ".json"):  # the records of the provenance lie elsewhere here
            assert path.read_bytes() == (reference / paper / path.name).read_bytes(), path.name
        manifest = json.loads((folder / "reference.json").read_text())["files"]
        assert all(manifest[path.relative_to(folder).as_posix()] == sha256(path) for path in written)


def test_drawing_from_a_folder_without_these_runs_says_which_it_has(tmp_path):
    artefact = read(ROOT / "workflow/papers/lizard/table8.yaml")
    with pytest.raises(UserError, match="has no reference.json"):
        draw_committed(tmp_path, artefact)
    (tmp_path / "reference.json").write_text('{"scale": "smollm2", "files": {}}')
    (tmp_path / "runs/t2r").mkdir(parents=True)
    with pytest.raises(UserError, match="has none of the runs of lizard_table8; have t2r"):
        draw_committed(tmp_path, artefact)


def test_what_lolcats_says_in_its_text_is_counted_at_the_papers_shape():
    with (ROOT / "results/reference/smollm2/lolcats/intext.csv").open() as file:
        lora, maps, _, both, conclusion, *tokens, kl, mse, saved = csv.DictReader(file)
    assert [row["ours"] for row in (lora, maps, both)] == ["6,815,744, 0.0849 %", "33,554,432, 0.418 %", "40,370,176, 0.503 %"]
    assert [row["holds"] for row in (lora, maps, both, conclusion)] == ["yes", "yes", "no", "no"], "the last two are misprints"
    assert [(row["paper"], row["holds"]) for row in tokens] == [("0.003 %", "yes"), ("0.04 %", "yes"), ("0.2 %", "yes")]
    assert (saved["ours"], saved["holds"]) == ("6.7 and -1.1 points", "not told: T2R had 20M of 40M tokens")
    assert (kl["paper"], mse["paper"]) == ("0.94 (p = 0.005)",) * 2 and (kl["holds"], mse["holds"]) == ("not told", "yes")
    intext, table1 = (read(ROOT / f"workflow/papers/lolcats/{name}.yaml") for name in ("intext", "table1"))
    printed = {line.run: line.published.values for line in table1.spec.lines}
    runs = [run for run, measure in intext.spec.reads() if measure == "fidelity"]
    for name, numbers in own._load(intext.script).PUBLISHED.items():
        assert [printed[run][{"ppl": "ppl_at_2"}.get(name, name)] for run in runs] == list(numbers)


def table7(workflow: Path, out: Path) -> dict[str, str]:
    """Lizard Table 7 of the configuration at the papers' size: setting -> whether it is the paper's."""
    plan = Plan(scale="paper", workflow=workflow)
    hardware = {"processes": 1, "dtype": plan.config.hardware.dtype, "gpu": None}
    for step in ("distill", "finetune"):
        settings = plan.settings(Node(step, "lizard"))
        tokens = settings["budget"]["epochs"] * plan.settings(Node("text", "alpaca@llama-3-8b"))["train_tokens"]
        (out / "runs/lizard" / step).mkdir(parents=True)
        (out / "runs/lizard" / step / "run.json").write_text(json.dumps({"config": settings, "hardware": hardware, "tokens": tokens}))
    artefact = read(ROOT / "workflow/papers/lizard/table7.yaml")
    found = SimpleNamespace(folder=out / "runs/lizard/perplexity")
    own._load(artefact.file.with_suffix(".py")).draw(artefact.spec, {("lizard", "perplexity"): found}, About("paper"), out)
    with (out / "table7.csv").open() as file:
        return {row["setting"]: row["same"] for row in csv.DictReader(file)}


def test_lizards_configuration_is_the_papers_table_7_until_it_drifts(tmp_path):
    """Three differences are known: another card, one process, half the sequence length. Any further one fails."""
    same = table7(ROOT / "workflow", tmp_path / "as it is")
    known = {"gpus", "sequence_length"}
    assert {setting for setting, verdict in same.items() if verdict == "no"} == known and list(same.values()).count("yes") == 13
    assert "gpus,8 x A100 80GB,none,no" in (tmp_path / "as it is/table7.csv").read_text()
    drifts = {
        "distill_lr": ("lr: 1.0e-3", "lr: 1.0e-2"), "finetune_lr": ("lr: 5.0e-4", "lr: 1.0e-4"), "betas": ("0.99]", "0.999]"),
        "min_lr_ratio": ("min_lr_ratio: 0.1", "min_lr_ratio: 0.0"), "lora_targets": ("q_proj, k_proj, v_proj", "q_proj, k_proj"),
    }  # fmt: skip
    for setting, (ours, other) in drifts.items():
        workflow = Path(shutil.copytree(ROOT / "workflow", tmp_path / setting))
        runs = workflow / "papers/lizard/runs.yaml"
        first, rest = runs.read_text().split("\n\n", 1)  # `lizard` comes first
        assert ours in first
        runs.write_text(f"{first.replace(ours, other)}\n\n{rest}")
        assert {name for name, verdict in table7(workflow, tmp_path / f"{setting} drifted").items() if verdict == "no"} == known | {setting}


def test_lizards_recipe_is_the_papers_but_for_what_is_known_to_differ():
    with (ROOT / "results/reference/smollm2/lizard/table7.csv").open() as file:
        same = {row["setting"]: row["same"] for row in csv.DictReader(file)}
    assert {setting for setting, verdict in same.items() if verdict == "no"} == {"gpus", "engine", "sequence_length", "micro_batch"}
    assert list(same.values()).count("yes") == 12
