"""The teacher's folder gives back what was saved, from each kind of source."""

import json

import gguf
import numpy as np
import pytest
import test_laws
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from relinear import linearize
from relinear.errors import UserError
from relinear.families import _opening
from relinear.families.tiny import byte_tokenizer
from relinear.get import model as teacher
from relinear.get.model import save_model


def tiny_gguf(path, *, seed: int, shard_tensors: int = 0) -> LlamaForCausalLM:
    """Write a one-layer Llama with a SmolLM2-like tokenizer as GGUF, or as llama.cpp's shards; return the
    model that it holds."""
    torch.manual_seed(seed)
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(byte_tokenizer().get_vocab(), key=byte_tokenizer().get_vocab().get)[2:]
    vocab = [*specials, *letters, "ĠĠ"]
    heads, kv_heads, width = 6, 2, 96
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocab), hidden_size=width, intermediate_size=64, num_hidden_layers=1,
            num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=True,
            max_position_embeddings=256, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2,
        )
    ).eval()  # fmt: skip

    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=shard_tensors)
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(64)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(width // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocab))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocab)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(vocab) - 3))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue  # tied
        value = weight.numpy()
        for projection, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if projection in name:  # GGUF's Llama interleaves each head's rotary pairs
                value = value.reshape(count, 2, -1, width).swapaxes(1, 2).reshape(value.shape)
        stem, suffix = name.rsplit(".", 1)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", np.ascontiguousarray(value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_the_random_teacher_comes_back_and_depends_on_its_seed_alone(tmp_path):
    facts = save_model("random", tmp_path / "a", "float32", seed=3)
    torch.manual_seed(1)
    save_model("random", tmp_path / "b", "float32", seed=3)
    save_model("random", tmp_path / "c", "float32", seed=4)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]
    assert (facts["heads"], facts["kv_heads"], facts["head_dim"], facts["layers"]) == (6, 2, 16, 2)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    text = "Größe\n\n  12 <tab>\t"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.bos_token_id is not None and tokenizer.eos_token_id is not None
    assert len(tokenizer) == facts["vocab_size"]


@pytest.mark.parametrize("dtype", teacher.DTYPES)
def test_a_folder_in_the_hubs_layout_is_saved_in_the_dtype_asked_for(tmp_path, dtype):
    save_model("random", tmp_path / "source", "float32")
    save_model(tmp_path / "source", tmp_path / "out", dtype)
    source = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=getattr(torch, dtype))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert saved.dtype == getattr(torch, dtype)
    for name, weight in source.state_dict().items():
        assert torch.equal(weight, saved.state_dict()[name]), name


def test_a_gguf_becomes_a_plain_folder_of_the_same_model(tmp_path):
    (tmp_path / "package").mkdir()
    model = tiny_gguf(tmp_path / "package/tiny.gguf", seed=0)
    facts = save_model(tmp_path, tmp_path / "out", "float32")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not hasattr(saved.config, "quantization_config")
    assert (facts["heads"], facts["kv_heads"], facts["max_positions"]) == (6, 2, 256)
    probe = torch.arange(20)[None]
    with torch.inference_mode():
        torch.testing.assert_close(saved(input_ids=probe).logits, model(input_ids=probe).logits)


def test_a_gguf_is_parsed_once(tmp_path, monkeypatch):
    parsed, build = [], gguf.GGUFReader._build_fields
    monkeypatch.setattr(
        gguf.GGUFReader, "_build_fields", lambda *given: parsed.append(given) or build(*given)
    )
    tiny_gguf(tmp_path / "tiny.gguf", seed=0)
    _opening.opened([tmp_path], torch.float32)
    assert len(parsed) == 1, "transformers parses it for the configuration, the weights and the tokenizer"
    gguf.GGUFReader(tmp_path / "tiny.gguf")
    assert len(parsed) == 2, "what it is given ends with the opening"


def pieces(root, names: list[str]) -> list:
    """The bytes of a GGUF as files, one a name, of unequal sizes; their folders, each once."""
    tiny_gguf(root / "whole", seed=0)
    content = (root / "whole").read_bytes()
    (root / "whole").unlink()
    ends = [len(content) * (i + 1) ** 2 // len(names) ** 2 for i in range(len(names))]
    for name, begin, end in zip(names, [0, *ends], ends, strict=False):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content[begin:end])
    return list(dict.fromkeys((root / name).parent for name in names))


def shards(root) -> list:
    """llama.cpp's shards of the same, each in a folder of its own, the first in the last."""
    tiny_gguf(root / "tiny.gguf", seed=0, shard_tensors=4)
    found = sorted(root.glob("*.gguf"), reverse=True)
    for path in found:
        path.with_suffix("").mkdir()
        path.rename(path.with_suffix("") / path.name)
    return [path.with_suffix("") for path in found]


PARTS = {
    "pieces of several packages": lambda root: pieces(
        root, [f"package{i}/data/part{i:02}.bin" for i in (3, 1, 2)]
    ),
    "eleven pieces in one folder": lambda root: pieces(root, [f"a/tiny.gguf.part{i}" for i in range(1, 12)]),
    "pieces that are numbered as shards": lambda root: pieces(
        root, [f"{i}/tiny-{i:05}-of-00002.gguf" for i in (1, 2)]
    ),
    "llama.cpp's shards": shards,
}


@pytest.mark.parametrize("parts", PARTS)
def test_a_gguf_in_parts_is_the_whole_one_to_the_byte(tmp_path, parts):
    (tmp_path / "parts").mkdir()
    (tmp_path / "package").mkdir()
    tiny_gguf(tmp_path / "package/tiny.gguf", seed=0)
    folders = PARTS[parts](tmp_path / "parts")
    (folders[0] / "LICENSE").write_text("not of the model")
    save_model(folders, tmp_path / "joined", "float32", family="decoder")
    save_model(tmp_path / "package", tmp_path / "whole", "float32")
    joined, whole = (
        {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("joined", "whole")
    )
    assert joined == whole


def three(root) -> list:
    return pieces(root, [f"{i}/part{i}.bin" for i in range(3)])


def another_file(root) -> list:
    (root / "weights.pt").write_text("")
    return [root]


def two_models(root) -> list:
    for name in "ab":
        tiny_gguf(root / f"{name}.gguf", seed=0)
    return [root]


BROKEN = {
    "nothing": (lambda root: [root], ["no model", "got nothing", "config.json", "*.gguf.part1"]),
    "another file": (another_file, ["got weights.pt", "possible are"]),
    "two models": (two_models, ["2 GGUF files", "a.gguf, b.gguf"]),
    "the first piece missing": (
        lambda root: three(root)[1:],
        ["part1.bin is the first of part1.bin, part2.bin"],
    ),
    "a middle piece missing": (lambda root: three(root)[::2], ["no whole GGUF", "a part is missing"]),
    "the last piece missing": (lambda root: three(root)[:2], ["no whole GGUF", "a part is missing"]),
    "the last piece twice": (
        lambda root: [*three(root), root / "2"],
        ["no whole GGUF", "a part is too much"],
    ),
    "a shard missing": (lambda root: shards(root)[:2], ["are not 1 to 3", "tiny-00003-of-00003.gguf"]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_whole_gguf_is_refused_before_it_is_read_into_a_model(tmp_path, monkeypatch, case):
    make, named = BROKEN[case]
    monkeypatch.setattr(_opening.AutoModelForCausalLM, "from_pretrained", lambda *args, **options: 1 / 0)
    with pytest.raises(UserError) as error:
        save_model(make(tmp_path), tmp_path / "out")
    assert all(part in str(error.value) for part in named), error.value


def test_special_tokens_are_those_that_the_gguf_names(tmp_path, monkeypatch):
    """Also where transformers reads them otherwise, as 5.17 does: responses to train on would end in the
    token that begins one."""
    tiny_gguf(tmp_path / "tiny.gguf", seed=0)
    read = AutoTokenizer.from_pretrained

    def mistaken(*args, **options):
        tokenizer = read(*args, **options)
        tokenizer.eos_token = tokenizer.bos_token
        tokenizer.init_kwargs["eos_token_id"] = tokenizer.bos_token_id
        return tokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", mistaken)
    save_model(tmp_path, tmp_path / "out", "float32")
    saved = read(tmp_path / "out")
    assert (saved.bos_token, saved.bos_token_id, saved.eos_token, saved.eos_token_id) == (
        "<|im_start|>",
        1,
        "<|im_end|>",
        2,
    )
    assert "eos_token_id" not in json.loads((tmp_path / "out/tokenizer_config.json").read_text())


@pytest.mark.parametrize("family", test_laws.TEACHERS)
def test_every_family_of_teachers_is_saved_and_linearized(tmp_path, family):
    tokenizer = byte_tokenizer()
    model = test_laws.teacher(family, torch.float32, vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    facts = save_model(tmp_path / "source", tmp_path / "out", "float32")
    groups = 6 if family == "gpt2" else 2
    assert (facts["heads"], facts["kv_heads"], facts["head_dim"], facts["layers"]) == (6, groups, 8, 2)
    linearized = linearize(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), "lolcats", window=16)
    assert all(torch.equal(linearized.state_dict()[n], w) for n, w in model.state_dict().items())


def test_a_model_that_transformers_reads_from_gguf_is_linearized(tmp_path):
    tiny_gguf(tmp_path / "tiny.gguf", seed=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    before, probe = model(torch.arange(20)[None]).logits, torch.arange(20)[None]
    torch.testing.assert_close(linearize(model, "softmax")(probe, use_cache=False).logits, before)
    model = linearize(AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf"), "hedgehog")
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved")(probe).logits, model(probe).logits
    )


def test_a_smollm_tokenizer_splits_digits_before_it_merges_spaces(tmp_path):
    tiny_gguf(tmp_path / "tiny.gguf", seed=0)
    save_model(tmp_path, tmp_path / "out", "float32")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  12")["input_ids"]) == ["a", "ĠĠ", "1", "2"]


def test_a_folder_that_gives_other_logits_than_were_saved_is_refused(tmp_path):
    save_model("random", tmp_path, "float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    model.model.norm.weight.data[0] += 1e-3
    with pytest.raises(RuntimeError, match="other logits than were saved: off by"):
        teacher._check_saved(model, tmp_path, torch.float32)
    model.model.norm.weight.data[0] = float("nan")
    with pytest.raises(RuntimeError, match="not finite"):
        teacher._check_saved(model, tmp_path, torch.float32)


def test_unknown_sources_and_dtypes_are_answered_with_the_possible_ones(tmp_path):
    with pytest.raises(
        UserError, match="no family 'roberta'; have bert, decoder, gpt2, mpnet, prenorm, tiny"
    ):
        save_model(tmp_path, tmp_path / "out", family="roberta")
    with pytest.raises(ValueError, match="no dtype 'int8' for a model; have bfloat16"):
        save_model("random", tmp_path / "out", "int8")
