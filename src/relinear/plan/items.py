"""The outcome of each item that a measurement scored, as it lies on disk."""

import json
import lzma
from pathlib import Path
from typing import Any

from relinear.errors import UserError

LARGEST = 1 << 30  # bytes of unpacked items
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
        return _unpacked(packed)
    raise UserError(f"{folder} has no items: neither {PLAIN} nor {PACKED}")


def _unpacked(path: Path) -> dict[str, list[Any]]:
    """The columns of committed items. Raises UserError for a file that is not such, and for more than `LARGEST` bytes."""
    unpacker = lzma.LZMADecompressor()
    try:
        text = unpacker.decompress(path.read_bytes(), LARGEST)
        if not unpacker.eof:
            raise UserError(f"{path} unpacks to more than {LARGEST} bytes, or was cut; items are smaller")
        columns = json.loads(text)
    except (lzma.LZMAError, ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(columns, dict) or not all(isinstance(values, list) for values in columns.values()):
        raise UserError(f"{path} must hold the columns of items, a list each")
    return columns
