"""A folder of results small enough to commit: the files that a reader, MLflow and a table need, without files
that can be made again.

The record, metrics, curve and items of every finished node go into the folder's store
(`relinear.core.store`), a few parquet files, and so do the attention weights and gates that a figure shows:
each figure can be drawn again. Beside them lie tables and figures, one provenance.json and one claims.csv of
all of these, and adapters and the parameters that a method added of the headline table's rows. Left behind
are whole models, corpora, activations, checkpoints, logs, and PDFs that have a PNG beside them. What is kept
is made smaller:

- a curve has at most `LINES` + 1 lines;
- items lack scores and targets but in the headline table's rows, and texts of data that may not be
  redistributed; scores are rounded;
- a PNG has 256 colours;
- adapters of runs that computed in bfloat16 are rounded to it, as they are when loaded in it.

Paths and hashes in records stay those of the clone that made them. `reference.json` has the sha256 of every
file; under `changed` it says of each file that is another than the original how it was changed, and the
original's name and sha256, which a node's record has too.
"""

import csv
import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from relinear import records
from relinear.core import store
from relinear.draw.beside import PROVENANCE, TOLD
from relinear.draw.render import paint
from relinear.errors import UserError
from relinear.files import MANIFEST, folder_aside, sha256, write_json
from relinear.plan.items import FILE as ITEMS
from relinear.plan.items import read_columns
from relinear.plan.items import read_items as read_items
from relinear.plan.near import possible
from relinear.tracking import mirror

HEADLINE = "comparison/table2.csv"  # its rows keep weights
LARGEST = 90_000_000  # the most bytes of all committed results, and of one folder
LINES = 250  # lines of a curve, besides its last
PARTS_EVERY = 10  # every tenth of a curve's lines, and the last, has the parts of a loss (by layer)
DECIMALS = 2  # decimals of an item's scores, in nats
SCORED = {"scores", "target"}  # fields of an item that only the headline table's rows keep
# measurement -> fields of an item that are text of data which may be used, and not redistributed
TEXTS = {"rouge": {"written", "right"}}
# files of a node whose content goes into the store
PACKED = {store.RECORD, store.METRICS, store.CURVE, ITEMS}
# of a measurement: what figures of attention and gates are drawn from, in the store too
OF_FIGURE = {"weights.safetensors", "points.safetensors", "parts.safetensors"}
EMPTY = 16  # bytes of such a file without a tensor
LARGEST_OF_FIGURE = 2_000_000  # bytes of one of them that are worth committing
METHOD, ADAPTER = "method.safetensors", "adapter/adapter_model.safetensors"
# what other files are packed into
STORED = {*store.FILES, store.TENSORS, *(kind.file for kind in TOLD)}
ENDINGS = tuple(kind.ending for kind in TOLD)  # of files beside drawings
WEIGHTS = {METHOD, ADAPTER, "adapter/adapter_config.json"}  # of a step of a headline row
RENDERED = {".csv", ".md", ".png", ".pdf"}

Change = tuple[str, Callable[[Path, Path], None]]  # how a file differs, what writes it


def export(
    results: Path | str, out: Path | str, *, weights: bool = True, add: bool = False
) -> dict[str, int]:
    """Pack what is worth committing of a scale's results into the folder `out`, whole or not at all; its
    bytes by file of the store, run with weights, and folder of tables or figures.

    With `weights` the rows of table2.csv keep adapters and methods' parameters, and scores and targets of
    their items; all runs do without that table. An `out` that an earlier export made is replaced. With `add`
    it keeps what it has, and its own table2.csv says which runs are its rows. A node, table or figure that
    both have is that of `results`.

    Raises UserError for a folder without finished stages, files that are not what their run.json says, an
    `out` that holds something else, is of another scale or was changed since, where it is to be added to, and
    more than `LARGEST` bytes.
    """
    results, out = Path(results), Path(out)
    if not any(results.glob("runs/*/*/run.json")):
        raise UserError(
            f"{results} has no finished stage of a run; give a scale's folder, such as results/smollm2"
        )
    if out.exists() and any(out.iterdir()) and not (out / MANIFEST).is_file():
        raise UserError(f"{out} holds what `relinear track export` did not write; give another folder")
    before = _before(results, out) if add else {"files": {}, "changed": {}}
    rows = _rows(out if HEADLINE in before["files"] else results) if weights else set()
    _require_as_recorded(results)
    nodes = {folder.relative_to(results).as_posix(): folder for folder in store.nodes(results)}
    kept = dict(sorted(_kept(results, rows)))
    older = [
        name
        for name in before["files"]
        if name not in {*kept, *STORED} and not nodes.keys() & {p.as_posix() for p in Path(name).parents}
    ]
    changed = {name: how for name, how in before["changed"].items() if name in older}
    with folder_aside(out) as scratch:
        _copy(out, older, scratch)
        store.write(
            scratch,
            store.joined(
                out if add else scratch, {name: _packed(folder, rows) for name, folder in nodes.items()}
            ),
        )
        drawn = [*_files(results)]
        for kind in TOLD:
            kind.write(scratch, (kind.committed(out) if add else {}) | kind.of_drawings(results, drawn))
        for name, source in kept.items():
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            if (change := _change(source)) is None:
                shutil.copyfile(source, scratch / name)
                continue
            how, write = change
            write(source, scratch / name)
            changed[name] = {"how": how, "from": name, "sha256": sha256(source)}
        return _closed(scratch, results.name, changed)


def repack(folder: Path | str, without: Collection[str] = ()) -> dict[str, int]:
    """Write a committed folder anew, as this version writes it, whole or not at all; its bytes as of
    `export`.

    `without` names what is left out: nodes such as `runs/lizard/mmlu`, all nodes of a folder such as
    `runs/lizard`, and drawings such as `lizard/table4`.

    Raises UserError for a folder that is not as it was exported, a name that it does not have, a node that
    another one, or a drawing, which stays was made from, and a node or a drawing that one of a folder beside
    this was drawn from. The committed spreads (`relinear.draw.trainings`) are not looked at.
    """
    folder = Path(folder)
    verify(folder)
    manifest = {"changed": {}, **records.read_manifest(folder / MANIFEST)}
    nodes, files = store.opened(folder).all(), manifest["files"]
    told = {kind: kind.committed(folder) for kind in TOLD}
    drawings = dict.fromkeys(name for of in told.values() for name in of)
    for name in without:
        if not any(_is_of(each, [name]) for each in (*nodes, *drawings)):
            raise UserError(
                f"{folder} has neither node nor drawing {name!r}; {possible(name, (*drawings, *nodes))}"
            )
    gone = {name for name in (*nodes, *drawings) if _is_of(name, without)}
    nodes = {name: each for name, each in nodes.items() if name not in gone}
    told = {kind: {name: each for name, each in of.items() if name not in gone} for kind, of in told.items()}
    _require_whole(folder, gone, nodes, told[PROVENANCE])
    older = [
        name
        for name in files
        if name not in STORED
        and not _is_of(name, without)
        and not (name.count("/") == 1 and _is_of(name.partition(".")[0], without))
    ]
    with folder_aside(folder) as scratch:
        _copy(folder, older, scratch)
        if without and nodes.keys() == store.opened(folder).rows.keys():  # drawings alone are left out
            _copy(folder, [name for name in STORED if name in files], scratch)
        else:
            store.write(scratch, nodes)
        for kind in TOLD:
            kind.write(scratch, told[kind])
        changed = {name: how for name, how in manifest["changed"].items() if name in older}
        return _closed(scratch, manifest["scale"], changed)


def _is_of(name: str, places: Collection[str]) -> bool:
    """Whether a name is one of these places, or lies in one."""
    return any(name == place or name.startswith(f"{place}/") for place in places)


def _require_whole(
    folder: Path,
    gone: Collection[str],
    nodes: Mapping[str, store.Packed],
    told: Mapping[str, Mapping[str, Any]],
) -> None:
    """Raise UserError where a node or a drawing of this folder that stays, or a drawing of a folder beside
    it, was made from one that is `gone`."""
    behind = {
        f"{name} of {folder}": {records.place(store.folder_of(each)).as_posix() for each in of["sources"]}
        for name, of in told.items()
    } | {
        f"{name} of {folder}": {
            records.place(p["path"]).as_posix() for p in json.loads(each.record)["parents"].values()
        }
        for name, each in nodes.items()
    }
    for file in sorted(folder.resolve().parent.glob(f"*/{PROVENANCE.file}")) if gone else ():
        if (other := file.parent) != folder.resolve():
            behind |= {
                f"{name} of {other.name}": {_named(each, folder.resolve().name) for each in of["sources"]}
                for name, of in PROVENANCE.committed(other).items()
            }
    for name, of in behind.items():
        if lost := of & gone:
            raise UserError(f"{name} was made from {min(lost)}; leave out both or none")


def _named(source: str, folder: str) -> str:
    """The node or drawing of a folder beside it that provenance names: `<folder>/nodes.parquet#<node>` or
    `<folder>/<paper>/<stem>.csv`. Empty for anything of another folder."""
    _, found, name = f"/{source}".rpartition(f"/{folder}/")
    drawing, packed, node = name.partition(f"{store.NODES}#")
    return (node if packed else drawing.partition(".")[0]) if found else ""


def _copy(folder: Path, names: Iterable[str], to: Path) -> None:
    """Copy these files of a folder into the new folder `to`."""
    to.mkdir(parents=True, exist_ok=True)
    for name in names:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, to / name)


def _closed(folder: Path, scale: str, changed: dict[str, dict[str, str]]) -> dict[str, int]:
    """Write the manifest of a folder that has all else; its bytes by file of the store, run with weights, and
    folder of tables or figures. Raises UserError for more than `LARGEST` bytes."""
    files = {
        p.relative_to(folder).as_posix(): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()
    }
    sizes: dict[str, int] = {}
    for name, size in files.items():
        part = "/".join(name.split("/")[:2]) if name.startswith("runs/") else name.split("/")[0]
        sizes[part] = sizes.get(part, 0) + size
    if sum(files.values()) > LARGEST:
        largest = ", ".join(
            f"{name} {size:,}" for name, size in sorted(files.items(), key=lambda item: -item[1])[:5]
        )
        raise UserError(
            f"what is kept of {scale} comes to {sum(files.values()):,} bytes, more than {LARGEST:,}; the"
            f" largest: {largest}"
        )
    write_manifest(folder, scale, changed)
    return sizes


def write_manifest(folder: Path, scale: str, changed: dict[str, dict[str, str]]) -> None:
    """Write the reference.json of a folder: the results that it was taken from, the sha256 of every file, and
    how some were changed."""
    files = {
        p.relative_to(folder).as_posix(): sha256(p)
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != MANIFEST
    }
    write_json(
        folder / MANIFEST,
        {"scale": scale, "files": dict(sorted(files.items())), "changed": dict(sorted(changed.items()))},
    )


def _before(results: Path, out: Path) -> dict[str, Any]:
    """What an earlier export of this scale into `out` says of itself. Raises UserError where there is none,
    or its files are other than it wrote."""
    if not (out / MANIFEST).is_file():
        raise UserError(f"{out} has no {MANIFEST} of an earlier export to add to; export without --add first")
    verify(out)
    before = records.read_manifest(out / MANIFEST)
    if before["scale"] != results.name:
        raise UserError(
            f"{out} is an export of scale {before['scale']!r}, and {results} is of {results.name!r}; give"
            " another folder"
        )
    return {"changed": {}, **before}


def _files(results: Path) -> Iterator[Path]:
    """All files of a scale without those of the machinery."""
    for path in results.rglob("*"):
        parts = path.relative_to(results).parts
        if path.is_file() and parts[0] != "logs" and not any(part.startswith(".") for part in parts):
            yield path


def _rows(results: Path) -> set[str]:
    """The runs that the headline table shows; all where there is no table."""
    table = results / HEADLINE
    if not table.is_file():
        return {path.name for path in results.glob("runs/*")}
    with table.open() as file:
        return {row["run"] for row in csv.DictReader(file)}


def _require_as_recorded(results: Path) -> None:
    """Raise UserError for a kept file of a node, or a table or figure, that is not what its record says."""
    for folder in store.nodes(results):
        record = records.read(folder)
        there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        named = (PACKED - {"run.json"}) & (record["artefacts"].keys() | there) | (WEIGHTS | OF_FIGURE) & there
        for name in sorted(named):
            if wrong := records.difference(folder, record, name):
                raise UserError(f"{wrong}; make {folder} again")
        if (folder / "metrics.json").is_file():
            records.check_metrics(folder)
    for drawing in results.glob("*/.*.json"):
        if wrong := records.drawn_otherwise(drawing):
            raise UserError(f"{wrong}; draw it again")


def _kept(results: Path, rows: set[str]) -> Iterator[tuple[str, Path]]:
    """The files that lie beside the store, by their names in `results`: with the weights of these runs."""
    nodes = {*store.nodes(results)}
    for path in _files(results):
        name, node = path.relative_to(results).as_posix(), next((p for p in path.parents if p in nodes), None)
        if node is None:
            redrawn = path.suffix == ".pdf" and path.with_suffix(".png").is_file()
            if path.suffix in RENDERED and not redrawn and not name.endswith(ENDINGS):
                yield name, path
        elif path.relative_to(node).as_posix() in WEIGHTS and node.parent.name in rows:
            yield name, path


def _packed(folder: Path, rows: set[str]) -> store.Packed:
    """A node as the store has it."""
    texts = [
        (folder / name).read_bytes() if (folder / name).is_file() else None
        for name in ("run.json", "metrics.json")
    ]
    items = _items(folder, rows) if (folder / ITEMS).is_file() else None
    curve = _thin(folder / store.CURVE) if (folder / store.CURVE).is_file() else None
    tensors = {
        name: (folder / name).read_bytes()
        for name in OF_FIGURE
        if json.loads(texts[0]).get("measure")
        and (folder / name).is_file()
        and EMPTY < (folder / name).stat().st_size <= LARGEST_OF_FIGURE
    }
    return store.Packed(*texts, items, curve, tensors or None)


def _change(source: Path) -> Change | None:
    """The change that a file beside the store undergoes; None if it is copied."""
    if source.suffix == ".png":
        return "256 colours", paint
    if source.as_posix().endswith(ADAPTER) and _in_bfloat16(source.parents[2]):
        return "bfloat16, but for what adapts a method", _round
    return None


def _in_bfloat16(run: Path) -> bool:
    """Whether every stage of a run computed in bfloat16: what one of them loaded in float32 must keep its
    digits."""
    return all(
        records.read(path.parent)["hardware"].get("dtype") == "bfloat16" for path in run.glob("*/run.json")
    )


def _round(source: Path, to: Path) -> None:
    """Copy an adapter as a bfloat16 model loads it (`relinear.linearize.assemble`): float32 stays what adapts
    a method, as methods do."""
    from safetensors import safe_open
    from safetensors.torch import save_file  # torch; not needed to import a folder

    with safe_open(source, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        save_file(
            {n: x if ".method." in n else x.bfloat16() for n, x in tensors.items()}, to, file.metadata()
        )


def _thin(source: Path, most: int = LINES) -> list[dict[str, Any]]:
    """Lines of a curve at even distances and the last, each with its step; the parts of some."""
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    kept = mirror.evenly(lines, most)
    for place, line in enumerate(kept):
        if place % PARTS_EVERY and line is not kept[-1]:
            kept[place] = {name: value for name, value in line.items() if not isinstance(value, dict | list)}
    return [_short(line) | {"time": round(line["time"], 2)} for line in kept]


def _short(value: Any) -> Any:
    """The value with six digits of each float in it."""
    if isinstance(value, dict):
        return {name: _short(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_short(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _items(folder: Path, rows: set[str]) -> store.Columns:
    """A node's items without what is not committed of them."""
    without = TEXTS.get(folder.name) or (set() if folder.parent.name in rows else SCORED)
    columns = {field: values for field, values in read_columns(folder).items() if field not in without}
    if "scores" in columns:
        columns["scores"] = [
            scores and [round(score, DECIMALS) for score in scores] for scores in columns["scores"]
        ]
    return columns


def folders(root: Path) -> list[Path]:
    """The folders that `export` wrote: `root` itself, or those in it; `root` where there is none."""
    return (
        [root]
        if (root / MANIFEST).is_file()
        else sorted(path.parent for path in root.glob(f"*/{MANIFEST}")) or [root]
    )


def verify(folder: Path | str) -> None:
    """Raises UserError unless the folder holds exactly the files that `export` wrote, as it wrote them, and
    every node of its store is whole."""
    folder = Path(folder)
    written = records.read_manifest(folder / MANIFEST)["files"]
    found = {p.relative_to(folder).as_posix(): sha256(p) for p in folder.rglob("*") if p.is_file()}
    found.pop(MANIFEST)
    if wrong := sorted(
        name for name in written.keys() | found.keys() if written.get(name) != found.get(name)
    ):
        raise UserError(
            f"{folder / wrong[0]} is not what `relinear track export` wrote ({len(wrong)} such files); export"
            " the folder again"
        )
    if (folder / store.NODES).is_file():
        store.opened(folder).verify()
