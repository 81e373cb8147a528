"""Whether files of weights hold what a model needs, tensor by tensor, before any of it is loaded: the model
is built without memory for it.

transformers fills what is missing at random, and peft ignores what it does not know; both only warn.
"""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import PeftConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from relinear.errors import UserError
from relinear.files import sha256
from relinear.folders import config_of, load_whole, require_sized
from relinear.linearize.assemble import trained
from relinear.linearize.loading import auto_class
from relinear.linearize.model import Linearized, linearize
from relinear.opening import UNFIT, in_words
from relinear.plan.job import Link
from relinear.weights import (
    ADAPTER_CONFIG,
    files_of,
    header,
    require_finite,
    require_plain_adapter,
    require_whole,
)

# names the files that `relinear.share.export` wrote and their sources; a folder without it is never replaced
EXPORTED = "relinear.json"


def require_loadable(model: Path, links: Sequence[Link]) -> None:
    """Raise UserError unless the folders of a model and of the steps behind it hold exactly the tensors that
    are loaded, in their shapes, all finite. The message names the file and the tensor."""
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")  # loading warns of tensors that are compared here
        built = _empty(model)
        _require(files_of(model), *_names(built))
        for link in links:
            if link.method != "softmax" and not isinstance(built, Linearized):
                built = linearize(built, link.method, **link.options)
            for step in link.steps:
                built = _stepped(built, step)


def load_folder(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a folder that transformers loads: exported, saved or anyone's. Raises UserError where it
    is not whole, finite safetensors."""
    adapter = folder / "adapter_model.safetensors"
    try:
        require_sized(folder, AutoModelForCausalLM.from_config)
        for path in (*files_of(folder), *([adapter] if adapter.is_file() else [])):
            require_finite(path)
        if (folder / "adapter_config.json").is_file():
            # transformers' report is of the adapter alone then, so the base is compared here.
            with torch.device("meta"):
                built = _empty(folder)
                require_whole(files_of(folder), *_names(built))
                _require_adapter(built, folder)
        model = load_whole(AutoModelForCausalLM, folder, dtype)
    except UserError:
        raise
    except UNFIT as error:
        raise UserError(
            f"no model to load from {folder}: {in_words(error)}; possible: a folder with config.json and"
            " safetensors, or a run"
        ) from error
    _require_as_exported(folder)
    return model


def _is(path: Path, digest: str) -> bool:
    return path.is_file() and sha256(path) == digest


def _require_as_exported(folder: Path) -> None:
    """Raise UserError where a file that an exported folder's model is made of is not the one that was
    written."""
    if not (folder / EXPORTED).is_file():
        return
    try:
        files = json.loads((folder / EXPORTED).read_bytes())["files"].items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / EXPORTED} does not say what `relinear export` wrote: {error!r}") from None
    for name, written in files:
        if (name in ("config.json", ADAPTER_CONFIG) or name.endswith(".safetensors")) and not _is(
            folder / name, written
        ):
            raise UserError(
                f"{folder / name} is not the file that `relinear export` wrote, by {EXPORTED}; possible: the"
                f" folder exported again, or, where the change is yours, the folder without {EXPORTED}"
            )


def _empty(folder: Path) -> PreTrainedModel:
    """The model of a folder's config, on no device."""
    return auto_class(folder).from_config(config_of(folder))


def _names(model: nn.Module) -> tuple[dict[str, tuple[int, ...]], list[list[str]]]:
    """The shape of each tensor that a model saves, and the names of those that are tied."""
    tensors = model.state_dict(keep_vars=True)
    tied: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        tied.setdefault(id(tensor), []).append(name)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}, [
        names for names in tied.values() if len(names) > 1
    ]


def _require(
    files: Sequence[Path], expected: dict[str, tuple[int, ...]], tied: Sequence[list[str]] = ()
) -> None:
    require_whole(files, expected, tied)
    for path in files:
        require_finite(path)


def _stepped(model: PreTrainedModel, step: Path) -> PreTrainedModel:
    """The model behind a step, whose files are checked."""
    everything, method, adapter = (
        step / name for name in ("model.safetensors", "method.safetensors", "adapter")
    )
    if everything.is_file():
        header(everything)  # raises where the file is none, before its metadata are read
        names = trained(model, everything)
        _require(
            [everything], {name: tuple(p.shape) for name, p in model.named_parameters() if name in names}
        )
    if method.is_file():
        own = model.method_parameters() if isinstance(model, Linearized) else {}
        _require([method], {name: tuple(p.shape) for name, p in own.items()})
    return _require_adapter(model, adapter) if adapter.is_dir() else model


def _require_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model, once the adapter in a folder was compared with the one that its config makes of it."""
    require_plain_adapter(folder)
    try:
        adapted = get_peft_model(model, PeftConfig.from_pretrained(str(folder)))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{folder / 'adapter_config.json'} makes no adapter of this model: {error}") from None
    expected = {
        name: tuple(tensor.shape)
        for name, tensor in get_peft_model_state_dict(adapted, save_embedding_layers=False).items()
    }
    _require([folder / "adapter_model.safetensors"], expected)
    return adapted.unload()
