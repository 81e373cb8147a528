"""Records of finished stages and of drawings, which are whole or as if they were not there: each names its
files by sha256."""

import errno
import functools
import glob
import hashlib
import json
import math
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from relinear.core import store
from relinear.errors import UserError
from relinear.files import MANIFEST, sha256, write_json
from relinear.schemas import BrokenError, Form, Manifest, Metrics, Record, require

SCHEMA = 2  # the schema of run.json that this version writes, and the only one that it reads
ASIDE = "run.json.broken"
AHEAD = 5.0  # seconds that another machine's clock may be ahead
# bytes of a file that is hashed whenever rules are read; of a larger one, such as weights, the size is
# compared
LIGHT = 1 << 20

State = tuple[int, int, int, int]  # numbers that change when a file is written to or replaced
# records that had their form, as the file system has them -> the folders of their parents, as they name them
_good: dict[tuple[str, State], tuple[str, ...]] = {}


def read(folder: Path) -> dict[str, Any] | None:
    """run.json of a finished stage, in its folder or in a store; None where there is none.

    Raises BrokenError for one that cannot be read or has not the form of a record.
    """
    path = folder / "run.json"
    now = _now(path)
    if now is None and not store.exists(path):
        return None
    record, now = read_json(path), now or _now(_behind(path))
    if record.get("schema") != SCHEMA:
        raise BrokenError(f"{path} has schema {record.get('schema')!r}; this version reads {SCHEMA}")
    if (str(path), now) not in _good:
        require(Record, record, path)
        _good[str(path), now] = tuple(parent["path"] for parent in record["parents"].values())
    return record


def parents(folder: str) -> tuple[str, ...]:
    """The folders of a finished stage's parents, as its record names them; none without a record. A process
    that has read the record reads it again only if it was written to or replaced. Raises as `read` does."""
    path = f"{folder}/run.json"
    if (path, now := _now(path)) not in _good and (read(Path(folder)) is None or (now := _now(path)) is None):
        return ()
    return _good[path, now]


def read_json(path: Path) -> dict[str, Any]:
    """The mapping that a JSON file holds. Raises BrokenError for a file that holds none, or one that is
    nested too deep."""
    try:
        found = json.loads(store.read(path))
    except (OSError, ValueError) as error:
        raise BrokenError(f"{path} cannot be read: {error}") from None
    except RecursionError:
        raise BrokenError(f"{path} is nested too deep") from None
    if not isinstance(found, dict):
        raise BrokenError(f"{path} must hold a JSON object; got a {type(found).__name__}")
    return found


def check_metrics(folder: Path, measured: bool = False) -> None:
    """Raise BrokenError for a metrics.json that cannot be read, for readings that have not their form, and,
    of a `measured` run, for one without readings or facts."""
    path = folder / "metrics.json"
    metrics = read_json(path)
    if lacking := [name for name in ("readings", "facts") if measured and name not in metrics]:
        raise BrokenError(f"{path} lacks {', '.join(lacking)}")
    require(Metrics if "readings" in metrics else Form, metrics, path)


def require_readings(readings: Iterable[Mapping[str, Any]], where: str) -> None:
    """Raise UserError for readings that a table would show wrong or that no file can hold: a value that is
    not finite, a number of another library, an error below 0, no items, and two of one name and place.

    `readings` are those of a metric's file, as `relinear.plan.readings.plain` gives them; `where` names the
    measurement.
    """
    seen = set()
    for reading in readings:
        metric, of, value, stderr, n, at = (
            reading[name] for name in ("metric", "of", "value", "stderr", "n", "at")
        )
        said = f"{where}: the reading {metric!r} of {of!r}{f' at {dict(at)}' if at else ''}"
        real = "a finite number of Python's own"
        checks = {
            "value": (value is None or _finite(value), f"{real}, or None and the reason in `why`"),
            "stderr": (stderr is None or _finite(stderr) and stderr >= 0, f"{real}, 0 or more, or None"),
            "n": (type(n) is int and n >= (value is not None), "how many items, 1 or more"),
            "at": (all(isinstance(part, int | float | str) for part in at.values()), "numbers and words"),
        }
        for name, (fits, possible) in checks.items():
            if not fits:
                kind = type(reading[name]).__name__
                raise UserError(f"{said} has {name} {reading[name]!r} ({kind}); possible: {possible}")
        if (place := (metric, of, *sorted(at.items()))) in seen:
            raise UserError(f"{said} is there twice; possible: another `of` or `at` for one of the two")
        seen.add(place)


def _finite(number: Any) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)


def read_manifest(path: Path) -> dict[str, Any]:
    """A reference.json. Raises BrokenError for one that cannot be read or has not its form."""
    manifest = read_json(path)
    require(Manifest, manifest, path)
    return manifest


def place(folder: Path | str) -> Path:
    """The place of a stage's folder within its results: `runs/<run>/<stage>`, or `models/<name>`,
    `text/<name>` and so on.

    A record's `parents` have paths on the machine that made it. Below the results as they lie now, a parent
    is at this place.
    """
    parts = Path(folder).parts
    return Path(*parts[-3:]) if parts[-3:-2] == ("runs",) else Path(*parts[-2:])


def trained_at(config: Mapping[str, Any]) -> dict[str, float]:
    """The peak learning rates of a training step, `lr` and where it has one `method_lr`, from the `config` of
    its record.

    Older records have the rates of runs.yaml beside the scale's `lr_floor`, which their training applied.
    """
    recipe, floor = config["recipe"], config.get("budget", {}).get("lr_floor", 0.0)
    return {name: max(recipe[name], floor) for name in ("lr", "method_lr") if recipe.get(name) is not None}


def entries(folder: Path, files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Name in the folder -> sha256 and bytes of each file, which is what a record says of it."""
    return {
        path.relative_to(folder).as_posix(): {"sha256": sha256(path), "bytes": path.stat().st_size}
        for path in files
    }


def difference(folder: Path, record: dict[str, Any], name: str, of: str = "run.json") -> str | None:
    """The way in which a file of a folder differs from its record, which is called `of`; None where it does
    not."""
    path, expected = folder / name, record["artefacts"].get(name, {}).get("sha256", "no such file")
    if path.is_file():
        got = once(sha256, path)
    else:
        got = hashlib.sha256(store.read(path)).hexdigest() if store.exists(path) else "no file"
    return (
        None
        if got == expected
        else f"{path} is not what its {of} says: sha256 {got} got, {expected} expected"
    )


def differs(folder: Path, record: dict[str, Any], of: str = "run.json", light: bool = False) -> str | None:
    """The way in which the first file that differs from a record does so; None where all are as the record
    says.

    `light`: of files of more than `LIGHT` bytes, whose reading takes long, the size alone is compared.
    """
    for name, entry in record["artefacts"].items():
        now = _now(os.path.join(folder, name)) if light else None
        if now is not None and LIGHT < now[1] == entry.get("bytes"):
            continue
        if wrong := difference(folder, record, name, of):
            return wrong
    return None


def once(read: Callable[[Path], Any], path: Path) -> Any:
    """What `read` makes of a file. A process that asks again reads the file again only if it was written to
    or replaced; so what it got is not to be changed."""
    return _once(read, path, _now(path))


def _now(path: Path | str) -> State | None:
    """The state of a file; None where there is none."""
    try:
        found = os.stat(path)
    except ValueError:  # a name that no file has
        return None
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise
    if not stat.S_ISREG(found.st_mode):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@functools.cache
def _once(read: Callable[[Path], Any], path: Path, now: State | None) -> Any:
    return read(path)


def believed(folder: Path) -> dict[str, Any] | None:
    """The record of a stage whose metrics.json is the one that it names, if it names one; None where there is
    no record.

    Raises BrokenError for any other folder.
    """
    record = read(folder)
    if (
        record is not None
        and "metrics.json" in record["artefacts"]
        and (wrong := difference(folder, record, "metrics.json"))
    ):
        raise BrokenError(wrong)
    return record


def whole(folder: Path) -> dict[str, Any] | None:
    """The record of a stage in the folder that it was made in, whose files are all there: small ones as the
    record names them, large ones of that size. None where there is no record. Raises BrokenError for any
    other folder."""
    record = read(folder)
    if record is not None and (wrong := differs(folder, record, light=True)):
        raise BrokenError(wrong)
    return record


def finished(folder: Path, check: Callable[[Path], dict[str, Any] | None] = whole) -> dict[str, Any] | None:
    """The record as of `whole`, or of another check. A broken record is None too, and one line on stderr says
    why."""
    try:
        return check(folder)
    except BrokenError as error:
        print(f"{error}; it counts as not finished", file=sys.stderr)
        return None


def set_aside(root: Path) -> Iterator[str]:
    """Rename each record of a scale's results whose folder is not `whole`, so that rules see that its stage
    is not finished; a line for each."""
    for folder in store.nodes(root):
        try:
            whole(folder)
        except (BrokenError, FileNotFoundError):
            try:
                whole(folder)  # read again: a step may just have moved its folder in, or its old one away
            except BrokenError as error:
                put_aside(folder)
                yield f"{error}; its step runs again"


def from_the_future(root: Path, specs: Iterable[Path] = ()) -> Iterator[str]:
    """Give what rules compare the times of, records and drawings of a scale and specs, the time of now where
    a file has one in the future; a line where there are any."""
    now, found = time.time(), 0
    # unlike Path.glob, this goes on where another process takes a folder away meanwhile
    made = (
        root / name
        for place in ("*/*", "*/*/*.json", "runs/*/*/*.json")
        for name in glob.iglob(place, root_dir=root, include_hidden=True)
    )
    for path in {*made, *root.parent.glob("*table2.*"), *specs}:
        with suppress(FileNotFoundError):
            if path.stat().st_mtime > now + AHEAD and path.is_file():
                os.utime(path, (now, now))
                found += 1
    if found:
        yield (
            f"{found} files of {root} or of its tables' specs have times in the future; they have the time of"
            " now instead"
        )


def put_aside(folder: Path) -> None:
    """Rename a stage's record, so that the next command makes the stage again."""
    with suppress(FileNotFoundError):
        (folder / "run.json").replace(folder / ASIDE)


# --- drawings ---


def drawing(folder: Path, stem: str) -> Path:
    """The record of a table or figure, beside its files."""
    return folder / f".{stem}.json"


def write_drawing(path: Path, artefact: str, files: Iterable[Path], not_run: int = 0) -> None:
    """Write the record of a table or figure of that name, which was drawn as these files beside the record.

    `not_run` counts the measurements that were not finished when it was drawn.
    """
    lacking = {"not_run": not_run} if not_run else {}
    write_json(
        path, {"schema": SCHEMA, "artefact": artefact, **lacking, "artefacts": entries(path.parent, files)}
    )


def drawn_early(path: Path) -> str | None:
    """A sentence about a table or figure that was drawn before its measurements were finished; None for any
    other record."""
    lacking = read_json(path).get("not_run")
    return f"{path} is of a drawing in which {lacking} measurements are `not run`" if lacking else None


def drawn_otherwise(path: Path) -> str | None:
    """The way in which a table or figure differs from its record at `path`; None where every file is as the
    record says."""
    if not path.is_file():
        return f"{path} is not there"
    try:
        record = read_json(path)
    except BrokenError as error:
        return str(error)
    named = record.get("artefacts")
    if (
        record.get("schema") != SCHEMA
        or not isinstance(named, dict)
        or not named
        or not all(isinstance(entry, dict) for entry in named.values())
    ):
        return f"{path} is no record of a drawing"
    return differs(path.parent, record, path.name)


# --- committed results ---


def otherwise(folder: Path, record: dict[str, Any]) -> str | None:
    """The way in which a stage's folder differs from what was committed of it, or, where nothing was, from
    its record; None where it does not."""
    home = _home(folder)
    if home is None:
        return differs(folder, record)
    inside = folder.relative_to(home).as_posix() + "/"
    shared = {*store.FILES, store.TENSORS}
    named = [home / name for name in named_in(home / MANIFEST) if name.startswith(inside) or name in shared]
    there = [path for path in folder.rglob("*") if path.is_file()]
    return next(filter(None, map(_committed_otherwise, sorted({*named, *there}))), None)


def _behind(path: Path) -> Path:
    """The file that has what is read at a node's path: itself, or the table of nodes of a store."""
    return (
        path
        if path.is_file() or (found := store.packed(path.parent)) is None
        else found[0].place / store.NODES
    )


def require_committed(path: Path) -> None:
    """Raise BrokenError where a committed file is not what the reference.json of its folder names. A
    benchmark's folder has no reference.json, and its files are taken as they are; so are files that are not
    committed."""
    if wrong := _committed_otherwise(path):
        raise BrokenError(wrong)


def read_committed(path: Path) -> str:
    """The text of a file as of `require_committed`."""
    require_committed(_behind(path))
    return store.read(path).decode()


def _home(path: Path) -> Path | None:
    """The folder of committed results that a path lies in."""
    return next((folder for folder in path.parents if (folder / MANIFEST).is_file()), None)


def _committed_otherwise(path: Path) -> str | None:
    if (home := _home(path)) is None:
        return None
    expected = named_in(home / MANIFEST).get(path.relative_to(home).as_posix(), "no such file")
    got = once(sha256, path) if path.is_file() else "no file"
    if got == expected:
        return None
    return (
        f"{path} is not what {home / MANIFEST} says: sha256 {got} got, {expected} expected; `git checkout"
        f" {home}` restores what was committed"
    )


def named_in(manifest: Path) -> dict[str, str]:
    """Name -> sha256 of each file that a reference.json names. Raises BrokenError for one that names none."""
    return once(read_manifest, manifest)["files"]
