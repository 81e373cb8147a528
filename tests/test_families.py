"""Laws of every family: it opens or makes models of its classes, and their attention lies where the family
says."""

import subprocess
import sys

import pytest
import test_encoders
import test_laws
import torch
from conftest import ROOT
from safetensors.torch import load_file, save_file
from transformers import ViTConfig, ViTForImageClassification
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from relinear import families, linearize
from relinear.errors import UserError
from relinear.families.tiny import byte_tokenizer
from relinear.linearize.loading import load_teacher
from relinear.linearize.model import CLASSES
from relinear.measure import picture_gate
from relinear.measure.gate import GateError
from relinear.plan.job import Job
from relinear.share.registration import TEACHERS

ALL = {name: families.load(name) for name in families.available()}
MADE = [name for name in ALL if name in ("bert", "gpt2", "tiny")]


def of_pictures(name, dtype=torch.float64, **sizes):
    """A tiny model of pictures of 8 x 8 pixels, of attention that is not uniform."""
    given = {"classes": 7, "image_size": 8, "patch_size": 2, "num_channels": 3, "initializer_range": 0.2}
    return ALL[name].random(given, 0, dtype)[0].requires_grad_(False)


TEACHERS_OF = {name: test_laws.teacher for name in test_laws.TEACHERS} | {
    name: test_encoders.teacher for name in test_encoders.TEACHERS
}
TEACHERS_OF["vit"] = of_pictures
OPENED = [(name, model_class) for name, family in ALL.items() for model_class in family.classes]


def test_each_class_has_one_family_and_is_registered():
    """tests/test_export.py loads what is registered."""
    classes = [model_class for _, model_class in OPENED]
    assert len(set(classes)) == len(classes) and set(classes) == set(CLASSES)
    assert sorted(c.config_class.model_type for c in classes) == sorted(TEACHERS)
    assert all(families.of(c).name == name for name, c in OPENED)
    assert {type(make(name)) for name, make in TEACHERS_OF.items()} == set(classes), (
        "the laws are tested on every class"
    )
    assert {name for name, family in ALL.items() if not family.causal} == {"bert", "mpnet", "prenorm", "vit"}


@pytest.mark.parametrize("teacher", TEACHERS_OF)
def test_a_family_opens_its_own_models_and_no_other_s(tmp_path, teacher):
    tokenizer = byte_tokenizer()
    model = TEACHERS_OF[teacher](teacher, torch.float32, vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    own = families.of(type(model))
    opened, _ = own.open([tmp_path], torch.float32)
    assert type(opened) is type(model) and all(
        torch.equal(w, model.state_dict()[n]) for n, w in opened.state_dict().items()
    )
    for other in (f for f in ALL.values() if f.name != own.name):
        with pytest.raises(
            UserError,
            match=(
                "holds a .*; family|made from scratch and not opened; families that are opened: bert, decoder"
            ),
        ):
            other.open([tmp_path], torch.float32)


@pytest.mark.parametrize("teacher", TEACHERS_OF)
def test_the_layout_finds_every_attention_layer_and_its_window(teacher):
    model, linearized = TEACHERS_OF[teacher](teacher), linearize(TEACHERS_OF[teacher](teacher), "hedgehog")
    layout = families.of(type(model)).layouts[type(model)]
    found = layout.attention_layers(model)
    assert len(found) == model.config.num_hidden_layers and all(
        "Attention" in type(layer).__name__ for layer in found
    )
    assert layout.windows(model) == linearized.layout.windows(linearized)  # before and after the swap
    assert all(isinstance(layer, layout.swapped) for layer in layout.attention_layers(linearized))


def test_a_vit_of_the_hub_reads_pixels_as_it_reads_pictures(tmp_path):
    torch.manual_seed(0)
    sizes = {
        "image_size": 8,
        "patch_size": 4,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 16,
    }
    theirs = ViTForImageClassification(ViTConfig(**sizes, num_labels=7, initializer_range=0.2)).eval()
    theirs.save_pretrained(tmp_path)
    ours, _ = ALL["vit"].open([tmp_path], torch.float32)
    pictures = torch.randint(256, (2, 8, 8, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    # its defaults are those of the checkpoint
    processor = ViTImageProcessorPil(size={"height": 8, "width": 8})
    with torch.inference_mode():
        expected = theirs(**processor(list(pictures.numpy()), return_tensors="pt")).logits
        assert (
            torch.allclose(ours(pictures.flatten(1).long()).logits, expected, atol=1e-5)
            and expected.std(0).min() > 0.01
        )
        with pytest.raises(ValueError, match=r"\[batch, 8 x 8 x 3 = 192\] pixels; got \[2, 190\]"):
            ours(pictures.flatten(1)[:, 2:].long())
    with pytest.raises(UserError, match="holds no one config.json"):
        ALL["vit"].open([tmp_path, tmp_path], torch.float32)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("classifier.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="is not what its model needs: missing tensors: classifier.weight"):
        ALL["vit"].open([tmp_path], torch.float32)


@pytest.mark.parametrize("method", ["softmax", "hedgehog", "t2r"])
def test_a_linearized_vit_is_saved_whole_and_the_order_of_its_patches_does_not_matter(tmp_path, method):
    teacher, model, pixels = (
        of_pictures("vit"),
        linearize(of_pictures("vit"), method),
        torch.arange(2 * 192).view(2, 192) % 256,
    )
    model.save_pretrained(tmp_path)
    again = load_teacher(tmp_path, torch.float64)
    with torch.no_grad():
        first, *others = (m(pixels).logits for m in (model, again, teacher))
        padded = model(
            pixels, attention_mask=torch.ones_like(pixels), token_type_ids=torch.zeros_like(pixels)
        ).logits
    assert (
        torch.allclose(first, others[0])
        and torch.equal(first, padded)
        and torch.allclose(first, others[1]) == (method == "softmax")
    )
    assert first.std(0).max() > 0.1, "pictures are told apart"
    assert picture_gate.order_consistency(model, pixels) < 1e-12
    job = Job("x", {"seed": 0}, {}, tmp_path, tmp_path)
    found = {r.metric: r.value for r in picture_gate.measure(model, None, picture_gate.Options(), job)}
    assert found["passed"] and found["finite"]
    model.vit.layers[0].register_forward_hook(
        lambda layer, inputs, out: torch.cat([out[..., :1] + torch.arange(17)[:, None], out[..., 1:]], -1)
    )
    with pytest.raises(GateError, match="order_consistency"):
        list(picture_gate.measure(model, None, picture_gate.Options(), job))


@pytest.mark.parametrize("name", MADE)
def test_a_model_from_scratch_is_its_seed_s_and_of_the_sizes_asked_for(name):
    sizes = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 1, "head_dim": 8} if name == "tiny" else {}
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    models = [ALL[name].random(sizes, seed, torch.bfloat16)[0] for seed in (1, 1, 2)]
    assert torch.equal(before, torch.random.get_rng_state())
    weights = [torch.cat([p.flatten() for p in m.parameters()]) for m in models]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert (
        all(getattr(models[0].config, k) == v for k, v in sizes.items()) and models[0].dtype == torch.bfloat16
    )
    assert type(models[0]) in CLASSES


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"layers": 2}, ["options of 'tiny'", "unknown key 'layers'", "num_hidden_layers"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "greater than 0", "got 0"]),
        ({"num_attention_heads": 5}, ["multiple of num_key_value_heads, 2"]),
        ({"head_dim": 7}, ["even"]),
    ],
    ids=str,
)
def test_sizes_that_make_no_model_are_refused(options, named):
    with pytest.raises(ValueError) as error:
        ALL["tiny"].random(options, 0, torch.float32)
    assert all(part in str(error.value) for part in named), error.value


def test_what_a_family_cannot_do_names_those_that_can():
    with pytest.raises(
        UserError,
        match="'mpnet' makes no model from scratch; families that do: bert, gpt2, prenorm, tiny, vit",
    ):
        ALL["mpnet"].random({}, 0, torch.float32)
    with pytest.raises(
        UserError, match="no family 'decoders'; have bert, decoder, gpt2, mpnet, prenorm, tiny, vit"
    ):
        families.load("decoders")
    with pytest.raises(
        UserError,
        match=(
            "no family covers Linear; covered are bert: BertModel; decoder: LlamaForCausalLM, .*; gpt2:"
            " GPT2LMHeadModel"
        ),
    ):
        families.of(torch.nn.Linear)


def imported(code: str) -> set[str]:
    """The top-level names of what a fresh interpreter has imported after `code`."""
    code = f"import sys\n{code}\nprint(*{{m.partition('.')[0] for m in sys.modules}})"
    env = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'kernels'}", "PATH": ""}
    return set(
        subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        ).stdout.split()
    )


def test_names_are_read_without_torch_and_a_model_is_loaded_without_what_only_some_need():
    assert not imported("from relinear import families; families.available()") & {"torch", "transformers"}
    got = imported("from relinear.linearize import assemble, faster")
    assert "torch" in got and not got & {"peft", "gguf", "lm_eval", "datasets", "mlflow", "pandas"}
