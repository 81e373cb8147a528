"""A run's model is loaded whole or not at all: every file that its records name, every tensor that the model
needs, and nothing untrained."""

import functools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT, made
from safetensors.torch import load_file, save_file
from test_errors import relinear
from test_stage import Mirror
from transformers import AutoModelForCausalLM, AutoTokenizer

from relinear import load_run, stages
from relinear.core import store
from relinear.errors import UserError
from relinear.files import sha256
from relinear.linearize.loading import load_teacher
from relinear.plan.plan import Plan
from relinear.share.runs import chain_of
from relinear.tracking import live as tracking

COMMITTED = [
    place / "runs" / run for place in store.campaigns(ROOT / "results/reference") for run in store.runs(place)
]
STEPS = ("measure hedgehog gate", "finetune supra", "finetune teacher_lora")
MODEL, METHOD, ADAPTER = (
    "models/tiny/model.safetensors",
    "runs/hedgehog/distill/method.safetensors",
    "runs/hedgehog/finetune/adapter/",
)
WHOLE, LORA = (
    "runs/supra/finetune/model.safetensors",
    "runs/teacher_lora/finetune/adapter/adapter_model.safetensors",
)


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Plan:
    plan = Plan(scale="smoke", results=tmp_path_factory.mktemp("results"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracking, "Tracker", Mirror)
        made(plan, *STEPS)
    return plan


@pytest.fixture
def root(plan, tmp_path) -> Path:
    """A copy of the scale's results, to damage."""
    return Path(shutil.copytree(plan.root, tmp_path / "smoke", ignore=shutil.ignore_patterns(".work")))


def rewrite(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def sign(root: Path, name: str) -> None:
    """Write the file's present hash into its record, as if the step had left this file."""
    folder = next(parent for parent in (root / name).parents if (parent / "run.json").is_file())
    own = (root / name).relative_to(folder).as_posix()
    rewrite(folder / "run.json", lambda r: r["artefacts"].update({own: {"sha256": sha256(root / name)}}))


# --- committed runs ---

TRAINING = stages.training()


def weights_named(run: Path) -> set[Path]:
    """The files of weights that the records of a committed run, and of the runs that it builds on, name."""
    scale, found, waiting = run.parents[1], set(), store.parts(run)
    for step in waiting:
        record = json.loads(store.read(step / "run.json"))
        found |= {
            step / name
            for name in record["artefacts"]
            if name.endswith("safetensors") and step.name in TRAINING
        }
        others = (
            scale / "runs" / Path(*Path(parent["path"]).parts[-2:]) for parent in record["parents"].values()
        )
        waiting += [other for other in others if store.has(other) and other not in waiting]
    return found


# One plan of each scale, for all of the runs: the settings are the same.
planned = functools.cache(Plan)


@pytest.mark.parametrize("run", COMMITTED, ids=lambda run: f"{run.parents[1].name}/{run.name}")
def test_a_committed_run_is_whole_or_says_what_is_missing_and_the_command_that_makes_it(run, monkeypatch):
    monkeypatch.setattr("relinear.share.runs.Plan", planned)
    there = all(path.is_file() for path in weights_named(run))
    home = json.loads((run.parents[1] / "reference.json").read_text())["scale"]
    scale, _, budget = home.partition("-x")
    options, more = (f" --budget {budget}", f" budget={budget}") if budget else ("", "")
    try:
        chain_of(run)
    except UserError as error:
        if there:  # what it began with is too large to commit
            assert re.search(
                rf"is not in .*results/{home}/models/([\w.-]+); `relinear model \1 --scale {scale}{options}`"
                r" makes it$",
                str(error),
            )
            return
        command = (
            rf"`snakemake --cores all results/{home}/runs/([\w.-]+)/(\w+)/run.json --config"
            rf" scale={scale}{more}`$"
        )
        said = re.search(
            rf"/\w+: its weights are not committed \(.*safetensors\); this command makes them: {command}",
            str(error),
        )
        assert said, error
        assert planned(scale=scale).node(said[2], said[1])
    else:
        assert there


def test_most_committed_runs_have_no_weights_and_the_table_s_have():
    """Otherwise the test above could not fail."""
    there = {
        run.name: all(path.is_file() for path in weights_named(run))
        for run in COMMITTED
        if run.parents[1].name == "smollm2"
    }
    assert (
        there["lizard"]
        and there["teacher_lora"]
        and not there["lolcats_linear"]
        and not there["t2r"]
        and not there["supra"]
        and not there["lizard-seed1"]
    )
    assert not any(
        all(path.is_file() for path in weights_named(run))
        for run in COMMITTED
        if run.name == "hedgehog" and "table2_mini" in run.parts
    )


def test_the_command_does_not_answer_with_a_model_that_nothing_trained(monkeypatch):
    code, stderr = relinear(
        monkeypatch, "generate", str(ROOT / "results/reference/smollm2/runs/supra"), "--prompt", "x"
    )
    assert code == 1 and stderr.count("\n") == 1 and "weights are not committed" in stderr


# --- one's own ---


def test_a_whole_run_loads(root):
    for run in ("hedgehog", "supra", "teacher_lora"):
        assert load_run(root / "runs" / run).num_parameters() > 0


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


MISSING = {
    "a method": (METHOD, "hedgehog", "distill hedgehog"),
    "an adapter": (f"{ADAPTER}adapter_model.safetensors", "hedgehog", "finetune hedgehog"),
    "an adapter's config": (f"{ADAPTER}adapter_config.json", "hedgehog", "finetune hedgehog"),
    "all weights": (WHOLE, "supra", "finetune supra"),
    "the model": (MODEL, "hedgehog", "model tiny"),
    "a tokenizer": ("models/tiny/tokenizer.json", "hedgehog", "model tiny"),
}  # fmt: skip


@pytest.mark.parametrize(
    "damage", [Path.unlink, cut, lambda p: p.write_bytes(b"")], ids=["gone", "cut", "empty"]
)
@pytest.mark.parametrize("case", MISSING)
def test_every_file_that_a_record_names_is_required_as_it_was_written(root, case, damage):
    name, run, command = MISSING[case]
    damage(root / name)
    with pytest.raises(UserError) as error:
        load_run(root / "runs" / run)
    assert name in str(error.value) and f"`relinear {command} --scale smoke` again" in str(error.value), (
        error.value
    )


def test_a_step_that_is_gone_is_missed_where_a_measurement_was_made_of_it(root):
    shutil.rmtree(root / "runs/hedgehog/finetune")
    with pytest.raises(
        UserError, match=r"hedgehog/finetune has no run.json.*`relinear finetune hedgehog` again"
    ):
        load_run(root / "runs/hedgehog")


def test_a_finetuning_by_lora_must_have_named_its_adapter(root):
    shutil.rmtree(root / ADAPTER)
    record = root / "runs/hedgehog/finetune/run.json"
    rewrite(
        record,
        lambda r: [r["artefacts"].pop(name) for name in list(r["artefacts"]) if name.startswith("adapter/")],
    )
    with pytest.raises(
        UserError,
        match=(
            "names no adapter/adapter_config.json, adapter/adapter_model.safetensors, which this finetune"
            " leaves"
        ),
    ):
        load_run(root / "runs/hedgehog")


@pytest.mark.parametrize(
    "text", ["", '{"schema": 2', "[]", "{}", '{"schema": 3}', "\x00\x00", '{"schema": 2, "artefacts": 3}']
)
@pytest.mark.parametrize("record", ["runs/hedgehog/distill", "runs/hedgehog/gate", "models/tiny"])
def test_a_record_that_cannot_be_believed_is_named(root, record, text):
    (root / record / "run.json").write_text(text)
    with pytest.raises(UserError, match=rf"{record}/run.json (cannot be read|must hold|has schema|lacks)"):
        load_run(root / "runs/hedgehog")


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["config"].pop("links"),
        lambda r: r["config"].update(links=[]),
        lambda r: r["config"].update(links=[{"method": "hedgehog"}]),
        lambda r: r["config"]["links"][0].update(steps=["nothing"]),
        lambda r: r["parents"].pop("model"),
        lambda r: r["parents"]["model"].update(path="results/smoke/../../models/tiny"),
    ],
)
def test_a_record_that_does_not_tell_the_chain_is_named(root, change):
    for record in root.glob("runs/hedgehog/*/run.json"):
        rewrite(record, change)
    with pytest.raises(
        UserError, match=r"run.json does not say what the run's model is made of|is not there"
    ):
        load_run(root / "runs/hedgehog")


def first(tensors: dict, part: str = "") -> str:
    return next(name for name in sorted(tensors) if part in name)


def number(value: float):
    def change(tensors) -> str:
        name = first(tensors)
        tensors[name].view(-1)[-1] = value
        return name

    return change


def less(tensors) -> str:
    name = first(tensors)
    del tensors[name]
    return name


def more(tensors) -> str:
    tensors["extra.weight"] = torch.zeros(2)
    return "extra.weight"


def shape(tensors) -> str:
    name = first(tensors)
    tensors[name] = torch.zeros(3)
    return f"{name} [3] instead of"


CHANGES = {
    "NaN": number(float("nan")),
    "infinite": number(float("-inf")),
    "missing": less,
    "unexpected": more,
    "misshapen": shape,
}
FILES = {
    MODEL: "hedgehog",
    METHOD: "hedgehog",
    f"{ADAPTER}adapter_model.safetensors": "hedgehog",
    WHOLE: "supra",
    LORA: "teacher_lora",
}


@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.parametrize("name", FILES)
def test_tensors_that_are_not_the_model_s_or_not_finite_are_refused_whoever_signed_them(root, name, case):
    """Here records and hashes agree with the file, and it is refused all the same."""
    tensors = load_file(root / name)
    named = CHANGES[case](tensors)
    save_file(tensors, root / name, {"format": "pt"})
    sign(root, name)
    with pytest.raises(UserError) as error:
        load_run(root / "runs" / FILES[name])
    assert name in str(error.value) and named in str(error.value), error.value
    assert ("infinite or none" if case in ("NaN", "infinite") else case) in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_is_found_in_any_dtype(tmp_path, dtype, value):
    from relinear.weights import require_finite

    finite = {
        "odd": torch.full((3,), 1.5, dtype=dtype),
        "large": torch.full((2, 5), torch.finfo(dtype).max, dtype=dtype),
        "small": torch.full((), torch.finfo(dtype).tiny, dtype=dtype),
        "none": torch.zeros(0, dtype=dtype),
        "ids": torch.arange(3),
    }
    save_file(finite, tmp_path / "a.safetensors")
    require_finite(tmp_path / "a.safetensors")
    save_file(finite | {"last": torch.tensor([0, 1, value], dtype=dtype)}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="a.safetensors: last holds 1 numbers"):
        require_finite(tmp_path / "a.safetensors")


# --- folders that transformers loads ---


@pytest.fixture
def plain(root) -> Path:
    return root / "models/tiny"


@pytest.mark.parametrize("case", CHANGES)
def test_a_plain_folder_answers_whole_or_not_at_all(monkeypatch, plain, case):
    tensors = load_file(plain / "model.safetensors")
    named = CHANGES[case](tensors)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    code, stderr = relinear(monkeypatch, "generate", str(plain), "--prompt", "x")
    assert code == 1 and named.split(" ")[0] in stderr and stderr.count("\n") == 1, stderr


@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.parametrize("file", ["model.safetensors", "adapter_model.safetensors"])
def test_an_adapter_beside_a_plain_model_is_checked_and_so_is_the_model(
    monkeypatch, root, tmp_path, file, case
):
    from relinear.share.export import export

    out = export(root / "runs/teacher_lora", tmp_path / "out", merge=False)
    assert relinear(monkeypatch, "generate", str(out), "--prompt", "x", "--max-new-tokens", "2")[0] == 0
    tensors = load_file(out / file)
    named = CHANGES[case](tensors)
    save_file(tensors, out / file, {"format": "pt"})
    code, stderr = relinear(monkeypatch, "generate", str(out), "--prompt", "x")
    assert code == 1 and named.split(" ")[0] in stderr and stderr.count("\n") == 1, stderr


@pytest.mark.parametrize(
    "file", ["model.safetensors", "adapter_model.safetensors", "adapter_config.json", "config.json"]
)
def test_a_file_of_an_export_that_is_another_of_the_same_shapes_is_refused(monkeypatch, root, tmp_path, file):
    from relinear.share.export import export

    out = export(root / "runs/teacher_lora", tmp_path / "out", merge=False)
    if file.endswith(".json"):
        rewrite(
            out / file,
            lambda told: told.update({"lora_alpha": 17} if "adapter" in file else {"rms_norm_eps": 0.5}),
        )
    else:
        save_file(
            {name: 2 * tensor for name, tensor in load_file(out / file).items()}, out / file, {"format": "pt"}
        )
    code, stderr = relinear(monkeypatch, "generate", str(out), "--prompt", "x")
    assert (
        code == 1
        and f"{file} is not the file that `relinear export` wrote, by relinear.json; possible" in stderr
    ), stderr
    (out / "relinear.json").unlink()
    assert relinear(monkeypatch, "generate", str(out), "--prompt", "x", "--max-new-tokens", "2")[0] == 0, (
        "the reader's own"
    )


@pytest.mark.parametrize(
    "damage", [cut, lambda p: p.write_bytes(b"x" * 200), Path.unlink, lambda p: p.write_bytes(b"")]
)
def test_a_plain_folder_of_a_broken_file_is_named(monkeypatch, plain, damage):
    damage(plain / "model.safetensors")
    code, stderr = relinear(monkeypatch, "generate", str(plain), "--prompt", "x")
    assert code == 1 and "models/tiny" in stderr and "safetensors" in stderr and "Traceback" not in stderr, (
        stderr
    )


def test_a_model_in_several_files_is_one_model(plain, tmp_path, monkeypatch):
    load_teacher(plain, torch.float32).save_pretrained(tmp_path / "cut", max_shard_size="20KB")
    AutoTokenizer.from_pretrained(plain).save_pretrained(tmp_path / "cut")
    files = sorted((tmp_path / "cut").glob("*.safetensors"))
    assert len(files) > 1 and AutoModelForCausalLM.from_pretrained(tmp_path / "cut").num_parameters()
    assert (
        relinear(monkeypatch, "generate", str(tmp_path / "cut"), "--prompt", "x", "--max-new-tokens", "2")[0]
        == 0
    )
    files[-1].unlink()
    code, stderr = relinear(monkeypatch, "generate", str(tmp_path / "cut"), "--prompt", "x")
    assert code == 1 and files[-1].name in stderr and "Traceback" not in stderr, stderr
