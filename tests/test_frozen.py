"""The safety net: the specs give the tables and claims that are committed, and verdicts on costs from before
there were specs, byte for byte. Those costs, and the verdicts that were drawn from them, lie in
`frozen/efficiency`."""

import csv
import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from relinear.core import store
from relinear.draw import About, own, pictures, planned
from relinear.draw.beside import PROVENANCE, VERDICTS
from relinear.draw.drawing import make
from relinear.draw.planned import draw_committed
from relinear.errors import UserError
from relinear.files import sha256
from relinear.plan.plan import Plan
from relinear.plan.specs import read
from relinear.stages._stage import Node

ROOT = Path(__file__).parents[1]
FROZEN = Path(__file__).parent / "frozen"
REFERENCE = ROOT / "results/reference"
# figures of attention weights or gates whose measurements were committed before these were kept
WITHOUT_WEIGHTS = {
    ("maps_smollm2", "hedgehog_figure5"),
    *(("smollm2", f"lolcats_figure{n}") for n in (3, 4, 5, 6)),
}
DRAWN = sorted(
    (manifest.parent.name, *drawing.split("/"))
    for manifest in REFERENCE.glob("*/reference.json")
    for drawing in PROVENANCE.committed(manifest.parent)
)


@pytest.mark.parametrize("spec", ["lolcats/figure2", "lizard/figure5", "supra/figure1"])
def test_verdicts_on_costs_come_out_byte_for_byte(tmp_path, spec):
    artefact = read(ROOT / f"workflow/papers/{spec}.yaml")
    [name] = artefact.files()
    files = {name: FROZEN / "efficiency/efficiency.csv"}
    written = make(artefact, {}, About("mini", files=files), tmp_path)
    assert sorted(written) == sorted(Path(path) for path in artefact.outputs(str(tmp_path))) and all(
        path.stat().st_size for path in written
    )
    assert (tmp_path / f"{artefact.stem}.claims.csv").read_text() == (
        FROZEN / f"efficiency/{artefact.name}.claims.csv"
    ).read_text()


@pytest.fixture(scope="module")
def undrawn(tmp_path_factory) -> Iterator[Callable[[str], Path]]:
    """A function that gives a committed folder's copy without its drawings. Plans and measurements, which no
    drawing changes, are read once for all that are drawn from them."""

    @functools.cache
    def copy(name: str) -> Path:
        committed, folder = REFERENCE / name, reference / name
        papers = {drawing.partition("/")[0] for drawing in PROVENANCE.committed(committed)}
        folder.mkdir()
        for part in committed.iterdir():
            if part.suffix in (".json", ".csv"):
                shutil.copy(part, folder)
            elif part.name not in papers:
                (folder / part.name).symlink_to(part)  # drawings alone are not, as they are written
        return folder

    reference = tmp_path_factory.mktemp("undrawn") / "reference"
    reference.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((planned, "Plan"), (planned, "measured_in"), (store, "packed")):
            patch.setattr(module, name, functools.cache(getattr(module, name)))
        # a PDF beside a picture is removed again, for none is committed
        write = pictures.write_figure
        patch.setattr(pictures, "write_figure", lambda path, made: path.suffix == ".pdf" or write(path, made))
        yield copy


@pytest.mark.parametrize(("name", "paper", "stem"), DRAWN)
def test_what_is_committed_is_drawn_again_byte_for_byte(name, paper, stem, undrawn):
    """Tables, claims and pictures; from records, items and weights that lie in the folder, and named in its
    manifest. Provenance names the nodes that they come from."""
    committed, folder = REFERENCE / name, undrawn(name)
    artefact = read(ROOT / f"workflow/papers/{paper}/{stem}.yaml")
    if (name, artefact.name) in WITHOUT_WEIGHTS:
        with pytest.raises(
            UserError, match="safetensors is missing: it lies neither in .* nor in a tensors.parquet"
        ):
            draw_committed(folder, artefact)
        return
    # the records lie elsewhere here
    written = [path for path in draw_committed(folder, artefact) if path.suffix != ".json"]
    names = [path.relative_to(folder).as_posix() for path in written]
    assert ("claims.csv" in names) == bool(artefact.spec.claims)
    assert any(name.startswith(f"{paper}/{stem}.") for name in names)
    assert [name for name in names if (folder / name).read_bytes() != (committed / name).read_bytes()] == []
    manifest = json.loads((folder / "reference.json").read_text())["files"]
    assert all(manifest[path.relative_to(folder).as_posix()] == sha256(path) for path in written)
    told, anew = (PROVENANCE.of(root / paper / stem)["sources"] for root in (committed, folder))
    nodes = {source.partition("#")[2]: hashes for source, hashes in anew.items() if "#" in source}
    assert {source.partition("#")[2]: hashes for source, hashes in told.items() if "#" in source} == nodes


def test_no_picture_is_excepted_that_is_not_committed():
    assert WITHOUT_WEIGHTS <= {(name, f"{paper}_{stem}") for name, paper, stem in DRAWN}


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
    assert [row["ours"] for row in (lora, maps, both)] == [
        "6,815,744, 0.0849 %",
        "33,554,432, 0.418 %",
        "40,370,176, 0.503 %",
    ]
    assert [row["holds"] for row in (lora, maps, both, conclusion)] == ["yes", "yes", "no", "no"], (
        "the last two are misprints"
    )
    assert [(row["paper"], row["holds"]) for row in tokens] == [
        ("0.003 %", "yes"),
        ("0.04 %", "yes"),
        ("0.2 %", "yes"),
    ]
    assert (saved["ours"], saved["holds"]) == ("6.8 and 3.3 points", "no"), "both on the paper's tokens"
    assert (kl["paper"], mse["paper"]) == ("0.94 (p = 0.005)",) * 2 and (kl["holds"], mse["holds"]) == (
        "not told",
        "yes",
    )
    intext, table1 = (read(ROOT / f"workflow/papers/lolcats/{name}.yaml") for name in ("intext", "table1"))
    printed = {line.run: table1.spec.published(line.name).values for line in table1.spec.lines}
    runs = [run for run, measure in intext.spec.reads() if measure == "fidelity"]
    for name, numbers in own.load(intext.script, "draw(spec, measured, about, out)").PUBLISHED.items():
        assert [printed[run][{"ppl": "ppl_at_2"}.get(name, name)] for run in runs] == list(numbers)


def test_hedgehog_s_maps_are_the_printed_share_of_llama_2_by_two_maps_without_biases_alone(tmp_path):
    artefact = read(ROOT / "workflow/papers/hedgehog/parameters.yaml")
    script = own.load(artefact.script, "draw(spec, measured, about, out)")
    heads, dim, llama = 32 * 32, 128, 6_738_415_616
    maps = {
        "two, with biases": 2 * heads * (dim + 1) * dim,
        "two": 2 * heads * dim * dim,
        "one, with a bias": heads * (dim + 1) * dim,
        "one": heads * dim * dim,
    }
    found = script.counts(tuple(artefact.spec.options["llama"].items()))
    assert found == {name: (llama, own_maps) for name, own_maps in maps.items()}
    assert [name for name, count in found.items() if round(count.of_all, 3) == 0.495] == ["two"]
    committed = ROOT / "results/reference/hedgehog_smollm2"
    shutil.copy(committed / "reference.json", tmp_path)
    drawn = {path.name: path.read_bytes() for path in draw_committed(tmp_path, artefact)}
    del drawn[PROVENANCE.file], drawn[VERDICTS.file]
    assert {name: (committed / "hedgehog" / name).read_bytes() for name in drawn} == drawn
    place = "hedgehog/parameters"
    assert VERDICTS.committed(tmp_path) == {place: VERDICTS.of(committed / place)}
    assert PROVENANCE.committed(tmp_path) == {place: PROVENANCE.of(committed / place)}
    [row] = VERDICTS.of(tmp_path / place)
    assert (row["verdict"], row["whose"]) == ("contradicted", "paper")  # "of the original model size"
    assert row["reason"].endswith("a form that the paper states, too: contradicted, 2.96 is not < 0.50")


def test_no_verdicts_stay_of_a_drawing_that_has_no_claims_any_more(tmp_path):
    artefact = read(ROOT / "workflow/papers/hedgehog/parameters.yaml")
    without = dataclasses.replace(artefact, spec=artefact.spec.model_copy(update={"claims": ()}))
    shutil.copy(ROOT / "results/reference/hedgehog_smollm2/reference.json", tmp_path)
    draw_committed(tmp_path, artefact)
    own_verdicts = VERDICTS.committed(tmp_path)

    def redrawn(others: dict) -> dict:
        [file] = VERDICTS.write(tmp_path, own_verdicts | others)
        manifest = json.loads((tmp_path / "reference.json").read_text())
        manifest["files"][file.name] = sha256(file)
        (tmp_path / "reference.json").write_text(json.dumps(manifest))
        draw_committed(tmp_path, without)
        return json.loads((tmp_path / "reference.json").read_text())["files"]

    other = {"hedgehog/other": own_verdicts["hedgehog/parameters"]}
    assert redrawn(other)[VERDICTS.file] == sha256(tmp_path / VERDICTS.file)
    assert VERDICTS.committed(tmp_path) == other
    assert VERDICTS.file not in redrawn({}) and not (tmp_path / VERDICTS.file).exists()


def table7(workflow: Path, out: Path) -> dict[str, str]:
    """Lizard Table 7 of the configuration at the papers' size: setting -> whether it is the paper's."""
    plan = Plan(scale="paper", workflow=workflow)
    hardware = {"processes": 1, "dtype": plan.config.hardware.dtype, "gpu": None}
    for step in ("distill", "finetune"):
        settings = plan.settings(Node(step, "lizard"))
        tokens = (
            settings["budget"]["epochs"] * plan.settings(Node("text", "alpaca@llama-3-8b"))["train_tokens"]
        )
        (out / "runs/lizard" / step).mkdir(parents=True)
        (out / "runs/lizard" / step / "run.json").write_text(
            json.dumps({"config": settings, "hardware": hardware, "tokens": tokens, "parents": {}})
        )
    artefact = read(ROOT / "workflow/papers/lizard/table7.yaml")
    found = SimpleNamespace(folder=out / "runs/lizard/perplexity")
    own.load(artefact.script, "draw(spec, measured, about, out)").draw(
        artefact.spec, {("lizard", "perplexity"): found}, About("paper"), out
    )
    with (out / "table7.csv").open() as file:
        return {row["setting"]: row["same"] for row in csv.DictReader(file)}


def test_lizards_configuration_is_the_papers_table_7_until_it_drifts(tmp_path):
    """One difference is known: another card. Any further one fails."""
    same = table7(ROOT / "workflow", tmp_path / "as it is")
    known = {"gpus"}
    assert {setting for setting, verdict in same.items() if verdict == "no"} == known and list(
        same.values()
    ).count("yes") == 19
    assert "gpus,8 x A100 80GB,none,no" in (tmp_path / "as it is/table7.csv").read_text()
    drifts = {
        "distill_lr": ("lr: 1.0e-3", "lr: 1.0e-2"),
        "finetune_lr": ("lr: 5.0e-4", "lr: 1.0e-4"),
        "betas": ("0.99]", "0.999]"),
        "min_lr_ratio": ("min_lr_ratio: 0.1", "min_lr_ratio: 0.0"),
        "lora_targets": ("q_proj, k_proj, v_proj", "q_proj, k_proj"),
    }
    for setting, (ours, other) in drifts.items():
        workflow = Path(shutil.copytree(ROOT / "workflow", tmp_path / setting))
        runs = workflow / "papers/lizard/runs.yaml"
        first, rest = runs.read_text().split("\n\n", 1)  # `lizard` comes first
        assert ours in first
        runs.write_text(f"{first.replace(ours, other)}\n\n{rest}")
        assert {
            name
            for name, verdict in table7(workflow, tmp_path / f"{setting} drifted").items()
            if verdict == "no"
        } == known | {setting}


def test_lizards_recipe_is_the_papers_but_for_what_is_known_to_differ():
    with (ROOT / "results/reference/smollm2/lizard/table7.csv").open() as file:
        same = {row["setting"]: row["same"] for row in csv.DictReader(file)}
    assert {setting for setting, verdict in same.items() if verdict == "no"} == {
        "gpus",
        "engine",
        "sequence_length",
        "micro_batch",
    }
    assert list(same.values()).count("yes") == 17
