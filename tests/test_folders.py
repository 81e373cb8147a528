"""Folders of others: their code is never run, whatever a terminal answers; nothing is fetched; a template or
a pattern cannot hold a process."""

import ast
import json
import os
import pty
import select
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, environment
from peft import LoraConfig, get_peft_model
from test_errors import relinear
from transformers import AutoModelForCausalLM

from relinear import folders, linearize
from relinear.errors import UserError
from relinear.families import _encoders, _opening
from relinear.get.model import save_model
from relinear.get.written import template
from relinear.linearize.loading import load_teacher
from relinear.share.tensors import load_folder
from relinear.weights import require_plain_adapter

CODE = """
from pathlib import Path

Path(__file__).with_name("RAN").touch()
Path({touched!r}).touch()
from transformers import LlamaConfig as Config, LlamaForCausalLM as Model, PreTrainedTokenizerFast as Tokenizer  # noqa: E402
"""  # noqa: E501
MAP = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoModel": "evil.Model"}
TOKENIZER_MAP = {
    "auto_map": {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]},
    "tokenizer_class": "Tokenizer",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_model("random", folder, "float32")
    return folder


def rewrite(path: Path, **entries) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def unknown(folder: Path) -> str:
    rewrite(folder / "config.json", model_type="evil", auto_map=MAP)
    return "config.json names code of its own"


def known(folder: Path) -> str:
    """transformers would take its own Llama, whatever this one computes."""
    rewrite(folder / "config.json", auto_map=MAP)
    return "config.json names code of its own"


def tokenizer(folder: Path) -> str:
    rewrite(folder / "tokenizer_config.json", **TOKENIZER_MAP)
    return "tokenizer_config.json names code of its own"


def kernel(folder: Path) -> str:
    rewrite(folder / "config.json", attn_implementation="somebody/kernel")
    return "'somebody/kernel' is code of the hub"


def decoding(folder: Path) -> None:
    """A generation of the folder's own, which is passed over: what is written is the model's."""
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate/generate.py").write_text(
        (folder / "evil.py").read_text() + "\ndef generate(*args, **more): ...\n"
    )


CASES = [unknown, known, tokenizer, kernel, decoding]


def evil(tiny: Path, place: Path, case) -> tuple[Path, str | None]:
    """A folder with code, and what is said of it."""
    folder = Path(shutil.copytree(tiny, place / "evil"))
    (folder / "evil.py").write_text(CODE.format(touched=str(place / "TOUCHED")))
    return folder, case(folder)


def ran(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if path.name in ("RAN", "TOUCHED")]


def on_a_terminal(*command: str, cwd: Path, home: Path) -> tuple[int, str]:
    """Exit code and all that a command shows on a terminal where somebody answers every question with yes."""
    ours, theirs = pty.openpty()
    env = environment() | {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'kernels'}",
        "HF_HOME": str(home),
        "TERM": "dumb",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=cwd,
        env=env,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown, until = b"", time.monotonic() + 600
    while time.monotonic() < until:
        over = process.poll() is not None  # before reading, lest what it printed at its end is missed
        if select.select([ours], [], [], 0.2)[0]:
            try:
                shown += os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                break
        elif over:
            break
        elif shown.rstrip().endswith(b"[y/N]"):
            os.write(ours, b"y\n")
    process.kill()
    os.close(ours)
    return process.wait(), shown.decode(errors="replace")


@pytest.mark.parametrize("case", [unknown, tokenizer])
def test_on_a_terminal_nothing_asks_and_nothing_runs(tiny, tmp_path, case):
    folder, said = evil(tiny, tmp_path, case)
    code, shown = on_a_terminal(
        "relinear.cli", "generate", str(folder), "--prompt", "x", cwd=tmp_path, home=tmp_path / "home"
    )
    assert code == 1 and "[y/N]" not in shown, shown
    assert said in " ".join(shown.split()) and "possible: a folder without it" in " ".join(shown.split())
    assert not ran(tmp_path)


def test_the_same_terminal_would_have_run_it(tiny, tmp_path):
    """transformers itself asks there, and a yes runs the file: the test above would see it."""
    folder, _ = evil(tiny, tmp_path, unknown)
    (tmp_path / "asks.py").write_text(
        f"from transformers import AutoConfig\nAutoConfig.from_pretrained({str(folder)!r})\n"
    )
    _, shown = on_a_terminal("asks", cwd=tmp_path, home=tmp_path / "home")
    assert "[y/N]" in shown and (tmp_path / "TOUCHED").is_file(), shown


@pytest.fixture
def yes(monkeypatch):
    """A user who answers every question with yes, and a network of which every use is an error."""
    asked = []
    monkeypatch.setattr("builtins.input", lambda *prompt: asked.append(prompt) or "y")

    def refused(*args, **more):
        asked.append(args)
        raise OSError("no network here")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    yield
    assert not asked


def linearized(folder: Path) -> None:
    linearize(load_teacher(folder, torch.float32), "hedgehog")


DOORS = {
    "a model's stage": lambda folder: save_model(
        folder, folder.with_name("out"), "float32", family="decoder"
    ),
    "any family": lambda folder: save_model(folder, folder.with_name("out"), "float32"),
    "a folder that generates": lambda folder: (
        load_folder(folder, torch.float32),
        folders.tokenizer_of(folder),
    ),
    "a teacher": lambda folder: (linearized(folder), folders.tokenizer_of(folder)),
    "an encoder": lambda folder: _encoders.opened([folder], torch.float32),
    "a decoder": lambda folder: _opening.opened([folder], torch.float32),
}


@pytest.mark.usefixtures("yes")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("door", DOORS)
def test_no_door_runs_code_asks_or_fetches(tiny, tmp_path, door, case):
    folder, said = evil(tiny, tmp_path, case)
    if said is None:
        DOORS[door](folder)
    else:
        with pytest.raises(UserError) as error:
            DOORS[door](folder)
        assert said in str(error.value) or "holds a model of type 'evil'" in str(error.value), error.value
    assert not ran(tmp_path)


def test_every_loading_of_a_folder_is_told_not_to_ask():
    """By the source: whoever adds a `from_pretrained` passes UNASKED, or says why not here."""
    # no hub, no code
    local = {
        ("linearize/assemble.py", "PeftModel"),
        ("share/tensors.py", "PeftConfig"),
        ("linearize/loading.py", "super()"),
    }
    found = set()
    for path in sorted((ROOT / "src/relinear").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "from_pretrained"
            ):
                continue
            if not any(k.arg is None and ast.unparse(k.value) == "UNASKED" for k in node.keywords):
                found.add((path.relative_to(ROOT / "src/relinear").as_posix(), ast.unparse(node.func.value)))
    assert found == local
    assert folders.UNASKED == {"trust_remote_code": False, "local_files_only": True}


# --- adapters ---


@pytest.fixture(scope="module")
def adapted(tiny, tmp_path_factory) -> Path:
    """A model's folder with an adapter beside the weights."""
    folder = Path(shutil.copytree(tiny, tmp_path_factory.mktemp("adapted") / "tiny"))
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny), config).save_pretrained(folder)
    rewrite(
        folder / "adapter_config.json",
        target_modules=["q_proj", "v_proj"],
        base_model_name_or_path="somebody/model",
    )
    return folder


SLOW = "(a+)+$" * 3
ENTRIES = [
    ({"lora_alpha": float("nan")}, "lora_alpha is 'nan'; possible: a number above 0, at most 65536"),
    ({"lora_alpha": 1e30}, "lora_alpha is '1e[+]30'"),
    ({"lora_alpha": "16"}, "lora_alpha is '16'"),
    ({"lora_alpha": -1}, "lora_alpha is '-1'"),
    ({"r": 0}, "r is '0'; possible: 1 to 65536"),
    ({"lora_dropout": float("inf")}, "lora_dropout is 'inf'"),
    ({"target_modules": SLOW}, "target_modules is .*; possible: a list of modules' names, no pattern"),
    ({"target_modules": ["q_proj", SLOW]}, "target_modules"),
    ({"target_modules": []}, "target_modules"),
    ({"rank_pattern": {SLOW: 8}}, "rank_pattern is .*; possible: {}"),
    ({"alpha_pattern": {SLOW: 8}}, "alpha_pattern"),
    ({"exclude_modules": SLOW}, "exclude_modules is .*; possible: None"),
    ({"layers_to_transform": [0], "layers_pattern": SLOW}, "layers_to_transform|layers_pattern"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"megatron_config": {"a": 1}}, "megatron_config is .*; possible: None"),
    ({"megatron_core": "evil"}, "megatron_core is 'evil'; possible: 'megatron.core'"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'; possible: True"),
    ({"from_a_later_peft": 3}, "from_a_later_peft is '3'; possible: None"),
    ({"peft_type": "PREFIX_TUNING"}, "is no LoRA's; got peft_type 'PREFIX_TUNING', possible: LORA"),
]  # fmt: skip


@pytest.mark.parametrize(("entries", "said"), ENTRIES)
def test_an_adapter_s_configuration_is_a_plain_lora_s(adapted, tmp_path, entries, said):
    folder = Path(shutil.copytree(adapted, tmp_path / "tiny"))
    rewrite(folder / "adapter_config.json", **entries)
    with pytest.raises(UserError, match=said):
        require_plain_adapter(folder)
    with pytest.raises(UserError, match=said):
        load_folder(folder, torch.float32)


def test_what_is_no_configuration_of_an_adapter_is_named(tmp_path):
    for content in ("", "[]", "[" * 100_000, "{}", "null"):
        (tmp_path / "adapter_config.json").write_text(content)
        with pytest.raises(UserError, match="adapter_config.json is no"):
            require_plain_adapter(tmp_path)


def test_transformers_own_loading_of_a_linearized_folder_looks_at_the_adapter_too(tiny, tmp_path):
    model = linearize(load_teacher(tiny, torch.float32), "t2r")
    model.save_pretrained(tmp_path)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path)
    rewrite(tmp_path / "adapter_config.json", lora_alpha=1e30)
    with pytest.raises(ValueError, match="lora_alpha is"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.usefixtures("yes")
def test_the_base_that_an_adapter_names_is_never_fetched(adapted, tmp_path):
    load_folder(adapted, torch.float32)
    alone = Path(shutil.copytree(adapted, tmp_path / "alone"))
    for name in ("config.json", "model.safetensors"):
        (alone / name).unlink()
    with pytest.raises(UserError, match="alone"):
        load_folder(alone, torch.float32)


# --- chat templates ---


def test_a_chat_template_that_fails_loops_or_grows_is_an_error(tiny, monkeypatch):
    monkeypatch.setattr(folders, "TEMPLATE_SECONDS", 0.5)
    monkeypatch.setattr(folders, "TEMPLATE_BYTES", 1 << 26)
    found = folders.tokenizer_of(tiny)
    cases = {
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": (
            "TimeoutError: it takes more than 0.5 s"
        ),
        "{% set n = namespace(s='x' * 999) %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}": (
            "MemoryError"
        ),
        "{{ 1 / 0 }}": "ZeroDivisionError",
        "{{ raise_exception('only on Sundays') }}": "only on Sundays",
        "{% if %}": "TemplateSyntaxError",
        "{{ messages.__class__.__mro__ }}": "SecurityError",
    }
    for given, said in cases.items():
        found.chat_template = given
        with pytest.raises(
            UserError, match=f"the chat template of .*tiny fails: .*{said}.*; possible: another template"
        ):
            folders.chat_of(found, "hello")
    found.chat_template = "{{ messages[0].content }} {{ messages[0].content }}"
    with pytest.raises(UserError, match="writes a user's words 2 times; possible: one that does so once"):
        template(found)
    found.chat_template = "U: {{ messages[0].content }} A:"
    assert folders.chat_of(found, "hello") == "U: hello A:"


def test_a_chat_template_that_fails_is_one_line_of_the_command(tiny, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(tiny, tmp_path / "tiny"))
    (folder / "chat_template.jinja").write_text("{{ 1 / 0 }}")
    code, stderr = relinear(monkeypatch, "generate", str(folder), "--prompt", "x", "--chat")
    assert code == 1 and "the chat template of" in stderr and stderr.count("\n") == 1, stderr
