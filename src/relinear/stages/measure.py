"""A measurement of a run: one metric on one data set, with a key of its own, so that a new metric reruns
nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from relinear import attention
from relinear.files import sha256
from relinear.plan.entries import Measure
from relinear.plan.names import Node
from relinear.plan.options import (
    KEEP,
    check_values,
    method_file,
    metric_file,
    metric_needs,
    option_defaults,
    option_names,
    part_names,
    reads_data,
)
from relinear.plan.sane import read_yaml
from relinear.plan.strict import ConfigError, Strict, parse
from relinear.stages import _stage
from relinear.stages._work import Entry, Scaled, Work

GATE = "gate"  # the measure that a model must pass before others score it
PICTURE_GATE = "picture_gate"  # the metric that is the gate of a model of pictures
AS_IT_IS = "default"  # the `rope_scaling` of angles that go on beyond the positions
# options that say how many tokens a model reads in one piece
LENGTHS = ("contexts", "lengths", "length", "positions")


# below a folder of items, or of lm-eval's tasks
File = Annotated[str, Field(pattern=r"^[\w{}-]+([./][\w{}-]+)*$")]
Splits = Annotated[dict[Literal["train", "dev", "validation", "test"], File], Field(min_length=1)]


class Task(Strict):
    """A file of workflow/tasks: one of lm-eval's tasks, over files of items. What it says of shots and splits
    takes the place of lm-eval's."""

    include: File  # with {subject}, one task for each subject
    training_split: File | None = None
    validation_split: File | None = None
    test_split: File | None = None
    num_fewshot: Annotated[int, Field(ge=0, le=1000, strict=True)]
    convert: Literal["arc", "boolq", "lambada"] | None = None
    data: Splits
    smoke: Splits


def check_tasks(workflow: Path) -> None:
    """Raise ConfigError for a file of workflow/tasks that says what none does."""
    for path in sorted((workflow / "tasks").glob("*.yaml")):
        parse(Task, read_yaml(path), f"tasks/{path.name}")


def of_shape(measure: Measure) -> bool:
    """Whether a measure is of a model's shape alone: it stands behind nothing that trains, and all trainings
    of a run have the same."""
    return "shape" in metric_needs(metric_file(measure.metric))


def undefined(method: str, measure: Measure) -> str | None:
    """The reason why a measurement is not defined of a method: it lacks a part that is switched off, or
    nothing was linearized."""
    have = part_names(method_file(method))
    if lacking := [part for part in measure.without if part not in have]:
        return f"no {' and no '.join(lacking)} part"
    if "linearized" in metric_needs(metric_file(measure.metric)) and method == "softmax":
        return "softmax attention, which no method has replaced"
    return None


def options_of(measure: Measure, scale: Scaled) -> dict[str, Any]:
    """The options of a measure's metric: the scale's, and the measure's own instead where it gives them."""
    options = {**scale.config.measures.get(measure.metric, {}), **measure.options}
    if "tasks" in options:  # names of workflow/tasks, the only ones of the scale's `items` that count
        items = options.get("items", {})
        options["items"] = {task: items.get(task) for task in options.pop("tasks")}
    return options


class Stage(_stage.Stage):
    """The stage `measure`, which takes one measurement of a run."""

    help = "Measure a run."
    work = "relinear.measure.run"
    device = spread = True

    def folder(self, node):
        """The folder of its results, below the scale's."""
        return f"runs/{node.name}/{node.part}"

    def resolve(self, entry, scale):
        """The metric with its options, on the run's model, its steps, its gate and the metric's data."""
        asked = _Asked(entry, scale)
        measure, run, links = asked.measure, entry.run, entry.links
        parents = {"model": Node("model", entry.model)}
        if of_shape(measure):
            links = [links[-1] | {"steps": []}]  # the last method alone
        else:
            parents |= asked.behind()
        items = asked.items()
        return Work(
            settings={
                "method": run.run.method,
                "options": run.run.options,
                "variant": run.run.variant,
                "links": links,
                "metric": asked.metric,
                "metric_options": asked.options,
                "before": measure.before,
                **({"without": measure.without} if measure.without else {}),
                "data": asked.data,
                "files": asked.files(),
                "seed": scale.seed,
                "init_seed": scale.seed + run.seed,
            },
            module=self.work,
            reaches=(f"relinear.measure.{asked.metric}", *_stage.built_of(entry, scale)),
            parents=parents,
            assets=(items["asset"],) if items and items["asset"] else (),
            refused=_stage.first(asked.reasons()),
            beyond=_stage.first(asked.beyond()),
        )


class _Asked:
    """One measurement: the measure that is asked for, of a run at a scale."""

    def __init__(self, entry: Entry, scale: Scaled):
        self.entry, self.scale, self.node = entry, scale, entry.node
        self.measure, self.method = scale.measures[entry.node.part], entry.run.run.method
        self.model = scale.models[entry.model]
        self.gate = self.node.part == GATE
        # The gate of models of pictures is another metric.
        self.metric = PICTURE_GATE if self.gate and scale.sees(entry.model) else self.measure.metric
        self.file, self.needs = metric_file(self.metric), metric_needs(metric_file(self.metric))
        self.data = self._data()
        self.options = self._options()

    def _data(self) -> str | None:
        """The data that stand in for the measure's; None for the gate of an encoder, which shows on any
        tokens."""
        if self.measure.data is None or (self.gate and not self.model.causal):
            return None
        return self.scale.data_for(self.measure.data, self.entry.model)

    def _options(self) -> dict[str, Any]:
        """The metric's options; sequences are never longer than those that the data are made of."""
        options = {} if self.metric == PICTURE_GATE else options_of(self.measure, self.scale)
        data = self.data or (self.model.data if self.gate else None)
        longest = data and self.scale.sequence(data)
        if longest and "seq_len" in options:
            options["seq_len"] = min(options["seq_len"], longest)
        return options

    def behind(self) -> dict[str, Node]:
        """The nodes behind a measurement that is of more than a shape, beside the model."""
        parents = dict(self.entry.trained)
        if self.data is not None and self.scale.data[self.data].make != "items":
            parents["data"] = self.scale.text(self.measure.data, self.entry.model)
        if self.measure.before is None and not self.gate and GATE in self.scale.measures:
            parents[GATE] = self.node._replace(part=GATE)
        return parents

    def items(self) -> dict[str, Any] | None:
        """The options of data that are items, which say where these lie."""
        found = self.data and self.scale.data[self.data]
        return found.options if found and found.make == "items" else None

    def files(self) -> dict[str, str]:
        """Files of `workflow/` that the metric reads: sha256 by path."""
        workflow, items = self.scale.workflow, self.items()
        paths = (
            [_task(workflow, task) for task in self.options.get("items", {})] if "tasks" in self.needs else []
        )
        if items and items["folder"]:
            folder = workflow / items["folder"]
            if not folder.resolve().is_relative_to(workflow.resolve()):
                raise ConfigError(
                    f"{self.node}: items in {items['folder']!r}; possible: a folder below workflow/"
                )
            paths += sorted(path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(workflow).as_posix(): sha256(path) for path in paths}

    def reasons(self) -> Iterator[str]:
        """Why the metric cannot be asked of this run or these data, or the run's method cannot have its
        model."""
        entry, scale, node, metric, needs = self.entry, self.scale, self.node, self.metric, self.needs
        yield from _stage.unless_fitting(entry, scale)
        if "next_token" in needs:
            yield from _stage.unless_causal(
                entry, scale, f"{metric} scores how a model predicts the next token"
            )
        if "state" in needs:
            yield from _stage.unless_causal(
                entry, scale, f"{metric} counts what a model keeps from one token to the next"
            )
        have = part_names(method_file(self.method))
        for part in self.measure.without:
            if part not in have:
                yield (
                    f"measure {node.part!r} switches off the part {part!r}; the method {self.method!r} of run"
                    f" {node.name!r} has {', '.join(have) or 'none, it is one whole'}"
                )
        if "linearized" in needs and self.method == "softmax":
            able = ", ".join(method for method in attention.available() if method != "softmax")
            yield (
                f"{node}: {metric} is of a model whose attention a method has replaced; run {node.name!r} has"
                f" softmax attention. Possible: runs of {able}"
            )
        if reads_data(self.file) and self.data is None:
            yield (
                f"{node}: {metric} reads data, and the measure {node.part!r} names none; possible:"
                f" `{node.part}: {{metric: {metric}, data: alpaca}}` or other data of data.yaml in"
                f" measures.yaml; or `data: Path | None` in measure/{metric}.py, if it can do without"
            )
        check_values(
            self.file, self.options, f"measure {node.part!r} at scale {scale.name!r}: options of {metric}"
        )
        for name in ("seq_len", "max_length"):
            if self.options.get(name, 0) > self.model.positions:
                yield (
                    f"measure {node.part!r}: {name} {self.options[name]} is beyond the {self.model.positions}"
                    f" positions of run {node.name!r}'s model"
                )
        if "documents" in needs:
            yield from self._unless_documents()
        if "labels" in needs:
            yield from self._unless_labels()
        if "recall" in needs:
            yield from self._unless_recall()
        if scale.sees(entry.model) and "pictures" not in needs:
            yield (
                f"{node}: {metric} reads texts, and {entry.model!r} is a model of pictures; possible: runs of"
                " other models"
            )
        if "pictures" in needs:
            yield from _stage.unless_pictures(entry, scale, f"{metric} reads pictures")

    def beyond(self) -> Iterator[str]:
        """A reason where all lengths that are asked for are beyond the positions of softmax attention and no
        scaling of its rotary embedding is named; where the scaling that is named does not reach the longest;
        and where the run has nothing to scale.

        That some lengths are beyond is no fault: a scale's lengths are those of all rows of a table, and
        linear attention reads on. Such a cell is not defined, and says why.
        """
        node, file = self.node, metric_file(self.measure.metric)
        options = option_defaults(file) | self.options
        scaling = options.get("rope_scaling")
        if scaling and self.method != "softmax":
            yield (
                f"{node}: rope_scaling {scaling!r} is for softmax attention; the method of run {node.name!r}"
                f" is {self.method!r}. Possible: a measure without it"
            )
        softmax = self.method == "softmax" or self.entry.run.run.options.get(KEEP)
        if "next_token" not in metric_needs(file) or scaling == AS_IT_IS or not softmax:
            return
        positions = self.model.positions
        reach = int(positions * float(scaling.partition(":")[2])) if scaling else positions
        for name in LENGTHS:
            given = options.get(name, ())
            # the edges of positions begin with 0
            lengths = [n for n in (given if isinstance(given, list | tuple) else [given]) if n]
            if not lengths or (max if scaling else min)(lengths) <= reach:
                continue
            scaled = f", which {scaling} makes {reach}" if scaling else ""
            possible = f"{name} up to {reach}"
            if "rope_scaling" in option_names(file):
                possible += ", a rope_scaling: default, linear:<factor> or yarn:<factor>"
            yield (
                f"{node}: {name} {', '.join(map(str, lengths))}, and softmax attention of"
                f" {self.entry.model!r} reads {positions} positions{scaled}. Possible: {possible}, or"
                f" `without: [{node.part}]` in scales/{self.scale.name}.yaml"
            )

    def _unless_documents(self) -> Iterator[str]:
        """Data that are no whole documents, and positions beyond the shortest of them."""
        data = self.scale.data
        if self.data is None or data[self.data].make != "documents":
            able = ", ".join(name for name, found in data.items() if found.make == "documents")
            yield (
                f"{self.node} reads whole documents, and its data, {self.data!r}, are none; possible: {able}"
            )
        last, shortest = max(self.options.get("positions") or (0,)), data[self.data].options["shortest"]
        if last > shortest:
            yield (
                f"{self.node}: positions up to {last} asked for; documents of {self.data!r} have at least"
                f" {shortest} tokens. Possible: positions up to {shortest}, or a larger `shortest` in"
                " data.yaml"
            )

    def _unless_labels(self) -> Iterator[str]:
        """Data without labels, and a run whose last classify step learned others."""
        node, entry = self.node, self.entry
        if self.data not in (able := self.scale.labelled()):
            yield (
                f"{node} scores answers to labelled texts, and its data, {self.data!r}, have no labels;"
                f" possible: {', '.join(able)}"
            )
        steps = [step for step in entry.trained.values() if step.stage == "classify"]
        learned = [self.scale.data_for(entry.recipes[step]["data"], entry.model) for step in steps]
        if learned[-1:] != [self.data]:
            yield (
                f"{node} needs a run that learned {self.data!r}; {node.name!r} learned"
                f" {', '.join(learned) or 'no task'}. Possible: a last classify step on {self.data!r}"
            )

    def _unless_recall(self) -> Iterator[str]:
        """A model whose tokens are not those of associative recall, which mean nothing to any other."""
        models, data = self.scale.models, self.scale.data
        able = [name for name, model in models.items() if model.data and data[model.data].make == "recall"]
        if self.entry.model not in able:
            yield (
                f"{self.node}: {self.metric} asks for values of keys that are tokens without meaning, and"
                f" {self.entry.model!r} knows others; possible: runs of {', '.join(able)}"
            )


def _task(workflow: Path, task: str) -> Path:
    """The file of a task. Raises ConfigError where there is none of that name."""
    path = workflow / "tasks" / f"{task}.yaml"
    if not path.is_file():
        have = ", ".join(sorted(found.stem for found in path.parent.glob("*.yaml")))
        raise ConfigError(f"no task {task!r}; workflow/tasks has {have}")
    return path
