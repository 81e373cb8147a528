"""Opens causal language models: a folder in the hub's layout, or a GGUF, which may be cut into parts that lie
in several folders."""

import functools
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import gguf
import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGUFReader, GGUFValueType, GGUFWriter, ReaderField, get_tensor_name_map
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from relinear.errors import UserError
from relinear.folders import (
    UNASKED,
    config_of,
    failing,
    load_whole,
    require_found,
    require_sized,
    silent,
    tokenizer_of,
)
from relinear.weights import require_none

MAGIC = b"GGUF"
PART = re.compile(r"\.gguf$|\.gguf\.|\.bin$")  # model.gguf, model.gguf.part1, part01.bin
SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")  # llama.cpp's: each is a GGUF of some of the tensors
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # transformers' name -> GGUF's
POSSIBLE = (
    "possible are a folder with config.json and safetensors, one with one .gguf, and the folders of a .gguf's"
    " parts in their order: pieces of its bytes (*.gguf.part1, *.bin, ...) or llama.cpp's shards"
    " (*-00001-of-00003.gguf)"
)


def opened(folders: Sequence[Path], dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer out of folders. Raises UserError where they hold no model, parts of several, or a
    damaged one."""
    if len(folders) == 1 and (folders[0] / "config.json").is_file():
        require_sized(folders[0], AutoModelForCausalLM.from_config)
        return load_whole(AutoModelForCausalLM, folders[0], dtype), tokenizer_of(folders[0])
    with whole_gguf(folders) as path, _parsed(reader := _read(path)):
        return _from_gguf(path, reader, dtype)


@contextmanager
def whole_gguf(folders: Sequence[Path]) -> Iterator[Path]:
    """The one GGUF that the folders hold; where it is cut into parts, a temporary file made of them, gone
    afterwards."""
    parts = [path for folder in folders for path in _parts(folder)]
    where = ", ".join(map(str, folders))
    if not parts:
        got = sorted(p.name for folder in folders for p in folder.rglob("*") if p.is_file())
        raise UserError(
            f"no model in {where}: got {', '.join(got[:8]) or 'nothing'}{', ...' if len(got) > 8 else ''};"
            f" {POSSIBLE}"
        )
    names = ", ".join(p.name for p in parts)
    begun = [_begins(path) for path in parts]
    if not begun[0]:
        raise UserError(
            f"no model in {where}: {parts[0].name} is the first of {names}, and does not begin as a GGUF"
            f" does; {POSSIBLE}"
        )
    numbers = [match.groups() for path in parts if (match := SHARD.search(path.name))]
    if numbers and (
        len(numbers) < len(parts)
        or sorted(int(n) for n, _ in numbers) != list(range(1, int(numbers[0][1]) + 1))
    ):
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
    return sorted(
        found,
        key=lambda p: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", str(p.relative_to(folder)))],
    )


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
        # the writer writes these itself
        if name != "general.architecture" and not name.startswith(("GGUF.", "split.")):
            kind = field.types[0]
            writer.add_key_value(
                name, field.contents(), kind, field.types[-1] if kind == GGUFValueType.ARRAY else None
            )
    tensors = [tensor for reader in readers for tensor in reader.tensors]
    for t in tensors:
        writer.add_tensor_info(t.name, t.data.shape, t.data.dtype, t.data.nbytes, t.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for t in tensors:
        writer.write_tensor_data(t.data)
    writer.close()


class _Reader(GGUFReader):
    """gguf's reader, which would read on behind the end of a file: for ever, where an array claims to be
    long.

    The file's bytes are mapped as gguf has them, and cut as a plain array: a slice of a `memmap` takes
    several times as long, and a vocabulary is hundreds of thousands.
    """

    @property
    def data(self) -> np.ndarray:
        return self._bytes

    @data.setter
    def data(self, mapped: np.memmap) -> None:
        self._bytes = mapped.view(np.ndarray)

    def _get(self, offset, dtype, count=1, override_order=None):
        if offset + int(count) * np.dtype(dtype).itemsize > len(self.data):
            raise ValueError(f"a field ends behind byte {len(self.data)}, the last one")
        return super()._get(offset, dtype, count, override_order)


def _read(path: Path) -> GGUFReader:
    """A GGUF's fields and tensors. Raises UserError for one that is damaged, cut short or followed by
    something else."""
    try:
        reader = _Reader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise UserError(
            f"{path.name} is no whole GGUF: {error}; a part is missing, damaged or out of order"
        ) from error
    end = max((t.data_offset + t.n_bytes for t in reader.tensors), default=reader.data_offset)
    if len(reader.data) - end >= reader.alignment:
        raise UserError(
            f"{path.name} is no whole GGUF: its tensors end at byte {end} of {len(reader.data)}; a part is"
            " too much"
        )
    return reader


@contextmanager
def _parsed(reader: GGUFReader) -> Iterator[None]:
    """A context in which transformers reads the one GGUF that is open by `reader`. It would parse the file
    once for each of the configuration, the weights and the tokenizer, and list the names of all tensors once
    for each module of the model."""
    names = functools.cache(get_tensor_name_map)
    with (
        patch.object(gguf, "GGUFReader", lambda *_, **__: reader),
        patch.object(gguf, "get_tensor_name_map", names),
    ):
        yield


def _require_whole(path: Path, reader: GGUFReader) -> tuple[Mapping[str, ReaderField], PreTrainedConfig]:
    """The fields of a GGUF, and the configuration of the model that they describe. Raises UserError unless it
    has each tensor of that, and no other.

    `output.weight` may be missing: the head is tied to the embeddings then, as in llama.cpp.
    """
    fields, tensors = reader.fields, {tensor.name: tensor.n_elements for tensor in reader.tensors}
    try:
        kind = fields["general.architecture"].contents()
        blocks = int(fields[f"{kind}.block_count"].contents())
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(f"{path.name} does not say what model it holds: {error!r}") from None
    architectures = {name: architecture for architecture, name in MODEL_ARCH_NAMES.items()}
    if kind not in architectures:
        raise UserError(
            f"{path.name} holds a model of architecture {str(kind)[:80]!r}, which gguf does not know"
        )
    if not 0 < blocks <= len(tensors):
        raise UserError(f"{path.name}: {kind}.block_count is {blocks}, and there are {len(tensors)} tensors")
    config = config_of(path.parent, gguf_file=path.name)
    with failing(path.name), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    names, expected = get_tensor_name_map(architectures[kind], blocks), {}
    for name, weight in model.state_dict().items():
        stem, _, end = name.rpartition(".")
        expected[f"{names.get_name(stem)}.{end}"] = weight.numel()
    if "output.weight" not in tensors:
        expected.pop("output.weight", None)
    require_none(
        path.name,
        {
            "missing": expected.keys() - tensors.keys(),
            "unexpected": tensors.keys() - expected.keys(),
            "misshapen": {
                f"{n} of {size} numbers instead of {expected[n]}"
                for n, size in tensors.items()
                if size != expected.get(n, size)
            },
        },
    )
    return fields, config


def _from_gguf(
    path: Path, reader: GGUFReader, dtype: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    fields, config = _require_whole(path, reader)
    # Dequantised explicitly: otherwise the model could be neither cast nor saved.
    how = {
        "config": config,
        "gguf_file": path.name,
        "quantization_config": GgufConfig(dequantize=True),
        "dtype": dtype,
    }
    with failing(path.name), silent():
        model, found = AutoModelForCausalLM.from_pretrained(
            path.parent, **how, output_loading_info=True, ignore_mismatched_sizes=True, **UNASKED
        )
    require_found(path, found)
    tokenizer = tokenizer_of(path.parent, gguf_file=path.name)
    for kind, theirs in SPECIAL.items():
        # transformers 5.17 takes the token that begins a turn for the one that ends it, and its id is saved
        # beside the name.
        if (field := fields.get(f"tokenizer.ggml.{theirs}_token_id")) is not None:
            tokenizer.init_kwargs.pop(f"{kind}_token_id", None)
            setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(field.contents()))
    if (pre := fields.get("tokenizer.ggml.pre")) is not None and pre.contents() == "smollm":
        # transformers drops this split when it converts: "  12" would become other tokens than in training.
        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    return model, tokenizer
