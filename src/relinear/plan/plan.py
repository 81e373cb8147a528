"""The plan: for every node its work, its folder and its key. Rules and `relinear.stage` both read it, so that
they agree.

The plan asks a stage once for the work of a node, and keeps the answer. A key is a hash over the settings,
the code that the work reaches and the parents' keys; it changes exactly when the result could. Whatever
changes a key changes a folder: a budget and a seed end the name of the scale's folder, another model and
another training seed end a run's. Imports neither torch nor transformers.
"""

import functools
import os
import shlex
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from relinear import records, stages
from relinear.files import sha256
from relinear.plan import assets, catalogue
from relinear.plan.code import PACKAGES, code_hash
from relinear.plan.entries import Data, Measure, Model, Run, Scale, one_of
from relinear.plan.figures import Own
from relinear.plan.held import positions
from relinear.plan.job import PREPARES
from relinear.plan.names import DERIVED, TEXT, LinkNodes, Node, Resolved, Text, digest, short
from relinear.plan.options import SourceError, check_values, metric_file, metric_needs, metric_yields
from relinear.plan.places import (
    PARTS,
    PLACES,
    check_axes,
    check_point,
    metric_axes,
    script_places,
)
from relinear.plan.scale import read_scale, scales
from relinear.plan.specs import Artefact, available
from relinear.plan.strict import WORKFLOW, ConfigError
from relinear.plan.tables import Address, Table
from relinear.plan.words import metric_words
from relinear.stages._work import Entry, Scaled, Work
from relinear.stages.measure import check_tasks, of_shape, undefined

CHOICES = {"scale": str, "budget": float, "seed": int, "seeds": int, "teacher": str, "device": str}
FURTHEST_SEED = 1000  # the largest number of a run's training seed, counted from the plan's seed
# The bounds of choices: beyond them numbers overflow, generators refuse a seed, or planning alone takes
# minutes.
BOUNDS = {
    "budget": (1e-6, 10**6, "the multiple of every amount"),
    "seed": (0, 2**32 - 1 - FURTHEST_SEED, "where random numbers begin"),
    "seeds": (1, 100, "the trainings of each row"),
}


@functools.cache
def metrics() -> list[str]:
    """Names of all metrics: the files of `measure/`."""
    folder = PACKAGES["relinear"] / "measure"
    return sorted(p.stem for p in folder.glob("*.py") if not p.stem.startswith("_") and p.stem != "run")


# what a plan keeps of its answers: no part of what it is made from
found_once = partial(field, init=False, repr=False, compare=False, default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A scale with a user's choices. `results` is the folder that all scales write under."""

    scale: str = "mini"
    budget: float = 1.0
    seed: int = 0
    seeds: int = 1  # trainings of each row of tables that average over seeds
    teacher: str | None = None  # a name of models.yaml that takes the place of every run's model
    device: str | None = None
    results: Path = Path("results")
    workflow: Path = WORKFLOW
    _resolved: dict[str, Resolved] = found_once()
    _works: dict[Node, Work] = found_once()
    _keys: dict[Node, str] = found_once()
    _checked: set[Node] = found_once(default_factory=set)

    # --- the catalogue ---

    @functools.cached_property
    def config(self) -> Scale:
        """The settings of the scale, checked."""
        return read_scale(self.scale, budget=self.budget, workflow=self.workflow)

    @functools.cached_property
    def models(self) -> dict[str, Model]:
        """Name -> entry of `models.yaml`."""
        return catalogue.read_models(self.workflow)

    @functools.cached_property
    def data(self) -> dict[str, Data]:
        """Name -> entry of `data.yaml`."""
        return catalogue.read_data(self.workflow)

    @functools.cached_property
    def measures(self) -> dict[str, Measure]:
        """Name -> entry of `measures.yaml`."""
        return catalogue.read_measures(metrics(), self.data, self.workflow)

    @functools.cached_property
    def runs(self) -> dict[str, Run]:
        """The runs of all papers, by name."""
        return catalogue.read_runs(self.models, self.workflow)

    @functools.cached_property
    def catalogue(self) -> dict[str, assets.Asset]:
        """Name -> entry of `assets.yaml`."""
        return assets.catalogue(self.workflow / "assets.yaml")

    @functools.cached_property
    def artefacts(self) -> dict[str, Artefact]:
        """Every table and figure, by its rule: `lolcats_figure3`."""
        added: dict[str, list[str]] = {}
        for name, run in self.runs.items():
            for table in run.shown:
                added.setdefault(table, []).append(name)
        return available(self.workflow / "papers", added)

    @functools.cached_property
    def scaled(self) -> Scaled:
        """What stages may look up."""
        return Scaled(
            self.scale,
            self.config,
            self.budget,
            self.seed,
            self.models,
            self.data,
            self.measures,
            self.catalogue,
            self.workflow,
        )

    def run(self, name: str) -> Resolved:
        """A run by its name: `lizard`, `lizard@mistral-7b` (of another model), `lizard-seed1` (trained with
        another seed), or both."""
        if name not in self._resolved:
            base, model, seed = self._parts(name)
            begins = self.scaled.stand_in("models", model or self.runs[base].model)
            self._resolved[name] = Resolved(name, self.runs[base].of(self.models[begins]), begins, seed)
        return self._resolved[name]

    def _parts(self, name: str) -> tuple[str, str | None, int]:
        """The entry of runs.yaml, the model and the seed that a run's name says."""
        part = None if name in self.runs else DERIVED.fullmatch(name)
        base = name if part is None else part["base"]
        one_of("run", base, self.runs)
        if part and part["seed"] and (len(part["seed"]) > 4 or int(part["seed"]) > FURTHEST_SEED):
            raise ConfigError(
                f"no run {name!r}: trainings with other seeds end in -seed1 to -seed{FURTHEST_SEED}"
            )
        return (base, part["model"], int(part["seed"] or 0)) if part else (base, None, 0)

    def name(self, run: str) -> str:
        """A run's name in folders: without a model that the scale takes for it anyway, and with the teacher
        that `--config teacher=` chose for it."""
        base, model, seed = self._parts(run)
        return self._name(base, model or self._teacher_of(base), seed)

    def _teacher_of(self, base: str) -> str | None:
        """The `--config teacher=` override for a run. None if the run uses the other kind of model (encoder
        or decoder) or a model with the vocabulary of one data set."""
        usual = self.models[self.scaled.stand_in("models", self.runs[base].model)]
        chosen = self.models[self.scaled.stand_in("models", self.teacher)] if self.teacher else usual
        return self.teacher if chosen.causal == usual.causal and usual.data is None else None

    def _name(self, base: str, model: str | None, seed: int) -> str:
        usual = self.scaled.stand_in("models", self.runs[base].model)
        other = f"@{model}" if model and self.scaled.stand_in("models", model) != usual else ""
        return base + other + (f"-seed{seed}" if seed else "")

    def repeats(self, run: str) -> list[str]:
        """A run's trainings with further seeds, which share its model, texts and items; none for one that is
        not trained."""
        trained = any(step.stage not in PREPARES for link in self.chain(run) for step in link.steps)
        return [f"{run}-seed{n}" for n in range(1, self.seeds)] if trained else []

    # --- chains ---

    def chain(self, run: str, before: str | None = None) -> list[LinkNodes]:
        """The methods and steps behind a run, from its model on; `before` ends it ahead of that step of the
        run itself."""
        steps = list(self.run(run).run.recipes)
        return self._chain(run, steps[: steps.index(before)] if before in steps else steps)

    def _chain(self, name: str, steps: list[str]) -> list[LinkNodes]:
        run, links = self.run(name).run, []
        if run.after is not None:
            base, _, last = run.after.partition("/")
            base = self.like(base, name)
            whole = list(self.run(base).run.recipes)
            links = self._chain(base, whole[: whole.index(last) + 1] if last else whole)
        own = tuple(Node(step, name) for step in steps)
        if links and (links[-1].method, links[-1].options) == (run.method, run.options):
            links[-1] = links[-1]._replace(steps=(*links[-1].steps, *own))
        else:
            links = [link for link in links if link.steps or link.method != "softmax"] + [
                LinkNodes(run.method, run.options, own)
            ]
        return links

    def like(self, base: str, name: str) -> str:
        """The name of the run `base` with the model and the seed that end the run's name `name`."""
        return base + name.removeprefix(self._parts(name)[0])

    # --- nodes ---

    @property
    def root(self) -> Path:
        """The scale's folder; another budget and another seed have folders of their own."""
        return self.results / (
            self.scale
            + (f"-x{short(self.budget)}" if self.budget != 1 else "")
            + (f"-seed{self.seed}" if self.seed else "")
        )

    @property
    def store(self) -> str:
        """The place where MLflow mirrors all scales: one SQLite file beside them, or the server that
        MLFLOW_TRACKING_URI names."""
        return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(self.results / 'mlflow.db').resolve()}"

    def node(self, stage: str, name: str, part: str = "") -> Node:
        """A checked node, by its name in folders. Raises ConfigError for an unknown stage, name or measure, a
        step that a run does not have, and a measurement of lengths that its model cannot read."""
        one_of("stage", stage, stages.available())
        if stage == "measure" or stages.stage(stage).trains:
            if (called := self._name(*self._parts(name))) != name:
                raise ConfigError(f"no run {name!r} at scale {self.scale!r}: it is {called!r}")
            if stage == "measure":
                one_of("measure", part, self.measures)
                if (why := self.work(Node(stage, name, part)).beyond) is not None:
                    raise ConfigError(why)
            elif stage not in self.run(name).run.recipes:
                raise ConfigError(self._without_step(name, stage))
        elif stage == "asset":
            one_of("asset", name, self.catalogue)
        elif stage == "model":
            one_of("model", name, self.models)
        elif stage not in stages.texts() and stage in stages.makers():
            one_of(
                f"data of kind {stage!r},",
                name,
                [data for data, found in self.data.items() if found.make == stage],
            )
        else:
            self.text_of(Node(stage, name))
        return Node(stage, name, part)

    def _without_step(self, name: str, step: str) -> str:
        """A sentence that says which runs have a step that a run lacks, at this scale."""
        left, why = self.runs[self._parts(name)[0]].recipes.get(step), ""
        if left is not None:
            kind = "whole" if left.get("if_altered") else "pretrained"
            why = f" at scale {self.scale!r}, where its model, {self.run(name).model!r}, is {kind}"
        have = ", ".join(run for run in self.runs if step in self.run(run).run.recipes)
        return f"run {name!r} has no step {step!r}{why}; runs that do: {have or 'none at this scale'}"

    def text_of(self, node: Node) -> Text:
        """Data, model and dose of a text node, or of one that is named after a text."""
        part = TEXT.fullmatch(node.name)
        if part is None:
            raise ConfigError(
                f"no text {node.name!r}; a text is <data>@<model>, with -x<dose> where the dose is not 1"
            )
        one_of("data", part["data"], self.data), one_of("model", part["model"], self.models)
        try:
            kind = node.stage if node.stage in stages.texts() else "text"
            text = Text(self.scaled.text_data(part["data"], kind), part["model"], float(part["dose"] or 1))
        except ValueError as error:
            raise ConfigError(f"no text {node.name!r}: {error}") from None
        if str(text) != node.name:
            raise ConfigError(f"no text {node.name!r}: it is {str(text)!r}")
        return text

    def measured(self, run: str, measure: str) -> Node:
        """The node of a run's measurement, by the run's name in folders.

        A measure before a step that the run does not have is the same one at the run's end.
        """
        name, wanted = self.name(run), self.measures[one_of("measure", measure, self.measures)]
        if wanted.before is not None and wanted.before not in self.run(name).run.recipes:
            at_end = wanted.model_copy(update={"before": None})
            measure = next((other for other, m in self.measures.items() if m == at_end), measure)
        return Node("measure", name, measure)

    def folder(self, node: Node) -> Path:
        """Where a node's results lie."""
        return self.root / stages.stage(node.stage).folder(node)

    def entry(self, node: Node) -> Entry:
        """What a node is of, for its stage."""
        stage = stages.stage(node.stage)
        if stage.tokens:
            return Entry(node, text=self.text_of(node))
        if not stage.trains and node.stage != "measure":
            return Entry(node)
        before = node.stage if stage.trains else self.measures[node.part].before
        chain = tuple(self.chain(node.name, before))
        recipes = {step: self.run(step.name).run.recipes[step.stage] for link in chain for step in link.steps}
        return Entry(node, run=self.run(node.name), chain=chain, recipes=recipes)

    def work(self, node: Node) -> Work:
        """The work of a node, its assets by what identifies them among its settings. Its stage is asked once.

        Raises ConfigError for settings of which no work can be made.
        """
        if node not in self._works:
            work = stages.stage(node.stage).resolve(self.entry(node), self.scaled)
            identities = {}
            for name in work.assets:
                identities[name] = digest(self.catalogue[one_of("asset", name, self.catalogue)].identity)
            self._works[node] = replace(work, settings={**work.settings, "assets": identities})
        return self._works[node]

    def settings(self, node: Node) -> dict[str, Any]:
        """The settings of a node's work, and the assets it reads: plain data, part of the key."""
        return self.work(node).settings

    def parents(self, node: Node) -> dict[str, Node]:
        """The nodes that a node reads, by role."""
        return dict(self.work(node).parents)

    def key(self, node: Node) -> str:
        """The hash of all that a node's result depends on: settings, code, its parents' keys."""
        if node not in self._keys:
            parents = {role: self.key(parent) for role, parent in self.parents(node).items()}
            counted = {
                "stage": node.stage,
                "settings": self.settings(node),
                "code": code_hash(self.work(node).modules),
                "parents": parents,
            }
            self._keys[node] = digest(counted)
        return self._keys[node]

    def finished(self, node: Node) -> Path | None:
        """The folder of a node whose result is there as this plan would make it; None where it is not, or
        where its record is broken."""
        folder = self.folder(node)
        record = records.finished(folder)
        return folder if record is not None and record["key"] == self.key(node) else None

    # --- tables and figures ---

    def out(self, artefact: Artefact) -> Path:
        """The folder of a table or figure: another teacher and several seeds have folders of their own."""
        return self.root / (
            artefact.paper
            + (f"@{self.teacher}" if self.teacher else "")
            + (f"-seeds{self.seeds}" if self.seeds > 1 else "")
        )

    def drawing(self, artefact: Artefact) -> Path:
        """The record of a table or figure: the sha256 of each file that was drawn."""
        return records.drawing(self.out(artefact), artefact.stem)

    def reads(self, artefact: Artefact) -> dict[tuple[str, str], Node]:
        """(run, measure) of every measurement that an artefact shows -> its node. Measures that the scale
        leaves out, and cells of a table that are not defined (`undefined`), are not among them.

        Raises ConfigError, which names the spec, for a run or measure that does not exist.
        """
        found, drawn = {}, {run for run, _ in artefact.spec.draws(self.scale)}
        for run, measure in artefact.reads(self.scale):
            if measure in self.config.without:
                continue
            try:
                node = self.measured(run, measure)
                if isinstance(artefact.spec, Table) and self._undefined(node):
                    continue
                found[run, measure] = node
                if artefact.seeds and run in drawn and not of_shape(self.measures[measure]):
                    found |= {(name, measure): self.measured(name, measure) for name in self.repeats(run)}
            except ConfigError as error:
                raise ConfigError(f"{artefact.path}: {error}") from None
        return found

    def undefined(self, artefact: Artefact) -> dict[tuple[str, str], str]:
        """(run, measure) of the cells of a table that no measurement can fill -> why: a row's method lacks
        what the column's measure is of."""
        if not isinstance(artefact.spec, Table):
            return {}
        nodes = {(run, measure): self.measured(run, measure) for run, measure in artefact.reads(self.scale)}
        return {address: why for address, node in nodes.items() if (why := self._undefined(node))}

    def _undefined(self, node: Node) -> str | None:
        return undefined(self.run(node.name).run.method, self.measures[node.part])

    def files(self, artefact: Artefact) -> list[str]:
        """The other inputs of an artefact: as measured on this machine where they were, else as they are
        committed."""
        found = []
        for file in artefact.files():
            own, committed = Path(file), Path(file.replace("results/", "results/reference/", 1))
            found.append((committed if committed.is_file() and not own.is_file() else own).as_posix())
        return found

    def drawn_by(self, artefact: Artefact) -> str:
        """Hash of the code that draws an artefact, the file beside its spec included."""
        return digest([code_hash([artefact.module]), artefact.script and sha256(artefact.script)])

    def artefacts_of(self, run: str) -> list[str]:
        """Tables and figures that show a run, as `<paper>/<stem>`."""
        return self._shown_in.get(run, [])

    @functools.cached_property
    def _shown_in(self) -> dict[str, list[str]]:
        found: dict[str, dict[str, None]] = {}
        for artefact in self.artefacts.values():
            with suppress(ConfigError):  # its own fault, which is told where it is asked for
                for node in self.reads(artefact).values():
                    found.setdefault(node.name, {})[f"{artefact.paper}/{artefact.stem}"] = None
        return {run: list(names) for run, names in found.items()}

    def behind(self, nodes: list[Node]) -> list[Node]:
        """The nodes and everything that they are made from, each once, parents first."""
        found: dict[Node, None] = {}

        def visit(node: Node) -> None:
            if node not in found:
                for parent in self.parents(node).values():
                    visit(parent)
                found[node] = None

        for node in nodes:
            visit(node)
        return list(found)

    # --- checks ---

    def check(self) -> None:
        """Raise ConfigError for all mistakes that can be found before any work starts, a line each: in the
        choices, in every table and figure, and in every step of every run. What stands behind several tables
        is told of the first."""
        self.check_choices()
        checks = [
            (f"{artefact.path}: ", partial(self.check_artefact, artefact))
            for artefact in self.artefacts.values()
        ]
        checks += [
            ("", partial(self.check_node, Node(step, name)))
            for name in map(self.name, self.runs)
            for step in self.run(name).run.recipes
        ]
        faults: dict[str, str] = {}  # without the table -> with it
        for where, check in checks:
            try:
                check()
            except ConfigError as error:
                faults.setdefault(str(error).removeprefix(where), str(error))
        if faults:
            raise ConfigError("\n".join(faults.values()))

    def check_choices(self) -> None:
        """Raise ConfigError for choices and settings that are wrong whatever is asked for."""
        for name, (least, most, what) in BOUNDS.items():
            if not least <= (given := getattr(self, name)) <= most:
                raise ConfigError(
                    f"{name}, {what}, must be at least {least:g} and at most {most}; got {str(given)[:40]}"
                )
        if self.device not in (None, "cpu", "cuda"):
            raise ConfigError(f"device must be cpu or cuda; got {self.device!r}")
        if self.teacher is not None:
            self.scaled.stand_in("models", self.teacher)
        self.catalogue, check_tasks(self.workflow)  # all of them, also those that this scale does not read
        for kind in ("models", "data"):
            for name in getattr(self.config.stand_ins, kind):
                self.scaled.stand_in(kind, name)
        for measure in self.config.without:
            one_of(f"measure that scale {self.scale!r} leaves out,", measure, self.measures)
        for metric, options in self.config.measures.items():
            one_of(f"metric of scale {self.scale!r},", metric, metrics())
            with suppress(SourceError):  # a metric's own fault, which is told where the metric is asked for
                check_values(
                    metric_file(metric),
                    options,
                    f"scales/{self.scale}.yaml: measures: {metric}",
                    partial=True,
                )

    def check_artefact(self, artefact: Artefact) -> None:
        """Raise ConfigError for a mistake in a table or figure, or in anything that stands behind it."""
        for scale in artefact.not_at:
            one_of(f"scale that {artefact.path} is `not_at`,", scale, scales(self.workflow))
        nodes = self.reads(artefact)
        self._check_columns(artefact)
        self._check_held(artefact)
        for node in nodes.values():
            self.check_node(node, artefact.path)
        self.check_places(artefact)  # of measurements that fit: what is wrong with one of these is told first

    def check_places(self, artefact: Artefact) -> None:
        """Raise ConfigError for a reading that a table or figure names, itself or in a claim, and that no
        measurement has: its measure, its name, what it is of, and its place on the metric's axes; and for a
        point that the file beside a spec does not find."""
        for asked in artefact.spec.asked():
            where = f"{artefact.path}, {asked.where}" if asked.where else artefact.path
            measures = [
                self.measures[one_of(f"measure of {where},", m, self.measures)] for m in asked.measures
            ]
            files = [metric_file(measure.metric) for measure in measures]
            said = " or ".join(map(repr, asked.measures))
            yields = [name for file in files for name in metric_yields(file)]
            one_of(f"reading of measure {said} in {where},", asked.metric, yields)
            if asked.of is not None:
                self._check_object(asked.of, measures, f"object of measure {said} in {where},")
            axes = {axis: such for file in files for axis, such in metric_axes(file).items()}
            try:
                check_axes(asked.at, axes)
            except ValueError as error:
                raise ConfigError(f"{where}: measure {said}: {error}") from None
        self._check_script(artefact)

    def _check_object(self, of: str, measures: list[Measure], what: str) -> None:
        """Raise ConfigError for what no reading of the measures is of: one of a measure's tasks; else its
        data, what its options name, any data, model or source, or a word of the metric's file."""
        if all("tasks" in metric_needs(metric_file(measure.metric)) for measure in measures):
            named = [task for measure in measures for task in measure.options.get("tasks", ())]
        elif of in self.data or any(of in metric_words(measure.metric) for measure in measures):
            return
        else:
            own = [
                value for m in measures for value in (m.data, *m.options.values()) if isinstance(value, str)
            ]
            words = sorted(set().union(*(metric_words(measure.metric) for measure in measures)))
            named = list(dict.fromkeys([*own, *self.data, *self.models, *self.catalogue, *words]))
        one_of(what, of, named)

    def _check_script(self, artefact: Artefact) -> None:
        """Raise ConfigError for a point of a claim that the file beside the spec does not find."""
        if not (isinstance(artefact.spec, Own) and artefact.script and artefact.spec.claims):
            return
        if (places := script_places(artefact.script)) is None:
            if artefact.spec.needs:
                return
            raise ConfigError(
                f"{artefact.path}: {artefact.script.name} finds the numbers of its claims and does not list"
                f" their places: give it a constant {PLACES}, a dict of {', '.join(PARTS)}"
            )
        for where, point in artefact.spec.claimed():
            try:
                check_point(point.row, point.column, point.at, places)
            except ValueError as error:
                raise ConfigError(f"{artefact.path}, {where}: {error}") from None

    def _check_held(self, artefact: Artefact) -> None:
        """Raise ConfigError for a row whose state holds more than the table allows."""
        if (most := getattr(artefact.spec, "holds", None)) is None:
            return
        for name in dict.fromkeys(line.run for line in artefact.spec.lines if line.run):
            try:
                held = positions(self.run(name).run, most)
            except ConfigError as error:
                raise ConfigError(f"{artefact.path}: row {name!r}: {error}") from None
            if held is not None and held > most.positions:
                raise ConfigError(
                    f"{artefact.path}: row {name!r} holds the bytes of {held:g} positions in a layer, of"
                    f" {most.positions} that the table allows; possible: {held - most.positions:g} fewer in"
                    " its window, a state in bfloat16, or a larger `holds`"
                )

    def _check_columns(self, artefact: Artefact) -> None:
        """Raise ConfigError for a column that is not defined in any row."""
        undefined = self.undefined(artefact)
        for column in artefact.spec.columns if undefined else ():
            cells = [line.cells.get(column.name) for line in artefact.spec.lines]
            reasons = [
                (cell.run, undefined.get((cell.run, cell.measure)))
                for cell in cells
                if isinstance(cell, Address)
            ]
            if reasons and self.scale not in column.not_at and all(why for _, why in reasons):
                said = "; ".join(f"{run} has {why}" for run, why in reasons)
                raise ConfigError(
                    f"{artefact.path}: column {column.name!r} is defined in no row: {said}. Possible: another"
                    " measure, or other rows"
                )

    def check_node(self, node: Node, where: str = "") -> None:
        """Raise ConfigError for a mistake in a node's settings, which `where` asks for, or in those of a node
        that it is made from."""
        if node in self._checked:
            return
        try:
            parents = self.parents(node)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}" if where else str(error)) from None
        for parent in parents.values():
            self.check_node(parent)
        try:
            self.check_processes(node, max(self.gpus(node.stage), 1))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}" if where else str(error)) from None
        self._checked.add(node)

    def check_processes(self, node: Node, processes: int) -> None:
        """Raise ConfigError for a node that cannot be the work of this many processes."""
        stage = stages.stage(node.stage)
        if processes > 1 and not stage.spread:
            spread = ", ".join(s for s in stages.available() if stages.stage(s).spread)
            raise ConfigError(
                f"{node.stage} is the work of one process; got {processes}. Several can do {spread}"
            )
        work = self.work(node)
        # With another teacher, a table that asks for too much is refused where it is asked for (`node`), and
        # no other.
        if (why := work.refused or (work.beyond if self.teacher is None else None)) is not None:
            raise ConfigError(why)
        if work.sequences and work.sequences % processes:
            possible = ", ".join(str(n) for n in range(1, work.sequences + 1) if work.sequences % n == 0)
            raise ConfigError(
                f"scale {self.scale!r}: a step of {node.stage} has batch_size x accumulate = {work.sequences}"
                f" sequences, which {processes} processes cannot share evenly; possible: {possible}"
            )

    def gpus(self, stage: str) -> int:
        """The number of GPUs that a stage uses; 0 on a CPU."""
        hardware = self.config.hardware
        if (self.device or hardware.device) != "cuda" or not stages.stage(stage).device:
            return 0
        return hardware.gpus if stages.stage(stage).spread else 1

    # --- the command line ---

    def node_options(self) -> str:
        """This plan as options of a node's verb, without the teacher, which the node's name has."""
        return replace(self, teacher=None).as_options()

    def as_options(self) -> str:
        """This plan as options of `relinear`'s verbs."""
        given = {
            "scale": self.scale,
            "budget": self.budget,
            "seed": self.seed,
            "seeds": self.seeds,
            "teacher": self.teacher,
            "device": self.device,
            "results": self.results,
        }
        return " ".join(f"--{k} {shlex.quote(str(v))}" for k, v in given.items() if v is not None)


def from_cli(config: dict[str, Any], workflow: Path = WORKFLOW) -> Plan:
    """The plan of `snakemake --config`. Raises ConfigError for an unknown key or a value of the wrong
    kind."""
    unknown = sorted(str(name) for name in set(config) - set(CHOICES))
    if unknown:
        raise ConfigError(f"unknown --config {', '.join(unknown)}; possible: {', '.join(CHOICES)}")
    given = {}
    for name, value in config.items():
        try:
            given[name] = CHOICES[name](str(value))
        except (TypeError, ValueError):
            raise ConfigError(f"--config {name} must be {CHOICES[name].__name__}; got {value!r}") from None
    return Plan(**given, workflow=workflow)
