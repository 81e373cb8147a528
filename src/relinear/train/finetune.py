"""Stage 2: the linearized model learns to be a language model again, by LoRA on its projections or by training everything (SUPRA)."""

from collections.abc import Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from relinear.get.text import IGNORED, Packed, chance_loss, micro_batches
from relinear.linearize.assemble import Link, assemble, save_method
from relinear.linearize.faster import fuse_norms, maskless
from relinear.machine.distributed import rank, size, spread, whole
from relinear.machine.hardware import memory_bytes, place
from relinear.train.loop import train
from relinear_kernels import token_cross_entropy

if TYPE_CHECKING:
    from relinear.stage import Context


def run(context: "Context") -> dict:
    """Write `adapter/` (LoRA), `method.safetensors` (the method's parameters, if trained here) or `model.safetensors` (everything)."""
    device, dtype = place(context)
    settings = context.settings
    recipe = settings["finetune"]
    torch.manual_seed(context.seed)
    distilled = (context.parents["distill"],) if "distill" in context.parents else ()
    base = assemble(context.parents["teacher"], [Link(settings["method"], settings["options"], distilled)], weights_dtype(recipe, dtype))
    model, metrics = fit(context, base, device, dtype)
    full = recipe["kind"] == "full"
    weights = _collected(base, context.leads) if full else {}
    if context.leads and full:
        save_file(weights, context.out / "model.safetensors")
    elif context.leads:
        model.save_pretrained(context.out / "adapter")
        if recipe["train_method"]:
            save_method(base, context.out / "method.safetensors")
    return metrics


def weights_dtype(recipe: dict[str, Any], dtype: torch.dtype) -> torch.dtype:
    """Full finetuning keeps float32 weights and computes in `dtype` by autocast; frozen weights need no such care."""
    return torch.float32 if recipe["kind"] == "full" else dtype


def fit(context: "Context", base: PreTrainedModel, device: str, dtype: torch.dtype) -> tuple[torch.nn.Module, dict]:
    """Train a model, in place, on the device that it is moved to. Returns it, with its adapters if it has some, and the stage's metrics."""
    recipe, budget = context.settings["finetune"], context.settings["budget"]
    full = recipe["kind"] == "full"
    lr = max(recipe["lr"], budget["lr_floor"])
    model, adapters, added = base, [], []
    if not full:
        added = list(model.method_parameters().values()) if recipe["train_method"] else []
        adapter = LoraConfig(r=recipe["lora_rank"], lora_alpha=recipe["lora_alpha"], lora_dropout=0.0, bias="none",
                             task_type="CAUSAL_LM", target_modules=list(recipe["lora_targets"]))  # fmt: skip
        model = compute_in_input_dtype(get_peft_model(model, adapter))
        adapters = [p for p in model.parameters() if p.requires_grad]
        for p in added:
            p.requires_grad_(True)
    if device == "cuda":
        fuse_norms(model)
    context.hardware["engine"] = spread(model, None if full else adapters + added, device, context.plan.config.hardware.engine)
    # A mask, even none at all, has transformers look at positions in main memory, which cannot be recorded.
    recorded = device == "cuda" and context.hardware["engine"] == "ddp" and maskless(base)
    groups = [(list(model.parameters()) if full else adapters, lr)]
    if added:
        groups.append((added, max(recipe["method_lr"] or lr, lr)))
    model.train()
    corpus = Packed(context.parents["corpus"], "train", budget["seq_len"])
    batch, accumulate = budget["batch_size"], budget["accumulate"]
    steps = max(budget["epochs"] * len(corpus) // (batch * accumulate), 1)

    def batches(step: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for chosen, micro in micro_batches(
            step, n=len(corpus), batch_size=batch, accumulate=accumulate, seed=context.seed, rank=rank(), size=size()
        ):  # fmt: skip
            tokens, labels = (torch.stack(x).to(device) for x in zip(*(corpus.sequence(i) for i in chosen), strict=True))
            # The mean over the micro-batch, of which other processes may have a part: labels are not spread evenly over sequences.
            labelled = sum(int((corpus.sequence(i)[1][1:] != IGNORED).sum()) for i in micro)
            yield tokens, labels, torch.tensor(float(labelled), device=device)

    def loss(tokens: Tensor, labels: Tensor, labelled: Tensor) -> Iterator[tuple[str, Tensor]]:
        with torch.autocast(device, dtype, enabled=full and dtype != torch.float32):
            logits = model(tokens, use_cache=False).logits
        # Labels are moved and not logits cut: a copy of the largest tensor there is.
        following = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        total = token_cross_entropy(logits.flatten(0, 1), following.flatten()).sum()
        yield "lm", total / labelled / accumulate

    tokens_per_step = batch * accumulate * corpus.seq_len
    train(
        loss, groups, batches=batches, steps=steps, tokens_per_step=tokens_per_step, recipe=recipe,
        checkpoint=context.work / "checkpoint.pt", checkpoint_seconds=context.plan.config.hardware.checkpoint_seconds,
        log=context.log, resumed=context.resume_history, memory=lambda: memory_bytes(device), name=str(context.step),
        chance=chance_loss(context.parents["corpus"], base.config.vocab_size),
        recorded=recorded,
    )  # fmt: skip
    context.tokens = steps * tokens_per_step
    trained = sum(p.numel() for ps, _ in groups for p in ps)
    return model, {**context.losses(), "steps": steps, "tokens": context.tokens, "trainable_params": trained}


def compute_in_input_dtype(model: PeftModel) -> PeftModel:
    """Adapters with float32 weights, whose small steps bfloat16 would round away, and arithmetic in the dtype of the layer's input.

    peft casts the input to the weights' dtype instead, for every projection: a copy twice as wide, and slower products, for a rank of 8.
    """
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.cast_input_dtype_enabled = False
            for part in (*layer.lora_A.values(), *layer.lora_B.values()):
                part.forward = MethodType(_linear, part)  # a method: a copy of the model has its own
    return model


def _linear(layer: torch.nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight.to(x.dtype))


def _collected(model: torch.nn.Module, leads: bool) -> dict[str, Tensor]:
    """All parameters in main memory, for the process that writes them: whole on a GPU one at a time."""
    weights = {}
    for name, p in model.named_parameters():
        value = whole(p.detach())  # a call of all processes
        if leads:
            weights[name] = value.cpu().contiguous()
    return weights
