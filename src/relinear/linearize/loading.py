"""Strict loading: transformers warns about a missing tensor and initialises it at random; a linearized model
is loaded whole or not at all."""

import json
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from relinear import families
from relinear.folders import config_of, load_whole
from relinear.weights import require_plain_adapter


def auto_class(folder: Path | str) -> type:
    """Which of transformers' Auto classes opens the model of a folder: encoders have no head that predicts a
    next token."""
    config = config_of(folder)
    encoders = (
        c.config_class
        for name in families.available()
        if not (f := families.load(name)).causal
        for c in f.classes
    )
    return AutoModel if isinstance(config, tuple(encoders)) else AutoModelForCausalLM


def load_teacher(folder: Path | str, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """The model of a folder that transformers loads: a teacher's, or a linearized one's. Raises UserError for
    a folder that is not whole."""
    cls = auto_class(folder)
    # MPNet has its own implementation alone
    attention = {"attn_implementation": "sdpa"} if cls is AutoModelForCausalLM else {}
    return load_whole(cls, folder, dtype, **attention).to(device).eval()


STUB = "needs_relinear"
SAVED = '''"""A linearized model, saved without its code: relinear has that, or a folder that `relinear export` writes."""

import importlib

try:
    found = importlib.import_module("relinear.linearize.model")
except ModuleNotFoundError as error:
    if error.name.partition(".")[0] not in ("relinear", "relinear_kernels"):
        raise
    raise ImportError(
        "this folder holds the weights of a linearized model and not its code. Possible: install relinear, from a clone of its repository; or, where "
        "relinear is installed, `relinear export FOLDER OUT` or relinear.export(model, OUT), which write a folder that transformers loads alone"
    ) from error
globals().update({kind.__name__: kind for pair in found.CLASSES.values() for kind in pair})
'''  # noqa: E501


class StrictLoading:
    """Mixed in front of a transformers model class. ValueError names what a folder lacks or has too much;
    safetensors only."""

    # Methods keep their parameters in float32 for any dtype of the model.
    _keep_in_fp32_modules_strict = ("method",)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path, *args, use_safetensors: bool | None = None, **kwargs
    ):
        """As transformers'; pickled weights (`.bin`) are refused."""
        if use_safetensors is False:
            raise ValueError("a linearized model is loaded from safetensors only; got use_safetensors=False")
        return super().from_pretrained(pretrained_model_name_or_path, *args, use_safetensors=True, **kwargs)

    def save_pretrained(self, save_directory, *args, is_main_process: bool = True, **kwargs):
        """As transformers'. A folder without the model's code says, where transformers alone opens it, how to
        get one that has it."""
        super().save_pretrained(save_directory, *args, is_main_process=is_main_process, **kwargs)
        path = Path(save_directory) / "config.json"
        if (
            is_main_process
            and path.is_file()
            and "auto_map" not in (config := json.loads(path.read_text(encoding="utf-8")))
        ):
            auto = "AutoModelForCausalLM" if self.causal else "AutoModel"
            own = {
                "AutoConfig": f"{STUB}.{type(self.config).__name__}",
                auto: f"{STUB}.{type(self).__name__}",
            }
            (path.parent / f"{STUB}.py").write_text(SAVED)
            path.write_text(
                json.dumps(config | {"auto_map": own}, indent=2, sort_keys=True) + "\n", encoding="utf-8"
            )

    def load_adapter(self, peft_model_id=None, *args, **kwargs):
        """As transformers'; the adapter must be whole and safetensors."""
        folder = None if peft_model_id is None else Path(peft_model_id)
        if folder is not None and folder.is_dir() and not (folder / "adapter_model.safetensors").is_file():
            raise ValueError(
                f"{folder} has no adapter_model.safetensors; an adapter is loaded from safetensors only"
            )
        if folder is not None and folder.is_dir():
            require_plain_adapter(folder)
        info = super().load_adapter(peft_model_id, *args, **kwargs)
        self._require_whole(info)
        return info

    def _adjust_missing_and_unexpected_keys(self, loading_info) -> None:
        # from_pretrained's last word on the tensors it found. What it returns is of no use: beside an
        # adapter, it is the adapter's only.
        super()._adjust_missing_and_unexpected_keys(loading_info)
        self._require_whole(loading_info)

    def _require_whole(self, info) -> None:
        shapes = {
            key: f"{key} {list(got)} instead of {list(wanted)}" for key, got, wanted in info.mismatched_keys
        }
        found = {
            "missing": info.missing_keys,
            "unexpected": info.unexpected_keys,
            "misshapen": shapes.values(),
        }
        if said := "; ".join(f"{what} tensors: {_some(names)}" for what, names in found.items() if names):
            info.mismatched_keys = set()  # otherwise transformers would raise an error that names no tensor
            raise ValueError(f"{self.config.name_or_path} is not a whole {type(self).__name__}: {said}")


def _some(names, shown: int = 5) -> str:
    names = sorted(names)
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
