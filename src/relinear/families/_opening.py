"""Opens causal language models: a folder in the hub's layout, or a GGUF, which may be cut into parts that lie in several folders."""

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from relinear.errors import UserError
from relinear.folders import UNASKED, config_of, tokenizer_of

MAGIC = b"GGUF"
PART = re.compile(r"\.gguf$|\.gguf\.|\.bin$")  # model.gguf, model.gguf.part1, part01.bin
SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")  # llama.cpp's: each is a GGUF of some of the tensors
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # transformers' name -> GGUF's
POSSIBLE = (
    "possible are a folder with config.json and safetensors, one with one .gguf, and the folders of a .gguf's parts in their order: "
    "pieces of its bytes (*.gguf.part1, *.bin, ...) or llama.cpp's shards (*-00001-of-00003.gguf)"
)


def opened(folders: Sequence[Path], dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer out of folders. Raises UserError where they hold no model, parts of several, or a damaged one."""
    if len(folders) == 1 and (folders[0] / "config.json").is_file():
        config_of(folders[0])  # raises where the folder needs code
        return AutoModelForCausalLM.from_pretrained(folders[0], dtype=dtype, **UNASKED), tokenizer_of(folders[0])
    with whole_gguf(folders) as path:
        return _from_gguf(path, dtype)


@contextmanager
def whole_gguf(folders: Sequence[Path]) -> Iterator[Path]:
    """The one GGUF that the folders hold; where it is cut into parts, a temporary file made of them, gone afterwards."""
    parts = [path for folder in folders for path in _parts(folder)]
    where = ", ".join(map(str, folders))
    if not parts:
        got = sorted(p.name for folder in folders for p in folder.rglob("*") if p.is_file())
        raise UserError(f"no model in {where}: got {', '.join(got[:8]) or 'nothing'}{', ...' if len(got) > 8 else ''}; {POSSIBLE}")
    names = ", ".join(p.name for p in parts)
    begun = [_begins(path) for path in parts]
    if not begun[0]:
        raise UserError(f"no model in {where}: {parts[0].name} is the first of {names}, and does not begin as a GGUF does; {POSSIBLE}")
    numbers = [match.groups() for path in parts if (match := SHARD.search(path.name))]
    if numbers and (len(numbers) < len(parts) or sorted(int(n) for n, _ in numbers) != list(range(1, int(numbers[0][1]) + 1))):
        raise UserError(f"the parts in {where} are not 1 to {int(numbers[0][1])}: got {names}; {POSSIBLE}")
    if len(parts) == 1 and parts[0].suffix == ".gguf":
        yield parts[0]
        return
    if sum(begun) > 1 and not (all(begun) and numbers):
        raise UserError(f"the folders {where} hold {sum(begun)} GGUF files: got {names}; {POSSIBLE}")
    with tempfile.TemporaryDirectory(prefix="relinear-") as scratch:
        path = Path(scratch) / "model.gguf"
        (_join_shards if len(parts) == sum(begun) > 1 else _join_bytes)(parts, path)
        yield path


def _parts(folder: Path) -> list[Path]:
    """A folder's files that may be a GGUF or a part of one; part10 comes after part9."""
    found = (p for p in folder.rglob("*") if p.is_file() and PART.search(p.name))
    return sorted(found, key=lambda p: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", str(p.relative_to(folder)))])


def _begins(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _join_bytes(pieces: Sequence[Path], path: Path) -> None:
    with path.open("wb") as whole:
        for piece in pieces:
            with piece.open("rb") as file:
                shutil.copyfileobj(file, whole, 1 << 24)


def _join_shards(shards: Sequence[Path], path: Path) -> None:
    """The first shard's fields and the tensors of all as one GGUF."""
    readers = [_read(shard) for shard in sorted(shards, key=lambda p: SHARD.search(p.name)[1])]
    fields = readers[0].fields
    writer = GGUFWriter(path, fields["general.architecture"].contents())
    for name, field in fields.items():
        if name != "general.architecture" and not name.startswith(("GGUF.", "split.")):  # the writer writes these itself
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind == GGUFValueType.ARRAY else None)
    tensors = [tensor for reader in readers for tensor in reader.tensors]
    for t in tensors:
        writer.add_tensor_info(t.name, t.data.shape, t.data.dtype, t.data.nbytes, t.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for t in tensors:
        writer.write_tensor_data(t.data)
    writer.close()


def _read(path: Path) -> GGUFReader:
    """A GGUF's fields and tensors. Raises UserError for one that is damaged, cut short or followed by something else."""
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise UserError(f"{path.name} is no whole GGUF: {error}; a part is missing, damaged or out of order") from error
    end = max((t.data_offset + t.n_bytes for t in reader.tensors), default=reader.data_offset)
    if len(reader.data) - end >= reader.alignment:
        raise UserError(f"{path.name} is no whole GGUF: its tensors end at byte {end} of {len(reader.data)}; a part is too much")
    return reader


def _from_gguf(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    fields = _read(path).fields
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    # Dequantised explicitly: otherwise the model could be neither cast nor saved.
    unpack = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype, quantization_config=unpack, **UNASKED)
    tokenizer = tokenizer_of(path.parent, gguf_file=path.name)
    for kind, theirs in SPECIAL.items():
        # transformers 5.17 takes the token that begins a turn for the one that ends it, and its id is saved beside the name.
        if (field := fields.get(f"tokenizer.ggml.{theirs}_token_id")) is not None:
            tokenizer.init_kwargs.pop(f"{kind}_token_id", None)
            setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(field.contents()))
    if (pre := fields.get("tokenizer.ggml.pre")) is not None and pre.contents() == "smollm":
        # transformers drops this split when it converts: "  12" would become other tokens than in training.
        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    return model, tokenizer
