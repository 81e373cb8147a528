"""The MLflow mirror of the result files: one run per table row, below it one run per attempt at a stage.

The files under ``results/`` are the truth: `rebuild` restores a lost store from run.json, metrics.json and history.jsonl, and what
`relinear.tracking.live` writes while a stage runs is the same.

How a run is found again: a row's carries the tag ``relinear.row``, a stage's the tags ``run``, ``stage``, ``key`` and ``attempt``.
``tags.current = 'true'`` lists the latest attempt at every stage, and ``tags.mlflow_run_id = '<id in run.json>'`` finds a run by its first id
also after a rebuild. Tables and figures are artifacts of one run, `tables and figures`.
"""

import json
import re
import sys
from collections.abc import Collection
from datetime import datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from relinear import records
from relinear.core import store as nodes
from relinear.errors import UserError
from relinear.files import MANIFEST
from relinear.schemas import Line, Provenance, require
from relinear.tracking import rows, store
from relinear.tracking.store import Entry, entries, flatten_metrics, step_entries, texts

LARGEST_ARTIFACT = 5 * 2**20  # bytes
TEXTS = (nodes.RECORD, nodes.METRICS)  # files of a stage that are copied, also out of a store
COPIED = {".png", ".pdf", ".svg", ".csv", ".md"}  # endings of further ones
IDENTITY = ("scale", "run", "stage", "key", "attempt")
NAME = re.compile(r"[A-Za-z0-9][\w.@+-]*")  # a scale, a run or a stage: no path, and no quote of a query
RECORD_FIELDS = (*IDENTITY, "config_hash", "code_hash", "datasets", "git", "versions", "hardware", "started", "wall_seconds", "tags")
SHOWN = 50  # lines of a committed curve in MLflow, besides its last
CURVES = ("loss", "lr", "grad_norm")  # of a training, which its row has too
TABLES = "tables and figures"
PROVENANCE = ".provenance.json"  # ends the name of the file beside every table and figure


def init(uri: str, root: str | None = None, planned: Collection[rows.Row] = ()) -> None:
    """Create the store, its schema and, if `root` is given (mini, mini-x4), that folder's experiment with the runs of these rows.

    Harmless when repeated.

    `uri` is ``sqlite:///<path>`` (its folder is created) or whatever else mlflow takes, such as ``http://host:port``. SQLite needs a local disk,
    or it warns on stderr. Raises StoreError for a store that cannot be reached.
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
    """Mirror every finished stage folder below `results` that the store lacks; returns how many were added. Tables and figures are copied anew.

    Committed results (results/reference) are not the user's runs and stay out; `import_folder` takes them.

    A stage folder is one that holds run.json and is named after its stage. A run is known by (scale, run, stage, key, attempt), so a second call
    adds nothing; a run that the store holds only in part is replaced. The latest run of a stage, by its start, becomes the current one. Call it
    while no stage is running.

    The results' own SQLite store, where it is damaged, of another program or a folder, is set aside under another name and made anew; a line on
    stderr says so.

    A stage whose record cannot be believed is left out, which a line on stderr says. Raises ValueError, before any run is written, for an
    experiment ``relinear-<root>`` that holds runs of something else, and StoreError for a store that cannot be reached.
    """
    results = Path(results)
    committed = {path.parent for path in results.resolve().rglob(MANIFEST)}
    with store.access(uri), store.without_sync():
        store.set_aside_broken(uri, results)
        return _mirror(uri, results, _stage_folders(results, committed, strict=False), but=committed)


def import_folder(uri: str, folder: Path | str, label: str = "reference") -> int:
    """Mirror the stage folders of other results, committed or a colleague's, beside one's own: into experiments relinear-<root>-<label>.

    Returns and raises as `rebuild`; UserError for a folder without stage folders and a label of other than letters, digits, . _ -
    """
    if not re.fullmatch(r"[\w.-]+", label):
        raise UserError(f"a label is of letters, digits, '.', '_' and '-'; got {label!r}")
    found = _stage_folders(Path(folder))
    if not found:
        raise UserError(f"{str(folder)!r} holds no finished stages (folders named after their stage, with a run.json)")
    with store.access(uri), store.without_sync():
        return _mirror(uri, Path(folder), found, f"-{label}")


def _mirror(uri: str, root: Path, found: dict[Path, dict], suffix: str = "", but: Collection[Path] = ()) -> int:
    """Write what the store lacks of these stage folders, and the tables of `root`, into the experiments of their folders, named with the suffix."""
    client = store.connect(uri)
    experiments = {of: store.experiment_of(client, uri, f"{of}{suffix}") for of in set(map(store.root_of, found.values()))}
    known = {of: _stage_runs(client, experiment, f"{of}{suffix}") for of, experiment in experiments.items()}
    missing: dict[tuple[str, str, str], dict[Path, dict]] = {}  # (scale, base row, row): folders
    for folder, record in found.items():
        same = known[store.root_of(record)].get(_identity(record), [])
        if any(map(_is_whole, same)):
            continue
        row = rows.row_of([record])
        missing.setdefault((store.root_of(record), row.base, row.name), {})[folder] = record
        first = record.get("mlflow_run_id", "")
        for part in [run for run in same if first in (run.info.run_id, run.data.tags.get("mlflow_run_id"))]:  # what is there of this attempt
            client.delete_run(part.info.run_id)
            same.remove(part)
    for folder in (folder for folders in missing.values() for folder in folders):
        curve_of(folder)  # an error comes before anything is written
    count = sum(map(len, missing.values()))
    with tqdm(total=count, desc="MLflow", unit="stage", disable=None) as progress:
        for (of, _, name), folders in sorted(missing.items(), key=lambda item: item[0]):
            whole = {folder: record for folder, record in found.items() if (store.root_of(record), rows.name_of(record)) == (of, name)}
            _mirror_row(client, uri, experiments[of], whole, folders, known[of], progress)
    for of, files in _drawn(root, but).items():
        if of in experiments:
            _log_tables(client, experiments[of], of, files)
    return count


def _mirror_row(client: Any, uri: str, experiment: str, whole: dict[Path, dict], missing: dict[Path, dict], known: dict, progress: tqdm) -> None:
    """Write a row's run and the missing ones of its stages; `whole` are all its stages that there are files of, `known` its experiment's runs.

    The stages' runs are FINISHED after all that the row has of them is written. What an end before that leaves is replaced by the next rebuild.
    """
    spans = [_span(record) for record in missing.values()]
    begin, end = min(begin for begin, _ in spans), max(end for _, end in spans)
    row = rows.row_of(whole.values())
    name = row.name
    above, lacking = rows.place(client, uri, experiment, row, begin)
    row_id = above.info.run_id
    own, latest = {(r["scale"], r["run"], r["stage"]) for r in whole.values()}, {}  # (run, stage): start and id of the current run
    for identity, same in known.items():
        if identity[:3] in own:
            for run in same:
                latest[identity[1:3]] = max(latest.get(identity[1:3], (0, "")), (run.info.start_time, run.info.run_id))
    current = {stage: run_id for stage, (_, run_id) in latest.items()}
    numbers: dict[str, float] = {}
    of_row: dict[str, tuple[Path, dict, list[Entry]]] = {}  # by stage: what the row has of its current run
    written: dict[str, tuple[int, int]] = {}  # start and end of the runs that this writes
    for folder, record in missing.items():  # by start
        stage, first = (record["run"], record["stage"]), _span(record)[0]
        is_current = first >= latest.get(stage, (0, ""))[0]
        if is_current and stage in current:
            client.set_tag(current[stage], "current", "false")
        curve = curve_of(folder)
        run_id = _write(client, experiment, row_id, folder, record, curve, is_current)
        written[run_id] = _span(record)
        progress.update()
        if is_current:
            latest[stage], current[stage] = (first, run_id), run_id
            of_row[rows.label(name, *stage)] = (folder, record, curve)
            if rows.compares(record):
                numbers |= rows.of_columns(flatten_metrics(final_numbers(folder, record)))
    if numbers:
        numbers |= rows.means(above.data.metrics | numbers)
    note = rows.note(row.sentence, experiment, {rows.label(row.name, *stage): run_id for stage, run_id in current.items()})
    tags = lacking["tags"] | {"mlflow.note.content": note}
    store.log(client, row_id, metrics=entries(numbers, 0, end / 1000), params=lacking["params"], tags=tags)
    show(client, row_id, name, of_row)
    worked = sum(stop - start for run_id, (start, stop) in written.items() if run_id in current.values())
    client.set_terminated(row_id, "FINISHED", above.info.start_time + worked + rows.worked(client, experiment, row_id))
    for run_id, (_, stop) in written.items():
        client.set_terminated(run_id, "FINISHED", stop)


def _write(client: Any, experiment: str, row_id: str, folder: Path, record: dict, curve: list[Entry], is_current: bool) -> str:
    """Write a finished stage's run by the calls that `live.Tracker` makes while a stage runs, with the original times; returns its id. The run is
    left RUNNING."""
    begin, end = _span(record)
    about = describe(record)
    # Known by its first id from the start, so that a rebuild cut short is noticed and redone by the next.
    tags = about["tags"] | folder_tags(record)
    run_id = create(client, experiment, row_id, about, tags, begin, is_current)
    final = entries(final_numbers(folder, record), max((step for *_, step in curve), default=0), end / 1000)
    fill(client, run_id, about, curve + final)
    copy_files(client, run_id, folder)
    return run_id


def curve_of(folder: Path) -> list[Entry]:
    """The numbers of a stage by step, from its history; of one in a store at some steps. None where it has no history. Raises BrokenError."""
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


def show(client: Any, row_id: str, row: str, stages: dict[str, tuple[Path, dict, list[Entry]]]) -> None:
    """Show finished stages (label -> folder, record, curve) on the run of their row: curves of trainings, data, small files.

    A curve is `<label>/loss`. MLflow cannot take points back, so that a training made again under another key adds `<label>/<key>/loss`.
    Data and files of what all rows share stay with the stages.
    """
    if row == rows.INPUTS or not stages:
        return
    tags = client.get_run(row_id).data.tags
    metrics: list[Entry] = []
    first: dict[str, str] = {}
    for label, (folder, record, curve) in stages.items():
        copy_files(client, row_id, folder, label)
        if record.get("measure") or not curve:
            continue
        key = first[f"curve.{label}"] = tags.get(f"curve.{label}", record["key"])
        prefix = label if key == record["key"] else f"{label}/{record['key'][:8]}"
        metrics += [(store.metric_name(f"{prefix}/{name}"), *point) for name, *point in curve if name in CURVES]
    store.log(client, row_id, metrics=metrics, tags=first)
    datasets = [data for _, record, _ in stages.values() for data in record["datasets"]]
    if inputs := dataset_inputs(datasets):
        client.log_inputs(row_id, inputs)


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
    """Copy the user's own tables, figures and claims of a folder (mini, mini-x4), or of all, into the run `tables and figures` of each.

    Raises StoreError.
    """
    results = Path(results)
    drawn = _drawn(results, {path.parent for path in results.resolve().rglob(MANIFEST)})
    with store.access(uri):
        for of in drawn.keys() if root is None else drawn.keys() & {root}:
            client = store.connect(uri)
            _log_tables(client, store.experiment_of(client, uri, of), of, drawn[of])


def _drawn(root: Path, but: Collection[Path] = ()) -> dict[str, dict[Path, str]]:
    """By experiment, the files of the tables and figures below `root`, those below `but` left out, and the folder of each, relative to `root`."""
    found: dict[str, dict[Path, str]] = {}
    for path in files_below(root, f"*{PROVENANCE}"):
        if store.ARTIFACTS in path.parts:
            continue
        try:
            require(Provenance, told := records.read_json(path), path)
        except records.BrokenError as error:
            print(f"{error}; what it tells of is left out", file=sys.stderr)
            continue
        scale = told.get("scale")
        if scale and not any(parent in but for parent in path.parents):
            inside, stem = path.parent.relative_to(root.resolve()).as_posix(), path.name.removesuffix(PROVENANCE)
            first = inside.partition("/")[0]
            of = first if first.startswith((f"{scale}-x", f"{scale}-seed")) else scale  # results of another budget or seed
            found.setdefault(of, {}).update({file: inside for file in sorted(path.parent.glob(f"{stem}.*")) if _is_small(file)})
    return found


def _log_tables(client: Any, experiment: str, root: str, drawn: dict[Path, str]) -> None:
    found = next(store.search(client, experiment, f"tags.`{rows.KIND}` = 'tables'"), None)
    if found is None:
        says = "Tables, figures and the verdicts on papers' claims, as artifacts. `.provenance.json` beside each leads from a cell to its run.json."
        found = client.create_run(experiment, tags={rows.KIND: "tables", "scale": root, "mlflow.note.content": says}, run_name=TABLES)
    for file, inside in drawn.items():
        client.log_artifact(found.info.run_id, str(file), None if inside == "." else inside)
    client.set_terminated(found.info.run_id)


# One stage's run


def describe(record: dict) -> dict:
    """The arguments of `live.Tracker`, from run.json or from the part of it that is known when a stage starts.

    Use it as ``Tracker(uri, **describe(record))``; then a rebuilt store has the parameters and tags of the first one.
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
    client: Any, experiment: str, row_id: str, about: dict, tags: dict, begin: int | None = None, is_current: bool = True, kind: str = "stage"
) -> str:
    """Create a stage's run below its row's, begun at `begin` (milliseconds, now if not given), with these tags, its identity and what mlflow shows;
    returns its id. `fill` goes on."""
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
    return client.create_run(experiment, begin, tags, rows.label("", about["run"], about["stage"])).info.run_id


def fill(client: Any, run_id: str, about: dict, metrics: list[Entry] = ()) -> None:
    """Write a run's settings and data, and the numbers that are known."""
    store.log(client, run_id, metrics=metrics, params=texts(about["params"]))
    if datasets := dataset_inputs(about["datasets"]):
        client.log_inputs(run_id, datasets)


def copy_files(client: Any, run_id: str, folder: Path, inside: str | None = None) -> None:
    """Copy the small files of a stage's folder, or of its node in a store, into a run, there into the folder `inside`: records, tables, figures."""
    for path in sorted(folder.glob("*")):
        if _is_small(path) and (path.name in TEXTS or path.suffix in COPIED):
            client.log_artifact(run_id, str(path), inside)
    if nodes.packed(folder) is not None:
        for name in TEXTS:
            if nodes.exists(folder / name) and len(text := nodes.read(folder / name)) <= LARGEST_ARTIFACT:
                client.log_text(run_id, text.decode(), f"{inside}/{name}" if inside else name)


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
        inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", ", ".join(dict.fromkeys(role)))]))
    return inputs


def folder_tags(record: dict) -> dict[str, Any]:
    """The tags of a stage that are known at its end: its first id in MLflow, and what it wrote."""
    return {"mlflow_run_id": record.get("mlflow_run_id", "")} | {f"artefact.{n}": file["sha256"] for n, file in record.get("artefacts", {}).items()}


def _is_small(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size <= LARGEST_ARTIFACT


# The files


def files_below(root: Path, pattern: str) -> list[Path]:
    """The files of a pattern below a folder, sorted, without mlflow's own copies, which are parts of what was there."""
    root = root.resolve()
    return [path for path in sorted(root.rglob(pattern)) if store.ARTIFACTS not in path.relative_to(root).parts]


def _stage_folders(results: Path, but: Collection[Path] = (), strict: bool = True) -> dict[Path, dict]:
    """The stage folders below `results`, also those of stores there, those below `but` left out, and their records, by start; a copied folder counts
    once.

    A record that cannot be believed raises BrokenError, or, unless `strict`, is left out, which a line on stderr says.

    Only a folder named after its stage, or after the model, text or asset that the stage made, is one: mlflow's artifact folders and
    unfinished work hold run.json too.
    """
    if not results.is_dir():
        raise UserError(f"no folder {str(results)!r}; possible: a scale's results, such as results/smollm2 or results/reference/smollm2")
    folders: dict[tuple[str, ...], tuple[Path, dict]] = {}
    there = {path.parent for path in files_below(results, nodes.RECORD)}
    there |= {path.parent / name for path in files_below(results, nodes.NODES) for name in nodes.opened(path.parent).rows}
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
    """A stage's record, once it is whole, has what the mirror shows and names the metrics.json beside it. Raises BrokenError."""
    record = records.believed(folder)
    if record is None:
        raise records.BrokenError(f"{folder} has no run.json")
    if lacking := [field for field in RECORD_FIELDS if field not in record]:
        raise records.BrokenError(f"{folder / 'run.json'} lacks {', '.join(lacking)}")
    if nodes.exists(folder / nodes.METRICS):
        records.check_metrics(folder)
    return record


def _require_own(folder: Path, record: dict[str, Any]) -> None:
    """Raise BrokenError for a stage folder that leads out of itself: names that are paths, and links in the place of files."""
    for field, name in {**{field: record[field] for field in IDENTITY}, "root": store.root_of(record)}.items():
        if not NAME.fullmatch(str(name)):
            raise records.BrokenError(f"{folder / 'run.json'}: {field} must be of letters, digits and . _ @ + -; got {str(name)[:60]!r}")
    if folder.resolve() != folder:
        raise records.BrokenError(f"{folder} leads elsewhere; a stage's folder lies in its results")
    if links := sorted(path.name for path in folder.glob("*") if path.is_symlink()):
        raise records.BrokenError(f"{folder / links[0]} is a link, and a stage leaves files")


def final_numbers(folder: Path, record: dict) -> dict:
    """The numbers known once a stage is done: metrics.json, under the names of tables' columns, and what the run cost."""
    path = folder / nodes.METRICS
    cost = {name: record[name] for name in ("tokens", "wall_seconds", "peak_rss_bytes") if name in record}
    return rows.numbers_of(record, json.loads(nodes.read(path)) if nodes.exists(path) else {}) | {"cost": cost}


def _identity(record: dict) -> tuple[str, ...]:
    return tuple(str(record[field]) for field in IDENTITY)


def _span(record: dict) -> tuple[int, int]:
    """Start and end of a stage in milliseconds since the epoch."""
    begin = datetime.fromisoformat(record["started"]).timestamp()
    return round(1000 * begin), round(1000 * (begin + record["wall_seconds"]))
