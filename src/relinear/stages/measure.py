"""A measurement of a run: one metric on one data set, with a key of its own, so that a new metric reruns nothing."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from relinear import attention
from relinear.files import sha256
from relinear.plan.code import PACKAGES
from relinear.plan.options import KEEP, check_values, metric_needs, option_defaults, option_names, part_names, reads_data
from relinear.plan.sane import read_settings
from relinear.plan.strict import ConfigError, Strict, parse
from relinear.stages import _stage
from relinear.stages._stage import Node, method_file

GATE = "gate"  # the measure that a model must pass before others score it
PICTURE_GATE = "picture_gate"  # the metric that is the gate of a model of pictures
AS_IT_IS = "default"  # the `rope_scaling` of angles that go on beyond the positions
LENGTHS = ("contexts", "lengths", "length", "positions")  # options that say how many tokens a model reads in one piece


def _file(metric: str) -> Path:
    return PACKAGES["relinear"] / "measure" / f"{metric}.py"


def _needs(metric: str) -> tuple[str, ...]:
    return metric_needs(_file(metric))


File = Annotated[str, Field(pattern=r"^[\w{}-]+([./][\w{}-]+)*$")]  # below a folder of items, or of lm-eval's tasks
Splits = Annotated[dict[Literal["train", "dev", "validation", "test"], File], Field(min_length=1)]


class Task(Strict):
    """A file of workflow/tasks: one of lm-eval's tasks, over files of items. What it says of shots and splits takes the place of lm-eval's."""

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
        parse(Task, read_settings(path), f"tasks/{path.name}")


class Stage(_stage.Stage):
    """The stage `measure`, which takes one measurement of a run."""

    help = "Measure a run."
    work = "relinear.measure.run"
    device = spread = True

    def folder(self, node):
        """The folder of its results, below the scale's."""
        return f"runs/{node.name}/{node.part}"

    def metric(self, plan, node: Node) -> str:
        """The metric of a measurement: the measure's, or the gate of models of pictures."""
        return PICTURE_GATE if node.part == GATE and plan.sees(plan.run(node.name).model) else plan.measures[node.part].metric

    def settings(self, plan, node):
        """Method, options, links, metric, items and data; part of the key."""
        measure, run, options = plan.measures[node.part], plan.run(node.name), self._options(plan, node)
        return {
            "method": run.run.method, "options": run.run.options, "variant": run.run.variant, "links": self._links(plan, node),
            "metric": self.metric(plan, node), "metric_options": options, "before": measure.before,
            **({"without": measure.without} if measure.without else {}),
            "data": self._data_name(plan, node), "files": self._files(plan, node, options),
            "seed": plan.seed, "init_seed": plan.seed + run.seed,
        }  # fmt: skip

    def of_shape(self, plan, measure: str) -> bool:
        """Whether a measure is of a model's shape alone: it stands behind nothing that trains, and all trainings of a run have the same."""
        return "shape" in _needs(plan.measures[measure].metric)

    def _links(self, plan, node: Node) -> list[dict[str, Any]]:
        """The chain ahead of a measurement; for one of the shape its last method alone."""
        links = plan.links_of(node)
        return [links[-1] | {"steps": []}] if self.of_shape(plan, node.part) else links

    def options(self, plan, measure: str) -> dict[str, Any]:
        """The options of a measure's metric: the scale's, and the measure's own instead where it gives them."""
        options = {**plan.config.measures.get(plan.measures[measure].metric, {}), **plan.measures[measure].options}
        if "tasks" in options:  # names of workflow/tasks, the only ones of the scale's `items` that count
            items = options.get("items", {})
            options["items"] = {task: items.get(task) for task in options.pop("tasks")}
        return options

    def _options(self, plan, node: Node) -> dict[str, Any]:
        """As `options`; sequences are never longer than those that the data are made of."""
        options = {} if self.metric(plan, node) == PICTURE_GATE else self.options(plan, node.part)
        data = self._data_name(plan, node) or (plan.models[plan.run(node.name).model].data if node.part == GATE else None)
        longest = None if data is None else plan.sequence(data)
        if longest and "seq_len" in options:
            options["seq_len"] = min(options["seq_len"], longest)
        return options

    def parents(self, plan, node):
        """The run's model; its steps, its gate and the node of the metric's data, where the metric is of more than a shape."""
        if self.of_shape(plan, node.part):
            return {"model": plan.model_of(node.name)}
        parents = {"model": plan.model_of(node.name), **plan.trained_before(node)}
        measure, data = plan.measures[node.part], self._data_name(plan, node)
        if data is not None and plan.data[data].make != "items":
            parents["data"] = plan.text(measure.data, plan.run(node.name).model)
        if measure.before is None and node.part != GATE and GATE in plan.measures:
            parents[GATE] = node._replace(part=GATE)
        return parents

    def assets(self, plan, node):
        """The asset of the items, if there is one."""
        items = self._items(plan, node)
        return [items["asset"]] if items and items["asset"] else []

    def modules(self, plan, node):
        """The work, the metric and the run's methods."""
        return [self.work, f"relinear.measure.{self.metric(plan, node)}", *plan.method_modules(node.name)]

    def check(self, plan, node, processes):
        """Raise ConfigError for a metric that cannot be asked of this run or these data, and for a method that its model cannot have."""
        _stage.require_order(plan, node)
        _stage.require_room(plan, node)
        metric = self.metric(plan, node)
        needs = _needs(metric)
        if "next_token" in needs:
            plan.require_causal(node, f"{metric} scores how a model predicts the next token")
        if "state" in needs:
            plan.require_causal(node, f"{metric} counts what a model keeps from one token to the next")
        self._check_parts(plan, node)
        if "linearized" in needs and plan.run(node.name).run.method == "softmax":
            able = ", ".join(method for method in attention.available() if method != "softmax")
            raise ConfigError(f"{node}: {metric} is of a model whose attention a method has replaced; run {node.name!r} has softmax attention. "
                              f"Possible: runs of {able}")  # fmt: skip
        if reads_data(_file(metric)) and self._data_name(plan, node) is None:
            raise ConfigError(
                f"{node}: {metric} reads data, and the measure {node.part!r} names none; possible: `{node.part}: {{metric: {metric}, data: alpaca}}` "
                f"or other data of data.yaml in measures.yaml; or `data: Path | None` in measure/{metric}.py, if it can do without"
            )
        options = self._options(plan, node)
        where = f"measure {node.part!r} at scale {plan.scale!r}: options of {metric}"
        check_values(_file(metric), options, where)
        positions = plan.models[plan.run(node.name).model].positions
        for name in ("seq_len", "max_length"):
            if options.get(name, 0) > positions:
                raise ConfigError(f"measure {node.part!r}: {name} {options[name]} is beyond the {positions} positions of run {node.name!r}'s model")
        if "documents" in needs:
            self._check_documents(plan, node, options)
        if "labels" in needs:
            self._check_labels(plan, node)
        if "recall" in needs:
            self._check_recall(plan, node, metric)
        self._check_pictures(plan, node, metric)
        if plan.teacher is None:  # with another one, a table that asks for too much is refused where it is asked for (`Plan.node`), and no other
            self.check_reach(plan, node)

    def check_reach(self, plan, node: Node) -> None:
        """Raises ConfigError where all lengths that are asked for are beyond the positions of softmax attention and no scaling of its rotary
        embedding is named; where the scaling that is named does not reach the longest; and where the run has nothing to scale.

        That some lengths are beyond is no error: a scale's lengths are those of all rows of a table, and linear attention reads on. Such a cell is
        not defined, and says why.
        """
        metric, run = plan.measures[node.part].metric, plan.run(node.name)
        options, method = option_defaults(_file(metric)) | self._options(plan, node), run.run.method
        scaling = options.get("rope_scaling")
        if scaling and method != "softmax":
            raise ConfigError(
                f"{node}: rope_scaling {scaling!r} is for softmax attention; the method of run {node.name!r} is {method!r}. "
                "Possible: a measure without it"
            )
        if "next_token" not in _needs(metric) or scaling == AS_IT_IS or not (method == "softmax" or run.run.options.get(KEEP)):
            return
        positions = plan.models[run.model].positions
        reach = int(positions * float(scaling.partition(":")[2])) if scaling else positions
        for name in LENGTHS:
            given = options.get(name, ())
            lengths = [n for n in (given if isinstance(given, list | tuple) else [given]) if n]  # the edges of positions begin with 0
            if lengths and (max if scaling else min)(lengths) > reach:
                scaled = f", which {scaling} makes {reach}" if scaling else ""
                scalings = ", a rope_scaling: default, linear:<factor> or yarn:<factor>" if "rope_scaling" in option_names(_file(metric)) else ""
                raise ConfigError(
                    f"{node}: {name} {', '.join(map(str, lengths))}, and softmax attention of {run.model!r} reads {positions} positions{scaled}. "
                    f"Possible: {name} up to {reach}{scalings}, or `without: [{node.part}]` in scales/{plan.scale}.yaml"
                )

    def misfit(self, plan, node: Node) -> str | None:
        """The reason why a measurement of a run is not defined: its method has no part that the measure switches off, or nothing was linearized."""
        method, measure = plan.run(node.name).run.method, plan.measures[node.part]
        have = part_names(method_file(method))
        if lacking := [part for part in measure.without if part not in have]:
            return f"no {' and no '.join(lacking)} part"
        if "linearized" in _needs(self.metric(plan, node)) and method == "softmax":
            return "softmax attention, which no method has replaced"
        return None

    def _check_documents(self, plan, node: Node, options: dict[str, Any]) -> None:
        """Raises ConfigError for data that are no whole documents, and for positions beyond the shortest of them."""
        data = self._data_name(plan, node)
        if data is None or plan.data[data].make != "documents":
            able = ", ".join(name for name, found in plan.data.items() if found.make == "documents")
            raise ConfigError(f"{node} reads whole documents, and its data, {data!r}, are none; possible: {able}")
        last, shortest = max(options.get("positions") or (0,)), plan.data[data].options["shortest"]
        if last > shortest:
            raise ConfigError(
                f"{node}: positions up to {last} asked for; documents of {data!r} have at least {shortest} tokens. Possible: positions up to "
                f"{shortest}, or a larger `shortest` in data.yaml"
            )

    def _check_labels(self, plan, node: Node) -> None:
        """Raises ConfigError for data without labels, and for a run whose last classify step learned others."""
        if (data := self._data_name(plan, node)) not in (able := plan.labelled()):
            raise ConfigError(f"{node} scores answers to labelled texts, and its data, {data!r}, have no labels; possible: {', '.join(able)}")
        steps = [step for link in plan.chain(node.name, plan.measures[node.part].before) for step in link.steps if step.stage == "classify"]
        learned = [plan.data_for(plan.run(s.name).run.recipes[s.stage]["data"], plan.run(s.name).model) for s in steps]
        if learned[-1:] != [data]:
            raise ConfigError(f"{node} needs a run that learned {data!r}; {node.name!r} learned {', '.join(learned) or 'no task'}. Possible: "
                              f"a last classify step on {data!r}")  # fmt: skip

    def _check_recall(self, plan, node: Node, metric: str) -> None:
        """Raises ConfigError for a model whose tokens are not those of associative recall, which mean nothing to any other."""
        able = [name for name, model in plan.models.items() if model.data and plan.data[model.data].make == "recall"]
        if (model := plan.run(node.name).model) not in able:
            raise ConfigError(f"{node}: {metric} asks for values of keys that are tokens without meaning, and {model!r} knows others; "
                              f"possible: runs of {', '.join(able)}")  # fmt: skip

    def _check_pictures(self, plan, node: Node, metric: str) -> None:
        """Raises ConfigError where a metric of pictures is asked of another model, or a model of pictures for another metric."""
        model, of_pictures = plan.run(node.name).model, "pictures" in _needs(metric)
        if plan.sees(model) and not of_pictures:
            raise ConfigError(f"{node}: {metric} reads texts, and {model!r} is a model of pictures; possible: runs of other models")
        if of_pictures:
            _stage.require_pictures(plan, node, f"{metric} reads pictures")

    def _check_parts(self, plan, node) -> None:
        """Raises ConfigError where the measure switches off what the run's method does not have."""
        method = plan.run(node.name).run.method
        have = part_names(method_file(method))
        for part in plan.measures[node.part].without:
            if part not in have:
                possible = ", ".join(have) or "none, it is one whole"
                raise ConfigError(f"measure {node.part!r} switches off the part {part!r}; the method {method!r} of run {node.name!r} has {possible}")

    def _data_name(self, plan, node: Node) -> str | None:
        data = plan.measures[node.part].data
        if node.part == GATE and not plan.models[plan.run(node.name).model].causal:
            return None  # an encoder decodes nothing, and the effects of padding and order show on any tokens
        return None if data is None else plan.data_for(data, plan.run(node.name).model)

    def _items(self, plan, node: Node) -> dict | None:
        data = self._data_name(plan, node)
        return plan.data[data].options if data is not None and plan.data[data].make == "items" else None

    def _files(self, plan, node: Node, options: dict) -> dict[str, str]:
        """Files of `workflow/` that the metric reads: sha256 by path."""
        tasks = options.get("items", {}) if "tasks" in _needs(plan.measures[node.part].metric) else ()
        paths = [self._task(plan.workflow, task) for task in tasks]
        items = self._items(plan, node)
        if items and items["folder"]:
            if not (plan.workflow / items["folder"]).resolve().is_relative_to(plan.workflow.resolve()):
                raise ConfigError(f"{node}: items in {items['folder']!r}; possible: a folder below workflow/")
            paths += sorted(p for p in (plan.workflow / items["folder"]).rglob("*") if p.is_file())
        return {path.relative_to(plan.workflow).as_posix(): sha256(path) for path in paths}

    @staticmethod
    def _task(workflow: Path, task: str) -> Path:
        path = workflow / "tasks" / f"{task}.yaml"
        if not path.is_file():
            raise ConfigError(f"no task {task!r}; workflow/tasks has {', '.join(sorted(p.stem for p in path.parent.glob('*.yaml')))}")
        return path
