"""The rows of the kernels' benchmark, and the table of their ratios."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from relinear.draw.beside import lines_of
from relinear.draw.claims import Look, Value
from relinear.draw.render import titled
from relinear.plan.claims import Point

COLUMNS = (
    "op",
    "provider",
    "shape",
    "B",
    "T",
    "H",
    "Hkv",
    "D",
    "F",
    "mode",
    "ms",
    "floor_ms",
    "gib",
    "first_call_s",
    "error",
    "valid",
    "note",
    "commit",
)
OURS, CHUNKED, FULL, SOFTMAX = "relinear", "torch chunked", "SDPA causal", "softmax attention"
Row = dict[str, str]
Rows = list[Row]


def read(path: Path) -> Rows:
    """The rows that have a time and no wrong output. Rows from before there was a column `commit` have an
    empty one."""
    return [{"commit": "", **row} for row in lines_of(path) if row["ms"] and row["valid"] in ("", "True")]


def look_at(path: Path, shape: Mapping[str, str], names: Mapping[str, tuple[str, str]]) -> Look:
    """The function by which claims read rows of a shape. `names`: a row's name in a point -> its op and
    provider.

    Times are medians of many replays, whose spread is far below the bounds, so they are compared without
    errors.
    """
    rows = [row for row in read(path) if all(row[column] == value for column, value in shape.items())]

    def look(point: Point) -> Value | str:
        if point.row not in names:
            return f"no row {point.row}; have {', '.join(names)}"
        where = {
            "op": names[point.row][0],
            "provider": names[point.row][1],
            **{key: str(value) for key, value in point.at.items()},
        }
        name = " at ".join(filter(None, (point.row, point.place)))
        found = next((row for row in rows if all(row[key] == value for key, value in where.items())), None)
        if found is None or not found[point.column or "ms"]:
            return f"{name}: not measured"
        return Value(float(found[point.column or "ms"]), 0.0, name)

    return look


def newest(*sessions: Rows) -> Rows:
    """The rows of several sessions of one GPU, latest first. Of an op at a shape and in a mode only the first
    session that measured it counts.

    So a time of ours, its peers' and softmax attention's are compared within a session wherever one has them
    all.
    """
    place = lambda row: (row["op"], row["shape"], row["mode"])  # noqa: E731
    counts = {place(row): i for i, rows in reversed(list(enumerate(sessions))) for row in rows}
    return [row for i, rows in enumerate(sessions) for row in rows if counts[place(row)] == i]


def earlier(row: Row, rows: Sequence[Row]) -> bool:
    """Whether a row was measured at another commit than most rows."""
    commits = [other["commit"] for other in rows]
    return "measured at " in row["note"] or row["commit"] != max(set(commits), key=commits.count)


def ratios(rows: Rows) -> str:
    """Markdown: each row of ours over its floor, beside its fastest peer and full softmax attention; then
    what has no form of ours.

    The torch forms of ours are no peers. Where softmax attention of the same shape was measured, decoding is
    held against one token of it.
    """
    table = titled(compare(rows), align="left")
    ours = {row["op"] for row in rows if row["provider"] == OURS}
    scale = [row for row in rows if row["op"] not in ours]
    named = [{"op": f"{row['op']}: {row['provider']}{_mark(row, rows)}", **_time(row)} for row in scale]
    scales = titled(named, align="left")
    marks = {
        "\\*": (any(earlier(row, rows) for row in rows), "measured at another commit than most rows"),
        "+": (
            any(row["commit"].endswith("+") for row in rows),
            "measured in a tree with uncommitted changes",
        ),
        "\u2020": (
            any("launched" in row["note"] for row in rows),
            "kernel by kernel: launches cost what they cost there",
        ),
    }
    notes = "".join(f"\n{mark} {meaning}  " for mark, (true, meaning) in marks.items() if true)
    return (
        f"{table}\n\nFor scale, operations that have no kernel of ours:\n\n{scales}\n"
        + notes
        + "\n" * bool(notes)
    )


def compare(rows: Rows) -> Rows:
    """For each row of ours its time, its fastest peer, and softmax attention, by titles of a table."""
    return [_compared(row, rows) for row in rows if row["provider"] == OURS]


def _compared(row: Row, rows: Rows) -> Row:
    at = [other for other in rows if all(other[c] == row[c] for c in ("shape", "mode"))]
    peers = [peer for peer in at if peer["op"] == row["op"] and peer["provider"] not in (OURS, CHUNKED)]
    best = min(peers, key=lambda peer: float(peer["ms"]), default=None)
    full = next((other for other in reversed(at) if SOFTMAX in other["op"]), None)
    return {
        "op": row["op"] + _mark(row, rows),
        **_time(row),
        "fastest peer": best["provider"] + _mark(best, rows) if best else "",
        "its ms": f"{float(best['ms']):.4g}" if best else "",
        "ours is faster": _ratio(best, row) if best else "",
        "softmax attention, ms": f"{float(full['ms']):.4g}{_mark(full, rows)}" if full else "",
        "faster than softmax": _ratio(full, row) if full else "",
    }


def _ratio(slow: Row, fast: Row, of: str = "ms") -> str:
    return f"{float(slow['ms']) / float(fast[of]):.2f}x"


def _time(row: Row) -> Row:
    """Shape, mode, milliseconds and how many times the floor they are."""
    once = "\u2020" if "launched" in row["note"] else ""
    return {
        "shape": row["shape"],
        "mode": row["mode"],
        "ms": f"{float(row['ms']):.4g}{once}",
        "over its floor": _ratio(row, row, of="floor_ms"),
    }


def _mark(row: Row, rows: Iterable[Row]) -> str:
    """A star for a row of another commit, a plus for one of a tree with uncommitted changes."""
    return "*" * earlier(row, list(rows)) + "+" * row["commit"].endswith("+")
