"""The committed rows of the benchmark of generation, for the tables and sentences of the pages."""

from relinear.draw.costs import Row, read_costs
from relinear.draw.quote import REFERENCE

COSTS = REFERENCE / "efficiency/efficiency.csv"


def costs(model: str, sweep: str) -> list[Row]:
    """The committed rows of generation at a model's shape, as `mistral-7b`, over one axis: `batch`, `length`,
    `input`."""
    return [row for row in read_costs(COSTS) if (row.model, row.sweep) == (model, sweep) and row.ok]


def largest() -> dict[str, Row]:
    """Each run at the largest batch that fits, at Mistral-7B's shape."""
    return {row.run: row for row in sorted(costs("mistral-7b", "batch"), key=lambda row: row.batch)}


def gains() -> dict[str, tuple[float, float]]:
    """Each run's speed of decoding over softmax attention's at its largest batch: at that batch, and at the
    run's own."""
    most = largest()
    teacher = most["teacher"]
    same = {
        row.run: row.decode_tokens_per_second
        for row in costs("mistral-7b", "batch")
        if row.batch == teacher.batch
    }
    speed = teacher.decode_tokens_per_second
    return {run: (same[run] / speed, row.decode_tokens_per_second / speed) for run, row in most.items()}
