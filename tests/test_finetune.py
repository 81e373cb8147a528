"""Stage 2: what its adapters compute with."""

import copy

import pytest
import test_laws
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from relinear import linearize
from relinear.linearize.faster import fuse_norms
from relinear.train.finetune import compute_in_input_dtype

SHAPE = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "initializer_range": 0.1}  # fmt: skip
LENGTH = 48


@pytest.fixture(scope="module")
def base():
    torch.manual_seed(0)
    return linearize(LlamaForCausalLM(LlamaConfig(**SHAPE)).eval(), "hedgehog")


def adapted(base, dtype, as_peft=False):
    """With adapters that do something: peft's begin at zero."""
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, bias="none", task_type="CAUSAL_LM", target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    model = get_peft_model(copy.deepcopy(base).to(dtype), config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    return (model if as_peft else compute_in_input_dtype(model)).train()


def gradients(model):
    """The loss, and its gradients in the adapters' order."""
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % SHAPE["vocab_size"]
    loss = model(ids, labels=ids, use_cache=False).loss
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 16 and {p.dtype for p in trained} == {torch.float32}
    return loss.item(), torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)])


def test_in_float32_adapters_are_peft_s_to_the_bit(base):
    (loss, ours), (same, peft_s) = (gradients(adapted(base, torch.float32, as_peft)) for as_peft in (False, True))
    assert loss == same and torch.equal(ours, peft_s)


def test_in_bfloat16_they_are_as_near_to_float32_as_peft_s(base):
    exact = gradients(adapted(base, torch.float32))[1]
    ours, peft_s = (((gradients(adapted(base, torch.bfloat16, x))[1] - exact).norm() / exact.norm()).item() for x in (False, True))
    assert 0 < ours < 1.3 * peft_s and ours < 5e-2


def test_a_copy_computes_with_its_own_weights(base):
    model = adapted(base, torch.float32)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.zero_()
    assert gradients(copied)[0] == gradients(adapted(base, torch.float32))[0] != gradients(model)[0]


class Casts(TorchDispatchMode):
    """Counts what is cast to float32 at an adapted layer's input size."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += func is torch.ops.aten._to_copy.default and out.dtype == torch.float32 and out.shape == (2, LENGTH, SHAPE["hidden_size"])
        return out


def test_no_layer_s_input_is_cast_for_its_adapter(base):
    """The largest tensors of an adapter are its inputs: peft casts that of each projection."""
    counts = []
    for as_peft in (False, True):
        model, counting = adapted(base, torch.bfloat16, as_peft), Casts()
        with counting, torch.no_grad():
            model(torch.zeros(2, LENGTH, dtype=torch.long), use_cache=False)
        counts.append(counting.count)
    assert counts[1] - counts[0] == 4 * SHAPE["num_hidden_layers"]


@pytest.mark.parametrize("family", test_laws.TEACHERS)
def test_fused_norms_compute_what_transformers_does(family):
    model = test_laws.teacher(family, torch.float32)
    found, ids = [], test_laws.tokens(20)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "norm" in n:
                p.normal_(1.0, 0.3)
    for fused in (False, True):
        if fused:
            fuse_norms(model)
        loss = model(ids, labels=ids, use_cache=False).loss
        found.append((loss, *torch.autograd.grad(loss, model.parameters())))
    norms = [layer for layer in model.modules() if "RMSNorm" in type(layer).__name__]
    assert sum("forward" in vars(layer) for layer in norms) == (0 if family == "gemma3" else len(norms))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(*found, strict=True))
