"""The peer of the trainings: what a user writes without this package. transformers' model and softmax
attention by SDPA, `torch.compile` of the whole model, fused AdamW, gradients clipped; all weights (float32,
products in bfloat16 by autocast) or peft's LoRA (weights in bfloat16)."""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from relinear.machine.hardware import memory_bytes

RUNS = {"plain_full": "full", "plain_lora": "lora"}  # as runs are named in the benchmark -> what is trained
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def matrices(model: nn.Module) -> tuple[int, int]:
    """How many numbers the weights of a model's products have, and how many of these are the head's."""
    head = model.get_output_embeddings().weight.numel()
    return sum(
        m.weight.numel()
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear) and ".method." not in name
    ), head


def flops_a_token(products: int, head: int, kind: str) -> int:
    """Floating-point operations of the products of a model's weights: forward, and backward for inputs and
    what is trained.

    A transfer has the teacher's pass alone, without a head. Attention, adapters and feature maps are not
    counted.
    """
    return (
        2 * (products - head) if kind == "transfer" else {"full": 6, "lora": 4, "method": 4}[kind] * products
    )


def steps(
    config: PreTrainedConfig,
    kind: str,
    batch: int,
    length: int,
    dtype: torch.dtype,
    device: str,
    compiled: bool,
) -> Iterator[dict[str, Any]]:
    """The loop, a step at a time: its seconds, the peak of memory since the first step, and the size of the
    products."""
    torch.manual_seed(0)
    config.use_cache = False
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32 if kind == "full" else dtype, attn_implementation="sdpa"
        )
    products, head = matrices(model)
    if kind == "lora":
        model = get_peft_model(
            model,
            LoraConfig(
                r=8,
                lora_alpha=16,
                lora_dropout=0.0,
                bias="none",
                task_type="CAUSAL_LM",
                target_modules=list(TARGETS),
            ),
        )
    parameters = [p for p in model.train().parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    call: Callable = torch.compile(model, dynamic=False) if compiled else model
    mixed = torch.autocast(device, dtype) if kind == "full" and dtype != torch.float32 else nullcontext()
    tokens = torch.randint(config.vocab_size, (batch, length), device=device)
    while True:
        began = time.perf_counter()
        optimiser.zero_grad(set_to_none=True)
        with mixed:
            loss = call(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        if device == "cuda":
            torch.cuda.synchronize()
        yield {
            "seconds": time.perf_counter() - began,
            "memory": memory_bytes(device),
            "products": products,
            "head": head,
            "trainable_params": sum(p.numel() for p in parameters),
        }
