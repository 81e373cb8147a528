"""What guessing scores in a column of a table."""

from collections.abc import Mapping
from typing import Any

# Percent, of tasks that ask for one of several choices.
CHANCE = {
    "piqa": 50.0,
    "winogrande": 50.0,
    "boolq": 50.0,
    "arc_easy": 25.0,
    "arc_challenge": 25.0,
    "hellaswag": 25.0,
    "mmlu": 25.0,
    "mmlu_continuation": 25.0,
    "qasper": 50.0,
}


def chance_of(columns: Mapping[str, Any], name: str) -> float | None:
    """What guessing scores in the column of that name, in percent: in its task, or in the mean of the columns
    that it is the mean of. None where that is unknown."""
    column = columns[name]
    if column.mean:
        parts = [chance for part in column.mean if (chance := chance_of(columns, part)) is not None]
        return sum(parts) / len(parts) if len(parts) == len(column.mean) else None
    return CHANCE.get(column.of or "") if column.unit == "percent" else None
