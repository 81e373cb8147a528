"""A finished run, written at once. A server takes it by calls of mlflow's client.

A SQLite store takes it in one transaction, through mlflow's own models of its tables. Its client would look up the run again at each call and
compare each number with those before it, which is most of the time of an import.
"""

import functools
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from relinear.tracking import store
from relinear.tracking.store import Entry


class Finished(NamedTuple):
    """All of a run that is over. Times are in milliseconds since the epoch, `datasets` are mlflow's DatasetInput, `files` are copied."""

    experiment: str
    name: str
    begin: int
    end: int
    tags: dict[str, str]
    params: dict[str, str]
    metrics: list[Entry]
    datasets: list[Any]
    files: list[Path]


def write(client: Any, uri: str, runs: list[Finished]) -> Iterator[str]:
    """Write runs of one experiment; yields the id of each."""
    return map(functools.partial(_call, client), runs) if store.sqlite_path(uri) is None else _insert(client, runs)


def _call(client: Any, run: Finished) -> str:
    run_id = client.create_run(run.experiment, run.begin, run.tags, run.name).info.run_id
    store.log(client, run_id, metrics=run.metrics, params=run.params)
    if run.datasets:
        client.log_inputs(run_id, run.datasets)
    for path in run.files:
        client.log_artifact(run_id, str(path))
    client.set_terminated(run_id, "FINISHED", run.end)
    return run_id


def _insert(client: Any, runs: list[Finished]) -> Iterator[str]:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
    from mlflow.store.tracking.dbmodels import models as m
    from mlflow.utils.mlflow_tags import MLFLOW_RUN_NAME
    from mlflow.utils.uri import append_to_uri_path
    from sqlalchemy import insert

    tables, experiment, ids = client._tracking_client.store, int(runs[0].experiment), []
    # By table, each after those that its rows point to.
    rows = {table: [] for table in (m.SqlRun, m.SqlTag, m.SqlParam, m.SqlMetric, m.SqlLatestMetric, m.SqlDataset, m.SqlInput, m.SqlInputTag)}
    with tables.ManagedSessionMaker(read_only=False) as session:
        root = session.get(m.SqlExperiment, experiment).artifact_location
        sources = {(data.name, data.digest): data.dataset_uuid for data in session.query(m.SqlDataset).filter_by(experiment_id=experiment)}
        for run in runs:
            run_id = uuid.uuid4().hex
            ids.append(run_id)
            place = append_to_uri_path(root, run_id, tables.ARTIFACTS_FOLDER_NAME)
            artifacts = get_artifact_repository(place)
            for path in run.files:
                artifacts.log_artifact(str(path))
            rows[m.SqlRun].append({
                "run_uuid": run_id, "experiment_id": experiment, "name": run.name, "artifact_uri": place, "status": "FINISHED",
                "start_time": run.begin, "end_time": run.end, "lifecycle_stage": "active", "user_id": "unknown", "source_type": "UNKNOWN",
                "source_name": "", "source_version": "", "entry_point_name": "",
            })  # fmt: skip
            for table, texts in ((m.SqlTag, run.tags | {MLFLOW_RUN_NAME: run.name}), (m.SqlParam, run.params)):
                rows[table] += [{"run_uuid": run_id, "key": key, "value": text} for key, text in texts.items()]
            numbers = {}  # equal ones once
            for key, value, timestamp, step in run.metrics:
                is_nan, value = tables.sanitize_metric_value(value)
                row = {"run_uuid": run_id, "key": key, "value": value, "timestamp": timestamp, "step": step, "is_nan": is_nan}
                numbers[key, value, timestamp, step, is_nan] = row
            rows[m.SqlMetric] += numbers.values()
            latest = {row["key"]: row for row in sorted(numbers.values(), key=lambda row: (row["step"], row["timestamp"], row["value"]))}
            rows[m.SqlLatestMetric] += latest.values()
            for given in run.datasets:
                data, read = given.dataset, uuid.uuid4().hex
                if (data.name, data.digest) not in sources:
                    source = sources[data.name, data.digest] = uuid.uuid4().hex
                    rows[m.SqlDataset].append({
                        "experiment_id": experiment, "name": data.name, "digest": data.digest, "dataset_uuid": source,
                        "dataset_source_type": data.source_type, "dataset_source": data.source,
                    })  # fmt: skip
                ends = {"source_type": "DATASET", "source_id": sources[data.name, data.digest], "destination_type": "RUN", "destination_id": run_id}
                rows[m.SqlInput].append({"input_uuid": read, **ends})
                rows[m.SqlInputTag] += [{"input_uuid": read, "name": tag.key, "value": tag.value} for tag in given.tags]
        for table, found in rows.items():
            if found:
                session.execute(insert(table.__table__), found)
    return iter(ids)
