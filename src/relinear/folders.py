"""Folders in transformers' layout, opened whole or not at all, without running their code and without
reaching for the network.

transformers asks on a terminal whether it shall run a folder's code, and runs it at a `y`. Where it knows a
model of that name itself, it takes that one without a word, whatever the folder's code would compute. Here a
folder that needs code is refused.

transformers warns of a missing tensor and draws it at random. Here the folder is refused. What it may lack,
or have beside its model's tensors, is named: a head that is tied to the embeddings, buffers that a model
computes itself, and what a caller says.
"""

import json
import math
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from relinear.errors import UserError
from relinear.weights import files_of, header, require_none

UNASKED = {"trust_remote_code": False, "local_files_only": True}  # what every loading of a folder is told
# how the model_type of an exported folder begins: its code is not needed where relinear is
OURS = "relinear_"
TEMPLATE_SECONDS, TEMPLATE_BYTES = 10, 1 << 30  # that a chat template may take
# What transformers raises on a folder that is no model.
FAILURES = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    ImportError,
    RuntimeError,
    ArithmeticError,
    SafetensorError,
)

# Buffers that earlier versions of transformers saved. Models compute them, so no number of these is read.
BUFFERS = re.compile(
    r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq|((bert|mpnet|roberta_prelayernorm)\.)?embeddings\.position_ids"
    r"|(transformer\.)?h\.\d+\.attn\.(masked_)?bias"
)
# transformers says nothing of any tensor with such a part in its name
OVERLOOKED = re.compile(r"rotary_emb\.inv_freq|position_ids|attn\.bias")
# a model of more numbers than so many times those in its files, and so many more, is not built
AMPLE, SLACK = 8, 10**8


def config_of(folder: Path | str, **more) -> PreTrainedConfig:
    """The configuration in a model's folder, or in a config.json itself. Raises UserError where there is
    none, or one that needs code."""
    file = Path(folder) if Path(folder).is_file() else Path(folder) / "config.json"
    told = _read(file)
    if not str(told.get("model_type")).startswith(OURS):
        _require_no_code(file, told)
    try:
        config = AutoConfig.from_pretrained(folder, **UNASKED, **more)
    except FAILURES as error:
        raise UserError(
            f"no configuration of a model in {Path(folder) / more.get('gguf_file', '')}: {first_line(error)}"
        ) from error
    # transformers would fetch a kernel of that name, and run it
    if "/" in str(getattr(config, "_attn_implementation", None)):
        raise UserError(
            f"{file}: attn_implementation {config._attn_implementation!r} is code of the hub, which is never"
            " run here; possible: without that entry"
        )
    return config


def tokenizer_of(folder: Path | str, **more) -> PreTrainedTokenizerBase:
    """The tokenizer in a model's folder. Raises UserError where there is none, or one that needs code."""
    file = Path(folder) / "tokenizer_config.json"
    _require_no_code(file, _read(file))
    try:
        return AutoTokenizer.from_pretrained(folder, **UNASKED, **more)
    except FAILURES as error:
        raise UserError(
            f"no tokenizer in {folder}: {first_line(error)}; save one beside the model:"
            f" tokenizer.save_pretrained({str(folder)!r})"
        ) from error


def load_whole(
    cls: Any,
    folder: Path | str,
    dtype: torch.dtype,
    *,
    absent: Collection[str] = (),
    beside: Collection[str] = (),
    **how,
) -> PreTrainedModel:
    """The model of a folder, by one of transformers' classes. `absent` are tensors that it may lack, `beside`
    tensors that it may have too many.

    Raises UserError where any other is missing, unexpected or misshapen, and where there is no model to load
    from safetensors.
    """
    folder = Path(folder)
    names = [name for file in files_of(folder) for name in header(file)]
    with failing(folder), silent():
        model, found = cls.from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **how,
            **UNASKED,
        )
    own = model.state_dict().keys()
    known = {*own, *(name.removeprefix(f"{model.base_model_prefix}.") for name in own)}
    overlooked = [name for name in names if OVERLOOKED.search(name) and name not in known]
    require_found(
        folder, {**found, "unexpected_keys": {*found["unexpected_keys"], *overlooked}}, absent, beside
    )
    return model


def require_found(
    where: Path, found: Mapping[str, Any], absent: Collection[str] = (), beside: Collection[str] = ()
) -> None:
    """Raise UserError where transformers' account of a loading (`output_loading_info`) names tensors that are
    missing, unexpected or misshapen."""
    shapes = {
        str(name[0]): f"{name[0]} {list(name[1])} instead of {list(name[2])}"
        for name in found["mismatched_keys"]
    }
    require_none(
        where,
        {
            "missing": {str(name) for name in found["missing_keys"]} - {*absent} - shapes.keys(),
            "unexpected": {
                name
                for name in map(str, found["unexpected_keys"])
                if name not in beside and not BUFFERS.fullmatch(name)
            },
            "misshapen": set(shapes.values()),
        },
    )


def require_sized(folder: Path, build: Callable[[PreTrainedConfig], PreTrainedModel]) -> PreTrainedConfig:
    """The configuration of a folder whose files have about as many tensors and numbers as the model that
    `build` makes of it.

    Raises UserError for others, before memory is taken for them: a configuration can claim any number of
    layers.
    """
    config, tensors = (
        config_of(folder),
        [tensor for file in files_of(folder) for tensor in header(file).values()],
    )
    layers, held = (
        getattr(config.get_text_config(), "num_hidden_layers", 0),
        sum(math.prod(tensor.shape) for tensor in tensors),
    )
    if not isinstance(layers, int) or layers > len(tensors):
        raise UserError(
            f"{folder / 'config.json'}: num_hidden_layers is {layers}, and the files of weights have"
            f" {len(tensors)} tensors"
        )
    with failing(folder), torch.device("meta"):
        needed = build(config).num_parameters()
    if needed > AMPLE * held + SLACK:
        raise UserError(
            f"{folder / 'config.json'} makes a model of {needed:,} numbers, and the files of weights have"
            f" {held:,}"
        )
    return config


@contextmanager
def failing(where: Path | str) -> Iterator[None]:
    """A context in which what transformers raises on a folder or file that is no model is a UserError."""
    try:
        yield
    except UserError:
        raise
    except FAILURES as error:
        raise UserError(
            f"no model to load from {where}: {first_line(error)}; possible:"
            f" {'a GGUF' if str(where).endswith('.gguf') else 'a folder with config.json and safetensors'} of"
            " a model that transformers reads"
        ) from error


@contextmanager
def silent() -> Iterator[None]:
    """A context without transformers' printed report of missing tensors: these are an error here."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def chat_of(tokenizer: PreTrainedTokenizerBase, content: str) -> str:
    """A user's turn in the tokenizer's chat template, and the beginning of the answer.

    Raises UserError where there is no template, and where it fails or takes more than `TEMPLATE_SECONDS` or,
    on Linux, `TEMPLATE_BYTES`: a template is a program of the folder, which transformers keeps from
    everything but time and memory.
    """
    if tokenizer.chat_template is None:
        raise UserError("this tokenizer has no chat template; possible: the prompt as it is, without --chat")
    try:
        with _bounded():
            return tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
            )
    except Exception as error:  # whatever the template does
        what = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(
            f"the chat template of {tokenizer.name_or_path} fails: {what}; possible: another template, or a"
            " prompt without it"
        ) from error


@contextmanager
def _bounded() -> Iterator[None]:
    """A context that ends with TimeoutError or MemoryError where it takes too much. Only a main thread can be
    stopped."""
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
    resource.setrlimit(
        resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(most, soft), hard)
    )
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
            f"{file} names code of its own (auto_map: {_short(told['auto_map'])}), which is never run here;"
            " possible: a folder without it, of a model that transformers or relinear knows. If"
            " transformers' own class of that model_type is meant, remove auto_map from the file"
        )


def first_line(error: BaseException) -> str:
    """The beginning of an error's text, which transformers writes over many lines."""
    return _short(next(iter(str(error).strip().splitlines()), type(error).__name__))


def _short(value: Any, longest: int = 500) -> str:
    text = str(value)
    return text if len(text) <= longest else f"{text[:longest]} ..."
