"""What a run is made of, as far as a paper's claim may ask it: its method's options, and the settings of its
steps that make another method of it.

A paper.yaml says in `forms` what its own runs have, a spec in `forms` in what a row differs by purpose. A
claim of a paper whose run has another form is not judged. Rates, batches and doses are no form: a dose is a
claim's own field. The form of a run that was measured is that of its records, of one that was not that of its
plan.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import create_model

from relinear import attention, records, stages
from relinear.core import store
from relinear.plan.finite import parse
from relinear.plan.measured import Measured
from relinear.plan.names import digest
from relinear.plan.options import KEEP, method_file, schema
from relinear.plan.strict import ConfigError, Strict

# settings of recipes; `loss` is the transfer's
OF_STEPS = ("loss", "kind", "train_method", "lora_rank", "lora_targets")
SEQUENCES = "seq_len"  # that of every step
LACKING = "lacking"  # of a form: steps whose records are not here
PARAMETERS = "parameters"  # of a form: those of the model that the run begins with, None where not known
# for reading; others by their names
WORDS = {"seq_len": "sequences of", "kind": "trained weights", "loss": "transfer by"}

Form = Mapping[str, Any]


def possible(method: str | None = None) -> list[str]:
    """The names that a form may have: of one method, or of any."""
    methods = [method] if method else attention.available()
    options = [name for each in methods for name in schema(method_file(each)).model_fields]
    return list(dict.fromkeys([*options, KEEP, *OF_STEPS, SEQUENCES]))


def check_form(form: Form, where: str, method: str | None = None) -> None:
    """Raises ConfigError for a form that no run can have: a method, a setting or a value that there is not.
    Without a method the form is some method's."""
    if method is not None and method not in attention.available():
        raise ConfigError(f"{where}: no method {method!r}; have {', '.join(attention.available())}")
    have = possible(method)
    if unknown := [name for name in form if name not in have]:
        raise ConfigError(f"{where}: no setting {unknown[0]!r}; possible: {', '.join(have)}")
    given = {name: value for name, value in form.items() if value is not None}
    # a step without a recipe has no options
    steps = [getattr(stages.stage(step), "Options", Strict) for step in stages.training()]
    for name in given.keys() & {*OF_STEPS, SEQUENCES}:
        _check_values(next(step for step in steps if name in step.model_fields), {name: given[name]}, where)
    own = {name: value for name, value in given.items() if name not in (KEEP, *OF_STEPS, SEQUENCES)}
    options = [schema(method_file(name)) for name in ([method] if method else attention.available())]
    able = [each for each in options if own.keys() <= each.model_fields.keys()]
    refused: list[str] = []
    for each in able:
        try:
            return _check_values(each, own, where)
        except ConfigError as error:
            refused.append(str(error))
    raise ConfigError("\n".join(dict.fromkeys(refused)) or f"{where}: no method has all of {', '.join(own)}")


def _check_values(options: type[Strict], given: Form, where: str) -> None:
    """Raises ConfigError for values of settings that these options refuse, each by itself: what a form leaves
    out is free."""
    fields = {name: (options.model_fields[name].annotation, options.model_fields[name]) for name in given}
    parse(create_model(options.__name__, __base__=Strict, **fields), dict(given), where)


def form_of(found: Measured) -> dict[str, Any]:
    """The form of a measured run, as its records and those of its steps have it: `method`, its options with
    their defaults, and the settings of the steps behind the measurement. `seq_len` is a list, of a length a
    step. `lacking` names steps whose records are not here. `parameters`: those of the model that the run
    begins with, or None. Raises BrokenError for a record that cannot be believed."""
    record = records.read(found.folder) or {}
    config = record.get("config", {})
    steps, lacking = steps_behind(found)
    form = form_with(
        config.get("method", "softmax"), config.get("options", {}), (step["config"] for step in steps)
    )
    return form | {LACKING: lacking, PARAMETERS: _parameters(found, record)}


def form_with(method: str, options: Form, steps: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The form of a method with its options and with the settings of its training steps."""
    given = dict(options)
    form: dict[str, Any] = {"method": method, KEEP: given.pop(KEEP, None)}
    form |= schema(method_file(method)).model_validate(given).model_dump(mode="json")
    lengths: list[int] = []
    for step in steps:
        recipe, budget = step.get("recipe", {}), step.get("budget", {})
        form |= {name: recipe[name] for name in OF_STEPS if name in recipe}
        lengths += [budget["seq_len"]] if "seq_len" in budget else []
    return form | {SEQUENCES: lengths}


def _parameters(found: Measured, record: Mapping[str, Any]) -> int | None:
    """How many parameters the model of a run has, from the record of the stage that read it; None where that
    does not lie beside the measurement."""
    if (model := record.get("parents", {}).get("model")) is None:
        return None
    metrics = found.folder.parents[2] / records.place(model["path"]) / store.METRICS
    return records.read_json(metrics).get("parameters") if store.exists(metrics) else None


def steps_behind(found: Measured) -> tuple[list[dict[str, Any]], list[str]]:
    """The records of the training steps behind a measurement, and the steps whose records do not lie beside
    it."""
    steps = told_behind(found)
    return [step for _, step in steps if step], [
        f"{place.parts[1]} {place.name}"
        for told, step in steps
        if not step
        for place in [records.place(told["path"])]
    ]


def told_behind(found: Measured) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    """What the record of a measurement says of each training step behind it, and the step's record that lies
    beside it, which may be of a later training; None where none does."""
    record = records.read(found.folder) or {}
    told = [(parent, records.place(parent["path"])) for parent in record.get("parents", {}).values()]
    return [
        (parent, records.read(found.folder.parents[2] / place))
        for parent, place in told
        if place.parts[0] == "runs" and place.name in stages.training()
    ]


def contents(record: dict[str, Any]) -> str:
    """One hash over the sha256 of every file that a stage made. Its history is left out, since that has
    times."""
    return digest(
        {name: entry["sha256"] for name, entry in record["artefacts"].items() if name != "history.jsonl"}
    )


def forms_of(measured: Mapping[tuple[str, str], Measured | None]) -> dict[str, Form]:
    """Run -> its form, from that of its measurements which has most steps behind it."""
    found: dict[str, Form] = {}
    for (run, _), each in measured.items():
        if each is not None and store.has(Path(each.folder)):
            form = form_of(each)
            if run not in found or len(form[SEQUENCES]) > len(found[run][SEQUENCES]):
                found[run] = form
    return found


def differences(form: Form, asked: Form) -> list[str]:
    """In what a run's form is another than what is asked, or is not known, in words."""
    if asked and form.get(LACKING):
        return [f"not known: the record of {', '.join(form[LACKING])} is missing"]
    return [
        f"{WORDS.get(name, name)} {_word(got)} where the paper has {_word(asked[name])}"
        for name, got in _differing(form, asked)
    ]


def _differing(form: Form, asked: Form) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, wanted in asked.items():
        if wanted is None:
            continue
        if name == SEQUENCES:
            found += [
                (name, length)
                for length in sorted({length for length in form[SEQUENCES] if length != wanted})
            ]
        elif form.get(name) != wanted:
            found.append((name, form.get(name)))
    return found


def _word(value: Any) -> str:
    return (
        "none"
        if value is None
        else ", ".join(map(str, value))
        if isinstance(value, list | tuple)
        else str(value)
    )
