"""Settings that their own schemas refuse, drawn by hypothesis: a part of the fault campaign (`faults.py`).

What a YAML file below `workflow/` may say is a pydantic model, with its JSON schema. A setting is drawn from
that schema, also one that the file does not give, and gets a value of any shape. Where the schema refuses the
file for it, a plan that takes the file is wrong.
"""

import copy
import functools
import random
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import yaml
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, validators

from relinear import stages
from relinear.plan.assets import Asset
from relinear.plan.catalogue import Data, Measure, Model, Run
from relinear.plan.scale import Scale
from relinear.plan.specs import SHAPES, Paper
from relinear.plan.strict import WORKFLOW
from relinear.stages.measure import Task

# file -> the model of each of its entries
OF_ENTRIES = {"models": Model, "data": Data, "measures": Measure, "assets": Asset, "runs": Run}
# Texts that read as a number or a truth are taken for one, and so is 1 for true: neither is malformed.
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Nd"]), max_size=6).filter(
    lambda text: len(text) != 1
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | TEXT,
    lambda one: st.lists(one, max_size=2) | st.dictionaries(TEXT, one, max_size=2),
    max_leaves=3,
)
LAX = Draft202012Validator.TYPE_CHECKER.redefine(
    "boolean", lambda _, value: isinstance(value, bool) or value in (0, 1)
)
Validator = validators.extend(Draft202012Validator, type_checker=LAX)


class Setting(NamedTuple):
    """A file with a setting changed: which, to what, what the file then holds, and whether its schema refuses
    that."""

    name: Path
    at: str
    value: Any
    tree: dict
    refused: bool


@functools.cache
def read(name: Path) -> dict:
    return yaml.safe_load((WORKFLOW / name).read_text(encoding="utf-8"))


def kind(name: Path) -> str:
    """The kind of a file: models, runs, scales, paper, spec ..."""
    return (
        name.stem
        if name.stem in (*OF_ENTRIES, "paper")
        else "spec"
        if name.parts[0] == "papers"
        else name.parts[0]
    )


def schema_of(name: Path, said: dict) -> dict:
    """The JSON schema of the model of a file's entry, or of the file."""
    models = OF_ENTRIES | {"paper": Paper, "scales": Scale, "tasks": Task}
    return _with_options(models.get(kind(name)) or SHAPES[said.get("draw", "table")], said)


def _with_options(model: type, said: dict) -> dict:
    """A model's schema, and in it those of what other models describe: a stage's budget, the options of
    data."""
    schema = model.model_json_schema()
    if model is Asset:  # its name is that of its entry
        schema["required"].remove("name")
        del schema["properties"]["name"]
    parts = {}
    if model is Scale:
        parts = {("train",): {stage: stages.load(stage).Stage.Budget for stage in said["train"]}}
    if model is Data and said["make"] in stages.makers():
        parts = {(): {"options": stages.data_options(said["make"])}}
    for (*path,), models in parts.items():
        here = schema
        for key in path:
            here = here["properties"][key]
        own = {name: one.model_json_schema() for name, one in models.items()}
        schema.setdefault("$defs", {}).update(
            {k: v for one in own.values() for k, v in one.pop("$defs", {}).items()}
        )
        here["properties"] = here.get("properties", {}) | own
    return schema


def _form(schema: dict, root: dict, value: Any) -> dict:
    """The schema of a value, without references, and of several possible ones the one that fits."""
    while True:
        if "$ref" in schema:
            schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
        elif possible := schema.get("anyOf") or schema.get("oneOf"):
            schema = next(
                (
                    one
                    for one in possible
                    if Validator({**one, "$defs": root.get("$defs", {})}).is_valid(value)
                ),
                possible[0],
            )
        else:
            return schema


def _inside(schema: dict, value: Any) -> dict:
    """The names or places that a value has, or may have, with their schemas."""
    if isinstance(value, dict):
        further = schema.get("additionalProperties")
        more = dict.fromkeys(value, further) if isinstance(further, dict) else {}
        return more | schema.get("properties", {})
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        return dict.fromkeys(range(len(value)), schema["items"])
    return {}


def _errors(root: dict, value: Any) -> set[tuple]:
    """The places of what a schema refuses. Some it refuses is short for what it takes, before a model sees
    it: `without: linear`."""
    return {tuple(error.absolute_path) for error in Validator(root).iter_errors(value)}


@st.composite
def changed(draw: st.DrawFn, names: list[Path]) -> Setting:
    """A file with one setting changed."""
    # these are of seven shapes
    wanted = draw(st.sampled_from([*sorted({kind(name) for name in names}), "spec", "spec", "spec"]))
    name = draw(st.sampled_from([name for name in names if kind(name) == wanted]))
    tree = copy.deepcopy(read(name))
    at = [draw(st.sampled_from(list(tree)))] if wanted in OF_ENTRIES else []
    whole = holder = tree[at[0]] if at else tree
    root = schema = schema_of(name, whole)
    before = _errors(root, whole)
    while True:
        inside = _inside(_form(schema, root, holder), holder)
        key = draw(st.sampled_from(list(inside)))
        at.append(key)
        below = holder[key] if isinstance(holder, list) or key in holder else None
        schema = inside[key]
        if not _inside(_form(schema, root, below), below) or draw(st.booleans()):
            break
        holder = below
    holder[key] = value = draw(VALUES)
    return Setting(name, ".".join(map(str, at)), value, tree, not _errors(root, whole) <= before)


def drawn(names: list[Path], count: int, seed: int = 0) -> list[Setting]:
    """This many files, each with another setting changed; a seed gives the same ones."""
    found: dict[tuple, Setting] = {}

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=2 * count + 1,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(changed(names))
    def collect(setting: Setting) -> None:
        found[setting.name, setting.at, repr(setting.value)] = setting

    collect()
    return random.Random(seed).sample([*found.values()], min(count, len(found)))
