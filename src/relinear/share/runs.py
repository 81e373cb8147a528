"""A run's model for people: every file that its records name is there and is what they say, or nothing is
loaded and the message says why.

Stages need none of this: they are given parents that are finished and verified (`relinear.stage`).
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from relinear import records
from relinear.core import store
from relinear.errors import UserError
from relinear.files import MANIFEST, sha256
from relinear.linearize.assemble import assemble
from relinear.plan.job import Link
from relinear.plan.names import ROOT
from relinear.plan.plan import Plan
from relinear.plan.scale import scales
from relinear.records import BrokenError
from relinear.share.tensors import require_loadable
from relinear.weights import TRAINED

ADAPTER = ("adapter/adapter_config.json", "adapter/adapter_model.safetensors")
# the files that a step must leave
LEAVES = {"distill": ("method.safetensors",), "pretrain": ("model.safetensors",)}
# a finetuning by its kind
FINETUNED = {"lora": ADAPTER, "full": ("model.safetensors",), "method": ("method.safetensors",)}


class Chain(NamedTuple):
    """The parts of a run's model: the folder of the pretrained model, and the links behind it."""

    model: Path
    links: list[Link]

    @property
    def steps(self) -> list[Path]:
        """The folders of the training steps, first to last."""
        return [step for link in self.links for step in link.steps]


def load_run(folder: Path | str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> PreTrainedModel:
    """The model of a run folder (`results/<scale>/runs/<run>`), as far as its steps are finished; weights
    that are not all there raise UserError."""
    return assemble(*chain_of(folder), dtype, device)


def chain_of(folder: Path | str) -> Chain:
    """The parts of a run's model, from the records in its folder, with every file read and checked.

    Raises UserError for a folder that is no run, a record that cannot be believed, a file that is missing or
    another than its record's, weights that are not finite, and tensors that are not those of the model.
    """
    run = Path(folder).resolve()
    scale = run.parent.parent
    model, links = _told(run)
    found = Chain(scale / model, links)
    changed = _changed(scale)
    _require_weights(found.steps, scale, changed)
    found = found._replace(model=_model(scale, model))
    require_loadable(*found)
    return found


def _told(run: Path) -> tuple[str, list[Link]]:
    """The model's folder below the scale's, and the links: as the record says that has the most steps behind
    it."""
    read = {own.name: records.read(own) for own in store.parts(run)}
    chains = []
    for name, record in read.items():
        try:
            chains.append(_chain(run, name, record))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise BrokenError(
                f"{run / name / 'run.json'} does not say what the run's model is made of: {error!r}"
            ) from None
    if not chains:
        raise UserError(
            f"{run} is no run: it has no finished training step or measurement; a run is"
            " results/<scale>/runs/<run>"
        )
    return max(chains, key=lambda chain: sum(len(link.steps) for link in chain[1]))


def _chain(run: Path, name: str, record: dict[str, Any]) -> tuple[str, list[Link]]:
    parents = {role: Path(parent["path"]) for role, parent in record["parents"].items()}
    scale = parents["model"].parents[1]  # by its name and place at that time
    below = {role: path.relative_to(scale) for role, path in parents.items()}
    if any(".." in path.parts for path in below.values()):
        raise ValueError("a parent that lies elsewhere")
    told = record["config"]["links"]
    links = [
        Link(str(x["method"]), dict(x["options"]), tuple(run.parents[1] / below[role] for role in x["steps"]))
        for x in told
    ]
    if not record["measure"]:
        links[-1] = links[-1]._replace(steps=(*links[-1].steps, run / name))
    return below["model"].as_posix(), links


def _changed(scale: Path) -> dict[Path, tuple[str, str]] | None:
    """The files of committed results that differ from the original, each with both sha256, the original's
    first; none for other results."""
    if not (scale / MANIFEST).is_file():
        return None
    manifest = records.read_manifest(scale / MANIFEST)
    try:
        return {
            scale / name: (change["sha256"], manifest["files"][name])
            for name, change in manifest["changed"].items()
        }
    except KeyError as error:
        raise BrokenError(f"{scale / MANIFEST} lacks {error}") from None


def _require_weights(steps: list[Path], scale: Path, changed: dict[Path, tuple[str, str]] | None) -> None:
    """Raises UserError unless each step's folder has all that its record names and a model needs, as it was
    written or as it was committed."""
    read = {step: _step(step) for step in steps}
    for step in reversed(steps):  # the command that makes a step makes those before it
        record = read[step]
        if missing := [name for name in _named(record) if not (step / name).is_file()]:
            if changed is not None:
                raise UserError(
                    f"{step}: its weights are not committed ({', '.join(missing)});"
                    f" {_made_by(step, scale, record)}"
                )
            raise UserError(f"{step / missing[0]} is missing, which its run.json names; {again(record)}")
    for step, record in read.items():
        for name in _named(record):
            original, committed = (changed or {}).get(step / name, ("", ""))
            if original == record["artefacts"][name]["sha256"] and committed == sha256(step / name):
                continue
            if wrong := records.difference(step, record, name):
                raise UserError(f"{wrong}; {again(record)}")


def _step(step: Path) -> dict[str, Any]:
    """The record of a training step. Raises UserError where there is none, or one that does not name what the
    step leaves."""
    record = records.read(step)
    if record is None:
        raise UserError(
            f"{step} has no run.json, but the run's model was trained there; run `relinear {step.name}"
            f" {step.parent.name}` again"
        )
    if lacking := [name for name in _leaves(record) if name not in record["artefacts"]]:
        raise BrokenError(
            f"{step / 'run.json'} names no {', '.join(lacking)}, which this {record['stage']} leaves;"
            f" {again(record)}"
        )
    return record


def _named(record: dict[str, Any]) -> list[str]:
    """The files that a step's model is loaded from."""
    return [name for name in record["artefacts"] if name in {*TRAINED, *ADAPTER}]


def _leaves(record: dict[str, Any]) -> Iterator[str]:
    """The files that a training step of this kind always leaves."""
    yield from LEAVES.get(record["stage"], ())
    recipe = record["config"].get("recipe")
    if record["stage"] == "finetune" and isinstance(recipe, dict):
        yield from FINETUNED.get(recipe.get("kind"), ())


def again(record: dict[str, Any]) -> str:
    """A sentence that says what to do about a folder that differs from its record."""
    if record["scale"] not in scales():  # relinear.own
        return "give the `relinear linearize` command that made it again"
    words = (
        f"measure {record['run']} {record['measure']}"
        if record.get("measure")
        else f"{record['stage']} {record['run']}"
    )
    return f"run `relinear {words} --scale {record['scale']}` again"


def _made_by(step: Path, scale: Path, record: dict[str, Any]) -> str:
    """The way to the weights of a committed step: a command where this version has that run, else the commit
    that made it."""
    run, stage = step.parent.name, step.name
    try:
        Plan(scale=record["scale"]).node(stage, run)
    except UserError:
        commit = (record.get("git") or {}).get("commit")
        return f"commit {commit} made them, and this version has no such run"
    home = _home(scale)
    choices = ROOT.fullmatch(home)
    more = "".join(
        f" {name}={value}"
        for name, value in (choices.groupdict() if choices else {}).items()
        if value and name != "scale"
    )
    target = f"results/{home}/runs/{run}/{stage}/run.json"
    return f"this command makes them: `snakemake --cores all {target} --config scale={record['scale']}{more}`"


def _options(home: str) -> str:
    """The options of `relinear`'s verbs for the results of this name, such as `--scale smollm2 --budget
    0.25`."""
    parts = choices.groupdict() if (choices := ROOT.fullmatch(home)) else {"scale": home}
    return " ".join(f"--{name} {value}" for name, value in parts.items() if value)


def _home(scale: Path) -> str:
    """The name of the results that committed ones were taken from. Raises BrokenError where the manifest
    names none."""
    home = records.read_manifest(scale / MANIFEST).get("scale")
    if not isinstance(home, str) or not re.fullmatch(r"\w[\w.+-]*", home):
        raise BrokenError(f"{scale / MANIFEST} names no scale; got {home!r}")
    return home


def _model(scale: Path, name: str) -> Path:
    """A model of a scale's results; of committed ones, which have its record alone, as made in
    `results/<scale>`. All its files are checked.

    Raises UserError where it is not there, and where its weights are others than the record's.
    """
    own = scale / name
    record = records.read(own)
    if record is None:
        raise UserError(f"the runs of {scale} have lost their model: {own} is not there")
    made = own
    if (scale / MANIFEST).is_file():
        home, model = _home(scale), record["run"]
        made = scale.parents[1] / home / "models" / model
        theirs, record = record, records.read(made)
        if record is None:
            raise UserError(
                f"the model of {scale} is not in {made}; `relinear model {model} {_options(home)}` makes it"
            )
        if _weights(theirs) != _weights(record):
            raise UserError(
                f"{made} is another model than that of {scale}: by their run.json the weights differ"
            )
    for file in record["artefacts"]:
        if wrong := records.difference(made, record, file):
            raise UserError(f"{wrong}; {again(record)}")
    return made


def _weights(record: dict[str, Any]) -> dict[str, str]:
    return {
        name: entry["sha256"] for name, entry in record["artefacts"].items() if name.endswith(".safetensors")
    }
