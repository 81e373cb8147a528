"""The store: finished nodes of a campaign in a few parquet files, which are read as if each node's folder
were there.

    nodes.parquet     a row a node: every field of its run.json, its metrics.json without the readings, and
                      sha256 of all that is stored of it
    readings.parquet  a row a reading: node, metric, of, at (JSON), value, stderr, n, why
    items.parquet     a row a scored item: node, and the fields that measurements write, each NULL where an
                      item has none
    curves.parquet    a row a logged training step: node, step, time, loss, ...
    tensors.parquet   a row a tensor that a measurement left for a figure: node, file, tensor, shape, values;
                      a store without such tensors has not the file

A node is named by its folder in the campaign, such as `runs/lizard/mmlu`. A column holds numbers, booleans or
texts where all its values are such; otherwise it holds JSON, and the column's metadata says so. The same
nodes give the same bytes. Readers look into a node's own folder first and then into the store above it
(`read`, `columns`, `curve`); run.json, metrics.json and files of tensors come back byte for byte.
"""

import functools
import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from relinear.errors import UserError
from relinear.files import aside
from relinear.schemas import BrokenError

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = 1  # of the files, which is in their metadata; a newer one is refused
NODES, READINGS, ITEMS, CURVES = FILES = (
    "nodes.parquet",
    "readings.parquet",
    "items.parquet",
    "curves.parquet",
)
TENSORS = "tensors.parquet"
RECORD, METRICS, CURVE = "run.json", "metrics.json", "history.jsonl"
# metadata of a file, and of a column that holds JSON
MARK, JSON = b"relinear.store", {b"relinear.json": b"1"}
GROUP = 1 << 17  # rows of a row group: of a large table only the groups with a node's rows are read
PAGE = 1 << 27  # bytes of a page of tensors, unpacked: what repeats within a page is written once
# bytes that the distinct values of a column may take in a group before each is written again
DICTIONARY = 1 << 24
LARGEST = 1 << 30  # bytes of a file, unpacked: more is no result of ours
EXACT = 2**53  # integers up to this are exact as floats
LACKS = object()  # in the place of a value that a row has not
KINDS = {bool: "bool", int: "int", float: "float", str: "str"}
CASTS = {"bool": bool, "int": int, "float": float}

Columns = dict[str, list[Any]]  # of items: field -> a value an item, None where an item has none


class Packed(NamedTuple):
    """All that is stored of a node: run.json and metrics.json as bytes, items as columns, the lines of a
    training's curve, its safetensors files of float32 tensors by name. None: it has none."""

    record: bytes
    metrics: bytes | None = None
    items: Columns | None = None
    curve: list[dict[str, Any]] | None = None
    tensors: dict[str, bytes] | None = None


# --- as a caller reads a node ---


def home(path: Path) -> Path | None:
    """The folder of the store that a node's or a run's folder lies in, at most three levels above; None where
    there is no store."""
    return next((folder for folder in (path, *path.parents[:3]) if (folder / NODES).is_file()), None)


def has(folder: Path) -> bool:
    """Whether a node is finished: its folder has a run.json, or the store above has the node."""
    return (folder / RECORD).is_file() or packed(folder) is not None


def packed(folder: Path) -> "tuple[Store, str] | None":
    """The store that has a node, and the node's name in the store. None for a node that lies in its own
    folder, or nowhere."""
    if (folder / RECORD).is_file() or (place := home(folder)) is None:
        return None
    name, store = folder.relative_to(place).as_posix(), opened(place)
    return (store, name) if name in store.rows else None


def named(folder: Path) -> str:
    """A node's record in provenance: `<folder>/run.json`, or `<place>/nodes.parquet#<node>` of one in a
    store."""
    found = packed(folder)
    return (
        (folder / RECORD).as_posix() if found is None else f"{(found[0].place / NODES).as_posix()}#{found[1]}"
    )


def folder_of(name: str) -> Path:
    """The folder of a node that provenance names, as `named` gives its record."""
    place, _, node = name.partition("#")
    return Path(place).parent / node if Path(place).name == NODES else Path(place).parent


def read(path: Path) -> bytes:
    """The bytes of a node's run.json, metrics.json or file of tensors, of its folder or of the store. Raises
    FileNotFoundError where neither has the file."""
    if (
        not path.is_file()
        and (found := packed(path.parent)) is not None
        and found[0].has(found[1], path.name)
    ):
        return found[0].file(found[1], path.name)
    return path.read_bytes()


def exists(path: Path) -> bool:
    """Whether `read` can read this file."""
    return path.is_file() or (
        (found := packed(path.parent)) is not None and found[0].has(found[1], path.name)
    )


def nodes(root: Path) -> list[Path]:
    """The folders of all finished nodes of a campaign's results, those of its store among them. Folders whose
    names begin with a dot hold none."""
    found = {path.parent for kind in ("[!.]*/*", "runs/*/*") for path in root.glob(f"{kind}/{RECORD}")}
    return sorted(
        found | ({root / name for name in opened(root).rows} if (root / NODES).is_file() else set())
    )


def parts(run: Path) -> list[Path]:
    """The folders of a run's finished steps and measurements."""
    found = {path.parent for path in run.glob(f"*/{RECORD}")}
    if (place := home(run)) is not None and place != run:
        found |= {place / name for name in opened(place).rows if Path(name).parent == run.relative_to(place)}
    return sorted(found)


def runs(root: Path) -> list[str]:
    """The names of the runs of a campaign's results of which something is finished or has a folder."""
    packed_runs = opened(root).rows if (root / NODES).is_file() else ()
    return sorted(
        {path.name for path in (root / "runs").glob("*")}
        | {name.split("/")[1] for name in packed_runs if name.startswith("runs/")}
    )


def campaigns(reference: Path) -> list[Path]:
    """The folders of results in `reference` that have runs."""
    return sorted({path.parent for pattern in (f"*/{NODES}", "*/runs") for path in reference.glob(pattern)})


def columns(folder: Path) -> Columns | None:
    """The items of a node that lies in a store, as columns; None for a node without items, or in no store."""
    found = packed(folder)
    return found and found[0].items(found[1])


def curve(folder: Path) -> list[dict[str, Any]] | None:
    """The lines of a training's curve, of the node's folder or of the store; None for a node without one.
    Raises BrokenError."""
    if (path := folder / CURVE).is_file():
        return [
            _line(line, f"{path}:{number}")
            for number, line in enumerate(path.read_bytes().splitlines(), start=1)
        ]
    found = packed(folder)
    return found and found[0].curve(found[1])


def _line(text: bytes, where: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BrokenError(f"{where} is not JSON: {error}") from None


def opened(place: Path) -> "Store":
    """The store in a folder. A process reads its files again only if they were replaced. Raises BrokenError
    for files that cannot be believed."""
    files = map(place.joinpath, (*FILES, TENSORS))
    there = [path.stat() for path in files if path.name == NODES or path.exists()]
    return _opened(place, *((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in there))


@functools.lru_cache(64)
def _opened(place: Path, *_: object) -> "Store":
    return Store(place)


class Store:
    """The nodes in a folder's files. `rows`: node -> its row. Every value read is checked against the
    sha256 in the node's row."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._nodes = _table(place / NODES)
        names = self._nodes["node"].to_pylist()
        if len(set(names)) < len(names):
            raise BrokenError(f"{place / NODES} has a node twice")
        self.rows = {name: i for i, name in enumerate(names)}
        self._about = {column: self._nodes[column].to_pylist() for column in ("readings", "items", "curve")}
        self._begins = {
            column: [0, *accumulate(n or 0 for n in counts)] for column, counts in self._about.items()
        }
        self._texts: dict[tuple[str, str], bytes] = {}  # (node, file): what was read, and checked, before
        self._of_tensors: dict[str, dict[str, list[int]]] = {}  # node -> file -> its rows of TENSORS
        if (place / TENSORS).is_file():
            table = _rows_of(place / TENSORS, 0, None, ["file"])
            for i, (node, file) in enumerate(zip(*(each.to_pylist() for each in table.columns), strict=True)):
                self._of_tensors.setdefault(node, {}).setdefault(file, []).append(i)

    def row(self, node: str) -> dict[str, Any]:
        """The node's row of nodes.parquet."""
        return self._nodes.slice(self.rows[node], 1).to_pylist()[0]

    def record(self, node: str) -> bytes:
        """The node's run.json."""
        if (node, NODES) not in self._texts:
            row, schema = self.row(node), self._nodes.schema
            values = {
                name: _value(row[f"run.{name}"], _is_json(schema.field(f"run.{name}")))
                for name in json.loads(row["fields"])
            }
            self._texts[node, NODES] = self._checked(
                node, self._text(node, values, row["run_json"], NODES), row["sha256"], NODES
            )
        return self._texts[node, NODES]

    def metrics(self, node: str) -> bytes | None:
        """The node's metrics.json; None for a node without one."""
        if (node, READINGS) not in self._texts:
            row = self.row(node)
            if row["metrics_sha256"] is None:
                return None
            values = json.loads(row["metrics"])
            if row["readings"] is not None:
                values["readings"] = [_reading(each) for each in self._rows(READINGS, "readings", node)]
            text = self._text(node, values, row["metrics_json"], READINGS)
            self._texts[node, READINGS] = self._checked(node, text, row["metrics_sha256"], READINGS)
        return self._texts[node, READINGS]

    def has(self, node: str, name: str) -> bool:
        """Whether `file` has a file of this name."""
        if name == METRICS:
            return self.row(node)["metrics_sha256"] is not None
        return name == RECORD or name in self._of_tensors.get(node, {})

    def file(self, node: str, name: str) -> bytes:
        """The node's run.json, metrics.json or file of tensors, which it must have."""
        if name in (RECORD, METRICS):
            return self.record(node) if name == RECORD else self.metrics(node)
        from safetensors.numpy import save

        path = self.place / TENSORS
        table = _table(path).take(self._of_tensors[node][name])
        try:
            names, shapes = (table[column].to_pylist() for column in ("tensor", "shape"))
            numbers = [each.values.to_numpy() for each in table["values"]]
            tensors = {n: x.reshape(json.loads(s)) for n, s, x in zip(names, shapes, numbers, strict=True)}
            text = save(tensors)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BrokenError(f"{path}, node {node}: {name} cannot be put together: {error!r}") from None
        expected = json.loads(self.record(node))["artefacts"].get(name, {}).get("sha256", "no such file")
        return self._checked(node, text, expected, TENSORS)

    def tensors(self, node: str) -> dict[str, bytes] | None:
        """The node's files of tensors by name; None for a node without one."""
        return {name: self.file(node, name) for name in self._of_tensors.get(node, ())} or None

    def items(self, node: str) -> Columns | None:
        """The node's items as columns; None for a node without items."""
        row = self.row(node)
        if row["item_fields"] is None:
            return None
        kinds, table = json.loads(row["item_fields"]), None
        if kinds:
            table = self._part(ITEMS, "items", node, list(kinds))
        columns = {
            name: _decoded(table[name], table.schema.field(name), kind) for name, kind in kinds.items()
        }
        self._checked(node, _text_of_items(columns), row["items_sha256"], ITEMS)
        return columns

    def curve(self, node: str) -> list[dict[str, Any]] | None:
        """The lines of the node's curve; None for a node without one."""
        row = self.row(node)
        if row["curve"] is None:
            return None
        lines = list(self._rows(CURVES, "curve", node))
        self._checked(node, _text_of_curve(lines), row["curve_sha256"], CURVES)
        return lines

    def verify(self) -> None:
        """Raises BrokenError, which names file and node, unless everything of every node is as its row says,
        and no row is of another node."""
        for file, column in ((READINGS, "readings"), (ITEMS, "items"), (CURVES, "curve")):
            rows, counted = _file(self.place / file).metadata.num_rows, self._begins[column][-1]
            if rows != counted:
                raise BrokenError(
                    f"{self.place / file} has {rows} rows, and {NODES} counts {counted}: they are not of one"
                    " store"
                )
        if foreign := self._of_tensors.keys() - self.rows.keys():
            raise BrokenError(
                f"{self.place / TENSORS} has tensors of {min(foreign)}, and {NODES} no such node"
            )
        self.all()

    def all(self) -> dict[str, Packed]:
        """Every node with all that is stored of it."""
        return {
            node: Packed(
                *(of(node) for of in (self.record, self.metrics, self.items, self.curve, self.tensors))
            )
            for node in self.rows
        }

    def _text(self, node: str, values: dict[str, Any], exact: str | None, file: str) -> bytes:
        """A file of the node as it was: these values as relinear writes them, or `exact`, which must say the
        same, where it was written otherwise."""
        if exact is not None and json.dumps(_floats(json.loads(exact))) != json.dumps(_floats(values)):
            raise BrokenError(
                f"{self.place / file}, node {node}: the columns say something else than the file that was"
                " packed"
            )
        return json.dumps(values, indent=1).encode() if exact is None else exact.encode()

    def _checked(self, node: str, text: bytes, expected: str, file: str) -> bytes:
        if (got := hashlib.sha256(text).hexdigest()) != expected:
            where = f"{self.place / file}, node {node}"
            raise BrokenError(
                f"{where}: sha256 {got} got, {expected} expected; `git checkout {self.place}` restores what"
                " was committed"
            )
        return text

    def _rows(self, file: str, column: str, node: str) -> Iterator[dict[str, Any]]:
        """The node's rows of a table, each with the fields that it has."""
        table = self._part(file, column, node, None)
        fields = {field.name: _is_json(field) for field in table.schema if field.name != "node"}
        for row in table.to_pylist():
            yield {
                name: _value(row[name], is_json) for name, is_json in fields.items() if row[name] is not None
            }

    def _part(self, file: str, column: str, node: str, fields: list[str] | None) -> "pa.Table":
        """The node's rows of a table. Raises BrokenError where they are another's."""
        path, at = self.place / file, self.rows[node]
        begin, end = self._begins[column][at], self._begins[column][at + 1]
        table = _rows_of(path, begin, end, fields)
        if table.num_rows != end - begin or table["node"].unique().to_pylist() not in ([], [node]):
            raise BrokenError(
                f"{path}: rows {begin} to {end} are not those of node {node}: the file is not of the {NODES}"
                " beside it"
            )
        return table


# --- as nodes are written ---


def write(place: Path, packed_nodes: Mapping[str, Packed]) -> None:
    """Write the files of a store with exactly these nodes, in the order of their names.

    Raises UserError for a file of tensors that others than float32 or metadata are in.
    """
    found = {
        node: each._replace(items=each.items and _plain(each.items))
        for node, each in sorted(packed_nodes.items())
    }
    read_metrics = {
        node: json.loads(each.metrics) for node, each in found.items() if each.metrics is not None
    }
    readings = {
        node: each["readings"]
        for node, each in read_metrics.items()
        if isinstance(each.get("readings"), list)
    }
    kinds = {
        node: {name: _kind(values) for name, values in each.items.items()}
        for node, each in found.items()
        if each.items is not None
    }
    about = []
    for node, each in found.items():
        told, kept = json.loads(each.record), read_metrics.get(node)
        exact = json.dumps(told, indent=1).encode() == each.record
        again = kept and (
            kept | {"readings": [_reading(_stored(r)) for r in readings[node]]} if node in readings else kept
        )
        whole = each.metrics is None or json.dumps(again, indent=1).encode() == each.metrics
        items, curve = each.items, each.curve
        about.append(
            {
                "node": node,
                "sha256": hashlib.sha256(each.record).hexdigest(),
                "fields": json.dumps(list(told)),
                "run_json": None if exact else each.record.decode(),
                "metrics": (
                    None
                    if kept is None
                    else json.dumps(kept | {"readings": None} if node in readings else kept)
                ),
                "metrics_json": None if whole else each.metrics.decode(),
                "metrics_sha256": None if kept is None else hashlib.sha256(each.metrics).hexdigest(),
                "item_fields": None if items is None else json.dumps(kinds[node]),
                "items": None if items is None else _length(items),
                "items_sha256": None if items is None else hashlib.sha256(_text_of_items(items)).hexdigest(),
                "curve": None if curve is None else len(curve),
                "curve_sha256": None if curve is None else hashlib.sha256(_text_of_curve(curve)).hexdigest(),
                "readings": len(readings[node]) if node in readings else None,
            }
        )
    _write(place / READINGS, _readings_table(readings), ("value", "stderr"))
    _write(
        place / ITEMS, _items_table({node: each.items for node, each in found.items() if each.items}, kinds)
    )
    lines = [(node, line) for node, each in found.items() for line in each.curve or ()]
    curves = _table_of([line for _, line in lines], {"node": _texts(node for node, _ in lines)}, exact=False)
    _write(place / CURVES, curves, [field.name for field in curves.schema if field.type == "double"])
    (place / TENSORS).unlink(missing_ok=True)
    if tensors := [
        (node, name, text)
        for node, each in found.items()
        for name, text in sorted((each.tensors or {}).items())
    ]:
        _write(place / TENSORS, _tensors_table(tensors), ["values.list.element"])
    told = [
        {f"run.{name}": value for name, value in json.loads(each.record).items()} for each in found.values()
    ]
    _write(
        place / NODES,
        _table_of(
            told, {name: _own_column(name, [each[name] for each in about]) for name in _OWN}, exact=True
        ),
    )


def joined(place: Path, packed_nodes: Mapping[str, Packed]) -> dict[str, Packed]:
    """The nodes of the store in a folder, which may have none, and these. A node of the same name is the new
    one."""
    return {**(opened(place).all() if (place / NODES).is_file() else {}), **packed_nodes}


# --- values, columns and files ---

_OWN = (
    "node",
    "sha256",
    "fields",
    "run_json",
    "metrics",
    "metrics_json",
    "metrics_sha256",
    "readings",
    "item_fields",
    "items",
    "items_sha256",
    "curve",
    "curve_sha256",
)


def _own_column(name: str, values: list[Any]) -> "pa.Array":
    import pyarrow as pa

    return pa.array(values, pa.int64() if name in ("readings", "items", "curve") else pa.string())


def _stored(reading: Mapping[str, Any]) -> dict[str, Any]:
    """A reading as it comes out of the table: its numbers are floats."""
    numbers = {name: None if reading[name] is None else float(reading[name]) for name in ("value", "stderr")}
    return {**reading, **numbers, "at": json.dumps(reading["at"])}


def _reading(row: Mapping[str, Any]) -> dict[str, Any]:
    why = {} if row.get("why") is None else {"why": row["why"]}
    return {
        "metric": row["metric"],
        "of": row["of"],
        "at": json.loads(row["at"]),
        "value": row.get("value"),
        "stderr": row.get("stderr"),
        "n": row["n"],
        **why,
    }


def _readings_table(readings: Mapping[str, Sequence[Mapping[str, Any]]]) -> "pa.Table":
    import pyarrow as pa

    types = {
        "metric": pa.string(),
        "of": pa.string(),
        "at": pa.string(),
        "value": pa.float64(),
        "stderr": pa.float64(),
        "n": pa.int64(),
        "why": pa.string(),
    }
    rows = [_stored(each) for own in readings.values() for each in own]
    columns = {"node": _texts(node for node, own in readings.items() for _ in own)}
    return pa.table(
        columns | {name: pa.array([row.get(name) for row in rows], type_) for name, type_ in types.items()}
    )


def _items_table(items: Mapping[str, Columns], kinds: Mapping[str, Mapping[str, str]]) -> "pa.Table":
    import pyarrow as pa

    fields = [pa.field("node", pa.string())]
    columns = [_texts(node for node, own in items.items() for _ in range(_length(own)))]
    for name in sorted({name for own in items.values() for name in own}):
        values = [value for own in items.values() for value in own.get(name, [None] * _length(own))]
        field, column = _encoded(name, values, {own[name] for own in kinds.values() if name in own}, None)
        fields.append(field)
        columns.append(column)
    return pa.table(columns, pa.schema(fields))


def _tensors_table(files: Iterable[tuple[str, str, bytes]]) -> "pa.Table":
    import numpy as np
    import pyarrow as pa
    from safetensors.numpy import load, save

    rows = []
    for node, name, text in files:
        tensors = load(text)
        if any(x.dtype != np.float32 for x in tensors.values()) or save(tensors) != text:
            raise UserError(
                f"{node}/{name}: a store has safetensors files of float32 tensors, without metadata"
            )
        rows += [
            (node, name, tensor, json.dumps(x.shape), x.ravel()) for tensor, x in sorted(tensors.items())
        ]
    names = [_texts(row[i] for row in rows) for i in range(4)]
    values = pa.array([row[4] for row in rows], pa.list_(pa.float32()))
    return pa.table([*names, values], names=["node", "file", "tensor", "shape", "values"])


def _table_of(rows: Sequence[Mapping[str, Any]], first: Mapping[str, "pa.Array"], exact: bool) -> "pa.Table":
    """A table of rows, NULL where a row lacks a field, after some columns. `exact`: a 2 among floats does not
    become 2.0."""
    import pyarrow as pa

    fields, columns = [pa.field(name, column.type) for name, column in first.items()], list(first.values())
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name, LACKS) for row in rows]
        kinds = {KINDS.get(type(value), "json") for value in values if value is not LACKS}
        field, column = _encoded(
            name,
            values,
            {"json"} if exact and len(kinds) > 1 or "bool" in kinds and len(kinds) > 1 else kinds,
            LACKS,
        )
        fields.append(field)
        columns.append(column)
    return pa.table(columns, pa.schema(fields))


def _texts(values: Iterable[str]) -> "pa.Array":
    import pyarrow as pa

    return pa.array(list(values), pa.string())


def _plain(items: Columns) -> Columns:
    """Items in which a field that has integers and floats has floats alone, so that their column holds
    numbers."""
    mixed = {
        name
        for name, values in items.items()
        if {type(value) for value in values} - {type(None)} == {int, float}
    }
    return {
        name: (
            [float(value) if type(value) is int and abs(value) <= EXACT else value for value in values]
            if name in mixed
            else values
        )
        for name, values in items.items()
    }


def _floats(value: Any) -> Any:
    """The value with floats in place of integers, to compare by."""
    if isinstance(value, dict):
        return {name: _floats(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_floats(part) for part in value]
    return float(value) if type(value) is int and abs(value) <= EXACT else value


def _kind(values: Iterable[Any]) -> str:
    """What a node's values of a field are: of one kind, `json` for any others, `none` where there are
    none."""
    types = {type(value) for value in values} - {type(None)}
    return "none" if not types else KINDS.get(types.pop(), "json") if len(types) == 1 else "json"


def _encoded(name: str, values: list[Any], kinds: set[str], lacks: Any) -> "tuple[pa.Field, pa.Array]":
    """A column of values of these kinds. `lacks` is the value that becomes NULL."""
    import pyarrow as pa

    kinds = kinds - {"none"}
    type_ = next(
        (
            t
            for t, of in (
                (pa.string(), {"str"}),
                (pa.bool_(), {"bool"}),
                (pa.int64(), {"bool", "int"}),
                (pa.float64(), {*CASTS}),
            )
            if kinds and kinds <= of
        ),
        None,
    )
    if type_ == pa.float64() and any(isinstance(value, int) and abs(value) > EXACT for value in values):
        type_ = None
    if type_ is None:
        return pa.field(name, pa.string(), metadata=JSON), pa.array(
            [None if v is lacks else json.dumps(v) for v in values], pa.string()
        )
    if type_ == pa.int64() and "bool" in kinds:
        values = [int(value) if isinstance(value, bool) else value for value in values]
    if type_ == pa.float64() and kinds != {"float"}:
        values = [float(value) if isinstance(value, int) else value for value in values]
    return pa.field(name, type_), pa.array(
        [None if value is lacks else value for value in values], type_, from_pandas=False
    )


def _is_json(field: "pa.Field") -> bool:
    return (field.metadata or {}).keys() >= JSON.keys()


def _value(value: Any, is_json: bool) -> Any:
    return json.loads(value) if value is not None and is_json else value


def _decoded(column: Any, field: "pa.Field", kind: str) -> list[Any]:
    """A column's values for a node whose values are of this kind."""
    values = column.to_pylist()
    if _is_json(field):
        return [None if value is None else json.loads(value) for value in values]
    cast = CASTS.get(kind)
    return (
        values
        if cast is None or (values and type(values[0]) is cast)
        else [None if value is None else cast(value) for value in values]
    )


def _length(items: Columns) -> int:
    return len(next(iter(items.values()), ()))


def _text_of_items(columns: Columns) -> bytes:
    return json.dumps(columns, separators=(",", ":")).encode()


def _text_of_curve(lines: Sequence[Mapping[str, Any]]) -> bytes:
    return json.dumps(_floats(list(lines)), separators=(",", ":"), sort_keys=True).encode()


def _write(path: Path, table: "pa.Table", split: Sequence[str] = ()) -> None:
    """Write a table. `split`: columns of floats, of which like bytes are written beside each other."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = table.replace_schema_metadata({MARK: str(FORMAT).encode()})
    # mostly each one more than the one before
    counts = [field.name for field in table.schema if pa.types.is_integer(field.type)]
    encoding = dict.fromkeys(counts, "DELTA_BINARY_PACKED") | dict.fromkeys(split, "BYTE_STREAM_SPLIT")
    with aside(path) as unfinished:
        pq.write_table(
            table,
            unfinished,
            compression="zstd",
            compression_level=19,
            row_group_size=GROUP,
            data_page_size=PAGE,
            dictionary_pagesize_limit=DICTIONARY,
            use_dictionary=[name for name in table.column_names if name not in encoding],
            column_encoding=encoding,
        )


def _table(path: Path) -> "pa.Table":
    return _rows_of(path, 0, None, None)


def _rows_of(path: Path, begin: int, end: int | None, fields: list[str] | None) -> "pa.Table":
    """Rows `begin` to `end` of a file; fewer where it has fewer."""
    file = _file(path)
    starts = [0, *accumulate(file.metadata.row_group(i).num_rows for i in range(file.num_row_groups))]
    end = starts[-1] if end is None else end
    groups = (
        range(max(bisect_right(starts, begin) - 1, 0), max(bisect_right(starts, end - 1), 0))
        if begin < end
        else range(0)
    )
    groups = [group for group in groups if group < file.num_row_groups]
    columns = None if fields is None else ["node", *fields]
    try:
        table = (
            file.read_row_groups(groups, columns=columns) if columns else _whole_groups(file, tuple(groups))
        )
    except Exception as error:  # pyarrow has no one class for what a damaged file makes it raise
        raise BrokenError(f"{path} cannot be read: {error}") from error
    if lacking := [name for name in columns or () if name not in table.column_names]:
        raise BrokenError(f"{path} has no column {', '.join(lacking)}, which {NODES} names")
    return table.slice(begin - starts[groups[0]] if groups else 0, end - begin)


@functools.lru_cache(4)
def _whole_groups(file: Any, groups: tuple[int, ...]) -> "pa.Table":
    """The row groups of an open file, all columns: the next node's readings or curve mostly lie in the groups
    of the one before."""
    return file.read_row_groups(groups)


def _file(path: Path) -> Any:
    """The open file. Raises BrokenError for one that is not there, is cut, is no parquet or no store's, or is
    of a newer format."""
    try:
        stat = path.stat()
    except OSError as error:
        raise BrokenError(f"{path} cannot be read: {error}; a store has {', '.join(FILES)}") from None
    return _opened_file(path, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(256)
def _opened_file(path: Path, *_: int) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise BrokenError(f"{path} cannot be read, it was cut or is no parquet file: {error}") from None
    told = (file.schema_arrow.metadata or {}).get(MARK)
    if told is None or not told.isdigit():
        raise BrokenError(f"{path} is no file of a store: its metadata has no {MARK.decode()}")
    if (
        size := sum(file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups))
    ) > LARGEST:
        raise BrokenError(f"{path} unpacks to {size:,} bytes; a store's files have {LARGEST:,} at most")
    if int(told) != FORMAT:
        raise BrokenError(f"{path} is of format {int(told)} of the store; this version reads {FORMAT}")
    return file
