"""Labelled texts as their stage leaves them: written by whatever makes some, read by trainings and scores."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from relinear.files import sha256
from relinear.get.padded import Padded


class Labelled(Padded):
    """A split as `Padded` texts with labels. The last `validation` texts of the training split are kept
    aside."""

    def __init__(self, folder: Path, split: str, seq_len: int):
        super().__init__(folder, split, seq_len)
        self.labels = np.load(Path(folder) / f"{split}_labels.npy")
        facts = json.loads((Path(folder) / "metrics.json").read_text())
        self.classes, self.scores, self.validation = facts["classes"], facts["scores"], facts["validation"]

    def labels_of(self, chosen: Sequence[int]) -> Tensor:
        """Their labels ``[B]``: classes, or numbers in float32."""
        return torch.from_numpy(self.labels[list(chosen)])


def write(
    out: Path,
    split: str,
    rows: Sequence[Mapping[str, Sequence[int]]],
    labels: Sequence[float],
    classes: int,
    files: dict[str, str],
) -> dict:
    """Write a split's `input_ids` and `token_type_ids`, where each text ends, and its labels. Returns how
    many texts and tokens there are."""
    flat = {
        "tokens": np.concatenate([np.asarray(row["input_ids"], np.int32) for row in rows]),
        "types": np.concatenate([np.asarray(row["token_type_ids"], np.uint8) for row in rows]),
        "ends": np.cumsum([len(row["input_ids"]) for row in rows], dtype=np.int64),
        "labels": np.array(labels, np.int64 if classes else np.float32),
    }
    for kind, values in flat.items():
        path = out / f"{split}_{kind}.npy"
        np.save(path, values)
        files[path.name] = sha256(path)
    return {"texts": len(rows), "tokens": len(flat["tokens"])}
