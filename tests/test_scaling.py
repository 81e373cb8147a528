"""The figure of scaling over model size and GPUs."""

import json
from pathlib import Path

import pytest

from relinear.draw import About
from relinear.draw.own import load
from relinear.draw.planned import draw_committed
from relinear.plan.claims import Point
from relinear.plan.specs import read

ROOT = Path(__file__).parents[1]
ARTEFACT = read(ROOT / "workflow/papers/comparison/scaling.yaml")


@pytest.fixture(scope="module")
def script():
    return load(ARTEFACT.script, "figure(spec, measured, about)")


def row(gpus, speed, **change):
    return {
        "scaling": "weak", "engine": "ddp", "shape": "llama-3-8b", "run": "lizard", "stage": "distill",
        "gpus": gpus, "tokens_per_second": speed,
    } | change  # fmt: skip


def test_speeds_are_of_replicas_with_as_many_sequences_that_one_gpu_had_too(script):
    rows = [
        row(2, 190), row(1, 100), row(4, 360), row(2, 150, engine="fsdp"), row(2, 170, scaling="strong"),
        row(2, 180, run="supra"), row(2, 9, shape="smollm2-135m"),
    ]  # fmt: skip
    assert script.speeds(rows, "llama-3-8b") == {("lizard", "distill"): {1: 100, 2: 190, 4: 360}}
    assert list(script.speeds(rows, "llama-3-8b")["lizard", "distill"]) == [1, 2, 4]


def test_a_teachers_size_is_that_of_its_name_and_a_name_without_one_is_refused(script):
    assert script.size_of("smollm2-135m-instruct") == 135e6
    assert script.size_of("qwen2.5-coder-1.5b-instruct") == 1.5e9
    with pytest.raises(ValueError, match="no size, such as -135m or -1.5b, in the model's name 'gpt2'"):
        script.size_of("gpt2")


def test_a_number_of_gpus_that_was_not_measured_is_not_run(script, tmp_path):
    file = tmp_path / "scaling.json"
    file.write_text(json.dumps({"rows": [row(1, 100)]}))
    look = script.look(ARTEFACT.spec, About("", files={ARTEFACT.spec.inputs[-1]: file}))
    at = Point(row="lizard", column="distill, llama-3-8b", at={"gpus": 1})
    assert look(at).value == 100
    assert (
        look(at.model_copy(update={"at": {"gpus": 8}})) == "lizard, distill at llama-3-8b on 8 GPUs: not run"
    )


def test_it_is_drawn_from_a_benchmarks_folder_and_the_tables_beside_it(tmp_path):
    for name in ("scaling/scaling.json", "smollm2", "qwen"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(ROOT / "results/reference" / name)
    written = {path.name: path.read_bytes() for path in draw_committed(tmp_path / "scaling", ARTEFACT)}
    committed = ROOT / "results/reference/scaling"
    assert json.loads(written.pop("provenance.json")).keys() == {"comparison/scaling"}
    assert written == {
        "scaling.png": (committed / "comparison/scaling.png").read_bytes(),
        "claims.csv": (committed / "claims.csv").read_bytes(),
    }
