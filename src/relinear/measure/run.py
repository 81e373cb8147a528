"""The evaluate stage: the gate, then perplexity and lm-eval's tasks, all on one loaded model."""

import json
import math
from typing import TYPE_CHECKING

import torch
from transformers import AutoTokenizer

from relinear.get import assets
from relinear.get.text import Packed, chance_loss
from relinear.linearize.assemble import Link, assemble, trained_parameters
from relinear.machine.hardware import place
from relinear.measure import lm_eval as harness
from relinear.measure.gate import gate
from relinear.measure.perplexity import perplexity

if TYPE_CHECKING:
    from relinear.stage import Context

GATE_TOKENS = 256


def run(context: "Context") -> dict:
    """Write `items.jsonl` (every item's scores); return the metrics that the tables read.

    An interrupted stage loses the batch of choices that each process was at. What comes before the scoring is done again: the gate and the
    perplexity are seconds on a GPU, less than a minute at scale mini on a CPU.
    """
    device, dtype = place(context)
    s, e = context.settings, context.settings["evaluate"]
    harness.check_tasks(e["tasks"])
    torch.manual_seed(context.seed)
    chain = context.chain()
    model = assemble(context.parents["teacher"], [Link(s["method"], s["options"], tuple(chain.values()))], dtype, device)
    tokenizer = AutoTokenizer.from_pretrained(context.parents["teacher"])
    text = Packed(context.parents["corpus"], "heldout", e["perplexity_tokens"])
    tokens, labels = text.sequence(0)
    checked = gate(model, tokens[: min(GATE_TOKENS, e["seq_len"])]) | {"parents": context.verified}
    ppl = perplexity(model, tokens, labels, seq_len=e["seq_len"], batch_size=e["perplexity_batch"])
    scores, items = {}, []
    if e["tasks"]:
        data = None
        if not e["smoke"]:
            [name] = s["assets"]
            data = assets.obtain(name)
        scores, items = harness.score(
            model, tokenizer, e["tasks"], data, batch_size=e["batch_size"], max_length=e["max_length"], seed=context.seed, smoke=e["smoke"],
            work=context.work,
        )  # fmt: skip
    if context.leads:
        (context.out / "items.jsonl").write_text("".join(json.dumps(i) + "\n" for i in items))
    chance = math.exp(chance_loss(context.parents["corpus"], model.config.vocab_size))
    return {
        "run": context.step.run, "method": s["method"], "variant": context.plan.runs[context.step.run].variant, "scale": context.plan.scale,
        "trainable_params": trained_parameters(chain), "distill_tokens": context.tokens_of("distill"),
        "finetune_tokens": context.tokens_of("finetune"), "perplexity": ppl, "tasks": scores, "gate": checked,
        # No better than guessing each word by how often it occurs: scored all the same, and said so.
        "collapsed": ppl["value"] >= chance, "chance_perplexity": chance,
    }  # fmt: skip
