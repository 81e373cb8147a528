"""Folders in transformers' layout, opened without running their code and without reaching for the network.

transformers asks on a terminal whether it shall run a folder's code, and runs it at a `y`. Where it knows a model of that name itself, it takes that
one without a word, whatever the folder's code would compute. Here a folder that needs code is refused.
"""

import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from relinear.errors import UserError

UNASKED = {"trust_remote_code": False, "local_files_only": True}  # what every loading of a folder is told
OURS = "relinear_"  # how the model_type of an exported folder begins: its code is not needed where relinear is
TEMPLATE_SECONDS, TEMPLATE_BYTES = 10, 1 << 30  # that a chat template may take
FAILURES = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    ImportError,
    RuntimeError,
    RecursionError,
)  # of transformers, on what is no model


def config_of(folder: Path | str, **more) -> PreTrainedConfig:
    """The configuration in a model's folder, or in a config.json itself. Raises UserError where there is none, or one that needs code."""
    file = Path(folder) if Path(folder).is_file() else Path(folder) / "config.json"
    told = _read(file)
    if not str(told.get("model_type")).startswith(OURS):
        _require_no_code(file, told)
    try:
        config = AutoConfig.from_pretrained(folder, **UNASKED, **more)
    except FAILURES as error:
        raise UserError(f"no configuration of a model in {folder}: {first_line(error)}") from error
    if "/" in str(getattr(config, "_attn_implementation", None)):  # transformers would fetch a kernel of that name, and run it
        raise UserError(f"{file}: attn_implementation {config._attn_implementation!r} is code of the hub, which is never run here; possible: "
                        "without that entry")  # fmt: skip
    return config


def tokenizer_of(folder: Path | str, **more) -> PreTrainedTokenizerBase:
    """The tokenizer in a model's folder. Raises UserError where there is none, or one that needs code."""
    file = Path(folder) / "tokenizer_config.json"
    _require_no_code(file, _read(file))
    try:
        return AutoTokenizer.from_pretrained(folder, **UNASKED, **more)
    except FAILURES as error:
        raise UserError(
            f"no tokenizer in {folder}: {first_line(error)}; save one beside the model: tokenizer.save_pretrained({str(folder)!r})"
        ) from error


def chat_of(tokenizer: PreTrainedTokenizerBase, content: str) -> str:
    """A user's turn in the tokenizer's chat template, and the beginning of the answer.

    Raises UserError where there is no template, and where it fails or takes more than `TEMPLATE_SECONDS` or, on Linux, `TEMPLATE_BYTES`: a template
    is a program of the folder, which transformers keeps from everything but time and memory.
    """
    if tokenizer.chat_template is None:
        raise UserError("this tokenizer has no chat template; possible: the prompt as it is, without --chat")
    try:
        with _bounded():
            return tokenizer.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False)
    except Exception as error:  # whatever the template does
        what = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"the chat template of {tokenizer.name_or_path} fails: {what}; possible: another template, or a prompt without it") from error


@contextmanager
def _bounded() -> Iterator[None]:
    """A context that ends with TimeoutError or MemoryError where it takes too much. Only a main thread can be stopped."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_) -> None:
        raise TimeoutError(f"it takes more than {TEMPLATE_SECONDS} s")

    with _memory_bounded():
        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, TEMPLATE_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


@contextmanager
def _memory_bounded() -> Iterator[None]:
    if sys.platform != "linux":
        yield
        return
    import resource  # not on every system

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + TEMPLATE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(most, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _read(file: Path) -> dict[str, Any]:
    """The entries of a JSON file; none where it is missing or no JSON, of which transformers tells."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _require_no_code(file: Path, told: dict[str, Any]) -> None:
    if told.get("auto_map"):
        raise UserError(
            f"{file} names code of its own (auto_map: {_short(told['auto_map'])}), which is never run here; possible: a folder without it, "
            "of a model that transformers or relinear knows. If transformers' own class of that model_type is meant, remove auto_map from the file"
        )


def first_line(error: BaseException) -> str:
    """The beginning of an error's text, which transformers writes over many lines."""
    return _short(next(iter(str(error).strip().splitlines()), type(error).__name__))


def _short(value: Any, longest: int = 200) -> str:
    text = str(value)
    return text if len(text) <= longest else f"{text[:longest]} ..."
