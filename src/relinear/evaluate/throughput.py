"""Training throughput at a teacher's shape: `python -m relinear.evaluate.throughput --out FILE`, on one GPU, bfloat16.

Weights do not matter for speed, so they are random. One run measures the teacher (SDPA) and every method, so that each figure has its
peer beside it: stage 1 (all layers' transfer on one teacher-forced pass) and stage 2 (LoRA, forward and backward), without the optimiser.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from relinear.model import linearize
from relinear.transfer import layer_inputs, record

SMOLLM2_135M = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192, "rope_theta": 1e5, "tie_word_embeddings": True,
}  # fmt: skip
METHODS = [(None, {}), ("hedgehog", {}), ("lolcats", {}), ("lolcats", {"window": 64}), ("lizard", {}), ("t2r", {}), ("supra", {})]
SHAPES = [(16, 1024), (8, 2048)]  # batch, tokens
REPEATS = 7


def tokens_per_second(step, tokens: int) -> float:
    """Median over `REPEATS` steps, after two to warm up."""
    times = []
    for i in range(REPEATS + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times += [time.perf_counter() - began] if i >= 2 else []
    return tokens / statistics.median(times)


def measure(method: str | None, options: dict, batch: int, length: int) -> dict:
    """Tokens per second of both stages and the peak memory, for one method (None: the teacher with SDPA)."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMOLLM2_135M)).to(torch.bfloat16).cuda()
    ids = torch.randint(0, SMOLLM2_135M["vocab_size"], (batch, length), device="cuda")
    row = {"method": method or "teacher (SDPA)", "options": options, "batch": batch, "length": length}
    if method:
        model = linearize(model, method, **options)
        parameters = list(model.method_parameters().values())
        model.requires_grad_(False)
        for p in parameters:
            p.requires_grad_(True)

        def distill() -> None:
            for layer, inputs in layer_inputs(model, record(model, ids)):
                layer.distill_loss(inputs, "mse").backward()

        row["distill_tokens_per_second"] = round(tokens_per_second(distill, ids.numel()))
        model.requires_grad_(False)
    adapter = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    tuned = get_peft_model(model, adapter).train()

    def finetune() -> None:
        logits = tuned(ids, use_cache=False).logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()

    row["finetune_tokens_per_second"] = round(tokens_per_second(finetune, ids.numel()))
    return row | {"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    if not torch.cuda.is_available():
        raise SystemExit("error: throughput is measured on a GPU; torch finds none")
    rows = []
    for batch, length in SHAPES:
        for method, options in METHODS:
            rows.append(measure(method, options, batch, length))
            print(json.dumps(rows[-1]), flush=True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    out.write_text(json.dumps({"command": "python -m relinear.evaluate.throughput", "gpu": torch.cuda.get_device_name(),
                               "versions": versions, "dtype": "bfloat16", "teacher": SMOLLM2_135M, "rows": rows}, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
