"""A model and a text of one's own: the page's commands on small models with Llama-3.2's and Qwen3's
configuration, and what is refused."""

import errno
import gzip
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pyarrow as pa
import pytest
import torch
import yaml
from conftest import ROOT, environment, made
from pyarrow import parquet
from safetensors.torch import load_file, save_file
from test_errors import relinear
from test_stage import Mirror
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)  # fmt: skip

from relinear import own
from relinear.errors import UserError
from relinear.families.tiny import byte_tokenizer
from relinear.get.readers import rows
from relinear.get.text import Document, documents
from relinear.linearize.model import linearize
from relinear.opening import configuring, reading, working
from relinear.plan.assets import AssetError, Own, catalogue
from relinear.plan.names import Node
from relinear.plan.plan import Plan
from relinear.plan.strict import WORKFLOW
from relinear.stage import _on_own_files
from relinear.tracking import live as tracking

PAGE = (ROOT / "docs/own.md").read_text()
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
# As config.json of Llama-3.2-1B and of Qwen3-0.6B have it, but for the sizes.
CONFIGS = {
    "llama": (
        LlamaForCausalLM,
        LlamaConfig,
        {"max_position_embeddings": 131072, "rope_parameters": LLAMA3, "rms_norm_eps": 1e-5},
    ),
    "qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"max_position_embeddings": 40960, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "phi3": (Phi3ForCausalLM, Phi3Config, {"max_position_embeddings": 4096}),
}


def save_model(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A random model and a tokenizer of bytes."""
    cls, config, more = CONFIGS[kind]
    tokenizer = byte_tokenizer()
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    torch.manual_seed(0)
    cls(config(vocab_size=len(tokenizer), **SMALL, **more, **ids)).to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def mine(tmp_path_factory) -> Path:
    """A folder with models and texts of one's own. Tests read it alone."""
    folder = tmp_path_factory.mktemp("mine")
    for kind in CONFIGS:
        save_model(kind, folder / kind)
    stories = [document.text for document in documents("smoke")]
    (folder / "my-text.jsonl").write_text("".join(json.dumps({"text": story}) + "\n" for story in stories))
    (folder / "no-column.jsonl").write_text('{"body": "x"}\n')
    (folder / "short.txt").write_text("Hello.")
    (folder / "same.jsonl").write_text(json.dumps({"text": "Ada saw the fox."}) + "\n")
    (folder / "same.jsonl").write_text((folder / "same.jsonl").read_text() * 3000)
    (folder / "paper.pdf").write_text("?")
    (folder / "deep.json").write_text("[" * 4000)
    (folder / "numbers.json").write_text("[1, 2]")
    shutil.copytree(folder / "llama", folder / "unweighted", ignore=shutil.ignore_patterns("*.safetensors"))
    weights = shutil.copytree(folder / "llama", folder / "infinite") / "model.safetensors"
    save_file(
        load_file(weights) | {"model.norm.weight": torch.full((64,), torch.inf)}, weights, {"format": "pt"}
    )
    linearize(AutoModelForCausalLM.from_pretrained(folder / "llama"), "hedgehog").save_pretrained(
        folder / "linearized"
    )
    tokenizer = byte_tokenizer()
    shutil.copytree(folder / "llama", folder / "endless")
    tokenizer.eos_token = tokenizer.pad_token = None
    tokenizer.save_pretrained(folder / "endless")
    return folder


@pytest.fixture
def here(mine, tmp_path, monkeypatch) -> Path:
    """A folder to work in, with those models and texts in it."""
    for path in mine.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- the page ---


def blocks(language: str) -> list[str]:
    """The page's blocks of a language."""
    return [
        text
        for name, text in re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
        if name == language
    ]


ALONE = """
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("relinear", "relinear_kernels"):
            raise ModuleNotFoundError(f"no {name} here", name=name)

sys.meta_path.insert(0, NotInstalled())
"""


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_commands_of_the_page_as_they_stand_there(here, kind, interpreter):
    (here / "my-model").symlink_to(here / kind)
    commands = "".join(blocks("")).splitlines()
    assert commands[0] == "make setup && source .venv/bin/activate" and len(commands) == 3
    for command in commands[1:]:
        done = subprocess.run(
            f"{interpreter} -m relinear.cli {command.removeprefix('relinear ')}",
            shell=True,
            capture_output=True,
            text=True,
            env={**environment(), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert "may be expected" not in done.stderr, "a warning of transformers that reads like a fault"
        if "linearize" in command:
            table = done.stdout
    values = {
        words: float(value.replace(",", ""))
        for words, value in re.findall(r"^\| ([a-z ,]+?) +\| ([\d.,]+)", table, re.MULTILINE)
    }
    assert list(values) == ["the teacher", "linearized, not trained", "after the transfer", "at its end"]
    assert values["at its end"] < values["linearized, not trained"]
    [python] = blocks("python")
    alone = {**environment(), "PYTHONPATH": "", "HF_MODULES_CACHE": str(here / "modules")}
    done = subprocess.run(
        [sys.executable, "-c", f"{ALONE}\n{python}\nprint(type(model).__name__)"],
        capture_output=True,
        text=True,
        env=alone,
    )
    assert done.returncode == 0 and done.stdout.startswith("Relinear"), done.stderr[-3000:]
    weights, before = (
        load_file(here / folder / "model.safetensors") for folder in ("my-lolcats", "my-model")
    )
    assert not torch.equal(
        weights["model.layers.0.self_attn.q_proj.weight"], before["model.layers.0.self_attn.q_proj.weight"]
    ), "LoRA is in it"
    assert torch.equal(
        weights["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"]
    ), "all else is as it was"


def test_an_interrupted_command_goes_on_and_repeats_nothing(here, monkeypatch):
    monkeypatch.setattr(tracking, "Tracker", Mirror)
    ran: list[str] = []

    def run_node(plan, node):
        if node.stage == "finetune" and not interrupted:
            interrupted.append(node)
            raise KeyboardInterrupt
        if plan.finished(node) is None:
            ran.append(str(node))
        made(plan, str(node))

    interrupted: list = []

    def run() -> str:
        amounts = own.Amounts(tokens=1024, seq_len=128, accumulate=2, heldout_tokens=256)
        planned = own.planned("llama", "my-text.jsonl", "lizard", here / "out", amounts=amounts)
        return own.run(*planned, here / "out", run_node)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert "distill lizard" in ran and not (here / "out").exists()
    first = list(ran)
    table = run()
    assert ran[len(first) :] == ["finetune lizard", "measure lizard gate", "measure lizard perplexity"]
    assert "at its end" in table and (here / "out/modeling_relinear.py").is_file()
    run()
    assert len(ran) == len(first) + 3, "nothing is left to do"
    card = (here / "out/README.md").read_text()
    assert (
        "- llama: brought by who made this folder" in card
        and "- my-text: brought" in card
        and "license:" not in card
    )


def test_a_change_of_the_text_or_of_an_amount_is_another_result(here):
    def keys(**changes) -> set[str]:
        amounts = own.Amounts(tokens=1024, seq_len=128, accumulate=2, heldout_tokens=256)._replace(**changes)
        plan = own.planned("llama", "text.jsonl", "lizard", here / "out", amounts=amounts)[1]
        return plan.key(plan.node("finetune", "lizard"))

    lines = (here / "my-text.jsonl").read_text().splitlines(keepends=True)
    (here / "text.jsonl").write_text("".join(lines))
    before = keys()
    assert before == keys() != keys(tokens=2048)
    (here / "text.jsonl").write_text("".join(lines[:-1]))
    assert keys() != before


def test_recipes_are_the_papers(here):
    runs = Plan().runs
    for method, run in {
        "lolcats": "lolcats_window",
        "lizard": "lizard",
        "supra": "supra",
        "t2r": "t2r",
        "hedgehog": "hedgehog",
    }.items():
        plan = own.planned(
            "llama",
            "my-text.jsonl",
            method,
            here / "out",
            amounts=own.Amounts(tokens=1024, seq_len=128, accumulate=2),
        )[1]
        mine = plan.runs[method]
        amounts = {"dose", "epochs", "seq_len", "batch_size", "accumulate"}  # these are of one's own training
        steps = [
            {stage: {k: v for k, v in given.items() if k not in amounts} for stage, given in step.items()}
            for step in runs[run].steps
        ]
        assert (mine.method, mine.options, list(mine.steps)) == (runs[run].method, runs[run].options, steps)
        lengths = [
            plan.settings(plan.node(stage, method))["budget"]["seq_len"] for step in steps for stage in step
        ]
        assert set(lengths) == {128}, "the length that was asked for, also where the paper has one"
        assert plan.scaled.text("alpaca", "llama").name == "my-text@llama" and plan.data["my-text"].options[
            "sources"
        ] == ["my-text"]


def test_the_weights_keep_their_dtype(mine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        save_model("llama", tmp_path / name, dtype)
        plan = own.planned(
            name,
            str(mine / "my-text.jsonl"),
            "t2r",
            tmp_path / "out",
            amounts=own.Amounts(tokens=1024, seq_len=128),
        )[1]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tracking, "Tracker", Mirror)
            made(plan, f"model {name}")
        saved = load_file(plan.root / "models" / name / "model.safetensors")
        assert {tensor.dtype for tensor in saved.values()} == {dtype}


# --- what is refused, before any work ---

REFUSED = {
    "no column": (
        ["llama", "--data", "no-column.jsonl"],
        ["no-column.jsonl, row 0: got the columns body", "a column 'text'", "`column`"],
    ),
    "another column": (
        ["llama", "--data", "my-text.jsonl", "--column", "body"],
        ["got the columns text", "a column 'body'"],
    ),
    "a column of plain text": (
        ["llama", "--data", "short.txt", "--column", "body"],
        ["'plain', which has no columns"],
    ),
    "no end of text": (["endless", "--data", "my-text.jsonl"], ["no end of text", "tokenizer.eos_token"]),
    "no family": (
        ["phi3", "--data", "my-text.jsonl"],
        ["no family covers Phi3ForCausalLM", "LlamaForCausalLM"],
    ),
    "too short": (
        ["llama", "--data", "short.txt", "--seq-len", "128"],
        ["0 training tokens", "one step takes 1,024", "more text"],
    ),
    "one document many times": (
        ["llama", "--data", "same.jsonl", "--seq-len", "128"],
        ["0 training tokens", "equal documents count once"],
    ),
    "too few tokens": (
        ["llama", "--data", "my-text.jsonl", "--tokens", "9999999"],
        ["9,999,999 asked for", "has 48,645 to train on"],
    ),
    "too few held out": (
        ["llama", "--data", "my-text.jsonl", "--heldout-tokens", "200", "--seq-len", "128"],
        ["two sequences of 128"],
    ),
    "beyond the positions": (
        ["qwen3", "--data", "my-text.jsonl", "--seq-len", "50000"],
        ["at most the model's 40960 positions; got 50000"],
    ),
    "no text": (["llama", "--data", "paper.pdf"], ["ends in .pdf", ".jsonl, .json, .parquet, .txt, .md"]),
    "no file": (["llama", "--data", "nothing.jsonl"], ["no file or folder at nothing.jsonl", "owner/name"]),
    "no model": (
        ["nothing", "--data", "my-text.jsonl"],
        ["no file or folder at nothing", "config.json and safetensors"],
    ),
    "no weights": (
        ["unweighted", "--data", "my-text.jsonl"],
        ["unweighted has no weights: neither model.safetensors nor"],
    ),
    "weights that are no numbers": (
        ["infinite", "--data", "my-text.jsonl"],
        ["infinite/model.safetensors: model.norm.weight holds 64 numbers that are infinite or none (NaN)"],
    ),
    "a model's file": (
        ["llama/config.json", "--data", "my-text.jsonl"],
        ["llama/config.json is a file; possible: a folder with config.json", "such as "],
    ),
    "a model that is linearized": (
        ["linearized", "--data", "my-text.jsonl"],
        ["holds a model that is linearized already; possible: its teacher"],
    ),
    "a folder without a model": ([".", "--data", "my-text.jsonl"], ["no config.json is in it"]),
    "an unknown method": (
        ["llama", "--data", "my-text.jsonl", "--method", "lolcat"],
        ["'lolcat'", "hedgehog, lizard, lolcats, supra, t2r"],
    ),
    "no linear method": (
        ["llama", "--data", "my-text.jsonl", "--method", "teacher_lora"],
        ["'teacher_lora' has softmax attention"],
    ),
    "a run after another": (
        ["llama", "--data", "my-text.jsonl", "--method", "lizard_r4"],
        ["'lizard_r4' begins where another run ends"],
    ),
    "an encoder's run": (
        ["llama", "--data", "my-text.jsonl", "--method", "encoder"],
        ["'encoder' is of an encoder"],
    ),
    "another's folder": (
        ["llama", "--data", "my-text.jsonl", "--out", "taken"],
        ["taken holds what `relinear export` did not write"],
    ),
    "no dtype": (
        ["llama", "--data", "my-text.jsonl", "--dtype", "float8"],
        ["no dtype 'float8'; have auto, float32, bfloat16"],
    ),
    "a seed that no generator takes": (
        ["llama", "--data", "my-text.jsonl", "--seed", str(2**70)],
        [f"seed, where random numbers begin, must be at least 0 and at most 4294966295; got {2**70}"],
    ),
    "a seed below 0": (["llama", "--data", "my-text.jsonl", "--seed", "-1"], ["at least 0", "got -1"]),
    "an empty name": (["llama", "--data", ""], ["no file or folder at ; possible: a file or a folder"]),
    "nested JSON": (
        ["llama", "--data", "deep.json"],
        ["deep.json cannot be read: maximum recursion depth exceeded"],
    ),
    "nested JSON by another reader": (
        ["llama", "--data", "deep.json", "--reader", "instructions"],
        ["deep.json cannot be read as 'instructions': RecursionError", "another --reader"],
    ),
    "records of another form": (
        ["llama", "--data", "numbers.json", "--reader", "instructions"],
        ["numbers.json cannot be read as 'instructions': AttributeError", "another --reader"],
    ),
    "no hub": (
        ["them/theirs", "--data", "my-text.jsonl"],
        ["them/theirs is no file or folder here", "OfflineModeIsEnabled"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_one_line_before_any_work(here, monkeypatch, case):
    args, named = REFUSED[case]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (here / "taken").mkdir()
    (here / "taken/notes.txt").write_text("mine")
    usual = [
        word
        for name, value in {"--method": "lolcats", "--out": "out"}.items()
        if name not in args
        for word in (name, value)
    ]
    code, stderr = relinear(monkeypatch, "linearize", *args, *usual)
    assert code == 1 and stderr.splitlines()[-1].startswith("error: "), stderr[-2000:]
    assert all(part in stderr.splitlines()[-1] for part in named), stderr.splitlines()[-1]
    assert not (here / "out").exists() and not (here / "results").exists()


@pytest.mark.parametrize("place", ["out", "results"])
def test_a_folder_that_cannot_be_made_is_told_before_any_work(here, monkeypatch, place):
    given = {"out": "out", "results": "results"} | {place: "/proc/relinear"}  # where nobody makes a folder
    code, stderr = relinear(
        monkeypatch,
        *("linearize", "llama", "--data", "my-text.jsonl", "--method", "lolcats"),
        *("--out", given["out"], "--results", given["results"]),
    )
    assert code != 0 and "no folder can be made at /proc/relinear" in " ".join(stderr.split()), stderr
    assert not (here / "results").exists()


def test_what_is_no_fault_of_a_text_is_not_told_as_one():
    faults = [ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow"), ImportError("libarrow.so")]
    faults += [OSError(errno.EIO, "Input/output error", "text.parquet")]
    for fault in faults:
        with pytest.raises(type(fault)) as raised, reading("text.parquet", "rows"):
            raise fault
        assert raised.value is fault
    for fault in (OSError("no Parquet magic bytes"), KeyError("text")):
        with pytest.raises(UserError, match="cannot be read as 'rows': .* or another --reader"):
            with reading("text.parquet", "rows"):
                raise fault


def test_a_configuration_that_needs_a_library_is_one_line():
    with pytest.raises(UserError, match="makes no model: ImportError: no flash_attn"):
        with configuring(Path("llama")):
            raise ImportError("no flash_attn")


def test_weights_that_make_no_model_are_told_what_their_own_form_lacks(tmp_path):
    for file, form in (
        ("config.json", "config.json that belongs to finite weights"),
        ("a.gguf", "complete GGUF of finite"),
    ):
        folder = tmp_path / file.partition(".")[0]
        folder.mkdir()
        (folder / file).write_text("{}")
        with pytest.raises(
            UserError, match=rf"mine \(.*\) makes no model: RuntimeError: zzz; possible: a {form}"
        ):
            with working({"mine": folder}, opens=True):
                raise RuntimeError("zzz")


# entries of config.json that make no model, in transformers' or torch's own words
CONFIGURED = [
    ({"num_hidden_layers": "two"}, "expected int, got str (value: 'two')"),
    ({"max_position_embeddings": "x"}, "expected int, got str (value: 'x')"),
    ({"max_position_embeddings": 0}, "max_position_embeddings is 0; possible"),
    ({"rope_parameters": 5}, "Field 'rope_parameters' with value 5"),
    ({"head_dim": 7}, "even rotary dimension, but got `head_dim`=7"),
    ({"hidden_size": 10**12 + 1}, f"hidden size ({10**12 + 1}) is not a multiple"),
    ({"vocab_size": -1, "pad_token_id": 1}, "AssertionError: Padding_idx"),
    ({"num_attention_heads": 0}, "modulo by zero"),
    ({"hidden_act": "nope"}, "KeyError: 'nope'"),
]


@pytest.mark.parametrize(("entries", "said"), CONFIGURED, ids=[str([*one]) for one, _ in CONFIGURED])
def test_a_configuration_that_makes_no_model_is_one_line(here, monkeypatch, entries, said):
    file = shutil.copytree(here / "llama", here / "misfit") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    words = ["linearize", "misfit", "--data", "my-text.jsonl", "--method", "lolcats", "--out", "out"]
    commands = [words, ["generate", "misfit", "--prompt", "a"], ["export", "misfit", "out"]]
    # generate and export read no positions of a model with rotary embeddings
    for command in commands[:1] if entries == {"max_position_embeddings": 0} else commands:
        code, stderr = relinear(monkeypatch, *command)
        last = stderr.splitlines()[-1]
        assert code == 1 and last.startswith("error: ") and "misfit" in last, stderr[-2000:]
        assert command is not words or said in last, last
    assert not (here / "out").exists() and not (here / "results").exists()


def test_a_model_without_the_projections_of_a_recipe_is_refused(here, monkeypatch):
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = byte_tokenizer()
    GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2, n_positions=256)
    ).save_pretrained(here / "gpt2")
    tokenizer.save_pretrained(here / "gpt2")
    code, stderr = relinear(
        monkeypatch, "linearize", "gpt2", "--data", "my-text.jsonl", "--method", "lizard", "--out", "out"
    )
    said = "lizard: lora_targets: the model has no projection 'q_proj', which is of type 'gpt2'; possible: "
    assert code == 1 and f"{said}a recipe that trains all weights, such as supra" in stderr, stderr[-2000:]


# --- texts ---


def test_rows_are_read_from_json_lines_a_list_and_parquet(tmp_path):
    rows = [{"text": "One.", "n": 1}, {"text": "", "n": 2}, {"text": None, "n": 3}, {"text": "Two.", "n": 4}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for ending in ("jsonl", "json", "parquet"):
        assert list(documents("a", tmp_path / f"a.{ending}")) == [Document("One."), Document("Two.")], ending
    for ending in ("jsonl", "json"):  # as some programs of Windows save a file
        marked = tmp_path / f"marked.{ending}"
        marked.write_text((tmp_path / f"a.{ending}").read_text(), encoding="utf-8-sig")
        assert list(documents("marked", marked)) == [Document("One."), Document("Two.")], ending
    (tmp_path / "b.jsonl").write_text(json.dumps({"instruction": "Add.", "output": "2"}))
    [document] = documents("b", tmp_path / "b.jsonl")
    assert document.text == "2" and "### Instruction:\nAdd.\n\n### Response:\n" in document.prompt


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"text": 3}', "row 0: the column 'text' must hold text; got a int"),
        ("a.jsonl", '{"text": "a"}\n\n{"text": ', "a.jsonl cannot be read: line 3, column 10: Expecting"),
        ("a.jsonl", '["a"]', "row 0: got a list"),
        ("a.json", '{"text": "a"}', "must hold a list of rows; got a dict"),
        ("a.json", "[" * 4000, "a.json cannot be read: maximum recursion depth exceeded"),
        ("a.jsonl", "[" * 4000, "a.jsonl cannot be read: line 1: maximum recursion depth exceeded"),
        ("a.parquet", "no parquet", "a.parquet cannot be read"),
    ],
)
def test_a_broken_row_is_named(tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=re.escape(said)):
        list(documents("a", tmp_path / name))


def test_plain_text_is_cut_at_blank_lines(tmp_path):
    paragraphs = [f"{n} " + "word " * 150 for n in range(40)]
    (tmp_path / "a.txt").write_text("\n\n".join(paragraphs))
    found = [document.text for document in documents("a", tmp_path / "a.txt")]
    assert (
        len(found) == 14
        and min(map(len, found[:-1])) >= 2000
        and "\n\n".join(found) == "\n\n".join(paragraphs)
    )


def test_a_page_about_the_data_beside_them_is_no_other_kind(tmp_path):
    for name in ("train-0.jsonl", "train-1.parquet", "README.md", "LICENSE.md", "licence.md"):
        (tmp_path / name).touch()
    assert own.by_ending("data", [*tmp_path.iterdir()]) == "rows"
    assert own.by_ending("data", [tmp_path / "README.md"]) == "plain"
    (tmp_path / "notes.md").touch()
    with pytest.raises(UserError, match=r"ends in \.jsonl, \.md, \.parquet; possible: files of one kind"):
        own.by_ending("data", [*tmp_path.iterdir()])


# --- the hub ---


def test_of_the_hub_the_commit_and_the_files_that_are_read(monkeypatch):
    class Api:
        def repo_info(self, repo_id, repo_type, files_metadata, timeout):
            names = {
                "model": [
                    "config.json",
                    "model.safetensors",
                    "original/model.pth",
                    "tokenizer.json",
                    "pytorch_model.bin",
                    "README.md",
                ],
                "dataset": ["data/train-0.parquet", "data/test-0.parquet", "README.md", "x.json"],
            }[repo_type]
            files = [type("File", (), {"rfilename": name, "size": 7}) for name in names]
            return type("Info", (), {"sha": "c" * 40, "siblings": files, "card_data": {"license": "mit"}})

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    model, data = own.found("them/Theirs-1B", "model", {}), own.found("them/news", "dataset", {"news": None})
    assert (model.package, model.version, model.name) == ("them/Theirs-1B", "c" * 40, "Theirs-1B")
    assert (
        model.members == ("config.json", "model.safetensors", "tokenizer.json") and model.download_bytes == 21
    )
    assert data.members == ("data/train-0.parquet",) and data.name == "news_own"


# --- as entries ---


def test_the_entries_of_the_page_are_trained_on_by_the_suite_s_own_stages(mine, tmp_path, monkeypatch):
    [block] = blocks("yaml")
    workflow = Path(shutil.copytree(WORKFLOW, tmp_path / "clone/workflow"))
    for path, entries in re.findall(r"^# workflow/(\S+)\n((?:[^#\n].*\n)+)", block, re.MULTILINE):
        with (workflow / path).open("a") as file:
            file.write(
                "\n" + entries.replace("/models/my-model", str(mine / "llama")).replace("/data/", f"{mine}/")
            )
    with (workflow / "papers/comparison/runs.yaml").open("a") as file:
        file.write(
            "\nmine: {model: llama-3-8b, method: hedgehog, steps: [{distill: {data: my-text, loss: mse, lr:"
            " 1.0e-2}}]}\n"
        )
    plan = Plan(scale="smoke", results=tmp_path / "results", workflow=workflow, teacher="my-model")
    plan.check()
    name = plan.name("mine")
    assert name == "mine@my-model" and plan.scaled.text("my-text", "my-model").name == "my-text@my-model"
    monkeypatch.setattr(tracking, "Tracker", Mirror)
    made(plan, f"distill {name}")
    record = json.loads((plan.root / "text/my-text@my-model/run.json").read_text())
    assert record["datasets"] == [
        {"name": "my-text", "sha256": plan.catalogue["my-text"].sha256, "role": "input"}
    ]
    teacher = AutoModelForCausalLM.from_pretrained(plan.root / "models/my-model")
    assert teacher.dtype == torch.float32 and teacher.config.rope_parameters["rope_type"] == "llama3"


def weights_of(folder: Path, **changed: float) -> None:
    """Fill tensors of a model with one number each."""
    found = load_file(folder / "model.safetensors")
    new = {name: torch.full_like(found[name], value) for name, value in changed.items()}
    save_file(found | new, folder / "model.safetensors", {"format": "pt"})


def entry_of(folder: Path, **entries) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


# of a model of one's own as an entry of models.yaml
MISMADE = {
    "NaN": (
        lambda folder: weights_of(folder, **{"model.norm.weight": torch.nan}),
        r"theirs/model\.safetensors: model\.norm\.weight holds 64 numbers that are infinite or none",
    ),
    "infinite logits": (
        lambda folder: weights_of(folder, **{"model.norm.weight": 3e38}),
        r"my-model \(.*theirs\) makes no model: RuntimeError: the model's logits are not finite .*; possible",
    ),
    "a type": (
        lambda folder: entry_of(folder, num_hidden_layers="two"),
        "theirs.*expected int, got str",
    ),
    "an activation": (lambda folder: entry_of(folder, hidden_act="nope"), "theirs.*'nope'"),
    "an assertion": (lambda folder: entry_of(folder, vocab_size=-1, pad_token_id=1), "theirs.*"),
    "cut": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"1234567"),
        "theirs/model.safetensors is no whole safetensors file",
    ),
}
# of a text of one's own as an entry of data.yaml: a file's name, its content, its reader, what is said
MISREAD = [
    (
        "a.json",
        b"[1, 2]",
        "instructions",
        r"AttributeError: 'int' .* 'keys' \(in instructions\.py, line \d+\)",
    ),
    ("a.json", b"{", "instructions", r"JSONDecodeError: .*; possible: files of the form that their reader"),
    ("a.json", b"3", "instructions", "TypeError: 'int' object is not iterable"),
    (
        "a.jsonl",
        b'{"instruction": "a", "input": "", "output": 5}',
        "instructions",
        r"'int' .*\(in text\.py, l",
    ),
    ("a.jsonl", b"\xff", "instructions", "UnicodeDecodeError"),
    ("ca01", b"\xff", "brown", "UnicodeDecodeError"),
    ("a.rst.gz", b"no gzip", "linux_doc", "BadGzipFile"),
    ("a.rst.gz", gzip.compress(b"a" * 10**5, mtime=0)[:50], "linux_doc", "EOFError"),
    (
        "summaries_en-us.json",
        b"[]",
        "wikipedia_intros",
        "AttributeError: 'list' object has no attribute 'values'",
    ),
    (
        "summaries_en-us.json",
        b'{"a": {}}',
        "wikipedia_intros",
        r"KeyError: 'extract' \(in wikipedia_intros\.py",
    ),
    ("summaries_en-us.json", b'{"a": 5}', "wikipedia_intros", "TypeError: 'int' object is not subscriptable"),
]


def a_plan(tmp_path, monkeypatch, model: Path, text: Path, reader: str | None = None) -> Plan:
    """A plan whose catalogue has a model and a text of one's own."""
    monkeypatch.setattr(tracking, "Tracker", Mirror)
    workflow = Path(shutil.copytree(WORKFLOW, tmp_path / "clone/workflow"))
    more = {"reader": reader} if reader else {}
    for path, entries in {
        "assets.yaml": {
            "my-model": {"source": "path", "path": str(model)},
            "my-text": {"source": "path", "path": str(text)},
        },
        "models.yaml": {
            "my-model": {"family": "decoder", "assets": ["my-model"], "positions": 131072, "dtype": "float32"}
        },
        "data.yaml": {
            "my-text": {"make": "text", "sources": ["my-text"], "heldout_source": "my-text", **more}
        },
    }.items():
        with (workflow / path).open("a") as file:
            file.write("\n" + yaml.safe_dump(entries))
    return Plan(scale="smoke", results=tmp_path / "results", workflow=workflow, teacher="my-model")


@pytest.mark.parametrize("case", MISMADE)
def test_a_model_of_an_entry_that_makes_none_is_one_line(mine, tmp_path, monkeypatch, case):
    harm, said = MISMADE[case]
    harm(Path(shutil.copytree(mine / "llama", tmp_path / "theirs")))
    plan = a_plan(tmp_path, monkeypatch, tmp_path / "theirs", mine / "my-text.jsonl")
    with pytest.raises(UserError, match=said) as raised:
        made(plan, "model my-model")
    assert "\n" not in str(raised.value) and plan.finished(plan.node("model", "my-model")) is None


@pytest.mark.parametrize(
    ("name", "content", "reader", "said"), MISREAD, ids=[f"{m[2]}-{m[1][:9]}" for m in MISREAD]
)
def test_a_text_of_an_entry_that_cannot_be_read_is_one_line(
    mine, tmp_path, monkeypatch, name, content, reader, said
):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / name).write_bytes(content)
    plan = a_plan(tmp_path, monkeypatch, mine / "llama", tmp_path / "theirs", reader)
    with pytest.raises(UserError, match=rf"my-text \(.*theirs\) cannot be read: .*{said}") as raised:
        made(plan, "text my-text@my-model")
    assert "\n" not in str(raised.value)


def test_a_fault_of_a_reader_s_own_code_is_not_told_as_the_text_s(mine, tmp_path, monkeypatch):
    """Nor is one of a reader that was added: its traceback is what is needed then."""
    monkeypatch.setattr(rows, "json", rows)  # which has no `loads`
    plan = a_plan(tmp_path, monkeypatch, mine / "llama", mine / "my-text.jsonl")
    with pytest.raises(AttributeError, match="has no attribute 'loads'"):
        made(plan, "text my-text@my-model")
    with pytest.raises(AttributeError, match="has no attribute 'loads'"), reading("a text", "rows"):
        next(rows.read(mine / "my-text.jsonl"))


def test_what_fails_in_a_measurement_on_items_of_one_s_own_is_not_told_as_the_items(tmp_path):
    name = "my-items"
    plan = SimpleNamespace(catalogue={name: Own(name=name, source="path", path=tmp_path)})
    job = SimpleNamespace(assets={name: tmp_path})
    with pytest.raises(RuntimeError, match="^out of memory$"), _on_own_files(plan, Node("measure", "a"), job):
        raise RuntimeError("out of memory")
    with pytest.raises(UserError, match="my-items .* cannot be read: RuntimeError: no text; possible"):
        with _on_own_files(plan, Node("text", "a"), job):
            raise RuntimeError("no text")


def test_an_asset_of_this_machine_is_its_content(tmp_path, monkeypatch):
    monkeypatch.setenv("RELINEAR_CACHE", str(tmp_path / "cache"))
    (tmp_path / "clone/workflow").mkdir(parents=True)
    file = tmp_path / "clone/text.txt"
    file.write_text("a")
    written = tmp_path / "clone/workflow/assets.yaml"
    written.write_text(yaml.safe_dump({"a": {"source": "path", "path": "text.txt"}}))
    first = catalogue(written)["a"]
    assert isinstance(first, Own) and first.path == file
    identity = first.identity
    file.rename(tmp_path / "moved.txt")
    written.write_text(yaml.safe_dump({"a": {"source": "path", "path": str(tmp_path / "moved.txt")}}))
    moved = catalogue(written)["a"]
    assert moved.identity == identity
    (tmp_path / "moved.txt").write_text("b")
    assert catalogue(written)["a"].identity != moved.identity
    from relinear.get.assets import obtain

    with pytest.raises(AssetError, match="was changed meanwhile"):
        obtain("a", verify=True, assets={"a": moved})
    with pytest.raises(AssetError, match="no file or folder at"):
        obtain("a", verify=True, assets={"a": first.model_copy(update={"path": tmp_path / "gone"})})
