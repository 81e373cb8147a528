"""The safety net: tables and claims come out of the specs as they were committed before there were specs, byte for byte."""

import csv
import json
import shutil
from pathlib import Path

import pytest

from relinear.draw import About, make
from relinear.draw.planned import draw_committed
from relinear.draw.schema1 import STAGES, load_schema1
from relinear.errors import UserError
from relinear.files import sha256
from relinear.plan.specs import read

ROOT = Path(__file__).parents[1]
FROZEN = Path(__file__).parent / "frozen"
DRAWN = (
    "lolcats/table1",
    "lolcats/table2",
    "lolcats/intext",
    "supra/table1",
    "lizard/table1",
    "lizard/table7",
    "lizard/table8",
)  # of runs whose records are committed
DEMONSTRATION = {"mini": "Scale `mini` is a demonstration on a laptop's budget, not a reference: read the errors first.", "smollm2": None}


def measured(scale, reads):
    """Every measurement that was committed, of the runs and of their trainings with further seeds."""
    found = {}
    for run, measure in reads:
        for folder in sorted((FROZEN / scale / "runs").glob(f"{run}*")):
            if folder.name == run or folder.name.startswith(f"{run}-seed"):
                try:
                    found[folder.name, measure] = load_schema1(folder, measure) if measure in STAGES else None
                except FileNotFoundError:
                    found[folder.name, measure] = None
    return found


@pytest.mark.parametrize("scale", ["mini", "smollm2"])
@pytest.mark.parametrize("spec", ["comparison/table2", "lolcats/table1"])
def test_what_was_committed_comes_out_byte_for_byte(tmp_path, scale, spec):
    artefact = read(ROOT / f"workflow/papers/{spec}.yaml")
    found = measured(scale, artefact.reads())
    repeats = {run: sorted({other for other, _ in found if other.startswith(f"{run}-seed")}) for run, _ in artefact.reads()}
    make(artefact, found, About(scale, "smollm2-135m-instruct", DEMONSTRATION[scale], None, repeats), tmp_path)
    paper, stem = spec.split("/")
    folder = FROZEN / scale / (paper if paper == "lolcats" else "")
    claims = "claims.csv" if stem == "table2" else f"{stem}.claims.csv"
    assert (tmp_path / f"{stem}.csv").read_text() == (folder / f"{stem}.csv").read_text()
    assert (tmp_path / f"{stem}.claims.csv").read_text() == (folder / claims).read_text()
    assert (tmp_path / f"{stem}.md").read_text().replace(f"`{stem}.claims.csv`", f"`{claims}`") == (folder / f"{stem}.md").read_text()


@pytest.mark.parametrize("spec", ["lolcats/figure2", "lizard/figure5", "supra/figure1"])
def test_verdicts_on_costs_come_out_byte_for_byte(tmp_path, spec):
    artefact = read(ROOT / f"workflow/papers/{spec}.yaml")
    [name] = artefact.files()
    files = {name: FROZEN / "efficiency/efficiency.csv"}
    written = make(artefact, {}, About("mini", files=files), tmp_path)
    assert sorted(written) == sorted(Path(path) for path in artefact.outputs(str(tmp_path))) and all(path.stat().st_size for path in written)
    assert (tmp_path / f"{artefact.stem}.claims.csv").read_text() == (FROZEN / f"efficiency/{artefact.name}.claims.csv").read_text()


def test_tables_of_committed_runs_are_drawn_from_their_records_and_named_in_the_manifest(tmp_path):
    reference = ROOT / "results/reference/smollm2"
    folder = tmp_path / "reference/smollm2"
    names = ("run.json", "metrics.json", "items.json.xz")  # the items, since differences are paired
    for file in [reference / "reference.json", *(path for name in names for path in reference.glob(f"runs/*/*/{name}"))]:
        (folder / file.relative_to(reference)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, folder / file.relative_to(reference))
    for spec in DRAWN:
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
        lora, maps, _, both, conclusion, kl, mse = csv.DictReader(file)
    assert [row["ours"] for row in (lora, maps, both)] == ["6,815,744, 0.0849 %", "33,554,432, 0.418 %", "40,370,176, 0.503 %"]
    assert [row["holds"] for row in (lora, maps, both, conclusion)] == ["yes", "yes", "no", "no"], "the last two are misprints"
    assert (kl["paper"], mse["paper"]) == ("0.94 (p = 0.005)",) * 2 and (kl["holds"], mse["holds"]) == ("not told", "yes")


def test_lizards_recipe_is_the_papers_but_for_what_is_known_to_differ():
    with (ROOT / "results/reference/smollm2/lizard/table7.csv").open() as file:
        same = {row["setting"]: row["same"] for row in csv.DictReader(file)}
    assert {setting for setting, verdict in same.items() if verdict == "no"} == {"gpus", "engine", "sequence_length", "micro_batch"}
    assert list(same.values()).count("yes") == 12
