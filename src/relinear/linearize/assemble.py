"""Models out of the folders that stages leave: the pretrained model, then what each step of each run of a chain trained."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from relinear.errors import UserError
from relinear.files import MANIFEST
from relinear.linearize.loading import load_teacher
from relinear.linearize.model import Linearized, linearize, recipe_of


class Link(NamedTuple):
    """One run of a chain: its method with options, and the folders of its training steps that are finished, in order."""

    method: str  # "softmax": the model's own attention, as transformers has it
    options: dict[str, Any] = {}
    steps: tuple[Path, ...] = ()


def assemble(model: Path, links: Sequence[Link], dtype: torch.dtype = torch.float32, device: str = "cpu") -> PreTrainedModel:
    """The model that a chain of runs arrived at, from the pretrained folder `model` on.

    A link linearizes, unless its method is softmax or the model is linearized as it says already. Of each step's folder are loaded
    `model.safetensors` (everything), `method.safetensors` (what the method added) and `adapter/` (LoRA). The adapter of the very last step
    stays one, in the model's dtype; one that a step or a link follows is merged into the weights.

    Raises UserError for a link of another method than the model is linearized by, for a folder that holds nothing to load, and ValueError
    where a folder's tensors are not the model's.
    """
    built = load_teacher(model, dtype, device)
    for i, link in enumerate(links):
        built = _converted(built, link)
        for j, folder in enumerate(link.steps):
            built = _load_step(built, folder, followed=i + 1 < len(links) or j + 1 < len(link.steps))
    return built.to(device).eval()


def _converted(model: PreTrainedModel, link: Link) -> PreTrainedModel:
    """The model with a link's attention: linearized now, or as it is where it has that already."""
    if not isinstance(model, Linearized):
        return model if link.method == "softmax" else linearize(model, link.method, **link.options)
    has, wanted = model.config.relinear, recipe_of(model, link.method, **link.options)
    if has != wanted:
        raise UserError(f"the chain goes on with {_said(wanted)}, but its model is linearized by {_said(has)}; a model is linearized once, so "
                        "possible are the same method and options, or a chain that begins before it")  # fmt: skip
    return model


def _said(recipe: dict[str, Any]) -> str:
    given = {**recipe["options"], "keep_softmax_layers": recipe["keep_softmax_layers"]}
    return f"{recipe['method']} ({', '.join(f'{k}={v}' for k, v in given.items())})"


def _load_step(model: PreTrainedModel, folder: Path, followed: bool) -> PreTrainedModel:
    """The model with what a step's folder holds. An adapter that is followed by more is merged."""
    everything, method, adapter = (folder / name for name in ("model.safetensors", "method.safetensors", "adapter"))
    if not (everything.is_file() or method.is_file() or adapter.is_dir()):
        got = ", ".join(sorted(p.name for p in folder.glob("*"))) or "nothing"
        raise UserError(f"no step's result in {folder}: got {got}; possible are model.safetensors, method.safetensors and adapter/")
    if everything.is_file():
        _load_into(model, everything, {n for n, _ in model.named_parameters()})
    if method.is_file():
        if not isinstance(model, Linearized):
            raise UserError(f"{method} holds what a method added, but the model has softmax attention; possible: a link with that method")
        _load_into(model, method, set(model.method_parameters()))
    return _adapted(model, adapter, merge=followed) if adapter.is_dir() else model


def _adapted(model: PreTrainedModel, folder: Path, merge: bool) -> PreTrainedModel:
    """The model with a LoRA of peft's, beside the weights or merged into them; then every weight can be trained, as before."""
    from peft import PeftModel  # takes seconds to import, and most stages load no adapter

    if not merge:
        # In the model's dtype: peft's default computes float32 adapters beside bfloat16 weights, at three times the cost.
        return PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=False)
    # Adapters in float32: their product is added in float32, and the sum is rounded to the weights' dtype once.
    return PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=True).merge_and_unload().requires_grad_(True)


def _load_into(model: PreTrainedModel, path: Path, expected: set[str]) -> None:
    """Load named tensors; exactly the expected ones, else ValueError."""
    tensors = load_file(path)
    if set(tensors) != expected:
        raise ValueError(f"{path}: missing {sorted(expected - set(tensors))[:3]}, unexpected {sorted(set(tensors) - expected)[:3]}")
    model.load_state_dict(tensors, strict=False)


def save_method(model: PreTrainedModel, path: Path) -> None:
    """Write the parameters that the method added, as safetensors."""
    save_file({n: p.detach().cpu().contiguous() for n, p in model.method_parameters().items()}, path)


def teacher_of(run: Path) -> Path:
    """The folder of a run's teacher: beside its runs or, of committed results (`results/reference/<scale>`), made anew in `results/<scale>`.

    Raises UserError where none is, and where its weights are others than the run's.
    """
    scale = run.parents[1]
    own, made = scale / "teacher", scale.parents[1] / scale.name / "teacher"
    if not own.is_dir():
        raise UserError(f"the run {run} has lost its teacher: {own} is not there")
    if not (scale / MANIFEST).is_file():
        return own
    if not (made / "run.json").is_file():
        raise UserError(f"the teacher of {run} is not in {made}; `relinear teacher --scale {scale.name}` makes it")
    records = (json.loads((folder / "run.json").read_text()) for folder in (own, made))
    theirs, ours = ({name: x["sha256"] for name, x in r["artefacts"].items() if name.endswith(".safetensors")} for r in records)
    if theirs != ours:
        raise UserError(f"{made} is another teacher than that of {run}: by their run.json the weights differ")
    return made


def load_run(folder: Path | str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> PreTrainedModel:
    """The model of a run folder (`results/<scale>/runs/<run>`), as far as its stages are finished. Raises UserError for any other folder."""
    folder = Path(folder).resolve()
    finished = [s for s in ("distill", "finetune", "evaluate") if (folder / s / "run.json").is_file()]
    if not finished:
        raise UserError(f"{folder} is no run: it has no finished distill, finetune or evaluate stage; a run is results/<scale>/runs/<run>")
    teacher = teacher_of(folder)
    config = json.loads((folder / finished[0] / "run.json").read_text())["config"]
    steps = tuple(folder / s for s in ("distill", "finetune") if s in finished)
    return assemble(teacher, [Link(config["method"], config["options"], steps)], dtype, device)


def trained_parameters(stages: dict[str, Path]) -> int:
    """How many distinct parameters a run's stages trained, from what they saved."""
    counts: dict[str, int] = {}
    for folder in stages.values():
        for path in sorted(folder.rglob("*.safetensors")):
            with safe_open(path, "pt") as f:
                counts |= {n: math.prod(f.get_slice(n).get_shape()) for n in f.keys()}  # noqa: SIM118
    return sum(counts.values())
