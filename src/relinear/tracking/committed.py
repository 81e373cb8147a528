"""A folder of results small enough to commit: what a reader, MLflow and a table need of it, and none of what can be made again.

Kept are tables, figures and their provenance, and of every stage run.json, metrics.json, the curve and the scores of each item; of the headline
table's rows also adapters and the parameters that a method added. Left behind are whole models, corpora, activations, attention weights,
checkpoints and logs. Paths and hashes in records stay those of the clone that made them; `reference.json` says which adapters were rounded to
bfloat16, and what they hashed to before.
"""

import csv
import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from relinear.errors import UserError
from relinear.files import MANIFEST, folder_aside, read_record, sha256, write_json

LARGEST = 100_000_000  # bytes of a folder that is committed
LONG = 100_000  # bytes from which on lines are compressed
OF_STAGE = {"run.json", "metrics.json", "history.jsonl", "items.jsonl", "method.safetensors"}
ADAPTER = "adapter_model.safetensors"
OF_ADAPTER = {"adapter_config.json", ADAPTER}
RENDERED = {".csv", ".md", ".png", ".pdf"}


def export(results: Path | str, out: Path | str, *, weights: bool = True) -> dict[str, int]:
    """Copy what is worth committing of a scale's results into the folder `out`, whole or not at all; its bytes by run, and by table or figure.

    Lines (curves, item scores) above `LONG` bytes are compressed. With `weights`, adapters and methods' parameters come along of the rows of
    table2.csv, or of all runs without that table; adapters of runs that computed in bfloat16 are rounded to it, as they are when loaded in it.
    An `out` that an earlier export made is replaced.

    Raises UserError for a folder without finished stages, files that are not what their run.json says, an `out` that holds something else, and
    more than `LARGEST` bytes.
    """
    results, out = Path(results), Path(out)
    if not any(results.glob("runs/*/*/run.json")):
        raise UserError(f"{results} has no finished stage of a run; give a scale's folder, such as results/smollm2")
    if out.exists() and any(out.iterdir()) and not (out / MANIFEST).is_file():
        raise UserError(f"{out} holds what `relinear track export` did not write; give another folder")
    kept = dict(sorted(_kept(results, weights)))
    rounded = {name: path for name, path in kept.items() if path.name == ADAPTER and _in_bfloat16(path.parents[2])}
    with folder_aside(out) as scratch:
        for name, source in kept.items():
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            (_round if name in rounded else _copy)(source, scratch / name)
        files = {p.relative_to(scratch).as_posix(): p.stat().st_size for p in sorted(scratch.rglob("*")) if p.is_file()}
        sizes: dict[str, int] = {}
        for name, size in files.items():
            part = "/".join(name.split("/")[:2]) if name.startswith("runs/") else name.split("/")[0]
            sizes[part] = sizes.get(part, 0) + size
        if sum(files.values()) > LARGEST:
            largest = ", ".join(f"{name} {size:,}" for name, size in sorted(files.items(), key=lambda item: -item[1])[:5])
            raise UserError(f"{results} comes to {sum(files.values()):,} bytes, more than {LARGEST:,}; the largest: {largest}")
        left = {p.relative_to(results).as_posix(): p.stat().st_size for p in sorted(_files(results)) if p not in kept.values()}
        hashes, before = {n: sha256(scratch / n) for n in files}, {n: sha256(p) for n, p in rounded.items()}
        write_json(scratch / MANIFEST, {"scale": results.name, "files": hashes, "rounded_to_bfloat16": before, "left_out_bytes": left})
    return sizes


def _files(results: Path) -> Iterator[Path]:
    """All files of a scale but what the machinery keeps for itself."""
    for path in results.rglob("*"):
        parts = path.relative_to(results).parts
        if path.is_file() and parts[0] != "logs" and not any(part.startswith(".") for part in parts):
            yield path


def _rows(results: Path) -> set[str]:
    """The runs that the headline table shows; all where there is no table."""
    if not (results / "table2.csv").is_file():
        return {path.name for path in results.glob("runs/*")}
    with (results / "table2.csv").open() as file:
        return {row["run"] for row in csv.DictReader(file)}


def _kept(results: Path, weights: bool) -> Iterator[tuple[str, Path]]:
    shown = _rows(results) if weights else set()
    stages = {path.parent: read_record(path.parent) for path in _files(results) if path.name == "run.json"}
    for path in _files(results):
        name, stage = path.relative_to(results).as_posix(), next((p for p in path.parents if p in stages), None)
        if stage is None:
            if path.suffix in RENDERED or path.name.endswith(".provenance.json"):
                yield name, path
            continue
        inside = path.relative_to(stage)
        if path.name not in (OF_ADAPTER if inside.parts[0] == "adapter" else OF_STAGE) or len(inside.parts) > 2:
            continue
        if path.suffix == ".safetensors" and stage.parent.name not in shown:
            continue
        if path.name != "run.json" and sha256(path) != stages[stage]["artefacts"].get(inside.as_posix(), {}).get("sha256"):
            raise UserError(f"{path} is not what its run.json says; run `relinear {stage.name}` of it again")
        yield name, path


def _in_bfloat16(run: Path) -> bool:
    """Whether every stage of a run computed in bfloat16: what one of them loaded in float32 must keep its digits."""
    return all(read_record(path.parent)["hardware"].get("dtype") == "bfloat16" for path in run.glob("*/run.json"))


def _round(source: Path, to: Path) -> None:
    """Copy an adapter as a bfloat16 model loads it (`relinear.linearize.assemble`): float32 stays what adapts a method, as methods do."""
    from safetensors import safe_open
    from safetensors.torch import save_file  # torch; not needed to import a folder

    with safe_open(source, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        save_file({n: x if ".method." in n else x.bfloat16() for n, x in tensors.items()}, to, file.metadata())


def _copy(source: Path, to: Path) -> None:
    if source.suffix != ".jsonl" or source.stat().st_size <= LONG:
        shutil.copyfile(source, to)
        return
    # Equal lines make equal bytes: no time and no name in the header.
    with source.open("rb") as lines, to.with_name(f"{to.name}.gz").open("wb") as file, gzip.GzipFile("", "wb", 9, file, 0) as packed:
        shutil.copyfileobj(lines, packed)


def verify(folder: Path | str) -> None:
    """Raises UserError unless the folder holds exactly the files that `export` wrote, as it wrote them."""
    folder = Path(folder)
    written = json.loads((folder / MANIFEST).read_text())["files"]
    found = {p.relative_to(folder).as_posix(): sha256(p) for p in folder.rglob("*") if p.is_file()}
    found.pop(MANIFEST)
    if wrong := sorted(name for name in written.keys() | found.keys() if written.get(name) != found.get(name)):
        raise UserError(f"{folder / wrong[0]} is not what `relinear track export` wrote ({len(wrong)} such files); export the folder again")
