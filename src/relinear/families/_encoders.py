"""Opens encoders: a folder in the hub's layout, which may lie within another, or a zip of one, cut into parts
that lie in several folders."""

import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from relinear.errors import UserError
from relinear.folders import load_whole, require_sized, tokenizer_of

PART = re.compile(r"\.zip(\.\d+)?$")  # model.zip, model.zip.001
# no model here reads it, and not every encoder is saved with one
POOLER = ("pooler.dense.weight", "pooler.dense.bias")
# Of the tasks that an encoder was trained or finetuned on: masked words and following sentences (BERT, MPNet,
# RoBERTa), and classes.
HEADS = frozenset(
    {
        *(
            f"cls.predictions.{name}"
            for name in (
                "bias",
                "decoder.weight",
                "decoder.bias",
                "transform.dense.weight",
                "transform.dense.bias",
            )
        ),
        *(f"cls.predictions.transform.LayerNorm.{name}" for name in ("weight", "bias", "gamma", "beta")),
        "cls.seq_relationship.weight",
        "cls.seq_relationship.bias",
        *(
            f"lm_head.{name}"
            for name in (
                "bias",
                "decoder.weight",
                "decoder.bias",
                "dense.weight",
                "dense.bias",
                "layer_norm.weight",
                "layer_norm.bias",
            )
        ),
        *(
            f"classifier.{name}"
            for name in ("weight", "bias", "dense.weight", "dense.bias", "out_proj.weight", "out_proj.bias")
        ),
    }
)
POSSIBLE = (
    "possible are a folder with config.json and safetensors, and the folders of a zip of one, whose parts"
    " (*.zip.001, ...) are in their order"
)


def opened(folders: Sequence[Path], dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer out of folders. Raises UserError where they hold no encoder, several, or a part of
    one."""
    with _whole(folders) as folder:
        require_sized(folder, AutoModel.from_config)
        model = load_whole(AutoModel, folder, dtype, absent=POOLER, beside=HEADS)
        return model.eval(), tokenizer_of(folder)


@contextmanager
def _whole(folders: Sequence[Path]) -> Iterator[Path]:
    """The one folder with config.json and safetensors below the folders; where that is a zip, a temporary
    one, gone afterwards."""
    found = _models(folders)
    if len(found) == 1:
        yield found[0]
        return
    where, parts = (
        ", ".join(map(str, folders)),
        [path for folder in folders for path in sorted(folder.rglob("*")) if PART.search(path.name)],
    )
    if found or not parts:
        got = [str(p.name) for p in found] or sorted(
            p.name for folder in folders for p in folder.rglob("*") if p.is_file()
        )[:8]
        raise UserError(f"{where} hold {len(found)} models: got {', '.join(got) or 'nothing'}; {POSSIBLE}")
    with tempfile.TemporaryDirectory(prefix="relinear-") as scratch:
        joined, unpacked = Path(scratch) / "model.zip", Path(scratch) / "model"
        with joined.open("wb") as whole:
            for part in parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, whole, 1 << 24)
        try:
            with zipfile.ZipFile(joined) as archive:
                archive.extractall(
                    unpacked, [n for n in archive.namelist() if n.endswith((".json", ".txt", ".safetensors"))]
                )
        except zipfile.BadZipFile as error:
            names = ", ".join(p.name for p in parts)
            raise UserError(
                f"{names} are no whole zip: {error}; a part is missing, damaged or out of order"
            ) from error
        found = _models([unpacked])
        if len(found) != 1:
            raise UserError(f"the zip in {where} holds {len(found)} models; {POSSIBLE}")
        yield found[0]


def _models(folders: Sequence[Path]) -> list[Path]:
    """Folders that hold a model's configuration beside its weights."""
    return [
        path.parent
        for folder in folders
        for path in sorted(folder.rglob("config.json"))
        if list(path.parent.glob("*.safetensors"))
    ]
