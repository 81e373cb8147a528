"""The run of a table's row: its parameters, and its numbers under the names of the tables' columns.

A row's run stands above those of its stages. It is made before the first of them (`relinear track init
--rows`), so nodes that work side by side find it; a stage that is run by hand makes it where there is none.
The run of a further seed stands below that of its row, and what all rows share (assets, models, texts) below
a run of its own, `inputs`.
"""

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from relinear import attention, stages
from relinear.plan.catalogue import SEED
from relinear.plan.claims import GATE
from relinear.plan.options import option_defaults, option_names
from relinear.plan.plan import Plan
from relinear.plan.readings import Reading
from relinear.plan.specs import available
from relinear.plan.strict import WORKFLOW
from relinear.plan.tables import Column, Table
from relinear.records import trained_at
from relinear.stages._stage import Node, method_file
from relinear.tracking import store

INPUTS = "inputs"  # the run above those of shared stages
KIND = "relinear.kind"  # the tag of a run's kind: row, seed, earlier, inputs, stage, tables
# tags of a stage that are its row's too
SHOWN = ("paper", "table", "row", "method", "variant", "model", "scale")
INPUTS_NOTE = "What the rows share: assets, models, texts and activations, each made once."
RECORDS = "\n\nRecords: "  # stands before the links at the end of a row's description
HEADLINE = "comparison"  # the paper whose columns name a reading that tables of several papers show


class Row(NamedTuple):
    """A row's run, as far as records tell: `base` is the row that it repeats with another seed, empty for a
    row itself."""

    name: str
    base: str
    params: dict[str, str]
    tags: dict[str, str]
    sentence: str


# What a row is


def name_of(record: Mapping[str, Any]) -> str:
    """The row that a stage belongs to: its run, or INPUTS for what all rows share."""
    return record["run"] if "method" in record["tags"] else INPUTS


def tags_of(plan: Plan, node: Node) -> dict[str, str]:
    """The tags of a stage from its run.json: its row and, of a run's stage, method, variant, model, and the
    tables that show it."""
    if not node.part and not stages.stage(node.stage).trains:
        return {"row": node.name, "scale": plan.scale}
    run, shown = plan.run(node.name), plan.artefacts_of(node.name)
    return {
        "row": node.name,
        "method": run.run.method,
        "variant": run.run.variant,
        "model": run.model,
        "scale": plan.scale,
        "paper": ",".join(dict.fromkeys(t.split("/")[0] for t in shown)),
        "table": ",".join(shown),
    }


def plan_rows(plan: Plan, names: Iterable[str]) -> list[Row]:
    """The rows of runs before anything of them is run, those that they repeat, and the one of what all
    share."""
    known = dict.fromkeys([*(SEED.sub("", name) for name in names), *names])
    return [
        row_of([{"run": "", "stage": "", "config": {}, "scale": plan.scale, "tags": {}}]),
        *(_planned(plan, name) for name in known),
    ]


def _planned(plan: Plan, name: str) -> Row:
    run = plan.run(name)
    steps = [Node(step, name) for step in run.run.recipes]
    about = {
        "run": name,
        "scale": plan.scale,
        "seed": plan.seed + run.seed,
        "tags": tags_of(plan, Node("measure", name, GATE)),
    }
    behind = {node.stage for link in plan.chain(name) for node in link.steps}
    gate = {
        **about,
        "stage": GATE,
        "measure": GATE,
        "config": {"options": run.run.options},
        "parents": dict.fromkeys(behind),
    }
    return row_of([*({**about, "stage": node.stage, "config": plan.settings(node)} for node in steps), gate])


def row_of(records: Iterable[Mapping[str, Any]]) -> Row:
    """A row from the records of its stages, or from what is known of them before they run (scale, run, stage,
    config, seed, tags)."""
    records = list(records)
    last, name = records[-1], name_of(records[-1])
    if name == INPUTS:
        return Row(name, "", {}, {KIND: INPUTS, "scale": last["scale"]}, INPUTS_NOTE)
    base, tags = SEED.sub("", name), last["tags"]
    params: dict[str, Any] = {}
    # facts from trainings go before facts from measurements
    for record in sorted(records, key=lambda r: not r.get("measure")):
        params |= _parameters(record)
    shown = {tag: tags[tag] for tag in SHOWN if tag in tags}
    shown |= {KIND: "row" if base == name else "seed", "base_run": base, "seed": str(params["seed"])}
    written = store.texts(params)
    return Row(name, "" if base == name else base, written, shown, sentence(name, written, shown))


def _parameters(record: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that a stage gives its row: method, options with their defaults, window and gate; of a
    training its recipe, budget and tokens."""
    config, tags, stage = record["config"], record["tags"], record["stage"]
    method = tags["method"]
    options = dict(config.get("options") or {})
    names: tuple[str, ...] = ()
    if method in attention.available():
        names, options = option_names(method_file(method)), option_defaults(method_file(method)) | options
    found: dict[str, Any] = {"method": method, "seed": record.get("seed", 0)}
    found |= {name: tags[tag] for name, tag in (("variant", "variant"), ("teacher", "model")) if tag in tags}
    found |= {f"options.{name}": value for name, value in options.items()}
    # a method without a window or gates has neither; softmax attention sees everything
    if method != "softmax":
        found |= {
            name: options.get(name, none)
            for name, none in (("window", 0), ("gate", "none"))
            if name in options or name not in names
        }
    recipe = config.get("recipe")
    if record.get("measure"):
        trained = [role.rpartition("/")[2] for role in record.get("parents", {"finetune": ...})]
        return found | ({"rank": 0} if "finetune" not in trained and not config.get("before") else {})
    if isinstance(recipe, dict) and "lr" in recipe:
        found |= {
            f"{stage}.{name}": value
            for name, value in {**recipe, **config.get("budget", {}), **trained_at(config)}.items()
        }
        found |= {f"{stage}.tokens": record["tokens"]} if record.get("tokens") else {}
        found |= (
            {"rank": recipe["lora_rank"] if recipe.get("kind") == "lora" else 0}
            if stage == "finetune"
            else {}
        )
    return found


def sentence(name: str, params: Mapping[str, str], tags: Mapping[str, str]) -> str:
    """A sentence that describes a row, and the tables and figures that show it."""
    steps = []
    for step in ("distill", "finetune"):
        if f"{step}.lr" in params:
            tokens = f" on {int(params[f'{step}.tokens']):,} tokens" if f"{step}.tokens" in params else ""
            rank = (
                f", LoRA of rank {params['rank']}"
                if step == "finetune" and params.get("rank", "0") != "0"
                else ""
            )
            steps.append(f"{step}{tokens} at a rate of {params[f'{step}.lr']}{rank}")
    of = f"{params['teacher']} with" if "teacher" in params else "with"
    shown = f"\n\nShown in {tags['table'].replace(',', ', ')}." if tags.get("table") else ""
    variant = f" ({params['variant']})" if params.get("variant", "default") != "default" else ""
    return (
        f"`{name}`: {of} {params['method']} attention{variant}, seed {params['seed']}:"
        f" {'; '.join(steps) or 'not trained'}.{shown}"
    )


# A row in the store


def find(client: Any, experiment: str, name: str) -> Any:
    """A row's run, None where there is none. If there are several it is the oldest, so that all nodes take
    the same."""
    found = store.search(client, experiment, f"tags.`relinear.row` = '{name}'")
    return min(found, key=lambda run: (run.info.start_time, run.info.run_id), default=None)


def ready(client: Any, uri: str, experiment: str, row: Row, status: str = "RUNNING") -> str:
    """The id of a row's run, created with `status` if need be; what it lacks is written on it."""
    run, lacking = place(client, uri, experiment, row, status=status)
    store.log(client, run.info.run_id, **lacking)
    return run.info.run_id


def place(
    client: Any, uri: str, experiment: str, row: Row, begin: int | None = None, status: str = "RUNNING"
) -> tuple[Any, dict[str, dict[str, str]]]:
    """A row's run, created at `begin` (milliseconds) with `status` if need be, and the params and tags that
    it lacks.

    MLflow keeps a parameter's first value. Where a row is set otherwise than the run that is there, that run
    becomes one of the past: it keeps its stages, and a new one takes its place.
    """
    with store.lock(uri):
        found = find(client, experiment, row.name)
        old = found.data.params if found else {}
        if found and any(old.get(name, text) != text for name, text in row.params.items()):
            client.set_tag(found.info.run_id, "relinear.earlier_row", row.name)
            client.set_tag(found.info.run_id, KIND, "earlier")
            client.delete_tag(found.info.run_id, "relinear.row")
            found, old = None, {}
        if found is None:
            tags = {"relinear.row": row.name, **row.tags, "mlflow.note.content": row.sentence}
            if row.base and (base := find(client, experiment, row.base)):
                tags["mlflow.parentRunId"] = base.info.run_id
            found = client.create_run(experiment, begin, tags, row.name)
            if status != "RUNNING":
                client.update_run(found.info.run_id, status=status)
    lacking = {name: text for name, text in row.params.items() if name not in old}
    changed = {name: text for name, text in row.tags.items() if found.data.tags.get(name) != text}
    return found, {"params": lacking, "tags": changed}


def join(client: Any, uri: str, experiment: str, record: Mapping[str, Any]) -> str:
    """The id of the run above a stage that begins. Parameters that the row has with other values stay until
    the next `track init`."""
    row = row_of([record])
    with store.lock(uri):
        found = find(client, experiment, row.name)
    if found:
        row = row._replace(
            params={name: text for name, text in row.params.items() if name not in found.data.params}
        )
    return ready(client, uri, experiment, row)


def current(client: Any, experiment: str, row: str, row_id: str) -> dict[str, tuple[str, int]]:
    """By label the id of each current stage below a row's run, and the milliseconds that it took, 0 while it
    goes on."""
    below = store.search(
        client, experiment, f"tags.`mlflow.parentRunId` = '{row_id}' and tags.current = 'true'"
    )
    return {
        label(row, run.data.tags["run"], run.data.tags["stage"]): (
            run.info.run_id,
            (run.info.end_time or run.info.start_time) - run.info.start_time,
        )
        for run in below
    }


def label(row: str, run: str, stage: str) -> str:
    """The name of a stage's run beside its row: `distill`; `lizard/distill` beside another; `recall` of data
    named after their stage."""
    return stage if run in (row, stage) else f"{run}/{stage}"


def note(says: str, experiment: str, stages: Mapping[str, str]) -> str:
    """A row's description: its sentence, and a link to the run.json of each stage (name -> run id) as
    MLflow's UI opens it."""
    links = [
        f"[{stage}](#/experiments/{experiment}/runs/{run_id}/artifacts/run.json?{store.PAGES})"
        for stage, run_id in sorted(stages.items())
    ]
    return says + (RECORDS + ", ".join(links) if links else "")


# Numbers


class Columns(NamedTuple):
    """The columns of all tables that are read in a row's own run; where two tables differ in one name, the
    first has it."""

    read: dict[tuple[str, str], list[Column]]  # (measure, metric): columns
    means: dict[str, Column]


@functools.cache
def columns() -> Columns:
    """The columns of the tables of workflow/papers, those of the headline table first; none where the package
    has no workflow beside it."""
    read: dict[tuple[str, str], list[Column]] = {}
    averages: dict[str, Column] = {}
    papers = WORKFLOW / "papers"
    artefacts = available(papers, {}).values() if papers.is_dir() else ()
    taken: set[str] = set()
    for artefact in sorted(artefacts, key=lambda a: a.paper != HEADLINE):
        if not isinstance(artefact.spec, Table):
            continue
        for column in artefact.spec.columns:
            if column.name in taken or column.run:
                continue
            taken.add(column.name)
            if column.mean:
                averages[column.name] = column
            elif column.measure and column.metric:
                same = read.setdefault((column.measure, column.metric), [])
                if not any((c.of, c.at) == (column.of, column.at) for c in same):
                    same.append(column)
    return Columns(read, averages)


def name_readings(measure: str, readings: Iterable[Reading]) -> dict[str, float]:
    """Readings under the names of tables' columns and in their units (percent), with `<column>_stderr` and
    `<column>_n`.

    A reading that no table shows is `<measure>/<metric>/<of>`, and along a metric's axes
    `fidelity/kl/attention/layer_3/head_1`.
    """
    found: dict[str, float] = {}
    for r in readings:
        column = next(
            (
                c
                for c in columns().read.get((measure, r.metric), ())
                if c.of in (None, r.of) and dict(c.at) == dict(r.at)
            ),
            None,
        )
        unit = column.factor if column else 1.0
        name = (
            column.name
            if column
            else "/".join([measure, r.metric, r.of, *(f"{k}_{v}" for k, v in r.at.items())])
        )
        parts = {name: (r.value, unit), f"{name}_stderr": (r.stderr, unit)} | (
            {f"{name}_n": (r.n, 1.0)} if column else {}
        )
        found |= {
            store.metric_name(n): u * value
            for n, (value, u) in parts.items()
            if isinstance(value, int | float)
        }
    return found


def of_columns(numbers: Mapping[str, float]) -> dict[str, float]:
    """The numbers of a stage that rows are compared by: tables' columns, trained parameters and tokens of
    each step."""
    names = {column.name for same in columns().read.values() for column in same}
    wanted = {*names, *(f"{name}_{part}" for name in names for part in ("stderr", "n"))}
    return {
        name: value
        for name, value in numbers.items()
        if name in wanted or name == "trainable_params" or name.endswith("_tokens")
    }


def means(numbers: Mapping[str, float]) -> dict[str, float]:
    """The tables' averages whose columns are all there, each with its error, from theirs as independent
    ones."""
    found = {}
    for name, column in columns().means.items():
        if all(part in numbers for part in column.mean):
            found[name] = math.fsum(numbers[part] for part in column.mean) / len(column.mean)
            if all(f"{part}_stderr" in numbers for part in column.mean):
                found[f"{name}_stderr"] = math.hypot(
                    *(numbers[f"{part}_stderr"] for part in column.mean)
                ) / len(column.mean)
    return found


def numbers_of(record: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's metrics.json: of a measurement its readings and facts under the names of tables' columns, of
    another stage as it is."""
    if "readings" not in metrics:
        return dict(metrics)
    facts = metrics.get("facts", {})
    known = {name: facts[name] for name in ("trainable_params", "collapsed") if facts.get(name) is not None}
    known |= {f"{step}_tokens": n for step, n in facts.get("tokens", {}).items()}
    return known | name_readings(record["measure"], (Reading(**reading) for reading in metrics["readings"]))


def compares(record: Mapping[str, Any]) -> bool:
    """Whether a stage measures what its row is compared by, which the gate does not."""
    return record.get("measure", "") not in ("", GATE)
