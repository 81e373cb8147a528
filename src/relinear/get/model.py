"""The teacher: whatever form it comes in, saved once as a plain transformers folder (safetensors, tokenizer).

Three sources: a GGUF file (dequantised), a folder in the hub's layout, and `"random"`, a two-layer Llama for
the smoke scale, of awkward shapes on purpose (grouped KV heads, a head count that is no power of two).
"""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from gguf import GGUFReader
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from relinear.errors import UserError
from relinear.get import assets

if TYPE_CHECKING:
    from relinear.stage import Context

DTYPES = ("bfloat16", "float16", "float32")
PROBE_TOKENS = 8
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # transformers' name -> GGUF's


def save_teacher(source: Path | Literal["random"], out: Path, dtype: str = "bfloat16", *, seed: int = 0) -> dict:
    """Save the teacher at `source` into the folder `out`; return its shape (layers, heads, vocabulary, ...).

    `source` is a folder that holds one `*.gguf`, a folder in the hub's layout (`config.json`, safetensors),
    or `"random"` (initialised from `seed`). `out` loads with `AutoModelForCausalLM.from_pretrained(out)` and
    `AutoTokenizer.from_pretrained(out)`. Choose a dtype by `dtype=` there: `model.to(dtype)` would round the
    rotary frequencies too.

    Raises `ValueError` for an unknown source or dtype, and `RuntimeError` if the folder, loaded back, does
    not give finite logits equal to those of the model that was saved.
    """
    if dtype not in DTYPES:
        raise ValueError(f"no dtype {dtype!r} for the teacher; have {', '.join(DTYPES)}")
    torch_dtype = getattr(torch, dtype)
    if source == "random":
        model, tokenizer = _random(torch_dtype, seed)
    else:
        model, tokenizer = _from_folder(Path(source), torch_dtype)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    _check_saved(model, out, torch_dtype)
    config = model.config
    return {
        "parameters": model.num_parameters(),
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "max_positions": config.max_position_embeddings,
        "dtype": dtype,
    }


def _from_folder(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if (folder / "config.json").is_file():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return model, AutoTokenizer.from_pretrained(folder)
    ggufs = sorted(folder.rglob("*.gguf"))
    if len(ggufs) != 1:
        raise ValueError(
            f"no teacher in {folder}: got {len(ggufs)} .gguf files and no config.json; "
            "possible are one .gguf, a folder with config.json and safetensors, or 'random'"
        )
    return _from_gguf(ggufs[0], dtype)


def _from_gguf(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    # Dequantised on request, or the model could be neither cast nor saved.
    unpack = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype, quantization_config=unpack)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    fields = GGUFReader(path).fields
    for kind, theirs in SPECIAL.items():
        # transformers 5.17 takes the token that begins a turn for the one that ends it, and its id is saved beside the name.
        if (field := fields.get(f"tokenizer.ggml.{theirs}_token_id")) is not None:
            tokenizer.init_kwargs.pop(f"{kind}_token_id", None)
            setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(field.contents()))
    if fields["tokenizer.ggml.pre"].contents() == "smollm":
        # transformers drops this split when it converts: "  12" would become other tokens than in training.
        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    return model, tokenizer


def _random(dtype: torch.dtype, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        # Five times the usual: attention that is not uniform, so that methods differ from one another on it.
        initializer_range=0.1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        weights = LlamaForCausalLM(config).state_dict()
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(weights)
    return model.eval(), tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, 256 of them, after `<|endoftext|>` (bos) and `<|im_end|>` (eos, padding).

    Like SmolLM2's it adds no special token by itself and separates documents with `<|endoftext|>`.
    """
    special = ["<|endoftext|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(special + alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=special[0], eos_token=special[1], pad_token=special[1])
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}assistant: "
    return tokenizer


@torch.inference_mode()
def _check_saved(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    probe = torch.arange(PROBE_TOKENS)[None] * (model.config.vocab_size // PROBE_TOKENS)  # [1, T], whole vocabulary
    kept = model(input_ids=probe).logits
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)(input_ids=probe).logits
    if not torch.isfinite(kept).all():
        raise RuntimeError(f"the teacher's logits are not finite on {PROBE_TOKENS} tokens")
    if not torch.equal(kept, loaded):
        worst = (kept.float() - loaded.float()).abs().max().item()
        raise RuntimeError(f"the teacher loaded from {folder} gives other logits than were saved: off by {worst:g}")


def run(context: "Context") -> dict:
    """The teacher stage: the scale's teacher, saved once as a plain transformers folder."""
    teacher = context.settings["teacher"]
    source = "random" if teacher["kind"] == "random" else assets.obtain(teacher["asset"])
    shape = save_teacher(source, context.out)
    if shape["max_positions"] != teacher["max_positions"]:
        raise UserError(f"the scale says max_positions: {teacher['max_positions']}; this teacher has {shape['max_positions']}")
    return shape
