"""The contract of a stage: the place of its results, the settings of its work, the nodes it reads, the hardware it wants."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Annotated, Any, NamedTuple

from pydantic import Field, computed_field

from relinear import attention
from relinear.errors import UserError
from relinear.get import readers
from relinear.plan.assets import Own
from relinear.plan.options import Definitions, causal_only, option_defaults
from relinear.plan.strict import ConfigError, Positive, Strict


def method_file(method: str) -> Path:
    """The file of a method, `attention/<method>.py`: what it offers is read from it before anything imports torch."""
    return Path(attention.__file__).parent / f"{method}.py"


class Node(NamedTuple):
    """One stage of one thing: of an asset, a model, a text, or a run; `part` names the measure of a measured run."""

    stage: str
    name: str
    part: str = ""

    def __str__(self) -> str:
        return " ".join(word for word in self if word)


class Classes(Strict):
    """The part that examples of one class each have in data.yaml, where a split of its own is the test."""

    validation: Positive  # examples of the training split kept aside, to stop by
    train: Positive | None = None  # so many of the others; None: all that a source has
    test: Annotated[int, Field(ge=2)] | None = None

    @computed_field
    @property
    def scores(self) -> tuple[str, ...]:
        """The scores that are taken."""
        return ("accuracy",)


def train_of(plan, options: Mapping[str, Any]) -> int | None:
    """The examples to train on that a budget makes of an entry's `train`; None: all that there are."""
    return options["train"] and max(round(options["train"] * plan.budget), 1)


def require_pictures(plan, node: Node, why: str, otherwise: str = "") -> None:
    """Raises ConfigError where a run's model does not read pictures. `otherwise`: what is possible beside runs of models that do."""
    if not plan.sees(model := plan.run(node.name).model):
        raise ConfigError(f"{node}: {why}, and {model!r} reads none; possible: {otherwise}runs of {', '.join(filter(plan.sees, plan.models))}")


def require_order(plan, node: Node) -> None:
    """Raises ConfigError where a run's method reads keys in their order, and its model is an encoder, whose keys have none."""
    _, run, model, _ = plan.run(node.name)
    if not plan.models[model].causal and causal_only(method_file(run.method), run.own):
        able = ", ".join(method for method in attention.available() if not causal_only(method_file(method), {}))
        said = f"method {run.method!r}{f' with {run.own}' if run.own else ''}"
        raise ConfigError(f"{node}: {said} reads keys in their order, and {model!r} is an encoder; possible: {able}, without a window")


def require_room(plan, node: Node) -> None:
    """Raises ConfigError where the first positions of a window of a method's bytes may leave no others. How many positions the bytes hold depends on
    the model's heads; at any heads, as many as the method's own layer keeps."""
    run = plan.run(node.name).run
    if (method := run.options.get("bytes_of")) is None:
        return
    least, _ = Definitions(file := method_file(run.method)).HELD[method]
    if (sinks := run.options.get("sinks", option_defaults(file)["sinks"])) >= least:
        raise ConfigError(f"{node}: {sinks} sinks asked for in the bytes of {method!r}, which hold {least} positions or, by a model's heads, more; "
                          f"possible: up to {least - 1} sinks")  # fmt: skip


def require_tokens(plan, node: Node, wanted: int, written: int = 0) -> None:
    """Raises ConfigError where the sources of a text hold fewer tokens to train on than wanted, if each was counted in the model's vocabulary.

    `written`: tokens that the model writes beside them.
    """
    text = plan.text_of(node)
    held = {source: plan.models[text.model].unique.get(source) for source in plan.data[text.data].options["sources"]}
    if "written" in held:
        held["written"] = written
    if None in held.values() or (most := sum(held.values())) >= wanted:
        return
    parts = ", ".join(f"{source} {tokens:,}" for source, tokens in held.items())
    raise ConfigError(f"{node}: {wanted:,} unique tokens to train on asked for; its sources hold {most:,}: {parts}. "
                      f"Possible: a smaller dose or budget, more epochs over fewer tokens, or another source in data.yaml")  # fmt: skip


class Stage:
    """The methods and facts that a file of `stages/` overrides. `plan` is a `relinear.plan.plan.Plan`."""

    help: str = ""  # the help text of its verb
    work: str = ""  # the module with `work(job) -> metrics`, imported by name when the stage runs
    device = False  # True: computes on the scale's device; False: on the CPU
    spread = False  # can be the work of several processes, each with a GPU
    trains = False  # is a step of a run
    tokens = False  # what it makes is in a model's tokens, and its nodes are named `<data>@<model>`
    labelled = False  # the data that it makes have labels (relinear.get.labels)
    pictures = False  # the data that it makes are pictures, as pixels
    torch = True  # its work needs torch
    obtains = False  # its work obtains its assets itself; others are given their folders

    def folder(self, node: Node) -> str:
        """The folder of its results, below the scale's."""
        return f"{node.stage}/{node.name}"

    def settings(self, plan, node: Node) -> dict[str, Any]:
        """The settings of the work as plain data; part of the key."""
        raise NotImplementedError

    def parents(self, plan, node: Node) -> dict[str, Node]:
        """The nodes whose folders the work reads, by role."""
        return {}

    def assets(self, plan, node: Node) -> list[str]:
        """The assets that the work reads from the cache."""
        return []

    def work_of(self, plan, node: Node) -> str:
        """The module with the work of one node, where nodes of this stage differ in it."""
        return self.work

    def modules(self, plan, node: Node) -> list[str]:
        """Entry points of the code that makes the result."""
        return [self.work_of(plan, node)]

    def sequence(self, options: dict[str, Any]) -> int | None:
        """The tokens of each sequence of a kind of data; None for a stream that is cut into sequences of any length."""
        return None

    def seed(self, plan, node: Node) -> int:
        """The seed of its random numbers."""
        return plan.seed

    def raised(self, plan, node: Node) -> float | None:
        """The scale's least learning rate where it is above a rate that the run asks for; None where it changes none."""
        return None

    def check(self, plan, node: Node, processes: int) -> None:
        """Raises ConfigError for settings that cannot work with that many processes."""


class Tokens(Stage):
    """A stage of data in a model's tokens; its nodes are named `<data>@<model>`."""

    tokens = True

    def parents(self, plan, node):
        """The model, which has the tokenizer."""
        return {"model": Node("model", plan.text_of(node).model)}


class Sourced(Tokens):
    """A stage that makes such data of `source`, or of `sources`, in data.yaml."""

    made_here: tuple[str, ...] = ("smoke",)  # sources that are made here and are no assets

    def sources(self, plan, node) -> list[str]:
        """Its sources, the held-out one included."""
        options = plan.data[plan.text_of(node).data].options
        named = options["sources"] if "sources" in options else [options["source"]]
        return [s for s in dict.fromkeys((*named, options.get("heldout_source"))) if s is not None]

    def assets(self, plan, node):
        """The assets of its sources; what is made here is none."""
        return [s for s in self.sources(plan, node) if s not in self.made_here]

    def reader(self, plan, node, source: str) -> str:
        """The file of get/readers that reads a source as a text. Raises UserError where there is none."""
        asset = plan.catalogue.get(source)
        files = asset.files if isinstance(asset, Own) else map(PurePath, asset.holds if asset else ())
        return readers.chosen(source, files, plan.data[plan.text_of(node).data].options.get("reader"))

    def modules(self, plan, node):
        """The work, and the readers of its sources; some kinds of data have readers of their own, in the work."""
        found = []
        for source in self.sources(plan, node):
            with suppress(UserError):
                found.append(f"{readers.__name__}.{self.reader(plan, node, source)}")
        return [self.work_of(plan, node), *dict.fromkeys(found)]
