"""Tensors that are missing, unexpected or misshapen are refused wherever weights come in, and what may differ
is named."""

import json
import shutil
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_teacher import tiny_gguf

from relinear import linearize
from relinear.errors import UserError
from relinear.families import _encoders, load
from relinear.families.bert import byte_tokenizer
from relinear.folders import load_whole
from relinear.get.model import save_model
from relinear.linearize.assemble import assemble, save_method
from relinear.linearize.loading import load_teacher
from relinear.plan.job import Link
from relinear.share.tensors import load_folder

DOWN = "model.layers.1.mlp.down_proj.weight"  # not square
CHANGES = {
    "missing": (lambda tensors: tensors.pop(DOWN), f"missing tensors: {DOWN}"),
    "unexpected": (
        lambda tensors: tensors.update({"model.extra.weight": torch.zeros(2)}),
        "unexpected tensors: model.extra.weight",
    ),
    "transposed": (
        lambda tensors: tensors.update({DOWN: tensors[DOWN].T.contiguous()}),
        f"misshapen tensors: {DOWN} .* instead of",
    ),
    "hidden behind a buffer's name": (
        lambda tensors: tensors.update({"model.evil.rotary_emb.inv_freq.weight": torch.zeros(2)}),
        "unexpected tensors: model.evil.rotary_emb",
    ),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_model("random", folder, "float32")
    return folder


def changed(source: Path, place: Path, change, name: str = "model.safetensors") -> Path:
    folder = Path(shutil.copytree(source, place / "changed"))
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name, {"format": "pt"})
    return folder


DOORS = {
    "the stage of a model": lambda folder: save_model(
        folder, folder.with_name("out"), "float32", family="decoder"
    ),
    "the model behind runs": lambda folder: assemble(folder, [Link("hedgehog")]),
    "a teacher to linearize": lambda folder: linearize(load_teacher(folder, torch.float32), "hedgehog"),
    "a folder that generates": lambda folder: load_folder(folder, torch.float32),
}


@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.parametrize("door", DOORS)
def test_a_folder_with_a_hole_is_refused_at_every_door(tiny, tmp_path, door, case):
    change, said = CHANGES[case]
    with pytest.raises(UserError, match=f"changed.* is not what its model needs: {said}"):
        DOORS[door](changed(tiny, tmp_path, change))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("door", DOORS)
def test_what_a_folder_may_have_beside_its_model_is_no_hole(tiny, tmp_path, door):
    """The head is tied and is not there; angles of rotations, which old versions saved, are."""
    assert "lm_head.weight" not in load_file(tiny / "model.safetensors")
    folder = changed(
        tiny,
        tmp_path,
        lambda tensors: tensors.update(
            {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(2)}
        ),
    )
    DOORS[door](folder)


def test_pickled_weights_are_no_model(tiny, tmp_path):
    folder = Path(shutil.copytree(tiny, tmp_path / "pickled"))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    for door in DOORS.values():
        with pytest.raises(UserError, match="pickled has no weights: neither model.safetensors nor"):
            door(folder)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, and the files of weights have"),
        ({"intermediate_size": 10**12}, "makes a model of .* numbers, and the files of weights have"),
    ],
)
@pytest.mark.parametrize("door", ["the stage of a model", "a folder that generates"])
def test_a_model_far_larger_than_its_files_is_refused_before_it_is_built(tiny, tmp_path, door, entries, said):
    folder = Path(shutil.copytree(tiny, tmp_path / "large"))
    config = json.loads((folder / "config.json").read_text()) | entries
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "layer_types"}))
    began = time.monotonic()
    with pytest.raises(UserError, match=said):
        DOORS[door](folder)
    assert time.monotonic() - began < 20


# --- encoders ---


def encoder(place: Path, change=lambda tensors: None) -> Path:
    model, _ = load("bert").random({}, 0, torch.float32)
    model.save_pretrained(place / "source")
    byte_tokenizer().save_pretrained(place / "source")
    return changed(place / "source", place, change)


def without(tensors: dict, *parts: str) -> None:
    for name in [name for name in tensors if any(part in name for part in parts)]:
        del tensors[name]


def with_heads(tensors: dict) -> None:
    """As a checkpoint of masked words has it: the model's tensors below a name, heads beside them, no
    pooler."""
    without(tensors, "pooler")
    for name in list(tensors):
        tensors[f"bert.{name}"] = tensors.pop(name)
    tensors |= {
        "cls.predictions.bias": torch.zeros(4),
        "cls.seq_relationship.weight": torch.zeros(2, 2),
        "cls.seq_relationship.bias": torch.zeros(2),
        "bert.embeddings.position_ids": torch.zeros(1, 4),
    }


def test_an_encoder_may_lack_its_pooler_and_have_the_heads_of_its_tasks(tmp_path):
    found, _ = _encoders.opened([encoder(tmp_path, with_heads)], torch.float32)
    for name, tensor in load_file(tmp_path / "source/model.safetensors").items():
        assert "pooler" in name or torch.equal(found.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda tensors: without(tensors, "layer.1.attention.self.key.weight"),
            "missing tensors: encoder.layer.1.attention.self.key.weight",
        ),
        (
            lambda tensors: tensors.update({"pooler.more.weight": torch.zeros(2)}),
            "unexpected tensors: pooler.more.weight",
        ),
        (
            lambda tensors: tensors.update({"embeddings.word_embeddings.weight": torch.zeros(2, 2)}),
            r"misshapen tensors: embeddings.word_embeddings",
        ),
    ],
)
def test_an_encoder_with_a_hole_is_refused(tmp_path, change, said):
    with pytest.raises(UserError, match=f"is not what its model needs: {said}"):
        _encoders.opened([encoder(tmp_path, change)], torch.float32)


# --- GGUF ---

GGUF_DOWN = "blk.0.ffn_down.weight"


def rewritten(
    path: Path, *, drop: str = "", add: str = "", transpose: str = "", cut: str = "", **fields
) -> None:
    """A GGUF's copy in its place, with other tensors or values of fields."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_suffix(".new"), "llama")
    for name, field in reader.fields.items():
        if name != "general.architecture" and not name.startswith("GGUF."):
            kind = field.types[0]
            value = fields.get(name.rpartition(".")[2], field.contents())
            writer.add_key_value(
                name, value, kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            )
    for tensor in reader.tensors:
        data = np.array(tensor.data)
        if tensor.name != drop:
            data = data.T if tensor.name == transpose else data[1:] if tensor.name == cut else data
            writer.add_tensor(tensor.name, np.ascontiguousarray(data))
    if add:
        writer.add_tensor(add, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").replace(path)


GGUFS = {
    "missing": ({"drop": GGUF_DOWN}, f"missing tensors: {GGUF_DOWN}"),
    "unexpected": ({"add": "blk.0.extra.weight"}, "unexpected tensors: blk.0.extra.weight"),
    "another block": ({"add": GGUF_DOWN.replace("0", "1")}, "unexpected tensors: blk.1.ffn_down.weight"),
    "angles that the model would not read": (
        {"add": "rope_freqs.weight"},
        "unexpected tensors: rope_freqs.weight",
    ),
    "transposed": (
        {"transpose": GGUF_DOWN},
        r"misshapen tensors: model.layers.0.mlp.down_proj.weight .* instead of",
    ),
    "cut": ({"cut": GGUF_DOWN}, f"misshapen tensors: {GGUF_DOWN} of .* numbers instead of"),
    "another width": ({"feed_forward_length": 65}, "misshapen tensors: blk.0.ffn_down.weight"),
    "a width beyond all memory": ({"feed_forward_length": 2**31}, "misshapen tensors: blk.0.ffn_down.weight"),
    "a million blocks": ({"block_count": 10**6}, "llama.block_count is 1000000, and there are 11 tensors"),
    "no heads": ({"head_count": 0}, "no configuration of a model in .*tiny.gguf: "),
    "no heads of keys": ({"head_count_kv": 0}, "tiny.gguf: .*zero; possible: a GGUF of a model that transf"),
}


@pytest.mark.parametrize("case", GGUFS)
def test_a_gguf_with_a_hole_is_refused_in_seconds(tmp_path, case):
    how, said = GGUFS[case]
    tiny_gguf(tmp_path / "tiny.gguf", seed=0)
    rewritten(tmp_path / "tiny.gguf", **how)
    began = time.monotonic()
    with pytest.raises(UserError, match=said):
        save_model(tmp_path, tmp_path / "out", "float32", family="decoder")
    assert time.monotonic() - began < 20 and not (tmp_path / "out").exists()


def test_a_gguf_that_is_written_again_as_it_is_is_taken(tmp_path):
    tiny_gguf(tmp_path / "tiny.gguf", seed=0)
    rewritten(tmp_path / "tiny.gguf")
    save_model(tmp_path, tmp_path / "out", "float32", family="decoder")


def test_a_gguf_whose_array_claims_to_be_longer_than_the_file_is_refused_in_seconds(tmp_path):
    path = tmp_path / "tiny.gguf"
    tiny_gguf(path, seed=0)
    data = path.read_bytes()
    # behind the kinds of the field and of its items
    at = data.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 8
    path.write_bytes(data[:at] + struct.pack("<Q", 2**60) + data[at + 8 :])
    began = time.monotonic()
    with pytest.raises(UserError, match="no whole GGUF"):
        save_model(tmp_path, tmp_path / "out", "float32")
    assert time.monotonic() - began < 20


# --- steps ---


@pytest.fixture(scope="module")
def step(tiny, tmp_path_factory) -> Path:
    """A step's folder, with what a method added and an adapter."""
    place = tmp_path_factory.mktemp("step")
    model = linearize(load_teacher(tiny, torch.float32), "hedgehog")
    save_method(model, place / "method.safetensors")
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    adapted.peft_config["default"].target_modules = ["q_proj", "v_proj"]
    adapted.save_pretrained(place / "adapter")
    return place


@pytest.mark.parametrize("change", ["missing", "unexpected", "misshapen"])
@pytest.mark.parametrize("file", ["method.safetensors", "adapter/adapter_model.safetensors"])
@pytest.mark.parametrize("merged", [False, True])
def test_what_a_step_left_is_loaded_whole_or_not_at_all(tiny, step, tmp_path, file, change, merged):
    links = [Link("hedgehog", {}, (tmp_path / "changed",)), *([Link("hedgehog")] if merged else [])]
    shutil.copytree(step, tmp_path / "whole")
    assemble(tiny, [links[0]._replace(steps=(tmp_path / "whole",)), *links[1:]])

    def damage(tensors: dict) -> None:
        name = sorted(tensors)[0]
        if change == "unexpected":
            tensors["extra.weight"] = torch.zeros(2)
        elif change == "missing":
            del tensors[name]
        else:
            tensors[name] = torch.zeros(3)

    changed(step, tmp_path, damage, file)
    with pytest.raises(UserError, match=f"{change} tensors|is no adapter of this model"):
        assemble(tiny, links)


def test_a_tensor_that_transformers_reports_nowhere_is_named(tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = changed(
        tiny,
        tmp_path,
        lambda tensors: tensors.update({"model.position_ids": torch.zeros(2), "x.attn.bias": torch.zeros(2)}),
    )
    with pytest.raises(UserError, match="unexpected tensors: model.position_ids, x.attn.bias"):
        load_whole(AutoModelForCausalLM, folder, torch.float32)
