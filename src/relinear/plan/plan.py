"""The plan: for every node its settings, its parents, its folder and its key. Rules and stages both read it, so that they agree.

A key is a hash over the settings, the code that the work reaches and the parents' keys; it changes exactly when the result could. Whatever
changes a key changes a folder: a budget and a seed end the name of the scale's folder, another model and another training seed end a run's.
Imports neither torch nor transformers.
"""

import functools
import os
import shlex
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from relinear import records, stages
from relinear.files import sha256
from relinear.plan import assets, catalogue
from relinear.plan.catalogue import Data, Measure, Model, Run, one_of
from relinear.plan.code import METHODS, PACKAGES, code_hash
from relinear.plan.names import DERIVED, TEXT, LinkNodes, Resolved, Text, digest, short
from relinear.plan.options import SourceError, check_values, metric_yields
from relinear.plan.sane import read_settings
from relinear.plan.scale import Scale, multiple, read_scale, scales, whole_tokens
from relinear.plan.specs import Artefact, available
from relinear.plan.strict import WORKFLOW, ConfigError
from relinear.plan.tables import Address, Table
from relinear.stages._stage import Node

CHOICES = {"scale": str, "budget": float, "seed": int, "seeds": int, "teacher": str, "device": str}
FURTHEST_SEED = 1000  # the largest number of a run's training seed, counted from the plan's seed
# The bounds of choices: beyond them numbers overflow, generators refuse a seed, or planning alone takes minutes.
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


def metric_file(metric: str) -> Path:
    """The file of a metric."""
    return PACKAGES["relinear"] / "measure" / f"{metric}.py"


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

    def stand_in(self, kind: str, name: str) -> str:
        """The model or data that this scale takes for a name. Raises ConfigError where there is none of that name."""
        have = getattr(self, kind)
        one_of(kind, name, have)
        return one_of(f"stand-in ({kind}) of scale {self.scale!r},", getattr(self.config.stand_ins, kind).get(name, name), have)

    def run(self, name: str) -> Resolved:
        """A run by its name: `lizard`, `lizard@mistral-7b` (of another model), `lizard-seed1` (trained with another seed), or both."""
        return self._resolved.setdefault(name, None) or self._resolve(name)

    @functools.cached_property
    def _resolved(self) -> dict[str, Resolved | None]:
        return {}

    def _resolve(self, name: str) -> Resolved:
        base, model, seed = self._parts(name)
        begins = self.stand_in("models", model or self.runs[base].model)
        found = self._resolved[name] = Resolved(name, self.runs[base].of(self.models[begins]), begins, seed)
        return found

    def _parts(self, name: str) -> tuple[str, str | None, int]:
        """The entry of runs.yaml, the model and the seed that a run's name says."""
        part = None if name in self.runs else DERIVED.fullmatch(name)
        base = name if part is None else part["base"]
        one_of("run", base, self.runs)
        if part and part["seed"] and (len(part["seed"]) > 4 or int(part["seed"]) > FURTHEST_SEED):
            raise ConfigError(f"no run {name!r}: trainings with other seeds end in -seed1 to -seed{FURTHEST_SEED}")
        return (base, part["model"], int(part["seed"] or 0)) if part else (base, None, 0)

    def name(self, run: str) -> str:
        """A run's name in folders: without a model that the scale takes for it anyway, and with the teacher that `--config teacher=` chose for it."""
        base, model, seed = self._parts(run)
        return self._name(base, model or self._teacher_of(base), seed)

    def _teacher_of(self, base: str) -> str | None:
        """The teacher that `--config teacher=` chose, for runs of models of its kind: none of them for an encoder's where it is a decoder, and none
        for a run whose model has the vocabulary of one data set alone."""
        usual = self.models[self.stand_in("models", self.runs[base].model)]
        chosen = self.models[self.stand_in("models", self.teacher)] if self.teacher else usual
        return self.teacher if chosen.causal == usual.causal and usual.data is None else None

    def _name(self, base: str, model: str | None, seed: int) -> str:
        usual = self.stand_in("models", self.runs[base].model)
        other = f"@{model}" if model and self.stand_in("models", model) != usual else ""
        return base + other + (f"-seed{seed}" if seed else "")

    def repeats(self, run: str) -> list[str]:
        """A run's trainings with further seeds, which share its model, texts and items; none for one that is not trained."""
        trained = any(link.steps for link in self.chain(run))
        return [f"{run}-seed{n}" for n in range(1, self.seeds)] if trained else []

    # --- chains ---

    def chain(self, run: str, before: str | None = None) -> list[LinkNodes]:
        """The methods and steps behind a run, from its model on; `before` ends it ahead of that step of the run itself."""
        return self._chain(run, self._steps(run, before))

    def _steps(self, run: str, before: str | None) -> list[str]:
        steps = list(self.run(run).run.recipes)
        return steps[: steps.index(before)] if before in steps else steps

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
            links = [link for link in links if link.steps or link.method != "softmax"] + [LinkNodes(run.method, run.options, own)]
        return links

    def like(self, base: str, name: str) -> str:
        """The name of the run `base` with the model and the seed that end the run's name `name`."""
        return base + name.removeprefix(self._parts(name)[0])

    def _ahead(self, node: Node) -> list[LinkNodes]:
        """The chain that a step or a measurement of a run begins with."""
        before = node.stage if stages.stage(node.stage).trains else self.measures[node.part].before
        return self.chain(node.name, before)

    def _roles(self, node: Node) -> dict[Node, str]:
        """Role of each trained step ahead of a node: the stage for the run's own, `run/stage` for another run's."""
        return {n: n.stage if n.name == node.name else f"{n.name}/{n.stage}" for link in self._ahead(node) for n in link.steps}

    def links_of(self, node: Node) -> list[dict[str, Any]]:
        """The chain ahead of a node as plain data, its steps as roles of the node's parents."""
        roles = self._roles(node)
        return [{"method": m, "options": o, "steps": [roles[n] for n in steps]} for m, o, steps in self._ahead(node)]

    def trained_before(self, node: Node) -> dict[str, Node]:
        """The trained steps that a node builds on, by role."""
        return {role: n for n, role in self._roles(node).items()}

    # --- nodes ---

    @property
    def root(self) -> Path:
        """The scale's folder; another budget and another seed have folders of their own."""
        return self.results / (self.scale + (f"-x{short(self.budget)}" if self.budget != 1 else "") + (f"-seed{self.seed}" if self.seed else ""))

    @property
    def store(self) -> str:
        """The place where MLflow mirrors all scales: one SQLite file beside them, or the server that MLFLOW_TRACKING_URI names."""
        return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(self.results / 'mlflow.db').resolve()}"

    def node(self, stage: str, name: str, part: str = "") -> Node:
        """A checked node, by its name in folders. Raises ConfigError for an unknown stage, name or measure, a step that a run does not have, and a
        measurement of lengths that its model cannot read."""
        one_of("stage", stage, stages.available())
        if stage == "measure" or stages.stage(stage).trains:
            if (called := self._name(*self._parts(name))) != name:
                raise ConfigError(f"no run {name!r} at scale {self.scale!r}: it is {called!r}")
            if stage == "measure":
                one_of("measure", part, self.measures)
                stages.stage("measure").check_reach(self, Node(stage, name, part))
            elif stage not in self.run(name).run.recipes:
                have = ", ".join(r for r, run in self.runs.items() if stage in run.recipes)
                raise ConfigError(f"run {name!r} has no step {stage!r}; runs that do: {have}")
        elif stage == "asset":
            one_of("asset", name, self.catalogue)
        elif stage == "model":
            one_of("model", name, self.models)
        elif stage not in stages.texts() and stage in stages.makers():
            one_of(f"data of kind {stage!r},", name, [data for data, found in self.data.items() if found.make == stage])
        else:
            self.text_of(Node(stage, name))
        return Node(stage, name, part)

    def model_of(self, run: str) -> Node:
        """The node of the model that a run begins with."""
        return Node("model", self.run(run).model)

    def text(self, data: str, model: str, dose: float = 1.0) -> Node:
        """The node of the tokens that stand in for a data set at this scale. Raises ConfigError for data that are no tokens."""
        name = self.data_for(data, model)
        if (made := self.data[name].make) in stages.texts() or made not in stages.available():
            return Node(made, str(Text(self._is_text(name), model, dose)))
        if dose != 1:
            raise ConfigError(f"data {name!r} have a size of their own, and a dose is of texts; got {dose:g}")
        return Node(made, name)

    def data_for(self, data: str, model: str) -> str:
        """The data set that stands in for another at this scale; where a model has the vocabulary of one data set alone, that one for any text."""
        name, own = self.stand_in("data", data), self.models[model].data
        return name if own is None or self.data[name].make == "items" else one_of(f"data of model {model!r},", own, self.data)

    def sequence(self, data: str) -> int | None:
        """Tokens of each sequence of a data set; None of one that is cut into sequences of any length."""
        found = self.data[data]
        return stages.stage(found.make).sequence(found.options) if found.make in stages.available() else None

    def sees(self, model: str) -> bool:
        """Whether a model reads pictures: its one data set is of these."""
        own = self.models[model].data
        return own in self.data and stages.makes(self.data[own].make, "pictures")

    def labelled(self) -> list[str]:
        """The data sets whose texts have labels."""
        return [name for name, found in self.data.items() if stages.makes(found.make, "labelled")]

    def _is_text(self, data: str, kind: str | None = None) -> str:
        kinds = (kind,) if kind else stages.texts()
        if self.data[data].make not in kinds:
            raise ConfigError(f"data {data!r} is no {kind or 'text'}; have {', '.join(n for n, d in self.data.items() if d.make in kinds)}")
        return data

    def text_of(self, node: Node) -> Text:
        """Data, model and dose of a text node, or of one that is named after a text."""
        part = TEXT.fullmatch(node.name)
        if part is None:
            raise ConfigError(f"no text {node.name!r}; a text is <data>@<model>, with -x<dose> where the dose is not 1")
        one_of("data", part["data"], self.data), one_of("model", part["model"], self.models)
        try:
            kind = node.stage if node.stage in stages.texts() else "text"
            text = Text(self._is_text(part["data"], kind), part["model"], float(part["dose"] or 1))
        except ValueError as error:
            raise ConfigError(f"no text {node.name!r}: {error}") from None
        if str(text) != node.name:
            raise ConfigError(f"no text {node.name!r}: it is {str(text)!r}")
        return text

    def activations(self, text: Node) -> Node:
        """The node of a text's kept activations."""
        return Node("activations", text.name)

    def measured(self, run: str, measure: str) -> Node:
        """The node of a run's measurement, by the run's name in folders.

        A measure before a step that the run does not have is the same one at the run's end.
        """
        name, wanted = self.name(run), self.measures[one_of("measure", measure, self.measures)]
        if wanted.before is not None and wanted.before not in self.run(name).run.recipes:
            at_end = wanted.model_copy(update={"before": None})
            measure = next((other for other, m in self.measures.items() if m == at_end), measure)
        return Node("measure", name, measure)

    def train_tokens(self, dose: float, own: int | None = None) -> int:
        """Unique training tokens of a dose: of the scale's, or of a data set's `own`, which the budget multiplies, too."""
        tokens = self.config.text.train_tokens if own is None else own * self.budget
        return multiple(tokens * dose, whole_tokens(self.config))

    def method_modules(self, run: str) -> list[str]:
        """The modules that are found by name when a run's model is built: its methods, and the family that says where attention lies."""
        model = self.models[self.run(run).model]
        methods = dict.fromkeys(link.method for link in self.chain(run))
        return [f"relinear.families.{model.layout or model.family}", *(f"{METHODS}{method}" for method in methods)]

    def kept(self, model: str, sampling: dict[str, Any]) -> dict[str, str]:
        """Batches of instructions in `workflow` that a model wrote with this sampling and seed: path -> sha256."""
        folder = self.workflow / "instructions" / model
        if not folder.is_dir():
            return {}
        about = read_settings(folder / "about.yaml")
        sources = {name: self.catalogue[name].sha256 for name in self.models[model].assets}
        ours = {"teacher": sources, "sampling": {k: v for k, v in sampling.items() if k != "tokens"}, "seed": self.seed}
        if ours != {name: about.get(name) for name in ours}:
            return {}
        return {p.relative_to(self.workflow).as_posix(): sha256(p) for p in sorted(folder.glob("*.json.xz"))}

    def folder(self, node: Node) -> Path:
        """Where a node's results lie."""
        return self.root / stages.stage(node.stage).folder(node)

    def settings(self, node: Node) -> dict[str, Any]:
        """The settings of a node's work, and the assets it reads: plain data, part of the key."""
        stage = stages.stage(node.stage)
        names = stage.assets(self, node)
        for name in names:
            one_of("asset", name, self.catalogue)
        return stage.settings(self, node) | {"assets": {n: digest(self.catalogue[n].identity) for n in names}}

    def parents(self, node: Node) -> dict[str, Node]:
        """The nodes that a node reads, by role."""
        return stages.stage(node.stage).parents(self, node)

    def modules(self, node: Node) -> list[str]:
        """Entry points of the code that makes a node's result."""
        return stages.stage(node.stage).modules(self, node)

    def code(self, node: Node) -> str:
        """The hash of the code that makes a node's result."""
        return code_hash(self.modules(node))

    def key(self, node: Node) -> str:
        """The hash of all that a node's result depends on: settings, code, its parents' keys."""
        keys = self.__dict__.setdefault("_keys", {})
        if node not in keys:
            parents = {role: self.key(parent) for role, parent in self.parents(node).items()}
            keys[node] = digest({"stage": node.stage, "settings": self.settings(node), "code": self.code(node), "parents": parents})
        return keys[node]

    def finished(self, node: Node) -> Path | None:
        """The folder of a node whose result is there as this plan would make it; None where it is not, or where its record is broken."""
        folder = self.folder(node)
        record = records.finished(folder)
        return folder if record is not None and record["key"] == self.key(node) else None

    # --- tables and figures ---

    def out(self, artefact: Artefact) -> Path:
        """The folder of a table or figure: another teacher and several seeds have folders of their own."""
        return self.root / (artefact.paper + (f"@{self.teacher}" if self.teacher else "") + (f"-seeds{self.seeds}" if self.seeds > 1 else ""))

    def drawing(self, artefact: Artefact) -> Path:
        """The record of a table or figure: the sha256 of each file that was drawn."""
        return records.drawing(self.out(artefact), artefact.stem)

    def reads(self, artefact: Artefact) -> dict[tuple[str, str], Node]:
        """(run, measure) of every measurement that an artefact shows -> its node. Measures that the scale leaves out, and cells of
        a table that are not defined (`undefined`), are not among them.

        Raises ConfigError, which names the spec, for a run or measure that does not exist.
        """
        found = {}
        for run, measure in artefact.reads(self.scale):
            if measure in self.config.without:
                continue
            try:
                node = self.measured(run, measure)
                if isinstance(artefact.spec, Table) and stages.stage("measure").misfit(self, node):
                    continue
                found[run, measure] = node
                if artefact.seeds and not stages.stage("measure").of_shape(self, measure):
                    found |= {(name, measure): self.measured(name, measure) for name in self.repeats(run)}
            except ConfigError as error:
                raise ConfigError(f"{artefact.path}: {error}") from None
        return found

    def undefined(self, artefact: Artefact) -> dict[tuple[str, str], str]:
        """(run, measure) of the cells of a table that no measurement can fill -> why: a row's method lacks what the column's measure is of."""
        if not isinstance(artefact.spec, Table):
            return {}
        nodes = {(run, measure): self.measured(run, measure) for run, measure in artefact.reads(self.scale)}
        return {address: why for address, node in nodes.items() if (why := stages.stage("measure").misfit(self, node))}

    def files(self, artefact: Artefact) -> list[str]:
        """The other inputs of an artefact: as measured on this machine where they were, else as they are committed."""
        found = []
        for file in artefact.files():
            own, committed = Path(file), Path(file.replace("results/", "results/reference/", 1))
            found.append((committed if committed.is_file() and not own.is_file() else own).as_posix())
        return found

    def drawn_by(self, artefact: Artefact) -> str:
        """Hash of the code that draws an artefact, the file beside its spec included."""
        return digest([code_hash(artefact.modules), artefact.script and sha256(artefact.script)])

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
        """Raise ConfigError for all mistakes that can be found before any work starts, a line each: in the choices, in every table and figure, and in
        every step of every run."""
        self.check_choices()
        checks = [partial(self.check_artefact, artefact) for artefact in self.artefacts.values()]
        checks += [partial(self.check_node, Node(step, name)) for name in map(self.name, self.runs) for step in self.run(name).run.recipes]
        faults: dict[str, None] = {}
        for check in checks:
            try:
                check()
            except ConfigError as error:
                faults[str(error)] = None
        if faults:
            raise ConfigError("\n".join(faults))

    def check_choices(self) -> None:
        """Raise ConfigError for choices and settings that are wrong whatever is asked for."""
        for name, (least, most, what) in BOUNDS.items():
            if not least <= (given := getattr(self, name)) <= most:
                raise ConfigError(f"{name}, {what}, must be at least {least:g} and at most {most}; got {str(given)[:40]}")
        if self.device not in (None, "cpu", "cuda"):
            raise ConfigError(f"device must be cpu or cuda; got {self.device!r}")
        if self.teacher is not None:
            self.stand_in("models", self.teacher)
        self.catalogue, stages.load("measure").check_tasks(self.workflow)  # all of them, also those that this scale does not read
        for kind in ("models", "data"):
            for name in getattr(self.config.stand_ins, kind):
                self.stand_in(kind, name)
        for measure in self.config.without:
            one_of(f"measure that scale {self.scale!r} leaves out,", measure, self.measures)
        for metric, options in self.config.measures.items():
            one_of(f"metric of scale {self.scale!r},", metric, metrics())
            with suppress(SourceError):  # a metric's own fault, which is told where the metric is asked for
                check_values(metric_file(metric), options, f"scales/{self.scale}.yaml: measures: {metric}", partial=True)

    def check_artefact(self, artefact: Artefact) -> None:
        """Raise ConfigError for a mistake in a table or figure, or in anything that stands behind it."""
        for scale in artefact.not_at:
            one_of(f"scale that {artefact.path} is `not_at`,", scale, scales(self.workflow))
        nodes = self.reads(artefact)
        for measure, metric in artefact.spec.named():
            source = self.measures[one_of(f"measure of {artefact.path},", measure, self.measures)].metric
            one_of(f"reading of measure {measure!r} in {artefact.path},", metric, metric_yields(metric_file(source)))
        self._check_columns(artefact)
        for node in nodes.values():
            self.check_node(node, artefact.path)

    def _check_columns(self, artefact: Artefact) -> None:
        """Raise ConfigError for a column that is not defined in any row."""
        undefined = self.undefined(artefact)
        for column in artefact.spec.columns if undefined else ():
            cells = [line.cells.get(column.name) for line in artefact.spec.lines]
            reasons = [(cell.run, undefined.get((cell.run, cell.measure))) for cell in cells if isinstance(cell, Address)]
            if reasons and self.scale not in column.not_at and all(why for _, why in reasons):
                said = "; ".join(f"{run} has {why}" for run, why in reasons)
                raise ConfigError(f"{artefact.path}: column {column.name!r} is defined in no row: {said}. Possible: another measure, or other rows")

    def check_node(self, node: Node, where: str = "") -> None:
        """Raise ConfigError for a mistake in a node's settings, which `where` asks for, or in those of a node that it is made from."""
        checked = self.__dict__.setdefault("_checked", set())
        if node in checked:
            return
        try:
            parents = self.parents(node)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}" if where else str(error)) from None
        for parent in parents.values():
            self.check_node(parent)
        try:
            self.settings(node)
            self.check_processes(node, max(self.gpus(node.stage), 1))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}" if where else str(error)) from None
        checked.add(node)

    def check_processes(self, node: Node, processes: int) -> None:
        """Raise ConfigError for a node that cannot be the work of this many processes."""
        stage = stages.stage(node.stage)
        if processes > 1 and not stage.spread:
            spread = ", ".join(s for s in stages.available() if stages.stage(s).spread)
            raise ConfigError(f"{node.stage} is the work of one process; got {processes}. Several can do {spread}")
        stage.check(self, node, processes)

    def require_causal(self, node: Node, why: str) -> None:
        """Raises ConfigError where a run's model is an encoder."""
        if not self.models[model := self.run(node.name).model].causal:
            able = ", ".join(name for name, m in self.models.items() if m.causal)
            raise ConfigError(f"{node}: {why}, and {model!r} is an encoder; possible: runs of {able}")

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
        given = {"scale": self.scale, "budget": self.budget, "seed": self.seed, "seeds": self.seeds, "teacher": self.teacher, "device": self.device,
                 "results": self.results}  # fmt: skip
        return " ".join(f"--{k} {shlex.quote(str(v))}" for k, v in given.items() if v is not None)


def from_cli(config: dict[str, Any], workflow: Path = WORKFLOW) -> Plan:
    """The plan of `snakemake --config`. Raises ConfigError for an unknown key or a value of the wrong kind."""
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
