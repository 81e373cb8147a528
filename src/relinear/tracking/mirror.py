"""The MLflow mirror of the result files: one run per table row, below it one run per attempt at a stage.

The files under ``results/`` are the truth: `rebuild` restores a lost store from run.json, metrics.json and
history.jsonl, and what `relinear.tracking.live` writes while a stage runs is the same.

How a run is found again: a row's carries the tag ``relinear.row``, a stage's the tags ``run``, ``stage``,
``key`` and ``attempt``. ``tags.current = 'true'`` lists the latest attempt at every stage, and
``tags.mlflow_run_id = '<id in run.json>'`` finds a run by its first id also after a rebuild. Tables and
figures are artifacts of one run, `tables and figures`.
"""

import json
import re
import sys
from collections.abc import Collection
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from relinear import records
from relinear.core import store as nodes
from relinear.draw.beside import PROVENANCE, TOLD
from relinear.errors import UserError
from relinear.files import MANIFEST
from relinear.plan.names import SEED
from relinear.schemas import Line, Provenance, require
from relinear.tracking import rows, store
from relinear.tracking.store import Entry, entries, flatten_metrics, step_entries, texts

LARGEST_ARTIFACT = 5 * 2**20  # bytes
TEXTS = (nodes.RECORD, nodes.METRICS)  # files of a stage that are copied, also out of a store
COPIED = {".png", ".pdf", ".svg", ".csv", ".md"}  # endings of further ones
IDENTITY = ("scale", "run", "stage", "key", "attempt")
NAME = re.compile(r"[A-Za-z0-9][\w.@+-]*")  # a scale, a run or a stage: no path, and no quote of a query
RECORD_FIELDS = (
    *IDENTITY,
    "config_hash",
    "code_hash",
    "datasets",
    "git",
    "versions",
    "hardware",
    "started",
    "wall_seconds",
    "tags",
)
SHOWN = 50  # lines of a committed curve in MLflow, besides its last
CURVES = ("loss", "lr", "grad_norm")  # of a training, which its row has too
TABLES = "tables and figures"


def init(uri: str, root: str | None = None, planned: Collection[rows.Row] = ()) -> None:
    """Create the store, its schema and, if `root` is given (mini, mini-x4), that folder's experiment with the
    runs of these rows.

    Harmless when repeated.

    `uri` is ``sqlite:///<path>`` (its folder is created) or whatever else mlflow takes, such as
    ``http://host:port``. SQLite needs a local disk, or it warns on stderr. Raises StoreError for a store that
    cannot be reached.
    """
    store.warn_of_network(uri)
    with store.access(uri):
        client = store.connect(uri)
        if root is None:
            return
        experiment = store.experiment_of(client, uri, root)
        for row in sorted(planned, key=lambda row: row.base):  # a row before those that repeat it
            if rows.find(client, experiment, row.name) is None:
                rows.ready(client, uri, experiment, row, status="SCHEDULED")
            else:
                rows.ready(client, uri, experiment, row)


def rebuild(uri: str, results: Path | str) -> int:
    """Mirror every finished stage folder below `results` that the store lacks; returns how many were added.
    Tables and figures are copied anew.

    Committed results (results/reference) are not the user's runs and stay out; `import_folder` takes them.

    A stage folder is one that holds run.json and is named after its stage. A run is known by (scale, run,
    stage, key, attempt), so a second call adds nothing; a run that the store holds only in part is replaced.
    The latest run of a stage, by its start, becomes the current one. Call it while no stage is running.

    The results' own SQLite store, where it is damaged, of another program or a folder, is set aside under
    another name and made anew; a line on stderr says so.

    A stage whose record cannot be believed is left out, which a line on stderr says. Raises ValueError,
    before any run is written, for an experiment ``relinear-<root>`` that holds runs of something else, and
    StoreError for a store that cannot be reached.
    """
    results = Path(results)
    committed = {path.parent for path in results.resolve().rglob(MANIFEST)}
    with store.access(uri), store.without_sync():
        store.set_aside_broken(uri, results)
        return _mirror(uri, results, _stage_folders(results, committed, strict=False), but=committed)


def import_folder(uri: str, folder: Path | str, label: str = "reference") -> int:
    """Mirror the stage folders of other results, committed or a colleague's, beside one's own: into
    experiments relinear-<root>-<label>.

    Returns and raises as `rebuild`; UserError for a folder without stage folders and a label of other than
    letters, digits, . _ -
    """
    if not re.fullmatch(r"[\w.-]+", label):
        raise UserError(f"a label is of letters, digits, '.', '_' and '-'; got {label!r}")
    found = _stage_folders(Path(folder))
    if not found:
        raise UserError(
            f"{str(folder)!r} holds no finished stages (folders named after their stage, with a run.json)"
        )
    with store.access(uri), store.without_sync():
        return _mirror(uri, Path(folder), found, f"-{label}")


class Stage(NamedTuple):
    """A finished stage: its record, its curve by step, its final numbers by name, its small files by name."""

    record: dict[str, Any]
    curve: list[Entry]
    numbers: dict[str, float]
    files: dict[str, Path | bytes]


def read_stage(folder: Path, record: dict[str, Any]) -> Stage:
    """What the mirror shows of a finished stage. Raises BrokenError."""
    return Stage(
        record, curve_of(folder), flatten_metrics(_final_numbers(folder, record)), _small_files(folder)
    )


def _mirror(
    uri: str, root: Path, found: dict[Path, dict], suffix: str = "", but: Collection[Path] = ()
) -> int:
    """Write what the store lacks of these stage folders, and the tables of `root`, into the experiments of
    their folders, named with the suffix."""
    client = store.connect(uri)
    experiments = {
        of: store.experiment_of(client, uri, f"{of}{suffix}")
        for of in set(map(store.root_of, found.values()))
    }
    known = {of: _stage_runs(client, experiment, f"{of}{suffix}") for of, experiment in experiments.items()}
    whole: dict[tuple[str, str], dict[Path, dict]] = {}  # (scale, row): all its folders
    # (scale, whether of a further seed, row): those that the store lacks
    missing: dict[tuple[str, bool, str], dict[Path, dict]] = {}
    for folder, record in found.items():
        of, name = store.root_of(record), rows.name_of(record)
        whole.setdefault((of, name), {})[folder] = record
        same = known[of].get(_identity(record), [])
        if any(map(_is_whole, same)):
            continue
        curve_of(folder)  # an error comes before anything is written
        missing.setdefault((of, SEED.search(name) is not None, name), {})[folder] = record
        first = record.get("mlflow_run_id", "")
        # what is there of this attempt
        for part in [run for run in same if first in (run.info.run_id, run.data.tags.get("mlflow_run_id"))]:
            client.delete_run(part.info.run_id)
            same.remove(part)
    count = sum(map(len, missing.values()))
    with tqdm(total=count, desc="MLflow", unit="stage", disable=None) as progress:
        for (of, _, name), folders in sorted(missing.items(), key=lambda item: item[0]):
            _mirror_row(client, uri, experiments[of], whole[of, name], folders, known[of], progress)
    for of, files in _drawn(root, but).items():
        if of in experiments:
            _log_tables(client, experiments[of], of, files)
    return count


def _mirror_row(
    client: Any,
    uri: str,
    experiment: str,
    whole: dict[Path, dict],
    missing: dict[Path, dict],
    known: dict,
    progress: tqdm,
) -> None:
    """Write a row's run and the missing ones of its stages; `whole` are all its stages that there are files
    of, `known` its experiment's runs.

    The stages' runs are FINISHED after all that the row has of them is written. What an end before that
    leaves is replaced by the next rebuild.
    """
    row = rows.row_of(whole.values())
    above, _ = rows.place(client, uri, experiment, row, min(_span(record)[0] for record in missing.values()))
    row_id = above.info.run_id
    own = {(r["scale"], r["run"], r["stage"]) for r in whole.values()}
    current: dict[str, tuple[int, str, int]] = {}  # by stage: start, id and milliseconds of the current run
    for (*stage, _, _), same in known.items():
        for run in same if tuple(stage) in own else ():
            label, (begin, end) = rows.label(row.name, *stage[1:]), (run.info.start_time, run.info.end_time)
            worked = end - begin if end and run.data.tags.get("mlflow.parentRunId") == row_id else 0
            current[label] = max(current.get(label, (0, "", 0)), (begin, run.info.run_id, worked))
    shown: dict[str, Stage] = {}
    written: dict[str, int] = {}  # ends of the runs that this writes
    for folder, record in missing.items():  # by start
        label, (begin, end) = rows.label(row.name, record["run"], record["stage"]), _span(record)
        is_current = begin >= current.get(label, (0,))[0]
        if is_current and label in current:
            client.set_tag(current[label][1], "current", "false")
        stage = read_stage(folder, record)
        run_id = _write(client, experiment, row_id, stage, is_current)
        written[run_id] = end
        progress.update()
        if is_current:
            current[label], shown[label] = (begin, run_id, end - begin), stage
    finish(
        client,
        experiment,
        above,
        row,
        shown,
        {label: (run_id, worked) for label, (_, run_id, worked) in current.items()},
    )
    for run_id, end in written.items():
        client.set_terminated(run_id, "FINISHED", end)


def _write(client: Any, experiment: str, row_id: str, stage: Stage, is_current: bool) -> str:
    """Write a finished stage's run by the calls that `live.Tracker` makes while a stage runs, with the
    original times; returns its id. The run is left RUNNING."""
    begin, end = _span(stage.record)
    about = describe(stage.record)
    # Known by its first id from the start, so that a rebuild cut short is noticed and redone by the next.
    run_id = create(
        client, experiment, row_id, about, about["tags"] | folder_tags(stage.record), begin, is_current
    )
    final = entries(stage.numbers, max((step for *_, step in stage.curve), default=0), end / 1000)
    # mlflow reads all of a run for its first file, so before there is much
    store.log_files(client, run_id, stage.files)
    fill(client, run_id, about, stage.curve + final)
    return run_id


def finish(
    client: Any,
    experiment: str,
    above: Any,
    row: rows.Row,
    stages: dict[str, Stage],
    current: dict[str, tuple[str, int]],
    status: str = "FINISHED",
) -> None:
    """End a row's run, read before as `above`, once it shows what these complete stages (by label) add, if
    any: numbers by column with the means of all that is there, curves, parameters, data, small files, links
    to records.

    `current`: by label the id of each stage's current run, and the milliseconds that it took.

    A curve is `<label>/loss`. MLflow cannot take points back, so that a training made again under another key
    adds `<label>/<key>/loss`. Data and files of what all rows share stay with the stages.
    """
    if stages:
        _show(
            client, experiment, above, row, stages, {label: run_id for label, (run_id, _) in current.items()}
        )
    client.set_terminated(
        above.info.run_id, status, above.info.start_time + sum(worked for _, worked in current.values())
    )


def _show(
    client: Any, experiment: str, above: Any, row: rows.Row, stages: dict[str, Stage], ids: dict[str, str]
) -> None:
    row_id, old = above.info.run_id, above.data
    lacking = {name: text for name, text in row.params.items() if name not in old.params}
    tags = {name: text for name, text in row.tags.items() if old.tags.get(name) != text}
    says = (
        row.sentence
        if row.name == rows.INPUTS
        else rows.sentence(row.name, old.params | lacking, old.tags | tags)
    )
    tags["mlflow.note.content"] = rows.note(says, experiment, ids)
    numbers: dict[str, float] = {}
    for stage in stages.values():
        numbers |= rows.of_columns(stage.numbers) if rows.compares(stage.record) else {}
    numbers |= rows.means(old.metrics | numbers) if numbers else {}
    metrics = entries(numbers, 0, max(_span(stage.record)[1] for stage in stages.values()) / 1000)
    shown = {} if row.name == rows.INPUTS else stages
    for label, (record, curve, *_) in shown.items():
        if curve and not record.get("measure"):
            tags[f"curve.{label}"] = first = old.tags.get(f"curve.{label}", record["key"])
            prefix = label if first == record["key"] else f"{label}/{record['key'][:8]}"
            metrics += [
                (store.metric_name(f"{prefix}/{name}"), *point) for name, *point in curve if name in CURVES
            ]
    store.log(client, row_id, metrics=metrics, params=lacking, tags=tags)
    store.log_files(
        client,
        row_id,
        {f"{label}/{name}": file for label, stage in shown.items() for name, file in stage.files.items()},
    )
    if inputs := dataset_inputs([data for stage in shown.values() for data in stage.record["datasets"]]):
        client.log_inputs(row_id, inputs)


def curve_of(folder: Path) -> list[Entry]:
    """The numbers of a stage by step, from its history; of one in a store at some steps. None where it has no
    history. Raises BrokenError."""
    lines = nodes.curve(folder) or []
    for number, line in enumerate(lines, start=1):
        require(Line, line, f"{folder / nodes.CURVE}:{number}")
    found: list[Entry] = []
    for line in lines if nodes.packed(folder) is None else evenly(lines, SHOWN):
        step = line.pop("step")
        found += step_entries(line, step, line.pop("time"))
    return found


def evenly(lines: list[Any], most: int) -> list[Any]:
    """At most so many lines at even distances, and the last."""
    kept = lines[:: max(-(-len(lines) // most), 1)]
    return kept if not lines or kept[-1] is lines[-1] else [*kept, lines[-1]]


def _is_whole(run: Any) -> bool:
    return run.info.status == "FINISHED" and run.data.tags.get("relinear.mirror") != "incomplete"


def _stage_runs(client: Any, experiment: str, scale: str) -> dict[tuple[str, ...], list[Any]]:
    """All stages' runs of an experiment by identity. Raises ValueError if some runs are not relinear's."""
    known: dict[tuple[str, ...], list[Any]] = {}
    foreign = []
    for run in store.search(client, experiment):
        if set(IDENTITY) <= run.data.tags.keys():
            known.setdefault(_identity(run.data.tags), []).append(run)
        elif not {"relinear.row", "relinear.earlier_row", rows.KIND} & run.data.tags.keys():
            foreign.append(run.info.run_id)
    if foreign:
        raise ValueError(
            f"experiment 'relinear-{scale}' holds {len(foreign)} runs that relinear did not write, such as "
            f"{foreign[0]}; use an empty store or one made by relinear"
        )
    return known


# Tables and figures


def tables(uri: str, results: Path | str, root: str | None = None) -> None:
    """Copy the user's own tables, figures and claims of a folder (mini, mini-x4), or of all, into the run
    `tables and figures` of each.

    Raises StoreError.
    """
    results = Path(results)
    drawn = _drawn(results, {path.parent for path in results.resolve().rglob(MANIFEST)})
    with store.access(uri):
        for of in drawn.keys() if root is None else drawn.keys() & {root}:
            client = store.connect(uri)
            _log_tables(client, store.experiment_of(client, uri, of), of, drawn[of])


def _drawn(root: Path, but: Collection[Path] = ()) -> dict[str, dict[Path, str]]:
    """By experiment, the files of the tables and figures below `root`, those below `but` left out, and the
    folder of each, relative to `root`."""
    found: dict[str, dict[Path, str]] = {}
    for path in (*files_below(root, f"*{PROVENANCE.ending}"), *files_below(root, PROVENANCE.file)):
        if store.ARTIFACTS in path.parts or any(parent in but for parent in path.parents):
            continue
        try:
            drawings = _of_drawings(path, root.resolve())
        except records.BrokenError as error:
            print(f"{error}; what it tells of is left out", file=sys.stderr)
            continue
        for place, of in drawings.items():
            files = [*sorted(place.parent.glob(f"{place.name}.*")), *(path.with_name(k.file) for k in TOLD)]
            found.setdefault(of, {}).update(
                {
                    file: file.parent.relative_to(root.resolve()).as_posix()
                    for file in files
                    if _is_small(file)
                }
            )
    return found


def _of_drawings(path: Path, root: Path) -> dict[Path, str]:
    """The drawings `<folder>/<stem>` of a scale that a file of provenance tells of: the one beside it, or all
    in a folder of committed results; and the experiment of each. Raises BrokenError."""
    told = records.read_json(path)
    if path.name != PROVENANCE.file:
        require(Provenance, told, path)
        scale, first = told.get("scale"), path.relative_to(root).parts[0]
        # results of another budget or seed
        of = first if scale and first.startswith((f"{scale}-x", f"{scale}-seed")) else scale
        return {path.with_name(path.name.removesuffix(PROVENANCE.ending)): of} if of else {}
    for name, each in told.items():
        require(Provenance, each, path)
        if not all(map(NAME.fullmatch, name.split("/"))):
            raise records.BrokenError(f"{path}: a drawing is <paper>/<stem>; got {name[:60]!r}")
    names = [name for name, each in told.items() if each.get("scale")]
    of = records.read_manifest(path.with_name(MANIFEST))["scale"] if names else ""
    return {path.parent / name: of for name in names}


def _log_tables(client: Any, experiment: str, root: str, drawn: dict[Path, str]) -> None:
    found = next(store.search(client, experiment, f"tags.`{rows.KIND}` = 'tables'"), None)
    if found is None:
        says = (
            "Tables, figures and the verdicts on papers' claims, as artifacts. `.provenance.json` beside each"
            " leads from a cell to its run.json. Of committed results one provenance.json tells of all, and"
            " leads to their nodes, and one claims.csv has all verdicts."
        )
        found = client.create_run(
            experiment,
            tags={rows.KIND: "tables", "scale": root, "mlflow.note.content": says},
            run_name=TABLES,
        )
    store.log_files(
        client, found.info.run_id, {f"{inside}/{file.name}": file for file, inside in drawn.items()}
    )
    client.set_terminated(found.info.run_id)


# One stage's run


def describe(record: dict) -> dict:
    """The arguments of `live.Tracker`, from run.json or from the part of it that is known when a stage
    starts.

    Use it as ``Tracker(uri, **describe(record))``; then a rebuilt store has the parameters and tags of the
    first one.
    """
    tags = dict(record["tags"])
    for field in ("config_hash", "code_hash", "git", "versions", "hardware", "seed"):
        if field in record:
            tags[field] = record[field]
    tags |= {f"parent.{name}": parent["key"] for name, parent in record.get("parents", {}).items()}
    return {
        **{field: record[field] for field in IDENTITY},
        "measure": record.get("measure", ""),
        "root": store.root_of(record),
        "params": record["config"],
        "tags": tags,
        "datasets": record["datasets"],
    }


def create(
    client: Any,
    experiment: str,
    row_id: str,
    about: dict,
    tags: dict,
    begin: int | None = None,
    is_current: bool = True,
    kind: str = "stage",
) -> str:
    """Create a stage's run below its row's, begun at `begin` (milliseconds, now if not given), with these
    tags, its identity and what mlflow shows; returns its id. `fill` goes on."""
    tags = texts(tags)
    shown = {
        "mlflow.parentRunId": row_id,
        "mlflow.source.name": f"relinear {about['stage']}",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": tags.get("git.commit", ""),
        "current": str(is_current).lower(),
        rows.KIND: kind,
    }
    # All tags in the one call: a process that dies here leaves no run that cannot be found again.
    tags = {**tags, **{field: str(about[field]) for field in IDENTITY}, **shown}
    return client.create_run(
        experiment, begin, tags, rows.label("", about["run"], about["stage"])
    ).info.run_id


def fill(client: Any, run_id: str, about: dict, metrics: list[Entry] = ()) -> None:
    """Write a run's settings and data, and the numbers that are known."""
    store.log(client, run_id, metrics=metrics, params=texts(about["params"]))
    if datasets := dataset_inputs(about["datasets"]):
        client.log_inputs(run_id, datasets)


def _small_files(folder: Path) -> dict[str, Path | bytes]:
    """The small files of a stage's folder, or of its node in a store, by name: records, tables, figures."""
    found = {
        path.name: path
        for path in sorted(folder.glob("*"))
        if _is_small(path) and (path.name in TEXTS or path.suffix in COPIED)
    }
    if nodes.packed(folder) is not None:
        found |= {
            name: text
            for name in TEXTS
            if nodes.exists(folder / name) and len(text := nodes.read(folder / name)) <= LARGEST_ARTIFACT
        }
    return found


def dataset_inputs(datasets: list[dict]) -> list[Any]:
    """Which data a stage read, ``{"name", "sha256", "role"}`` each, as mlflow's."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    roles: dict[tuple[str, str], list[str]] = {}  # mlflow keeps one role for each data set of a run
    for data in datasets:
        roles.setdefault((data["name"], data["sha256"]), []).append(data["role"])
    inputs = []
    for (name, digest), role in roles.items():
        # mlflow's digest holds 36 characters, so the whole one goes into the source.
        dataset = Dataset(name, digest[:36], "local", json.dumps({"sha256": digest}))
        inputs.append(
            DatasetInput(dataset, [InputTag("mlflow.data.context", ", ".join(dict.fromkeys(role)))])
        )
    return inputs


def folder_tags(record: dict) -> dict[str, Any]:
    """The tags of a stage that are known at its end: its first id in MLflow, and what it wrote."""
    return {"mlflow_run_id": record.get("mlflow_run_id", "")} | {
        f"artefact.{n}": file["sha256"] for n, file in record.get("artefacts", {}).items()
    }


def _is_small(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size <= LARGEST_ARTIFACT


# The files


def files_below(root: Path, pattern: str) -> list[Path]:
    """The files of a pattern below a folder, sorted, without mlflow's own copies, which are parts of what was
    there."""
    root = root.resolve()
    return [
        path for path in sorted(root.rglob(pattern)) if store.ARTIFACTS not in path.relative_to(root).parts
    ]


def _stage_folders(results: Path, but: Collection[Path] = (), strict: bool = True) -> dict[Path, dict]:
    """The stage folders below `results`, also those of stores there, those below `but` left out, and their
    records, by start; a copied folder counts once.

    A record that cannot be believed raises BrokenError, or, unless `strict`, is left out, which a line on
    stderr says.

    Only a folder named after its stage, or after the model, text or asset that the stage made, is one:
    mlflow's artifact folders and unfinished work hold run.json too.
    """
    if not results.is_dir():
        raise UserError(
            f"no folder {str(results)!r}; possible: a scale's results, such as results/smollm2 or"
            " results/reference/smollm2"
        )
    folders: dict[tuple[str, ...], tuple[Path, dict]] = {}
    there = {path.parent for path in files_below(results, nodes.RECORD)}
    there |= {
        path.parent / name
        for path in files_below(results, nodes.NODES)
        for name in nodes.opened(path.parent).rows
    }
    for folder in sorted(there):
        if any(parent in but for parent in (folder, *folder.parents)):
            continue
        try:
            record = read_record(folder)
            _require_own(folder, record)
        except records.BrokenError as error:
            if strict:
                raise
            print(f"{error}; it counts as not finished, and is left out", file=sys.stderr)
            continue
        if folder.name in (record["stage"], record["run"]):
            folders.setdefault(_identity(record), (folder, record))
    return dict(sorted(folders.values(), key=lambda item: _span(item[1])))


def read_record(folder: Path) -> dict:
    """A stage's record, once it is whole, has what the mirror shows and names the metrics.json beside it.
    Raises BrokenError."""
    record = records.believed(folder)
    if record is None:
        raise records.BrokenError(f"{folder} has no run.json")
    if lacking := [field for field in RECORD_FIELDS if field not in record]:
        raise records.BrokenError(f"{folder / 'run.json'} lacks {', '.join(lacking)}")
    if nodes.exists(folder / nodes.METRICS):
        records.check_metrics(folder)
    return record


def _require_own(folder: Path, record: dict[str, Any]) -> None:
    """Raise BrokenError for a stage folder that leads out of itself: names that are paths, and links in the
    place of files."""
    for field, name in {
        **{field: record[field] for field in IDENTITY},
        "root": store.root_of(record),
    }.items():
        if not NAME.fullmatch(str(name)):
            raise records.BrokenError(
                f"{folder / 'run.json'}: {field} must be of letters, digits and . _ @ + -; got"
                f" {str(name)[:60]!r}"
            )
    if folder.resolve() != folder:
        raise records.BrokenError(f"{folder} leads elsewhere; a stage's folder lies in its results")
    if links := sorted(path.name for path in folder.glob("*") if path.is_symlink()):
        raise records.BrokenError(f"{folder / links[0]} is a link, and a stage leaves files")


def _final_numbers(folder: Path, record: dict) -> dict:
    """The numbers known once a stage is done: metrics.json, under the names of tables' columns, and what the
    run cost."""
    path = folder / nodes.METRICS
    cost = {name: record[name] for name in ("tokens", "wall_seconds", "peak_rss_bytes") if name in record}
    return rows.numbers_of(record, json.loads(nodes.read(path)) if nodes.exists(path) else {}) | {
        "cost": cost
    }


def _identity(record: dict) -> tuple[str, ...]:
    return tuple(str(record[field]) for field in IDENTITY)


def _span(record: dict) -> tuple[int, int]:
    """Start and end of a stage in milliseconds since the epoch."""
    begin = datetime.fromisoformat(record["started"]).timestamp()
    return round(1000 * begin), round(1000 * (begin + record["wall_seconds"]))
