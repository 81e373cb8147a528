"""The outcome of each item that a measurement scored, as it lies on disk."""

import json
import lzma
from pathlib import Path
from typing import Any

from relinear.errors import UserError

PLAIN, PACKED = "items.jsonl", "items.json.xz"  # as a measurement writes them, and as they are committed


def read_items(folder: Path | str) -> list[dict[str, Any]]:
    """The items that a stage scored, in their order: {"task", "doc_id", "target", "acc", ...} as the measurement wrote them.

    Of a stage's own items.jsonl, or of committed ones, whose scores are rounded, or left out with the targets. A field that is null is left out of
    an item. Raises UserError for a folder without items.
    """
    columns = read_columns(folder)
    rows = (zip(columns, values, strict=True) for values in zip(*columns.values(), strict=True))
    return [{field: value for field, value in row if value is not None} for row in rows]


def read_columns(folder: Path | str) -> dict[str, list[Any]]:
    """The same as columns, None where an item has no value of a field: of many items several times as fast."""
    plain, packed = Path(folder) / PLAIN, Path(folder) / PACKED
    if plain.is_file():
        items = [json.loads(line) for line in plain.read_text().splitlines()]
        return {field: [item.get(field) for item in items] for field in dict.fromkeys(field for item in items for field in item)}
    if packed.is_file():
        return json.loads(lzma.decompress(packed.read_bytes()))
    raise UserError(f"{folder} has no items: neither {PLAIN} nor {PACKED}")
