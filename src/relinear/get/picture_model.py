"""A model of pictures that runs begin with, saved once as a plain transformers folder, in float32."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from relinear import families
from relinear.errors import UserError
from relinear.linearize.loading import load_teacher
from relinear.plan.job import Job


@torch.inference_mode()
def check_saved(model: PreTrainedModel, folder: Path) -> None:
    """Raise RuntimeError where the model of a folder has other weights than the one that was saved, or does
    not give its logits, finite ones, on a picture of noise."""
    again, kept_weights = load_teacher(folder, model.dtype), model.state_dict()
    if other := [
        name for name, tensor in again.state_dict().items() if not torch.equal(tensor, kept_weights[name])
    ]:
        raise RuntimeError(
            f"the model loaded from {folder} has other weights than were saved: {len(other)} tensors,"
            f" {other[0]} first"
        )
    picture = torch.randint(
        model.config.vocab_size, (1, model.config.pixels), generator=torch.Generator().manual_seed(0)
    )
    kept, loaded = (m(picture).logits for m in (model, again))
    if not torch.isfinite(kept).all():
        raise RuntimeError("the model's logits are not finite on a picture of noise")
    # where a tensor lies in memory decides how torch sums it
    if not torch.allclose(kept, loaded, rtol=1e-4, atol=1e-5):
        raise RuntimeError(
            f"the model loaded from {folder} gives other logits than were saved: off by"
            f" {(kept - loaded).abs().max().item():g}"
        )


def work(job: Job) -> dict:
    """Open or make the model by its family and save it. Returns its shape. Raises UserError where models.yaml
    says another."""
    entry = job.settings["model"]
    family = families.load(entry["family"])
    if entry["init"] == "random":
        model, tokenizer = family.random(entry["options"], job.seed, torch.float32)
    else:
        model, tokenizer = family.open([job.assets[name] for name in entry["assets"]], torch.float32)
    config, pixels = model.config, family.positions(model)
    for name, found in (("positions", pixels), ("causal", family.causal)):
        if found != entry[name]:
            raise UserError(f"models.yaml says {name}: {entry[name]}; this model has {found}")
    tokenizer.model_max_length = pixels
    model.save_pretrained(job.out)
    tokenizer.save_pretrained(job.out)
    check_saved(model, job.out)
    return {
        "parameters": model.num_parameters(),
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_attention_heads,
        "head_dim": config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "max_positions": pixels,
        "dtype": "float32",
        "causal": family.causal,
    }
