"""On a GPU, methods run on Triton kernels and are held to the torch form that these replace. Skipped with a
reason where there is no GPU."""

import copy

import pytest
import torch
from test_harness import TOKENIZER, alike
from test_laws import CASES, name
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from relinear import linearize
from relinear.attention._base import DISTILL_LOSSES
from relinear.linearize.faster import fuse_norms
from relinear.linearize.transfer import layer_inputs, record
from relinear.measure import _harness as harness
from relinear.train.loop import train
from relinear_kernels.attention_cross_entropy import attention_cross_entropy
from relinear_kernels.attention_cross_entropy_reference import attention_cross_entropy as quadratic

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 576,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "initializer_range": 0.05,
}


def distance(a, b):
    return ((a.double() - b.double()).square().mean().sqrt() / b.double().square().mean().sqrt()).item()


@pytest.mark.parametrize("case", [c for c in CASES if c[0] != "softmax"], ids=name)
def test_kernels_equal_the_torch_form_whole_in_pieces_and_padded(case, monkeypatch):
    torch.manual_seed(0)
    # Three kinds of maps are compared in float32, since rounding to bfloat16 alone moves their logits or
    # gradients by as much as the bound:
    # - Features that are turned after their map have both signs, and a denominator can be 2e-4 of the terms
    #   that it sums.
    #   Rounding moves the logits by 0.009 in the median of 60 texts and by up to 0.086.
    # - exp(2x) and Performer's exponentials multiply what rounding did to x: 0.030 and 0.021 at most in four
    #   texts.
    # - The gradient of Hedgehog's map by the maximum goes to one feature of a vector, and rounding chooses
    #   another one: 0.18 between the torch form in bfloat16 and in float32 (0.03 for the softmax).
    signed = (
        case[0] == "supra" and case[1].get("variant") == "code" and case[1].get("normalizer") == "denominator"
    )
    sharp = (
        case[0] == "feature_map"
        and case[1].get("map") in ("exp", "performer")
        or case[0] == "hedgehog"
        and case[1].get("feature") == "max_pm"
    )
    chooses = case[0] == "kept"  # between scores that bfloat16 cannot tell apart
    dtype = torch.float32 if signed or sharp or chooses else torch.bfloat16
    model = linearize(LlamaForCausalLM(LlamaConfig(**SHAPE)).to(dtype).cuda().eval(), case[0], **case[1])
    ids = torch.randint(0, 512, (2, 301), device="cuda")
    logits, gradients = {}, {}
    for path in ("torch", "triton"):
        monkeypatch.setenv("RELINEAR_KERNELS", path)
        with torch.no_grad():
            logits[path] = model(ids, use_cache=False).logits
            cache = model.make_cache()
            pieces = [
                model(ids[:, a:b], past_key_values=cache).logits
                for a, b in ((0, 200), (200, 201), (201, 301))
            ]
            mask = torch.ones(2, 320, device="cuda", dtype=torch.long)
            mask[:, :19] = 0
            padded = model(torch.cat([ids[:, :19], ids], 1), attention_mask=mask, use_cache=False).logits[
                :, 19:
            ]
        assert distance(torch.cat(pieces, 1), logits[path]) < 2e-2
        assert distance(padded, logits[path]) < 2e-2
        # a map without parameters has nothing to transfer
        if case[0] != "supra" and model.method_parameters():
            # the delta rule's weights have both signs, and no cross-entropy
            for loss in ("mse",) if case[0] == "delta" else DISTILL_LOSSES:
                model.zero_grad()
                for method, inputs in layer_inputs(model, record(model, ids)):
                    method.distill_loss(inputs, loss).backward()
                gradients[path, loss] = torch.cat(
                    [p.grad.flatten() for p in model.method_parameters().values() if p.grad is not None]
                )
    assert distance(logits["triton"], logits["torch"]) < 2e-2
    for path, loss in gradients:
        assert distance(gradients[path, loss], gradients["torch", loss]) < 1e-1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "groups", "dim"), [(9, 3, 64), (8, 2, 128)])
def test_fused_cross_entropy_equals_its_definition_in_float64(heads, groups, dim, dtype, monkeypatch):
    """Hedgehog's features on SmolLM2's and Llama's heads: sharp softmaxes of both signs."""
    monkeypatch.setenv("RELINEAR_KERNELS", "triton")
    torch.manual_seed(0)
    r = lambda *s: torch.randn(2, 1000, *s, device="cuda")  # noqa: E731
    q, k = 2 * r(heads, dim).to(dtype), r(groups, dim).to(dtype)
    phi = [
        torch.cat([x.softmax(-1), (-x).softmax(-1)], -1).clamp(min=1e-12)
        for x in (3 * r(heads, dim), 3 * r(heads, dim))
    ]
    found = []
    for op, cast in ((attention_cross_entropy, torch.float32), (quadratic, torch.float64)):
        given = [x.to(cast).requires_grad_() for x in phi]
        loss = op(*(x if cast == torch.float32 else x.double() for x in (q, k)), *given, scale=dim**-0.5)
        found.append((loss, *torch.autograd.grad(loss.mean(), given)))
    (loss, *gradients), (exact, *want) = found
    assert loss.mean().item() == pytest.approx(exact.mean().item(), rel=2e-3) and distance(loss, exact) < 2e-3
    assert all(distance(a, b) < 2e-2 for a, b in zip(gradients, want, strict=True))


@pytest.mark.parametrize("case", CASES, ids=name)
def test_inputs_that_go_on_from_a_beginning_score_as_whole_ones(case, monkeypatch):
    torch.manual_seed(0)
    model = linearize(
        LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16).cuda().eval(), case[0], **case[1]
    )
    found, went_on, after = [], [], harness.LocalLM._after
    monkeypatch.setattr(
        harness.LocalLM, "_after", lambda *given: went_on.append(after(*given)) or went_on[-1]
    )
    for least, shared in ((harness.ALIKE, True), (10**6, False)):
        monkeypatch.setattr(harness, "ALIKE", least)
        went_on.clear()
        lm = harness.LocalLM(
            model, tokenizer=TOKENIZER, batch_size=8, max_length=400, softmax_dtype="float32"
        )
        found.append(torch.tensor([score for score, _ in lm.loglikelihood(alike(20))]))
        assert any(past is not None for past in went_on) == shared
    assert distance(*found) < 2e-2


def test_fused_norms_are_nearer_to_float64_than_those_they_replace():
    torch.manual_seed(0)
    norm = LlamaRMSNorm(576).cuda()
    norm.weight.data.normal_(1.0, 0.3)
    x, weights = (
        (3 * torch.randn(4, 301, 576, device="cuda")).bfloat16(),
        torch.randn(4, 301, 576, device="cuda").bfloat16(),
    )
    norm.weight.data = norm.weight.data.bfloat16()

    def computed(cast, fused):
        layer, given = copy.deepcopy(norm).to(cast), x.detach().to(cast).requires_grad_()
        if fused:
            fuse_norms(layer)
        out = (
            layer(given)
            if cast != torch.float64
            else layer.weight * given * (given.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        )
        return out, *torch.autograd.grad((out * weights.to(cast)).sum(), [given, layer.weight])

    exact, ours, theirs = (
        computed(torch.float64, False),
        computed(torch.bfloat16, True),
        computed(torch.bfloat16, False),
    )
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert distance(a, c) < 5e-3 and distance(a, c) < 1.1 * distance(b, c)


@pytest.mark.parametrize("method", ["hedgehog", "lolcats", "lizard", "t2r", "supra"])
def test_replayed_training_steps_equal_plain_ones(method, tmp_path):
    """Loss and gradients of all methods, by stage 1's terms and by stage 2's, with the graph and without."""
    recipe = {
        "betas": (0.9, 0.99),
        "weight_decay": 0.0,
        "warmup_ratio": 0.0,
        "min_lr_ratio": 1.0,
        "clip": 1.0,
    }
    tokens = torch.randint(0, 512, (8, 2, 300), generator=torch.Generator().manual_seed(1)).cuda()
    curves = {}
    for recorded in (False, True):
        torch.manual_seed(0)
        model = linearize(LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16).cuda(), method)
        fuse_norms(model)
        transferred = method not in ("t2r", "supra")
        model.requires_grad_(not transferred)
        trained = list(model.method_parameters().values()) if transferred else list(model.parameters())
        for p in trained:
            p.requires_grad_(True)

        def loss(ids, model=model, transferred=transferred):
            if not transferred:
                yield "lm", model(ids, labels=ids, use_cache=False).loss
                return
            for i, (layer, inputs) in enumerate(layer_inputs(model, record(model, ids))):
                yield (
                    f"layer_{i}",
                    layer.distill_loss(inputs, "cross_entropy" if method == "hedgehog" else "mse"),
                )

        curve = curves[recorded] = []
        train(
            loss,
            [(trained, 1e-3)],
            batches=lambda step: [(tokens[step],), (tokens[step].flip(1),)],
            steps=8,
            tokens_per_step=1200,
            recipe=recipe,
            checkpoint=tmp_path / "none",
            checkpoint_seconds=3600,
            log=lambda m, s, c=curve: c.append((m["loss"], m["grad_norm"])),
            resumed=lambda step: None,
            memory=lambda: 0,
            name=method,
            recorded=recorded,
        )
    for (a, b), (c, d) in zip(curves[False], curves[True], strict=True):
        assert c == pytest.approx(a, rel=1e-3) and d == pytest.approx(b, rel=2e-2)
