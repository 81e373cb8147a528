"""The prompts that are held out, as the stage `prompts` writes them and a metric puts them to a model."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from relinear.errors import UserError

HELDOUT = "heldout.jsonl"  # a line a prompt


class Asked(NamedTuple):
    """A prompt, as a model's tokens, and the right answer."""

    prompt: list[int]
    output: str


def write(folder: Path, prompts: Iterable[Asked]) -> Path:
    """Write prompts into a folder; returns the file."""
    path = folder / HELDOUT
    path.write_text("".join(f"{json.dumps(asked._asdict())}\n" for asked in prompts), encoding="utf-8")
    return path


def read(folder: Path) -> list[Asked]:
    """The prompts of a folder, in their order. Raises UserError where it has none."""
    if not (folder / HELDOUT).is_file():
        raise UserError(
            f"{folder} has no prompts that are held out; possible: data of data.yaml with make: prompts"
        )
    return [Asked(**json.loads(line)) for line in (folder / HELDOUT).read_text(encoding="utf-8").splitlines()]
