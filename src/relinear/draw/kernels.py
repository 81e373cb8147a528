"""The rows of the kernels' benchmark, the table of their ratios, and the tables of docs/kernels.md from the committed rows."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from relinear.draw.claims import Look, Value
from relinear.draw.render import markdown
from relinear.plan.claims import Point
from relinear.records import read_committed

COLUMNS = (
    "op", "provider", "shape", "B", "T", "H", "Hkv", "D", "F", "mode", "ms", "floor_ms", "gib", "first_call_s", "error", "valid", "note", "commit"
)  # fmt: skip
OURS, CHUNKED, FULL, SOFTMAX = "relinear", "torch chunked", "SDPA causal", "softmax attention"
HEAD = ("op", "shape", "mode", "ms", "over its floor", "fastest peer", "its ms", "ours is faster", "softmax attention, ms", "faster than softmax")
Rows = list[dict[str, str]]


def read(path: Path) -> Rows:
    """The rows that have a time and no wrong output. Rows from before there was a column `commit` have an empty one."""
    rows = csv.DictReader(read_committed(path).splitlines())
    return [{"commit": "", **row} for row in rows if row["ms"] and row["valid"] in ("", "True")]


def look_at(path: Path, shape: Mapping[str, str], names: Mapping[str, tuple[str, str]]) -> Look:
    """The function by which claims read rows of a shape. `names`: a row's name in a point -> its op and provider.

    Times are medians of many replays, whose spread is far below the bounds, so they are compared without errors.
    """
    rows = [row for row in read(path) if all(row[column] == value for column, value in shape.items())]

    def look(point: Point) -> Value | str:
        if point.row not in names:
            return f"no row {point.row}; have {', '.join(names)}"
        where = {"op": names[point.row][0], "provider": names[point.row][1], **{key: str(value) for key, value in point.at.items()}}
        name = " at ".join(filter(None, (point.row, point.place)))
        found = next((row for row in rows if all(row[key] == value for key, value in where.items())), None)
        if found is None or not found[point.column or "ms"]:
            return f"{name}: not measured"
        return Value(float(found[point.column or "ms"]), 0.0, name)

    return look


def newest(*sessions: Rows) -> Rows:
    """The rows of several sessions of one GPU, latest first. Of an op at a shape and in a mode only the first session that measured it counts.

    So a time of ours, its peers' and softmax attention's are compared within a session wherever one has them all.
    """
    place = lambda row: (row["op"], row["shape"], row["mode"])  # noqa: E731
    counts = {place(row): i for i, rows in reversed(list(enumerate(sessions))) for row in rows}
    return [row for i, rows in enumerate(sessions) for row in rows if counts[place(row)] == i]


def earlier(row: dict[str, str], rows: Sequence[dict[str, str]]) -> bool:
    """Whether a row was measured at another commit than most rows."""
    commits = [other["commit"] for other in rows]
    return "measured at " in row["note"] or row["commit"] != max(set(commits), key=commits.count)


def ratios(rows: Rows) -> str:
    """Markdown: each row of ours over its floor, beside its fastest peer and full softmax attention; then what has no form of ours.

    The torch forms of ours are no peers. Where softmax attention of the same shape was measured, decoding is held against one token of it.
    """
    table = markdown(HEAD, compare(rows), align="left")
    ours = {row["op"] for row in rows if row["provider"] == OURS}
    scale = [row for row in rows if row["op"] not in ours]
    scales = markdown(HEAD[:5], [[_name(row, rows), *_time(row)] for row in scale], align="left")
    marks = {
        "\\*": (any(earlier(row, rows) for row in rows), "measured at another commit than most rows"),
        "+": (any(row["commit"].endswith("+") for row in rows), "measured in a tree with uncommitted changes"),
        "\u2020": (any("launched" in row["note"] for row in rows), "kernel by kernel: launches cost what they cost there"),
    }
    notes = "".join(f"\n{mark} {meaning}  " for mark, (true, meaning) in marks.items() if true)
    return f"{table}\n\nFor scale, operations that have no kernel of ours:\n\n{scales}\n" + notes + "\n" * bool(notes)


def compare(rows: Rows) -> list[list[str]]:
    """The cells of `HEAD` for each row of ours: its time, its fastest peer, and softmax attention."""
    softmax = {(row["shape"], row["mode"]): row for row in rows if SOFTMAX in row["op"]}
    return [_cells(row, rows, softmax) for row in rows if row["provider"] == OURS]


def _cells(row: dict[str, str], rows: Rows, softmax: dict[tuple[str, str], dict[str, str]]) -> list[str]:
    """A row of ours: its time, its fastest peer, and softmax attention."""
    ms, peers = float(row["ms"]), [r for r in rows if r["provider"] not in (OURS, CHUNKED) and all(r[c] == row[c] for c in ("op", "shape", "mode"))]
    cells = [row["op"] + _mark(row, rows), *_time(row), "", "", "", "", ""]
    if peers:
        best = min(peers, key=lambda r: float(r["ms"]))
        cells[5:8] = [best["provider"] + _mark(best, rows), f"{float(best['ms']):.4g}", f"{float(best['ms']) / ms:.2f}x"]
    if full := softmax.get((row["shape"], row["mode"])):
        cells[8:] = [f"{float(full['ms']):.4g}" + _mark(full, rows), f"{float(full['ms']) / ms:.2f}x"]
    return cells


def _time(row: dict[str, str]) -> list[str]:
    """Shape, mode, milliseconds and how many times the floor they are."""
    once = "\u2020" if "launched" in row["note"] else ""
    return [row["shape"], row["mode"], f"{float(row['ms']):.4g}{once}", f"{float(row['ms']) / float(row['floor_ms']):.2f}x"]


def _name(row: dict[str, str], rows: Rows) -> str:
    return f"{row['op']}: {row['provider']}{_mark(row, rows)}"


def _mark(row: dict[str, str], rows: Iterable[dict[str, str]]) -> str:
    """A star for a row of another commit, a plus for one of a tree with uncommitted changes."""
    return "*" * earlier(row, list(rows)) + "+" * row["commit"].endswith("+")


# --- tables of docs/kernels.md; `reference` is the folder of committed results ---

SHAPE = "B16 T2048 H32/32 D128 F64"  # of Lizard Figure 6


def committed(reference: Path) -> Rows:
    """The committed rows of an H200, the later session's where both have an op."""
    return newest(*(read(reference / "kernels" / folder / "bench.csv") for folder in ("peers", "")))


def committed_h100(reference: Path) -> Rows:
    """The committed rows of an H100, of all shapes, with few peers."""
    return read(reference / "kernels/peers_h100/bench.csv")


def fastest_peers(reference: Path) -> str:
    """Each op at the shape of Lizard Figure 6: time, floor, fastest peer, softmax attention."""
    rows = [row for row in committed(reference) if row["shape"] == SHAPE and row["mode"] != "stage 1"]
    return markdown([HEAD[0], *HEAD[2:]], [[op, *cells] for op, _, *cells in compare(rows)])


def decoding_steps(reference: Path) -> str:
    """One token of every op beside one of softmax attention over 2048 positions, against the batch; each head has keys of its own."""
    rows = [row for row in committed_h100(reference) if row["mode"] == "decode" and row["H"] == row["Hkv"]]
    times = {(row["op"].removeprefix("decode_step "), int(row["B"])): float(row["ms"]) for row in rows}
    batches, full = sorted({batch for _, batch in times}), "softmax attention, 2048 positions"
    cells = [[op, *(_beside(times[op, batch], times[full, batch]) for batch in batches)] for op in dict.fromkeys(op for op, _ in times)]
    return markdown(["one token of", *(f"batch of {batch}, ms" for batch in batches)], cells)


def peers(reference: Path) -> str:
    """Every peer of each op at the shape of Lizard Figure 6 that was measured in the later session, and how many times as long it takes."""
    rows = [row for row in read(reference / "kernels/peers/bench.csv") if row["op"] != SOFTMAX]
    ours = {(row["op"], row["mode"]): float(row["ms"]) for row in rows if row["provider"] == OURS}
    found = []
    for row in (row for row in rows if row["provider"] not in (OURS, CHUNKED)):
        own, theirs = ours[row["op"], row["mode"]], float(row["ms"])
        found.append([row["op"], row["mode"], f"{own:.3f}", row["provider"], f"{theirs:.3f}", f"{theirs / own:.2f}x"])
    return markdown(["op", "mode", "ms", "peer", "its ms", "ours is faster"], found)


def others(reference: Path) -> str:
    """Operations of others that have no kernel of ours, beside linear attention and softmax attention at the shape of Lizard Figure 6."""
    rows = [row for row in committed_h100(reference) if row["shape"] == SHAPE and row["mode"] != "stage 1"]
    beside = (SOFTMAX, "linear_attention")
    shown = [row for row in rows if "GDN" in row["op"] or "KDA" in row["op"] or (row["op"] in beside and row["provider"] in (OURS, FULL))]
    return markdown(["op", "by", "mode", "ms"], [[row["op"], row["provider"], row["mode"], f"{float(row['ms']):.3f}"] for row in shown])


def lengths(reference: Path) -> str:
    """The forward of linear attention and of the hybrids beside full softmax attention's, against the length."""
    rows = [row for row in committed_h100(reference) if row["mode"] == "forward" and row["provider"] in (OURS, FULL)]
    times = {(row["op"], row["shape"]): float(row["ms"]) for row in rows}
    shapes = {row["shape"]: [-int(row["D"]), -int(row["H"]), -int(row["B"]), int(row["T"])] for row in rows if row["op"] == SOFTMAX}
    head = ["shape", "softmax attention, ms", "linear attention, ms", "LoLCATs' hybrid, window of 64, ms", "Lizard's, window of 128, ms"]
    found = []
    for shape in sorted(shapes, key=shapes.get):
        own = [times.get((op, shape)) for op in ("linear_attention", "hybrid_attention w=64", "lizard hybrid")]
        found.append([shape, f"{times[SOFTMAX, shape]:.3f}", *(_beside(ms, times[SOFTMAX, shape]) for ms in own)])
    return markdown(head, found)


def _beside(ms: float | None, softmax: float) -> str:
    """A time, and how many times as fast as softmax attention it is; empty without one."""
    return "" if ms is None else f"{ms:.3f} ({softmax / ms:.2f}x)"
