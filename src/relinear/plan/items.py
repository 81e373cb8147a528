"""The outcome of each item that a measurement scored, as it lies on disk."""

import json
import lzma
from pathlib import Path

from relinear.errors import UserError

PLAIN, PACKED = "items.jsonl", "items.json.xz"  # as a measurement writes them, and as they are committed


def read_items(folder: Path | str) -> list[dict]:
    """The items that a stage scored, in their order: {"task", "doc_id", "target", "acc", ...} as the measurement wrote them.

    Of a stage's own items.jsonl, or of committed ones, whose scores are rounded, or left out with the targets. A field that is null is left out of
    an item. Raises UserError for a folder without items.
    """
    folder = Path(folder)
    plain, packed = folder / PLAIN, folder / PACKED
    if plain.is_file():
        items = [json.loads(line) for line in plain.read_text().splitlines()]
    elif packed.is_file():
        columns = json.loads(lzma.decompress(packed.read_bytes()))
        items = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    else:
        raise UserError(f"{folder} has no items: neither {PLAIN} nor {PACKED}")
    return [{field: value for field, value in item.items() if value is not None} for item in items]
