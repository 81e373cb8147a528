"""The catalogue of runs: models.yaml, data.yaml, measures.yaml and every paper's runs.yaml, typed and
checked. Imports neither torch nor transformers."""

import itertools
import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from relinear import attention, families, stages
from relinear.plan.entries import Data, Measure, Model, Run, one_of
from relinear.plan.finite import parse
from relinear.plan.names import SEED
from relinear.plan.near import possible
from relinear.plan.options import (
    KEEP,
    SourceError,
    adds_parameters,
    check_names,
    check_values,
    method_file,
    part_names,
    schema,
    transfers,
)
from relinear.plan.sane import read_yaml
from relinear.plan.strict import WORKFLOW, ConfigError, Strict

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
DOSE = re.compile(r"-x[\d.e+-]+$")
MEASURE = re.compile(r"[A-Za-z0-9][\w-]*")  # a folder in a run's, and a word of a pattern
FIELD = re.compile(r"\{(\w+)\}")
LARGEST_SWEEP = 1000  # runs of one entry


def read_models(workflow: Path = WORKFLOW) -> dict[str, Model]:
    """The models of workflow/models.yaml by name. Raises ConfigError."""
    models = {
        name: parse(Model, entry, f"models.yaml: {name}")
        for name, entry in read_yaml(workflow / "models.yaml").items()
    }
    for name, model in models.items():
        _name("models.yaml", name)
        if SEED.search(name) or DOSE.search(name):
            raise ConfigError(
                f"models.yaml: {name!r} ends as names of runs with another seed or texts of another dose do;"
                " rename it"
            )
        for family in (model.family, model.layout or model.family):
            one_of(f"family of models.yaml: {name},", family, families.available())
        if model.init == "pretrained" and not model.assets:
            raise ConfigError(
                f"models.yaml: {name}: a pretrained model needs assets; without, say init: random"
            )
    return models


def read_data(workflow: Path = WORKFLOW) -> dict[str, Data]:
    """The data sets of workflow/data.yaml by name. Raises ConfigError."""
    found = {}
    for name, entry in read_yaml(workflow / "data.yaml").items():
        _name("data.yaml", name)
        if not isinstance(entry, dict) or "make" not in entry:
            raise ConfigError(
                f"data.yaml: {name}: needs `make`, one of {', '.join(stages.makers())}; got {entry!r}"
            )
        make = one_of("kind of data", entry["make"], stages.makers())
        options = parse(
            stages.data_options(make), {k: v for k, v in entry.items() if k != "make"}, f"data.yaml: {name}"
        )
        found[name] = Data(make=make, options=options.model_dump(mode="json"))
    return found


def read_measures(metrics: list[str], data: dict[str, Data], workflow: Path = WORKFLOW) -> dict[str, Measure]:
    """The measures of measures.yaml, and every metric that it does not name as one with the metric's own
    defaults."""
    measures = {
        name: parse(Measure, entry, f"measures.yaml: {name}")
        for name, entry in read_yaml(workflow / "measures.yaml").items()
    }
    measures |= {metric: Measure(metric=metric) for metric in metrics if metric not in measures}
    folder = Path(__file__).parents[1] / "measure"
    parts = list(
        dict.fromkeys(part for method in attention.available() for part in part_names(method_file(method)))
    )
    for name, measure in measures.items():
        _name("measures.yaml", name)
        if not MEASURE.fullmatch(name):
            raise ConfigError(
                f"measures.yaml: the name of a measure is of letters, digits, _ and -; got {name!r}"
            )
        if name in stages.available():
            raise ConfigError(f"measures.yaml: {name!r} is the name of a stage; rename it")
        one_of(f"metric of measure {name!r},", measure.metric, metrics)
        if measure.data is not None:
            one_of(f"data of measure {name!r},", measure.data, data)
        if measure.before is not None:
            one_of(f"training stage, which measure {name!r} is `before`,", measure.before, stages.training())
        for part in measure.without:
            one_of(f"part of a method, which measure {name!r} is `without`,", part, parts)
        with suppress(SourceError):  # a metric's own fault, which is told where the metric is asked for
            check_values(
                folder / f"{measure.metric}.py",
                measure.options,
                f"measures.yaml: {name}: options",
                partial=True,
            )
    return measures


def read_runs(models: dict[str, Model], workflow: Path = WORKFLOW) -> dict[str, Run]:
    """All runs of all papers, sweeps expanded. Raises ConfigError for a name that two entries have, and for
    names of things that do not exist."""
    runs: dict[str, Run] = {}
    for path in sorted((workflow / "papers").glob("*/runs.yaml")):
        where = f"{path.parent.name}/runs.yaml"
        for entry, data in read_yaml(path).items():
            if not isinstance(entry, str):
                raise ConfigError(f"{where}: a name is of letters, digits and . _ + -; got {entry!r}")
            for name, run in expand(entry, parse(Run, data, f"{where}: {entry}"), where).items():
                if name in runs:
                    raise ConfigError(
                        f"{where}: {entry}: there is a run {name!r} already; names are shared by all papers"
                    )
                _name(where, name)
                if SEED.search(name):
                    raise ConfigError(
                        f"{where}: {name!r} is the name of another run's training with another seed;"
                        " rename it"
                    )
                runs[name] = run
                _check_run(f"{where}: {name}", run, models)
    for name, run in runs.items():
        _check_after(name, run, runs)
    runs = {name: _continued(run, runs) for name, run in runs.items()}
    for name, run in runs.items():
        _check_method(name, run, runs)
    return runs


def expand(name: str, run: Run, where: str) -> dict[str, Run]:
    """The runs of a sweep; an entry without `over` is its own only run. Raises ConfigError where two have one
    name."""
    fields = set(FIELD.findall(name))
    if fields != set(run.over):
        raise ConfigError(
            f"{where}: {name}: the name has the fields {sorted(fields) or 'none'}, `over` has"
            f" {sorted(run.over) or 'none'}; give the same"
        )
    if empty := [field for field, values in run.over.items() if not values]:
        raise ConfigError(f"{where}: {name}: over: {empty[0]} has no values; give at least one")
    settings, found = run.model_dump(exclude={"over"}, exclude_unset=True), {}
    if unknown := [field for field in _fields(settings) if field not in fields]:
        raise ConfigError(
            f"{where}: {name}: no field {{{unknown[0]}}} in `over`; have"
            f" {', '.join(sorted(fields)) or 'none'}"
        )
    if not fields:
        return {name: run}
    if (count := math.prod(map(len, run.over.values()))) > LARGEST_SWEEP:
        raise ConfigError(f"{where}: {name}: `over` makes {count} runs; possible: {LARGEST_SWEEP} at most")
    for values in itertools.product(*run.over.values()):
        chosen = dict(zip(run.over, values, strict=True))
        own = filled(name, chosen)
        if own in found:
            raise ConfigError(f"{where}: {name}: two of its runs are called {own!r}")
        found[own] = parse(Run, filled(settings, chosen), f"{where}: {own}")
    return found


def filled(value: Any, chosen: dict[str, Any]) -> Any:
    """A setting with each {field} replaced: by the value itself where nothing stands beside it, else as
    text."""
    if isinstance(value, dict):
        return {k: filled(v, chosen) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [filled(v, chosen) for v in value]
    if not isinstance(value, str):
        return value
    if (alone := FIELD.fullmatch(value)) and alone[1] in chosen:
        return chosen[alone[1]]
    return FIELD.sub(lambda m: str(chosen.get(m[1], m[0])), value)


def _fields(value: Any) -> list[str]:
    """Names of all {fields} in a setting."""
    if isinstance(value, dict | list | tuple):
        return [
            field
            for part in (value.values() if isinstance(value, dict) else value)
            for field in _fields(part)
        ]
    return FIELD.findall(value) if isinstance(value, str) else []


def _name(where: str, name: str) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(f"{where}: a name is of letters, digits and . _ + -; got {name!r}")


def _check_run(where: str, run: Run, models: dict[str, Model]) -> None:
    one_of(f"model of {where},", run.model, models)
    if run.method not in attention.available():
        raise ConfigError(
            f"{where}: no attention method {run.method!r}; have {', '.join(attention.available())}"
        )
    check_names(method_file(run.method), run.own, f"{where}: options", also=(KEEP,))
    check_values(method_file(run.method), run.own, f"{where}: options")
    _check_kept(run.options.get(KEEP), f"{where}: options.{KEEP}")
    if any(len(step) != 1 for step in run.steps) or len(run.recipes) != len(run.steps):
        raise ConfigError(
            f"{where}: steps are a list of one stage each, a stage once; got"
            f" {[list(step) for step in run.steps]}"
        )
    for stage, settings in run.recipes.items():
        one_of(f"training stage of {where},", stage, stages.training())
        parse(stages.load(stage).Options, settings, f"{where}: {stage}")
    if run.method == "softmax" and run.options:
        raise ConfigError(
            f"{where}: options {run.options} are of a method, and softmax attention has none; name the"
            " method, or leave them out"
        )


def _check_kept(keep: Any, where: str) -> None:
    """Raises ConfigError for a value that names no layers of any model. The number of a model's layers is
    known only once it is there."""
    [(end, ratio)] = keep.items() if isinstance(keep, dict) and len(keep) == 1 else [(None, keep)]
    share = (
        isinstance(ratio, int | float)
        and not isinstance(ratio, bool)
        and 0 <= ratio < 1
        and end in (None, "first", "last")
    )
    layers = isinstance(keep, list) and all(type(layer) is int and layer >= 0 for layer in keep)
    if not (keep is None or share or layers):
        raise ConfigError(
            f"{where} must be a ratio in [0, 1), such a ratio at one end as {{first: 0.5}} or {{last: 0.5}},"
            f" or a list of layers, numbered from 0; got {keep!r}"
        )


def _check_after(name: str, run: Run, runs: dict[str, Run]) -> None:
    seen = [name]
    while run.after is not None:
        base, _, step = run.after.partition("/")
        if base not in runs:
            raise ConfigError(
                f"run {seen[-1]!r} comes after {base!r}, which is no run; {possible(base, runs)}"
            )
        if step and step not in runs[base].recipes:
            have = ", ".join(runs[base].recipes) or "none"
            raise ConfigError(
                f"run {seen[-1]!r} comes after {run.after!r}, but {base!r} has no step {step!r}; it has"
                f" {have}"
            )
        for condition, who in (("if_random", "a pretrained model"), ("if_altered", "a whole model")):
            if step and runs[base].recipes[step].get(condition):
                raise ConfigError(
                    f"run {seen[-1]!r} comes after {run.after!r}, a step that {who} leaves out;"
                    f" possible: after {base!r}"
                )
        if runs[base].model != run.model:
            raise ConfigError(
                f"run {seen[-1]!r} has the model {run.model!r}, but comes after {base!r} of"
                f" {runs[base].model!r}"
            )
        if base in seen:
            raise ConfigError(f"runs come after each other in a circle: {' -> '.join([*seen, base])}")
        seen.append(base)
        run = runs[base]


def _check_method(name: str, run: Run, runs: dict[str, Run]) -> None:
    """Raises ConfigError where a run's method is not the one that its model has already, or has no parameters
    for a step to train."""
    base = run.after and run.after.partition("/")[0]
    if base and runs[base].method not in ("softmax", run.method):
        raise ConfigError(
            f"run {name!r} has the method {run.method!r}, but comes after {base!r} of {runs[base].method!r},"
            " and a model is linearized once; leave out the method, or come after one of softmax attention"
        )
    if base and runs[base].method == run.method and _chosen(runs[base]) != _chosen(run):
        ours, theirs = (one.options or "none" for one in (run, runs[base]))
        raise ConfigError(
            f"run {name!r} has the options {ours} of {run.method!r}, but comes after {base!r} with {theirs},"
            " and a model is linearized once; give the same, or leave out method and options"
        )
    finetune = run.recipes.get("finetune", {})
    asks = {
        "distill": "distill" in run.recipes,
        "finetune with kind: method": finetune.get("kind") == "method",
        "finetune with train_method: true": finetune.get("train_method", False),
    }
    asked = [said for said, wanted in asks.items() if wanted]
    if asked and not adds_parameters(method_file(run.method)):
        able = ", ".join(method for method in attention.available() if adds_parameters(method_file(method)))
        raise ConfigError(
            f"run {name!r}: {asked[0]} trains what a method adds, and {run.method!r} adds nothing to distill"
            f" or to train; possible: a method that does, {able}, or other steps"
        )
    loss, able = run.recipes.get("distill", {}).get("loss"), transfers(method_file(run.method))
    if loss is not None and loss not in able:
        raise ConfigError(
            f"run {name!r}: distill has loss {loss!r}, and weights of {run.method!r} have either sign, which"
            f" softmax's have not; possible: {', '.join(able)}"
        )


def _chosen(run: Run) -> tuple[Strict, Any]:
    """A run's options with the defaults of those that it does not give."""
    return schema(method_file(run.method)).model_validate(run.own), run.options.get(KEEP)


def _continued(run: Run, runs: dict[str, Run]) -> Run:
    """A run with the method and options of the run that it comes after, where it names no method."""
    if run.after is None or "method" in run.model_fields_set:
        return run
    base = _continued(runs[run.after.partition("/")[0]], runs)
    return run.model_copy(update={"method": base.method, "options": base.options})
