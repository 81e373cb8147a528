"""Stage 2: the linearized model learns to be a language model again, by LoRA on its projections or by
training everything (SUPRA)."""

from collections.abc import Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from relinear.errors import UserError
from relinear.get.packed import Packed, chance_loss
from relinear.linearize.assemble import WITHOUT_EMBEDDINGS, embeddings, save_method, to_train
from relinear.linearize.faster import fuse_norms, maskless
from relinear.linearize.loading import load_teacher
from relinear.linearize.model import Linearized
from relinear.machine.distributed import spread
from relinear.machine.hardware import place
from relinear.plan.job import Job
from relinear.train.compiled import compile_blocks, recompute, wanted, windowed
from relinear.train.loop import of_job, train
from relinear.train.next_token import batches_of, collected, mixed_loss, summed_loss
from relinear.train.room import Fits


def work(job: Job) -> dict:
    """Write `adapter/` (LoRA), `method.safetensors` (the method's parameters, if trained here) or
    `model.safetensors` (all that full trained)."""
    device, dtype = place(job)
    recipe = job.settings["recipe"]
    torch.manual_seed(job.seed)
    base = to_train(job.parents["model"], job.links, weights_dtype(recipe, dtype))
    if recipe["kind"] == "method" and not (isinstance(base, Linearized) and base.method_parameters()):
        raise UserError(
            f"{job.name}: kind: method trains what the method added, and {job.settings['method']} added no"
            " parameters; use lora or full"
        )
    model, metrics = fit(job, base, device, dtype)
    full = recipe["kind"] == "full"
    weights = collected(base, job.leads) if full else {}
    if job.leads:
        if full:
            frozen = {name for name, p in base.named_parameters() if not p.requires_grad}
            weights = {name: value for name, value in weights.items() if name not in frozen}
            save_file(weights, job.out / "model.safetensors", metadata=WITHOUT_EMBEDDINGS if frozen else None)
        if recipe["kind"] == "lora":
            # peft's set has another order in each process
            model.peft_config["default"].target_modules = sorted(recipe["lora_targets"])
            # False: else peft reads the teacher's configuration as one of ours, and transformers warns of it
            model.save_pretrained(job.out / "adapter", save_embedding_layers=False)
        if recipe["kind"] == "method" or recipe["train_method"]:
            save_method(base, job.out / "method.safetensors")
    return metrics


def weights_dtype(recipe: Mapping[str, Any], dtype: torch.dtype) -> torch.dtype:
    """The dtype of the weights: float32 in full finetuning, which computes in `dtype` by autocast; `dtype`
    where they are frozen."""
    return torch.float32 if recipe["kind"] == "full" else dtype


def trained_groups(
    job: Job, base: PreTrainedModel
) -> tuple[nn.Module, list[tuple[list[nn.Parameter], float]]]:
    """The model to train, with its adapters if it gets some, and the parameters to train with their learning
    rates; all others frozen."""
    recipe = job.settings["recipe"]
    lr = recipe["lr"]
    if recipe["kind"] == "full":
        for p in [] if recipe["train_embeddings"] else embeddings(base).values():
            p.requires_grad_(False)
        return base, [([p for p in base.parameters() if p.requires_grad], lr)]
    model, groups = base, []
    added = (
        list(base.method_parameters().values())
        if recipe["kind"] == "method" or recipe["train_method"]
        else []
    )
    if recipe["kind"] == "lora":
        require_targets(job.name, base, recipe["lora_targets"])
        adapter = LoraConfig(
            r=recipe["lora_rank"],
            lora_alpha=recipe["lora_alpha"],
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
            target_modules=list(recipe["lora_targets"]),
        )
        model = compute_in_input_dtype(get_peft_model(base, adapter))
        groups.append(([p for p in model.parameters() if p.requires_grad], lr))
    else:
        base.requires_grad_(False)
    for p in added:
        p.requires_grad_(True)
    if added:
        groups.append((added, recipe["method_lr"] or lr))
    return model, groups


def require_targets(name: str, base: PreTrainedModel, targets: Sequence[str]) -> None:
    """Raise UserError for a target of adapters that is no projection of the model."""
    have = sorted(
        {path.rpartition(".")[2] for path, module in base.named_modules() if isinstance(module, nn.Linear)}
    )
    if unknown := [target for target in targets if target not in have]:
        raise UserError(
            f"{name}: lora_targets: the model has no projection {unknown[0]!r}; possible: {', '.join(have)}"
        )


def fit(job: Job, base: PreTrainedModel, device: str, dtype: torch.dtype) -> tuple[nn.Module, dict]:
    """Train a model in place, on the device that it is moved to. Returns the model, with any adapters, and
    the stage's metrics."""
    recipe, budget = job.settings["recipe"], job.settings["budget"]
    full = recipe["kind"] == "full"
    model, groups = trained_groups(job, base)
    if device == "cuda":
        fuse_norms(model)
    trained = [p for ps, _ in groups for p in ps]
    fits = Fits(job, model, trained, device, beside=not full, dtype=dtype if full else None)
    job.hardware["engine"] = spread(model, None if full else trained, device, job.engine)
    # A mask, even none at all, has transformers look at positions in main memory, which cannot be recorded.
    recorded = device == "cuda" and job.hardware["engine"] == "ddp" and maskless(base)
    teacher = None
    if recipe["kl"]:
        teacher = load_teacher(job.parents["model"], dtype, device).requires_grad_(False).eval()
        recorded &= maskless(teacher)
    if job.recompute:
        recompute(base)
        recorded = False
    if full:
        # a sharded model has new parameter objects
        groups = [([p for p in model.parameters() if p.requires_grad], groups[0][1])]
    model.train()
    text = Packed(job.parents["text"], "train", budget["seq_len"])
    batch, accumulate = budget["batch_size"], budget["accumulate"]
    steps = max(budget["epochs"] * len(text) // (batch * accumulate), 1)
    eager = compile_blocks(base) if wanted(job, device, steps, slower=full and windowed(base)) else None

    weights = torch.ones(text.seq_len, device=device)
    weights[: recipe["kl_beyond"]] = recipe["kl_within"]
    # as `labelled`, of the whole step: every sequence has the same positions
    weights = weights / (batch * accumulate * weights.sum())

    def loss(tokens: Tensor, labels: Tensor, labelled: Tensor) -> Iterator[tuple[str, Tensor]]:
        if teacher is not None:
            mixed = dtype if full else None
            yield (
                "mixed",
                mixed_loss(
                    model, teacher, tokens, labels, labelled, weights=weights, share=recipe["kl"], dtype=mixed
                ),
            )
            return
        yield "lm", summed_loss(model, tokens, labels, dtype if full else None) / labelled

    tokens_per_step = batch * accumulate * text.seq_len
    batches = batches_of(
        text,
        len(text),
        device,
        steps=steps,
        batch_size=batch,
        accumulate=accumulate,
        seed=job.seed,
        name=job.name,
    )
    with fits:
        train(
            loss,
            groups,
            batches=batches,
            steps=steps,
            tokens_per_step=tokens_per_step,
            chance=None if recipe["kl"] else chance_loss(job.parents["text"], base.config.vocab_size),
            recorded=recorded,
            eager=eager,
            **of_job(job, device),
        )
    job.tokens = steps * tokens_per_step
    return model, {
        **job.losses(),
        "steps": steps,
        "tokens": job.tokens,
        "trainable_params": sum(p.numel() for ps, _ in groups for p in ps),
    }


def compute_in_input_dtype(model: PeftModel) -> PeftModel:
    """Adapters with float32 weights, whose small steps bfloat16 would round away, and arithmetic in the dtype
    of the layer's input.

    peft casts the input to the weights' dtype instead, for every projection: a copy twice as wide, and slower
    products, for a rank of 8.
    """
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.cast_input_dtype_enabled = False
            for part in (*layer.lora_A.values(), *layer.lora_B.values()):
                # a bound method, so that a copy of the model has its own
                part.forward = MethodType(_linear, part)
    return model


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight.to(x.dtype))
