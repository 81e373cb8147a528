"""The outcome of each item that a measurement scored, as it lies on disk."""

import json
from pathlib import Path
from typing import Any

from relinear.core import store
from relinear.errors import UserError

FILE = "items.jsonl"  # as a measurement writes them


def read_items(folder: Path | str) -> list[dict[str, Any]]:
    """The items that a stage scored, in their order: {"task", "doc_id", "target", "acc", ...} as the
    measurement wrote them.

    Of a stage's own items.jsonl, or of committed ones, whose scores are rounded, or left out with the
    targets. A field that is null is left out of an item. Raises UserError for a folder without items.
    """
    columns = read_columns(folder)
    rows = (zip(columns, values, strict=True) for values in zip(*columns.values(), strict=True))
    return [{field: value for field, value in row if value is not None} for row in rows]


def read_columns(folder: Path | str) -> dict[str, list[Any]]:
    """The same as columns, None where an item has no value of a field: of many items several times as
    fast."""
    if (columns := columns_of(Path(folder))) is None:
        raise UserError(f"{folder} has no items: neither {FILE} nor items in a store")
    return columns


def columns_of(folder: Path) -> dict[str, list[Any]] | None:
    """As `read_columns`; None for a folder without items."""
    if not (folder / FILE).is_file():
        return store.columns(folder)
    items = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    return {
        field: [item.get(field) for item in items]
        for field in dict.fromkeys(field for item in items for field in item)
    }
