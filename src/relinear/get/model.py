"""A model that runs begin with, from any form, saved once as a plain transformers folder (safetensors,
tokenizer)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from relinear import families
from relinear.errors import UserError
from relinear.families._opening import opened
from relinear.linearize.loading import load_teacher
from relinear.plan.job import DTYPES, Job

PROBE_TOKENS = 8


def save_model(
    source: Path | Sequence[Path] | Literal["random"], out: Path, dtype: str = "bfloat16", *,
    family: str | None = None, options: Mapping[str, Any] | None = None, seed: int = 0,
) -> dict:  # fmt: skip
    """Save the model at `source` into the folder `out`; return its shape (layers, heads, vocabulary, ...).

    `source` is what the model's family opens: a folder in the hub's layout (`config.json`, safetensors), one
    that holds a `*.gguf`, or the folders of a GGUF's parts, in order. `"random"` makes one from scratch, by
    the family's `options` and `seed`. `family` None is any that covers what the folders hold; for `"random"`,
    tiny. `out` loads with `AutoModelForCausalLM.from_pretrained(out)`, an encoder with `AutoModel`, and
    `AutoTokenizer.from_pretrained(out)`. Choose a dtype by `dtype=` there: `model.to(dtype)` would round the
    rotary frequencies too.

    Raises `ValueError` for an unknown source, family, option or dtype, and `RuntimeError` if the folder,
    loaded back, does not give finite logits equal to those of the model that was saved.
    """
    if dtype not in DTYPES:
        raise ValueError(f"no dtype {dtype!r} for a model; have {', '.join(DTYPES)}")
    torch_dtype = getattr(torch, dtype)
    if source == "random":
        model, tokenizer = families.load(family or "tiny").random(options or {}, seed, torch_dtype)
    else:
        folders = [source] if isinstance(source, Path) else list(source)
        model, tokenizer = (
            families.load(family).open(folders, torch_dtype) if family else opened(folders, torch_dtype)
        )
    covered = families.of(type(model))
    tokenizer.model_max_length = covered.positions(model)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    _check_saved(model, out, torch_dtype)
    config = model.config
    return {
        "parameters": model.num_parameters(),
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "max_positions": covered.positions(model),
        "dtype": dtype,
        "causal": covered.causal,
    }


@torch.inference_mode()
def _check_saved(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    # [1, T], whole vocabulary
    probe = torch.arange(PROBE_TOKENS)[None] * (model.config.vocab_size // PROBE_TOKENS)
    kept = model(input_ids=probe)[0]  # logits, or an encoder's hidden states
    loaded = load_teacher(folder, dtype)(input_ids=probe)[0]
    if not torch.isfinite(kept).all():
        raise RuntimeError(f"the model's logits are not finite on {PROBE_TOKENS} tokens")
    if not torch.equal(kept, loaded):
        worst = (kept.float() - loaded.float()).abs().max().item()
        raise RuntimeError(
            f"the model loaded from {folder} gives other logits than were saved: off by {worst:g}"
        )


def work(job: Job) -> dict:
    """Open or make the model by its family and save it once as a plain transformers folder."""
    entry = job.settings["model"]
    source = "random" if entry["init"] == "random" else [job.assets[name] for name in entry["assets"]]
    shape = save_model(
        source,
        job.out,
        entry.get("dtype", "bfloat16"),
        family=entry["family"],
        options=entry["options"],
        seed=job.seed,
    )
    for said, found in (("positions", "max_positions"), ("causal", "causal")):
        if shape[found] != entry[said]:
            raise UserError(f"models.yaml says {said}: {entry[said]}; this model has {shape[found]}")
    return shape
