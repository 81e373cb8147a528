"""A chain of runs becomes one model: the weights that each step saved, in order, with every adapter but the
last merged into them."""

import copy
import json

import pytest
import test_laws
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file

from relinear import linearize
from relinear.errors import UserError
from relinear.linearize.assemble import Link, assemble, save_method
from relinear.linearize.faster import fuse_norms
from relinear.linearize.model import Linearized

METHOD, OPTIONS = "lolcats", {"window": 8}
# and what is adapted; GPT-2's projections are transposed
FAMILIES = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"]}
IDS = test_laws.tokens(24)


def logits(model) -> torch.Tensor:
    with torch.inference_mode():
        return model.eval()(IDS, use_cache=False).logits.float()


def shifted(model, names, scale=0.05, seed=0):
    """Change some parameters in place, as a training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if names(name):
                p.add_(scale * torch.randn(p.shape, generator=generator).to(p.dtype))


def distilled(model, folder):
    shifted(model, lambda n: ".method." in n, 0.3)
    folder.mkdir()
    save_method(model, folder / "method.safetensors")
    return model


def adapted(model, folder, targets, seed=0):
    """The model with a trained LoRA, saved as the finetune stage saves it."""
    model = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, bias="none", task_type="CAUSAL_LM", target_modules=targets)
    )
    shifted(model, lambda n: "lora_" in n, 0.2, seed)
    model.save_pretrained(folder / "adapter")
    return model


def trained(model, folder):
    """The model with all of its weights trained."""
    shifted(model, lambda n: True, seed=7)
    folder.mkdir()
    save_file({n: p.detach().clone() for n, p in model.named_parameters()}, folder / "model.safetensors")
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def chain(request, tmp_path_factory):
    """Every folder that steps of all kinds leave, and the logits of the model that each of them saved."""
    root, targets = tmp_path_factory.mktemp(request.param), FAMILIES[request.param]
    teacher = test_laws.teacher(request.param, torch.float32, initializer_range=0.1)
    teacher.save_pretrained(root / "teacher")
    expected = {}
    model = distilled(linearize(copy.deepcopy(teacher), METHOD, **OPTIONS), root / "distill")
    expected["distill"] = logits(model)
    model = adapted(model, root / "finetune", targets)
    expected["finetune"] = logits(model)
    model = adapted(model.merge_and_unload(), root / "again", targets, seed=1)
    expected["again"] = logits(model)
    model = trained(model.merge_and_unload(), root / "full")
    expected["full"] = logits(model)
    before = adapted(copy.deepcopy(teacher), root / "before", targets, seed=2)
    expected["before"] = logits(before)
    model = distilled(linearize(before.merge_and_unload(), METHOD, **OPTIONS), root / "converted")
    expected["converted"] = logits(model)
    return root, expected


def steps(root, *names):
    return tuple(root / name for name in names)


def same(model, expected):
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("links", ["one", "each step its own"])
def test_steps_follow_one_another(chain, length, links):
    """In one run, or in runs that go on with the same method."""
    root, expected = chain
    names = ["distill", "finetune", "again", "full"][:length]
    each = [Link(METHOD, OPTIONS, steps(root, name)) for name in names]
    model = assemble(
        root / "teacher",
        each if links == "each step its own" else [Link(METHOD, OPTIONS, steps(root, *names))],
    )
    same(model, expected[names[-1]])
    assert isinstance(model, PeftModel) == (names[-1] in ("finetune", "again"))


def test_a_later_run_converts_what_an_earlier_one_finetuned(chain):
    root, expected = chain
    first = Link("softmax", {}, steps(root, "before"))
    model = assemble(root / "teacher", [first])
    assert isinstance(model, PeftModel) and not isinstance(model.get_base_model(), Linearized)
    same(model, expected["before"])
    converted = assemble(root / "teacher", [first, Link(METHOD, OPTIONS, steps(root, "converted"))])
    assert isinstance(converted, Linearized)
    same(converted, expected["converted"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_merged_adapter_is_the_unmerged_one(chain, dtype):
    """Logits agree, and each weight is the sum computed in float32, rounded once."""
    root, expected = chain
    plain = assemble(root / "teacher", [Link(METHOD, OPTIONS, steps(root, "distill"))], dtype)
    beside = assemble(root / "teacher", [Link(METHOD, OPTIONS, steps(root, "distill", "finetune"))], dtype)
    merged = assemble(
        root / "teacher",
        [Link(METHOD, OPTIONS, steps(root, "distill", "finetune")), Link(METHOD, OPTIONS)],
        dtype,
    )
    scale = expected["finetune"].std()
    assert (logits(merged) - logits(beside)).abs().max() < (1e-5 if dtype == torch.float32 else 0.1) * scale
    assert (logits(merged) - logits(plain)).abs().max() > 0.5 * scale, (
        "the adapter does nothing, so nothing was tested"
    )
    exact = (
        PeftModel.from_pretrained(copy.deepcopy(plain).float(), root / "finetune/adapter")
        .merge_and_unload()
        .state_dict()
    )
    assert merged.dtype == dtype and {p.dtype for p in merged.method_parameters().values()} == {torch.float32}
    assert all(torch.equal(w, exact[n].to(w.dtype)) for n, w in merged.state_dict().items())
    assert {p.dtype for n, p in beside.named_parameters() if "lora_" in n} == {dtype}


def test_what_is_assembled_can_be_trained_on(chain):
    """After a merge every weight has a gradient, as a full finetuning needs, and a new adapter has one
    alone."""
    root, _ = chain
    model = assemble(
        root / "teacher", [Link(METHOD, OPTIONS, steps(root, "distill", "finetune")), Link(METHOD, OPTIONS)]
    )
    assert all(p.requires_grad for p in model.parameters()) and not any(
        "lora_" in n for n, _ in model.named_parameters()
    )
    fuse_norms(model)
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if ".method." not in n)
    model.zero_grad()
    targets = FAMILIES["gpt2" if hasattr(model.base_model, "wpe") else "llama"]
    adapted = get_peft_model(model, LoraConfig(target_modules=targets, task_type="CAUSAL_LM"))
    adapted(IDS, labels=IDS, use_cache=False).loss.backward()
    assert {n for n, p in adapted.named_parameters() if p.grad is not None} == {
        n for n, p in adapted.named_parameters() if "lora_" in n
    }


def test_a_linearized_folder_is_gone_on_with(chain, tmp_path):
    root, expected = chain
    link = Link(METHOD, OPTIONS, steps(root, "distill"))
    assemble(root / "teacher", [link]).save_pretrained(tmp_path)
    same(assemble(tmp_path, [Link(METHOD, OPTIONS)]), expected["distill"])
    same(assemble(tmp_path, [Link(METHOD, OPTIONS, steps(root, "finetune"))]), expected["finetune"])
    assert json.loads((tmp_path / "config.json").read_text())["relinear"]["method"] == METHOD


BAD = {
    "another method": (
        [Link(METHOD, OPTIONS), Link("hedgehog")],
        ["goes on with hedgehog (", "is linearized by lolcats (", "window=8"],
    ),
    "other options": (
        [Link(METHOD, OPTIONS), Link(METHOD, {"window": 16})],
        ["window=16", "window=8", "the same method and options"],
    ),
    "other kept layers": (
        [Link("t2r"), Link("t2r", {"keep_softmax_layers": [0]})],
        ["keep_softmax_layers=[0]", "keep_softmax_layers=[])"],
    ),
    "softmax again": (
        [Link(METHOD, OPTIONS), Link("softmax")],
        ["goes on with softmax (", "is linearized by lolcats ("],
    ),
    "an unknown method": ([Link("lolcat")], ["'lolcat'", "lolcats"]),
    "no step": (
        [Link("softmax", {}, ("teacher",))],
        ["no step's result in", "got config.json", "possible are model.safetensors, method"],
    ),
    "a method for softmax": (
        [Link("softmax", {}, ("distill",))],
        ["method.safetensors holds what a method added", "softmax attention"],
    ),
    "another method's tensors": (
        [Link("t2r", {}, ("distill",))],
        ["method.safetensors is not what its model needs", "missing", "unexpected"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_chain_that_makes_no_model_is_refused(chain, tmp_path, case):
    root, _ = chain
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher/config.json").write_text("{}")
    (tmp_path / "distill").symlink_to(root / "distill")
    links, named = BAD[case]
    with pytest.raises(ValueError) as error:
        assemble(
            root / "teacher", [link._replace(steps=tuple(tmp_path / s for s in link.steps)) for link in links]
        )
    assert all(part in str(error.value) for part in named), error.value
    assert isinstance(error.value, UserError) or case in ("an unknown method", "another method's tensors")
