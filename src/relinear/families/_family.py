"""The contract of a family, which every file here fulfils."""

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from relinear import families
from relinear.errors import UserError
from relinear.families._layer import Layout


class Family:
    """Models that are opened or made in one way. Each file has a `Family` of its own, with layouts, a
    `random`, or both."""

    opening: ClassVar[str] = "_opening"  # the file here that opens models: `opened(folders, dtype)`
    layouts: ClassVar[Mapping[type[PreTrainedModel], Layout]] = {}  # where each class keeps its attention

    @property
    def name(self) -> str:
        return type(self).__module__.rpartition(".")[2]

    @property
    def causal(self) -> bool:
        """Whether a token sees only the tokens before it; False: an encoder."""
        return all(layout.swapped.causal for layout in self.layouts.values())

    @property
    def classes(self) -> tuple[type[PreTrainedModel], ...]:
        """The transformers classes that the family covers."""
        return tuple(self.layouts)

    def open(
        self, folders: Sequence[Path], dtype: torch.dtype
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Model and tokenizer out of one folder in the hub's layout, or out of folders in another form that
        the file `opening` reads.

        Raises UserError for folders that hold none of these, and for a model of another family.
        """
        if not self.classes:
            others = ", ".join(f for f in families.available() if families.load(f).classes)
            raise UserError(
                f"models of family {self.name!r} are made from scratch and not opened; families that are"
                f" opened: {others}"
            )
        covered = ", ".join(c.__name__ for c in self.classes)
        # otherwise transformers would decide which class opens it
        if len(folders) == 1 and (config := folders[0] / "config.json").is_file():
            kind = json.loads(config.read_text(encoding="utf-8")).get("model_type")
            if kind not in {c.config_class.model_type for c in self.classes}:
                raise UserError(
                    f"{folders[0]} holds a model of type {kind!r}; family {self.name!r} covers {covered}"
                )
        # By name: an edit of how files are opened makes another teacher, but no other training
        # (relinear.plan.code).
        model, tokenizer = importlib.import_module(f"relinear.families.{self.opening}").opened(folders, dtype)
        if type(model) not in self.classes:
            raise UserError(
                f"{folders[0]} holds a {type(model).__name__}; family {self.name!r} covers {covered}"
            )
        return model, tokenizer

    def positions(self, model: PreTrainedModel) -> int:
        """The tokens of the longest sequence that a model can read."""
        return model.config.max_position_embeddings

    def random(
        self, options: Mapping[str, Any], seed: int, dtype: torch.dtype
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Model and tokenizer made from scratch, the weights from `seed` alone. Raises UserError where the
        family makes none."""
        able = ", ".join(
            f for f in families.available() if type(families.load(f)).random is not Family.random
        )
        raise UserError(f"family {self.name!r} makes no model from scratch; families that do: {able}")
