"""A folder of results small enough to commit: the files that a reader, MLflow and a table need, without files that can be made again.

Kept are tables, figures and their provenance, and of every stage run.json, metrics.json, the curve and the outcome of each item; of the headline
table's rows also the items' scores and targets, adapters and the parameters that a method added. Attention weights and gates that a figure shows
are kept, so that each figure can be drawn again. Left behind are whole models, corpora, activations, checkpoints, logs, and PDFs that have a PNG
beside them. What is kept is made smaller:

- a curve has at most `LINES` + 1 lines, as `history.jsonl.gz`;
- items are columns, as `items.json.xz`: `read_items` reads them, and so does `pandas.read_json`;
- a PNG has 256 colours;
- adapters of runs that computed in bfloat16 are rounded to it, as they are when loaded in it.

Paths and hashes in records stay those of the clone that made them. `reference.json` has the sha256 of every file; under `changed` it says of each
file that is another than the original how it was changed, and the original's name and sha256, which a stage's run.json has too.
"""

import csv
import gzip
import json
import lzma
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from relinear import records
from relinear.draw.render import paint
from relinear.errors import UserError
from relinear.files import MANIFEST, folder_aside, sha256, write_json
from relinear.plan.items import PACKED as ITEMS
from relinear.plan.items import read_items as read_items

HEADLINE = "comparison/table2.csv"  # its rows keep weights
LARGEST = 90_000_000  # the most bytes of all committed results, and of one folder
LINES = 250  # lines of a curve, besides its last
PARTS_EVERY = 10  # every tenth of these lines, and the last, has the parts of a loss (by layer)
DECIMALS = 2  # decimals of an item's scores, in nats
SCORED = {"scores", "target"}  # fields of an item that only the headline table's rows keep
TEXTS = {"rouge": {"written", "right"}}  # measurement -> fields of an item that are text of data which may be used, and not redistributed
OF_STAGE = {"run.json", "metrics.json", "history.jsonl", "items.jsonl", "method.safetensors"}
OF_FIGURE = {"weights.safetensors", "points.safetensors", "parts.safetensors"}  # of a measurement: what figures of attention and gates are drawn from
EMPTY = 16  # bytes of such a file without a tensor
LARGEST_OF_FIGURE = 2_000_000  # bytes of one of them that are worth committing
ADAPTER = "adapter_model.safetensors"
OF_ADAPTER = {"adapter_config.json", ADAPTER}
RENDERED = {".csv", ".md", ".png", ".pdf"}

Change = tuple[str, str, Callable[[Path, Path], None]]  # name of the file that is written, how it differs, what writes it


def export(results: Path | str, out: Path | str, *, weights: bool = True, add: bool = False) -> dict[str, int]:
    """Copy what is worth committing of a scale's results into the folder `out`, whole or not at all; its bytes by run, and by table or figure.

    With `weights` the rows of table2.csv, or all runs without that table, keep adapters, methods' parameters, and scores and targets of their
    items. An `out` that an earlier export made is replaced. With `add` it keeps what it has, and its own table2.csv says which runs keep weights.
    A stage, table or figure that both have is that of `results`.

    Raises UserError for a folder without finished stages, files that are not what their run.json says, an `out` that holds something else, is
    of another scale or was changed since, where it is to be added to, and more than `LARGEST` bytes.
    """
    results, out = Path(results), Path(out)
    if not any(results.glob("runs/*/*/run.json")):
        raise UserError(f"{results} has no finished stage of a run; give a scale's folder, such as results/smollm2")
    if out.exists() and any(out.iterdir()) and not (out / MANIFEST).is_file():
        raise UserError(f"{out} holds what `relinear track export` did not write; give another folder")
    before = _before(results, out) if add else {"files": {}, "changed": {}, "left_out_bytes": {}}
    rows = _rows(out if HEADLINE in before["files"] else results) if weights else set()
    kept = dict(sorted(_kept(results, rows)))
    made = {path.relative_to(results).as_posix() for path in _stages(results)}
    older = [name for name in before["files"] if name not in kept and not made & {p.as_posix() for p in Path(name).parents}]
    changed = {name: how for name, how in before["changed"].items() if name in older}
    with folder_aside(out) as scratch:
        for name in older:
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(out / name, scratch / name)
        for name, source in kept.items():
            to = scratch / name
            to.parent.mkdir(parents=True, exist_ok=True)
            if (change := _change(source, rows)) is None:
                shutil.copyfile(source, to)
                continue
            written, how, write = change
            write(source, to.with_name(written))
            changed[to.with_name(written).relative_to(scratch).as_posix()] = {"how": how, "from": name, "sha256": sha256(source)}
        files = {p.relative_to(scratch).as_posix(): p.stat().st_size for p in sorted(scratch.rglob("*")) if p.is_file()}
        sizes: dict[str, int] = {}
        for name, size in files.items():
            part = "/".join(name.split("/")[:2]) if name.startswith("runs/") else name.split("/")[0]
            sizes[part] = sizes.get(part, 0) + size
        if sum(files.values()) > LARGEST:
            largest = ", ".join(f"{name} {size:,}" for name, size in sorted(files.items(), key=lambda item: -item[1])[:5])
            raise UserError(f"{results} comes to {sum(files.values()):,} bytes, more than {LARGEST:,}; the largest: {largest}")
        left = {p.relative_to(results).as_posix(): p.stat().st_size for p in sorted(_files(results)) if p not in kept.values()}
        hashes = {name: sha256(scratch / name) for name in sorted(files)}
        about = {"changed": dict(sorted(changed.items())), "left_out_bytes": dict(sorted({**before["left_out_bytes"], **left}.items()))}
        write_json(scratch / MANIFEST, {"scale": results.name, "files": hashes, **about})
    return sizes


def _before(results: Path, out: Path) -> dict[str, Any]:
    """What an earlier export of this scale into `out` says of itself. Raises UserError where there is none, or its files are other than it wrote."""
    if not (out / MANIFEST).is_file():
        raise UserError(f"{out} has no {MANIFEST} of an earlier export to add to; export without --add first")
    verify(out)
    before = records.read_manifest(out / MANIFEST)
    if before["scale"] != results.name:
        raise UserError(f"{out} is an export of scale {before['scale']!r}, and {results} is of {results.name!r}; give another folder")
    return before


def _files(results: Path) -> Iterator[Path]:
    """All files of a scale without those of the machinery."""
    for path in results.rglob("*"):
        parts = path.relative_to(results).parts
        if path.is_file() and parts[0] != "logs" and not any(part.startswith(".") for part in parts):
            yield path


def _stages(results: Path) -> Iterator[Path]:
    """The folders of finished stages."""
    return (path.parent for path in _files(results) if path.name == "run.json")


def _rows(results: Path) -> set[str]:
    """The runs that the headline table shows; all where there is no table."""
    table = results / HEADLINE
    if not table.is_file():
        return {path.name for path in results.glob("runs/*")}
    with table.open() as file:
        return {row["run"] for row in csv.DictReader(file)}


def _kept(results: Path, weights: set[str]) -> Iterator[tuple[str, Path]]:
    """The files that an export has, by their names in `results`: with the weights of these runs."""
    stages = {folder: records.read(folder) for folder in _stages(results)}
    for folder, record in stages.items():
        for name in OF_STAGE & record["artefacts"].keys() - {"method.safetensors"}:
            if wrong := records.difference(folder, record, name):
                raise UserError(f"{wrong}; make {folder} again")
    for drawing in results.glob("*/.*.json"):
        if wrong := records.drawn_otherwise(drawing):
            raise UserError(f"{wrong}; draw it again")
    for path in _files(results):
        name, stage = path.relative_to(results).as_posix(), next((p for p in path.parents if p in stages), None)
        if stage is None:
            redrawn = path.suffix == ".pdf" and path.with_suffix(".png").is_file()
            if path.suffix in RENDERED and not redrawn or path.name.endswith(".provenance.json"):
                yield name, path
            continue
        inside = path.relative_to(stage)
        if path.name in OF_FIGURE and stages[stage].get("measure"):
            if not EMPTY < path.stat().st_size <= LARGEST_OF_FIGURE:
                continue
        elif path.name not in (OF_ADAPTER if inside.parts[0] == "adapter" else OF_STAGE):
            continue
        elif path.suffix == ".safetensors" and stage.parent.name not in weights:
            continue
        if path.name != "run.json" and sha256(path) != stages[stage]["artefacts"].get(inside.as_posix(), {}).get("sha256"):
            raise UserError(f"{path} is not what its run.json says; make {stage} again")
        yield name, path


def _change(source: Path, rows: set[str]) -> Change | None:
    """The change that a file undergoes in an export; None if it is copied."""
    if source.name == "history.jsonl":
        return f"{source.name}.gz", f"{LINES + 1} lines at most, six digits, parts of a loss in every {PARTS_EVERY}th", _thin
    if source.name == "items.jsonl":
        scored = source.parents[1].name in rows
        without = TEXTS.get(source.parent.name) or (set() if scored else SCORED)
        how = f"columns, without {' and '.join(sorted(without))}" if without else f"columns, scores to {DECIMALS} decimals"
        return ITEMS, how, lambda source, to: _pack(source, to, without)
    if source.suffix == ".png":
        return source.name, "256 colours", paint
    if source.name == ADAPTER and _in_bfloat16(source.parents[2]):
        return source.name, "bfloat16, but for what adapts a method", _round
    return None


def _in_bfloat16(run: Path) -> bool:
    """Whether every stage of a run computed in bfloat16: what one of them loaded in float32 must keep its digits."""
    return all(records.read(path.parent)["hardware"].get("dtype") == "bfloat16" for path in run.glob("*/run.json"))


def _round(source: Path, to: Path) -> None:
    """Copy an adapter as a bfloat16 model loads it (`relinear.linearize.assemble`): float32 stays what adapts a method, as methods do."""
    from safetensors import safe_open
    from safetensors.torch import save_file  # torch; not needed to import a folder

    with safe_open(source, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        save_file({n: x if ".method." in n else x.bfloat16() for n, x in tensors.items()}, to, file.metadata())


def _thin(source: Path, to: Path) -> None:
    """Copy lines at even distances and the last, each with its step; the parts of some."""
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    kept = lines[:: max(-(-len(lines) // LINES), 1)]
    if lines and kept[-1] is not lines[-1]:
        kept.append(lines[-1])
    for place, line in enumerate(kept):
        if place % PARTS_EVERY and line is not kept[-1]:
            kept[place] = {name: value for name, value in line.items() if not isinstance(value, dict | list)}
    text = "".join(json.dumps(_short(line) | {"time": round(line["time"], 2)}) + "\n" for line in kept)
    # Equal lines make equal bytes: no time and no name in the header.
    with to.open("wb") as file, gzip.GzipFile("", "wb", 9, file, 0) as packed:
        packed.write(text.encode())


def _short(value: Any) -> Any:
    """The value with six digits of each float in it."""
    if isinstance(value, dict):
        return {name: _short(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_short(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _pack(source: Path, to: Path, without: set[str]) -> None:
    """Copy items, one a line, as columns {field: values}: null is what an item has no value of. Without some fields."""
    items = [json.loads(line) for line in source.read_text().splitlines()]
    fields = dict.fromkeys(field for item in items for field in item if field not in without)
    columns = {field: [item.get(field) for item in items] for field in fields}
    if "scores" in columns:
        columns["scores"] = [scores and [round(score, DECIMALS) for score in scores] for scores in columns["scores"]]
    to.write_bytes(lzma.compress(json.dumps(columns, separators=(",", ":")).encode(), preset=9))


def folders(root: Path) -> list[Path]:
    """The folders that `export` wrote: `root` itself, or those in it; `root` where there is none."""
    return [root] if (root / MANIFEST).is_file() else sorted(path.parent for path in root.glob(f"*/{MANIFEST}")) or [root]


def verify(folder: Path | str) -> None:
    """Raises UserError unless the folder holds exactly the files that `export` wrote, as it wrote them."""
    folder = Path(folder)
    written = records.read_manifest(folder / MANIFEST)["files"]
    found = {p.relative_to(folder).as_posix(): sha256(p) for p in folder.rglob("*") if p.is_file()}
    found.pop(MANIFEST)
    if wrong := sorted(name for name in written.keys() | found.keys() if written.get(name) != found.get(name)):
        raise UserError(f"{folder / wrong[0]} is not what `relinear track export` wrote ({len(wrong)} such files); export the folder again")
