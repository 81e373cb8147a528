"""Models out of the folders that stages leave: the pretrained model, then what each step of each run of a
chain trained."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from relinear.errors import UserError
from relinear.linearize.loading import load_teacher
from relinear.linearize.model import Linearized, linearize, recipe_of
from relinear.plan.job import Link
from relinear.weights import require_plain_adapter, require_whole

# the metadata of all weights but the tables of embeddings, which their step left as they were
WITHOUT_EMBEDDINGS = {"without": "embeddings"}


def assemble(
    model: Path, links: Sequence[Link], dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> PreTrainedModel:
    """The model that a chain of runs arrived at, from the pretrained folder `model` on.

    A link linearizes, unless its method is softmax or the model is linearized as it says already. Of each
    step's folder are loaded `model.safetensors` (everything, or all but the embeddings), `method.safetensors`
    (what the method added) and `adapter/` (LoRA). The adapter of the very last step stays one, in the model's
    dtype; one that a step or a link follows is merged into the weights.

    Raises UserError for a link of another method than the model is linearized by, for a folder that holds
    nothing to load, and for a folder whose tensors are not the model's.
    """
    built = load_teacher(model, dtype, device)
    for i, link in enumerate(links):
        built = _converted(built, link)
        for j, folder in enumerate(link.steps):
            built = _load_step(built, folder, followed=i + 1 < len(links) or j + 1 < len(link.steps))
    return built.to(device).eval()


def to_train(model: Path, links: Sequence[Link], dtype: torch.dtype) -> PreTrainedModel:
    """The model that a training step begins with: as `assemble` makes it, the last adapter merged too, and
    every weight trainable."""
    return assemble(model, [*links, links[-1]._replace(steps=())], dtype)


def _converted(model: PreTrainedModel, link: Link) -> PreTrainedModel:
    """The model with a link's attention: linearized now, or as it is where it has that already."""
    if not isinstance(model, Linearized):
        return model if link.method == "softmax" else linearize(model, link.method, **link.options)
    has, wanted = model.config.relinear, recipe_of(model, link.method, **link.options)
    if has != wanted:
        raise UserError(
            f"the chain goes on with {_said(wanted)}, but its model is linearized by {_said(has)}; a model is"
            " linearized once, so possible are the same method and options, or a chain that begins before it"
        )
    return model


def _said(recipe: dict[str, Any]) -> str:
    given = {**recipe["options"], "keep_softmax_layers": recipe["keep_softmax_layers"]}
    return f"{recipe['method']} ({', '.join(f'{k}={v}' for k, v in given.items())})"


def _load_step(model: PreTrainedModel, folder: Path, followed: bool) -> PreTrainedModel:
    """The model with what a step's folder holds. An adapter that is followed by more is merged."""
    everything, method, adapter = (
        folder / name for name in ("model.safetensors", "method.safetensors", "adapter")
    )
    if not (everything.is_file() or method.is_file() or adapter.is_dir()):
        got = ", ".join(sorted(p.name for p in folder.glob("*"))) or "nothing"
        raise UserError(
            f"no step's result in {folder}: got {got}; possible are model.safetensors, method.safetensors and"
            " adapter/"
        )
    if everything.is_file():
        _load_into(model, everything, trained(model, everything))
    if method.is_file():
        if not isinstance(model, Linearized):
            raise UserError(
                f"{method} holds what a method added, but the model has softmax attention; possible: a link"
                " with that method"
            )
        _load_into(model, method, set(model.method_parameters()))
    return _adapted(model, adapter, merge=followed) if adapter.is_dir() else model


def _adapted(model: PreTrainedModel, folder: Path, merge: bool) -> PreTrainedModel:
    """The model with a LoRA of peft's, beside the weights or merged into them; then every weight can be
    trained, as before."""
    # takes seconds to import, and most stages load no adapter
    from peft import PeftModel, get_peft_model_state_dict

    require_plain_adapter(folder)
    # Beside the weights in the model's dtype: peft's default computes float32 adapters beside bfloat16
    # weights, at three times the cost. To be merged in float32: the product is added in float32, and the sum
    # is rounded to the weights' dtype once.
    try:
        adapted = PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=merge)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{folder} is no adapter of this model: {error}") from error
    # peft warns of a tensor that is missing, and passes over one that it does not know.
    own = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    require_whole(
        [folder / "adapter_model.safetensors"], {name: tuple(tensor.shape) for name, tensor in own.items()}
    )
    return adapted.merge_and_unload().requires_grad_(True) if merge else adapted


def _load_into(model: PreTrainedModel, path: Path, expected: set[str]) -> None:
    """Load named tensors; exactly the expected ones, in their shapes, else UserError."""
    require_whole([path], {name: tuple(model.get_parameter(name).shape) for name in expected})
    model.load_state_dict(load_file(path), strict=False)


def trained(model: PreTrainedModel, path: Path) -> set[str]:
    """The names of what a step's `model.safetensors` has to hold: every parameter, or all but the embeddings
    where its metadata says so."""
    names = {n for n, _ in model.named_parameters()}
    with safe_open(path, "pt") as file:
        return names - embeddings(model).keys() if file.metadata() == WITHOUT_EMBEDDINGS else names


def embeddings(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The model's tables of embeddings, by full name; a head that is tied to one goes by that one's."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {n: p for n, p in model.named_parameters() if id(p) in tables}


def save_method(model: PreTrainedModel, path: Path) -> None:
    """Write the parameters that the method added, as safetensors."""
    save_file({n: p.detach().cpu().contiguous() for n, p in model.method_parameters().items()}, path)


def trained_parameters(steps: Sequence[Path]) -> int:
    """The number of distinct parameters that the steps trained, by the files they saved."""
    counts: dict[str, int] = {}
    for folder in steps:
        for path in sorted(folder.rglob("*.safetensors")):
            with safe_open(path, "pt") as f:
                counts |= {n: math.prod(f.get_slice(n).get_shape()) for n in f.keys()}  # noqa: SIM118
    return sum(counts.values())
